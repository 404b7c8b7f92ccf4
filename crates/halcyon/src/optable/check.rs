//! Running cases and judging results.

use super::Rng;
use super::case::{Case, Tol, extremes};
use crate::ir::Graph;
use crate::ir::reference;
use crate::{Backend, ConstData, DType, Result, Scalar, Session};
use serde::{Deserialize, Serialize};

/// Distance of 1 to the next number.
pub fn eps(d: DType) -> f64 {
    match d {
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        DType::F32 => 2f64.powi(-23),
        _ => 2f64.powi(-52),
    }
}

/// What a result should be and how far off each element may be.
#[derive(Clone, Debug)]
pub struct Expected {
    value: ConstData,
    /// Per element, absolute.
    slack: Vec<f64>,
    /// What is added on a device that may round the product of an `a * b + c`.
    unfused: Option<Vec<f64>>,
    exact: bool,
    /// The zeros differ.
    zeros: bool,
}

/// How far a result is from what it should be, at the most over its elements. Places where both are no
/// number, or the same infinity, count as equal; where one of them is, all figures are infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Stored")]
pub struct Errors {
    /// Difference.
    pub abs: f64,
    /// Difference over the magnitude of what it should be, where that is a normal number.
    pub rel: f64,
    /// Difference in units of the last place of what it should be; of integers the difference.
    pub ulp: f64,
    /// Difference over what is allowed: above 1 is wrong.
    pub of_tolerance: f64,
}

/// JSON has no infinity: it is written as null.
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
    /// The larger of each figure.
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
        // A number that the type rounds to infinity may be infinite.
        if !x.is_finite() || !y.is_finite() {
            return if ok { Errors::default() } else { Errors::INFINITE };
        }
        let abs = (x - y).abs();
        let least = if d.is_float() { extremes(d).1 } else { 1.0 };
        let place = if d.is_float() { eps(d) * 2f64.powf(y.abs().max(least).log2().floor()) } else { 1.0 };
        let of_tolerance = match ok {
            // Within the tolerance whatever it is, as a flushed denormal is.
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

/// Equality of single values. Any NaN is as good as another. A device may flush numbers below the smallest
/// normal of f32 and f64 (and bf16, which is the upper half of f32) to zero; those of f16 are data.
pub fn same(d: DType, g: Scalar, w: Scalar, zeros: bool) -> bool {
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

/// What a graph of one op should give, by the reference: in the op's own types where the tolerance is exact,
/// else in f64.
pub fn expect(g: &Graph, inputs: &[ConstData], args: &[Scalar], tol: Tol) -> Result<Expected> {
    let out = g.dtype(g.outputs()[0].node);
    let typed = matches!(tol, Tol::Exact | Tol::Equal) || !out.is_float();
    let value = if typed { reference::eval(g, inputs, args)? } else { reference::eval_f64(g, inputs, args)? }
        .remove(0);
    if typed {
        let zeros = matches!(tol, Tol::Exact);
        return Ok(Expected { slack: vec![], unfused: None, value, exact: true, zeros });
    }
    // Half types compute in f32 and round once.
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
    /// A value of which each element may be off by so much, absolutely.
    pub fn within(value: ConstData, slack: Vec<f64>) -> Expected {
        Expected { value, slack, unfused: None, exact: false, zeros: false }
    }

    /// A value that must be there, but that zeros are alike and any NaN is as good as another.
    pub fn equal(value: ConstData) -> Expected {
        Expected { value, slack: vec![], unfused: None, exact: true, zeros: false }
    }

    /// As it is for a device: where its language promises no more of `a * b + c` than of a product and a sum,
    /// the product's own rounding is allowed for.
    pub fn on(mut self, b: &Backend) -> Expected {
        if let Some(more) = self.unfused.take().filter(|_| !fused(b)) {
            self.slack.iter_mut().zip(more).for_each(|(s, m)| *s += m);
        }
        self
    }

    /// With tolerances multiplied; what must be equal still must.
    pub fn scaled(mut self, factor: f64) -> Expected {
        self.slack.iter_mut().chain(self.unfused.iter_mut().flatten()).for_each(|s| *s *= factor);
        self
    }

    pub fn value(&self) -> &ConstData {
        &self.value
    }

    /// The largest difference that is allowed anywhere; 0 where values must be equal.
    pub fn tolerance(&self) -> f64 {
        self.slack.iter().copied().filter(|s| s.is_finite()).fold(0.0, f64::max)
    }

    /// As [`Expected::judge`], without the figures of what is right.
    pub fn compare(&self, got: &ConstData) -> std::result::Result<(), String> {
        self.judge(got).map(drop).map_err(|w| w.what)
    }

    /// How far off a result is, and whether that is too far.
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
                same(got.dtype, g, w, self.zeros)
            } else {
                let r = w.cast(got.dtype).as_f64();
                let (g, w) = (g.as_f64(), w.as_f64());
                // At the edge of the range rounding decides: a finite reference may be infinite in the type,
                // or the reverse.
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
                    "{bad} of {} wrong, first at {i}: {g:?}, should be {w:?} ± {slack:.1e}",
                    got.numel()
                );
                Err(Wrong { what, errors })
            }
        }
    }
}

/// A result that is not what it should be.
#[derive(Clone, Debug)]
pub struct Wrong {
    /// How many elements, and the first of them.
    pub what: String,
    pub errors: Errors,
}

/// A case with operands that were drawn for it, and what it should give.
#[derive(Clone, Debug)]
pub struct Sample {
    pub graph: Graph,
    pub inputs: Vec<ConstData>,
    pub args: Vec<Scalar>,
    pub want: Expected,
}

impl Case {
    /// Draws operands and asks the reference. `tol` is the row's.
    pub fn sample(&self, tol: Tol, d: DType, rng: &mut Rng) -> Result<Sample> {
        let graph = self.graph(d)?;
        let inputs = self.inputs(d, rng)?;
        let args = self.draw_args(rng);
        let want = expect(&graph, &inputs, &args, self.tol.unwrap_or(tol))?;
        Ok(Sample { graph, inputs, args, want })
    }

    /// Run-time arguments.
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
    let out = exe.run(b, &bufs, args)?;
    s.download(&exe, &out)
}

/// Whether a device rounds an `a * b + c` once. The accuracy that WGSL gives `fma` is that of `x * y + z`.
fn fused(b: &Backend) -> bool {
    !matches!(b.info().backend, crate::BackendType::WebGpu | crate::BackendType::Metal)
}

/// Whether a device stores and computes a type at all. Small types are carried by others, which every device
/// has.
pub fn has(b: &Backend, d: DType) -> bool {
    let caps = b.device().as_target().caps();
    let wide = matches!(d, DType::I64 | DType::U64);
    (!d.is_native() || caps.storage.contains(&d)) && (d != DType::F64 || caps.f64) && (!wide || caps.i64)
}
