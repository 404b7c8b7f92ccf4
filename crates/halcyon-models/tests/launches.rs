//! A warm step makes nothing new. The test runs alone in its process, because a device counts the kernels
//! that all backends of the process compile.

#[path = "decode/common.rs"]
mod common;

use common::*;
use halcyon::prelude::*;
use halcyon_test::devices;

#[test]
fn warm_steps_plan_and_compile_nothing() {
    let name = "warm_steps_plan_and_compile_nothing";
    for b in devices::devices(name, Level::O2) {
        let source = file(&metadata("llama"), &tensors(None));
        let decoder = decoder(&b, &source, 64);
        let mut e = engine(&decoder, 1, 512);
        feed(&mut e, &[1, 2, 3, 4, 5], false);
        // The second step finds what the first one left, such as buffers that are free again.
        for t in 6..8 {
            feed(&mut e, &[t], false);
        }
        let made = |b: &Backend| (b.cache_stats().plans_built, b.counters().compiles);
        let before = made(&b);
        for t in 8..20 {
            feed(&mut e, &[t], false);
        }
        assert_eq!(made(&b), before, "{}", b.id());
        assert_eq!(b.cache_stats().copies, 0, "{}: a cache was copied", b.id());
    }
}
