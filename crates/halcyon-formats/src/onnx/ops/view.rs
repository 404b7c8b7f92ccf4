//! Operators that move elements: reshaping, slicing, joining, gathering, padding.

use super::shape::shape_of;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::host::{Host, Num};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub const ROWS: &[Row] = &[
    row("Concat", 4, &["axis"], concat),
    row("Expand", 8, &[], expand),
    row("Flatten", 1, &["axis"], flatten),
    row("Gather", 1, &["axis"], gather),
    row("GatherElements", 11, &["axis"], gather_elements),
    row("Pad", 2, &["mode", "pads", "value"], pad),
    row("Reshape", 5, &["allowzero"], reshape),
    row("Slice", 1, &["axes", "ends", "starts"], slice),
    row("Split", 2, &["axis", "num_outputs", "split"], split),
    row("Squeeze", 1, &["axes"], squeeze),
    row("Tile", 6, &[], tile),
    row("TopK", 10, &["axis", "largest", "sorted"], top_k),
    row("Transpose", 1, &["perm"], transpose),
    row("Unsqueeze", 1, &["axes"], unsqueeze),
];

fn concat(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let args = c.args()?;
    let axis = c.opt_int("axis")?.ok_or_else(|| c.invalid("attribute 'axis' is missing"))?;
    let axis = c.axis(axis, c.arg(0)?.rank())?;
    one(b.concat(&args, axis)?)
}

/// Both shapes broadcast: the result may be larger than the shape asked for.
fn expand(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let to = shape_of(b, c, c.arg(1)?, "the shape of Expand")?;
    let to =
        x.shape().broadcast(&to).map_err(|_| c.invalid(format!("{} does not broadcast to {to}", x.ty)))?;
    one(b.expand(x, &to)?)
}

/// To a matrix: the axes before `axis`, and those from it on.
fn flatten(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, axis) = (c.arg(0)?, c.int("axis", 1)?);
    // The axis may also be the rank.
    let at = if axis == x.rank() as i64 { x.rank() } else { c.axis(axis, x.rank())? };
    let size = |d: &[Dim]| Shape::from(d).numel();
    one(b.reshape(x, [size(&x.shape()[..at]), size(&x.shape()[at..])])?)
}

fn gather(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    one(b.gather(x, c.arg(1)?, axis)?)
}

fn gather_elements(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    let ids = b.ids(&[x, c.arg(1)?])?;
    let n = b.g.gather_elements(ids[0], ids[1], axis)?;
    one(b.value(n))
}

/// A size of 0 copies the operand's (unless `allowzero`), -1 takes what is left.
fn reshape(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let zero = c.flag("allowzero", false)?;
    let h = b.known(c.arg(1)?, "the shape of Reshape")?;
    let mut dims = Vec::with_capacity(h.vals.len());
    let mut rest = None;
    for (k, n) in h.vals.iter().enumerate() {
        match n.known().map(|s| s.as_i64()) {
            Some(0) if !zero => dims.push(
                *x.shape().get(k).ok_or_else(|| c.invalid(format!("{} has no size {k} to copy", x.ty)))?,
            ),
            Some(-1) => {
                if rest.replace(k).is_some() {
                    return Err(c.invalid("two sizes are -1"));
                }
                dims.push(Dim::from(1));
            }
            _ => dims.push(n.dim().ok_or_else(|| c.invalid("the shape has a negative size"))?),
        }
    }
    if let Some(k) = rest {
        let others = Shape::from(&dims[..]).numel();
        dims[k] =
            x.shape().numel().div(others).map_err(|_| {
                c.invalid(format!("the size -1 of {} is not determined", Shape::from(&dims[..])))
            })?;
    }
    one(b.reshape(x, dims)?)
}

fn transpose(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let perm = match c.ints("perm")? {
        Some(p) => c.axes(p, x.rank())?,
        None => (0..x.rank()).rev().collect(),
    };
    one(b.permute(x, &perm)?)
}

/// Axes as an attribute before version 13, as an operand from it on.
fn given_axes(b: &mut Builder, c: &Call<'_>) -> Result<Option<Vec<i64>>> {
    match (c.opset >= 13, c.opt(1)) {
        (true, Some(v)) => b.known_ints(v, "axes").map(Some),
        (true, None) => Ok(None),
        (false, _) => Ok(c.ints("axes")?.map(<[i64]>::to_vec)),
    }
}

/// Without axes, every size of 1 goes.
fn squeeze(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axes = match given_axes(b, c)? {
        Some(a) => c.axes(&a, x.rank())?,
        None => (0..x.rank()).filter(|&k| x.shape()[k].is(1)).collect(),
    };
    if let Some(k) = axes.iter().find(|&&k| !x.shape()[k].is(1)) {
        return Err(c.invalid(format!("axis {k} of {} is not of size 1", x.ty)));
    }
    let to: Shape = (0..x.rank()).filter(|k| !axes.contains(k)).map(|k| x.shape()[k]).collect();
    one(b.reshape(x, to)?)
}

/// Axes count in the result.
fn unsqueeze(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axes = given_axes(b, c)?.ok_or_else(|| c.invalid("the axes are missing"))?;
    let rank = x.rank() + axes.len();
    let axes = c.axes(&axes, rank)?;
    let mut old = x.shape().iter().copied();
    let to: Shape = (0..rank)
        .map(|k| if axes.contains(&k) { Dim::from(1) } else { old.next().unwrap_or(Dim::from(1)) })
        .collect();
    one(b.reshape(x, to)?)
}

/// The part of an axis of size `n` that a slice names. Symbolic bounds are taken to lie inside the axis, which binding checks;
/// they need a step of 1.
fn bounds(c: &Call<'_>, n: Dim, start: Num, end: Num, step: i64) -> Result<Range> {
    if step == 0 {
        return Err(c.invalid("a step is zero"));
    }
    if let (Some(n), Some(s), Some(e)) = (n.known(), start.known(), end.known()) {
        let n = n as i64;
        let from_end = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
        // Going down, the place before the first element is a valid end.
        let (lo, hi) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let (s, e) = (from_end(s.as_i64()).clamp(lo, hi), from_end(e.as_i64()).clamp(lo, hi));
        let span = if step > 0 { e - s } else { s - e };
        let len = (span.max(0) as u64).div_ceil(step.unsigned_abs()) as usize;
        // An empty slice starts anywhere; 0 is inside every axis.
        let start = if len == 0 { 0 } else { s as usize };
        return Ok(Range { start: Dim::from(start), step, len: Dim::from(len) });
    }
    let far = i64::from(i32::MAX);
    let place = |v: Num| match v.known().map(|s| s.as_i64()) {
        Some(v) if v >= far => n,
        Some(v) if v < 0 => n.offset(v),
        Some(v) => Dim::from(v as usize),
        None => v.dim().unwrap_or(n),
    };
    match (step, start.known().map(|s| s.as_i64()), end.known().map(|s| s.as_i64())) {
        (1, ..) => {
            let s = place(start);
            Ok(Range { start: s, step, len: place(end).sub(s) })
        }
        // The whole axis backwards.
        (-1, Some(s), Some(e)) if (s == -1 || s >= far) && e <= -far => {
            Ok(Range { start: n.offset(-1), step, len: n })
        }
        _ => Err(c.unsupported("a stepped slice of a symbolic size", "Give concrete input shapes")),
    }
}

/// Bounds as attributes before version 10, as operands from it on.
fn slice(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let nums = |v: &[i64]| v.iter().map(|&v| Num::int(v)).collect::<Vec<_>>();
    let (starts, ends, axes, steps) = if c.opset < 10 {
        let need = |name: &str| {
            c.ints(name)?.map(nums).ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")))
        };
        (need("starts")?, need("ends")?, c.ints("axes")?.map(<[i64]>::to_vec), None)
    } else {
        (
            b.known(c.arg(1)?, "the start of Slice")?.vals.clone(),
            b.known(c.arg(2)?, "the end of Slice")?.vals.clone(),
            c.opt(3).map(|v| b.known_ints(v, "the axes of Slice")).transpose()?,
            c.opt(4).map(|v| b.known_ints(v, "the steps of Slice")).transpose()?,
        )
    };
    let axes = c.axes(&axes.unwrap_or_else(|| (0..starts.len() as i64).collect()), x.rank())?;
    let steps = steps.unwrap_or_else(|| vec![1; starts.len()]);
    if [ends.len(), axes.len(), steps.len()].iter().any(|n| *n != starts.len()) {
        return Err(c.invalid("starts, ends, axes and steps differ in length"));
    }
    let mut r: Vec<Range> =
        x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
    for (i, &a) in axes.iter().enumerate() {
        r[a] = bounds(c, x.shape()[a], starts[i], ends[i], steps[i])?;
    }
    one(b.slice(x, &r)?)
}

/// Without sizes the parts are equal; from version 18 on the last may be smaller.
fn split(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    let n = x.shape()[axis];
    let given = match (c.opset >= 13, c.opt(1)) {
        (true, Some(v)) => Some(b.known_ints(v, "the sizes of Split")?),
        (true, None) => None,
        (false, _) => c.ints("split")?.map(<[i64]>::to_vec),
    };
    let parts: Vec<Dim> = match given {
        Some(v) => {
            let total = v.iter().try_fold(0i64, |s, &p| if p < 0 { None } else { s.checked_add(p) });
            if n.known().is_some_and(|n| total != Some(n as i64)) || total.is_none() {
                return Err(c.invalid(format!("parts {v:?} do not add up to the size {n}")));
            }
            v.iter().map(|&p| Dim::from(p as usize)).collect()
        }
        None => {
            let count = c.opt_int("num_outputs")?.unwrap_or(c.node.output.len() as i64);
            let count = usize::try_from(count).ok().filter(|n| (1..=65_536).contains(n));
            let count = count.ok_or_else(|| c.invalid("the number of results is out of range"))?;
            if count > c.node.output.len() {
                return Err(c.invalid(format!("{count} parts for {} results", c.node.output.len())));
            }
            match n.known() {
                Some(n) if n % count != 0 && c.opset < 18 => {
                    return Err(c.invalid(format!("{n} does not divide into {count} parts")));
                }
                Some(n) => {
                    let size = n.div_ceil(count);
                    (0..count).map(|i| Dim::from(size.min(n.saturating_sub(i * size)))).collect()
                }
                None => vec![n.div(Dim::from(count))?; count],
            }
        }
    };
    if parts.len() < c.node.output.len() {
        return Err(c.invalid(format!("{} parts for {} results", parts.len(), c.node.output.len())));
    }
    let mut at = Dim::from(0);
    let mut out = Vec::with_capacity(parts.len());
    for p in parts {
        out.push(b.narrow(x, axis, at, p)?);
        at = at.add(p);
    }
    Ok(out)
}

/// Repeats are new axes of the expanded operand, merged into the old ones.
fn tile(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let repeats = shape_of(b, c, c.arg(1)?, "the repeats of Tile")?;
    if repeats.rank() != x.rank() {
        return Err(c.invalid(format!("{} repeats for {}", repeats.rank(), x.ty)));
    }
    if repeats.iter().all(|r| r.is(1)) {
        return one(x.clone());
    }
    let pairs =
        |f: &dyn Fn(usize) -> Dim| -> Shape { (0..x.rank()).flat_map(|k| [f(k), x.shape()[k]]).collect() };
    let y = b.reshape(x, pairs(&|_| Dim::from(1)))?;
    let y = b.expand(&y, &pairs(&|k| repeats[k]))?;
    let to: Shape = (0..x.rank()).map(|k| repeats[k].mul(x.shape()[k])).collect();
    one(b.reshape(&y, to)?)
}

/// Elements to add before and after each axis, negative to remove.
fn paddings(b: &mut Builder, c: &Call<'_>, rank: usize) -> Result<Vec<(i64, i64)>> {
    let pads = if c.opset < 11 {
        c.ints("pads")?.ok_or_else(|| c.invalid("attribute 'pads' is missing"))?.to_vec()
    } else {
        b.known_ints(c.arg(1)?, "the amounts of Pad")?
    };
    let axes = match c.opt(3) {
        Some(v) if c.opset >= 18 => c.axes(&b.known_ints(v, "the axes of Pad")?, rank)?,
        _ => (0..rank).collect(),
    };
    let n = axes.len();
    if pads.len() != 2 * n || pads.iter().any(|p| p.unsigned_abs() > i32::MAX as u64) {
        return Err(c.invalid(format!("{} amounts for {n} axes, or one out of range", pads.len())));
    }
    let mut out = vec![(0, 0); rank];
    for (i, &a) in axes.iter().enumerate() {
        out[a] = (pads[i], pads[n + i]);
    }
    Ok(out)
}

fn pad(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let mut x = c.arg(0)?.clone();
    let pads = paddings(b, c, x.rank())?;
    let mode = c.string("mode", "constant")?;
    if mode != "constant" {
        for (axis, &(lo, hi)) in pads.iter().enumerate().filter(|(_, p)| **p != (0, 0)) {
            let index = mirrored(c, mode, x.shape()[axis], lo, hi)?;
            x = b.gather(&x, &index, axis)?;
        }
        return one(x);
    }
    let value = match c.opt(2) {
        Some(v) if c.opset >= 11 => b.known_scalar(v, "the value of Pad")?,
        _ => Scalar::F(c.float("value", 0.0)?.into()),
    };
    // Negative amounts crop.
    let crop: Vec<Range> = x
        .shape()
        .iter()
        .zip(&pads)
        .map(|(&n, &(lo, hi))| Range {
            start: Dim::from(lo.min(0).unsigned_abs() as usize),
            step: 1,
            len: n.offset(lo.min(0) + hi.min(0)),
        })
        .collect();
    for (r, n) in crop.iter().zip(x.shape().iter()) {
        if r.len.known().is_none() && n.known().is_some() {
            return Err(c.invalid(format!("more is cropped than {} has", x.ty)));
        }
    }
    x = b.slice(&x, &crop)?;
    let (lo, hi): (Vec<usize>, Vec<usize>) =
        pads.iter().map(|&(lo, hi)| (lo.max(0) as usize, hi.max(0) as usize)).unzip();
    let id = b.id(&x)?;
    let n = b.g.pad(id, &lo, &hi, value)?;
    one(b.value(n))
}

/// For the padding modes that repeat elements: which element each place of the padded axis shows.
fn mirrored(c: &Call<'_>, mode: &str, n: Dim, lo: i64, hi: i64) -> Result<Value> {
    let size = n.known().ok_or_else(|| {
        c.unsupported(&format!("mode '{mode}' over the symbolic size {n}"), "Give concrete input shapes")
    })? as i64;
    let total = size + lo + hi;
    // The places are listed one by one here.
    if size == 0 || !(0..=1 << 24).contains(&total) {
        return Err(
            c.invalid(format!("an axis of {size} cannot be padded by {lo} and {hi} in mode '{mode}'"))
        );
    }
    let at = |i: i64| match mode {
        "edge" => Ok(i.clamp(0, size - 1)),
        "wrap" => Ok(i.rem_euclid(size)),
        "reflect" if size == 1 => Ok(0),
        "reflect" => {
            // Without repeating the edges, the pattern has period 2 * (size - 1).
            let p = i.rem_euclid(2 * (size - 1));
            Ok(p.min(2 * (size - 1) - p))
        }
        _ => Err(c.invalid(format!("mode '{mode}' is not known"))),
    };
    let vals = (0..total).map(|i| at(i - lo).map(Num::int)).collect::<Result<Vec<_>>>()?;
    Ok(Host { dtype: DType::I64, dims: vec![vals.len()], vals }.into())
}

/// Values and indices, sorted either way: the operator leaves unsorted order open.
fn top_k(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", -1)?, x.rank())?;
    let k = b.known_scalar(c.arg(1)?, "K of TopK")?.as_i64();
    let k = usize::try_from(k).map_err(|_| c.invalid(format!("K is {k}")))?;
    if x.shape()[axis].known().is_some_and(|n| k > n) {
        return Err(c.invalid(format!("K is {k}, but axis {axis} of {} is shorter", x.ty)));
    }
    let id = b.id(x)?;
    let order = b.g.argsort(id, axis, c.flag("largest", true)?)?;
    let index = b.g.narrow(order, axis, 0, k)?;
    let y = b.g.gather_elements(id, index, axis)?;
    Ok(vec![b.value(y), b.value(index)])
}
