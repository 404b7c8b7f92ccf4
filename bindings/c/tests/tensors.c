/* Tensors. */

#include "check.h"

static void numbers(void) {
    const float values[6] = {1, 2, 3, 4, 5, 6};
    const int64_t dims[2] = {2, 3};
    HalcyonTensor *t = NULL;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 2, values, sizeof values, &t));
    CHECK(halcyon_tensor_dtype(t) == HALCYON_DTYPE_F32 && halcyon_tensor_rank(t) == 2);
    CHECK(halcyon_tensor_dims(t)[0] == 2 && halcyon_tensor_dims(t)[1] == 3);
    CHECK(halcyon_tensor_count(t) == 6 && halcyon_tensor_bytes(t) == sizeof values);
    const void *data = halcyon_tensor_data(t);
    CHECK(data != values && (uintptr_t)data % 16 == 0 && memcmp(data, values, sizeof values) == 0);
    CHECK(halcyon_tensor_string(t, 0, NULL) == NULL);
    SAYS("`tensor` holds f32");
    CHECK(halcyon_last_status() == HALCYON_STATUS_DTYPE);
    halcyon_tensor_free(t);

    /* A scalar, and a tensor without elements. */
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, NULL, 0, values, 4, &t));
    CHECK(halcyon_tensor_rank(t) == 0 && halcyon_tensor_count(t) == 1);
    halcyon_tensor_free(t);
    const int64_t empty[2] = {3, 0};
    OK(halcyon_tensor_new(HALCYON_DTYPE_I64, empty, 2, NULL, 0, &t));
    CHECK(halcyon_tensor_count(t) == 0 && halcyon_tensor_bytes(t) == 0 && halcyon_tensor_data(t) != NULL);
    halcyon_tensor_free(t);

    /* Elements of 4 bits: two in a byte. */
    const int64_t three = 3;
    const unsigned char packed[2] = {0x21, 0x03};
    OK(halcyon_tensor_new(HALCYON_DTYPE_U4, &three, 1, packed, 2, &t));
    CHECK(halcyon_tensor_count(t) == 3 && halcyon_tensor_bytes(t) == 2);
    halcyon_tensor_free(t);

    /* Data at an odd address is copied like any other. */
    unsigned char odd[9] = {0, 0, 0, 128, 63, 0, 0, 0, 64};
    const int64_t two = 2;
    OK(halcyon_tensor_new(HALCYON_DTYPE_F32, &two, 1, odd + 1, 8, &t));
    CHECK(((const float *)halcyon_tensor_data(t))[0] == 1.0f &&
          ((const float *)halcyon_tensor_data(t))[1] == 2.0f);
    halcyon_tensor_free(t);
    halcyon_tensor_free(NULL);
}

static void wrong_numbers(void) {
    const float values[6] = {0};
    const int64_t dims[2] = {2, 3}, negative[2] = {2, -3}, huge[2] = {INT64_MAX, INT64_MAX},
                  large = INT64_MAX;
    HalcyonTensor *t = NULL;
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 2, values, 20, &t), HALCYON_STATUS_SHAPE,
          "`bytes` is 20, but f32[2, 3] takes 24");
    CHECK(t == NULL);
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, negative, 2, values, 24, &t), HALCYON_STATUS_SHAPE,
          "the size of axis 1 is -3");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, huge, 2, values, 24, &t), HALCYON_STATUS_SHAPE,
          "larger than the address space");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, &large, 1, values, 24, &t), HALCYON_STATUS_SHAPE,
          "takes more than the address space");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_U8, &large, 1, values, (size_t)INT64_MAX + 1, &t),
          HALCYON_STATUS_SHAPE, "9223372036854775808");
    FAILS(halcyon_tensor_new(99, dims, 2, values, 24, &t), HALCYON_STATUS_DTYPE, "`dtype` is 99");
    SAYS("1 (f32)");
    FAILS(halcyon_tensor_new(0, dims, 2, values, 24, &t), HALCYON_STATUS_DTYPE, "`dtype` is 0");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_STRING, dims, 2, values, 24, &t), HALCYON_STATUS_DTYPE,
          "halcyon_tensor_from_strings");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, NULL, 2, values, 24, &t), HALCYON_STATUS_ARGUMENT,
          "`dims` is NULL");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, SIZE_MAX, values, 24, &t), HALCYON_STATUS_ARGUMENT,
          "more than the address space holds");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, (const int64_t *)((const char *)dims + 1), 1, values, 24, &t),
          HALCYON_STATUS_ARGUMENT, "`dims` is not aligned to 8 bytes");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 2, NULL, 24, &t), HALCYON_STATUS_ARGUMENT,
          "`data` is NULL");
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_F32, dims, 2, values, 24, NULL), HALCYON_STATUS_ARGUMENT,
          "`out` is NULL");
    const unsigned char bools[3] = {0, 1, 2};
    const int64_t three = 3;
    FAILS(halcyon_tensor_new(HALCYON_DTYPE_BOOL, &three, 1, bools, 3, &t), HALCYON_STATUS_ARGUMENT,
          "the value 2 at 2; a bool is 0 or 1");

    CHECK(halcyon_tensor_dtype(NULL) == HALCYON_DTYPE_NONE && halcyon_tensor_rank(NULL) == 0);
    CHECK(halcyon_tensor_dims(NULL) == NULL && halcyon_tensor_count(NULL) == 0);
    CHECK(halcyon_tensor_data(NULL) == NULL && halcyon_tensor_bytes(NULL) == 0);
    CHECK(halcyon_tensor_string(NULL, 0, NULL) == NULL);
    SAYS("`tensor` is NULL");
}

static void strings(void) {
    const char *texts[4] = {"one", "", "drei \xc3\xa4", "4"};
    const int64_t dims[2] = {2, 2};
    HalcyonTensor *t = NULL;
    OK(halcyon_tensor_from_strings(dims, 2, texts, 4, &t));
    CHECK(halcyon_tensor_dtype(t) == HALCYON_DTYPE_STRING && halcyon_tensor_count(t) == 4);
    for (size_t i = 0; i < 4; i++) {
        size_t length = 99;
        CHECK(strcmp(halcyon_tensor_string(t, i, &length), texts[i]) == 0 && length == strlen(texts[i]));
    }
    CHECK(strcmp(halcyon_tensor_string(t, 0, NULL), "one") == 0);
    CHECK(halcyon_tensor_string(t, 4, NULL) == NULL);
    SAYS("`index` is 4, and the tensor has 4 strings");
    CHECK(halcyon_tensor_data(t) == NULL && halcyon_tensor_bytes(t) == 0);
    SAYS("`tensor` holds text");
    halcyon_tensor_free(t);

    FAILS(halcyon_tensor_from_strings(dims, 2, texts, 3, &t), HALCYON_STATUS_SHAPE, "`count` is 3");
    CHECK(t == NULL);
    texts[2] = "\xff";
    FAILS(halcyon_tensor_from_strings(dims, 2, texts, 4, &t), HALCYON_STATUS_ARGUMENT,
          "`strings[2]` is not UTF-8");
    texts[1] = NULL;
    FAILS(halcyon_tensor_from_strings(dims, 2, texts, 4, &t), HALCYON_STATUS_ARGUMENT,
          "`strings[1]` is NULL");
    FAILS(halcyon_tensor_from_strings(dims, 2, NULL, 4, &t), HALCYON_STATUS_ARGUMENT, "`strings` is NULL");
    FAILS(halcyon_tensor_from_strings(NULL, 2, texts, 4, &t), HALCYON_STATUS_ARGUMENT, "`dims` is NULL");
    FAILS(halcyon_tensor_from_strings(dims, 2, texts, 4, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
}

int main(void) {
    numbers();
    wrong_numbers();
    strings();
    puts("done");
    return 0;
}
