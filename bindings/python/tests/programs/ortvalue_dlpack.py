"""Exchanges values with other libraries without copies."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

session = ort.InferenceSession(str(Path(sys.argv[1]) / "mlp.onnx"), providers=["CPUExecutionProvider"])
x = np.random.default_rng(5).standard_normal((3, 16)).astype(np.float32)

value = ort.OrtValue.ortvalue_from_numpy(x)
assert value.is_tensor() and value.has_value() and not value.is_sparse_tensor()
outputs = session.run_with_ort_values(["probabilities", "logits"], {"x": value})
kept = np.array(outputs[0].numpy())

# Through DLPack, both ways.
shared = np.from_dlpack(value)
shared_view = np.shares_memory(shared, x)
logits = np.from_dlpack(outputs[1])
ends = ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x[:, ::-1]))
turned = session.run_with_ort_values(None, {"x": ends})

# Values as inputs of `run` too.
mixed = session.run(["probabilities"], {"x": value})[0]
empty = ort.OrtValue.ortvalue_from_shape_and_type([0, 16], np.float32)

results = {
    "kept": kept,
    "logits": logits,
    "turned": turned[1].numpy(),
    "mixed": mixed,
    "shared": shared_view,
    "empty": session.run(None, {"x": empty})[0],
    "facts": [
        value.shape(),
        value.data_type(),
        value.element_type(),
        value.device_name(),
        value.tensor_size_in_bytes(),
    ],
    "many": [v.data_type() for v in outputs],
}
