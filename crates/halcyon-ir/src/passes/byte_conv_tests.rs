//! Tests convolutions of bytes against the original graph, and forms that must not be rewritten.

use super::*;
use crate::composite::CompositeKind;
use crate::passes::{BLOCKED, Level, PassOptions, block_layouts, optimize};
use crate::reference::eval;
use crate::{ConstData, Scalar, TensorType};

/// Integers that repeat with a long period.
fn data(d: DType, dims: &[usize], seed: i64) -> ConstData {
    let n: usize = dims.iter().product();
    let (lo, hi) = d.range();
    let value = |i: usize| {
        let v = ((i as i64 * 7919 + seed * 104_729) % 1009) as f64 / 1009.0;
        Scalar::F((lo + (hi - lo) * v).round())
    };
    ConstData::from_scalars(d, dims, (0..n).map(value)).unwrap()
}

/// `relu(conv(x, w) + bias)` with a dequantised image `x` and dequantised weights `w`.
struct Case {
    image: DType,
    zero: i64,
    weights: DType,
    channels: usize,
    axis: usize,
}

const PLAIN: Case = Case { image: DType::U8, zero: 0, weights: DType::I8, channels: 64, axis: 0 };

fn build(c: &Case) -> (Graph, Vec<ConstData>) {
    let (mut g, n) = (Graph::new(), c.channels);
    let x = g.input("x", TensorType::new(c.image, [1, n, 4, 3]));
    let s = g.constant(ConstData::from_slice(&[], &[0.03f32]).unwrap());
    let zero = g.constant(ConstData::splat(c.image, &[], Scalar::I(c.zero)).unwrap());
    let x = g.dequantize(x, s, Some(zero), None).unwrap();
    let w = g.constant(data(c.weights, &[n, n, 3, 3], 3));
    let scales: Vec<f32> = (0..n).map(|i| 0.001 + i as f32 * 1e-5).collect();
    let scales = g.constant(ConstData::from_slice(&[n], &scales).unwrap());
    let w = g.dequantize(w, scales, None, Some(c.axis)).unwrap();
    let mut attrs = Conv::new(2);
    attrs.pad = [(1, 1), (1, 1)].as_slice().into();
    let y = g.conv(x, w, attrs).unwrap();
    let bias: Vec<f32> = (0..n).map(|i| i as f32 * 0.01 - 0.2).collect();
    let bias = g.constant(ConstData::from_slice(&[1, n, 1, 1], &bias).unwrap());
    let y = g.add(y, bias).unwrap();
    let y = g.relu(y).unwrap();
    g.output("y", y);
    let input = data(c.image, &[1, n, 4, 3], 5);
    (g, vec![input])
}

/// The graph after all passes, for a device that has kernels for convolutions of bytes in blocks.
fn passed(g: &Graph, options: &PassOptions) -> (Graph, Graph) {
    let claims = |c: &Composite| c.kind == CompositeKind::BlockedConv;
    let (before, _) = optimize(g, options, &claims).unwrap();
    let (after, _) = block_layouts(&before, options, &|_| None, &claims).unwrap();
    let after = after.into_owned();
    (before, after)
}

fn count(g: &Graph, kind: &CompositeKind) -> usize {
    g.nodes().iter().filter(|n| matches!(&n.op, Op::Composite(c) if c.kind == *kind)).count()
}

fn same(g: &Graph, h: &Graph, x: &[ConstData]) {
    let [want, got] = [g, h].map(|g| eval(g, x, &[]).unwrap()[0].to_vec::<f32>());
    let top = want.iter().fold(0f32, |a, v| a.max(v.abs()));
    assert!(top > 0.0);
    for (a, b) in want.iter().zip(&got) {
        assert!((a - b).abs() <= 1e-5 * top, "{b} for {a}");
    }
}

#[test]
fn convolutions_of_bytes_become_composites_in_blocks() {
    for image in [DType::U8, DType::I8] {
        let (g, x) = build(&Case { image, ..PLAIN });
        let (before, after) = passed(&g, &PassOptions::at(Level::O2));
        assert_eq!(count(&before, &CompositeKind::ByteConv), 1);
        assert_eq!(
            (count(&after, &CompositeKind::ByteConv), count(&after, &CompositeKind::BlockedConv)),
            (0, 1)
        );
        // The scales are one constant.
        let muls = before.nodes().iter().filter(|n| n.op == Op::Scalar(ScalarOp::Mul)).count();
        assert_eq!(muls, 1, "{before:?}");
        same(&g, &before, &x);
        same(&g, &after, &x);
    }
}

#[test]
fn other_forms_stay_convolutions_of_floats() {
    let others = [
        // The zero point is not 0, which is the value of the padding.
        Case { zero: 3, ..PLAIN },
        // Unsigned weights, channels that do not fill a block, and a scale for each input channel.
        Case { weights: DType::U8, ..PLAIN },
        Case { channels: 32, ..PLAIN },
        Case { axis: 1, ..PLAIN },
    ];
    for c in others {
        let (g, x) = build(&c);
        let (before, after) = passed(&g, &PassOptions::at(Level::O2));
        assert_eq!(count(&before, &CompositeKind::ByteConv), 0);
        same(&g, &after, &x);
    }
    let (g, x) = build(&PLAIN);
    let mut o = PassOptions::at(Level::O2);
    o.without.insert(BLOCKED.into());
    let (before, after) = passed(&g, &o);
    assert_eq!(count(&before, &CompositeKind::ByteConv), 0);
    same(&g, &after, &x);
}

#[test]
fn a_declined_convolution_is_computed_in_floats() {
    let (g, x) = build(&PLAIN);
    let o = PassOptions::at(Level::O2);
    let claims = |c: &Composite| c.kind == CompositeKind::BlockedConv;
    let (before, _) = optimize(&g, &o, &claims).unwrap();
    let (after, receipt) = block_layouts(&before, &o, &|_| None, &|_| false).unwrap();
    assert!(receipt.is_none());
    assert_eq!(count(&after, &CompositeKind::ByteConv) + count(&after, &CompositeKind::BlockedConv), 0);
    assert_eq!(after.nodes().iter().filter(|n| matches!(n.op, Op::Conv(_))).count(), 1);
    same(&g, &after, &x);
}
