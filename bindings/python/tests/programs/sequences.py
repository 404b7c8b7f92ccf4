"""Lists of tensors as inputs and outputs."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

session = ort.InferenceSession(str(Path(sys.argv[1]) / "split.onnx"), providers=["CPUExecutionProvider"])
x = np.arange(12, dtype=np.float32).reshape(4, 3)
parts = [x[:1], x[1:3], x[3:]]
rows, total = session.run(["rows", "total"], {"x": x, "parts": parts})
results = {
    "inputs": [(a.name, a.type) for a in session.get_inputs()],
    "outputs": [(a.name, a.type) for a in session.get_outputs()],
    "is list": isinstance(rows, list),
    "count": len(rows),
    "rows": np.stack(rows),
    "total": total,
}

options = ort.SessionOptions()
options.log_severity_level = 3
maybe = ort.InferenceSession(
    str(Path(sys.argv[1]) / "optional.onnx"), options, providers=["CPUExecutionProvider"]
)
results["with"] = maybe.run(None, {"x": np.ones(2, np.float32)})[0]
results["without"] = maybe.run(None, {"x": None})[0]
results["type"] = maybe.get_inputs()[0].type
counter = ort.InferenceSession(
    str(Path(sys.argv[1]) / "count.onnx"), options, providers=["CPUExecutionProvider"]
)
results["counted"] = counter.run(None, {"x": np.float32(0.5)[...], "limit": np.array(10, np.float32)})[0]
