//! Shared by the test files: the devices to test on, and skipping with a message.
#![allow(unreachable_pub, reason = "public for the test files that include this one")]
#![allow(dead_code)]

use halcyon::hal::backend::{BUILT_IN, BuiltIn, TestDevice};
use halcyon::prelude::*;
use std::io::Write;
use std::path::PathBuf;

/// Reports that a test is skipped, on the terminal and in the list that `cargo xtask test` collects.
pub fn skip(test: &str, reason: &str) {
    println!("skipped {test}: {reason}");
    if let Ok(path) = std::env::var("HALCYON_SKIPS")
        && let Ok(mut f) = std::fs::OpenOptions::new().append(true).create(true).open(path)
    {
        let _ = writeln!(f, "{test}: {reason}");
    }
}

/// Whether tests must not be skipped because a library or data is missing.
pub fn required() -> bool {
    std::env::var("HALCYON_REQUIRE_ALL").is_ok_and(|v| v == "1")
}

/// Opens a backend; `None`, with a message, if it is missing. With `HALCYON_REQUIRE_ALL=1` a missing
/// backend panics.
pub fn open(test: &str, kind: BackendType, level: Level) -> Option<Backend> {
    match Backend::builder().backend_type(kind).level(level).build() {
        Ok(b) => Some(b),
        Err(e) if required() => panic!("{kind}: {e}"),
        Err(e) => {
            skip(test, &format!("{kind}: {e}"));
            None
        }
    }
}

/// The backends of this build that compute and have a test device on every test machine.
pub fn test_backends() -> Vec<BackendType> {
    let tested = |b: &&BuiltIn| {
        let device = matches!(b.test, TestDevice::Always | TestDevice::Installed(_));
        device && b.kind != BackendType::Noop && (b.driver)().is_some()
    };
    BUILT_IN.iter().filter(tested).map(|b| b.kind).collect()
}

/// A backend of each available kind of device that computes. `HALCYON_DEVICES=cpu,webgpu` restricts the list.
pub fn devices(test: &str, level: Level) -> Vec<Backend> {
    let only = std::env::var("HALCYON_DEVICES").ok();
    // The CPU first: tests compare the others with it.
    let mut all = test_backends();
    all.sort_by_key(|k| *k != BackendType::Cpu);
    all.into_iter()
        .filter(|k| only.as_deref().is_none_or(|o| o.split(',').any(|n| n == k.id())))
        .filter_map(|k| open(test, k, level))
        .collect()
}

/// The folder of models with known outputs: given by `HALCYON_MODELS`, or beside the repository.
pub fn models(test: &str) -> Option<PathBuf> {
    let dir = std::env::var_os("HALCYON_MODELS")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models"));
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(!required(), "{} is missing: HALCYON_MODELS names the folder of models", dir.display());
    skip(test, "the models folder beside the repository is absent; HALCYON_MODELS names it");
    None
}

/// One case in how many is run: `usual`, unless `HALCYON_CASES` is set (to `all`, or a number).
pub fn one_in(usual: usize) -> usize {
    match std::env::var("HALCYON_CASES").as_deref() {
        Err(_) | Ok("") => usual,
        Ok("all") => 1,
        Ok(n) => match n.parse() {
            Ok(n) if n > 0 => n,
            _ => panic!("HALCYON_CASES is \"{n}\"; it is `all` or how many cases one is drawn from"),
        },
    }
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
    assert!(!required(), "{} is missing; `cargo xtask test` makes it", dir.display());
    skip(test, "generated test data is absent; `cargo xtask test` makes it");
    None
}

/// Random numbers with a fresh seed, which is printed so that a failure can be repeated.
pub struct Rng(halcyon::optable::Rng);

impl Rng {
    pub fn fresh(test: &str) -> Rng {
        let given = std::env::var("HALCYON_SEED").ok().and_then(|s| s.parse().ok());
        let seed = given.unwrap_or_else(halcyon::optable::Rng::fresh_seed);
        println!("{test}: HALCYON_SEED={seed}");
        Rng::new(seed)
    }

    pub fn new(seed: u64) -> Rng {
        Rng(halcyon::optable::Rng::new(seed))
    }
}

impl std::ops::Deref for Rng {
    type Target = halcyon::optable::Rng;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl std::ops::DerefMut for Rng {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}
