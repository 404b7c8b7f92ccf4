"""Compiles CUDA sources with NVRTC, which needs no GPU and no headers.

    python nvrtc_compile.py ARCH[,ARCH...] FILE...

Prints "ok" or the compiler's log for each file and architecture. Exits 1 if a file does not compile, and 77 if
NVRTC is not installed (`pip install nvidia-cuda-nvrtc`).
"""

import ctypes
import glob
import os
import site
import sys


def load():
    names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    for folder in site.getsitepackages() + [site.getusersitepackages()]:
        names += sorted(glob.glob(os.path.join(folder, "nvidia", "*", "lib", "libnvrtc.so.*")))
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def main():
    lib = load()
    if lib is None:
        print("NVRTC is not installed")
        return 77
    lib.nvrtcGetErrorString.restype = ctypes.c_char_p
    failed = False
    for path in sys.argv[2:]:
        with open(path, "rb") as f:
            source = f.read()
        for arch in sys.argv[1].split(","):
            program = ctypes.c_void_p()
            lib.nvrtcCreateProgram(ctypes.byref(program), source, os.path.basename(path).encode(), 0, None, None)
            flags = [b"--gpu-architecture=" + arch.encode(), b"--std=c++17"]
            options = (ctypes.c_char_p * len(flags))(*flags)
            code = lib.nvrtcCompileProgram(program, len(flags), options)
            size = ctypes.c_size_t()
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            lib.nvrtcGetProgramLog(program, log)
            lib.nvrtcDestroyProgram(ctypes.byref(program))
            if code != 0:
                failed = True
                print(f"{path} for {arch}: {lib.nvrtcGetErrorString(code).decode()}\n{log.value.decode()}")
            else:
                print(f"{path} for {arch}: ok")
    return int(failed)


sys.exit(main())
