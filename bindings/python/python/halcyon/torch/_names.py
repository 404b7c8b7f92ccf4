"""Names of backends and of levels."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from halcyon._errors import ArgumentError
from halcyon.torch._errors import BackendError, BackendErrorKind

__all__ = ["BackendType", "LevelLike", "OptimizationLevel", "level_of"]


class _Row(NamedTuple):
    title: str
    vendor: str
    #: The name of the runtime, where it is not the id.
    runtime: str
    aliases: tuple[str, ...] = ()


class BackendType(Enum):
    """A kind of device. `NVIDIA` and `AMD` are other names of `CUDA` and `ROCM`.

    `BackendType("nvidia")` accepts every name of a backend, in upper or lower case.
    """

    AUTO = "auto"
    CUDA = "cuda"
    NVIDIA = "cuda"
    ROCM = "rocm"
    AMD = "rocm"
    METAL = "metal"
    TPU = "tpu"
    INTEL = "intel"
    OPENCL = "opencl"
    WEBGPU = "webgpu"
    CPU = "cpu"

    @property
    def id(self) -> str:
        """The name in Halcyon, such as `cuda`."""
        return self.value

    @property
    def title(self) -> str:
        """The name in messages, such as `CUDA`."""
        return _ROWS[self.value].title

    @property
    def vendor(self) -> str:
        """The vendor's name, such as `nvidia`; for backends without one vendor, the id."""
        return _ROWS[self.value].vendor

    @property
    def runtime(self) -> str:
        """The name of the software that runs the device: `cuda`, `rocm`, `xpu`, `tpu`, `mps`, `cpu`."""
        return _ROWS[self.value].runtime

    @classmethod
    def from_string(cls, name: BackendType | str) -> BackendType:
        """The backend with a name.

        Raises :class:`BackendError` with the valid names if there is none.
        """
        return cls(name)

    @classmethod
    def _missing_(cls, value: object) -> BackendType:
        if isinstance(value, str):
            wanted = value.strip().lower()
            for member in cls:
                if wanted == member.value or wanted in _ROWS[member.value].aliases:
                    return member
        names = ", ".join(name for key, row in _ROWS.items() for name in (key, *row.aliases))
        raise BackendError(
            f"{value!r} is not a backend; valid names are {names}", BackendErrorKind.UNKNOWN_VALUE
        )

    def __str__(self) -> str:
        return self.value


_ROWS = {
    "auto": _Row("Auto", "auto", "auto"),
    "cuda": _Row("CUDA", "nvidia", "cuda", ("nvidia",)),
    "rocm": _Row("ROCm", "amd", "rocm", ("amd", "hip")),
    "metal": _Row("Metal", "metal", "mps", ("mps",)),
    "tpu": _Row("TPU", "tpu", "tpu", ("xla",)),
    "intel": _Row("Intel", "intel", "xpu", ("xpu", "oneapi")),
    "opencl": _Row("OpenCL", "opencl", "opencl", ("cl",)),
    "webgpu": _Row("WebGPU", "webgpu", "webgpu", ("wgpu", "vulkan")),
    "cpu": _Row("CPU", "cpu", "cpu", ("host",)),
}


class OptimizationLevel(Enum):
    """How much a model is optimised.

    `OptimizationLevel("balanced")` accepts the names and aliases, in upper or lower case.
    """

    #: The model is moved to the device.
    O0 = "O0"
    #: Optimisations with a small difference: fused and frozen layers, layouts. Alias `conservative`.
    O1 = "O1"
    #: Also a compiled model, and mixed precision by the device's policy. Alias `balanced`.
    O2 = "O2"
    #: Also products in 8-bit types. Alias `aggressive`.
    O3 = "O3"

    @property
    def number(self) -> int:
        """The number of the level, 0 to 3."""
        return int(self.value[1])

    @classmethod
    def from_string(cls, name: OptimizationLevel | str) -> OptimizationLevel:
        """The level with a name or an alias, in upper or lower case.

        Raises :class:`halcyon.ArgumentError`, a `ValueError`, with the valid names if there is none.
        """
        return cls(name)

    @classmethod
    def _missing_(cls, value: object) -> OptimizationLevel:
        if isinstance(value, str):
            wanted = value.strip().lower()
            if wanted in _LEVELS:
                return cls(_LEVELS[wanted])
            if wanted.upper() in cls.__members__:
                return cls[wanted.upper()]
        names = ", ".join([*cls.__members__, *_LEVELS])
        raise ArgumentError(f"{value!r} is not an optimization level; valid names are {names}")

    def __str__(self) -> str:
        return self.value


_LEVELS = {"none": "O0", "debug": "O0", "conservative": "O1", "balanced": "O2", "aggressive": "O3"}

LevelLike = OptimizationLevel | str


def level_of(level: LevelLike | None, default: OptimizationLevel) -> OptimizationLevel:
    """A level by name, or `default` for None."""
    return default if level is None else OptimizationLevel(level)
