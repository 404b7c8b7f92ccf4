//! `cargo xtask wheel`: the Python package (`bindings/python`) as one wheel for every Python from 3.10 on.
//!
//! No dependency contains C code, so only the link depends on the C library. The native module is compiled
//! like the release binary, whose crates it shares, and linked by zig against an old glibc. Its tag is then
//! manylinux, whatever the version of glibc here.

use crate::Failure;
use crate::prerequisites::{self, Requirements, Venv, succeeds};
use crate::python_workspace::Generated;
use crate::report::{Outcome, run};
use crate::test::Context;
use crate::tier::Tier;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

static BUILT: OnceLock<PathBuf> = OnceLock::new();

const REQUIREMENTS: &[Requirements] = &[Requirements { file: "requirements-wheel.txt", flags: &[] }];
/// Maximum size in bytes.
const SIZE: u64 = 40_000_000;
/// The oldest glibc that the wheel runs with.
const GLIBC: &str = "2.28";
/// Files that the wheel must have besides the modules, by the end of their name.
const PARTS: &[&str] =
    &["/_native.abi3.so", "/_native.pyi", "/py.typed", "/METADATA", "LICENSE-MIT", "LICENSE-APACHE"];

/// `cargo xtask wheel`.
pub(crate) fn main(args: &[&str]) -> Result<bool, Failure> {
    if let [other, ..] = args {
        return Err(Failure::Usage(format!("`wheel` has no option `{other}`")));
    }
    let wheel = build()?;
    println!("{}: {}", wheel.display(), check(&wheel)?);
    Ok(true)
}

fn project() -> PathBuf {
    crate::root().join("bindings/python")
}

fn tools() -> Venv {
    Venv::new("venv-wheel")
}

/// A program that pip installed.
fn tool(name: &str) -> PathBuf {
    tools().python().with_file_name(format!("{name}{}", std::env::consts::EXE_SUFFIX))
}

/// Builds the wheel into `target/wheels`.
///
/// # Errors
/// A tool that cannot be installed, versions that differ from the workspace's, a build that fails.
pub(crate) fn build() -> Result<PathBuf, String> {
    println!("wheel tools: {}", tools().prepare(REQUIREMENTS)?);
    same_versions()?;
    let out = crate::target_dir().join("wheels");
    // Only the new wheel is there afterwards.
    if out.exists() {
        std::fs::remove_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
    }
    let mut maturin = Command::new(tool("maturin"));
    // Each build is used once, so incremental files would only cost time and disk space.
    let workspace = Generated::new(&project())?;
    maturin.current_dir(&workspace.package).env("CARGO_INCREMENTAL", "0");
    maturin.args(["build", "--release", "--out"]).arg(&out).arg("--target-dir").arg(crate::target_dir());
    if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        let tag = format!("manylinux_{}", GLIBC.replace('.', "_"));
        maturin.args(["--compatibility", &tag, "--auditwheel", "check"]);
        maturin.env("ZIG_GLOBAL_CACHE_DIR", crate::target_dir().join("zig"));
        // As arguments of the last compilation only: the crates do not depend on the linker.
        let linker = linker()?;
        maturin.arg("--").arg(format!("-Clinker={}", linker.display())).arg("-Clinker-flavor=gcc");
    }
    run(&mut maturin)?;
    workspace.check_lock()?;
    let wheel = found(&out).ok_or_else(|| format!("maturin left no wheel in {}", out.display()))?;
    Ok(BUILT.get_or_init(|| wheel).clone())
}

/// A script that links with zig, against the symbols of [`GLIBC`].
///
/// maturin translates the arguments that zig does not know. It would also link zig's own unwinder instead of
/// `libgcc_s`. glibc ends threads with `libgcc_s`, and so does Python when it ends; frames that use another
/// unwinder crash then.
#[cfg(unix)]
fn linker() -> Result<PathBuf, String> {
    use std::os::unix::fs::PermissionsExt;
    let script = crate::target_dir().join("zig-cc.sh");
    let maturin = tool("maturin");
    let tools = maturin.parent().unwrap_or(Path::new("")).display().to_string();
    let text = format!(
        r#"#!/bin/sh
unwinder=$(cc -print-file-name=libgcc_s.so.1)
for argument; do
    shift
    if [ "$argument" = -lgcc_s ]; then argument=$unwinder; fi
    set -- "$@" "$argument"
done
PATH="{tools}:$PATH" exec maturin zig cc -- -target x86_64-linux-gnu.{GLIBC} "$@"
"#
    );
    std::fs::write(&script, text)
        .and_then(|()| std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)))
        .map_err(|e| format!("{}: {e}", script.display()))?;
    Ok(script)
}

#[cfg(not(unix))]
fn linker() -> Result<PathBuf, String> {
    Err("zig links on Linux only".into())
}

/// The versions of each package of a lock file.
pub(crate) fn locked(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut all: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let value = |line: &str, key: &str| {
        Some(line.strip_prefix(key)?.strip_prefix(" = \"")?.strip_suffix('"')?.to_string())
    };
    let mut name = String::new();
    for line in text.lines() {
        if let Some(n) = value(line, "name") {
            name = n;
        } else if let Some(version) = value(line, "version") {
            all.entry(std::mem::take(&mut name)).or_default().insert(version);
        }
    }
    all
}

/// Whether every package that the workspace has too has a version of the workspace.
fn same_versions() -> Result<(), String> {
    let read = |path: PathBuf| std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()));
    let ours = locked(&read(crate::root().join("Cargo.lock"))?);
    let theirs = locked(&read(project().join("Cargo.lock"))?);
    let differs = |(name, versions): &(&String, &BTreeSet<String>)| {
        ours.get(*name).is_some_and(|known| !versions.is_subset(known))
    };
    let odd: Vec<&str> = theirs.iter().filter(differs).map(|(name, _)| name.as_str()).collect();
    match odd.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "bindings/python/Cargo.lock has other versions than the workspace of {}: copy Cargo.lock to it, and run \
             `cargo metadata --manifest-path bindings/python/Cargo.toml`, which adds and removes packages",
            odd.join(", ")
        )),
    }
}

/// Checks a wheel's size, contents and tags. Describes it in one line.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn check(wheel: &Path) -> Result<String, String> {
    let size = std::fs::metadata(wheel).map_err(|e| format!("{}: {e}", wheel.display()))?.len();
    let mb = |n: u64| format!("{:.1} MB", n as f64 / 1e6);
    if size >= SIZE {
        return Err(format!("the wheel has {}, but only {} are allowed", mb(size), mb(SIZE)));
    }
    let list = "import sys, zipfile; print(*zipfile.ZipFile(sys.argv[1]).namelist(), sep='\\n')";
    let names = output(Command::new(tools().python()).args(["-c", list]).arg(wheel))?;
    let has = |part: &&&str| names.lines().any(|n| n.ends_with(**part));
    if let Some(part) = PARTS.iter().find(|p| !has(p)) {
        return Err(format!("the wheel has no file {part}"));
    }
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return Ok(mb(size));
    }
    let told = output(Command::new(tool("auditwheel")).arg("show").arg(wheel))?;
    let tag = format!("manylinux_{}_x86_64", GLIBC.replace('.', "_"));
    // "…is consistent with the following platform tag: "manylinux_2_17_x86_64"."
    let of = told.split('"').find(|t| t.starts_with("manylinux_")).ok_or(format!("auditwheel: {told}"))?;
    let minor = |t: &str| t.split('_').nth(2).and_then(|n| n.parse::<u32>().ok());
    if minor(of) > minor(&tag) {
        return Err(format!("auditwheel finds the tag {of}, expected at most {tag}"));
    }
    let file = wheel.file_name().unwrap_or_default().to_string_lossy();
    if !file.contains("-cp310-abi3-") || !file.contains(&tag) {
        return Err(format!("{file} lacks the tags cp310-abi3 and {tag}"));
    }
    Ok(format!("{}, {of} by its symbols", mb(size)))
}

/// The output of a command that must succeed.
fn output(command: &mut Command) -> Result<String, String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let out = command.output().map_err(|e| format!("{program}: {e}"))?;
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    match out.status.success() {
        true => Ok(text),
        false => Err(format!(
            "{program} ended with {}: {text}{}",
            out.status,
            String::from_utf8_lossy(&out.stderr)
        )),
    }
}

/// The Python code of the package's README.
fn first_lines() -> Result<String, String> {
    let path = project().join("README.md");
    let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let code = text.split("```python\n").nth(1).and_then(|rest| rest.split("```").next());
    code.map(str::to_string).ok_or_else(|| format!("{} has no Python code", path.display()))
}

/// Installs a wheel into an empty environment and runs the README's lines and the command there.
fn smoke(wheel: &Path) -> Result<(), String> {
    let venv = Venv::new("venv-empty");
    let dir = venv.python().parent().and_then(Path::parent).map(Path::to_path_buf).unwrap_or_default();
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&dir))?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    run(Command::new(venv.python()).args(pip).arg(wheel))?;
    let program =
        |name: &str| venv.python().with_file_name(format!("{name}{}", std::env::consts::EXE_SUFFIX));
    let environment = |c: &mut Command| {
        c.current_dir(crate::root()).env_remove("PYTHONPATH").env("HALCYON_CONFIG", "off");
    };
    let mut lines = Command::new(venv.python());
    environment(lines.arg("-c").arg(first_lines()?));
    run(&mut lines)?;
    let mut command = Command::new(program("halcyon"));
    environment(command.args(["run", "models/digits.onnx", "--input", "models/digit-7.png", "--top-k", "1"]));
    match output(&mut command)?.split_whitespace().nth(1) {
        Some("7") => Ok(()),
        other => Err(format!("the installed command read {other:?} in the picture of a seven")),
    }
}

/// The wheel that this process built; builds it if it did not yet.
///
/// # Errors
/// The errors of [`build`].
pub(crate) fn built() -> Result<PathBuf, String> {
    BUILT.get().cloned().map_or_else(build, Ok)
}

fn found(dir: &Path) -> Option<PathBuf> {
    let mut entries = std::fs::read_dir(dir).ok()?.flatten().map(|e| e.path());
    entries.find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// The step `wheel`: builds the wheel, checks it, and runs it in an empty environment.
pub(crate) fn step(context: &Context) -> Outcome {
    if !prerequisites::is_installed("install-python") {
        return context.missing("no Python 3 with venv".into());
    }
    context.outcome(all(context))
}

fn all(context: &Context) -> Result<String, String> {
    let wheel = build()?;
    let mut note = check(&wheel)?;
    smoke(&wheel)?;
    if context.tier == Tier::Nightly {
        run(Command::new(tool("abi3audit")).args(["--strict", "--assume-minimum-abi3", "3.10"]).arg(&wheel))?;
        note += ", only the stable ABI of Python 3.10";
        for version in ["3.10", "3.12", "3.13", "3.14"] {
            if let Some(python) = interpreter(version) {
                other(version, &python, &wheel)?;
                note += &format!(", Python {version}");
            }
        }
    }
    Ok(note)
}

/// The Python of a version that can make environments: the one on the path, or one that pyenv installed.
fn interpreter(version: &str) -> Option<PathBuf> {
    let name = format!("python{version}");
    let versions = std::env::home_dir().map(|h| h.join(".pyenv/versions")).and_then(|d| d.read_dir().ok());
    let installed = versions.into_iter().flatten().flatten().map(|e| e.path().join("bin").join(&name));
    std::iter::once(PathBuf::from(&name))
        .chain(installed)
        .find(|python| succeeds(Command::new(python).args(["-c", "import venv, ensurepip"])))
}

/// Runs the README's lines with another version of Python.
fn other(version: &str, python: &Path, wheel: &Path) -> Result<(), String> {
    let dir = crate::target_dir().join(format!("venv-python{version}"));
    run(Command::new(python).args(["-m", "venv", "--clear"]).arg(&dir))?;
    let own = dir.join("bin/python");
    run(Command::new(&own).args(["-m", "pip", "install", "--quiet"]).arg(wheel))?;
    run(Command::new(&own).current_dir(crate::root()).arg("-c").arg(first_lines()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_a_lock_file() {
        let text = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\ndependencies = [\n \"b\",\n]\n\n[[package]]\nname = \"a\"\nversion = \"2.0.0\"\n";
        let all = locked(text);
        assert_eq!(all["a"], BTreeSet::from(["1.0.0".to_string(), "2.0.0".to_string()]));
        assert!(!all.contains_key(""), "the version of the file itself has no quotes");
    }

    #[test]
    fn the_lock_files_agree() {
        same_versions().unwrap();
    }

    #[test]
    fn the_readme_has_code() {
        assert!(first_lines().unwrap().starts_with("import halcyon\n"));
    }
}
