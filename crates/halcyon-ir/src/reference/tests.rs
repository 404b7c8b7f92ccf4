use super::*;
use crate::ops::{Conv, Pool, PoolKind, ScatterKind};
use crate::shape::Dim;

fn f(dims: &[usize], v: &[f32]) -> ConstData {
    ConstData::from_slice(dims, v).unwrap()
}

fn i(dims: &[usize], v: &[i64]) -> ConstData {
    ConstData::from_slice(dims, v).unwrap()
}

/// Builds a graph of one op on constants and evaluates it.
fn one(x: &[&ConstData], build: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>) -> Result<ConstData> {
    let mut g = Graph::new();
    let ids: Vec<NodeId> = x.iter().map(|c| g.constant((*c).clone())).collect();
    let y = build(&mut g, &ids)?;
    g.output("y", y);
    Ok(eval(&g, &[], &[])?.remove(0))
}

fn got(c: &ConstData) -> Vec<f64> {
    c.to_vec()
}

#[test]
fn every_type_survives_reading_and_writing() {
    for d in DType::all() {
        let c = ConstData::from_slice(&[5], &[0.0f64, 1.0, -3.0, 100.0, 0.5]).unwrap();
        let t = Tensor { dtype: d, dims: c.dims.clone(), v: cast(&Tensor::read(&c), d) };
        let w = t.write().unwrap();
        let want: Vec<Scalar> = c.scalars().map(|s| s.cast(d)).collect();
        assert_eq!(w.scalars().collect::<Vec<_>>(), want, "{d}");
        assert_eq!(Tensor::read(&w).write().unwrap(), w, "{d}");
    }
}

#[test]
fn scalar_ops_agree_with_the_table_on_every_type() {
    for row in crate::ops::element_wise::ROWS {
        for d in DType::all().filter(|d| row.op.takes(*d)) {
            let vals: Vec<Scalar> = [0.0, 1.0, 2.0, 3.0, -1.0, -2.5, 7.0, 250.0, 1e10, f64::NAN]
                .iter()
                .map(|v| Scalar::F(*v).cast(d))
                .collect();
            for s in 0..vals.len() {
                let pick = |k: usize| {
                    let v = vals[(s + 3 * k) % vals.len()];
                    if k == 0 && row.rule == Rule::Select { Scalar::Bool(s % 2 == 0) } else { v }
                };
                let x: Vec<Scalar> = (0..row.arity).map(pick).collect();
                let mut g = Graph::new();
                let ids: Vec<NodeId> = x
                    .iter()
                    .map(|v| match v {
                        Scalar::Bool(_) => g.full(DType::Bool, Shape::scalar(), *v),
                        v => g.full(d, Shape::scalar(), *v),
                    })
                    .collect();
                let y = g.scalar(row.op, &ids).unwrap();
                g.output("y", y);
                let y = eval(&g, &[], &[]).unwrap()[0].get(0).unwrap();
                let want = row.op.eval(d, &x);
                let same = y == want || (y.as_f64().is_nan() && want.as_f64().is_nan());
                assert!(same, "{} on {d} of {x:?}: {y:?}, table {want:?}", row.name);
            }
        }
    }
}

#[test]
fn reductions_propagate_nan_and_wrap() {
    let x = f(&[2, 3], &[1.0, f32::NAN, 3.0, 4.0, 5.0, -6.0]);
    let max = got(&one(&[&x], |g, x| g.reduce(ReduceKind::Max, x[0], &[1], false)).unwrap());
    assert!(max[0].is_nan() && max[1] == 5.0);
    let u = ConstData::from_slice(&[3], &[200u8, 100, 1]).unwrap();
    assert_eq!(got(&one(&[&u], |g, x| g.sum(x[0], &[0], true)).unwrap()), [45.0]);
    let e = f(&[0, 2], &[]);
    assert_eq!(got(&one(&[&e], |g, x| g.sum(x[0], &[0], false)).unwrap()), [0.0, 0.0]);
    let m = got(&one(&[&e], |g, x| g.reduce(ReduceKind::Max, x[0], &[0], false)).unwrap());
    assert_eq!(m, [f64::NEG_INFINITY; 2]);
    // 2^24 + 1 + 1 loses the ones when summed in f32; the f64 accumulator keeps them.
    let b = f(&[3], &[16_777_216.0, 1.0, 1.0]);
    assert_eq!(got(&one(&[&b], |g, x| g.sum(x[0], &[0], false)).unwrap()), [16_777_218.0]);
    let big = ConstData::from_slice(&[2], &[u64::MAX, 1]).unwrap();
    let m = one(&[&big], |g, x| g.reduce(ReduceKind::Max, x[0], &[0], false)).unwrap();
    assert_eq!(m.to_vec::<u64>(), [u64::MAX]);
}

#[test]
fn scans_run_both_ways() {
    let x = f(&[4], &[1.0, 2.0, 3.0, 4.0]);
    let run = |ex, rev| got(&one(&[&x], |g, x| g.scan(ReduceKind::Sum, x[0], 0, ex, rev)).unwrap());
    assert_eq!(run(false, false), [1.0, 3.0, 6.0, 10.0]);
    assert_eq!(run(true, false), [0.0, 1.0, 3.0, 6.0]);
    assert_eq!(run(false, true), [10.0, 9.0, 7.0, 4.0]);
    assert_eq!(run(true, true), [9.0, 7.0, 4.0, 0.0]);
}

#[test]
fn sorting_is_stable_and_puts_nan_last() {
    let x = f(&[6], &[2.0, f32::NAN, 1.0, 2.0, f32::NEG_INFINITY, 1.0]);
    let up = got(&one(&[&x], |g, x| g.argsort(x[0], 0, false)).unwrap());
    assert_eq!(up, [4.0, 2.0, 5.0, 0.0, 3.0, 1.0]);
    let down = got(&one(&[&x], |g, x| g.argsort(x[0], 0, true)).unwrap());
    assert_eq!(down, [1.0, 0.0, 3.0, 2.0, 5.0, 4.0]);
}

#[test]
fn argreduce_takes_the_first_or_last_and_nan_wins() {
    let x = f(&[2, 4], &[3.0, 1.0, 3.0, 1.0, 0.0, f32::NAN, 9.0, f32::NAN]);
    let run = |max, last| got(&one(&[&x], |g, x| g.argreduce(max, x[0], 1, false, last)).unwrap());
    assert_eq!(run(true, false), [0.0, 1.0]);
    assert_eq!(run(true, true), [2.0, 3.0]);
    assert_eq!(run(false, false), [1.0, 1.0]);
    assert_eq!(run(false, true), [3.0, 3.0]);
}

#[test]
fn gathers_and_scatters_index_from_both_ends_and_reject_others() {
    let x = f(&[3, 2], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let g1 = one(&[&x, &i(&[2], &[-1, 0])], |g, x| g.gather(x[0], x[1], 0)).unwrap();
    assert_eq!(got(&g1), [4.0, 5.0, 0.0, 1.0]);
    let g2 = one(&[&x, &i(&[3, 1], &[1, 0, -1])], |g, x| g.gather_elements(x[0], x[1], 1)).unwrap();
    assert_eq!(got(&g2), [1.0, 2.0, 5.0]);
    let e = one(&[&x, &i(&[1], &[3])], |g, x| g.gather(x[0], x[1], 0)).unwrap_err();
    assert!(matches!(e, Error::Index { .. }), "{e}");
    let u = f(&[3, 2], &[10.0, 20.0, 30.0, 40.0, 50.0, 60.0]);
    let idx = i(&[3], &[1, 1, -1]);
    let put = |k| got(&one(&[&x, &idx, &u], |g, x| g.scatter_rows(x[0], x[1], x[2], 0, k)).unwrap());
    assert_eq!(put(ScatterKind::Set), [0.0, 1.0, 30.0, 40.0, 50.0, 60.0]);
    assert_eq!(put(ScatterKind::Add), [0.0, 1.0, 42.0, 63.0, 54.0, 65.0]);
    assert_eq!(put(ScatterKind::Min), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let row = f(&[1, 2], &[7.0, 8.0]);
    let us = |p| one(&[&x, &row, &i(&[], &[p])], |g, x| g.update_slice(x[0], x[1], x[2], 0));
    assert_eq!(got(&us(1).unwrap()), [0.0, 1.0, 7.0, 8.0, 4.0, 5.0]);
    assert!(matches!(us(3), Err(Error::Index { .. })));
}

#[test]
fn views_move_elements() {
    let x = f(&[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let t = |b: &dyn Fn(&mut Graph, NodeId) -> Result<NodeId>| got(&one(&[&x], |g, x| b(g, x[0])).unwrap());
    assert_eq!(t(&|g, x| g.permute(x, &[1, 0])), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    assert_eq!(t(&|g, x| g.flip(x, &[1])), [2.0, 1.0, 0.0, 5.0, 4.0, 3.0]);
    let sl = |g: &mut Graph, x| g.slice(x, &[1.into(), 2.into()], &[1, -2], &[1.into(), 2.into()]);
    assert_eq!(t(&sl), [5.0, 3.0]);
    let p = t(&|g, x| g.pad(x, &[0, 1], &[1, 0], 9.0));
    assert_eq!(p, [9.0, 0.0, 1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 9.0, 9.0, 9.0, 9.0]);
    assert_eq!(t(&|g, x| g.concat(&[x, x], 1)).len(), 12);
    let ex = t(&|g, x| {
        let r = g.narrow(x, 1, 1usize, 1usize)?;
        g.expand(r, &[2usize, 2, 2].into())
    });
    assert_eq!(ex, [1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 4.0, 4.0]);
    assert_eq!(t(&|g, _| g.iota(DType::F16, [2usize, 2], 0)), [0.0, 0.0, 1.0, 1.0]);
    assert_eq!(t(&|g, x| g.bitcast(x, DType::I32))[1], 0x3f80_0000 as f64);
}

#[test]
fn matmul_and_conv_match_hand_values() {
    let a = f(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
    assert_eq!(got(&one(&[&a, &a], |g, x| g.matmul(x[0], x[1])).unwrap()), [7.0, 10.0, 15.0, 22.0]);
    let x = f(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]);
    let w = f(&[1, 1, 3], &[1.0, 10.0, 100.0]);
    let conv = |c: Conv| got(&one(&[&x, &w], |g, v| g.conv(v[0], v[1], c)).unwrap());
    assert_eq!(conv(Conv::new(1)), [321.0, 432.0]);
    let padded =
        Conv { pad: [(1, 1)].into_iter().collect(), stride: [2].into_iter().collect(), ..Conv::new(1) };
    assert_eq!(conv(padded), [210.0, 432.0]);
    let transposed = Conv { input_dilation: [2].into_iter().collect(), ..Conv::new(1) };
    assert_eq!(conv(transposed), [201.0, 20.0, 302.0, 30.0, 403.0]);
    let dilated =
        Conv { dilation: [2].into_iter().collect(), pad: [(1, 1)].into_iter().collect(), ..Conv::new(1) };
    assert_eq!(conv(dilated), [420.0, 31.0]);
}

#[test]
fn pools_leave_padding_out() {
    let x = f(&[1, 1, 3], &[-1.0, -2.0, -3.0]);
    let p = |kind| Pool {
        kind,
        kernel: [2].into_iter().collect(),
        stride: [1].into_iter().collect(),
        pad: [(1, 1)].into_iter().collect(),
        dilation: [1].into_iter().collect(),
    };
    let run = |k| got(&one(&[&x], |g, v| g.pool(v[0], p(k))).unwrap());
    assert_eq!(run(PoolKind::Max), [-1.0, -1.0, -2.0, -3.0]);
    assert_eq!(run(PoolKind::Avg { count_include_pad: false }), [-1.0, -1.5, -2.5, -3.0]);
    assert_eq!(run(PoolKind::Avg { count_include_pad: true }), [-0.5, -1.5, -2.5, -1.5]);
    let same = f(&[1, 1, 3], &[5.0, 5.0, 5.0]);
    let y = f(&[1, 1, 4], &[5.0; 4]);
    let dy = f(&[1, 1, 4], &[1.0, 2.0, 4.0, 8.0]);
    let dx = one(&[&same, &y, &dy], |g, v| g.push(Op::PoolGrad(p(PoolKind::Max)), v, None)).unwrap();
    assert_eq!(got(&dx), [3.0, 4.0, 8.0]);
}

#[test]
fn f64_evaluation_does_not_round_and_composites_run() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F16, [Dim::sym("n"), 3.into()]));
    let y = g.softmax(x, 1).unwrap();
    g.output("y", y);
    let c = ConstData::from_slice(&[1, 3], &[1.0, 2.0, 3.0].map(half::f16::from_f64)).unwrap();
    let y = eval_f64(&g, std::slice::from_ref(&c), &[]).unwrap();
    let e: Vec<f64> = [1.0f64, 2.0, 3.0].iter().map(|v| (v - 3.0).exp()).collect();
    let s: f64 = e.iter().sum();
    for (a, b) in got(&y[0]).iter().zip(&e) {
        assert!((a - b / s).abs() < 1e-15);
    }
    let r = eval(&g, &[c], &[]).unwrap();
    assert_eq!(r[0].dtype, DType::F16);
    assert!((got(&r[0])[2] - e[2] / s).abs() < 1e-3);
}

#[test]
fn deep_chains_and_wrong_inputs() {
    let mut g = Graph::new();
    let x = g.input("x", TensorType::new(DType::F32, [1usize]));
    let k = g.arg(DType::F32);
    let mut y = x;
    for _ in 0..100_000 {
        y = g.scalar(ScalarOp::Neg, &[y]).unwrap();
    }
    let y = g.mul(y, k).unwrap();
    g.output("y", y);
    let c = f(&[1], &[2.5]);
    assert_eq!(got(&eval(&g, &[c], &[Scalar::F(2.0)]).unwrap()[0]), [5.0]);
    assert!(eval(&g, &[f(&[2], &[1.0, 2.0])], &[Scalar::F(2.0)]).is_err());
    assert!(eval(&g, &[], &[Scalar::F(2.0)]).is_err());
    assert!(eval(&g, &[f(&[1], &[1.0])], &[]).is_err());
}
