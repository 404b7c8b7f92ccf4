//! Mathematical functions of f32 and f64, built only from additions, multiplications, divisions and square
//! roots. WGSL's own functions may be wrong by thousands of ulps, and do not exist for f64.
//!
//! f32 uses the range reductions and polynomials ([`crate::polynomials`]) of the CPU's `vmath.rs`. f64 uses
//! shorter intervals and Taylor series. Polynomials use Horner's rule.

use crate::kernel::ir::Ty;
use crate::polynomials;
use std::fmt::Write;

/// Horner's rule in `x`, lowest coefficient first.
fn horner(x: &str, c: &[f64], ty: Ty) -> String {
    let lit = |v: f64| match ty {
        Ty::F64 => format!("{v:?}lf"),
        _ => format!("{:?}f", v as f32),
    };
    let mut t = lit(c[c.len() - 1]);
    for v in c[..c.len() - 1].iter().rev() {
        t = format!("({t} * {x} + ({}))", lit(*v));
    }
    t
}

fn horner32(x: &str, c: &[f32]) -> String {
    horner(x, &c.iter().map(|v| f64::from(*v)).collect::<Vec<_>>(), Ty::F32)
}

fn factorial(n: usize) -> f64 {
    (1..=n).map(|i| i as f64).product()
}

/// Definition of a function for one type, with the placeholders of [`super::helpers`].
pub(super) fn definition(base: &str, ty: Ty) -> Option<String> {
    let name = base.strip_prefix("h_")?;
    let own = match ty {
        Ty::F64 => exponential_f64(name).or_else(|| other_f64(name)),
        _ => exponential_f32(name).or_else(|| other_f32(name)),
    };
    own.or_else(|| common(name, ty))
}

fn one(body: &str) -> String {
    format!("fn @(x: $T) -> $T {{\n{body}}}\n")
}

fn two(body: &str) -> String {
    format!("fn @(x: $T, y: $T) -> $T {{\n{body}}}\n")
}

/// Functions with the same text for both types.
fn common(name: &str, ty: Ty) -> Option<String> {
    Some(match name {
        "copysign" => two(
            "    let s = bitcast<$U>(y) & ~h_magnitude_mask_$s();\n    return bitcast<$T>((bitcast<$U>(x) & h_magnitude_mask_$s()) | s);\n",
        ),
        "tanh" => one(
            "    if (h_isnan_$s(x)) {\n        return x;\n    }\n    let e = h_expm1_$s(2.0 * min(abs(x), $T(22.0)));\n    return h_copysign_$s(e / (e + 2.0), x);\n",
        ),
        "sinh" => one(
            "    let a = abs(x);\n    if (a > 40.0) {\n        let h = h_exp_$s(0.5 * a);\n        return h_copysign_$s(0.5 * h * h, x);\n    }\n    \
             let e = h_expm1_$s(a);\n    return h_copysign_$s(0.5 * (e + e / (e + 1.0)), x);\n",
        ),
        "cosh" => one(
            "    let a = abs(x);\n    if (a > 40.0) {\n        let h = h_exp_$s(0.5 * a);\n        return 0.5 * h * h;\n    }\n    \
             let e = h_exp_$s(a);\n    return 0.5 * e + 0.5 / e;\n",
        ),
        "asinh" => one(
            "    let a = abs(x);\n    if (a > 1e9) {\n        return h_copysign_$s(h_log_$s(a) + 0.6931471805599453, x);\n    }\n    \
             let s = a * a;\n    return h_copysign_$s(h_log1p_$s(a + s / (1.0 + sqrt(s + 1.0))), x);\n",
        ),
        "acosh" => one(
            "    if (x < 1.0) {\n        return h_nan_$s();\n    }\n    if (x > 1e9) {\n        return h_log_$s(x) + 0.6931471805599453;\n    }\n    \
             let t = x - 1.0;\n    return h_log1p_$s(t + sqrt(t * (t + 2.0)));\n",
        ),
        "atanh" => one(
            "    let a = abs(x);\n    if (a == 1.0) {\n        return h_copysign_$s(h_inf_$s(), x);\n    }\n    return h_copysign_$s(0.5 * h_log1p_$s(2.0 * a / (1.0 - a)), x);\n",
        ),
        // sin / cos, or -cos / sin in odd quadrants.
        "tan" => one(
            "    if (x == 0.0) {\n        return x;\n    }\n    let p = h_trig_$s(x);\n    return select(p.sin / p.cos, -p.cos / p.sin, (p.quadrant & 1) != 0);\n",
        ),
        "sin" => one(
            "    if (x == 0.0) {\n        return x;\n    }\n    let p = h_trig_$s(x);\n    let v = select(p.sin, p.cos, (p.quadrant & 1) != 0);\n    \
             return select(v, -v, (p.quadrant & 2) != 0);\n",
        ),
        "cos" => one(
            "    let p = h_trig_$s(x);\n    let v = select(p.cos, p.sin, (p.quadrant & 1) != 0);\n    return select(v, -v, ((p.quadrant + 1) & 2) != 0);\n",
        ),
        "atan2" => fn_atan2(),
        "pow" => pow(ty),
        _ => return None,
    })
}

/// atan2(x, y), whose first operand `x` is the ordinate and whose second operand `y` is the abscissa.
fn fn_atan2() -> String {
    two(
        "    if (h_isnan_$s(x) || h_isnan_$s(y)) {\n        return h_nan_$s();\n    }\n    let a = abs(x);\n    let b = abs(y);\n    \
         let n = min(a, b);\n    let d = max(a, b);\n    var t = $T(0.0);\n    if (h_isinf_$s(n)) {\n        t = $T(1.0);\n    } else if (n > 0.0) {\n        \
         t = n / d;\n    }\n    var r = h_atan_unit_$s(t);\n    r = select(r, 1.5707963267948966 - r, a > b);\n    \
         r = select(r, 3.141592653589793 - r, bitcast<$I>(y) < 0);\n    return h_copysign_$s(r, x);\n",
    )
}

/// Exponentials, logarithms, and helpers that read or set the bits of a number.
fn exponential_f32(name: &str) -> Option<String> {
    let p = |x: &str, c: &[f32]| horner32(x, c);
    Some(match name {
        "magnitude_mask" => "fn @() -> u32 {\n    return 0x7fffffffu;\n}\n".into(),
        "pow2" => "fn @(k: i32) -> f32 {\n    return bitcast<f32>(u32(k + 127) << 23u);\n}\n".into(),
        // Keeps the first 12 bits of the significand (`head`), or all but the last 4 (`cut`). The mask also
        // stops compilers from simplifying (1 + x) - 1 to x.
        "head" => one("    return bitcast<f32>(bitcast<u32>(x) & 0xfffff000u);\n"),
        "cut" => one("    return bitcast<f32>(bitcast<u32>(x) & 0xfffffff0u);\n"),
        // x 2^k for k in -252..=254. A denormal result is rounded once.
        "scale" => {
            "fn @(x: f32, k: i32) -> f32 {\n    let a = k >> 1u;\n    return x * h_pow2_f32(a) * h_pow2_f32(k - a);\n}\n"
                .into()
        }
        // exp(r) - 1 for |r| up to ln 2 / 2.
        "expm1_near" => one(&format!(
            "    return x * x * {} + x;\n",
            p("x", &polynomials::EXP)
        )),
        // x - k ln 2, for |x| up to 200. ln 2 is split into a head of 15 bits and a tail.
        "exp_rest" => "fn @(x: f32, k: f32) -> f32 {\n    return (x - k * 0.69314575) - k * 1.428606765e-6;\n}\n".into(),
        "exp" => one(
            "    if (h_isnan_f32(x)) {\n        return x;\n    }\n    let c = clamp(x, -105.0, 90.0);\n    let k = round(c * 1.44269504);\n    \
             return h_scale_f32(h_expm1_near_f32(h_exp_rest_f32(c, k)) + 1.0, i32(k));\n",
        ),
        "exp2" => one(&format!(
            "    if (h_isnan_f32(x)) {{\n        return x;\n    }}\n    let c = clamp(x, -152.0, 130.0);\n    let k = round(c);\n    let r = c - k;\n    \
             return h_scale_f32(r * {} + 1.0, i32(k));\n",
            p(
                "r",
                &polynomials::EXP2
            )
        )),
        "expm1" => one(
            "    if (x == 0.0 || h_isnan_f32(x)) {\n        return x;\n    }\n    let c = clamp(x, -30.0, 90.0);\n    let k = round(c * 1.44269504);\n    \
             let e = h_expm1_near_f32(h_exp_rest_f32(c, k));\n    if (c > 40.0) {\n        return h_scale_f32(e + 1.0, i32(k));\n    }\n    \
             let s = h_pow2_f32(i32(k));\n    return s * e + (s - 1.0);\n",
        ),
        // For a positive x: e and f with x = (1 + f) 2^e, where 1 + f lies in [sqrt(1/2), sqrt(2)).
        "log_parts" => {
            "struct LogParts {\n    e: f32,\n    f: f32,\n}\nfn @(x: f32) -> LogParts {\n    let tiny = bitcast<u32>(x) < 0x00800000u;\n    \
             let y = select(x, x * 8388608.0, tiny);\n    let b = bitcast<u32>(y) - 0x3f3504f3u;\n    \
             let m = bitcast<f32>((b & 0x007fffffu) + 0x3f3504f3u);\n    \
             return LogParts(f32(bitcast<i32>(b) >> 23u) - select(0.0, 23.0, tiny), m - 1.0);\n}\n"
                .into()
        }
        // log(1 + x) - (x - x^2 / 2).
        "log_cubic" => one(&format!(
            "    return x * x * x * {};\n",
            p(
                "x",
                &polynomials::LOG
            )
        )),
        "log" => one(&format!(
            "{}    let p = h_log_parts_f32(x);\n    let s = p.f * p.f;\n    let t = h_log_cubic_f32(p.f) - 0.5 * s;\n    \
             return p.e * 0.69314575 + (p.f + (p.e * 1.428606765e-6 + t));\n",
            log_edges("f32")
        )),
        // With v = log(1 + f), log2(e) v is computed as v + (log2(e) - 1) v. So the largest term, f, needs no
        // multiplication and has no rounding error.
        "log2" => one(&format!(
            "{}    let p = h_log_parts_f32(x);\n    let s = p.f * p.f;\n    let t = h_log_cubic_f32(p.f) - 0.5 * s;\n    \
             return (p.f * 0.44269504 + (t * 0.44269504 + t)) + p.f + p.e;\n",
            log_edges("f32")
        )),
        "log1p" => one(
            "    if (x == -1.0) {\n        return -h_inf_f32();\n    }\n    if (abs(x) < 1e-7 || h_isnan_f32(x) || h_isinf_f32(x)) {\n        return select(x, h_nan_f32(), x < -1.0);\n    }\n    \
             let u = h_cut_f32(1.0 + x);\n    return h_log_f32(u) + (x - (u - 1.0)) / u;\n",
        ),
        _ => return None,
    })
}

/// Trigonometric functions, the error function and the remainder.
fn other_f32(name: &str) -> Option<String> {
    let p = |x: &str, c: &[f32]| horner32(x, c);
    Some(match name {
        "trig" => trig32(&p),
        "atan_unit" => {
            one(&format!("    let s = x * x;\n    return s * x * {} + x;\n", p("s", &polynomials::ATAN)))
        }
        "atan" => one(
            "    if (h_isnan_f32(x)) {\n        return x;\n    }\n    let a = abs(x);\n    if (h_isinf_f32(x)) {\n        return h_copysign_f32(1.5707963, x);\n    }\n    \
             let r = h_atan_unit_f32(select(a, 1.0 / a, a > 1.0));\n    return h_copysign_f32(select(r, 1.5707963 - r, a > 1.0), x);\n",
        ),
        "asin_half" => {
            one(&format!("    let s = x * x;\n    return s * x * {} + x;\n", p("s", &polynomials::ASIN)))
        }
        "asin" => one(
            "    let a = abs(x);\n    if (!(a <= 1.0) || h_isnan_f32(x)) {\n        return h_nan_f32();\n    }\n    \
             if (a > 0.5) {\n        return h_copysign_f32(1.5707963 - 2.0 * h_asin_half_f32(sqrt((1.0 - a) * 0.5)), x);\n    }\n    \
             return h_copysign_f32(h_asin_half_f32(a), x);\n",
        ),
        // The f32 constant 1.5707963 is 4.371139e-8 larger than pi / 2.
        "acos" => one(
            "    let a = abs(x);\n    if (!(a <= 1.0) || h_isnan_f32(x)) {\n        return h_nan_f32();\n    }\n    if (a > 0.5) {\n        \
             let r = 2.0 * h_asin_half_f32(sqrt((1.0 - a) * 0.5));\n        return select(r, 3.1415927 - r, x < 0.0);\n    }\n    \
             return 1.5707963 - (h_copysign_f32(h_asin_half_f32(a), x) + 4.371139e-8);\n",
        ),
        // erfc(a) for a >= 0 is exp(-a^2) / (1 + 2a) times a polynomial in (a - 2) / (a + 2). The caller also
        // gives b and c with a^2 = c b^2, because a may be rounded although b is exact (GELU: a = b /
        // sqrt(2)). exp(-a^2) = exp(-c h^2) exp(c (h^2 - b^2)), where h is the first 12 bits of b, so that
        // h^2 is exact.
        "erfc_pos" => format!(
            "fn @(a_: f32, b_: f32, c: f32) -> f32 {{\n    let a = min(a_, 16.0);\n    let b = min(b_, 16.0);\n    let t = (a - 2.0) / (a + 2.0);\n    \
             let p = {};\n    let h = bitcast<f32>(bitcast<u32>(b) & 0xfffff000u);\n    let d = c * ((h - b) * (b + h));\n    \
             return h_exp_f32(-c * h * h) * (h_expm1_near_f32(d) + 1.0) * p / (2.0 * a + 1.0);\n}}\n",
            p("t", &polynomials::ERFC)
        ),
        "erf" => one(&format!(
            "    if (h_isnan_f32(x)) {{\n        return x;\n    }}\n    let a = abs(x);\n    if (a < 1.0) {{\n        let s = a * a;\n        \
             return h_copysign_f32(a * {}, x);\n    }}\n    return h_copysign_f32(1.0 - h_erfc_pos_f32(a, a, 1.0), x);\n",
            p("s", &polynomials::ERF)
        )),
        // Long division of the significands, eight bits at a time.
        "fmod" => two(
            "    let a = bitcast<u32>(x) & 0x7fffffffu;\n    let b = bitcast<u32>(y) & 0x7fffffffu;\n    \
             if (b == 0u || a >= 0x7f800000u || b > 0x7f800000u) {\n        return h_nan_f32();\n    }\n    if (a < b) {\n        return x;\n    }\n    \
             let ea = max(a >> 23u, 1u);\n    let eb = max(b >> 23u, 1u);\n    var m = (a & 0x7fffffu) | select(0u, 0x800000u, a >= 0x800000u);\n    \
             let d = (b & 0x7fffffu) | select(0u, 0x800000u, b >= 0x800000u);\n    var n = ea - eb;\n    while (n > 0u) {\n        \
             let s = min(n, 8u);\n        m = (m % d) << s;\n        n -= s;\n    }\n    m %= d;\n    \
             return h_copysign_f32(h_scale_f32(f32(m), i32(eb) - 150), x);\n",
        ),
        _ => return None,
    })
}

/// The values of a logarithm outside (0, inf).
fn log_edges(ty: &str) -> String {
    format!(
        "    if (h_isnan_{ty}(x) || (h_isinf_{ty}(x) && x > 0.0)) {{\n        return x;\n    }}\n    if (x == 0.0) {{\n        return -h_inf_{ty}();\n    }}\n    \
         if (x < 0.0) {{\n        return h_nan_{ty}();\n    }}\n"
    )
}

/// Subtracts the nearest multiple of pi / 2 from x. Returns sin and cos of the difference, and the multiple
/// as the quadrant. For |x| below 2^10, pi / 2 is a sum of parts whose products with the multiple are exact.
/// For larger x, the words of 2 / pi that matter are multiplied by the significand of x (M. Payne and R.
/// Hanek 1983).
fn trig32(p: &dyn Fn(&str, &[f32]) -> String) -> String {
    let series = format!(
        "    let s = r * r;\n    let sin = s * r * {} + r;\n    let cos = s * s * {} + (1.0 - 0.5 * s);\n    return Trig32(sin, cos, q);\n}}\n",
        p("s", &polynomials::SIN),
        p("s", &polynomials::COS)
    );
    let reduce = "struct Trig32 {
    sin: f32,
    cos: f32,
    quadrant: i32,
}
fn @(x: f32) -> Trig32 {
    let a = bitcast<u32>(x) & 0x7fffffffu;
    if (a >= 0x7f800000u) {
        return Trig32(h_nan_f32(), h_nan_f32(), 0);
    }
    var r = 0.0;
    var q = 0;
    if (a < 0x44800000u) {
        let k = round(x * 0.63661977);
        r = (((x - k * %1) - k * %2) - k * %3) - k * %4;
        q = i32(k);
    } else {
        // 96 bits of 2 / pi. The bits before them only add whole turns to the product with the significand.
        // The top two bits of the product are the quadrant, and the others are a fraction of it.
        let m = (a & 0x7fffffu) | 0x800000u;
        let e = (a >> 23u) - 120u;
        let w = e >> 5u;
        let s = e & 31u;
        var c0 = h_turn_word_u32(w);
        var c1 = h_turn_word_u32(w + 1u);
        var c2 = h_turn_word_u32(w + 2u);
        if (s > 0u) {
            c0 = (c0 << s) | (c1 >> (32u - s));
            c1 = (c1 << s) | (c2 >> (32u - s));
            c2 = (c2 << s) | (h_turn_word_u32(w + 3u) >> (32u - s));
        }
        let low = m * c1;
        let mid = low + h_mulhi_u32(m, c2);
        let top = m * c0 + h_mulhi_u32(m, c1) + select(0u, 1u, mid < low);
        q = i32((top + 0x20000000u) >> 30u);
        var f = (top << 2u) | (mid >> 30u);
        var g = mid << 2u;
        let over = (f & 0x80000000u) != 0u;
        f = select(f, ~f, over);
        g = select(g, ~g, over);
        let n = countLeadingZeros(f);
        var v = g;
        if (n == 0u) {
            v = f;
        } else if (n < 32u) {
            v = (f << n) | (g >> (32u - n));
        }
        r = f32(v >> 8u) * 1.5707963 * h_pow2_f32(-24 - i32(n));
        r = select(r, -r, over != (bitcast<i32>(x) < 0));
        q = select(q, -q, bitcast<i32>(x) < 0);
    }
";
    PI_PARTS.iter().enumerate().fold(reduce.to_string(), |t, (i, v)| t.replace(&format!("%{}", i + 1), v))
        + &series
}

/// Numbers whose sum is pi / 2: parts of 11 bits, and the remainder.
const PI_PARTS: [&str; 4] =
    ["1.5703125", "0.0004837512969970703", "7.549533620476723e-08", "2.563344151594519e-12"];

/// A function that returns word `i` of the bits of 2 / pi after the binary point, in words of 32 or 64 bits.
/// Word 0 is zero; the first bits are in word 1.
pub(super) fn turn_words(ty: Ty) -> String {
    const WORDS: [u64; 20] = [
        0xa2f9836e4e441529,
        0xfc2757d1f534ddc0,
        0xdb6295993c439041,
        0xfe5163abdebbc561,
        0xb7246e3a424dd2e0,
        0x6492eea09d1921c,
        0xfe1deb1cb129a73e,
        0xe88235f52ebb4484,
        0xe99c7026b45f7e41,
        0x3991d639835339f4,
        0x9c845f8bbdf9283b,
        0x1ff897ffde05980f,
        0xef2f118b5a0a6d1f,
        0x6d367ecf27cb09b7,
        0x4f463f669e5fea2d,
        0x7527bac7ebe5f17b,
        0x3d0739f78a5292ea,
        0x6bfb5fb11f8d5d08,
        0x56033046fc7b6bab,
        0xf0cfbc209af4361d,
    ];
    let name = super::ty_name(ty);
    let mut t = format!("fn @(i: u32) -> {name} {{\n    switch i {{\n");
    let halves = WORDS.iter().flat_map(|w| [w >> 32, w & 0xffff_ffff]).take(7);
    let words: Vec<u64> = if ty == Ty::U64 { WORDS.to_vec() } else { halves.collect() };
    for (i, w) in words.iter().enumerate() {
        let _ = writeln!(t, "        case {}u: {{ return {}; }}", i + 1, super::int_constant(*w, ty));
    }
    t + &format!("        default: {{ return {name}(0); }}\n    }}\n}}\n")
}

/// Like [`trig32`], with parts of 33 bits for |x| below 2^20, and words of 64 bits for larger x.
fn trig64(p: &dyn Fn(&str, &[f64]) -> String) -> String {
    let sign = |n: usize| if n % 2 == 1 { -1.0 } else { 1.0 };
    let sin: Vec<f64> = (1..=8).map(|n| sign(n) / factorial(2 * n + 1)).collect();
    let cos: Vec<f64> = (2..=9).map(|n| sign(n) / factorial(2 * n)).collect();
    let series = format!(
        "    let s = r * r;\n    return Trig64(s * r * {} + r, s * s * {} + (1.0lf - 0.5lf * s), q);\n}}\n",
        p("s", &sin),
        p("s", &cos)
    );
    let reduce = "struct Trig64 {
    sin: f64,
    cos: f64,
    quadrant: i32,
}
fn @(x: f64) -> Trig64 {
    if (h_isnan_f64(x) || h_isinf_f64(x)) {
        return Trig64(h_nan_f64(), h_nan_f64(), 0);
    }
    var r = 0.0lf;
    var q = 0;
    let a = bitcast<u64>(x) & 9223372036854775807lu;
    let exponent = u32(a >> 52u);
    if (exponent < 1043u) {
        let k = round(x * 0.6366197723675814lf);
        r = ((x - k * 1.5707963267341256lf) - k * 6.077100506303966e-11lf) - k * 2.0222662487959506e-21lf;
        q = i32(k) & 3;
    } else {
        // 192 bits of 2 / pi. The bits before them only add whole turns to the product with the significand.
        // The top two bits of the product are the quadrant, and the others are a fraction of it.
        let m = (a & 4503599627370495lu) | 4503599627370496lu;
        let e = exponent - 1013u;
        let w = e >> 6u;
        let s = e & 63u;
        var c0 = h_turn_word_u64(w);
        var c1 = h_turn_word_u64(w + 1u);
        var c2 = h_turn_word_u64(w + 2u);
        if (s > 0u) {
            c0 = (c0 << s) | (c1 >> (64u - s));
            c1 = (c1 << s) | (c2 >> (64u - s));
            c2 = (c2 << s) | (h_turn_word_u64(w + 3u) >> (64u - s));
        }
        let low = m * c1;
        let mid = low + h_mulhi_u64(m, c2);
        let top = m * c0 + h_mulhi_u64(m, c1) + select(0lu, 1lu, mid < low);
        q = i32(u32((top + 2305843009213693952lu) >> 62u));
        var f = (top << 2u) | (mid >> 62u);
        var g = mid << 2u;
        let over = (f >> 63u) != 0lu;
        f = select(f, ~f, over);
        g = select(g, ~g, over);
        var n = countLeadingZeros(u32(f >> 32u));
        if (n == 32u) {
            n += countLeadingZeros(u32(f & 4294967295lu));
        }
        var v = g;
        if (n == 0u) {
            v = f;
        } else if (n < 64u) {
            v = (f << n) | (g >> (64u - n));
        }
        r = f64(v >> 11u) * 1.5707963267948966lf * h_pow2_f64(-53 - i32(n));
        r = select(r, -r, over != (bitcast<i64>(x) < 0li));
        q = select(q, -q, bitcast<i64>(x) < 0li);
    }
";
    reduce.to_string() + &series
}

/// x^y with C99's special cases. log2 x is computed as the sum of a large and a small number. The products
/// that make the large one are exact, because each factor (`head`) has at most half of the significand's
/// bits.
fn pow(ty: Ty) -> String {
    // log2 e as the sum `c1 + c2`; the magnitude from which every number is an integer (`whole`), and an even
    // integer (`even`); a magnitude of y log2 x at which x^y certainly overflows or underflows (`top`).
    let (c1, c2, whole, even, top) = match ty {
        Ty::F64 => (
            "1.4426950216293335",
            "1.9259629911266175e-08",
            "4503599627370496.0",
            "9007199254740992.0",
            "1100.0",
        ),
        _ => ("1.4423828125", "3.1222838896338e-4", "8388608.0", "16777216.0", "200.0"),
    };
    two("    if (x == 1.0 || y == 0.0) {
        return $T(1.0);
    }
    if (h_isnan_$s(x) || h_isnan_$s(y)) {
        return h_nan_$s();
    }
    let ax = abs(x);
    let ay = abs(y);
    if (h_isinf_$s(y)) {
        return select(select($T(0.0), h_inf_$s(), (ax > 1.0) == (y > 0.0)), $T(1.0), ax == 1.0);
    }
    let whole = ay >= %whole || trunc(ay) == ay;
    let flip = whole && ay < %even && ($U(min(ay, $T(%even))) & 1) != 0 && bitcast<$I>(x) < 0;
    if (ax == 0.0 || h_isinf_$s(x)) {
        let v = select($T(0.0), h_inf_$s(), (ax > 1.0) == (y > 0.0));
        return select(v, -v, flip);
    }
    if (x < 0.0 && !whole) {
        return h_nan_$s();
    }
    let p = h_log_parts_$s(ax);
    let fh = h_head_$s(p.f);
    let square = -0.5 * fh * fh;
    let s = h_cut_$s(p.f + square);
    let t = ((p.f - s) + square) + (h_log_cubic_$s(p.f) - 0.5 * (p.f - fh) * (p.f + fh));
    let lh = h_head_$s(s + t);
    let lt = (s - lh) + t;
    let u = lh * %c1;
    let b = h_cut_$s(p.e + u);
    let c = ((p.e - b) + u) + (lh * %c2 + lt * 1.4426950408889634);
    let gh = h_head_$s(b + c);
    let gt = (b - gh) + c;
    let z = clamp(y, $T(-1e30), $T(1e30));
    let zh = h_head_$s(z);
    let w = zh * gh;
    let r = (z - zh) * gh + z * gt;
    let k = round(clamp(w + r, $T(-%top), $T(%top)));
    let far = abs(w + r) >= %top;
    let v = h_scale_$s(h_exp2_$s(select((w - k) + r, $T(0.0), far)), i32(k));
    return select(v, -v, flip);
")
    .replace("%whole", whole)
    .replace("%even", even)
    .replace("%top", top)
    .replace("%c1", c1)
    .replace("%c2", c2)
}

/// Exponentials, logarithms, and helpers that read or set the bits of a number.
fn exponential_f64(name: &str) -> Option<String> {
    let p = |x: &str, c: &[f64]| horner(x, c, Ty::F64);
    Some(match name {
        "magnitude_mask" => "fn @() -> u64 {\n    return 9223372036854775807lu;\n}\n".into(),
        "head" => one("    return bitcast<f64>(bitcast<u64>(x) & 18446744073575333888lu);\n"),
        "cut" => one("    return bitcast<f64>(bitcast<u64>(x) & 18446744073709551600lu);\n"),
        "pow2" => "fn @(k: i32) -> f64 {\n    return bitcast<f64>(u64(k + 1023) << 52u);\n}\n".into(),
        // x 2^k for k in -2040..=2040.
        "scale" => {
            "fn @(x: f64, k: i32) -> f64 {\n    let a = k >> 1u;\n    return x * h_pow2_f64(a) * h_pow2_f64(k - a);\n}\n"
                .into()
        }
        "expm1_near" => {
            let c: Vec<f64> = (2..=14).map(|n| 1.0 / factorial(n)).collect();
            one(&format!("    return x * x * {} + x;\n", p("x", &c)))
        }
        // ln 2 is split into a head of 32 bits, whose products with k are exact, and a tail.
        "exp_rest" => {
            "fn @(x: f64, k: f64) -> f64 {\n    return (x - k * 0.6931471803691238lf) - k * 1.9082149292705877e-10lf;\n}\n".into()
        }
        "exp" => one(
            "    if (h_isnan_f64(x)) {\n        return x;\n    }\n    let c = clamp(x, -750.0lf, 720.0lf);\n    let k = round(c * 1.4426950408889634lf);\n    \
             return h_scale_f64(h_expm1_near_f64(h_exp_rest_f64(c, k)) + 1.0lf, i32(k));\n",
        ),
        "exp2" => one(
            "    if (h_isnan_f64(x)) {\n        return x;\n    }\n    let c = clamp(x, -1100.0lf, 1030.0lf);\n    let k = round(c);\n    \
             return h_scale_f64(h_expm1_near_f64((c - k) * 0.6931471805599453lf) + 1.0lf, i32(k));\n",
        ),
        "expm1" => one(
            "    if (x == 0.0lf || h_isnan_f64(x)) {\n        return x;\n    }\n    let c = clamp(x, -60.0lf, 720.0lf);\n    let k = round(c * 1.4426950408889634lf);\n    \
             let e = h_expm1_near_f64(h_exp_rest_f64(c, k));\n    if (c > 60.0lf) {\n        return h_scale_f64(e + 1.0lf, i32(k));\n    }\n    \
             let s = h_pow2_f64(i32(k));\n    return s * e + (s - 1.0lf);\n",
        ),
        "log_parts" => {
            "struct LogParts64 {\n    e: f64,\n    f: f64,\n}\nfn @(x: f64) -> LogParts64 {\n    let tiny = bitcast<u64>(x) < 4503599627370496lu;\n    \
             let y = select(x, x * 4503599627370496.0lf, tiny);\n    let b = bitcast<u64>(y) - 4604544271217802189lu;\n    \
             let m = bitcast<f64>((b & 4503599627370495lu) + 4604544271217802189lu);\n    \
             return LogParts64(f64(i32(bitcast<i64>(b) >> 52u)) - select(0.0lf, 52.0lf, tiny), m - 1.0lf);\n}\n"
                .into()
        }
        // log(1 + x) - (x - x^2 / 2), from log(1 + x) = 2 atanh(x / (2 + x)).
        "log_cubic" => {
            let c: Vec<f64> = (1..=11).map(|n| 2.0 / (2 * n + 1) as f64).collect();
            one(&format!(
                "    let s = x / (2.0lf + x);\n    let z = s * s;\n    return s * (0.5lf * x * x + z * {});\n",
                p("z", &c)
            ))
        }
        "log_tail" => one("    return h_log_cubic_f64(x) - 0.5lf * x * x;\n"),
        "log" => one(&format!(
            "{}    let p = h_log_parts_f64(x);\n    \
             return p.e * 0.6931471803691238lf + (p.f + (p.e * 1.9082149292705877e-10lf + h_log_tail_f64(p.f)));\n",
            log_edges("f64")
        )),
        "log2" => one(&format!(
            "{}    let p = h_log_parts_f64(x);\n    let t = h_log_tail_f64(p.f);\n    \
             return (p.f * 0.44269504088896343lf + (t * 0.44269504088896343lf + t)) + p.f + p.e;\n",
            log_edges("f64")
        )),
        "log1p" => one(
            "    if (x == -1.0lf) {\n        return -h_inf_f64();\n    }\n    if (abs(x) < 1e-16lf || h_isnan_f64(x) || h_isinf_f64(x)) {\n        return select(x, h_nan_f64(), x < -1.0lf);\n    }\n    \
             let u = h_cut_f64(1.0lf + x);\n    return h_log_f64(u) + (x - (u - 1.0lf)) / u;\n",
        ),
        _ => return None,
    })
}

/// Trigonometric functions, the error function and the remainder.
fn other_f64(name: &str) -> Option<String> {
    let p = |x: &str, c: &[f64]| horner(x, c, Ty::F64);
    Some(match name {
        "trig" => trig64(&p),
        // Halves the angle twice, so that few terms of the series suffice.
        "atan_unit" => {
            let c: Vec<f64> =
                (1..=12).map(|n| (if n % 2 == 1 { -1.0 } else { 1.0 }) / (2 * n + 1) as f64).collect();
            one(&format!(
                "    let a = x / (1.0lf + sqrt(1.0lf + x * x));\n    let b = a / (1.0lf + sqrt(1.0lf + a * a));\n    let s = b * b;\n    \
                 return 4.0lf * (s * b * {} + b);\n",
                p("s", &c)
            ))
        }
        "atan" => one(
            "    if (h_isnan_f64(x)) {\n        return x;\n    }\n    let a = abs(x);\n    if (h_isinf_f64(x)) {\n        return h_copysign_f64(1.5707963267948966lf, x);\n    }\n    \
             let r = h_atan_unit_f64(select(a, 1.0lf / a, a > 1.0lf));\n    return h_copysign_f64(select(r, 1.5707963267948966lf - r, a > 1.0lf), x);\n",
        ),
        "asin" => one(
            "    let a = abs(x);\n    if (!(a <= 1.0lf) || h_isnan_f64(x)) {\n        return h_nan_f64();\n    }\n    return h_atan2_f64(x, sqrt((1.0lf - a) * (1.0lf + a)));\n",
        ),
        "acos" => one(
            "    let a = abs(x);\n    if (!(a <= 1.0lf) || h_isnan_f64(x)) {\n        return h_nan_f64();\n    }\n    return h_atan2_f64(sqrt((1.0lf - a) * (1.0lf + a)), x);\n",
        ),
        // Series and continued fraction from Abramowitz and Stegun 7.1.6 and 7.1.14.
        "erfc_pos" => one(
            "    if (x < 2.5lf) {\n        var t = x;\n        var s = x;\n        for (var n = 1; n < 60; n++) {\n            \
             t *= 2.0lf * x * x / f64(2 * n + 1);\n            s += t;\n        }\n        return 1.0lf - 1.1283791670955126lf * h_exp_f64(-x * x) * s;\n    }\n    \
             var f = 0.0lf;\n    for (var k = 120; k > 0; k--) {\n        f = f64(k) * 0.5lf / (x + f);\n    }\n    \
             return h_exp_f64(-x * x) * 0.5641895835477563lf / (x + f);\n",
        ),
        "erf" => one(
            "    if (h_isnan_f64(x)) {\n        return x;\n    }\n    let a = min(abs(x), 30.0lf);\n    if (a < 2.5lf) {\n        var t = a;\n        var s = a;\n        for (var n = 1; n < 60; n++) {\n            \
             t *= 2.0lf * a * a / f64(2 * n + 1);\n            s += t;\n        }\n        return h_copysign_f64(1.1283791670955126lf * h_exp_f64(-a * a) * s, x);\n    }\n    \
             return h_copysign_f64(1.0lf - h_erfc_pos_f64(a), x);\n",
        ),
        "fmod" => two(
            "    let a = bitcast<u64>(x) & 9223372036854775807lu;\n    let b = bitcast<u64>(y) & 9223372036854775807lu;\n    \
             if (b == 0lu || a >= 9218868437227405312lu || b > 9218868437227405312lu) {\n        return h_nan_f64();\n    }\n    if (a < b) {\n        return x;\n    }\n    \
             let ea = max(u32(a >> 52u), 1u);\n    let eb = max(u32(b >> 52u), 1u);\n    \
             var m = (a & 4503599627370495lu) | select(0lu, 4503599627370496lu, a >= 4503599627370496lu);\n    \
             let d = (b & 4503599627370495lu) | select(0lu, 4503599627370496lu, b >= 4503599627370496lu);\n    var n = ea - eb;\n    while (n > 0u) {\n        \
             let s = min(n, 11u);\n        m = (m % d) << s;\n        n -= s;\n    }\n    m %= d;\n    \
             return h_copysign_f64(h_scale_f64(f64(m), i32(eb) - 1075), x);\n",
        ),
        _ => return None,
    })
}
