//! Comparison with an earlier report.

use super::{MS, Sample, merge, three};
use crate::report;
use halcyon::{Error, Result};
use halcyon_host::input;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The fields of a report's rows that are compared, their scale factor, and whether more is better.
const FIGURES: [(&str, f64, bool); 2] = [("time_ms", MS, false), ("rate", 1.0, true)];

/// An earlier report.
#[derive(Debug)]
pub(super) struct EarlierReport {
    file: PathBuf,
    settings: Value,
    rows: BTreeMap<String, (Sample, bool)>,
    /// The report as read.
    report: Value,
}

/// A row, compared with the same row of the earlier report.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Ratio {
    /// Median of the earlier report.
    pub before: f64,
    /// The improvement: earlier time over current time, or current rate over earlier rate.
    pub ratio: f64,
    /// Whether the interquartile ranges of the two reports are disjoint.
    pub beyond: bool,
}

/// The fields at the head of a report, starting with `report`.
pub(super) fn head(command: &str, settings: &Value) -> Value {
    json!({ "report": format!("bench {command}"), "version": env!("CARGO_PKG_VERSION"), "settings": settings })
}

impl EarlierReport {
    /// Reads a report printed by `halcyon bench COMMAND --json`.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Format`] for a file with other content. The message says what is wrong.
    pub(super) fn read(file: &Path, command: &str) -> Result<EarlierReport> {
        let at = || file.display().to_string();
        let bad = |what: String| Error::Format { file: at(), what };
        let text = input::text(file)?;
        let v: Value = serde_json::from_str(&text).map_err(|e| bad(format!("not JSON: {e}")))?;
        let want = format!("bench {command}");
        match v["report"].as_str() {
            Some(r) if r == want => {}
            Some(r) => return Err(bad(format!("a report of `{r}`, not of `{want}`"))),
            None => return Err(bad(format!("not a report of `halcyon {want} --json`"))),
        }
        let rows = v["rows"].as_array().ok_or_else(|| bad("the report has no rows".into()))?;
        let mut known = BTreeMap::new();
        for r in rows {
            let name = r["name"].as_str().ok_or_else(|| bad("a row has no name".into()))?;
            for (field, scale, more) in FIGURES {
                if let Some(v) = r.get(field).filter(|v| !v.is_null()) {
                    let s = Sample::parse(v, scale)
                        .filter(|s| s.median > 0.0)
                        .ok_or_else(|| bad(format!("row \"{name}\": \"{field}\" is not complete")))?;
                    known.insert(name.to_string(), (s, more));
                }
            }
        }
        Ok(EarlierReport { file: file.into(), settings: v["settings"].clone(), rows: known, report: v })
    }

    /// The row of this name in the earlier report.
    pub(super) fn row(&self, name: &str) -> Option<&Value> {
        self.report["rows"].as_array()?.iter().find(|r| r["name"] == name)
    }

    /// Compares the current value of a row with its value in the earlier report. `None` if the earlier report
    /// has no value for the row.
    pub(super) fn ratio(&self, name: &str, now: &Sample) -> Option<Ratio> {
        let (s, more) = self.rows.get(name)?;
        let ratio = if *more { now.median / s.median } else { s.median / now.median };
        let beyond = now.low > s.high || now.high < s.low;
        Some(Ratio { before: s.median, ratio, beyond })
    }

    /// The settings that differ, and the rows that only the earlier report has.
    pub(super) fn differs(&self, settings: &Value, now: &[&str]) -> (Vec<String>, Vec<&str>) {
        let plain = |v: &Value| match v {
            Value::String(s) => s.clone(),
            v => v.to_string(),
        };
        let all = settings.as_object();
        let changed = all
            .into_iter()
            .flatten()
            .filter(|(k, v)| self.settings[k.as_str()] != **v)
            .map(|(k, v)| format!("{k}: {} before, {} now", plain(&self.settings[k.as_str()]), plain(v)))
            .collect();
        let gone = self.rows.keys().map(String::as_str).filter(|n| !now.contains(n)).collect();
        (changed, gone)
    }

    /// Adds the comparison to the current report `v`, and to each of its rows that the earlier report has
    /// too.
    pub(super) fn add_to(&self, v: &mut Value) {
        let mut names = vec![];
        for r in v["rows"].as_array_mut().into_iter().flatten() {
            let Some(name) = r["name"].as_str().map(String::from) else { continue };
            let now = FIGURES.iter().find_map(|(f, scale, _)| Sample::parse(r.get(*f)?, *scale));
            if let Some(c) = now.and_then(|s| self.ratio(&name, &s)) {
                let more = json!({ "ratio": c.ratio, "beyond_spread": c.beyond });
                merge(r, json!({ "compare": more }));
            }
            names.push(name);
        }
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (changed, gone) = self.differs(&v["settings"], &names);
        merge(
            v,
            json!({ "compare": { "file": report::path(&self.file), "settings_differ": changed, "only_before": gone } }),
        );
    }

    /// The line above a table of comparisons.
    pub(super) fn text(&self) -> String {
        format!(
            "compared with {}: a ratio above 1 means faster now; * marks rows where the middle halves of the runs, now and before, do not overlap\n",
            self.file.display()
        )
    }

    /// Warns on stderr if the settings differ, which makes the comparison doubtful.
    pub(super) fn note(&self, settings: &Value, now: &[&str]) {
        let (changed, _) = self.differs(settings, now);
        if !changed.is_empty() {
            report::note(&format!(
                "warning: {} was measured with other settings: {}",
                self.file.display(),
                changed.join("; ")
            ));
        }
    }
}

/// `1.25 *`, or a dash for rows without a value in the earlier report.
pub(super) fn cell(r: Option<Ratio>) -> String {
    r.map_or("-".into(), |r| format!("{}{}", three(r.ratio), if r.beyond { " *" } else { "  " }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn before(rows: Value) -> Result<EarlierReport> {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("r.json");
        let mut v = head("ops", &json!({ "threads": 2 }));
        merge(&mut v, json!({ "rows": rows }));
        std::fs::write(&file, v.to_string()).expect("written");
        EarlierReport::read(&file, "ops")
    }

    #[test]
    fn ratios_above_one_are_better_for_times_and_for_rates() {
        let old = Sample::of(&[1.9, 2.0, 2.1]);
        let b = before(json!([
            { "name": "t", "time_ms": old.json(MS) },
            { "name": "r", "rate": old.json(1.0) },
            { "name": "u", "unsupported": "by this device" },
        ]))
        .expect("a report");
        let now = Sample::of(&[0.9, 1.0, 1.1]);
        let t = b.ratio("t", &now).expect("both");
        assert!((t.ratio - 2.0).abs() < 1e-9 && t.beyond);
        assert_eq!(cell(Some(t)), "2.00 *");
        let r = b.ratio("r", &now).expect("both");
        assert!((r.ratio - 0.5).abs() < 1e-9 && r.beyond);
        let same = b.ratio("t", &Sample::of(&[1.5, 1.95, 2.5])).expect("both");
        assert!(!same.beyond);
        assert_eq!(b.ratio("u", &now), None);
        let (changed, gone) = b.differs(&json!({ "threads": 1 }), &["t"]);
        assert_eq!((changed, gone), (vec!["threads: 2 before, 1 now".to_string()], vec!["r"]));
    }

    #[test]
    fn broken_rows_are_refused() {
        for rows in [json!(3), json!([{}]), json!([{ "name": "t", "time_ms": { "median": 1 } }])] {
            assert!(matches!(before(rows), Err(Error::Format { .. })));
        }
    }
}
