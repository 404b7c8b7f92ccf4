//! The step `package`: the tests of the Python package and the checks of its code, with the built wheel.

use crate::prerequisites::{Requirements, Venv};
use crate::report::{Counts, Outcome, run, run_watching};
use crate::test::Context;
use crate::tier::Tier;
use crate::{profiles, wheel};
use std::path::PathBuf;
use std::process::Command;

const TORCH: &[Requirements] = &[
    Requirements { file: "requirements.txt", flags: &[] },
    Requirements { file: "requirements-no-deps.txt", flags: &["--no-deps"] },
    Requirements { file: "requirements-package-torch.txt", flags: &[] },
];

/// The tests of the merge tier: those without PyTorch.
const SAMPLE: &[&str] = &["tests", "--ignore=tests/torch"];

pub(crate) fn step(context: &Context) -> Outcome {
    if !context.has_python() {
        return context.missing("the Python environment is not installed".into());
    }
    all(context).unwrap_or_else(Outcome::Failed)
}

fn all(context: &Context) -> Result<Outcome, String> {
    let nightly = context.tier == Tier::Nightly;
    let venv = match nightly {
        false => Venv::new("venv"),
        true => {
            let venv = Venv::new("venv-package");
            println!("environment: {}", venv.prepare(TORCH)?);
            venv
        }
    };
    let project = crate::root().join("bindings/python");
    let python = |words: &[&str]| {
        let mut c = Command::new(venv.python());
        c.current_dir(&project).args(["-m"]).args(words);
        context.tell(&mut c);
        c
    };
    let manifest = project.join("Cargo.toml");
    run(context.cargo().args(["fmt", "--check", "--manifest-path"]).arg(&manifest))?;
    run(&mut python(&["ruff", "check", "."]))?;
    run(&mut python(&["ruff", "format", "--check", "."]))?;
    let installed = install(&venv)?;
    if nightly {
        run(&mut python(&["mypy", "--strict", "python/halcyon"]))?;
        let mut stubs = python(&["mypy.stubtest", "halcyon._native"]);
        run(stubs.env("PYTHONPATH", &installed))?;
        // With the profiles of the workspace, so that the libraries that others built are used.
        let mut clippy = context.cargo();
        clippy.args(["clippy", "--release", "--locked", "--all-targets", "--manifest-path"]).arg(&manifest);
        clippy.arg("--target-dir").arg(crate::target_dir()).arg("--config").arg(profiles::workspace()?);
        run(clippy.args(["--", "-D", "warnings"]))?;
    }
    let mut tests = python(&["pytest", "-q", "-p", "no:cacheprovider"]);
    tests.args(if nightly { &["tests"] } else { SAMPLE });
    // Little work for each thread: more threads would only wait for each other.
    tests.env("PYTHONPATH", &installed).env("PYTHONDONTWRITEBYTECODE", "1").env("OMP_NUM_THREADS", "2");
    let mut counts = None;
    let result = run_watching(&mut tests, |line| counts = totals(line).or(counts));
    Ok(match (counts, result) {
        (Some(c), Ok(())) if c.passed > 0 => Outcome::Tests(c, String::new()),
        (Some(c), Err(why)) if c.failed > 0 => Outcome::Tests(c, why),
        (_, Err(why)) => Outcome::Failed(why),
        (_, Ok(())) => Outcome::Failed("no test ran".into()),
    })
}

/// Installs the wheel into a folder of its own, and returns the folder. The step `wheel` has built it, unless
/// this step runs alone.
fn install(venv: &Venv) -> Result<PathBuf, String> {
    let wheel = wheel::built()?;
    let to = crate::target_dir().join("package");
    if to.exists() {
        std::fs::remove_dir_all(&to).map_err(|e| format!("{}: {e}", to.display()))?;
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--target"];
    run(Command::new(venv.python()).args(pip).arg(&to).arg(wheel))?;
    Ok(to)
}

/// The counts in pytest's last line: `3 failed, 10 passed, 2 skipped in 1.20s`.
fn totals(line: &str) -> Option<Counts> {
    let (all, _) = line.trim_matches(|c| c == '=' || c == ' ').rsplit_once(" in ")?;
    let mut counts = Counts::default();
    for part in all.split(", ") {
        let (n, what) = part.split_once(' ')?;
        let n: usize = n.parse().ok()?;
        match what {
            "passed" | "xpassed" => counts.passed += n,
            "failed" | "error" | "errors" => counts.failed += n,
            "skipped" => counts.skipped += n,
            _ => {}
        }
    }
    Some(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_from_the_last_line() {
        let of = |l: &str| totals(l).map(|c| (c.passed, c.failed, c.skipped));
        assert_eq!(of("3 failed, 10 passed, 2 skipped, 1 warning in 1.20s"), Some((10, 3, 2)));
        assert_eq!(of("==== 1 passed, 1 error in 0.10s (0:00:01) ===="), Some((1, 1, 0)));
        assert_eq!(of("tests/test_a.py ... in the text"), None);
    }
}
