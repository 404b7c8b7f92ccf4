//! Captured graphs, plans and tensors in memory pools that move buffers, and running out of memory.

use super::*;
use halcyon::{AllocationStrategy, ConstData, MemoryPoolConfig, Session};
use halcyon_host as host;
use halcyon_ir::{Graph, shape::TensorType};

const CAP: u64 = 4 << 20;

/// A backend of each kind in [`devices`], opened with a pool.
fn over(name: &str, pool: &str) -> Vec<Backend> {
    let pool: MemoryPoolConfig = pool.parse().unwrap();
    let kinds = devices(name, Level::O2).into_iter().map(|b| b.info().backend);
    let open = |k| Backend::builder().backend_type(k).memory_pool(pool).build().unwrap();
    kinds.map(open).collect()
}

/// Allocates tensors until memory is full; keeps every second one, with its values.
fn scatter(b: &Backend, rng: &mut Rng) -> Vec<(Tensor, Vec<f32>)> {
    let mut all = vec![];
    loop {
        let v = rng.f32s(10_000);
        match Tensor::from_slice(b, [v.len()], &v) {
            Ok(t) => all.push((t, v)),
            Err(e) => {
                assert_eq!(e.exit_code(), 5, "{e}");
                return all.into_iter().step_by(2).collect();
            }
        }
    }
}

#[test]
fn captured_graphs_plans_and_tensors_survive_moves() {
    let name = "captured_graphs_plans_and_tensors_survive_moves";
    let mut rng = Rng::fresh(name);
    for strategy in ["best-fit", "first-fit", "buddy"] {
        for moves in [false, true] {
            let pool = format!("{strategy}:{CAP}{}", if moves { ",defragment" } else { "" });
            for b in over(name, &pool) {
                // These tensors are below the captured graph's own memory. They are freed later, so that the
                // graph's buffers can move.
                let below: Vec<Tensor> = (0..6).map(|_| random(&b, &mut rng, &[50, 100])).collect();
                let (x, w, v) = (
                    random(&b, &mut rng, &[8, 16]),
                    random(&b, &mut rng, &[16, 32]),
                    random(&b, &mut rng, &[32, 5]),
                );
                let want = mlp(&x, &w, &v).to_data().unwrap();
                let g = b.capture_graph(|| mlp(&x, &w, &v)).unwrap();
                let f = b.compile(|t: &[Tensor]| mlp(&t[0], &w, &v));
                g.launch().unwrap();
                f.call(&[&x]).unwrap();
                let live = scatter(&b, &mut rng);
                drop(below);
                let before = b.memory();
                assert!(before.fragmentation() > 0.5 && before.peak_reserved <= CAP, "{before:?}");
                let big = vec![1.5f32; 350_000];
                let large = Tensor::from_slice(&b, [big.len()], &big);
                match (&large, moves) {
                    (Ok(t), true) => assert_eq!(t.to_vec::<f32>().unwrap(), big),
                    (Err(e), false) => assert!(e.to_string().contains("scattered"), "{e}"),
                    (r, _) => panic!("{pool} on {}: {r:?} {:?}", b.id(), b.memory()),
                }
                assert_eq!(b.memory().generation > before.generation, moves);
                // Free the large tensor, which leaves a hole, and defragment again.
                drop(large);
                let did = b.defragment().unwrap();
                assert!(moves || did.moved_bytes > 0, "{pool} on {}: {did:?}", b.id());
                let same = |t: &Tensor| {
                    let d = session::difference(&[t.to_data().unwrap()], std::slice::from_ref(&want));
                    assert!(d < 1e-6, "{pool} on {}: {d}", b.id());
                };
                same(&g.outputs().unwrap()[0]);
                for _ in 0..3 {
                    g.launch().unwrap();
                    same(&g.outputs().unwrap()[0]);
                    same(&f.call(&[&x]).unwrap()[0]);
                    same(&mlp(&x, &w, &v));
                    b.defragment().unwrap();
                }
                // Another input, in memory that was free before.
                let y = random(&b, &mut rng, &[8, 16]);
                close(&b.launch_graph(&g, &[&y, &w, &v]).unwrap()[0], &mlp(&y, &w, &v));
                for (t, v) in &live {
                    assert_eq!(&t.to_vec::<f32>().unwrap(), v);
                }
                assert!(b.memory().peak_reserved <= CAP, "{:?}", b.memory());
            }
        }
    }
}

/// The bytes that code outside of Halcyon would read.
fn read(m: &halcyon::hal::Exported) -> Vec<u8> {
    // SAFETY: the memory is valid while `m` lives, and nothing runs on the device meanwhile.
    unsafe { std::slice::from_raw_parts(m.as_ptr(), m.bytes()) }.to_vec()
}

#[test]
fn exported_memory_holds_the_value_and_stays_in_place() {
    let name = "exported_memory_holds_the_value_and_stays_in_place";
    let mut rng = Rng::fresh(name);
    for b in over(name, &format!("best-fit:{CAP},defragment")) {
        let live = scatter(&b, &mut rng);
        let (one, values) = &live[live.len() - 1];
        let want = ConstData::from_slice(&[values.len()], values).unwrap();
        let memory = match one.export().unwrap() {
            Some(m) => m,
            // The host cannot address the memory of this device.
            None => continue,
        };
        let (start, bytes) = (memory.as_ptr(), memory.bytes());
        assert_eq!(b.info().backend, BackendType::Cpu);
        assert!(!memory.is_read_only() && bytes == want.bytes().len() && read(&memory) == want.bytes());
        assert!(b.defragment().unwrap().moved_bytes > 0);
        assert_eq!((memory.as_ptr(), read(&memory)), (start, want.bytes().to_vec()));
        assert_eq!(one.export().unwrap().unwrap().as_ptr(), start);
        // Without the export, the block may move.
        drop(memory);
        b.defragment().unwrap();
        assert_eq!(one.to_vec::<f32>().unwrap(), *values);
        // A value that is not computed yet is computed first.
        let sum = (one + 1.0).export().unwrap().unwrap();
        let want: Vec<f32> = values.iter().map(|v| v + 1.0).collect();
        assert_eq!(read(&sum), ConstData::from_slice(&[want.len()], &want).unwrap().bytes());
    }
}

#[test]
fn shared_data_is_used_in_place_and_copied_where_it_cannot_be() {
    let b = Backend::cpu().unwrap();
    let values: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let data = ConstData::from_slice(&[10, 100], &values).unwrap();
    let t = Tensor::from_shared(&b, &data).unwrap();
    let memory = t.export().unwrap().unwrap();
    assert!(memory.is_read_only() && memory.as_ptr() == data.bytes().as_ptr());
    assert_eq!((&t + 1.0).to_vec::<f32>().unwrap()[999], 1000.0);
    // An update writes to memory of its own, even if nothing else reads the tensor.
    let alone = Tensor::from_shared(&b, &data).unwrap();
    let (row, at) = (Tensor::full(&b, [1usize, 100], 7.0, DType::F32), Tensor::scalar(&b, 3i64, DType::I64));
    let updated = alone.update_slice(&row, &at, 0);
    drop(alone);
    assert_eq!(updated.to_vec::<f32>().unwrap()[299..301], [299.0, 7.0]);
    assert_eq!(data.to_vec::<f32>(), values);
    drop(updated);
    // The tensor and the exported memory keep the data's owner.
    let owner = data.owner();
    drop(data);
    assert_eq!(std::sync::Arc::strong_count(&owner), 3);
    drop((t, memory));
    assert_eq!(std::sync::Arc::strong_count(&owner), 1);
    // Data at an odd address are copied.
    let odd = owner.bytes()[1..401].to_vec();
    struct Odd(Vec<u8>);
    impl AsRef<[u8]> for Odd {
        fn as_ref(&self) -> &[u8] {
            &self.0[1..]
        }
    }
    let odd = ConstData::new(DType::U8, &[399], std::sync::Arc::new(Odd(odd))).unwrap();
    let t = Tensor::from_shared(&b, &odd).unwrap();
    assert_eq!(t.to_data().unwrap(), odd);
    assert!(!t.export().unwrap().unwrap().is_read_only());
}

#[test]
fn a_plan_that_does_not_fit_is_made_without_what_costs_memory() {
    let mut rng = Rng::fresh("a_plan_that_does_not_fit_is_made_without_what_costs_memory");
    let (n, rows) = (512, 64);
    let (w, x) = (rng.f32s(n * n), rng.f32s(rows * n));
    let mut g = Graph::new();
    let i = g.input("x", TensorType::new(DType::F32, [rows, n]));
    // The CPU reads this constant in place. If it is packed, it takes 1 MiB of device memory.
    let c = g.constant(ConstData::from_slice(&[n, n], &w).unwrap());
    let y = g.matmul(i, c).unwrap();
    g.output("y", y);
    let x = ConstData::from_slice(&[rows, n], &x).unwrap();
    let run = |limit: u64| {
        let b = Backend::builder().backend_type(BackendType::Cpu).memory_limit(limit).keep_packed(false);
        let b = b.build().unwrap();
        let y = Session::new(&b, g.clone()).run(std::slice::from_ref(&x));
        (y, b)
    };
    let (want, roomy) = run(64 << 20);
    assert!(roomy.memory().peak > 1 << 20 && roomy.cache_stats().smaller_plans == 0, "{:?}", roomy.memory());
    let (got, tight) = run(512 << 10);
    assert!(session::difference(&got.unwrap(), &want.unwrap()) < 1e-4);
    assert_eq!(tight.cache_stats().smaller_plans, 1);
    let plan = tight.lower_to_fit(&g, &[rows * n * 4]).unwrap();
    assert!(
        plan.packed.is_empty() && plan.warnings.iter().any(|w| w.contains("for lack of memory")),
        "{plan:?}"
    );
    assert!(tight.memory().peak_reserved <= 512 << 10);
    // If no smaller plan fits, the error is that of the preferred plan.
    let e = run(4 << 10).0.unwrap_err();
    assert_eq!(e.exit_code(), 5, "{e}");
}

#[test]
fn settings_act() {
    let b = Backend::builder().backend_type(BackendType::Cpu).memory_pool_size(1 << 20).build().unwrap();
    assert_eq!((b.memory().limit, b.memory().free_mb()), (Some(1 << 20), Some(1.0)));
    assert!(Tensor::from_slice(&b, [1 << 18], &vec![0f32; 1 << 18]).is_ok());
    assert!(Tensor::from_slice(&b, [(1 << 18) + 1], &vec![0f32; (1 << 18) + 1]).is_err());
    let pool = MemoryPoolConfig { initial_size: 1 << 20, ..MemoryPoolConfig::new(AllocationStrategy::Buddy) };
    let b =
        Backend::builder().backend_type(BackendType::Cpu).memory_pool(pool).host_limit(100).build().unwrap();
    assert_eq!((b.memory().reserved, b.memory().allocated_mb()), (1 << 20, 0.0));
    assert_eq!((b.alloc_host(100).unwrap().len(), b.alloc_host(101).unwrap_err().exit_code()), (100, 5));
}

const RSS: &str = "capture::pools::evaluations_of_changing_shapes";

/// In a process of its own, so that memory of other tests is not counted.
#[test]
fn ten_thousand_evaluations_of_changing_shapes_keep_memory_flat() {
    if halcyon_test::left_out("ten_thousand_evaluations_of_changing_shapes_keep_memory_flat") {
        return;
    }
    let mut c = std::process::Command::new(std::env::current_exe().unwrap());
    let out = c.args(["--exact", RSS, "--ignored", "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    print!("{text}");
    assert!(
        out.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&out.stderr)
    );
}

#[test]
#[ignore = "measures the whole process; the test above runs it in a process of its own"]
fn evaluations_of_changing_shapes() {
    for pool in ["exclusive", "best-fit"] {
        let b = Backend::builder().backend_type(BackendType::Cpu).num_threads(1);
        let b = b.memory_pool(pool.parse().unwrap()).build().unwrap();
        let mut seen = vec![];
        for n in 0..10_000usize {
            let (rows, columns) = (1 + n % 101, 1 + n / 101);
            let x = Tensor::from_slice(&b, [rows, columns], &vec![0.5f32; rows * columns]).unwrap();
            let y = ((x + 1.0).sum([1]) * 2.0).to_vec::<f32>().unwrap();
            assert_eq!(y, vec![3.0 * columns as f32; rows]);
            if n % 1000 == 999 {
                halcyon::hal::heap::trim();
                seen.push((host::anonymous(), b.memory()));
            }
        }
        let s = b.cache_stats();
        assert!(s.plans <= 256 && s.programs <= 1024 && s.plans_built >= 9_000, "{s:?}");
        let reserved: Vec<u64> = seen.iter().map(|(_, m)| m.reserved).collect();
        assert!(reserved[9] <= reserved[4] + (1 << 20), "{pool}: {reserved:?}");
        let rss: Vec<u64> = seen.iter().filter_map(|(r, _)| *r).collect();
        println!("{pool}: resident KiB {:?}", rss.iter().map(|r| r >> 10).collect::<Vec<_>>());
        if rss.len() == 10 {
            // After half of the plans, the bounded caches are full, so memory hardly grows any more.
            assert!(rss[9] <= rss[4] + (3 << 20), "{pool}: {rss:?}");
        }
    }
}
