"""Texts as inputs and outputs."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

session = ort.InferenceSession(str(Path(sys.argv[1]) / "strings.onnx"), providers=["CPUExecutionProvider"])
suffix = np.array(["!"], dtype=object)
results = {"types": [(i.name, i.type, i.shape) for i in session.get_inputs()]}
given = {
    "unicode": np.array(["Cat", "DOG", "Straße", "bird"]),
    "objects": np.array(["dog", "Dog"], dtype=object),
    "list": ["Dog", "nothing"],
}
for name, words in given.items():
    try:
        joined, ids = session.run(None, {"words": words, "suffix": suffix})
        results[name] = (joined.tolist(), joined.dtype == object, ids.tolist())
    except Exception as e:
        results[name] = type(e).__name__
try:
    session.run(None, {"words": np.array([1, 2]), "suffix": suffix})
except Exception as e:
    results["numbers"] = type(e).__name__
