//! Matrix multiplication, `C = alpha A B + beta C`.
//!
//! f32 runs on packed panels and one register-blocked micro-kernel (Goto and van de Geijn, "Anatomy of high-performance
//! matrix multiplication", 2008), with the loops turned so that a panel of A stays in the first cache level and a chunk of
//! B's columns in the second. A is packed once for all threads, each thread packs the columns of B it multiplies. f16 and
//! bf16 are widened while packing. K is cut into blocks that depend on K alone and is never split among threads, so
//! results do not depend on the number of threads.

use super::gemv;
use super::mat::{AHEAD, STRIDE, Tile};
pub use super::mat::{Epilogue, Mat, MatMut};
use super::simd::{Simd, Storage, dispatch_simd};
use crate::cpu::sys::Isa;
use crate::cpu::team::{Across, SharedConst, SharedMut, Team};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `dst[k * width + r] = src[r * rs + k * ks]` for `r < rows`, zeros for `rows <= r < width`, `k < kc`.
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
    // SAFETY: the caller's pointers.
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

/// Micro-tile of an instruction set: rows and columns.
pub(crate) fn tile_of(isa: Isa) -> (usize, usize) {
    use super::simd::Portable;
    fn of<S: Simd>() -> (usize, usize) {
        (S::MR, S::NV * S::W)
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => of::<super::simd::Avx512>(),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => of::<super::simd::Avx2>(),
        _ => of::<Portable>(),
    }
}

/// K is cut evenly into the fewest blocks of at most this many steps.
const KC: usize = 512;
/// Columns of B a thread packs at a time, in panels, and rows of A packed at a time.
const CHUNK_PANELS: usize = 8;
const MB: usize = 6144;
/// Floats of packed A in a block, and panels of B at a time, where B comes packed.
const NEAR: usize = 128 << 10;
const NEAR_PANELS: usize = 2;
/// Products smaller than this many multiply-adds stay on the calling thread.
const SERIAL: usize = 300_000;

pub(super) fn k_blocks(k: usize) -> usize {
    k.div_ceil(KC).max(1)
}
pub(super) fn k_block(k: usize, i: usize) -> (usize, usize) {
    let n = k_blocks(k);
    (k * i / n, k * (i + 1) / n)
}
/// The longest block.
pub(super) fn kc_max(k: usize) -> usize {
    k.div_ceil(k_blocks(k))
}

/// Where panels of B come from.
pub(crate) trait Panels: Sync {
    /// Packs columns `j .. j + cols` and steps `k0 .. k0 + kc` as `dst[k * nr + c]`, with zeros up to `nr`.
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32);
    /// Packs columns `j..end`, panel after panel.
    #[inline(always)]
    unsafe fn pack_chunk<S: Simd>(
        &self,
        k0: usize,
        kc: usize,
        j: usize,
        end: usize,
        nr: usize,
        dst: *mut f32,
    ) {
        let (mut j, mut dst) = (j, dst);
        while j < end {
            // SAFETY: the caller's.
            unsafe { self.pack::<S>(k0, kc, j, (end - j).min(nr), nr, dst) };
            j += nr;
            dst = dst.wrapping_add(nr * kc);
        }
    }
    /// The panel when it is packed already.
    fn ready(&self, _k0: usize, _kc: usize, _j: usize) -> *const f32 {
        std::ptr::null()
    }
}

impl<T: Storage> Panels for Mat<T> {
    #[inline(always)]
    unsafe fn pack<S: Simd>(&self, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) {
        // SAFETY: the caller's matrix covers the block.
        unsafe {
            let p = self.ptr.offset(k0 as isize * self.rs + j as isize * self.cs);
            pack::<S, T>(p, self.cs, self.rs, cols, nr, kc, dst)
        }
    }

    #[inline(always)]
    unsafe fn pack_chunk<S: Simd>(
        &self,
        k0: usize,
        kc: usize,
        j: usize,
        end: usize,
        nr: usize,
        dst: *mut f32,
    ) {
        let full = if self.cs == 1 { (end - j) / nr } else { 0 };
        // SAFETY: the caller's.
        unsafe {
            // Row by row across the panels: the longer contiguous reads are what the prefetchers want.
            for k in 0..if full > 0 { kc } else { 0 } {
                let s = self.ptr.offset((k0 + k) as isize * self.rs).add(j);
                for q in 0..full {
                    for v in 0..S::NV {
                        let at = v * S::W;
                        S::store(dst.add((q * kc + k) * nr + at), T::load::<S>(s.add(q * nr + at)));
                    }
                }
            }
            for (q, j) in (j..end).step_by(nr).enumerate().skip(full) {
                self.pack::<S>(k0, kc, j, (end - j).min(nr), nr, dst.add(q * nr * kc));
            }
        }
    }
}

/// How a packed operand lies: panels of `width`, block after block of K.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackShape {
    isa: Isa,
    /// Panel width (rows of A or columns of B), extent along it, and K.
    width: usize,
    extent: usize,
    k: usize,
}

impl PackShape {
    /// For the left operand, `m x k`.
    pub fn a(isa: Isa, m: usize, k: usize) -> PackShape {
        PackShape { isa, width: tile_of(isa).0, extent: m, k }
    }

    /// For the right operand, `k x n`.
    pub fn b(isa: Isa, k: usize, n: usize) -> PackShape {
        PackShape { isa, width: tile_of(isa).1, extent: n, k }
    }

    fn panels(&self) -> usize {
        self.extent.div_ceil(self.width)
    }

    /// Floats that the packed operand takes.
    pub fn floats(&self) -> usize {
        self.panels() * self.width * self.k
    }

    /// Where the panel of element `i` begins, for the block of K from `k0` of `kc` steps.
    fn at(&self, k0: usize, kc: usize, i: usize) -> usize {
        k0 * self.panels() * self.width + i / self.width * self.width * kc
    }

    /// Packs the left operand.
    ///
    /// # Safety
    /// Every element of the matrix is readable, [`PackShape::floats`] at `dst` are writable and overlap nothing else.
    pub unsafe fn pack_a<T: PackElem>(&self, team: Option<&Team>, a: Mat<T>, dst: *mut f32) {
        // SAFETY: the caller's.
        unsafe { self.fill(team, SharedConst(a.ptr), a.rs, a.cs, SharedMut(dst)) }
    }

    /// Packs the right operand.
    ///
    /// # Safety
    /// As [`PackShape::pack_a`].
    pub unsafe fn pack_b<T: PackElem>(&self, team: Option<&Team>, b: Mat<T>, dst: *mut f32) {
        // SAFETY: the caller's.
        unsafe { self.fill(team, SharedConst(b.ptr), b.cs, b.rs, SharedMut(dst)) }
    }

    unsafe fn fill<T: PackElem>(
        &self,
        team: Option<&Team>,
        src: SharedConst<T>,
        rs: isize,
        ks: isize,
        dst: SharedMut<f32>,
    ) {
        let (panels, blocks) = (self.panels(), k_blocks(self.k));
        spread(team, panels * blocks, &|_, part| {
            let (b, p) = (part / panels, part % panels);
            let (k0, k1) = k_block(self.k, b);
            let rows = (self.extent - p * self.width).min(self.width);
            let s = src.get().wrapping_offset((p * self.width) as isize * rs + k0 as isize * ks);
            // SAFETY: the caller's matrix covers the block; `dst` holds every panel, and this one is this part's alone.
            unsafe {
                let d = dst.get().add(self.at(k0, k1 - k0, p * self.width));
                pack_one(self.isa, s, rs, ks, rows, self.width, k1 - k0, d);
            }
        });
    }
}

/// An operand that was packed for many products: weights. The memory is whoever packed it's.
#[derive(Clone, Copy, Debug)]
pub struct Packed {
    shape: PackShape,
    data: SharedConst<f32>,
}

impl Packed {
    /// # Safety
    /// `data` was filled by a `pack` function of `shape` and stays readable as long as this is used.
    pub unsafe fn new(shape: PackShape, data: *const f32) -> Packed {
        Packed { shape, data: SharedConst(data) }
    }

    pub fn shape(&self) -> &PackShape {
        &self.shape
    }

    fn panel(&self, k0: usize, kc: usize, i: usize) -> *const f32 {
        self.data.get().wrapping_add(self.shape.at(k0, kc, i))
    }
}

impl Panels for Packed {
    unsafe fn pack<S: Simd>(&self, _: usize, _: usize, _: usize, _: usize, _: usize, _: *mut f32) {}
    fn ready(&self, k0: usize, kc: usize, j: usize) -> *const f32 {
        self.panel(k0, kc, j)
    }
}

/// Element types that are multiplied in f32: f32, f16 and bf16.
#[allow(private_bounds)]
pub trait PackElem: Storage {}
impl PackElem for f32 {}
impl PackElem for half::f16 {}
impl PackElem for half::bf16 {}

dispatch_simd! {
    unsafe fn pack_one[T: Storage][T](isa, src: *const T, rs: isize, ks: isize, rows: usize, width: usize, kc: usize, dst: *mut f32) = pack
}
dispatch_simd! {
    unsafe fn pack_panel[P: Panels][P](isa, b: &P, k0: usize, kc: usize, j: usize, cols: usize, nr: usize, dst: *mut f32) = pack_panel_body
}
#[inline(always)]
unsafe fn pack_panel_body<S: Simd, P: Panels>(
    b: &P,
    k0: usize,
    kc: usize,
    j: usize,
    cols: usize,
    nr: usize,
    dst: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { b.pack::<S>(k0, kc, j, cols, nr, dst) }
}

/// The left operand of the driver.
pub(crate) enum Left<T> {
    Plain(Mat<T>),
    Packed(Packed),
}

/// One block of K for a range of rows: what the tile tasks share.
struct Block<'a, P> {
    /// Packed panels of A; panel p at `a + p * mr * kc`.
    a: *const f32,
    k0: usize,
    kc: usize,
    /// Rows of this block and its first row in C.
    m: usize,
    i0: usize,
    b: &'a P,
    /// All of B packed for this block of K, or null.
    shared_b: *const f32,
    n: usize,
    c: MatMut<f32>,
    epi: Epilogue,
    isa: Isa,
    /// How many panels of a packed B further on a thread is likely to go next; 0 to ask for nothing ahead.
    ahead: usize,
}

dispatch_simd! {
    /// Tiles of rows `p0..p1` (in panels of A) and columns `q0..q1` (in panels of B); `buf` holds a chunk of packed B.
    unsafe fn tiles[P: Panels][P](isa, w: &Block<'_, P>, p0: usize, p1: usize, q0: usize, q1: usize, buf: *mut f32) = tiles_body
}

#[inline(always)]
unsafe fn tiles_body<S: Simd, P: Panels>(
    w: &Block<'_, P>,
    p0: usize,
    p1: usize,
    q0: usize,
    q1: usize,
    buf: *mut f32,
) {
    let (mr, nr, kc) = (S::MR, S::NV * S::W, w.kc);
    let panel = |q: usize| -> *const f32 {
        let r = w.b.ready(w.k0, kc, q * nr);
        if !r.is_null() {
            r
        } else if !w.shared_b.is_null() {
            w.shared_b.wrapping_add(q * nr * kc)
        } else {
            buf.wrapping_add((q - q0) * nr * kc)
        }
    };
    let own = w.shared_b.is_null() && w.b.ready(w.k0, kc, 0).is_null();
    // SAFETY: the driver sized the buffers; tiles stay inside C.
    unsafe {
        if own {
            w.b.pack_chunk::<S>(w.k0, kc, q0 * nr, (q1 * nr).min(w.n), nr, buf);
        }
        let store = w.epi.store();
        for p in p0..p1 {
            let a = w.a.add(p * mr * kc);
            let i = w.i0 + p * mr;
            for q in q0..q1 {
                let j = q * nr;
                let (next, done) = (q + w.ahead, (p - p0) * (kc / STRIDE * AHEAD));
                let more = w.ahead > 0 && next * nr < w.n && done < nr * kc;
                let out = Tile {
                    ahead: if more { panel(next).wrapping_add(done) } else { std::ptr::null() },
                    c: w.c.ptr.offset(i as isize * w.c.rs + j as isize * w.c.cs),
                    rs: w.c.rs,
                    cs: w.c.cs,
                    rows: (w.m - p * mr).min(mr),
                    cols: (w.n - j).min(nr),
                    i,
                    j,
                    store,
                    epi: w.epi,
                };
                S::tile(kc, a, panel(q), &out);
            }
            if w.epi.post.is_some() {
                let (j, cols) = (q0 * nr, (q1 * nr).min(w.n) - q0 * nr);
                let c = w.c.ptr.offset(i as isize * w.c.rs + j as isize);
                let rows = (w.m - p * mr).min(mr);
                w.epi.post.run_rows(w.isa, (i, rows), (j, cols), c, w.c.rs as usize);
            }
        }
    }
}

/// How a product is cut; a function of the shape and the number of threads. Only the cut of K reaches the numbers.
pub(super) struct Cut {
    mr: usize,
    nr: usize,
    pub threads: usize,
    kc: usize,
    /// Rows packed at a time.
    pub mb: usize,
    pub n_panels: usize,
    pub chunk: usize,
    pub chunks: usize,
    /// B is packed once for all, because rows are split among threads.
    pub share_b: bool,
    /// B comes packed, and the panels to come are brought near.
    near: bool,
}

impl Cut {
    fn new(isa: Isa, m: usize, n: usize, k: usize, threads: usize) -> Cut {
        Cut::of(tile_of(isa), m, n, k, kc_max(k), threads)
    }

    /// For a micro-tile and packed panels of at most `kc` steps (with what heads them), `k` in all.
    pub fn of(tile: (usize, usize), m: usize, n: usize, k: usize, kc: usize, threads: usize) -> Cut {
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
        Cut { mr, nr, threads, kc, mb, n_panels, chunk, chunks, share_b, near: false }
    }

    /// For a right operand that comes packed. Nothing is gained by reading it once for many rows, so rows are taken in blocks
    /// that stay in the second cache level, with few columns at a time, and the next ones are asked for meanwhile.
    fn packed(mut self, m: usize) -> Cut {
        self.share_b = false;
        let most = (NEAR / self.kc.max(1) / self.mr).max(8) * self.mr;
        let blocks = m.div_ceil(most).max(1);
        self.mb = m.div_ceil(blocks).next_multiple_of(self.mr).min(self.mb);
        let few = if blocks == 1 { NEAR_PANELS } else { 2 * NEAR_PANELS };
        if self.threads * 2 * few <= self.n_panels {
            self.near = true;
            self.chunk = self.chunk.min(few);
            self.chunks = self.n_panels.div_ceil(self.chunk);
        }
        self
    }

    /// A multiple of a cache line, so that the panels of B after it begin on one: vectors of theirs would straddle lines.
    pub fn a_floats(&self) -> usize {
        (self.mb * self.kc).next_multiple_of(16)
    }
    fn b_floats(&self) -> usize {
        if self.share_b {
            self.n_panels * self.nr * self.kc
        } else {
            self.threads * self.chunk * self.nr * self.kc
        }
    }
    pub fn floats(&self) -> usize {
        self.a_floats() + self.b_floats()
    }
}

/// Runs parts on the team, or here when there is one thread in the cut.
pub(super) fn spread(team: Option<&Team>, parts: usize, f: &(dyn Fn(usize, usize) + Sync)) {
    match team {
        Some(t) => t.run_with(parts, f),
        None => (0..parts).for_each(|p| f(0, p)),
    }
}

/// Asks for the cache line at `p` to be in the second level soon.
#[inline]
fn near(p: *const f32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a request that has no effect on the program, whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p as *const i8)
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// The packed product. `buf` holds `cut.floats()`.
unsafe fn drive<T: Storage, P: Panels>(
    team: Option<&Team>,
    isa: Isa,
    cut: &Cut,
    m: usize,
    n: usize,
    k: usize,
    a: &Left<T>,
    b: &P,
    c: MatMut<f32>,
    epi: Epilogue,
    buf: *mut f32,
) {
    let a_buf = SharedMut(buf);
    let b_buf = SharedMut(buf.wrapping_add(cut.a_floats()));
    let (mr, nr) = (cut.mr, cut.nr);
    let mut i0 = 0;
    while i0 < m {
        let mb = (m - i0).min(cut.mb);
        let panels = mb.div_ceil(mr);
        for kb in 0..k_blocks(k) {
            let (k0, k1) = k_block(k, kb);
            let kc = k1 - k0;
            let a_packed = match a {
                Left::Packed(p) => p.panel(k0, kc, i0),
                Left::Plain(mat) => {
                    let parts = panels.div_ceil(4).min(cut.threads * 4);
                    let share = if cut.share_b { cut.n_panels } else { 0 };
                    spread(team, parts + share, &|worker, part| {
                        if cut.near {
                            // What this thread is likely to multiply by first.
                            let all = cut.chunk * nr * kc / 16 * cut.threads / parts.max(1);
                            let first = b.ready(k0, kc, worker * cut.chunk * nr);
                            let first = first.wrapping_add(part / cut.threads * all * 16);
                            (0..all).for_each(|line| near(first.wrapping_add(line * 16)));
                        }
                        if part >= parts {
                            let q = part - parts;
                            // SAFETY: panel q of B is inside the matrix, and its place in the buffer is this part's alone.
                            unsafe {
                                let dst = b_buf.get().add(q * nr * kc);
                                pack_panel(isa, b, k0, kc, q * nr, (n - q * nr).min(nr), nr, dst);
                            }
                            return;
                        }
                        for p in panels * part / parts..panels * (part + 1) / parts {
                            let i = p * mr;
                            // SAFETY: as above, for panel p of A.
                            unsafe {
                                let s = mat.ptr.offset((i0 + i) as isize * mat.rs + k0 as isize * mat.cs);
                                let dst = a_buf.get().add(i * kc);
                                pack_one(isa, s, mat.rs, mat.cs, (mb - i).min(mr), mr, kc, dst);
                            }
                        }
                    });
                    a_buf.get() as *const f32
                }
            };
            if cut.share_b && matches!(a, Left::Packed(_)) {
                spread(team, cut.n_panels, &|_, q| {
                    // SAFETY: as above.
                    unsafe {
                        let dst = b_buf.get().add(q * nr * kc);
                        pack_panel(isa, b, k0, kc, q * nr, (n - q * nr).min(nr), nr, dst);
                    }
                });
            }
            let block = Block {
                a: a_packed,
                k0,
                kc,
                m: mb,
                i0,
                b,
                shared_b: if cut.share_b { b_buf.get() as *const f32 } else { std::ptr::null() },
                n,
                c,
                epi: epi.for_block(kb == 0, kb + 1 == k_blocks(k)),
                isa,
                ahead: if cut.near { cut.chunk * cut.threads } else { 0 },
            };
            let block = Across(&block);
            let row_parts = if cut.share_b { panels.div_ceil(2).min(cut.threads * 4) } else { 1 };
            spread(team, cut.chunks * row_parts, &|worker, part| {
                let (ci, ri) = (part % cut.chunks, part / cut.chunks);
                let (q0, q1) = (ci * cut.chunk, ((ci + 1) * cut.chunk).min(cut.n_panels));
                let (p0, p1) = (panels * ri / row_parts, panels * (ri + 1) / row_parts);
                let own =
                    b_buf.get().wrapping_add(if cut.share_b { 0 } else { worker * cut.chunk * nr * kc });
                // SAFETY: parts cover disjoint tiles of C; the buffer of a worker is its own.
                unsafe { tiles(isa, block.get(), p0, p1, q0, q1, own) };
            });
        }
        i0 += mb;
    }
}

/// The packed product on a team, with its scratch memory.
pub(crate) unsafe fn gemm_panels<T: Storage, P: Panels>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: &Left<T>,
    b: &P,
    c: MatMut<f32>,
    epi: Epilogue,
) {
    let mut cut = Cut::new(isa, m, n, k, team.threads());
    if !b.ready(0, 1, 0).is_null() {
        cut = cut.packed(m);
    }
    let scratch = team.scratch(cut.floats());
    let on = (cut.threads > 1).then_some(team);
    // SAFETY: the caller's matrices; the scratch is as large as the cut asks.
    unsafe { drive(on, isa, &cut, m, n, k, a, b, c, epi, scratch.ptr()) }
}

/// Floats of scratch that [`panels_inline`] needs.
pub(crate) fn inline_floats(isa: Isa, m: usize, n: usize, k: usize) -> usize {
    Cut::new(isa, m, n, k, 1).floats().next_multiple_of(1024)
}

/// The packed product on the calling thread. `buf` holds [`inline_floats`].
pub(crate) unsafe fn panels_inline<T: Storage, P: Panels>(
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: &Left<T>,
    b: &P,
    c: MatMut<f32>,
    epi: Epilogue,
    buf: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { drive(None, isa, &Cut::new(isa, m, n, k, 1), m, n, k, a, b, c, epi, buf) }
}

/// `C = act(alpha A B + beta C + bias)` in f32, `A` m x k, `B` k x n, any strides. A and B may be f32, f16 or bf16.
///
/// Sums are in f32, in an order that depends on the shape alone.
///
/// # Safety
/// Every element of A, B and the biases is readable and every element of C writable (readable too unless beta is 0); C
/// overlaps neither A, B nor itself.
pub unsafe fn gemm<A: PackElem, B: PackElem>(
    team: &Team,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
) {
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: the caller's.
    unsafe {
        match Form::of(m, n, &a, &b) {
            Form::Rows => gemv::few_rows(team, isa, m, n, k, a, b, c, epi),
            Form::Columns => gemv::few_rows(team, isa, n, m, k, b.t(), a.t(), c.t(), epi.t()),
            Form::Panels => gemm_panels(team, isa, m, n, k, &Left::Plain(a), &b, c, epi),
        }
    }
}

/// Whether [`gemm`] multiplies by way of panels, so that a packed right operand gives the same numbers and spares work.
pub fn by_panels<A, B>(m: usize, n: usize, a: &Mat<A>, b: &Mat<B>) -> bool {
    Form::of(m, n, a, b) == Form::Panels
}

/// Which code does a product. A function of shape and strides alone, so that numbers do not depend on threads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Few rows.
    Rows,
    /// Few columns: the transposed product has few rows.
    Columns,
    Panels,
}

impl Form {
    pub fn of<A, B>(m: usize, n: usize, a: &Mat<A>, b: &Mat<B>) -> Form {
        let (rows, columns) = (gemv::fits(m, b), gemv::fits(n, &a.t()));
        match (rows, columns) {
            (true, true) if m > n => Form::Columns,
            (true, _) => Form::Rows,
            (_, true) => Form::Columns,
            _ => Form::Panels,
        }
    }
}

/// Floats of scratch that [`gemm_inline`] needs.
fn inline_floats_of<A, B>(isa: Isa, m: usize, n: usize, k: usize, a: &Mat<A>, b: &Mat<B>) -> usize {
    let floats = match Form::of(m, n, a, b) {
        Form::Rows => gemv::item_floats(m, n, k),
        Form::Columns => gemv::item_floats(n, m, k),
        Form::Panels => inline_floats(isa, m, n, k),
    };
    floats.next_multiple_of(1024)
}

/// [`gemm`] on the calling thread, with the same results. `buf` holds [`inline_floats_of`].
unsafe fn gemm_inline<A: Storage, B: Storage>(
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
    buf: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        match Form::of(m, n, &a, &b) {
            Form::Rows => gemv::few_rows_item(isa, m, n, k, a, b, c, epi, buf),
            Form::Columns => gemv::few_rows_item(isa, n, m, k, b.t(), a.t(), c.t(), epi.t(), buf),
            Form::Panels => panels_inline(isa, m, n, k, &Left::Plain(a), &b, c, epi, buf),
        }
    }
}

/// [`gemm`] with the right operand packed by [`PackShape::pack_b`].
///
/// # Safety
/// As [`gemm`].
///
/// # Panics
/// When `b` was packed for another shape or instruction set, or as a left operand.
pub unsafe fn gemm_packed<A: PackElem>(
    team: &Team,
    m: usize,
    n: usize,
    k: usize,
    a: Mat<A>,
    b: &Packed,
    c: MatMut<f32>,
    epi: Epilogue,
) {
    assert!(b.shape == PackShape::b(b.shape.isa, k, n), "the packed operand is for another product");
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: the caller's.
    unsafe { gemm_panels(team, b.shape.isa, m, n, k, &Left::Plain(a), b, c, epi) }
}

/// [`gemm`] with the left operand packed by [`PackShape::pack_a`].
///
/// # Safety
/// As [`gemm`].
///
/// # Panics
/// When `a` was packed for another shape or instruction set, or as a right operand.
pub unsafe fn gemm_packed_a<B: PackElem>(
    team: &Team,
    m: usize,
    n: usize,
    k: usize,
    a: &Packed,
    b: Mat<B>,
    c: MatMut<f32>,
    epi: Epilogue,
) {
    assert!(a.shape == PackShape::a(a.shape.isa, m, k), "the packed operand is for another product");
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: the caller's.
    unsafe { gemm_panels(team, a.shape.isa, m, n, k, &Left::<f32>::Packed(*a), &b, c, epi) }
}

/// `batch` products whose operands lie `stride` elements apart (0 repeats an operand).
///
/// # Safety
/// As [`gemm`], for every product; the results do not overlap.
pub unsafe fn gemm_batched<A: PackElem, B: PackElem>(
    team: &Team,
    isa: Isa,
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
    a: (Mat<A>, isize),
    b: (Mat<B>, isize),
    c: (MatMut<f32>, isize),
    epi: Epilogue,
) {
    if m == 0 || n == 0 || batch == 0 {
        return;
    }
    let (c, c_stride) = c;
    let work = m.saturating_mul(n).saturating_mul(k);
    let item = |i: usize| {
        let i = i as isize;
        (a.0.offset(i * a.1), b.0.offset(i * b.1), c.offset(i * c_stride))
    };
    // Large products, or fewer than threads, share each product; otherwise each thread takes whole products.
    if batch < team.threads() || work > 64 << 20 {
        for i in 0..batch {
            let (a, b, c) = item(i);
            // SAFETY: the caller's.
            unsafe { gemm(team, isa, m, n, k, a, b, c, epi) };
        }
        return;
    }
    let threads = team.threads();
    let each = inline_floats_of(isa, m, n, k, &a.0, &b.0);
    let scratch = team.scratch(each * threads);
    let buf = SharedMut(scratch.ptr());
    let groups = if work.saturating_mul(batch) < SERIAL { 1 } else { batch.min(threads * 8) };
    let next = AtomicUsize::new(0);
    team.run_with(groups, &|worker, _| {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= batch {
                break;
            }
            let (a, b, c) = item(i);
            // SAFETY: the caller's; the worker's piece of the scratch is its own.
            unsafe {
                gemm_inline(isa, m, n, k, a, b, c, epi, buf.get().add(worker * each));
            }
        }
    });
}
