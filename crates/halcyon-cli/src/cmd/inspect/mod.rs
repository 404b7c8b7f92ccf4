//! `halcyon inspect`: shows a model's contents, its cost and the devices it would run on, without running it.
//! For a file of tensors it lists the tensors.

mod gguf;
mod show;

use super::dry_run;
use crate::args::{InputArgs, InspectArgs};
use crate::report::{self, short, size};
use crate::source;
use halcyon::hal::select;
use halcyon::ir::graph::NodeId;
use halcyon::ir::lower::{LowerOptions, lower};
use halcyon::ir::passes::inline::inline_composites;
use halcyon::ir::plan::{Plan, StepWork};
use halcyon::ir::target::Target;
use halcyon::ir::{Graph, cost};
use halcyon::{Backend, BackendType, ConstData, DType, Error, Level, Result};
use halcyon_formats::npz::Npz;
use halcyon_formats::onnx::{Datum, Model, Outcome, Port, PortType, Summary, Weight, tensor};
use halcyon_formats::safetensors::SafeTensors;
use halcyon_formats::sniff::{self, Kind};
use halcyon_formats::{data, mmap, npy};
use serde_json::json;
use show::{by_type_json, parameters, weight_json, weight_rows};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

pub(crate) fn main(a: &InspectArgs) -> Result<u8> {
    #[cfg(feature = "language")]
    if super::language::hub::is_name(&a.file) {
        let file = super::language::hub::local_file(&a.file, &a.hub)?;
        return of_file(&InspectArgs { file, ..a.clone() });
    }
    of_file(a)
}

fn of_file(a: &InspectArgs) -> Result<u8> {
    let name = a.file.display().to_string();
    if a.file.is_dir() {
        let what = "a folder, not a regular file; name one of its files, such as model.safetensors".into();
        return Err(Error::Io { path: name, what });
    }
    let bytes = mmap::open(&a.file)?;
    if bytes.is_empty() && a.file.extension().is_none_or(|e| e != "onnx") {
        let what = "this is an empty file. Its download or export has failed: make the file again".into();
        return Err(Error::Format { file: name, what });
    }
    let weights = match sniff::kind(&bytes) {
        Some(Kind::SafeTensors) => {
            let f = SafeTensors::open(&a.file)?;
            let all = f.names().map(|n| (n.to_string(), f.get(n).map(|t| of_data(n, &t)))).collect();
            (Kind::SafeTensors, all, f.metadata().clone())
        }
        Some(Kind::Npz) => {
            let f = Npz::open(&a.file)?;
            // Reads headers only, without unpacking data.
            let one = |n: &str| f.head(n).map(|(dtype, dims)| of_shape(n, dtype, &dims));
            (Kind::Npz, f.names().map(|n| (n.to_string(), one(n))).collect(), BTreeMap::new())
        }
        Some(Kind::Npy) => {
            let head = npy::head(&bytes, bytes.len() as u64, &name);
            let weight = head.map(|(dtype, dims)| of_shape("", dtype, &dims));
            (Kind::Npy, vec![(String::new(), weight)], BTreeMap::new())
        }
        Some(Kind::OnnxTensor) => {
            let (n, t) = tensor::read_pb(&a.file)?;
            let weight = of_data(&n, &t);
            (Kind::OnnxTensor, vec![(n, Ok(weight))], BTreeMap::new())
        }
        Some(Kind::Gguf) => return gguf::main(a).map(|()| 0),
        Some(k @ (Kind::Png | Kind::Jpeg)) => {
            return Err(Error::Format { file: name, what: format!("a file of kind \"{k}\" is not a model") });
        }
        // Protobuf has no magic bytes; the decoder rejects files that are not models.
        Some(Kind::Onnx) | None => {
            let r = Report::new(a, bytes.len() as u64)?;
            // A broken model gives a report and an error. With `--json` the report contains the error, so
            // that there is one document.
            if a.json {
                report::print_json(&r.json())?;
                return Ok(r.broken.map_or(0, |e| e.exit_code().clamp(1, 255) as u8));
            }
            report::print(&r.text())?;
            return r.broken.map_or(Ok(0), Err);
        }
    };
    tensors(a, bytes.len() as u64, weights)?;
    Ok(0)
}

// Files of tensors.

fn tensors(
    a: &InspectArgs,
    file_bytes: u64,
    (kind, all, metadata): (Kind, Vec<(String, Result<Weight>)>, BTreeMap<String, String>),
) -> Result<()> {
    let weights: Vec<Weight> = all.iter().filter_map(|(_, t)| t.as_ref().ok().cloned()).collect();
    let refused: Vec<(&str, String)> =
        all.iter().filter_map(|(n, t)| t.as_ref().err().map(|e| (n.as_str(), e.to_string()))).collect();
    if a.json {
        return report::print_json(&json!({
            "file": report::path(&a.file), "kind": kind.to_string(), "bytes": file_bytes, "metadata": metadata,
            "parameters": by_type_json(&weights),
            "tensors": weights.iter().map(weight_json).collect::<Vec<_>>(),
            "unsupported": refused.iter().map(|(n, e)| json!({ "name": n, "reason": e })).collect::<Vec<_>>(),
        }));
    }
    let mut out = format!("{}: {kind}, {}\n", report::path_text(&a.file), size(file_bytes));
    for (k, v) in &metadata {
        let _ = writeln!(out, "  {}: {}", report::name(k), short(v, 100));
    }
    out += &parameters(&weights);
    out += "\ntensors\n";
    out += &weight_rows(weights.iter());
    for (n, e) in refused {
        let _ = writeln!(out, "  {}: {e}", report::name(n));
    }
    report::print(&out)
}

fn of_data(name: &str, t: &ConstData) -> Weight {
    of_shape(name, t.dtype, &t.dims)
}

fn of_shape(name: &str, dtype: DType, dims: &[usize]) -> Weight {
    Weight {
        name: name.into(),
        dtype: dtype.name().into(),
        dims: dims.iter().map(|&d| d as i64).collect(),
        elements: dims.iter().map(|&d| d as u64).product(),
        bytes: data::byte_len(dtype, dims).unwrap_or(usize::MAX) as u64,
        external: false,
    }
}

// Models.

/// Domain and name of an operator.
type Key = (String, String);

/// Everything the command reports about a model.
struct Report<'a> {
    a: &'a InspectArgs,
    file_bytes: u64,
    model: Summary,
    work: Result<Work, String>,
    /// The error if the model is broken, as opposed to unsupported.
    broken: Option<Error>,
    backends: Vec<BackendSupport>,
    /// Backends that cannot be used here, with the reason.
    absent: Vec<(BackendType, String)>,
}

/// The model's graphs for given sizes.
#[derive(Default)]
struct Work {
    /// The assumed inputs.
    inputs: Vec<(String, String)>,
    /// Inputs whose values are built into the graph.
    fixed: Vec<String>,
    /// One graph, or several if the model runs in stages for the reason in `staged`.
    graphs: Vec<Graph>,
    staged: Option<String>,
    /// The reason if the import stopped before the end of the model.
    stopped: Option<String>,
    /// Nodes that run on the host, each with its number of runs.
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

/// The support of a backend for the model.
struct BackendSupport {
    kind: BackendType,
    id: String,
    name: String,
    plans: Result<Planned, Vec<MissingKernel>>,
}

#[derive(Default)]
struct Planned {
    steps: usize,
    library: usize,
    generated: usize,
    host: usize,
    flops: u64,
    bytes: u64,
    /// Maximum over the graphs.
    scratch: u64,
    weights: u64,
    kernels: BTreeMap<String, usize>,
    by_op: HashMap<Key, BTreeMap<String, usize>>,
    warnings: Vec<String>,
}

/// An op for which a backend has no kernel.
struct MissingKernel {
    op: Key,
    node: String,
    reason: String,
}

impl<'a> Report<'a> {
    fn new(a: &'a InspectArgs, file_bytes: u64) -> Result<Report<'a>> {
        let level: Level = a.level.parse()?;
        let precision: Option<halcyon::AmpPolicy> = a.precision.as_deref().map(str::parse).transpose()?;
        let only: Option<BackendType> = a.backend.as_deref().map(str::parse).transpose()?;
        let file = super::open(&a.file)?;
        let model = file.summary();
        let (work, broken) = match work(&file, &model, a) {
            Ok(w) => (Ok(w), None),
            // An error of the command line, not of the model.
            Err(e @ Error::Argument { .. }) if !a.inputs.is_empty() => return Err(e),
            Err(Error::UnsupportedOps(all)) => {
                (Err(format!("{} of its operators are not supported (see below)", all.len())), None)
            }
            Err(e @ (Error::Unsupported { .. } | Error::Argument { .. })) => (Err(e.to_string()), None),
            Err(e) => (Err(e.to_string()), Some(e)),
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
            let b = Backend::builder().backend_type(kind).level(level).force_amp(a.force_precision);
            match precision.into_iter().fold(b, |b, p| b.amp(p)).build() {
                Ok(b) => backends.push(plan_on(&b, graphs, &model)),
                Err(e) if only.is_some() => return Err(e),
                Err(e) => absent.push((kind, report::reason(kind, &e.to_string()))),
            }
        }
        Ok(Report { a, file_bytes, model, work, broken, backends, absent })
    }
}

/// The model's graphs and their costs.
fn work(file: &Model, model: &Summary, a: &InspectArgs) -> Result<Work> {
    file.check("")?;
    let args =
        InputArgs { inputs: a.inputs.iter().map(|t| source::or_ones(t)).collect(), ..InputArgs::default() };
    let ports = file.inputs()?;
    // Inputs that are not numeric tensors get placeholders.
    let numbers: Vec<Port> =
        ports.iter().filter(|p| matches!(p.ty, PortType::Tensor { .. })).cloned().collect();
    let mut given: HashMap<String, Datum> =
        source::resolve(&numbers, &args, true)?.into_iter().map(|i| (i.name, i.data)).collect();
    let data: Vec<Datum> = ports
        .iter()
        .map(|p| given.remove(&p.name).map_or_else(|| dry_run::empty(&p.ty), Ok))
        .collect::<Result<_>>()?;
    let inputs = ports.iter().zip(&data).map(|(p, d)| (p.name.clone(), d.describe())).collect();
    let mut w = Work { inputs, ..Work::default() };
    let outcome = match data.iter().map(|d| d.tensor()).collect::<Option<Vec<_>>>() {
        None => Outcome::Staged("an input is not a tensor".into()),
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
            let known = dry_run::stages(file, &data);
            (w.graphs, w.host, w.stopped) = (known.graphs, known.host, known.stopped);
        }
    }
    for g in &w.graphs {
        costs(g, model, &mut w.by_op, &mut w.total, &mut w.activations)?;
    }
    w.activations.sort_by_key(|x| std::cmp::Reverse(x.bytes));
    Ok(w)
}

/// The operator that a graph node comes from.
fn owner(model: &Summary, node: &str) -> Key {
    match model.op_of.get(node) {
        Some(k) => k.clone(),
        // Nodes without a name are named by operator and index.
        None => (String::new(), node.split('#').next().unwrap_or("").to_string()),
    }
}

/// Adds up the costs of the nodes by operator.
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
        let (flops, bytes) = cost::of_node(&g, id)?;
        let key = owner(model, &n.span.text());
        let bytes_out = cost::type_bytes(&n.ty)?;
        let (ty, node) = (n.ty.to_string(), n.span.text());
        match activations.last_mut().filter(|x| x.node == node) {
            // An operator may become several nodes. Only the largest result of these nodes is listed.
            Some(x) if x.bytes >= bytes_out => {}
            Some(x) => (x.bytes, x.ty) = (bytes_out, ty),
            None => {
                activations.push(Activation { bytes: bytes_out, ty, op: key.1.clone(), node: node.into() })
            }
        }
        for c in [total as &mut Cost, by_op.entry(key).or_default()] {
            c.nodes += 1;
            c.flops = c.flops.saturating_add(flops);
            c.bytes = c.bytes.saturating_add(bytes);
        }
    }
    Ok(())
}

/// Plans the graphs for the backend.
fn plan_on(b: &Backend, graphs: &[Graph], model: &Summary) -> BackendSupport {
    let (target, options) = (b.device().as_target(), b.lower_options());
    let (mut p, mut refused) = (Planned::default(), vec![]);
    for g in graphs {
        match lower(g, target, &options) {
            Ok(plan) => p.add(&plan, model),
            // The error gives only the first reason, so collect all reasons.
            Err(e) => {
                let before = refused.len();
                refusals(g, target, &options, model, &mut refused);
                if refused.len() == before {
                    refused.push(MissingKernel {
                        op: Key::default(),
                        node: String::new(),
                        reason: e.to_string(),
                    });
                }
            }
        }
    }
    let plans = if refused.is_empty() { Ok(p) } else { Err(refused) };
    BackendSupport { kind: b.info().backend, id: b.id().into(), name: b.info().name.clone(), plans }
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
            let of = self.by_op.entry(owner(model, &s.span.text())).or_default();
            *of.entry(how).or_default() += 1;
        }
        for w in &plan.warnings {
            if !self.warnings.contains(w) {
                self.warnings.push(w.clone());
            }
        }
    }
}

/// Finds every node that the target cannot run, by trying each one. Equal nodes are tried once.
fn refusals(g: &Graph, t: &dyn Target, o: &LowerOptions, model: &Summary, out: &mut Vec<MissingKernel>) {
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
            let node = n.span.text().to_string();
            out.push(MissingKernel { op: owner(model, &node), node, reason: reason.clone() });
        }
    }
}
