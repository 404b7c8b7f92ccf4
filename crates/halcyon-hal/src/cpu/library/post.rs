//! The epilogue of a product or a convolution: an element-wise chain over runs of the result that are still in the cache.
//!
//! The result is a matrix, row after row. The kernel calls `PostRun::run_rows` on a part when its sums are complete; the chain reads
//! them there, and its other operands where they lie, and writes its own result over them.

use super::Run;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::cpu::tile::apply;
use crate::{Declined, LibraryCall};
use halcyon_ir::fused::{Fused, InstrKind, Param};
use halcyon_ir::layout::View;
use halcyon_ir::scalar_op::Rule;
use halcyon_ir::{DType, ScalarOp};
use smallvec::SmallVec;

/// Instructions a chain may have: their blocks are on the stack.
const MOST: usize = 24;

/// The shortest last axis of a chain that does not walk whole rows.
const PIECE: usize = 4;

/// Elements that make a part worth handing to another thread.
const GRAIN: usize = 32 << 10;

/// Where an operand's elements are. `None` is the product itself.
#[derive(Debug)]
struct Load {
    /// Place among the kernel's buffers.
    buffer: Option<usize>,
    offset: isize,
    /// Sizes and strides of the space, outer axes first.
    axes: SmallVec<[(usize, isize); 4]>,
    /// From row to row and column to column of the result, where these are all there is to it.
    steps: Option<(isize, isize)>,
}

#[derive(Debug)]
enum Step {
    Load(Load),
    Param(Param),
    /// The type is that of the operands.
    Op(ScalarOp, [usize; 3]),
}

/// A compiled chain: one block for the result of every step.
#[derive(Debug)]
pub(crate) struct Post {
    steps: Vec<Step>,
    result: usize,
    /// Columns of the result.
    columns: usize,
    /// Run-time arguments that it reads.
    pub(crate) args: usize,
}

/// A chain with the buffers of a run and the row of the whole result at which a part begins, as the kernels pass it around. The
/// default does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct PostRun(Option<(SharedConst<Post>, SharedConst<Run<'static>>, usize)>);

impl Load {
    /// A part of the operand as the chain sees it, row after row, where it lies or copied to `own`.
    ///
    /// # Safety
    /// `base` is the operand's buffer, which the kernel has checked against the view; `own` has room for the part.
    unsafe fn part(&self, base: *const f32, p: &Part, columns: usize, own: *mut f32) -> *const u8 {
        let Some((rs, cs)) = self.steps else {
            if p.rows == 1 {
                // SAFETY: the caller's.
                return unsafe { self.read(base, p.row * columns + p.col, p.cols, own) };
            }
            for i in 0..p.rows {
                // SAFETY: the caller's; a row of the block each.
                unsafe {
                    let to = own.add(i * p.cols);
                    let from = self.read(base, (p.row + i) * columns + p.col, p.cols, to) as *const f32;
                    if !std::ptr::eq(from, to) {
                        std::ptr::copy_nonoverlapping(from, to, p.cols);
                    }
                }
            }
            return own as *const u8;
        };
        let src = base.wrapping_offset(self.offset + p.row as isize * rs + p.col as isize * cs);
        if cs == 1 && (p.rows == 1 || rs == p.cols as isize) {
            return src as *const u8;
        }
        for i in 0..p.rows {
            let (from, to) = (src.wrapping_offset(i as isize * rs), own.wrapping_add(i * p.cols));
            // SAFETY: the elements lie in the operand's view, which the kernel has checked against its buffer.
            unsafe {
                match cs {
                    1 => std::ptr::copy_nonoverlapping(from, to, p.cols),
                    0 => std::slice::from_raw_parts_mut(to, p.cols).fill(*from),
                    s => (0..p.cols).for_each(|k| *to.add(k) = *from.offset(k as isize * s)),
                }
            }
        }
        own as *const u8
    }

    /// Elements `at..at + n` of the operand as the chain sees it, where they lie or copied to `own`.
    ///
    /// # Safety
    /// As [`Load::part`].
    unsafe fn read(&self, base: *const f32, at: usize, n: usize, own: *mut f32) -> *const u8 {
        let (dim, stride) = self.axes.last().copied().unwrap_or((1, 0));
        let mut done = 0;
        while done < n {
            let (mut left, mut offset) = (at + done, self.offset);
            for (dim, stride) in self.axes.iter().rev() {
                offset += (left % dim) as isize * stride;
                left /= dim;
            }
            let src = base.wrapping_offset(offset);
            let run = (dim - (at + done) % dim).min(n - done);
            if stride == 1 && run == n {
                return src as *const u8;
            }
            // SAFETY: the elements lie on the last axis of the view; the rest is the caller's.
            unsafe {
                let to = own.add(done);
                match stride {
                    1 => std::ptr::copy_nonoverlapping(src, to, run),
                    0 => std::slice::from_raw_parts_mut(to, run).fill(*src),
                    s => (0..run).for_each(|i| *to.add(i) = *src.offset(i as isize * s)),
                }
            }
            done += run;
        }
        own as *const u8
    }
}

/// Elements that a chain works on at a time.
const BLOCK: usize = 768;

#[repr(C, align(64))]
struct Block([f32; BLOCK]);

/// Part of the result: rows and columns of it, and where its sums are, with so many elements from row to row.
#[derive(Clone, Copy)]
struct Part {
    row: usize,
    rows: usize,
    col: usize,
    cols: usize,
    c: *mut f32,
    rs: usize,
}

impl Part {
    /// # Safety
    /// The part's rows are readable, and `own` has room for them.
    unsafe fn gather(&self, own: *mut f32) {
        for i in 0..self.rows {
            // SAFETY: the caller's.
            unsafe {
                std::ptr::copy_nonoverlapping(self.c.add(i * self.rs), own.add(i * self.cols), self.cols)
            };
        }
    }
}

impl Post {
    /// The chain of a call's epilogue over a result with so many columns. The op itself reads the first `own` inputs.
    pub(crate) fn new(call: &LibraryCall<'_>, own: usize, columns: usize) -> Result<Option<Post>, Declined> {
        let Some(e) = call.epilogue else { return Ok(None) };
        let no = |why: &str| Err(Declined::because(format!("the epilogue {why}")));
        let f: &Fused = e.fused;
        let [out] = &f.outs[..] else { return no("has several results") };
        let dense = |strides: &[isize]| {
            let mut want = 1;
            f.space.iter().zip(strides).rev().all(|(d, s)| {
                let ok = *d == 1 || *s == want;
                want *= *d as isize;
                ok
            })
        };
        if f.reduced > 0 || out.reduce.is_some() || out.dtype != DType::F32 || f.body.len() > MOST {
            return no("is no short chain of f32");
        }
        if out.view.offset != 0 || !dense(&out.view.strides) || columns == 0 {
            return no("writes elsewhere");
        }
        // Short runs along the last axis are not worth it.
        if f.space.last().is_none_or(|n| n % columns != 0 && *n < PIECE) {
            return no("walks the rows in short pieces");
        }
        let mut args = 0;
        let mut steps = Vec::with_capacity(f.body.len());
        for i in &f.body {
            let a: SmallVec<[usize; 3]> = i.args.iter().map(|r| *r as usize).collect();
            let at = |k: usize| a.get(k).copied().unwrap_or(0);
            steps.push(match i.kind {
                InstrKind::Load(k) => {
                    let l = &f.loads[k as usize];
                    let product = l.input == e.product;
                    if l.dtype != DType::F32 || l.view.mask.is_some() {
                        return no("reads other types, or past an edge");
                    }
                    if product && (l.view.offset != 0 || !dense(&l.view.strides)) {
                        return no("reads the product elsewhere");
                    }
                    // The others follow the op's inputs in their order.
                    let place = own + l.input as usize - usize::from(l.input > e.product);
                    let size = if product { call.outputs.first() } else { call.inputs.get(place) };
                    let size = size.map_or(0, |o| o.view.numel()) as isize;
                    if l.view.range().is_some_and(|(lo, hi)| lo < 0 || hi >= size) {
                        return no("reads outside of an operand");
                    }
                    let seen = View { shape: f.space.clone(), ..l.view.clone() };
                    let rows = f.space.iter().product::<usize>() / columns;
                    let steps = seen.reshape(&[rows, columns]).map(|v| (v.strides[0], v.strides[1]));
                    Step::Load(Load {
                        steps,
                        buffer: (!product).then_some(place),
                        offset: l.view.offset,
                        axes: f.space.iter().copied().zip(l.view.strides.iter().copied()).collect(),
                    })
                }
                InstrKind::Param(k) => match f.params[k as usize] {
                    (DType::F32, p) => {
                        if let Param::Arg(a) = p {
                            args = args.max(a as usize + 1);
                        }
                        Step::Param(p)
                    }
                    _ => return no("computes in another type"),
                },
                InstrKind::Op(op) => {
                    let operand = |k: usize| f.body[at(k)].dtype;
                    let floats = match op.row().rule {
                        Rule::Select => operand(0) == DType::Bool && operand(1) == DType::F32,
                        _ => operand(0) == DType::F32,
                    };
                    if !floats {
                        return no("computes in another type");
                    }
                    Step::Op(op, [at(0), at(1), at(2)])
                }
                _ => return no("has casts or indices"),
            });
        }
        Ok(Some(Post { steps, result: out.value as usize, columns, args }))
    }

    /// The chain over a part of the result.
    ///
    /// # Safety
    /// The operands of the call are bound in `r`; the part's elements are the calling thread's own.
    unsafe fn run(&self, isa: Isa, r: &Run<'_>, p: Part) {
        let cols = p.cols.clamp(1, BLOCK);
        let rows = (BLOCK / cols).max(1);
        for i in (0..p.rows).step_by(rows) {
            for j in (0..p.cols).step_by(cols) {
                let part = Part {
                    row: p.row + i,
                    rows: rows.min(p.rows - i),
                    col: p.col + j,
                    cols: cols.min(p.cols - j),
                    // SAFETY: the caller's.
                    c: unsafe { p.c.add(i * p.rs + j) },
                    rs: p.rs,
                };
                // SAFETY: the caller's.
                unsafe { self.block(isa, r, part) };
            }
        }
    }

    /// A part of at most [`BLOCK`] elements.
    unsafe fn block(&self, isa: Isa, r: &Run<'_>, p: Part) {
        let n = p.rows * p.cols;
        let whole = p.rows == 1 || p.rs == p.cols;
        let mut blocks: [std::mem::MaybeUninit<Block>; MOST] =
            [const { std::mem::MaybeUninit::uninit() }; MOST];
        let mut regs: [*const u8; MOST] = [std::ptr::null(); MOST];
        for (k, step) in self.steps.iter().enumerate() {
            let own = blocks[k].as_mut_ptr() as *mut f32;
            regs[k] = match step {
                Step::Load(l) => {
                    // SAFETY: the caller's; a block has room for `n`.
                    unsafe {
                        match l.buffer {
                            None if whole => p.c as *const u8,
                            None => {
                                p.gather(own);
                                own as *const u8
                            }
                            Some(b) => l.part(r.bufs[b].ptr as *const f32, &p, self.columns, own),
                        }
                    }
                }
                Step::Param(p) => {
                    let v = match p {
                        Param::Literal(s) => *s,
                        // The kernel's check has counted the arguments.
                        Param::Arg(a) => r.args[*a as usize],
                    };
                    // SAFETY: a block has room for `n`.
                    unsafe { std::slice::from_raw_parts_mut(own, n).fill(v.as_f64() as f32) };
                    own as *const u8
                }
                Step::Op(op, a) => {
                    let x = a.map(|i| regs[i.min(k)]);
                    // An operand that is not there is any block.
                    let x = x.map(|p| if p.is_null() { regs[a[0]] } else { p });
                    // SAFETY: operands were made by earlier steps and hold `n` values of their type; the block is no operand's.
                    unsafe { apply(isa, *op, DType::F32, n, own as *mut u8, x) };
                    own as *const u8
                }
            };
        }
        let from = regs[self.result] as *const f32;
        if std::ptr::eq(from, p.c) {
            return;
        }
        for i in 0..p.rows {
            // SAFETY: the result's block, or an operand, holds `n` floats and is not the part itself.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(i * p.cols), p.c.add(i * p.rs), p.cols);
            }
        }
    }
}

impl PostRun {
    /// # Safety
    /// `post` and `r` live as long as this is used.
    pub(crate) unsafe fn new(post: Option<&Post>, r: &Run<'_>) -> PostRun {
        PostRun(post.map(|p| (SharedConst(p), SharedConst(std::ptr::from_ref(r).cast()), 0)))
    }

    /// For a part of the result that begins `rows` further down.
    pub(crate) fn below(self, rows: usize) -> PostRun {
        PostRun(self.0.map(|(p, r, at)| (p, r, at + rows)))
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Columns `col..col + n` of a row, whose sums are at `c`.
    ///
    /// # Safety
    /// `n` floats at `c` are the calling thread's own, and are that part of the row.
    #[inline]
    pub(crate) unsafe fn run(&self, isa: Isa, row: usize, col: usize, n: usize, c: *mut f32) {
        // SAFETY: the caller's.
        unsafe { self.run_rows(isa, (row, 1), (col, n), c, n) }
    }

    /// Rows and columns, each as the first and how many, whose sums are at `c` with `rs` elements from row to row.
    ///
    /// # Safety
    /// As [`PostRun::run`], for every row.
    #[inline]
    pub(crate) unsafe fn run_rows(
        &self,
        isa: Isa,
        rows: (usize, usize),
        cols: (usize, usize),
        c: *mut f32,
        rs: usize,
    ) {
        if let Some((p, r, first)) = self.0 {
            let part = Part { row: first + rows.0, rows: rows.1, col: cols.0, cols: cols.1, c, rs };
            // SAFETY: both live, as promised to `new`; the rest is the caller's.
            unsafe { (*p.get()).run(isa, &*r.get(), part) }
        }
    }
}

/// The chain over a whole result of `rows` rows, for kernels that have no better time for it.
///
/// # Safety
/// The operands of the call are bound in `r`; the result at `c` is nobody else's.
pub(crate) unsafe fn run_all(post: Option<&Post>, r: &Run<'_>, rows: usize, c: *mut f32) {
    let Some(p) = post else { return };
    let c = SharedMut(c);
    r.team.ranges(rows, (GRAIN / p.columns).max(1), &|a, b| {
        let (cols, c) = (p.columns, c.get().wrapping_add(a * p.columns));
        // SAFETY: the caller's; rows are disjoint.
        unsafe { p.run(r.isa, r, Part { row: a, rows: b - a, col: 0, cols, c, rs: cols }) };
    });
}
