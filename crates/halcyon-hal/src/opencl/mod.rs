//! OpenCL 1.2 and later, loaded at run time. Kernels come through the IR; there is no vendor library.
//!
//! A registered driver (ICD) that is broken can end the process that looks for devices. A program that has an executable to
//! spare for it sets [`set_probe_executable`], and the first look is then made by a child; see [`probe_via_child`].

pub mod adapter;
pub mod device;
pub mod memory;
pub mod program;
pub mod queue;
pub mod sys;

use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result};
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Set in a child that probes, so that it does not start another.
pub const PROBE_CHILD_VARIABLE: &str = "HALCYON_PROBE_CHILD";

/// How long a child may look for devices.
const PROBE_TIME: Duration = Duration::from_secs(30);

static PROBE_EXECUTABLE: OnceLock<PathBuf> = OnceLock::new();

/// The OpenCL driver.
#[derive(Debug)]
pub struct OpenClDriver;

impl Driver for OpenClDriver {
    fn kind(&self) -> BackendType {
        BackendType::OpenCl
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        // Once one look in this process has gone well, later ones are made here.
        static SAFE: Mutex<bool> = Mutex::new(false);
        let mut safe = SAFE.lock().unwrap_or_else(|e| e.into_inner());
        let child = std::env::var_os(PROBE_CHILD_VARIABLE).is_some();
        match PROBE_EXECUTABLE.get().filter(|_| !child && !*safe) {
            Some(exe) => {
                // Without a library there is nothing that could crash, and no child is needed to say so.
                sys::load()?;
                let found = probe_via_child(exe)?;
                *safe = true;
                Ok(found)
            }
            None => probe_in_process(),
        }
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        let all = adapter::Adapter::all(sys::load()?)?;
        let a = all.get(index).copied().ok_or_else(|| Error::Unavailable {
            backend: "opencl".into(),
            tried: all.iter().map(|a| format!("{} {}", a.id(), a.info().name)).collect(),
            reason: format!("there is no device {index}"),
            fix: format!("Choose one of 0..{}", all.len()),
        })?;
        Ok(Arc::new(device::OpenClDevice::open(a, options)?))
    }
}

/// Devices of the OpenCL library, asked in this process.
///
/// # Errors
/// [`Error::Unavailable`] with what was tried.
pub fn probe_in_process() -> Result<Vec<DeviceInfo>> {
    Ok(adapter::Adapter::all(sys::load()?)?.iter().map(|a| a.info()).collect())
}

/// Names the executable that answers `__probe opencl` with [`probe_report`] on its standard output. The first call counts.
pub fn set_probe_executable(exe: PathBuf) {
    let _ = PROBE_EXECUTABLE.set(exe);
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
        unavailable(sys::candidates(), format!("a driver failed while it was looked at: the probing process {how}"), fix.into())
    };
    command.env(PROBE_CHILD_VARIABLE, "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|e| Error::Io {
        path: command.get_program().to_string_lossy().into_owned(),
        what: format!("the process that looks for OpenCL devices did not start: {e}"),
    })?;
    let pipe = child.stdout.take();
    let reader = std::thread::spawn(move || {
        let mut out = String::new();
        if let Some(mut p) = pipe {
            let _ = p.read_to_string(&mut out);
        }
        out
    });
    let start = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(Some(s)) => break s,
            Ok(None) if start.elapsed() < limit => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(crashed(format!("did not end within {limit:?}")));
            }
            Err(e) => return Err(crashed(format!("could not be waited for ({e})"))),
        }
    };
    let out = reader.join().unwrap_or_default();
    if !status.success() {
        return Err(crashed(format!("ended with {status}")));
    }
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
    fn a_childs_report_is_passed_on() {
        let e = shell(r#"echo '{"Unavailable":{"tried":["x"],"reason":"r","fix":"f"}}'"#, PROBE_TIME).unwrap_err();
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
