#!/usr/bin/env python3
"""100 steps of plain SGD on the digits data in NumPy float64: the results of the gradient pass are compared with these.

Needs numpy.   Usage: mlp_reference.py models/digits.npz OUT

x = train_images / 16, flattened to [n, 64]; step s (0..99) takes the 64 rows (64 s + i) mod n, i = 0..63, in stored order.
    h = relu(x w0 + b0)        w0 [64, 32], b0 [32]
    z = h w1 + b1              w1 [32, 10], b1 [10]
    loss = mean over the batch of the cross entropy of softmax(z)
    every parameter p: p -= 0.1 * d loss / d p
OUT gets w0, b0, w1, b1 (.npy, float32: the starting weights), losses.npy (float64 [100], each before its step's update),
final_{w0,b0,w1,b1}.npy (float64). The starting weights are rounded to float32 first, so both runs start at the same point.
"""
import pathlib
import sys

import numpy as np

SEED = 7
STEPS = 100
BATCH = 64
RATE = 0.1


def loss_and_gradients(p, x, labels):
    rows = np.arange(len(x))
    pre = x @ p["w0"] + p["b0"]
    h = np.maximum(pre, 0)
    z = h @ p["w1"] + p["b1"]
    z = z - z.max(1, keepdims=True)
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    grad = np.exp(log_p)
    grad[rows, labels] -= 1
    grad /= len(x)
    back = (grad @ p["w1"].T) * (pre > 0)
    gradients = {"w0": x.T @ back, "b0": back.sum(0), "w1": h.T @ grad, "b1": grad.sum(0)}
    return -log_p[rows, labels].mean(), gradients


def check_gradients(p, x, labels, rng):
    """Compares a few entries of every gradient with central differences."""
    _, gradients = loss_and_gradients(p, x, labels)
    for name, value in p.items():
        for _ in range(5):
            at = tuple(rng.integers(0, s) for s in value.shape)
            moved = []
            for step in (1e-6, -1e-6):
                q = {k: v.copy() for k, v in p.items()}
                q[name][at] += step
                moved.append(loss_and_gradients(q, x, labels)[0])
            numeric = (moved[0] - moved[1]) / 2e-6
            if abs(numeric - gradients[name][at]) > 1e-7:
                sys.exit(f"gradient of {name}{at}: {gradients[name][at]} but differences give {numeric}")


def main(data, out):
    out.mkdir(parents=True, exist_ok=True)
    with np.load(data) as digits:
        images = digits["train_images"].reshape(-1, 64).astype(np.float64) / 16
        labels = digits["train_labels"].astype(np.int64)
        test_images = digits["test_images"].reshape(-1, 64).astype(np.float64) / 16
        test_labels = digits["test_labels"].astype(np.int64)
    rng = np.random.default_rng(SEED)
    start = {
        "w0": (rng.standard_normal((64, 32)) * np.sqrt(2 / 64)).astype(np.float32),
        "b0": np.zeros(32, np.float32),
        "w1": (rng.standard_normal((32, 10)) * np.sqrt(2 / 32)).astype(np.float32),
        "b1": np.zeros(10, np.float32),
    }
    p = {k: v.astype(np.float64) for k, v in start.items()}
    check_gradients(p, images[:BATCH], labels[:BATCH], rng)
    losses = []
    for step in range(STEPS):
        rows = (np.arange(BATCH) + step * BATCH) % len(images)
        loss, gradients = loss_and_gradients(p, images[rows], labels[rows])
        losses.append(loss)
        for name in p:
            p[name] -= RATE * gradients[name]
    for name in p:
        np.save(out / f"{name}.npy", start[name])
        np.save(out / f"final_{name}.npy", p[name])
    np.save(out / "losses.npy", np.array(losses))
    hidden = np.maximum(test_images @ p["w0"] + p["b0"], 0)
    right = ((hidden @ p["w1"] + p["b1"]).argmax(1) == test_labels).mean()
    print(f"mlp: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {STEPS} steps, test {right:.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
