"""Sets options of sessions, and writes the optimised model."""

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort

MODEL = str(Path(sys.argv[1]) / "mlp.onnx")
x = np.random.default_rng(3).standard_normal((2, 16)).astype(np.float32)
results = {}

for level in (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 3
    session = ort.InferenceSession(MODEL, sess_options=options, providers=["CPUExecutionProvider"])
    results[level.name] = session.run(None, {"x": x})[0]

options = ort.SessionOptions()
options.add_free_dimension_override_by_name("batch", 2)
options.add_session_config_entry("session.load_model_format", "ONNX")
options.log_severity_level = 3
with tempfile.TemporaryDirectory() as folder:
    options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
    fixed = ort.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])
    again = ort.InferenceSession(options.optimized_model_filepath, providers=["CPUExecutionProvider"])
    results["again"] = again.run(["logits"], {"x": x})[0]
results["fixed shape"] = fixed.get_inputs()[0].shape
results["entry"] = options.get_session_config_entry("session.load_model_format")
try:
    fixed.run(None, {"x": np.zeros((3, 16), np.float32)})
except Exception as e:
    results["refused"] = type(e).__name__
