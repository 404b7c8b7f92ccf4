//! The step `c-api`: builds the C library (`bindings/c`), which is not part of the workspace, and runs its
//! tests (`bindings/c/check`), which are programs in C and C++.

use crate::report::{Counts, Outcome, run};
use crate::test::{Context, cargo_tests};
use crate::tier::Tier;
use crate::{prerequisites, target_dir};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The crates that the library names.
const CRATES: &[&str] = &["halcyon", "halcyon_models", "halcyon_text", "serde_json"];

/// The arguments with which the package links the shared library (`bindings/c/build.rs`).
const LINK: &[&str] = &["-Clink-arg=-Wl,-soname,libhalcyon.so", "-Clink-arg=-Wl,-z,nodelete"];

const PACKAGES: &[&str] = &["bindings/c", "bindings/c/check"];

pub(crate) fn step(context: &Context) -> Outcome {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return context.missing("the C library is tested on x86-64 Linux only".into());
    }
    if !prerequisites::is_installed("install-cxx") {
        return context.missing("there is no C++ compiler".into());
    }
    all(context).unwrap_or_else(Outcome::Failed)
}

fn all(context: &Context) -> Result<Outcome, String> {
    for package in PACKAGES {
        run(cargo(context, "fmt", package).arg("--check"))?;
    }
    let plain = tests(context, &library(context)?, false);
    if context.tier != Tier::Nightly {
        return Ok(plain);
    }
    for package in PACKAGES {
        let mut clippy = cargo(context, "clippy", package);
        run(clippy.args(["--locked", "--all-targets", "--", "-D", "warnings"]))?;
    }
    let (mut total, mut notes) = (Counts::default(), vec![]);
    for outcome in [plain, tests(context, &sanitized_library(context)?, true)] {
        match outcome {
            Outcome::Tests(counts, note) => {
                total.add(counts);
                notes.extend(Some(note).filter(|n| !n.is_empty()));
            }
            other => return Ok(other),
        }
    }
    Ok(Outcome::Tests(total, notes.join("; ")))
}

/// A cargo command for a package, with the workspace's build folder.
fn cargo(context: &Context, command: &str, package: &str) -> Command {
    let mut cargo = context.cargo();
    cargo.arg(command).arg("--manifest-path").arg(crate::root().join(package).join("Cargo.toml"));
    cargo.env("CARGO_TARGET_DIR", target_dir());
    cargo
}

/// Compiles the library with the crates that the workspace's tests use. Cargo would build these crates again,
/// which takes minutes, because they would be dependencies from outside of the library's own workspace.
/// Returns the folder of the library.
fn library(context: &Context) -> Result<PathBuf, String> {
    let mut build = context.cargo_test();
    build.args(["--workspace", "--lib", "--no-run", "--message-format=json"]);
    let out = build.stderr(Stdio::inherit()).output().map_err(|e| format!("cargo: {e}"))?;
    if !out.status.success() {
        return Err(format!("the workspace does not build: {}", out.status));
    }
    let text = String::from_utf8_lossy(&out.stdout);
    let dir = target_dir().join("c-api");
    std::fs::create_dir_all(&dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    rustc.current_dir(crate::root()).args(["--edition", "2024", "--crate-name", "halcyon"]);
    rustc.args(["--crate-type", "cdylib,staticlib", "bindings/c/src/lib.rs", "-Clto=off"]).args(LINK);
    for name in CRATES {
        let file = built(&text, name).ok_or_else(|| format!("cargo names no library {name}"))?;
        let deps = Path::new(&file).with_file_name("");
        rustc
            .arg("--extern")
            .arg(format!("{name}={file}"))
            .arg("-L")
            .arg(format!("dependency={}", deps.display()));
    }
    // Cargo would set it to the version of the package, which is that of the workspace.
    rustc.env("CARGO_PKG_VERSION", env!("CARGO_PKG_VERSION")).arg("--out-dir").arg(&dir);
    run(&mut rustc)?;
    Ok(dir)
}

/// The file of a library crate in cargo's messages.
fn built(messages: &str, name: &str) -> Option<String> {
    let of = |line: &str| -> Option<String> {
        let v: Value = serde_json::from_str(line).ok()?;
        let lib = v["target"]["kind"].as_array()?.iter().any(|kind| kind == "lib");
        if v["target"]["name"] != name || !lib || v["profile"]["test"] != false {
            return None;
        }
        let files = v["filenames"].as_array()?.iter().filter_map(Value::as_str);
        files.into_iter().find(|f| f.ends_with(".rlib")).map(String::from)
    };
    messages.lines().find_map(of)
}

/// Builds the package with AddressSanitizer, which the stable compiler enables with `RUSTC_BOOTSTRAP`.
/// Returns the folder of the library.
fn sanitized_library(context: &Context) -> Result<PathBuf, String> {
    let (target, dir) = ("x86_64-unknown-linux-gnu", target_dir().join("asan"));
    let mut build = cargo(context, "build", PACKAGES[0]);
    build.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", "-Zsanitizer=address");
    run(build.args(["--locked", "--target", target, "--target-dir"]).arg(&dir))?;
    Ok(dir.join(target).join("debug"))
}

/// Runs the tests with a library.
fn tests(context: &Context, library: &Path, sanitized: bool) -> Outcome {
    let mut tests = cargo(context, "test", PACKAGES[1]);
    tests.args(["--locked", "--no-fail-fast"]);
    tests.env("HALCYON_C_LIBRARY", library).env("HALCYON_C_SANITIZED", if sanitized { "1" } else { "0" });
    cargo_tests(&mut tests)
}

#[cfg(test)]
mod unit {
    #[test]
    fn libraries_are_found_in_messages() {
        let message = |name: &str, kind: &str, test: bool, file: &str| {
            let v = serde_json::json!({
                "reason": "compiler-artifact", "target": { "name": name, "kind": [kind] },
                "profile": { "test": test }, "filenames": [format!("{file}.rmeta"), format!("{file}.rlib")],
            });
            v.to_string()
        };
        let all = [
            "{\"reason\":\"build-finished\",\"success\":true}".to_string(),
            message("halcyon", "bin", false, "a"),
            message("halcyon", "lib", true, "b"),
            message("halcyon", "lib", false, "c"),
        ];
        assert_eq!(super::built(&all.join("\n"), "halcyon"), Some("c.rlib".into()));
        assert_eq!(super::built(&all[..3].join("\n"), "halcyon"), None);
        assert_eq!(super::built(&all.join("\n"), "serde_json"), None);
    }

    #[test]
    fn the_link_arguments_are_those_of_the_package() {
        let file = crate::root().join("bindings/c/build.rs");
        let text = std::fs::read_to_string(file).expect("the build script");
        for arg in super::LINK {
            let arg = arg.trim_start_matches("-Clink-arg=");
            assert!(text.contains(&format!("rustc-cdylib-link-arg={arg}\"")), "{arg}");
        }
    }
}
