//! The answer of a run: values in readable form, the top classes, and where it ran.

use super::leaf::{Leaf, key_json, key_type};
use crate::report::{number, one_line, table, time};
use halcyon::hal::select::TRIED_LAST;
use halcyon::ir::composite::CompositeKind;
use halcyon::{Backend, BackendType, ConstData, Error, Result, Scalar};
use halcyon_formats::onnx::Text;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// Limit on the printed rows of an output; `--print all`, `--json` and files have all rows.
pub(crate) const ROWS: usize = 8;
/// Width of a line of values in columns.
const WIDTH: usize = 76;

/// Name, type, shape and values of an output: the first values of the first rows, or all.
pub(crate) fn show(name: &str, x: &Leaf<'_>, all: bool) -> String {
    let name = one_line(name);
    match x {
        Leaf::Tensor(x) => {
            let head = format!("{name} {}{:?}", x.dtype, x.dims.as_slice());
            match x.dims.last() {
                None => format!("{head} = {}\n", x.get(0).map_or(String::new(), |s| cell(x, s, all))),
                Some(_) if x.numel() == 0 => format!("{head} is empty\n"),
                Some(n) => format!("{head}\n{}", rows(x, *n, all)),
            }
        }
        Leaf::Text(t) => {
            let dims: &[usize] = &t.dims;
            format!("{name} string{dims:?}  {}\n", texts(t, all))
        }
        Leaf::Keys(k) => {
            let keys: Vec<String> = key_json(k).iter().map(Value::to_string).collect();
            format!("{name} {}[{}]  {}\n", key_type(k), keys.len(), list(&keys, all))
        }
        Leaf::None => format!("{name} is empty\n"),
    }
}

/// A value with six digits, or with all digits of its dtype.
fn cell(x: &ConstData, s: Scalar, exact: bool) -> String {
    match s {
        Scalar::Bool(b) => b.to_string(),
        Scalar::I(i) => i.to_string(),
        Scalar::U(u) => u.to_string(),
        Scalar::F(f) if !exact || !f.is_finite() => number(f),
        Scalar::F(f) if x.dtype == halcyon::DType::F64 => format!("{f:?}"),
        Scalar::F(f) => format!("{:?}", f as f32),
    }
}

/// Lines along the last axis, which has `n` elements.
fn rows(x: &ConstData, n: usize, all: bool) -> String {
    let count = x.numel() / n;
    let mut out = String::new();
    let shown = if all { count } else { count.min(ROWS) };
    // A single short row is wrapped.
    let wrap = all || count == 1 && n <= 32;
    let mut values = x.scalars();
    for _ in 0..shown {
        let mut line = String::from("  [");
        for (i, s) in values.by_ref().take(n).enumerate() {
            let sep = if i == 0 { "" } else { ", " };
            let text = cell(x, s, all);
            let (used, more) = (line.chars().count(), sep.len() + text.chars().count() + 1);
            if used + more > WIDTH {
                if !wrap {
                    if !line.ends_with('…') {
                        line += ", …";
                    }
                    continue;
                }
                out += &line;
                out += ",\n";
                line = format!("   {text}");
                continue;
            }
            if line.ends_with('…') {
                continue;
            }
            line += sep;
            line += &text;
        }
        out += &line;
        out += "]\n";
    }
    if shown < count {
        let _ = writeln!(out, "  … {} more rows (--print all, or -o FILE)", count - shown);
    }
    out
}

/// Strings: the first few, or all.
fn texts(t: &Text, all: bool) -> String {
    let words: Vec<String> = t.vals.iter().map(|s| format!("{s:?}")).collect();
    list(&words, all)
}

fn list(words: &[String], all: bool) -> String {
    let shown = if all { words.len() } else { words.len().min(ROWS) };
    format!("{}{}", words[..shown].join(", "), if shown < words.len() { ", …" } else { "" })
}

/// The first values of an output on one line, for tables.
pub(crate) fn brief(x: &Leaf<'_>) -> String {
    match x {
        Leaf::Tensor(x) => {
            let first: Vec<String> = x.scalars().take(ROWS / 2).map(|s| cell(x, s, false)).collect();
            format!("[{}{}]", first.join(", "), if x.numel() > ROWS / 2 { ", …" } else { "" })
        }
        Leaf::Text(t) => texts(t, false),
        Leaf::Keys(k) => list(&key_json(k).iter().map(Value::to_string).collect::<Vec<_>>(), false),
        Leaf::None => "empty".into(),
    }
}

/// A warning about values that are NaN or infinite.
pub(crate) fn odd_values(name: &str, x: &Leaf<'_>) -> Option<String> {
    let Leaf::Tensor(x) = x else { return None };
    if !x.dtype.is_float() {
        return None;
    }
    let (mut nan, mut inf, mut first) = (0usize, 0usize, None);
    for (i, v) in x.scalars().enumerate() {
        let v = v.as_f64();
        if v.is_finite() {
            continue;
        }
        if v.is_nan() {
            nan += 1
        } else {
            inf += 1
        }
        first = first.or(Some(i));
    }
    let mut rest = first?;
    let mut at: Vec<usize> = x
        .dims
        .iter()
        .rev()
        .map(|d| {
            let i = rest % d;
            rest /= d;
            i
        })
        .collect();
    at.reverse();
    let what = match (nan, inf) {
        (n, 0) => format!("{n} NaN"),
        (0, n) => format!("{n} infinite"),
        (n, m) => format!("{n} NaN and {m} infinite"),
    };
    let name = one_line(name);
    Some(format!("output '{name}' has {what} among its {} values, the first at {at:?}", x.numel()))
}

/// Whether a plan's warning concerns users who do not look at plans. `-v` prints all warnings.
pub(crate) fn for_readers(warning: &str) -> bool {
    !warning.starts_with(halcyon::ir::passes::COMPOSITES) && !warning.contains("the device binds at once")
}

/// Durations from 0.01 ms to 1 ms in milliseconds with two decimals (`0.15 ms`), others as [`time`] formats
/// them.
pub(crate) fn duration_text(t: Duration) -> String {
    match t.as_secs_f64() * 1e3 {
        ms if (0.01..1.0).contains(&ms) => format!("{ms:.2} ms"),
        _ => time(t),
    }
}

/// Where a model ran and briefly why: `on cpu: no GPU was found (for the reasons: halcyon devices)`.
pub(crate) fn placement_text(b: &Backend) -> String {
    let s = b.selection();
    let kind = s.device.backend;
    let cpu = kind == BackendType::Cpu;
    let software = if s.device.software { ", which runs on the CPU" } else { "" };
    let who = match cpu {
        true => "on cpu".to_string(),
        false => format!("on {} {}{software}", b.id(), crate::report::short(&s.device.name, 40)),
    };
    if s.requested == kind {
        return format!("{who} (requested)");
    }
    if s.requested != BackendType::Auto {
        return format!("{who}: {} was requested and is not available", s.requested);
    }
    if !cpu {
        return who;
    }
    // Who set the order, if it puts the CPU first.
    if s.policy.backends().first() == Some(&BackendType::Cpu) {
        let by = match s.policy_by.to_string() {
            by if by == "the caller's" => "--backends".to_string(),
            by => by,
        };
        return format!("{who}: it is first in {by}");
    }
    let others: Vec<_> = s.candidates.iter().filter(|c| c.backend != BackendType::Cpu).collect();
    let why = |c: &halcyon::hal::select::Candidate| c.rejected.clone().unwrap_or_default();
    let last = |c: &halcyon::hal::select::Candidate| why(c).contains(TRIED_LAST);
    // A device that exists but was not selected is more relevant than a missing driver.
    if let Some(c) = others.iter().find(|c| c.device.is_some() && !last(c)) {
        let id = c.device.as_deref().unwrap_or(c.backend.id());
        let what = match c.missing {
            Some(_) => "has too little free memory",
            None => "was not used",
        };
        return format!("{who}: {id} {what} (-v says why)");
    }
    let built = |c: &&&halcyon::hal::select::Candidate| !why(c).contains("switched off");
    let left_out = |c: &&&halcyon::hal::select::Candidate| !why(c).contains("the order does not contain it");
    if others.iter().filter(built).count() == 0 {
        return format!("{who}: this build has no GPU backend");
    }
    match others.iter().filter(built).filter(left_out).count() {
        0 => format!("{who}: the order ({}) has no other backend of this build", s.policy_by),
        _ => format!("{who}: no GPU was found (for the reasons: halcyon devices)"),
    }
}

/// The kind of scores that the values of a row seem to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scores {
    Probabilities,
    LogProbabilities,
    Other,
}

#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub index: usize,
    pub label: Option<String>,
    pub value: f64,
    /// The share of the class, from 0 to 1 ([`shares`]).
    pub share: f64,
}

/// The largest values of every row of an output.
#[derive(Clone, Debug)]
pub(crate) struct Top {
    pub output: String,
    pub rows: Vec<(Scores, Vec<Entry>)>,
}

/// The top `k` classes of each row, taking the last axis of the first output as classes.
pub(crate) fn top_k(k: usize, outputs: &[(String, Leaf<'_>)], labels: Option<&[String]>) -> Result<Top> {
    let Some((name, Leaf::Tensor(x))) = outputs.first() else {
        return Err(Error::argument("--top-k", "the model's first output is not a tensor of numbers"));
    };
    let classes = x.dims.last().copied().unwrap_or(1);
    if let Some(l) = labels
        && l.len() != classes
    {
        return Err(Error::argument(
            "--labels",
            format!(
                "{} names for the {classes} classes of {name} {}{:?}",
                l.len(),
                x.dtype,
                x.dims.as_slice()
            ),
        ));
    }
    let values: Vec<f64> = x.scalars().map(|s| s.as_f64()).collect();
    let rows = values
        .chunks_exact(classes.max(1))
        .map(|row| {
            let (kind, shares) = shares(row);
            let mut order: Vec<usize> = (0..row.len()).collect();
            // NaN comes last, and equal values keep their order.
            order.sort_by(|&i, &j| {
                let key = |v: f64| if v.is_nan() { f64::NEG_INFINITY } else { v };
                key(row[j]).total_cmp(&key(row[i]))
            });
            let label = |i: usize| labels.and_then(|l| l.get(i)).cloned();
            let entry = |i| Entry { index: i, label: label(i), value: row[i], share: shares[i] };
            (kind, order.into_iter().take(k).map(entry).collect())
        })
        .collect();
    Ok(Top { output: name.clone(), rows })
}

/// The share of each class: the value itself if the row is a distribution, its exponential if the row is the
/// logarithm of one, else the softmax.
pub(crate) fn shares(row: &[f64]) -> (Scores, Vec<f64>) {
    let near_one = |s: f64| (s - 1.0).abs() < 1e-3;
    let exp: Vec<f64> = row.iter().map(|v| v.exp()).collect();
    if row.iter().all(|v| (0.0..=1.001).contains(v)) && near_one(row.iter().sum()) {
        (Scores::Probabilities, row.to_vec())
    } else if row.iter().all(|v| *v <= 1e-3) && near_one(exp.iter().sum()) {
        (Scores::LogProbabilities, exp)
    } else {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = row.iter().map(|v| (v - max).exp()).collect();
        let sum: f64 = e.iter().sum();
        (Scores::Other, e.iter().map(|v| v / sum).collect())
    }
}

impl Entry {
    pub(crate) fn class(&self) -> String {
        self.label.as_ref().map_or(self.index.to_string(), |l| format!("{} ({})", one_line(l), self.index))
    }

    pub(crate) fn percent(&self) -> String {
        format!("{:.2} %", self.share * 100.0)
    }
}

impl Top {
    /// The name under which the share of an entry is printed.
    pub(crate) fn share_name(&self) -> &'static str {
        match self.rows.iter().any(|(k, _)| *k == Scores::Other) {
            true => CompositeKind::Softmax.row().name,
            false => "probability",
        }
    }

    /// A line for each class: rank, class, share; and the value if the share is the softmax of the values.
    pub(crate) fn short(&self) -> String {
        let mut out = String::new();
        for (i, (kind, top)) in self.rows.iter().take(ROWS).enumerate() {
            if self.rows.len() > 1 {
                let _ = writeln!(out, "row {i} of {}", self.rows.len());
            }
            let own = *kind == Scores::Other;
            let row = |(rank, e): (usize, &Entry)| {
                let share =
                    if own { format!("{} {}", CompositeKind::Softmax, e.percent()) } else { e.percent() };
                let mut cells = vec![format!("{}.", rank + 1), e.class(), share];
                if own {
                    cells.push(format!("value {}", number(e.value)));
                }
                cells
            };
            out += &table(&top.iter().enumerate().map(row).collect::<Vec<_>>());
        }
        self.rest(out)
    }

    fn rest(&self, mut out: String) -> String {
        if self.rows.len() > ROWS {
            let _ = writeln!(out, "  and {} more rows (--json has them)", self.rows.len() - ROWS);
        }
        out
    }

    /// A table with headings.
    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        for (i, (kind, top)) in self.rows.iter().take(ROWS).enumerate() {
            let column = match kind {
                Scores::Probabilities => "probability",
                Scores::LogProbabilities => "probability (exp)",
                Scores::Other => CompositeKind::Softmax.row().name,
            };
            let _ = match self.rows.len() {
                1 => writeln!(out, "top {} of {}", top.len(), one_line(&self.output)),
                n => writeln!(out, "top {} of {}, row {i} of {n}", top.len(), one_line(&self.output)),
            };
            let mut rows = vec![vec!["rank".into(), "class".into(), column.to_string(), "value".into()]];
            rows.extend(
                top.iter()
                    .enumerate()
                    .map(|(rank, e)| vec![format!("{}.", rank + 1), e.class(), e.percent(), number(e.value)]),
            );
            out += &table(&rows);
        }
        self.rest(out)
    }

    pub(crate) fn json(&self) -> Value {
        let rows: Vec<Value> = self.rows.iter().map(|(_, r)| entries_json(r)).collect();
        let kinds: Vec<&str> = self
            .rows
            .iter()
            .map(|(k, _)| match k {
                Scores::Probabilities => "probabilities",
                Scores::LogProbabilities => "log-probabilities",
                Scores::Other => CompositeKind::Softmax.row().name,
            })
            .collect();
        json!({ "output": self.output, "share_is": kinds, "rows": rows })
    }
}

fn entries_json(entries: &[Entry]) -> Value {
    let one = |e: &Entry| {
        // `json!` writes NaN as null, because JSON has no NaN.
        json!({ "index": e.index, "label": e.label, "value": e.value, "share": e.share })
    };
    entries.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_the_kind_of_scores() {
        assert_eq!(shares(&[0.25, 0.75]).0, Scores::Probabilities);
        let (k, v) = shares(&[0.25f64.ln(), 0.75f64.ln()]);
        assert!(k == Scores::LogProbabilities && (v[1] - 0.75).abs() < 1e-12);
        let (k, v) = shares(&[1000.0, 1000.0 + 3f64.ln()]);
        assert!(k == Scores::Other && (v[1] - 0.75).abs() < 1e-9);
    }

    #[test]
    fn top_k_sorts_every_row_and_checks_labels() {
        let x = ConstData::from_slice(&[2, 3], &[0.1f32, 0.7, 0.2, f32::NAN, 5.0, 6.0]).unwrap();
        let out = [("p".to_string(), Leaf::Tensor(&x))];
        let labels = ["a", "b", "c"].map(String::from);
        let t = top_k(2, &out, Some(&labels)).unwrap();
        let of = |r: usize| t.rows[r].1.iter().map(|e| e.index).collect::<Vec<_>>();
        assert_eq!((of(0), of(1)), (vec![1, 2], vec![2, 1]));
        assert_eq!(t.rows[0].1[0].label.as_deref(), Some("b"));
        let e = top_k(2, &out, Some(&labels[..2])).unwrap_err();
        assert!(e.to_string().contains("2 names for the 3 classes"), "{e}");
    }

    #[test]
    fn values_are_shown_in_lines_that_fit() {
        let x = ConstData::from_slice(&[2, 3], &[1f32, 2.5, -0.125, 4.0, f32::NAN, 6.0]).unwrap();
        assert_eq!(show("y", &Leaf::Tensor(&x), false), "y f32[2, 3]\n  [1, 2.5, -0.125]\n  [4, NaN, 6]\n");
        let s = ConstData::from_slice(&[], &[0.1f32]).unwrap();
        assert_eq!(show("s", &Leaf::Tensor(&s), true), "s f32[] = 0.1\n");
        let long = ConstData::from_scalars(
            halcyon::DType::F32,
            &[20, 100],
            (0..2000).map(|i| Scalar::F(i as f64 / 7.0)),
        )
        .unwrap();
        let t = show("l", &Leaf::Tensor(&long), false);
        assert!(t.lines().count() == 2 + ROWS && t.contains(", …]") && t.contains("… 12 more rows"), "{t}");
        let all = show("l", &Leaf::Tensor(&long), true);
        assert_eq!(all.matches(',').count(), 2000 - 20 + 1, "{all}");
        assert!(t.lines().chain(all.lines()).all(|l| l.chars().count() <= 80), "{t}{all}");
    }

    #[test]
    fn nan_and_infinite_values_are_reported() {
        let x = ConstData::from_slice(&[2, 2], &[1f32, f32::INFINITY, f32::NAN, 0.0]).unwrap();
        let t = odd_values("y", &Leaf::Tensor(&x)).unwrap();
        assert_eq!(t, "output 'y' has 1 NaN and 1 infinite among its 4 values, the first at [0, 1]");
        let fine = ConstData::from_slice(&[1], &[1f32]).unwrap();
        assert!(odd_values("y", &Leaf::Tensor(&fine)).is_none());
    }
}
