//! OpenCL C 1.2. The only extension used is fp64, in kernels with f64. f16 is only loaded and stored
//! (`vload_half`, `vstore_half`).

use super::{Dialect, Language};
use crate::kernel::ir::Ty;

pub static DIALECT: Dialect = Dialect {
    language: Language::OpenCl,
    header: "",
    header_f64: "#pragma OPENCL EXTENSION cl_khr_fp64 : enable\n",
    vector_ops: "",
    function: "static inline ",
    entry: "__kernel __attribute__((reqd_work_group_size($x, $y, $z)))\nvoid $name(",
    global: "__global ",
    local: "__local ",
    restrict: "restrict ",
    buffer_arg: "$p$n",
    param_arg: "const $t $n",
    arguments: "__global const ulong* restrict g",
    extra_args: "",
    local_id: ["(int)get_local_id(0)", "(int)get_local_id(1)", "(int)get_local_id(2)"],
    group_id: ["(int)get_group_id(0)", "(int)get_group_id(1)", "(int)get_group_id(2)"],
    groups: ["(int)get_num_groups(0)", "(int)get_num_groups(1)", "(int)get_num_groups(2)"],
    lane: "",
    subgroup_size: "",
    shuffle_xor: "",
    shuffle: "",
    barrier_local: "barrier(CLK_LOCAL_MEM_FENCE);",
    barrier_global: "barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);",
    atomic_add: "atomic_add((volatile __global $t*)&$p, $v)",
    set_error: "atomic_cmpxchg((volatile __global uint*)&$p, 0u, $v);",
    types: ["bool", "int", "uint", "long", "ulong", "float", "double", "float2", "float4", "uint4"],
    storage: [
        "uchar", "uchar", "ushort", "uint", "ulong", "char", "short", "int", "long", "half", "ushort",
        "float", "double",
    ],
    load_f16: "vload_half($i, $p)",
    store_f16: "vstore_half_rte($v, $i, $p);",
    i64_suffix: "l",
    u64_suffix: "ul",
    math_f32: "",
    math_missing: &[],
    vector: "($t)($0)",
    bitcast,
    matrix: &[],
    header_matrix: "",
    matrix_helpers: &[],
    helpers: &[
        ("h_f16_f32", "float @(ushort x) {\n    return vload_half(0, (half*)&x);\n}\n"),
        (
            "h_f32_f16",
            "ushort @(float x) {\n    ushort h;\n    vstore_half_rte(x, 0, (half*)&h);\n    return h;\n}\n",
        ),
        // vstore_half_rte rounds only once, from float as well as from double.
        (
            "h_round_f16_f32",
            "float @(float x) {\n    ushort h;\n    vstore_half_rte(x, 0, (half*)&h);\n    return vload_half(0, (half*)&h);\n}\n",
        ),
        (
            "h_round_f16_f64",
            "float @(double x) {\n    ushort h;\n    vstore_half_rte(x, 0, (half*)&h);\n    return vload_half(0, (half*)&h);\n}\n",
        ),
        (
            "h_fma_f32",
            "float @(float x, float y, float z) {\n#ifdef FP_FAST_FMAF\n    return fma(x, y, z);\n#else\n    return x * y + z;\n#endif\n}\n",
        ),
        (
            "h_fma_f32x2",
            "float2 @(float2 x, float2 y, float2 z) {\n#ifdef FP_FAST_FMAF\n    return fma(x, y, z);\n#else\n    return x * y + z;\n#endif\n}\n",
        ),
        (
            "h_fma_f32x4",
            "float4 @(float4 x, float4 y, float4 z) {\n#ifdef FP_FAST_FMAF\n    return fma(x, y, z);\n#else\n    return x * y + z;\n#endif\n}\n",
        ),
    ],
};

fn bitcast(from: Ty, to: Ty) -> &'static str {
    let _ = from;
    match to {
        Ty::I32 => "as_int($0)",
        Ty::U32 => "as_uint($0)",
        Ty::I64 => "as_long($0)",
        Ty::U64 => "as_ulong($0)",
        Ty::F64 => "as_double($0)",
        _ => "as_float($0)",
    }
}
