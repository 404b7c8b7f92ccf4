"""Classifies a data set in batches, on the best provider that the machine has."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

MODEL = Path(sys.argv[1]) / "mlp.onnx"

wanted = ["CUDAExecutionProvider", "CPUExecutionProvider"]
providers = [p for p in wanted if p in ort.get_available_providers()]
session = ort.InferenceSession(str(MODEL), providers=providers)
input_name = session.get_inputs()[0].name
features = session.get_inputs()[0].shape[1]

data = np.random.default_rng(0).standard_normal((50, features)).astype(np.float32)
batch_size = 16
labels = []
confidences = []
for start in range(0, len(data), batch_size):
    batch = data[start : start + batch_size]
    (probabilities,) = session.run(["probabilities"], {input_name: batch})
    labels.extend(int(i) for i in probabilities.argmax(axis=1))
    confidences.append(probabilities.max(axis=1))

results = {
    "on_the_cpu": session.get_providers()[-1] == "CPUExecutionProvider",
    "labels": labels,
    "confidences": np.concatenate(confidences),
}
