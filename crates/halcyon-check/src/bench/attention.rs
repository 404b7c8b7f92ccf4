//! Attention for a prompt and for a single token, compared with PyTorch.

use super::{Bench, part, random_normal, rate, results};
use crate::bench::gemm::kernels;
use crate::child_section::SectionArgs;
use halcyon::Attention;
use halcyon::ir::composite::CompositeKind;
use halcyon::prelude::*;
use serde_json::json;

/// Minimum share of PyTorch's rate: the time may be at most 1.3 times PyTorch's time.
const TARGET: f64 = 1.0 / 1.3;

/// Each shape has a name, its sizes (batch, query heads, key heads, queries, keys, head size), and whether it
/// is causal.
const SHAPES: &[(&str, [usize; 6], bool)] = &[
    ("prompt", [2, 16, 16, 2048, 2048, 64], true),
    ("prompt", [1, 32, 8, 4096, 4096, 128], true),
    ("encoder", [8, 12, 12, 512, 512, 64], false),
    ("token", [8, 32, 8, 1, 4096, 128], false),
    ("token", [1, 32, 4, 1, 65536, 128], false),
];
const STAND_IN_SHAPES: &[(&str, [usize; 6], bool)] =
    &[("prompt", [1, 4, 2, 8, 8, 16], true), ("token", [1, 4, 2, 1, 16, 16], false)];

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let mut bench = Bench::new(o);
    let b = o.open(Level::O2)?;
    // Runs without the vendors' libraries have no target. They leave out shapes with one query: these always
    // use generated kernels, which the run with libraries already measures.
    let target = (!o.generated).then_some(TARGET);
    let shapes = if o.tiny { STAND_IN_SHAPES } else { SHAPES };
    let shapes: Vec<_> = shapes.iter().filter(|(_, s, _)| !o.generated || s[3] > 1).collect();
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        for (name, [n, h, hk, sq, sk, d], causal) in &shapes {
            let name = format!("{name} {dtype} q [{n}, {h}, {sq}, {d}], k [{n}, {hk}, {sk}, {d}]");
            part(o, &name, || {
                let q = random_normal(&b, &[*n, *h, *sq, *d], dtype, 1)?;
                let k = random_normal(&b, &[*n, *hk, *sk, *d], dtype, 2)?;
                let v = random_normal(&b, &[*n, *hk, *sk, *d], dtype, 3)?;
                let there = bench.prepare(&json!({
                    "do": CompositeKind::Attention.name(), "batch": n, "heads": h, "kv_heads": hk, "queries": sq, "keys": sk, "size": d,
                    "dtype": dtype.name(), "causal": causal,
                }));
                let options = Attention { causal: *causal, ..Attention::default() };
                let g = b.capture_graph(|| [q.attention(&k, &v, options)])?;
                let t = bench.time_capture(there, &b, &g)?;
                let right = results::attention(&q, &k, &v, *causal, &g.outputs()?[0])?;
                let remark = format!("{}; {right}", kernels(&g));
                // Attention of a single token is bound by reading the keys and values.
                let (unit, amount) = if *sq == 1 {
                    ("GB/s", dtype.bytes(2 * n * d * (h * sq + hk * sk)) as f64 / 1e9)
                } else {
                    let half = if *causal { 0.5 } else { 1.0 };
                    ("TFLOP/s", 4e-12 * half * (n * h * sq * sk * d) as f64)
                };
                rate(&name, unit, amount, t, &bench.theirs(), target, &remark);
                Ok(())
            });
        }
    }
    Ok(())
}
