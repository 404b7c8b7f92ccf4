//! Runs the tests of the op table, the models, mixed precision and the CPU's kernels under the machine's
//! instruction sets, except the best one, which the step `tests` uses. The merge tier runs a sample.
//! `HALCYON_CPU_ISA` selects the set.

use crate::report::{Counts, Outcome, run};
use crate::test::{Context, cargo_tests, remove_programs};
use crate::tier::Tier;
use serde_json::Value;
use std::process::Command;

const VARIABLE: &str = "HALCYON_CPU_ISA";
/// Under each set, the merge tier runs one case of the op table in this many.
const ONE_IN: &str = "3";
/// How many instruction sets the merge tier draws at random from those below the best.
const DRAWN: usize = 2;
/// Test files whose results depend on the instruction set.
const FILES: [&str; 3] = ["ops", "mixed", "models"];
/// Tests in these files that do not use the CPU's kernels.
const OTHERS: [&str; 3] = ["opencl", "webgpu", "sanitizer"];

/// The instruction sets of this machine, as reported by the command.
fn sets(context: &Context) -> Result<Vec<String>, String> {
    let name = if cfg!(windows) { "halcyon.exe" } else { "halcyon" };
    let binary = crate::target_dir().join("release").join(name);
    let mut c = Command::new(&binary);
    c.current_dir(crate::root()).args(["devices", "--json"]);
    context.tell(&mut c);
    let out = c.env_remove(VARIABLE).output().map_err(|e| format!("{}: {e}", binary.display()))?;
    let v: Value = serde_json::from_slice(&out.stdout).map_err(|e| format!("halcyon devices --json: {e}"))?;
    named(&v).ok_or_else(|| "halcyon devices --json names no instruction sets of the CPU".into())
}

/// Finds the CPU's property `instruction_sets` in the report.
fn named(v: &Value) -> Option<Vec<String>> {
    match v {
        Value::Object(o) => match o.get("instruction_sets").and_then(Value::as_str) {
            Some(text) => Some(text.split_whitespace().map(String::from).collect()),
            None => o.values().find_map(named),
        },
        Value::Array(a) => a.iter().find_map(named),
        _ => None,
    }
}

/// Runs the step `isa`.
pub(crate) fn step(context: &Context) -> Outcome {
    let outcome = all(context);
    remove_programs();
    outcome
}

fn all(context: &Context) -> Outcome {
    let files = FILES.iter().flat_map(|f| ["--test", f]);
    // This also builds the command. It selects the same packages as the step `tests`, so that cargo reuses
    // that step's builds.
    let build = run(context.cargo_test().args(["--workspace", "--no-run"]).args(files.clone()));
    let all = match build.and_then(|()| sets(context)) {
        Ok(all) => all,
        Err(why) => return Outcome::Failed(why),
    };
    let Some((best, lower)) = all.split_last() else {
        return Outcome::Failed("halcyon devices --json lists no instruction set".into());
    };
    let nightly = context.tier == Tier::Nightly;
    let lower: Vec<&str> = lower.iter().map(String::as_str).collect();
    let names = if nightly { lower } else { context.draw.sample("instruction sets", DRAWN, &lower) };
    // The kernels' unit tests always run with each `Isa`. The variable determines which extensions they use,
    // such as AVX512_VNNI.
    let unit = if nightly { names.clone() } else { context.draw.sample("kernel tests", 1, &names) };
    let (mut total, mut bad) = (Counts::default(), Vec::new());
    for name in &names {
        let mut runs = vec![{
            let mut c = context.cargo_test();
            c.args(["--workspace", "--no-fail-fast"]).args(files.clone()).arg("--");
            c.args(OTHERS.iter().flat_map(|o| ["--skip", o]));
            c.env("HALCYON_DEVICES", "cpu").env("HALCYON_CASES", if nightly { "all" } else { ONE_IN });
            c
        }];
        if unit.contains(name) {
            let mut c = context.cargo_test();
            c.args(["--workspace", "--no-fail-fast", "--lib", "--", "cpu::"]);
            runs.push(c);
        }
        println!("    {VARIABLE}={name}");
        for mut c in runs {
            match cargo_tests(c.env(VARIABLE, name)) {
                Outcome::Tests(counts, why) => {
                    total.add(counts);
                    if counts.failed > 0 {
                        bad.push(format!("{name} {why}").trim().to_string());
                    }
                }
                other => return other,
            }
        }
    }
    if names.is_empty() {
        return Outcome::Passed(format!(
            "{best} is the only instruction set here, and the step `tests` uses it"
        ));
    }
    let note = match (bad.is_empty(), nightly) {
        (false, _) => format!("failed under {}", bad.join(", ")),
        (true, true) => format!("{}, all cases; the step `tests` uses {best}", names.join(", ")),
        (true, false) => format!(
            "{}, one case in {ONE_IN}, kernel tests under {}; the step `tests` uses {best}",
            names.join(", "),
            unit.join(", ")
        ),
    };
    Outcome::Tests(total, note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruction_sets_are_found_in_the_report() {
        let v = serde_json::json!([{ "id": "cuda" }, { "id": "cpu", "devices": [
            { "properties": { "simd": "avx2+fma", "instruction_sets": "portable avx2" } } ] }]);
        assert_eq!(named(&v), Some(vec!["portable".to_string(), "avx2".to_string()]));
        assert_eq!(named(&serde_json::json!([{ "id": "cpu" }])), None);
    }

    #[test]
    fn every_file_of_the_step_exists() {
        for (krate, file) in ["halcyon", "halcyon", "halcyon-cli"].iter().zip(FILES) {
            assert!(crate::root().join(format!("crates/{krate}/tests/{file}.rs")).is_file(), "{file}");
        }
    }
}
