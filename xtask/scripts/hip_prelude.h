// Declarations that are built into hipRTC and that rendered HIP kernels use, for clang. Clang's own headers
// have the mathematics (__clang_hip_math.h over ROCm's ocml), but no declarations of the runtime. This file
// is only for compiling without a GPU (clang_compile.py); Halcyon itself compiles with hipRTC.

#define __launch_bounds__(n) __attribute__((amdgpu_flat_work_group_size(1, n)))
#define __forceinline__ inline __attribute__((always_inline))
#define H_DEVICE static __device__ __forceinline__

// As in HIP, an index is read each time it is named.
#define H_AXIS(name, value)                                        \
    struct name {                                                  \
        __device__ operator unsigned int() const { return value; } \
    };
#define H_PLACE(name, f)   \
    H_AXIS(name##_x, f(x)) \
    H_AXIS(name##_y, f(y)) \
    H_AXIS(name##_z, f(z)) \
    struct name##_t {      \
        name##_x x;        \
        name##_y y;        \
        name##_z z;        \
    };                     \
    static constexpr __device__ const name##_t name{};
#define H_ITEM(a) __builtin_amdgcn_workitem_id_##a()
#define H_GROUP(a) __builtin_amdgcn_workgroup_id_##a()
#define H_SIZE(a) (unsigned int)__builtin_amdgcn_workgroup_size_##a()
#define H_GROUPS(a) __builtin_amdgcn_grid_size_##a() / __builtin_amdgcn_workgroup_size_##a()
H_PLACE(threadIdx, H_ITEM)
H_PLACE(blockIdx, H_GROUP)
H_PLACE(blockDim, H_SIZE)
H_PLACE(gridDim, H_GROUPS)
#define warpSize ((int)__builtin_amdgcn_wavefrontsize())

H_DEVICE void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// A value of 4 bytes, or of 8 bytes in two halves, from another lane.
template <class T> H_DEVICE T __shfl(T v, int lane) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move words");
    int words[sizeof(T) / 4];
    __builtin_memcpy(words, &v, sizeof v);
    for (auto& w : words) w = __builtin_amdgcn_ds_bpermute((lane & (warpSize - 1)) << 2, w);
    __builtin_memcpy(&v, words, sizeof v);
    return v;
}
H_DEVICE int h_wave_lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)) & (warpSize - 1); }
template <class T> H_DEVICE T __shfl_xor(T v, int mask) { return __shfl(v, h_wave_lane() ^ mask); }

template <class T> H_DEVICE T atomicAdd(T* p, T v) {
    return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
H_DEVICE unsigned int atomicCAS(unsigned int* p, unsigned int want, unsigned int v) {
    __hip_atomic_compare_exchange_strong(p, &want, v, __ATOMIC_RELAXED, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    return want;
}

typedef float float2 __attribute__((ext_vector_type(2)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef unsigned int uint4 __attribute__((ext_vector_type(4)));
H_DEVICE float2 make_float2(float x, float y) { return float2{x, y}; }
H_DEVICE float2 make_float2(float x) { return float2{x, x}; }
H_DEVICE float4 make_float4(float x, float y, float z, float w) { return float4{x, y, z, w}; }
H_DEVICE float4 make_float4(float x) { return float4{x, x, x, x}; }
H_DEVICE uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return uint4{x, y, z, w}; }

H_DEVICE int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
H_DEVICE unsigned int __float_as_uint(float x) { return __builtin_bit_cast(unsigned int, x); }
H_DEVICE float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
H_DEVICE float __uint_as_float(unsigned int x) { return __builtin_bit_cast(float, x); }
H_DEVICE long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
H_DEVICE double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }

// The switches of ocml. ROCm's device libraries have a file for each switch, but the libraries of Debian 12
// are older than gfx942 and gfx1100, so the switches are defined here.
#ifdef H_ISA_VERSION
extern "C" {
__device__ __constant__ extern const int __oclc_ISA_version = H_ISA_VERSION;
__device__ __constant__ extern const int __oclc_ABI_version = 500;
__device__ __constant__ extern const bool __oclc_wavefrontsize64 = __AMDGCN_WAVEFRONT_SIZE == 64;
__device__ __constant__ extern const bool __oclc_unsafe_math_opt = false;
__device__ __constant__ extern const bool __oclc_finite_only_opt = false;
__device__ __constant__ extern const bool __oclc_daz_opt = false;
__device__ __constant__ extern const bool __oclc_correctly_rounded_sqrt32 = true;
}
#endif
