//! Triangular parts and determinants.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[row("Det", 11, &[], det), row("Trilu", 14, &["upper"], trilu)];

/// Keeps the elements with `column - row >= k` (or `<= k` for the lower part) and replaces the others by
/// zero.
fn trilu(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let [.., rows, columns] = x.shape()[..] else {
        return Err(c.invalid(format!("the input is {}, expected at least 2 axes", x.ty)));
    };
    let (i, j) = (b.iota(DType::I64, rows)?, b.iota(DType::I64, columns)?);
    let i = b.reshape(&i, [rows, Dim::from(1)])?;
    let d = b.scalar(S::Sub, &[&j, &i])?;
    let k = match c.opt(1) {
        Some(k) if k.dtype() == DType::I64 => b.reshape(k, Shape::scalar())?,
        Some(k) => return Err(c.invalid(format!("k must be an i64, found {}", k.ty))),
        None => b.lit(&d, 0i64),
    };
    let kept = b.scalar(if c.flag("upper", true)? { S::Ge } else { S::Le }, &[&d, &k])?;
    let zero = b.lit(x, Scalar::I(0));
    one(b.scalar(S::Select, &[&kept, x, &zero])?)
}

/// Largest matrix whose elimination is unrolled into the graph.
const MAX_UNROLLED: usize = 128;

/// Gaussian elimination with partial pivoting. The determinant is the product of the pivots, negated by each
/// row exchange.
fn det(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let [lead @ .., rows, columns] = &x.shape()[..] else {
        return Err(c.invalid(format!("the input is {}, expected at least 2 axes", x.ty)));
    };
    if rows != columns || !x.dtype().is_float() {
        return Err(c.invalid(format!("the input is {}, expected square matrices of floats", x.ty)));
    }
    let size = rows.known();
    let size = size.ok_or_else(|| c.unsupported("a symbolic size", "Give concrete input shapes"))?;
    if size > MAX_UNROLLED {
        return Err(c.unsupported(
            &format!("matrices of {size} rows"),
            &format!("Elimination is unrolled for up to {MAX_UNROLLED} rows"),
        ));
    }
    let (to, lead, unit) = (x.dtype(), Shape::from(lead), Dim::from(1));
    let batch = lead.numel();
    let x = b.cast(x, to.compute())?;
    let mut a = b.reshape(&x, [batch, *rows, *rows])?;
    let mut product = b.full(a.dtype(), &[batch].into(), Scalar::F(1.0));
    for m in (1..=size).rev() {
        let (all, rest) = (Dim::from(m), Dim::from(m - 1));
        let column = b.narrow(&a, 2, Dim::from(0), unit)?;
        let magnitude = b.scalar(S::Abs, &[&column])?;
        let id = b.id(&magnitude)?;
        let at = b.g.argreduce(true, id, 1, true, false)?;
        let at = b.value(at);
        let index = b.expand(&at, &[batch, unit, all].into())?;
        let ids = b.ids(&[&a, &index])?;
        let row = b.g.gather_elements(ids[0], ids[1], 1)?;
        let row = b.value(row);
        let pivot = b.narrow(&row, 2, Dim::from(0), unit)?;
        let flat = b.reshape(&pivot, [batch])?;
        product = b.scalar(S::Mul, &[&product, &flat])?;
        if m == 1 {
            break;
        }
        let zero = b.lit(&at, 0i64);
        let moved = b.scalar(S::Ne, &[&at, &zero])?;
        let moved = b.reshape(&moved, [batch])?;
        let negated = b.scalar(S::Neg, &[&product])?;
        product = b.scalar(S::Select, &[&moved, &negated, &product])?;

        // The first row replaces the pivot row.
        let first = b.narrow(&a, 1, Dim::from(0), unit)?;
        let below = b.narrow(&a, 1, unit, rest)?;
        let number = b.iota(DType::I64, rest)?;
        let by = b.lit(&number, 1i64);
        let number = b.scalar(S::Add, &[&number, &by])?;
        let number = b.reshape(&number, [unit, rest, unit])?;
        let here = b.scalar(S::Eq, &[&number, &at])?;
        let below = b.scalar(S::Select, &[&here, &first, &below])?;
        // A column of zeros makes the product zero; the remaining values only have to stay finite.
        let none = b.lit(&pivot, 0.0);
        let empty = b.scalar(S::Eq, &[&pivot, &none])?;
        let one_ = b.lit(&pivot, 1.0);
        let divisor = b.scalar(S::Select, &[&empty, &one_, &pivot])?;
        let head = b.narrow(&below, 2, Dim::from(0), unit)?;
        let factor = b.scalar(S::Div, &[&head, &divisor])?;
        let (right, tail) = (b.narrow(&below, 2, unit, rest)?, b.narrow(&row, 2, unit, rest)?);
        let p = b.scalar(S::Mul, &[&factor, &tail])?;
        a = b.scalar(S::Sub, &[&right, &p])?;
    }
    let y = b.reshape(&product, lead)?;
    one(b.cast(&y, to)?)
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Error};

    #[test]
    fn triangles_of_every_type() {
        let x = t(&[2, 3], &[1i8, 2, 3, 4, 5, 6]);
        let op = |upper| node("Trilu", &["x", "w0"], &["y"]).int("upper", upper);
        let k = |k: i64| [t(&[], &[k])];
        check(14, op(1), &x, &k(1), &[2, 3], &[0.0, 2.0, 3.0, 0.0, 0.0, 6.0]);
        check(14, op(0), &x, &k(0), &[2, 3], &[1.0, 0.0, 0.0, 4.0, 5.0, 0.0]);
        check(14, op(1), &x, &k(i64::MIN), &[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        check(14, op(1), &x, &k(i64::MAX), &[2, 3], &[0.0; 6]);
        let flags = t(&[1, 2, 2], &[true; 4]);
        check(14, node("Trilu", &["x"], &["y"]), &flags, &[], &[1, 2, 2], &[1.0, 1.0, 0.0, 1.0]);
        let nan = t(&[2, 2], &[f32::NAN, 1.0, f32::NAN, 2.0]);
        let y = run_one(14, node("Trilu", &["x"], &["y"]), &nan, &[]).to_vec::<f32>();
        assert!(y[0].is_nan() && y[1..] == [1.0, 0.0, 2.0]);
        let m = model(14, port("x", DType::F32, &["3"]), vec![node("Trilu", &["x"], &["y"])], &[]);
        assert!(matches!(import(m), Err(Error::Argument { .. })));
    }

    #[test]
    fn determinants() {
        let op = || node("Det", &["x"], &["y"]);
        check(22, op(), &t(&[1, 1], &[-3f32]), &[], &[], &[-3.0]);
        // A zero in the corner requires an exchange. Matrices with linearly dependent rows, or with a zero
        // row, have determinant 0.
        check(22, op(), &t(&[2, 2], &[0f64, 2.0, 3.0, 4.0]), &[], &[], &[-6.0]);
        let m = [2f64, 0.0, 1.0, 1.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 4.0, 5.0, 6.0];
        check(11, op(), &t(&[2, 1, 3, 3], &m), &[], &[2, 1], &[0.0, 0.0]);
        // This permutation of four rows needs three exchanges, so its sign is negative.
        let p = [0f32, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0];
        check(11, op(), &t(&[4, 4], &p), &[], &[], &[-2.0]);
        check(11, op(), &t(&[2, 0, 0], &[0f32; 0]), &[], &[2], &[1.0, 1.0]);
        // The Hilbert matrix of order 4.
        let h: Vec<f64> = (0..16).map(|i| 1.0 / (i / 4 + i % 4 + 1) as f64).collect();
        let d = run_one(22, op(), &t(&[4, 4], &h), &[]).to_vec::<f64>()[0];
        assert!((d * 6_048_000.0 - 1.0).abs() < 1e-9, "{d}");
        let nan = run_one(22, op(), &t(&[2, 2], &[f32::NAN, 1.0, 1.0, 1.0]), &[]).to_vec::<f32>();
        assert!(nan[0].is_nan());
        for (dims, unsupported) in [(["2", "3"], false), (["129", "129"], true), (["n", "n"], true)] {
            let e = import(model(22, port("x", DType::F32, &dims), vec![op()], &[])).unwrap_err();
            assert_eq!(matches!(e, Error::Unsupported { .. }), unsupported, "{e}");
        }
    }
}
