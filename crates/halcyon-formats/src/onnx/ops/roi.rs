//! Pooling over regions of interest.

use super::calc::{along, bin, checked_numel, clamp, index_type, known, nth, select, trailing, with, within};
use super::sample::{Rows, Tap};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("MaxRoiPool", 1, &["pooled_shape", "spatial_scale"], max_roi_pool),
    row(
        "RoiAlign",
        10,
        &[
            "coordinate_transformation_mode",
            "mode",
            "output_height",
            "output_width",
            "sampling_ratio",
            "spatial_scale",
        ],
        roi_align,
    ),
];

/// Limit on the elements sampled by a RoiAlign. With adaptive sampling their number depends on the regions,
/// which are run-time data.
const MAX_SAMPLES: usize = 1 << 31;

fn image(c: &Call<'_>, x: &Value) -> Result<(usize, usize)> {
    if x.rank() != 4 {
        return Err(c.invalid(format!("the input is {}, expected rank 4: [n, c, h, w]", x.ty)));
    }
    match known(&x.shape()[2..])?[..] {
        [h, w] if h > 0 && w > 0 => Ok((h, w)),
        _ => Err(c.invalid(format!("the input {} has no elements to pool", x.ty))),
    }
}

/// The regions along one spatial axis. The values are vectors with one element per region.
struct AxisRegions {
    start: Value,
    /// Size of a bin.
    bin: Value,
    bins: usize,
    n: usize,
}

impl AxisRegions {
    fn new(
        b: &mut Builder,
        c: &Call<'_>,
        rois: &Value,
        first: usize,
        bins: usize,
        n: usize,
        half: bool,
    ) -> Result<AxisRegions> {
        let scale = f64::from(c.float("spatial_scale", 1.0)?);
        let mut edge = |i: usize| {
            let v = nth(b, rois, 1, i)?;
            let v = with(b, S::Mul, &v, scale)?;
            if half { with(b, S::Sub, &v, 0.5) } else { Ok(v) }
        };
        let (start, end) = (edge(first)?, edge(first + 2)?);
        let mut len = bin(b, S::Sub, &end, &start)?;
        if !half {
            // A region shorter than one element, or whose end is before its start, counts as one element
            // long.
            len = with(b, S::Max, &len, 1.0)?;
        }
        Ok(AxisRegions { start, bin: with(b, S::Div, &len, bins as f64)?, bins, n })
    }

    /// Number of samples per bin for adaptive sampling: the size of the bin in elements, rounded up.
    fn adaptive(&self, b: &mut Builder) -> Result<Value> {
        let g = b.scalar(S::Ceil, &[&self.bin])?;
        with(b, S::Max, &g, 0.0)
    }

    /// The two taps of every sample (the elements it is interpolated from), and the mask of samples that
    /// exist. `per` is the number of samples per bin of each region, and `grid` the largest of these numbers.
    /// The results have 5 axes: the regions are axis 0; bins and samples are axes 1 and 2, or 3 and 4 if
    /// `second`. A sample more than one element outside the image is zero; a sample outside but closer takes
    /// the element at the border.
    fn taps(&self, b: &mut Builder, per: &Value, grid: usize, second: bool) -> Result<(Vec<Tap>, Value)> {
        let (bins_at, grid_at) = if second { (3, 4) } else { (1, 2) };
        let dtype = self.start.dtype();
        let line = |b: &mut Builder, v: &Value| along(b, v, 0, 5);
        let (start, size, per) = (line(b, &self.start)?, line(b, &self.bin)?, line(b, per)?);
        let k = b.iota(dtype, Dim::from(self.bins))?;
        let k = along(b, &k, bins_at, 5)?;
        let j = b.iota(dtype, Dim::from(grid))?;
        let j = along(b, &j, grid_at, 5)?;
        let there = bin(b, S::Lt, &j, &per)?;
        let from = bin(b, S::Mul, &k, &size)?;
        let from = bin(b, S::Add, &start, &from)?;
        let within_bin = with(b, S::Add, &j, 0.5)?;
        let within_bin = bin(b, S::Mul, &within_bin, &size)?;
        // Regions without samples divide by zero here, but the mask excludes them.
        let within_bin = bin(b, S::Div, &within_bin, &per)?;
        let at = bin(b, S::Add, &from, &within_bin)?;
        let near = within(b, &at, -1.0, self.n as f64)?;
        let last = self.n as f64 - 1.0;
        let at = clamp(b, &at, 0.0, last)?;
        let low = b.scalar(S::Floor, &[&at])?;
        let high = with(b, S::Add, &low, 1.0)?;
        let (w_high, w_low) = (bin(b, S::Sub, &at, &low)?, bin(b, S::Sub, &high, &at)?);
        let high = with(b, S::Min, &high, last)?;
        let mut tap = |at: &Value, weight: Value| -> Result<Tap> {
            let at = b.cast(at, DType::I32)?;
            Ok(Tap { at, weight: Some(weight), valid: Some(near.clone()) })
        };
        Ok((vec![tap(&low, w_low)?, tap(&high, w_high)?], there))
    }
}

/// Each bin of a region is the mean of its bilinear samples. In mode `max`, it is the maximum of the weighted
/// neighbours of all its samples. He et al., "Mask R-CNN" (2017).
fn roi_align(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, rois, batch) = (c.arg(0)?, c.arg(1)?, c.arg(2)?);
    let (h, w) = image(c, x)?;
    let n = batch.shape().numel();
    if rois.rank() != 2 || !rois.shape()[1].is(4) || rois.shape()[0] != n || batch.rank() != 1 {
        return Err(c.invalid(format!(
            "regions are {}, batch indices {}; expected [r, 4] and [r]",
            rois.ty, batch.ty
        )));
    }
    let count = |name: &str, default: i64, least: i64| {
        let v = c.int(name, default)?;
        let fits = (least..=1 << 16).contains(&v);
        if fits {
            Ok(v as usize)
        } else {
            Err(c.invalid(format!("'{name}' is {v}, expected {least} to 65536")))
        }
    };
    let (ph, pw) = (count("output_height", 1, 1)?, count("output_width", 1, 1)?);
    let ratio = count("sampling_ratio", 0, 0)?;
    let name = |attr: &str, v: &str| c.invalid(format!("{attr} '{v}' is not known"));
    let half = match c.string("coordinate_transformation_mode", "half_pixel")? {
        _ if c.opset < 16 => false,
        "half_pixel" => true,
        "output_half_pixel" => false,
        m => return Err(name("coordinate_transformation_mode", m)),
    };
    let max = match c.string("mode", "avg")? {
        "avg" => false,
        "max" => true,
        m => return Err(name("mode", m)),
    };
    let to = x.dtype();
    let x = b.cast(x, to.compute())?;
    let rois = b.cast(rois, rois.dtype().compute())?;
    let (rows, cols) =
        (AxisRegions::new(b, c, &rois, 1, ph, h, half)?, AxisRegions::new(b, c, &rois, 0, pw, w, half)?);
    let (per_row, per_col, gh, gw) = if ratio > 0 {
        let v = b.lit(&rois, ratio as f64);
        let v = b.expand(&v, &Shape::from([n]))?;
        (v.clone(), v, ratio, ratio)
    } else {
        let (r, k) = (rows.adaptive(b)?, cols.adaptive(b)?);
        let mut most = |v: &Value| -> Result<usize> {
            if n.is(0) {
                return Ok(1);
            }
            let m = b.reduce(ReduceKind::Max, v, &[0], false)?;
            let m = b.known_scalar(&m, "the sizes of the regions of RoiAlign")?.as_i64();
            usize::try_from(m.max(1)).map_err(|_| c.invalid("a region is too large"))
        };
        let (gh, gw) = (most(&r)?, most(&k)?);
        (r, k, gh, gw)
    };
    let known_or = |d: Dim| d.known().unwrap_or(1);
    if checked_numel(c, &[known_or(n), ph, gh, pw, gw, known_or(x.shape()[1])])? > MAX_SAMPLES {
        return Err(c.unsupported(
            &format!("{gh} by {gw} samples in each bin"),
            "Use smaller regions, or a fixed sampling_ratio",
        ));
    }
    let (ys, there_y) = rows.taps(b, &per_row, gh, false)?;
    let (xs, there_x) = cols.taps(b, &per_col, gw, true)?;
    let places = Rows::new(b, &x, &[h, w])?;
    let first = b.cast(batch, index_type(x.shape()[0].mul(Dim::from(h * w))))?;
    let first = with(b, S::Mul, &first, (h * w) as i64)?;
    let places = Rows { first: along(b, &first, 0, 5)?, ..places };
    let terms = places.terms(b, c, &[ys, xs])?;
    let there = bin(b, S::And, &there_y, &there_x)?;
    let there = trailing(b, &there, 1)?;
    // [r, ph, gh, pw, gw, c]
    let mut y: Option<Value> = None;
    for t in terms {
        y = Some(match y {
            Some(y) => bin(b, if max { S::Max } else { S::Add }, &y, &t)?,
            None => t,
        });
    }
    let y = y.ok_or_else(|| c.invalid("there are no samples"))?;
    let blank = b.lit(&y, if max { f64::NEG_INFINITY } else { 0.0 });
    let y = select(b, &there, &y, &blank)?;
    let y = b.reduce(if max { ReduceKind::Max } else { ReduceKind::Sum }, &y, &[2, 4], false)?;
    let samples = bin(b, S::Mul, &per_row, &per_col)?;
    let samples = b.cast(&samples, y.dtype())?;
    let samples = along(b, &samples, 0, 4)?;
    let y = if max {
        let (none, zero) = (with(b, S::Le, &samples, 0.0)?, b.lit(&y, 0.0));
        select(b, &none, &zero, &y)?
    } else {
        let samples = with(b, S::Max, &samples, 1.0)?;
        bin(b, S::Div, &y, &samples)?
    };
    let y = b.permute(&y, &[0, 3, 1, 2])?;
    one(b.cast(&y, to)?)
}

/// Rounds half away from zero.
fn round_away(b: &mut Builder, x: &Value) -> Result<Value> {
    let (a, s) = (b.scalar(S::Abs, &[x])?, b.scalar(S::Sign, &[x])?);
    let a = with(b, S::Add, &a, 0.5)?;
    let a = b.scalar(S::Floor, &[&a])?;
    bin(b, S::Mul, &a, &s)
}

/// Each bin of a region is the maximum of the elements that it touches, or 0 if it touches none. Girshick,
/// "Fast R-CNN" (2015).
fn max_roi_pool(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, rois) = (c.arg(0)?, c.arg(1)?);
    let (h, w) = image(c, x)?;
    if rois.rank() != 2 || !rois.shape()[1].is(5) {
        return Err(c.invalid(format!("regions are {}, expected [r, 5]", rois.ty)));
    }
    if c.ints("pooled_shape")?.is_none() {
        return Err(c.invalid("attribute 'pooled_shape' is missing"));
    }
    let bins = c.sizes("pooled_shape", 2, 1)?;
    if bins.iter().any(|n| !(1..=1 << 16).contains(n)) {
        return Err(c.invalid(format!("pooled_shape is {bins:?}, expected sizes of 1 to 65536")));
    }
    let scale = f64::from(c.float("spatial_scale", 1.0)?);
    let to = x.dtype();
    let rois = b.cast(rois, rois.dtype().compute())?;
    let x = b.cast(x, to.compute())?;
    let batch = nth(b, &rois, 1, 0)?;
    let batch = b.cast(&batch, DType::I32)?;
    // A single image is shared by all regions without copying it.
    let mut y = if x.shape()[0].is(1) { x.clone() } else { b.gather(&x, &batch, 0)? };
    let low = b.lit(&y, f64::NEG_INFINITY);
    let mut empty: Option<Value> = None;
    // Innermost axis first: [r, c, h, w] to [r, c, h, pw] to [r, c, ph, pw].
    for (axis, first, n) in [(3, 1, w), (2, 2, h)] {
        let mut edge = |i: usize| {
            let v = nth(b, &rois, 1, i)?;
            let v = with(b, S::Mul, &v, scale)?;
            round_away(b, &v)
        };
        let (start, end) = (edge(first)?, edge(first + 2)?);
        let len = bin(b, S::Sub, &end, &start)?;
        let len = with(b, S::Add, &len, 1.0)?;
        let len = with(b, S::Max, &len, 1.0)?;
        let p = bins[axis - 2];
        let size = with(b, S::Div, &len, p as f64)?;
        // Shapes have rank 5: axis 0 is the regions, `axis` the bins, and `axis + 1` the elements, which are
        // reduced.
        let rank = 5;
        let (start, size) = (along(b, &start, 0, rank)?, along(b, &size, 0, rank)?);
        let k = b.iota(rois.dtype(), Dim::from(p))?;
        let k = along(b, &k, axis, rank)?;
        let from = bin(b, S::Mul, &k, &size)?;
        let from = b.scalar(S::Floor, &[&from])?;
        let next = with(b, S::Add, &k, 1.0)?;
        let until = bin(b, S::Mul, &next, &size)?;
        let until = b.scalar(S::Ceil, &[&until])?;
        let place = |b: &mut Builder, v: &Value| {
            let v = bin(b, S::Add, v, &start)?;
            clamp(b, &v, 0.0, n as f64)
        };
        let (from, until) = (place(b, &from)?, place(b, &until)?);
        let none = bin(b, S::Le, &until, &from)?;
        let s: Shape =
            none.shape().iter().enumerate().filter(|(i, _)| *i != axis + 1).map(|(_, d)| *d).collect();
        let none = b.reshape(&none, s)?;
        empty = Some(match empty {
            Some(e) => bin(b, S::Or, &e, &none)?,
            None => none,
        });
        let at = b.iota(rois.dtype(), Dim::from(n))?;
        let at = along(b, &at, axis + 1, rank)?;
        let (above, below) = (bin(b, S::Ge, &at, &from)?, bin(b, S::Lt, &at, &until)?);
        let inside = bin(b, S::And, &above, &below)?;
        let mut s = y.shape().clone();
        s.0.insert(axis, Dim::from(1));
        let wide = b.reshape(&y, s)?;
        let wide = select(b, &inside, &wide, &low)?;
        y = b.reduce(ReduceKind::Max, &wide, &[axis + 1], false)?;
    }
    if let Some(e) = empty {
        let zero = b.lit(&y, Scalar::I(0));
        y = select(b, &e, &zero, &y)?;
    }
    one(b.cast(&y, to)?)
}
