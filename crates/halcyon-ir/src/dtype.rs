//! Element types. [`ROWS`] has one row per dtype, with its names, size and class.
//!
//! Small types (integers of 2 and 4 bits, floats of 4 and 8 bits) are for storage. Ops accept them, but
//! kernels do not: [`crate::passes::small_types`] rewrites a graph so that it computes in the types of
//! [`DType::native`]. Elements of fewer than 8 bits are packed into bytes, the first element in the low bits.
//! Unused bits of the last byte are written as zero and ignored when read.

use crate::minifloat::{self, Format, Special};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    Bool,
    U8,
    U16,
    U32,
    U64,
    I8,
    I16,
    I32,
    I64,
    F16,
    BF16,
    F32,
    F64,
    U2,
    I2,
    U4,
    I4,
    /// Two exponent bits and one fraction bit: magnitudes 0 to 6, no infinity, no NaN (OCP MX).
    F4E2M1,
    /// The largest number is 448. The type has NaN, but no infinity (OCP).
    F8E4M3FN,
    /// The largest number is 240. The type has NaN, but no infinity and no negative zero.
    F8E4M3FNUZ,
    /// The largest number is 57,344. The type has infinity and NaN (OCP).
    F8E5M2,
    /// The largest number is 57,344. The type has NaN, but no infinity and no negative zero.
    F8E5M2FNUZ,
    /// A power of two from 2^-127 to 2^127, or NaN, without zero and sign. Microscaling formats (OCP MX)
    /// store their scales in it.
    F8E8M0,
}

/// What kind of number a type holds.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    Bool,
    Uint,
    Int,
    Float,
}

/// Properties of one dtype.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub dtype: DType,
    pub name: &'static str,
    /// Bits per element in memory; types under 8 bits are packed.
    pub bits: u32,
    pub class: Class,
    /// The dtype's number in ONNX's `TensorProto.DataType` (onnx.proto3); 0 (UNDEFINED) if ONNX has no such
    /// type.
    pub onnx: i32,
    /// The first version of ONNX's operator set that has the type.
    pub onnx_since: i64,
    /// Name in a safetensors header; `None` if that format has no such type.
    pub safetensors: Option<&'static str>,
    /// NumPy array-protocol type string, little endian; `None` if NumPy has no such type.
    pub npy: Option<&'static str>,
}

macro_rules! rows {
    ($($d:ident $name:literal $bits:literal $class:ident $onnx:literal $since:literal $st:expr, $npy:expr;)*) => {
        /// One row per dtype, in the order of [`DType`].
        pub const ROWS: &[Row] = &[$(Row {
            dtype: DType::$d,
            name: $name,
            bits: $bits,
            class: Class::$class,
            onnx: $onnx,
            onnx_since: $since,
            safetensors: $st,
            npy: $npy,
        }),*];
    };
}

rows! {
    Bool "bool" 8  Bool  9  1  Some("BOOL"), Some("|b1");
    U8   "u8"   8  Uint  2  1  Some("U8"), Some("|u1");
    U16  "u16"  16 Uint  4  1  Some("U16"), Some("<u2");
    U32  "u32"  32 Uint  12 1  Some("U32"), Some("<u4");
    U64  "u64"  64 Uint  13 1  Some("U64"), Some("<u8");
    I8   "i8"   8  Int   3  1  Some("I8"), Some("|i1");
    I16  "i16"  16 Int   5  1  Some("I16"), Some("<i2");
    I32  "i32"  32 Int   6  1  Some("I32"), Some("<i4");
    I64  "i64"  64 Int   7  1  Some("I64"), Some("<i8");
    F16  "f16"  16 Float 10 1  Some("F16"), Some("<f2");
    BF16 "bf16" 16 Float 16 13 Some("BF16"), None;
    F32  "f32"  32 Float 1  1  Some("F32"), Some("<f4");
    F64  "f64"  64 Float 11 1  Some("F64"), Some("<f8");
    U2   "u2"   2  Uint  25 25 None, None;
    I2   "i2"   2  Int   26 25 None, None;
    U4   "u4"   4  Uint  21 21 None, None;
    I4   "i4"   4  Int   22 21 None, None;
    F4E2M1     "f4e2m1"     4 Float 23 23 Some("F4"), None;
    F8E4M3FN   "f8e4m3fn"   8 Float 17 19 Some("F8_E4M3"), None;
    F8E4M3FNUZ "f8e4m3fnuz" 8 Float 18 19 Some("F8_E4M3FNUZ"), None;
    F8E5M2     "f8e5m2"     8 Float 19 19 Some("F8_E5M2"), None;
    F8E5M2FNUZ "f8e5m2fnuz" 8 Float 20 19 Some("F8_E5M2FNUZ"), None;
    F8E8M0     "f8e8m0"     8 Float 24 24 Some("F8_E8M0"), None;
}

impl DType {
    /// All element types.
    pub fn all() -> impl Iterator<Item = DType> {
        ROWS.iter().map(|r| r.dtype)
    }

    /// Dtypes that kernels and devices support.
    pub fn native() -> impl Iterator<Item = DType> {
        DType::all().filter(|d| d.is_native())
    }

    /// Whether kernels and devices support the dtype. The others are the small types.
    pub fn is_native(self) -> bool {
        self.bits() > 8 || self.bits() == 8 && self.class() != Class::Float
    }

    /// The row of this dtype.
    pub fn row(self) -> &'static Row {
        &ROWS[self as usize]
    }

    pub fn name(self) -> &'static str {
        self.row().name
    }

    pub fn bits(self) -> u32 {
        self.row().bits
    }

    pub fn class(self) -> Class {
        self.row().class
    }

    pub fn is_float(self) -> bool {
        self.class() == Class::Float
    }

    /// Whether it is a signed or unsigned integer (not bool).
    pub fn is_int(self) -> bool {
        matches!(self.class(), Class::Int | Class::Uint)
    }

    /// Whether it is a float type that is computed in a wider type.
    pub fn widens(self) -> bool {
        self.is_float() && self.compute() != self
    }

    /// Bytes occupied by `n` elements, rounded up to whole bytes.
    pub fn bytes(self, n: usize) -> usize {
        (n as u128 * self.bits() as u128).div_ceil(8) as usize
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        self.bytes(1)
    }

    /// The dtype in which arithmetic runs: f32 for floats under 32 bits, and i32 or u32 for integers under 32
    /// bits, whose results wrap when they are stored. Every other dtype is its own compute dtype.
    pub fn compute(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            DType::U8 | DType::U16 => DType::U32,
            DType::I8 | DType::I16 => DType::I32,
            DType::F32 | DType::F64 | DType::Bool => self,
            DType::U32 | DType::U64 | DType::I32 | DType::I64 => self,
            d => match d.class() {
                Class::Float => DType::F32,
                Class::Int => DType::I32,
                _ => DType::U32,
            },
        }
    }

    /// The dtype in which sums are accumulated: the compute dtype.
    pub fn accum(self) -> DType {
        self.compute()
    }

    /// The dtype with this name in [`ROWS`].
    pub fn from_name(name: &str) -> Option<DType> {
        ROWS.iter().find(|r| r.name == name).map(|r| r.dtype)
    }

    /// The dtype of an ONNX `TensorProto.DataType` code.
    pub fn from_onnx(code: i32) -> Option<DType> {
        ROWS.iter().find(|r| r.onnx == code && code != 0).map(|r| r.dtype)
    }

    /// Smallest and largest value. Bool is 0..=1; floats that have infinities return infinities. The largest
    /// values of 64-bit integers are rounded up to 2^63 and 2^64, because f64 cannot represent them.
    pub fn range(self) -> (f64, f64) {
        match (self.class(), self.bits()) {
            _ if self == DType::F8E8M0 => (minifloat::e8m0_decode(0), minifloat::e8m0_decode(254)),
            (Class::Bool, _) => (0.0, 1.0),
            (Class::Uint, b) => (0.0, (2f64).powi(b as i32) - 1.0),
            (Class::Int, b) => (-(2f64).powi(b as i32 - 1), (2f64).powi(b as i32 - 1) - 1.0),
            (Class::Float, _) => match Format::of(self) {
                Some(f) if f.special != Special::Ieee => (-f.max(), f.max()),
                _ => (f64::NEG_INFINITY, f64::INFINITY),
            },
        }
    }

    /// Smallest and largest finite value.
    pub fn finite_range(self) -> (f64, f64) {
        let max = match self {
            DType::F16 => 65504.0,
            DType::BF16 => f32::from_bits(0x7f7f_0000) as f64,
            DType::F32 => f32::MAX as f64,
            DType::F64 => f64::MAX,
            d => match Format::of(d) {
                Some(f) => f.max(),
                None => return d.range(),
            },
        };
        (-max, max)
    }
}

impl fmt::Debug for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One value of any dtype, held exactly. Equality and hashing compare the variant and the bits, so NaN equals
/// itself and -0 does not equal 0.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Scalar {
    Bool(bool),
    I(i64),
    U(u64),
    F(f64),
}

impl Scalar {
    pub fn as_f64(self) -> f64 {
        match self {
            Scalar::Bool(b) => b as u8 as f64,
            Scalar::I(i) => i as f64,
            Scalar::U(u) => u as f64,
            Scalar::F(f) => f,
        }
    }

    /// The value converted by Rust's `as`: an unsigned integer wraps, a float saturates, and NaN becomes 0.
    pub fn as_i64(self) -> i64 {
        match self {
            Scalar::Bool(b) => b as i64,
            Scalar::I(i) => i,
            Scalar::U(u) => u as i64,
            Scalar::F(f) => f as i64,
        }
    }

    pub fn as_bool(self) -> bool {
        match self {
            Scalar::Bool(b) => b,
            Scalar::I(i) => i != 0,
            Scalar::U(u) => u != 0,
            Scalar::F(f) => f != 0.0,
        }
    }

    /// The value after a cast to `dtype` by the rules of the `Cast` op. To bool: `!= 0`. Between integers:
    /// wraps. Float to integer: truncates and saturates, NaN becomes 0. To float: rounds to nearest even, and
    /// values past the largest number become infinity. (A 64-bit integer is rounded to f64 before it is
    /// rounded to bf16.)
    ///
    /// Small types: a float that is cast to an integer of 2 or 4 bits is first cast to i32, whose low bits
    /// are kept. In a small float type without infinity, values past the largest number become NaN. `f4e2m1`,
    /// which has no NaN either, saturates, and NaN becomes -0. `f8e8m0` takes the nearest power of two, ties
    /// up; zero, negative numbers and values outside its range become NaN. `Graph::cast_saturating` and
    /// `Graph::cast_e8m0` have other rules.
    pub fn cast(self, dtype: DType) -> Scalar {
        match dtype.class() {
            Class::Bool => Scalar::Bool(self.as_bool()),
            Class::Float => {
                let v = self.as_f64();
                Scalar::F(match dtype {
                    DType::F16 => f16_of(v).to_f64(),
                    DType::BF16 => bf16_of(v).to_f64(),
                    DType::F32 => match self {
                        // Converting the integer directly rounds only once.
                        Scalar::I(i) => (i as f32) as f64,
                        Scalar::U(u) => (u as f32) as f64,
                        _ => (v as f32) as f64,
                    },
                    d if !d.is_native() => minifloat::decode(d, minifloat::encode(d, self.to_odd_f64())),
                    _ => v,
                })
            }
            Class::Int => {
                let (lo, hi) = dtype.range();
                let v = match self {
                    Scalar::F(f) if dtype.bits() < 8 => (f as i32).into(),
                    Scalar::F(f) if f.is_nan() => 0,
                    Scalar::F(f) => f.clamp(lo, hi) as i64,
                    s => s.as_i64(),
                };
                let sh = 64 - dtype.bits();
                Scalar::I((v << sh) >> sh)
            }
            Class::Uint => {
                let (lo, hi) = dtype.range();
                let v = match self {
                    Scalar::F(f) if dtype.bits() < 8 => f as i32 as u64,
                    Scalar::F(f) if f.is_nan() => 0,
                    Scalar::F(f) => f.clamp(lo, hi) as u64,
                    Scalar::U(u) => u,
                    s => s.as_i64() as u64,
                };
                let sh = 64 - dtype.bits();
                Scalar::U((v << sh) >> sh)
            }
        }
    }

    /// The value as f64. An integer of 2^53 or more is rounded to a multiple of 2^11, to odd, so that a
    /// second rounding gives the same result as rounding once.
    fn to_odd_f64(self) -> f64 {
        let odd = |m: u64| {
            if m >> 53 == 0 { m as f64 } else { (m >> 11 | (m & 0x7ff != 0) as u64) as f64 * 2048.0 }
        };
        match self {
            Scalar::U(u) => odd(u),
            Scalar::I(i) => odd(i.unsigned_abs()).copysign(i as f64),
            s => s.as_f64(),
        }
    }

    /// The value cast to `dtype`, as little-endian bytes. A dtype under 8 bits occupies the low bits of the
    /// first byte.
    pub fn to_bytes(self, dtype: DType) -> [u8; 8] {
        let mut out = [0u8; 8];
        let n = dtype.size();
        let raw: [u8; 8] = match (self.cast(dtype), dtype) {
            (Scalar::F(f), DType::F16) => (f16_of(f).to_bits() as u64).to_le_bytes(),
            (Scalar::F(f), DType::BF16) => (bf16_of(f).to_bits() as u64).to_le_bytes(),
            (Scalar::F(f), DType::F32) => ((f as f32).to_bits() as u64).to_le_bytes(),
            (Scalar::F(f), d) if !d.is_native() => (minifloat::encode(d, f) as u64).to_le_bytes(),
            (Scalar::F(f), _) => f.to_bits().to_le_bytes(),
            (Scalar::Bool(b), _) => (b as u64).to_le_bytes(),
            (Scalar::I(i), _) => i.to_le_bytes(),
            (Scalar::U(u), _) => u.to_le_bytes(),
        };
        out[..n].copy_from_slice(&raw[..n]);
        if dtype.bits() < 8 {
            out[0] &= (1 << dtype.bits()) - 1;
        }
        out
    }

    /// Reads one little-endian value of `dtype` from the start of `b`, which must be long enough. A dtype
    /// under 8 bits is read from the low bits of the first byte.
    pub fn from_bytes(dtype: DType, b: &[u8]) -> Scalar {
        let mut w = [0u8; 8];
        w[..dtype.size()].copy_from_slice(&b[..dtype.size()]);
        let u = u64::from_le_bytes(w);
        match dtype {
            DType::Bool => Scalar::Bool(u != 0),
            DType::F16 => Scalar::F(half::f16::from_bits(u as u16).to_f64()),
            DType::BF16 => Scalar::F(half::bf16::from_bits(u as u16).to_f64()),
            DType::F32 => Scalar::F(f32::from_bits(u as u32) as f64),
            DType::F64 => Scalar::F(f64::from_bits(u)),
            d if d.class() == Class::Int => {
                let sh = 64 - d.bits();
                Scalar::I(((u << sh) as i64) >> sh)
            }
            d if d.is_float() => Scalar::F(minifloat::decode(d, u as u8 & (0xff >> (8 - d.bits())))),
            d => Scalar::U(u & (u64::MAX >> (64 - d.bits()))),
        }
    }

    fn key(self) -> (u8, u64) {
        match self {
            Scalar::Bool(b) => (0, b as u64),
            Scalar::I(i) => (1, i as u64),
            Scalar::U(u) => (2, u),
            Scalar::F(f) => (3, f.to_bits()),
        }
    }
}

impl PartialEq for Scalar {
    fn eq(&self, o: &Self) -> bool {
        self.key() == o.key()
    }
}
impl Eq for Scalar {}
impl std::hash::Hash for Scalar {
    fn hash<H: std::hash::Hasher>(&self, h: &mut H) {
        self.key().hash(h)
    }
}

/// `v` in f32, rounded to odd: of the two neighbours of an inexact value, the one whose last bit is set.
/// If the result is then rounded to nearest in a type with at least two significand bits fewer, this equals
/// rounding `v` once (Boldo and Melquiond 2008).
fn to_odd(v: f64) -> f32 {
    let y = v as f32;
    let exact = y as f64 == v || v.is_nan();
    if exact || y.to_bits() & 1 == 1 {
        return y;
    }
    // Steps to the neighbour on the other side of `v`. The order of magnitudes is the order of their bits.
    let away = (v.abs() > y.abs() as f64) as u32;
    f32::from_bits(y.to_bits().wrapping_sub(1).wrapping_add(2 * away))
}

/// Nearest f16, ties to even. (`half::f16::from_f64` rounds twice, or ignores low bits.)
pub fn f16_of(v: f64) -> half::f16 {
    half::f16::from_f32(to_odd(v))
}

/// Nearest bf16, ties to even. (`half::bf16::from_f64` ignores the low 32 bits.)
pub fn bf16_of(v: f64) -> half::bf16 {
    half::bf16::from_f32(to_odd(v))
}

macro_rules! from {
    ($($t:ty => $v:ident as $c:ty),*) => {$(
        impl From<$t> for Scalar { fn from(x: $t) -> Scalar { Scalar::$v(x as $c) } }
    )*};
}
from!(bool => Bool as bool, i8 => I as i64, i16 => I as i64, i32 => I as i64, i64 => I as i64, u8 => U as u64,
    u16 => U as u64, u32 => U as u64, u64 => U as u64, usize => U as u64, f32 => F as f64, f64 => F as f64);

/// A Rust type that can be a tensor element.
pub trait Element: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    fn to_scalar(self) -> Scalar;
    fn from_scalar(s: Scalar) -> Self;
    /// The elements in little-endian bytes, which may begin at any address.
    fn read_all(bytes: &[u8]) -> Vec<Self>;
    /// The little-endian bytes of the elements. Floats keep their bits.
    fn write_all(values: &[Self]) -> Vec<u8>;
}

/// Optimised builds copy the bytes as a block, except for bools.
fn elements<const N: usize, T>(bytes: &[u8], one: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks::<N>().0.iter().map(|b| one(*b)).collect()
}

/// The bytes of the elements. Optimised builds copy them as a block.
fn bytes<const N: usize, T: Copy>(values: &[T], one: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    let mut b = vec![0; N * values.len()];
    b.as_chunks_mut::<N>().0.iter_mut().zip(values).for_each(|(b, v)| *b = one(*v));
    b
}

macro_rules! element {
    ($($t:ty => $d:ident, |$s:ident| $from:expr, |$x:ident| $to:expr, $read:expr, $write:expr;)*) => {$(
        impl Element for $t {
            const DTYPE: DType = DType::$d;
            fn to_scalar(self) -> Scalar { let $x = self; $to }
            fn from_scalar($s: Scalar) -> Self { $from }
            fn read_all(bytes: &[u8]) -> Vec<Self> { elements(bytes, $read) }
            fn write_all(values: &[Self]) -> Vec<u8> { bytes(values, $write) }
        }
    )*};
}
element! {
    bool => Bool, |s| s.as_bool(), |x| Scalar::Bool(x), |b: [u8; 1]| b != [0], |b| [u8::from(b)];
    u8 => U8, |s| s.as_i64() as u8, |x| Scalar::U(x as u64), u8::from_le_bytes, u8::to_le_bytes;
    u16 => U16, |s| s.as_i64() as u16, |x| Scalar::U(x as u64), u16::from_le_bytes, u16::to_le_bytes;
    u32 => U32, |s| s.as_i64() as u32, |x| Scalar::U(x as u64), u32::from_le_bytes, u32::to_le_bytes;
    u64 => U64, |s| match s { Scalar::U(u) => u, s => s.as_i64() as u64 }, |x| Scalar::U(x), u64::from_le_bytes, u64::to_le_bytes;
    i8 => I8, |s| s.as_i64() as i8, |x| Scalar::I(x as i64), i8::from_le_bytes, i8::to_le_bytes;
    i16 => I16, |s| s.as_i64() as i16, |x| Scalar::I(x as i64), i16::from_le_bytes, i16::to_le_bytes;
    i32 => I32, |s| s.as_i64() as i32, |x| Scalar::I(x as i64), i32::from_le_bytes, i32::to_le_bytes;
    i64 => I64, |s| s.as_i64(), |x| Scalar::I(x), i64::from_le_bytes, i64::to_le_bytes;
    half::f16 => F16, |s| f16_of(s.as_f64()), |x| Scalar::F(x.to_f64()), half::f16::from_le_bytes, half::f16::to_le_bytes;
    half::bf16 => BF16, |s| bf16_of(s.as_f64()), |x| Scalar::F(x.to_f64()), half::bf16::from_le_bytes, half::bf16::to_le_bytes;
    f32 => F32, |s| s.as_f64() as f32, |x| Scalar::F(x as f64), f32::from_le_bytes, f32::to_le_bytes;
    f64 => F64, |s| s.as_f64(), |x| Scalar::F(x), f64::from_le_bytes, f64::to_le_bytes;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_in_enum_order_and_codes_are_unique() {
        for (i, r) in ROWS.iter().enumerate() {
            assert_eq!(r.dtype as usize, i);
            assert_eq!(DType::from_onnx(r.onnx), (r.onnx != 0).then_some(r.dtype));
            assert_eq!(DType::from_name(r.name), Some(r.dtype));
        }
    }

    #[test]
    fn scalar_bytes_round_trip() {
        for d in DType::all() {
            for v in [0.0, 1.0, 2.0, -3.0, 100.0] {
                let s = Scalar::F(v).cast(d);
                assert_eq!(Scalar::from_bytes(d, &s.to_bytes(d)), s, "{d} {v}");
            }
        }
        // Every bit pattern of a small type round-trips, except that one NaN may become another.
        for d in DType::all().filter(|d| !d.is_native()) {
            for b in 0..1u32 << d.bits() {
                let s = Scalar::from_bytes(d, &[b as u8]);
                assert!(s.as_f64().is_nan() || s.to_bytes(d)[0] == b as u8, "{d} {b}");
                assert!(s.as_f64().is_nan() || s.cast(d) == s, "{d} {b}");
                // Bits above the dtype's width are ignored.
                let dirty = Scalar::from_bytes(d, &[(b | 0xffu32 << d.bits()) as u8]);
                assert!(dirty == s || s.as_f64().is_nan(), "{d} {b}");
            }
        }
    }

    #[test]
    fn small_types_by_the_rules_of_cast() {
        let i4 = |s: Scalar| s.cast(DType::I4).as_i64();
        assert_eq!([i4(Scalar::F(-9.0)), i4(Scalar::F(15.0)), i4(Scalar::F(-7.9))], [7, -1, -7]);
        assert_eq!([i4(Scalar::F(f64::NAN)), i4(Scalar::F(1e30)), i4(Scalar::F(-1e30))], [0, -1, 0]);
        assert_eq!([i4(Scalar::I(200)), i4(Scalar::U(8)), i4(Scalar::Bool(true))], [-8, -8, 1]);
        assert_eq!(Scalar::F(-3.0).cast(DType::U2), Scalar::U(1));
        assert_eq!(Scalar::I(-1).cast(DType::U4), Scalar::U(15));
        let to = |v: f64, d: DType| Scalar::F(v).cast(d).as_f64();
        assert!(to(1e6, DType::F8E4M3FN).is_nan() && to(-f64::INFINITY, DType::F8E5M2FNUZ).is_nan());
        assert_eq!(to(1e6, DType::F8E5M2), f64::INFINITY);
        assert_eq!((to(9.0, DType::F4E2M1), to(-f64::INFINITY, DType::F4E2M1)), (6.0, -6.0));
        assert_eq!(Scalar::F(f64::NAN).to_bytes(DType::F4E2M1)[0], 8);
        assert_eq!(Scalar::F(-0.0).to_bytes(DType::F8E4M3FNUZ)[0], 0);
        // 1.5·2^k - 1 is below the tie, and f64 cannot represent it.
        assert_eq!(Scalar::U((3 << 61) - 1).cast(DType::F8E8M0), Scalar::F(2f64.powi(62)));
        assert_eq!(Scalar::I(3 << 60).cast(DType::F8E8M0), Scalar::F(2f64.powi(62)));
        assert!(Scalar::I(-4).cast(DType::F8E8M0).as_f64().is_nan());
        assert_eq!(DType::F8E4M3FN.range(), (-448.0, 448.0));
        assert_eq!(DType::F8E5M2.finite_range(), (-57344.0, 57344.0));
        assert_eq!(DType::I4.range(), (-8.0, 7.0));
        for d in DType::all() {
            assert!(d.compute().is_native() && (d.is_native() || d.compute().bits() == 32), "{d}");
            let (lo, hi) = d.finite_range();
            assert_eq!(Scalar::F(hi).cast(d).as_f64(), hi, "{d}");
            assert_eq!(Scalar::F(lo).cast(d).as_f64(), lo, "{d}");
        }
    }

    #[test]
    fn halves_round_once_whatever_the_low_bits() {
        for tail in [2f64.powi(-21), 2f64.powi(-30), 2f64.powi(-45)] {
            for sign in [1.0, -1.0] {
                // Halfway between two numbers, and slightly above and below.
                let (f, b) = (1.0 + 2f64.powi(-11), 1.0 + 2f64.powi(-8));
                assert_eq!(f16_of(sign * f).to_f64(), sign);
                assert_eq!(f16_of(sign * (f + tail)).to_f64(), sign * (1.0 + 2f64.powi(-10)));
                assert_eq!(f16_of(sign * (f - tail)).to_f64(), sign);
                assert_eq!(bf16_of(sign * b).to_f64(), sign);
                assert_eq!(bf16_of(sign * (b + tail)).to_f64(), sign * (1.0 + 2f64.powi(-7)));
                assert_eq!(bf16_of(sign * (b - tail)).to_f64(), sign);
            }
        }
        for v in [
            0.0,
            -0.0,
            f64::INFINITY,
            f64::MAX,
            65519.9,
            65520.0,
            1e-40,
            -5e-324,
            2f64.powi(-24),
            2f64.powi(-25),
        ] {
            let want = if v.abs() >= 65520.0 {
                f64::INFINITY
            } else if v.abs() <= 2f64.powi(-25) {
                0.0
            } else {
                v
            };
            let want = if v == 65519.9 { 65504.0 } else { want };
            assert_eq!(f16_of(v).to_f64().to_bits(), want.copysign(v).to_bits(), "{v}");
        }
        assert!(f16_of(f64::NAN).is_nan() && bf16_of(f64::NAN).is_nan());
        assert_eq!(bf16_of(f64::MAX).to_f64(), f64::INFINITY);
    }

    #[test]
    fn casts_wrap_saturate_and_round() {
        assert_eq!(Scalar::I(300).cast(DType::U8), Scalar::U(44));
        assert_eq!(Scalar::I(200).cast(DType::I8), Scalar::I(-56));
        assert_eq!(Scalar::F(1e9).cast(DType::I8), Scalar::I(127));
        assert_eq!(Scalar::F(f64::NAN).cast(DType::I32), Scalar::I(0));
        assert_eq!(Scalar::F(-2.7).cast(DType::I32), Scalar::I(-2));
        assert_eq!(Scalar::F(1.0 + 1.0 / 512.0).cast(DType::BF16), Scalar::F(1.0));
    }
}
