//! `halcyon conformance onnx`: runs models with expected outputs.

use super::CaseError;
use crate::args::OnnxArgs;
use crate::cmd::difference::{Difference, Tolerance};
use crate::cmd::level_text;
use crate::report::{self, Progress};
use halcyon::{Backend, Error, OnnxSession, Result};
use halcyon_formats::onnx::{Datum, Port};
use halcyon_host::input::{self, InputError};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Passed,
    /// The case ran without expected outputs, and its result was saved.
    Saved,
    /// The result differs from the expected result.
    Wrong,
    /// The model needs something that is not supported.
    Unsupported,
    /// The case failed to run, or its files are damaged.
    Error,
    /// Skipped, because an earlier case lost the device.
    #[serde(rename = "not_run")]
    NotRun,
}

#[derive(Debug, Serialize)]
struct Case {
    name: String,
    status: Status,
    reason: String,
}

/// Tolerances of a case. The defaults are those of the ONNX project's own test runner.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(default)]
struct CaseTolerance {
    rtol: f64,
    atol: f64,
}

impl Default for CaseTolerance {
    fn default() -> CaseTolerance {
        CaseTolerance { rtol: 1e-3, atol: 1e-7 }
    }
}

pub(super) fn main(a: &OnnxArgs) -> Result<u8> {
    a.backend.check()?;
    let mut folders = vec![];
    find(&a.dir, &mut folders)?;
    folders.sort();
    if folders.is_empty() {
        return Err(Error::argument(
            "conformance",
            format!("no folder under {} holds a model.onnx", a.dir.display()),
        ));
    }
    folders.truncate(a.limit.unwrap_or(usize::MAX));
    let backend = a.backend.open(false)?;

    let start = Instant::now();
    let mut progress = Progress::new("case", folders.len() as u64);
    let quiet = super::PanicRecorder::start();
    let lines = super::Lines(a.json_lines);
    let (mut cases, mut lost) = (Vec::with_capacity(folders.len()), None::<String>);
    for dir in &folders {
        let name = case_name(&a.dir, dir);
        lines.emit("begin", &name)?;
        let (status, reason) = match &lost {
            Some(why) => (Status::NotRun, why.clone()),
            None => check_case(&backend, dir, a.save.as_ref().map(|s| s.join(&name)).as_deref()),
        };
        if matches!(status, Status::Wrong | Status::Error)
            && let Err(e) = super::check_alive(&**backend.device())
        {
            lost = Some(format!("the device was lost at {name}: {}", report::message(&e)));
        }
        let case = Case { name, status, reason };
        lines.emit("case", &case)?;
        cases.push(case);
        progress.step();
    }
    drop(quiet);
    progress.finish();

    let count = |s: Status| cases.iter().filter(|c| c.status == s).count();
    let (passed, wrong) = (count(Status::Passed), count(Status::Wrong));
    let (unsupported, error) = (count(Status::Unsupported), count(Status::Error));
    let total = json!({
        "passed": passed, "saved": count(Status::Saved), "wrong": wrong, "unsupported": unsupported, "error": error,
        "not_run": count(Status::NotRun),
    });
    if a.json_lines {
        lines.emit("end", total)?;
    } else if a.json {
        report::print_json(&json!({ "total": total, "cases": cases }))?;
    } else {
        let mut rows = vec![];
        for c in cases.iter().filter(|c| !matches!(c.status, Status::Passed | Status::Saved)) {
            let what = match c.status {
                Status::Wrong => "wrong",
                Status::Unsupported => "unsupported",
                Status::NotRun => "not run",
                _ => "error",
            };
            rows.push(vec![what.to_string(), c.name.clone(), c.reason.replace('\n', " ")]);
        }
        let saved = match count(Status::Saved) {
            0 => String::new(),
            n => format!("{n} saved, "),
        };
        let not_run = match count(Status::NotRun) {
            0 => String::new(),
            n => format!(", {n} not run"),
        };
        report::print(&format!(
            "{}{} cases on {} at {} in {}: {passed} passed, {saved}{wrong} wrong, {unsupported} unsupported, {error} error{not_run}\n",
            report::table(&rows),
            cases.len(),
            backend.id(),
            level_text(&backend),
            report::time(start.elapsed()),
        ))?;
    }
    Ok(if wrong + error == 0 { 0 } else { 1 })
}

/// Finds folders with a model, at any depth. Symbolic links to folders are not followed, to avoid cycles.
fn find(dir: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    let io = |e: std::io::Error| Error::Io { path: dir.display().to_string(), what: e.to_string() };
    if dir.join("model.onnx").is_file() {
        out.push(dir.to_path_buf());
        return Ok(());
    }
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let entry = entry.map_err(io)?;
        if entry.file_type().map_err(io)?.is_dir() {
            find(&entry.path(), out)?;
        }
    }
    Ok(())
}

/// Path relative to the given folder, with `/` on every system; the folder's name if both are the same.
fn case_name(root: &Path, dir: &Path) -> String {
    let below = dir.strip_prefix(root).unwrap_or(dir);
    let parts: Vec<_> = below.components().map(|c| c.as_os_str().to_string_lossy()).collect();
    match parts.is_empty() {
        true => root.file_name().unwrap_or(root.as_os_str()).to_string_lossy().into_owned(),
        false => parts.join("/"),
    }
}

fn check_case(backend: &Backend, dir: &Path, save: Option<&Path>) -> (Status, String) {
    match super::catch_panics(|| run(backend, dir, save)) {
        Ok(Verdict::Equal) => (Status::Passed, String::new()),
        Ok(Verdict::Random) => (Status::Passed, "random numbers: only type and shape are compared".into()),
        Ok(Verdict::Unjudged) => (Status::Saved, String::new()),
        Ok(Verdict::Differs(difference)) => (Status::Wrong, difference),
        Err(CaseError::Error(e)) => {
            let status = match e {
                Error::Unsupported { .. } | Error::UnsupportedOps(_) => Status::Unsupported,
                _ => Status::Error,
            };
            (status, report::message(&e))
        }
        Err(CaseError::Panic(what)) => (Status::Error, what),
    }
}

enum Verdict {
    Equal,
    /// An output differs. The text describes the first output that differs.
    Differs(String),
    Unjudged,
    /// The type and shape are as expected; the values are random.
    Random,
}

fn run(backend: &Backend, dir: &Path, save: Option<&Path>) -> Result<Verdict> {
    let broken = |what: String| Error::Format { file: dir.display().to_string(), what };
    let file = dir.join("tolerance.json");
    let CaseTolerance { rtol, atol } = match input::text_of(&file, input::TEXT) {
        Ok(text) => serde_json::from_str(&text).map_err(|e| broken(format!("tolerance.json: {e}")))?,
        Err(InputError::Io(e)) if e.kind() == std::io::ErrorKind::NotFound => CaseTolerance::default(),
        Err(e) => return Err(e.error(&file)),
    };
    let tolerance = Tolerance { rtol, atol, rtol_f16: 0.0 };
    let model = crate::cmd::open(&dir.join("model.onnx"))?;
    model.check(backend.info().backend.id())?;
    let (ports, results) = (model.inputs()?, model.outputs()?);
    let draws = model.draws();
    let session = OnnxSession::new(backend, model)?;
    let mut sets: Vec<PathBuf> = std::fs::read_dir(dir)
        .map_err(|e| broken(e.to_string()))?
        .filter_map(|e| Some(e.ok()?.path()))
        .filter(|p| {
            p.is_dir() && p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("test_data_set_"))
        })
        .collect();
    sets.sort();
    if sets.is_empty() {
        return Err(broken("the case has no folder test_data_set_0".into()));
    }
    let mut verdict = Verdict::Equal;
    for set in &sets {
        let inputs = read(set, "input", &ports)?;
        if inputs.len() < ports.len() {
            return Err(broken(format!("the case has {} inputs, the model {}", inputs.len(), ports.len())));
        }
        let expected = read(set, "output", &results)?;
        if expected.is_empty() && save.is_none() {
            return Err(broken("the case has no expected output".into()));
        }
        let got = session.run_data(&inputs)?.outputs;
        if let Some(to) = save {
            let to = to.join(set.file_name().unwrap_or_default());
            std::fs::create_dir_all(&to)
                .map_err(|e| Error::Io { path: to.display().to_string(), what: e.to_string() })?;
            for (i, (port, value)) in results.iter().zip(&got).enumerate() {
                value.write_pb(&to.join(format!("output_{i}.pb")), &port.name)?;
            }
        }
        if expected.is_empty() {
            verdict = Verdict::Unjudged;
        } else if draws && matches!(verdict, Verdict::Equal) {
            verdict = Verdict::Random;
        }
        for ((port, want), got) in results.iter().zip(&expected).zip(&got) {
            let difference = match draws {
                false => Difference::between(got, want, &tolerance),
                true => Difference::of_types(got, want),
            };
            if let Some(d) = difference.text() {
                return Ok(Verdict::Differs(format!("{}: {d}", port.name)));
            }
        }
    }
    Ok(verdict)
}

/// Reads `input_0.pb`, `input_1.pb`, … (or `output_0.pb`, …), one for each port, up to the first file that is
/// missing.
fn read(set: &Path, kind: &str, ports: &[Port]) -> Result<Vec<Datum>> {
    let mut out = vec![];
    for (i, p) in ports.iter().enumerate() {
        let path = set.join(format!("{kind}_{i}.pb"));
        if !path.is_file() {
            break;
        }
        out.push(Datum::read_pb(&path, &p.ty)?);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_paths_below_the_root() {
        assert_eq!(case_name(Path::new("a/b"), Path::new("a/b/c/d")), "c/d");
        assert_eq!(case_name(Path::new("a/b"), Path::new("a/b")), "b");
    }
}
