// Part of standin.cpp: the stand-in for cuDNN's convolutions, as blas.cpp is for cuBLASLt. Status codes and
// other constants have the values of cuDNN 9.

enum { DNN_OK = 0, DNN_NOT_INITIALISED = 1001, DNN_BAD = 2000, DNN_NOT_SUPPORTED = 3000, DNN_FAILED = 5000 };

struct DnnHandle {
    int device;
    Handle stream = nullptr;
};
struct Tensor {
    int type = -1;
    std::vector<int64_t> dims, strides;
    size_t bytes() const {
        int64_t last = 1;
        for (size_t i = 0; i < dims.size(); i++) last += (dims[i] - 1) * strides[i];
        return (size_t)last * type_size(type);
    }
};
struct Convolution {
    std::vector<int64_t> pad, stride, dilation;
    int compute = -1, groups = 1, math = 0;
};
struct Activation { int mode = -1, nan = 0; };
static std::set<Handle> dnn_handles, dnn_tensors, dnn_filters, dnn_convs, dnn_activations;

// Converts cudnnDataType_t to cudaDataType.
static int dnn_type(int t) { return t == 0 ? (int)R32 : t == 1 ? (int)R64 : t == 2 ? (int)R16 : t == 9 ? (int)RB16 : -1; }

extern "C" int cudnnGetProperty(int which, int* v) {
    const int64_t version[3] = {dnn_version_ / 10000, dnn_version_ / 100 % 100, dnn_version_ % 100};
    if (which < 0 || which > 2) return DNN_BAD;
    *v = (int)version[which];
    return DNN_OK;
}
extern "C" int cudnnCreate(Handle* h) {
    LOCK;
    if (!initialised_ || current_ < 0 || lost_) return DNN_NOT_INITIALISED;
    *h = new DnnHandle{current_};
    dnn_handles.insert(*h);
    handles_++;
    return DNN_OK;
}
extern "C" int cudnnDestroy(Handle h) {
    LOCK;
    if (!dnn_handles.count(h) || current_ != ((DnnHandle*)h)->device) return DNN_BAD;
    dnn_handles.erase(h);
    delete (DnnHandle*)h;
    handles_--;
    return DNN_OK;
}
extern "C" int cudnnSetStream(Handle h, Handle s) {
    LOCK;
    if (!dnn_handles.count(h) || !live(s)) return DNN_BAD;
    ((DnnHandle*)h)->stream = s;
    return DNN_OK;
}
#define DESCRIPTION(NAME, TYPE, ALL)                             \
    extern "C" int cudnnCreate##NAME##Descriptor(Handle* d) {    \
        LOCK;                                                    \
        *d = keep(ALL, new TYPE());                              \
        return DNN_OK;                                           \
    }                                                            \
    extern "C" int cudnnDestroy##NAME##Descriptor(Handle d) { return forget<TYPE>(ALL, d) ? (int)DNN_BAD : (int)DNN_OK; }
DESCRIPTION(Tensor, Tensor, dnn_tensors)
DESCRIPTION(Filter, Tensor, dnn_filters)
DESCRIPTION(Convolution, Convolution, dnn_convs)
DESCRIPTION(Activation, Activation, dnn_activations)

extern "C" int cudnnSetTensorNdDescriptor(Handle h, int type, int n, const int* dims, const int* strides) {
    LOCK;
    if (!dnn_tensors.count(h) || dnn_type(type) < 0 || n < 3 || n > 8) return DNN_BAD;
    Tensor& t = *(Tensor*)h;
    t.type = dnn_type(type);
    t.dims.assign(dims, dims + n);
    t.strides.assign(strides, strides + n);
    for (int i = 0; i < n; i++)
        if (dims[i] <= 0 || strides[i] <= 0) return DNN_BAD;
    return DNN_OK;
}
extern "C" int cudnnSetFilterNdDescriptor(Handle h, int type, int format, int n, const int* dims) {
    LOCK;
    if (!dnn_filters.count(h) || dnn_type(type) < 0 || format != 0 || n < 3 || n > 8) return DNN_BAD;
    Tensor& t = *(Tensor*)h;
    t.type = dnn_type(type);
    t.dims.assign(dims, dims + n);
    t.strides.assign(n, 1);
    for (int i = n - 2; i >= 0; i--) t.strides[i] = t.strides[i + 1] * dims[i + 1];
    return DNN_OK;
}
extern "C" int cudnnSetConvolutionNdDescriptor(Handle h, int n, const int* pad, const int* stride, const int* dilation, int mode,
                                               int compute) {
    LOCK;
    if (!dnn_convs.count(h) || n < 1 || n > 6 || mode != 1 || dnn_type(compute) < 0) return DNN_BAD;
    Convolution& c = *(Convolution*)h;
    for (int i = 0; i < n; i++)
        if (pad[i] < 0 || stride[i] <= 0 || dilation[i] <= 0) return DNN_BAD;
    c.pad.assign(pad, pad + n);
    c.stride.assign(stride, stride + n);
    c.dilation.assign(dilation, dilation + n);
    c.compute = dnn_type(compute);
    return DNN_OK;
}
extern "C" int cudnnSetConvolutionGroupCount(Handle h, int groups) {
    LOCK;
    if (!dnn_convs.count(h) || groups < 1) return DNN_BAD;
    ((Convolution*)h)->groups = groups;
    return DNN_OK;
}
extern "C" int cudnnSetConvolutionMathType(Handle h, int math) {
    LOCK;
    if (!dnn_convs.count(h) || math < 0 || math > 3) return DNN_BAD;
    ((Convolution*)h)->math = math;
    return DNN_OK;
}
extern "C" int cudnnSetActivationDescriptor(Handle h, int mode, int nan, double) {
    LOCK;
    if (!dnn_activations.count(h) || mode < 0 || mode > 6 || nan < 0 || nan > 1) return DNN_BAD;
    *(Activation*)h = {mode, nan};
    return DNN_OK;
}

struct Problem {
    const Tensor &x, &w, &y;
    const Convolution& c;
};
static int check_conv(Handle h, Handle x, Handle w, Handle c, Handle y) {
    if (!dnn_handles.count(h) || !dnn_tensors.count(x) || !dnn_filters.count(w) || !dnn_convs.count(c) || !dnn_tensors.count(y))
        return DNN_BAD;
    if (current_ != ((DnnHandle*)h)->device) return DNN_BAD;
    const Problem p{*(Tensor*)x, *(Tensor*)w, *(Tensor*)y, *(Convolution*)c};
    size_t n = p.x.dims.size(), s = p.c.pad.size();
    // Fewer than two spatial axes are not supported.
    if (n != s + 2 || s < 2 || s > 3 || p.w.dims.size() != n || p.y.dims.size() != n) return DNN_NOT_SUPPORTED;
    if (p.x.dims[1] != p.w.dims[1] * p.c.groups || p.w.dims[0] % p.c.groups || p.y.dims[0] != p.x.dims[0] || p.y.dims[1] != p.w.dims[0])
        return DNN_BAD;
    for (size_t i = 0; i < s; i++) {
        int64_t reach = p.c.dilation[i] * (p.w.dims[2 + i] - 1) + 1, room = p.x.dims[2 + i] + 2 * p.c.pad[i];
        if (room < reach || p.y.dims[2 + i] != (room - reach) / p.c.stride[i] + 1) return DNN_BAD;
    }
    if (p.x.type != p.w.type || p.x.type != p.y.type) return DNN_NOT_SUPPORTED;
    if (p.c.compute != (p.x.type == R64 ? (int)R64 : (int)R32)) return DNN_NOT_SUPPORTED;
    return DNN_OK;
}
// Algorithms 1 and 4 need a workspace. Algorithm 4 (FFT) is not deterministic here, so the driver must not
// use it. Algorithm 6 (Winograd) loses precision.
static size_t room_of(int algorithm) { return algorithm == 1 ? 8192 : algorithm == 4 ? 1 << 20 : 0; }

struct Performance_ {
    int algorithm, status;
    float time;
    size_t memory;
    int deterministic, math, reserved[3];
};
static_assert(sizeof(Performance_) == 48, "cudnnConvolutionFwdAlgoPerf_t");

extern "C" int cudnnGetConvolutionForwardAlgorithm_v7(Handle h, Handle x, Handle w, Handle c, Handle y, int wanted, int* found,
                                                      Performance_* all) {
    LOCK;
    *found = 0;
    if (int code = check_conv(h, x, w, c, y)) return code;
    int math = ((Convolution*)c)->math;
    // f32 on tensor cores is TF32.
    bool single = ((Tensor*)x)->type == R32;
    // Winograd is for 3 x 3 windows.
    const Tensor& window = *(Tensor*)w;
    bool three = window.dims.size() == 4 && window.dims[2] == 3 && window.dims[3] == 3;
    const int order[4] = {4, three ? 6 : 1, three ? 1 : 0, 0};
    for (int i = 0; i < 3 + three && i < wanted; i++, ++*found)
        all[i] = {order[i], DNN_OK, 1.0f + (float)i, room_of(order[i]), order[i] != 4, single && math != 3 ? 0 : math, {}};
    return DNN_OK;
}
extern "C" int cudnnGetConvolutionForwardWorkspaceSize(Handle h, Handle x, Handle w, Handle c, Handle y, int algorithm, size_t* n) {
    LOCK;
    if (int code = check_conv(h, x, w, c, y)) return code;
    if (algorithm < 0 || algorithm > 7) return DNN_BAD;
    *n = room_of(algorithm);
    return DNN_OK;
}

static int forward(Handle h, const void* alpha, Handle hx, Address x, Handle hw, Address w, Handle hc, int algorithm, Address room,
                   size_t bytes, const void* beta, Handle hy, Address y, Address bias, int activation) {
    if (lost_) return DNN_FAILED;
    if (int code = check_conv(h, hx, hw, hc, hy)) return code;
    Handle stream = ((DnnHandle*)h)->stream;
    if (!live(stream)) return DNN_BAD;
    if (fails()) return DNN_FAILED;
    const Tensor tx = *(Tensor*)hx, tw = *(Tensor*)hw, ty = *(Tensor*)hy;
    const Convolution c = *(Convolution*)hc;
    bool one = tx.type == R64 ? *(const double*)alpha == 1 : *(const float*)alpha == 1;
    bool zero = tx.type == R64 ? *(const double*)beta == 0 : *(const float*)beta == 0;
    if (!one || !zero) return DNN_NOT_SUPPORTED;
    if (bytes < room_of(algorithm)) return DNN_BAD;
    if (failing_convolution_ == algorithm) return DNN_FAILED;
    if (!inside(x, tx.bytes()) || !inside(w, tw.bytes()) || !inside(y, ty.bytes()) || (bytes && !inside(room, bytes)) ||
        (bias && !inside(bias, (size_t)tw.dims[0] * type_size(ty.type))))
        return DNN_FAILED;
    if (!apart(y, ty.bytes(), x, tx.bytes()) || !apart(y, ty.bytes(), w, tw.bytes())) return DNN_BAD;
    // Number of fraction bits that factors keep: 8 for Winograd, whose transforms lose precision; 10 for
    // TF32; 0 stands for all.
    int digits = algorithm == 6 ? 8 : tx.type == R32 && c.math != 3 ? 10 : 0;
    winograds_ += algorithm == 6;
    return on_stream(stream, [=]() {
        if (bytes) memset((void*)room, 0xee, bytes);
        // With two spatial axes, a third one of size 1 is prepended.
        auto three = [](const std::vector<int64_t>& v, size_t from, int64_t fill) {
            std::vector<int64_t> r(v.begin() + (long)from, v.end());
            while (r.size() < 3) r.insert(r.begin(), fill);
            return r;
        };
        auto xs = three(tx.dims, 2, 1), ws = three(tw.dims, 2, 1), ys = three(ty.dims, 2, 1), pad = three(c.pad, 0, 0),
             stride = three(c.stride, 0, 1), dilation = three(c.dilation, 0, 1);
        auto value = [&](const Tensor& t, Address p, int64_t i) {
            double v = load_value(t.type, p, i);
            return digits ? (double)cut(v, digits) : v;
        };
        int64_t outs = tw.dims[0], ins = tw.dims[1], per = outs / c.groups, plane = xs[0] * xs[1] * xs[2],
                window = ws[0] * ws[1] * ws[2], at = 0;
        for (int64_t n = 0; n < ty.dims[0]; n++)
            for (int64_t o = 0; o < outs; o++)
                for (int64_t i = 0; i < ys[0]; i++)
                    for (int64_t j = 0; j < ys[1]; j++)
                        for (int64_t k = 0; k < ys[2]; k++, at++) {
                            double s = 0;
                            for (int64_t q = 0; q < ins; q++)
                                for (int64_t v = 0; v < window; v++) {
                                    int64_t p[3] = {v / (ws[1] * ws[2]), v / ws[2] % ws[1], v % ws[2]}, z[3] = {i, j, k};
                                    bool in = true;
                                    for (int e = 0; e < 3; e++) {
                                        z[e] = z[e] * stride[(size_t)e] - pad[(size_t)e] + p[e] * dilation[(size_t)e];
                                        in &= z[e] >= 0 && z[e] < xs[(size_t)e];
                                    }
                                    if (!in) continue;
                                    int64_t from = (n * tx.dims[1] + o / per * ins + q) * plane + (z[0] * xs[1] + z[1]) * xs[2] + z[2];
                                    s += value(tx, x, from) * value(tw, w, (o * ins + q) * window + v);
                                }
                            if (bias) s += load_value(ty.type, bias, o);
                            if (activation == 1 && s <= 0) s = 0;
                            store_value(ty.type, y, at, s);
                        }
        epilogues_ += bias != 0;
        clock_ += (uint64_t)convolution_takes_[algorithm & 7];
        ran_convolution_ = algorithm;
        return (int)DNN_OK;
    });
}
extern "C" int cudnnConvolutionForward(Handle h, const void* alpha, Handle hx, Address x, Handle hw, Address w, Handle hc, int algorithm,
                                       Address room, size_t bytes, const void* beta, Handle hy, Address y) {
    LOCK;
    return forward(h, alpha, hx, x, hw, w, hc, algorithm, room, bytes, beta, hy, y, 0, 5);
}
extern "C" int cudnnConvolutionBiasActivationForward(Handle h, const void* alpha, Handle hx, Address x, Handle hw, Address w, Handle hc,
                                                     int algorithm, Address room, size_t bytes, const void* beta, Handle hz, Address z,
                                                     Handle hb, Address bias, Handle ha, Handle hy, Address y) {
    LOCK;
    if (!dnn_tensors.count(hz) || !dnn_tensors.count(hb) || !dnn_activations.count(ha) || !dnn_tensors.count(hy)) return DNN_BAD;
    const Tensor &tb = *(Tensor*)hb, &ty = *(Tensor*)hy;
    int mode = ((Activation*)ha)->mode;
    if (mode != 1 && mode != 5) return DNN_NOT_SUPPORTED;
    if (mode == 1 && ((Activation*)ha)->nan != 1) return DNN_BAD;
    // Without an activation only one algorithm is supported.
    if (mode == 5 && algorithm != 1) return DNN_NOT_SUPPORTED;
    if (!bias || !inside(z, ((Tensor*)hz)->bytes()) || tb.dims.size() != ty.dims.size() || tb.type != ty.type) return DNN_BAD;
    if (ty.type != R32 && ty.type != R16) return DNN_NOT_SUPPORTED;
    for (size_t i = 0; i < tb.dims.size(); i++)
        if (tb.dims[i] != (i == 1 ? ty.dims[1] : 1)) return DNN_BAD;
    return forward(h, alpha, hx, x, hw, w, hc, algorithm, room, bytes, beta, hy, y, bias, mode);
}
