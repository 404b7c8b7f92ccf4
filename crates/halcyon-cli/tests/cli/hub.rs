//! Tests of models by name, from the cache of Hugging Face's programs.

use crate::common::language::*;
use crate::common::*;
use std::fs;
use tempfile::TempDir;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A folder with `home/hub`, which has `tiny-Q4_K_M.gguf` of the repository `org/repo`.
fn cache() -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    files(dir.path());
    let repo = dir.path().join("home/hub/models--org--repo");
    let snapshot = repo.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).expect("a folder");
    fs::create_dir_all(repo.join("refs")).expect("a folder");
    fs::write(repo.join("refs/main"), COMMIT).expect("written");
    fs::copy(dir.path().join("tiny.gguf"), snapshot.join("tiny-Q4_K_M.gguf")).expect("copied");
    dir
}

fn run(dir: &TempDir, args: &[&str]) -> Done {
    let mut c = command(args);
    c.current_dir(dir.path()).env("HALCYON_CONFIG", "off").env("HF_HOME", dir.path().join("home"));
    // Nobody listens there.
    c.env("HF_ENDPOINT", "http://127.0.0.1:9").env_remove("HF_HUB_CACHE").env_remove("HF_HUB_OFFLINE");
    finish(&mut c)
}

#[test]
fn each_command_takes_the_name_of_a_model() {
    let dir = cache();
    let cpu = ["--backend", "cpu"];
    let cases: &[(&[&str], bool)] = &[
        (&["generate", "NAME", "-p", "once", "-n", "2"], true),
        (&["generate", "NAME", "-p", "once", "-n", "2", "--draft", "NAME"], true),
        (&["logits", "NAME", "--tokens", "ids.npy", "-o", "logits.npy"], true),
        (&["perplexity", "NAME", "-f", "text.txt", "-c", "64"], true),
        (&["embed", "NAME", "once"], true),
        (&["fit", "NAME", "-c", "64"], true),
        (&["bench", "llm", "NAME", "-p", "4", "-n", "0", "-r", "1"], true),
        (&["tokenize", "NAME", "once"], false),
        (&["inspect", "NAME"], false),
        (&["convert", "NAME", "out.gguf", "--dtype", "f16", "--overwrite"], false),
        (&["quantize", "NAME", "--type", "q8_0", "--dry-run"], false),
    ];
    for (args, device) in cases {
        for (name, offline) in [("hf:org/repo", false), ("hf:org/repo@main:Q4_K_M", true)] {
            let mut args: Vec<&str> = args.iter().map(|a| if *a == "NAME" { name } else { a }).collect();
            args.extend(device.then_some(cpu).into_iter().flatten());
            args.extend(offline.then_some("--offline"));
            run(&dir, &args).ok();
        }
    }
}

#[test]
fn a_name_that_is_not_in_the_cache_is_an_error_with_the_next_step() {
    let dir = cache();
    let tokenize = |name: &str, more: &[&str]| run(&dir, &[&["tokenize", name, "once"], more].concat());
    tokenize("hf:org/other", &["--offline"]).code_is(1, "run without --offline");
    tokenize("hf:org/repo:Q8_0", &["--offline"]).code_is(1, "run without --offline");
    tokenize("hf:org", &[]).code_is(2, "expected hf:ORG/REPO");
    tokenize("hf:org/repo:../x", &[]).code_is(2, "expected hf:ORG/REPO");
    run(&dir, &["inspect", "hf:org"]).code_is(2, "expected hf:ORG/REPO");
    run(&dir, &["fit", "hf:org/other", "--offline"]).code_is(1, "run without --offline");
    match cfg!(feature = "hub") {
        true => tokenize("hf:org/other", &[]).code_is(1, "HF_ENDPOINT"),
        false => tokenize("hf:org/other", &[]).code_is(3, "--features hub"),
    }
    let onnx = format!("{}/../../models/digits.onnx", env!("CARGO_MANIFEST_DIR"));
    run(&dir, &["fit", &onnx, "--offline"]).code_is(2, "only language models");
}
