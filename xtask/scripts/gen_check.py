#!/usr/bin/env python3
"""Models for `halcyon-check`, as conformance cases. Their weights are too large to carry, so a case has no file of weights:
`halcyon-check` generates the file on the machine that it checks, by the same formula as here (`crates/halcyon-check/src/data.rs`).
onnxruntime computes the outputs.

Needs numpy, onnx, onnxruntime.   Usage: gen_check.py [MINILM.onnx] OUT      writes
OUT/light_resnet50   the ResNet-50 of the onnx package
OUT/minilm           the all-MiniLM-L6-v2 graph, if its file is given and exists
each as {model.onnx, weights.json, tolerance.json, test_data_set_0/{input,output}_N.pb}.
"""
import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper
from onnx.backend.test import loader

RTOL = 1e-3
SMALL = 64


def unit(seed, n):
    """`n` numbers in [0, 1) of 24 bits each."""
    x = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32((seed * 0x85EBCA6B) & 0xFFFFFFFF)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float64) / (1 << 24)


class Weights:
    """A file of random numbers, and the list of the tensors in it."""

    def __init__(self):
        self.tensors, self.bytes = [], 0

    def add(self, shape, low, high):
        count = int(np.prod(shape))
        one = {"offset": self.bytes, "count": count, "seed": len(self.tensors) + 1, "low": float(low), "high": float(high)}
        self.tensors.append(one)
        self.bytes += count * 4
        return one

    def initializer(self, name, shape, low, high):
        one = self.add(shape, low, high)
        t = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
        for k, v in [("location", "weights.bin"), ("offset", one["offset"]), ("length", one["count"] * 4)]:
            t.external_data.add(key=k, value=str(v))
        return t

    def save(self, folder):
        text = {"file": "weights.bin", "bytes": self.bytes, "tensors": self.tensors}
        (folder / "weights.json").write_text(json.dumps(text))

    def fill(self, path):
        with open(path, "wb") as f:
            for t in self.tensors:
                v = t["low"] + (t["high"] - t["low"]) * unit(t["seed"], t["count"])
                f.write(v.astype(np.float32).tobytes())


def save(folder, model, weights, feeds):
    shutil.rmtree(folder, ignore_errors=True)
    sets = folder / "test_data_set_0"
    sets.mkdir(parents=True)
    data = model.SerializeToString()
    (folder / "model.onnx").write_bytes(data)
    weights.save(folder)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        (work / "model.onnx").write_bytes(data)
        weights.fill(work / "weights.bin")
        session = onnxruntime.InferenceSession(str(work / "model.onnx"), options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, feeds)
    assert all(np.isfinite(y).all() and np.ptp(y) > 0 for y in outputs), folder
    for k, (name, x) in enumerate(feeds.items()):
        (sets / f"input_{k}.pb").write_bytes(numpy_helper.from_array(x, name).SerializeToString())
    for k, (port, y) in enumerate(zip(model.graph.output, outputs)):
        (sets / f"output_{k}.pb").write_bytes(numpy_helper.from_array(y, port.name).SerializeToString())
    atol = 1e-4 * max(float(np.abs(y).max()) for y in outputs)
    (folder / "tolerance.json").write_text(json.dumps({"rtol": RTOL, "atol": atol}))


def layers(graph):
    """For each weight, the node that reads it and the index of the operand."""
    return {name: (n, k) for n in graph.node for k, name in enumerate(n.input) if k > 0}


def range_of(shape, reader):
    """The range of uniform weights. For products and convolutions it is ±sqrt(6 / fan-in), which keeps the
    variance of activations (He et al. 2015)."""
    node, k = reader
    if node.op_type == "BatchNormalization":
        return [(0.8, 1.2), (-0.1, 0.1), (-0.1, 0.1), (0.8, 1.2)][k - 1]
    if node.op_type in ("Conv", "Gemm", "MatMul") and len(shape) > 1:
        transposed = any(a.name == "transB" and a.i for a in node.attribute)
        fan = np.prod(shape[1:]) if node.op_type == "Conv" or transposed else shape[-2]
        bound = np.sqrt(6 / fan)
        return -bound, bound
    return -0.1, 0.1


def resnet(out):
    model = onnx.load(pathlib.Path(loader.DATA_DIR) / "light" / "light_resnet50.onnx")
    graph, w = model.graph, Weights()
    stored = {t.name: t for t in graph.initializer}
    made = {n.output[0]: tuple(numpy_helper.to_array(stored[n.input[0]])) for n in graph.node if n.op_type == "ConstantOfShape"}
    read = layers(graph)
    kept = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    used = {i for n in kept for i in n.input}
    weights = []
    for name in [*made, *stored]:
        if name not in used:
            continue
        shape = tuple(int(d) for d in made.get(name, stored[name].dims if name in stored else ()))
        floats = name in made or stored[name].data_type == TensorProto.FLOAT
        if floats and np.prod(shape) > SMALL / 8:
            weights.append(w.initializer(name, shape, *range_of(shape, read[name])))
        else:
            weights.append(stored[name])
    inputs = [i for i in graph.input if i.name not in made and i.name not in stored]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(kept)
    graph.initializer.extend(weights)
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    dims = [d.dim_value or 1 for d in inputs[0].type.tensor_type.shape.dim]
    x = (unit(0, int(np.prod(dims))) * 2 - 1).astype(np.float32).reshape(dims)
    save(out / "light_resnet50", model, w, {inputs[0].name: x})


def minilm(path, out):
    model = onnx.load(path, load_external_data=False)
    graph, w = model.graph, Weights()
    read = layers(graph)
    for i, t in enumerate(graph.initializer):
        if t.data_location != TensorProto.EXTERNAL:
            continue
        assert t.data_type == TensorProto.FLOAT, t.name
        shape = tuple(t.dims)
        low, high = range_of(shape, read[t.name]) if t.name in read else (-0.1, 0.1)
        if "LayerNorm" in t.name and t.name.endswith("weight"):
            low, high = 0.8, 1.2
        graph.initializer[i].CopyFrom(w.initializer(t.name, shape, low, high))
    n = 12
    ids = np.array([[101, *(1000 + 7919 * k % 20000 for k in range(n - 2)), 102]], np.int64)
    names = [i.name for i in graph.input]
    save(out / "minilm", model, w, dict(zip(names, [ids, np.ones_like(ids)])))


def main():
    *given, out = sys.argv[1:]
    out = pathlib.Path(out)
    resnet(out)
    for path in given:
        if pathlib.Path(path).is_file():
            minilm(path, out)
        else:
            print(f"{path} does not exist: MiniLM is left out")


main()
