//! Orders the nodes of a graph for import.

use super::import::node_name;
use super::ops::gradient;
use super::proto::{GraphProto, NodeProto};
use crate::bad;
use halcyon_ir::Result;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Limit on the nodes that the error about a cycle names.
const MAX_LISTED: usize = 8;

#[derive(Debug)]
pub(super) struct Order {
    /// The nodes that the outputs depend on, in topological order. The model's own order is kept if it is
    /// topological.
    pub(super) nodes: Vec<usize>,
    /// For each of these nodes, the names that it reads or makes and that are not needed after it.
    pub(super) drops: Vec<Vec<String>>,
    /// Names that these nodes read or produce, and the names of the outputs.
    pub(super) reads: HashSet<String>,
}

/// Names of a graph's initializers, including sparse ones.
pub(super) fn initializers(g: &GraphProto) -> impl Iterator<Item = &str> {
    let sparse = g.sparse_initializer.iter().filter_map(|s| s.values.as_ref());
    g.initializer.iter().chain(sparse).map(|t| t.name.as_str())
}

/// Names that a node reads through its attributes. Only Gradient nodes have such names.
fn named(n: &NodeProto) -> impl Iterator<Item = &str> {
    let gradient = gradient::is(n);
    let texts = n.attribute.iter().filter(move |a| gradient && gradient::NAMES.contains(&a.name.as_str()));
    texts.flat_map(|a| a.strings.iter().chain([&a.s])).filter_map(|s| std::str::from_utf8(s).ok())
}

/// Names that a graph reads but does not define, without repetition.
pub(super) fn free_names(g: &GraphProto) -> BTreeSet<&str> {
    let mut all = vec![];
    free(g, &mut all);
    all.into_iter().collect()
}

/// Names that a graph reads but does not define.
fn free<'g>(g: &'g GraphProto, out: &mut Vec<&'g str>) {
    let mut own: HashSet<&str> = g.input.iter().map(|v| v.name.as_str()).collect();
    own.extend(initializers(g));
    own.extend(g.node.iter().flat_map(|n| &n.output).map(String::as_str));
    let mut reads = vec![];
    for n in &g.node {
        reads.extend(n.input.iter().map(String::as_str).chain(named(n)));
        n.attribute.iter().filter_map(|a| a.g.as_deref()).for_each(|g| free(g, &mut reads));
    }
    reads.extend(g.output.iter().map(|o| o.name.as_str()));
    out.extend(reads.into_iter().filter(|r| !r.is_empty() && !own.contains(r)));
}

pub(super) fn order(g: &GraphProto, file: &str) -> Result<Order> {
    let leaves: HashSet<&str> = g.input.iter().map(|v| v.name.as_str()).chain(initializers(g)).collect();
    let mut seen = HashSet::new();
    if let Some(v) = g.input.iter().find(|v| !seen.insert(v.name.as_str())) {
        return Err(bad(file, format!("input '{}' is declared twice", v.name)));
    }
    let mut producer: HashMap<&str, usize> = HashMap::new();
    for (i, n) in g.node.iter().enumerate() {
        for o in n.output.iter().filter(|o| !o.is_empty()) {
            if producer.insert(o, i).is_some() || leaves.contains(o.as_str()) {
                return Err(bad(file, format!("'{o}', a result of {}, has another source", node_name(n, i))));
            }
        }
    }
    // The names that each node reads, including those read by graphs in its attributes.
    let reads: Vec<Vec<&str>> = g
        .node
        .iter()
        .map(|n| {
            let all = n.input.iter().map(String::as_str).chain(named(n));
            let mut r: Vec<&str> = all.filter(|x| !x.is_empty()).collect();
            n.attribute.iter().filter_map(|a| a.g.as_deref()).for_each(|g| free(g, &mut r));
            r
        })
        .collect();
    let sources = |i: usize| reads[i].iter().filter_map(|x| producer.get(x).copied());

    let mut live = vec![false; g.node.len()];
    let mut todo: Vec<usize> =
        g.output.iter().filter_map(|o| producer.get(o.name.as_str()).copied()).collect();
    while let Some(i) = todo.pop() {
        if !std::mem::replace(&mut live[i], true) {
            todo.extend(sources(i));
        }
    }

    // Kahn's algorithm. The set of ready nodes is ordered, so that the smallest index comes first.
    let mut waits: Vec<usize> = vec![0; g.node.len()];
    let mut users: Vec<Vec<usize>> = vec![vec![]; g.node.len()];
    for i in (0..g.node.len()).filter(|&i| live[i]) {
        for s in sources(i) {
            waits[i] += 1;
            users[s].push(i);
        }
    }
    let mut ready: BTreeSet<usize> = (0..g.node.len()).filter(|&i| live[i] && waits[i] == 0).collect();
    let mut nodes = Vec::new();
    while let Some(i) = ready.pop_first() {
        nodes.push(i);
        for &u in &users[i] {
            waits[u] -= 1;
            if waits[u] == 0 {
                ready.insert(u);
            }
        }
    }
    let stuck = || (0..g.node.len()).filter(|&i| live[i] && waits[i] > 0);
    if stuck().next().is_some() {
        let names: Vec<String> = stuck().take(MAX_LISTED).map(|i| node_name(&g.node[i], i)).collect();
        let more = match stuck().count() - names.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let names = names.join(", ");
        return Err(bad(file, format!("these nodes depend on each other in a cycle: {names}{more}")));
    }

    let outputs: HashSet<&str> = g.output.iter().map(|o| o.name.as_str()).collect();
    let mut last: HashMap<&str, usize> = HashMap::new();
    for (at, &i) in nodes.iter().enumerate() {
        // A result that nothing reads is dropped right after its node.
        last.extend(g.node[i].output.iter().map(|o| (o.as_str(), at)));
        last.extend(reads[i].iter().map(|r| (*r, at)));
    }
    let mut drops = vec![vec![]; nodes.len()];
    for (name, at) in last.iter().filter(|(n, _)| !outputs.contains(*n)) {
        drops[*at].push(name.to_string());
    }
    let reads = last.into_keys().chain(outputs).map(String::from).collect();
    Ok(Order { nodes, drops, reads })
}
