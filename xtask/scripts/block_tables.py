"""Writes the codebooks of ggml's smallest formats as Rust tables.

`block_tables.py FILE` writes crates/halcyon-ir/src/blocks/codebooks.rs from the tables of the package `gguf`
(pip install gguf). Run `cargo fmt` after it.
"""

import sys
from pathlib import Path

import numpy as np
from gguf import quants

HEADER = """//! The codebooks of the formats that are decoded when they are loaded.
//!
//! Written by `xtask/scripts/block_tables.py`; do not edit.
//!
//! Source: the tables in `gguf/quants.py` of the Python package gguf, which belongs to llama.cpp and ggml
//! (<https://github.com/ggml-org/llama.cpp>). Licence of the tables: MIT, copyright (c) 2023 Georgi Gerganov.
"""

# The name in Rust, the class of the package that has the table, and what the bits of an entry mean.
TABLES = [
    ("IQ2_XXS", quants.IQ2_XXS, "Eight codes of 2 bits, the first in the lowest bits."),
    ("IQ2_XS", quants.IQ2_XS, "Eight codes of 2 bits, the first in the lowest bits."),
    ("IQ2_S", quants.IQ2_S, "Eight codes of 2 bits, the first in the lowest bits."),
    ("IQ3_XXS", quants.IQ3_XXS, "Four codes of 3 bits in 4 bits each, the first in the lowest bits."),
    ("IQ3_S", quants.IQ3_S, "Four codes of 3 bits in 4 bits each, the first in the lowest bits."),
    ("IQ1", quants.IQ1_S, "Eight codes of 2 bits, the first in the lowest bits. Of both iq1 formats."),
]

text = HEADER
for name, source, meaning in TABLES:
    entries = np.frombuffer(bytes.fromhex(source.grid_hex.decode()), dtype="<u2")
    assert len(entries) == source.grid_shape[0], name
    numbers = ", ".join(f"0x{e:04x}" for e in entries)
    text += f"\n/// {meaning}\npub(super) static {name}: [u16; {len(entries)}] = [{numbers}];\n"
Path(sys.argv[1]).write_text(text)
