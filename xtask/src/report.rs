//! Steps, their outcomes and the summary.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Number of passed, failed and skipped tests.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    pub passed: usize,
    pub failed: usize,
    pub skipped: usize,
}

impl Counts {
    pub(crate) fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// The outcome of a step.
#[derive(Debug, Clone)]
pub(crate) enum Outcome {
    /// The step succeeded. The text is a note.
    Passed(String),
    Failed(String),
    /// The step did not run, for this reason.
    Skipped(String),
    /// The step ran tests. It failed if one of them failed.
    Tests(Counts, String),
}

#[derive(Debug)]
struct Step {
    name: &'static str,
    outcome: Outcome,
    time: Duration,
}

/// Runs steps one after the other, collects their outcomes and prints the summary.
#[derive(Debug, Default)]
pub(crate) struct Report {
    steps: Vec<Step>,
    started: Option<Instant>,
}

impl Report {
    pub(crate) fn step(&mut self, name: &'static str, work: impl FnOnce() -> Outcome) {
        let begin = Instant::now();
        let since = begin.duration_since(*self.started.get_or_insert(begin));
        println!("==> {name}  (at {})", clock(since));
        let outcome = work();
        let time = begin.elapsed();
        println!("    {name}: {} in {}\n", describe(&outcome), clock(time));
        self.steps.push(Step { name, outcome, time });
    }

    /// Prints one line per step and the totals. Returns whether something passed and nothing failed.
    pub(crate) fn finish(&self) -> bool {
        let mut total = Counts::default();
        println!("Summary");
        for step in &self.steps {
            total.add(counts(&step.outcome));
            println!("  {:<16} {:>7}  {}", step.name, clock(step.time), describe(&step.outcome));
        }
        let time = self.started.map(|at| at.elapsed()).unwrap_or_default();
        println!("  {:<16} {:>7}", "total", clock(time));
        println!("{total}");
        total.failed == 0 && total.passed > 0
    }
}

/// A step counts as one test. If it ran tests, each of them is counted instead.
fn counts(outcome: &Outcome) -> Counts {
    match outcome {
        Outcome::Passed(_) => Counts { passed: 1, ..Counts::default() },
        Outcome::Failed(_) => Counts { failed: 1, ..Counts::default() },
        Outcome::Skipped(_) => Counts { skipped: 1, ..Counts::default() },
        Outcome::Tests(counts, _) => *counts,
    }
}

fn describe(outcome: &Outcome) -> String {
    let (word, note) = match outcome {
        Outcome::Passed(note) => ("ok", note),
        Outcome::Failed(note) => ("FAILED", note),
        Outcome::Skipped(note) => ("skipped", note),
        Outcome::Tests(counts, note) => {
            let word = if counts.failed > 0 { "FAILED" } else { "ok" };
            let gap = if note.is_empty() { "" } else { "; " };
            return format!("{word}: {counts}{gap}{note}");
        }
    };
    if note.is_empty() { word.to_string() } else { format!("{word}: {note}") }
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 60.0 {
        format!("{seconds:.1} s")
    } else {
        format!("{}:{:02}", time.as_secs() / 60, time.as_secs() % 60)
    }
}

/// Runs a command with its output on the terminal.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    run_watching(command, |_| ())
}

/// Like [`run`], and passes every line to `watch`. Both output streams of the command go through one pipe, so
/// that their order is kept.
pub(crate) fn run_watching(command: &mut Command, mut watch: impl FnMut(&str)) -> Result<(), String> {
    println!("    $ {}", line(command));
    let (reader, writer) = std::io::pipe().map_err(|e| format!("cannot create a pipe: {e}"))?;
    let errors = writer.try_clone().map_err(|e| format!("cannot create a pipe: {e}"))?;
    let child = command.stdin(Stdio::null()).stdout(writer).stderr(errors).spawn();
    // Drop the command's copies of the pipe's write end, because reading ends only when all are closed.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = child.map_err(|e| format!("`{}` did not start: {e}", program(command)))?;
    let mut reader = BufReader::new(reader);
    let mut bytes = Vec::new();
    // Read bytes, not text, because a compiler's message need not be UTF-8.
    while reader.read_until(b'\n', &mut bytes).map_err(|e| e.to_string())? > 0 {
        let mut out = std::io::stdout().lock();
        // Continue even if the terminal is closed.
        let _ = out.write_all(&bytes).and_then(|()| out.flush());
        watch(String::from_utf8_lossy(&bytes).trim_end());
        bytes.clear();
    }
    let status = child.wait().map_err(|e| e.to_string())?;
    if status.success() { Ok(()) } else { Err(format!("`{}` ended with {status}", program(command))) }
}

/// Runs `work` up to three times with a pause in between, for work that depends on the network.
pub(crate) fn retry(mut work: impl FnMut() -> Result<(), String>) -> Result<(), String> {
    let mut last = Ok(());
    for wait in [0, 5, 20] {
        if wait > 0 {
            println!("    trying again in {wait} s");
            std::thread::sleep(Duration::from_secs(wait));
        }
        last = work();
        if last.is_ok() {
            break;
        }
    }
    last
}

/// The beginning of the command line, for messages.
fn program(command: &Command) -> String {
    let whole = line(command);
    match whole.char_indices().nth(60) {
        Some((at, _)) => format!("{}...", &whole[..at]),
        None => whole,
    }
}

pub(crate) fn line(command: &Command) -> String {
    let root = crate::root();
    let short = |s: &std::ffi::OsStr| s.to_string_lossy().replace(&format!("{}/", root.display()), "");
    let mut out = String::new();
    for (key, value) in command.get_envs() {
        if let Some(value) = value
            && key.to_string_lossy().starts_with("RUST")
        {
            out.push_str(&format!("{}='{}' ", key.to_string_lossy(), value.to_string_lossy()));
        }
    }
    // Cargo is called by its full path. Print its name only.
    let program = std::path::Path::new(command.get_program());
    let cargo = program.file_stem().filter(|name| *name == "cargo");
    out.push_str(&short(cargo.unwrap_or(command.get_program())));
    for arg in command.get_args() {
        out.push(' ');
        out.push_str(&short(arg));
    }
    out
}

/// Parses a `test result:` line of a Rust test binary; None for any other line.
pub(crate) fn test_result(line: &str) -> Option<Counts> {
    let rest = line.strip_prefix("test result: ")?;
    let number = |word: &str| {
        rest.split([';', '.'])
            .find_map(|part| part.trim().strip_suffix(word))
            .and_then(|n| n.trim().parse().ok())
    };
    Some(Counts { passed: number(" passed")?, failed: number(" failed")?, skipped: number(" ignored")? })
}

/// The duration in a `test result:` line.
pub(crate) fn seconds(line: &str) -> Option<f64> {
    line.split("finished in ").nth(1)?.trim().strip_suffix('s')?.parse().ok()
}

/// Parses the last line of our scripts: `N passed, N failed, N skipped`.
pub(crate) fn script_result(line: &str) -> Option<Counts> {
    let mut numbers = [0; 3];
    let mut parts = line.trim().split(", ");
    for (slot, word) in numbers.iter_mut().zip([" passed", " failed", " skipped"]) {
        *slot = parts.next()?.strip_suffix(word)?.parse().ok()?;
    }
    parts.next().is_none().then_some(Counts { passed: numbers[0], failed: numbers[1], skipped: numbers[2] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_line_of_a_test_binary() {
        let line =
            "test result: ok. 12 passed; 1 failed; 3 ignored; 0 measured; 4 filtered out; finished in 0.02s";
        assert_eq!(test_result(line), Some(Counts { passed: 12, failed: 1, skipped: 3 }));
        let failed = "test result: FAILED. 0 passed; 7 failed; 0 ignored; 0 measured; 0 filtered out";
        assert_eq!(test_result(failed), Some(Counts { passed: 0, failed: 7, skipped: 0 }));
        assert_eq!(test_result("test cpu::gemm ... ok"), None);
        assert_eq!((seconds(line), seconds(failed)), (Some(0.02), None));
    }

    #[test]
    fn reads_the_line_of_a_script() {
        assert_eq!(
            script_result("3 passed, 0 failed, 2 skipped"),
            Some(Counts { passed: 3, failed: 0, skipped: 2 })
        );
        assert_eq!(script_result("3 passed, 0 failed"), None);
        assert_eq!(script_result("3 passed, 0 failed, 2 skipped, 1 lost"), None);
    }

    #[test]
    fn a_failed_test_or_no_output_is_a_failure() {
        let mut report = Report::default();
        assert!(!report.finish());
        report.step("fine", || Outcome::Passed(String::new()));
        assert!(report.finish());
        report.step("tests", || Outcome::Tests(Counts { passed: 5, failed: 1, skipped: 0 }, String::new()));
        assert!(!report.finish());
    }
}
