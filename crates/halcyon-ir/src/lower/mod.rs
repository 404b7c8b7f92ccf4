//! Lowering: a graph with concrete shapes becomes a [`Plan`] for a device.
//!
//! An element-wise node usually joins the kernel that reads it, if only one kernel does (fusion). Views
//! become strides of the reader's loads. Literals and iotas are computed by their readers. Every other op
//! gets a buffer and one or more steps. `decide` chooses among these. It visits readers before their
//! operands, so it needs neither a search nor recursion over the whole graph.

mod decide;
mod fuse;
mod join;
mod launches;
mod slots;
mod structured;
mod trace;

use crate::composite::{Composite, CompositeKind};
use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::fused::{Fused, Instr, InstrKind, Load, MAX_RANK, Out, Param, Reg};
use crate::graph::{Graph, NodeId};
use crate::kernel::tune::{self, Tunable, TunedVariants};
use crate::kernel::{Kernel, Launch, MatrixOp, MatrixType, lower as kernel_lower};
use crate::layout::{Restride, View};
use crate::ops::{Facts, Lowering, Op, ReduceKind};
use crate::passes::{
    self, AmpPolicy, COMPOSITES, EPILOGUES, FUSION, IN_PLACE, JOINED, LAUNCHES, Level, MIXED, PACKED,
    PassOptions, TUNED,
};
use crate::plan::{
    Bounds, BufId, BufferSpec, HostWork, PackedConst, Plan, PlanOutput, Receipt, Step, StepWork, Storage,
};
use crate::shape::Dims;
use crate::target::{
    Caps, Declined, Epilogue, LibraryCall, LibraryKernel, MatmulPrecision, Operand, Target, Work,
};
use decide::BufferView;
use fuse::{Body, Store, kernel_work};
use join::ChainCall;
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use structured::Product;
pub use trace::{Piece, Trace};

/// Options of [`lower`].
#[derive(Clone, Debug, Default)]
pub struct LowerOptions {
    pub passes: PassOptions,
    pub precision: MatmulPrecision,
    /// For each input: whether the plan may overwrite its storage.
    pub donated: Vec<bool>,
    /// Tuning results for the device, used if the pass options include [`TUNED`].
    pub tuned: Option<Arc<TunedVariants>>,
}

impl LowerOptions {
    fn tunes(&self) -> bool {
        self.tuned.is_some() && self.passes.does(TUNED)
    }
}

/// Optimises and lowers a graph without symbols.
///
/// # Errors
/// [`Error::Shape`] for symbols and for types larger than [`crate::shape::MAX_BYTES`]; [`Error::Unsupported`]
/// if the device has no kernel for an op.
pub fn lower(graph: &Graph, target: &dyn Target, options: &LowerOptions) -> Result<Plan> {
    Ok(traced(graph, target, options)?.0)
}

/// Returns the graph as the mixed-precision pass gets it, and for each op that may be computed in f16 the f32
/// values whose range decides whether it is ([`passes::autocast::ranged_ops`]).
///
/// # Errors
/// Errors of the passes.
pub fn ranged(
    graph: &Graph,
    target: &dyn Target,
    options: &LowerOptions,
) -> Result<(Graph, Vec<(NodeId, Vec<NodeId>)>)> {
    let cache = KernelCache::new(target);
    let claims = |c: &Composite| claims(&cache, options, c);
    let passes = PassOptions { amp: AmpPolicy::None, ..options.passes.clone() };
    let (g, _) = passes::optimize(graph, &passes, &claims)?;
    let whole = passes.does(COMPOSITES);
    let ops = passes::autocast::ranged_ops(&g, &|c| whole && claims(c))?;
    Ok((g, ops))
}

/// Like [`lower`], but also returns which part of the graph each step computes, for callers that run the
/// steps one by one.
///
/// # Errors
/// The errors of [`lower`].
pub fn traced(graph: &Graph, target: &dyn Target, options: &LowerOptions) -> Result<(Plan, Trace)> {
    for n in graph.nodes() {
        // Inputs and literals are created without a check. All other nodes have been checked.
        if n.op.is_leaf() {
            n.ty.check(&n.op.name()).map_err(|e| e.at(&n.span))?;
        }
    }
    let cache = KernelCache::new(target);
    let claims = |c: &Composite| claims(&cache, options, c);
    let (before, mut receipts) = passes::optimize(graph, &options.passes, &claims)?;
    let mut declined: HashSet<Composite> = HashSet::new();
    let (changed, divided, mut plan, values) = loop {
        // The epilogues of convolutions are not known before lowering, so only lowering queries the target
        // for blocked convolutions. If the target declines one of them, the graph is made again with this
        // convolution in the plain layout.
        let in_blocks = |c: &Composite| match c.kind {
            CompositeKind::BlockedConv => !declined.contains(c),
            _ => claims(c),
        };
        let blocks = |d| target.channel_block(d);
        let (g, blocked) = passes::block_layouts(&before, &options.passes, &blocks, &in_blocks)?;
        // This pass is not an optimisation. It runs at every level, because the device rejects bindings
        // larger than its limit.
        let (g, divided) = match target.caps().max_binding_bytes {
            u64::MAX => (g, 0),
            most => passes::divide::run(g, most)?,
        };
        match Lowerer::new(&g, &cache, options, &declined)?.run()? {
            Attempt::Plan(plan, values) => {
                receipts.extend(blocked);
                let changed = match g {
                    Cow::Owned(g) => Some(g),
                    Cow::Borrowed(_) => None,
                };
                break (changed, divided, *plan, values);
            }
            Attempt::WithoutBlocks(more) => declined.extend(more.iter().map(|c| (**c).clone())),
        }
    };
    if divided > 0 {
        plan.warnings.push(format!(
            "{divided} products read constants that are larger than the {} bytes the device binds at once, so they are computed in parts",
            target.caps().max_binding_bytes
        ));
    }
    // The lowered graph has bytes in place of outputs of small types. The plan describes the outputs as the
    // given graph does.
    for (p, o) in plan.outputs.iter_mut().zip(graph.outputs()) {
        (p.dtype, p.dims) = (graph.dtype(o.node), graph.shape(o.node).dims()?);
    }
    plan.receipts.splice(0..0, receipts);
    let (amp, passes) = (options.passes.amp, &options.passes);
    if amp != AmpPolicy::None && passes.level < Level::O2 {
        plan.warnings
            .push(format!("{MIXED}: needs level O2; at {} nothing is computed in {amp}", passes.level));
    }
    if let Some(low) = amp.dtype().filter(|_| passes.does(MIXED)) {
        plan.warnings.extend(passes.kept.warnings(graph, low));
        plan.warnings.extend(passes.mixed.warnings(amp));
    }
    if options.passes.does(COMPOSITES) {
        let missed: Vec<String> = graph
            .nodes()
            .iter()
            .filter_map(|n| match &n.op {
                Op::Composite(c) if c.kind.row().has_kernels && !claims(c) => Some(c.name().to_string()),
                _ => None,
            })
            .collect();
        if !missed.is_empty() {
            plan.warnings.push(format!(
                "{COMPOSITES}: the device has no kernel for {} of them ({})",
                missed.len(),
                dedup(missed)
            ));
        }
    }
    Ok((plan, Trace { graph: changed.unwrap_or(before), values }))
}

/// Whether the device runs the composite as a whole, on dense operands.
fn claims(cache: &KernelCache<'_>, options: &LowerOptions, c: &Composite) -> bool {
    let dense = |n: NodeId| -> Option<Operand> {
        Some(Operand { dtype: c.body.dtype(n), view: View::dense(&c.body.shape(n).known()?) })
    };
    let ins: Option<Vec<Operand>> = c.body.inputs().iter().map(|i| dense(i.node)).collect();
    let (Some(ins), Some(out)) = (ins, c.result().ok().and_then(dense)) else { return false };
    let op = Op::Composite(Arc::new(c.clone()));
    let plain = LowerOptions { tuned: None, ..options.clone() };
    let outputs = [out];
    let call = LibraryCall {
        precision: precision(options, &ins),
        ..LibraryCall::new(Work::Op(&op), &ins, &outputs)
    };
    match select(cache, &plain, &op, &call) {
        Ok(KernelChoice::Library(_)) => true,
        // A library kernel for f32 is preferred to a generated kernel for half types.
        Ok(KernelChoice::Kernels(..)) => passes::autocast::wide_form(c).is_none_or(|wide| {
            let f32s = |o: &Operand| Operand { dtype: o.dtype.compute(), view: o.view.clone() };
            let (ins, out): (Vec<Operand>, _) =
                (ins.iter().map(f32s).collect(), outputs.each_ref().map(f32s));
            let op = Op::Composite(Arc::new(wide));
            let precision = precision(options, &ins);
            let call = LibraryCall { precision, ..LibraryCall::new(Work::Op(&op), &ins, &out) };
            cache.library(&call).is_err()
        }),
        Err(_) => false,
    }
}

fn dedup(mut v: Vec<String>) -> String {
    v.sort();
    v.dedup();
    v.join(", ")
}

/// The precision that a call must have. Below O2, results must meet the tolerances of the ops, which assume
/// the highest precision. From O2 on, calls on bf16 factors get medium precision: the products are exact in
/// f32 on any hardware, and the device may flush denormals to zero and sum in its own order. Other calls get
/// the precision of the options.
fn precision(options: &LowerOptions, inputs: &[Operand]) -> MatmulPrecision {
    let half = inputs.len() >= 2 && inputs[..2].iter().all(|o| o.dtype == DType::BF16);
    match options.passes.level >= Level::O2 {
        true if half => MatmulPrecision::Medium,
        true => options.precision,
        false => MatmulPrecision::Highest,
    }
}

/// The abilities that a template may use. Matrix units that round f32 operands to TF32 are allowed only from
/// O2 on, and only if the call's precision allows it.
fn permitted<'c>(caps: &'c Caps, options: &LowerOptions, precision: MatmulPrecision) -> Cow<'c, Caps> {
    let rounds = |o: &MatrixOp| o.operand == MatrixType::Tf32;
    let wanted = precision != MatmulPrecision::Highest && options.passes.level >= Level::O2;
    if wanted || !caps.matrix.iter().any(rounds) {
        return Cow::Borrowed(caps);
    }
    let matrix = caps.matrix.iter().copied().filter(|o| !rounds(o)).collect();
    Cow::Owned(Caps { matrix, ..caps.clone() })
}

/// A call that owns its data. Equal calls get the same kernel.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct CallKey {
    work: tune::Work,
    inputs: Vec<Operand>,
    outputs: Vec<Operand>,
    precision: MatmulPrecision,
    in_place: usize,
    constants: Vec<usize>,
    /// The chain, the index of its input that is the op's result, its other inputs, and its output.
    epilogue: Option<(Fused, u32, Vec<Operand>, Operand)>,
}

impl CallKey {
    fn of(call: &LibraryCall<'_>) -> CallKey {
        CallKey {
            work: match call.work {
                Work::Op(op) => tune::Work::Op(op.clone()),
                Work::Fused(f) => tune::Work::Fused(Arc::new(f.clone())),
            },
            inputs: call.inputs.to_vec(),
            outputs: call.outputs.to_vec(),
            precision: call.precision,
            in_place: call.in_place,
            constants: call.constants.to_vec(),
            epilogue: call
                .epilogue
                .map(|e| (e.fused.clone(), e.product, e.inputs.to_vec(), e.output.clone())),
        }
    }
}

type FoundKernel = Result<Arc<dyn LibraryKernel>, Declined>;

/// Queries the target once for each distinct call. If the call of a composite's step equals the call for
/// which the target claimed the composite, the step runs the kernel that the target returned then.
struct KernelCache<'a> {
    target: &'a dyn Target,
    known: RefCell<HashMap<CallKey, FoundKernel>>,
}

impl<'a> KernelCache<'a> {
    fn new(target: &'a dyn Target) -> KernelCache<'a> {
        KernelCache { target, known: RefCell::default() }
    }

    /// Like [`Target::library`], with the kernel of an equal earlier call if there is one.
    fn library(&self, call: &LibraryCall<'_>) -> FoundKernel {
        let mut known = self.known.borrow_mut();
        known.entry(CallKey::of(call)).or_insert_with(|| self.target.library(call)).clone()
    }
}

/// How a device runs one op.
enum KernelChoice {
    Library(Arc<dyn LibraryKernel>),
    /// Generated kernels. Their bindings number the operands: first inputs, then outputs, then temporaries.
    Kernels(kernel_lower::Lowered, Option<Arc<Tunable>>),
}

/// Chooses the library kernel if the target has one, else a template of the kernel IR: in its tuned variant
/// if there is one, else in its default variant.
fn select(
    cache: &KernelCache<'_>,
    options: &LowerOptions,
    op: &Op,
    call: &LibraryCall<'_>,
) -> Result<KernelChoice, Declined> {
    let library = match cache.library(call) {
        Ok(k) => return Ok(KernelChoice::Library(k)),
        Err(d) => d,
    };
    let LibraryCall { inputs, outputs, precision, in_place, .. } = *call;
    let caps = &*permitted(cache.target.caps(), options, precision);
    let tunable = options.tunes().then(|| kernel_lower::choices(op, inputs, outputs, caps)).flatten();
    let mut tunable = tunable.map(|choices| Tunable {
        work: tune::Work::Op(op.clone()),
        inputs: inputs.to_vec(),
        output: outputs[0].clone(),
        variant: choices.default.clone(),
        choices,
        tuned: false,
    });
    if let (Some(t), Some(known)) = (&mut tunable, &options.tuned)
        && let Some((v, low)) = known.find(&t.choices, |v| t.build(v, caps).ok())
    {
        (t.variant, t.tuned) = (v, true);
        return Ok(KernelChoice::Kernels(low, tunable.map(Arc::new)));
    }
    match kernel_lower::lower_op(op, inputs, outputs, in_place > 0, caps) {
        Ok(k) => Ok(KernelChoice::Kernels(k, tunable.map(Arc::new))),
        Err(d) => {
            let dense = if library.dense.is_empty() { d.dense } else { library.dense };
            Err(Declined { reason: format!("library: {}; kernel IR: {}", library.reason, d.reason), dense })
        }
    }
}

struct Lowerer<'a> {
    g: &'a Graph,
    target: &'a dyn Target,
    cache: &'a KernelCache<'a>,
    options: &'a LowerOptions,
    live: Vec<bool>,
    dims: Vec<Dims>,
    /// Whether steps compute the node's value into a buffer. (Inputs and constants have buffers too, but are
    /// not roots.)
    root: Vec<bool>,
    /// Views that are resolved to strides of a buffer.
    placed: Vec<Option<BufferView>>,
    /// Buffer of a root, input or constant.
    buffer: Vec<Option<BufId>>,
    inlined: usize,
    plan: Plan,
    /// For each base (a node whose buffer is read directly or through views): the last root whose step reads
    /// it, in node order; `u32::MAX` for outputs of the graph. Which step runs last is not known until the
    /// end, so in-place decisions use node order.
    last_read: Vec<u32>,
    in_place: usize,
    /// Buffers of outputs that are the memory of donated inputs.
    overwriting: HashSet<BufId>,
    /// For each base: the first root whose step reads it.
    first_read: Vec<u32>,
    /// Products that are not computed until the chain that reads them is known, because the chain may become
    /// their epilogue.
    waiting: BTreeSet<NodeId>,
    /// Number of chains that are epilogues.
    epilogues: usize,
    /// The node whose steps are being added.
    place: NodeId,
    steps: Vec<PlacedStep>,
    /// Blocked convolutions that the target declined in earlier attempts, and in this one.
    known_declined: &'a HashSet<Composite>,
    declined: Vec<Arc<Composite>>,
}

/// For each buffer of a step: the node whose value it holds, if it holds the whole value, densely.
type Values = SmallVec<[Option<NodeId>; 4]>;

/// A step, and the node at whose place in the graph it runs.
struct PlacedStep {
    place: NodeId,
    step: Step,
    values: Values,
    /// Set if the step is an element-wise chain that may be joined with others and merged into launches.
    chain: Option<ChainCall>,
}

/// The result of one lowering.
enum Attempt {
    Plan(Box<Plan>, Vec<Values>),
    /// The target declined these blocked convolutions. The graph is lowered again with these convolutions in
    /// the plain layout.
    WithoutBlocks(Vec<Arc<Composite>>),
}

impl<'a> Lowerer<'a> {
    fn new(
        g: &'a Graph,
        cache: &'a KernelCache<'a>,
        options: &'a LowerOptions,
        known_declined: &'a HashSet<Composite>,
    ) -> Result<Lowerer<'a>> {
        let n = g.nodes().len();
        let dims =
            g.nodes().iter().map(|n| n.ty.shape.dims().map_err(|e| e.at(&n.span))).collect::<Result<_>>()?;
        let roots: Vec<NodeId> = g.outputs().iter().map(|o| o.node).collect();
        Ok(Lowerer {
            g,
            target: cache.target,
            cache,
            options,
            live: g.live(&roots),
            dims,
            root: vec![false; n],
            placed: vec![None; n],
            buffer: vec![None; n],
            inlined: 0,
            plan: Plan { args: g.args().to_vec(), ..Plan::default() },
            last_read: vec![0; n],
            in_place: 0,
            overwriting: HashSet::new(),
            first_read: vec![u32::MAX; n],
            waiting: BTreeSet::new(),
            epilogues: 0,
            place: NodeId(0),
            steps: vec![],
            known_declined,
            declined: vec![],
        })
    }

    fn run(mut self) -> Result<Attempt> {
        self.decide();
        self.place_views();
        self.find_last_reads();
        for id in self.g.ids().collect::<Vec<_>>() {
            if self.live[id.index()] {
                self.place = id;
                self.emit_root(id)?;
            }
        }
        if !self.declined.is_empty() {
            return Ok(Attempt::WithoutBlocks(self.declined));
        }
        self.place = NodeId(u32::MAX);
        let outputs: Vec<NodeId> = self.g.outputs().iter().map(|o| o.node).collect();
        let mut taken: HashSet<BufId> = HashSet::new();
        for (k, id) in outputs.iter().enumerate() {
            let mut b = self.buffer_of(*id)?;
            // An output that is an unchanged input or constant, or that is listed twice, is copied.
            let own = matches!(self.plan.buffers[b.0 as usize].storage, Storage::Slot(_))
                || self.overwriting.contains(&b)
                || self.updated_in_place(*id);
            if !own || taken.contains(&b) {
                let p = BufferView { base: *id, view: View::dense(&self.dims[id.index()]), fill: None };
                b = self.copy(*id, &p)?;
            }
            taken.insert(b);
            let spec = &mut self.plan.buffers[b.0 as usize];
            if !matches!(spec.storage, Storage::Input(_)) {
                spec.storage = Storage::Output(k as u32);
            }
            self.plan.outputs.push(PlanOutput {
                buffer: b,
                dtype: self.g.dtype(*id),
                dims: self.dims[id.index()].clone(),
            });
        }
        // If a postponed product did not get an epilogue, its step was added late, but belongs at the
        // product's own place. A product that still waits for its chain is not read by any step, because the
        // chain has no elements.
        self.steps.sort_by_key(|s| s.place);
        let (joined, launches) = match self.steps.iter().filter(|s| s.chain.is_some()).count() {
            // Only chains are joined and merged, and only with each other.
            0 | 1 => (0, 0),
            _ => {
                self.exclude_parts();
                (self.join_chains(), self.merge_launches())
            }
        };
        let (steps, values): (_, Vec<Values>) =
            std::mem::take(&mut self.steps).into_iter().map(|s| (s.step, s.values)).unzip();
        self.plan.steps = steps;
        // Often every buffer is an input, an output or a constant, and nothing needs scratch memory.
        let scratch = self.plan.buffers.iter().any(|b| matches!(b.storage, Storage::Slot(_)));
        if scratch || self.plan.steps.iter().any(|s| s.work.workspace() > 0) {
            self.assign_slots();
        }
        let fused = self.inlined;
        if fused > 0 && self.options.passes.does(FUSION) {
            self.plan.receipts.push(Receipt::new(FUSION, fused));
        }
        for (name, count) in [(JOINED, joined), (LAUNCHES, launches)] {
            if count > 0 {
                self.plan.receipts.push(Receipt::new(name, count));
            }
        }
        if self.in_place > 0 {
            self.plan.receipts.push(Receipt::new(IN_PLACE, self.in_place));
        }
        if self.epilogues > 0 {
            self.plan.receipts.push(Receipt::new(EPILOGUES, self.epilogues));
        }
        if !self.plan.packed.is_empty() {
            self.plan.receipts.push(Receipt::new(PACKED, self.plan.packed.len()));
        }
        // If tuning confirmed the default variant, it changed nothing.
        let other = |t: &&Arc<Tunable>| t.tuned && t.variant != t.choices.default;
        match self.plan.steps.iter().filter_map(|s| s.tunable.as_ref()).filter(other).count() {
            0 => {}
            n => self.plan.receipts.push(Receipt::new(TUNED, n)),
        }
        Ok(Attempt::Plan(Box::new(self.plan), values))
    }

    fn push(&mut self, step: Step, values: Values) {
        self.steps.push(PlacedStep { place: self.place, step, values, chain: None });
    }

    fn facts(&self, id: NodeId) -> Facts {
        self.g.node(id).op.facts()
    }

    fn is_literal(&self, id: NodeId) -> bool {
        self.facts(id).lowering == Lowering::Literal
    }

    fn is_expr(&self, id: NodeId) -> bool {
        self.facts(id).lowering == Lowering::ElementWise
    }

    fn has_buffer(&self, id: NodeId) -> bool {
        self.root[id.index()] || self.facts(id).lowering == Lowering::Stored
    }

    fn updated_in_place(&self, id: NodeId) -> bool {
        self.facts(id).in_place
    }

    fn new_buffer(&mut self, dtype: DType, dims: &[usize]) -> BufId {
        let bytes = dtype.bytes(dims.iter().product());
        self.plan.buffers.push(BufferSpec { bytes, storage: Storage::Slot(u32::MAX) });
        BufId(self.plan.buffers.len() as u32 - 1)
    }

    fn buffer_of(&mut self, id: NodeId) -> Result<BufId> {
        if let Some(b) = self.buffer[id.index()] {
            return Ok(b);
        }
        let bytes = self.g.dtype(id).bytes(self.dims[id.index()].iter().product());
        let storage = match &self.g.node(id).op {
            Op::Input(k) => Storage::Input(*k),
            Op::Const(c) => {
                self.plan.consts.push(c.clone());
                Storage::Const(self.plan.consts.len() as u32 - 1)
            }
            op => {
                return Err(Error::internal(format!("{} is read before it is computed", op.name())));
            }
        };
        self.plan.buffers.push(BufferSpec { bytes, storage });
        let b = BufId(self.plan.buffers.len() as u32 - 1);
        self.buffer[id.index()] = Some(b);
        Ok(b)
    }

    fn emit_root(&mut self, id: NodeId) -> Result<()> {
        let i = id.index();
        if !self.root[i] {
            return Ok(());
        }
        let node = self.g.node(id);
        let dims = self.dims[i].clone();
        match &node.op {
            Op::Reduce { kind, axes, .. } => {
                let b = self.new_buffer(node.ty.dtype, &dims);
                self.buffer[i] = Some(b);
                if dims.iter().product::<usize>() == 0 {
                    return Ok(());
                }
                let x = node.inputs[0];
                let mut perm: SmallVec<[usize; 4]> =
                    (0..self.dims[x.index()].len()).filter(|k| !axes.contains(k)).collect();
                perm.extend(axes.iter().copied());
                let space: Dims = perm.iter().map(|&k| self.dims[x.index()][k]).collect();
                let view = View::dense(&space[..space.len() - axes.len()]);
                let store = Store { space, reduced: axes.len(), reduce: Some(*kind), view, buffer: b };
                self.fused(id, x, Some(Restride::Permute(perm)), store)
            }
            Op::Concat { axis } => {
                let b = self.new_buffer(node.ty.dtype, &dims);
                self.buffer[i] = Some(b);
                let mut at = 0;
                for x in node.inputs.clone() {
                    let part = self.dims[x.index()].clone();
                    if part.iter().product::<usize>() > 0 {
                        let start: Dims = (0..dims.len()).map(|k| if k == *axis { at } else { 0 }).collect();
                        let view = View::dense(&dims).slice(&start, &vec![1; dims.len()], &part);
                        let store = Store { space: part.clone(), reduced: 0, reduce: None, view, buffer: b };
                        self.fused(id, x, None, store)?;
                    }
                    at += part[*axis];
                }
                Ok(())
            }
            op if self.is_literal(id) || self.is_expr(id) || op.is_view() => {
                let b = self.new_buffer(node.ty.dtype, &dims);
                if dims.iter().product::<usize>() > 0 {
                    self.fused(id, id, None, Store::dense(dims, b))?;
                }
                self.buffer[i] = Some(b);
                Ok(())
            }
            _ => self.structured(id),
        }
    }
}
