#!/usr/bin/env python3
"""Whole models as conformance cases: what the `onnx` package stores, and models made here, with onnxruntime's outputs.

Needs numpy, onnx, onnxruntime.   Usage: gen_models.py OUT      writes
OUT/light/NAME    the nine light models of the onnx package with their stored outputs (weights are mostly constants)
OUT/random/NAME   the same graphs with seeded random weights of He's variance (2 / fan-in) and onnxruntime's outputs
OUT/shapes/NAME   eleven small graphs with the structure of common models, random weights and onnxruntime's outputs
each as {model.onnx, tolerance.json, test_data_set_0/{input,output}_N.pb}.

Outputs are compared with a relative tolerance of 1e-3, and of 1e-4 of the largest value where values are small. Where a result is
rounded to integers on the way (the quantised model), one step of the last scale is allowed.
"""
import json
import pathlib
import shutil
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test import loader
from onnx.backend.test.runner import Runner

SEED = 1811
RTOL = 1e-3
# The newest opset that onnxruntime 1.31 and every operator used here support.
OPSET = 20
IR = 10


def run(model, feeds):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def save(folder, model, feeds, outputs, atol=None):
    shutil.rmtree(folder, ignore_errors=True)
    sets = folder / "test_data_set_0"
    sets.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    stored = {t.name for t in model.graph.initializer}
    names = [i.name for i in model.graph.input if i.name not in stored]
    for k, name in enumerate(names):
        (sets / f"input_{k}.pb").write_bytes(numpy_helper.from_array(feeds[name], name).SerializeToString())
    for k, (port, y) in enumerate(zip(model.graph.output, outputs)):
        (sets / f"output_{k}.pb").write_bytes(numpy_helper.from_array(y, port.name).SerializeToString())
    if atol is None:
        floats = [np.abs(y).max() for y in outputs if y.dtype.kind == "f" and y.size]
        atol = 1e-4 * float(max(floats, default=0))
    (folder / "tolerance.json").write_text(json.dumps({"rtol": RTOL, "atol": float(atol)}))


# The light models.


def light_names():
    return sorted(p.stem for p in (pathlib.Path(loader.DATA_DIR) / "light").glob("*.onnx"))


def light_case(name, out):
    stored = pathlib.Path(loader.DATA_DIR) / "light"
    model = onnx.load(stored / f"{name}.onnx")
    weights = {t.name for t in model.graph.initializer}
    runner = Runner.__new__(Runner)
    feeds = {
        i.name: runner.generate_dummy_data(i, seed=0, name=name, random=False)
        for i in model.graph.input
        if i.name not in weights
    }
    expected = []
    for k in range(len(model.graph.output)):
        t = TensorProto()
        t.ParseFromString((stored / f"{name}_output_{k}.pb").read_bytes())
        expected.append(numpy_helper.to_array(t))
    save(out / name, model, feeds, expected)


def random_case(name, out, rng):
    """Replaces the weights of convolutions, products and batch normalisations by random ones."""
    model = onnx.load(pathlib.Path(loader.DATA_DIR) / "light" / f"{name}.onnx")
    graph = model.graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    shapes = {n.output[0]: tuple(stored[n.input[0]]) for n in graph.node if n.op_type == "ConstantOfShape"}
    weights = {k: v for k, v in stored.items()}
    for n in graph.node:
        if n.op_type == "ConstantOfShape":
            value = numpy_helper.to_array(n.attribute[0].t) if n.attribute else np.zeros(1, np.float32)
            weights[n.output[0]] = np.full(shapes[n.output[0]], value[0], value.dtype)
    for n in graph.node:
        if n.op_type in ("Conv", "Gemm", "MatMul"):
            transposed = any(a.name == "transB" and a.i for a in n.attribute)
            for k, name_in in enumerate(n.input[1:], 1):
                if name_in not in weights:
                    continue
                shape = weights[name_in].shape
                fan = np.prod(shape[1:]) if n.op_type == "Conv" or transposed else shape[0]
                scale = np.sqrt(2 / fan) if k == 1 else 0.1
                weights[name_in] = (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(np.float32)
        if n.op_type == "BatchNormalization":
            draw = [(1, 0.1), (0, 0.1), (0, 0.1), (1, 0.1)]
            for name_in, (mean, spread) in zip(n.input[1:], draw):
                v = mean + spread * rng.standard_normal(weights[name_in].shape)
                weights[name_in] = (np.abs(v) if mean else v).astype(np.float32)
    kept = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    used = {i for n in kept for i in n.input}
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept)
    graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items() if k in used)
    inputs = [i for i in graph.input if i.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, 4)
    feeds = {}
    for i in inputs:
        dims = [d.dim_value or 1 for d in i.type.tensor_type.shape.dim]
        feeds[i.name] = rng.standard_normal(dims, np.float32)
    save(out / name, model, feeds, run(model, feeds))


# Graphs made here.


class Net:
    """Builds a graph of nodes with unique names and of weights drawn from one generator."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.weights, self.inputs, self.outputs = [], [], [], []
        self.feeds = {}
        self.count = 0

    def name(self, op):
        self.count += 1
        return f"{op}_{self.count}"

    def op(self, op, *inputs, n=1, domain="", **attrs):
        out = [self.name(op) for _ in range(n)]
        ins = [i if isinstance(i, str) else self.const(i) for i in inputs]
        self.nodes.append(helper.make_node(op, ins, out, name=out[0], domain=domain, **attrs))
        return out[0] if n == 1 else out

    def const(self, v):
        v = np.asarray(v)
        if v.dtype == np.float64:
            v = v.astype(np.float32)
        name = self.name("c")
        self.weights.append(numpy_helper.from_array(v, name))
        return name

    def draw(self, *shape, scale=None):
        scale = scale if scale is not None else np.sqrt(1 / max(1, np.prod(shape[1:])))
        return self.const((self.rng.standard_normal(shape) * scale).astype(np.float32))

    def input(self, name, value, dims=None):
        t = helper.np_dtype_to_tensor_dtype(value.dtype)
        self.inputs.append(helper.make_tensor_value_info(name, t, dims or list(value.shape)))
        self.feeds[name] = value
        return name

    def output(self, value, name, t=TensorProto.FLOAT):
        self.nodes.append(helper.make_node("Identity", [value], [name]))
        self.outputs.append(helper.make_tensor_value_info(name, t, None))

    def floats(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def model(self):
        """The model, and its outputs for the feeds."""
        graph = helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.weights)
        m = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR)
        results = run(m, self.feeds)
        # Only the ranks of the outputs are declared.
        for port, y in zip(m.graph.output, results):
            for k in range(y.ndim):
                port.type.tensor_type.shape.dim.add().dim_param = f"{port.name}.{k}"
            port.type.tensor_type.shape.SetInParent()
        onnx.checker.check_model(m)
        return m, results

    # Layers.

    def linear(self, x, i, o, bias=True):
        y = self.op("MatMul", x, self.const((self.rng.standard_normal((i, o)) / np.sqrt(i)).astype(np.float32)))
        return self.op("Add", y, self.draw(o, scale=0.1)) if bias else y

    def norm(self, x, d):
        g, b = 1 + 0.1 * self.floats(d), 0.1 * self.floats(d)
        return self.op("LayerNormalization", x, g, b, axis=-1, epsilon=1e-5)

    def norm_parts(self, x, d):
        """Layer normalisation as older exporters write it."""
        mean = self.op("ReduceMean", x, np.array([-1]), keepdims=1)
        c = self.op("Sub", x, mean)
        var = self.op("ReduceMean", self.op("Pow", c, np.float32(2)), np.array([-1]), keepdims=1)
        y = self.op("Div", c, self.op("Sqrt", self.op("Add", var, np.float32(1e-12))))
        return self.op("Add", self.op("Mul", y, 1 + 0.1 * self.floats(d)), 0.1 * self.floats(d))

    def gelu_erf(self, x):
        y = self.op("Erf", self.op("Div", x, np.float32(np.sqrt(2))))
        return self.op("Mul", self.op("Mul", x, self.op("Add", y, np.float32(1))), np.float32(0.5))

    def gelu_tanh(self, x):
        cube = self.op("Pow", x, np.float32(3))
        inner = self.op("Add", x, self.op("Mul", cube, np.float32(0.044715)))
        t = self.op("Tanh", self.op("Mul", inner, np.float32(np.sqrt(2 / np.pi))))
        return self.op("Mul", self.op("Mul", x, np.float32(0.5)), self.op("Add", t, np.float32(1)))

    def heads(self, x, h, d):
        y = self.op("Reshape", x, np.array([0, -1, h, d // h]))
        return self.op("Transpose", y, perm=[0, 2, 1, 3])

    def attend(self, q, k, v, d, h, mask=None):
        s = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        s = self.op("Div", s, np.float32(np.sqrt(d // h)))
        if mask is not None:
            s = self.op("Add", s, mask)
        y = self.op("MatMul", self.op("Softmax", s, axis=-1), v)
        y = self.op("Transpose", y, perm=[0, 2, 1, 3])
        return self.op("Reshape", y, np.array([0, -1, d]))

    def block(self, x, d, h, act, mask=None):
        """Pre-norm transformer layer."""
        n = self.norm(x, d)
        q, k, v = (self.heads(self.linear(n, d, d), h, d) for _ in range(3))
        x = self.op("Add", x, self.linear(self.attend(q, k, v, d, h, mask), d, d))
        y = self.linear(act(self.linear(self.norm(x, d), d, 4 * d)), 4 * d, d)
        return self.op("Add", x, y)

    def conv(self, x, i, o, k=3, stride=1, groups=1, pad=None, norm=True):
        w = self.draw(o, i // groups, k, k, scale=np.sqrt(2 / (i // groups * k * k)))
        p = k // 2 if pad is None else pad
        bias = [] if norm else [self.draw(o, scale=0.1)]
        y = self.op("Conv", x, w, *bias, kernel_shape=[k, k], strides=[stride] * 2, pads=[p] * 4, group=groups)
        if norm:
            g, b = 1 + 0.1 * self.floats(o), 0.1 * self.floats(o)
            m, v = 0.1 * self.floats(o), np.abs(1 + 0.1 * self.floats(o)).astype(np.float32)
            y = self.op("BatchNormalization", y, g, b, m, v, epsilon=1e-5)
        return y

    def relu6(self, x):
        return self.op("Clip", x, np.float32(0), np.float32(6))

    def swish(self, x):
        return self.op("Mul", x, self.op("Sigmoid", x))

    def squeeze_excite(self, x, c, inner, act, gate):
        s = self.op("GlobalAveragePool", x)
        s = gate(self.conv(act(self.conv(s, c, inner, 1, norm=False)), inner, c, 1, norm=False))
        return self.op("Mul", x, s)

    def classify(self, x, c, classes):
        y = self.op("Flatten", self.op("GlobalAveragePool", x), axis=1)
        w = self.draw(classes, c)
        return self.op("Gemm", y, w, self.draw(classes, scale=0.1), transB=1)


def bert(n, d=64, h=4, vocab=100, places=32, layers=2):
    ids = n.input("input_ids", n.rng.integers(0, vocab, (2, 12)), ["batch", "seq"])
    mask = np.ones((2, 12), np.int64)
    mask[1, 7:] = 0
    mask = n.input("attention_mask", mask, ["batch", "seq"])
    types = n.input("token_type_ids", np.zeros((2, 12), np.int64), ["batch", "seq"])
    seq = n.op("Gather", n.op("Shape", ids), np.array(1), axis=0)
    rows, places = places, n.op("Slice", np.arange(places)[None], np.array([0]), n.op("Unsqueeze", seq, np.array([0])), np.array([1]))
    x = n.op("Add", n.op("Gather", n.draw(vocab, d, scale=1.0), ids), n.op("Gather", n.draw(2, d, scale=1.0), types))
    x = n.norm_parts(n.op("Add", x, n.op("Gather", n.draw(rows, d, scale=1.0), places)), d)
    m = n.op("Cast", n.op("Unsqueeze", mask, np.array([1, 2])), to=TensorProto.FLOAT)
    m = n.op("Mul", n.op("Sub", np.float32(1), m), np.float32(-1e4))
    for _ in range(layers):
        q, k, v = (n.heads(n.linear(x, d, d), h, d) for _ in range(3))
        x = n.norm_parts(n.op("Add", x, n.linear(n.attend(q, k, v, d, h, m), d, d)), d)
        x = n.norm_parts(n.op("Add", x, n.linear(n.gelu_erf(n.linear(x, d, 4 * d)), 4 * d, d)), d)
    n.output(x, "last_hidden_state")
    n.output(n.op("Tanh", n.linear(n.op("Gather", x, np.array(0), axis=1), d, d)), "pooler_output")


def gpt2(n):
    d, h, vocab, past = 48, 4, 90, 5
    ids = n.input("input_ids", n.rng.integers(0, vocab, (1, 7)), ["batch", "seq"])
    x = n.op("Gather", n.draw(vocab, d, scale=1.0), ids)
    seq = n.op("Squeeze", n.op("Shape", ids, start=1, end=2), np.array([0]))
    caches = []
    for layer in range(2):
        pair = [
            n.input(f"past.{layer}.{kv}", n.floats(1, h, past, d // h), ["batch", h, "past", d // h])
            for kv in ("key", "value")
        ]
        caches.append(pair)
    old = n.op("Squeeze", n.op("Shape", caches[0][0], start=2, end=3), np.array([0]))
    total = n.op("Add", old, seq)
    places = n.op("Range", old, total, np.array(1))
    x = n.op("Add", x, n.op("Gather", n.draw(64, d, scale=1.0), places))
    # A row attends to itself and to earlier rows.
    rows, cols = n.op("Unsqueeze", places, np.array([1])), n.op("Range", np.array(0), total, np.array(1))
    seen = n.op("LessOrEqual", n.op("Unsqueeze", cols, np.array([0])), rows)
    mask = n.op("Where", seen, np.float32(0), np.float32(np.finfo(np.float32).min))
    for layer, (pk, pv) in enumerate(caches):
        y = n.op("Split", n.linear(n.norm(x, d), d, 3 * d), n=3, axis=-1, num_outputs=3)
        q, k, v = (n.heads(t, h, d) for t in y)
        k, v = n.op("Concat", pk, k, axis=2), n.op("Concat", pv, v, axis=2)
        n.output(k, f"present.{layer}.key")
        n.output(v, f"present.{layer}.value")
        x = n.op("Add", x, n.linear(n.attend(q, k, v, d, h, mask), d, d))
        x = n.op("Add", x, n.linear(n.gelu_tanh(n.linear(n.norm(x, d), d, 4 * d)), 4 * d, d))
    n.output(n.linear(n.norm(x, d), d, vocab, bias=False), "logits")


def vit(n):
    d, h = 48, 3
    x = n.input("pixel_values", n.floats(2, 3, 32, 32), ["batch", 3, 32, 32])
    x = n.op("Conv", x, n.draw(d, 3, 8, 8), n.draw(d, scale=0.1), kernel_shape=[8, 8], strides=[8, 8])
    batch = n.op("Shape", x, start=0, end=1)
    x = n.op("Transpose", n.op("Reshape", x, np.array([0, d, -1])), perm=[0, 2, 1])
    cls = n.op("Expand", n.draw(1, 1, d, scale=1.0), n.op("Concat", batch, np.array([1, d]), axis=0))
    x = n.op("Add", n.op("Concat", cls, x, axis=1), n.draw(1, 17, d, scale=0.2))
    for _ in range(2):
        x = n.block(x, d, h, lambda y: n.op("Gelu", y))
    x = n.op("Gather", n.norm(x, d), np.array(0), axis=1)
    n.output(n.linear(x, d, 10), "logits")


def mobilenet_v2(n):
    x = n.input("x", n.floats(1, 3, 48, 48))
    x = n.relu6(n.conv(x, 3, 16, stride=2))
    c = 16
    for expand, out, stride in [(1, 8, 1), (6, 12, 2), (6, 12, 1), (6, 24, 2), (6, 24, 1)]:
        y, m = x, c * expand
        if expand > 1:
            y = n.relu6(n.conv(y, c, m, 1))
        y = n.relu6(n.conv(y, m, m, 3, stride, groups=m))
        y = n.conv(y, m, out, 1)
        x = n.op("Add", x, y) if stride == 1 and c == out else y
        c = out
    n.output(n.classify(n.relu6(n.conv(x, c, 64, 1)), 64, 10), "y")


def mobilenet_v3(n):
    hard = lambda y: n.op("HardSwish", y)
    gate = lambda y: n.op("HardSigmoid", y, alpha=1 / 6, beta=0.5)
    relu = lambda y: n.op("Relu", y)
    x = n.input("x", n.floats(1, 3, 48, 48))
    x, c = hard(n.conv(x, 3, 16, stride=2)), 16
    for k, m, out, se, act, stride in [(3, 16, 16, True, relu, 2), (3, 48, 24, False, relu, 1), (5, 72, 24, True, hard, 2), (5, 96, 24, True, hard, 1)]:
        y = act(n.conv(x, c, m, 1))
        y = act(n.conv(y, m, m, k, stride, groups=m))
        if se:
            y = n.squeeze_excite(y, m, m // 4, relu, gate)
        y = n.conv(y, m, out, 1)
        x = n.op("Add", x, y) if stride == 1 and c == out else y
        c = out
    n.output(n.classify(hard(n.conv(x, c, 96, 1)), 96, 10), "y")


def efficientnet(n):
    x = n.input("x", n.floats(2, 3, 40, 40), ["batch", 3, "h", "w"])
    x, c = n.swish(n.conv(x, 3, 16, stride=2)), 16
    for k, expand, out, stride in [(3, 1, 8, 1), (3, 6, 16, 2), (5, 6, 16, 1), (5, 6, 24, 2)]:
        m = c * expand
        y = n.swish(n.conv(x, c, m, 1)) if expand > 1 else x
        y = n.swish(n.conv(y, m, m, k, stride, groups=m))
        y = n.squeeze_excite(y, m, max(1, c // 4), n.swish, lambda t: n.op("Sigmoid", t))
        y = n.conv(y, m, out, 1)
        x = n.op("Add", x, y) if stride == 1 and c == out else y
        c = out
    n.output(n.op("Softmax", n.classify(n.swish(n.conv(x, c, 80, 1)), 80, 10), axis=-1), "y")


def unet(n):
    def twice(x, i, o):
        return n.op("Relu", n.conv(n.op("Relu", n.conv(x, i, o)), o, o))

    x = n.input("x", n.floats(1, 3, 32, 32), [1, 3, "h", "w"])
    a = twice(x, 3, 8)
    b = twice(n.op("MaxPool", a, kernel_shape=[2, 2], strides=[2, 2]), 8, 16)
    c = twice(n.op("MaxPool", b, kernel_shape=[2, 2], strides=[2, 2]), 16, 32)
    up = n.op("ConvTranspose", c, n.draw(32, 16, 2, 2, scale=0.2), n.draw(16, scale=0.1), kernel_shape=[2, 2], strides=[2, 2])
    b = twice(n.op("Concat", b, up, axis=1), 32, 16)
    up = n.op("Resize", b, "", np.array([1, 1, 2, 2], np.float32), mode="linear", coordinate_transformation_mode="half_pixel")
    a = twice(n.op("Concat", a, n.conv(up, 16, 8, 1), axis=1), 16, 8)
    n.output(n.op("Sigmoid", n.conv(a, 8, 1, 1, norm=False)), "mask")


def detector(n):
    """Decodes boxes from grids of two scales, applies non-maximum suppression, and gathers the chosen boxes."""
    classes = 4
    x = n.input("images", n.floats(1, 3, 64, 64))
    x = n.swish(n.conv(n.swish(n.conv(x, 3, 8, stride=2)), 8, 16, stride=2))
    small = n.swish(n.conv(x, 16, 32, stride=2))
    pool = [n.op("MaxPool", small, kernel_shape=[k, k], strides=[1, 1], pads=[k // 2] * 4) for k in (3, 5)]
    small = n.swish(n.conv(n.op("Concat", small, *pool, axis=1), 96, 32, 1))
    up = n.op("Resize", small, "", np.array([1, 1, 2, 2], np.float32), mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    large = n.swish(n.conv(n.op("Concat", up, x, axis=1), 48, 24))
    boxes, scores = [], []
    for f, c, side, stride in [(large, 24, 16, 4), (small, 32, 8, 8)]:
        y = n.conv(f, c, 5 + classes, 1, norm=False)
        y = n.op("Transpose", n.op("Reshape", y, np.array([1, 5 + classes, -1])), perm=[0, 2, 1])
        xy, wh, rest = n.op("Split", y, np.array([2, 2, 1 + classes]), n=3, axis=-1)
        grid = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(1, -1, 2).astype(np.float32)
        centre = n.op("Mul", n.op("Add", n.op("Sigmoid", xy), grid), np.float32(stride))
        size = n.op("Mul", n.op("Exp", n.op("Clip", wh, np.float32(-2), np.float32(2))), np.float32(2 * stride))
        boxes.append(n.op("Concat", centre, size, axis=-1))
        p = n.op("Sigmoid", rest)
        scores.append(n.op("Mul", n.op("Slice", p, np.array([0]), np.array([1]), np.array([2])), n.op("Slice", p, np.array([1]), np.array([1 + classes]), np.array([2]))))
    boxes, scores = n.op("Concat", *boxes, axis=1), n.op("Concat", *scores, axis=1)
    chosen = n.op("NonMaxSuppression", boxes, n.op("Transpose", scores, perm=[0, 2, 1]), np.array([6]), np.array([0.4], np.float32), np.array([0.3], np.float32), center_point_box=1)
    rows = n.op("Gather", chosen, np.array(2), axis=1)
    n.output(chosen, "selected", TensorProto.INT64)
    n.output(n.op("Gather", n.op("Squeeze", boxes, np.array([0])), rows, axis=0), "boxes")
    n.output(n.op("ReduceMax", n.op("Gather", n.op("Squeeze", scores, np.array([0])), rows, axis=0), np.array([1]), keepdims=0), "confidence")


def lstm_tagger(n):
    vocab, e, hid, tags = 50, 16, 24, 7
    ids = n.input("tokens", n.rng.integers(0, vocab, (9, 3)), ["seq", "batch"])
    lens = n.input("lengths", np.array([9, 6, 4], np.int32), ["batch"])
    x = n.op("Gather", n.draw(vocab, e, scale=1.0), ids)
    for width in (e, 2 * hid):
        w, r = n.draw(2, 4 * hid, width, scale=0.2), n.draw(2, 4 * hid, hid, scale=0.2)
        y = n.op("LSTM", x, w, r, n.draw(2, 8 * hid, scale=0.1), lens, n=3, hidden_size=hid, direction="bidirectional")[0]
        x = n.op("Reshape", n.op("Transpose", y, perm=[0, 2, 1, 3]), np.array([0, 0, -1]))
    logits = n.linear(x, 2 * hid, tags)
    n.output(n.op("LogSoftmax", logits, axis=-1), "scores")
    n.output(n.op("ArgMax", logits, axis=-1, keepdims=0), "tags", TensorProto.INT64)


def quantised_resnet(n):
    """Activations are u8; weights are i8, with a scale per channel. One block uses QLinearConv, one dequantises, and the head multiplies integers."""
    # Weights have 7 bits: on processors without VNNI, onnxruntime adds pairs of products in 16 bits, which
    # saturate if weights have 8 bits.
    most = 63

    def weight(o, i, k):
        w = n.rng.standard_normal((o, i, k, k)) * np.sqrt(2 / (i * k * k))
        s = (np.abs(w).max(axis=(1, 2, 3)) / most).astype(np.float32)
        return np.clip(np.round(w / s[:, None, None, None]), -most, most).astype(np.int8), s

    xs, zp = np.float32(0.04), np.uint8(128)

    def qconv(x, i, o, k=3, stride=1):
        w, s = weight(o, i, k)
        bias = np.round(0.1 * n.floats(o) / (xs * s)).astype(np.int32)
        return n.op("QLinearConv", x, xs, zp, w, s, np.zeros(o, np.int8), xs, zp, bias, kernel_shape=[k, k], strides=[stride] * 2, pads=[k // 2] * 4)

    def dq(x):
        return n.op("DequantizeLinear", x, xs, zp)

    def q(x):
        return n.op("QuantizeLinear", x, xs, zp)

    x = q(n.input("x", n.floats(1, 3, 32, 32)))
    x = q(n.op("Relu", dq(qconv(x, 3, 16, stride=2))))
    y = q(n.op("Relu", dq(qconv(x, 16, 16))))
    x = q(n.op("Relu", n.op("Add", dq(qconv(y, 16, 16)), dq(x))))
    w, s = weight(32, 16, 3)
    wf = n.op("DequantizeLinear", w, s, np.zeros(32, np.int8), axis=0)
    y = n.op("Conv", dq(x), wf, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    x = q(n.op("Relu", y))
    pooled = n.op("Flatten", n.op("GlobalAveragePool", dq(x)), axis=1)
    u, us, uz = n.op("DynamicQuantizeLinear", pooled, n=3)
    w = n.rng.integers(-most, most + 1, (32, 10)).astype(np.int8)
    acc = n.op("Cast", n.op("MatMulInteger", u, w, uz), to=TensorProto.FLOAT)
    n.output(n.op("Mul", acc, n.op("Mul", us, np.float32(0.01))), "logits")


def whisper_encoder(n):
    d, h, mels, frames = 48, 4, 20, 60
    x = n.input("mel", n.floats(1, mels, frames), ["batch", mels, frames])
    for i, stride in ((mels, 1), (d, 2)):
        x = n.op("Conv", x, n.draw(d, i, 3), n.draw(d, scale=0.1), kernel_shape=[3], strides=[stride], pads=[1, 1])
        x = n.op("Gelu", x)
    t = frames // 2
    angle = np.arange(t)[:, None] * np.exp(-np.log(1e4) / (d // 2 - 1) * np.arange(d // 2))
    places = np.concatenate([np.sin(angle), np.cos(angle)], 1).astype(np.float32)
    x = n.op("Add", n.op("Transpose", x, perm=[0, 2, 1]), places)
    for _ in range(2):
        x = n.block(x, d, h, lambda y: n.op("Gelu", y))
    n.output(n.norm(x, d), "encoded")


SHAPES = [bert, gpt2, vit, mobilenet_v2, mobilenet_v3, efficientnet, unet, detector, lstm_tagger, quantised_resnet, whisper_encoder]
# One step of the quantised model's logits, since values near the middle of two steps may be rounded either
# way.
ATOL = {"quantised_resnet": 0.05}


def main(out):
    for name in light_names():
        light_case(name, out / "light")
        random_case(name, out / "random", np.random.default_rng([SEED, len(name)]))
    for k, make in enumerate(SHAPES):
        net = Net([SEED, k])
        make(net)
        model, results = net.model()
        save(out / "shapes" / make.__name__, model, net.feeds, results, ATOL.get(make.__name__))
    for kind in sorted(p for p in out.iterdir() if p.is_dir()):
        print(kind.name, sum(1 for _ in kind.iterdir()), "models")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
