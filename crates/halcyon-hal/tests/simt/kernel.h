// What a rendered CUDA or HIP kernel needs to be compiled as C++ for the stand-in (standin.cpp): types, functions of the language, and
// the work-items' side of barriers and shuffles. No header is included: there is one compilation for each kernel.

typedef decltype(sizeof 0) h_size;

struct h_uint3 {
    unsigned int x, y, z;
};

// What the stand-in tells the kernel of the work-item that runs.
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
// Groups run one after another.
#define __shared__ static
#define __syncthreads() h_now->sync(0)

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

// IEEE half floats, to nearest even.
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
        // Adding lines the last bit up with the smallest half.
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
        // Rounded once: to odd first.
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
#define H_OPERATOR(o)                                                                                         \
    static inline float2 operator o(float2 a, float2 b) { return {a.x o b.x, a.y o b.y}; }                     \
    static inline float4 operator o(float4 a, float4 b) { return {a.x o b.x, a.y o b.y, a.z o b.z, a.w o b.w}; }
H_OPERATOR(+)
H_OPERATOR(-)
H_OPERATOR(*)
H_OPERATOR(/)
static inline float2 operator-(float2 a) { return {-a.x, -a.y}; }
static inline float4 operator-(float4 a) { return {-a.x, -a.y, -a.z, -a.w}; }
#endif

// Sizes of an entry point's arguments, with the highest bit where one is an address; their number is returned.
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

// Calls an entry point with arguments given by pointers, as the launch functions do.
template <int... I> struct h_list {};
template <int N, int... I> struct h_count : h_count<N - 1, N - 1, I...> {};
template <int... I> struct h_count<0, I...> {
    typedef h_list<I...> type;
};
template <class... A, int... I> static void h_call(void (*f)(A...), void** a, h_list<I...>) { f(*(A*)a[I]...); }
template <class... A> static void h_call(void (*f)(A...), void** a) {
    h_call(f, a, typename h_count<(int)sizeof...(A)>::type());
}
