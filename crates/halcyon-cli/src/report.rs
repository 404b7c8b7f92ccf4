//! Output of the commands: results on stdout, progress and errors on stderr.

use crate::args::Verbosity;
use halcyon::hal::driver_output;
pub(crate) use halcyon::summary::reason;
use halcyon::{Backend, BackendType, ConstData, Error, Result, TuningMode};
use halcyon_ir::error::escaped;
pub(crate) use halcyon_ir::error::one_line;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use std::any::Any;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::{Once, OnceLock};
use std::time::{Duration, Instant};

static VERBOSITY: OnceLock<Verbosity> = OnceLock::new();

/// Sets the verbosity from `-v` and `-q`, once per process.
pub(crate) fn set_verbosity(v: Verbosity) {
    // Ignores further calls; there is one command line.
    let _ = VERBOSITY.set(v);
}

/// Whether `-v` was given.
pub(crate) fn verbose() -> bool {
    VERBOSITY.get().is_some_and(|v| v.verbose)
}

/// Whether `-q` was given.
pub(crate) fn quiet() -> bool {
    VERBOSITY.get().is_some_and(|v| v.quiet)
}

/// Longest line of an error message in bytes. Names in a model may have any length.
const LINE: usize = 4096;

/// A model's name for text output: on one line and without characters that a terminal would interpret. JSON
/// output contains names unchanged.
pub(crate) fn name(text: &str) -> Cow<'_, str> {
    one_line(text)
}

/// A path for text output.
pub(crate) fn path_text(path: &Path) -> String {
    one_line(&path.to_string_lossy()).into_owned()
}

/// A path for JSON output. Invalid Unicode is replaced, because JSON is Unicode.
pub(crate) fn path(path: &Path) -> Value {
    path.to_string_lossy().into()
}

/// Text for a terminal. Control characters, which quoted names may contain, are escaped.
fn plain(text: &str) -> Cow<'_, str> {
    escaped(text, &['\n', '\t'])
}

/// Truncates lines of more than [`LINE`] bytes, to a quarter as many characters.
fn cut_lines(text: &str) -> Cow<'_, str> {
    if text.lines().all(|l| l.len() <= LINE) {
        return Cow::Borrowed(text);
    }
    let cut = |l: &str| match l.char_indices().nth(LINE / 4) {
        Some((at, _)) if l.len() > LINE => format!("{}… ({} more bytes)", &l[..at], l.len() - at),
        _ => l.to_string(),
    };
    Cow::Owned(text.lines().map(cut).collect::<Vec<_>>().join("\n"))
}

/// Writes a command's result to stdout. A closed pipe is not an error.
pub(crate) fn print(text: &str) -> Result<()> {
    let text = plain(text);
    let mut out = driver_output::out();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Io { path: "standard output".into(), what: e.to_string() })
        }
        _ => Ok(()),
    }
}

/// Writes a command's result as JSON, indented.
pub(crate) fn print_json(v: &Value) -> Result<()> {
    let text = serde_json::to_string_pretty(v).map_err(|e| Error::internal(e.to_string()))?;
    let mut safe = String::with_capacity(text.len() + 1);
    let mut one = [0; 4];
    for c in text.chars() {
        // `print` would write these characters as escapes that JSON does not have.
        match plain(c.encode_utf8(&mut one)) {
            Cow::Borrowed(_) => safe.push(c),
            Cow::Owned(_) => safe.push_str(&format!("\\u{:04x}", u32::from(c))),
        }
    }
    print(&(safe + "\n"))
}

/// Writes a line to stderr that is not part of the result: a note or a warning. `-q` suppresses it.
pub(crate) fn note(text: &str) {
    if !quiet() {
        say(text);
    }
}

/// A note about something that the user probably did not intend.
pub(crate) fn warn(text: &str) {
    note(&format!("warning: {text}"));
}

/// Writes a line about a failure, which `-q` does not suppress.
pub(crate) fn fault(text: &str) {
    say(&format!("error: {text}"));
}

fn say(text: &str) {
    // If stderr is closed, nothing can be reported.
    let _ = driver_output::err().write_all(format!("{}\n", plain(text)).as_bytes());
}

/// Warns that tuning may take long, if all kernels are to be tuned. Also warns about problems with the file
/// of tuned kernels; plans are then made without its results.
pub(crate) fn tuning_warnings(b: &Backend) {
    // The kernels of the CPU have no variants.
    if b.tuning_mode() == TuningMode::Exhaustive && b.info().backend != BackendType::Cpu {
        // A command may open the device more than once.
        static TOLD: Once = Once::new();
        let what = "all kernels are tuned before their first run, which may take minutes";
        TOLD.call_once(|| note(&format!("{what}; --tuning cached leaves this out")));
    }
    if b.tuning_mode() != TuningMode::Off {
        b.tuning_cache().warnings().iter().for_each(|w| note(&format!("warning: {w}")));
    }
}

/// The text of an error.
pub(crate) fn message(e: &Error) -> String {
    e.to_string()
}

pub(crate) fn print_error(e: &Error, json: bool) {
    let message = message(e);
    let message = cut_lines(&message);
    if json {
        let (kind, facts) = facts(e);
        print_error_json(kind, &message, facts, e.exit_code());
    } else {
        fault(&message);
    }
}

/// An error as part of a JSON report: kind, message and facts.
pub(crate) fn error_json(e: &Error) -> Value {
    let (kind, facts) = facts(e);
    json!({ "kind": kind, "message": cut_lines(&message(e)), "facts": facts })
}

pub(crate) fn print_error_json(kind: &str, message: &str, facts: Value, code: i32) {
    let v = json!({ "error": { "kind": kind, "message": message, "facts": facts }, "exit_code": code });
    if let Err(e) = print_json(&v) {
        fault(&e.to_string());
    }
}

/// The kind of an error, and its data besides the message.
fn facts(e: &Error) -> (&'static str, Value) {
    match e {
        Error::Shape { op, at, .. } => ("Shape", json!({ "op": op, "at": at.text() })),
        Error::DType { op, dtype, want, at } => {
            ("DType", json!({ "op": op, "dtype": dtype, "want": want, "at": at.text() }))
        }
        Error::Argument { op, at, .. } => ("Argument", json!({ "op": op, "at": at.text() })),
        Error::Unsupported { what, next } => ("Unsupported", json!({ "what": what, "next": next })),
        Error::UnsupportedOps(ops) => ("UnsupportedOps", json!({ "ops": ops })),
        Error::Unavailable { backend, tried, reason, fix } => {
            ("Unavailable", json!({ "backend": backend, "tried": tried, "reason": reason, "fix": fix }))
        }
        Error::OutOfMemory { device, what, requested, free, total, next } => (
            "OutOfMemory",
            json!({ "device": device, "what": what, "requested": requested, "free": free, "total": total, "next": next }),
        ),
        Error::Driver { device, call, code, .. } => {
            ("Driver", json!({ "device": device, "call": call, "code": code }))
        }
        Error::Compile { device, kernel, log } => {
            ("Compile", json!({ "device": device, "kernel": kernel, "log": log }))
        }
        Error::Index { op, range, at, found, input } => {
            let (index, value) = found.unzip();
            let at = at.text();
            (
                "Index",
                json!({ "op": op, "range": range, "at": at, "index": index, "value": value, "input": input }),
            )
        }
        Error::Endless { node, iterations, .. } => {
            ("Endless", json!({ "node": node, "iterations": iterations }))
        }
        Error::Interrupted { what } => ("Interrupted", json!({ "what": what })),
        Error::Format { file, .. } => ("Format", json!({ "file": file })),
        Error::Io { path, .. } => ("Io", json!({ "path": path })),
        Error::Internal(_) => ("Internal", Value::Null),
        _ => ("Error", Value::Null),
    }
}

/// The text of a caught panic.
pub(crate) fn panic_text(p: &(dyn Any + Send)) -> String {
    p.downcast_ref::<&str>()
        .map(|s| s.to_string())
        .or_else(|| p.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

/// Formats a duration, as in `1.23 ms`.
pub(crate) fn time(t: Duration) -> String {
    match t.as_secs_f64() {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.2} ms", s * 1e3),
        s => format!("{:.1} µs", s * 1e6),
    }
}

pub(crate) fn ms(t: Duration) -> f64 {
    t.as_secs_f64() * 1e3
}

/// Formats a number of bytes, as in `12.3 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut v, mut u) = (bytes as f64, 0);
    while v >= 1024.0 && u + 1 < UNITS.len() {
        v /= 1024.0;
        u += 1;
    }
    if u == 0 { format!("{bytes} B") } else { format!("{v:.1} {}", UNITS[u]) }
}

/// A kB field of a file in `/proc`, in bytes.
fn proc_field(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Peak resident memory of this process in bytes, if the system reports it (Linux).
pub(crate) fn peak_memory() -> Option<u64> {
    proc_field("/proc/self/status", "VmHWM")
}

/// Resident pages of the files that have code, in bytes: those of the program and of its libraries, if the
/// system reports them (Linux). Pages that the process has changed are not counted, because they are
/// anonymous memory.
#[cfg(feature = "language")]
pub(crate) fn program_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let mut files: std::collections::HashMap<&str, (bool, u64)> = Default::default();
    let mut path = "";
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or("");
        let kib = |mut w: std::str::SplitAsciiWhitespace<'_>| w.next()?.parse::<u64>().ok();
        match first {
            "Rss:" => files.entry(path).or_default().1 += kib(words)?,
            "Anonymous:" => {
                let bytes = &mut files.entry(path).or_default().1;
                *bytes = bytes.saturating_sub(kib(words)?);
            }
            _ if first.ends_with(':') => {}
            // The first line of a mapping: addresses, permissions, offset, device, inode, path.
            _ => {
                let code = words.next().is_some_and(|p| p.contains('x'));
                path = words.nth(3).unwrap_or("");
                files.entry(path).or_default().0 |= code;
            }
        }
    }
    let code = files.iter().filter(|(path, (code, _))| *code && path.starts_with('/'));
    Some(code.map(|(_, (_, kib))| kib * 1024).sum())
}

/// Available and total memory in bytes, if the system reports them (Linux).
pub(crate) fn host_memory() -> Option<(u64, u64)> {
    Some((proc_field("/proc/meminfo", "MemAvailable")?, proc_field("/proc/meminfo", "MemTotal")?))
}

/// Median, minimum and maximum of durations, which must not be empty.
pub(crate) fn spread(times: &[Duration]) -> (Duration, Duration, Duration) {
    let mut t = times.to_vec();
    t.sort();
    (t[t.len() / 2], t[0], t[t.len() - 1])
}

/// Formats columns of text, each as wide as its widest cell.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = vec![];
    let plain: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|r| r.iter().map(|c| one_line(c)).collect()).collect();
    let rows = &plain;
    for r in rows {
        for (i, c) in r.iter().enumerate() {
            let n = c.chars().count();
            match widths.get_mut(i) {
                Some(w) => *w = (*w).max(n),
                None => widths.push(n),
            }
        }
    }
    let mut out = String::new();
    for r in rows {
        let mut line = String::from("  ");
        for (c, w) in r.iter().zip(&widths) {
            let pad = w - c.chars().count();
            line.push_str(c);
            line.push_str(&" ".repeat(pad + 2));
        }
        let _ = writeln!(out, "{}", line.trim_end());
    }
    out
}

/// A table. The columns in `right` are right-aligned.
pub(crate) fn figures(rows: Vec<Vec<String>>, right: &[usize]) -> String {
    let mut rows = rows;
    for &c in right {
        let wide = rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        for r in &mut rows {
            if let Some(s) = r.get_mut(c) {
                *s = format!("{}{s}", " ".repeat(wide - s.chars().count()));
            }
        }
    }
    table(&rows)
}

/// Width of the output in columns: the terminal's, else the variable COLUMNS, else 100. It is limited to the
/// range from 40 to 100.
pub(crate) fn columns() -> usize {
    let asked = std::env::var("COLUMNS").ok().and_then(|v| v.parse().ok());
    let wide = terminal_size::terminal_size().map(|(w, _)| usize::from(w.0)).or(asked);
    wide.unwrap_or(100).clamp(40, 100)
}

/// Wraps a paragraph to [`columns`]. The first line starts with `first`, the others with `next`. An overlong
/// word gets its own line.
pub(crate) fn wrap(text: &str, first: &str, next: &str) -> String {
    wrapped(text, first, next, columns())
}

fn wrapped(text: &str, first: &str, next: &str, columns: usize) -> String {
    let (mut out, mut line) = (String::new(), first.to_string());
    let mut empty = true;
    for word in text.split_whitespace() {
        if !empty && line.chars().count() + 1 + word.chars().count() > columns {
            out += line.trim_end();
            out.push('\n');
            line = next.to_string();
            empty = true;
        }
        if !empty {
            line.push(' ');
        }
        line += word;
        empty = false;
    }
    out + line.trim_end() + "\n"
}

/// Text on one line, truncated to `most` characters.
pub(crate) fn short(s: &str, most: usize) -> String {
    let s = one_line(&s.replace('\n', " ")).into_owned();
    match s.char_indices().nth(most) {
        Some((i, _)) => format!("{}…", &s[..i]),
        None => s,
    }
}

/// Statistics of an output's values.
#[derive(Debug)]
pub(crate) struct Summary {
    /// Minimum, maximum and mean are those of the values that are not NaN; `None` if there are no such
    /// values.
    pub min: Option<f64>,
    pub max: Option<f64>,
    pub mean: Option<f64>,
    pub nan: usize,
}

/// The summary of a tensor with at most this many values lists the values.
pub(crate) const SMALL: usize = 16;

pub(crate) fn summary(x: &ConstData) -> Summary {
    let (mut min, mut max, mut sum, mut n, mut nan) =
        (f64::INFINITY, f64::NEG_INFINITY, 0f64, 0usize, 0usize);
    for v in x.scalars().map(|s| s.as_f64()) {
        if v.is_nan() {
            nan += 1;
        } else {
            (min, max, sum, n) = (min.min(v), max.max(v), sum + v, n + 1);
        }
    }
    let some = |v: f64| (n > 0).then_some(v);
    Summary { min: some(min), max: some(max), mean: some(sum / n.max(1) as f64), nan }
}

/// A number with at most six significant digits; integers below 10^15 have all digits.
pub(crate) fn number(v: f64) -> String {
    if v == 0.0 || v.is_finite() && v.fract() == 0.0 && v.abs() < 1e15 {
        format!("{v}")
    } else if v.abs() >= 1e6 || v.abs() < 1e-4 {
        format!("{v:.5e}")
    } else {
        let digits = (5 - v.abs().log10().floor() as i32).max(0) as usize;
        let s = format!("{v:.digits$}");
        s.trim_end_matches('0').trim_end_matches('.').to_string()
    }
}

impl Summary {
    pub(crate) fn text(&self, x: &ConstData) -> String {
        let mut s = match (self.min, self.max, self.mean) {
            (Some(a), Some(b), Some(m)) => {
                format!("min {}  max {}  mean {}", number(a), number(b), number(m))
            }
            _ if x.numel() == 0 => "empty".into(),
            _ => "no number".into(),
        };
        if self.nan > 0 {
            let _ = write!(s, "  NaN {} of {}", self.nan, x.numel());
        }
        if x.numel() <= SMALL && x.numel() > 0 {
            let v: Vec<String> = x.scalars().map(|s| number(s.as_f64())).collect();
            let _ = write!(s, "  [{}]", v.join(", "));
        }
        s
    }

    /// JSON has no NaN and no infinities, so they are null.
    pub(crate) fn json(&self, x: &ConstData) -> Value {
        let values = (x.numel() <= SMALL).then(|| x.scalars().map(|s| s.as_f64()).collect::<Vec<_>>());
        json!({ "min": self.min, "max": self.max, "mean": self.mean, "nan": self.nan, "values": values })
    }
}

/// Progress of a loop on stderr: a bar on a terminal, else an occasional line.
#[derive(Debug)]
pub(crate) struct Progress {
    what: &'static str,
    /// Created after a delay, so that it does not flicker for short loops.
    bar: Option<ProgressBar>,
    terminal: bool,
    /// Whether lines are printed if stderr is not a terminal.
    lines: bool,
    total: u64,
    done: u64,
    next: u64,
    start: Instant,
    last: Instant,
}

/// Delay before the bar is shown.
const MOMENT: Duration = Duration::from_millis(200);
/// Time between two updates of the bar.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

impl Progress {
    pub(crate) fn new(what: &'static str, total: u64) -> Progress {
        let terminal = driver_output::err().is_terminal() && !quiet();
        let now = Instant::now();
        let next = total.div_ceil(10).max(1);
        Progress { what, bar: None, terminal, lines: true, total, done: 0, next, start: now, last: now }
    }

    /// Like [`Progress::new`], but prints nothing if stderr is not a terminal.
    pub(crate) fn bar(what: &'static str, total: u64) -> Progress {
        Progress { lines: false, ..Progress::new(what, total) }
    }

    pub(crate) fn step(&mut self) {
        self.done += 1;
        if self.terminal {
            if self.start.elapsed() < MOMENT || self.bar.is_some() && self.last.elapsed() < REDRAW_INTERVAL {
                return;
            }
            self.last = Instant::now();
            let (what, total) = (self.what, self.total);
            let bar = self.bar.get_or_insert_with(|| {
                let bar = ProgressBar::new(total).with_message(what).with_elapsed(self.start.elapsed());
                match ProgressStyle::with_template("{msg} [{bar:40}] {pos}/{len} {eta}") {
                    Ok(s) => bar.with_style(s.progress_chars("=> ")),
                    Err(_) => bar,
                }
            });
            bar.set_position(self.done);
            return;
        }
        let due = self.done >= self.next || self.last.elapsed() > Duration::from_secs(5);
        if self.lines && self.total > 1 && due {
            note(&format!("{} {}/{}", self.what, self.done, self.total));
            self.next = self.done + self.total.div_ceil(10).max(1);
            self.last = Instant::now();
        }
    }

    pub(crate) fn finish(self) {
        if let Some(b) = self.bar {
            b.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures() {
        assert_eq!(number(0.0), "0");
        assert_eq!(number(-3.0), "-3");
        assert_eq!(number(0.123456789), "0.123457");
        assert_eq!(number(12.3456789), "12.3457");
        assert_eq!(number(0.099999998), "0.1");
        assert_eq!(number(1.5e-7), "1.50000e-7");
        assert_eq!(number(f64::INFINITY), "inf");
        assert_eq!(number(f64::NAN), "NaN");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(3 << 20), "3.0 MiB");
        assert_eq!(time(Duration::from_micros(1500)), "1.50 ms");
    }

    #[test]
    fn summaries_leave_nan_out_and_count_it() {
        let x = ConstData::from_slice(&[4], &[1f32, f32::NAN, 3.0, 2.0]).unwrap();
        let s = summary(&x);
        assert_eq!((s.min, s.max, s.mean, s.nan), (Some(1.0), Some(3.0), Some(2.0), 1));
        let empty = ConstData::from_slice::<f32>(&[0], &[]).unwrap();
        assert_eq!(summary(&empty).text(&empty), "empty");
    }

    #[test]
    fn paragraphs_are_wrapped() {
        assert_eq!(wrapped("a bb ccc dddddddd e", "x ", "  ", 6), "x a bb\n  ccc\n  dddddddd\n  e\n");
        assert_eq!(wrapped("", "x ", "  ", 6), "x\n");
    }

    #[test]
    fn tables_line_up() {
        let t = table(&[vec!["a".into(), "bb".into()], vec!["ccc".into(), "µ".into()]]);
        assert_eq!(t, "  a    bb\n  ccc  µ\n");
    }
}
