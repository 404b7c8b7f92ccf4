//! Products of matrices in every type that the device's matrix units may have, and what TF32 changes.

use super::{Bench, drawn, note, part, rate};
use crate::event::{Event, Figure};
use crate::own::Own;
use halcyon::prelude::*;
use halcyon::{Error, MatmulPrecision};
use serde_json::json;

/// Of PyTorch's rate.
const TARGET: f64 = 0.9;
const SIZES: &[[usize; 3]] = &[[1024, 1024, 1024], [4096, 4096, 4096], [8192, 8192, 8192], [128, 4096, 4096]];

/// Name, type, what f32 products may be made of, PyTorch's name of the type.
const KINDS: &[(&str, DType, MatmulPrecision, &str)] = &[
    ("f32, TF32 off", DType::F32, MatmulPrecision::Highest, "f32"),
    ("f32, TF32 on", DType::F32, MatmulPrecision::High, "f32"),
    ("f16", DType::F16, MatmulPrecision::Highest, "f16"),
    ("bf16", DType::BF16, MatmulPrecision::Highest, "bf16"),
    ("f8e4m3 into bf16", DType::F8E4M3FN, MatmulPrecision::Highest, "f8"),
];

/// Factors of a product. Those of 8-bit floats both run along the sum, as PyTorch's do.
fn factors(b: &Backend, [m, n, k]: [usize; 3], dtype: DType) -> Result<[Tensor; 2]> {
    if dtype.is_native() {
        return Ok([drawn(b, &[m, k], dtype, 1)?, drawn(b, &[k, n], dtype, 2)?]);
    }
    let small = |dims: &[usize], seed| -> Result<Tensor> {
        let t = drawn(b, dims, DType::F32, seed)?.cast(dtype);
        t.eval()?;
        Ok(t)
    };
    Ok([small(&[m, k], 1)?, small(&[n, k], 2)?])
}

fn product([x, w]: &[Tensor; 2], dtype: DType) -> Tensor {
    if dtype.is_native() {
        return x.matmul(w);
    }
    x.cast(DType::BF16).matmul(&w.cast(DType::BF16).transpose(0, 1))
}

pub fn main(o: &Own) -> Result<()> {
    let mut bench = Bench::new(o);
    let tiny = [[32, 48, 32]];
    let sizes = if o.tiny { &tiny[..] } else { SIZES };
    for (kind, dtype, precision, theirs) in KINDS {
        let b = Backend::builder().backend_type(o.kind).level(Level::O2).precision(*precision).build()?;
        // 8-bit floats are bytes to every device.
        if dtype.is_native() && !b.supported_dtypes().contains(dtype) {
            note(format!("products of {kind}: not measured: kernels of {} do not load {dtype}", b.id()));
            continue;
        }
        for &[m, n, k] in sizes {
            let name = format!("{kind} [{m}, {k}] × [{k}, {n}]");
            part(&name, || {
                let factors = factors(&b, [m, n, k], *dtype)?;
                let tf32 = *precision == MatmulPrecision::High;
                let their = json!({ "do": "matmul", "m": m, "n": n, "k": k, "dtype": theirs, "tf32": tf32 });
                let there = bench.prepare(&their);
                let g = b.capture_graph(|| [product(&factors, *dtype)])?;
                let t = bench.replay(there, &b, &g)?;
                let kernel = kernels(&g);
                rate(&name, "TFLOP/s", 2e-12 * (m * n * k) as f64, t, &bench.theirs(), Some(TARGET), &kernel);
                Ok(())
            });
        }
    }
    part("error of TF32", || error(o));
    Ok(())
}

/// Names of a plan's kernels: a figure says what was measured.
pub fn kernels(g: &halcyon::CapturedGraph) -> String {
    let mut names: Vec<String> = g.executable().plan().steps.iter().map(|s| s.work.kernel_name()).collect();
    names.dedup();
    let more = if names.len() > 3 { format!(" and {} more", names.len() - 3) } else { String::new() };
    names.truncate(3);
    names.join(", ") + &more
}

/// The largest error of f32 products beside sums in f64, with TF32 and without, relative to the largest value.
fn error(o: &Own) -> Result<()> {
    let n = if o.tiny { 16 } else { 256 };
    for precision in [MatmulPrecision::Highest, MatmulPrecision::High] {
        let b = Backend::builder().backend_type(o.kind).level(Level::O2).precision(precision).build()?;
        let (x, w) = (drawn(&b, &[n, n], DType::F32, 3)?, drawn(&b, &[n, n], DType::F32, 4)?);
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
                "a product of {n}×{n} is off by {far}, its largest value is {most}"
            )));
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
        .tell();
    }
    Ok(())
}
