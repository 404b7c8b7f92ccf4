/* Four threads run one model at the same time on different inputs. Each result must be the one that the model
 * gives to the same input when nothing else runs.
 *
 * cc -std=c11 -pthread examples/threads.c -Iinclude -Ltarget/release -lhalcyon -o threads
 * LD_LIBRARY_PATH=target/release ./threads ../../models/digits.onnx [DEVICE]
 */

#include "halcyon.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { THREADS = 4, RUNS = 100, PIXELS = 64, CLASSES = 10 };

struct Work {
    const HalcyonModel *model;
    size_t number;
    /* What the model gives to this thread's input alone. */
    float expected[CLASSES];
    int wrong;
    /* A copy of the text of the first failure: halcyon_last_error is the thread's own. */
    char error[256];
};

/* Runs the model on the input of a thread, a ramp that depends on the thread's number. */
static HalcyonStatus run(const HalcyonModel *model, size_t number, float result[CLASSES]) {
    float pixels[PIXELS];
    for (size_t i = 0; i < PIXELS; i++) pixels[i] = (float)((i * (number + 1)) % 17) / 16.0f;
    const int64_t dims[4] = {1, 1, 8, 8};
    HalcyonTensor *image = NULL, *output = NULL;
    HalcyonStatus status = halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 4, pixels, sizeof pixels, &image);
    if (status == HALCYON_STATUS_OK) {
        const HalcyonTensor *inputs[1] = {image};
        status = halcyon_model_run(model, NULL, inputs, 1, &output, 1);
    }
    if (status == HALCYON_STATUS_OK) {
        memcpy(result, halcyon_tensor_data(output), CLASSES * sizeof *result);
    }
    halcyon_tensor_free(output);
    halcyon_tensor_free(image);
    return status;
}

static void *work(void *argument) {
    struct Work *w = argument;
    for (int i = 0; i < RUNS; i++) {
        float result[CLASSES];
        if (run(w->model, w->number, result) != HALCYON_STATUS_OK) {
            snprintf(w->error, sizeof w->error, "%s", halcyon_last_error());
            break;
        }
        if (memcmp(result, w->expected, sizeof result) != 0) w->wrong++;
    }
    return NULL;
}

static int compare(const HalcyonModel *model) {
    static struct Work works[THREADS];
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        works[i] = (struct Work){.model = model, .number = i};
        if (run(model, i, works[i].expected) != HALCYON_STATUS_OK) {
            fprintf(stderr, "%s\n", halcyon_last_error());
            return 1;
        }
    }
    int failed = 0;
    size_t started = 0;
    while (started < THREADS && pthread_create(&threads[started], NULL, work, &works[started]) == 0)
        started++;
    for (size_t i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
        if (works[i].error[0] != '\0') fprintf(stderr, "thread %zu: %s\n", i, works[i].error);
        failed |= works[i].wrong > 0 || works[i].error[0] != '\0';
        printf("thread %zu: %d runs, %d differ\n", i, RUNS, works[i].wrong);
    }
    return failed || started < THREADS;
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: %s MODEL.onnx [DEVICE]\n", argv[0]);
        return 2;
    }
    HalcyonBackend *backend = NULL;
    HalcyonModel *model = NULL;
    int failed = 1;
    if (halcyon_backend_open(argc > 2 ? argv[2] : "auto", NULL, &backend) == HALCYON_STATUS_OK &&
        halcyon_model_open(backend, argv[1], &model) == HALCYON_STATUS_OK) {
        failed = compare(model);
    } else {
        fprintf(stderr, "%s\n", halcyon_last_error());
    }
    halcyon_model_free(model);
    halcyon_backend_free(backend);
    return failed;
}
