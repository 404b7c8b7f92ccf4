#!/usr/bin/env python3
"""SqueezeNet 1.1 with random weights, an input, and onnxruntime's output for this input.

Needs numpy, onnx, onnxruntime.   Usage: gen_squeezenet.py OUT      writes OUT/{model.onnx, input.npy, output.npy}

The `onnx` package has SqueezeNet's graph with most weights as `ConstantOfShape`, so that the file stays
small. Here every such node becomes an initializer drawn from a seeded normal distribution with He's variance
(2 / fan-in). In a network of rectifiers this variance keeps the size of activations about equal from layer to
layer. Biases are drawn with a standard deviation of 0.1. The graph is not changed otherwise; it stays at
opset 9, where Softmax flattens its input to two dimensions.
The last convolution's weights are then scaled so that the logits have a standard deviation of 1: the
probabilities differ by class, and none of them is close to 1.
"""
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper
from onnx.backend.test import loader

SEED = 20


def initializers(model, rng):
    """Replaces the generated constants and stored biases of `model` by drawn values; returns name -> array."""
    graph = model.graph
    stored = {t.name: numpy_helper.to_array(t) for t in graph.initializer}
    shapes = {n.output[0]: tuple(stored[n.input[0]]) for n in graph.node if n.op_type == "ConstantOfShape"}
    weights = {}
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        for name in node.input[1:]:
            shape = shapes.get(name) or stored[name].shape
            scale = np.sqrt(2 / np.prod(shape[1:])) if len(shape) == 4 else 0.1
            weights[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    kept = [n for n in graph.node if n.op_type != "ConstantOfShape"]
    del graph.node[:]
    graph.node.extend(kept)
    used = {name for n in kept for name in n.input}
    inputs = [i for i in graph.input if i.name in used and i.name not in weights]
    del graph.input[:]
    graph.input.extend(inputs)
    return weights


def with_weights(model, weights):
    del model.graph.initializer[:]
    model.graph.initializer.extend(numpy_helper.from_array(v, k) for k, v in weights.items())
    return model.SerializeToString()


def infer(model_bytes, x):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(SEED)
    model = onnx.load(str(pathlib.Path(loader.DATA_DIR) / "light" / "light_squeezenet.onnx"))
    weights = initializers(model, rng)
    model.ir_version = 8  # from 4 on, an initializer need not be a graph input too
    x = rng.standard_normal((1, 3, 224, 224)).astype(np.float32)

    # log p differs from the logits only by a constant, which does not change the standard deviation.
    spread = float(np.log(infer(with_weights(model, weights), x).astype(np.float64)).std())
    last = [n for n in model.graph.node if n.op_type == "Conv"][-1]
    for name in last.input[1:]:
        weights[name] = (weights[name] / spread).astype(np.float32)

    data = with_weights(model, weights)
    onnx.checker.check_model(onnx.load_from_string(data), full_check=True)
    y = infer(data, x)
    (out / "model.onnx").write_bytes(data)
    np.save(out / "input.npy", x)
    np.save(out / "output.npy", y)
    print(f"squeezenet: logit spread {spread:.3f} -> {np.log(y).std():.3f}, largest probability {y.max():.4f} of {y.size}")
    if not (np.isfinite(y).all() and 0.002 < y.max() < 0.5):
        sys.exit("the output is saturated or flat: a wrong implementation could compute the same output")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
