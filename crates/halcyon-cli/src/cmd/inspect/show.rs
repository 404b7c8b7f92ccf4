//! Formats the output of `halcyon inspect`.

use super::{BackendSupport, Cost, Key, MissingKernel, Report, owner};
use crate::report::{self, figures, short, size, table};
use halcyon::summary::grouped;
use halcyon_formats::onnx::{Operator, Weight};
use halcyon_formats::sniff::Kind;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// `1.23 G`.
pub(super) fn si(n: u64) -> String {
    const UNITS: [&str; 6] = ["", " k", " M", " G", " T", " P"];
    let (mut v, mut u) = (n as f64, 0);
    while v >= 1000.0 && u + 1 < UNITS.len() {
        v /= 1000.0;
        u += 1;
    }
    match u {
        0 => n.to_string(),
        _ if v < 10.0 => format!("{v:.2}{}", UNITS[u]),
        _ if v < 100.0 => format!("{v:.1}{}", UNITS[u]),
        _ => format!("{v:.0}{}", UNITS[u]),
    }
}

pub(super) fn percent(part: u64, all: u64) -> String {
    if all == 0 { String::new() } else { format!("{:.1} %", part as f64 * 100.0 / all as f64) }
}

/// `1 stage`, `2 stages`.
pub(super) fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{} {what}s", grouped(n as u64)) }
}

pub(super) fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}

/// For each dtype the number of tensors, of elements and of bytes; the dtype with the most bytes comes first.
pub(super) fn by_type(weights: &[Weight]) -> Vec<(&str, u64, u64, u64)> {
    let mut by: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for w in weights {
        let t = by.entry(&w.dtype).or_default();
        *t = (t.0 + 1, t.1.saturating_add(w.elements), t.2.saturating_add(w.bytes));
    }
    let mut v: Vec<_> = by.into_iter().map(|(t, (n, e, b))| (t, n, e, b)).collect();
    v.sort_by_key(|t| std::cmp::Reverse(t.3));
    v
}

pub(super) fn sums(weights: &[Weight]) -> (u64, u64) {
    weights.iter().fold((0, 0), |(e, b), w| (e.saturating_add(w.elements), b.saturating_add(w.bytes)))
}

pub(super) fn parameters(weights: &[Weight]) -> String {
    let (elements, bytes) = sums(weights);
    if weights.is_empty() {
        return "\nparameters: none\n".into();
    }
    let tensors = plural(weights.len(), "tensor");
    let mut out = format!("\nparameters: {} in {tensors}, {}\n", grouped(elements), size(bytes));
    let rows = by_type(weights).into_iter().map(|(t, n, e, b)| {
        vec![t.to_string(), plural(n as usize, "tensor"), grouped(e), size(b), percent(b, bytes)]
    });
    out += &figures(rows.collect(), &[1, 2, 3, 4]);
    out
}

pub(super) fn by_type_json(weights: &[Weight]) -> Value {
    let (elements, bytes) = sums(weights);
    let types: Vec<Value> = by_type(weights)
        .into_iter()
        .map(|(t, n, e, b)| json!({ "dtype": t, "tensors": n, "elements": e, "bytes": b }))
        .collect();
    json!({ "elements": elements, "bytes": bytes, "tensors": weights.len(), "by_dtype": types })
}

pub(super) fn dims(w: &Weight) -> String {
    format!("[{}]", w.dims.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", "))
}

pub(super) fn weight_rows<'w>(weights: impl Iterator<Item = &'w Weight>) -> String {
    let rows = weights.map(|w| {
        let name = if w.name.is_empty() { "(no name)" } else { &w.name };
        let place = if w.external { "external" } else { "" };
        vec![size(w.bytes), format!("{}{}", w.dtype, dims(w)), short(name, 80), place.into()]
    });
    figures(rows.collect(), &[0])
}

pub(super) fn weight_json(w: &Weight) -> Value {
    json!({ "name": w.name, "dtype": w.dtype, "shape": w.dims, "elements": w.elements, "bytes": w.bytes, "external": w.external })
}

pub(super) fn largest(weights: &[Weight], n: usize) -> Vec<&Weight> {
    let mut v: Vec<&Weight> = weights.iter().collect();
    v.sort_by_key(|w| std::cmp::Reverse(w.bytes));
    v.truncate(n);
    v
}

/// The operator's name, with its domain unless that is the default one.
pub(super) fn op_name(domain: &str, op: &str) -> String {
    if domain.is_empty() { op.into() } else { format!("{domain}.{op}") }
}

impl Report<'_> {
    /// How a backend treats an operator.
    fn support_text(&self, o: &Operator, on: &BackendSupport) -> String {
        if o.function {
            return "expanded".into();
        }
        if !o.refused.is_empty() {
            return "no".into();
        }
        let Ok(w) = &self.work else { return "?".into() };
        let key = (o.domain.clone(), o.name.clone());
        if w.host.iter().any(|(n, _)| owner(&self.model, n) == key) {
            return "host".into();
        }
        match &on.plans {
            Err(all) if all.iter().any(|r| r.op == key) => "no".into(),
            Err(_) => "yes".into(),
            Ok(p) => match p.by_op.get(&key) {
                Some(k) => k
                    .iter()
                    .map(|(k, n)| if *n == 1 { k.clone() } else { format!("{k} ×{n}") })
                    .collect::<Vec<_>>()
                    .join(", "),
                None if w.by_op.contains_key(&key) => "fused".into(),
                None if w.stopped.is_some() => "not reached".into(),
                None => "at import".into(),
            },
        }
    }

    pub(super) fn text(&self) -> String {
        let m = &self.model;
        let mut out = format!(
            "{}: {}, ONNX IR {}",
            report::path_text(&self.a.file),
            size(self.file_bytes),
            m.ir_version
        );
        for (d, v) in &m.opsets {
            let _ = write!(out, ", {d} {v}");
        }
        if !m.producer.is_empty() {
            let _ = write!(out, ", by {} {}", m.producer, m.producer_version);
        }
        out = out.trim_end().to_string() + "\n";
        if !m.graph_name.is_empty() {
            let _ = writeln!(out, "graph \"{}\", {}", short(&m.graph_name, 80), plural(m.nodes, "node"));
        }
        for (k, v) in &m.metadata {
            let _ = writeln!(out, "  {k}: {}", short(v, 100));
        }

        let taken: HashMap<&str, &str> = match &self.work {
            Ok(w) => w.inputs.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect(),
            Err(_) => HashMap::new(),
        };
        out += "\ninputs\n";
        let rows = m.inputs.iter().map(|(n, t)| {
            let note = match taken.get(n.as_str()) {
                Some(d) if d != t => format!("taken as {d}"),
                _ => String::new(),
            };
            vec![n.clone(), t.clone(), note]
        });
        out += &table(&rows.collect::<Vec<_>>());
        out += "outputs\n";
        out += &table(&m.outputs.iter().map(|(n, t)| vec![n.clone(), t.clone()]).collect::<Vec<_>>());
        out += &parameters(&m.weights);
        self.work_text(&mut out);
        self.operators_text(&mut out);
        self.backends_text(&mut out);

        let top = self.a.top;
        if !m.weights.is_empty() && top > 0 {
            let _ = writeln!(out, "\nlargest weights");
            out += &weight_rows(largest(&m.weights, top).into_iter());
        }
        if let Ok(w) = &self.work
            && !w.activations.is_empty()
            && top > 0
        {
            let _ = writeln!(out, "\nlargest results of nodes (fusion may keep them from being stored)");
            let rows = w
                .activations
                .iter()
                .take(top)
                .map(|x| vec![size(x.bytes), x.ty.clone(), x.op.clone(), short(&x.node, 80)]);
            out += &figures(rows.collect(), &[0]);
        }
        out
    }

    fn work_text(&self, out: &mut String) {
        let w = match &self.work {
            Ok(w) => w,
            Err(why) => {
                let _ = writeln!(out, "\nwork: not known, since {}", why.replace('\n', "\n  "));
                return;
            }
        };
        *out += "\nwork of one run\n";
        if let Some(why) = &w.staged {
            let _ = writeln!(
                out,
                "  {} on the device, since the model is not a single graph: {}",
                plural(w.graphs.len(), "stage"),
                report::name(why)
            );
            let _ = writeln!(
                out,
                "  values that the host computes are assumed to be 0, so sizes that depend on them are too small"
            );
        }
        if let Some(why) = &w.stopped {
            let _ = writeln!(out, "  the later stages are not known: {}", short(why, 200));
        }
        for f in &w.fixed {
            let _ = writeln!(
                out,
                "  input {} determines shapes: the figures are valid for its value only",
                report::name(f)
            );
        }
        let mut rows = vec![
            row(["FLOPs", &si(w.total.flops), ""]),
            row(["bytes moved", &size(w.total.bytes), "each op by itself"]),
            row([
                "intensity",
                &format!("{:.2}", w.total.flops as f64 / w.total.bytes.max(1) as f64),
                "FLOP a byte",
            ]),
        ];
        for b in &self.backends {
            if let Ok(p) = &b.plans
                && p.steps > 0
            {
                let intensity = p.flops as f64 / p.bytes.max(1) as f64;
                let fused = format!("planned on {}, {intensity:.2} FLOP a byte", b.id);
                rows.push(row(["", &size(p.bytes), &fused]));
            }
        }
        *out += &figures(rows, &[1]);
    }

    fn operators_text(&self, out: &mut String) {
        let m = &self.model;
        let _ = writeln!(out, "\noperators: {}", plural(m.operators.len(), "kind"));
        let mut head = row(["operator", "nodes", "FLOPs", "share"]);
        head.extend(self.backends.iter().map(|b| b.id.clone()));
        let mut rows = vec![head];
        for o in self.by_flops() {
            let cost = self.cost(o);
            let total = self.work.as_ref().map_or(0, |w| w.total.flops);
            let mut r = vec![
                op_name(&o.domain, &o.name),
                grouped(o.count as u64),
                cost.map_or(String::new(), |c| if c.flops == 0 { String::new() } else { si(c.flops) }),
                cost.map_or(String::new(), |c| {
                    if c.flops == 0 { String::new() } else { percent(c.flops, total) }
                }),
            ];
            r.extend(self.backends.iter().map(|b| self.support_text(o, b)));
            rows.push(r);
        }
        *out += &figures(rows, &[1, 2, 3]);
        let refused: Vec<(&Operator, &(String, Vec<String>))> =
            m.operators.iter().flat_map(|o| o.refused.iter().map(move |r| (o, r))).collect();
        if !refused.is_empty() {
            *out += "\nnot supported by the importer\n";
            let rows = refused.iter().map(|(o, (why, nodes))| {
                let name = format!("{} (opset {})", op_name(&o.domain, &o.name), o.opset);
                vec![name, why.clone(), some(nodes.iter().map(String::as_str))]
            });
            *out += &table(&rows.collect::<Vec<_>>());
        }
        if let Ok(w) = &self.work
            && !w.host.is_empty()
        {
            *out += "\non the host, between the stages\n";
            let rows = w
                .host
                .iter()
                .map(|(n, times)| vec![owner(&self.model, n).1, n.clone(), plural(*times, "time")]);
            *out += &table(&rows.collect::<Vec<_>>());
        }
    }

    fn backends_text(&self, out: &mut String) {
        *out += "\nbackends\n";
        let mut rows = vec![];
        for b in &self.backends {
            let what = match &b.plans {
                Ok(p) if p.steps == 0 => "nothing to plan".to_string(),
                Ok(p) => format!(
                    "runs it in {}: {} library, {} generated, {} host; scratch {}, weights {}",
                    plural(p.steps, "step"),
                    p.library,
                    p.generated,
                    p.host,
                    size(p.scratch),
                    size(p.weights),
                ),
                Err(all) => format!("cannot run {} of its ops", all.len()),
            };
            rows.push(vec![b.id.clone(), short(&b.name, 40), what]);
        }
        let mut reasons: Vec<(&str, Vec<&str>)> = vec![];
        for (kind, why) in &self.absent {
            match reasons.iter_mut().find(|(r, _)| r == why) {
                Some((_, kinds)) => kinds.push(kind.id()),
                None => reasons.push((why, vec![kind.id()])),
            }
        }
        *out += &table(&rows);
        for (why, kinds) in reasons {
            let _ = writeln!(out, "  not available: {}: {}", kinds.join(", "), short(why, 160));
        }
        for b in &self.backends {
            if let Err(all) = &b.plans {
                let _ = writeln!(out, "\nnot supported on {}", b.id);
                let mut reasons: Vec<(&Key, &str, Vec<&str>)> = vec![];
                for r in all {
                    match reasons.iter_mut().find(|(k, why, _)| **k == r.op && *why == r.reason) {
                        Some((_, _, nodes)) => nodes.push(&r.node),
                        None => reasons.push((&r.op, &r.reason, vec![&r.node])),
                    }
                }
                let rows = reasons.iter().map(|(k, why, nodes)| {
                    vec![op_name(&k.0, &k.1), why.replace('\n', " "), some(nodes.iter().copied())]
                });
                *out += &table(&rows.collect::<Vec<_>>());
            }
        }
    }

    fn cost(&self, o: &Operator) -> Option<Cost> {
        self.work.as_ref().ok()?.by_op.get(&(o.domain.clone(), o.name.clone())).copied()
    }

    /// Operators by their share of the FLOPs, then by their number of uses.
    fn by_flops(&self) -> Vec<&Operator> {
        let mut v: Vec<&Operator> = self.model.operators.iter().collect();
        v.sort_by_key(|o| std::cmp::Reverse((self.cost(o).map_or(0, |c| c.flops), o.count)));
        v
    }

    pub(super) fn json(&self) -> Value {
        let m = &self.model;
        let port = |(n, t): &(String, String)| json!({ "name": n, "type": t });
        let work = self.work.as_ref().ok();
        let operators: Vec<Value> = self
            .by_flops()
            .into_iter()
            .map(|o| {
                let c = self.cost(o).unwrap_or_default();
                let on: BTreeMap<&str, String> = self.backends.iter().map(|b| (b.id.as_str(), self.support_text(o, b))).collect();
                json!({
                    "domain": o.domain, "op": o.name, "opset": o.opset, "nodes": o.count, "function": o.function,
                    "since": o.since, "flops": c.flops, "bytes": c.bytes, "on": on,
                    "refused": o.refused.iter().map(|(why, nodes)| json!({ "reason": why, "nodes": nodes })).collect::<Vec<_>>(),
                })
            })
            .collect();
        let backends: Vec<Value> = self
            .backends
            .iter()
            .map(|b| {
                let mut v = json!({ "backend": b.kind, "id": b.id, "name": b.name, "supported": b.plans.is_ok() });
                match &b.plans {
                    Ok(p) => {
                        v["plan"] = json!({
                            "steps": p.steps, "library": p.library, "generated": p.generated, "host": p.host,
                            "flops": p.flops, "bytes": p.bytes, "scratch_bytes": p.scratch, "weight_bytes": p.weights,
                            "kernels": p.kernels, "warnings": p.warnings,
                        })
                    }
                    Err(all) => {
                        let one = |r: &MissingKernel| json!({ "domain": r.op.0, "op": r.op.1, "node": r.node, "reason": r.reason });
                        v["refused"] = all.iter().map(one).collect();
                    }
                }
                v
            })
            .collect();
        json!({
            "file": report::path(&self.a.file),
            "kind": Kind::Onnx.to_string(),
            "bytes": self.file_bytes,
            "ir_version": m.ir_version,
            "opsets": m.opsets.iter().map(|(d, v)| json!({ "domain": d, "version": v })).collect::<Vec<_>>(),
            "producer": { "name": m.producer, "version": m.producer_version },
            "domain": m.domain,
            "model_version": m.model_version,
            "metadata": m.metadata.iter().cloned().collect::<BTreeMap<_, _>>(),
            "graph": { "name": m.graph_name, "nodes": m.nodes, "functions": m.functions },
            "inputs": m.inputs.iter().map(port).collect::<Vec<_>>(),
            "outputs": m.outputs.iter().map(port).collect::<Vec<_>>(),
            "parameters": by_type_json(&m.weights),
            "work": work.map(|w| json!({
                "inputs": w.inputs.iter().map(port).collect::<Vec<_>>(),
                "fixed": w.fixed,
                "flops": w.total.flops,
                "bytes": w.total.bytes,
                "intensity": w.total.flops as f64 / w.total.bytes.max(1) as f64,
                "stages": w.graphs.len(),
                "staged": w.staged,
                "stopped": w.stopped,
                "host_nodes": w.host.iter().map(|(n, t)| json!({ "node": n, "op": owner(m, n).1, "times": t })).collect::<Vec<_>>(),
                "largest": w.activations.iter().take(self.a.top)
                    .map(|x| json!({ "node": x.node, "op": x.op, "type": x.ty, "bytes": x.bytes })).collect::<Vec<_>>(),
            })),
            "no_work_because": self.work.as_ref().err(),
            "operators": operators,
            "backends": backends,
            "absent": self.absent.iter().map(|(k, why)| json!({ "backend": k, "reason": why })).collect::<Vec<_>>(),
            "largest_weights": largest(&m.weights, self.a.top).into_iter().map(weight_json).collect::<Vec<_>>(),
        })
    }
}

/// The first few names, and the number of the others.
pub(super) fn some<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let all: Vec<&str> = names.collect();
    let first = all.iter().take(3).map(|n| short(n, 40)).collect::<Vec<_>>().join(", ");
    if all.len() > 3 { format!("{first} and {} more", all.len() - 3) } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_line_up() {
        assert_eq!(
            (grouped(6090), grouped(1_234_567), grouped(12)),
            ("6,090".into(), "1,234,567".into(), "12".into())
        );
        assert_eq!(
            [si(999), si(1500), si(25_300_000), si(123_456_000_000)],
            ["999", "1.50 k", "25.3 M", "123 G"]
        );
        assert_eq!(percent(1, 8), "12.5 %");
        let t = figures(vec![row(["a", "10", "x"]), row(["bb", "9", "y"])], &[1]);
        assert_eq!(t, "  a   10  x\n  bb   9  y\n");
        assert_eq!(short("one\ntwo three", 7), "one two…");
    }
}
