"""Options of backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from halcyon._errors import ArgumentError
from halcyon.torch._names import LevelLike, OptimizationLevel

__all__ = ["BackendConfig", "half_type"]


def half_type(dtype: torch.dtype | None, name: str) -> torch.dtype | None:
    """Checks a dtype of mixed precision."""
    if dtype in (None, torch.float32, torch.bfloat16, torch.float16):
        return dtype
    raise ArgumentError(
        f"{name}: a model cannot be optimised for {dtype}; "
        "use torch.float32 (no mixed precision), torch.bfloat16 or torch.float16"
    )


@dataclass
class BackendConfig:
    """Options of a backend and of what it does to models."""

    #: The level of models that are given none: an :class:`OptimizationLevel` or its name.
    level: LevelLike = OptimizationLevel.O2
    #: The index of the device.
    device_id: int = 0
    #: A cap on the memory of this process on the device, in bytes. The CPU and TPUs have no such cap.
    memory_limit: int | None = None
    #: The number of threads of the CPU backend, for the whole process (`torch.set_num_threads`).
    num_threads: int | None = None
    #: The dtype of mixed precision. None is the device's policy: none on the CPU; on CUDA, ROCm and MPS
    #: float16 for inference, and bfloat16 for training where the device has it.
    amp_dtype: torch.dtype | None = None
    #: The backend of `torch.compile`. None tries `halcyon`, if it is installed, and then `inductor`.
    compile_backend: str | None = None
    #: Whether training computes the activations of repeated blocks again instead of keeping them. None does
    #: so if a step on the sample does not fit into the device's memory.
    activation_checkpointing: bool | None = None
    #: The largest difference, relative to an output's largest magnitude, that reduced precision may have.
    #: None is a bound by level and dtype.
    max_error: float | None = None
    #: Whether an optimisation that is not faster on the sample is kept.
    keep_slower: bool = False

    def __post_init__(self) -> None:
        self.level = OptimizationLevel(self.level)
        half_type(self.amp_dtype, "amp_dtype")
        if self.device_id < 0:
            raise ArgumentError(f"device_id: {self.device_id} is negative; the first device is 0")
        for name, least in (("memory_limit", 1), ("num_threads", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ArgumentError(f"{name}: {value} is less than {least}; leave it unset for no limit")
        if self.max_error is not None and not 0 < self.max_error < float("inf"):
            raise ArgumentError(f"max_error: {self.max_error} is not a positive number")

    @property
    def optimization_level(self) -> OptimizationLevel:
        """The level, parsed."""
        return OptimizationLevel(self.level)
