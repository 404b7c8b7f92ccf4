//! Lowering: a graph with concrete shapes becomes a [`Plan`] for a device.
//!
//! Element-wise nodes join the kernel of their only reader (fusion); views become strides of the reader's loads; every
//! other node gets a buffer and a step. The decision runs backwards over the graph (readers first), so it needs no search
//! and no recursion over the whole graph.

use crate::dtype::{DType, Scalar};
use crate::error::{Error, Result};
use crate::fused::{Fused, Instr, InstrKind, Load, MAX_RANK, Out, Param, Reg};
use crate::graph::{Graph, NodeId};
use crate::kernel::{Kernel, Launch, lower as kernel_lower};
use crate::layout::{View, collapse};
use crate::op::{Op, ReduceKind};
use crate::passes::{self, COMPOSITES, FUSION, IN_PLACE, PassOptions};
use crate::plan::{BufId, BufferSpec, HostWork, Plan, PlanOutput, Receipt, Step, StepWork, Storage};
use crate::scalar_op::ScalarOp;
use crate::shape::Dims;
use crate::target::{Declined, LibraryCall, LibraryKernel, MatmulPrecision, Operand, Target, Work};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::sync::Arc;

/// Members that one fused kernel may have. Bounds recursion, compile time and registers.
const MAX_MEMBERS: usize = 64;

/// What the caller knows beyond the graph.
#[derive(Clone, Debug, Default)]
pub struct LowerOptions {
    pub passes: PassOptions,
    pub precision: MatmulPrecision,
    /// Inputs (by number) whose storage the plan may overwrite.
    pub donated: Vec<bool>,
}

/// Optimises and lowers. The graph must have no symbols left.
pub fn lower(graph: &Graph, target: &dyn Target, options: &LowerOptions) -> Result<Plan> {
    let claims = |c: &crate::composite::Composite| {
        let dense = |n: NodeId| -> Option<Operand> {
            Some(Operand {
                dtype: c.body.dtype(n),
                view: View::dense(&c.body.shape(n).known()?),
            })
        };
        let ins: Option<Vec<Operand>> = c.body.inputs().iter().map(|i| dense(i.node)).collect();
        let out = c.result().ok().and_then(dense);
        match (ins, out) {
            (Some(i), Some(o)) => {
                let op = Op::Composite(Arc::new(c.clone()));
                select(target, &op, &i, &[o], options.precision, false).is_ok()
            }
            _ => false,
        }
    };
    let (g, receipts) = passes::optimize(graph, &options.passes, &claims)?;
    let mut plan = Lowerer::new(&g, target, options)?.run()?;
    plan.receipts.splice(0..0, receipts);
    if options.passes.does(COMPOSITES) {
        let missed: Vec<String> = graph
            .nodes()
            .iter()
            .filter_map(|n| match &n.op {
                Op::Composite(c) if !claims(c) => Some(c.name.to_string()),
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
    Ok(plan)
}

fn dedup(mut v: Vec<String>) -> String {
    v.sort();
    v.dedup();
    v.join(", ")
}

/// How a device does one op.
enum Chosen {
    Library(Arc<dyn LibraryKernel>),
    /// Generated kernels; bindings name operands (inputs first, then outputs, then temporaries).
    Kernels(kernel_lower::Lowered),
}

/// The device's own kernel if it has one, else a template of the kernel IR.
fn select(
    target: &dyn Target,
    op: &Op,
    inputs: &[Operand],
    outputs: &[Operand],
    precision: MatmulPrecision,
    in_place: bool,
) -> Result<Chosen, Declined> {
    let call = LibraryCall {
        work: Work::Op(op),
        inputs,
        outputs,
        precision,
        in_place,
    };
    let library = match target.library(&call) {
        Ok(k) => return Ok(Chosen::Library(k)),
        Err(d) => d,
    };
    match kernel_lower::lower_op(op, inputs, outputs, in_place, target.caps()) {
        Ok(k) => Ok(Chosen::Kernels(k)),
        Err(d) => {
            let dense = if library.dense.is_empty() {
                d.dense
            } else {
                library.dense
            };
            Err(Declined {
                reason: format!("library: {}; kernel IR: {}", library.reason, d.reason),
                dense,
            })
        }
    }
}

/// A use of a node's value by a group of fused nodes, or by something that needs a buffer.
#[derive(Clone, Copy)]
struct Use {
    /// `None`: a buffer is needed.
    group: Option<u32>,
    via_view: bool,
    /// A reshape lies between, which an expression cannot be pushed through.
    reshaped: bool,
    /// A pad lies between, whose value is not the expression's.
    padded: bool,
    expands: bool,
}

#[derive(Default)]
struct Group {
    members: usize,
    loads: usize,
}

/// A step of the way from a value to the point that reads it.
#[derive(Clone)]
enum Path {
    Permute(SmallVec<[usize; 4]>),
    Expand(Dims),
    Slice {
        start: Dims,
        step: SmallVec<[isize; 6]>,
        len: Dims,
    },
    Pad(SmallVec<[usize; 4]>, SmallVec<[usize; 4]>),
    Reshape(Dims),
}

impl Path {
    fn apply(&self, v: &View) -> Option<View> {
        Some(match self {
            Path::Permute(p) => v.permute(p),
            Path::Expand(s) => v.expand(s),
            Path::Slice { start, step, len } => v.slice(start, step, len),
            Path::Pad(lo, hi) => v.pad(lo, hi),
            Path::Reshape(s) => v.reshape(s)?,
        })
    }
}

/// A value in a buffer: the node that owns the buffer, how to read it, and what masked elements are.
#[derive(Clone)]
struct Placed {
    base: NodeId,
    view: View,
    fill: Option<Scalar>,
}

struct Lowerer<'a> {
    g: &'a Graph,
    target: &'a dyn Target,
    options: &'a LowerOptions,
    live: Vec<bool>,
    dims: Vec<Dims>,
    /// The node has a buffer of its own.
    root: Vec<bool>,
    /// Views that are resolved to a buffer.
    placed: Vec<Option<Placed>>,
    /// Buffer of a root or of an input or constant.
    buffer: Vec<Option<BufId>>,
    inlined: usize,
    plan: Plan,
    /// Step after which a base is read no more is unknown until the end, so in-place asks by node order.
    last_read: Vec<u32>,
    in_place: usize,
}

/// A fused kernel under construction.
struct Body {
    loads: Vec<Load>,
    sources: Vec<NodeId>,
    params: Vec<(DType, Param)>,
    instrs: Vec<Instr>,
    memo: HashMap<(NodeId, usize), Reg>,
    paths: Vec<Vec<Path>>,
    nodes: usize,
}

impl<'a> Lowerer<'a> {
    fn new(g: &'a Graph, target: &'a dyn Target, options: &'a LowerOptions) -> Result<Lowerer<'a>> {
        let n = g.nodes().len();
        let dims = g
            .nodes()
            .iter()
            .map(|n| n.ty.shape.dims().map_err(|e| e.at(&n.span)))
            .collect::<Result<_>>()?;
        let roots: Vec<NodeId> = g.outputs().iter().map(|o| o.node).collect();
        Ok(Lowerer {
            g,
            target,
            options,
            live: g.live(&roots),
            dims,
            root: vec![false; n],
            placed: vec![None; n],
            buffer: vec![None; n],
            inlined: 0,
            plan: Plan {
                args: g.args().to_vec(),
                ..Plan::default()
            },
            last_read: vec![0; n],
            in_place: 0,
        })
    }

    fn run(mut self) -> Result<Plan> {
        self.decide();
        self.place_views();
        self.find_last_reads();
        for id in self.g.ids().collect::<Vec<_>>() {
            if self.live[id.index()] {
                self.emit_root(id)?;
            }
        }
        let outputs: Vec<NodeId> = self.g.outputs().iter().map(|o| o.node).collect();
        let mut taken: Vec<BufId> = vec![];
        for (k, id) in outputs.iter().enumerate() {
            let mut b = self.buffer_of(*id)?;
            // An output that is an input or a constant as it stands, or that is listed twice, is copied.
            let own = matches!(self.plan.buffers[b.0 as usize].storage, Storage::Slot(_))
                || self.updated_in_place(*id);
            if !own || taken.contains(&b) {
                let p = Placed {
                    base: *id,
                    view: View::dense(&self.dims[id.index()]),
                    fill: None,
                };
                b = self.copy(*id, &p)?;
            }
            taken.push(b);
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
        self.assign_slots();
        let fused = self.inlined;
        if fused > 0 && self.options.passes.does(FUSION) {
            self.plan.receipts.push(Receipt::new(FUSION, fused));
        }
        if self.in_place > 0 {
            self.plan.receipts.push(Receipt::new(IN_PLACE, self.in_place));
        }
        Ok(self.plan)
    }

    fn is_literal(&self, id: NodeId) -> bool {
        matches!(self.g.node(id).op, Op::Full(_) | Op::Arg(_) | Op::Iota { .. })
    }

    fn is_expr(&self, id: NodeId) -> bool {
        matches!(self.g.node(id).op, Op::Scalar(_) | Op::Cast | Op::Bitcast)
    }

    fn has_buffer(&self, id: NodeId) -> bool {
        self.root[id.index()] || matches!(self.g.node(id).op, Op::Input(_) | Op::Const(_))
    }

    fn updated_in_place(&self, id: NodeId) -> bool {
        matches!(self.g.node(id).op, Op::UpdateSlice { .. })
    }

    /// Decides which nodes get buffers, readers first.
    fn decide(&mut self) {
        let n = self.g.nodes().len();
        let mut uses: Vec<SmallVec<[Use; 2]>> = vec![smallvec![]; n];
        let mut groups: Vec<Group> = vec![];
        let max_loads = (self.target.caps().max_bindings as usize)
            .saturating_sub(3)
            .clamp(2, 24);
        let fuse = self.options.passes.does(FUSION);
        let need = Use {
            group: None,
            via_view: false,
            reshaped: false,
            padded: false,
            expands: false,
        };
        for o in self.g.outputs() {
            uses[o.node.index()].push(need);
        }
        for i in (0..n).rev() {
            if !self.live[i] {
                continue;
            }
            let id = NodeId(i as u32);
            let node = self.g.node(id);
            let mine = std::mem::take(&mut uses[i]);
            let new_group = |groups: &mut Vec<Group>, loads: usize| {
                groups.push(Group { members: 1, loads });
                Some(groups.len() as u32 - 1)
            };
            match &node.op {
                Op::Input(_) | Op::Const(_) => {}
                Op::Full(_) | Op::Arg(_) | Op::Iota { .. } => {
                    let iota = matches!(node.op, Op::Iota { .. });
                    // Other readers compute a literal for themselves.
                    self.root[i] = mine
                        .iter()
                        .any(|u| u.group.is_none() || u.padded || u.reshaped && iota);
                }
                op if op.is_view() => {
                    let x = node.inputs[0];
                    let grows = matches!(op, Op::Expand)
                        && self.dims[i].iter().product::<usize>()
                            > self.dims[x.index()].iter().product::<usize>();
                    let (reshapes, pads) = (matches!(op, Op::Reshape), matches!(op, Op::Pad { .. }));
                    if mine.iter().any(|u| u.group.is_none()) && self.g.outputs().iter().any(|o| o.node == id)
                    {
                        // A view that is an output becomes a copy.
                        self.root[i] = true;
                        let group = new_group(&mut groups, 1);
                        uses[x.index()].push(Use {
                            group,
                            via_view: true,
                            reshaped: reshapes,
                            padded: pads,
                            expands: grows,
                        });
                    } else {
                        for u in mine {
                            uses[x.index()].push(Use {
                                group: u.group,
                                via_view: true,
                                reshaped: u.reshaped || reshapes,
                                padded: u.padded || pads,
                                expands: u.expands || grows,
                            });
                        }
                    }
                }
                Op::Scalar(_) | Op::Cast | Op::Bitcast => {
                    let group = mine.first().and_then(|u| u.group);
                    let one = mine.len() == 1;
                    let joins =
                        fuse && group.is_some_and(|gr| {
                            let gr = &groups[gr as usize];
                            gr.members < MAX_MEMBERS && gr.loads + node.inputs.len() <= max_loads
                        }) && mine.iter().all(|u| {
                            u.group == group && !u.reshaped && !u.padded && !u.expands && (one || !u.via_view)
                        });
                    let group = if joins {
                        self.inlined += 1;
                        if let Some(gr) = group.and_then(|g| groups.get_mut(g as usize)) {
                            gr.members += 1;
                            gr.loads += node
                                .inputs
                                .iter()
                                .filter(|x| !self.is_literal(**x))
                                .count()
                                .saturating_sub(1);
                        }
                        group
                    } else {
                        self.root[i] = true;
                        new_group(&mut groups, node.inputs.len())
                    };
                    for x in &node.inputs {
                        uses[x.index()].push(Use { group, ..need });
                    }
                }
                Op::Reduce { .. } | Op::Concat { .. } => {
                    self.root[i] = true;
                    for x in &node.inputs {
                        let group = new_group(&mut groups, 1);
                        uses[x.index()].push(Use { group, ..need });
                    }
                }
                _ => {
                    self.root[i] = true;
                    for x in &node.inputs {
                        uses[x.index()].push(need);
                    }
                }
            }
        }
    }

    fn path_of(&self, id: NodeId) -> Path {
        let out = self.dims[id.index()].clone();
        match &self.g.node(id).op {
            Op::Permute(p) => Path::Permute(p.clone()),
            Op::Expand => Path::Expand(out),
            Op::Slice(a) => Path::Slice {
                start: a.iter().map(|a| a.start.known().unwrap_or(0)).collect(),
                step: a.iter().map(|a| a.step as isize).collect(),
                len: out,
            },
            Op::Pad { lo, hi, .. } => Path::Pad(lo.clone(), hi.clone()),
            _ => Path::Reshape(out),
        }
    }

    /// Resolves views of buffers; where a view cannot be expressed, its operand becomes a copy.
    fn place_views(&mut self) {
        for id in self.g.ids() {
            let i = id.index();
            let node = self.g.node(id);
            if !self.live[i] || !node.op.is_view() {
                continue;
            }
            let x = node.inputs[0];
            let Some(from) = self.placement(x) else { continue };
            let path = self.path_of(id);
            let fill = match &node.op {
                Op::Pad { value, .. } => Some(*value),
                _ => from.fill,
            };
            let clash = from.view.mask.is_some() && fill != from.fill;
            match path.apply(&from.view).filter(|_| !clash) {
                Some(view) => {
                    self.placed[i] = Some(Placed {
                        base: from.base,
                        view,
                        fill,
                    })
                }
                None => {
                    self.root[x.index()] = true;
                    if let Some(view) = path.apply(&View::dense(&self.dims[x.index()])) {
                        self.placed[i] = Some(Placed { base: x, view, fill });
                    }
                }
            }
        }
    }

    /// Where a node's value can be read from memory; `None` for fused expressions.
    fn placement(&self, id: NodeId) -> Option<Placed> {
        if self.has_buffer(id) {
            return Some(Placed {
                base: id,
                view: View::dense(&self.dims[id.index()]),
                fill: None,
            });
        }
        self.placed[id.index()].clone()
    }

    /// For every base, the last root (in node order) whose step reads it.
    fn find_last_reads(&mut self) {
        // A fused node is read when its root is: propagate the reading root backwards.
        let n = self.g.nodes().len();
        let mut reader: Vec<u32> = vec![0; n];
        for o in self.g.outputs() {
            reader[o.node.index()] = u32::MAX;
        }
        for i in (0..n).rev().filter(|&i| self.live[i]) {
            let id = NodeId(i as u32);
            let at = if self.root[i] { i as u32 } else { reader[i] };
            self.last_read[i] = reader[i];
            for x in self.g.node(id).inputs.iter() {
                reader[x.index()] = reader[x.index()].max(at);
            }
        }
        // Bases are read through their views.
        for i in (0..n).rev() {
            if let Some(p) = &self.placed[i]
                && !self.root[i]
            {
                let b = p.base.index();
                self.last_read[b] = self.last_read[b].max(self.last_read[i]);
            }
        }
    }

    fn new_buffer(&mut self, dtype: DType, dims: &[usize]) -> BufId {
        let bytes = dtype.bytes(dims.iter().product());
        self.plan.buffers.push(BufferSpec {
            bytes,
            storage: Storage::Slot(u32::MAX),
        });
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
                return Err(Error::internal(format!(
                    "{} is read before it is computed",
                    op.name()
                )));
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
                let mut perm: SmallVec<[usize; 4]> = (0..self.dims[x.index()].len())
                    .filter(|k| !axes.contains(k))
                    .collect();
                perm.extend(axes.iter().copied());
                let space: Dims = perm.iter().map(|&k| self.dims[x.index()][k]).collect();
                let view = View::dense(&space[..space.len() - axes.len()]);
                self.fused(
                    id,
                    x,
                    Some(Path::Permute(perm)),
                    space,
                    axes.len(),
                    Some(*kind),
                    view,
                    b,
                )
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
                        self.fused(id, x, None, part.clone(), 0, None, view, b)?;
                    }
                    at += part[*axis];
                }
                Ok(())
            }
            op if self.is_literal(id) || self.is_expr(id) || op.is_view() => {
                let b = self.new_buffer(node.ty.dtype, &dims);
                if dims.iter().product::<usize>() > 0 {
                    self.fused(id, id, None, dims.clone(), 0, None, View::dense(&dims), b)?;
                }
                self.buffer[i] = Some(b);
                Ok(())
            }
            _ => self.structured(id),
        }
    }

    /// A step that copies a view into a dense buffer.
    fn copy(&mut self, id: NodeId, from: &Placed) -> Result<BufId> {
        let dims: Dims = from.view.shape.clone();
        let dtype = self.g.dtype(id);
        let b = self.new_buffer(dtype, &dims);
        if dims.iter().product::<usize>() == 0 {
            return Ok(b);
        }
        let mut body = Body::new();
        let r = self.load(&mut body, from.clone(), dtype, &[]);
        self.finish(
            id,
            body,
            r,
            dims.clone(),
            0,
            None,
            View::dense(&dims),
            b,
            "copy".into(),
        )?;
        Ok(b)
    }

    #[allow(clippy::too_many_arguments)]
    fn fused(
        &mut self,
        root: NodeId,
        value: NodeId,
        path: Option<Path>,
        space: Dims,
        reduced: usize,
        reduce: Option<ReduceKind>,
        out: View,
        b: BufId,
    ) -> Result<()> {
        let mut body = Body::new();
        body.paths.push(path.into_iter().collect());
        let r = self.emit(&mut body, value, 0, value == root)?;
        let name = self.g.node(root).op.name();
        self.finish(root, body, r, space, reduced, reduce, out, b, name)
    }

    /// Adds the instructions that compute `id` as seen through path number `path`. `own`: compute it even if it has a buffer.
    fn emit(&self, body: &mut Body, id: NodeId, path: usize, own: bool) -> Result<Reg> {
        if let Some(r) = body.memo.get(&(id, path)) {
            return Ok(*r);
        }
        let node = self.g.node(id);
        let dtype = node.ty.dtype;
        let through = body.paths[path].clone();
        let r = match &node.op {
            Op::Full(v) => {
                let p = body.param(dtype, Param::Literal(*v));
                body.instr(InstrKind::Param(p), dtype, &[])
            }
            Op::Arg(k) => {
                let p = body.param(dtype, Param::Arg(*k));
                body.instr(InstrKind::Param(p), dtype, &[])
            }
            Op::Iota { axis } => self.iota(body, id, *axis, dtype, &through)?,
            _ if !own && self.placement(id).is_some() => {
                let p = self
                    .placement(id)
                    .ok_or_else(|| Error::internal("placement vanished"))?;
                self.load(body, p, dtype, &through)
            }
            op if op.is_view() => {
                let x = node.inputs[0];
                match self.placed[id.index()].clone() {
                    Some(p) => self.load(body, p, dtype, &through),
                    None => {
                        let mut longer = vec![self.path_of(id)];
                        longer.extend(through);
                        body.paths.push(longer);
                        let k = body.paths.len() - 1;
                        self.emit(body, x, k, false)?
                    }
                }
            }
            Op::Scalar(s) => {
                body.nodes += 1;
                let a: SmallVec<[Reg; 3]> = node
                    .inputs
                    .iter()
                    .map(|x| self.emit(body, *x, path, false))
                    .collect::<Result<_>>()?;
                body.instr(InstrKind::Op(*s), dtype, &a)
            }
            Op::Cast | Op::Bitcast => {
                body.nodes += 1;
                let a = self.emit(body, node.inputs[0], path, false)?;
                body.instr(
                    if node.op == Op::Cast {
                        InstrKind::Cast
                    } else {
                        InstrKind::Bitcast
                    },
                    dtype,
                    &[a],
                )
            }
            op => return Err(Error::internal(format!("{} cannot be fused", op.name()))),
        };
        body.memo.insert((id, path), r);
        Ok(r)
    }

    fn load(&self, body: &mut Body, p: Placed, dtype: DType, through: &[Path]) -> Reg {
        let mut view = p.view;
        for step in through {
            if let Some(v) = step.apply(&view) {
                view = v;
            }
        }
        let fill = view
            .mask
            .is_some()
            .then(|| body.param(dtype, Param::Literal(p.fill.unwrap_or(Scalar::I(0).cast(dtype)))));
        let input = match body.sources.iter().position(|s| *s == p.base) {
            Some(k) => k,
            None => {
                body.sources.push(p.base);
                body.sources.len() - 1
            }
        } as u32;
        let load = Load {
            input,
            dtype,
            view,
            fill,
        };
        let k = match body.loads.iter().position(|l| *l == load) {
            Some(k) => k,
            None => {
                body.loads.push(load);
                body.loads.len() - 1
            }
        };
        body.instr(InstrKind::Load(k as u32), dtype, &[])
    }

    /// An index is an affine function of the point: the strides of a view over a virtual tensor say which.
    fn iota(&self, body: &mut Body, id: NodeId, axis: usize, dtype: DType, through: &[Path]) -> Result<Reg> {
        let dims = &self.dims[id.index()];
        let mut v = View {
            shape: dims.clone(),
            strides: smallvec![0; dims.len()],
            offset: 0,
            mask: None,
        };
        v.strides[axis] = 1;
        for p in through {
            v = p
                .apply(&v)
                .ok_or_else(|| Error::internal("an index was seen through a reshape"))?;
        }
        let mut sum = None;
        for (k, s) in v.strides.iter().enumerate().filter(|(_, s)| **s != 0) {
            let mut t = body.instr(InstrKind::Iota(k as u32), dtype, &[]);
            if *s != 1 {
                let p = body.param(dtype, Param::Literal(Scalar::I(*s as i64).cast(dtype)));
                let c = body.instr(InstrKind::Param(p), dtype, &[]);
                t = body.instr(InstrKind::Op(ScalarOp::Mul), dtype, &[t, c]);
            }
            sum = Some(match sum {
                None => t,
                Some(u) => body.instr(InstrKind::Op(ScalarOp::Add), dtype, &[u, t]),
            });
        }
        if v.offset != 0 || sum.is_none() {
            let p = body.param(dtype, Param::Literal(Scalar::I(v.offset as i64).cast(dtype)));
            let c = body.instr(InstrKind::Param(p), dtype, &[]);
            sum = Some(match sum {
                None => c,
                Some(u) => body.instr(InstrKind::Op(ScalarOp::Add), dtype, &[u, c]),
            });
        }
        sum.ok_or_else(|| Error::internal("an index without terms"))
    }

    #[allow(clippy::too_many_arguments)]
    fn finish(
        &mut self,
        root: NodeId,
        body: Body,
        value: Reg,
        space: Dims,
        reduced: usize,
        reduce: Option<ReduceKind>,
        out: View,
        b: BufId,
        name: String,
    ) -> Result<()> {
        let mut f = Fused {
            reduced,
            loads: body.loads,
            params: body.params,
            body: body.instrs,
            outs: vec![Out {
                value,
                dtype: self.g.dtype(root),
                reduce,
                view: out,
            }],
            space,
        };
        collapse_fused(&mut f);
        if f.space.len() > MAX_RANK {
            let what = format!(
                "an element-wise kernel over {} axes that do not merge ({name} at {})",
                f.space.len(),
                self.g.node(root).span
            );
            return Err(Error::unsupported(
                what,
                format!("Reshape so that at most {MAX_RANK} axes remain"),
            ));
        }
        let f = Arc::new(f);
        let inputs: Vec<Operand> = body
            .sources
            .iter()
            .map(|s| Operand {
                dtype: self.g.dtype(*s),
                view: View::dense(&self.dims[s.index()]),
            })
            .collect();
        let bytes = self.plan.buffers[b.0 as usize].bytes;
        let dtype = self.g.dtype(root);
        let outputs = [Operand {
            dtype,
            view: View::dense(&[bytes / dtype.size().max(1)]),
        }];
        let mut buffers: Vec<BufId> = body
            .sources
            .iter()
            .map(|s| self.buffer_of(*s))
            .collect::<Result<_>>()?;
        buffers.push(b);
        let call = LibraryCall {
            work: Work::Fused(&f),
            inputs: &inputs,
            outputs: &outputs,
            precision: self.options.precision,
            in_place: false,
        };
        let work = match self.target.library(&call) {
            Ok(k) => StepWork::Library(k),
            Err(_) => {
                let (kernel, launch) = kernel_lower::lower_fused(&f, self.target.caps())
                    .map_err(|e| e.at(&self.g.node(root).span))?;
                kernel_work(kernel, launch, Some(&f))
            }
        };
        let (flops, moved) = (f.flops(), f.bytes());
        let op = if body.nodes > 1 {
            format!("{name}+{}", body.nodes - 1)
        } else {
            name
        };
        self.plan.steps.push(Step {
            work,
            buffers,
            outputs: 1,
            op,
            span: self.g.node(root).span.clone(),
            range: String::new(),
            flops,
            bytes: moved,
            nodes: body.nodes.max(1),
            fused: Some(f),
        });
        Ok(())
    }

    fn structured(&mut self, id: NodeId) -> Result<()> {
        let i = id.index();
        let node = self.g.node(id).clone();
        let out_dims = self.dims[i].clone();
        let empty = out_dims.iter().product::<usize>() == 0;
        let contracted_empty = node.op == Op::Matmul && self.dims[node.inputs[0].index()].last() == Some(&0);
        if empty {
            self.buffer[i] = Some(self.new_buffer(node.ty.dtype, &out_dims));
            return Ok(());
        }
        if contracted_empty {
            // A sum of no products.
            let b = self.new_buffer(node.ty.dtype, &out_dims);
            self.buffer[i] = Some(b);
            let mut body = Body::new();
            let p = body.param(node.ty.dtype, Param::Literal(Scalar::I(0).cast(node.ty.dtype)));
            let r = body.instr(InstrKind::Param(p), node.ty.dtype, &[]);
            return self.finish(
                id,
                body,
                r,
                out_dims.clone(),
                0,
                None,
                View::dense(&out_dims),
                b,
                node.op.name(),
            );
        }
        let mut bufs: Vec<BufId> = vec![];
        let mut ops: Vec<Operand> = vec![];
        for x in &node.inputs {
            let p = self
                .placement(*x)
                .ok_or_else(|| Error::internal(format!("operand of {} has no buffer", node.op.name())))?;
            let dtype = self.g.dtype(*x);
            if p.view.mask.is_some() {
                bufs.push(self.copy(*x, &p)?);
                ops.push(Operand {
                    dtype,
                    view: View::dense(&p.view.shape),
                });
            } else {
                bufs.push(self.buffer_of(p.base)?);
                ops.push(Operand { dtype, view: p.view });
            }
        }
        let output = Operand {
            dtype: node.ty.dtype,
            view: View::dense(&out_dims),
        };
        let in_place = self.may_overwrite(id, &node.op, &node.inputs, &ops);
        let precision = self.options.precision;
        if let Op::Custom(c) = &node.op {
            return self.custom(id, c.clone(), bufs, ops, output);
        }
        let mut chosen = select(
            self.target,
            &node.op,
            &ops,
            std::slice::from_ref(&output),
            precision,
            in_place,
        );
        if let Err(d) = &chosen
            && !d.dense.is_empty()
        {
            for k in d.dense.clone() {
                if k < ops.len() && !ops[k].view.is_dense() {
                    let p = self
                        .placement(node.inputs[k])
                        .ok_or_else(|| Error::internal("operand without placement"))?;
                    bufs[k] = self.copy(node.inputs[k], &p)?;
                    ops[k].view = View::dense(&ops[k].view.shape.clone());
                }
            }
            chosen = select(
                self.target,
                &node.op,
                &ops,
                std::slice::from_ref(&output),
                precision,
                in_place,
            );
        }
        let chosen = chosen.map_err(|d| {
            let types: Vec<String> = ops
                .iter()
                .map(|o| format!("{}{:?}", o.dtype, o.view.shape.as_slice()))
                .collect();
            let what = format!(
                "{} on {} (at {}): {}",
                node.op.name(),
                types.join(" × "),
                node.span,
                d.reason
            );
            Error::unsupported(what, "Run it on the cpu backend, or write it as other ops")
        })?;
        let b = if in_place {
            self.in_place += 1;
            bufs[0]
        } else {
            self.new_buffer(node.ty.dtype, &out_dims)
        };
        self.buffer[i] = Some(b);
        let (flops, bytes) = crate::cost::of(&node.op, &ops, &output);
        let range = match &node.op {
            Op::Gather { axis }
            | Op::GatherElements { axis }
            | Op::ScatterElements { axis, .. }
            | Op::ScatterRows { axis, .. } => {
                let n = ops[0].view.shape[*axis];
                format!("-{n}..{n}")
            }
            Op::UpdateSlice { axis } => {
                format!("0..={}", ops[0].view.shape[*axis] - ops[1].view.shape[*axis])
            }
            _ => String::new(),
        };
        let step = |work, buffers, outputs| Step {
            work,
            buffers,
            outputs,
            op: node.op.name(),
            span: node.span.clone(),
            range: range.clone(),
            flops,
            bytes,
            nodes: 1,
            fused: None,
        };
        match chosen {
            Chosen::Library(k) => {
                self.plan.workspace = self.plan.workspace.max(k.workspace());
                bufs.push(b);
                self.plan.steps.push(step(StepWork::Library(k), bufs, 1));
            }
            Chosen::Kernels(low) => {
                bufs.push(b);
                for t in &low.temps {
                    let bytes = *t;
                    self.plan.buffers.push(BufferSpec {
                        bytes,
                        storage: Storage::Slot(u32::MAX),
                    });
                    bufs.push(BufId(self.plan.buffers.len() as u32 - 1));
                }
                let n = low.steps.len().max(1) as u64;
                for (kernel, launch, binds) in low.steps {
                    let written = kernel.buffers.iter().zip(&binds).filter(|(d, _)| d.write).count();
                    let mut order: Vec<usize> = (0..binds.len()).collect();
                    // Read operands first, written ones last, as `Step` wants them for liveness; the kernel's own order is kept
                    // because templates declare written buffers last.
                    order.sort_by_key(|&k| kernel.buffers[k].write);
                    if order.iter().enumerate().any(|(a, b)| a != *b) {
                        return Err(Error::internal(format!(
                            "kernel {} declares a written buffer before a read one",
                            kernel.name
                        )));
                    }
                    let mut s = step(
                        kernel_work(kernel, launch, None),
                        binds.iter().map(|k| bufs[*k]).collect(),
                        written,
                    );
                    s.flops /= n;
                    s.bytes /= n;
                    self.plan.steps.push(s);
                }
            }
        }
        Ok(())
    }

    fn custom(
        &mut self,
        id: NodeId,
        c: crate::custom::Custom,
        bufs: Vec<BufId>,
        ops: Vec<Operand>,
        output: Operand,
    ) -> Result<()> {
        let node = self.g.node(id).clone();
        let mut bufs = bufs;
        let mut ops = ops;
        for k in 0..ops.len() {
            if !ops[k].view.is_dense() {
                let p = self
                    .placement(node.inputs[k])
                    .ok_or_else(|| Error::internal("operand without placement"))?;
                bufs[k] = self.copy(node.inputs[k], &p)?;
                ops[k].view = View::dense(&ops[k].view.shape.clone());
            }
        }
        let b = self.new_buffer(node.ty.dtype, &self.dims[id.index()].clone());
        self.buffer[id.index()] = Some(b);
        bufs.push(b);
        let views: Vec<View> = ops.iter().map(|o| o.view.clone()).collect();
        let (flops, bytes) = crate::cost::of(&node.op, &ops, &output);
        let work = match c.op().kernel(&views, &output.view, self.target.caps())? {
            Some((kernel, launch)) => kernel_work(kernel, launch, None),
            None => {
                self.plan
                    .warnings
                    .push(format!("{} runs on the host: it has no kernel", c.op().name()));
                StepWork::Host(Box::new(HostWork {
                    op: c,
                    inputs: ops,
                    output,
                }))
            }
        };
        self.plan.steps.push(Step {
            work,
            buffers: bufs,
            outputs: 1,
            op: node.op.name(),
            span: node.span,
            range: String::new(),
            flops,
            bytes,
            nodes: 1,
            fused: None,
        });
        Ok(())
    }

    /// Whether an update may write into its base: the base is scratch of this plan or donated, whole, and nobody reads it later.
    fn may_overwrite(&mut self, id: NodeId, op: &Op, inputs: &[NodeId], ops: &[Operand]) -> bool {
        if !matches!(op, Op::UpdateSlice { .. }) || !ops[0].view.is_dense() {
            return false;
        }
        let Some(p) = self.placement(inputs[0]) else {
            return false;
        };
        let free = match &self.g.node(p.base).op {
            Op::Input(k) => self.options.donated.get(*k as usize).copied().unwrap_or(false),
            Op::Const(_) => false,
            _ => true,
        };
        let reads_twice = inputs[1..]
            .iter()
            .any(|x| self.placement(*x).is_some_and(|q| q.base == p.base));
        free && !reads_twice && self.last_read[p.base.index()] <= id.0
    }

    /// Gives scratch buffers slots; buffers whose lifetimes do not meet share one.
    fn assign_slots(&mut self) {
        let n = self.plan.buffers.len();
        let mut last = vec![0usize; n];
        for (t, s) in self.plan.steps.iter().enumerate() {
            for b in &s.buffers {
                last[b.0 as usize] = t;
            }
        }
        let mut free: Vec<u32> = vec![];
        let mut placed = vec![false; n];
        for t in 0..self.plan.steps.len() {
            let bufs = self.plan.steps[t].buffers.clone();
            for b in &bufs {
                let k = b.0 as usize;
                let spec = &self.plan.buffers[k];
                if placed[k] || !matches!(spec.storage, Storage::Slot(_)) {
                    continue;
                }
                placed[k] = true;
                let want = spec.bytes;
                // The smallest free slot that holds it, else the largest one grown, else a new one.
                let slots = &mut self.plan.slots;
                let fit = free
                    .iter()
                    .enumerate()
                    .min_by_key(|(_, s)| {
                        let have = slots[**s as usize];
                        if have >= want {
                            (0, have)
                        } else {
                            (1, usize::MAX - have)
                        }
                    })
                    .map(|(at, _)| at);
                let slot = match fit {
                    Some(at) => free.swap_remove(at),
                    None => {
                        slots.push(0);
                        slots.len() as u32 - 1
                    }
                };
                slots[slot as usize] = slots[slot as usize].max(want);
                self.plan.buffers[k].storage = Storage::Slot(slot);
            }
            let mut done: Vec<BufId> = bufs;
            done.sort();
            done.dedup();
            for b in done {
                if let Storage::Slot(s) = self.plan.buffers[b.0 as usize].storage
                    && last[b.0 as usize] == t
                {
                    free.push(s);
                }
            }
        }
        // Buffers that no step touches (empty tensors).
        for spec in &mut self.plan.buffers {
            if spec.storage == Storage::Slot(u32::MAX) {
                self.plan.slots.push(spec.bytes);
                spec.storage = Storage::Slot(self.plan.slots.len() as u32 - 1);
            }
        }
    }
}

impl Body {
    fn new() -> Body {
        Body {
            loads: vec![],
            sources: vec![],
            params: vec![],
            instrs: vec![],
            memo: HashMap::new(),
            paths: vec![],
            nodes: 0,
        }
    }

    fn param(&mut self, dtype: DType, p: Param) -> u32 {
        // Equal arguments share a parameter. Literals do not: which of them are equal must not change the program.
        if let (Param::Arg(_), Some(k)) = (p, self.params.iter().position(|q| *q == (dtype, p))) {
            return k as u32;
        }
        self.params.push((dtype, p));
        self.params.len() as u32 - 1
    }

    fn instr(&mut self, kind: InstrKind, dtype: DType, args: &[Reg]) -> Reg {
        self.instrs.push(Instr {
            kind,
            dtype,
            args: args.into(),
        });
        self.instrs.len() as Reg - 1
    }
}

fn kernel_work(kernel: Kernel, launch: Launch, fused: Option<&Fused>) -> StepWork {
    let arg = |k: usize| match fused
        .and_then(|f| kernel_lower::fused_param(&kernel, k).and_then(|p| f.params.get(p)))
    {
        Some((_, Param::Arg(a))) => Some(*a),
        _ => None,
    };
    let params = launch
        .params
        .iter()
        .enumerate()
        .map(|(k, v)| (*v, arg(k)))
        .collect();
    StepWork::Kernel {
        kernel: Arc::new(kernel),
        groups: launch.groups,
        params,
    }
}

/// Merges axes that every view of the kernel walks alike.
fn collapse_fused(f: &mut Fused) {
    let outer = f.space.len() - f.reduced;
    let axis_view = |k: usize, f: &Fused| {
        let mut v = View {
            shape: f.space.clone(),
            strides: smallvec![0; f.space.len()],
            offset: 0,
            mask: None,
        };
        v.strides[k] = 1;
        v
    };
    let used: Vec<u32> = f
        .body
        .iter()
        .filter_map(|i| {
            if let InstrKind::Iota(k) = i.kind {
                Some(k)
            } else {
                None
            }
        })
        .collect();
    let mut pseudo: Vec<View> = used.iter().map(|k| axis_view(*k as usize, f)).collect();
    let mut outs: Vec<View> = f
        .outs
        .iter()
        .map(|o| {
            let mut v = View {
                shape: f.space.clone(),
                strides: o.view.strides.clone(),
                offset: o.view.offset,
                mask: None,
            };
            v.strides.resize(f.space.len(), 0);
            v
        })
        .collect();
    let mut views: Vec<&mut View> = f
        .loads
        .iter_mut()
        .map(|l| &mut l.view)
        .chain(&mut outs)
        .chain(&mut pseudo)
        .collect();
    let border = collapse(&mut views, outer);
    let space = outs[0].shape.clone();
    f.reduced = space.len() - border;
    for (o, v) in f.outs.iter_mut().zip(outs) {
        o.view = View {
            shape: v.shape[..border].into(),
            strides: v.strides[..border].into(),
            offset: v.offset,
            mask: None,
        };
    }
    // A reduction over axes of size 1 only still has to be one.
    if f.reduced == 0 && f.outs.iter().any(|o| o.reduce.is_some()) {
        f.loads.iter_mut().for_each(|l| {
            l.view.shape.push(1);
            l.view.strides.push(0);
            if let Some(m) = &mut l.view.mask {
                m.push((0, 1));
            }
        });
        f.space = space;
        f.space.push(1);
        f.reduced = 1;
    } else {
        f.space = space;
    }
    let map: HashMap<u32, Option<u32>> = used
        .iter()
        .zip(&pseudo)
        .map(|(k, v)| (*k, v.strides.iter().position(|s| *s == 1).map(|p| p as u32)))
        .collect();
    let mut zeros = vec![];
    for i in &mut f.body {
        if let InstrKind::Iota(k) = i.kind {
            i.kind = match map.get(&k).copied().flatten() {
                Some(n) => InstrKind::Iota(n),
                None => {
                    // The axis has size 1: the index is 0.
                    zeros.push((i.dtype, Param::Literal(Scalar::I(0).cast(i.dtype))));
                    InstrKind::Param((f.params.len() + zeros.len() - 1) as u32)
                }
            };
        }
    }
    f.params.extend(zeros);
}
