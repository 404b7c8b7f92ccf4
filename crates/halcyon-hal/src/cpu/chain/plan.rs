//! Compiles a fused chain for the executor.

use super::BLOCK;
use super::lane::Lane;
use crate::library_call::CallForm;
use crate::{Declined, reach};
use halcyon_ir::fused::{self, Fused, InstrKind, MAX_RANK, Param};
use halcyon_ir::layout::{View, collapse};
use halcyon_ir::ops::ReduceKind;
use halcyon_ir::ops::element_wise::Rule;
use halcyon_ir::{DType, ScalarOp};
use std::sync::Mutex;

/// An upper bound on the number of axes of a plan: the axes of the space, and axes of size 1 for the rows and
/// columns of blocks if the space has none for them.
pub(super) const MAX_AXES: usize = MAX_RANK + 2;
/// Outputs of at least this size are written with stores that bypass the caches, so that their cache lines
/// are not read first. Their blocks must be contiguous, or have rows of whole cache lines.
const STREAM_BYTES: usize = 24 << 20;
/// A reduction with fewer independent tasks than this is also divided along its reduced axes.
const FEW_TASKS: usize = 32;
/// Elements per range of a divided reduction. A task of at most four ranges is not divided.
const CHUNK: usize = 16 << 10;
/// Maximum number of ranges per task.
const MAX_CHUNKS: usize = 64;
/// Maximum number of column blocks that one task processes together, so that memory is read in long runs, if
/// a reduction keeps the column axis.
const GROUP: usize = 16;

/// An axis of the space. The last two form the block: rows and columns.
#[derive(Clone, Copy, Debug)]
pub(super) struct Axis {
    pub dim: usize,
    /// Elements per block.
    pub step: usize,
    /// Number of blocks along the axis.
    pub count: usize,
    pub reduced: bool,
}

/// A position in memory as a function of the position in the space.
#[derive(Clone, Debug)]
pub(super) struct Affine {
    pub base: isize,
    /// Distance in elements between neighbours along each axis.
    pub stride: [isize; MAX_AXES],
    /// Distance in elements between neighbouring blocks along each axis.
    pub hop: [isize; MAX_AXES],
}

#[derive(Clone, Debug)]
pub(super) struct Load {
    pub input: usize,
    pub dtype: DType,
    pub at: Affine,
    pub mask: Option<Mask>,
    /// Whether instructions read blocks (those inside the mask) directly from the operand's memory.
    pub direct: bool,
    /// Whether all elements of a block have one value. It is loaded again only if its position changes.
    pub uniform: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Mask {
    pub inside: [(usize, usize); MAX_AXES],
    /// The parameter with the value outside the mask.
    pub fill: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) struct Iota {
    pub dtype: DType,
    pub at: Affine,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Load(usize),
    Iota(usize),
    /// An op and the dtype of its operands.
    Op(ScalarOp, DType),
    Cast(DType, DType),
    Bitcast(DType, DType),
}

/// One instruction over a block. Registers are numbered like the instructions of the fused chain.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub kind: Kind,
    pub dst: usize,
    pub args: [usize; 3],
}

#[derive(Clone, Debug)]
pub(super) struct Out {
    pub value: usize,
    /// Dtype of the value, before the conversion to `dtype`.
    pub from: DType,
    pub dtype: DType,
    pub at: Affine,
    pub reduce: Option<ReduceKind>,
    /// Whether the instruction that computes the value writes it to the output's memory itself.
    pub direct: bool,
    /// Whether whole blocks are stored with stores that bypass the caches.
    pub stream: bool,
    /// Whether the rows of a block are stored with stores that bypass the caches.
    pub line_rows: bool,
}

/// A compiled chain.
#[derive(Debug)]
pub(super) struct Plan {
    pub axes: Vec<Axis>,
    /// Axes that tasks (or blocks, if nothing is reduced) iterate over, in order.
    pub outer: Vec<usize>,
    /// Axes that a task reduces over.
    pub inner: Vec<usize>,
    /// Number of tasks.
    pub tasks: usize,
    /// Blocks per task.
    pub task_blocks: usize,
    /// Blocks per range of a divided reduction.
    pub chunk: usize,
    /// Ranges per task.
    pub chunks: usize,
    pub loads: Vec<Load>,
    pub iotas: Vec<Iota>,
    pub params: Vec<(DType, Param)>,
    /// Registers that hold a parameter, as (register, parameter).
    pub pinned: Vec<(usize, usize)>,
    pub steps: Vec<Step>,
    pub outs: Vec<Out>,
    /// Block slot of each register.
    pub slots: Vec<Option<usize>>,
    pub slot_count: usize,
    pub inputs: usize,
    /// Whether nothing is computed, so that values move as raw bits.
    pub raw: bool,
    /// Whether floats are computed, so that denormal results may be flushed.
    pub floats: bool,
    /// Accumulators per block and output.
    pub width: usize,
    /// Column blocks per task.
    pub group: usize,
    /// Whether some axis is empty.
    pub empty: bool,
    /// Partial results of a reduction that is divided into ranges; kept between runs.
    pub partials: Mutex<Vec<u64>>,
}

fn declined<T>(why: impl Into<String>) -> Result<T, Declined> {
    Err(Declined::because(why))
}

impl Plan {
    pub(super) fn new(f: &Fused, call: &CallForm<'_>) -> Result<Plan, Declined> {
        check(f, call)?;
        let raw = is_copy(f);
        let (mut steps, pinned, values) = instructions(f, raw)?;
        fuse_multiply_add(&mut steps, f);
        drop_dead(&mut steps, f);

        // Collect the views of everything that has a position: loads, iotas, outputs.
        let rank = f.space.len();
        let mut views: Vec<View> = f.loads.iter().map(|l| l.view.clone()).collect();
        let mut iotas = vec![];
        for s in &steps {
            if let Kind::Iota(axis) = s.kind {
                let mut v = View::dense(&f.space);
                v.strides.iter_mut().enumerate().for_each(|(k, s)| *s = (k == axis) as isize);
                iotas.push((s.dst, v));
            }
        }
        views.extend(iotas.iter().map(|i| i.1.clone()));
        let first_out = views.len();
        for o in &f.outs {
            let mut v = o.view.clone();
            v.shape = f.space.clone();
            v.strides.resize(rank, 0);
            views.push(v);
        }
        let mut refs: Vec<&mut View> = views.iter_mut().collect();
        let border = if rank == 0 { 0 } else { collapse(&mut refs, rank - f.reduced) };
        let dims = views[first_out].shape.clone();
        if dims.len() > MAX_RANK {
            return declined(format!(
                "{} axes remain after merging, but at most {MAX_RANK} are supported",
                dims.len()
            ));
        }

        let shape = block_shape(f, &views, first_out, border);
        // The block's axes come last.
        let mut order: Vec<usize> =
            (0..dims.len()).filter(|k| Some(*k) != shape.row && Some(*k) != shape.col).collect();
        let mut axes: Vec<Axis> = order
            .iter()
            .map(|&k| Axis { dim: dims[k], step: 1, count: dims[k], reduced: k >= border })
            .collect();
        for (k, step) in [(shape.row, shape.rows), (shape.col, shape.cols)] {
            order.push(k.unwrap_or(usize::MAX));
            let dim = k.map_or(1, |k| dims[k]);
            axes.push(Axis { dim, step, count: dim.div_ceil(step), reduced: k.is_some_and(|k| k >= border) });
        }
        let affine = |v: &View| {
            let mut a = Affine { base: v.offset, stride: [0; MAX_AXES], hop: [0; MAX_AXES] };
            for (i, &k) in order.iter().enumerate().filter(|(_, k)| **k != usize::MAX) {
                a.stride[i] = v.strides[k];
                a.hop[i] = v.strides[k].wrapping_mul(axes[i].step as isize);
            }
            a
        };
        let (row, col) = (axes.len() - 2, axes.len() - 1);
        let whole = axes[col].step == axes[col].dim;
        let contiguous = |a: &Affine| {
            a.stride[col] == 1 && (axes[row].step == 1 || (whole && a.stride[row] == axes[col].dim as isize))
        };
        // Whether another output is a copy of an input that is overwritten in place. The input's elements
        // must then be copied before their memory is overwritten.
        let is_kept = |load: usize, input: usize| {
            let loads = |o: &fused::Out| f.body[o.value as usize].kind == InstrKind::Load(load as u32);
            input < call.in_place && f.outs.iter().enumerate().any(|(k, o)| k != input && loads(o))
        };
        let loads: Vec<Load> = f
            .loads
            .iter()
            .zip(&views)
            .enumerate()
            .map(|(k, (l, v))| {
                let at = affine(v);
                let mask = v.mask.as_ref().map(|m| {
                    let mut inside = [(0, 1); MAX_AXES];
                    for (i, &k) in order.iter().enumerate().filter(|(_, k)| **k != usize::MAX) {
                        inside[i] = m[k];
                    }
                    Mask { inside, fill: l.fill.map(|p| p as usize) }
                });
                Load {
                    input: l.input as usize,
                    dtype: l.dtype,
                    direct: contiguous(&at)
                        && (raw || l.dtype.compute() == l.dtype)
                        && !is_kept(k, l.input as usize),
                    uniform: mask.is_none() && at.stride[row] == 0 && at.stride[col] == 0,
                    at,
                    mask,
                }
            })
            .collect();
        let n_loads = f.loads.len();
        let mut iota_list = vec![];
        for (i, (dst, _)) in iotas.iter().enumerate() {
            iota_list.push(Iota { dtype: f.body[*dst].dtype, at: affine(&views[n_loads + i]) });
            for s in &mut steps {
                if s.dst == *dst {
                    s.kind = Kind::Iota(i);
                }
            }
        }
        let mut direct_taken = vec![false; values];
        let outs: Vec<Out> = f
            .outs
            .iter()
            .zip(&views[first_out..])
            .map(|(o, v)| {
                let (value, at) = (o.value as usize, affine(v));
                let from = f.body[value].dtype;
                let dense = o.reduce.is_none() && contiguous(&at);
                let large = o.dtype.bytes(o.view.numel()) >= STREAM_BYTES
                    && cfg!(target_arch = "x86_64")
                    && call.in_place == 0;
                let stream = large && dense;
                // Whether `n` elements are whole cache lines.
                let lines = |n: isize| (n * o.dtype.size() as isize) % 64 == 0;
                let line_rows = large
                    && o.reduce.is_none()
                    && at.stride[col] == 1
                    && lines(axes[col].step as isize)
                    && lines(at.base)
                    && (0..col).all(|k| lines(at.stride[k]));
                let computed =
                    matches!(f.body[value].kind, InstrKind::Op(_) | InstrKind::Cast | InstrKind::Bitcast);
                let same = from == o.dtype && from.compute() == from;
                let direct =
                    dense && !stream && computed && same && call.in_place == 0 && !direct_taken[value];
                direct_taken[value] |= direct;
                Out { value, from, dtype: o.dtype, at, reduce: o.reduce, direct, stream, line_rows }
            })
            .collect();

        let split =
            |reduced: bool| (0..axes.len()).filter(|&k| axes[k].reduced == reduced).collect::<Vec<_>>();
        let (mut outer, inner) = (split(false), split(true));
        if shape.square {
            // Let the row axis vary fastest, which is the memory order of the transposed operand.
            let n = outer.len();
            outer.swap(n - 2, n - 1);
        }
        let group = if f.reduced > 0 && !axes[col].reduced { axes[col].count.clamp(1, GROUP) } else { 1 };
        let blocks = |k: usize| {
            if k == col { axes[k].count.div_ceil(group) } else { axes[k].count }
        };
        let tasks = outer.iter().map(|&k| blocks(k)).product::<usize>();
        let task_blocks = inner.iter().map(|&k| axes[k].count).product::<usize>();
        let per_block = axes[row].step * axes[col].step * group;
        let (mut chunk, mut chunks) = (task_blocks.max(1), 1);
        if f.reduced > 0 && tasks < FEW_TASKS && task_blocks.saturating_mul(per_block) > 4 * CHUNK {
            chunk = CHUNK.div_ceil(per_block).max(task_blocks.div_ceil(MAX_CHUNKS));
            chunks = task_blocks.div_ceil(chunk);
        }
        let keep = |k: usize| if axes[k].reduced { 1 } else { axes[k].step };
        let (slots, slot_count) = registers(&steps, &pinned, &loads, &outs, values);
        Ok(Plan {
            width: keep(row) * keep(col),
            group,
            empty: axes.iter().any(|a| a.dim == 0),
            outer,
            inner,
            tasks,
            task_blocks,
            chunk,
            chunks,
            loads,
            iotas: iota_list,
            params: f.params.clone(),
            pinned,
            floats: !raw && f.body.iter().any(|i| matches!(i.dtype.compute(), DType::F32 | DType::F64)),
            steps,
            outs,
            slots,
            slot_count,
            inputs: call.inputs.len(),
            raw,
            axes,
            partials: Mutex::default(),
        })
    }

    /// Number of words for the partial results of all ranges.
    pub(super) fn partial_words(&self) -> usize {
        self.tasks * self.chunks * self.outs.len() * self.width * self.group
    }

    /// The machine type of a register of dtype `d`.
    pub(super) fn lane(&self, d: DType) -> Lane {
        if self.raw { Lane::raw(d) } else { Lane::of(d) }
    }
}

/// Declines chains that lowering never builds, so that the executor can rely on the properties checked here.
fn check(f: &Fused, call: &CallForm<'_>) -> Result<(), Declined> {
    let outer = f.space.len().checked_sub(f.reduced);
    let Some(outer) = outer.map(|n| &f.space[..n]) else {
        return declined("the chain reduces more axes than its space has");
    };
    let types = f.body.iter().map(|i| i.dtype).chain(f.params.iter().map(|p| p.0));
    if let Some(d) = types.chain(f.outs.iter().map(|o| o.dtype)).find(|d| !d.is_native()) {
        return declined(format!("{d} is a small type, which the passes replace"));
    }
    if !reach::is_countable(&f.space) {
        return declined("the space has too many points");
    }
    for l in &f.loads {
        let Some(o) = call.inputs.get(l.input as usize) else {
            return declined("a load reads an input that does not exist");
        };
        if !reach::load_fits(f, l, o) {
            return declined("a load's view does not fit its operand");
        }
        if l.view.mask.is_some() && l.fill.is_none_or(|p| p as usize >= f.params.len()) {
            return declined("a masked load has no fill value");
        }
        let place = l.input as usize;
        if place < call.in_place
            && f.outs.get(place).is_none_or(|o| o.view != l.view || o.dtype.size() != l.dtype.size())
        {
            return declined(format!("in place, output {place} must be written where input {place} is read"));
        }
    }
    if f.outs.len() != call.outputs.len() || f.outs.is_empty() {
        return declined("one output buffer per result is needed");
    }
    for (o, w) in f.outs.iter().zip(call.outputs) {
        if o.view.shape[..] != *outer
            || o.view.mask.is_some()
            || o.dtype != w.dtype
            || !reach::is_within(&o.view, reach::elements(w)?)
        {
            return declined("a result's view does not fit its operand");
        }
        // Threads write concurrently, so no two of them may write the same element.
        if !reach::is_injective(&o.view) {
            return declined("the view of a result has two elements at one place in memory");
        }
        if o.reduce.is_some() != (f.reduced > 0) || o.value as usize >= f.body.len() {
            return declined("a result has no value, or its reduction does not fit the reduced axes");
        }
        if o.reduce.is_none() && f.body[o.value as usize].dtype != o.dtype {
            return declined("a result and its value have different types; cast the value first");
        }
    }
    Ok(())
}

/// Whether the chain only moves values, without conversion.
fn is_copy(f: &Fused) -> bool {
    f.body.iter().all(|i| matches!(i.kind, InstrKind::Load(_) | InstrKind::Param(_)))
        && f.outs.iter().all(|o| o.reduce.is_none())
}

/// The instructions for the chain, the registers of its parameters, and the number of registers.
fn instructions(f: &Fused, raw: bool) -> Result<(Vec<Step>, Vec<(usize, usize)>, usize), Declined> {
    let (mut steps, mut pinned) = (vec![], vec![]);
    for (dst, i) in f.body.iter().enumerate() {
        let mut args = [0; 3];
        for (k, a) in i.args.iter().take(3).enumerate() {
            if *a as usize >= dst {
                return declined("an instruction uses a later one");
            }
            args[k] = *a as usize;
        }
        let arity = |n: usize| {
            if i.args.len() == n { Ok(()) } else { declined("the operand count is wrong") }
        };
        let of = |k: usize| f.body[args[k]].dtype;
        let kind = match i.kind {
            InstrKind::Param(p) => {
                if f.params.get(p as usize).is_none_or(|p| p.0 != i.dtype) {
                    return declined("a parameter does not exist or has another type");
                }
                pinned.push((dst, p as usize));
                continue;
            }
            InstrKind::Load(l) => {
                if f.loads.get(l as usize).is_none_or(|l| l.dtype != i.dtype) {
                    return declined("a load does not exist or has another type");
                }
                Kind::Load(l as usize)
            }
            InstrKind::Iota(a) => {
                if a as usize >= f.space.len() {
                    return declined("an index refers to an axis that does not exist");
                }
                Kind::Iota(a as usize)
            }
            InstrKind::Op(op) => {
                arity(op.arity())?;
                let selects = op.row().rule == Rule::Select;
                let d = if selects { of(1) } else { of(0) };
                let same = (0..op.arity()).all(|k| of(k) == if selects && k == 0 { DType::Bool } else { d });
                if !op.takes(d) || !same || op.result(d) != i.dtype {
                    return declined(format!("{} of {d} does not give {}", op.name(), i.dtype));
                }
                // An operand that the op does not have is set to the first one.
                for k in op.arity()..3 {
                    args[k] = args[0];
                }
                Kind::Op(op, d)
            }
            InstrKind::Cast => {
                arity(1)?;
                Kind::Cast(of(0), i.dtype)
            }
            InstrKind::Bitcast => {
                arity(1)?;
                if of(0).bits() != i.dtype.bits() {
                    return declined("a bitcast has types of different sizes");
                }
                Kind::Bitcast(of(0), i.dtype)
            }
        };
        steps.push(Step { kind, dst, args });
    }
    debug_assert!(!raw || steps.iter().all(|s| matches!(s.kind, Kind::Load(_))));
    Ok((steps, pinned, f.body.len()))
}

impl Step {
    /// The registers that the instruction reads.
    pub(super) fn reads(&self) -> &[usize] {
        match self.kind {
            Kind::Load(_) | Kind::Iota(_) => &[],
            Kind::Op(op, _) => &self.args[..op.arity()],
            Kind::Cast(..) | Kind::Bitcast(..) => &self.args[..1],
        }
    }
}

/// Merges `a * b + c` of floats into one instruction if the product has no other use.
fn fuse_multiply_add(steps: &mut [Step], f: &Fused) {
    let mut uses = vec![0; f.body.len()];
    for s in steps.iter() {
        s.reads().iter().for_each(|r| uses[*r] += 1);
    }
    f.outs.iter().for_each(|o| uses[o.value as usize] += 1);
    for i in 0..steps.len() {
        let Kind::Op(ScalarOp::Add, d) = steps[i].kind else {
            continue;
        };
        if !d.is_float() {
            continue;
        }
        let [x, y, _] = steps[i].args;
        let product = |r: usize| {
            let p = steps[..i].iter().find(|p| p.dst == r && uses[r] == 1)?;
            matches!(p.kind, Kind::Op(ScalarOp::Mul, _)).then_some(p.args)
        };
        if let Some((m, c)) = product(x).map(|m| (m, y)).or_else(|| product(y).map(|m| (m, x))) {
            steps[i].kind = Kind::Op(ScalarOp::Fma, d);
            steps[i].args = [m[0], m[1], c];
        }
    }
}

/// Removes instructions that no output depends on.
fn drop_dead(steps: &mut Vec<Step>, f: &Fused) {
    let mut live = vec![false; f.body.len()];
    f.outs.iter().for_each(|o| live[o.value as usize] = true);
    for s in steps.iter().rev() {
        if live[s.dst] {
            s.reads().iter().for_each(|r| live[*r] = true);
        }
    }
    steps.retain(|s| live[s.dst]);
}

/// The two axes that form blocks, and their sizes.
struct BlockShape {
    row: Option<usize>,
    col: Option<usize>,
    rows: usize,
    cols: usize,
    /// Whether blocks are squares of a transposed operand and neither axis is reduced.
    square: bool,
}

fn block_shape(f: &Fused, views: &[View], first_out: usize, border: usize) -> BlockShape {
    let dims = &views[first_out].shape;
    if dims.is_empty() {
        return BlockShape { row: None, col: None, rows: 1, cols: 1, square: false };
    }
    // The views of memory, each with a mark: `false` for a load, `true` for an output. Outputs have only the
    // axes before `border`.
    let memory = || {
        views[..f.loads.len()].iter().map(|v| (v, false)).chain(views[first_out..].iter().map(|v| (v, true)))
    };
    let score = |k: usize| -> i32 {
        memory()
            .map(|(v, out)| match v.strides[k] {
                _ if out && k >= border => 1,
                1 => 2,
                0 | -1 => 1,
                _ => 0,
            })
            .sum()
    };
    let col = (0..dims.len()).max_by_key(|&k| (score(k), k)).unwrap_or(dims.len() - 1);
    let n = dims[col].max(1);
    // If an operand is contiguous along another axis than the columns, blocks are squares, so that every
    // loaded cache line is used completely.
    let crosses = |v: &View, j: usize| v.strides[col].abs() > 1 && v.strides[j].abs() == 1;
    let across = |j: usize| {
        memory().filter(|(v, out)| !(*out && (j >= border || col >= border)) && crosses(v, j)).count()
    };
    let others = || (0..dims.len()).filter(|&j| j != col && dims[j] > 1);
    if n >= 8
        && let Some(j) = others().filter(|&j| across(j) > 0 && dims[j] >= 8).max_by_key(|&j| across(j))
    {
        let square = j < border && col < border;
        return BlockShape { row: Some(j), col: Some(col), rows: 16.min(dims[j]), cols: 16.min(n), square };
    }
    if n <= BLOCK / 2 {
        let follows =
            |j: usize| memory().filter(|(v, _)| v.strides[j] == v.strides[col] * n as isize).count();
        if let Some(j) = others().max_by_key(|&j| (follows(j), j)) {
            return BlockShape {
                row: Some(j),
                col: Some(col),
                rows: (BLOCK / n).min(dims[j]),
                cols: n,
                square: false,
            };
        }
    }
    // Divide the columns into blocks of nearly equal size that consist of whole vectors.
    let cols = if n <= BLOCK { n } else { n.div_ceil(n.div_ceil(BLOCK)).next_multiple_of(16) };
    BlockShape { row: None, col: Some(col), rows: 1, cols, square: false }
}

/// Assigns a block slot to each register. A slot is free again after the last use of its register; the
/// destination of an instruction never shares a slot with an operand. Parameters and values kept between
/// blocks have slots of their own.
fn registers(
    steps: &[Step],
    pinned: &[(usize, usize)],
    loads: &[Load],
    outs: &[Out],
    values: usize,
) -> (Vec<Option<usize>>, usize) {
    let mut last = vec![0; values];
    for (i, s) in steps.iter().enumerate() {
        s.reads().iter().for_each(|r| last[*r] = i);
    }
    outs.iter().for_each(|o| last[o.value] = usize::MAX);
    let kept = |s: &Step| matches!(s.kind, Kind::Load(l) if loads[l].uniform);
    let mut slots = vec![None; values];
    let mut count = 0;
    let mut fresh = || {
        count += 1;
        count - 1
    };
    for (r, _) in pinned {
        slots[*r] = Some(fresh());
    }
    for s in steps.iter().filter(|s| kept(s)) {
        slots[s.dst] = Some(fresh());
    }
    let mut free: Vec<usize> = vec![];
    for (i, s) in steps.iter().enumerate() {
        if slots[s.dst].is_none() {
            slots[s.dst] = Some(free.pop().unwrap_or_else(&mut fresh));
        }
        let mut done: Vec<usize> = s.reads().iter().copied().filter(|r| last[*r] == i).collect();
        done.dedup();
        done.sort();
        done.dedup();
        for r in done {
            let lasting = pinned.iter().any(|p| p.0 == r) || steps.iter().any(|t| t.dst == r && kept(t));
            if !lasting {
                free.extend(slots[r]);
            }
        }
    }
    (slots, count)
}
