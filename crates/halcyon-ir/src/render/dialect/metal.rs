//! Metal Shading Language 2. It has no f64, and no `erf`, `erfc`, `expm1` and `log1p`. The rendered source
//! defines these functions.

use super::{Dialect, Language};
use crate::kernel::ir::Ty;

pub static DIALECT: Dialect = Dialect {
    language: Language::Metal,
    header: "#include <metal_stdlib>\nusing namespace metal;\n",
    header_f64: "",
    vector_ops: "",
    function: "static inline ",
    entry: "kernel void $name(",
    global: "device ",
    local: "threadgroup ",
    restrict: "",
    buffer_arg: "$p$n [[buffer($i)]]",
    param_arg: "constant $t& $n [[buffer($i)]]",
    arguments: "",
    extra_args: "uint3 h_item [[thread_position_in_threadgroup]],\n    uint3 h_group [[threadgroup_position_in_grid]],\n    uint3 h_groups [[threadgroups_per_grid]],\n    uint h_lane [[thread_index_in_simdgroup]],\n    uint h_width [[threads_per_simdgroup]]",
    local_id: ["(int)h_item.x", "(int)h_item.y", "(int)h_item.z"],
    group_id: ["(int)h_group.x", "(int)h_group.y", "(int)h_group.z"],
    groups: ["(int)h_groups.x", "(int)h_groups.y", "(int)h_groups.z"],
    lane: "((int)h_lane)",
    subgroup_size: "((int)h_width)",
    shuffle_xor: "simd_shuffle_xor($0, (ushort)($1))",
    shuffle: "simd_shuffle($0, (ushort)($1))",
    barrier_local: "threadgroup_barrier(mem_flags::mem_threadgroup);",
    barrier_global: "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);",
    atomic_add: "atomic_fetch_add_explicit((device atomic_$t*)&$p, $v, memory_order_relaxed)",
    // This keeps the largest code instead of the first one. Either code reports a fault that occurred.
    // Keeping the first one would need a compare-exchange, and Metal has only a weak one, which may fail
    // spuriously.
    set_error: "atomic_fetch_max_explicit((device atomic_uint*)&$p, $v, memory_order_relaxed);",
    types: ["bool", "int", "uint", "long", "ulong", "float", "", "float2", "float4", "uint4"],
    storage: [
        "uchar", "uchar", "ushort", "uint", "ulong", "char", "short", "int", "long", "half", "ushort",
        "float", "",
    ],
    load_f16: "(float)$p[$i]",
    store_f16: "$p[$i] = (half)($v);",
    i64_suffix: "l",
    u64_suffix: "ul",
    math_f32: "",
    math_missing: &["erf", "erfc", "expm1", "log1p"],
    vector: "$t($0)",
    bitcast,
    matrix: &[],
    header_matrix: "",
    matrix_helpers: &[],
    helpers: &[
        ("h_f16_f32", "float @(ushort x) {\n    return (float)as_type<half>(x);\n}\n"),
        ("h_f32_f16", "ushort @(float x) {\n    return as_type<ushort>((half)x);\n}\n"),
        ("h_round_f16_f32", "float @(float x) {\n    return (float)(half)x;\n}\n"),
        ("h_fma_f32x2", "float2 @(float2 x, float2 y, float2 z) {\n    return fma(x, y, z);\n}\n"),
        ("h_fma_f32x4", "float4 @(float4 x, float4 y, float4 z) {\n    return fma(x, y, z);\n}\n"),
        // Kahan's formulas for exp(x) - 1 and log(1 + x).
        (
            "h_expm1_f32",
            "float @(float x) {\n    float u = exp(x);\n    if (u == 1.0f) return x;\n    float d = u - 1.0f;\n    if (d == -1.0f || isinf(u)) return d;\n    return d * x / log(u);\n}\n",
        ),
        (
            "h_log1p_f32",
            "float @(float x) {\n    float u = 1.0f + x;\n    if (u == 1.0f || isinf(u)) return x;\n    return log(u) * x / (u - 1.0f);\n}\n",
        ),
        // Series and continued fraction from Abramowitz and Stegun 7.1.6 and 7.1.14.
        (
            "h_erfc_f32",
            "float @(float x) {\n    float a = fabs(x);\n    if (a < 1.5f) {\n        float t = a;\n        float s = a;\n        for (int n = 1; n < 30; n++) {\n            t *= 2.0f * a * a / (float)(2 * n + 1);\n            s += t;\n        }\n        float r = 1.1283791671f * exp(-a * a) * s;\n        return x < 0.0f ? 1.0f + r : 1.0f - r;\n    }\n    float f = 0.0f;\n    for (int n = 40; n > 0; n--) f = 0.5f * (float)n / (a + f);\n    float r = exp(-a * a) * 0.5641895835f / (a + f);\n    return x < 0.0f ? 2.0f - r : r;\n}\n",
        ),
        (
            "h_erf_f32",
            "float @(float x) {\n    float a = fabs(x);\n    if (a < 1.5f) {\n        float t = a;\n        float s = a;\n        for (int n = 1; n < 30; n++) {\n            t *= 2.0f * a * a / (float)(2 * n + 1);\n            s += t;\n        }\n        float r = 1.1283791671f * exp(-a * a) * s;\n        return x < 0.0f ? -r : r;\n    }\n    return 1.0f - h_erfc_f32(x);\n}\n",
        ),
    ],
};

fn bitcast(from: Ty, to: Ty) -> &'static str {
    let _ = from;
    match to {
        Ty::I32 => "as_type<int>($0)",
        Ty::U32 => "as_type<uint>($0)",
        Ty::I64 => "as_type<long>($0)",
        Ty::U64 => "as_type<ulong>($0)",
        _ => "as_type<float>($0)",
    }
}
