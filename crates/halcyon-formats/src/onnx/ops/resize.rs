//! Interpolation at positions that are known during import.
//!
//! Each axis is resized separately: a result is a weighted sum of taps, which are elements of the operand.
//! Their indices and weights are computed during import, in f64. The taps become gathers (or views if their
//! indices are regular), and the weights become constants.

use super::calc::{along, bin, floats, indices};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Range, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row(
        "Resize",
        10,
        &[
            "antialias",
            "axes",
            "coordinate_transformation_mode",
            "cubic_coeff_a",
            "exclude_outside",
            "extrapolation_value",
            "keep_aspect_ratio_policy",
            "mode",
            "nearest_mode",
        ],
        resize,
    ),
    row("Upsample", 7, &["mode", "scales"], upsample),
];

/// Limit on the taps of one axis over all results, because they are listed during import.
const MAX_TAPS: usize = 1 << 25;
/// With at most this many taps per result, the taps are gathered separately and added in one kernel.
const MAX_SEPARATE_TAPS: usize = 4;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    Nearest,
    Linear,
    Cubic,
}

/// How the position of a result maps to a position in the operand.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Coords {
    HalfPixel,
    HalfPixelSymmetric,
    PytorchHalfPixel,
    AlignCorners,
    Asymmetric,
    TfHalfPixelForNn,
    TfCropAndResize,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Nearest {
    PreferFloor,
    PreferCeil,
    Floor,
    Ceil,
    /// The rule of opset versions before 11: positions are rounded down if the axis grows, and up if it
    /// shrinks.
    Simple,
}

#[derive(Debug)]
struct Rules {
    kind: Kind,
    coords: Coords,
    nearest: Nearest,
    /// Coefficient of the cubic kernel.
    a: f64,
    antialias: bool,
    exclude_outside: bool,
    extrapolation: f64,
}

/// An axis to resize.
#[derive(Debug)]
struct Axis {
    axis: usize,
    n: usize,
    out: usize,
    scale: f64,
    roi: (f64, f64),
}

/// `k` taps for each of `out` results.
#[derive(Debug, PartialEq)]
struct Taps {
    k: usize,
    /// `[k][out]`.
    index: Vec<i32>,
    /// `[k][out]`.
    weight: Vec<f64>,
    /// Results that are set to the extrapolation value; empty if there are none.
    outside: Vec<bool>,
}

impl Rules {
    /// Position of result `i` in the operand. Sizes are at least 1.
    fn source(&self, x: &Axis, i: usize) -> f64 {
        let (n, out, i) = (x.n as f64, x.out as f64, i as f64);
        let half = (i + 0.5) / x.scale - 0.5;
        match self.coords {
            Coords::HalfPixel => half,
            Coords::HalfPixelSymmetric => n / 2.0 * (1.0 - out / (x.scale * n)) + (i + 0.5) / x.scale - 0.5,
            Coords::PytorchHalfPixel if x.out == 1 => 0.0,
            Coords::PytorchHalfPixel => half,
            Coords::AlignCorners if x.out == 1 => 0.0,
            // `scale * n` is the resized length. It is not rounded if the model gives the scale.
            Coords::AlignCorners => i * (n - 1.0) / (x.scale * n - 1.0),
            Coords::Asymmetric => i / x.scale,
            Coords::TfHalfPixelForNn => (i + 0.5) / x.scale,
            Coords::TfCropAndResize if x.out == 1 => 0.5 * (x.roi.0 + x.roi.1) * (n - 1.0),
            Coords::TfCropAndResize => {
                x.roi.0 * (n - 1.0) + i * (x.roi.1 - x.roi.0) * (n - 1.0) / (out - 1.0)
            }
        }
    }

    /// Keys' cubic kernel (1981), equation 4.
    fn cubic(&self, x: f64) -> f64 {
        let (a, x) = (self.a, x.abs());
        if x <= 1.0 {
            ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
        } else if x < 2.0 {
            ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a
        } else {
            0.0
        }
    }

    /// Half the number of taps of a linear or cubic kernel; 1 for nearest, which has one tap.
    fn reach(&self, x: &Axis) -> f64 {
        let shrink = if self.antialias { x.scale.min(1.0) } else { 1.0 };
        match self.kind {
            Kind::Nearest => 1.0,
            Kind::Linear => -(-1.0 / shrink).floor(),
            Kind::Cubic => -(-2.0 / shrink).floor(),
        }
    }

    /// The taps of all results. `None` if there are too many.
    fn taps(&self, x: &Axis) -> Option<Taps> {
        let half = Some(self.reach(x)).filter(|h| *h <= MAX_TAPS as f64)? as i64;
        let shrink = if self.antialias { x.scale.min(1.0) } else { 1.0 };
        let k = if self.kind == Kind::Nearest { 1 } else { 2 * half as usize };
        let total = k.checked_mul(x.out).filter(|n| *n <= MAX_TAPS)?;
        let last = i64::from(i32::try_from(x.n).ok()?) - 1;
        let mut t = Taps { k, index: vec![0; total], weight: vec![1.0; total], outside: vec![] };
        for i in 0..x.out {
            let at = self.source(x, i);
            if self.coords == Coords::TfCropAndResize && !(0.0..=last as f64).contains(&at) {
                t.outside.resize(x.out, false);
                t.outside[i] = true;
                continue;
            }
            if self.kind == Kind::Nearest {
                let (down, part) = (at.floor(), at - at.floor());
                let up = match self.nearest {
                    Nearest::PreferFloor => part > 0.5,
                    Nearest::PreferCeil => part >= 0.5,
                    Nearest::Ceil => part > 0.0,
                    Nearest::Simple => x.scale < 1.0 && part > 0.0,
                    Nearest::Floor => false,
                };
                t.index[i] = (down as i64).saturating_add(up.into()).clamp(0, last) as i32;
                continue;
            }
            let base = at.floor();
            let part = at - base;
            let mut sum = 0.0;
            for j in 0..k {
                let step = j as i64 + 1 - half;
                let place = (base as i64).saturating_add(step);
                let far = (step as f64 - part) * shrink;
                let mut w = match self.kind {
                    Kind::Cubic => self.cubic(far),
                    _ => (1.0 - far.abs()).max(0.0),
                };
                if self.exclude_outside && !(0..=last).contains(&place) {
                    w = 0.0;
                }
                sum += w;
                t.index[j * x.out + i] = place.clamp(0, last) as i32;
                t.weight[j * x.out + i] = w;
            }
            if (self.exclude_outside || self.antialias) && sum != 0.0 {
                (0..k).for_each(|j| t.weight[j * x.out + i] /= sum);
            }
        }
        t.prune(x.out);
        Some(t)
    }
}

impl Taps {
    /// Removes taps whose weight is zero for all results.
    fn prune(&mut self, out: usize) {
        let used: Vec<usize> =
            (0..self.k).filter(|j| self.weight[j * out..(j + 1) * out].iter().any(|w| *w != 0.0)).collect();
        if used.len() == self.k || used.is_empty() {
            return;
        }
        for (to, &from) in used.iter().enumerate() {
            self.index.copy_within(from * out..(from + 1) * out, to * out);
            self.weight.copy_within(from * out..(from + 1) * out, to * out);
        }
        self.k = used.len();
        self.index.truncate(self.k * out);
        self.weight.truncate(self.k * out);
    }
}

/// The elements at `index` along an axis of `n`; a view if the indices are regular.
fn pick(b: &mut Builder, x: &Value, axis: usize, n: usize, index: &[i32]) -> Result<Value> {
    let len = index.len();
    let is = |f: &dyn Fn(usize) -> usize| index.iter().enumerate().all(|(i, &v)| v as usize == f(i));
    let step = match index {
        [a, b, ..] => i64::from(*b) - i64::from(*a),
        _ => 1,
    };
    if len == n && is(&|i| i) {
        return Ok(x.clone());
    }
    if len > n && n > 0 && len.is_multiple_of(n) && is(&|i| i / (len / n)) {
        return repeat(b, x, axis, len / n);
    }
    if step > 0 && len > 0 && is(&|i| index[0] as usize + i * step as usize) {
        let mut r: Vec<Range> =
            x.shape().iter().map(|&len| Range { start: Dim::from(0), step: 1, len }).collect();
        r[axis] = Range { start: Dim::from(index[0] as usize), step, len: Dim::from(len) };
        return b.slice(x, &r);
    }
    let at = indices(&[len], index)?;
    b.gather(x, &at, axis)
}

/// Repeats each element `times` times along an axis.
fn repeat(b: &mut Builder, x: &Value, axis: usize, times: usize) -> Result<Value> {
    let s = x.shape().to_vec();
    let shape = |t: &[Dim]| -> Shape { s[..axis].iter().chain(t).chain(&s[axis + 1..]).copied().collect() };
    let y = b.reshape(x, shape(&[s[axis], Dim::from(1)]))?;
    let y = b.expand(&y, &shape(&[s[axis], Dim::from(times)]))?;
    b.reshape(&y, shape(&[s[axis].mul(Dim::from(times))]))
}

/// Resizes one axis. If the result is a weighted sum, `x` must already be cast to the dtype of the sum.
fn apply(b: &mut Builder, c: &Call<'_>, x: &Value, r: &Rules, a: &Axis, t: &Taps) -> Result<Value> {
    let (rank, axis, out) = (x.rank(), a.axis, a.out);
    let mut y = if t.k == 1 && t.weight.iter().all(|w| *w == 1.0) {
        pick(b, x, axis, a.n, &t.index)?
    } else if t.k <= MAX_SEPARATE_TAPS {
        let mut sum: Option<Value> = None;
        for j in 0..t.k {
            let part = pick(b, x, axis, a.n, &t.index[j * out..(j + 1) * out])?;
            let w = floats(x.dtype(), &[out], &t.weight[j * out..(j + 1) * out])?;
            let w = along(b, &w, axis, rank)?;
            let part = bin(b, S::Mul, &part, &w)?;
            sum = Some(match sum {
                Some(s) => bin(b, S::Add, &s, &part)?,
                None => part,
            });
        }
        sum.ok_or_else(|| c.invalid("no taps"))?
    } else {
        // Gathers all taps into a new axis after the resized one.
        let turned = |j: usize| (j % t.k) * out + j / t.k;
        let index: Vec<i32> = (0..t.index.len()).map(|j| t.index[turned(j)]).collect();
        let weight: Vec<f64> = (0..t.index.len()).map(|j| t.weight[turned(j)]).collect();
        let at = indices(&[out, t.k], &index)?;
        let parts = b.gather(x, &at, axis)?;
        let mut s = vec![Dim::from(1); rank + 1];
        (s[axis], s[axis + 1]) = (Dim::from(out), Dim::from(t.k));
        let w = floats(x.dtype(), &[out, t.k], &weight)?;
        let w = b.reshape(&w, s)?;
        let parts = bin(b, S::Mul, &parts, &w)?;
        b.reduce(ReduceKind::Sum, &parts, &[axis + 1], false)?
    };
    if !t.outside.is_empty() {
        let mask: Vec<i32> = t.outside.iter().map(|&o| o.into()).collect();
        let mask = indices(&[out], &mask)?;
        let mask = b.cast(&mask, DType::Bool)?;
        let mask = along(b, &mask, axis, rank)?;
        let v = b.lit(&y, Scalar::F(r.extrapolation));
        y = b.scalar(S::Select, &[&mask, &v, &y])?;
    }
    Ok(y)
}

/// The known floats of an operand, or `None` if it is missing or empty.
fn known_floats(b: &mut Builder, v: Option<&Value>, what: &str) -> Result<Option<Vec<f64>>> {
    match v {
        Some(v) if !v.shape().numel().is(0) => {
            let v = b.cast(v, DType::F64)?;
            let h = b.known(&v, what)?;
            let one = |n: &crate::onnx::host::Num| {
                n.known().map(|s| s.as_f64()).ok_or_else(|| {
                    halcyon_ir::Error::unsupported(
                        format!("{what} that depend on a symbolic size"),
                        "Give concrete input shapes",
                    )
                })
            };
            h.vals.iter().map(one).collect::<Result<_>>().map(Some)
        }
        _ => Ok(None),
    }
}

fn rules(c: &Call<'_>) -> Result<Rules> {
    let name = |attr: &str, v: &str| c.invalid(format!("{attr} '{v}' is not known"));
    let old = c.opset < 11 || c.node.op_type == "Upsample";
    let kind = match c.string("mode", "nearest")? {
        "nearest" => Kind::Nearest,
        "linear" => Kind::Linear,
        "cubic" if !old => Kind::Cubic,
        m => return Err(name("mode", m)),
    };
    let coords = match c.string("coordinate_transformation_mode", "half_pixel")? {
        _ if old => Coords::Asymmetric,
        "half_pixel" => Coords::HalfPixel,
        "half_pixel_symmetric" => Coords::HalfPixelSymmetric,
        "pytorch_half_pixel" => Coords::PytorchHalfPixel,
        "align_corners" => Coords::AlignCorners,
        "asymmetric" => Coords::Asymmetric,
        "tf_half_pixel_for_nn" => Coords::TfHalfPixelForNn,
        "tf_crop_and_resize" => Coords::TfCropAndResize,
        m => return Err(name("coordinate_transformation_mode", m)),
    };
    let nearest = match c.string("nearest_mode", "round_prefer_floor")? {
        _ if old => Nearest::Simple,
        "round_prefer_floor" => Nearest::PreferFloor,
        "round_prefer_ceil" => Nearest::PreferCeil,
        "floor" => Nearest::Floor,
        "ceil" => Nearest::Ceil,
        m => return Err(name("nearest_mode", m)),
    };
    Ok(Rules {
        kind,
        coords,
        nearest,
        a: c.float("cubic_coeff_a", -0.75)?.into(),
        antialias: c.flag("antialias", false)? && kind != Kind::Nearest,
        exclude_outside: c.flag("exclude_outside", false)? && kind != Kind::Nearest,
        extrapolation: c.float("extrapolation_value", 0.0)?.into(),
    })
}

fn resize(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let r = rules(c)?;
    let axes = match c.ints("axes")? {
        Some(a) if c.opset >= 18 => c.axes(a, x.rank())?,
        _ => (0..x.rank()).collect(),
    };
    let (roi, scales, sizes) = if c.opset < 11 {
        (None, known_floats(b, c.opt(1), "the scales of Resize")?, None)
    } else {
        let crop = r.coords == Coords::TfCropAndResize;
        (
            if crop { known_floats(b, c.opt(1), "the region of Resize")? } else { None },
            known_floats(b, c.opt(2), "the scales of Resize")?,
            known_floats(b, c.opt(3), "the sizes of Resize")?,
        )
    };
    let roi = match roi {
        Some(v) if v.len() == 2 * axes.len() => v,
        None if r.coords != Coords::TfCropAndResize => {
            [vec![0.0; axes.len()], vec![1.0; axes.len()]].concat()
        }
        _ => {
            return Err(c.invalid(format!("the region must have two values for each of {} axes", axes.len())));
        }
    };
    match (scales, sizes) {
        (Some(_), Some(_)) => Err(c.invalid("both scales and sizes are given")),
        (None, None) if axes.is_empty() => one(x.clone()),
        (None, None) => Err(c.invalid("neither scales nor sizes are given")),
        (Some(s), None) => by_scale(b, c, &r, &axes, &s, &roi),
        (None, Some(s)) => by_size(b, c, &r, &axes, &s, &roi),
    }
}

/// The scales are an attribute in opset version 7, and an operand from version 9 on.
fn upsample(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    let scales = if c.opset < 9 {
        c.floats("scales")?.map(|v| v.iter().map(|&v| v.into()).collect())
    } else {
        known_floats(b, Some(c.arg(1)?), "the scales of Upsample")?
    };
    let scales: Vec<f64> = scales.unwrap_or_default();
    let axes: Vec<usize> = (0..x.rank()).collect();
    let roi = [vec![0.0; axes.len()], vec![1.0; axes.len()]].concat();
    by_scale(b, c, &rules(c)?, &axes, &scales, &roi)
}

fn by_scale(
    b: &mut Builder,
    c: &Call<'_>,
    r: &Rules,
    axes: &[usize],
    scales: &[f64],
    roi: &[f64],
) -> Result<Vec<Value>> {
    if scales.len() != axes.len() || !scales.iter().all(|s| s.is_finite() && *s > 0.0) {
        return Err(c.invalid(format!(
            "scales {scales:?}: expected a positive number for each of {} axes",
            axes.len()
        )));
    }
    let crop = r.coords == Coords::TfCropAndResize;
    let mut x = c.arg(0)?.clone();
    let mut work = vec![];
    for (i, &axis) in axes.iter().enumerate() {
        let (scale, roi) = (scales[i], (roi[i], roi[axes.len() + i]));
        let d = x.shape()[axis];
        if scale == 1.0 && unchanged(r, roi) {
            continue;
        }
        let Some(n) = d.known() else {
            // Repeating elements works for symbolic sizes too.
            let whole = scale.fract() == 0.0 && scale <= i32::MAX.into() && r.kind == Kind::Nearest;
            if !whole || !repeats(r) {
                return Err(c.unsupported(
                    &format!("resizing the symbolic size {d} in this mode"),
                    "Give concrete input shapes",
                ));
            }
            x = repeat(b, &x, axis, scale as usize)?;
            continue;
        };
        // Computed in f32, as the operator's shape rule specifies.
        let region = if crop { (roi.1 - roi.0) as f32 } else { 1.0 };
        let out = (n as f32 * region * scale as f32).floor();
        work.push(Axis { axis, n, out: size(c, out.into())?, scale, roi });
    }
    run(b, c, r, x, work)
}

fn by_size(
    b: &mut Builder,
    c: &Call<'_>,
    r: &Rules,
    axes: &[usize],
    sizes: &[f64],
    roi: &[f64],
) -> Result<Vec<Value>> {
    let x = c.arg(0)?;
    if sizes.len() != axes.len() {
        return Err(c.invalid(format!("{} sizes for {} axes", sizes.len(), axes.len())));
    }
    let policy = c.string("keep_aspect_ratio_policy", "stretch")?;
    let mut work = vec![];
    for (i, &axis) in axes.iter().enumerate() {
        let d = x.shape()[axis];
        let n = d.known().ok_or_else(|| {
            c.unsupported(
                &format!("resizing the symbolic size {d} to a given size"),
                "Give concrete input shapes",
            )
        })?;
        let out = size(c, sizes[i])?;
        if n == 0 && out > 0 {
            return Err(c.invalid(format!("an axis without elements cannot be resized to {out}")));
        }
        let scale = if n == 0 { 1.0 } else { out as f64 / n as f64 };
        work.push(Axis { axis, n, out, scale, roi: (roi[i], roi[axes.len() + i]) });
    }
    let pick: fn(f64, f64) -> f64 = match policy {
        "stretch" => |_, s| s,
        "not_larger" => f64::min,
        "not_smaller" => f64::max,
        p => return Err(c.invalid(format!("keep_aspect_ratio_policy '{p}' is not known"))),
    };
    if policy != "stretch"
        && let Some(scale) = work.iter().map(|a| a.scale).reduce(pick)
    {
        for a in &mut work {
            (a.scale, a.out) = (scale, size(c, (scale * a.n as f64 + 0.5).floor())?);
        }
    }
    work.retain(|a| !(a.n == a.out && a.scale == 1.0 && unchanged(r, a.roi)));
    run(b, c, r, x.clone(), work)
}

/// Whether an axis that keeps its size also keeps its elements.
fn unchanged(r: &Rules, roi: (f64, f64)) -> bool {
    r.coords != Coords::TfCropAndResize || roi == (0.0, 1.0)
}

/// Whether an integer scale in nearest mode repeats each element that many times.
fn repeats(r: &Rules) -> bool {
    let half = matches!(r.coords, Coords::HalfPixel | Coords::HalfPixelSymmetric | Coords::PytorchHalfPixel);
    match r.nearest {
        Nearest::Floor | Nearest::Simple => r.coords == Coords::Asymmetric,
        Nearest::PreferFloor | Nearest::PreferCeil => half,
        Nearest::Ceil => false,
    }
}

fn size(c: &Call<'_>, v: f64) -> Result<usize> {
    let fits = (0.0..=f64::from(i32::MAX)).contains(&v);
    if fits { Ok(v as usize) } else { Err(c.invalid(format!("{v} is not a size"))) }
}

fn run(b: &mut Builder, c: &Call<'_>, r: &Rules, x: Value, mut work: Vec<Axis>) -> Result<Vec<Value>> {
    let to = x.dtype();
    if let Some(a) = work.iter().find(|a| a.n == 0 && a.out > 0) {
        return Err(c.invalid(format!("an axis without elements cannot be resized to {}", a.out)));
    }
    if work.iter().any(|a| a.out == 0) {
        let mut s = x.shape().clone();
        work.iter().for_each(|a| s.0[a.axis] = Dim::from(a.out));
        return one(b.full(to, &s, Scalar::I(0)));
    }
    if to == DType::Bool && r.kind != Kind::Nearest {
        return Err(c.invalid("bool cannot be interpolated"));
    }
    // f64 represents integers of 32 bits exactly; those of 64 bits are rounded.
    let wide = !to.is_float() && to.bits() >= 32;
    let compute = if to.is_float() { to.compute() } else { [DType::F32, DType::F64][usize::from(wide)] };
    // Resize shrinking axes first, which reduces the work on the other axes.
    work.sort_by(|a, b| a.scale.total_cmp(&b.scale));
    let mut y = x;
    for a in &work {
        let t = r.taps(a).ok_or_else(|| {
            c.unsupported(&format!("an axis of {} resized to {}", a.n, a.out), "Resize to a smaller size")
        })?;
        if y.dtype() != compute && (t.k > 1 || t.weight.iter().any(|w| *w != 1.0)) {
            y = b.cast(&y, compute)?;
        }
        y = apply(b, c, &y, r, a, &t)?;
    }
    if y.dtype() != to && !to.is_float() {
        y = b.scalar(S::Round, &[&y])?;
    }
    one(b.cast(&y, to)?)
}
