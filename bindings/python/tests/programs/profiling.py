"""Measures the nodes of a model."""

import json
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.enable_profiling = True
with tempfile.TemporaryDirectory() as folder:
    options.profile_file_prefix = os.path.join(folder, "profile")
    session = ort.InferenceSession(
        str(Path(sys.argv[1]) / "conv.onnx"), options, providers=["CPUExecutionProvider"]
    )
    started = session.get_profiling_start_time_ns() > 0
    image = np.ones((1, 3, 64, 64), np.float32)
    for _ in range(3):
        features, _ = session.run(None, {"image": image})
    path = session.end_profiling()
    named = os.path.basename(path).startswith("profile") and path.endswith(".json")
    with open(path) as f:
        events = json.load(f)

nodes = [e for e in events if e.get("cat") == "Node" and e["name"].endswith("kernel_time")]
runs = [e for e in events if e.get("cat") == "Session" and e["name"] == "model_run"]
results = {
    "started": started,
    "named": named,
    "runs": len(runs),
    "nodes measured": len(nodes) >= 3 and all("op_name" in e["args"] for e in nodes),
    "times": all(e["dur"] >= 0 and e["ts"] >= 0 and e["ph"] == "X" for e in nodes + runs),
    "features": features,
    "afterwards": session.run(["pooled"], {"image": image})[0],
}
