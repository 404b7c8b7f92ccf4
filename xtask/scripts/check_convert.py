"""Converts small models to GGUF files and back, and compares what other programs compute.

`check_convert.py MODELS` takes a folder with what `tiny_models.py --all` wrote, and prints a line per model. Runs in a
virtual environment that `llama_install.py` made; HALCYON_BIN is the command. For each model of MODELS:

- `halcyon convert --dtype f32` writes a GGUF file. Logits of transformers (expected.npz), of llama.cpp and of
  Halcyon from this file are compared with Halcyon's from the folder: the largest difference in standard deviations of
  the logits. Encoders have the vectors of tokens instead, pooled by the mean.
- `halcyon convert` writes a folder from the file. Its tensors must be those of the first folder: same names, shapes
  and, but for rounding, values.

`--only NAME...` takes some models. The last line counts models that failed. Models that GGUF cannot describe are refused, which
is no failure; neither is a model that llama.cpp does not load. Both are printed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ORACLE = Path(__file__).with_name("llama_oracle.py")
# Of the standard deviation. Halcyon against itself, and against others.
OWN, OTHER = 1e-4, 1e-3
# llama.cpp reads GELU from a table in f16, and takes the tanh approximation for the exact function.
TABLE = ("gemma", "falcon", "starcoder2", "gpt2", "bert", "modernbert", "xlm-roberta")


def run(*command):
    return subprocess.run([str(c) for c in command], capture_output=True, text=True)


def halcyon(*arguments):
    return run(os.environ["HALCYON_BIN"], *arguments)


def tensors(path):
    """The tensors of a safetensors file as f32."""
    raw = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    found = {}
    for name, t in json.loads(raw[8:8 + size]).items():
        if name == "__metadata__":
            continue
        data = raw[8 + size + t["data_offsets"][0]:8 + size + t["data_offsets"][1]]
        if t["dtype"] == "BF16":
            values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(data, {"F32": np.float32, "F16": np.float16}[t["dtype"]]).astype(np.float32)
        found[name.replace("model.language_model.", "model.")] = values.reshape(t["shape"])
    return found


def away(a, b):
    return float(np.abs(a - b).max() / b.std())


def logits(model, scratch):
    """Halcyon's logits of ids.npy."""
    options = ["--tokens", scratch / "ids.npy", "-o", scratch / "own.npy", "--backend", "cpu"]
    done = halcyon("logits", model, *options)
    if done.returncode != 0:
        raise RuntimeError(f"halcyon logits: {done.stderr.strip()[-200:]}")
    return np.load(scratch / "own.npy")


def decoder(folder, file, scratch, expected):
    """The logits' differences: transformers, llama.cpp, the file."""
    ids = scratch / "ids.npy"
    np.save(ids, expected["ids"].astype(np.int32))
    own, from_file = logits(folder, scratch), logits(file, scratch)
    done = run(sys.executable, ORACLE, "logits", file, ids, scratch / "llama.npy", "-t", 1)
    other = away(np.load(scratch / "llama.npy"), own) if done.returncode == 0 else None
    return away(expected["logits"], own), other, away(from_file, own)


def encoder(folder, file, scratch, expected):
    ids = scratch / "ids.npy"
    np.save(ids, expected["ids"].astype(np.int32))
    results = []
    for model in (folder, file):
        options = ["--pooling", "mean", "-o", scratch / "own.npy", "--backend", "cpu"]
        done = halcyon("embed", model, "--tokens", ids, *options)
        if done.returncode != 0:
            raise RuntimeError(f"halcyon embed: {done.stderr.strip()[-200:]}")
        results.append(np.load(scratch / "own.npy").ravel())
    own, from_file = results
    done = run(sys.executable, ORACLE, "embedding", file, ids, scratch / "llama.npy", "-t", 1)
    other = away(np.load(scratch / "llama.npy"), own) if done.returncode == 0 else None
    return away(expected["hidden"].mean(0), own), other, away(from_file, own)


def returned(folder, file, scratch):
    """What is wrong with the folder that is made of the file, or nothing."""
    back = scratch / "back"
    done = halcyon("convert", file, back, "--dtype", "f32")
    if done.returncode != 0:
        return done.stderr.strip().splitlines()[-1][:160]
    was, now = tensors(folder), tensors(back)
    if not set(now) <= set(was) or not all(n.startswith("pooler.") for n in set(was) - set(now)):
        return f"missing {sorted(set(was) - set(now))[:3]}, new {sorted(set(now) - set(was))[:3]}"
    was = {name: was[name] for name in now}
    for name, b in now.items():
        if name.endswith("position_embeddings.weight"):
            # Files lack the rows before the first position.
            was[name] = was[name][-len(b):]
        a = was[name]
        if a.shape != b.shape:
            return f"{name} is {b.shape}, not {a.shape}"
    far = [n for n, a in was.items() if np.abs(a - now[n]).max() > 2e-6 * max(np.abs(a).max(), 1e-6)]
    if far:
        if (folder / "expected.npz").is_file() and "hidden" in np.load(folder / "expected.npz").files:
            return f"{far[0]} differs"
        # A factor or an order of rows is in the weights now.
        d = away(logits(back, scratch), logits(folder, scratch))
        if d > OWN:
            return f"{far[0]} differs, and logits by {d:.1e}"
    return ""


def check(folder, failed):
    name, kind = folder.name, folder.name.rsplit("-", 1)[0]
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        file = scratch / "model.gguf"
        done = halcyon("convert", "--dtype", "f32", folder, file)
        if done.returncode != 0:
            print(f"{name:22} refused: {done.stderr.strip().splitlines()[0][:150]}", flush=True)
            return
        expected = np.load(folder / "expected.npz")
        try:
            measure = encoder if "hidden" in expected.files else decoder
            first, other, own = measure(folder, file, scratch, expected)
        except RuntimeError as e:
            failed.append(name)
            print(f"{name:22} FAILED {e}", flush=True)
            return
        why = returned(folder, file, scratch)
        limit = 0.1 if kind.startswith(TABLE) else OTHER
        bad = own > OWN or first > OTHER or (other or 0) > limit or why
        failed.extend([name] if bad else [])
        shown = "not loaded" if other is None else f"{other:.1e}"
        print(f"{name:22} transformers {first:.1e}  llama.cpp {shown:10}  file {own:.1e}  folder {why or 'equal'}"
              f"{'  FAILED' if bad else ''}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--only", nargs="+", default=[], help="names of folders")
    args = parser.parse_args()
    failed = []
    for folder in sorted(p for p in args.models.iterdir() if (p / "expected.npz").is_file()):
        if not args.only or folder.name in args.only or folder.name.rsplit("-", 1)[0] in args.only:
            check(folder, failed)
    print(f"{len(failed)} failed {' '.join(failed)}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
