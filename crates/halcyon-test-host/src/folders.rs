//! The folders of test data.

use crate::{required, skip};
use std::path::{Path, PathBuf};

/// The root folder of the repository.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// The build folder: `CARGO_TARGET_DIR` when set, else `target`.
pub fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// The folder of models with known outputs: `HALCYON_MODELS`, or a folder beside the repository. The folder
/// may be missing.
pub fn models_dir() -> PathBuf {
    std::env::var_os("HALCYON_MODELS").map_or_else(|| root().join("../shared/models"), PathBuf::from)
}

/// A folder of [`models_dir`]. If it is missing, returns `None` and reports the test as skipped, or panics
/// instead if `HALCYON_REQUIRE_ALL=1`.
pub fn models(test: &str, name: &str) -> Option<PathBuf> {
    let dir = models_dir().join(name);
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(!required(), "{} is missing: HALCYON_MODELS names the folder of models", dir.display());
    skip(test, &format!("{} is missing; HALCYON_MODELS names the folder of models", dir.display()));
    None
}

/// A folder of generated test data: below `HALCYON_TESTDATA`, or in the folder `testdata` of [`target_dir`],
/// where `cargo xtask test` makes the data. A missing folder is treated as by [`models`].
pub fn testdata(test: &str, name: &str) -> Option<PathBuf> {
    let made = || target_dir().join("testdata");
    let generated = std::env::var_os("HALCYON_TESTDATA").map_or_else(made, PathBuf::from);
    let dir = generated.join(name);
    if dir.is_dir() {
        return Some(dir);
    }
    assert!(!required(), "{} is missing; `cargo xtask test` makes it", dir.display());
    skip(test, "generated test data is absent; `cargo xtask test` makes it");
    None
}

/// The folder `name` below the folder that an environment variable names. `cargo xtask test` prepares that
/// folder and sets the variable. A missing folder is treated as by [`models`].
pub fn prepared(test: &str, variable: &str, name: &str) -> Option<PathBuf> {
    let dir = std::env::var_os(variable).map(|d| PathBuf::from(d).join(name));
    match dir {
        Some(d) if d.is_dir() => Some(d),
        _ => {
            assert!(!required(), "{variable} does not name a folder that has {name}");
            skip(test, &format!("{variable} is not set; `cargo xtask test` sets it"));
            None
        }
    }
}
