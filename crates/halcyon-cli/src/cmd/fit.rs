//! `halcyon fit`: the memory that a model needs according to its plan, and the largest batch that fits.

use super::{backend_json, backend_text, dry_run, fit_train, tags_json};
use crate::args::{FitArgs, InputArgs};
use crate::report::{self, Progress, size, table};
use crate::source::{self, PendingInput};
use halcyon::hal::heap;
use halcyon::host::{self, MemorySampler};
use halcyon::ir::lower::lower;
use halcyon::ir::plan::Plan;
use halcyon::ir::{Graph, Op};
use halcyon::{Backend, ConstData, DType, Dim, Error, Fit, Result, Shape};
use halcyon_formats::onnx::{Datum, Imported, Model, Outcome, Port, PortType};
use serde_json::{Value, json};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::time::Duration;

/// Inputs of more bytes than this are assumed not to determine shapes.
const MAX_SHAPE_INPUT: usize = 1 << 16;
/// The largest batch that the search tries.
const MAX_BATCH: usize = 1 << 24;

pub(crate) fn main(a: &FitArgs) -> Result<u8> {
    #[cfg(feature = "language")]
    if super::language::fit::is_model(&a.model) {
        return super::language::fit::main(a);
    }
    a.backend.check()?;
    let watch = MemorySampler::start(Duration::from_millis(2));
    let model = super::open(&a.model);
    #[cfg(feature = "language")]
    let model = model.map_err(|e| super::language::fit::no_model(&a.model, e));
    let model = model?;
    #[cfg(feature = "language")]
    a.language.refuse()?;
    let backend = a.backend.open(false)?;
    model.check(backend.info().backend.id())?;
    let ports = model.inputs()?;
    let inputs = a.input.inputs.iter().map(|t| source::or_ones(t)).collect();
    let args = super::with_tokenizer(&a.model, &InputArgs { inputs, ..a.input.clone() });
    let numbers: Vec<Port> =
        ports.iter().filter(|p| matches!(p.ty, PortType::Tensor { .. })).cloned().collect();
    let wanted = source::pending_inputs(&numbers, &args, true)?;
    let places = places(&numbers, &wanted)?;
    // Free memory is measured before planning, because planning itself takes memory for the constants that it
    // computes on the host.
    let ask = FitRequest {
        model: &model,
        backend: &backend,
        ports: &ports,
        wanted: &wanted,
        places,
        room: AvailableMemory::of(&backend),
        planning: Cell::new(0),
    };

    let batch = a.batch.map(|n| n as usize);
    if batch.is_some() && ask.places.is_empty() {
        let all = numbers
            .iter()
            .map(|p| format!("{} {}", report::name(&p.name), p.ty))
            .collect::<Vec<_>>()
            .join(", ");
        return Err(Error::argument(
            "--batch",
            format!("the model fixes the first dimension of each input; its inputs are {all}"),
        ));
    }
    if a.train {
        return ask.training(a, batch);
    }
    let made = ask.make(batch)?;
    if let Some(w) = &watch {
        w.stop();
        ask.planning.set(w.peak().bytes);
    }
    let (mut refused, mut largest) = (None, Err("the model fixes the first dimension of its inputs".into()));
    if let FitResult::Whole(p) = &made {
        refused = ask.refusal(p);
        if let Some(now) = ask.batch(batch) {
            largest = Ok(ask.largest(now, refused.as_ref()));
        }
    }
    let r = Report { a, ask: &ask, batch, made: &made, refused: refused.as_ref(), largest };
    // A model that does not fit gives a report and an error. With `--json` the report contains the error, so
    // that there is one document.
    if a.json {
        report::print_json(&r.json())?;
        return Ok(refused.map_or(0, |e| e.exit_code().clamp(1, 255) as u8));
    }
    report::print(&r.text())?;
    refused.map_or(Ok(0), Err)
}

/// Available memory, measured before the model is planned.
#[derive(Debug)]
struct AvailableMemory {
    /// The free memory for the device's buffers in bytes. `total` is the memory limit or, without a limit,
    /// the device's whole memory.
    free: Option<u64>,
    total: Option<u64>,
    /// Host memory in bytes: free and total.
    host: Option<(u64, u64)>,
    /// Whether the device's buffers are in host memory.
    shared: bool,
}

impl AvailableMemory {
    fn of(b: &Backend) -> AvailableMemory {
        let (d, host) = (b.device(), host::memory());
        AvailableMemory {
            free: d.available(),
            total: d.memory().limit.or(d.info().total_memory),
            host,
            shared: d.info().unified_memory,
        }
    }
}

/// The arguments of the prediction: the model, its inputs, the backend and the available memory.
struct FitRequest<'a> {
    model: &'a Model,
    backend: &'a Backend,
    ports: &'a [Port],
    /// The inputs that are numeric tensors.
    wanted: &'a [PendingInput],
    /// The input and the axis of every dimension that is the batch size.
    places: Vec<(usize, usize)>,
    room: AvailableMemory,
    /// Peak anonymous memory up to the end of planning.
    planning: Cell<u64>,
}

/// A planned model that is one graph.
struct Planned {
    plan: Plan,
    fit: Fit,
    inputs: Vec<(DType, Vec<usize>)>,
    /// Inputs whose values are built into the plan.
    fixed: Vec<String>,
    /// Bytes of weights that are read in place from the model's files.
    mapped: u64,
    host: Host,
    /// The anonymous memory of this process, which includes the model's description, graph and plan, but not
    /// the constants. A run needs this memory too.
    process: u64,
}

/// Anonymous host memory, without the buffers of a device that shares host memory.
#[derive(Clone, Copy, Default)]
struct Host {
    /// Decoded and folded constants. They need memory, because the model's files do not contain them in the
    /// form that the graph needs.
    constants: u64,
    inputs: u64,
    outputs: u64,
}

impl Host {
    fn sum(&self) -> u64 {
        self.constants.saturating_add(self.inputs).saturating_add(self.outputs)
    }
}

enum FitResult {
    Whole(Box<Planned>),
    Staged(Box<Stages>),
}

struct Stages {
    why: String,
    known: Vec<(Plan, Fit)>,
    /// The need of all known stages together: constants count once, scratch and outputs are summed.
    sum: Fit,
    host_nodes: usize,
    stopped: Option<String>,
}

/// The largest batch.
struct Largest {
    /// `None` if not even 1 fits.
    batch: Option<usize>,
    /// The plan for that batch.
    planned: Option<Box<Planned>>,
    /// Why the next larger batch does not fit; `None` if the search reached its limit.
    limit: Option<Error>,
    plans: usize,
}

/// The symbol of a dimension, if the dimension is a single symbol.
fn symbol(d: Dim) -> Option<String> {
    let mut names = Default::default();
    d.symbols(&mut names);
    let name = names.pop_first()?;
    (names.is_empty() && d == Dim::sym(&name)).then(|| name.to_string())
}

/// The input and the axis of every batch dimension. The batch is the first named symbol that is the leading
/// dimension of an input; every axis with this symbol is a batch dimension. Unnamed leading dimensions are
/// batch dimensions too.
fn places(ports: &[Port], wanted: &[PendingInput]) -> Result<Vec<(usize, usize)>> {
    let mut name: Option<String> = None;
    let mut out = vec![];
    for (i, p) in ports.iter().enumerate() {
        let Some(shape) = p.shape() else {
            // The model does not declare the rank, so the given input determines whether the dimension is a
            // batch.
            if wanted[i].tensor().is_some_and(|(_, dims)| dims.first() == Some(&1)) {
                out.push((i, 0));
            }
            continue;
        };
        match shape.iter().next().and_then(|d| symbol(*d)) {
            Some(s) if s == format!("{}.0", p.name) => out.push((i, 0)),
            Some(s) => {
                name.get_or_insert(s);
            }
            None => {}
        }
    }
    let Some(name) = name else { return Ok(out) };
    let batch = Dim::sym(&name);
    for (i, shape) in ports.iter().enumerate().filter_map(|(i, p)| Some((i, p.shape()?))) {
        out.extend(shape.iter().enumerate().filter(|(_, d)| **d == batch).map(|(axis, _)| (i, axis)));
    }
    Ok(out)
}

impl FitRequest<'_> {
    /// The batch to plan for: the requested one, or the batch of the inputs.
    fn batch(&self, asked: Option<usize>) -> Option<usize> {
        let (i, axis) = *self.places.first()?;
        asked.or_else(|| self.wanted[i].tensor()?.1.get(axis).copied())
    }

    /// Dtypes and sizes of the inputs for a batch.
    fn sizes(&self, batch: Option<usize>) -> Result<Vec<(DType, Vec<usize>)>> {
        let one = |w: &PendingInput| w.tensor().map(|(d, dims)| (d, dims.to_vec()));
        let mut all: Vec<(DType, Vec<usize>)> = self
            .wanted
            .iter()
            .map(|w| one(w).ok_or_else(|| Error::internal("an input is not a tensor")))
            .collect::<Result<_>>()?;
        for (i, axis) in &self.places {
            if let (Some(n), Some(d)) = (batch, all[*i].1.get_mut(*axis)) {
                *d = n;
            }
        }
        Ok(all)
    }

    /// Prints the memory that training takes.
    fn training(&self, a: &FitArgs, batch: Option<usize>) -> Result<u8> {
        let now = self.batch(batch);
        let (needs, count) = self.training_needs(batch)?;
        let largest = match (now, self.room.free) {
            (None, _) => Err("the model fixes the first dimension of its inputs".into()),
            (_, None) => Err("the free memory of the device is not known".into()),
            (Some(_), Some(free)) => {
                Ok(fit_train::largest(free, &|n| self.training_needs(Some(n)).map(|(needs, _)| needs))?)
            }
        };
        let (backend, free) = (self.backend.id().to_string(), self.room.free);
        let fits = free.is_none_or(|free| needs.recomputed.total() <= free);
        let r = fit_train::Report { backend, count, batch: now, needs, free, largest };
        match a.json {
            true => {
                let mut v = json!({
                    "model": report::path(&a.model), "backend": backend_json(self.backend), "fits": fits,
                });
                v["training"] = r.json();
                report::print_json(&v)?;
            }
            false => {
                let mut out = format!("model    {}\n", report::path_text(&a.model));
                out += &backend_text(self.backend);
                out += &r.text();
                // Writing to a string cannot fail.
                let _ = writeln!(out, "memory   {}", room_text(&self.room, self.backend));
                report::print(&out)?;
            }
        }
        // The exit code is the same as for an inference plan that does not fit.
        Ok(if fits { 0 } else { 5 })
    }

    fn training_needs(&self, batch: Option<usize>) -> Result<(fit_train::Needs, u64)> {
        let sizes = self.sizes(batch)?;
        let g = match self.outcome(&sizes)? {
            Ok(g) => g,
            Err(why) => {
                let what = format!("the memory of training a model that is not a single graph: {why}");
                return Err(Error::unsupported(what, "Give the inputs' sizes with --input"));
            }
        };
        let shapes: Vec<Shape> = sizes.iter().map(|(_, d)| d.as_slice().into()).collect();
        let graph = g.graph.bind(&g.graph.solve(&shapes)?)?;
        let bytes: Vec<usize> = sizes.iter().map(|(t, d)| t.bytes(d.iter().product())).collect();
        fit_train::needs(self.backend, &graph, &bytes)
    }

    fn make(&self, batch: Option<usize>) -> Result<FitResult> {
        let sizes = match self.ports.iter().find(|p| !matches!(p.ty, PortType::Tensor { .. })) {
            None => self.sizes(batch)?,
            Some(p) => return self.staged(batch, format!("'{}' is {}", p.name, p.ty.kind())),
        };
        match self.outcome(&sizes)? {
            Err(why) => self.staged(batch, why),
            Ok(g) => self.planned(g, sizes).map(|p| FitResult::Whole(Box::new(p))),
        }
    }

    /// The model's graph for inputs of these sizes, or why it is not a single graph.
    fn outcome(&self, sizes: &[(DType, Vec<usize>)]) -> Result<std::result::Result<Imported, String>> {
        if let Some(p) = self.ports.iter().find(|p| !matches!(p.ty, PortType::Tensor { .. })) {
            return Ok(Err(format!("'{}' is {}", p.name, p.ty.kind())));
        }
        let shapes: Vec<(&str, Shape)> =
            self.wanted.iter().zip(sizes).map(|(w, (_, d))| (w.name.as_str(), d.as_slice().into())).collect();
        let mut values: Vec<(&str, ConstData)> = vec![];
        for (w, (_, dims)) in self.wanted.iter().zip(sizes) {
            // A value of another size than requested cannot be used.
            if let Some(v) = w.small(MAX_SHAPE_INPUT)?
                && v.dims.as_slice() == dims.as_slice()
            {
                values.push((w.name.as_str(), v));
            }
        }
        Ok(match self.model.outcome(&shapes, &values)? {
            Outcome::Staged(why) => Err(why),
            Outcome::Graph(g) => Ok(*g),
        })
    }

    /// Plans like `Session::prepare`, without the work on the device.
    fn planned(&self, g: Imported, inputs: Vec<(DType, Vec<usize>)>) -> Result<Planned> {
        let shapes: Vec<Shape> = inputs.iter().map(|(_, d)| d.as_slice().into()).collect();
        let graph = g.graph.bind(&g.graph.solve(&shapes)?)?;
        let bytes: Vec<usize> = inputs.iter().map(|(t, d)| t.bytes(d.iter().product())).collect();
        let plan = match self.backend.lower_to_fit(&graph, &bytes) {
            // If no plan fits the free memory, the fastest plan is reported.
            Err(Error::OutOfMemory { .. }) => self.lower(&graph)?,
            r => r?,
        };
        let fit = Fit::of(&**self.backend.device(), &plan, &bytes);
        let sum = |n: &mut dyn Iterator<Item = usize>| n.fold(0u64, |a, b| a.saturating_add(b as u64));
        let (mut seen, mut mapped, mut made) = (HashSet::new(), 0u64, 0u64);
        let nodes = graph.nodes().iter().filter_map(|n| match &n.op {
            Op::Const(c) => Some(c),
            _ => None,
        });
        let planned: HashSet<(usize, usize)> = plan.consts.iter().map(ConstData::key).collect();
        for c in plan.consts.iter().chain(nodes).filter(|c| seen.insert(c.key())) {
            let n = c.bytes().len() as u64;
            match self.model.maps(c) {
                false => made = made.saturating_add(n),
                true if planned.contains(&c.key()) => mapped = mapped.saturating_add(n),
                true => {}
            }
        }
        let host = Host {
            constants: made,
            inputs: sum(&mut bytes.into_iter()),
            outputs: sum(&mut plan.outputs.iter().map(|o| o.dtype.bytes(o.dims.iter().product()))),
        };
        // An executable trims the heap in the same way before it allocates memory.
        heap::trim();
        let process = host::anonymous().unwrap_or(0).saturating_sub(made);
        Ok(Planned { plan, fit, inputs, fixed: g.fixed, mapped, host, process })
    }

    fn lower(&self, graph: &Graph) -> Result<Plan> {
        lower(graph, self.backend.device().as_target(), &self.backend.lower_options())
    }

    fn staged(&self, batch: Option<usize>, why: String) -> Result<FitResult> {
        if batch.is_some() {
            return Err(Error::unsupported(
                format!("--batch for a model that is not a single graph: {why}"),
                "Give the inputs' sizes with --input",
            ));
        }
        let mut given: HashMap<&str, &PendingInput> =
            self.wanted.iter().map(|w| (w.name.as_str(), w)).collect();
        let data: Vec<Datum> = self
            .ports
            .iter()
            .map(|p| match given.remove(p.name.as_str()) {
                None => dry_run::empty(&p.ty),
                Some(w) => {
                    let v = w.small(dry_run::ZEROS)?.map(Datum::Tensor);
                    v.ok_or_else(|| {
                        Error::unsupported(format!("input '{}' of that size", p.name), "Give a smaller one")
                    })
                }
            })
            .collect::<Result<_>>()?;
        let s = dry_run::stages(self.model, &data);
        let plans = s.graphs.iter().map(|g| self.lower(g)).collect::<Result<Vec<Plan>>>()?;
        let bytes: Vec<usize> = data.iter().filter_map(|d| Some(d.tensor()?.bytes().len())).collect();
        let sum = Fit::of_all(&**self.backend.device(), &plans.iter().collect::<Vec<_>>(), &bytes);
        let alone = |p: Plan| {
            let fit = Fit::of(&**self.backend.device(), &p, &[]);
            (p, fit)
        };
        let known = plans.into_iter().map(alone).collect();
        Ok(FitResult::Staged(Box::new(Stages {
            why,
            known,
            sum,
            host_nodes: s.host.len(),
            stopped: s.stopped,
        })))
    }

    /// Required host memory: the maximum of what the run needs and what packing the constants needs.
    fn on_host(&self, p: &Planned) -> u64 {
        let shared = |n: u64| if self.room.shared { n } else { 0 };
        let runs = p.host.sum().saturating_add(shared(p.fit.device()));
        let packs =
            [p.host.constants, p.host.inputs, shared(p.fit.weights), shared(p.fit.packed), p.fit.packing];
        runs.max(packs.into_iter().fold(0, u64::saturating_add))
    }

    /// Anonymous memory of the process: the maximum of what the run needs and what planning needed.
    fn anonymous(&self, p: &Planned) -> u64 {
        self.on_host(p).saturating_add(p.process).max(self.planning.get())
    }

    /// The reason why a plan does not fit, or `None` if it fits.
    fn refusal(&self, p: &Planned) -> Option<Error> {
        let (need, host) = (p.fit.device(), self.on_host(p));
        if let Some(free) = self.room.free
            && need > free
        {
            return Some(p.fit.refusal(&**self.backend.device(), &p.plan, need, free));
        }
        match self.room.host {
            Some((free, total)) if host > free => Some(Error::OutOfMemory {
                device: "the host".into(),
                what: format!(
                    "{}copies of inputs {} and outputs {}, constants {}",
                    if self.room.shared {
                        format!("buffers of {} {need}, ", self.backend.id())
                    } else {
                        String::new()
                    },
                    p.host.inputs,
                    p.host.outputs,
                    p.host.constants
                ),
                requested: host,
                free,
                total,
                next: "Use smaller inputs".into(),
            }),
            _ => None,
        }
    }

    /// Finds the largest batch that fits: doubles a batch that fits, then bisects. Assumes that if a batch
    /// does not fit, no larger batch does.
    fn largest(&self, now: usize, refused: Option<&Error>) -> Largest {
        let mut plans = 0;
        let fits = refused.is_none();
        let mut limit = refused.cloned();
        // The total of the progress is the largest possible number of plans, because the actual number is not
        // known in advance.
        let mut progress = halcyon::hal::driver_output::err()
            .is_terminal()
            .then(|| Progress::new("plans", 2 * u64::from(MAX_BATCH.ilog2())));
        let mut best: Option<(usize, Box<Planned>)> = None;
        let mut test = |n: usize, best: &mut Option<(usize, Box<Planned>)>| -> bool {
            plans += 1;
            if let Some(p) = &mut progress {
                p.step();
            }
            let why = match self.make(Some(n)) {
                Ok(FitResult::Whole(p)) => match self.refusal(&p) {
                    None => {
                        *best = Some((n, p));
                        return true;
                    }
                    Some(e) => e,
                },
                Ok(FitResult::Staged(s)) => Error::unsupported(
                    format!("a batch of {n} as one graph: {}", s.why),
                    "Use a smaller batch",
                ),
                Err(e) => e,
            };
            limit = Some(why);
            false
        };
        // `low` fits (0 means that no batch is known to fit). `high` does not fit; it is `None` if the search
        // reached its limit.
        let (mut low, mut high) = match fits {
            true => {
                let (mut low, mut next) = (now.max(1), now.max(1).saturating_mul(2));
                loop {
                    if next > MAX_BATCH {
                        break (low, None);
                    }
                    if !test(next, &mut best) {
                        break (low, Some(next));
                    }
                    (low, next) = (next, next * 2);
                }
            }
            false => (0, Some(now)),
        };
        while let Some(h) = high
            && h - low > 1
        {
            let mid = low + (h - low) / 2;
            if test(mid, &mut best) { low = mid } else { high = Some(mid) }
        }
        if low > 0 && best.as_ref().is_none_or(|(n, _)| *n != low) {
            test(low, &mut best);
        }
        if let Some(p) = progress {
            p.finish();
        }
        let planned = best.filter(|(n, _)| *n == low).map(|(_, p)| p);
        Largest { batch: (low > 0).then_some(low), planned, limit: limit.filter(|_| high.is_some()), plans }
    }
}

struct Report<'a> {
    a: &'a FitArgs,
    ask: &'a FitRequest<'a>,
    batch: Option<usize>,
    made: &'a FitResult,
    refused: Option<&'a Error>,
    /// `Err` gives the reason why the largest batch was not searched.
    largest: Result<Largest, String>,
}

/// How much more scratch the plan takes than the most bytes that are live at once, in percent.
fn over(f: &Fit) -> f64 {
    if f.live.bytes == 0 { 0.0 } else { (f.activations as f64 / f.live.bytes as f64 - 1.0) * 100.0 }
}

fn live_text(f: &Fit, p: &Plan) -> String {
    let Some(s) = p.steps.get(f.live.step).filter(|_| f.live.bytes > 0) else {
        return "no scratch is needed".into();
    };
    let at = if s.span.text().is_empty() { String::new() } else { format!(" at {}", s.span) };
    format!(
        "{} live at once (+{:.1} %): {} buffers at step {} of {}, {}{at}",
        size(f.live.bytes as u64),
        over(f),
        f.live.buffers,
        f.live.step,
        p.steps.len(),
        s.op
    )
}

fn fit_json(f: &Fit, p: &Plan) -> Value {
    let step = p.steps.get(f.live.step).filter(|_| f.live.bytes > 0);
    json!({
        "bytes": f.activations,
        "lower_bound": f.live.bytes,
        "over_percent": over(f),
        "slots": p.slots.len(),
        "blocks": p.blocks.len(),
        "step": step.map(|s| json!({
            "index": f.live.step, "of": p.steps.len(), "op": s.op, "node": s.span.text(), "buffers": f.live.buffers,
        })),
    })
}

fn room_text(r: &AvailableMemory, b: &Backend) -> String {
    let of = |free: Option<u64>, total: Option<u64>| match (free, total) {
        (Some(f), Some(t)) => format!("{} free of {}", size(f), size(t)),
        (Some(f), None) => format!("{} free", size(f)),
        _ => "not known".into(),
    };
    let host = match r.host {
        Some((f, t)) if !r.shared => format!(", host {}", of(Some(f), Some(t))),
        _ => String::new(),
    };
    format!("{}{}{host}", of(r.free, r.total), b.device().unknown_free())
}

impl Report<'_> {
    fn text(&self) -> String {
        let mut out = format!("model    {}\n", report::path_text(&self.a.model));
        out += &backend_text(self.ask.backend);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "level    {}", super::level_text(self.ask.backend));
        match self.made {
            FitResult::Whole(p) => self.whole_text(p, &mut out),
            FitResult::Staged(s) => self.staged_text(s, &mut out),
        }
        out
    }

    fn whole_text(&self, p: &Planned, out: &mut String) {
        let id = self.ask.backend.id();
        for (w, (dtype, dims)) in self.ask.wanted.iter().zip(&p.inputs) {
            let fixed = match p.fixed.contains(&w.name) {
                true => " (determines a shape: the plan is valid only for this value)",
                false => "",
            };
            let _ = writeln!(out, "input    {} {dtype}{dims:?}{fixed}", report::name(&w.name));
        }
        if let Some(n) = self.batch {
            let _ = writeln!(out, "batch    {n}");
        }
        let f = &p.fit;
        let row = |what: &str, bytes: u64, note: String| vec![what.to_string(), size(bytes), note];
        let mut rows = vec![
            row("weights", f.weights, format!("copied to {id}")),
            row("", p.mapped, "read from the model's mapped files, or copied from there".into()),
        ];
        if f.packed > 0 {
            rows.push(row("", f.packed, format!("packed for the kernels of {id}")));
        }
        if f.packing > 0 {
            rows.push(row(
                "",
                f.packing,
                "copies of weights that are not aligned in the file, while they are packed".into(),
            ));
        }
        if p.host.constants > 0 {
            rows.push(row("", p.host.constants, "made on the host: decoded or folded".into()));
        }
        rows.push(row("activations", f.activations, live_text(f, &p.plan)));
        if f.workspace > 0 {
            rows.push(row("workspace", f.workspace, "of the kernel that needs the most".into()));
        }
        rows.push(row("inputs", f.inputs, format!("and {} on the host", size(p.host.inputs))));
        rows.push(row("outputs", f.outputs, format!("and {} on the host", size(p.host.outputs))));
        rows.push(row("process", p.process, "program, model's description, graph and plan".into()));
        rows.push(row("peak", f.device(), format!("on {id}")));
        rows.push(row("", f.total(), format!("on {id} with the weights that are read in place")));
        let what = match self.ask.room.shared {
            true => {
                "anonymous memory of the process: the peak of planning, or the sum of these rows without mapped weights if that is larger"
            }
            false => {
                "anonymous memory of the process: the peak of planning, or the sum of the host's memory in these rows if that is larger"
            }
        };
        rows.push(row("", self.ask.anonymous(p), what.into()));
        *out += &table(&rows);
        let _ = writeln!(out, "memory   {}", room_text(&self.ask.room, self.ask.backend));
        let _ = writeln!(out, "fits     {}", if self.refused.is_none() { "yes" } else { "no" });
        match &self.largest {
            Err(why) => {
                let _ = writeln!(out, "largest batch: not searched, since {why}");
            }
            Ok(l) => {
                let _ = match l.batch {
                    Some(n) => write!(out, "largest batch {n}"),
                    None => write!(out, "largest batch: not even 1 fits"),
                };
                if let Some(p) = &l.planned {
                    let _ = write!(
                        out,
                        " ({} on {id}, {} anonymous)",
                        size(p.fit.device()),
                        size(self.ask.anonymous(p))
                    );
                }
                let _ = match &l.limit {
                    // Out of memory is the expected reason.
                    Some(Error::OutOfMemory { .. }) => writeln!(out),
                    Some(e) => writeln!(out, "; the next one does not fit: {e}"),
                    None => writeln!(out, "; larger ones are not tried"),
                };
            }
        }
    }

    fn staged_text(&self, s: &Stages, out: &mut String) {
        let n = s.known.len();
        let _ = writeln!(
            out,
            "the model is not a single graph, since {}: it runs in stages",
            report::name(&s.why)
        );
        let _ = writeln!(
            out,
            "the peak is not predicted; values that the host computes are assumed to be 0, so sizes that depend on them are too small"
        );
        let mut rows = vec![
            ["stage", "scratch", "live at once", "workspace", "outputs", "weights copied", "packed"]
                .map(String::from)
                .to_vec(),
        ];
        for (i, (_, f)) in s.known.iter().enumerate() {
            let cells =
                [f.activations, f.live.bytes as u64, f.workspace, f.outputs, f.weights, f.packed].map(size);
            rows.push([&[i.to_string()][..], &cells].concat());
        }
        *out += &table(&rows);
        let _ = writeln!(
            out,
            "{n} stages known, {} nodes on the host; all stages together take {} on {}",
            s.host_nodes,
            size(s.sum.device()),
            self.ask.backend.id()
        );
        if let Some(why) = &s.stopped {
            let _ = writeln!(out, "the later stages are not known: {}", why.replace('\n', " "));
        }
        let _ = writeln!(out, "memory   {}", room_text(&self.ask.room, self.ask.backend));
    }

    fn json(&self) -> Value {
        let r = &self.ask.room;
        let mut v = json!({
            "model": report::path(&self.a.model),
            "backend": backend_json(self.ask.backend),
            "memory": {
                "device_free": r.free, "device_total": r.total,
                "device_free_told": self.ask.backend.device().free_memory().is_some(),
                "host_free": r.host.map(|h| h.0), "host_total": r.host.map(|h| h.1), "device_is_host": r.shared,
            },
            "batch": self.batch,
            "staged": null,
            "fits": self.refused.is_none(),
            "error": self.refused.map(report::error_json),
        });
        match self.made {
            FitResult::Whole(p) => self.whole_json(p, &mut v),
            FitResult::Staged(s) => {
                // Only some stages are known, so it is not known whether the model fits.
                v["fits"] = Value::Null;
                v["staged"] = json!(s.why);
                v["stages"] = s
                    .known
                    .iter()
                    .map(|(p, f)| {
                        json!({
                            "weights": { "device": f.weights, "packed": f.packed, "packing": f.packing }, "activations": fit_json(f, p),
                            "workspace": f.workspace, "outputs": f.outputs,
                        })
                    })
                    .collect();
                v["stopped"] = json!(s.stopped);
                v["known"] = json!({ "device": s.sum.device(), "by_tag": tags_json(&s.sum.by_tag()) });
            }
        }
        v
    }

    fn whole_json(&self, p: &Planned, v: &mut Value) {
        let (f, inputs) = (&p.fit, self.ask.wanted.iter().zip(&p.inputs));
        v["inputs"] = inputs
            .map(|(w, (dtype, dims))| {
                let fixed = p.fixed.contains(&w.name);
                json!({ "name": w.name, "dtype": dtype, "shape": dims, "source": w.source, "steers_shape": fixed })
            })
            .collect();
        v["weights"] = json!({ "mapped": p.mapped, "device": f.weights, "packed": f.packed, "packing": f.packing, "host": p.host.constants });
        v["activations"] = fit_json(f, &p.plan);
        v["workspace"] = json!(f.workspace);
        v["io"] = json!({
            "inputs": { "device": f.inputs, "host": p.host.inputs },
            "outputs": { "device": f.outputs, "host": p.host.outputs },
        });
        v["peak"] = json!({
            "device": f.device(), "total": f.total(), "by_tag": tags_json(&f.by_tag()), "host": p.host.sum(), "process": p.process, "planning": self.ask.planning.get(),
            "anonymous": self.ask.anonymous(p),
        });
        match &self.largest {
            Err(why) => v["no_largest_batch_because"] = json!(why),
            Ok(l) => {
                v["largest_batch"] = json!({
                    "batch": l.batch,
                    "device": l.planned.as_ref().map(|p| p.fit.device()),
                    "anonymous": l.planned.as_ref().map(|p| self.ask.anonymous(p)),
                    "limit": l.limit.as_ref().map(report::error_json),
                    "plans": l.plans,
                })
            }
        }
    }
}
