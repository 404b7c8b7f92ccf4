//! Operators on maps: ZipMap, DictVectorizer, CastMap.

use super::DOMAIN;
use crate::data;
use crate::onnx::build::{Builder, Value};
use crate::onnx::item::{Item, Keys, Text};
use crate::onnx::node::Call;
use crate::onnx::ops::text;
use crate::onnx::ops::{Row, item_row_in};
use halcyon_ir::{DType, Dim, Result, Scalar, Shape};
use std::collections::HashMap;
use std::rc::Rc;

pub(crate) const ROWS: &[Row] = &[
    item_row_in(DOMAIN, "CastMap", 1, &["cast_to", "map_form", "max_map"], cast_map),
    item_row_in(DOMAIN, "DictVectorizer", 1, &["int64_vocabulary", "string_vocabulary"], dict_vectorizer),
    item_row_in(DOMAIN, "ZipMap", 1, &["classlabels_int64s", "classlabels_strings"], zip_map),
];

/// The keys from the attributes `ints` or `texts`, exactly one of which is given.
fn keys(c: &Call<'_>, ints: &str, texts: &str) -> Result<Keys> {
    let i = c.ints(ints)?.filter(|v| !v.is_empty());
    let s = c.strings(texts)?.filter(|v| !v.is_empty());
    match (i, s) {
        (Some(v), None) => Ok(Keys::Ints(v.to_vec())),
        (None, Some(v)) => Ok(Keys::Texts(v)),
        _ => Err(c.invalid(format!("one of '{ints}' and '{texts}' must be given"))),
    }
}

fn len(keys: &Keys) -> usize {
    match keys {
        Keys::Ints(v) => v.len(),
        Keys::Texts(v) => v.len(),
    }
}

/// Returns a map for each row of `[N, C]` (or one map for `[C]`), with the keys of the attribute.
fn zip_map(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let keys = keys(c, "classlabels_int64s", "classlabels_strings")?;
    let n = len(&keys);
    let x = c.arg(0)?;
    if !matches!(x.rank(), 1 | 2) || x.shape().last().is_none_or(|d| d.known().is_some_and(|d| d != n)) {
        return Err(c.invalid(format!("{n} keys do not fit the input {}; expected [N, {n}] or [{n}]", x.ty)));
    }
    let x = b.fetch(x, "the values of ZipMap")?;
    if x.numel() > text::MAX_STRINGS {
        return Err(c.unsupported(
            "so many entries of maps",
            &format!("At most {} are supported", text::MAX_STRINGS),
        ));
    }
    let vals: Vec<Scalar> = x.scalars().collect();
    let mut maps = Vec::with_capacity(vals.len() / n);
    for row in vals.chunks_exact(n) {
        let row = Value::table(data::from_scalars(x.dtype, &[n], row.iter().copied())?);
        maps.push(Item::Map(Rc::new((keys.clone(), row.into()))));
    }
    Ok(vec![Item::sequence(maps)])
}

/// Keys and values of the operand, which must be a map.
fn map<'a>(c: &Call<'a>) -> Result<&'a (Keys, Item)> {
    match c.item(0)? {
        Item::Map(m) => Ok(m),
        other => Err(c.invalid(format!("the operand is {}, not a map", other.kind()))),
    }
}

/// The values of a map, one per key.
enum Values<'a> {
    Numbers(&'a Value),
    Texts(&'a [String]),
}

fn values<'a>(c: &Call<'a>, m: &'a (Keys, Item)) -> Result<Values<'a>> {
    let n = len(&m.0);
    match &m.1 {
        Item::Tensor(v) if v.shape().numel().is(n) => Ok(Values::Numbers(v)),
        Item::Text(t) if t.vals.len() == n => Ok(Values::Texts(&t.vals)),
        other => Err(c.invalid(format!(
            "the values of a map with {n} keys are {}, not a tensor of {n} elements",
            other.kind()
        ))),
    }
}

/// Gathers a result from the map's values. For each element of the result, `at` gives the index of its value.
/// Elements without a value are 0 or an empty string.
fn place(b: &mut Builder, v: Values<'_>, at: &[Option<usize>]) -> Result<Item> {
    let dims = [1, at.len()];
    match v {
        Values::Texts(t) => {
            Ok(text::copies(&dims, at.iter().map(|i| Ok(i.map_or("", |i| t[i].as_str()))))?.into())
        }
        Values::Numbers(v) => {
            let n = v.shape().numel();
            let v = b.reshape(v, Shape::from_iter([n]))?;
            let zero = b.full(v.dtype(), &Shape::from_iter([Dim::from(1)]), Scalar::I(0));
            let v = b.concat(&[&v, &zero], 0)?;
            let none = n.known().unwrap_or(0);
            let index = at.iter().map(|i| i.unwrap_or(none) as i64);
            let index = super::integers(DType::I64, &dims, index)?;
            Ok(b.gather(&v, &index, 0)?.into())
        }
    }
}

/// `[1, V]`: the value of each key in the vocabulary.
fn dict_vectorizer(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let words = keys(c, "int64_vocabulary", "string_vocabulary")?;
    let m = map(c)?;
    let n = len(&words);
    let mut at = vec![None; n];
    let unknown = |k: &dyn std::fmt::Debug| c.invalid(format!("the key {k:?} is not in the vocabulary"));
    match (&words, &m.0) {
        (Keys::Ints(w), Keys::Ints(k)) => {
            let find: HashMap<i64, usize> = w.iter().enumerate().map(|(i, w)| (*w, i)).collect();
            for (i, k) in k.iter().enumerate() {
                at[*find.get(k).ok_or_else(|| unknown(k))?] = Some(i);
            }
        }
        (Keys::Texts(w), Keys::Texts(k)) => {
            let find: HashMap<&str, usize> = w.iter().enumerate().map(|(i, w)| (w.as_str(), i)).collect();
            for (i, k) in k.iter().enumerate() {
                at[*find.get(k.as_str()).ok_or_else(|| unknown(k))?] = Some(i);
            }
        }
        _ => return Err(c.invalid("the keys do not have the type of the vocabulary")),
    }
    Ok(vec![place(b, values(c, m)?, &at)?])
}

/// `[1, N]`: the values in the order of their keys (`DENSE`), or each at the index given by its key
/// (`SPARSE`).
fn cast_map(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let m = map(c)?;
    let Keys::Ints(keys) = &m.0 else {
        return Err(c.invalid("the keys are strings, not integers"));
    };
    let mut order: Vec<usize> = (0..keys.len()).collect();
    order.sort_by_key(|i| keys[*i]);
    let at: Vec<Option<usize>> = match c.string("map_form", "DENSE")? {
        "DENSE" => order.into_iter().map(Some).collect(),
        "SPARSE" => {
            let n = usize::try_from(c.int("max_map", 1)?).ok().filter(|n| *n <= i32::MAX as usize);
            let n = n.ok_or_else(|| c.invalid("'max_map' must be from 0 to 2147483647"))?;
            if n > 1 << 24 {
                return Err(c.unsupported(&format!("a max_map of {n}"), "Up to 16777216 is supported"));
            }
            let mut at = vec![None; n];
            for i in order {
                let p = usize::try_from(keys[i]).ok().filter(|p| *p < n);
                at[p.ok_or_else(|| c.invalid(format!("the key {} is not below max_map {n}", keys[i])))?] =
                    Some(i);
            }
            at
        }
        other => return Err(c.invalid(format!("there is no map_form '{other}'"))),
    };
    let to = match c.string("cast_to", "TO_FLOAT")? {
        "TO_FLOAT" => Some(DType::F32),
        "TO_INT64" => Some(DType::I64),
        "TO_STRING" => None,
        other => return Err(c.invalid(format!("there is no cast_to '{other}'"))),
    };
    let y = match (place(b, values(c, m)?, &at)?, to) {
        (Item::Tensor(v), Some(to)) => b.cast(&v, to)?.into(),
        (Item::Text(t), None) => Item::Text(t),
        (Item::Text(t), Some(to)) => {
            let mut vals = Vec::with_capacity(t.vals.len());
            for (s, at) in t.vals.iter().zip(&at) {
                vals.push(if at.is_some() { text::number(c, s, to)? } else { Scalar::I(0) });
            }
            b.feed(data::from_scalars(to, &t.dims, vals)?).into()
        }
        (Item::Tensor(v), None) => {
            let v = b.fetch(&v, "the values of CastMap")?;
            let spelled = v.scalars().zip(&at).map(|(s, at)| match at {
                Some(_) => text::spell(s, v.dtype),
                None => String::new(),
            });
            Text::new(&v.dims, spelled.collect())?.into()
        }
        (other, _) => other,
    };
    Ok(vec![y])
}
