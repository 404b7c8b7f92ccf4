//! Joined chains and merged launches: the number of launches of an optimizer's step, and that its results
//! stay the same.

use halcyon::ir::graph::NodeId;
use halcyon::ir::passes::{JOINED, LAUNCHES};
use halcyon::ir::plan::{Plan, StepWork};
use halcyon::ir::{Graph, ScalarOp, TensorType};
use halcyon::prelude::*;
use halcyon::verify::VerifyOptions;
use halcyon::{ConstData, Session, State};
use halcyon_test::Rng;
use halcyon_test::devices::test_backends;

fn backend(kind: BackendType, without: &[&str]) -> Backend {
    let b = Backend::builder().backend_type(kind).level(Level::O2).num_threads(2);
    without.iter().fold(b, |b, w| b.without(w)).build().unwrap()
}

/// An optimizer's update with two moments.
fn adam(x: &[Tensor]) -> Vec<Tensor> {
    let n = x.len() / 4;
    let (mut params, mut moments) = (vec![], vec![]);
    for i in 0..n {
        let (g, p, m, v) = (&x[i], &x[n + i], &x[2 * n + 2 * i], &x[2 * n + 2 * i + 1]);
        let number = |k: u32| Tensor::argument(g.backend(), k, DType::F32).cast(g.dtype().unwrap());
        let m = m + (g - m) * number(0);
        let v = v * number(1) + g.sqr() * number(2);
        params.push(p - &m / (v.sqrt() + 1e-3) * number(3));
        moments.extend([m, v]);
    }
    params.into_iter().chain(moments).collect()
}

fn commands(c: &halcyon::hal::Counters) -> u64 {
    c.launches + c.library_calls
}

fn merges(plan: &Plan) -> usize {
    plan.steps
        .iter()
        .filter(|s| matches!(&s.work, StepWork::Kernel { kernel, .. } if kernel.parts.is_some()))
        .count()
}

#[test]
fn an_optimizers_step_is_one_launch_where_the_device_can() {
    if halcyon_test::left_out("an_optimizers_step_is_one_launch_where_the_device_can") {
        return;
    }
    let mut rng = Rng::fresh("an_optimizers_step_is_one_launch_where_the_device_can");
    // Shapes as models have them, single elements, odd lengths and an empty tensor.
    let shapes: [&[usize]; 8] = [&[33, 64], &[64], &[1], &[], &[10, 7], &[5], &[0, 3], &[2, 3, 4]];
    for kind in test_backends() {
        for dtype in [DType::F32, DType::F16] {
            let data: Vec<Vec<Vec<f32>>> = (0..4)
                .map(|role| {
                    let of = |s: &&[usize]| {
                        let v = rng.f32s(s.iter().product());
                        // The second moment is not negative.
                        v.into_iter().map(|x| if role == 3 { x.abs() } else { x }).collect()
                    };
                    shapes.iter().map(of).collect()
                })
                .collect();
            let run = |without: &[&str]| {
                let b = backend(kind, without);
                let tensor = |role: usize, k: usize| {
                    Tensor::from_slice(&b, shapes[k], &data[role][k]).unwrap().cast(dtype)
                };
                let states: Vec<State> = (0..shapes.len())
                    .map(|k| tensor(1, k))
                    .chain((0..shapes.len()).flat_map(|k| [tensor(2, k), tensor(3, k)]))
                    .map(|t| {
                        t.eval().unwrap();
                        State::new(t)
                    })
                    .collect();
                let f = b.compile(adam as fn(&[Tensor]) -> Vec<Tensor>);
                let grads: Vec<Tensor> = (0..shapes.len()).map(|k| tensor(0, k)).collect();
                for g in &grads {
                    g.eval().unwrap();
                }
                let before = b.counters();
                let args = [0.1, 0.9, 0.05, 0.01].map(halcyon::ir::Scalar::F);
                let mut launched = 0;
                for _ in 0..3 {
                    let start = commands(&b.counters());
                    f.call_updating(
                        &grads.iter().collect::<Vec<_>>(),
                        &states.iter().collect::<Vec<_>>(),
                        &args,
                    )
                    .unwrap();
                    launched = commands(&b.counters()) - start;
                }
                // A captured launch copies the run-time arguments if they have changed.
                let after = b.counters();
                let captured = after.capture_launches - before.capture_launches;
                assert!(after.uploads - before.uploads <= captured, "{kind}: {after:?}");
                let got: Vec<Vec<f32>> =
                    states.iter().map(|s| s.value().cast(DType::F32).to_vec().unwrap()).collect();
                (launched, got, b.device().as_target().caps().max_argument_bytes > 0)
            };
            let (plain, want, _) = run(&[JOINED, LAUNCHES]);
            let (joined, got, merges) = run(&[LAUNCHES]);
            let (all, again, _) = run(&[]);
            assert!(got == want && again == want, "{kind} {dtype}");
            if dtype == DType::F16 {
                continue;
            }
            // An empty tensor has no kernel.
            assert_eq!((plain, joined), (21, 7), "{kind} {dtype}");
            assert_eq!(all, if merges { 1 } else { 7 }, "{kind} {dtype}");
        }
    }
}

/// A graph in which most chains may not move.
fn tangled(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let mut g = Graph::new();
    let mut inputs = vec![];
    let mut values: Vec<NodeId> = vec![];
    for k in 0..4 {
        inputs.push(ConstData::from_slice(&[6, 10], &rng.f32s(60)).unwrap());
        values.push(g.input(&format!("x{k}"), TensorType::new(DType::F32, [6, 10])));
    }
    for k in 0..40 {
        let x = values[rng.below(values.len())];
        let y = values[rng.below(values.len())];
        let new = match rng.below(7) {
            0 => g.scalar(ScalarOp::Tanh, &[x]).unwrap(),
            1 => g.softmax(x, 1).unwrap(),
            2 => {
                let t = g.transpose(x, 0, 1).unwrap();
                let t = g.matmul(t, y).unwrap();
                let z = g.matmul(x, t).unwrap();
                g.scalar(ScalarOp::Tanh, &[z]).unwrap()
            }
            3 => {
                let s = g.mean(x, &[1], true).unwrap();
                g.sub(y, s).unwrap()
            }
            4 => g.mul(x, y).unwrap(),
            5 => {
                let x = g.narrow(x, 1, 0usize, 5usize).unwrap();
                let y = g.narrow(y, 1, 5usize, 5usize).unwrap();
                g.concat(&[x, y], 1).unwrap()
            }
            _ => g.add(x, y).unwrap(),
        };
        values.push(new);
        if rng.below(3) == 0 || k == 39 {
            g.output(&format!("y{k}"), new);
        }
    }
    (g, inputs)
}

/// A merged launch needs the operands of all its parts at once.
#[test]
fn a_plan_that_does_not_fit_goes_without_merged_launches() {
    let mut rng = Rng::fresh("a_plan_that_does_not_fit_goes_without_merged_launches");
    // Inputs and outputs are small; each sum and each tanh has 256 KiB.
    const N: usize = 8;
    const BYTES: u64 = 256 << 10;
    let mut g = Graph::new();
    let (mut inputs, mut stored) = (vec![], vec![]);
    for k in 0..N {
        let x = g.input(&format!("x{k}"), TensorType::new(DType::F32, [64usize, 1]));
        inputs.push(ConstData::from_slice(&[64, 1], &rng.f32s(64)).unwrap());
        let wide = g.expand(x, &[64usize, 1024].into()).unwrap();
        let sums = g.scan(halcyon::ReduceKind::Sum, wide, 1, false, false).unwrap();
        stored.push(g.scalar(ScalarOp::Tanh, &[sums]).unwrap());
    }
    let w = g.constant(ConstData::from_slice(&[1024, 1], &rng.f32s(1024)).unwrap());
    for (k, x) in stored.into_iter().enumerate() {
        let y = g.matmul(x, w).unwrap();
        g.output(&format!("y{k}"), y);
    }
    for kind in test_backends() {
        let run = |limit: u64| {
            let b = Backend::builder().backend_type(kind).level(Level::O2).num_threads(2).memory_limit(limit);
            let b = b.build().unwrap();
            let s = Session::new(&b, g.clone());
            let y = s.run(&inputs).unwrap();
            let merged = merges(s.prepare(&inputs).unwrap().plan());
            (y, merged, b.cache_stats().smaller_plans)
        };
        let (want, merged, smaller) = run(64 << 20);
        assert_eq!((smaller, merged > 0), (0, kind == BackendType::OpenCl), "{kind}");
        if merged == 0 {
            continue;
        }
        // There is memory for each tanh, but not for the sums of all inputs.
        let (got, merged, smaller) = run((N as u64 + 4) * BYTES);
        assert_eq!((merged, smaller), (0, 1), "{kind}");
        assert_eq!(got, want, "{kind}");
    }
}

/// Two steps write one buffer, each a part of it, and both read the result of a chain.
#[test]
fn parts_of_a_buffer_stay_steps_of_their_own() {
    let reference = Backend::builder().backend_type(BackendType::Cpu).level(Level::O0).build().unwrap();
    let mut rng = Rng::fresh("parts_of_a_buffer_stay_steps_of_their_own");
    for n in [1usize, 7] {
        let mut g = Graph::new();
        let x = g.input("x", TensorType::new(DType::F32, [n]));
        let y = g.scalar(ScalarOp::Atan, &[x]).unwrap();
        let twice = g.concat(&[y, y], 0).unwrap();
        let other = g.concat(&[y, x], 0).unwrap();
        for (k, v) in [twice, y, other].into_iter().enumerate() {
            g.output(&format!("y{k}"), v);
        }
        let x = ConstData::from_slice(&[n], &rng.f32s(n)).unwrap();
        for kind in test_backends() {
            let s = Session::new(&backend(kind, &[]), g.clone());
            let report = s.verify(std::slice::from_ref(&x), &VerifyOptions::new(&reference)).unwrap();
            assert!(report.agrees(), "{kind}: {:?}", report.divergence);
        }
    }
}

#[test]
fn chains_move_only_where_nothing_depends_on_their_place() {
    if halcyon_test::left_out("chains_move_only_where_nothing_depends_on_their_place") {
        return;
    }
    let mut rng = Rng::fresh("chains_move_only_where_nothing_depends_on_their_place");
    let (mut joined, mut merged) = (0, 0);
    for _ in 0..6 {
        let (g, inputs) = tangled(&mut rng);
        let reference = Backend::builder().backend_type(BackendType::Cpu).level(Level::O0).build().unwrap();
        for kind in test_backends() {
            let with = Session::new(&backend(kind, &[]), g.clone());
            let without = Session::new(&backend(kind, &[JOINED, LAUNCHES]), g.clone());
            let d = halcyon::session::difference(&with.run(&inputs).unwrap(), &without.run(&inputs).unwrap());
            assert!(d < 1e-5, "{kind}: {d}");
            let plan = with.prepare(&inputs).unwrap();
            let count = |name: &str| {
                plan.plan()
                    .receipts
                    .iter()
                    .filter(|r| r.transformation == name)
                    .map(|r| r.count)
                    .sum::<usize>()
            };
            joined += count(JOINED);
            merged += merges(plan.plan());
            // Pieces of several values are checked like others.
            let report = with.verify(&inputs, &VerifyOptions::new(&reference)).unwrap();
            assert!(report.agrees(), "{kind}: {:?}", report.divergence);
        }
    }
    assert!(joined > 0, "no chain was joined");
    println!("{joined} chains joined, {merged} merged steps");
}
