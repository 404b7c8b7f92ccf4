"""Makes the cases that the block-quantised formats are compared with.

`block_cases.py FILE [LIBRARY]` writes crates/halcyon-ir/tests/data/blocks.bin. The draws follow from a fixed
seed. Needs the packages gguf and numpy, and ggml's library of reference quantisers, libggml-base: LIBRARY, or
that of the package llama-cpp-py-sync.

The file has little-endian numbers, in this order:

- A u32 with the number of formats. For each: its number in ggml (u32), the number of blocks (u32), the
  blocks, their elements as the package gguf decodes them (f32), and a digest (u64) of the elements of 1000
  other blocks.
- A u32 with the number of rows and one with their length, and the rows (f32).
- A u32 with the number of formats that have an encoder. For each: its number in ggml (u32), for each row the
  sum of the squared errors of ggml's reference quantiser (f64), and a u32 with the size of the encoded rows
  that follow. The size is 0 where our encoder need not choose the same bytes.
"""

import ctypes
import os
import struct
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type

# The formats that are kept, and the offsets of the f16 numbers in a block.
KEPT = {
    Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0],
    Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
    Type.IQ4_NL: [0], Type.IQ4_XS: [0], Type.MXFP4: [],
}
# The formats that are decoded when they are loaded. The number of iq1_m is in four parts.
LOAD_ONLY = {
    Type.IQ2_XXS: [0], Type.IQ2_XS: [0], Type.IQ2_S: [0], Type.IQ3_XXS: [0], Type.IQ3_S: [0],
    Type.IQ1_S: [0], Type.IQ1_M: [], Type.TQ1_0: [52], Type.TQ2_0: [64],
}
SAME_BYTES = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4]
# Both zeros, subnormal numbers, the largest number, both infinities, NaN.
SPECIAL = [0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0x7c00, 0xfc00, 0x7e01]
LENGTH = 1024
# Blocks of which only a digest is stored. They reach every entry of the codebooks.
MANY = 1000

draw = np.random.default_rng(19)


def blocks(kind, halves):
    """Random blocks: five with ordinary scales, and two (eight, of small formats) with special ones."""
    elements, size = GGML_QUANT_SIZES[kind]
    ordinary, special = (5, 2) if elements == 256 else (12, 8)
    b = draw.integers(0, 256, (ordinary + special, size), dtype=np.uint8)
    for n, row in enumerate(b):
        for at in halves:
            scale = np.float16(draw.uniform(0.5, 2) * draw.choice([-1, 1])).view(np.uint16)
            if n >= ordinary:
                scale = draw.choice(SPECIAL)
            row[at:at + 2] = np.frombuffer(np.uint16(scale).tobytes(), np.uint8)
        if kind == Type.IQ1_M and n < ordinary:
            row[55] = row[55] & 0x0f | 0x30  # the top bits of an ordinary scale
        if kind == Type.MXFP4:
            extremes = [0, 1, 2, 3, 252, 253, 254, 255]
            row[0] = draw.integers(100, 150) if n < ordinary else extremes[n - ordinary]
    return b


def random_bytes(n):
    """Bytes of the generator SplitMix64, which starts at 0. The test makes the same ones."""
    z = np.arange(1, -(-n // 8) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return (z ^ z >> np.uint64(31)).astype("<u8").view(np.uint8)[:n]


def digest(values):
    """FNV-1a of the bits, with 32 bits at a time. All NaN are the same."""
    h = 0xCBF29CE484222325
    for bits in np.where(np.isnan(values), np.float32(np.nan), values).view(np.uint32).ravel().tolist():
        h = (h ^ bits) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def rows():
    """Rows of weights: normal ones, and ones with heavy tails, outliers, an offset, or many zeros."""
    n = LENGTH
    normal = draw.standard_normal(n)
    columns = [
        normal * 0.02,
        draw.standard_t(2.5, n),
        draw.laplace(size=n) * 3,
        np.exp(draw.standard_normal(n) * 1.5) * draw.choice([-1, 1], n),
        np.where(draw.random(n) < 0.01, 30, 1) * draw.standard_normal(n),
        draw.standard_normal(n) + 1,
        np.where(draw.random(n) < 0.7, 0, 1) * draw.standard_normal(n),
    ]
    return np.stack(columns).astype(np.float32)


def weakened(library, folder):
    """A copy of the library that older versions of glibc load.

    It asks for version 2.38, for functions that we never reach. The copy asks for it weakly.
    """
    d = bytearray(library.read_bytes())
    sections, = struct.unpack_from("<Q", d, 40)
    count, = struct.unpack_from("<H", d, 60)
    for section in range(sections, sections + 64 * count, 64):
        kind, = struct.unpack_from("<I", d, section + 4)
        if kind != 0x6FFFFFFE:  # SHT_GNU_verneed
            continue
        need, = struct.unpack_from("<Q", d, section + 24)
        link, = struct.unpack_from("<I", d, section + 40)
        names, = struct.unpack_from("<Q", d, sections + 64 * link + 24)
        while True:
            _, versions, _, first, following = struct.unpack_from("<HHIII", d, need)
            at = need + first
            for _ in range(versions):
                _, flags, _, name, step = struct.unpack_from("<IHHII", d, at)
                if d[names + name:].startswith(b"GLIBC_2.38\0"):
                    struct.pack_into("<H", d, at + 4, flags | 2)  # VER_FLG_WEAK
                at += step
            if following == 0:
                break
            need += following
    copy = Path(folder) / "libggml-base.so"
    copy.write_bytes(d)
    return copy


def reference(library):
    """ggml's quantisers, as a function of a format and a row."""
    if library is None:
        library = Path(find_spec("llama_cpp_py_sync").submodule_search_locations[0]) / "libggml-base.so.0"
    with tempfile.TemporaryDirectory() as folder:
        ggml = ctypes.CDLL(str(weakened(Path(library), folder)), mode=os.RTLD_LAZY)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    ggml.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, number, number, number, pointer]

    def quantise(kind, row):
        elements, size = GGML_QUANT_SIZES[kind]
        encoded = np.empty(len(row) // elements * size, np.uint8)
        written = ggml.ggml_quantize_chunk(kind, row.ctypes.data, encoded.ctypes.data, 0, 1, len(row), None)
        assert written == len(encoded), kind
        return encoded

    return quantise


def main():
    quantise = reference(sys.argv[2] if len(sys.argv) > 2 else None)
    out = [struct.pack("<I", len(KEPT) + len(LOAD_ONLY))]
    for kind, halves in (KEPT | LOAD_ONLY).items():
        b = blocks(kind, halves)
        with np.errstate(all="ignore"):
            decoded = quants.dequantize(b, kind)
            size = GGML_QUANT_SIZES[kind][1]
            many = digest(quants.dequantize(random_bytes(MANY * size).reshape(MANY, size), kind))
        out += [struct.pack("<II", kind, len(b)), b.tobytes(), decoded.astype("<f4").tobytes(),
                struct.pack("<Q", many)]
    weights = rows()
    out += [struct.pack("<II", *weights.shape), weights.astype("<f4").tobytes(), struct.pack("<I", len(KEPT))]
    for kind in KEPT:
        encoded = [quantise(kind, row) for row in weights]
        if kind in (Type.Q4_0, Type.Q5_0, Type.Q8_0):
            # ggml and the package choose the same bytes, but for blocks of zeros of either sign.
            for row, bytes in zip(weights[:6], encoded):
                assert np.array_equal(quants.quantize(row, kind), bytes), kind
        errors = [np.sum((quants.dequantize(e, kind) - row.astype(np.float64)) ** 2)
                  for row, e in zip(weights, encoded)]
        same = b"".join(e.tobytes() for e in encoded) if kind in SAME_BYTES else b""
        out += [struct.pack("<I", kind), np.array(errors, "<f8").tobytes()]
        out += [struct.pack("<I", len(same)), same]
    Path(sys.argv[1]).write_bytes(b"".join(out))


main()
