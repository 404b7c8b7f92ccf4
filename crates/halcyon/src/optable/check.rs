//! Runs cases and judges their results.

use super::case::{Case, Tol, extremes};
use super::rng::Rng;
use crate::ir::Graph;
use crate::ir::reference;
use crate::{Backend, ConstData, DType, Result, Scalar, Session};
use serde::{Deserialize, Serialize};

/// Distance from 1 to the next larger number of the dtype.
pub fn eps(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F32 => 2f64.powi(-23),
        _ => 2f64.powi(-52),
    }
}

/// The expected result, and how much each element may differ from it.
#[derive(Clone, Debug)]
pub struct Expected {
    value: ConstData,
    /// Absolute tolerance per element.
    slack: Vec<f64>,
    /// Additional tolerance on a device that may round the product of `a * b + c` separately.
    unfused: Option<Vec<f64>>,
    exact: bool,
    /// Whether 0 and -0 count as different.
    zeros: bool,
}

/// The largest differences of a result from the expected one, over all elements. Elements that are both NaN,
/// or both the same infinity, count as equal; if only one is NaN or infinite, all figures are infinite,
/// unless rounding at the end of the dtype's range explains the difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored")]
pub struct Errors {
    /// Absolute difference.
    pub abs: f64,
    /// Difference relative to the expected magnitude. Elements whose expected magnitude is below the smallest
    /// normal number do not count.
    pub rel: f64,
    /// Difference in units in the last place of the expected value; for integers, the difference.
    pub ulp: f64,
    /// Difference relative to the tolerance: above 1 is wrong.
    pub of_tolerance: f64,
}

/// JSON has no infinity, so it is written as null.
#[derive(Deserialize)]
struct Stored {
    abs: Option<f64>,
    rel: Option<f64>,
    ulp: Option<f64>,
    of_tolerance: Option<f64>,
}

impl From<Stored> for Errors {
    fn from(s: Stored) -> Errors {
        let of = |v: Option<f64>| v.unwrap_or(f64::INFINITY);
        Errors { abs: of(s.abs), rel: of(s.rel), ulp: of(s.ulp), of_tolerance: of(s.of_tolerance) }
    }
}

impl Errors {
    /// The larger value of each figure.
    pub fn max(self, o: Errors) -> Errors {
        Errors {
            abs: self.abs.max(o.abs),
            rel: self.rel.max(o.rel),
            ulp: self.ulp.max(o.ulp),
            of_tolerance: self.of_tolerance.max(o.of_tolerance),
        }
    }

    const INFINITE: Errors =
        Errors { abs: f64::INFINITY, rel: f64::INFINITY, ulp: f64::INFINITY, of_tolerance: f64::INFINITY };

    fn of(d: DType, g: Scalar, w: Scalar, slack: f64, ok: bool) -> Errors {
        let (x, y) = (g.as_f64(), w.as_f64());
        if g == w || x == y || x.is_nan() && y.is_nan() {
            return Errors::default();
        }
        // Where the expected value rounds to infinity in the dtype, infinity is accepted.
        if !x.is_finite() || !y.is_finite() {
            return if ok { Errors::default() } else { Errors::INFINITE };
        }
        let abs = (x - y).abs();
        let least = if d.is_float() { extremes(d).1 } else { 1.0 };
        let place = if d.is_float() { eps(d) * 2f64.powf(y.abs().max(least).log2().floor()) } else { 1.0 };
        let of_tolerance = match ok {
            // The difference is accepted although it may exceed `slack`, for example if a denormal was
            // flushed to zero.
            true if slack > 0.0 => (abs / slack).min(1.0),
            true => 0.0,
            false if slack > 0.0 => abs / slack,
            false => f64::INFINITY,
        };
        Errors {
            abs,
            rel: if y.abs() >= least { abs / y.abs() } else { 0.0 },
            ulp: abs / place,
            of_tolerance,
        }
    }
}

/// Whether two values count as equal. All NaNs are equal. If `zeros` is true, 0 and -0 are different. A
/// device may flush numbers below the smallest normal number to zero in f32, f64 and bf16 (which is the upper
/// half of f32), but not in f16.
pub fn is_same(d: DType, g: Scalar, w: Scalar, zeros: bool) -> bool {
    if g == w || !d.is_float() {
        return g == w;
    }
    let (g, w) = (g.as_f64(), w.as_f64());
    let flushed = d != DType::F16 && g == 0.0 && w.abs() < extremes(d).1 && w != 0.0;
    flushed || (g.is_nan() && w.is_nan()) || (!zeros && g == w)
}

fn magnitudes(c: &ConstData) -> Result<ConstData> {
    if !c.dtype.is_float() {
        return Ok(c.clone());
    }
    ConstData::from_scalars(c.dtype, &c.dims, c.scalars().map(|s| Scalar::F(s.as_f64().abs())))
}

/// The expected result of a graph of one op, from the reference. It is computed in the op's own dtypes if the
/// tolerance is [`Tol::Exact`] or [`Tol::Equal`], or if the result is not a float; otherwise in f64.
pub fn expect(g: &Graph, inputs: &[ConstData], args: &[Scalar], tol: Tol) -> Result<Expected> {
    let out = g.dtype(g.outputs()[0].node);
    let typed = matches!(tol, Tol::Exact | Tol::Equal) || !out.is_float();
    let value = if typed { reference::eval(g, inputs, args)? } else { reference::eval_f64(g, inputs, args)? }
        .remove(0);
    if typed {
        let zeros = matches!(tol, Tol::Exact);
        return Ok(Expected { slack: vec![], unfused: None, value, exact: true, zeros });
    }
    // Half types are computed in f32 and rounded once.
    let (e, ec) = (eps(out), eps(out.compute()));
    let once = if e > ec { e } else { 0.0 };
    let tiny = extremes(out).1;
    let of_magnitudes = || -> Result<ConstData> {
        let m: Vec<ConstData> = inputs.iter().map(magnitudes).collect::<Result<_>>()?;
        Ok(reference::eval_f64(g, &m, args)?.remove(0))
    };
    let unfused = match tol {
        Tol::Fused(_) => Some(of_magnitudes()?.scalars().map(|s| ec * s.as_f64().abs()).collect()),
        _ => None,
    };
    let slack: Vec<f64> = match tol {
        Tol::Exact | Tol::Equal => vec![],
        Tol::Ulps(u) | Tol::Fused(u) => {
            value.scalars().map(|s| (once + u * ec) * s.as_f64().abs().max(1e-3) + tiny).collect()
        }
        Tol::Sum(k) => {
            let scale = of_magnitudes()?;
            let c = ec * (4.0 + 2.0 * (k as f64).sqrt());
            value
                .scalars()
                .zip(scale.scalars())
                .map(|(v, s)| once * v.as_f64().abs() + c * s.as_f64().abs() + tiny)
                .collect()
        }
        Tol::Each(k) => {
            let scale = of_magnitudes()?;
            let c = e * (1.0 + (k as f64).sqrt());
            scale.scalars().map(|s| c * s.as_f64().abs() + tiny).collect()
        }
        Tol::Norm(u) => {
            let top = value.scalars().map(|s| s.as_f64().abs()).filter(|v| v.is_finite()).fold(0.0, f64::max);
            vec![u * e * top + tiny; value.numel()]
        }
    };
    Ok(Expected { value, slack, unfused, exact: false, zeros: false })
}

impl Expected {
    /// Each element may differ by its `slack`, which is an absolute difference.
    pub fn within(value: ConstData, slack: Vec<f64>) -> Expected {
        Expected { value, slack, unfused: None, exact: false, zeros: false }
    }

    /// Every element must be equal. 0 and -0 are equal, and all NaNs are equal.
    pub fn equal(value: ConstData) -> Expected {
        Expected { value, slack: vec![], unfused: None, exact: true, zeros: false }
    }

    /// Adapts the tolerance to a device. If the device's kernel language does not guarantee that `a * b + c`
    /// is rounded only once, adds the rounding of the product.
    pub fn on(mut self, b: &Backend) -> Expected {
        if let Some(more) = self.unfused.take().filter(|_| !fused(b)) {
            self.slack.iter_mut().zip(more).for_each(|(s, m)| *s += m);
        }
        self
    }

    /// Multiplies the tolerances. Values that must be equal must still be equal.
    pub fn scaled(mut self, factor: f64) -> Expected {
        self.slack.iter_mut().chain(self.unfused.iter_mut().flatten()).for_each(|s| *s *= factor);
        self
    }

    /// The expected result.
    pub fn value(&self) -> &ConstData {
        &self.value
    }

    /// The largest difference allowed for any element; 0 if values must be equal.
    pub fn tolerance(&self) -> f64 {
        self.slack.iter().copied().filter(|s| s.is_finite()).fold(0.0, f64::max)
    }

    /// Like [`Expected::judge`], but returns no figures for correct results.
    pub fn compare(&self, got: &ConstData) -> std::result::Result<(), String> {
        self.judge(got).map(drop).map_err(|w| w.what)
    }

    /// The differences of a result. Returns an error if they exceed the tolerance.
    pub fn judge(&self, got: &ConstData) -> std::result::Result<Errors, Wrong> {
        if got.dims != self.value.dims {
            let what = format!("shape {:?} instead of {:?}", got.dims, self.value.dims);
            return Err(Wrong { what, errors: Errors::INFINITE });
        }
        let mut bad = 0;
        let mut first = None;
        let mut errors = Errors::default();
        for (i, (g, w)) in got.scalars().zip(self.value.scalars()).enumerate() {
            let slack = self.slack.get(i).copied().unwrap_or(0.0);
            let ok = if self.exact {
                is_same(got.dtype, g, w, self.zeros)
            } else {
                let r = w.cast(got.dtype).as_f64();
                let (g, w) = (g.as_f64(), w.as_f64());
                // At the ends of the range, rounding decides: a finite reference may be infinite in the
                // dtype, or vice versa.
                let near = w.is_finite() && (g - w).abs() <= slack;
                let finite = r.is_finite() && g.is_finite();
                near || (!finite && (g == r || (g.is_nan() && r.is_nan())))
            };
            errors = errors.max(Errors::of(got.dtype, g, w, slack, ok));
            if !ok {
                bad += 1;
                first.get_or_insert((i, g, w));
            }
        }
        match first {
            None => Ok(errors),
            Some((i, g, w)) => {
                let slack = self.slack.get(i).copied().unwrap_or(0.0);
                let what = format!(
                    "{bad} of {} wrong, first at {i}: {g:?}, expected {w:?} ± {slack:.1e}",
                    got.numel()
                );
                Err(Wrong { what, errors })
            }
        }
    }
}

/// A wrong result.
#[derive(Clone, Debug)]
pub struct Wrong {
    /// The number of wrong elements, and the first of them.
    pub what: String,
    pub errors: Errors,
}

/// A case with drawn operands and its expected result.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The graph of the case.
    pub graph: Graph,
    /// Values of the operands.
    pub inputs: Vec<ConstData>,
    /// Values of the run-time arguments.
    pub args: Vec<Scalar>,
    /// The expected result.
    pub want: Expected,
}

impl Case {
    /// Draws operands and computes the expected result. `tol` is the row's tolerance.
    pub fn sample(&self, tol: Tol, d: DType, rng: &mut Rng) -> Result<Sample> {
        let graph = self.graph(d)?;
        let inputs = self.inputs(d, rng)?;
        let args = self.draw_args(rng);
        let want = expect(&graph, &inputs, &args, self.tol.unwrap_or(tol))?;
        Ok(Sample { graph, inputs, args, want })
    }

    /// Draws run-time arguments.
    pub fn draw_args(&self, rng: &mut Rng) -> Vec<Scalar> {
        self.args.iter().map(|a| Scalar::F(rng.uniform(-9.0, 9.0)).cast(*a)).collect()
    }
}

/// Runs a sample and judges its result.
pub fn judge(b: &Backend, s: &Sample) -> Result<std::result::Result<Errors, Wrong>> {
    let got = run(b, &s.graph, &s.inputs, &s.args)?;
    let got = got.first().ok_or_else(|| crate::Error::internal("a case without a result"))?;
    Ok(s.want.clone().on(b).judge(got))
}

/// Runs a graph with run-time arguments.
pub fn run(b: &Backend, g: &Graph, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
    let s = Session::new(b, g.clone());
    let exe = s.prepare(inputs)?;
    let bufs = s.upload(inputs)?;
    let out = exe.run(&bufs, args)?;
    s.download(&exe, &out)
}

/// Whether a device rounds `a * b + c` only once.
fn fused(b: &Backend) -> bool {
    b.info().backend.built_in().is_none_or(|row| row.exact_fma)
}

/// Whether a device supports a dtype. Small types are stored in carriers, which every device supports.
pub fn has(b: &Backend, d: DType) -> bool {
    let caps = b.device().as_target().caps();
    let wide = matches!(d, DType::I64 | DType::U64);
    (!d.is_native() || caps.storage.contains(&d)) && (d != DType::F64 || caps.f64) && (!wide || caps.i64)
}
