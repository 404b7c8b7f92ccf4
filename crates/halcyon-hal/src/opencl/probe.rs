//! Looking for devices safely and quickly.
//!
//! A registered driver that is broken can end the process that looks, and a healthy one (PoCL brings a whole compiler) takes
//! tens of milliseconds to load. So a look that went well is remembered under a fingerprint of everything it depends on: while
//! the fingerprint holds, no child process is needed, and where all devices were software ones, which are only used when
//! named, the drivers need not be loaded to list them.

use super::{adapter::Adapter, sys};
use crate::cache::{self, DiskCache};
use crate::child;
use crate::{DeviceInfo, Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, UNIX_EPOCH};

/// How long a child may look for devices.
const PROBE_TIME: Duration = Duration::from_secs(30);

static PROBE_EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();

/// Names the executable that answers `__probe opencl` with [`probe_report`] on its standard output. The first call counts.
pub fn set_probe_executable(exe: PathBuf) {
    let _ = PROBE_EXECUTABLE.set(exe);
}

/// Devices of the OpenCL library, by the cheapest way that is safe.
pub(super) fn probe() -> Result<Vec<DeviceInfo>> {
    // Without a library there is nothing that could crash or be remembered.
    let api = sys::load()?;
    if std::env::var_os(child::VARIABLE).is_some() {
        return probe_in_process();
    }
    // Once one look in this process has gone well, later ones are made here.
    static SAFE: Mutex<bool> = Mutex::new(false);
    let mut safe = SAFE.lock().unwrap_or_else(|e| e.into_inner());
    if *safe {
        return probe_in_process();
    }
    let memory = cache::user_dir().map(|d| DiskCache::new(d.join("probe"), 1 << 20));
    let key = fingerprint(Path::new("/"), &api.library);
    let (found, looked) = remembered(memory.as_ref().zip(key), || match PROBE_EXECUTABLE.get() {
        Some(exe) => probe_via_child(exe),
        None => probe_in_process(),
    })?;
    *safe = looked;
    Ok(found)
}

/// The remembered devices where they are all software; else a look, in this process where one went well under this key before,
/// or by `first`. The second value is false where no look was made.
fn remembered(
    memory: Option<(&DiskCache, u128)>,
    first: impl FnOnce() -> Result<Vec<DeviceInfo>>,
) -> Result<(Vec<DeviceInfo>, bool)> {
    let before: Option<Vec<DeviceInfo>> =
        memory.and_then(|(m, key)| m.get(key)).and_then(|b| serde_json::from_slice(&b).ok());
    if let Some(before) = before {
        if !before.is_empty() && before.iter().all(|d| d.software) {
            return Ok((before, false));
        }
        return Ok((probe_in_process()?, true));
    }
    let found = first()?;
    if let Some((m, key)) = memory
        && let Ok(text) = serde_json::to_vec(&found)
    {
        m.put(key, &text);
    }
    Ok((found, true))
}

/// Digest of what the list of devices depends on; `None` on systems where that is not known. Devices come and go with a
/// start of the machine, a driver's files, its kernel module, device nodes, and variables that filter.
fn fingerprint(root: &Path, library: &str) -> Option<u128> {
    if !cfg!(target_os = "linux") {
        return None;
    }
    let at = |p: &str| root.join(p);
    let mut parts: Vec<String> = vec![env!("CARGO_PKG_VERSION").into(), library.into()];
    parts.push(std::fs::read_to_string(at("proc/sys/kernel/random/boot_id")).ok()?);
    parts.push(stat(&at("etc/ld.so.cache")));
    if library.contains('/') {
        parts.push(stat(Path::new(library)));
    }
    const FILTERS: [&str; 9] =
        ["OCL_", "OPENCL_", "POCL_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "GPU_", "LD_"];
    let mut variables: Vec<String> = std::env::vars_os()
        .map(|(k, v)| format!("{}={}", k.to_string_lossy(), v.to_string_lossy()))
        .filter(|v| FILTERS.iter().any(|f| v.starts_with(f)))
        .collect();
    variables.sort();
    parts.extend(variables);
    let mut vendors = vec![at("etc/OpenCL/vendors")];
    for name in ["OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH"] {
        vendors.extend(std::env::var_os(name).map(PathBuf::from));
    }
    for dir in vendors {
        for file in entries(&dir) {
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            parts.extend([file.display().to_string(), stat(Path::new(text.trim())), text]);
        }
    }
    for module in ["nvidia", "amdgpu", "i915", "xe"] {
        parts
            .push(std::fs::read_to_string(at("sys/module").join(module).join("version")).unwrap_or_default());
    }
    let nodes = entries(&at("dev/dri")).into_iter().chain(entries(&at("dev")).into_iter().filter(|p| {
        let name = p.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("nvidia") || name == "kfd"
    }));
    parts.extend(nodes.map(|p| p.display().to_string()));
    let bytes: Vec<&[u8]> = parts.iter().map(|p| p.as_bytes()).collect();
    Some(cache::digest(&bytes))
}

/// Files of a directory, in order of name.
fn entries(dir: &Path) -> Vec<PathBuf> {
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

/// Devices of the OpenCL library, asked in this process.
///
/// # Errors
/// [`Error::Unavailable`] with what was tried.
pub fn probe_in_process() -> Result<Vec<DeviceInfo>> {
    Ok(Adapter::all(sys::load()?)?.iter().map(|a| a.info()).collect())
}

/// What a probing child prints: one line of JSON.
#[derive(Serialize, Deserialize)]
enum Report {
    Devices(Vec<DeviceInfo>),
    Unavailable { tried: Vec<String>, reason: String, fix: String },
    Failed(String),
}

/// The answer of a probing child, as one line.
pub fn probe_report() -> String {
    let report = match probe_in_process() {
        Ok(d) => Report::Devices(d),
        Err(Error::Unavailable { tried, reason, fix, .. }) => Report::Unavailable { tried, reason, fix },
        Err(e) => Report::Failed(e.to_string()),
    };
    serde_json::to_string(&report).unwrap_or_else(|e| format!("{{\"Failed\":\"{e}\"}}"))
}

/// Devices as a child process sees them: runs `exe __probe opencl`.
///
/// # Errors
/// [`Error::Unavailable`] with the child's reason, or with the way it ended where a driver took it down.
pub fn probe_via_child(exe: &Path) -> Result<Vec<DeviceInfo>> {
    probe_command(Command::new(exe).args(["__probe", "opencl"]), PROBE_TIME)
}

fn probe_command(command: &mut Command, limit: Duration) -> Result<Vec<DeviceInfo>> {
    let unavailable = |tried: Vec<String>, reason: String, fix: String| Error::Unavailable {
        backend: "opencl".into(),
        tried,
        reason,
        fix,
    };
    let crashed = |how: String| {
        let fix = "Remove the broken driver (on Linux: the files in /etc/OpenCL/vendors), or set OCL_ICD_VENDORS to a \
                   working one";
        unavailable(
            sys::candidates(),
            format!("a driver failed while it was looked at: the probing process {how}"),
            fix.into(),
        )
    };
    let done = child::output(command, limit).map_err(|e| Error::Io {
        path: command.get_program().to_string_lossy().into_owned(),
        what: format!("the process that looks for OpenCL devices did not start: {e}"),
    })?;
    done.end.map_err(crashed)?;
    let out = done.out;
    match out.lines().rev().find_map(|l| serde_json::from_str(l).ok()) {
        Some(Report::Devices(d)) => Ok(d),
        Some(Report::Unavailable { tried, reason, fix }) => Err(unavailable(tried, reason, fix)),
        Some(Report::Failed(e)) => Err(crashed(format!("said: {e}"))),
        None => Err(crashed("gave no answer".into())),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, limit: Duration) -> Result<Vec<DeviceInfo>> {
        probe_command(Command::new("/bin/sh").args(["-c", script]), limit)
    }

    #[test]
    fn a_child_that_dies_hangs_or_says_nothing_is_an_unavailable_backend() {
        let minute = Duration::from_secs(60);
        for (script, limit, want) in [
            ("kill -SEGV $$", minute, "signal"),
            ("exit 3", minute, "exit status: 3"),
            ("exec sleep 100", Duration::from_millis(50), "did not end"),
            ("echo nothing of use", minute, "no answer"),
        ] {
            let e = shell(script, limit).unwrap_err();
            assert!(e.exit_code() == 4 && e.to_string().contains(want), "{script}: {e}");
        }
        let e = probe_via_child(Path::new("/nowhere/halcyon")).unwrap_err();
        assert!(e.to_string().contains("/nowhere/halcyon"), "{e}");
    }

    #[test]
    fn a_look_is_remembered_and_only_software_devices_are_listed_from_memory() {
        let dir = tempfile::tempdir().unwrap();
        let m = DiskCache::new(dir.path().into(), 1 << 20);
        let noop = crate::noop::NoopDriver;
        let software = crate::Driver::probe(&noop).unwrap();
        assert!(software[0].software);
        let none = || -> Result<Vec<DeviceInfo>> { Err(Error::internal("not remembered")) };
        assert!(remembered(Some((&m, 1)), none).is_err(), "a failure is not kept");
        assert_eq!(remembered(Some((&m, 1)), || Ok(software.clone())).unwrap(), (software.clone(), true));
        assert_eq!(remembered(Some((&m, 1)), none).unwrap(), (software.clone(), false));
        assert!(remembered(Some((&m, 2)), none).is_err(), "another fingerprint");
        // With hardware, the look is repeated here.
        let mut hardware = software;
        hardware[0].software = false;
        remembered(Some((&m, 3)), || Ok(hardware.clone())).unwrap();
        match (remembered(Some((&m, 3)), none), probe_in_process()) {
            (Ok((d, looked)), Ok(here)) => assert!(looked && d == here),
            (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
            (a, b) => panic!("{a:?} {b:?}"),
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_fingerprint_changes_with_drivers_and_device_nodes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let make = |path: &str, text: &str| {
            let p = root.join(path);
            std::fs::create_dir_all(p.parent().unwrap()).unwrap();
            std::fs::write(p, text).unwrap();
        };
        assert_eq!(fingerprint(root, "x"), None, "nothing known about this system");
        make("proc/sys/kernel/random/boot_id", "a");
        let mut seen = vec![fingerprint(root, "x").unwrap()];
        assert_eq!(fingerprint(root, "x").unwrap(), seen[0]);
        let driver = root.join("libdriver.so").display().to_string();
        let steps: [(&str, &str); 7] = [
            ("etc/OpenCL/vendors/a.icd", &driver),
            ("libdriver.so", "first"),
            ("libdriver.so", "second version"),
            ("dev/nvidia0", ""),
            ("dev/dri/renderD128", ""),
            ("sys/module/nvidia/version", "575.1"),
            ("proc/sys/kernel/random/boot_id", "b"),
        ];
        for (path, text) in steps {
            make(path, text);
            let now = fingerprint(root, "x").unwrap();
            assert!(!seen.contains(&now), "{path}");
            seen.push(now);
        }
        make("dev/unrelated", "");
        assert_eq!(fingerprint(root, "x"), seen.last().copied());
        assert_ne!(fingerprint(root, "y"), seen.last().copied());
    }

    #[test]
    fn a_childs_report_is_passed_on() {
        let e = shell(r#"echo '{"Unavailable":{"tried":["x"],"reason":"r","fix":"f"}}'"#, PROBE_TIME)
            .unwrap_err();
        assert!(matches!(e, Error::Unavailable { ref tried, .. } if tried == &["x".to_string()]), "{e}");
        let line = probe_report();
        let here = probe_in_process();
        let there = shell(&format!("cat <<'END'\n{line}\nEND"), PROBE_TIME);
        match (here, there) {
            (Ok(a), Ok(b)) => assert_eq!(a, b),
            (Err(a), Err(b)) => assert_eq!(a.to_string(), b.to_string()),
            (a, b) => panic!("{a:?} {b:?}"),
        }
    }
}
