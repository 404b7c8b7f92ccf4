//! Tests that every option of a backend, on every kind of device, takes effect, is rejected with a typed
//! error, or causes a warning.

use super::Held;
use halcyon::ir::plan::StepWork;
use halcyon::ir::{DType, Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{AmpPolicy, BackendBuilder, Error, MatmulPrecision, MemoryPoolConfig, TuningMode};
use halcyon_test::devices::devices;

/// The effect of an option on a device.
enum Does {
    Acts(fn(&Backend) -> bool),
    /// Causes only this warning.
    Warns(&'static str),
    /// Is rejected with this text in the error.
    Refuses(&'static str),
    /// Requests something that the device does anyway.
    Holds,
}
use Does::*;

type Set = fn(BackendBuilder) -> BackendBuilder;
type Case = fn(BackendType, &Backend) -> Does;

fn matrix_units(b: &Backend) -> usize {
    b.device().as_target().caps().matrix.len()
}

fn bf16_is_faster(b: &Backend) -> bool {
    b.info().properties.get("bf16_products").is_some_and(|c| c != "f32")
}

const OPTIONS: &[(&str, Set, Case)] = &[
    (
        "num_threads",
        |b| b.num_threads(2),
        |k, _| match k {
            BackendType::Cpu => Acts(|b| b.info().properties["threads"] == "2"),
            _ => Warns("num_threads"),
        },
    ),
    ("no threads", |b| b.num_threads(0), |_, _| Refuses("at least one thread")),
    (
        "enable_simd",
        |b| b.enable_simd(false),
        |k, _| match k {
            BackendType::Cpu => {
                Acts(|b| ["portable", "neon"].contains(&b.info().properties["simd"].as_str()))
            }
            _ => Warns("enable_simd"),
        },
    ),
    (
        "precision high",
        |b| b.precision(MatmulPrecision::High),
        |k, _| match k {
            BackendType::Cuda => Acts(|b| b.lower_options().precision == MatmulPrecision::High),
            _ => Warns("matmul precision high"),
        },
    ),
    (
        "precision medium",
        |b| b.precision(MatmulPrecision::Medium),
        |k, plain| match k {
            BackendType::Cuda => Acts(|b| b.lower_options().precision == MatmulPrecision::Medium),
            BackendType::Cpu if bf16_is_faster(plain) => Acts(|b| b.precision() == MatmulPrecision::Medium),
            _ => Warns("matmul precision medium"),
        },
    ),
    ("precision at O1", |b| b.level(Level::O1).precision(MatmulPrecision::High), |_, _| Warns("level O2")),
    (
        "tensor cores",
        |b| b.enable_tensor_cores(true),
        |k, plain| match k {
            BackendType::Cuda => Acts(|b| b.precision() == MatmulPrecision::High),
            BackendType::Cpu if bf16_is_faster(plain) => Acts(|b| b.precision() == MatmulPrecision::Medium),
            _ => Warns("enable_tensor_cores(true)"),
        },
    ),
    (
        "no tensor cores",
        |b| b.enable_tensor_cores(false),
        |k, plain| match k {
            BackendType::Cuda | BackendType::Rocm => Acts(|b| matrix_units(b) == 0),
            BackendType::Cpu if plain.info().properties["bf16_products"].starts_with("amx") => {
                Warns("tile registers")
            }
            _ => Holds,
        },
    ),
    (
        "no tensor cores but TF32",
        |b| b.enable_tensor_cores(false).precision(MatmulPrecision::High),
        |_, _| Refuses("enable_tensor_cores"),
    ),
    (
        "cudnn",
        |b| b.enable_cudnn(true),
        |k, _| match k {
            BackendType::Cuda => Acts(|b| b.info().properties.contains_key("cudnn")),
            _ => Refuses("cuDNN"),
        },
    ),
    ("no cudnn", |b| b.enable_cudnn(false), |_, _| Holds),
    (
        "keep_packed",
        |b| b.keep_packed(true).cache_dir(env!("CARGO_TARGET_TMPDIR")),
        |k, _| match k {
            // `packed.rs` tests the files that this option writes.
            BackendType::Cpu => Holds,
            _ => Warns("keep_packed"),
        },
    ),
    (
        "algorithm search",
        |b| b.enable_algorithm_search(true),
        |k, _| match k {
            BackendType::Cuda | BackendType::Rocm => Acts(Backend::searches_algorithms),
            _ => Warns("enable_algorithm_search"),
        },
    ),
    (
        "algorithm search without tuning",
        |b| {
            let file = concat!(env!("CARGO_TARGET_TMPDIR"), "/algorithms.json");
            b.enable_algorithm_search(true).tuning(TuningMode::Off).autotuning_cache_file(file)
        },
        |k, _| match k {
            BackendType::Cuda | BackendType::Rocm => Acts(Backend::searches_algorithms),
            _ => Warns("enable_algorithm_search"),
        },
    ),
    (
        "algorithm search at O1",
        |b| b.level(Level::O1).enable_algorithm_search(true),
        |_, _| Warns("enable_algorithm_search"),
    ),
    ("no algorithm search", |b| b.enable_algorithm_search(false), |_, _| Holds),
    ("memory_limit", |b| b.memory_limit(1 << 24), |_, _| Acts(|b| b.memory().limit == Some(1 << 24))),
    (
        "memory_pool",
        |b| {
            b.memory_pool(MemoryPoolConfig {
                initial_size: 1 << 20,
                strategy: halcyon::AllocationStrategy::BestFit,
                ..MemoryPoolConfig::default()
            })
        },
        |_, _| Acts(|b| b.memory().reserved >= 1 << 20),
    ),
    (
        "host_limit",
        |b| b.host_limit(1 << 16),
        |k, _| match k {
            BackendType::WebGpu | BackendType::Metal => Warns("host_limit"),
            _ => Acts(|b| b.alloc_host(1 << 12).is_ok() && b.alloc_host(1 << 20).is_err()),
        },
    ),
    ("memory_needed", |b| b.memory_needed(1 << 60), |_, _| Refuses("the caller needs")),
    ("mixed precision at O1", |b| b.level(Level::O1).amp(AmpPolicy::Bf16), |_, _| Warns("level O2")),
    ("forced bf16", |b| b.amp(AmpPolicy::Bf16).force_amp(true), |_, _| Acts(|b| b.amp() == AmpPolicy::Bf16)),
    ("f16", |b| b.amp(AmpPolicy::F16).force_amp(true), |_, _| Acts(|b| b.amp() == AmpPolicy::F16)),
    ("a scale of 0", |b| b.loss_scale(0.0), |_, _| Refuses("not a positive number")),
    ("force alone", |b| b.amp(AmpPolicy::None).force_amp(true), |_, _| Refuses("force_amp")),
    ("tuning at O1", |b| b.level(Level::O1).tuning(TuningMode::Background), |_, _| Warns("tuned kernels")),
    (
        "a tuning cache without tuning",
        |b| b.tuning(TuningMode::Off).autotuning_cache_file("nothing.json"),
        |_, _| Warns("--tuning-cache"),
    ),
    ("without an unknown", |b| b.without("luck"), |_, _| Refuses("\"luck\" is not a transformation")),
    ("an order beside a name", |b| b.policy("cuda,cpu".parse().unwrap()), |_, _| Warns("--backends")),
    ("device", |b| b.device(99), |_, _| Refuses("99")),
];

fn check(kind: BackendType) {
    // No environment variable or configuration file may change a setting here.
    let open = |set: Set| set(Backend::builder().backend_type(kind).level(Level::O2)).build();
    let plain = open(|b| b.amp(AmpPolicy::None)).unwrap();
    assert!(plain.warnings().is_empty(), "{kind}: {:?}", plain.warnings());
    for (name, set, case) in OPTIONS {
        let (at, got) = (format!("{name} on {kind}"), open(*set));
        match (case(kind, &plain), got) {
            (Acts(seen), Ok(b)) => {
                assert!(b.warnings().is_empty(), "{at}: {:?}", b.warnings());
                assert!(seen(&b), "{at}: the option has no effect");
            }
            (Holds, Ok(b)) => assert!(b.warnings().is_empty(), "{at}: {:?}", b.warnings()),
            (Warns(text), Ok(b)) => {
                let w = b.warnings();
                assert!(w.len() == 1 && w[0].contains(text) && w[0].contains(b.id()), "{at}: {w:?}");
            }
            (Refuses(text), Err(e)) => {
                assert!(e.to_string().contains(text) && e.exit_code() >= 2, "{at}: {e}")
            }
            (_, Ok(b)) => panic!("{at}: the device opens, with the warnings {:?}", b.warnings()),
            (_, Err(e)) => panic!("{at}: {e}"),
        }
    }
}

#[test]
fn every_option_acts_is_refused_or_warns_here() {
    for b in devices("every option on this machine's devices", Level::O2) {
        check(b.info().backend);
    }
}

#[test]
fn every_option_acts_is_refused_or_warns_on_cuda() {
    let Some(_held) = Held::new(BackendType::Cuda) else { return };
    check(BackendType::Cuda);
}

#[test]
fn every_option_acts_is_refused_or_warns_on_rocm() {
    let Some(_held) = Held::new(BackendType::Rocm) else { return };
    check(BackendType::Rocm);
}

/// Kernels of a product in `dtype`, and whether any of them uses matrix units.
fn product(b: &Backend, dtype: DType) -> (Vec<String>, bool) {
    let mut g = Graph::new();
    let [x, y] = ["x", "y"].map(|n| g.input(n, TensorType::new(dtype, [128usize, 128])));
    let z = g.matmul(x, y).unwrap();
    g.output("z", z);
    let plan = halcyon::ir::lower::lower(&g, b.device().as_target(), &b.lower_options()).unwrap();
    let mut names = vec![];
    let mut units = false;
    for s in &plan.steps {
        match &s.work {
            StepWork::Library(k) => names.push(k.name().to_string()),
            StepWork::Kernel { kernel, .. } => {
                names.push("generated".into());
                units |= !kernel.fragments.is_empty();
            }
            _ => {}
        }
    }
    (names, units)
}

#[test]
fn without_tensor_cores_halves_are_multiplied_by_plain_kernels() {
    for kind in [BackendType::Cuda, BackendType::Rocm] {
        let Some(_held) = Held::new(kind) else { return };
        let open = |on: bool| {
            Backend::builder().backend_type(kind).level(Level::O2).enable_tensor_cores(on).build().unwrap()
        };
        for dtype in [DType::BF16, DType::F16] {
            let (names, _) = product(&open(true), dtype);
            assert!(
                names.iter().all(|n| n != "generated"),
                "{kind} {dtype}: the library multiplies: {names:?}"
            );
            assert_eq!(product(&open(false), dtype), (vec!["generated".into()], false), "{kind} {dtype}");
        }
        // CUDA's library multiplies f32 without matrix units; ROCm's does not report whether it uses them.
        let (names, _) = product(&open(false), DType::F32);
        assert_eq!(names.iter().any(|n| n == "generated"), kind == BackendType::Rocm, "{names:?}");
    }
}

/// Another process fills the device's memory. Only the driver can report this, so every check whether a plan
/// fits must query the driver.
#[test]
fn a_card_that_another_process_has_filled_is_refused() {
    for kind in [BackendType::Cuda, BackendType::Rocm] {
        let Some(h) = Held::new(kind) else { return };
        let builder = || Backend::builder().backend_type(kind).level(Level::O1);
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [512usize, 512]));
        let y = g.exp(x).unwrap();
        let y = g.matmul(y, x).unwrap();
        g.output("y", y);
        let bytes = [4 * 512 * 512];
        let b = builder().build().unwrap();
        b.lower_to_fit(&g, &bytes).unwrap();
        drop(builder().memory_needed(8 << 20).build().unwrap());
        let free = b.device().free_memory().unwrap();
        h.s.set("others", (free - (2 << 20)) as i64);
        let full = |e: Error| {
            assert!(matches!(e, Error::OutOfMemory { free, .. } if free <= 2 << 20), "{kind}: {e}");
        };
        full(b.lower_to_fit(&g, &bytes).unwrap_err());
        full(builder().memory_needed(8 << 20).build().unwrap_err());
        full(builder().build_for(&g, &bytes).unwrap_err());
        h.s.set("others", 0);
        b.lower_to_fit(&g, &bytes).unwrap();
        drop(b);
        h.settled();
    }
}
