// Included by standin.cpp if STANDIN_HIP is defined: the stand-in for rocBLAS, as blas.cpp is for hipBLASLt.

enum { ROC_OK = 0, ROC_HANDLE = 1, ROC_NOT_IMPLEMENTED = 2, ROC_POINTER = 3, ROC_SIZE = 4, ROC_MEMORY = 5, ROC_INTERNAL = 6,
       ROC_MISMATCH = 8, ROC_INCREASED = 9, ROC_UNCHANGED = 10, ROC_INVALID = 11 };

extern "C" int rocblas_get_version_string(char* to, size_t n);
// The real library terminates the process if no file beside it has kernels for the device.
static void tensile() {
    Dl_info own;
    if (!dladdr((void*)&rocblas_get_version_string, &own)) return;
    std::string path = own.dli_fname;
    path = path.substr(0, path.rfind('/')) + "/rocblas/library/TensileLibrary_lazy_" + STANDIN_ARCH + ".dat";
    if (access(path.c_str(), R_OK) == 0) return;
    fprintf(stderr, "stand-in: Cannot read %s\n", path.c_str());
    abort();
}

struct RocHandle {
    int device;
    Handle stream = nullptr;
    Address workspace = 0;
    size_t bytes = 0, asked = 0;
    bool atomics = true, asks = false;
};
static std::set<Handle> roc_handles;
#define ROC                                        \
    LOCK;                                          \
    if (!roc_handles.count(h)) return ROC_HANDLE; \
    RocHandle& r = *(RocHandle*)h

extern "C" int rocblas_get_version_string(char* to, size_t n) {
    snprintf(to, n, "4.4.0.stand-in");
    return ROC_OK;
}
extern "C" int rocblas_create_handle(Handle* h) {
    LOCK;
    if (!initialised_ || current_ < 0 || lost_) return ROC_INTERNAL;
    *h = new RocHandle{current_};
    roc_handles.insert(*h);
    handles_++;
    return ROC_OK;
}
extern "C" int rocblas_destroy_handle(Handle h) {
    LOCK;
    if (!roc_handles.count(h) || current_ != ((RocHandle*)h)->device) return ROC_HANDLE;
    roc_handles.erase(h);
    delete (RocHandle*)h;
    handles_--;
    return ROC_OK;
}
extern "C" int rocblas_set_stream(Handle h, Handle s) {
    ROC;
    if (s == r.stream) return ROC_OK;
    if (!live(s)) return ROC_INVALID;
    // The real library queries the stream's state, which is not permitted during a capture.
    if (((Stream*)s)->capture) {
        ((Stream*)s)->broken = true;
        return ROC_INTERNAL;
    }
    r.stream = s;
    return ROC_OK;
}
extern "C" int rocblas_set_workspace(Handle h, Address at, size_t n) {
    ROC;
    r.workspace = at;
    r.bytes = n;
    return ROC_OK;
}
extern "C" int rocblas_set_atomics_mode(Handle h, int mode) {
    ROC;
    r.atomics = mode != 0;
    return ROC_OK;
}
extern "C" int rocblas_start_device_memory_size_query(Handle h) {
    ROC;
    if (r.asks) return ROC_MISMATCH;
    r.asks = true;
    r.asked = 0;
    return ROC_OK;
}
extern "C" int rocblas_stop_device_memory_size_query(Handle h, size_t* n) {
    ROC;
    if (!r.asks) return ROC_MISMATCH;
    r.asks = false;
    *n = r.asked;
    return ROC_OK;
}
extern "C" int rocblas_gemm_strided_batched_ex(Handle h, int ta, int tb, int m, int n, int k, const void* alpha, Address a, int type_a,
                                               int lda, int64_t step_a, Address b, int type_b, int ldb, int64_t step_b,
                                               const void* beta, Address c, int type_c, int ldc, int64_t step_c, Address d, int type_d,
                                               int ldd, int64_t step_d, int batch, int compute, int algo, int32_t index,
                                               uint32_t flags) {
    ROC;
    auto type = [](int t) {
        switch (t) {
        case 150: return (int)R16;
        case 151: return (int)R32;
        case 152: return (int)R64;
        case 160: return (int)I8;
        case 162: return (int)I32;
        case 168: return (int)RB16;
        default: return -1;
        }
    };
    bool t = ta == 112, u = tb == 112;
    if ((!t && ta != 111) || (!u && tb != 111) || algo != 0 || index != 0 || flags != 0) return ROC_INVALID;
    Matrix x{type(type_a), t ? k : m, t ? m : k, lda, batch, step_a}, y{type(type_b), u ? n : k, u ? k : n, ldb, batch, step_b},
        z{type(type_d), m, n, ldd, batch, step_d};
    if (m <= 0 || n <= 0 || k <= 0 || batch <= 0 || lda < x.rows || ldb < y.rows || ldd < m || ldc != ldd || step_c != step_d)
        return ROC_SIZE;
    if (batch > 1 && step_d < (int64_t)(n - 1) * ldd + m) return ROC_SIZE;
    int factor = x.type, result = z.type, sums = type(compute);
    bool known = factor == y.type && type_c == type_d &&
                 ((factor == R64 && result == R64 && sums == R64) || (factor == I8 && result == I32 && sums == I32) ||
                  (factor == R32 && result == R32 && sums == R32) ||
                  ((factor == R16 || factor == RB16) && (result == factor || result == R32) && sums == R32));
    if (!known) return ROC_NOT_IMPLEMENTED;
    size_t need = k >= 64 ? 4096 : 0;
    if (r.asks) {
        bool more = need > r.asked;
        if (more) r.asked = need;
        return more ? ROC_INCREASED : ROC_UNCHANGED;
    }
    tensile();
    if (lost_ || current_ != r.device || !live(r.stream)) return ROC_INTERNAL;
    if (fails()) return ROC_INTERNAL;
    bool one = sums == R64 ? *(const double*)alpha == 1 : sums == I32 ? *(const int32_t*)alpha == 1 : *(const float*)alpha == 1;
    bool zero = sums == R64 ? *(const double*)beta == 0 : sums == I32 ? *(const int32_t*)beta == 0 : *(const float*)beta == 0;
    if (!one || !zero || c != d) return ROC_INVALID;
    // The caller must set a workspace that is large enough, so that the library does not allocate memory
    // itself.
    if (r.bytes < need || !r.workspace || !inside(r.workspace, r.bytes)) return ROC_MEMORY;
    if (!inside(a, x.bytes()) || !inside(b, y.bytes()) || !inside(d, z.bytes())) return ROC_INTERNAL;
    if (!apart(d, z.bytes(), a, x.bytes()) || !apart(d, z.bytes(), b, y.bytes())) return ROC_POINTER;
    Address room = r.workspace;
    return on_stream(r.stream, [=]() {
        memset((void*)room, 0xee, need);
        multiply(x, a, t, y, b, u, z, d, 0, Epilogue());
        return (int)ROC_OK;
    });
}
