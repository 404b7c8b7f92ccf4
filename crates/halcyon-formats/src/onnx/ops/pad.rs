//! Padding, cropping, and moving blocks between depth and space.

use super::shape::shape_of;
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::host::{Host, Num};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result, Scalar};

pub(super) const ROWS: &[Row] = &[
    row("CenterCropPad", 18, &["axes"], center_crop_pad),
    row("DepthToSpace", 1, &["blocksize", "mode"], depth_to_space),
    row("Pad", 1, &["mode", "paddings", "pads", "value"], pad),
    row("SpaceToDepth", 1, &["blocksize", "mode"], space_to_depth),
];

/// Elements to add before and after each axis; negative counts remove elements.
fn paddings(b: &mut Builder, c: &Call<'_>, rank: usize) -> Result<Vec<(i64, i64)>> {
    let attr = |name: &str| c.ints(name)?.ok_or_else(|| c.invalid(format!("attribute '{name}' is missing")));
    let pads = match c.opset {
        ..2 => attr("paddings")?.to_vec(),
        2..11 => attr("pads")?.to_vec(),
        _ => b.known_ints(c.arg(1)?, "the amounts of Pad")?,
    };
    let axes = match c.opt(3) {
        Some(v) if c.opset >= 18 => c.axes(&b.known_ints(v, "the axes of Pad")?, rank)?,
        _ => (0..rank).collect(),
    };
    let n = axes.len();
    if pads.len() != 2 * n || pads.iter().any(|p| p.unsigned_abs() > i32::MAX as u64) {
        return Err(c.invalid(format!(
            "{} padding amounts for {n} axes, expected two per axis, of less than 2^31",
            pads.len()
        )));
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
    one(crop_and_pad(b, c, &x, &pads, value)?)
}

/// Surrounds the operand with `value`; negative amounts crop.
pub(super) fn crop_and_pad(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Value,
    pads: &[(i64, i64)],
    value: Scalar,
) -> Result<Value> {
    let crop: Vec<Range> = x
        .shape()
        .iter()
        .zip(pads)
        .map(|(&n, &(lo, hi))| Range {
            start: Dim::from(lo.min(0).unsigned_abs() as usize),
            step: 1,
            len: n.offset(lo.min(0) + hi.min(0)),
        })
        .collect();
    for (r, n) in crop.iter().zip(x.shape().iter()) {
        if r.len.known().is_none() && n.known().is_some() {
            return Err(c.invalid(format!("the padding crops more elements than {} has", x.ty)));
        }
    }
    let x = b.slice(x, &crop)?;
    let (lo, hi): (Vec<usize>, Vec<usize>) =
        pads.iter().map(|&(lo, hi)| (lo.max(0) as usize, hi.max(0) as usize)).unzip();
    let id = b.id(&x)?;
    let n = b.g.pad(id, &lo, &hi, value)?;
    Ok(b.value(n))
}

/// For padding modes that repeat elements: the source index of each position of the padded axis.
fn mirrored(c: &Call<'_>, mode: &str, n: Dim, lo: i64, hi: i64) -> Result<Value> {
    let size = n.known().ok_or_else(|| {
        c.unsupported(&format!("mode '{mode}' over the symbolic size {n}"), "Give concrete input shapes")
    })? as i64;
    let total = size + lo + hi;
    // The size is limited, because the indices are listed during import.
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
            // The pattern does not repeat the edges, so its period is 2 * (size - 1).
            let p = i.rem_euclid(2 * (size - 1));
            Ok(p.min(2 * (size - 1) - p))
        }
        _ => Err(c.invalid(format!("mode '{mode}' is not known"))),
    };
    let vals = (0..total).map(|i| at(i - lo).map(Num::int)).collect::<Result<Vec<_>>>()?;
    Ok(Host { dtype: DType::I64, dims: vec![vals.len()], vals }.into())
}

/// Crops to the centre, or centres the operand in zeros. If the difference is odd, the extra element is
/// cropped or added at the end.
fn center_crop_pad(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let to = shape_of(b, c, c.arg(1)?, "the shape of CenterCropPad")?;
    let axes = match c.ints("axes")? {
        Some(a) => c.axes(a, x.rank())?,
        None => (0..x.rank()).collect(),
    };
    if to.rank() != axes.len() {
        return Err(c.invalid(format!("the target shape has {} sizes for {} axes", to.rank(), axes.len())));
    }
    let mut pads = vec![(0, 0); x.rank()];
    for (&axis, &want) in axes.iter().zip(to.iter()) {
        let have = x.shape()[axis];
        if have == want {
            continue;
        }
        let (Some(n), Some(m)) = (have.known(), want.known()) else {
            return Err(c.unsupported(&format!("the symbolic size {have}"), "Give concrete input shapes"));
        };
        let fits = |v: usize| i32::try_from(v).map(i64::from);
        let (Ok(n), Ok(m)) = (fits(n), fits(m)) else {
            return Err(c.invalid(format!("an axis of {n} cannot be cropped or padded to {m}: too large")));
        };
        // Division truncates, so the smaller part comes first for either sign.
        let first = (m - n) / 2;
        pads[axis] = (first, m - n - first);
    }
    one(crop_and_pad(b, c, x, &pads, Scalar::I(0))?)
}

/// `[n, c, h, w]`, the block size, and whether depth is the outermost factor of the channels.
fn block(c: &Call<'_>) -> Result<([Dim; 4], Dim, bool)> {
    let x = c.arg(0)?;
    let &[n, ch, h, w] = &x.shape()[..] else {
        return Err(c.invalid(format!("the input is {}, expected rank 4: [n, c, h, w]", x.ty)));
    };
    let size = c.opt_int("blocksize")?.filter(|s| (1..=1 << 15).contains(s));
    let size = size.ok_or_else(|| c.invalid("attribute 'blocksize' is missing or out of range"))?;
    let crd = match c.string("mode", "DCR")? {
        "DCR" => false,
        "CRD" => true,
        m => return Err(c.invalid(format!("mode '{m}' is not known"))),
    };
    Ok(([n, ch, h, w], Dim::from(size as usize), crd))
}

/// `d / by`, or an error if the block size `by` does not divide `d`.
fn whole(c: &Call<'_>, d: Dim, by: Dim) -> Result<Dim> {
    match (d.known(), by.known()) {
        (Some(n), Some(m)) if n % m != 0 => Err(c.invalid(format!("{n} does not divide into blocks of {m}"))),
        _ => d.div(by),
    }
}

fn depth_to_space(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let ([n, ch, h, w], s, crd) = block(c)?;
    let depth = whole(c, ch, s.mul(s))?;
    let x = c.arg(0)?;
    let y = if crd {
        let y = b.reshape(x, [n, depth, s, s, h, w])?;
        b.permute(&y, &[0, 1, 4, 2, 5, 3])?
    } else {
        let y = b.reshape(x, [n, s, s, depth, h, w])?;
        b.permute(&y, &[0, 3, 4, 1, 5, 2])?
    };
    one(b.reshape(&y, [n, depth, h.mul(s), w.mul(s)])?)
}

fn space_to_depth(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let ([n, ch, h, w], s, crd) = block(c)?;
    let (h, w) = (whole(c, h, s)?, whole(c, w, s)?);
    let y = b.reshape(c.arg(0)?, [n, ch, h, s, w, s])?;
    let y = b.permute(&y, if crd { &[0, 1, 3, 5, 2, 4] } else { &[0, 3, 5, 1, 2, 4] })?;
    one(b.reshape(&y, [n, ch.mul(s.mul(s)), h, w])?)
}
