//! The report of a comparison.

use super::memory::Memory;
use super::nodes::{First, Operand, Search};
use super::side::Side;
use super::{Output, WARM_UP};
use crate::args::CompareArgs;
use crate::cmd::difference::Difference;
use crate::cmd::run::answer;
use crate::report::{self, figures, ms, number, size, spread, time};
use crate::source::Input;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

/// Limit on the values that could not be compared and are listed; `--json` has all of them.
const LISTED: usize = 5;

pub(super) struct Report<'a> {
    pub a: &'a CompareArgs,
    pub sides: [&'a Side; 2],
    pub inputs: &'a [Input],
    /// Whether the model draws random numbers.
    pub draws: bool,
    pub outputs: &'a [Output],
    pub search: Option<&'a Search>,
    pub times: [Vec<Duration>; 2],
    pub memory: [Result<Memory, String>; 2],
}

/// A share of the tolerance.
fn share(d: &Difference) -> String {
    match d.of_tolerance {
        s if s.is_infinite() => "∞".into(),
        0.0 => "0 %".into(),
        s if s < 0.001 => "<0.1 %".into(),
        s if s < 10.0 => format!("{:.1} %", s * 100.0),
        s => format!("{} times", number(s.round())),
    }
}

impl Report<'_> {
    fn agrees(&self) -> bool {
        self.outputs.iter().all(|o| o.difference.agrees())
    }

    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        if report::verbose() {
            let _ = writeln!(out, "model    {}", report::path_text(&self.a.model));
            self.sides.iter().for_each(|s| out += &s.text());
            for i in self.inputs {
                let (name, source) = (report::name(&i.name), report::name(&i.source));
                let _ = writeln!(out, "input    {name} {} from {source}", i.data.describe());
            }
        }
        if !report::quiet() {
            for (what, side) in ["compared", "with"].iter().zip(self.sides) {
                let model = match &self.a.against {
                    Some(_) => format!(": {}", report::path_text(side.path())),
                    None => String::new(),
                };
                let _ = writeln!(out, "{what:<8} {}{model}", side.name());
            }
        }
        out += &self.outputs_text();
        if let Some(s) = self.search {
            out += &search_text(s);
        }
        if report::quiet() {
            return out;
        }
        out += &self.times_text();
        out += &self.memory_text();
        if report::verbose() {
            for w in self.sides.iter().flat_map(|s| s.warnings()).collect::<BTreeSet<_>>() {
                let _ = writeln!(out, "warning  {}", report::name(&w));
            }
        }
        out
    }

    fn outputs_text(&self) -> String {
        let head = ["output", "type", "max abs", "max rel", "of tolerance", ""];
        let mut rows = vec![head.map(String::from).to_vec()];
        for o in self.outputs {
            let d = &o.difference;
            let verdict = match d.text() {
                None if self.draws => "has the same type (random numbers)".into(),
                None => "agrees".to_string(),
                Some(what) => format!("DIFFERS: {what}"),
            };
            let of = |v: f64| if d.kind.is_some() || self.draws { "-".into() } else { number(v) };
            let share = if d.kind.is_some() || self.draws { "-".into() } else { share(d) };
            rows.push(vec![
                report::short(&o.name, 40),
                report::short(&o.ty, 40),
                of(d.max_abs),
                of(d.max_rel),
                share,
                verdict,
            ]);
        }
        figures(rows, &[2, 3, 4])
    }

    fn times_text(&self) -> String {
        let [a, b] = &self.times;
        let ((left, ..), (right, ..)) = (spread(a), spread(b));
        let ratio = left.as_secs_f64() / right.as_secs_f64().max(1e-12);
        let runs = match a.len() {
            1 => "one run each".to_string(),
            n => format!("medians of {n} runs each, which alternated"),
        };
        format!("time     {} and {} ({ratio:.2} times as long), {runs}\n", time(left), time(right))
    }

    fn memory_text(&self) -> String {
        let one = |m: &Result<Memory, String>| match m {
            Ok(m) => size(m.peak),
            Err(why) => format!("not measured ({})", report::short(why, 120)),
        };
        let [a, b] = &self.memory;
        format!("memory   {} and {}, peaks of anonymous memory, each in its own process\n", one(a), one(b))
    }

    /// Prints the warnings that concern users.
    pub(super) fn warnings(&self) {
        let all: BTreeSet<String> = self.sides.iter().flat_map(|s| s.warnings()).collect();
        all.iter().filter(|w| answer::for_readers(w)).for_each(|w| report::warn(&report::short(w, 200)));
    }

    pub(super) fn json(&self) -> Value {
        let time = |all: &Vec<Duration>| {
            let (median, min, max) = spread(all);
            json!({ "median": ms(median), "min": ms(min), "max": ms(max), "runs": all.len(), "warm_up": WARM_UP })
        };
        let memory = |m: &Result<Memory, String>| match m {
            Ok(m) => json!(m),
            Err(why) => json!({ "not_measured": why }),
        };
        let side = |i: usize| {
            let mut v = self.sides[i].json();
            v["time_ms"] = time(&self.times[i]);
            v["memory"] = memory(&self.memory[i]);
            v
        };
        let output = |o: &Output| {
            let mut v = o.difference.json();
            v["name"] = json!(o.name);
            v["type"] = json!(o.ty);
            v
        };
        let input = |i: &Input| json!({ "name": i.name, "type": i.data.describe(), "source": i.source });
        json!({
            "model": report::path(&self.a.model),
            "against": self.a.against.as_deref().map(report::path),
            "runtimes": [side(0), side(1)],
            "inputs": self.inputs.iter().map(input).collect::<Vec<_>>(),
            "tolerance": { "rtol": self.a.rtol, "atol": self.a.atol },
            "random": self.draws,
            "agrees": self.agrees(),
            "outputs": self.outputs.iter().map(output).collect::<Vec<_>>(),
            "search": self.search.map(search_json),
        })
    }
}

fn search_text(s: &Search) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    match &s.first {
        Some(f) => {
            let (node, op) = (report::name(&f.node.name), report::name(&f.node.op));
            let what = f.difference.text().unwrap_or_default();
            let _ = writeln!(out, "first    node {node} ({op}): '{}': {what}", report::name(&f.value));
            let operand = |(name, o): &(String, Operand)| {
                let what = match o {
                    Operand::Compared(d) => format!("agrees, {} of the tolerance", share(d)),
                    Operand::NotCompared => "not compared".into(),
                    Operand::Given => "an input or weight".into(),
                };
                format!("'{}' ({what})", report::name(name))
            };
            if !f.operands.is_empty() {
                let all: Vec<String> = f.operands.iter().map(operand).collect();
                out += &report::wrap(&all.join(", "), "         reads ", "         ");
            }
        }
        None => {
            out += "first    no value between the nodes differs when all of them are returned: the difference \
                    comes from an optimisation across nodes\n"
        }
    }
    let _ = writeln!(out, "         {} of {} values of the main graph were compared", s.compared, s.values);
    if s.with_graphs > 0 {
        let _ = writeln!(
            out,
            "         {} nodes before it contain graphs, whose inner values are not compared",
            s.with_graphs
        );
    }
    for (name, why) in s.skipped.iter().take(LISTED) {
        let _ = writeln!(out, "         not compared: '{}': {}", report::name(name), report::short(why, 120));
    }
    if s.skipped.len() > LISTED {
        let _ = writeln!(out, "         and {} more (--json has them)", s.skipped.len() - LISTED);
    }
    out
}

fn search_json(s: &Search) -> Value {
    let first = |f: &First| {
        let mut v = f.difference.json();
        v["node"] = json!(f.node.name);
        v["op"] = json!(f.node.op);
        v["value"] = json!(f.value);
        let operand = |(name, o): &(String, Operand)| {
            let (kind, difference) = match o {
                Operand::Compared(d) => ("compared", d.json()),
                Operand::NotCompared => ("not_compared", Value::Null),
                Operand::Given => ("input_or_weight", Value::Null),
            };
            json!({ "name": name, "is": kind, "difference": difference })
        };
        v["operands"] = f.operands.iter().map(operand).collect();
        v
    };
    json!({
        "first": s.first.as_ref().map(first),
        "compared": s.compared,
        "values": s.values,
        "nodes_with_graphs": s.with_graphs,
        "skipped": s.skipped.iter().map(|(n, why)| json!({ "name": n, "reason": why })).collect::<Vec<_>>(),
    })
}
