//! `halcyon doctor`: whether each backend works here, step by step, each backend in a process of its own.

use crate::args::{DoctorArgs, ProbeArgs};
use crate::report::{self, size};
use halcyon::doctor::{Event, Line, Status, examine};
use halcyon::hal::{backend, cache, child, config};
use halcyon::ir::host;
use halcyon::{BackendType, Error, Result};
use serde_json::{Value, json};
use std::fmt::Write;
use std::process::Command;
use std::time::Duration;

/// `halcyon __doctor`: one backend in this process, an event a line.
pub fn child(a: &ProbeArgs) -> Result<u8> {
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

/// What is known of one backend, or of the machine.
struct Section {
    id: &'static str,
    lines: Vec<Line>,
}

pub fn main(a: &DoctorArgs) -> Result<u8> {
    let asked: Option<BackendType> = match a.backend.as_deref().map(str::parse).transpose()? {
        Some(BackendType::Auto) => None,
        other => other,
    };
    let kinds: Vec<BackendType> = asked.map_or_else(backend::all, |k| vec![k]);
    let mut sections = vec![Section { id: "host", lines: machine() }];
    let show = |s: &Section| if a.json { Ok(()) } else { report::print(&text(s)) };
    show(&sections[0])?;
    for kind in kinds {
        let s = Section { id: kind.id(), lines: in_child(kind, Duration::from_secs(a.timeout))? };
        show(&s)?;
        sections.push(s);
    }
    let code = verdict(&sections, asked.is_some());
    if a.json {
        let one = |s: &Section| json!({ "id": s.id, "status": worst(s), "lines": s.lines });
        let sections: Vec<Value> = sections.iter().map(one).collect();
        report::print_json(&json!({ "sections": sections, "exit_code": code }))?;
    } else {
        let what = match code {
            0 => "everything that is here works",
            1 => "something deserves a look (warn)",
            _ => "something does not work (fail)",
        };
        report::print(&format!("\n{what}\n"))?;
    }
    Ok(code)
}

fn worst(s: &Section) -> Status {
    s.lines.iter().map(|l| l.status).max().unwrap_or(Status::Fail)
}

/// 0 where all that is here works, 1 with warnings, 2 with failures; a backend that was asked for has to be here.
fn verdict(sections: &[Section], asked: bool) -> u8 {
    if asked && sections.last().is_some_and(|s| worst(s) == Status::Absent) {
        return 2;
    }
    match sections.iter().map(worst).max().unwrap_or(Status::Fail) {
        Status::Pass | Status::Absent => 0,
        Status::Warn => 1,
        Status::Fail => 2,
    }
}

fn line(check: &str, status: Status, text: String, fix: Option<String>, facts: Value) -> Line {
    Line { check: check.into(), device: None, status, text, fix, facts }
}

/// Memory, the configuration file and the directory of caches.
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
            let fix = format!("Mend the file, or set {}=off", config::VARIABLE);
            line("config", Status::Fail, e.to_string(), Some(fix), Value::Null)
        }
    });
    lines.push(match cache::user_dir() {
        None => line("cache", Status::Pass, "switched off (HALCYON_CACHE)".into(), None, Value::Null),
        Some(dir) => {
            let facts = json!({ "directory": dir });
            let probe = dir.join(format!("doctor-{}", std::process::id()));
            let wrote = std::fs::create_dir_all(&dir).and_then(|()| std::fs::write(&probe, b"x"));
            // It is of no use any more, whether or not it is there.
            let _ = std::fs::remove_file(&probe);
            match wrote {
                Ok(()) => {
                    line("cache", Status::Pass, format!("{} can be written", dir.display()), None, facts)
                }
                Err(e) => {
                    let text = format!(
                        "{} cannot be written ({e}): every start compiles and packs anew",
                        dir.display()
                    );
                    let fix = "Make it writable, or set XDG_CACHE_HOME to a directory that is".to_string();
                    line("cache", Status::Warn, text, Some(fix), facts)
                }
            }
        }
    });
    lines
}

/// Lines of a backend, from a child that may die at it.
fn in_child(kind: BackendType, limit: Duration) -> Result<Vec<Line>> {
    let exe = std::env::current_exe()
        .map_err(|e| Error::Io { path: "this executable".into(), what: e.to_string() })?;
    let mut command = Command::new(&exe);
    let done = child::output(command.args(["__doctor", kind.id()]), limit)
        .map_err(|e| Error::Io { path: exe.display().to_string(), what: e.to_string() })?;
    Ok(lines(&done.out, done.end.err()))
}

/// Lines of what a child told; `end` says how it ended where it did not end well.
fn lines(out: &str, end: Option<String>) -> Vec<Line> {
    let (mut lines, mut at) = (vec![], None);
    // A line that was cut off when the child ended is none.
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
            text: format!("the process that examined it {how}, at the step \"{check}\""),
            check,
            device,
            status: Status::Fail,
            fix: Some("Update or remove the driver: it takes down the programs that use it".into()),
            facts: Value::Null,
        });
    }
    lines
}

fn text(s: &Section) -> String {
    let mut out = format!("{}\n", s.id);
    for l in &s.lines {
        let status = match l.status {
            Status::Pass => "pass",
            Status::Absent => "absent",
            Status::Warn => "warn",
            Status::Fail => "fail",
        };
        let kind: Option<BackendType> = s.id.parse().ok();
        let text = kind.map_or_else(|| l.text.clone(), |k| report::reason(k, &l.text));
        let device = l.device.as_deref().unwrap_or("");
        // Writing to a string does not fail.
        let _ = writeln!(out, "  {status:<6}  {device:<9} {:<9}  {}", l.check, text.replace('\n', " "));
        if let Some(fix) = l.fix.as_ref().filter(|f| !l.text.contains(f.as_str())) {
            let _ = writeln!(out, "          fix: {fix}");
        }
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
        // One that says nothing is a failure too.
        let s = Section { id: "opencl", lines: lines("", Some("ended with exit status: 3".into())) };
        assert_eq!((worst(&s), verdict(&[s], false)), (Status::Fail, 2));
    }

    #[test]
    fn verdicts_are_exit_codes() {
        let of = |s: &[Status]| -> Vec<Section> {
            let one = |s: &Status| Section {
                id: "cpu",
                lines: vec![line("x", *s, String::new(), None, Value::Null)],
            };
            s.iter().map(one).collect()
        };
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
            assert_eq!(verdict(&of(all), asked), code, "{all:?} {asked}");
        }
    }
}
