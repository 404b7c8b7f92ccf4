"""A converted classifier: labels, and a dict of probabilities for each row."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as rt

sess = rt.InferenceSession(str(Path(sys.argv[1]) / "classifier.onnx"), providers=["CPUExecutionProvider"])
input_name = sess.get_inputs()[0].name
label_name = sess.get_outputs()[0].name
X = np.random.default_rng(6).standard_normal((5, 4))

pred_onx = sess.run([label_name], {input_name: X.astype(np.float32)})[0]
prob_onx = sess.run(None, {input_name: X.astype(np.float32)})[1]
named = sess.run(["by_name"], {input_name: X.astype(np.float32)})[0]

results = {
    "outputs": [(o.name, o.type, o.shape) for o in sess.get_outputs()],
    "labels": pred_onx,
    "keys": [list(row) for row in prob_onx],
    "types": sorted({type(v).__name__ for row in prob_onx for v in row.values()}),
    "probabilities": np.array([[row[k] for k in sorted(row)] for row in prob_onx], np.float32),
    "named": np.array([[row[k] for k in "abc"] for row in named], np.float32),
}

sess = rt.InferenceSession(str(Path(sys.argv[1]) / "dictionary.onnx"), providers=["CPUExecutionProvider"])
results["dict"] = sess.run(None, {"x": {"b": 2.0, "a": 1.5}})[0]
