//! Trains a convolutional network with batch normalisation and dropout on MNIST, in f32 or mixed precision.
//! It writes a checkpoint after each epoch and continues from the latest one when it is started again.
//!
//! `cargo run --release -p halcyon-train --example 10_mnist_cnn -- DATA [RUN [BACKEND [f32|bf16|f16]]]`
//!
//! `DATA` is a folder with MNIST's IDX files, compressed or not. If it has only the test files, the first
//! 8,000 of their rows are used for training and the last 2,000 for the test. `RUN` is the folder of the
//! checkpoints and the log; the default is `halcyon-mnist` in the folder for temporary files.

use halcyon::Error;
use halcyon::ir::passes::AmpPolicy;
use halcyon::prelude::*;
use halcyon_data::idx::{Split, mnist_part};
use halcyon_data::{DataLoader, Dataset, LoaderOptions};
use halcyon_nn::{
    Adam, BatchNorm, Conv2d, ConvOptions, CrossEntropyOptions, Dropout, Linear, MaxPool, Module, Optimizer,
    PoolOptions, Schedule, TrainStep, cross_entropy,
};
use halcyon_train::{
    CheckpointOptions, Checkpoints, Classification, Goal, JsonLog, ProgressBar, Report, Trainer,
    TrainerOptions,
};
use std::path::PathBuf;
use std::sync::Arc;

const CLASSES: usize = 10;

#[derive(Module)]
struct Net {
    conv1: Conv2d,
    norm1: BatchNorm,
    conv2: Conv2d,
    norm2: BatchNorm,
    pool: MaxPool<2>,
    dropout: Dropout,
    linear: Linear,
}

impl Net {
    fn new(b: &Backend) -> Result<Net> {
        let padded = ConvOptions::default().padding(1);
        Ok(Net {
            conv1: Conv2d::with(b, 1, 16, [3, 3], padded)?,
            norm1: BatchNorm::new(b, 16)?,
            conv2: Conv2d::with(b, 16, 32, [3, 3], padded)?,
            norm2: BatchNorm::new(b, 32)?,
            pool: MaxPool::new(PoolOptions::new(2))?,
            dropout: Dropout::new(0.2)?,
            linear: Linear::new(b, 32 * 7 * 7, CLASSES)?,
        })
    }

    /// Logits `[batch, 10]` of images `[batch, 1, 28, 28]` with values from 0 to 1.
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.pool.forward(&self.norm1.forward(&self.conv1.forward(x)).relu());
        let x = self.pool.forward(&self.norm2.forward(&self.conv2.forward(&x)).relu());
        self.linear.forward(&self.dropout.forward(&x.flatten(1, -1)))
    }
}

/// The share of the rows that the network classifies correctly.
fn accuracy(net: &Net, b: &Backend, data: &Arc<dyn Dataset>) -> Result<f64> {
    let mut counts = Classification::new(CLASSES);
    for batch in DataLoader::new(data.clone(), LoaderOptions::new(500))?.epoch() {
        let batch = batch?.to(b)?;
        counts.add(&net.forward(&batch[0]), &batch[1])?;
    }
    Ok(counts.accuracy())
}

/// What a run is: where its data and its files are, and how it trains.
pub(crate) struct Run {
    pub(crate) data: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) precision: AmpPolicy,
    pub(crate) epochs: u64,
    pub(crate) seed: u64,
    /// Ends the run after this number of steps, as an interruption would.
    pub(crate) steps: Option<u64>,
}

/// Trains, from the latest checkpoint if there is one.
pub(crate) fn train(b: &Backend, run: &Run) -> Result<Report> {
    b.manual_seed(run.seed);
    let [train, test] = [mnist_part(&run.data, Split::Train)?, mnist_part(&run.data, Split::Test)?];
    let net = Net::new(b)?;
    let mut loader = DataLoader::new(train, LoaderOptions::new(64).shuffle(run.seed).drop_last(true))?;
    let schedule = Schedule::one_cycle(0.01, run.epochs * loader.batches());
    let optimizer = Optimizer::builder(Adam::w().rate(0.01)).schedule(schedule).build(&net)?;
    let mut step = TrainStep::new(&net, optimizer, |net: &&Net, batch: &[Tensor]| {
        Ok(vec![cross_entropy(&net.forward(&batch[0]), &batch[1], CrossEntropyOptions::default())])
    })?;
    if run.precision != AmpPolicy::None {
        // With f16, the step scales its loss.
        step = step.amp(run.precision)?;
    }
    let options = CheckpointOptions { best: Some(("accuracy".into(), Goal::Largest)), ..Default::default() };
    let checkpoints = Checkpoints::new(run.folder.join("checkpoints"), options);
    let latest = checkpoints.latest()?;
    let options = TrainerOptions { epochs: run.epochs, steps: run.steps, ..TrainerOptions::default() };
    let mut trainer = Trainer::new(&net, step, options)
        .evaluate(|| Ok([("accuracy".to_string(), accuracy(&net, b, &test)?)].into()))
        .callback(ProgressBar::new(run.epochs)?)
        .callback(JsonLog::new(run.folder.join("log.jsonl")))
        .checkpoints(checkpoints);
    if let Some(latest) = latest {
        println!("continues from {}", latest.display());
        trainer.resume(&latest, &mut loader)?;
    }
    trainer.fit(&mut loader)
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let Some(data) = args.next() else {
        return Err(Error::argument("10_mnist_cnn", "name the folder with MNIST's IDX files"));
    };
    let folder = args.next().map_or_else(|| std::env::temp_dir().join("halcyon-mnist"), PathBuf::from);
    let backend = Backend::new(args.next().unwrap_or_else(|| "cpu".into()).parse()?)?;
    let precision = args.next().unwrap_or_else(|| "f32".into()).parse()?;
    println!("{}", backend.selection());
    let start = std::time::Instant::now();
    let run = Run { data: data.into(), folder, precision, epochs: 6, seed: 7, steps: None };
    let report = train(&backend, &run)?;
    let (accuracy, time) = (report.metrics["accuracy"], start.elapsed().as_secs_f64());
    println!("accuracy {accuracy:.4} after {} steps, {time:.1} s", report.step);
    println!("{}", run.folder.display());
    Ok(())
}
