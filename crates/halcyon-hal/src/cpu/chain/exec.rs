//! Runs the [`Plan`] of a fused kernel, block by block.

use super::BLOCK;
use super::convert::{self, Rect};
use super::ops;
use super::plan::{Affine, Kind, Load, MAX_AXES, Out, Plan};
use super::reduce;
use crate::cpu::library::Run;
use crate::cpu::sys::Isa;
use crate::cpu::team::SharedMut;
use halcyon_ir::Scalar;
use halcyon_ir::fused::Param;
use smallvec::SmallVec;
use std::cell::Cell;

/// Minimum number of elements in a part of the work. A smaller part would cost more than it saves.
const GRAIN: usize = 32 << 10;
/// Bytes of a block register.
const SLOT: usize = BLOCK * 8;

/// A cache line of scratch memory.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u64; 8]);

thread_local! {
    /// Block registers of this thread, kept between runs.
    static SCRATCH: Cell<Vec<Line>> = const { Cell::new(Vec::new()) };
}

/// The state of a thread that runs blocks. Chains of up to 64 values, 16 loads, 2 iotas and 4 outputs need no
/// heap allocation.
struct BlockExecutor<'a> {
    p: &'a Plan,
    r: &'a Run<'a>,
    isa: Isa,
    /// Current address of each register.
    regs: SmallVec<[*mut u8; 64]>,
    /// Position of each load, iota and output at the current block.
    loads: SmallVec<[isize; 16]>,
    iotas: SmallVec<[isize; 2]>,
    outs: SmallVec<[isize; 4]>,
    /// For each register whose load has one value for the whole block: the position of the value that its
    /// slot now holds.
    held: SmallVec<[isize; 64]>,
    /// Block number along each axis.
    pos: [usize; MAX_AXES],
    /// Room for one more block, in which values are converted before they are stored.
    spare: *mut u8,
    acc: *mut u64,
}

/// How many blocks ahead to prefetch.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8;

/// Prefetches the cache lines `AHEAD` blocks after this one, if the target has such an instruction. An
/// address outside the operand does not fault.
#[inline]
fn prefetch(block: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch has no visible effect at any address; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(block.wrapping_add(AHEAD * bytes + line) as *const i8) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (block, bytes);
}

/// The value of a parameter in this run.
fn param(p: &Plan, r: &Run<'_>, i: usize) -> Scalar {
    match p.params[i].1 {
        Param::Literal(s) => s,
        // The index is in range, because `CpuKernel::run` checks the number of arguments.
        Param::Arg(a) => r.args[a as usize],
    }
}

/// Runs `f` with the executor of this thread.
fn with_executor(p: &Plan, r: &Run<'_>, f: impl FnOnce(&mut BlockExecutor<'_>)) {
    let mut mem = SCRATCH.take();
    let accs = p.outs.iter().filter(|o| o.reduce.is_some()).count();
    let need = (p.slot_count + 1 + accs * p.group) * SLOT / size_of::<Line>();
    if mem.len() < need {
        mem.resize(need, Line([0; 8]));
    }
    let base = mem.as_mut_ptr() as *mut u8;
    // SAFETY: `need` counts every slot that is passed, so the address lies in `mem`.
    let slot = |i: usize| unsafe { base.add(i * SLOT) };
    let mut w = BlockExecutor {
        p,
        r,
        isa: r.isa,
        regs: p.slots.iter().map(|s| s.map_or(base, slot)).collect(),
        loads: SmallVec::from_elem(0, p.loads.len()),
        iotas: SmallVec::from_elem(0, p.iotas.len()),
        outs: SmallVec::from_elem(0, p.outs.len()),
        held: SmallVec::from_elem(isize::MIN, p.slots.len()),
        pos: [0; MAX_AXES],
        spare: slot(p.slot_count),
        acc: slot(p.slot_count + 1) as *mut u64,
    };
    for &(reg, i) in &p.pinned {
        let d = p.params[i].0;
        // SAFETY: a slot has room for `BLOCK` elements of up to 8 bytes, and slots are 64-byte aligned.
        unsafe {
            convert::splat(p.lane(d).size(), convert::lane_bits(d, p.raw, param(p, r, i)), w.regs[reg], BLOCK)
        };
    }
    {
        let _ftz = p.floats.then(super::flush::FlushToZero::new);
        f(&mut w);
    }
    if p.outs.iter().any(|o| o.stream || o.line_rows) {
        convert::fence();
    }
    SCRATCH.set(mem);
}

/// Runs the plan on the team.
///
/// # Safety
/// The buffers of `r` are those of the call that the plan was made for. Each is large enough for its operand.
/// Outputs are writable and overlap no other buffer, except the outputs that the call computes in place: such
/// an output has the memory of the input with the same index.
pub(super) unsafe fn run(p: &Plan, r: &Run<'_>) {
    if p.outs.iter().all(|o| o.reduce.is_none()) {
        if p.empty {
            return;
        }
        let block = p.axes[p.axes.len() - 2].step * p.axes[p.axes.len() - 1].step;
        r.team.ranges(p.tasks, (GRAIN / block).max(1), &|a, b| with_executor(p, r, |w| w.blocks(a, b)));
        return;
    }
    if p.outer.iter().any(|&k| p.axes[k].dim == 0) {
        return;
    }
    let each = p.width * p.group;
    let width = each * p.outs.len();
    let work: usize = p.axes.iter().map(|a| a.dim).product();
    // Divide the work into parts of at least about GRAIN elements.
    let units = p.tasks * p.chunks;
    let grain = (GRAIN * units / work.max(1)).max(1);
    if p.chunks == 1 {
        r.team.ranges(units, grain, &|a, b| {
            with_executor(p, r, |w| {
                for t in a..b {
                    w.task(t, 0, p.task_blocks);
                    w.finish();
                }
            })
        });
        return;
    }
    // This waits only while another queue runs the same kernel.
    let mut partials = p.partials.lock().unwrap_or_else(|e| e.into_inner());
    partials.resize(p.partial_words(), 0);
    let ws = SharedMut(partials.as_mut_ptr());
    r.team.ranges(units, grain, &|a, b| {
        with_executor(p, r, |w| {
            for u in a..b {
                let (t, c) = (u / p.chunks, u % p.chunks);
                w.task(t, c * p.chunk, ((c + 1) * p.chunk).min(p.task_blocks));
                for o in 0..p.outs.len() {
                    // SAFETY: there are `width` words per unit, and no other part has this unit.
                    unsafe {
                        std::ptr::copy_nonoverlapping(w.acc_of(o), ws.get().add(u * width + o * each), each);
                    }
                }
            }
        })
    });
    with_executor(p, r, |w| {
        for t in 0..p.tasks {
            w.seek(t, 0);
            for (o, out) in p.outs.iter().enumerate() {
                w.clear(o);
                for c in 0..p.chunks {
                    let u = t * p.chunks + c;
                    // SAFETY: the parts above wrote all units; the accumulators belong to this thread.
                    let (from, acc) = unsafe {
                        (
                            std::slice::from_raw_parts(ws.get().add(u * width + o * each), each),
                            std::slice::from_raw_parts_mut(w.acc_of(o), each),
                        )
                    };
                    if let Some(kind) = out.reduce {
                        reduce::combine(w.isa, p.lane(out.from), kind, from, acc);
                    }
                }
            }
            w.finish();
        }
    });
}

fn place(a: &Affine, pos: &[usize]) -> isize {
    a.base + pos.iter().zip(&a.hop).map(|(p, h)| *p as isize * h).sum::<isize>()
}

impl BlockExecutor<'_> {
    fn acc_of(&self, out: usize) -> *mut u64 {
        // SAFETY: `with_executor` set aside `group` slots for each reduced output.
        unsafe { self.acc.add(out * self.p.group * BLOCK) }
    }

    /// Moves to block `inner` of task `outer`.
    fn seek(&mut self, outer: usize, inner: usize) {
        for (list, mut flat) in [(&self.p.outer, outer), (&self.p.inner, inner)] {
            for &k in list.iter().rev() {
                let group = if k + 1 == self.p.axes.len() { self.p.group } else { 1 };
                let n = self.p.axes[k].count.div_ceil(group).max(1);
                self.pos[k] = flat % n * group;
                flat /= n;
            }
        }
        let pos = &self.pos[..self.p.axes.len()];
        for (o, l) in self.loads.iter_mut().zip(&self.p.loads) {
            *o = place(&l.at, pos);
        }
        for (o, i) in self.iotas.iter_mut().zip(&self.p.iotas) {
            *o = place(&i.at, pos);
        }
        for (o, x) in self.outs.iter_mut().zip(&self.p.outs) {
            *o = place(&x.at, pos);
        }
    }

    /// Moves to the next block along the given axes.
    #[inline]
    fn advance(&mut self, list: &[usize]) {
        for &k in list.iter().rev() {
            self.pos[k] += 1;
            let back = self.pos[k] == self.p.axes[k].count;
            self.shift(k, if back { 1 - self.p.axes[k].count as isize } else { 1 });
            if !back {
                return;
            }
            self.pos[k] = 0;
        }
    }

    /// Moves all positions by `by` blocks along axis `k`.
    #[inline]
    fn shift(&mut self, k: usize, by: isize) {
        for (o, l) in self.loads.iter_mut().zip(&self.p.loads) {
            *o += by * l.at.hop[k];
        }
        for (o, i) in self.iotas.iter_mut().zip(&self.p.iotas) {
            *o += by * i.at.hop[k];
        }
        for (o, x) in self.outs.iter_mut().zip(&self.p.outs) {
            *o += by * x.at.hop[k];
        }
    }

    /// Runs `f` at each column block of the current task. If the columns are reduced, the current block is
    /// the only one.
    fn each_column(&mut self, mut f: impl FnMut(&mut Self, usize)) {
        let col = self.p.axes.len() - 1;
        let n = if self.p.axes[col].reduced {
            1
        } else {
            self.p.group.min(self.p.axes[col].count - self.pos[col])
        };
        for j in 0..n {
            if j > 0 {
                self.pos[col] += 1;
                self.shift(col, 1);
            }
            f(self, j);
        }
        if n > 1 {
            self.pos[col] -= n - 1;
            self.shift(col, 1 - n as isize);
        }
    }

    /// Rows and columns of the current block.
    #[inline]
    fn extent(&self) -> (usize, usize) {
        let n = self.p.axes.len();
        let of = |k: usize| {
            let a = &self.p.axes[k];
            a.step.min(a.dim - self.pos[k] * a.step)
        };
        (of(n - 2), of(n - 1))
    }

    /// Runs blocks `a..b` of an element-wise kernel.
    fn blocks(&mut self, a: usize, b: usize) {
        let p = self.p;
        self.seek(a, 0);
        for i in a..b {
            let (rows, cols) = self.extent();
            for (o, out) in p.outs.iter().enumerate() {
                if out.direct {
                    self.regs[out.value] = self.out_ptr(o, out);
                }
            }
            self.steps(rows, cols);
            for (o, out) in p.outs.iter().enumerate() {
                if !out.direct {
                    self.store(o, out, rows, cols);
                }
            }
            if i + 1 < b {
                self.advance(&p.outer);
            }
        }
    }

    fn out_ptr(&self, o: usize, out: &Out) -> *mut u8 {
        let at = self.outs[o] * out.dtype.size() as isize;
        // SAFETY: the plan checked that the view stays inside the operand, and `run` requires a buffer that
        // holds the operand.
        unsafe { self.r.bufs[self.p.inputs + o].ptr.offset(at) }
    }

    fn store(&self, o: usize, out: &Out, rows: usize, cols: usize) {
        let (row, col) = (self.p.axes.len() - 2, self.p.axes.len() - 1);
        let r = Rect { rows, cols, rs: out.at.stride[row], cs: out.at.stride[col], pitch: cols };
        let (src, dst) = (self.regs[out.value], self.out_ptr(o, out));
        let n = rows * cols;
        // SAFETY: the register holds the block. The rectangle lies in the output (see `out_ptr`), and no
        // other part writes it. If the register points into an input that this output overwrites, it is the
        // value of this output only (`Load::direct`). Its address is then `dst`, and nothing is copied.
        unsafe {
            if out.stream {
                let same = self.p.raw || out.dtype.compute() == out.dtype;
                let flat = Rect { rows: 1, cols: n, rs: 0, cs: 1, pitch: n };
                if same {
                    convert::stream(self.isa, src, dst, n * out.dtype.size());
                } else {
                    convert::store(self.isa, out.dtype, false, src, self.spare, flat);
                    convert::stream(self.isa, self.spare, dst, n * out.dtype.size());
                }
            } else if out.line_rows
                && cols == self.p.axes[col].step
                && (self.p.raw || out.dtype.compute() == out.dtype)
            {
                let size = out.dtype.size();
                for i in 0..rows {
                    convert::stream(
                        self.isa,
                        src.add(i * cols * size),
                        dst.offset(i as isize * r.rs * size as isize),
                        cols * size,
                    );
                }
            } else if src != dst {
                convert::store(self.isa, out.dtype, self.p.raw, src, dst, r);
            }
        }
    }

    /// Runs the instructions on the current block.
    #[inline]
    fn steps(&mut self, rows: usize, cols: usize) {
        let p = self.p;
        let n = rows * cols;
        for s in &p.steps {
            match s.kind {
                Kind::Load(l) => self.load(l, &p.loads[l], s.dst, rows, cols),
                Kind::Iota(i) => {
                    let a = &p.iotas[i];
                    let (row, col) = (p.axes.len() - 2, p.axes.len() - 1);
                    let r = Rect { rows, cols, rs: a.at.stride[row], cs: a.at.stride[col], pitch: cols };
                    // SAFETY: a slot has room for `BLOCK` words, and no other reference to it exists.
                    let d = unsafe { ops::slm(self.slot(s.dst), BLOCK) };
                    convert::iota(self.isa, a.dtype, self.iotas[i] as i64, r, d);
                }
                // SAFETY: earlier instructions wrote `n` values to each operand. The destination is a slot
                // that no operand uses, or the output, which overlaps no operand.
                Kind::Op(op, d) => unsafe {
                    let x = s.args.map(|a| self.regs[a] as *const u8);
                    ops::apply(self.isa, op, d, n, self.regs[s.dst], x);
                },
                // SAFETY: an earlier instruction wrote `n` values of `from`; the destination is another slot,
                // or the output.
                Kind::Cast(from, to) => unsafe {
                    convert::cast(self.isa, from, to, self.regs[s.args[0]], self.regs[s.dst], n);
                },
                // SAFETY: an earlier instruction wrote `n` values of `from`; the destination is another slot,
                // or the output.
                Kind::Bitcast(from, to) => unsafe {
                    convert::bitcast(self.isa, from, to, self.regs[s.args[0]], self.regs[s.dst], n);
                },
            }
        }
    }

    /// The slot of a register.
    fn slot(&self, reg: usize) -> *mut u8 {
        // Slots start at the beginning of the scratch memory, and the spare block follows the last one.
        let i = self.p.slots[reg].unwrap_or(0);
        // SAFETY: slot `i < slot_count` lies in the scratch memory, before `spare`.
        unsafe { self.spare.sub((self.p.slot_count - i) * SLOT) }
    }

    /// Copies a block of an operand to a register, or points the register at the operand.
    #[inline]
    fn load(&mut self, i: usize, l: &Load, reg: usize, rows: usize, cols: usize) {
        let (row, col) = (self.p.axes.len() - 2, self.p.axes.len() - 1);
        let size = l.dtype.size() as isize;
        let base = self.r.bufs[l.input].ptr;
        let at = self.loads[i];
        let mut rect = Rect { rows, cols, rs: l.at.stride[row], cs: l.at.stride[col], pitch: cols };
        if let Some(m) = &l.mask {
            let mut inside = true;
            for k in 0..row {
                inside &= self.pos[k] >= m.inside[k].0 && self.pos[k] < m.inside[k].1;
            }
            // The part of the block's range along axis `k` that lies inside the mask.
            let part = |k: usize, n: usize| {
                let start = self.pos[k] * self.p.axes[k].step;
                let clip = |x: usize| x.saturating_sub(start).min(n);
                (clip(m.inside[k].0), clip(m.inside[k].1))
            };
            let ((r0, r1), (c0, c1)) = (part(row, rows), part(col, cols));
            if !inside || (r0, r1, c0, c1) != (0, rows, 0, cols) {
                let d = self.slot(reg);
                self.regs[reg] = d;
                let fill = m.fill.map_or(Scalar::I(0), |p| param(self.p, self.r, p));
                let lane = self.p.lane(l.dtype);
                // SAFETY: a slot has room for a block of any type. Only elements inside the mask are read,
                // and these lie inside the operand.
                unsafe {
                    convert::splat(
                        lane.size(),
                        convert::lane_bits(l.dtype, self.p.raw, fill),
                        d,
                        rows * cols,
                    );
                    if inside && r0 < r1 && c0 < c1 {
                        rect.rows = r1 - r0;
                        rect.cols = c1 - c0;
                        let from = at + r0 as isize * rect.rs + c0 as isize * rect.cs;
                        let to = d.add((r0 * cols + c0) * lane.size());
                        convert::load(self.isa, l.dtype, self.p.raw, base.offset(from * size), rect, to);
                    }
                }
                return;
            }
        }
        // SAFETY: there is no mask or the block lies inside it, so all its elements lie in the operand.
        let src = unsafe { base.offset(at * size) };
        if l.direct {
            self.regs[reg] = src;
            // Prefetch, because during arithmetic the processor does not run far enough ahead to hide memory
            // latency. An operand that repeats along an axis is in the cache anyway.
            if !self.p.axes[..=row].iter().zip(&l.at.stride).any(|(a, s)| a.dim > 1 && *s == 0) {
                prefetch(src, rows * cols * size as usize);
            }
            return;
        }
        let d = self.slot(reg);
        self.regs[reg] = d;
        if l.uniform {
            if self.held[reg] == at {
                return;
            }
            self.held[reg] = at;
            // Fill the whole slot, because later blocks may be longer than this one.
            rect = Rect { rows: 1, cols: BLOCK, rs: 0, cs: 0, pitch: BLOCK };
        }
        // SAFETY: the block lies in the operand, or `rect` repeats its one element; a slot has room for a
        // block of any type.
        unsafe {
            if rect.rs == 1 && rows > 1 && rect.cs.abs() > 1 && size == 4 {
                convert::turn(self.isa, src as *const f32, rect, d as *mut f32);
            } else {
                convert::load(self.isa, l.dtype, self.p.raw, src, rect, d);
            }
        }
    }

    /// Sets the accumulators of an output to the reduction's identity.
    fn clear(&mut self, o: usize) {
        let out = &self.p.outs[o];
        if let Some(kind) = out.reduce {
            let id = reduce::acc_bits(self.p.lane(out.from), kind.identity(out.from));
            // SAFETY: each reduced output has slots for `width * group` words, which belong to this thread.
            unsafe { std::slice::from_raw_parts_mut(self.acc_of(o), self.p.width * self.p.group) }.fill(id);
        }
    }

    /// Reduces blocks `a..b` of task `t` into the accumulators.
    fn task(&mut self, t: usize, a: usize, b: usize) {
        let p = self.p;
        for o in 0..p.outs.len() {
            self.clear(o);
        }
        self.seek(t, a);
        let (row, col) = (p.axes.len() - 2, p.axes.len() - 1);
        for i in a..b {
            self.each_column(|w, j| {
                let (rows, cols) = w.extent();
                w.steps(rows, cols);
                let shape = reduce::Shape {
                    rows,
                    cols,
                    row_reduced: p.axes[row].reduced,
                    col_reduced: p.axes[col].reduced,
                };
                for (o, out) in p.outs.iter().enumerate() {
                    if let Some(kind) = out.reduce {
                        // SAFETY: the register holds the block; the accumulators belong to this thread.
                        unsafe {
                            let acc = std::slice::from_raw_parts_mut(w.acc_of(o).add(j * p.width), p.width);
                            reduce::accumulate(w.isa, p.lane(out.from), kind, shape, w.regs[out.value], acc);
                        }
                    }
                }
            });
            if i + 1 < b {
                self.advance(&p.inner);
            }
        }
    }

    /// Stores the accumulators of the current task.
    fn finish(&mut self) {
        self.each_column(|w, j| w.finish_block(j));
    }

    fn finish_block(&mut self, j: usize) {
        let p = self.p;
        let (row, col) = (p.axes.len() - 2, p.axes.len() - 1);
        let of = |k: usize| {
            let a = &p.axes[k];
            if a.reduced { 1 } else { a.step.min(a.dim - self.pos[k] * a.step) }
        };
        let (rows, cols) = (of(row), of(col));
        for (o, out) in p.outs.iter().enumerate() {
            // Along reduced axes, the position is still the one at which the task ended. This has no effect,
            // because outputs have no stride along reduced axes.
            let dst = self.out_ptr(o, out);
            // SAFETY: `j < group`, and the output has slots for `width * group` words.
            let acc = unsafe { self.acc_of(o).add(j * p.width) };
            for r in 0..rows {
                for c in 0..cols {
                    let at = (r as isize * out.at.stride[row] + c as isize * out.at.stride[col])
                        * out.dtype.size() as isize;
                    // SAFETY: `r * cols + c < width`; the element lies in the output, as the plan checked.
                    unsafe {
                        let bits = *acc.add(r * cols + c);
                        let d = dst.offset(at);
                        if out.dtype == halcyon_ir::DType::F32 && out.from == out.dtype {
                            *(d as *mut f32) = f64::from_bits(bits) as f32;
                        } else {
                            let v = reduce::acc_value(out.from, bits).to_bytes(out.dtype);
                            std::ptr::copy_nonoverlapping(v.as_ptr(), d, out.dtype.size());
                        }
                    }
                }
            }
        }
    }
}
