//! Tests of the commands for language models, with a small model of random weights.

use crate::common::language::*;
use crate::common::*;
use halcyon_formats::npy;
use halcyon_ir::{ConstData, DType};
use serde_json::Value;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use tempfile::TempDir;

/// `at`, on the CPU.
fn cpu(dir: &TempDir, args: &[&str]) -> Done {
    at(dir, &[args, &["--backend", "cpu"]].concat())
}

/// A command that reads `input`.
fn with_input(dir: &TempDir, args: &[&str], input: &str) -> Done {
    let mut c = command(args);
    c.current_dir(dir.path()).env("HALCYON_CONFIG", "off");
    let mut child = c
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the command starts");
    // A command that ends early closes its input.
    let _ = child.stdin.take().expect("an input").write_all(input.as_bytes());
    let o = child.wait_with_output().expect("the command ends");
    Done {
        code: o.status.code().unwrap_or(-1),
        out: String::from_utf8(o.stdout).expect("stdout is text"),
        err: String::from_utf8(o.stderr).expect("stderr is text"),
    }
}

fn ids(v: &Value) -> Vec<u64> {
    v.as_array().expect("a list").iter().map(|t| t.as_u64().expect("a token")).collect()
}

fn write_ids(path: &Path, ids: &[i64]) {
    npy::write(path, &ConstData::from_slice(&[ids.len()], ids).expect("fits")).expect("written");
}

/// Greedy generation of tokens that may be any.
const GREEDY: [&str; 3] = ["--temperature", "0", "--ignore-eos"];

#[test]
fn generate_prints_the_text_only() {
    let dir = folder();
    let args = [&["generate", "tiny.gguf", "-p", "time in the", "-n", "12"][..], &GREEDY].concat();
    let plain = cpu(&dir, &args).ok();
    let v = cpu(&dir, &[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(plain.out, format!("{}\n", v["text"].as_str().expect("a text")), "{plain:?}");
    for part in ["prompt: ", "answer: 12 tokens", "tokens/s", "cpu"] {
        assert!(plain.err.contains(part), "{part}: {}", plain.err);
    }
    assert_eq!(ids(&v["tokens"]).len(), 12);
    assert_eq!((&v["finish_reason"], &v["backend"]), (&"length".into(), &"cpu:0".into()));
    assert!(v["prompt_tokens"].as_u64() > Some(2), "{v}");
    for key in ["prompt_ms", "prompt_per_second", "predicted_n", "predicted_ms", "predicted_per_second"] {
        assert!(v["timings"][key].as_f64().is_some_and(|n| n >= 0.0), "{key}: {v}");
    }
    // The same model by the other option, and the prompt from standard input.
    let named = ["generate", "-m", "tiny.gguf", "-p", "-", "-n", "12", "--backend", "cpu"];
    let read = with_input(&dir, &[&named[..], &GREEDY].concat(), "time in the").ok();
    assert_eq!(read.out, plain.out);
    assert_eq!(cpu(&dir, &[&args[..], &["-q"]].concat()).ok().err, "");
}

#[test]
fn a_seed_gives_the_same_text_again() {
    let dir = folder();
    let run = |more: &[&str]| {
        let args = ["generate", "tiny.gguf", "-p", "the", "-n", "24", "--ignore-eos", "--json"];
        let v = cpu(&dir, &[&args[..], more].concat()).ok().json();
        ids(&v["tokens"])
    };
    let all = ["--top-k", "0", "--top-p", "1", "--min-p", "0"];
    let seeded = |seed: &str| run(&[&all[..], &["--seed", seed]].concat());
    assert_eq!(seeded("7"), seeded("7"));
    assert_ne!(seeded("7"), seeded("8"));
    assert_ne!(run(&all), run(&all), "24 tokens of 300 are drawn twice");
    let greedy = run(&["--temperature", "0", "--seed", "1"]);
    assert_eq!(greedy, run(&["--temperature", "0", "--seed", "2"]));
    assert_eq!(greedy, run(&["--top-k", "1"]));
    // How the prompt is cut, and a cache in f32, change no choice here.
    assert_eq!(greedy, run(&["--temperature", "0", "--chunk", "1"]));
}

#[test]
fn generation_ends_at_a_stop_string_and_at_the_end_of_the_context() {
    let dir = folder();
    let args = [&["generate", "tiny.gguf", "-p", "the", "--json"][..], &GREEDY].concat();
    let run = |more: &[&str]| cpu(&dir, &[&args[..], more].concat()).ok().json();
    let whole = run(&["-n", "40"]);
    let text = whole["text"].as_str().expect("a text");
    // A few characters from the middle, whose first place in the text is where it ends.
    let chars: Vec<char> = text.chars().filter(|c| *c != '\u{fffd}').collect();
    let stop = chars.iter().find(|c| !c.is_whitespace() && !c.is_control()).expect("a visible character");
    let stop = stop.to_string();
    let cut = run(&["-n", "40", "--stop", &stop]);
    assert_eq!(cut["finish_reason"], "stop", "{cut}");
    assert_eq!(cut["text"].as_str(), text.split(&stop).next(), "{stop}: {whole}");
    // Without a limit, the text goes on until the context is full.
    let full = run(&["-c", "48"]);
    let (prompt, made) = (full["prompt_tokens"].as_u64().expect("a number"), ids(&full["tokens"]).len());
    assert_eq!(full["finish_reason"], "length");
    assert!((48..=49).contains(&(prompt + made as u64)), "{full}");
    assert_eq!(ids(&run(&["-n", "0"])["tokens"]), [0u64; 0]);
}

#[test]
fn tokens_are_a_prompt_and_logits_are_its_choices() {
    let dir = folder();
    let args = ["generate", "tiny.gguf", "--prompt-tokens", "ids.npy", "-n", "1", "--json"];
    let v = cpu(&dir, &[&args[..], &GREEDY].concat()).ok().json();
    assert_eq!(v["prompt_tokens"], 5);
    let args = ["logits", "tiny.gguf", "--tokens", "ids.npy", "--output", "z.npy"];
    let note = cpu(&dir, &args).ok();
    assert!(note.out.is_empty() && note.err.contains("f32 [5, "), "{note:?}");
    let z = npy::read(&dir.path().join("z.npy")).expect("an array");
    let n = vocabulary().len();
    assert_eq!((z.dtype, z.dims.to_vec()), (DType::F32, vec![5, n]));
    let z = z.to_vec::<f32>();
    let last = &z[4 * n..];
    let best = (0..n).max_by(|a, b| last[*a].total_cmp(&last[*b])).expect("a logit");
    assert_eq!(ids(&v["tokens"]), [best as u64]);
    // Earlier logits do not depend on later tokens.
    write_ids(&dir.path().join("ids.npy"), &[1, 270, 280]);
    cpu(&dir, &args).ok();
    let first = npy::read(&dir.path().join("z.npy")).expect("an array").to_vec::<f32>();
    let far = first.iter().zip(&z).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(first.len() == 3 * n && far < 1e-5, "{far}");
}

#[test]
fn tokens_of_a_text_make_the_text() {
    let dir = folder();
    let list =
        |args: &[&str]| at(&dir, &[&["tokenize", "tiny.gguf"], args, &["--json"]].concat()).ok().json();
    let v = list(&["the time, é!"]);
    let pieces: Vec<&str> =
        v["pieces"].as_array().expect("a list").iter().map(|p| p.as_str().expect("a text")).collect();
    // Bytes of a letter that has no token of its own are tokens.
    assert_eq!(pieces[0], " the");
    assert!(pieces.contains(&" time") || pieces.contains(&"time"), "{pieces:?}");
    assert_eq!(pieces.iter().filter(|p| **p == "\u{fffd}").count(), 2, "{pieces:?}");
    assert_eq!(ids(&v["tokens"]).len(), pieces.len());
    let special = ids(&list(&["the", "--add-special"])["tokens"]);
    assert_eq!(special[0], 1);
    assert_eq!(special[1..], ids(&list(&["the"])["tokens"]));
    let marked = |more: &[&str]| ids(&list(&[&["<|im_start|>"], more].concat())["tokens"]);
    assert_eq!(marked(&["--parse-special"]), [259]);
    assert!(marked(&[]).len() > 5);
    let plain = with_input(&dir, &["tokenize", "tiny.gguf", "-"], "the in").ok().out;
    assert_eq!(plain.lines().count(), 3, "{plain}");
    assert!(plain.contains("316  \" the\""), "{plain}");
}

#[test]
fn a_random_models_perplexity_is_the_size_of_the_vocabulary() {
    let dir = folder();
    let args = ["perplexity", "tiny.gguf", "-f", "text.txt", "-c", "64"];
    let v = cpu(&dir, &[&args[..], &["--json"]].concat()).ok().json();
    let (p, n) = (v["perplexity"].as_f64().expect("a number"), vocabulary().len() as f64);
    assert!(p > 0.8 * n && p < 1.25 * n, "{p} with {n} tokens");
    let windows = v["windows"].as_u64().expect("a number");
    assert!(windows > 3 && v["window"] == 64 && v["tokens"] == windows * 31, "{v}");
    let plain = cpu(&dir, &args).ok();
    assert_eq!(plain.out, format!("{p:.4}\n"));
    fs::write(dir.path().join("text.txt"), "short").expect("written");
    cpu(&dir, &args).fails(2, &["tokens", "--context"]);
    fs::write(dir.path().join("text.txt"), b"some text \xff").expect("written");
    cpu(&dir, &args).fails(1, &["text.txt", "byte 10", "UTF-8"]);
}

/// Control characters are legal in a text, and have escapes of their own in JSON.
#[test]
fn json_of_control_characters_is_json() {
    let dir = folder();
    let text = "a\u{7f}\u{1b}\u{85}\u{202e}b";
    let v = at(&dir, &["tokenize", "tiny.gguf", text, "--json"]).ok().json();
    let bytes: Vec<u64> = "\u{7f}\u{1b}\u{85}\u{202e}".bytes().map(|b| 3 + u64::from(b)).collect();
    assert_eq!(ids(&v["tokens"])[1..][..bytes.len()], bytes, "{v}");
    assert!(v["pieces"].as_array().expect("a list").contains(&"\u{7f}".into()), "{v}");
}

fn chat(dir: &TempDir, more: &[&str], input: &str) -> Done {
    let args = ["chat", "tiny.gguf", "-n", "6", "--backend", "cpu"];
    with_input(dir, &[&args[..], &GREEDY, more].concat(), input)
}

#[test]
fn a_chat_answers_and_carries_out_commands() {
    let dir = folder();
    let d = chat(&dir, &[], "/help\n/context\nhi\n/context\n/quit\nnever\n").ok();
    for part in ["/save FILE", "0 of 512 positions, 0 messages", " positions, 2 messages"] {
        assert!(d.out.contains(part), "{part}: {d:?}");
    }
    assert!(d.err.contains("(length)"), "{d:?}");
    // A chat that is saved and loaded goes on as the first one would have.
    let saved = chat(&dir, &["--system", "Be short."], "hi\n/save chat.json\nthe\n").ok();
    let text = fs::read_to_string(dir.path().join("chat.json")).expect("the chat");
    let v: Value = serde_json::from_str(&text).expect("JSON");
    let roles: Vec<&str> =
        v.as_array().expect("a list").iter().map(|m| m["role"].as_str().expect("a role")).collect();
    assert_eq!(roles, ["system", "user", "assistant"], "{v}");
    assert_eq!(v[1]["content"], "hi");
    let loaded = chat(&dir, &[], "/load chat.json\nthe\n").ok();
    assert!(saved.out.ends_with(&loaded.out) && loaded.out.len() > 1, "{saved:?} {loaded:?}");
    // Lines that end with a backslash are one message.
    chat(&dir, &[], "hi \\\nyou\n/save two.json\n").ok();
    let v: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("two.json")).expect("the chat"))
        .expect("JSON");
    assert_eq!(v[0]["content"], "hi \nyou");
}

#[test]
fn a_chat_drops_old_messages_when_the_context_is_full() {
    let dir = folder();
    let d = chat(&dir, &["-c", "96"], "one\ntwo\nthree\nfour\nfive\n").ok();
    assert!(d.err.contains("oldest messages were dropped"), "{d:?}");
    let long = format!("{}\n", "word ".repeat(100));
    chat(&dir, &["-c", "96"], &long).fails(2, &["the message has", "--context"]);
}

#[test]
fn mistakes_in_a_chat_are_named() {
    let dir = folder();
    chat(&dir, &[], "/sav\n").fails(2, &["/sav", "no such command", "/help"]);
    chat(&dir, &[], "/save\n").fails(2, &["/save", "name a file"]);
    chat(&dir, &[], "/load none.json\n").fails(1, &["none.json"]);
    chat(&dir, &[], "/retry\n").fails(2, &["/retry", "no message"]);
    chat(&dir, &[], "/thinking maybe\n").fails(2, &["/thinking", "on, off, hide or show"]);
    fs::write(dir.path().join("bad.json"), "{").expect("written");
    chat(&dir, &[], "/load bad.json\n").fails(1, &["bad.json"]);
    fs::write(dir.path().join("bad.jinja"), "{% for %}").expect("written");
    assert_ne!(chat(&dir, &["--chat-template", "bad.jinja"], "hi\n").code, 0);
}

#[test]
fn wrong_input_is_named() {
    let dir = folder();
    let write = |name: &str, how: Tiny| fs::write(dir.path().join(name), tiny(how)).expect("written");
    write("mamba.gguf", Tiny { architecture: "mamba9", ..Tiny::default() });
    write("mute.gguf", Tiny { tokenizer: false, ..Tiny::default() });
    write("plain.gguf", Tiny { template: false, ..Tiny::default() });
    let generate = |model: &str, more: &[&str]| {
        cpu(&dir, &[&["generate", model, "-p", "the", "-n", "2"][..], more].concat())
    };
    generate("none.gguf", &[]).fails(1, &["none.gguf"]);
    generate("text.txt", &[]).fails(1, &["text.txt", "not a GGUF file"]);
    fs::create_dir(dir.path().join("empty")).expect("a folder");
    generate("empty", &[]).fails(1, &["config.json"]);
    generate("mamba.gguf", &[]).fails(3, &["mamba9", "Known architectures", "llama", "gpt-oss"]);
    generate("tiny.gguf", &["--kv-dtype", "q5_0"]).fails(2, &["--kv-dtype", "f32, f16, bf16 or q8_0"]);
    generate("tiny.gguf", &["-ctv", "q4_0"]).fails(2, &["--cache-type-v", "'q4_0'", "q8_0"]);
    generate("tiny.gguf", &["--chunk", "0"]).fails(2, &["--chunk"]);
    generate("tiny.gguf", &["--temperature=-1"]).code_is(2, "temperature");
    generate("tiny.gguf", &["--top-p", "2"]).code_is(2, "top");
    // Numbers with a sign are values, not options.
    generate("tiny.gguf", &["--temp", "-1"]).code_is(2, "temperature");
    at(&dir, &["generate", "tiny.gguf", "-p", "x", "-n", "-1"]).code_is(2, "not negative");
    generate("tiny.gguf", &["-c", "-1"]).code_is(2, "not negative");
    generate("tiny.gguf", &["--seed", "-2"]).code_is(2, "not negative");
    generate("tiny.gguf", &["-c", "99999999999"]).fails(2, &["--context", "at most"]);
    let schema = generate("tiny.gguf", &["--json-schema", "{\"type\":"]);
    schema.fails(1, &["JSON schema: JSON:", "line 1"]);
    fs::write(dir.path().join("nothing.gguf"), "").expect("written");
    at(&dir, &["inspect", "nothing.gguf"]).fails(1, &["nothing.gguf", "empty file"]);
    at(&dir, &["inspect", "empty"]).fails(1, &["empty", "a folder", "model.safetensors"]);
    generate("tiny.gguf", &["--stop", ""]).fails(2, &["--stop"]);
    generate("tiny.gguf", &["-c", "1"]).fails(2, &["2 positions", "context has 1"]);
    generate("mute.gguf", &[]).fails(3, &["mute.gguf", "no tokenizer", "--prompt-tokens"]);
    at(&dir, &["generate", "tiny.gguf"]).code_is(2, "--prompt");
    at(&dir, &["generate", "-p", "x"]).code_is(2, "MODEL");
    at(&dir, &["tokenize", "mute.gguf", "x"]).fails(3, &["no tokenizer"]);
    let chat = with_input(&dir, &["chat", "plain.gguf", "--backend", "cpu"], "hi\n");
    chat.code_is(3, "template");
    // Tokens without a tokenizer are printed as numbers.
    let tokens = ["generate", "mute.gguf", "--prompt-tokens", "ids.npy", "-n", "3", "--temperature", "0"];
    let out = cpu(&dir, &tokens).ok().out;
    assert_eq!(out.split_whitespace().filter_map(|t| t.parse::<u32>().ok()).count(), 3, "{out}");
}

#[test]
fn wrong_tokens_are_named() {
    let dir = folder();
    let logits = || cpu(&dir, &["logits", "tiny.gguf", "--tokens", "ids.npy", "-o", "z.npy"]);
    let file = dir.path().join("ids.npy");
    write_ids(&file, &[1, 5_000]);
    logits().fails(2, &["token 5000", "vocabulary"]);
    write_ids(&file, &[1, -2]);
    logits().fails(1, &["ids.npy", "-2"]);
    write_ids(&file, &[]);
    logits().fails(2, &["no tokens"]);
    npy::write(&file, &ConstData::from_slice(&[2], &[1f32, 2.]).expect("fits")).expect("written");
    logits().fails(1, &["ids.npy", "integers"]);
    fs::remove_file(&file).expect("removed");
    logits().fails(1, &["ids.npy"]);
    assert!(!dir.path().join("z.npy").exists());
}

#[test]
fn prompts_of_a_file_are_continued_as_alone() {
    let dir = folder();
    let lines = [
        r#"{"prompt": "once upon", "max_tokens": 3, "seed": 5}"#,
        "a time",
        "",
        r#"{"prompt_tokens": [1, 270, 280, 290, 300], "seed": 9}"#,
        "there was the little fox",
    ];
    fs::write(dir.path().join("many.txt"), lines.join("\n")).expect("written");
    let all = [
        "generate",
        "tiny.gguf",
        "--prompts",
        "many.txt",
        "-n",
        "6",
        "--seed",
        "2",
        "--ignore-eos",
        "--json",
    ];
    let alone: [&[&str]; 4] = [
        &["-p", "once upon", "-n", "3", "--seed", "5"],
        &["-p", "a time", "-n", "6", "--seed", "2"],
        &["--prompt-tokens", "ids.npy", "-n", "6", "--seed", "9"],
        &["-p", "there was the little fox", "-n", "6", "--seed", "2"],
    ];
    let alone: Vec<Value> = alone
        .iter()
        .map(|args| {
            let d = cpu(&dir, &[&["generate", "tiny.gguf", "--ignore-eos", "--json"], *args].concat());
            assert_eq!(d.code, 0, "{}", d.err);
            serde_json::from_str(&d.out).expect("JSON")
        })
        .collect();
    for parallel in ["1", "3", "64"] {
        let d = cpu(&dir, &[&all[..], &["--parallel", parallel, "--chunk", "4"]].concat());
        assert_eq!(d.code, 0, "{}", d.err);
        let got: Vec<Value> = d.out.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
        assert_eq!(got.len(), 4);
        for (i, (got, want)) in got.iter().zip(&alone).enumerate() {
            assert_eq!(got["index"], i);
            for key in ["tokens", "text", "finish_reason", "prompt_tokens"] {
                assert_eq!(got[key], want[key], "prompt {i}, {key}, {parallel} at once");
            }
        }
    }
    let fails = |args: &[&str], what: &str| {
        let d = cpu(&dir, &[&["generate", "tiny.gguf"], args].concat());
        assert!(d.code != 0 && d.err.contains(what), "{args:?}: {}", d.err);
    };
    fails(&["-p", "x", "--parallel", "2"], "--prompts");
    fails(&["--prompts", "many.txt", "--parallel", "0"], "at least 1");
    for (line, what) in [
        (r#"{"prompt": 3}"#, "line 2"),
        (r#"{"promt": "x"}"#, "'promt'"),
        (r#"{"prompt": "x", "seed": -1}"#, "seed"),
        ("{", "line 2"),
        (r#"{"prompt_tokens": [100000]}"#, "vocabulary"),
    ] {
        fs::write(dir.path().join("bad.txt"), format!("fine\n{line}\n")).expect("written");
        fails(&["--prompts", "bad.txt"], what);
    }
}

/// Runs a chain of other steps than the usual ones.
#[test]
fn samplers_have_the_chosen_order() {
    let dir = folder();
    let run = |more: &[&str]| {
        let args = [
            "generate",
            "tiny.gguf",
            "-p",
            "once",
            "-n",
            "8",
            "--seed",
            "4",
            "--ignore-eos",
            "--temperature",
            "3",
        ];
        cpu(&dir, &[&args[..], more].concat())
    };
    let usual = run(&[]);
    assert_eq!(run(&["--samplers", "penalties;top_k;typ_p;top_p;min_p;temperature"]).out, usual.out);
    // One candidate is left, so nothing is drawn.
    let best = run(&["--top-k", "1"]);
    assert_eq!(run(&["--samplers", "top_k", "--top-k", "1"]).out, best.out);
    assert_ne!(run(&["--samplers", "temperature", "--top-k", "1"]).out, best.out);
    assert!(run(&["--samplers", "mirostat"]).err.contains("typ_p"));
}
