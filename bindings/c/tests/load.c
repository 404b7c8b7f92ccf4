/* Loads the library at run time: `load libhalcyon.so DIGITS.onnx`. It uses no function by its name. */

#include "halcyon.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                        \
        }                                                                   \
    } while (0)

/* The address of a function, as a pointer of its type. */
#define LOAD(name)                                        \
    do {                                                  \
        void *address = dlsym(library, "halcyon_" #name); \
        CHECK(address != NULL);                           \
        memcpy(&name, &address, sizeof name);             \
    } while (0)

static void run(const char *path, const char *model_path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    uint32_t (*abi_version)(void);
    HalcyonStatus (*backend_open)(const char *, const HalcyonOptions *, HalcyonBackend **);
    HalcyonStatus (*model_open)(const HalcyonBackend *, const char *, HalcyonModel **);
    HalcyonStatus (*tensor_new)(int32_t, const int64_t *, size_t, const void *, size_t, HalcyonTensor **);
    HalcyonStatus (*model_run)(const HalcyonModel *, const char *const *, const HalcyonTensor *const *,
                               size_t, HalcyonTensor **, size_t);
    void (*tensor_free)(HalcyonTensor *);
    void (*model_free)(HalcyonModel *);
    void (*backend_free)(HalcyonBackend *);
    LOAD(abi_version);
    LOAD(backend_open);
    LOAD(model_open);
    LOAD(tensor_new);
    LOAD(model_run);
    LOAD(tensor_free);
    LOAD(model_free);
    LOAD(backend_free);
    CHECK(abi_version() == HALCYON_ABI_VERSION);
    HalcyonBackend *backend = NULL;
    HalcyonModel *model = NULL;
    HalcyonTensor *image = NULL, *out = NULL;
    const float pixels[64] = {0};
    const int64_t dims[4] = {1, 1, 8, 8};
    CHECK(backend_open("cpu", NULL, &backend) == HALCYON_STATUS_OK);
    CHECK(model_open(backend, model_path, &model) == HALCYON_STATUS_OK);
    CHECK(tensor_new(HALCYON_DTYPE_F32, dims, 4, pixels, sizeof pixels, &image) == HALCYON_STATUS_OK);
    CHECK(model_run(model, NULL, (const HalcyonTensor *const[]){image}, 1, &out, 1) == HALCYON_STATUS_OK);
    tensor_free(out);
    tensor_free(image);
    model_free(model);
    backend_free(backend);
    /* The library stays in memory, because its threads may still be running. */
    CHECK(dlclose(library) == 0);
    CHECK(dlopen(path, RTLD_NOW | RTLD_NOLOAD) != NULL);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    run(argv[1], argv[2]);
    run(argv[1], argv[2]);
    puts("done");
    return 0;
}
