//! The report, as JSON and as Markdown.

use crate::event::{Check, Figure, Status};
use crate::sections::Section;
use halcyon::DeviceInfo;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Maximum number of failures per section in the Markdown; the JSON lists all.
const MAX_LISTED: usize = 40;

/// The machine and the time of the check.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// UTC, as `2026-11-23 02:19`.
    pub date: String,
    pub system: String,
    pub threads: usize,
    /// Bytes.
    pub memory: Option<u64>,
    pub version: String,
}

impl Machine {
    /// Describes this machine; `seconds` is the time since 1970.
    pub(crate) fn new(seconds: u64) -> Machine {
        let (y, m, d) = civil(seconds / 86400);
        let (h, min) = (seconds / 3600 % 24, seconds / 60 % 60);
        let commit = option_env!("HALCYON_COMMIT").map_or(String::new(), |c| format!(" ({c})"));
        Machine {
            date: format!("{y:04}-{m:02}-{d:02} {h:02}:{min:02}"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            memory: halcyon::host::memory().map(|(_, total)| total),
            version: format!("{}{commit}", env!("CARGO_PKG_VERSION")),
        }
    }
}

/// Year, month and day from the number of days since 1970 (Hinnant, "chrono-compatible low-level date
/// algorithms").
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let (era, doe) = (z / 146_097, z % 146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let m = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(m <= 2), m, doy - (153 * mp + 2) / 5 + 1)
}

/// The results of a section, or the reason why it did not run.
#[derive(Clone, Debug)]
pub(crate) struct SectionResult {
    pub backend: String,
    pub name: &'static str,
    pub what: &'static str,
    measures: bool,
    least: f64,
    shown: bool,
    pub seconds: f64,
    pub skipped: Option<String>,
    pub passed: usize,
    pub wrong: usize,
    pub unsupported: usize,
    pub errors: usize,
    pub not_run: usize,
    pub figures: Vec<Figure>,
    /// Checks that did not pass, and warnings.
    pub failures: Vec<Check>,
    /// Passed checks with a note that is not a warning.
    pub remarks: Vec<Check>,
    pub notes: Vec<String>,
}

/// The verdict on a section. The variants are ordered from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verdict {
    Ok,
    /// A figure missed its target, a figure with a target had nothing to be compared with, or something was
    /// not run.
    Missed,
    Skipped,
    Wrong,
}

impl SectionResult {
    pub(crate) fn new(backend: &str, s: &Section) -> SectionResult {
        SectionResult {
            backend: backend.into(),
            name: s.name,
            what: s.what,
            measures: s.measures,
            least: s.least,
            shown: s.shown,
            seconds: 0.0,
            skipped: None,
            passed: 0,
            wrong: 0,
            unsupported: 0,
            errors: 0,
            not_run: 0,
            figures: vec![],
            failures: vec![],
            remarks: vec![],
            notes: vec![],
        }
    }

    pub(crate) fn verdict(&self, rehearsal: bool) -> Verdict {
        let done = if self.measures { self.figures.len() } else { self.passed };
        let cases = self.passed + self.wrong + self.unsupported + self.errors;
        let wrong = self.wrong + self.errors > 0 || (self.passed as f64) < self.least * cases as f64;
        let met = |f: &Figure| f.target.is_none() || f.met() == Some(true);
        if self.skipped.is_some() || !wrong && done == 0 && self.not_run > 0 {
            Verdict::Skipped
        } else if wrong || done == 0 {
            Verdict::Wrong
        } else if self.not_run > 0 || !rehearsal && !self.figures.iter().all(met) {
            Verdict::Missed
        } else {
            Verdict::Ok
        }
    }

    /// The counts of results and the time, as text. The figures of a rehearsal are not compared with targets.
    pub(crate) fn line(&self, rehearsal: bool) -> String {
        if let Some(why) = &self.skipped {
            return format!("skipped: {why}");
        }
        let mut out = vec![];
        let counts = [
            (self.passed, "passed"),
            (self.wrong, "wrong"),
            (self.unsupported, "not supported"),
            (self.errors, "errors"),
            (self.not_run, "not run"),
            (self.figures.len(), "figures"),
        ];
        out.extend(counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")));
        let met: Vec<bool> = self.figures.iter().filter_map(Figure::met).collect();
        if !met.is_empty() && !rehearsal {
            out.push(format!("{} of {} targets met", met.iter().filter(|m| **m).count(), met.len()));
        }
        if out.is_empty() {
            out.push("no result was reported".into());
        }
        format!("{}, {:.1} s", out.join(", "), self.seconds)
    }

    fn json(&self, rehearsal: bool) -> Value {
        let figure = |f: &Figure| {
            let mut v = json!(f);
            v["ratio"] = json!(f.ratio());
            v["met"] = json!(if rehearsal { None } else { f.met() });
            v
        };
        json!({
            "backend": self.backend, "section": self.name, "what": self.what, "verdict": self.verdict(rehearsal),
            "seconds": self.seconds, "skipped": self.skipped,
            "passed": self.passed, "wrong": self.wrong, "unsupported": self.unsupported, "errors": self.errors,
            "not_run": self.not_run,
            "figures": self.figures.iter().map(figure).collect::<Vec<_>>(),
            "failures": self.failures, "remarks": self.remarks, "notes": self.notes,
        })
    }
}

/// The whole report.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    machine: Machine,
    rehearsal: bool,
    minutes: f64,
    notes: Vec<String>,
    pub devices: Vec<DeviceInfo>,
    pub sections: Vec<SectionResult>,
    pub seconds: f64,
}

/// Formats text for a table cell.
fn cell(s: &str) -> String {
    let one = s.replace(['\n', '\r'], " ").replace('|', "\\|");
    match one.char_indices().nth(500) {
        Some((at, _)) => format!("{}…", &one[..at]),
        None => one,
    }
}

/// Formats with four significant digits (three if the number is below 0.001 or at least a million).
fn short(v: f64) -> String {
    match v.abs() {
        a if a == 0.0 || !a.is_finite() => format!("{v}"),
        a if !(1e-3..1e6).contains(&a) => format!("{v:.2e}"),
        a => format!("{v:.*}", (3 - a.log10().floor() as i32).clamp(0, 6) as usize),
    }
}

impl Report {
    pub(crate) fn new(machine: Machine, rehearsal: bool, minutes: f64, notes: Vec<String>) -> Report {
        Report { machine, rehearsal, minutes, notes, devices: vec![], sections: vec![], seconds: 0.0 }
    }

    fn worst(&self) -> Verdict {
        self.sections.iter().map(|s| s.verdict(self.rehearsal)).max().unwrap_or(Verdict::Wrong)
    }

    /// Exit code: 0 if the verdict of every section is `Ok`, 1 if one is `Wrong` or no section ran, and 3
    /// otherwise.
    pub(crate) fn code(&self) -> u8 {
        match self.worst() {
            Verdict::Ok => 0,
            Verdict::Wrong => 1,
            Verdict::Missed | Verdict::Skipped => 3,
        }
    }

    pub(crate) fn json(&self) -> Value {
        json!({
            "report": "halcyon-check", "rehearsal": self.rehearsal, "machine": self.machine, "minutes": self.minutes,
            "seconds": self.seconds, "notes": self.notes, "devices": self.devices, "exit_code": self.code(),
            "sections": self.sections.iter().map(|s| s.json(self.rehearsal)).collect::<Vec<_>>(),
        })
    }

    /// One line per section.
    pub(crate) fn summary(&self) -> String {
        let mut out = String::new();
        for s in &self.sections {
            let verdict = format!("{:?}", s.verdict(self.rehearsal)).to_lowercase();
            // Writing to a string does not fail.
            let _ =
                writeln!(out, "{:<8} {:<8} {:<16} {}", verdict, s.backend, s.name, s.line(self.rehearsal));
        }
        out
    }

    pub(crate) fn markdown(&self) -> String {
        let (m, mut out) = (&self.machine, String::new());
        let card = self.devices.first().map_or("no device", |d| d.name.as_str());
        let _ =
            writeln!(out, "# {} on {card}, {}\n", if self.rehearsal { "Rehearsal" } else { "Check" }, m.date);
        if self.rehearsal {
            out += "**This is a rehearsal**: tiny sizes and a sample of the cases. It shows that the program works; its figures say nothing about a device.\n\n";
        }
        let gib = |b: u64| format!("{:.1} GiB", b as f64 / (1u64 << 30) as f64);
        let memory = m.memory.map_or("?".into(), gib);
        let _ = writeln!(
            out,
            "Halcyon {}; {}, {} threads, {memory}; {:.0} s of {} min.\n",
            m.version,
            m.system,
            m.threads,
            self.seconds,
            m_text(self.minutes)
        );
        out += "| device | name | driver | architecture | memory |\n|---|---|---|---|---|\n";
        for d in &self.devices {
            let or = |s: &Option<String>| s.clone().unwrap_or_else(|| "?".into());
            let memory = d.total_memory.map_or("?".into(), gib);
            let row =
                [d.id.clone(), d.name.clone(), or(&d.driver_version), or(&d.compute_capability), memory];
            let _ = writeln!(out, "| {} |", row.map(|c| cell(&c)).join(" | "));
        }
        out += "\n## Sections\n\n| | backend | section | | result |\n|---|---|---|---|---|\n";
        for s in &self.sections {
            let verdict = format!("{:?}", s.verdict(self.rehearsal)).to_lowercase();
            let _ = writeln!(
                out,
                "| {verdict} | {} | {} | {} | {} |",
                s.backend,
                s.name,
                s.what,
                cell(&s.line(self.rehearsal))
            );
        }
        for s in self.sections.iter().filter(|s| !s.figures.is_empty()) {
            self.figures(s, &mut out);
        }
        for s in self.sections.iter().filter(|s| s.shown && !s.remarks.is_empty()) {
            let _ = writeln!(out, "\n## What passed: {} on {}\n", s.name, s.backend);
            for c in &s.remarks {
                let _ = writeln!(out, "- `{}`: {}", c.name, cell(&c.note));
            }
        }
        for s in self.sections.iter().filter(|s| !s.failures.is_empty()) {
            failures(s, &mut out);
        }
        let notes: Vec<String> = self
            .notes
            .iter()
            .cloned()
            .chain(
                self.sections
                    .iter()
                    .flat_map(|s| s.notes.iter().map(|n| format!("{} {}: {n}", s.backend, s.name))),
            )
            .collect();
        if !notes.is_empty() {
            out += "\n## Notes\n\n";
            notes.iter().for_each(|n| out += &format!("- {}\n", cell(n)));
        }
        out
    }

    /// Writes the table of a section's figures.
    fn figures(&self, s: &SectionResult, out: &mut String) {
        let _ = writeln!(
            out,
            "\n## {} on {}\n\n| figure | value | compared with | ratio | target | note |",
            s.name, s.backend
        );
        *out += "|---|---|---|---|---|---|\n";
        for f in &s.figures {
            let beside =
                f.reference.as_ref().map_or(String::new(), |r| format!("{} ({})", short(r.value), r.what));
            let ratio = f.ratio().map_or(String::new(), |r| format!("{r:.2}"));
            let target = match f.target {
                Some(t) if self.rehearsal => format!("{t:.2}"),
                Some(t) => match f.met() {
                    Some(true) => format!("{t:.2}: met"),
                    Some(false) => format!("{t:.2}: **missed**"),
                    None => format!("{t:.2}: nothing to compare with"),
                },
                None => String::new(),
            };
            let row = [
                f.name.clone(),
                format!("{} {}", short(f.value), f.unit),
                beside,
                ratio,
                target,
                f.note.clone(),
            ];
            let _ = writeln!(out, "| {} |", row.map(|c| cell(&c)).join(" | "));
        }
    }

    /// Writes the report into a folder, as Markdown and as JSON.
    pub(crate) fn write(&self, dir: &Path) -> Result<[PathBuf; 2], String> {
        let card = self.devices.first().map_or("no device".into(), |d| format!("{} {}", d.backend, d.name));
        let kind = if self.rehearsal { "rehearsal" } else { "check" };
        let date = self.machine.date.replace([' ', ':'], "-");
        let slug: String = card
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' })
            .collect();
        let base = format!("{kind}-{date}-{slug}");
        let json = serde_json::to_string_pretty(&self.json()).map_err(|e| e.to_string())?;
        let paths = [dir.join(format!("{base}.md")), dir.join(format!("{base}.json"))];
        for (path, text) in paths.iter().zip([self.markdown(), json + "\n"]) {
            halcyon::host::output::write(path, text.as_bytes()).map_err(|e| e.to_string())?;
        }
        Ok(paths)
    }
}

/// Writes the list of a section's cases that did not pass, and of its warnings.
fn failures(s: &SectionResult, out: &mut String) {
    let _ = writeln!(out, "\n## What did not pass: {} on {}\n", s.name, s.backend);
    // Features that are not supported and cases that were not run come last.
    let mut all: Vec<&Check> = s.failures.iter().collect();
    all.sort_by_key(|c| matches!(c.status, Status::Unsupported | Status::NotRun));
    for c in all.iter().take(MAX_LISTED) {
        let status = match c.status {
            Status::Passed => "warning",
            Status::Wrong => "wrong",
            Status::Unsupported => "not supported",
            Status::Error => "error",
            Status::NotRun => "not run",
        };
        let _ = writeln!(out, "- {status}: `{}`: {}", c.name, cell(&c.note));
    }
    if all.len() > MAX_LISTED {
        let _ = writeln!(out, "- and {} more, in the JSON", all.len() - MAX_LISTED);
    }
}

fn m_text(minutes: f64) -> String {
    if minutes.fract() == 0.0 { format!("{minutes:.0}") } else { format!("{minutes:.1}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Event, Reference};
    use crate::sections::SECTIONS;

    fn check(status: Status) -> Event {
        Event::Check(Check { name: "a|b".into(), status, note: "x\ny".into() })
    }

    fn section(name: &str) -> SectionResult {
        SectionResult::new("cuda", SECTIONS.iter().find(|s| s.name == name).unwrap())
    }

    fn figure(value: f64) -> Event {
        let reference = Some(Reference { what: "PyTorch".into(), value: 10.0 });
        let (name, unit) = ("matmul".into(), "TFLOP/s".into());
        Event::Figure(Figure {
            name,
            unit,
            value,
            more: true,
            reference,
            target: Some(0.9),
            note: String::new(),
        })
    }

    #[test]
    fn dates_are_dates() {
        let of = |s| Machine::new(s).date;
        assert_eq!(of(0), "1970-01-01 00:00");
        assert_eq!(of(951_782_400), "2000-02-29 00:00");
        assert_eq!(of(1_830_297_540), "2027-12-31 23:59");
    }

    #[test]
    fn verdicts_are_exit_codes() {
        let mut r = Report::new(Machine::new(0), false, 9.0, vec![]);
        assert_eq!(r.code(), 1, "nothing ran");
        let mut s = section("hal");
        s.take(check(Status::Passed));
        r.sections.push(s);
        assert_eq!(r.code(), 0);
        // A section without events is wrong.
        assert_eq!(section("hal").verdict(false), Verdict::Wrong);
        assert_eq!(section("bench-gemm").verdict(false), Verdict::Wrong);
        let mut b = section("bench-gemm");
        b.take(figure(8.0));
        r.sections.push(b.clone());
        assert_eq!((r.code(), b.verdict(true)), (3, Verdict::Ok));
        let mut s = section("suite");
        s.take(check(Status::Unsupported));
        (0..9).for_each(|_| s.take(check(Status::Passed)));
        assert_eq!(s.verdict(false), Verdict::Ok);
        s.take(check(Status::Unsupported));
        assert_eq!(s.verdict(false), Verdict::Wrong, "below nine tenths");
        let mut s = section("ops");
        s.take(check(Status::Passed));
        s.take(check(Status::Wrong));
        r.sections.push(s);
        assert_eq!(r.code(), 1);
        let md = r.markdown();
        assert!(
            md.contains("**missed**")
                && md.contains("- wrong: `a|b`: x y")
                && md.starts_with("# Check on no device"),
            "{md}"
        );
        assert!(Report { rehearsal: true, ..r }.markdown().contains("**This is a rehearsal**"));
    }

    #[test]
    fn figures_have_four_digits() {
        for (v, want) in [
            (0.0, "0"),
            (1234.5678, "1235"),
            (12.345678, "12.35"),
            (0.012345, "0.01235"),
            (1.5e-7, "1.50e-7"),
        ] {
            assert_eq!(short(v), want);
        }
    }
}
