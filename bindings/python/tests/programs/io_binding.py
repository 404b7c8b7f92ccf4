"""Keeps inputs and outputs bound over many runs."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

session = ort.InferenceSession(str(Path(sys.argv[1]) / "mlp.onnx"), providers=["CPUExecutionProvider"])
x = np.random.default_rng(2).standard_normal((4, 16)).astype(np.float32)

# The outputs are made by the run.
binding = session.io_binding()
binding.bind_cpu_input("x", x)
binding.bind_output("probabilities")
binding.bind_output("logits", "cpu")
session.run_with_iobinding(binding)
probabilities, logits = binding.copy_outputs_to_cpu()

# Values for inputs and outputs, which are used again and again.
x_value = ort.OrtValue.ortvalue_from_numpy(x)
y_value = ort.OrtValue.ortvalue_from_shape_and_type([4, 4], np.float32, "cpu", 0)
binding = session.io_binding()
binding.bind_ortvalue_input("x", x_value)
binding.bind_ortvalue_output("probabilities", y_value)
steps = []
for step in range(3):
    x_value.update_inplace(np.full((4, 16), step, np.float32))
    binding.synchronize_inputs()
    session.run_with_iobinding(binding)
    binding.synchronize_outputs()
    steps.append(y_value.numpy().copy())

# Memory of the caller, by its address.
given = np.ascontiguousarray(x[::-1])
made = np.zeros((4, 4), np.float32)
binding = session.io_binding()
binding.bind_input("x", "cpu", 0, np.float32, given.shape, given.ctypes.data)
binding.bind_output("logits", "cpu", 0, np.float32, made.shape, made.ctypes.data)
session.run_with_iobinding(binding)
names = [v.data_type() for v in binding.get_outputs()]
binding.clear_binding_inputs()
binding.clear_binding_outputs()

results = {
    "probabilities": probabilities,
    "logits": logits,
    "steps": np.stack(steps),
    "made": made,
    "types": names,
    "same memory": x_value.data_ptr() != 0 and y_value.shape() == [4, 4],
}
