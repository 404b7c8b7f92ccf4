"""Runs a model with open sizes on images of several sizes."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as rt

sess = rt.InferenceSession(Path(sys.argv[1]) / "conv.onnx", providers=["CPUExecutionProvider"])
image = sess.get_inputs()[0]
assert all(isinstance(d, (int, str)) for d in image.shape)

rng = np.random.default_rng(1)
results = {"shape": image.shape, "type": image.type, "outputs": [o.shape for o in sess.get_outputs()]}
for n, height, width in [(1, 8, 8), (2, 8, 8), (1, 31, 17), (3, 8, 8), (1, 8, 8)]:
    x = rng.random((n, 3, height, width), dtype=np.float32)
    features, pooled = sess.run(None, {image.name: x})
    results[f"features {n}x{height}x{width}"] = features
    results[f"pooled {n}x{height}x{width}"] = pooled
# Images as other libraries give them: channels last, seen through a transposed view.
picture = rng.random((10, 12, 3), dtype=np.float32)
results["view"] = sess.run(["pooled"], {image.name: picture.transpose(2, 0, 1)[None]})[0]
