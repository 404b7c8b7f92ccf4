//! Tests of the contract that `docs/compat.md` describes. Each is named after a row of the contract
//! (`s3_11_…` tests row S3.11); `docs/compat.md` lists what each row requires. A requirement that has no test
//! here is not met yet.

mod machine;
mod orders;
mod prepare;
mod s0;
mod s1;
mod s2;
mod s3;
mod s4;

use halcyon::prelude::*;
use halcyon::{AllocationStrategy, BackendType as B, ConstData, Error, Fallback, MemoryPoolConfig, Policy};
use halcyon_test::{Rng, devices::devices};
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

/// Runs a model with autotuning and the cache `file`. Returns the numbers of kernels tuned and candidates
/// tried, and whether the plan has tuned kernels.
fn tunes(kind: B, file: &str) -> (u64, u64, bool) {
    let b = Backend::builder().backend_type(kind).enable_autotuning(true).autotuning_cache_file(file);
    let b = b.build().unwrap();
    let mut g = halcyon::ir::Graph::new();
    // A softmax has few candidates. A matrix product has hundreds, which take minutes to compile.
    let x = g.input("x", halcyon::ir::TensorType::new(DType::F32, [48, 64]));
    let y = g.softmax(x, 1).unwrap();
    g.output("y", y);
    let v: Vec<f32> = (0..48 * 64).map(|i| (i % 7) as f32 / 7.0).collect();
    let session = halcyon::Session::new(&b, g);
    let inputs = [halcyon::ConstData::from_slice(&[48, 64], &v).unwrap()];
    // The default kernels run first; tuned ones are used as soon as they are found.
    let first = session.run(&inputs).unwrap();
    assert!(b.wait_for_tuning(std::time::Duration::from_secs(900)));
    assert!(halcyon::session::difference(&session.run(&inputs).unwrap(), &first) < 1e-5);
    let plan = session.prepare(&inputs).unwrap();
    let tuned = plan.plan().steps.iter().any(|s| s.tunable.as_ref().is_some_and(|t| t.tuned));
    let s = b.cache_stats();
    (s.kernels_tuned, s.candidates_tried, tuned)
}

#[test]
fn s3_11_autotuning_cache() {
    let test = "s3_11_autotuning_cache";
    // This process was started by the test below: do its work and print the result.
    if let (Ok(file), Ok(kind)) = (std::env::var("HALCYON_S3_11_FILE"), std::env::var("HALCYON_S3_11")) {
        println!("\nS3.11 {:?}", tunes(kind.parse().unwrap(), &file));
        return;
    }
    for b in devices(test, Level::O2) {
        let kind = b.info().backend;
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("tuning_cache.json");
        let file = file.to_str().unwrap();
        let process = || {
            let mut c = std::process::Command::new(std::env::current_exe().unwrap());
            c.args([test, "--exact", "--nocapture"]).env("HALCYON_S3_11_FILE", file);
            let o = c.env("HALCYON_S3_11", kind.id()).output().unwrap();
            let out = String::from_utf8(o.stdout).unwrap();
            let said = out.lines().find_map(|l| l.strip_prefix("S3.11 ")).map(String::from);
            said.unwrap_or_else(|| panic!("{out}{}", String::from_utf8_lossy(&o.stderr)))
        };
        let first = process();
        println!("{kind}: {first}");
        if kind == B::Cpu {
            // The CPU's library kernels have no variants, so neither process tunes anything.
            assert_eq!(first, format!("{:?}", (0, 0, false)));
        } else {
            assert!(!first.starts_with("(0,"), "{kind} tuned nothing: {first}");
        }
        let second = process();
        assert_eq!(second, format!("{:?}", (0, 0, kind != B::Cpu)), "{kind}: the second process tunes");
    }
}

#[test]
fn s1_08_memory_check_says_how_much_is_missing() {
    let test = "s1_08_memory_check_says_how_much_is_missing";
    for b in devices(test, Level::O1) {
        let kind = b.info().backend;
        let with = |need: u64| {
            let all = Backend::builder().backend_type(kind).memory_limit(64 << 20);
            all.fallback(Fallback::Never).memory_needed(need).build()
        };
        assert_eq!(with(1 << 20).unwrap().info().backend, kind);
        let e = with(100 << 20).unwrap_err();
        let Error::OutOfMemory { requested, free, .. } = &e else { panic!("{e}") };
        assert_eq!((*requested, *free), (100 << 20, 64 << 20));
    }
    // With an order of backends, the error is of the same kind and names each device.
    let order: Policy = "cpu,opencl".parse().unwrap();
    let e =
        Backend::builder().policy(order).memory_limit(1 << 20).memory_needed(2 << 20).build().unwrap_err();
    assert!(e.exit_code() == 5 && e.to_string().contains("cpu:0"), "{e}");
}

#[test]
fn s1_10_the_choice_decides_where_the_model_runs() {
    let test = "s1_10_the_choice_decides_where_the_model_runs";
    let devices = devices(test, Level::O1);
    let work = |b: &Backend| {
        let c = b.counters();
        c.launches + c.library_calls
    };
    for chosen in &devices {
        let before: Vec<u64> = devices.iter().map(work).collect();
        let x = Tensor::from_slice(chosen, [2, 2], &[1.0f32, 2.0, 3.0, 4.0]).unwrap();
        assert_eq!((x.matmul(&x) + 1.0).relu().to_vec::<f32>().unwrap(), [8.0, 11.0, 16.0, 23.0]);
        for (b, was) in devices.iter().zip(before) {
            assert_eq!(work(b) > was, b.id() == chosen.id(), "{} while {} was chosen", b.id(), chosen.id());
        }
    }
}

/// A minimal executor; the test also uses `pollster`.
fn block_on<F: Future>(f: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut f = pin!(f);
    loop {
        match f.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(v) => return v,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn s3_08_streams_and_async() {
    let test = "s3_08_streams_and_async";
    for b in devices(test, Level::O2) {
        let n = 96;
        let data = Rng::fresh(test).f32s(n * n);
        let x = Tensor::from_slice(&b, [n, n], &data).unwrap();
        let want = x.matmul(&x).to_vec::<f32>().unwrap();

        // Futures, on two executors. The work continues while no one polls.
        let (first, second) = (x.matmul_async(&x), (&x + &x).eval_async());
        let got = block_on(async { first.await?.to_vec_async::<f32>().await }).unwrap();
        assert_eq!(got, want, "{}", b.id());
        let sum = pollster::block_on(second).unwrap();
        assert_eq!(sum.to_vec::<f32>().unwrap()[7], 2.0 * data[7]);
        let y = x.matmul(&x).relu();
        drop(y.eval_async());
        assert!(y.is_ready(), "submitted");
        assert_eq!(pollster::block_on(y.eval_async()).unwrap().to_vec::<f32>().unwrap()[5], want[5].max(0.0));

        // Two streams: results of one are operands in the other, with and without explicit events.
        let (s, t) = (b.create_stream().unwrap(), b.create_stream().unwrap());
        let p = x.matmul(&x);
        s.eval(std::slice::from_ref(&p)).unwrap();
        let q = &p * 2.0;
        let done = t.eval(std::slice::from_ref(&q)).unwrap();
        s.wait(&done).unwrap();
        let r = &q + 1.0;
        s.run(|| r.eval().map(drop)).unwrap();
        pollster::block_on(done).unwrap();
        s.synchronize().unwrap();
        let all = r.to_vec::<f32>().unwrap();
        assert!(all.iter().zip(&want).all(|(a, w)| (a - (2.0 * w + 1.0)).abs() <= 1e-5 * w.abs().max(1.0)));

        // Captured graphs and compiled functions run in the stream they are called in.
        let g = b.capture_graph(|| x.matmul(&x) + 1.0).unwrap();
        let f = b.compile(|v: &[Tensor]| v[0].relu());
        let (h, k) = t.run(|| (b.launch_graph(&g, &[]).unwrap(), f.call(&[&x]).unwrap()));
        t.synchronize().unwrap();
        assert_eq!(h[0].to_vec::<f32>().unwrap()[3], want[3] + 1.0);
        assert_eq!(k[0].to_vec::<f32>().unwrap()[3], data[3].max(0.0));

        // An error is reported once, by the call that waits for the work.
        let ids = Tensor::from_slice(&b, [3], &[0i64, 4000, 1]).unwrap();
        let e = block_on(x.gather(&ids, 0).eval_async()).unwrap_err();
        assert!(matches!(&e, Error::Index { .. }) && e.to_string().contains("contract/main.rs"), "{e}");
        b.synchronize().unwrap();
        s.eval(&[x.gather(&ids, 0)]).unwrap();
        let e = s.synchronize().unwrap_err();
        assert!(matches!(e, Error::Index { .. }), "{e}");
        s.synchronize().unwrap();
        drop(x.gather(&ids, 0).eval_async());
        assert!(
            matches!(b.synchronize().unwrap_err(), Error::Index { .. }),
            "reported although the future was dropped"
        );
        b.synchronize().unwrap();
        let e =
            pollster::block_on(x.matmul_async(&Tensor::from_slice(&b, [1], &[1f32]).unwrap())).unwrap_err();
        assert!(e.to_string().contains("matmul"), "{e}");
        let other = Backend::cpu().unwrap();
        assert!(matches!(other.create_stream().unwrap().eval(&[x.relu()]), Err(Error::MixedDevices { .. })));
    }
}

#[test]
fn s3_10_async_copies() {
    let test = "s3_10_async_copies";
    for b in devices(test, Level::O1) {
        let v: Vec<f32> = Rng::fresh(test).f32s(100_003);
        let data = ConstData::from_slice(&[v.len()], &v).unwrap();
        let before = b.counters();
        let t = pollster::block_on(b.copy_host_to_device_async(&data)).unwrap();
        let back = block_on(b.copy_device_to_host_async(&t)).unwrap();
        assert_eq!((back.dims.as_slice(), back.to_vec::<f32>()), (&[v.len()][..], v.clone()), "{}", b.id());
        let after = b.counters();
        assert_eq!(after.uploaded_bytes - before.uploaded_bytes, 4 * v.len() as u64);
        assert_eq!(after.downloaded_bytes - before.downloaded_bytes, 4 * v.len() as u64);
        // Eight uploads start before the first one is awaited. A computation and a download follow each of
        // them. The data and the first tensor are dropped in between.
        let many: Vec<_> = (0..8)
            .map(|i| {
                let up = b.copy_host_to_device_async(&data);
                async move { (up.await? * (i as f64)).to_vec_async::<f32>().await }
            })
            .collect();
        drop((data, t));
        for (i, f) in many.into_iter().enumerate() {
            let got = pollster::block_on(f).unwrap();
            assert!(got.iter().zip(&v).all(|(a, x)| *a == x * i as f32), "{} {i}", b.id());
        }
        // Out of memory is reported by the future.
        let small = Backend::builder().backend_type(b.info().backend).memory_limit(1 << 20).build().unwrap();
        let large = ConstData::from_slice(&[1 << 20], &vec![0f32; 1 << 20]).unwrap();
        let e = pollster::block_on(small.copy_host_to_device_async(&large)).unwrap_err();
        assert_eq!(e.exit_code(), 5, "{e}");
    }
}

#[test]
fn s3_10_pinned_arrays() {
    use halcyon_compat::unified::Operations;
    let test = "s3_10_pinned_arrays";
    for b in devices(test, Level::O1) {
        let before = b.memory().pinned;
        let mut host = match b.alloc_pinned([3, 5], DType::F32) {
            // WebGPU has no memory that stays mapped while it is in use.
            Err(Error::Unsupported { .. }) if b.id().starts_with("webgpu") => continue,
            host => host.unwrap(),
        };
        assert!(b.memory().pinned >= before + 60, "{}", b.id());
        assert_eq!((host.dims(), host.to_vec::<f32>().unwrap()), (&[3, 5][..], vec![0.0; 15]));
        let v = Rng::fresh(test).f32s(15);
        host.write(&v).unwrap();
        assert!(host.write(&v[..14]).is_err() && host.write(&[1i32; 15]).is_err());
        assert!(host.to_vec::<i32>().is_err());
        let (data, at) = (host.bytes().as_ptr(), host.into_data().unwrap());
        // The data is the array's own memory.
        assert_eq!(at.bytes().as_ptr(), data);
        let t = block_on(b.copy_host_to_device_async(&at)).unwrap();
        drop(at);
        assert_eq!(t.to_vec::<f32>().unwrap(), v, "{}", b.id());
        drop(t);
        b.synchronize().unwrap();
        // Small elements share bytes.
        assert_eq!(b.alloc_pinned([3, 3], DType::I4).unwrap().bytes().len(), 5);
        assert_eq!(b.alloc_pinned([0, 3], DType::F64).unwrap().bytes().len(), 0);
        assert!(b.alloc_pinned([usize::MAX, 2], DType::U8).is_err());
    }
}

#[test]
fn s3_09_memory_pools_have_a_cap_and_move_buffers() {
    const MIB: u64 = 1 << 20;
    let test = "s3_09_memory_pools_have_a_cap_and_move_buffers";
    for b in devices(test, Level::O1) {
        let config = MemoryPoolConfig {
            initial_size: MIB,
            max_size: Some(8 * MIB),
            strategy: AllocationStrategy::BestFit,
            defragment: true,
        };
        let kind = b.info().backend;
        let b = Backend::builder().backend_type(kind).fallback(Fallback::Never).memory_pool(config);
        let b = b.build().unwrap();
        assert!(b.memory().reserved >= MIB, "{:?}", b.memory());
        // Half of the memory is free, but in pieces that are too small.
        let n = 100_000;
        let filled = |v: f32, n: usize| Tensor::from_slice(&b, [n], &vec![v; n]);
        let mut kept: Vec<Tensor> = (0..16).map(|i| filled(i as f32, n).unwrap()).collect();
        let mut i = 0;
        kept.retain(|_| {
            i += 1;
            i % 2 == 0
        });
        let large = filled(-1.0, 6 * n).unwrap();
        let m = b.memory();
        assert!(m.moved_bytes > 0 && m.peak_reserved <= 8 * MIB, "{}: {m:?}", b.id());
        for (i, t) in kept.iter().enumerate() {
            assert_eq!(t.to_vec::<f32>().unwrap(), vec![(2 * i + 1) as f32; n], "{}", b.id());
        }
        assert_eq!(large.to_vec::<f32>().unwrap(), vec![-1.0; 6 * n], "{}", b.id());
        let e = filled(0.0, 12 * n).unwrap_err();
        assert!(matches!(e, Error::OutOfMemory { .. }), "{}: {e}", b.id());
    }
}
