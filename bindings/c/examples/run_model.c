/* Runs the digit classifier and prints the probability of each digit.
 *
 * cc -std=c11 examples/run_model.c -Iinclude -Ltarget/release -lhalcyon -o run_model
 * LD_LIBRARY_PATH=target/release ./run_model ../../models/digits.onnx [DEVICE]
 */

#include "halcyon.h"

#include <stdio.h>

/* A handwritten seven. */
static const float SEVEN[64] = {
    0, 0,  2, 13, 16, 16,  7, 0,
    0, 0, 12, 15, 12, 16, 10, 0,
    0, 0, 16,  9,  0, 14,  6, 0,
    0, 0,  3,  0,  4, 16,  1, 0,
    0, 0,  0, 10, 14, 16,  6, 0,
    0, 0,  3, 16, 16, 11,  2, 0,
    0, 0,  0,  9, 14,  0,  0, 0,
    0, 0,  2, 15,  6,  0,  0, 0,
};

/* Everything that the program must free. */
struct Handles {
    HalcyonBackend *backend;
    HalcyonModel *model;
    HalcyonTensor *image;
    HalcyonTensor *probabilities;
};

static HalcyonStatus run(struct Handles *h, const char *path, const char *device) {
    HalcyonStatus status = halcyon_backend_open(device, NULL, &h->backend);
    if (status != HALCYON_STATUS_OK) return status;
    printf("%s\n", halcyon_backend_report(h->backend));

    status = halcyon_model_open(h->backend, path, &h->model);
    if (status != HALCYON_STATUS_OK) return status;
    const HalcyonPort *input = halcyon_model_input(h->model, 0);
    printf("input %s: %s\n", halcyon_port_name(input), halcyon_port_description(input));

    /* The model takes values from 0 to 1. */
    float pixels[64];
    for (size_t i = 0; i < 64; i++) pixels[i] = SEVEN[i] / 16.0f;
    const int64_t dims[4] = {1, 1, 8, 8};
    status = halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 4, pixels, sizeof pixels, &h->image);
    if (status != HALCYON_STATUS_OK) return status;

    const char *names[1] = {"image"};
    const HalcyonTensor *inputs[1] = {h->image};
    status = halcyon_model_run(h->model, names, inputs, 1, &h->probabilities, 1);
    if (status != HALCYON_STATUS_OK) return status;

    const float *p = halcyon_tensor_data(h->probabilities);
    for (size_t digit = 0; digit < halcyon_tensor_count(h->probabilities); digit++) {
        printf("%zu  %6.2f %%\n", digit, 100.0 * (double)p[digit]);
    }
    return HALCYON_STATUS_OK;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL.onnx [DEVICE]\n", argv[0]);
        return 2;
    }
    if (halcyon_abi_version() != HALCYON_ABI_VERSION) {
        fprintf(stderr, "the loaded libhalcyon is not the one that this program was built for\n");
        return 1;
    }
    struct Handles h = {0};
    HalcyonStatus status = run(&h, argv[1], argc > 2 ? argv[2] : "auto");
    if (status != HALCYON_STATUS_OK) {
        fprintf(stderr, "%s: %s\n", halcyon_status_name(status), halcyon_last_error());
    }
    halcyon_tensor_free(h.probabilities);
    halcyon_tensor_free(h.image);
    halcyon_model_free(h.model);
    halcyon_backend_free(h.backend);
    return status == HALCYON_STATUS_OK ? 0 : 1;
}
