//! The values of a model: tensors, tensors of strings, sequences, optionals and maps. [`Item`] is a value
//! during import, and [`Datum`] is a value outside of the importer.

use super::build::Value;
use super::model::PortType;
use super::proto::{
    MapProto, OptionalProto, SequenceProto, TensorProto, optional_kind as opt_kind, sequence_kind as seq_kind,
};
use super::tensor::{self, External};
use super::wire;
use crate::bad;
use bytes::Bytes;
use halcyon_ir::{ConstData, Error, Result};
use prost::Message;
use std::rc::Rc;

/// A dense row-major tensor of strings.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Text {
    pub dims: Vec<usize>,
    pub vals: Vec<String>,
}

impl Text {
    /// # Errors
    /// [`Error::Shape`] if the number of strings does not match the sizes.
    pub fn new(dims: &[usize], vals: Vec<String>) -> Result<Text> {
        match dims.iter().try_fold(1usize, |n, d| n.checked_mul(*d)) {
            Some(n) if n == vals.len() => Ok(Text { dims: dims.to_vec(), vals }),
            _ => Err(Error::shape("strings", format!("{} strings do not fill {dims:?}", vals.len()))),
        }
    }
}

/// Keys of a map.
#[derive(Clone, Debug, PartialEq)]
pub enum Keys {
    Ints(Vec<i64>),
    Texts(Vec<String>),
}

/// A value during import. Only tensors are ever part of the graph.
#[derive(Clone, Debug)]
pub enum Item {
    Tensor(Value),
    Text(Rc<Text>),
    Sequence(Rc<Vec<Item>>),
    Optional(Option<Rc<Item>>),
    /// A map: the keys, and one tensor (or tensor of strings) with a value per key.
    Map(Rc<(Keys, Item)>),
}

impl From<Value> for Item {
    fn from(v: Value) -> Item {
        Item::Tensor(v)
    }
}

impl From<Text> for Item {
    fn from(t: Text) -> Item {
        Item::Text(Rc::new(t))
    }
}

impl Item {
    /// Describes the value's type in messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Item::Tensor(_) => "a tensor",
            Item::Text(_) => "a tensor of strings",
            Item::Sequence(_) => "a sequence",
            Item::Optional(_) => "an optional",
            Item::Map(_) => "a map",
        }
    }

    pub fn sequence(v: Vec<Item>) -> Item {
        Item::Sequence(Rc::new(v))
    }

    pub fn tensor(&self) -> Option<&Value> {
        match self {
            Item::Tensor(v) => Some(v),
            _ => None,
        }
    }

    pub fn text(&self) -> Option<&Text> {
        match self {
            Item::Text(t) => Some(t),
            _ => None,
        }
    }

    /// Nesting depth of sequences, optionals and maps, counted up to `most`.
    pub(super) fn depth(&self, most: usize) -> usize {
        let inner = |i: &Item| i.depth(most - 1) + 1;
        match self {
            _ if most == 0 => 0,
            Item::Sequence(s) => s.iter().map(inner).max().unwrap_or(1),
            Item::Optional(o) => o.as_ref().map_or(1, |i| inner(i)),
            Item::Map(m) => inner(&m.1),
            Item::Tensor(_) | Item::Text(_) => 0,
        }
    }

    /// Appends all tensors inside the value to `out`.
    pub(super) fn tensors<'a>(&'a self, out: &mut Vec<&'a Value>) {
        match self {
            Item::Tensor(v) => out.push(v),
            Item::Sequence(s) => s.iter().for_each(|i| i.tensors(out)),
            Item::Optional(Some(i)) => i.tensors(out),
            Item::Map(m) => m.1.tensors(out),
            Item::Text(_) | Item::Optional(None) => {}
        }
    }
}

/// A value on the host: an input or output of a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Datum {
    Tensor(ConstData),
    Text(Text),
    Sequence(Vec<Datum>),
    Optional(Option<Box<Datum>>),
    Map(Keys, Box<Datum>),
}

impl From<ConstData> for Datum {
    fn from(d: ConstData) -> Datum {
        Datum::Tensor(d)
    }
}

impl Datum {
    pub fn tensor(&self) -> Option<&ConstData> {
        match self {
            Datum::Tensor(t) => Some(t),
            _ => None,
        }
    }

    /// Describes the value in messages: `f32[2, 3]`, `a sequence of 2`.
    pub fn describe(&self) -> String {
        match self {
            Datum::Tensor(t) => format!("{}{:?}", t.dtype, t.dims.as_slice()),
            Datum::Text(t) => format!("string{:?}", t.dims),
            Datum::Sequence(s) => format!("a sequence of {}", s.len()),
            Datum::Optional(None) => "an empty optional".into(),
            Datum::Optional(Some(d)) => format!("an optional of {}", d.describe()),
            Datum::Map(Keys::Ints(k), _) => format!("a map with {} integer keys", k.len()),
            Datum::Map(Keys::Texts(k), _) => format!("a map with {} string keys", k.len()),
        }
    }

    /// Reads a `.pb` file with a value of type `ty`.
    ///
    /// # Errors
    /// The errors of [`tensor::read_pb`].
    pub fn read_pb(path: &std::path::Path, ty: &PortType) -> Result<Datum> {
        let file = path.display().to_string();
        Datum::parse_pb(crate::mmap::open(path)?, &External::in_folder_of(path), &file, ty)
    }

    /// Writes a `.pb` file that [`Datum::read_pb`] can read.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::Unsupported`] for a sequence with values of several kinds, and for an element
    /// type that ONNX lacks.
    pub fn write_pb(&self, path: &std::path::Path, name: &str) -> Result<()> {
        let bytes = match self {
            Datum::Tensor(t) => tensor::encode_known(t, name)?.encode_to_vec(),
            Datum::Text(t) => tensor::encode_text(t, name).encode_to_vec(),
            Datum::Sequence(s) => encode_sequence(s, name)?.encode_to_vec(),
            Datum::Optional(o) => encode_optional(o.as_deref(), name)?.encode_to_vec(),
            Datum::Map(k, v) => encode_map(k, v, name)?.encode_to_vec(),
        };
        crate::output::write(path, &bytes)
    }

    /// Like [`Datum::read_pb`], for bytes in memory.
    pub fn parse_pb(data: Bytes, external: &External, file: &str, ty: &PortType) -> Result<Datum> {
        let not = |e: prost::DecodeError| bad(file, format!("not an ONNX value: {e}"));
        wire::check(
            &data,
            match ty {
                PortType::Tensor { .. } | PortType::Text { .. } => wire::Kind::Tensor,
                PortType::Sequence(_) => wire::Kind::SequenceValue,
                PortType::Optional(_) => wire::Kind::OptionalValue,
                PortType::Map(_) => wire::Kind::MapValue,
            },
            file,
        )?;
        match ty {
            PortType::Tensor { .. } | PortType::Text { .. } => {
                value(&TensorProto::decode(data).map_err(not)?, external, file)
            }
            PortType::Sequence(_) => sequence(&SequenceProto::decode(data).map_err(not)?, external, file),
            PortType::Optional(of) => {
                // The file may contain the element without the optional around it.
                match OptionalProto::decode(data.clone()) {
                    Ok(o) => optional(&o, external, file),
                    Err(_) => Ok(Datum::Optional(Some(Box::new(Datum::parse_pb(data, external, file, of)?)))),
                }
            }
            PortType::Map(..) => map(&MapProto::decode(data).map_err(not)?, external, file),
        }
    }
}

fn value(t: &TensorProto, external: &External, file: &str) -> Result<Datum> {
    if t.data_type == tensor::STRING {
        return tensor::decode_text(t, file).map(Datum::Text);
    }
    tensor::decode(t, external, file).map(Datum::Tensor)
}

fn sequence(s: &SequenceProto, external: &External, file: &str) -> Result<Datum> {
    let all = match s.elem_type {
        seq_kind::UNDEFINED => vec![],
        seq_kind::TENSOR => {
            s.tensor_values.iter().map(|t| value(t, external, file)).collect::<Result<_>>()?
        }
        seq_kind::SEQUENCE => {
            s.sequence_values.iter().map(|v| sequence(v, external, file)).collect::<Result<_>>()?
        }
        seq_kind::MAP => s.map_values.iter().map(|v| map(v, external, file)).collect::<Result<_>>()?,
        seq_kind::OPTIONAL => {
            s.optional_values.iter().map(|v| optional(v, external, file)).collect::<Result<_>>()?
        }
        k => {
            return Err(Error::unsupported(
                format!("a sequence of element kind {k} in {file}"),
                "Use a sequence of tensors",
            ));
        }
    };
    Ok(Datum::Sequence(all))
}

fn optional(o: &OptionalProto, external: &External, file: &str) -> Result<Datum> {
    let missing = || bad(file, "an optional whose element type is given, but whose value is missing");
    let inner = match o.elem_type {
        opt_kind::UNDEFINED => return Ok(Datum::Optional(None)),
        opt_kind::TENSOR => value(o.tensor_value.as_ref().ok_or_else(missing)?, external, file)?,
        opt_kind::SEQUENCE => sequence(o.sequence_value.as_ref().ok_or_else(missing)?, external, file)?,
        opt_kind::MAP => map(o.map_value.as_ref().ok_or_else(missing)?, external, file)?,
        opt_kind::OPTIONAL => optional(o.optional_value.as_deref().ok_or_else(missing)?, external, file)?,
        k => {
            return Err(Error::unsupported(
                format!("an optional of element kind {k} in {file}"),
                "Use an optional tensor",
            ));
        }
    };
    Ok(Datum::Optional(Some(Box::new(inner))))
}

fn map(m: &MapProto, external: &External, file: &str) -> Result<Datum> {
    let keys = if m.key_type == tensor::STRING {
        let text = |b: &Bytes| {
            String::from_utf8(b.to_vec()).map_err(|_| bad(file, "a key of a map is not valid UTF-8"))
        };
        Keys::Texts(m.string_keys.iter().map(text).collect::<Result<_>>()?)
    } else {
        Keys::Ints(m.keys.clone())
    };
    let values = m.values.as_ref().ok_or_else(|| bad(file, "a map without values"))?;
    let values = match values.elem_type {
        seq_kind::TENSOR if values.tensor_values.len() == 1 => {
            value(&values.tensor_values[0], external, file)?
        }
        _ => sequence(values, external, file)?,
    };
    Ok(Datum::Map(keys, Box::new(values)))
}

fn encode_sequence(s: &[Datum], name: &str) -> Result<SequenceProto> {
    let mut p = SequenceProto { name: name.into(), ..Default::default() };
    for d in s {
        let kind = match d {
            Datum::Tensor(_) | Datum::Text(_) => seq_kind::TENSOR,
            Datum::Sequence(_) => seq_kind::SEQUENCE,
            Datum::Map(..) => seq_kind::MAP,
            Datum::Optional(_) => seq_kind::OPTIONAL,
        };
        if p.elem_type != seq_kind::UNDEFINED && p.elem_type != kind {
            return Err(Error::unsupported(
                format!("writing '{name}', a sequence whose values have different kinds, to a file"),
                "Use values of one kind",
            ));
        }
        p.elem_type = kind;
        match d {
            Datum::Tensor(t) => p.tensor_values.push(tensor::encode_known(t, "")?),
            Datum::Text(t) => p.tensor_values.push(tensor::encode_text(t, "")),
            Datum::Sequence(s) => p.sequence_values.push(encode_sequence(s, "")?),
            Datum::Map(k, v) => p.map_values.push(encode_map(k, v, "")?),
            Datum::Optional(o) => p.optional_values.push(encode_optional(o.as_deref(), "")?),
        }
    }
    Ok(p)
}

fn encode_optional(o: Option<&Datum>, name: &str) -> Result<OptionalProto> {
    let mut p = OptionalProto { name: name.into(), ..Default::default() };
    match o {
        None => {}
        Some(Datum::Tensor(t)) => {
            (p.elem_type, p.tensor_value) = (opt_kind::TENSOR, Some(tensor::encode_known(t, "")?));
        }
        Some(Datum::Text(t)) => {
            (p.elem_type, p.tensor_value) = (opt_kind::TENSOR, Some(tensor::encode_text(t, "")));
        }
        Some(Datum::Sequence(s)) => {
            (p.elem_type, p.sequence_value) = (opt_kind::SEQUENCE, Some(encode_sequence(s, "")?));
        }
        Some(Datum::Map(k, v)) => (p.elem_type, p.map_value) = (opt_kind::MAP, Some(encode_map(k, v, "")?)),
        Some(Datum::Optional(o)) => {
            let inner = encode_optional(o.as_deref(), "")?;
            (p.elem_type, p.optional_value) = (opt_kind::OPTIONAL, Some(Box::new(inner)));
        }
    }
    Ok(p)
}

fn encode_map(k: &Keys, v: &Datum, name: &str) -> Result<MapProto> {
    let mut p = MapProto { name: name.into(), ..Default::default() };
    match k {
        Keys::Ints(k) => (p.key_type, p.keys) = (halcyon_ir::DType::I64.row().onnx, k.clone()),
        Keys::Texts(k) => {
            p.key_type = tensor::STRING;
            p.string_keys = k.iter().map(|k| Bytes::copy_from_slice(k.as_bytes())).collect();
        }
    }
    p.values = Some(encode_sequence(std::slice::from_ref(v), "")?);
    Ok(p)
}
