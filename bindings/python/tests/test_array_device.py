"""DLPack with memory of a device, on a stand-in for CUDA's libraries whose device is this machine's CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import halcyon
import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "crates" / "halcyon-hal" / "tests" / "simt"

PROGRAM = '''
import ctypes

import halcyon.array as xp
import numpy as np


class Other:
    """An array of another library: a capsule of one of Halcyon's, changed by `edit`."""

    def __init__(self, x, edit=None):
        self.x, self.edit, self.streams = x, edit, []

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None):
        self.streams.append(stream)
        capsule = self.x.__dlpack__(max_version=max_version, dl_device=dl_device)
        if self.edit is not None:
            get = ctypes.pythonapi.PyCapsule_GetPointer
            get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
            self.edit(Versioned.from_address(get(capsule, b"dltensor_versioned")))
        return capsule


class Versioned(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("rank", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


def seen(x):
    """What a capsule of the array says."""
    found = []
    xp.from_dlpack(Other(x, lambda m: found.append((m.data, tuple(m.device), m.flags))), device=x.device)
    return found[0]


cuda = "cuda:0"
values = np.arange(24, dtype=np.float32).reshape(4, 6)
x = xp.asarray(values, device=cuda)
assert x.__dlpack_device__() == (2, 0) and xp.asarray(values, device="cpu").__dlpack_device__() == (1, 0)

# In place, on the device of the memory.
other = Other(x)
y = xp.from_dlpack(other)
assert y.device == x.device and other.streams == [1], (y.device, other.streams)
assert seen(y)[0] == seen(x)[0] and seen(x)[1] == (2, 0) and seen(x)[2] == 1
assert np.array_equal(np.asarray(y + 1), values + 1) and np.array_equal(np.asarray(y), values)
assert seen(xp.from_dlpack(Other(x), copy=True))[0] != seen(x)[0]
del x
assert np.array_equal(np.asarray(y), values)

# Strides and offsets are copied on the device, unless that is forbidden.
def transposed(m):
    m.shape[0], m.shape[1], m.strides[0], m.strides[1] = 6, 4, 1, 6


def reversed_rows(m):
    m.strides[0], m.offset = -6, 4 * 18


def inner(m):
    m.shape[0], m.shape[1], m.strides[1], m.offset = 2, 2, 2, 4 * 7


for edit, want in [
    (transposed, values.T),
    (reversed_rows, values[::-1]),
    (inner, values[1:3, 1:5:2]),
]:
    made = xp.from_dlpack(Other(y, edit))
    assert made.device == y.device and np.array_equal(np.asarray(made), want), edit.__name__
    try:
        xp.from_dlpack(Other(y, edit), copy=False)
        raise AssertionError("a copy was made")
    except BufferError as e:
        assert "dense" in str(e)

# Dense, but not where kernels read: copied on the device.
def later(m):
    m.shape[0], m.offset = 3, 4 * 6


assert np.array_equal(np.asarray(xp.from_dlpack(Other(y, later))), values[1:])

# Through the host, where that is asked for.
z = xp.from_dlpack(Other(y), device="cpu")
assert str(z.device) == "cpu:0" and np.array_equal(np.asarray(z), values)
if tuple(int(v) for v in np.__version__.split(".")[:2]) >= (2, 1):
    assert np.array_equal(np.from_dlpack(y, device="cpu"), values)
for forbidden in (
    lambda: xp.from_dlpack(Other(y), device="cpu", copy=False),
    lambda: y.__dlpack__(dl_device=(2, 1)),
):
    try:
        forbidden()
        raise AssertionError("memory of another device was shared")
    except BufferError as e:
        assert "(2, " in str(e), e

# Sizes of zero and other types.
for dtype in ("bool", "int8", "uint16", "int64", "float16", "float64"):
    for shape in ((0, 3), (), (5,)):
        a = np.ones(shape, dtype)
        b = xp.from_dlpack(Other(xp.asarray(a, device=cuda)))
        assert np.array_equal(np.asarray(b), a), (dtype, shape)
half = xp.astype(xp.asarray(values, device=cuda), xp.bfloat16)
assert seen(half)[1] == (2, 0) and xp.from_dlpack(Other(half)).dtype == half.dtype
for _ in range(2000):
    y = xp.from_dlpack(Other(y))
assert np.array_equal(np.asarray(y), values)
print("exchanged")
'''


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standin")
    library = folder / "libcuda-standin.so"
    (folder / "modules").mkdir()
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared"]
    flags += [f'-DH_KERNEL="{SOURCES / "kernel.h"}"', f'-DH_FOLDER="{folder / "modules"}"']
    try:
        subprocess.run(
            ["c++", *flags, "-o", str(library), str(SOURCES / "standin.cpp"), "-ldl"], check=True, timeout=300
        )
    except FileNotFoundError:
        assert not os.environ.get("HALCYON_REQUIRE_ALL"), "no C++ compiler"
        pytest.skip("no C++ compiler")
    return library


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in needs Linux")
def test_memory_of_a_device_is_exchanged_in_place(standin: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(halcyon.__file__).parents[1]),
        "HALCYON_CUDA_LIBRARY": str(standin),
        "HALCYON_NVRTC_LIBRARY": str(standin),
        "HALCYON_CUBLASLT_LIBRARY": "off",
        "HALCYON_CUDNN_LIBRARY": "off",
        "HALCYON_CONFIG": "off",
        "HALCYON_CACHE": "off",
    }
    run = [sys.executable, "-c", PROGRAM]
    out = subprocess.run(run, capture_output=True, text=True, timeout=600, env=environment)
    assert out.returncode == 0 and out.stdout == "exchanged\n", out.stderr[-3000:]
