//! Runs training steps on the CPU backend for `cargo xtask bench peers`. `xtask/src/bench.rs` describes the
//! protocol. With `--steps ITEM N` it runs N steps of an item and prints their mean time, for profilers.

use halcyon::ir::Error;
use halcyon::prelude::*;
use halcyon::{AmpPolicy, Attention};
use halcyon_nn::{
    Adam, Conv2d, ConvOptions, CrossEntropyOptions, Dropout, Embedding, LayerNorm, Linear, MaxPool, Module,
    MultiHeadAttention, MultiHeadAttentionOptions, Optimizer, PoolOptions, TrainStep, cross_entropy,
};
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::Instant;

/// Maps rows of 784 elements to 10 classes, with two hidden layers of 512 elements.
#[derive(Module)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Tensor {
        self.fc3.forward(&self.fc2.forward(&self.fc1.forward(x).relu()).relu())
    }
}

/// Maps images `[batch, 1, 28, 28]` to 10 classes.
#[derive(Module)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    pool: MaxPool<2>,
    dropout1: Dropout,
    fc1: Linear,
    dropout2: Dropout,
    fc2: Linear,
}

impl Cnn {
    fn forward(&self, x: &Tensor) -> Tensor {
        let x = self.conv2.forward(&self.conv1.forward(x).relu()).relu();
        let x = self.dropout1.forward(&self.pool.forward(&x)).flatten(1, -1);
        self.fc2.forward(&self.dropout2.forward(&self.fc1.forward(&x).relu()))
    }
}

const VOCABULARY: usize = 65;
const CONTEXT: usize = 256;
const WIDTH: usize = 384;

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

/// A decoder of 6 layers, 384 wide, with 6 heads and a context of 256.
#[derive(Module)]
struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    /// Maps indices `[batch, 256]` (i32) to logits `[batch, 256, 65]`.
    fn forward(&self, x: &Tensor) -> Tensor {
        let causal = Attention { causal: true, ..Attention::default() };
        let places = Tensor::arange(x.backend(), CONTEXT, DType::I32);
        let x = self.tokens.forward(x) + self.positions.forward(&places);
        let x = self.blocks.iter().fold(x, |x, b| {
            let h = b.norm1.forward(&x);
            let x = x + b.attention.forward(&h, &h, &h, causal);
            let h = b.up.forward(&b.norm2.forward(&x)).gelu();
            x + b.down.forward(&h)
        });
        self.head.forward(&self.norm.forward(&x))
    }
}

/// Number of different batches, which the steps use in turn. If every step used the same batch, the gradients
/// would soon be denormal numbers, and arithmetic with denormal numbers is slow.
const BATCHES: usize = 32;

type Job = Box<dyn FnMut() -> Result<()>>;

/// Returns a function that runs one step per call. Each call uploads its batch, as training does.
fn step_of<M: Module + 'static>(
    b: &Backend,
    module: M,
    shapes: [(&[usize], u64); 2],
    forward: impl Fn(&M, &Tensor, &Tensor) -> Tensor + 'static,
) -> Result<Job> {
    let optimizer = Optimizer::new(&module, Adam::w())?;
    let mut step = TrainStep::new(module, optimizer, move |m: &M, batch: &[Tensor]| {
        Ok(vec![forward(m, &batch[0], &batch[1])])
    })?;
    let mut state = 1u64;
    let mut next = move |below: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % below
    };
    let [(x, classes), (y, labels)] = shapes;
    let (x, y, b) = (x.to_vec(), y.to_vec(), b.clone());
    let batches: Vec<(Vec<f32>, Vec<i32>, Vec<i32>)> = (0..BATCHES)
        .map(|_| {
            let n = x.iter().product();
            // With 0 classes the elements are numbers, not indices.
            let (floats, indices) = if classes == 0 { (n, 0) } else { (0, n) };
            let floats = (0..floats).map(|_| next(1 << 20) as f32 / (1 << 20) as f32).collect();
            let indices = (0..indices).map(|_| next(classes) as i32).collect();
            (floats, indices, (0..y.iter().product()).map(|_| next(labels) as i32).collect())
        })
        .collect();
    let mut turn = 0;
    Ok(Box::new(move || {
        let (floats, indices, labels) = &batches[turn % BATCHES];
        turn += 1;
        let data = match classes {
            0 => Tensor::from_slice(&b, x.as_slice(), floats)?,
            _ => Tensor::from_slice(&b, x.as_slice(), indices)?,
        };
        let loss = step.run(&[&data, &Tensor::from_slice(&b, y.as_slice(), labels)?])?;
        let loss = loss[0].item::<f32>()?;
        match loss.is_finite() {
            true => Ok(()),
            false => Err(Error::argument("step", format!("the loss is {loss}"))),
        }
    }))
}

fn job(b: &Backend, item: &str) -> Result<Option<Job>> {
    let loss = |logits: &Tensor, y: &Tensor| cross_entropy(logits, y, CrossEntropyOptions::default());
    let linear = |i, o| Linear::new(b, i, o);
    Ok(match item.split_once('.').map_or("", |(_, n)| n) {
        "mlp" => {
            let net = Mlp { fc1: linear(784, 512)?, fc2: linear(512, 512)?, fc3: linear(512, 10)? };
            let shapes: [(&[usize], u64); 2] = [(&[128, 784], 0), (&[128], 10)];
            Some(step_of(b, net, shapes, move |m, x, y| loss(&m.forward(x), y))?)
        }
        "cnn" => {
            let conv = |i, o| Conv2d::with(b, i, o, [3, 3], ConvOptions::default());
            let net = Cnn {
                conv1: conv(1, 32)?,
                conv2: conv(32, 64)?,
                pool: MaxPool::new(PoolOptions::new(2))?,
                dropout1: Dropout::new(0.25)?,
                fc1: linear(9216, 128)?,
                dropout2: Dropout::new(0.5)?,
                fc2: linear(128, 10)?,
            };
            let shapes: [(&[usize], u64); 2] = [(&[64, 1, 28, 28], 0), (&[64], 10)];
            Some(step_of(b, net, shapes, move |m, x, y| loss(&m.forward(x), y))?)
        }
        "gpt" => {
            let o = MultiHeadAttentionOptions { batch_first: true, ..MultiHeadAttentionOptions::default() };
            let block = |_| {
                Ok(Block {
                    norm1: LayerNorm::new(b, [WIDTH])?,
                    attention: MultiHeadAttention::with(b, WIDTH, 6, o)?,
                    norm2: LayerNorm::new(b, [WIDTH])?,
                    up: linear(WIDTH, 4 * WIDTH)?,
                    down: linear(4 * WIDTH, WIDTH)?,
                })
            };
            let net = Gpt {
                tokens: Embedding::new(b, VOCABULARY, WIDTH)?,
                positions: Embedding::new(b, CONTEXT, WIDTH)?,
                blocks: (0..6).map(block).collect::<Result<_>>()?,
                norm: LayerNorm::new(b, [WIDTH])?,
                head: linear(WIDTH, VOCABULARY)?,
            };
            let shapes: [(&[usize], u64); 2] =
                [(&[16, CONTEXT], VOCABULARY as u64), (&[16 * CONTEXT], VOCABULARY as u64)];
            let flat = |x: Tensor| x.reshape([16 * CONTEXT, VOCABULARY]);
            Some(step_of(b, net, shapes, move |m, x, y| loss(&flat(m.forward(x)), y))?)
        }
        _ => None,
    })
}

/// The largest resident size of this process so far, in bytes; `None` if the system does not report it.
fn peak_memory() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|l| l.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// The arguments after an option.
fn after<'a>(args: &'a [String], name: &str) -> Option<&'a [String]> {
    args.iter().position(|a| a == name).map(|i| &args[i + 1..])
}

fn serve(open: impl Fn(&str) -> Result<Backend>) -> Result<()> {
    let say = |v: Value| {
        let mut out = std::io::stdout().lock();
        // If the parent has exited, this process ends at its next read.
        let _ = writeln!(out, "{v}").and_then(|_| out.flush());
    };
    say(json!({"name": format!("halcyon {}", env!("CARGO_PKG_VERSION"))}));
    let mut current: Option<(String, Job)> = None;
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let item = line.trim();
        if current.as_ref().is_none_or(|(name, _)| name != item) {
            current = None;
            let made = open(item).and_then(|b| {
                let Some(mut f) = job(&b, item)? else { return Ok(None) };
                f()?;
                f()?;
                Ok(Some(f))
            });
            match made {
                Ok(Some(f)) => current = Some((item.to_string(), f)),
                Ok(None) => say(json!({"unsupported": format!("there is no item {item}")})),
                Err(e) => say(json!({"unsupported": e.to_string()})),
            }
        }
        if let Some((_, f)) = &mut current {
            let (start, mut n) = (Instant::now(), 0u32);
            while n == 0 || start.elapsed().as_millis() < 30 {
                f()?;
                n += 1;
            }
            let seconds = start.elapsed().as_secs_f64() / f64::from(n);
            say(json!({"seconds": seconds, "peak_memory": peak_memory()}));
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = after(&args, "--threads").and_then(|a| a.first()).and_then(|n| n.parse().ok());
    let open = |item: &str| {
        let low = item.split('.').next().is_some_and(|k| k.ends_with("16"));
        let amp = if low { AmpPolicy::Bf16 } else { AmpPolicy::None };
        let b = Backend::builder().backend_type(BackendType::Cpu).amp(amp).force_amp(low);
        threads.into_iter().fold(b, |b, n| b.num_threads(n)).build()
    };
    if let Some([item, n, ..]) = after(&args, "--steps") {
        let b = open(item)?;
        let n: u32 = n.parse().unwrap_or(10);
        let Some(mut f) = job(&b, item)? else { return Ok(()) };
        f()?;
        f()?;
        let start = Instant::now();
        for _ in 0..n {
            f()?;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3 / f64::from(n);
        println!("{item}: {ms:.3} ms per step, {} MB", peak_memory().unwrap_or(0) >> 20);
        return Ok(());
    }
    match args.iter().any(|a| a == "--serve") {
        true => serve(open),
        false => {
            println!("usage: bench_train --serve [--threads N], or --steps ITEM N; see xtask/src/bench.rs");
            Ok(())
        }
    }
}
