//! LabelEncoder and CategoryMapper, and the labels of classifiers. Mappings between numbers are graph ops: a
//! binary search in the sorted keys. The graph cannot hold strings, so mappings from or to strings run on the
//! host.

use super::{DOMAIN, integers};
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Datum, Item};
use crate::onnx::node::Call;
use crate::onnx::ops::text::copies;
use crate::onnx::ops::{Row, item_row_in};
use halcyon_ir::ScalarOp as S;
use halcyon_ir::{ConstData, DType, Result, Scalar};
use std::collections::HashMap;

pub(crate) const ROWS: &[Row] = &[
    item_row_in(
        DOMAIN,
        "CategoryMapper",
        1,
        &["cats_int64s", "cats_strings", "default_int64", "default_string"],
        category_mapper,
    ),
    item_row_in(
        DOMAIN,
        "LabelEncoder",
        1,
        &[
            "classes_strings",
            "default_float",
            "default_int64",
            "default_string",
            "default_tensor",
            "keys_floats",
            "keys_int64s",
            "keys_strings",
            "keys_tensor",
            "values_floats",
            "values_int64s",
            "values_strings",
            "values_tensor",
        ],
        label_encoder,
    ),
];

/// Names of the two label attributes of a classifier.
pub(crate) const LABELS_INTS: [&str; 2] = ["classlabels_ints", "classlabels_strings"];
pub(crate) const LABELS_INT64S: [&str; 2] = ["classlabels_int64s", "classlabels_strings"];

/// The possible labels of a classifier.
#[derive(Debug)]
pub(crate) enum Classes {
    Ints(Vec<i64>),
    Texts(Vec<String>),
}

impl Classes {
    pub(crate) fn of(c: &Call<'_>, [ints, texts]: [&str; 2]) -> Result<Classes> {
        let i = c.ints(ints)?.filter(|v| !v.is_empty());
        let s = c.strings(texts)?.filter(|v| !v.is_empty());
        match (i, s) {
            (Some(v), None) => Ok(Classes::Ints(v.to_vec())),
            (None, Some(v)) => Ok(Classes::Texts(v)),
            _ => Err(c.invalid(format!("one of '{ints}' and '{texts}' must be given"))),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Classes::Ints(v) => v.len(),
            Classes::Texts(v) => v.len(),
        }
    }
}

/// The labels of `classes` at the indices `place`, of shape `[N]`.
pub(crate) fn labels(b: &mut Builder, c: &Call<'_>, classes: &Classes, place: &Value) -> Result<Item> {
    match classes {
        Classes::Ints(v) => {
            let v = integers(DType::I64, &[v.len()], v.iter().copied())?;
            Ok(b.gather(&v, place, 0)?.into())
        }
        Classes::Texts(v) => {
            let at = b.fetch(place, "the indices of the labels")?;
            let text = |s: Scalar| {
                let i = usize::try_from(s.as_i64()).ok();
                i.and_then(|i| v.get(i))
                    .map(String::as_str)
                    .ok_or_else(|| c.invalid("an index outside of the list of labels"))
            };
            Ok(copies(&at.dims, at.scalars().map(text))?.into())
        }
    }
}

/// The keys or the values of a mapping.
enum Column {
    Numbers(ConstData),
    Texts(Vec<String>),
}

impl Column {
    fn len(&self) -> usize {
        match self {
            Column::Numbers(d) => d.numel(),
            Column::Texts(v) => v.len(),
        }
    }

    /// Reads the attribute `side_floats`, `side_int64s`, `side_strings` or `side_tensor`. Also returns which
    /// kind it is: "float", "int64", "string" or "tensor".
    fn of(c: &Call<'_>, side: &str) -> Result<(Column, &'static str)> {
        let mut found = vec![];
        if let Some(v) = c.floats(&format!("{side}_floats"))? {
            found.push((Column::Numbers(ConstData::from_slice(&[v.len()], v)?), "float"));
        }
        if let Some(v) = c.ints(&format!("{side}_int64s"))? {
            found.push((Column::Numbers(ConstData::from_slice(&[v.len()], v)?), "int64"));
        }
        if let Some(v) = c.strings(&format!("{side}_strings"))? {
            found.push((Column::Texts(v), "string"));
        }
        match c.datum(&format!("{side}_tensor"))? {
            Some(Datum::Text(t)) => found.push((Column::Texts(t.vals), "tensor")),
            Some(Datum::Tensor(t)) => found.push((Column::Numbers(t), "tensor")),
            Some(_) | None => {}
        }
        // Some exporters write unused attributes as empty lists.
        if found.len() > 1 {
            found.retain(|f| f.0.len() > 0);
        }
        match found.pop() {
            Some(f) if found.is_empty() => Ok(f),
            _ => Err(c.invalid(format!("exactly one attribute '{side}_…' must be given"))),
        }
    }
}

/// The result for inputs that are not a key.
struct Default {
    number: Scalar,
    text: String,
}

fn default(c: &Call<'_>, kind: &str, dtype: Option<DType>) -> Result<Default> {
    let plain = if dtype.is_some_and(|d| d.is_float()) { Scalar::F(-0.0) } else { Scalar::I(-1) };
    let mut d = Default { number: plain, text: c.string("default_string", "_Unused")?.into() };
    match kind {
        "float" => d.number = Scalar::F(c.float("default_float", -0.0)?.into()),
        "int64" => d.number = Scalar::I(c.int("default_int64", -1)?),
        "tensor" => match c.datum("default_tensor")? {
            None => d.text = "_Unused".into(),
            Some(Datum::Tensor(t)) if t.numel() == 1 && Some(t.dtype) == dtype => {
                d.number = t.get(0).unwrap_or(plain);
            }
            Some(Datum::Text(t)) if t.vals.len() == 1 && dtype.is_none() => d.text = t.vals[0].clone(),
            Some(other) => {
                return Err(c.invalid(format!(
                    "'default_tensor' is {}, not one element of the values' type",
                    other.describe()
                )));
            }
        },
        _ => {}
    }
    Ok(d)
}

fn label_encoder(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    if c.opset < 2 {
        let texts = c.strings("classes_strings")?.unwrap_or_default();
        let places: Vec<i64> = (0..texts.len() as i64).collect();
        return between(b, c, &places, texts);
    }
    let (keys, _) = Column::of(c, "keys")?;
    let (values, kind) = Column::of(c, "values")?;
    if keys.len() != values.len() {
        return Err(c.invalid(format!("{} keys for {} values", keys.len(), values.len())));
    }
    let dtype = match &values {
        Column::Numbers(d) => Some(d.dtype),
        Column::Texts(_) => None,
    };
    let default = default(c, kind, dtype)?;
    // If a key occurs several times, its last entry counts from version 4 on, and its first entry before.
    let last = c.opset >= 4;
    Ok(vec![lookup(b, c, c.item(0)?, &keys, &values, &default, last)?])
}

/// Version 1 of LabelEncoder, and CategoryMapper: maps strings to integers or integers to strings.
fn between(b: &mut Builder, c: &Call<'_>, ints: &[i64], texts: Vec<String>) -> Result<Vec<Item>> {
    if ints.len() != texts.len() {
        return Err(c.invalid(format!("{} integers for {} strings", ints.len(), texts.len())));
    }
    let ints = Column::Numbers(ConstData::from_slice(&[ints.len()], ints)?);
    let texts = Column::Texts(texts);
    let default = Default {
        number: Scalar::I(c.int("default_int64", -1)?),
        text: c.string("default_string", "_Unused")?.into(),
    };
    let x = c.item(0)?;
    let (keys, values) = if x.text().is_some() { (&texts, &ints) } else { (&ints, &texts) };
    Ok(vec![lookup(b, c, x, keys, values, &default, false)?])
}

fn category_mapper(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let ints = c.ints("cats_int64s")?.unwrap_or(&[]);
    between(b, c, ints, c.strings("cats_strings")?.unwrap_or_default())
}

/// A number as a hash key: all NaNs are equal, and so are the two zeros.
fn key(s: Scalar) -> u64 {
    match s {
        Scalar::F(v) if v.is_nan() => f64::NAN.to_bits(),
        Scalar::F(v) => (v + 0.0).to_bits(),
        s => s.as_i64() as u64,
    }
}

fn index<K: std::hash::Hash + Eq>(keys: impl Iterator<Item = K>, last: bool) -> HashMap<K, usize> {
    let mut at = HashMap::new();
    for (i, k) in keys.enumerate() {
        if last {
            at.insert(k, i);
        } else {
            at.entry(k).or_insert(i);
        }
    }
    at
}

fn lookup(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Item,
    keys: &Column,
    values: &Column,
    default: &Default,
    last: bool,
) -> Result<Item> {
    let (dims, at): (Vec<usize>, Vec<Option<usize>>) = match (x, keys) {
        (Item::Tensor(x), Column::Numbers(k)) => {
            if x.dtype() != k.dtype {
                return Err(c.invalid(format!("keys of type {} for the operand {}", k.dtype, x.ty)));
            }
            if let Column::Numbers(v) = values {
                return Ok(search(b, c, x, k, v, default.number, last)?.into());
            }
            let at = index(k.scalars().map(key), last);
            let x = b.fetch(x, "the operand of a lookup of strings")?;
            (x.dims.to_vec(), x.scalars().map(|s| at.get(&key(s)).copied()).collect())
        }
        (Item::Text(x), Column::Texts(k)) => {
            let at = index(k.iter().map(String::as_str), last);
            (x.dims.clone(), x.vals.iter().map(|s| at.get(s.as_str()).copied()).collect())
        }
        (x, _) => return Err(c.invalid(format!("the keys do not have the type of {}", x.kind()))),
    };
    match values {
        Column::Texts(v) => {
            let text = |i: &Option<usize>| Ok(i.map_or(default.text.as_str(), |i| &v[i]));
            Ok(copies(&dims, at.iter().map(text))?.into())
        }
        Column::Numbers(v) => {
            let of = |i: Option<usize>| i.and_then(|i| v.get(i)).unwrap_or(default.number);
            let y = data::from_scalars(v.dtype, &dims, at.into_iter().map(of))?;
            Ok(b.feed(y).into())
        }
    }
}

/// Maps numbers to numbers, in the graph.
fn search(
    b: &mut Builder,
    c: &Call<'_>,
    x: &Value,
    keys: &ConstData,
    values: &ConstData,
    default: Scalar,
    last: bool,
) -> Result<Value> {
    let at = index(keys.scalars().map(key), last);
    let missing = || c.invalid("keys and values do not match");
    let mut rows: Vec<(Scalar, Scalar)> = Vec::with_capacity(at.len());
    let mut of_nan = None;
    for i in at.into_values() {
        let (k, v) = (keys.get(i).ok_or_else(missing)?, values.get(i).ok_or_else(missing)?);
        match k {
            Scalar::F(f) if f.is_nan() => of_nan = Some(v),
            k => rows.push((k, v)),
        }
    }
    rows.sort_by(|(a, _), (b, _)| match (a, b) {
        (Scalar::F(a), Scalar::F(b)) => a.total_cmp(b),
        (a, b) => a.as_i64().cmp(&b.as_i64()),
    });
    let otherwise: Value = b.full(values.dtype, &halcyon_ir::Shape::scalar(), default);
    let mut y = match rows.last().copied() {
        None => b.expand(&otherwise, x.shape())?,
        Some(top) => {
            // Padded to a power of two, so that the search needs no bounds check.
            let n = rows.len().next_power_of_two();
            rows.resize(n, top);
            let table = |d: DType, v: Vec<Scalar>| -> Result<Value> {
                Ok(Value::table(data::from_scalars(d, &[n], v)?))
            };
            let k = table(keys.dtype, rows.iter().map(|r| r.0).collect())?;
            let v = table(values.dtype, rows.iter().map(|r| r.1).collect())?;
            let mut at = b.full(DType::I32, x.shape(), Scalar::I(0));
            let mut half = n / 2;
            while half > 0 {
                let next = b.lit(&at, half);
                let next = b.scalar(S::Add, &[&at, &next])?;
                let at_next = b.gather(&k, &next, 0)?;
                let under = b.scalar(S::Le, &[&at_next, x])?;
                at = b.scalar(S::Select, &[&under, &next, &at])?;
                half /= 2;
            }
            let found = b.gather(&k, &at, 0)?;
            let found = b.scalar(S::Eq, &[&found, x])?;
            let y = b.gather(&v, &at, 0)?;
            b.scalar(S::Select, &[&found, &y, &otherwise])?
        }
    };
    if let Some(v) = of_nan {
        let v: Value = b.full(values.dtype, &halcyon_ir::Shape::scalar(), v);
        let nan = b.scalar(S::IsNan, &[x])?;
        y = b.scalar(S::Select, &[&nan, &v, &y])?;
    }
    Ok(y)
}
