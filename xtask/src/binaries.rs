//! Runs the workspace's test binaries, two at a time. Many of them use only one processor for a part of their
//! time, because their tests take turns on a device.

use crate::report::line;
use serde_json::Value;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// Binaries that run at the same time.
const AT_ONCE: usize = 2;

/// The binaries with the longest runs, longest first. They start first, so that no long run is left over at
/// the end.
const LONGEST: &[&str] = &[
    "cli",
    "standins",
    "contract",
    "ops",
    "decode",
    "shared",
    "kernels",
    "halcyon_hal",
    "templates",
    "simt",
    "launches",
    "models",
    "mixed",
    "mutation",
];

/// A test binary.
#[derive(Debug, PartialEq, Eq)]
struct Binary {
    name: String,
    path: PathBuf,
    /// The folder of its package, in which it runs.
    package: PathBuf,
}

/// What one binary printed, and how it ended.
pub(crate) struct Finished {
    pub(crate) name: String,
    pub(crate) output: String,
    /// Why it failed; `None` if it ended with success.
    pub(crate) failure: Option<String>,
}

/// The test binary that a line of cargo's messages reports.
fn binary(message: &str) -> Option<Binary> {
    let v: Value = serde_json::from_str(message).ok()?;
    let is_test = v["reason"] == "compiler-artifact" && v["profile"]["test"] == true;
    let path = v["executable"].as_str().filter(|_| is_test)?;
    Some(Binary {
        name: v["target"]["name"].as_str()?.replace('-', "_"),
        path: path.into(),
        package: Path::new(v["manifest_path"].as_str()?).parent()?.into(),
    })
}

/// Builds the test binaries that `command` selects, which is a `cargo test --no-run` command. Its diagnostics
/// appear on the terminal.
fn build(command: &mut Command) -> Result<Vec<Binary>, String> {
    command.arg("--message-format=json-render-diagnostics");
    println!("    $ {}", line(command));
    let out = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let out = out.map_err(|e| format!("cargo did not start: {e}"))?;
    if !out.status.success() {
        return Err(format!("the tests do not build: cargo ended with {}", out.status));
    }
    let mut found: Vec<Binary> = String::from_utf8_lossy(&out.stdout).lines().filter_map(binary).collect();
    let rank = |b: &Binary| LONGEST.iter().position(|n| b.name == *n).unwrap_or(LONGEST.len());
    found.sort_by_key(rank);
    Ok(found)
}

/// Builds the tests and runs their binaries. `settings` sets the variables that tests read. `finished` gets
/// the output of each binary when it has ended.
///
/// # Errors
/// A message if the tests do not build.
pub(crate) fn run(
    cargo: &mut Command,
    settings: &(dyn Fn(&mut Command) + Sync),
    finished: &mut (dyn FnMut(Finished) + Send),
) -> Result<(), String> {
    let left = Mutex::new(VecDeque::from(build(cargo)?));
    let report = Mutex::new(finished);
    let next = || left.lock().unwrap_or_else(|e| e.into_inner()).pop_front();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some(b) = next() {
                    println!("    {} runs", b.name);
                    let done = run_one(&b, settings);
                    (report.lock().unwrap_or_else(|e| e.into_inner()))(done);
                }
            });
        }
    });
    Ok(())
}

fn run_one(b: &Binary, settings: &dyn Fn(&mut Command)) -> Finished {
    let mut command = Command::new(&b.path);
    settings(&mut command);
    command.current_dir(&b.package).env("CARGO_MANIFEST_DIR", &b.package).stdin(Stdio::null());
    let name = b.name.clone();
    // Both streams go to one file, so that messages stay in order.
    let both = tempfile().and_then(|f| Ok((f.try_clone()?, f.try_clone()?, f)));
    let (out, err, mut file) = match both {
        Ok(files) => files,
        Err(e) => {
            return Finished {
                name,
                output: String::new(),
                failure: Some(format!("no file for its output: {e}")),
            };
        }
    };
    let status = command.stdout(out).stderr(err).status();
    let mut output = String::new();
    let failure = match status {
        Ok(s) if s.success() => None,
        Ok(s) => Some(format!("{} ended with {s}", b.path.display())),
        Err(e) => Some(format!("{} did not start: {e}", b.path.display())),
    };
    use std::io::{Read, Seek};
    let mut bytes = vec![];
    if file.rewind().and_then(|()| file.read_to_end(&mut bytes)).is_ok() {
        output = String::from_utf8_lossy(&bytes).into_owned();
    }
    Finished { name, output, failure }
}

/// A file without a name for the output of a binary.
fn tempfile() -> std::io::Result<std::fs::File> {
    static COUNT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let n = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let path = std::env::temp_dir().join(format!("xtask-output-{}-{n}", std::process::id()));
    let file = std::fs::OpenOptions::new().read(true).append(true).create_new(true).open(&path)?;
    // The open file stays usable on the systems where the tests run; elsewhere a file is left behind.
    let _ = std::fs::remove_file(&path);
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_read_from_cargos_messages() {
        let message = |test: bool, executable: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/crates/a/Cargo.toml","target":{{"name":"a-b"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let b = binary(&message(true, "\"/t/a\"")).unwrap();
        assert_eq!(
            (b.name.as_str(), b.path.as_path(), b.package.as_path()),
            ("a_b", Path::new("/t/a"), Path::new("/w/crates/a"))
        );
        assert_eq!(binary(&message(false, "\"/t/a\"")), None);
        assert_eq!(binary(&message(true, "null")), None);
        assert_eq!(binary("no message"), None);
    }
}
