"""Compiles HIP sources with hipRTC, which needs no GPU.

    python hiprtc_compile.py ARCH[,ARCH...] FILE...

Prints "ok" or the compiler's log for each file and architecture. Exits 1 if a file does not compile, and 77 if
hipRTC is not installed (Debian packages: libamdhip64-5 libhiprtc-builtins5 rocm-device-libs).
"""

import ctypes
import os
import sys


def load():
    for name in ["libhiprtc.so", "libhiprtc.so.6", "libhiprtc.so.5", "libamdhip64.so", "libamdhip64.so.6", "libamdhip64.so.5"]:
        try:
            lib = ctypes.CDLL(name)
            lib.hiprtcCreateProgram
            return lib
        except (OSError, AttributeError):
            continue
    return None


def main():
    lib = load()
    if lib is None:
        print("hipRTC is not installed")
        return 77
    lib.hiprtcGetErrorString.restype = ctypes.c_char_p
    failed = False
    for path in sys.argv[2:]:
        with open(path, "rb") as f:
            source = f.read()
        for arch in sys.argv[1].split(","):
            program = ctypes.c_void_p()
            lib.hiprtcCreateProgram(ctypes.byref(program), source, os.path.basename(path).encode(), 0, None, None)
            flags = [b"--gpu-architecture=" + arch.encode(), b"-std=c++17"]
            options = (ctypes.c_char_p * len(flags))(*flags)
            code = lib.hiprtcCompileProgram(program, len(flags), options)
            size = ctypes.c_size_t()
            lib.hiprtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value + 1)
            lib.hiprtcGetProgramLog(program, log)
            lib.hiprtcDestroyProgram(ctypes.byref(program))
            if code != 0:
                failed = True
                print(f"{path} for {arch}: {lib.hiprtcGetErrorString(code).decode()}\n{log.value.decode(errors='replace')}")
            else:
                print(f"{path} for {arch}: ok")
    return int(failed)


sys.exit(main())
