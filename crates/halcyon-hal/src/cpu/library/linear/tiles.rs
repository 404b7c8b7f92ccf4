//! Products of weights in blocks on the tile registers of AMX, for 16 rows at a time.
//!
//! A panel is prepared first: codes are unpacked to bytes, less their zero, and scales are decoded to f32.
//! This costs little, because all tiles of rows then use the panel. For each group of 32 elements, a product
//! of tile registers sums 16 rows by 16 outputs as integers. The sums go through memory to vectors, which
//! scale and add them as `ints.rs` does. So the results have the same bits as those of AVX512_VNNI.
//!
//! A unit is a group, or half a group if halves have scales of their own. The products of four units are
//! begun, then their sums are stored, and then the vectors scale the four units before them. Rows and panels
//! are cut into blocks of [`DEEP`] groups of two tiles of rows and four panels, which stay in the first-level
//! cache; the sums in f32 wait in memory in between.
//!
//! Cost. A unit of 16 by 16 results of a whole group has 8,192 multiply-adds. At best its product takes 16
//! cycles of the matrix unit, storing its sums 16 cycles of the store port, and scaling them 24 cycles of two
//! ports, 32 with offsets; all of these could overlap in about 30. Measured at 2.5 GHz, products alone take
//! 70 cycles, scaling alone 40, and both together 95 to 110, so they do not overlap yet.

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
/// Units whose products are begun before the sums of the first are scaled: the time of a product, from
/// loading its tiles to storing its sums, is several times that of scaling.
const AHEAD: usize = 4;
/// Bytes of the codes of a prepared group.
const CODES_OF_GROUP: usize = STEPS * LINE;
/// A row of zeros, which all rows of a register are loaded from. A product with a register that `tilezero`
/// cleared takes 52 cycles before the next one begins, and one with a register that was loaded 16.
static ZEROS: Line = Line([0; LINE]);
#[repr(align(64))]
struct Line([u8; LINE]);
/// Bytes of a tile of sums.
const SUMS_OF_TILE: usize = ROWS * PANEL * 4;

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
    (2 * AHEAD + TILES * panels) * SUMS_OF_TILE
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
    /// The records of all rows, and the bytes of an arranged row.
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
    for tiles in t.tiles.chunks(TILES) {
        for g in (0..t.groups).step_by(DEEP) {
            // SAFETY: this function has the contract of `block`.
            unsafe { block::<HALVES, OFFSET>(t, tiles, (g, (t.groups - g).min(DEEP))) };
        }
    }
}

/// Multiplies `groups.1` groups from `groups.0` on of some tiles with all panels.
///
/// # Safety
/// The contract of [`blocks`], which is called with the groups in order.
#[inline(always)]
unsafe fn block<const HALVES: bool, const OFFSET: bool>(
    t: &Task<'_>,
    tiles: &[Tile],
    groups: (usize, usize),
) {
    let (first, some) = groups;
    let units = some * if HALVES { 2 } else { 1 };
    let each = group_bytes(t.layout);
    let waiting = t.work.wrapping_add(AHEAD * 2 * SUMS_OF_TILE);
    let part = |pair: usize| {
        let (i, p) = (pair / t.count, pair % t.count);
        let at = tiles[i].first as usize * t.arranged + first * ROWS * record_bytes(false);
        let w = t.panels.wrapping_add((p * t.groups + first) * each);
        Part { x: t.x.wrapping_add(at), w, sums: t.work }
    };
    let pairs = tiles.len() * t.count;
    // While the vectors work on the sums of one unit, the matrix unit multiplies the units after it, also
    // those of the next pair of a tile and a panel.
    let (mut next, mut ahead) = ((0, 0), part(0));
    let mut issued = 0;
    let mut used = 0;
    // SAFETY: by contract the tiles' rows are arranged and the panels are prepared. The working memory has
    // room for `2 AHEAD` tiles of sums: units that are multiplied but not yet scaled are at most so many.
    // Then it has one tile of sums for each pair. Results are written when the sums are complete.
    unsafe {
        macro_rules! multiply {
            ($($c:literal $x:literal $w:literal)*) => {{
                let mut more = 0;
                $(
                    if next.0 < pairs {
                        ahead.product::<HALVES, OFFSET, $c, $x, $w>(next.1);
                        more = $c + 1;
                        next.1 += 1;
                        if next.1 == units {
                            next = (next.0 + 1, 0);
                            if next.0 < pairs {
                                ahead = part(next.0);
                            }
                        }
                    }
                )*
                $(
                    if $c < more {
                        tile::store::<$c>(ahead.sums(issued + $c), (4 * PANEL) as isize);
                    }
                )*
                issued += more;
            }};
        }
        multiply!(0 4 6 1 5 7 2 4 6 3 5 7);
        for pair in 0..pairs {
            let now = part(pair);
            let waiting = waiting.add(pair * SUMS_OF_TILE).cast::<f32>();
            let mut out: [__m512; ROWS] = match first {
                0 => [_mm512_setzero_ps(); ROWS],
                _ => std::array::from_fn(|r| _mm512_loadu_ps(waiting.add(r * PANEL))),
            };
            for u in 0..units {
                if used % AHEAD == 0 {
                    multiply!(0 4 6 1 5 7 2 4 6 3 5 7);
                }
                out = now.scaled::<HALVES, OFFSET>(u, used, out);
                used += 1;
            }
            for r in 0..ROWS {
                _mm512_storeu_ps(waiting.add(r * PANEL), out[r]);
            }
            if first + some == t.groups {
                write(t, tiles[pair / t.count].first as usize, pair % t.count, waiting);
            }
        }
    }
}

/// Writes the results of a tile and panel `p`, which are at `from`.
///
/// # Safety
/// The contract of [`multiply`]; the tile's rows are those from `first` on in the order.
#[inline(always)]
unsafe fn write(t: &Task<'_>, first: usize, p: usize, from: *const f32) {
    let columns = (t.columns - p * PANEL).min(PANEL);
    let parts = if t.pairs { 2 } else { 1 };
    // SAFETY: by contract the results of these rows and columns are writable. The calling function is
    // compiled for AVX-512.
    unsafe {
        for r in 0..ROWS / parts {
            let v = _mm512_loadu_ps(from.add(parts * r * PANEL));
            let v = match t.pairs {
                true => _mm512_add_ps(v, _mm512_loadu_ps(from.add((2 * r + 1) * PANEL))),
                false => v,
            };
            let y = t.y.add(*t.rows.add(first + r) as usize * t.stride + p * PANEL);
            _mm512_mask_storeu_ps(y, ((1u32 << columns) - 1) as u16, v);
        }
    }
}

/// Some groups of a tile of rows and of a prepared panel. A unit is a group, or half a group that has its own
/// scale.
struct Part {
    x: *const u8,
    w: *const u8,
    /// Memory for `2 AHEAD` tiles of sums, which are used in turn.
    sums: *mut u8,
}

impl Part {
    /// The records and the prepared group of unit `u`, and the half of the group that it is.
    #[inline(always)]
    fn unit<const HALVES: bool, const OFFSET: bool>(&self, u: usize) -> (*const u8, *const u8, usize) {
        let (g, half) = if HALVES { (u / 2, u % 2) } else { (u, 0) };
        let vectors = if HALVES { 2 } else { 1 } * if OFFSET { 2 } else { 1 };
        let each = CODES_OF_GROUP + vectors * PANEL * 4;
        (self.x.wrapping_add(g * ROWS * record_bytes(false)), self.w.wrapping_add(g * each), half)
    }

    /// The place of the sums of the unit that is multiplied as number `i`.
    #[inline(always)]
    fn sums(&self, i: usize) -> *mut u8 {
        self.sums.wrapping_add(i % (2 * AHEAD) * SUMS_OF_TILE)
    }

    /// Sums the products of unit `u` in register `C`, with `A` and `B` for its operands.
    ///
    /// # Safety
    /// The unit's records and codes are readable. The registers are configured for the layout.
    #[inline(always)]
    unsafe fn product<const HALVES: bool, const OFFSET: bool, const C: u8, const A: u8, const B: u8>(
        &self,
        u: usize,
    ) {
        let (x, w, half) = self.unit::<HALVES, OFFSET>(u);
        // SAFETY: by contract the unit's records and codes are readable.
        unsafe {
            tile::load::<C>(ZEROS.0.as_ptr(), 0);
            tile::load::<A>(x.add(CODES + half * GROUP / 2), record_bytes(false) as isize);
            tile::load::<B>(w.add(half * CODES_OF_GROUP / 2), LINE as isize);
            tile::i8_i8::<C, A, B>();
        }
    }

    /// Scales the sums of unit `u`, which was multiplied as number `i`, and adds them to `out`.
    ///
    /// # Safety
    /// The unit's records, scales and sums are readable. The calling function is compiled for AVX-512.
    #[inline(always)]
    unsafe fn scaled<const HALVES: bool, const OFFSET: bool>(
        &self,
        u: usize,
        i: usize,
        out: [__m512; ROWS],
    ) -> [__m512; ROWS] {
        let (x, w, half) = self.unit::<HALVES, OFFSET>(u);
        let (sums, mut out) = (self.sums(i), out);
        // SAFETY: by contract the unit's records, scales and sums are readable.
        unsafe {
            let scales = w.add(CODES_OF_GROUP).cast::<f32>();
            let scale = _mm512_loadu_ps(scales.add(half * PANEL));
            for r in 0..ROWS {
                let own = x.add(r * record_bytes(false) + SCALE).cast::<f32>().read_unaligned();
                let sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.add(r * 4 * PANEL).cast()));
                out[r] = _mm512_fmadd_ps(sum, _mm512_mul_ps(scale, _mm512_set1_ps(own)), out[r]);
            }
            if OFFSET {
                let vectors = if HALVES { 2 } else { 1 };
                let offset = _mm512_loadu_ps(scales.add((vectors + half) * PANEL));
                for r in 0..ROWS {
                    let sum = x.add(r * record_bytes(false) + SUMS + 4 * half).cast::<f32>();
                    out[r] = _mm512_fmadd_ps(offset, _mm512_set1_ps(sum.read_unaligned()), out[r]);
                }
            }
        }
        out
    }
}
