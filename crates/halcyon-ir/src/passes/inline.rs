//! Replaces composites by their bodies.

use super::rebuild::Rebuild;
use crate::composite::Composite;
use crate::error::{Error, Result, Span};
use crate::graph::{Graph, Node, NodeId};
use crate::ops::Op;

/// Replaces every composite that `keep` rejects by its body, at every depth. Body nodes without a span take
/// the composite's span. Also returns the new node of every old node ([`super::rebuild::DROPPED`] for nodes
/// that no output needs).
pub fn inline_composites(g: &Graph, keep: &dyn Fn(&Composite) -> bool) -> Result<(Graph, Vec<NodeId>)> {
    let live = Rebuild::live(g);
    let mut r = Rebuild::new(g);
    for id in g.ids().filter(|i| live[i.index()]) {
        let n = g.node(id);
        match &n.op {
            Op::Composite(c) if !keep(c) => {
                let x = r.operands(n)?;
                let y = body(&mut r.new, c, &x, &n.span, keep)?;
                r.set(id, y);
            }
            _ => {
                r.copy(id)?;
            }
        }
    }
    r.finish()
}

/// Appends the body of `c` on operands `x` and returns its result. Nested composites are kept.
pub fn append(g: &mut Graph, c: &Composite, x: &[NodeId]) -> Result<NodeId> {
    let span = g.span.clone();
    body(g, c, x, &span, &|_| true)
}

/// Appends the body of `c` on operands `x` and returns its result. Recurses once per level of nesting.
fn body(
    g: &mut Graph,
    c: &Composite,
    x: &[NodeId],
    span: &Span,
    keep: &dyn Fn(&Composite) -> bool,
) -> Result<NodeId> {
    let root = c.result()?;
    let live = c.body.live(&[root]);
    let mut map = vec![NodeId(0); c.body.nodes().len()];
    for id in c.body.ids().filter(|i| live[i.index()]) {
        let n = c.body.node(id);
        let span = if n.span.is_known() { &n.span } else { span };
        let ins: Vec<NodeId> = n.inputs.iter().map(|i| map[i.index()]).collect();
        map[id.index()] = match &n.op {
            Op::Input(k) => *x
                .get(*k as usize)
                .ok_or_else(|| Error::internal(format!("composite {} has no operand {k}", c.kind)))?,
            Op::Arg(_) => {
                return Err(Error::internal(format!(
                    "the body of composite {} takes run-time arguments",
                    c.kind
                )));
            }
            Op::Composite(inner) if !keep(inner) => body(g, inner, &ins, span, keep)?,
            op => g.push_unchecked(Node {
                op: op.clone(),
                inputs: ins.into(),
                ty: n.ty.clone(),
                span: span.clone(),
            }),
        };
    }
    Ok(map[root.index()])
}
