//! Trains an MLP with SGD on the digits data, using the gradient pass.
//!
//! `cargo run --release -p halcyon --example 03_train_mlp [BACKEND]`

use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use std::path::Path;

/// Initial values of the layers, in the order `w0, b0, w1, b1`.
pub type Weights = Vec<halcyon::ConstData>;

#[derive(Debug)]
pub struct Run {
    /// Loss before each step.
    pub losses: Vec<f64>,
    pub weights: Vec<Vec<f64>>,
    /// Number of plans built, after each step.
    pub plans: Vec<u64>,
}

/// Runs `steps` steps of plain SGD. Each batch has `batch` consecutive rows; after the last row, the rows
/// continue from the first.
pub fn train(
    backend: &Backend,
    data: &Path,
    start: &Weights,
    steps: usize,
    batch: usize,
    rate: f64,
) -> Result<Run> {
    let file = Npz::open(data)?;
    let images = Tensor::from_data(backend, &file.get("train_images")?)?;
    let rows = images.dims()?[0];
    let images = images.reshape([rows, 64]).cast(DType::F32) * (1.0 / 16.0);
    let labels = Tensor::from_data(backend, &file.get("train_labels")?)?.cast(DType::I32);
    eval(&[images.clone(), labels.clone()])?;

    let params: Vec<State> =
        start.iter().map(|d| Ok(State::new(Tensor::from_data(backend, d)?))).collect::<Result<_>>()?;
    let mut run = Run { losses: vec![], weights: vec![], plans: vec![] };
    for s in 0..steps {
        // The first row and the learning rate are arguments, so every step runs the same plan.
        let first = Tensor::scalar(backend, (s * batch) % rows, DType::I32);
        let n = Tensor::scalar(backend, rows, DType::I32);
        let index = (Tensor::arange(backend, batch, DType::I32) + first).rem(&n);
        let (x, y) = (images.gather(&index, 0), labels.gather(&index, 0));
        let leaves: Vec<Tensor> = params.iter().map(|p| p.value().requires_grad()).collect::<Result<_>>()?;
        let (loss, grads) = value_and_grad(&leaves, |w| {
            let hidden = (x.matmul(&w[0]) + &w[1]).relu();
            Ok((hidden.matmul(&w[2]) + &w[3]).cross_entropy(&y))
        })?;
        let mut wanted = vec![loss.clone()];
        for ((p, w), g) in params.iter().zip(&leaves).zip(&grads) {
            p.write(w - g * rate)?;
            wanted.push(p.value());
        }
        eval(&wanted)?;
        run.losses.push(loss.item::<f64>()?);
        run.plans.push(backend.cache_stats().plans_built);
    }
    for p in &params {
        run.weights.push(p.value().to_vec::<f64>()?);
    }
    Ok(run)
}

/// Seeded initial values for use without a file: uniform in ±sqrt(6 / fan-in).
fn initial() -> Result<Weights> {
    let mut seed = 0x2545_F491_4F6C_DD1Du64;
    let mut uniform = |n: usize, bound: f64| -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                ((seed >> 11) as f64 / (1u64 << 53) as f64 * 2.0 - 1.0) as f32 * bound as f32
            })
            .collect()
    };
    Ok(vec![
        halcyon::ConstData::from_slice(&[64, 32], &uniform(64 * 32, (6.0f64 / 64.0).sqrt()))?,
        halcyon::ConstData::from_slice(&[32], &[0f32; 32])?,
        halcyon::ConstData::from_slice(&[32, 10], &uniform(320, (6.0f64 / 32.0).sqrt()))?,
        halcyon::ConstData::from_slice(&[10], &[0f32; 10])?,
    ])
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let backend = Backend::new(std::env::args().nth(1).unwrap_or_else(|| "cpu".into()).parse()?)?;
    println!("{}", backend.selection());
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.npz");
    let start = std::time::Instant::now();
    let run = train(&backend, &data, &initial()?, 200, 64, 0.1)?;
    let last = run.losses.len() - 1;
    println!(
        "loss {:.4} -> {:.4} in {} steps, {:.2} s",
        run.losses[0],
        run.losses[last],
        last + 1,
        start.elapsed().as_secs_f64()
    );
    println!("plans built: {} after step 2, {} at the end", run.plans[1], run.plans[last]);
    Ok(())
}
