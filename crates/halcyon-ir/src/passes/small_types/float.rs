//! Encoding and decoding of small floats as branch-free element-wise arithmetic on the bits of f32.
//! `minifloat` does the same on the host.
//!
//! Apart from rounding, every step is exact in f32. A device may flush subnormal f32 numbers to zero. From
//! the operand in f32 on, no result depends on whether it does. Of the small floats, only E8M0 has a value
//! that is subnormal in f32 (2^-127), and the bits of this value are handled as an integer.

use crate::convert::Rounding;
use crate::dtype::{DType, Scalar};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use crate::minifloat::{E8M0_NAN, Format, Special};
use crate::ops::Op;
use crate::ops::element_wise::ScalarOp as S;
use crate::shape::Shape;

/// Builds element-wise arithmetic on operands of one shape.
pub(super) struct Arith<'a> {
    g: &'a mut Graph,
    shape: Shape,
}

impl<'a> Arith<'a> {
    pub(super) fn like(g: &'a mut Graph, x: NodeId) -> Arith<'a> {
        let shape = g.shape(x).clone();
        Arith { g, shape }
    }

    fn lit(&mut self, d: DType, v: impl Into<Scalar>) -> NodeId {
        self.g.full(d, self.shape.clone(), v)
    }

    pub(super) fn op(&mut self, s: S, x: &[NodeId]) -> Result<NodeId> {
        self.g.push(Op::Scalar(s), x, None)
    }

    /// Applies scalar op `s` to `x` and the literal `v` in the dtype of `x`.
    pub(super) fn with(&mut self, s: S, x: NodeId, v: impl Into<Scalar>) -> Result<NodeId> {
        let v = self.lit(self.g.dtype(x), v);
        self.op(s, &[x, v])
    }

    fn select(&mut self, c: NodeId, a: NodeId, b: NodeId) -> Result<NodeId> {
        self.op(S::Select, &[c, a, b])
    }

    /// `c ? v : x`.
    fn replace(&mut self, c: NodeId, v: u32, x: NodeId) -> Result<NodeId> {
        let v = self.lit(self.g.dtype(x), v);
        self.select(c, v, x)
    }

    fn cast(&mut self, x: NodeId, d: DType) -> Result<NodeId> {
        self.g.cast(x, d)
    }

    pub(super) fn bits(&mut self, x: NodeId, d: DType) -> Result<NodeId> {
        if self.g.dtype(x) == d { Ok(x) } else { self.g.bitcast(x, d) }
    }

    /// A native number as f32. Values that f32 cannot represent are rounded to odd if a second rounding could
    /// make a difference.
    fn source(&mut self, x: NodeId, powers: bool) -> Result<NodeId> {
        match self.g.dtype(x) {
            DType::F64 => self.odd(x),
            // `powers` is set for E8M0, which can represent large numbers. In the other small types, integers
            // above 2^24 overflow, so for them the ordinary rounding of the cast is enough.
            d if powers && d.is_int() && d.bits() >= 32 => self.odd_int(x, d),
            _ => self.cast(x, DType::F32),
        }
    }

    /// Converts f64 to f32, rounding to odd: an inexact value becomes the neighbour whose last bit is set.
    fn odd(&mut self, x: NodeId) -> Result<NodeId> {
        let y = self.cast(x, DType::F32)?;
        let back = self.cast(y, DType::F64)?;
        let bits = self.bits(y, DType::U32)?;
        let inexact = self.op(S::Ne, &[x, back])?;
        let (ax, ay) = (self.op(S::Abs, &[x])?, self.op(S::Abs, &[back])?);
        let away = self.op(S::Gt, &[ax, ay])?;
        let away = self.cast(away, DType::U32)?;
        let away = self.with(S::Shl, away, 1u32)?;
        let low = self.with(S::Sub, bits, 1u32)?;
        let other = self.op(S::Add, &[low, away])?;
        let last = self.with(S::And, bits, 1u32)?;
        let even = self.with(S::Eq, last, 0u32)?;
        let moves = self.op(S::And, &[inexact, even])?;
        let bits = self.select(moves, other, bits)?;
        self.bits(bits, DType::F32)
    }

    /// Converts a 32- or 64-bit integer to f32, rounding to odd. A negative integer only has to stay
    /// negative, because E8M0 encodes every negative number as NaN.
    fn odd_int(&mut self, x: NodeId, d: DType) -> Result<NodeId> {
        let mut y = x;
        // In integers of `from` or more, the lowest `low` bits are dropped, which leaves 4 to 24 bits. If one
        // of the dropped bits is set, the last of the bits that are left is set.
        let cuts: &[(i64, i64)] =
            if d.bits() == 32 { &[(1 << 24, 8)] } else { &[(1 << 24, 19), (1 << 43, 40)] };
        for (from, low) in cuts {
            let mask = (1i64 << low) - 1;
            let rest = self.with(S::And, x, mask)?;
            let sticky = self.with(S::Ne, rest, 0i64)?;
            let sticky = self.cast(sticky, d)?;
            let sticky = self.with(S::Mul, sticky, 1i64 << low)?;
            let high = self.with(S::And, x, !mask)?;
            let cut = self.op(S::Or, &[high, sticky])?;
            let large = self.with(S::Ge, x, *from)?;
            y = self.select(large, cut, y)?;
        }
        self.cast(y, DType::F32)
    }
}

fn pow2(k: i32) -> f64 {
    2f64.powi(k)
}

/// Decodes patterns (u8) of the small float type `d` to f32.
pub(crate) fn decode(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    let mut a = Arith::like(g, x);
    let u = a.cast(x, DType::U32)?;
    let Some(f) = Format::of(d) else {
        // E8M0. Pattern 0 (2^-127) is a subnormal number of f32.
        let v = a.with(S::Shl, u, 23u32)?;
        let zero = a.with(S::Eq, u, 0u32)?;
        let v = a.replace(zero, 1 << 22, v)?;
        let nan = a.with(S::Eq, u, E8M0_NAN as u32)?;
        let v = a.replace(nan, 0x7fc0_0000, v)?;
        return a.bits(v, DType::F32);
    };
    let shift = 23 - f.mantissa;
    let rest = a.with(S::And, u, f.sign() - 1)?;
    let normal = a.with(S::Shl, rest, shift)?;
    let normal = a.with(S::Add, normal, ((127 - f.bias) as u32) << 23)?;
    // Subnormals: the pattern counts units of the last place.
    let small = a.cast(rest, DType::F32)?;
    let small = a.with(S::Mul, small, pow2(1 - f.bias - f.mantissa as i32))?;
    let small = a.bits(small, DType::U32)?;
    let below = a.with(S::Lt, rest, 1u32 << f.mantissa)?;
    let mut v = a.select(below, small, normal)?;
    match f.special {
        Special::Ieee => {
            let top = a.with(S::Eq, rest, f.infinity())?;
            v = a.replace(top, 0x7f80_0000, v)?;
            let nan = a.with(S::Gt, rest, f.infinity())?;
            v = a.replace(nan, 0x7fc0_0000, v)?;
        }
        Special::Fn => {
            let nan = a.with(S::Eq, rest, f.nan())?;
            v = a.replace(nan, 0x7fc0_0000, v)?;
        }
        Special::Fnuz => {
            let nan = a.with(S::Eq, u, f.nan())?;
            v = a.replace(nan, 0x7fc0_0000, v)?;
        }
        Special::Finite => {}
    }
    let sign = a.with(S::And, u, f.sign())?;
    let sign = a.with(S::Shl, sign, 31 - f.exponent - f.mantissa)?;
    let v = a.op(S::Or, &[v, sign])?;
    a.bits(v, DType::F32)
}

/// Encodes native numbers to patterns (u8) of the small float type `d`, by the rules of [`Scalar::cast`].
pub(super) fn encode(g: &mut Graph, x: NodeId, d: DType) -> Result<NodeId> {
    let Some(f) = Format::of(d) else {
        return encode_e8m0(g, x, Rounding::Nearest, false);
    };
    let mut a = Arith::like(g, x);
    let x = a.source(x, false)?;
    let bits = a.bits(x, DType::U32)?;
    let rest = a.with(S::And, bits, 0x7fff_ffffu32)?;
    let shift = 23 - f.mantissa;
    // Round to nearest even: add just under half a unit, plus the last bit that is kept.
    let last = a.with(S::Shr, rest, shift)?;
    let last = a.with(S::And, last, 1u32)?;
    let normal = a.with(S::Add, rest, (1u32 << (shift - 1)) - 1)?;
    let normal = a.op(S::Add, &[normal, last])?;
    let normal = a.with(S::Shr, normal, shift)?;
    let normal = a.with(S::Sub, normal, ((127 - f.bias) as u32) << f.mantissa)?;
    // Subnormals: count units of the last place.
    let size = a.bits(rest, DType::F32)?;
    let steps = a.with(S::Mul, size, pow2(f.bias - 1 + f.mantissa as i32))?;
    let steps = a.op(S::Round, &[steps])?;
    let steps = a.cast(steps, DType::U32)?;
    let below = a.with(S::Lt, rest, ((128 - f.bias) as u32) << 23)?;
    let mut p = a.select(below, steps, normal)?;
    let past = a.with(S::Gt, p, f.largest())?;
    p = a.replace(past, f.overflow(), p)?;
    let nan = a.with(S::Gt, rest, 0x7f80_0000u32)?;
    p = a.replace(nan, f.nan(), p)?;
    let sign = a.with(S::Shr, bits, 31u32)?;
    let sign = a.with(S::Shl, sign, f.exponent + f.mantissa)?;
    let mut y = a.op(S::Or, &[p, sign])?;
    if f.special == Special::Fnuz {
        let zero = a.with(S::Eq, p, 0u32)?;
        y = a.replace(zero, 0, y)?;
    }
    a.cast(y, DType::U8)
}

/// Encodes native numbers to patterns (u8) of E8M0. Negative numbers become NaN; -0 counts as zero. Values
/// out of range become the nearer limit if `saturate` is set, and NaN otherwise.
pub(crate) fn encode_e8m0(g: &mut Graph, x: NodeId, rounding: Rounding, saturate: bool) -> Result<NodeId> {
    // 2^-127 and 2^127 as f32 bits.
    const LO: u32 = 1 << 22;
    const HI: u32 = 254 << 23;
    let mut a = Arith::like(g, x);
    let x = a.source(x, true)?;
    let bits = a.bits(x, DType::U32)?;
    let mut size = a.with(S::And, bits, 0x7fff_ffffu32)?;
    let nan = a.with(S::Gt, size, 0x7f80_0000u32)?;
    let negative = a.with(S::Gt, bits, 0x8000_0000u32)?;
    let mut bad = a.op(S::Or, &[nan, negative])?;
    if saturate {
        size = a.with(S::Max, size, LO)?;
        size = a.with(S::Min, size, HI)?;
    } else {
        let (under, over) = (a.with(S::Lt, size, LO)?, a.with(S::Gt, size, HI)?);
        let outside = a.op(S::Or, &[under, over])?;
        bad = a.op(S::Or, &[bad, outside])?;
    }
    // `add` carries into the exponent when the significand rounds up. For values between 2^-127 and 2^-126,
    // which are subnormal in f32, `second` is the smallest number that is rounded up.
    let (add, second) = match rounding {
        Rounding::Nearest => (1u32 << 22, LO + (LO >> 1)),
        Rounding::Up => ((1 << 23) - 1, LO + 1),
        Rounding::Down => (0, 1 << 23),
    };
    let p = a.with(S::Add, size, add)?;
    let p = a.with(S::Shr, p, 23u32)?;
    let small = a.with(S::Lt, size, 1u32 << 23)?;
    let one = a.with(S::Ge, size, second)?;
    let one = a.cast(one, DType::U32)?;
    let p = a.select(small, one, p)?;
    let p = a.replace(bad, E8M0_NAN as u32, p)?;
    a.cast(p, DType::U8)
}
