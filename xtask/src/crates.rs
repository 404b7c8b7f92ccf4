//! Counts the crates of the smallest useful build: `halcyon` with only the features `cpu` and `onnx`. Checks
//! that the lock files of the packages outside of the workspace are up to date.

use crate::report::Outcome;
use std::collections::BTreeSet;
use std::process::Command;

/// Maximum number of crates, including those of this workspace.
const MAX_CRATES: usize = 55;
const FEATURES: &str = "cpu,onnx";
/// The packages outside of the workspace. Their builds use their lock files as they are.
const OUTSIDE: &[&str] = &["bindings/c", "bindings/c/check", "bindings/python", "examples/backend", "fuzz"];

/// The step of `cargo xtask test`.
pub(crate) fn step() -> Outcome {
    match lock_files().and_then(|()| count()) {
        Err(why) => Outcome::Failed(why),
        Ok(all) if all.len() > MAX_CRATES => Outcome::Failed(format!(
            "halcyon with {FEATURES} has {} crates, but at most {MAX_CRATES} are allowed: {}. Put what these features do not need behind a feature",
            all.len(),
            all.into_iter().collect::<Vec<_>>().join(", ")
        )),
        Ok(all) => {
            let n = all.len();
            Outcome::Passed(format!(
                "halcyon with {FEATURES}: {n} crates of at most {MAX_CRATES}; lock files are up to date"
            ))
        }
    }
}

/// Whether the lock files of [`OUTSIDE`] have what the manifests need.
fn lock_files() -> Result<(), String> {
    for package in OUTSIDE {
        let mut c = crate::cargo();
        c.args(["tree", "--locked", "--quiet", "--depth", "0", "--manifest-path"]);
        c.arg(crate::root().join(package).join("Cargo.toml"));
        let out = c.output().map_err(|e| format!("cargo tree: {e}"))?;
        if !out.status.success() {
            return Err(format!(
                "{package}/Cargo.lock: {} Copy Cargo.lock to it, and run `cargo metadata --manifest-path \
                 {package}/Cargo.toml`, which adds and removes packages",
                String::from_utf8_lossy(&out.stderr).trim()
            ));
        }
    }
    Ok(())
}

/// The crates of a build, from `cargo tree`.
fn count() -> Result<BTreeSet<String>, String> {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.current_dir(crate::root()).args(["tree", "--edges", "normal", "--package", "halcyon"]);
    c.args(["--no-default-features", "--features", FEATURES, "--prefix", "none"]);
    let out = c.output().map_err(|e| format!("cargo tree: {e}"))?;
    if !out.status.success() {
        return Err(format!("cargo tree: {}", String::from_utf8_lossy(&out.stderr).trim()));
    }
    let all = parse(&String::from_utf8_lossy(&out.stdout));
    if all.is_empty() { Err("cargo tree listed no crate".into()) } else { Ok(all) }
}

/// Returns `name v1.2.3` of each line, without duplicates. The rest of a line states the source or marks a
/// repetition.
fn parse(text: &str) -> BTreeSet<String> {
    let crate_of = |l: &str| {
        let mut words = l.split_whitespace();
        Some(format!("{} {}", words.next()?, words.next()?))
    };
    text.lines().filter_map(crate_of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_package_outside_of_the_workspace_is_listed() {
        let mut found = vec![];
        let mut folders = vec![crate::root()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.path()) {
                let name = entry.file_name().unwrap().to_string_lossy().into_owned();
                if entry.is_dir() && name != "target" && !name.starts_with('.') {
                    folders.push(entry);
                } else if name == "Cargo.lock" && folder != crate::root() {
                    let inside = folder.strip_prefix(crate::root()).unwrap().display().to_string();
                    found.push(inside.replace('\\', "/"));
                }
            }
        }
        found.sort();
        assert_eq!(found, OUTSIDE);
    }

    #[test]
    fn repeats_are_removed() {
        let text = "a v1.0.0 (/x)\nb v1.0.0 (proc-macro)\nb v1.0.0 (proc-macro) (*)\nb v2.0.0\n\na v1.0.0 (/x) (*)\n";
        assert_eq!(parse(text).into_iter().collect::<Vec<_>>(), ["a v1.0.0", "b v1.0.0", "b v2.0.0"]);
    }
}
