use super::*;

/// A probe that finds the noop driver's devices.
fn noop() -> ProbeSpec {
    ProbeSpec {
        backend: BackendType::Noop,
        list: || crate::Driver::probe(&crate::noop::NoopDriver),
        repeat: true,
        depends: |root| ProbeDependencies {
            libraries: vec!["libnoop.so".into(), root.join("libown.so").display().to_string()],
            later: vec!["libcompiler.so".into()],
            manifests: entries(&root.join("vendors"))
                .into_iter()
                .map(|f| {
                    let driver = std::fs::read_to_string(&f).unwrap_or_default();
                    (f, Some(driver.into()))
                })
                .collect(),
            variables: &["NOOP_"],
        },
        fix: "Mend it",
        state: Mutex::new(State::new()),
    }
}

/// An executable that runs a script and ignores its arguments.
fn script(dir: &Path, text: &str) -> PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join(format!("script{}", entries(dir).len()));
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    path
}

fn make(root: &Path, path: &str, text: &str) {
    let p = root.join(path);
    std::fs::create_dir_all(p.parent().unwrap()).unwrap();
    std::fs::write(p, text).unwrap();
}

/// An executable that prints an answer with a list of loaded files.
fn saying(dir: &Path, answer: Option<Answer>, loaded: &[&Path]) -> PathBuf {
    let loaded = loaded.iter().map(|p| Seen::of(p.to_path_buf())).collect();
    let text = serde_json::to_string(&ProbeReply { answer, loaded: Some(loaded) }).unwrap();
    script(dir, &format!("cat <<'END'\n{text}\nEND"))
}

#[test]
fn a_child_that_dies_hangs_or_says_nothing_is_an_unavailable_backend() {
    let (spec, minute) = (noop(), Duration::from_secs(60));
    let sh = Program::from(PathBuf::from("/bin/sh"));
    let shell = |text: &str, limit| spec.run_child(&sh, &["-c", text], limit, "");
    for (text, limit, want) in [
        ("kill -SEGV $$", minute, "signal"),
        ("exit 3", minute, "exit status: 3"),
        ("exec sleep 100", Duration::from_millis(50), "did not end"),
        ("echo nothing of use", minute, "no answer"),
        (r#"echo '{"answer":{"Failed":"x"},"loaded":null}'"#, minute, "said: x"),
    ] {
        let e = shell(text, limit).unwrap_err();
        assert!(e.exit_code() == 4 && e.to_string().contains(want), "{text}: {e}");
        assert!(e.to_string().contains("libnoop.so") && e.to_string().contains("Mend it"), "{e}");
    }
    let e = spec.via_child(&PathBuf::from("/nowhere/halcyon").into()).unwrap_err();
    assert!(e.to_string().contains("/nowhere/halcyon"), "{e}");
    let said = r#"echo '{"answer":{"Unavailable":{"tried":["x"],"reason":"r","fix":"f"}},"loaded":[]}'"#;
    let e = spec.result(shell(said, minute).unwrap().answer.unwrap()).unwrap_err();
    assert!(matches!(e, Error::Unavailable { ref tried, .. } if tried == &["x".to_string()]), "{e}");
}

#[test]
fn an_interpreter_that_cannot_run_the_program_is_not_a_failure_of_the_driver() {
    let spec = noop();
    let run = |text: &str| {
        let arguments = ["-c", text, "sh"].map(Into::into).into();
        spec.via_child(&Program { executable: "/bin/sh".into(), arguments })
    };
    let e = run("exit 7").unwrap_err();
    assert!(matches!(e, Error::Io { .. }) && e.to_string().contains("exit status: 7"), "{e}");
    // It works without the driver.
    let e = run(r#"test "$1" = --version || exit 7"#).unwrap_err();
    assert!(matches!(e, Error::Unavailable { .. }) && e.to_string().contains("exit status: 7"), "{e}");
}

/// A simulated machine whose files are in a temporary directory, and a cache of its probes.
struct World {
    dir: tempfile::TempDir,
    memory: DiskCache,
    dies: PathBuf,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        make(dir.path(), "root/proc/sys/kernel/random/boot_id", "a");
        let scripts = dir.path().join("scripts");
        std::fs::create_dir(&scripts).unwrap();
        World {
            memory: DiskCache::new(dir.path().join("memory"), 1 << 20),
            dies: script(&scripts, "kill -ABRT $$"),
            dir,
        }
    }

    fn saying(&self, answer: Answer, loaded: &[&Path]) -> PathBuf {
        saying(&self.dir.path().join("scripts"), Some(answer), loaded)
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn find(&self, exe: &Path) -> (Result<Vec<DeviceInfo>>, CachedProbe) {
        noop().find(Some(&self.memory), &self.root(), &exe.to_path_buf().into(), &mut None)
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_probe_is_remembered_and_only_software_devices_are_listed_from_the_record() {
    let software = (noop().list)().unwrap();
    assert!(software[0].software);
    let mut hardware = software.clone();
    hardware[0].software = false;
    hardware[0].name = "hard".into();

    let w = World::new();
    make(&w.root(), "lib/liba.so", "a");
    let lib = w.root().join("lib/liba.so");
    let (found, known) = w.find(&w.saying(Answer::Devices(software.clone()), &[&lib]));
    assert!(found.unwrap() == software && matches!(known, CachedProbe::Safe));
    let (found, known) = w.find(&w.dies);
    assert!(found.unwrap() == software && matches!(known, CachedProbe::Nothing), "from the record");
    // A loaded library was replaced: the record is invalid.
    std::fs::write(&lib, "b").unwrap();
    assert!(matches!(w.find(&w.dies), (Err(_), CachedProbe::Answer(_))), "a child was started");

    // With a hardware device the probe is repeated in this process.
    let w = World::new();
    make(&w.root(), "lib/liba.so", "a");
    let lib = w.root().join("lib/liba.so");
    assert!(matches!(w.find(&w.saying(Answer::Devices(hardware), &[&lib])).1, CachedProbe::Safe));
    let (found, known) = w.find(&w.dies);
    assert!(found.unwrap() == software && matches!(known, CachedProbe::Safe));
    // If a child found no device, no driver is loaded in this process to confirm that.
    let nothing = || Answer::Unavailable { tried: vec![], reason: "none".into(), fix: "none".into() };
    for loaded in [&[][..], &[&*lib]] {
        let w = World::new();
        assert!(w.find(&w.saying(nothing(), loaded)).0.is_err());
        let (found, known) = w.find(&w.dies);
        assert!(found.unwrap_err().to_string().contains("none") && matches!(known, CachedProbe::Nothing));
        // On a machine with a device node, a driver that was loaded may find a device later. So if a driver
        // was loaded, the record is not used, and another child is started.
        make(&w.root(), "dev/nvidia0", "");
        assert!(w.find(&w.saying(nothing(), loaded)).0.is_err());
        let (found, _) = w.find(&w.dies);
        assert_eq!(found.unwrap_err().to_string().contains("signal"), !loaded.is_empty());
    }
    // A probe with `repeat: false` uses the child's answer, whatever was loaded.
    let never = ProbeSpec { list: || panic!("not here"), repeat: false, ..noop() };
    let find = |exe: &Path| never.find(None, &w.root(), &exe.to_path_buf().into(), &mut None);
    let (found, known) = find(&w.saying(nothing(), &[&lib]));
    assert!(found.is_err() && matches!(known, CachedProbe::Answer(Err(_))));
}

#[test]
#[cfg(target_os = "linux")]
fn a_crash_is_remembered_until_a_dependency_changes() {
    let w = World::new();
    let software = (noop().list)().unwrap();
    let well = w.saying(Answer::Devices(software.clone()), &[]);
    let said = |exe: &Path| w.find(exe).0.unwrap_err().to_string();
    assert!(said(&w.dies).contains("signal"));
    // No child is started, not even one that would succeed.
    let e = said(&well);
    assert!(e.contains("signal") && e.contains("halcyon devices --refresh"), "{e}");
    make(&w.root(), "usr/lib/libnoop.so", "another one");
    assert_eq!(w.find(&well).0.unwrap(), software);
    // After a day a child is started again.
    let mut old = Record::of(Outcome::Fatal("it crashed".into()), vec![]);
    assert!(old.holds());
    old.at -= FAILURE_LIFETIME.as_secs() + 1;
    assert!(!old.holds());
    old.at += 2 * FAILURE_LIFETIME.as_secs() + 100;
    assert!(!old.holds(), "the record is from the future");
}

#[test]
#[cfg(target_os = "linux")]
fn a_child_opens_a_device_first_and_the_result_is_remembered() {
    let w = World::new();
    let open = |spec: &ProbeSpec, exe: &Path| {
        let program = exe.to_path_buf().into();
        spec.try_open(BackendType::Noop, 0, Some(&w.memory), &w.root(), &program)
    };
    let well = saying(&w.dir.path().join("scripts"), None, &[]);
    // Without a stored probe, the results of openings are remembered only in this process.
    let spec = noop();
    open(&spec, &well).unwrap();
    open(&spec, &w.dies).unwrap();
    assert!(open(&noop(), &w.dies).unwrap_err().to_string().contains("opening noop:0: "));
    w.find(&w.saying(Answer::Devices((noop().list)().unwrap()), &[])).0.unwrap();
    open(&noop(), &well).unwrap();
    open(&noop(), &w.dies).unwrap();
    // A new compiler library invalidates all records.
    make(&w.root(), "lib64/libcompiler.so", "x");
    w.find(&w.saying(Answer::Devices((noop().list)().unwrap()), &[])).0.unwrap();
    for exe in [&w.dies, &well] {
        let e = open(&noop(), exe).unwrap_err();
        assert!(e.exit_code() == 4 && e.to_string().contains("signal"), "{e}");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_key_changes_with_drivers_libraries_and_device_nodes() {
    let dir = tempfile::tempdir().unwrap();
    let (root, spec) = (dir.path(), noop());
    assert!(!spec.key(root).whole, "nothing is known about this system");
    make(root, "proc/sys/kernel/random/boot_id", "a");
    let mut seen = vec![spec.key(root)];
    assert!(spec.key(root) == seen[0] && seen[0].whole);
    let driver = root.join("libdriver.so").display().to_string();
    let cached = root.join("opt/libnoop.so").display().to_string();
    let steps: [(&str, &str); 15] = [
        ("vendors/a.icd", &driver),
        ("libdriver.so", "first"),
        ("libdriver.so", "second version"),
        ("vendors/b.icd", "libbare.so"),
        ("libown.so", "loaded by its path"),
        ("usr/lib/libbare.so", "found by its name"),
        ("usr/lib/libbare.so", "found by its name, changed"),
        ("usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v3/libnoop.so", "for this processor"),
        ("etc/ld.so.cache", &format!("head\0libnoop.so\0{cached}\0")),
        ("opt/libnoop.so", "in the loader's cache"),
        ("lib/another.so", "a library that one of them may need"),
        ("dev/nvidia0", ""),
        ("dev/dri/renderD128", ""),
        ("sys/module/nvidia/version", "575.1"),
        ("proc/sys/kernel/random/boot_id", "b"),
    ];
    for (path, text) in steps {
        make(root, path, text);
        let now = spec.key(root);
        assert!(!seen.contains(&now), "{path}");
        seen.push(now);
    }
    make(root, "dev/unrelated", "");
    make(root, "home/unrelated", "");
    assert_eq!(Some(&spec.key(root)), seen.last());
    let other = ProbeSpec { backend: BackendType::Tpu, ..noop() };
    assert_ne!(Some(&other.key(root)), seen.last());
}

#[test]
fn a_childs_probe_equals_a_probe_in_this_process() {
    assert!(report(BackendType::Cpu).is_none());
    let sh = Program::from(PathBuf::from("/bin/sh"));
    for spec in probes() {
        let line = report(spec.backend).unwrap();
        let there = spec.run_child(&sh, &["-c", &format!("cat <<'END'\n{line}\nEND")], PROBE_TIME, "");
        match ((spec.list)(), spec.result(there.unwrap().answer.unwrap())) {
            (Ok(a), Ok(b)) => {
                let ids = |v: &[DeviceInfo]| -> Vec<_> {
                    v.iter().map(|d| (d.id.clone(), d.name.clone(), d.properties.clone())).collect()
                };
                assert_eq!(ids(&a), ids(&b));
            }
            (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
            (a, b) => panic!("{a:?} {b:?}"),
        }
    }
}
