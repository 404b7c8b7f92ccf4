//! What the language commands read and write besides models: outputs that exist, files that are no models,
//! numbers with a sign, messages between quotes, adapters by name.

use crate::common::language::*;
use crate::common::*;
use halcyon::prelude::*;
use halcyon_models::{Lora, LoraOptions, ModelFile};
use std::fs;
use std::path::Path;
use std::process::Stdio;

#[test]
fn models_are_replaced_on_request_only() {
    let dir = folder();
    let path = |n: &str| dir.path().join(n);
    at(&dir, &["convert", "tiny.gguf", "made"]).ok();
    for args in [
        &["quantize", "tiny.gguf", "o.gguf", "--type", "q8_0"][..],
        &["convert", "tiny.gguf", "o.gguf", "--dtype", "f16"],
        &["convert", "made", "o.gguf"],
    ] {
        fs::write(path("o.gguf"), "old").expect("written");
        at(&dir, args).fails(2, &["o.gguf exists", "--overwrite"]);
        assert_eq!(fs::read(path("o.gguf")).expect("the old file"), b"old");
        let over = [args, &["--overwrite"]].concat();
        // One that fails leaves the old file.
        #[cfg(unix)]
        {
            let mut c = std::process::Command::new("bash");
            c.args(["-c", "trap '' XFSZ; ulimit -f 1; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_halcyon")]);
            let d = finish(c.args(&over).current_dir(dir.path()).env("HALCYON_CONFIG", "off"));
            d.fails(1, &["o.gguf"]);
            assert_eq!(fs::read(path("o.gguf")).expect("the old file"), b"old");
        }
        at(&dir, &over).ok();
        assert!(fs::read(path("o.gguf")).expect("the new file").starts_with(b"GGUF"));
        let mut mode = fs::metadata(path("o.gguf")).expect("a file").permissions();
        mode.set_readonly(true);
        fs::set_permissions(path("o.gguf"), mode).expect("its mode");
        at(&dir, &over).fails(2, &["read-only"]);
        fs::remove_file(path("o.gguf")).expect("removed");
    }
    let names = fs::read_dir(dir.path()).expect("a folder").flatten().map(|e| e.file_name());
    assert!(names.into_iter().all(|n| !n.to_string_lossy().contains(".tmp")));
}

#[test]
fn inputs_are_never_replaced() {
    let dir = folder();
    at(&dir, &["convert", "tiny.gguf", "made"]).ok();
    fs::create_dir(dir.path().join("made/1_Pooling")).expect("a folder");
    fs::write(dir.path().join("made/1_Pooling/config.json"), r#"{"pooling_mode_mean_tokens": true}"#)
        .expect("written");
    let before: Vec<Vec<u8>> = ["tiny.gguf", "ids.npy", "text.txt", "made/model.safetensors"]
        .map(|n| fs::read(dir.path().join(n)).expect("a file"))
        .to_vec();
    for args in [
        &["convert", "made", "made/model.safetensors", "--overwrite"][..],
        &["quantize", "made", "made/config.json", "--type", "q8_0", "--overwrite"],
        &["convert", "tiny.gguf", "./tiny.gguf", "--dtype", "f16", "--overwrite"],
        &["logits", "tiny.gguf", "--tokens", "ids.npy", "-o", "tiny.gguf"],
        &["logits", "tiny.gguf", "--tokens", "ids.npy", "-o", "ids.npy"],
        &["logits", "made", "--tokens", "ids.npy", "-o", "made/model.safetensors"],
        &["logits", "tiny.gguf", "--tokens", "ids.npy", "--lora", "text.txt", "-o", "text.txt"],
        &["embed", "tiny.gguf", "--tokens", "ids.npy", "-o", "ids.npy"],
        &["embed", "made", "--tokens", "ids.npy", "-o", "made/1_Pooling/config.json"],
        &["embed", "tiny.gguf", "--file", "text.txt", "-o", "text.txt"],
        &["embed", "tiny.gguf", "hello", "-o", "tiny.gguf"],
    ] {
        at(&dir, args).fails(2, &["the model itself, or another input"]);
    }
    let after: Vec<Vec<u8>> = ["tiny.gguf", "ids.npy", "text.txt", "made/model.safetensors"]
        .map(|n| fs::read(dir.path().join(n)).expect("a file"))
        .to_vec();
    assert!(before == after);
}

#[test]
fn files_that_are_no_models_are_called_what_they_are() {
    let dir = folder();
    let path = |n: &str| dir.path().join(n);
    fs::write(path("empty.gguf"), "").expect("written");
    fs::write(path("short.gguf"), "GG").expect("written");
    fs::write(path("cut.gguf"), &tiny(Tiny::default())[..300]).expect("written");
    fs::write(path("empty.safetensors"), "").expect("written");
    fs::write(path("one.safetensors"), b"\x02\0\0\0\0\0\0\0{}").expect("written");
    fs::write(path("model"), "some text\n").expect("written");
    fs::create_dir(path("none")).expect("a folder");
    fs::create_dir(path("adapters")).expect("a folder");
    fs::write(path("adapters/adapter_config.json"), "{}").expect("written");
    fs::create_dir(path("half")).expect("a folder");
    fs::write(path("half/config.json"), "{\"model_type\": \"llama\"}").expect("written");
    fs::write(path("half/model.safetensors"), "").expect("written");
    for command in [&["fit"][..], &["generate", "-p", "x"], &["chat"], &["bench", "llm"]] {
        for (file, part) in [
            ("empty.gguf", "not a GGUF file: this is an empty file"),
            ("short.gguf", "not a GGUF file: it has only 2 bytes"),
            ("cut.gguf", "but the file has only"),
            ("empty.safetensors", "this is an empty file"),
            ("one.safetensors", "Give the folder"),
            ("model", "not a GGUF file: this is a text file"),
            ("none", "config.json"),
            ("adapters", "--lora"),
            ("half", "this is an empty file"),
        ] {
            let d = at(&dir, &[command, &[file]].concat()).fails(1, &[part, file]);
            assert!(!d.err.contains("not an ONNX model:"), "{d:?}");
        }
    }
}

/// Numbers with a sign reach the option, which says what it expects.
#[test]
fn numbers_with_a_sign_are_values() {
    let dir = folder();
    let with = |command: &[&str], option: &str, value: &str| {
        let args = [command, &[option, value]].concat();
        at(&dir, &args).code_is(2, "expected a whole number");
    };
    for option in ["-p", "-n", "-d", "-r", "-c", "--chunk", "--n-cpu-moe"] {
        with(&["bench", "llm", "tiny.gguf"], option, "-1");
    }
    for option in ["-n", "-c", "--top-k", "--chunk", "--draft-max", "--parallel"] {
        with(&["generate", "tiny.gguf", "-p", "x"], option, "-1");
    }
    with(&["generate", "tiny.gguf", "-p", "x"], "--seed", "-2");
    with(&["embed", "tiny.gguf", "x"], "--max-tokens", "-1");
    with(&["quantize", "tiny.gguf", "o.gguf", "--type", "q8_0"], "--threads", "-1");
    with(&["convert", "tiny.gguf", "o"], "--threads", "0");
    at(&dir, &["fit", "tiny.gguf", "--batch", "-1"]).code_is(2, "'-1'");
    let most = usize::MAX.to_string();
    at(&dir, &["bench", "llm", "tiny.gguf", "-d", &most]).fails(2, &["bench llm", "at most"]);
    // Texts begin with a sign, too.
    at(&dir, &["tokenize", "tiny.gguf", "-5"]).ok();
}

#[test]
fn the_seed_minus_one_draws_a_new_one() {
    let dir = folder();
    let run = || {
        let args = ["generate", "tiny.gguf", "-p", "the", "-n", "24", "--ignore-eos", "--backend", "cpu"];
        at(&dir, &[&args[..], &["--seed", "-1", "--top-k", "0", "--top-p", "1", "-v"]].concat()).ok()
    };
    let (a, b) = (run(), run());
    assert!(a.err.contains("seed ") && a.out != b.out, "{a:?} {b:?}");
}

#[test]
fn a_message_between_quotes_is_no_command() {
    let dir = folder();
    fs::write(dir.path().join("in.txt"), "\"\"\"/quit\"\"\"\n\"\"\"\n/help\ntime\n\"\"\"\n/save c.json\n")
        .expect("written");
    let args = ["chat", "tiny.gguf", "-n", "2", "--ignore-eos", "--backend", "cpu"];
    let mut c = command(&args);
    c.current_dir(dir.path()).env("HALCYON_CONFIG", "off");
    c.stdin(Stdio::from(fs::File::open(dir.path().join("in.txt")).expect("an input")));
    finish(&mut c).ok();
    let text = fs::read_to_string(dir.path().join("c.json")).expect("saved");
    let v: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((&v[0]["content"], &v[2]["content"]), (&"/quit".into(), &"/help\ntime".into()), "{v}");
}

/// A folder of the hub's cache with adapters of the model.
fn hub_of_adapters(dir: &Path) {
    let model = ModelFile::open(&dir.join("tiny.gguf")).expect("a model");
    let cpu = Backend::cpu().expect("the CPU");
    let lora = Lora::new(&model, &cpu, &LoraOptions::default()).expect("adapters");
    let repo = dir.join("home/hub/models--org--lora");
    fs::create_dir_all(repo.join("refs")).expect("a folder");
    fs::write(repo.join("refs/main"), "0123").expect("written");
    lora.save(&repo.join("snapshots/0123"), "tiny").expect("written");
}

#[test]
fn adapters_have_names_too() {
    let dir = folder();
    hub_of_adapters(dir.path());
    let run = |args: &[&str]| {
        let mut c = command(&[args, &["--offline"]].concat());
        c.current_dir(dir.path()).env("HALCYON_CONFIG", "off").env("HF_HOME", dir.path().join("home"));
        c.env_remove("HF_HUB_CACHE");
        finish(&mut c)
    };
    let cpu = ["--backend", "cpu"];
    for lora in [["--lora", "hf:org/lora"], ["--lora-scaled", "hf:org/lora:0.5"]] {
        for args in [
            &["generate", "tiny.gguf", "-p", "the", "-n", "1"][..],
            &["embed", "tiny.gguf", "the"],
            &["fit", "tiny.gguf", "-c", "64"],
        ] {
            run(&[args, &lora, &cpu].concat()).ok();
        }
        run(&[&["convert", "tiny.gguf", "o.gguf", "--overwrite"][..], &lora].concat()).ok();
    }
    run(&["generate", "tiny.gguf", "-p", "x", "--lora", "hf:org/no"]).fails(1, &["run without --offline"]);
}

#[test]
fn the_number_of_proposals_has_a_range() {
    let dir = folder();
    for n in ["0", "16", "99"] {
        let d = at(&dir, &["generate", "tiny.gguf", "-p", "x", "--draft-max", n, "--lookup"]);
        d.fails(2, &["--draft-max", "from 1 to 15"]);
    }
    at(&dir, &["generate", "tiny.gguf", "-p", "x", "-n", "2", "--draft-max", "15", "--lookup"]).ok();
}

/// Paths need not be UTF-8, and texts must be.
#[cfg(unix)]
#[test]
fn a_text_that_is_not_utf8_is_named() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let dir = folder();
    let odd = OsStr::from_bytes(b"m\xfe.gguf");
    fs::copy(dir.path().join("tiny.gguf"), dir.path().join(odd)).expect("copied");
    let run = |args: &[&[u8]], what: &[&str]| {
        let mut c = command(&[]);
        c.args(args.iter().map(|a| OsStr::from_bytes(a))).current_dir(dir.path());
        let d = finish(c.env("HALCYON_CONFIG", "off"));
        assert_eq!(d.code, 2, "{d:?}");
        assert!(what.iter().all(|w| d.err.contains(w) || d.out.contains(w)), "{what:?}: {d:?}");
    };
    run(&[b"generate", b"m\xfe.gguf", b"-p", b"caf\xe9"], &["the value of -p", "caf\u{fffd}", "UTF-8"]);
    run(&[b"generate", b"m\xfe.gguf", b"--prompt=caf\xe9"], &["the value of --prompt", "caf\u{fffd}"]);
    run(&[b"tokenize", b"tiny.gguf", b"caf\xe9"], &["argument 3", "caf\u{fffd}"]);
    run(&[b"generate", b"tiny.gguf", b"-p", b"\xff", b"--json"], &["{", "the value of -p"]);
    // The path is no mistake.
    let mut c = command(&["tokenize"]);
    finish(c.arg(odd).arg("x").current_dir(dir.path()).env("HALCYON_CONFIG", "off")).ok();
}
