//! Compares the backends of this machine: one model, 3 warm-ups, 100 iterations on inputs of 8 × 64 × 256.
//!
//! `cargo run --release -p halcyon-compat --example 08_compare_backends`

use halcyon::prelude::*;
use halcyon_compat::factory::{BackendFactory, BaseBackend, OptimizationLevel, Vendors};
use halcyon_nn::{Activation, LayerNorm, Linear, Sequential};
use std::time::Instant;

pub(crate) const WARM_UPS: usize = 3;
pub(crate) const ITERATIONS: usize = 100;

fn model(b: &Backend) -> Result<Sequential> {
    Ok(Sequential::new()
        .then(Linear::new(b, 256, 32)?)
        .then(Activation::Relu)
        .then(Linear::new(b, 32, 256)?)
        .then(LayerNorm::new(b, [256])?))
}

/// Measures a backend. Returns the time of an iteration in milliseconds, the name of the device, and the
/// number of runs on the device.
pub(crate) fn measure(kind: BackendType) -> Result<(f64, String, u64)> {
    let backend = BackendFactory::create(kind, None)?;
    let model = backend.prepare_model(model(&backend)?, OptimizationLevel::O2)?;
    let model = backend.optimize_for_inference(model, None, None)?;
    let x = backend.randn([8, 64, 256], DType::F32);
    x.eval()?;

    for _ in 0..WARM_UPS {
        model.forward(&x)?;
    }
    backend.synchronize()?;

    let runs = backend.cache_stats().runs;
    let start = Instant::now();
    for _ in 0..ITERATIONS {
        model.forward(&x)?;
    }
    backend.synchronize()?;
    let elapsed = start.elapsed();

    let info = backend.get_device_info(None)?;
    let done = backend.cache_stats().runs - runs;
    Ok((elapsed.as_secs_f64() * 1e3 / ITERATIONS as f64, info.device_name, done))
}

#[allow(dead_code)]
fn main() {
    let all =
        [BackendType::Cpu, BackendType::NVIDIA, BackendType::AMD, BackendType::OpenCl, BackendType::WebGpu];
    for kind in all {
        match measure(kind) {
            Ok((ms, name, _)) => println!("{kind}: {ms:.2} ms per iteration on {name}"),
            Err(e) => println!("{kind}: not available ({e})"),
        }
    }
}
