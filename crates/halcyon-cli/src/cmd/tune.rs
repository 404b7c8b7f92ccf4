//! `halcyon tune`: measures the kernels of a model, or of a short list of operations, in a child process and
//! keeps the fastest.

use super::load;
use crate::args::TuneArgs;
use crate::program;
use crate::report::{self, table, time};
use halcyon::hal::child;
use halcyon::ir::Graph;
use halcyon::tune::{
    Entry, Event, Progress, RejectReason, Rejection, TuneOptions, TunedKernel, TuningCache, TuningReport,
    standard,
};
use halcyon::{ConstData, Error, Result, Session};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::ffi::OsString;
use std::fmt::Write;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// An event from the child, one per line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChildEvent {
    Candidate(Progress),
    Done(TunedKernel),
    Report(TuningReport),
}

fn say(line: &ChildEvent) -> Result<()> {
    let text = serde_json::to_string(line).map_err(|e| Error::internal(e.to_string()))?;
    report::print(&(text + "\n"))
}

/// `halcyon __tune`: tunes in this process.
pub(crate) fn child(a: &TuneArgs) -> Result<u8> {
    let events = |e: Event<'_>| {
        let line = match e {
            Event::Candidate(p) => ChildEvent::Candidate(p.clone()),
            Event::Done(k) => ChildEvent::Done(k.clone()),
        };
        // If the parent has ended, this process is about to end too.
        let _ = say(&line);
    };
    let options = TuneOptions {
        budget: a.budget.map(Duration::from_secs_f64),
        events: &events,
        ..TuneOptions::default()
    };
    let (backend, report) = match &a.model {
        None => {
            let backend = a.backend.open(false)?;
            retry(a, &backend)?;
            let graphs: Vec<Graph> = standard()?.into_iter().map(|(_, g)| g).collect();
            let report = backend.tune_with(&graphs, &options)?;
            (backend, report)
        }
        Some(model) => {
            let loaded = load(model, &a.input, &a.backend, true, false)?;
            retry(a, &loaded.backend)?;
            let graph = &loaded.graph("tuning")?.graph;
            let inputs: Vec<ConstData> = loaded.data().iter().filter_map(|d| d.tensor().cloned()).collect();
            let report = Session::new(&loaded.backend, graph.clone()).tune(&inputs, &options)?;
            (loaded.backend, report)
        }
    };
    // Reports where a damaged file was moved.
    report::tuning_warnings(&backend);
    say(&ChildEvent::Report(report)).map(|()| 0)
}

fn retry(a: &TuneArgs, b: &halcyon::Backend) -> Result<()> {
    if a.retry { b.tuning_cache().clear_rejections(b.tuning_device()) } else { Ok(()) }
}

pub(crate) fn main(a: &TuneArgs) -> Result<u8> {
    a.backend.check()?;
    let file = a.backend.builder(a.backend.level()?, None, false)?.tuning_file()?;
    let cache = file.as_ref().map_or_else(TuningCache::memory, TuningCache::at);
    let files = a.list || a.import.is_some() || a.export.is_some();
    if file.is_none() && files {
        let what =
            "there is no cache (HALCYON_CACHE or HALCYON_TUNING_CACHE is off); name one with --tuning-cache";
        return Err(Error::argument("tune", what));
    }
    let imported = a.import.as_ref().map(|f| cache.import(f)).transpose()?;
    // Reports where a damaged file was moved.
    let warn = |c: &TuningCache| c.warnings().iter().for_each(|w| report::note(&format!("warning: {w}")));
    warn(&cache);
    let report = match a.model.is_some() || !files {
        false => None,
        true => match supervise(a, &cache)? {
            Ok(r) => Some(r),
            // The child has printed the error.
            Err(code) => return Ok(code),
        },
    };
    // Reads the file again, because the child has written it.
    let cache = file.as_ref().map_or_else(TuningCache::memory, TuningCache::at);
    let exported = a.export.as_ref().map(|f| cache.export(f)).transpose()?;
    let table = cache.table();
    warn(&cache);
    let entries: Vec<&Entry> = table.entries().filter(|_| a.list).collect();
    if a.json {
        report::print_json(&json!({
            "cache": file.as_deref().map(report::path),
            "imported": imported,
            "exported": exported,
            "report": report,
            "entries": a.list.then_some(entries),
        }))?;
        return Ok(0);
    }
    let mut out = String::new();
    // Writing to a string cannot fail.
    if let (Some(n), Some(f)) = (imported, &a.import) {
        let _ = writeln!(out, "imported {n} entries of {}", report::path_text(f));
    }
    if let Some(r) = &report {
        out += &report_text(r);
    }
    if a.list {
        out += &list_text(&entries);
    }
    if let (Some(n), Some(f)) = (exported, &a.export) {
        let _ = writeln!(out, "exported {n} entries to {}", report::path_text(f));
    }
    match &file {
        Some(f) => {
            let _ = writeln!(out, "cache    {}", report::path_text(f));
        }
        None => out += "cache    none: the results are not kept (name a file with --tuning-cache)\n",
    }
    report::print(&out)?;
    Ok(0)
}

/// How a child ended.
#[derive(Debug)]
enum ChildEnd {
    /// With this exit code.
    Code(u8),
    /// By a signal or similar.
    Died(String),
    /// It printed nothing for too long and was killed.
    Silent(Duration),
}

/// Runs a child and passes on its events until it ends. Lines that are not events go to stdout.
fn run_child(
    command: &mut Command,
    patience: Duration,
    each: &mut dyn FnMut(ChildEvent),
) -> Result<ChildEnd> {
    let program = command.get_program().to_string_lossy().into_owned();
    let failed = |e: std::io::Error| Error::Io { path: program.clone(), what: e.to_string() };
    // The child ends when this function returns or this process ends.
    let mut tied = child::LinkedChild::spawn(command.stdout(Stdio::piped())).map_err(failed)?;
    let process = tied.process();
    let (send, receive) = channel();
    let pipe = process.stdout.take();
    let reader = std::thread::spawn(move || {
        let lines = pipe.into_iter().flat_map(|p| BufReader::new(p).lines()).map_while(|l| l.ok());
        lines.map(|l| send.send(l)).all(|sent| sent.is_ok())
    });
    let ended = loop {
        match receive.recv_timeout(patience) {
            Ok(line) => match serde_json::from_str(&line) {
                Ok(l) => each(l),
                Err(_) => report::print(&(line + "\n"))?,
            },
            Err(RecvTimeoutError::Disconnected) => {
                let status = process.wait().map_err(failed)?;
                let code = status.code().and_then(|c| u8::try_from(c).ok());
                // On systems without signals, a crash is a large exit code.
                break code.map_or_else(|| ChildEnd::Died(format!("ended with {status}")), ChildEnd::Code);
            }
            Err(RecvTimeoutError::Timeout) => {
                let _ = process.kill();
                let _ = process.wait();
                break ChildEnd::Silent(patience);
            }
        }
    };
    let _ = reader.join();
    Ok(ended)
}

/// Tunes in child processes. If a candidate kills a child, a new child continues. `Err` is the exit code of a
/// child that failed with an error, which it has printed.
fn supervise(a: &TuneArgs, cache: &TuningCache) -> Result<std::result::Result<TuningReport, u8>> {
    let program = program::program()?;
    let start = Instant::now();
    let mut done: Vec<TunedKernel> = vec![];
    let mut recovered: Vec<(String, Rejection)> = vec![];
    for first in [true].into_iter().chain(std::iter::repeat(false)) {
        // Only the first child gets --retry. With --retry, a later child would try again the candidate that
        // ended the previous child.
        let keep = |s: &OsString| first || s != "--retry";
        // Global flags may precede the command's name.
        let mut words = program::args().into_iter();
        let before: Vec<OsString> = words.by_ref().take_while(|w| w != "tune").collect();
        let mut args: Vec<OsString> = before.into_iter().chain(words).filter(keep).collect();
        if let Some(b) = a.budget {
            // The last occurrence of an option counts, and nothing after "--" is a flag.
            let end = args.iter().position(|s| s == "--").unwrap_or(args.len());
            let left = (b - start.elapsed().as_secs_f64()).max(0.0);
            args.splice(end..end, ["--budget".into(), format!("{left:.3}").into()]);
        }
        let mut command = program.command();
        command.arg("__tune").args(&args).env(child::VARIABLE, "1");
        let (mut report, mut bar) = (None, None);
        let ended = run_child(&mut command, Duration::from_secs_f64(a.patience), &mut |line| match line {
            ChildEvent::Candidate(p) => {
                bar.get_or_insert_with(|| report::Progress::new("kernel", p.of as u64));
            }
            ChildEvent::Done(k) => {
                done.push(k);
                if let Some(b) = &mut bar {
                    b.step();
                }
            }
            ChildEvent::Report(r) => report = Some(r),
        })?;
        if let Some(b) = bar {
            b.finish();
        }
        let (why, how) = match (ended, report) {
            (ChildEnd::Code(0), Some(mut r)) => {
                // The last child counts kernels that earlier children tuned as known.
                r.known -= done.len().saturating_sub(r.tuned.len()).min(r.known);
                recovered.append(&mut r.recovered);
                (r.tuned, r.recovered, r.seconds) = (done, recovered, start.elapsed().as_secs_f64());
                return Ok(Ok(r));
            }
            (ChildEnd::Code(0), None) => {
                return Err(Error::internal("the tuning process ended without a report"));
            }
            (ChildEnd::Code(c), _) => return Ok(Err(c)),
            (ChildEnd::Died(how), _) => (RejectReason::Crashed, how),
            (ChildEnd::Silent(limit), _) => (RejectReason::Hung, format!("did not end within {limit:?}")),
        };
        let found = cache.recover(why, &format!("its process {how}"))?;
        if found.is_empty() {
            return Err(Error::Driver {
                device: a.backend.backend.clone(),
                call: "tuning".into(),
                code: format!("the process {how}, while no candidate ran"),
                next: "Run `halcyon doctor`".into(),
            });
        }
        for (key, r) in &found {
            report::note(&format!(
                "{}: {key}: {} ({}); tuning goes on without it",
                r.why, r.variant, r.detail
            ));
        }
        recovered.extend(found);
    }
    Err(Error::internal("tuning did not finish"))
}

fn gain(k: &TunedKernel) -> String {
    let b = &k.best;
    match b.variant == b.default {
        true => "the default is kept".into(),
        false => format!("{:.2}x ({:.2} to {:.2})", b.gain, b.interval.0, b.interval.1),
    }
}

fn report_text(r: &TuningReport) -> String {
    let mut out = format!("device   {}\n", r.device);
    if !r.tuned.is_empty() {
        let head = ["kernel", "steps", "default", "best", "gain", "time"];
        let mut rows = vec![head.map(String::from).to_vec()];
        rows.extend(r.tuned.iter().map(|k| {
            vec![
                report::short(&k.key, 60),
                k.steps.to_string(),
                k.best.default.to_string(),
                k.best.variant.to_string(),
                gain(k),
                time(Duration::from_secs_f64(k.best.seconds.clamp(0.0, 1e6))),
            ]
        }));
        out += &table(&rows);
    }
    let slow = |x: &&Rejection| x.why == RejectReason::TooSlow;
    // Writing to a string cannot fail.
    for k in &r.tuned {
        for x in k.rejected.iter().filter(|x| !slow(x)) {
            let _ = writeln!(
                out,
                "rejected {}: {} ({}): {}",
                report::short(&k.key, 60),
                x.variant,
                x.why,
                x.detail
            );
        }
    }
    for f in &r.failed {
        let _ = writeln!(out, "left out {}: {}", report::short(&f.key, 60), f.reason);
    }
    let better = r.tuned.iter().filter(|k| k.best.variant != k.best.default).count();
    let _ = writeln!(
        out,
        "tuned    {} kernels, {better} of them faster, in {:.1} s; {} were in the cache{}",
        r.tuned.len(),
        r.seconds,
        r.known,
        if r.left > 0 { format!("; {} remain for the next call", r.left) } else { String::new() }
    );
    match r.tuned.iter().flat_map(|k| &k.rejected).filter(slow).count() {
        0 => {}
        n => {
            let _ =
                writeln!(out, "         {n} variants are far too slow and not tried again (--list has them)");
        }
    }
    if r.tuned.is_empty() && r.known == 0 && r.left == 0 && r.failed.is_empty() {
        out += "         there is nothing to tune: the device's library chooses its kernels itself\n";
    }
    out
}

fn list_text(entries: &[&Entry]) -> String {
    let (mut out, mut device) = (String::new(), "");
    for e in entries {
        if e.device != device {
            device = &e.device;
            let _ = writeln!(out, "{device}");
        }
        let best = match e.best() {
            Some(b) if b.variant == b.default => format!("{} (the default)", b.variant),
            Some(b) => format!("{} ({:.2}x)", b.variant, b.gain),
            None => "not tuned".into(),
        };
        let _ = writeln!(out, "  {}: {best}", e.key);
        for r in &e.rejected {
            let _ = writeln!(out, "    rejected {} ({}): {}", r.variant, r.why, r.detail);
        }
    }
    if entries.is_empty() {
        out += "the cache has no results\n";
    }
    out
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(script: &str, patience: Duration) -> (ChildEnd, usize) {
        let mut lines = 0;
        let mut count = |l: ChildEvent| {
            assert!(matches!(l, ChildEvent::Candidate(p) if p.of == 3));
            lines += 1;
        };
        let ended = run_child(Command::new("/bin/sh").args(["-c", script]), patience, &mut count);
        (ended.expect("the shell starts"), lines)
    }

    #[test]
    fn a_child_that_dies_or_is_silent_is_noticed() {
        let line = r#"echo '{"candidate":{"done":1,"of":3,"key":"k","candidate":1,"candidates":2}}'"#;
        let minute = Duration::from_secs(60);
        assert!(matches!(shell(line, minute), (ChildEnd::Code(0), 1)));
        assert!(matches!(shell("exit 7", minute), (ChildEnd::Code(7), 0)));
        let (ended, lines) = shell(&format!("{line}; kill -SEGV $$"), minute);
        assert!(matches!(&ended, ChildEnd::Died(how) if how.contains("signal")) && lines == 1, "{ended:?}");
        let (ended, lines) = shell(&format!("{line}; exec sleep 100"), Duration::from_millis(300));
        assert!(matches!(ended, ChildEnd::Silent(_)) && lines == 1, "{ended:?}");
    }
}
