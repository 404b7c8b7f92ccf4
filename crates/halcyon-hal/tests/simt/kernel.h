// Everything that a rendered CUDA or HIP kernel needs to be compiled as C++ for the stand-in (standin.cpp):
// types, built-in functions, and the work-item side of barriers and shuffles. No headers are included,
// because this is compiled once per kernel.

typedef decltype(sizeof 0) h_size;

struct h_uint3 {
    unsigned int x, y, z;
};

// The stand-in's data about the running work-item, and functions that a kernel calls.
struct h_runtime {
    h_uint3 thread, block, block_size, grid;
    int warp;
    void (*sync)(int);
    unsigned long long (*shuffle)(unsigned long long, int);
};

extern "C" h_runtime* h_now;
h_runtime* h_now;
extern "C" void h_bind(h_runtime* r) { h_now = r; }

#define threadIdx (h_now->thread)
#define blockIdx (h_now->block)
#define blockDim (h_now->block_size)
#define gridDim (h_now->grid)
#define warpSize (h_now->warp)
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __restrict__ __restrict
// Workgroups run one after another, so static memory serves as workgroup memory.
#define __shared__ static
#define __syncthreads() h_now->sync(0)
// Work-items of a subgroup wait for each other. A fence only restricts reordering by the compiler, and
// nothing is reordered here.
#define __syncwarp() ((void)h_exchange(0, 0))
#define __builtin_amdgcn_wave_barrier() ((void)h_exchange(0, 0))
#define __builtin_amdgcn_fence(order, scope) static_assert((order) == __ATOMIC_ACQ_REL && sizeof(scope) == sizeof("wavefront"), "a fence of another kind")

static inline int h_lane() {
    h_runtime* r = h_now;
    return (int)(r->thread.x + r->block_size.x * (r->thread.y + r->block_size.y * r->thread.z)) & (r->warp - 1);
}

template <class T> static T h_exchange(T v, int from) {
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &v, sizeof v);
    bits = h_now->shuffle(bits, from);
    __builtin_memcpy(&v, &bits, sizeof v);
    return v;
}
template <class T> static T __shfl_xor(T v, int mask) { return h_exchange(v, h_lane() ^ mask); }
template <class T> static T __shfl(T v, int lane) { return h_exchange(v, lane & (h_now->warp - 1)); }
template <class T> static T __shfl_xor_sync(unsigned int, T v, int mask) { return __shfl_xor(v, mask); }
template <class T> static T __shfl_sync(unsigned int, T v, int lane) { return __shfl(v, lane); }

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
// Aligned as on a device, where a vector load or store at another alignment would fault.
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float2 make_float2(float x) { return {x, x}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float4 make_float4(float x) { return {x, x, x, x}; }

template <class T, class S> static inline T h_bits(S s) {
    static_assert(sizeof(T) == sizeof(S), "bits of another size");
    T t;
    __builtin_memcpy(&t, &s, sizeof t);
    return t;
}
static inline int __float_as_int(float x) { return h_bits<int>(x); }
static inline unsigned int __float_as_uint(float x) { return h_bits<unsigned int>(x); }
static inline float __int_as_float(int x) { return h_bits<float>(x); }
static inline float __uint_as_float(unsigned int x) { return h_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return h_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return h_bits<double>(x); }

static inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i);
    return c;
}

template <class T, class V> static inline T atomicAdd(T* p, V v) {
    T old = *p;
    *p = old + (T)v;
    return old;
}
static inline unsigned int atomicCAS(unsigned int* p, unsigned int want, unsigned int v) {
    unsigned int old = *p;
    if (old == want) *p = v;
    return old;
}

// IEEE half-precision floats, rounded to nearest even.
static inline float h_half_to_float(unsigned short h) {
    unsigned int sign = (h & 0x8000u) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return h_bits<float>(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0));
    if (e == 0) return (sign ? -1.0f : 1.0f) * (float)m * 0x1p-24f;
    return h_bits<float>(sign | (e + 112) << 23 | m << 13);
}
static inline unsigned short h_float_to_half(float x) {
    unsigned int u = h_bits<unsigned int>(x), sign = u >> 16 & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00u;
    if (u >= 0x477ff000u) return sign | 0x7c00u;
    if (u < 0x38800000u) {
        // The addition rounds to a multiple of 2^-24, the smallest half-precision number.
        float t = h_bits<float>(u) + 0.5f;
        return sign | (h_bits<unsigned int>(t) - 0x3f000000u);
    }
    u += 0xfffu + (u >> 13 & 1);
    return sign | (u - 0x38000000u) >> 13;
}

extern "C" {
#define H_ONE(name) float name##f(float) noexcept; double name(double) noexcept;
#define H_TWO(name) float name##f(float, float) noexcept; double name(double, double) noexcept;
H_ONE(exp) H_ONE(exp2) H_ONE(expm1) H_ONE(log) H_ONE(log2) H_ONE(log10) H_ONE(log1p)
H_ONE(sin) H_ONE(cos) H_ONE(tan) H_ONE(asin) H_ONE(acos) H_ONE(atan)
H_ONE(sinh) H_ONE(cosh) H_ONE(tanh) H_ONE(asinh) H_ONE(acosh) H_ONE(atanh)
H_ONE(erf) H_ONE(erfc) H_ONE(tgamma) H_ONE(lgamma) H_ONE(sqrt) H_ONE(cbrt)
H_ONE(floor) H_ONE(ceil) H_ONE(round) H_ONE(rint) H_ONE(trunc) H_ONE(fabs)
H_TWO(pow) H_TWO(fmod) H_TWO(atan2) H_TWO(copysign) H_TWO(fmin) H_TWO(fmax) H_TWO(hypot)
float fmaf(float, float, float) noexcept;
double fma(double, double, double) noexcept;
float ldexpf(float, int) noexcept;
double ldexp(double, int) noexcept;
}
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
#define isnan(x) __builtin_isnan(x)
#define isinf(x) __builtin_isinf(x)
#define isfinite(x) __builtin_isfinite(x)
#define signbit(x) __builtin_signbit(x)

#ifdef STANDIN_HIP
struct h_half {
    unsigned short bits;
    h_half() = default;
    h_half(float x) : bits(h_float_to_half(x)) {}
    h_half(double x) {
        // Round to odd first, so that the result is rounded only once.
        float f = (float)x;
        unsigned int u = h_bits<unsigned int>(f);
        if (f == f && (double)f != x && !__builtin_isinf(f)) {
            if ((double)__builtin_fabsf(f) > __builtin_fabs(x)) u -= 1;
            u |= 1;
        }
        bits = h_float_to_half(h_bits<float>(u));
    }
    operator float() const { return h_half_to_float(bits); }
};
#define _Float16 h_half
#define H_OPERATOR(o)                                                                      \
    static inline float2 operator o(float2 a, float2 b) { return {a.x o b.x, a.y o b.y}; } \
    static inline float4 operator o(float4 a, float4 b) { return {a.x o b.x, a.y o b.y, a.z o b.z, a.w o b.w}; }
H_OPERATOR(+)
H_OPERATOR(-)
H_OPERATOR(*)
H_OPERATOR(/)
static inline float2 operator-(float2 a) { return {-a.x, -a.y}; }
static inline float4 operator-(float4 a) { return {-a.x, -a.y, -a.z, -a.w}; }
#endif

// Sizes of an entry point's arguments, with the highest bit set for addresses; returns their number.
template <class T> struct h_size_of {
    static const unsigned char value = sizeof(T);
};
template <class T> struct h_size_of<T*> {
    static const unsigned char value = sizeof(T*) | 0x80;
};
template <class... A> static int h_sizes(void (*)(A...), unsigned char* to) {
    const unsigned char all[] = {h_size_of<A>::value..., 0};
    for (unsigned i = 0; i < sizeof...(A); i++) to[i] = all[i];
    return sizeof...(A);
}

// ---- matrix units. Each work-item passes its registers and reads those of others as the vendors' documents
// specify, so that a wrong order of registers gives wrong results.

static inline float h_bfloat_to_float(unsigned short h) { return h_bits<float>((unsigned int)h << 16); }

struct h_registers {
    unsigned int r[16];
};
static h_registers h_given[2][1024];
static unsigned int h_turn[1024];

// Passes `n` registers; returns the registers of the subgroup's work-items, starting with the first.
static inline const h_registers* h_give(const void* r, int n) {
    int me = (int)(h_now->thread.x + h_now->block_size.x * (h_now->thread.y + h_now->block_size.y * h_now->thread.z));
    // Two buffers alternate: the next exchange may begin before all work-items have read this one.
    h_registers* all = h_given[h_turn[me]++ & 1];
    __builtin_memcpy(all[me].r, r, n * 4);
    h_exchange(0, 0);
    return all + (me - h_lane());
}
static inline unsigned short h_part(unsigned int r, int i) { return (unsigned short)(r >> 16 * i); }
static inline void h_check(bool ok) {
    if (!ok) __builtin_trap();
}

#ifndef STANDIN_HIP
// Addresses of workgroup memory have 32 bits.
static char h_origin;
static inline h_size __cvta_generic_to_shared(const void* p) { return (unsigned int)((const char*)p - &h_origin); }
static inline const char* h_shared(unsigned int p) {
    const char* at = &h_origin + (int)p;
    h_check((h_size)at % 16 == 0);
    return at;
}

// PTX ISA, "Warp-level matrix load instruction: ldmatrix": work-items 8 i to 8 i + 7 pass the row addresses
// of matrix i. Each work-item gets two adjacent elements of row lane / 4 of the matrix, or of its transpose
// with .trans.
template <bool trans> static void h_ldmatrix(unsigned int& r0, unsigned int& r1, unsigned int& r2, unsigned int& r3, unsigned int p) {
    const h_registers* w = h_give(&p, 1);
    int lane = h_lane();
    unsigned int* to[] = {&r0, &r1, &r2, &r3};
    for (int i = 0; i < 4; i++) {
        unsigned short x[2];
        for (int j = 0; j < 2; j++) {
            int row = lane / 4, column = lane % 4 * 2 + j;
            x[j] = ((const unsigned short*)h_shared(w[8 * i + (trans ? column : row)].r[0]))[trans ? row : column];
        }
        *to[i] = x[0] | (unsigned int)x[1] << 16;
    }
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
template <float (*value)(unsigned short)>
static void h_mma_sync(float& c0, float& c1, float& c2, float& c3, unsigned int a0, unsigned int a1, unsigned int a2, unsigned int a3,
                       unsigned int b0, unsigned int b1) {
    unsigned int mine[] = {a0, a1, a2, a3, b0, b1};
    const h_registers* w = h_give(mine, 6);
    int lane = h_lane();
    float* c[] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 16; k++) {
            float a = value(h_part(w[row % 8 * 4 + k % 8 / 2].r[(row >= 8) + 2 * (k >= 8)], k % 2));
            float b = value(h_part(w[column * 4 + k % 8 / 2].r[4 + (k >= 8)], k % 2));
            *c[i] = fmaf(a, b, *c[i]);
        }
    }
}

// "Matrix Fragments for mma.m16n8k8", TF32: the instruction ignores the low 13 bits.
static inline void h_mma_sync_tf32(float& c0, float& c1, float& c2, float& c3, unsigned int a0, unsigned int a1, unsigned int a2,
                                   unsigned int a3, unsigned int b0, unsigned int b1) {
    unsigned int mine[] = {a0, a1, a2, a3, b0, b1};
    const h_registers* w = h_give(mine, 6);
    int lane = h_lane();
    float* c[] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; i++) {
        int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + i % 2;
        for (int k = 0; k < 8; k++) {
            unsigned int a = w[row % 8 * 4 + k % 4].r[(row >= 8) + 2 * (k >= 4)], b = w[column * 4 + k % 4].r[4 + (k >= 4)];
            *c[i] = fmaf(h_bits<float>(a & 0xffffe000u), h_bits<float>(b & 0xffffe000u), *c[i]);
        }
    }
}
// PTX ISA, "cvt": the first of two values goes to the upper half.
static inline unsigned short h_float_to_bfloat(float x) {
    unsigned int u = h_bits<unsigned int>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(u >> 16 | 0x40);
    unsigned int half = u & 0xffffu, up = half > 0x8000u || (half == 0x8000u && (u >> 16 & 1));
    return (unsigned short)((u >> 16) + up);
}
template <unsigned short (*round)(float)> static void h_cvt_pair(unsigned int& r, float upper, float lower) {
    r = (unsigned int)round(upper) << 16 | round(lower);
}
static inline void h_cvt_tf32(unsigned int& r, float x) {
    unsigned int u = h_bits<unsigned int>(x);
    r = (u & 0x7f800000u) == 0x7f800000u ? u : (u + 0x1000u) & 0xffffe000u;
}
#else
// AMD's matrix instruction calculator: v_mfma_f32_16x16x16_f16. A[i][k] is element k % 4 of work-item i + 16
// (k / 4), B[k][j] that of work-item j + 16 (k / 4), D[i][j] register i % 4 of work-item j + 16 (i / 4).
template <class A, class C> static C h_mfma(float (*value)(unsigned short), A a, A b, C c, int x, int y, int z) {
    static_assert(sizeof(A) == 8 && sizeof(C) == 16, "registers of MFMA");
    h_check(warpSize == 64 && x == 0 && y == 0 && z == 0);
    unsigned int mine[4];
    __builtin_memcpy(mine, &a, 8);
    __builtin_memcpy(mine + 2, &b, 8);
    const h_registers* w = h_give(mine, 4);
    int lane = h_lane();
    for (int r = 0; r < 4; r++) {
        int i = lane / 16 * 4 + r, j = lane % 16;
        for (int k = 0; k < 16; k++)
            c.x[r] = fmaf(value(h_part(w[i + k / 4 * 16].r[k % 4 / 2], k % 2)),
                          value(h_part(w[j + k / 4 * 16].r[2 + k % 4 / 2], k % 2)), c.x[r]);
    }
    return c;
}
#define __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, x, y, z) h_mfma(h_half_to_float, a, b, c, x, y, z)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, x, y, z) h_mfma(h_bfloat_to_float, a, b, c, x, y, z)

// RDNA 3 ISA, v_wmma_f32_16x16x16_f16 in waves of 32: A[i][k] is element k of work-items i and i + 16,
// B[k][j] that of j and j + 16, D[i][j] register i / 2 of work-item j + 16 (i % 2).
template <class A, class C> static C h_wmma(float (*value)(unsigned short), A a, A b, C c) {
    static_assert(sizeof(A) == 32 && sizeof(C) == 32, "registers of WMMA");
    h_check(warpSize == 32);
    unsigned int mine[16];
    __builtin_memcpy(mine, &a, 32);
    __builtin_memcpy(mine + 8, &b, 32);
    const h_registers* w = h_give(mine, 16);
    int lane = h_lane();
    for (int r = 0; r < 16; r++) h_check(w[lane].r[r] == w[lane ^ 16].r[r]);
    for (int r = 0; r < 8; r++) {
        int i = r * 2 + lane / 16, j = lane % 16;
        for (int k = 0; k < 16; k++)
            c.x[r] = fmaf(value(h_part(w[i].r[k / 2], k % 2)), value(h_part(w[j].r[8 + k / 2], k % 2)), c.x[r]);
    }
    return c;
}
#define __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c) h_wmma(h_half_to_float, a, b, c)
#define __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c) h_wmma(h_bfloat_to_float, a, b, c)
#endif

// Calls an entry point with arguments passed by pointers, as the launch functions do.
template <int... I> struct h_list {};
template <int N, int... I> struct h_count : h_count<N - 1, N - 1, I...> {};
template <int... I> struct h_count<0, I...> {
    typedef h_list<I...> type;
};
template <class... A, int... I> static void h_call(void (*f)(A...), void** a, h_list<I...>) { f(*(A*)a[I]...); }
template <class... A> static void h_call(void (*f)(A...), void** a) {
    h_call(f, a, typename h_count<(int)sizeof...(A)>::type());
}
