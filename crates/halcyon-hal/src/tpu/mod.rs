//! Tensor processing units, through a PJRT plugin (`libtpu.so`). The plugin is searched for, loaded and
//! queried for its version. Execution is not supported yet, so no devices are listed; the error names the
//! plugin that was found.

// Public for tests; not part of the driver contract.
#[doc(hidden)]
pub mod sys;

use crate::probe::{ProbeDependencies, ProbeSpec, State};
use crate::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result};
use std::sync::{Arc, Mutex};

/// The driver of TPUs.
#[derive(Debug)]
pub struct TpuDriver;

impl Driver for TpuDriver {
    fn kind(&self) -> BackendType {
        BackendType::Tpu
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        PROBE.devices()
    }

    fn open(&self, _index: usize, _options: &Options) -> Result<Arc<dyn Device>> {
        Err(PROBE.devices().err().unwrap_or_else(|| unavailable(vec![], None)))
    }
}

/// The plugin is loaded only in a child process: it can crash its process, and this process has no use for
/// it.
pub static PROBE: ProbeSpec = ProbeSpec {
    backend: BackendType::Tpu,
    list: || Err(search()),
    repeat: false,
    depends: |_| ProbeDependencies {
        libraries: sys::candidates(),
        later: vec![],
        manifests: vec![],
        variables: &["TPU_", "PJRT_", "HALCYON_TPU_", "VIRTUAL_ENV"],
    },
    fix: "Remove the plugin, or name a working one in HALCYON_TPU_LIBRARY",
    state: Mutex::new(State::new()),
};

/// Loads the first usable plugin; the error names what was found.
fn search() -> Error {
    let mut tried = vec![];
    for name in sys::candidates() {
        // SAFETY: a candidate has the file name of a PJRT plugin, or the user named it as one.
        match unsafe { sys::version(&name) } {
            Ok(v) => return unavailable(tried, Some((name, v))),
            Err(why) => tried.push(format!("{name}: {why}")),
        }
    }
    unavailable(tried, None)
}

/// The error of this backend. `tried` lists the plugins that could not be loaded; `found` is the plugin that
/// was loaded, if any.
fn unavailable(mut tried: Vec<String>, found: Option<(String, sys::Version)>) -> Error {
    let backend = BackendType::Tpu.id().to_string();
    match found {
        Some((name, v)) => {
            tried.push(format!("{name}: loaded, PJRT {}.{}", v.major, v.minor));
            Error::Unavailable {
                backend,
                tried,
                reason: "a PJRT plugin was found, but running on TPUs is not supported yet".into(),
                fix: "Use another backend".into(),
            }
        }
        None => Error::Unavailable {
            backend,
            reason: crate::loader::not_loaded("TPU plugin (libtpu)", &tried),
            tried,
            fix: "On a machine with TPUs install libtpu (pip install libtpu) and set TPU_LIBRARY_PATH to its libtpu.so".into(),
        },
    }
}
