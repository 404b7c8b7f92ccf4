//! What a launch of a captured graph costs beside the work itself.

use super::{Bench, Timed, drawn, part, time};
use crate::own::Own;
use halcyon::Error;
use halcyon::prelude::*;

/// Seconds for each launch.
const BOUND: f64 = 10e-6;

pub fn main(o: &Own) -> Result<()> {
    let steps = if o.tiny { 8 } else { 256 };
    // Without PyTorch: the bound is a time.
    let mut bench = Bench::new(&Own { torch: false, ..o.clone() });
    let b = o.open(Level::O2)?;
    part("launch of a captured graph", || {
        let (x, w) = (drawn(&b, &[16, 16], DType::F32, 1)?, drawn(&b, &[16, 16], DType::F32, 2)?);
        // Products that need each other: nothing joins them.
        let g = b.capture_graph(|| [(0..steps).fold(x.clone(), |x, _| x.matmul(&w).tanh())])?;
        let count = |b: &Backend| b.counters().launches + b.counters().library_calls;
        g.replay()?;
        b.synchronize()?;
        let before = count(&b);
        g.replay()?;
        b.synchronize()?;
        let n = count(&b) - before;
        if n < steps as u64 {
            return Err(Error::internal(format!("{steps} products became {n} launches")));
        }
        let t = bench.replay(false, &b, &g)?;
        let each = Timed { ours: t.ours / n as f64, theirs: Some(BOUND) };
        time(
            "launch of a captured graph",
            ("µs", 1e-6),
            each,
            "10 µs",
            Some(1.0),
            &format!("{n} launches a replay, with their work"),
        );
        Ok(())
    });
    Ok(())
}
