//! The sections of a check: for each what it runs and how long it may take. Another section is another row.

use crate::child::Ended;
use crate::event::{Check, Event, Status};
use halcyon::DType;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What sections are run with.
#[derive(Clone, Debug)]
pub struct Context {
    /// The backend's id.
    pub backend: String,
    /// The folder of unpacked data.
    pub data: PathBuf,
    /// Tiny sizes and a sample of the cases.
    pub tiny: bool,
    pub torch: bool,
    pub exe: PathBuf,
    /// Draws the sample.
    pub seed: u64,
}

/// How a child's output is understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Lines of events.
    Events,
    /// `doctor --json`.
    Doctor,
    /// `conformance ops --json`.
    Ops,
    /// `conformance onnx --json`.
    Onnx,
}

/// One child.
#[derive(Clone, Debug)]
pub struct Job {
    pub label: String,
    pub args: Vec<String>,
    pub form: Form,
}

/// A part of a check.
#[derive(Debug)]
pub struct Section {
    pub name: &'static str,
    pub what: &'static str,
    /// Most seconds, where the whole check may take nine minutes.
    pub seconds: u64,
    /// Whether children run beside each other: not where times are measured.
    pub parallel: bool,
    /// It measures, and comes after all that checks.
    pub measures: bool,
    /// Share of the cases that must pass, where some may be of what is not supported.
    pub least: f64,
    /// Its children, or why there is nothing to run.
    pub jobs: fn(&Context) -> Result<Vec<Job>, String>,
}

pub const SECTIONS: &[Section] = &[
    Section {
        name: "doctor",
        what: "each step from the library to a product",
        seconds: 60,
        parallel: false,
        measures: false,
        least: 0.0,
        jobs: doctor,
    },
    Section {
        name: "hal",
        what: "the drivers' conformance suite",
        seconds: 90,
        parallel: false,
        measures: false,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "hal")]),
    },
    Section {
        name: "ops",
        what: "the op table",
        seconds: 120,
        parallel: true,
        measures: false,
        least: 0.0,
        jobs: ops,
    },
    Section {
        name: "spine",
        what: "a Llama decoded with states, a network trained",
        seconds: 60,
        parallel: false,
        measures: false,
        least: 0.0,
        jobs: spine,
    },
    Section {
        name: "mnist",
        what: "ten digits",
        seconds: 30,
        parallel: false,
        measures: false,
        least: 0.0,
        jobs: mnist,
    },
    Section {
        name: "models",
        what: "MiniLM, ResNet-50, the light models",
        seconds: 120,
        parallel: true,
        measures: false,
        least: 0.0,
        jobs: models,
    },
    Section {
        name: "suite",
        what: "the ONNX backend test suite",
        seconds: 150,
        parallel: true,
        measures: false,
        least: 0.9,
        jobs: suite,
    },
    Section {
        name: "bench-memory",
        what: "bandwidth: element-wise, norms, GEMV",
        seconds: 60,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "bench-memory")]),
    },
    Section {
        name: "bench-gemm",
        what: "products of matrices",
        seconds: 75,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "bench-gemm")]),
    },
    Section {
        name: "bench-attention",
        what: "attention",
        seconds: 45,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "bench-attention")]),
    },
    Section {
        name: "bench-models",
        what: "ResNet-50 and MiniLM",
        seconds: 120,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: bench_models,
    },
    Section {
        name: "bench-capture",
        what: "what a launch of a captured graph costs",
        seconds: 20,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "bench-capture")]),
    },
    Section {
        name: "bench-copies",
        what: "copies between locked memory and the device",
        seconds: 30,
        parallel: false,
        measures: true,
        least: 0.0,
        jobs: |c| Ok(vec![own(c, "bench-copies")]),
    },
];

fn job(label: &str, form: Form, args: &[&str]) -> Job {
    Job { label: label.into(), args: args.iter().map(|a| a.to_string()).collect(), form }
}

/// A section of this program's own.
fn own(c: &Context, name: &str) -> Job {
    let data = c.data.display().to_string();
    let mut args = vec!["__section", name, c.backend.as_str(), data.as_str()];
    args.extend(c.tiny.then_some("--tiny"));
    args.extend(c.torch.then_some("--torch"));
    job(name, Form::Events, &args)
}

fn doctor(c: &Context) -> Result<Vec<Job>, String> {
    Ok(vec![job("doctor", Form::Doctor, &["doctor", "--backend", &c.backend, "--json"])])
}

/// Ops of a rehearsal: one of each way to be lowered.
const FEW: &[&str] = &["add", "exp", "matmul", "softmax", "reduce_sum", "gather", "conv"];

/// Children by types: about as much to do for each.
fn ops(c: &Context) -> Result<Vec<Job>, String> {
    let base = ["conformance", "ops", "--backend", &c.backend, "--no-speed", "--json", "--dtype"];
    let job = |types: Vec<&str>, more: &[&str]| {
        let label = types.join(",");
        let mut j = job(&label, Form::Ops, &[&base[..], &[label.as_str()], more].concat());
        j.args.extend(["--seed".into(), c.seed.to_string()]);
        j
    };
    if c.tiny {
        let mut more = vec!["--cases", "1"];
        more.extend(FEW.iter().flat_map(|op| ["--op", op]));
        return Ok(vec![job(vec!["f32", "i32"], &more)]);
    }
    let alone = [DType::F32, DType::F16, DType::BF16, DType::I32, DType::F64, DType::I64];
    let mut jobs: Vec<Job> = alone.iter().map(|d| job(vec![d.name()], &[])).collect();
    for native in [true, false] {
        let rest = DType::all().filter(|d| d.is_native() == native && !alone.contains(d));
        jobs.push(job(rest.map(DType::name).collect(), &[]));
    }
    Ok(jobs)
}

/// The folder, or a reason that names it.
fn need(c: &Context, name: &str) -> Result<PathBuf, String> {
    let dir = c.data.join(name);
    if dir.exists() { Ok(dir) } else { Err(format!("the data has no {name}")) }
}

fn spine(c: &Context) -> Result<Vec<Job>, String> {
    need(c, "stories260k")?;
    need(c, "mlp").map(|_| vec![own(c, "spine")])
}

fn mnist(c: &Context) -> Result<Vec<Job>, String> {
    need(c, "mnist").map(|_| vec![own(c, "mnist")])
}

fn bench_models(c: &Context) -> Result<Vec<Job>, String> {
    let least = if c.tiny && c.backend != "cpu" { "mnist" } else { "seeded" };
    need(c, least).map(|_| vec![own(c, "bench-models")])
}

fn folders(dir: &Path) -> Result<Vec<PathBuf>, String> {
    let entries = std::fs::read_dir(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let mut all: Vec<PathBuf> = entries.flatten().map(|e| e.path()).filter(|p| p.is_dir()).collect();
    all.sort();
    Ok(all)
}

fn cases(c: &Context, dir: &Path, more: &[&str]) -> Job {
    let label = dir.strip_prefix(&c.data).unwrap_or(dir).display().to_string();
    let path = dir.display().to_string();
    let args = ["conformance", "onnx", path.as_str(), "--backend", &c.backend, "--json"];
    job(&label, Form::Onnx, &[&args[..], more].concat())
}

fn models(c: &Context) -> Result<Vec<Job>, String> {
    let mut all = folders(&need(c, "light")?)?;
    all.extend(folders(&c.data.join("seeded")).unwrap_or_default());
    all.extend(folders(&c.data.join("shapes")).unwrap_or_default());
    // The large ones take long on a stand-in.
    let small = |p: &PathBuf| ["light_squeezenet", "minilm"].iter().any(|n| p.ends_with(n));
    all.retain(|p| !c.tiny || small(p));
    Ok(all.iter().map(|p| cases(c, p, &[])).collect())
}

fn suite(c: &Context) -> Result<Vec<Job>, String> {
    let mut parts = folders(&need(c, "suite")?)?;
    if parts.is_empty() {
        return Err("the data's suite is empty".into());
    }
    if c.tiny {
        let one = parts.swap_remove(c.seed as usize % parts.len());
        return Ok(vec![cases(c, &one, &["--limit", "30"])]);
    }
    Ok(parts.iter().map(|p| cases(c, p, &[])).collect())
}

impl Job {
    pub fn command(&self, c: &Context) -> Command {
        let mut command = Command::new(&c.exe);
        command.args(&self.args);
        command
    }

    /// What a child said, and that it ended badly where it did.
    pub fn events(&self, ended: &Ended) -> Vec<Event> {
        let mut out = match self.form {
            Form::Events => lines(&ended.out),
            _ => match serde_json::from_str::<Value>(&ended.out) {
                Ok(v) => self.values(&v),
                Err(_) => vec![],
            },
        };
        let last = out.iter().rev().find_map(|e| match e {
            Event::Begin { what } => Some(what.clone()),
            _ => None,
        });
        let done = out.iter().filter(|e| matches!(e, Event::Check(_) | Event::Figure(_))).count();
        let failed = ended.broken.clone().or_else(|| match ended.code {
            // The command says by its exit code what its output says too.
            Some(0) => None,
            Some(_) if self.form != Form::Events && done > 0 => None,
            Some(n) => Some(format!("ended with exit code {n}")),
            None => Some("ended in an unknown way".into()),
        });
        if let Some(how) = failed {
            let at = last.map_or(String::new(), |w| format!(" at \"{w}\""));
            // With --json the command says there why it stopped.
            let said = serde_json::from_str::<Value>(&ended.out).ok();
            let said = said.and_then(|v| v["error"]["message"].as_str().map(String::from));
            let why = said.unwrap_or_else(|| ended.err.clone());
            let err = if why.is_empty() { String::new() } else { format!(": {why}") };
            let note = format!("the process {how}{at}{err}");
            out.push(Event::Check(Check { name: self.label.clone(), status: Status::Error, note }));
        } else if done == 0 {
            let note = "it ended well and told nothing".into();
            out.push(Event::Check(Check { name: self.label.clone(), status: Status::Error, note }));
        }
        out
    }

    fn values(&self, v: &Value) -> Vec<Event> {
        let text = |v: &Value| v.as_str().unwrap_or_default().to_string();
        let check = |name: String, status: Status, note: String| Event::Check(Check { name, status, note });
        let array = |v: &Value| v.as_array().cloned().unwrap_or_default();
        match self.form {
            Form::Events => vec![],
            Form::Doctor => array(&v["sections"])
                .iter()
                .flat_map(|s| array(&s["lines"]).into_iter().map(|l| (text(&s["id"]), l)))
                .map(|(id, l)| {
                    let status = match l["status"].as_str() {
                        Some("pass" | "warn") => Status::Passed,
                        Some("absent") => Status::Unsupported,
                        _ => Status::Error,
                    };
                    let name = format!("{} {}", l["device"].as_str().unwrap_or(&id), text(&l["check"]));
                    let warn = if l["status"] == "warn" { "warning: " } else { "" };
                    check(name, status, format!("{warn}{}", text(&l["text"])))
                })
                .collect(),
            Form::Ops => array(&v["cells"])
                .iter()
                .map(|c| {
                    let status = match c["status"].as_str() {
                        Some("passed") => Status::Passed,
                        Some("unsupported") => Status::Unsupported,
                        _ => Status::Wrong,
                    };
                    check(format!("{} {}", text(&c["op"]), text(&c["dtype"])), status, text(&c["reason"]))
                })
                .collect(),
            Form::Onnx => array(&v["cases"])
                .iter()
                .map(|c| {
                    let status = match c["status"].as_str() {
                        Some("passed") => Status::Passed,
                        Some("unsupported") => Status::Unsupported,
                        Some("wrong") => Status::Wrong,
                        _ => Status::Error,
                    };
                    // A folder that is one case has the folder's name.
                    let name = text(&c["name"]);
                    let name = if self.label.ends_with(&name) {
                        self.label.clone()
                    } else {
                        format!("{}/{name}", self.label)
                    };
                    check(name, status, text(&c["reason"]))
                })
                .collect(),
        }
    }
}

/// Events of an output; a line that was cut off is none.
fn lines(out: &str) -> Vec<Event> {
    out.lines().filter_map(|l| serde_json::from_str(l).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ended(out: String, code: i32) -> Ended {
        Ended { out, code: Some(code), ..Ended::default() }
    }

    fn statuses(events: &[Event]) -> Vec<Status> {
        events.iter().filter_map(|e| if let Event::Check(c) = e { Some(c.status) } else { None }).collect()
    }

    #[test]
    fn a_child_that_dies_is_an_error_at_its_place() {
        let told = [
            r#"{"event":"begin","what":"first"}"#,
            r#"{"event":"check","name":"first","status":"passed","note":""}"#,
            r#"{"event":"begin","what":"second"}"#,
            r#"{"event":"che"#,
        ];
        let j = job("hal", Form::Events, &[]);
        let mut e = ended(told.join("\n"), 0);
        (e.code, e.broken, e.err) = (None, Some("was ended by signal: 11".into()), "boom".into());
        let got = j.events(&e);
        assert_eq!(statuses(&got), [Status::Passed, Status::Error]);
        assert!(
            matches!(got.last(), Some(Event::Check(c)) if c.note.contains("signal: 11 at \"second\": boom"))
        );
        // Nothing told is nothing tested.
        assert_eq!(statuses(&j.events(&ended(String::new(), 0))), [Status::Error]);
        let o = job("suite/1", Form::Onnx, &[]);
        assert_eq!(statuses(&o.events(&ended("no JSON".into(), 4))), [Status::Error]);
    }

    #[test]
    fn the_commands_forms_are_understood() {
        let v = json!({ "cases": [
            { "name": "a", "status": "passed", "reason": "" }, { "name": "b", "status": "wrong", "reason": "by 2" },
            { "name": "c", "status": "unsupported", "reason": "x" }, { "name": "d", "status": "error", "reason": "y" },
        ]});
        let got = job("light", Form::Onnx, &[]).events(&ended(v.to_string(), 1));
        assert_eq!(statuses(&got), [Status::Passed, Status::Wrong, Status::Unsupported, Status::Error]);
        assert!(matches!(&got[1], Event::Check(c) if c.name == "light/b" && c.note == "by 2"));
        let v = json!({ "cells": [
            { "op": "add", "dtype": "f32", "status": "passed", "reason": null },
            { "op": "add", "dtype": "f64", "status": "failed", "reason": "no" },
        ]});
        let got = job("x", Form::Ops, &[]).events(&ended(v.to_string(), 1));
        assert_eq!(statuses(&got), [Status::Passed, Status::Wrong]);
        let v = json!({ "sections": [{ "id": "cuda", "lines": [
            { "check": "library", "device": null, "status": "warn", "text": "old" },
            { "check": "kernel", "device": "cuda:0", "status": "fail", "text": "bad" },
        ]}]});
        let got = job("x", Form::Doctor, &[]).events(&ended(v.to_string(), 2));
        assert_eq!(statuses(&got), [Status::Passed, Status::Error]);
        assert!(matches!(&got[1], Event::Check(c) if c.name == "cuda:0 kernel"));
    }

    #[test]
    fn every_section_has_a_name_of_its_own() {
        let mut names: Vec<&str> = SECTIONS.iter().map(|s| s.name).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), SECTIONS.len());
        assert!(
            SECTIONS
                .iter()
                .all(|s| s.measures == s.name.starts_with("bench-") && !(s.measures && s.parallel))
        );
    }
}
