//! Scalar ops over blocks: plain loops that the compiler vectorises, one copy per instruction set.
//!
//! A block never overlaps the operands it is computed from, so all loops use slices.

use super::lane::Lane;
use crate::cpu::sys::{Isa, dispatch};
use crate::cpu::vmath as vm;
use halcyon_ir::ops::element_wise::{Rule, threefry};
use halcyon_ir::{DType, ScalarOp};

macro_rules! un {
    ($d:ident $a:ident, |$x:ident| $e:expr) => {
        for (o, &$x) in $d.iter_mut().zip($a) {
            *o = $e;
        }
    };
}
macro_rules! bin {
    ($d:ident $a:ident $b:ident, |$x:ident, $y:ident| $e:expr) => {
        for ((o, &$x), &$y) in $d.iter_mut().zip($a).zip($b) {
            *o = $e;
        }
    };
}
macro_rules! tri {
    ($d:ident $a:ident $b:ident $c:ident, |$x:ident, $y:ident, $z:ident| $e:expr) => {
        for (((o, &$x), &$y), &$z) in $d.iter_mut().zip($a).zip($b).zip($c) {
            *o = $e;
        }
    };
}

/// Uses the standard library for the whole block if any argument is too large for the fast range reduction.
macro_rules! trig {
    ($d:ident $a:ident $name:ident) => {{
        let mut far = false;
        for x in $a {
            far |= x.abs() > vm::TRIG_LIMIT;
        }
        if far {
            un!($d $a, |x| f32::$name(x))
        } else {
            un!($d $a, |x| vm::$name::<FMA>(x))
        }
    }};
}

/// Maximum and minimum that propagate NaN and order -0 below +0.
macro_rules! float_extremes {
    ($t:ident $max:ident $min:ident) => {
        #[inline(always)]
        pub(super) fn $max(x: $t, y: $t) -> $t {
            let m = if x > y { x } else { y };
            let m = if x == y { $t::from_bits(x.to_bits() & y.to_bits()) } else { m };
            if x.is_nan() { x } else { m }
        }
        #[inline(always)]
        pub(super) fn $min(x: $t, y: $t) -> $t {
            let m = if x < y { x } else { y };
            let m = if x == y { $t::from_bits(x.to_bits() | y.to_bits()) } else { m };
            if x.is_nan() { x } else { m }
        }
    };
}
float_extremes!(f32 max_f32 min_f32);
float_extremes!(f64 max_f64 min_f64);

#[inline(always)]
fn f32_body<const FMA: bool>(op: ScalarOp, d: &mut [f32], a: &[f32], b: &[f32], c: &[f32]) {
    use ScalarOp as S;
    match op {
        S::Neg => un!(d a, |x| -x),
        S::Abs => un!(d a, |x| x.abs()),
        S::Sign => un!(d a, |x| if x.is_nan() { x } else { (x > 0.0) as u8 as f32 - (x < 0.0) as u8 as f32 }),
        S::Floor => un!(d a, |x| x.floor()),
        S::Ceil => un!(d a, |x| x.ceil()),
        S::Round => un!(d a, |x| x.round_ties_even()),
        S::Trunc => un!(d a, |x| x.trunc()),
        S::Sqrt => un!(d a, |x| x.sqrt()),
        S::Rsqrt => un!(d a, |x| 1.0 / x.sqrt()),
        S::Recip => un!(d a, |x| 1.0 / x),
        S::Exp => un!(d a, |x| vm::exp::<FMA>(x)),
        S::Exp2 => un!(d a, |x| vm::exp2::<FMA>(x)),
        S::Expm1 => un!(d a, |x| vm::expm1::<FMA>(x)),
        S::Log => un!(d a, |x| vm::log::<FMA>(x)),
        S::Log2 => un!(d a, |x| vm::log2::<FMA>(x)),
        S::Log1p => un!(d a, |x| vm::log1p::<FMA>(x)),
        S::Sin => trig!(d a sin),
        S::Cos => trig!(d a cos),
        S::Tan => trig!(d a tan),
        S::Asin => un!(d a, |x| vm::asin::<FMA>(x)),
        S::Acos => un!(d a, |x| vm::acos::<FMA>(x)),
        S::Atan => un!(d a, |x| vm::atan::<FMA>(x)),
        S::Sinh => un!(d a, |x| vm::sinh::<FMA>(x)),
        S::Cosh => un!(d a, |x| vm::cosh::<FMA>(x)),
        S::Tanh => un!(d a, |x| vm::tanh::<FMA>(x)),
        S::Asinh => un!(d a, |x| vm::asinh::<FMA>(x)),
        S::Acosh => un!(d a, |x| vm::acosh::<FMA>(x)),
        S::Atanh => un!(d a, |x| vm::atanh::<FMA>(x)),
        S::Erf => un!(d a, |x| vm::erf::<FMA>(x)),
        S::Sigmoid => un!(d a, |x| vm::sigmoid::<FMA>(x)),
        S::Silu => un!(d a, |x| vm::silu::<FMA>(x)),
        S::Gelu => un!(d a, |x| vm::gelu::<FMA>(x)),
        S::GeluTanh => un!(d a, |x| vm::gelu_tanh::<FMA>(x)),
        S::Relu => un!(d a, |x| if x < 0.0 { 0.0 } else { x }),
        S::Add => bin!(d a b, |x, y| x + y),
        S::Sub => bin!(d a b, |x, y| x - y),
        S::Mul => bin!(d a b, |x, y| x * y),
        S::Div => bin!(d a b, |x, y| x / y),
        S::Rem => bin!(d a b, |x, y| x % y),
        S::Mod => bin!(d a b, |x, y| {
            let r = x % y;
            if r != 0.0 && (r < 0.0) != (y < 0.0) { r + y } else { r }
        }),
        S::Pow => bin!(d a b, |x, y| vm::pow::<FMA>(x, y)),
        S::Atan2 => bin!(d a b, |x, y| vm::atan2::<FMA>(x, y)),
        S::Min => bin!(d a b, |x, y| min_f32(x, y)),
        S::Max => bin!(d a b, |x, y| max_f32(x, y)),
        // Without FMA instructions, use f64. There the product is exact and cannot overflow; in f32 it could.
        S::Fma => tri!(d a b c, |x, y, z| {
            if FMA { x.mul_add(y, z) } else { (f64::from(x) * f64::from(y) + f64::from(z)) as f32 }
        }),
        // Other ops use the f64 definition in the table of scalar ops, so a new row works without code here.
        op => {
            if let Some(f) = op.row().float {
                tri!(d a b c, |x, y, z| f(x as f64, y as f64, z as f64) as f32)
            }
        }
    }
}
dispatch! {
    fn f32_op [] [] (isa, op: ScalarOp, d: &mut [f32], a: &[f32], b: &[f32], c: &[f32]) = f32_body
}

#[inline(always)]
fn f64_body<const FMA: bool>(op: ScalarOp, d: &mut [f64], a: &[f64], b: &[f64], c: &[f64]) {
    use ScalarOp as S;
    match op {
        S::Neg => un!(d a, |x| -x),
        S::Abs => un!(d a, |x| x.abs()),
        S::Sqrt => un!(d a, |x| x.sqrt()),
        S::Recip => un!(d a, |x| 1.0 / x),
        S::Floor => un!(d a, |x| x.floor()),
        S::Relu => un!(d a, |x| if x < 0.0 { 0.0 } else { x }),
        S::Add => bin!(d a b, |x, y| x + y),
        S::Sub => bin!(d a b, |x, y| x - y),
        S::Mul => bin!(d a b, |x, y| x * y),
        S::Div => bin!(d a b, |x, y| x / y),
        S::Min => bin!(d a b, |x, y| min_f64(x, y)),
        S::Max => bin!(d a b, |x, y| max_f64(x, y)),
        // Without FMA instructions, the C library computes the same result, but slowly.
        S::Fma => tri!(d a b c, |x, y, z| x.mul_add(y, z)),
        op => {
            if let Some(f) = op.row().float {
                tri!(d a b c, |x, y, z| f(x, y, z))
            }
        }
    }
}
dispatch! {
    fn f64_op [] [] (isa, op: ScalarOp, d: &mut [f64], a: &[f64], b: &[f64], c: &[f64]) = f64_body
}

/// Comparisons of any type.
macro_rules! tests {
    ($op:ident $d:ident $a:ident $b:ident) => {
        match $op {
            ScalarOp::Eq => bin!($d $a $b, |x, y| (x == y) as u8),
            ScalarOp::Ne => bin!($d $a $b, |x, y| (x != y) as u8),
            ScalarOp::Lt => bin!($d $a $b, |x, y| (x < y) as u8),
            ScalarOp::Le => bin!($d $a $b, |x, y| (x <= y) as u8),
            ScalarOp::Gt => bin!($d $a $b, |x, y| (x > y) as u8),
            ScalarOp::Ge => bin!($d $a $b, |x, y| (x >= y) as u8),
            _ => {}
        }
    };
}

macro_rules! float_tests {
    ($t:ident $body:ident $name:ident) => {
        #[inline(always)]
        fn $body<const FMA: bool>(op: ScalarOp, d: &mut [u8], a: &[$t], b: &[$t]) {
            match op {
                ScalarOp::IsNan => un!(d a, |x| x.is_nan() as u8),
                ScalarOp::IsInf => un!(d a, |x| (x.abs() == $t::INFINITY) as u8),
                op => tests!(op d a b),
            }
        }
        dispatch! { fn $name [] [] (isa, op: ScalarOp, d: &mut [u8], a: &[$t], b: &[$t]) = $body }
    };
}
float_tests!(f32 f32_test_body f32_test);
float_tests!(f64 f64_test_body f64_test);

macro_rules! ints {
    ($t:ident $body:ident $name:ident $tbody:ident $tname:ident, |$s:ident| $sign:expr, |$p:ident| $abs:expr) => {
        #[inline(always)]
        fn $body<const FMA: bool>(op: ScalarOp, d: &mut [$t], a: &[$t], b: &[$t], c: &[$t]) {
            use ScalarOp as S;
            match op {
                S::Neg => un!(d a, |x| x.wrapping_neg()),
                S::Abs => un!(d a, |$p| $abs),
                S::Sign => un!(d a, |$s| $sign),
                S::Not => un!(d a, |x| !x),
                S::Relu => un!(d a, |x| x.max(0)),
                S::Add => bin!(d a b, |x, y| x.wrapping_add(y)),
                S::Sub => bin!(d a b, |x, y| x.wrapping_sub(y)),
                S::Mul => bin!(d a b, |x, y| x.wrapping_mul(y)),
                S::Div => bin!(d a b, |x, y| if y == 0 { 0 } else { x.wrapping_div(y) }),
                S::Rem => bin!(d a b, |x, y| if y == 0 { 0 } else { x.wrapping_rem(y) }),
                S::Mod => bin!(d a b, |x, y| {
                    let r = if y == 0 { 0 } else { x.wrapping_rem(y) };
                    #[allow(unused_comparisons)]
                    let turn = r != 0 && (r < 0) != (y < 0);
                    if turn { r.wrapping_add(y) } else { r }
                }),
                S::Pow => bin!(d a b, |x, y| {
                    #[allow(unused_comparisons)]
                    if y < 0 {
                        // 1 / x^|y|, truncated.
                        if x == 1 {
                            1
                        } else if x.wrapping_add(1) == 0 {
                            if y & 1 == 0 { 1 } else { x }
                        } else {
                            0
                        }
                    } else {
                        let (mut r, mut p, mut e): ($t, $t, $t) = (1, x, y);
                        while e > 0 {
                            if e & 1 == 1 {
                                r = r.wrapping_mul(p);
                            }
                            p = p.wrapping_mul(p);
                            e >>= 1;
                        }
                        r
                    }
                }),
                S::Min => bin!(d a b, |x, y| x.min(y)),
                S::Max => bin!(d a b, |x, y| x.max(y)),
                S::And => bin!(d a b, |x, y| x & y),
                S::Or => bin!(d a b, |x, y| x | y),
                S::Xor => bin!(d a b, |x, y| x ^ y),
                S::Shl => bin!(d a b, |x, y| if y as u64 >= $t::BITS as u64 { 0 } else { x << (y as u32) }),
                S::Shr => bin!(d a b, |x, y| if y as u64 >= $t::BITS as u64 { 0 } else { x >> (y as u32) }),
                S::Threefry => tri!(d a b c, |x, y, z| threefry(x as u32, y as u32, z as u32) as $t),
                op => {
                    if let Some(f) = op.row().int {
                        tri!(d a b c, |x, y, z| f(x as i128, y as i128, z as i128) as $t)
                    }
                }
            }
        }
        dispatch! { fn $name [] [] (isa, op: ScalarOp, d: &mut [$t], a: &[$t], b: &[$t], c: &[$t]) = $body }
        #[inline(always)]
        fn $tbody<const FMA: bool>(op: ScalarOp, d: &mut [u8], a: &[$t], b: &[$t]) {
            tests!(op d a b)
        }
        dispatch! { fn $tname [] [] (isa, op: ScalarOp, d: &mut [u8], a: &[$t], b: &[$t]) = $tbody }
    };
}
ints!(i32 i32_body i32_op i32_tbody i32_test, |x| x.signum(), |x| x.wrapping_abs());
ints!(i64 i64_body i64_op i64_tbody i64_test, |x| x.signum(), |x| x.wrapping_abs());
ints!(u32 u32_body u32_op u32_tbody u32_test, |x| x.min(1), |x| x);
ints!(u64 u64_body u64_op u64_tbody u64_test, |x| x.min(1), |x| x);

#[inline(always)]
fn bool_body<const FMA: bool>(op: ScalarOp, d: &mut [u8], a: &[u8], b: &[u8]) {
    use ScalarOp as S;
    match op {
        S::Not => un!(d a, |x| x ^ 1),
        S::Min | S::And => bin!(d a b, |x, y| x & y),
        S::Max | S::Or => bin!(d a b, |x, y| x | y),
        S::Xor => bin!(d a b, |x, y| x ^ y),
        op => tests!(op d a b),
    }
}
dispatch! { fn bool_op [] [] (isa, op: ScalarOp, d: &mut [u8], a: &[u8], b: &[u8]) = bool_body }

macro_rules! selects {
    ($($t:ident $body:ident $name:ident;)*) => {$(
        #[inline(always)]
        fn $body<const FMA: bool>(d: &mut [$t], c: &[u8], a: &[$t], b: &[$t]) {
            tri!(d c a b, |q, x, y| if q != 0 { x } else { y })
        }
        dispatch! { fn $name [] [] (isa, d: &mut [$t], c: &[u8], a: &[$t], b: &[$t]) = $body }
    )*};
}
selects! { u8 sel8_body sel8; u16 sel16_body sel16; u32 sel32_body sel32; u64 sel64_body sel64; }

#[inline(always)]
fn wrap_body<const FMA: bool>(dtype: DType, d: &mut [u32]) {
    match dtype {
        DType::I8 => d.iter_mut().for_each(|x| *x = *x as i8 as u32),
        DType::I16 => d.iter_mut().for_each(|x| *x = *x as i16 as u32),
        DType::U8 => d.iter_mut().for_each(|x| *x &= 0xff),
        DType::U16 => d.iter_mut().for_each(|x| *x &= 0xffff),
        _ => {}
    }
}
dispatch! {
    /// Wraps 32-bit values to the 8- or 16-bit integer type that they stand for.
    pub(super) fn wrap [] [] (isa, dtype: DType, d: &mut [u32]) = wrap_body
}

/// `n` values at `p`, as a slice.
///
/// # Safety
/// `p` points to `n` initialised, aligned values, which are not written while the slice is in use.
pub(super) unsafe fn sl<'a, T>(p: *const u8, n: usize) -> &'a [T] {
    debug_assert!((p as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: the contract of `sl` gives `n` valid values.
    unsafe { std::slice::from_raw_parts(p as *const T, n) }
}

/// `n` values at `p`, as a mutable slice.
///
/// # Safety
/// The contract of [`sl`], and nothing else uses the values while the slice is in use.
pub(super) unsafe fn slm<'a, T>(p: *mut u8, n: usize) -> &'a mut [T] {
    debug_assert!((p as usize).is_multiple_of(align_of::<T>()));
    // SAFETY: the contract of `slm` gives `n` valid, exclusive values.
    unsafe { std::slice::from_raw_parts_mut(p as *mut T, n) }
}

/// Applies one op to `n` elements. `dtype` is the dtype of its operands (of the last two for a select).
///
/// # Safety
/// `isa` is available. Each pointer of `x` has `n` values of the type in which `dtype` is computed
/// ([`Lane::of`]); in place of an operand that the op lacks, the caller passes another one. The first operand
/// of a select has `n` bytes instead. The destination has room for `n` values of the type in which the result
/// is computed. All pointers are aligned, and the destination overlaps no operand.
pub(crate) unsafe fn apply(isa: Isa, op: ScalarOp, dtype: DType, n: usize, d: *mut u8, x: [*const u8; 3]) {
    let lane = Lane::of(dtype);
    macro_rules! s {
        ($i:literal) => {
            // SAFETY: the contract of `apply` gives `n` values for each operand.
            unsafe { sl(x[$i], n) }
        };
    }
    macro_rules! m {
        () => {
            // SAFETY: the contract of `apply` gives room for `n` values that overlap no operand.
            unsafe { slm(d, n) }
        };
    }
    match op.row().rule {
        Rule::Select => match lane.size() {
            1 => sel8(isa, m!(), s!(0), s!(1), s!(2)),
            2 => sel16(isa, m!(), s!(0), s!(1), s!(2)),
            4 => sel32(isa, m!(), s!(0), s!(1), s!(2)),
            _ => sel64(isa, m!(), s!(0), s!(1), s!(2)),
        },
        Rule::Test => match lane {
            Lane::F32 => f32_test(isa, op, m!(), s!(0), s!(1)),
            Lane::F64 => f64_test(isa, op, m!(), s!(0), s!(1)),
            Lane::I32 => i32_test(isa, op, m!(), s!(0), s!(1)),
            Lane::U32 => u32_test(isa, op, m!(), s!(0), s!(1)),
            Lane::I64 => i64_test(isa, op, m!(), s!(0), s!(1)),
            Lane::U64 => u64_test(isa, op, m!(), s!(0), s!(1)),
            Lane::B8 | Lane::H16 => bool_op(isa, op, m!(), s!(0), s!(1)),
        },
        Rule::Same => {
            #[cfg(target_arch = "x86_64")]
            let done = lane == Lane::F32 && isa == Isa::Avx512 && {
                let (d, a) = (m!(), s!(0));
                // SAFETY: the contract of `apply` requires that `isa`, here AVX-512, is available.
                unsafe { crate::cpu::vmath512::apply(op, d, a) }
            };
            #[cfg(not(target_arch = "x86_64"))]
            let done = false;
            match lane {
                Lane::F32 if done => {}
                Lane::F32 => f32_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::F64 => f64_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::I32 => i32_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::U32 => u32_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::I64 => i64_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::U64 => u64_op(isa, op, m!(), s!(0), s!(1), s!(2)),
                Lane::B8 | Lane::H16 => bool_op(isa, op, m!(), s!(0), s!(1)),
            }
            if dtype != dtype.compute() && dtype.is_int() {
                wrap(isa, dtype, m!());
            }
        }
    }
}
