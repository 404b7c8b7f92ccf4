//! The full reports of a run: for `-v` and for `--json`.

use super::answer::{self, ROWS, Top};
use super::leaf::{Leaf, LeafJson};
use crate::args::{Print, RunArgs};
use crate::cmd::verify::Verified;
use crate::cmd::{Loaded, backend_json, backend_text, split, tags_json, tags_text};
use crate::report::{self, ms, size, spread, summary, table, time};
use halcyon::host::AnonymousPeak;
use halcyon::ir::plan::{Plan, Receipt};
use halcyon::onnx::Run;
use halcyon::quantize::QuantizeReport;
use halcyon::split::Split;
use halcyon::{Counters, MemoryStats};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::time::Duration;

/// Everything that a run reports.
pub(super) struct RunReport<'a> {
    pub a: &'a RunArgs,
    pub loaded: &'a Loaded,
    /// For a model split over several devices, with each device's counters before and after the runs.
    pub split: Option<(&'a Split, Vec<(Counters, Counters)>)>,
    /// `None` for a model that runs in stages or is split over devices.
    pub plan: Option<&'a Plan>,
    pub run: &'a Run,
    pub verified: Option<&'a Verified>,
    pub outputs: &'a [(String, Leaf<'a>)],
    pub receipts: &'a [Receipt],
    /// The report of the quantisation at level O3.
    pub quantized: Option<&'a QuantizeReport>,
    pub times: Vec<Duration>,
    pub compile: Duration,
    /// Files in --output-dir, one for each output.
    pub files: Vec<PathBuf>,
    /// Files of --output.
    pub written: Vec<PathBuf>,
    pub top: Option<Top>,
    pub memory: MemoryStats,
    /// The peak of the process's anonymous memory, if the system reports it.
    pub anonymous: Option<AnonymousPeak>,
}

impl RunReport<'_> {
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let l = self.loaded;
        // Writing to a string cannot fail.
        let _ = writeln!(out, "model    {}", report::path_text(&self.a.model));
        match &self.split {
            Some((s, _)) => s.backends().iter().for_each(|b| out += &backend_text(b)),
            None => out += &backend_text(&l.backend),
        }
        let _ = writeln!(out, "level    {}", crate::cmd::level_text(&l.backend));
        out += &l.input_text();
        if let Some(top) = &self.top {
            out += &top.text();
        }
        for (name, x) in self.outputs {
            match x {
                _ if self.a.print == Some(Print::All) => {
                    out += &format!("output   {}", answer::show(name, x, true))
                }
                Leaf::Tensor(x) => {
                    let name = report::name(name);
                    let (dims, text) = (x.dims.as_slice(), summary(x).text(x));
                    let _ = writeln!(out, "output   {name} {}{dims:?}  {text}", x.dtype);
                }
                other => out += &format!("output   {}", answer::show(name, other, false)),
            }
        }
        out += &self.placement();
        if let Some((s, _)) = &self.split {
            out += &split::text(s.placement());
        }
        for f in self.files.iter().chain(&self.written) {
            let _ = writeln!(out, "saved    {}", report::path_text(f));
        }
        let _ = writeln!(
            out,
            "times    load {}, open device {}, read inputs {}, compile {}",
            time(l.times.load),
            time(l.times.open),
            time(l.times.inputs),
            time(self.compile)
        );
        let (median, min, max) = spread(&self.times);
        match self.times.len() {
            1 => {
                let _ = writeln!(out, "run      {} (inputs and outputs copied)", time(median));
            }
            n => {
                let _ = writeln!(
                    out,
                    "run      median {}, min {}, max {} of {n}; the first {} (inputs and outputs copied)",
                    time(median),
                    time(min),
                    time(max),
                    time(self.times[0])
                );
            }
        }
        let anonymous =
            self.anonymous.map_or(String::new(), |p| format!("anonymous memory at most {}, ", size(p.bytes)));
        let _ = writeln!(
            out,
            "memory   {anonymous}{}device buffers at most {} ({})",
            report::peak_memory().map_or(String::new(), |b| format!("with file pages at most {}, ", size(b))),
            size(self.memory.peak),
            tags_text(&self.memory.peak_by_tag),
        );
        if let Some(v) = self.verified {
            out += &v.text();
        }
        if self.a.receipts {
            out += "receipts\n";
            out += &receipts_text(self.receipts);
        }
        for w in self.warnings() {
            let _ = writeln!(out, "warning  {}", report::name(w));
        }
        out
    }

    /// Warnings of the plan, or, for a model that runs in stages, of the stages.
    pub(super) fn warnings(&self) -> impl Iterator<Item = &String> {
        self.plan.iter().flat_map(|p| &p.warnings).chain(&self.run.placement.warnings)
    }

    /// For a model that runs in stages: the stages, the loops, the nodes that ran on the host and the values
    /// that were read back.
    fn placement(&self) -> String {
        let (p, mut out) = (&self.run.placement, String::new());
        let Some(why) = &self.run.staged else {
            return out;
        };
        let _ = writeln!(
            out,
            "placement {} stage{} on {} ({} to the device, {} back), since the model is not a single graph: {}",
            p.stages,
            if p.stages == 1 { "" } else { "s" },
            self.loaded.backend.id(),
            size(p.bytes_written),
            size(p.bytes_read),
            report::name(why),
        );
        for l in &p.loops {
            let bodies = match l.bodies {
                1 => "compiled once".to_string(),
                n => format!("compiled for {n} sets of shapes"),
            };
            let _ = writeln!(
                out,
                "         {}: {} iterations, its body {bodies}",
                report::name(&l.node),
                l.iterations
            );
        }
        for (node, count) in &p.host_nodes {
            let _ = writeln!(out, "         on the host: {} ({count} times)", report::name(node));
        }
        for r in p.reads.iter().take(ROWS) {
            let _ = writeln!(
                out,
                "         read back for {}: {} ({})",
                report::name(&r.node),
                report::name(&r.what),
                size(r.bytes)
            );
        }
        if p.reads.len() > ROWS {
            let _ = writeln!(out, "         and {} more reads (--json has them)", p.reads.len() - ROWS);
        }
        out
    }

    /// The JSON object without the outputs, which are serialised while being written.
    fn head(&self) -> Value {
        let l = self.loaded;
        let (median, min, max) = spread(&self.times);
        json!({
            "model": report::path(&self.a.model),
            "runtime": super::engine::halcyon_json(),
            "backend": backend_json(&l.backend),
            "inputs": l.input_json(),
            "written": super::paths(&self.written),
            "top_k": self.top.as_ref().map(Top::json),
            "times_ms": {
                "load": ms(l.times.load),
                "open_device": ms(l.times.open),
                "read_inputs": ms(l.times.inputs),
                "compile": ms(self.compile),
                "run": {
                    "first": ms(self.times[0]), "median": ms(median), "min": ms(min), "max": ms(max), "runs": self.times.len(),
                },
            },
            "memory": {
                "process_peak_bytes": report::peak_memory(),
                "peak_anonymous": self.anonymous.map(|p| p.bytes),
                "anonymous_readings": self.anonymous.map(|p| p.readings),
                "device": memory_json(&self.memory),
            },
            "counters": l.backend.counters(),
            "caches": l.backend.cache_stats(),
            "receipts": self.receipts,
            "quantisation": self.quantized,
            "warnings": self.warnings().collect::<Vec<_>>(),
            "verify": self.verified.map(Verified::json),
            "staged": self.run.staged,
            "placement": self.run.placement,
            "split": self.split.as_ref().map(|(s, counted)| json!({
                "placement": s.placement(),
                "devices": s.backends().iter().zip(counted).map(|(b, (was, now))| json!({
                    "backend": backend_json(b), "counters": now, "memory": memory_json(&b.memory()),
                    "runs_uploaded": now.uploaded_bytes - was.uploaded_bytes,
                    "runs_downloaded": now.downloaded_bytes - was.downloaded_bytes,
                })).collect::<Vec<_>>(),
            })),
        })
    }
}

impl Serialize for RunReport<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let mut m = s.serialize_map(None)?;
        if let Value::Object(head) = self.head() {
            for (k, v) in &head {
                m.serialize_entry(k, v)?;
            }
        }
        let outputs: Vec<LeafJson<'_>> = self
            .outputs
            .iter()
            .enumerate()
            .map(|(i, (name, leaf))| {
                let file = self.files.get(i).map(|f| ("file".to_string(), report::path(f)));
                LeafJson { name, leaf: *leaf, summary: true, more: file.into_iter().collect() }
            })
            .collect();
        m.serialize_entry("outputs", &outputs)?;
        m.end()
    }
}

pub(crate) fn memory_json(m: &MemoryStats) -> Value {
    json!({
        "allocated": m.allocated, "peak": m.peak, "cached": m.cached, "limit": m.limit,
        "reserved": m.reserved, "peak_reserved": m.peak_reserved, "largest_free": m.largest_free,
        "fragmentation": m.fragmentation(), "moved_bytes": m.moved_bytes, "pinned": m.pinned,
        "by_tag": tags_json(&m.by_tag), "peak_by_tag": tags_json(&m.peak_by_tag),
    })
}

/// Receipts as a table. A gain or an error without a measurement is shown as "not measured".
pub(crate) fn receipts_text(receipts: &[Receipt]) -> String {
    if receipts.is_empty() {
        return "  no transformation applied\n".into();
    }
    let mut rows =
        vec![vec!["transformation".to_string(), "applied".into(), "gain".into(), "error against O0".into()]];
    rows.extend(receipts.iter().map(|r| {
        vec![
            r.transformation.clone(),
            match r.bytes {
                Some(b) => format!("{} (constants {} smaller)", r.count, report::size(b)),
                None => r.count.to_string(),
            },
            r.gain.map_or("not measured".into(), |g| format!("{g:.2}x")),
            r.error.map_or("not measured".into(), |e| format!("{e:.2e}")),
        ]
    }));
    table(&rows)
}
