// Part of standin.cpp: the stand-in for cuDNN's backend API. It supports one graph of operations, attention.
// It rejects what the real library rejects, according to the documentation of cudnn_graph.h and observations
// of version 9.28. A graph is computed operation by operation in double. Each result is rounded to the type
// of its tensor.

#ifndef STANDIN_OLDER
#include <memory>

enum {
    DNN_NULL = 2002, DNN_MISALIGNED = 2003, DNN_NOT_FINISHED = 2004, DNN_OUT_OF_BOUND = 2005, DNN_SHAPES = 2008, DNN_DUPLICATED = 2009,
    DNN_ATTRIBUTE_TYPE = 2010, DNN_KIND = 2012, DNN_PATTERN = 3001, DNN_SHAPE = 3002, DNN_TYPES = 3003, DNN_LAYOUT = 3004,
    DNN_SHARED = 3010, DNN_OUT_OF_MEMORY = 4003
};
// Types of descriptors.
enum { POINTWISE = 0, ENGINE = 2, CONFIG = 3, HEURISTICS = 4, PLAN = 5, OP_POINTWISE = 13, OP_GRAPH = 15, PACK = 16, TENSOR = 17, MATMUL = 18,
       OP_MATMUL = 19, REDUCTION = 21, OP_REDUCTION = 22, SOME_OP = 99 };
// Types of attributes.
enum { T_HANDLE = 0, T_DATA = 1, T_BOOL = 2, T_I64 = 3, T_POINTER = 6, T_HEUR = 8, T_NOTE = 11, T_MODE = 14, T_DESC = 15, T_REDUCE = 18 };
static size_t attribute_size(int t) {
    switch (t) {
    case T_HANDLE: case T_I64: case T_POINTER: case T_DESC: return 8;
    case T_BOOL: return 1;
    default: return 4;
    }
}

struct Rule {
    int kind, name, type;
    int64_t least, most;
    bool required;
    // If the values are descriptors, their required type.
    int of = -1;
};
static const Rule RULES[] = {
    {POINTWISE, 0, T_MODE, 1, 1, true},        {POINTWISE, 1, T_DATA, 1, 1, true},         {POINTWISE, 9, T_I64, 1, 1, false},
    {HEURISTICS, 200, T_HEUR, 1, 1, true},     {HEURISTICS, 201, T_DESC, 1, 1, true, OP_GRAPH},
    {PLAN, 400, T_HANDLE, 1, 1, true},         {PLAN, 401, T_DESC, 1, 1, true, CONFIG},
    {OP_POINTWISE, 750, T_DESC, 1, 1, true, POINTWISE}, {OP_POINTWISE, 751, T_DESC, 1, 1, true, TENSOR},
    {OP_POINTWISE, 752, T_DESC, 1, 1, false, TENSOR},   {OP_POINTWISE, 753, T_DESC, 1, 1, true, TENSOR},
    {OP_POINTWISE, 758, T_DESC, 1, 1, false, TENSOR},
    {OP_GRAPH, 800, T_HANDLE, 1, 1, true},     {OP_GRAPH, 801, T_DESC, 1, 200, true, SOME_OP},
    {TENSOR, 900, T_I64, 1, 1, true},          {TENSOR, 901, T_DATA, 1, 1, true},          {TENSOR, 902, T_I64, 1, 8, true},
    {TENSOR, 903, T_I64, 1, 8, true},          {TENSOR, 906, T_I64, 1, 1, true},           {TENSOR, 907, T_BOOL, 1, 1, false},
    {TENSOR, 908, T_BOOL, 1, 1, false},
    {PACK, 1000, T_I64, 1, 64, true},          {PACK, 1001, T_POINTER, 1, 64, true},       {PACK, 1003, T_POINTER, 1, 1, true},
    {MATMUL, 1500, T_DATA, 1, 1, true},
    {OP_MATMUL, 1520, T_DESC, 1, 1, true, TENSOR},      {OP_MATMUL, 1521, T_DESC, 1, 1, true, TENSOR},
    {OP_MATMUL, 1522, T_DESC, 1, 1, true, TENSOR},      {OP_MATMUL, 1523, T_DESC, 1, 1, true, MATMUL},
    {REDUCTION, 1600, T_REDUCE, 1, 1, true},   {REDUCTION, 1601, T_DATA, 1, 1, true},
    {OP_REDUCTION, 1610, T_DESC, 1, 1, true, TENSOR},   {OP_REDUCTION, 1611, T_DESC, 1, 1, true, TENSOR},
    {OP_REDUCTION, 1612, T_DESC, 1, 1, true, REDUCTION},
};

struct GraphTensor {
    int type = -1;
    int64_t id = 0, alignment = 0;
    std::vector<int64_t> dims, strides;
    bool is_virtual = false, is_value = false;
    int64_t count() const {
        int64_t n = 1;
        for (int64_t d : dims) n *= d;
        return n;
    }
    size_t size() const { return type == 2 || type == 9 ? 2 : type == 11 ? 1 : 4; }
    size_t bytes() const {
        int64_t last = 1;
        for (size_t i = 0; i < dims.size(); i++) last += (dims[i] - 1) * strides[i];
        return (size_t)last * size();
    }
};
// An operation. It refers to its tensors by id; 0 means no tensor.
struct Operation {
    int kind, mode = -1, precision = -1;
    int64_t axis = -1, in[3] = {0, 0, 0}, out = 0;
};
struct OperationGraph {
    std::vector<Operation> operations;
    std::map<int64_t, GraphTensor> tensors;
    int device;
};
struct Described {
    int kind;
    bool done = false;
    std::map<int, std::vector<unsigned char>> attributes;
    // Results of finalisation.
    std::shared_ptr<OperationGraph> graph;
    int engine = -1;
    template <class T> std::vector<T> all(int name) const {
        auto at = attributes.find(name);
        std::vector<T> v(at == attributes.end() ? 0 : at->second.size() / sizeof(T));
        if (!v.empty()) memcpy(v.data(), at->second.data(), v.size() * sizeof(T));
        return v;
    }
    template <class T> T one(int name, T otherwise) const {
        auto v = all<T>(name);
        return v.empty() ? otherwise : v[0];
    }
};
static std::set<Handle> described;
static thread_local std::string said_;

static int refuse(int code, const char* why) {
    said_ = why;
    return code;
}
// Counts a call. Returns whether the test has chosen this call to fail.
static bool graph_fails() {
    graph_calls_++;
    return fail_graph_ >= 0 && fail_graph_-- == 0;
}
#define GRAPH_CALL(CODE)                                              \
    LOCK;                                                             \
    if (graph_fails()) return refuse(CODE, "told to fail\nand more")

extern "C" void cudnnGetLastErrorString(char* to, size_t n) {
    if (!n) return;
    snprintf(to, n, "%s", said_.c_str());
}
extern "C" int cudnnBackendCreateDescriptor(int kind, Handle* to) {
    GRAPH_CALL(DNN_OUT_OF_MEMORY);
    static const std::set<int> known = {POINTWISE, ENGINE, CONFIG, HEURISTICS, PLAN, OP_POINTWISE, OP_GRAPH, PACK, TENSOR, MATMUL,
                                        OP_MATMUL, REDUCTION, OP_REDUCTION};
    if (!known.count(kind)) return refuse(DNN_NOT_SUPPORTED, "a descriptor of an unknown type");
    Described* d = new Described{};
    d->kind = kind;
    *to = keep(described, d);
    return DNN_OK;
}
extern "C" int cudnnBackendDestroyDescriptor(Handle h) {
    LOCK;
    // A plan's compiled code is released with it, after pending launches are done.
    if (described.count(h) && ((Described*)h)->kind == PLAN) {
        if (current_ < 0) return refuse(DNN_BAD, "a plan is destroyed in a thread without a context");
        flush_all();
    }
    return forget<Described>(described, h) ? refuse(DNN_BAD, "no descriptor") : (int)DNN_OK;
}
extern "C" int cudnnBackendSetAttribute(Handle h, int name, int type, int64_t n, const void* from) {
    GRAPH_CALL(DNN_OUT_OF_MEMORY);
    if (!described.count(h) || !from) return refuse(DNN_NULL, "no descriptor, or no values");
    Described& d = *(Described*)h;
    if (d.done) return refuse(DNN_BAD, "the descriptor is finished");
    for (const Rule& r : RULES) {
        if (r.kind != d.kind || r.name != name) continue;
        if (r.type != type) return refuse(DNN_ATTRIBUTE_TYPE, "an attribute of another type");
        if (n < r.least || n > r.most) return refuse(DNN_OUT_OF_BOUND, "the wrong number of values");
        if (type == T_HANDLE && !dnn_handles.count(*(Handle*)from)) return refuse(DNN_BAD, "no handle");
        for (int64_t i = 0; type == T_DESC && i < n; i++) {
            Handle other = ((Handle*)from)[i];
            if (!described.count(other)) return refuse(DNN_NULL, "no descriptor among the values");
            const Described& o = *(Described*)other;
            bool op = o.kind == OP_POINTWISE || o.kind == OP_MATMUL || o.kind == OP_REDUCTION;
            if (r.of == SOME_OP ? !op : o.kind != r.of) return refuse(DNN_KIND, "a descriptor of another kind");
            if (!o.done) return refuse(DNN_NOT_FINISHED, "a descriptor that is not finished");
        }
        const unsigned char* bytes = (const unsigned char*)from;
        d.attributes[name].assign(bytes, bytes + (size_t)n * attribute_size(type));
        return DNN_OK;
    }
    return refuse(DNN_BAD, "the descriptor has no such attribute");
}

static GraphTensor tensor_of(Handle h) {
    const Described& d = *(Described*)h;
    GraphTensor t;
    t.type = d.one<int>(901, -1);
    t.id = d.one<int64_t>(906, 0);
    t.alignment = d.one<int64_t>(900, 0);
    t.dims = d.all<int64_t>(902);
    t.strides = d.all<int64_t>(903);
    t.is_virtual = d.one<char>(907, 0) != 0;
    t.is_value = d.one<char>(908, 0) != 0;
    return t;
}
static GraphTensor tensor_at(const Described& d, int name) { return tensor_of(d.one<Handle>(name, nullptr)); }

// Number of operands of a pointwise function; 0 if the function is not supported.
static int operands_of(int mode) {
    switch (mode) {
    case 13: case 15: case 501: return 1;
    case 0: case 1: case 6: case 9: case 303: return 2;
    case 601: return 3;
    default: return 0;
    }
}
static const int SOURCES[3] = {751, 752, 758};

static int finish_pointwise(const Described& d) {
    const Described& how = *(Described*)d.one<Handle>(750, nullptr);
    int n = operands_of(how.one<int>(0, -1));
    GraphTensor y = tensor_at(d, 753);
    for (int i = 0; i < 3; i++) {
        if ((i < n) != (d.attributes.count(SOURCES[i]) != 0)) return refuse(DNN_BAD, "operands are missing, or there are too many");
        if (i >= n) continue;
        GraphTensor x = tensor_at(d, SOURCES[i]);
        if (x.dims.size() != y.dims.size()) return refuse(DNN_SHAPES, "operands of different ranks");
        for (size_t k = 0; k < x.dims.size(); k++)
            if (x.dims[k] != y.dims[k] && x.dims[k] != 1) return refuse(DNN_SHAPES, "operands that do not broadcast");
    }
    return DNN_OK;
}
static int finish_matmul(const Described& d) {
    GraphTensor a = tensor_at(d, 1520), b = tensor_at(d, 1521), c = tensor_at(d, 1522);
    if (a.dims.size() != 4 || b.dims.size() != 4 || c.dims.size() != 4) return refuse(DNN_NOT_SUPPORTED, "factors whose rank is not 4");
    if (a.dims[3] != b.dims[2] || c.dims[2] != a.dims[2] || c.dims[3] != b.dims[3]) return refuse(DNN_SHAPES, "the shapes of the factors and the result do not match");
    for (int i = 0; i < 2; i++)
        if (c.dims[i] != a.dims[i] || c.dims[i] % b.dims[i]) return refuse(DNN_SHAPES, "the batch dimensions do not match");
    return DNN_OK;
}
static int finish_reduction(const Described& d) {
    GraphTensor x = tensor_at(d, 1610), y = tensor_at(d, 1611);
    if (x.dims.size() != y.dims.size()) return refuse(DNN_SHAPES, "a reduction changes the rank");
    for (size_t k = 0; k < x.dims.size(); k++)
        if (y.dims[k] != x.dims[k] && y.dims[k] != 1) return refuse(DNN_SHAPES, "a reduction to another shape");
    return DNN_OK;
}
static int finish_tensor(const Described& d, Handle h) {
    GraphTensor t = tensor_of(h);
    static const std::set<int> types = {0, 2, 4, 9, 11};
    if (!types.count(t.type)) return refuse(DNN_TYPES, "a type that is not known here");
    if (t.dims.size() != t.strides.size()) return refuse(DNN_BAD, "the numbers of dimensions and strides differ");
    for (size_t i = 0; i < t.dims.size(); i++)
        if (t.dims[i] <= 0 || t.strides[i] <= 0) return refuse(DNN_BAD, "a dimension or a stride that is not positive");
    if (t.alignment <= 0 || t.alignment % (int64_t)t.size()) return refuse(DNN_BAD, "an alignment that does not suit the type");
    if (t.is_virtual && t.is_value) return refuse(DNN_BAD, "a tensor that is both virtual and passed by value");
    (void)d;
    return DNN_OK;
}
static int finish_graph(Described& d) {
    auto g = std::make_shared<OperationGraph>();
    g->device = ((DnnHandle*)d.one<Handle>(800, nullptr))->device;
    std::map<int64_t, Handle> by;
    auto see = [&](Handle h, int64_t& id) {
        GraphTensor t = tensor_of(h);
        id = t.id;
        if (by.count(id) && by[id] != h) return false;
        by[id] = h;
        g->tensors[id] = t;
        return true;
    };
    std::set<int64_t> made;
    for (Handle h : d.all<Handle>(801)) {
        const Described& o = *(Described*)h;
        Operation op{o.kind};
        bool fine = true;
        if (o.kind == OP_POINTWISE) {
            const Described& how = *(Described*)o.one<Handle>(750, nullptr);
            op.mode = how.one<int>(0, -1);
            op.precision = how.one<int>(1, -1);
            op.axis = how.one<int64_t>(9, -1);
            for (int i = 0; i < operands_of(op.mode); i++) fine &= see(o.one<Handle>(SOURCES[i], nullptr), op.in[i]);
            fine &= see(o.one<Handle>(753, nullptr), op.out);
        } else if (o.kind == OP_MATMUL) {
            op.precision = ((Described*)o.one<Handle>(1523, nullptr))->one<int>(1500, -1);
            fine = see(o.one<Handle>(1520, nullptr), op.in[0]) && see(o.one<Handle>(1521, nullptr), op.in[1]) &&
                   see(o.one<Handle>(1522, nullptr), op.out);
        } else {
            const Described& how = *(Described*)o.one<Handle>(1612, nullptr);
            op.mode = how.one<int>(1600, -1);
            op.precision = how.one<int>(1601, -1);
            fine = see(o.one<Handle>(1610, nullptr), op.in[0]) && see(o.one<Handle>(1611, nullptr), op.out);
        }
        if (!fine) return refuse(DNN_DUPLICATED, "two tensors with one identifier");
        if (!made.insert(op.out).second) return refuse(DNN_DUPLICATED, "two operations make one tensor");
        g->operations.push_back(op);
    }
    for (auto& t : g->tensors)
        if (t.second.is_virtual && !made.count(t.first)) return refuse(DNN_BAD, "nothing makes a virtual tensor");
    d.graph = g;
    return DNN_OK;
}

// Matches the graph of attention from its end. Graphs with other operations are not supported.
static int attention_of(const OperationGraph& g) {
    std::map<int64_t, const Operation*> makes;
    size_t used = 0;
    for (auto& o : g.operations) makes[o.out] = &o;
    auto the = [&](int64_t id) -> const GraphTensor& { return g.tensors.at(id); };
    auto made = [&](int64_t id, int kind, int mode, int type, int precision) -> const Operation* {
        auto at = makes.find(id);
        if (at == makes.end() || at->second->kind != kind || (kind != OP_MATMUL && at->second->mode != mode)) return nullptr;
        if (the(id).type != type || at->second->precision != precision) return nullptr;
        used++;
        return at->second;
    };
    const Operation* last = nullptr;
    for (auto& o : g.operations)
        if (!the(o.out).is_virtual) last = last ? nullptr : &o;
    auto no = [] { return refuse(DNN_PATTERN, "non-flash composite MHA fprop is no longer supported"); };
    if (!last || last->kind != OP_MATMUL) return refuse(DNN_PATTERN, "a pattern of operations that no engine has");
    int half = the(last->out).type;
    if (half != 2 && half != 9) return refuse(DNN_TYPES, "attention of a type other than f16 and bf16");
    made(last->out, OP_MATMUL, 0, half, 0);
    const Operation* share = made(last->in[0], OP_POINTWISE, 6, half, 0);
    const Operation* weight = share ? made(share->in[0], OP_POINTWISE, 13, 0, 0) : nullptr;
    const Operation* sum = share ? made(share->in[1], OP_REDUCTION, 0, 0, 0) : nullptr;
    const Operation* below = weight ? made(weight->in[0], OP_POINTWISE, 9, 0, 0) : nullptr;
    const Operation* top = below ? made(below->in[1], OP_REDUCTION, 3, 0, 0) : nullptr;
    if (!sum || !top || sum->in[0] != weight->out || top->in[0] != below->in[0]) return no();
    // The statistics that training would store: the logarithm of the sums plus the maximum.
    const Operation* kept = nullptr;
    for (auto& o : g.operations)
        if (o.kind == OP_POINTWISE && o.mode == 0 && o.in[0] == top->out) kept = made(o.out, OP_POINTWISE, 0, 0, 0);
    const Operation* log = kept ? made(kept->in[1], OP_POINTWISE, 15, 0, 0) : nullptr;
    if (!log || log->in[0] != sum->out) return no();
    int64_t scores = below->in[0];
    if (const Operation* select = made(scores, OP_POINTWISE, 601, 0, 0)) {
        const Operation* seen = made(select->in[2], OP_POINTWISE, 303, 11, 11);
        if (!seen || !the(select->in[1]).is_value || the(select->in[1]).type != 0) return no();
        scores = select->in[0];
        const Operation* key = made(seen->in[1], OP_POINTWISE, 501, 4, 0);
        int64_t limit = seen->in[0];
        if (const Operation* sub = made(limit, OP_POINTWISE, 9, 4, 4)) {
            const Operation* add = made(sub->in[0], OP_POINTWISE, 0, 4, 4);
            if (!add || !the(sub->in[1]).is_value || !the(add->in[1]).is_value) return no();
            limit = add->in[0];
        }
        const Operation* query = made(limit, OP_POINTWISE, 501, 4, 0);
        if (!key || !query || key->axis != 3 || query->axis != 2 || key->in[0] != scores || query->in[0] != scores) return no();
    }
    const Operation* scaled = made(scores, OP_POINTWISE, 1, 0, 0);
    const Operation* dots = scaled ? made(scaled->in[0], OP_MATMUL, 0, 0, 0) : nullptr;
    if (!dots || !the(scaled->in[1]).is_value || used != g.operations.size()) return no();
    const GraphTensor &q = the(dots->in[0]), &k = the(dots->in[1]), &v = the(last->in[1]), &out = the(last->out);
    if (q.type != half || k.type != half || v.type != half) return refuse(DNN_TYPES, "operands of different types");
    if (q.dims[3] % 8 || q.dims[3] > 256 || v.dims[3] != q.dims[3]) return refuse(DNN_SHAPE, "the head dimensions differ, exceed 256 or are no multiple of 8");
    if (q.strides[3] != 1 || k.strides[2] != 1 || v.strides[3] != 1 || out.strides[3] != 1)
        return refuse(DNN_LAYOUT, "rows that are not contiguous");
    for (const GraphTensor* t : {&q, &k, &v, &out})
        for (int i = 0; i < 4; i++)
            if (t->strides[(size_t)i] != 1 && t->strides[(size_t)i] % 8) return refuse(DNN_LAYOUT, "rows that are not aligned");
    return DNN_OK;
}

// Engines in the heuristics' order: one that is not deterministic, one that exceeds shared memory, one that
// needs a large workspace, and two that work.
static const int ENGINES = 5;
static int64_t room_of_engine(int engine) { return engine == 2 ? 64 << 20 : engine == 3 ? 4096 : 0; }

extern "C" int cudnnBackendFinalize(Handle h) {
    GRAPH_CALL(DNN_OUT_OF_MEMORY);
    if (!described.count(h)) return refuse(DNN_NULL, "no descriptor");
    Described& d = *(Described*)h;
    if (d.done) return refuse(DNN_BAD, "the descriptor is finished");
    for (const Rule& r : RULES) {
        if (r.kind != d.kind) continue;
        if (r.required && !d.attributes.count(r.name)) return refuse(DNN_BAD, "an attribute is missing");
        // The descriptors among the values must not have been destroyed since they were set.
        if (r.type == T_DESC)
            for (Handle other : d.all<Handle>(r.name))
                if (!described.count(other)) return refuse(DNN_BAD, "a descriptor that was destroyed");
    }
    int code = DNN_OK;
    switch (d.kind) {
    case TENSOR: code = finish_tensor(d, h); break;
    case POINTWISE: {
        int mode = d.one<int>(0, -1);
        if (!operands_of(mode)) code = refuse(DNN_NOT_SUPPORTED, "a function that is not known here");
        if ((mode == 501) != (d.attributes.count(9) != 0)) code = refuse(DNN_BAD, "an index function without an axis, or another function with one");
        break;
    }
    case REDUCTION:
        if (d.one<int>(1600, -1) != 0 && d.one<int>(1600, -1) != 3) code = refuse(DNN_NOT_SUPPORTED, "a reduction other than sum and maximum");
        break;
    case OP_POINTWISE: code = finish_pointwise(d); break;
    case OP_MATMUL: code = finish_matmul(d); break;
    case OP_REDUCTION: code = finish_reduction(d); break;
    case OP_GRAPH: code = finish_graph(d); break;
    case HEURISTICS:
        if (d.one<int>(200, -1) != 3) code = refuse(DNN_NOT_SUPPORTED, "a mode of heuristics other than 3");
        d.graph = ((Described*)d.one<Handle>(201, nullptr))->graph;
        break;
    case PLAN: {
        const Described& config = *(Described*)d.one<Handle>(401, nullptr);
        d.graph = config.graph;
        d.engine = config.engine;
        if (d.graph->device != ((DnnHandle*)d.one<Handle>(400, nullptr))->device || current_ != d.graph->device)
            code = refuse(DNN_BAD, "a handle of another device");
        if (d.engine == 1) code = refuse(DNN_SHARED, "too much shared memory");
        break;
    }
    case CONFIG: case ENGINE: code = refuse(DNN_BAD, "only the heuristics make configurations and engines"); break;
    }
    d.done = code == DNN_OK;
    return code;
}
extern "C" int cudnnBackendGetAttribute(Handle h, int name, int type, int64_t n, int64_t* found, void* to) {
    GRAPH_CALL(DNN_OUT_OF_MEMORY);
    if (!described.count(h) || !found || (n && !to)) return refuse(DNN_NULL, "no descriptor, or no memory for the values");
    const Described& d = *(Described*)h;
    if (!d.done) return refuse(DNN_NOT_FINISHED, "the descriptor is not finished");
    if (d.kind == HEURISTICS && name == 202) {
        if (type != T_DESC) return refuse(DNN_ATTRIBUTE_TYPE, "an attribute of another type");
        // As in the real library, an unsupported graph is not an error but has no results, and the call may
        // return fewer results than it counted.
        int64_t engines = attention_of(*d.graph) == DNN_OK ? ENGINES : 0;
        if (n == 0) return *found = engines ? engines + 1 : 0, DNN_OK;
        *found = n < engines ? n : engines;
        for (int64_t i = 0; i < *found; i++) {
            Handle other = ((Handle*)to)[i];
            if (!described.count(other) || ((Described*)other)->kind != CONFIG || ((Described*)other)->done)
                return refuse(DNN_KIND, "no empty configuration");
            Described& config = *(Described*)other;
            config.done = true;
            config.graph = d.graph;
            config.engine = (int)i;
        }
        return DNN_OK;
    }
    if (n < 1) return refuse(DNN_OUT_OF_BOUND, "no memory for the value");
    if (d.kind == CONFIG && name == 300) {
        Handle other = *(Handle*)to;
        if (type != T_DESC) return refuse(DNN_ATTRIBUTE_TYPE, "an attribute of another type");
        if (!described.count(other) || ((Described*)other)->kind != ENGINE || ((Described*)other)->done)
            return refuse(DNN_KIND, "no empty engine");
        ((Described*)other)->done = true;
        ((Described*)other)->engine = d.engine;
        *found = 1;
        return DNN_OK;
    }
    if (d.kind == ENGINE && name == 1303) {
        if (type != T_NOTE) return refuse(DNN_ATTRIBUTE_TYPE, "an attribute of another type");
        // Numerical notes: 0 means matrix units, 4 means not deterministic.
        const int notes[2] = {0, 4};
        *found = d.engine == 0 ? 2 : 1;
        memcpy(to, notes, sizeof(int) * (size_t)(n < *found ? n : *found));
        return DNN_OK;
    }
    if (d.kind == PLAN && name == 402) {
        if (type != T_I64) return refuse(DNN_ATTRIBUTE_TYPE, "an attribute of another type");
        *(int64_t*)to = room_of_engine(d.engine);
        *found = 1;
        return DNN_OK;
    }
    return refuse(DNN_BAD, "the descriptor has no such attribute");
}

// Converts to the types of load_value and store_value.
static int value_type(int t) { return t == 4 ? (int)I32 : t == 11 ? (int)I8 : dnn_type(t); }
static double rounded(int type, double v) {
    if (type == 0) return (float)v;
    if (type == 4 || type == 11) return v;
    uint64_t room = 0;
    store_value(value_type(type), (Address)&room, 0, v);
    return load_value(value_type(type), (Address)&room, 0);
}

// Computes the tensors of a graph. Their values are stored densely, in each tensor's shape.
struct Computed {
    const OperationGraph& g;
    std::map<int64_t, Address> where;
    std::map<int64_t, double> scalars;
    std::map<int64_t, std::vector<double>> values;

    static int64_t place(const GraphTensor& t, int64_t i, const std::vector<int64_t>& shape, bool dense) {
        // The index in `t` of element `i` of `shape`, to which `t` is broadcast. If `dense`, it is an index
        // in the dense values of `t`; otherwise the strides of `t` apply.
        if (dense && t.dims == shape) return i;
        int64_t at = 0, step = 1;
        for (size_t k = shape.size(); k-- > 0;) {
            int64_t x = i % shape[k];
            i /= shape[k];
            if (t.dims[k] == 1) x = 0;
            at += x * (dense ? step : t.strides[k]);
            step *= t.dims[k];
        }
        return at;
    }
    const std::vector<double>& of(int64_t id) {
        auto at = values.find(id);
        if (at != values.end()) return at->second;
        const GraphTensor& t = g.tensors.at(id);
        std::vector<double>& v = values[id];
        v.resize((size_t)t.count());
        for (int64_t i = 0; i < t.count(); i++)
            v[(size_t)i] = t.is_value ? scalars.at(id) : load_value(value_type(t.type), where.at(id), place(t, i, t.dims, false));
        return v;
    }
    bool ready(const Operation& o) const {
        for (int64_t id : o.in)
            if (id && g.tensors.at(id).is_virtual && !values.count(id)) return false;
        return true;
    }
    void run(const Operation& o) {
        const GraphTensor& y = g.tensors.at(o.out);
        std::vector<double> r((size_t)y.count());
        if (o.kind == OP_MATMUL) {
            const GraphTensor &a = g.tensors.at(o.in[0]), &b = g.tensors.at(o.in[1]);
            const std::vector<double> &x = of(o.in[0]), &w = of(o.in[1]);
            size_t m = (size_t)a.dims[2], inner = (size_t)a.dims[3], n = (size_t)b.dims[3];
            for (int64_t i = 0; i < y.dims[0]; i++)
                for (int64_t j = 0; j < y.dims[1]; j++) {
                    // Consecutive heads of the first factor share one head of the second.
                    int64_t bi = i / (y.dims[0] / b.dims[0]), bj = j / (y.dims[1] / b.dims[1]);
                    const double *left = &x[(size_t)(i * a.dims[1] + j) * m * inner], *right = &w[(size_t)(bi * b.dims[1] + bj) * inner * n];
                    double* to = &r[(size_t)(i * y.dims[1] + j) * m * n];
                    for (size_t p = 0; p < m; p++)
                        for (size_t l = 0; l < inner; l++)
                            for (size_t q = 0; q < n; q++) to[p * n + q] += left[p * inner + l] * right[l * n + q];
                }
        } else if (o.kind == OP_REDUCTION) {
            const GraphTensor& t = g.tensors.at(o.in[0]);
            const std::vector<double>& x = of(o.in[0]);
            if (o.mode == 3) r.assign(r.size(), -INFINITY);
            for (int64_t i = 0; i < t.count(); i++) {
                double& s = r[(size_t)place(y, i, t.dims, true)];
                s = o.mode == 0 ? s + x[(size_t)i] : std::isnan(x[(size_t)i]) || x[(size_t)i] > s ? x[(size_t)i] : s;
            }
        } else {
            const std::vector<double>* x[3];
            const GraphTensor* from[3];
            for (int k = 0; o.mode != 501 && k < operands_of(o.mode); k++) x[k] = &of(o.in[k]), from[k] = &g.tensors.at(o.in[k]);
            for (int64_t i = 0; i < y.count(); i++) {
                double v[3] = {0, 0, 0};
                if (o.mode == 501) {
                    int64_t at = i;
                    for (size_t k = y.dims.size() - 1; k > (size_t)o.axis; k--) at /= y.dims[k];
                    r[(size_t)i] = (double)(at % y.dims[(size_t)o.axis]);
                    continue;
                }
                for (int k = 0; k < operands_of(o.mode); k++) v[k] = (*x[k])[(size_t)place(*from[k], i, y.dims, true)];
                switch (o.mode) {
                case 0: r[(size_t)i] = v[0] + v[1]; break;
                case 1: r[(size_t)i] = v[0] * v[1]; break;
                case 6: r[(size_t)i] = v[0] / v[1]; break;
                case 9: r[(size_t)i] = v[0] - v[1]; break;
                case 13: r[(size_t)i] = exp(v[0]); break;
                case 15: r[(size_t)i] = ::log(v[0]); break;
                case 303: r[(size_t)i] = v[0] >= v[1]; break;
                case 601: r[(size_t)i] = v[2] != 0 ? v[0] : v[1]; break;
                }
            }
        }
        for (double& v : r) v = rounded(y.type, v);
        if (!y.is_virtual)
            for (int64_t i = 0; i < y.count(); i++) store_value(value_type(y.type), where.at(o.out), place(y, i, y.dims, false), r[(size_t)i]);
        values[o.out] = std::move(r);
    }
};

extern "C" int cudnnBackendExecute(Handle hh, Handle hp, Handle hv) {
    GRAPH_CALL(DNN_FAILED);
    if (lost_) return refuse(DNN_FAILED, "the device is lost");
    if (!dnn_handles.count(hh) || !described.count(hp) || !described.count(hv)) return refuse(DNN_NULL, "no handle, plan or pack");
    const Described &plan = *(Described*)hp, &pack = *(Described*)hv;
    if (plan.kind != PLAN || pack.kind != PACK) return refuse(DNN_KIND, "no plan, or no pack");
    if (!plan.done || !pack.done) return refuse(DNN_NOT_FINISHED, "a descriptor that is not finished");
    if (((DnnHandle*)hh)->device != plan.graph->device || current_ != plan.graph->device) return refuse(DNN_BAD, "the plan, the handle and the context have different devices");
    Handle stream = ((DnnHandle*)hh)->stream;
    if (!live(stream)) return refuse(DNN_BAD, "no stream");
    if (fails()) return refuse(DNN_FAILED, "told to fail");
    auto ids = pack.all<int64_t>(1000);
    auto pointers = pack.all<Address>(1001);
    if (ids.size() != pointers.size()) return refuse(DNN_BAD, "the numbers of identifiers and addresses differ");
    const OperationGraph& g = *plan.graph;
    Computed c{g, {}, {}, {}};
    for (size_t i = 0; i < ids.size(); i++) {
        auto at = g.tensors.find(ids[i]);
        if (at == g.tensors.end() || at->second.is_virtual) return refuse(DNN_BAD, "an address for an unknown or a virtual tensor");
        if (!pointers[i]) return refuse(DNN_NULL, "no address");
        if (at->second.is_value) {
            bool whole = at->second.type == 4;
            // The address is in host memory.
            c.scalars[ids[i]] = whole ? (double)*(int32_t*)pointers[i] : (double)*(float*)pointers[i];
            continue;
        }
        if (pointers[i] % (Address)at->second.alignment) return refuse(DNN_MISALIGNED, "an address that is not aligned");
        if (!inside(pointers[i], at->second.bytes())) return refuse(DNN_FAILED, "a tensor outside of its allocation");
        c.where[ids[i]] = pointers[i];
    }
    for (auto& t : g.tensors)
        if (!t.second.is_virtual && !c.where.count(t.first) && !c.scalars.count(t.first)) return refuse(DNN_BAD, "a tensor without an address");
    for (auto& o : g.operations)
        for (auto& other : c.where)
            if (c.where.count(o.out) && other.first != o.out &&
                !apart(c.where[o.out], g.tensors.at(o.out).bytes(), other.second, g.tensors.at(other.first).bytes()))
                return refuse(DNN_BAD, "a result that overlaps another tensor");
    Address room = pack.one<Address>(1003, 0);
    size_t bytes = (size_t)room_of_engine(plan.engine);
    if (bytes && !inside(room, bytes)) return refuse(DNN_FAILED, "a workspace outside of its allocation");
    auto graph = plan.graph;
    auto scalars = c.scalars;
    auto where = c.where;
    return on_stream(stream, [=]() {
        if (!described.count(hp)) {
            fprintf(stderr, "stand-in: a plan runs after it was destroyed\n");
            abort();
        }
        if (bytes) memset((void*)room, 0xee, bytes);
        Computed now{*graph, where, scalars, {}};
        std::vector<const Operation*> left;
        for (auto& o : graph->operations) left.push_back(&o);
        // Runs the operations in dependency order.
        for (bool moved = true; moved && !left.empty();) {
            moved = false;
            for (size_t i = 0; i < left.size();) {
                if (!now.ready(*left[i])) {
                    i++;
                    continue;
                }
                now.run(*left[i]);
                left.erase(left.begin() + (long)i);
                moved = true;
            }
        }
        attentions_++;
        return left.empty() ? (int)DNN_OK : (int)DNN_FAILED;
    });
}
#endif
