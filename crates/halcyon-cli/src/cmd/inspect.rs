//! `halcyon inspect`: what a model holds, costs and would run on, without running it; or the tensors of a file.

use crate::args::{InputArgs, InspectArgs};
use crate::report::{self, size, table};
use crate::source;
use halcyon::hal::select;
use halcyon::ir::graph::NodeId;
use halcyon::ir::layout::View;
use halcyon::ir::lower::{LowerOptions, lower};
use halcyon::ir::passes::inline::inline_composites;
use halcyon::ir::plan::{Plan, StepWork};
use halcyon::ir::target::{Operand, Target};
use halcyon::ir::{Graph, Op, TensorType, cost};
use halcyon::{Backend, BackendType, ConstData, Error, Level, Result, Scalar};
use halcyon_formats::npz::Npz;
use halcyon_formats::onnx::{
    Datum, Engine, Handle, Keys, Model, Operator, Outcome, Port, PortType, Summary, Text, Weight, tensor,
};
use halcyon_formats::safetensors::SafeTensors;
use halcyon_formats::sniff::{self, Kind};
use halcyon_formats::{mmap, npy};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::rc::Rc;
use std::sync::Arc;

pub fn main(a: &InspectArgs) -> Result<u8> {
    let bytes = mmap::open(&a.file)?;
    let name = a.file.display().to_string();
    let weights = match sniff::kind(&bytes) {
        Some(Kind::SafeTensors) => {
            let f = SafeTensors::open(&a.file)?;
            let all = f.names().map(|n| (n.to_string(), f.get(n))).collect();
            (Kind::SafeTensors, all, f.metadata().clone())
        }
        Some(Kind::Npz) => {
            let f = Npz::open(&a.file)?;
            (Kind::Npz, f.names().map(|n| (n.to_string(), f.get(n))).collect(), BTreeMap::new())
        }
        Some(Kind::Npy) => (Kind::Npy, vec![(String::new(), npy::read(&a.file))], BTreeMap::new()),
        Some(Kind::OnnxTensor) => {
            let (n, t) = tensor::read_pb(&a.file)?;
            (Kind::OnnxTensor, vec![(n, Ok(t))], BTreeMap::new())
        }
        Some(k @ (Kind::Gguf | Kind::Png | Kind::Jpeg)) => {
            return Err(Error::Format { file: name, what: format!("a file of kind \"{k}\" is no model") });
        }
        // Protobuf has no magic bytes; what is no model is refused by the decoder.
        Some(Kind::Onnx) | None => {
            let r = Report::new(a, bytes.len() as u64)?;
            if a.json {
                report::print_json(&r.json())?
            } else {
                report::print(&r.text())?
            };
            return Ok(0);
        }
    };
    tensors(a, bytes.len() as u64, weights)?;
    Ok(0)
}

// Files of tensors.

fn tensors(
    a: &InspectArgs,
    file_bytes: u64,
    (kind, all, metadata): (Kind, Vec<(String, Result<ConstData>)>, BTreeMap<String, String>),
) -> Result<()> {
    let weights: Vec<Weight> =
        all.iter().filter_map(|(n, t)| t.as_ref().ok().map(|t| of_data(n, t))).collect();
    let refused: Vec<(&str, String)> =
        all.iter().filter_map(|(n, t)| t.as_ref().err().map(|e| (n.as_str(), e.to_string()))).collect();
    if a.json {
        return report::print_json(&json!({
            "file": a.file, "kind": kind.to_string(), "bytes": file_bytes, "metadata": metadata,
            "parameters": by_type_json(&weights),
            "tensors": weights.iter().map(weight_json).collect::<Vec<_>>(),
            "unsupported": refused.iter().map(|(n, e)| json!({ "name": n, "reason": e })).collect::<Vec<_>>(),
        }));
    }
    let mut out = format!("{}: {kind}, {}\n", a.file.display(), size(file_bytes));
    for (k, v) in &metadata {
        let _ = writeln!(out, "  {k}: {}", short(v, 100));
    }
    out += &parameters(&weights);
    out += "\ntensors\n";
    out += &weight_rows(weights.iter());
    for (n, e) in refused {
        let _ = writeln!(out, "  {n}: {e}");
    }
    report::print(&out)
}

fn of_data(name: &str, t: &ConstData) -> Weight {
    Weight {
        name: name.into(),
        dtype: t.dtype.name().into(),
        dims: t.dims.iter().map(|&d| d as i64).collect(),
        elements: t.numel() as u64,
        bytes: t.bytes().len() as u64,
        external: false,
    }
}

// Models.

/// Domain and name of an operator.
type Key = (String, String);

/// Everything the command has to tell of a model.
struct Report<'a> {
    a: &'a InspectArgs,
    file_bytes: u64,
    model: Summary,
    work: Result<Work, String>,
    /// Exit code: that of the error for models that are broken, 0 for those that are not supported.
    code: u8,
    backends: Vec<On>,
    /// Backends that have no device here, with the reason.
    absent: Vec<(BackendType, String)>,
}

/// The model's graphs for some sizes.
#[derive(Default)]
struct Work {
    /// What the inputs were taken to be.
    inputs: Vec<(String, String)>,
    /// Inputs whose values the graph holds for.
    fixed: Vec<String>,
    /// One; several where the model runs in stages, for this reason.
    graphs: Vec<Graph>,
    staged: Option<String>,
    /// Why the stages end before the model does.
    stopped: Option<String>,
    /// Nodes that the host computes.
    host: Vec<(String, usize)>,
    by_op: HashMap<Key, Cost>,
    total: Cost,
    activations: Vec<Activation>,
}

#[derive(Clone, Copy, Default)]
struct Cost {
    nodes: usize,
    flops: u64,
    bytes: u64,
}

struct Activation {
    bytes: u64,
    ty: String,
    op: String,
    node: String,
}

/// What a backend would do.
struct On {
    kind: BackendType,
    id: String,
    name: String,
    plans: Result<Planned, Vec<Refused>>,
}

#[derive(Default)]
struct Planned {
    steps: usize,
    library: usize,
    generated: usize,
    host: usize,
    flops: u64,
    bytes: u64,
    /// The largest of any graph.
    scratch: u64,
    weights: u64,
    kernels: BTreeMap<String, usize>,
    by_op: HashMap<Key, BTreeMap<String, usize>>,
    warnings: Vec<String>,
}

/// Something a backend has no kernel for.
struct Refused {
    op: Key,
    node: String,
    reason: String,
}

impl<'a> Report<'a> {
    fn new(a: &'a InspectArgs, file_bytes: u64) -> Result<Report<'a>> {
        let level: Level = a.level.parse()?;
        let only: Option<BackendType> = a.backend.as_deref().map(str::parse).transpose()?;
        let file = Model::open(&a.file)?;
        let model = file.summary();
        let (work, code) = match work(&file, &model, a) {
            Ok(w) => (Ok(w), 0),
            // What the command line says is wrong, not the model.
            Err(e @ Error::Argument { .. }) if !a.inputs.is_empty() => return Err(e),
            Err(Error::UnsupportedOps(all)) => {
                (Err(format!("{} of its operators are not supported (see below)", all.len())), 0)
            }
            Err(e @ (Error::Unsupported { .. } | Error::Argument { .. })) => (Err(e.to_string()), 0),
            Err(e) => (Err(e.to_string()), e.exit_code().clamp(1, 255) as u8),
        };
        let (mut backends, mut absent) = (vec![], vec![]);
        let graphs = work.as_ref().map_or(&[][..], |w| &w.graphs);
        let kinds: Vec<BackendType> = match only {
            Some(k) => vec![k],
            None => {
                let mut kinds = vec![];
                for r in select::discover() {
                    match r.reason {
                        None => kinds.push(r.id),
                        Some(why) => absent.push((r.id, report::reason(r.id, &why))),
                    }
                }
                kinds
            }
        };
        for kind in kinds {
            match Backend::builder().backend_type(kind).level(level).build() {
                Ok(b) => backends.push(on(&b, graphs, &model)),
                Err(e) if only.is_some() => return Err(e),
                Err(e) => absent.push((kind, report::reason(kind, &e.to_string()))),
            }
        }
        Ok(Report { a, file_bytes, model, work, code, backends, absent })
    }
}

/// The model's graphs and what they cost.
fn work(file: &Model, model: &Summary, a: &InspectArgs) -> Result<Work> {
    file.check("")?;
    let args = InputArgs {
        inputs: a.inputs.iter().map(|t| source::or_ones(t)).collect(),
        seed: 0,
        image_size: None,
        image_mean: vec![],
        image_std: vec![],
        image_layout: None,
    };
    let ports = file.inputs()?;
    // What is no tensor of numbers is taken as empty.
    let numbers: Vec<Port> =
        ports.iter().filter(|p| matches!(p.ty, PortType::Tensor { .. })).cloned().collect();
    let mut given: HashMap<String, Datum> =
        source::resolve(&numbers, &args, true)?.into_iter().map(|i| (i.name, i.data)).collect();
    let data: Vec<Datum> =
        ports.iter().map(|p| given.remove(&p.name).map_or_else(|| empty(&p.ty), Ok)).collect::<Result<_>>()?;
    let inputs = ports.iter().zip(&data).map(|(p, d)| (p.name.clone(), d.describe())).collect();
    let mut w = Work { inputs, ..Work::default() };
    let outcome = match data.iter().map(|d| d.tensor()).collect::<Option<Vec<_>>>() {
        None => Outcome::Staged("an input is no tensor".into()),
        Some(t) => {
            let named = || ports.iter().map(|p| p.name.as_str()).zip(&t);
            let shapes: Vec<_> = named().map(|(n, t)| (n, (&t.dims).into())).collect();
            let values: Vec<_> = named().map(|(n, t)| (n, (*t).clone())).collect();
            file.outcome(&shapes, &values)?
        }
    };
    match outcome {
        Outcome::Graph(g) => {
            w.fixed = g.fixed;
            w.graphs.push(g.graph);
        }
        Outcome::Staged(why) => {
            w.staged = Some(why);
            let graphs = Rc::new(RefCell::new(vec![]));
            match file.run_staged(&data, Box::new(Dry { graphs: graphs.clone() })) {
                Ok((_, p)) => w.host = p.host_nodes,
                Err(e) => w.stopped = Some(e.to_string()),
            }
            w.graphs = graphs.take();
        }
    }
    for g in &w.graphs {
        costs(g, model, &mut w.by_op, &mut w.total, &mut w.activations)?;
    }
    w.activations.sort_by_key(|x| std::cmp::Reverse(x.bytes));
    Ok(w)
}

/// A value of a type without anything in it; sizes that are open are 1.
fn empty(ty: &PortType) -> Result<Datum> {
    Ok(match ty {
        PortType::Tensor { dtype, shape } => {
            let dims: Vec<usize> = shape.iter().flat_map(|s| s.iter()).map(|d| d.known().unwrap_or(1)).collect();
            let fits = dims.iter().try_fold(1usize, |a, d| a.checked_mul(*d)).is_some_and(|n| dtype.bytes(n) <= ZEROS);
            if !fits {
                return Err(Error::unsupported(format!("a value of {ty}"), "Give smaller inputs"));
            }
            Datum::Tensor(ConstData::splat(*dtype, &dims, Scalar::I(0))?)
        }
        PortType::Text { shape } => {
            let dims: Vec<usize> = shape.iter().flat_map(|s| s.iter()).map(|d| d.known().unwrap_or(1)).collect();
            let n = dims.iter().try_fold(1usize, |a, d| a.checked_mul(*d)).filter(|n| *n <= ZEROS >> 6);
            let n = n.ok_or_else(|| Error::unsupported(format!("a value of {ty}"), "Give smaller inputs"))?;
            Datum::Text(Text::new(&dims, vec![String::new(); n])?)
        }
        PortType::Sequence(_) => Datum::Sequence(vec![]),
        PortType::Optional(_) => Datum::Optional(None),
        PortType::Map(of) => Datum::Map(Keys::Ints(vec![]), Box::new(empty(of)?)),
    })
}

/// Collects the stages of a model and computes nothing: every value that is read is zero.
#[derive(Debug)]
struct Dry {
    graphs: Rc<RefCell<Vec<Graph>>>,
}

/// Most bytes of zeros that a stage may ask for.
const ZEROS: usize = 1 << 28;

impl Engine for Dry {
    fn run(&mut self, graph: Graph, _: &[Handle]) -> Result<Vec<Handle>> {
        let out = graph.outputs().iter().map(|o| Arc::new(graph.ty(o.node).clone()) as Handle).collect();
        self.graphs.borrow_mut().push(graph);
        Ok(out)
    }

    fn upload(&mut self, data: &ConstData) -> Result<Handle> {
        Ok(Arc::new(TensorType::new(data.dtype, &data.dims)))
    }

    fn read(&mut self, t: &Handle) -> Result<ConstData> {
        let t: &TensorType = t.downcast_ref().ok_or_else(|| Error::internal("a tensor of another engine"))?;
        let dims = t.shape.dims()?;
        let n = dims.iter().try_fold(1usize, |a, d| a.checked_mul(*d)).filter(|n| t.dtype.bytes(*n) <= ZEROS);
        if n.is_none() {
            return Err(Error::unsupported(format!("a stage that reads {t}"), "Give smaller inputs"));
        }
        ConstData::splat(t.dtype, &dims, Scalar::I(0))
    }
}

/// The operator that a graph node comes from.
fn owner(model: &Summary, node: &str) -> Key {
    match model.op_of.get(node) {
        Some(k) => k.clone(),
        // Nodes without a name are called by operator and place.
        None => (String::new(), node.split('#').next().unwrap_or("").to_string()),
    }
}

/// An operand as its reader finds it: what a broadcast repeats is there once.
fn operand(g: &Graph, id: NodeId) -> Result<Operand> {
    let n = g.node(id);
    let dims = n.ty.shape.dims()?;
    let view = match n.op {
        Op::Expand => View::dense(&g.shape(n.inputs[0]).dims()?).expand(&dims),
        Op::Full(_) => View::dense(&[]).expand(&dims),
        _ => View::dense(&dims),
    };
    Ok(Operand { dtype: n.ty.dtype, view })
}

/// Adds up what each node costs by itself.
fn costs(
    g: &Graph,
    model: &Summary,
    by_op: &mut HashMap<Key, Cost>,
    total: &mut Cost,
    activations: &mut Vec<Activation>,
) -> Result<()> {
    let (g, _) = inline_composites(g, &|_| false)?;
    let live = g.live(&g.outputs().iter().map(|o| o.node).collect::<Vec<_>>());
    for id in g.ids().filter(|id| live[id.index()]) {
        let n = g.node(id);
        if n.op.is_leaf() || n.op.is_view() {
            continue;
        }
        let ins = n.inputs.iter().map(|i| operand(&g, *i)).collect::<Result<Vec<_>>>()?;
        let out = Operand { dtype: n.ty.dtype, view: View::dense(&n.ty.shape.dims()?) };
        let (mut flops, bytes) = cost::of(&n.op, &ins, &out);
        match n.op {
            Op::Scalar(s) => flops = (out.view.numel() as u64).saturating_mul(s.row().flops.into()),
            Op::Reduce { .. } => flops = ins.first().map_or(0, |x| x.view.numel() as u64),
            _ => {}
        }
        let key = owner(model, n.span.as_str());
        let bytes_out = out.dtype.bytes(out.view.numel()) as u64;
        let (ty, node) = (n.ty.to_string(), n.span.as_str());
        match activations.last_mut().filter(|x| x.node == node) {
            // An operator may be several nodes here; its largest result stands for all.
            Some(x) if x.bytes >= bytes_out => {}
            Some(x) => (x.bytes, x.ty) = (bytes_out, ty),
            None => activations.push(Activation { bytes: bytes_out, ty, op: key.1.clone(), node: node.into() }),
        }
        for c in [total as &mut Cost, by_op.entry(key).or_default()] {
            c.nodes += 1;
            c.flops = c.flops.saturating_add(flops);
            c.bytes = c.bytes.saturating_add(bytes);
        }
    }
    Ok(())
}

/// What the backend makes of the graphs.
fn on(b: &Backend, graphs: &[Graph], model: &Summary) -> On {
    let (target, options) = (b.device().as_target(), b.lower_options());
    let (mut p, mut refused) = (Planned::default(), vec![]);
    for g in graphs {
        match lower(g, target, &options) {
            Ok(plan) => p.add(&plan, model),
            // The first reason is known; here are all.
            Err(e) => {
                let before = refused.len();
                refusals(g, target, &options, model, &mut refused);
                if refused.len() == before {
                    refused.push(Refused { op: Key::default(), node: String::new(), reason: e.to_string() });
                }
            }
        }
    }
    let plans = if refused.is_empty() { Ok(p) } else { Err(refused) };
    On { kind: b.info().backend, id: b.id().into(), name: b.info().name.clone(), plans }
}

impl Planned {
    fn add(&mut self, plan: &Plan, model: &Summary) {
        self.steps += plan.steps.len();
        self.flops = self.flops.saturating_add(plan.flops());
        self.bytes = self.bytes.saturating_add(plan.bytes());
        self.scratch = self.scratch.max(plan.scratch() as u64);
        self.weights += plan.const_bytes() as u64;
        for s in &plan.steps {
            let how = match &s.work {
                StepWork::Library(_) => {
                    self.library += 1;
                    s.work.kernel_name()
                }
                StepWork::Kernel { .. } => {
                    self.generated += 1;
                    "generated".into()
                }
                StepWork::Host(_) => {
                    self.host += 1;
                    "host".into()
                }
            };
            *self.kernels.entry(how.clone()).or_default() += 1;
            let of = self.by_op.entry(owner(model, s.span.as_str())).or_default();
            *of.entry(how).or_default() += 1;
        }
        for w in &plan.warnings {
            if !self.warnings.contains(w) {
                self.warnings.push(w.clone());
            }
        }
    }
}

/// Every node that the target cannot run, asked for one by one; nodes that are alike only once.
fn refusals(g: &Graph, t: &dyn Target, o: &LowerOptions, model: &Summary, out: &mut Vec<Refused>) {
    let Ok((g, _)) = inline_composites(g, &|_| false) else { return };
    let mut asked: HashMap<Graph, Option<String>> = HashMap::new();
    for id in g.ids() {
        let n = g.node(id);
        if n.op.is_leaf() {
            continue;
        }
        let mut one = Graph::new();
        let ins: Vec<NodeId> =
            (0..n.inputs.len()).map(|k| one.input(&format!("x{k}"), g.ty(n.inputs[k]).clone())).collect();
        let Ok(y) = one.push(n.op.clone(), &ins, Some(n.ty.clone())) else { continue };
        one.output("y", y);
        let reason = asked.entry(one).or_insert_with_key(|one| lower(one, t, o).err().map(|e| e.to_string()));
        if let Some(reason) = reason {
            let node = n.span.as_str().to_string();
            out.push(Refused { op: owner(model, &node), node, reason: reason.clone() });
        }
    }
}

// Figures.

/// `1,234,567`.
fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// `1.23 G`.
fn si(n: u64) -> String {
    const UNITS: [&str; 6] = ["", " k", " M", " G", " T", " P"];
    let (mut v, mut u) = (n as f64, 0);
    while v >= 1000.0 && u + 1 < UNITS.len() {
        v /= 1000.0;
        u += 1;
    }
    match u {
        0 => n.to_string(),
        _ if v < 10.0 => format!("{v:.2}{}", UNITS[u]),
        _ if v < 100.0 => format!("{v:.1}{}", UNITS[u]),
        _ => format!("{v:.0}{}", UNITS[u]),
    }
}

fn percent(part: u64, all: u64) -> String {
    if all == 0 { String::new() } else { format!("{:.1} %", part as f64 * 100.0 / all as f64) }
}

/// `1 stage`, `2 stages`.
fn plural(n: usize, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{} {what}s", count(n as u64)) }
}

fn short(s: &str, most: usize) -> String {
    let s = s.replace('\n', " ");
    match s.char_indices().nth(most) {
        Some((i, _)) => format!("{}…", &s[..i]),
        None => s,
    }
}

/// A table with a heading, in which some columns are figures: they end together.
fn figures(rows: Vec<Vec<String>>, right: &[usize]) -> String {
    let mut rows = rows;
    for &c in right {
        let wide = rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
        for r in &mut rows {
            if let Some(s) = r.get_mut(c) {
                *s = format!("{}{s}", " ".repeat(wide - s.chars().count()));
            }
        }
    }
    table(&rows)
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}

/// Elements and bytes by element type, the largest first.
fn by_type(weights: &[Weight]) -> Vec<(&str, u64, u64, u64)> {
    let mut by: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
    for w in weights {
        let t = by.entry(&w.dtype).or_default();
        *t = (t.0 + 1, t.1.saturating_add(w.elements), t.2.saturating_add(w.bytes));
    }
    let mut v: Vec<_> = by.into_iter().map(|(t, (n, e, b))| (t, n, e, b)).collect();
    v.sort_by_key(|t| std::cmp::Reverse(t.3));
    v
}

fn sums(weights: &[Weight]) -> (u64, u64) {
    weights.iter().fold((0, 0), |(e, b), w| (e.saturating_add(w.elements), b.saturating_add(w.bytes)))
}

fn parameters(weights: &[Weight]) -> String {
    let (elements, bytes) = sums(weights);
    if weights.is_empty() {
        return "\nparameters: none\n".into();
    }
    let tensors = plural(weights.len(), "tensor");
    let mut out = format!("\nparameters: {} in {tensors}, {}\n", count(elements), size(bytes));
    let rows = by_type(weights).into_iter().map(|(t, n, e, b)| {
        vec![t.to_string(), plural(n as usize, "tensor"), count(e), size(b), percent(b, bytes)]
    });
    out += &figures(rows.collect(), &[1, 2, 3, 4]);
    out
}

fn by_type_json(weights: &[Weight]) -> Value {
    let (elements, bytes) = sums(weights);
    let types: Vec<Value> = by_type(weights)
        .into_iter()
        .map(|(t, n, e, b)| json!({ "dtype": t, "tensors": n, "elements": e, "bytes": b }))
        .collect();
    json!({ "elements": elements, "bytes": bytes, "tensors": weights.len(), "by_dtype": types })
}

fn dims(w: &Weight) -> String {
    format!("[{}]", w.dims.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(", "))
}

fn weight_rows<'w>(weights: impl Iterator<Item = &'w Weight>) -> String {
    let rows = weights.map(|w| {
        let name = if w.name.is_empty() { "(no name)" } else { &w.name };
        let place = if w.external { "external" } else { "" };
        vec![size(w.bytes), format!("{}{}", w.dtype, dims(w)), short(name, 80), place.into()]
    });
    figures(rows.collect(), &[0])
}

fn weight_json(w: &Weight) -> Value {
    json!({ "name": w.name, "dtype": w.dtype, "shape": w.dims, "elements": w.elements, "bytes": w.bytes, "external": w.external })
}

fn largest(weights: &[Weight], n: usize) -> Vec<&Weight> {
    let mut v: Vec<&Weight> = weights.iter().collect();
    v.sort_by_key(|w| std::cmp::Reverse(w.bytes));
    v.truncate(n);
    v
}

/// The default domain is not named.
fn op_name(domain: &str, op: &str) -> String {
    if domain.is_empty() { op.into() } else { format!("{domain}.{op}") }
}

impl Report<'_> {
    /// What becomes of an operator on a backend.
    fn fate(&self, o: &Operator, on: &On) -> String {
        if o.function {
            return "expanded".into();
        }
        if !o.refused.is_empty() {
            return "no".into();
        }
        let Ok(w) = &self.work else { return "?".into() };
        let key = (o.domain.clone(), o.name.clone());
        if w.host.iter().any(|(n, _)| owner(&self.model, n) == key) {
            return "host".into();
        }
        match &on.plans {
            Err(all) if all.iter().any(|r| r.op == key) => "no".into(),
            Err(_) => "yes".into(),
            Ok(p) => match p.by_op.get(&key) {
                Some(k) => k
                    .iter()
                    .map(|(k, n)| if *n == 1 { k.clone() } else { format!("{k} ×{n}") })
                    .collect::<Vec<_>>()
                    .join(", "),
                None if w.by_op.contains_key(&key) => "fused".into(),
                None if w.stopped.is_some() => "not reached".into(),
                None => "at import".into(),
            },
        }
    }

    fn text(&self) -> String {
        let m = &self.model;
        let mut out =
            format!("{}: {}, ONNX IR {}", self.a.file.display(), size(self.file_bytes), m.ir_version);
        for (d, v) in &m.opsets {
            let _ = write!(out, ", {d} {v}");
        }
        if !m.producer.is_empty() {
            let _ = write!(out, ", by {} {}", m.producer, m.producer_version);
        }
        out = out.trim_end().to_string() + "\n";
        if !m.graph_name.is_empty() {
            let _ = writeln!(out, "graph \"{}\", {}", short(&m.graph_name, 80), plural(m.nodes, "node"));
        }
        for (k, v) in &m.metadata {
            let _ = writeln!(out, "  {k}: {}", short(v, 100));
        }

        let taken: HashMap<&str, &str> = match &self.work {
            Ok(w) => w.inputs.iter().map(|(n, t)| (n.as_str(), t.as_str())).collect(),
            Err(_) => HashMap::new(),
        };
        out += "\ninputs\n";
        let rows = m.inputs.iter().map(|(n, t)| {
            let note = match taken.get(n.as_str()) {
                Some(d) if d != t => format!("taken as {d}"),
                _ => String::new(),
            };
            vec![n.clone(), t.clone(), note]
        });
        out += &table(&rows.collect::<Vec<_>>());
        out += "outputs\n";
        out += &table(&m.outputs.iter().map(|(n, t)| vec![n.clone(), t.clone()]).collect::<Vec<_>>());
        out += &parameters(&m.weights);
        self.work_text(&mut out);
        self.operators_text(&mut out);
        self.backends_text(&mut out);

        let top = self.a.top;
        if !m.weights.is_empty() && top > 0 {
            let _ = writeln!(out, "\nlargest weights");
            out += &weight_rows(largest(&m.weights, top).into_iter());
        }
        if let Ok(w) = &self.work
            && !w.activations.is_empty()
            && top > 0
        {
            let _ = writeln!(out, "\nlargest results of nodes (fusion may keep them from being stored)");
            let rows = w
                .activations
                .iter()
                .take(top)
                .map(|x| vec![size(x.bytes), x.ty.clone(), x.op.clone(), short(&x.node, 80)]);
            out += &figures(rows.collect(), &[0]);
        }
        out
    }

    fn work_text(&self, out: &mut String) {
        let w = match &self.work {
            Ok(w) => w,
            Err(why) => {
                let _ = writeln!(out, "\nwork: not known, since {}", why.replace('\n', "\n  "));
                return;
            }
        };
        *out += "\nwork of one run\n";
        if let Some(why) = &w.staged {
            let _ = writeln!(out, "  no single graph, since {why}: {} on the device", plural(w.graphs.len(), "stage"));
            let _ = writeln!(
                out,
                "  what the host decides was taken as zero here, so sizes that depend on it are too small"
            );
        }
        if let Some(why) = &w.stopped {
            let _ = writeln!(out, "  the stages after these are not known: {}", short(why, 200));
        }
        for f in &w.fixed {
            let _ = writeln!(out, "  input {f} steers shapes: this holds for its value alone");
        }
        let mut rows = vec![
            row(["FLOPs", &si(w.total.flops), ""]),
            row(["bytes moved", &size(w.total.bytes), "each op by itself"]),
            row([
                "intensity",
                &format!("{:.2}", w.total.flops as f64 / w.total.bytes.max(1) as f64),
                "FLOP a byte",
            ]),
        ];
        for b in &self.backends {
            if let Ok(p) = &b.plans
                && p.steps > 0
            {
                let intensity = p.flops as f64 / p.bytes.max(1) as f64;
                let fused = format!("planned on {}, {intensity:.2} FLOP a byte", b.id);
                rows.push(row(["", &size(p.bytes), &fused]));
            }
        }
        *out += &figures(rows, &[1]);
    }

    fn operators_text(&self, out: &mut String) {
        let m = &self.model;
        let _ = writeln!(out, "\noperators: {}", plural(m.operators.len(), "kind"));
        let mut head = row(["operator", "nodes", "FLOPs", "share"]);
        head.extend(self.backends.iter().map(|b| b.id.clone()));
        let mut rows = vec![head];
        for o in self.by_flops() {
            let cost = self.cost(o);
            let total = self.work.as_ref().map_or(0, |w| w.total.flops);
            let mut r = vec![
                op_name(&o.domain, &o.name),
                count(o.count as u64),
                cost.map_or(String::new(), |c| if c.flops == 0 { String::new() } else { si(c.flops) }),
                cost.map_or(String::new(), |c| {
                    if c.flops == 0 { String::new() } else { percent(c.flops, total) }
                }),
            ];
            r.extend(self.backends.iter().map(|b| self.fate(o, b)));
            rows.push(r);
        }
        *out += &figures(rows, &[1, 2, 3]);
        let refused: Vec<(&Operator, &(String, Vec<String>))> =
            m.operators.iter().flat_map(|o| o.refused.iter().map(move |r| (o, r))).collect();
        if !refused.is_empty() {
            *out += "\nnot supported by the importer\n";
            let rows = refused.iter().map(|(o, (why, nodes))| {
                let name = format!("{} (opset {})", op_name(&o.domain, &o.name), o.opset);
                vec![name, why.clone(), some(nodes.iter().map(String::as_str))]
            });
            *out += &table(&rows.collect::<Vec<_>>());
        }
        if let Ok(w) = &self.work
            && !w.host.is_empty()
        {
            *out += "\non the host, between the stages\n";
            let rows = w
                .host
                .iter()
                .map(|(n, times)| vec![owner(&self.model, n).1, n.clone(), plural(*times, "time")]);
            *out += &table(&rows.collect::<Vec<_>>());
        }
    }

    fn backends_text(&self, out: &mut String) {
        *out += "\nbackends\n";
        let mut rows = vec![];
        for b in &self.backends {
            let what = match &b.plans {
                Ok(p) if p.steps == 0 => "nothing to plan".to_string(),
                Ok(p) => format!(
                    "runs it in {}: {} library, {} generated, {} host; scratch {}, weights {}",
                    plural(p.steps, "step"),
                    p.library,
                    p.generated,
                    p.host,
                    size(p.scratch),
                    size(p.weights),
                ),
                Err(all) => format!("cannot run {} of its ops", all.len()),
            };
            rows.push(vec![b.id.clone(), short(&b.name, 40), what]);
        }
        let mut reasons: Vec<(&str, Vec<&str>)> = vec![];
        for (kind, why) in &self.absent {
            match reasons.iter_mut().find(|(r, _)| r == why) {
                Some((_, kinds)) => kinds.push(kind.id()),
                None => reasons.push((why, vec![kind.id()])),
            }
        }
        *out += &table(&rows);
        for (why, kinds) in reasons {
            let _ = writeln!(out, "  not here: {}: {}", kinds.join(", "), short(why, 160));
        }
        for b in &self.backends {
            if let Err(all) = &b.plans {
                let _ = writeln!(out, "\nnot supported on {}", b.id);
                let mut reasons: Vec<(&Key, &str, Vec<&str>)> = vec![];
                for r in all {
                    match reasons.iter_mut().find(|(k, why, _)| **k == r.op && *why == r.reason) {
                        Some((_, _, nodes)) => nodes.push(&r.node),
                        None => reasons.push((&r.op, &r.reason, vec![&r.node])),
                    }
                }
                let rows = reasons.iter().map(|(k, why, nodes)| {
                    vec![op_name(&k.0, &k.1), why.replace('\n', " "), some(nodes.iter().copied())]
                });
                *out += &table(&rows.collect::<Vec<_>>());
            }
        }
    }

    fn cost(&self, o: &Operator) -> Option<Cost> {
        self.work.as_ref().ok()?.by_op.get(&(o.domain.clone(), o.name.clone())).copied()
    }

    /// Operators by their share of the work, then by how often they are used.
    fn by_flops(&self) -> Vec<&Operator> {
        let mut v: Vec<&Operator> = self.model.operators.iter().collect();
        v.sort_by_key(|o| std::cmp::Reverse((self.cost(o).map_or(0, |c| c.flops), o.count)));
        v
    }

    fn json(&self) -> Value {
        let m = &self.model;
        let port = |(n, t): &(String, String)| json!({ "name": n, "type": t });
        let work = self.work.as_ref().ok();
        let operators: Vec<Value> = self
            .by_flops()
            .into_iter()
            .map(|o| {
                let c = self.cost(o).unwrap_or_default();
                let on: BTreeMap<&str, String> = self.backends.iter().map(|b| (b.id.as_str(), self.fate(o, b))).collect();
                json!({
                    "domain": o.domain, "op": o.name, "opset": o.opset, "nodes": o.count, "function": o.function,
                    "since": o.since, "flops": c.flops, "bytes": c.bytes, "on": on,
                    "refused": o.refused.iter().map(|(why, nodes)| json!({ "reason": why, "nodes": nodes })).collect::<Vec<_>>(),
                })
            })
            .collect();
        let backends: Vec<Value> = self
            .backends
            .iter()
            .map(|b| {
                let mut v = json!({ "backend": b.kind, "id": b.id, "name": b.name, "supported": b.plans.is_ok() });
                match &b.plans {
                    Ok(p) => {
                        v["plan"] = json!({
                            "steps": p.steps, "library": p.library, "generated": p.generated, "host": p.host,
                            "flops": p.flops, "bytes": p.bytes, "scratch_bytes": p.scratch, "weight_bytes": p.weights,
                            "kernels": p.kernels, "warnings": p.warnings,
                        })
                    }
                    Err(all) => {
                        let one = |r: &Refused| json!({ "domain": r.op.0, "op": r.op.1, "node": r.node, "reason": r.reason });
                        v["refused"] = all.iter().map(one).collect();
                    }
                }
                v
            })
            .collect();
        json!({
            "file": self.a.file,
            "kind": Kind::Onnx.to_string(),
            "bytes": self.file_bytes,
            "ir_version": m.ir_version,
            "opsets": m.opsets.iter().map(|(d, v)| json!({ "domain": d, "version": v })).collect::<Vec<_>>(),
            "producer": { "name": m.producer, "version": m.producer_version },
            "domain": m.domain,
            "model_version": m.model_version,
            "metadata": m.metadata.iter().cloned().collect::<BTreeMap<_, _>>(),
            "graph": { "name": m.graph_name, "nodes": m.nodes, "functions": m.functions },
            "inputs": m.inputs.iter().map(port).collect::<Vec<_>>(),
            "outputs": m.outputs.iter().map(port).collect::<Vec<_>>(),
            "parameters": by_type_json(&m.weights),
            "work": work.map(|w| json!({
                "inputs": w.inputs.iter().map(port).collect::<Vec<_>>(),
                "fixed": w.fixed,
                "flops": w.total.flops,
                "bytes": w.total.bytes,
                "intensity": w.total.flops as f64 / w.total.bytes.max(1) as f64,
                "stages": w.graphs.len(),
                "staged": w.staged,
                "stopped": w.stopped,
                "host_nodes": w.host.iter().map(|(n, t)| json!({ "node": n, "op": owner(m, n).1, "times": t })).collect::<Vec<_>>(),
                "largest": w.activations.iter().take(self.a.top)
                    .map(|x| json!({ "node": x.node, "op": x.op, "type": x.ty, "bytes": x.bytes })).collect::<Vec<_>>(),
            })),
            "no_work_because": self.work.as_ref().err(),
            "operators": operators,
            "backends": backends,
            "absent": self.absent.iter().map(|(k, why)| json!({ "backend": k, "reason": why })).collect::<Vec<_>>(),
            "largest_weights": largest(&m.weights, self.a.top).into_iter().map(weight_json).collect::<Vec<_>>(),
        })
    }
}

/// A few of the names, and how many more there are.
fn some<'n>(names: impl Iterator<Item = &'n str>) -> String {
    let all: Vec<&str> = names.collect();
    let first = all.iter().take(3).map(|n| short(n, 40)).collect::<Vec<_>>().join(", ");
    if all.len() > 3 { format!("{first} and {} more", all.len() - 3) } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short_and_line_up() {
        assert_eq!(
            (count(6090), count(1_234_567), count(12)),
            ("6,090".into(), "1,234,567".into(), "12".into())
        );
        assert_eq!(
            [si(999), si(1500), si(25_300_000), si(123_456_000_000)],
            ["999", "1.50 k", "25.3 M", "123 G"]
        );
        assert_eq!(percent(1, 8), "12.5 %");
        let t = figures(vec![row(["a", "10", "x"]), row(["bb", "9", "y"])], &[1]);
        assert_eq!(t, "  a   10  x\n  bb   9  y\n");
        assert_eq!(short("one\ntwo three", 7), "one two…");
    }
}
