//! The epilogue of a product or convolution: an element-wise chain over parts of the result that are still in
//! the cache.
//!
//! The result is a row-major matrix. The kernel calls `BoundChain::run_rows` on a part once its sums are
//! complete. The chain reads the sums in place and its other operands from their buffers. Its result
//! overwrites the sums, or is stored elsewhere, where it may be bf16 (`BoundChain::run_into`).

use super::Run;
#[cfg(target_arch = "x86_64")]
use super::simd::mask16;
use super::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::chain::apply;
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut};
use crate::library_call::CallForm;
use crate::{Declined, reach};
use halcyon_ir::fused::{Fused, Instr, InstrKind, Param};
use halcyon_ir::layout::View;
use halcyon_ir::ops::element_wise::Rule;
use halcyon_ir::target::Epilogue;
use halcyon_ir::{DType, ScalarOp};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use smallvec::SmallVec;

/// Largest number of instructions of a chain. It is limited because the blocks of the instructions are on the
/// stack.
const MAX_INSTRUCTIONS: usize = 24;

/// The last axis of a chain must be at least this long, or its length must be a multiple of the columns of
/// the result.
const MIN_RUN: usize = 4;

/// Minimum number of elements in a part of the work. A smaller part would cost more than it saves.
const GRAIN: usize = 32 << 10;

/// An operand of the chain. If `buffer` is `None`, it is the product itself.
#[derive(Debug)]
struct Load {
    /// Index among the kernel's buffers.
    buffer: Option<usize>,
    offset: isize,
    /// Size and stride of each axis of the chain's iteration space, outer axes first.
    axes: SmallVec<[(usize, isize); 4]>,
    /// The operand's stride per row and per column of the result. `None` if no such strides exist.
    steps: Option<(isize, isize)>,
    /// f32, bf16 or f16.
    dtype: DType,
}

#[derive(Debug)]
enum Step {
    Load(Load),
    Param(Param),
    /// A scalar op and the instructions that compute its operands.
    Op(ScalarOp, [usize; 3]),
    /// The value of another instruction.
    Same(usize),
    /// The value of another instruction, rounded to bf16.
    Round(usize),
}

/// A compiled chain. Each instruction has a block of its own for its result.
#[derive(Debug)]
pub(crate) struct EpilogueChain {
    steps: Vec<Step>,
    result: usize,
    /// Number of columns of the result.
    columns: usize,
    /// Number of run-time arguments that the chain reads.
    pub(crate) args: usize,
    /// Whether the result is bf16 or f16.
    half: bool,
}

/// The destination of a chain's result: its first element, and the number of elements from one row to the
/// next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    F32(*mut f32, isize),
    Bf16(*mut bf16, isize),
}

/// Element types of operands.
trait OperandElement: Storage {
    /// Writes `n` elements to `to`, as f32.
    ///
    /// # Safety
    /// `from` has `n` readable elements, `to` room for `n` floats; they do not overlap; `isa` is available.
    unsafe fn put(isa: Isa, from: *const Self, n: usize, to: *mut f32);
}

impl OperandElement for f32 {
    #[inline(always)]
    unsafe fn put(_: Isa, from: *const f32, n: usize, to: *mut f32) {
        // SAFETY: the contract of `put` gives `n` readable and `n` writable floats that do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(from, to, n) }
    }
}

impl OperandElement for bf16 {
    #[inline(always)]
    unsafe fn put(isa: Isa, from: *const bf16, n: usize, to: *mut f32) {
        // SAFETY: `put` has the contract of `widen`.
        unsafe { widen(isa, from, n, to) }
    }
}

impl OperandElement for f16 {
    #[inline(always)]
    unsafe fn put(_: Isa, from: *const f16, n: usize, to: *mut f32) {
        // SAFETY: the contract of `put` gives `n` readable elements and `n` writable floats that do not
        // overlap. Any bits are a float.
        let (from, to) =
            unsafe { (std::slice::from_raw_parts(from, n), std::slice::from_raw_parts_mut(to, n)) };
        from.convert_to_f32_slice(to);
    }
}

dispatch_simd! {
    /// # Safety
    /// `from` has `n` readable elements, `to` room for `n` floats; they do not overlap.
    unsafe fn widen[][](isa, from: *const bf16, n: usize, to: *mut f32) = widen_body
}
/// # Safety
/// The contract of `widen`, and the caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn widen_body<S: Simd>(from: *const bf16, n: usize, to: *mut f32) {
    // SAFETY: whole vectors end at or before `n`, and the partial vector has `n - i` elements. The contract
    // makes `n` elements valid on both sides.
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

/// Rounds rows of f32 to bf16, to nearest even. `from` and `to` are (first element, elements from row to
/// row). With AVX512_BF16, denormals become zero.
///
/// # Safety
/// `rows` rows of `n` elements are readable at `from` and writable at `to`, and do not overlap.
pub(crate) unsafe fn round_rows(
    isa: Isa,
    rows: usize,
    n: usize,
    from: (*const f32, isize),
    to: (*mut bf16, isize),
) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_bf16() {
        // SAFETY: `round_rows` gives valid rows, and `has_bf16` found AVX512_BF16.
        return unsafe { round_pairs(rows, n, from, to) };
    }
    let _ = isa;
    for i in 0..rows as isize {
        // SAFETY: `i < rows`, whose `n` elements the contract makes readable at `from` and writable at `to`.
        unsafe {
            let from = std::slice::from_raw_parts(from.0.offset(i * from.1), n);
            bf16::narrow_slice(from, std::slice::from_raw_parts_mut(to.0.offset(i * to.1), n));
        }
    }
}

/// [`round_rows`] with AVX512_BF16.
///
/// # Safety
/// The contract of [`round_rows`]; the processor has AVX512_BF16 and the enabled features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn round_pairs(rows: usize, n: usize, from: (*const f32, isize), to: (*mut bf16, isize)) {
    use std::arch::x86_64::*;
    for r in 0..rows as isize {
        // SAFETY: `r < rows`, and masks limit accesses to the row's `n` elements. The transmuted vector types
        // have the same size, and every bit pattern is valid.
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

/// A chain with the buffers of a run, and the row of the whole result at which the kernel's part begins.
/// Kernels receive it in their epilogue. The default does nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct BoundChain(Option<(SharedConst<EpilogueChain>, SharedConst<Run<'static>>, usize)>);

impl Load {
    /// Returns the operand's elements for part `p`, row after row: a pointer into the operand's buffer, or a
    /// copy in `own`.
    ///
    /// # Safety
    /// `base` is the operand's buffer of type T, which the kernel has checked against the view; `own` has
    /// room for the part's elements.
    unsafe fn part<T: OperandElement>(
        &self,
        isa: Isa,
        base: *const T,
        p: &Part,
        columns: usize,
        own: *mut f32,
    ) -> *const u8 {
        let Some((rs, cs)) = self.steps else {
            if p.rows == 1 {
                // SAFETY: `part` has the contract of `read`; the part is one row.
                return unsafe { self.read(isa, base, p.row * columns + p.col, p.cols, own) };
            }
            for i in 0..p.rows {
                // SAFETY: row `i` of the part is in the view, and `own` has room for `p.cols` floats per row.
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
            // buffer; `own` has room for `p.cols` floats per row.
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

    /// Returns the operand's elements for points `at..at + n` of the chain's iteration space: a pointer into
    /// the operand's buffer, or a copy in `own`.
    ///
    /// # Safety
    /// The contract of [`Load::part`], with room for `n` floats at `own`.
    unsafe fn read<T: OperandElement>(
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
            // SAFETY: the `run` elements lie on the last axis of the view, which the kernel checked against
            // the buffer; `own` has room for `n` floats, and `done + run <= n`.
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

/// Number of elements that a chain processes at a time.
const BLOCK: usize = 768;

#[repr(C, align(64))]
struct Block([f32; BLOCK]);

/// A part of the result: its rows and columns, its sums (`c`, with `rs` elements from row to row), and the
/// destination.
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
    /// Copies the part's sums to `own`, without gaps between rows.
    ///
    /// # Safety
    /// The part's rows are readable at `c`; `own` has room for `rows * cols` floats and does not overlap
    /// them.
    unsafe fn gather(&self, own: *mut f32) {
        for i in 0..self.rows {
            // SAFETY: row `i` of the part is readable, and `own` has room for all rows.
            unsafe {
                std::ptr::copy_nonoverlapping(self.c.add(i * self.rs), own.add(i * self.cols), self.cols)
            };
        }
    }
}

/// Whether a type is one that chains compute in f32. bf16 and f16 values may stay in f32 between
/// instructions.
fn float(d: DType) -> bool {
    matches!(d, DType::F32 | DType::BF16 | DType::F16)
}

/// Whether every instruction has all its operands and reads only earlier values, and every value has the kind
/// that its type requires: bools come from tests (such as comparisons), and all other values are floats.
fn well_formed(f: &Fused) -> bool {
    let fits = |(place, i): (usize, &Instr)| {
        let earlier = i.args.iter().all(|a| (*a as usize) < place);
        let of = |k: usize| i.args.get(k).and_then(|a| f.body.get(*a as usize)).map(|i| i.dtype);
        let is_float = |k: usize| of(k).is_some_and(float);
        let typed = match i.kind {
            InstrKind::Op(op) => {
                let select = op.row().rule == Rule::Select;
                let operand = |k: usize| match select && k == 0 {
                    true => of(k) == Some(DType::Bool),
                    false => is_float(k),
                };
                let result =
                    if op.row().rule == Rule::Test { i.dtype == DType::Bool } else { float(i.dtype) };
                (0..op.arity()).all(operand) && result
            }
            InstrKind::Cast => is_float(0) && float(i.dtype),
            _ => float(i.dtype),
        };
        earlier && typed
    };
    let float_result = |v: u32| f.body.get(v as usize).is_some_and(|i| float(i.dtype));
    f.body.iter().enumerate().all(fits) && f.outs.iter().all(|o| float_result(o.value))
}

impl EpilogueChain {
    /// Compiles a call's epilogue for an f32 result with `columns` columns. The op itself reads the first
    /// `own` inputs. `None` if the call has no epilogue.
    pub(crate) fn new(
        call: &CallForm<'_>,
        own: usize,
        columns: usize,
    ) -> Result<Option<EpilogueChain>, Declined> {
        let chain = EpilogueChain::or_half(call, own, columns)?;
        let half = call
            .epilogue
            .is_some_and(|e| e.fused.loads.iter().any(|l| l.input == e.product && l.dtype != DType::F32));
        if half || chain.as_ref().is_some_and(|p| p.half) {
            return Err(Declined::because("the epilogue is not a chain from an f32 product to f32"));
        }
        Ok(chain)
    }

    /// Like [`EpilogueChain::new`], but the product and the chain's result may be bf16 or f16. This is for
    /// kernels that call [`BoundChain::run_into`], or round the result themselves. The chain reads f32 sums,
    /// which it does not round to the product's type.
    pub(crate) fn or_half(
        call: &CallForm<'_>,
        own: usize,
        columns: usize,
    ) -> Result<Option<EpilogueChain>, Declined> {
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
        if f.reduced > 0 || out.reduce.is_some() || !float(out.dtype) || f.body.len() > MAX_INSTRUCTIONS {
            return no("is not a short chain of f32, bf16 or f16");
        }
        let [result] = call.outputs else { return no("has several results") };
        let points = f.space.iter().product::<usize>();
        if out.view.offset != 0 || !dense(&out.view.strides) || columns == 0 {
            return no("does not store its result densely");
        }
        // The kernel runs the chain over the elements of its result, in rows of `columns`.
        if !reach::is_countable(&f.space)
            || points != result.view.numel()
            || !points.is_multiple_of(columns)
            || out.dtype != result.dtype
        {
            return no("has another shape or type than the result");
        }
        if !well_formed(f) {
            return no("uses a value before it is computed, or as another type");
        }
        // Short runs along the last axis are slower than a separate kernel.
        if f.space.last().is_none_or(|n| n % columns != 0 && *n < MIN_RUN) {
            return no("has a short last axis");
        }
        // Without an explicit widening, the work after a product of f16 is that of f16, on rounded values.
        let f16_product = |place: u32| {
            matches!(f.body[place as usize].kind, InstrKind::Load(k)
                if f.loads[k as usize].input == e.product && f.loads[k as usize].dtype == DType::F16)
        };
        let widens = |i: &Instr| matches!(i.kind, InstrKind::Cast) && i.dtype == DType::F32;
        if f.body.iter().any(|i| !widens(i) && i.args.iter().any(|a| f16_product(*a))) {
            return no("reads an f16 product without widening it");
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
                        return no("reads types other than f32, bf16 and f16, or a padded view");
                    }
                    if product && (l.view.offset != 0 || !dense(&l.view.strides)) {
                        return no("does not read the product densely");
                    }
                    // The chain's other operands follow the op's own inputs, in order.
                    let place = own + l.input as usize - usize::from(l.input > e.product);
                    let fits = match product {
                        true => l.view.shape == f.space,
                        false => call.inputs.get(place).is_some_and(|o| reach::load_fits(f, l, o)),
                    };
                    if !fits {
                        return no("reads outside of an operand");
                    }
                    let seen = View { shape: f.space.clone(), ..l.view.clone() };
                    let rows = f.space.iter().product::<usize>() / columns;
                    let steps = seen.reshape(&[rows, columns]).map(|v| (v.strides[0], v.strides[1]));
                    Step::Load(Load {
                        steps,
                        buffer: (!product).then_some(place),
                        dtype: l.dtype,
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
                    _ => return no("has a parameter that is not f32 or bf16"),
                },
                InstrKind::Op(op) => Step::Op(op, [at(0), at(1), at(2)]),
                InstrKind::Cast if float(i.dtype) && float(f.body[at(0)].dtype) => {
                    // Do not round here if the value is only stored, because storing rounds it.
                    let last = place == out.value as usize && out.dtype == i.dtype && !read_again(f, place);
                    match i.dtype {
                        DType::BF16 if !last => Step::Round(at(0)),
                        DType::F16 if !last => return no("rounds to f16 before its result"),
                        _ => Step::Same(at(0)),
                    }
                }
                _ => return no("has casts of types other than f32, bf16 and f16, or indices"),
            });
        }
        let half = out.dtype != DType::F32;
        Ok(Some(EpilogueChain { steps, result: out.value as usize, columns, args, half }))
    }

    /// Compiles the epilogue of a product of integers, whose sums are i32. The chain may use these sums only
    /// by converting them to f32. The kernel does this conversion before it calls [`BoundChain::run_rows`].
    /// `None` if the call has no epilogue.
    pub(crate) fn of_sums(
        call: &CallForm<'_>,
        own: usize,
        columns: usize,
    ) -> Result<Option<EpilogueChain>, Declined> {
        let Some(e) = call.epilogue else { return Ok(None) };
        let mut fused = e.fused.clone();
        for l in fused.loads.iter_mut().filter(|l| l.input == e.product) {
            if l.dtype != DType::I32 {
                return Err(Declined::because("the epilogue reads another type than the i32 sums"));
            }
            l.dtype = DType::F32;
        }
        // The cast that follows such a load is now a cast from f32 to f32. Arithmetic on i32 is declined
        // because of its type.
        for i in &mut fused.body {
            if let InstrKind::Load(k) = i.kind
                && fused.loads[k as usize].input == e.product
            {
                i.dtype = DType::F32;
            }
        }
        let e = Epilogue { fused: &fused, ..e };
        EpilogueChain::new(&CallForm { epilogue: Some(e), ..*call }, own, columns)
    }

    /// Runs the chain over a part of the result, in blocks.
    ///
    /// # Safety
    /// The operands of the call are bound in `r`; the part's sums and destination are valid and used by the
    /// calling thread only.
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
                    // SAFETY: row `i` and column `j` lie in the part.
                    c: unsafe { p.c.add(i * p.rs + j) },
                    rs: p.rs,
                    to: p.to.at(i, j),
                };
                // SAFETY: the smaller part lies in `p`, whose sums and destination the contract of `run`
                // makes valid.
                unsafe { self.block(isa, r, part) };
            }
        }
    }

    /// Runs the chain over a part of at most [`BLOCK`] elements.
    ///
    /// # Safety
    /// The contract of `EpilogueChain::run`.
    unsafe fn block(&self, isa: Isa, r: &Run<'_>, p: Part) {
        let n = p.rows * p.cols;
        let whole = p.rows == 1 || p.rs == p.cols;
        let mut blocks: [std::mem::MaybeUninit<Block>; MAX_INSTRUCTIONS] =
            [const { std::mem::MaybeUninit::uninit() }; MAX_INSTRUCTIONS];
        let mut regs: [*const u8; MAX_INSTRUCTIONS] = [std::ptr::null(); MAX_INSTRUCTIONS];
        for (k, step) in self.steps.iter().enumerate() {
            let own = blocks[k].as_mut_ptr() as *mut f32;
            regs[k] = match step {
                Step::Load(l) => {
                    // SAFETY: the buffers of `r` are the call's operands, which the kernel checked against
                    // its views; the block has room for `n <= BLOCK` floats.
                    unsafe {
                        match l.buffer {
                            None if whole => p.c as *const u8,
                            None => {
                                p.gather(own);
                                own as *const u8
                            }
                            Some(b) => {
                                let (from, columns) = (r.bufs[b].ptr, self.columns);
                                match l.dtype {
                                    DType::BF16 => l.part(isa, from as *const bf16, &p, columns, own),
                                    DType::F16 => l.part(isa, from as *const f16, &p, columns, own),
                                    _ => l.part(isa, from as *const f32, &p, columns, own),
                                }
                            }
                        }
                    }
                }
                Step::Param(p) => {
                    let v = match p {
                        Param::Literal(s) => *s,
                        // The index is in range, because `CpuKernel::run` checks the number of arguments.
                        Param::Arg(a) => r.args[*a as usize],
                    };
                    // SAFETY: the block has room for `n <= BLOCK` floats.
                    unsafe { std::slice::from_raw_parts_mut(own, n).fill(v.as_f64() as f32) };
                    own as *const u8
                }
                Step::Same(of) => regs[*of],
                Step::Round(of) => {
                    // SAFETY: the other instruction's value has `n` floats, and `half` and this block have
                    // room for `n`.
                    unsafe {
                        let (from, mut half) = (regs[*of] as *const f32, [bf16::ZERO; BLOCK]);
                        round_rows(isa, 1, n, (from, 0), (half.as_mut_ptr(), 0));
                        widen(isa, half.as_ptr(), n, own);
                    }
                    own as *const u8
                }
                Step::Op(op, a) => {
                    let x = a.map(|i| regs[i.min(k)]);
                    // If an op has fewer than three operands, the first one is passed in place of the missing
                    // ones, which the op ignores.
                    let x = x.map(|p| if p.is_null() { regs[a[0]] } else { p });
                    // SAFETY: earlier instructions computed the operands, which hold `n` f32 values. The
                    // block of this instruction is none of them.
                    unsafe { self.apply(isa, *op, n, own, x) };
                    own as *const u8
                }
            };
        }
        let from = regs[self.result] as *const f32;
        match p.to {
            // SAFETY: the result has `n` floats without gaps; the destination rows are valid and are not a
            // block.
            Target::Bf16(to, rs) => unsafe {
                round_rows(isa, p.rows, p.cols, (from, p.cols as isize), (to, rs));
            },
            Target::F32(to, rs) => {
                for i in 0..p.rows {
                    // SAFETY: row `i` of the result and of the destination is valid. If they are the same
                    // memory, nothing is copied. Otherwise they do not overlap.
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

impl EpilogueChain {
    /// Applies one op.
    ///
    /// # Safety
    /// The contract of [`apply`] for f32: each pointer of `x` has `n` readable floats, `to` has room for `n`.
    #[inline]
    unsafe fn apply(&self, isa: Isa, op: ScalarOp, n: usize, to: *mut f32, x: [*const u8; 3]) {
        // About 12 correct bits suffice for a result that is rounded to bf16.
        #[cfg(target_arch = "x86_64")]
        if self.half && op == ScalarOp::Gelu && isa == Isa::Avx512 {
            // SAFETY: `x[0]` and `to` are valid for `n` floats by contract; `isa` includes AVX-512, so it is
            // available.
            return unsafe { crate::cpu::vmath512::gelu_low(n, x[0] as *const f32, to) };
        }
        // SAFETY: `EpilogueChain::apply` has the contract of `apply` for f32.
        unsafe { apply(isa, op, DType::F32, n, to as *mut u8, x) }
    }
}

/// Whether another instruction reads the value of instruction `place`.
fn read_again(f: &Fused, place: usize) -> bool {
    f.body.iter().any(|i| i.args.iter().any(|a| *a as usize == place))
}

impl Target {
    /// The destination `i` rows and `j` columns further on.
    fn at(self, i: usize, j: usize) -> Target {
        match self {
            Target::F32(p, rs) => Target::F32(p.wrapping_offset(i as isize * rs).wrapping_add(j), rs),
            Target::Bf16(p, rs) => Target::Bf16(p.wrapping_offset(i as isize * rs).wrapping_add(j), rs),
        }
    }
}

impl BoundChain {
    /// Binds a chain to the buffers of a run. If `chain` is `None`, the result does nothing.
    ///
    /// # Safety
    /// `chain` and `r` outlive every use of the result and its copies.
    pub(crate) unsafe fn new(chain: Option<&EpilogueChain>, r: &Run<'_>) -> BoundChain {
        BoundChain(chain.map(|p| (SharedConst(p), SharedConst(std::ptr::from_ref(r).cast()), 0)))
    }

    /// The same chain for a part of the result that begins `rows` rows further down.
    pub(crate) fn below(self, rows: usize) -> BoundChain {
        BoundChain(self.0.map(|(p, r, at)| (p, r, at + rows)))
    }

    pub(crate) fn is_some(&self) -> bool {
        self.0.is_some()
    }

    /// Runs the chain over columns `col..col + n` of a row, whose sums are at `c`.
    ///
    /// # Safety
    /// `n` floats at `c` hold these sums and are used by the calling thread only.
    #[inline]
    pub(crate) unsafe fn run(&self, isa: Isa, row: usize, col: usize, n: usize, c: *mut f32) {
        // SAFETY: `run` has the contract of `run_rows` for one row.
        unsafe { self.run_rows(isa, (row, 1), (col, n), c, n) }
    }

    /// Runs the chain over rows and columns, each given as (first, count), whose sums are at `c` with `rs`
    /// elements from row to row.
    ///
    /// # Safety
    /// `cols.1` floats of each of the `rows.1` rows at `c` hold these sums and are used by the calling thread
    /// only.
    #[inline]
    pub(crate) unsafe fn run_rows(
        &self,
        isa: Isa,
        rows: (usize, usize),
        cols: (usize, usize),
        c: *mut f32,
        rs: usize,
    ) {
        // SAFETY: `run_rows` gives valid rows at `c`, which are also the destination.
        unsafe { self.run_into(isa, rows, cols, c, rs, Target::F32(c, rs as isize)) }
    }

    /// Like [`BoundChain::run_rows`], but stores the result at `to`, which may be the sums themselves.
    ///
    /// # Safety
    /// The contract of [`BoundChain::run_rows`]; the rows at `to` are writable, used by the calling thread
    /// only, and of the chain's result type.
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
            // SAFETY: the contract of `new` keeps the chain and the run alive; `run_into` gives valid rows.
            unsafe { (*p.get()).run(isa, &*r.get(), part) }
        }
    }
}

/// Runs the chain over a whole f32 result of `rows` rows, for kernels that do not call it on parts.
///
/// # Safety
/// The operands of the call are bound in `r`; `c` has `rows` rows of `columns` floats, which nothing else
/// uses.
pub(crate) unsafe fn run_all(chain: Option<&EpilogueChain>, r: &Run<'_>, rows: usize, c: *mut f32) {
    let Some(p) = chain else { return };
    let c = SharedMut(c);
    r.team.ranges(rows, (GRAIN / p.columns).max(1), &|a, b| {
        let (cols, c) = (p.columns, c.get().wrapping_add(a * p.columns));
        let to = Target::F32(c, cols as isize);
        // SAFETY: rows `a..b` lie in the result at `c`, and ranges are disjoint.
        unsafe { p.run(r.isa, r, Part { row: a, rows: b - a, col: 0, cols, c, rs: cols, to }) };
    });
}
