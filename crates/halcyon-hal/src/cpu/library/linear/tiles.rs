//! Products of weights in blocks on the tile registers of AMX, for 16 rows at a time.
//!
//! A panel is prepared first: codes are unpacked to bytes, less their zero, and scales are decoded to f32.
//! This costs little, because all tiles of rows then use the panel. For each group of 32 elements, a product
//! of tile registers sums 16 rows by 16 outputs as integers. The sums go through memory to vectors, which
//! scale and add them as `ints.rs` does. So the results have the same bits as those of AVX512_VNNI.
//!
//! A unit is a group, or half a group if halves have scales of their own. While the vectors scale the sums of
//! one unit, the matrix unit multiplies the next one. Rows and panels are cut into blocks of [`DEEP`] groups
//! of two tiles of rows and four panels, which stay in the first-level cache; the sums in f32 wait in memory
//! in between.
//!
//! Cost. A unit of 16 by 16 results of a whole group has 8,192 multiply-adds. At best its product takes 16
//! cycles of the matrix unit, storing its sums 16 cycles of the store port, and scaling them 24 cycles of two
//! ports, 32 with offsets; all of these could overlap in about 30. Measured in a loop, a unit takes about 50:
//! products and scaling hardly overlap. `docs/performance.md` says what was tried.

use super::ints::{Kind, Vnni, code};
use super::layout::{CHUNK, Decoded, GROUP, LINE, Layout, PANEL, STEPS};
use super::quantise::{CODES, SCALE, SUMS, record_bytes};
use super::rows::Tile;
use crate::cpu::amx::{TileConfig, Tiles, tile};
use std::arch::x86_64::*;

/// Rows of a tile, or halves of rows with fine activations.
pub(super) const ROWS: usize = 16;
/// Tiles of rows that are multiplied with the same panels after each other.
const TILES: usize = 2;
/// Groups that are multiplied before the next tile.
const DEEP: usize = CHUNK;
/// Bytes of the codes of a prepared group.
const CODES_OF_GROUP: usize = STEPS * LINE;
/// Bytes of a tile of sums.
const SUMS_OF_TILE: usize = ROWS * PANEL * 4;
/// Bytes of a group of a tile of activations, see [`collect`]: as many as its records have.
const GROUP_OF_TILE: usize = ROWS * record_bytes(false);
/// Places in it: the scales, and the numbers with the sums of each half of the group.
const SCALES_OF_TILE: usize = ROWS * GROUP;
const SUMS_OF_ROWS: usize = SCALES_OF_TILE + ROWS * 4;

/// Collects the parts of a tile's records, group by group: the codes of all rows, then the scales, and the
/// numbers with sums of the first and of the second halves. So no row of a register crosses a cache line.
///
/// # Safety
/// `x` has the records of `groups` groups of [`ROWS`] rows, and nothing else uses them.
pub(super) unsafe fn collect(x: *mut u8, groups: usize) {
    for g in 0..groups {
        // SAFETY: by contract the group's records are there; the parts take no more bytes than they do.
        unsafe {
            let to = x.add(g * GROUP_OF_TILE);
            let from = to.cast::<[[u8; record_bytes(false)]; ROWS]>().read();
            for (r, record) in from.iter().enumerate() {
                let codes = record.as_ptr().add(CODES);
                to.add(r * GROUP).copy_from_nonoverlapping(codes, GROUP);
                for (at, part) in
                    [(SCALES_OF_TILE, SCALE), (SUMS_OF_ROWS, SUMS), (SUMS_OF_ROWS + 4 * ROWS, SUMS + 4)]
                {
                    to.add(at + 4 * r).copy_from_nonoverlapping(record.as_ptr().add(part), 4);
                }
            }
        }
    }
}

/// Bytes of a prepared group: its codes, the scales of each half that has its own, and as many offsets.
fn group_bytes(l: &Layout) -> usize {
    let scales = if l.halves() { 2 } else { 1 };
    CODES_OF_GROUP + scales * PANEL * 4 * if l.offset() { 2 } else { 1 }
}

/// Bytes of a prepared panel, a multiple of 64.
pub(super) fn prepared_bytes(l: &Layout, groups: usize) -> usize {
    groups * group_bytes(l)
}

/// Bytes of memory that [`multiply`] works in for `panels` panels, a multiple of 64.
pub(super) fn work_bytes(panels: usize) -> usize {
    (2 + TILES * panels) * SUMS_OF_TILE
}

/// Prepares a panel.
///
/// # Safety
/// The panel has `groups` groups of this layout. `to` is writable for [`prepared_bytes`] and overlaps nothing
/// else. The processor has AVX-512 with AVX512_VNNI.
pub(super) type Prepare = unsafe fn(l: &Layout, panel: *const u8, groups: usize, to: *mut u8);

/// [`Prepare`] for a kind of formats.
///
/// # Safety
/// The contract of [`Prepare`]; the layout is of this kind.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn prepare<K: Kind>(l: &Layout, panel: *const u8, groups: usize, to: *mut u8) {
    let (mut scales, mut offsets) = (Decoded::uninit(), Decoded::uninit());
    let (zero, each) = (_mm512_set1_epi8(l.zero as u8 as i8), group_bytes(l));
    let vectors = if K::HALVES { 2 } else { 1 };
    // SAFETY: by contract the panel has these groups, and `to` has `each` bytes for each. The scales of the
    // first `some` groups are decoded before they are read.
    unsafe {
        let table = match l.table {
            Some(table) => _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())),
            None => _mm512_setzero_si512(),
        };
        for g0 in (0..groups).step_by(CHUNK) {
            let some = (groups - g0).min(CHUNK);
            let chunk = panel.add(g0 / CHUNK * l.chunk(CHUNK));
            l.decode::<Vnni>(chunk, some, &mut scales, &mut offsets);
            let (scales, offsets) = (scales.as_ptr().cast::<f32>(), offsets.as_ptr().cast::<f32>());
            let codes = chunk.add(l.scales(some));
            for g in 0..some {
                let (from, to) = (codes.add(g * K::LINES * LINE), to.add((g0 + g) * each));
                macro_rules! steps {
                    ($($q:literal $h:literal)*) => {
                        $(
                            let v = code::<Vnni, K, $q, $h>(from, table);
                            let v = _mm512_sub_epi8(v, zero);
                            _mm512_storeu_si512(to.add((4 * $h + $q) * LINE).cast(), v);
                        )*
                    };
                }
                steps!(0 0 1 0 2 0 3 0 0 1 1 1 2 1 3 1);
                let to = to.add(CODES_OF_GROUP).cast::<f32>();
                for i in 0..vectors {
                    let at = (vectors * g + i) * PANEL;
                    _mm512_storeu_ps(to.add(i * PANEL), _mm512_loadu_ps(scales.add(at)));
                    if K::OFFSET {
                        let to = to.add((vectors + i) * PANEL);
                        _mm512_storeu_ps(to, _mm512_loadu_ps(offsets.add(at)));
                    }
                }
            }
        }
    }
}

/// Prepared panels times tiles of rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    pub layout: &'a Layout,
    pub groups: usize,
    /// The prepared panels, one after the other.
    pub panels: *const u8,
    pub count: usize,
    /// Tiles of [`ROWS`] rows, or of half as many fine rows.
    pub tiles: &'a [Tile],
    /// The arranged rows, those of the tiles as [`collect`] leaves them, and the bytes of one.
    pub x: *const u8,
    pub arranged: usize,
    /// The rows of the results, in the order of the arranged rows.
    pub rows: *const u32,
    /// Whether two rows of a tile after each other are the parts of one row.
    pub pairs: bool,
    /// The first result of the first panel in row 0.
    pub y: *mut f32,
    /// Floats from a row of the results to the next.
    pub stride: usize,
    /// Results of all panels.
    pub columns: usize,
    /// [`work_bytes`] bytes for `count` panels.
    pub work: *mut u8,
}

/// Multiplies panels with tiles.
///
/// # Safety
/// The operands are as [`Task`] says, and the results of the tiles' rows and the panels' columns are
/// writable. No other thread uses them or the working memory. The processor has AVX-512 with AVX512_VNNI, and
/// the process may use tile registers with AMX-INT8.
pub(super) unsafe fn multiply(t: &Task<'_>) {
    let (depth, rows) = (if t.layout.halves() { GROUP / 2 } else { GROUP }, ROWS as u8);
    let (sums, x) = ((rows, (4 * PANEL) as u8), (rows, depth as u8));
    let w = (depth as u8 / 4, LINE as u8);
    let _tiles = Tiles::new(&TileConfig::new([sums, sums, sums, sums, x, x, w, w]));
    // SAFETY: this function has the contract of `blocks`, and the registers are configured.
    unsafe {
        match (t.layout.halves(), t.layout.offset()) {
            (false, false) => blocks::<false, false>(t),
            (false, true) => blocks::<false, true>(t),
            (true, false) => blocks::<true, false>(t),
            (true, true) => blocks::<true, true>(t),
        }
    }
}

/// # Safety
/// The contract of [`multiply`]; the registers are configured for the layout.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn blocks<const HALVES: bool, const OFFSET: bool>(t: &Task<'_>) {
    let each = group_bytes(t.layout);
    let waiting = t.work.wrapping_add(2 * SUMS_OF_TILE);
    for tiles in t.tiles.chunks(TILES) {
        for g in (0..t.groups).step_by(DEEP) {
            let some = (t.groups - g).min(DEEP);
            for (i, rows) in tiles.iter().enumerate() {
                for p in 0..t.count {
                    // SAFETY: by contract the tile's rows are arranged, the panel is prepared, and the
                    // working memory has two tiles of sums, and then one for each pair of a tile and a panel.
                    // The results of the panel's columns are written when the sums are complete.
                    unsafe {
                        let part = Part {
                            x: t.x.add(rows.first as usize * t.arranged + g * GROUP_OF_TILE),
                            w: t.panels.add((p * t.groups + g) * each),
                            groups: some,
                            sums: t.work,
                        };
                        let waiting = waiting.add((i * t.count + p) * SUMS_OF_TILE).cast::<f32>();
                        let mut out = [_mm512_setzero_ps(); ROWS];
                        if g > 0 {
                            for (r, out) in out.iter_mut().enumerate() {
                                *out = _mm512_loadu_ps(waiting.add(r * PANEL));
                            }
                        }
                        part.add::<HALVES, OFFSET>(&mut out);
                        if g + some == t.groups {
                            write(t, rows.first as usize, p, &out);
                        } else {
                            for (r, out) in out.iter().enumerate() {
                                _mm512_storeu_ps(waiting.add(r * PANEL), *out);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes the results of a tile and panel `p`.
///
/// # Safety
/// The contract of [`multiply`]; the tile's rows are those from `first` on in the order.
#[inline(always)]
unsafe fn write(t: &Task<'_>, first: usize, p: usize, out: &[__m512; ROWS]) {
    let columns = (t.columns - p * PANEL).min(PANEL);
    let parts = if t.pairs { 2 } else { 1 };
    // SAFETY: by contract the results of these rows and columns are writable. The calling function is
    // compiled for AVX-512.
    unsafe {
        for r in 0..ROWS / parts {
            let v = match t.pairs {
                true => _mm512_add_ps(out[2 * r], out[2 * r + 1]),
                false => out[r],
            };
            let y = t.y.add(*t.rows.add(first + r) as usize * t.stride + p * PANEL);
            _mm512_mask_storeu_ps(y, ((1u32 << columns) - 1) as u16, v);
        }
    }
}

/// Some units of a tile of rows and of a prepared panel.
struct Part {
    x: *const u8,
    w: *const u8,
    groups: usize,
    /// Memory for two tiles of sums.
    sums: *mut u8,
}

impl Part {
    /// Adds the scaled products.
    ///
    /// # Safety
    /// The groups are readable and the memory of the sums is writable. The registers are configured for the
    /// layout. The calling function is compiled for AVX-512.
    #[inline(always)]
    unsafe fn add<const HALVES: bool, const OFFSET: bool>(&self, out: &mut [__m512; ROWS]) {
        let each = if HALVES { 2 } else { 1 };
        let units = self.groups * each;
        // SAFETY: by contract all units exist; the sums of a unit are read after they were stored.
        unsafe {
            self.product::<HALVES, OFFSET, 0, 4, 6>(0);
            let mut u = 0;
            while u + 1 < units {
                self.product::<HALVES, OFFSET, 1, 5, 7>(u + 1);
                self.scale::<HALVES, OFFSET>(u, 0, out);
                if u + 2 < units {
                    self.product::<HALVES, OFFSET, 0, 4, 6>(u + 2);
                }
                self.scale::<HALVES, OFFSET>(u + 1, 1, out);
                u += 2;
            }
            if u < units {
                self.scale::<HALVES, OFFSET>(u, 0, out);
            }
        }
    }

    /// The records and the prepared group of unit `u`, and the half of the group that it is.
    #[inline(always)]
    fn unit<const HALVES: bool, const OFFSET: bool>(&self, u: usize) -> (*const u8, *const u8, usize) {
        let (g, half) = if HALVES { (u / 2, u % 2) } else { (u, 0) };
        let vectors = if HALVES { 2 } else { 1 } * if OFFSET { 2 } else { 1 };
        let each = CODES_OF_GROUP + vectors * PANEL * 4;
        (self.x.wrapping_add(g * GROUP_OF_TILE), self.w.wrapping_add(g * each), half)
    }

    /// Sums the products of unit `u` in register `C`, and stores them. `A` and `B` take the operands.
    ///
    /// # Safety
    /// The contract of [`Part::add`]; the unit exists.
    #[inline(always)]
    unsafe fn product<const HALVES: bool, const OFFSET: bool, const C: u8, const A: u8, const B: u8>(
        &self,
        u: usize,
    ) {
        let (x, w, half) = self.unit::<HALVES, OFFSET>(u);
        // SAFETY: by contract the unit's records and codes are readable, and there is memory for both sums.
        unsafe {
            tile::zero::<C>();
            tile::load::<A>(x.add(half * GROUP / 2), GROUP as isize);
            tile::load::<B>(w.add(half * CODES_OF_GROUP / 2), LINE as isize);
            tile::i8_i8::<C, A, B>();
            tile::store::<C>(self.sums.add(usize::from(C) * SUMS_OF_TILE), (4 * PANEL) as isize);
        }
    }

    /// Scales the sums of unit `u`, which are in place `c`, and adds them.
    ///
    /// # Safety
    /// The contract of [`Part::add`]; the unit's sums are stored.
    #[inline(always)]
    unsafe fn scale<const HALVES: bool, const OFFSET: bool>(
        &self,
        u: usize,
        c: usize,
        out: &mut [__m512; ROWS],
    ) {
        let (x, w, half) = self.unit::<HALVES, OFFSET>(u);
        // SAFETY: by contract the unit's records, scales and sums are readable.
        unsafe {
            let sums = self.sums.add(c * SUMS_OF_TILE);
            let scales = w.add(CODES_OF_GROUP).cast::<f32>();
            let scale = _mm512_loadu_ps(scales.add(half * PANEL));
            for (r, out) in out.iter_mut().enumerate() {
                let own = x.add(SCALES_OF_TILE + 4 * r).cast::<f32>().read_unaligned();
                let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.add(r * 4 * PANEL).cast()));
                *out = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(own)), *out);
            }
            if OFFSET {
                let vectors = if HALVES { 2 } else { 1 };
                let offset = _mm512_loadu_ps(scales.add((vectors + half) * PANEL));
                for (r, out) in out.iter_mut().enumerate() {
                    let sum = x.add(SUMS_OF_ROWS + 4 * (half * ROWS + r)).cast::<f32>();
                    *out = _mm512_fmadd_ps(offset, _mm512_set1_ps(sum.read_unaligned()), *out);
                }
            }
        }
    }
}
