//! Semantic search: prints the lines of a file whose meaning is nearest to a question.
//!
//! `cargo run --release -p halcyon-models --example 06_embed -- MODEL FILE QUESTION`
//!
//! `MODEL` is a GGUF file or a folder of an embedder (BERT, XLM-R, ModernBERT, or a decoder), such as
//! sentence-transformers/all-MiniLM-L6-v2 from the Hugging Face Hub. `FILE` has one text per line.

use halcyon::prelude::*;
use halcyon_models::{EmbedOptions, Embedder};
use std::path::Path;

/// Texts with their vectors, all of length 1.
pub(crate) struct Index {
    model: Embedder,
    texts: Vec<String>,
    vectors: Vec<Vec<f32>>,
}

impl Index {
    pub(crate) fn new(mut model: Embedder, texts: Vec<String>) -> Result<Index> {
        let all: Vec<&str> = texts.iter().map(String::as_str).collect();
        let vectors = model.embed(&all)?;
        Ok(Index { model, texts, vectors })
    }

    /// The `n` nearest texts with the cosines of their angles to the question, the nearest first.
    pub(crate) fn search(&mut self, question: &str, n: usize) -> Result<Vec<(f32, &str)>> {
        let question = self.model.embed(&[question])?.remove(0);
        let cosine = |v: &Vec<f32>| v.iter().zip(&question).map(|(a, b)| a * b).sum::<f32>();
        let pairs = self.vectors.iter().map(cosine).zip(self.texts.iter().map(String::as_str));
        let mut found: Vec<(f32, &str)> = pairs.collect();
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.truncate(n);
        Ok(found)
    }
}

/// An embedder whose vectors have the length 1.
pub(crate) fn open(model: &Path, backend: &Backend) -> Result<Embedder> {
    let options = EmbedOptions { normalize: Some(true), ..EmbedOptions::default() };
    Embedder::open(backend, model, &options)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, file, question] = &args[..] else {
        return Err(halcyon::Error::argument("06_embed", "give MODEL, FILE and QUESTION"));
    };
    let io = |e: std::io::Error| halcyon::Error::Io { path: file.clone(), what: e.to_string() };
    let texts = std::fs::read_to_string(file).map_err(io)?;
    let texts = texts.lines().filter(|l| !l.trim().is_empty()).map(String::from).collect();
    let mut index = Index::new(open(Path::new(model), &Backend::auto()?)?, texts)?;
    for (cosine, text) in index.search(question, 5)? {
        println!("{cosine:.3}  {text}");
    }
    Ok(())
}
