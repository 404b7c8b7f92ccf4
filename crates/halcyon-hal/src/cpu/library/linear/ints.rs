//! Products of weights in blocks and activations in bytes.
//!
//! The products of a group, or of half a group if it has a scale of its own, are summed as integers. So the
//! sums are exact, and they do not depend on the instructions. They are scaled and added in f32 in the order
//! of the groups. Each result has one sum in f32, so its bits do not depend on the tile that it belongs to.

#[cfg(target_arch = "aarch64")]
use super::ints_neon::Neon;
#[cfg(target_arch = "x86_64")]
use super::ints_x86::Maddubs;
#[cfg(target_arch = "x86_64")]
pub(super) use super::ints_x86::Vnni;
use super::layout::{CHUNK, Decoded, LINE, Layout, PANEL, Part, STEPS};
use super::quantise::{CODES, SCALE, SUMS, record_bytes};
#[cfg(target_arch = "x86_64")]
use super::tiles;
use crate::cpu::library::simd::{Portable, Simd};
use crate::cpu::sys::Isa;

/// Vectors of bytes for the products of an instruction set. All methods must be called from code compiled for
/// it. Vectors have as many i32 as [`Ints::S`] has floats.
pub(super) trait Ints: Copy {
    /// Vectors of f32 with as many lanes.
    type S: Simd;
    /// A vector of bytes, four to a lane.
    type B: Copy;
    /// A vector of i32.
    type I: Copy;
    /// Whether the products of weights that take 8 bits subtract 128 from them, so that the sums need not.
    const SUBTRACTS: bool;
    /// Whether activations have 16 bits if weights take 8 bits. Of each four, elements 0 and 2 then come
    /// before 1 and 3.
    const WORDS: bool = false;
    /// Steps whose products [`Ints::dot`] may add before [`Ints::close`], if codes have `bits` bits.
    #[inline(always)]
    fn run(_bits: u32) -> usize {
        STEPS
    }

    /// # Safety
    /// The caller is compiled for the instruction set; a vector of bytes at `p` is readable.
    unsafe fn load(p: *const u8) -> Self::B;
    /// The 16 bytes at `p`, in each 16 bytes of the vector.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set; 16 bytes at `p` are readable.
    unsafe fn table(p: *const u8) -> Self::B;
    /// The bits of each byte moved by `by` places to the left, or to the right if it is negative; of the
    /// result, the bits of `mask`. These are bits of the same byte. `-8 < by < 8`, a constant.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set.
    unsafe fn moved(v: Self::B, by: i32, mask: u8) -> Self::B;
    /// # Safety
    /// The caller is compiled for the instruction set.
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B;
    /// Bytes of `table` with the numbers in `v`, less than 16.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set.
    unsafe fn look_up(table: Self::B, v: Self::B) -> Self::B;
    /// # Safety
    /// The caller is compiled for the instruction set.
    unsafe fn splat(v: i32) -> Self::I;
    /// Begins a run of steps: what [`Ints::dot`] adds the first products to. `sum` has the products before.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set.
    #[inline(always)]
    unsafe fn open(sum: Self::I, _wide: bool) -> Self::I {
        sum
    }
    /// Ends a run of steps: `sum` and the products that were added to `open(sum)`, which gave `run`.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set.
    #[inline(always)]
    unsafe fn close(_sum: Self::I, run: Self::I, _wide: bool) -> Self::I {
        run
    }
    /// The even or the odd bytes of `w`, in 16 bits. The default is for sets without [`Ints::WORDS`].
    ///
    /// # Safety
    /// The caller is compiled for the instruction set.
    #[inline(always)]
    unsafe fn word(w: Self::B, _odd: bool) -> Self::B {
        w
    }
    /// Adds to each lane of `run` the products of its four bytes of `w`, unsigned, with the four activations
    /// at `x`, signed, which are not -128. The bytes of `w` are codes of at most 6 bits, unless `wide`, a
    /// constant. With [`Ints::WORDS`], a wide `w` is a [`Ints::word`], and there are two activations for it.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set; 4 activations at `x` are readable.
    unsafe fn dot(run: Self::I, w: Self::B, x: *const u8, wide: bool) -> Self::I;
    /// Widens a part of each byte at `p`, a vector of them. `part` is a constant.
    ///
    /// # Safety
    /// The caller is compiled for the instruction set; as many bytes as lanes are readable at `p`.
    unsafe fn widen(p: *const u8, part: Part) -> <Self::S as Simd>::V;
    /// # Safety
    /// The caller is compiled for the instruction set.
    unsafe fn float(v: Self::I) -> <Self::S as Simd>::V;
}

/// The formats that are the same for the kernels: the facts of [`Layout`], as constants.
pub(super) trait Kind {
    const LOW: u32;
    const HIGH: u32;
    const TABLE: bool;
    const OFFSET: bool;
    const HALVES: bool;
    const WIDE: bool = Self::TABLE || Self::LOW == 8;
    const BITS: u32 = if Self::WIDE { 8 } else { Self::LOW + Self::HIGH };
    const LINES: usize = (Self::LOW + Self::HIGH) as usize;
}

macro_rules! kinds {
    ($($name:ident: $low:literal $high:literal $table:literal $offset:literal $halves:literal;)*) => {
        $(
            struct $name;
            impl Kind for $name {
                const LOW: u32 = $low;
                const HIGH: u32 = $high;
                const TABLE: bool = $table;
                const OFFSET: bool = $offset;
                const HALVES: bool = $halves;
            }
        )*
        /// The tiles of a format.
        fn tiles_of(path: Path, l: &Layout) -> Option<&'static [TileFn]> {
            match (l.low, l.high, l.table.is_some(), l.offset(), l.halves()) {
                $(($low, $high, $table, $offset, $halves) => Some(path.tiles::<$name>()),)*
                _ => None,
            }
        }
        /// The function that prepares panels of a format for tile registers.
        #[cfg(target_arch = "x86_64")]
        pub(super) fn prepare_of(l: &Layout) -> Option<tiles::Prepare> {
            match (l.low, l.high, l.table.is_some(), l.offset(), l.halves()) {
                $(($low, $high, $table, $offset, $halves) => Some(tiles::prepare::<$name>),)*
                _ => None,
            }
        }
    };
}

kinds! {
    Four: 4 0 false false false;
    FourOffset: 4 0 false true false;
    FourTable: 4 0 true false false;
    Five: 4 1 false false false;
    FiveOffset: 4 1 false true false;
    Eight: 8 0 false false false;
    Two: 2 0 false true true;
    Three: 2 1 false false true;
    Six: 4 2 false false true;
}

/// With few rows, panels come from memory, and the lines this many bytes ahead are fetched.
const AHEAD: usize = 2048;
const AHEAD_ROWS: usize = 4;

/// [`Layout::decode`] for an instruction set.
///
/// # Safety
/// The contract of [`Layout::decode`]; the instruction set is available.
pub(super) type Decode = unsafe fn(&Layout, *const u8, usize, &mut Decoded, &mut Decoded);

/// One panel times the rows of one tile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    pub layout: &'a Layout,
    /// Bytes of the scales of a full chunk, and of the chunk.
    pub scales: usize,
    pub chunk: usize,
    /// Decodes scales: [`Path::decode`].
    pub decode: Decode,
    pub groups: usize,
    pub panel: *const u8,
    /// The records of the tile.
    pub x: *const u8,
    /// The rows of the results, as many as the tile has, or half as many.
    pub rows: *const u32,
    /// Whether two rows of the tile after each other are the parts of one row.
    pub pairs: bool,
    /// The first result of the panel in row 0.
    pub y: *mut f32,
    /// Floats from a row of the results to the next.
    pub stride: usize,
    /// Results of the panel, at most [`PANEL`].
    pub columns: usize,
}

/// Multiplies a panel with a tile of a certain number of rows.
///
/// # Safety
/// The operands are as [`Task`] says, and the instruction set is available.
pub(super) type TileFn = unsafe fn(&Task<'_>);

/// The instructions that multiply bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Path {
    /// AMX-INT8 for 16 rows, otherwise AVX512_VNNI.
    Amx,
    /// AVX512_VNNI.
    Vnni,
    /// AVX2.
    Maddubs,
    Neon,
    Plain,
}

impl Path {
    /// Every path that may run here with `isa`, the best first.
    pub(super) fn all(isa: Isa) -> impl Iterator<Item = Path> {
        let plain = isa == Isa::Portable;
        let paths = [
            (Path::Amx, isa.check().has_vnni() && isa.has_int8_tiles()),
            (Path::Vnni, isa.has_vnni()),
            (Path::Maddubs, isa >= Isa::Avx2),
            (Path::Neon, plain && cfg!(target_arch = "aarch64")),
            (Path::Plain, plain),
        ];
        paths.into_iter().filter(|(_, has)| *has).map(|(p, _)| p)
    }

    /// Numbers of rows that a tile may have. A tile of `fine` rows has two rows for each.
    pub(super) fn sizes(self, fine: bool) -> &'static [usize] {
        match (self, fine) {
            (Path::Amx, false) => &[16, 12, 8, 4, 2, 1],
            (Path::Amx, true) => &[8, 6, 4, 2, 1],
            (Path::Vnni, false) => &[12, 8, 4, 2, 1],
            (Path::Vnni, true) => &[6, 4, 2, 1],
            (_, false) => &[4, 2, 1],
            (_, true) => &[2, 1],
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Path::Amx => "amx",
            Path::Vnni => "vnni",
            Path::Maddubs => "avx2",
            Path::Neon => "neon",
            Path::Plain => "plain",
        }
    }

    /// What the sums of the activations' codes are multiplied by, see [`super::quantise::Form`].
    pub(super) fn zero(self, l: &Layout) -> i32 {
        // See `Ints::SUBTRACTS`.
        if self == Path::Neon && l.wide() { 0 } else { l.zero }
    }

    /// Whether activations have 16 bits, see [`Ints::WORDS`].
    pub(super) fn words(self, l: &Layout) -> bool {
        self == Path::Maddubs && l.wide()
    }

    /// The function that decodes scales.
    pub(super) fn decode(self) -> Decode {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Amx | Path::Vnni => decode_avx512,
            #[cfg(target_arch = "x86_64")]
            Path::Maddubs => decode_avx2,
            #[cfg(target_arch = "aarch64")]
            Path::Neon => Layout::decode::<Neon>,
            _ => Layout::decode::<Plain>,
        }
    }

    /// Whether tiles of the largest size are multiplied by tile registers.
    pub(super) fn has_registers(self) -> bool {
        self == Path::Amx
    }

    /// The functions for the sizes of tiles, but for those that tile registers multiply.
    fn tiles<K: Kind>(self) -> &'static [TileFn] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Path::Amx | Path::Vnni => {
                const { &[vnni::<K, 12>, vnni::<K, 8>, vnni::<K, 4>, vnni::<K, 2>, vnni::<K, 1>] }
            }
            #[cfg(target_arch = "x86_64")]
            Path::Maddubs => const { &[maddubs::<K, 4, 2>, maddubs::<K, 2, 2>, maddubs::<K, 1, 2>] },
            #[cfg(target_arch = "aarch64")]
            Path::Neon => const { &[neon::<K, 4>, neon::<K, 2>, neon::<K, 1>] },
            _ => const { &[plain::<K, 4>, plain::<K, 2>, plain::<K, 1>] },
        }
    }

    /// The functions that multiply weights of this layout, in the order of [`Path::sizes`]. `None` for a
    /// layout that no format has.
    pub(super) fn tiles_for(self, l: &Layout) -> Option<&'static [TileFn]> {
        tiles_of(self, l)
    }
}

/// # Safety
/// The contract of [`Layout::decode`]; the processor has AVX-512 with AVX512_VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn decode_avx512(l: &Layout, at: *const u8, some: usize, scales: &mut Decoded, offsets: &mut Decoded) {
    // SAFETY: this function has the contract of `decode` and is compiled for AVX512_VNNI.
    unsafe { l.decode::<Vnni>(at, some, scales, offsets) }
}

/// # Safety
/// The contract of [`Layout::decode`]; the processor has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn decode_avx2(l: &Layout, at: *const u8, some: usize, scales: &mut Decoded, offsets: &mut Decoded) {
    // SAFETY: this function has the contract of `decode` and is compiled for AVX2.
    unsafe { l.decode::<Maddubs>(at, some, scales, offsets) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows; the processor has AVX-512 with AVX512_VNNI.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn vnni<K: Kind, const R: usize>(t: &Task<'_>) {
    // SAFETY: this function has the contract of `tile` and is compiled for AVX512_VNNI.
    unsafe { tile::<Vnni, K, R, 1>(t) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows; the processor has AVX2, FMA and F16C.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn maddubs<K: Kind, const R: usize, const H: usize>(t: &Task<'_>) {
    // SAFETY: this function has the contract of `tile` and is compiled for AVX2.
    unsafe { tile::<Maddubs, K, R, H>(t) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows.
#[cfg(target_arch = "aarch64")]
unsafe fn neon<K: Kind, const R: usize>(t: &Task<'_>) {
    // SAFETY: this function has the contract of `tile`, and the baseline has NEON.
    unsafe { tile::<Neon, K, R, 2>(t) }
}

/// # Safety
/// The contract of [`TileFn`] for `R` rows.
unsafe fn plain<K: Kind, const R: usize>(t: &Task<'_>) {
    // SAFETY: this function has the contract of `tile`.
    unsafe { tile::<Plain, K, R, 1>(t) }
}

/// A panel times a tile of `R` rows, `H` vectors of outputs at a time.
///
/// # Safety
/// The contract of [`TileFn`] for `R` rows and the kind `K`. The calling function is compiled for the
/// instruction set of `X`.
#[inline(always)]
unsafe fn tile<X: Ints, K: Kind, const R: usize, const H: usize>(t: &Task<'_>) {
    for lane in (0..PANEL).step_by(H * X::S::W) {
        // SAFETY: this function has the contract of `lanes`, and `H` vectors of outputs follow `lane`.
        unsafe { lanes::<X, K, R, H>(t, lane) };
    }
}

/// Outputs `lane .. lane + H W` of a panel.
///
/// # Safety
/// The contract of [`tile`]; the panel has these outputs.
#[inline(always)]
unsafe fn lanes<X: Ints, K: Kind, const R: usize, const H: usize>(t: &Task<'_>, lane: usize) {
    let w = X::S::W;
    // SAFETY: by contract the panel has `groups` groups of `LINES` lines, of which each has four bytes per
    // output, and then their scales; the tile has `R` records per group. Results are written for the rows and
    // the columns that there are.
    unsafe {
        let mut out = [[X::S::zero(); H]; R];
        let table = match t.layout.table {
            Some(table) => X::table(table.as_ptr()),
            None => X::table([0; 16].as_ptr()),
        };
        // Filling them with zeros first would take a tenth of the time of a tile with few rows.
        let (mut scales, mut offsets) = (Decoded::uninit(), Decoded::uninit());
        for g0 in (0..t.groups).step_by(CHUNK) {
            let some = (t.groups - g0).min(CHUNK);
            let chunk = t.panel.add(g0 / CHUNK * t.chunk);
            (t.decode)(t.layout, chunk, some, &mut scales, &mut offsets);
            // Those of the first `some` groups are read.
            let (scales, offsets) = (scales.as_ptr().cast::<f32>(), offsets.as_ptr().cast::<f32>());
            let chunk = chunk.add(if some == CHUNK { t.scales } else { t.layout.scales(some) });
            for g in 0..some {
                let codes = chunk.add(g * K::LINES * LINE + 4 * lane);
                if R <= AHEAD_ROWS {
                    for line in 0..K::LINES {
                        X::S::prefetch(codes.wrapping_add(AHEAD + line * LINE).cast());
                    }
                }
                let x = t.x.add((g0 + g) * R * bytes::<X, K>());
                if K::HALVES {
                    for half in 0..2 {
                        let mut sums = start::<X, K, R, H>(x, half);
                        half_of::<X, K, R, H>(&mut sums, codes, x, table, half);
                        let at = (2 * g + half) * PANEL + lane;
                        add::<X, K, R, H>(&mut out, &sums, scales.add(at), offsets.wrapping_add(at), x, half);
                    }
                } else {
                    let mut sums = start::<X, K, R, H>(x, 0);
                    half_of::<X, K, R, H>(&mut sums, codes, x, table, 2);
                    let at = g * PANEL + lane;
                    add::<X, K, R, H>(&mut out, &sums, scales.add(at), offsets.wrapping_add(at), x, 0);
                }
            }
        }
        let parts = if t.pairs { 2 } else { 1 };
        for r in 0..R / parts {
            if t.pairs {
                out[r] = std::array::from_fn(|h| X::S::add(out[2 * r][h], out[2 * r + 1][h]));
            }
            let y = t.y.add(*t.rows.add(r) as usize * t.stride);
            for h in 0..H {
                let at = lane + h * w;
                if at + w <= t.columns {
                    X::S::store(y.add(at), out[r][h]);
                } else if at < t.columns {
                    X::S::store_part(y.add(at), out[r][h], t.columns - at);
                }
            }
        }
    }
}

/// Bytes of a record.
#[inline(always)]
fn bytes<X: Ints, K: Kind>() -> usize {
    record_bytes(X::WORDS && K::WIDE)
}

/// The sums before the first product.
///
/// # Safety
/// `x` has the records of `R` rows; the calling function is compiled for the instruction set of `X`.
#[inline(always)]
unsafe fn start<X: Ints, K: Kind, const R: usize, const H: usize>(
    x: *const u8,
    half: usize,
) -> [[X::I; H]; R] {
    // SAFETY: by contract the record of row `r` is readable.
    std::array::from_fn(|r| unsafe {
        let zero = match K::OFFSET || X::SUBTRACTS && K::WIDE {
            true => 0,
            false => x.add(r * bytes::<X, K>() + SUMS + 4 * half).cast::<i32>().read_unaligned(),
        };
        [X::splat(zero); H]
    })
}

/// Adds the products of one half of a group, or of both halves if `half` is 2.
///
/// # Safety
/// The contract of [`lanes`] for the group at `codes` and `x`.
#[inline(always)]
unsafe fn half_of<X: Ints, K: Kind, const R: usize, const H: usize>(
    sums: &mut [[X::I; H]; R],
    codes: *const u8,
    x: *const u8,
    table: X::B,
    half: usize,
) {
    // SAFETY: this function has the contract of `step`.
    unsafe {
        // The compiler knows `left` at every step.
        let (mut run, mut left) = (*sums, 0);
        macro_rules! steps {
            ($($q:literal $h:literal)*) => {
                $(
                    if half != 1 - $h {
                        if left == 0 {
                            run = sums.map(|s| s.map(|s| X::open(s, K::WIDE)));
                            left = X::run(K::BITS);
                        }
                        step::<X, K, R, H, $q, $h>(&mut run, codes, x, table);
                        left -= 1;
                        if left == 0 || $q == 3 && ($h == 1 || half == 0) {
                            for (sums, run) in sums.iter_mut().zip(&run) {
                                for (sum, run) in sums.iter_mut().zip(run) {
                                    *sum = X::close(*sum, *run, K::WIDE);
                                }
                            }
                        }
                    }
                )*
            };
        }
        steps!(0 0 0 1 1 0 1 1 2 0 2 1 3 0 3 1);
    }
}

/// Adds the products of step `4 HALF + Q`.
///
/// # Safety
/// The contract of [`half_of`].
#[inline(always)]
unsafe fn step<X: Ints, K: Kind, const R: usize, const H: usize, const Q: usize, const HALF: usize>(
    run: &mut [[X::I; H]; R],
    codes: *const u8,
    x: *const u8,
    table: X::B,
) {
    // SAFETY: by contract the lines of the group and the records of all rows are readable.
    unsafe {
        let codes: [X::B; H] =
            std::array::from_fn(|h| code::<X, K, Q, HALF>(codes.add(h * 4 * X::S::W), table));
        let words = X::WORDS && K::WIDE;
        let x = x.add(CODES + (4 * HALF + Q) * if words { 8 } else { 4 });
        for part in 0..if words { 2 } else { 1 } {
            let w = if words { codes.map(|w| X::word(w, part == 1)) } else { codes };
            for r in 0..R {
                for h in 0..H {
                    run[r][h] = X::dot(run[r][h], w[h], x.add(r * bytes::<X, K>() + 4 * part), K::WIDE);
                }
            }
        }
    }
}

/// The codes of step `4 HALF + Q`, or their values in the table.
///
/// # Safety
/// `p` is the place of a vector of outputs in the first line of a group of this kind. The calling function is
/// compiled for the instruction set of `X`.
#[inline(always)]
pub(super) unsafe fn code<X: Ints, K: Kind, const Q: usize, const HALF: usize>(
    p: *const u8,
    table: X::B,
) -> X::B {
    // SAFETY: a group has `LOW` lines of low bits and `HIGH` lines of high bits.
    unsafe {
        let low = match K::LOW {
            8 => X::load(p.add((4 * HALF + Q) * LINE)),
            4 => X::moved(X::load(p.add(Q * LINE)), -4 * HALF as i32, 15),
            _ => X::moved(X::load(p.add(HALF * LINE)), -2 * Q as i32, 3),
        };
        let bits = K::LOW as i32;
        let high = p.add(K::LOW as usize * LINE);
        match K::HIGH {
            1 => X::or(low, X::moved(X::load(high), bits - (4 * HALF + Q) as i32, 1 << K::LOW)),
            2 => X::or(low, X::moved(X::load(high.add(HALF * LINE)), bits - 2 * Q as i32, 3 << K::LOW)),
            _ if K::TABLE => X::look_up(table, low),
            _ => low,
        }
    }
}

/// Scales the sums of one group, or of half `half` of a group, and adds them to the results.
///
/// # Safety
/// `scales`, and `offsets` if the kind has them, have `H` vectors. `x` has the records of `R` rows. The
/// calling function is compiled for the instruction set of `X`.
#[inline(always)]
unsafe fn add<X: Ints, K: Kind, const R: usize, const H: usize>(
    out: &mut [[<X::S as Simd>::V; H]; R],
    sums: &[[X::I; H]; R],
    scales: *const f32,
    offsets: *const f32,
    x: *const u8,
    half: usize,
) {
    for h in 0..H {
        // SAFETY: by contract the vectors and the records are readable.
        unsafe {
            let scale = X::S::load(scales.add(h * X::S::W));
            for r in 0..R {
                let record = x.add(r * bytes::<X, K>());
                let own = X::S::splat(record.add(SCALE).cast::<f32>().read_unaligned());
                out[r][h] = X::S::fma(X::float(sums[r][h]), X::S::mul(scale, own), out[r][h]);
            }
            if K::OFFSET {
                let offset = X::S::load(offsets.add(h * X::S::W));
                for r in 0..R {
                    let sum = x.add(r * bytes::<X, K>() + SUMS + 4 * half).cast::<f32>().read_unaligned();
                    out[r][h] = X::S::fma(offset, X::S::splat(sum), out[r][h]);
                }
            }
        }
    }
}

/// Arrays, which the compiler turns into the baseline's vectors.
#[derive(Clone, Copy)]
struct Plain;

impl Ints for Plain {
    type S = Portable;
    type B = [u8; 4 * Portable::W];
    type I = [i32; Portable::W];
    const SUBTRACTS: bool = false;

    #[inline(always)]
    unsafe fn load(p: *const u8) -> Self::B {
        // SAFETY: by contract a vector of bytes at `p` is readable.
        unsafe { p.cast::<Self::B>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn table(p: *const u8) -> Self::B {
        // SAFETY: by contract 16 bytes at `p` are readable.
        unsafe { Self::load(p) }
    }
    #[inline(always)]
    unsafe fn moved(v: Self::B, by: i32, mask: u8) -> Self::B {
        v.map(|v| (if by < 0 { v >> -by } else { v << by }) & mask)
    }
    #[inline(always)]
    unsafe fn or(a: Self::B, b: Self::B) -> Self::B {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::B, v: Self::B) -> Self::B {
        v.map(|v| table[usize::from(v & 15)])
    }
    #[inline(always)]
    unsafe fn splat(v: i32) -> Self::I {
        [v; Portable::W]
    }
    #[inline(always)]
    unsafe fn dot(sum: Self::I, w: Self::B, x: *const u8, _wide: bool) -> Self::I {
        // SAFETY: by contract 4 bytes at `x` are readable.
        let x = unsafe { x.cast::<[i8; 4]>().read_unaligned() };
        // The compiler makes vectors of bytes of 32-bit lanes, but not of sums of neighbouring products.
        let lane = |i: usize| u32::from_le_bytes([w[4 * i], w[4 * i + 1], w[4 * i + 2], w[4 * i + 3]]);
        let lanes: [u32; Portable::W] = std::array::from_fn(lane);
        let mut sum = sum;
        for j in 0..4 {
            for i in 0..Portable::W {
                sum[i] += (lanes[i] >> (8 * j) & 255) as i32 * i32::from(x[j]);
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn widen(p: *const u8, part: Part) -> [f32; Portable::W] {
        // SAFETY: by contract as many bytes are readable.
        unsafe { p.cast::<[u8; Portable::W]>().read_unaligned() }.map(|b| match part {
            Part::All => f32::from(b),
            Part::Signed => f32::from(b as i8),
            Part::Low => f32::from(b & 15),
            Part::High => f32::from(b >> 4),
            // The two smallest are denormal.
            Part::Exponent if b < 2 => f32::from_bits(0x0020_0000 << b),
            Part::Exponent => f32::from_bits(u32::from(b - 1) << 23),
        })
    }
    #[inline(always)]
    unsafe fn float(v: Self::I) -> [f32; Portable::W] {
        v.map(|v| v as f32)
    }
}
