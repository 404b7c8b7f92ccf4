/* Models: `models DIGITS.onnx FOLDER_OF_TEST_MODELS`. */

#include "check.h"

#include <math.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

enum { CLASSES = 10 };

/* What onnxruntime computes for an image in which every pixel is 0.5. */
static const float GREY[CLASSES] = {
    6.7541659e-02f, 9.1201401e-01f, 3.0152421e-05f, 1.4421762e-07f, 3.4628098e-05f,
    1.8790950e-05f, 9.4388222e-04f, 5.3220185e-07f, 1.9193532e-02f, 2.2262952e-04f,
};

static HalcyonBackend *backend = NULL;
static const char *digits = NULL;
static const char *folder = NULL;

static HalcyonModel *open_model(const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s.onnx", folder, name);
    HalcyonModel *model = NULL;
    OK(halcyon_model_open(backend, path, &model));
    return model;
}

static HalcyonTensor *grey(int64_t batch) {
    static float pixels[4 * 64];
    for (size_t i = 0; i < 4 * 64; i++) pixels[i] = 0.5f;
    const int64_t dims[4] = {batch, 1, 8, 8};
    HalcyonTensor *t = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 4, pixels, (size_t)batch * 64 * sizeof *pixels, &t));
    return t;
}

static void close_to_grey(const HalcyonTensor *t, int64_t batch) {
    CHECK(halcyon_tensor_dtype(t) == HALCYON_DTYPE_F32 && halcyon_tensor_rank(t) == 2);
    CHECK(halcyon_tensor_dims(t)[0] == batch && halcyon_tensor_dims(t)[1] == CLASSES);
    const float *p = (const float *)halcyon_tensor_data(t);
    CHECK((uintptr_t)p % 16 == 0);
    for (size_t i = 0; i < halcyon_tensor_count(t); i++) CHECK(fabsf(p[i] - GREY[i % CLASSES]) < 1e-5f);
}

static void ports(const HalcyonModel *m) {
    CHECK(halcyon_model_input_count(m) == 1 && halcyon_model_output_count(m) == 1);
    const HalcyonPort *in = halcyon_model_input(m, 0), *out = halcyon_model_output(m, 0);
    CHECK(strcmp(halcyon_port_name(in), "image") == 0 &&
          strcmp(halcyon_port_name(out), "probabilities") == 0);
    CHECK(strcmp(halcyon_port_description(in), "f32[batch, 1, 8, 8]") == 0);
    CHECK(halcyon_port_kind(in) == HALCYON_PORT_KIND_TENSOR && halcyon_port_dtype(in) == HALCYON_DTYPE_F32);
    CHECK(halcyon_port_rank(in) == 4 && halcyon_port_dim(in, 0) == -1 && halcyon_port_dim(in, 3) == 8);
    CHECK(strcmp(halcyon_port_dim_name(in, 0), "batch") == 0 &&
          strcmp(halcyon_port_dim_name(in, 1), "1") == 0);
    CHECK(halcyon_port_dim_name(in, 4) == NULL);
    SAYS("`axis` is 4, and \"image\" has 4 known dimensions");
    CHECK(halcyon_port_dim(in, 4) == -1);
    CHECK(halcyon_port_rank(out) == 2 && halcyon_port_dim(out, 1) == CLASSES);
    CHECK(halcyon_model_input(m, 1) == NULL);
    SAYS("`index` is 1, and the model has 1 inputs");
    CHECK(halcyon_model_output(m, SIZE_MAX) == NULL);
    CHECK(halcyon_port_name(NULL) == NULL && halcyon_port_description(NULL) == NULL);
    CHECK(halcyon_port_kind(NULL) == HALCYON_PORT_KIND_NONE &&
          halcyon_port_dtype(NULL) == HALCYON_DTYPE_NONE);
    CHECK(halcyon_port_rank(NULL) == -1 && halcyon_port_dim(NULL, 0) == -1 &&
          halcyon_port_dim_name(NULL, 0) == NULL);
    SAYS("`port` is NULL");
}

static void runs(const HalcyonModel *m) {
    const char *name = "image";
    for (int64_t batch = 1; batch <= 4; batch += 3) {
        HalcyonTensor *image = grey(batch), *out = NULL;
        const HalcyonTensor *const inputs[1] = {image};
        OK(halcyon_model_run(m, &name, inputs, 1, &out, 1));
        close_to_grey(out, batch);
        halcyon_tensor_free(out);
        OK(halcyon_model_run(m, NULL, inputs, 1, &out, 1));
        /* The result is the caller's: the inputs may be gone. */
        halcyon_tensor_free(image);
        close_to_grey(out, batch);
        halcyon_tensor_free(out);
    }
}

static void wrong_inputs(const HalcyonModel *m) {
    const char *names[2] = {"image", "image"};
    HalcyonTensor *image = grey(1), *out = image;
    const HalcyonTensor *inputs[2] = {image, image};
    FAILS(halcyon_model_run(m, names, inputs, 2, &out, 1), HALCYON_STATUS_ARGUMENT,
          "\"image\" is given twice");
    CHECK(out == NULL);
    FAILS(halcyon_model_run(m, names, inputs, 0, &out, 1), HALCYON_STATUS_ARGUMENT, "\"image\" is missing");
    FAILS(halcyon_model_run(m, NULL, inputs, 2, &out, 1), HALCYON_STATUS_ARGUMENT, "2 inputs were given");
    FAILS(halcyon_model_run(m, NULL, NULL, 0, &out, 1), HALCYON_STATUS_ARGUMENT, "0 inputs were given");
    names[0] = "picture";
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 1), HALCYON_STATUS_ARGUMENT,
          "no input \"picture\"; the inputs of the model are: \"image\" (f32[batch, 1, 8, 8])");
    names[0] = NULL;
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 1), HALCYON_STATUS_ARGUMENT, "`names[0]` is NULL");
    names[0] = "image";
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 0), HALCYON_STATUS_ARGUMENT,
          "`output_count` is 0, and the model has 1 outputs: \"probabilities\"");
    HalcyonTensor *two[2] = {image, image};
    FAILS(halcyon_model_run(m, names, inputs, 1, two, 2), HALCYON_STATUS_ARGUMENT, "`output_count` is 2");
    CHECK(two[0] == NULL && two[1] == NULL);
    FAILS(halcyon_model_run(m, names, inputs, 1, NULL, 1), HALCYON_STATUS_ARGUMENT, "`outputs` is NULL");
    FAILS(halcyon_model_run(m, names, NULL, 1, &out, 1), HALCYON_STATUS_ARGUMENT, "`inputs` is NULL");
    FAILS(halcyon_model_run(NULL, names, inputs, 1, &out, 1), HALCYON_STATUS_ARGUMENT, "`model` is NULL");
    FAILS(halcyon_model_run(m, names, inputs, SIZE_MAX, &out, 1), HALCYON_STATUS_ARGUMENT,
          "`inputs` has 18446744073709551615");
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, SIZE_MAX), HALCYON_STATUS_ARGUMENT,
          "`outputs` has 18446744073709551615");
    inputs[0] = NULL;
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 1), HALCYON_STATUS_ARGUMENT, "`inputs[0]` is NULL");

    const int64_t dims[4] = {1, 1, 8, 9}, flat[1] = {64};
    double pixels[72] = {0};
    HalcyonTensor *wrong = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F64, dims, 4, pixels, sizeof pixels, &wrong));
    inputs[0] = wrong;
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 1), HALCYON_STATUS_DTYPE,
          "input \"image\": the model takes f32[batch, 1, 8, 8], not f64[1, 1, 8, 9]");
    halcyon_tensor_free(wrong);
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 4, pixels, sizeof pixels / 2, &wrong));
    inputs[0] = wrong;
    FAILS(halcyon_model_run(m, names, inputs, 1, &out, 1), HALCYON_STATUS_SHAPE,
          "input \"image\": the model takes f32[batch, 1, 8, 8], not f32[1, 1, 8, 9]");
    halcyon_tensor_free(wrong);
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, flat, 1, pixels, 256, &wrong));
    FAILS(halcyon_model_run(m, NULL, (const HalcyonTensor *const[]){wrong}, 1, &out, 1), HALCYON_STATUS_SHAPE,
          "input \"image\": the model takes f32[batch, 1, 8, 8], not f32[64]");
    halcyon_tensor_free(wrong);
    halcyon_tensor_free(image);
}

static void fits(const HalcyonModel *m) {
    const char *name = "image";
    HalcyonTensor *image = grey(4);
    const HalcyonTensor *const inputs[1] = {image};
    HalcyonFit fit;
    OK(halcyon_model_fit(m, &name, inputs, 1, &fit));
    CHECK(fit.fits && fit.free != HALCYON_UNKNOWN && fit.inputs >= 4 * 64 * 4 &&
          fit.outputs >= 4 * CLASSES * 4);
    CHECK(fit.device ==
          fit.weights + fit.packed_weights + fit.activations + fit.workspace + fit.inputs + fit.outputs);
    FAILS(halcyon_model_fit(m, &name, inputs, 1, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    FAILS(halcyon_model_fit(NULL, &name, inputs, 1, &fit), HALCYON_STATUS_ARGUMENT, "`model` is NULL");
    name = "x";
    FAILS(halcyon_model_fit(m, &name, inputs, 1, &fit), HALCYON_STATUS_ARGUMENT, "no input \"x\"");

    /* With too little memory the prediction and the run agree. */
    const uint64_t need = fit.device;
    HalcyonOptions *options = NULL;
    HalcyonBackend *small = NULL;
    HalcyonModel *limited = NULL;
    HalcyonTensor *out = NULL;
    OK(halcyon_options_new(&options));
    OK(halcyon_options_set_memory_limit(options, 1000));
    OK(halcyon_backend_open("cpu", options, &small));
    OK(halcyon_model_open(small, digits, &limited));
    OK(halcyon_model_fit(limited, NULL, inputs, 1, &fit));
    CHECK(!fit.fits && fit.free <= 1000 && fit.device >= need / 2);
    FAILS(halcyon_model_run(limited, NULL, inputs, 1, &out, 1), HALCYON_STATUS_OUT_OF_MEMORY,
          "out of memory on cpu:0");
    CHECK(out == NULL);
    halcyon_model_free(limited);
    halcyon_backend_free(small);
    halcyon_options_free(options);
    halcyon_tensor_free(image);
}

static void files(void) {
    HalcyonModel *m = NULL;
    FAILS(halcyon_model_open(backend, "nowhere/at-all.onnx", &m), HALCYON_STATUS_IO, "nowhere/at-all.onnx");
    CHECK(m == NULL);
    FAILS(halcyon_model_open(backend, NULL, &m), HALCYON_STATUS_ARGUMENT, "`path` is NULL");
    FAILS(halcyon_model_open(NULL, digits, &m), HALCYON_STATUS_ARGUMENT, "`backend` is NULL");
    FAILS(halcyon_model_open(backend, digits, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    FAILS(halcyon_model_open(backend, folder, &m), HALCYON_STATUS_IO, folder);
    char path[4096];
    snprintf(path, sizeof path, "%s/unknown.onnx", folder);
    FAILS(halcyon_model_open(backend, path, &m), HALCYON_STATUS_UNSUPPORTED, "Frobnicate");

    size_t bytes = 0;
    unsigned char *data = read_file(digits, &bytes);
    OK(halcyon_model_from_bytes(backend, data, bytes, &m));
    ports(m);
    /* The bytes were copied. */
    memset(data, 0, bytes);
    runs(m);
    halcyon_model_free(m);
    free(data);
    data = read_file(digits, &bytes);
    for (size_t part = 1; part < 8; part++) {
        /* A part in memory of its own size, so that reading beyond it is found. */
        unsigned char *copy = (unsigned char *)malloc(bytes * part / 8);
        CHECK(copy != NULL);
        memcpy(copy, data, bytes * part / 8);
        FAILS(halcyon_model_from_bytes(backend, copy, bytes * part / 8, &m), HALCYON_STATUS_FORMAT,
              "the model in memory");
        CHECK(m == NULL);
        free(copy);
    }
    free(data);
    FAILS(halcyon_model_from_bytes(backend, "no model", 8, &m), HALCYON_STATUS_FORMAT, "the model in memory");
    FAILS(halcyon_model_from_bytes(backend, NULL, 0, &m), HALCYON_STATUS_FORMAT, "the model in memory");
    FAILS(halcyon_model_from_bytes(backend, NULL, 8, &m), HALCYON_STATUS_ARGUMENT, "`data` is NULL");
    FAILS(halcyon_model_from_bytes(NULL, "x", 1, &m), HALCYON_STATUS_ARGUMENT, "`backend` is NULL");
    FAILS(halcyon_model_from_bytes(backend, "x", 1, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    FAILS(halcyon_model_from_bytes(backend, "x", SIZE_MAX, &m), HALCYON_STATUS_ARGUMENT, "address space");
    CHECK(halcyon_model_input_count(NULL) == 0 && halcyon_model_output_count(NULL) == 0);
    CHECK(halcyon_model_input(NULL, 0) == NULL && halcyon_model_output(NULL, 0) == NULL);
    halcyon_model_free(NULL);
}

static void text(void) {
    HalcyonModel *m = open_model("text");
    CHECK(halcyon_port_dtype(halcyon_model_input(m, 0)) == HALCYON_DTYPE_STRING);
    CHECK(strcmp(halcyon_port_description(halcyon_model_output(m, 0)), "string[n]") == 0);
    const char *left[2] = {"under", "over"}, *right[2] = {"stand", "\xe2\x82\xac"};
    const int64_t n = 2;
    HalcyonTensor *a = NULL, *b = NULL, *out = NULL;
    OK(halcyon_tensor_from_strings(&n, 1, left, 2, &a));
    OK(halcyon_tensor_from_strings(&n, 1, right, 2, &b));
    const char *names[2] = {"b", "a"};
    OK(halcyon_model_run(m, names, (const HalcyonTensor *const[]){b, a}, 2, &out, 1));
    size_t length = 0;
    CHECK(strcmp(halcyon_tensor_string(out, 0, NULL), "understand") == 0);
    CHECK(strcmp(halcyon_tensor_string(out, 1, &length), "over\xe2\x82\xac") == 0 && length == 7);
    halcyon_tensor_free(out);
    HalcyonTensor *number = grey(1);
    FAILS(halcyon_model_run(m, NULL, (const HalcyonTensor *const[]){a, number}, 2, &out, 1),
          HALCYON_STATUS_DTYPE, "input \"b\": the model takes string[n], not f32[1, 1, 8, 8]");
    halcyon_tensor_free(number);
    halcyon_tensor_free(a);
    halcyon_tensor_free(b);
    halcyon_model_free(m);
}

/* Sizes of inputs with the same symbol may differ, but not where an operator needs them to be equal. */
static void symbols(void) {
    HalcyonModel *m = open_model("pair");
    const float values[3] = {1, 2, 3};
    const int64_t two = 2, three = 3;
    HalcyonTensor *x = NULL, *y = NULL, *out = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, &two, 1, values, 8, &x));
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, &three, 1, values, 12, &y));
    OK(halcyon_model_run(m, NULL, (const HalcyonTensor *const[]){x, x}, 2, &out, 1));
    CHECK(((const float *)halcyon_tensor_data(out))[1] == 4.0f);
    halcyon_tensor_free(out);
    FAILS(halcyon_model_run(m, NULL, (const HalcyonTensor *const[]){x, y}, 2, &out, 1),
          HALCYON_STATUS_ARGUMENT,
          "input 'y': the model takes f32[n], and [3] is given: n is 3 here and 2 elsewhere");
    CHECK(out == NULL);
    halcyon_tensor_free(x);
    halcyon_tensor_free(y);
    halcyon_model_free(m);
}

/* Outputs without a declared type, which only a run knows. */
static void untyped(void) {
    HalcyonModel *m = open_model("untyped");
    CHECK(halcyon_model_output_count(m) == 3);
    const char *names[3] = {"y", "at", "size"};
    for (size_t i = 0; i < 3; i++) {
        CHECK(strcmp(halcyon_port_name(halcyon_model_output(m, i)), names[i]) == 0);
    }
    for (size_t i = 0; i < 2; i++) {
        const HalcyonPort *port = halcyon_model_output(m, i);
        CHECK(halcyon_port_kind(port) == HALCYON_PORT_KIND_UNKNOWN);
        CHECK(halcyon_port_dtype(port) == HALCYON_DTYPE_NONE && halcyon_port_rank(port) == -1);
        CHECK(strcmp(halcyon_port_description(port), "unknown before a run") == 0);
        CHECK(halcyon_port_dim(port, 0) == -1 && halcyon_port_dim_name(port, 0) == NULL);
    }
    CHECK(strcmp(halcyon_port_description(halcyon_model_output(m, 2)), "i64[2]") == 0);

    const float values[6] = {1, 0, 3, 0, 0, 6};
    const int64_t six = 6, two = 2, shape[2] = {2, 3};
    HalcyonTensor *x = NULL, *s = NULL, *out[3] = {NULL, NULL, NULL};
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, &six, 1, values, sizeof values, &x));
    OK(halcyon_tensor_new(HALCYON_DTYPE_I64, &two, 1, shape, sizeof shape, &s));
    OK(halcyon_model_run(m, NULL, (const HalcyonTensor *const[]){x, s}, 2, out, 3));
    CHECK(halcyon_tensor_rank(out[0]) == 2 && halcyon_tensor_dims(out[0])[1] == 3);
    CHECK(halcyon_tensor_dtype(out[1]) == HALCYON_DTYPE_I64 && halcyon_tensor_dims(out[1])[1] == 3);
    CHECK(((const int64_t *)halcyon_tensor_data(out[1]))[5] == 2);
    for (size_t i = 0; i < 3; i++) halcyon_tensor_free(out[i]);
    halcyon_tensor_free(x);
    halcyon_tensor_free(s);
    halcyon_model_free(m);
}

/* Models that use what the C library lacks, or that read wrong values. */
static void limits(void) {
    const float x[2] = {1, 0};
    const int64_t two = 2;
    HalcyonTensor *floats = NULL, *out = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, &two, 1, x, sizeof x, &floats));
    const HalcyonTensor *inputs[1] = {floats};

    HalcyonModel *m = open_model("sequence");
    const HalcyonPort *both = halcyon_model_output(m, 0);
    CHECK(halcyon_port_kind(both) == HALCYON_PORT_KIND_SEQUENCE &&
          halcyon_port_dtype(both) == HALCYON_DTYPE_NONE);
    CHECK(halcyon_port_rank(both) == -1);
    FAILS(halcyon_model_run(m, NULL, inputs, 1, &out, 1), HALCYON_STATUS_UNSUPPORTED,
          "the output \"both\", a sequence of 2, as a tensor");
    CHECK(out == NULL);
    halcyon_model_free(m);

    /* The sizes of the result are only known when it runs, and the rank of the input is open. */
    m = open_model("nonzero");
    CHECK(halcyon_port_rank(halcyon_model_input(m, 0)) == -1);
    OK(halcyon_model_run(m, NULL, inputs, 1, &out, 1));
    CHECK(halcyon_tensor_dims(out)[0] == 1 && ((const int64_t *)halcyon_tensor_data(out))[0] == 0);
    halcyon_tensor_free(out);
    HalcyonFit fit;
    FAILS(halcyon_model_fit(m, NULL, inputs, 1, &fit), HALCYON_STATUS_UNSUPPORTED, "runs in stages");
    halcyon_model_free(m);
    halcyon_tensor_free(floats);

    m = open_model("rows");
    const int64_t ids[3] = {0, 3, 99}, three = 3;
    HalcyonTensor *index = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_I64, &three, 1, ids, sizeof ids, &index));
    inputs[0] = index;
    FAILS(halcyon_model_run(m, NULL, inputs, 1, &out, 1), HALCYON_STATUS_INDEX, "input 'ids' is 99 at [2]");
    halcyon_tensor_free(index);
    OK(halcyon_tensor_new(HALCYON_DTYPE_I64, &two, 1, ids, 16, &index));
    inputs[0] = index;
    OK(halcyon_model_run(m, NULL, inputs, 1, &out, 1));
    CHECK(((const float *)halcyon_tensor_data(out))[3] == 9.0f);
    halcyon_tensor_free(out);
    halcyon_tensor_free(index);
    halcyon_model_free(m);

    m = open_model("constants");
    const unsigned char bools[3] = {1, 0, 1};
    HalcyonTensor *flags = NULL, *outs[2] = {NULL, NULL};
    OK(halcyon_tensor_new(HALCYON_DTYPE_BOOL, &three, 1, bools, 3, &flags));
    inputs[0] = flags;
    OK(halcyon_model_run(m, NULL, inputs, 1, outs, 2));
    CHECK((uintptr_t)halcyon_tensor_data(outs[0]) % 16 == 0 &&
          ((const float *)halcyon_tensor_data(outs[0]))[2] == 3);
    CHECK(memcmp(halcyon_tensor_data(outs[1]), bools, 3) == 0);
    halcyon_tensor_free(outs[0]);
    halcyon_tensor_free(outs[1]);
    halcyon_tensor_free(flags);
    halcyon_model_free(m);
}

/* The bytes that are allocated; 0 if the system does not say, as under AddressSanitizer. */
static size_t allocated(void) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
    return mallinfo2().uordblks;
#else
    return 0;
#endif
}

/* Whatever a program does again and again, it gets its memory back. */
static void repeats(void) {
    size_t before = 0;
    for (int i = 0; i < 200; i++) {
        if (i == 50) before = allocated();
        HalcyonModel *m = NULL;
        OK(halcyon_model_open(backend, digits, &m));
        HalcyonTensor *image = grey(1), *out = NULL;
        const HalcyonTensor *const inputs[1] = {image};
        OK(halcyon_model_run(m, NULL, inputs, 1, &out, 1));
        halcyon_tensor_free(out);
        FAILS(halcyon_model_run(m, NULL, inputs, 0, &out, 1), HALCYON_STATUS_ARGUMENT, "0 inputs");
        halcyon_tensor_free(image);
        halcyon_model_free(m);
    }
    const size_t after = allocated();
    if (after > before + (32 << 10)) {
        fprintf(stderr, "%zu bytes after 50 rounds, %zu after 200\n", before, after);
        exit(1);
    }
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    digits = argv[1];
    folder = argv[2];
    OK(halcyon_backend_open("cpu", NULL, &backend));
    HalcyonModel *m = NULL;
    OK(halcyon_model_open(backend, digits, &m));
    ports(m);
    runs(m);
    wrong_inputs(m);
    /* The model works on after errors. */
    runs(m);
    fits(m);
    files();
    text();
    symbols();
    untyped();
    limits();
    repeats();
    /* A model outlives its backend. */
    halcyon_backend_free(backend);
    runs(m);
    halcyon_model_free(m);
    puts("done");
    return 0;
}
