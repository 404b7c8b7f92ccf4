//! Functions that the C renderer emits if they are used. The helpers that scalar ops call are in
//! `functions.rs`. In the texts, `$T` is the type, `$U` the unsigned type of the same width, `$W` the width
//! in bits, `$s` the type's name, `@` the function's own name, and `%name(` a math function on the type.

use super::dialect::Dialect;
use super::functions;
use crate::dtype::DType;
use crate::kernel::ir::Ty;

/// Definition of a helper without its function qualifier; `None` if there is no such helper.
pub(super) fn definition(name: &str, d: &Dialect) -> Option<String> {
    if let Some((_, text)) = d.helpers.iter().chain(d.matrix_helpers).find(|(n, _)| *n == name) {
        return Some(text.replace('@', name));
    }
    let fixed = match name {
        "h_bf16_f32" => Some(format!(
            "float @({} x) {{\n    return {};\n}}\n",
            d.element(DType::BF16),
            bits(d, Ty::U32, Ty::F32, &format!("({})x << 16", d.ty(Ty::U32)))
        )),
        "h_f32_bf16" => Some(format!(
            "{h} @(float x) {{\n    {u} u = {};\n    if ((u & 0x7fffffffu) > 0x7f800000u) return ({h})((u >> 16) | 0x40u);\n    \
             return ({h})((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);\n}}\n",
            bits(d, Ty::F32, Ty::U32, "x"),
            h = d.element(DType::BF16),
            u = d.ty(Ty::U32)
        )),
        "h_round_bf16_f32" => Some("float @(float x) {\n    return h_bf16_f32(h_f32_bf16(x));\n}\n".into()),
        "h_round_bf16_f64" => {
            Some("float @(double x) {\n    return h_bf16_f32(h_f32_bf16(h_odd_f64(x)));\n}\n".into())
        }
        // Rounds to odd, so that a second rounding to a shorter type is correct.
        "h_odd_f64" => Some(format!(
            "float @(double x) {{\n    float f = (float)x;\n    {u} u = {};\n    if (x == x && (double)f != x && (u & 1u) == 0u) {{\n        \
             double a = f < 0 ? -(double)f : (double)f;\n        double b = x < 0 ? -x : x;\n        u = a < b ? u + 1u : u - 1u;\n    }}\n    return {};\n}}\n",
            bits(d, Ty::F32, Ty::U32, "f"),
            bits(d, Ty::U32, Ty::F32, "u"),
            u = d.ty(Ty::U32)
        )),
        "h_dot4" => Some(format!(
            "int @({u} a, {u} b, int c) {{\n    for (int i = 0; i < 32; i += 8) c += (int)({s})(a >> i) * (int)({s})(b >> i);\n    return c;\n}}\n",
            u = d.ty(Ty::U32),
            s = d.element(DType::I8)
        )),
        _ => None,
    };
    if let Some(t) = fixed {
        return Some(t.replace('@', name));
    }
    let (base, suffix) = name.rsplit_once('_')?;
    let ty = [Ty::Bool, Ty::I32, Ty::U32, Ty::I64, Ty::U64, Ty::F32, Ty::F64]
        .into_iter()
        .find(|t| t.name() == suffix)?;
    let text = if let Some(to) = base.strip_prefix("h_sat_") {
        saturate(DType::from_name(to)?, ty, d)
    } else if base == "h_int_bf16" {
        int_to_bf16(ty, d)
    } else if let Some(op) = base.strip_prefix("h_subgroup_") {
        subgroup(op, ty, d)?
    } else {
        functions::in_c(base, ty, d).or_else(|| only_c(base, ty))?
    };
    let (u, width) = match ty {
        Ty::I64 | Ty::U64 | Ty::F64 => (Ty::U64, "64"),
        _ => (Ty::U32, "32"),
    };
    let text = text
        .replace("$T", d.ty(ty))
        .replace("$U", d.ty(u))
        .replace("$W", width)
        .replace("$s", ty.name())
        .replace('@', name);
    Some(spell_math(&text, ty, d))
}

/// Replaces `%name(` by the dialect's name of the math function.
fn spell_math(text: &str, ty: Ty, d: &Dialect) -> String {
    let mut out = String::new();
    for (i, part) in text.split('%').enumerate() {
        // The remainder operator is written `% ` and is copied unchanged.
        match part.split_once('(') {
            Some((f, rest)) if i > 0 && !f.is_empty() && f.bytes().all(|c| c.is_ascii_alphanumeric()) => {
                out.push_str(&math(f, ty, d));
                out.push('(');
                out.push_str(rest);
            }
            _ => {
                if i > 0 {
                    out.push('%');
                }
                out.push_str(part);
            }
        }
    }
    out
}

/// Name of a C99 math function on a type.
pub(super) fn math(f: &str, ty: Ty, d: &Dialect) -> String {
    if d.math_missing.contains(&f) {
        format!("h_{f}_{}", ty.name())
    } else if ty == Ty::F64 {
        f.to_string()
    } else {
        format!("{f}{}", d.math_f32)
    }
}

pub(super) fn bits(d: &Dialect, from: Ty, to: Ty, x: &str) -> String {
    (d.bitcast)(from, to).replace("$0", x)
}

/// Float to integer like Rust's `as`: truncates and saturates; NaN becomes 0.
fn saturate(to: DType, from: Ty, d: &Dialect) -> String {
    let (lo, hi) = to.range();
    let c = |v: f64| super::c::float_constant(v, from, d);
    // A float may be unable to represent a 32- or 64-bit limit, so the power of two above is used.
    let above = if to.bits() >= 32 { c(2f64.powi(hi.log2().ceil() as i32)) } else { c(hi) };
    let t = Ty::of(to);
    let (lo_i, hi_i) = match to {
        DType::I64 => {
            (super::c::int_constant(i64::MIN as u64, t, d), super::c::int_constant(i64::MAX as u64, t, d))
        }
        DType::U64 => (super::c::int_constant(0, t, d), super::c::int_constant(u64::MAX, t, d)),
        _ => (super::c::int_constant(lo as i64 as u64, t, d), super::c::int_constant(hi as i64 as u64, t, d)),
    };
    format!(
        "{r} @($T x) {{\n    return x != x ? 0 : x <= {} ? {lo_i} : x >= {above} ? {hi_i} : ({r})x;\n}}\n",
        c(lo),
        r = d.ty(t)
    )
}

/// Integer to bf16 with one rounding. Bits beyond the 24 that f32 holds are kept as a sticky bit.
fn int_to_bf16(ty: Ty, d: &Dialect) -> String {
    let _ = d;
    let (neg, abs) = match ty {
        Ty::I32 | Ty::I64 => ("x < 0", "x < 0 ? ($U)0 - ($U)x : ($U)x"),
        _ => ("false", "x"),
    };
    format!(
        "float @($T x) {{\n    $U u = {abs};\n    $U sticky = 0;\n    float scale = 1;\n    while (u >> 24) {{\n        \
         sticky |= u & 1;\n        u >>= 1;\n        scale *= 2;\n    }}\n    float f = h_round_bf16_f32((float)(u | sticky)) * scale;\n    \
         return {neg} ? -f : f;\n}}\n"
    )
}

fn subgroup(op: &str, ty: Ty, d: &Dialect) -> Option<String> {
    let (a, f) = match (op, ty.is_float()) {
        ("add", _) => ("x + y", ""),
        ("mul", _) => ("x * y", ""),
        ("min", true) => ("h_min_$s(x, y)", ""),
        ("max", true) => ("h_max_$s(x, y)", ""),
        ("min", false) => ("x < y ? x : y", ""),
        ("max", false) => ("x > y ? x : y", ""),
        _ => return None,
    };
    let shuffle = d.shuffle_xor.replace("$0", "x").replace("$1", "m");
    let width = if d.language == super::Language::Metal { "width" } else { d.subgroup_size };
    let extra = if d.language == super::Language::Metal { ", int width" } else { f };
    Some(format!(
        "$T @($T x{extra}) {{\n    for (int m = {width} / 2; m > 0; m /= 2) {{\n        $T y = {shuffle};\n        x = {a};\n    }}\n    return x;\n}}\n"
    ))
}

/// Functions that exist in C only: the WGSL renderer writes these operations without a function.
fn only_c(base: &str, ty: Ty) -> Option<String> {
    let one = |body: &str| format!("$T @($T x) {{\n    {body}\n}}\n");
    let two = |body: &str| format!("$T @($T x, $T y) {{\n    {body}\n}}\n");
    Some(match base {
        "h_not" if ty == Ty::Bool => one("return !x;"),
        "h_not" => one("return ~x;"),
        "h_imin" => two("return x < y ? x : y;"),
        "h_imax" => two("return x > y ? x : y;"),
        // Index arithmetic: the dividend is not negative and the divisor is positive, so unsigned division,
        // which is cheaper, is correct.
        "h_udiv" => two("return ($T)(($U)x / ($U)y);"),
        "h_urem" => two("return ($T)(($U)x % ($U)y);"),
        _ => return None,
    })
}
