//! Rows S3 of the contract (docs/compat.md): the unified backend, with options and operations called by name.

use crate::machine;
use halcyon::prelude::*;
use halcyon::{AmpPolicy, BackendType as B, ConvConfig, Error, MatmulPrecision, State, blas};
use halcyon_compat::unified::{self, BackendBuilder, MixedPrecisionConfig, Operations};
use halcyon_test::devices::devices;

#[test]
fn s3_01_backends_and_devices_are_listed_and_several_open_at_once() {
    let _m = machine::with(&[(B::Cuda, 2)]);
    let there = Backend::available();
    assert!(there.contains(&B::Cuda) && there.contains(&B::Cpu) && !there.contains(&B::Rocm), "{there:?}");
    let all = Backend::list_devices();
    let second = all.iter().find(|d| d.id() == "cuda:1").unwrap();
    assert_eq!((second.name(), second.memory_gb()), ("Stand-in 1", Some(24.0)));
    let (first, auto) = (Backend::new(B::Cuda).unwrap(), Backend::auto().unwrap());
    assert_eq!(
        (first.selection().device.id.as_str(), &auto.selection().device.id),
        ("cuda:0", &first.selection().device.id)
    );
    // `on_device` opens a device of the same backend with the same settings.
    let cpu = Backend::builder().backend_type(B::Cpu).level(Level::O1).memory_limit(1 << 30).build().unwrap();
    let again = cpu.on_device(0).unwrap();
    assert_eq!((again.level(), again.memory().limit), (Level::O1, Some(1 << 30)));
    assert_eq!(cpu.on_device(1).unwrap_err().exit_code(), 4);
    let (x, y) = (Tensor::ones(&cpu, [2], DType::F32), Tensor::ones(&again, [2], DType::F32));
    assert!(matches!((&x + &y).check(), Err(Error::MixedDevices { .. })), "not one device");
    assert_eq!((x + y.to(&cpu).unwrap()).to_vec::<f32>().unwrap(), [2.0, 2.0]);
}

#[test]
fn s3_02_options_act_or_say_that_they_do_not() {
    let m = machine::with(&[(B::Cuda, 1), (B::Metal, 1)]);
    let b = BackendBuilder::new().backend_type(B::Cpu).device_id(0).memory_pool_size(1 << 20);
    let b = b.enable_tensor_cores(true).build().unwrap();
    assert_eq!((b.memory().limit, b.precision()), (Some(1 << 20), MatmulPrecision::Medium));
    let cuda_too = BackendBuilder::new().backend_type(B::Cuda).enable_tensor_cores(true).build().unwrap();
    assert_eq!(cuda_too.precision(), MatmulPrecision::High);
    assert_eq!(Tensor::zeros(&b, [1 << 20], DType::F32).eval().unwrap_err().exit_code(), 5);
    let threads = |n| unified::cpu().num_threads(n).build().unwrap().info().properties["threads"].clone();
    assert_eq!((threads(1), threads(2)), ("1".into(), "2".into()));
    let simd = |on| unified::cpu().enable_simd(on).build().unwrap().info().properties["simd"].clone();
    assert_eq!(simd(true) != simd(false), halcyon::hal::cpu::sys::Isa::available().len() > 1);
    let cuda = unified::cuda().device(0).enable_tensor_cores(true).build().unwrap();
    assert_eq!(cuda.precision(), MatmulPrecision::High);
    for e in [
        unified::cuda().enable_cudnn(true).build().unwrap_err(),
        unified::metal().enable_mps(true).build().unwrap_err(),
    ] {
        assert!(matches!(e, Error::Unsupported { .. }), "{e}");
    }
    unified::cuda().enable_cudnn(false).build().unwrap();
    drop(m);
    let _m = machine::with(&[]);
    assert_eq!(unified::cuda().enable_cudnn(true).build().unwrap_err().exit_code(), 4);
    assert_eq!(unified::metal().build().unwrap_err().exit_code(), 4);
}

#[test]
fn s3_03_random_tensors_and_operations() {
    let test = "s3_03_random_tensors_and_operations";
    let mut first: Option<Vec<f32>> = None;
    for b in devices(test, Level::O1) {
        b.manual_seed(11);
        let x = b.randn([200, 100], DType::F32);
        let v = x.to_vec::<f32>().unwrap();
        let n = v.len() as f64;
        let mean = v.iter().map(|x| *x as f64).sum::<f64>() / n;
        let var = v.iter().map(|x| (*x as f64 - mean).powi(2)).sum::<f64>() / n;
        // The limits are five standard errors of 20,000 draws.
        assert!(mean.abs() < 5.0 / n.sqrt() && (var - 1.0).abs() < 5.0 * (2.0 / n).sqrt(), "{mean} {var}");
        let tail = v.iter().filter(|x| x.abs() > 1.959_964).count() as f64 / n;
        assert!((tail - 0.05).abs() < 0.01, "{tail}");
        // Each call draws other numbers. The same seed draws the same numbers again, and on every device the
        // same numbers up to rounding.
        assert_ne!(b.randn([200, 100], DType::F32).to_vec::<f32>().unwrap(), v);
        assert_eq!(Tensor::randn(&b, [200, 100], DType::F32, 11).to_vec::<f32>().unwrap(), v);
        match &first {
            None => first = Some(v),
            Some(f) => assert!(f.iter().zip(&v).all(|(a, b)| (a - b).abs() <= 2e-3 * a.abs().max(1.0))),
        }
        let u = Tensor::rand(&b, [1000], DType::F32, 3).to_vec::<f32>().unwrap();
        assert!(u.iter().all(|x| (0.0..1.0).contains(x)) && u.iter().any(|x| *x < 0.1));
        assert!(matches!(b.randn([2], DType::I32).check(), Err(Error::DType { .. })));
        let y = b.relu(&b.matmul(&x, &b.randn([100, 3], DType::F32)));
        assert_eq!(y.dims().unwrap()[..], [200, 3]);
        assert!(y.to_vec::<f32>().unwrap().iter().all(|v| *v >= 0.0));
    }
}

/// A matrix or vector of small integers.
fn ints(b: &Backend, dims: &[usize], step: usize) -> (Tensor, Vec<f64>) {
    let v: Vec<f32> = (0..dims.iter().product()).map(|i: usize| (i * step % 7) as f32 - 3.0).collect();
    let t = Tensor::from_slice(b, dims.to_vec(), &v).unwrap();
    (t, v.iter().map(|x| *x as f64).collect())
}

#[test]
fn s3_04_gemm_and_gemv() {
    for b in devices("s3_04_gemm_and_gemv", Level::O1) {
        let (m, k, n) = (5, 9, 4);
        let ((ta, a), (tb, bb), (tc, c)) = (ints(&b, &[m, k], 3), ints(&b, &[k, n], 5), ints(&b, &[m, n], 2));
        let at = |i: usize, j: usize| (0..k).map(|x| a[i * k + x] * bb[x * n + j]).sum::<f64>();
        for (alpha, beta) in [(1.0, 0.0), (0.5, -2.0), (0.0, 1.0)] {
            let want: Vec<f64> = (0..m * n).map(|i| alpha * at(i / n, i % n) + beta * c[i]).collect();
            assert_eq!(b.gemm(&ta, &tb, alpha, &tc, beta).to_vec::<f64>().unwrap(), want);
            let ((tx, x), (ty, y)) = (ints(&b, &[k], 4), ints(&b, &[m], 6));
            let want: Vec<f64> = (0..m)
                .map(|i| alpha * (0..k).map(|j| a[i * k + j] * x[j]).sum::<f64>() + beta * y[i])
                .collect();
            assert_eq!(b.gemv(&ta, &tx, alpha, &ty, beta).to_vec::<f64>().unwrap(), want);
        }
        // `C` is not read if `beta` is 0, so NaN in it does not matter.
        let nan = Tensor::full(&b, [m, n], f64::NAN, DType::F32);
        let want: Vec<f64> = (0..m * n).map(|i| at(i / n, i % n)).collect();
        assert_eq!(b.gemm(&ta, &tb, 1.0, &nan, 0.0).to_vec::<f64>().unwrap(), want);
        assert!(matches!(b.gemm(&ta, &ta, 1.0, &tc, 0.0).check(), Err(Error::Shape { .. })));
        assert!(matches!(b.gemm(&ta, &tb, 1.0, &ta, 1.0).check(), Err(Error::Shape { .. })));
        let e = b.gemv(&ta, &tb, 1.0, &tc, 0.0).check().unwrap_err();
        assert!(e.to_string().contains("x is") && e.to_string().contains("s3.rs"), "{e}");
        let other = Backend::cpu().unwrap();
        assert!(matches!(other.relu(&ta).check(), Err(Error::MixedDevices { .. })));
    }
}

#[test]
fn s3_05_conv2d() {
    for b in devices("s3_05_conv2d", Level::O1) {
        for (config, out) in [
            (ConvConfig::default(), [5, 4]),
            (ConvConfig { stride: [2, 1], padding: [1, 2], ..Default::default() }, [4, 8]),
            (ConvConfig { dilation: [2, 2], padding: [2, 1], groups: 2, ..Default::default() }, [7, 4]),
        ] {
            let (c, o, h, w) = (4usize, 6usize, 7usize, 6usize);
            let per = c / config.groups;
            let (tx, x) = ints(&b, &[2, c, h, w], 5);
            let (tw, k) = ints(&b, &[o, per, 3, 3], 4);
            let mut want = vec![];
            for (n, f, i, j) in (0..2 * o * out[0] * out[1]).map(|p| {
                let (q, j) = (p / out[1], p % out[1]);
                (q / out[0] / o, q / out[0] % o, q % out[0], j)
            }) {
                let mut sum = 0.0;
                for (s, u, v) in (0..per * 9).map(|t| (t / 9, t / 3 % 3, t % 3)) {
                    let y = (i * config.stride[0] + u * config.dilation[0]).checked_sub(config.padding[0]);
                    let z = (j * config.stride[1] + v * config.dilation[1]).checked_sub(config.padding[1]);
                    let channel = f / (o / config.groups) * per + s;
                    if let (Some(y), Some(z)) = (y.filter(|y| *y < h), z.filter(|z| *z < w)) {
                        sum += x[((n * c + channel) * h + y) * w + z] * k[(f * per + s) * 9 + u * 3 + v];
                    }
                }
                want.push(sum);
            }
            let y = b.conv2d(&tx, &tw, config);
            assert_eq!(y.dims().unwrap()[..], [2, o, out[0], out[1]], "{config:?}");
            assert_eq!(y.to_vec::<f64>().unwrap(), want, "{config:?} on {}", b.id());
        }
    }
}

#[test]
fn s3_06_batch_norm_keeps_running_statistics() {
    for b in devices("s3_06_batch_norm_keeps_running_statistics", Level::O1) {
        let (channels, each) = (3usize, 2 * 2 * 5usize);
        let (mean, var) = (
            State::new(Tensor::zeros(&b, [channels], DType::F32)),
            State::new(Tensor::ones(&b, [channels], DType::F32)),
        );
        let (mut m, mut v) = (vec![0.0; channels], vec![1.0; channels]);
        let close = |got: Vec<f64>, want: &[f64]| {
            let worst = got.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(got.len() == want.len() && worst < 1e-5, "{worst}: {got:?} {want:?}");
        };
        for step in 1..4 {
            let (x, h) = ints(&b, &[2, channels, 2, 5], step);
            // Evaluation uses the running statistics and does not change them.
            let at = |i: usize| i / 10 % channels;
            let y = b.batch_norm(&x, &mean, &var, false).unwrap();
            let want: Vec<f64> = h
                .iter()
                .enumerate()
                .map(|(i, x)| (x - m[at(i)]) / (v[at(i)] + blas::EPSILON).sqrt())
                .collect();
            close(y.to_vec().unwrap(), &want);
            close(mean.value().to_vec().unwrap(), &m);
            // Training uses the batch's statistics and updates the running ones.
            let of = |c: usize| (0..h.len()).filter(move |i| at(*i) == c);
            let n = each as f64;
            let bm: Vec<f64> = (0..channels).map(|c| of(c).map(|i| h[i]).sum::<f64>() / n).collect();
            let bv: Vec<f64> =
                (0..channels).map(|c| of(c).map(|i| (h[i] - bm[c]).powi(2)).sum::<f64>() / n).collect();
            let y = b.batch_norm(&x, &mean, &var, true).unwrap();
            let want: Vec<f64> = h
                .iter()
                .enumerate()
                .map(|(i, x)| (x - bm[at(i)]) / (bv[at(i)] + blas::EPSILON).sqrt())
                .collect();
            close(y.to_vec().unwrap(), &want);
            for c in 0..channels {
                m[c] = 0.9 * m[c] + 0.1 * bm[c];
                v[c] = 0.9 * v[c] + 0.1 * bv[c] * n / (n - 1.0);
            }
            close(mean.value().to_vec().unwrap(), &m);
            close(var.value().to_vec().unwrap(), &v);
        }
        let one = Tensor::ones(&b, [1, channels], DType::F32);
        assert!(matches!(b.batch_norm(&one, &mean, &var, true), Err(Error::Shape { .. })));
        close(mean.value().to_vec().unwrap(), &m);
    }
}

/// One call updates all parameters in place by the formula of Adam, in one launch if the device supports it.
#[test]
fn s3_07_one_call_updates_all_parameters() {
    use unified::{AdamState, fused_adam_step};
    for b in devices("s3_07_one_call_updates_all_parameters", Level::O2) {
        let sizes = [[3usize, 4], [7, 1], [1, 33]];
        let value = |k: usize, i: usize| ((k * 31 + i * 17) % 19) as f64 / 19.0 - 0.5;
        let tensor = |f: &dyn Fn(usize) -> f64, d: [usize; 2]| {
            let v: Vec<f32> = (0..d[0] * d[1]).map(|i| f(i) as f32).collect();
            Tensor::from_slice(&b, d, &v).unwrap()
        };
        let params: Vec<State> =
            sizes.iter().enumerate().map(|(k, d)| State::new(tensor(&|i| value(k, i), *d))).collect();
        let mut want: Vec<Vec<[f64; 3]>> = sizes
            .iter()
            .enumerate()
            .map(|(k, d)| (0..d[0] * d[1]).map(|i| [value(k, i), 0.0, 0.0]).collect())
            .collect();
        let mut state = AdamState::new();
        let states: Vec<&State> = params.iter().collect();
        let mut plans = 0;
        for t in 1..=5usize {
            let g: Vec<Tensor> =
                sizes.iter().enumerate().map(|(k, d)| tensor(&|i| value(k + t, i), *d)).collect();
            g.iter().for_each(|g| {
                g.eval().unwrap();
            });
            let run = || {
                let c = b.counters();
                c.launches + c.library_calls
            };
            let before = run();
            fused_adam_step(&states, &g.iter().collect::<Vec<_>>(), &mut state, 0.01, (0.9, 0.99)).unwrap();
            // One launch updates all parameters if the device supports it; otherwise each parameter has a
            // launch.
            let merges = b.device().as_target().caps().max_argument_bytes > 0;
            let expected = if merges { 1 } else { sizes.len() as u64 };
            // The first step also makes the moments.
            assert!(t == 1 || run() - before == expected, "{}: {}", b.id(), run() - before);
            for (k, all) in want.iter_mut().enumerate() {
                for (i, [p, m, v]) in all.iter_mut().enumerate() {
                    let g = value(k + t, i);
                    *m = 0.9 * *m + 0.1 * g;
                    *v = 0.99 * *v + 0.01 * g * g;
                    let (m, v) = (*m / (1.0 - 0.9f64.powi(t as i32)), *v / (1.0 - 0.99f64.powi(t as i32)));
                    *p -= 0.01 * m / (v.sqrt() + 1e-8);
                }
            }
            if t == 2 {
                plans = b.cache_stats().plans_built;
            }
        }
        let now = b.cache_stats();
        assert_eq!((now.plans_built, now.copies), (plans, 0), "{}", b.id());
        assert_eq!(state.steps(), 5);
        for (p, want) in params.iter().zip(&want) {
            for (a, w) in p.value().to_vec::<f64>().unwrap().iter().zip(want) {
                assert!((a - w[0]).abs() < 1e-5, "{}: {a}, {}", b.id(), w[0]);
            }
        }
        let g = tensor(&|_| 1.0, [2, 2]);
        let few = fused_adam_step(&states, &[&g], &mut state, 0.01, (0.9, 0.99)).unwrap_err();
        assert!(matches!(few, Error::Argument { .. }), "{few}");
        let odd = fused_adam_step(&states[..1], &[&g], &mut state, 0.01, (0.9, 0.99)).unwrap_err();
        assert!(matches!(odd, Error::Shape { .. }), "{odd}");
        assert!(state.moments(0).is_some() && state.moments(3).is_none());
    }
}

#[test]
fn s3_12_mixed_precision_is_configured() {
    let with = |compute_dtype, accum_dtype, scale_factor| {
        let c = MixedPrecisionConfig { compute_dtype, accum_dtype, scale_factor };
        let b = BackendBuilder::new().backend_type(B::Cpu).enable_mixed_precision(c)?;
        // Force the half type, because processors that are slower in it would otherwise compute in f32.
        b.force_amp(compute_dtype != DType::F32).build()
    };
    let product = |b: &Backend| {
        // 1 + 2⁻¹⁰ is not representable in bf16.
        let x = Tensor::full(b, [32, 32], 1.0 + (0.5f64).powi(10), DType::F32);
        eval(std::slice::from_ref(&x)).unwrap();
        x.matmul(&x).to_vec::<f64>().unwrap()[0]
    };
    let (plain, mixed) =
        (with(DType::F32, DType::F32, 1.0).unwrap(), with(DType::BF16, DType::F32, 1.0).unwrap());
    assert_eq!((plain.amp(), mixed.amp()), (AmpPolicy::None, AmpPolicy::Bf16));
    assert!((product(&plain) - 32.0 * (1.0 + (0.5f64).powi(10)).powi(2)).abs() < 1e-4);
    assert_eq!(product(&mixed), 32.0, "the factors were rounded");
    // The setting that the contract's row gives: f16 with a scale. f16 represents 1 + 2^-10 exactly, but not
    // 1 + 2^-11.
    let half = with(DType::F16, DType::F32, 65536.0).unwrap();
    assert_eq!((half.amp(), half.loss_scale()), (AmpPolicy::F16, Some(65536.0)));
    assert_eq!(plain.loss_scale(), None);
    let x = Tensor::full(&half, [32, 32], 1.0 + (0.5f64).powi(11), DType::F32);
    eval(std::slice::from_ref(&x)).unwrap();
    assert_eq!(x.matmul(&x).to_vec::<f64>().unwrap()[0], 32.0, "the factors were rounded");
    // Products that exceed the range of f16 in their first run stay in f32.
    let half = with(DType::F16, DType::F32, 65536.0).unwrap();
    let x = Tensor::full(&half, [32, 32], 100.0 + (0.5f64).powi(11), DType::F32);
    eval(std::slice::from_ref(&x)).unwrap();
    let exact = 32.0 * (100.0 + (0.5f64).powi(11)).powi(2);
    assert!((x.matmul(&x).to_vec::<f64>().unwrap()[0] - exact).abs() < 0.1);
    for (compute, sums, scale) in [
        (DType::BF16, DType::BF16, 1.0),
        (DType::I8, DType::F32, 1.0),
        (DType::F16, DType::F32, 0.0),
        (DType::F16, DType::F32, f64::NAN),
    ] {
        let e = with(compute, sums, scale).unwrap_err();
        assert!(matches!(e.exit_code(), 2 | 3), "{compute} {sums} {scale}: {e}");
    }
}

/// A training step on the backend uses the scale of `MixedPrecisionConfig`.
#[test]
fn s3_12_the_scale_reaches_the_training_step() {
    use halcyon_nn::{Optimizer, Param, Sgd, TrainStep};
    for (compute_dtype, scale_factor, want) in
        [(DType::F16, 1024.0, Some(1024.0)), (DType::BF16, 65536.0, Some(65536.0)), (DType::BF16, 1.0, None)]
    {
        let c = MixedPrecisionConfig { compute_dtype, accum_dtype: DType::F32, scale_factor };
        let b = BackendBuilder::new().backend_type(B::Cpu).enable_mixed_precision(c).unwrap();
        let b = b.force_amp(true).build().unwrap();
        let w = Param::new(Tensor::ones(&b, [4, 4], DType::F32));
        let optimizer = Optimizer::new(&w, Sgd::new().rate(0.5)).unwrap();
        let f = |w: &&Param, x: &[Tensor]| Ok(vec![x[0].matmul(&w.value()).sum(..)]);
        let mut step = TrainStep::new(&w, optimizer, f).unwrap();
        let x = Tensor::ones(&b, [4, 4], DType::F32);
        let loss = step.run(&[&x]).unwrap()[0].item::<f32>().unwrap();
        assert_eq!((loss, step.scale().unwrap().map(|s| s.0)), (64.0, want), "{compute_dtype}");
        assert_eq!(w.value().to_vec::<f32>().unwrap(), [-1.0; 16]);
        // An overflow in the factors of the product skips the step.
        if compute_dtype == DType::F16 {
            step.run(&[&(x * 1e6)]).unwrap();
            assert_eq!(step.scale().unwrap(), Some((512.0, 1)));
            assert_eq!(w.value().to_vec::<f32>().unwrap(), [-1.0; 16]);
        }
    }
}

#[test]
fn s3_13_graphs_are_captured_and_launched() {
    for b in devices("s3_13_graphs_are_captured_and_launched", Level::O1) {
        let (a, w) = (ints(&b, &[4, 4], 3).0, ints(&b, &[4, 4], 5).0);
        let compute = |x: &Tensor| b.matmul(&b.relu(&b.matmul(x, &w)), &w);
        let graph = b.capture_graph(|| compute(&a)).unwrap();
        let plans = b.cache_stats().plans_built;
        for step in [3, 4, 6] {
            let (x, _) = ints(&b, &[4, 4], step);
            let launched = b.launch_graph(&graph, &[&x, &w]).unwrap().remove(0).to_vec::<f32>().unwrap();
            assert_eq!(b.cache_stats().plans_built, plans, "a launch plans nothing");
            let other = Backend::cpu().unwrap();
            let (x, w) = (x.to(&other).unwrap(), w.to(&other).unwrap());
            let want = x.matmul(&w).relu().matmul(&w).to_vec::<f32>().unwrap();
            assert_eq!(launched, want, "{}", b.id());
        }
        let (wrong, _) = ints(&b, &[4, 3], 1);
        assert!(matches!(b.launch_graph(&graph, &[&wrong, &w]), Err(Error::Shape { .. })));
    }
}

/// Every Cargo feature adds its backends, and the default features include all backends that the contract
/// names. `cargo xtask test --only features` builds each feature alone. This test runs in a process of its
/// own, because stand-ins of other tests would count as drivers of this build.
/// Where OpenCL's driver has command buffers, a plan's commands are recorded in one and launched by one call.
/// PoCL gains nothing by it, so there it has to be asked for.
#[test]
fn s3_13_opencl_launches_command_buffers() {
    const VARIABLE: &str = "HALCYON_OPENCL_COMMAND_BUFFERS";
    let test = "s3::s3_13_opencl_launches_command_buffers";
    if !std::env::var(VARIABLE).is_ok_and(|v| v == "on") {
        return machine::alone_with(test, &[(VARIABLE, "on")]);
    }
    machine::alone(test, || {
        let Some(b) = halcyon_test::devices::open(test, B::OpenCl, Level::O2) else { return };
        let listed = b.info().properties["extensions"].contains("cl_khr_command_buffer");
        let (a, w) = (ints(&b, &[4, 4], 3).0, ints(&b, &[4, 4], 5).0);
        let factor = Tensor::scalar(&b, 2.0, DType::F32);
        let compute = |x: &Tensor, f: &Tensor| b.matmul(&b.relu(&b.matmul(x, &w)), &w) * f;
        let graph = b.capture_graph(|| compute(&a, &factor)).unwrap();
        let other = Backend::cpu().unwrap();
        let before = b.counters();
        for (step, times) in [(3, 2.0f32), (4, 2.0), (6, 0.5), (6, -3.0)] {
            let (x, _) = ints(&b, &[4, 4], step);
            graph.set_argument(&factor, times).unwrap();
            let launched = b.launch_graph(&graph, &[&x, &w]).unwrap().remove(0).to_vec::<f32>().unwrap();
            let (x, w) = (x.to(&other).unwrap(), w.to(&other).unwrap());
            let want = (x.matmul(&w).relu().matmul(&w) * times).to_vec::<f32>().unwrap();
            assert_eq!(launched, want, "{step} {times}");
        }
        (0..8).for_each(|_| graph.launch().unwrap());
        let (after, captures) = (b.counters(), graph.executable().captures());
        match captures.reason {
            None => {
                let launched = after.capture_launches - before.capture_launches;
                assert!(listed && captures.made > 0 && launched == captures.launched, "{captures:?}");
                assert!(launched >= 8 && after.launches - before.launches >= 2 * launched, "{after:?}");
            }
            Some(why) => {
                assert!(!listed || why.contains("is not one of"), "{why}");
                halcyon_test::skip(test, &why);
            }
        }
    });
}

#[test]
fn s3_14_features_are_backends_and_the_default_has_them_all() {
    machine::alone("s3::s3_14_features_are_backends_and_the_default_has_them_all", || {
        let here: Vec<B> = halcyon::hal::registry::drivers().iter().map(|d| d.kind()).collect();
        for row in halcyon::hal::backend::BUILT_IN {
            let Some(feature) = row.feature else { continue };
            let on = match feature {
                "cpu" => cfg!(feature = "cpu"),
                "cuda" => cfg!(feature = "cuda"),
                "rocm" => cfg!(feature = "rocm"),
                "opencl" => cfg!(feature = "opencl"),
                "webgpu" => cfg!(feature = "webgpu"),
                "tpu" => cfg!(feature = "tpu"),
                // This crate has no feature of its own for these backends: its feature `backends` enables
                // them.
                _ => (row.driver)().is_some(),
            };
            assert_eq!(here.contains(&row.kind), on, "{}", row.kind);
        }
        // The default features include all that the contract names; a build with fewer features need not.
        let feature = |package: &str, name: &str| {
            let path = format!("{}/../{package}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
            let manifest = std::fs::read_to_string(path).unwrap();
            let line = manifest.lines().find_map(|l| l.strip_prefix(&format!("{name} = ")).map(String::from));
            line.unwrap_or_else(|| panic!("{package} has no feature {name}"))
        };
        let default = feature("halcyon", "default");
        assert_eq!(feature("halcyon-compat", "default"), default, "the features are forwarded");
        assert!(default.contains("\"backends\""), "{default}");
        let backends = feature("halcyon", "backends");
        for name in ["cpu", "cuda", "rocm", "opencl", "webgpu"] {
            assert!(backends.contains(&format!("\"{name}\"")), "{name} is not in {backends}");
        }
        // Every build knows every backend's name, and gives a reason if it is not available.
        let all = halcyon::hal::select::discover();
        for k in [B::Cpu, B::Cuda, B::Rocm, B::Metal, B::Tpu, B::Intel, B::OpenCl, B::WebGpu] {
            let r = all.iter().find(|r| r.id == k).unwrap_or_else(|| panic!("{k} is not listed"));
            assert!(r.available || r.reason.as_ref().is_some_and(|why| !why.is_empty()), "{k}");
        }
    });
}
