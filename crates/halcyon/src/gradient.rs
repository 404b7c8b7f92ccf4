//! Gradients of tensors, computed by the gradient pass of the graph.

use crate::tensor::{Collector, Mode, Tensor, lift};
use halcyon_ir::error::{Error, Result};
use halcyon_ir::{NodeId, grad};
use std::collections::HashMap;
use std::sync::Arc;

/// Gradients of a scalar with respect to tensors.
#[derive(Debug)]
pub struct Gradients {
    of: Vec<(Tensor, Tensor)>,
}

impl Gradients {
    /// The gradient with respect to a tensor made by [`Tensor::requires_grad`]; `None` if the scalar does not
    /// depend on it.
    pub fn get(&self, t: &Tensor) -> Option<&Tensor> {
        self.of.iter().find(|(p, _)| Arc::ptr_eq(&p.0, &t.0)).map(|(_, g)| g)
    }

    /// Number of tensors with a gradient.
    pub fn len(&self) -> usize {
        self.of.len()
    }

    /// Whether there are no gradients.
    pub fn is_empty(&self) -> bool {
        self.of.is_empty()
    }
}

fn gradients_of(loss: &Tensor, wrt: Option<&[Tensor]>) -> Result<Vec<(Tensor, Tensor)>> {
    loss.check()?;
    let mut c = Collector { mode: Mode::Gradient, ..Collector::default() };
    c.visit(loss)?;
    // Parameters that the loss does not depend on get a gradient of zeros.
    let params: Vec<Tensor> = match wrt {
        Some(w) => w.to_vec(),
        None => {
            let mut seen = std::collections::HashSet::new();
            c.order
                .iter()
                .filter(|t| t.0.tracked && t.0.op.is_leaf() && seen.insert(Arc::as_ptr(&t.0)))
                .cloned()
                .collect()
        }
    };
    if params.is_empty() {
        return Err(Error::argument(
            "backward",
            "nothing that the loss depends on was marked with requires_grad",
        )
        .at(&loss.0.span));
    }
    let ids: Vec<Option<NodeId>> = params.iter().map(|p| c.ids.get(&Arc::as_ptr(&p.0)).copied()).collect();
    let root = c.ids[&Arc::as_ptr(&loss.0)];
    let known = c.graph.nodes().len();
    let wanted: Vec<NodeId> = ids.iter().flatten().copied().collect();
    let mut found = grad::gradients(&mut c.graph, root, &wanted, None)?.into_iter();
    // Nodes built from tensors map back to those tensors; the argument node of a literal maps to the literal.
    let mut map: HashMap<NodeId, Tensor> =
        (0..known.min(c.order.len())).map(|i| (NodeId(i as u32), c.order[i].clone())).collect();
    let mut out = vec![];
    for (p, id) in params.iter().zip(ids) {
        let g = match id.and_then(|_| found.next().flatten()) {
            Some(n) => lift(&loss.0.backend, &c.graph, &[n], &mut map, true)?.pop(),
            None => None,
        };
        let zero = || Tensor::zeros(p.backend(), p.0.ty.shape.clone(), p.0.ty.dtype);
        out.push((p.clone(), g.unwrap_or_else(zero)));
    }
    Ok(out)
}

impl Tensor {
    /// Gradients of this scalar with respect to every leaf that [`Tensor::requires_grad`] made and that the
    /// scalar depends on. They are lazy: they are computed when they are read, from values that the forward
    /// pass kept.
    ///
    /// # Errors
    /// `Error::Argument` if the scalar depends on no such leaf; errors that the tensors carry.
    pub fn backward(&self) -> Result<Gradients> {
        Ok(Gradients { of: gradients_of(self, None)? })
    }
}

/// The value of `f` at `params` and its gradients with respect to `params`, as one graph; nothing has run
/// when it returns. The value has no gradient history; the gradients keep theirs, so they can be
/// differentiated again.
pub fn value_and_grad(
    params: &[Tensor],
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let loss = f(params)?;
    let g = gradients_of(&loss, Some(params))?;
    Ok((loss.without_history(), g.into_iter().map(|(_, g)| g).collect()))
}
