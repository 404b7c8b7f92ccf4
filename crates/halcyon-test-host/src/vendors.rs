//! Compiles generated source with the vendors' run-time compilers and clang, without a GPU.

use crate::{drawn, required, root, skip};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

fn python() -> PathBuf {
    std::env::var_os("HALCYON_PYTHON").map_or_else(|| root().join("target/venv/bin/python"), PathBuf::from)
}

/// The file whose existence means that these texts compiled before, with the same script, requirements,
/// Python program and architectures.
fn record(script: &str, archs: &str, texts: &[String]) -> PathBuf {
    let mut hash = DefaultHasher::new();
    for file in [
        "requirements.txt",
        "requirements-no-deps.txt",
        &format!("scripts/{script}"),
        "scripts/hip_prelude.h",
    ] {
        std::fs::read(root().join("xtask").join(file)).expect("a file of the repository").hash(&mut hash);
    }
    (python(), archs, texts).hash(&mut hash);
    root().join("target/compiled").join(format!("{:016x}", hash.finish()))
}

/// Compiles each text with a script of `xtask/scripts` for one of the architectures in `archs`, drawn by the
/// seed, or for all of them if `HALCYON_CASES` is `all` or 1. Without the compiler the test is skipped, or
/// fails if `HALCYON_REQUIRE_ALL=1`. Texts that compiled before are not compiled again, unless
/// `HALCYON_REQUIRE_ALL=1` or the folder `target/compiled` is removed.
pub fn compile(test: &str, script: &str, archs: &str, extension: &str, texts: &[String]) {
    let all: Vec<&str> = archs.split(',').collect();
    let archs = drawn(&format!("{test} with {script}"), all.len()).map_or(archs, |i| all[i]);
    let skip = |why: String| {
        assert!(!required(), "{why}");
        skip(test, &why.trim().replace('\n', "; "));
    };
    let record = record(script, archs, texts);
    if !required() && record.exists() {
        println!("{test}: {} files for {archs} compiled before ({})", texts.len(), record.display());
        return;
    }
    let tool = script.split('_').next().unwrap_or(script);
    // Tests of one process run in parallel, so each call needs its own folder.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("halcyon-{tool}-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let mut files = vec![];
    for (i, text) in texts.iter().enumerate() {
        let path = dir.join(format!("batch{i}.{extension}"));
        std::fs::write(&path, text).expect("the source is written");
        files.push(path);
    }
    let start = std::time::Instant::now();
    let run = Command::new(python())
        .arg(root().join("xtask/scripts").join(script))
        .arg(archs)
        .args(&files)
        .output();
    let out = match run {
        Ok(o) => o,
        Err(e) => return skip(format!("{}: {e}", python().display())),
    };
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    if out.status.code() == Some(77) {
        return skip(text);
    }
    assert!(out.status.success(), "{text}");
    assert_eq!(text.matches(": ok").count(), files.len() * archs.split(',').count(), "{text}");
    println!("{test}: {} files for {archs}: {:.1} s", files.len(), start.elapsed().as_secs_f64());
    let _ = std::fs::remove_dir_all(&dir);
    // If the record cannot be written, the texts are compiled again next time.
    let _ = std::fs::create_dir_all(record.with_file_name("")).and_then(|()| std::fs::write(&record, test));
}
