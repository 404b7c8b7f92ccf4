//! Matrix products with the formula of [`Epilogue`]. B is in packed panels. Rows of A are read in place where
//! that is possible.
//!
//! The blocking is that of Goto and van de Geijn, "Anatomy of high-performance matrix multiplication" (2008),
//! with one difference: a register tile reads its rows of A in place, one value of each row per step, so A is
//! packed only if its rows are not contiguous f32. (A step of a tile takes one element of K, or one pair of
//! 16-bit integers.) A part of the work is a block of rows by a chunk of columns for all of K. Its part of C
//! stays in the second-level cache from one K block to the next, and the chunk's panels stay there from one
//! tile of rows to the next.
//!
//! Cost. A step of the widest tile (9 rows by 3 vectors of AVX-512) takes 27 multiply-adds and 12 loads; a
//! step of a tile of 12 rows by 2 vectors takes 24 multiply-adds and 14 loads. On processors that lower their
//! clock when they draw more power, fewer loads also give a higher clock.

use super::matrix::{Epilogue, Gemm, Mat, MatMut, Store};
use super::product_f32::{Packed, Panels, k_block, k_blocks, kc_max, pack_columns, pack_rows_on, spread};
#[cfg(target_arch = "x86_64")]
use crate::cpu::library::simd::{Avx2, Avx512};
use crate::cpu::library::simd::{Portable, Simd, Sizes, Storage, dispatch_simd};
use crate::cpu::sys::{Caches, Isa};
use crate::cpu::team::{AssertSync, SharedMut, Team};

/// Largest number of rows in a block, unless each part packs its own columns of B. In that case a block has
/// all rows, or all that are packed at a time.
const ROWS: usize = 192;
/// Each part packs its own columns of B if there is one thread, or if A has at most this many rows and B has
/// enough panels for all threads. Otherwise B is packed once for all threads.
const OWN_ROWS: usize = 256;
/// Largest number of panels of B per part, if B is already packed and prefetched, A has few rows and there
/// are enough panels for all threads.
const NEAR_PANELS: usize = 2;
/// Largest number of floats of A, and of B, that are packed at a time. However, at least [`ROWS`] rows of A
/// and 8 panels of B are packed at a time, if the operand has them.
const MOST_PACKED: usize = 4 << 20;
/// Sums over which the epilogue's chain runs at a time, at least, unless the block ends.
const CHAIN: usize = 512;
/// Products with fewer multiply-adds than this run on the calling thread.
pub(crate) const SERIAL: usize = 300_000;
/// Floats per cache line.
const LINE: usize = 16;
/// Parts of the work to make per thread. There are several, so that one delayed part does not delay the whole
/// product.
const PARTS: usize = 4;

/// The left operand.
pub(crate) enum Left<T> {
    Plain(Mat<T>),
    Packed(Packed),
}

impl<T: Storage> Left<T> {
    /// Whether tiles can read the operand in place.
    fn direct(&self) -> bool {
        match self {
            Left::Plain(a) => T::IS_F32 && a.cs == 1,
            Left::Packed(_) => true,
        }
    }
}

/// The work on a block of rows by a chunk of columns of C, for one K block. The type does not depend on the
/// source of B, so one kernel for each instruction set serves every source.
pub(super) struct Block {
    /// Rows of A. The row for row `i` of C is at `a + (i - i0) * rs`.
    a: *const f32,
    rs: isize,
    i0: usize,
    rows: usize,
    /// Columns `j0..j1`.
    j0: usize,
    j1: usize,
    /// Number of K elements.
    kc: usize,
    /// Packed columns from `j0` on: consecutive panels.
    panels: *const f32,
    /// Memory to prefetch for the next block (or null), and its number of floats.
    ahead: (*const f32, usize),
    /// Whether the rows of A probably come from memory and not from a cache. If so, the rows of the next tile
    /// are prefetched.
    far: bool,
    c: MatMut<f32>,
    epi: Epilogue,
    isa: Isa,
}

dispatch_simd! {
    /// # Safety
    /// The contract of `block_of`. The caller may be compiled for any instruction set, because the dispatch
    /// checks `isa`.
    unsafe fn block[][](isa, w: &Block) = block_body
}

/// # Safety
/// The contract of `block_of`.
#[inline(always)]
unsafe fn block_body<S: RegisterTiles>(w: &Block) {
    // SAFETY: `block_body` has the contract of `block_of`.
    unsafe { block_of::<S, Fma>(w) }
}

/// Number of rows of the next tile if `left` rows remain: `most`, or `most - 1` if tiles of `most - 1` rows
/// cover the rest exactly, or, for the last rows, a smaller size that has a kernel.
#[inline(always)]
fn height(most: usize, left: usize) -> usize {
    let tiles = left.div_ceil(most);
    match left {
        0 => 0,
        _ if tiles * (most - 1) < left => most,
        _ if tiles * (most - 1) == left => most - 1,
        _ if left > most => most,
        4.. if most > 4 => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Computes one block.
///
/// # Safety
/// The caller is compiled for `S`'s instruction set. The `w.rows` rows at `w.a` have `w.kc` readable floats;
/// the panels of columns `w.j0..w.j1` are at `w.panels`; these rows and columns of C are writable
/// and used by this thread only, and the epilogue covers them.
#[inline(always)]
pub(super) unsafe fn block_of<S: RegisterTiles, D: Step<S>>(w: &Block) {
    let (nr, kc) = (S::VECS * S::W, w.kc);
    let store = w.epi.store();
    let (mut i, mut done, mut chained) = (0, 0, 0);
    while i < w.rows {
        let rows = height(S::ROWS, w.rows - i);
        let tiles = (w.j1 - w.j0).div_ceil(nr);
        let lines = if w.far { height(S::ROWS, w.rows - i - rows) * kc.div_ceil(LINE) } else { 0 };
        // SAFETY: `i < w.rows`, `j < w.j1`, and `rows` and `cols` limit each tile to the block, whose
        // operands the contract makes valid. Prefetched addresses need not be readable.
        unsafe {
            let a = w.a.offset(i as isize * w.rs);
            for j in (w.j0..w.j1).step_by(nr) {
                let b = w.panels.add((j - w.j0) * kc);
                let more = done < w.ahead.1;
                let out = Tile {
                    ahead: if more { w.ahead.0.wrapping_add(done) } else { std::ptr::null() },
                    c: w.c.ptr.offset((w.i0 + i) as isize * w.c.rs + j as isize * w.c.cs),
                    rs: w.c.rs,
                    cs: w.c.cs,
                    rows,
                    cols: (w.j1 - j).min(nr),
                    i: w.i0 + i,
                    j,
                    store,
                    epi: w.epi,
                    convert: w.epi.chain.is_some(),
                };
                done += kc / STRIDE * AHEAD;
                let t = (j - w.j0) / nr;
                for line in lines * t / tiles..lines * (t + 1) / tiles {
                    let (row, at) = (rows + line / kc.div_ceil(LINE), line % kc.div_ceil(LINE));
                    S::prefetch(a.wrapping_offset(row as isize * w.rs).wrapping_add(at * LINE));
                }
                S::tile::<D>(kc, a, w.rs, b, &out);
            }
            i += rows;
            // The steps of a chain have a cost per call, so the chain runs over the rows of several tiles.
            if w.epi.chain.is_some() && (i == w.rows || (i - chained) * (w.j1 - w.j0) >= CHAIN) {
                let c = w.c.ptr.offset((w.i0 + chained) as isize * w.c.rs + w.j0 as isize);
                let (rows, cols) = ((w.i0 + chained, i - chained), (w.j0, w.j1 - w.j0));
                w.epi.chain.run_rows(w.isa, rows, cols, c, w.c.rs as usize);
                chained = i;
            }
        }
    }
}

/// A tile of C and the epilogue of its sums.
pub(crate) struct Tile {
    pub c: *mut f32,
    pub rs: isize,
    pub cs: isize,
    /// Rows and columns of the tile that lie in C.
    pub rows: usize,
    pub cols: usize,
    /// Row and column of the tile's first element in C, for the biases.
    pub i: usize,
    pub j: usize,
    pub store: Store,
    pub epi: Epilogue,
    /// Memory that a later tile reads. This tile prefetches two cache lines of it every [`STRIDE`] steps.
    /// Null if there is nothing to prefetch.
    pub ahead: *const f32,
    /// Whether sums of integers are stored as f32, because the epilogue's chain reads them next.
    pub convert: bool,
}

/// Steps of a tile between two prefetches.
const STRIDE: usize = 8;
/// Floats prefetched each time.
const AHEAD: usize = 32;

/// One step of a register tile's sum.
pub(crate) trait Step<S: Simd> {
    /// Whether lanes hold integers: a lane of a factor holds two 16-bit integers, a lane of a sum one i32.
    const INTEGERS: bool = false;
    /// Returns `acc` plus the lane-wise product of `a` and `b`.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set, and for the instructions that the implementation
    /// names.
    unsafe fn step(a: S::V, b: S::V, acc: S::V) -> S::V;
    /// The lane-wise sum of two sums.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set.
    #[inline(always)]
    unsafe fn add(a: S::V, b: S::V) -> S::V {
        // SAFETY: `add` requires a caller compiled for `S`'s instruction set.
        unsafe { S::add(a, b) }
    }
    /// Converts sums to f32.
    ///
    /// # Safety
    /// The caller is compiled for `S`'s instruction set.
    #[inline(always)]
    unsafe fn float(sums: S::V) -> S::V {
        sums
    }
}

/// A multiply-add of f32 lanes.
pub(crate) struct Fma;

impl<S: Simd> Step<S> for Fma {
    #[inline(always)]
    unsafe fn step(a: S::V, b: S::V, acc: S::V) -> S::V {
        // SAFETY: the contract of `step` gives the instruction set of `S`.
        unsafe { S::fma(a, b, acc) }
    }
}

/// The left operand of a register tile: element `k` of row `i` is at `ptr[i * rs + k * ks]`. Callers pass a
/// constant `ks`, so that the offsets in an unrolled loop are constants.
#[derive(Clone, Copy)]
pub(crate) struct TileRows {
    pub ptr: *const f32,
    pub rs: isize,
    pub ks: usize,
}

/// Steps per iteration of the unrolled loop. With one step per iteration, advancing the pointers takes a
/// third of the time on processors with 16 registers.
const UNROLL: usize = 4;

/// Computes `R x (NV W)` sums over `kc` steps in registers. The order of each sum does not depend on R and
/// NV. Element `k` of column `j` of the right operand is at `b[k * NV * W + j]`. `ahead` is as in [`Tile`].
///
/// # Safety
/// The caller is compiled for `S`'s instruction set; both operands are readable for `i < R`, `j < NV W`,
/// `k < kc`. `ahead` need not be readable.
#[inline(always)]
pub(crate) unsafe fn sums<S: Simd, D: Step<S>, const R: usize, const NV: usize>(
    kc: usize,
    a: TileRows,
    b: *const f32,
    ahead: *const f32,
) -> [[S::V; NV]; R] {
    // SAFETY: `left` counts the steps down, so `k < kc` in every access, `i < R` and `j < NV W`; the contract
    // makes these elements readable. Prefetches may have any address.
    unsafe {
        let mut acc = [[S::zero(); NV]; R];
        // One pointer serves three rows. Their offsets from it are 0, 1 and 2 times the row stride. An
        // address on x86-64 can contain such a multiple of a register.
        let mut rows = [a.ptr; R];
        for g in 1..R.div_ceil(3) {
            rows[g] = a.ptr.wrapping_offset(3 * g as isize * a.rs);
        }
        let mut b = b;
        macro_rules! turn {
            ($n:expr) => {
                for u in 0..$n {
                    let mut bv = [S::zero(); NV];
                    for v in 0..NV {
                        bv[v] = S::load(b.add((u * NV + v) * S::W));
                    }
                    for i in 0..R {
                        let x = S::splat(
                            *rows[i / 3].wrapping_offset((i % 3) as isize * a.rs).wrapping_add(u * a.ks),
                        );
                        for v in 0..NV {
                            acc[i][v] = D::step(x, bv[v], acc[i][v]);
                        }
                    }
                }
                for g in 0..R.div_ceil(3) {
                    rows[g] = rows[g].wrapping_add($n * a.ks);
                }
                b = b.wrapping_add($n * NV * S::W);
            };
        }
        let mut left = kc;
        if !ahead.is_null() {
            let mut ahead = ahead;
            while left >= STRIDE {
                S::prefetch(ahead);
                S::prefetch(ahead.wrapping_add(AHEAD / 2));
                ahead = ahead.wrapping_add(AHEAD);
                for _ in 0..STRIDE / UNROLL {
                    turn!(UNROLL);
                }
                left -= STRIDE;
            }
        }
        while left >= UNROLL {
            turn!(UNROLL);
            left -= UNROLL;
        }
        while left > 0 {
            turn!(1);
            left -= 1;
        }
        acc
    }
}

/// Computes the tile of [`sums`] and stores it through the epilogue. `out` may have fewer rows than R and
/// fewer columns than NV W.
///
/// # Safety
/// The contract of [`sums`]; the rows and columns of `out` are writable, used by no other thread, and covered
/// by its biases.
#[inline(always)]
pub(crate) unsafe fn register_tile<S: Simd, D: Step<S>, const R: usize, const NV: usize>(
    kc: usize,
    a: TileRows,
    b: *const f32,
    out: &Tile,
) {
    // SAFETY: the contract of `sums` holds. The fast path stores all R rows and NV W columns only if `out`
    // has them; `store_tile` stores the rows and columns of `out` only.
    unsafe {
        let acc = sums::<S, D, R, NV>(kc, a, b, out.ahead);
        // Loops over the accumulators have constant bounds and no exits. Otherwise the compiler would keep
        // the accumulators in memory.
        let full = out.cs == 1 && out.rows == R && out.cols == NV * S::W;
        if full && out.store != Store::Other {
            let add = out.store == Store::Add;
            for i in 0..R {
                for v in 0..NV {
                    let p = out.c.offset(i as isize * out.rs).add(v * S::W);
                    let x = if add { D::add(acc[i][v], S::load(p)) } else { acc[i][v] };
                    S::store(p, if D::INTEGERS && out.convert { D::float(x) } else { x });
                }
            }
        } else if D::INTEGERS {
            let mut sums = [[[0f32; 16]; NV]; R];
            for i in 0..R {
                for v in 0..NV {
                    S::store(sums[i][v].as_mut_ptr(), acc[i][v]);
                }
            }
            store_integers(sums.as_ptr().cast(), (NV, S::W), out);
        } else {
            let mut sums = [[[0f32; 16]; NV]; R];
            for i in 0..R {
                for v in 0..NV {
                    S::store(sums[i][v].as_mut_ptr(), acc[i][v]);
                }
            }
            store_tile(S::ISA, sums.as_ptr().cast(), NV, out);
        }
    }
}

/// Stores the i32 sums of a tile of any size. A row of `sums` has `vectors` groups of 16 words. The first
/// `lanes` words of a group are sums.
///
/// # Safety
/// `sums` has `out.rows` rows; the rows and columns of `out` are writable (and readable for
/// [`Store::Add`]) and used by no other thread.
unsafe fn store_integers(sums: *const i32, (vectors, lanes): (usize, usize), out: &Tile) {
    for i in 0..out.rows {
        for j in 0..out.cols {
            // SAFETY: `i` and `j` are below the tile's rows and columns, which the contract makes valid.
            unsafe {
                let p = out.c.offset(i as isize * out.rs + j as isize * out.cs).cast::<i32>();
                let sum = *sums.add((i * vectors + j / lanes) * 16 + j % lanes);
                let sum = if out.store == Store::Add { sum.wrapping_add(*p) } else { sum };
                if out.convert { *p.cast::<f32>() = sum as f32 } else { *p = sum }
            }
        }
    }
}

dispatch_simd! {
    /// Stores the sums of a tile of any size. For [`Store::Plain`] and [`Store::Add`], the values are those
    /// that the fast path of [`register_tile`] stores. One function serves all tiles of an instruction set. A
    /// row of `sums` has `vectors` groups of 16 floats. The lanes of a vector are the first floats of a
    /// group.
    ///
    /// # Safety
    /// `sums` has `out.rows` rows; the rows and columns of `out` are writable, used by no other thread, and
    /// covered by its biases.
    unsafe fn store_tile[][](isa, sums: *const f32, vectors: usize, out: &Tile) = store_tile_body
}

/// The body of `store_tile`.
///
/// # Safety
/// The contract of `store_tile`, and the caller is compiled for `S`'s instruction set.
#[inline(always)]
unsafe fn store_tile_body<S: Simd>(sums: *const f32, vectors: usize, out: &Tile) {
    let e = &out.epi;
    // SAFETY: rows stop at `out.rows`, and `n` limits each vector to `out.cols`, which the contract makes
    // valid.
    unsafe {
        let alpha = S::splat(e.alpha);
        let beta = S::splat(e.beta);
        for i in 0..out.rows {
            let row = out.c.offset(i as isize * out.rs);
            for v in 0..vectors {
                let sums = sums.add((i * vectors + v) * 16);
                let n = out.cols.saturating_sub(v * S::W).min(S::W);
                if n == 0 {
                    break;
                }
                if out.cs != 1 {
                    for l in 0..n {
                        let j = v * S::W + l;
                        let p = row.offset(j as isize * out.cs);
                        *p = e.scalar(*sums.add(l), p, out.i + i, out.j + j);
                    }
                    continue;
                }
                let p = row.add(v * S::W);
                let mut x = S::mul(S::load(sums), alpha);
                if e.beta != 0.0 {
                    x = S::fma(S::load_part(p, n), beta, x);
                }
                if !e.bias_row.0.is_null() {
                    x = S::add(x, S::splat(*e.bias_row.0.add(out.i + i)));
                }
                if !e.bias_col.0.is_null() {
                    x = S::add(x, S::load_part(e.bias_col.0.add(out.j + v * S::W), n));
                }
                if e.relu {
                    x = S::relu(x);
                }
                S::store_part(p, x, n);
            }
        }
    }
}

/// The register tiles that cover a block, by instruction set.
pub(crate) trait RegisterTiles: Simd {
    /// Computes a register tile from rows of A that start `rs` floats apart; see [`register_tile`]. `out` has
    /// ROWS, ROWS - 1, 4, 2 or 1 rows.
    ///
    /// # Safety
    /// The contract of [`register_tile`]; the caller is compiled for this instruction set.
    unsafe fn tile<D: Step<Self>>(kc: usize, a: *const f32, rs: isize, b: *const f32, out: &Tile);
}

/// Calls `register_tile` with the number of rows and vectors of `$out`.
macro_rules! tile_of_rows {
    ($kc:expr, $a:expr, $rs:expr, $b:expr, $out:expr) => {
        match $out.cols.div_ceil(Self::W) {
            1 => tile_of_rows!(1, $kc, $a, $rs, $b, $out),
            2 => tile_of_rows!(2, $kc, $a, $rs, $b, $out),
            _ => tile_of_rows!({ Self::VECS }, $kc, $a, $rs, $b, $out),
        }
    };
    ($nv:tt, $kc:expr, $a:expr, $rs:expr, $b:expr, $out:expr) => {
        if $out.rows == Self::ROWS {
            register_tile::<Self, D, { Self::ROWS }, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        } else if $out.rows == Self::ROWS - 1 {
            register_tile::<Self, D, { Self::ROWS - 1 }, $nv>(
                $kc,
                TileRows { ptr: $a, rs: $rs, ks: 1 },
                $b,
                $out,
            )
        } else if $out.rows == 4 {
            register_tile::<Self, D, 4, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        } else if $out.rows == 2 {
            register_tile::<Self, D, 2, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        } else {
            register_tile::<Self, D, 1, $nv>($kc, TileRows { ptr: $a, rs: $rs, ks: 1 }, $b, $out)
        }
    };
}

macro_rules! register_tiles {
    ($($set:ty),*) => {$(
        impl RegisterTiles for $set {
            #[inline(always)]
            unsafe fn tile<D: Step<Self>>(
                kc: usize,
                a: *const f32,
                rs: isize,
                b: *const f32,
                out: &Tile,
            ) {
                // SAFETY: `RegisterTiles::tile` has the contract of `register_tile`.
                unsafe { tile_of_rows!(kc, a, rs, b, out) }
            }
        }
    )*};
}
// A generic function cannot replace this macro: it could not pass the constants of its type parameter (the
// sizes of the tile) to `register_tile` as const arguments.
register_tiles!(Portable);
#[cfg(target_arch = "x86_64")]
register_tiles!(Avx2, Avx512);

/// Whether blocks prefetch the panels and rows that the thread reads next. With AVX2, on an AMD Zen 3, the
/// products of BERT (128 rows, 384 or 1,536 columns) reach 83 % of the peak without this and 60 % with it: a
/// panel and the rows of a tile already fill the first-level cache of 32 KiB, so prefetched lines displace
/// them.
fn prefetches(isa: Isa) -> bool {
    isa == Isa::Avx512
}

/// How a product is divided. This depends on the shape, the instruction set, the number of threads, the cache
/// sizes and whether operands are packed. Only the division into K blocks affects the numeric results. It
/// depends on K alone.
struct Shape {
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    /// Columns per panel.
    nr: usize,
    threads: usize,
    /// Rows of A that are packed at a time, for all of K; 0 if A is read in place.
    a_rows: usize,
    /// Columns that are packed at a time, for all of K; 0 if B is already packed or each part packs its own.
    b_cols: usize,
    /// Whether each part packs its own columns of B.
    own: bool,
    /// Size of a part: rows of its block, columns of its chunk.
    rows: usize,
    cols: usize,
    /// Whether to prefetch the panels that the thread reads next.
    near: bool,
}

impl Shape {
    fn new(isa: Isa, m: usize, n: usize, k: usize, threads: usize, direct: bool, ready: bool) -> Shape {
        let nr = Sizes::of(isa).panel;
        let panels = n.div_ceil(nr);
        let threads = if m.saturating_mul(n).saturating_mul(k) < SERIAL { 1 } else { threads };
        let fit = MOST_PACKED / k.max(1);
        let a_rows = if direct { 0 } else { m.min(fit.max(ROWS)) };
        let own = !ready && (threads == 1 || m <= OWN_ROWS && panels >= PARTS * threads);
        let b_cols = if ready || own { 0 } else { n.min((fit / nr).max(8) * nr) };
        let kc = kc_max(k).max(1);
        let chunk = (Caches::get().l2 * 3 / 32 / (kc * nr)).clamp(2, 16);
        let mut rows = match own {
            true => m,
            false => even(if direct { m } else { a_rows }, ROWS),
        };
        let width = if b_cols > 0 { b_cols.div_ceil(nr) } else { panels };
        let mut chunk = chunk.min(width).max(1);
        if own && threads > 1 {
            chunk = chunk.min((panels / (PARTS * threads)).max(1));
        }
        // Make enough parts for the threads. First use fewer columns per part, then fewer rows. With fewer
        // rows, more parts read the same panels, but from a cache.
        let want = if threads == 1 { 1 } else { PARTS * threads };
        let near = ready && m <= ROWS && prefetches(isa);
        if !own {
            if near && threads * 2 * NEAR_PANELS <= panels {
                chunk = chunk.min(NEAR_PANELS);
            }
            let mut blocks = m.div_ceil(rows.max(1));
            while blocks * width.div_ceil(chunk) < want && chunk > 1 {
                chunk = chunk.div_ceil(2);
            }
            if blocks * width.div_ceil(chunk) < want && m > 32 {
                blocks = (want / width.div_ceil(chunk)).min(m / 16).max(blocks);
                rows = m.div_ceil(blocks);
            }
        }
        Shape { isa, m, n, k, nr, threads, a_rows, b_cols, own, rows: rows.max(1), cols: chunk * nr, near }
    }

    fn a_floats(&self) -> usize {
        (self.a_rows * self.k).next_multiple_of(16)
    }
    fn b_floats(&self) -> usize {
        let own = if self.own { self.threads * self.cols * kc_max(self.k) } else { 0 };
        self.b_cols.next_multiple_of(self.nr) * self.k + own
    }
    fn floats(&self) -> usize {
        self.a_floats() + self.b_floats()
    }
}

/// Size of the parts if `n` is divided evenly into as few parts of at most `most` as possible.
fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).max(1)
}

/// Computes a block with the instructions of the [`Isa`].
///
/// # Safety
/// The contract of [`block_of`]. The caller may be compiled for any instruction set, because the function
/// checks the [`Isa`].
pub(super) type RunBlock = unsafe fn(Isa, &Block);

/// Computes the product.
///
/// # Safety
/// The contract of `gemm_panels`; `run` computes blocks; `buf` has room for `s.floats()` floats; `team` is
/// `None` if `s.threads` is 1, otherwise a team of `s.threads` threads.
unsafe fn drive<T: Storage, P: Panels>(
    team: Option<&Team>,
    s: &Shape,
    run: RunBlock,
    g: &Gemm<&Left<T>, &P>,
    buf: *mut f32,
) {
    let Gemm { a, b, c, epilogue: epi, .. } = *g;
    let a_buf = SharedMut(buf);
    let b_buf = SharedMut(buf.wrapping_add(s.a_floats()));
    let blocks = k_blocks(s.k);
    let rows_at_once = if s.a_rows > 0 { s.a_rows } else { s.m };
    let cols_at_once = if s.b_cols > 0 { s.b_cols } else { s.n };
    for i0 in (0..s.m).step_by(rows_at_once) {
        let m = (s.m - i0).min(rows_at_once);
        for j0 in (0..s.n).step_by(cols_at_once) {
            let n = (s.n - j0).min(cols_at_once);
            // First pack the columns of B and, before the first columns, the rows of A.
            let each = ROWS / 8;
            let a_parts = match a {
                Left::Plain(_) if s.a_rows > 0 && j0 == 0 => m.div_ceil(each) * blocks,
                _ => 0,
            };
            let (group, groups) = match s.b_cols {
                0 => (0, 0),
                _ => (2 * s.nr, n.div_ceil(2 * s.nr)),
            };
            if a_parts + groups > 0 {
                spread(team, a_parts + groups * blocks, &|_, part| {
                    let (of_a, part) = (part < a_parts, if part < a_parts { part } else { part - a_parts });
                    let (k0, k1) = k_block(s.k, part % blocks);
                    let (kc, part) = (k1 - k0, part / blocks);
                    if let (true, Left::Plain(mat)) = (of_a, a) {
                        let (r0, r1) = (part * each, ((part + 1) * each).min(m));
                        // SAFETY: rows `r0..r1` and K block `k0..k1` lie in A; this part alone writes their
                        // range of the buffer.
                        unsafe {
                            let from = mat.ptr.offset((i0 + r0) as isize * mat.rs + k0 as isize * mat.cs);
                            let to = a_buf.get().add(k0 * m + r0 * kc);
                            pack_rows_on(s.isa, from, mat.rs, mat.cs, r1 - r0, kc, to);
                        }
                    } else {
                        let (c0, c1) = (part * group, ((part + 1) * group).min(n));
                        // SAFETY: columns `c0..c1` lie in B; this part alone writes their range of the
                        // buffer.
                        unsafe {
                            let to = b_buf.get().add(k0 * n.next_multiple_of(s.nr) + c0 * kc);
                            pack_columns(s.isa, b, k0, kc, j0 + c0, j0 + c1, to);
                        }
                    }
                });
            }
            let (rows, cols) = (even(m, s.rows), s.cols);
            let (row_parts, col_parts) = (m.div_ceil(rows), n.div_ceil(cols));
            // SAFETY: a matrix is a pointer and strides; the parts below write disjoint blocks of C.
            let cc = unsafe { AssertSync::new(c) };
            spread(team, row_parts * col_parts, &|worker, part| {
                let (ri, ci) = (part % row_parts, part / row_parts);
                let (r0, r1) = (ri * rows, ((ri + 1) * rows).min(m));
                let (c0, c1) = (ci * cols, ((ci + 1) * cols).min(n));
                for kb in 0..blocks {
                    let (k0, k1) = k_block(s.k, kb);
                    let kc = k1 - k0;
                    let (at, rs) = match a {
                        Left::Packed(p) => (p.panel(k0, kc, i0 + r0), kc as isize),
                        Left::Plain(_) if s.a_rows > 0 => {
                            (a_buf.get().wrapping_add(k0 * m + r0 * kc) as *const f32, kc as isize)
                        }
                        Left::Plain(p) => {
                            let at = (i0 + r0) as isize * p.rs + k0 as isize * p.cs;
                            ((p.ptr as *const f32).wrapping_offset(at), p.rs)
                        }
                    };
                    let panels = if s.own {
                        let own = b_buf.get().wrapping_add(worker * cols * kc_max(s.k));
                        // SAFETY: columns `c0..c1` lie in B; this buffer belongs to the worker.
                        unsafe { pack_columns(s.isa, b, k0, kc, j0 + c0, j0 + c1, own) };
                        own as *const f32
                    } else if s.b_cols > 0 {
                        b_buf.get().wrapping_add(k0 * n.next_multiple_of(s.nr) + c0 * kc)
                    } else {
                        b.ready(k0, kc, j0 + c0)
                    };
                    let block_of = Block {
                        a: at,
                        rs,
                        i0: i0 + r0,
                        rows: r1 - r0,
                        j0: j0 + c0,
                        j1: j0 + c1,
                        kc,
                        panels,
                        ahead: if s.near { next(s, b, kb, c1, cols) } else { (std::ptr::null(), 0) },
                        far: blocks == 1 && r1 - r0 > ROWS / 4 && prefetches(s.isa),
                        c: *cc.get(),
                        epi: epi.for_block(kb == 0, kb + 1 == blocks),
                        isa: s.isa,
                    };
                    // SAFETY: parts cover disjoint rows and columns of C; `a` and the panels cover the block.
                    unsafe { run(s.isa, &block_of) };
                }
            });
        }
    }
}

/// A pointer to the panels that the thread is likely to read next, and their number of floats. The thread now
/// works on K block `kb` of a chunk of `cols` columns that ends at column `end`.
fn next<P: Panels>(s: &Shape, b: &P, kb: usize, end: usize, cols: usize) -> (*const f32, usize) {
    let last = kb + 1 == k_blocks(s.k);
    let (kb, j) = match last {
        true => (0, end + (s.threads - 1) * cols),
        false => (kb + 1, end - cols.min(end)),
    };
    if j >= s.n {
        return (std::ptr::null(), 0);
    }
    let (k0, k1) = k_block(s.k, kb);
    (b.ready(k0, k1 - k0, j), cols.min(s.n - j) * (k1 - k0))
}

/// Computes the product on a team, with scratch memory of the team.
///
/// # Safety
/// The `m x k` elements of A and `k x n` of B are readable. The elements of C are writable, overlap nothing
/// and are used by nothing else. The epilogue's biases and chain cover C.
pub(crate) unsafe fn gemm_panels<T: Storage, P: Panels>(team: &Team, isa: Isa, g: &Gemm<&Left<T>, &P>) {
    // SAFETY: `gemm_panels` has the contract of `gemm_blocks`, and `block` computes blocks of f32.
    unsafe { gemm_blocks(team, team.threads(), isa, block, g) }
}

/// [`gemm_panels`] on 1 or all threads of the team, with another computation of blocks.
///
/// # Safety
/// The contract of `gemm_panels`; `run` computes blocks.
pub(super) unsafe fn gemm_blocks<T: Storage, P: Panels>(
    team: &Team,
    threads: usize,
    isa: Isa,
    run: RunBlock,
    g: &Gemm<&Left<T>, &P>,
) {
    let ready = !g.b.ready(0, 1, 0).is_null();
    let s = Shape::new(isa, g.m, g.n, g.k, threads, g.a.direct(), ready);
    let on = (s.threads > 1).then_some(team);
    // SAFETY: `gemm_blocks` has the contract of `drive` for the matrices; the scratch has `s.floats()`
    // floats.
    unsafe {
        if s.floats() == 0 {
            return drive(on, &s, run, g, std::ptr::null_mut());
        }
        let scratch = team.scratch(s.floats());
        drive(on, &s, run, g, scratch.ptr())
    }
}

/// Floats of scratch memory that [`panels_inline`] needs. `direct` says whether tiles read the left operand
/// in place (contiguous rows of f32, or packed).
pub(crate) fn inline_floats(isa: Isa, m: usize, n: usize, k: usize, direct: bool) -> usize {
    Shape::new(isa, m, n, k, 1, direct, false).floats().next_multiple_of(1024)
}

/// Computes the product on the calling thread.
///
/// # Safety
/// The contract of `gemm_panels`; `buf` has room for [`inline_floats`] floats.
pub(crate) unsafe fn panels_inline<T: Storage, P: Panels>(isa: Isa, g: &Gemm<&Left<T>, &P>, buf: *mut f32) {
    let s = Shape::new(isa, g.m, g.n, g.k, 1, g.a.direct(), false);
    // SAFETY: `panels_inline` has the contract of `drive`; `inline_floats` is at least `s.floats()`.
    unsafe { drive(None, &s, block, g, buf) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heights_fill_and_have_kernels() {
        for most in [4, 6, 8, 9] {
            for rows in 1..200 {
                let (mut left, mut tiles) = (rows, 0);
                while left > 0 {
                    let h = height(most, left);
                    assert!(
                        h <= left && (h == most || h == most - 1 || [1, 2, 4].contains(&h)),
                        "{most} {left} {h}"
                    );
                    left -= h;
                    tiles += 1;
                }
                assert!(tiles <= rows.div_ceil(most) + 3, "{most} {rows} {tiles}");
            }
        }
    }
}
