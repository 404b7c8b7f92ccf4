"""Halcyon for PyTorch: devices, settings and optimisations of `torch.nn.Module`, each checked and measured.

The functions have the names that programs for PyTorch know from other libraries. Everything works on ordinary
modules, tensors and optimizers of PyTorch. `halcyon.torch.compile` has the backend of `torch.compile`.
"""

from __future__ import annotations

from halcyon.torch._errors import BackendError, BackendErrorKind, MissingTorchError, OptimizationWarning

try:
    # Whether it is installed, in a version that has everything. A directory with the name `torch` can be
    # imported too, but has no content.
    from torch import OutOfMemoryError as _OutOfMemoryError  # noqa: F401
except ImportError as error:
    raise MissingTorchError(
        f"halcyon.torch needs PyTorch 2.5 or later, which cannot be imported ({error}). "
        "Install it: pip install torch"
    ) from error

from halcyon.torch._announce import announce
from halcyon.torch._backends import (
    AMDBackend,
    BackendFactory,
    BackendInfo,
    BaseBackend,
    CPUBackend,
    IntelBackend,
    MetalBackend,
    NVIDIABackend,
    TPUBackend,
    detect_best_backend,
    detect_best_runtime,
    get_backend,
    list_available_backends,
)
from halcyon.torch._config import BackendConfig
from halcyon.torch._info import DeviceInfo, MemoryStats, StandardDeviceInfo
from halcyon.torch._names import BackendType, OptimizationLevel
from halcyon.torch._optimizers import (
    AMDOptimizer,
    BaseOptimizer,
    CPUOptimizer,
    IntelOptimizer,
    MetalOptimizer,
    NVIDIAOptimizer,
    Optimizer,
    TPUOptimizer,
    get_optimizer,
)
from halcyon.torch._result import OptimizationResult, Receipt, optimization_result
from halcyon.torch._strategies import Strategy
from halcyon.torch._training import (
    AmpConfig,
    Configured,
    configure_backend,
    configure_torch_backend,
    resolve_amp_config,
    resolve_device,
    resolve_ort_providers,
    resolve_torch_device,
)

__all__ = [
    "AMDBackend",
    "AMDOptimizer",
    "AmpConfig",
    "BackendConfig",
    "BackendError",
    "BackendErrorKind",
    "BackendFactory",
    "BackendInfo",
    "BackendType",
    "BaseBackend",
    "BaseOptimizer",
    "CPUBackend",
    "CPUOptimizer",
    "Configured",
    "DeviceInfo",
    "IntelBackend",
    "IntelOptimizer",
    "MemoryStats",
    "MetalBackend",
    "MetalOptimizer",
    "MissingTorchError",
    "NVIDIABackend",
    "NVIDIAOptimizer",
    "OptimizationLevel",
    "OptimizationResult",
    "OptimizationWarning",
    "Optimizer",
    "Receipt",
    "StandardDeviceInfo",
    "Strategy",
    "TPUBackend",
    "TPUOptimizer",
    "configure_backend",
    "configure_torch_backend",
    "detect_best_backend",
    "detect_best_runtime",
    "get_backend",
    "get_optimizer",
    "list_available_backends",
    "optimization_result",
    "resolve_amp_config",
    "resolve_device",
    "resolve_ort_providers",
    "resolve_torch_device",
]

announce()


def __getattr__(name: str) -> object:
    """What belongs to `halcyon.torch.compile`, which is slow to import."""
    if name in ("FallbackWarning", "report", "reset_report"):
        from halcyon.torch import compile as backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
