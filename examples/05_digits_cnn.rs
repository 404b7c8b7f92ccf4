//! Trains a convolutional network on the digits data with AdamW, and prints the accuracy on the test images.
//!
//! `cargo run --release -p halcyon-nn --example 05_digits_cnn [BACKEND]`

use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_nn::{
    Adam, BatchNorm, Conv2d, ConvOptions, CrossEntropyOptions, Dropout, Linear, MaxPool, Module, Optimizer,
    PoolOptions, Schedule, TrainStep, cross_entropy,
};
use std::path::Path;

#[derive(Module)]
pub(crate) struct Net {
    conv1: Conv2d,
    norm: BatchNorm,
    conv2: Conv2d,
    pool: MaxPool<2>,
    dropout: Dropout,
    fc: Linear,
}

impl Net {
    pub(crate) fn new(b: &Backend) -> Result<Net> {
        let padded = ConvOptions::default().padding(1);
        Ok(Net {
            conv1: Conv2d::with(b, 1, 16, [3, 3], padded)?,
            norm: BatchNorm::new(b, 16)?,
            conv2: Conv2d::with(b, 16, 32, [3, 3], padded)?,
            pool: MaxPool::new(PoolOptions::new(2))?,
            dropout: Dropout::new(0.2)?,
            fc: Linear::new(b, 32 * 4 * 4, 10)?,
        })
    }

    /// Logits `[batch, 10]` of images `[batch, 1, 8, 8]` with values from 0 to 1.
    pub(crate) fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.norm.forward(&self.conv1.forward(x)).relu();
        let x = self.pool.forward(&self.conv2.forward(&x).relu());
        self.fc.forward(&self.dropout.forward(&x.flatten(1, -1)))
    }
}

/// Images `[n, 1, 8, 8]` and labels `[n]` of a part of the data, `train` or `test`.
fn load(b: &Backend, data: &Path, part: &str) -> Result<(Tensor, Tensor, usize)> {
    let file = Npz::open(data)?;
    let images = Tensor::from_data(b, &file.get(&format!("{part}_images"))?)?;
    let n = images.dims()?[0];
    let images = images.reshape([n, 1, 8, 8]).cast(DType::F32) * (1.0 / 16.0);
    let labels = Tensor::from_data(b, &file.get(&format!("{part}_labels"))?)?.cast(DType::I32);
    eval(&[images.clone(), labels.clone()])?;
    Ok((images, labels, n))
}

/// Trains for some epochs. Returns the accuracy on the test images.
pub(crate) fn train(b: &Backend, data: &Path, epochs: usize, seed: u64) -> Result<f64> {
    const BATCH: usize = 64;
    b.manual_seed(seed);
    let (images, labels, n) = load(b, data, "train")?;
    let net = Net::new(b)?;
    let steps = (epochs * (n / BATCH)) as u64;
    let schedule = Schedule::one_cycle(0.01, steps);
    let optimizer = Optimizer::builder(Adam::w()).schedule(schedule).build(&net)?;
    let mut step = TrainStep::new(&net, optimizer, |net: &&Net, batch: &[Tensor]| {
        // The batch is a list of row numbers; the images stay on the device.
        let (x, y) = (images.gather(&batch[0], 0), labels.gather(&batch[0], 0));
        Ok(vec![cross_entropy(&net.forward(&x), &y, CrossEntropyOptions::default())])
    })?;
    for epoch in 0..epochs {
        let order = Tensor::rand(b, [n], DType::F32, seed ^ (epoch as u64 + 1) << 32);
        let order = order.argsort(0, Default::default()).cast(DType::I32);
        let order = order.narrow(0, 0usize, n / BATCH * BATCH).reshape([n / BATCH, BATCH]);
        let mut total = 0.0;
        for k in 0..n / BATCH {
            let rows = order.narrow(0, k, 1usize).squeeze(0);
            total += step.run(&[&rows])?[0].item::<f64>()?;
        }
        println!("epoch {epoch}: loss {:.4}", total / (n / BATCH) as f64);
    }
    let (images, labels, n) = load(b, data, "test")?;
    let right = net.forward(&images).argmax(1).cast(DType::I32).eq(&labels).cast(DType::F32).sum(..);
    Ok(right.item::<f64>()? / n as f64)
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let backend = Backend::new(std::env::args().nth(1).unwrap_or_else(|| "cpu".into()).parse()?)?;
    println!("{}", backend.selection());
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/digits.npz");
    let start = std::time::Instant::now();
    let accuracy = train(&backend, &data, 12, 18)?;
    println!("accuracy on the test images {accuracy:.3}, {:.2} s", start.elapsed().as_secs_f64());
    Ok(())
}
