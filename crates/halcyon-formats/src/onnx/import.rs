//! Walks a model's nodes and builds the graph.

use super::build::{Builder, Value};
use super::function;
use super::host::small;
use super::item::{Datum, Item};
use super::ledger::Ledger;
use super::limits::{Limits, RunOptions};
use super::model::{Model, Port, PortType, opset};
use super::node::Call;
use super::ops::{self, Build, gradient};
use super::order::{Order, order};
use super::proto::{FunctionProto, GraphProto, NodeProto, OperatorSetIdProto};
use super::sparse;
use super::stage::{Engine, MAX_NODES, Placement};
use super::tensor;
use crate::bad;
use crate::data::byte_len;
use halcyon_ir::{Bindings, ConstData, Dim, Error, Graph, Result, Shape, Span, TensorType};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::rc::Rc;

/// A model imported as one graph. Its inputs and outputs have the model's names and order.
#[derive(Clone, Debug)]
pub struct Imported {
    pub graph: Graph,
    pub inputs: Vec<String>,
    pub outputs: Vec<String>,
    /// Inputs whose value is built into the graph. They remain declared but are ignored.
    pub fixed: Vec<String>,
}

impl Imported {
    /// The types of the outputs, in their order.
    pub fn output_types(&self) -> Vec<TensorType> {
        self.graph.outputs().iter().map(|o| self.graph.ty(o.node).clone()).collect()
    }
}

/// How a model can be run.
#[derive(Clone, Debug)]
pub enum Outcome {
    Graph(Box<Imported>),
    /// The model cannot be one graph, or is better run in stages. The string gives the reason: values
    /// computed at run time determine the rest of the computation, a loop is long, or an input or output is
    /// not a tensor of numbers. [`Model::run_staged`] runs such a model.
    Staged(String),
}

/// A node's name, or its operator and index if it has none.
pub(super) fn node_name(n: &NodeProto, index: usize) -> String {
    if n.name.is_empty() { format!("{}#{index}", n.op_type) } else { n.name.clone() }
}

/// Limit on the nesting of graphs and functions.
const MAX_DEPTH: usize = 64;
/// Limits on the nodes and bytes of all expanded function bodies together.
const MAX_EXPANDED_NODES: usize = 1 << 18;
const MAX_COPIED_BYTES: usize = 256 << 20;
/// Limit on the nodes walked, counting every loop iteration, and its increase per node of the graph built so
/// far. So a loop that only counts, and therefore builds no nodes, fails quickly.
const MAX_WALKED_NODES: usize = if cfg!(fuzzing) { 1 << 14 } else { 1 << 17 };
const WALKED_PER_OP: usize = 64;
/// Limit on the nodes of the graph for any model, and its increase per node walked.
const MAX_GRAPH_NODES: usize = if cfg!(fuzzing) { 1 << 14 } else { 1 << 19 };
const NODES_PER_NODE: usize = 256;

/// The names visible while a graph is walked, and their values.
#[derive(Debug)]
pub(super) struct Scope<'s> {
    vars: HashMap<String, Item>,
    parent: Option<&'s Scope<'s>>,
    pub(super) opsets: &'s [OperatorSetIdProto],
}

impl<'s> Scope<'s> {
    /// A scope without an enclosing one.
    pub(super) fn alone(vars: HashMap<String, Item>, opsets: &'s [OperatorSetIdProto]) -> Scope<'s> {
        Scope { vars, parent: None, opsets }
    }

    pub(super) fn get(&self, name: &str) -> Option<&Item> {
        self.vars.get(name).or_else(|| self.parent.and_then(|p| p.get(name)))
    }
}

/// The state of one walk through a model.
#[derive(Debug)]
pub(super) struct Walk<'m> {
    m: &'m Model,
    functions: HashMap<(&'m str, &'m str, &'m str), &'m FunctionProto>,
    /// Node orders of the graphs walked, keyed by the graph's address. The model outlives the walk.
    orders: RefCell<HashMap<*const GraphProto, Rc<Order>>>,
    /// Function bodies expanded for a calling node, keyed by the node's address.
    bodies: RefCell<HashMap<*const NodeProto, Rc<GraphProto>>>,
    copied: Cell<usize>,
    depth: Cell<usize>,
    walked: Cell<usize>,
    /// Total nodes of `bodies`.
    expanded: Cell<usize>,
    ledger: RefCell<Ledger>,
}

impl<'m> Walk<'m> {
    fn new(m: &'m Model) -> Walk<'m> {
        Walk {
            m,
            functions: m.functions(),
            orders: RefCell::default(),
            bodies: RefCell::default(),
            copied: Cell::new(0),
            depth: Cell::new(0),
            walked: Cell::new(0),
            expanded: Cell::new(0),
            ledger: RefCell::new(Ledger::new(m.proto.encoded_len())),
        }
    }

    /// The results of a graph for its operands, given in the order of its inputs.
    pub(super) fn graph(
        &self,
        b: &mut Builder,
        g: &GraphProto,
        args: Vec<Option<Item>>,
        parent: Option<&Scope<'_>>,
        opsets: &[OperatorSetIdProto],
    ) -> Result<Vec<Item>> {
        if self.depth.get() >= MAX_DEPTH {
            return Err(bad(
                &self.m.file,
                format!("graphs and functions are nested deeper than {MAX_DEPTH}"),
            ));
        }
        self.depth.set(self.depth.get() + 1);
        let out = self.body(b, g, args, parent, opsets);
        self.depth.set(self.depth.get() - 1);
        out
    }

    fn body(
        &self,
        b: &mut Builder,
        g: &GraphProto,
        args: Vec<Option<Item>>,
        parent: Option<&Scope<'_>>,
        opsets: &[OperatorSetIdProto],
    ) -> Result<Vec<Item>> {
        let m = self.m;
        let known = self.orders.borrow().get(&std::ptr::from_ref(g)).cloned();
        let order = match known {
            Some(o) => o,
            None => {
                let o = Rc::new(order(g, &m.file)?);
                self.orders.borrow_mut().insert(g, o.clone());
                o
            }
        };
        if args.len() > g.input.len() {
            return Err(bad(
                &m.file,
                format!("graph '{}' takes {} inputs, {} are given", g.name, g.input.len(), args.len()),
            ));
        }
        let mut scope = Scope { vars: HashMap::new(), parent, opsets };
        for (v, x) in g.input.iter().zip(args) {
            if let Some(x) = x
                && scope.vars.insert(v.name.clone(), x).is_some()
            {
                return Err(bad(&m.file, format!("input '{}' is declared twice", v.name)));
            }
        }
        let what = |t: &str| bad(&m.file, format!("initializer '{t}' is declared twice"));
        for t in g.initializer.iter().filter(|t| order.reads.contains(t.name.as_str())) {
            let v: Item = match t.data_type {
                tensor::STRING => tensor::decode_text(t, &m.file)?.into(),
                _ => Value::weight(tensor::decode(t, &m.external, &m.file)?, &t.name).into(),
            };
            if scope.vars.insert(t.name.clone(), v).is_some() {
                return Err(what(&t.name));
            }
        }

        for t in g.sparse_initializer.iter().filter(|t| order.reads.contains(sparse::name(t))) {
            let v = sparse::decode(t, &m.external, &m.file)?.value(b)?;
            if scope.vars.insert(sparse::name(t).to_string(), v.into()).is_some() {
                return Err(what(sparse::name(t)));
            }
        }

        for (at, &i) in order.nodes.iter().enumerate() {
            self.walked.set(self.walked.get() + 1);
            if self.walked.get()
                > MAX_WALKED_NODES.saturating_add(b.node_count().saturating_mul(WALKED_PER_OP))
            {
                return Err(Error::unsupported(
                    format!(
                        "{}: {} nodes were walked, with loops unrolled, but only {} operations were built",
                        m.file,
                        self.walked.get(),
                        b.node_count()
                    ),
                    "Bound the number of iterations",
                ));
            }
            let n = &g.node[i];
            let out = self.node(b, n, i, &scope)?;
            let external = || m.external.mapped();
            self.ledger.borrow_mut().note(b, &out, external).map_err(|e| locate(e, &node_name(n, i)))?;
            let most = MAX_GRAPH_NODES
                .saturating_add(self.walked.get().saturating_mul(NODES_PER_NODE))
                .min(MAX_NODES);
            if b.node_count() > most {
                return Err(Error::unsupported(
                    format!(
                        "{}: too many operations ({} for {} nodes)",
                        m.file,
                        b.node_count(),
                        self.walked.get()
                    ),
                    "Split into fewer parts, or unroll less",
                ));
            }
            for (o, v) in n.output.iter().zip(out).filter(|(o, _)| !o.is_empty()) {
                scope.vars.insert(o.clone(), v);
            }
            for name in &order.drops[at] {
                scope.vars.remove(name);
            }
        }
        let result = |o: &super::proto::ValueInfoProto| {
            scope
                .get(&o.name)
                .cloned()
                .ok_or_else(|| bad(&m.file, format!("output '{}' is not computed by any node", o.name)))
        };
        g.output.iter().map(result).collect()
    }

    /// The results of a node, in the order of its outputs.
    fn node(&self, b: &mut Builder, n: &NodeProto, index: usize, scope: &Scope<'_>) -> Result<Vec<Item>> {
        let (m, name) = (self.m, node_name(n, index));
        let mut inputs = Vec::with_capacity(n.input.len());
        for x in &n.input {
            inputs.push(match x.as_str() {
                "" => None,
                x => Some(scope.get(x).cloned().ok_or_else(|| missing(m, x, &name))?),
            });
        }
        if let Some(f) = self.functions.get(&function::key(n)) {
            b.g.span = Span::new(name.as_str());
            return self.function(b, f, n, inputs);
        }
        let opset = opset(scope.opsets, &n.domain);
        let row = ops::find(&n.domain, &n.op_type)
            .ok_or_else(|| Error::internal(format!("{} has no row, but the check accepted it", n.op_type)))?;
        b.g.span = Span::new(name.as_str());
        let call = Call {
            node: n,
            name: &name,
            opset,
            inputs: &inputs,
            walk: self,
            scope,
            external: &m.external,
            file: &m.file,
        };
        let out = match row.build {
            Build::Items(f) => f(b, &call),
            Build::Tensors(f) => match inputs.iter().flatten().find(|i| i.tensor().is_none()) {
                Some(i) => ops::text::run(b, &call, f).and_then(|out| {
                    out.ok_or_else(|| {
                        call.unsupported(
                            &format!("an operand that is {}", i.kind()),
                            "This operator accepts only tensors of numbers",
                        )
                    })
                }),
                None => f(b, &call).map(|v| v.into_iter().map(Item::from).collect()),
            },
        };
        let out = out.map_err(|e| locate(e.at(&b.g.span), &name))?;
        for (k, o) in n.output.iter().enumerate().filter(|(_, o)| !o.is_empty()) {
            let v = out.get(k).ok_or_else(|| {
                Error::unsupported(
                    format!("result {k} ('{o}') of {} in {name}", n.op_type),
                    "Leave that result out of the model",
                )
            })?;
            let mut all = vec![];
            v.tensors(&mut all);
            for v in all {
                addressable(&v.ty).map_err(|e| e.at(&b.g.span))?;
            }
        }
        Ok(out)
    }

    fn function(
        &self,
        b: &mut Builder,
        f: &FunctionProto,
        n: &NodeProto,
        args: Vec<Option<Item>>,
    ) -> Result<Vec<Item>> {
        let known = self.bodies.borrow().get(&std::ptr::from_ref(n)).cloned();
        let body = match known {
            Some(g) => g,
            None => {
                self.copied.set(self.copied.get().saturating_add(function::weight(f, n)));
                if self.copied.get() > MAX_COPIED_BYTES {
                    return Err(Error::unsupported(
                        format!(
                            "{}: calls of functions whose copies take more than {MAX_COPIED_BYTES} bytes",
                            self.m.file
                        ),
                        "Give the functions fewer attributes, or call them less often",
                    ));
                }
                let g = Rc::new(function::body(f, n, &self.m.file)?);
                self.expanded.set(self.expanded.get() + g.node.len());
                if self.expanded.get() > MAX_EXPANDED_NODES {
                    return Err(Error::unsupported(
                        format!(
                            "{}: more than {MAX_EXPANDED_NODES} nodes with functions expanded",
                            self.m.file
                        ),
                        "Call fewer functions from functions",
                    ));
                }
                self.bodies.borrow_mut().insert(n, g.clone());
                g
            }
        };
        self.graph(b, &body, args, None, &f.opset_import)
    }
}

/// Builds the graph of a model whose operators are all supported. Whenever a value that must be known depends
/// on inputs with given values, the graph is rebuilt with those inputs fixed.
pub(super) fn import(
    m: &Model,
    shapes: &[(&str, Shape)],
    values: &[(&str, ConstData)],
    limits: &Limits,
) -> Result<Outcome> {
    let ports = m.inputs()?;
    if let Some(p) =
        ports.iter().chain(&m.typed_outputs()?).find(|p| !matches!(p.ty, PortType::Tensor { .. }))
    {
        return Ok(Outcome::Staged(format!("'{}' is {}", p.name, p.ty.kind())));
    }
    let sizes = input_shapes(m, &ports, shapes)?;
    let mut fixed: BTreeMap<&str, &ConstData> = BTreeMap::new();
    loop {
        let mut b = Builder::bounded(limits.clone());
        let e = match build(m, &ports, &sizes.shapes, &fixed, &mut b) {
            Ok(graph) => {
                return Ok(Outcome::Graph(Box::new(Imported {
                    graph,
                    inputs: ports.iter().map(|p| p.name.clone()).collect(),
                    outputs: m.graph()?.output.iter().map(|o| o.name.clone()).collect(),
                    fixed: fixed.into_keys().map(String::from).collect(),
                })));
            }
            Err(e) => e,
        };
        let before = fixed.len();
        let mut open = b.missing.is_empty();
        for k in &b.missing {
            let name = ports.get(*k as usize).map(|p| p.name.as_str());
            match values.iter().find(|(n, v)| Some(*n) == name && small(v.dtype, &v.dims)) {
                Some((n, v)) => {
                    fixed.insert(n, v);
                }
                None => open = true,
            };
        }
        match b.needs_engine {
            None => return Err(sizes.explain(e)),
            Some(why) if open || fixed.len() == before => return Ok(Outcome::Staged(why)),
            Some(_) => {}
        }
    }
}

fn build<'m>(
    m: &'m Model,
    ports: &'m [Port],
    shapes: &[Shape],
    fixed: &BTreeMap<&str, &ConstData>,
    b: &mut Builder,
) -> Result<Graph> {
    let g = m.graph()?;
    let mut args = HashMap::new();
    for (p, shape) in ports.iter().zip(shapes) {
        b.g.span = Span::new(p.name.as_str());
        let ty = TensorType::new(p.dtype()?, shape.clone());
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
        args.insert(p.name.as_str(), Item::from(v));
    }
    b.differentiates = gradient::used(m);
    let out = Walk::new(m).graph(b, g, arguments(g, args), None, &m.proto.opset_import)?;
    for (o, v) in g.output.iter().zip(out) {
        b.g.span = Span::new(o.name.as_str());
        let Item::Tensor(v) = v else {
            return Err(b.no_engine(&format!("output '{}', {},", o.name, v.kind())));
        };
        let id = b.id(&v)?;
        b.g.output(&o.name, id);
    }
    b.g.span = Span::default();
    Ok(std::mem::take(&mut b.g))
}

/// Orders the given values as the graph's inputs. Inputs without a value have initializers.
fn arguments(g: &GraphProto, mut values: HashMap<&str, Item>) -> Vec<Option<Item>> {
    g.input.iter().map(|v| values.remove(v.name.as_str())).collect()
}

/// Runs a model in stages. `inputs` are in the order of the model's inputs.
pub(super) fn run_staged(
    m: &Model,
    inputs: &[Datum],
    engine: Box<dyn Engine>,
    options: &RunOptions,
) -> Result<(Vec<Datum>, Placement)> {
    let (g, ports) = (m.graph()?, m.inputs()?);
    if ports.len() != inputs.len() {
        let names: Vec<&str> = ports.iter().map(|p| p.name.as_str()).collect();
        return Err(Error::argument(
            "inputs",
            format!("the model takes {} ({}), {} given", ports.len(), names.join(", "), inputs.len()),
        ));
    }
    let shapes: Vec<(&str, Shape)> = ports
        .iter()
        .zip(inputs)
        .filter_map(|(p, x)| Some((p.name.as_str(), Shape::from(&x.tensor()?.dims))))
        .collect();
    let sizes = input_shapes(m, &ports, &shapes)?;
    let mut b = Builder::staged(engine);
    b.limits = Limits::new(options.clone());
    b.differentiates = gradient::used(m);
    let mut args = HashMap::new();
    for (p, x) in ports.iter().zip(inputs) {
        b.g.span = Span::new(p.name.as_str());
        p.ty.accepts(x).map_err(|why| Error::argument(format!("input '{}'", p.name), why))?;
        let x = item(&mut b, x, &p.name);
        args.insert(p.name.as_str(), x);
    }
    let out = Walk::new(m).graph(&mut b, g, arguments(g, args), None, &m.proto.opset_import);
    let values = out.and_then(|out| b.results(&out)).map_err(|e| sizes.explain(e))?;
    Ok((values, b.placement()))
}

/// Converts a caller's value to an item of the import.
fn item(b: &mut Builder, x: &Datum, name: &str) -> Item {
    match x {
        Datum::Tensor(t) => b.runtime_constant(t.clone(), name).into(),
        Datum::Text(t) => t.clone().into(),
        Datum::Sequence(s) => Item::sequence(s.iter().map(|x| item(b, x, name)).collect()),
        Datum::Optional(None) => Item::Optional(None),
        Datum::Optional(Some(x)) => Item::Optional(Some(Rc::new(item(b, x, name)))),
        Datum::Map(k, x) => Item::Map(Rc::new((k.clone(), item(b, x, name)))),
    }
}

/// Rejects types whose known sizes alone exceed the address space.
fn addressable(t: &TensorType) -> Result<()> {
    let known: Vec<usize> = t.shape.iter().filter_map(|d| d.known()).collect();
    match byte_len(t.dtype, &known) {
        Some(_) => t.check("import"),
        None => Err(Error::shape("import", format!("{t} is too large to address"))),
    }
}

/// Adds the node's name to an error that has no location.
fn locate(e: Error, node: &str) -> Error {
    match e {
        Error::Unsupported { what, next } if !what.contains(node) => {
            Error::Unsupported { what: format!("{what} (at {node})"), next }
        }
        e => e,
    }
}

fn missing(m: &Model, value: &str, node: &str) -> Error {
    bad(
        &m.file,
        format!("node {node} reads '{value}', which is not an input, weight or result of another node"),
    )
}

/// The shapes of inputs.
struct Sizes {
    /// The shape of every input that is a tensor of numbers: the given shape, else the declared one. Symbols
    /// of declared shapes that the given shapes determine are replaced by sizes.
    shapes: Vec<Shape>,
    /// The input whose size differs from that of another input, although the model declares both with one
    /// symbol, and what is wrong with it.
    differing: Option<(String, String)>,
}

impl Sizes {
    /// Adds to an error of shapes that a declaration tells their cause.
    fn explain(&self, e: Error) -> Error {
        match (&self.differing, e) {
            (Some((input, what)), e @ Error::Shape { .. }) => Error::argument(input, format!("{what}: {e}")),
            (_, e) => e,
        }
    }
}

/// The shapes of inputs. Inputs with given shapes may differ in a size that the model declares with one
/// symbol. Exporters give the same name to sizes that nothing in the model makes equal, and onnxruntime
/// accepts them.
fn input_shapes(m: &Model, ports: &[Port], given: &[(&str, Shape)]) -> Result<Sizes> {
    let declared: HashSet<&str> = ports.iter().map(|p| p.name.as_str()).collect();
    if let Some((name, _)) = given.iter().find(|(n, _)| !declared.contains(n)) {
        let have = ports.iter().map(|p| p.name.as_str()).collect::<Vec<_>>().join(", ");
        return Err(Error::argument("import", format!("the model has no input '{name}', only {have}")));
    }
    let mut of: HashMap<&str, &Shape> = HashMap::new();
    for (n, s) in given {
        of.entry(n).or_insert(s);
    }
    let find = |p: &Port| of.get(p.name.as_str()).copied();
    let ports: Vec<&Port> = ports.iter().filter(|p| matches!(p.ty, PortType::Tensor { .. })).collect();
    let mut known = Bindings::new();
    let mut symbols = HashMap::new();
    let mut differing = None;
    for &p in &ports {
        let (Some(s), Some(want)) = (find(p), p.shape()) else {
            continue;
        };
        let bad = |why: String| {
            let what = format!("the model takes {}, and {s} is given: {why}", p.ty);
            Error::argument(format!("input '{}'", p.name), what)
        };
        if s.rank() != want.rank() {
            let dims = |n: usize| format!("{n} dimension{}", if n == 1 { "" } else { "s" });
            return Err(bad(format!("{}, not {}", dims(s.rank()), dims(want.rank()))));
        }
        for (w, d) in want.iter().zip(s.iter()) {
            match (w.known(), d.known()) {
                (Some(a), Some(b)) if a != b => return Err(bad(format!("size {b} where it has {a}"))),
                (None, Some(n)) => {
                    let mut names = BTreeSet::new();
                    w.symbols(&mut names);
                    for name in names {
                        let old = *known.entry(name.clone()).or_insert(n);
                        if old != n {
                            let what = format!("the model takes {}, and {s} is given: ", p.ty);
                            let what = format!("{what}{w} is {n} here and {old} elsewhere");
                            differing.get_or_insert((format!("input '{}'", p.name), what));
                            symbols.insert(name, (n, old));
                        }
                    }
                }
                _ => {}
            }
        }
    }
    let bind = |p: &Port, d: &Dim| {
        let mut names = BTreeSet::new();
        d.symbols(&mut names);
        match names.iter().find_map(|name| symbols.get_key_value(name)) {
            None => Ok(d.bind(&known).unwrap_or(*d)),
            Some((name, (a, b))) => {
                let what = format!(
                    "no shape is given, and {name} of {} is {a} in one input and {b} in another",
                    p.ty
                );
                Err(Error::argument(format!("input '{}'", p.name), what))
            }
        }
    };
    let shapes = ports
        .iter()
        .map(|p| match (find(p), p.shape()) {
            (Some(s), _) => Ok(s.clone()),
            (None, Some(s)) => s.iter().map(|d| bind(p, d)).collect(),
            (None, None) => Err(Error::argument(
                "import",
                format!("{}: input '{}' declares no shape, so one must be given", m.file, p.name),
            )),
        })
        .collect::<Result<_>>()?;
    Ok(Sizes { shapes, differing })
}
