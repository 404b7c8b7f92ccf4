//! What the test files share: the devices to test on, and skipping with a plain message.
#![allow(dead_code)]

use halcyon::prelude::*;
use std::io::Write;
use std::path::PathBuf;

/// Says that a test skips, on the terminal and in the list that the test command keeps.
pub fn skip(test: &str, reason: &str) {
    println!("skipped {test}: {reason}");
    if let Ok(path) = std::env::var("HALCYON_SKIPS")
        && let Ok(mut f) = std::fs::OpenOptions::new().append(true).create(true).open(path)
    {
        let _ = writeln!(f, "{test}: {reason}");
    }
}

/// A backend, or `None` with a message where it is not there. With HALCYON_REQUIRE_LANES=1 it must be there.
pub fn open(test: &str, kind: BackendType, level: Level) -> Option<Backend> {
    match Backend::builder().backend_type(kind).level(level).build() {
        Ok(b) => Some(b),
        Err(e) if std::env::var("HALCYON_REQUIRE_LANES").is_ok_and(|v| v == "1") => panic!("{kind}: {e}"),
        Err(e) => {
            skip(test, &format!("{kind}: {e}"));
            None
        }
    }
}

/// Every device that computes and is there. HALCYON_DEVICES=cpu,webgpu narrows the list.
pub fn devices(test: &str, level: Level) -> Vec<Backend> {
    let only = std::env::var("HALCYON_DEVICES").ok();
    [BackendType::Cpu, BackendType::OpenCl, BackendType::WebGpu]
        .into_iter()
        .filter(|k| *k != BackendType::WebGpu || cfg!(feature = "webgpu"))
        .filter(|k| only.as_deref().is_none_or(|o| o.split(',').any(|n| n == k.id())))
        .filter_map(|k| open(test, k, level))
        .collect()
}

/// The folder of models with known outputs that may lie beside the repository.
pub fn models(test: &str) -> Option<PathBuf> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models");
    if dir.is_dir() {
        return Some(dir);
    }
    skip(test, "the models folder beside the repository is absent");
    None
}

/// A folder of generated test data.
pub fn testdata(test: &str, name: &str) -> Option<PathBuf> {
    let root = std::env::var("HALCYON_TESTDATA")
        .map(PathBuf::from)
        .unwrap_or_else(|_| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/testdata"));
    let dir = root.join(name);
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(
        std::env::var("HALCYON_REQUIRE_LANES").map_or(true, |v| v != "1"),
        "{} is missing",
        dir.display()
    );
    skip(test, "generated test data is absent; `cargo xtask test` makes it");
    None
}

/// A small generator for fresh random inputs; the seed is printed so that a failure can be repeated.
pub struct Rng(u64);

impl Rng {
    pub fn fresh(test: &str) -> Rng {
        let seed = std::env::var("HALCYON_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or_else(|| {
            std::time::SystemTime::now()
                .duration_since(std::time::UNIX_EPOCH)
                .map_or(1, |d| d.as_nanos() as u64)
        });
        println!("{test}: HALCYON_SEED={seed}");
        Rng::new(seed)
    }

    pub fn new(seed: u64) -> Rng {
        Rng(seed | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// In [0, n).
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 32) as usize) % n.max(1)
    }

    pub fn uniform(&mut self, lo: f64, hi: f64) -> f64 {
        lo + (self.next() >> 11) as f64 / (1u64 << 53) as f64 * (hi - lo)
    }

    pub fn f32s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.uniform(-1.0, 1.0) as f32).collect()
    }
}
