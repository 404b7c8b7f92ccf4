//! Stand-ins for hardware: drivers of CUDA, ROCm and Metal whose devices are this machine's CPU, enabled for
//! one test at a time.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]

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
            // The memory belongs to the device alone (on Apple's devices it is unified). How much of it is
            // free is not reported.
            free_memory: None,
            unified_memory: self.kind == BackendType::Metal,
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

/// While this guard lives, the machine has the given devices and no others of the replaced kinds.
pub struct Machine(#[allow(dead_code)] MutexGuard<'static, ()>);

const KINDS: [BackendType; 3] = [BackendType::Cuda, BackendType::Rocm, BackendType::Metal];
/// Kinds whose real drivers other tests in this process use.
const USED: [BackendType; 4] =
    [BackendType::Tpu, BackendType::Intel, BackendType::OpenCl, BackendType::WebGpu];

fn replace(kinds: &[BackendType], devices: impl Fn(BackendType) -> usize) -> Machine {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
    for kind in kinds {
        let devices = AtomicUsize::new(devices(*kind));
        registry::register(Arc::new(StandIn { kind: *kind, devices })).unwrap();
    }
    Machine(guard)
}

/// A machine with the given numbers of devices, and no others of CUDA, ROCm and Metal.
pub fn with(devices: &[(BackendType, usize)]) -> Machine {
    replace(&KINDS, |kind| devices.iter().find(|(k, _)| *k == kind).map_or(0, |(_, n)| *n))
}

/// A machine with one device of each of these kinds, and the CPU. Call it only inside [`alone`], because it
/// replaces every driver but the CPU's.
pub fn exactly(there: &[BackendType]) -> Machine {
    assert!(std::env::var_os(ALONE).is_some(), "other tests of this process use the drivers");
    replace(&[&KINDS[..], &USED].concat(), |kind| usize::from(there.contains(&kind)))
}

const ALONE: &str = "HALCYON_CONTRACT_ALONE";

/// Runs `work` in a process of its own, in which no other test has replaced a driver. The process runs the
/// test with this full name again.
pub fn alone(test: &str, work: impl FnOnce()) {
    if std::env::var(ALONE).is_ok_and(|t| t == test) {
        work();
        println!("\n{}", end(test));
        return;
    }
    alone_with(test, &[]);
}

fn end(test: &str) -> String {
    format!("ran alone: {test}")
}

/// Runs a test again in a process of its own, with these environment variables. In that process the test
/// calls [`alone`].
pub fn alone_with(test: &str, variables: &[(&str, &str)]) {
    let mut c = std::process::Command::new(std::env::current_exe().unwrap());
    c.args([test, "--exact", "--nocapture"]).env(ALONE, test);
    c.env("HALCYON_CONFIG", "off").env_remove("HALCYON_BACKENDS");
    c.envs(variables.iter().copied());
    let o = c.output().unwrap();
    let out = String::from_utf8_lossy(&o.stdout);
    // The line proves that the test was found: an unknown name would run nothing and succeed.
    let ran = o.status.success() && out.lines().any(|l| l == end(test));
    assert!(ran, "{test}, {}: {out}{}", o.status, String::from_utf8_lossy(&o.stderr));
}
