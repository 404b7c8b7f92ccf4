"""Exceptions of sessions, under onnxruntime's names.

Each class also derives from the exception of Halcyon with the same meaning, and so from ``RuntimeError``.
"""

from __future__ import annotations

from halcyon._errors import (
    ArgumentError,
    CancelledError,
    DriverError,
    DTypeError,
    EndlessError,
    FileError,
    FormatError,
    HalcyonError,
    MixedDevicesError,
    OutOfMemoryError,
    OutOfRangeError,
    ShapeError,
    UnavailableError,
    UnsupportedError,
)

__all__ = [
    "DeviceReset",
    "EPFail",
    "EngineError",
    "Fail",
    "InvalidArgument",
    "InvalidGraph",
    "InvalidProtobuf",
    "ModelLoadCanceled",
    "ModelLoaded",
    "ModelRequiresCompilation",
    "NoModel",
    "NoSuchFile",
    "NotFound",
    "NotImplemented",
    "RuntimeException",
]


class Fail(HalcyonError):
    """A run that failed, or that another thread ended."""


class InvalidArgument(ArgumentError):
    """A name, a value or an option that the model or the session does not take."""


class NoSuchFile(FileError):
    """A model file that does not exist."""


class NoModel(HalcyonError):
    """A session without a model."""


class EngineError(HalcyonError):
    """An error inside of an engine."""


class RuntimeException(HalcyonError):
    """A run that failed for want of memory or in a driver."""


class _NoMemory(RuntimeException, OutOfMemoryError):
    """A device does not have enough free memory for a run."""


class InvalidProtobuf(FormatError):
    """A file that is no ONNX model."""


class ModelLoaded(HalcyonError):
    """A session that already has a model."""


class NotImplemented(UnsupportedError):
    """Something that Halcyon does not support. The message names it."""


class InvalidGraph(FormatError):
    """A model whose nodes do not fit together, or have operators that do not exist."""


class EPFail(HalcyonError):
    """A device or its driver failed."""


class DeviceReset(HalcyonError):
    """A device that was lost."""


class ModelLoadCanceled(HalcyonError):
    """A model whose loading was cancelled."""


class ModelRequiresCompilation(HalcyonError):
    """A model that must be compiled before it can run."""


class NotFound(HalcyonError):
    """Something that was asked for by name and does not exist."""


#: The classes for errors of a run, first match first.
_OF_RUNS: tuple[tuple[type[HalcyonError], type[HalcyonError]], ...] = (
    (OutOfMemoryError, _NoMemory),
    (UnsupportedError, NotImplemented),
    (CancelledError, Fail),
    (EndlessError, Fail),
    (DriverError, EPFail),
    (UnavailableError, EPFail),
    (FormatError, InvalidGraph),
    (ArgumentError, InvalidArgument),
    (ShapeError, InvalidArgument),
    (DTypeError, InvalidArgument),
    (MixedDevicesError, InvalidArgument),
    (OutOfRangeError, InvalidArgument),
)


def of_run(e: HalcyonError) -> HalcyonError:
    """The exception for an error of a run."""
    for have, want in _OF_RUNS:
        if isinstance(e, have):
            return e if isinstance(e, want) else want(str(e))
    return e if type(e) is not HalcyonError else Fail(str(e))


def of_load(e: HalcyonError, *, parsed: bool) -> HalcyonError:
    """The exception for an error of loading a model. ``parsed``: whether the file is a model."""
    text = str(e)
    if isinstance(e, FileError):
        return Fail(text)
    if isinstance(e, FormatError):
        return InvalidGraph(text) if parsed else InvalidProtobuf(text)
    if isinstance(e, UnsupportedError):
        return InvalidGraph(text) if "no such operator" in text else NotImplemented(text)
    if isinstance(e, (DTypeError, ShapeError)):
        return Fail(text)
    return of_run(e)
