//! `cargo xtask fuzz`: tests every parser with inputs generated to break it. See docs/fuzzing.md.

use crate::Failure;
use crate::prerequisites::succeeds;
use crate::report::{Outcome, Report, run};
use crate::test::Context;
use std::path::PathBuf;
use std::process::Command;

/// The release of cargo-fuzz to install if none is present.
const CARGO_FUZZ: &str = "0.13.2";
/// Memory limit of a target in megabytes, and time limit per input in seconds.
const MEGABYTES: u32 = 2048;
const SECONDS: u32 = 10;

/// The targets, and the maximum length of their inputs.
const TARGETS: &[(&str, u32)] = &[
    ("onnx_model", 32_768),
    ("onnx_tensor", 8192),
    ("npy", 4096),
    ("npz", 8192),
    ("safetensors", 4096),
    ("gguf", 4096),
    ("grammar", 2048),
    ("json_schema", 2048),
    ("template", 2048),
    ("tokenizer", 4096),
    ("folder", 4096),
    ("torch", 8192),
    ("image", 8192),
    ("picture", 8192),
    ("dataset", 4096),
    ("graph", 32_768),
    ("replay", 32_768),
];

/// The platform's name, or an error if the targets' sanitizer does not support the platform.
fn host() -> Result<&'static str, Failure> {
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        Ok("x86_64-unknown-linux-gnu")
    } else if cfg!(all(target_os = "linux", target_arch = "aarch64")) {
        Ok("aarch64-unknown-linux-gnu")
    } else if cfg!(all(target_os = "macos", target_arch = "aarch64")) {
        Ok("aarch64-apple-darwin")
    } else {
        Err(Failure::Other(
            "libFuzzer with AddressSanitizer is used only on Linux (x86-64, aarch64) and macOS (aarch64)"
                .into(),
        ))
    }
}

fn folder() -> PathBuf {
    crate::root().join("fuzz")
}

/// A cargo command for the fuzz folder. With `RUSTC_BOOTSTRAP`, the stable compiler accepts the unstable
/// flags that libFuzzer needs.
fn cargo(args: &[&str]) -> Command {
    let mut c = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    c.current_dir(crate::root()).env("RUSTC_BOOTSTRAP", "1").env("CARGO_INCREMENTAL", "0").args(args);
    c
}

pub(crate) fn all(args: &[&str]) -> Result<bool, Failure> {
    let (mut minutes, mut only) = (1u32, Vec::new());
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match *arg {
            "--list" => {
                TARGETS.iter().for_each(|(t, _)| println!("{t}"));
                return Ok(true);
            }
            "--minutes" => {
                let n = rest.next().and_then(|n| n.parse().ok()).filter(|n| (1..=10_000).contains(n));
                minutes =
                    n.ok_or_else(|| Failure::Usage("--minutes needs a number from 1 to 10000".into()))?;
            }
            name if TARGETS.iter().any(|(t, _)| *t == name) => only.push(name),
            other => {
                let names: Vec<&str> = TARGETS.iter().map(|(t, _)| *t).collect();
                return Err(Failure::Usage(format!("no target `{other}`; there are: {}", names.join(", "))));
            }
        }
    }
    let host = host()?;
    let mut report = Report::default();
    let outcome = |r: Result<String, String>| match r {
        Ok(note) => Outcome::Passed(note),
        Err(why) => Outcome::Failed(why),
    };
    let mut ready = true;
    report.step("cargo-fuzz", || {
        let r = install();
        ready &= r.is_ok();
        outcome(r)
    });
    if ready {
        report.step("build", || {
            let r = run(&mut cargo(&["fuzz", "build", "--fuzz-dir", "fuzz"])).map(|()| String::new());
            ready &= r.is_ok();
            outcome(r)
        });
    }
    if ready {
        report.step("seeds", || {
            let r = seeds(host);
            ready &= r.is_ok();
            outcome(r)
        });
    }
    for (target, longest) in TARGETS.iter().filter(|(t, _)| ready && (only.is_empty() || only.contains(t))) {
        report.step(target, || {
            let limits = [
                format!("-max_total_time={}", minutes * 60),
                format!("-rss_limit_mb={MEGABYTES}"),
                format!("-timeout={SECONDS}"),
                format!("-max_len={longest}"),
            ];
            let mut c = cargo(&["fuzz", "run", "--fuzz-dir", "fuzz", target, "--"]);
            // Avoids a line of output for every new input.
            c.args(limits).args(["-verbosity=0", "-print_final_stats=1"]);
            outcome(run(&mut c).map(|()| format!("{minutes} minutes")).map_err(|why| {
                format!("{why}; the input is in fuzz/artifacts/{target}, and docs/fuzzing.md says what to do with it")
            }))
        });
    }
    Ok(report.finish())
}

/// The step `fuzz` of the nightly tier: a minute for each target.
pub(crate) fn step(context: &Context) -> Outcome {
    if let Err(Failure::Usage(why) | Failure::Other(why)) = host() {
        return context.missing(why);
    }
    if !context.install && !is_installed() {
        return context.missing("cargo-fuzz is not installed (--no-install)".into());
    }
    match all(&[]) {
        Ok(true) => Outcome::Passed(format!("{} targets, a minute each", TARGETS.len())),
        Ok(false) => Outcome::Failed("the lines above name what failed".into()),
        Err(Failure::Usage(why) | Failure::Other(why)) => Outcome::Failed(why),
    }
}

fn is_installed() -> bool {
    succeeds(&mut cargo(&["fuzz", "--version"]))
}

fn install() -> Result<String, String> {
    if is_installed() {
        return Ok("present".into());
    }
    run(&mut cargo(&["install", "cargo-fuzz", "--locked", "--version", CARGO_FUZZ]))?;
    Ok(format!("installed {CARGO_FUZZ}"))
}

/// Writes the initial inputs, in addition to those found by earlier runs.
fn seeds(host: &str) -> Result<String, String> {
    let made = folder().join("target").join(host).join("release").join("seeds");
    let mut c = Command::new(made);
    c.arg(folder().join("corpus")).arg(crate::testdata::dir());
    if let Some(more) = std::env::var_os("HALCYON_TESTDATA") {
        c.arg(more);
    }
    run(&mut c)?;
    Ok("fuzz/corpus".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_is_built_and_every_built_one_is_run() {
        let text = std::fs::read_to_string(folder().join("Cargo.toml")).expect("the fuzz folder");
        let mut built: Vec<&str> = text
            .lines()
            .filter_map(|l| l.strip_prefix("path = \"fuzz_targets/")?.strip_suffix(".rs\""))
            .collect();
        built.sort_unstable();
        let mut run: Vec<&str> = TARGETS.iter().map(|(t, _)| *t).collect();
        run.sort_unstable();
        assert_eq!(built, run);
        for t in run {
            assert!(folder().join("fuzz_targets").join(format!("{t}.rs")).is_file(), "{t}");
        }
    }
}
