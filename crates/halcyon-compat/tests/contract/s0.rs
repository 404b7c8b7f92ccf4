//! Tests of the contract's rows S0: device selection and settings for training.

use crate::machine;
use halcyon::{BackendType as B, DType, Error, MatmulPrecision};
use halcyon_compat::training::*;
use halcyon_compat::{BackendError, BackendErrorKind as Kind};

fn kind(e: BackendError) -> Kind {
    assert!(e.error().exit_code() != 1, "{e}");
    e.kind()
}

#[test]
fn s0_01_auto_is_cuda_then_rocm_then_metal_then_cpu() {
    let auto = |m: &[(B, usize)]| {
        let _m = machine::with(m);
        let d = resolve_device("auto").unwrap();
        assert_eq!(resolve_device("AUTO").unwrap().id, d.id, "the case of a name does not matter");
        (d.id.clone(), d.torch_device().unwrap())
    };
    let is = |id: &str, torch: &str| (id.to_string(), torch.to_string());
    assert_eq!(auto(&[(B::Metal, 1), (B::Cuda, 2)]), is("cuda:0", "cuda:0"));
    assert_eq!(auto(&[(B::Metal, 1), (B::Rocm, 1)]), is("rocm:0", "cuda:0"));
    assert_eq!(auto(&[(B::Rocm, 2), (B::Cuda, 1)]), is("cuda:0", "cuda:0"));
    assert_eq!(auto(&[(B::Metal, 1)]), is("metal:0", "mps"));
    assert_eq!(auto(&[]), is("cpu:0", "cpu"));
    let _m = machine::with(&[(B::Rocm, 1)]);
    // A ROCm device has two names: Halcyon's `rocm:0` and PyTorch's `cuda:0`.
    let d = resolve_device("rocm").unwrap();
    assert_eq!((d.id.as_str(), d.torch_device().as_deref()), ("rocm:0", Some("cuda:0")));
    assert_eq!(resolve_device("cpu").unwrap().backend, B::Cpu);
}

#[test]
fn s0_02_the_wrong_stack_names_the_right_one() {
    let m = machine::with(&[(B::Rocm, 1)]);
    let e = resolve_device("cuda").unwrap_err();
    assert!(e.to_string().contains("Use \"rocm\""), "{e}");
    assert_eq!(kind(e), Kind::Mismatch);
    drop(m);
    let m = machine::with(&[(B::Cuda, 1)]);
    let e = resolve_device("rocm").unwrap_err();
    assert!(e.to_string().contains("Use \"cuda\""), "{e}");
    assert_eq!(kind(e), Kind::Mismatch);
    drop(m);
    // If the machine has neither stack, the error reports that the runtime is missing.
    let _m = machine::with(&[]);
    assert_eq!(kind(resolve_device("cuda").unwrap_err()), Kind::MissingRuntime);
}

#[test]
fn s0_03_settings_are_the_backends_own() {
    let _m = machine::with(&[(B::Cuda, 1), (B::Rocm, 1), (B::Metal, 1)]);
    for (name, tf32, precision) in [
        ("cuda", true, MatmulPrecision::High),
        ("rocm", false, MatmulPrecision::High),
        ("mps", false, MatmulPrecision::High),
        ("cpu", false, MatmulPrecision::Highest),
    ] {
        let d = resolve_device(name).unwrap();
        let c = configure_backend(name, &d, false).unwrap();
        let algorithm_search = name == "cuda";
        assert_eq!(c.tuning, Tuning { tf32, matmul_precision: precision, algorithm_search }, "{name}");
        // Plans are lowered with this precision; it is not only reported.
        assert_eq!(c.backend.lower_options().precision, precision, "{name}");
    }
    let cuda = resolve_device("cuda").unwrap();
    assert_eq!(kind(configure_backend("cpu", &cuda, false).unwrap_err()), Kind::Mismatch);
    let auto = configure_backend("auto", &cuda, false).unwrap();
    let high = MatmulPrecision::High;
    assert_eq!(auto.tuning, Tuning { tf32: true, matmul_precision: high, algorithm_search: true });
    // This stand-in for a device has no vendor's library, and the backend says so.
    let warnings = auto.backend.warnings();
    assert!(warnings.iter().any(|w| w.starts_with("enable_algorithm_search has no effect")), "{warnings:?}");
    assert!(auto.to_string().ends_with("algorithm search:  off"), "{auto}");
}

#[test]
fn s0_04_verbose_tells_what_it_is() {
    let _m = machine::with(&[]);
    let d = resolve_device("cpu").unwrap();
    let c = configure_backend("host", &d, true).unwrap();
    let text = c.to_string();
    let line = |name: &str| {
        let found = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        found.unwrap_or_else(|| panic!("{name} is missing in\n{text}")).trim().to_string()
    };
    assert_eq!((line("backend requested"), line("backend resolved")), ("host".into(), "cpu (cpu:0)".into()));
    assert_eq!(line("halcyon"), env!("CARGO_PKG_VERSION"));
    assert_eq!(line("device"), d.name);
    let gb = format!("{:.2} GB", d.total_memory.unwrap() as f64 / 1e9);
    assert_eq!(line("memory total"), gb);
    assert_eq!((line("memory allocated"), line("memory reserved")), ("0.00 GB".into(), "0.00 GB".into()));
    assert_eq!((line("TF32"), line("matmul precision")), ("off".into(), "Highest".into()));
    assert_eq!(line("algorithm search"), "off");
    assert_eq!(line("capability"), "not reported by the driver");
    line("driver");
}

#[test]
fn s0_05_mixed_precision_by_device() {
    let _m = machine::with(&[(B::Cuda, 1), (B::Rocm, 1), (B::Metal, 1)]);
    let of = |name: &str| resolve_amp_config(&resolve_device(name).unwrap());
    let f16 = |use_grad_scaler| AmpConfig { enabled: true, dtype: Some(DType::F16), use_grad_scaler };
    assert_eq!((of("cuda"), of("rocm"), of("metal")), (f16(true), f16(true), f16(false)));
    assert_eq!(of("cpu"), AmpConfig { enabled: false, dtype: None, use_grad_scaler: false });
}

/// What `resolve_amp_config` returns can be applied.
#[test]
fn s0_05_the_policy_can_be_applied() {
    use halcyon::{AmpPolicy, Backend};
    let open =
        |c: AmpConfig| c.apply(Backend::builder().backend_type(B::Cpu).device(0)).unwrap().build().unwrap();
    let cpu = resolve_amp_config(&resolve_device("cpu").unwrap());
    let b = open(cpu);
    assert_eq!((b.amp(), b.loss_scale()), (AmpPolicy::None, None));
    for (use_grad_scaler, scale) in [(true, Some(65536.0)), (false, None)] {
        let b = open(AmpConfig { enabled: true, dtype: Some(DType::F16), use_grad_scaler });
        assert_eq!((b.lower_options().passes.amp, b.loss_scale()), (AmpPolicy::F16, scale));
    }
    let odd = AmpConfig { enabled: true, dtype: Some(DType::I8), use_grad_scaler: false };
    assert!(odd.apply(Backend::builder()).is_err());
}

#[test]
fn s0_06_providers_of_onnx_runtime() {
    const CUDA: &str = "CUDAExecutionProvider";
    const ROCM: &str = "ROCMExecutionProvider";
    const GRAPHX: &str = "MIGraphXExecutionProvider";
    const CORE: &str = "CoreMLExecutionProvider";
    const CPU: &str = "CPUExecutionProvider";
    let of = |name: &str, available: &[&str]| resolve_ort_providers(name, available);
    // The order of `auto` does not depend on the order of what is available.
    for (available, want) in [
        (&[CPU, CORE, ROCM, CUDA][..], &[CUDA, CPU][..]),
        (&["AzureExecutionProvider", CPU, CORE, ROCM], &[ROCM, CPU]),
        (&[CPU, GRAPHX, CORE], &[GRAPHX, CPU]),
        (&[GRAPHX, ROCM], &[ROCM, CPU]),
        (&[CPU, CORE], &[CORE, CPU]),
        (&["AzureExecutionProvider", CPU], &[CPU]),
        (&[], &[CPU]),
    ] {
        assert_eq!(of("auto", available).unwrap(), want, "{available:?}");
    }
    for (name, want) in
        [("nvidia", &[CUDA, CPU][..]), ("HIP", &[ROCM, CPU]), ("mps", &[CORE, CPU]), ("host", &[CPU])]
    {
        assert_eq!(of(name, &[CPU, CORE, ROCM, CUDA]).unwrap(), want, "{name}");
    }
    let e = of("metal", &[CUDA, CPU]).unwrap_err();
    for part in [CORE, "has only CUDAExecutionProvider, CPUExecutionProvider", "Install a build"] {
        assert!(e.to_string().contains(part), "{e}");
    }
    assert_eq!(kind(e), Kind::UnavailableProvider);
    let e = of("cuda", &[]).unwrap_err();
    assert!(e.to_string().contains("no provider of ONNX Runtime was given"), "{e}");
    for (asked, there, other) in [("cuda", ROCM, "rocm"), ("rocm", CUDA, "cuda"), ("cuda", GRAPHX, "rocm")] {
        let e = of(asked, &[there, CPU]).unwrap_err();
        assert!(e.to_string().contains(&format!("Use \"{other}\"")), "{e}");
        assert_eq!(kind(e), Kind::Mismatch);
    }
    assert_eq!(kind(of("webgpu", &[CUDA, CPU]).unwrap_err()), Kind::Unsupported);
    assert_eq!(kind(of("cudda", &[CUDA, CPU]).unwrap_err()), Kind::UnknownValue);
}

#[test]
fn s0_07_errors_have_a_kind_and_say_what_to_do() {
    let _m = machine::with(&[]);
    let e = resolve_device("cudda").unwrap_err();
    assert!(e.to_string().contains("valid names are auto, cuda"), "{e}");
    assert_eq!(e.kind(), Kind::UnknownValue);
    let e = resolve_device("rocm").unwrap_err();
    assert!(e.to_string().contains("Install the driver"), "{e}");
    assert_eq!(e.kind(), Kind::MissingRuntime);
    // The error contains the core's error, which can be extracted.
    assert!(matches!(e.error(), Error::Unavailable { tried, .. } if tried.len() == 1));
    assert_eq!(Error::from(e).exit_code(), 4);
}

/// Tests selection and settings with the real drivers of Halcyon. Each child process finds the stand-in of
/// one vendor's library, or of none.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s0_02_s0_03_over_the_drivers() {
    use halcyon::Tensor;
    let test = "s0::s0_02_s0_03_over_the_drivers";
    // The child processes run this test again and take this branch.
    if let Ok(there) = std::env::var("HALCYON_S0_02") {
        // For each stack, the name of the other one.
        for (name, twin) in [("cuda", "rocm"), ("rocm", "cuda")] {
            if there == twin {
                let e = resolve_device(name).unwrap_err();
                assert!(e.to_string().contains(&format!("Use \"{twin}\"")), "{e}");
                assert_eq!(kind(e), Kind::Mismatch);
            } else if there.is_empty() {
                let e = resolve_device(name).unwrap_err();
                assert!(e.to_string().contains("/nowhere/"), "{e}");
                assert_eq!(kind(e), Kind::MissingRuntime);
            } else {
                let d = resolve_device(name).unwrap();
                assert!(d.name.starts_with("Stand-in"), "{d:?}");
                assert_eq!(d.torch_device().as_deref(), Some("cuda:0"));
                let c = configure_backend(name, &d, false).unwrap();
                assert_eq!(c.backend.id(), format!("{name}:0"));
                assert_eq!(c.backend.lower_options().precision, MatmulPrecision::High);
                let (text, tf32) = (c.to_string(), if name == "cuda" { "on" } else { "off" });
                for line in [
                    format!("TF32:              {tf32}"),
                    "matmul precision:  High".into(),
                    format!("algorithm search:  {tf32}"),
                ] {
                    assert!(text.contains(&line), "{line} is not in\n{text}");
                }
                // The stand-in of CUDA has the vendor's libraries. AMD's are not used, because the stand-in's
                // device is not among those of the system, so its architecture is unknown.
                let libraries = match name {
                    "cuda" => [("cuBLASLt:", "12.9.3"), ("cuDNN:", "9.10.2"), ("run-time compiler:", "12.4")],
                    _ => [
                        ("hipBLASLt:", "architecture is not known"),
                        ("rocBLAS:", "architecture is not known"),
                        ("run-time compiler:", ".so"),
                    ],
                };
                for (library, version) in libraries {
                    let line = text.lines().find_map(|l| l.strip_prefix(library));
                    assert!(
                        line.is_some_and(|l| l.contains(version)),
                        "{library} {version} is not in\n{text}"
                    );
                }
                let capability = d.compute_capability.as_deref().expect("the driver reports it");
                assert!(text.contains(&format!("capability:        {capability}")), "{text}");
                let x = Tensor::from_slice(&c.backend, [2, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
                assert_eq!(x.matmul(&x).to_vec::<f32>().unwrap(), [7.0, 10.0, 15.0, 22.0]);
                assert_eq!(kind(configure_backend(twin, &d, false).unwrap_err()), Kind::Mismatch);
            }
        }
        println!("\nS0.2 {there}");
        return;
    }
    use halcyon::hal::{cuda, rocm};
    let paths = halcyon_test::standin::paths();
    if paths.is_empty() {
        return;
    }
    for there in ["cuda", "rocm", ""] {
        let mut c = std::process::Command::new(std::env::current_exe().unwrap());
        c.args([test, "--exact", "--nocapture"]).env("HALCYON_S0_02", there).env("HALCYON_CACHE", "off");
        for (id, path) in &paths {
            let family = if *id == "cuda" { &cuda::CUDA } else { &rocm::ROCM };
            let it = if *id == there { path } else { "/nowhere/libNone.so" };
            c.env(family.library_variable, it).env(family.compiler_variable, it);
            let more = [family.plain_products.as_ref(), family.convolutions.as_ref()].into_iter().flatten();
            for library in std::iter::once(&family.products).chain(more) {
                c.env(library.variable, it);
            }
        }
        let o = c.output().unwrap();
        let out = String::from_utf8(o.stdout).unwrap();
        let ran = o.status.success() && out.contains(&format!("\nS0.2 {there}\n"));
        assert!(ran, "{there}: {out}{}", String::from_utf8_lossy(&o.stderr));
    }
}

/// The settings reach the vendor's library: on CUDA its products are in TF32, on ROCm in f32.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s0_03_the_settings_reach_the_vendors_library() {
    use halcyon::hal::{Driver, registry};
    use halcyon::ir::{Graph, TensorType, reference::eval_f64};
    machine::alone("s0::s0_03_the_settings_reach_the_vendors_library", || {
        let (mut rng, mut g) = (halcyon_test::Rng::new(11), Graph::new());
        let mut data =
            |dims: &[usize]| halcyon::ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap();
        let inputs = [data(&[48, 96])];
        let x = g.input("x", TensorType::new(DType::F32, [48usize, 96]));
        let (w, bias) = (g.constant(data(&[96, 64])), g.constant(data(&[64])));
        let y = g.matmul(x, w).unwrap();
        let y = g.add(y, bias).unwrap();
        let y = g.relu(y).unwrap();
        g.output("y", y);
        let want = eval_f64(&g, &inputs, &[]).unwrap();
        for s in halcyon_test::standins::all() {
            registry::register(s.driver.clone()).unwrap();
            let name = s.driver.kind().id();
            let c = configure_backend(name, &resolve_device(name).unwrap(), false).unwrap();
            let session = halcyon::Session::new(&c.backend, g.clone());
            let got = session.run(&inputs).unwrap();
            let pairs = got[0].scalars().zip(want[0].scalars());
            let error = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max);
            let plan = session.prepare(&inputs).unwrap();
            let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
            let (kernel, rounds) = match s.driver.kind() {
                B::Cuda => ("cublaslt.tf32.relu", true),
                _ => ("hipblaslt.f32.relu", false),
            };
            assert!(names.iter().any(|n| n == kernel), "{names:?}");
            assert_eq!(c.tuning.tf32, rounds, "{name}");
            assert!(error < 0.1 && (error > 1e-4) == rounds, "{name}: {error}");
        }
    });
}

/// On CUDA, the algorithms that cuBLASLt and cuDNN list are measured once for each call. Another process with
/// the same tuning cache measures nothing and computes the same numbers.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s0_03_cuda_searches_algorithms() {
    use halcyon::hal::{Driver, registry};
    use halcyon::{ConvConfig, Tensor};
    let test = "s0::s0_03_cuda_searches_algorithms";
    // The child processes run this test again and take this branch.
    if std::env::var_os("HALCYON_S0_03").is_some() {
        for s in halcyon_test::standins::all() {
            registry::register(s.driver.clone()).unwrap();
            // On the stand-in's clock, the library's second choice is the fastest.
            s.set("product takes 0", 40);
            s.set("product takes 1", 30);
            s.set("product takes 2", 50);
            let name = s.driver.kind().id();
            let c = configure_backend(name, &resolve_device(name).unwrap(), false).unwrap();
            let mut rng = halcyon_test::Rng::new(3);
            let mut tensor = |dims: &[usize]| {
                Tensor::from_slice(&c.backend, dims, &rng.f32s(dims.iter().product())).unwrap()
            };
            let (x, w) = (tensor(&[48, 96]), tensor(&[96, 64]));
            let product = x.matmul(&w).to_vec::<f32>().unwrap();
            let algorithm = s.get("product algorithm");
            let (image, filters) = (tensor(&[1, 8, 12, 12]), tensor(&[8, 8, 3, 3]));
            let images = image.conv2d(&filters, ConvConfig::default()).to_vec::<f32>().unwrap();
            // The same calls again.
            let before = c.backend.counters().algorithms_measured;
            assert_eq!(x.matmul(&w).to_vec::<f32>().unwrap(), product);
            assert_eq!(c.backend.counters().algorithms_measured, before);
            let warned = c.backend.warnings().iter().any(|w| w.contains("algorithm"));
            assert_eq!(
                (c.backend.searches_algorithms(), warned),
                (c.tuning.algorithm_search, false),
                "{name}"
            );
            let bits = |v: &[f32]| v.iter().fold(7u64, |h, v| h.wrapping_mul(31) ^ u64::from(v.to_bits()));
            println!("\nS0.3 {name} {before} {algorithm} {} {}", bits(&product), bits(&images));
        }
        return;
    }
    if halcyon_test::standin::paths().is_empty() || halcyon_test::left_out(test) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tuning.json");
    let process = || {
        let mut c = std::process::Command::new(std::env::current_exe().unwrap());
        c.args([test, "--exact", "--nocapture"]).env("HALCYON_S0_03", "1").env("HALCYON_CACHE", "off");
        let o = c.env("HALCYON_TUNING_CACHE", &file).env("HALCYON_CONFIG", "off").output().unwrap();
        let out = String::from_utf8(o.stdout).unwrap();
        assert!(o.status.success(), "{out}{}", String::from_utf8_lossy(&o.stderr));
        let words = |name: &str| -> Vec<String> {
            let start = format!("S0.3 {name} ");
            let line = out.lines().find_map(|l| l.strip_prefix(&start)).unwrap_or_else(|| panic!("{out}"));
            line.split(' ').map(String::from).collect()
        };
        [words("cuda"), words("rocm")]
    };
    let [cuda, rocm] = process();
    // Three algorithms for the product, and at least two for the convolution. The second one of the product
    // is taken.
    assert!(cuda[0].parse::<u64>().unwrap() >= 5 && cuda[1] == "1", "{cuda:?}");
    // ROCm keeps the library's first choice.
    assert_eq!(rocm[..2], ["0", "0"]);
    let [again, _] = process();
    assert_eq!((&again[0], &again[1..]), (&"0".to_string(), &cuda[1..]), "nothing is measured again");
}
