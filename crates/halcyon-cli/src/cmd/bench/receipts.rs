//! `halcyon bench receipts`: measures the gain of each transformation of a model's plan.

use super::compare::{EarlierReport, head};
use super::{MS, Sample, merge, percent, settings, three};
use crate::args::BenchReceiptsArgs;
use crate::cmd::{Loaded, backend_json, backend_text, load};
use crate::report::{self, figures, time};
use halcyon::receipts::{Effort, Gain, Measured, measure};
use halcyon::{ConstData, Level, Result, Session};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// Name of the row for the plan with all transformations.
const ALL_ON: &str = "everything on";

pub(super) fn main(a: &BenchReceiptsArgs) -> Result<u8> {
    let before = a.compare.as_deref().map(|f| EarlierReport::read(f, "receipts")).transpose()?;
    let loaded = load(&a.model, &a.input, &a.backend, true, false)?;
    let graph = loaded.graph("receipts")?.graph.clone();
    let inputs: Vec<ConstData> = loaded.data().iter().filter_map(|d| d.tensor().cloned()).collect();
    report::note("measuring receipts: plans with and without each transformation, and level O0");
    let effort = Effort { pairs: a.repeat as usize, ..Effort::default() };
    let session = Session::new(&loaded.backend, graph);
    let measured = measure(&session, &inputs, effort, |without| match without {
        None => a.backend.open_at(Level::O0, None, false),
        name => a.backend.open_at(a.backend.level()?, name, false),
    })?;
    let mut settings = settings(&loaded.backend);
    let what: Vec<String> =
        loaded.inputs.iter().map(|i| format!("{} {}", report::name(&i.name), i.data.describe())).collect();
    merge(
        &mut settings,
        json!({
            "model": a.model.file_name().map(|n| n.to_string_lossy()), "inputs": what, "without": a.backend.without,
        }),
    );
    let done = Report { a, loaded: &loaded, settings, measured, before };
    let again = done.compare();
    if a.json {
        report::print_json(&done.json(&again))?
    } else {
        report::print(&done.text(&again))?
    }
    let bad = again.iter().filter(|r| r.bad).count();
    if let (Some(p), true) = (a.within, bad > 0) {
        report::note(&format!("{bad} receipts are not within {p} % of the earlier report"));
    }
    Ok(u8::from(a.within.is_some() && bad > 0))
}

struct Report<'a> {
    a: &'a BenchReceiptsArgs,
    loaded: &'a Loaded,
    settings: Value,
    measured: Measured,
    before: Option<EarlierReport>,
}

/// A receipt, compared with the same receipt of the earlier report.
struct ReceiptComparison {
    name: String,
    /// The current gain divided by the earlier gain; `None` if only one report has the receipt, and for the
    /// plan with all transformations, which has no gain.
    ratio: Option<f64>,
    /// The figures, other than times, that differ from the earlier report.
    differs: Vec<String>,
    /// Whether the ratio is outside of the requested bound, or anything differs.
    bad: bool,
}

/// A text such as `58` if both are equal, otherwise such as `58 -> 107`.
fn change(with: u64, without: u64, text: impl Fn(u64) -> String) -> String {
    if with == without { text(with) } else { format!("{} -> {}", text(with), text(without)) }
}

impl Report<'_> {
    fn rows(&self) -> Vec<Value> {
        let m = &self.measured;
        let mut rows = vec![json!({
            "name": ALL_ON,
            "time_ms": Sample::of(&m.with).json(MS),
            "plan": m.tally,
            "error": m.error,
        })];
        rows.extend(m.gains.iter().map(|g| {
            json!({
                "name": g.transformation,
                "applied": g.count,
                "gain": Sample::of(&g.ratios).json(1.0),
                "time_ms": Sample::of(&g.without).json(MS),
                "plan": g.tally,
                "error": g.error,
            })
        }));
        rows
    }

    /// All receipts of this report and the earlier one; empty if there is no earlier report.
    fn compare(&self) -> Vec<ReceiptComparison> {
        let Some(b) = &self.before else { return vec![] };
        let bound = self.a.within.map_or(f64::INFINITY, |p| p / 100.0);
        let now = self.rows();
        let mut all: Vec<ReceiptComparison> = now
            .iter()
            .map(|r| {
                let name = r["name"].as_str().unwrap_or_default().to_string();
                let Some(then) = b.row(&name) else {
                    return ReceiptComparison {
                        name,
                        ratio: None,
                        differs: vec!["not in the earlier report".into()],
                        bad: true,
                    };
                };
                let median = |v: &Value| v["gain"]["median"].as_f64();
                let ratio = median(r).zip(median(then)).map(|(n, t)| n / t);
                let mut differs = vec![];
                for (k, v) in r["plan"].as_object().into_iter().flatten() {
                    if then["plan"][k] != *v {
                        differs.push(format!("{k}: {} before, {v} now", then["plan"][k]));
                    }
                }
                if then["applied"] != r["applied"] {
                    differs.push(format!("applied: {} before, {} now", then["applied"], r["applied"]));
                }
                let off = ratio.is_some_and(|q| q.is_nan() || (q - 1.0).abs() > bound);
                ReceiptComparison { bad: off || !differs.is_empty(), name, ratio, differs }
            })
            .collect();
        let names: Vec<&str> = now.iter().filter_map(|r| r["name"].as_str()).collect();
        for gone in b.differs(&self.settings, &names).1 {
            let differs = vec!["not in this run".to_string()];
            all.push(ReceiptComparison { name: gone.into(), ratio: None, differs, bad: true });
        }
        all
    }

    fn json(&self, again: &[ReceiptComparison]) -> Value {
        let mut v = head("receipts", &self.settings);
        merge(
            &mut v,
            json!({
                "model": report::path(&self.a.model),
                "backend": backend_json(&self.loaded.backend),
                "inputs": self.loaded.input_json(),
                "rows": self.rows(),
            }),
        );
        if let Some(b) = &self.before {
            b.add_to(&mut v);
            let one = |r: &ReceiptComparison| json!({ "name": r.name, "gain_ratio": r.ratio, "differs": r.differs, "not_within": r.bad });
            v["compare"]["receipts"] = again.iter().map(one).collect();
            v["compare"]["within_percent"] = json!(self.a.within);
        }
        v
    }

    fn text(&self, again: &[ReceiptComparison]) -> String {
        let m = &self.measured;
        let mut out = format!("model    {}\n", report::path_text(&self.a.model));
        out += &backend_text(&self.loaded.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", self.loaded.backend.level());
        out += &self.loaded.input_text();
        let clock = |s: f64| time(Duration::from_secs_f64(s));
        let all = Sample::of(&m.with);
        let _ = writeln!(
            out,
            "time     {} (spread {}), error against O0 {:.2e}",
            clock(all.median),
            percent(all.spread()),
            m.error
        );
        if m.gains.is_empty() {
            out += "  no transformation applied\n";
            return out;
        }
        if let Some(b) = &self.before {
            let names: Vec<&str> =
                m.gains.iter().map(|g| g.transformation.as_str()).chain([ALL_ON]).collect();
            b.note(&self.settings, &names);
        }
        let title = [
            "without",
            "applied",
            "gain",
            "spread",
            "time",
            "steps",
            "generated",
            "buffers",
            "scratch",
            "packed",
            "MFLOP",
            "MB moved",
        ];
        let mut table: Vec<Vec<String>> = vec![title.map(String::from).into()];
        if self.before.is_some() {
            table[0].push("against earlier".into());
        }
        for g in &m.gains {
            let mut cells = self.cells(g);
            if self.before.is_some() {
                let r = again.iter().find(|r| r.name == g.transformation);
                let ratio = r.and_then(|r| r.ratio).map_or("-".into(), |q| format!("x {q:.3}"));
                cells.push(ratio + if r.is_some_and(|r| r.bad) { " !" } else { "  " });
            }
            table.push(cells);
        }
        out += &figures(table, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        for r in again.iter().filter(|r| !r.differs.is_empty()) {
            let _ = writeln!(out, "  {}: {}", r.name, r.differs.join("; "));
        }
        out
    }

    fn cells(&self, g: &Gain) -> Vec<String> {
        let (w, o) = (&self.measured.tally, &g.tally);
        let gain = Sample::of(&g.ratios);
        let count = |a: usize, b: usize| change(a as u64, b as u64, |n| n.to_string());
        let bytes = |a: usize, b: usize| change(a as u64, b as u64, report::size);
        let mega = |a: u64, b: u64| change(a, b, |n| three(n as f64 / 1e6));
        vec![
            g.transformation.clone(),
            g.count.to_string(),
            format!("{:.3}x", gain.median),
            percent(gain.spread()),
            time(Duration::from_secs_f64(Sample::of(&g.without).median)),
            count(w.steps, o.steps),
            count(w.generated, o.generated),
            count(w.intermediates, o.intermediates),
            bytes(w.scratch, o.scratch),
            bytes(w.packed, o.packed),
            mega(w.flops, o.flops),
            mega(w.moved, o.moved),
        ]
    }
}
