//! Small models of every family against the logits that transformers computes in float64.

use crate::common::*;
pub(crate) use crate::compare::{How, case, compare, folder, folders};
use halcyon::prelude::*;
use halcyon_formats::gguf::TensorInfo;
use halcyon_models::ModelFile;
use halcyon_test::{Rng, devices, one_in};
use std::path::PathBuf;

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
    if halcyon_test::left_out("some_families_compute_the_stored_logits_on_every_device") {
        return;
    }
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
