//! The steps `features` and `platforms`, which check builds with other features and for other targets.

use crate::prerequisites;
use crate::report::{Counts, Outcome, run};
use crate::test::Context;
use crate::tier::Tier;

/// Platforms that must type-check, with the packages checked on each.
const PLATFORMS: &[(&str, &[&str])] = &[
    ("aarch64-apple-darwin", EVERYWHERE),
    ("x86_64-pc-windows-msvc", EVERYWHERE),
    ("aarch64-unknown-linux-gnu", EVERYWHERE),
    ("wasm32-unknown-unknown", &["-p", "halcyon-ir", "-p", "halcyon", "-p", "halcyon-compat"]),
];
const EVERYWHERE: &[&str] = &["--workspace", "--exclude", "xtask"];

/// Feature sets that are checked separately, with their packages: each backend must build when it is switched
/// off and when it is the only one. The merge tier checks the first [`FEATURES_ALWAYS`] and a random
/// [`FEATURES_DRAWN`] of the others.
const FEATURES: &[(&str, &[&str])] = &[
    (
        "",
        &[
            "halcyon-hal",
            "halcyon",
            "halcyon-nn",
            "halcyon-data",
            "halcyon-train",
            "halcyon-compat",
            "halcyon-cli",
        ],
    ),
    ("cpu,onnx", &["halcyon", "halcyon-compat"]),
    ("cpu", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("cuda", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("opencl", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("rocm", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("webgpu", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("tpu", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
    ("metal", &["halcyon", "halcyon-compat", "halcyon-cli"]),
    ("onnx", &["halcyon", "halcyon-compat"]),
    ("cpu,parallel", &["halcyon-hal", "halcyon", "halcyon-compat"]),
    ("cpu,edit,hub", &["halcyon-cli"]),
    ("cpu,ort", &["halcyon-cli"]),
    ("cpu,simd", &["halcyon-hal", "halcyon", "halcyon-compat"]),
    ("backends,simd,parallel", &["halcyon-hal", "halcyon", "halcyon-compat", "halcyon-cli"]),
];

const FEATURES_ALWAYS: usize = 1;
const FEATURES_DRAWN: usize = 1;

/// Runs clippy with the feature sets of [`FEATURES`].
pub(crate) fn features(context: &Context) -> Outcome {
    let (mut passed, mut bad) = (0, Vec::new());
    let (always, others) = FEATURES.split_at(FEATURES_ALWAYS);
    let whole = context.tier == Tier::Nightly;
    let n = if whole { others.len() } else { FEATURES_DRAWN };
    let some = [always, &context.draw.sample("features", n, others)].concat();
    for (set, packages) in &some {
        let packages = packages.iter().flat_map(|p| ["-p", p]);
        let mut command = context.cargo();
        command.arg("clippy").args(packages).args(["--no-default-features", "--features", set]);
        match run(command.args(["--", "-D", "warnings"])) {
            Ok(()) => passed += 1,
            Err(_) => bad.push(if set.is_empty() { "none" } else { *set }),
        }
    }
    let counts = Counts { passed, failed: bad.len(), skipped: 0 };
    let note = match (bad.is_empty(), whole) {
        (true, true) => String::new(),
        (true, false) => {
            let names: Vec<&str> = some.iter().map(|(s, _)| if s.is_empty() { "none" } else { s }).collect();
            format!("{} of {} sets: {}", names.len(), FEATURES.len(), names.join("; "))
        }
        (false, _) => format!("these feature sets have errors or warnings: {}", bad.join("; ")),
    };
    Outcome::Tests(counts, note)
}

/// Type-checks the code for other operating systems and processors.
pub(crate) fn platforms(context: &Context) -> Outcome {
    let (mut good, mut bad) = (Vec::new(), Vec::new());
    let n = if context.tier == Tier::Nightly { PLATFORMS.len() } else { 1 };
    for (target, packages) in &context.draw.sample("platforms", n, PLATFORMS) {
        if let Err(why) = prerequisites::rust_target(target, context.install) {
            return context.missing(why);
        }
        match run(context.cargo().args(["check", "--target", target]).args(*packages)) {
            Ok(()) => good.push(*target),
            Err(_) => bad.push(*target),
        }
    }
    let counts = Counts { passed: good.len(), failed: bad.len(), skipped: 0 };
    let note = match bad.is_empty() {
        true => format!("{} of {}: {}", good.len(), PLATFORMS.len(), good.join(", ")),
        false => format!("these platforms have errors: {}", bad.join(", ")),
    };
    Outcome::Tests(counts, note)
}
