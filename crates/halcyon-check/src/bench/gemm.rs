//! Matrix products in f32 (with and without TF32), f16, bf16, 8-bit floats and 8-bit integers; products with
//! an epilogue; and the error of TF32.

use super::results::{self, Exactness};
use super::{Bench, FigureError, note, part, random_normal, rate};
use crate::child_section::{SectionArgs, emit};
use crate::event::{Event, Figure, Status};
use halcyon::prelude::*;
use halcyon::{Error, MatmulPrecision};
use serde_json::json;
use std::collections::BTreeMap;

/// Minimum share of PyTorch's rate.
const TARGET: f64 = 0.9;
const SIZES: &[[usize; 3]] = &[[1024, 1024, 1024], [4096, 4096, 4096], [8192, 8192, 8192], [128, 4096, 4096]];
/// Sizes for generated kernels: one with full tiles only, one with partial tiles.
const GENERATED: &[[usize; 3]] = &[[4096, 4096, 4096], [1000, 1500, 700]];
const STAND_IN_SHAPES: &[[usize; 3]] = &[[32, 48, 32]];
/// For products of at most this many multiply-adds, launch overhead matters. On GPUs, PyTorch therefore
/// launches them as a captured graph too.
const SMALL: usize = 1 << 30;

/// A type of product. To add a type, add a row to [`KINDS`].
#[derive(Debug)]
struct Kind {
    name: &'static str,
    dtype: DType,
    /// The least precision that f32 products may have.
    precision: MatmulPrecision,
    /// PyTorch's name of the type.
    theirs: &'static str,
    exact: Exactness,
    /// Type to which byte factors are widened for the product.
    wide: Option<DType>,
}

const fn kind(name: &'static str, dtype: DType, theirs: &'static str, exact: Exactness) -> Kind {
    Kind { name, dtype, precision: MatmulPrecision::Highest, theirs, exact, wide: None }
}

const KINDS: &[Kind] = &[
    kind("f32, TF32 off", DType::F32, "f32", Exactness::F32),
    Kind { precision: MatmulPrecision::High, ..kind("f32, TF32 on", DType::F32, "f32", Exactness::TF32) },
    kind("f16", DType::F16, "f16", Exactness::F16),
    kind("bf16", DType::BF16, "bf16", Exactness::BF16),
    Kind { wide: Some(DType::BF16), ..kind("f8e4m3 into bf16", DType::F8E4M3FN, "f8", Exactness::F8) },
    Kind { wide: Some(DType::I32), ..kind("i8 into i32", DType::I8, "i8", Exactness::INTEGERS) },
];

impl Kind {
    /// Factors of a product. Byte factors are both contiguous along K, like PyTorch's.
    fn factors(&self, b: &Backend, [m, n, k]: [usize; 3]) -> Result<[Tensor; 2]> {
        if self.wide.is_none() {
            return Ok([
                random_normal(b, &[m, k], self.dtype, 1)?,
                random_normal(b, &[k, n], self.dtype, 2)?,
            ]);
        }
        let scale = if self.dtype == DType::I8 { 30.0 } else { 1.0 };
        let small = |dims: &[usize], seed| -> Result<Tensor> {
            let t = (random_normal(b, dims, DType::F32, seed)? * scale).cast(self.dtype);
            t.eval()?;
            Ok(t)
        };
        Ok([small(&[m, k], 1)?, small(&[n, k], 2)?])
    }

    fn product(&self, [x, w]: &[Tensor; 2]) -> Tensor {
        match self.wide {
            None => x.matmul(w),
            Some(d) => x.cast(d).matmul(&w.cast(d).transpose(0, 1)),
        }
    }
}

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let mut bench = Bench::new(o);
    epilogues(o)?;
    let sizes = match (o.tiny, o.generated) {
        (true, _) => STAND_IN_SHAPES,
        (_, true) => GENERATED,
        _ => SIZES,
    };
    // Runs without the vendors' libraries have no target.
    let target = (!o.generated).then_some(TARGET);
    for kind in KINDS {
        let b = Backend::builder().backend_type(o.kind).level(Level::O2).precision(kind.precision).build()?;
        // 8-bit floats are stored as bytes, which every device supports.
        if kind.dtype.is_native() && !b.supported_dtypes().contains(&kind.dtype) {
            note(format!(
                "products of {}: not measured: kernels of {} do not support {}",
                kind.name,
                b.id(),
                kind.dtype
            ));
            continue;
        }
        for &[m, n, k] in sizes {
            let name = format!("{} [{m}, {k}] × [{k}, {n}]", kind.name);
            part(o, &name, || {
                let factors = kind.factors(&b, [m, n, k])?;
                let tf32 = kind.precision == MatmulPrecision::High;
                let small = m * n * k <= SMALL && o.kind != BackendType::Cpu;
                let their = |graph: bool| {
                    json!({
                        "do": "matmul", "m": m, "n": n, "k": k, "dtype": kind.theirs, "tf32": tf32, "graph": graph,
                    })
                };
                let there = bench.prepare(&their(small));
                let g = b.capture_graph(|| [kind.product(&factors)])?;
                let t = bench.time_capture(there, &b, &g)?;
                let y = &g.outputs()?[0];
                let right = results::product(&factors[0], &factors[1], kind.wide.is_some(), y, kind.exact)?;
                let remark = format!("{}; {right}", kernels(&g));
                let amount = 2e-12 * (m * n * k) as f64;
                let theirs = bench.theirs();
                let captured = if small { format!("{theirs}, captured") } else { theirs.clone() };
                rate(&name, "TFLOP/s", amount, t, &captured, target, &remark);
                if small && there && bench.prepare(&their(false)) {
                    let t = bench.time_capture(true, &b, &g)?;
                    let name = format!("{name}, against single calls");
                    rate(&name, "TFLOP/s", amount, t, &format!("{theirs}, single calls"), None, &remark);
                }
                Ok(())
            });
        }
    }
    part(o, "error of TF32", || error(o));
    Ok(())
}

type Epilogue = (&'static str, fn(&Tensor) -> Tensor, fn(f64) -> f64, f64);

/// Epilogues that libraries may apply to products, with the allowed error of the function. It is not
/// documented which gelu a library uses (the two variants differ by 5e-4), or whether its relu keeps NaN.
const EPILOGUES: &[Epilogue] = &[
    ("gelu(tanh)", |x| x.gelu_tanh(), gelu_tanh, 1e-4),
    ("relu, a row of NaN", |x| x.relu(), |v| if v.is_nan() { v } else { v.max(0.0) }, 0.0),
];

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh())
}

/// Products with a bias and an activation, above the size from which libraries are used.
fn epilogues(o: &SectionArgs) -> Result<()> {
    const N: usize = 64;
    let b = o.open(Level::O2)?;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !b.supported_dtypes().contains(&dtype) {
            continue;
        }
        for (what, f, host, more) in EPILOGUES {
            let name = format!("product, bias, {what} {dtype}");
            part(o, &name, || {
                // The products have a standard deviation of 1.5. At such values the two gelus differ.
                let mut x = random_normal(&b, &[N, N], DType::F32, 1)?.to_vec::<f32>()?;
                if what.contains("NaN") {
                    x[5 * N + 7] = f32::NAN;
                }
                x.iter_mut().for_each(|x| *x *= 1.5 / (N as f32).sqrt());
                let x = Tensor::from_slice(&b, [N, N], &x)?.cast(dtype);
                x.eval()?;
                let (w, bias) = (random_normal(&b, &[N, N], dtype, 2)?, random_normal(&b, &[N], dtype, 3)?);
                let g = b.capture_graph(|| [f(&(x.matmul(&w) + &bias))])?;
                g.launch()?;
                let exact = Exactness::of(dtype);
                let note =
                    match results::compare_epilogue([&x, &w, &bias, &g.outputs()?[0]], *host, exact, *more) {
                        // In a rehearsal the library may be a stand-in, whose treatment of NaN is a guess.
                        // Only a real library can show what happens.
                        Err(FigureError::Wrong(what))
                            if o.tiny && what.ends_with(&results::expected(f64::NAN, 0.0)) =>
                        {
                            format!("warning: NaN is dropped: {what}")
                        }
                        other => other?,
                    };
                emit(&name, Status::Passed, format!("{}; {note}", kernels(&g)));
                Ok(())
            });
        }
    }
    Ok(())
}

/// Names and counts of a plan's kernels. Figures list them, so that the report shows which kernels were
/// measured.
pub(crate) fn kernels(g: &halcyon::CapturedGraph) -> String {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    for s in &g.executable().plan().steps {
        *count.entry(s.work.kernel_name()).or_default() += 1;
    }
    let generated = |name: &str| name.starts_with("ir.");
    let mut all: Vec<(String, usize)> = count.into_iter().collect();
    // Library kernels first.
    all.sort_by_key(|(name, n)| (generated(name), std::cmp::Reverse(*n)));
    let text = |(name, n): &(String, usize)| if *n > 1 { format!("{n} {name}") } else { name.clone() };
    all.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// The largest error of f32 products against f64 sums, with and without TF32, relative to the largest value.
fn error(o: &SectionArgs) -> Result<(), FigureError> {
    let n = if o.tiny { 16 } else { 256 };
    for precision in [MatmulPrecision::Highest, MatmulPrecision::High] {
        let b = Backend::builder().backend_type(o.kind).level(Level::O2).precision(precision).build()?;
        let (x, w) = (random_normal(&b, &[n, n], DType::F32, 3)?, random_normal(&b, &[n, n], DType::F32, 4)?);
        let got = x.matmul(&w).to_vec::<f64>()?;
        let (x, w) = (x.to_vec::<f64>()?, w.to_vec::<f64>()?);
        let (mut far, mut most) = (0f64, 0f64);
        for i in 0..n {
            for j in 0..n {
                let want: f64 = (0..n).map(|k| x[i * n + k] * w[k * n + j]).sum();
                far = far.max((want - got[i * n + j]).abs());
                most = most.max(want.abs());
            }
        }
        if !far.is_finite() || most == 0.0 {
            return Err(Error::internal(format!(
                "a product of {n}×{n} is off by {far}, and its largest value is {most}"
            ))
            .into());
        }
        let on = if precision == MatmulPrecision::High { "on" } else { "off" };
        Event::Figure(Figure {
            name: format!("error of an f32 product, TF32 {on}"),
            unit: "of the largest value".into(),
            value: far / most,
            more: false,
            reference: None,
            target: None,
            note: format!("[{n}, {n}] × [{n}, {n}]"),
        })
        .emit();
    }
    Ok(())
}
