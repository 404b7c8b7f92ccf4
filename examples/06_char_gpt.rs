//! Trains a small character model with the structure of GPT-2 on a text of this repository, and generates
//! text with it.
//!
//! `cargo run --release -p halcyon-train --example 06_char_gpt [STEPS [BACKEND]]`

use halcyon::ops::Attention;
use halcyon::prelude::*;
use halcyon_data::{DataLoader, LoaderOptions, Text, TextOptions, Vocabulary};
use halcyon_nn::{
    Adam, Clip, CrossEntropyOptions, Embedding, LayerNorm, Linear, Module, MultiHeadAttention,
    MultiHeadAttentionOptions, Optimizer, Schedule, TrainStep, cross_entropy, evaluation,
};
use halcyon_train::{Trainer, TrainerOptions};
use std::path::Path;

/// Characters that the model sees at once, elements of an embedding, heads and blocks.
const CONTEXT: usize = 32;
const WIDTH: usize = 48;
const HEADS: usize = 4;
const BLOCKS: usize = 2;

#[derive(Module)]
struct Block {
    norm1: LayerNorm,
    attention: MultiHeadAttention,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(b: &Backend) -> Result<Block> {
        let o = MultiHeadAttentionOptions { batch_first: true, ..MultiHeadAttentionOptions::default() };
        Ok(Block {
            norm1: LayerNorm::new(b, [WIDTH])?,
            attention: MultiHeadAttention::with(b, WIDTH, HEADS, o)?,
            norm2: LayerNorm::new(b, [WIDTH])?,
            up: Linear::new(b, WIDTH, 4 * WIDTH)?,
            down: Linear::new(b, 4 * WIDTH, WIDTH)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Tensor {
        let h = self.norm1.forward(x);
        // No position sees a later position.
        let causal = Attention { causal: true, ..Attention::default() };
        let x = x + self.attention.forward(&h, &h, &h, causal);
        &x + self.down.forward(&self.up.forward(&self.norm2.forward(&x)).gelu())
    }
}

#[derive(Module)]
pub(crate) struct Gpt {
    characters: Embedding,
    places: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Gpt {
    fn new(b: &Backend, characters: usize) -> Result<Gpt> {
        Ok(Gpt {
            characters: Embedding::new(b, characters, WIDTH)?,
            places: Embedding::new(b, CONTEXT, WIDTH)?,
            blocks: (0..BLOCKS).map(|_| Block::new(b)).collect::<Result<_>>()?,
            norm: LayerNorm::new(b, [WIDTH])?,
            head: Linear::new(b, WIDTH, characters)?,
        })
    }

    /// Scores of the next character after each of `text`, `[rows, CONTEXT]`: `[rows * CONTEXT, characters]`.
    fn forward(&self, text: &Tensor) -> Tensor {
        let places = Tensor::arange(text.backend(), CONTEXT, DType::I32);
        let x = self.characters.forward(text) + self.places.forward(&places);
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        self.head.forward(&self.norm.forward(&x)).flatten(0, 1)
    }

    /// `start` and `count` more characters, each drawn by its probability. The model sees the last characters
    /// of the text so far. The positions after these characters hold filler, which no earlier position sees.
    pub(crate) fn write(&self, b: &Backend, v: &Vocabulary, start: &str, count: usize) -> Result<String> {
        let mut text = v.encode(start)?;
        for _ in 0..count {
            let known = text.len().min(CONTEXT);
            let mut seen = vec![0; CONTEXT];
            seen[..known].copy_from_slice(&text[text.len() - known..]);
            let seen = Tensor::from_slice(b, [1, CONTEXT], &seen)?;
            let p = evaluation(|| self.forward(&seen).softmax(-1).narrow(0, known - 1, 1usize));
            let draw = b.rand([1], DType::F32).item::<f32>()?;
            let mut sum = 0.0;
            let next = p.to_vec::<f32>()?.into_iter().position(|p| {
                sum += p;
                sum > draw
            });
            text.push(next.unwrap_or(0) as i32);
        }
        v.decode(&text)
    }
}

/// The model after some steps, its characters, and its mean losses in the first and the last tenth.
pub(crate) fn train(b: &Backend, file: &Path, steps: u64) -> Result<(Gpt, Vocabulary, [f64; 2])> {
    b.manual_seed(6);
    let data = Text::open(file, TextOptions::new(CONTEXT).stride(4))?;
    let vocabulary = data.vocabulary().clone();
    let mut loader = DataLoader::new(data, LoaderOptions::new(16).shuffle(6).drop_last(true))?;
    let gpt = Gpt::new(b, vocabulary.size())?;
    let optimizer = Optimizer::builder(Adam::w().rate(4e-3))
        .clip(Clip::Norm(1.0))
        .schedule(Schedule::one_cycle(4e-3, steps))
        .build(&gpt)?;
    let step = TrainStep::new(&gpt, optimizer, |gpt: &&Gpt, batch: &[Tensor]| {
        let next = batch[1].flatten(0, -1);
        Ok(vec![cross_entropy(&gpt.forward(&batch[0]), &next, CrossEntropyOptions::default())])
    })?;
    let losses = std::cell::RefCell::new(vec![]);
    let options = TrainerOptions { epochs: u64::MAX, steps: Some(steps), ..TrainerOptions::default() };
    Trainer::new(&gpt, step, options).callback(Losses(&losses)).fit(&mut loader)?;
    let losses = losses.into_inner();
    let part = losses.len().div_ceil(10).max(1);
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
    let both = [mean(&losses[..part.min(losses.len())]), mean(&losses[losses.len().saturating_sub(part)..])];
    Ok((gpt, vocabulary, both))
}

/// Records the loss of each step.
struct Losses<'a>(&'a std::cell::RefCell<Vec<f64>>);

impl halcyon_train::Callback for Losses<'_> {
    fn on_step(&mut self, r: &halcyon_train::StepReport) -> Result<halcyon_train::Flow> {
        self.0.borrow_mut().push(r.loss);
        if r.step.is_multiple_of(50) {
            println!("step {}: loss {:.3}, {:.0} windows/s", r.step, r.loss, r.samples_per_s);
        }
        Ok(halcyon_train::Flow::Continue)
    }
}

#[allow(dead_code)]
fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let steps = args.next().map_or(Ok(600), |s| s.parse());
    let steps = steps.map_err(|e| halcyon::Error::argument("STEPS", format!("{e}")))?;
    let backend = Backend::new(args.next().unwrap_or_else(|| "cpu".into()).parse()?)?;
    println!("{}", backend.selection());
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/train/text.txt");
    let (gpt, vocabulary, [first, last]) = train(&backend, &file, steps)?;
    println!("loss {first:.3} -> {last:.3} in {steps} steps");
    println!("{}", gpt.write(&backend, &vocabulary, "The device ", 200)?);
    Ok(())
}
