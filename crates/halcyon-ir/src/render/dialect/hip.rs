//! HIP C++ for hipRTC: spelled like CUDA, with `_Float16`, subgroups of the wave size, and no inline
//! assembly.

use super::cuda;
use super::{Dialect, Language, matrix};

pub static DIALECT: Dialect = Dialect {
    language: Language::Hip,
    vector_ops: "",
    subgroup_size: "((int)warpSize)",
    shuffle_xor: "__shfl_xor($0, $1)",
    shuffle: "__shfl($0, $1)",
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
        "_Float16",
        "unsigned short",
        "float",
        "double",
    ],
    load_f16: "(float)$p[$i]",
    store_f16: "$p[$i] = (_Float16)($v);",
    matrix: &matrix::HIP,
    header_matrix: matrix::HIP_HEADER,
    matrix_helpers: matrix::HIP_HELPERS,
    helpers: &[
        ("h_f16_f32", "float @(unsigned short x) {\n    return (float)__builtin_bit_cast(_Float16, x);\n}\n"),
        (
            "h_f32_f16",
            "unsigned short @(float x) {\n    return __builtin_bit_cast(unsigned short, (_Float16)x);\n}\n",
        ),
        ("h_round_f16_f32", "float @(float x) {\n    return (float)(_Float16)x;\n}\n"),
        ("h_round_f16_f64", "float @(double x) {\n    return (float)(_Float16)x;\n}\n"),
        (
            "h_fma_f32x2",
            "float2 @(float2 x, float2 y, float2 z) {\n    return make_float2(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y));\n}\n",
        ),
        (
            "h_fma_f32x4",
            "float4 @(float4 x, float4 y, float4 z) {\n    return make_float4(fmaf(x.x, y.x, z.x), fmaf(x.y, y.y, z.y), fmaf(x.z, y.z, z.z), fmaf(x.w, y.w, z.w));\n}\n",
        ),
    ],
    ..cuda::DIALECT_BASE
};
