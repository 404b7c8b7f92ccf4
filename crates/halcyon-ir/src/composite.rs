//! Composites: named functions of primitive ops. A target may have one kernel for a whole composite;
//! otherwise the composite is replaced by its body. The built-in composites are in `crate::ops`, one row
//! each.

use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
pub use crate::ops::composite::{CompositeKind, CompositeRow};
use crate::ops::{CROSS_ENTROPY, Op};
use crate::shape::{Bindings, Dim, TensorType};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Value of an attribute.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub enum Attr {
    Int(i64),
    Float(Scalar),
    Bool(bool),
    Ints(Vec<i64>),
    DType(DType),
}

/// Attributes by name.
pub type Attrs = BTreeMap<String, Attr>;

/// A named function of primitive ops with one result.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct Composite {
    /// The function that the composite computes.
    #[serde(rename = "name")]
    pub kind: CompositeKind,
    pub attrs: Attrs,
    /// One input per operand, in order, and one output.
    pub body: Graph,
}

impl Composite {
    /// Checks that the operand types `x` equal the body's input types. Returns the result type.
    pub fn infer(&self, x: &[&TensorType]) -> Result<TensorType> {
        let i = self.body.inputs();
        if i.len() != x.len() {
            return Err(Error::argument(self.name(), format!("takes {} operands, got {}", i.len(), x.len())));
        }
        for (i, t) in i.iter().zip(x) {
            if self.body.ty(i.node) != *t {
                return Err(Error::shape(
                    self.name(),
                    format!("operand \"{}\" is {t}, expected {}", i.name, self.body.ty(i.node)),
                ));
            }
        }
        self.result().map(|r| self.body.ty(r).clone())
    }

    /// The node of the body's output.
    pub fn result(&self) -> Result<NodeId> {
        self.body
            .outputs()
            .first()
            .map(|o| o.node)
            .ok_or_else(|| Error::internal(format!("composite {} has no result", self.kind)))
    }

    /// The name of [`Composite::kind`].
    pub fn name(&self) -> &str {
        self.kind.name()
    }

    /// Replaces the symbols in the body by their sizes.
    pub fn bind(&self, b: &Bindings) -> Result<Composite> {
        Ok(Composite { kind: self.kind.clone(), attrs: self.attrs.clone(), body: self.body.bind(b)? })
    }

    /// The integer attribute `name`, if there is one.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attrs.get(name) {
            Some(Attr::Int(i)) => Some(*i),
            _ => None,
        }
    }

    /// The float attribute `name`, if there is one.
    pub fn float(&self, name: &str) -> Option<f64> {
        match self.attrs.get(name) {
            Some(Attr::Float(f)) => Some(f.as_f64()),
            _ => None,
        }
    }

    /// The dtype attribute `name`, if there is one.
    pub fn dtype(&self, name: &str) -> Option<DType> {
        match self.attrs.get(name) {
            Some(Attr::DType(d)) => Some(*d),
            _ => None,
        }
    }

    /// Whether the bool attribute `name` is set.
    pub fn flag(&self, name: &str) -> bool {
        matches!(self.attrs.get(name), Some(Attr::Bool(true)))
    }
}

pub(crate) fn attrs<const N: usize>(a: [(&str, Attr); N]) -> Attrs {
    a.into_iter().map(|(k, v)| (k.to_string(), v)).collect()
}

pub(crate) fn float(v: f64) -> Attr {
    Attr::Float(Scalar::F(v))
}

impl Graph {
    /// Adds a composite node. `body` builds the body from input nodes that stand for `x`.
    pub fn composite(
        &mut self,
        kind: impl Into<CompositeKind>,
        attrs: Attrs,
        x: &[NodeId],
        body: impl FnOnce(&mut Graph, &[NodeId]) -> Result<NodeId>,
    ) -> Result<NodeId> {
        let mut g = Graph::new();
        let ins: Vec<NodeId> =
            x.iter().enumerate().map(|(i, n)| g.input(&format!("x{i}"), self.ty(*n).clone())).collect();
        let y = body(&mut g, &ins).map_err(|e| e.at(&self.span))?;
        g.output("y", y);
        self.push(Op::Composite(Arc::new(Composite { kind: kind.into(), attrs, body: g })), x, None)
    }

    pub(crate) fn need_float(&self, op: &str, x: NodeId) -> Result<()> {
        match self.dtype(x) {
            d if d.is_float() => Ok(()),
            d => Err(Error::DType {
                op: op.into(),
                dtype: d,
                want: "a float type is needed".into(),
                at: self.span.clone(),
            }),
        }
    }

    /// Mean over `axes`. Float types only; the sizes of `axes` must be known.
    pub fn mean(&mut self, x: NodeId, axes: &[usize], keep: bool) -> Result<NodeId> {
        self.need_float("mean", x)?;
        let once: BTreeSet<usize> = axes.iter().copied().collect();
        let n = once
            .iter()
            .fold(Dim::from(1), |a, &k| a.mul(self.shape(x).get(k).copied().unwrap_or(Dim::from(1))));
        let s = self.sum(x, axes, keep)?;
        let n = n.known().ok_or_else(|| {
            Error::unsupported("a mean over symbolic dimensions", "Bind the sizes first").at(&self.span)
        })?;
        let d = self.lit(s, n as f64);
        self.div(s, d)
    }

    /// `x` where it is positive, else `slope * x`.
    pub fn leaky_relu(&mut self, x: NodeId, slope: f64) -> Result<NodeId> {
        let (z, k) = (self.lit(x, 0.0), self.lit(x, slope));
        let (c, y) = (self.lt(x, z)?, self.mul(x, k)?);
        self.select(c, y, x)
    }

    /// Mean negative log-likelihood of integer `labels [n, d…]` under `logits [n, classes, d…]`. Labels equal
    /// to `ignore` are excluded from both the sum and the count; if all labels are excluded the result is
    /// NaN. Any other label outside `[0, classes)` makes the run fail. Half types are summed in f32.
    pub fn cross_entropy(&mut self, logits: NodeId, labels: NodeId, ignore: Option<i64>) -> Result<NodeId> {
        self.need_float(CROSS_ENTROPY, logits)?;
        let (s, l) = (self.shape(logits).clone(), self.shape(labels).clone());
        if s.rank() < 2 || l.rank() + 1 != s.rank() || l[0] != s[0] || l[1..] != s[2..] {
            let what = format!("logits {s} and labels {l}: expected [n, classes, …] and [n, …]");
            return Err(Error::shape(CROSS_ENTROPY, what).at(&self.span));
        }
        let wide = self.dtype(logits).compute();
        let p = self.log_softmax(logits, 1)?;
        let at = self.class_index(labels, s[1], ignore)?;
        let at = self.unsqueeze(at, 1)?;
        let picked = self.gather_elements(p, at, 1)?;
        let picked = self.squeeze(picked, 1)?;
        let picked = self.cast(picked, wide)?;
        let axes: Vec<usize> = (0..l.rank()).collect();
        let mean = match ignore {
            None => self.mean(picked, &axes, false)?,
            Some(i) => {
                // Compares in i64, because `ignore` may be out of range of the labels' dtype.
                let labels = self.cast(labels, DType::I64)?;
                let i = self.lit(labels, i);
                let counts = self.ne(labels, i)?;
                let zero = self.lit(picked, 0.0);
                let kept = self.select(counts, picked, zero)?;
                let ones = self.cast(counts, wide)?;
                let (sum, n) = (self.sum(kept, &axes, false)?, self.sum(ones, &axes, false)?);
                self.div(sum, n)?
            }
        };
        let y = self.neg(mean)?;
        self.cast(y, self.dtype(logits))
    }
}
