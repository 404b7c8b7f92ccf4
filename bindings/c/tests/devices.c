/* Versions, statuses, devices, options and backends. */

#include "check.h"

#include <dirent.h>
#include <pthread.h>

static void versions(void) {
    CHECK(halcyon_abi_version() == HALCYON_ABI_VERSION);
    CHECK(strlen(halcyon_version()) >= 5 && strchr(halcyon_version(), '.') != NULL);
    CHECK(strcmp(halcyon_last_error(), "") == 0 && halcyon_last_status() == HALCYON_STATUS_OK);
    CHECK(strcmp(halcyon_status_name(HALCYON_STATUS_OK), "ok") == 0);
    for (int32_t s = HALCYON_STATUS_OK; s <= HALCYON_STATUS_INTERNAL; s++) {
        CHECK(strcmp(halcyon_status_name(s), "unknown status") != 0);
    }
    CHECK(strcmp(halcyon_status_name(HALCYON_STATUS_INTERNAL + 1), "unknown status") == 0);
    CHECK(strcmp(halcyon_status_name(-1), "unknown status") == 0);
}

static void dtypes(void) {
    CHECK(strcmp(halcyon_dtype_name(HALCYON_DTYPE_F32), "f32") == 0);
    CHECK(strcmp(halcyon_dtype_name(HALCYON_DTYPE_STRING), "string") == 0);
    CHECK(strcmp(halcyon_dtype_name(14), "unknown") == 0 && strcmp(halcyon_dtype_name(-3), "unknown") == 0);
    CHECK(halcyon_dtype_bits(HALCYON_DTYPE_F32) == 32 && halcyon_dtype_bits(HALCYON_DTYPE_U4) == 4);
    CHECK(halcyon_dtype_bits(HALCYON_DTYPE_STRING) == 0 && halcyon_dtype_bits(14) == 0);
    /* The numbers and the names belong together: the first number in a name is its bits. */
    for (int32_t d = HALCYON_DTYPE_F32; d <= HALCYON_DTYPE_I2; d++) {
        const char *name = halcyon_dtype_name(d);
        const size_t bits = halcyon_dtype_bits(d);
        const int known = strcmp(name, "unknown") != 0 && d != HALCYON_DTYPE_STRING;
        CHECK(known == (bits != 0));
        if (known && d != HALCYON_DTYPE_BOOL) {
            const char *digits = name + strcspn(name, "0123456789");
            CHECK((size_t)strtoul(digits, NULL, 10) == bits);
        }
    }
}

static void devices(void) {
    HalcyonDevices *all = NULL;
    OK(halcyon_devices_find(&all));
    const size_t count = halcyon_devices_count(all);
    CHECK(count >= 1);
    int cpu = 0;
    for (size_t i = 0; i < count; i++) {
        const HalcyonDevice *d = halcyon_devices_get(all, i);
        CHECK(d != NULL && strchr(halcyon_device_id(d), ':') != NULL && *halcyon_device_name(d) != '\0');
        CHECK(halcyon_device_vendor(d) != NULL);
        CHECK(strncmp(halcyon_device_id(d), halcyon_device_backend(d), strlen(halcyon_device_backend(d))) ==
              0);
        if (strcmp(halcyon_device_id(d), "cpu:0") == 0) {
            cpu = 1;
            CHECK(strcmp(halcyon_device_backend(d), "cpu") == 0 && !halcyon_device_is_software(d));
            CHECK(halcyon_device_total_memory(d) > (UINT64_C(1) << 28));
            CHECK(halcyon_device_total_memory(d) != HALCYON_UNKNOWN);
            CHECK(halcyon_device_free_memory(d) <= halcyon_device_total_memory(d));
        }
    }
    CHECK(cpu);
    CHECK(halcyon_devices_get(all, count) == NULL);
    SAYS("`index` is");
    /* TPUs are never available, so a backend with its reason is always there. */
    const char *json = halcyon_devices_json(all);
    CHECK(json[0] == '[' && strstr(json, "\"tpu\"") != NULL && strstr(json, "\"reason\":\"") != NULL);
    halcyon_devices_free(all);

    FAILS(halcyon_devices_find(NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    CHECK(halcyon_devices_count(NULL) == 0 && halcyon_devices_get(NULL, 0) == NULL);
    CHECK(halcyon_devices_json(NULL) == NULL && halcyon_device_id(NULL) == NULL);
    CHECK(halcyon_device_name(NULL) == NULL && halcyon_device_vendor(NULL) == NULL);
    CHECK(halcyon_device_backend(NULL) == NULL && !halcyon_device_is_software(NULL));
    CHECK(halcyon_device_total_memory(NULL) == HALCYON_UNKNOWN);
    CHECK(halcyon_device_free_memory(NULL) == HALCYON_UNKNOWN);
    SAYS("`device` is NULL");
    halcyon_devices_free(NULL);
}

/* The number of threads of this process. */
static size_t threads(void) {
    DIR *folder = opendir("/proc/self/task");
    CHECK(folder != NULL);
    size_t n = 0;
    for (const struct dirent *entry = readdir(folder); entry != NULL; entry = readdir(folder)) {
        n += entry->d_name[0] != '.';
    }
    closedir(folder);
    return n;
}

static HalcyonBackend *with_threads(size_t n) {
    HalcyonOptions *options = NULL;
    HalcyonBackend *backend = NULL;
    OK(halcyon_options_new(&options));
    OK(halcyon_options_set_threads(options, n));
    OK(halcyon_backend_open("cpu", options, &backend));
    halcyon_options_free(options);
    return backend;
}

static void options(void) {
    HalcyonOptions *options = NULL;
    HalcyonBackend *backend = NULL;
    OK(halcyon_options_new(&options));
    OK(halcyon_options_set_level(options, "O0"));
    OK(halcyon_options_set_precision(options, "f32"));
    OK(halcyon_backend_open("cpu", options, &backend));
    CHECK(strcmp(halcyon_backend_level(backend), "O0") == 0);
    CHECK(strcmp(halcyon_backend_warnings(backend), "") == 0);
    halcyon_backend_free(backend);

    /* An option that has no effect is reported. */
    OK(halcyon_options_set_precision(options, "bf16"));
    OK(halcyon_backend_open("cpu", options, &backend));
    CHECK(strstr(halcyon_backend_warnings(backend), "it needs level O2, and the level is O0") != NULL);
    halcyon_backend_free(backend);

    FAILS(halcyon_options_set_level(options, "O9"), HALCYON_STATUS_ARGUMENT, "\"O9\" is not a level; use O0");
    FAILS(halcyon_options_set_level(options, NULL), HALCYON_STATUS_ARGUMENT, "`level` is NULL");
    FAILS(halcyon_options_set_precision(options, "f8"), HALCYON_STATUS_ARGUMENT, "\"f8\" is not a precision");
    FAILS(halcyon_options_set_precision(options, "\xff"), HALCYON_STATUS_ARGUMENT,
          "`precision` is not UTF-8");
    FAILS(halcyon_options_set_threads(NULL, 1), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_options_set_level(NULL, "O1"), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_options_set_precision(NULL, "f32"), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_options_set_memory_limit(NULL, 1), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_options_set_memory_needed(NULL, 1), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_options_new(NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");

    OK(halcyon_options_set_threads(options, 0));
    backend = (HalcyonBackend *)options;
    FAILS(halcyon_backend_open("cpu", options, &backend), HALCYON_STATUS_ARGUMENT, "threads: at least one");
    CHECK(backend == NULL);
    OK(halcyon_options_set_threads(options, 1));
    OK(halcyon_options_set_memory_needed(options, UINT64_C(1) << 60));
    FAILS(halcyon_backend_open("cpu", options, &backend), HALCYON_STATUS_OUT_OF_MEMORY,
          "1152921504606846976");
    halcyon_options_free(options);
    halcyon_options_free(NULL);

    /* The calling thread is one of them. */
    const size_t before = threads();
    HalcyonBackend *one = with_threads(1);
    const size_t alone = threads();
    HalcyonBackend *four = with_threads(4);
    CHECK(threads() >= alone + 3);
    CHECK(alone <= before + 1);
    halcyon_backend_free(one);
    halcyon_backend_free(four);
}

static void backends(void) {
    HalcyonBackend *backend = NULL;
    OK(halcyon_backend_open("cpu:0", NULL, &backend));
    CHECK(strcmp(halcyon_backend_id(backend), "cpu:0") == 0);
    CHECK(strcmp(halcyon_backend_level(backend), "O2") == 0);
    CHECK(strstr(halcyon_backend_report(backend), "cpu was requested") != NULL);
    halcyon_backend_free(backend);

    OK(halcyon_backend_open("auto", NULL, &backend));
    CHECK(strstr(halcyon_backend_report(backend), halcyon_backend_id(backend)) != NULL);
    CHECK(strstr(halcyon_backend_report(backend), "\n  not ") != NULL);
    halcyon_backend_free(backend);
    halcyon_backend_free(NULL);

    FAILS(halcyon_backend_open("abacus", NULL, &backend), HALCYON_STATUS_ARGUMENT, "abacus");
    CHECK(backend == NULL);
    FAILS(halcyon_backend_open("cpu:7", NULL, &backend), HALCYON_STATUS_UNAVAILABLE, "cpu");
    FAILS(halcyon_backend_open("tpu", NULL, &backend), HALCYON_STATUS_UNAVAILABLE, "tpu");
    FAILS(halcyon_backend_open(NULL, NULL, &backend), HALCYON_STATUS_ARGUMENT, "`name` is NULL");
    FAILS(halcyon_backend_open("cpu", NULL, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    FAILS(halcyon_backend_open("c\xc3(", NULL, &backend), HALCYON_STATUS_ARGUMENT,
          "`name` is not UTF-8: the byte at 1 is wrong");
    CHECK(halcyon_backend_id(NULL) == NULL && halcyon_backend_level(NULL) == NULL);
    CHECK(halcyon_backend_report(NULL) == NULL && halcyon_backend_warnings(NULL) == NULL);
    SAYS("`backend` is NULL");
}

/* The text of a failure belongs to the thread. */
static void *fails_elsewhere(void *unused) {
    (void)unused;
    CHECK(strcmp(halcyon_last_error(), "") == 0);
    HalcyonBackend *backend = NULL;
    FAILS(halcyon_backend_open("elsewhere", NULL, &backend), HALCYON_STATUS_ARGUMENT, "elsewhere");
    return NULL;
}

static void errors(void) {
    HalcyonBackend *backend = NULL;
    FAILS(halcyon_backend_open("here", NULL, &backend), HALCYON_STATUS_ARGUMENT, "here");
    pthread_t thread;
    CHECK(halcyon_last_status() == HALCYON_STATUS_ARGUMENT);
    CHECK(pthread_create(&thread, NULL, fails_elsewhere, NULL) == 0 && pthread_join(thread, NULL) == 0);
    SAYS("\"here\"");
    /* A success leaves it as it is. */
    OK(halcyon_backend_open("cpu", NULL, &backend));
    SAYS("\"here\"");
    halcyon_backend_free(backend);
}

int main(void) {
    versions();
    dtypes();
    devices();
    options();
    backends();
    errors();
    puts("done");
    return 0;
}
