"""Writes the texts and token ids that the tests of halcyon-text compare with llama.cpp.

Usage: python tokenizer_cases.py FOLDER OUT.json [--count N] [--seed N]

FOLDER holds smollm2.gguf and gemma3.gguf; llama_oracle.py, which must lie beside this script, says how to get
them. Each model gets N / 2 texts with special tokens parsed and N / 2
without. For each group of pre-tokenizers that
Halcyon knows, the vocabulary of SmolLM2
is written to a file that names it, so that llama.cpp cuts texts in that way.
"""

import argparse
import ctypes
import json
import random
import re
import struct
import tempfile
from pathlib import Path

import gguf
import llama_oracle

RANGES = [(0x20, 0x7f), (0xa0, 0x24f), (0x370, 0x3ff), (0x400, 0x4ff), (0x590, 0x6ff),
          (0x900, 0x97f), (0xe00, 0xe7f),
          (0x1100, 0x11ff), (0x2000, 0x206f), (0x20a0, 0x20bf), (0x2190, 0x21ff), (0x3000, 0x30ff),
          (0x4e00, 0x9fff),
          (0xac00, 0xd7a3), (0xf900, 0xfaff), (0xff00, 0xffef), (0x1f300, 0x1f6ff), (0x20000, 0x2a6df)]


def texts(rng, count, special):
    """Texts of words, odd pieces, random characters and special tokens."""
    out = []
    for i in range(count):
        kind = i % 8
        words, n = llama_oracle.WORDS, rng.randint(1, 12)
        if kind == 0:
            parts = [rng.choice(words) + rng.choice([" ", " ", " ", "\n", "", "  "]) for _ in range(n)]
        elif kind == 1:
            parts = [chr(rng.randint(*rng.choice(RANGES))) for _ in range(rng.randint(1, 16))]
        elif kind == 2:
            parts = [rng.choice(llama_oracle.PIECES) for _ in range(rng.randint(1, 8))]
        elif kind == 3:
            pool = words + llama_oracle.PIECES
            parts = [rng.choice(special) if rng.random() < 0.4 else rng.choice(pool) for _ in range(n)]
        elif kind == 4:
            parts = [rng.choice("0123456789.,-+ eExX_") for _ in range(rng.randint(1, 24))]
        elif kind == 5:
            parts = [rng.choice([" ", "\t", "\n", "\r\n", "\u00a0", "x", "'", "A", "b"])
                     for _ in range(n + 6)]
        elif kind == 6:
            parts = [rng.choice("abcdefgABCDEFG\u00e9\u00c9\u00df~'_") * rng.choice([1, 1, 1, 2, 9])
                     for _ in range(n)]
        else:
            pool = llama_oracle.WORDS + llama_oracle.PIECES
            parts = [rng.choice(pool) for _ in range(rng.randint(1, 10))]
        out.append("".join(parts))
    return out


def names(path):
    """The pre-tokenizers in the Rust table, one of each group."""
    table = path.read_text().split("const NAMES")[1].split("];")[0]
    groups = re.findall(r'\(\s*"[^"]+",\s*&\[(.*?)\]', table, re.S)
    return [re.findall(r'"([^"]+)"', g) for g in groups]


class Vocabulary:
    """The metadata of a file: its special tokens, and copies that name another pre-tokenizer."""

    def __init__(self, path):
        reader = gguf.GGUFReader(path)
        tokens = reader.fields["tokenizer.ggml.tokens"]
        kinds = reader.fields["tokenizer.ggml.token_type"]
        kinds = [int(kinds.parts[i][0]) for i in kinds.data]
        special = [i for i, k in enumerate(kinds) if k in (3, 4)]
        self.special = [bytes(tokens.parts[tokens.data[i]]).decode() for i in special]
        with open(path, "rb") as file:
            self.header = file.read(reader.tensors[0].field.offset)

    def copy(self, path, pre):
        """Writes the metadata without tensors."""
        head = bytearray(self.header)
        head[8:16] = struct.pack("<Q", 0)
        key = b"tokenizer.ggml.pre" + struct.pack("<I", 8)
        at = head.index(key) + len(key)
        (length,) = struct.unpack_from("<Q", head, at)
        head[at:at + 8 + length] = struct.pack("<Q", len(pre)) + pre.encode()
        path.write_bytes(head + bytes(64))


def ends(llama):
    lib = llama.lib
    lib.llama_vocab_is_eog.restype = ctypes.c_bool
    lib.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    return [i for i in range(llama.n_vocab) if lib.llama_vocab_is_eog(llama.vocab, i)]


def load(path):
    return llama_oracle.load(argparse.Namespace(model=path, verbose=False), vocab_only=True)


def cases(model, list_of_texts, add_special, parse_special):
    return [[t, model.tokenize(t, add_special, parse_special)] for t in list_of_texts]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--each", type=int, default=48, help="texts of each pre-tokenizer")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    sets, smollm2 = [], None
    for name in ["smollm2.gguf", "gemma3.gguf"]:
        path = args.folder / name
        vocabulary = Vocabulary(path)
        special = vocabulary.special
        smollm2 = smollm2 or vocabulary
        special = special if len(special) < 100 else special[:60] + rng.sample(special, 40)
        model = load(path)
        for parse in [True, False]:
            got = cases(model, texts(rng, args.count // 2, special), parse, parse)
            sets.append({"model": name, "add_special": parse, "parse_special": parse,
                         "ends": ends(model), "cases": got})
    root = Path(__file__).resolve().parents[2]
    for group in names(root / "crates/halcyon-text/src/pre.rs"):
        for pre in group[:1]:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / "vocab.gguf"
                smollm2.copy(target, pre)
                model = load(target)
                got = cases(model, texts(rng, args.each, smollm2.special), True, True)
                sets.append({"model": "smollm2.gguf", "pre": pre, "add_special": True, "parse_special": True,
                             "ends": ends(model), "cases": got})
    lines = ",\n".join(json.dumps(s, ensure_ascii=False, separators=(",", ":")) for s in sets)
    args.out.write_text(f"[{lines}]\n")
    print(sum(len(s["cases"]) for s in sets), "texts,", args.out.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
