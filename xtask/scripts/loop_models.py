#!/usr/bin/env python3
"""Writes the loops of `cargo xtask bench loops`, as ONNX models with random weights from a fixed seed.

Usage: loop_models.py OUT

Writes OUT/loop_NAME.onnx for each of CASES, and two variants of count_1x64 with 1,000 and 100,000 iterations. The
input is x.
"""
import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

# Name: rows and columns of the state, pairs of MatMul and Tanh in the body, iterations, and what ends the
# loop. With "count", the body compares the number of the iteration with a constant; with "data", it compares
# the sum of the state's squares with a constant; with "trips", there is only a constant trip count. "rows" is
# "count" with a second result, which keeps the state of every iteration.
CASES = {
    "count_4x4": (4, 4, 2, 10_000, "count"),
    "count_16x16": (16, 16, 2, 10_000, "count"),
    "count_64x64": (64, 64, 2, 10_000, "count"),
    "count_1x64": (1, 64, 2, 10_000, "count"),
    "data_1x64": (1, 64, 2, 10_000, "data"),
    "rows_1x64": (1, 64, 2, 10_000, "rows"),
    "trips_1x64": (1, 64, 2, 10_000, "trips"),
    "trips_16x16": (16, 16, 2, 10_000, "trips"),
    "long_1x64": (1, 64, 50, 3_000, "count"),
    "long_16x16": (16, 16, 50, 3_000, "count"),
    "longtrips_16x16": (16, 16, 50, 3_000, "trips"),
}


def model(rows, columns, pairs, iterations, kind):
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(np.array(iterations, np.int64), "n"), numpy_helper.from_array(np.array(1, np.int64), "one")]
    nodes, v = [], "v"
    for k in range(pairs):
        w = rng.standard_normal((columns, columns), dtype=np.float32) / np.sqrt(columns)
        weights.append(numpy_helper.from_array(w.astype(np.float32), f"w{k}"))
        nodes.append(helper.make_node("MatMul", [v, f"w{k}"], [f"m{k}"]))
        nodes.append(helper.make_node("Tanh", [f"m{k}"], [f"t{k}"]))
        v = f"t{k}"
    if kind == "trips":
        nodes.append(helper.make_node("Identity", ["go"], ["on"]))
    elif kind == "data":
        # The trip count always ends the loop before the sum reaches the limit, but no runtime can know that.
        weights.append(numpy_helper.from_array(np.array(1e9, np.float32), "limit"))
        nodes += [
            helper.make_node("ReduceSumSquare", [v], ["s"], keepdims=0),
            helper.make_node("Less", ["s", "limit"], ["on"]),
        ]
    else:
        nodes += [helper.make_node("Add", ["i", "one"], ["next"]), helper.make_node("Less", ["next", "n"], ["on"])]
    state = [rows, columns]
    tensor = helper.make_tensor_value_info
    outputs = [tensor("on", TensorProto.BOOL, []), tensor(v, TensorProto.FLOAT, state)]
    results = ["y"]
    if kind == "rows":
        nodes.append(helper.make_node("Identity", [v], ["row"]))
        outputs.append(tensor("row", TensorProto.FLOAT, state))
        results.append("rows")
    inputs = [tensor("i", TensorProto.INT64, []), tensor("go", TensorProto.BOOL, []), tensor("v", TensorProto.FLOAT, state)]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    trip = "n" if kind in ("trips", "data") else ""
    loop = helper.make_node("Loop", [trip, "", "x"], results, body=body)
    ys = [tensor("y", TensorProto.FLOAT, state)]
    if kind == "rows":
        ys.append(tensor("rows", TensorProto.FLOAT, [None, *state]))
    graph = helper.make_graph([loop], "loops", [tensor("x", TensorProto.FLOAT, state)], ys, weights)
    m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    m.ir_version = 8
    onnx.checker.check_model(m)
    return m


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        (out / f"loop_{name}.onnx").write_bytes(model(*case).SerializeToString())
    # For comparing the memory: a tenth of the iterations, and ten times as many.
    for n in (1_000, 100_000):
        (out / f"loop_count_1x64_{n}.onnx").write_bytes(model(1, 64, 2, n, "count").SerializeToString())


if __name__ == "__main__":
    main()
