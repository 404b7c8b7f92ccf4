// A stand-in for the CUDA driver and NVRTC or, with STANDIN_HIP, for the HIP runtime and hipRTC. Its devices
// use host memory. Kernels are compiled as C++ (kernel.h) and run on this processor. It is for tests of the
// drivers without a GPU; the product never loads it.
//
// It is as strict as the real libraries or stricter: a copy outside of an allocation loses the device
// permanently; a call in a thread that has not set the right device is rejected (the real ones would tolerate
// some of these); a call that a capture does not permit ends the capture. It counts live objects. Tests can
// make it fail, and make it delay all work of a stream until something waits for the work ("defer"), as a
// slow device would. It is built by halcyon_test_host::standin, with the path of kernel.h in H_KERNEL and a
// directory for modules in H_FOLDER.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <sys/wait.h>
#include <thread>
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
// The driver's CUDA version.
static const int DRIVER_MAJOR = 12;
#define API(cuda, hip) extern "C" int NAME(cuda, hip)

typedef void* Handle;
typedef uint64_t Address;
enum { OK = 0, INVALID = 1, FULL = 2, UNINITIALISED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       UNSUPPORTED_PTX = 222, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, PEER_ENABLED = 704, LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900,
       CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_WRONG_THREAD = 908 };

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
    int device;
};
struct Function {
    Module* module;
    void (*call)(void**);
    // The size of each argument in bytes. The highest bit marks an address.
    std::vector<unsigned char> sizes;
};
struct Event {
    uint64_t at;
    // The stream in which it was last recorded, how often it was recorded, and the number of the last
    // recording that has run.
    Handle by;
    uint64_t recorded, done;
    int device;
};

typedef std::function<int()> Work;
struct Graph {
    std::vector<Work> nodes;
};
struct Stream {
    int device;
    // The graph of the capture, the thread that captures, and whether the capture has failed.
    Graph* capture;
    std::thread::id by;
    bool broken;
    // Delayed work.
    std::deque<Work> waiting;
};

// Counters and controls of the tests, by their names in standin_get and standin_set.
static int64_t devices_ = 2, memory_ = 1 << 30, fail_alloc_ = -1, lost_ = 0, falsify_ = -1, lose_at_ = -1;
static int64_t launches_, ptx_, copies_, compiles_, allocs_, calls_, graph_launches_, peer_copies_, fail_instantiate_ = -1, defer_, peers_ = 1, refuse_module_;
// Of the run-time compiler: its version, the oldest and the newest architecture it knows, and whether its
// builtins are missing.
static int64_t compiler_ = DRIVER_MAJOR, oldest_, newest_ = 100, broken_;

static bool initialised_;
static thread_local int current_ = -1;
static int contexts_;
static std::map<Address, size_t> memory;
static std::map<void*, size_t> pages;
static std::set<Handle> streams, events, modules, graphs, execs;
static std::map<Address, int> where;
static std::set<std::pair<int, int>> peer_access;
// Number of streams that this thread is capturing.
static thread_local int capturing_;
static uint64_t clock_;
static int64_t used_, others_;

static const size_t GUARD = 64;
static const unsigned char POISON = 0xa5, FENCE = 0x5c;

// The counters and controls of the vendor libraries (blas.cpp, dnn.cpp).
static int64_t libraries_get(const std::string& name);
static int libraries_set(const std::string& name, int64_t v);

extern "C" int64_t standin_get(const char* name) {
    LOCK;
    std::string n = name;
    if (n == "memory") return (int64_t)memory.size();
    if (n == "pages") return (int64_t)pages.size();
    if (n == "streams") return (int64_t)streams.size();
    if (n == "events") return (int64_t)events.size();
    if (n == "modules") return (int64_t)modules.size();
    if (n == "contexts") return contexts_;
    if (n == "graphs") return (int64_t)graphs.size();
    if (n == "execs") return (int64_t)execs.size();
    if (n == "graph launches") return graph_launches_;
    if (n == "calls") return calls_;
    if (n == "peer copies") return peer_copies_;
    if (n == "launches") return launches_;
    if (n == "copies") return copies_;
    if (n == "compiles") return compiles_;
    if (n == "ptx") return ptx_;
    if (n == "allocations") return allocs_;
    if (n == "lost") return lost_;
    return libraries_get(n);
}

extern "C" int standin_set(const char* name, int64_t v) {
    LOCK;
    std::string n = name;
    if (n == "devices") devices_ = v;
    else if (n == "memory") memory_ = v;
    // Memory of each device used by other processes.
    else if (n == "others") others_ = v;
    // The v-th allocation from now on fails, once.
    else if (n == "fail allocation") fail_alloc_ = v;
    // The device fails from the next call on.
    else if (n == "lost") lost_ = v;
    // The device fails from the v-th launch from now on.
    else if (n == "lose at launch") lose_at_ = v;
    // The v-th byte read back from now on is changed.
    else if (n == "falsify") falsify_ = v;
    // The v-th graph from now on fails to instantiate, once.
    else if (n == "fail instantiate") fail_instantiate_ = v;
    // Whether streams delay their work.
    else if (n == "defer") defer_ = v;
    // Whether devices reach each other's memory.
    else if (n == "peers") peers_ = v;
    // From now on, this thread counts as one that has not set a device.
    else if (n == "forget") current_ = -1;
    // The error of the next module load.
    else if (n == "refuse module") refuse_module_ = v;
    else if (n == "compiler") compiler_ = v;
    else if (n == "oldest generation") oldest_ = v;
    else if (n == "newest generation") newest_ = v;
    else if (n == "broken") broken_ = v;
    else return libraries_set(n, v);
    return OK;
}

// Start of every call that needs a device.
#define ENTER                              \
    LOCK;                                  \
    calls_++;                              \
    if (!initialised_) return UNINITIALISED; \
    if (current_ < 0) return INVALID_CONTEXT; \
    if (lost_) return (int)lost_

// Start of a call that releases something; a lost device accepts it too.
#define LEAVE                                \
    LOCK;                                    \
    calls_++;                                \
    if (!initialised_) return UNINITIALISED; \
    if (current_ < 0) return INVALID_CONTEXT

// Start of a call that could wait: it ends a capture by this thread.
#define UNSAFE \
    ENTER;     \
    if (capturing_) return break_captures()

static int break_captures() {
    for (Handle s : streams) {
        Stream* x = (Stream*)s;
        if (x->capture && x->by == std::this_thread::get_id()) x->broken = true;
    }
    return CAPTURE_UNSUPPORTED;
}

// Runs a stream's delayed work, all of it or until `until` returns true.
static void flush(Stream* s, const std::function<bool()>& until = nullptr) {
    while (!s->waiting.empty() && !(until && until())) {
        Work w = std::move(s->waiting.front());
        s->waiting.pop_front();
        if (!lost_) w();
    }
}
static void flush_all() {
    for (Handle s : streams) flush((Stream*)s);
}

// Enqueues work in a stream, or adds it to the graph being captured.
static int enqueue(Handle h, Work w) {
    Stream* s = (Stream*)h;
    if (s->capture) {
        if (s->broken) return CAPTURE_INVALIDATED;
        s->capture->nodes.push_back(std::move(w));
        return OK;
    }
    if (defer_) {
        s->waiting.push_back(std::move(w));
        return OK;
    }
    flush(s);
    return w();
}

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
    calls_++;
    if (d < 0 || d >= devices_) return INVALID_DEVICE;
    current_ = d;
    return OK;
}
extern "C" int hipGetDevice(int* d) {
    LOCK;
    calls_++;
    // The first device if none was set.
    *d = current_ < 0 ? 0 : current_;
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
    calls_++;
    if (!c || contexts_ <= 0) return INVALID_CONTEXT;
    current_ = (int)(intptr_t)c - 1;
    return OK;
}
static thread_local std::vector<int> visited_;
extern "C" int cuCtxPushCurrent_v2(Handle c) {
    LOCK;
    calls_++;
    if (!c || contexts_ <= 0) return INVALID_CONTEXT;
    visited_.push_back(current_);
    current_ = (int)(intptr_t)c - 1;
    return OK;
}
extern "C" int cuCtxPopCurrent_v2(Handle* c) {
    LOCK;
    calls_++;
    if (visited_.empty()) return INVALID_CONTEXT;
    *c = (Handle)(intptr_t)(current_ + 1);
    current_ = visited_.back();
    visited_.pop_back();
    return OK;
}
#endif

API(cuMemGetInfo_v2, hipMemGetInfo)(size_t* free, size_t* total) {
    ENTER;
    *total = (size_t)memory_;
    *free = (size_t)(memory_ - used_ - others_);
    return OK;
}
API(cuCtxSynchronize, hipDeviceSynchronize)() {
    UNSAFE;
    flush_all();
    return (int)lost_;
}
API(cuMemAlloc_v2, hipMalloc)(Address* at, size_t n) {
    UNSAFE;
    allocs_++;
    if (n == 0) return INVALID;
    if (fail_alloc_ >= 0 && fail_alloc_-- == 0) return FULL;
    if (used_ + others_ + (int64_t)n > memory_) return FULL;
    unsigned char* p = (unsigned char*)aligned_alloc(256, (n + 2 * GUARD + 256 + 255) / 256 * 256);
    if (!p) return FULL;
    p += 256;
    memset(p - GUARD, FENCE, GUARD);
    memset(p, POISON, n);
    memset(p + n, FENCE, GUARD);
    used_ += (int64_t)n;
    *at = (Address)p;
    memory[*at] = n;
    where[*at] = current_;
    return OK;
}
API(cuMemFree_v2, hipFree)(Address at) {
    LEAVE;
    if (capturing_) return break_captures();
    // The memory of a lost device is freed too, but the call returns the device's error.
    flush_all();
    auto m = memory.find(at);
    if (m == memory.end()) return INVALID;
    if (where[at] != current_) return INVALID_CONTEXT;
    unsigned char* p = (unsigned char*)at;
    for (size_t i = 0; i < GUARD; i++)
        if (p[-(ptrdiff_t)GUARD + (ptrdiff_t)i] != FENCE || p[m->second + i] != FENCE) {
            fprintf(stderr, "stand-in: something wrote outside of an allocation of %zu bytes\n", m->second);
            abort();
        }
    used_ -= (int64_t)m->second;
    where.erase(at);
    free(p - 256);
    memory.erase(m);
    return (int)lost_;
}
API(cuMemHostAlloc, hipHostMalloc)(void** at, size_t n, unsigned) {
    UNSAFE;
    *at = malloc(n);
    if (!*at) return FULL;
    pages[*at] = n;
    return OK;
}
API(cuMemFreeHost, hipHostFree)(void* at) {
    LEAVE;
    if (capturing_) return break_captures();
    flush_all();
    if (!pages.erase(at)) return INVALID;
    free(at);
    return OK;
}

// Whether the range lies in an allocation; otherwise the device is lost.
static bool inside(Address at, size_t n) {
    auto m = memory.upper_bound(at);
    if (m != memory.begin()) {
        --m;
        if (at >= m->first && at + n <= m->first + m->second) return true;
    }
    fprintf(stderr, "stand-in: %zu bytes at %llx are not in an allocation\n", n, (unsigned long long)at);
    lost_ = ILLEGAL_ADDRESS;
    return false;
}
// Whether the handle is a stream of this thread's device.
static bool live(Handle stream) { return streams.count(stream) && ((Stream*)stream)->device == current_; }
static bool live_event(Handle event) { return events.count(event) && ((Event*)event)->device == current_; }

// Whether the address is in page-locked host memory, which the device may access later.
static bool locked(const void* at) {
    auto m = pages.upper_bound((void*)at);
    return m != pages.begin() && (--m, (char*)at < (char*)m->first + m->second);
}

API(cuMemcpyHtoDAsync_v2, hipMemcpyHtoDAsync)(Address to, const void* from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    auto copy = [=](const void* from) {
        if (!inside(to, n)) return (int)lost_;
        copies_++;
        memcpy((void*)to, from, n);
        return (int)OK;
    };
    // Pageable memory is read before the call returns.
    if (locked(from)) return enqueue(s, [=] { return copy(from); });
    std::vector<char> bytes((const char*)from, (const char*)from + n);
    return enqueue(s, [=] { return copy(bytes.data()); });
}
API(cuMemcpyDtoHAsync_v2, hipMemcpyDtoHAsync)(void* to, Address from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    int code = enqueue(s, [=] {
        if (!inside(from, n)) return (int)lost_;
        copies_++;
        memcpy(to, (void*)from, n);
        if (falsify_ >= 0) {
            if ((size_t)falsify_ < n) ((unsigned char*)to)[falsify_] ^= 0x40;
            falsify_ = (size_t)falsify_ < n ? -1 : falsify_ - (int64_t)n;
        }
        return (int)OK;
    });
    return code;
}
API(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(Address to, Address from, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (to < from + n && from < to + n) {
        fprintf(stderr, "stand-in: a copy of %zu bytes overlaps itself\n", n);
        abort();
    }
    return enqueue(s, [=] {
        if (!inside(to, n) || !inside(from, n)) return (int)lost_;
        memcpy((void*)to, (void*)from, n);
        return (int)OK;
    });
}
API(cuMemsetD8Async, hipMemsetD8Async)(Address to, unsigned char v, size_t n, Handle s) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    return enqueue(s, [=] {
        if (!inside(to, n)) return (int)lost_;
        memset((void*)to, v, n);
        return (int)OK;
    });
}

API(cuStreamCreate, hipStreamCreateWithFlags)(Handle* s, unsigned) {
    UNSAFE;
    *s = new Stream{current_, nullptr, {}, false, {}};
    streams.insert(*s);
    return OK;
}
API(cuStreamDestroy_v2, hipStreamDestroy)(Handle s) {
    LEAVE;
    if (!live(s)) return INVALID_HANDLE;
    flush((Stream*)s);
    streams.erase(s);
    delete (Stream*)s;
    return OK;
}
API(cuStreamSynchronize, hipStreamSynchronize)(Handle s) {
    UNSAFE;
    if (!live(s)) return INVALID_HANDLE;
    if (((Stream*)s)->capture) {
        ((Stream*)s)->broken = true;
        return CAPTURE_UNSUPPORTED;
    }
    flush((Stream*)s);
    return (int)lost_;
}
API(cuEventCreate, hipEventCreateWithFlags)(Handle* e, unsigned) {
    ENTER;
    *e = new Event{0, nullptr, 0, 0, current_};
    events.insert(*e);
    return OK;
}
API(cuEventDestroy_v2, hipEventDestroy)(Handle e) {
    LEAVE;
    if (!live_event(e)) return INVALID_HANDLE;
    events.erase(e);
    // Delayed work may still refer to the event, so it is leaked if work is delayed.
    if (!defer_) delete (Event*)e;
    return OK;
}
// Runs the delayed work before a recording of an event.
static void reach(Event* e, uint64_t round) {
    if (e->by && streams.count(e->by)) flush((Stream*)e->by, [=] { return e->done >= round; });
}
API(cuEventRecord, hipEventRecord)(Handle h, Handle s) {
    ENTER;
    if (!live_event(h) || !live(s)) return INVALID_HANDLE;
    // The real libraries capture this as a dependency; the driver does not need that.
    if (((Stream*)s)->capture) return break_captures();
    Event* e = (Event*)h;
    if (e->device != ((Stream*)s)->device) return INVALID_HANDLE;
    e->by = s;
    uint64_t round = ++e->recorded;
    return enqueue(s, [=] {
        e->at = ++clock_;
        e->done = round;
        return (int)OK;
    });
}
API(cuEventQuery, hipEventQuery)(Handle e) {
    UNSAFE;
    if (!live_event(e)) return INVALID_HANDLE;
    return ((Event*)e)->done < ((Event*)e)->recorded ? NOT_READY : OK;
}
API(cuEventSynchronize, hipEventSynchronize)(Handle e) {
    UNSAFE;
    if (!live_event(e)) return INVALID_HANDLE;
    reach((Event*)e, ((Event*)e)->recorded);
    return (int)lost_;
}
API(cuStreamWaitEvent, hipStreamWaitEvent)(Handle s, Handle h, unsigned) {
    ENTER;
    if (!live(s) || !events.count(h)) return INVALID_HANDLE;
    if (((Stream*)s)->capture) return break_captures();
    Event* e = (Event*)h;
    uint64_t round = e->recorded;
    return enqueue(s, [=] {
        reach(e, round);
        return (int)OK;
    });
}
API(cuEventElapsedTime, hipEventElapsedTime)(float* ms, Handle a, Handle b) {
    ENTER;
    if (!live_event(a) || !live_event(b) || !((Event*)a)->at || !((Event*)b)->at) return INVALID_HANDLE;
    // No time is measured: the result is a microsecond for each event recorded in between.
    *ms = (float)(((Event*)b)->at - ((Event*)a)->at) * 1e-3f;
    return OK;
}

// ---- copies between devices

API(cuDeviceCanAccessPeer, hipDeviceCanAccessPeer)(int* can, int a, int b) {
    LOCK;
    calls_++;
    if (a < 0 || b < 0 || a >= devices_ || b >= devices_) return INVALID_DEVICE;
    *can = a != b && peers_;
    return OK;
}
static int enable_peer(int other) {
    if (other == current_ || other < 0 || other >= devices_) return INVALID_DEVICE;
    if (!peers_) return 217;
    return peer_access.insert({current_, other}).second ? OK : PEER_ENABLED;
}
// Whether the range lies in an allocation of one device; otherwise the devices are lost.
static bool inside_of(int device, Address at, size_t n) {
    if (!inside(at, n)) return false;
    auto m = where.upper_bound(at);
    if ((--m)->second == device) return true;
    fprintf(stderr, "stand-in: a copy treats %llx as memory of device %d, which it is not\n", (unsigned long long)at, device);
    lost_ = ILLEGAL_ADDRESS;
    return false;
}
static int copy_peer(Address to, int to_device, Address from, int from_device, size_t n, Handle s) {
    if (!live(s)) return INVALID_HANDLE;
    // Only direct copies are supported.
    if (((Stream*)s)->device != to_device || !peer_access.count({to_device, from_device})) return INVALID;
    return enqueue(s, [=] {
        if (!inside_of(to_device, to, n) || !inside_of(from_device, from, n)) return (int)lost_;
        peer_copies_++;
        memcpy((void*)to, (void*)from, n);
        return (int)OK;
    });
}
#ifdef STANDIN_HIP
extern "C" int hipDeviceEnablePeerAccess(int other, unsigned flags) {
    ENTER;
    return flags ? (int)INVALID : enable_peer(other);
}
extern "C" int hipMemcpyPeerAsync(Address to, int to_device, Address from, int from_device, size_t n, Handle s) {
    ENTER;
    return copy_peer(to, to_device, from, from_device, n, s);
}
#else
extern "C" int cuCtxEnablePeerAccess(Handle other, unsigned flags) {
    ENTER;
    return flags ? (int)INVALID : enable_peer((int)(intptr_t)other - 1);
}
extern "C" int cuMemcpyPeerAsync(Address to, Handle to_context, Address from, Handle from_context, size_t n, Handle s) {
    ENTER;
    return copy_peer(to, (int)(intptr_t)to_context - 1, from, (int)(intptr_t)from_context - 1, n, s);
}
#endif

// ---- graphs: the work of a captured stream, run again with the captured arguments and the current memory.

#ifndef STANDIN_OLDER
API(cuStreamBeginCapture_v2, hipStreamBeginCapture)(Handle h, int mode) {
    ENTER;
    if (!live(h)) return INVALID_HANDLE;
    Stream* s = (Stream*)h;
    if (mode != 1 || s->capture) return INVALID;
    s->capture = new Graph;
    s->by = std::this_thread::get_id();
    s->broken = false;
    capturing_++;
    return OK;
}
API(cuStreamEndCapture, hipStreamEndCapture)(Handle h, Handle* graph) {
    ENTER;
    if (!live(h)) return INVALID_HANDLE;
    Stream* s = (Stream*)h;
    if (!s->capture) return CAPTURE_UNMATCHED;
    if (s->by != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    Graph* g = s->capture;
    s->capture = nullptr;
    capturing_--;
    if (s->broken) {
        delete g;
        *graph = nullptr;
        return CAPTURE_INVALIDATED;
    }
    graphs.insert(*graph = g);
    return OK;
}
API(cuGraphInstantiateWithFlags, hipGraphInstantiateWithFlags)(Handle* exec, Handle graph, unsigned long long flags) {
    UNSAFE;
    if (!graphs.count(graph)) return INVALID_HANDLE;
    if (flags != 0) return INVALID;
    if (fail_instantiate_ >= 0 && fail_instantiate_-- == 0) return FULL;
    execs.insert(*exec = new Graph(*(Graph*)graph));
    return OK;
}
API(cuGraphLaunch, hipGraphLaunch)(Handle exec, Handle s) {
    ENTER;
    if (!execs.count(exec) || !live(s)) return INVALID_HANDLE;
    if (((Stream*)s)->capture) return break_captures();
    graph_launches_++;
    Graph* g = (Graph*)exec;
    return enqueue(s, [=] {
        if (!execs.count(exec)) {
            fprintf(stderr, "stand-in: a graph was destroyed before it ran\n");
            abort();
        }
        for (Work& w : g->nodes)
            if (int code = w()) return code;
        return (int)OK;
    });
}
API(cuGraphExecDestroy, hipGraphExecDestroy)(Handle exec) {
    LEAVE;
    if (!execs.erase(exec)) return INVALID_HANDLE;
    delete (Graph*)exec;
    return OK;
}
API(cuGraphDestroy, hipGraphDestroy)(Handle graph) {
    LEAVE;
    if (!graphs.erase(graph)) return INVALID_HANDLE;
    delete (Graph*)graph;
    return OK;
}
#endif

// ---- the compiler: a program's "binary" is a mark and the path of a shared object.

static const char MARK[] = "halcyon stand-in module ", PTX_MARK[] = "// halcyon stand-in ptx ";

struct Program {
    std::string text, name, log, binary, ptx;
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

// Replaces inline assembly of matrix instructions by calls of kernel.h's functions with the same operands,
// and vector types that only clang has by structures. Returns false for any instruction that does not match
// exactly.
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
        {"cvt.rn.f16x2.f32 %0, %1, %2;", "h_cvt_pair<h_float_to_half>"},
        {"cvt.rn.bf16x2.f32 %0, %1, %2;", "h_cvt_pair<h_float_to_bfloat>"},
    };
    for (size_t at = 0; (at = text.find("asm", at)) != std::string::npos;) {
        size_t open = text.find('(', at), quote = open + 1, end = text.find('"', quote + 1);
        std::string word = text.substr(at, open - at);
        if ((word != "asm" && word != "asm volatile") || text[quote] != '"') { at += 3; continue; }
        std::string line = text.substr(quote + 1, end - quote - 1);
        auto found = known.find(line);
        if (found == known.end()) {
            // This instruction stays: the stand-in has no architecture, and the source then uses other code
            // for it.
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
    *major = HIP ? 5 : (int)compiler_;
    *minor = 4;
    return OK;
}
#ifndef STANDIN_HIP
static std::vector<int> generations() {
    std::vector<int> all;
    for (int g : {75, 80, 86, 90, 100})
        if (g >= oldest_ && g <= newest_) all.push_back(g);
    return all;
}
extern "C" int nvrtcGetNumSupportedArchs(int* n) {
    *n = (int)generations().size();
    return OK;
}
extern "C" int nvrtcGetSupportedArchs(int* to) {
    for (int g : generations()) *to++ = g;
    return OK;
}
// Whether the compiler knows a flag's architecture: 1 for device code, 2 for PTX only.
static int known(const char* flag) {
    int g = 0;
    bool own = sscanf(flag, "--gpu-architecture=sm_%d", &g) == 1;
    if (!own && sscanf(flag, "--gpu-architecture=compute_%d", &g) != 1) return 0;
    for (int k : generations())
        if (k == g) return own ? 1 : 2;
    return 0;
}
#endif
extern "C" int NAME(nvrtcCreateProgram, hiprtcCreateProgram)(Handle* p, const char* text, const char* name, int,
                                                            const char* const*, const char* const*) {
    *p = new Program{text, name ? name : "", "", "", ""};
    return OK;
}
extern "C" int NAME(nvrtcDestroyProgram, hiprtcDestroyProgram)(Handle* p) {
    delete (Program*)*p;
    *p = nullptr;
    return OK;
}
extern "C" int NAME(nvrtcCompileProgram, hiprtcCompileProgram)(Handle h, int n, const char* const* flags) {
    Program& p = *(Program*)h;
    // hipRTC compiles for the current device by default.
    int arch = HIP;
    for (int i = 0; i < n; i++)
        if (strstr(flags[i], "arch"))
#ifdef STANDIN_HIP
            arch = std::string(flags[i]) == OWN_ARCH;
#else
            arch = known(flags[i]);
#endif
    if (broken_) {
        p.log = "nvrtc: error: failed to open libnvrtc-builtins.so";
        return 7;
    }
    if (!arch) {
        p.log = "the flags name no architecture of the stand-in";
        return 5;
    }
    std::string text = p.text;
    replace(text, "asm(\"cvt.f32.f16 %0, %1;\" : \"=f\"(r) : \"h\"(x));", "r = h_half_to_float(x);");
    replace(text, "asm(\"cvt.rn.f16.f32 %0, %1;\" : \"=h\"(r) : \"f\"(x));", "r = h_float_to_half(x);");
    if (!instructions(text, p.log)) return 6;
    std::string whole = read_file(H_KERNEL) + "\n#line 1 \"" + p.name + "\"\n" + text + "\n";
    // One exported wrapper per entry point.
    for (size_t at = 0; (at = p.text.find("__launch_bounds__(", at)) != std::string::npos;) {
        size_t from = p.text.find('\n', at) + 1, to = p.text.find('(', from);
        std::string entry = p.text.substr(from, to - from);
        whole += "extern \"C\" void h_call_" + entry + "(void** a) { h_call(" + entry + ", a); }\n";
        whole += "extern \"C\" int h_sizes_" + entry + "(unsigned char* to) { return h_sizes(" + entry + ", to); }\n";
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
    std::string what = std::to_string(compiler_) + (syncs ? "s" : "-") + lib;
    what.push_back('\0');
    if (arch == 1) p.binary = MARK + what;
    if (!HIP) p.ptx = PTX_MARK + what;
    return OK;
}
#ifndef STANDIN_HIP
extern "C" int nvrtcGetPTXSize(Handle h, size_t* n) {
    *n = ((Program*)h)->ptx.size();
    return OK;
}
extern "C" int nvrtcGetPTX(Handle h, char* to) {
    memcpy(to, ((Program*)h)->ptx.data(), ((Program*)h)->ptx.size());
    return OK;
}
#endif
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
    UNSAFE;
    if (int code = (int)refuse_module_) {
        refuse_module_ = 0;
        return code;
    }
    const char* s = (const char*)image;
    bool ptx = !HIP && strncmp(s, PTX_MARK, sizeof PTX_MARK - 1) == 0;
    if (!ptx && strncmp(s, MARK, sizeof MARK - 1) != 0) return INVALID_IMAGE;
    s += (ptx ? sizeof PTX_MARK : sizeof MARK) - 1;
    // The module was compiled by a compiler that is newer than the driver.
    if (strtol(s, (char**)&s, 10) > DRIVER_MAJOR) return ptx ? UNSUPPORTED_PTX : INVALID_IMAGE;
    ptx_ += ptx;
    void* lib = dlopen(s + 1, RTLD_NOW | RTLD_LOCAL);
    if (!lib) {
        fprintf(stderr, "stand-in: %s\n", dlerror());
        return INVALID_IMAGE;
    }
    ((void (*)(Runtime*))dlsym(lib, "h_bind"))(&runtime_);
    *to = new Module{lib, s + 1, *s == 's', current_};
    modules.insert(*to);
    return OK;
}
API(cuModuleUnload, hipModuleUnload)(Handle h) {
    LEAVE;
    if (capturing_) return break_captures();
    flush_all();
    if (!modules.count(h)) return INVALID_HANDLE;
    if (((Module*)h)->device != current_) return INVALID_CONTEXT;
    modules.erase(h);
    dlclose(((Module*)h)->lib);
    delete (Module*)h;
    return OK;
}
API(cuModuleGetFunction, hipModuleGetFunction)(Handle* to, Handle h, const char* name) {
    ENTER;
    if (!modules.count(h)) return INVALID_HANDLE;
    Module* m = (Module*)h;
    if (m->device != current_) return INVALID_CONTEXT;
    void* call = dlsym(m->lib, (std::string("h_call_") + name).c_str());
    if (!call) return NOT_FOUND;
    auto sizes = (int (*)(unsigned char*))dlsym(m->lib, (std::string("h_sizes_") + name).c_str());
    unsigned char all[1024];
    int n = sizes(all);
    // Functions are never freed; the real ones belong to their module.
    *to = new Function{m, (void (*)(void**))call, std::vector<unsigned char>(all, all + n)};
    return OK;
}
API(cuFuncGetAttribute, hipFuncGetAttribute)(int* v, int which, Handle) {
    ENTER;
    if (which != 0) return INVALID;
    *v = 1024;
    return OK;
}

// A work-item of a workgroup with barriers.
struct Item {
    ucontext_t context;
    std::vector<char> stack;
    uint3_ at;
    // -1: running, 0: waits for the workgroup, 1: waits for its subgroup.
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

// Runs a kernel with copied arguments.
static int run_kernel(Function* k, uint3_ g, uint3_ b, std::vector<uint64_t> values) {
    if (!modules.count(k->module)) {
        fprintf(stderr, "stand-in: a kernel runs, but its module was unloaded\n");
        abort();
    }
    if (lose_at_ >= 0 && lose_at_-- == 0) return (int)(lost_ = LAUNCH_FAILED);
    std::vector<void*> pointers;
    for (size_t i = 0; i < values.size(); i++) {
        if ((k->sizes[i] & 0x80) && !inside(values[i], 0)) return (int)lost_;
        pointers.push_back(&values[i]);
    }
    launches_++;
    kernel_ = k->call;
    arguments_ = pointers.data();
    runtime_.grid = g;
    runtime_.block_size = b;
    for (unsigned z = 0; z < g.z; z++)
        for (unsigned y = 0; y < g.y; y++)
            for (unsigned x = 0; x < g.x; x++) {
                runtime_.block = {x, y, z};
                if (k->module->syncs) {
                    if (!run_group(b, (size_t)b.x * b.y * b.z)) return (int)(lost_ = LAUNCH_FAILED);
                    continue;
                }
                for (unsigned l = 0; l < b.z; l++)
                    for (unsigned j = 0; j < b.y; j++)
                        for (unsigned i = 0; i < b.x; i++) {
                            runtime_.thread = {i, j, l};
                            kernel_(arguments_);
                        }
            }
    return OK;
}

API(cuLaunchKernel, hipModuleLaunchKernel)(Handle f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                           unsigned, Handle s, void** arguments, void**) {
    ENTER;
    if (!live(s)) return INVALID_HANDLE;
    if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024 || gy > 65535 || gz > 65535) return INVALID;
    Function* k = (Function*)f;
    if (k->module->device != ((Stream*)s)->device) return INVALID_HANDLE;
    std::vector<uint64_t> values(k->sizes.size(), 0);
    for (size_t i = 0; i < values.size(); i++) memcpy(&values[i], arguments[i], k->sizes[i] & 0x7f);
    return enqueue(s, [=] { return run_kernel(k, {gx, gy, gz}, {bx, by, bz}, values); });
}

#include "blas.cpp"
#ifdef STANDIN_HIP
#include "rocblas.cpp"
#else
#include "dnn.cpp"
#include "graph.cpp"
#endif
