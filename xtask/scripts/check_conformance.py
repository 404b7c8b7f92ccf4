#!/usr/bin/env python3
"""Checks `halcyon conformance` independently, so that it cannot pass by looking at the expected outputs.

Needs numpy, onnx; HALCYON_BIN (the command) and HALCYON_TESTDATA (what altered_conformance.py wrote).
Usage: check_conformance.py [--backend NAME] [--limit N]

1. `halcyon run` runs every case in a folder that contains the model and the inputs, but not the expected
   outputs. This script compares the saved outputs with NumPy. A case that `halcyon run` calls unsupported
   (exit code 3) counts as skipped.
2. `halcyon conformance onnx` must find no wrong case in the unaltered cases, and agree with check 1 on every
   case.
3. In the copy with fifty altered expectations, the command must find exactly those fifty cases wrong.
With `--limit N` the three checks use N cases, drawn by HALCYON_SEED. Check 3 then expects that exactly the
altered cases among them are wrong. HALCYON_CASES=all uses all cases.
Last line: `N passed, N failed, N skipped`.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

UNSUPPORTED = 3


def file_name(name):
    """The file in which `run --output-dir` saves an output: its name, with characters replaced by `_`."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name) + ".npy"


def judge(command, backend, case, scratch):
    """Returns ("passed" | "wrong" | "unsupported" | "error", reason) for one case, from its saved outputs."""
    model = onnx.load(str(case / "model.onnx"))
    work = scratch / case.name
    work.mkdir()
    shutil.copy(case / "model.onnx", work)
    arguments = [command, "run", str(work / "model.onnx"), "--backend", backend, "--output-dir", str(work / "out")]
    stored = {t.name for t in model.graph.initializer}
    for i, info in enumerate(v for v in model.graph.input if v.name not in stored):
        source = case / "test_data_set_0" / f"input_{i}.pb"
        shutil.copy(source, work)
        arguments += ["--input", f"{info.name}={work / source.name}"]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode == UNSUPPORTED:
        return "unsupported", done.stderr.strip().splitlines()[-1:]
    if done.returncode != 0:
        return "error", f"exit {done.returncode}: {done.stderr.strip()[-300:]}"
    tolerance = json.loads((case / "tolerance.json").read_text())
    for i, info in enumerate(model.graph.output):
        proto = TensorProto.FromString((case / "test_data_set_0" / f"output_{i}.pb").read_bytes())
        expected = numpy_helper.to_array(proto)
        path = work / "out" / file_name(info.name)
        if not path.is_file():
            return "error", f"output `{info.name}` was not saved as {path.name}"
        got = np.load(path)
        if got.dtype != expected.dtype or got.shape != expected.shape:
            return "wrong", f"{info.name}: {got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}"
        if not np.allclose(got, expected, rtol=tolerance["rtol"], atol=tolerance["atol"], equal_nan=True):
            return "wrong", f"{info.name}: largest difference {np.abs(got.astype(float) - expected.astype(float)).max()}"
    return "passed", ""


def conformance(command, backend, folder):
    done = subprocess.run(
        [command, "conformance", "onnx", str(folder), "--backend", backend, "--json"], capture_output=True, text=True
    )
    try:
        report = json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(f"`conformance --json` (exit {done.returncode}) printed no JSON: {done.stdout[:200]} {done.stderr[-300:]}")
    return {case["name"].split("/")[-1]: case["status"] for case in report["cases"]}, report["total"]


def only(cases, folder, scratch):
    """Copies the folders of these cases from `folder` to `scratch`."""
    for case in cases:
        shutil.copytree(folder / case.name, scratch / case.name)
    return scratch


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    command = os.environ["HALCYON_BIN"]
    data = pathlib.Path(os.environ["HALCYON_TESTDATA"])
    cases = sorted(path for path in (data / "conformance").iterdir() if path.is_dir())
    altered = (data / "conformance_altered.txt").read_text().split()
    given, changed = data / "conformance", data / "conformance_altered"
    limit = None if os.environ.get("HALCYON_CASES") == "all" else options.limit
    if limit is not None and limit < len(cases):
        seed = int(os.environ.get("HALCYON_SEED", time.time_ns()))
        print(f"{limit} cases, HALCYON_SEED={seed}")
        draw = random.Random(seed)
        # A quarter of the cases have an altered expectation, so that the sample always has some.
        first = draw.sample(altered, min(len(altered), -(-limit // 4)))
        others = draw.sample([path.name for path in cases if path.name not in first], limit - len(first))
        names = {*first, *others}
        cases = [path for path in cases if path.name in names]
        altered = [name for name in altered if name in names]

    totals = {"passed": 0, "wrong": 0, "unsupported": 0, "error": 0}
    verdicts = {}
    with tempfile.TemporaryDirectory() as scratch:
        for case in cases:
            verdicts[case.name], reason = judge(command, options.backend, case, pathlib.Path(scratch))
            totals[verdicts[case.name]] += 1
            if verdicts[case.name] in ("wrong", "error"):
                print(f"{case.name}: {verdicts[case.name]}: {reason}")
    print(f"judged from saved outputs on {options.backend}: {totals}")
    passed, failed, skipped = totals["passed"], totals["wrong"] + totals["error"], totals["unsupported"]

    with tempfile.TemporaryDirectory() as scratch:
        own, total = conformance(command, options.backend, only(cases, given, pathlib.Path(scratch)))
    print(f"the command's own verdict: {total}")
    for name, verdict in verdicts.items():
        if own.get(name) != verdict:
            print(f"{name}: `conformance` says {own.get(name)}, the saved outputs say {verdict}")
            failed += 1
    failed += total["wrong"]

    with tempfile.TemporaryDirectory() as scratch:
        own, total = conformance(command, options.backend, only(cases, changed, pathlib.Path(scratch)))
    wrong = sorted(name for name, status in own.items() if status == "wrong")
    print(f"with {len(altered)} altered expectations: {total}")
    if wrong == sorted(altered):
        passed += 1
    else:
        failed += 1
        print(
            f"altered, but not found wrong: {sorted(set(altered) - set(wrong))}; "
            f"found wrong, but not altered: {sorted(set(wrong) - set(altered))}"
        )
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
