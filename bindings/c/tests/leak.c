/* Loses tensors. The search for leaks must find them: otherwise it says nothing about the other programs. */

#include "check.h"

static void lose(void) {
    for (int i = 0; i < 10; i++) {
        const float one = 1;
        HalcyonTensor *t = NULL;
        OK(halcyon_tensor_new(HALCYON_DTYPE_F32, NULL, 0, &one, sizeof one, &t));
    }
}

int main(void) {
    lose();
    puts("done");
    return 0;
}
