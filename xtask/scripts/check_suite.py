#!/usr/bin/env python3
"""Judges the command's results of the whole ONNX suite: the command gets only models and inputs, and this program compares the
results that the command saves.

Needs numpy and onnx, and the environment variables HALCYON_BIN (the command) and HALCYON_TESTDATA (a folder with gen_suite.py's `suite`).
Usage: check_suite.py [--backend NAME] [--kinds node,simple,…] [--one-in N] [--report FILE]

With --one-in N, each run draws one in N cases of each kind. HALCYON_SEED repeats a draw; HALCYON_CASES=all runs all cases.

Every case is copied to a scratch folder without its outputs; `halcyon conformance onnx SCRATCH --save` runs them all. Then the command judges the
originals itself, and both verdicts must agree, case by case.
Of kind node, 95 % of the cases must pass on cpu and 90 % on other backends; of the other kinds, 97 %. No case may be wrong or end with an error.
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
from onnx import numpy_helper

# ONNX does not define the numbers that these operators draw, so only type and shape are compared.
RANDOM = {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
KINDS = ["node", "simple", "pytorch-operator", "pytorch-converted"]


def asked(kind, backend):
    if kind != "node":
        return 0.97
    return 0.95 if backend == "cpu" else 0.90


def conformance(command, folder, backend, *more):
    arguments = [command, "conformance", "onnx", str(folder), "--backend", backend, "--json", *more]
    done = subprocess.run(arguments, capture_output=True, text=True)
    try:
        cases = json.loads(done.stdout)["cases"]
    except (json.JSONDecodeError, KeyError):
        sys.exit(f"{' '.join(arguments)} (exit {done.returncode}): {done.stdout[:200]} {done.stderr[-400:]}")
    return {case["name"]: case for case in cases}


def value(path, info):
    """The value of a stored message: an array, a list, a dictionary or None."""
    data = path.read_bytes()
    kind = info.type.WhichOneof("value")
    if kind == "sequence_type":
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    if kind == "optional_type":
        return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
    if kind == "map_type":
        return numpy_helper.to_dict(onnx.MapProto.FromString(data))
    return numpy_helper.to_array(onnx.TensorProto.FromString(data))


def draws(nodes):
    return any(n.op_type in RANDOM or any(draws(a.g.node) for a in n.attribute if a.HasField("g")) for n in nodes)


def difference(got, want, tolerance):
    """Why two values differ, or None."""
    if want is None or got is None:
        return None if want is got else f"{got} where {want} is expected"
    if isinstance(want, dict):
        if list(got) != list(want):
            return "the keys differ"
        got, want = list(got.values()), list(want.values())
    if isinstance(want, list):
        if len(got) != len(want):
            return f"{len(got)} elements, expected {len(want)}"
        return next((d for g, w in zip(got, want) if (d := difference(g, w, tolerance))), None)
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape or (got.dtype != want.dtype and not (got.dtype.kind in "OUS" and want.dtype.kind in "OUS")):
        return f"{got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    if tolerance is None:
        return None
    if want.dtype.kind in "OUS":
        return None if (got.astype(str) == want.astype(str)).all() else "the strings differ"
    if want.dtype.kind in "biu":
        return None if np.array_equal(got, want) else "the integers differ"
    # Small floats have NumPy's kind V. For bfloat16, ONNX's own test runner (backend/test/runner) allows two
    # units in the last place.
    rtol = max(tolerance["rtol"], 2**-6) if want.dtype.name == "bfloat16" else tolerance["rtol"]
    g, w = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        same = np.allclose(g, w, rtol=rtol, atol=tolerance["atol"], equal_nan=True)
        return None if same else f"largest difference {np.nanmax(np.abs(g - w))}"


def judge(case, saved):
    tolerance = {"rtol": 1e-3, "atol": 1e-7}
    if (case / "tolerance.json").is_file():
        tolerance = json.loads((case / "tolerance.json").read_text())
    model = onnx.load(str(case / "model.onnx"), load_external_data=False)
    if draws(model.graph.node) or any(draws(f.node) for f in model.functions):
        tolerance = None
    for data in sorted(case.glob("test_data_set_*")):
        for i, info in enumerate(model.graph.output):
            expected = data / f"output_{i}.pb"
            if not expected.is_file():
                break
            found = saved / data.name / expected.name
            if not found.is_file():
                return f"{info.name} was not saved"
            if reason := difference(value(found, info), value(expected, info), tolerance):
                return f"{info.name}: {reason}"
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--one-in", type=int, default=1)
    parser.add_argument("--report", type=pathlib.Path)
    options = parser.parse_args()
    one_in = 1 if os.environ.get("HALCYON_CASES") == "all" else max(1, options.one_in)
    seed = int(os.environ.get("HALCYON_SEED", time.time_ns()))
    draw = random.Random(seed)
    if one_in > 1:
        print(f"one case in {one_in}, HALCYON_SEED={seed}")
    command, backend = os.environ["HALCYON_BIN"], options.backend
    suite = pathlib.Path(os.environ["HALCYON_TESTDATA"]) / "suite"
    passed = failed = skipped = 0
    report = {}
    for kind in options.kinds.split(","):
        cases = sorted(p.parent for p in (suite / kind).glob("*/model.onnx"))
        if one_in > 1:
            cases = sorted(draw.sample(cases, -(-len(cases) // one_in)))
        with tempfile.TemporaryDirectory() as scratch:
            bare, saved, whole = (pathlib.Path(scratch, name) for name in ("bare", "saved", "whole"))
            for case in cases:
                shutil.copytree(case, bare / case.name, ignore=shutil.ignore_patterns("output_*.pb"))
            ran = conformance(command, bare, backend, "--save", str(saved))
            shutil.rmtree(bare)
            if one_in > 1:
                for case in cases:
                    shutil.copytree(case, whole / case.name)
            own = conformance(command, whole if one_in > 1 else suite / kind, backend)
            counts = {"passed": 0, "wrong": 0, "unsupported": 0, "error": 0}
            verdicts = {}
            for case in cases:
                status = ran[case.name]["status"]
                reason = ran[case.name]["reason"]
                if status == "saved":
                    reason = judge(case, saved / case.name)
                    status = "wrong" if reason else "passed"
                counts[status] += 1
                verdicts[case.name] = {"status": status, "reason": reason or ""}
                if status in ("wrong", "error"):
                    print(f"{kind}/{case.name}: {status}: {reason}")
                if own[case.name]["status"] != status:
                    print(f"{kind}/{case.name}: the command says {own[case.name]['status']}, its results say {status}")
                    failed += 1
        share = counts["passed"] / max(1, len(cases))
        print(f"{kind} on {backend}: {counts} of {len(cases)}, {share:.1%} passed")
        if not cases or share < asked(kind, backend):
            print(f"{kind}: {asked(kind, backend):.0%} must pass")
            failed += 1
        passed += counts["passed"]
        failed += counts["wrong"] + counts["error"]
        skipped += counts["unsupported"]
        report[kind] = verdicts
    if options.report:
        options.report.write_text(json.dumps({"backend": backend, "onnx": onnx.__version__, "kinds": report}, indent=1))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
