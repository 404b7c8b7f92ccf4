//! Device selection with fake drivers: the chosen device and the report.

use halcyon_hal::noop::NoopDriver;
use halcyon_hal::policy::{Fallback, Policy, SetBy};
use halcyon_hal::select::{Request, Selection, open, open_for};
use halcyon_hal::{BackendType, Device, DeviceInfo, Driver, Error, Options, Result, registry};
use std::sync::{Arc, Mutex, MutexGuard};

/// A driver of fake devices, each given by its bytes of memory. `None` is a device that fails to open.
#[derive(Debug)]
struct Fake {
    kind: BackendType,
    software: bool,
    devices: Vec<Option<u64>>,
}

impl Driver for Fake {
    fn kind(&self) -> BackendType {
        self.kind
    }

    fn probe(&self) -> Result<Vec<DeviceInfo>> {
        let like = NoopDriver.probe()?.remove(0);
        let one = |index| DeviceInfo {
            backend: self.kind,
            id: format!("{}:{index}", self.kind),
            index,
            name: format!("Fake {index}"),
            software: self.software,
            ..like.clone()
        };
        Ok((0..self.devices.len()).map(one).collect())
    }

    fn open(&self, index: usize, options: &Options) -> Result<Arc<dyn Device>> {
        match self.devices[index] {
            Some(bytes) => NoopDriver.open(0, &Options { memory_limit: Some(bytes), ..options.clone() }),
            None => Err(Error::Driver {
                device: format!("{}:{index}", self.kind),
                call: "open".into(),
                code: "broken".into(),
                next: "Mend it".into(),
            }),
        }
    }
}

/// Drivers are registered per process, so only one test at a time may use them.
fn machine(fakes: Vec<Fake>) -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    let guard = ONE.lock().unwrap_or_else(|e| e.into_inner());
    for kind in
        [BackendType::Cuda, BackendType::Rocm, BackendType::OpenCl, BackendType::WebGpu, BackendType::Metal]
    {
        registry::register(Arc::new(Fake { kind, software: false, devices: vec![] })).unwrap();
    }
    for f in fakes {
        registry::register(Arc::new(f)).unwrap();
    }
    guard
}

fn fake(kind: BackendType, devices: &[Option<u64>]) -> Fake {
    Fake { kind, software: false, devices: devices.to_vec() }
}

/// Sets the order explicitly, so that this machine's configuration does not matter.
fn request(backend: BackendType, order: &str, fallback: Option<Fallback>, memory: u64) -> Request {
    Request { policy: Some(order.parse().unwrap()), fallback, memory, ..Request::of(backend) }
}

fn choose(r: &Request) -> Result<Selection> {
    open(r, &Options::default()).map(|(_, s)| s)
}

fn rejected<'a>(s: &'a Selection, id: &str) -> &'a str {
    let c = s.candidates.iter().find(|c| c.device.as_deref().unwrap_or(c.backend.id()) == id);
    c.unwrap_or_else(|| panic!("{id} is not in {s}")).rejected.as_deref().unwrap_or("chosen")
}

const GIB: u64 = 1 << 30;

#[test]
fn auto_takes_the_first_that_has_the_memory() {
    let _g = machine(vec![
        fake(BackendType::Cuda, &[Some(GIB), Some(8 * GIB)]),
        fake(BackendType::Rocm, &[Some(16 * GIB)]),
    ]);
    let auto = |memory| choose(&request(BackendType::Auto, "priority", None, memory));
    let s = auto(0).unwrap();
    assert_eq!((s.device.id.as_str(), s.fallback), ("cuda:0", Fallback::Next));
    assert!(s.rule.contains("highest priority (100)"), "{}", s.rule);
    assert!(rejected(&s, "rocm").contains("priority 90 is below cuda:0's 100"), "{s}");
    assert!(rejected(&s, "cuda:1").contains("earlier device"), "{s}");

    let s = auto(2 * GIB).unwrap();
    assert_eq!(s.device.id, "cuda:1");
    let c = &s.candidates[0];
    assert_eq!((c.required, c.free, c.missing), (Some(2 * GIB), Some(GIB), Some(GIB)));
    assert_eq!(auto(9 * GIB).unwrap().device.id, "rocm:0");
}

fn software(kind: BackendType) -> Fake {
    Fake { software: true, ..fake(kind, &[Some(8 * GIB)]) }
}

#[test]
fn a_backend_in_a_list_is_named() {
    let _g = machine(vec![software(BackendType::OpenCl), software(BackendType::WebGpu)]);
    let auto = |order: &str| choose(&request(BackendType::Auto, order, None, 0)).unwrap();
    for (order, want) in [
        ("opencl,cpu", "opencl:0"),
        ("opencl,webgpu", "opencl:0"),
        ("webgpu,opencl,cpu", "webgpu:0"),
        ("cuda,opencl,cpu", "opencl:0"),
        ("cpu,opencl", "cpu:0"),
        // Named orders refer to kinds of devices and name no backend.
        ("priority", "cpu:0"),
        ("inference", "cpu:0"),
    ] {
        let s = auto(order);
        assert_eq!(s.device.id, want, "{order}: {s}");
    }
    assert!(rejected(&auto("priority"), "opencl:0").contains("tried last unless named"));
    // The memory of a software device is checked even if its backend is named.
    let s = choose(&request(BackendType::Auto, "opencl,cpu", None, 9 * GIB));
    assert!(s.is_err() || s.unwrap().device.id == "cpu:0");
    // The backends of a list also count as named if they are the fallback of a missing backend.
    let s = choose(&request(BackendType::Cuda, "opencl,cpu", Some(Fallback::Next), 0)).unwrap();
    assert_eq!(s.device.id, "opencl:0", "{s}");
}

#[test]
fn what_fits_nowhere_is_out_of_memory_with_what_each_lacks() {
    let _g = machine(vec![fake(BackendType::Cuda, &[Some(GIB)]), fake(BackendType::Rocm, &[Some(3 * GIB)])]);
    let e = choose(&request(BackendType::Auto, "cuda,rocm", None, 4 * GIB)).unwrap_err();
    assert_eq!(e.exit_code(), 5);
    let text = e.to_string();
    for part in [format!("lacks {}", 3 * GIB), format!("lacks {GIB}"), format!("has {}", 3 * GIB)] {
        assert!(text.contains(&part), "{part}: {text}");
    }
    let Error::OutOfMemory { requested, free, .. } = e else { panic!("{text}") };
    assert_eq!((requested, free), (4 * GIB, 3 * GIB));
}

#[test]
fn a_named_backend_is_strict_unless_a_fallback_is_asked_for() {
    let _g = machine(vec![
        fake(BackendType::Cuda, &[None]),
        fake(BackendType::Rocm, &[Some(GIB)]),
        fake(BackendType::Metal, &[Some(4 * GIB)]),
    ]);
    let with = |b, f, m| choose(&request(b, "priority", f, m));
    let e = with(BackendType::Cuda, Some(Fallback::Never), 0).unwrap_err();
    assert!(e.to_string().contains("broken"), "{e}");
    let s = with(BackendType::Cuda, Some(Fallback::Next), 0).unwrap();
    assert_eq!(s.device.id, "rocm:0");
    assert!(s.rule.contains("cuda was requested; this is the next one"), "{}", s.rule);
    assert!(rejected(&s, "cuda").contains("broken"), "{s}");
    let s = with(BackendType::Rocm, Some(Fallback::Next), 2 * GIB).unwrap();
    assert_eq!(s.device.id, "metal:0");
    assert_eq!(s.candidates[0].missing, Some(GIB));
    let s = with(BackendType::Cuda, Some(Fallback::Cpu), 0).unwrap();
    assert_eq!(s.device.backend, BackendType::Cpu);
    assert!(s.rule.contains("the CPU is the fallback"), "{}", s.rule);
    // Without a fallback, a missing backend is an error.
    let e = with(BackendType::WebGpu, Some(Fallback::Never), 0).unwrap_err();
    assert_eq!(e.exit_code(), 4, "{e}");
}

#[test]
fn auto_without_fallback_tries_only_the_first_backend() {
    let _g = machine(vec![fake(BackendType::Cuda, &[Some(GIB)]), fake(BackendType::Rocm, &[Some(16 * GIB)])]);
    let r = |f| choose(&request(BackendType::Auto, "priority", Some(f), 2 * GIB));
    assert_eq!(r(Fallback::Next).unwrap().device.id, "rocm:0");
    assert_eq!(r(Fallback::Never).unwrap_err().exit_code(), 5);
    let s = r(Fallback::Cpu).unwrap();
    assert_eq!(s.device.backend, BackendType::Cpu);
    // The first backend is the first that has a device.
    let s = choose(&request(BackendType::Auto, "metal,cuda,cpu", Some(Fallback::Never), 0)).unwrap();
    assert_eq!(s.device.id, "cuda:0");
}

#[test]
fn orders_decide_and_say_so() {
    let _g = machine(vec![fake(BackendType::Cuda, &[Some(GIB)]), fake(BackendType::OpenCl, &[Some(GIB)])]);
    let s = choose(&request(BackendType::Auto, "opencl,cpu", None, 0)).unwrap();
    assert_eq!(s.device.id, "opencl:0");
    assert_eq!((s.policy.name(), &s.policy_by), ("opencl,cpu", &SetBy::Caller));
    assert!(s.rule.contains("the order opencl,cpu (the caller's)"), "{}", s.rule);
    assert!(rejected(&s, "cpu").contains("opencl:0 comes before it"), "{s}");
    assert!(rejected(&s, "cuda").contains("does not contain it"), "{s}");
    let named: Policy = "torchbridge".parse().unwrap();
    let at = |b| named.backends().iter().position(|x| *x == b);
    assert!(at(BackendType::Intel) < at(BackendType::Tpu));
}

#[test]
fn software_devices_come_after_all_others() {
    let software = Fake { kind: BackendType::OpenCl, software: true, devices: vec![Some(GIB)] };
    let _g = machine(vec![software]);
    let s = choose(&request(BackendType::Auto, "inference", None, 0)).unwrap();
    assert_eq!(s.device.backend, BackendType::Cpu);
    assert!(rejected(&s, "opencl:0").contains("tried last unless named"), "{s}");
    let s = choose(&request(BackendType::Auto, "opencl,cuda", None, 0)).unwrap();
    assert_eq!(s.device.id, "opencl:0", "nothing else is in the order");
    let s = choose(&request(BackendType::OpenCl, "priority", None, 0)).unwrap();
    assert_eq!(s.rule, "opencl was requested");
}

#[test]
fn work_that_a_device_refuses_goes_to_the_next() {
    let _g = machine(vec![fake(BackendType::Cuda, &[Some(GIB)]), fake(BackendType::Rocm, &[Some(GIB)])]);
    let mut asked = 0;
    let r = request(BackendType::Auto, "priority", None, 0);
    let (_, s) = open_for(&r, &Options::default(), &mut |_| {
        asked += 1;
        match asked {
            1 => Err(Error::unsupported("f64", "Use f32")),
            _ => Ok(()),
        }
    })
    .unwrap();
    assert_eq!((s.device.id.as_str(), asked), ("rocm:0", 2));
    assert!(rejected(&s, "cuda:0").contains("f64"), "{s}");
    // If all devices refuse the work, the first error is returned.
    let e =
        open_for(&r, &Options::default(), &mut |_| Err(Error::unsupported("f64", "Use f32"))).unwrap_err();
    assert_eq!(e.exit_code(), 3, "{e}");
}

#[test]
fn reports_travel_as_json() {
    let _g = machine(vec![fake(BackendType::Cuda, &[Some(GIB)])]);
    let s = choose(&request(BackendType::Auto, "torchbridge", None, 1)).unwrap();
    let text = serde_json::to_string(&s).unwrap();
    assert_eq!(serde_json::from_str::<Selection>(&text).unwrap(), s);
}
