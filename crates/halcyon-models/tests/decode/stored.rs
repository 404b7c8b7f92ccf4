//! Small models of every family against the logits that transformers computes in float64.

use crate::common::*;
use halcyon::prelude::*;
use halcyon_formats::gguf::TensorInfo;
use halcyon_formats::npz::Npz;
use halcyon_models::rope::Scaling;
use halcyon_models::spec::Mixer;
use halcyon_models::{ModelFile, Source};
use halcyon_test::{Rng, devices, one_in};
use std::path::{Path, PathBuf};

/// The folders of `tests/data`.
pub(crate) fn folders() -> Vec<PathBuf> {
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let all = std::fs::read_dir(data).expect("the stored models").flatten().map(|e| e.path());
    let mut all: Vec<PathBuf> = all.filter(|p| p.join("config.json").is_file()).collect();
    all.sort();
    assert_eq!(all.len(), 31, "{all:?}");
    all
}

/// The folder of a family.
pub(crate) fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// How the prompt is fed.
#[derive(Clone, Copy, Debug)]
enum How {
    Whole,
    Chunks,
    Tokens,
}

/// Compares the logits and the continuation of a folder's model.
fn case(b: &Backend, dir: &Path, ways: &[How]) {
    compare(b, dir, &dir.join("expected.npz"), ways);
}

/// Compares the logits of a model with those in a file, and the continuation if the file has one.
fn compare(b: &Backend, dir: &Path, expected: &Path, ways: &[How]) {
    let stored = Npz::open(expected).expect("the expected values");
    let get = |name: &str| stored.get(name).expect("an array");
    let ids = |name: &str| -> Vec<u32> { get(name).to_vec::<i64>().iter().map(|v| *v as u32).collect() };
    let (prompt, want) = (ids("ids"), get("logits").to_vec::<f64>());
    let generated = if stored.get("generated").is_ok() { ids("generated") } else { vec![] };
    let source = Source::open(dir).expect("the model opens");
    let decoder = decoder(b, &source, (prompt.len() + generated.len()).next_multiple_of(4));
    let mean = want.iter().sum::<f64>() / want.len() as f64;
    let std = (want.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / want.len() as f64).sqrt();
    // These rotations depend on the length that a sequence has when a token is fed.
    let by_length = decoder.spec.layers.iter().any(|l| {
        let Mixer::Attention(a) = &l.mixer else { return false };
        a.rope.as_ref().is_some_and(|r| matches!(r.scaling, Scaling::Dynamic { .. } | Scaling::Long { .. }))
    });
    let mut first: Option<Vec<u32>> = None;
    for way in ways {
        let who = format!("{} on {} ({way:?})", dir.display(), b.id());
        let mut e = engine(&decoder, 1, if matches!(way, How::Chunks) { 5 } else { 512 });
        let got = match way {
            How::Tokens if by_length => continue,
            How::Tokens => prompt.iter().flat_map(|t| feed(&mut e, &[*t], false)).collect(),
            _ => feed(&mut e, &prompt, true),
        };
        assert_eq!(got.len(), want.len(), "{who}");
        let far = |(g, w): (&f32, &f64)| g.is_nan() || (f64::from(*g) - w).abs() > 1e-3 * std;
        if let Some(at) = got.iter().zip(&want).position(far) {
            panic!("{who}: logit {at} is {}, expected {}, deviation {std}", got[at], want[at]);
        }
        let got_bits = bits(&got);
        assert!(
            *first.get_or_insert_with(|| got_bits.clone()) == got_bits,
            "{who}: other bits than {:?}",
            ways[0]
        );
        let last = got[got.len() - decoder.spec.vocabulary..].to_vec();
        assert_eq!(greedy(&mut e, last, generated.len()), generated, "{who}");
    }
}

/// Files of llama.cpp's converter.
#[test]
fn gguf_files_compute_the_stored_logits_on_the_cpu() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let all = std::fs::read_dir(data.join("gguf")).expect("the stored files").flatten().map(|e| e.path());
    let files: Vec<PathBuf> = all.filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect();
    assert_eq!(files.len(), 12, "{files:?}");
    for file in files {
        let opened = ModelFile::open(&file).expect("the model opens");
        assert!(opened.tokenizer().expect("a file of the kind `none`").is_none(), "{}", file.display());
        let own = file.with_extension("npz");
        let folder = data.join(file.file_stem().expect("a name")).join("expected.npz");
        compare(&cpu, &file, if own.is_file() { &own } else { &folder }, &[How::Whole, How::Chunks]);
    }
}

#[test]
fn every_family_computes_the_stored_logits_on_the_cpu() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    for dir in folders() {
        case(&cpu, &dir, &[How::Whole, How::Chunks, How::Tokens]);
    }
}

/// Other devices compute the same graphs by kernels that have tests of their own, so a few families are
/// enough.
#[test]
fn some_families_compute_the_stored_logits_on_every_device() {
    let name = "some_families_compute_the_stored_logits_on_every_device";
    let mut rng = Rng::fresh(name);
    for b in devices::devices(name, Level::O2).into_iter().filter(|b| !is_cpu(b)) {
        let step = one_in(7);
        let first = rng.below(step);
        for dir in folders().iter().skip(first).step_by(step) {
            println!("{} on {}", dir.display(), b.id());
            case(&b, dir, &[How::Chunks]);
        }
    }
}

/// GGUF files of gpt-oss and GLM-4 name the norm before the feed-forward part so.
#[test]
fn the_second_norm_of_a_file_may_be_called_post_attention_norm() {
    let cpu = Backend::new(BackendType::Cpu).expect("the CPU");
    let logits = |tensors: &[(TensorInfo, Vec<u8>)]| {
        let decoder = decoder(&cpu, &file(&metadata("llama"), tensors), 8);
        bits(&feed(&mut engine(&decoder, 1, 512), &[1, 2, 3], true))
    };
    let mut all = tensors(None);
    let want = logits(&all);
    for (t, _) in &mut all {
        t.name = t.name.replace("ffn_norm", "post_attention_norm");
    }
    assert_eq!(logits(&all), want);
}
