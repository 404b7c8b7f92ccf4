// Part of standin.cpp: the stand-in for cuBLASLt or, with STANDIN_HIP, for hipBLASLt. It computes in double
// on the host, and rejects what the real library rejects according to its documentation. Enumeration values
// are those of the vendors' headers.

#include <cmath>
#include <functional>

enum { LT_OK = 0, LT_NOT_INITIALISED = 1, LT_INVALID = HIP ? 3 : 7, LT_FAILED = HIP ? 5 : 13, LT_NOT_SUPPORTED = HIP ? 7 : 15 };
// Values of cudaDataType and hipDataType.
enum { R32 = 0, R64 = 1, R16 = 2, I8 = 3, I32 = 10, RB16 = 14, E4M3 = HIP ? 1000 : 28, E5M2 = HIP ? 1001 : 29 };

// Counters and controls for the tests.
static int64_t handles_, descriptions_, library_calls_, epilogues_, fail_library_ = -1, hide_products_, winograds_;
// Counters and controls that graph.cpp uses.
static int64_t graph_calls_, attentions_, fail_graph_ = -1, dnn_version_ = 91002;

// Enqueues work of a library in stream `s`.
static int on_stream(Handle s, const std::function<int()>& work) { return enqueue(s, work); }

// Controls and counters of the algorithms, by their numbers.
static int64_t failing_product_ = -1, failing_convolution_ = -1, product_takes_[8], convolution_takes_[8], ran_product_ = -1,
               ran_convolution_ = -1;

// Counts a call. Returns whether the test has chosen this call to fail.
static bool fails() {
    library_calls_++;
    return fail_library_ >= 0 && fail_library_-- == 0;
}

static size_t type_size(int t) {
    switch (t) {
    case R64: return 8;
    case R32: case I32: return 4;
    case R16: case RB16: return 2;
    case I8: case E4M3: case E5M2: return 1;
    default: return 0;
    }
}

static double half_value(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -v : v;
}
static uint16_t half_bits(double v) {
    uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    double a = fabs(v);
    if (std::isnan(v)) return sign | 0x7e00;
    int e;
    frexp(a, &e);
    // Spacing of half-precision numbers at this magnitude; ties go to even, as on the processor.
    double unit = ldexp(1, (e < -13 ? -13 : e) - 11), r = nearbyint(a / unit) * unit;
    if (r >= 65536 || std::isinf(a)) return sign | 0x7c00;
    if (r < ldexp(1, -14)) return sign | (uint16_t)ldexp(r, 24);
    frexp(r, &e);
    return sign | (uint16_t)((e + 14) << 10 | ((int)ldexp(r, 11 - e) & 1023));
}
static float cut(double v, int digits) {
    // The nearest float with this many digits after the leading one, ties to even.
    if (!std::isfinite(v) || v == 0) return (float)v;
    int e;
    frexp(v, &e);
    double unit = ldexp(1, e - 1 - digits);
    return (float)(nearbyint(v / unit) * unit);
}
// 8-bit floats. On CUDA they are those of the OCP specification. On HIP they have no negative zero, as on
// gfx940.
static double eight_value(uint8_t u, int mantissa) {
    int exponent = 7 - mantissa, bias = (1 << (exponent - 1)) - !HIP, e = u >> mantissa & ((1 << exponent) - 1);
    int m = u & ((1 << mantissa) - 1), top = (1 << exponent) - 1;
    if (HIP && u == 0x80) return NAN;
    if (!HIP && mantissa == 3 && (u & 0x7f) == 0x7f) return NAN;
    if (!HIP && mantissa == 2 && e == top) return m ? NAN : u >> 7 ? -INFINITY : INFINITY;
    double v = e ? ldexp((1 << mantissa) + m, e - bias - mantissa) : ldexp(m, 1 - bias - mantissa);
    return u >> 7 ? -v : v;
}
static double load_value(int t, Address at, int64_t i) {
    switch (t) {
    case R64: return ((double*)at)[i];
    case R32: return ((float*)at)[i];
    case R16: return half_value(((uint16_t*)at)[i]);
    case I8: return ((int8_t*)at)[i];
    case I32: return ((int32_t*)at)[i];
    case E4M3: return eight_value(((uint8_t*)at)[i], 3);
    case E5M2: return eight_value(((uint8_t*)at)[i], 2);
    default: {
        uint32_t bits = (uint32_t)((uint16_t*)at)[i] << 16;
        float f;
        memcpy(&f, &bits, 4);
        return f;
    }
    }
}
static void store_value(int t, Address at, int64_t i, double v) {
    switch (t) {
    case R64: ((double*)at)[i] = v; break;
    case R32: ((float*)at)[i] = (float)v; break;
    case R16: ((uint16_t*)at)[i] = half_bits(v); break;
    // Sums of bytes wrap.
    case I32: ((int32_t*)at)[i] = (int32_t)(int64_t)v; break;
    default: {
        float f = cut(v, 7);
        uint32_t bits;
        memcpy(&bits, &f, 4);
        ((uint16_t*)at)[i] = std::isnan(v) ? 0x7fc0 : (uint16_t)(bits >> 16);
    }
    }
}

// A column-major matrix, and the size of its batch.
struct Matrix {
    int type;
    int64_t rows, cols, ld, batch = 1, step = 0;
    // Number of bytes from the first element to the end of the last.
    size_t bytes() const {
        int64_t last = (batch - 1) * step + (cols - 1) * ld + rows;
        return (size_t)last * type_size(type);
    }
};
static bool same(const Matrix& a, const Matrix& b) {
    return a.type == b.type && a.rows == b.rows && a.cols == b.cols && a.ld == b.ld && a.batch == b.batch && a.step == b.step;
}
static bool apart(Address a, size_t n, Address b, size_t m) { return a + n <= b || b + m <= a; }

struct Epilogue {
    int activation = 0;
    Address bias = 0, scale = 0;
};
static double gelu_by_tanh(double x) { return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

// D = op(A) op(B), then the epilogue. If `digits` is not 0, the factors are first rounded to this many binary
// digits after the leading one.
static void multiply(const Matrix& a, Address pa, bool ta, const Matrix& b, Address pb, bool tb, const Matrix& d, Address pd,
                     int digits, const Epilogue& e) {
    int64_t k = ta ? a.rows : a.cols;
    auto factor = [&](const Matrix& m, Address p, int64_t i) {
        double v = load_value(m.type, p, i);
        return digits ? (double)cut(v, digits) : v;
    };
    std::vector<double> x((size_t)(d.rows * k)), y((size_t)(k * d.cols));
    for (int64_t g = 0; g < d.batch; g++) {
        for (int64_t i = 0; i < d.rows; i++)
            for (int64_t l = 0; l < k; l++)
                x[(size_t)(i * k + l)] = factor(a, pa, g * a.step + (ta ? l + i * a.ld : i + l * a.ld));
        for (int64_t j = 0; j < d.cols; j++)
            for (int64_t l = 0; l < k; l++)
                y[(size_t)(j * k + l)] = factor(b, pb, g * b.step + (tb ? j + l * b.ld : l + j * b.ld));
        for (int64_t j = 0; j < d.cols; j++)
            for (int64_t i = 0; i < d.rows; i++) {
                double s = 0;
                for (int64_t l = 0; l < k; l++) s += x[(size_t)(i * k + l)] * y[(size_t)(j * k + l)];
                if (e.scale) s *= *(const float*)e.scale;
                if (e.bias) s += load_value(d.type, e.bias, i);
                if (e.activation == 2) s = s > 0 ? s : 0;
                if (e.activation == 32) s = gelu_by_tanh(s);
                store_value(d.type, pd, g * d.step + i + j * d.ld, s);
            }
    }
}

// ---- cuBLASLt and hipBLASLt

struct LtHandle { int device; };
struct LtDesc {
    int compute, scale;
    bool ta = false, tb = false;
    uint32_t epilogue = 1;
    Address bias = 0, factor = 0;
};
struct LtPreference {
    uint64_t workspace = 0;
    uint32_t alignment[4] = {256, 256, 256, 256}, reductions = 7;
};
static std::set<Handle> lt_handles, lt_descs, lt_layouts, lt_preferences;

enum { LT_F32 = HIP ? 2 : 68, LT_TF32 = HIP ? 6 : 77, LT_F64 = HIP ? 7 : 70, LT_I32 = HIP ? 9 : 72 };

#define LT(cuda, hip) extern "C" int NAME(cuda, hip)

LT(cublasLtCreate, hipblasLtCreate)(Handle* h) {
    LOCK;
    // The library is made for a newer version of CUDA than the driver.
    if (!HIP && compiler_ > DRIVER_MAJOR) return LT_NOT_INITIALISED;
    if (!initialised_ || current_ < 0 || lost_ || hide_products_) return LT_NOT_INITIALISED;
    *h = new LtHandle{current_};
    lt_handles.insert(*h);
    handles_++;
    return LT_OK;
}
LT(cublasLtDestroy, hipblasLtDestroy)(Handle h) {
    LOCK;
    if (!lt_handles.count(h) || current_ != ((LtHandle*)h)->device) return LT_NOT_INITIALISED;
    lt_handles.erase(h);
    delete (LtHandle*)h;
    handles_--;
    return LT_OK;
}
#ifdef STANDIN_HIP
extern "C" int hipblasLtGetVersion(Handle h, int* v) {
    LOCK;
    if (!lt_handles.count(h)) return LT_NOT_INITIALISED;
    *v = 1100;
    return LT_OK;
}
#else
extern "C" int cublasLtGetProperty(int which, int* v) {
    static const int version[3] = {12, 9, 3};
    if (which < 0 || which > 2) return LT_INVALID;
    *v = version[which];
    return LT_OK;
}
#endif

template <class T> static int forget(std::set<Handle>& all, Handle h) {
    LOCK;
    if (!all.erase(h)) return LT_INVALID;
    delete (T*)h;
    descriptions_--;
    return LT_OK;
}
template <class T> static Handle keep(std::set<Handle>& all, T* t) {
    all.insert(t);
    descriptions_++;
    return t;
}

LT(cublasLtMatmulDescCreate, hipblasLtMatmulDescCreate)(Handle* d, int compute, int scale) {
    LOCK;
    if (compute != LT_F32 && compute != LT_TF32 && compute != LT_F64 && compute != LT_I32) return LT_INVALID;
    *d = keep(lt_descs, new LtDesc{compute, scale});
    return LT_OK;
}
LT(cublasLtMatmulDescDestroy, hipblasLtMatmulDescDestroy)(Handle d) { return forget<LtDesc>(lt_descs, d); }
LT(cublasLtMatmulDescSetAttribute, hipblasLtMatmulDescSetAttribute)(Handle h, int which, const void* v, size_t n) {
    LOCK;
    if (!lt_descs.count(h)) return LT_INVALID;
    LtDesc& d = *(LtDesc*)h;
    bool a = which == (HIP ? 0 : 3), b = which == (HIP ? 1 : 4);
    if (a || b) {
        int op, none = HIP ? 111 : 0;
        if (n != 4) return LT_INVALID;
        memcpy(&op, v, 4);
        if (op != none && op != none + 1) return LT_INVALID;
        (a ? d.ta : d.tb) = op == none + 1;
    } else if (which == (HIP ? 2 : 7)) {
        if (n != 4) return LT_INVALID;
        memcpy(&d.epilogue, v, 4);
        if (!std::set<uint32_t>{1, 2, 4, 6, 32, 36}.count(d.epilogue)) return LT_INVALID;
    } else if (which == (HIP ? 3 : 8)) {
        if (n != 8) return LT_INVALID;
        memcpy(&d.bias, v, 8);
    } else if (which == (HIP ? 5 : 17)) {
        if (n != 8) return LT_INVALID;
        memcpy(&d.factor, v, 8);
    } else {
        return LT_INVALID;
    }
    return LT_OK;
}

LT(cublasLtMatrixLayoutCreate, hipblasLtMatrixLayoutCreate)(Handle* l, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    LOCK;
    if (!type_size(type)) return LT_INVALID;
    *l = keep(lt_layouts, new Matrix{type, (int64_t)rows, (int64_t)cols, ld});
    return LT_OK;
}
LT(cublasLtMatrixLayoutDestroy, hipblasLtMatrixLayoutDestroy)(Handle l) { return forget<Matrix>(lt_layouts, l); }
LT(cublasLtMatrixLayoutSetAttribute, hipblasLtMatrixLayoutSetAttribute)(Handle h, int which, const void* v, size_t n) {
    LOCK;
    if (!lt_layouts.count(h)) return LT_INVALID;
    Matrix& m = *(Matrix*)h;
    int32_t count;
    if (which == (HIP ? 0 : 5) && n == 4) {
        memcpy(&count, v, 4);
        m.batch = count;
    } else if (which == (HIP ? 1 : 6) && n == 8) {
        memcpy(&m.step, v, 8);
    } else {
        return LT_INVALID;
    }
    return LT_OK;
}

LT(cublasLtMatmulPreferenceCreate, hipblasLtMatmulPreferenceCreate)(Handle* p) {
    LOCK;
    *p = keep(lt_preferences, new LtPreference());
    return LT_OK;
}
LT(cublasLtMatmulPreferenceDestroy, hipblasLtMatmulPreferenceDestroy)(Handle p) { return forget<LtPreference>(lt_preferences, p); }
LT(cublasLtMatmulPreferenceSetAttribute, hipblasLtMatmulPreferenceSetAttribute)(Handle h, int which, const void* v, size_t n) {
    LOCK;
    if (!lt_preferences.count(h)) return LT_INVALID;
    LtPreference& p = *(LtPreference*)h;
    if (which == 1 && n == 8) memcpy(&p.workspace, v, 8);
    else if (!HIP && which >= 5 && which <= 8 && n == 4) memcpy(&p.alignment[which - 5], v, 4);
    else if (!HIP && which == 3 && n == 4) memcpy(&p.reductions, v, 4);
    else return LT_INVALID;
    return LT_OK;
}

// The problem for which an algorithm was selected. As in the real libraries, callers cannot read it, and the
// algorithm is valid for this problem only.
struct Algorithm {
    uint32_t problem;
    uint16_t workspace;
    uint8_t alignment[2];
    uint32_t which;
};
static uint32_t problem(const LtDesc& d, const Matrix& a, const Matrix& b, const Matrix& c) {
    std::stringstream s;
    s << d.compute << ' ' << d.ta << d.tb << ' ' << d.epilogue;
    for (const Matrix* m : {&a, &b, &c})
        s << ' ' << m->type << ' ' << m->rows << ' ' << m->cols << ' ' << m->ld << ' ' << m->batch << ' ' << m->step;
    return (uint32_t)digest(s.str());
}
static int log2_of(uint64_t v) { return v ? __builtin_ctzll(v) : 8; }

// Whether the library has kernels for a problem.
static int supported(const LtDesc& d, const Matrix& a, const Matrix& b, const Matrix& c) {
    int64_t m = d.ta ? a.cols : a.rows, k = d.ta ? a.rows : a.cols, n = d.tb ? b.rows : b.cols;
    if ((d.tb ? b.cols : b.rows) != k || c.rows != m || c.cols != n) return LT_INVALID;
    for (const Matrix* x : {&a, &b, &c})
        if (x->rows <= 0 || x->cols <= 0 || x->ld < x->rows || x->batch != c.batch) return LT_INVALID;
    // Results of a batch must not overlap.
    if (c.batch > 1 && c.step < (c.cols - 1) * c.ld + c.rows) return LT_INVALID;
    struct Row { int compute, scale, factor, result; };
    static const std::vector<Row> rows = {
        {LT_F32, R32, R32, R32}, {LT_TF32, R32, R32, R32}, {LT_F32, R32, R16, R16}, {LT_F32, R32, RB16, RB16},
        {LT_F32, R32, RB16, R32}, {LT_F32, R32, R16, R32}, {LT_I32, I32, I8, I32}};
    bool eight = type_size(a.type) == 1 && a.type != I8;
    if (eight || (type_size(b.type) == 1 && b.type != I8)) {
        // FP8 products: both factors must be FP8, the first one transposed, and everything aligned to 16
        // bytes. On CUDA, at least one factor must be E4M3.
        if (!eight || type_size(b.type) != 1 || b.type == I8) return LT_NOT_SUPPORTED;
        if (!HIP && a.type == E5M2 && b.type == E5M2) return LT_NOT_SUPPORTED;
        if (d.compute != LT_F32 || d.scale != R32 || (c.type != R32 && c.type != R16 && c.type != RB16)) return LT_NOT_SUPPORTED;
        if (!d.ta || d.tb || m % 16 || k % 16 || a.ld % 16 || b.ld % 16 || a.step % 16 || b.step % 16) return LT_NOT_SUPPORTED;
        if (c.ld * (int64_t)type_size(c.type) % 16) return LT_NOT_SUPPORTED;
        // If the result is f32, the real library takes a bias of another type.
        if ((d.epilogue & 4) && c.type == R32) return LT_NOT_SUPPORTED;
        return LT_OK;
    }
    if (d.factor) return LT_INVALID;
    bool found = !HIP && d.compute == LT_F64 && d.scale == R64 && a.type == R64 && c.type == R64;
    for (const Row& r : rows)
        found |= r.compute == d.compute && r.scale == d.scale && r.factor == a.type && r.result == c.type;
    if (!found || a.type != b.type) return LT_NOT_SUPPORTED;
    // Products of bytes: the first factor must be transposed and the second not, and sizes must be multiples
    // of 4.
    if (!HIP && a.type == I8)
        if (!d.ta || d.tb || m % 4 || k % 4 || a.ld % 4 || b.ld % 4 || c.ld % 4) return LT_NOT_SUPPORTED;
    if (d.epilogue != 1 && c.type != R32 && c.type != R16 && c.type != RB16) return LT_NOT_SUPPORTED;
    return LT_OK;
}

LT(cublasLtMatmulAlgoGetHeuristic, hipblasLtMatmulAlgoGetHeuristic)(Handle h, Handle d, Handle a, Handle b, Handle c, Handle out,
                                                                   Handle p, int wanted, uint64_t* results, int* found) {
    LOCK;
    *found = 0;
    if (!lt_handles.count(h) || current_ != ((LtHandle*)h)->device) return LT_NOT_INITIALISED;
    if (!lt_descs.count(d) || !lt_layouts.count(a) || !lt_layouts.count(b) || !lt_layouts.count(c) || !lt_layouts.count(out) ||
        !lt_preferences.count(p) || wanted < 1)
        return LT_INVALID;
    const LtDesc& desc = *(LtDesc*)d;
    const Matrix &ma = *(Matrix*)a, &mb = *(Matrix*)b, &mc = *(Matrix*)c;
    const LtPreference& preference = *(LtPreference*)p;
    if (!same(mc, *(Matrix*)out)) return LT_INVALID;
    if (int code = supported(desc, ma, mb, mc)) return code;
    // Long sums are split if the workspace has room for the partial sums.
    int64_t k = desc.ta ? ma.rows : ma.cols;
    uint64_t room = k >= 64 && preference.workspace >= 4096 && (preference.reductions & 2) ? 4096 : 0;
    if ((desc.epilogue & 4) && desc.bias % type_size(mc.type)) return LT_NOT_SUPPORTED;
    Algorithm algorithm = {problem(desc, ma, mb, mc), (uint16_t)room, {}, 0};
    // The alignments that the algorithm needs, as logarithms of 4 bits each. If the caller states a larger
    // alignment, the algorithm uses wider loads and needs it.
    auto most = [](uint64_t v) { return log2_of(v) > 4 ? 4 : log2_of(v); };
    algorithm.alignment[0] = (uint8_t)(most(preference.alignment[0]) | most(preference.alignment[1]) << 4);
    algorithm.alignment[1] = (uint8_t)(most(preference.alignment[2]) | most(desc.epilogue & 4 ? desc.bias : 0) << 4);
    // FP8 kernels load 16 bytes regardless of the preference.
    if (type_size(ma.type) == 1 && ma.type != I8) {
        for (int i = 0; i < 3; i++)
            if (preference.alignment[i] < 16) return LT_NOT_SUPPORTED;
        algorithm.alignment[0] = 4 << 4 | 4;
    }
    // hipBLASLt has no preferences for the alignment, so its algorithms may need any: here, 16 bytes.
    if (HIP) algorithm.alignment[0] = algorithm.alignment[1] = 4 << 4 | 4;
    // There are three algorithms. The second one needs no workspace.
    const size_t words = HIP ? 3 : 8;
    for (int i = 0; i < 3 && i < wanted; i++, ++*found, results += words + 4) {
        algorithm.which = (uint32_t)i;
        algorithm.workspace = (uint16_t)(i == 1 ? 0 : room);
        memset(results, 0, (words + 4) * 8);
        memcpy(results, &algorithm, sizeof algorithm);
        results[words] = algorithm.workspace;
        ((int32_t*)results)[2 * words + 2] = LT_OK;
    }
    return LT_OK;
}

LT(cublasLtMatmul, hipblasLtMatmul)(Handle h, Handle d, const void* alpha, Address a, Handle la, Address b, Handle lb,
                                    const void* beta, Address c, Handle lc, Address out, Handle lout, const uint64_t* algo,
                                    Address workspace, size_t bytes, Handle stream) {
    LOCK;
    if (lost_) return LT_FAILED;
    if (!lt_handles.count(h) || current_ != ((LtHandle*)h)->device) return LT_NOT_INITIALISED;
    if (!lt_descs.count(d) || !lt_layouts.count(la) || !lt_layouts.count(lb) || !lt_layouts.count(lc) || !lt_layouts.count(lout))
        return LT_INVALID;
    if (!live(stream)) return LT_FAILED;
    if (fails()) return LT_FAILED;
    const LtDesc desc = *(LtDesc*)d;
    const Matrix ma = *(Matrix*)la, mb = *(Matrix*)lb, mc = *(Matrix*)lc;
    if (!same(mc, *(Matrix*)lout) || c != out) return LT_INVALID;
    if (int code = supported(desc, ma, mb, mc)) return code;
    Algorithm algorithm;
    if (!algo) return LT_INVALID;
    memcpy(&algorithm, algo, sizeof algorithm);
    if (algorithm.problem != problem(desc, ma, mb, mc)) return LT_INVALID;
    auto aligned = [](Address at, int log2) { return at % (1u << log2) == 0; };
    bool biased = desc.epilogue & 4;
    if (!aligned(a, algorithm.alignment[0] & 15) || !aligned(b, algorithm.alignment[0] >> 4) ||
        !aligned(out, algorithm.alignment[1] & 15) || (biased && !aligned(desc.bias, algorithm.alignment[1] >> 4)) ||
        a % type_size(ma.type) || b % type_size(mb.type) || out % type_size(mc.type))
        return LT_INVALID;
    if (bytes < algorithm.workspace || (bytes && workspace % 256)) return LT_INVALID;
    if (failing_product_ == (int64_t)algorithm.which) return LT_NOT_SUPPORTED;
    bool one, zero;
    if (desc.scale == R64) one = *(const double*)alpha == 1, zero = *(const double*)beta == 0;
    else if (desc.scale == I32) one = *(const int32_t*)alpha == 1, zero = *(const int32_t*)beta == 0;
    else one = *(const float*)alpha == 1, zero = *(const float*)beta == 0;
    if (!one || !zero) return LT_NOT_SUPPORTED;
    size_t bias_bytes = (size_t)mc.rows * type_size(mc.type);
    if (!inside(a, ma.bytes()) || !inside(b, mb.bytes()) || !inside(out, mc.bytes()) ||
        (biased && !inside(desc.bias, bias_bytes)) || (desc.factor && !inside(desc.factor, 4)) || (bytes && !inside(workspace, bytes)))
        return LT_FAILED;
    if (!apart(out, mc.bytes(), a, ma.bytes()) || !apart(out, mc.bytes(), b, mb.bytes()) ||
        (biased && !apart(out, mc.bytes(), desc.bias, bias_bytes)))
        return LT_INVALID;
    return on_stream(stream, [=]() {
        if (bytes) memset((void*)workspace, 0xee, bytes);
        Epilogue e;
        e.activation = (int)(desc.epilogue & (2 | 32));
        e.bias = biased ? desc.bias : 0;
        e.scale = desc.factor;
        epilogues_ += desc.epilogue != 1;
        multiply(ma, a, desc.ta, mb, b, desc.tb, mc, out, desc.compute == LT_TF32 ? 10 : 0, e);
        clock_ += (uint64_t)product_takes_[algorithm.which % 8];
        ran_product_ = algorithm.which;
        return (int)LT_OK;
    });
}

// ---- counters and controls of the tests

static int64_t libraries_get(const std::string& n) {
    if (n == "handles") return handles_;
    if (n == "descriptions") return descriptions_;
    // Number of products and convolutions, and of those with an epilogue.
    if (n == "library calls") return library_calls_;
    if (n == "epilogues") return epilogues_;
    if (n == "winograds") return winograds_;
    if (n == "graph calls") return graph_calls_;
    if (n == "fail graph") return fail_graph_;
    if (n == "attentions") return attentions_;
    // The algorithm of the last product and of the last convolution.
    if (n == "product algorithm") return ran_product_;
    if (n == "convolution algorithm") return ran_convolution_;
    return -1;
}
static int libraries_set(const std::string& n, int64_t v) {
    // After `v` more calls, one call fails.
    if (n == "fail library") fail_library_ = v;
    // The library of products fails to initialise.
    else if (n == "hide products") hide_products_ = v;
    // As "fail library", for calls of the graph API.
    else if (n == "fail graph") fail_graph_ = v;
    // 91002 is 9.10.2.
    else if (n == "dnn version") dnn_version_ = v;
    // The algorithm that fails when it runs; -1 for none.
    else if (n == "failing product") failing_product_ = v;
    else if (n == "failing convolution") failing_convolution_ = v;
    // Microseconds that the algorithm with the number in the name takes, on the stand-in's clock.
    else if (n.compare(0, 13, "product takes") == 0) product_takes_[atoi(n.c_str() + 13) % 8] = v;
    else if (n.compare(0, 17, "convolution takes") == 0) convolution_takes_[atoi(n.c_str() + 17) % 8] = v;
    else return INVALID;
    return OK;
}
