//! Reductions.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::symbolic;
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind as R;
use halcyon_ir::{DType, Dim, Result, Shape};

const ATTRS: &[&str] = &["axes", "keepdims", "noop_with_empty_axes"];
const ARG: &[&str] = &["axis", "keepdims", "select_last_index"];

pub(super) const ROWS: &[Row] = &[
    row("ArgMax", 1, ARG, |b, c| arg(b, c, true)),
    row("ArgMin", 1, ARG, |b, c| arg(b, c, false)),
    row("CumProd", 26, &["exclusive", "reverse"], |b, c| running(b, c, R::Prod)),
    row("CumSum", 11, &["exclusive", "reverse"], |b, c| running(b, c, R::Sum)),
    row("ReduceL1", 1, ATTRS, |b, c| reduce(b, c, R::Sum, Some(S::Abs), None)),
    row("ReduceL2", 1, ATTRS, |b, c| reduce(b, c, R::Sum, Some(S::Mul), Some(S::Sqrt))),
    row("ReduceLogSum", 1, ATTRS, |b, c| reduce(b, c, R::Sum, None, Some(S::Log))),
    row("ReduceLogSumExp", 1, ATTRS, log_sum_exp),
    row("ReduceMax", 1, ATTRS, |b, c| reduce(b, c, R::Max, None, None)),
    row("ReduceMean", 1, ATTRS, mean),
    row("ReduceMin", 1, ATTRS, |b, c| reduce(b, c, R::Min, None, None)),
    row("ReduceProd", 1, ATTRS, |b, c| reduce(b, c, R::Prod, None, None)),
    row("ReduceSum", 1, ATTRS, |b, c| reduce(b, c, R::Sum, None, None)),
    row("ReduceSumSquare", 1, ATTRS, |b, c| reduce(b, c, R::Sum, Some(S::Mul), None)),
];

/// The axes, and whether they are kept. The axes became an operand in opset version 13 for ReduceSum, and in
/// version 18 for the other reductions.
fn axes(b: &mut Builder, c: &Call<'_>) -> Result<(Vec<usize>, bool)> {
    let rank = c.arg(0)?.rank();
    let keep = c.flag("keepdims", true)?;
    let operand = c.opset >= if c.node.op_type == "ReduceSum" { 13 } else { 18 };
    let given = match (operand, c.opt(1)) {
        (true, Some(v)) => b.known_ints(v, "axes of a reduction")?,
        (true, None) => vec![],
        (false, _) => c.ints("axes")?.unwrap_or(&[]).to_vec(),
    };
    if given.is_empty() && !(operand && c.flag("noop_with_empty_axes", false)?) {
        return Ok(((0..rank).collect(), keep));
    }
    Ok((c.axes(&given, rank)?, keep))
}

/// `after(reduce(before(x)))`; a binary `before` takes x twice. Half types are computed in the dtype used for
/// sums.
fn reduce(b: &mut Builder, c: &Call<'_>, kind: R, before: Option<S>, after: Option<S>) -> Result<Vec<Value>> {
    let (axes, keep) = axes(b, c)?;
    let x = c.arg(0)?;
    let to = x.dtype();
    let float = to.is_float() && (before.is_some() || after.is_some());
    let x = if float { b.cast(x, to.compute())? } else { x.clone() };
    let x = match before {
        Some(op) if op.arity() == 2 => b.scalar(op, &[&x, &x])?,
        Some(op) => b.scalar(op, &[&x])?,
        None => x,
    };
    let y = b.reduce(kind, &x, &axes, keep)?;
    let y = match after {
        // Roots and logarithms of integers are computed in f64 and truncated, because the result has the
        // operand's dtype.
        Some(op) => {
            let f = b.cast(&y, if to.is_float() { y.dtype() } else { DType::F64 })?;
            b.scalar(op, &[&f])?
        }
        None => y,
    };
    one(b.cast(&y, to)?)
}

fn mean(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (axes, keep) = axes(b, c)?;
    let to = c.arg(0)?.dtype();
    let x = b.cast(c.arg(0)?, if to.is_float() { to.compute() } else { to })?;
    let y = mean_over(b, &x, &axes, keep)?;
    one(b.cast(&y, to)?)
}

/// Mean over `axes`, whose sizes must be known.
pub(super) fn mean_over(b: &mut Builder, x: &Value, axes: &[usize], keep: bool) -> Result<Value> {
    let n = axes.iter().fold(Dim::from(1), |n, &a| n.mul(x.shape()[a]));
    let n = n.known().ok_or_else(|| symbolic(n))?;
    let sum = b.reduce(R::Sum, x, axes, keep)?;
    let n = b.lit(&sum, n);
    b.scalar(S::Div, &[&sum, &n])
}

/// `m + ln Σ exp(x - m)`, where `m` is the maximum, or 0 if that is infinite.
fn log_sum_exp(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (axes, keep) = axes(b, c)?;
    let to = c.arg(0)?.dtype();
    let x = b.cast(c.arg(0)?, if to.is_float() { to.compute() } else { DType::F64 })?;
    let top = b.reduce(R::Max, &x, &axes, true)?;
    let (inf, zero) = (b.scalar(S::IsInf, &[&top])?, b.lit(&x, 0.0));
    let top = b.scalar(S::Select, &[&inf, &zero, &top])?;
    let d = b.scalar(S::Sub, &[&x, &top])?;
    let e = b.scalar(S::Exp, &[&d])?;
    let s = b.reduce(R::Sum, &e, &axes, true)?;
    let l = b.scalar(S::Log, &[&s])?;
    let mut y = b.scalar(S::Add, &[&l, &top])?;
    if !keep {
        let left: Shape = (0..y.rank()).filter(|k| !axes.contains(k)).map(|k| y.shape()[k]).collect();
        y = b.reshape(&y, left)?;
    }
    one(b.cast(&y, to)?)
}

fn arg(b: &mut Builder, c: &Call<'_>, max: bool) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    let (keep, last) = (c.flag("keepdims", true)?, c.flag("select_last_index", false)?);
    let id = b.id(x)?;
    let n = b.g.argreduce(max, id, axis, keep, last)?;
    one(b.value(n))
}

/// A running sum or product.
fn running(b: &mut Builder, c: &Call<'_>, kind: R) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = b.known_scalar(c.arg(1)?, "the axis of a running reduction")?;
    let axis = c.axis(axis.as_i64(), x.rank())?;
    let (exclusive, reverse) = (c.flag("exclusive", false)?, c.flag("reverse", false)?);
    let id = b.id(x)?;
    let n = b.g.scan(kind, id, axis, exclusive, reverse)?;
    one(b.value(n))
}

#[cfg(test)]
mod tests {
    use crate::onnx::proto::NodeProto;
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Error};

    fn of_f16(n: NodeProto, x: &[f32]) -> (DType, Vec<f64>) {
        let nodes = vec![node("Cast", &["x"], &["h"]).int("to", 10), n];
        let dims = x.len().to_string();
        let g = import(model(18, port("x", DType::F32, &[&dims]), nodes, &[])).unwrap().graph;
        let y = crate::onnx::reference::run(&g, &[t(&[x.len()], x)]).remove(0);
        (y.dtype, y.to_vec())
    }

    #[test]
    fn half_types_do_not_overflow_in_sums() {
        let op = |name| node(name, &["h"], &["y"]).int("keepdims", 0);
        assert_eq!(of_f16(op("ReduceL2"), &[300.0, 400.0]), (DType::F16, vec![500.0]));
        assert_eq!(of_f16(op("ReduceMean"), &[60_000.0; 4]), (DType::F16, vec![60_000.0]));
        assert_eq!(of_f16(op("ReduceLogSum"), &[60_000.0; 2]).1, [11.6953125]);
        let exp = of_f16(op("ReduceLogSumExp"), &[1000.0, 1000.0]).1[0];
        assert!((exp - 1000.7).abs() < 0.3, "{exp}");
    }

    #[test]
    fn reductions_over_no_elements() {
        let x = t(&[2], &[-3f32, 4.0]);
        let noop = |name| node(name, &["x"], &["y"]).int("noop_with_empty_axes", 1);
        check(18, noop("ReduceSumSquare"), &x, &[], &[2], &[9.0, 16.0]);
        check(18, noop("ReduceL2"), &x, &[], &[2], &[3.0, 4.0]);
        check(18, noop("ReduceMean"), &x, &[], &[2], &[-3.0, 4.0]);
        let empty = [ints(&[])];
        let with = |name| node(name, &["x", "w0"], &["y"]).int("noop_with_empty_axes", 1);
        check(18, with("ReduceL1"), &x, &empty, &[2], &[3.0, 4.0]);
        check(13, node("ReduceSum", &["x", "w0"], &["y"]), &x, &empty, &[1], &[1.0]);
        check(
            11,
            node("ReduceLogSumExp", &["x"], &["y"]).ints("axes", &[]),
            &t(&[], &[2f32]),
            &[],
            &[],
            &[2.0],
        );
        // No elements.
        let none = t(&[2, 0], &[0f32; 0]);
        let over = |name| node(name, &["x"], &["y"]).ints("axes", &[1]).int("keepdims", 0);
        check(11, over("ReduceMax"), &none, &[], &[2], &[f64::NEG_INFINITY; 2]);
        check(11, over("ReduceProd"), &none, &[], &[2], &[1.0; 2]);
        check(11, over("ReduceLogSumExp"), &none, &[], &[2], &[f64::NEG_INFINITY; 2]);
        check(20, node("ReduceMin", &["x"], &["y"]), &t(&[0], &[true; 0]), &[], &[1], &[1.0]);
    }

    #[test]
    fn integers_and_running_products() {
        let x = t(&[3], &[3i32, 4, 12]);
        let op = |name| node(name, &["x"], &["y"]).int("keepdims", 0);
        check(13, op("ReduceL2"), &x, &[], &[], &[13.0]);
        check(13, op("ReduceLogSumExp"), &x, &[], &[], &[12.0]);
        check(13, op("ReduceMean"), &x, &[], &[], &[6.0]);
        let axis = [t(&[1], &[-1i32])];
        let run = |name| node(name, &["x", "w0"], &["y"]);
        check(26, run("CumProd"), &x, &axis, &[3], &[3.0, 12.0, 144.0]);
        check(26, run("CumProd").int("exclusive", 1).int("reverse", 1), &x, &axis, &[3], &[48.0, 12.0, 1.0]);
        check(14, run("CumSum").int("exclusive", 1), &x, &axis, &[3], &[0.0, 3.0, 7.0]);
        for axis in [1i64, -2, i64::MIN] {
            let m =
                model(26, port("x", DType::I32, &["3"]), vec![run("CumProd")], &[("w0", t(&[], &[axis]))]);
            assert!(matches!(import(m), Err(Error::Argument { .. })), "{axis}");
        }
    }
}
