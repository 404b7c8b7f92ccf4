//! The epilogue of a product or a convolution: an element-wise chain over runs of the result that are still
//! in the cache.
//!
//! The result is a matrix, row after row. The kernel calls `PostRun::run_rows` on a part when its sums are
//! complete; the chain reads them there, and its other operands where they lie, and writes its own result
//! over them.

use super::Run;
#[cfg(target_arch = "x86_64")]
use super::simd::mask16;
use super::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::cpu::tile::apply;
use crate::{Declined, LibraryCall};
use halcyon_ir::fused::{Fused, InstrKind, Param};
use halcyon_ir::layout::View;
use halcyon_ir::scalar_op::Rule;
use halcyon_ir::{DType, ScalarOp};
use half::bf16;
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
    /// The elements are bf16.
    half: bool,
}

#[derive(Debug)]
enum Step {
    Load(Load),
    Param(Param),
    /// The type is that of the operands.
    Op(ScalarOp, [usize; 3]),
    /// What another step has.
    Same(usize),
    /// That, rounded to bf16.
    Round(usize),
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
    /// The result is bf16.
    half: bool,
}

/// Where a chain's result goes, with elements from row to row.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    F32(*mut f32, isize),
    Bf16(*mut bf16, isize),
}

/// Elements of operands.
trait Elem: Storage {
    /// `n` elements as f32.
    ///
    /// # Safety
    /// `n` elements are readable and writable, and do not overlap.
    unsafe fn put(isa: Isa, from: *const Self, n: usize, to: *mut f32);
}

impl Elem for f32 {
    #[inline(always)]
    unsafe fn put(_: Isa, from: *const f32, n: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from, to, n) }
    }
}

impl Elem for bf16 {
    #[inline(always)]
    unsafe fn put(isa: Isa, from: *const bf16, n: usize, to: *mut f32) {
        // SAFETY: the caller's.
        unsafe { widen(isa, from, n, to) }
    }
}

dispatch_simd! {
    unsafe fn widen[][](isa, from: *const bf16, n: usize, to: *mut f32) = widen_body
}
#[inline(always)]
unsafe fn widen_body<S: Simd>(from: *const bf16, n: usize, to: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let mut i = 0;
        while i + S::W <= n {
            S::store(to.add(i), bf16::load::<S>(from.add(i)));
            i += S::W;
        }
        if i < n {
            S::store_part(to.add(i), bf16::load_part::<S>(from.add(i), n - i), n - i);
        }
    }
}

/// Rounds floats to nearest even, row by row (first element, elements from row to row); with AVX512_BF16,
/// denormals become zero.
///
/// # Safety
/// The rows are readable and writable, and do not overlap.
pub(crate) unsafe fn round_rows(
    isa: Isa,
    rows: usize,
    n: usize,
    from: (*const f32, isize),
    to: (*mut bf16, isize),
) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_bf16() {
        // SAFETY: the caller's; the processor has the instruction.
        return unsafe { round_pairs(rows, n, from, to) };
    }
    let _ = isa;
    for i in 0..rows as isize {
        // SAFETY: the caller's.
        unsafe {
            let from = std::slice::from_raw_parts(from.0.offset(i * from.1), n);
            bf16::narrow_slice(from, std::slice::from_raw_parts_mut(to.0.offset(i * to.1), n));
        }
    }
}

/// # Safety
/// As [`round_rows`], with AVX512_BF16.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn round_pairs(rows: usize, n: usize, from: (*const f32, isize), to: (*mut bf16, isize)) {
    use std::arch::x86_64::*;
    for r in 0..rows as isize {
        // SAFETY: the caller's; masked elements are not touched. The types of vectors differ in name only.
        unsafe {
            let (from, to) = (from.0.offset(r * from.1), to.0.offset(r * to.1));
            let mut i = 0;
            while i + 32 <= n {
                let (lo, hi) = (_mm512_loadu_ps(from.add(i)), _mm512_loadu_ps(from.add(i + 16)));
                let v = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(hi, lo));
                _mm512_storeu_si512(to.add(i).cast(), v);
                i += 32;
            }
            while i < n {
                let m = mask16((n - i).min(16));
                let v = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(m, from.add(i)));
                _mm256_mask_storeu_epi16(to.add(i).cast(), m, std::mem::transmute::<__m256bh, __m256i>(v));
                i += 16;
            }
        }
    }
}

/// A chain with the buffers of a run and the row of the whole result at which a part begins, as the kernels
/// pass it around. The default does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct PostRun(Option<(SharedConst<Post>, SharedConst<Run<'static>>, usize)>);

impl Load {
    /// A part of the operand as the chain sees it, row after row, where it lies or copied to `own`.
    ///
    /// # Safety
    /// `base` is the operand's buffer, which the kernel has checked against the view; `own` has room for the
    /// part.
    unsafe fn part<T: Elem>(
        &self,
        isa: Isa,
        base: *const T,
        p: &Part,
        columns: usize,
        own: *mut f32,
    ) -> *const u8 {
        let Some((rs, cs)) = self.steps else {
            if p.rows == 1 {
                // SAFETY: the caller's.
                return unsafe { self.read(isa, base, p.row * columns + p.col, p.cols, own) };
            }
            for i in 0..p.rows {
                // SAFETY: the caller's; a row of the block each.
                unsafe {
                    let to = own.add(i * p.cols);
                    let at = (p.row + i) * columns + p.col;
                    let from = self.read(isa, base, at, p.cols, to) as *const f32;
                    if !std::ptr::eq(from, to) {
                        std::ptr::copy_nonoverlapping(from, to, p.cols);
                    }
                }
            }
            return own as *const u8;
        };
        let src = base.wrapping_offset(self.offset + p.row as isize * rs + p.col as isize * cs);
        if T::IS_F32 && cs == 1 && (p.rows == 1 || rs == p.cols as isize) {
            return src as *const u8;
        }
        for i in 0..p.rows {
            let (from, to) = (src.wrapping_offset(i as isize * rs), own.wrapping_add(i * p.cols));
            // SAFETY: the elements lie in the operand's view, which the kernel has checked against its
            // buffer.
            unsafe {
                match cs {
                    1 => T::put(isa, from, p.cols, to),
                    0 => std::slice::from_raw_parts_mut(to, p.cols).fill((*from).widen()),
                    s => (0..p.cols).for_each(|k| *to.add(k) = (*from.offset(k as isize * s)).widen()),
                }
            }
        }
        own as *const u8
    }

    /// Elements `at..at + n` of the operand as the chain sees it, where they lie or copied to `own`.
    ///
    /// # Safety
    /// As [`Load::part`].
    unsafe fn read<T: Elem>(
        &self,
        isa: Isa,
        base: *const T,
        at: usize,
        n: usize,
        own: *mut f32,
    ) -> *const u8 {
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
            if T::IS_F32 && stride == 1 && run == n {
                return src as *const u8;
            }
            // SAFETY: the elements lie on the last axis of the view; the rest is the caller's.
            unsafe {
                let to = own.add(done);
                match stride {
                    1 => T::put(isa, src, run, to),
                    0 => std::slice::from_raw_parts_mut(to, run).fill((*src).widen()),
                    s => (0..run).for_each(|i| *to.add(i) = (*src.offset(i as isize * s)).widen()),
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
    to: Target,
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
    /// The chain of a call's epilogue over an f32 result with so many columns. The op itself reads the first
    /// `own` inputs.
    pub(crate) fn new(call: &LibraryCall<'_>, own: usize, columns: usize) -> Result<Option<Post>, Declined> {
        let post = Post::or_half(call, own, columns)?;
        let half = call
            .epilogue
            .is_some_and(|e| e.fused.loads.iter().any(|l| l.input == e.product && l.dtype != DType::F32));
        if half || post.as_ref().is_some_and(|p| p.half) {
            return Err(Declined::because("the epilogue is no chain of an f32 product into f32"));
        }
        Ok(post)
    }

    /// [`Post::new`] where the product and the chain's result may be bf16, for kernels that call
    /// [`PostRun::run_into`]. The chain reads f32 sums, which it does not round to the product's type.
    pub(crate) fn or_half(
        call: &LibraryCall<'_>,
        own: usize,
        columns: usize,
    ) -> Result<Option<Post>, Declined> {
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
        let float = |d: DType| matches!(d, DType::F32 | DType::BF16);
        if f.reduced > 0 || out.reduce.is_some() || !float(out.dtype) || f.body.len() > MOST {
            return no("is no short chain of f32 or bf16");
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
        for (place, i) in f.body.iter().enumerate() {
            let a: SmallVec<[usize; 3]> = i.args.iter().map(|r| *r as usize).collect();
            let at = |k: usize| a.get(k).copied().unwrap_or(0);
            steps.push(match i.kind {
                InstrKind::Load(k) => {
                    let l = &f.loads[k as usize];
                    let product = l.input == e.product;
                    if !float(l.dtype) || l.view.mask.is_some() {
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
                        half: !product && l.dtype == DType::BF16,
                        offset: l.view.offset,
                        axes: f.space.iter().copied().zip(l.view.strides.iter().copied()).collect(),
                    })
                }
                InstrKind::Param(k) => match f.params[k as usize] {
                    (DType::F32 | DType::BF16, p) => {
                        if let Param::Arg(a) = p {
                            args = args.max(a as usize + 1);
                        }
                        Step::Param(p)
                    }
                    _ => return no("computes in another type"),
                },
                InstrKind::Op(op) => {
                    let operand = |k: usize| f.body[at(k)].dtype;
                    // Halves may stay in f32 from one instruction to the next.
                    let floats = match op.row().rule {
                        Rule::Select => operand(0) == DType::Bool && float(operand(1)),
                        _ => float(operand(0)),
                    };
                    if !floats {
                        return no("computes in another type");
                    }
                    Step::Op(op, [at(0), at(1), at(2)])
                }
                InstrKind::Cast if float(i.dtype) && float(f.body[at(0)].dtype) => {
                    // The result is rounded when it is written.
                    let last =
                        place == out.value as usize && out.dtype == DType::BF16 && !read_again(f, place);
                    if i.dtype == DType::F32 || last { Step::Same(at(0)) } else { Step::Round(at(0)) }
                }
                _ => return no("has other casts, or indices"),
            });
        }
        let half = out.dtype == DType::BF16;
        Ok(Some(Post { steps, result: out.value as usize, columns, args, half }))
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
                    to: p.to.at(i, j),
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
                            Some(b) if l.half => {
                                l.part(isa, r.bufs[b].ptr as *const bf16, &p, self.columns, own)
                            }
                            Some(b) => l.part(isa, r.bufs[b].ptr as *const f32, &p, self.columns, own),
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
                Step::Same(of) => regs[*of],
                Step::Round(of) => {
                    // SAFETY: the other step's block and this one have room for `n`.
                    unsafe {
                        let (from, mut half) = (regs[*of] as *const f32, [bf16::ZERO; BLOCK]);
                        round_rows(isa, 1, n, (from, 0), (half.as_mut_ptr(), 0));
                        widen(isa, half.as_ptr(), n, own);
                    }
                    own as *const u8
                }
                Step::Op(op, a) => {
                    let x = a.map(|i| regs[i.min(k)]);
                    // An operand that is not there is any block.
                    let x = x.map(|p| if p.is_null() { regs[a[0]] } else { p });
                    // SAFETY: operands were made by earlier steps and hold `n` values of their type; the
                    // block is no operand's.
                    unsafe { self.apply(isa, *op, n, own, x) };
                    own as *const u8
                }
            };
        }
        let from = regs[self.result] as *const f32;
        match p.to {
            // SAFETY: the result's block, or an operand, holds `n` floats; the caller's rows are no block.
            Target::Bf16(to, rs) => unsafe {
                round_rows(isa, p.rows, p.cols, (from, p.cols as isize), (to, rs));
            },
            Target::F32(to, rs) => {
                for i in 0..p.rows {
                    // SAFETY: as above, unless the row is where it belongs.
                    unsafe {
                        let (from, to) = (from.add(i * p.cols), to.offset(i as isize * rs));
                        if !std::ptr::eq(from, to) {
                            std::ptr::copy_nonoverlapping(from, to, p.cols);
                        }
                    }
                }
            }
        }
    }
}

impl Post {
    /// # Safety
    /// As [`apply`]'s, for f32.
    #[inline]
    unsafe fn apply(&self, isa: Isa, op: ScalarOp, n: usize, to: *mut f32, x: [*const u8; 3]) {
        // What is rounded to bf16 needs no more.
        #[cfg(target_arch = "x86_64")]
        if self.half && op == ScalarOp::Gelu && isa == Isa::Avx512 {
            // SAFETY: the caller's; the set was checked when the kernel was made.
            return unsafe { crate::cpu::vmath512::gelu_low(n, x[0] as *const f32, to) };
        }
        // SAFETY: the caller's.
        unsafe { apply(isa, op, DType::F32, n, to as *mut u8, x) }
    }
}

/// Whether another instruction reads the one at `place`.
fn read_again(f: &Fused, place: usize) -> bool {
    f.body.iter().any(|i| i.args.iter().any(|a| *a as usize == place))
}

impl Target {
    /// So many rows and columns further on.
    fn at(self, i: usize, j: usize) -> Target {
        match self {
            Target::F32(p, rs) => Target::F32(p.wrapping_offset(i as isize * rs).wrapping_add(j), rs),
            Target::Bf16(p, rs) => Target::Bf16(p.wrapping_offset(i as isize * rs).wrapping_add(j), rs),
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

    /// Rows and columns, each as the first and how many, whose sums are at `c` with `rs` elements from row to
    /// row.
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
        // SAFETY: the caller's.
        unsafe { self.run_into(isa, rows, cols, c, rs, Target::F32(c, rs as isize)) }
    }

    /// [`PostRun::run_rows`] with the result going elsewhere, or over the sums.
    ///
    /// # Safety
    /// As [`PostRun::run_rows`]; the rows at `to` are the calling thread's, of the chain's type.
    #[inline]
    pub(crate) unsafe fn run_into(
        &self,
        isa: Isa,
        rows: (usize, usize),
        cols: (usize, usize),
        c: *mut f32,
        rs: usize,
        to: Target,
    ) {
        if let Some((p, r, first)) = self.0 {
            let part = Part { row: first + rows.0, rows: rows.1, col: cols.0, cols: cols.1, c, rs, to };
            // SAFETY: both live, as promised to `new`; the rest is the caller's.
            unsafe { (*p.get()).run(isa, &*r.get(), part) }
        }
    }
}

/// The chain over a whole f32 result of `rows` rows, for kernels that have no better time for it.
///
/// # Safety
/// The operands of the call are bound in `r`; the result at `c` is nobody else's.
pub(crate) unsafe fn run_all(post: Option<&Post>, r: &Run<'_>, rows: usize, c: *mut f32) {
    let Some(p) = post else { return };
    let c = SharedMut(c);
    r.team.ranges(rows, (GRAIN / p.columns).max(1), &|a, b| {
        let (cols, c) = (p.columns, c.get().wrapping_add(a * p.columns));
        let to = Target::F32(c, cols as isize);
        // SAFETY: the caller's; rows are disjoint.
        unsafe { p.run(r.isa, r, Part { row: a, rows: b - a, col: 0, cols, c, rs: cols, to }) };
    });
}
