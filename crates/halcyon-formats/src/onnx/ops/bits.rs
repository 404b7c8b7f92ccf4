//! Bitwise operators on integers.

use super::elementwise::map;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Result};

pub(super) const ROWS: &[Row] = &[
    row("BitShift", 11, &["direction"], bit_shift),
    row("BitwiseAnd", 18, &[], |b, c| bitwise(b, c, S::And)),
    row("BitwiseNot", 18, &[], |b, c| bitwise(b, c, S::Not)),
    row("BitwiseOr", 18, &[], |b, c| bitwise(b, c, S::Or)),
    row("BitwiseXor", 18, &[], |b, c| bitwise(b, c, S::Xor)),
];

fn integers(c: &Call<'_>) -> Result<()> {
    match c.args()?.iter().find(|v| !v.dtype().is_int()) {
        Some(v) => Err(c.invalid(format!("integers are needed, not {}", v.ty))),
        None => Ok(()),
    }
}

fn bitwise(b: &mut Builder, c: &Call<'_>, op: S) -> Result<Vec<Value>> {
    integers(c)?;
    map(b, c, op)
}

fn unsigned(d: DType) -> DType {
    match d {
        DType::I8 => DType::U8,
        DType::I16 => DType::U16,
        DType::I32 => DType::U32,
        DType::I64 => DType::U64,
        d => d,
    }
}

/// A right shift by the type's width or more, or by a negative amount, gives -1 for a negative number, else
/// 0. A left shift by such an amount gives 0.
fn bit_shift(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    integers(c)?;
    let (x, y) = (c.arg(0)?, c.arg(1)?);
    if x.dtype() != y.dtype() {
        return Err(c.invalid(format!("the operands {} and {} must have the same dtype", x.ty, y.ty)));
    }
    let left = match c.string("direction", "")? {
        "LEFT" => true,
        "RIGHT" => false,
        other => return Err(c.invalid(format!("direction '{other}' is neither LEFT nor RIGHT"))),
    };
    let to = x.dtype();
    let bits = unsigned(to);
    // Read as an unsigned number, a negative amount is larger than every width.
    let (u, by) = (b.cast(x, bits)?, b.cast(y, bits)?);
    if left || bits == to {
        let v = b.scalar(if left { S::Shl } else { S::Shr }, &[&u, &by])?;
        return one(b.cast(&v, to)?);
    }
    // A negative number is complemented before and after the shift, which then shifts in ones.
    let zero = b.lit(x, 0i64);
    let below = b.scalar(S::Lt, &[x, &zero])?;
    let ones = b.lit(x, -1i64);
    let flip = b.scalar(S::Select, &[&below, &ones, &zero])?;
    let flip = b.cast(&flip, bits)?;
    let v = b.scalar(S::Xor, &[&u, &flip])?;
    let v = b.scalar(S::Shr, &[&v, &by])?;
    let v = b.scalar(S::Xor, &[&v, &flip])?;
    one(b.cast(&v, to)?)
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{DType, Element, Error};

    fn shift<T: Element + PartialEq + std::fmt::Debug>(
        direction: &'static str,
        x: &[T],
        y: &[T],
        want: &[T],
    ) {
        let n = x.len();
        let op = node("BitShift", &["x", "w0"], &["y"]).text("direction", direction);
        let got = run_one(28, op, &t(&[n], x), &[t(&[n], y)]);
        assert_eq!(got.to_vec::<T>(), want, "{direction} {x:?} {y:?}");
    }

    #[test]
    fn shifts_at_and_over_the_width() {
        shift("LEFT", &[1u8, 255, 1, 1], &[7, 4, 8, 200], &[128, 240, 0, 0]);
        shift("RIGHT", &[255u8, 255, 255], &[4, 8, 255], &[15, 0, 0]);
        shift("LEFT", &[1u64, 1, 3], &[63, 64, u64::MAX], &[1 << 63, 0, 0]);
        shift("RIGHT", &[u64::MAX, u64::MAX], &[63, 64], &[1, 0]);
        shift("LEFT", &[1i8, 1, -1, 1, 64], &[7, 8, 1, -1, 1], &[-128, 0, -2, 0, -128]);
        shift("RIGHT", &[-128i8, -128, -1, 127, 127, -5], &[7, 8, -1, -1, 3, 1], &[-1, -1, -1, 0, 15, -3]);
        shift("RIGHT", &[i64::MIN, i64::MIN, i64::MAX], &[63, i64::MIN, 62], &[-1, -1, 1]);
        shift("LEFT", &[i64::MAX, 1], &[1, 64], &[-2, 0]);
        shift("RIGHT", &[i16::MIN, 300], &[16, 2], &[-1, 75]);
    }

    #[test]
    fn only_integers_have_bits() {
        let refused = |op: crate::onnx::proto::NodeProto, d| {
            matches!(import(model(28, port("x", d, &["2"]), vec![op], &[])), Err(Error::Argument { .. }))
        };
        assert!(refused(node("BitwiseNot", &["x"], &["y"]), DType::Bool));
        assert!(refused(node("BitwiseAnd", &["x", "x"], &["y"]), DType::F32));
        assert!(refused(node("BitShift", &["x", "x"], &["y"]).text("direction", "UP"), DType::U8));
        assert!(refused(node("BitShift", &["x", "x"], &["y"]).text("direction", "LEFT"), DType::F32));
    }
}
