//! Operators that move elements: reshaping, slicing, concatenation, gathering.

use super::shape::shape_of;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::host::Num;
use crate::onnx::node::Call;
use halcyon_ir::{Dim, Result, Shape};

pub(super) const ROWS: &[Row] = &[
    row("Concat", 4, &["axis"], concat),
    row("Expand", 8, &[], expand),
    row("Flatten", 1, &["axis"], flatten),
    row("Gather", 1, &["axis"], gather),
    row("Reshape", 5, &["allowzero"], reshape),
    row("Slice", 1, &["axes", "ends", "starts"], slice),
    row("Split", 2, &["axis", "num_outputs", "split"], split),
    row("Squeeze", 1, &["axes"], squeeze),
    row("Tile", 6, &[], tile),
    row("Transpose", 1, &["perm"], transpose),
    row("Unsqueeze", 1, &["axes"], unsqueeze),
];

fn concat(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let args = c.args()?;
    let axis = c.opt_int("axis")?.ok_or_else(|| c.invalid("attribute 'axis' is missing"))?;
    let axis = c.axis(axis, c.arg(0)?.rank())?;
    one(b.concat(&args, axis)?)
}

/// Broadcasting goes both ways: the result may be larger than the requested shape.
fn expand(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let to = shape_of(b, c, c.arg(1)?, "the shape of Expand")?;
    let to =
        x.shape().broadcast(&to).map_err(|_| c.invalid(format!("{} does not broadcast to {to}", x.ty)))?;
    one(b.expand(x, &to)?)
}

/// Reshapes to a matrix. Its rows are the axes before `axis`, and its columns are the other axes.
fn flatten(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, axis) = (c.arg(0)?, c.int("axis", 1)?);
    // The axis may equal the rank.
    let at = if axis == x.rank() as i64 { x.rank() } else { c.axis(axis, x.rank())? };
    let size = |d: &[Dim]| Shape::from(d).numel();
    one(b.reshape(x, [size(&x.shape()[..at]), size(&x.shape()[at..])])?)
}

fn gather(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    one(b.gather(x, c.arg(1)?, axis)?)
}

/// A size of 0 copies the operand's size, unless `allowzero` is set. A size of -1 is inferred.
fn reshape(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let zero = c.flag("allowzero", false)?;
    let h = b.known(c.arg(1)?, "the shape of Reshape")?;
    let mut dims = Vec::with_capacity(h.vals.len());
    let mut rest = None;
    for (k, n) in h.vals.iter().enumerate() {
        match n.known().map(|s| s.as_i64()) {
            Some(0) if !zero => dims.push(
                *x.shape()
                    .get(k)
                    .ok_or_else(|| c.invalid(format!("{} has no size at axis {k} to copy", x.ty)))?,
            ),
            Some(-1) => {
                if rest.replace(k).is_some() {
                    return Err(c.invalid("two sizes are -1, but only one can be inferred"));
                }
                dims.push(Dim::from(1));
            }
            _ => dims.push(n.dim().ok_or_else(|| c.invalid("the shape has a negative size"))?),
        }
    }
    if let Some(k) = rest {
        let others = Shape::from(&dims[..]).numel();
        dims[k] = x.shape().numel().div(others).map_err(|_| {
            c.invalid(format!(
                "the size -1 cannot be inferred: the operand's size is not a multiple of that of {}",
                Shape::from(&dims[..])
            ))
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

/// Reads the axes, which are an attribute before opset version 13 and an operand since.
fn given_axes(b: &mut Builder, c: &Call<'_>) -> Result<Option<Vec<i64>>> {
    match (c.opset >= 13, c.opt(1)) {
        (true, Some(v)) => b.known_ints(v, "axes").map(Some),
        (true, None) => Ok(None),
        (false, _) => Ok(c.ints("axes")?.map(<[i64]>::to_vec)),
    }
}

/// Without axes, removes every axis of size 1.
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

/// The axes are counted in the result's shape.
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

/// The part of an axis of size `n` that a slice selects. If a bound or `n` is symbolic, the step must be 1,
/// or -1 for the whole axis. The bounds, constant ones too, are then assumed to be within the axis (a
/// constant of at least `i32::MAX` means its end), which is checked when the symbols are bound.
fn bounds(c: &Call<'_>, n: Dim, start: Num, end: Num, step: i64) -> Result<Range> {
    if step == 0 {
        return Err(c.invalid("a step is zero"));
    }
    if let (Some(n), Some(s), Some(e)) = (n.known(), start.known(), end.known()) {
        let n = n as i64;
        let from_end = |v: i64| if v < 0 { v.saturating_add(n) } else { v };
        // With a negative step, the end may be -1, the position before the first element.
        let (lo, hi) = if step > 0 { (0, n) } else { (-1, n - 1) };
        let (s, e) = (from_end(s.as_i64()).clamp(lo, hi), from_end(e.as_i64()).clamp(lo, hi));
        let span = if step > 0 { e - s } else { s - e };
        let len = (span.max(0) as u64).div_ceil(step.unsigned_abs()) as usize;
        // An empty slice may start anywhere; 0 is in range for every axis.
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
        // The whole axis reversed.
        (-1, Some(s), Some(e)) if (s == -1 || s >= far) && e <= -far => {
            Ok(Range { start: n.offset(-1), step, len: n })
        }
        _ => Err(
            c.unsupported("a slice with a step along an axis of symbolic size", "Give concrete input shapes")
        ),
    }
}

/// The bounds are attributes before opset version 10 and operands since.
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

/// If no sizes are given, the parts are equal. Since opset version 18, the last parts may be smaller or empty
/// if the size of the axis is not symbolic.
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
            let count = count.ok_or_else(|| c.invalid("the number of parts must be from 1 to 65536"))?;
            if count > c.node.output.len() {
                return Err(
                    c.invalid(format!("{count} parts, but the node has {} results", c.node.output.len()))
                );
            }
            match n.known() {
                Some(n) if n % count != 0 && c.opset < 18 => {
                    return Err(c.invalid(format!("the size {n} cannot be divided into {count} equal parts")));
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
        return Err(c.invalid(format!(
            "{} parts, but the node has {} results",
            parts.len(),
            c.node.output.len()
        )));
    }
    let mut at = Dim::from(0);
    let mut out = Vec::with_capacity(parts.len());
    for p in parts {
        out.push(b.narrow(x, axis, at, p)?);
        at = at.add(p);
    }
    Ok(out)
}

/// The repeats become new axes, along which the operand is expanded. Each is then merged with its old axis.
fn tile(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let repeats = shape_of(b, c, c.arg(1)?, "the repeats of Tile")?;
    if repeats.rank() != x.rank() {
        return Err(c.invalid(format!("{} repeats, but the operand is {}", repeats.rank(), x.ty)));
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
