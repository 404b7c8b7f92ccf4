//! Floats of 8 bits and fewer: encoding and decoding on the host. `passes::small_types` does the same with
//! graph ops.
//!
//! Sources: the OCP 8-bit floating point specification 1.0 (E4M3, E5M2), "8-bit Numerical Formats for Deep
//! Neural Networks" (Noune et al. 2022; the FNUZ types), the OCP microscaling formats specification 1.0
//! (E2M1, E8M0).

use crate::dtype::DType;

/// The meaning of the highest bit patterns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Special {
    /// IEEE 754: the largest exponent holds infinity and NaN.
    Ieee,
    /// No infinity. The pattern with all exponent and fraction bits set is NaN, with either sign.
    Fn,
    /// No infinity and no negative zero; the pattern of negative zero is NaN.
    Fnuz,
    /// Neither infinity nor NaN: the type saturates, and NaN becomes -0.
    Finite,
}

/// A format with sign, exponent and fraction bits. (E8M0 has exponent bits only and is not a `Format`.)
#[derive(Clone, Copy, Debug)]
pub struct Format {
    pub exponent: u32,
    pub mantissa: u32,
    pub bias: i32,
    pub special: Special,
}

/// The NaN pattern of E8M0.
pub const E8M0_NAN: u8 = 0xff;

impl Format {
    /// The format of a dtype; `None` for integers, for E8M0 and for floats of 16 bits and more.
    pub fn of(d: DType) -> Option<Format> {
        let f = |exponent, mantissa, bias, special| Some(Format { exponent, mantissa, bias, special });
        match d {
            DType::F4E2M1 => f(2, 1, 1, Special::Finite),
            DType::F8E4M3FN => f(4, 3, 7, Special::Fn),
            DType::F8E4M3FNUZ => f(4, 3, 8, Special::Fnuz),
            DType::F8E5M2 => f(5, 2, 15, Special::Ieee),
            DType::F8E5M2FNUZ => f(5, 2, 16, Special::Fnuz),
            DType::F8E8M0 => None,
            DType::F16 | DType::BF16 | DType::F32 | DType::F64 | DType::Bool => None,
            DType::U2 | DType::U4 | DType::U8 | DType::U16 | DType::U32 | DType::U64 => None,
            DType::I2 | DType::I4 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => None,
        }
    }

    /// The sign bit. Its value is also the number of patterns of each sign.
    pub fn sign(&self) -> u32 {
        1 << (self.exponent + self.mantissa)
    }

    /// The pattern of the largest finite number.
    pub fn largest(&self) -> u32 {
        match self.special {
            Special::Ieee => self.infinity() - 1,
            Special::Fn => self.sign() - 2,
            Special::Fnuz | Special::Finite => self.sign() - 1,
        }
    }

    /// The pattern for a positive number past the largest.
    pub fn overflow(&self) -> u32 {
        match self.special {
            Special::Ieee => self.infinity(),
            Special::Finite => self.largest(),
            Special::Fn | Special::Fnuz => self.nan(),
        }
    }

    /// The pattern that NaN is encoded as: without sign, or that of -0 in the formats without another pattern
    /// for it ([`Special::Fnuz`], [`Special::Finite`]).
    pub fn nan(&self) -> u32 {
        match self.special {
            Special::Ieee => self.infinity() | 1 << (self.mantissa - 1),
            Special::Fn => self.sign() - 1,
            Special::Fnuz | Special::Finite => self.sign(),
        }
    }

    /// The pattern of infinity in an IEEE format.
    pub fn infinity(&self) -> u32 {
        ((1 << self.exponent) - 1) << self.mantissa
    }

    /// The largest finite number.
    pub fn max(&self) -> f64 {
        self.decode(self.largest() as u8)
    }

    /// The value of a pattern. NaN keeps its sign, except in the FNUZ types, which have only one NaN.
    pub fn decode(&self, bits: u8) -> f64 {
        let (bits, sign) = (bits as u32, self.sign());
        let rest = bits & (sign - 1);
        let m = rest & ((1 << self.mantissa) - 1);
        let e = (rest >> self.mantissa) as i32;
        let nan = match self.special {
            Special::Ieee => rest > self.infinity(),
            Special::Fn => rest == self.nan(),
            Special::Fnuz => bits & (2 * sign - 1) == self.nan(),
            Special::Finite => false,
        };
        let v = if nan {
            f64::NAN
        } else if self.special == Special::Ieee && rest == self.infinity() {
            f64::INFINITY
        } else if e == 0 {
            m as f64 * pow2(1 - self.bias - self.mantissa as i32)
        } else {
            (m + (1 << self.mantissa)) as f64 * pow2(e - self.bias - self.mantissa as i32)
        };
        if bits & sign != 0 && !(nan && self.special == Special::Fnuz) { -v } else { v }
    }

    /// The nearest pattern, ties to even. Past the largest number: [`Format::overflow`].
    pub fn encode(&self, v: f64) -> u8 {
        let sign = if v.is_sign_negative() { self.sign() } else { 0 };
        if v.is_nan() {
            return (self.nan() | sign) as u8;
        }
        let a = v.abs();
        let low = 1 - self.bias;
        let e = exponent(a).max(low);
        let rest = if a.is_infinite() {
            self.overflow()
        } else {
            // In units of the last place. Both the scaling and the result are exact.
            let q = (a * pow2(self.mantissa as i32 - e)).round_ties_even();
            let p = ((e - low) as i64 * (1 << self.mantissa)) + q as i64;
            if p > self.largest() as i64 { self.overflow() } else { p as u32 }
        };
        if rest == 0 && self.special == Special::Fnuz { 0 } else { (rest | sign) as u8 }
    }
}

/// `2^k`, with `k` clamped to the exponents of normal f64 numbers.
fn pow2(k: i32) -> f64 {
    f64::from_bits(((1023 + k.clamp(-1022, 1023)) as u64) << 52)
}

/// Exponent of a normal f64; -1023 for zero and subnormals.
fn exponent(a: f64) -> i32 {
    ((a.to_bits() >> 52) & 0x7ff) as i32 - 1023
}

/// The value of an E8M0 pattern.
pub fn e8m0_decode(bits: u8) -> f64 {
    if bits == E8M0_NAN { f64::NAN } else { pow2(bits as i32 - 127) }
}

/// The nearest power of two, ties up. NaN for values outside 2^-127 to 2^127, including zero and negative
/// numbers.
pub fn e8m0_encode(v: f64) -> u8 {
    if !(pow2(-127)..=pow2(127)).contains(&v) {
        return E8M0_NAN;
    }
    let half = v.to_bits() >> 51 & 1;
    (exponent(v) + 127 + half as i32) as u8
}

/// The value of a pattern of a small float type. NaN for any other dtype.
pub fn decode(d: DType, bits: u8) -> f64 {
    match Format::of(d) {
        Some(f) => f.decode(bits),
        None if d == DType::F8E8M0 => e8m0_decode(bits),
        None => f64::NAN,
    }
}

/// The pattern of a number in a small float type, rounded once.
pub fn encode(d: DType, v: f64) -> u8 {
    Format::of(d).map_or_else(|| e8m0_encode(v), |f| f.encode(v))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = DType> {
        DType::all().filter(|d| d.is_float() && !d.is_native())
    }

    fn patterns(d: DType) -> impl Iterator<Item = u8> {
        (0..1u32 << d.bits()).map(|b| b as u8)
    }

    #[test]
    fn ends_of_the_ranges() {
        // Largest finite, smallest normal and smallest subnormal number, from the specifications.
        for (d, max, normal, tiny) in [
            (DType::F4E2M1, 6.0, 1.0, 0.5),
            (DType::F8E4M3FN, 448.0, 2f64.powi(-6), 2f64.powi(-9)),
            (DType::F8E4M3FNUZ, 240.0, 2f64.powi(-7), 2f64.powi(-10)),
            (DType::F8E5M2, 57344.0, 2f64.powi(-14), 2f64.powi(-16)),
            (DType::F8E5M2FNUZ, 57344.0, 2f64.powi(-15), 2f64.powi(-17)),
        ] {
            let f = Format::of(d).unwrap();
            assert_eq!(f.max(), max, "{d}");
            assert_eq!(f.decode(1 << f.mantissa), normal, "{d}");
            assert_eq!(f.decode(1), tiny, "{d}");
            assert_eq!(f.decode((f.sign() | 1) as u8), -tiny, "{d}");
        }
        let e2m1: Vec<f64> = (0..8).map(|b| decode(DType::F4E2M1, b)).collect();
        assert_eq!(e2m1, [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert_eq!(decode(DType::F8E8M0, 0), 2f64.powi(-127));
        assert_eq!(decode(DType::F8E8M0, 254), 2f64.powi(127));
        assert_eq!(decode(DType::F8E5M2, 0xfc), f64::NEG_INFINITY);
        let nans = |d: DType| patterns(d).filter(|b| decode(d, *b).is_nan()).collect::<Vec<_>>();
        assert_eq!(nans(DType::F8E4M3FN), [0x7f, 0xff]);
        assert_eq!(nans(DType::F8E4M3FNUZ), [0x80]);
        assert_eq!(nans(DType::F8E5M2), [0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff]);
        assert_eq!(nans(DType::F8E5M2FNUZ), [0x80]);
        assert_eq!(nans(DType::F8E8M0), [0xff]);
        assert!(nans(DType::F4E2M1).is_empty());
    }

    #[test]
    fn every_pattern_survives() {
        for d in all() {
            for b in patterns(d) {
                let v = decode(d, b);
                let back = encode(d, v);
                if v.is_nan() {
                    assert!(decode(d, back).is_nan(), "{d} {b:#x}");
                } else {
                    assert_eq!(back, b, "{d} {v}");
                }
            }
        }
    }

    #[test]
    fn numbers_go_to_the_nearest_and_ties_to_even() {
        for d in all().filter(|d| *d != DType::F8E8M0) {
            let f = Format::of(d).unwrap();
            for p in 0..f.largest() as u8 {
                let (lo, hi) = (f.decode(p), f.decode(p + 1));
                let mid = (lo + hi) / 2.0;
                let eps = (hi - lo) * 2f64.powi(-40);
                for s in [1.0, -1.0] {
                    let at = |v: f64| f.decode(f.encode(s * v)) * s;
                    assert_eq!(at(mid - eps), lo, "{d} {lo}");
                    assert_eq!(at(mid + eps), hi, "{d} {lo}");
                    assert_eq!(at(mid), if p % 2 == 0 { lo } else { hi }, "{d} {lo}");
                }
            }
            // Half a unit past the largest number rounds to the largest if its pattern is even.
            let top = f.max() + (f.max() - f.decode(f.largest() as u8 - 1)) / 2.0;
            let past = f.encode(top * (1.0 + 1e-9)) as u32;
            assert_eq!(past, f.overflow(), "{d}");
            let tie = if f.largest().is_multiple_of(2) { f.largest() } else { f.overflow() };
            assert_eq!(f.encode(top) as u32, tie, "{d}");
            assert_eq!(f.encode(f64::MAX) as u32, f.overflow());
            assert_eq!(f.encode(f64::INFINITY) as u32, f.overflow());
            assert_eq!(f.encode(5e-324), 0);
        }
    }

    #[test]
    fn powers_of_two() {
        let p = |v: f64| e8m0_encode(v);
        assert_eq!((p(1.0), p(1.49), p(1.5), p(3.0), p(2.9)), (127, 127, 128, 129, 128));
        assert_eq!((p(2f64.powi(-127)), p(2f64.powi(127))), (0, 254));
        for v in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY, 2f64.powi(-128), 1.01 * 2f64.powi(127)] {
            assert_eq!(p(v), E8M0_NAN, "{v}");
        }
    }
}
