"""Loads models from memory, reads their descriptions, and handles errors."""

import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    InvalidProtobuf,
    NoSuchFile,
)

FOLDER = Path(sys.argv[1])
options = ort.SessionOptions()
options.log_severity_level = 3
session = ort.InferenceSession(
    (FOLDER / "add.onnx").read_bytes(), options, providers=["CPUExecutionProvider"]
)
meta = session.get_modelmeta()
x = np.ones((2, 3), np.float32)
results = {
    "meta": [
        meta.producer_name,
        meta.domain,
        meta.description,
        meta.graph_name,
        meta.graph_description,
        meta.version,
    ],
    "custom": sorted(meta.custom_metadata_map.items()),
    "overridable": [(a.name, a.type, a.shape) for a in session.get_overridable_initializers()],
    "sum": session.run(None, {"x": x})[0],
    "replaced": session.run(None, {"x": x, "w": np.zeros(3, np.float32)})[0],
    "stored again": session.run(None, {"x": x})[0],
}


def error_of(f):
    try:
        f()
    except (Fail, InvalidArgument, InvalidGraph, InvalidProtobuf, NoSuchFile) as e:
        return type(e).__name__
    except ValueError:
        return "ValueError"
    except TypeError:
        return "TypeError"
    return "none"


def load(what):
    return lambda: ort.InferenceSession(what, options, providers=["CPUExecutionProvider"])


results["errors"] = {
    "no file": error_of(load(str(FOLDER / "no such file.onnx"))),
    "no model": error_of(load(b"these are no bytes of a model")),
    "unknown operator": error_of(load(str(FOLDER / "unknown_operator.onnx"))),
    "a number": error_of(load(3)),
    "wrong type": error_of(lambda: session.run(None, {"x": np.ones((2, 3))})),
    "wrong rank": error_of(lambda: session.run(None, {"x": x[0]})),
    "wrong size": error_of(lambda: session.run(None, {"x": np.ones((2, 4), np.float32)})),
    "unknown input": error_of(lambda: session.run(None, {"x": x, "z": x})),
    "unknown output": error_of(lambda: session.run(["z"], {"x": x})),
}
