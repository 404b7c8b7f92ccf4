//! CUDA C++ for NVRTC, without headers: bf16 is handled as bits, f16 through inline PTX.

use super::{Dialect, Language, matrix};
use crate::kernel::ir::Ty;

pub static DIALECT: Dialect = DIALECT_BASE;

/// The CUDA table, as a constant on which the HIP table is based.
pub(super) const DIALECT_BASE: Dialect = Dialect {
    language: Language::Cuda,
    header: "",
    header_f64: "",
    vector_ops: VECTOR_OPS,
    function: "static __device__ __forceinline__ ",
    entry: "extern \"C\" __global__ void __launch_bounds__($n)\n$name(",
    global: "",
    local: "__shared__ ",
    restrict: "__restrict__ ",
    buffer_arg: "$p$n",
    param_arg: "const $t $n",
    arguments: "const unsigned long long* __restrict__ g",
    extra_args: "",
    local_id: ["(int)threadIdx.x", "(int)threadIdx.y", "(int)threadIdx.z"],
    group_id: ["(int)blockIdx.x", "(int)blockIdx.y", "(int)blockIdx.z"],
    groups: ["(int)gridDim.x", "(int)gridDim.y", "(int)gridDim.z"],
    lane: LANE,
    subgroup_size: "32",
    shuffle_xor: "__shfl_xor_sync(0xffffffffu, $0, $1)",
    shuffle: "__shfl_sync(0xffffffffu, $0, $1)",
    barrier_local: "__syncthreads();",
    barrier_global: "__syncthreads();",
    atomic_add: "atomicAdd(&$p, $v)",
    set_error: "atomicCAS(&$p, 0u, $v);",
    types: TYPES,
    storage: [
        "unsigned char",
        "unsigned char",
        "unsigned short",
        "unsigned int",
        "unsigned long long",
        "signed char",
        "short",
        "int",
        "long long",
        "unsigned short",
        "unsigned short",
        "float",
        "double",
    ],
    load_f16: "h_f16_f32($p[$i])",
    store_f16: "$p[$i] = h_f32_f16($v);",
    i64_suffix: "ll",
    u64_suffix: "ull",
    math_f32: "f",
    math_missing: &[],
    vector: "make_$t($0)",
    bitcast,
    matrix: &matrix::CUDA,
    header_matrix: matrix::CUDA_HEADER,
    matrix_helpers: matrix::CUDA_HELPERS,
    helpers: &[
        (
            "h_f16_f32",
            "float @(unsigned short x) {\n    float r;\n    asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(r) : \"h\"(x));\n    return r;\n}\n",
        ),
        (
            "h_f32_f16",
            "unsigned short @(float x) {\n    unsigned short r;\n    asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x));\n    return r;\n}\n",
        ),
        ("h_round_f16_f32", "float @(float x) {\n    return h_f16_f32(h_f32_f16(x));\n}\n"),
        ("h_round_f16_f64", "float @(double x) {\n    return h_f16_f32(h_f32_f16(h_odd_f64(x)));\n}\n"),
        (
            "h_f32_bf16",
            "unsigned short @(float x) {\n#if __CUDA_ARCH__ >= 800\n    unsigned short r;\n    asm(\"cvt.rn.bf16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x));\n    return r;\n#else\n    unsigned int u = __float_as_uint(x);\n    if ((u & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((u >> 16) | 0x40u);\n    return (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);\n#endif\n}\n",
        ),
        (
            "h_dot4",
            "int @(unsigned int a, unsigned int b, int c) {\n    return __dp4a((int)a, (int)b, c);\n}\n",
        ),
        (
            "h_fma_f32x2",
            "float2 @(float2 x, float2 y, float2 z) {\n    return make_float2(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));\n}\n",
        ),
        (
            "h_fma_f32x4",
            "float4 @(float4 x, float4 y, float4 z) {\n    return make_float4(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y), fmaf(x.z, y.z, z.z), fmaf(x.w, y.w, z.w));\n}\n",
        ),
    ],
};

pub(super) const LANE: &str =
    "((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1))";

pub(super) const TYPES: [&str; 10] = [
    "bool",
    "int",
    "unsigned int",
    "long long",
    "unsigned long long",
    "float",
    "double",
    "float2",
    "float4",
    "uint4",
];

const VECTOR_OPS: &str = "\
static __device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
static __device__ __forceinline__ float2 operator-(float2 a, float2 b) { return make_float2(a.x - b.x, a.y - b.y); }
static __device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
static __device__ __forceinline__ float2 operator/(float2 a, float2 b) { return make_float2(a.x / b.x, a.y / b.y); }
static __device__ __forceinline__ float2 operator-(float2 a) { return make_float2(-a.x, -a.y); }
static __device__ __forceinline__ float4 operator+(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
static __device__ __forceinline__ float4 operator-(float4 a, float4 b) { return make_float4(a.x - b.x, a.y - b.y, a.z - b.z, a.w - b.w); }
static __device__ __forceinline__ float4 operator*(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
static __device__ __forceinline__ float4 operator/(float4 a, float4 b) { return make_float4(a.x / b.x, a.y / b.y, a.z / b.z, a.w / b.w); }
static __device__ __forceinline__ float4 operator-(float4 a) { return make_float4(-a.x, -a.y, -a.z, -a.w); }
";

pub(super) fn bitcast(from: Ty, to: Ty) -> &'static str {
    match (from, to) {
        (Ty::F32, Ty::I32) => "__float_as_int($0)",
        (Ty::F32, _) => "__float_as_uint($0)",
        (Ty::F64, Ty::I64) => "__double_as_longlong($0)",
        (Ty::F64, _) => "((unsigned long long)__double_as_longlong($0))",
        (Ty::I32, Ty::F32) => "__int_as_float($0)",
        (_, Ty::F32) => "__uint_as_float($0)",
        (_, Ty::F64) => "__longlong_as_double((long long)($0))",
        (_, Ty::I32) => "((int)($0))",
        (_, Ty::U32) => "((unsigned int)($0))",
        (_, Ty::I64) => "((long long)($0))",
        _ => "((unsigned long long)($0))",
    }
}
