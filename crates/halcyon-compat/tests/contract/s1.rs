//! Tests of the contract's rows S1: kernels, preferences and memory estimates for inference.

use crate::machine;
use halcyon::prelude::*;
use halcyon::summary::summary;
use halcyon::{BackendType as B, Error};
use halcyon_compat::inference::*;
use halcyon_compat::kernels::{self, BackendKernels, CpuBackend, CudaBackend, KernelBackend, OpenClBackend};
use halcyon_test::{devices::devices, faulty};
use ndarray::{Array1, Array2, arr1, arr2, s};

type Kernels = dyn KernelBackend<Tensor1 = Tensor, Tensor2 = Tensor>;

/// Runs the same work on a device of every kind, and checks by the device's counters that it ran there.
fn on_every_device(test: &str, work: impl Fn(&Kernels)) {
    for b in devices(test, Level::O1) {
        let before = b.counters();
        let k: Box<Kernels> = match b.info().backend {
            B::Cpu => Box::new(BackendKernels::<kernels::Cpu>::over(b.clone()).unwrap()),
            B::OpenCl => Box::new(BackendKernels::<kernels::OpenCl>::over(b.clone()).unwrap()),
            _ => Box::new(BackendKernels::<kernels::WebGpu>::over(b.clone()).unwrap()),
        };
        assert_eq!(k.name(), b.info().backend.id());
        work(&*k);
        let c = b.counters();
        assert!(
            c.launches + c.library_calls >= before.launches + before.library_calls + 9,
            "the device computed it: {c:?}"
        );
    }
}

fn close(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (g, w) in got.iter().zip(want) {
        assert!((*g as f64 - w).abs() <= 1e-5 * w.abs().max(1.0), "{got:?} {want:?}");
    }
}

#[test]
fn s1_01_a_trait_with_array_signatures() {
    fn is_a_backend<T: KernelBackend + Send + Sync + std::fmt::Debug>() {}
    is_a_backend::<CpuBackend>();
    let _m = machine::with(&[]);
    assert!(CpuBackend::is_available() && !CudaBackend::is_available());
    assert_eq!(CudaBackend::new().unwrap_err().exit_code(), 4);
    let e = OpenClBackend::over(Backend::cpu().unwrap()).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("opencl"), "{e}");
    let cpu = CpuBackend::new().unwrap();
    let w = arr2(&[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0f32]]);
    // A call that allocates its result, a call into an existing array, and the upload of a view that is not
    // dense.
    let x = arr1(&[1.0, 0.5, -1.0f32]);
    assert_eq!(cpu.matmul_vec(&w, &x).unwrap(), arr1(&[-1.0, 0.5]));
    let mut out = Array1::zeros(2);
    cpu.matmul_vec_into(&w, &x, &mut out).unwrap();
    assert_eq!(out, arr1(&[-1.0, 0.5]));
    assert_eq!(cpu.matmul(&w.t().to_owned(), &w).unwrap(), w.t().dot(&w));
    let t = cpu.upload2(w.slice(s![.., ..;2])).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 3.0, 4.0, 6.0]);
    assert_eq!(cpu.upload1(w.column(1)).unwrap().to_vec::<f32>().unwrap(), [2.0, 5.0]);
    // Incompatible shapes are errors, and the array for the result is unchanged.
    assert!(matches!(cpu.matmul_vec(&w, &arr1(&[1.0f32])), Err(Error::Shape { .. })));
    let mut small = Array1::ones(1);
    assert!(matches!(cpu.matmul_vec_into(&w, &x, &mut small), Err(Error::Shape { .. })));
    assert_eq!(small, arr1(&[1.0f32]));
}

#[test]
fn s1_02_the_kernels_run_on_every_device() {
    on_every_device("s1_02_the_kernels_run_on_every_device", |k| {
        let v = [0.5f32, -1.0, 2.0, 3.5];
        let f: Vec<f64> = v.iter().map(|x| *x as f64).collect();
        let w = Array2::from_shape_fn((3, 4), |(i, j)| (i as f32 - 1.0) * (j as f32 + 0.5));
        let dot = |r: usize| -> f64 { (0..4).map(|j| w[[r, j]] as f64 * f[j]).sum() };
        close(k.matmul_vec(&w, &arr1(&v)).unwrap().as_slice().unwrap(), &[dot(0), dot(1), dot(2)]);
        let mut out = Array1::zeros(3);
        k.matmul_vec_into(&w, &arr1(&v), &mut out).unwrap();
        close(out.as_slice().unwrap(), &[dot(0), dot(1), dot(2)]);
        let p = k.matmul(&w, &w.t().to_owned()).unwrap();
        assert!((p[[0, 2]] as f64 + 21.0).abs() < 1e-4 && p[[1, 1]] == 0.0, "{p}");

        let mut x = arr1(&v);
        let scale = [1.0, 2.0, 0.5, -1.0f32];
        k.rmsnorm(&mut x, &arr1(&scale), 1e-5).unwrap();
        let rms = (f.iter().map(|x| x * x).sum::<f64>() / 4.0 + 1e-5).sqrt();
        let want: Vec<f64> = f.iter().zip(&scale).map(|(x, s)| x / rms * *s as f64).collect();
        close(x.as_slice().unwrap(), &want);

        let soft = |x: &[f64]| -> Vec<f64> {
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            x.iter().map(|x| x.exp() / sum).collect()
        };
        let mut x = arr1(&v);
        k.softmax(&mut x).unwrap();
        close(x.as_slice().unwrap(), &soft(&f));
        // Only the view changes.
        let mut x = arr1(&v);
        k.softmax_view(&mut x.slice_mut(s![1..;2])).unwrap();
        let part = soft(&[f[1], f[3]]);
        close(x.as_slice().unwrap(), &[f[0], part[0], f[2], part[1]]);

        let want: Vec<f64> = f.iter().map(|x| x / (1.0 + (-x).exp())).collect();
        close(k.silu(&arr1(&v)).unwrap().as_slice().unwrap(), &want);

        // Rotations by 90 and by 60 degrees, which turn (a, b) into (a cos - b sin, b cos + a sin).
        let (c, s) = ([0.0, 0.5f32], [1.0, 0.75f32.sqrt()]);
        let rope = |x: &[f64]| -> Vec<f64> {
            let one = |i: usize| (c[i] as f64, s[i] as f64, x[i], x[i + 2]);
            let low = (0..2).map(&one).map(|(c, s, a, b)| a * c - b * s);
            let high = (0..2).map(one).map(|(c, s, a, b)| b * c + a * s);
            low.chain(high).collect()
        };
        for (cos, sin) in
            [(arr1(&c), arr1(&s)), (arr1(&[c[0], c[1], c[0], c[1]]), arr1(&[s[0], s[1], s[0], s[1]]))]
        {
            let mut x = arr2(&[v, [1.0, 2.0, 3.0, 4.0]]);
            k.apply_rope(&mut x, &cos, &sin).unwrap();
            close(x.row(0).as_slice().unwrap(), &rope(&f));
            close(x.row(1).as_slice().unwrap(), &rope(&[1.0, 2.0, 3.0, 4.0]));
        }
        let mut x = arr2(&[[1.0f32, 2.0, 3.0]]);
        assert!(matches!(k.apply_rope(&mut x, &arr1(&[1.0]), &arr1(&[0.0])), Err(Error::Shape { .. })));

        let mut scores = Array1::zeros(5);
        k.compute_attention_scores(arr1(&v).view(), w.view(), &mut scores.slice_mut(s![1..4]), 0.5).unwrap();
        close(scores.as_slice().unwrap(), &[0.0, dot(0) / 2.0, dot(1) / 2.0, dot(2) / 2.0, 0.0]);
        let weights = [0.25f32, 0.5, 0.25];
        let mut out = Array1::zeros(4);
        k.weighted_sum_rows(arr1(&weights).view(), w.view(), &mut out.view_mut()).unwrap();
        let want: Vec<f64> =
            (0..4).map(|j| (0..3).map(|i| weights[i] as f64 * w[[i, j]] as f64).sum()).collect();
        close(out.as_slice().unwrap(), &want);
    });
}

#[test]
fn s1_03_simd_and_threads_switch() {
    let property = |simd, parallel, name: &str| {
        let k = CpuBackend::with_options(simd, parallel).unwrap();
        let w = Array2::from_shape_fn((40, 50), |(i, j)| ((i * 7 + j * 3) % 11) as f32);
        // Small integers, whose sum is the same in any order.
        assert_eq!(k.matmul_vec(&w, &Array1::ones(50)).unwrap(), w.dot(&Array1::<f32>::ones(50)));
        k.backend().info().properties[name].clone()
    };
    let all = std::thread::available_parallelism().unwrap().get().to_string();
    assert_eq!((property(true, true, "threads"), property(true, false, "threads")), (all, "1".into()));
    let (on, off) = (property(true, true, "simd"), property(false, true, "simd"));
    let more = halcyon::hal::cpu::sys::Isa::available().len() > 1;
    assert_eq!(on != off, more, "{on} {off}");
    // The kernels' names follow the option, too.
    let kernel = |simd: bool| {
        let b = Backend::builder().backend_type(B::Cpu).enable_simd(simd).build().unwrap();
        let x = Tensor::ones(&b, [64, 64], DType::F32);
        let mut g = halcyon::ir::Graph::new();
        let ty = halcyon::ir::TensorType::new(DType::F32, [64usize, 64]);
        let (p, q) = (g.input("p", ty.clone()), g.input("q", ty));
        let y = g.matmul(p, q).unwrap();
        g.output("y", y);
        let plan = b.plan(g, vec![false; 2]).unwrap();
        assert_eq!(x.matmul(&x).to_vec::<f32>().unwrap(), vec![64.0; 4096]);
        format!("{:?}", plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect::<Vec<_>>())
    };
    assert_eq!(kernel(true) != kernel(false), more, "{} {}", kernel(true), kernel(false));
}

#[test]
fn s1_05_a_preference_that_is_not_there_falls_to_the_next() {
    let m = machine::with(&[(B::Rocm, 1)]);
    let b = init_backend(BackendPreference::Cuda).unwrap();
    assert_eq!(b.selection().device.id, "rocm:0");
    assert!(b.selection().rule.contains("cuda was requested; this is the next one"), "{}", b.selection());
    drop(m);
    let _m = machine::with(&[(B::Cuda, 1)]);
    assert_eq!(init_backend(BackendPreference::Cpu).unwrap().selection().device.id, "cpu:0", "forced");
    assert_eq!(init_backend(BackendPreference::Auto).unwrap().selection().device.id, "cuda:0");
    // Every name parses in every build.
    for (text, p) in [
        ("auto", BackendPreference::Auto),
        ("CPU", BackendPreference::Cpu),
        ("nvidia", BackendPreference::Cuda),
        ("mps", BackendPreference::Metal),
        ("hip", BackendPreference::Rocm),
        ("OpenCL", BackendPreference::OpenCL),
        ("vulkan", BackendPreference::WebGPU),
    ] {
        assert_eq!(text.parse::<BackendPreference>().unwrap(), p);
    }
    assert!("tpu".parse::<BackendPreference>().unwrap_err().to_string().contains("webgpu"));
}

#[test]
fn s1_06_discovery_and_its_summary() {
    let m = machine::with(&[(B::Cuda, 2), (B::Metal, 1)]);
    let all = discover_backends();
    let cuda = all.iter().find(|r| r.id == B::Cuda).unwrap();
    assert!(cuda.available && cuda.devices.len() == 2);
    let text = summary(&all);
    for line in [
        "=== Available Backends ===",
        "✓ CUDA (cuda)",
        "    [1] Stand-in 1: 25.77 GB (free memory unknown)",
        "✓ Metal (metal)",
        "    [0] Stand-in 0: 25.77 GB (free memory unknown) (unified memory)",
        "✗ ROCm (rocm)",
        "    Error: the library is not there. Tried: lib.so. Install the driver",
        "Recommended backend: CUDA",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is missing in\n{text}");
    }
    // Free memory is printed if the driver reports it, as the CPU does.
    let cpu = text.lines().skip_while(|l| *l != "✓ CPU (cpu)").nth(1).unwrap();
    assert!(cpu.starts_with("    [0] ") && cpu.contains(" GB (") && cpu.contains(" GB free)"), "{cpu}");
    assert_eq!(best_available_backend().unwrap(), B::Cuda);
    drop(m);
    let _m = machine::with(&[]);
    assert_eq!(best_available_backend().unwrap(), B::Cpu);
    print_backend_summary();
}

/// The same summary from Halcyon's CUDA driver, which calls a stand-in for CUDA. The printed values are those
/// that the stand-in returns.
#[test]
#[cfg(all(unix, feature = "cuda", feature = "rocm"))]
fn s1_06_over_the_driver() {
    const TEST: &str = "s1::s1_06_over_the_driver";
    if std::env::var("HALCYON_CONTRACT_ALONE").is_err() {
        let paths = halcyon_test::standin::paths();
        let Some((_, path)) = paths.iter().find(|(id, _)| *id == "cuda") else { return };
        let family = &halcyon::hal::cuda::CUDA;
        machine::alone_with(
            TEST,
            &[(family.library_variable, path), (family.compiler_variable, path), ("HALCYON_CACHE", "off")],
        );
        return;
    }
    machine::alone(TEST, || {
        let text = summary(&discover_backends());
        let cuda: Vec<&str> = text
            .lines()
            .skip_while(|l| *l != "✓ CUDA (cuda)")
            .skip(1)
            .take_while(|l| l.starts_with("    "))
            .collect();
        assert!(!cuda.is_empty(), "{text}");
        for (i, line) in cuda.iter().enumerate() {
            // The line has the stand-in's name and memory.
            assert!(line.starts_with(&format!("    [{i}] Stand-in {i}: ")) && line.contains(" GB"), "{line}");
            // It has the free memory, and does not mention unified memory, because the devices have memory of
            // their own.
            assert!(line.contains(" GB free)") && !line.contains("unified"), "{line}");
        }
        assert!(text.contains("Recommended backend: CUDA"), "{text}");
        assert_eq!(best_available_backend().unwrap(), B::Cuda);
    });
}

#[test]
fn s1_07_an_estimate_of_what_a_model_takes() {
    let e = estimate_inference_memory(4096, 14336, 32, 32000, 32, 8, 4096, 4);
    assert_eq!((e.weights_bytes, e.kv_cache_bytes), (28_966_928_384, 1_073_741_824));
    // 3·4096 + 4096 + 2·8·128 + 32·4096 + 2·14336 + 32000 elements.
    assert_eq!(e.activation_bytes, 4 * (16_384 + 2_048 + 131_072 + 28_672 + 32_000));
    assert_eq!(e.total_bytes, e.weights_bytes + e.kv_cache_bytes + e.activation_bytes);
    assert!((e.total_gb() - e.total_bytes as f64 / 1024f64.powi(3)).abs() < 1e-12);
    assert_eq!(estimate_inference_memory(0, 0, 0, 0, 0, 0, 0, 4).total_bytes, 0);
    let n = usize::MAX;
    assert_eq!(estimate_inference_memory(n, n, n, n, 1, n, n, n).total_bytes, u64::MAX);
}

#[test]
fn s1_08_the_check_of_memory_can_fail_everywhere() {
    let _m = machine::with(&[]);
    for p in [BackendPreference::Auto, BackendPreference::Cpu, BackendPreference::OpenCL] {
        let e = init_backend_with_memory_check(p, 1 << 60).unwrap_err();
        let Error::OutOfMemory { requested, free, .. } = &e else { panic!("{e}") };
        assert!(*requested == 1 << 60 && *free > 0 && *free < 1 << 60);
        assert!(e.to_string().contains("cpu:0"), "{e}");
        init_backend_with_memory_check(p, 1 << 20).unwrap();
    }
}

#[test]
fn s1_09_devices_tell_what_the_driver_tells() {
    for b in devices("s1_09_devices_tell_what_the_driver_tells", Level::O1) {
        let d = b.info();
        assert_eq!(b.id(), format!("{}:{}", d.backend, d.index));
        assert!(!d.name.trim().is_empty());
        assert!(d.total_memory.is_none_or(|t| t >= 16 << 20), "{d:?}");
        assert!(d.free_memory.is_none_or(|f| Some(f) <= d.total_memory), "{d:?}");
    }
    let cpu = Backend::cpu().unwrap();
    assert!(cpu.info().unified_memory && cpu.info().compute_capability.is_none());
    #[cfg(target_os = "linux")]
    {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let kib: u64 = text.lines().next().unwrap().split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(cpu.info().total_memory, Some(kib * 1024));
    }
}

#[test]
fn s1_11_a_backend_from_outside_is_like_any_other() {
    // This backend wraps the CPU backend. `examples/backend` is a complete one, and runs the conformance
    // suite.
    let _m = machine::with(&[]);
    let (b, faults) = faulty::open(B::Cpu, |b| b);
    let name = b.info().backend.id();
    assert!(Backend::available().contains(&name.parse().unwrap()));
    assert!(summary(&discover_backends()).contains(&format!("✓ Faulty ({name})")));
    let before = faults.calls();
    let x = Tensor::from_slice(&b, [2, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
    assert_eq!((x.matmul(&x) + 1.0).relu().to_vec::<f32>().unwrap(), [8.0, 11.0, 16.0, 23.0]);
    assert!(faults.calls() > before);
    assert_ne!(best_available_backend().unwrap().id(), name, "it has no priority");
}
