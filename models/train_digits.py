#!/usr/bin/env python3
"""Train the digit classifier that ships as models/digits.onnx and write every file beside this script.

Usage: train_digits.py [OUTPUT_DIR]

Needs `pip install numpy scikit-learn onnx` and less than a minute on two CPU cores. The random seed is fixed, so the
same library versions on the same kind of CPU give the same files.

Data:   scikit-learn's digits (1,797 grey images, 8x8, values 0..16), split 1,437 / 360 by a seeded permutation.
Input:  `image` float32 [batch, 1, 8, 8], values 0..1 (a grey image divided by 255).
Output: `probabilities` float32 [batch, 10].
Net:    conv 3x3x16, relu, max-pool 2, conv 3x3x32, relu, max-pool 2, flatten, linear 128 -> 10, softmax.

The training loop uses only NumPy. A convolution is a matrix product over unfolded patches. The optimizer is Adam with
a cosine schedule. Each image is shifted at random by up to one pixel.
"""
import pathlib
import struct
import sys
import zlib

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SEED = 1798
TRAIN = 1437
EPOCHS = 150
BATCH = 64
LEARNING_RATE = 4e-3
CLASSES = 10


def load():
    """(images u8 [n, 8, 8] in 0..16, labels u8 [n]), shuffled with the seed."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(SEED).permutation(len(digits.target))
    return digits.images[order].astype(np.uint8), digits.target[order].astype(np.uint8)


def as_input(images):
    """The input that a program computes from an 8-bit image: pixel / 255, where pixel = round(value * 255 / 16)."""
    return (to_pixels(images).astype(np.float32) / np.float32(255))[:, None, :, :]


def to_pixels(images):
    return np.round(images.astype(np.float64) * 255 / 16).astype(np.uint8)


def unfold(x):
    """[n, c, h, w] -> [n, h, w, c*9]: the 3x3 patch around every pixel, zero outside."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    n, c, h, w = x.shape
    return np.ascontiguousarray(windows.transpose(0, 2, 3, 1, 4, 5)).reshape(n, h, w, c * 9)


def fold(patches, c):
    """The transpose of `unfold`: adds every patch back to the pixels it was taken from."""
    n, h, w, _ = patches.shape
    patches = patches.reshape(n, h, w, c, 3, 3)
    padded = np.zeros((n, c, h + 2, w + 2), patches.dtype)
    for i in range(3):
        for j in range(3):
            padded[:, :, i : i + h, j : j + w] += patches[..., i, j].transpose(0, 3, 1, 2)
    return padded[:, :, 1:-1, 1:-1]


def conv(x, weight, bias):
    patches = unfold(x)
    out = patches @ weight.reshape(len(weight), -1).T + bias
    return out.transpose(0, 3, 1, 2), patches


def conv_gradient(grad, patches, weight, channels):
    flat = grad.transpose(0, 2, 3, 1)
    rows = flat.reshape(-1, len(weight))
    grad_weight = (rows.T @ patches.reshape(len(rows), -1)).reshape(weight.shape)
    return fold(flat @ weight.reshape(len(weight), -1), channels), grad_weight, rows.sum(0)


def pool(x):
    """2x2 max-pool; also the index (0..3) of each maximum."""
    n, c, h, w = x.shape
    blocks = x.reshape(n, c, h // 2, 2, w // 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, h // 2, w // 2, 4)
    index = blocks.argmax(-1)
    return np.take_along_axis(blocks, index[..., None], -1)[..., 0], index


def pool_gradient(grad, index):
    n, c, h, w = grad.shape
    blocks = np.zeros((n, c, h, w, 4), grad.dtype)
    np.put_along_axis(blocks, index[..., None], grad[..., None], -1)
    return blocks.reshape(n, c, h, w, 2, 2).transpose(0, 1, 2, 4, 3, 5).reshape(n, c, 2 * h, 2 * w)


def initial(rng):
    def he(*shape):
        return (rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32)

    return {
        "conv1.weight": he(16, 1, 3, 3),
        "conv1.bias": np.zeros(16, np.float32),
        "conv2.weight": he(32, 16, 3, 3),
        "conv2.bias": np.zeros(32, np.float32),
        "linear.weight": he(CLASSES, 128),
        "linear.bias": np.zeros(CLASSES, np.float32),
    }


def forward(p, x):
    z1, patches1 = conv(x, p["conv1.weight"], p["conv1.bias"])
    h1, index1 = pool(np.maximum(z1, 0))
    z2, patches2 = conv(h1, p["conv2.weight"], p["conv2.bias"])
    h2, index2 = pool(np.maximum(z2, 0))
    flat = h2.reshape(len(x), -1)
    logits = flat @ p["linear.weight"].T + p["linear.bias"]
    exp = np.exp(logits - logits.max(1, keepdims=True))
    return exp / exp.sum(1, keepdims=True), (z1, patches1, index1, z2, patches2, index2, h2.shape, flat)


def gradients(p, x, labels):
    """Mean cross entropy and its gradient for every parameter."""
    probabilities, (z1, patches1, index1, z2, patches2, index2, shape, flat) = forward(p, x)
    rows = np.arange(len(x))
    loss = -np.log(np.maximum(probabilities[rows, labels], 1e-12)).mean()
    grad = probabilities.copy()
    grad[rows, labels] -= 1
    grad /= len(x)
    g = {"linear.weight": grad.T @ flat, "linear.bias": grad.sum(0)}
    grad = pool_gradient((grad @ p["linear.weight"]).reshape(shape), index2) * (z2 > 0)
    grad, g["conv2.weight"], g["conv2.bias"] = conv_gradient(grad, patches2, p["conv2.weight"], 16)
    grad = pool_gradient(grad, index1) * (z1 > 0)
    _, g["conv1.weight"], g["conv1.bias"] = conv_gradient(grad, patches1, p["conv1.weight"], 1)
    return loss, g


def shifted(x, rng):
    """Every image moved by -1, 0 or 1 pixels in each direction."""
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = np.empty_like(x)
    for i, (dy, dx) in enumerate(rng.integers(0, 3, (len(x), 2))):
        out[i] = padded[i, :, dy : dy + 8, dx : dx + 8]
    return out


def accuracy(p, x, labels):
    return float((forward(p, x)[0].argmax(1) == labels).mean())


def train(x, labels, test_x, test_labels):
    rng = np.random.default_rng(SEED)
    p = initial(rng)
    mean = {k: np.zeros_like(v) for k, v in p.items()}
    square = {k: np.zeros_like(v) for k, v in p.items()}
    batches = len(x) // BATCH
    step = 0
    for epoch in range(EPOCHS):
        order = rng.permutation(len(x))
        total = 0.0
        for b in range(batches):
            rows = order[b * BATCH : (b + 1) * BATCH]
            loss, g = gradients(p, shifted(x[rows], rng), labels[rows])
            total += loss
            step += 1
            rate = LEARNING_RATE * 0.5 * (1 + np.cos(np.pi * step / (EPOCHS * batches)))
            for k in p:
                mean[k] += 0.1 * (g[k] - mean[k])
                square[k] += 0.001 * (g[k] ** 2 - square[k])
                corrected = mean[k] / (1 - 0.9**step) / (np.sqrt(square[k] / (1 - 0.999**step)) + 1e-8)
                p[k] -= (rate * corrected).astype(np.float32)
        if epoch % 30 == 29:
            print(f"epoch {epoch + 1}: loss {total / batches:.4f}, test {accuracy(p, test_x, test_labels):.4f}")
    return p


def export(p):
    node = helper.make_node
    nodes = [
        node("Conv", ["image", "conv1.weight", "conv1.bias"], ["conv1"], name="conv1", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["conv1"], ["relu1"], name="relu1"),
        node("MaxPool", ["relu1"], ["pool1"], name="pool1", kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["pool1", "conv2.weight", "conv2.bias"], ["conv2"], name="conv2", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("Relu", ["conv2"], ["relu2"], name="relu2"),
        node("MaxPool", ["relu2"], ["pool2"], name="pool2", kernel_shape=[2, 2], strides=[2, 2]),
        node("Flatten", ["pool2"], ["flat"], name="flatten", axis=1),
        node("Gemm", ["flat", "linear.weight", "linear.bias"], ["logits"], name="linear", transB=1),
        node("Softmax", ["logits"], ["probabilities"], name="softmax", axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(v, k) for k, v in p.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], producer_name="halcyon")
    model.ir_version = 8
    onnx.checker.check_model(model, full_check=True)
    return model


def write_png(path, pixels):
    """An 8-bit grey PNG."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def main(out):
    images, labels = load()
    x = as_input(images)
    p = train(x[:TRAIN], labels[:TRAIN], x[TRAIN:], labels[TRAIN:])
    print(f"train {accuracy(p, x[:TRAIN], labels[:TRAIN]):.4f}, test {accuracy(p, x[TRAIN:], labels[TRAIN:]):.4f}")

    (out / "digits.onnx").write_bytes(export(p).SerializeToString())
    (out / "digits-labels.txt").write_text("".join(f"{name}\n" for name in
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")))
    np.savez(
        out / "digits.npz",
        train_images=images[:TRAIN],
        train_labels=labels[:TRAIN],
        test_images=images[TRAIN:],
        test_labels=labels[TRAIN:],
    )
    # The first image of a seven among the test images, which are not used for training.
    sample = TRAIN + int(np.flatnonzero(labels[TRAIN:] == 7)[0])
    write_png(out / "digit-7.png", to_pixels(images[sample]))
    print("digit-7.png:", np.round(forward(p, x[sample : sample + 1])[0][0], 4))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) == 2 else pathlib.Path(__file__).resolve().parent)
