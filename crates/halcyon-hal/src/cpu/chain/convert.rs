//! Moves elements between memory and block registers, and converts between register types.

use super::lane::Lane;
use super::ops::{sl, slm};
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::{Isa, dispatch, dispatch_raw};
use halcyon_ir::dtype::{bf16_of, f16_of};
use halcyon_ir::{DType, Scalar};
use half::f16;

/// A rectangle of elements in memory, and the row pitch of its dense copy in a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rect {
    pub rows: usize,
    pub cols: usize,
    /// Elements from row to row and from column to column in memory.
    pub rs: isize,
    pub cs: isize,
    /// Elements from row to row in the block.
    pub pitch: usize,
}

/// Rounds to bf16, to nearest even.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let b = x.to_bits();
    let r = b.wrapping_add(0x7fff + ((b >> 16) & 1)) >> 16;
    // A NaN must stay a NaN: rounding could turn it into infinity.
    (if x.is_nan() { (b >> 16) | 0x40 } else { r }) as u16
}

#[inline(always)]
fn bf16_value(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// Widens `n` f16 values. `F16C` selects the conversion instructions.
///
/// # Safety
/// `src` has `n` readable elements, `dst` room for `n`; if `F16C`, the processor has F16C and AVX.
#[inline(always)]
unsafe fn widen_f16<const F16C: bool>(src: *const u16, dst: *mut f32, n: usize) {
    // SAFETY: whole vectors end at or before `n`; the remainder is copied through full-width arrays. The
    // contract makes `n` elements valid.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if F16C {
            use std::arch::x86_64::*;
            let mut i = 0;
            while i + 8 <= n {
                _mm256_storeu_ps(dst.add(i), _mm256_cvtph_ps(_mm_loadu_si128(src.add(i) as *const __m128i)));
                i += 8;
            }
            if i < n {
                let (mut a, mut b) = ([0u16; 8], [0f32; 8]);
                std::ptr::copy_nonoverlapping(src.add(i), a.as_mut_ptr(), n - i);
                _mm256_storeu_ps(
                    b.as_mut_ptr(),
                    _mm256_cvtph_ps(_mm_loadu_si128(a.as_ptr() as *const __m128i)),
                );
                std::ptr::copy_nonoverlapping(b.as_ptr(), dst.add(i), n - i);
            }
            return;
        }
        for i in 0..n {
            *dst.add(i) = f16::from_bits(*src.add(i)).to_f32();
        }
    }
}

/// Rounds `n` floats to f16, to nearest even. `F16C` selects the conversion instructions.
///
/// # Safety
/// `src` has `n` readable elements, `dst` room for `n`; if `F16C`, the processor has F16C and AVX.
#[inline(always)]
unsafe fn narrow_f16<const F16C: bool>(src: *const f32, dst: *mut u16, n: usize) {
    // SAFETY: whole vectors end at or before `n`; the remainder is copied through full-width arrays. The
    // contract makes `n` elements valid.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if F16C {
            use std::arch::x86_64::*;
            let mut i = 0;
            while i + 8 <= n {
                _mm_storeu_si128(
                    dst.add(i) as *mut __m128i,
                    _mm256_cvtps_ph::<0>(_mm256_loadu_ps(src.add(i))),
                );
                i += 8;
            }
            if i < n {
                let (mut a, mut b) = ([0f32; 8], [0u16; 8]);
                std::ptr::copy_nonoverlapping(src.add(i), a.as_mut_ptr(), n - i);
                _mm_storeu_si128(
                    b.as_mut_ptr() as *mut __m128i,
                    _mm256_cvtps_ph::<0>(_mm256_loadu_ps(a.as_ptr())),
                );
                std::ptr::copy_nonoverlapping(b.as_ptr(), dst.add(i), n - i);
            }
            return;
        }
        for i in 0..n {
            *dst.add(i) = f16::from_f32(*src.add(i)).to_bits();
        }
    }
}

/// Copies a rectangle from memory to a block, with `f` applied to each element.
///
/// # Safety
/// The rectangle is readable at `src`, and its copy (`rows` rows, `pitch` apart) writable at `dst`; they do
/// not overlap.
#[inline(always)]
unsafe fn pull<T: Copy, U: Copy>(src: *const T, r: Rect, dst: *mut U, f: impl Fn(T) -> U) {
    // SAFETY: `i < rows` and `j < cols`, which the contract makes valid on both sides.
    unsafe {
        if r.cs == 1 {
            for i in 0..r.rows {
                let (s, d) = (src.offset(i as isize * r.rs), dst.add(i * r.pitch));
                for j in 0..r.cols {
                    *d.add(j) = f(*s.add(j));
                }
            }
        } else if r.cs == 0 {
            for i in 0..r.rows {
                let v = f(*src.offset(i as isize * r.rs));
                slm::<U>(dst.add(i * r.pitch) as *mut u8, r.cols).fill(v);
            }
        } else if r.rs == 1 && r.rows > 1 {
            // A transposed tile: columns are contiguous in memory, so read column by column.
            for j in 0..r.cols {
                let (s, d) = (src.offset(j as isize * r.cs), dst.add(j));
                for i in 0..r.rows {
                    *d.add(i * r.pitch) = f(*s.add(i));
                }
            }
        } else {
            for i in 0..r.rows {
                let (s, d) = (src.offset(i as isize * r.rs), dst.add(i * r.pitch));
                for j in 0..r.cols {
                    *d.add(j) = f(*s.offset(j as isize * r.cs));
                }
            }
        }
    }
}

/// Copies a block to a rectangle in memory, with `f` applied to each element.
///
/// # Safety
/// The block (`rows` rows, `pitch` apart) is readable at `src`, and the rectangle writable at `dst`; they do
/// not overlap.
#[inline(always)]
unsafe fn push<T: Copy, U: Copy>(src: *const T, dst: *mut U, r: Rect, f: impl Fn(T) -> U) {
    // SAFETY: `i < rows` and `j < cols`, which the contract makes valid on both sides.
    unsafe {
        for i in 0..r.rows {
            let (s, d) = (src.add(i * r.pitch), dst.offset(i as isize * r.rs));
            if r.cs == 1 {
                for j in 0..r.cols {
                    *d.add(j) = f(*s.add(j));
                }
            } else {
                for j in 0..r.cols {
                    *d.offset(j as isize * r.cs) = f(*s.add(j));
                }
            }
        }
    }
}

/// The body of `load`.
///
/// # Safety
/// The contract of `load`; if `V`, the caller is compiled for AVX2 and F16C.
#[inline(always)]
unsafe fn load_body<const V: bool>(dtype: DType, raw: bool, s: *const u8, r: Rect, d: *mut u8) {
    // SAFETY: each case reads the rectangle as `dtype` and writes its register type, as the contract of
    // `load` allows.
    unsafe {
        match (dtype, raw) {
            (DType::F16, false) if r.cs == 1 => {
                for i in 0..r.rows {
                    let p = (s as *const u16).offset(i as isize * r.rs);
                    widen_f16::<V>(p, (d as *mut f32).add(i * r.pitch), r.cols);
                }
            }
            (DType::F16, false) => pull(s as *const u16, r, d as *mut f32, |x| f16::from_bits(x).to_f32()),
            (DType::BF16, false) => pull(s as *const u16, r, d as *mut f32, bf16_value),
            (DType::I8, false) => pull(s as *const i8, r, d as *mut i32, |x| x as i32),
            (DType::I16, false) => pull(s as *const i16, r, d as *mut i32, |x| x as i32),
            (DType::U8, false) => pull(s, r, d as *mut u32, |x| x as u32),
            (DType::U16, false) => pull(s as *const u16, r, d as *mut u32, |x| x as u32),
            (t, _) => match t.size() {
                1 => pull(s, r, d, |x| x),
                2 => pull(s as *const u16, r, d as *mut u16, |x| x),
                4 => pull(s as *const u32, r, d as *mut u32, |x| x),
                _ => pull(s as *const u64, r, d as *mut u64, |x| x),
            },
        }
    }
}
dispatch_raw! {
    /// Copies a rectangle to a block. Unless `raw`, elements are widened to the type in which they are
    /// computed.
    ///
    /// # Safety
    /// The rectangle is readable as `dtype`, its copy is writable in the register type; they do not overlap.
    pub(super) unsafe fn load [] [] (isa, dtype: DType, raw: bool, s: *const u8, r: Rect, d: *mut u8) = load_body
}

/// Copies a rectangle with `rs` = 1, in which the elements of a column are adjacent in memory. Transposes `W`
/// columns at a time in registers.
///
/// # Safety
/// The contract of `turn`, and the caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn turn_body<S: Simd>(s: *const f32, r: Rect, d: *mut f32) {
    for j in (0..r.cols).step_by(S::W) {
        let n = S::W.min(r.cols - j);
        // SAFETY: `n` limits the columns to the rectangle, which the contract makes valid.
        unsafe { S::transpose(s.offset(j as isize * r.cs), r.cs, n, r.rows, d.add(j), r.pitch) };
    }
}
dispatch_simd! {
    /// Copies a rectangle of four-byte elements with `rs` = 1 (a transposed tile) to a block. Bits are moved
    /// unchanged.
    ///
    /// # Safety
    /// The rectangle is readable, its copy is writable; they do not overlap.
    pub(super) unsafe fn turn[][](isa, s: *const f32, r: Rect, d: *mut f32) = turn_body
}

/// The body of `store`.
///
/// # Safety
/// The contract of `store`; if `V`, the caller is compiled for AVX2 and F16C.
#[inline(always)]
unsafe fn store_body<const V: bool>(dtype: DType, raw: bool, s: *const u8, d: *mut u8, r: Rect) {
    // SAFETY: each case reads the register type and writes the rectangle as `dtype`, as the contract of
    // `store` allows.
    unsafe {
        match (dtype, raw) {
            (DType::F16, false) if r.cs == 1 => {
                for i in 0..r.rows {
                    let p = (d as *mut u16).offset(i as isize * r.rs);
                    narrow_f16::<V>((s as *const f32).add(i * r.pitch), p, r.cols);
                }
            }
            (DType::F16, false) => push(s as *const f32, d as *mut u16, r, |x| f16::from_f32(x).to_bits()),
            (DType::BF16, false) => push(s as *const f32, d as *mut u16, r, bf16_bits),
            (DType::I8 | DType::U8, false) => push(s as *const u32, d, r, |x| x as u8),
            (DType::I16 | DType::U16, false) => push(s as *const u32, d as *mut u16, r, |x| x as u16),
            (t, _) => match t.size() {
                1 => push(s, d, r, |x| x),
                2 => push(s as *const u16, d as *mut u16, r, |x| x),
                4 => push(s as *const u32, d as *mut u32, r, |x| x),
                _ => push(s as *const u64, d as *mut u64, r, |x| x),
            },
        }
    }
}
dispatch_raw! {
    /// Copies a block to a rectangle. Unless `raw`, elements are rounded from the type in which they were
    /// computed to `dtype`.
    ///
    /// # Safety
    /// The block is readable in the register type, the rectangle is writable as `dtype`; they do not overlap.
    pub(super) unsafe fn store [] [] (isa, dtype: DType, raw: bool, s: *const u8, d: *mut u8, r: Rect) = store_body
}

/// The body of `stream`.
///
/// # Safety
/// The contract of `stream`; if `V`, the caller is compiled for AVX2.
#[inline(always)]
unsafe fn stream_body<const V: bool>(s: *const u8, d: *mut u8, bytes: usize) {
    // SAFETY: the contract makes `bytes` bytes valid on both sides. `head` bytes are copied first, so that
    // vector stores are aligned.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::*;
            let head = d.align_offset(64).min(bytes);
            std::ptr::copy_nonoverlapping(s, d, head);
            let mut i = head;
            if V {
                while i + 64 <= bytes {
                    let a = _mm256_loadu_si256(s.add(i) as *const __m256i);
                    let b = _mm256_loadu_si256(s.add(i + 32) as *const __m256i);
                    _mm256_stream_si256(d.add(i) as *mut __m256i, a);
                    _mm256_stream_si256(d.add(i + 32) as *mut __m256i, b);
                    i += 64;
                }
            } else {
                while i + 16 <= bytes {
                    _mm_stream_si128(d.add(i) as *mut __m128i, _mm_loadu_si128(s.add(i) as *const __m128i));
                    i += 16;
                }
            }
            std::ptr::copy_nonoverlapping(s.add(i), d.add(i), bytes - i);
        }
        #[cfg(not(target_arch = "x86_64"))]
        std::ptr::copy_nonoverlapping(s, d, bytes);
    }
}
dispatch_raw! {
    /// Copies with stores that bypass the caches, where the processor has them. The caller calls [`fence`] on
    /// this thread before other threads read the destination.
    ///
    /// # Safety
    /// `s` has `bytes` readable bytes, `d` `bytes` writable ones; they do not overlap.
    pub(super) unsafe fn stream [] [] (isa, s: *const u8, d: *mut u8, bytes: usize) = stream_body
}

/// Orders streamed stores before later stores.
pub(super) fn fence() {
    // SAFETY: `sfence` is part of SSE, which every x86-64 processor has.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

/// Rounds f32 values to f16 or bf16 in place.
///
/// # Safety
/// If `V`, the caller is compiled for AVX2 and F16C.
#[inline(always)]
unsafe fn round_half<const V: bool>(to: DType, d: &mut [f32]) {
    match to {
        DType::F16 => {
            let mut t = [0u16; 64];
            for c in d.chunks_mut(64) {
                // SAFETY: chunk and array have at least `c.len()` elements. `round_half` requires F16C if
                // `V`.
                unsafe {
                    narrow_f16::<V>(c.as_ptr(), t.as_mut_ptr(), c.len());
                    widen_f16::<V>(t.as_ptr(), c.as_mut_ptr(), c.len());
                }
            }
        }
        DType::BF16 => d.iter_mut().for_each(|x| *x = bf16_value(bf16_bits(*x))),
        _ => {}
    }
}

/// Rounds f64 to f16 or bf16, once.
fn half_of(to: DType, x: f64) -> f32 {
    if to == DType::F16 { f16_of(x).to_f32() } else { bf16_of(x).to_f32() }
}

/// Casts f32 to integers of 8 or 16 bits, in the 32 bits of their register type. Saturates; NaN becomes 0.
/// The values are limited before they are converted, because the compiler does not vectorise a conversion
/// that saturates.
#[inline(always)]
fn small_integers(to: DType, s: &[f32], d: &mut [i32]) {
    let (low, high) = to.range();
    let (low, high) = (low as f32, high as f32);
    for (o, &v) in d.iter_mut().zip(s) {
        let v = if v.is_nan() { 0.0 } else { v };
        let v = if v < low { low } else { v };
        let v = if v > high { high } else { v };
        // SAFETY: `v` is not NaN and lies in the range of an integer type of at most 16 bits.
        *o = unsafe { v.to_int_unchecked() };
    }
}

macro_rules! cast_from {
    ($t:ident $body:ident $name:ident, |$x:ident| $f32:expr, $narrow:tt, |$w:ident, $to:ident| $wide:expr) => {
        /// # Safety
        /// The contract of `cast`; if `V`, the caller is compiled for AVX2 and F16C.
        #[inline(always)]
        unsafe fn $body<const V: bool>(to: DType, s: *const u8, d: *mut u8, n: usize) {
            // SAFETY: the contract of `cast` makes `n` aligned values of this type readable at `s`.
            let s: &[$t] = unsafe { sl(s, n) };
            macro_rules! to {
                ($u:ty, |$v:ident| $e:expr) => {{
                    // SAFETY: the contract of `cast` gives room for `n` aligned values of the target's type.
                    let d: &mut [$u] = unsafe { slm(d, n) };
                    for (o, &$v) in d.iter_mut().zip(s) {
                        *o = $e;
                    }
                    d
                }};
            }
            match to {
                DType::Bool => { to!(u8, |v| (v != (0 as $t)) as u8); }
                DType::F32 => { to!(f32, |v| v as f32); }
                DType::F16 | DType::BF16 => {
                    let $to = to;
                    cast_from!(@half $narrow to s d n V $w $wide);
                }
                DType::F64 => { to!(f64, |v| v as f64); }
                DType::I64 => { to!(i64, |v| v as i64); }
                DType::U64 => { to!(u64, |v| v as u64); }
                DType::I32 => { to!(i32, |v| v as i32); }
                DType::U32 => { to!(u32, |v| v as u32); }
                // SAFETY: the contract of `cast` gives room for `n` aligned values of the target's type.
                DType::I8 | DType::I16 | DType::U8 | DType::U16 if cast_from!(@is_f32 $narrow) => unsafe {
                    small_integers(to, sl(s.as_ptr().cast(), n), slm(d, n));
                },
                DType::I8 => { to!(i32, |v| v as i8 as i32); }
                DType::I16 => { to!(i32, |v| v as i16 as i32); }
                DType::U8 => { to!(u32, |v| v as u8 as u32); }
                DType::U16 => { to!(u32, |v| v as u16 as u32); }
                // Small types do not occur: chains with them are declined.
                _ => {}
            }
        }
        dispatch_raw! {
            /// # Safety
            /// The contract of `cast`.
            unsafe fn $name [] [] (isa, to: DType, s: *const u8, d: *mut u8, n: usize) = $body
        }
    };
    (@is_f32 narrow) => {
        true
    };
    (@is_f32 wide) => {
        false
    };
    // Values of f32 are rounded in vectors. Values of other types are rounded once, from f64.
    (@half narrow $to:ident $s:ident $d:ident $n:ident $V:ident $w:ident $wide:expr) => {{
        // SAFETY: the contract of `cast` gives room for `n` aligned floats.
        let d: &mut [f32] = unsafe { slm($d, $n) };
        d.copy_from_slice($s);
        // SAFETY: `$body` requires that its caller is compiled for AVX2 and F16C if `V`.
        unsafe { round_half::<$V>($to, d) };
    }};
    (@half wide $to:ident $s:ident $d:ident $n:ident $V:ident $w:ident $wide:expr) => {{
        // SAFETY: the contract of `cast` gives room for `n` aligned floats.
        let d: &mut [f32] = unsafe { slm($d, $n) };
        for (o, &$w) in d.iter_mut().zip($s) {
            *o = $wide;
        }
    }};
}
cast_from!(f32 f32_body from_f32, |x| x, narrow, |x, _to| x);
cast_from!(f64 f64_body from_f64, |x| x as f32, wide, |x, to| half_of(to, x));
cast_from!(i32 i32_body from_i32, |x| x as f32, wide, |x, to| half_of(to, x as f64));
cast_from!(u32 u32_body from_u32, |x| x as f32, wide, |x, to| half_of(to, x as f64));
cast_from!(i64 i64_body from_i64, |x| x as f32, wide, |x, to| half_of(to, x as f64));
cast_from!(u64 u64_body from_u64, |x| x as f32, wide, |x, to| half_of(to, x as f64));
cast_from!(u8 u8_body from_u8, |x| x as f32, wide, |x, to| half_of(to, x as f64));

/// Casts `n` values by the rules of `Scalar::cast`.
///
/// # Safety
/// `s` holds `n` values of the register type of `from`. `d` has room for `n` values of the register type of
/// `to`. Both are aligned and do not overlap.
pub(super) unsafe fn cast(isa: Isa, from: DType, to: DType, s: *const u8, d: *mut u8, n: usize) {
    // SAFETY: `cast` has the contract of these functions, and the match picks the register type of `from`.
    unsafe {
        match Lane::of(from) {
            Lane::F32 => from_f32(isa, to, s, d, n),
            Lane::F64 => from_f64(isa, to, s, d, n),
            Lane::I32 => from_i32(isa, to, s, d, n),
            Lane::U32 => from_u32(isa, to, s, d, n),
            Lane::I64 => from_i64(isa, to, s, d, n),
            Lane::U64 => from_u64(isa, to, s, d, n),
            Lane::B8 | Lane::H16 => from_u8(isa, to, s, d, n),
        }
    }
}

/// Reinterprets `n` values of `from` as `to`, which has as many bits.
///
/// # Safety
/// The contract of [`cast`]; `n` is at most `super::BLOCK`.
pub(super) unsafe fn bitcast(isa: Isa, from: DType, to: DType, s: *const u8, d: *mut u8, n: usize) {
    let r = Rect { rows: 1, cols: n, rs: 0, cs: 1, pitch: n };
    let mut t = [0u64; super::BLOCK];
    debug_assert!(n <= super::BLOCK);
    // SAFETY: the contract makes `s` and `d` valid for `n` values; the temporary holds a block of 8-byte
    // elements.
    unsafe {
        store(isa, from, false, s, t.as_mut_ptr() as *mut u8, r);
        load(isa, to, false, t.as_ptr() as *const u8, r, d);
        if to == DType::Bool {
            slm::<u8>(d, n).iter_mut().for_each(|x| *x = (*x != 0) as u8);
        }
    }
}

/// The bits of a scalar in a register. The scalar is cast to `dtype` and, unless `raw`, widened to the type
/// in which `dtype` is computed.
pub(super) fn lane_bits(dtype: DType, raw: bool, v: Scalar) -> u64 {
    let v = v.cast(dtype);
    u64::from_le_bytes(if raw { v.to_bytes(dtype) } else { v.to_bytes(dtype.compute()) })
}

/// Fills `n` elements of `size` bytes.
///
/// # Safety
/// `d` has room for `n` aligned elements of `size` bytes.
pub(super) unsafe fn splat(size: usize, bits: u64, d: *mut u8, n: usize) {
    // SAFETY: the contract gives room for `n` aligned elements of this size.
    unsafe {
        match size {
            1 => slm::<u8>(d, n).fill(bits as u8),
            2 => slm::<u16>(d, n).fill(bits as u16),
            4 => slm::<u32>(d, n).fill(bits as u32),
            _ => slm::<u64>(d, n).fill(bits),
        }
    }
}

#[inline(always)]
fn iota_body<const V: bool>(dtype: DType, base: i64, r: Rect, d: &mut [u64]) {
    assert!(r.cols <= r.pitch && r.rows.saturating_mul(r.pitch) <= d.len(), "the block is too small");
    let p = d.as_mut_ptr() as *mut u8;
    macro_rules! go {
        ($t:ty, |$v:ident| $e:expr) => {
            for i in 0..r.rows {
                let start = base + i as i64 * r.rs as i64;
                // SAFETY: `d` has 8 bytes for each element of the rectangle, as the assertion above checked.
                let row: &mut [$t] = unsafe { slm((p as *mut $t).add(i * r.pitch) as *mut u8, r.cols) };
                for (j, o) in row.iter_mut().enumerate() {
                    let $v = start + j as i64 * r.cs as i64;
                    *o = $e;
                }
            }
        };
    }
    match dtype {
        DType::F32 => go!(f32, |v| v as f32),
        DType::F64 => go!(f64, |v| v as f64),
        DType::F16 | DType::BF16 => go!(f32, |v| half_of(dtype, v as f64)),
        DType::I64 | DType::U64 => go!(i64, |v| v),
        DType::I32 | DType::U32 => go!(i32, |v| v as i32),
        DType::I16 => go!(i32, |v| v as i16 as i32),
        DType::I8 => go!(i32, |v| v as i8 as i32),
        DType::U16 => go!(u32, |v| v as u16 as u32),
        DType::U8 => go!(u32, |v| v as u8 as u32),
        DType::Bool => go!(u8, |v| (v != 0) as u8),
        // Small types do not occur: chains with them are declined.
        _ => {}
    }
}
dispatch! {
    /// Writes `base + i rs + j cs` in the register type of `dtype`. Panics unless `d` has a word for each
    /// element.
    pub(super) fn iota [] [] (isa, dtype: DType, base: i64, r: Rect, d: &mut [u64]) = iota_body
}
