//! Matrix products on NVIDIA's and AMD's matrix units: types, and functions that load, multiply and store
//! fragments.
//!
//! The instruction determines which work-item holds which elements. For `mma.sync` see the PTX ISA (sections
//! "Matrix Fragments for mma.m16n8k16 with floating point type" and "… mma.m16n8k8"); for MFMA and WMMA see
//! AMD's ISA documents and its matrix instruction calculator. A product here is 16 × 16: two instructions on
//! NVIDIA (m16n8k16, or m16n8k8 for TF32), one on AMD.

use crate::kernel::ir::{MatrixOp, MatrixType};

const fn op(operand: MatrixType, k: u8, width: u8) -> MatrixOp {
    MatrixOp { operand, m: 16, n: 16, k, width }
}

/// The matrix ops of CUDA. Devices support them from sm_80 on.
pub const CUDA: [MatrixOp; 3] =
    [op(MatrixType::F16, 16, 32), op(MatrixType::BF16, 16, 32), op(MatrixType::Tf32, 8, 32)];

/// The matrix ops of HIP: MFMA for waves of 64 (gfx90a, gfx940 to gfx942, gfx950), WMMA for waves of 32
/// (gfx11).
pub const HIP: [MatrixOp; 4] = [
    op(MatrixType::F16, 16, 64),
    op(MatrixType::BF16, 16, 64),
    op(MatrixType::F16, 16, 32),
    op(MatrixType::BF16, 16, 32),
];

pub(super) const CUDA_HEADER: &str = "\
#define H_SUM 8
#define H_ROWS 2
#define H_ROW_OF(i) ((i) >> 1 & 1)
#define H_ROWS_AT(i, lane) (((lane) >> 2) + (i) * 8)
#define H_ROW_AT(i, lane) H_ROWS_AT(H_ROW_OF(i), lane)
#define H_COLUMN_AT(i, lane) (((lane) & 3) * 2 + ((i) & 1) + ((i) >> 2) * 8)
struct h_operand { unsigned int r[4]; };
struct h_sum { float r[H_SUM]; };
struct h_rows { float r[H_ROWS]; };
";

/// With MFMA, work-item `l` has four elements of row `l % 16` of A, and of column `l % 16` of B, from
/// position `4 (l / 16)` along k on. Its sums are in column `l % 16`, in four rows from row `4 (l / 16)` on.
/// With WMMA, work-item `l` has all sixteen elements of row `l % 16` of A, and of column `l % 16` of B, so
/// both halves of the wave have the same elements. Its sums are in column `l % 16`, in every second row from
/// row `l / 16` on.
pub(super) const HIP_HEADER: &str = "\
#if defined(__gfx90a__) || defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__) || defined(__gfx950__)
#define H_OPERAND 2
#define H_SUM 4
#define H_ROW(i, half) ((half) * 4 + (i))
#elif defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || defined(__gfx1150__) || defined(__gfx1151__)
#define H_WMMA
#define H_OPERAND 8
#define H_SUM 8
#define H_ROW(i, half) ((i) * 2 + (half))
#else
#error \"this architecture has no supported matrix unit\"
#endif
#define H_ROWS H_SUM
#define H_ROW_OF(i) (i)
#define H_ROWS_AT(i, lane) H_ROW(i, (lane) >> 4)
#define H_ROW_AT(i, lane) H_ROW(i, (lane) >> 4)
#define H_COLUMN_AT(i, lane) ((lane) & 15)
struct h_operand { unsigned int r[H_OPERAND]; };
struct h_sum { float r[H_SUM]; };
struct h_rows { float r[H_ROWS]; };
typedef _Float16 h_halves __attribute__((ext_vector_type(H_OPERAND * 2)));
typedef short h_shorts __attribute__((ext_vector_type(H_OPERAND * 2)));
typedef float h_floats __attribute__((ext_vector_type(H_SUM)));
typedef unsigned short __attribute__((may_alias)) h_short;
typedef unsigned int __attribute__((may_alias)) h_word;
typedef float __attribute__((may_alias)) h_float;
";

pub(super) const CUDA_HELPERS: &[(&str, &str)] = &[
    (
        "h_load_a_16r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const unsigned int p = (unsigned int)__cvta_generic_to_shared((const unsigned short*)l + offset + (lane & 15) * stride + (lane >> 4 << 3));
    h_operand v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3]) : "r"(p) : "memory");
    return v;
}
"#,
    ),
    (
        "h_load_a_16c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const unsigned int p = (unsigned int)__cvta_generic_to_shared((const unsigned short*)l + offset + ((lane & 7) + (lane >> 4 << 3)) * stride + (lane & 8));
    h_operand v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3]) : "r"(p) : "memory");
    return v;
}
"#,
    ),
    (
        "h_load_b_16r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const unsigned int p = (unsigned int)__cvta_generic_to_shared((const unsigned short*)l + offset + (lane & 15) * stride + (lane >> 4 << 3));
    h_operand v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3]) : "r"(p) : "memory");
    return v;
}
"#,
    ),
    (
        "h_load_b_16c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const unsigned int p = (unsigned int)__cvta_generic_to_shared((const unsigned short*)l + offset + ((lane & 7) + (lane >> 4 << 3)) * stride + (lane & 8));
    h_operand v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(v.r[0]), "=r"(v.r[1]), "=r"(v.r[2]), "=r"(v.r[3]) : "r"(p) : "memory");
    return v;
}
"#,
    ),
    (
        "h_tf32",
        r#"unsigned int @(float x) {
    unsigned int r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
"#,
    ),
    (
        "h_load_a_32r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1)), g = lane >> 2, t = lane & 3;
    const float* p = (const float*)l + offset;
    h_operand v;
    v.r[0] = h_tf32(p[(g) * stride + t]);
    v.r[1] = h_tf32(p[(g + 8) * stride + t]);
    v.r[2] = h_tf32(p[(g) * stride + t + 4]);
    v.r[3] = h_tf32(p[(g + 8) * stride + t + 4]);
    return v;
}
"#,
    ),
    (
        "h_load_a_32c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1)), g = lane >> 2, t = lane & 3;
    const float* p = (const float*)l + offset;
    h_operand v;
    v.r[0] = h_tf32(p[(t) * stride + g]);
    v.r[1] = h_tf32(p[(t) * stride + g + 8]);
    v.r[2] = h_tf32(p[(t + 4) * stride + g]);
    v.r[3] = h_tf32(p[(t + 4) * stride + g + 8]);
    return v;
}
"#,
    ),
    (
        "h_load_b_32r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1)), g = lane >> 2, t = lane & 3;
    const float* p = (const float*)l + offset;
    h_operand v;
    v.r[0] = h_tf32(p[(t) * stride + g]);
    v.r[1] = h_tf32(p[(t + 4) * stride + g]);
    v.r[2] = h_tf32(p[(t) * stride + g + 8]);
    v.r[3] = h_tf32(p[(t + 4) * stride + g + 8]);
    return v;
}
"#,
    ),
    (
        "h_load_b_32c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1)), g = lane >> 2, t = lane & 3;
    const float* p = (const float*)l + offset;
    h_operand v;
    v.r[0] = h_tf32(p[(g) * stride + t]);
    v.r[1] = h_tf32(p[(g) * stride + t + 4]);
    v.r[2] = h_tf32(p[(g + 8) * stride + t]);
    v.r[3] = h_tf32(p[(g + 8) * stride + t + 4]);
    return v;
}
"#,
    ),
    (
        "h_mma_f16",
        r#"void @(h_sum& c, const h_operand& a, const h_operand& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[4]), "+f"(c.r[5]), "+f"(c.r[6]), "+f"(c.r[7]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2]), "r"(b.r[3]));
}
"#,
    ),
    (
        "h_mma_bf16",
        r#"void @(h_sum& c, const h_operand& a, const h_operand& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[4]), "+f"(c.r[5]), "+f"(c.r[6]), "+f"(c.r[7]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2]), "r"(b.r[3]));
}
"#,
    ),
    (
        "h_mma_tf32",
        r#"void @(h_sum& c, const h_operand& a, const h_operand& b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[0]), "+f"(c.r[1]), "+f"(c.r[2]), "+f"(c.r[3]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c.r[4]), "+f"(c.r[5]), "+f"(c.r[6]), "+f"(c.r[7]) : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2]), "r"(b.r[3]));
}
"#,
    ),
    (
        "h_fill_sum",
        r#"h_sum @(float x) {
    h_sum v;
    for (int i = 0; i < 8; i++) v.r[i] = x;
    return v;
}
"#,
    ),
    (
        "h_store_sum",
        r#"void @(uint4* l, const h_sum& v, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    float* p = (float*)l + offset + (lane >> 2) * stride + (lane & 3) * 2;
    *(float2*)p = make_float2(v.r[0], v.r[1]);
    *(float2*)(p + 8 * stride) = make_float2(v.r[2], v.r[3]);
    *(float2*)(p + 8) = make_float2(v.r[4], v.r[5]);
    *(float2*)(p + 8 * stride + 8) = make_float2(v.r[6], v.r[7]);
}
"#,
    ),
    (
        "h_fill_rows",
        r#"h_rows @(float x) {
    h_rows v;
    for (int i = 0; i < H_ROWS; i++) v.r[i] = x;
    return v;
}
"#,
    ),
    (
        "h_rows_add",
        r#"void @(h_rows& d, const h_sum& s) {
    for (int i = 0; i < H_ROWS; i++) {
        float x = (s.r[2 * i] + s.r[2 * i + 1]) + (s.r[2 * i + 4] + s.r[2 * i + 5]);
        x += __shfl_xor_sync(0xffffffffu, x, 1);
        x += __shfl_xor_sync(0xffffffffu, x, 2);
        d.r[i] += x;
    }
}
"#,
    ),
    (
        "h_rows_max",
        r#"void @(h_rows& d, const h_sum& s) {
    for (int i = 0; i < H_ROWS; i++) {
        float x = h_max_f32(h_max_f32(s.r[2 * i], s.r[2 * i + 1]), h_max_f32(s.r[2 * i + 4], s.r[2 * i + 5]));
        x = h_max_f32(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = h_max_f32(x, __shfl_xor_sync(0xffffffffu, x, 2));
        d.r[i] = h_max_f32(d.r[i], x);
    }
}
"#,
    ),
    // Each work-item already holds the elements of the operand, because sums and 16-bit operands have the
    // same layout. TF32 operands have another layout, so they go through memory.
    (
        "h_operand_f16",
        r#"h_operand @(const h_sum& v, int column, uint4* l, int offset, int stride) {
    h_operand a;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a.r[0]) : "f"(v.r[1]), "f"(v.r[0]));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a.r[1]) : "f"(v.r[3]), "f"(v.r[2]));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a.r[2]) : "f"(v.r[5]), "f"(v.r[4]));
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a.r[3]) : "f"(v.r[7]), "f"(v.r[6]));
    return a;
}
"#,
    ),
    (
        "h_operand_bf16",
        r#"h_operand @(const h_sum& v, int column, uint4* l, int offset, int stride) {
    h_operand a;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a.r[0]) : "f"(v.r[1]), "f"(v.r[0]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a.r[1]) : "f"(v.r[3]), "f"(v.r[2]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a.r[2]) : "f"(v.r[5]), "f"(v.r[4]));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(a.r[3]) : "f"(v.r[7]), "f"(v.r[6]));
    return a;
}
"#,
    ),
    (
        "h_operand_tf32",
        r#"h_operand @(const h_sum& v, int column, uint4* l, int offset, int stride) {
    __syncwarp();
    h_store_sum(l, v, offset, stride);
    __syncwarp();
    return h_load_a_32r(l, offset + column, stride);
}
"#,
    ),
];

pub(super) const HIP_HELPERS: &[(&str, &str)] = &[
    (
        "h_load_a_16r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const h_word* p = (const h_word*)((const h_short*)l + offset + (lane & 15) * stride) + (lane >> 4) * (H_OPERAND & 3);
    h_operand v;
    for (int i = 0; i < H_OPERAND; i++) v.r[i] = p[i];
    return v;
}
"#,
    ),
    (
        "h_load_a_16c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const h_short* p = (const h_short*)l + offset + (lane & 15) + (lane >> 4) * (H_OPERAND & 3) * 2 * stride;
    h_operand v;
    for (int i = 0; i < H_OPERAND; i++) v.r[i] = (unsigned int)p[2 * i * stride] | (unsigned int)p[(2 * i + 1) * stride] << 16;
    return v;
}
"#,
    ),
    (
        "h_load_b_16r",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const h_short* p = (const h_short*)l + offset + (lane & 15) + (lane >> 4) * (H_OPERAND & 3) * 2 * stride;
    h_operand v;
    for (int i = 0; i < H_OPERAND; i++) v.r[i] = (unsigned int)p[2 * i * stride] | (unsigned int)p[(2 * i + 1) * stride] << 16;
    return v;
}
"#,
    ),
    (
        "h_load_b_16c",
        r#"h_operand @(const uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    const h_word* p = (const h_word*)((const h_short*)l + offset + (lane & 15) * stride) + (lane >> 4) * (H_OPERAND & 3);
    h_operand v;
    for (int i = 0; i < H_OPERAND; i++) v.r[i] = p[i];
    return v;
}
"#,
    ),
    (
        "h_mma_f16",
        r#"void @(h_sum& c, const h_operand& a, const h_operand& b) {
#ifdef H_WMMA
    c = __builtin_bit_cast(h_sum, __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(h_halves, a), __builtin_bit_cast(h_halves, b), __builtin_bit_cast(h_floats, c)));
#else
    c = __builtin_bit_cast(h_sum, __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(h_halves, a), __builtin_bit_cast(h_halves, b), __builtin_bit_cast(h_floats, c), 0, 0, 0));
#endif
}
"#,
    ),
    (
        "h_mma_bf16",
        r#"void @(h_sum& c, const h_operand& a, const h_operand& b) {
#ifdef H_WMMA
    c = __builtin_bit_cast(h_sum, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(h_shorts, a), __builtin_bit_cast(h_shorts, b), __builtin_bit_cast(h_floats, c)));
#else
    c = __builtin_bit_cast(h_sum, __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(h_shorts, a), __builtin_bit_cast(h_shorts, b), __builtin_bit_cast(h_floats, c), 0, 0, 0));
#endif
}
"#,
    ),
    (
        "h_fill_sum",
        r#"h_sum @(float x) {
    h_sum v;
    for (int i = 0; i < H_SUM; i++) v.r[i] = x;
    return v;
}
"#,
    ),
    (
        "h_store_sum",
        r#"void @(uint4* l, const h_sum& v, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    h_float* p = (h_float*)l + offset + (lane & 15);
    for (int i = 0; i < H_SUM; i++) p[H_ROW(i, lane >> 4) * stride] = v.r[i];
}
"#,
    ),
    (
        "h_fill_rows",
        r#"h_rows @(float x) {
    h_rows v;
    for (int i = 0; i < H_ROWS; i++) v.r[i] = x;
    return v;
}
"#,
    ),
    (
        "h_rows_add",
        r#"void @(h_rows& d, const h_sum& s) {
    #pragma unroll
    for (int i = 0; i < H_ROWS; i++) {
        float x = s.r[i];
        for (int m = 1; m < 16; m *= 2) x += __shfl_xor(x, m);
        d.r[i] += x;
    }
}
"#,
    ),
    (
        "h_rows_max",
        r#"void @(h_rows& d, const h_sum& s) {
    #pragma unroll
    for (int i = 0; i < H_ROWS; i++) {
        float x = s.r[i];
        for (int m = 1; m < 16; m *= 2) x = h_max_f32(x, __shfl_xor(x, m));
        d.r[i] = h_max_f32(d.r[i], x);
    }
}
"#,
    ),
    // The hardware executes a wave's accesses to workgroup memory in order. The fences keep the compiler from
    // reordering them.
    (
        "h_wave",
        r#"void @() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
}
"#,
    ),
    (
        "h_operand_f16",
        r#"h_operand @(const h_sum& v, int column, uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    h_short* p = (h_short*)l + offset + (lane & 15);
    h_wave();
    for (int i = 0; i < H_SUM; i++) p[H_ROW(i, lane >> 4) * stride] = h_f32_f16(v.r[i]);
    h_wave();
    return h_load_a_16r(l, offset + column, stride);
}
"#,
    ),
    (
        "h_operand_bf16",
        r#"h_operand @(const h_sum& v, int column, uint4* l, int offset, int stride) {
    const int lane = ((int)(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & (warpSize - 1));
    h_short* p = (h_short*)l + offset + (lane & 15);
    h_wave();
    for (int i = 0; i < H_SUM; i++) p[H_ROW(i, lane >> 4) * stride] = h_f32_bf16(v.r[i]);
    h_wave();
    return h_load_a_16r(l, offset + column, stride);
}
"#,
    ),
];
