//! One training loop for every backend: only the backend's name changes.
//!
//! `cargo run --release -p halcyon-compat --example 07_cross_platform [BACKEND]`

use halcyon::prelude::*;
use halcyon_compat::factory::{BaseBackend, OptimizationLevel, Prepared, get_backend};
use halcyon_nn::{
    Activation, Adam, CrossEntropyOptions, Linear, Optimizer, Sequential, TrainStep, cross_entropy,
};

const BATCH: usize = 64;
const BATCHES: usize = 8;

/// The result of a training.
#[derive(Debug)]
pub(crate) struct Trained {
    /// Mean loss of each epoch.
    pub losses: Vec<f64>,
    /// Share of the points that the trained model classifies correctly.
    pub accuracy: f64,
}

/// A batch on the host: points in a square, and for each point whether it lies inside a circle.
fn batch(number: usize) -> (Vec<f32>, Vec<i32>) {
    // A low-discrepancy sequence from powers of the plastic number (Roberts 2018).
    let at = |i: usize, a: f64| (((i as f64 + 0.5) * a).fract() * 2.0 - 1.0) as f32;
    let rows = number * BATCH..(number + 1) * BATCH;
    let points = rows.flat_map(|i| [at(i, 0.754_877_666), at(i, 0.569_840_291)]).collect::<Vec<f32>>();
    let inside = points.chunks(2).map(|p| i32::from(p[0].hypot(p[1]) < 0.7)).collect();
    (points, inside)
}

/// The warning for a program that found no accelerator.
pub(crate) fn cpu_warning(backend: &Backend) -> Option<&'static str> {
    (backend.backend_name() == "cpu").then_some("Warning: running on the CPU, which limits the speed")
}

/// Trains a small network on a backend; `None` means the best available device.
pub(crate) fn train(name: Option<&str>, epochs: usize) -> Result<Trained> {
    let backend = get_backend(name, None)?;
    println!("Training on: {}", backend.backend_name());
    if let Some(warning) = cpu_warning(&backend) {
        println!("{warning}");
    }
    backend.manual_seed(7);
    let model = Sequential::new()
        .then(Linear::new(&backend, 2, 32)?)
        .then(Activation::Relu)
        .then(Linear::new(&backend, 32, 2)?);
    let optimizer = Optimizer::new(&model, Adam::new().rate(0.02))?;

    let model = backend.prepare_model(model, OptimizationLevel::O2)?;
    let (model, optimizer) = backend.optimize_for_training(model, optimizer, None)?;
    let forward = |m: &&Prepared<Sequential>, batch: &[Tensor]| {
        let logits = m.forward(&batch[0]);
        Ok(vec![cross_entropy(&logits, &batch[1], CrossEntropyOptions::default())])
    };
    let mut step = TrainStep::new(&model, optimizer, forward)?;

    let cpu = Backend::cpu()?;
    let mut losses = vec![];
    for epoch in 0..epochs {
        let mut total = 0.0;
        for number in 0..BATCHES {
            let (points, inside) = batch(number);
            let inputs = backend.to_device(&Tensor::from_slice(&cpu, [BATCH, 2], &points)?)?;
            let targets = backend.to_device(&Tensor::from_slice(&cpu, [BATCH], &inside)?)?;
            total += step.run(&[&inputs, &targets])?[0].item::<f64>()?;
        }
        backend.synchronize()?;
        losses.push(total / BATCHES as f64);
        println!("Epoch {epoch}: Loss = {:.4}", losses[epoch]);
    }

    let mut right = 0;
    for number in 0..BATCHES {
        let (points, inside) = batch(number);
        let inputs = Tensor::from_slice(&backend, [BATCH, 2], &points)?;
        let found = model.forward(&inputs).argmax(1).to_vec::<i32>()?;
        right += found.iter().zip(&inside).filter(|(a, b)| a == b).count();
    }
    Ok(Trained { losses, accuracy: right as f64 / (BATCHES * BATCH) as f64 })
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let name = std::env::args().nth(1);
    let run = train(name.as_deref(), 20)?;
    let (first, last) = (run.losses.first().copied(), run.losses.last().copied());
    println!("loss {first:?} -> {last:?}, accuracy {:.3}", run.accuracy);
    Ok(())
}
