//! Products with weights of 4 bits: the composite `quantized_matmul`.
//!
//! Row j of the weights gives column j of the result. Blocks of 32 weights are widened in registers and
//! multiplied with the operand. The low half of a byte holds the weight of an even place, and the high half
//! holds the weight of the next, odd place. So the operand is copied first, and in each block of the copy the
//! values at even places come before those at odd places. The sum of a block is `scale Σ code x`; the
//! constant part of the weights (`-8 scale`, or the minimum) is multiplied by `Σ x`, which is computed once
//! for each row and block. Products of few rows are bound by memory. With their scales and minima, the
//! weights have less than a fifth of the bytes that f32 weights would have.
//!
//! With more than [`FEW`] rows, the weights are widened to f32 once, and the product is computed in f32.

use super::matrix::{Gemm, Mat, MatMut};
use super::product_f32::gemm;
use crate::Declined;
use crate::cpu::library::CpuKernel;
use crate::cpu::library::calls::dense;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{SharedConst, SharedMut, Team};
use crate::library_call::CallForm;
use halcyon_ir::DType;
use halcyon_ir::ops::quantize::{MIDDLE, WEIGHT_BLOCK as BLOCK};

/// The largest number of rows for which weights are widened in registers.
pub(crate) const FEW: usize = 16;
/// Bytes of a block of weights.
const BYTES: usize = BLOCK / 2;
/// Rows of the operand that share widened weights.
const ROWS: usize = 4;
/// Fewest columns of a part.
const GRAIN: usize = 16;

/// The sizes of a product: rows, columns and terms.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Size {
    fn blocks(&self) -> usize {
        self.k / BLOCK
    }

    /// Floats of the workspace: the copied operand and its sums, or the widened weights.
    pub(crate) fn workspace(&self) -> usize {
        match self.m <= FEW {
            true => self.m * (self.k + self.blocks()),
            false => self.n * self.k,
        }
    }
}

/// The weights. A weight is `scale * (code - 8)` if `minima` is null, otherwise `scale * code + minimum`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights {
    /// `[n, k / 2]`.
    pub codes: SharedConst<u8>,
    /// `[n, k / 32]`.
    pub scales: SharedConst<f32>,
    pub minima: SharedConst<f32>,
}

impl Weights {
    /// The scale of block `b`, counted over all rows, and the constant part of its weights.
    ///
    /// # Safety
    /// `b` is less than the number of blocks of all rows.
    #[inline(always)]
    unsafe fn block(&self, b: usize) -> (f32, f32) {
        // SAFETY: by contract the scales, and the minima if there are any, have an element `b`.
        unsafe {
            let scale = *self.scales.get().add(b);
            match self.minima.get().is_null() {
                true => (scale, -(MIDDLE as f32) * scale),
                false => (scale, *self.minima.get().add(b)),
            }
        }
    }
}

/// `y [m, n] = x [m, k] wᵀ`.
///
/// # Safety
/// `x` is readable for `m k` floats, the weights as [`Weights`] describes; `y` is writable for `m n` floats
/// and `work` for [`Size::workspace`] floats; neither overlaps anything else. `k` is a multiple of 32.
pub(crate) unsafe fn product(
    team: &Team,
    isa: Isa,
    s: Size,
    x: *const f32,
    w: Weights,
    y: *mut f32,
    work: *mut f32,
) {
    let (x, y, work) = (SharedConst(x), SharedMut(y), SharedMut(work));
    let (k, blocks) = (s.k, s.blocks());
    if s.m > FEW {
        team.ranges(s.n, GRAIN, &|a, b| {
            // SAFETY: the workspace has `n` rows of `k` floats; each part writes its own rows.
            unsafe { widen(isa, (a, b), k, &w, work.get()) };
        });
        let (a, b) = (Mat { ptr: x.get(), rs: k as isize, cs: 1 }, work.get() as *const f32);
        let b = Mat { ptr: b, rs: 1, cs: k as isize };
        // SAFETY: by contract A and C have the sizes of the product; B is the workspace, where all `n` rows
        // were just written.
        unsafe { gemm(team, isa, &Gemm::new((s.m, s.n, k), a, b, MatMut::rows(y.get(), s.n))) };
        return;
    }
    let sums = SharedMut(work.get().wrapping_add(s.m * k));
    for r in 0..s.m {
        // SAFETY: `r < m`, so the contract makes row `r` of the operand readable, and row `r` of its copy and
        // the sums of this row writable in `work`.
        unsafe {
            let (from, to) = (x.get().add(r * k), work.get().add(r * k));
            for b in 0..blocks {
                let mut sum = 0.0;
                for i in 0..BYTES {
                    let pair = [*from.add(b * BLOCK + 2 * i), *from.add(b * BLOCK + 2 * i + 1)];
                    *to.add(b * BLOCK + i) = pair[0];
                    *to.add(b * BLOCK + BYTES + i) = pair[1];
                    sum += pair[0] + pair[1];
                }
                *sums.get().add(r * blocks + b) = sum;
            }
        }
    }
    team.ranges(s.n, GRAIN, &|first, end| {
        // SAFETY: the loop above wrote the copy and the sums; the contract makes the weights readable; each
        // part writes its own columns.
        unsafe { columns(isa, (first, end), s, work.get(), sums.get(), &w, y.get()) };
    });
}

dispatch_simd! {
    /// Computes columns `range` of the result. `x` is the copied operand: in each block, the values at even
    /// places come before the values at odd places. `sums` has the sums of the blocks of `x`.
    ///
    /// # Safety
    /// The contract of [`product`]; `range` lies in `0..s.n`; no other thread writes these columns.
    unsafe fn columns[][](
        isa,
        range: (usize, usize),
        s: Size,
        x: *const f32,
        sums: *const f32,
        w: &Weights,
        y: *mut f32,
    ) = columns_body
}

/// # Safety
/// The contract of `columns`; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn columns_body<S: Simd>(
    range: (usize, usize),
    s: Size,
    x: *const f32,
    sums: *const f32,
    w: &Weights,
    y: *mut f32,
) {
    for j in range.0..range.1 {
        let mut r = 0;
        while r < s.m {
            // SAFETY: `r < s.m`, the match picks at most the `s.m - r` rows that are left, and by contract
            // column `j` exists.
            unsafe {
                match s.m - r {
                    1 => rows::<S, 1>(j, r, s, x, sums, w, y),
                    2 => rows::<S, 2>(j, r, s, x, sums, w, y),
                    3 => rows::<S, 3>(j, r, s, x, sums, w, y),
                    _ => rows::<S, ROWS>(j, r, s, x, sums, w, y),
                }
            }
            r += ROWS;
        }
    }
}

/// Computes rows `r .. r + R` of column `j`.
///
/// # Safety
/// The contract of `columns`; the product has these rows, and `j` is one of the columns.
#[inline(always)]
unsafe fn rows<S: Simd, const R: usize>(
    j: usize,
    r: usize,
    s: Size,
    x: *const f32,
    sums: *const f32,
    w: &Weights,
    y: *mut f32,
) {
    // SAFETY: by contract all blocks of column `j` and of rows `r .. r + R` are readable, and the results
    // writable. The loops over a block have constant bounds, so that the compiler uses vectors.
    unsafe {
        let blocks = s.blocks();
        let mut acc = [[0f32; BYTES]; R];
        let mut rest = [0f32; R];
        for b in 0..blocks {
            let code = w.codes.get().add((j * blocks + b) * BYTES).cast::<[u8; BYTES]>().read_unaligned();
            let (scale, base) = w.block(j * blocks + b);
            let (mut low, mut high) = ([0f32; BYTES], [0f32; BYTES]);
            for i in 0..BYTES {
                low[i] = f32::from(code[i] & 15) * scale;
                high[i] = f32::from(code[i] >> 4) * scale;
            }
            for i in 0..R {
                let v = x.add((r + i) * s.k + b * BLOCK).cast::<[f32; BLOCK]>().read_unaligned();
                for e in 0..BYTES {
                    acc[i][e] = match S::FMA {
                        true => high[e].mul_add(v[BYTES + e], low[e].mul_add(v[e], acc[i][e])),
                        false => acc[i][e] + low[e] * v[e] + high[e] * v[BYTES + e],
                    };
                }
                rest[i] += base * *sums.add((r + i) * blocks + b);
            }
        }
        for i in 0..R {
            let mut half = BYTES / 2;
            while half > 0 {
                for e in 0..half {
                    acc[i][e] += acc[i][e + half];
                }
                half /= 2;
            }
            *y.add((r + i) * s.n + j) = acc[i][0] + rest[i];
        }
    }
}

dispatch_simd! {
    /// Widens rows `range` of the weights to f32. `to` is the whole matrix, `[n, k]`.
    ///
    /// # Safety
    /// The weights of these rows are readable. The same rows of `to` are writable and overlap nothing else.
    unsafe fn widen[][](isa, range: (usize, usize), k: usize, w: &Weights, to: *mut f32) = widen_body
}

/// # Safety
/// The contract of `widen`; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn widen_body<S: Simd>(range: (usize, usize), k: usize, w: &Weights, to: *mut f32) {
    let blocks = k / BLOCK;
    for b in range.0 * blocks..range.1 * blocks {
        // SAFETY: by contract block `b` is readable and its 32 floats are writable.
        unsafe {
            let code = w.codes.get().add(b * BYTES).cast::<[u8; BYTES]>().read_unaligned();
            let (scale, base) = w.block(b);
            let mut v = [0f32; BLOCK];
            for i in 0..BYTES {
                v[2 * i] = f32::from(code[i] & 15) * scale + base;
                v[2 * i + 1] = f32::from(code[i] >> 4) * scale + base;
            }
            to.add(b * BLOCK).cast::<[f32; BLOCK]>().write_unaligned(v);
        }
    }
}

/// The kernel of a call of the composite `quantized_matmul`.
pub(crate) fn call(isa: Isa, call: &CallForm<'_>) -> Result<CpuKernel, Declined> {
    let no = |why: &str| Err(Declined::because(why.to_string()));
    let ([x, codes, scales, more @ ..], [y]) = (call.inputs, call.outputs) else {
        return no("an operand, codes and scales are needed");
    };
    dense(call, &(0..call.inputs.len()).collect::<Vec<_>>())?;
    let (&[n, half], Some(&k)) = (&codes.view.shape[..], x.view.shape.last()) else {
        return no("the codes must be a matrix, and the operand must not be a scalar");
    };
    let floats = [x, scales, y].into_iter().chain(more).all(|o| o.dtype == DType::F32);
    let blocks = [n, k / BLOCK];
    let per_block = [scales].into_iter().chain(more).all(|o| o.view.shape[..] == blocks);
    if !floats || codes.dtype != DType::U8 || 2 * half != k || !k.is_multiple_of(BLOCK) || !per_block {
        return no("the dtypes or the sizes of the operands are not supported");
    }
    if k == 0 || n == 0 || y.view.numel() == 0 || more.len() > 1 {
        return no("an operand is empty, or there are more than 4 operands");
    }
    let s = Size { m: y.view.numel() / n, n, k };
    if s.m * k != x.view.numel() || s.m * n != y.view.numel() {
        return no("the sizes of the operands and of the result do not match");
    }
    let views: Vec<_> = call.inputs.iter().map(|o| o.view.clone()).collect();
    let (last, name) = (call.inputs.len(), format!("cpu.quantized_matmul.int4.{}", isa.name()));
    let kernel = CpuKernel::new(name, call, move |r| {
        let scales = SharedConst(r.ptr::<f32>(2, &views[2]));
        let none = SharedConst(std::ptr::null());
        let minima = views.get(3).map_or(none, |v| SharedConst(r.ptr::<f32>(3, v)));
        let w = Weights { codes: SharedConst(r.ptr::<u8>(1, &views[1])), scales, minima };
        let (y, work) = (r.bufs[last].ptr as *mut f32, r.bufs[last + 1].ptr as *mut f32);
        // SAFETY: `CpuKernel::run` has checked that the dense operands, the output and the workspace lie in
        // their buffers, and that output and workspace share no buffer with another operand; sizes were
        // checked above.
        unsafe { product(r.team, r.isa, s, r.ptr::<f32>(0, &views[0]), w, y, work) };
    })?;
    Ok(kernel.with_workspace(s.workspace() * size_of::<f32>()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::library::testing::*;

    #[test]
    fn products_follow_f64_between_guard_pages() {
        let mut rng = Rng::new();
        for threads in [1, 3] {
            let team = Team::new(threads);
            for isa in Isa::available() {
                for _ in 0..12 {
                    let s = Size {
                        m: [1, 2, 3, 4, 5, FEW, FEW + 1, 40][rng.below(8)],
                        n: 1 + rng.below(70),
                        k: BLOCK * (1 + rng.below(5)),
                    };
                    one(&mut rng, &team, isa, s);
                }
            }
        }
    }

    fn one(rng: &mut Rng, team: &Team, isa: Isa, s: Size) {
        let side = [Side::Start, Side::End][rng.below(2)];
        let blocks = s.n * s.blocks();
        let bytes: Vec<u8> = (0..s.n * s.k / 2).map(|_| rng.below(256) as u8).collect();
        let (x, codes) = (Guarded::new(&rng.vec(s.m * s.k), side), Guarded::new(&bytes, side));
        let (scales, minima) = (Guarded::new(&rng.vec(blocks), side), Guarded::new(&rng.vec(blocks), side));
        let minimum = rng.below(2) == 0;
        let y = Guarded::new(&vec![f32::NAN; s.m * s.n], side);
        let work = Guarded::new(&vec![f32::NAN; s.workspace()], side);
        let w = Weights {
            codes: SharedConst(codes.ptr()),
            scales: SharedConst(scales.ptr()),
            minima: SharedConst(if minimum { minima.ptr() } else { std::ptr::null() }),
        };
        // SAFETY: the buffers have the sizes that `product` requires.
        unsafe { product(team, isa, s, x.ptr(), w, y.mut_ptr(), work.mut_ptr()) };
        for r in 0..s.m {
            for j in 0..s.n {
                let (mut want, mut size) = (0f64, 0f64);
                for i in 0..s.k {
                    let b = j * s.blocks() + i / BLOCK;
                    let code = bytes[(j * s.k + i) / 2] >> (4 * (i % 2)) & 15;
                    let (scale, low) = (f64::from(scales.slice()[b]), f64::from(minima.slice()[b]));
                    let v =
                        if minimum { f64::from(code) * scale + low } else { (f64::from(code) - 8.0) * scale };
                    let x = f64::from(x.slice()[r * s.k + i]);
                    want += v * x;
                    size += (f64::from(code) * scale * x).abs() + (8.0 * scale * x).abs() + (low * x).abs();
                }
                let got = f64::from(y.slice()[r * s.n + j]);
                assert!((got - want).abs() <= 1e-6 * size, "{got} for {want}: {isa:?} {s:?} {minimum}");
            }
        }
    }
}
