/* Checks of the test programs. A check that fails prints its place and ends the program. */

#ifndef CHECK_H
#define CHECK_H

#include "halcyon.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, \
                    halcyon_last_error());                                                   \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

/* The call succeeds. */
#define OK(call) CHECK((call) == HALCYON_STATUS_OK)

/* The last error contains this text. */
static inline void says(const char *part, const char *file, int line) {
    if (strstr(halcyon_last_error(), part) == NULL) {
        fprintf(stderr, "%s:%d: the error does not contain \"%s\": %s\n", file, line, part,
                halcyon_last_error());
        exit(1);
    }
}

#define SAYS(part) says(part, __FILE__, __LINE__)

/* The call fails with this status, and its error contains this text. */
#define FAILS(call, status, part)                                                                        \
    do {                                                                                                 \
        const HalcyonStatus made = (call);                                                               \
        if (made != (status)) {                                                                          \
            fprintf(stderr, "%s:%d: %s: status %d, expected %s\n  last error: %s\n", __FILE__, __LINE__, \
                    #call, (int)made, #status, halcyon_last_error());                                    \
            exit(1);                                                                                     \
        }                                                                                                \
        says(part, __FILE__, __LINE__);                                                                  \
    } while (0)

/* Reads a file whole. The caller frees the memory. */
static inline unsigned char *read_file(const char *path, size_t *bytes) {
    FILE *file = fopen(path, "rb");
    CHECK(file != NULL);
    CHECK(fseek(file, 0, SEEK_END) == 0);
    const long end = ftell(file);
    CHECK(end > 0 && fseek(file, 0, SEEK_SET) == 0);
    *bytes = (size_t)end;
    unsigned char *data = (unsigned char *)malloc(*bytes);
    CHECK(data != NULL && fread(data, 1, *bytes, file) == *bytes);
    fclose(file);
    return data;
}

#endif /* CHECK_H */
