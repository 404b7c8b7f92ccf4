//! `halcyon run --verify`: checks steps of a run on another backend.

use super::Loaded;
use crate::args::RunArgs;
use crate::report::{self, figures, number, size};
use halcyon::verify::{Replay, Spec, VerifyOptions, VerifyReport};
use halcyon::{Backend, ConstData, Error, Level, Result, Session};
use halcyon_formats::onnx::Datum;
use serde_json::{Value, json};
use std::fmt::Write;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Exit code if a result differs from the reference.
pub(super) const EXIT_DIFFERS: u8 = 6;

/// A verification, with the file that it wrote and the file's size.
#[derive(Debug)]
pub(super) struct Verified {
    report: VerifyReport,
    file: Option<(PathBuf, u64)>,
}

/// Parses `--verify`, before a model is opened.
pub(super) fn spec(a: &RunArgs) -> Result<Option<Spec>> {
    a.verify.as_deref().map(str::parse).transpose()
}

/// The backend whose results are the reference.
pub(super) fn reference(b: halcyon::BackendBuilder) -> Result<Backend> {
    b.level(Level::O0).amp(halcyon::AmpPolicy::None).build()
}

pub(super) fn tensors(inputs: &[Datum]) -> Vec<ConstData> {
    inputs.iter().filter_map(|d| d.tensor().cloned()).collect()
}

/// Opens the reference. Models that cannot be verified are rejected here, before any run.
pub(super) fn options(a: &RunArgs, spec: Spec, loaded: &Loaded) -> Result<VerifyOptions> {
    loaded.graph("a verified run")?;
    let o = VerifyOptions::new(&reference(Backend::builder().backend_type(spec.backend))?).share(spec.share);
    Ok(match a.verify_seed {
        Some(seed) => o.seed(seed),
        None => o,
    })
}

/// Runs once more with verification. A divergence is written to a file.
pub(super) fn run(a: &RunArgs, o: &VerifyOptions, loaded: &Loaded, inputs: &[Datum]) -> Result<Verified> {
    let graph = loaded.graph("a verified run")?.graph.clone();
    let report = Session::new(&loaded.backend, graph).verify(&tensors(inputs), o)?;
    let file = match &report.divergence {
        Some(r) => {
            let path = a.save_replay.clone().unwrap_or_else(|| free(name(&a.model)));
            let bytes = r.write(&path)?;
            Some((path, bytes))
        }
        None => None,
    };
    Ok(Verified { report, file })
}

/// The default name of the replay file: `digits.replay` for a model `…/digits.onnx`.
fn name(model: &Path) -> PathBuf {
    PathBuf::from(model.file_stem().unwrap_or("model".as_ref())).with_extension("replay")
}

/// The path, with a number appended if a file of another kind exists there. The program chose the path, not
/// the user, so it may overwrite only replay files.
fn free(first: PathBuf) -> PathBuf {
    let ours = |p: &Path| {
        let mut head = [0; 7];
        let read = std::fs::File::open(p).and_then(|mut f| f.read_exact(&mut head));
        read.is_ok() && &head == b"HALCRPL"
    };
    let numbered = |n: usize| {
        let mut name = first.as_os_str().to_owned();
        name.push(format!(".{n}"));
        PathBuf::from(name)
    };
    let usable = |p: &PathBuf| std::fs::symlink_metadata(p).is_err() || p.is_file() && ours(p);
    std::iter::once(first.clone()).chain((1..).map(numbered)).find(usable).unwrap_or_else(|| first.clone())
}

/// After a failure, writes a replay of it to the requested file and reports that file. The failure remains
/// the command's error.
pub(super) fn write_replay(a: &RunArgs, loaded: &Loaded, inputs: &[Datum], e: &Error) {
    let Some(path) = &a.save_replay else { return };
    let replay = || -> Result<(Replay, u64)> {
        let graph = loaded.graph("a replay file")?.graph.clone();
        let replay = Session::new(&loaded.backend, graph).replay_of(&tensors(inputs), e)?;
        let bytes = replay.write(path)?;
        Ok((replay, bytes))
    };
    match replay() {
        Ok((r, bytes)) => {
            let what = match r.about.step {
                Some(step) => format!("step {step}, {}", r.about.op),
                None => "the whole graph".into(),
            };
            report::note(&format!("saved {what} as {} ({})", path.display(), size(bytes)));
        }
        Err(why) => report::note(&format!("warning: {} was not written: {why}", path.display())),
    }
}

impl Verified {
    pub(super) fn code(&self) -> u8 {
        if self.report.agrees() { 0 } else { EXIT_DIFFERS }
    }

    pub(super) fn text(&self) -> String {
        let r = &self.report;
        // Writing to a string cannot fail.
        let mut out = format!(
            "verify   {} of {} pieces of the plan ({} steps) on {} at O0, drawn by --verify-seed {}: {}\n",
            r.checks.len(),
            r.pieces,
            r.steps,
            r.reference,
            r.seed,
            if r.agrees() { "all agree" } else { "the last one differs" },
        );
        let title = ["op", "pieces", "largest error", "ulp", "of tolerance"];
        let mut rows: Vec<Vec<String>> = vec![title.map(String::from).into()];
        for (op, (n, e)) in r.by_op() {
            let of = number(e.of_tolerance);
            rows.push(vec![report::short(op, 40), n.to_string(), number(e.abs), number(e.ulp), of]);
        }
        out += &figures(rows, &[1, 2, 3, 4]);
        if let Some(c) = r.checks.iter().find(|c| c.wrong.is_some()) {
            let at = if c.span.is_empty() { String::new() } else { format!(" (at {})", c.span) };
            let wrong = c.wrong.as_deref().unwrap_or_default();
            let _ = writeln!(out, "differs  step {}, {} by {}{at}: {wrong}", c.step, c.op, c.kernel);
        }
        if let Some((path, bytes)) = &self.file {
            let _ = writeln!(
                out,
                "replay   {} ({}); see it again: halcyon replay {}",
                path.display(),
                size(*bytes),
                path.display()
            );
        }
        out
    }

    pub(super) fn json(&self) -> Value {
        let r = &self.report;
        json!({
            "agrees": r.agrees(),
            "reference": r.reference,
            "seed": r.seed,
            "share": r.share,
            "pieces": r.pieces,
            "steps": r.steps,
            "checks": r.checks,
            "by_op": r.by_op().iter().map(|(op, (n, e))| json!({ "op": op, "pieces": n, "errors": e })).collect::<Vec<_>>(),
            "replay": self.file.as_ref().map(|(p, _)| report::path(p)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_file_name_replaces_no_existing_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.replay");
        assert_eq!(free(path.clone()), path);
        std::fs::write(&path, b"HALCRPL1 and more").unwrap();
        assert_eq!(free(path.clone()), path);
        std::fs::write(&path, b"my notes").unwrap();
        assert_eq!(free(path.clone()), dir.path().join("m.replay.1"));
    }
}
