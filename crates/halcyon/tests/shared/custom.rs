//! Custom ops: with and without a kernel, their gradients, and graphs that contain them.

use halcyon::ir::custom::{CustomOp, register};
use halcyon::ir::plan::StepWork;
use halcyon::ir::shape::TensorType;
use halcyon::ir::{Graph, reference};
use halcyon::optable::user::{PlusOne, SquareShift};
use halcyon::prelude::*;
use halcyon::{ConstData, Session};
use halcyon_test::Rng;
use halcyon_test::devices::devices;
use std::sync::Arc;

/// `tanh(op(xᵀ)) · 2` on `[3, 5]`: the op is between ops that could fuse, and reads a view.
fn between(op: Arc<dyn CustomOp>) -> Graph {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [3usize, 5]));
    let t = g.transpose(x, 0, 1).unwrap();
    let c = g.custom(op, &[t]).unwrap();
    let y = g.tanh(c).unwrap();
    let two = g.lit(y, 2.0);
    let z = g.mul(y, two).unwrap();
    g.output("z", z);
    g
}

fn close(a: &ConstData, b: &ConstData) {
    assert_eq!(a.dims, b.dims);
    for (a, b) in a.to_vec::<f64>().iter().zip(b.to_vec::<f64>()) {
        assert!((a - b).abs() <= 1e-5 * b.abs().max(0.1), "{a} {b}");
    }
}

#[test]
fn an_op_with_a_kernel_runs_it_on_every_device() {
    let mut rng = Rng::fresh("custom kernel");
    for level in [Level::O0, Level::O1] {
        for b in devices("custom kernel", level) {
            let x = [ConstData::from_slice(&[3, 5], &rng.f32s(15)).unwrap()];
            let g = between(Arc::new(SquareShift { shift: 0.75 }));
            let s = Session::new(&b, g.clone());
            close(&s.run(&x).unwrap()[0], &reference::eval(&g, &x, &[]).unwrap()[0]);
            let plan = s.prepare(&x).unwrap();
            let mine: Vec<_> = plan.plan().steps.iter().filter(|s| s.op == "tests.swirl").collect();
            assert_eq!(mine.len(), 1);
            assert!(matches!(mine[0].work, StepWork::Kernel { .. }), "{}", mine[0].work.kernel_name());
            assert!(plan.plan().warnings.is_empty(), "{:?}", plan.plan().warnings);
        }
    }
}

#[test]
fn attributes_tell_ops_apart() {
    for b in devices("custom attributes", Level::O1) {
        let x = Tensor::from_slice(&b, [3], &[1f32, 2.0, -1.0]).unwrap();
        let y = Tensor::custom(Arc::new(SquareShift { shift: 0.0 }), &[&x]);
        let z = Tensor::custom(Arc::new(SquareShift { shift: 3.0 }), &[&x]);
        assert_eq!((&y + &z).to_vec::<f32>().unwrap(), [5.0, 14.0, -1.0]);
    }
}

#[test]
fn an_op_without_a_kernel_runs_on_the_host_and_the_plan_says_so() {
    let mut rng = Rng::fresh("custom host");
    for b in devices("custom host", Level::O1) {
        let x = [ConstData::from_slice(&[3, 5], &rng.f32s(15)).unwrap()];
        let g = between(Arc::new(PlusOne));
        let s = Session::new(&b, g.clone());
        close(&s.run(&x).unwrap()[0], &reference::eval(&g, &x, &[]).unwrap()[0]);
        let plan = s.prepare(&x).unwrap();
        assert!(plan.plan().steps.iter().any(|s| s.work.kernel_name() == "host.tests.plus_one"));
        assert!(
            plan.plan().warnings.iter().any(|w| w.contains("tests.plus_one") && w.contains("host")),
            "{:?}",
            plan.plan().warnings
        );
    }
}

#[test]
fn gradients_flow_through_an_op_that_has_one() {
    for b in devices("custom gradient", Level::O1) {
        let v = [0.5f32, -1.5, 2.0];
        let x = Tensor::from_slice(&b, [3], &v).unwrap().requires_grad().unwrap();
        let (y, g) = value_and_grad(std::slice::from_ref(&x), |p| {
            Ok(Tensor::custom(Arc::new(SquareShift { shift: 0.25 }), &[&p[0]]).sum(..))
        })
        .unwrap();
        let f = |v: f64| v * v + 0.25 * v;
        let want: f64 = v.iter().map(|v| f(*v as f64)).sum();
        assert!((y.item::<f64>().unwrap() - want).abs() < 1e-5);
        for (g, v) in g[0].to_vec::<f64>().unwrap().iter().zip(v) {
            let (h, v) = (1e-4, v as f64);
            let fd = (f(v + h) - f(v - h)) / (2.0 * h);
            assert!((g - fd).abs() < 1e-4, "{g} {fd}");
        }
        let e = value_and_grad(&[x], |p| Ok(Tensor::custom(Arc::new(PlusOne), &[&p[0]]).sum(..)));
        let e = e.expect_err("an op without a gradient rule").to_string();
        assert!(e.contains("tests.plus_one"), "{e}");
    }
}

#[test]
fn wrong_operands_are_an_error_with_the_place() {
    for b in devices("custom errors", Level::O1) {
        let x = Tensor::from_slice(&b, [2], &[1i32, 2]).unwrap();
        let e = Tensor::custom(Arc::new(SquareShift { shift: 1.0 }), &[&x]).check().unwrap_err().to_string();
        assert!(e.contains("tests.swirl") && e.contains("custom.rs"), "{e}");
    }
}

#[test]
fn loading_a_graph_needs_its_ops_registered() {
    // A key that no other test registers.
    let op = Arc::new(SquareShift { shift: 41.5 });
    let g = between(op.clone());
    let bytes = g.to_bytes().unwrap();
    let e = Graph::from_bytes(&bytes).expect_err("the op is unknown").to_string();
    assert!(e.contains("tests.swirl") && e.contains("register"), "{e}");
    register(op);
    let back = Graph::from_bytes(&bytes).unwrap();
    assert_eq!(back, g);
    let x = [ConstData::from_slice(&[3, 5], &[0.5f32; 15]).unwrap()];
    for b in devices("custom loaded", Level::O1) {
        close(&Session::new(&b, back.clone()).run(&x).unwrap()[0], &reference::eval(&g, &x, &[]).unwrap()[0]);
    }
}
