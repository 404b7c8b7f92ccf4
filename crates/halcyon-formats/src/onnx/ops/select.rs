//! Operators whose result's shape depends on data. The host finds which elements they take; the device moves
//! them.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::{ConstData, DType, Result, Scalar, host};
use std::cmp::Ordering;

pub const ROWS: &[Row] = &[
    row("Compress", 9, &["axis"], compress),
    row("NonZero", 9, &[], non_zero),
    row("Unique", 11, &["axis", "sorted"], unique),
];

/// Slices without elements that are counted at most: no data bounds their number.
const EMPTY: usize = 1 << 16;

fn indices(b: &mut Builder, v: Vec<usize>) -> Result<Value> {
    let v: Vec<i64> = v.into_iter().map(|i| i as i64).collect();
    Ok(b.feed(ConstData::from_slice(&[v.len()], &v)?))
}

/// The operand and the axis to take slices along; the operand flattened where no axis is given.
fn sliced(b: &mut Builder, c: &Call<'_>) -> Result<(Value, usize)> {
    let x = c.arg(0)?;
    match c.opt_int("axis")? {
        Some(a) => Ok((x.clone(), c.axis(a, x.rank())?)),
        None => Ok((b.reshape(x, [x.shape().numel()])?, 0)),
    }
}

/// The slices for which the condition, which may be too short but not too long, holds.
fn compress(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, axis) = sliced(b, c)?;
    let cond = c.arg(1)?;
    if cond.rank() != 1 || cond.dtype() != DType::Bool {
        return Err(c.invalid(format!("a vector of bools expected, not {}", cond.ty)));
    }
    let taken = b.fetch(cond, "the condition of Compress")?;
    let taken: Vec<usize> =
        taken.scalars().enumerate().filter(|(_, s)| s.as_bool()).map(|(i, _)| i).collect();
    if let (Some(&last), Some(n)) = (taken.last(), x.shape()[axis].known())
        && last >= n
    {
        return Err(c.invalid(format!("place {last} of the condition is past the {n} slices")));
    }
    let index = indices(b, taken)?;
    one(b.gather(&x, &index, axis)?)
}

/// Positions of the elements that are not zero, one row per axis. A scalar has a position without axes.
fn non_zero(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = b.fetch(c.arg(0)?, "the operand of NonZero")?;
    let dims = x.dims.to_vec();
    let at: Vec<usize> = x.scalars().enumerate().filter(|(_, s)| s.as_bool()).map(|(i, _)| i).collect();
    host::room(8 * (dims.len() as u64 + 1) * at.len() as u64, "the result of NonZero")?;
    let mut rows = Vec::new();
    for k in 0..dims.len() {
        let inner: usize = dims[k + 1..].iter().product();
        rows.extend(at.iter().map(|i| (i / inner % dims[k]) as i64));
    }
    one(b.feed(ConstData::from_slice(&[dims.len(), at.len()], &rows)?))
}

/// Numbers by value, NaN last and equal to itself.
fn order(a: &Scalar, b: &Scalar) -> Ordering {
    match (a, b) {
        (Scalar::F(a), Scalar::F(b)) => a.partial_cmp(b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan())),
        (Scalar::U(a), Scalar::U(b)) => a.cmp(b),
        (Scalar::Bool(a), Scalar::Bool(b)) => a.cmp(b),
        _ => a.as_i64().cmp(&b.as_i64()),
    }
}

/// Distinct slices, of each the first place, where each slice went, and how often each is there.
struct Distinct {
    first: Vec<usize>,
    inverse: Vec<usize>,
    counts: Vec<usize>,
}

/// Of the slices along `axis`, in ascending order or in that of their first places.
fn distinct(x: &ConstData, axis: usize, sorted: bool) -> Distinct {
    let vals: Vec<Scalar> = x.scalars().collect();
    let (n, inner) = (x.dims[axis], x.dims[axis + 1..].iter().product::<usize>());
    let outer: usize = x.dims[..axis].iter().product();
    let compare = |&i: &usize, &j: &usize| {
        (0..outer)
            .flat_map(|o| (0..inner).map(move |q| (o * n * inner + q, inner)))
            .map(|(base, step)| order(&vals[base + i * step], &vals[base + j * step]))
            .find(|o| *o != Ordering::Equal)
            .unwrap_or(Ordering::Equal)
    };
    let mut places: Vec<usize> = (0..n).collect();
    // A stable sort keeps the first place of equal slices first.
    places.sort_by(compare);
    let mut groups: Vec<Vec<usize>> = vec![];
    for p in places {
        match groups.last_mut() {
            Some(g) if compare(&g[0], &p) == Ordering::Equal => g.push(p),
            _ => groups.push(vec![p]),
        }
    }
    if !sorted {
        groups.sort_by_key(|g| g[0]);
    }
    let mut inverse = vec![0; n];
    for (k, g) in groups.iter().enumerate() {
        g.iter().for_each(|&p| inverse[p] = k);
    }
    let (first, counts) = groups.iter().map(|g| (g[0], g.len())).unzip();
    Distinct { first, inverse, counts }
}

fn unique(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, axis) = sliced(b, c)?;
    let data = b.fetch(&x, "the operand of Unique")?;
    if data.numel() == 0 && data.dims[axis] > EMPTY {
        return Err(
            c.unsupported(&format!("{} slices without elements", data.dims[axis]), "Give them elements")
        );
    }
    // Every element is looked at as a number, and each slice has a place, a group and two results.
    let need =
        (data.numel() as u64).saturating_mul(16).saturating_add((data.dims[axis] as u64).saturating_mul(64));
    host::room(need, "sorting the slices of Unique")?;
    let d = distinct(&data, axis, c.flag("sorted", true)?);
    let index = indices(b, d.first)?;
    let y = b.gather(&x, &index, axis)?;
    Ok(vec![y, index, indices(b, d.inverse)?, indices(b, d.counts)?])
}
