//! Rows S2 and S4 of the contract (docs/compat.md): backends by vendor and name, through the factory; device
//! information and memory.

use crate::machine;
use halcyon::prelude::*;
use halcyon::{BackendType as B, Error};
use halcyon_compat::factory::*;
use halcyon_test::devices::devices;

#[test]
fn s2_01_every_backend_tells_its_device_and_memory() {
    // `contract/prepare.rs` tests the rest of this row, the preparation of models.
    for b in devices("s2_01_every_backend_tells_its_device_and_memory", Level::O1) {
        let d = b.get_device_info(None).unwrap();
        assert_eq!((d.device_id, &d.device_name), (b.info().index, &b.info().name));
        assert_eq!(b.backend_name(), b.info().backend.vendor());
        assert!(d.supported_dtypes.contains(&DType::F32) && b.device_count() > d.device_id);
        let before = b.get_memory_stats().allocated;
        let x = Tensor::from_slice(&b, [50_000], &vec![1.5f32; 50_000]).unwrap();
        assert!(b.get_memory_stats().allocated >= before + 200_000);
        b.synchronize().unwrap();
        drop(x);
        assert_eq!(b.get_memory_stats().allocated, before);
        assert!(b.empty_cache() >= 200_000 && b.get_memory_stats().cached == 0);
    }
}

#[test]
fn s2_02_detection_by_runtime() {
    let best = |m: &[(B, usize)]| {
        let _m = machine::with(m);
        detect_best_runtime().unwrap()
    };
    assert_eq!(best(&[]), "cpu");
    assert_eq!(best(&[(B::Rocm, 1)]), "rocm");
    assert_eq!(best(&[(B::Rocm, 1), (B::Cuda, 1)]), "cuda");
    let _m = machine::with(&[(B::Cuda, 1)]);
    assert_eq!(BackendFactory::create("cuda", None).unwrap().selection().device.id, "cuda:0");
    assert_eq!(BackendFactory::create("xpu", None).unwrap_err().exit_code(), 4);
}

#[test]
fn s2_03_a_backend_made_with_a_level_uses_it() {
    let _m = machine::with(&[]);
    for level in [Level::O0, Level::O1, Level::O2, Level::O3] {
        let b = BackendFactory::create(B::Cpu, Some(BackendConfig { level, ..Default::default() })).unwrap();
        let x = Tensor::ones(&b, [8, 8], DType::F32);
        assert_eq!(((&x + 1.0) * 3.0).relu().to_vec::<f32>().unwrap(), [6.0; 64]);
        let steps = b.cache_stats().steps;
        // At O0 every op is a step. At the other levels, one fused kernel computes all ops.
        assert_eq!(steps > 1, level == Level::O0, "{steps} at {level}");
    }
    assert_eq!("O3".parse::<OptimizationLevel>().unwrap(), Level::O3);
    assert!("O4".parse::<OptimizationLevel>().is_err_and(|e| matches!(e, Error::Argument { .. })));
    assert_eq!("Balanced".parse::<OptimizationLevel>().unwrap(), Level::O2);
}

#[test]
fn s2_04_device_information_with_probed_types() {
    let b = get_backend(Some("cpu"), None).unwrap();
    let d = b.get_device_info(None).unwrap();
    assert_eq!((d.backend, d.device_name.as_str()), ("cpu", b.info().name.as_str()));
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let kib: f64 = text.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(d.total_memory_gb(), Some(kib / 1024.0 / 1024.0));
    }
    assert!(d.available_memory_gb() <= d.total_memory_gb() && d.available_memory_gb() > Some(0.0));
    // The device adds elements of every listed dtype. (`bool` is left out.)
    for t in d.supported_dtypes.iter().filter(|t| **t != DType::Bool) {
        let x = Tensor::ones(&b, [3], *t);
        assert_eq!((&x + &x).to_vec::<f64>().unwrap(), [2.0; 3], "{t}");
    }
    // `fp8_supported` states whether the device multiplies FP8. A device that only stores FP8 does not count.
    let caps = b.device().as_target().caps();
    let fp8 = caps.f8_products.map_or("unknown".into(), |yes: bool| yes.to_string());
    assert_eq!((&d.properties["fp8_supported"], caps.f8_products), (&fp8, Some(false)));
    assert_eq!(d.properties["f16_arithmetic"], caps.f16_arithmetic.to_string());
}

#[test]
fn s2_05_memory_in_megabytes() {
    let c = BackendConfig { memory_limit: Some(64 << 20), ..Default::default() };
    let b = BackendFactory::create("cpu", Some(c)).unwrap();
    assert_eq!((b.get_memory_stats().allocated_mb(), b.get_memory_stats().free_mb()), (0.0, Some(64.0)));
    let x = Tensor::from_slice(&b, [1 << 20], &vec![1.0f32; 1 << 20]).unwrap();
    let m = b.get_memory_stats();
    assert!(m.allocated_mb() >= 4.0 && m.allocated_mb() < 4.6, "{}", m.allocated_mb());
    assert_eq!(m.free_mb(), Some(64.0 - m.allocated_mb()));
    drop(x);
    assert_eq!(b.get_memory_stats().allocated_mb(), 0.0);
}

#[test]
fn s2_06_the_name_alone_switches() {
    let test = "s2_06_the_name_alone_switches";
    let model = |name: &str| {
        let b = BackendFactory::create(name, None).unwrap();
        let x = Tensor::from_slice(&b, [2, 2], &[1.0f32, -2.0, 3.0, 4.0]).unwrap();
        let y = (x.matmul(&x) + 1.0).relu().softmax(1);
        (b.id().to_string(), y.to_vec::<f64>().unwrap())
    };
    let (_, want) = model("cpu");
    for b in devices(test, Level::O1) {
        let (id, got) = model(b.info().backend.id());
        assert_eq!(id, b.id());
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-6), "{id}: {got:?} {want:?}");
    }
}

#[test]
fn s4_01_the_factory_creates_and_tells() {
    let m = machine::with(&[(B::Cuda, 2)]);
    assert_eq!((B::NVIDIA, B::AMD), (B::Cuda, B::Rocm));
    for name in ["nvidia", "NVIDIA", "cuda"] {
        assert_eq!(BackendFactory::create(name, None).unwrap().selection().device.id, "cuda:0");
    }
    let second = BackendConfig { device_id: Some(1), ..Default::default() };
    let b = BackendFactory::create(B::NVIDIA, Some(second)).unwrap();
    assert_eq!(b.selection().device.id, "cuda:1");
    assert!(
        BackendFactory::is_available("nvidia").unwrap() && !BackendFactory::is_available(B::AMD).unwrap()
    );
    assert_eq!(BackendFactory::is_available("nvidiaa").unwrap_err().exit_code(), 2);
    let all = BackendFactory::get_all_backend_info();
    assert!(all["nvidia"].available && all["nvidia"].devices.len() == 2 && all["nvidia"].backend == B::Cuda);
    assert!(!all["amd"].available && all["amd"].reason.as_deref().unwrap().contains("Install the driver"));
    for name in ["tpu", "intel", "cpu", "metal"] {
        assert!(all.contains_key(name), "{name}");
    }
    let json = serde_json::to_value(&all).unwrap();
    assert_eq!((&json["nvidia"]["type"], &json["cpu"]["available"]), (&"cuda".into(), &true.into()));
    let there = list_available_backends();
    assert!(there.contains(&"nvidia") && there.contains(&"cpu") && !there.contains(&"amd"), "{there:?}");
    assert_eq!(
        (get_backend(None, None).unwrap().selection().device.id.as_str(), detect_best_backend().unwrap()),
        ("cuda:0", "nvidia")
    );
    drop(m);
    let _m = machine::with(&[]);
    assert_eq!(detect_best_backend().unwrap(), "cpu");
}

#[test]
fn s4_04_every_backend_answers_the_same_questions() {
    let _m = machine::with(&[]);
    let mut b = get_backend(Some("cpu"), None).unwrap();
    assert_eq!((b.backend_name(), b.device_type(), b.device_count()), ("cpu", "cpu".into(), 1));
    assert!(b.is_available());
    let other = BackendFactory::create("cpu", None).unwrap();
    let x = Tensor::from_slice(&other, [2], &[1.0f32, 2.0]).unwrap();
    let moved = b.to_device(&x).unwrap();
    assert_eq!((moved + b.to_device(&x).unwrap()).to_vec::<f32>().unwrap(), [2.0, 4.0]);
    b.set_device(0).unwrap();
    assert_eq!(b.set_device(7).unwrap_err().exit_code(), 4);
    assert_eq!(b.id(), "cpu:0", "the device stays");
    assert_eq!(b.get_device_info(Some(7)).unwrap_err().exit_code(), 4);
    b.synchronize().unwrap();
    // The guard empties the cache when dropped, also after an error.
    let work = |fail: bool| -> Result<()> {
        let s = b.scope();
        drop(Tensor::from_slice(&s, [100_000], &vec![1.0f32; 100_000])?);
        assert!(s.memory().cached >= 400_000);
        if fail { Err(Error::argument("work", "it fails")) } else { Ok(()) }
    };
    for fail in [false, true] {
        assert_eq!(work(fail).is_err(), fail);
        assert_eq!(b.memory().cached, 0);
    }
}

/// Checking availability must not consume a fault that belongs to the reader of a result.
#[test]
fn s4_04_is_available_leaves_a_fault_to_its_reader() {
    let b = Backend::cpu().unwrap();
    let x = Tensor::from_slice(&b, [4], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    let ids = Tensor::from_slice(&b, [1], &[99i64]).unwrap();
    // The work is submitted, but its result is not read.
    drop(x.gather(&ids, 0).eval_async());
    assert!(b.is_available());
    assert!(b.synchronize().is_err(), "the bad index is still reported");
}

#[test]
fn s4_06_standard_device_information() {
    let _m = machine::with(&[(B::Cuda, 2), (B::Rocm, 1)]);
    let b = BackendFactory::create("nvidia", None).unwrap();
    let d = &b.selection().device;
    assert_eq!(
        (d.backend.id(), d.backend.vendor(), d.torch_device().as_deref()),
        ("cuda", "nvidia", Some("cuda:0"))
    );
    assert_eq!((d.compute_capability.as_deref(), d.driver_version.as_deref()), (Some("9.0"), Some("535.1")));
    assert_eq!((d.total_memory, d.memory_gb()), (Some(25_769_803_776), Some(24.0)));
    let cpu = get_backend(Some("cpu"), None).unwrap();
    let d = cpu.get_device_info(Some(0)).unwrap();
    assert_eq!((d.device_type.as_str(), d.device_id, d.is_available), ("cpu", 0, true));
    let bytes = d.total_memory_bytes.unwrap();
    assert_eq!(d.total_memory_gb(), Some(bytes as f64 / 1024f64.powi(3)));
    assert_eq!(d.total_memory_mb(), Some(bytes as f64 / 1024f64.powi(2)));
    let dict = d.to_dict().unwrap();
    for (key, want) in [
        ("backend", serde_json::json!("cpu")),
        ("device_type", serde_json::json!("cpu")),
        ("device_id", serde_json::json!(0)),
        ("device_name", serde_json::json!(d.device_name)),
        ("compute_capability", serde_json::Value::Null),
        ("total_memory_bytes", serde_json::json!(bytes)),
        ("total_memory_gb", serde_json::json!(bytes as f64 / 1024f64.powi(3))),
    ] {
        assert_eq!(dict[key], want, "{key}");
    }
    assert!(dict["properties"]["simd"].is_string());
}
