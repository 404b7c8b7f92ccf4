use super::harness::*;
use halcyon_ir::kernel::templates::pool::lower;
use halcyon_ir::ops::{Op, Pool, PoolKind};
use halcyon_ir::{ConstData, DType, Scalar, TensorType, reference::eval_op};
use std::sync::Arc;

const KINDS: [PoolKind; 3] =
    [PoolKind::Max, PoolKind::Avg { count_include_pad: true }, PoolKind::Avg { count_include_pad: false }];

/// Shapes of inputs, each with the kernel, stride, padding and dilation of windows over one to three axes.
fn windows() -> Vec<(Vec<usize>, Pool)> {
    let make = |x: &[usize], k: &[usize], s: &[usize], p: &[(usize, usize)], d: &[usize]| {
        let pool = Pool {
            kind: PoolKind::Max,
            kernel: k.into(),
            stride: s.into(),
            pad: p.into(),
            dilation: d.into(),
        };
        (x.to_vec(), pool)
    };
    vec![
        make(&[2, 3, 13], &[3], &[2], &[(1, 1)], &[1]),
        make(&[2, 3, 7, 9], &[3, 2], &[1, 2], &[(0, 1), (1, 0)], &[1, 1]),
        make(&[1, 2, 8, 9], &[2, 3], &[3, 1], &[(1, 1), (2, 2)], &[2, 2]),
        make(&[1, 2, 3, 5, 4], &[2, 3, 2], &[1, 2, 2], &[(1, 0), (1, 1), (0, 1)], &[1, 1, 1]),
        // The first and last windows lie entirely in the padding.
        make(&[1, 1, 4], &[2], &[2], &[(3, 3)], &[1]),
    ]
}

fn forward(x: Input, p: &Pool) {
    check(lower, &[x], 8.0, |g, v| g.pool(v[0], p.clone()));
}

#[test]
fn forward_over_every_window_and_dtype() {
    let mut r = Rng::new(21);
    for (shape, p) in windows() {
        for kind in KINDS {
            let p = Pool { kind, ..p.clone() };
            forward(Input::dense(&mut r, DType::F32, &shape), &p);
        }
    }
    let (shape, p) = windows().swap_remove(1);
    for d in DType::native().filter(|d| *d != DType::Bool) {
        forward(Input::dense(&mut r, d, &shape), &p);
        if d.is_float() {
            let p = Pool { kind: KINDS[2], ..p.clone() };
            forward(Input::dense(&mut r, d, &shape), &p);
        }
    }
}

#[test]
fn maximum_propagates_nan() {
    let mut r = Rng::new(22);
    let (shape, p) = windows().swap_remove(1);
    let mut x = Input::dense(&mut r, DType::F32, &shape);
    x.set(17, f64::NAN);
    x.set(40, f64::INFINITY);
    x.set(41, f64::NEG_INFINITY);
    forward(x, &p);
}

/// Checks the gradient. Its operand y is the result of the pool.
fn backward(x: Input, p: &Pool, r: &mut Rng) {
    let d = x.operand.dtype;
    let dims = &x.operand.view.shape;
    let data = ConstData::new(d, dims, Arc::new(x.data.clone())).unwrap();
    let op = Op::Pool(p.clone());
    let ty = op.infer(&[&TensorType::new(d, dims)], None).unwrap();
    let y = eval_op(&op, &[&data], &ty, &[] as &[Scalar]).unwrap();
    let mut yi = Input::dense(r, d, &y.dims);
    yi.data = y.bytes().to_vec();
    let dy = Input::dense(r, d, &y.dims);
    check(lower, &[x, yi, dy], 16.0, |g, v| g.push(Op::PoolGrad(p.clone()), v, None));
}

#[test]
fn gradients_over_every_window_and_dtype() {
    let mut r = Rng::new(23);
    for (shape, p) in windows() {
        for kind in KINDS {
            let p = Pool { kind, ..p.clone() };
            backward(Input::dense(&mut r, DType::F32, &shape), &p, &mut r);
        }
    }
    let (shape, p) = windows().swap_remove(2);
    for d in DType::native().filter(|d| d.is_float()) {
        backward(Input::dense(&mut r, d, &shape), &p, &mut r);
    }
}

#[test]
fn the_first_of_equals_and_nan_take_the_gradient() {
    let mut r = Rng::new(24);
    let (shape, p) = windows().swap_remove(1);
    let mut x = Input::dense(&mut r, DType::F32, &shape);
    let n = shape.iter().product::<usize>();
    for i in 0..n {
        // Few distinct values, so that most windows have several maxima.
        x.set(i, (i * 7 % 3) as f64 - 1.0);
    }
    for i in [5, 6, 30] {
        x.set(i, f64::NAN);
    }
    backward(x, &p, &mut r);
}
