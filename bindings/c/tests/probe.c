/* Drivers are probed by another program: `probe PROGRAM`. The program crashes, and this process does not. */

#include "check.h"

int main(int argc, char **argv) {
    CHECK(argc == 2);
    FAILS(halcyon_set_probe_program(NULL), HALCYON_STATUS_ARGUMENT, "`path` is NULL");
    FAILS(halcyon_set_probe_program("no/such/program"), HALCYON_STATUS_ARGUMENT,
          "there is no file \"no/such/program\"");
    OK(halcyon_set_probe_program(argv[1]));
    OK(halcyon_set_probe_program(argv[1]));
    FAILS(halcyon_set_probe_program("/bin/sh"), HALCYON_STATUS_ARGUMENT, argv[1]);

    HalcyonDevices *all = NULL;
    OK(halcyon_devices_find(&all));
    /* The CPU has no driver to probe. */
    CHECK(halcyon_devices_count(all) == 1);
    CHECK(strcmp(halcyon_device_id(halcyon_devices_get(all, 0)), "cpu:0") == 0);
    halcyon_devices_free(all);
    puts("done");
    return 0;
}
