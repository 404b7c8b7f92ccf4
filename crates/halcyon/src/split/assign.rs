//! Chooses a device for every node.

use super::cut::constant;
use crate::backend::Backend;
use halcyon_ir::cost;
use halcyon_ir::error::{Error, Result};
use halcyon_ir::graph::{Graph, Node, NodeId};
use halcyon_ir::kernel::verify_for;
use halcyon_ir::lower::{LowerOptions, lower};
use halcyon_ir::passes::{Level, PassOptions};
use halcyon_ir::plan::StepWork;
use std::collections::BTreeMap;

/// Assigns a device to every node by a split into layers. In node order, the first part of the work, with the
/// share `shares[0]`, goes to the first device, and so on. Only the ratios of `shares` matter. Each cut is
/// moved, within 1/20 of the work, to the place where the fewest bytes cross it. Work is measured in FLOPs,
/// or in bytes moved if the graph has no FLOPs.
///
/// # Errors
/// [`Error::Argument`] for shares that are not positive numbers; errors for a graph with symbols.
pub fn by_layers(g: &Graph, shares: &[f64]) -> Result<Vec<usize>> {
    if shares.is_empty() || shares.iter().any(|s| !s.is_finite() || *s <= 0.0) {
        return Err(Error::argument("split", format!("shares must be positive numbers, not {shares:?}")));
    }
    let n = g.nodes().len();
    let constants = constant(g);
    let costs = g.ids().map(|i| cost::of_node(g, i)).collect::<Result<Vec<_>>>()?;
    let any = costs.iter().any(|c| c.0 > 0);
    let work = |i: usize| {
        if constants[i] || g.nodes()[i].op.is_leaf() {
            0
        } else if any {
            costs[i].0
        } else {
            costs[i].1
        }
    };
    // Work up to and including node i.
    let mut done = Vec::with_capacity(n);
    let mut sum = 0f64;
    for i in 0..n {
        sum += work(i) as f64;
        done.push(sum);
    }
    // Bytes that a cut after node i would send across: values computed before it and read after it.
    let mut last = vec![0usize; n];
    for (i, node) in g.nodes().iter().enumerate() {
        node.inputs.iter().for_each(|x| last[x.index()] = i);
    }
    g.outputs().iter().for_each(|o| last[o.node.index()] = last[o.node.index()].max(o.node.index()));
    let mut crossing = vec![0i128; n + 1];
    for i in (0..n).filter(|i| !constants[*i]) {
        let bytes = i128::from(cost::type_bytes(&g.nodes()[i].ty)?);
        // Inputs are on the host, so a cut does not copy them between devices.
        if last[i] > i && !g.nodes()[i].op.is_leaf() {
            crossing[i] += bytes;
            crossing[last[i]] -= bytes;
        }
    }
    for i in 1..=n {
        crossing[i] += crossing[i - 1];
    }
    let all: f64 = shares.iter().sum();
    let (mut assign, mut from, mut share) = (vec![shares.len() - 1; n], 0, 0.0);
    for (d, s) in shares[..shares.len() - 1].iter().enumerate() {
        share += s / all;
        let goal = share * sum;
        let near = |i: usize| (done[i] - goal).abs();
        let after = from..n.saturating_sub(1);
        let closest = after.clone().map(near).fold(f64::INFINITY, f64::min);
        let bound = closest.max(sum / 20.0);
        let cut = after
            .filter(|i| near(*i) <= bound)
            .min_by(|a, b| crossing[*a].cmp(&crossing[*b]).then(near(*a).total_cmp(&near(*b))));
        let Some(cut) = cut else { break };
        assign[from..=cut].fill(d);
        from = cut + 1;
    }
    Ok(assign)
}

/// Whether a device can run one node; the error is the reason why not.
fn takes(b: &Backend, g: &Graph, id: NodeId) -> Result<()> {
    let n = g.node(id);
    let mut one = Graph::new();
    one.span = n.span.clone();
    let inputs =
        n.inputs.iter().enumerate().map(|(k, x)| one.input(&format!("x{k}"), g.ty(*x).clone())).collect();
    let y = one.push_unchecked(Node { inputs, ..n.clone() });
    one.output("y", y);
    let passes = PassOptions { level: Level::O1, ..b.lower_options().passes };
    let target = b.device().as_target();
    let plan = lower(&one, target, &LowerOptions { passes, ..b.lower_options() })?;
    let caps = target.caps();
    if let Some(big) = plan.buffers.iter().find(|x| x.bytes as u64 > caps.max_binding_bytes) {
        return Err(Error::unsupported(
            format!(
                "{} bytes in one buffer, but {} binds at most {}",
                big.bytes,
                b.id(),
                caps.max_binding_bytes
            ),
            "Use another device, or smaller inputs",
        ));
    }
    plan.steps.iter().try_for_each(|s| match &s.work {
        StepWork::Kernel { kernel, .. } => verify_for(kernel, caps),
        _ => Ok(()),
    })
}

/// Assigns a device to every node: the first device runs all ops that it can run, and the second device runs
/// the others. Also returns, for each node on the second device, why the first device cannot run it.
///
/// # Errors
/// [`Error::Unsupported`], with the ops, if more than the fraction `limit` of the FLOPs would run on the
/// second device; the error of an op that neither device can run.
pub fn by_support(
    first: &Backend,
    rest: &Backend,
    g: &Graph,
    limit: f64,
) -> Result<(Vec<usize>, BTreeMap<usize, String>)> {
    let constants = constant(g);
    let (mut assign, mut why) = (vec![0; g.nodes().len()], BTreeMap::new());
    let (mut all, mut away) = (0u64, 0u64);
    for id in g.ids() {
        let n = g.node(id);
        if constants[id.index()] || n.op.is_leaf() {
            continue;
        }
        let flops = cost::of_node(g, id)?.0;
        all = all.saturating_add(flops);
        match takes(first, g, id) {
            Ok(()) => {}
            Err(e @ (Error::Unsupported { .. } | Error::UnsupportedOps(_) | Error::DType { .. })) => {
                takes(rest, g, id)?;
                assign[id.index()] = 1;
                away = away.saturating_add(flops);
                why.insert(id.index(), e.to_string());
            }
            Err(e) => return Err(e),
        }
    }
    let share = away as f64 / all.max(1) as f64;
    // A limit of 0 also rejects ops without FLOPs.
    if share > limit || (limit <= 0.0 && !why.is_empty()) {
        let named = |i: &usize| format!("{} at {}", g.nodes()[*i].op.name(), g.nodes()[*i].span);
        let some: Vec<String> = why.keys().take(4).map(named).collect();
        let more = why.len().saturating_sub(some.len());
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return Err(Error::unsupported(
            format!(
                "{} ops do not run on {}: {}{more}. They have {:.1} % of the FLOPs, but at most {:.1} % may run elsewhere. The reason for the first op: {}",
                why.len(),
                first.id(),
                some.join(", "),
                100.0 * share,
                100.0 * limit,
                why.values().next().map_or("", String::as_str)
            ),
            format!("Let more of the work go to {}, or use it alone", rest.id()),
        ));
    }
    Ok((assign, why))
}
