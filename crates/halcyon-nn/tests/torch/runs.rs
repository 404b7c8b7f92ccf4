//! Three networks are trained for 100 steps, each with two optimizers. Their losses must follow those of
//! PyTorch with the same initial weights and batches (`torch_runs.py`).

use crate::json;
use halcyon::Attention;
use halcyon::prelude::*;
use halcyon_nn::*;

/// The same values as `unit` of `torch_runs.py`.
fn unit(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / 8_388_608.0 - 1.0
        })
        .collect()
}

#[derive(Module)]
struct Mlp {
    fc1: Linear,
    fc2: Linear,
    fc3: Linear,
}

#[derive(Module)]
struct Cnn {
    conv1: Conv2d,
    conv2: Conv2d,
    norm: BatchNorm,
    fc: Linear,
}

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

#[derive(Module)]
struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

/// A network by its kind.
enum Net {
    Mlp(Mlp),
    Cnn(Box<Cnn>),
    Gpt(Box<Gpt>),
}

impl Module for Net {
    fn visit(&self, visit: &mut Visit<'_>) {
        match self {
            Net::Mlp(m) => m.visit(visit),
            Net::Cnn(m) => m.visit(visit),
            Net::Gpt(m) => m.visit(visit),
        }
    }
}

impl Net {
    fn new(b: &Backend, kind: &str) -> Result<Net> {
        let linear = |i, o| Linear::new(b, i, o);
        Ok(match kind {
            "mlp" => Net::Mlp(Mlp { fc1: linear(20, 32)?, fc2: linear(32, 24)?, fc3: linear(24, 5)? }),
            "cnn" => Net::Cnn(Box::new(Cnn {
                conv1: Conv2d::with(b, 1, 6, [3, 3], ConvOptions::default().padding(1))?,
                conv2: Conv2d::with(b, 6, 8, [3, 3], ConvOptions::default())?,
                norm: BatchNorm::new(b, 6)?,
                fc: linear(72, 5)?,
            })),
            _ => {
                let o = MultiHeadAttentionOptions { batch_first: true, ..Default::default() };
                let block = |_| {
                    Ok(Block {
                        norm1: LayerNorm::new(b, [16])?,
                        attention: MultiHeadAttention::with(b, 16, 2, o)?,
                        norm2: LayerNorm::new(b, [16])?,
                        up: linear(16, 64)?,
                        down: linear(64, 16)?,
                    })
                };
                Net::Gpt(Box::new(Gpt {
                    tokens: Embedding::new(b, 11, 16)?,
                    positions: Embedding::new(b, 12, 16)?,
                    blocks: (0..2).map(block).collect::<Result<_>>()?,
                    norm: LayerNorm::new(b, [16])?,
                    head: linear(16, 11)?,
                }))
            }
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        match self {
            Net::Mlp(m) => m.fc3.forward(&m.fc2.forward(&m.fc1.forward(x).relu()).tanh()),
            Net::Cnn(m) => {
                let pool = MaxPool::<2>::new(PoolOptions::new(2)).unwrap();
                let x = pool.forward(&m.norm.forward(&m.conv1.forward(x)).relu());
                m.fc.forward(&m.conv2.forward(&x).relu().flatten(1, -1))
            }
            Net::Gpt(m) => {
                let places = Tensor::arange(x.backend(), 12, DType::I32);
                let x = m.tokens.forward(x) + m.positions.forward(&places);
                let causal = Attention { causal: true, ..Attention::default() };
                let x = m.blocks.iter().fold(x, |x, b| {
                    let h = b.norm1.forward(&x);
                    let x = x + b.attention.forward(&h, &h, &h, causal);
                    x.clone() + b.down.forward(&b.up.forward(&b.norm2.forward(&x)).gelu())
                });
                m.head.forward(&m.norm.forward(&x)).flatten(0, 1)
            }
        }
    }

    /// Sets the same initial weights as `start` of `torch_runs.py`. The order of the parameters is the
    /// script's.
    fn start(&self, gain: f32) -> Result<()> {
        for (i, (path, slot)) in self.parameters().into_iter().enumerate() {
            let dims = slot.value().dims()?;
            let n: usize = dims.iter().product();
            let values = if dims.len() < 2 {
                vec![if path.contains("norm") && path.ends_with("weight") { 1.0 } else { 0.0 }; n]
            } else {
                let bound = f64::from(gain) / ((n / dims[0]) as f64).sqrt();
                unit(i as u64 + 1, n).into_iter().map(|v| v * bound as f32).collect()
            };
            slot.set(Tensor::from_slice(slot.value().backend(), &dims[..], &values)?)?;
        }
        Ok(())
    }
}

/// The same batch as `batch` of `torch_runs.py`.
fn batch(b: &Backend, kind: &str, step: usize) -> Result<(Tensor, Tensor)> {
    let seed = 1000 + step as u64 % 20;
    if kind == "gpt" {
        let first: Vec<i32> = unit(seed, 8).iter().map(|v| ((v + 1.0) * 5.5) as i32).collect();
        let (mut x, mut y): (Vec<i32>, Vec<i32>) = (vec![], vec![]);
        for row in first.chunks(2) {
            let mut row: Vec<i32> = row.iter().map(|v| (*v).clamp(0, 10)).collect();
            while row.len() < 13 {
                row.push((row[row.len() - 1] * 3 + row[row.len() - 2] + 1) % 11);
            }
            x.extend(&row[..12]);
            y.extend(&row[1..]);
        }
        return Ok((Tensor::from_slice(b, [4, 12], &x)?, Tensor::from_slice(b, [48], &y)?));
    }
    let dims: &[usize] = if kind == "mlp" { &[16, 20] } else { &[8, 1, 10, 10] };
    let x = unit(seed, dims.iter().product());
    let rows = x.chunks(x.len() / dims[0]);
    let y: Vec<i32> = rows.map(|r| r[..5].iter().fold(0f32, |s, v| s + v.abs() * 4.0) as i32 % 5).collect();
    Ok((Tensor::from_slice(b, dims, &x)?, Tensor::from_slice(b, [dims[0]], &y)?))
}

#[test]
fn losses_follow_torch_for_a_hundred_steps() {
    if halcyon_test::left_out("losses_follow_torch_for_a_hundred_steps") {
        return;
    }
    for b in halcyon_test::devices::devices("losses_follow_torch_for_a_hundred_steps", Level::O2) {
        for run in json("runs.json") {
            let (kind, optimizer) = (run["net"].as_str().unwrap(), run["optimizer"].as_str().unwrap());
            let net = Net::new(&b, kind).unwrap();
            net.start(if kind == "gpt" { 1.0 } else { 1.5 }).unwrap();
            let optimizer = match optimizer {
                "sgd" => Optimizer::new(&net, Sgd::new().rate(0.05).momentum(0.9)),
                _ => Optimizer::new(&net, Adam::w().rate(3e-3).eps(1e-5)),
            };
            let mut step = TrainStep::new(&net, optimizer.unwrap(), |net: &&Net, x: &[Tensor]| {
                Ok(vec![cross_entropy(&net.forward(&x[0]), &x[1], CrossEntropyOptions::default())])
            })
            .unwrap();
            for (i, want) in run["losses"].as_array().unwrap().iter().enumerate() {
                let (x, y) = batch(&b, kind, i).unwrap();
                let loss: f64 = step.run(&[&x, &y]).unwrap()[0].item().unwrap();
                let want = want.as_f64().unwrap();
                let off = (loss - want).abs() / want;
                assert!(off <= 1e-3, "{} {kind} step {i}: {loss}, PyTorch has {want}", b.id());
            }
        }
    }
}
