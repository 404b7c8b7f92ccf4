//! Functions that the WGSL writer emits if they are called. More functions, mostly those of scalar ops, are
//! in `../functions.rs` and `math.rs`. In the texts, `$T` stands for the type, `$U` and `$I` for the integers
//! of the same width, `$s` for the type's name, and `@` for the function's own name.

use super::super::functions::{self, wgsl_infinity, wgsl_magnitude};
use super::{float_constant, int_constant, math, ty_name};
use crate::dtype::DType;
use crate::kernel::ir::Ty;

/// Definition of a helper; `None` if there is no such helper.
pub(super) fn definition(name: &str) -> Option<String> {
    if let Some(text) = fixed(name) {
        return Some(text.replace('@', name));
    }
    let (base, suffix) = name.rsplit_once('_')?;
    let ty =
        [Ty::I32, Ty::U32, Ty::I64, Ty::U64, Ty::F32, Ty::F64].into_iter().find(|t| t.name() == suffix)?;
    let text = if let Some(to) = base.strip_prefix("h_sat_") {
        saturate(DType::from_name(to)?, ty)
    } else if let Some(op) = base.strip_prefix("h_subgroup_") {
        subgroup(op, ty)?
    } else if let Some(text) = functions::in_wgsl(base, ty) {
        text
    } else if ty.is_float() {
        float(base, ty).or_else(|| math::definition(base, ty))?
    } else {
        int(base, ty)?
    };
    let (u, i) = match ty {
        Ty::I64 | Ty::U64 | Ty::F64 => ("u64", "i64"),
        _ => ("u32", "i32"),
    };
    let text = text.replace("$T", ty_name(ty)).replace("$U", u).replace("$I", i).replace("$s", ty.name());
    Some(text.replace('@', name))
}

fn fixed(name: &str) -> Option<String> {
    let text = match name {
        // WGSL rejects constant expressions that are infinite or NaN. A call is not a constant expression.
        "h_make_f32" => "fn @(u: u32) -> f32 {\n    return bitcast<f32>(u);\n}\n",
        "h_make_f64" => "fn @(u: u64) -> f64 {\n    return bitcast<f64>(u);\n}\n",
        "h_join_u64" => "fn @(lo: u32, hi: u32) -> u64 {\n    return u64(lo) | (u64(hi) << 32u);\n}\n",
        "h_widen_i32" => {
            "fn @(x: i32) -> i64 {\n    return bitcast<i64>(h_join_u64(bitcast<u32>(x), bitcast<u32>(x >> 31u)));\n}\n"
        }
        "h_load_bool" => {
            "fn @(w: u32, i: u32) -> bool {\n    return ((w >> ((i & 3u) * 8u)) & 255u) != 0u;\n}\n"
        }
        "h_load_u8" => "fn @(w: u32, i: u32) -> u32 {\n    return (w >> ((i & 3u) * 8u)) & 255u;\n}\n",
        "h_load_i8" => {
            "fn @(w: u32, i: u32) -> i32 {\n    return bitcast<i32>((w >> ((i & 3u) * 8u)) << 24u) >> 24u;\n}\n"
        }
        "h_load_u16" => "fn @(w: u32, i: u32) -> u32 {\n    return (w >> ((i & 1u) * 16u)) & 65535u;\n}\n",
        "h_load_i16" => {
            "fn @(w: u32, i: u32) -> i32 {\n    return bitcast<i32>((w >> ((i & 1u) * 16u)) << 16u) >> 16u;\n}\n"
        }
        "h_load_f16" => {
            "fn @(w: u32, i: u32) -> f32 {\n    return h_f16_f32((w >> ((i & 1u) * 16u)) & 65535u);\n}\n"
        }
        "h_load_bf16" => {
            "fn @(w: u32, i: u32) -> f32 {\n    return bitcast<f32>((w >> ((i & 1u) * 16u)) << 16u);\n}\n"
        }
        "h_bits_bool" => "fn @(x: bool) -> u32 {\n    return select(0u, 1u, x);\n}\n",
        "h_bits_u8" => "fn @(x: u32) -> u32 {\n    return x & 255u;\n}\n",
        "h_bits_i8" => "fn @(x: i32) -> u32 {\n    return bitcast<u32>(x) & 255u;\n}\n",
        "h_bits_u16" => "fn @(x: u32) -> u32 {\n    return x & 65535u;\n}\n",
        "h_bits_i16" => "fn @(x: i32) -> u32 {\n    return bitcast<u32>(x) & 65535u;\n}\n",
        "h_bits_f16" => "fn @(x: f32) -> u32 {\n    return h_f32_f16(x);\n}\n",
        "h_bits_bf16" => "fn @(x: f32) -> u32 {\n    return h_f32_bf16(x);\n}\n",
        "h_bf16_f32" => "fn @(u: u32) -> f32 {\n    return bitcast<f32>(u << 16u);\n}\n",
        "h_f32_bf16" => {
            "fn @(x: f32) -> u32 {\n    let u = bitcast<u32>(x);\n    if ((u & 0x7fffffffu) > 0x7f800000u) {\n        \
             return (u >> 16u) | 64u;\n    }\n    return (u + 0x7fffu + ((u >> 16u) & 1u)) >> 16u;\n}\n"
        }
        // WGSL's own packing functions may round in either direction and may flush denormals to zero, but
        // denormals of f16 must be kept. Below 2^-14 the significand counts multiples of 2^-24.
        "h_f16_f32" => {
            "fn @(h: u32) -> f32 {\n    let sign = (h & 0x8000u) << 16u;\n    let rest = h & 0x7fffu;\n    if (rest < 0x400u) {\n        \
             return bitcast<f32>(bitcast<u32>(f32(rest) * 5.9604644775390625e-8) | sign);\n    }\n    \
             let bits = select((rest << 13u) + 0x38000000u, (rest << 13u) | 0x7f800000u, rest >= 0x7c00u);\n    \
             return bitcast<f32>(bits | sign);\n}\n"
        }
        "h_f32_f16" => {
            "fn @(x: f32) -> u32 {\n    let u = bitcast<u32>(x);\n    let sign = (u >> 16u) & 0x8000u;\n    let a = u & 0x7fffffffu;\n    \
             if (a >= 0x47800000u) {\n        return sign | select(0x7c00u, 0x7e00u, a > 0x7f800000u);\n    }\n    \
             if (a >= 0x38800000u) {\n        return sign | ((a - 0x38000000u + 0xfffu + ((a >> 13u) & 1u)) >> 13u);\n    }\n    \
             if (a < 0x33000000u) {\n        return sign;\n    }\n    let m = (a & 0x7fffffu) | 0x800000u;\n    let s = 126u - (a >> 23u);\n    \
             let half = 1u << (s - 1u);\n    return sign | ((m + half - 1u + ((m >> s) & 1u)) >> s);\n}\n"
        }
        "h_round_f16_f32" => "fn @(x: f32) -> f32 {\n    return h_f16_f32(h_f32_f16(x));\n}\n",
        "h_round_bf16_f32" => "fn @(x: f32) -> f32 {\n    return h_bf16_f32(h_f32_bf16(x));\n}\n",
        "h_round_f16_f64" => "fn @(x: f64) -> f32 {\n    return h_f16_f32(h_f32_f16(h_odd_f64(x)));\n}\n",
        "h_round_bf16_f64" => "fn @(x: f64) -> f32 {\n    return h_bf16_f32(h_f32_bf16(h_odd_f64(x)));\n}\n",
        // Rounds to odd, so that a second rounding to a shorter type is correct.
        "h_odd_f64" => {
            "fn @(x: f64) -> f32 {\n    let f = f32(x);\n    var u = bitcast<u32>(f);\n    if (!h_isnan_f64(x) && !(f64(f) == x) && (u & 1u) == 0u) {\n        \
             u = select(u - 1u, u + 1u, abs(f64(f)) < abs(x));\n    }\n    return bitcast<f32>(u);\n}\n"
        }
        _ => return None,
    };
    Some(text.to_string())
}

/// Float to integer like Rust's `as`: truncates and saturates; NaN becomes 0.
fn saturate(to: DType, from: Ty) -> String {
    let (lo, hi) = to.range();
    // A float may be unable to represent a 32- or 64-bit limit, so the power of two above is used.
    let above = if to.bits() >= 32 { 2f64.powi(hi.log2().ceil() as i32) } else { hi };
    let t = Ty::of(to);
    let (lo_i, hi_i) = match to {
        DType::I64 => (i64::MIN as u64, i64::MAX as u64),
        DType::U64 => (0, u64::MAX),
        _ => (lo as i64 as u64, hi as i64 as u64),
    };
    let c = |v: f64| float_constant(v, from);
    format!(
        "fn @(x: $T) -> {r} {{\n    if (h_isnan_$s(x)) {{\n        return {r}(0);\n    }}\n    if (x <= {}) {{\n        return {};\n    }}\n    \
         if (x >= {}) {{\n        return {};\n    }}\n    return {r}(x);\n}}\n",
        c(lo),
        int_constant(lo_i, t),
        c(above),
        int_constant(hi_i, t),
        r = ty_name(t)
    )
}

fn subgroup(op: &str, ty: Ty) -> Option<String> {
    let combine = match (op, ty.is_float()) {
        ("add", _) => "x + y",
        ("mul", _) => "x * y",
        ("min", true) => "h_min_$s(x, y)",
        ("max", true) => "h_max_$s(x, y)",
        ("min", false) => "min(x, y)",
        ("max", false) => "max(x, y)",
        _ => return None,
    };
    Some(format!(
        "fn @(value: $T, width: u32) -> $T {{\n    var x = value;\n    for (var m = width / 2u; m > 0u; m /= 2u) {{\n        \
         let y = subgroupShuffleXor(x, m);\n        x = {combine};\n    }}\n    return x;\n}}\n"
    ))
}

fn float(base: &str, ty: Ty) -> Option<String> {
    let inf = wgsl_infinity(ty);
    let magnitude = |x: &str| wgsl_magnitude(x, ty);
    let test = |body: &str| format!("fn @(x: $T, y: $T) -> bool {{\n    return {body};\n}}\n");
    let numbers = "!(h_isnan_$s(x) || h_isnan_$s(y))";
    Some(match base {
        "h_true" => format!("fn @(x: $T) -> bool {{\n    return {} != 0;\n}}\n", magnitude("x")),
        "h_nan" => "fn @() -> $T {\n    return h_make_$s(%nan);\n}\n".replace("%nan", quiet_nan(ty)),
        "h_inf" => format!("fn @() -> $T {{\n    return h_make_$s({inf});\n}}\n"),
        "h_eq" => test(&format!("x == y && {numbers}")),
        // The `!=` of WGSL compilers is false for NaN.
        "h_ne" => test("!h_eq_$s(x, y)"),
        "h_lt" => test(&format!("x < y && {numbers}")),
        "h_le" => test(&format!("x <= y && {numbers}")),
        "h_gt" => test(&format!("x > y && {numbers}")),
        "h_ge" => test(&format!("x >= y && {numbers}")),
        // The sign is copied from the operand, because in f64 not every device keeps it for values that round
        // to zero.
        "h_round" | "h_trunc" | "h_ceil" => format!(
            "fn @(x: $T) -> $T {{\n    return h_copysign_$s({}(x), x);\n}}\n",
            base.trim_start_matches("h_")
        ),
        // WGSL allows the quotient an error of 2.5 ulps, which can move a quantised value to the next
        // integer. So the quotient is corrected by its remainder, which is computed from exact products of
        // halves of the significands.
        "h_div" => format!(
            "fn @(x: $T, y: $T) -> $T {{\n    let q = x / y;\n    let p = q * y;\n    let a = h_head_$s(q);\n    let b = h_head_$s(y);\n    \
             let e = ((a * b - p) + a * (y - b) + (q - a) * b) + (q - a) * (y - b);\n    let c = q + ((x - p) - e) / y;\n    \
             return select(c, q, {} >= {inf} || {} == 0);\n}}\n",
            magnitude("c"),
            magnitude("c")
        ),
        _ => return None,
    })
}

fn quiet_nan(ty: Ty) -> &'static str {
    if ty == Ty::F64 { "9221120237041090560lu" } else { "0x7fc00000u" }
}

fn int(base: &str, ty: Ty) -> Option<String> {
    let unsigned = matches!(ty, Ty::U32 | Ty::U64);
    let two = |body: &str| format!("fn @(x: $T, y: $T) -> $T {{\n    {body}\n}}\n");
    let wide = matches!(ty, Ty::I64 | Ty::U64);
    Some(match base {
        // Upper half of the product.
        "h_mulhi" => two(
            "let l = (x & %m) * (y & %m);\n    let m = (x >> %h) * (y & %m) + (l >> %h);\n    let n = (x & %m) * (y >> %h) + (m & %m);\n    \
             return (x >> %h) * (y >> %h) + (m >> %h) + (n >> %h);",
        )
        .replace("%m", if wide { "4294967295lu" } else { "65535u" })
        .replace("%h", if wide { "32u" } else { "16u" }),
        "h_turn_word" => math::turn_words(ty),
        "h_int_bf16" => {
            // Rounds only once: the bits beyond the 24 that f32 holds are merged into one sticky bit.
            let (neg, abs) =
                if unsigned { ("false", "x") } else { ("x < 0", "select($U(x), ~$U(x) + 1, x < 0)") };
            format!(
                "fn @(x: $T) -> f32 {{\n    var u: $U = {abs};\n    var sticky = $U(0);\n    var scale = 1.0;\n    while ((u >> 24u) != 0) {{\n        \
                 sticky |= u & 1;\n        u >>= 1u;\n        scale *= 2.0;\n    }}\n    let f = h_round_bf16_f32(f32(u | sticky)) * scale;\n    \
                 return select(f, -f, {neg});\n}}\n"
            )
        }
        _ => return None,
    })
}
