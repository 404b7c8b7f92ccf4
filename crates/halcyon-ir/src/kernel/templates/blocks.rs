//! Block-quantised weights in kernels: one decode per format, which every template and every language shares,
//! and the kernel that decodes whole tensors.
//!
//! A weight is `scale * code + offset`. Scale and offset are shared by a group of 16 or 32 weights, the code
//! is a small integer. Kernels decode a block in units of 16 or 32 weights. A unit is what a few consecutive
//! words of the block hold; each field of bits of these words is a strip of consecutive weights of one group.

use crate::blocks::BlockType;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::access::{GROUP, Template};
use crate::kernel::{Buf, Builder, E, ExprId, Kernel, Launch, Ty};
use crate::target::{Caps, Operand};
use std::cell::RefCell;
use std::collections::HashMap;

/// Units in a block.
pub(crate) fn units(ty: BlockType) -> usize {
    match ty {
        BlockType::Q2_K | BlockType::Q3_K | BlockType::Q4_K | BlockType::Q5_K | BlockType::Q6_K => 8,
        _ => ty.row().elements / 16,
    }
}

/// An operand of blocks along its last axis, whose bytes are contiguous there.
pub(crate) struct Rows<'a> {
    b: &'a Builder,
    ty: BlockType,
    buf: Buf,
    /// Number of bytes to which every block is aligned: 1, 2, 4 or 16.
    align: u32,
    offset: E<'a>,
    /// Strides of the leading axes, in bytes.
    strides: Vec<E<'a>>,
}

impl<'a> Rows<'a> {
    /// Declares the operand as the kernel's next buffer, with its offset and strides as parameters, whose
    /// names begin with `name`.
    pub(crate) fn declare(t: &'a Template, name: &str, ty: BlockType, x: &Operand) -> Rows<'a> {
        let v = &x.view;
        let lead = v.rank() - 1;
        let placed = |a: isize| {
            ty.row().bytes as isize % a == 0
                && v.offset % a == 0
                && (0..lead).all(|k| v.shape[k] == 1 || v.strides[k] % a == 0)
        };
        let align = [16, 4, 2].into_iter().find(|a| placed(*a as isize)).unwrap_or(1);
        let element = match align {
            1 => DType::U8,
            2 => DType::U16,
            _ => DType::U32,
        };
        let buf = t.b.raw_buffer(element, false);
        let offset = t.size(&format!("{name}o"), v.offset as i64);
        let strides = (0..lead).map(|k| t.size(&format!("{name}s{k}"), v.strides[k] as i64)).collect();
        Rows { b: &t.b, ty, buf, align, offset, strides }
    }

    /// The byte at which the row with this index on the leading axes starts.
    pub(crate) fn row(&self, idx: &[E<'a>]) -> E<'a> {
        let at = idx.iter().zip(&self.strides).fold(self.offset, |at, (i, s)| at + *i * *s);
        self.b.let_(at)
    }

    /// Block `i` of the row that starts at byte `row`.
    pub(crate) fn block(&self, row: E<'a>, i: E<'a>) -> Block<'a> {
        let at = row + i * self.ty.row().bytes as i64;
        let at = self.b.let_(at.idiv(self.align.min(4) as i64));
        Block { b: self.b, ty: self.ty, buf: self.buf, align: self.align, at, seen: RefCell::default() }
    }
}

/// One block. Offsets are in bytes from its start. Each element is loaded once, so a block must be used only
/// in the scope of the kernel in which it was made.
pub(crate) struct Block<'a> {
    b: &'a Builder,
    ty: BlockType,
    buf: Buf,
    align: u32,
    /// The block's first element of the buffer.
    at: E<'a>,
    /// The elements that have been loaded, by index.
    seen: RefCell<HashMap<ExprId, E<'a>>>,
}

/// Consecutive weights of a block that share a scale.
pub(crate) struct Strip<'a> {
    ty: BlockType,
    /// Index of the first weight in the block: a multiple of 4.
    pub first: E<'a>,
    pub scale: E<'a>,
    /// Added to `scale * code`; `None` for formats without it.
    pub offset: Option<E<'a>>,
    /// The codes of four weights each, as four bytes.
    pub words: Vec<E<'a>>,
}

impl<'a> Strip<'a> {
    /// The four codes of word `i` as an f32 vector.
    pub(crate) fn codes(&self, b: &'a Builder, i: usize) -> E<'a> {
        let word = self.words[i];
        let plain = || b.vector(&[0, 1, 2, 3].map(|e| word.unpack(DType::U8, e).to(Ty::F32)));
        let less = |by: f64| plain() - b.constant(Ty::F32x4, by);
        let look_up = |table| b.vector(&[0, 1, 2, 3].map(|e| look_up(b, word.unpack(DType::U8, e), table)));
        match self.ty {
            BlockType::Q4_0 => less(8.0),
            BlockType::Q5_0 => less(16.0),
            BlockType::Q3_K => less(4.0),
            BlockType::Q6_K => less(32.0),
            BlockType::Q8_0 => b.vector(&[0, 1, 2, 3].map(|e| word.unpack(DType::I8, e).to(Ty::F32))),
            BlockType::IQ4_NL | BlockType::IQ4_XS => look_up(&IQ4_WORDS),
            BlockType::MXFP4 => look_up(&MXFP4_WORDS),
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q2_K | BlockType::Q4_K | BlockType::Q5_K => {
                plain()
            }
        }
    }
}

impl<'a> Block<'a> {
    /// Element `i` of the block, as u32.
    fn element(&self, i: E<'a>) -> E<'a> {
        if let Some(v) = self.seen.borrow().get(&i.id) {
            return *v;
        }
        let v = self.b.load(self.buf, self.at + i);
        self.seen.borrow_mut().insert(i.id, v);
        v
    }

    fn byte(&self, offset: E<'a>) -> E<'a> {
        let per = self.align.min(4) as i64;
        let word = self.element(offset.idiv(per));
        if per == 1 { word } else { word.shr(offset.imod(per).to(Ty::U32) * 8).and(255) }
    }

    fn at(&self, offset: i64) -> E<'a> {
        self.byte(self.b.index(offset))
    }

    /// The f16 at an even offset.
    fn half(&self, offset: i64) -> E<'a> {
        let element = |per: i64| self.element(self.b.index(offset / per));
        match self.align {
            1 => self.at(offset).or(self.at(offset + 1).shl(8)).unpack(DType::F16, 0),
            2 => element(2).unpack(DType::F16, 0),
            _ => element(4).unpack(DType::F16, (offset % 4 / 2) as u8),
        }
    }

    /// `n` consecutive words. The offset is a multiple of 4 plus a multiple of the alignment.
    fn words(&self, offset: E<'a>, n: usize) -> Vec<E<'a>> {
        let b = self.b;
        if self.align == 16 && n == 4 {
            let v = b.load_vector(self.buf, Ty::U32x4, (self.at + offset.idiv(4)).idiv(4));
            return (0..4).map(|l| v.lane(l)).collect();
        }
        let part = |first: E<'a>, i: i64| self.element(first + i);
        let word = |i: usize| {
            let offset = offset + 4 * i;
            b.let_(match self.align {
                1 => (0..4).map(|e| part(offset, e).shl(8 * e)).reduce(E::or).unwrap_or(offset),
                2 => part(offset.idiv(2), 0).or(part(offset.idiv(2), 1).shl(16)),
                _ => part(offset.idiv(4), 0),
            })
        };
        (0..n).map(word).collect()
    }

    /// The strips of unit `u`, an index.
    pub(crate) fn strips(&self, u: E<'a>) -> Vec<Strip<'a>> {
        let b = self.b;
        let u = b.let_(u);
        match self.ty {
            BlockType::Q4_0 => self.nibbles(u, 2, None),
            BlockType::Q4_1 => self.nibbles(u, 4, None),
            BlockType::Q5_0 => self.nibbles(u, 6, Some(2)),
            BlockType::Q5_1 => self.nibbles(u, 8, Some(4)),
            BlockType::IQ4_NL => self.nibbles(u, 2, None),
            BlockType::IQ4_XS => self.nibbles(u, 8, None),
            BlockType::MXFP4 => self.nibbles(u, 1, None),
            BlockType::Q8_0 => vec![self.bytes(u * 16, 4)],
            BlockType::Q2_K => self.pairs(u, 16, None),
            BlockType::Q3_K => self.pairs(u, 32, Some(0)),
            BlockType::Q4_K => self.halves(u, 16, None),
            BlockType::Q5_K => self.halves(u, 48, Some(16)),
            BlockType::Q6_K => self.six(u),
        }
    }

    /// `n` words of codes of a block of `q8_0`, from element `first` on, a multiple of 4.
    pub(crate) fn bytes(&self, first: E<'a>, n: usize) -> Strip<'a> {
        self.strip(first, self.b.index(0), self.words(first + 2, n))
    }

    fn strip(&self, first: E<'a>, group: E<'a>, words: Vec<E<'a>>) -> Strip<'a> {
        let (scale, offset) = self.scale(group);
        let scale = self.b.let_(scale);
        let offset = offset.map(|o| self.b.let_(o));
        Strip { ty: self.ty, first: self.b.let_(first), scale, offset, words }
    }

    /// The low or high four bits of each byte.
    fn nibble(&self, words: &[E<'a>], high: bool) -> Vec<E<'a>> {
        let shift = if high { 4 } else { 0 };
        words.iter().map(|w| w.shr(shift).and(0x0f0f_0f0fu32)).collect()
    }

    /// Groups of 32 weights in 16 bytes from `first` on. The low half of a byte is a weight of the first 16,
    /// the high half is one of the others. A fifth bit of each weight of a block is in the word at `fifth`.
    fn nibbles(&self, u: E<'a>, first: i64, fifth: Option<i64>) -> Vec<Strip<'a>> {
        let b = self.b;
        let (group, t) = (u.idiv(2), u.imod(2) * 8);
        let raw = self.words(group * 16 + t + first, 2);
        let bits = fifth.map(|f| self.words(b.index(f), 1)[0]);
        let strip = |high: bool| {
            let at = b.let_(group * 32 + t + if high { 16 } else { 0 });
            let low = self.nibble(&raw, high);
            let words = low.into_iter().enumerate().map(|(i, w)| match bits {
                // Multiplication copies the four bits, one to the lowest bit of each byte.
                Some(bits) => {
                    let four = bits.shr((at + 4 * i).to(Ty::U32)).and(15);
                    b.let_(w.or((four * 0x0020_4081u32).and(0x0101_0101u32).shl(4)))
                }
                None => b.let_(w),
            });
            let words = words.collect();
            (at, words)
        };
        let [(a, low), (c, high)] = [strip(false), strip(true)];
        let one = self.strip(a, group, low);
        let two = Strip { ty: self.ty, first: c, scale: one.scale, offset: one.offset, words: high };
        vec![one, two]
    }

    /// Chunks of 128 weights in 32 bytes from `first` on, two bits each. A third bit of the weights is in
    /// the bytes at `third`: bit `j` of a byte belongs to group `j` of 32 weights.
    fn pairs(&self, u: E<'a>, first: i64, third: Option<i64>) -> Vec<Strip<'a>> {
        let b = self.b;
        let (chunk, t) = (b.let_(u.idiv(4)), b.let_(u.imod(4) * 8));
        let raw = self.words(chunk * 32 + t + first, 2);
        let bits = third.map(|f| self.words(t + f, 2));
        let strip = |q: usize| {
            let at = b.let_(chunk * 128 + t + 32 * q);
            let words = (0..2).map(|i| {
                let low = raw[i].shr(2 * q).and(0x0303_0303u32);
                b.let_(match &bits {
                    Some(bits) => {
                        let bit = bits[i].shr((chunk * 4 + q).to(Ty::U32)).and(0x0101_0101u32);
                        low.or(bit.shl(2))
                    }
                    None => low,
                })
            });
            let words = words.collect();
            self.strip(at, at.idiv(16), words)
        };
        (0..4).map(strip).collect()
    }

    /// Chunks of 64 weights in 32 bytes from `first` on. The low half of a byte is a weight of the first 32,
    /// the high half is one of the others. A fifth bit is in the bytes at `fifth`: bit `j` of a byte belongs
    /// to group `j` of 32 weights.
    fn halves(&self, u: E<'a>, first: i64, fifth: Option<i64>) -> Vec<Strip<'a>> {
        let b = self.b;
        let (chunk, t) = (b.let_(u.idiv(2)), b.let_(u.imod(2) * 16));
        let raw = self.words(chunk * 32 + t + first, 4);
        let bits = fifth.map(|f| self.words(t + f, 4));
        let strip = |high: bool| {
            let group = b.let_(chunk * 2 + i64::from(high));
            let low = self.nibble(&raw, high);
            let words = low.into_iter().enumerate().map(|(i, w)| {
                b.let_(match &bits {
                    Some(bits) => w.or(bits[i].shr(group.to(Ty::U32)).and(0x0101_0101u32).shl(4)),
                    None => w,
                })
            });
            let words = words.collect();
            self.strip(group * 32 + t, group, words)
        };
        vec![strip(false), strip(true)]
    }

    /// `q6_k`: chunks of 128 weights, with the low four bits of each in 64 bytes and the two high bits in 32
    /// bytes.
    fn six(&self, u: E<'a>) -> Vec<Strip<'a>> {
        let b = self.b;
        let (chunk, half, t) = (b.let_(u.idiv(4)), b.let_(u.imod(4).idiv(2)), b.let_(u.imod(2) * 16));
        let low = self.words(chunk * 64 + half * 32 + t, 4);
        let high = self.words(chunk * 32 + t + 128, 4);
        let strip = |second: bool| {
            let quarter = b.let_(half + if second { 2 } else { 0 });
            let words = self.nibble(&low, second).into_iter().zip(&high).map(|(w, h)| {
                let top = h.shr(quarter.to(Ty::U32) * 2).and(0x0303_0303u32);
                b.let_(w.or(top.shl(4)))
            });
            let words = words.collect();
            let at = b.let_(chunk * 128 + quarter * 32 + t);
            self.strip(at, at.idiv(16), words)
        };
        vec![strip(false), strip(true)]
    }

    /// The scale and the offset of group `g`, an index.
    fn scale(&self, g: E<'a>) -> (E<'a>, Option<E<'a>>) {
        match self.ty {
            BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::IQ4_NL => (self.half(0), None),
            BlockType::Q4_1 | BlockType::Q5_1 => (self.half(0), Some(self.half(2))),
            BlockType::Q2_K => {
                let both = self.b.let_(self.byte(g));
                let scale = self.half(80) * both.and(15).to(Ty::F32);
                (scale, Some(-(self.half(82) * both.shr(4).to(Ty::F32))))
            }
            BlockType::Q3_K => {
                let at = g.imod(8);
                let low = self.byte(at + 96).shr(g.idiv(8).to(Ty::U32) * 4).and(15);
                let high = self.byte(g.imod(4) + 104).shr(g.idiv(4).to(Ty::U32) * 2).and(3);
                let scale = low.or(high.shl(4)).to(Ty::I32) - 32;
                (self.half(108) * scale.to(Ty::F32), None)
            }
            BlockType::Q4_K | BlockType::Q5_K => {
                let (scale, min) = self.six_bits(g);
                (self.half(0) * scale.to(Ty::F32), Some(-(self.half(2) * min.to(Ty::F32))))
            }
            BlockType::Q6_K => {
                let scale = signed(self.byte(g + 192));
                (self.half(208) * scale.to(Ty::F32), None)
            }
            BlockType::IQ4_XS => {
                let low = self.byte(g.idiv(2) + 4).shr(g.imod(2).to(Ty::U32) * 4).and(15);
                let high = self.at(2).or(self.at(3).shl(8)).shr(g.to(Ty::U32) * 2).and(3);
                let scale = low.or(high.shl(4)).to(Ty::I32) - 32;
                (self.half(0) * scale.to(Ty::F32), None)
            }
            BlockType::MXFP4 => {
                let e = self.b.let_(self.at(0));
                let subnormal = self.b.constant(Ty::U32, 0x0020_0000).shl(e.and(1));
                let bits = e.lt(2).select(subnormal, (e - 1).shl(23));
                (self.b.let_(bits.bitcast(Ty::F32)), None)
            }
        }
    }

    /// The scale and the minimum of group `g` in `q4_k` and `q5_k`: 6 bits each, in 12 bytes from offset 4.
    fn six_bits(&self, g: E<'a>) -> (E<'a>, E<'a>) {
        let first = g.lt(4);
        let at = g.imod(4);
        let (a, m) = (self.b.let_(self.byte(at + 4)), self.b.let_(self.byte(at + 8)));
        let c = self.b.let_(self.byte(at + 12));
        let scale = first.select(a.and(63), c.and(15).or(a.shr(6).shl(4)));
        let min = first.select(m.and(63), c.shr(4).or(m.shr(6).shl(4)));
        (scale, min)
    }
}

/// The lowest byte, read as i8.
fn signed(v: E<'_>) -> E<'_> {
    v.unpack(DType::I8, 0)
}

/// The value of a code of four bits, in f32: byte `code` of four words, as i8.
fn look_up<'a>(b: &'a Builder, code: E<'a>, words: &[u32; 4]) -> E<'a> {
    let code = b.let_(code);
    let which = code.shr(2);
    let [w0, w1, w2, w3] = words.map(|w| b.constant(Ty::U32, w));
    let low = which.equals(0).select(w0, w1);
    let high = which.equals(2).select(w2, w3);
    let word = which.lt(2).select(low, high);
    signed(word.shr(code.and(3) * 8)).to(Ty::F32)
}

const fn words(v: [i8; 16]) -> [u32; 4] {
    let mut w = [0u32; 4];
    let mut i = 0;
    while i < 16 {
        w[i / 4] |= (v[i] as u8 as u32) << (8 * (i % 4));
        i += 1;
    }
    w
}

/// The values of the codes of `iq4_nl` and `iq4_xs`.
const IQ4_WORDS: [u32; 4] = words([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]);
/// Twice the values of the codes of `mxfp4`.
const MXFP4_WORDS: [u32; 4] = words([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]);

/// Decodes `x`, bytes of blocks along the last axis, to f32. The last axis must have stride 1. One work-item
/// decodes one unit.
pub(crate) fn decode(ty: BlockType, x: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    if !matches!((x.dtype, out.dtype), (DType::U8, DType::F32 | DType::F64)) {
        let what = format!("from {} to {}: expected u8 to f32 or f64", x.dtype, out.dtype);
        return Err(Error::argument("decode_blocks", what));
    }
    let t = Template::new("decode_blocks", GROUP, &[x, out]);
    let rows = Rows::declare(&t, "w", ty, x);
    let ao = t.output(out);
    let b = &t.b;
    let (elements, per) = (ty.row().elements, units(ty));
    let mut shape = out.view.shape.to_vec();
    let last = shape.len() - 1;
    shape[last] = shape[last] / elements * per;
    let groups = t.points(&shape, |_, idx| {
        let (block, u) = (b.let_(idx[last].idiv(per as i64)), idx[last].imod(per as i64));
        for s in rows.block(rows.row(&idx[..last]), block).strips(u) {
            let first = b.let_(block * elements as i64 + s.first);
            for i in 0..s.words.len() {
                let codes = b.let_(s.codes(b, i));
                for e in 0..4 {
                    let w = s.scale * codes.lane(e);
                    let mut at = idx.to_vec();
                    at[last] = first + (4 * i as i64 + i64::from(e));
                    // Weights are f32; f64 is the type of references.
                    ao.store(b, &at, s.offset.map_or(w, |o| w + o).to(Ty::of(out.dtype)));
                }
            }
        }
    });
    t.finish(groups, caps.max_groups)
}
