"""Sessions with onnxruntime's interface.

A program for onnxruntime runs with its import changed: ``import halcyon.onnxruntime as ort``. What differs is
listed in docs/python-onnxruntime.md.
"""

from __future__ import annotations

from halcyon.session import exceptions
from halcyon.session._binding import IOBinding
from halcyon.session._enums import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    ModelMetadata,
    NodeArg,
    OrtAllocatorType,
    OrtDevice,
    OrtDeviceMemoryType,
    OrtDeviceVendorId,
    OrtMemoryInfo,
    OrtMemoryInfoDeviceType,
    OrtMemType,
    OrtSparseFormat,
)
from halcyon.session._log import set_default_logger_severity, set_default_logger_verbosity
from halcyon.session._options import RunOptions, SessionOptions
from halcyon.session._ortvalue import OrtValue, copy_tensors
from halcyon.session._providers import (
    get_all_providers,
    get_available_providers,
    get_device,
    set_global_thread_pool_sizes,
)
from halcyon.session._session import InferenceSession, set_seed

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtAllocatorType",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "copy_tensors",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "exceptions",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "has_collective_ops",
    "preload_dlls",
    "print_debug_info",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_global_thread_pool_sizes",
    "set_seed",
]


def get_version_string() -> str:
    """The version of Halcyon."""
    from halcyon._native import __version__

    return __version__


def get_build_info() -> str:
    """The version of Halcyon, in the place of onnxruntime's description of its build."""
    return f"Halcyon {get_version_string()}"


def has_collective_ops() -> bool:
    """False: sessions have no operators over several devices."""
    return False


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: object = None) -> None:
    """Does nothing: Halcyon loads the libraries of a driver when its device is first used.

    ``halcyon.doctor()`` says where it finds them.
    """
    del cuda, cudnn, msvc, directory


def print_debug_info() -> None:
    """Prints what ``halcyon.doctor()`` finds on this machine."""
    import halcyon

    print(halcyon.doctor())


def disable_telemetry_events() -> None:
    """Does what it says: nothing is sent anywhere."""


def enable_telemetry_events() -> None:
    """Raises: there is no telemetry.

    Raises:
        NotImplemented: Always.

    """
    raise exceptions.NotImplemented("not supported yet: telemetry. Nothing is sent anywhere")
