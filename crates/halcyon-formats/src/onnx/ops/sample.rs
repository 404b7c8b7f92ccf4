//! Interpolation at positions that are run-time data: GridSample and AffineGrid, and the sampler shared with
//! DeformConv and RoiAlign. A tap is an element of the operand that contributes to a sample.
//!
//! The operand is reshaped to a matrix with one row per position and one column per channel, so that one
//! gather of rows reads a tap of all samples.

use super::calc::{along, bin, clamp, floats, index_type, known, nth, select, trailing, with, within};
use super::{Row, one, row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::node::Call;
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};

pub(super) const ROWS: &[Row] = &[
    row("AffineGrid", 20, &["align_corners"], affine_grid),
    row("GridSample", 16, &["align_corners", "mode", "padding_mode"], grid_sample),
];

/// Limit on the elements of a coordinate vector that is computed during import.
const MAX_COORDINATES: usize = 1 << 24;
/// Limit on the taps of one sample, over all axes.
const MAX_TAPS: usize = 4096;

/// One tap of every sample, along one axis.
#[derive(Clone, Debug)]
pub(super) struct Tap {
    /// Index along the axis, always in range.
    pub at: Value,
    /// `None` means 1.
    pub weight: Option<Value>,
    /// The samples for which the tap counts; `None` means all.
    pub valid: Option<Value>,
}

/// The rows to sample, `[images * positions, channels]`, and where the image of each sample starts.
#[derive(Debug)]
pub(super) struct Rows {
    pub rows: Value,
    pub first: Value,
    /// Sizes of the spatial axes of an image.
    pub sizes: Vec<usize>,
    pub index: DType,
}

impl Rows {
    /// Makes the rows of `x`, which is `[images…, channels, sizes…]`. The leading axes are merged. `first` is
    /// the row at which each image starts, `image * positions`; the caller reshapes it to broadcast.
    pub(super) fn new(b: &mut Builder, x: &Value, sizes: &[usize]) -> Result<Rows> {
        let lead = x.rank() - sizes.len() - 1;
        let numel = |d: &[Dim]| Shape::from(d).numel();
        let (images, channels) = (numel(&x.shape()[..lead]), x.shape()[lead]);
        let places = numel(&x.shape()[lead + 1..]);
        let y = b.reshape(x, [images, channels, places])?;
        let y = b.permute(&y, &[0, 2, 1])?;
        let total = images.mul(places);
        let rows = b.reshape(&y, [total, channels])?;
        let index = index_type(total);
        let image = b.iota(index, images)?;
        let first = with(b, S::Mul, &image, places.known().map_or(0, |n| n as i64))?;
        Ok(Rows { rows, first, sizes: sizes.to_vec(), index })
    }

    /// Returns one weighted value `[samples…, channels]` for each combination of one tap per axis.
    pub(super) fn terms(&self, b: &mut Builder, c: &Call<'_>, taps: &[Vec<Tap>]) -> Result<Vec<Value>> {
        let count = taps.iter().try_fold(1usize, |n, t| n.checked_mul(t.len()));
        let count = count.filter(|n| *n <= MAX_TAPS).ok_or_else(|| {
            c.unsupported(&format!("interpolation over {} axes", taps.len()), "Use fewer spatial axes")
        })?;
        let mut strides = vec![1usize; self.sizes.len()];
        for k in (1..strides.len()).rev() {
            strides[k - 1] = strides[k] * self.sizes[k];
        }
        let mut terms = Vec::with_capacity(count);
        for i in 0..count {
            let mut rest = i;
            let (mut at, mut weight, mut valid) = (self.first.clone(), None, None);
            for (k, axis) in taps.iter().enumerate().rev() {
                let tap = &axis[rest % axis.len()];
                rest /= axis.len();
                let place = b.cast(&tap.at, self.index)?;
                let place = with(b, S::Mul, &place, strides[k] as i64)?;
                at = bin(b, S::Add, &at, &place)?;
                weight = join(b, S::Mul, weight, &tap.weight)?;
                valid = join(b, S::And, valid, &tap.valid)?;
            }
            let mut v = b.gather(&self.rows, &at, 0)?;
            if let Some(w) = weight {
                let w = trailing(b, &w, 1)?;
                v = bin(b, S::Mul, &v, &w)?;
            }
            if let Some(m) = valid {
                let (m, zero) = (trailing(b, &m, 1)?, b.lit(&v, Scalar::I(0)));
                v = select(b, &m, &v, &zero)?;
            }
            terms.push(v);
        }
        Ok(terms)
    }
}

fn join(b: &mut Builder, op: S, a: Option<Value>, x: &Option<Value>) -> Result<Option<Value>> {
    match (a, x) {
        (Some(a), Some(x)) => bin(b, op, &a, x).map(Some),
        (a, x) => Ok(a.or_else(|| x.clone())),
    }
}

/// The sum of values of the same shape.
pub(super) fn sum(b: &mut Builder, c: &Call<'_>, v: Vec<Value>) -> Result<Value> {
    let mut it = v.into_iter();
    let first = it.next().ok_or_else(|| c.invalid("the operand has no spatial axes to interpolate along"))?;
    it.try_fold(first, |s, v| bin(b, S::Add, &s, &v))
}

/// The two taps around `x`. A tap that lies outside of an axis of `n` elements counts as zero.
pub(super) fn linear_or_zero(b: &mut Builder, x: &Value, n: usize) -> Result<Vec<Tap>> {
    let low = b.scalar(S::Floor, &[x])?;
    let high = with(b, S::Add, &low, 1.0)?;
    let (w_high, w_low) = (bin(b, S::Sub, x, &low)?, bin(b, S::Sub, &high, x)?);
    [(low, w_low), (high, w_high)]
        .into_iter()
        .map(|(at, w)| {
            let last = n.saturating_sub(1) as f64;
            let valid = within(b, &at, 0.0, last)?;
            Ok(Tap { at: clamp(b, &at, 0.0, last)?, weight: Some(w), valid: Some(valid) })
        })
        .collect()
}

#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Nearest,
    Linear,
    Cubic,
}

#[derive(Clone, Copy, PartialEq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

/// The axis along which samples lie.
#[derive(Clone, Copy)]
struct Line {
    n: usize,
    /// The borders of the axis, in units of elements.
    lo: f64,
    hi: f64,
    padding: Padding,
}

impl Line {
    /// Reflects positions at the borders until they are inside. Positions inside are unchanged.
    fn reflect(self, b: &mut Builder, x: &Value) -> Result<Value> {
        let len = self.hi - self.lo;
        if len <= 0.0 {
            return with(b, S::Mul, x, 0.0);
        }
        let far = with(b, S::Sub, x, self.lo)?;
        let far = b.scalar(S::Abs, &[&far])?;
        let part = with(b, S::Mod, &far, 2.0 * len)?;
        let back = with(b, S::Mul, &part, -1.0)?;
        let back = with(b, S::Add, &back, 2.0 * len)?;
        let part = bin(b, S::Min, &part, &back)?;
        let y = with(b, S::Add, &part, self.lo)?;
        self.inside(b, x, &y)
    }

    /// `x` if it is between the borders, else `y`.
    fn inside(self, b: &mut Builder, x: &Value, y: &Value) -> Result<Value> {
        let inside = within(b, x, self.lo, self.hi)?;
        select(b, &inside, x, y)
    }

    fn last(self) -> f64 {
        self.n.saturating_sub(1) as f64
    }

    /// Moves a sample outside the borders as the padding mode specifies.
    fn place(self, b: &mut Builder, x: &Value) -> Result<Value> {
        match self.padding {
            Padding::Zeros => Ok(x.clone()),
            Padding::Border => {
                let y = clamp(b, x, 0.0, self.last())?;
                self.inside(b, x, &y)
            }
            Padding::Reflection => self.reflect(b, x),
        }
    }

    /// The tap at an integer position, moved as the padding mode specifies.
    fn tap(self, b: &mut Builder, at: &Value, weight: Option<Value>) -> Result<Tap> {
        let valid = match self.padding {
            Padding::Zeros => Some(within(b, at, 0.0, self.last())?),
            _ => None,
        };
        let at = if self.padding == Padding::Reflection { self.reflect(b, at)? } else { at.clone() };
        let at = clamp(b, &at, 0.0, self.last())?;
        Ok(Tap { at: b.cast(&at, DType::I32)?, weight, valid })
    }

    fn taps(self, b: &mut Builder, x: &Value, mode: Mode, to: DType) -> Result<Vec<Tap>> {
        if mode == Mode::Nearest {
            let x = b.scalar(S::Round, &[x])?;
            let x = self.place(b, &x)?;
            return Ok(vec![self.tap(b, &x, None)?]);
        }
        // Taps of the cubic kernel may lie beyond the border. With border padding, each tap is clamped to the
        // border, and the position is not.
        let stays = mode == Mode::Cubic && self.padding == Padding::Border;
        let x = if stays { x.clone() } else { self.place(b, x)? };
        let base = b.scalar(S::Floor, &[&x])?;
        let part = bin(b, S::Sub, &x, &base)?;
        let steps = if mode == Mode::Linear { 0..=1 } else { -1..=2 };
        steps
            .map(|step: i64| {
                let at = with(b, S::Add, &base, step as f64)?;
                let far = with(b, S::Sub, &part, step as f64)?;
                let far = b.scalar(S::Abs, &[&far])?;
                let w = match mode {
                    Mode::Cubic => cubic(b, &far, matches!(step, 0 | 1))?,
                    _ => {
                        let w = with(b, S::Mul, &far, -1.0)?;
                        with(b, S::Add, &w, 1.0)?
                    }
                };
                let w = b.cast(&w, to)?;
                self.tap(b, &at, Some(w))
            })
            .collect()
    }
}

/// Keys' cubic kernel (1981), equation 4, with a = -0.75, for distances up to 1 (`near`), else from 1 to 2.
fn cubic(b: &mut Builder, x: &Value, near: bool) -> Result<Value> {
    const A: f64 = -0.75;
    let terms = if near { [A + 2.0, -(A + 3.0), 0.0, 1.0] } else { [A, -5.0 * A, 8.0 * A, -4.0 * A] };
    let mut y = with(b, S::Mul, x, terms[0])?;
    for (i, t) in terms[1..].iter().enumerate() {
        y = with(b, S::Add, &y, *t)?;
        if i < 2 {
            y = bin(b, S::Mul, &y, x)?;
        }
    }
    Ok(y)
}

/// `y[n, c, p…] = x[n, c, grid[n, p…]]`. The grid's last axis holds coordinates from the innermost axis
/// outwards; -1 and 1 are the operand's borders.
fn grid_sample(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let (x, grid) = (c.arg(0)?, c.arg(1)?);
    let r = x.rank().saturating_sub(2);
    if r == 0 || grid.rank() != r + 2 || !grid.shape()[r + 1].is(r) || grid.shape()[0] != x.shape()[0] {
        return Err(c.invalid(format!(
            "input {} and grid {}: expected [n, c, d1 … dr] and [n, o1 … or, r]",
            x.ty, grid.ty
        )));
    }
    let name = |attr: &str, v: &str| c.invalid(format!("{attr} '{v}' is not known"));
    let mode = match c.string("mode", "linear")? {
        "nearest" => Mode::Nearest,
        "linear" | "bilinear" => Mode::Linear,
        "cubic" | "bicubic" => Mode::Cubic,
        m => return Err(name("mode", m)),
    };
    let padding = match c.string("padding_mode", "zeros")? {
        "zeros" => Padding::Zeros,
        "border" => Padding::Border,
        "reflection" => Padding::Reflection,
        m => return Err(name("padding_mode", m)),
    };
    let align = c.flag("align_corners", false)?;
    let sizes = known(&x.shape()[2..])?;
    if sizes.contains(&0) {
        return Err(c.invalid(format!("the input {} has no elements to sample", x.ty)));
    }
    let to = x.dtype();
    // Integers are interpolated as floats. Those of 32 and 64 bits use f64, which holds 32 bits exactly.
    let compute = match (mode, to.is_float()) {
        (Mode::Nearest, _) => to,
        (_, true) => to.compute(),
        _ if to == DType::Bool => return Err(c.invalid("bool cannot be interpolated")),
        _ if to.bits() >= 32 => DType::F64,
        _ => DType::F32,
    };
    let x = b.cast(x, compute)?;
    let grid = b.cast(grid, grid.dtype().compute())?;
    let samples = Shape::from(&grid.shape()[1..=r]);
    let flat = b.reshape(&grid, [grid.shape()[0], samples.numel(), Dim::from(r)])?;
    let mut rows = Rows::new(b, &x, &sizes)?;
    rows.first = trailing(b, &rows.first, 1)?;
    let mut taps = Vec::with_capacity(r);
    for (k, &n) in sizes.iter().enumerate() {
        let g = nth(b, &flat, 2, r - 1 - k)?;
        let g = with(b, S::Add, &g, 1.0)?;
        let (at, lo, hi) = if align {
            let half = with(b, S::Div, &g, 2.0)?;
            (with(b, S::Mul, &half, n as f64 - 1.0)?, 0.0, n as f64 - 1.0)
        } else {
            let all = with(b, S::Mul, &g, n as f64)?;
            let all = with(b, S::Sub, &all, 1.0)?;
            (with(b, S::Div, &all, 2.0)?, -0.5, n as f64 - 0.5)
        };
        taps.push(Line { n, lo, hi, padding }.taps(b, &at, mode, compute)?);
    }
    let terms = rows.terms(b, c, &taps)?;
    let y = sum(b, c, terms)?;
    let y = b.permute(&y, &[0, 2, 1])?;
    let shape: Shape = x.shape()[..2].iter().chain(samples.iter()).copied().collect();
    let y = b.reshape(&y, shape)?;
    one(b.cast(&y, to)?)
}

/// `grid[n, p…] = theta[n] * (x, y, 1)`, or `theta[n] * (x, y, z, 1)`, for the positions p of a grid from -1
/// to 1.
fn affine_grid(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Value>> {
    let theta = c.arg(0)?;
    let size = super::shape::shape_of(b, c, c.arg(1)?, "the size of AffineGrid")?;
    let r = size.rank().saturating_sub(2);
    let fits = theta.rank() == 3 && theta.shape()[1].is(r) && theta.shape()[2].is(r + 1);
    if !(2..=3).contains(&r) || !fits || theta.shape()[0] != size[0] {
        return Err(c.invalid(format!(
            "theta {} does not fit size {size}; expected [n, r, r + 1] and [n, c, d1 … dr] with r = 2 or 3",
            theta.ty
        )));
    }
    let align = c.flag("align_corners", false)?;
    let to = theta.dtype();
    let theta = b.cast(theta, to.compute())?;
    let dims = known(&size[2..])?;
    // Column `j` of theta, in a shape that broadcasts over [n, sizes…, r].
    let column = |b: &mut Builder, j: usize| -> Result<Value> {
        let v = nth(b, &theta, 2, j)?;
        let mut s = vec![Dim::from(1); r + 2];
        (s[0], s[r + 1]) = (size[0], Dim::from(r));
        b.reshape(&v, s)
    };
    let mut y = column(b, r)?;
    for (k, &n) in dims.iter().enumerate().rev() {
        if n > MAX_COORDINATES {
            return Err(
                c.unsupported(&format!("a grid of {n} positions along one axis"), "Use a smaller grid")
            );
        }
        let (start, step) = match (align, n) {
            (true, 1) => (-1.0, 0.0),
            (true, n) => (-1.0, 2.0 / (n as f64 - 1.0)),
            (false, n) => (-1.0 + 1.0 / n as f64, 2.0 / n as f64),
        };
        let at: Vec<f64> = (0..n).map(|i| start + i as f64 * step).collect();
        let at = floats(theta.dtype(), &[n], &at)?;
        let at = along(b, &at, k + 1, r + 2)?;
        // Columns are ordered from the innermost axis outwards.
        let m = column(b, r - 1 - k)?;
        let part = bin(b, S::Mul, &m, &at)?;
        y = bin(b, S::Add, &y, &part)?;
    }
    let shape: Shape =
        std::iter::once(size[0]).chain(dims.iter().map(|&n| Dim::from(n))).chain([Dim::from(r)]).collect();
    let y = b.expand(&y, &shape)?;
    one(b.cast(&y, to)?)
}
