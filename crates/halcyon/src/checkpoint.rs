//! Parts of a computation as composites: activation checkpointing of tensors, and composites with a name.

use crate::tensor::{Collector, Mode, Tensor};
use halcyon_ir::composite::{Attrs, Composite, CompositeKind};
use halcyon_ir::error::{Error, Result, Span};
use halcyon_ir::{Graph, NodeId, Op};
use std::collections::HashSet;
use std::sync::Arc;

/// Calls `f` on placeholders for `inputs` and returns its results. The intermediate values of `f` are not
/// kept for the gradients. The plan of the gradients computes them again. This takes the time of `f` once
/// more, and memory only for `inputs` and the results. Below level O2, the gradients have the same bits as
/// without a checkpoint. From O2 on, epilogues may round them differently.
///
/// If `f` captures a tensor, the tensor is a further input if it was made before this call or already has a
/// value. Literals that `f` makes become constants of the plan, so another value needs another plan. Random
/// tensors in `f` are drawn once: the second computation repeats their values. `f` gets placeholders and
/// cannot read values.
///
/// ```
/// use halcyon::prelude::*;
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let w = Tensor::from_slice(&b, [2], &[0.5f32, -1.0])?.requires_grad()?;
/// let (_, grads) = halcyon::value_and_grad(std::slice::from_ref(&w), |w| {
///     let y = halcyon::checkpoint(&[&w[0]], |x| Ok(vec![x[0].sqr().exp()]))?;
///     Ok(y[0].sum(..))
/// })?;
/// let got = grads[0].to_vec::<f32>()?;
/// assert!((got[0] - 0.25f32.exp()).abs() < 1e-6);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Error::Argument` without inputs; errors of `f`, also those that its results carry.
#[track_caller]
pub fn checkpoint(
    inputs: &[&Tensor],
    f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
) -> Result<Vec<Tensor>> {
    let part = Part::trace(CompositeKind::Checkpoint.name(), inputs, f)?;
    // Every result gets its own checkpoint composite. Passes later merge the nodes that these composites
    // share.
    (0..part.roots.len()).map(|i| part.result(i, CompositeKind::Checkpoint, Attrs::new())).collect()
}

/// Calls `f` on placeholders for `inputs`, and returns its result as a composite of this kind. A device may
/// have one kernel for it; otherwise what `f` makes is computed. Tensors that `f` captures are further
/// operands, as for [`checkpoint`]. With the name, attributes and shapes of a built-in composite, `f` must
/// make what that one computes, because the device's kernel for it may run.
///
/// ```
/// use halcyon::prelude::*;
/// # fn main() -> halcyon::Result<()> {
/// let b = Backend::cpu()?;
/// let x = Tensor::from_slice(&b, [2], &[0.5f32, -1.0])?;
/// let y = halcyon::composite("mine.square", Default::default(), &[&x], |x| Ok(x[0].sqr()))?;
/// assert_eq!(y.to_vec::<f32>()?, [0.25, 1.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `Error::Argument` without inputs; errors of `f`, also one that its result carries.
#[track_caller]
pub fn composite(
    kind: impl Into<CompositeKind>,
    attrs: Attrs,
    inputs: &[&Tensor],
    f: impl FnOnce(&[Tensor]) -> Result<Tensor>,
) -> Result<Tensor> {
    let kind = kind.into();
    let part = Part::trace(kind.name(), inputs, |x| Ok(vec![f(x)?]))?;
    part.result(0, kind, attrs)
}

/// What a function makes of placeholders, as a graph.
struct Part {
    graph: Graph,
    /// The nodes of the function's results.
    roots: Vec<NodeId>,
    /// The tensors of the graph's inputs.
    operands: Vec<Tensor>,
}

impl Part {
    #[track_caller]
    fn trace(
        name: &str,
        inputs: &[&Tensor],
        f: impl FnOnce(&[Tensor]) -> Result<Vec<Tensor>>,
    ) -> Result<Part> {
        let Some(first) = inputs.first() else {
            return Err(Error::argument(name, "there are no inputs; give the tensors that f reads"));
        };
        let backend = first.backend().clone();
        inputs.iter().try_for_each(|t| t.check())?;
        let by = Span::caller();
        let stand_in = |t: &&Tensor| Tensor::stand_in(&backend, t.0.ty.clone(), by.clone());
        let given: Vec<Tensor> = inputs.iter().map(stand_in).collect();
        let start = Tensor::next_serial();
        let results = f(&given)?;
        results.iter().try_for_each(|t| t.check())?;
        let outside = captured(&results, &given, start);
        let mut c = Collector { mode: Mode::Compile, ..Collector::default() };
        for t in given.iter().chain(&outside) {
            c.declare("", t);
        }
        c.visit_in_order(&results)?;
        let roots = results.iter().map(|t| c.ids[&Arc::as_ptr(&t.0)]).collect();
        let operands = inputs.iter().map(|t| (*t).clone()).chain(outside).collect();
        Ok(Part { graph: c.graph, roots, operands })
    }

    /// Result `i` as a composite.
    #[track_caller]
    fn result(&self, i: usize, kind: CompositeKind, attrs: Attrs) -> Result<Tensor> {
        let mut body = self.graph.clone();
        body.output("", self.roots[i]);
        let op = Op::Composite(Arc::new(Composite { kind, attrs, body }));
        let operands: Vec<&Tensor> = self.operands.iter().collect();
        let y = Tensor::build(&operands, |g, x| g.push(op, x, None));
        y.check().map(|()| y)
    }
}

/// The tensors that the results depend on and that are inputs of the composite: those with a serial number
/// below `start`, those that have a value, and placeholders. The `given` tensors are not among them.
fn captured(results: &[Tensor], given: &[Tensor], start: u64) -> Vec<Tensor> {
    let key = |t: &Tensor| Arc::as_ptr(&t.0);
    let mut seen: HashSet<_> = given.iter().map(key).collect();
    let (mut stack, mut found) = (results.to_vec(), vec![]);
    while let Some(t) = stack.pop() {
        if !seen.insert(key(&t)) {
            continue;
        }
        let placeholder = matches!(t.0.op, Op::Input(_) | Op::Arg(_));
        if t.serial() < start || t.is_ready() || placeholder {
            found.push(t);
        } else {
            stack.extend(t.operands());
        }
    }
    found.sort_by_key(Tensor::serial);
    found
}
