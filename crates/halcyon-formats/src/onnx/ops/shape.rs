//! Constants and shape arithmetic.

use super::{Row, item_row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::{Host, Num, eval, symbolic};
use crate::onnx::item::{Datum, Item, Text};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    item_row(
        "Constant",
        1,
        &[
            "sparse_value",
            "value",
            "value_float",
            "value_floats",
            "value_int",
            "value_ints",
            "value_string",
            "value_strings",
        ],
        constant,
    ),
    row("ConstantOfShape", 9, &["value"], constant_of_shape),
    row("Range", 11, &["stash_type"], range),
    row("Shape", 1, &["start", "end"], shape),
    row("Size", 1, &[], |_, c| {
        let n = Num::size(c.arg(0)?.shape().numel());
        one(Host { dtype: DType::I64, dims: vec![], vals: vec![n] }.into())
    }),
];

fn constant(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    if let Some(s) = c.sparse("sparse_value")? {
        return Ok(vec![s.value(b)?.into()]);
    }
    let data = if let Some(v) = c.datum("value")? {
        match v {
            Datum::Tensor(t) => t,
            Datum::Text(t) => return Ok(vec![t.into()]),
            other => return Err(c.invalid(format!("the value is {}, expected a tensor", other.describe()))),
        }
    } else if c.has("value_string") {
        return Ok(vec![Text::new(&[], vec![c.string("value_string", "")?.into()])?.into()]);
    } else if let Some(v) = c.strings("value_strings")? {
        return Ok(vec![Text::new(&[v.len()], v)?.into()]);
    } else if let Some(v) = c.opt_float("value_float")? {
        ConstData::from_slice(&[], &[v])?
    } else if let Some(v) = c.floats("value_floats")? {
        ConstData::from_slice(&[v.len()], v)?
    } else if let Some(v) = c.opt_int("value_int")? {
        ConstData::from_slice(&[], &[v])?
    } else if let Some(v) = c.ints("value_ints")? {
        ConstData::from_slice(&[v.len()], v)?
    } else {
        return Err(c.invalid("no attribute gives the value"));
    };
    Ok(vec![Value::weight(data, c.name).into()])
}

/// A shape given as an integer vector.
pub(super) fn shape_of(b: &mut Builder, c: &Call<'_>, v: &Value, what: &str) -> Result<Shape> {
    let h = b.known(v, what)?;
    h.vals.iter().map(|n| n.dim().ok_or_else(|| c.invalid(format!("{what} has a negative size")))).collect()
}

fn constant_of_shape(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let shape = shape_of(b, c, c.arg(0)?, "the shape of ConstantOfShape")?;
    let (dtype, v) = match c.tensor("value")? {
        None => (DType::F32, Scalar::F(0.0)),
        Some(t) => match t.get(0) {
            Some(v) if t.numel() == 1 => (t.dtype, v),
            _ => return Err(c.invalid("the value must have one element")),
        },
    };
    one(b.full(dtype, &shape, v))
}

/// Number of values `start`, `start + delta`, … before `limit`, in either direction. `None` if the range is
/// infinite or has more than `i32::MAX` values.
fn count(start: Scalar, limit: Scalar, delta: Scalar, float: bool) -> Option<usize> {
    let n = if float {
        ((limit.as_f64() - start.as_f64()) / delta.as_f64()).ceil()
    } else {
        let (s, l, d) = (start.as_i64() as i128, limit.as_i64() as i128, delta.as_i64() as i128);
        // Ceiling division for either sign.
        let (span, step) = if d < 0 { (s - l, -d) } else { (l - s, d) };
        if step == 0 {
            return None;
        }
        (span.max(0) as u128).div_ceil(step as u128) as f64
    };
    (n <= i32::MAX as f64).then_some(n.max(0.0) as usize)
}

/// `start + i * delta`; half types are computed in f32 unless `stash_type` names another dtype.
fn range(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (first, limit, delta) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let mut num = |v: &Value| match b.known(v, "a bound of Range")?.vals[..] {
        [n] => Ok(n),
        _ => Err(c.invalid(format!("a bound must be a scalar, not {}", v.ty))),
    };
    let (s, l, d) = (num(first)?, num(limit)?, num(delta)?);
    let dtype = first.dtype();
    let n = match (s, l, d) {
        (Num::Is(s), Num::Is(l), Num::Is(d)) => Dim::from(
            count(s, l, d, dtype.is_float()).ok_or_else(|| c.invalid("the range is infinite or too long"))?,
        ),
        (_, _, Num::Is(d)) if d.as_i64() == 1 => eval(S::Sub, dtype, &[l, s])
            .and_then(Num::dim)
            .ok_or_else(|| c.unsupported("these symbolic bounds", "Give concrete input shapes"))?,
        (Num::Size(n), ..) | (_, Num::Size(n), _) | (.., Num::Size(n)) => return Err(symbolic(n)),
    };
    let half = dtype.is_float() && dtype.compute() != dtype;
    let wide = if half { c.dtype("stash_type")?.unwrap_or(DType::F32) } else { dtype };
    if !wide.is_float() && half {
        return Err(c.invalid(format!("stash_type is {wide}, expected a float type")));
    }
    let mut y = b.iota(wide, n)?;
    if d != Num::Is(Scalar::I(1).cast(dtype)) {
        let delta = b.reshape(delta, Shape::scalar())?;
        let delta = b.cast(&delta, wide)?;
        y = b.scalar(S::Mul, &[&y, &delta])?;
    }
    if s != Num::Is(Scalar::I(0).cast(dtype)) {
        let first = b.reshape(first, Shape::scalar())?;
        let first = b.cast(&first, wide)?;
        y = b.scalar(S::Add, &[&y, &first])?;
    }
    one(b.cast(&y, dtype)?)
}

/// The sizes from axis `start` to `end`. Negative axes count from the last; both are clamped.
fn shape(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let r = x.rank() as i64;
    let clamp = |v: i64| (if v < 0 { v.saturating_add(r) } else { v }).clamp(0, r) as usize;
    let (start, end) = match c.opset {
        15.. => (clamp(c.int("start", 0)?), clamp(c.opt_int("end")?.unwrap_or(r))),
        _ => (0, x.rank()),
    };
    let dims = x.shape().get(start..end).unwrap_or(&[]);
    one(Host::ints(dims.iter().map(|d| Num::size(*d)).collect()).into())
}

#[cfg(test)]
mod tests {
    use crate::onnx::test_models::*;
    use halcyon_ir::{ConstData, DType, Error};

    fn run(v: &[ConstData; 3], stash: Option<i64>) -> Result<ConstData, Error> {
        let names = ["a", "b", "c"];
        let mut n = node("Range", &names, &["y"]);
        if let Some(s) = stash {
            n = n.int("stash_type", s);
        }
        let w: Vec<(&str, ConstData)> = names.into_iter().zip(v.iter().cloned()).collect();
        let g = import(model(27, port("x", DType::F32, &["1"]), vec![n], &w))?.graph;
        Ok(crate::onnx::reference::run(&g, &[t(&[1], &[0f32])]).remove(0))
    }

    #[test]
    fn ranges_of_every_type() {
        let of = |v: [i16; 3]| run(&v.map(|v| t(&[], &[v])), None).unwrap().to_vec::<i64>();
        assert_eq!(of([10, 4, -2]), [10, 8, 6]);
        assert!(of([4, 10, -2]).is_empty());
        let floats = run(&[0.5f64, 2.1, 0.5].map(|v| t(&[1], &[v])), None).unwrap();
        assert_eq!(floats.to_vec::<f64>(), [0.5, 1.0, 1.5, 2.0]);
        // f16 cannot represent 2049: -512 + i * 0.25 is computed in f32 and rounded once.
        let half =
            |v: f32| crate::data::from_scalars(DType::F16, &[], [halcyon_ir::Scalar::F(v.into())]).unwrap();
        let v = [half(-512.0), half(488.0), half(0.25)];
        let y = run(&v, None).unwrap();
        assert_eq!((y.dtype, y.to_vec::<f64>()[2049], y.numel()), (DType::F16, 0.25, 4000));
        assert_eq!(run(&v, Some(10)).unwrap().to_vec::<f64>()[2049], 0.0);
        assert!(matches!(run(&v, Some(7)), Err(Error::Argument { .. })));
    }

    #[test]
    fn ranges_without_an_end() {
        for v in [[0i64, 5, 0], [i64::MIN, i64::MAX, 1]] {
            assert!(matches!(run(&v.map(|v| t(&[], &[v])), None), Err(Error::Argument { .. })), "{v:?}");
        }
        for v in [[0f32, 5.0, 0.0], [0.0, f32::INFINITY, 1.0], [f32::NAN, 1.0, 1.0]] {
            assert!(matches!(run(&v.map(|v| t(&[], &[v])), None), Err(Error::Argument { .. })), "{v:?}");
        }
    }
}
