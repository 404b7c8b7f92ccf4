#!/usr/bin/env python3
"""An independent check of ONNX export: other programs must read the exported models and compute the same numbers.

Needs numpy, onnx, onnxruntime; HALCYON_BIN (the command), HALCYON_TESTDATA (conformance cases), and HALCYON_EXPORTED (what the test
`export` of the library wrote: one folder per case of its op table). If HALCYON_EXPORTED does not exist, part 1 is skipped.
Usage: check_export.py [--limit N]

Every model must pass onnx.checker with full shape inference. Its results come from onnxruntime on the CPU, or from the onnx package's
reference if onnxruntime has no kernel for the element types, and are compared in NumPy.
1. The op table's cases, against our reference's results.
2. `halcyon export` of models/digits.onnx, at several operator sets and with external data, against the model itself in onnxruntime.
3. `halcyon export` of the conformance cases, against their expected outputs.
Last line: `N passed, N failed, N skipped`.
"""
import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator

UNSUPPORTED = 3
# The accepted differences by rounding, as a fraction of the largest value of a result. (Gelu has constants in
# f32, both in onnxruntime's tanh form and in the reference's form for float64.)
CLOSE = {"float64": 1e-6, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


# Messages of the engines for cases that the operators allow but the engines cannot run.
LACKS = (
    "MLFloat16 data type is not supported",  # ScatterElements with a reduction
    "index can't contain negative values",  # the reference's Pad, which cannot crop
    "all dimensions of index and self should be the same size",  # the reference's GatherElements
    "utils::IsPrimitiveDataType<T>(dtype_) was false",  # unsigned products over an empty axis
    "KV sequence length must be greater than 0",  # onnxruntime's Attention
    "zero-size array to reduction operation maximum",  # the reference's softmax over an empty axis
    "is out of bounds for axis",  # the reference's MaxPool with uneven padding, whose indices are wrong
)


class Tally:
    def __init__(self):
        self.passed = self.failed = self.skipped = 0
        self.by = collections.Counter()
        self.said = collections.Counter()

    def ok(self, by):
        self.passed += 1
        self.by[by] += 1

    def bad(self, what, why):
        self.failed += 1
        kind = what.split("/")[0]
        self.said[kind] += 1
        if self.said[kind] <= 60:
            print(f"{what}: {why}")


def read(path):
    return numpy_helper.to_array(TensorProto.FromString(path.read_bytes()))


def data_of(folder, kind, names):
    return [read(folder / "test_data_set_0" / f"{kind}_{i}.pb") for i in range(len(names))]


def wanted(value):
    """The value, or None if onnxruntime cannot take its element type."""
    return value if value.dtype.kind in "fiub" and value.dtype.isbuiltin else None


def evaluate(path, model, feeds):
    """(results, engine): onnxruntime if it has kernels for the model, else the reference of the onnx package."""
    if all(wanted(v) is not None for v in feeds.values()):
        try:
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            # Fusions are off, because single kernels are compared.
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            return session.run(None, feeds), "onnxruntime"
        except (onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented, RuntimeError) as e:
            # onnxruntime cannot return results of types that NumPy lacks.
            if "NOT_IMPLEMENTED" not in str(e) and "No corresponding Numpy type" not in str(e):
                raise
    return ReferenceEvaluator(model).run(None, feeds), "reference"


def differs(got, want, rtol=None, atol=0.0):
    """Why a result differs from the expected result, or None."""
    got, want = np.asarray(got), np.asarray(want)
    small = want.dtype.isbuiltin != 1 and str(want.dtype) not in CLOSE
    if small and got.dtype == np.uint8 and want.dtype.itemsize == 1:
        # onnxruntime returns 8-bit floats as their bits.
        got = got.view(want.dtype)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{got.dtype}{got.shape}, expected {want.dtype}{want.shape}"
    if want.size == 0:
        return None
    if str(want.dtype) not in CLOSE and not small:
        bad = np.count_nonzero(got != want)
        return f"{bad} of {want.size} differ" if bad else None
    g, w = got.astype(np.float64), want.astype(np.float64)
    if small:
        bad = np.count_nonzero((g != w) & ~(np.isnan(g) & np.isnan(w)))
        return f"{bad} of {want.size} differ" if bad else None
    if rtol is None:
        rtol = CLOSE[str(want.dtype)]
        finite = np.abs(w[np.isfinite(w)])
        atol = rtol * float(finite.max(initial=0.0))
    if np.allclose(g, w, rtol=rtol, atol=atol, equal_nan=True):
        return None
    with np.errstate(all="ignore"):
        return f"largest difference {np.nanmax(np.abs(g - w))} of {np.nanmax(np.abs(w))}"


def check(path):
    model = onnx.load(str(path))
    onnx.checker.check_model(str(path), full_check=True)
    return model


def compare(tally, what, path, feeds, want, **tolerance):
    try:
        model = check(path)
    except Exception as e:
        return tally.bad(what, f"{type(e).__name__}: {str(e)[:300]}")
    try:
        got, engine = evaluate(path, model, feeds)
    except Exception as e:  # An error of an engine is a failure of our model, unless it is in LACKS.
        if any(lack in str(e) for lack in LACKS):
            tally.skipped += 1
            return None
        return tally.bad(what, f"{type(e).__name__}: {str(e)[:300]}")
    for info, g, w in zip(model.graph.output, got, want):
        why = differs(g, w, **tolerance)
        if why and engine == "reference" and ("bf16" in what or "bfloat16" in why):
            # The reference computes sums of half types in the half type, which is too inexact.
            tally.skipped += 1
            return None
        if why:
            return tally.bad(what, f"{engine}: {info.name}: {why}")
    return tally.ok(engine)


def op_table(tally, folder, limit):
    for case in sorted(p for p in folder.iterdir() if p.is_dir())[:limit]:
        names = [i.name for i in onnx.load(str(case / "model.onnx")).graph.input]
        feeds = dict(zip(names, data_of(case, "input", names)))
        compare(tally, f"op table/{case.name}", case / "model.onnx", feeds, [read(case / "test_data_set_0/output_0.pb")])


def export(source, target, *arguments):
    command = [os.environ["HALCYON_BIN"], "export", str(source), "-o", str(target), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def digits(tally, root, scratch):
    source = root / "models/digits.onnx"
    x = np.random.default_rng(3).random((5, 1, 8, 8), dtype=np.float32)
    session = onnxruntime.InferenceSession(str(source), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    want = session.run(None, {name: x})
    for k, arguments in enumerate([[], ["--opset", "26"], ["--external-data"], ["--input", "5x1x8x8"]]):
        target = scratch / f"digits{k}.onnx"
        done = export(source, target, *arguments)
        if done.returncode != 0:
            tally.bad(f"digits/{arguments}", done.stderr.strip()[-300:])
            continue
        if "--external-data" in arguments and not target.with_name(target.name + ".data").is_file():
            tally.bad(f"digits/{arguments}", "no external data was written")
        compare(tally, f"digits/{arguments}", target, {name: x}, want)


def conformance(tally, data, scratch, limit):
    for case in sorted(p for p in (data / "conformance").iterdir() if p.is_dir())[:limit]:
        target = scratch / "case.onnx"
        done = export(case / "model.onnx", target)
        if done.returncode == UNSUPPORTED:
            tally.skipped += 1
            continue
        if done.returncode != 0:
            tally.bad(f"conformance/{case.name}", f"exit {done.returncode}: {done.stderr.strip()[-300:]}")
            continue
        graph = onnx.load(str(target)).graph
        names, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
        feeds = dict(zip(names, data_of(case, "input", names)))
        tolerance = json.loads((case / "tolerance.json").read_text())
        want = data_of(case, "output", outputs)
        compare(tally, f"conformance/{case.name}", target, feeds, want, rtol=tolerance["rtol"], atol=max(tolerance["atol"], 1e-6))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=int)
    limit = parser.parse_args().limit
    root = pathlib.Path(__file__).resolve().parents[2]
    tally = Tally()
    with tempfile.TemporaryDirectory() as scratch, np.errstate(all="ignore"):
        scratch = pathlib.Path(scratch)
        exported = os.environ.get("HALCYON_EXPORTED")
        if exported and pathlib.Path(exported).is_dir():
            op_table(tally, pathlib.Path(exported), limit)
        else:
            print("the op table's models do not exist: run the tests first")
            tally.skipped += 1
        digits(tally, root, scratch)
        conformance(tally, pathlib.Path(os.environ["HALCYON_TESTDATA"]), scratch, limit)
    print("judged by", dict(tally.by))
    print(f"{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped")
    sys.exit(tally.failed > 0)


if __name__ == "__main__":
    main()
