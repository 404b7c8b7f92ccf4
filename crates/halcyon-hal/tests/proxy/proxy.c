/* An OpenCL library that forwards to the real one, counts launches and read-backs, and can falsify one
   read-back. Tests use it: an answer that does not change when a read-back is falsified did not come from the
   device, and a run without launches computed nothing there.

   HALCYON_PROXY_TARGET   library to forward to (default libOpenCL.so.1)
   HALCYON_PROXY_COUNT    file that gets "launches L reads R falsified F" after every launch and read
   HALCYON_PROXY_CORRUPT  N: falsify read-back number N, counted from 1; N:K flips a bit of its byte K
                          (default 3, the exponent of the first f32). Read-backs of up to 4 bytes (the fault
                          word) are not counted. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *H;
typedef int32_t i32;
typedef uint32_t u32;
typedef uint64_t u64;
typedef size_t sz;
typedef void (*FN)(void);

static long launches, reads, falsified;

static void *real(const char *name) {
    static void *lib;
    if (!lib) {
        const char *target = getenv("HALCYON_PROXY_TARGET");
        lib = dlopen(target && *target ? target : "libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
        if (!lib) {
            fprintf(stderr, "proxy: %s\n", dlerror());
            exit(97);
        }
    }
    void *f = dlsym(lib, name);
    if (!f) {
        fprintf(stderr, "proxy: the real library has no %s\n", name);
        exit(98);
    }
    return f;
}

static void report(void) {
    const char *path = getenv("HALCYON_PROXY_COUNT");
    FILE *f = path && *path ? fopen(path, "w") : NULL;
    if (f) {
        fprintf(f, "launches %ld reads %ld falsified %ld\n", launches, reads, falsified);
        fclose(f);
    }
}

#define RESOLVE(r, name, params)                     \
    static r(*f) params;                             \
    if (!f) {                                        \
        void *p = real(#name);                       \
        memcpy(&f, &p, sizeof f);                    \
    }
#define FORWARD(r, name, params, args)               \
    r name params {                                  \
        RESOLVE(r, name, params)                     \
        return f args;                               \
    }

FORWARD(i32, clGetPlatformIDs, (u32 a, H *b, u32 *c), (a, b, c))
FORWARD(i32, clGetPlatformInfo, (H a, u32 b, sz c, void *d, sz *e), (a, b, c, d, e))
FORWARD(i32, clGetDeviceIDs, (H a, u64 b, u32 c, H *d, u32 *e), (a, b, c, d, e))
FORWARD(i32, clGetDeviceInfo, (H a, u32 b, sz c, void *d, sz *e), (a, b, c, d, e))
FORWARD(H, clCreateContext, (const intptr_t *a, u32 b, const H *c, FN d, void *e, i32 *g), (a, b, c, d, e, g))
FORWARD(i32, clReleaseContext, (H a), (a))
FORWARD(H, clCreateCommandQueue, (H a, H b, u64 c, i32 *d), (a, b, c, d))
FORWARD(i32, clReleaseCommandQueue, (H a), (a))
FORWARD(H, clCreateBuffer, (H a, u64 b, sz c, void *d, i32 *e), (a, b, c, d, e))
FORWARD(H, clCreateSubBuffer, (H a, u64 b, u32 c, const void *d, i32 *e), (a, b, c, d, e))
FORWARD(i32, clReleaseMemObject, (H a), (a))
FORWARD(H, clCreateProgramWithSource, (H a, u32 b, const char **c, const sz *d, i32 *e), (a, b, c, d, e))
FORWARD(H, clCreateProgramWithBinary,
        (H a, u32 b, const H *c, const sz *d, const unsigned char **e, i32 *g, i32 *h), (a, b, c, d, e, g, h))
FORWARD(i32, clBuildProgram, (H a, u32 b, const H *c, const char *d, FN e, void *g), (a, b, c, d, e, g))
FORWARD(i32, clGetProgramInfo, (H a, u32 b, sz c, void *d, sz *e), (a, b, c, d, e))
FORWARD(i32, clGetProgramBuildInfo, (H a, H b, u32 c, sz d, void *e, sz *g), (a, b, c, d, e, g))
FORWARD(i32, clReleaseProgram, (H a), (a))
FORWARD(H, clCreateKernel, (H a, const char *b, i32 *c), (a, b, c))
FORWARD(i32, clReleaseKernel, (H a), (a))
FORWARD(i32, clSetKernelArg, (H a, u32 b, sz c, const void *d), (a, b, c, d))
FORWARD(i32, clGetKernelWorkGroupInfo, (H a, H b, u32 c, sz d, void *e, sz *g), (a, b, c, d, e, g))
FORWARD(i32, clEnqueueWriteBuffer, (H a, H b, u32 c, sz d, sz e, const void *g, u32 h, const H *i, H *j),
        (a, b, c, d, e, g, h, i, j))
FORWARD(i32, clEnqueueCopyBuffer, (H a, H b, H c, sz d, sz e, sz g, u32 h, const H *i, H *j),
        (a, b, c, d, e, g, h, i, j))
FORWARD(void *, clEnqueueMapBuffer, (H a, H b, u32 c, u64 d, sz e, sz g, u32 h, const H *i, H *j, i32 *k),
        (a, b, c, d, e, g, h, i, j, k))
FORWARD(i32, clEnqueueUnmapMemObject, (H a, H b, void *c, u32 d, const H *e, H *g), (a, b, c, d, e, g))
FORWARD(i32, clFlush, (H a), (a))
FORWARD(i32, clFinish, (H a), (a))
FORWARD(i32, clGetEventProfilingInfo, (H a, u32 b, sz c, void *d, sz *e), (a, b, c, d, e))
FORWARD(i32, clReleaseEvent, (H a), (a))
FORWARD(i32, clGetEventInfo, (H a, u32 b, sz c, void *d, sz *e), (a, b, c, d, e))
FORWARD(i32, clWaitForEvents, (u32 a, const H *b), (a, b))
FORWARD(i32, clSetEventCallback, (H a, i32 b, FN c, void *d), (a, b, c, d))
FORWARD(i32, clSetMemObjectDestructorCallback, (H a, FN b, void *c), (a, b, c))
FORWARD(H, clCreateUserEvent, (H a, i32 *b), (a, b))
FORWARD(i32, clSetUserEventStatus, (H a, i32 b), (a, b))
FORWARD(i32, clEnqueueMarkerWithWaitList, (H a, u32 b, const H *c, H *d), (a, b, c, d))
FORWARD(i32, clEnqueueBarrierWithWaitList, (H a, u32 b, const H *c, H *d), (a, b, c, d))

/* The functions of cl_khr_command_buffer. The launches of a command buffer count when it is enqueued. */
typedef i32 (*RECORD)(H, H, const u64 *, H, u32, const sz *, const sz *, const sz *, u32, const u32 *, u32 *, H *);
typedef i32 (*ENQUEUE)(u32, H *, H, u32, const H *, H *);
typedef i32 (*RELEASE)(H);
static RECORD real_record;
static ENQUEUE real_enqueue;
static RELEASE real_release;
static struct recorded {
    H buffer;
    long launches;
    struct recorded *next;
} *recordings;
static pthread_mutex_t recording = PTHREAD_MUTEX_INITIALIZER;

static struct recorded *recorded_of(H buffer) {
    struct recorded *r = recordings;
    while (r && r->buffer != buffer) r = r->next;
    return r;
}

static i32 record(H a, H b, const u64 *c, H d, u32 e, const sz *g, const sz *h, const sz *i, u32 j, const u32 *k, u32 *l, H *m) {
    i32 r = real_record(a, b, c, d, e, g, h, i, j, k, l, m);
    if (r != 0) return r;
    pthread_mutex_lock(&recording);
    struct recorded *own = recorded_of(a);
    if (!own) {
        own = calloc(1, sizeof *own);
        if (!own) exit(99);
        own->buffer = a;
        own->next = recordings;
        recordings = own;
    }
    own->launches++;
    pthread_mutex_unlock(&recording);
    return r;
}

static i32 enqueue(u32 a, H *b, H c, u32 d, const H *e, H *g) {
    i32 r = real_enqueue(a, b, c, d, e, g);
    if (r != 0) return r;
    pthread_mutex_lock(&recording);
    struct recorded *own = recorded_of(c);
    if (own) __sync_fetch_and_add(&launches, own->launches);
    pthread_mutex_unlock(&recording);
    report();
    return r;
}

static i32 release(H a) {
    /* The driver never retains a command buffer, so this is its last reference. */
    pthread_mutex_lock(&recording);
    for (struct recorded **at = &recordings; *at; at = &(*at)->next) {
        if ((*at)->buffer != a) continue;
        struct recorded *old = *at;
        *at = old->next;
        free(old);
        break;
    }
    pthread_mutex_unlock(&recording);
    return real_release(a);
}

void *clGetExtensionFunctionAddressForPlatform(H a, const char *name) {
    RESOLVE(void *, clGetExtensionFunctionAddressForPlatform, (H, const char *))
    void *p = f(a, name);
    if (!p) return p;
#define REPLACE(real_name, own, of)                  \
    if (!strcmp(name, #of)) {                        \
        FN mine = (FN)own;                           \
        memcpy(&real_name, &p, sizeof p);            \
        memcpy(&p, &mine, sizeof p);                 \
    }
    REPLACE(real_record, record, clCommandNDRangeKernelKHR)
    REPLACE(real_enqueue, enqueue, clEnqueueCommandBufferKHR)
    REPLACE(real_release, release, clReleaseCommandBufferKHR)
    return p;
}

i32 clEnqueueNDRangeKernel(H a, H b, u32 c, const sz *d, const sz *e, const sz *g, u32 h, const H *i, H *j) {
    RESOLVE(i32, clEnqueueNDRangeKernel, (H, H, u32, const sz *, const sz *, const sz *, u32, const H *, H *))
    i32 r = f(a, b, c, d, e, g, h, i, j);
    if (r == 0) {
        __sync_fetch_and_add(&launches, 1);
        report();
    }
    return r;
}

i32 clEnqueueReadBuffer(H a, H b, u32 c, sz d, sz bytes, void *out, u32 h, const H *i, H *j) {
    RESOLVE(i32, clEnqueueReadBuffer, (H, H, u32, sz, sz, void *, u32, const H *, H *))
    (void)c;
    /* Waits, so that the bytes are there to be falsified. */
    i32 r = f(a, b, 1, d, bytes, out, h, i, j);
    if (r == 0 && bytes > 4) {
        long n = __sync_add_and_fetch(&reads, 1);
        const char *want = getenv("HALCYON_PROXY_CORRUPT");
        if (want && atol(want) == n) {
            const char *colon = strchr(want, ':');
            sz at = colon ? (sz)atol(colon + 1) : 3;
            ((unsigned char *)out)[at < bytes ? at : bytes - 1] ^= 0x40;
            __sync_fetch_and_add(&falsified, 1);
        }
        report();
    }
    return r;
}
