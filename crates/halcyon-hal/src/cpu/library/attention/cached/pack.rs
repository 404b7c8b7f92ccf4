//! Keys and values as they are kept, and the copies of them in f32 that products read.
//!
//! Keys are transposed, so that a score is a sum over features with one key per lane. Numbers in blocks of
//! Q8_0, `code * scale`, have at most 18 significant bits, so decoding them to f32 is exact.

use super::Job;
use super::block::{BlockRows, NV};
use crate::cpu::library::simd::{Simd, Storage};
use crate::cpu::team::SharedConst;
use halcyon_ir::DType;
use half::{bf16, f16};

/// A block of Q8_0: a scale in f16, and codes in i8.
const ELEMENTS: usize = 32;
const BYTES: usize = 2 + ELEMENTS;

/// A block that decodes to zeros.
static ZEROS: [u8; BYTES] = [0; BYTES];

/// The type in which keys or values are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    F32,
    F16,
    BF16,
    /// Bytes of blocks of Q8_0.
    Q8_0,
}

impl Kept {
    pub(super) fn of(dtype: DType) -> Option<Kept> {
        match dtype {
            DType::F32 => Some(Kept::F32),
            DType::F16 => Some(Kept::F16),
            DType::BF16 => Some(Kept::BF16),
            DType::U8 => Some(Kept::Q8_0),
            _ => None,
        }
    }

    /// Bytes of an element of the operand: a number, or a byte of a block.
    pub(super) fn step(self) -> isize {
        match self {
            Kept::F32 => 4,
            Kept::F16 | Kept::BF16 => 2,
            Kept::Q8_0 => 1,
        }
    }

    /// Bytes of a row of `n` numbers. Rows in blocks have whole blocks.
    pub(super) fn bytes(self, n: usize) -> usize {
        match self {
            Kept::Q8_0 => n / ELEMENTS * BYTES,
            _ => n * self.step() as usize,
        }
    }
}

/// Keys or values: dense rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub at: SharedConst<u8>,
    pub kept: Kept,
}

impl Numbers {
    /// Row `at` of `n` numbers.
    #[inline(always)]
    fn row(self, at: usize, n: usize) -> *const u8 {
        self.at.get().wrapping_add(at * self.kept.bytes(n))
    }

    /// Prefetches row `at` of `n` numbers.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set of `S`.
    #[inline(always)]
    pub(super) unsafe fn prefetch<S: Simd>(self, at: usize, n: usize) {
        /// Bytes of a cache line.
        const LINE: usize = 64;
        let row = self.row(at, n);
        for byte in (0..self.kept.bytes(n)).step_by(LINE) {
            // SAFETY: a prefetch may have any address.
            unsafe { S::prefetch(row.wrapping_add(byte) as *const f32) };
        }
    }
}

/// Copies the keys of positions `at..at + NV W` of a block to a panel, transposed: one row per feature. Keys
/// that are not seen become 0. Prefetches the values of these positions.
///
/// # Safety
/// The seen keys are readable; `to` is writable for a panel. The caller is compiled for the instruction set
/// of `S`.
#[inline(always)]
pub(super) unsafe fn pack_keys<S: Simd>(job: &Job<'_>, block: &BlockRows, at: usize, to: *mut f32) {
    let (first, end) = block.seen.all;
    // SAFETY: the contract of this function.
    unsafe {
        for j in at.max(first)..(at + NV * S::W).min(end) {
            job.operands.values.prefetch::<S>(block.at[j], job.a.dv);
        }
        match job.operands.keys.kept {
            Kept::F32 => pack_key_floats::<S, f32>(job, block, at, to),
            Kept::F16 => pack_key_floats::<S, f16>(job, block, at, to),
            Kept::BF16 => pack_key_floats::<S, bf16>(job, block, at, to),
            Kept::Q8_0 => pack_key_blocks::<S>(job, block, at, to),
        }
    }
}

/// [`pack_keys`] of floats.
///
/// # Safety
/// The contract of [`pack_keys`]; keys are kept in `T`.
#[inline(always)]
unsafe fn pack_key_floats<S: Simd, T: Storage>(job: &Job<'_>, block: &BlockRows, at: usize, to: *mut f32) {
    let (d, nr, keys) = (job.a.d, NV * S::W, job.operands.keys);
    let (first, end) = block.seen.all;
    // SAFETY: the rows of seen keys have `d` features. A panel has `nr` columns and `d` rows.
    unsafe {
        // The whole panel is written, so that tiles read no uninitialised memory.
        for j in (at..at + nr).step_by(S::W) {
            let to = to.add(j - at);
            let mut rows = [std::ptr::null::<T>(); 16];
            for i in 0..S::W {
                rows[i] = keys.row(block.at[j + i], d) as *const T;
            }
            let whole = if first <= j && j + S::W <= end { d / S::W * S::W } else { 0 };
            for k in (0..whole).step_by(S::W) {
                let mut r = [S::zero(); 16];
                for i in 0..S::W {
                    r[i] = T::load::<S>(rows[i].add(k));
                }
                S::turn(&mut r);
                for i in 0..S::W {
                    S::store(to.add((k + i) * nr), r[i]);
                }
            }
            for k in (whole..d).step_by(S::W) {
                let n = (d - k).min(S::W);
                let mut r = [S::zero(); 16];
                for i in first.max(j)..end.min(j + S::W) {
                    r[i - j] = T::load_part::<S>(rows[i - j].add(k), n);
                }
                S::turn(&mut r);
                for i in 0..n {
                    S::store(to.add((k + i) * nr), r[i]);
                }
            }
        }
    }
}

/// [`pack_keys`] of blocks.
///
/// # Safety
/// The contract of [`pack_keys`]; keys are kept in blocks.
#[inline(always)]
unsafe fn pack_key_blocks<S: Simd>(job: &Job<'_>, block: &BlockRows, at: usize, to: *mut f32) {
    let (d, nr, keys) = (job.a.d, NV * S::W, job.operands.keys);
    let (first, end) = block.seen.all;
    // SAFETY: the rows of seen keys have `d` features in whole blocks. A panel has `nr` columns and `d` rows.
    unsafe {
        for j in (at..at + nr).step_by(S::W) {
            let to = to.add(j - at);
            for b in 0..d / ELEMENTS {
                let mut codes = [std::ptr::null::<i8>(); 16];
                let mut scale = [f16::ZERO; 16];
                for i in 0..S::W {
                    let seen = first <= j + i && j + i < end;
                    let row = if seen { keys.row(block.at[j + i], d).add(b * BYTES) } else { ZEROS.as_ptr() };
                    scale[i] = scale_of(row);
                    codes[i] = row.add(2) as *const i8;
                }
                S::turn_i8(&codes, S::load_f16(scale.as_ptr()), to.add(b * ELEMENTS * nr), nr);
            }
        }
    }
}

/// The scale of the block at `p`.
///
/// # Safety
/// The block is readable.
#[inline(always)]
unsafe fn scale_of(p: *const u8) -> f16 {
    // SAFETY: a block begins with two bytes of its scale.
    f16::from_bits(u16::from_le_bytes(unsafe { *(p as *const [u8; 2]) }))
}

/// Copies the seen values of positions `from..end` of a block to panels of `NV W` features: a panel has
/// one row per position. Features past the last one become 0. Prefetches the keys of the next block.
///
/// # Safety
/// The seen values are readable; `to` is writable for [`wide`](super::wide) floats per position of
/// `from..end`. The caller is compiled for the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn pack_values<S: Simd>(
    job: &Job<'_>,
    block: &BlockRows,
    next: &BlockRows,
    (from, end): (usize, usize),
    to: *mut f32,
) {
    let within = |seen: (usize, usize)| from.max(seen.0)..end.min(seen.1);
    // SAFETY: the contract of this function.
    unsafe {
        for j in within(next.seen.all) {
            job.operands.keys.prefetch::<S>(next.at[j], job.a.d);
        }
        let rows = within(block.seen.all);
        match job.operands.values.kept {
            Kept::F32 => pack_value_floats::<S, f32>(job, block, rows, (from, end), to),
            Kept::F16 => pack_value_floats::<S, f16>(job, block, rows, (from, end), to),
            Kept::BF16 => pack_value_floats::<S, bf16>(job, block, rows, (from, end), to),
            Kept::Q8_0 => pack_value_blocks::<S>(job, block, rows, (from, end), to),
        }
    }
}

/// [`pack_values`] of the seen positions `rows`, in floats.
///
/// # Safety
/// The contract of [`pack_values`]; values are kept in `T`.
#[inline(always)]
unsafe fn pack_value_floats<S: Simd, T: Storage>(
    job: &Job<'_>,
    block: &BlockRows,
    rows: std::ops::Range<usize>,
    (from, end): (usize, usize),
    to: *mut f32,
) {
    let (dv, nr) = (job.a.dv, NV * S::W);
    let whole = dv / nr * nr;
    // SAFETY: a row has `dv` values, and panels cover `wide` features of every position.
    unsafe {
        for j in rows {
            let row = job.operands.values.row(block.at[j], dv) as *const T;
            let mut to = to.add((j - from) * nr);
            for k in (0..whole).step_by(nr) {
                for v in 0..NV {
                    S::store(to.add(v * S::W), T::load::<S>(row.add(k + v * S::W)));
                }
                to = to.wrapping_add(nr * (end - from));
            }
            if whole < dv {
                for v in 0..NV {
                    let k = (whole + v * S::W).min(dv);
                    S::store(to.add(v * S::W), T::load_part::<S>(row.add(k), (dv - k).min(S::W)));
                }
            }
        }
    }
}

/// [`pack_values`] of the seen positions `rows`, in blocks.
///
/// # Safety
/// The contract of [`pack_values`]; values are kept in blocks.
#[inline(always)]
unsafe fn pack_value_blocks<S: Simd>(
    job: &Job<'_>,
    block: &BlockRows,
    rows: std::ops::Range<usize>,
    (from, end): (usize, usize),
    to: *mut f32,
) {
    const { assert!(ELEMENTS.is_multiple_of(NV * S::W)) };
    let (dv, nr) = (job.a.dv, NV * S::W);
    // SAFETY: a row has `dv` values in whole blocks, each of which fills whole panels.
    unsafe {
        for j in rows {
            let row = job.operands.values.row(block.at[j], dv);
            let mut to = to.add((j - from) * nr);
            for b in 0..dv / ELEMENTS {
                let block = row.add(b * BYTES);
                let (scale, codes) = (S::splat_f16(scale_of(block)), block.add(2) as *const i8);
                for k in (0..ELEMENTS).step_by(nr) {
                    for v in 0..NV {
                        let x = S::load_i8(codes.add(k + v * S::W));
                        S::store(to.add(v * S::W), S::mul(x, scale));
                    }
                    to = to.wrapping_add(nr * (end - from));
                }
            }
        }
    }
}
