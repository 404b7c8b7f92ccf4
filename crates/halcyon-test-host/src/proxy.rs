//! Builds and controls the proxy OpenCL library of `crates/halcyon-hal/tests/proxy/proxy.c`.

use crate::{process, root};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiles the proxy into `dir`. Returns `None` if there is no C compiler, and panics instead if
/// `HALCYON_REQUIRE_ALL=1`.
pub fn build(dir: &Path) -> Option<PathBuf> {
    let source = root().join("crates/halcyon-hal/tests/proxy/proxy.c");
    let library = dir.join("libhalcyon-proxy-opencl.so");
    process::compile(&library, &source, &["-O1", "-Wall", "-Werror"]).then_some(library)
}

/// Makes `command` use the proxy, which writes its counters to the file `counts`. `corrupt` selects the copy
/// to the host whose data the proxy falsifies (see proxy.c).
pub fn through(command: &mut Command, proxy: &Path, counts: &Path, corrupt: Option<&str>) {
    command
        .env("HALCYON_OPENCL_LIBRARY", proxy)
        .env("HALCYON_PROXY_COUNT", counts)
        .env_remove("HALCYON_PROXY_CORRUPT");
    if let Some(c) = corrupt {
        command.env("HALCYON_PROXY_CORRUPT", c);
    }
}

/// The proxy's counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    pub launches: u64,
    pub reads: u64,
    pub falsified: u64,
}

pub fn seen(counts: &Path) -> Seen {
    let text = std::fs::read_to_string(counts).unwrap_or_default();
    let words: Vec<&str> = text.split_whitespace().collect();
    let of = |name: &str| {
        let at = words.iter().position(|w| *w == name);
        at.and_then(|i| words.get(i + 1)).and_then(|w| w.parse().ok()).unwrap_or(0)
    };
    Seen { launches: of("launches"), reads: of("reads"), falsified: of("falsified") }
}
