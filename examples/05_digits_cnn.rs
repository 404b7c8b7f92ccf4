//! Trains a small convolutional network on the digits data, prints its accuracy on the test images and writes
//! it as an ONNX model. `models/digits.onnx` was made by this example.
//!
//! `cargo run --release -p halcyon-train --example 05_digits_cnn [FILE [BACKEND]]`; without a file, the model
//! is `digits.onnx` in the folder for temporary files.

use halcyon::prelude::*;
use halcyon::{ConstData, Dim};
use halcyon_data::{Arrays, DataLoader, Dataset, DatasetExt, LoaderOptions};
use halcyon_formats::npz::Npz;
use halcyon_nn::{
    Adam, Conv2d, ConvOptions, CrossEntropyOptions, Linear, MaxPool, Module, Optimizer, PoolOptions,
    Schedule, TrainStep, cross_entropy,
};
use halcyon_train::{Callback, Classification, EpochReport, Flow, Trainer, TrainerOptions, write_onnx};
use std::path::Path;

/// Pixels of a side of an image, the largest value of a pixel, and the number of digits.
const SIDE: usize = 8;
const WHITE: f32 = 16.0;
const DIGITS: usize = 10;

#[derive(Module)]
pub(crate) struct Net {
    conv1: Conv2d,
    conv2: Conv2d,
    linear: Linear,
    pool: MaxPool<2>,
}

impl Net {
    fn new(b: &Backend) -> Result<Net> {
        let padded = ConvOptions::default().padding(1);
        Ok(Net {
            conv1: Conv2d::with(b, 1, 16, [3, 3], padded)?,
            conv2: Conv2d::with(b, 16, 32, [3, 3], padded)?,
            linear: Linear::new(b, 32 * SIDE / 4 * SIDE / 4, DIGITS)?,
            pool: MaxPool::new(PoolOptions::new(2))?,
        })
    }

    /// Logits `[batch, 10]` of images `[batch, 1, 8, 8]` with values from 0 to 1.
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.pool.forward(&self.conv1.forward(x).relu());
        let x = self.pool.forward(&self.conv2.forward(&x).relu());
        self.linear.forward(&x.flatten(1, -1))
    }
}

/// Each image with its label: unchanged, and moved by one pixel in each of eight directions. The pixels that
/// become free are black.
fn shifted(images: &[u8], labels: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut all, mut of) = (vec![], vec![]);
    for (image, label) in images.chunks(SIDE * SIDE).zip(labels) {
        for move_by in 0..9 {
            let (dy, dx) = (move_by / 3, move_by % 3);
            let from = |to: usize, d: usize| (to + d).checked_sub(1).filter(|i| *i < SIDE);
            for at in 0..SIDE * SIDE {
                let (y, x) = (from(at / SIDE, dy), from(at % SIDE, dx));
                all.push(y.zip(x).map_or(0, |(y, x)| image[y * SIDE + x]));
            }
            of.push(*label);
        }
    }
    (all, of)
}

/// The images `[n, 1, 8, 8]` with values from 0 to 1 and the labels of a part of the data, `train` or `test`.
fn load(data: &Path, part: &str) -> Result<impl Dataset + 'static> {
    let file = Npz::open(data)?;
    let mut images = file.get(&format!("{part}_images"))?.to_vec::<u8>();
    let mut labels = file.get(&format!("{part}_labels"))?.to_vec::<u8>();
    if part == "train" {
        (images, labels) = shifted(&images, &labels);
    }
    let images = ConstData::from_slice(&[labels.len(), 1, SIDE, SIDE], &images)?;
    let labels = ConstData::from_slice(&[labels.len()], &labels)?;
    Arrays::new([("image", images), ("label", labels)])?.scale("image", WHITE)?.cast("label", DType::I32)
}

/// Prints a line for each epoch.
struct Lines;

impl Callback for Lines {
    fn on_epoch(&mut self, r: &EpochReport) -> Result<Flow> {
        println!("epoch {}: loss {:.4}, accuracy {:.4}", r.epoch + 1, r.loss, r.metrics["accuracy"]);
        Ok(Flow::Continue)
    }
}

/// The share of the test images that the network classifies correctly.
fn accuracy(net: &Net, b: &Backend, data: &Path) -> Result<f64> {
    let mut counts = Classification::new(DIGITS);
    for batch in DataLoader::new(load(data, "test")?, LoaderOptions::new(360))?.epoch() {
        let batch = batch?.to(b)?;
        counts.add(&net.forward(&batch[0]), &batch[1])?;
    }
    Ok(counts.accuracy())
}

/// Trains for some epochs. Returns the network and its accuracy on the test images.
pub(crate) fn train(b: &Backend, data: &Path, epochs: u64, seed: u64) -> Result<(Net, f64)> {
    b.manual_seed(seed);
    let net = Net::new(b)?;
    let options = LoaderOptions::new(64).shuffle(seed).drop_last(true);
    let mut loader = DataLoader::new(load(data, "train")?, options)?;
    let steps = epochs * loader.batches();
    let optimizer = Optimizer::builder(Adam::w().rate(4e-3)).schedule(Schedule::Cosine { steps, least: 0.0 });
    let step = TrainStep::new(&net, optimizer.build(&net)?, |net: &&Net, batch: &[Tensor]| {
        Ok(vec![cross_entropy(&net.forward(&batch[0]), &batch[1], CrossEntropyOptions::default())])
    })?;
    let mut trainer = Trainer::new(&net, step, TrainerOptions { epochs, ..TrainerOptions::default() })
        .evaluate(|| Ok([("accuracy".to_string(), accuracy(&net, b, data)?)].into()))
        .callback(Lines);
    let found = trainer.fit(&mut loader)?.metrics["accuracy"];
    drop(trainer);
    Ok((net, found))
}

/// Writes the network as an ONNX model that takes `image`, any number of images, and gives `probabilities`.
/// Returns its size in bytes.
pub(crate) fn save(net: &Net, b: &Backend, file: &Path) -> Result<u64> {
    let side = Dim::from(SIDE);
    let image = Tensor::placeholder(b, DType::F32, [Dim::sym("batch"), Dim::from(1), side, side]);
    let probabilities = net.forward(&image).softmax(-1);
    write_onnx(net, &[("image", &image)], &[("probabilities", &probabilities)], file)
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let file = args.next().map_or_else(|| std::env::temp_dir().join("digits.onnx"), Into::into);
    let backend = Backend::new(args.next().unwrap_or_else(|| "cpu".into()).parse()?)?;
    println!("{}", backend.selection());
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.npz");
    let start = std::time::Instant::now();
    let (net, accuracy) = train(&backend, &data, 16, 18)?;
    let bytes = save(&net, &backend, &file)?;
    println!("accuracy on the test images {accuracy:.4}, {:.1} s", start.elapsed().as_secs_f64());
    println!("{} ({bytes} bytes)", file.display());
    Ok(())
}
