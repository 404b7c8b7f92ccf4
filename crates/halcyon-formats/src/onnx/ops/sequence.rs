//! Operators on sequences and optionals, which exist during import only. The tensors in them are part of the
//! graph.

use super::text::StringTable;
use super::{Row, item_row};
use crate::onnx::build::{Builder, Value};
use crate::onnx::host::Host;
use crate::onnx::item::{Item, Text};
use crate::onnx::node::Call;
use halcyon_ir::{DType, Dim, Result};
use std::rc::Rc;

pub(super) const ROWS: &[Row] = &[
    item_row("ConcatFromSequence", 11, &["axis", "new_axis"], concat),
    item_row("Optional", 15, &["type"], optional),
    item_row("OptionalGetElement", 15, &[], get_element),
    item_row("OptionalHasElement", 15, &[], has_element),
    item_row("SequenceAt", 11, &[], |b, c| {
        let s = c.sequence(0)?;
        let i = position(b, c, c.arg(1)?, s.len(), s.len())?;
        Ok(vec![s.get(i).cloned().ok_or_else(|| c.invalid("the sequence is empty"))?])
    }),
    item_row("SequenceConstruct", 11, &[], |_, c| {
        let all = (0..c.inputs.len()).map(|i| c.item(i).cloned()).collect::<Result<_>>()?;
        let all = Item::sequence(all);
        nested(c, &all)?;
        Ok(vec![all])
    }),
    item_row("SequenceEmpty", 11, &["dtype"], |_, _| Ok(vec![Item::sequence(vec![])])),
    item_row("SequenceErase", 11, &[], erase),
    item_row("SequenceInsert", 11, &[], insert),
    item_row("SequenceLength", 11, &[], |_, c| {
        let n = c.sequence(0)?.len() as i64;
        Ok(vec![Value::from(Host::scalar(DType::I64, n)).into()])
    }),
    item_row("SequenceMap", 17, &["body"], map),
    item_row("SplitToSequence", 11, &["axis", "keepdims"], split),
];

/// Limit on the parts that a tensor is split into if their lengths are not given.
const PARTS: usize = 65_536;
/// Limit on the nesting of sequences and optionals, because they are walked recursively. Standard operators
/// need at most two levels.
const NESTED: usize = 8;

fn nested(c: &Call<'_>, i: &Item) -> Result<()> {
    match i.depth(NESTED + 1) > NESTED {
        true => {
            Err(c.unsupported(&format!("sequences nested deeper than {NESTED}"), "Nest them less deeply"))
        }
        false => Ok(()),
    }
}

/// Converts `v` to an index into a sequence of `n` elements. A negative `v` counts from the end. `v` must be
/// at least `-n`, and the index must be below `bound`.
fn position(b: &mut Builder, c: &Call<'_>, v: &Value, n: usize, bound: usize) -> Result<usize> {
    let p = b.known_scalar(v, "a position in a sequence")?.as_i64();
    let i = if p < 0 { p.saturating_add(n as i64) } else { p };
    usize::try_from(i)
        .ok()
        .filter(|i| *i < bound.max(1))
        .ok_or_else(|| c.invalid(format!("position {p} is outside a sequence of {n} elements")))
}

fn erase(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let mut s = c.sequence(0)?.to_vec();
    if s.is_empty() {
        return Err(c.invalid("the sequence is empty"));
    }
    let i = match c.opt(1) {
        None => s.len() - 1,
        Some(v) => position(b, c, v, s.len(), s.len())?,
    };
    s.remove(i);
    Ok(vec![Item::sequence(s)])
}

fn insert(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let mut s = c.sequence(0)?.to_vec();
    let i = match c.opt(2) {
        None => s.len(),
        Some(v) => position(b, c, v, s.len(), s.len() + 1)?,
    };
    nested(c, c.item(1)?)?;
    s.insert(i, c.item(1)?.clone());
    Ok(vec![Item::sequence(s)])
}

fn concat(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let s = c.sequence(0)?;
    let new = c.flag("new_axis", false)?;
    let axis = c.opt_int("axis")?.ok_or_else(|| c.invalid("attribute 'axis' is missing"))?;
    let mut parts = Vec::with_capacity(s.len());
    let words = StringTable::of(s.iter().filter_map(Item::text));
    let texts = s.iter().any(|i| i.text().is_some());
    for i in s {
        let v = match i {
            Item::Text(t) => words.coded(t)?,
            Item::Tensor(v) if !texts => v.clone(),
            i => {
                return Err(c.unsupported(
                    &format!("a sequence of {}", i.kind()),
                    "Only sequences of tensors of one type are joined",
                ));
            }
        };
        let axis = c.axis(axis, v.rank() + usize::from(new))?;
        let mut shape = v.shape().clone();
        if new {
            shape.0.insert(axis, Dim::from(1));
        }
        parts.push((axis, b.reshape(&v, shape)?));
    }
    let axis = parts.first().ok_or_else(|| c.invalid("the sequence is empty"))?.0;
    let y = b.concat(&parts.iter().map(|(_, v)| v).collect::<Vec<_>>(), axis)?;
    Ok(vec![if texts { words.read(b, &y)?.into() } else { y.into() }])
}

fn split(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    if let Some(t) = c.opt_item(0).and_then(Item::text) {
        return split_text(b, c, t);
    }
    let x = c.arg(0)?;
    let axis = c.axis(c.int("axis", 0)?, x.rank())?;
    let n = x.shape()[axis].known().ok_or_else(|| {
        c.unsupported("a split along an axis of unknown size", "Give concrete input shapes")
    })?;
    let sizes = sizes(b, c, n)?;
    let squeeze = c.opt_item(1).is_none() && !c.flag("keepdims", true)?;
    let (mut out, mut from) = (vec![], 0);
    for s in sizes {
        let mut v = b.narrow(x, axis, Dim::from(from), Dim::from(s))?;
        if squeeze {
            let mut shape = v.shape().clone();
            shape.0.remove(axis);
            v = b.reshape(&v, shape)?;
        }
        out.push(v.into());
        from += s;
    }
    Ok(vec![Item::sequence(out)])
}

/// The lengths of the parts that an axis of size `n` is split into.
fn sizes(b: &mut Builder, c: &Call<'_>, n: usize) -> Result<Vec<usize>> {
    let few = |parts: usize| match parts > PARTS {
        true => Err(c.unsupported(&format!("a split into {parts} parts"), "Split into fewer parts")),
        false => Ok(()),
    };
    let Some(v) = c.opt(1) else {
        few(n)?;
        return Ok(vec![1; n]);
    };
    let given = b.known_ints(v, "the lengths of a split")?;
    let bad = || c.invalid(format!("lengths {given:?} do not divide an axis of size {n}"));
    let size = |v: i64| usize::try_from(v).map_err(|_| bad());
    if v.rank() == 0 {
        let k = size(given[0])?;
        if k == 0 {
            return Err(bad());
        }
        few(n.div_ceil(k))?;
        return Ok((0..n).step_by(k).map(|i| k.min(n - i)).collect());
    }
    few(given.len())?;
    let all = given.iter().map(|v| size(*v)).collect::<Result<Vec<_>>>()?;
    match all.iter().try_fold(0usize, |s, v| s.checked_add(*v)) {
        Some(s) if s == n => Ok(all),
        _ => Err(bad()),
    }
}

fn split_text(b: &mut Builder, c: &Call<'_>, t: &Text) -> Result<Vec<Item>> {
    let axis = c.axis(c.int("axis", 0)?, t.dims.len())?;
    let sizes = sizes(b, c, t.dims[axis])?;
    let squeeze = c.opt_item(1).is_none() && !c.flag("keepdims", true)?;
    let (rows, inner): (usize, usize) =
        (t.dims[..axis].iter().product(), t.dims[axis + 1..].iter().product());
    let (mut out, mut from) = (vec![], 0);
    for s in sizes {
        let mut vals = Vec::with_capacity(rows * s * inner);
        for r in 0..rows {
            let at = (r * t.dims[axis] + from) * inner;
            vals.extend_from_slice(&t.vals[at..at + s * inner]);
        }
        let mut dims = t.dims.clone();
        if squeeze {
            dims.remove(axis);
        } else {
            dims[axis] = s;
        }
        out.push(Text { dims, vals }.into());
        from += s;
    }
    Ok(vec![Item::sequence(out)])
}

/// The results of the body for each element of the sequences. Operands that are not sequences are passed to
/// every call unchanged.
fn map(b: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let g = c.graph("body")?.ok_or_else(|| c.invalid("attribute 'body' is missing"))?;
    let n = c.sequence(0)?.len();
    let start = b.node_count();
    let mut out: Vec<Vec<Item>> = vec![vec![]; g.output.len()];
    for i in 0..n {
        let mut args = vec![];
        for k in 0..c.inputs.len() {
            args.push(match c.item(k)? {
                Item::Sequence(s) => {
                    s.get(i).cloned().ok_or_else(|| c.invalid("the sequences differ in length"))?
                }
                other => other.clone(),
            });
        }
        for (out, v) in out.iter_mut().zip(c.inline(b, g, args)?) {
            out.push(v);
        }
        b.pace(&[], start)?;
    }
    let out: Vec<Item> = out.into_iter().map(Item::sequence).collect();
    out.iter().try_for_each(|i| nested(c, i))?;
    Ok(out)
}

fn optional(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    c.opt_item(0).map_or(Ok(()), |i| nested(c, i))?;
    Ok(vec![Item::Optional(c.opt_item(0).cloned().map(Rc::new))])
}

fn get_element(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    match c.item(0)? {
        Item::Optional(None) => Err(c.invalid("the optional is empty")),
        Item::Optional(Some(i)) => Ok(vec![(**i).clone()]),
        // From opset 18 on, the operand may be the element itself.
        other => Ok(vec![other.clone()]),
    }
}

fn has_element(_: &mut Builder, c: &Call<'_>) -> Result<Vec<Item>> {
    let has = !matches!(c.opt_item(0), None | Some(Item::Optional(None)));
    Ok(vec![Value::from(Host::scalar(DType::Bool, has)).into()])
}
