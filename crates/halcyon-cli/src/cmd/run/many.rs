//! Runs a model on many inputs: the images of a folder, or lines of text. Each input gives a row of results.

use super::answer::{self, Top};
use super::engine::Engine;
use super::leaf::{Leaf, LeafJson, leaves};
use super::output::{self, OutputData, Table, Target};
use super::{CLASSES_PRINTED, Job, paths};
use crate::args::{InputArgs, Print, RunArgs};
use crate::json;
use crate::report::{self, Progress, ms, table, time};
use crate::rows::Rows;
use crate::source::{self, Input};
use crate::text::Encoder;
use halcyon::{ConstData, Dim, Error, Result};
use halcyon_formats::data;
use halcyon_formats::onnx::{Datum, Port, PortType};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Lines of text per run without --batch.
const LINES: usize = 32;
/// Limit on the failures that are listed individually.
const MAX_LISTED: usize = 20;

/// The results for one input.
struct Row {
    /// The file or the line of text.
    key: String,
    outputs: Result<Vec<(String, Datum)>>,
}

impl Row {
    fn leaves(&self) -> Option<Vec<(String, Leaf<'_>)>> {
        let outputs = self.outputs.as_ref().ok()?;
        Some(outputs.iter().flat_map(|(n, d)| leaves(n, d)).collect())
    }
}

/// How many rows one run takes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Batch {
    One,
    /// As many as there are, up to this number.
    UpTo(usize),
    /// Always this many: a run with fewer rows is padded.
    Exactly(usize),
}

impl Batch {
    fn most(self) -> usize {
        match self {
            Batch::One => 1,
            Batch::UpTo(n) | Batch::Exactly(n) => n,
        }
    }
}

pub(super) fn main(mut job: Job<'_>, rows: Rows, rest: InputArgs) -> Result<u8> {
    let a = job.a;
    reject_options(a)?;
    let targets = std::mem::take(&mut job.targets);
    let labels = job.labels.take();
    let top_k = a.top_k.or(labels.as_ref().map(|_| CLASSES_PRINTED.1));
    let what = match &rows {
        Rows::Files { .. } => "file",
        Rows::Lines { .. } => "text",
    };
    let mut runs = Runs::new(job, rest, &rows)?;
    match rows {
        Rows::Files { port, files } => runs.files(port, &files)?,
        Rows::Lines { port, lines } => runs.lines(port, lines)?,
    }
    let tops = runs.rows.iter().map(|r| match (top_k, r.leaves()) {
        (Some(k), Some(l)) => answer::top_k(k, &l, labels.as_deref()).map(Some),
        _ => Ok(None),
    });
    let tops = tops.collect::<Result<Vec<Option<Top>>>>()?;
    let done = Report { a, what, labels: labels.is_some(), runs: &runs, tops };
    let stacked = match a.output_dir.is_some() || targets.iter().any(Target::takes_tensors) {
        true => done.stacked()?,
        false => vec![],
    };
    let outputs: Vec<(String, Leaf<'_>)> = stacked.iter().flat_map(|(n, d)| leaves(n, d)).collect();
    let mut files = match &a.output_dir {
        Some(dir) => output::save(dir, &outputs)?,
        None => vec![],
    };
    let table = |name: Option<&str>| done.table(name).map(Some);
    let document = done.document(None);
    files.extend(output::write(
        &targets,
        &OutputData { outputs: &outputs, table: &table, rows: Some(&document) },
    )?);
    let failed = runs.rows.iter().filter_map(|r| Some((&r.key, r.outputs.as_ref().err()?)));
    for (n, (key, e)) in failed.clone().enumerate() {
        if n == MAX_LISTED {
            report::fault(&format!(
                "{} more {what}s failed; --json has the reasons",
                failed.count() - MAX_LISTED
            ));
            break;
        }
        report::fault(&with_name(key, e));
    }
    if a.json {
        let document = done.document(Some(&files));
        json::print(&document)?;
    } else {
        let text = done.text(&files);
        match targets.iter().any(Target::is_stdout) {
            true => report::note(text.trim_end()),
            false => report::print(&text)?,
        }
        super::warnings(runs.warnings.iter());
        done.odd_values();
    }
    Ok(u8::from(runs.rows.iter().any(|r| r.outputs.is_err())))
}

/// The message of an error about a file, with the file's name exactly once.
fn with_name(key: &str, e: &Error) -> String {
    let text = report::message(e);
    if text.contains(key) { text } else { format!("{}: {text}", report::short(key, 80)) }
}

/// Rejects options that have no meaning for many inputs.
fn reject_options(a: &RunArgs) -> Result<()> {
    let given = [
        ("--split", a.split.split.is_some()),
        ("--may-leave", a.split.may_leave.is_some()),
        ("--receipts", a.receipts),
        ("--verify", a.verify.is_some()),
        ("--save-replay", a.save_replay.is_some()),
        ("--repeat", a.repeat > 1),
    ];
    match given.iter().find(|(_, is)| *is) {
        Some((name, _)) => Err(Error::argument(*name, "this option takes one input; several are given")),
        None => Ok(()),
    }
}

/// The runs and their results.
struct Runs<'a> {
    a: &'a RunArgs,
    rest: InputArgs,
    ports: Vec<Port>,
    /// Names of the model's outputs.
    outputs: Vec<String>,
    engine: Engine,
    batch: Batch,
    rows: Vec<Row>,
    /// Total time of the runs, and their number.
    time: Duration,
    count: usize,
    compile: Duration,
    warnings: Vec<String>,
}

impl<'a> Runs<'a> {
    fn new(job: Job<'a>, rest: InputArgs, rows: &Rows) -> Result<Runs<'a>> {
        let a = job.a;
        let (engine, ports, outputs) = Engine::open(job)?;
        let batch = match rows {
            Rows::Files { port, .. } => batch(&ports[*port], a.batch, 1, 4),
            // Set later, when the inputs of the text are known.
            Rows::Lines { .. } => Batch::One,
        };
        Ok(Runs {
            a,
            rest,
            ports,
            outputs,
            engine,
            batch,
            rows: vec![],
            time: Duration::ZERO,
            count: 0,
            compile: Duration::ZERO,
            warnings: vec![],
        })
    }

    fn files(&mut self, port: usize, files: &[PathBuf]) -> Result<()> {
        // Each image is one element of the model's batch.
        let mut single = self.ports[port].clone();
        if let (Batch::Exactly(_), PortType::Tensor { shape: Some(s), .. }) = (self.batch, &mut single.ty) {
            let dims: Vec<Dim> = std::iter::once(Dim::from(1)).chain(s.iter().copied().skip(1)).collect();
            *s = dims.into_iter().collect();
        }
        let mut progress = Progress::bar("pictures", files.len() as u64);
        let mut waiting: Vec<(usize, ConstData)> = vec![];
        for (i, file) in files.iter().enumerate() {
            self.rows.push(Row { key: file.display().to_string(), outputs: Ok(vec![]) });
            let start = Instant::now();
            let read = source::named_file(&single, file, &self.rest).and_then(|x| {
                x.data.tensor().cloned().ok_or_else(|| {
                    Error::unsupported("one of several inputs that is not a tensor", "Run it by itself")
                })
            });
            self.engine.read_inputs(start.elapsed());
            match read {
                Err(e) => self.rows[i].outputs = Err(e),
                Ok(x) => {
                    if waiting
                        .first()
                        .is_some_and(|(_, first)| first.dims != x.dims || first.dtype != x.dtype)
                    {
                        self.tensors(port, std::mem::take(&mut waiting))?;
                    }
                    waiting.push((i, x));
                    if waiting.len() == self.batch.most() {
                        self.tensors(port, std::mem::take(&mut waiting))?;
                    }
                }
            }
            progress.step();
        }
        if !waiting.is_empty() {
            self.tensors(port, waiting)?;
        }
        progress.finish();
        Ok(())
    }

    /// Runs one batch of tensors for an input.
    fn tensors(&mut self, port: usize, mut parts: Vec<(usize, ConstData)>) -> Result<()> {
        let rows: Vec<usize> = parts.iter().map(|(i, _)| *i).collect();
        if let Batch::Exactly(n) = self.batch
            && let Some((_, last)) = parts.last().cloned()
        {
            parts.resize(n, (usize::MAX, last));
        }
        let x = match &parts[..] {
            [(_, one)] => one.clone(),
            all => concat_rows(&all.iter().map(|(_, x)| x).collect::<Vec<_>>())?,
        };
        let total = parts.len();
        let name = self.ports[port].name.clone();
        let given = vec![(port, Input { name, source: format!("{} files", rows.len()), data: x.into() })];
        let inputs = source::resolve_with(&self.ports, &self.rest, given, false)?;
        match self.run(inputs, &rows, total) {
            Err(e) if about_inputs(&e) => {
                // Run each row by itself, to find which one fails. With a fixed batch size, all rows count as
                // failed.
                match rows.len() {
                    1 => self.rows[rows[0]].outputs = Err(e),
                    _ if matches!(self.batch, Batch::Exactly(_)) => {
                        rows.iter().for_each(|i| self.rows[*i].outputs = Err(e.clone()))
                    }
                    _ => {
                        for part in parts {
                            self.tensors(port, vec![part])?;
                        }
                    }
                }
                Ok(())
            }
            r => r,
        }
    }

    fn lines(&mut self, port: Option<usize>, lines: Vec<String>) -> Result<()> {
        let start = Instant::now();
        let encoder = Encoder::open(&self.ports, port, self.rest.tokenizer.as_deref())?;
        let tokens = encoder.encode(&lines)?;
        let width = encoder.width(&tokens);
        self.engine.read_inputs(start.elapsed());
        self.batch = batch(&self.ports[encoder.ids()], self.a.batch, LINES, 2);
        self.rows = lines.into_iter().map(|key| Row { key, outputs: Ok(vec![]) }).collect();
        // A value that the user gave for the mask or the token types takes precedence.
        let named = |i: usize| {
            let prefix = format!("{}=", self.ports[i].name);
            self.rest.inputs.iter().any(|t| t.starts_with(&prefix))
        };
        let own: Vec<usize> = encoder.filled_inputs().filter(|i| *i == encoder.ids() || !named(*i)).collect();
        let mut progress = Progress::bar("lines", tokens.len() as u64);
        let most = self.batch.most();
        for start in (0..tokens.len()).step_by(most) {
            let end = (start + most).min(tokens.len());
            let mut part: Vec<&crate::text::TokenizedLine> = tokens[start..end].iter().collect();
            if let (Batch::Exactly(n), Some(last)) = (self.batch, part.last().copied()) {
                part.resize(n, last);
            }
            let total = part.len();
            let mut given = encoder.inputs(&self.ports, &part, width)?;
            given.retain(|(i, _)| own.contains(i));
            let rows: Vec<usize> = (start..end).collect();
            let inputs = source::resolve_with(&self.ports, &self.rest, given, false)?;
            self.run(inputs, &rows, total)?;
            rows.iter().for_each(|_| progress.step());
        }
        progress.finish();
        Ok(())
    }

    /// Runs the model once for `total` rows and stores the results. `rows` has the numbers of the first
    /// rows; the other rows are padding.
    fn run(&mut self, inputs: Vec<Input>, rows: &[usize], total: usize) -> Result<()> {
        if self.count == 0 {
            let start = Instant::now();
            self.warnings = self.engine.prepare(self.a, &inputs)?;
            self.compile = start.elapsed();
        }
        let out = self.engine.run(&inputs)?;
        self.time += out.time;
        self.count += 1;
        for w in out.warnings {
            if !self.warnings.contains(&w) {
                self.warnings.push(w);
            }
        }
        for (k, i) in rows.iter().enumerate() {
            let part = |(name, d): (&String, &Datum)| Ok((name.clone(), row_of(name, d, k, total)?));
            let parts = self.outputs.iter().zip(&out.outputs).map(part).collect::<Result<Vec<_>>>()?;
            self.rows[*i].outputs = Ok(parts);
        }
        Ok(())
    }
}

/// Whether an error may be caused by the contents of a row, so that other rows may succeed.
fn about_inputs(e: &Error) -> bool {
    matches!(
        e,
        Error::Shape { .. }
            | Error::DType { .. }
            | Error::Argument { .. }
            | Error::Format { .. }
            | Error::Index { .. }
    )
}

/// How many rows the input `p` takes at once. If it has `rank` dimensions, the first one is the batch.
/// `asked` is the value of --batch, and `without` the number of rows if --batch is not given.
fn batch(p: &Port, asked: Option<u32>, without: usize, rank: usize) -> Batch {
    let asked_most = asked.map(|n| n as usize);
    let first = p.shape().filter(|s| s.rank() == rank).map(|s| s[0]);
    let batch = match first.map(|d| d.known()) {
        Some(None) => Batch::UpTo(asked_most.unwrap_or(without)),
        Some(Some(n)) if n > 1 => Batch::Exactly(n),
        _ => Batch::One,
    };
    match (batch, asked_most) {
        (Batch::One, Some(n)) if n > 1 => report::warn(&format!(
            "--batch {n} has no effect: '{}' is {}, which takes one at a time",
            p.name, p.ty
        )),
        (Batch::Exactly(n), Some(m)) if n != m => {
            report::warn(&format!("--batch {m} has no effect: '{}' is {}, which takes {n}", p.name, p.ty))
        }
        _ => {}
    }
    batch
}

/// Concatenates tensors of one dtype and shape along the first axis.
fn concat_rows(parts: &[&ConstData]) -> Result<ConstData> {
    let first = parts.first().ok_or_else(|| Error::internal("nothing to join"))?;
    let mut dims = first.dims.to_vec();
    if dims.is_empty() {
        dims.push(1);
    }
    dims[0] = parts.iter().map(|p| p.dims.first().copied().unwrap_or(1)).sum();
    if first.dtype.bits() < 8 {
        return data::from_scalars(first.dtype, &dims, parts.iter().flat_map(|p| p.scalars()));
    }
    let bytes: Vec<u8> = parts.iter().flat_map(|p| p.bytes().iter().copied()).collect();
    ConstData::new(first.dtype, &dims, Arc::new(bytes))
}

/// Row `k` of the results of a run for `total` rows.
fn row_of(name: &str, d: &Datum, k: usize, total: usize) -> Result<Datum> {
    let none = || {
        Err(Error::unsupported(
            format!(
                "several rows in one run: output '{name}' is {}, which has no part for each of the {total} rows",
                d.describe()
            ),
            "Run them one by one, with --batch 1",
        ))
    };
    match d {
        _ if total == 1 => Ok(d.clone()),
        Datum::Tensor(x) if x.dims.first() == Some(&total) => {
            let n = x.numel() / total;
            let mut dims = x.dims.to_vec();
            dims[0] = 1;
            if x.dtype.bits() < 8 {
                return Ok(data::from_scalars(x.dtype, &dims, x.scalars().skip(k * n).take(n))?.into());
            }
            let size = n * x.dtype.size();
            Ok(ConstData::new(x.dtype, &dims, Arc::new(x.bytes()[k * size..(k + 1) * size].to_vec()))?.into())
        }
        Datum::Sequence(s) if s.len() == total => Ok(s[k].clone()),
        _ => none(),
    }
}

/// The rows and how they are reported.
struct Report<'a> {
    a: &'a RunArgs,
    /// The kind of rows: "file" or "text".
    what: &'static str,
    labels: bool,
    runs: &'a Runs<'a>,
    tops: Vec<Option<Top>>,
}

/// A JSON document of rows.
struct Document<'a> {
    head: Value,
    done: &'a Report<'a>,
}

struct RowJson<'a> {
    what: &'static str,
    row: &'a Row,
    top: Option<&'a Top>,
}

impl Serialize for RowJson<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let mut m = s.serialize_map(None)?;
        m.serialize_entry(self.what, &self.row.key)?;
        if let Err(e) = &self.row.outputs {
            m.serialize_entry("error", &report::error_json(e))?;
        }
        if let Some(t) = self.top {
            m.serialize_entry("top_k", &t.json())?;
        }
        if let Some(all) = self.row.leaves() {
            let outputs: Vec<LeafJson<'_>> = all
                .iter()
                .map(|(name, leaf)| LeafJson { name, leaf: *leaf, summary: false, more: Map::new() })
                .collect();
            m.serialize_entry("outputs", &outputs)?;
        }
        m.end()
    }
}

impl Serialize for Document<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        let mut m = s.serialize_map(None)?;
        if let Value::Object(head) = &self.head {
            for (k, v) in head {
                m.serialize_entry(k, v)?;
            }
        }
        let d = self.done;
        let rows = d.runs.rows.iter().zip(&d.tops);
        let rows: Vec<RowJson<'_>> =
            rows.map(|(row, top)| RowJson { what: d.what, row, top: top.as_ref() }).collect();
        m.serialize_entry("rows", &rows)?;
        m.end()
    }
}

impl Report<'_> {
    /// The rows as JSON; with `files` the whole document of `--json`.
    fn document(&self, files: Option<&[PathBuf]>) -> Document<'_> {
        let (r, t) = (self.runs, self.runs.engine.times());
        let head = files.map_or(Value::Null, |files| {
            let mut head = json!({
                "model": report::path(&self.a.model),
                "written": paths(files),
                "failed": r.rows.iter().filter(|r| r.outputs.is_err()).count(),
                "times_ms": {
                    "load": ms(t.load), "open_device": ms(t.open), "read_inputs": ms(t.inputs),
                    "compile": ms(r.compile), "run": { "sum": ms(r.time), "runs": r.count },
                },
                "batch": r.batch.most(),
                "warnings": r.warnings.iter().chain(&r.engine.messages()).collect::<Vec<_>>(),
            });
            r.engine.json().into_iter().for_each(|(k, v)| head[k] = v);
            head
        });
        Document { head, done: self }
    }

    /// One tensor per output, with all rows stacked. Failed inputs have no row.
    fn stacked(&self) -> Result<Vec<(String, Datum)>> {
        let rows: Vec<Vec<(String, Leaf<'_>)>> = self.runs.rows.iter().filter_map(Row::leaves).collect();
        let Some(first) = rows.first() else {
            return Err(Error::Format {
                file: "--input".into(),
                what: "none of the inputs could be read".into(),
            });
        };
        let ragged = |name: &str| {
            Error::unsupported(
                format!("one tensor of '{name}', which differs in shape from row to row"),
                "Write the rows to .json",
            )
        };
        let stack = |(k, (name, leaf)): (usize, &(String, Leaf<'_>))| {
            let Leaf::Tensor(x) = leaf else {
                return Err(Error::unsupported(
                    format!("'{name}' of several rows, which is not a tensor of numbers"),
                    "Write the rows to .json",
                ));
            };
            let mut parts = Vec::with_capacity(rows.len());
            for row in &rows {
                match row.get(k) {
                    Some((n, Leaf::Tensor(y))) if n == name && y.dims == x.dims && y.dtype == x.dtype => {
                        parts.push(*y)
                    }
                    _ => return Err(ragged(name)),
                }
            }
            let all = concat_rows(&parts)?;
            // Rows without a batch axis get a new first axis.
            let batched = x.dims.first() == Some(&1);
            let all = match batched {
                true => all,
                false => {
                    let dims: Vec<usize> =
                        std::iter::once(parts.len()).chain(x.dims.iter().copied()).collect();
                    ConstData::new(all.dtype, &dims, all.owner())?
                }
            };
            Ok((name.clone(), all.into()))
        };
        first.iter().enumerate().map(stack).collect()
    }

    /// A line for each input: its name, then its classes or the values of an output.
    fn table(&self, name: Option<&str>) -> Result<Table> {
        let mut head = vec![self.what.to_string()];
        let mut lines: Vec<Vec<String>> = vec![];
        if let Some(top) = self.tops.iter().flatten().next() {
            let k = self.tops.iter().flatten().flat_map(|t| &t.rows).map(|(_, r)| r.len()).max().unwrap_or(0);
            let several = self.tops.iter().flatten().any(|t| t.rows.len() != 1);
            if several {
                head.push("row".into());
            }
            head.extend(output::class_columns(k, top, self.labels));
            for (row, top) in self.runs.rows.iter().zip(&self.tops) {
                let Some(top) = top else {
                    lines.push(vec![row.key.clone()]);
                    continue;
                };
                for (i, (_, entries)) in top.rows.iter().enumerate() {
                    let number = several.then(|| i.to_string());
                    let cells = output::class_cells(entries, self.labels);
                    lines.push(std::iter::once(row.key.clone()).chain(number).chain(cells).collect());
                }
            }
        } else {
            let mut columns = None;
            for row in &self.runs.rows {
                let Some(all) = row.leaves() else {
                    lines.push(vec![row.key.clone()]);
                    continue;
                };
                let found = match name {
                    Some(n) => all.iter().find(|(x, _)| x == n),
                    None => all.first(),
                };
                let Some((n, Leaf::Tensor(x))) = found else {
                    return Err(Error::unsupported(
                        "an output that is not a tensor of numbers as .csv",
                        "Write it to .json",
                    ));
                };
                let known: &(String, usize) = columns.get_or_insert_with(|| (n.clone(), x.numel()));
                if known.1 != x.numel() {
                    return Err(Error::unsupported(
                        format!("rows of '{n}' with {} and with {} values as .csv", known.1, x.numel()),
                        "Write them to .json",
                    ));
                }
                let cells = x.scalars().map(|s| output::exact(x, s));
                lines.push(std::iter::once(row.key.clone()).chain(cells).collect());
            }
            if let Some((n, count)) = columns {
                head.extend(output::columns(&n, count));
            }
        }
        // Rows that failed have only their name.
        lines.iter_mut().for_each(|l| l.resize(head.len(), String::new()));
        Ok(Table { head, rows: lines })
    }

    fn text(&self, files: &[PathBuf]) -> String {
        let (a, r, engine) = (self.a, self.runs, &self.runs.engine);
        let mut out = String::new();
        // Writing to a string cannot fail.
        if report::verbose() {
            let _ = writeln!(out, "model    {}", report::path_text(&a.model));
            out += &engine.text();
            let _ = writeln!(out, "batch    {}", r.batch.most());
        }
        if files.is_empty() && a.output.is_empty() || a.print.is_some() {
            out += &self.rows_text();
        }
        if report::quiet() {
            return out;
        }
        for f in files {
            let _ = writeln!(out, "saved {}", report::path_text(f));
        }
        if report::verbose() {
            let t = engine.times();
            let _ = writeln!(
                out,
                "times    load {}, open device {}, read inputs {}, compile {}",
                time(t.load),
                time(t.open),
                time(t.inputs),
                time(r.compile)
            );
            out += &engine.memory_text();
            r.warnings.iter().chain(&engine.messages()).for_each(|w| {
                let _ = writeln!(out, "warning  {w}");
            });
        }
        let (all, good) = (r.rows.len(), r.rows.iter().filter(|r| r.outputs.is_ok()).count());
        let count = if good == all { format!("{all}") } else { format!("{good} of {all}") };
        let what = match (self.what, all) {
            ("text", 1) => "line",
            ("text", _) => "lines",
            (_, 1) => "file",
            _ => "files",
        };
        let _ = writeln!(out, "{}, {count} {what} in {}", engine.place(), answer::duration_text(r.time));
        out
    }

    fn rows_text(&self) -> String {
        let all = self.a.print == Some(Print::All);
        let mut out = String::new();
        let mut lines: Vec<Vec<String>> = vec![];
        for (row, top) in self.runs.rows.iter().zip(&self.tops) {
            let key = report::one_line(&row.key);
            let key = if self.what == "text" { report::short(&key, 24) } else { key.into_owned() };
            match (&row.outputs, top, row.leaves()) {
                (Err(_), ..) => lines.push(vec![key, "failed".into()]),
                (_, Some(top), _) if !all => {
                    let many = top.rows.len() > 1;
                    for (i, (_, entries)) in top.rows.iter().enumerate() {
                        let key = if many { format!("{key} [{i}]") } else { key.clone() };
                        let cells = entries.iter().flat_map(|e| [e.class(), e.percent()]);
                        lines.push(std::iter::once(key).chain(cells).collect());
                    }
                }
                (_, _, Some(leaves)) if all => {
                    out += &format!("{key}\n");
                    leaves.iter().for_each(|(n, l)| out += &answer::show(n, l, true));
                }
                (_, _, Some(leaves)) => {
                    let many = leaves.len() > 1;
                    let cells = leaves.iter().map(|(n, l)| match many {
                        true => format!("{n} {}", answer::brief(l)),
                        false => answer::brief(l),
                    });
                    lines.push(std::iter::once(key).chain(cells).collect());
                }
                _ => {}
            }
        }
        out + &table(&lines)
    }

    /// Warns about NaN and infinite values, once for all rows.
    fn odd_values(&self) {
        let mut odd = self.runs.rows.iter().filter_map(|r| {
            let w = r.leaves()?.iter().find_map(|(n, l)| answer::odd_values(n, l))?;
            Some((&r.key, w))
        });
        if let Some((key, w)) = odd.next() {
            let more = match odd.count() {
                0 => String::new(),
                n => format!(", and {n} more rows have such values"),
            };
            report::warn(&format!("{}: {w}{more}", report::short(key, 80)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use halcyon::{DType, Shape};

    #[test]
    fn a_batch_follows_the_declared_shape() {
        let port = |shape: Shape| Port {
            name: "x".into(),
            ty: PortType::Tensor { dtype: DType::F32, shape: Some(shape) },
        };
        let open: Shape = ["n", "c", "h", "w"].into();
        assert_eq!(batch(&port(open.clone()), Some(8), 1, 4), Batch::UpTo(8));
        assert_eq!(batch(&port(open), None, 1, 4), Batch::UpTo(1));
        assert_eq!(batch(&port([1usize, 3, 8, 8].into()), None, 1, 4), Batch::One);
        assert_eq!(batch(&port([4usize, 3, 8, 8].into()), None, 1, 4), Batch::Exactly(4));
        assert_eq!(batch(&port(["h", "w"].into()), Some(8), 1, 4), Batch::One);
    }

    #[test]
    fn concatenated_rows_can_be_split_again() {
        let a = ConstData::from_slice(&[1, 2], &[1f32, 2.0]).unwrap();
        let b = ConstData::from_slice(&[1, 2], &[3f32, 4.0]).unwrap();
        let x = concat_rows(&[&a, &b]).unwrap();
        assert_eq!((x.dims.as_slice(), x.to_vec::<f32>()), (&[2, 2][..], vec![1.0, 2.0, 3.0, 4.0]));
        let second = row_of("y", &x.clone().into(), 1, 2).unwrap();
        assert_eq!(second.tensor().unwrap(), &b);
        // A result that cannot be divided into rows is rejected.
        let e = row_of("y", &a.into(), 0, 2).unwrap_err();
        assert!(e.to_string().contains("--batch 1"), "{e}");
        let small = data::from_scalars(DType::I4, &[1, 3], [1i64, -2, 3].map(Into::into)).unwrap();
        let two = concat_rows(&[&small, &small]).unwrap();
        assert_eq!(row_of("y", &two.into(), 1, 2).unwrap().tensor().unwrap(), &small);
    }
}
