//! A decoder whose files choose the last token, as Qwen3-Embedding's do.

use crate::stored::folder;
use halcyon::prelude::*;
use halcyon_formats::npz::Npz;
use halcyon_models::export::{Content, WriteOptions, write};
use halcyon_models::{EmbedOptions, Embedder, Source};
use std::path::Path;

/// The vectors of the two texts, long and short.
fn vectors(model: &Path, options: &EmbedOptions) -> Vec<Vec<f32>> {
    let stored = Npz::open(&folder("qwen3-lasttoken").join("expected.npz")).expect("the expected values");
    let ids = |name: &str| -> Vec<u32> {
        stored.get(name).expect("ids").to_vec::<i64>().iter().map(|v| *v as u32).collect()
    };
    let cpu = Backend::cpu().expect("the CPU");
    let mut model = Embedder::open(&cpu, model, options).expect("the model opens");
    let (long, short) = (ids("long"), ids("short"));
    let both = model.embed_tokens(&[&long, &short]).expect("two texts");
    assert_eq!(model.embed_tokens(&[&short]).expect("one text")[0], both[1], "alone");
    both
}

/// transformers computed them as one batch, with padding on the left of the short text.
#[test]
fn the_last_token_is_the_vector_of_a_decoder() {
    let dir = folder("qwen3-lasttoken");
    let stored = Npz::open(&dir.join("expected.npz")).expect("the expected values");
    let want = stored.get("vectors").expect("vectors").to_vec::<f64>();
    let check = |got: &[Vec<f32>], who: &str| {
        let got = got.concat();
        assert_eq!(got.len(), want.len(), "{who}");
        let far = got.iter().zip(&want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max);
        assert!(far < 1e-5, "{who}: {far}");
    };
    check(&vectors(&dir, &EmbedOptions::default()), "folder");
    // A GGUF file says which token is meant, but not that vectors have the length 1.
    let to = tempfile::tempdir().expect("a folder");
    let file = to.path().join("m.gguf");
    let source = Source::open(&dir).expect("the model opens");
    let content = Content::of(&source).expect("the content");
    let kind = content.metadata.iter().find(|(k, _)| k == "qwen3.pooling_type").map(|(_, v)| v.clone());
    assert_eq!(kind, Some(3u32.into()));
    let types: Vec<_> = content.tensors.iter().map(|t| t.info.ty).collect();
    let mut how =
        WriteOptions { threads: None, requantise: false, interrupted: &|| false, progress: &mut || {} };
    write(&content, &types, &file, &mut how).expect("written");
    check(&vectors(&file, &EmbedOptions { normalize: Some(true), ..EmbedOptions::default() }), "GGUF");
}
