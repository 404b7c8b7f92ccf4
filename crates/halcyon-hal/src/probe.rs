//! Looking for devices safely and quickly, for backends whose libraries are other people's.
//!
//! A driver that is broken can end the process that looks, and a healthy one (PoCL and lavapipe bring a whole compiler) takes tens of
//! milliseconds to load. So the first look is made in a child process where the program offers an executable for it
//! ([`set_executable`]), and a look that went well is remembered on disk under a fingerprint of everything it depends on. While the
//! fingerprint holds, no child is needed, and where all devices were software ones, which are only used when named, the drivers need
//! not be loaded to list them.

use crate::cache::{self, DiskCache};
use crate::child;
use crate::{BackendType, DeviceInfo, Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// How long a child may look for devices.
const PROBE_TIME: Duration = Duration::from_secs(30);

static EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();

/// Names the executable that answers `__probe BACKEND` with [`report`] on its standard output. The first call counts.
pub fn set_executable(exe: PathBuf) {
    let _ = EXECUTABLE.set(exe);
}

/// How the devices of one library are looked for.
#[derive(Debug)]
pub struct Look {
    pub backend: BackendType,
    /// Looks in this process.
    pub here: fn() -> Result<Vec<DeviceInfo>>,
    /// What the answer depends on, below a root directory (`/` outside of tests).
    pub depends: fn(&Path) -> Depends,
    /// What to do where a driver ends the process that looks.
    pub fix: &'static str,
    pub known: Mutex<Known>,
}

/// What this process has found out about a look.
#[derive(Debug)]
pub enum Known {
    Nothing,
    /// It did not end the process that made it: later ones are made here.
    Safe,
    /// It ended the child. It is not tried again.
    Fatal(Error),
}

/// What a list of devices depends on besides the start of the machine, its device nodes and its kernel modules.
#[derive(Debug, Default)]
pub struct Depends {
    /// Libraries: the names count, and of paths the file's size and time.
    pub libraries: Vec<String>,
    /// Files that register drivers, each with the driver's library where the file names one by path.
    pub manifests: Vec<(PathBuf, Option<PathBuf>)>,
    /// Beginnings of the names of variables that steer the libraries.
    pub variables: &'static [&'static str],
}

impl Look {
    /// Devices, by the cheapest way that is safe.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with what was tried, or with the way the child ended where a driver took it down.
    pub fn devices(&self) -> Result<Vec<DeviceInfo>> {
        if std::env::var_os(child::VARIABLE).is_some() {
            return (self.here)();
        }
        let mut known = self.known.lock().unwrap_or_else(|e| e.into_inner());
        match &*known {
            Known::Safe => return (self.here)(),
            Known::Fatal(e) => return Err(e.clone()),
            Known::Nothing => {}
        }
        let memory = cache::user_dir().map(|d| DiskCache::new(d.join("probe"), 1 << 20));
        let key = self.fingerprint(Path::new("/"));
        let (found, now) = self.remembered(memory.as_ref().zip(key), EXECUTABLE.get().map(PathBuf::as_path));
        *known = now;
        found
    }

    /// The remembered devices where they are all software; else a look, in this process where one went well under this key before,
    /// or there is no executable for a child.
    fn remembered(
        &self,
        memory: Option<(&DiskCache, u128)>,
        exe: Option<&Path>,
    ) -> (Result<Vec<DeviceInfo>>, Known) {
        let before: Option<Vec<DeviceInfo>> =
            memory.and_then(|(m, key)| m.get(key)).and_then(|b| serde_json::from_slice(&b).ok());
        if let Some(before) = before {
            return match !before.is_empty() && before.iter().all(|d| d.software) {
                true => (Ok(before), Known::Nothing),
                false => ((self.here)(), Known::Safe),
            };
        }
        let found = match exe.map(|exe| self.via_child(exe)) {
            None => (self.here)(),
            Some(Ok(found)) => found,
            Some(Err(e)) => return (Err(e.clone()), Known::Fatal(e)),
        };
        // No device is worth remembering too: the look does no harm.
        let devices: &[DeviceInfo] = match &found {
            Ok(d) => d,
            Err(Error::Unavailable { .. }) => &[],
            Err(_) => return (found, Known::Safe),
        };
        if let Some((m, key)) = memory
            && let Ok(text) = serde_json::to_vec(devices)
        {
            m.put(key, &text);
        }
        (found, Known::Safe)
    }

    /// The libraries and what is registered with them, each of which may be what ended a child.
    fn loaded(&self) -> Vec<String> {
        let depends = (self.depends)(Path::new("/"));
        let registered = |(file, driver): (PathBuf, Option<PathBuf>)| match driver {
            Some(d) => format!("{}: {}", file.display(), d.display()),
            None => file.display().to_string(),
        };
        depends.libraries.into_iter().chain(depends.manifests.into_iter().map(registered)).collect()
    }

    /// Digest of what the list of devices depends on; `None` on systems where that is not known. Devices come and go with a start of
    /// the machine, a driver's files, its kernel module, device nodes, and variables that filter.
    fn fingerprint(&self, root: &Path) -> Option<u128> {
        if !cfg!(target_os = "linux") {
            return None;
        }
        let at = |p: &str| root.join(p);
        let depends = (self.depends)(root);
        let mut parts: Vec<String> = vec![env!("CARGO_PKG_VERSION").into(), self.backend.id().into()];
        parts.push(std::fs::read_to_string(at("proc/sys/kernel/random/boot_id")).ok()?);
        parts.push(stat(&at("etc/ld.so.cache")));
        for l in &depends.libraries {
            parts.push(l.clone());
            if l.contains('/') {
                parts.push(stat(Path::new(l)));
            }
        }
        for (file, driver) in &depends.manifests {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            parts.extend([file.display().to_string(), text, driver.as_deref().map(stat).unwrap_or_default()]);
        }
        let mut variables: Vec<String> = std::env::vars_os()
            .map(|(k, v)| format!("{}={}", k.to_string_lossy(), v.to_string_lossy()))
            .filter(|v| depends.variables.iter().chain(&["LD_"]).any(|f| v.starts_with(f)))
            .collect();
        variables.sort();
        parts.extend(variables);
        for module in ["nvidia", "amdgpu", "i915", "xe"] {
            let version = at("sys/module").join(module).join("version");
            parts.push(std::fs::read_to_string(version).unwrap_or_default());
        }
        let nodes = entries(&at("dev")).into_iter().filter(|p| {
            let name = p.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("nvidia") || name.starts_with("accel") || name == "kfd"
        });
        parts.extend(entries(&at("dev/dri")).into_iter().chain(nodes).map(|p| p.display().to_string()));
        let bytes: Vec<&[u8]> = parts.iter().map(|p| p.as_bytes()).collect();
        Some(cache::digest(&bytes))
    }

    /// What a child process sees: runs `exe __probe BACKEND`. The inner result is the child's.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with the way it ended where a driver took it down; [`Error::Io`] where it did not start.
    pub fn via_child(&self, exe: &Path) -> Result<Result<Vec<DeviceInfo>>> {
        self.ask(Command::new(exe).args(["__probe", self.backend.id()]), PROBE_TIME)
    }

    fn ask(&self, command: &mut Command, limit: Duration) -> Result<Result<Vec<DeviceInfo>>> {
        let unavailable = |tried: Vec<String>, reason: String, fix: String| Error::Unavailable {
            backend: self.backend.id().into(),
            tried,
            reason,
            fix,
        };
        let fatal = |how: String| {
            let reason = format!("a driver failed while it was looked at: the probing process {how}");
            unavailable(self.loaded(), reason, self.fix.into())
        };
        let done = child::output(command, limit).map_err(|e| Error::Io {
            path: command.get_program().to_string_lossy().into_owned(),
            what: format!("the process that looks for {} devices did not start: {e}", self.backend),
        })?;
        done.end.map_err(fatal)?;
        match done.out.lines().rev().find_map(|l| serde_json::from_str(l).ok()) {
            Some(Report::Devices(d)) => Ok(Ok(d)),
            Some(Report::Unavailable { tried, reason, fix }) => Ok(Err(unavailable(tried, reason, fix))),
            Some(Report::Failed(e)) => Err(fatal(format!("said: {e}"))),
            None => Err(fatal("gave no answer".into())),
        }
    }
}

/// Files of a directory, in order of name.
pub fn entries(dir: &Path) -> Vec<PathBuf> {
    let mut v: Vec<PathBuf> =
        std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    v.sort();
    v
}

/// Size and time of a file; empty where there is none.
fn stat(path: &Path) -> String {
    let Ok(m) = std::fs::metadata(path) else {
        return String::new();
    };
    let time = m.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
    format!("{} {:?}", m.len(), time)
}

/// What a probing child prints: one line of JSON.
#[derive(Serialize, Deserialize)]
enum Report {
    Devices(Vec<DeviceInfo>),
    Unavailable { tried: Vec<String>, reason: String, fix: String },
    Failed(String),
}

/// The answer of a probing child, as one line; `None` for backends that are not looked at in children.
pub fn report(kind: BackendType) -> Option<String> {
    let look = looks().into_iter().find(|l| l.backend == kind)?;
    let report = match (look.here)() {
        Ok(d) => Report::Devices(d),
        Err(Error::Unavailable { tried, reason, fix, .. }) => Report::Unavailable { tried, reason, fix },
        Err(e) => Report::Failed(e.to_string()),
    };
    Some(serde_json::to_string(&report).unwrap_or_else(|e| format!("{{\"Failed\":\"{e}\"}}")))
}

fn looks() -> Vec<&'static Look> {
    vec![
        #[cfg(feature = "opencl")]
        &crate::opencl::LOOK,
        #[cfg(feature = "webgpu")]
        &crate::webgpu::LOOK,
        #[cfg(feature = "cuda")]
        &crate::cuda::LOOK,
        #[cfg(feature = "rocm")]
        &crate::rocm::LOOK,
        #[cfg(feature = "tpu")]
        &crate::tpu::LOOK,
    ]
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// A look that finds what the noop driver lists.
    fn noop() -> Look {
        Look {
            backend: BackendType::Noop,
            here: || crate::Driver::probe(&crate::noop::NoopDriver),
            depends: |root| Depends {
                libraries: vec!["libnoop.so".into(), root.join("libown.so").display().to_string()],
                manifests: entries(&root.join("vendors"))
                    .into_iter()
                    .map(|f| {
                        let driver = std::fs::read_to_string(&f).unwrap_or_default();
                        (f, Some(driver.into()))
                    })
                    .collect(),
                variables: &[],
            },
            fix: "Mend it",
            known: Mutex::new(Known::Nothing),
        }
    }

    /// An executable that runs a script, whatever its arguments.
    fn script(dir: &Path, text: &str) -> PathBuf {
        use std::os::unix::fs::PermissionsExt;
        let path = dir.join(format!("script{}", entries(dir).len()));
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_child_that_dies_hangs_or_says_nothing_is_an_unavailable_backend() {
        let (look, minute) = (noop(), Duration::from_secs(60));
        let shell = |text: &str, limit| look.ask(Command::new("/bin/sh").args(["-c", text]), limit);
        for (text, limit, want) in [
            ("kill -SEGV $$", minute, "signal"),
            ("exit 3", minute, "exit status: 3"),
            ("exec sleep 100", Duration::from_millis(50), "did not end"),
            ("echo nothing of use", minute, "no answer"),
        ] {
            let e = shell(text, limit).unwrap_err();
            assert!(e.exit_code() == 4 && e.to_string().contains(want), "{text}: {e}");
            assert!(e.to_string().contains("libnoop.so") && e.to_string().contains("Mend it"), "{e}");
        }
        let e = look.via_child(Path::new("/nowhere/halcyon")).unwrap_err();
        assert!(e.to_string().contains("/nowhere/halcyon"), "{e}");
        let said = r#"echo '{"Unavailable":{"tried":["x"],"reason":"r","fix":"f"}}'"#;
        let e = shell(said, minute).unwrap().unwrap_err();
        assert!(matches!(e, Error::Unavailable { ref tried, .. } if tried == &["x".to_string()]), "{e}");
    }

    #[test]
    fn a_look_is_remembered_and_only_software_devices_are_listed_from_memory() {
        let dir = tempfile::tempdir().unwrap();
        let m = DiskCache::new(dir.path().join("memory"), 1 << 20);
        let look = noop();
        let software = (look.here)().unwrap();
        assert!(software[0].software);
        let mut hardware = software.clone();
        hardware[0].software = false;
        let saying = |r: Report| {
            script(dir.path(), &format!("cat <<'END'\n{}\nEND", serde_json::to_string(&r).unwrap()))
        };
        let dies = script(dir.path(), "kill -ABRT $$");
        let at = |key, exe: &Path| look.remembered(Some((&m, key)), Some(exe));
        assert!(matches!(at(1, &dies), (Err(_), Known::Fatal(_))), "a driver that ends the process");
        assert!(matches!(at(1, &dies), (Err(_), Known::Fatal(_))), "which is not remembered as harmless");
        let (found, known) = at(1, &saying(Report::Devices(software.clone())));
        assert!(found.unwrap() == software && matches!(known, Known::Safe));
        let (found, known) = at(1, &dies);
        assert!(found.unwrap() == software && matches!(known, Known::Nothing), "from memory");
        assert!(at(2, &dies).0.is_err(), "another fingerprint");
        // With hardware, or where there was nothing, the look is repeated here.
        let nothing = Report::Unavailable { tried: vec![], reason: "none".into(), fix: "none".into() };
        for (key, first) in [(3, Report::Devices(hardware)), (4, nothing)] {
            assert!(matches!(at(key, &saying(first)).1, Known::Safe));
            let (found, known) = at(key, &dies);
            assert!(found.unwrap() == software && matches!(known, Known::Safe), "{key}");
        }
        // Without an executable it is made here at once.
        assert_eq!(look.remembered(None, None).0.unwrap(), software);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_fingerprint_changes_with_drivers_and_device_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let (root, look) = (dir.path(), noop());
        let make = |path: &str, text: &str| {
            let p = root.join(path);
            std::fs::create_dir_all(p.parent().unwrap()).unwrap();
            std::fs::write(p, text).unwrap();
        };
        assert_eq!(look.fingerprint(root), None, "nothing known about this system");
        make("proc/sys/kernel/random/boot_id", "a");
        let mut seen = vec![look.fingerprint(root).unwrap()];
        assert_eq!(look.fingerprint(root).unwrap(), seen[0]);
        let driver = root.join("libdriver.so").display().to_string();
        let steps: [(&str, &str); 8] = [
            ("vendors/a.icd", &driver),
            ("libdriver.so", "first"),
            ("libdriver.so", "second version"),
            ("libown.so", "loaded by its path"),
            ("dev/nvidia0", ""),
            ("dev/dri/renderD128", ""),
            ("sys/module/nvidia/version", "575.1"),
            ("proc/sys/kernel/random/boot_id", "b"),
        ];
        for (path, text) in steps {
            make(path, text);
            let now = look.fingerprint(root).unwrap();
            assert!(!seen.contains(&now), "{path}");
            seen.push(now);
        }
        make("dev/unrelated", "");
        assert_eq!(look.fingerprint(root), seen.last().copied());
        let other = Look { backend: BackendType::Tpu, ..noop() };
        assert_ne!(other.fingerprint(root), seen.last().copied());
    }

    #[test]
    fn a_childs_report_is_what_a_look_here_finds() {
        assert!(report(BackendType::Cpu).is_none());
        for look in looks() {
            let line = report(look.backend).unwrap();
            let there = look
                .ask(Command::new("/bin/sh").args(["-c", &format!("cat <<'END'\n{line}\nEND")]), PROBE_TIME);
            match ((look.here)(), there.unwrap()) {
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
}
