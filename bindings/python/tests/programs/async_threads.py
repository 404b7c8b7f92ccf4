"""Runs a session from several threads, and asynchronously."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime as ort

options = ort.SessionOptions()
options.intra_op_num_threads = 2
session = ort.InferenceSession(
    str(Path(sys.argv[1]) / "mlp.onnx"), options, providers=["CPUExecutionProvider"]
)
rows = np.random.default_rng(4).standard_normal((24, 1, 16)).astype(np.float32)


class Waiting:
    """Collects the results of a run."""

    def __init__(self):
        self.done = threading.Event()
        self.outputs = None
        self.error = None

    def finish(self, outputs, error):
        self.outputs, self.error = outputs, error
        self.done.set()


def callback(outputs, waiting, error):
    waiting.finish(outputs, error)


waiting = [Waiting() for _ in range(8)]
for row, w in zip(rows, waiting, strict=False):
    session.run_async(["probabilities"], {"x": row}, callback, w)
for w in waiting:
    assert w.done.wait(30)
asynchronous = np.concatenate([w.outputs[0] for w in waiting])

failed = Waiting()
session.run_async(["probabilities"], {"x": np.zeros((1, 16))}, callback, failed)
assert failed.done.wait(30)

with ThreadPoolExecutor(4) as pool:
    threaded = list(pool.map(lambda row: session.run(["logits"], {"x": row})[0], rows))

results = {
    "asynchronous": asynchronous,
    "errors": [w.error for w in waiting],
    "failed": bool(failed.error) and not failed.outputs,
    "threaded": np.concatenate(threaded),
}
