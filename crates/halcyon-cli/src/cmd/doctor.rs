//! `halcyon doctor`: checks step by step whether each backend works. Each backend is checked in its own
//! process.

use crate::args::{DoctorArgs, DoctorChildArgs};
use crate::program;
use crate::report::{self, size, wrap};
use halcyon::doctor::{Event, Line, Status, examine};
use halcyon::hal::child::{self, Program};
use halcyon::hal::{backend, cache, config, probe};
use halcyon::host;
use halcyon::{BackendType, Error, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::io::Write as _;
use std::time::Duration;

/// `halcyon __doctor`: checks one backend in this process and prints one event per line.
pub(crate) fn child(a: &DoctorChildArgs) -> Result<u8> {
    let kind: BackendType = a.backend.parse()?;
    let mut result = Ok(());
    examine(kind, &mut |e| {
        let line = serde_json::to_string(&e).map_err(|e| Error::internal(e.to_string()));
        let said = line.and_then(|l| report::print(&(l + "\n")));
        if result.is_ok() {
            result = said;
        }
    });
    result.map(|()| 0)
}

/// The findings about one backend, or about the machine.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// The backend's name, or `host`.
    pub id: &'static str,
    /// The worst status of the lines.
    pub status: Status,
    pub lines: Vec<Line>,
    /// Lines that the backend's driver printed to the standard streams.
    pub printed: Vec<String>,
}

impl Section {
    fn new(id: &'static str, lines: Vec<Line>, printed: Vec<String>) -> Section {
        let status = lines.iter().map(|l| l.status).max().unwrap_or(Status::Fail);
        Section { id, status, lines, printed }
    }

    /// The machine's threads and memory, the configuration file and the cache directory.
    pub fn host() -> Section {
        Section::new("host", machine(), vec![])
    }

    /// Examines a backend in a child process of `program` for at most `limit`, because a driver may crash or
    /// hang its process.
    ///
    /// # Errors
    /// [`Error::Io`] if the child cannot be started.
    pub fn of(kind: BackendType, limit: Duration, program: &Program) -> Result<Section> {
        let mut command = program.command();
        let done = child::output(command.args(["__doctor", kind.id()]), limit)
            .map_err(|e| Error::Io { path: program.executable.display().to_string(), what: e.to_string() })?;
        Ok(Section::new(kind.id(), lines(&done.out, done.end.err()), unique_lines(&done.err)))
    }
}

/// The exit code of `halcyon doctor` for sections of these statuses: 0 if everything present works, 1 with
/// warnings, 2 with failures or if `asked` is set and the last section's backend is absent.
pub fn verdict(statuses: &[Status], asked: bool) -> u8 {
    if asked && statuses.last() == Some(&Status::Absent) {
        return 2;
    }
    match statuses.iter().max().unwrap_or(&Status::Fail) {
        Status::Pass | Status::Absent => 0,
        Status::Warn => 1,
        Status::Fail => 2,
    }
}

/// The section as `halcyon doctor` prints it.
impl std::fmt::Display for Section {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&text(self))
    }
}

/// Limit on the lines kept of a driver's output.
const PRINTED: usize = 200;

pub(crate) fn main(a: &DoctorArgs) -> Result<u8> {
    let asked: Option<BackendType> = match a.backend.as_deref().map(str::parse).transpose()? {
        Some(BackendType::Auto) => None,
        other => other,
    };
    // The remembered results of probes are discarded, so that drivers that crashed or hung are examined
    // again.
    probe::forget();
    let kinds: Vec<BackendType> = asked.map_or_else(backend::all, |k| vec![k]);
    let mut sections = vec![Section::host()];
    let show = |s: &Section| if a.json { Ok(()) } else { report::print(&text(s)) };
    show(&sections[0])?;
    for kind in kinds {
        let s = Section::of(kind, Duration::from_secs(a.timeout), &program::program()?)?;
        show(&s)?;
        sections.push(s);
    }
    let statuses: Vec<Status> = sections.iter().map(|s| s.status).collect();
    let code = verdict(&statuses, asked.is_some());
    if a.json {
        report::print_json(&json!({ "sections": sections, "exit_code": code }))?;
    } else {
        let what = match code {
            0 => "everything that is present works",
            1 => "there are warnings",
            _ => "there are failures",
        };
        report::print(&format!("\n{what}\n"))?;
    }
    Ok(code)
}

fn line(check: &str, status: Status, text: String, fix: Option<String>, facts: Value) -> Line {
    Line { check: check.into(), device: None, status, text, fix, facts }
}

/// Reports the number of threads and the memory, and checks the configuration file and the cache directory.
fn machine() -> Vec<Line> {
    let mut lines = vec![];
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let (free, total) = host::memory().unzip();
    let memory =
        free.zip(total).map_or("memory unknown".into(), |(f, t)| format!("{} free of {}", size(f), size(t)));
    let facts = json!({ "threads": cores, "free": free, "total": total });
    lines.push(line("machine", Status::Pass, format!("{cores} threads, {memory}"), None, facts));
    lines.push(match config::load() {
        Ok(Some((path, _))) => {
            let path = path.display().to_string();
            line("config", Status::Pass, path.clone(), None, json!({ "file": path }))
        }
        Ok(None) => line("config", Status::Pass, "no configuration file".into(), None, Value::Null),
        Err(e) => {
            let fix = format!("Fix the file, or set {}=off", config::VARIABLE);
            line("config", Status::Fail, e.to_string(), Some(fix), Value::Null)
        }
    });
    lines.push(match cache::user_dir() {
        None => no_cache(),
        Some(dir) => {
            let facts = json!({ "directory": report::path(&dir) });
            let probe = dir.join(format!("doctor-{}", std::process::id()));
            let wrote = std::fs::create_dir_all(&dir)
                .and_then(|()| std::fs::File::create_new(&probe)?.write_all(b"x"))
                .and_then(|()| std::fs::remove_file(&probe));
            match wrote {
                Ok(()) => {
                    line("cache", Status::Pass, format!("{} can be written", dir.display()), None, facts)
                }
                Err(e) => {
                    let text = format!(
                        "{} cannot be written ({e}): every start compiles kernels and packs weights again",
                        dir.display()
                    );
                    let variables = cache::variables().join(" or ");
                    let fix = format!("Make it writable, or set {variables} to a writable directory");
                    line("cache", Status::Warn, text, Some(fix), facts)
                }
            }
        }
    });
    lines
}

/// Why there is no cache directory.
fn no_cache() -> Line {
    let none = |status, text: String, fix: Option<&str>| {
        line("cache", status, text, fix.map(String::from), Value::Null)
    };
    match cache::policy() {
        Err(e) => {
            none(Status::Fail, e.to_string(), Some("Set HALCYON_CACHE to one of these words, or unset it"))
        }
        Ok(cache::CachePolicy::Nothing) => {
            none(Status::Pass, "switched off (HALCYON_CACHE=off)".into(), None)
        }
        Ok(_) => {
            let state = |n: &&str| match std::env::var_os(n).filter(|v| !v.is_empty()) {
                None => format!("{n} is not set"),
                Some(v) => format!("{n} is \"{}\", which is not an absolute path", v.to_string_lossy()),
            };
            let why = cache::variables().iter().map(state).collect::<Vec<_>>().join(" and ");
            let text = format!("no directory: {why}; every start compiles kernels and packs weights again");
            none(
                Status::Warn,
                text,
                Some("Set one of them to a directory that can be written, or HALCYON_CACHE=off"),
            )
        }
    }
}

/// A driver's output without duplicate lines.
fn unique_lines(text: &str) -> Vec<String> {
    let mut all: Vec<String> = vec![];
    for l in text.lines().map(str::trim_end).filter(|l| !l.is_empty()) {
        if all.len() < PRINTED && !all.iter().any(|a| a == l) {
            all.push(l.into());
        }
    }
    all
}

/// The findings in a child's output. `end` describes how the child ended if it failed.
fn lines(out: &str, end: Option<String>) -> Vec<Line> {
    let (mut lines, mut at) = (vec![], None);
    // Skips a line that was truncated when the child ended.
    for e in out.lines().filter_map(|l| serde_json::from_str::<Event>(l).ok()) {
        match e {
            Event::Started { check, device } => at = Some((check, device)),
            Event::Done(l) => {
                at = None;
                lines.push(l);
            }
        }
    }
    if let Some(how) = end {
        let (check, device) = at.unwrap_or(("process".into(), None));
        lines.push(Line {
            text: format!("the process that examined the backend {how}, at the step \"{check}\""),
            check,
            device,
            status: Status::Fail,
            fix: Some("Update or remove the driver: the programs that use it crash or hang".into()),
            facts: Value::Null,
        });
    }
    lines
}

/// The steps of a section; with `-q` only warnings and failures.
fn text(s: &Section) -> String {
    let lines: Vec<&Line> =
        s.lines.iter().filter(|l| !report::quiet() || l.status > Status::Absent).collect();
    if lines.is_empty() {
        return String::new();
    }
    let mut out = format!("{}\n", s.id);
    let width = |l: &&Line| l.check.len() + l.device.as_ref().map_or(0, |d| d.len() + 1);
    let width = lines.iter().map(width).max().unwrap_or(0);
    for l in lines {
        let status = match l.status {
            Status::Pass => "pass",
            Status::Absent => "absent",
            Status::Warn => "warn",
            Status::Fail => "fail",
        };
        let check = match &l.device {
            Some(d) => format!("{d} {}", l.check),
            None => l.check.clone(),
        };
        const INDENT: &str = "          ";
        out +=
            &wrap(&l.text, &format!("  {status:<6}  {check:<width$}  "), &format!("{INDENT}{:width$}  ", ""));
        let tried = l.facts["tried"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for t in tried {
            out += &wrap(t, &format!("{INDENT}tried: "), &format!("{INDENT}    "));
        }
        if let Some(fix) = l.fix.as_ref().filter(|f| !l.text.contains(f.as_str())) {
            out += &wrap(fix, &format!("{INDENT}fix: "), &format!("{INDENT}    "));
        }
    }
    for l in &s.printed {
        out += &wrap(l, "          its driver printed: ", "              ");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_that_dies_fails_at_its_step() {
        let started = |c: &str| {
            serde_json::to_string(&Event::Started { check: c.into(), device: Some("opencl:0".into()) })
                .expect("text")
        };
        let done =
            serde_json::to_string(&Event::Done(line("library", Status::Pass, "x".into(), None, Value::Null)))
                .expect("text");
        let out = format!("{}\n{done}\n{}\n{{\"do", started("library"), started("kernel"));
        let l = lines(&out, Some("ended with signal: 11 (SIGSEGV)".into()));
        assert_eq!(l.len(), 2);
        assert_eq!(
            (l[1].check.as_str(), l[1].device.as_deref(), l[1].status),
            ("kernel", Some("opencl:0"), Status::Fail)
        );
        assert!(l[1].text.contains("SIGSEGV") && l[1].fix.is_some());
        // A child that reports nothing is a failure too.
        let s = Section::new("opencl", lines("", Some("ended with exit status: 3".into())), vec![]);
        assert_eq!((s.status, verdict(&[s.status], false)), (Status::Fail, 2));
    }

    #[test]
    fn verdicts_are_exit_codes() {
        use Status::*;
        for (all, asked, code) in [
            (&[Pass, Absent][..], false, 0),
            (&[Pass, Absent], true, 2),
            (&[Warn, Absent], true, 2),
            (&[Warn, Pass], true, 1),
            (&[Pass, Warn, Absent], false, 1),
            (&[Fail, Warn], false, 2),
            (&[], false, 2),
        ] {
            assert_eq!(verdict(all, asked), code, "{all:?} {asked}");
        }
    }
}
