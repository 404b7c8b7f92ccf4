//! Measures memory-bound work and compares it with the bandwidth of a copy on the device.

use super::{Bench, FigureError, Timed, part, random_normal, rate, results};
use crate::bench::gemm::kernels;
use crate::child_section::SectionArgs;
use halcyon::Attention;
use halcyon::hal::{Command, Tag};
use halcyon::ir::composite::CompositeKind;
use halcyon::prelude::*;
use serde_json::json;

/// The share of the copy's bandwidth that each operation must reach.
const TARGET: f64 = 0.85;

type Make = fn(&[Tensor]) -> Tensor;

/// Name, number of matrices among the operands, and function. Each matrix is read once and the result is
/// written once; the vectors of the norms are not counted.
fn operations() -> [(&'static str, usize, Make); 6] {
    [
        ("x · 2 + 1", 1, |x| &x[0] * 2.0 + 1.0),
        ("x + y", 2, |x| &x[0] + &x[1]),
        ("gelu", 1, |x| x[0].gelu()),
        (CompositeKind::Softmax.row().name, 1, |x| x[0].softmax(-1)),
        ("layer norm", 1, |x| x[0].layer_norm(&x[x.len() - 2], Some(&x[x.len() - 1]), -1, 1e-5)),
        ("RMS norm", 1, |x| x[0].rms_norm(&x[x.len() - 2], 1e-5)),
    ]
}

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let mut bench = Bench::new(o);
    let b = o.open(Level::O2)?;
    let mut copied = None;
    part(o, "device copy", || {
        copied = Some(copy(o, &mut bench, &b)?);
        Ok(())
    });
    // 256 MiB in f32 and 128 MiB in half types, more than most devices can cache.
    let (rows, columns) = if o.tiny { (16, 64) } else { (16384, 4096) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (name, operands, make) in operations() {
            let name = format!("{name} {dtype} [{rows}, {columns}]");
            part(o, &name, || {
                let mut x = vec![];
                for i in 0..operands {
                    x.push(random_normal(&b, &[rows, columns], dtype, 1 + i as u64)?);
                }
                x.push(random_normal(&b, &[columns], dtype, 8)?);
                x.push(random_normal(&b, &[columns], dtype, 9)?);
                let bytes = dtype.bytes((operands + 1) * rows * columns) as f64;
                of_copy(&mut bench, &b, &name, bytes, copied, &|| make(&x), &|y| results::rows(&x, make, y))
            });
        }
    }
    let (n, k) = if o.tiny { (48, 64) } else { (16384, 8192) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let name = format!("GEMV {dtype} [1, {k}] × [{k}, {n}]");
        part(o, &name, || {
            let (x, w) = (random_normal(&b, &[1, k], dtype, 1)?, random_normal(&b, &[k, n], dtype, 2)?);
            let bytes = dtype.bytes(n * k + n + k) as f64;
            let exact = results::Exactness::of(dtype);
            let verify = |y: &Tensor| results::product(&x, &w, false, y, exact);
            of_copy(&mut bench, &b, &name, bytes, copied, &|| x.matmul(&w), &verify)
        });
    }
    // A decoding step reads the keys and values of all previous positions.
    let caches: &[[usize; 5]] =
        if o.tiny { &[[1, 4, 2, 300, 16]] } else { &[[8, 32, 8, 4096, 128], [1, 32, 4, 65536, 128]] };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for &[n, h, hk, sk, d] in caches {
            let name = format!("attention of a token {dtype} q [{n}, {h}, 1, {d}], k [{n}, {hk}, {sk}, {d}]");
            part(o, &name, || {
                let q = random_normal(&b, &[n, h, 1, d], dtype, 1)?;
                let [k, v] = [
                    random_normal(&b, &[n, hk, sk, d], dtype, 2)?,
                    random_normal(&b, &[n, hk, sk, d], dtype, 3)?,
                ];
                let make = || q.attention(&k, &v, Attention::default());
                let bytes = dtype.bytes(2 * n * d * (h + hk * sk)) as f64;
                let verify = |y: &Tensor| results::attention(&q, &k, &v, false, y);
                of_copy(&mut bench, &b, &name, bytes, copied, &make, &verify)
            });
        }
    }
    Ok(())
}

/// Reports a rate relative to the copy. The result of the captured run must be correct and equal to the
/// result of a run that is not captured.
fn of_copy(
    bench: &mut Bench,
    b: &Backend,
    name: &str,
    bytes: f64,
    copied: Option<f64>,
    make: &dyn Fn() -> Tensor,
    verify: &dyn Fn(&Tensor) -> Result<String, FigureError>,
) -> Result<(), FigureError> {
    let first = make();
    first.eval()?;
    let g = b.capture_graph(|| [make()])?;
    let t = bench.time_capture(false, b, &g)?;
    let y = &g.outputs()?[0];
    results::same(y, &first)?;
    let remark = format!("{}; {}", kernels(&g), verify(y)?);
    let theirs = copied.map(|rate| bytes / rate);
    rate(name, "GB/s", bytes / 1e9, Timed { theirs, ..t }, "device copy", Some(TARGET), &remark);
    Ok(())
}

/// Measures a copy on the device. Returns the bytes per second that it reads and writes, added together.
fn copy(o: &SectionArgs, bench: &mut Bench, b: &Backend) -> Result<f64> {
    let d = b.device();
    let bytes = if o.tiny { 1 << 16 } else { 512 << 20 };
    let (src, dst) = (d.alloc(bytes, Tag::Io)?, d.alloc(bytes, Tag::Io)?);
    let there = bench.prepare(&json!({ "do": "copy", "bytes": bytes }));
    let command = Command::Copy { src: &src, src_offset: 0, dst: &dst, dst_offset: 0, bytes };
    let t = bench.time(there, || d.submit(std::slice::from_ref(&command)), || d.synchronize())?;
    let moved = 2.0 * bytes as f64;
    let remark = format!("{} MiB, read and written", bytes as f64 / (1 << 20) as f64);
    rate("device copy", "GB/s", moved / 1e9, t, &bench.theirs(), None, &remark);
    Ok(moved / t.ours)
}
