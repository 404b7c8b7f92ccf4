//! What ends a generation or a chat besides the model: signals, closed pipes, a lack of memory. And the names
//! that options have in other programs.
#![cfg(unix)]

use crate::common::language::{Tiny, folder, tiny};
use crate::common::{Done, command, finish};
use halcyon_formats::npy;
use halcyon_ir::ConstData;
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn at(dir: &Path, args: &[&str]) -> Command {
    let mut c = command(args);
    c.current_dir(dir).env("HALCYON_CONFIG", "off").env("HALCYON_CACHE", "off");
    c
}

fn run(dir: &Path, args: &[&str]) -> Done {
    finish(&mut at(dir, args))
}

fn start(mut c: Command) -> Child {
    c.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts")
}

fn end(child: Child) -> Done {
    let o = child.wait_with_output().expect("it ends");
    Done {
        code: o.status.code().unwrap_or(-1),
        out: String::from_utf8_lossy(&o.stdout).into_owned(),
        err: String::from_utf8_lossy(&o.stderr).into_owned(),
    }
}

/// Reads at least `n` bytes.
fn read(child: &mut Child, n: usize) -> Vec<u8> {
    let (mut all, mut part) = (vec![], [0; 512]);
    let out = child.stdout.as_mut().expect("an output");
    while all.len() < n {
        match out.read(&mut part).expect("read") {
            0 => break,
            k => all.extend_from_slice(&part[..k]),
        }
    }
    all
}

fn interrupt(child: &Child) {
    let done = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill");
    assert!(done.success());
}

/// As many tokens as a test can wait for.
const LONG: [&str; 8] = ["-c", "100000", "-n", "90000", "--ignore-eos", "--backend", "cpu", "-q"];

#[test]
fn ctrl_c_keeps_the_text_so_far() {
    let dir = folder();
    let args = [&["generate", "tiny.gguf", "-p", "the"][..], &LONG].concat();
    let mut child = start(at(dir.path(), &args));
    let begun = read(&mut child, 20);
    interrupt(&child);
    let done = end(child);
    assert!(begun.len() >= 20 && done.out.ends_with('\n'), "{done:?}");
    assert_eq!((done.code, done.err.contains("error")), (130, false), "{done:?}");
    // As JSON too.
    let json = start(at(dir.path(), &[&args[..], &["--json"]].concat()));
    std::thread::sleep(std::time::Duration::from_millis(1500));
    interrupt(&json);
    let done = end(json);
    assert_eq!(done.code, 130, "{done:?}");
    if !done.out.is_empty() {
        assert_eq!(done.json()["finish_reason"], "cancelled");
    }
}

#[test]
fn ctrl_c_stops_an_answer_and_not_the_chat() {
    let dir = folder();
    let mut child = start(at(dir.path(), &[&["chat", "tiny.gguf"][..], &LONG].concat()));
    let mut input = child.stdin.take().expect("an input");
    input.write_all(b"time\n").expect("written");
    read(&mut child, 20);
    interrupt(&child);
    input.write_all(b"/save c.json\n/quit\n").expect("written");
    let done = end(child);
    assert_eq!(done.code, 0, "{done:?}");
    let saved: Value =
        serde_json::from_str(&fs::read_to_string(dir.path().join("c.json")).expect("saved")).expect("JSON");
    let roles: Vec<&str> =
        saved.as_array().expect("a list").iter().filter_map(|m| m["role"].as_str()).collect();
    assert_eq!(roles, ["user", "assistant"]);
    assert!(saved[1]["content"].as_str().expect("a text").len() >= 10, "{saved}");
}

#[test]
fn a_closed_pipe_ends_the_program() {
    let dir = folder();
    for args in [&["generate", "tiny.gguf", "-p", "the"][..], &["chat", "tiny.gguf"]] {
        let mut child = start(at(dir.path(), &[args, &LONG].concat()));
        let mut input = child.stdin.take().expect("an input");
        input.write_all(b"time\ntime\n").expect("written");
        read(&mut child, 20);
        drop(child.stdout.take());
        let done = end(child);
        assert_eq!((done.code, done.err.as_str()), (0, ""), "{args:?}");
    }
}

#[test]
fn a_chat_that_ends_with_an_error_keeps_its_messages() {
    let dir = folder();
    let temp = dir.path().join("temp");
    fs::create_dir(&temp).expect("a folder");
    let chat = |lines: &str| {
        fs::write(dir.path().join("in.txt"), lines).expect("written");
        let args = ["chat", "tiny.gguf", "-n", "4", "--ignore-eos", "--temp", "0", "--backend", "cpu"];
        let mut c = at(dir.path(), &args);
        c.env("TMPDIR", &temp).stdin(fs::File::open(dir.path().join("in.txt")).expect("an input"));
        finish(&mut c)
    };
    let done = chat("time\n/load none.json\n");
    assert_eq!(done.code, 1, "{done:?}");
    assert!(done.err.contains("none.json") && done.err.contains("/load reads them"), "{done:?}");
    let file = fs::read_dir(temp.join("chats")).expect("saved").next().expect("a file").expect("an entry");
    let saved: Value = serde_json::from_str(&fs::read_to_string(file.path()).expect("read")).expect("JSON");
    assert_eq!(saved[0]["content"], "time", "{saved}");
    assert_eq!(saved[1]["role"], "assistant", "{saved}");
    // The messages are read again.
    chat(&format!("/load {}\ntime\n", file.path().display())).ok();
}

/// The rest of a prompt after its last whole chunk has a plan that the check before loading does not count.
#[test]
fn a_generation_that_runs_out_of_memory_says_so() {
    let dir = folder();
    let args = ["fit", "tiny.gguf", "--backend", "cpu", "--json", "--chunk", "64"];
    let need = run(dir.path(), &args).ok().json()["peak"]["device"].as_u64().expect("bytes");
    let data = ConstData::from_slice(&[96], &[270i64; 96]).expect("it fits");
    npy::write(&dir.path().join("ids.npy"), &data).expect("written");
    let generate = |limit: u64| {
        let limit = limit.to_string();
        let args = ["generate", "tiny.gguf", "--prompt-tokens", "ids.npy", "-n", "4", "--ignore-eos"];
        let more = ["--backend", "cpu", "--memory-limit", &limit, "--chunk", "64"];
        run(dir.path(), &[&args[..], &more].concat())
    };
    let d = generate(need + 2000).fails(5, &["out of memory"]);
    assert!(d.out.is_empty(), "{d:?}");
    generate(need * 4).ok();
}

#[test]
fn options_have_the_names_of_other_programs() {
    let dir = folder();
    let v = |more: &[&str]| {
        let args = ["generate", "-m", "tiny.gguf", "-p", "the", "-n", "8", "--json", "--seed", "3"];
        run(dir.path(), &[&args[..], more].concat()).ok().json()
    };
    let same = |a: &[&str], b: &[&str]| {
        let (x, y) = (v(a), v(b));
        assert_eq!((&x["tokens"], &x["backend"]), (&y["tokens"], &y["backend"]), "{a:?} {b:?}");
        x
    };
    let cpu = ["--backend", "cpu"];
    let zero = same(&["-ngl", "0"], &["--n-gpu-layers", "0"]);
    assert_eq!(zero["backend"], "cpu:0");
    same(&[&["-ngl=99"][..], &cpu].concat(), &[&["--gpu-layers", "all"][..], &cpu].concat());
    same(&["-ngl", "-1", "--backend", "cpu"], &cpu);
    fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
        [more, &["--backend", "cpu"]].concat()
    }
    same(&with(&["--temp", "0.5", "--top-k", "5"]), &with(&["--temperature", "0.5", "--top-k", "5"]));
    same(&with(&["--ctx-size", "64"]), &with(&["--num-ctx", "64"]));
    same(&with(&["--presence-penalty", "0", "--frequency-penalty", "0"]), &with(&["--repeat-penalty", "1"]));
    same(&with(&["--n-predict", "3"][..0]), &with(&["--min-p", "0.05", "--top-p", "0.95"]));
    // Penalties have an effect.
    let greedy = |more: &[&str]| v(&[more, &cpu, &["--temp", "0", "--ignore-eos", "-c", "64"]].concat());
    assert_ne!(
        greedy(&["--presence-penalty", "9"])["tokens"],
        greedy(&["--presence-penalty", "-9"])["tokens"]
    );
    let fails = |more: &[&str], code: i32, parts: &[&str]| {
        let args = ["generate", "tiny.gguf", "-p", "the"];
        run(dir.path(), &[&args[..], more].concat()).fails(code, parts)
    };
    same(&with(&["-ngl", "1"]), &cpu);
    fails(&["-ngl", "x"], 2, &["--gpu-layers", "'x'"]);
    fails(&["-ngl", "0", "--backend", "opencl"], 2, &["--gpu-layers", "opencl"]);
}

#[test]
fn files_that_are_no_models_are_said() {
    let dir = folder();
    fs::write(dir.path().join("other.gguf"), tiny(Tiny { architecture: "nosuch", ..Tiny::default() }))
        .expect("written");
    fs::write(dir.path().join("text.gguf"), "GGUX").expect("written");
    let whole = tiny(Tiny::default());
    for command_line in [&["generate", "-p", "x"][..], &["chat"], &["fit"], &["bench", "llm"]] {
        let on = |file: &str| run(dir.path(), &[command_line, &[file, "--backend", "cpu"]].concat());
        on("missing.gguf").fails(1, &["missing.gguf"]);
        let d = on("other.gguf").fails(3, &["nosuch", "llama"]);
        assert!(d.out.is_empty(), "{d:?}");
        assert_ne!(on("text.gguf").code, 0);
        // A file whose end is missing, in the weights and in the header.
        for part in [whole.len() - 40, whole.len() / 2, 100] {
            fs::write(dir.path().join("cut.gguf"), &whole[..part]).expect("written");
            let d = on("cut.gguf").fails(1, &["cut.gguf"]);
            assert!(d.out.is_empty(), "{d:?}");
        }
    }
}

/// The memory of a process in bytes that no file holds.
#[cfg(target_os = "linux")]
fn anonymous(child: &Child) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("RssAnon:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

#[test]
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn memory_stays_the_same_over_4096_tokens() {
    let dir = folder();
    let args = ["generate", "tiny.gguf", "-p", "the", "-c", "4352", "-n", "4096", "--ignore-eos", "-q"];
    let more = ["--backend", "cpu", "--threads", "1"];
    let mut child = start(at(dir.path(), &[&args[..], &more].concat()));
    // Each token gives at least no byte and at most a few, so this is after about 256 tokens.
    let begun = read(&mut child, 256);
    let first = anonymous(&child).expect("a figure");
    let (mut last, mut count, mut part) = (first, begun.len(), [0; 256]);
    loop {
        match child.stdout.as_mut().expect("an output").read(&mut part).expect("read") {
            0 => break,
            n => count += n,
        }
        last = anonymous(&child).filter(|n| *n > 0).unwrap_or(last);
    }
    let done = end(child);
    assert!(done.code == 0 && count > 2000, "{count} {done:?}");
    println!("{first} bytes after {} characters, {last} after {count}", begun.len());
    assert!(last <= first + (2 << 20), "{first} bytes after 256 tokens, {last} after 4096");
}
