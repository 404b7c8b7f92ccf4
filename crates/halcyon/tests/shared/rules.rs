//! Tests of semantics: versions of values, states, donated inputs, lazy evaluation, bounded caches, warm
//! runs.

use halcyon::prelude::*;
use halcyon_test::Rng;
use halcyon_test::devices::devices;

fn x(b: &Backend, n: usize) -> Tensor {
    Tensor::from_slice(b, [n], &(0..n).map(|i| i as f32).collect::<Vec<_>>()).unwrap()
}

#[test]
fn a_donated_tensor_gives_pending_readers_the_old_value_and_later_reads_an_error() {
    for b in devices("donation", Level::O1) {
        let a = x(&b, 4);
        let pending = &a + 1.0;
        let pos = Tensor::scalar(&b, 1, DType::I32);
        let update = Tensor::from_slice(&b, [2], &[7f32, 8.0]).unwrap();
        let z = a.donate().update_slice(&update, &pos, 0);
        assert_eq!(z.to_vec::<f32>().unwrap(), [0.0, 7.0, 8.0, 3.0]);
        // `pending` is outside z's plan, so the memory was copied, not reused.
        assert_eq!(b.cache_stats().copies, 1);
        assert_eq!(pending.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0, 4.0]);

        let a = x(&b, 4);
        let z = a.donate().update_slice(&update, &pos, 0);
        assert_eq!(z.to_vec::<f32>().unwrap(), [0.0, 7.0, 8.0, 3.0]);
        let e = a.to_vec::<f32>().unwrap_err();
        assert!(matches!(&e, halcyon::Error::Donated { by } if by.text().contains("rules.rs")), "{e}");
        assert!((&a + 1.0).eval().is_err());
    }
}

/// Positions in dtypes with fewer than 32 bits. i8 cannot represent every row of the tensor.
#[test]
fn positions_of_small_dtypes_reach_far_rows_and_have_gradients() {
    for b in devices("small positions", Level::O2) {
        let base = x(&b, 300).requires_grad().unwrap();
        for (at, dtype) in [(200usize, DType::U8), (100, DType::I8), (290, DType::U16), (290, DType::I64)] {
            let at_tensor = Tensor::scalar(&b, at, dtype);
            let (y, grads) = halcyon::value_and_grad(std::slice::from_ref(&base), |w| {
                Ok((w[0].narrow_at(0, &at_tensor, 10) * 2.0).sum(..))
            })
            .unwrap();
            let want: f32 = (at..at + 10).map(|i| 2.0 * i as f32).sum();
            assert_eq!(y.item::<f32>().unwrap(), want, "{} {dtype}", b.id());
            let g = grads[0].to_vec::<f32>().unwrap();
            let right = (0..300).all(|i| g[i] == if (at..at + 10).contains(&i) { 2.0 } else { 0.0 });
            assert!(right, "{} {dtype}: {g:?}", b.id());
        }
        // A gather would count a negative position from the end.
        let e = base.narrow_at(0, &Tensor::scalar(&b, -3, DType::I8), 2).to_vec::<f32>().unwrap_err();
        assert!(matches!(e, halcyon::Error::Index { .. }), "{}: {e}", b.id());
    }
}

#[test]
fn a_reader_in_the_same_plan_runs_before_the_overwrite() {
    for b in devices("same plan", Level::O1) {
        let s = State::new(x(&b, 4));
        let old = s.value() * 10.0;
        let pos = Tensor::scalar(&b, 0, DType::I32);
        let new = s.append(&Tensor::from_slice(&b, [1], &[9f32]).unwrap(), &pos, 0).unwrap();
        let both = &new + &old;
        assert_eq!(both.to_vec::<f32>().unwrap(), [9.0, 11.0, 22.0, 33.0]);
        // `old` was held across the run and still has the value of its version.
        assert_eq!(old.to_vec::<f32>().unwrap(), [0.0, 10.0, 20.0, 30.0]);
    }
}

#[test]
fn states_read_the_version_of_the_call() {
    for b in devices("versions", Level::O1) {
        let s = State::new(x(&b, 3));
        let before = s.value();
        let pos = Tensor::scalar(&b, 2, DType::I32);
        let v1 = s.append(&Tensor::from_slice(&b, [1], &[5f32]).unwrap(), &pos, 0).unwrap();
        s.write(s.value() * 2.0).unwrap();
        assert_eq!(s.value().to_vec::<f32>().unwrap(), [0.0, 2.0, 10.0]);
        assert_eq!(v1.to_vec::<f32>().unwrap(), [0.0, 1.0, 5.0]);
        assert_eq!(before.to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0]);
        assert!(s.write(x(&b, 4)).is_err());
    }
}

#[test]
fn item_then_backward_and_outputs_held_across_reruns() {
    for b in devices("item", Level::O1) {
        let w = x(&b, 3).requires_grad().unwrap();
        let loss = (&w * &w).sum(..);
        assert_eq!(loss.item::<f32>().unwrap(), 5.0);
        let runs = b.cache_stats().runs;
        let g = loss.backward().unwrap();
        assert_eq!(g.get(&w).unwrap().to_vec::<f32>().unwrap(), [0.0, 2.0, 4.0]);
        assert_eq!(b.cache_stats().runs, runs + 1);

        let mut held = vec![];
        for i in 0..10 {
            let y = x(&b, 5) * (i as f64);
            y.eval().unwrap();
            held.push(y);
        }
        for (i, y) in held.iter().enumerate() {
            assert_eq!(y.to_vec::<f32>().unwrap()[4], 4.0 * i as f32);
        }
    }
}

#[test]
fn forcing_a_tracked_tensor_keeps_its_residuals() {
    for b in devices("residuals", Level::O1) {
        let a = Tensor::from_slice(&b, [64, 64], &vec![0.01f32; 4096]).unwrap().requires_grad().unwrap();
        let loss = a.matmul(&a).tanh().sum(..);
        loss.item::<f32>().unwrap();
        let g = loss.backward().unwrap();
        let steps = b.cache_stats().steps;
        g.get(&a).unwrap().eval().unwrap();
        let kept = b.cache_stats().steps - steps;
        // Computing the gradient without the kept forward pass needs at least one more product.
        let c = Tensor::from_slice(&b, [64, 64], &vec![0.01f32; 4096]).unwrap().requires_grad().unwrap();
        let fresh = c.matmul(&c).tanh().sum(..).backward().unwrap();
        let steps = b.cache_stats().steps;
        fresh.get(&c).unwrap().eval().unwrap();
        assert!(kept < b.cache_stats().steps - steps, "{kept} steps");
    }
}

#[test]
fn a_chain_of_100_000_nodes_is_built_run_and_dropped() {
    let b = Backend::cpu().unwrap();
    let mut t = x(&b, 8);
    for _ in 0..100_000 {
        t = t + 1.0;
    }
    drop(t.clone() + 1.0);
    assert_eq!(t.to_vec::<f32>().unwrap()[1], 100_001.0);
    // This chain of pending tensors is dropped without a run.
    let mut t = x(&b, 8);
    for _ in 0..100_000 {
        t = t + 1.0;
    }
    drop(t);
}

#[test]
fn ten_thousand_calls_of_varying_length_keep_caches_bounded() {
    if halcyon_test::left_out("ten_thousand_calls_of_varying_length_keep_caches_bounded") {
        return;
    }
    for b in devices("varying length", Level::O1) {
        let calls = if b.id() == "cpu:0" { 10_000 } else { 2_000 };
        let mut rng = Rng::fresh("varying length");
        let mut kernels = 0;
        for i in 0..calls {
            let n = 1 + rng.below(3000);
            let v = Tensor::full(&b, [n], i as f64, DType::F32);
            let s = (v * 2.0 + 1.0).sum(..).item::<f64>().unwrap();
            let want = (2.0 * i as f64 + 1.0) * n as f64;
            assert!((s - want).abs() <= 1e-5 * want, "{s} {want}");
            if i == 200 {
                kernels = b.counters().compiles + b.counters().compile_cache_hits;
            }
        }
        let s = b.cache_stats();
        assert!(s.plans <= 256 && s.programs <= 1024, "{s:?}");
        assert!(s.plans_built > 256, "lengths did not vary: {s:?}");
        // Sizes are arguments of kernels, so new lengths compile nothing. (A few kernels are for a range of
        // sizes that may not have occurred in the first 200 calls.)
        let c = b.counters().compiles + b.counters().compile_cache_hits;
        assert!(c - kernels <= 2, "{c} {kernels}");
        assert!(b.memory().allocated < 64 << 20, "{:?}", b.memory());
    }
}

#[test]
fn a_warm_call_compiles_uploads_and_allocates_nothing() {
    for b in devices("warm", Level::O1) {
        let w = Tensor::from_slice(&b, [64, 64], &vec![0.5f32; 4096]).unwrap();
        let s = Tensor::from_slice(&b, [64], &vec![0.25f32; 64]).unwrap();
        let a = Tensor::from_slice(&b, [16, 64], &vec![1f32; 1024]).unwrap();
        let call = |scale: f64| {
            let y = (a.matmul(&w).rms_norm(&s, 1e-5) * scale).softmax(-1);
            y.eval().unwrap();
            b.synchronize().unwrap();
        };
        call(1.5);
        call(2.5);
        let (c, p) = (b.counters(), b.cache_stats());
        for i in 0..20 {
            call(3.0 + i as f64);
        }
        let (d, q) = (b.counters(), b.cache_stats());
        assert_eq!((d.compiles, d.compile_cache_hits), (c.compiles, c.compile_cache_hits), "{}", b.id());
        assert_eq!((d.uploads, d.allocations), (c.uploads, c.allocations), "{}", b.id());
        assert_eq!(q.plans_built, p.plans_built);
        assert_eq!(q.runs, p.runs + 20);
        assert!(d.launches + d.library_calls > c.launches + c.library_calls);
    }
}

#[test]
fn errors_in_chains_name_op_shapes_and_line() {
    let b = Backend::cpu().unwrap();
    let t = x(&b, 3);
    let y = (t.matmul(&x(&b, 4)).relu() + 1.0).softmax(0);
    for e in
        [y.check().unwrap_err(), y.dims().unwrap_err(), y.eval().unwrap_err(), y.to_vec::<f32>().unwrap_err()]
    {
        let e = e.to_string();
        assert!(e.contains("matmul") && e.contains("rules.rs:"), "{e}");
    }
    assert!(y.backward().is_err());
    assert!(Tensor::cat::<Tensor>(&[], 0).check().is_err());
    let e = (&t + &t.cast(DType::I32)).check().unwrap_err();
    assert!(matches!(e, halcyon::Error::DType { .. }), "{e}");
}

#[test]
fn devices_do_not_mix_except_through_to() {
    let a = Backend::cpu().unwrap();
    let b = Backend::cpu().unwrap();
    let (s, t) = (x(&a, 3), x(&b, 3));
    let e = (&s + &t).check().unwrap_err();
    assert!(matches!(e, halcyon::Error::MixedDevices { .. }), "{e}");
    assert_eq!((&s.to(&b).unwrap() + &t).to_vec::<f32>().unwrap(), [0.0, 2.0, 4.0]);
}

#[test]
fn a_bad_index_is_clamped_and_reported_with_its_op_and_line() {
    for b in devices("index", Level::O1) {
        let t = x(&b, 4);
        let i = Tensor::from_slice(&b, [3], &[0i64, 9, -1]).unwrap();
        let e = t.gather(&i, 0).to_vec::<f32>().unwrap_err();
        let s = e.to_string();
        assert!(matches!(e, halcyon::Error::Index { .. }), "{s}");
        assert!(s.contains("gather") && s.contains("rules.rs") && s.contains("-4..4"), "{s}");
        // The fault is reported only once.
        assert_eq!((t + 1.0).to_vec::<f32>().unwrap()[0], 1.0);
    }
}

#[test]
fn results_do_not_depend_on_the_thread_count() {
    let mut rng = Rng::fresh("threads");
    let (a, w) = (rng.f32s(300 * 257), rng.f32s(257 * 190));
    let mut first: Option<Vec<f32>> = None;
    for threads in [1, 2, 3] {
        for level in [Level::O0, Level::O1] {
            let b = Backend::builder()
                .backend_type(BackendType::Cpu)
                .num_threads(threads)
                .level(level)
                .build()
                .unwrap();
            let a = Tensor::from_slice(&b, [300, 257], &a).unwrap();
            let w = Tensor::from_slice(&b, [257, 190], &w).unwrap();
            let y = a.matmul(&w);
            let v =
                Tensor::cat(&[&y.sum(..).reshape([1]), &y.reshape([300 * 190])], 0).to_vec::<f32>().unwrap();
            match &first {
                None => first = Some(v),
                Some(f) => assert!(
                    f.iter().zip(&v).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{threads} threads, {level}"
                ),
            }
        }
    }
}

#[test]
fn fusion_rounds_half_types_as_single_ops_do() {
    if halcyon_test::left_out("fusion_rounds_half_types_as_single_ops_do") {
        return;
    }
    let mut rng = Rng::fresh("halves");
    let v = rng.f32s(600);
    for dtype in [DType::F16, DType::BF16] {
        let [each, fused] = [Level::O0, Level::O1].map(|level| {
            let of = |b: &Backend| {
                let a = Tensor::from_slice(b, [6, 100], &v).unwrap().cast(dtype);
                let y = ((&a * &a + 0.3) / 7.0 - &a) * (&a + 1.7);
                let sums = (&y * &a).sum([1]);
                let soft = (&a * 5.0).softmax(1);
                let all = Tensor::cat(&[&y.reshape([600]), &sums, &soft.reshape([600])], 0);
                all.cast(DType::F32).to_vec::<f32>().unwrap()
            };
            devices("halves", level).iter().map(of).collect::<Vec<_>>()
        });
        for (each, fused) in each.iter().zip(&fused) {
            assert_eq!(each[..600], fused[..600], "{dtype}");
            // Sums may be computed in another order, which can change the rounding of later values.
            let differ = each.iter().zip(fused).filter(|(a, b)| a != b).count();
            assert!(differ <= 103, "{differ} values of {dtype}");
        }
    }
}

#[test]
fn symbolic_dimensions_bind_per_run_and_graphs_serialise() {
    for b in devices("symbols", Level::O1) {
        let t = Tensor::placeholder(&b, DType::F32, [halcyon::Dim::sym("n"), 3.into()]);
        let w = Tensor::from_slice(&b, [3, 2], &[1f32, 2.0, 3.0, 4.0, 5.0, 6.0]).unwrap();
        let y = t.matmul(&w) + 1.0;
        let g = Tensor::trace(&[("t", &t)], &[("y", &y)]).unwrap();
        let g = halcyon::ir::Graph::from_bytes(&g.to_bytes().unwrap()).unwrap();
        let s = halcyon::Session::new(&b, g);
        for n in [1usize, 4, 0, 7] {
            let d = halcyon::ConstData::from_slice(&[n, 3], &vec![1f32; n * 3]).unwrap();
            let out = s.run(&[d]).unwrap();
            assert_eq!(out[0].dims.as_slice(), &[n, 2]);
            assert!(out[0].to_vec::<f32>().chunks(2).all(|c| c == [10.0, 13.0]));
        }
        let bad = halcyon::ConstData::from_slice(&[2, 4], &[0f32; 8]).unwrap();
        assert!(s.run(&[bad]).is_err());
        assert!(y.eval().is_err(), "a placeholder has no value");
    }
}

/// Random graphs over shared values have the same results on the device's own queue as when their parts are
/// evaluated on two or three streams.
#[test]
fn streams_give_what_one_queue_gives() {
    for b in devices("streams", Level::O2) {
        let mut rng = Rng::fresh("streams");
        // Other devices run less, because each new plan must compile programs.
        let (rounds, steps) = if b.id() == "cpu:0" { (6, 24) } else { (2, 8) };
        for round in 0..rounds {
            let n = 8 + rng.below(40);
            let base: Vec<Tensor> =
                (0..3).map(|_| Tensor::from_slice(&b, [n, n], &rng.f32s(n * n)).unwrap()).collect();
            let seed = rng.next();
            // Each round of the loop computes a value from two earlier ones. `place` evaluates it on a queue,
            // or leaves it pending.
            let build = |place: &mut dyn FnMut(&Tensor, usize)| -> Vec<Vec<f32>> {
                let mut r = Rng::new(seed);
                let mut all = base.clone();
                for _ in 0..steps {
                    let (x, y) = (&all[r.below(all.len())], &all[r.below(all.len())]);
                    let t = match r.below(5) {
                        0 => x.matmul(y).tanh(),
                        1 => (x + y) * 0.5,
                        2 => x.softmax(-1) - y,
                        3 => (x - y).relu(),
                        _ => (x * y).sum_keepdim([1]) * 0.1 + y,
                    };
                    place(&t, r.below(4));
                    all.push(t);
                }
                all[3..].iter().map(|t| t.to_vec::<f32>().unwrap()).collect()
            };
            let want = build(&mut |t, k| {
                if k < 3 {
                    t.eval().unwrap();
                }
            });
            let streams: Vec<_> = (0..2 + round % 2).map(|_| b.create_stream().unwrap()).collect();
            let got = build(&mut |t, k| match streams.get(k) {
                Some(s) => drop(s.eval(std::slice::from_ref(t)).unwrap()),
                None if k == 2 => drop(t.eval_async()),
                None => {}
            });
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                // `want` and `got` evaluate the same values together, so they agree closely.
                let close = g.iter().zip(w).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0));
                assert!(close, "{} round {round} value {i}", b.id());
            }
            streams.iter().for_each(|s| s.synchronize().unwrap());
            b.synchronize().unwrap();
        }
    }
}

#[test]
fn states_keep_their_order_and_their_memory_across_streams() {
    for b in devices("states on streams", Level::O1) {
        let (s, t) = (b.create_stream().unwrap(), b.create_stream().unwrap());
        let state = State::new(x(&b, 64));
        let mut reads = vec![];
        for i in 0..64i64 {
            let pos = Tensor::scalar(&b, i, DType::I32);
            let new =
                state.append(&Tensor::from_slice(&b, [1], &[100.0 + i as f32]).unwrap(), &pos, 0).unwrap();
            let sum = new.sum(..);
            drop(new);
            let on = if i % 2 == 0 { &s } else { &t };
            on.eval(std::slice::from_ref(&sum)).unwrap();
            reads.push(sum);
        }
        // Each sum is the sum of its own version of the state.
        let mut want: f32 = (0..64).sum::<i32>() as f32;
        for (i, r) in reads.iter().enumerate() {
            want += 100.0;
            assert_eq!(r.item::<f32>().unwrap(), want, "{} {i}", b.id());
        }
        s.synchronize().unwrap();
        t.synchronize().unwrap();
        assert!(
            b.cache_stats().copies <= 1,
            "a version reuses the memory of the version before: {:?}",
            b.cache_stats()
        );
    }
}
