"""The description of a device, and its memory."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, field
from typing import Any, TypedDict

import torch

from halcyon.torch._names import BackendType
from halcyon.torch._runtimes import runtime

__all__ = ["DeviceInfo", "MemoryStats", "StandardDeviceInfo", "describe", "memory", "supported_dtypes"]

_GIB = 1024**3
_MIB = 1024**2


@dataclass
class DeviceInfo:
    """A device. What a driver does not report is None."""

    #: The vendor's name: `nvidia`, `amd`, `tpu`, `intel`, `cpu`.
    backend: str
    #: PyTorch's name: `cuda:0`, `xla:0`, `xpu:0`, `cpu`.
    device_type: str
    device_id: int
    device_name: str
    compute_capability: str | None
    #: 0 where neither the driver nor the system says it.
    total_memory_bytes: int
    driver_version: str | None
    is_available: bool
    #: Further facts, such as `fp8_supported`; for TPUs `version` and `topology`.
    properties: dict[str, Any] = field(default_factory=dict)
    available_memory_bytes: int | None = None
    #: The dtypes in which the device added numbers when it was asked to.
    supported_dtypes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The same as `device_name`."""
        return self.device_name

    @property
    def runtime(self) -> str:
        """The software that runs the device: `cuda`, `rocm`, `xpu`, `tpu`, `mps`, `cpu`."""
        return BackendType(self.backend).runtime

    @property
    def total_memory_gb(self) -> float:
        """Total memory in GiB (1024³ bytes)."""
        return self.total_memory_bytes / _GIB

    @property
    def total_memory_mb(self) -> float:
        """Total memory in MiB (1024² bytes)."""
        return self.total_memory_bytes / _MIB

    @property
    def available_memory_gb(self) -> float | None:
        """Free memory in GiB (1024³ bytes)."""
        return None if self.available_memory_bytes is None else self.available_memory_bytes / _GIB

    @property
    def memory_total_gb(self) -> float:
        """The same as `total_memory_gb`."""
        return self.total_memory_gb

    @property
    def memory_available_gb(self) -> float | None:
        """The same as `available_memory_gb`."""
        return self.available_memory_gb

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, and `total_memory_gb`."""
        return {**asdict(self), "total_memory_gb": self.total_memory_gb}


#: The name of this class in Halcyon's Rust interface.
StandardDeviceInfo = DeviceInfo


class MemoryStats(TypedDict):
    """The memory of a device: `allocated`, `free`, `reserved` and `total` in MiB, and the same in bytes.

    On the CPU PyTorch counts no allocations; `allocated` is the memory of the process there.
    """

    allocated: float | None
    free: float | None
    reserved: float | None
    total: float | None
    allocated_bytes: int | None
    free_bytes: int | None
    reserved_bytes: int | None
    total_bytes: int | None


def memory(kind: BackendType, index: int) -> MemoryStats:
    """The memory of a device, by its driver."""
    found = runtime(kind)
    allocated, free = found.allocated(index), found.free_memory(index)
    reserved, total = found.reserved(index), found.total_memory(index)

    def mib(count: int | None) -> float | None:
        return None if count is None else count / _MIB

    return {
        "allocated": mib(allocated),
        "free": mib(free),
        "reserved": mib(reserved),
        "total": mib(total),
        "allocated_bytes": allocated,
        "free_bytes": free,
        "reserved_bytes": reserved,
        "total_bytes": total,
    }


_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        ones = torch.ones(2, dtype=dtype, device=device)
        return (ones + ones).tolist() == [True if dtype == torch.bool else 2] * 2
    except (RuntimeError, TypeError):
        return False


@functools.cache
def supported_dtypes(device: torch.device) -> tuple[str, ...]:
    """The names of the dtypes in which a device adds numbers. Each is tried once."""
    return tuple(str(t).removeprefix("torch.") for t in _DTYPES if _computes(device, t))


def describe(kind: BackendType, index: int) -> DeviceInfo:
    """The description of a device that PyTorch has."""
    found = runtime(kind)
    device = found.device(index)
    return DeviceInfo(
        backend=kind.vendor,
        device_type=str(device),
        device_id=index,
        device_name=found.name(index),
        compute_capability=found.capability(index),
        total_memory_bytes=found.total_memory(index) or 0,
        driver_version=found.driver_version(index),
        is_available=True,
        properties=found.properties(index),
        available_memory_bytes=found.free_memory(index),
        supported_dtypes=list(supported_dtypes(device)),
    )
