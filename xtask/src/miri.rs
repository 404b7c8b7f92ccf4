//! The step `miri`: the unit tests of the code with `unsafe` that Miri can run. Miri interprets Rust and
//! reports undefined behaviour. It cannot call drivers or processor-specific instructions, so kernels and
//! drivers are left to the steps `asan` and `neon`.

use crate::report::{Counts, Outcome, run};
use crate::test::{Context, cargo_tests};
use std::process::Command;

/// Packages, their features, and parts of names that select the tests.
const RUNS: &[(&str, &[&str], &[&str])] = &[
    ("halcyon-ir", &[], &["data::", "layout::"]),
    (
        "halcyon-hal",
        &["--no-default-features", "--features", "cpu,parallel"],
        &["pool::", "hazard::", "cpu::team::"],
    ),
];

/// Part of the names of the kernels' tests. These tests are skipped; some of them also match a selection.
const KERNELS: &str = "cpu::library::";

/// Miri is a component of nightly toolchains only.
const TOOLCHAIN: &str = "nightly";

fn installed() -> bool {
    let mut c = Command::new("rustup");
    c.args(["component", "list", "--installed", "--toolchain", TOOLCHAIN]);
    let names = c.output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    ["miri", "rust-src"].iter().all(|part| names.lines().any(|l| l.starts_with(part)))
}

fn install() -> Result<(), String> {
    let mut c = Command::new("rustup");
    c.args(["toolchain", "install", TOOLCHAIN, "--profile", "minimal", "--component", "miri,rust-src"]);
    run(&mut c)
}

pub(crate) fn step(context: &Context) -> Outcome {
    if !installed() {
        if !context.install {
            return context.missing("Miri is not installed (--no-install)".into());
        }
        if let Err(why) = install() {
            return context.missing(format!("Miri could not be installed: {why}"));
        }
    }
    let (mut total, mut bad) = (Counts::default(), Vec::new());
    // Run each selection separately, so that a selection that matches no test is a failure.
    let runs =
        RUNS.iter().flat_map(|(package, features, tests)| tests.iter().map(move |t| (package, features, t)));
    for (package, features, tests) in runs {
        // Start cargo through rustup, because a toolchain's own cargo, which may come first in `PATH`, does
        // not accept `+nightly`.
        let mut miri = Command::new("rustup");
        miri.args(["run", TOOLCHAIN, "cargo", "miri", "test", "-p", package, "--lib"]).args(*features);
        miri.arg("--target-dir").arg(crate::target_dir().join("miri"));
        miri.args(["--", tests, "--skip", KERNELS]).current_dir(crate::root());
        context.tell(&mut miri);
        for name in ["RUSTUP_TOOLCHAIN", "RUSTC", "RUSTDOC", "CARGO"] {
            miri.env_remove(name);
        }
        // Tests read files and environment variables, which Miri's isolation forbids. Drivers keep addresses
        // as integers, which strict provenance forbids.
        miri.env("MIRIFLAGS", "-Zmiri-disable-isolation -Zmiri-permissive-provenance");
        // Few property tests: their random sequences of hundreds of operations are slow in Miri.
        miri.env("PROPTEST_CASES", "3");
        match cargo_tests(&mut miri) {
            Outcome::Tests(counts, why) => {
                total.add(counts);
                if counts.failed > 0 || counts.passed == 0 {
                    bad.push(format!("{package} {tests} {why}").trim().to_string());
                }
            }
            Outcome::Failed(why) => bad.push(format!("{package} {tests}: {why}")),
            other => return other,
        }
    }
    if total.failed == 0 && !bad.is_empty() {
        total.failed = bad.len();
    }
    Outcome::Tests(total, if bad.is_empty() { String::new() } else { format!("failed: {}", bad.join(", ")) })
}
