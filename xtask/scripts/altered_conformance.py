#!/usr/bin/env python3
"""Conformance cases from the ONNX node test suite, and a copy in which exactly fifty expectations are wrong.

Needs numpy, onnx.   Usage: altered_conformance.py OUT

OUT/conformance/CASE/{model.onnx, tolerance.json, test_data_set_0/{input,output}_N.pb}: the node cases made only of
the operators below, on the element types below, that meet the other conditions of `suitable`.
OUT/conformance_altered/: the same cases; in fifty of them one element of the first output is changed by at least 1.
OUT/conformance_altered.txt: the names of those fifty, one per line.
"""
import json
import pathlib
import shutil
import sys

import numpy as np
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node

SEED = 50
ALTERED = 50
# The operators of mnist, SqueezeNet and the MiniLM encoder, and some related ones.
OPERATORS = set(
    """Add And BatchNormalization Cast Clip Concat Constant ConstantOfShape Conv Div Dropout Equal Erf Expand Flatten Gather
    GatherElements Gemm GlobalAveragePool GreaterOrEqual LayerNormalization LogSoftmax MatMul MaxPool Mul Range ReduceL2
    ReduceSum Relu Reshape Shape Slice Softmax Sqrt Squeeze Sub Tanh Transpose Unsqueeze Where""".split()
)
# The newest opset that onnxruntime 1.31 loads, so that every case can be checked with a second engine.
NEWEST_OPSET = 26
TYPES = {TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL}


def suitable(case):
    graph = case.model.graph
    tensors = [value.type.tensor_type.elem_type for value in list(graph.input) + list(graph.output)]
    return (
        all(n.op_type in OPERATORS and n.domain in ("", "ai.onnx") for n in graph.node)
        and not case.model.functions
        and all(o.version <= NEWEST_OPSET for o in case.model.opset_import)
        and all(kind in TYPES for kind in tensors)
        and "training" not in case.name
        and not any(n.op_type == "Dropout" and len(n.input) == 3 for n in graph.node)
        and len(case.data_sets) == 1
    )


def tensor(value, name):
    if isinstance(value, TensorProto):
        return value
    return numpy_helper.from_array(np.asarray(value), name)


def write(case, folder):
    data = folder / "test_data_set_0"
    data.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(case.model.SerializeToString())
    (folder / "tolerance.json").write_text(json.dumps({"rtol": case.rtol, "atol": case.atol}))
    inputs, outputs = case.data_sets[0]
    for kind, values, infos in (("input", inputs, case.model.graph.input), ("output", outputs, case.model.graph.output)):
        for i, (value, info) in enumerate(zip(values, infos)):
            (data / f"{kind}_{i}.pb").write_bytes(tensor(value, info.name).SerializeToString())


def alter(folder, rng):
    """Changes one finite element of the first output. Returns False if that output is not a float tensor, or
    if it has no finite element."""
    path = folder / "test_data_set_0" / "output_0.pb"
    proto = TensorProto.FromString(path.read_bytes())
    if proto.data_type != TensorProto.FLOAT:
        return False
    value = numpy_helper.to_array(proto).copy()
    finite = np.flatnonzero(np.isfinite(value))
    if finite.size == 0:
        return False
    at = rng.choice(finite)
    value.flat[at] += max(1.0, abs(float(value.flat[at])))
    path.write_bytes(numpy_helper.from_array(value, proto.name).SerializeToString())
    return True


def main(out):
    plain, altered = out / "conformance", out / "conformance_altered"
    for folder in (plain, altered):
        shutil.rmtree(folder, ignore_errors=True)
    with np.errstate(all="ignore"):  # the suite's generators overflow and divide by zero on purpose
        cases = [c for c in node.collect_testcases(None) if c.model is not None and c.data_sets and suitable(c)]
    cases.sort(key=lambda case: case.name)
    for case in cases:
        write(case, plain / case.name)
        write(case, altered / case.name)
    rng = np.random.default_rng(SEED)
    names = []
    for i in rng.permutation(len(cases)):
        if len(names) < ALTERED and alter(altered / cases[i].name, rng):
            names.append(cases[i].name)
    changed = [c.name for c in cases if differ(plain / c.name, altered / c.name)]
    if len(names) != ALTERED or changed != sorted(names):
        sys.exit(f"altered {len(names)} cases, and {len(changed)} cases differ; expected {ALTERED}")
    (out / "conformance_altered.txt").write_text("".join(f"{name}\n" for name in sorted(names)))
    print(f"conformance: {len(cases)} cases, {len(names)} altered in the copy")


def differ(a, b):
    return any(path.read_bytes() != (b / path.relative_to(a)).read_bytes() for path in a.rglob("*.*") if path.is_file())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
