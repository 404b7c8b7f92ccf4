//! The functions that scalar ops call (`h_name` in the C spelling of `crate::ops::element_wise`), each in C
//! and in WGSL side by side. Functions of C's math library need no row: C has them, and `wgsl/math.rs`
//! defines them in WGSL.
//!
//! Both texts have placeholders: `$T` is the type as the language spells it (`float`), `$s` its name in the
//! kernel IR (`f32`), `$U` the unsigned type of the same width, `@` the function's own name. In C, `%name(`
//! is a math function on the type, and `$W` the type's width in bits. In WGSL, `$I` is the signed type of the
//! same width, and `h_name_$s(` calls another helper, such as one of this table or of `wgsl/math.rs`.

use super::dialect::Dialect;
use super::helpers::bits;
use crate::kernel::ir::Ty;

/// A function on some types. A function whose text depends on the class of the type has a row for each class.
struct Function {
    name: &'static str,
    on: &'static [Ty],
    c: fn(&C<'_>) -> String,
    wgsl: fn(Ty) -> String,
}

const FLOATS: &[Ty] = &[Ty::F32, Ty::F64];
const SIGNED: &[Ty] = &[Ty::I32, Ty::I64];
const UNSIGNED: &[Ty] = &[Ty::U32, Ty::U64];

/// The type and the dialect, on which a C text may depend.
struct C<'a> {
    ty: Ty,
    d: &'a Dialect,
}

impl C<'_> {
    fn number(&self, v: f64) -> String {
        super::c::float_constant(v, self.ty, self.d)
    }

    /// The bits of infinity.
    fn infinity(&self) -> String {
        match self.ty {
            Ty::F64 => format!("0x7ff0000000000000{}", self.d.u64_suffix),
            _ => "0x7f800000u".to_string(),
        }
    }

    /// The bits of `x` without the sign.
    fn magnitude(&self) -> String {
        let (to, mask) = match self.ty {
            Ty::F64 => (Ty::U64, format!("0x7fffffffffffffff{}", self.d.u64_suffix)),
            _ => (Ty::U32, "0x7fffffffu".to_string()),
        };
        format!("({} & {mask})", bits(self.d, self.ty, to, "x"))
    }
}

/// Definition in C of a function on a type; `None` if it has no row.
pub(super) fn in_c(name: &str, ty: Ty, d: &Dialect) -> Option<String> {
    find(name, ty).map(|f| (f.c)(&C { ty, d }))
}

/// Definition in WGSL of a function on a type; `None` if it has no row.
pub(super) fn in_wgsl(name: &str, ty: Ty) -> Option<String> {
    find(name, ty).map(|f| (f.wgsl)(ty))
}

fn find(name: &str, ty: Ty) -> Option<&'static Function> {
    FUNCTIONS.iter().find(|f| f.name == name && f.on.contains(&ty))
}

fn c1(body: &str) -> String {
    format!("$T @($T x) {{\n    {body}\n}}\n")
}

fn c2(body: &str) -> String {
    format!("$T @($T x, $T y) {{\n    {body}\n}}\n")
}

fn w1(body: &str) -> String {
    format!("fn @(x: $T) -> $T {{\n    {body}\n}}\n")
}

fn w2(body: &str) -> String {
    format!("fn @(x: $T, y: $T) -> $T {{\n    {body}\n}}\n")
}

/// The bits of `x` without the sign, in WGSL.
pub(super) fn wgsl_magnitude(x: &str, ty: Ty) -> String {
    let mask = if ty == Ty::F64 { "9223372036854775807lu" } else { "0x7fffffffu" };
    format!("(bitcast<$U>({x}) & {mask})")
}

/// The bits of infinity, in WGSL.
pub(super) fn wgsl_infinity(ty: Ty) -> &'static str {
    if ty == Ty::F64 { "9218868437227405312lu" } else { "0x7f800000u" }
}

const FUNCTIONS: &[Function] = &[
    Function {
        name: "h_sign",
        on: FLOATS,
        c: |_| c1("return x != x ? x : ($T)((x > 0) - (x < 0));"),
        // Computed in integers, so that the result is +0 for both zeros.
        wgsl: |_| {
            w1("if (h_isnan_$s(x)) {\n        return x;\n    }\n    \
                return $T(select(0i, 1i, x > 0.0) - select(0i, 1i, x < 0.0));")
        },
    },
    Function {
        name: "h_rsqrt",
        on: FLOATS,
        c: |_| c1("return 1 / %sqrt(x);"),
        wgsl: |_| w1("return 1.0 / sqrt(x);"),
    },
    Function {
        name: "h_sigmoid",
        on: FLOATS,
        c: |_| c1("return 1 / (1 + %exp(-x));"),
        // The exponential is at most 1, so nothing overflows.
        wgsl: |_| w1("let e = h_exp_$s(-abs(x));\n    return select($T(1.0), e, x < 0.0) / (1.0 + e);"),
    },
    Function {
        name: "h_silu",
        on: FLOATS,
        c: |_| c1("return x / (1 + %exp(-x));"),
        // Multiplies twice by the exponential of half the argument. The exponential of the whole argument
        // could be a denormal number, which has fewer digits.
        wgsl: |_| {
            w1("let h = h_exp_$s(-0.5 * abs(x));\n    if (x < 0.0) {\n        \
                return x * h / (h * h + 1.0) * h;\n    }\n    return x / (h * h + 1.0);")
        },
    },
    Function {
        name: "h_gelu",
        on: FLOATS,
        // 1 + erf(z) cancels if erf(z) is near -1; erfc(-z) does not.
        c: |c| {
            let (half, root) = (c.number(0.5), c.number(std::f64::consts::FRAC_1_SQRT_2));
            c1(&format!("return {half} * x * %erfc(-x * {root});"))
        },
        wgsl: |ty| match ty {
            Ty::F64 => w1(
                "if (h_isnan_f64(x)) {\n        return x;\n    }\n    let a = min(abs(x), 60.0lf);\n    if (a < 1.0lf) {\n        \
                return 0.5lf * x * (1.0lf + h_erf_f64(x * 0.7071067811865476lf));\n    }\n    let c = 0.5lf * h_erfc_pos_f64(a * 0.7071067811865476lf);\n    \
                return x * select(1.0lf - c, c, x < 0.0lf);",
            ),
            _ => w1(
                "if (h_isnan_f32(x)) {\n        return x;\n    }\n    let a = abs(x);\n    let c = 0.5 * h_erfc_pos_f32(a * 0.70710678, a, 0.5);\n    \
                return x * select(1.0 - c, c, x < 0.0);",
            ),
        },
    },
    Function {
        name: "h_gelu_tanh",
        on: FLOATS,
        // 0.5 (1 + tanh u) = 1 / (1 + exp(-2 u)).
        c: |c| {
            let (k, cubic) = (c.number(-2.0 * 0.797_884_560_802_865_4), c.number(0.044715));
            c1(&format!("return x / (1 + %exp({k} * (x + {cubic} * x * x * x)));"))
        },
        wgsl: |_| w1("return x * h_sigmoid_$s(x * (x * x * 0.07135481627260025 + 1.5957691216057308));"),
    },
    Function {
        name: "h_relu",
        on: FLOATS,
        c: |_| c1("return x < 0 ? 0 : x;"),
        wgsl: |_| w1("return select($T(0.0), x, x > 0.0 || h_isnan_$s(x));"),
    },
    Function {
        name: "h_isnan",
        on: FLOATS,
        c: |c| format!("bool @($T x) {{\n    return {} > {};\n}}\n", c.magnitude(), c.infinity()),
        wgsl: |ty| {
            let (x, inf) = (wgsl_magnitude("x", ty), wgsl_infinity(ty));
            format!("fn @(x: $T) -> bool {{\n    return {x} > {inf};\n}}\n")
        },
    },
    Function {
        name: "h_isinf",
        on: FLOATS,
        c: |c| format!("bool @($T x) {{\n    return {} == {};\n}}\n", c.magnitude(), c.infinity()),
        wgsl: |ty| {
            let (x, inf) = (wgsl_magnitude("x", ty), wgsl_infinity(ty));
            format!("fn @(x: $T) -> bool {{\n    return {x} == {inf};\n}}\n")
        },
    },
    Function {
        name: "h_min",
        on: FLOATS,
        c: |_| c2("return x < y || x != x ? x : y;"),
        wgsl: |_| wgsl_extreme("<"),
    },
    Function {
        name: "h_max",
        on: FLOATS,
        c: |_| c2("return x > y || x != x ? x : y;"),
        wgsl: |_| wgsl_extreme(">"),
    },
    Function {
        name: "h_mod",
        on: FLOATS,
        c: |_| c2("$T r = %fmod(x, y);\n    return r != 0 && (r < 0) != (y < 0) ? r + y : r;"),
        wgsl: |_| {
            w2("let r = h_fmod_$s(x, y);\n    \
                return select(r, r + y, abs(r) > 0.0 && (r < 0.0) != (y < 0.0));")
        },
    },
    Function {
        name: "h_fma",
        on: FLOATS,
        c: |_| "$T @($T x, $T y, $T z) {\n    return %fma(x, y, z);\n}\n".into(),
        wgsl: wgsl_fma,
    },
    Function { name: "h_iabs", on: UNSIGNED, c: |_| c1("return x;"), wgsl: |_| w1("return x;") },
    Function {
        name: "h_iabs",
        on: SIGNED,
        c: |_| c1("return x < 0 ? ($T)(($U)0 - ($U)x) : x;"),
        // For the smallest integer, whose magnitude is not representable, the result is the integer itself.
        wgsl: |_| w1("return select(x, $T(~$U(x) + 1), x < 0);"),
    },
    Function {
        name: "h_isign",
        on: UNSIGNED,
        c: |_| c1("return x > 0;"),
        wgsl: |_| w1("return min(x, $T(1));"),
    },
    Function {
        name: "h_isign",
        on: SIGNED,
        c: |_| c1("return (x > 0) - (x < 0);"),
        wgsl: |_| w1("return select(select($T(0), $T(-1), x < 0), $T(1), x > 0);"),
    },
    Function {
        name: "h_irelu",
        on: &[Ty::I32, Ty::I64, Ty::U32, Ty::U64],
        c: |_| c1("return x > 0 ? x : 0;"),
        wgsl: |_| w1("return max(x, $T(0));"),
    },
    // Division by zero gives 0. The only quotient that overflows, that of the smallest integer and -1, could
    // trap in C, so it is computed as a negation that wraps.
    Function {
        name: "h_idiv",
        on: UNSIGNED,
        c: |_| c2("return y == 0 ? 0 : x / y;"),
        wgsl: |_| w2("if (y == 0) {\n        return $T(0);\n    }\n    return x / y;"),
    },
    Function {
        name: "h_idiv",
        on: SIGNED,
        c: |_| c2("return y == 0 ? 0 : y == -1 ? ($T)(($U)0 - ($U)x) : x / y;"),
        wgsl: |_| {
            w2("if (y == 0) {\n        return $T(0);\n    }\n    if (y == -1) {\n        \
                return $T(~$U(x) + 1);\n    }\n    return x / y;")
        },
    },
    Function {
        name: "h_irem",
        on: UNSIGNED,
        c: |_| c2("return y == 0 ? 0 : x % y;"),
        wgsl: |_| w2("if (y == 0) {\n        return $T(0);\n    }\n    return x % y;"),
    },
    Function {
        name: "h_irem",
        on: SIGNED,
        c: |_| c2("return y == 0 || y == -1 ? 0 : x % y;"),
        wgsl: |_| w2("if (y == 0 || y == -1) {\n        return $T(0);\n    }\n    return x % y;"),
    },
    Function {
        name: "h_imod",
        on: UNSIGNED,
        c: |_| c2("return y == 0 ? 0 : x % y;"),
        wgsl: |_| w2("if (y == 0) {\n        return $T(0);\n    }\n    return x % y;"),
    },
    Function {
        name: "h_imod",
        on: SIGNED,
        c: |_| {
            c2("if (y == 0 || y == -1) return 0;\n    $T r = x % y;\n    \
                return r != 0 && (r < 0) != (y < 0) ? r + y : r;")
        },
        wgsl: |_| {
            w2("if (y == 0 || y == -1) {\n        return $T(0);\n    }\n    let r = x % y;\n    \
                return select(r, r + y, r != 0 && (r < 0) != (y < 0));")
        },
    },
    Function { name: "h_ipow", on: UNSIGNED, c: |_| c_power(""), wgsl: |_| wgsl_power("") },
    Function {
        name: "h_ipow",
        on: SIGNED,
        c: |_| c_power("if (y < 0) return x == 1 ? 1 : x == -1 ? (y % 2 == 0 ? 1 : -1) : 0;\n    "),
        wgsl: |_| {
            wgsl_power(
                "if (y < 0) {\n        if (x == 1) {\n            return $T(1);\n        }\n        \
                 if (x == -1) {\n            return select($T(-1), $T(1), (y & 1) == 0);\n        }\n        \
                 return $T(0);\n    }\n    ",
            )
        },
    },
    Function {
        name: "h_shl",
        on: UNSIGNED,
        c: |_| c2("return y < $W ? x << y : 0;"),
        wgsl: |ty| wgsl_shift("<<", ty),
    },
    Function {
        name: "h_shr",
        on: UNSIGNED,
        c: |_| c2("return y < $W ? x >> y : 0;"),
        wgsl: |ty| wgsl_shift(">>", ty),
    },
    Function {
        name: "h_threefry",
        on: &[Ty::U32],
        c: |_| {
            "$T @($T a, $T b, $T c) {\n    const $T k[3] = {a, b, 0x1BD11BDAu ^ a ^ b};\n    $T x = c + a;\n    $T y = b;\n    \
             for (int r = 0; r < 20; r++) {\n        const int even[4] = {13, 15, 26, 6};\n        const int odd[4] = {17, 29, 16, 24};\n        \
             int s = (r / 4) % 2 == 0 ? even[r % 4] : odd[r % 4];\n        x += y;\n        y = ((y << s) | (y >> (32 - s))) ^ x;\n        \
             if (r % 4 == 3) {\n            int j = r / 4 + 1;\n            x += k[j % 3];\n            y += k[(j + 1) % 3] + ($T)j;\n        }\n    }\n    return x;\n}\n"
                .into()
        },
        wgsl: |_| wgsl_threefry(),
    },
];

fn wgsl_extreme(order: &str) -> String {
    w2(&format!(
        "if (h_isnan_$s(x)) {{\n        return x;\n    }}\n    if (h_isnan_$s(y)) {{\n        return y;\n    }}\n    \
         return select(y, x, x {order} y);"
    ))
}

/// `x * y` may overflow although `x * y + z` does not. In this case the sum is computed with both terms
/// scaled by 1/16. If the scaled product overflows too, z is too small to bring the sum back into range. The
/// rounding error of the product is added, because the sum may cancel.
fn wgsl_fma(ty: Ty) -> String {
    let f = if ty == Ty::F64 { "x * y + z" } else { "fma(x, y, z)" };
    let inf = wgsl_infinity(ty);
    let [r, x, y, z, p] = ["r", "x", "y", "z", "p"].map(|v| wgsl_magnitude(v, ty));
    format!(
        "fn @(x: $T, y: $T, z: $T) -> $T {{\n    let r = {f};\n    if ({r} < {inf} || {x} >= {inf} || {y} >= {inf}) {{\n        return r;\n    }}\n    \
         if ({z} >= {inf}) {{\n        return z;\n    }}\n    let d = x * 0.0625;\n    let p = d * y;\n    if ({p} >= {inf}) {{\n        return r;\n    }}\n    \
         let a = h_head_$s(d);\n    let b = h_head_$s(y);\n    \
         let e = ((a * b - p) + a * (y - b) + (d - a) * b) + (d - a) * (y - b);\n    return ((p + z * 0.0625) + e) * 16.0;\n}}\n"
    )
}

fn c_power(negative: &str) -> String {
    c2(&format!(
        "{negative}$U r = 1;\n    $U p = ($U)x;\n    for ($U e = ($U)y; e > 0; e >>= 1) {{\n        \
         if (e & 1) r *= p;\n        p *= p;\n    }}\n    return ($T)r;"
    ))
}

fn wgsl_power(negative: &str) -> String {
    w2(&format!(
        "{negative}var r = $U(1);\n    var p = $U(x);\n    for (var e = $U(y); e > 0; e >>= 1u) {{\n        \
         if ((e & 1) != 0) {{\n            r *= p;\n        }}\n        p *= p;\n    }}\n    return $T(r);"
    ))
}

fn wgsl_shift(op: &str, ty: Ty) -> String {
    let (count, width) = if ty == Ty::U64 { ("u32(y & 63)", 64) } else { ("(y & 31u)", 32) };
    w2(&format!("return select($T(0), x {op} {count}, y < {width});"))
}

fn wgsl_threefry() -> String {
    let mut t = String::from(
        "fn @(a: u32, b: u32, c: u32) -> u32 {\n    let d = 0x1bd11bdau ^ a ^ b;\n    var x = c + a;\n    var y = b;\n",
    );
    for r in 0..20usize {
        let s = [13, 15, 26, 6, 17, 29, 16, 24][r % 8];
        t.push_str(&format!("    x += y;\n    y = ((y << {s}u) | (y >> {}u)) ^ x;\n", 32 - s));
        if r % 4 == 3 {
            let (j, k) = (r / 4 + 1, ["a", "b", "d"]);
            t.push_str(&format!("    x += {};\n    y += {} + {j}u;\n", k[j % 3], k[(j + 1) % 3]));
        }
    }
    t + "    return x;\n}\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The functions that the rows of `crate::ops::element_wise` call have a row here for every type of the
    /// op. The exceptions are `h_not`, `h_imin` and `h_imax`, which the renderers write in another way.
    #[test]
    fn scalar_ops_call_functions_of_the_table() {
        let own = ["h_not", "h_imin", "h_imax"];
        for row in crate::ops::element_wise::ROWS {
            for ty in [Ty::I32, Ty::U32, Ty::I64, Ty::U64, Ty::F32, Ty::F64] {
                let spelling = if ty.is_float() { row.c_float } else { row.c_int };
                let Some((name, _)) = spelling.split_once('(') else { continue };
                if row.op.takes(ty.dtype()) && name.starts_with("h_") && !own.contains(&name) {
                    assert!(find(name, ty).is_some(), "{name} on {ty:?}");
                }
            }
        }
    }
}
