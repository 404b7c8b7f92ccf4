//! Single-precision functions without branches, so that the compiler vectorises a loop over them inside a
//! function with `#[target_feature]`.
//!
//! Each function takes one value and is `#[inline(always)]`. `FMA` is set if fused multiply-add is one
//! instruction in the calling code (true for AVX2 with FMA, AVX-512 and aarch64). The `*_ps` forms take
//! `[f32; N]`. [`apply`] runs an op in place over a slice with run-time dispatch. The polynomials in f32 are
//! those of [`halcyon_ir::polynomials`].
//!
//! NaN propagates, except that [`pow`] is 1 if the base is 1 or the exponent is 0, as in C99. Infinities and
//! overflow give C99's results. The tests bound the errors against f64, in units of the last place (ulp). The
//! bounds hold for denormal results too, unless a function says otherwise or the thread flushes to zero.

use super::sys::dispatch;
use halcyon_ir::{ScalarOp, polynomials};
use std::f32::consts::{FRAC_PI_2, LN_2, LOG2_E, PI};

/// `a * b + c`, with one rounding if `FMA`.
#[inline(always)]
pub fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

#[inline(always)]
fn fma64<const FMA: bool>(a: f64, b: f64, c: f64) -> f64 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// Evaluates a polynomial by Horner's rule. `c` begins with the constant term.
#[inline(always)]
fn poly<const FMA: bool, const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let mut r = c[N - 1];
    for i in (0..N - 1).rev() {
        r = fma::<FMA>(r, x, c[i]);
    }
    r
}

/// [`poly`] as two sums, of the even and of the odd powers. Horner's rule waits for each step, and the
/// processor looks ahead by less than two elements of a long formula.
#[inline(always)]
fn poly_pairs<const FMA: bool, const N: usize>(x: f32, c: [f32; N]) -> f32 {
    let (s, last) = (x * x, N - 1);
    let (mut r, mut q) = (c[last], c[last - 1]);
    for i in (0..last - 1).rev() {
        (r, q) = (q, fma::<FMA>(r, s, c[i]));
    }
    fma::<FMA>(r, x, q)
}

#[inline(always)]
fn poly64<const FMA: bool, const N: usize>(x: f64, c: [f64; N]) -> f64 {
    let mut r = c[N - 1];
    for i in (0..N - 1).rev() {
        r = fma64::<FMA>(r, x, c[i]);
    }
    r
}

/// Adding this constant (1.5 * 2^23) to a number rounds the number to an integer, which is then in the low
/// bits of the sum's significand.
const MAGIC: f32 = 12_582_912.0;
const MAGIC64: f64 = 6_755_399_441_055_744.0;
/// ln 2 as a 15-bit head, whose products with small integers are exact, and a tail.
const LN2_HI: f32 = 0.693_145_75;
const LN2_LO: f32 = 1.428_606_8e-6;

/// `x * 2^k` for `k` in -252..=254, with one rounding in the denormal range.
#[inline(always)]
fn scale(x: f32, k: i32) -> f32 {
    let a = k >> 1;
    let b = k.wrapping_sub(a);
    let p = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    x * p(a) * p(b)
}

#[inline(always)]
fn clamp_keep_nan(x: f32, lo: f32, hi: f32) -> f32 {
    let x = if x > hi { hi } else { x };
    if x < lo { lo } else { x }
}

/// For `x = k ln 2 + r` with a small `r` and `|x|` up to 200: returns `(k, expm1(r))`.
#[inline(always)]
fn exp_parts<const FMA: bool>(x: f32) -> (i32, f32) {
    // Adding -0 changes nothing, so it costs nothing.
    exp_parts_of::<FMA>(x, -0.0)
}

/// [`exp_parts`] of the sum of `x` and a `d` of at most 1/4.
#[inline(always)]
fn exp_parts_of<const FMA: bool>(x: f32, d: f32) -> (i32, f32) {
    let z = fma::<FMA>(x + d, LOG2_E, MAGIC);
    let k = (z.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let n = z - MAGIC;
    let r = fma::<FMA>(n, -LN2_LO, fma::<FMA>(n, -LN2_HI, x) + d);
    let q = poly::<FMA, 6>(r, polynomials::EXP);
    (k, fma::<FMA>(r * r, q, r))
}

/// e^x. Error below 1.5 ulp.
#[inline(always)]
pub fn exp<const FMA: bool>(x: f32) -> f32 {
    let (k, e) = exp_parts::<FMA>(clamp_keep_nan(x, -105.0, 90.0));
    scale(e + 1.0, k)
}

/// 2^x. Error below 1.5 ulp.
#[inline(always)]
pub fn exp2<const FMA: bool>(x: f32) -> f32 {
    let x = clamp_keep_nan(x, -152.0, 130.0);
    let z = x + MAGIC;
    let k = (z.to_bits() as i32).wrapping_sub(MAGIC.to_bits() as i32);
    let r = x - (z - MAGIC);
    let q = poly::<FMA, 7>(r, polynomials::EXP2);
    scale(fma::<FMA>(r, q, 1.0), k)
}

/// e^x - 1, accurate near zero. Error below 3 ulp.
#[inline(always)]
pub fn expm1<const FMA: bool>(x: f32) -> f32 {
    let c = clamp_keep_nan(x, -30.0, 90.0);
    let (k, e) = exp_parts::<FMA>(c);
    // 2^k as a float. `k` is clamped to avoid overflow; for k = 128 and above, `big` is used.
    let s = f32::from_bits((k.clamp(-126, 127).wrapping_add(127) as u32) << 23);
    let small = fma::<FMA>(s, e, s - 1.0);
    let big = scale(e + 1.0, k);
    let r = if c > 40.0 { big } else { small };
    // Keep the sign of zero.
    if x == 0.0 { x } else { r }
}

/// Splits a positive normal `x` into `m * 2^e` with `m` in [sqrt(1/2), sqrt(2)); returns `(e, m - 1)`.
#[inline(always)]
fn log_parts(x: f32) -> (f32, f32) {
    let b = x.to_bits().wrapping_sub(0x3f35_04f3);
    let e = (b as i32) >> 23;
    let m = f32::from_bits((b & 0x007f_ffff).wrapping_add(0x3f35_04f3));
    (e as f32, m - 1.0)
}

/// log(1 + f) - f for f in [sqrt(1/2) - 1, sqrt(2) - 1].
#[inline(always)]
fn log_tail<const FMA: bool>(f: f32) -> f32 {
    let p = poly::<FMA, 9>(f, polynomials::LOG);
    let s = f * f;
    fma::<FMA>(s * f, p, -0.5 * s)
}

/// Scales denormals into the normal range: returns `(x', e)` with `x = x' * 2^e`.
#[inline(always)]
fn lift(x: f32) -> (f32, f32) {
    let tiny = x < f32::MIN_POSITIVE;
    (if tiny { x * 8_388_608.0 } else { x }, if tiny { -23.0 } else { 0.0 })
}

/// Replaces `r` by the logarithm's value where `x` is outside (0, inf).
#[inline(always)]
fn log_edges(x: f32, r: f32) -> f32 {
    let r = if x == 0.0 { f32::NEG_INFINITY } else { r };
    let r = if x < 0.0 { f32::NAN } else { r };
    // For NaN the comparison is false too, so NaN is returned.
    if x < f32::INFINITY { r } else { x }
}

/// Natural logarithm. Error below 1.5 ulp.
#[inline(always)]
pub fn log<const FMA: bool>(x: f32) -> f32 {
    let (y, e0) = lift(x);
    let (e, f) = log_parts(y);
    let e = e + e0;
    let t = log_tail::<FMA>(f);
    let r = fma::<FMA>(e, LN2_HI, f + fma::<FMA>(e, LN2_LO, t));
    log_edges(x, r)
}

/// Base-2 logarithm. Error below 3 ulp.
#[inline(always)]
pub fn log2<const FMA: bool>(x: f32) -> f32 {
    let (y, e0) = lift(x);
    let (e, f) = log_parts(y);
    let e = e + e0;
    let t = log_tail::<FMA>(f);
    // log2(e) - 1. The other part of log2(e), 1, needs no multiplication: `t` and `f` are added as they are.
    const C: f32 = 0.442_695_04;
    let r = fma::<FMA>(f, C, fma::<FMA>(t, C, t)) + f + e;
    log_edges(x, r)
}

/// log(1 + x), accurate near zero. Error below 3 ulp.
#[inline(always)]
pub fn log1p<const FMA: bool>(x: f32) -> f32 {
    let u = 1.0 + x;
    // Correct for the rounding of `1 + x`, to first order.
    let c = (x - (u - 1.0)) / u;
    let r = log::<FMA>(u) + c;
    let r = if x == -1.0 { f32::NEG_INFINITY } else { r };
    let r = if x.abs() < 1e-7 { x } else { r };
    if x < f32::INFINITY { r } else { x }
}

/// Largest |x| of the fast reduction. Beyond it, the slice forms of sin, cos and tan use the standard
/// library.
pub const TRIG_LIMIT: f32 = 1.0e6;

/// For |x| up to [`TRIG_LIMIT`]: sin and cos of the reduced argument, and the quadrant.
#[inline(always)]
fn trig_parts<const FMA: bool>(x: f32) -> (f32, f32, i32) {
    let d = x as f64;
    let z = fma64::<FMA>(d, std::f64::consts::FRAC_2_PI, MAGIC64);
    let k = z - MAGIC64;
    let q = z.to_bits() as i32;
    // pi/2 as a 33-bit head and a tail.
    let r = fma64::<FMA>(k, -6.077_100_506_506_192e-11, fma64::<FMA>(k, -1.570_796_326_734_125_6, d)) as f32;
    let s = r * r;
    let sp = poly::<FMA, 4>(s, polynomials::SIN);
    let cp = poly::<FMA, 4>(s, polynomials::COS);
    let sin = fma::<FMA>(s * r, sp, r);
    let cos = fma::<FMA>(s * s, cp, fma::<FMA>(s, -0.5, 1.0));
    (sin, cos, q)
}

/// sin x for |x| up to [`TRIG_LIMIT`] (use the slice form if the range is unknown). Error below 2 ulp.
#[inline(always)]
pub fn sin<const FMA: bool>(x: f32) -> f32 {
    let (s, c, q) = trig_parts::<FMA>(x);
    let v = if q & 1 == 0 { s } else { c };
    let v = f32::from_bits(v.to_bits() ^ (((q & 2) as u32) << 30));
    if x == 0.0 { x } else { v }
}

/// cos x for |x| up to [`TRIG_LIMIT`]. Error below 2 ulp.
#[inline(always)]
pub fn cos<const FMA: bool>(x: f32) -> f32 {
    let (s, c, q) = trig_parts::<FMA>(x);
    let v = if q & 1 == 0 { c } else { s };
    f32::from_bits(v.to_bits() ^ ((((q.wrapping_add(1)) & 2) as u32) << 30))
}

/// tan x for |x| up to [`TRIG_LIMIT`]. Error below 4 ulp.
#[inline(always)]
pub fn tan<const FMA: bool>(x: f32) -> f32 {
    let (s, c, q) = trig_parts::<FMA>(x);
    let (n, d) = if q & 1 == 0 { (s, c) } else { (-c, s) };
    if x == 0.0 { x } else { n / d }
}

/// atan of t in [0, 1].
#[inline(always)]
fn atan_unit<const FMA: bool>(t: f32) -> f32 {
    let s = t * t;
    let p = poly::<FMA, 10>(s, polynomials::ATAN);
    fma::<FMA>(s * t, p, t)
}

/// Arc tangent. Error below 3 ulp.
#[inline(always)]
pub fn atan<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let inv = a > 1.0;
    let t = if inv { 1.0 / a } else { a };
    let r = atan_unit::<FMA>(t);
    let r = if inv { FRAC_PI_2 - r } else { r };
    r.copysign(x)
}

/// Angle of the point (x, y). Error below 4 ulp.
#[inline(always)]
pub fn atan2<const FMA: bool>(y: f32, x: f32) -> f32 {
    let (ax, ay) = (x.abs(), y.abs());
    let swap = ay > ax;
    let (n, d) = if swap { (ax, ay) } else { (ay, ax) };
    let t = n / d;
    let t = if n == 0.0 { 0.0 } else { t };
    let t = if n == f32::INFINITY { 1.0 } else { t };
    let r = atan_unit::<FMA>(t);
    let r = if swap { FRAC_PI_2 - r } else { r };
    let r = if x.is_sign_negative() { PI - r } else { r };
    let r = r.copysign(y);
    if x.is_nan() || y.is_nan() { f32::NAN } else { r }
}

/// asin of t in [0, 1/2].
#[inline(always)]
fn asin_half<const FMA: bool>(t: f32) -> f32 {
    let s = t * t;
    let p = poly::<FMA, 6>(s, polynomials::ASIN);
    fma::<FMA>(s * t, p, t)
}

/// Arc sine. Error below 3 ulp.
#[inline(always)]
pub fn asin<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let far = a > 0.5;
    let t = if far { ((1.0 - a) * 0.5).sqrt() } else { a };
    let r = asin_half::<FMA>(t);
    let r = if far { FRAC_PI_2 - 2.0 * r } else { r };
    r.copysign(x)
}

/// Arc cosine. Error below 3 ulp.
#[inline(always)]
pub fn acos<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let far = a > 0.5;
    let t = if far { ((1.0 - a) * 0.5).sqrt() } else { a };
    let r = asin_half::<FMA>(t);
    let neg = x < 0.0;
    let f = if neg { PI - 2.0 * r } else { 2.0 * r };
    // In f32, pi/2 is too large by 4.371139e-8.
    let n = FRAC_PI_2 - (r.copysign(x) + 4.371_139e-8);
    if far { f } else { n }
}

/// Hyperbolic tangent. Error below 3 ulp.
#[inline(always)]
pub fn tanh<const FMA: bool>(x: f32) -> f32 {
    let a = clamp_keep_nan(x.abs(), 0.0, 10.0);
    let e = expm1::<FMA>(2.0 * a);
    (e / (e + 2.0)).copysign(x)
}

/// Hyperbolic sine. Error below 4 ulp.
#[inline(always)]
pub fn sinh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let e = expm1::<FMA>(a);
    let small = 0.5 * (e + e / (e + 1.0));
    let h = exp::<FMA>(0.5 * a);
    let big = 0.5 * h * h;
    (if a > 40.0 { big } else { small }).copysign(x)
}

/// Hyperbolic cosine. Error below 4 ulp.
#[inline(always)]
pub fn cosh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let e = exp::<FMA>(a);
    let small = fma::<FMA>(0.5, e, 0.5 / e);
    let h = exp::<FMA>(0.5 * a);
    let big = 0.5 * h * h;
    if a > 40.0 { big } else { small }
}

/// Inverse hyperbolic sine. Error below 4 ulp.
#[inline(always)]
pub fn asinh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let s = a * a;
    let small = log1p::<FMA>(a + s / (1.0 + (s + 1.0).sqrt()));
    let big = log::<FMA>(a) + LN_2;
    (if a > 1e9 { big } else { small }).copysign(x)
}

/// Inverse hyperbolic cosine; NaN below 1. Error below 4 ulp.
#[inline(always)]
pub fn acosh<const FMA: bool>(x: f32) -> f32 {
    let t = x - 1.0;
    let small = log1p::<FMA>(t + (t * (t + 2.0)).sqrt());
    let big = log::<FMA>(x) + LN_2;
    let r = if x > 1e9 { big } else { small };
    if x < 1.0 { f32::NAN } else { r }
}

/// Inverse hyperbolic tangent. Error below 4 ulp.
#[inline(always)]
pub fn atanh<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    (0.5 * log1p::<FMA>(2.0 * a / (1.0 - a))).copysign(x)
}

/// `f` erfc(a) for a in 0..=11.5 or NaN. erfc(a) is a polynomial in (a - 2) / (a + 2) times exp(-a^2) and
/// 1 / (1 + 2a). The caller passes `b` and `c` with a^2 = c b^2 and c = 1 or 1/2, so that the rounding of `a`
/// does not enter the exponential. The product with `f` is scaled last, because erfc(a) may be denormal where
/// the product is not.
#[inline(always)]
fn erfc_times<const FMA: bool>(f: f32, a: f32, b: f32, c: f32) -> f32 {
    // 1 / (a + 2) and 1 / (1 + 2a) from one division.
    let (far, near) = (a + 2.0, fma::<FMA>(2.0, a, 1.0));
    let r = 1.0 / (far * near);
    let p = poly_pairs::<FMA, 12>((a - 2.0) * near * r, polynomials::ERFC);
    // exp(-c b^2) = exp(s + d), where `d` is the rounding error of the square `s`. Without a multiply-add,
    // `s` is the exact square of a 12-bit head `h` of `b`: -b^2 = -h^2 - (b - h)(b + h).
    let g = -c * b;
    let (s, d) = if FMA {
        (g * b, fma::<FMA>(g, b, -(g * b)))
    } else {
        let h = f32::from_bits(b.to_bits() & 0xffff_f000);
        (-c * h * h, c * ((h - b) * (b + h)))
    };
    let (k, e) = exp_parts_of::<FMA>(s, d);
    scale(f * (p * (far * r)) * (e + 1.0), k)
}

/// Error function. Error below 4 ulp.
#[inline(always)]
pub fn erf<const FMA: bool>(x: f32) -> f32 {
    let a = x.abs();
    let s = a * a;
    let near = a * poly::<FMA, 8>(s, polynomials::ERF);
    // From 10 on, erf(a) is 1 in f32.
    let b = clamp_keep_nan(a, 0.0, 10.0);
    let far = 1.0 - erfc_times::<FMA>(1.0, b, b, 1.0);
    (if a < 1.0 { near } else { far }).copysign(x)
}

/// 1 / (1 + e^-x). Error below 4 ulp.
#[inline(always)]
pub fn sigmoid<const FMA: bool>(x: f32) -> f32 {
    let e = exp::<FMA>(-x.abs());
    (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
}

/// x * sigmoid(x). Error below 5 ulp.
#[inline(always)]
pub fn silu<const FMA: bool>(x: f32) -> f32 {
    // Multiply twice by the exponential of half the argument, so that no factor of a small product is
    // denormal.
    let h = exp::<FMA>(-0.5 * x.abs());
    let (a, b) = if x < 0.0 { (x * h, h) } else { (x, 1.0) };
    a / fma::<FMA>(h, h, 1.0) * b
}

/// x * Phi(x), the exact GELU. Error below 12 ulp for normal results.
#[inline(always)]
pub fn gelu<const FMA: bool>(x: f32) -> f32 {
    // For |x| above 16 the tail |x| Phi(-|x|) is zero. NaN stays.
    let b = clamp_keep_nan(x.abs(), 0.0, 16.0);
    let tail = erfc_times::<FMA>(0.5 * b, b * std::f32::consts::FRAC_1_SQRT_2, b, 0.5);
    let y = (if x < 0.0 { 0.0 } else { x }) - tail;
    // Phi(-inf) is 0 and -inf is not finite.
    if x == f32::NEG_INFINITY { f32::NAN } else { y }
}

/// GELU's tanh form, as x * sigmoid(2 u). Error below 64 ulp for x >= -3. For smaller x, the error grows with
/// |x|, because the argument of the exponential is rounded.
#[inline(always)]
pub fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    let s = x * x;
    let u = x * fma::<FMA>(s, 2.0 * 0.797_884_6 * 0.044715, 2.0 * 0.797_884_6);
    x * sigmoid::<FMA>(u)
}

/// x^y with C99's special cases. Error below 1.5 ulp (computed in f64).
#[inline(always)]
pub fn pow<const FMA: bool>(x: f32, y: f32) -> f32 {
    let a = x.abs() as f64;
    // log2 |x|. Every f32, including denormals, is a normal f64.
    let b = a.to_bits().wrapping_sub(0x3fe6_a09e_667f_3bcd);
    let e = ((b >> 52) as i32).wrapping_sub(((b >> 63) as i32) << 12);
    let m = f64::from_bits((b & 0x000f_ffff_ffff_ffff).wrapping_add(0x3fe6_a09e_667f_3bcd));
    let s = (m - 1.0) / (m + 1.0);
    let l = s * poly64::<FMA, 7>(
        s * s,
        [
            2.885390081777927,
            0.9617966939243245,
            0.5770780172508729,
            0.4121984013068434,
            0.3206164421244846,
            0.26144245557136553,
            0.24293824606326322,
        ],
    ) + e as f64;
    let l = if a == 0.0 { f64::NEG_INFINITY } else { l };
    let l = if a == f64::INFINITY { f64::INFINITY } else { l };
    let w = l * y as f64;
    let w = if w > 200.0 { 200.0 } else { w };
    let w = if w < -200.0 { -200.0 } else { w };
    let z = w + MAGIC64;
    let k = z.to_bits() as i32;
    let r = w - (z - MAGIC64);
    let p = poly64::<FMA, 9>(
        r,
        [
            1.0,
            0.693147180545911,
            0.24022650695812833,
            0.05550410941295717,
            0.009618129159464759,
            0.0013333450481819327,
            0.00015403455792749644,
            1.531010238038351e-05,
            1.3255240797206966e-06,
        ],
    );
    let v = (p * f64::from_bits(((k.wrapping_add(1023)) as u64) << 52)) as f32;
    // A float of 2^24 or more is an even integer. For a smaller one, find out whether it is an integer and
    // whether it is odd.
    let ay = y.abs();
    let whole = ay >= 8_388_608.0 || {
        let t = ay + 8_388_608.0;
        t - 8_388_608.0 == ay
    };
    let odd = whole && ay < 16_777_216.0 && {
        // Half of an odd integer is not an integer.
        let h = 0.5 * ay;
        (h + 8_388_608.0) - 8_388_608.0 != h
    };
    let neg = x.is_sign_negative();
    let v = if neg && odd { -v } else { v };
    let v = if x < 0.0 && !whole && x > f32::NEG_INFINITY && y.abs() < f32::INFINITY { f32::NAN } else { v };
    let v = if x.is_nan() || y.is_nan() { f32::NAN } else { v };
    if x == 1.0 || y == 0.0 || (x == -1.0 && y.abs() == f32::INFINITY) { 1.0 } else { v }
}

macro_rules! arrays {
    ($($name:ident $scalar:ident;)*) => {$(
        #[doc = concat!("[`", stringify!($scalar), "`] on each lane.")]
        #[inline(always)]
        pub fn $name<const FMA: bool, const N: usize>(x: [f32; N]) -> [f32; N] {
            let mut y = x;
            for v in &mut y {
                *v = $scalar::<FMA>(*v);
            }
            y
        }
    )*};
}
arrays! {
    exp_ps exp; exp2_ps exp2; expm1_ps expm1; log_ps log; log2_ps log2; log1p_ps log1p; atan_ps atan; asin_ps asin;
    acos_ps acos; tanh_ps tanh; sinh_ps sinh; cosh_ps cosh; asinh_ps asinh; acosh_ps acosh; atanh_ps atanh; erf_ps erf;
    sigmoid_ps sigmoid; silu_ps silu; gelu_ps gelu; gelu_tanh_ps gelu_tanh;
}

/// Applies `f` to each element in place.
#[inline(always)]
fn map(x: &mut [f32], f: impl Fn(f32) -> f32) {
    for v in x {
        *v = f(*v);
    }
}

/// Applies a trigonometric function in place, 256 elements at a time: the fast form if all are within
/// [`TRIG_LIMIT`], otherwise the standard library's.
#[inline(always)]
fn map_trig(x: &mut [f32], f: impl Fn(f32) -> f32, slow: impl Fn(f32) -> f32) {
    for b in x.chunks_mut(256) {
        let mut far = false;
        for v in b.iter() {
            // The comparison is false for NaN, which takes the fast path.
            far |= v.abs() > TRIG_LIMIT;
        }
        if far { map(b, &slow) } else { map(b, &f) }
    }
}

#[inline(always)]
fn apply_body<const FMA: bool>(op: ScalarOp, x: &mut [f32]) -> bool {
    use ScalarOp as S;
    match op {
        S::Exp => map(x, exp::<FMA>),
        S::Exp2 => map(x, exp2::<FMA>),
        S::Expm1 => map(x, expm1::<FMA>),
        S::Log => map(x, log::<FMA>),
        S::Log2 => map(x, log2::<FMA>),
        S::Log1p => map(x, log1p::<FMA>),
        S::Sin => map_trig(x, sin::<FMA>, f32::sin),
        S::Cos => map_trig(x, cos::<FMA>, f32::cos),
        S::Tan => map_trig(x, tan::<FMA>, f32::tan),
        S::Asin => map(x, asin::<FMA>),
        S::Acos => map(x, acos::<FMA>),
        S::Atan => map(x, atan::<FMA>),
        S::Sinh => map(x, sinh::<FMA>),
        S::Cosh => map(x, cosh::<FMA>),
        S::Tanh => map(x, tanh::<FMA>),
        S::Asinh => map(x, asinh::<FMA>),
        S::Acosh => map(x, acosh::<FMA>),
        S::Atanh => map(x, atanh::<FMA>),
        S::Erf => map(x, erf::<FMA>),
        S::Sigmoid => map(x, sigmoid::<FMA>),
        S::Silu => map(x, silu::<FMA>),
        S::Gelu => map(x, gelu::<FMA>),
        S::GeluTanh => map(x, gelu_tanh::<FMA>),
        S::Sqrt => map(x, f32::sqrt),
        S::Rsqrt => map(x, |v| 1.0 / v.sqrt()),
        S::Recip => map(x, |v| 1.0 / v),
        _ => return false,
    }
    true
}

#[inline(always)]
fn apply2_body<const FMA: bool>(op: ScalarOp, x: &mut [f32], y: &[f32]) -> bool {
    match op {
        ScalarOp::Pow => x.iter_mut().zip(y).for_each(|(a, b)| *a = pow::<FMA>(*a, *b)),
        ScalarOp::Atan2 => x.iter_mut().zip(y).for_each(|(a, b)| *a = atan2::<FMA>(*a, *b)),
        _ => return false,
    }
    true
}

dispatch! {
    /// Replaces each element `v` by `op(v)`. Returns false and changes nothing if this module has no form of
    /// the op.
    pub fn apply[][](isa, op: ScalarOp, x: &mut [f32]) -> bool = apply_body
}
dispatch! {
    /// `x = op(x, y)` element by element over the shorter length, for `Pow` and `Atan2`. Returns false for
    /// any other op.
    pub fn apply2[][](isa, op: ScalarOp, x: &mut [f32], y: &[f32]) -> bool = apply2_body
}

#[cfg(test)]
#[path = "vmath_tests.rs"]
pub(crate) mod tests;
