//! The time of launching a captured graph, divided by the number of its kernels.

use super::{Bench, Timed, part, random_normal, results, time};
use crate::child_section::SectionArgs;
use halcyon::Error;
use halcyon::prelude::*;

/// Target in seconds per kernel of the graph.
const TARGET_SECONDS: f64 = 10e-6;

pub(crate) fn main(o: &SectionArgs) -> Result<()> {
    let steps = if o.tiny { 8 } else { 256 };
    // The measured time is compared with a fixed time, so PyTorch is not needed.
    let mut bench = Bench::new(&SectionArgs { torch: false, ..o.clone() });
    let b = o.open(Level::O2)?;
    part(o, "launch of a captured graph", || {
        let of = |seed| random_normal(&b, &[16, 16], DType::F32, seed);
        let (x, other, w) = (of(1)?, of(3)?, of(2)?);
        // Each product depends on the previous one, so they cannot be fused.
        let chain = |x: &Tensor, s: &Tensor| (0..steps).fold(x.clone(), |x, _| (x.matmul(&w) * s).tanh());
        let factor = |v: f32| Tensor::scalar(&b, v, DType::F32);
        let s = factor(1.5);
        // The first run of the same plan. It is not captured.
        let first = chain(&x, &factor(1.5));
        first.eval()?;
        let g = b.capture_graph(|| [chain(&x, &s)])?;
        let count = |b: &Backend| b.counters().launches + b.counters().library_calls;
        g.launch()?;
        b.synchronize()?;
        let before = count(&b);
        g.launch()?;
        b.synchronize()?;
        let n = count(&b) - before;
        if n < steps as u64 {
            return Err(Error::internal(format!("{steps} products became {n} launches")).into());
        }
        let t = bench.time_capture(false, &b, &g)?;
        let result = || g.outputs().map(|o| o[0].clone());
        results::same(&result()?, &first)?;
        // The next launches use new values of the run-time argument, and then new inputs.
        g.set_argument(&s, 0.75f32)?;
        g.launch()?;
        results::same(&result()?, &chain(&x, &factor(0.75)))?;
        g.bind(&[&other, &w])?;
        for v in [0.75f32, 1.25] {
            g.set_argument(&s, v)?;
            // The first launch with new inputs is not captured. The second one is, and all later launches use
            // its capture, also those with another argument.
            for _ in 0..3 {
                g.launch()?;
            }
            results::same(&result()?, &chain(&other, &factor(v)))?;
        }
        let remark = format!("{:?}", g.executable().captures());
        crate::child_section::emit(
            "captures",
            crate::event::Status::Passed,
            format!(
                "results equal those of runs without a capture, also with other arguments and inputs; {remark}"
            ),
        );
        let each = Timed { ours: t.ours / n as f64, theirs: Some(TARGET_SECONDS) };
        time(
            "launch of a captured graph",
            ("µs", 1e-6),
            each,
            "10 µs",
            Some(1.0),
            &format!("{n} launches in one capture, including the time of their kernels"),
        );
        Ok(())
    });
    Ok(())
}
