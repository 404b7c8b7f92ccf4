//! The inner loops of [`super::blocked_bf16`]: sums of one or two tiles of pixels by one output channel
//! block, and their epilogue.

use super::blocked_tile::Activation;
use crate::cpu::library::simd::{Simd, dispatch_simd};
use crate::cpu::sys::Isa;
use half::bf16;

/// Channels of a block. A pixel's bf16 block is one row of a tile register; its f32 sums are a row in each of
/// two registers.
pub(crate) const BLOCK: usize = 32;
/// Pixels of a tile.
pub(crate) const PIXELS: usize = 16;
/// Bytes of the weights of one step for half an output block (sixteen channels).
pub(crate) const HALF: usize = 1024;

/// The sums of two tiles, as pixels by channels of a block.
#[repr(C, align(64))]
pub(crate) struct Sums(pub [f32; 2 * PIXELS * BLOCK]);

/// The operands of one sum over all steps (taps of input channel blocks).
#[derive(Clone, Copy, Debug)]
#[cfg_attr(not(all(target_arch = "x86_64", target_os = "linux")), allow(dead_code))]
pub(crate) struct Steps<'a> {
    /// For each step, the offset in bytes from a pixel to what the step reads.
    pub offsets: &'a [isize],
    /// Bytes between pixels.
    pub pixel: usize,
    /// Pairs of input values per step; 16 if the input is in blocks.
    pub pairs: usize,
    /// Pixels of each tile.
    pub rows: usize,
    /// Weights: [`HALF`] bytes per step and half of the output block, in the order of the steps.
    pub w: *const u8,
    /// Weights that later calls read, and how many cache lines of them to prefetch per step.
    pub ahead: *const u8,
    pub lines: usize,
}

/// Defines the function that computes the sums of one or two tiles by one output channel block with the
/// instruction `$dot`.
macro_rules! tile_products {
    ($(#[$about:meta])* $name:ident, $dot:literal) => {
        $(#[$about])*
        ///
        /// # Safety
        /// The thread's tile registers are configured by [`config`], for `s.rows` and `s.pairs`. For every
        /// pixel of the tiles, `4 * s.pairs` bytes are readable at every step's offset; `s.w` holds the
        /// weights of all steps (at least one). `out` is writable for `s.rows * BLOCK` sums per tile.
        /// `meanwhile` does not use tile registers. The process may use the instruction.
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        #[inline(always)]
        pub(crate) unsafe fn $name(s: &Steps<'_>, x: &[*const u8], out: *mut f32, meanwhile: impl FnOnce()) {
            use std::arch::asm;
            let (list, n) = (s.offsets.as_ptr(), s.offsets.len());
            // SAFETY: by contract the registers are configured and the loads and stores stay in the pixels,
            // the weights and the sums. Compiled Rust code never uses tile registers, so their contents
            // survive `meanwhile`.
            unsafe {
                if let [x0, x1] = *x {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "tilezero tmm2",
                        "tilezero tmm3",
                        "2:",
                        "mov {t}, qword ptr [{list}]",
                        "lea {u}, [{x1} + {t}]",
                        "add {t}, {x0}",
                        "tileloadd tmm6, [{w} + {sw}*1]",
                        "tileloadd tmm4, [{t} + {sx}*1]",
                        concat!($dot, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{w} + {sw}*1 + 1024]",
                        concat!($dot, " tmm1, tmm4, tmm7"),
                        "tileloadd tmm5, [{u} + {sx}*1]",
                        concat!($dot, " tmm2, tmm5, tmm6"),
                        concat!($dot, " tmm3, tmm5, tmm7"),
                        "mov {t}, {lines}",
                        "test {t}, {t}",
                        "jz 4f",
                        "3:",
                        "prefetcht1 byte ptr [{ahead}]",
                        "add {ahead}, 64",
                        "dec {t}",
                        "jnz 3b",
                        "4:",
                        "add {w}, 2048",
                        "add {list}, 8",
                        "dec {n}",
                        "jnz 2b",
                        x0 = in(reg) x0, x1 = in(reg) x1, sx = in(reg) s.pixel, sw = in(reg) 64usize,
                        w = inout(reg) s.w => _, list = inout(reg) list => _, n = inout(reg) n => _,
                        ahead = inout(reg) s.ahead => _, lines = in(reg) s.lines,
                        t = out(reg) _, u = out(reg) _,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, readonly)
                    );
                    meanwhile();
                    let below = out.add(s.rows * BLOCK);
                    asm!(
                        "tilestored [{a} + {s}*1], tmm0",
                        "tilestored [{a} + {s}*1 + 64], tmm1",
                        "tilestored [{b} + {s}*1], tmm2",
                        "tilestored [{b} + {s}*1 + 64], tmm3",
                        a = in(reg) out, b = in(reg) below, s = in(reg) 4 * BLOCK,
                        options(nostack, preserves_flags)
                    );
                } else {
                    asm!(
                        "tilezero tmm0",
                        "tilezero tmm1",
                        "2:",
                        "mov {t}, qword ptr [{list}]",
                        "add {t}, {x0}",
                        "tileloadd tmm6, [{w} + {sw}*1]",
                        "tileloadd tmm4, [{t} + {sx}*1]",
                        concat!($dot, " tmm0, tmm4, tmm6"),
                        "tileloadd tmm7, [{w} + {sw}*1 + 1024]",
                        concat!($dot, " tmm1, tmm4, tmm7"),
                        "mov {t}, {lines}",
                        "test {t}, {t}",
                        "jz 4f",
                        "3:",
                        "prefetcht1 byte ptr [{ahead}]",
                        "add {ahead}, 64",
                        "dec {t}",
                        "jnz 3b",
                        "4:",
                        "add {w}, 2048",
                        "add {list}, 8",
                        "dec {n}",
                        "jnz 2b",
                        x0 = in(reg) x[0], sx = in(reg) s.pixel, sw = in(reg) 64usize,
                        w = inout(reg) s.w => _, list = inout(reg) list => _, n = inout(reg) n => _,
                        ahead = inout(reg) s.ahead => _, lines = in(reg) s.lines, t = out(reg) _,
                        out("tmm0") _, out("tmm1") _, out("tmm4") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, readonly)
                    );
                    meanwhile();
                    asm!(
                        "tilestored [{a} + {s}*1], tmm0",
                        "tilestored [{a} + {s}*1 + 64], tmm1",
                        a = in(reg) out, s = in(reg) 4 * BLOCK,
                        options(nostack, preserves_flags)
                    );
                }
            }
        }
    };
}

tile_products! {
    /// The sums of tiles of bf16 pixels, at the addresses `x`, in f32. `meanwhile` runs while the products
    /// are in progress.
    on_tiles, "tdpbf16ps"
}
tile_products! {
    /// The sums of tiles of u8 pixels and i8 weights, in i32 (stored as the bits of floats).
    on_unsigned_tiles, "tdpbusd"
}
tile_products! {
    /// The sums of tiles of i8 pixels and i8 weights, in i32 (stored as the bits of floats).
    on_signed_tiles, "tdpbssd"
}

/// The tile register configuration of [`on_tiles`]: sums in 0 to 3, pixels in 4 and 5, weights in 6 and 7.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
pub(crate) const fn config(rows: usize, pairs: usize) -> crate::cpu::amx::TileConfig {
    let (c, a, b) = ((rows as u8, 64), (rows as u8, 4 * pairs as u8), (pairs as u8, 64));
    crate::cpu::amx::TileConfig::new([c, c, c, c, a, a, b, b])
}

/// The sums of [`on_tiles`] with `vdpbf16ps`.
///
/// # Safety
/// For every pixel of the tiles, `4 * s.pairs` bytes are readable at every step's offset; `s.w` holds the
/// weights of all steps. `sums` is writable for `s.rows * BLOCK` floats per tile. The processor has
/// AVX512_BF16.
pub(crate) unsafe fn on_pairs(s: &Steps<'_>, x: &[*const u8], sums: *mut f32) {
    #[cfg(target_arch = "x86_64")]
    for (t, x) in x.iter().enumerate() {
        // SAFETY: this function has the contract of `pairs` for each tile.
        unsafe { x86::pairs(s, *x, sums.add(t * s.rows * BLOCK)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!(
        "no convolution is made for instructions that this processor does not have: {s:?} {x:?} {sums:?}"
    );
}

dispatch_simd! {
    /// The sums of [`on_tiles`] with f32 vectors, for tests. (Calls on processors on which bf16 products are
    /// not faster than f32 products are declined.) This function adds the products of one channel at a time.
    ///
    /// # Safety
    /// For every pixel of the tiles, `4 * s.pairs` bytes are readable at every step's offset; `s.w` holds the
    /// weights of all steps. `sums` is writable for `s.rows * BLOCK` floats per tile.
    pub(crate) unsafe fn on_vectors[][](isa, s: &Steps<'_>, x: &[*const u8], sums: *mut f32) = on_vectors_body
}

/// The body of [`on_vectors`].
///
/// # Safety
/// The contract of [`on_vectors`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn on_vectors_body<S: Simd>(s: &Steps<'_>, x: &[*const u8], sums: *mut f32) {
    for (t, x) in x.iter().enumerate() {
        for p in 0..s.rows {
            let mut acc = [0f32; BLOCK];
            for (k, offset) in s.offsets.iter().enumerate() {
                let x = x.wrapping_add(p * s.pixel).wrapping_offset(*offset) as *const u16;
                let w = s.w.wrapping_add(2 * k * HALF) as *const u16;
                for i in 0..s.pairs {
                    // SAFETY: by contract the `2 * s.pairs` values of this pixel and step are readable, and
                    // `s.w` holds the step's weights for all `BLOCK` outputs.
                    unsafe {
                        let a = [0, 1].map(|e| widen(x.add(2 * i + e).read_unaligned()));
                        for (o, acc) in acc.iter_mut().enumerate() {
                            let w = w.add(o / 16 * (HALF / 2) + 32 * i + 2 * (o % 16));
                            *acc = S_fma::<S>(a[1], widen(*w.add(1)), S_fma::<S>(a[0], widen(*w), *acc));
                        }
                    }
                }
            }
            // SAFETY: by contract `sums` has `BLOCK` floats for each of `s.rows` pixels per tile.
            unsafe { std::ptr::copy_nonoverlapping(acc.as_ptr(), sums.add((t * s.rows + p) * BLOCK), BLOCK) };
        }
    }
}

#[inline(always)]
#[allow(non_snake_case)]
fn S_fma<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
pub(crate) fn widen(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// The address of f32 (`wide`) or bf16 values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub at: *mut u8,
    pub wide: bool,
}

impl Place {
    pub(crate) const NONE: Place = Place { at: std::ptr::null_mut(), wide: false };

    /// The address `n` values further on; null stays null.
    #[inline(always)]
    pub(crate) fn after(self, n: usize) -> Place {
        if self.at.is_null() {
            return self;
        }
        Place { at: self.at.wrapping_add(n << (1 + u32::from(self.wide))), ..self }
    }
}

/// The epilogue of the sums of consecutive pixels: `act(sum * scale + bias + residual)`, each part optional.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16TileEpilogue {
    /// Point to the values of the block's first channel; null if absent.
    pub scale: *const f32,
    pub bias: *const f32,
    /// Points to the first pixel, in the output's layout; null if absent.
    pub residual: Place,
    pub act: Activation,
    pub y: Place,
}

/// Applies the epilogue to `n` pixels of one channel block. `bf16` says that the processor has AVX512_BF16.
///
/// # Safety
/// `sums` is readable for `n * BLOCK` floats and, if `bf16`, aligned to 64 bytes. The operands of `f` are
/// null or readable and its output writable for `n` pixels of a block. `bf16` is set only on a processor with
/// AVX512_BF16.
#[inline]
pub(crate) unsafe fn finish(isa: Isa, bf16: bool, n: usize, sums: *const f32, f: &Bf16TileEpilogue) {
    #[cfg(target_arch = "x86_64")]
    if bf16 {
        // SAFETY: by contract the processor has AVX512_BF16 and the pointers are valid for `n` pixels.
        unsafe {
            match (f.residual.at.is_null(), f.residual.wide, f.y.wide) {
                (true, _, false) => x86::finish::<0, false>(n, sums, f),
                (true, _, true) => x86::finish::<0, true>(n, sums, f),
                (false, false, false) => x86::finish::<1, false>(n, sums, f),
                (false, false, true) => x86::finish::<1, true>(n, sums, f),
                (false, true, false) => x86::finish::<2, false>(n, sums, f),
                (false, true, true) => x86::finish::<2, true>(n, sums, f),
            }
        }
        return;
    }
    let _ = bf16;
    // SAFETY: by contract the pointers are valid for `n` pixels.
    unsafe { finish_any(isa, n, sums, f) }
}

dispatch_simd! {
    /// [`finish`] without AVX512_BF16.
    ///
    /// # Safety
    /// The contract of [`finish`].
    unsafe fn finish_any[][](isa, n: usize, sums: *const f32, f: &Bf16TileEpilogue) = finish_body
}

/// The body of [`finish_any`].
///
/// # Safety
/// The contract of [`finish`]; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn finish_body<S: Simd>(n: usize, sums: *const f32, f: &Bf16TileEpilogue) {
    // SAFETY: by contract all pointers are valid for `n` blocks, and `W` divides `BLOCK`.
    unsafe {
        for p in 0..n {
            for c in (0..BLOCK).step_by(S::W) {
                let mut v = S::load(sums.add(p * BLOCK + c));
                match (f.scale.is_null(), f.bias.is_null()) {
                    (true, true) => {}
                    (false, true) => v = S::mul(v, S::load(f.scale.add(c))),
                    (true, false) => v = S::add(v, S::load(f.bias.add(c))),
                    (false, false) => v = S::fma(v, S::load(f.scale.add(c)), S::load(f.bias.add(c))),
                }
                let r = f.residual.after(p * BLOCK + c);
                if !r.at.is_null() {
                    v = S::add(
                        v,
                        if r.wide { S::load(r.at as *const f32) } else { S::load_bf16(r.at as *const bf16) },
                    );
                }
                v = match f.act {
                    Activation::None => v,
                    Activation::Relu => S::relu(v),
                    // `max` and `min` return the second operand if one is NaN, so NaN is kept.
                    Activation::Clamp(lo, hi) => S::min(S::splat(hi), S::max(S::splat(lo), v)),
                };
                let y = f.y.after(p * BLOCK + c);
                store::<S>(v, y);
            }
        }
    }
}

/// Stores one vector, rounding it if `y` is bf16.
///
/// # Safety
/// `y` is writable for `W` values; the calling function is compiled for the instruction set of `S`.
#[inline(always)]
unsafe fn store<S: Simd>(v: S::V, y: Place) {
    // SAFETY: by contract `y` holds `W` values; `W <= 16`, the length of `t`.
    unsafe {
        if y.wide {
            return S::store(y.at as *mut f32, v);
        }
        let mut t = [0f32; 16];
        S::store(t.as_mut_ptr(), v);
        for (i, t) in t[..S::W].iter().enumerate() {
            *(y.at as *mut bf16).add(i) = bf16::from_f32(*t);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Activation, BLOCK, Bf16TileEpilogue, HALF, PIXELS, Steps};
    use std::arch::x86_64::*;
    use std::mem::transmute;

    /// Pixels whose sums are in registers together: each has two registers of sums, and two hold weights.
    const MOST: usize = 8;
    /// Steps whose weights stay in the first-level cache (16 KiB) while all groups of pixels use them.
    const NEAR: usize = 8;

    /// The sums of one tile of pixels.
    ///
    /// # Safety
    /// For every pixel of the tile, `4 * s.pairs` bytes are readable from `x` at every step's offset; `s.w`
    /// holds the weights of all steps. `sums` is writable for `s.rows * BLOCK` floats. The processor has
    /// AVX512_BF16.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(crate) unsafe fn pairs(s: &Steps<'_>, x: *const u8, sums: *mut f32) {
        debug_assert!(s.rows <= PIXELS);
        // Groups of equal size keep enough sums in progress to hide the latency of the instruction.
        let groups = s.rows.div_ceil(MOST);
        for (k, offsets) in s.offsets.chunks(NEAR).enumerate() {
            let s = Steps { offsets, w: s.w.wrapping_add(k * NEAR * 2 * HALF), ..*s };
            for g in 0..groups {
                let (first, end) = (s.rows * g / groups, s.rows * (g + 1) / groups);
                let (x, sums) = (x.wrapping_add(first * s.pixel), sums.wrapping_add(first * BLOCK));
                let f = match end - first {
                    1 => group::<1>,
                    2 => group::<2>,
                    3 => group::<3>,
                    4 => group::<4>,
                    5 => group::<5>,
                    6 => group::<6>,
                    7 => group::<7>,
                    _ => group::<MOST>,
                };
                // SAFETY: these pixels belong to the tile, and this function has the contract of `group`.
                unsafe { f(&s, x, sums, k > 0) };
            }
        }
    }

    /// The sums of `R` pixels, which are added to those at `sums` if `more`.
    ///
    /// # Safety
    /// The contract of [`pairs`] for `R` pixels from `x`. If `more`, `sums` is initialised.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn group<const R: usize>(s: &Steps<'_>, x: *const u8, sums: *mut f32, more: bool) {
        // SAFETY: by contract each of the `R` pixels has `s.pairs` pairs at every offset, and `s.w` has two
        // vectors of weights per pair and step; `sums` has two vectors per pixel.
        unsafe {
            let bits = |v: __m512i| transmute::<__m512i, __m512bh>(v);
            let mut acc = [[_mm512_setzero_ps(); 2]; R];
            if more {
                for (r, acc) in acc.iter_mut().enumerate() {
                    *acc = [0, 16].map(|c| _mm512_loadu_ps(sums.add(r * BLOCK + c)));
                }
            }
            let mut w = s.w;
            for offset in s.offsets {
                let x = x.wrapping_offset(*offset);
                for i in 0..s.pairs {
                    let w = [w.add(64 * i), w.add(HALF + 64 * i)]
                        .map(|w| bits(_mm512_loadu_si512(w as *const __m512i)));
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let pair = (x.add(r * s.pixel + 4 * i) as *const i32).read_unaligned();
                        let pair = bits(_mm512_set1_epi32(pair));
                        *acc = [0, 1].map(|h| _mm512_dpbf16_ps(acc[h], w[h], pair));
                    }
                }
                w = w.add(2 * HALF);
            }
            for (r, acc) in acc.iter().enumerate() {
                _mm512_storeu_ps(sums.add(r * BLOCK), acc[0]);
                _mm512_storeu_ps(sums.add(r * BLOCK + 16), acc[1]);
            }
        }
    }

    /// [`super::finish`] with AVX512_BF16. `RES`: the residual is absent (0), bf16 (1) or f32 (2). `WIDE`:
    /// the output is f32.
    ///
    /// # Safety
    /// The contract of [`super::finish`] with `bf16`; the residual and the output have the types given by
    /// `RES` and `WIDE`.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(crate) unsafe fn finish<const RES: u8, const WIDE: bool>(
        n: usize,
        sums: *const f32,
        f: &Bf16TileEpilogue,
    ) {
        // SAFETY: by contract the pointers are valid for `n` blocks of 32 values and `sums` is 64-byte
        // aligned; the function enables AVX512_BF16.
        unsafe {
            let (some_scale, some_bias) = (!f.scale.is_null(), !f.bias.is_null());
            let channel = |p: *const f32, or: f32| match p.is_null() {
                true => [_mm512_set1_ps(or); 2],
                false => [_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16))],
            };
            let (scale, bias) = (channel(f.scale, 1.0), channel(f.bias, 0.0));
            let (lo, hi, act) = match f.act {
                Activation::None => (0.0, 0.0, false),
                Activation::Relu => (0.0, f32::INFINITY, true),
                Activation::Clamp(lo, hi) => (lo, hi, true),
            };
            let (lo, hi) = (_mm512_set1_ps(lo), _mm512_set1_ps(hi));
            for p in 0..n {
                let at = p * BLOCK;
                let mut v = [_mm512_load_ps(sums.add(at)), _mm512_load_ps(sums.add(at + 16))];
                if some_scale {
                    v = [_mm512_fmadd_ps(v[0], scale[0], bias[0]), _mm512_fmadd_ps(v[1], scale[1], bias[1])];
                } else if some_bias {
                    v = [_mm512_add_ps(v[0], bias[0]), _mm512_add_ps(v[1], bias[1])];
                }
                if RES == 1 {
                    let r = _mm512_loadu_si512((f.residual.at as *const u16).add(at) as *const __m512i);
                    let widen =
                        |h: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(h)));
                    v[0] = _mm512_add_ps(v[0], widen(_mm512_castsi512_si256(r)));
                    v[1] = _mm512_add_ps(v[1], widen(_mm512_extracti64x4_epi64::<1>(r)));
                } else if RES == 2 {
                    let r = (f.residual.at as *const f32).add(at);
                    v[0] = _mm512_add_ps(v[0], _mm512_loadu_ps(r));
                    v[1] = _mm512_add_ps(v[1], _mm512_loadu_ps(r.add(16)));
                }
                if act {
                    // `max` and `min` return the second operand if one is NaN, so NaN is kept.
                    v = v.map(|v| _mm512_min_ps(hi, _mm512_max_ps(lo, v)));
                }
                if WIDE {
                    let y = (f.y.at as *mut f32).add(at);
                    _mm512_storeu_ps(y, v[0]);
                    _mm512_storeu_ps(y.add(16), v[1]);
                } else {
                    let y = (f.y.at as *mut u16).add(at) as *mut __m512i;
                    _mm512_storeu_si512(y, transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(v[1], v[0])));
                }
            }
        }
    }
}
