//! Operators whose result shape depends on data. The host selects the elements, and the device copies them.

use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_host as host;
use halcyon_ir::{ConstData, DType, Result, Scalar};
use std::cmp::Ordering;

pub(super) const ROWS: &[Row] = &[
    row("Compress", 9, &["axis"], compress),
    row("NonZero", 9, &[], non_zero),
    row("Unique", 11, &["axis", "sorted"], unique),
];

/// Limit on the number of slices without elements, which the size of the data does not bound.
const EMPTY: usize = 1 << 16;

fn indices(b: &mut Builder, v: Vec<usize>) -> Result<Value> {
    let v: Vec<i64> = v.into_iter().map(|i| i as i64).collect();
    Ok(b.feed(ConstData::from_slice(&[v.len()], &v)?))
}

/// The operand and the axis of the slices. Without an axis the operand is flattened.
fn sliced(b: &mut Builder, c: &Call<'_>) -> Result<(Value, usize)> {
    let x = c.arg(0)?;
    match c.opt_int("axis")? {
        Some(a) => Ok((x.clone(), c.axis(a, x.rank())?)),
        None => Ok((b.reshape(x, [x.shape().numel()])?, 0)),
    }
}

/// The slices for which the condition holds. The condition may be shorter than the axis but not longer.
fn compress(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, axis) = sliced(b, c)?;
    let cond = c.arg(1)?;
    if cond.rank() != 1 || cond.dtype() != DType::Bool {
        return Err(c.invalid(format!("the condition is {}, expected a vector of bools", cond.ty)));
    }
    let taken = b.fetch(cond, "the condition of Compress")?;
    let taken: Vec<usize> =
        taken.scalars().enumerate().filter(|(_, s)| s.as_bool()).map(|(i, _)| i).collect();
    if let (Some(&last), Some(n)) = (taken.last(), x.shape()[axis].known())
        && last >= n
    {
        return Err(c.invalid(format!("the condition selects slice {last}, but there are {n} slices")));
    }
    let index = indices(b, taken)?;
    one(b.gather(&x, &index, axis)?)
}

/// Positions of the non-zero elements, one row per axis. A scalar has a position with no axes.
fn non_zero(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = b.fetch(c.arg(0)?, "the operand of NonZero")?;
    let dims = x.dims.to_vec();
    let at: Vec<usize> = x.scalars().enumerate().filter(|(_, s)| s.as_bool()).map(|(i, _)| i).collect();
    host::check_available(8 * (dims.len() as u64 + 1) * at.len() as u64, "the result of NonZero")?;
    let mut rows = Vec::new();
    for k in 0..dims.len() {
        let inner: usize = dims[k + 1..].iter().product();
        rows.extend(at.iter().map(|i| (i / inner % dims[k]) as i64));
    }
    one(b.feed(ConstData::from_slice(&[dims.len(), at.len()], &rows)?))
}

/// Orders numbers by value; NaN is last and equal to itself.
fn order(a: &Scalar, b: &Scalar) -> Ordering {
    match (a, b) {
        (Scalar::F(a), Scalar::F(b)) => a.partial_cmp(b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan())),
        (Scalar::U(a), Scalar::U(b)) => a.cmp(b),
        (Scalar::Bool(a), Scalar::Bool(b)) => a.cmp(b),
        _ => a.as_i64().cmp(&b.as_i64()),
    }
}

/// The distinct slices: the first index of each, the group of each slice, and the size of each group.
struct Distinct {
    first: Vec<usize>,
    inverse: Vec<usize>,
    counts: Vec<usize>,
}

/// Finds the distinct slices along `axis`, sorted ascending or ordered by their first index.
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
    // The sort is stable, so the first of equal slices stays first.
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
        return Err(c.unsupported(
            &format!("{} slices without elements", data.dims[axis]),
            "Give an operand with elements",
        ));
    }
    // Memory needed: every element as a number, and for each slice an index, a group and two results.
    let need =
        (data.numel() as u64).saturating_mul(16).saturating_add((data.dims[axis] as u64).saturating_mul(64));
    host::check_available(need, "sorting the slices of Unique")?;
    let d = distinct(&data, axis, c.flag("sorted", true)?);
    let index = indices(b, d.first)?;
    let y = b.gather(&x, &index, axis)?;
    Ok(vec![y, index, indices(b, d.inverse)?, indices(b, d.counts)?])
}
