//! From a model's nodes to a graph.

use super::build::{Builder, Value};
use super::host::small;
use super::model::{Model, Port};
use super::node::Call;
use super::ops;
use super::proto::NodeProto;
use super::tensor;
use crate::bad;
use crate::data::byte_len;
use halcyon_ir::{Bindings, ConstData, Dim, Error, Graph, Result, Shape, Span, TensorType};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// A model as a graph. Inputs and outputs of the graph have the model's names and order.
#[derive(Clone, Debug)]
pub struct Imported {
    pub graph: Graph,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Inputs whose value is built into the graph. They are still declared, and ignored.
    pub fixed: Vec<String>,
}

/// A node's name, or its op and place where it has none.
pub fn node_name(n: &NodeProto, index: usize) -> String {
    if n.name.is_empty() { format!("{}#{index}", n.op_type) } else { n.name.clone() }
}

/// Builds the graph of a model whose operators are all supported. Each time a value that must be known depends on inputs
/// whose values are at hand, building starts again with those fixed.
pub fn import(m: &Model, shapes: &[(&str, Shape)], values: &[(&str, ConstData)]) -> Result<Imported> {
    let ports = m.inputs()?;
    let mut fixed: BTreeMap<&str, &ConstData> = BTreeMap::new();
    loop {
        let mut b = Builder::default();
        let e = match build(m, &ports, shapes, &fixed, &mut b) {
            Ok(graph) => {
                return Ok(Imported {
                    graph,
                    inputs: ports.iter().map(|p| p.name.clone()).collect(),
                    outputs: m.graph()?.output.iter().map(|o| o.name.clone()).collect(),
                    fixed: fixed.into_keys().map(String::from).collect(),
                });
            }
            Err(e) => e,
        };
        let before = fixed.len();
        for k in &b.missing {
            let name = ports.get(*k as usize).map(|p| p.name.as_str());
            match values.iter().find(|(n, v)| Some(*n) == name && small(v.dtype, &v.dims)) {
                Some((n, v)) => fixed.insert(n, v),
                None => return Err(e),
            };
        }
        if fixed.len() == before {
            return Err(e);
        }
    }
}

fn build<'m>(
    m: &'m Model,
    ports: &'m [Port],
    shapes: &[(&str, Shape)],
    fixed: &BTreeMap<&str, &ConstData>,
    b: &mut Builder,
) -> Result<Graph> {
    let g = m.graph()?;
    let mut values: HashMap<&str, Value> = HashMap::new();
    for (p, shape) in ports.iter().zip(input_shapes(m, ports, shapes)?) {
        b.g.span = Span::new(p.name.as_str());
        let ty = TensorType::new(p.dtype, shape);
        addressable(&ty).map_err(|e| e.at(&b.g.span))?;
        let id = b.g.input(&p.name, ty.clone());
        let v = match fixed.get(p.name.as_str()) {
            None => b.value(id),
            Some(v) => {
                let v = Value::weight((*v).clone(), &p.name);
                if v.ty != ty {
                    let what = format!("input '{}' is {ty}, but its value is {}", p.name, v.ty);
                    return Err(Error::argument("import", what));
                }
                v
            }
        };
        if values.insert(&p.name, v).is_some() {
            return Err(bad(&m.file, format!("input '{}' is declared twice", p.name)));
        }
    }

    let order = order(m)?;
    let mut needed: BTreeSet<&str> =
        order.iter().flat_map(|&i| &g.node[i].input).map(String::as_str).collect();
    needed.extend(g.output.iter().map(|o| o.name.as_str()));
    for t in g.initializer.iter().filter(|t| needed.contains(t.name.as_str())) {
        let v = Value::weight(tensor::decode(t, &m.external, &m.file)?, &t.name);
        if values.insert(&t.name, v).is_some() {
            return Err(bad(&m.file, format!("initializer '{}' is declared twice", t.name)));
        }
    }

    for i in order {
        let (n, name) = (&g.node[i], node_name(&g.node[i], i));
        let opset = m.opset(&n.domain);
        let row = ops::find(&n.domain, &n.op_type)
            .ok_or_else(|| Error::internal(format!("{} passed the check without a row", n.op_type)))?;
        let mut inputs = Vec::with_capacity(n.input.len());
        for x in &n.input {
            inputs.push(match x.as_str() {
                "" => None,
                x => Some(values.get(x).cloned().ok_or_else(|| missing(m, x, &name))?),
            });
        }
        b.g.span = Span::new(name.as_str());
        let call =
            Call { node: n, name: &name, opset, inputs: &inputs, external: &m.external, file: &m.file };
        let out = (row.build)(b, &call).map_err(|e| locate(e.at(&b.g.span), &name))?;
        for (k, o) in n.output.iter().enumerate().filter(|(_, o)| !o.is_empty()) {
            let v = out.get(k).cloned().ok_or_else(|| {
                Error::unsupported(
                    format!("result {k} ('{o}') of {} in {name}", n.op_type),
                    "Leave that result out of the model",
                )
            })?;
            addressable(&v.ty).map_err(|e| e.at(&b.g.span))?;
            values.insert(o, v);
        }
    }

    for o in &g.output {
        let v = values
            .get(o.name.as_str())
            .ok_or_else(|| bad(&m.file, format!("output '{}' is not computed by any node", o.name)))?;
        b.g.span = Span::new(o.name.as_str());
        let id = b.id(v)?;
        b.g.output(&o.name, id);
    }
    b.g.span = Span::default();
    Ok(std::mem::take(&mut b.g))
}

/// Refuses types whose known sizes alone are more than memory can hold.
fn addressable(t: &TensorType) -> Result<()> {
    let known: Vec<usize> = t.shape.iter().filter_map(|d| d.known()).collect();
    match byte_len(t.dtype, &known) {
        Some(_) => Ok(()),
        None => Err(Error::shape("import", format!("{t} is too large to address"))),
    }
}

/// Names the node in an error that has no place of its own.
fn locate(e: Error, node: &str) -> Error {
    match e {
        Error::Unsupported { what, next } if !what.contains(node) => {
            Error::Unsupported { what: format!("{what} (at {node})"), next }
        }
        e => e,
    }
}

fn missing(m: &Model, value: &str, node: &str) -> Error {
    bad(&m.file, format!("node {node} reads '{value}', which is no input, weight or result of another node"))
}

/// The shape of every input: the given one, or the declared one with the symbols that the given ones determine.
fn input_shapes(m: &Model, ports: &[Port], given: &[(&str, Shape)]) -> Result<Vec<Shape>> {
    if let Some((name, _)) = given.iter().find(|(n, _)| !ports.iter().any(|p| p.name == *n)) {
        let have = ports.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(Error::argument("import", format!("the model has no input '{name}', only {have}")));
    }
    let find = |p: &Port| given.iter().find(|(n, _)| *n == p.name).map(|(_, s)| s);
    let mut known = Bindings::new();
    for p in ports {
        let (Some(s), Some(want)) = (find(p), &p.shape) else {
            continue;
        };
        let bad = |why: String| {
            Error::shape(
                "import",
                format!("input '{}' is declared {}{want}, given {s}: {why}", p.name, p.dtype),
            )
        };
        if s.rank() != want.rank() {
            return Err(bad("the ranks differ".into()));
        }
        for (w, d) in want.iter().zip(s.iter()) {
            match (w.known(), d.known()) {
                (Some(a), Some(b)) if a != b => return Err(bad(format!("{b} is not {a}"))),
                (None, Some(n)) => {
                    let mut names = BTreeSet::new();
                    w.symbols(&mut names);
                    for name in names {
                        let old = *known.entry(name).or_insert(n);
                        if old != n {
                            return Err(bad(format!("{w} is {n} here and {old} elsewhere")));
                        }
                    }
                }
                _ => {}
            }
        }
    }
    let bind = |d: &Dim| d.bind(&known).unwrap_or(*d);
    ports
        .iter()
        .map(|p| match (find(p), &p.shape) {
            (Some(s), _) => Ok(s.clone()),
            (None, Some(s)) => Ok(s.iter().map(bind).collect()),
            (None, None) => Err(Error::argument(
                "import",
                format!("{}: input '{}' declares no shape, so one must be given", m.file, p.name),
            )),
        })
        .collect()
}

/// The nodes that the outputs need, each after those it reads; in the model's order where that is such an order.
fn order(m: &Model) -> Result<Vec<usize>> {
    let g = m.graph()?;
    let leaves: HashSet<&str> = g
        .input
        .iter()
        .map(|v| v.name.as_str())
        .chain(g.initializer.iter().map(|t| t.name.as_str()))
        .collect();
    let mut producer: HashMap<&str, usize> = HashMap::new();
    for (i, n) in g.node.iter().enumerate() {
        for o in n.output.iter().filter(|o| !o.is_empty()) {
            if producer.insert(o, i).is_some() || leaves.contains(o.as_str()) {
                return Err(bad(
                    &m.file,
                    format!("'{o}', a result of {}, has another source", node_name(n, i)),
                ));
            }
        }
    }
    let sources = |i: usize| g.node[i].input.iter().filter_map(|x| producer.get(x.as_str()).copied());

    let mut live = vec![false; g.node.len()];
    let mut todo: Vec<usize> =
        g.output.iter().filter_map(|o| producer.get(o.name.as_str()).copied()).collect();
    while let Some(i) = todo.pop() {
        if !std::mem::replace(&mut live[i], true) {
            todo.extend(sources(i));
        }
    }

    // Kahn's algorithm; the set gives the smallest ready node.
    let mut waits: Vec<usize> = vec![0; g.node.len()];
    let mut users: Vec<Vec<usize>> = vec![vec![]; g.node.len()];
    for i in (0..g.node.len()).filter(|&i| live[i]) {
        for s in sources(i) {
            waits[i] += 1;
            users[s].push(i);
        }
    }
    let mut ready: BTreeSet<usize> = (0..g.node.len()).filter(|&i| live[i] && waits[i] == 0).collect();
    let mut out = Vec::new();
    while let Some(i) = ready.pop_first() {
        out.push(i);
        for &u in &users[i] {
            waits[u] -= 1;
            if waits[u] == 0 {
                ready.insert(u);
            }
        }
    }
    let stuck: Vec<String> =
        (0..g.node.len()).filter(|&i| live[i] && waits[i] > 0).map(|i| node_name(&g.node[i], i)).collect();
    if !stuck.is_empty() {
        return Err(bad(
            &m.file,
            format!("these nodes depend on each other in a cycle: {}", stuck.join(", ")),
        ));
    }
    Ok(out)
}
