//! The op table on CUDA and ROCm, whose drivers run over libraries that stand in for the vendors': kernels as a GPU gets them, with
//! subgroups of 32 and 64, compiled as C++.
#![cfg(all(unix, feature = "cuda", feature = "rocm"))]

mod common;
mod optable;
#[path = "../../halcyon-hal/tests/common/standin.rs"]
mod standin;

use common::Rng;
use halcyon::compat::training::configure_backend;
use halcyon::hal::registry;
use halcyon::ir::op::Conv;
use halcyon::ir::reference::eval_f64;
use halcyon::ir::{Graph, TensorType};
use halcyon::prelude::*;
use halcyon::{ConstData, MatmulPrecision, Session};
use optable::check::{Tally, check_rows};
use optable::{random, rows};

/// A backend over the stand-in; `None` where it could not be built.
fn backend(kind: BackendType, level: Level) -> Option<Backend> {
    use halcyon::hal::Driver;
    let s = standin::all().into_iter().find(|s| s.driver.kind() == kind)?;
    registry::register(s.driver.clone()).unwrap();
    Some(Backend::builder().backend_type(kind).level(level).build().unwrap())
}

fn op_table(kind: BackendType) {
    let what = format!("op table on {kind} over its stand-in");
    let Some(b) = backend(kind, Level::O1) else { return };
    check_rows(&what, &rows(), std::slice::from_ref(&b), &mut Rng::fresh(&what)).finish(&what);
    let failures = (1..=20).filter_map(|seed| random::check(seed, std::slice::from_ref(&b)).err()).collect();
    Tally { cases: 20, failures, ..Tally::default() }.finish(&what);
}

#[test]
fn op_table_on_cuda() {
    op_table(BackendType::Cuda);
}

#[test]
fn op_table_on_rocm() {
    op_table(BackendType::Rocm);
}

/// Two layers of a network, and a convolution.
fn layers() -> (Graph, Vec<ConstData>) {
    let (mut rng, mut g) = (Rng::new(11), Graph::new());
    let mut data = |dims: &[usize]| ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap();
    let inputs = vec![data(&[2, 24, 96]), data(&[2, 4, 12, 12])];
    let weights: Vec<_> =
        [&[96, 64][..], &[64], &[80, 64], &[8, 4, 3, 3], &[1, 8, 1, 1]].map(|d| g.constant(data(d))).into();
    let of = |i: usize| TensorType::new(DType::F32, &inputs[i].dims);
    let (x, image) = (g.input("x", of(0)), g.input("image", of(1)));
    let y = g.matmul(x, weights[0]).unwrap();
    let y = g.add(y, weights[1]).unwrap();
    let y = g.relu(y).unwrap();
    let turned = g.permute(weights[2], &[1, 0]).unwrap();
    let z = g.matmul(y, turned).unwrap();
    let z = g.gelu_tanh(z).unwrap();
    g.output("z", z);
    let c = g.conv(image, weights[3], Conv::new(2)).unwrap();
    let c = g.add(c, weights[4]).unwrap();
    let c = g.relu(c).unwrap();
    g.output("c", c);
    (g, inputs)
}

/// Names of the kernels that [`layers`] runs by, and the largest difference of each result from `want`.
fn kernels_and_errors(b: &Backend, want: &[ConstData]) -> (Vec<String>, Vec<f64>) {
    let (g, inputs) = layers();
    let session = Session::new(b, g);
    let calls = b.counters().library_calls;
    let got = session.run(&inputs).unwrap();
    let plan = session.prepare(&inputs).unwrap();
    let names: Vec<String> = plan.plan().steps.iter().map(|s| s.work.kernel_name()).collect();
    let library = names.iter().filter(|n| !n.starts_with("ir.")).count();
    assert_eq!(b.counters().library_calls - calls, library as u64, "{names:?}");
    let error = |(g, w): (&ConstData, &ConstData)| {
        let pairs = g.scalars().zip(w.scalars());
        pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max)
    };
    (names, got.iter().zip(want).map(error).collect())
}

#[test]
fn plans_use_the_vendors_libraries() {
    let (g, inputs) = layers();
    let want = eval_f64(&g, &inputs, &[]).unwrap();
    for (kind, products, conv) in
        [(BackendType::Cuda, "cublaslt", true), (BackendType::Rocm, "hipblaslt", false)]
    {
        let Some(plain) = backend(kind, Level::O2) else { return };
        let (names, exact) = kernels_and_errors(&plain, &want);
        let has = |names: &[String], n: &str| assert!(names.iter().any(|x| x == n), "no {n} in {names:?}");
        has(&names, &format!("{products}.f32.relu"));
        has(&names, &format!("{products}.f32.gelu"));
        if conv {
            has(&names, "cudnn.conv.f32.relu");
        }
        assert!(exact.iter().all(|e| *e < 1e-4), "{kind}: {exact:?}");
        // TF32 where it is allowed: in the plan, and in the digits.
        let with = |level, p| {
            let b = Backend::builder().backend_type(kind).level(level).precision(p);
            kernels_and_errors(&b.build().unwrap(), &want)
        };
        let (names, loose) = with(Level::O2, MatmulPrecision::High);
        if !conv {
            // AMD's devices multiply f32 as it is.
            has(&names, &format!("{products}.f32.relu"));
            assert!(loose[0] < 1e-4, "{kind}: {loose:?}");
            continue;
        }
        has(&names, "cublaslt.tf32.relu");
        has(&names, "cudnn.conv.tf32.relu");
        assert!(loose[0] > 20.0 * exact[0] && loose[0] < 0.1, "{kind}: {exact:?}, {loose:?}");
        assert!(loose[1] > 20.0 * exact[1] && loose[1] < 0.1, "{kind}: {exact:?}, {loose:?}");
        // Below O2 results are judged as those of the highest precision, and chains are kernels of their own.
        let (names, e) = with(Level::O1, MatmulPrecision::High);
        has(&names, "cublaslt.f32");
        assert!(e.iter().all(|e| *e < 1e-4), "{kind}: {e:?}");
        // The settings for training reach the library.
        let c = configure_backend(kind.id(), plain.info(), false).unwrap();
        has(&kernels_and_errors(&c.backend, &want).0, "cublaslt.tf32.relu");
    }
}

/// A product or a convolution of random sizes, and what may follow one.
fn drawn(rng: &mut Rng) -> (Graph, Vec<ConstData>) {
    let (mut g, mut inputs) = (Graph::new(), vec![]);
    let mut input = |g: &mut Graph, rng: &mut Rng, dims: &[usize]| {
        inputs.push(ConstData::from_slice(dims, &rng.f32s(dims.iter().product())).unwrap());
        g.input(&format!("x{}", inputs.len()), TensorType::new(DType::F32, dims))
    };
    let conv = rng.below(3) == 0;
    let mut y = if conv {
        let (b, c, o, n) = (1 + rng.below(3), 2 + rng.below(4), 2 + rng.below(8), 8 + rng.below(8));
        let x = input(&mut g, rng, &[b, c, n + 4, n]);
        let w = input(&mut g, rng, &[o, c, 3, 3]);
        g.conv(x, w, Conv::new(2)).unwrap()
    } else {
        let (m, k, n) = (16 + rng.below(24), 40 + rng.below(60), 16 + rng.below(40));
        let head: Vec<usize> = (0..rng.below(3)).map(|_| 1 + rng.below(3)).collect();
        let x = input(&mut g, rng, &[&head[..], &[m, k]].concat());
        let w = match rng.below(3) {
            0 => input(&mut g, rng, &[k, n]),
            1 => input(&mut g, rng, &[&head[..], &[k, n]].concat()),
            _ => {
                let t = input(&mut g, rng, &[n, k]);
                g.permute(t, &[1, 0]).unwrap()
            }
        };
        g.matmul(x, w).unwrap()
    };
    let dims: Vec<usize> = g.shape(y).known().unwrap().to_vec();
    for _ in 0..rng.below(4) {
        let along = |axis: usize| -> Vec<usize> {
            (0..dims.len()).map(|a| if a == axis { dims[a] } else { 1 }).collect()
        };
        y = match rng.below(7) {
            0 | 1 => {
                let b = input(&mut g, rng, &along(if conv { 1 } else { dims.len() - 1 }));
                g.add(b, y).unwrap()
            }
            // Along another axis, or everywhere: no bias.
            2 => {
                let b = input(&mut g, rng, &along(0));
                g.add(y, b).unwrap()
            }
            3 => {
                let b = input(&mut g, rng, &dims);
                g.add(y, b).unwrap()
            }
            4 => g.gelu(y).unwrap(),
            5 => g.gelu_tanh(y).unwrap(),
            _ => g.relu(y).unwrap(),
        };
    }
    g.output("y", y);
    (g, inputs)
}

#[test]
fn chains_on_top_follow_float64() {
    let what = "chains on top of the vendors' kernels";
    let mut rng = Rng::fresh(what);
    for kind in [BackendType::Cuda, BackendType::Rocm] {
        let Some(b) = backend(kind, Level::O2) else { return };
        let (mut calls, mut chains) = (0, 0);
        for round in 0..12 {
            let (g, inputs) = drawn(&mut rng);
            let want = eval_f64(&g, &inputs, &[]).unwrap();
            let session = Session::new(&b, g);
            let got = session.run(&inputs).unwrap();
            let plan = session.prepare(&inputs).unwrap();
            let library = plan.plan().steps.iter().filter(|s| !s.work.kernel_name().starts_with("ir."));
            library.for_each(|s| (calls, chains) = (calls + 1, chains + u32::from(s.fused.is_some())));
            let pairs = got[0].scalars().zip(want[0].scalars());
            let e = pairs.map(|(g, w)| (g.as_f64() - w.as_f64()).abs()).fold(0.0, f64::max);
            assert!(e < 1e-4, "{kind}, round {round}: {e}\n{}", plan.plan());
        }
        assert!(calls > 0, "{kind}: no library was asked");
        println!("{kind}: {calls} calls, {chains} with chains on top");
    }
}
