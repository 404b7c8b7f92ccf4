//! Matrix multiplication in f32: the library calls for it, the choice of the algorithm, and the packing of
//! operands.
//!
//! Products with many rows and columns run on packed panels (`panels.rs`); products with few rows or columns
//! read their operands unpacked ([`super::gemv`]). f16 and bf16 are widened to f32 while they are packed or
//! loaded. K is cut into blocks that depend on K alone and is never split among threads, so results do not
//! depend on the number of threads.

use super::gemv;
use super::matrix::Product;
pub use super::matrix::{Batch, Epilogue, Gemm, Mat, MatMut};
use super::panels::{Left, SERIAL, gemm_panels, inline_floats, panels_inline};
use crate::Declined;
use crate::cpu::library::epilogue::{BoundChain, EpilogueChain, run_all};
use crate::cpu::library::simd::{Simd, Sizes, Storage, dispatch_simd};
use crate::cpu::library::{CpuKernel, Run};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use crate::library_call::CallForm;
use crate::reach;
use halcyon_ir::fused::AffineActivation;
use halcyon_ir::layout::View;
use halcyon_ir::ops::element_wise::ScalarOp;
use halcyon_ir::{DType, target};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The kernel of a product with f32 operands of any strides and an f32 result.
pub(in crate::cpu::library) fn matmul_f32(
    isa: Isa,
    call: &CallForm<'_>,
    p: Product,
) -> Result<CpuKernel, Declined> {
    let is_single = p.batch == 1 && p.outer.is_empty();
    let stored = match &call.epilogue {
        Some(e) if is_single && p.k > 0 => StoredEpilogue::of(call, e, p.n),
        _ => None,
    };
    let chain = if stored.is_some() { None } else { EpilogueChain::new(call, 2, p.n)? };
    let stored = stored.unwrap_or_default();
    if let Some(which) = call.packed {
        return matmul_packed(isa, call, p, which, (stored, chain));
    }
    let name = if p.m.min(p.n) <= gemv::ROWS { "gemv" } else { "gemm" };
    let (out, numel) = (call.inputs.len(), call.outputs[0].view.numel());
    let (rows, args) = (numel / p.n.max(1), chain.as_ref().map_or(0, |p| p.args));
    let kernel = CpuKernel::new(format!("cpu.{name}.{}", isa.name()), call, move |r| {
        let (team, isa, c) = (r.team, r.isa, r.bufs[out].ptr as *mut f32);
        if p.k == 0 {
            // SAFETY: `CpuKernel::run` has checked that the output buffer is writable and holds the dense
            // view, `numel` floats. It has also checked the buffers of the chain's operands.
            unsafe {
                std::ptr::write_bytes(c, 0, numel);
                run_all(chain.as_ref(), r, rows, c);
            }
            return;
        }
        let (a, b) = p.mats::<f32>(r);
        if is_single {
            let by_panels = by_panels(p.m, p.n, &a, &b);
            // SAFETY: `CpuKernel::run` has checked the buffers, and that the output shares no buffer with an
            // input. The closure owns the chain and `r` holds the chain's operands; both outlive this call.
            unsafe {
                let on_the_way = BoundChain::new(chain.as_ref().filter(|_| by_panels), r);
                let epilogue = Epilogue { chain: on_the_way, ..stored.bind(r) };
                gemm(team, isa, &Gemm::new(p.size(), a, b, MatMut::rows(c, p.n)).with(epilogue));
                run_all(chain.as_ref().filter(|_| !by_panels), r, rows, c);
            }
            return;
        }
        p.groups(|x, y, z| {
            let g = Gemm::new(p.size(), a.offset(x), b.offset(y), MatMut::rows(c.wrapping_offset(z), p.n));
            // SAFETY: `CpuKernel::run` has checked that the views lie in their buffers and that the output
            // shares no buffer with an input. The output is dense, so the results of the products do not
            // overlap.
            unsafe {
                match p.batch {
                    1 => gemm(team, isa, &g),
                    _ => gemm_batched(team, isa, p.all(), &g),
                }
            }
        });
        // SAFETY: `CpuKernel::run` has checked the buffers of the chain's operands and the dense output,
        // `rows` by `p.n`, which the products have written.
        unsafe { run_all(chain.as_ref(), r, rows, c) };
    })?;
    Ok(kernel.with_args(args))
}

/// An f32 product whose right operand is packed once, in the layout that [`gemm`] uses when it packs the
/// operand for each product.
fn matmul_packed(
    isa: Isa,
    call: &CallForm<'_>,
    p: Product,
    which: usize,
    (stored, chain): (StoredEpilogue, Option<EpilogueChain>),
) -> Result<CpuKernel, Declined> {
    let (m, n, k) = (p.m, p.n, p.k);
    let rank = p.a.rank();
    let strides = |v: &View| (v.strides[rank - 2], v.strides[rank - 1]);
    let (sa, sb) = (strides(&p.a), strides(&p.b));
    let mat = |(rs, cs): (isize, isize)| Mat::<f32> { ptr: std::ptr::null(), rs, cs };
    if which != 1 || k == 0 {
        return Err(Declined::because("only the right operand of an f32 product with K > 0 can be packed"));
    }
    if p.batch != 1 || !p.outer.is_empty() || !by_panels(m, n, &mat(sa), &mat(sb)) {
        return Err(Declined::because("this product reads its operands unpacked"));
    }
    let shape = PackShape::b(isa, k, n);
    let offset = p.b.offset;
    let key = format!("gemm.b {shape:?} {sb:?} {offset}");
    let (out, args) = (call.inputs.len(), chain.as_ref().map_or(0, |p| p.args));
    let kernel = CpuKernel::new(format!("cpu.gemm.{}.packed", isa.name()), call, move |r| {
        let a = Mat { ptr: r.ptr::<f32>(0, &p.a), rs: sa.0, cs: sa.1 };
        let c = MatMut::rows(r.bufs[out].ptr as *mut f32, n);
        // SAFETY: `CpuKernel::run` has checked that the left operand and the result lie in their buffers and
        // that the output shares no buffer with an input. Input 1 is a buffer that `pack` has written. The
        // closure owns the chain and `r` holds the chain's operands; both outlive this call.
        unsafe {
            let b = Packed::new(shape, r.bufs[1].ptr as *const f32);
            let epi = Epilogue { chain: BoundChain::new(chain.as_ref(), r), ..stored.bind(r) };
            gemm_packed(r.team, &Gemm::new((m, n, k), a, &b, c).with(epi));
        }
    })?;
    Ok(kernel.with_args(args).with_packed(1, shape.floats(), key, move |team, from, to| {
        let b = Mat { ptr: (from as *const f32).wrapping_offset(offset), rs: sb.0, cs: sb.1 };
        // SAFETY: `CpuKernel::pack` has checked that the view lies in the constant, and that `to` has room
        // for `shape.floats()` floats.
        unsafe { shape.pack_b(Some(team), b, to as *mut f32) }
    }))
}

/// An epilogue that the micro-kernels apply while they store the result: a bias per column, ReLU, or both.
#[derive(Clone, Copy, Debug, Default)]
struct StoredEpilogue {
    /// Index of the buffer of the bias, and offset of its first element.
    bias: Option<(usize, isize)>,
    relu: bool,
}

impl StoredEpilogue {
    /// The epilogue `e` of a product with `n` columns. `None` if the epilogue has another part or another
    /// type; a chain then computes the epilogue.
    fn of(call: &CallForm<'_>, e: &target::Epilogue<'_>, n: usize) -> Option<StoredEpilogue> {
        let rows = call.outputs[0].view.numel() / n.max(1);
        let a = e.fused.as_affine(e.product, &[rows, n], &[1]).ok()?;
        if [a.product, a.compute, a.out] != [DType::F32; 3] || a.scale.is_some() || a.residual.is_some() {
            return None;
        }
        let relu = match a.activation {
            None => false,
            Some(AffineActivation::Function(ScalarOp::Relu)) => true,
            Some(_) => return None,
        };
        let Some(k) = a.bias else { return Some(StoredEpilogue { bias: None, relu }) };
        let l = &e.fused.loads[k];
        let input = call.epilogue_input(e, l);
        if l.dtype != DType::F32 || !reach::load_fits(e.fused, l, call.inputs.get(input)?) {
            return None;
        }
        Some(StoredEpilogue { bias: Some((input, l.view.offset)), relu })
    }

    fn bind(&self, r: &Run<'_>) -> Epilogue {
        let bias = self.bias.map(|(k, at)| (r.bufs[k].ptr as *const f32).wrapping_offset(at));
        let none = Epilogue::default();
        Epilogue { bias_col: bias.map_or(none.bias_col, SharedConst), relu: self.relu, ..none }
    }
}

/// `C = act(alpha A B + beta C + bias)` in f32: `A` is m x k, `B` is k x n, with any strides. A and B may be
/// f32, f16 or bf16. The epilogue's chain is applied only if [`by_panels`] holds; otherwise the caller runs
/// it afterwards.
///
/// Sums are in f32, in an order that depends only on shape, strides and instruction set.
///
/// # Safety
/// Every element of A, B and the biases is readable, and every element of C writable (also readable unless
/// beta is 0). C overlaps neither A nor B, and its elements do not overlap each other. If the epilogue has a
/// chain, its operands are bound to buffers that cover their views.
pub unsafe fn gemm<A: PackElem, B: PackElem>(team: &Team, isa: Isa, g: &Gemm<Mat<A>, Mat<B>>) {
    if g.m == 0 || g.n == 0 {
        return;
    }
    // SAFETY: the three kernels have the contract of `gemm`: readable A, B and biases, a writable C that
    // overlaps neither A nor B, and a bound chain. Transposing swaps strides and touches the same elements.
    unsafe {
        match Form::of(g.m, g.n, &g.a, &g.b) {
            Form::Rows => gemv::few_rows(team, isa, g),
            Form::Columns => gemv::few_rows(team, isa, &g.t()),
            Form::Panels => gemm_panels(team, isa, &g.with_a(&Left::Plain(g.a)).with_b(&g.b)),
        }
    }
}

/// Whether [`gemm`] packs panels for this product. If so, packing the right operand beforehand gives the same
/// results and saves work.
pub fn by_panels<A, B>(m: usize, n: usize, a: &Mat<A>, b: &Mat<B>) -> bool {
    Form::of(m, n, a, b) == Form::Panels
}

/// The algorithm of a product. It depends on shape and strides alone, so results do not depend on the number
/// of threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// Few rows.
    Rows,
    /// Few columns: the transposed product has few rows.
    Columns,
    Panels,
}

impl Form {
    pub(crate) fn of<A, B>(m: usize, n: usize, a: &Mat<A>, b: &Mat<B>) -> Form {
        let (rows, columns) = (has_few_rows(m, b), has_few_rows(n, &a.t()));
        match (rows, columns) {
            (true, true) if m > n => Form::Columns,
            (true, _) => Form::Rows,
            (_, true) => Form::Columns,
            _ => Form::Panels,
        }
    }
}

/// Whether [`gemv`] takes a product of `m` rows with this right operand.
pub(crate) fn has_few_rows<T>(m: usize, b: &Mat<T>) -> bool {
    m <= gemv::ROWS && (b.cs == 1 || b.rs == 1)
}

/// Floats of scratch memory that [`gemm_inline`] needs.
fn inline_floats_of<A: Storage, B>(isa: Isa, g: &Gemm<Mat<A>, Mat<B>>) -> usize {
    let (m, n, k) = g.size();
    let floats = match Form::of(m, n, &g.a, &g.b) {
        Form::Rows => gemv::item_floats(m, n, k),
        Form::Columns => gemv::item_floats(n, m, k),
        Form::Panels => inline_floats(isa, m, n, k, A::IS_F32 && g.a.cs == 1),
    };
    floats.next_multiple_of(1024)
}

/// Floats of scratch memory that suffice for [`gemm_inline`] with operands of any strides.
pub(crate) fn inline_floats_at_most(isa: Isa, (m, n, k): (usize, usize, usize)) -> usize {
    let few = gemv::item_floats(m, n, k).max(gemv::item_floats(n, m, k));
    let panels = inline_floats(isa, m, n, k, true).max(inline_floats(isa, m, n, k, false));
    few.max(panels).next_multiple_of(1024)
}

/// [`gemm`] on the calling thread, with the same results.
///
/// # Safety
/// The contract of [`gemm`]; `buf` is writable for [`inline_floats_of`] or [`inline_floats_at_most`] floats,
/// and no other thread uses it.
pub(crate) unsafe fn gemm_inline<A: Storage, B: Storage>(isa: Isa, g: &Gemm<Mat<A>, Mat<B>>, buf: *mut f32) {
    // SAFETY: `gemm_inline` has the contract of `gemm`, which is also the contract of the three functions,
    // and `buf` has at least the size that `inline_floats_of` computes for the same form.
    unsafe {
        match Form::of(g.m, g.n, &g.a, &g.b) {
            Form::Rows => gemv::few_rows_item(isa, g, buf),
            Form::Columns => gemv::few_rows_item(isa, &g.t(), buf),
            Form::Panels => panels_inline(isa, &g.with_a(&Left::Plain(g.a)).with_b(&g.b), buf),
        }
    }
}

/// [`gemm`] with the right operand packed by [`PackShape::pack_b`].
///
/// # Safety
/// The contract of [`gemm`]; the memory of the packed operand is still readable.
///
/// # Panics
/// If the right operand was packed for another shape or as a left operand, or if the CPU lacks its
/// instruction set.
pub unsafe fn gemm_packed<A: PackElem>(team: &Team, g: &Gemm<Mat<A>, &Packed>) {
    let isa = g.b.shape.isa;
    assert!(g.b.shape == PackShape::b(isa, g.k, g.n), "the operand was packed for another product");
    if g.m == 0 || g.n == 0 {
        return;
    }
    // SAFETY: `gemm_packed` requires readable A and biases and a writable C; the assertion checked that B is
    // a packed `k x n` right operand.
    unsafe { gemm_panels(team, isa, &g.with_a(&Left::Plain(g.a))) }
}

/// [`gemm`] with the left operand packed by [`PackShape::pack_a`].
///
/// # Safety
/// The contract of [`gemm`]; the memory of the packed operand is still readable.
///
/// # Panics
/// If the left operand was packed for another shape or as a right operand, or if the CPU lacks its
/// instruction set.
pub unsafe fn gemm_packed_a<B: PackElem>(team: &Team, g: &Gemm<&Packed, Mat<B>>) {
    let isa = g.a.shape.isa;
    assert!(g.a.shape == PackShape::a(isa, g.m, g.k), "the operand was packed for another product");
    if g.m == 0 || g.n == 0 {
        return;
    }
    // SAFETY: `gemm_packed_a` requires readable B and biases and a writable C; the assertion checked that A
    // is a packed `m x k` left operand.
    unsafe { gemm_panels(team, isa, &g.with_a(&Left::<f32>::Packed(*g.a)).with_b(&g.b)) }
}

/// Computes the products of a batch. `g` is the first of them.
///
/// # Safety
/// The contract of [`gemm`] for every product; the results do not overlap.
pub unsafe fn gemm_batched<A: PackElem, B: PackElem>(
    team: &Team,
    isa: Isa,
    batch: Batch,
    g: &Gemm<Mat<A>, Mat<B>>,
) {
    let count = batch.count;
    if g.m == 0 || g.n == 0 || count == 0 {
        return;
    }
    let work = g.work();
    // If the products are large, or if there are fewer products than threads, the threads share each product.
    // Otherwise each thread computes whole products.
    if count < team.threads() || work > 64 << 20 {
        for i in 0..count {
            // SAFETY: `gemm_batched` requires readable A, B and biases and a writable C for product
            // `i < count`.
            unsafe { gemm(team, isa, &batch.item(g, i)) };
        }
        return;
    }
    let threads = team.threads();
    let each = inline_floats_of(isa, g);
    let scratch = team.scratch(each * threads);
    let buf = SharedMut(scratch.ptr());
    let groups = if work.saturating_mul(count) < SERIAL { 1 } else { count.min(threads * 8) };
    let next = AtomicUsize::new(0);
    team.run_with(groups, &|worker, _| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            // SAFETY: `gemm_batched` requires readable A, B and biases and a writable C for product
            // `i < count`; each thread uses its own `each` floats of the scratch memory.
            unsafe { gemm_inline(isa, &batch.item(g, i), buf.get().add(worker * each)) };
        }
    });
}

/// For all `k < kc`: `dst[k * width + r]` becomes `src[r * rs + k * ks]` for `r < rows`, and 0 for
/// `rows <= r < width`.
///
/// # Safety
/// `src[r * rs + k * ks]` is readable for `r < rows`, `k < kc`; `dst` is writable for `width * kc` floats and
/// overlaps no source; `rows <= width`. The calling function is compiled for the instruction set of `S`.
#[inline(always)]
pub(crate) unsafe fn pack<S: Simd, T: Storage>(
    src: *const T,
    rs: isize,
    ks: isize,
    rows: usize,
    width: usize,
    kc: usize,
    dst: *mut f32,
) {
    // SAFETY: `pack` requires that `src` is readable for `r < rows`, `k < kc`, and that `dst` has room for
    // `r < width`, `k < kc`. Reads and writes stay within these ranges; partial loads and stores access only
    // `rows - r` lanes.
    unsafe {
        if rows < width {
            for k in 0..kc {
                for r in rows..width {
                    *dst.add(k * width + r) = 0.0;
                }
            }
        }
        if rs == 1 {
            for k in 0..kc {
                let (s, d) = (src.offset(k as isize * ks), dst.add(k * width));
                let mut r = 0;
                while r + S::W <= rows {
                    S::store(d.add(r), T::load::<S>(s.add(r)));
                    r += S::W;
                }
                if r < rows {
                    S::store_part(d.add(r), T::load_part::<S>(s.add(r), rows - r), rows - r);
                }
            }
        } else if ks == 1 && T::IS_F32 {
            let src = src as *const f32;
            let mut r = 0;
            while r < rows {
                let n = (rows - r).min(S::W);
                S::transpose(src.offset(r as isize * rs), rs, n, kc, dst.add(r), width);
                r += n;
            }
        } else {
            for r in 0..rows {
                let s = src.offset(r as isize * rs);
                for k in 0..kc {
                    *dst.add(k * width + r) = (*s.offset(k as isize * ks)).widen();
                }
            }
        }
    }
}

/// `dst[r * kc + k] = src[r * rs + k * ks]` for `r < rows`, `k < kc`.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; the elements of `src` are readable for `r < rows`,
/// `k < kc`; `dst` has room for `rows * kc` floats and overlaps nothing.
#[inline(always)]
unsafe fn pack_rows<S: Simd, T: Storage>(
    src: *const T,
    rs: isize,
    ks: isize,
    rows: usize,
    kc: usize,
    dst: *mut f32,
) {
    if kc == 0 {
        return;
    }
    // SAFETY: all accesses have `r < rows` and `k < kc`. `pack_rows` requires that `src` is readable and that
    // `dst` has room for all such `r` and `k`.
    unsafe {
        if rs == 1 && T::IS_F32 {
            let src = src as *const f32;
            let mut k = 0;
            while k < kc {
                let n = (kc - k).min(S::W);
                S::transpose(src.offset(k as isize * ks), ks, n, rows, dst.add(k), kc);
                k += n;
            }
            return;
        }
        for r in 0..rows {
            let (s, d) = (src.offset(r as isize * rs), dst.add(r * kc));
            if ks == 1 {
                T::widen_slice(std::slice::from_raw_parts(s, kc), std::slice::from_raw_parts_mut(d, kc));
                continue;
            }
            for k in 0..kc {
                *d.add(k) = (*s.offset(k as isize * ks)).widen();
            }
        }
    }
}

/// Upper limit for the length of a K block. K is cut evenly into as few blocks as this limit permits.
pub(super) const KC: usize = 512;

pub(crate) fn k_blocks(k: usize) -> usize {
    k.div_ceil(KC).max(1)
}
pub(crate) fn k_block(k: usize, i: usize) -> (usize, usize) {
    let n = k_blocks(k);
    (k * i / n, k * (i + 1) / n)
}
/// The length of the longest K block of a product with this K.
pub(crate) fn kc_max(k: usize) -> usize {
    k.div_ceil(k_blocks(k))
}

/// A source of packed panels of B.
pub(crate) trait Panels: Sync {
    /// Packs columns `j .. j + cols` and K elements `k0 .. k0 + kc` as `dst[k * nr + c]`, with zeros in
    /// columns `cols..nr`. `nr` is a whole number of vectors.
    ///
    /// # Safety
    /// The elements are readable, `dst` is writable for `nr * kc` floats, `cols <= nr`, and the calling
    /// function is compiled for the instruction set of `S`.
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32);
    /// Packs columns `j..end` as consecutive panels. The last panel has only as many vectors as its columns
    /// need.
    ///
    /// # Safety
    /// The contract of [`Panels::pack`] for every panel. `dst` is writable for `columns * kc` floats, where
    /// `columns` is `end - j` rounded up to whole vectors.
    #[inline(always)]
    unsafe fn pack_chunk<S: Simd>(&self, k0: usize, kc: usize, j: usize, end: usize, dst: *mut f32) {
        let most = S::VECS * S::W;
        for (q, j) in (j..end).step_by(most).enumerate() {
            let cols = (end - j).min(most);
            // SAFETY: this function's contract covers the columns `j .. j + cols` and the panel's part of
            // `dst`, which starts after `q` full panels of `most * kc` floats.
            unsafe { self.pack::<S>(k0, kc, j, cols, cols.next_multiple_of(S::W), dst.add(q * most * kc)) };
        }
    }
    /// The panel at column `j` if B is already packed; otherwise null.
    fn ready(&self, _k0: usize, _kc: usize, _j: usize) -> *const f32 {
        std::ptr::null()
    }
}

impl<T: Storage> Panels for Mat<T> {
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) {
        // SAFETY: `Panels::pack` requires that the matrix is readable in columns `j .. j + cols`, rows
        // `k0 .. k0 + kc`, and `dst` holds `nr * kc` floats.
        unsafe {
            let p = self.ptr.offset(k0 as isize * self.rs + j as isize * self.cs);
            pack::<S, T>(p, self.cs, self.rs, cols, nr, kc, dst)
        }
    }

    #[inline(always)]
    unsafe fn pack_chunk<S: Simd>(&self, k0: usize, kc: usize, j: usize, end: usize, dst: *mut f32) {
        let nr = S::VECS * S::W;
        let full = if self.cs == 1 { (end - j) / nr } else { 0 };
        // SAFETY: `Panels::pack_chunk` requires that the matrix is readable in columns `j..end`, rows
        // `k0 .. k0 + kc`; panel `q` starts at `q * nr * kc` of `dst`. Full panels read
        // `full * nr <= end - j` columns, contiguous as `cs == 1`.
        unsafe {
            // Read each row of B across all full panels, because hardware prefetchers work better on longer
            // contiguous reads.
            for k in 0..if full > 0 { kc } else { 0 } {
                let s = self.ptr.offset((k0 + k) as isize * self.rs).add(j);
                for q in 0..full {
                    for v in 0..S::VECS {
                        let at = v * S::W;
                        S::store(dst.add((q * kc + k) * nr + at), T::load::<S>(s.add(q * nr + at)));
                    }
                }
            }
            for (q, j) in (j..end).step_by(nr).enumerate().skip(full) {
                let cols = (end - j).min(nr);
                self.pack::<S>(k0, kc, j, cols, cols.next_multiple_of(S::W), dst.add(q * nr * kc));
            }
        }
    }
}

dispatch_simd! {
    /// # Safety
    /// The contract of `pack_rows` without its condition on the caller, because the dispatch checks `isa`.
    pub(crate) unsafe fn pack_rows_on[T: Storage][T](isa, src: *const T, rs: isize, ks: isize, rows: usize, kc: usize, dst: *mut f32) = pack_rows
}
dispatch_simd! {
    /// # Safety
    /// The contract of `Panels::pack_chunk` without its condition on the caller, because the dispatch checks
    /// `isa`.
    pub(crate) unsafe fn pack_columns[P: Panels][P](isa, b: &P, k0: usize, kc: usize, j: usize, end: usize, dst: *mut f32) = pack_columns_body
}
/// # Safety
/// The contract of `Panels::pack_chunk`.
#[inline(always)]
unsafe fn pack_columns_body<S: Simd, P: Panels>(
    b: &P,
    k0: usize,
    kc: usize,
    j: usize,
    end: usize,
    dst: *mut f32,
) {
    // SAFETY: `pack_columns_body` has the contract of `pack_chunk`.
    unsafe { b.pack_chunk::<S>(k0, kc, j, end, dst) }
}

/// The layout of a packed operand: one K block after another. In a block, the left operand is stored as
/// contiguous rows, the right operand as panels that are as wide as a register tile. The last panel has only
/// as many vectors as its columns need.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackShape {
    isa: Isa,
    side: Side,
    /// Rows of A or columns of B, and K.
    extent: usize,
    k: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Side {
    Rows,
    Panels,
}

/// Rows that one part of a packing job packs. For columns, the number is rounded up to whole panels.
const AT_ONCE: usize = 48;

impl PackShape {
    /// For the left operand, `m x k`.
    pub fn a(isa: Isa, m: usize, k: usize) -> PackShape {
        PackShape { isa, side: Side::Rows, extent: m, k }
    }

    /// For the right operand, `k x n`.
    pub fn b(isa: Isa, k: usize, n: usize) -> PackShape {
        PackShape { isa, side: Side::Panels, extent: n, k }
    }

    /// Floats per element of K.
    fn width(&self) -> usize {
        match self.side {
            Side::Rows => self.extent,
            Side::Panels => self.extent.next_multiple_of(crate::cpu::library::simd::lanes(self.isa)),
        }
    }

    /// Size of the packed operand in floats.
    pub fn floats(&self) -> usize {
        self.width() * self.k
    }

    /// Offset in floats of row `i`, or of the panel that starts at column `i`, in the K block
    /// `k0 .. k0 + kc`.
    fn at(&self, k0: usize, kc: usize, i: usize) -> usize {
        k0 * self.width() + i * kc
    }

    /// Packs the left operand.
    ///
    /// # Safety
    /// Every element of the `m x k` matrix is readable; `dst` is writable for [`PackShape::floats`] floats
    /// and overlaps nothing else that is in use.
    pub unsafe fn pack_a<T: PackElem>(&self, team: Option<&Team>, a: Mat<T>, dst: *mut f32) {
        debug_assert!(self.side == Side::Rows);
        let (src, rs, cs) = (SharedConst(a.ptr), a.rs, a.cs);
        self.parts(team, SharedMut(dst), &|k0, kc, i0, i1, dst| {
            // SAFETY: `pack_a` requires a readable matrix and room for all rows at `dst`; parts write
            // disjoint rows and K blocks.
            unsafe {
                let from = src.get().wrapping_offset(i0 as isize * rs + k0 as isize * cs);
                pack_rows_on(self.isa, from, rs, cs, i1 - i0, kc, dst);
            }
        });
    }

    /// Packs the right operand.
    ///
    /// # Safety
    /// Every element of the `k x n` matrix is readable; `dst` is writable for [`PackShape::floats`] floats
    /// and overlaps nothing else that is in use.
    pub unsafe fn pack_b<T: PackElem>(&self, team: Option<&Team>, b: Mat<T>, dst: *mut f32) {
        // SAFETY: `pack_b` has the contract of `pack_panels`.
        unsafe { self.pack_panels(team, &b, dst) }
    }

    /// Packs a right operand of any source.
    ///
    /// # Safety
    /// The contract of [`PackShape::pack_b`].
    pub(super) unsafe fn pack_panels<P: Panels>(&self, team: Option<&Team>, b: &P, dst: *mut f32) {
        debug_assert!(self.side == Side::Panels);
        self.parts(team, SharedMut(dst), &|k0, kc, j0, j1, dst| {
            // SAFETY: `pack_panels` requires a readable matrix and room for all panels at `dst`; parts write
            // disjoint panels and K blocks, as `parts` cuts only between panels.
            unsafe { pack_columns(self.isa, b, k0, kc, j0, j1, dst) };
        });
    }

    fn parts(
        &self,
        team: Option<&Team>,
        dst: SharedMut<f32>,
        f: &(dyn Fn(usize, usize, usize, usize, *mut f32) + Sync),
    ) {
        let each = match self.side {
            Side::Rows => AT_ONCE,
            Side::Panels => AT_ONCE.next_multiple_of(Sizes::of(self.isa).panel),
        };
        let (parts, blocks) = (self.extent.div_ceil(each), k_blocks(self.k));
        spread(team, parts * blocks, &|_, part| {
            let (k0, k1) = k_block(self.k, part % blocks);
            let i = part / blocks * each;
            let end = (i + each).min(self.extent);
            f(k0, k1 - k0, i, end, dst.get().wrapping_add(self.at(k0, k1 - k0, i)));
        });
    }
}

/// An operand packed once for many products (weights). It does not own the memory.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    shape: PackShape,
    data: SharedConst<f32>,
}

impl Packed {
    /// # Safety
    /// `data` was filled by the `pack` function of `shape` and stays readable and unchanged while the
    /// returned value is used.
    pub unsafe fn new(shape: PackShape, data: *const f32) -> Packed {
        Packed { shape, data: SharedConst(data) }
    }

    pub fn shape(&self) -> &PackShape {
        &self.shape
    }

    pub(crate) fn panel(&self, k0: usize, kc: usize, i: usize) -> *const f32 {
        self.data.get().wrapping_add(self.shape.at(k0, kc, i))
    }
}

impl Panels for Packed {
    unsafe fn pack<S: Simd>(&self, _: usize, _: usize, _: usize, _: usize, _: usize, _: *mut f32) {}
    fn ready(&self, k0: usize, kc: usize, j: usize) -> *const f32 {
        self.panel(k0, kc, j)
    }
}

/// Element types of products that are summed in f32: f32, f16 and bf16.
#[allow(private_bounds)]
pub trait PackElem: Storage {}
impl PackElem for f32 {}
impl PackElem for half::f16 {}
impl PackElem for half::bf16 {}

/// Runs `f(thread, part)` for all parts on the team, or on the calling thread if there is no team.
pub(crate) fn spread(team: Option<&Team>, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    match team {
        Some(t) => t.run_with(parts, f),
        None => (0..parts).for_each(|p| f(0, p)),
    }
}
