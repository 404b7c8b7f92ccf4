//! Block-quantised weights in kernels: one decode per format, which every template and every language shares,
//! and the kernel that decodes whole tensors.
//!
//! A weight is `scale * code + offset`. Scale and offset are shared by a group of 16 or 32 weights, the code
//! is a small integer.

use crate::blocks::BlockType;
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::kernel::access::{Access, GROUP, Template};
use crate::kernel::{Builder, E, Kernel, Launch, Ty};
use crate::target::{Caps, Operand};

/// Weights that share a scale.
pub(crate) fn group(ty: BlockType) -> usize {
    match ty {
        BlockType::Q2_K | BlockType::Q3_K | BlockType::Q6_K => 16,
        _ => 32,
    }
}

/// Loads from one block of bytes. Offsets are in bytes.
pub(crate) struct Block<'a, 'f> {
    pub b: &'a Builder,
    pub ty: BlockType,
    /// The byte at an offset, as u32.
    pub byte: &'f dyn Fn(E<'a>) -> E<'a>,
}

impl<'a> Block<'a, '_> {
    fn at(&self, offset: i64) -> E<'a> {
        (self.byte)(self.b.index(offset))
    }

    fn f32(&self, v: f64) -> E<'a> {
        self.b.constant(Ty::F32, v)
    }

    /// The f16 at a byte offset. Decoded with integers, because not every device has the type.
    fn half(&self, offset: i64) -> E<'a> {
        let h = self.b.let_(self.at(offset).or(self.at(offset + 1).shl(8)));
        let (sign, exponent) = (h.and(0x8000).shl(16), h.shr(10).and(31));
        let fraction = h.and(0x3ff);
        // Subnormal numbers are `fraction * 2^-24`.
        let small = fraction.to(Ty::F32) * self.f32(2f64.powi(-24));
        let bits = exponent
            .equals(31)
            .select(fraction.shl(13).or(0x7f80_0000u32), (exponent + 112).shl(23).or(fraction.shl(13)));
        let bits = exponent.equals(0).select(small.bitcast(Ty::U32), bits);
        self.b.let_(bits.or(sign).bitcast(Ty::F32))
    }

    /// A byte, read as i8.
    fn signed(&self, v: E<'a>) -> E<'a> {
        v.and(255).xor(128).to(Ty::I32) - 128
    }

    /// The scale and the offset of group `g`, an index.
    pub(crate) fn scale(&self, g: E<'a>) -> (E<'a>, E<'a>) {
        let zero = self.f32(0.0);
        match self.ty {
            BlockType::Q4_0 | BlockType::Q5_0 | BlockType::Q8_0 | BlockType::IQ4_NL => (self.half(0), zero),
            BlockType::Q4_1 | BlockType::Q5_1 => (self.half(0), self.half(2)),
            BlockType::Q2_K => {
                let both = self.b.let_((self.byte)(g));
                let scale = self.half(80) * both.and(15).to(Ty::F32);
                (scale, -(self.half(82) * both.shr(4).to(Ty::F32)))
            }
            BlockType::Q3_K => {
                let at = g.imod(8);
                let low = (self.byte)(at + 96).shr(g.idiv(8).to(Ty::U32) * 4).and(15);
                let high = (self.byte)(g.imod(4) + 104).shr(g.idiv(4).to(Ty::U32) * 2).and(3);
                let scale = low.or(high.shl(4)).to(Ty::I32) - 32;
                (self.half(108) * scale.to(Ty::F32), zero)
            }
            BlockType::Q4_K | BlockType::Q5_K => {
                let (scale, min) = self.six_bits(g);
                (self.half(0) * scale.to(Ty::F32), -(self.half(2) * min.to(Ty::F32)))
            }
            BlockType::Q6_K => {
                let scale = self.signed((self.byte)(g + 192));
                (self.half(208) * scale.to(Ty::F32), zero)
            }
            BlockType::IQ4_XS => {
                let low = (self.byte)(g.idiv(2) + 4).shr(g.imod(2).to(Ty::U32) * 4).and(15);
                let high = self.at(2).or(self.at(3).shl(8)).shr(g.to(Ty::U32) * 2).and(3);
                let scale = low.or(high.shl(4)).to(Ty::I32) - 32;
                (self.half(0) * scale.to(Ty::F32), zero)
            }
            BlockType::MXFP4 => {
                let e = self.b.let_(self.at(0));
                let subnormal = self.b.constant(Ty::U32, 0x0020_0000).shl(e.and(1));
                let bits = e.lt(2).select(subnormal, (e - 1).shl(23));
                (self.b.let_(bits.bitcast(Ty::F32)), zero)
            }
        }
    }

    /// The scale and the minimum of group `g` in `q4_k` and `q5_k`: 6 bits each, in 12 bytes from offset 4.
    fn six_bits(&self, g: E<'a>) -> (E<'a>, E<'a>) {
        let first = g.lt(4);
        let at = g.imod(4);
        let (a, m) = (self.b.let_((self.byte)(at + 4)), self.b.let_((self.byte)(at + 8)));
        let c = self.b.let_((self.byte)(at + 12));
        let scale = first.select(a.and(63), c.and(15).or(a.shr(6).shl(4)));
        let min = first.select(m.and(63), c.shr(4).or(m.shr(6).shl(4)));
        (scale, min)
    }

    /// The code of weight `i` of the block, an index, as f32.
    pub(crate) fn code(&self, i: E<'a>) -> E<'a> {
        let nibble = |first: i64| {
            let byte = (self.byte)(i.imod(16) + first);
            byte.shr(i.idiv(16).imod(2).to(Ty::U32) * 4).and(15)
        };
        let bit = |first: i64| {
            let byte = (self.byte)(i.idiv(8) + first);
            byte.shr(i.imod(8).to(Ty::U32)).and(1)
        };
        let less = |v: E<'a>, by: i64| (v.to(Ty::I32) - by).to(Ty::F32);
        match self.ty {
            BlockType::Q4_0 => less(nibble(2), 8),
            BlockType::Q4_1 => nibble(4).to(Ty::F32),
            BlockType::Q5_0 => less(nibble(6).or(bit(2).shl(4)), 16),
            BlockType::Q5_1 => nibble(8).or(bit(4).shl(4)).to(Ty::F32),
            BlockType::Q8_0 => self.signed((self.byte)(i + 2)).to(Ty::F32),
            BlockType::Q2_K => self.two_bits(i, 16).to(Ty::F32),
            BlockType::Q3_K => {
                let high = (self.byte)(i.imod(32)).shr(i.idiv(32).to(Ty::U32)).and(1);
                less(self.two_bits(i, 32).or(high.shl(2)), 4)
            }
            BlockType::Q4_K => self.halves(i, 16).to(Ty::F32),
            BlockType::Q5_K => {
                let high = (self.byte)(i.imod(32) + 16).shr(i.idiv(32).to(Ty::U32)).and(1);
                self.halves(i, 48).or(high.shl(4)).to(Ty::F32)
            }
            BlockType::Q6_K => {
                let (part, quarter) = (i.idiv(128), i.imod(128).idiv(32));
                let low = (self.byte)(part * 64 + quarter.imod(2) * 32 + i.imod(32));
                let low = low.shr(quarter.idiv(2).to(Ty::U32) * 4).and(15);
                let high = (self.byte)(part * 32 + i.imod(32) + 128);
                let high = high.shr(quarter.to(Ty::U32) * 2).and(3);
                less(low.or(high.shl(4)), 32)
            }
            BlockType::IQ4_NL => self.look_up(nibble(2), &IQ4_WORDS).to(Ty::F32),
            BlockType::IQ4_XS => {
                let byte = (self.byte)(i.idiv(32) * 16 + i.imod(16) + 8);
                let code = byte.shr(i.idiv(16).imod(2).to(Ty::U32) * 4).and(15);
                self.look_up(code, &IQ4_WORDS).to(Ty::F32)
            }
            BlockType::MXFP4 => self.look_up(nibble(1), &MXFP4_WORDS).to(Ty::F32),
        }
    }

    /// Two bits from the bytes from `first` on, in the order of `q2_k` and `q3_k`.
    fn two_bits(&self, i: E<'a>, first: i64) -> E<'a> {
        let byte = (self.byte)(i.idiv(128) * 32 + i.imod(32) + first);
        byte.shr(i.imod(128).idiv(32).to(Ty::U32) * 2).and(3)
    }

    /// Four bits from the bytes from `first` on, in the order of `q4_k` and `q5_k`.
    fn halves(&self, i: E<'a>, first: i64) -> E<'a> {
        let byte = (self.byte)(i.idiv(64) * 32 + i.imod(32) + first);
        byte.shr(i.idiv(32).imod(2).to(Ty::U32) * 4).and(15)
    }

    /// The value of a code of four bits: byte `code` of four words, as i8.
    fn look_up(&self, code: E<'a>, words: &[u32; 4]) -> E<'a> {
        let code = self.b.let_(code);
        let which = code.shr(2);
        let [w0, w1, w2, w3] = words.map(|w| self.b.constant(Ty::U32, w));
        let low = which.equals(0).select(w0, w1);
        let high = which.equals(2).select(w2, w3);
        let word = which.lt(2).select(low, high);
        self.signed(word.shr(code.and(3) * 8))
    }
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

/// Decodes `x`, bytes of blocks along the last axis, to f32. One work-item decodes one weight.
pub(crate) fn decode(ty: BlockType, x: &Operand, out: &Operand, caps: &Caps) -> Result<(Kernel, Launch)> {
    if out.dtype != DType::F32 {
        return Err(Error::argument("decode_blocks", format!("kernels decode to f32, not to {}", out.dtype)));
    }
    let t = Template::new("decode_blocks", GROUP, &[x, out]);
    let (ax, ao) = (t.input(x), t.output(out));
    let b = &t.b;
    let groups = t.points(&out.view.shape, |_, idx| ao.store(b, idx, weight(b, ty, &ax, idx)));
    t.finish(groups, caps.max_groups)
}

/// The weight at `idx` of a tensor whose bytes are `bytes`.
fn weight<'a>(b: &'a Builder, ty: BlockType, bytes: &Access<'a>, idx: &[E<'a>]) -> E<'a> {
    let row = ty.row();
    let last = idx.len() - 1;
    let i = b.let_(idx[last].imod(row.elements as i64));
    let first = b.let_(idx[last].idiv(row.elements as i64) * row.bytes as i64);
    let byte = |offset: E<'a>| {
        let mut at = idx.to_vec();
        at[last] = first + offset;
        bytes.load(b, &at)
    };
    let block = Block { b, ty, byte: &byte };
    let (scale, offset) = block.scale(i.idiv(group(ty) as i64));
    scale * block.code(i) + offset
}
