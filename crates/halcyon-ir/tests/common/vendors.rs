//! Compiles batches of kernels with the vendors' run-time compilers and clang, without a GPU. If a compiler
//! is missing, the test is skipped with a message, or fails if HALCYON_REQUIRE_ALL=1. Tests of other crates
//! include this file by path.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

use halcyon_ir::kernel::Kernel;
use halcyon_ir::render::{Language, to_batch};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn python() -> PathBuf {
    std::env::var_os("HALCYON_PYTHON").map_or_else(|| root().join("target/venv/bin/python"), PathBuf::from)
}

/// Compiles `kernels` with a script of `xtask/scripts` for every architecture in `archs`.
pub fn compile(l: Language, script: &str, archs: &str, kernels: &[Kernel]) {
    let skip = |why: String| {
        assert!(std::env::var("HALCYON_REQUIRE_ALL").as_deref() != Ok("1"), "{why}");
        println!("skipped: {why}");
    };
    let tool = script.split('_').next().unwrap_or(script);
    // Tests of one process run in parallel, so each call needs its own folder.
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir = std::env::temp_dir().join(format!("halcyon-{tool}-{}-{number}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let mut files = vec![];
    for (i, chunk) in kernels.chunks(100).enumerate() {
        let text = to_batch(&chunk.iter().collect::<Vec<_>>(), l).unwrap().text;
        let path = dir.join(format!("batch{i}.{}", l.extension()));
        std::fs::write(&path, text).unwrap();
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
    println!("{} kernels for {archs}: {:.1} s", kernels.len(), start.elapsed().as_secs_f64());
    let _ = std::fs::remove_dir_all(&dir);
}
