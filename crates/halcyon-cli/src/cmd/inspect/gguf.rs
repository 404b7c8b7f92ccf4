//! `halcyon inspect` for GGUF files.

use super::show::{by_type_json, parameters, plural, weight_json, weight_rows};
use crate::args::InspectArgs;
use crate::report::{self, short, size, table};
use halcyon::Result;
use halcyon::summary::grouped;
use halcyon_formats::gguf::{Array, Gguf, Tensor, Value};
use halcyon_formats::onnx::Weight;
use serde_json::{Map, Value as Json, json};
use std::fmt::Write;

/// How many elements of an array are shown.
const FIRST: usize = 5;
/// Longest text of a value in characters.
const LONGEST: usize = 100;

pub(super) fn main(a: &InspectArgs) -> Result<()> {
    let f = Gguf::open(&a.file)?;
    let weights: Vec<Weight> = f.tensors().iter().map(weight).collect();
    if a.json { report::print_json(&json(a, &f, &weights)) } else { report::print(&text(a, &f, &weights)) }
}

fn weight(t: &Tensor) -> Weight {
    Weight {
        name: t.name().into(),
        dtype: t.ty().name().into(),
        dims: t.shape().iter().map(|d| *d as i64).collect(),
        elements: t.info.elements() as u64,
        bytes: t.data.len() as u64,
        external: false,
    }
}

fn architecture(f: &Gguf) -> Option<&str> {
    f.metadata().str("general.architecture").ok()
}

/// The last layers, which predict further tokens.
struct Ahead {
    layers: usize,
    parameters: u64,
    bytes: u64,
}

/// The layers that predict further tokens, if the file has some.
fn ahead(f: &Gguf) -> Option<Ahead> {
    let number = |key: &str| f.metadata().u64(&format!("{}.{key}", architecture(f)?)).ok();
    let count = number("nextn_predict_layers")?;
    let first = number("block_count")?.checked_sub(count)?;
    // Without it, the layer cannot be computed, and models are loaded without it.
    f.tensors().iter().find(|t| t.name() == format!("blk.{first}.nextn.eh_proj.weight"))?;
    let mut a = Ahead { layers: usize::try_from(count).ok()?, parameters: 0, bytes: 0 };
    for t in f.tensors() {
        let layer = t.name().strip_prefix("blk.").and_then(|n| n.split_once('.')).map(|n| n.0.parse::<u64>());
        if layer.is_some_and(|l| l.is_ok_and(|l| l >= first)) {
            a.parameters += t.info.elements() as u64;
            a.bytes += t.data.len() as u64;
        }
    }
    (a.parameters > 0).then_some(a)
}

fn text(a: &InspectArgs, f: &Gguf, weights: &[Weight]) -> String {
    let mut out = format!(
        "{}: GGUF version {}, {}{}\n",
        report::path_text(&a.file),
        f.version(),
        size(f.file_bytes()),
        if f.paths().len() > 1 { format!(" in {} files", f.paths().len()) } else { String::new() },
    );
    let _ = writeln!(out, "  architecture: {}", architecture(f).map_or("not given".into(), report::name));
    if let Some(a) = ahead(f) {
        let (layers, parameters) = (plural(a.layers, "layer"), grouped(a.parameters));
        let _ =
            writeln!(out, "  further tokens: {layers} (MTP) with {parameters} parameters, {}", size(a.bytes));
    }
    out += &parameters(weights);
    let keys = f.metadata().entries();
    let _ = writeln!(out, "\nmetadata: {}", plural(keys.len(), "value"));
    let rows = keys.iter().map(|(k, v)| vec![short(k, 80), v.type_name(), shown(v)]);
    out += &table(&rows.collect::<Vec<_>>());
    out += "\ntensors\n";
    out += &weight_rows(weights.iter());
    out
}

/// A value as text. An array is its first elements.
fn shown(v: &Value) -> String {
    let text = match v {
        Value::Array(a) => {
            let mut first: Vec<String> = elements(a).map(|v| one(&v)).collect();
            if a.len() > FIRST {
                first.push("…".into());
            }
            format!("[{}]", first.join(", "))
        }
        Value::String(s) => s.clone(),
        v => one(v),
    };
    short(&text, LONGEST)
}

/// An element of an array as text. Strings are quoted, since they may contain commas and spaces.
fn one(v: &Value) -> String {
    match v {
        Value::Array(a) => a.type_name(),
        Value::String(s) => format!("{:?}", short(s, LONGEST)),
        Value::Bytes(b) => format!("{} bytes that are not UTF-8", b.len()),
        // The shortest form: 1e-5 and not 0.00001.
        Value::F32(v) => format!("{v:?}"),
        Value::F64(v) => format!("{v:?}"),
        v => value_json(v).to_string(),
    }
}

fn elements(a: &Array) -> impl Iterator<Item = Value> + '_ {
    (0..FIRST).map_while(|i| a.get(i))
}

fn json(a: &InspectArgs, f: &Gguf, weights: &[Weight]) -> Json {
    let metadata: Map<String, Json> =
        f.metadata().entries().iter().map(|(k, v)| (k.clone(), value_json(v))).collect();
    json!({
        "file": report::path(&a.file),
        "kind": "GGUF",
        "version": f.version(),
        "alignment": f.alignment(),
        "bytes": f.file_bytes(),
        "files": f.paths().iter().map(|p| report::path(p)).collect::<Vec<_>>(),
        "architecture": architecture(f),
        "metadata": metadata,
        "parameters": by_type_json(weights),
        "further_tokens": ahead(f).map(|a| {
            json!({ "layers": a.layers, "parameters": a.parameters, "bytes": a.bytes })
        }),
        "tensors": weights.iter().map(weight_json).collect::<Vec<_>>(),
    })
}

/// A value as JSON. An array is an object with its type, its length and its first elements. JSON has no NaN
/// and no infinities, so these are strings; so are numbers of bytes that are not text.
fn value_json(v: &Value) -> Json {
    match v {
        Value::U8(v) => (*v).into(),
        Value::I8(v) => (*v).into(),
        Value::U16(v) => (*v).into(),
        Value::I16(v) => (*v).into(),
        Value::U32(v) => (*v).into(),
        Value::I32(v) => (*v).into(),
        Value::U64(v) => (*v).into(),
        Value::I64(v) => (*v).into(),
        // The shortest decimal number that is this f32: 1e-5 and not 0.000009999999747378752.
        Value::F32(v) => float(v.to_string()),
        Value::F64(v) => float(v.to_string()),
        Value::Bool(v) => (*v).into(),
        Value::String(s) => s.as_str().into(),
        Value::Bytes(_) => one(v).into(),
        Value::Array(a) => json!({
            "type": a.element_type(),
            "count": a.len(),
            "first": elements(a).map(|v| value_json(&v)).collect::<Vec<_>>(),
        }),
    }
}

fn float(text: String) -> Json {
    let number = text.parse().ok().and_then(serde_json::Number::from_f64);
    number.map_or_else(|| Json::String(text), Json::Number)
}
