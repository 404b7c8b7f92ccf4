//! Resolves `--input` arguments to the inputs of a model.

use crate::args::InputArgs;
use crate::report::name;
use crate::{image, numbers, report, strings, suggest, text};
use halcyon::{ConstData, DType, Dim, Error, Result, Shape};
use halcyon_formats::npz::Npz;
use halcyon_formats::onnx::{Datum, Port, PortType, tensor};
use halcyon_formats::sniff::{self, Kind};
use halcyon_formats::{data, foreign, mmap, npy, picture};
use halcyon_ir::{Bindings, Scalar};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One input of a run.
#[derive(Debug)]
pub(crate) struct Input {
    pub name: String,
    /// Where it came from, for reports.
    pub source: String,
    pub data: Datum,
}

/// An input as given on the command line. Files are read already; values to be filled are only described.
#[derive(Debug)]
pub(crate) struct PendingInput {
    pub name: String,
    pub source: String,
    value: Value,
}

#[derive(Debug)]
enum Value {
    Data(Datum),
    Filled { fill: Fill, dtype: DType, dims: Vec<usize>, seed: u64 },
}

impl PendingInput {
    /// Dtype and sizes of a tensor.
    pub(crate) fn tensor(&self) -> Option<(DType, &[usize])> {
        match &self.value {
            Value::Data(d) => d.tensor().map(|t| (t.dtype, t.dims.as_slice())),
            Value::Filled { dtype, dims, .. } => Some((*dtype, dims)),
        }
    }

    pub(crate) fn read(self) -> Result<Input> {
        let data = match self.value {
            Value::Data(d) => d,
            Value::Filled { fill, dtype, dims, seed } => {
                fill_values(fill, &self.name, dtype, &dims, seed)?.into()
            }
        };
        Ok(Input { name: self.name, source: self.source, data })
    }

    /// The value of a tensor of at most `most` bytes.
    pub(crate) fn small(&self, most: usize) -> Result<Option<ConstData>> {
        let Some((dtype, dims)) = self.tensor() else { return Ok(None) };
        if data::byte_len(dtype, dims).is_none_or(|n| n > most) {
            return Ok(None);
        }
        Ok(match &self.value {
            Value::Data(d) => d.tensor().cloned(),
            Value::Filled { fill, dtype, dims, seed } => {
                Some(fill_values(*fill, &self.name, *dtype, dims, *seed)?)
            }
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fill {
    Random,
    Zeros,
    Ones,
}

/// The part after `NAME=` in `--input`.
#[derive(Debug)]
pub(crate) enum Spec {
    Fill(Fill, Option<Vec<usize>>),
    File(PathBuf),
    Numbers(serde_json::Value),
    /// Lines of text.
    Text(Vec<String>),
}

/// The inputs of a model in its order. With `fill`, inputs that are not given are random; otherwise they are
/// an error.
///
/// # Errors
/// [`Error::Argument`] for unknown names, for inputs given twice or not at all, and for data of another dtype
/// than the model's; [`Error::OutOfMemory`] for generated values; errors of the file formats.
pub(crate) fn resolve(ports: &[Port], a: &InputArgs, fill: bool) -> Result<Vec<Input>> {
    resolve_with(ports, a, vec![], fill)
}

/// Like [`resolve`], with some inputs already resolved.
pub(crate) fn resolve_with(
    ports: &[Port],
    a: &InputArgs,
    given: Vec<(usize, Input)>,
    fill: bool,
) -> Result<Vec<Input>> {
    pending_with(ports, a, given, fill)?.into_iter().map(PendingInput::read).collect()
}

/// Like [`resolve`], but does not allocate generated values.
pub(crate) fn pending_inputs(ports: &[Port], a: &InputArgs, fill: bool) -> Result<Vec<PendingInput>> {
    pending_with(ports, a, vec![], fill)
}

/// Collects the inputs.
struct InputCollector<'a> {
    ports: &'a [Port],
    a: &'a InputArgs,
    read: Vec<Option<Input>>,
    fills: Vec<(usize, String, Fill, Option<Vec<usize>>)>,
    taken: Vec<bool>,
    texts: Vec<(Option<usize>, Vec<String>)>,
}

impl InputCollector<'_> {
    /// Sets input `i` as the command line specifies.
    fn put(&mut self, i: usize, source: &str, spec: Spec) -> Result<()> {
        let p = &self.ports[i];
        if let Spec::Text(lines) = spec {
            self.texts.push((Some(i), lines));
            return Ok(());
        }
        mark_taken(&mut self.taken, self.ports, i)?;
        match spec {
            Spec::Fill(f, dims) => self.fills.push((i, source.into(), f, dims)),
            Spec::File(path) => self.read[i] = Some(named_file(p, &path, self.a)?),
            Spec::Numbers(v) => {
                let data = numbers::datum(p, &v).map_err(|e| {
                    Error::argument(
                        "--input",
                        format!("{}: input '{}': {e}", report::short(source, 60), p.name),
                    )
                })?;
                self.read[i] = Some(Input { name: p.name.clone(), source: "numbers".into(), data });
            }
            Spec::Text(_) => {}
        }
        Ok(())
    }

    /// Assigns lines of text to an input of strings, or tokenizes them for the inputs of token ids.
    fn put_texts(&mut self) -> Result<()> {
        if self.texts.is_empty() {
            return Ok(());
        }
        let texts = std::mem::take(&mut self.texts);
        let named = texts.iter().find_map(|(i, _)| *i);
        if texts.iter().any(|(i, _)| i.is_some() && *i != named) {
            return Err(Error::argument("--input", "text is given for two inputs; give it for one"));
        }
        let lines: Vec<String> = texts.into_iter().flat_map(|(_, l)| l).collect();
        let strings = |i: &usize| matches!(self.ports[*i].ty, PortType::Text { .. }) && !self.taken[*i];
        let at = named.or_else(|| (0..self.ports.len()).find(strings)).filter(strings);
        if let Some(i) = at {
            mark_taken(&mut self.taken, self.ports, i)?;
            let p = &self.ports[i];
            let data = Datum::Text(strings::lines(p, lines)?);
            self.read[i] = Some(Input { name: p.name.clone(), source: "text".into(), data });
            return Ok(());
        }
        let e = text::Encoder::open(self.ports, named, self.a.tokenizer.as_deref())?;
        let lines = e.encode(&lines)?;
        let width = e.width(&lines);
        for (i, input) in e.inputs(self.ports, &lines.iter().collect::<Vec<_>>(), width)? {
            // A value that the user gave for the mask or the token types takes precedence. For the token ids,
            // it is an error.
            if i == e.ids() || !self.taken[i] {
                mark_taken(&mut self.taken, self.ports, i)?;
                self.read[i] = Some(input);
            }
        }
        Ok(())
    }
}

fn pending_with(
    ports: &[Port],
    a: &InputArgs,
    given: Vec<(usize, Input)>,
    fill: bool,
) -> Result<Vec<PendingInput>> {
    let mut s = InputCollector {
        ports,
        a,
        read: ports.iter().map(|_| None).collect(),
        fills: vec![],
        taken: vec![false; ports.len()],
        texts: vec![],
    };
    for (i, input) in given {
        mark_taken(&mut s.taken, ports, i)?;
        s.read[i] = Some(input);
    }
    let mut unnamed = vec![];
    for text in &a.inputs {
        match split(ports, text)? {
            (None, Spec::Text(lines)) => s.texts.push((None, lines)),
            (None, spec) => unnamed.push((text, spec)),
            (Some(i), spec) => s.put(i, text, spec)?,
        }
    }
    // Archives name their inputs. The remaining sources go to the remaining inputs in order.
    let mut rest = vec![];
    for (text, spec) in unnamed {
        match spec {
            Spec::File(path) if is_npz(&path)? => {
                let z = Npz::open(&path)?;
                let matching: Vec<usize> =
                    (0..ports.len()).filter(|&i| z.names().any(|n| n == ports[i].name)).collect();
                if matching.is_empty() {
                    return Err(Error::argument(
                        "--input",
                        format!(
                            "no array of {} has the name of an input: it has {}, the model takes {}",
                            path.display(),
                            z.names().map(name).collect::<Vec<_>>().join(", "),
                            names(ports)
                        ),
                    ));
                }
                for i in matching {
                    mark_taken(&mut s.taken, ports, i)?;
                    s.read[i] = Some(from_archive(&z, &ports[i].name, &ports[i], &path)?);
                }
            }
            spec => rest.push((text, spec)),
        }
    }
    s.put_texts()?;
    for (text, spec) in rest {
        let i = s.taken.iter().position(|t| !t).ok_or_else(|| {
            Error::argument("--input", format!("{text} is one too many: the model takes {}", names(ports)))
        })?;
        s.put(i, text, spec)?;
    }
    let InputCollector { read: inputs, mut fills, taken, .. } = s;
    let missing: Vec<&Port> = ports.iter().zip(&taken).filter(|(_, t)| !**t).map(|(p, _)| p).collect();
    if !missing.is_empty() {
        if !fill {
            return Err(missing_error(&missing));
        }
        let open = (0..ports.len()).filter(|&i| !taken[i]);
        fills.extend(open.map(|i| (i, "random (not given)".into(), Fill::Random, None)));
    }
    // A symbol that other inputs determine has the same size here.
    let mut known = Bindings::new();
    for (p, s) in ports.iter().zip(&inputs) {
        if let (Some(shape), Some(x)) = (p.shape(), s.as_ref().and_then(|s| s.data.tensor())) {
            shape.iter().zip(&x.dims).for_each(|(d, n)| record_symbol(*d, *n, &mut known));
        }
    }
    let mut all: Vec<Option<PendingInput>> = inputs
        .into_iter()
        .map(|s| s.map(|s| PendingInput { name: s.name, source: s.source, value: Value::Data(s.data) }))
        .collect();
    for (i, source, fill, dims) in fills {
        let p = &ports[i];
        let dims = match (dims, p.shape()) {
            (Some(d), _) => d,
            (None, Some(s)) => default_dims(s, &mut known)?,
            (None, None) => {
                return Err(Error::argument(
                    "--input",
                    format!(
                        "input '{0}' declares no shape; give one, as in --input {0}=zeros:1x8",
                        name(&p.name)
                    ),
                ));
            }
        };
        let value = Value::Filled { fill, dtype: p.dtype()?, dims, seed: a.seed.wrapping_add(i as u64) };
        all[i] = Some(PendingInput { name: p.name.clone(), source, value });
    }
    all.into_iter().map(|s| s.ok_or_else(|| Error::internal("an input was lost"))).collect()
}

/// Input shapes, each written as `[NAME=]1x3x8x8`. Those without a name are assigned in the model's order.
pub(crate) fn shapes(ports: &[Port], texts: &[String]) -> Result<Vec<(String, Vec<usize>)>> {
    let mut taken = vec![false; ports.len()];
    let mut out = vec![];
    for (named, text) in [true, false].into_iter().flat_map(|n| texts.iter().map(move |t| (n, t))) {
        let (i, dims) = match text.split_once('=') {
            Some((name, dims)) if named => {
                let i = ports.iter().position(|p| p.name == name).ok_or_else(|| {
                    Error::argument(
                        "--input",
                        format!("the model has no input '{name}'; it takes {}", names(ports)),
                    )
                })?;
                (i, dims)
            }
            None if !named => {
                let i = taken.iter().position(|t| !t).ok_or_else(|| {
                    Error::argument(
                        "--input",
                        format!("{text} is one too many: the model takes {}", names(ports)),
                    )
                })?;
                (i, text.as_str())
            }
            _ => continue,
        };
        mark_taken(&mut taken, ports, i)?;
        out.push((ports[i].name.clone(), dimensions(dims)?));
    }
    Ok(out)
}

/// Converts a shape to a source filled with ones; other text is returned unchanged.
pub(crate) fn or_ones(text: &str) -> String {
    let (name, rest) = text.split_once('=').map_or(("", text), |(n, r)| (n, r));
    let shape = rest.chars().all(|c| c.is_ascii_digit() || c == 'x' || c == ',') && dimensions(rest).is_ok();
    match (shape, name) {
        (false, _) => text.into(),
        (true, "") => format!("ones:{rest}"),
        (true, name) => format!("{name}=ones:{rest}"),
    }
}

fn names(ports: &[Port]) -> String {
    match ports {
        [] => "no input".into(),
        _ => ports.iter().map(|p| name(&p.name)).collect::<Vec<_>>().join(", "),
    }
}

fn mark_taken(taken: &mut [bool], ports: &[Port], i: usize) -> Result<()> {
    if std::mem::replace(&mut taken[i], true) {
        return Err(Error::argument("--input", format!("input '{}' is given twice", name(&ports[i].name))));
    }
    Ok(())
}

/// Splits an argument into the input it names, if any, and its source.
pub(crate) fn split(ports: &[Port], text: &str) -> Result<(Option<usize>, Spec)> {
    let Some((name, rest)) = text.split_once('=') else {
        return Ok((None, spec(text)?));
    };
    match ports.iter().position(|p| p.name == name) {
        Some(i) => Ok((Some(i), spec(rest)?)),
        // Text, numbers and paths may contain the equals sign too.
        None if name.starts_with("text:") || name.starts_with(['@', '[', '{']) => Ok((None, spec(text)?)),
        None if Path::new(text).exists() => Ok((None, Spec::File(text.into()))),
        None => {
            let near = suggest::nearest(name, ports.iter().map(|p| p.name.as_str()));
            let hint = near.map_or(String::new(), |n| format!(". Did you mean --input {n}={rest}?"));
            let what = format!("the model has no input '{name}'; it takes {}{hint}", names(ports));
            Err(Error::argument("--input", what))
        }
    }
}

/// Replaces files of lines by one source per line, because standard input can be read only once.
pub(crate) fn split_lines(ports: &[Port], inputs: &[String]) -> Result<Vec<String>> {
    let mut out = Vec::with_capacity(inputs.len());
    for text in inputs {
        match split(ports, text)? {
            (i, Spec::Text(lines)) => {
                let name = i.map_or(String::new(), |i| format!("{}=", ports[i].name));
                out.extend(lines.into_iter().map(|l| format!("{name}text:{l}")));
            }
            _ => out.push(text.clone()),
        }
    }
    Ok(out)
}

fn spec(text: &str) -> Result<Spec> {
    if let Some(line) = text.strip_prefix("text:") {
        return Ok(Spec::Text(vec![line.into()]));
    }
    if let Some(file) = text.strip_prefix('@') {
        return text::lines(Path::new(file)).map(Spec::Text);
    }
    if let Some(v) = numbers::parse(text)? {
        return Ok(Spec::Numbers(v));
    }
    let (word, dims) = match text.split_once(':') {
        Some((w, d)) => (w, Some(d)),
        None => (text, None),
    };
    let fill = match word {
        "random" => Fill::Random,
        "zeros" => Fill::Zeros,
        "ones" => Fill::Ones,
        _ => return Ok(Spec::File(text.into())),
    };
    Ok(Spec::Fill(fill, dims.map(dimensions).transpose()?))
}

/// Parses `1x3x8x8` or `1,3,8,8`; the empty text is a scalar.
fn dimensions(text: &str) -> Result<Vec<usize>> {
    if text.is_empty() {
        return Ok(vec![]);
    }
    text.split(['x', ','])
        .map(|d| d.trim().parse())
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| Error::argument("--input", format!("\"{text}\" is not a shape; write 1x3x8x8")))
}

fn kind(path: &Path) -> Result<(impl AsRef<[u8]> + use<>, Option<Kind>)> {
    let bytes = mmap::open(path).map_err(|e| suggest::missing(path, e))?;
    let kind = sniff::kind(&bytes);
    Ok((bytes, kind))
}

fn is_npz(path: &Path) -> Result<bool> {
    if path.is_dir() {
        let what = "only `halcyon run` takes a folder of pictures; name one of its files here";
        return Err(Error::argument("--input", format!("{}: {what}", path.display())));
    }
    Ok(kind(path)?.1 == Some(Kind::Npz))
}

/// The value of an input from a file. The kind of file is detected from its content; `.json` and `.txt` files
/// are known by their extension.
pub(crate) fn named_file(p: &Port, path: &Path, a: &InputArgs) -> Result<Input> {
    let (bytes, kind) = kind(path)?;
    let source = path.display().to_string();
    if let Some(data) = strings::read(p, path, bytes.as_ref(), kind)? {
        return Ok(Input { name: p.name.clone(), source, data });
    }
    if kind.is_none() && path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json")) {
        let bad = |what: String| Error::Format { file: source.clone(), what };
        let v = serde_json::from_slice(bytes.as_ref()).map_err(|e| bad(format!("not JSON: {e}")))?;
        let data = numbers::datum(p, &v).map_err(|e| bad(format!("input '{}': {e}", p.name)))?;
        return Ok(Input { name: p.name.clone(), source, data });
    }
    let value = match kind {
        Some(Kind::Npy) => npy::read(path)?,
        Some(Kind::OnnxTensor) if matches!(p.ty, PortType::Tensor { .. }) => tensor::read_pb(path)?.1,
        Some(Kind::OnnxTensor) => {
            return Ok(Input { name: p.name.clone(), source, data: Datum::read_pb(path, &p.ty)? });
        }
        Some(Kind::Npz) => {
            let z = Npz::open(path)?;
            let mut all = z.names();
            let name = match (all.next(), all.next()) {
                _ if z.names().any(|n| n == p.name) => p.name.clone(),
                (Some(only), None) => only.to_string(),
                _ => {
                    return Err(Error::argument(
                        "--input",
                        format!(
                            "{source} has several arrays and none is called '{}': {}",
                            p.name,
                            z.names().map(name).collect::<Vec<_>>().join(", ")
                        ),
                    ));
                }
            };
            return from_archive(&z, &name, p, path);
        }
        _ if picture::format(bytes.as_ref()).is_some() => {
            let (data, note) = image::read(bytes.as_ref(), p, a, &source)?;
            return Ok(Input {
                name: p.name.clone(),
                source: format!("{source} ({note})"),
                data: data.into(),
            });
        }
        other => {
            let what = match (foreign::kind(bytes.as_ref()), other) {
                (Some(f), None) => format!("this is {f}, which is not an input"),
                (_, Some(k)) => format!("a file of kind \"{k}\" is not an input"),
                (None, None) => "a file of unknown kind is not an input".into(),
            };
            let next =
                "give .npy, .npz, .json, an ONNX .pb tensor or an image (PNG, JPEG, TIFF, WebP, BMP, PNM)";
            return Err(Error::Format { file: source, what: format!("{what}; {next}") });
        }
    };
    let value = convert_for(p, value, &source)?;
    Ok(Input { name: p.name.clone(), source, data: value.into() })
}

fn from_archive(z: &Npz, array: &str, p: &Port, path: &Path) -> Result<Input> {
    let source = format!("{}[{array}]", path.display());
    // Check the header first, so that an array that does not fit is not unpacked.
    let (dtype, dims) = z.head(array)?;
    check_fits(p, dtype, &dims, &source)?;
    let data = convert_for(p, z.get(array)?, &source)?;
    Ok(Input { name: p.name.clone(), source, data: data.into() })
}

/// Rejects an array whose dtype or sizes do not fit the input.
fn check_fits(p: &Port, dtype: DType, dims: &[usize], source: &str) -> Result<()> {
    let want = p.dtype()?;
    if dtype != want && dtype != npy::stand_in(want) {
        // This call fails with the error message about the dtype.
        return convert_for(p, ConstData::new(dtype, &[0], Arc::new(vec![]))?, source).map(drop);
    }
    let Some(shape) = p.shape() else { return Ok(()) };
    let same = shape.rank() == dims.len()
        && shape.iter().zip(dims).all(|(want, have)| want.known().is_none_or(|w| w == *have));
    if same {
        return Ok(());
    }
    let what = format!("input '{}' is {}, and {source} has {dtype}{dims:?}", name(&p.name), p.ty);
    Err(Error::argument("--input", what))
}

/// Checks the dtype of an input's data. Data is not converted, because whether a conversion is lossless would
/// depend on the file. The exceptions are dtypes that NumPy lacks: their values are read from a dtype that
/// represents all of them ([`npy::stand_in`]), and the conversion of each value must be exact.
fn convert_for(p: &Port, x: ConstData, source: &str) -> Result<ConstData> {
    let want = p.dtype()?;
    if x.dtype == want {
        return Ok(x);
    }
    let wrong = |want: String| {
        let what = format!("input '{}' is given {} by {source}: {want}", name(&p.name), x.dtype);
        Err(Error::argument("--input", what))
    };
    let stand_in = npy::stand_in(want);
    if stand_in != want && x.dtype == stand_in {
        let y = data::cast(&x, want)?;
        let same = |a: f64, b: f64| a == b || a.is_nan() && b.is_nan();
        let other = x.scalars().zip(y.scalars()).find(|(a, b)| !same(a.as_f64(), b.as_f64()));
        if let Some((a, _)) = other {
            return wrong(format!("the model takes {want}, which cannot represent {}", a.as_f64()));
        }
        return Ok(y);
    }
    wrong(format!(
        "the model takes {want} and data is not converted: {}",
        match want.row().npy {
            Some(d) => format!(
                "save it as that type, in NumPy with a.astype(\"{}\")",
                d.trim_start_matches(['<', '|'])
            ),
            None => format!("NumPy lacks that type, so give an ONNX .pb tensor, or the values as {stand_in}"),
        }
    ))
}

fn missing_error(missing: &[&Port]) -> Error {
    let lines: Vec<String> = missing
        .iter()
        .map(|p| {
            let dims = match p.shape() {
                Some(s) if s.rank() > 0 => {
                    s.iter().map(|d| d.known().unwrap_or(1).to_string()).collect::<Vec<_>>().join("x")
                }
                Some(_) => String::new(),
                None => "1x8".into(),
            };
            let (name, ty) = (name(&p.name), name(&p.ty.to_string()).into_owned());
            let file = match &p.ty {
                PortType::Text { .. } | PortType::Map(_) => {
                    return format!("  {name} {ty}    --input {name}=FILE.json");
                }
                _ if image::takes(p) => "PICTURE.png",
                _ => "FILE.npy",
            };
            format!("  {name} {ty}    --input {name}={file} or --input {name}=random:{dims}")
        })
        .collect();
    Error::argument("--input", format!("inputs of the model that are not given:\n{}", lines.join("\n")))
}

/// Records the size of a dimension that is a single symbol.
fn record_symbol(d: Dim, n: usize, known: &mut Bindings) {
    let mut names = BTreeSet::new();
    d.symbols(&mut names);
    if let Some(name) = names.pop_first()
        && names.is_empty()
        && d == Dim::sym(&name)
    {
        known.entry(name).or_insert(n);
    }
}

/// The declared shape, with each symbol replaced by its known size, or by 1.
fn default_dims(s: &Shape, known: &mut Bindings) -> Result<Vec<usize>> {
    let mut names = BTreeSet::new();
    s.iter().for_each(|d| d.symbols(&mut names));
    for n in names {
        known.entry(n).or_insert(1);
    }
    Ok(s.bind(known)?.dims()?.to_vec())
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

fn fill_values(f: Fill, name: &str, dtype: DType, dims: &[usize], seed: u64) -> Result<ConstData> {
    let bytes = data::byte_len(dtype, dims)
        .ok_or_else(|| Error::argument("--input", format!("{dtype}{dims:?} is too large to address")))?;
    let no_room = |free: u64, total: u64| Error::OutOfMemory {
        device: "the host".into(),
        what: format!("input '{name}' {dtype}{dims:?}"),
        requested: bytes as u64,
        free,
        total,
        next: "Give a smaller shape".into(),
    };
    // Linux overcommits memory and kills the process later, so free memory is checked first where the system
    // reports it.
    if let Some((free, total)) = report::host_memory()
        && bytes as u64 > free
    {
        return Err(no_room(free, total));
    }
    let mut out: Vec<u8> = vec![];
    out.try_reserve_exact(bytes).map_err(|_| no_room(0, 0))?;
    drop(out);
    let mut r = Random(seed);
    let values = (0..dims.iter().product::<usize>()).map(|_| match (f, dtype) {
        (Fill::Zeros, _) => Scalar::U(0),
        (Fill::Ones, _) => Scalar::U(1),
        (Fill::Random, DType::Bool) => Scalar::Bool(r.next() & 1 == 1),
        (Fill::Random, d) if d.is_int() => Scalar::U(r.next() % 10),
        // Multiples of 2^-24 below 1, which f32 represents exactly. (Narrower floats may round the largest to
        // 1.)
        (Fill::Random, _) => Scalar::F((r.next() >> 40) as f64 / (1u64 << 24) as f64),
    });
    ConstData::from_scalars(dtype, dims, values)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Args {
        #[command(flatten)]
        input: InputArgs,
    }

    fn inputs(specs: &[&str]) -> InputArgs {
        let words = ["x"].into_iter().chain(specs.iter().flat_map(|s| ["--input", *s]));
        Args::try_parse_from(words).unwrap().input
    }

    fn ports() -> Vec<Port> {
        let port = |name: &str, shape: Shape| Port {
            name: name.into(),
            ty: PortType::Tensor { dtype: DType::I64, shape: Some(shape) },
        };
        vec![port("ids", ["b", "s"].into()), port("mask", ["b", "s"].into())]
    }

    #[test]
    fn unnamed_inputs_take_the_remaining_ports_and_symbols_are_shared() {
        let v = resolve(&ports(), &inputs(&["ones:2x5", "ids=random:2x5"]), false).unwrap();
        assert_eq!(v[1].data.tensor().unwrap().to_vec::<i64>(), [1; 10]);
        assert!(v[0].data.tensor().unwrap().to_vec::<i64>().iter().all(|x| (0..10).contains(x)));

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a=b.npy");
        npy::write(&path, &ConstData::from_slice(&[1, 3], &[4i64, 5, 6]).unwrap()).unwrap();
        let v = resolve(&ports(), &inputs(&[path.to_str().unwrap(), "ones"]), false).unwrap();
        assert_eq!(v[0].data.tensor().unwrap().to_vec::<i64>(), [4, 5, 6]);
        assert_eq!(v[1].data.tensor().unwrap().dims.as_slice(), [1, 3]);
    }

    #[test]
    fn types_that_numpy_lacks_are_read_from_wider_types() {
        let port = |dtype| Port { name: "x".into(), ty: PortType::Tensor { dtype, shape: None } };
        let x = ConstData::from_slice(&[3], &[-8i8, 7, 0]).unwrap();
        let y = convert_for(&port(DType::I4), x.clone(), "f").unwrap();
        assert_eq!((y.dtype, y.bytes()), (DType::I4, &[0x78, 0x00][..]));
        let e = convert_for(&port(DType::I2), x.clone(), "f").unwrap_err();
        assert!(e.to_string().contains("cannot represent -8"), "{e}");
        assert!(convert_for(&port(DType::U4), x.clone(), "f").is_err());
        assert!(convert_for(&port(DType::I16), x, "f").is_err());
        let f = ConstData::from_slice(&[3], &[0.5f32, f32::NAN, 448.0]).unwrap();
        assert_eq!(convert_for(&port(DType::F8E4M3FN), f.clone(), "f").unwrap().bytes(), [0x30, 0x7f, 0x7e]);
        assert!(convert_for(&port(DType::F4E2M1), f, "f").is_err());
        let z = fill_values(Fill::Ones, "x", DType::U2, &[5], 0).unwrap();
        assert_eq!(z.bytes(), [0x55, 1]);
    }

    #[test]
    fn random_depends_on_the_seed_alone() {
        let f = |seed| fill_values(Fill::Random, "x", DType::F32, &[1000], seed).unwrap().to_vec::<f32>();
        assert_eq!(f(3), f(3));
        assert_ne!(f(3), f(4));
        let mean = f(3).iter().sum::<f32>() / 1000.0;
        assert!(f(3).iter().all(|x| (0.0..1.0).contains(x)) && (mean - 0.5).abs() < 0.05, "{mean}");
    }

    #[test]
    fn wrong_inputs_are_usage_errors_that_name_the_right_ones() {
        for (specs, part) in [
            (&["idz=zeros"][..], "it takes ids, mask"),
            (&["ids=zeros"], "--input mask=random:1x1"),
            (&["zeros", "zeros", "zeros"], "one too many"),
            (&["ids=zeros", "ids=ones"], "given twice"),
            (&["zeros:2y3", "zeros"], "is not a shape"),
        ] {
            let e = resolve(&ports(), &inputs(specs), false).unwrap_err();
            assert!(e.to_string().contains(part) && e.exit_code() == 2, "{specs:?}: {e}");
        }
        let e = resolve(&ports(), &inputs(&["zeros:100000000x100000", "ones"]), false).unwrap_err();
        assert_eq!(e.exit_code(), 5, "{e}");
    }
}
