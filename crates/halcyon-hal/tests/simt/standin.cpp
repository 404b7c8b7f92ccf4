// A stand-in for the CUDA driver and NVRTC, or with STANDIN_HIP for the HIP runtime and hipRTC: devices of host memory, kernels compiled
// as C++ (kernel.h) and run on this processor. For tests of the drivers without a GPU; the product never finds it.
//
// It is strict where the real libraries are: a copy outside of an allocation loses the device for good, a call without a context is
// refused. It counts what is alive, and can be told to fail. Built by tests/simt/mod.rs, with the path of kernel.h in H_KERNEL and a
// folder for modules in H_FOLDER.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#ifdef STANDIN_HIP
#define NAME(cuda, hip) hip
#ifndef STANDIN_WARP
#define STANDIN_WARP 64
#define STANDIN_ARCH "gfx90a"
#endif
static const int WARP = STANDIN_WARP;
static const bool HIP = true;
#define OWN_ARCH "--offload-arch=" STANDIN_ARCH
#else
#define NAME(cuda, hip) cuda
static const int WARP = 32;
static const bool HIP = false;
#define OWN_ARCH "--gpu-architecture=sm_90"
#define STANDIN_ARCH "sm_90"
#endif
#define API(cuda, hip) extern "C" int NAME(cuda, hip)

typedef void* Handle;
typedef uint64_t Address;
enum { OK = 0, INVALID = 1, FULL = 2, UNINITIALISED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700, LAUNCH_FAILED = 719 };

struct uint3_ { unsigned x, y, z; };
struct Runtime {
    uint3_ thread, block, block_size, grid;
    int warp;
    void (*sync)(int);
    unsigned long long (*shuffle)(unsigned long long, int);
};

static std::recursive_mutex lock_;
#define LOCK std::lock_guard<std::recursive_mutex> guard(lock_)

struct Module {
    void* lib;
    std::string path;
    bool syncs;
};
struct Function {
    Module* module;
    void (*call)(void**);
};
struct Event { uint64_t at; };

// What the tests ask for and set: names of standin_get and standin_set.
static int64_t devices_ = 2, memory_ = 1 << 30, fail_alloc_ = -1, lost_ = 0, falsify_ = -1;
static int64_t launches_, copies_, compiles_, allocs_;

static bool initialised_;
static thread_local int current_ = -1;
static int contexts_;
static std::map<Address, size_t> memory;
static std::map<void*, size_t> pages;
static std::set<Handle> streams, events, modules;
static uint64_t clock_;
static int64_t used_;

static const size_t GUARD = 64;
static const unsigned char POISON = 0xa5, FENCE = 0x5c;

extern "C" int64_t standin_get(const char* name) {
    LOCK;
    std::string n = name;
    if (n == "memory") return (int64_t)memory.size();
    if (n == "pages") return (int64_t)pages.size();
    if (n == "streams") return (int64_t)streams.size();
    if (n == "events") return (int64_t)events.size();
    if (n == "modules") return (int64_t)modules.size();
    if (n == "contexts") return contexts_;
    if (n == "launches") return launches_;
    if (n == "copies") return copies_;
    if (n == "compiles") return compiles_;
    if (n == "allocations") return allocs_;
    if (n == "lost") return lost_;
    return -1;
}

extern "C" int standin_set(const char* name, int64_t v) {
    LOCK;
    std::string n = name;
    if (n == "devices") devices_ = v;
    else if (n == "memory") memory_ = v;
    // The v-th request from now on fails, once.
    else if (n == "fail allocation") fail_alloc_ = v;
    // The device fails from the next call on.
    else if (n == "lost") lost_ = v;
    // The v-th byte that is read back from now on is another one.
    else if (n == "falsify") falsify_ = v;
    else return INVALID;
    return OK;
}

// What every call that needs a device begins with.
#define ENTER                              \
    LOCK;                                  \
    if (!initialised_) return UNINITIALISED; \
    if (current_ < 0) return INVALID_CONTEXT; \
    if (lost_) return (int)lost_

API(cuInit, hipInit)(unsigned) {
    LOCK;
    if (devices_ == 0) return 100;
    initialised_ = true;
    return OK;
}
API(cuDriverGetVersion, hipDriverGetVersion)(int* v) {
    *v = HIP ? 50220730 : 12040;
    return OK;
}
API(cuDeviceGetCount, hipGetDeviceCount)(int* n) {
    LOCK;
    if (!initialised_) return UNINITIALISED;
    *n = (int)devices_;
    return OK;
}
API(cuDeviceGet, hipDeviceGet)(int* d, int i) {
    LOCK;
    if (i < 0 || i >= devices_) return INVALID_DEVICE;
    *d = i;
    return OK;
}
API(cuDeviceGetName, hipDeviceGetName)(char* to, int n, int d) {
    snprintf(to, n, "Stand-in %d", d);
    return OK;
}
API(cuDeviceTotalMem_v2, hipDeviceTotalMem)(size_t* n, int) {
    *n = (size_t)memory_;
    return OK;
}
API(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char* to, int n, int d) {
    snprintf(to, n, "0000:%02x:00.0", 0xe0 + d);
    return OK;
}
API(cuDeviceGetAttribute, hipDeviceGetAttribute)(int* v, int which, int) {
    static const std::map<int, int> cuda = {{1, 1024}, {8, 49152}, {10, WARP}, {13, 1500000}, {16, 4}, {18, 0}, {31, 0},
                                            {36, 2000000}, {37, 5120}, {38, 4 << 20}, {75, 9}, {76, 0}};
    static const std::map<int, int> hip = {{56, 1024}, {74, 65536}, {87, WARP}, {5, 1500000}, {63, 4}, {16, 0}, {8, 0},
                                           {60, 1600000}, {59, 4096}, {19, 8 << 20}, {23, 9}, {61, 0}};
    auto& all = HIP ? hip : cuda;
    auto found = all.find(which);
    if (found == all.end()) return INVALID;
    *v = found->second;
    return OK;
}

#ifdef STANDIN_HIP
extern "C" int hipSetDevice(int d) {
    LOCK;
    if (d < 0 || d >= devices_) return INVALID_DEVICE;
    current_ = d;
    return OK;
}
#else
extern "C" int cuDevicePrimaryCtxRetain(Handle* c, int d) {
    LOCK;
    if (d < 0 || d >= devices_) return INVALID_DEVICE;
    contexts_++;
    *c = (Handle)(intptr_t)(d + 1);
    return OK;
}
extern "C" int cuDevicePrimaryCtxRelease_v2(int) {
    LOCK;
    contexts_--;
    return OK;
}
extern "C" int cuCtxSetCurrent(Handle c) {
    LOCK;
    if (!c || contexts_ <= 0) return INVALID_CONTEXT;
    current_ = (int)(intptr_t)c - 1;
    return OK;
}
#endif

API(cuMemGetInfo_v2, hipMemGetInfo)(size_t* free, size_t* total) {
    ENTER;
    *total = (size_t)memory_;
    *free = (size_t)(memory_ - used_);
    return OK;
}
API(cuMemAlloc_v2, hipMalloc)(Address* at, size_t n) {
    ENTER;
    allocs_++;
    if (n == 0) return INVALID;
    if (fail_alloc_ >= 0 && fail_alloc_-- == 0) return FULL;
    if (used_ + (int64_t)n > memory_) return FULL;
    unsigned char* p = (unsigned char*)aligned_alloc(256, (n + 2 * GUARD + 256 + 255) / 256 * 256);
    if (!p) return FULL;
    p += 256;
    memset(p - GUARD, FENCE, GUARD);
    memset(p, POISON, n);
    memset(p + n, FENCE, GUARD);
    used_ += (int64_t)n;
    *at = (Address)p;
    memory[*at] = n;
    return OK;
}
API(cuMemFree_v2, hipFree)(Address at) {
    ENTER;
    auto m = memory.find(at);
    if (m == memory.end()) return INVALID;
    unsigned char* p = (unsigned char*)at;
    for (size_t i = 0; i < GUARD; i++)
        if (p[-(ptrdiff_t)GUARD + (ptrdiff_t)i] != FENCE || p[m->second + i] != FENCE) {
            fprintf(stderr, "stand-in: something wrote outside of an allocation of %zu bytes\n", m->second);
            abort();
        }
    used_ -= (int64_t)m->second;
    free(p - 256);
    memory.erase(m);
    return OK;
}
API(cuMemHostAlloc, hipHostMalloc)(void** at, size_t n, unsigned) {
    ENTER;
    *at = malloc(n);
    if (!*at) return FULL;
    pages[*at] = n;
    return OK;
}
API(cuMemFreeHost, hipHostFree)(void* at) {
    LOCK;
    if (!pages.erase(at)) return INVALID;
    free(at);
    return OK;
}

// A range of the device, or the device is lost.
static bool inside(Address at, size_t n) {
    auto m = memory.upper_bound(at);
    if (m != memory.begin()) {
        --m;
        if (at >= m->first && at + n <= m->first + m->second) return true;
    }
    fprintf(stderr, "stand-in: %zu bytes at %llx are no allocation's\n", n, (unsigned long long)at);
    lost_ = ILLEGAL_ADDRESS;
    return false;
}
static bool live(Handle stream) { return streams.count(stream) != 0; }

API(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(Address to, const void* from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!inside(to, n)) return (int)lost_;
    copies_++;
    memcpy((void*)to, from, n);
    return OK;
}
API(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void* to, Address from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!inside(from, n)) return (int)lost_;
    copies_++;
    memcpy(to, (void*)from, n);
    if (falsify_ >= 0) {
        if ((size_t)falsify_ < n) ((unsigned char*)to)[falsify_] ^= 0x40;
        falsify_ = (size_t)falsify_ < n ? -1 : falsify_ - (int64_t)n;
    }
    return OK;
}
API(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(Address to, Address from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!inside(to, n) || !inside(from, n)) return (int)lost_;
    if (to < from + n && from < to + n) {
        fprintf(stderr, "stand-in: a copy of %zu bytes overlaps itself\n", n);
        abort();
    }
    memcpy((void*)to, (void*)from, n);
    return OK;
}
API(cuMemsetD8Async, hipMemsetD8Async)(Address to, unsigned char v, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!inside(to, n)) return (int)lost_;
    memset((void*)to, v, n);
    return OK;
}

API(cuStreamCreate, hipStreamCreateWithFlags)(Handle* s, unsigned) {
    ENTER;
    *s = new char;
    streams.insert(*s);
    return OK;
}
API(cuStreamDestroy_v2, hipStreamDestroy)(Handle s) {
    LOCK;
    if (!streams.erase(s)) return INVALID_HANDLE;
    delete (char*)s;
    return OK;
}
API(cuStreamSynchronize, hipStreamSynchronize)(Handle s) {
    ENTER;
    return live(s) ? OK : INVALID_HANDLE;
}
API(cuEventCreate, hipEventCreateWithFlags)(Handle* e, unsigned) {
    ENTER;
    *e = new Event{0};
    events.insert(*e);
    return OK;
}
API(cuEventDestroy_v2, hipEventDestroy)(Handle e) {
    LOCK;
    if (!events.erase(e)) return INVALID_HANDLE;
    delete (Event*)e;
    return OK;
}
API(cuEventRecord, hipEventRecord)(Handle e, Handle s) {
    ENTER;
    if (!events.count(e) || !live(s)) return INVALID_HANDLE;
    ((Event*)e)->at = ++clock_;
    return OK;
}
API(cuEventQuery, hipEventQuery)(Handle e) {
    ENTER;
    return events.count(e) ? OK : INVALID_HANDLE;
}
API(cuEventSynchronize, hipEventSynchronize)(Handle e) {
    ENTER;
    return events.count(e) ? OK : INVALID_HANDLE;
}
API(cuStreamWaitEvent, hipStreamWaitEvent)(Handle s, Handle e, unsigned) {
    ENTER;
    return live(s) && events.count(e) ? OK : INVALID_HANDLE;
}
API(cuEventElapsedTime, hipEventElapsedTime)(float* ms, Handle a, Handle b) {
    ENTER;
    if (!events.count(a) || !events.count(b) || !((Event*)a)->at || !((Event*)b)->at) return INVALID_HANDLE;
    // A microsecond for each thing that was recorded between: no time was measured.
    *ms = (float)(((Event*)b)->at - ((Event*)a)->at) * 1e-3f;
    return OK;
}

// ---- the compiler: a program's "binary" is the path of a shared object and its mark.

static const char MARK[] = "halcyon stand-in module ";

struct Program {
    std::string text, name, log, binary;
};

static void replace(std::string& s, const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = s.find(from, at)) != std::string::npos; at += to.size()) s.replace(at, from.size(), to);
}

static std::string read_file(const std::string& path) {
    std::ifstream f(path);
    std::stringstream s;
    s << f.rdbuf();
    return s.str();
}

static uint64_t digest(const std::string& s) {
    uint64_t h = 1469598103934665603ull;
    for (unsigned char c : s) h = (h ^ c) * 1099511628211ull;
    return h;
}

// Inline assembly of products of matrices becomes calls of kernel.h's functions, with the operands in their order; the types of vectors that
// only clang has become structures. False for an instruction that is not known letter by letter.
static bool instructions(std::string& text, std::string& log) {
    static const std::map<std::string, std::string> known = {
        {"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];", "h_ldmatrix<false>"},
        {"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];", "h_ldmatrix<true>"},
        {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};",
         "h_mma_sync<h_half_to_float>"},
        {"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};",
         "h_mma_sync<h_bfloat_to_float>"},
        {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};",
         "h_mma_sync_tf32"},
        {"cvt.rna.tf32.f32 %0, %1;", "h_cvt_tf32"},
    };
    for (size_t at = 0; (at = text.find("asm", at)) != std::string::npos;) {
        size_t open = text.find('(', at), quote = open + 1, end = text.find('"', quote + 1);
        std::string word = text.substr(at, open - at);
        if ((word != "asm" && word != "asm volatile") || text[quote] != '"') { at += 3; continue; }
        std::string line = text.substr(quote + 1, end - quote - 1);
        auto found = known.find(line);
        if (found == known.end()) {
            // bf16 is converted by other code where no architecture is set.
            if (line != "cvt.rn.bf16.f32 %0, %1;") { log = "unknown instruction: " + line; return false; }
            at = end;
            continue;
        }
        size_t stop = text.find(";\n", end);
        std::string call;
        for (size_t i = end + 1; i < stop; i++) {
            if (text[i] != '(' || text[i - 1] != '"') continue;
            int depth = 1;
            size_t from = ++i;
            for (; depth; i++) depth += (text[i] == '(') - (text[i] == ')');
            call += (call.empty() ? "" : ", ") + text.substr(from, i - 1 - from);
        }
        text.replace(at, stop - at, found->second + "(" + call + ")");
    }
    replace(text, "typedef _Float16 h_halves __attribute__((ext_vector_type(H_OPERAND * 2)));", "struct h_halves { unsigned short x[H_OPERAND * 2]; };");
    replace(text, "typedef short h_shorts __attribute__((ext_vector_type(H_OPERAND * 2)));", "struct h_shorts { unsigned short x[H_OPERAND * 2]; };");
    replace(text, "typedef float h_floats __attribute__((ext_vector_type(H_SUM)));", "struct h_floats { float x[H_SUM]; };");
    return true;
}

extern "C" int NAME(nvrtcVersion, hiprtcVersion)(int* major, int* minor) {
    *major = HIP ? 5 : 12;
    *minor = 4;
    return OK;
}
extern "C" int NAME(nvrtcCreateProgram, hiprtcCreateProgram)(Handle* p, const char* text, const char* name, int,
                                                            const char* const*, const char* const*) {
    *p = new Program{text, name ? name : "", "", ""};
    return OK;
}
extern "C" int NAME(nvrtcDestroyProgram, hiprtcDestroyProgram)(Handle* p) {
    delete (Program*)*p;
    *p = nullptr;
    return OK;
}
extern "C" int NAME(nvrtcCompileProgram, hiprtcCompileProgram)(Handle h, int n, const char* const* flags) {
    Program& p = *(Program*)h;
    // hipRTC compiles for the current device where it is told none.
    bool arch = false, told = !HIP;
    for (int i = 0; i < n; i++) {
        arch |= std::string(flags[i]) == OWN_ARCH;
        told |= std::string(flags[i]).find("--offload-arch=") == 0;
    }
    arch |= !told;
    if (!arch) {
        p.log = "no architecture of the stand-in's";
        return 5;
    }
    std::string text = p.text;
    replace(text, "asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(r) : \"h\"(x));", "r = h_half_to_float(x);");
    replace(text, "asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x));", "r = h_float_to_half(x);");
    if (!instructions(text, p.log)) return 6;
    std::string whole = read_file(H_KERNEL) + "\n#line 1 \"" + p.name + "\"\n" + text + "\n";
    // An exported call for each entry point.
    for (size_t at = 0; (at = p.text.find("__launch_bounds__(", at)) != std::string::npos;) {
        size_t from = p.text.find('\n', at) + 1, to = p.text.find('(', from);
        std::string entry = p.text.substr(from, to - from);
        whole += "extern \"C\" void h_call_" + entry + "(void** a) { h_call(" + entry + ", a); }\n";
        at = to;
    }
    char id[32];
    snprintf(id, sizeof id, "%016llx", (unsigned long long)digest(whole + STANDIN_ARCH));
    std::string base = std::string(H_FOLDER) + "/" + id, lib = base + ".so";
    {
        LOCK;
        compiles_++;
    }
    if (access(lib.c_str(), R_OK) != 0) {
        std::string own = base + "." + std::to_string(getpid()) + "." + std::to_string((uintptr_t)h);
        std::ofstream(own + ".cpp") << whole;
        std::string command = "c++ -std=c++17 -O1 -w -fPIC -shared -ffp-contract=off -fno-strict-aliasing -fno-exceptions -fno-rtti " +
                              std::string(HIP ? "-DSTANDIN_HIP -D__" STANDIN_ARCH "__ " : "") + "-o '" + own + ".so' '" + own + ".cpp' 2>'" + own + ".log'";
        int code = system(command.c_str());
        p.log = read_file(own + ".log");
        unlink((own + ".log").c_str());
        unlink((own + ".cpp").c_str());
        if (code != 0) return 6;
        rename((own + ".so").c_str(), lib.c_str());
    }
    bool syncs = p.text.find("__syncthreads") != std::string::npos || p.text.find("__shfl") != std::string::npos;
    p.binary = std::string(MARK) + (syncs ? "s" : "-") + lib;
    p.binary.push_back('\0');
    return OK;
}
extern "C" int NAME(nvrtcGetProgramLogSize, hiprtcGetProgramLogSize)(Handle h, size_t* n) {
    *n = ((Program*)h)->log.size() + 1;
    return OK;
}
extern "C" int NAME(nvrtcGetProgramLog, hiprtcGetProgramLog)(Handle h, char* to) {
    strcpy(to, ((Program*)h)->log.c_str());
    return OK;
}
extern "C" int NAME(nvrtcGetCUBINSize, hiprtcGetCodeSize)(Handle h, size_t* n) {
    *n = ((Program*)h)->binary.size();
    return OK;
}
extern "C" int NAME(nvrtcGetCUBIN, hiprtcGetCode)(Handle h, char* to) {
    memcpy(to, ((Program*)h)->binary.data(), ((Program*)h)->binary.size());
    return OK;
}

// ---- modules and launches

static void sync_item(int);
static unsigned long long shuffle_item(unsigned long long, int);
static Runtime runtime_ = {{}, {}, {}, {}, WARP, sync_item, shuffle_item};

API(cuModuleLoadData, hipModuleLoadData)(Handle* to, const void* image) {
    ENTER;
    const char* s = (const char*)image;
    if (strncmp(s, MARK, sizeof MARK - 1) != 0) return INVALID_IMAGE;
    s += sizeof MARK - 1;
    void* lib = dlopen(s + 1, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        fprintf(stderr, "stand-in: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    ((void (*)(Runtime*))dlsym(lib, "h_bind"))(&runtime_);
    *to = new Module{lib, s + 1, *s == 's'};
    modules.insert(*to);
    return OK;
}
API(cuModuleUnload, hipModuleUnload)(Handle h) {
    ENTER;
    if (!modules.erase(h)) return INVALID_HANDLE;
    dlclose(((Module*)h)->lib);
    delete (Module*)h;
    return OK;
}
API(cuModuleGetFunction, hipModuleGetFunction)(Handle* to, Handle h, const char* name) {
    ENTER;
    if (!modules.count(h)) return INVALID_HANDLE;
    Module* m = (Module*)h;
    void* call = dlsym(m->lib, (std::string("h_call_") + name).c_str());
    if (!call) return NOT_FOUND;
    // Functions live as long as the process: the real ones belong to their module.
    *to = new Function{m, (void (*)(void**))call};
    return OK;
}
API(cuFuncGetAttribute, hipFuncGetAttribute)(int* v, int which, Handle) {
    ENTER;
    if (which != 0) return INVALID;
    *v = 1024;
    return OK;
}

// One work-item of a group that has barriers.
struct Item {
    ucontext_t context;
    std::vector<char> stack;
    uint3_ at;
    // -1: runs, 0: waits for the group, 1: waits for its subgroup.
    int waits;
    bool done;
    unsigned shuffles;
    unsigned long long slots[2];
};
static std::vector<Item> items;
static ucontext_t scheduler;
static size_t running;
static void (*kernel_)(void**);
static void** arguments_;
static size_t count_;

static void sync_item(int kind) {
    Item& i = items[running];
    i.waits = kind;
    swapcontext(&i.context, &scheduler);
}

static unsigned long long shuffle_item(unsigned long long bits, int lane) {
    size_t me = running, slot = items[me].shuffles++ & 1, from = me / WARP * WARP + (size_t)lane;
    items[me].slots[slot] = bits;
    sync_item(1);
    return from < count_ && !items[from].done ? items[from].slots[slot] : bits;
}

static void item_main() {
    kernel_(arguments_);
    items[running].done = true;
    swapcontext(&items[running].context, &scheduler);
}

static bool run_group(uint3_ b, size_t n) {
    const size_t STACK = 96 << 10;
    if (items.size() < n) items.resize(n);
    count_ = n;
    for (size_t i = 0; i < n; i++) {
        Item& x = items[i];
        x.stack.resize(STACK);
        x.at = {(unsigned)(i % b.x), (unsigned)(i / b.x % b.y), (unsigned)(i / b.x / b.y)};
        x.waits = -1;
        x.done = false;
        x.shuffles = 0;
        getcontext(&x.context);
        x.context.uc_stack.ss_sp = x.stack.data();
        x.context.uc_stack.ss_size = STACK;
        x.context.uc_link = nullptr;
        makecontext(&x.context, item_main, 0);
    }
    size_t left = n;
    while (left) {
        bool moved = false;
        for (size_t i = 0; i < n; i++) {
            if (items[i].done || items[i].waits >= 0) continue;
            running = i;
            runtime_.thread = items[i].at;
            swapcontext(&scheduler, &items[i].context);
            moved = true;
            if (items[i].done) left--;
        }
        size_t at_group = 0, live = 0;
        for (size_t w = 0; w < n; w += WARP) {
            size_t end = w + WARP < n ? w + WARP : n, here = 0, open = 0;
            for (size_t i = w; i < end; i++) {
                open += !items[i].done;
                here += !items[i].done && items[i].waits == 1;
                at_group += !items[i].done && items[i].waits == 0;
            }
            live += open;
            if (open && here == open)
                for (size_t i = w; i < end; i++) items[i].waits = -1, moved = true;
        }
        if (live && at_group == live)
            for (size_t i = 0; i < n; i++) items[i].waits = -1, moved = true;
        if (!moved) {
            fprintf(stderr, "stand-in: work-items wait for each other at different barriers\n");
            return false;
        }
    }
    return true;
}

API(cuLaunchKernel, hipModuleLaunchKernel)(Handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                           unsigned, Handle s, void** arguments, void**) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gy > 65535 || gz > 65535) return INVALID;
    Function* k = (Function*)f;
    launches_++;
    kernel_ = k->call;
    arguments_ = arguments;
    runtime_.grid = {gx, gy, gz};
    runtime_.block_size = {bx, by, bz};
    for (unsigned z = 0; z < gz; z++)
        for (unsigned y = 0; y < gy; y++)
            for (unsigned x = 0; x < gx; x++) {
                runtime_.block = {x, y, z};
                if (k->module->syncs) {
                    if (!run_group({bx, by, bz}, (size_t)bx * by * bz)) return (int)(lost_ = LAUNCH_FAILED);
                    continue;
                }
                for (unsigned c = 0; c < bz; c++)
                    for (unsigned b = 0; b < by; b++)
                        for (unsigned a = 0; a < bx; a++) {
                            runtime_.thread = {a, b, c};
                            kernel_(arguments);
                        }
            }
    return OK;
}
