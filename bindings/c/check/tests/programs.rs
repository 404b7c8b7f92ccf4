//! Builds the programs of `bindings/c/tests`, the examples and those of `docs/c-api.md` with the system's
//! compilers, and runs them with the library: plain, and under AddressSanitizer with its search for leaks,
//! and UndefinedBehaviorSanitizer.
//!
//! The tests use the shared library in the folder that `HALCYON_C_LIBRARY` names, or else the one that `cargo
//! build` makes in `bindings/c`, which must come before them. `HALCYON_C_SANITIZED=1` says that the library
//! itself was built with AddressSanitizer, so that it works only in programs that were too.

use halcyon_c_check::library;
use halcyon_test_host::{models, root};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const C: &[&str] = &["cc", "-std=c11", "-D_POSIX_C_SOURCE=200809L"];
const CPP: &[&str] = &["c++", "-std=c++17"];
const WARNINGS: &[&str] = &["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"];
const SANITIZERS: &[&str] =
    &["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"];

/// The folder of the library.
fn library_dir() -> PathBuf {
    let built = || library().join("target/debug");
    let dir = std::env::var_os("HALCYON_C_LIBRARY").map_or_else(built, PathBuf::from);
    let file = dir.join("libhalcyon.so");
    assert!(file.is_file(), "{} is missing; run `cargo build` in bindings/c first", file.display());
    dir
}

/// Whether the library was built with AddressSanitizer.
fn sanitized() -> bool {
    std::env::var("HALCYON_C_SANITIZED").is_ok_and(|v| v == "1")
}

/// A folder for the files of a test.
fn scratch(test: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("c-{test}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    dir
}

fn succeeds(command: &mut Command) -> Output {
    let out = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = [&out.stdout, &out.stderr].map(|t| String::from_utf8_lossy(t).into_owned());
    assert!(out.status.success(), "{command:?}: {}\n{}\n{}", out.status, text[0], text[1]);
    out
}

fn lines(out: &Output) -> Vec<String> {
    String::from_utf8_lossy(&out.stdout).lines().map(String::from).collect()
}

/// Compiles a source to a program in `dir`.
fn compile(source: &Path, sanitize: bool, link: &[&str], dir: &Path) -> PathBuf {
    let compiler = if source.extension().is_some_and(|e| e == "cpp") { CPP } else { C };
    let name = source.file_name().expect("a file").to_string_lossy();
    let program = dir.join(format!("{name}{}", if sanitize { ".sanitized" } else { ".plain" }));
    let mut command = Command::new(compiler[0]);
    command.args(&compiler[1..]).args(WARNINGS).arg("-pthread");
    if sanitize {
        command.args(SANITIZERS);
    }
    command.arg("-I").arg(library().join("include")).arg(source).arg("-o").arg(&program);
    succeeds(command.args(link));
    program
}

/// A command of a program, in the repository's root.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).env("LD_LIBRARY_PATH", library_dir());
    // Nothing of the user's may change what the programs see.
    command.env("HALCYON_CACHE", "off").env("HALCYON_CONFIG", "off").env("HALCYON_TUNING", "cached");
    command.env_remove("HALCYON_BACKENDS").env_remove("HALCYON_PRECISION");
    let known = library().join("tests/leaks.txt");
    command.env("ASAN_OPTIONS", "detect_leaks=1:check_initialization_order=1:strict_string_checks=1");
    command.env("LSAN_OPTIONS", format!("print_suppressions=0:suppressions={}", known.display()));
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    command
}

/// Compiles a source in both ways, and runs it with these arguments. Returns what each program wrote.
fn both(source: &Path, args: &[&str]) -> Vec<Output> {
    let dir = scratch(&source.file_name().expect("a file").to_string_lossy());
    let library = library_dir().display().to_string();
    let ways: &[bool] = if sanitized() { &[true] } else { &[false, true] };
    let one = |way: &bool| {
        let program = compile(source, *way, &["-L", &library, "-lhalcyon", "-lm", "-ldl"], &dir);
        succeeds(run(&program).args(args))
    };
    let outputs = ways.iter().map(one).collect();
    let _ = std::fs::remove_dir_all(&dir);
    outputs
}

/// Runs a test program in both ways; it must reach its end.
fn passes(name: &str, args: &[&str]) {
    for out in both(&library().join("tests").join(name), args) {
        assert_eq!(lines(&out).last().map(String::as_str), Some("done"), "{name}");
    }
}

fn digits() -> String {
    root().join("models/digits.onnx").display().to_string()
}

fn test_models() -> String {
    library().join("tests/models").display().to_string()
}

/// The digit that an example prints with the highest probability, and its line.
fn best(out: &Output) -> (String, f64) {
    let rows = lines(out).into_iter().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [digit, percent, "%"] => Some((digit.to_string(), percent.parse().ok()?)),
            _ => None,
        }
    });
    let all: Vec<(String, f64)> = rows.collect();
    assert_eq!(all.len(), 10, "{}", String::from_utf8_lossy(&out.stdout));
    all.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("ten digits")
}

#[test]
fn devices_options_and_errors() {
    passes("devices.c", &[]);
}

#[test]
fn tensors() {
    passes("tensors.c", &[]);
}

#[test]
fn lost_tensors_are_found() {
    let dir = scratch("leak");
    let library_dir = library_dir().display().to_string();
    let program = compile(&library().join("tests/leak.c"), true, &["-L", &library_dir, "-lhalcyon"], &dir);
    let out = run(&program).output().expect("the program runs");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && text.contains("LeakSanitizer: detected memory leaks"), "{text}");
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn models_run_and_refuse_wrong_inputs() {
    passes("models.c", &[&digits(), &test_models()]);
}

/// A folder with the model of stories and a chat template, which the model does not have.
#[cfg(unix)]
fn with_template(stories: &Path) -> PathBuf {
    let dir = scratch("template");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::os::unix::fs::symlink(stories.join(file), dir.join(file)).expect("a link");
    }
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}";
    let text = format!("{{\"chat_template\": \"{template}\"}}");
    std::fs::write(dir.join("tokenizer_config.json"), text).expect("a file");
    dir
}

#[test]
#[cfg(unix)]
fn language_models_write_text() {
    let Some(dir) = models("language_models_write_text", "stories260k") else { return };
    let stories = dir.join("stories260k-f32.gguf").display().to_string();
    let chat = with_template(&dir);
    passes("language.c", &[&stories, &chat.display().to_string()]);
    let _ = std::fs::remove_dir_all(chat);
}

#[test]
fn the_wrapper_throws_and_frees() {
    let stories = models("the_wrapper_throws_and_frees", "stories260k");
    let stories = stories.map(|d| d.join("stories260k-f32.gguf").display().to_string());
    let (digits, folder) = (digits(), test_models());
    passes("wrapper.cpp", &[&[&*digits, &*folder], stories.as_deref().as_slice()].concat());
}

#[test]
fn the_examples_run_a_model() {
    for name in ["run_model.c", "run_model.cpp"] {
        let source = library().join("examples").join(name);
        for out in both(&source, &[&digits(), "cpu"]) {
            let (digit, percent) = best(&out);
            assert!(digit == "7" && percent > 99.0, "{name}: {digit} {percent}");
            assert!(lines(&out).iter().any(|l| l == "input image: f32[batch, 1, 8, 8]"), "{name}");
        }
    }
}

#[test]
fn the_static_library_links() {
    let dir = scratch("static");
    let archive = library_dir().join("libhalcyon.a").display().to_string();
    let source = library().join("examples/run_model.c");
    let program = compile(&source, sanitized(), &[&archive, "-lm", "-ldl", "-lpthread"], &dir);
    let out = succeeds(run(&program).env_remove("LD_LIBRARY_PATH").args([&digits(), "cpu"]));
    assert_eq!(best(&out).0, "7");
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn threads_share_a_model() {
    for out in both(&library().join("examples/threads.c"), &[&digits(), "cpu"]) {
        let of = |i: usize| format!("thread {i}: 100 runs, 0 differ");
        assert_eq!(lines(&out), (0..4).map(of).collect::<Vec<_>>());
    }
}

#[test]
#[cfg(target_os = "linux")]
fn the_library_can_be_loaded_at_run_time() {
    let library = library_dir().join("libhalcyon.so").display().to_string();
    passes("load.c", &[&library, &digits()]);
}

#[test]
#[cfg(unix)]
fn drivers_are_probed_by_the_program() {
    use std::os::unix::fs::PermissionsExt;
    let dir = scratch("probe");
    let (program, seen) = (dir.join("probe.sh"), dir.join("seen"));
    let text = format!("#!/bin/sh\necho \"$@\" >> '{}'\nkill -SEGV $$\n", seen.display());
    std::fs::write(&program, text).expect("a script");
    std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).expect("a mode");
    passes("probe.c", &[&program.display().to_string()]);
    let seen = std::fs::read_to_string(&seen).expect("the program was run");
    assert!(seen.lines().any(|l| l.starts_with("__probe ")), "{seen}");
    let _ = std::fs::remove_dir_all(dir);
}

/// The programs in a document: blocks of a language with a `main`.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let start = format!("```{language}\n");
    let blocks = text.split(&start).skip(1).filter_map(|rest| rest.split("\n```").next());
    blocks.filter(|b| b.contains("int main(")).map(|b| format!("{b}\n")).collect()
}

#[test]
fn the_programs_of_the_document_run() {
    let text = std::fs::read_to_string(root().join("docs/c-api.md")).expect("the document");
    let stories = models("the_programs_of_the_document_run", "stories260k");
    let stories = stories.map(|d| d.join("stories260k-f32.gguf").display().to_string());
    let dir = scratch("document");
    let mut ran = vec![];
    for (language, extension) in [("c", "c"), ("cpp", "cpp")] {
        for (i, program) in blocks(&text, language).into_iter().enumerate() {
            let source = dir.join(format!("{i}.{extension}"));
            std::fs::write(&source, &program).expect("a source");
            // Programs with arguments take a language model.
            let args = match (program.contains("argv"), &stories) {
                (true, None) => continue,
                (true, Some(s)) => vec![s.as_str()],
                (false, _) => vec![],
            };
            for out in both(&source, &args) {
                assert!(!out.stdout.is_empty(), "{program}");
            }
            ran.push(language);
        }
    }
    assert!(ran.contains(&"c") && ran.contains(&"cpp"), "{ran:?}");
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn the_headers_compile_alone() {
    let dir = scratch("headers");
    for (name, header) in [("a.c", "halcyon.h"), ("b.cpp", "halcyon.h"), ("c.cpp", "halcyon.hpp")] {
        let source = dir.join(name);
        // Twice: the second time must have no effect.
        let text = format!("#include \"{header}\"\n#include \"{header}\"\nint main(void) {{ return 0; }}\n");
        std::fs::write(&source, text).expect("a source");
        compile(&source, false, &["-Wconversion", "-Wundef"], &dir);
    }
    let _ = std::fs::remove_dir_all(dir);
}

#[test]
fn the_header_is_current() {
    let text = std::fs::read_to_string(halcyon_c_check::file()).expect("the header");
    let hint = "write it with `cargo run --manifest-path bindings/c/check/Cargo.toml`";
    assert!(halcyon_c_check::header().expect("a header") == text, "include/halcyon.h is not current; {hint}");
}

/// The functions that the header declares.
fn declared() -> BTreeSet<String> {
    let header = std::fs::read_to_string(halcyon_c_check::file()).expect("the header");
    let code: Vec<&str> = header.lines().filter(|l| !l.trim_start().starts_with(['*', '/'])).collect();
    let code = code.join("\n");
    let ends = code.match_indices('(').map(|(at, _)| &code[..at]);
    let word = |text: &str| {
        let start = text.rfind(|c: char| !c.is_ascii_alphanumeric() && c != '_').map_or(0, |i| i + 1);
        text[start..].to_string()
    };
    ends.map(word).filter(|name| name.starts_with("halcyon_")).collect()
}

#[test]
#[cfg(target_os = "linux")]
fn the_library_exports_what_the_header_declares() {
    let mut nm = Command::new("nm");
    nm.args(["-D", "--defined-only", "--format=posix"]).arg(library_dir().join("libhalcyon.so"));
    let out = succeeds(&mut nm);
    let exported: BTreeSet<String> =
        lines(&out).iter().filter_map(|l| l.split_whitespace().next().map(String::from)).collect();
    let declared = declared();
    assert!(declared.len() > 50, "{declared:?}");
    let other: Vec<&String> = exported.difference(&declared).collect();
    let missing: Vec<&String> = declared.difference(&exported).collect();
    assert!(other.is_empty(), "exported, but not in the header: {other:?}");
    assert!(missing.is_empty(), "in the header, but not exported: {missing:?}");
}

#[test]
#[cfg(target_os = "linux")]
fn the_library_has_a_name_and_stays_loaded() {
    let mut readelf = Command::new("readelf");
    let out = succeeds(readelf.arg("-d").arg(library_dir().join("libhalcyon.so")));
    let text = lines(&out).join("\n");
    assert!(text.contains("soname: [libhalcyon.so]"), "{text}");
    assert!(text.contains("NODELETE"), "{text}");
}
