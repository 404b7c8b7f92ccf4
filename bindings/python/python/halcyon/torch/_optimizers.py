"""Optimizers of models, one per vendor, and the strategies with their measured gains."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar

import torch
from torch import nn

from halcyon._errors import ArgumentError
from halcyon.torch._backends import (
    AMDBackend,
    BaseBackend,
    CPUBackend,
    IntelBackend,
    MetalBackend,
    NVIDIABackend,
    TPUBackend,
    get_backend,
)
from halcyon.torch._names import BackendType, LevelLike, level_of
from halcyon.torch._result import OptimizationResult, remember
from halcyon.torch._strategies import Strategy, strategies

__all__ = [
    "AMDOptimizer",
    "BaseOptimizer",
    "CPUOptimizer",
    "IntelOptimizer",
    "MetalOptimizer",
    "NVIDIAOptimizer",
    "Optimizer",
    "TPUOptimizer",
    "get_optimizer",
]


class BaseOptimizer:
    """Optimises models for inference on one backend."""

    #: The backend of this class.
    _BACKEND: ClassVar[type[BaseBackend] | None] = None

    def __init__(self, backend: BaseBackend | None = None) -> None:
        """The optimizer of an open backend; of this class's backend for None."""
        if backend is not None and not isinstance(backend, BaseBackend):
            raise ArgumentError(
                f"the backend is a {type(backend).__name__}; pass one of get_backend(), or use get_optimizer"
            )
        if backend is None:
            backend = get_backend() if self._BACKEND is None else self._BACKEND()
        self.backend = backend

    def optimize(
        self,
        model: nn.Module,
        level: LevelLike | None = None,
        sample_input: Any = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[nn.Module, OptimizationResult]:
        """A copy of a model for inference at a level, and what the level changed.

        The arguments are as for `BaseBackend.optimize_for_inference`; without a level, the backend's is used.
        """
        wanted = level_of(level, self.backend.optimization_level)
        _, result = self.backend.optimized(model, wanted, sample_input, dtype)
        remember(result)
        return result.model, result

    def optimize_legacy(
        self,
        model: nn.Module,
        level: LevelLike | None = None,
        sample_input: Any = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Deprecated: `optimize` without the result."""
        warnings.warn(
            "optimize_legacy is deprecated; use optimize, which also returns the result",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.optimize(model, level, sample_input, dtype)[0]

    def get_available_strategies(self) -> list[Strategy]:
        """The optimisations, with the gains that were measured on this device.

        The first call on a machine measures them, which takes about a minute, and stores them in Halcyon's
        cache directory (none with `HALCYON_CACHE=off`).
        """
        return strategies(self.backend)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.backend!r})"


#: The name of this class in Halcyon's Rust interface.
Optimizer = BaseOptimizer


class NVIDIAOptimizer(BaseOptimizer):
    """The optimizer of NVIDIA GPUs."""

    _BACKEND = NVIDIABackend


class AMDOptimizer(BaseOptimizer):
    """The optimizer of AMD GPUs."""

    _BACKEND = AMDBackend


class IntelOptimizer(BaseOptimizer):
    """The optimizer of Intel GPUs."""

    _BACKEND = IntelBackend


class TPUOptimizer(BaseOptimizer):
    """The optimizer of TPUs."""

    _BACKEND = TPUBackend


class MetalOptimizer(BaseOptimizer):
    """The optimizer of Apple GPUs."""

    _BACKEND = MetalBackend


class CPUOptimizer(BaseOptimizer):
    """The optimizer of the processor."""

    _BACKEND = CPUBackend


_CLASSES: dict[BackendType, type[BaseOptimizer]] = {
    BackendType.CUDA: NVIDIAOptimizer,
    BackendType.ROCM: AMDOptimizer,
    BackendType.INTEL: IntelOptimizer,
    BackendType.TPU: TPUOptimizer,
    BackendType.METAL: MetalOptimizer,
    BackendType.CPU: CPUOptimizer,
}


def get_optimizer(name: BackendType | str | None = None) -> BaseOptimizer:
    """The optimizer of a backend by name; of the best one without a name."""
    backend = get_backend(name)
    return _CLASSES[backend.BACKEND_TYPE](backend)
