//! A backend outside of Halcyon: a single-threaded device that interprets kernel IR and has its own memory.
//!
//! It is small but complete: names, probing, memory with a limit, programs, commands in order, faults,
//! counters and timings. It has no library kernels ([`halcyon_hal::Target::library`] declines everything), so
//! Halcyon generates a kernel for every op. A GPU driver has the same structure, but its modules for programs
//! and memory ([`program`], [`memory`]) call the GPU's library.
//!
//! ```
//! halcyon_interpreter::register()?;
//! let interpreter: halcyon_hal::BackendType = "interpreter".parse()?;
//! assert_eq!(interpreter.id(), "interp");
//! # Ok::<(), halcyon_hal::Error>(())
//! ```
#![forbid(unsafe_code)]

pub mod device;
pub mod memory;
pub mod program;

use halcyon_hal::backend::Row;
use halcyon_hal::host;
use halcyon_hal::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result, registry};
use std::collections::BTreeMap;
use std::sync::Arc;

/// The backend's names. Without a priority, `auto` never chooses it: the interpreter is for inspection, not
/// for speed.
static ROW: Row =
    Row { id: "interp", title: "Interpreter", vendor: "halcyon", priority: None, aliases: &["interpreter"] };

/// The type of this backend.
pub const INTERPRETER: BackendType = BackendType::Other(&ROW);

/// Registers the backend with Halcyon in this process.
///
/// # Errors
/// [`Error::Argument`] if another backend already has one of its names.
pub fn register() -> Result<()> {
    registry::register(Arc::new(InterpreterDriver))
}

/// Finds and opens the device.
#[derive(Debug)]
pub struct InterpreterDriver;

impl Driver for InterpreterDriver {
    fn kind(&self) -> BackendType {
        INTERPRETER
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        Ok(vec![info()])
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        match index {
            0 => Ok(Arc::new(device::Interpreter::new(info(), options)?)),
            _ => Err(Error::Unavailable {
                backend: INTERPRETER.id().into(),
                tried: vec![info().id],
                reason: format!("there is no device {index}"),
                fix: "Use device 0".into(),
            }),
        }
    }
}

/// The device's description. A hardware driver queries its library; unknown values are `None`.
fn info() -> DeviceInfo {
    let memory = host::memory();
    DeviceInfo {
        backend: INTERPRETER,
        id: format!("{INTERPRETER}:0"),
        index: 0,
        name: "Kernel IR interpreter".into(),
        vendor: ROW.vendor.into(),
        driver_version: Some(env!("CARGO_PKG_VERSION").into()),
        total_memory: memory.map(|(_, total)| total),
        free_memory: memory.map(|(free, _)| free),
        compute_capability: None,
        compute_units: Some(1),
        unified_memory: false,
        software: true,
        properties: BTreeMap::new(),
    }
}
