//! How weights in blocks are packed for the kernels.
//!
//! A panel has the weights of [`PANEL`] outputs. It has a chunk for each 8 groups of 32 elements of `k`; the
//! last chunk may have fewer groups. A chunk has the scales of its weights, then their codes, so that memory
//! is read in order. Codes are unsigned; a weight is `scale * (code - zero) + offset`.
//!
//! The codes of a group take some lines of 64 bytes. The instructions multiply four neighbouring elements of
//! each of 16 outputs, a step. So byte `4 l + i` of a line belongs to output `l` and to element `4 s + i` of
//! the group, where `s` is the step. A line has several steps, so that a weight takes no more bits than in
//! its block:
//!
//! - The lowest bits come first. With 8 bits, line `s` has step `s`. With 4 bits, line `q` has step `q` in
//!   the low halves of its bytes and step `q + 4` in the high halves. With 2 bits, line `h` has steps `4 h`
//!   to `4 h + 3`, from the lowest bits to the highest.
//! - The highest bits follow. With 1 bit, one line has the eight steps from the lowest bit to the highest.
//!   With 2 bits, there are two lines, as above.
//!
//! Panels are the same for all instruction sets.

use super::ints::Ints;
use crate::cpu::library::simd::Simd;
use halcyon_ir::blocks::BlockType;
use half::f16;
use std::mem::MaybeUninit;

/// Outputs of a panel.
pub(super) const PANEL: usize = 16;
/// Elements of `k` that share a scale of the activations.
pub(super) const GROUP: usize = 32;
/// Steps of a group: its fours of neighbouring elements.
pub(super) const STEPS: usize = GROUP / 4;
/// Bytes of a line of codes.
pub(super) const LINE: usize = 64;
/// Groups whose scales are decoded at a time: those of the largest block.
pub(super) const CHUNK: usize = 8;
/// Floats that the scales of a chunk take: a scale for each output and each 16 elements.
pub(super) const SCALES: usize = CHUNK * 2 * PANEL;
/// Scales or offsets of a chunk, before and after they are decoded.
pub(super) type Decoded = MaybeUninit<[f32; SCALES]>;

/// The values of the codes of `iq4_nl` and `iq4_xs`, plus 128.
static IQ4: [u8; 16] = [1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241];
/// Twice the values of the codes of `mxfp4`, plus 128.
static MXFP4: [u8; 16] = [128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116];

/// How the scales of a panel are stored. The first three have an entry per group, the others per 8 groups.
/// An entry has 16 values of each of its parts, one per output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scales {
    /// A scale in f16.
    Half,
    /// A scale and an offset in f16.
    HalfOffset,
    /// The exponent of a scale that is a power of two, one byte.
    Exponent,
    /// A factor in f16, then a signed byte for each group.
    Signed,
    /// A factor in f16, then a signed byte for each half of a group.
    SignedHalves,
    /// Factors of the scales and of the offsets in f16, then a byte for each group's scale, then one for each
    /// group's offset.
    Offsets,
    /// Factors as in `Offsets`, then a byte for each half of a group: scale in the low half, offset in the
    /// high half.
    OffsetHalves,
}

impl Scales {
    /// Groups of an entry, and its bytes.
    fn entry(self) -> (usize, usize) {
        match self {
            Scales::Half => (1, 2 * PANEL),
            Scales::HalfOffset => (1, 4 * PANEL),
            Scales::Exponent => (1, PANEL),
            Scales::Signed => (CHUNK, (2 + CHUNK) * PANEL),
            Scales::SignedHalves => (CHUNK, (2 + 2 * CHUNK) * PANEL),
            Scales::Offsets | Scales::OffsetHalves => (CHUNK, (4 + 2 * CHUNK) * PANEL),
        }
    }
}

/// The form of a format's weights.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    ty: BlockType,
    /// Bits of a code in the low and in the high lines.
    pub low: u32,
    pub high: u32,
    /// What is subtracted from a code, or from the value that the table has for it.
    pub zero: i32,
    /// Values of the codes.
    pub table: Option<&'static [u8; 16]>,
    pub scales: Scales,
}

impl Layout {
    pub(super) fn of(ty: BlockType) -> Layout {
        let with = |low, high, zero, table, scales| Layout { ty, low, high, zero, table, scales };
        match ty {
            BlockType::Q4_0 => with(4, 0, 8, None, Scales::Half),
            BlockType::Q4_1 => with(4, 0, 0, None, Scales::HalfOffset),
            BlockType::Q5_0 => with(4, 1, 16, None, Scales::Half),
            BlockType::Q5_1 => with(4, 1, 0, None, Scales::HalfOffset),
            BlockType::Q8_0 => with(8, 0, 128, None, Scales::Half),
            BlockType::Q2_K => with(2, 0, 0, None, Scales::OffsetHalves),
            BlockType::Q3_K => with(2, 1, 4, None, Scales::SignedHalves),
            BlockType::Q4_K => with(4, 0, 0, None, Scales::Offsets),
            BlockType::Q5_K => with(4, 1, 0, None, Scales::Offsets),
            BlockType::Q6_K => with(4, 2, 32, None, Scales::SignedHalves),
            BlockType::IQ4_NL => with(4, 0, 128, Some(&IQ4), Scales::Half),
            BlockType::IQ4_XS => with(4, 0, 128, Some(&IQ4), Scales::Signed),
            BlockType::MXFP4 => with(4, 0, 128, Some(&MXFP4), Scales::Exponent),
        }
    }

    /// Whether weights have an offset.
    pub(super) fn offset(&self) -> bool {
        matches!(self.scales, Scales::HalfOffset | Scales::Offsets | Scales::OffsetHalves)
    }

    /// Whether each half of a group has a scale of its own.
    pub(super) fn halves(&self) -> bool {
        matches!(self.scales, Scales::SignedHalves | Scales::OffsetHalves)
    }

    /// Whether codes, or their values in the table, take all 8 bits.
    pub(super) fn wide(&self) -> bool {
        self.zero == 128
    }

    /// Lines of a group.
    pub(super) fn lines(&self) -> usize {
        (self.low + self.high) as usize * GROUP * PANEL / 8 / LINE
    }

    /// Bytes of the scales of a chunk of `some` groups, a multiple of 64.
    pub(super) fn scales(&self, some: usize) -> usize {
        let (each, bytes) = self.scales.entry();
        (some.div_ceil(each) * bytes).next_multiple_of(LINE)
    }

    /// Bytes of a chunk of `some` groups.
    pub(super) fn chunk(&self, some: usize) -> usize {
        self.scales(some) + some * self.lines() * LINE
    }

    /// Bytes of a panel, a multiple of 64.
    pub(super) fn bytes(&self, groups: usize) -> usize {
        groups / CHUNK * self.chunk(CHUNK) + self.chunk(groups % CHUNK)
    }

    /// Packs a panel. `from` has `rows` rows of `groups` groups, which follow each other.
    ///
    /// # Safety
    /// The rows are readable. `to` is writable for [`Layout::bytes`] bytes and overlaps nothing else.
    pub(super) unsafe fn pack(&self, from: *const u8, rows: usize, groups: usize, to: *mut u8) {
        let b = self.ty.row();
        let (blocks, each) = (groups * GROUP / b.elements, b.elements / GROUP);
        // SAFETY: by contract `to` has `bytes` bytes, and a row has `blocks` blocks of `b.bytes` bytes. An
        // entry of the scales belongs to one block, because both have 1 or 8 groups.
        unsafe {
            to.write_bytes(0, self.bytes(groups));
            let mut parts = Parts::default();
            for l in 0..rows.min(PANEL) {
                for i in 0..blocks {
                    let block = std::slice::from_raw_parts(from.add((l * blocks + i) * b.bytes), b.bytes);
                    parts.read(self.ty, block);
                    let g0 = i * each / CHUNK * CHUNK;
                    let chunk = to.add(g0 / CHUNK * self.chunk(CHUNK));
                    self.put_scales(&parts, chunk.add((i * each - g0) / each * self.scales.entry().1), l);
                    let codes = chunk.add(self.scales((groups - g0).min(CHUNK)));
                    for g in 0..each {
                        let line = codes.add((i * each - g0 + g) * self.lines() * LINE);
                        self.put(&parts.codes[g * GROUP..][..GROUP], line.add(4 * l));
                    }
                }
            }
        }
    }

    /// Stores the codes of one output's group in its lines.
    ///
    /// # Safety
    /// `line` is the place of this output in the first line of a group.
    #[inline(always)]
    unsafe fn put(&self, codes: &[u8], line: *mut u8) {
        let step = |s: usize| {
            u32::from_le_bytes([codes[4 * s], codes[4 * s + 1], codes[4 * s + 2], codes[4 * s + 3]])
        };
        let each = |bits: u32| u32::from_le_bytes([bits as u8; 4]);
        // Bits `shift` to `shift + 1` of steps `4 h` to `4 h + 3`.
        let pairs = |h: usize, shift: u32| -> u32 {
            (0..4).map(|q| (step(4 * h + q) >> shift & each(3)) << (2 * q)).fold(0, |a, b| a | b)
        };
        // SAFETY: a group has `lines` lines, and each iteration writes the output's four bytes of one.
        let write = |i: usize, v: u32| unsafe { line.add(i * LINE).cast::<u32>().write_unaligned(v.to_le()) };
        let next = match self.low {
            8 => {
                (0..8).for_each(|s| write(s, step(s)));
                8
            }
            4 => {
                (0..4).for_each(|q| write(q, step(q) & each(15) | (step(q + 4) & each(15)) << 4));
                4
            }
            _ => {
                (0..2).for_each(|h| write(h, pairs(h, 0)));
                2
            }
        };
        match self.high {
            1 => {
                let bits = (0..8).map(|s| (step(s) >> self.low & each(1)) << s).fold(0, |a, b| a | b);
                write(next, bits);
            }
            2 => (0..2).for_each(|h| write(next + h, pairs(h, self.low))),
            _ => {}
        }
    }

    /// Stores the scales of one block of output `l`.
    ///
    /// # Safety
    /// `to` is writable for an entry.
    unsafe fn put_scales(&self, p: &Parts, to: *mut u8, l: usize) {
        // SAFETY: all places lie in the entry, see `Scales::entry`.
        unsafe {
            let half =
                |i: usize, v: [u8; 2]| to.add((i * PANEL + l) * 2).cast::<[u8; 2]>().write_unaligned(v);
            let bytes = |from: usize, v: &[u8]| {
                for (i, v) in v.iter().enumerate() {
                    *to.add((from + i) * PANEL + l) = *v;
                }
            };
            match self.scales {
                Scales::Half => half(0, p.d),
                Scales::HalfOffset => {
                    half(0, p.d);
                    half(1, p.min);
                }
                Scales::Exponent => bytes(0, &p.d[..1]),
                Scales::Signed => {
                    half(0, p.d);
                    bytes(2, &p.sub[..CHUNK]);
                }
                Scales::SignedHalves => {
                    half(0, p.d);
                    bytes(2, &p.sub);
                }
                Scales::Offsets | Scales::OffsetHalves => {
                    half(0, p.d);
                    half(1, p.min);
                    bytes(4, &p.sub);
                }
            }
        }
    }

    /// Decodes the scales of the first `some` groups of the chunk at `at`. A group has 16 scales and 16
    /// offsets, or twice as many if its halves have their own.
    ///
    /// # Safety
    /// The chunk has these groups. The calling function is compiled for the instruction set of `X`.
    #[inline(always)]
    pub(super) unsafe fn decode<X: Ints>(
        &self,
        at: *const u8,
        some: usize,
        scales: &mut Decoded,
        offsets: &mut Decoded,
    ) {
        let some = some.min(CHUNK);
        let (scales, offsets) = (scales.as_mut_ptr().cast::<f32>(), offsets.as_mut_ptr().cast::<f32>());
        let n = if self.halves() { 2 * some } else { some };
        for lane in (0..PANEL).step_by(X::S::W) {
            // SAFETY: by contract the entries of these groups are readable. Entries have the parts that
            // `Scales` names, each of 16 values. The arrays have 16 floats for each of the `n` scales.
            unsafe {
                let half = |i: usize| X::S::load_f16(at.add(2 * i * PANEL + 2 * lane).cast::<f16>());
                let byte = |i: usize, part: Part| X::widen(at.add(i * PANEL + lane), part);
                let to = |i: usize| scales.add(i * PANEL + lane);
                let to_offset = |i: usize| offsets.add(i * PANEL + lane);
                match self.scales {
                    Scales::Half => (0..n).for_each(|g| X::S::store(to(g), half(g))),
                    Scales::HalfOffset => {
                        for g in 0..n {
                            X::S::store(to(g), half(2 * g));
                            X::S::store(to_offset(g), half(2 * g + 1));
                        }
                    }
                    Scales::Exponent => {
                        (0..n).for_each(|g| X::S::store(to(g), byte(g, Part::Exponent)));
                    }
                    Scales::Signed | Scales::SignedHalves => {
                        let d = half(0);
                        for i in 0..n {
                            X::S::store(to(i), X::S::mul(d, byte(2 + i, Part::Signed)));
                        }
                    }
                    Scales::Offsets | Scales::OffsetHalves => {
                        let (d, m) = (half(0), X::S::sub(X::S::zero(), half(1)));
                        for i in 0..n {
                            let (scale, offset) = match self.scales {
                                Scales::Offsets => (byte(4 + i, Part::All), byte(4 + CHUNK + i, Part::All)),
                                _ => (byte(4 + i, Part::Low), byte(4 + i, Part::High)),
                            };
                            X::S::store(to(i), X::S::mul(d, scale));
                            X::S::store(to_offset(i), X::S::mul(m, offset));
                        }
                    }
                }
            }
        }
    }
}

/// How a byte is widened to a float.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Part {
    All,
    Signed,
    /// The low half.
    Low,
    /// The high half.
    High,
    /// The byte `e` gives half of `2^(e - 127)`.
    Exponent,
}

/// A block, taken apart.
struct Parts {
    codes: [u8; 256],
    /// The scale, or the factor of the scales. The first byte is the exponent of the scale if it has one.
    d: [u8; 2],
    /// The same for offsets.
    min: [u8; 2],
    /// Scales of groups, or of halves of groups. Offsets of groups follow.
    sub: [u8; 16],
}

impl Default for Parts {
    fn default() -> Parts {
        Parts { codes: [0; 256], d: [0; 2], min: [0; 2], sub: [0; 16] }
    }
}

impl Parts {
    /// Takes the block `b` apart. `halcyon_ir::blocks` has the formats.
    fn read(&mut self, ty: BlockType, b: &[u8]) {
        let two = |i: usize| [b[i], b[i + 1]];
        match ty {
            BlockType::Q4_0 | BlockType::IQ4_NL => {
                self.d = two(0);
                self.nibbles(&b[2..18]);
            }
            BlockType::MXFP4 => {
                self.d[0] = b[0];
                self.nibbles(&b[1..17]);
            }
            BlockType::Q4_1 => {
                (self.d, self.min) = (two(0), two(2));
                self.nibbles(&b[4..20]);
            }
            BlockType::Q5_0 => {
                self.d = two(0);
                self.nibbles(&b[6..22]);
                self.fifth(&b[2..6]);
            }
            BlockType::Q5_1 => {
                (self.d, self.min) = (two(0), two(2));
                self.nibbles(&b[8..24]);
                self.fifth(&b[4..8]);
            }
            BlockType::Q8_0 => {
                self.d = two(0);
                for i in 0..GROUP {
                    self.codes[i] = b[2 + i] ^ 0x80;
                }
            }
            BlockType::Q2_K => {
                (self.d, self.min) = (two(80), two(82));
                self.sub.copy_from_slice(&b[..16]);
                self.quarters(&b[16..80]);
            }
            BlockType::Q3_K => self.q3_k(b),
            BlockType::Q4_K | BlockType::Q5_K => self.with_offsets(b, ty == BlockType::Q5_K),
            BlockType::Q6_K => {
                self.d = two(208);
                self.sub.copy_from_slice(&b[192..208]);
                for part in 0..2 {
                    let (low, high) = (&b[part * 64..][..64], &b[128 + part * 32..][..32]);
                    for quarter in 0..4 {
                        let to = &mut self.codes[part * 128 + quarter * 32..][..32];
                        for i in 0..32 {
                            let low = low[quarter % 2 * 32 + i] >> (4 * (quarter / 2)) & 15;
                            to[i] = low | (high[i] >> (2 * quarter) & 3) << 4;
                        }
                    }
                }
            }
            BlockType::IQ4_XS => {
                self.d = two(0);
                let high = u16::from_le_bytes(two(2));
                for g in 0..8 {
                    let low = b[4 + g / 2] >> (4 * (g % 2)) & 15;
                    let scale = i16::from(low) | ((high >> (2 * g) & 3) << 4) as i16;
                    self.sub[g] = (scale - 32) as u8;
                    let (from, to) = (&b[8 + g * 16..][..16], &mut self.codes[g * GROUP..][..GROUP]);
                    split(from, to);
                }
            }
        }
    }

    fn nibbles(&mut self, from: &[u8]) {
        split(from, &mut self.codes[..GROUP]);
    }

    /// Adds the fifth bits of a group.
    fn fifth(&mut self, bits: &[u8]) {
        for i in 0..GROUP {
            self.codes[i] |= (bits[i / 8] >> (i % 8) & 1) << 4;
        }
    }

    /// The lowest two bits of 256 codes.
    fn quarters(&mut self, from: &[u8]) {
        for part in 0..2 {
            for quarter in 0..4 {
                let to = &mut self.codes[part * 128 + quarter * 32..][..32];
                for i in 0..32 {
                    to[i] = from[part * 32 + i] >> (2 * quarter) & 3;
                }
            }
        }
    }

    fn q3_k(&mut self, b: &[u8]) {
        self.d = [b[108], b[109]];
        self.quarters(&b[32..96]);
        for g in 0..8 {
            for i in 0..GROUP {
                self.codes[g * GROUP + i] |= (b[i] >> g & 1) << 2;
            }
        }
        let s = &b[96..108];
        for i in 0..16 {
            let low = if i < 8 { s[i] & 15 } else { s[i - 8] >> 4 };
            self.sub[i] = (low | (s[8 + i % 4] >> (2 * (i / 4)) & 3) << 4).wrapping_sub(32);
        }
    }

    /// `q4_k`, or `q5_k` if `fifth`.
    fn with_offsets(&mut self, b: &[u8], fifth: bool) {
        (self.d, self.min) = ([b[0], b[1]], [b[2], b[3]]);
        let s = &b[4..16];
        for g in 0..8 {
            (self.sub[g], self.sub[8 + g]) = match g < 4 {
                true => (s[g] & 63, s[g + 4] & 63),
                false => (s[g + 4] & 15 | s[g - 4] >> 6 << 4, s[g + 4] >> 4 | s[g] >> 6 << 4),
            };
            let from = &b[if fifth { 48 } else { 16 } + g / 2 * 32..][..32];
            let to = &mut self.codes[g * GROUP..][..GROUP];
            for i in 0..GROUP {
                to[i] = from[i] >> (4 * (g % 2)) & 15;
                if fifth {
                    to[i] |= (b[16 + i] >> g & 1) << 4;
                }
            }
        }
    }
}

/// The low halves of 16 bytes, then the high halves.
fn split(from: &[u8], to: &mut [u8]) {
    for i in 0..16 {
        to[i] = from[i] & 15;
        to[16 + i] = from[i] >> 4;
    }
}
