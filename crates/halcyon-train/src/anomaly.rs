//! Finds the op that made a NaN or an infinity in a training step.

use halcyon::ConstData;
use halcyon::ir::composite::Composite;
use halcyon::ir::error::{Error, Result};
use halcyon::ir::passes::inline::inline_composites;
use halcyon::ir::reference::eval_op;
use halcyon::ir::{Graph, NodeId, Op};
use halcyon_nn::StepGraph;
use std::collections::VecDeque;

/// Facts about the value of a node.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// The index of the first element that is NaN, and of the first element that is infinite.
    nan: Option<usize>,
    infinite: Option<usize>,
    /// The range of the finite elements, if there are any.
    range: Option<(f64, f64)>,
}

impl Seen {
    fn of(data: &ConstData) -> Seen {
        let mut s = Seen::default();
        if !data.dtype.is_float() {
            return s;
        }
        for (i, v) in data.to_vec::<f64>().into_iter().enumerate() {
            match v {
                v if v.is_nan() => s.nan = s.nan.or(Some(i)),
                v if v.is_infinite() => s.infinite = s.infinite.or(Some(i)),
                v => s.range = Some(s.range.map_or((v, v), |(a, b)| (a.min(v), b.max(v)))),
            }
        }
        s
    }

    fn is_finite(self) -> bool {
        self.nan.is_none() && self.infinite.is_none()
    }
}

/// Runs a training step op by op at O0 on the host. If a result has a NaN or an infinity, returns an error
/// that names the op which caused it: the op, its module, the line of the program, and the ranges of the
/// operands. Infinite constants, as in masks, are ignored. Returns `None` if all results are finite.
///
/// # Errors
/// Errors of the evaluation.
pub fn find_anomaly(step: &StepGraph) -> Result<Option<Error>> {
    let inputs = step.inputs.iter().map(|(_, t)| t.to_data()).collect::<Result<Vec<_>>>()?;
    let never = |_: &Composite| false;
    let (graph, _) = inline_composites(&step.graph, &never)?;
    let seen = evaluate(&graph, inputs, &step.args)?;
    let bad = graph.outputs().iter().map(|o| o.node).find(|n| !seen[n.index()].is_finite());
    Ok(bad.map(|n| described(&graph, &seen, origin(&graph, &seen, n))))
}

/// Computes every node. Values are dropped after their last use.
fn evaluate(graph: &Graph, inputs: Vec<ConstData>, args: &[halcyon::Scalar]) -> Result<Vec<Seen>> {
    let mut left = vec![0usize; graph.nodes().len()];
    graph.nodes().iter().flat_map(|n| &n.inputs).for_each(|x| left[x.index()] += 1);
    let mut values: Vec<Option<ConstData>> = vec![None; graph.nodes().len()];
    for (spec, data) in graph.inputs().iter().zip(inputs) {
        values[spec.node.index()] = Some(data);
    }
    let mut seen = vec![Seen::default(); graph.nodes().len()];
    for id in graph.ids() {
        let n = graph.node(id);
        if !matches!(n.op, Op::Input(_)) {
            let operands = n.inputs.iter().map(|x| values[x.index()].as_ref());
            let operands: Option<Vec<&ConstData>> = operands.collect();
            let operands = operands.ok_or_else(|| Error::internal("an operand was not computed"))?;
            values[id.index()] = Some(eval_op(&n.op, &operands, &n.ty, args).map_err(|e| e.at(&n.span))?);
        }
        if let Some(v) = &values[id.index()] {
            seen[id.index()] = Seen::of(v);
        }
        for x in &n.inputs {
            left[x.index()] -= 1;
            if left[x.index()] == 0 {
                values[x.index()] = None;
            }
        }
        if left[id.index()] == 0 {
            values[id.index()] = None;
        }
    }
    Ok(seen)
}

/// The op that caused the NaN or infinity in `id`: its own result has a NaN or an infinity, its operands are
/// finite.
fn origin(graph: &Graph, seen: &[Seen], mut id: NodeId) -> NodeId {
    if seen[id.index()].nan.is_some() {
        while let Some(x) = graph.node(id).inputs.iter().find(|x| seen[x.index()].nan.is_some()) {
            id = *x;
        }
        return origin_of_infinity(graph, seen, id).unwrap_or(id);
    }
    origin_of_infinity(graph, seen, id).unwrap_or(id)
}

/// An op with finite operands whose result has a NaN or an infinity and on which `id` depends; this may be
/// `id` itself. `None` if all infinities come from constants.
fn origin_of_infinity(graph: &Graph, seen: &[Seen], id: NodeId) -> Option<NodeId> {
    let mut visited = vec![false; graph.nodes().len()];
    let mut stack = vec![id];
    while let Some(at) = stack.pop() {
        if std::mem::replace(&mut visited[at.index()], true) {
            continue;
        }
        let n = graph.node(at);
        let bad: Vec<NodeId> = n.inputs.iter().copied().filter(|x| !seen[x.index()].is_finite()).collect();
        match (bad.is_empty(), &n.op) {
            (true, Op::Full(_) | Op::Const(_)) => {}
            (true, _) => return Some(at),
            (false, _) => stack.extend(bad.into_iter().rev()),
        }
    }
    None
}

fn described(graph: &Graph, seen: &[Seen], id: NodeId) -> Error {
    let (n, s) = (graph.node(id), &seen[id.index()]);
    let (kind, i) = match (s.nan, s.infinite) {
        (Some(i), _) => ("a NaN", i),
        (None, i) => ("an infinity", i.unwrap_or(0)),
    };
    let place = place(&n.ty.shape.known().unwrap_or_default(), i);
    if let Op::Input(_) = n.op {
        let name = graph.inputs().iter().find(|i| i.node == id).map_or("", |i| &*i.name);
        let what = match name.strip_prefix("batch.") {
            Some(k) => format!("tensor {k} of the batch has {kind} at {place}"),
            None => format!("`{name}` had {kind} at {place} before the step"),
        };
        return Error::argument("detect_anomaly", what);
    }
    let module = match module_of(graph, id) {
        Some(m) if m.is_empty() => " of the model".to_string(),
        Some(m) => format!(" in or after the module `{m}`"),
        None => String::new(),
    };
    let operand = |x: &NodeId| {
        let range = match seen[x.index()].range {
            Some((a, b)) => format!(" from {a:e} to {b:e}"),
            None => String::new(),
        };
        format!("{}{range}", graph.ty(*x))
    };
    let operands: Vec<String> = n.inputs.iter().map(operand).collect();
    let what = format!("made {kind} at {place} of {}{module}. Operands: {}", n.ty, operands.join("; "));
    Error::argument(n.op.name(), what).at(&n.span)
}

/// The indices of element `i` of a tensor.
fn place(dims: &[usize], mut i: usize) -> String {
    let mut at = vec![0; dims.len()];
    for (k, d) in dims.iter().enumerate().rev() {
        at[k] = i % (*d).max(1);
        i /= (*d).max(1);
    }
    format!("{at:?}")
}

/// Of the parameters that `id` depends on, the nearest one determines the module.
fn module_of(graph: &Graph, id: NodeId) -> Option<String> {
    let mut visited = vec![false; graph.nodes().len()];
    let mut queue = VecDeque::from([id]);
    while let Some(at) = queue.pop_front() {
        if std::mem::replace(&mut visited[at.index()], true) {
            continue;
        }
        if let Some(i) = graph.inputs().iter().find(|i| i.node == at) {
            let other =
                ["batch.", "captured.", "scaler.", "average.", "sum."].iter().any(|p| i.name.starts_with(p));
            if !other {
                return Some(i.name.rsplit_once('.').map_or(String::new(), |(m, _)| m.to_string()));
            }
        }
        queue.extend(graph.node(at).inputs.iter().copied());
    }
    None
}
