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

/// Runs a training step op by op at O0 on the host, and finds the op that made a NaN or an infinity in the
/// step's results. An op made a NaN if its result has one and no operand other than a constant has one. An op
/// made an infinity if its result has one and all operands are finite. Among the ops through which a NaN or
/// an infinity reached a result, the function takes the first that made one. Returns an error that names this
/// op, its module, the line of the program, and the ranges of its operands.
///
/// A NaN of an input is reported too, with the name of the input. Infinities of constants and inputs are not
/// reported, because masks have infinities. However, if no op made the NaN or the infinity of the loss, the
/// error names the input that the value came from. Returns `None` if nothing is found.
///
/// # Errors
/// Errors of the evaluation.
pub fn find_anomaly(step: &StepGraph) -> Result<Option<Error>> {
    let inputs = step.inputs.iter().map(|(_, t)| t.to_data()).collect::<Result<Vec<_>>>()?;
    let never = |_: &Composite| false;
    let (graph, _) = inline_composites(&step.graph, &never)?;
    let seen = evaluate(&graph, inputs, &step.args)?;
    let roots: Vec<NodeId> = graph.outputs().iter().map(|o| o.node).collect();
    let way = way_to(&graph, &seen, &roots);
    let found = way.iter().copied().find(|n| makes(&graph, &seen, *n));
    // An infinity of an input may reach the loss although no op makes an infinity.
    let source = || {
        let loss = roots.first().filter(|n| !seen[n.index()].is_finite())?;
        way_to(&graph, &seen, &[*loss]).into_iter().find(|n| matches!(graph.node(*n).op, Op::Input(_)))
    };
    Ok(found.or_else(source).map(|n| described(&graph, &seen, n)))
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

/// The roots that are not finite, and the nodes through which a NaN or an infinity reached them, in
/// topological order.
fn way_to(graph: &Graph, seen: &[Seen], roots: &[NodeId]) -> Vec<NodeId> {
    let mut found = vec![false; graph.nodes().len()];
    let mut stack = roots.to_vec();
    while let Some(at) = stack.pop() {
        if !seen[at.index()].is_finite() && !std::mem::replace(&mut found[at.index()], true) {
            stack.extend(&graph.node(at).inputs);
        }
    }
    graph.ids().filter(|id| found[id.index()]).collect()
}

/// Whether a node made a NaN or an infinity that its operands do not explain.
fn makes(graph: &Graph, seen: &[Seen], id: NodeId) -> bool {
    let (n, s) = (graph.node(id), seen[id.index()]);
    let constant = |x: &NodeId| matches!(graph.node(*x).op, Op::Full(_) | Op::Const(_));
    match n.op {
        // An infinite input may be a mask. Masks have no NaN, so a NaN of an input counts.
        Op::Input(_) => s.nan.is_some(),
        _ if constant(&id) => false,
        _ => {
            let had_nan = n.inputs.iter().any(|x| seen[x.index()].nan.is_some() && !constant(x));
            let finite = n.inputs.iter().all(|x| seen[x.index()].is_finite());
            (s.nan.is_some() && !had_nan) || (s.infinite.is_some() && finite)
        }
    }
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
        let s = seen[x.index()];
        let range = s.range.map_or(String::new(), |(a, b)| format!(" from {a:e} to {b:e}"));
        let nan = if s.nan.is_some() { " with NaN" } else { "" };
        let infinite = if s.infinite.is_some() { " with infinities" } else { "" };
        format!("{}{range}{nan}{infinite}", graph.ty(*x))
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

/// The module of the nearest parameter or buffer that `id` depends on; empty for one of the model itself.
/// `None` if `id` depends on none.
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
                let parent = |name: &str| name.rsplit_once('.').map(|(m, _)| m.to_string());
                let of = parent(&i.name);
                // An optimizer's state is named after its parameter: `fc1.weight.exp_avg`.
                let is_state = of.as_ref().is_some_and(|p| graph.inputs().iter().any(|i| *i.name == **p));
                return Some(if is_state { of.and_then(|p| parent(&p)) } else { of }.unwrap_or_default());
            }
        }
        queue.extend(graph.node(at).inputs.iter().copied());
    }
    None
}
