//! Tests of the help: every example runs, topics and completions exist, -v and -q have the documented effect,
//! and the links in the documents are valid.

use crate::common::*;
use halcyon_formats::npy;
use halcyon_formats::onnx::proto::*;
use halcyon_formats::onnx::tensor;
use halcyon_ir::{ConstData, DType};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The subcommands that `halcyon PATH --help` lists.
fn subcommands(path: &[String]) -> Vec<String> {
    let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let out = halcyon(&args).ok().out;
    let Some((_, list)) = out.split_once("Commands:\n") else { return vec![] };
    let rows = list.lines().take_while(|l| !l.is_empty());
    // Continuation lines of a description are indented further.
    rows.filter(|l| l.starts_with("  ") && !l.starts_with("   "))
        .filter_map(|l| l.split_whitespace().next().map(String::from))
        .collect()
}

/// The words of every command: `run`, `bench`, `bench ops`.
fn all_commands() -> Vec<Vec<String>> {
    let mut all = vec![];
    for name in subcommands(&[]) {
        let path = vec![name];
        for sub in subcommands(&path) {
            all.push(vec![path[0].clone(), sub]);
        }
        all.push(path);
    }
    assert!(all.len() > 15, "{all:?}");
    all
}

fn help(path: &[String], how: &str) -> String {
    let args: Vec<&str> = path.iter().map(String::as_str).chain([how]).collect();
    halcyon(&args).ok().out
}

fn examples(path: &[String]) -> Vec<String> {
    let text = help(path, "--help");
    let lines = text.lines().skip_while(|l| *l != "Examples:").skip(1);
    lines.map(|l| l.trim().to_string()).filter(|l| !l.is_empty()).collect()
}

/// A folder with the files that the examples use: the repository's models, and files that a user's earlier
/// commands would have left.
fn workplace() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let models = dir.path().join("models");
    fs::create_dir(&models).expect("a folder");
    for e in fs::read_dir(root().join("models")).expect("the models").flatten() {
        fs::copy(e.path(), models.join(e.file_name())).expect("copied");
    }
    let configurations = dir.path().join("examples/train");
    fs::create_dir_all(&configurations).expect("a folder");
    for e in fs::read_dir(root().join("examples/train")).expect("the configurations").flatten() {
        fs::copy(e.path(), configurations.join(e.file_name())).expect("copied");
    }
    #[cfg(feature = "language")]
    {
        language::files(dir.path());
        fs::copy(dir.path().join("tiny.gguf"), dir.path().join("model-q4_k.gguf")).expect("copied");
    }
    // A case of the ONNX backend tests, and a replay file.
    let case = dir.path().join("target/testdata/conformance/add");
    fs::create_dir_all(case.join("test_data_set_0")).expect("a folder");
    save(&add(DType::F32), &case.join("model.onnx"));
    let x = ConstData::from_slice(&[1, 3], &[1f32, 2., 3.]).expect("fits");
    let y = ConstData::from_slice(&[1, 3], &[2f32, 4., 6.]).expect("fits");
    for (name, v) in [("input_0", &x), ("input_1", &x), ("output_0", &y)] {
        tensor::write_pb(&case.join(format!("test_data_set_0/{name}.pb")), name, v).expect("written");
    }
    let inputs = vec![port("x", DType::F32, &[Ok(4), Ok(3)]), port("i", DType::I64, &[Ok(2)])];
    let gather = dir.path().join("gather.onnx");
    save(&model("Gather", "", inputs, port("y", DType::F32, &[Ok(2), Ok(3)])), &gather);
    let i = dir.path().join("i.npy");
    npy::write(&i, &ConstData::from_slice(&[2], &[1i64, 9]).expect("fits")).expect("written");
    let (index, replay) = (format!("i={}", text(&i)), dir.path().join("model.replay"));
    let args = ["run", text(&gather), "-i", "x=ones", "-i", &index, "--backend", "cpu", "--save-replay"];
    halcyon(&[&args[..], &[text(&replay)]].concat()).code_is(1, "index out of range");
    dir
}

/// Runs every example of every help text, in order, as if it were pasted into a shell.
#[cfg(unix)]
#[test]
fn every_example_runs() {
    if halcyon_test::left_out("every_example_runs") {
        return;
    }
    let dir = workplace();
    let bin = dir.path().join("bin");
    fs::create_dir(&bin).expect("a folder");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_halcyon"), bin.join("halcyon")).expect("a link");
    let path = std::env::var("PATH").expect("a path");
    let mut seen = BTreeSet::new();
    for command in std::iter::once(vec![]).chain(all_commands()) {
        let all = examples(&command);
        let wanted = subcommands(&command).is_empty() && command != ["help"];
        assert!(!all.is_empty() || !wanted, "{command:?} has no example");
        for line in all.into_iter().filter(|l| seen.insert(l.clone())) {
            let o = Command::new("bash")
                .args(["-e", "-o", "pipefail", "-c", &line])
                .current_dir(dir.path())
                .env("PATH", format!("{}:{path}", bin.display()))
                .env("XDG_CACHE_HOME", dir.path().join("cache"))
                .env("HALCYON_CONFIG", "off")
                .env_remove("HALCYON_CACHE")
                .output()
                .expect("bash starts");
            // Some exit codes depend on the machine, and the replayed file records a failing run.
            let code = o.status.code().unwrap_or(-1);
            let well = match line.split_whitespace().nth(1) {
                Some("doctor") => [0, 1, 2].contains(&code),
                // Without ONNX Runtime's library.
                Some("compare") if code == 4 => !required(),
                Some("run") if code == 4 => line.contains("ort") && !required(),
                Some("replay") => code == 6,
                _ => code == 0,
            };
            let said = String::from_utf8_lossy(&o.stderr);
            assert!(well, "`{line}` ended with {code}: {said}\n{}", String::from_utf8_lossy(&o.stdout));
        }
    }
    assert!(seen.len() > 25, "{seen:?}");
}

/// No line is wider than the terminal, and `halcyon help COMMAND` prints the same as `--help`.
#[test]
fn help_is_wrapped_once_at_every_width() {
    for path in all_commands() {
        for (columns, how) in [(80, "-h"), (80, "--help"), (100, "--help"), (120, "--help")] {
            let args: Vec<&str> = path.iter().map(String::as_str).chain([how]).collect();
            let out = finish(command(&args).env("COLUMNS", columns.to_string())).ok().out;
            let widest = out.lines().map(|l| l.chars().count()).max().unwrap_or(0);
            let usage = out.lines().filter(|l| l.starts_with("Usage:")).map(|l| l.chars().count()).max();
            assert!(widest <= columns.max(usage.unwrap_or(0)), "{path:?} {how} {columns}: {widest}\n{out}");
        }
        let (short, long) = (help(&path, "-h"), help(&path, "--help"));
        assert!(short.lines().count() <= long.lines().count(), "{path:?}");
        assert_eq!(
            long,
            halcyon(&[&["help"], &path.iter().map(String::as_str).collect::<Vec<_>>()[..]].concat()).ok().out
        );
    }
}

#[test]
fn topics_are_helped_and_unknown_ones_are_named() {
    let page = halcyon(&["help", "environment"]).ok().out;
    for name in [
        "HALCYON_BACKENDS=",
        "HALCYON_CACHE=off|",
        "HALCYON_CONFIG=FILE",
        "HALCYON_LOG=",
        "HALCYON_CUDA_LIBRARY=",
    ] {
        assert!(page.contains(name), "{name}: {page}");
    }
    assert!(halcyon(&["help"]).ok().out.contains("Exit codes: 0 done"));
    halcyon(&["help", "runn"]).fails(2, &["runn", "run", "environment"]);
    halcyon(&["help", "run", "twice"]).fails(2, &["twice"]);
    halcyon(&["help", "__probe"]).fails(2, &["__probe"]);
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = halcyon(&["completions", shell]).ok().out;
        for word in ["inspect", "matmul-precision", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        assert!(!script.contains("\n__probe"), "{shell}");
    }
    halcyon(&["completions", "tcsh"]).code_is(2, "tcsh");
    let dir = tempfile::tempdir().expect("a folder");
    halcyon(&["man", text(dir.path())]).ok();
    let page = |name: &str| fs::read_to_string(dir.path().join(name)).expect("a page");
    assert!(page("halcyon.1").contains(".TH halcyon 1"));
    assert!(
        page("halcyon-run.1").contains("top\\-k") && page("halcyon-bench-ops.1").contains("gemm")
            || page("halcyon-bench-ops.1").contains("softmax")
    );
    assert!(!dir.path().join("halcyon-__probe.1").exists());
    assert!(halcyon(&["man"]).ok().out.contains(".TH halcyon 1"));
}

#[test]
fn devices_are_listed_first_and_absent_backends_shortly() {
    let plain = halcyon(&["devices"]).ok().out;
    let (there, absent) = plain.split_once("\n\n").unwrap_or((&plain, ""));
    assert!(
        there.lines().any(|l| l.starts_with("cpu:0 ") && l.contains("iB") && l.contains("free ")),
        "{plain}"
    );
    // An absent backend has one line, even if many libraries were tried.
    let v = halcyon(&["devices", "--json"]).ok().json();
    let rows = v.as_array().expect("an array");
    let gone: Vec<_> = rows.iter().filter(|r| r["available"] == false).collect();
    assert_eq!(absent.lines().count(), gone.len(), "{plain}");
    for (line, r) in absent.lines().zip(&gone) {
        assert!(line.starts_with(r["id"].as_str().expect("an id")) && line.chars().count() <= 100, "{line}");
        assert!(!line.contains("Tried") && !line.contains(".so"), "{line}");
    }
    let all = halcyon(&["devices", "-v"]).ok().out;
    for r in &gone {
        for t in r["tried"].as_array().expect("a list").iter().filter_map(|t| t.as_str()) {
            let name = t.split(':').next().unwrap_or(t);
            assert!(all.contains(&format!("tried: {name}")), "{t}: {all}");
        }
    }
    assert!(all.contains("fix: ") || gone.is_empty(), "{all}");
    // The flags may precede the command's name, and giving both is rejected.
    let ids = |text: &str| -> Vec<String> {
        text.lines().filter_map(|l| l.split_whitespace().next().map(String::from)).collect()
    };
    assert_eq!(ids(&halcyon(&["-q", "devices"]).ok().out), ids(there));
    halcyon(&["devices", "-q", "-v"]).code_is(2, "--verbose");
}

/// A library named by the user that cannot be loaded must be reported as failed, not as an absent driver.
#[test]
fn a_library_that_is_named_and_fails_is_no_absent_driver() {
    let mut c = command(&["devices"]);
    let out =
        finish(c.env("HALCYON_CUDA_LIBRARY", "/nowhere/libcuda.so").env("HALCYON_CACHE", "off")).ok().out;
    assert!(out.contains("cuda    the NVIDIA driver could not be loaded"), "{out}");
}

#[test]
fn memory_is_one_figure_in_select_and_fit() {
    for input in ["image=1x1x8x8", "image=300x1x8x8"] {
        let source = input.replace("image=", "image=random:");
        let select = ["select", "models/digits.onnx", "-i", &source, "--backend", "cpu", "--json"];
        let needs = halcyon(&select).ok().json()["needs"].clone();
        let fit =
            halcyon(&["fit", "models/digits.onnx", "-i", input, "--backend", "cpu", "--json"]).ok().json();
        assert_eq!(
            (&needs["device"], &needs["total"]),
            (&fit["peak"]["device"], &fit["peak"]["total"]),
            "{needs}"
        );
        let parts =
            ["weights_in_place", "weights", "packed", "activations", "workspace", "inputs", "outputs"];
        let sum: u64 =
            parts.iter().map(|p| needs[p].as_u64().unwrap_or_else(|| panic!("{p} in {needs}"))).sum();
        assert_eq!(needs["total"].as_u64(), Some(sum), "{needs}");
        assert!(sum > 24_000, "the weights alone are more: {needs}");
    }
    let out = halcyon(&["select", "models/digits.onnx", "--backend", "cpu"]).ok().out;
    assert!(out.starts_with("cpu:0 (") && out.contains("needs      ") && out.contains(" free: "), "{out}");
    let answer = halcyon(&["select", "models/digits.onnx", "--backend", "cpu", "-q"]).ok().out;
    assert_eq!(answer.lines().count(), 1, "{answer}");
}

#[test]
fn select_gives_short_reasons_and_all_with_v() {
    let run = |more: &[&str]| {
        let mut c = command(&[&["select", "models/digits.onnx", "--backends", "cuda,cpu"], more].concat());
        finish(c.env("HALCYON_CUDA_LIBRARY", "/nowhere/libcuda.so").env("HALCYON_CACHE", "off")).ok().out
    };
    let (short, long) = (run(&[]), run(&["-v"]));
    assert!(short.contains("not cuda: the NVIDIA driver could not be loaded\n"), "{short}");
    assert!(long.contains("/nowhere/libcuda.so") && long.contains("input      image"), "{long}");
}

/// Folding this widened matrix of bytes would make the file four times as large.
#[test]
fn export_grows_no_model_and_says_what_grew() {
    let dir = tempfile::tempdir().expect("a folder");
    let (source, target) = (dir.path().join("wide.onnx"), dir.path().join("out.onnx"));
    let mut m = model("Cast", "", vec![], port("w", DType::F32, &[Ok(128), Ok(128)]));
    let bytes: Vec<i8> = (0..16384).map(|i| (i % 127) as i8).collect();
    let weights = ConstData::from_slice(&[128, 128], &bytes).expect("fits");
    let g = m.graph.as_mut().expect("a graph");
    g.node[0].input = vec!["bytes".into()];
    g.node[0].attribute = vec![AttributeProto { name: "to".into(), i: 1, r#type: 2, ..Default::default() }];
    g.node[0].output = vec!["wide".into()];
    g.node.push(NodeProto {
        input: vec!["x".into(), "wide".into()],
        output: vec!["w".into()],
        op_type: "MatMul".into(),
        ..Default::default()
    });
    g.input = vec![port("x", DType::F32, &[Ok(128), Ok(128)])];
    g.initializer = vec![TensorProto {
        dims: vec![128, 128],
        data_type: DType::I8.row().onnx,
        name: "bytes".into(),
        raw_data: Some(weights.bytes().to_vec().into()),
        ..Default::default()
    }];
    save(&m, &source);
    let v = halcyon(&["export", text(&source), "-o", text(&target), "--json"]).ok().json();
    assert!(v["bytes"]["after"].as_u64() < Some(2 * 16384), "{v}");
    let (before, after) =
        (fs::metadata(&source).expect("there").len(), fs::metadata(&target).expect("there").len());
    assert_eq!((v["bytes"]["before"].as_u64(), v["bytes"]["after"].as_u64()), (Some(before), Some(after)));
    assert_eq!(v["grown"].is_string(), after > before, "{v}");
    // An operator that is written as several nodes.
    let mut mish =
        model("Mish", "", vec![port("x", DType::F32, &[Err("n")])], port("y", DType::F32, &[Err("n")]));
    mish.opset_import[0].version = 18;
    save(&mish, &source);
    let out = halcyon(&["export", text(&source), "-o", text(&target)]).ok().out;
    let (before, after) =
        (fs::metadata(&source).expect("there").len(), fs::metadata(&target).expect("there").len());
    assert!(after > before && out.contains("more than the") && out.contains("nodes instead of 1"), "{out}");
}

#[test]
fn q_leaves_notes_out() {
    let args = ["bench", "model", "models/digits.onnx", "--repeat", "1", "--backend", "cpu"];
    let loud = halcyon(&args).ok();
    assert!(loud.err.contains("timing runs"), "{}", loud.err);
    let quiet = halcyon(&[&args[..], &["-q"]].concat()).ok();
    assert_eq!(quiet.err, "");
    // `-q` does not suppress errors.
    halcyon(&["-q", "run", "models/none.onnx"]).fails(1, &["none.onnx"]);
}

/// The anchors that GitHub generates for a document's headings.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut code = false;
    let mut out = BTreeSet::new();
    for l in text.lines() {
        if l.trim_start().starts_with("```") {
            code = !code;
        }
        if let Some(title) = l.strip_prefix('#').filter(|_| !code) {
            let title = title.trim_start_matches('#').trim().to_lowercase();
            let keep = |c: char| match c {
                ' ' => Some('-'),
                c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
                _ => None,
            };
            out.insert(title.chars().filter_map(keep).collect());
        }
    }
    out
}

/// Every link in a document to a file or section of this repository is valid.
#[test]
fn links_of_the_documents_lead_somewhere() {
    fn documents(dir: &Path, to: &mut Vec<PathBuf>) {
        for e in fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = e.path();
            if path.is_dir() {
                documents(&path, to);
            } else if path.extension().is_some_and(|x| x == "md") {
                to.push(path);
            }
        }
    }
    let mut all = vec![root().join("README.md"), root().join("CHANGELOG.md")];
    for dir in ["docs", "models", "examples", "crates", "fuzz"] {
        documents(&root().join(dir), &mut all);
    }
    let (mut checked, mut broken) = (0, vec![]);
    for file in all.iter().filter(|f| f.is_file()) {
        let text = fs::read_to_string(file).expect("a document is text");
        for (i, _) in text.match_indices("](") {
            let rest = &text[i + 2..];
            let Some(link) = rest.find(')').map(|end| &rest[..end]) else { continue };
            if link.contains("://") || link.contains(char::is_whitespace) {
                continue;
            }
            let (path, section) = link.split_once('#').unwrap_or((link, ""));
            let target =
                if path.is_empty() { file.clone() } else { file.parent().expect("a folder").join(path) };
            checked += 1;
            let there = match section {
                "" => target.exists(),
                s => fs::read_to_string(&target).is_ok_and(|t| anchors(&t).contains(s)),
            };
            if !there {
                broken.push(format!("{}: {link}", file.display()));
            }
        }
    }
    assert!(checked > 20 && broken.is_empty(), "{checked} links, broken: {broken:#?}");
}
