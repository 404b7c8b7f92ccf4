//! The driver of matrix products whose operands are packed into K groups: 32-bit words of consecutive
//! elements of K, two bf16 or four 8-bit integers.
//!
//! A is packed once for all threads. Each thread packs the columns of B that it multiplies by. If B has few
//! columns, the rows of A are divided among the threads, and B is packed once for all threads. Panels of A
//! stay in the first-level cache. A chunk of B's columns stays in the second-level cache. Sums have the same
//! order as in [`super::product_f32`], with K groups in place of f32: the K blocks depend on K alone, and K
//! is never split among threads.

use super::matrix::{Gemm, Mat, MatMut};
use super::panels::SERIAL;
use super::product_f32::{k_block, k_blocks, kc_max, spread};
use crate::cpu::team::{AssertSync, SharedMut, Team};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of panels of B that a thread packs at a time, and maximum number of rows of A that are
/// packed at a time.
const CHUNK_PANELS: usize = 8;
const MB: usize = 6144;

/// An element type that is packed into K groups.
pub(crate) trait LaneElem: Copy + Send + Sync + 'static {
    /// Elements per K group.
    const GROUP: usize;
    /// The element's bits, in the low `32 / GROUP` bits.
    fn bits(self) -> u32;
}

/// The position of a tile in C, and whether the K block is the first or the last.
pub(crate) struct Place<C> {
    pub c: *mut C,
    pub rs: isize,
    pub cs: isize,
    /// Rows and columns of the tile that lie in C.
    pub rows: usize,
    pub cols: usize,
    /// Row and column of the tile's first element in C.
    pub i: usize,
    pub j: usize,
    /// Whether this is the first K block (otherwise the sums are added to C), and whether it is the last.
    pub first: bool,
    pub last: bool,
}

/// A kind of product: how its operands are packed, and its micro-kernel.
pub(crate) trait Kind: Sync {
    type A: Copy + Send + Sync;
    type B: Copy + Send + Sync;
    /// Type of the sums in memory; 4 bytes.
    type C: Copy + Send + Sync;
    /// Elements per K group.
    const GROUP: usize;
    /// Number of rows of a packed panel that precede its K groups.
    const HEAD: usize;
    /// Rows and columns of the micro-kernel's tile.
    const MR: usize;
    const NR: usize;

    /// Packs `rows` rows of `k` elements like [`pack_lanes`], into panels of MR rows. Each panel starts with
    /// HEAD head rows, and its K groups follow.
    ///
    /// # Safety
    /// Elements `src[r * rs + q * ks]` are readable for `r < rows`, `q < k`; `dst` has room for all panels;
    /// the processor has the kind's instructions.
    unsafe fn pack_a(&self, src: *const Self::A, rs: isize, ks: isize, rows: usize, k: usize, dst: *mut u32);
    /// Packs `cols` columns of `k` elements into panels of NR columns with HEAD head rows. The columns are
    /// `cs` elements apart.
    ///
    /// # Safety
    /// Elements `src[c * cs + q * ks]` are readable for `c < cols`, `q < k`; `dst` has room for all panels;
    /// the processor has the kind's instructions.
    unsafe fn pack_b(&self, src: *const Self::B, cs: isize, ks: isize, cols: usize, k: usize, dst: *mut u32);
    /// Computes a tile of sums over `kc` K groups of packed panels.
    ///
    /// # Safety
    /// `a` and `b` are panels of `HEAD + kc` rows that `pack_a` and `pack_b` wrote; the `out.rows x out.cols`
    /// elements at `out.c` are valid and used by this thread only; the processor has the kind's instructions.
    unsafe fn tile(&self, kc: usize, a: *const u32, b: *const u32, out: &Place<Self::C>);
}

/// The layout of packed panels: the number of lines in a panel, and the number of head rows before its K
/// groups.
#[derive(Clone, Copy)]
pub(crate) struct PanelShape {
    pub width: usize,
    pub head: usize,
}

/// Packs `extent` lines of `k` elements into panels of `width` lines. K group `l` of line `p * width + r` is
/// at `dst[p * width * (head + lanes) + (head + l) * width + r]`, where `lanes` is the number of K groups;
/// lines past `extent` are zero. Element `q` of a line is in group `q / GROUP`; the first element of a group
/// is in its low bits. The head rows are not written.
///
/// # Safety
/// Element `(r, q)` of `lines` is readable for `r < extent`, `q < k`; `dst` has room for all panels.
#[inline(always)]
pub(crate) unsafe fn pack_lanes<T: LaneElem>(
    lines: Mat<T>,
    extent: usize,
    k: usize,
    PanelShape { width, head }: PanelShape,
    dst: *mut u32,
) {
    let Mat { ptr: src, rs, cs: ks } = lines;
    let lanes = k.div_ceil(T::GROUP);
    for r in 0..extent.next_multiple_of(width) {
        let at = r / width * width * (head + lanes) + head * width + r % width;
        for l in 0..lanes {
            let mut x = 0;
            if r < extent {
                for g in 0..T::GROUP.min(k - l * T::GROUP) {
                    let q = (l * T::GROUP + g) as isize;
                    // SAFETY: `r < extent` and `q < k`, which the contract makes readable.
                    x |= unsafe { *src.offset(r as isize * rs + q * ks) }.bits() << (32 / T::GROUP * g);
                }
            }
            // SAFETY: `r` lies in a panel and `l < lanes`, so the word is in the buffer that the contract
            // requires.
            unsafe { *dst.add(at + l * width) = x };
        }
    }
}

/// A right operand that is packed once for many products.
#[derive(Debug)]
pub(crate) struct Panels {
    data: Vec<u32>,
    /// Index of the first 64-byte aligned word.
    start: usize,
    width: usize,
    head: usize,
    pub extent: usize,
    pub k: usize,
    lanes: usize,
}

impl Panels {
    /// Packs a `k x n` matrix, one K block after another.
    ///
    /// # Safety
    /// Elements `(q, j)` of `b` are readable for `q < k`, `j < n`; the processor has the kind's instructions.
    pub(crate) unsafe fn new<K: Kind>(kind: &K, b: Mat<K::B>, k: usize, n: usize) -> Panels {
        let (width, head, lanes) = (K::NR, K::HEAD, k.div_ceil(K::GROUP));
        let columns = n.next_multiple_of(width);
        let len = columns * (lanes + head * k_blocks(lanes));
        let mut data = vec![0u32; len + 16];
        let start = data.as_ptr().align_offset(64).min(16);
        let mut p = Panels { data: vec![], start, width, head, extent: n, k, lanes };
        for kb in 0..k_blocks(lanes) {
            let (l0, l1) = k_block(lanes, kb);
            let (k0, k1) = (l0 * K::GROUP, (l1 * K::GROUP).min(k));
            let src = b.ptr.wrapping_offset(k0 as isize * b.rs);
            let to = data[p.at(kb, 0)..].as_mut_ptr();
            // SAFETY: rows `k0..k1` of `b` are readable by contract; `data` has room for the panels of every
            // K block.
            unsafe { kind.pack_b(src, b.cs, b.rs, n, k1 - k0, to) };
        }
        p.data = data;
        p
    }

    fn at(&self, kb: usize, q: usize) -> usize {
        let (l0, l1) = k_block(self.lanes, kb);
        let columns = self.extent.next_multiple_of(self.width);
        self.start + (l0 + kb * self.head) * columns + q * self.width * (l1 - l0 + self.head)
    }

    fn panel(&self, kb: usize, q: usize) -> *const u32 {
        self.data[self.at(kb, q)..].as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.data.len() * 4
    }
}

/// The right operand of `product`.
pub(crate) enum Right<'a, T> {
    Plain(Mat<T>),
    Packed(&'a Panels),
}

/// The data that all parts of the work on one K block of a range of rows share.
struct Block<'a, K: Kind> {
    kind: &'a K,
    /// Packed panels of A.
    a: *const u32,
    b: &'a Right<'a, K::B>,
    /// All of B packed for this K block, or null.
    shared_b: *const u32,
    kb: usize,
    k0: usize,
    /// Number of elements and number of K groups of the K block.
    kn: usize,
    kc: usize,
    /// Number of rows, and the first row in C.
    m: usize,
    i0: usize,
    n: usize,
    c: MatMut<K::C>,
    first: bool,
    last: bool,
}

/// Computes the tiles of panels `p0..p1` of A and `q0..q1` of B.
///
/// # Safety
/// `w.a` holds packed panels up to `p1`. The matrices behind `w.b` and `w.c` are valid for these tiles, which
/// only this thread writes. If B is not packed yet, `buf` has room for `q1 - q0` packed panels, and only this
/// thread uses it.
unsafe fn tiles<K: Kind>(w: &Block<'_, K>, p0: usize, p1: usize, q0: usize, q1: usize, buf: *mut u32) {
    let (a_len, b_len) = (K::MR * (w.kc + K::HEAD), K::NR * (w.kc + K::HEAD));
    let b = match w.b {
        Right::Packed(p) => p.panel(w.kb, q0),
        Right::Plain(_) if !w.shared_b.is_null() => w.shared_b.wrapping_add(q0 * b_len),
        Right::Plain(mat) => {
            let j = q0 * K::NR;
            let src = mat.ptr.wrapping_offset(w.k0 as isize * mat.rs + j as isize * mat.cs);
            // SAFETY: the columns lie in B, since the last is limited to `w.n`, and `buf` has room for these
            // panels.
            unsafe { w.kind.pack_b(src, mat.cs, mat.rs, (q1 * K::NR).min(w.n) - j, w.kn, buf) };
            buf as *const u32
        }
    };
    for p in p0..p1 {
        let i = w.i0 + p * K::MR;
        for q in q0..q1 {
            let j = q * K::NR;
            let out = Place {
                c: w.c.ptr.wrapping_offset(i as isize * w.c.rs + j as isize * w.c.cs),
                rs: w.c.rs,
                cs: w.c.cs,
                rows: (w.m - p * K::MR).min(K::MR),
                cols: (w.n - j).min(K::NR),
                i,
                j,
                first: w.first,
                last: w.last,
            };
            // SAFETY: the panels are packed, and `rows` and `cols` limit the tile to C.
            unsafe { w.kind.tile(w.kc, w.a.add(p * a_len), b.add((q - q0) * b_len), &out) };
        }
    }
}

/// Computes the product on at most `threads` threads of the team.
///
/// # Safety
/// The `m x k` elements of A and `k x n` of B are readable. The elements of C are writable, overlap nothing
/// and are used by nothing else. A packed B was packed for `K`; the processor has the kind's instructions;
/// `threads` is 1 or at least the team's number of threads (scratch memory is indexed by thread number).
pub(crate) unsafe fn product<K: Kind>(
    team: &Team,
    threads: usize,
    kind: &K,
    g: &Gemm<Mat<K::A>, &Right<'_, K::B>, MatMut<K::C>, ()>,
) {
    let Gemm { m, n, k, a, b, c, .. } = *g;
    if m == 0 || n == 0 {
        return;
    }
    let lanes = k.div_ceil(K::GROUP);
    let threads = threads.min(team.threads());
    let mut cut = Cut::of((K::MR, K::NR), m, n, lanes, kc_max(lanes) + K::HEAD, threads);
    cut.share_b &= matches!(b, Right::Plain(_));
    let on = (cut.threads > 1).then_some(team);
    let scratch = team.scratch(cut.floats());
    let a_buf = SharedMut(scratch.ptr() as *mut u32);
    let b_buf = SharedMut(a_buf.get().wrapping_add(cut.a_floats()));
    let mut i0 = 0;
    while i0 < m {
        let mb = (m - i0).min(cut.mb);
        let panels = mb.div_ceil(K::MR);
        for kb in 0..k_blocks(lanes) {
            let (l0, l1) = k_block(lanes, kb);
            let (k0, kc) = (l0 * K::GROUP, l1 - l0);
            let kn = (l1 * K::GROUP).min(k) - k0;
            let (a_len, b_len) = (K::MR * (kc + K::HEAD), K::NR * (kc + K::HEAD));
            let shared_b = if cut.share_b { b_buf.get() as *const u32 } else { std::ptr::null() };
            let block = Block {
                kind,
                a: a_buf.get() as *const u32,
                b,
                shared_b,
                kb,
                k0,
                kn,
                kc,
                m: mb,
                i0,
                n,
                c,
                first: kb == 0,
                last: kb + 1 == k_blocks(lanes),
            };
            // SAFETY: both values hold pointers and sizes; parts pack disjoint panels and write disjoint rows
            // of C.
            let (block, left) = unsafe { (AssertSync::new(block), AssertSync::new(a)) };
            let parts = panels.div_ceil(4).min(cut.threads * 4);
            let share = if cut.share_b { cut.n_panels } else { 0 };
            spread(on, parts + share, &|_, part| {
                if part < parts {
                    let (p0, p1) = (panels * part / parts, panels * (part + 1) / parts);
                    let (r0, r1) = (p0 * K::MR, (p1 * K::MR).min(mb));
                    let a = left.get();
                    let src = a.ptr.wrapping_offset((i0 + r0) as isize * a.rs + k0 as isize * a.cs);
                    // SAFETY: rows `i0 + r0 .. i0 + r1` lie in A, and panels from `p0` of the buffer belong
                    // to this part.
                    unsafe { kind.pack_a(src, a.rs, a.cs, r1 - r0, kn, a_buf.get().add(p0 * a_len)) };
                } else if let Right::Plain(b) = block.get().b {
                    let q = part - parts;
                    let j = q * K::NR;
                    let src = b.ptr.wrapping_offset(k0 as isize * b.rs + j as isize * b.cs);
                    // SAFETY: the panel's columns lie in B, and panel `q` of the buffer belongs to this part.
                    unsafe {
                        kind.pack_b(src, b.cs, b.rs, (n - j).min(K::NR), kn, b_buf.get().add(q * b_len))
                    };
                }
            });
            let row_parts = if cut.share_b { panels.div_ceil(2).min(cut.threads * 4) } else { 1 };
            spread(on, cut.chunks * row_parts, &|worker, part| {
                let (ci, ri) = (part % cut.chunks, part / cut.chunks);
                let (q0, q1) = (ci * cut.chunk, ((ci + 1) * cut.chunk).min(cut.n_panels));
                let (p0, p1) = (panels * ri / row_parts, panels * (ri + 1) / row_parts);
                let own = b_buf.get().wrapping_add(if cut.share_b { 0 } else { worker * cut.chunk * b_len });
                // SAFETY: parts cover disjoint tiles of C; the panels of A (and of a shared B) are packed;
                // `own` is this worker's buffer.
                unsafe { tiles(block.get(), p0, p1, q0, q1, own) };
            });
        }
        i0 += mb;
    }
}

/// How a product is divided. It depends on the shape and the number of threads. Only the K blocks affect the
/// numeric results.
struct Cut {
    nr: usize,
    threads: usize,
    kc: usize,
    /// Number of rows of A that are packed at a time.
    mb: usize,
    n_panels: usize,
    chunk: usize,
    chunks: usize,
    /// Whether B is packed once for all threads, because the rows of A are divided among them.
    share_b: bool,
}

impl Cut {
    /// `tile` has the rows and columns of the micro-kernel's tile, `kc` is the maximum number of rows of a
    /// packed panel including its head, and `k` is the total number of K groups.
    fn of(tile: (usize, usize), m: usize, n: usize, k: usize, kc: usize, threads: usize) -> Cut {
        let (mr, nr) = tile;
        let n_panels = n.div_ceil(nr);
        let threads = if m.saturating_mul(n).saturating_mul(k) < SERIAL { 1 } else { threads };
        let mb = m.next_multiple_of(mr).min(MB / mr * mr);
        let share_b = threads > 1 && n_panels < 2 * threads;
        let chunk = if share_b {
            n_panels.max(1)
        } else if threads == 1 {
            CHUNK_PANELS.min(n_panels).max(1)
        } else {
            (n_panels / (2 * threads)).clamp(1, CHUNK_PANELS)
        };
        let chunks = n_panels.div_ceil(chunk);
        Cut { nr, threads, kc, mb, n_panels, chunk, chunks, share_b }
    }

    /// Floats of the packed rows of A, rounded up to a cache line. The panels of B follow, and vectors of
    /// these panels must not cross cache lines.
    fn a_floats(&self) -> usize {
        (self.mb * self.kc).next_multiple_of(16)
    }
    fn b_floats(&self) -> usize {
        if self.share_b {
            self.n_panels * self.nr * self.kc
        } else {
            self.threads * self.chunk * self.nr * self.kc
        }
    }
    fn floats(&self) -> usize {
        self.a_floats() + self.b_floats()
    }
}

/// Runs `f(item, threads)` for a batch of products of `work` multiply-adds each. If the products are large or
/// few, they run one after another, each on all threads. Otherwise each runs on one thread, and several run
/// at the same time unless the whole batch is little work.
pub(crate) fn batch(team: &Team, items: usize, work: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    const SERIAL: usize = 1 << 20;
    if items < team.threads() || work > 256 << 20 {
        return (0..items).for_each(|i| f(i, team.threads()));
    }
    let parts = if work.saturating_mul(items) < SERIAL { 1 } else { items.min(team.threads() * 8) };
    let next = AtomicUsize::new(0);
    team.run(parts, &|_| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= items {
                break;
            }
            f(i, 1);
        }
    });
}

#[cfg(target_arch = "x86_64")]
pub(crate) use wide::{LaneVector, interleave, pack_vectors, turn};

/// Packing with AVX-512: transposes blocks of 16 x 16 K groups in registers, or interleaves rows.
#[cfg(target_arch = "x86_64")]
mod wide {
    use super::{LaneElem, PanelShape, pack_lanes};
    use crate::cpu::library::gemm::matrix::Mat;
    use crate::cpu::library::simd::{mask16, transpose16};
    use std::arch::x86_64::*;

    /// An element type that is packed into vectors of 16 K groups, with AVX-512 BW and VL (and AVX512_BF16 if
    /// the comment at the impl names it).
    pub(crate) trait LaneVector: LaneElem {
        /// Packs `n <= 16 GROUP` consecutive elements, followed by zeros, in order. With `n = 0`, `p` is not
        /// read.
        ///
        /// # Safety
        /// `p` has `n` readable elements; the caller is compiled for the instructions the impl needs.
        unsafe fn along(p: *const Self, n: usize) -> __m512i;
        /// Packs GROUP rows, `ks` elements apart, of 16 consecutive elements: group `j` holds element `j` of
        /// each row.
        ///
        /// # Safety
        /// Each row has 16 readable elements; the caller is compiled for the instructions the impl needs.
        unsafe fn across(p: *const Self, ks: isize) -> __m512i;
        /// Like [`LaneVector::across`], with `rows <= GROUP` rows of `n <= 16` elements, and zeros elsewhere.
        ///
        /// # Safety
        /// Each of the `rows` rows has `n` readable elements; the caller is compiled for the instructions the
        /// impl needs.
        unsafe fn across_part(p: *const Self, ks: isize, rows: usize, n: usize) -> __m512i;
    }

    /// Interleaves two rows of 16 16-bit elements into 32-bit lanes, with `lo` in the low bits.
    ///
    /// # Safety
    /// The caller is compiled for AVX-512 F and BW.
    #[inline(always)]
    pub(crate) unsafe fn interleave(lo: __m256i, hi: __m256i) -> __m512i {
        // SAFETY: the contract of `interleave` gives AVX-512 F and BW; no memory is accessed.
        unsafe {
            let at = _mm512_set_epi16(
                31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                3, 18, 2, 17, 1, 16, 0,
            );
            _mm512_permutexvar_epi16(at, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(lo), hi))
        }
    }

    /// [`pack_lanes`] in vectors, if one of the strides is 1.
    ///
    /// # Safety
    /// The contract of [`pack_lanes`], in a function compiled for the instructions that T needs.
    #[inline(always)]
    pub(crate) unsafe fn pack_vectors<T: LaneVector>(
        lines: Mat<T>,
        extent: usize,
        k: usize,
        panel: PanelShape,
        dst: *mut u32,
    ) {
        let Mat { ptr: src, rs, cs: ks } = lines;
        let PanelShape { width, head } = panel;
        let lanes = k.div_ceil(T::GROUP);
        let (len, panels) = (width * (head + lanes), extent.div_ceil(width));
        // SAFETY: `there`, `steps` and `k` limit reads to lines below `extent` and elements below `k`; `held`
        // limits writes to the panel. The contract makes both ranges valid.
        unsafe {
            if ks == 1 {
                for p in 0..panels {
                    for r in (0..width).step_by(16) {
                        let at = p * width + r;
                        let there = extent.saturating_sub(at).min(width - r).min(16);
                        let to = dst.add(p * len + head * width + r);
                        let from = src.wrapping_offset(at as isize * rs);
                        turn(Mat { ptr: from, rs, cs: 1 }, there, (width - r).min(16), k, to, width);
                    }
                }
            } else if rs == 1 {
                // Read row by row across the panels, because hardware prefetchers work better on longer
                // contiguous reads.
                for l in 0..lanes {
                    let steps = (k - l * T::GROUP).min(T::GROUP);
                    let row = src.offset((l * T::GROUP) as isize * ks);
                    for p in 0..panels {
                        let to = dst.add(p * len + (head + l) * width);
                        for c in (0..width).step_by(16) {
                            let (at, held) = (p * width + c, (width - c).min(16));
                            let there = extent.saturating_sub(at).min(held);
                            if there == 16 && steps == T::GROUP {
                                _mm512_storeu_si512(to.add(c) as *mut __m512i, T::across(row.add(at), ks));
                            } else {
                                let v = match there {
                                    0 => _mm512_setzero_si512(),
                                    n => T::across_part(row.add(at), ks, steps, n),
                                };
                                _mm512_mask_storeu_epi32(to.add(c) as *mut i32, mask16(held), v);
                            }
                        }
                    }
                }
            } else {
                pack_lanes(lines, extent, k, panel, dst);
            }
        }
    }

    /// Packs contiguous lines: `dst[l * stride + r]` is K group `l` of line `r < there`, and zero for
    /// `there <= r < held`.
    ///
    /// # Safety
    /// `there` lines of `k` contiguous elements are readable. At `dst`, a row of `held <= 16` words is
    /// writable for each K group of `k`, and the rows are `stride` words apart. The caller is compiled for
    /// the instructions that T needs.
    #[inline(always)]
    pub(crate) unsafe fn turn<T: LaneVector>(
        lines: Mat<T>,
        there: usize,
        held: usize,
        k: usize,
        dst: *mut u32,
        stride: usize,
    ) {
        let Mat { ptr: src, rs, .. } = lines;
        let lanes = k.div_ceil(T::GROUP);
        // SAFETY: lines at or past `there` are read with `n = 0`, which reads nothing; others are read up to
        // `k`. Writes are masked to `held` words of rows below `lanes`. (The loops have constant bounds,
        // because otherwise the compiler would keep the vectors in memory.)
        unsafe {
            let w = mask16(held);
            for l in (0..lanes).step_by(16) {
                let n = (k - l * T::GROUP).min(16 * T::GROUP);
                let mut r = [_mm512_setzero_ps(); 16];
                for i in 0..16 {
                    let (i_there, n) = if i < there { (i, n) } else { (0, 0) };
                    let p = src.wrapping_offset(i_there as isize * rs).wrapping_add(l * T::GROUP);
                    r[i] = _mm512_castsi512_ps(T::along(p, n));
                }
                let t = transpose16(r);
                for i in 0..16 {
                    if l + i < lanes {
                        _mm512_mask_storeu_ps(dst.add((l + i) * stride) as *mut f32, w, t[i]);
                    }
                }
            }
        }
    }
}
