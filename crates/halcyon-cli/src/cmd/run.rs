//! `halcyon run`: a model once or often, with a report.

use super::verify::{self, Verified};
use super::{Loaded, backend_json, backend_text, load, split, tags_json, tags_text};
use crate::args::RunArgs;
use crate::report::{self, Progress, ms, number, size, spread, summary, table, time};
use halcyon::ir::host::{AnonymousPeak, Watch};
use halcyon::ir::plan::{Plan, Receipt};
use halcyon::onnx::Run;
use halcyon::split::Split;
use halcyon::{Backend, ConstData, Counters, Error, Level, MemoryStats, Result, Session};
use halcyon_formats::onnx::{Datum, Keys, Text};
use halcyon_formats::{data, npy};
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Rows of an output that `--top-k` prints; JSON has all of them.
const ROWS: usize = 8;
/// How often the memory is read until the first run has ended. The later ones use what it took.
const WATCH: Duration = Duration::from_millis(5);
/// Pairs of bursts that a receipt's gain is the median of.
const RECEIPT_RUNS: usize = 7;

pub fn main(a: &RunArgs) -> Result<u8> {
    let labels = a.labels.as_deref().map(read_labels).transpose()?;
    let watch = Watch::start(WATCH);
    let look = || watch.as_ref().inspect(|w| w.read());
    split::check(&a.split)?;
    let spec = verify::spec(a)?;
    let mut loaded = load(&a.model, &a.input, &split::first(&a.split, &a.backend)?, false, false)?;
    let inputs = loaded.data();

    let start = Instant::now();
    let over = match a.split.split.is_some() || a.split.may_leave.is_some() {
        true => {
            let graph = loaded.bound("a split over devices")?;
            Some(split::split(&a.split, &a.backend, &loaded.backend, &graph)?)
        }
        false => None,
    };
    let exe = match &over {
        Some(_) => None,
        None => {
            let first = loaded.session.prepare(&inputs);
            let made = first.or_else(|e| {
                loaded.on_another(&a.model, &a.backend, e)?;
                loaded.session.prepare(&inputs)
            });
            made.inspect_err(|e| verify::keep(a, &loaded, &inputs, e))?
        }
    };
    let check = spec.map(|s| verify::options(a, s, &loaded)).transpose()?;
    let compile = start.elapsed();
    look();

    let counted = |s: &Split| -> Vec<Counters> { s.backends().iter().map(Backend::counters).collect() };
    let before = over.as_ref().map(counted).unwrap_or_default();
    let mut times = Vec::with_capacity(a.repeat as usize);
    let mut last = None;
    let mut progress = Progress::new("run", a.repeat.into());
    for _ in 0..a.repeat {
        // Results of one run at a time.
        drop(last.take());
        let start = Instant::now();
        last = Some(match &over {
            Some(s) => run_split(s, &inputs)?,
            None => loaded.session.run(&inputs).inspect_err(|e| verify::keep(a, &loaded, &inputs, e))?,
        });
        times.push(start.elapsed());
        if let Some(w) = look() {
            w.stop();
        }
        progress.step();
    }
    progress.finish();
    let (memory, anonymous) = (loaded.backend.memory(), watch.as_ref().map(Watch::peak));
    let verified = match &check {
        Some(o) => Some(verify::run(a, o, &loaded, &inputs)?),
        None => None,
    };
    let last = last.ok_or_else(|| Error::argument("--repeat", "at least one run is needed"))?;
    let outputs: Vec<(String, Leaf<'_>)> =
        loaded.outputs.iter().zip(&last.outputs).flat_map(|(n, d)| leaves(n, d)).collect();

    let plan = exe.as_ref().map(|e| e.plan());
    let receipts =
        if a.receipts {
            report::note("measuring receipts: every transformation with and without, and level O0");
            let graph = loaded.graph("receipts")?.graph.clone();
            let tensors: Vec<ConstData> = inputs.iter().filter_map(|d| d.tensor().cloned()).collect();
            Session::new(&loaded.backend, graph).measure_receipts(&tensors, RECEIPT_RUNS, |without| {
                match without {
                    None => a.backend.open_at(Level::O0, None, false),
                    name => a.backend.open_at(a.backend.level()?, name, false),
                }
            })?
        } else {
            plan.map_or(vec![], |p| p.receipts.clone())
        };
    let files = match &a.output_dir {
        Some(dir) => save(dir, &outputs)?,
        None => vec![],
    };
    let top = match a.top_k {
        Some(k) => Some(top_k(k, &outputs, labels.as_deref())?),
        None => None,
    };
    let done = Done {
        a,
        loaded: &loaded,
        split: over.as_ref().map(|s| (s, before.into_iter().zip(counted(s)).collect())),
        plan,
        run: &last,
        verified: verified.as_ref(),
        outputs: &outputs,
        receipts: &receipts,
        times,
        compile,
        files,
        top,
        memory,
        anonymous,
    };
    if a.json {
        report::print_json(&done.json())?
    } else {
        report::print(&done.text())?
    }
    Ok(verified.map_or(0, |v| v.code()))
}

/// A run over more than one device.
fn run_split(s: &Split, inputs: &[Datum]) -> Result<Run> {
    let tensors: Vec<ConstData> = inputs.iter().filter_map(|d| d.tensor().cloned()).collect();
    let outputs = s.run(&tensors, &[])?;
    Ok(Run {
        outputs: outputs.into_iter().map(Datum::Tensor).collect(),
        placement: Default::default(),
        staged: None,
    })
}

/// Everything a run has to tell.
struct Done<'a> {
    a: &'a RunArgs,
    loaded: &'a Loaded,
    /// Of a model over more than one device, with what each had counted before the runs and after.
    split: Option<(&'a Split, Vec<(Counters, Counters)>)>,
    /// Of a model that is one graph.
    plan: Option<&'a Plan>,
    run: &'a Run,
    verified: Option<&'a Verified>,
    outputs: &'a [(String, Leaf<'a>)],
    receipts: &'a [Receipt],
    times: Vec<Duration>,
    compile: Duration,
    files: Vec<PathBuf>,
    top: Option<Top>,
    memory: MemoryStats,
    /// Of the process, where the system tells.
    anonymous: Option<AnonymousPeak>,
}

impl Done<'_> {
    fn text(&self) -> String {
        let mut out = String::new();
        let l = self.loaded;
        // Writing to a string does not fail.
        let _ = writeln!(out, "model    {}", self.a.model.display());
        match &self.split {
            Some((s, _)) => s.backends().iter().for_each(|b| out += &backend_text(b)),
            None => out += &backend_text(&l.backend),
        }
        let _ = writeln!(out, "level    {}", super::level_text(&l.backend));
        out += &l.input_text();
        if let Some(top) = &self.top {
            out += &top.text();
        }
        for (name, x) in self.outputs {
            let _ = match x {
                Leaf::Tensor(x) => {
                    writeln!(
                        out,
                        "output   {name} {}{:?}  {}",
                        x.dtype,
                        x.dims.as_slice(),
                        summary(x).text(x)
                    )
                }
                Leaf::Text(t) => writeln!(out, "output   {name} string{:?}  {}", t.dims, texts(t)),
                Leaf::Keys(k) => writeln!(out, "output   {name} {}", key_list(k)),
                Leaf::None => writeln!(out, "output   {name} is empty"),
            };
        }
        out += &self.placement();
        if let Some((s, _)) = &self.split {
            out += &split::text(s.placement());
        }
        for f in &self.files {
            let _ = writeln!(out, "saved    {}", f.display());
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
            self.anonymous.map_or(String::new(), |p| format!("anonymous at most {}, ", size(p.bytes)));
        let _ = writeln!(
            out,
            "memory   {anonymous}{}device buffers at most {} ({})",
            report::peak_memory()
                .map_or(String::new(), |b| format!("with the pages of files at most {}, ", size(b))),
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
        for w in self.plan.iter().flat_map(|p| &p.warnings) {
            let _ = writeln!(out, "warning  {w}");
        }
        out
    }

    /// What ran elsewhere than on the device, for models that run in stages.
    fn placement(&self) -> String {
        let (p, mut out) = (&self.run.placement, String::new());
        let Some(why) = &self.run.staged else {
            return out;
        };
        let _ = writeln!(
            out,
            "placement {} stage{} on {} ({} to the device, {} back), since the model is no single graph: {why}",
            p.stages,
            if p.stages == 1 { "" } else { "s" },
            self.loaded.backend.id(),
            size(p.bytes_written),
            size(p.bytes_read),
        );
        for (node, count) in &p.host_nodes {
            let _ = writeln!(out, "         on the host: {node} ({count} times)");
        }
        for r in p.reads.iter().take(ROWS) {
            let _ = writeln!(out, "         read back for {}: {} ({})", r.node, r.what, size(r.bytes));
        }
        if p.reads.len() > ROWS {
            let _ = writeln!(out, "         and {} more reads (--json has them)", p.reads.len() - ROWS);
        }
        out
    }

    fn json(&self) -> Value {
        let l = self.loaded;
        let outputs: Vec<Value> = self
            .outputs
            .iter()
            .enumerate()
            .map(|(i, (name, x))| {
                let mut v = match x {
                    Leaf::Tensor(x) => {
                        json!({ "name": name, "dtype": x.dtype, "shape": x.dims.as_slice(), "summary": summary(x).json(x) })
                    }
                    Leaf::Text(t) => {
                        json!({ "name": name, "dtype": "string", "shape": t.dims, "values": t.vals })
                    }
                    Leaf::Keys(k) => {
                        json!({ "name": name, "dtype": key_type(k), "shape": [key_json(k).len()], "values": key_json(k) })
                    }
                    Leaf::None => json!({ "name": name, "dtype": null }),
                };
                if let Some(f) = self.files.get(i) {
                    v["file"] = json!(f);
                }
                v
            })
            .collect();
        let (median, min, max) = spread(&self.times);
        json!({
            "model": self.a.model,
            "backend": backend_json(&l.backend),
            "inputs": l.input_json(),
            "outputs": outputs,
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
            "warnings": self.plan.map_or(&[][..], |p| &p.warnings),
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

fn memory_json(m: &MemoryStats) -> Value {
    json!({
        "allocated": m.allocated, "peak": m.peak, "cached": m.cached, "limit": m.limit,
        "reserved": m.reserved, "peak_reserved": m.peak_reserved, "largest_free": m.largest_free,
        "fragmentation": m.fragmentation(), "moved_bytes": m.moved_bytes, "pinned": m.pinned,
        "by_tag": tags_json(&m.by_tag), "peak_by_tag": tags_json(&m.peak_by_tag),
    })
}

/// Receipts as a table. What was not measured is left out.
pub fn receipts_text(receipts: &[Receipt]) -> String {
    if receipts.is_empty() {
        return "  no transformation applied\n".into();
    }
    let mut rows =
        vec![vec!["transformation".to_string(), "applied".into(), "gain".into(), "error against O0".into()]];
    rows.extend(receipts.iter().map(|r| {
        vec![
            r.transformation.clone(),
            match r.bytes {
                Some(b) => format!("{} ({} less of constants)", r.count, report::size(b)),
                None => r.count.to_string(),
            },
            r.gain.map_or("not measured".into(), |g| format!("{g:.2}x")),
            r.error.map_or("not measured".into(), |e| format!("{e:.2e}")),
        ]
    }));
    table(&rows)
}

/// A tensor of an output, which may be a sequence of them.
#[derive(Clone, Copy, Debug)]
enum Leaf<'a> {
    Tensor(&'a ConstData),
    Text(&'a Text),
    /// The keys of a map.
    Keys(&'a Keys),
    /// An optional without a value.
    None,
}

/// The tensors of an output with their names: `out`, `out.0`, `out.1`.
fn leaves<'a>(name: &str, d: &'a Datum) -> Vec<(String, Leaf<'a>)> {
    match d {
        Datum::Tensor(t) => vec![(name.into(), Leaf::Tensor(t))],
        Datum::Text(t) => vec![(name.into(), Leaf::Text(t))],
        Datum::Sequence(s) => {
            s.iter().enumerate().flat_map(|(i, d)| leaves(&format!("{name}.{i}"), d)).collect()
        }
        Datum::Optional(None) => vec![(name.into(), Leaf::None)],
        Datum::Optional(Some(d)) => leaves(name, d),
        Datum::Map(keys, d) => {
            let mut all = vec![(format!("{name}.keys"), Leaf::Keys(keys))];
            all.extend(leaves(&format!("{name}.values"), d));
            all
        }
    }
}

fn key_type(k: &Keys) -> &'static str {
    if matches!(k, Keys::Ints(_)) { "i64" } else { "string" }
}

fn key_json(k: &Keys) -> Vec<Value> {
    match k {
        Keys::Ints(k) => k.iter().map(|k| json!(k)).collect(),
        Keys::Texts(k) => k.iter().map(|k| json!(k)).collect(),
    }
}

/// The first keys of a map.
fn key_list(k: &Keys) -> String {
    let all = key_json(k);
    let first: Vec<String> = all.iter().take(ROWS).map(Value::to_string).collect();
    format!(
        "{}[{}]  {}{}",
        key_type(k),
        all.len(),
        first.join(", "),
        if all.len() > ROWS { ", …" } else { "" }
    )
}

/// The first strings of a tensor.
fn texts(t: &Text) -> String {
    let first: Vec<String> = t.vals.iter().take(ROWS).map(|s| format!("{s:?}")).collect();
    let rest = if t.vals.len() > ROWS { ", …" } else { "" };
    format!("{}{rest}", first.join(", "))
}

/// File of an output: its name with what a file name may not hold replaced.
fn file_name(output: &str, extension: &str) -> String {
    let keep = |c: char| c.is_alphanumeric() || "._-".contains(c);
    output.chars().map(|c| if keep(c) { c } else { '_' }).collect::<String>() + extension
}

fn save(dir: &Path, outputs: &[(String, Leaf<'_>)]) -> Result<Vec<PathBuf>> {
    let io = |e: std::io::Error| Error::Io { path: dir.display().to_string(), what: e.to_string() };
    std::fs::create_dir_all(dir).map_err(io)?;
    let mut files: Vec<PathBuf> = vec![];
    for (name, x) in outputs {
        let path = dir.join(file_name(name, if matches!(x, Leaf::Tensor(_)) { ".npy" } else { ".json" }));
        if files.contains(&path) {
            return Err(Error::unsupported(
                format!("two outputs would be saved as {}", path.display()),
                "Rename one of them in the model",
            ));
        }
        match x {
            Leaf::Tensor(x) => {
                let to = npy::stand_in(x.dtype);
                if to != x.dtype {
                    report::note(&format!(
                        "warning: NumPy has no {}; {} holds the same values as {to}",
                        x.dtype,
                        path.display()
                    ));
                }
                npy::write(&path, &data::cast(x, to)?)?
            }
            Leaf::Text(t) => {
                std::fs::write(&path, json!({ "shape": t.dims, "values": t.vals }).to_string()).map_err(io)?
            }
            Leaf::Keys(k) => {
                let v = json!({ "shape": [key_json(k).len()], "values": key_json(k) });
                std::fs::write(&path, v.to_string()).map_err(io)?
            }
            Leaf::None => std::fs::write(&path, "null").map_err(io)?,
        }
        files.push(path);
    }
    Ok(files)
}

fn read_labels(path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Error::Io { path: path.display().to_string(), what: e.to_string() })?;
    Ok(text.lines().map(|l| l.trim().to_string()).collect())
}

/// What the values of a row are taken for.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    Probabilities,
    LogProbabilities,
    Other,
}

#[derive(Debug)]
struct Entry {
    index: usize,
    label: Option<String>,
    value: f64,
    /// Of 1.
    share: f64,
}

/// The largest values of every row of an output.
#[derive(Debug)]
struct Top {
    output: String,
    rows: Vec<(Scores, Vec<Entry>)>,
}

/// Takes the last axis of the first output as classes.
fn top_k(k: usize, outputs: &[(String, Leaf<'_>)], labels: Option<&[String]>) -> Result<Top> {
    let Some((name, Leaf::Tensor(x))) = outputs.first() else {
        return Err(Error::argument("--top-k", "the model's first output is no tensor of numbers"));
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
            // NaN comes last, and equal values stay in order.
            order.sort_by(|&i, &j| {
                let key = |v: f64| if v.is_nan() { f64::NEG_INFINITY } else { v };
                key(row[j]).total_cmp(&key(row[i]))
            });
            let label = |i: usize| labels.and_then(|l| l.get(i)).cloned();
            let top = order
                .into_iter()
                .take(k)
                .map(|i| Entry { index: i, label: label(i), value: row[i], share: shares[i] })
                .collect();
            (kind, top)
        })
        .collect();
    Ok(Top { output: name.clone(), rows })
}

/// The share of each class: the value itself where the row is a distribution, its exponential where it is the logarithm of
/// one, else the softmax.
fn shares(row: &[f64]) -> (Scores, Vec<f64>) {
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

impl Top {
    fn text(&self) -> String {
        let mut out = String::new();
        for (i, (kind, top)) in self.rows.iter().take(ROWS).enumerate() {
            let column = match kind {
                Scores::Probabilities => "probability",
                Scores::LogProbabilities => "probability (exp)",
                Scores::Other => "softmax",
            };
            let _ = match self.rows.len() {
                1 => writeln!(out, "top {} of {}", top.len(), self.output),
                n => writeln!(out, "top {} of {}, row {i} of {n}", top.len(), self.output),
            };
            let mut rows = vec![vec!["rank".into(), "class".into(), column.to_string(), "value".into()]];
            rows.extend(top.iter().enumerate().map(|(rank, e)| {
                vec![
                    format!("{}.", rank + 1),
                    e.label.as_ref().map_or(e.index.to_string(), |l| format!("{l} ({})", e.index)),
                    format!("{:.2} %", e.share * 100.0),
                    number(e.value),
                ]
            }));
            out += &table(&rows);
        }
        if self.rows.len() > ROWS {
            let _ = writeln!(out, "  and {} more rows (--json has them)", self.rows.len() - ROWS);
        }
        out
    }

    fn json(&self) -> Value {
        let entry =
            |e: &Entry| json!({ "index": e.index, "label": e.label, "value": e.value, "share": e.share });
        let rows: Vec<Value> = self.rows.iter().map(|(_, r)| r.iter().map(entry).collect()).collect();
        let kinds: Vec<&str> = self
            .rows
            .iter()
            .map(|(k, _)| match k {
                Scores::Probabilities => "probabilities",
                Scores::LogProbabilities => "log-probabilities",
                Scores::Other => "softmax",
            })
            .collect();
        json!({ "output": self.output, "share_is": kinds, "rows": rows })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_names_hold_nothing_odd() {
        assert_eq!(file_name("a/b:c.1-x_y é", ".npy"), "a_b_c.1-x_y_é.npy");
        assert_eq!(file_name("..", ".npy"), "...npy");
    }

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
}
