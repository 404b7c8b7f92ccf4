//! Tests of compiled functions and captured graphs: they give the same values as an evaluation, and their
//! bindings are checked.

mod pools;

use halcyon::hal::BackendType;
use halcyon::prelude::*;
use halcyon::{Error, session};
use halcyon_test::Rng;
use halcyon_test::devices::devices;
use std::cell::Cell;

fn random(b: &Backend, rng: &mut Rng, dims: &[usize]) -> Tensor {
    let n = dims.iter().product();
    Tensor::from_slice(b, dims, &rng.f32s(n)).unwrap()
}

fn close(a: &Tensor, b: &Tensor) {
    let d = session::difference(&[a.to_data().unwrap()], &[b.to_data().unwrap()]);
    assert!(d < 1e-5, "{d}");
}

fn mlp(x: &Tensor, w: &Tensor, v: &Tensor) -> Tensor {
    (x.matmul(w).relu() * 0.5 + 1.0).matmul(v).softmax(-1)
}

#[test]
fn compiled_functions_compute_what_evaluations_do_and_trace_once_per_type() {
    let name = "compiled_functions_compute_what_evaluations_do_and_trace_once_per_type";
    let mut rng = Rng::fresh(name);
    for level in [Level::O0, Level::O1, Level::O2] {
        for b in devices(name, level) {
            let (w, v) = (random(&b, &mut rng, &[16, 32]), random(&b, &mut rng, &[32, 5]));
            let traces = Cell::new(0);
            let f = b.compile(|x: &[Tensor]| {
                traces.set(traces.get() + 1);
                mlp(&x[0], &w, &v)
            });
            for rows in [4, 7, 4, 7, 4] {
                let x = random(&b, &mut rng, &[rows, 16]);
                close(&f.call(&[&x]).unwrap()[0], &mlp(&x, &w, &v));
            }
            assert_eq!((f.plans(), traces.get()), (2, 2), "{} {level}", b.id());
            // A call finds its plan without looking in the backend's cache.
            let x = random(&b, &mut rng, &[4, 16]);
            let before = b.cache_stats();
            f.call(&[&x]).unwrap();
            let after = b.cache_stats();
            assert_eq!(
                (after.plan_hits, after.plans_built, after.runs),
                (before.plan_hits, before.plans_built, before.runs + 1)
            );
        }
    }
}

#[test]
fn compiled_functions_keep_a_bounded_number_of_plans() {
    let b = Backend::cpu().unwrap();
    let f = b.compile(|x: &[Tensor]| [&x[0] + &x[0], x[0].relu()]);
    for n in 1..=80 {
        let x = Tensor::from_slice(&b, [n], &vec![-1.5f32; n]).unwrap();
        let y = f.call(&[&x]).unwrap();
        assert_eq!(y[0].to_vec::<f32>().unwrap(), vec![-3.0; n]);
        assert_eq!(y[1].to_vec::<f32>().unwrap(), vec![0.0; n]);
    }
    assert_eq!(f.plans(), 64);
}

#[test]
fn a_compiled_training_step_follows_the_evaluated_one() {
    let name = "a_compiled_training_step_follows_the_evaluated_one";
    let mut rng = Rng::fresh(name);
    for b in devices(name, Level::O1) {
        let step = |p: &[Tensor]| -> Result<Vec<Tensor>> {
            let (loss, g) = value_and_grad(&p[..2], |w| {
                let y = p[2].matmul(&w[0]).tanh().matmul(&w[1]);
                Ok((&y * &y).sum([0, 1]))
            })?;
            Ok(vec![&p[0] - &(&g[0] * 0.01), &p[1] - &(&g[1] * 0.01), loss])
        };
        let compiled = b.compile(step);
        let mut eager = vec![random(&b, &mut rng, &[6, 8]), random(&b, &mut rng, &[8, 3])];
        let mut fast = eager.clone();
        for _ in 0..5 {
            let x = random(&b, &mut rng, &[10, 6]);
            let e = step(&[eager[0].clone(), eager[1].clone(), x.clone()]).unwrap();
            halcyon::eval(&e).unwrap();
            let c = compiled.call(&[&fast[0], &fast[1], &x]).unwrap();
            e.iter().zip(&c).for_each(|(e, c)| close(c, e));
            (eager, fast) = (e[..2].to_vec(), c[..2].to_vec());
        }
        assert_eq!(compiled.plans(), 1);
    }
}

#[test]
fn a_variable_is_a_parameter_of_its_own() {
    let name = "a_variable_is_a_parameter_of_its_own";
    for level in [Level::O0, Level::O1, Level::O2] {
        for b in devices(name, level) {
            let of = |x: &[Tensor]| -> Result<Vec<Tensor>> {
                let y = &x[0] * 2.0;
                // The function captures what `y` comes from and `y` itself.
                let vars = [y.variable(), y.variable()];
                let (loss, g) = value_and_grad(&vars, |v| {
                    Ok((&v[0] * &v[1] * &y * &x[0]).sum([0]) + v[0].narrow(0, 1, 1).sum([0]))
                })?;
                Ok([vec![loss], g].concat())
            };
            let x = Tensor::from_slice(&b, [3], &[1.0f32, 2.0, -1.0]).unwrap();
            // 8 x⁴ and 2 x₁, 4 x³ with 1 at place 1, and 4 x³.
            let want = [vec![148.0f32], vec![4.0, 33.0, -4.0], vec![4.0, 32.0, -4.0]];
            let evaluated = of(std::slice::from_ref(&x)).unwrap();
            let compiled = b.compile(of).call(&[&x]).unwrap();
            for ((want, e), c) in want.iter().zip(&evaluated).zip(&compiled) {
                assert_eq!(e.to_vec::<f32>().unwrap(), *want, "{} {level}", b.id());
                assert_eq!(c.to_vec::<f32>().unwrap(), *want, "{} {level}", b.id());
            }
            // A gradient of the gradient 2 v x² of v² x² goes through the variable too: 6 x².
            let w = x.requires_grad().unwrap();
            let (_, g) = value_and_grad(std::slice::from_ref(&w), |w| {
                let (_, g) =
                    value_and_grad(&[w[0].variable()], |v| Ok((v[0].sqr() * &w[0] * &w[0]).sum([0])))?;
                Ok(g[0].sum([0]))
            })
            .unwrap();
            assert_eq!(g[0].to_vec::<f32>().unwrap(), [6.0, 24.0, 6.0], "{} {level}", b.id());
        }
    }
}

#[test]
fn donated_inputs_are_taken_where_nothing_else_reads_them() {
    let name = "donated_inputs_are_taken_where_nothing_else_reads_them";
    for b in devices(name, Level::O1) {
        let write = b.compile(|x: &[Tensor]| x[0].update_slice(&x[1], &x[2], 0));
        let mut cache = Tensor::from_slice(&b, [4, 2], &[0f32; 8]).unwrap();
        for i in 0..4i64 {
            let (row, at) = (
                Tensor::from_slice(&b, [1, 2], &[i as f32, 1.0]).unwrap(),
                Tensor::from_slice(&b, Shape::scalar(), &[i]).unwrap(),
            );
            let new = write.call(&[cache.donate(), &row, &at]).unwrap().remove(0);
            assert!(matches!(cache.to_vec::<f32>(), Err(Error::Donated { .. })));
            assert!(matches!(write.call(&[&cache, &row, &at]), Err(Error::Donated { .. })));
            cache = new;
        }
        assert_eq!(cache.to_vec::<f32>().unwrap(), [0.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0, 1.0]);
        assert_eq!((b.cache_stats().copies, write.plans()), (0, 1));
        // If something still reads the old value, or another handle shares its memory, the memory is copied.
        let row = Tensor::from_slice(&b, [1, 2], &[9f32, 9.0]).unwrap();
        let at = Tensor::from_slice(&b, Shape::scalar(), &[0i64]).unwrap();
        let later = &cache * 2.0;
        let other = cache.detach().unwrap();
        let new = write.call(&[cache.donate(), &row, &at]).unwrap().remove(0);
        assert_eq!(b.cache_stats().copies, 1);
        assert_eq!(new.to_vec::<f32>().unwrap()[..2], [9.0, 9.0]);
        assert_eq!(later.to_vec::<f32>().unwrap()[..2], [0.0, 2.0]);
        assert_eq!(other.to_vec::<f32>().unwrap()[..2], [0.0, 1.0]);
    }
}

#[test]
fn an_evaluation_does_not_take_memory_that_another_handle_shares() {
    let b = Backend::cpu().unwrap();
    let a = Tensor::from_slice(&b, [2, 1], &[1f32, 2.0]).unwrap();
    let other = a.detach().unwrap();
    let row = Tensor::from_slice(&b, [1, 1], &[7f32]).unwrap();
    let at = Tensor::from_slice(&b, Shape::scalar(), &[0i64]).unwrap();
    let new = a.donate().update_slice(&row, &at, 0);
    assert_eq!(new.to_vec::<f32>().unwrap(), [7.0, 2.0]);
    assert_eq!(other.to_vec::<f32>().unwrap(), [1.0, 2.0]);
}

#[test]
fn what_a_compiled_function_cannot_do_is_an_error() {
    let b = Backend::cpu().unwrap();
    let x = Tensor::from_slice(&b, [2], &[1f32, 2.0]).unwrap();
    let reads = b.compile(|x: &[Tensor]| -> Result<Tensor> {
        let _ = x[0].to_vec::<f32>()?;
        Ok(x[0].clone())
    });
    let e = reads.call(&[&x]).unwrap_err();
    assert!(matches!(e, Error::Argument { .. }) && e.to_string().contains("placeholder"), "{e}");
    let f = b.compile(|x: &[Tensor]| &x[0] + &x[0]);
    let e = f.call(&[&x.requires_grad().unwrap()]).unwrap_err();
    assert!(matches!(e, Error::Unsupported { .. }), "{e}");
    let noop = Backend::new(BackendType::Noop).unwrap();
    let y = Tensor::from_slice(&noop, [2], &[1f32, 2.0]).unwrap();
    assert!(matches!(f.call(&[&y]), Err(Error::MixedDevices { .. })));
    let bad = b.compile(|x: &[Tensor]| x[0].reshape([3]));
    assert!(matches!(bad.call(&[&x]), Err(Error::Shape { .. })));
    // A tensor that the function has captured is donated elsewhere.
    let w = Tensor::from_slice(&b, [2], &[5f32, 6.0]).unwrap();
    let g = b.compile(|x: &[Tensor]| &x[0] * &w);
    assert_eq!(g.call(&[&x]).unwrap()[0].to_vec::<f32>().unwrap(), [5.0, 12.0]);
    (w.donate() + 1.0).eval().unwrap();
    assert!(matches!(g.call(&[&x]), Err(Error::Donated { .. })));
    // One tensor is both an input and captured.
    let v = Tensor::from_slice(&b, [2], &[1f32, 1.0]).unwrap();
    let h = b.compile(|x: &[Tensor]| &x[0] * &v);
    assert!(matches!(h.call(&[v.donate()]), Err(Error::Argument { .. })));
    assert_eq!(v.to_vec::<f32>().unwrap(), [1.0, 1.0]);
}

#[test]
fn captured_graphs_replay_with_other_inputs_and_arguments() {
    let name = "captured_graphs_replay_with_other_inputs_and_arguments";
    let mut rng = Rng::fresh(name);
    for level in [Level::O0, Level::O1, Level::O2] {
        for b in devices(name, level) {
            let (x, w) = (random(&b, &mut rng, &[3, 8]), random(&b, &mut rng, &[8, 8]));
            let scale = Tensor::scalar(&b, 2.0, DType::F32);
            let f = |x: &Tensor, s: &Tensor| x.matmul(&w).relu() * s;
            let g = b.capture_graph(|| f(&x, &scale)).unwrap();
            assert_eq!(g.inputs().len(), 2);
            assert!(g.outputs().is_err(), "nothing has run");
            close(&b.launch_graph(&g, &[]).unwrap()[0], &f(&x, &scale));
            let plans = b.cache_stats().plans_built;
            for _ in 0..3 {
                let y = random(&b, &mut rng, &[3, 8]);
                let s = rng.uniform(-2.0, 2.0);
                g.set_argument(&scale, s).unwrap();
                let got = b.launch_graph(&g, &[&y, &w]).unwrap();
                close(&got[0], &(y.matmul(&w).relu() * s));
                let mut bytes = vec![0; 3 * 8 * 4];
                g.read(0, &mut bytes).unwrap();
                assert_eq!(bytes, got[0].to_data().unwrap().bytes());
            }
            // The evaluations in the loop build no plan. They use the plan of the capture.
            assert_eq!(b.cache_stats().plans_built, plans, "{} {level}", b.id());
        }
    }
}

#[test]
fn results_of_a_launch_stay_while_they_are_held() {
    let name = "results_of_a_launch_stay_while_they_are_held";
    for b in devices(name, Level::O1) {
        let at = |v: f32| Tensor::from_slice(&b, [2], &[v, -v]).unwrap();
        let x = at(1.0);
        let g = b.capture_graph(|| &x * 3.0).unwrap();
        let first = b.launch_graph(&g, &[]).unwrap();
        let pending = &first[0] + 1.0;
        let second = b.launch_graph(&g, &[&at(2.0)]).unwrap();
        drop(first);
        b.launch_graph(&g, &[&at(5.0)]).unwrap();
        assert_eq!(pending.to_vec::<f32>().unwrap(), [4.0, -2.0]);
        assert_eq!(second[0].to_vec::<f32>().unwrap(), [6.0, -6.0]);
        // When no result is held, launches write to the same memory.
        drop((pending, second));
        let before = b.counters().allocations;
        (0..10).for_each(|_| g.launch().unwrap());
        assert_eq!(b.counters().allocations, before, "{}", b.id());
        assert_eq!(g.outputs().unwrap()[0].to_vec::<f32>().unwrap(), [15.0, -15.0]);
    }
}

#[test]
fn bindings_of_captured_graphs_are_guarded() {
    let b = Backend::cpu().unwrap();
    let x = Tensor::from_slice(&b, [2], &[1f32, 2.0]).unwrap();
    let c = Tensor::scalar(&b, 1.0, DType::F32);
    let g = b.capture_graph(|| &x + &c).unwrap();
    // The CPU captures no commands, which is known before the first run.
    let reason = g.executable().captures().reason.unwrap();
    assert_eq!(reason, format!("{} does not capture commands", b.id()));
    let err = |t: &[&Tensor]| b.launch_graph(&g, t).unwrap_err();
    let longer = Tensor::from_slice(&b, [3], &[0f32; 3]).unwrap();
    let e = err(&[&longer]);
    assert!(matches!(e, Error::Shape { .. }) && e.to_string().contains("[3]"), "{e}");
    let ints = Tensor::from_slice(&b, [2], &[0i32; 2]).unwrap();
    assert!(matches!(err(&[&ints]), Error::DType { .. }));
    assert!(matches!(err(&[&x, &x]), Error::Argument { .. }));
    assert!(matches!(g.set_argument(&x, 1.0), Err(Error::Argument { .. })));
    let other = Backend::cpu().unwrap();
    let y = Tensor::from_slice(&other, [2], &[1f32, 2.0]).unwrap();
    assert!(matches!(err(&[&y]), Error::MixedDevices { .. }));
    assert!(matches!(other.launch_graph(&g, &[]), Err(Error::MixedDevices { .. })));
    // After all these errors, the bindings of the graph are unchanged.
    assert_eq!(b.launch_graph(&g, &[]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0, 3.0]);
    // A donation elsewhere does not take memory that the graph reads.
    let row = Tensor::from_slice(&b, [1], &[9f32]).unwrap();
    let zero = Tensor::from_slice(&b, Shape::scalar(), &[0i64]).unwrap();
    assert_eq!(x.donate().update_slice(&row, &zero, 0).to_vec::<f32>().unwrap(), [9.0, 2.0]);
    assert_eq!(b.launch_graph(&g, &[]).unwrap()[0].to_vec::<f32>().unwrap(), [2.0, 3.0]);
}

#[test]
fn a_captured_graph_takes_what_was_donated_to_it() {
    let name = "a_captured_graph_takes_what_was_donated_to_it";
    for b in devices(name, Level::O1) {
        let row = Tensor::from_slice(&b, [1, 2], &[1f32, 2.0]).unwrap();
        let zero = Tensor::from_slice(&b, Shape::scalar(), &[0i64]).unwrap();
        let mut cache = Tensor::from_slice(&b, [3, 2], &[0f32; 6]).unwrap();
        let g = b.capture_graph(|| cache.donate().update_slice(&row, &zero, 0)).unwrap();
        for i in 0..3i64 {
            let at = Tensor::from_slice(&b, Shape::scalar(), &[i]).unwrap();
            let new = b.launch_graph(&g, &[&cache, &row, &at]).unwrap().remove(0);
            assert!(matches!(cache.to_vec::<f32>(), Err(Error::Donated { .. })));
            // The graph is still bound to `cache`, whose memory was donated.
            assert!(matches!(b.launch_graph(&g, &[]), Err(Error::Donated { .. })));
            assert!(matches!(g.bind(&[&cache, &row, &at]), Err(Error::Donated { .. })));
            cache = new;
        }
        assert_eq!(cache.to_vec::<f32>().unwrap(), [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
        assert_eq!(b.cache_stats().copies, 0);
    }
}

#[test]
fn compiled_functions_and_captured_graphs_serve_several_threads() {
    let b = Backend::cpu().unwrap();
    let f = b.compile(|x: &[Tensor]| x[0].matmul(&x[0]) + 1.0);
    std::thread::scope(|s| {
        for t in 0..4 {
            let (b, f) = (&b, &f);
            s.spawn(move || {
                for i in 0..50 {
                    let v = (t * 100 + i) as f32;
                    let x = Tensor::from_slice(b, [1, 1], &[v]).unwrap();
                    let y = f.call(&[&x]).unwrap();
                    assert_eq!(y[0].to_vec::<f32>().unwrap(), [v * v + 1.0]);
                }
            });
        }
    });
    assert_eq!(f.plans(), 1);
    let x = Tensor::from_slice(&b, [1, 1], &[1f32]).unwrap();
    let g = b.capture_graph(|| x.matmul(&x) + 1.0).unwrap();
    std::thread::scope(|s| {
        for t in 0..4 {
            let (b, g) = (&b, &g);
            s.spawn(move || {
                for i in 0..50 {
                    let v = (t * 100 + i) as f32;
                    let x = Tensor::from_slice(b, [1, 1], &[v]).unwrap();
                    let y = b.launch_graph(g, &[&x]).unwrap();
                    assert_eq!(y[0].to_vec::<f32>().unwrap(), [v * v + 1.0]);
                }
            });
        }
    });
}

/// A call replaces states. It reuses the memory of an old value, or takes other memory if the caller still
/// holds the value. A call that fails before it runs changes nothing.
#[test]
fn states_are_replaced_and_old_values_that_are_held_stay() {
    let name = "states_are_replaced_and_old_values_that_are_held_stay";
    for b in devices(name, Level::O2) {
        let state = State::new(Tensor::from_slice(&b, [64], &[1.0f32; 64]).unwrap());
        let same = State::new(Tensor::from_slice(&b, [2], &[7.0f32; 2]).unwrap());
        let f = b.compile(|x: &[Tensor]| {
            let y = &x[1] + &x[0].reshape([-1, 1]).sum(0);
            [y.sum(..), y, x[2].clone()]
        });
        let x = Tensor::from_slice(&b, [2], &[0.5f32, 1.5]).unwrap();
        for k in 1..=3 {
            let before = b.cache_stats().copies;
            let made = f.call_updating(&[&x], &[&state, &same], &[]).unwrap();
            assert_eq!(made.len(), 1);
            assert_eq!(made[0].item::<f32>().unwrap(), 64.0 * (1.0 + 2.0 * k as f32), "{}", b.id());
            assert_eq!(b.cache_stats().copies, before, "{}", b.id());
        }
        assert_eq!(f.plans(), 1);
        assert_eq!(same.value().to_vec::<f32>().unwrap(), [7.0; 2], "a state that does not change");
        let held = state.value();
        f.call_updating(&[&x], &[&state, &same], &[]).unwrap();
        assert_eq!(held.to_vec::<f32>().unwrap(), [7.0; 64], "{}", b.id());
        assert_eq!(state.value().to_vec::<f32>().unwrap(), [9.0; 64], "{}", b.id());
        // A new value of another shape, too few results, and a missing argument: nothing runs.
        let wrong = b.compile(|x: &[Tensor]| [x[1].sum(..), x[1].narrow(0, 0usize, 3usize)]);
        let e = wrong.call_updating(&[&x], &[&state], &[]).unwrap_err().to_string();
        assert!(e.contains("[64]") && e.contains("[3]"), "{e}");
        let few = b.compile(|x: &[Tensor]| x[1].sum(..));
        let e = few.call_updating(&[&x], &[&state, &same], &[]).unwrap_err().to_string();
        assert!(e.contains("1 results for 2 states"), "{e}");
        let needs = b.compile(|x: &[Tensor]| [&x[1] * &Tensor::argument(x[1].backend(), 1, DType::F32)]);
        let e = needs.call_updating(&[&x], &[&state], &[1.0.into()]).unwrap_err().to_string();
        assert!(e.contains("argument 1"), "{e}");
        assert_eq!(state.value().to_vec::<f32>().unwrap(), [9.0; 64], "{}", b.id());
        assert!(Tensor::argument(&b, 0, DType::F32).to_vec::<f32>().is_err());
    }
}

/// A key that is passed as arguments gives the same numbers as the seed, and gradients stop at
/// `stop_gradient`.
#[test]
fn random_numbers_by_key_are_those_of_the_seed_and_gradients_stop() {
    let name = "random_numbers_by_key_are_those_of_the_seed_and_gradients_stop";
    for b in devices(name, Level::O2) {
        let seed = 0x1234_5678_9abc_def0u64;
        let f = b.compile(|x: &[Tensor]| {
            let key = [0, 1].map(|k| Tensor::argument(x[0].backend(), k, DType::U32));
            Tensor::rand_by_key([&key[0], &key[1]], [33])
        });
        let x = Tensor::ones(&b, [1], DType::F32);
        let args = [Scalar::U(seed & 0xffff_ffff), Scalar::U(seed >> 32)];
        let got = f.call_with(&[&x], &args).unwrap()[0].to_vec::<f32>().unwrap();
        assert_eq!(got, Tensor::rand(&b, [33], DType::F32, seed).to_vec::<f32>().unwrap(), "{}", b.id());
        let w = Tensor::from_slice(&b, [2], &[3.0f32, -4.0]).unwrap().requires_grad().unwrap();
        let loss = (&w * w.stop_gradient()).sum(..);
        assert_eq!(loss.backward().unwrap().get(&w).unwrap().to_vec::<f32>().unwrap(), [3.0, -4.0]);
    }
}
