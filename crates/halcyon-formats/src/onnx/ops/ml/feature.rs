//! Operators on features: scaling, selection, imputation, encoding.

use super::{DOMAIN, float, floats};
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::Item;
use crate::onnx::node::Call;
use crate::onnx::ops::text::{MAX_STRINGS, copies};
use crate::onnx::ops::{Row, item_row_in, one, row_in};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{ConstData, DType, Dim, Result, Scalar, Shape};
use std::collections::HashMap;

pub(crate) const ROWS: &[Row] = &[
    item_row_in(DOMAIN, "ArrayFeatureExtractor", 1, &[], array_feature_extractor),
    row_in(DOMAIN, "Binarizer", 1, &["threshold"], binarizer),
    row_in(DOMAIN, "FeatureVectorizer", 1, &["inputdimensions"], feature_vectorizer),
    row_in(
        DOMAIN,
        "Imputer",
        1,
        &["imputed_value_floats", "imputed_value_int64s", "replaced_value_float", "replaced_value_int64"],
        imputer,
    ),
    row_in(DOMAIN, "Normalizer", 1, &["norm"], normalizer),
    item_row_in(DOMAIN, "OneHotEncoder", 1, &["cats_int64s", "cats_strings", "zeros"], one_hot_encoder),
    row_in(DOMAIN, "Scaler", 1, &["offset", "scale"], scaler),
];

/// `x > threshold ? 1 : 0`, in the dtype of `x`.
fn binarizer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let t = f64::from(c.float("threshold", 0.0)?);
    // For integers, comparing with the threshold equals comparing with its floor.
    let t = if x.dtype().is_float() { t } else { t.floor() };
    let t = b.lit(x, t);
    let above = b.scalar(S::Gt, &[x, &t])?;
    one(b.cast(&above, x.dtype())?)
}

/// Checks that an attribute with `n` values has one value for all features, or one per feature along the last
/// axis.
fn per_feature(c: &Call<'_>, x: &Value, name: &str, n: usize) -> Result<()> {
    let last = x.shape().last().copied().unwrap_or(Dim::from(1));
    if n == 1 || last.known().is_none_or(|f| f == n) {
        return Ok(());
    }
    Err(c.invalid(format!("attribute '{name}' has {n} entries for {last} features")))
}

/// `(x - offset) * scale`.
fn scaler(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let mut x = float(b, c.arg(0)?)?;
    for (name, op) in [("offset", S::Sub), ("scale", S::Mul)] {
        if let Some(v) = c.floats(name)?.filter(|v| !v.is_empty()) {
            per_feature(c, &x, name, v.len())?;
            let v = floats(x.dtype(), &[v.len()], v)?;
            let y = b.scalar(op, &[&x, &v])?;
            x = b.reshape(&y, x.shape())?;
        }
    }
    one(b.cast(&x, DType::F32)?)
}

/// Divides each row by its maximum, by the sum of its absolute values, or by the root of its sum of squares.
/// Rows whose divisor would be 0 stay unchanged.
fn normalizer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = float(b, c.arg(0)?)?;
    if x.rank() == 0 {
        return Err(c.invalid("the features must be a vector or a batch of vectors, not a scalar"));
    }
    let axis = usize::from(x.rank() > 1);
    let by = match c.string("norm", "MAX")? {
        "MAX" => b.reduce(ReduceKind::Max, &x, &[axis], true)?,
        "L1" => {
            let a = b.scalar(S::Abs, &[&x])?;
            b.reduce(ReduceKind::Sum, &a, &[axis], true)?
        }
        "L2" => {
            let a = b.scalar(S::Mul, &[&x, &x])?;
            let a = b.reduce(ReduceKind::Sum, &a, &[axis], true)?;
            b.scalar(S::Sqrt, &[&a])?
        }
        other => return Err(c.invalid(format!("there is no norm '{other}'"))),
    };
    let (zero, unit) = (b.lit(&by, 0.0), b.lit(&by, 1.0));
    let none = b.scalar(S::Eq, &[&by, &zero])?;
    let by = b.scalar(S::Select, &[&none, &unit, &by])?;
    let y = b.scalar(S::Div, &[&x, &by])?;
    one(b.cast(&y, DType::F32)?)
}

/// Selects features along the last axis. A vector gives a matrix of one row.
fn array_feature_extractor(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let index = c.arg(1)?;
    let n = index.shape().numel();
    if let Item::Text(x) = c.item(0)? {
        let at = b.known_ints(index, "the features of ArrayFeatureExtractor")?;
        let Some((last, lead)) = x.dims.split_last() else {
            return Err(c.invalid("the features are a scalar"));
        };
        let rows: usize = lead.iter().product();
        let one = |r: usize, i: i64| {
            let i = usize::try_from(i).ok().filter(|i| i < last);
            let i = i.ok_or_else(|| c.invalid(format!("a feature index outside of 0..{last}")))?;
            Ok(x.vals[r * last + i].as_str())
        };
        let picked = (0..rows).flat_map(|r| at.iter().map(move |i| (r, *i)));
        let mut dims = if lead.is_empty() { vec![1] } else { lead.to_vec() };
        dims.push(at.len());
        return Ok(vec![copies(&dims, picked.map(|(r, i)| one(r, i)))?.into()]);
    }
    let x = c.arg(0)?;
    let Some((&last, lead)) = x.shape().split_last() else {
        return Err(c.invalid("the features are a scalar"));
    };
    if let (Some(h), Some(f)) = (index.host(), last.known()) {
        let ok = |i: i64| usize::try_from(i).is_ok_and(|i| i < f);
        if let Some(bad) = h.vals.iter().filter_map(|v| v.known()).find(|v| !ok(v.as_i64())) {
            return Err(c.invalid(format!("feature index {} is outside of 0..{f}", bad.as_i64())));
        }
    }
    let index = b.reshape(index, Shape::from_iter([n]))?;
    let y = b.gather(x, &index, x.rank() - 1)?;
    let lead = if lead.is_empty() { vec![Dim::from(1)] } else { lead.to_vec() };
    let shape: Shape = lead.into_iter().chain([n]).collect();
    Ok(vec![b.reshape(&y, shape)?.into()])
}

/// Returns `x`, in which elements that equal the replaced value (which may be NaN) are set to the imputed
/// value of their feature.
fn imputer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let (old, new): (Scalar, Vec<Scalar>) = if x.dtype().is_float() {
        let v = c.floats("imputed_value_floats")?.unwrap_or(&[]);
        let old = c.float("replaced_value_float", 0.0)?;
        (Scalar::F(old.into()), v.iter().map(|v| Scalar::F((*v).into())).collect())
    } else {
        let v = c.ints("imputed_value_int64s")?.unwrap_or(&[]);
        (Scalar::I(c.int("replaced_value_int64", 0)?), v.iter().map(|v| Scalar::I(*v)).collect())
    };
    if new.is_empty() {
        return Err(c.invalid(format!("there is no imputed value for {}", x.dtype())));
    }
    per_feature(c, x, "imputed_value", new.len())?;
    let hit = match old {
        Scalar::F(v) if v.is_nan() => b.scalar(S::IsNan, &[x])?,
        // A replaced value that the dtype cannot represent matches nothing.
        old if old.cast(x.dtype()).as_f64() != old.as_f64() => return one(x.clone()),
        old => {
            let old = b.lit(x, old);
            b.scalar(S::Eq, &[x, &old])?
        }
    };
    let new = Value::table(data::from_scalars(x.dtype(), &[new.len()], new)?);
    let y = b.scalar(S::Select, &[&hit, &new, x])?;
    one(b.reshape(&y, x.shape())?)
}

/// Concatenates the operands as f32, each cropped or zero-padded to its declared size. A vector is one row.
fn feature_vectorizer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let args = c.args()?;
    let sizes = match c.ints("inputdimensions")? {
        Some(_) => Some(c.sizes("inputdimensions", args.len(), 0)?),
        None => None,
    };
    let mut parts = Vec::with_capacity(args.len());
    for (i, x) in args.iter().enumerate() {
        let x = b.cast(x, DType::F32)?;
        let x = match x.rank() {
            1 => b.reshape(&x, [Dim::from(1), x.shape()[0]])?,
            2.. => {
                let rest = Shape::from(&x.shape()[1..]).numel();
                b.reshape(&x, [x.shape()[0], rest])?
            }
            0 => return Err(c.invalid(format!("operand {i} is a scalar"))),
        };
        let (n, have) = (sizes.as_ref().map(|s| Dim::from(s[i])), x.shape()[1]);
        let x = match (n.and_then(|n| n.known()), have.known()) {
            (Some(n), Some(have)) if n < have => b.narrow(&x, 1, Dim::from(0), Dim::from(n))?,
            (Some(n), Some(have)) if n > have => {
                let fill =
                    b.full(DType::F32, &Shape::from_iter([x.shape()[0], Dim::from(n - have)]), 0.0.into());
                b.concat(&[&x, &fill], 1)?
            }
            _ => x,
        };
        parts.push(x);
    }
    if parts.is_empty() {
        return Err(c.invalid("there is no operand"));
    }
    one(b.concat(&parts.iter().collect::<Vec<_>>(), 1)?)
}

/// Adds a last axis with a 1 at the index of the category. By default, an unknown category gives zeros. If
/// `zeros` is 0, an unknown string is an error of this function, and an unknown number is a fault at run time
/// (an index out of range).
fn one_hot_encoder(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let zeros = c.flag("zeros", true)?;
    let texts = c.strings("cats_strings")?.filter(|v| !v.is_empty());
    let ints = c.ints("cats_int64s")?.filter(|v| !v.is_empty());
    match (c.item(0)?, texts, ints) {
        (Item::Text(x), Some(cats), None) => {
            let at: HashMap<&str, usize> = cats.iter().enumerate().map(|(i, s)| (s.as_str(), i)).collect();
            let n = x.vals.len().checked_mul(cats.len()).filter(|n| *n <= 4 * MAX_STRINGS);
            let n =
                n.ok_or_else(|| c.unsupported("so many strings and categories", "Encode fewer at once"))?;
            let mut y = vec![0f32; n];
            for (row, s) in y.chunks_exact_mut(cats.len()).zip(&x.vals) {
                match at.get(s.as_str()) {
                    Some(i) => row[*i] = 1.0,
                    None if zeros => {}
                    None => return Err(c.invalid(format!("'{s}' is not a category"))),
                }
            }
            let dims: Vec<usize> = x.dims.iter().copied().chain([cats.len()]).collect();
            Ok(vec![b.feed(ConstData::from_slice(&dims, &y)?).into()])
        }
        (Item::Tensor(x), None, Some(cats)) => {
            let n = cats.len();
            let mut last: HashMap<i64, usize> = HashMap::with_capacity(n);
            cats.iter().enumerate().for_each(|(i, v)| {
                last.insert(*v, i);
            });
            // If a category occurs several times in the list, its last position counts.
            let live = cats.iter().enumerate().map(|(i, v)| i64::from(last.get(v) == Some(&i)));
            let live = super::integers(DType::Bool, &[n], live)?;
            let cats = super::integers(DType::I64, &[n], cats.iter().copied())?;
            let v = b.cast(x, DType::I64)?;
            let shape: Shape = x.shape().iter().copied().chain([Dim::from(1)]).collect();
            let v = b.reshape(&v, shape)?;
            let hit = b.scalar(S::Eq, &[&v, &cats])?;
            let hit = b.scalar(S::And, &[&hit, &live])?;
            let mut y = b.cast(&hit, DType::F32)?;
            if !zeros {
                let any = b.reduce(ReduceKind::Max, &y, &[x.rank()], true)?;
                let any = b.cast(&any, DType::I32)?;
                let one = b.lit(&any, 1i64);
                let none = b.scalar(S::Sub, &[&one, &any])?;
                // For an unknown category the index is 1. It is out of range of this vector of one element,
                // so the device reports a fault.
                let unit = floats(DType::F32, &[1], &[1.0])?;
                let unit = b.gather(&unit, &none, 0)?;
                y = b.scalar(S::Mul, &[&y, &unit])?;
            }
            Ok(vec![y.into()])
        }
        (x, ..) => Err(c.invalid(format!(
            "expected one list of categories, of the type of the operand, which is {}",
            x.kind()
        ))),
    }
}
