//! The tensors that an output consists of.

use crate::json::Values;
use crate::report::summary;
use halcyon::ConstData;
use halcyon_formats::onnx::{Datum, Keys, Text};
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

/// A part of an output that is printed and saved by itself. Outputs that are sequences or maps have several.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Leaf<'a> {
    Tensor(&'a ConstData),
    Text(&'a Text),
    /// The keys of a map.
    Keys(&'a Keys),
    /// An optional without a value.
    None,
}

/// The parts of an output with their names: `out` for a tensor, `out.0`, `out.1` for a sequence, `out.keys`
/// and `out.values` for a map.
pub(crate) fn leaves<'a>(name: &str, d: &'a Datum) -> Vec<(String, Leaf<'a>)> {
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

pub(crate) fn key_type(k: &Keys) -> &'static str {
    if matches!(k, Keys::Ints(_)) { "i64" } else { "string" }
}

pub(crate) fn key_json(k: &Keys) -> Vec<Value> {
    match k {
        Keys::Ints(k) => k.iter().map(|k| json!(k)).collect(),
        Keys::Texts(k) => k.iter().map(|k| json!(k)).collect(),
    }
}

/// An output as JSON: name, type, shape and every value.
#[derive(Debug)]
pub(crate) struct LeafJson<'a> {
    pub name: &'a str,
    pub leaf: Leaf<'a>,
    /// Whether to include statistics of the values.
    pub summary: bool,
    pub more: Map<String, Value>,
}

impl Serialize for LeafJson<'_> {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut m = s.serialize_map(None)?;
        m.serialize_entry("name", self.name)?;
        match self.leaf {
            Leaf::Tensor(x) => {
                m.serialize_entry("dtype", &x.dtype)?;
                m.serialize_entry("shape", x.dims.as_slice())?;
                if self.summary {
                    m.serialize_entry("summary", &summary(x).json(x))?;
                }
                m.serialize_entry("values", &Values(x))?;
            }
            Leaf::Text(t) => {
                m.serialize_entry("dtype", "string")?;
                m.serialize_entry("shape", &t.dims)?;
                m.serialize_entry("values", &t.vals)?;
            }
            Leaf::Keys(k) => {
                let keys = key_json(k);
                m.serialize_entry("dtype", key_type(k))?;
                m.serialize_entry("shape", &[keys.len()])?;
                m.serialize_entry("values", &keys)?;
            }
            Leaf::None => m.serialize_entry("dtype", &json!(null))?,
        }
        for (k, v) in &self.more {
            m.serialize_entry(k, v)?;
        }
        m.end()
    }
}
