#!/usr/bin/env python3
"""Writes the models of `cargo xtask bench peers`: common architectures with random weights from a fixed seed.
The batch size is a symbol, and so is MiniLM's sequence length.

Usage: peer_models.py OUT

Writes OUT/resnet50.onnx (input: image [batch, 3, 224, 224]) and OUT/minilm.onnx (inputs: token ids, attention
mask and token types, each [batch, seq]).
"""
import pathlib
import sys

import numpy as np

import gen_models as gen


def resnet50(n):
    x = n.input("image", n.floats(1, 3, 224, 224), ["batch", 3, 224, 224])
    x = n.op("Relu", n.conv(x, 3, 64, 7, stride=2))
    x = n.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    c = 64
    for stage, blocks in enumerate([3, 4, 6, 3]):
        width = 64 << stage
        for k in range(blocks):
            stride = 2 if stage > 0 and k == 0 else 1
            y = n.op("Relu", n.conv(x, c, width, 1, pad=0))
            y = n.op("Relu", n.conv(y, width, width, 3, stride=stride))
            y = n.conv(y, width, 4 * width, 1, pad=0)
            x = n.conv(x, c, 4 * width, 1, stride=stride, pad=0) if k == 0 else x
            c = 4 * width
            x = n.op("Relu", n.op("Add", y, x))
    n.output(n.op("Softmax", n.classify(x, c, 1000), axis=-1), "probabilities")


def minilm(n):
    gen.bert(n, d=384, h=12, vocab=30522, places=512, layers=6)


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, build in [("resnet50", resnet50), ("minilm", minilm)]:
        net = gen.Net(gen.SEED)
        build(net)
        model, _ = net.model()
        (out / f"{name}.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
