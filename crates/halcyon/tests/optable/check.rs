//! Running cases and judging results.

use super::case::{Case, Row, Tol, extremes};
use crate::common::Rng;
use halcyon::ir::Graph;
use halcyon::ir::reference;
use halcyon::{Backend, BackendType, ConstData, DType, Result, Scalar, Session};

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

/// Equality of single values. Any NaN is as good as another. A device may flush numbers below the smallest normal of f32 and
/// f64 (and bf16, which is the upper half of f32) to zero; those of f16 are data.
fn same(d: DType, g: Scalar, w: Scalar, zeros: bool) -> bool {
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
    /// `fused`: the device rounds an `a * b + c` once.
    pub fn compare(&self, got: &ConstData, fused: bool) -> std::result::Result<(), String> {
        if got.dims != self.value.dims {
            return Err(format!("shape {:?} instead of {:?}", got.dims, self.value.dims));
        }
        let mut bad = 0;
        let mut first = None;
        let unfused = self.unfused.as_ref().filter(|_| !fused);
        let slack = |i: usize| self.slack[i] + unfused.map_or(0.0, |u| u[i]);
        for (i, (g, w)) in got.scalars().zip(self.value.scalars()).enumerate() {
            let ok = if self.exact {
                same(got.dtype, g, w, self.zeros)
            } else {
                let r = w.cast(got.dtype).as_f64();
                let (g, w) = (g.as_f64(), w.as_f64());
                // At the edge of the range rounding decides: a finite reference may be infinite in the type, or the reverse.
                let near = w.is_finite() && (g - w).abs() <= slack(i);
                let finite = r.is_finite() && g.is_finite();
                near || (!finite && (g == r || (g.is_nan() && r.is_nan())))
            };
            if !ok {
                bad += 1;
                first.get_or_insert((i, g, w));
            }
        }
        match first {
            None => Ok(()),
            Some((i, g, w)) => {
                let slack = if self.exact { 0.0 } else { slack(i) };
                Err(format!(
                    "{bad} of {} wrong, first at {i}: {g:?}, should be {w:?} ± {slack:.1e}",
                    got.numel()
                ))
            }
        }
    }
}

/// Runs a graph with run-time arguments.
pub fn run(b: &Backend, g: &Graph, inputs: &[ConstData], args: &[Scalar]) -> Result<Vec<ConstData>> {
    let s = Session::new(b, g.clone());
    let exe = s.prepare(inputs)?;
    let bufs = s.upload(inputs)?;
    let out = exe.run(b, &bufs, args)?;
    s.download(&exe, &out)
}

/// Whether a device stores and computes a type at all. Small types are carried by others, which every device has.
pub fn has(b: &Backend, d: DType) -> bool {
    let caps = b.device().as_target().caps();
    let wide = matches!(d, DType::I64 | DType::U64);
    (!d.is_native() || caps.storage.contains(&d)) && (d != DType::F64 || caps.f64) && (!wide || caps.i64)
}

/// Whether a device rounds an `a * b + c` once. The accuracy that WGSL gives `fma` is that of `x * y + z`.
fn fused(b: &Backend) -> bool {
    !matches!(b.device().info().backend, BackendType::WebGpu | BackendType::Metal)
}

/// Failures of a run over rows, and how much was run.
#[derive(Default)]
pub struct Tally {
    pub cases: usize,
    pub failures: Vec<String>,
}

impl Tally {
    pub fn check(&mut self, backends: &[Backend], row: &Row, case: &Case, d: DType, rng: &mut Rng) {
        let at = |b: &str| format!("{} {d} [{}] {b}", row.name, case.label);
        let prepared = case.graph(d).and_then(|g| {
            let inputs = case.inputs(d, rng)?;
            let args: Vec<Scalar> =
                case.args.iter().map(|a| Scalar::F(rng.uniform(-9.0, 9.0)).cast(*a)).collect();
            let want = expect(&g, &inputs, &args, case.tol.unwrap_or(row.tol))?;
            Ok((g, inputs, args, want))
        });
        let (g, inputs, args, want) = match prepared {
            Ok(p) => p,
            Err(e) => return self.failures.push(format!("{}: {e}", at("reference"))),
        };
        for b in backends.iter().filter(|b| has(b, d)) {
            self.cases += 1;
            let result = match run(b, &g, &inputs, &args) {
                Ok(y) => want.compare(&y[0], fused(b)),
                Err(e) => Err(e.to_string()),
            };
            if let Err(e) = result {
                self.failures.push(format!("{}: {e}", at(&format!("{} {}", b.id(), b.level()))));
            }
        }
    }

    /// Panics with the failures, if there are any.
    pub fn finish(self, what: &str) {
        println!("{what}: {} cases", self.cases);
        if self.failures.is_empty() {
            assert!(self.cases > 0, "{what}: nothing ran");
            return;
        }
        // A few of every row, so that one broken op does not hide the others.
        let mut of_row: std::collections::BTreeMap<&str, usize> = Default::default();
        let few: usize = std::env::var("HALCYON_FAILURES").ok().and_then(|v| v.parse().ok()).unwrap_or(3);
        let list: Vec<&str> = self
            .failures
            .iter()
            .filter(|f| {
                let n = of_row.entry(f.split(" [").next().unwrap_or("")).or_default();
                *n += 1;
                *n <= few
            })
            .map(|s| s.as_str())
            .collect();
        panic!(
            "{what}: {} failures in {} cases, among them\n{}",
            self.failures.len(),
            self.cases,
            list.join("\n")
        );
    }
}

/// Of the cases of a row and type, one in so many is run where every case is a program to build, drawn anew each time.
const SAMPLE: usize = 3;

/// Runs the cases of rows; HALCYON_ROW picks the rows whose name contains it. On a device that builds a program for each case, a sample of
/// each row and type, unless HALCYON_CASES=all.
pub fn check_rows(what: &str, rows: &[Row], backends: &[Backend], rng: &mut Rng) -> Tally {
    let pick = std::env::var("HALCYON_ROW").unwrap_or_default();
    let all = !pick.is_empty()
        || std::env::var("HALCYON_CASES").as_deref() == Ok("all")
        || backends.iter().any(|b| b.device().info().backend == BackendType::Cpu);
    let mut t = Tally::default();
    for row in rows.iter().filter(|r| r.name.contains(&pick)) {
        let start = std::time::Instant::now();
        for d in &row.dtypes {
            let cases: Vec<&Case> = row.cases.iter().filter(|c| c.takes(*d)).collect();
            let sure = rng.below(cases.len().max(1));
            for (i, case) in cases.into_iter().enumerate() {
                if all || i == sure || rng.below(SAMPLE) == 0 {
                    t.check(backends, row, case, *d, rng);
                }
            }
        }
        if start.elapsed().as_secs_f64() > 2.0 {
            println!("{what}: {} took {:.1} s", row.name, start.elapsed().as_secs_f64());
        }
    }
    t
}
