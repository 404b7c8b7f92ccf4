//! Matrix products on tile registers (AMX): K groups of two bf16 are summed in f32, and K groups of four
//! bytes in i32.
//!
//! The micro-kernel keeps 32 x 32 sums in four tile registers. A step multiplies 64 bytes of K from each of
//! 32 rows by 64 bytes of K from each of 32 columns. It takes four loads of 1 KiB and four products. Every
//! sum is accumulated along K in order, regardless of how the product is divided and of the number of
//! threads.
//!
//! Cost. A step is 64 cycles of products and 4 KiB of loads. On the processor measured, products run at 80 %
//! of their peak rate if the loads hit the first-level cache, and at 60 % if they hit the second-level cache;
//! memory beyond the second-level cache delivers 10 bytes per cycle. So a few steps of A are multiplied by
//! two panels of B (four if K is short) before the next steps of A are read. Between these multiplications
//! the sums are in a small buffer. The next parts of B, and of the memory of the result, are prefetched.
//!
//! B is packed in panels of 32 columns: `[panel][step][2][16 K groups][16 columns]` with K groups of 4 bytes,
//! and zeros past the last column and the end of K. A is read in place under two conditions: its rows are
//! contiguous and already have the type that is multiplied; and its rows start at multiples of 64 bytes, or B
//! has fewer than 4 panels. An incomplete last step is then read from a zero-padded copy. In all other cases,
//! the thread that multiplies a block of A packs the block as `[panel][step][32 rows][64 bytes]`.

use super::k_groups::{LaneVector, PanelShape, pack_lanes, turn};
use super::matrix::{Mat, MatMut};
use crate::cpu::amx::{TileConfig, Tiles, tile};
use crate::cpu::library::simd::transpose16;
use crate::cpu::team::{AssertSync, SharedConst, SharedMut, Team};
use std::arch::x86_64::*;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows and columns of the sums in one tile register.
const SIDE: usize = 16;
/// Rows and columns of the sums of the micro-kernel.
pub(crate) const PANEL: usize = 2 * SIDE;
/// Bytes of K per step, K groups of 4 bytes per step, and bytes of a tile register.
const STEP: usize = 64;
const LANES: usize = 16;
pub(crate) const TILE: usize = 1024;
/// Largest number of bytes of K in a K block.
const KC: usize = 8192;
/// Steps that the micro-kernel takes before it goes to the next panel of B: 16 KiB of A then stay in the
/// first-level cache.
const CHUNK: usize = 8;
/// If a K block has at most this many steps, the micro-kernel takes all of them before it goes to the next
/// panel of B, because this much of A stays in the first-level cache.
const SHORT: usize = 12;
/// Panels of B whose sums are stored together, in general and for short products.
const GROUP: usize = 2;
const SHORT_GROUP: usize = 4;
/// Bytes of A that a thread multiplies by one panel of B after another: a part of the second-level cache.
/// The limits [`MB`] take precedence.
const A_BLOCK: usize = 512 << 10;
/// The smallest and the largest limit for the number of row panels in a block of A. The limit is not smaller,
/// because B is read once for each block.
const MB: (usize, usize) = (4, 8);
/// Smallest number of micro-kernel steps for which a separate part is worthwhile.
const FEW_STEPS: usize = 48;
/// Products with fewer steps run on the calling thread.
const SERIAL: usize = 192;

/// The multiply instruction of a product.
pub(crate) trait Code: Sync + 'static {
    /// `C += A B` on tile registers.
    ///
    /// # Safety
    /// The contract of the instructions in [`tile`]: the `Tiles` guard that this thread made last is alive,
    /// the processor has the instruction, and the registers have matching sizes.
    unsafe fn dot<const C: u8, const A: u8, const B: u8>();
}

/// K groups of two bf16.
pub(crate) struct Halves;
impl Code for Halves {
    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        // SAFETY: `dot` has the contract of `tile::bf16`.
        unsafe { tile::bf16::<C, A, B>() }
    }
}

/// K groups of four bytes, signed or not.
pub(crate) struct Bytes<const A_SIGNED: bool, const B_SIGNED: bool>;
impl<const X: bool, const Y: bool> Code for Bytes<X, Y> {
    #[inline(always)]
    unsafe fn dot<const C: u8, const A: u8, const B: u8>() {
        // SAFETY: `dot` has the contract of these functions of `tile`.
        unsafe {
            match (X, Y) {
                (true, true) => tile::i8_i8::<C, A, B>(),
                (true, false) => tile::i8_u8::<C, A, B>(),
                (false, true) => tile::u8_i8::<C, A, B>(),
                (false, false) => tile::u8_u8::<C, A, B>(),
            }
        }
    }
}

/// Element types of operands.
pub(crate) trait Source: LaneVector {
    /// Whether rows in memory can be loaded into tile registers without packing.
    const RAW: bool;
}

/// The layout of a packed right operand of `k x n` elements, with `group` elements per K group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PackedShape {
    pub k: usize,
    pub n: usize,
    pub group: usize,
}

impl PackedShape {
    fn steps(&self) -> usize {
        self.k.div_ceil(self.group * LANES)
    }
    fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }
    fn panel_bytes(&self) -> usize {
        self.steps() * 2 * TILE
    }
    pub(crate) fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes()
    }

    /// Packs the right operand, on the team if one is given.
    ///
    /// # Safety
    /// The `k x n` elements of `b` are readable; [`PackedShape::bytes`] at `dst` are writable and used by
    /// nothing else; `T::GROUP == group`; the processor has AVX512_BF16.
    pub(crate) unsafe fn pack<T: Source>(&self, team: Option<&Team>, b: Mat<T>, dst: *mut u8) {
        debug_assert_eq!(T::GROUP, self.group);
        let panels = self.panels();
        // SAFETY: `b` is a matrix that all threads only read.
        let (to, b) = (SharedMut(dst), unsafe { AssertSync::new(b) });
        let run = |q0: usize, q1: usize| {
            // SAFETY: `pack` requires a readable `b` and room at `dst`; the ranges of panels are disjoint.
            unsafe { pack_right(*self, *b.get(), q0, q1, to.get()) }
        };
        match team {
            Some(t) => t.ranges(panels, ((64 << 10) / self.panel_bytes().max(1)).max(1), &run),
            None => run(0, panels),
        }
    }
}

/// Packs panels `q0..q1` of the right operand.
///
/// # Safety
/// The contract of [`PackedShape::pack`]; no other thread writes these panels.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_right<T: Source>(s: PackedShape, b: Mat<T>, q0: usize, q1: usize, dst: *mut u8) {
    let (steps, per) = (s.steps(), T::GROUP * LANES);
    let there = |col: usize| s.n.saturating_sub(col).min(SIDE);
    // SAFETY: `there`, `rows` and `kn` limit reads to elements below k and n; each tile lies in its panel at
    // `dst`.
    unsafe {
        let at = |q: usize, step: usize, half: usize| dst.add(q * s.panel_bytes() + (2 * step + half) * TILE);
        if b.cs == 1 {
            // Read row by row across the panels, because hardware prefetchers work better on longer
            // contiguous reads.
            for lane in 0..steps * LANES {
                let row = lane * T::GROUP;
                let rows = s.k.saturating_sub(row).min(T::GROUP);
                let src = b.ptr.wrapping_offset(row as isize * b.rs);
                for q in q0..q1 {
                    for half in 0..2 {
                        let (col, to) =
                            (q * PANEL + half * SIDE, at(q, lane / LANES, half).add(lane % LANES * 64));
                        let n = there(col);
                        let v = if rows == T::GROUP && n == SIDE {
                            T::across(src.add(col), b.rs)
                        } else if rows == 0 || n == 0 {
                            _mm512_setzero_si512()
                        } else {
                            T::across_part(src.add(col), b.rs, rows, n)
                        };
                        _mm512_storeu_si512(to.cast(), v);
                    }
                }
            }
            return;
        }
        for q in q0..q1 {
            for step in 0..steps {
                let kn = (s.k - step * per).min(per);
                for half in 0..2 {
                    let (col, to) = (q * PANEL + half * SIDE, at(q, step, half));
                    let src = b.ptr.wrapping_offset((step * per) as isize * b.rs + col as isize * b.cs);
                    if b.rs == 1 {
                        // `turn` writes the K groups that exist. The others must be zero, because zero in A
                        // times a NaN that was left here would be NaN.
                        let groups = kn.div_ceil(T::GROUP);
                        std::ptr::write_bytes(to.add(groups * 4 * SIDE), 0, TILE - groups * 4 * SIDE);
                        turn(Mat { ptr: src, rs: b.cs, cs: 1 }, there(col), SIDE, kn, to.cast(), SIDE);
                    } else {
                        std::ptr::write_bytes(to, 0, TILE);
                        let columns = Mat { ptr: src, rs: b.cs, cs: b.rs };
                        let panel = PanelShape { width: SIDE, head: 0 };
                        pack_lanes(columns, there(col), kn, panel, to.cast());
                    }
                }
            }
        }
    }
}

/// Packs rows `i0..i0 + rows` and steps `s0..s1` of the left operand, whose rows have `k` elements.
///
/// # Safety
/// These rows of `a` are readable; `dst` has room for all panels of `s1 - s0` steps; the processor has
/// AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn pack_left<T: Source>(
    a: Mat<T>,
    (i0, rows): (usize, usize),
    k: usize,
    (s0, s1): (usize, usize),
    dst: *mut u8,
) {
    let (steps, per) = (s1 - s0, T::GROUP * LANES);
    // SAFETY: `n` and `there` limit reads to existing rows and elements; `to` stays in the panels at `dst`.
    unsafe {
        for p in 0..rows.div_ceil(PANEL) {
            let (first, to) = (i0 + p * PANEL, dst.add(p * steps * 2 * TILE));
            let n = (rows - p * PANEL).min(PANEL);
            if a.rs == 1 && a.cs != 1 {
                for s in s0..s1 {
                    for half in 0..n.div_ceil(SIDE) {
                        let n = (n - half * SIDE).min(SIDE);
                        let mut v = [_mm512_setzero_ps(); 16];
                        for l in 0..16 {
                            let at = (s * LANES + l) * T::GROUP;
                            let there = k.saturating_sub(at).min(T::GROUP);
                            let src =
                                a.ptr.wrapping_add(first + half * SIDE).wrapping_offset(at as isize * a.cs);
                            if there > 0 {
                                v[l] = _mm512_castsi512_ps(T::across_part(src, a.cs, there, n));
                            }
                        }
                        let t = transpose16(v);
                        for r in 0..16 {
                            let to = to.add((s - s0) * 2 * TILE + half * TILE + r * STEP);
                            _mm512_storeu_ps(to.cast(), t[r]);
                        }
                    }
                }
                continue;
            }
            for r in 0..n {
                let src = a.ptr.wrapping_offset((first + r) as isize * a.rs);
                for s in s0..s1 {
                    let (at, to) = (s * per, to.add((s - s0) * 2 * TILE + r * STEP));
                    let there = k.saturating_sub(at).min(per);
                    if a.cs == 1 {
                        _mm512_storeu_si512(to.cast(), T::along(src.wrapping_add(at), there));
                    } else {
                        std::ptr::write_bytes(to, 0, STEP);
                        let src = src.wrapping_offset(at as isize * a.cs);
                        let row = Mat { ptr: src, rs: 0, cs: a.cs };
                        pack_lanes(row, 1, there, PanelShape { width: 1, head: 0 }, to.cast());
                    }
                }
            }
        }
    }
}

/// The right operand of a product.
pub(crate) enum Right<T> {
    Plain(Mat<T>),
    /// The layout that [`PackedShape::pack`] wrote.
    Packed(SharedConst<u8>),
}

/// Stores sums, with or without an epilogue.
pub(crate) trait StoreSums: Sync {
    /// Stores rows (first, count) and columns (first, count) of the product. `sums` points to their sums of 4
    /// bytes each; each row of sums starts `rs` sums after the row before.
    ///
    /// # Safety
    /// The rows and columns lie in the product; no other thread stores them. Their sums are
    /// complete, readable and writable, and used by nothing else.
    unsafe fn store(&self, rows: (usize, usize), cols: (usize, usize), sums: *mut u8, rs: usize);
}

/// The memory of the final result, which the micro-kernel prefetches: the first row, the bytes from row to
/// row, and the bytes per element.
#[derive(Clone, Copy)]
pub(crate) struct Near {
    pub at: *mut u8,
    pub rs: isize,
    pub bytes: usize,
}

/// Destination of the sums.
#[derive(Clone, Copy)]
pub(crate) enum Dest<'a> {
    /// A matrix of sums with contiguous rows.
    Sums(MatMut<u32>),
    Parts(&'a dyn StoreSums, Option<Near>),
}

impl Dest<'_> {
    fn near(&self) -> Option<Near> {
        match self {
            Dest::Sums(c) => Some(Near { at: c.ptr.cast(), rs: 4 * c.rs, bytes: 4 }),
            Dest::Parts(_, near) => *near,
        }
    }
}

/// Number of rows of the micro-kernel.
pub(crate) const CHUNK_ROWS: usize = PANEL;

/// Operands of one micro-kernel call, which computes sums of up to 32 rows and 32 columns.
pub(crate) struct Micro {
    pub steps: usize,
    /// A: the first row; bytes from row to row, from row 0 to row 16, and from step to step.
    pub a: *const u8,
    pub a_stride: isize,
    pub a_below: isize,
    pub a_step: usize,
    /// The last step of A, as packed rows of 64 bytes, if this step is not stored after the other steps.
    /// Otherwise null.
    pub tail: *const u8,
    pub b: *const u8,
    /// Whether sums start from the values at `c` instead of zero.
    pub more: bool,
    pub c: *mut u8,
    pub c_stride: isize,
    /// Memory to prefetch for reading, and the number of cache lines per step.
    pub ahead: *const u8,
    pub lines: usize,
    /// Memory to prefetch for writing: bytes from row to row, cache lines per row, and rows per step.
    pub write: *const u8,
    pub write_stride: isize,
    pub write_lines: usize,
    pub write_rows: usize,
}

impl Micro {
    /// A call with `steps` steps of A, whose first row is at `a`. `a_stride`, `a_below` and `a_step` are the
    /// bytes from row to row, from row 0 to row 16, and from step to step. The caller sets B and C.
    pub(crate) fn new(steps: usize, a: *const u8, a_stride: isize, a_below: isize, a_step: usize) -> Micro {
        Micro {
            steps,
            a,
            a_stride,
            a_below,
            a_step,
            tail: std::ptr::null(),
            b: std::ptr::null(),
            more: false,
            c: std::ptr::null_mut(),
            c_stride: 0,
            ahead: std::ptr::null(),
            lines: 0,
            write: std::ptr::null(),
            write_stride: 0,
            write_lines: 0,
            write_rows: 0,
        }
    }
}

/// Multiplies one panel of A by one panel of B. `ROWS2` and `COLS2` say whether rows and columns past 16
/// exist.
///
/// # Safety
/// The registers are configured for the rows; `w.a` (and `w.tail`), `w.b` and `w.c` are valid for all rows,
/// columns and steps; the processor has the instructions of K.
#[inline(always)]
unsafe fn micro<K: Code, const ROWS2: bool, const COLS2: bool>(w: &Micro) {
    // SAFETY: `micro` requires configured registers and pointers that cover the rows, columns and steps.
    // Prefetches may have any address.
    unsafe {
        let below = w.c.wrapping_offset(SIDE as isize * w.c_stride);
        if w.more {
            tile::load::<0>(w.c, w.c_stride);
            if COLS2 {
                tile::load::<1>(w.c.add(STEP), w.c_stride);
            }
            if ROWS2 {
                tile::load::<2>(below, w.c_stride);
            }
            if ROWS2 && COLS2 {
                tile::load::<3>(below.add(STEP), w.c_stride);
            }
        } else {
            tile::zero::<0>();
            tile::zero::<1>();
            tile::zero::<2>();
            tile::zero::<3>();
        }
        let mut b = w.b;
        macro_rules! step {
            ($a:expr, $below:expr, $stride:expr) => {
                tile::load::<6>(b, STEP as isize);
                tile::load::<4>($a, $stride);
                if COLS2 {
                    tile::load::<7>(b.wrapping_add(TILE), STEP as isize);
                }
                if ROWS2 {
                    tile::load::<5>($below, $stride);
                }
                K::dot::<0, 4, 6>();
                if COLS2 {
                    K::dot::<1, 4, 7>();
                }
                if ROWS2 {
                    K::dot::<2, 5, 6>();
                }
                if ROWS2 && COLS2 {
                    K::dot::<3, 5, 7>();
                }
                b = b.wrapping_add(2 * TILE);
            };
        }
        let (mut a, mut ahead, mut write) = (w.a, w.ahead, w.write);
        for _ in 0..w.steps {
            for _ in 0..w.lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(64);
            }
            for _ in 0..w.write_rows {
                for l in 0..w.write_lines {
                    _mm_prefetch::<_MM_HINT_ET0>(write.wrapping_add(64 * l).cast());
                }
                write = write.wrapping_offset(w.write_stride);
            }
            step!(a, a.wrapping_offset(w.a_below), w.a_stride);
            a = a.wrapping_add(w.a_step);
        }
        if !w.tail.is_null() {
            step!(w.tail, w.tail.wrapping_add(TILE), STEP as isize);
        }
        let _ = b;
        tile::store::<0>(w.c, w.c_stride);
        if COLS2 {
            tile::store::<1>(w.c.add(STEP), w.c_stride);
        }
        if ROWS2 {
            tile::store::<2>(below, w.c_stride);
        }
        if ROWS2 && COLS2 {
            tile::store::<3>(below.add(STEP), w.c_stride);
        }
    }
}

/// How a product is divided. It does not affect the numeric results.
#[derive(Clone, Copy)]
struct Cut {
    threads: usize,
    /// Rows of a block, and number of blocks.
    mb: usize,
    blocks: usize,
    /// Panels of B in a chunk, and number of chunks.
    chunk: usize,
    chunks: usize,
    /// Number of panels whose sums are stored together.
    group: usize,
    /// Whether A is packed.
    packs: bool,
    /// Bytes of a thread's buffer for the block of A (or its last step), and of the whole buffer including
    /// sums.
    a_bytes: usize,
    bytes: usize,
}

impl Cut {
    fn new(m: usize, shape: &PackedShape, packs: bool, threads: usize) -> Cut {
        let (steps, panels) = (shape.steps(), shape.panels());
        let (kc, row_panels) = ((steps * STEP).clamp(STEP, KC), m.div_ceil(PANEL));
        let work = row_panels * panels * steps;
        let threads = if work < SERIAL { 1 } else { threads.max(1) };
        let most = (A_BLOCK / kc / PANEL).clamp(MB.0, MB.1);
        let mut blocks = row_panels.div_ceil(most);
        if threads > 1 && row_panels >= 4 * threads {
            blocks = blocks.next_multiple_of(threads);
        }
        let mb = row_panels.div_ceil(blocks);
        let blocks = row_panels.div_ceil(mb);
        // Make a few parts per thread, and no tiny parts.
        let few = if threads == 1 { 1 } else { (4 * threads).div_ceil(blocks) };
        let chunks = few.min((work / blocks / FEW_STEPS).max(1)).min(panels).max(1);
        let chunk = panels.div_ceil(chunks);
        let group = if steps <= SHORT { SHORT_GROUP } else { GROUP }.min(chunk);
        let a_bytes = mb * PANEL * if packs { kc } else { STEP };
        let bytes = (64 + a_bytes + PANEL * group * PANEL * 4).next_multiple_of(4096);
        Cut {
            threads,
            mb: mb * PANEL,
            blocks,
            chunk,
            chunks: panels.div_ceil(chunk),
            group,
            packs,
            a_bytes,
            bytes,
        }
    }
}

/// The left operand, `m x k`.
struct Left<T> {
    a: Mat<T>,
    m: usize,
    k: usize,
}

/// `C = A B` on at most `threads` threads of the team. A is m x k, B is k x n.
///
/// # Safety
/// The elements of A and B are readable (a packed B has this shape); the destination is writable, overlaps
/// nothing and is used by nothing else; `threads` is 1 or at least the team's number of threads (buffers are
/// indexed by thread number); the processor has AVX512_BF16 and the instructions of K, and the process may
/// use tile registers.
pub(crate) unsafe fn product<K: Code, A: Source, B: Source>(
    team: &Team,
    threads: usize,
    (m, n, k): (usize, usize, usize),
    a: Mat<A>,
    b: &Right<B>,
    dest: Dest<'_>,
) {
    if m == 0 || n == 0 {
        return;
    }
    let shape = PackedShape { k, n, group: A::GROUP };
    let threads = threads.clamp(1, team.threads());
    let blocks = (shape.steps() * STEP).div_ceil(KC).max(1);
    if let (Dest::Parts(f, _), true) = (dest, blocks > 1) {
        // With several K blocks, the sums are kept in scratch memory until the last block is done.
        let scratch = team.scratch(m * n);
        let sums = SharedMut(scratch.ptr());
        let to = Dest::Sums(MatMut::rows(sums.get().cast(), n));
        // SAFETY: `product` has the same contract for A and B; the scratch has room for all `m * n` sums.
        unsafe { product::<K, A, B>(team, threads, (m, n, k), a, b, to) };
        let each = ((32 << 10) / n).max(1);
        let pass = |i0: usize, i1: usize| {
            for i in (i0..i1).step_by(each) {
                let from = sums.get().wrapping_add(i * n).cast();
                // SAFETY: the product above is complete, and the scratch holds its `m * n` sums. Passes have
                // disjoint rows below `m`.
                unsafe { f.store((i, each.min(i1 - i)), (0, n), from, n) };
            }
        };
        return if threads == 1 { pass(0, m) } else { team.ranges(m, each, &pass) };
    }
    let room = team.scratch(match b {
        Right::Plain(_) => shape.bytes() / 4,
        Right::Packed(_) => 0,
    });
    let packed = match b {
        Right::Packed(p) => p.get(),
        Right::Plain(b) => {
            let to: *mut u8 = room.ptr().cast();
            let on = (threads > 1 && shape.bytes() > 128 << 10).then_some(team);
            // SAFETY: `b` is readable by contract, and the scratch has `shape.bytes()` bytes.
            unsafe { shape.pack(on, *b, to) };
            to.cast_const()
        }
    };
    // If the 64 bytes of a row cross a cache line, each load of the row takes two reads. After packing, they
    // do not cross one.
    let askew = !(a.ptr as usize | (a.rs * size_of::<A>() as isize) as usize).is_multiple_of(STEP);
    let packs = !A::RAW || a.cs != 1 || (askew && shape.panels() >= 4);
    let cut = Cut::new(m, &shape, packs, threads);
    let counters = (cut.blocks * size_of::<AtomicUsize>()).next_multiple_of(4096);
    let scratch = team.scratch((counters + cut.threads * cut.bytes) / 4);
    let base: SharedMut<u8> = SharedMut(scratch.ptr().cast());
    let left = Left { a, m, k };
    let steps = shape.steps();
    for kb in 0..blocks {
        let (s0, s1) = (steps * kb / blocks, steps * (kb + 1) / blocks);
        // SAFETY: the scratch starts with one counter per block, followed by the threads' buffers, each of
        // which starts with a word for the index of a block. No other thread runs yet.
        let next = unsafe {
            for w in 0..cut.threads {
                base.get().add(counters + w * cut.bytes).cast::<usize>().write(usize::MAX);
            }
            let at = base.get().cast::<AtomicUsize>();
            (0..cut.blocks).for_each(|i| at.add(i).write(AtomicUsize::new(0)));
            std::slice::from_raw_parts(at, cut.blocks)
        };
        let job = Job::<A> { left: &left, b: packed, shape, cut, dest, steps: (s0, s1), more: kb > 0 };
        // SAFETY: the job holds pointers, sizes and functions; each block of the result is taken by one
        // thread.
        let job = unsafe { AssertSync::new(job) };
        // Each thread starts with its own blocks and then takes chunks that other threads have left.
        let turn = |worker: usize, part: usize| {
            let tiles = &mut Tiles::new(&TileConfig::FULL);
            let own = base.get().wrapping_add(counters + worker * cut.bytes);
            for d in 0..cut.blocks {
                let block = (part * cut.blocks / cut.threads + d) % cut.blocks;
                loop {
                    let chunk = next[block].fetch_add(1, Ordering::Relaxed);
                    if chunk >= cut.chunks {
                        break;
                    }
                    // SAFETY: `product` requires valid operands; one thread takes each (block, chunk), and
                    // these are disjoint parts of C; `own` is this thread's buffer of `cut.bytes` bytes.
                    unsafe { job.get().run::<K>(tiles, block, chunk, own) };
                }
            }
        };
        if cut.threads == 1 {
            turn(0, 0);
        } else {
            team.run_with(cut.threads, &turn);
        }
    }
}

/// One K block: the data that threads share.
struct Job<'a, A> {
    left: &'a Left<A>,
    b: *const u8,
    shape: PackedShape,
    cut: Cut,
    dest: Dest<'a>,
    steps: (usize, usize),
    /// Whether C holds the sums of earlier K blocks.
    more: bool,
}

impl<A: Source> Job<'_, A> {
    /// Computes the sums of one block of rows and one chunk of columns.
    ///
    /// # Safety
    /// The contract of [`product`]; no other thread computes this block and chunk. `own` is the calling
    /// thread's buffer of [`Cut::bytes`] bytes. It starts with the index of the block of A that it holds, or
    /// with `usize::MAX` if it holds none.
    unsafe fn run<K: Code>(&self, tiles: &mut Tiles, block: usize, chunk: usize, own: *mut u8) {
        let (Left { a, m, k }, cut, (s0, s1)) = (self.left, &self.cut, self.steps);
        let (i0, per) = (block * cut.mb, A::GROUP * LANES);
        let rows = (m - i0).min(cut.mb);
        let (tag, block_a) = (own.cast::<usize>(), own.wrapping_add(64));
        let band = block_a.wrapping_add(cut.a_bytes);
        // Whether the last step is incomplete and copied, while the others are read in place.
        let tail = !cut.packs && s1 * per > *k;
        let steps = s1 - s0 - usize::from(tail);
        // SAFETY: `own` starts with the index of a block, followed by room for a packed block; rows
        // `i0..i0 + rows` lie in A.
        unsafe {
            if *tag != block {
                if cut.packs {
                    pack_left(*a, (i0, rows), *k, (s0, s1), block_a);
                } else if tail {
                    pack_left(*a, (i0, rows), *k, (s1 - 1, s1), block_a);
                }
                *tag = block;
            }
        }
        let (q0, q1) = (chunk * cut.chunk, ((chunk + 1) * cut.chunk).min(self.shape.panels()));
        let panels = rows.div_ceil(PANEL);
        let lines = if panels >= 4 { (2 * TILE / 64).div_ceil(panels) } else { 0 };
        for q in (q0..q1).step_by(cut.group) {
            let group = cut.group.min(q1 - q);
            for p in 0..panels {
                let (i, high) = (i0 + p * PANEL, (rows - p * PANEL).min(PANEL));
                let (top, below) = (high.min(SIDE), high.saturating_sub(SIDE));
                tiles.configure(&TileConfig::two_by_two(top as u8, below.max(1) as u8));
                let (at, stride, under, step) = if cut.packs {
                    (
                        block_a.wrapping_add(p * (s1 - s0) * 2 * TILE).cast_const(),
                        STEP as isize,
                        TILE as isize,
                        2 * TILE,
                    )
                } else {
                    let from = a.ptr.wrapping_offset(i as isize * a.rs).wrapping_add(s0 * per);
                    let stride = a.rs * size_of::<A>() as isize;
                    (from.cast(), stride, SIDE as isize * stride, STEP)
                };
                let (j, cols) = (q * PANEL, ((q + group) * PANEL).min(self.shape.n) - q * PANEL);
                let (width, sums) = (group * PANEL, band.cast::<u32>());
                if let (Dest::Sums(c), true) = (self.dest, self.more) {
                    for r in 0..high {
                        let from = c.ptr.wrapping_offset((i + r) as isize * c.rs).wrapping_add(j);
                        // SAFETY: rows `i..i + high` and columns `j..j + cols` lie in C; the buffer of sums
                        // has room for them.
                        unsafe { std::ptr::copy_nonoverlapping(from, sums.add(r * width), cols) };
                    }
                }
                let (mut s, chunk) = (0, if steps <= SHORT { SHORT } else { CHUNK });
                loop {
                    let now = chunk.min(steps - s);
                    let last = s + now == steps;
                    for g in 0..group {
                        let wide = (cols - g * PANEL).min(PANEL);
                        let panel =
                            self.b.wrapping_add((q + g) * self.shape.panel_bytes() + (s0 + s) * 2 * TILE);
                        // Prefetch the panels after this group, one share per row panel.
                        let next = panel.wrapping_add(group * self.shape.panel_bytes());
                        let near = self.dest.near().filter(|_| last && now > 0);
                        let w = Micro {
                            steps: now,
                            a: at.wrapping_add(s * step),
                            a_stride: stride,
                            a_below: under,
                            a_step: step,
                            tail: if tail && last {
                                block_a.wrapping_add(p * 2 * TILE)
                            } else {
                                std::ptr::null()
                            },
                            b: panel,
                            more: self.more || s > 0,
                            c: band.wrapping_add(g * PANEL * 4),
                            c_stride: (width * 4) as isize,
                            ahead: next.wrapping_add(p * lines * 64 * now),
                            lines: if q + group < self.shape.panels() { lines } else { 0 },
                            write: near.map_or(std::ptr::null(), |n| {
                                n.at.wrapping_offset(i as isize * n.rs)
                                    .wrapping_add((j + g * PANEL) * n.bytes)
                            }),
                            write_stride: near.map_or(0, |n| n.rs),
                            write_lines: near.map_or(0, |n| wide * n.bytes / 64),
                            write_rows: near.map_or(0, |_| high.div_ceil(now)),
                        };
                        // SAFETY: the registers are configured for `top` and `below` rows; the rows and steps
                        // lie in A (or the packed block) and B, and the buffer has room for 32 rows of sums.
                        unsafe { run_micro::<K>(&w, below > 0, wide > SIDE) };
                    }
                    s += now;
                    if last {
                        break;
                    }
                }
                match self.dest {
                    // SAFETY: rows `i..i + high` and columns `j..j + cols` lie in the product. The loop above
                    // has computed their sums into this thread's buffer, and no other thread stores this
                    // part.
                    Dest::Parts(f, _) => unsafe { f.store((i, high), (j, cols), band, width) },
                    Dest::Sums(c) => {
                        for r in 0..high {
                            let to = c.ptr.wrapping_offset((i + r) as isize * c.rs).wrapping_add(j);
                            // SAFETY: rows `i..i + high` and columns `j..j + cols` lie in C, which this
                            // thread alone writes here.
                            unsafe { std::ptr::copy_nonoverlapping(sums.add(r * width), to, cols) };
                        }
                    }
                }
            }
        }
    }
}

/// Runs the micro-kernel. `below` and `right` say whether rows and columns past 16 exist.
///
/// # Safety
/// The contract of [`micro`].
#[inline(always)]
pub(crate) unsafe fn run_micro<K: Code>(w: &Micro, below: bool, right: bool) {
    // SAFETY: `run_micro` has the contract of `micro`.
    unsafe {
        match (below, right) {
            (true, true) => micro::<K, true, true>(w),
            (true, false) => micro::<K, true, false>(w),
            (false, true) => micro::<K, false, true>(w),
            (false, false) => micro::<K, false, false>(w),
        }
    }
}
