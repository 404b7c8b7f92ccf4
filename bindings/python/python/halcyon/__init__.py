"""Halcyon: one contract between machine-learning code and hardware.

The package finds every accelerator of the machine at run time, explains its choice, and runs or trains models
there. All work is done by the native module; these files add Python's conventions.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from halcyon import _native
from halcyon._default import default_backend, set_default_backend
from halcyon._errors import (
    ArgumentError,
    CancelledError,
    DonatedError,
    DriverError,
    DTypeError,
    EndlessError,
    FileError,
    FormatError,
    HalcyonError,
    HalcyonWarning,
    LinAlgError,
    MixedDevicesError,
    OutOfMemoryError,
    OutOfRangeError,
    ShapeError,
    UnavailableError,
    UnsupportedError,
)
from halcyon._native import Backend, __version__
from halcyon._reports import Device, Devices, DoctorReport, Selection, devices, doctor, select

if TYPE_CHECKING:
    from halcyon import array, language, training
    from halcyon._model import FitReport, Model, fit, load
    from halcyon.language import Embedder, Generation, LanguageModel, TextStream, chat, embed, generate
    from halcyon.session import (
        ExecutionMode,
        ExecutionOrder,
        GraphOptimizationLevel,
        InferenceSession,
        IOBinding,
        ModelMetadata,
        NodeArg,
        OrtAllocatorType,
        OrtDevice,
        OrtMemoryInfo,
        OrtMemType,
        OrtValue,
        RunOptions,
        SessionOptions,
        get_all_providers,
        get_available_providers,
        get_device,
        set_default_logger_severity,
        set_seed,
    )

__all__ = [
    "ArgumentError",
    "Backend",
    "CancelledError",
    "DTypeError",
    "Device",
    "Devices",
    "DoctorReport",
    "DonatedError",
    "DriverError",
    "Embedder",
    "EndlessError",
    "ExecutionMode",
    "ExecutionOrder",
    "FileError",
    "FitReport",
    "FormatError",
    "Generation",
    "GraphOptimizationLevel",
    "HalcyonError",
    "HalcyonWarning",
    "IOBinding",
    "InferenceSession",
    "LanguageModel",
    "LinAlgError",
    "MixedDevicesError",
    "Model",
    "ModelMetadata",
    "NodeArg",
    "OrtAllocatorType",
    "OrtDevice",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtValue",
    "OutOfMemoryError",
    "OutOfRangeError",
    "RunOptions",
    "Selection",
    "SessionOptions",
    "ShapeError",
    "TextStream",
    "UnavailableError",
    "UnsupportedError",
    "__version__",
    "_native",
    "array",
    "chat",
    "default_backend",
    "devices",
    "doctor",
    "embed",
    "fit",
    "generate",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "language",
    "load",
    "select",
    "set_default_backend",
    "set_default_logger_severity",
    "set_seed",
    "training",
]

#: Names that are imported when they are first used, with their modules.
_LAZY = {
    "FitReport": "halcyon._model",
    "Model": "halcyon._model",
    "fit": "halcyon._model",
    "load": "halcyon._model",
    "ExecutionMode": "halcyon.session",
    "ExecutionOrder": "halcyon.session",
    "GraphOptimizationLevel": "halcyon.session",
    "IOBinding": "halcyon.session",
    "InferenceSession": "halcyon.session",
    "ModelMetadata": "halcyon.session",
    "NodeArg": "halcyon.session",
    "OrtAllocatorType": "halcyon.session",
    "OrtDevice": "halcyon.session",
    "OrtMemType": "halcyon.session",
    "OrtMemoryInfo": "halcyon.session",
    "OrtValue": "halcyon.session",
    "RunOptions": "halcyon.session",
    "SessionOptions": "halcyon.session",
    "get_all_providers": "halcyon.session",
    "get_available_providers": "halcyon.session",
    "get_device": "halcyon.session",
    "set_default_logger_severity": "halcyon.session",
    "set_seed": "halcyon.session",
    "Embedder": "halcyon.language",
    "Generation": "halcyon.language",
    "LanguageModel": "halcyon.language",
    "TextStream": "halcyon.language",
    "chat": "halcyon.language",
    "embed": "halcyon.language",
    "generate": "halcyon.language",
}
#: Modules that are imported when they are first used.
_MODULES = frozenset({"array", "language", "onnxruntime", "session", "torch", "training"})


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        found = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = found
        return found
    if name in _MODULES:
        try:
            return importlib.import_module(f"halcyon.{name}")
        except ImportError as e:
            # `hasattr`, `help` and `inspect` expect this class. `import halcyon.torch` raises its own.
            raise AttributeError(str(e)) from e
    raise AttributeError(f"module 'halcyon' has no attribute '{name}'")


def __dir__() -> list[str]:
    names = {*globals(), *_LAZY, *_MODULES}
    # Tools such as `help` get every name that is listed.
    has_torch = sys.modules.get("torch") or importlib.util.find_spec("torch")
    return sorted(names if has_torch else names - {"torch"})
