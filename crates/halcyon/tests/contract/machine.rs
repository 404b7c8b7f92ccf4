//! Stand-ins for hardware that is not here: drivers of CUDA, ROCm and Metal whose devices are this CPU, switched on for one test at
//! a time.

use halcyon::hal::{Device, DeviceInfo, Driver, Options, registry};
use halcyon::{BackendType, Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

#[derive(Debug)]
struct StandIn {
    kind: BackendType,
    devices: AtomicUsize,
}

impl Driver for StandIn {
    fn kind(&self) -> BackendType {
        self.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let n = self.devices.load(Ordering::SeqCst);
        if n == 0 {
            return Err(Error::Unavailable {
                backend: self.kind.id().into(),
                tried: vec!["lib.so".into()],
                reason: "the library is not there".into(),
                fix: "Install the driver".into(),
            });
        }
        let cpu = registry::driver(BackendType::Cpu)?.probe()?.remove(0);
        let one = |index| DeviceInfo {
            backend: self.kind,
            id: format!("{}:{index}", self.kind),
            index,
            name: format!("Stand-in {index}"),
            compute_capability: Some("9.0".into()),
            driver_version: Some("535.1".into()),
            total_memory: Some(24 << 30),
            free_memory: Some(20 << 30),
            ..cpu.clone()
        };
        Ok((0..n).map(one).collect())
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        self.probe()?;
        assert!(index < self.devices.load(Ordering::SeqCst));
        registry::driver(BackendType::Cpu)?.open(0, options)
    }
}

/// As long as it lives, the machine has these devices and no others of CUDA, ROCm and Metal.
pub struct Machine(#[allow(dead_code)] MutexGuard<'static, ()>);

const KINDS: [BackendType; 3] = [BackendType::Cuda, BackendType::Rocm, BackendType::Metal];

/// A machine with so many devices of each of these kinds.
pub fn with(devices: &[(BackendType, usize)]) -> Machine {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
    for kind in KINDS {
        let n = devices.iter().find(|(k, _)| *k == kind).map_or(0, |(_, n)| *n);
        registry::register(Arc::new(StandIn { kind, devices: AtomicUsize::new(n) })).unwrap();
    }
    Machine(guard)
}
