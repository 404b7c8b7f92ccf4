"""Errors and warnings of `halcyon.torch`. This file does not need PyTorch."""

from __future__ import annotations

from enum import Enum

from halcyon._errors import HalcyonError, HalcyonWarning

__all__ = ["BackendError", "BackendErrorKind", "MissingTorchError", "OptimizationWarning"]


class BackendErrorKind(Enum):
    """The kind of a :class:`BackendError`."""

    #: A name that no backend has.
    UNKNOWN_VALUE = "unknown value"
    #: `cuda` where PyTorch is a build for ROCm, or the reverse; or another backend than the given device's.
    MISMATCH = "mismatch"
    #: The device, its driver, or the build of PyTorch for it is missing.
    MISSING_RUNTIME = "missing runtime"
    #: ONNX Runtime lacks the backend's execution provider.
    UNAVAILABLE_PROVIDER = "unavailable provider"
    #: PyTorch has nothing for this backend.
    UNSUPPORTED = "unsupported"


class BackendError(HalcyonError):
    """A backend that cannot be used. The message says why, and what to do."""

    def __init__(self, message: str, kind: BackendErrorKind = BackendErrorKind.MISSING_RUNTIME) -> None:
        super().__init__(message)
        self.kind = kind


class MissingTorchError(BackendError, ImportError):
    """PyTorch is not installed."""


class OptimizationWarning(HalcyonWarning):
    """Optimisations that were skipped, each with the reason."""
