//! Writes the output values: `--output` and `--output-dir`.

use super::answer::Top;
use super::leaf::{Leaf, LeafJson, key_json};
use crate::args::{Format, RunArgs};
use crate::{json, report};
use clap::ValueEnum;
use halcyon::{ConstData, Error, Result, Scalar};
use halcyon_formats::onnx::Keys;
use halcyon_formats::{data, npy, npz, output};
use serde::Serialize;
use serde_json::{Map, json};
use std::io::Write;
use std::path::{Path, PathBuf};

/// File extensions that the name of a new output folder must not have.
const FILES: &[&str] =
    &["npy", "npz", "json", "csv", "txt", "pb", "onnx", "bin", "png", "jpg", "parquet", "pt"];

/// One `--output` argument.
#[derive(Debug)]
pub(super) struct Target {
    /// The output to write; without a name all outputs, or the only one.
    name: Option<String>,
    pub path: PathBuf,
    format: Format,
}

impl Target {
    /// Whether the file gets whole tensors, not one document or table of rows.
    pub(super) fn takes_tensors(&self) -> bool {
        match self.format {
            Format::Npy | Format::Npz => true,
            Format::Json => self.name.is_some(),
            Format::Csv => false,
        }
    }

    pub(super) fn is_stdout(&self) -> bool {
        output::is_stdout(&self.path)
    }
}

/// The rows of a table with their headings.
#[derive(Debug)]
pub(super) struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

/// Rejects invalid arguments without opening the model.
pub(super) fn check(a: &RunArgs) -> Result<()> {
    let Some(dir) = &a.output_dir else { return Ok(()) };
    let file = dir.extension().is_some_and(|e| FILES.iter().any(|f| e.eq_ignore_ascii_case(f)));
    if dir.is_dir() || !file && !dir.exists() {
        return Ok(());
    }
    let what = match dir.exists() {
        true => "is a file, and this option takes a folder",
        false => "looks like a file, and this option takes a folder",
    };
    let d = dir.display();
    Err(Error::argument("--output-dir", format!("{d} {what}; write a file with --output {d} (or -o)")))
}

/// Resolves `--output` for a model with these outputs.
pub(super) fn targets(a: &RunArgs, names: &[String]) -> Result<Vec<Target>> {
    let bad = |what: String| Error::argument("--output", what);
    let mut all: Vec<Target> = vec![];
    for text in &a.output {
        let (name, path) = match text.split_once('=') {
            Some((n, p)) if names.iter().any(|x| x == n) => (Some(n.to_string()), p),
            Some((n, p))
                if Path::new(text).parent().is_none_or(|d| d.as_os_str().is_empty()) && !p.is_empty() =>
            {
                let near = crate::suggest::nearest(n, names.iter().map(String::as_str));
                let hint = near.map_or(String::new(), |x| format!(". Did you mean {x}={p}?"));
                return Err(bad(format!(
                    "the model has no output '{n}'; its outputs are {}{hint}",
                    names.join(", ")
                )));
            }
            _ => (None, text.as_str()),
        };
        let path = PathBuf::from(path);
        let ending = path.extension().and_then(|e| Format::from_str(&e.to_string_lossy(), true).ok());
        // Pipes and devices have no extension. They get JSON.
        let stream = output::is_stdout(&path) || path.exists() && !path.is_file() && !path.is_dir();
        let format = a.format.or(ending).or(stream.then_some(Format::Json)).ok_or_else(|| {
            bad(format!(
                "{}: its file extension names no format: use .npy, .npz, .json or .csv, or add --format",
                path.display()
            ))
        })?;
        if all.iter().any(|t| t.path == path) {
            return Err(bad(format!("{} is given twice", path.display())));
        }
        all.push(Target { name, path, format });
    }
    if a.json && all.iter().any(Target::is_stdout) {
        return Err(bad("--json writes to standard output too; leave one of the two options out".into()));
    }
    Ok(all)
}

/// Rejects outputs that a file format cannot hold, before any run. With `table`, a .csv file gets the classes
/// of `--top-k`.
pub(super) fn fits(targets: &[Target], names: &[String], table: bool) -> Result<()> {
    for t in targets {
        let one = matches!(t.format, Format::Npy) || matches!(t.format, Format::Csv) && !table;
        if one && t.name.is_none() && names.len() > 1 {
            let ending = if t.format == Format::Npy { ".npy" } else { ".csv" };
            let p = t.path.display();
            let what = format!(
                "{p}: {ending} holds one output, and the model has {}; write one as --output {}={p}, or all to .npz or .json",
                names.join(", "),
                names[0]
            );
            return Err(Error::argument("--output", what));
        }
    }
    Ok(())
}

/// The data to write.
pub(super) struct OutputData<'a> {
    pub outputs: &'a [(String, Leaf<'a>)],
    /// The table for a .csv file of the named output, or of the only output. `None` if the file gets the
    /// output's values.
    pub table: &'a dyn Fn(Option<&str>) -> Result<Option<Table>>,
    /// The document for a .json file of all outputs. `None` if the file gets `outputs`.
    pub rows: Option<&'a dyn ErasedJson>,
}

impl std::fmt::Debug for OutputData<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given").field("outputs", &self.outputs).finish_non_exhaustive()
    }
}

/// A value that can be written as JSON.
pub(super) trait ErasedJson {
    fn write(&self, w: &mut dyn Write, file: &str) -> Result<()>;
}

impl<T: Serialize> ErasedJson for T {
    fn write(&self, mut w: &mut dyn Write, file: &str) -> Result<()> {
        json::write(&mut w, self, file)
    }
}

/// Writes every target. Returns their paths, except standard output.
pub(super) fn write(targets: &[Target], given: &OutputData<'_>) -> Result<Vec<PathBuf>> {
    for t in targets {
        one(t, given)?;
    }
    Ok(targets.iter().filter(|t| !t.is_stdout()).map(|t| t.path.clone()).collect())
}

fn one(t: &Target, given: &OutputData<'_>) -> Result<()> {
    let file = t.path.display().to_string();
    // Parts of a sequence are named NAME.0, NAME.1; parts of a map are named NAME.keys, NAME.values.
    let mine = |n: &str| {
        t.name.as_ref().is_none_or(|name| {
            n == name || n.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('.'))
        })
    };
    let outputs: Vec<&(String, Leaf<'_>)> = given.outputs.iter().filter(|(n, _)| mine(n)).collect();
    let mut out = output::Output::create(&t.path)?;
    let put = |out: &mut output::Output, bytes: &[u8]| out.write_all(bytes).map_err(|e| out.failed(&e));
    match t.format {
        Format::Npy => {
            let (name, x) = single(&outputs, "npy")?;
            put(&mut out, &npy::encode(&numpy(name, x, &file)?)?)?;
        }
        Format::Npz => {
            let all = outputs.iter().map(|(n, l)| Ok((n.as_str(), numpy(n, &tensor(n, l)?, &file)?)));
            let all = all.collect::<Result<Vec<_>>>()?;
            let parts: Vec<(&str, &ConstData)> = all.iter().map(|(n, x)| (*n, x)).collect();
            put(&mut out, &npz::encode(&parts)?)?;
        }
        Format::Json => match given.rows {
            Some(rows) if t.name.is_none() => rows.write(&mut out, &file)?,
            _ => {
                let all: Vec<LeafJson<'_>> = outputs
                    .iter()
                    .map(|(name, leaf)| LeafJson { name, leaf: *leaf, summary: false, more: Map::new() })
                    .collect();
                json::write(&mut out, &Outputs { outputs: &all }, &file)?;
            }
        },
        Format::Csv => {
            let table = match (given.table)(t.name.as_deref())? {
                Some(t) => t,
                None => {
                    let (name, x) = single(&outputs, "csv")?;
                    values(name, x)
                }
            };
            put(&mut out, csv(&table).as_bytes())?;
        }
    }
    out.finish().map(drop)
}

#[derive(Serialize)]
struct Outputs<'a, 'b> {
    outputs: &'a [LeafJson<'b>],
}

/// The only tensor, for formats that hold just one.
fn single<'a>(outputs: &[&'a (String, Leaf<'a>)], ending: &str) -> Result<(&'a str, &'a ConstData)> {
    match outputs {
        [(name, Leaf::Tensor(x))] => Ok((name, x)),
        [(name, _)] => Err(Error::unsupported(
            format!("'{name}', which is not a tensor of numbers, as .{ending}"),
            "Write it to .json",
        )),
        _ => Err(Error::unsupported(
            format!("{} values as one .{ending}", outputs.len()),
            "Write them to .json or, if all are numbers, to .npz",
        )),
    }
}

fn tensor(name: &str, l: &Leaf<'_>) -> Result<ConstData> {
    match l {
        Leaf::Tensor(x) => Ok((*x).clone()),
        Leaf::Keys(Keys::Ints(k)) => ConstData::from_slice(&[k.len()], k),
        _ => {
            Err(Error::unsupported(format!("'{name}', which holds no numbers, as .npz"), "Write it to .json"))
        }
    }
}

/// Converts a tensor to a dtype that NumPy has. Prints a warning if this changes the dtype.
fn numpy(name: &str, x: &ConstData, file: &str) -> Result<ConstData> {
    let to = npy::stand_in(x.dtype);
    if to != x.dtype {
        report::warn(&format!(
            "NumPy has no {}; {file} holds the values of '{name}' as {to}, which is exact",
            x.dtype
        ));
    }
    data::cast(x, to)
}

/// A value as text, with as many digits as identify it.
pub(super) fn exact(x: &ConstData, s: Scalar) -> String {
    match s {
        Scalar::Bool(b) => b.to_string(),
        Scalar::I(i) => i.to_string(),
        Scalar::U(u) => u.to_string(),
        Scalar::F(f) if f.is_nan() => "nan".into(),
        Scalar::F(f) if f.is_infinite() => if f > 0.0 { "inf" } else { "-inf" }.into(),
        Scalar::F(f) if x.dtype == halcyon::DType::F64 => format!("{f:?}"),
        Scalar::F(f) => format!("{:?}", f as f32),
    }
}

/// Headings for an output's last axis: `NAME.0`, `NAME.1`; just the name for a single column.
pub(super) fn columns(name: &str, n: usize) -> Vec<String> {
    match n {
        1 => vec![name.into()],
        n => (0..n).map(|i| format!("{name}.{i}")).collect(),
    }
}

/// A table with a row for each position of the leading axes.
fn values(name: &str, x: &ConstData) -> Table {
    let n = x.dims.last().copied().unwrap_or(1);
    let cells: Vec<String> = x.scalars().map(|s| exact(x, s)).collect();
    Table { head: columns(name, n), rows: cells.chunks(n.max(1)).map(<[String]>::to_vec).collect() }
}

/// Headings for the classes of `--top-k`.
pub(super) fn class_columns(k: usize, top: &Top, labels: bool) -> Vec<String> {
    let share = top.share_name();
    let one = |i: usize| {
        let suffix = if k == 1 { String::new() } else { format!("_{}", i + 1) };
        let mut v = vec![format!("class{suffix}"), format!("{share}{suffix}")];
        if labels {
            v.insert(1, format!("label{suffix}"));
        }
        v
    };
    (0..k).flat_map(one).collect()
}

/// The cells for the headings of [`class_columns`].
pub(super) fn class_cells(entries: &[super::answer::Entry], labels: bool) -> Vec<String> {
    let one = |e: &super::answer::Entry| {
        let mut v = vec![e.index.to_string(), format!("{:?}", e.share as f32)];
        if labels {
            v.insert(1, e.label.clone().unwrap_or_default());
        }
        v
    };
    entries.iter().flat_map(one).collect()
}

/// The classes of a run: a table row for each row of the output.
pub(super) fn classes(top: &Top, labels: bool) -> Table {
    let k = top.rows.iter().map(|(_, r)| r.len()).max().unwrap_or(0);
    let many = top.rows.len() > 1;
    let mut head = class_columns(k, top, labels);
    if many {
        head.insert(0, "row".into());
    }
    let row = |(i, (_, entries)): (usize, &(super::answer::Scores, Vec<super::answer::Entry>))| {
        let mut cells = class_cells(entries, labels);
        if many {
            cells.insert(0, i.to_string());
        }
        cells
    };
    Table { head, rows: top.rows.iter().enumerate().map(row).collect() }
}

/// Formats a table according to RFC 4180, but with LF line endings.
fn csv(t: &Table) -> String {
    let cell = |c: &String| match c.contains([',', '"', '\n', '\r']) || c.starts_with(' ') || c.ends_with(' ')
    {
        true => format!("\"{}\"", c.replace('"', "\"\"")),
        false => c.clone(),
    };
    let line = |r: &Vec<String>| r.iter().map(cell).collect::<Vec<_>>().join(",") + "\n";
    std::iter::once(&t.head).chain(&t.rows).map(line).collect()
}

/// File name for an output: its name with disallowed characters replaced.
fn file_name(output: &str, extension: &str) -> String {
    let keep = |c: char| c.is_alphanumeric() || "._-".contains(c);
    output.chars().map(|c| if keep(c) { c } else { '_' }).collect::<String>() + extension
}

/// Saves every output as a separate file.
pub(super) fn save(dir: &Path, outputs: &[(String, Leaf<'_>)]) -> Result<Vec<PathBuf>> {
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
            Leaf::Tensor(x) => npy::write(&path, &numpy(name, x, &path.display().to_string())?)?,
            Leaf::Text(t) => {
                output::write(&path, json!({ "shape": t.dims, "values": t.vals }).to_string().as_bytes())?
            }
            Leaf::Keys(k) => {
                let v = json!({ "shape": [key_json(k).len()], "values": key_json(k) });
                output::write(&path, v.to_string().as_bytes())?
            }
            Leaf::None => output::write(&path, b"null")?,
        }
        files.push(path);
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disallowed_characters_of_file_names_are_replaced() {
        assert_eq!(file_name("a/b:c.1-x_y é", ".npy"), "a_b_c.1-x_y_é.npy");
        assert_eq!(file_name("..", ".npy"), "...npy");
    }

    #[test]
    fn cells_are_quoted_where_they_must_be() {
        let s = |v: &[&str]| v.iter().map(|c| c.to_string()).collect::<Vec<_>>();
        let t = Table { head: s(&["a", "b"]), rows: vec![s(&["x, \"y\"", "1"]), s(&["", " z"])] };
        assert_eq!(csv(&t), "a,b\n\"x, \"\"y\"\"\",1\n,\" z\"\n");
        let x = ConstData::from_slice(&[2, 2], &[0.1f32, f32::NAN, f32::INFINITY, 1e-30]).unwrap();
        assert_eq!(csv(&values("y", &x)), "y.0,y.1\n0.1,nan\ninf,1e-30\n");
    }
}
