"""Compiles HIP sources with clang to linked code objects, for architectures that an old hipRTC does not know.
Needs no GPU.

    python clang_compile.py ARCH[,ARCH...] FILE...

Prints "ok" or the compiler's log for each file and architecture. Exits 1 if a file does not compile, 77 if the
compiler or ROCm's device libraries are not installed (Debian packages: clang-19 lld-19 rocm-device-libs).
"""

import os
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
BITCODE = ["/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "/usr/lib/aarch64-linux-gnu/amdgcn/bitcode", "/opt/rocm/amdgcn/bitcode"]
# The flags that the driver passes to hipRTC (halcyon-hal, rocm/mod.rs).
FLAGS = ["-std=c++17", "-ffp-contract=off", "-O2", "-w"]


def compiler():
    """The first of clang 19 to 21 that runs, its resource folder, and the folder of ocml.bc; or a message if one of
    them is not installed."""
    bitcode = next((d for d in BITCODE if os.path.isfile(os.path.join(d, "ocml.bc"))), None)
    if bitcode is None:
        return "ROCm's device libraries are not installed"
    for name in ["clang++-19", "clang++-20", "clang++-21"]:
        try:
            out = subprocess.run([name, "-print-resource-dir"], capture_output=True, text=True, check=True).stdout.strip()
            return name, out, bitcode
        except (OSError, subprocess.CalledProcessError):
            continue
    return "clang 19 is not installed"


def version(arch):
    """9402 for gfx942, 11000 for gfx1100. The last two digits of a name are hexadecimal."""
    digits = arch.removeprefix("gfx")
    return int(digits[:-2]) * 1000 + int(digits[-2], 16) * 100 + int(digits[-1], 16)


def main():
    found = compiler()
    if isinstance(found, str):
        print(found)
        return 77
    clang, resources, bitcode = found
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for path in sys.argv[2:]:
            for arch in sys.argv[1].split(","):
                code = os.path.join(folder, "code.o")
                command = [clang, "-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", f"--offload-arch={arch}", *FLAGS]
                command += ["-nogpuinc", "-nogpulib", "-D__HIPCC_RTC__", f"-DH_ISA_VERSION={version(arch)}"]
                command += ["-include", os.path.join(resources, "include", "__clang_hip_runtime_wrapper.h")]
                command += ["-include", os.path.join(HERE, "hip_prelude.h")]
                for library in ["ocml.bc", "ockl.bc"]:
                    command += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", os.path.join(bitcode, library)]
                run = subprocess.run([*command, "-c", "-o", code, path], capture_output=True, text=True, errors="replace")
                made = run.returncode == 0 and os.path.getsize(code) > 0
                if made:
                    os.remove(code)
                    print(f"{path} for {arch}: ok")
                else:
                    failed = True
                    print(f"{path} for {arch}:\n{run.stdout}{run.stderr}")
    return int(failed)


sys.exit(main())
