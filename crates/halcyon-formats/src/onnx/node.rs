//! The interface through which importer functions read one node.

use super::build::{Builder, Value};
use super::import::{Scope, Walk};
use super::item::{Datum, Item, Text};
use super::proto::{AttributeProto, GraphProto, NodeProto, attribute};
use super::sparse::{self, Sparse};
use super::tensor::{self, External};
use crate::bad;
use halcyon_ir::{ConstData, DType, Error, Result, Span};
use std::collections::HashMap;

/// A node with its operands. The methods that read an attribute fail if it has the wrong type, and return
/// `None` or the default if it is missing.
#[derive(Debug)]
pub struct Call<'a> {
    pub node: &'a NodeProto,
    /// The node's name, or its operator and index if it has none.
    pub name: &'a str,
    /// Version of the operator set that the node belongs to.
    pub opset: i64,
    pub inputs: &'a [Option<Item>],
    pub(super) walk: &'a Walk<'a>,
    pub(super) scope: &'a Scope<'a>,
    pub(super) external: &'a External,
    pub(super) file: &'a str,
}

impl<'a> Call<'a> {
    /// Operand `i`, which must be present and a tensor.
    pub fn arg(&self, i: usize) -> Result<&'a Value> {
        let item = self.item(i)?;
        item.tensor().ok_or_else(|| self.invalid(format!("operand {i} is {}, not a tensor", item.kind())))
    }

    /// Operand `i` if it is present and a tensor. (All operands of operators registered with `row` are
    /// tensors.)
    pub fn opt(&self, i: usize) -> Option<&'a Value> {
        self.opt_item(i).and_then(|v| v.tensor())
    }

    /// Operand `i` of any kind, which must be present.
    pub fn item(&self, i: usize) -> Result<&'a Item> {
        self.opt_item(i).ok_or_else(|| self.invalid(format!("operand {i} is missing")))
    }

    /// Operand `i` of any kind, if it is present.
    pub fn opt_item(&self, i: usize) -> Option<&'a Item> {
        self.inputs.get(i).and_then(|v| v.as_ref())
    }

    /// Operand `i`, which must be a tensor of strings.
    pub fn text(&self, i: usize) -> Result<&'a Text> {
        let item = self.item(i)?;
        item.text().ok_or_else(|| self.invalid(format!("operand {i} is {}, not strings", item.kind())))
    }

    /// Operand `i`, which must be a sequence.
    pub fn sequence(&self, i: usize) -> Result<&'a [Item]> {
        match self.item(i)? {
            Item::Sequence(s) => Ok(s),
            other => Err(self.invalid(format!("operand {i} is {}, not a sequence", other.kind()))),
        }
    }

    /// A graph attribute.
    pub fn graph(&self, name: &str) -> Result<Option<&'a GraphProto>> {
        let Some(a) = self.attr(name, attribute::GRAPH)? else {
            return Ok(None);
        };
        let g = a.g.as_deref().ok_or_else(|| self.invalid(format!("attribute '{name}' holds no graph")))?;
        Ok(Some(g))
    }

    /// Builds a graph attribute for these operands and returns its results. Names that `g` does not define
    /// are looked up in the scope of this node.
    pub fn inline(&self, b: &mut Builder, g: &'a GraphProto, args: Vec<Item>) -> Result<Vec<Item>> {
        let span = b.g.span.clone();
        let out =
            self.walk.graph(b, g, args.into_iter().map(Some).collect(), Some(self.scope), self.scope.opsets);
        b.g.span = span;
        out
    }

    /// Like [`Call::inline`], but for a builder of another graph: names that `g` does not define are looked
    /// up in `vars` only.
    pub(super) fn inline_in(
        &self,
        b: &mut Builder,
        g: &'a GraphProto,
        args: Vec<Item>,
        vars: HashMap<String, Item>,
    ) -> Result<Vec<Item>> {
        let scope = Scope::alone(vars, self.scope.opsets);
        self.walk.graph(b, g, args.into_iter().map(Some).collect(), Some(&scope), self.scope.opsets)
    }

    /// The value of a name in the scope of this node.
    pub(super) fn outer_value(&self, name: &str) -> Option<&'a Item> {
        self.scope.get(name)
    }

    /// All operands. None may be missing.
    pub fn args(&self) -> Result<Vec<&'a Value>> {
        (0..self.inputs.len()).map(|i| self.arg(i)).collect()
    }

    /// Whether result `i` has a name. Results without a name cannot be read.
    pub fn is_result_used(&self, i: usize) -> bool {
        self.node.output.get(i).is_some_and(|o| !o.is_empty())
    }

    /// The tensor that a name refers to in the scope of this node.
    pub fn named(&self, name: &str) -> Result<&'a Value> {
        let item = self.scope.get(name);
        let item = item.ok_or_else(|| self.invalid(format!("'{name}' is not computed before this node")))?;
        item.tensor().ok_or_else(|| self.invalid(format!("'{name}' is {}, not a tensor", item.kind())))
    }

    fn attr(&self, name: &str, kind: i32) -> Result<Option<&'a AttributeProto>> {
        match self.node.attribute.iter().find(|a| a.name == name) {
            // Models before IR version 2 omit the attribute's type.
            Some(a) if a.r#type == kind || a.r#type == 0 => Ok(Some(a)),
            Some(a) => {
                Err(self.invalid(format!("attribute '{name}' has type {}, expected {kind}", a.r#type)))
            }
            None => Ok(None),
        }
    }

    pub fn int(&self, name: &str, default: i64) -> Result<i64> {
        Ok(self.attr(name, attribute::INT)?.map_or(default, |a| a.i))
    }

    pub fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.int(name, default.into())? != 0)
    }

    pub fn float(&self, name: &str, default: f32) -> Result<f32> {
        Ok(self.attr(name, attribute::FLOAT)?.map_or(default, |a| a.f))
    }

    pub fn opt_float(&self, name: &str) -> Result<Option<f32>> {
        Ok(self.attr(name, attribute::FLOAT)?.map(|a| a.f))
    }

    pub fn opt_int(&self, name: &str) -> Result<Option<i64>> {
        Ok(self.attr(name, attribute::INT)?.map(|a| a.i))
    }

    pub fn floats(&self, name: &str) -> Result<Option<&'a [f32]>> {
        Ok(self.attr(name, attribute::FLOATS)?.map(|a| &a.floats[..]))
    }

    pub fn ints(&self, name: &str) -> Result<Option<&'a [i64]>> {
        Ok(self.attr(name, attribute::INTS)?.map(|a| &a.ints[..]))
    }

    /// A list of `n` non-negative sizes. If the attribute is missing, each is `default`.
    pub fn sizes(&self, name: &str, n: usize, default: usize) -> Result<Vec<usize>> {
        let Some(v) = self.ints(name)? else {
            return Ok(vec![default; n]);
        };
        if v.len() != n {
            return Err(self.invalid(format!("attribute '{name}' has {} entries, expected {n}", v.len())));
        }
        v.iter()
            .map(|&s| {
                usize::try_from(s)
                    .ok()
                    .filter(|s| *s <= i32::MAX as usize)
                    .ok_or_else(|| self.invalid(format!("attribute '{name}' holds {s}, which is not a size")))
            })
            .collect()
    }

    pub fn string(&self, name: &str, default: &'static str) -> Result<&'a str> {
        match self.attr(name, attribute::STRING)? {
            None => Ok(default),
            Some(a) => {
                std::str::from_utf8(&a.s).map_err(|_| self.invalid(format!("attribute '{name}' is not text")))
            }
        }
    }

    /// A list attribute of strings.
    pub fn strings(&self, name: &str) -> Result<Option<Vec<String>>> {
        let Some(a) = self.attr(name, attribute::STRINGS)? else {
            return Ok(None);
        };
        let text = |b: &bytes::Bytes| {
            String::from_utf8(b.to_vec()).map_err(|_| self.invalid(format!("attribute '{name}' is not text")))
        };
        a.strings.iter().map(text).collect::<Result<_>>().map(Some)
    }

    /// Whether the node has the attribute.
    pub fn has(&self, name: &str) -> bool {
        self.node.attribute.iter().any(|a| a.name == name)
    }

    pub fn tensor(&self, name: &str) -> Result<Option<ConstData>> {
        let Some(a) = self.attr(name, attribute::TENSOR)? else {
            return Ok(None);
        };
        let t = a.t.as_ref().ok_or_else(|| self.invalid(format!("attribute '{name}' holds no tensor")))?;
        tensor::decode(t, self.external, &format!("{}: {}", self.file, self.name)).map(Some)
    }

    /// Like [`Call::tensor`], also for tensors of strings.
    pub fn datum(&self, name: &str) -> Result<Option<Datum>> {
        let Some(a) = self.attr(name, attribute::TENSOR)? else {
            return Ok(None);
        };
        match &a.t {
            Some(t) if t.data_type == tensor::STRING => {
                tensor::decode_text(t, &format!("{}: {}", self.file, self.name)).map(|t| Some(Datum::Text(t)))
            }
            _ => Ok(self.tensor(name)?.map(Datum::Tensor)),
        }
    }

    /// An attribute that is a sparse tensor.
    pub fn sparse(&self, name: &str) -> Result<Option<Sparse>> {
        let Some(a) = self.attr(name, attribute::SPARSE_TENSOR)? else {
            return Ok(None);
        };
        let none = || self.invalid(format!("attribute '{name}' holds no sparse tensor"));
        let t = a.sparse_tensor.as_deref().ok_or_else(none)?;
        sparse::decode(t, self.external, &format!("{}: {}", self.file, self.name)).map(Some)
    }

    /// An attribute whose value is the number of an element type.
    pub fn dtype(&self, name: &str) -> Result<Option<DType>> {
        let Some(code) = self.opt_int(name)? else {
            return Ok(None);
        };
        let what = format!("{}: {}", self.file, self.name);
        let code = i32::try_from(code).map_err(|_| bad(&what, format!("{code} is not an element type")))?;
        tensor::dtype(code, &what).map(Some)
    }

    /// Normalises an axis of a shape of `rank`; negative axes count from the end.
    pub fn axis(&self, axis: i64, rank: usize) -> Result<usize> {
        let a = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
        a.and_then(|a| usize::try_from(a).ok())
            .filter(|a| *a < rank)
            .ok_or_else(|| self.invalid(format!("axis {axis} is outside the {rank} axes of the operand")))
    }

    /// Normalises axes, which must be distinct. Keeps their order.
    pub fn axes(&self, axes: &[i64], rank: usize) -> Result<Vec<usize>> {
        let v = axes.iter().map(|&a| self.axis(a, rank)).collect::<Result<Vec<_>>>()?;
        match (0..v.len()).find(|&i| v[..i].contains(&v[i])) {
            Some(i) => Err(self.invalid(format!("axis {} appears twice", v[i]))),
            None => Ok(v),
        }
    }

    /// The error for a node that violates the operator's definition.
    pub fn invalid(&self, what: impl Into<String>) -> Error {
        Error::argument(&self.node.op_type, what).at(&Span::new(self.name))
    }

    /// The error for a part of the operator that is not implemented.
    pub fn unsupported(&self, what: &str, next: &str) -> Error {
        Error::unsupported(
            format!("{what} of {} (opset {}) in {}", self.node.op_type, self.opset, self.name),
            next,
        )
    }
}
