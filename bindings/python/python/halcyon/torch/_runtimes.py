"""What PyTorch has for each backend: its devices, their facts, and their memory.

Facts that PyTorch does not give (driver versions, the processor's name, the machine's memory) come from
Halcyon's own drivers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch

from halcyon import _native
from halcyon._errors import UnsupportedError
from halcyon.torch._names import BackendType

__all__ = ["Runtime", "gpu_stack", "runtime"]


def gpu_stack() -> BackendType:
    """The stack that this build of PyTorch calls `cuda`: ROCm in a build for ROCm, else CUDA."""
    return BackendType.ROCM if torch.version.hip else BackendType.CUDA


@functools.cache
def _reports() -> dict[str, dict[str, Any]]:
    """What Halcyon's drivers find, by backend. The drivers are asked once."""
    return {report["id"]: report for report in _native.devices()}


def _native_fact(kind: BackendType, index: int, name: str) -> Any:
    """A fact from Halcyon's driver, or None if it does not know the device."""
    devices = _reports().get(kind.id, {}).get("devices", [])
    found = next((d for d in devices if d["index"] == index), None)
    return None if found is None else found.get(name)


class Runtime:
    """The devices of one backend in PyTorch. This class is also the runtime of a backend that has none."""

    #: The type of its `torch.device`; empty if PyTorch has no device for the backend.
    device_type = ""

    def __init__(self, kind: BackendType) -> None:
        self.kind = kind

    def absent(self) -> str | None:
        """Why PyTorch has no device of this backend, and what to do; None if it has one."""
        return (
            f"PyTorch has no {self.kind.title} device. Use Halcyon's own arrays and models on it "
            f'(halcyon.Backend("{self.kind.id}"))'
        )

    @property
    def supported(self) -> bool:
        """Whether a build of PyTorch can have devices of this backend."""
        return bool(self.device_type)

    def count(self) -> int:
        """The number of devices."""
        return 0

    def device(self, index: int) -> torch.device:
        """PyTorch's name of a device."""
        return torch.device(self.device_type, index)

    def name(self, index: int) -> str:
        """The device's name, for people."""
        return str(_native_fact(self.kind, index, "name") or self.kind.title)

    def capability(self, index: int) -> str | None:
        """The compute capability, such as `9.0`; None if the backend has no such number."""
        return None

    def driver_version(self, index: int) -> str | None:
        """The version of the device's driver, else of its runtime; None if unknown."""
        version = _native_fact(self.kind, index, "driver_version")
        return None if version is None else str(version)

    def properties(self, index: int) -> dict[str, Any]:
        """Further facts. `fp8_supported`: whether it multiplies 8-bit floats; None if unknown."""
        return {"fp8_supported": None}

    def total_memory(self, index: int) -> int | None:
        """Bytes of memory; None if unknown."""
        return None

    def free_memory(self, index: int) -> int | None:
        """Bytes of free memory, by the driver; None if unknown."""
        return None

    def allocated(self, index: int) -> int | None:
        """Bytes in use by this process; None if PyTorch does not count them."""
        return None

    def reserved(self, index: int) -> int | None:
        """Bytes that this process took from the driver; None if PyTorch does not count them."""
        return None

    def peak(self, index: int) -> int | None:
        """The highest number of bytes in use since :meth:`reset_peak`; None if it is not counted."""
        return None

    def reset_peak(self, index: int) -> None:
        """Starts a new peak."""

    def limit_memory(self, index: int, limit: int) -> None:
        """Caps the memory of this process on a device."""
        raise UnsupportedError(
            f"memory_limit on {self.kind.title}: PyTorch cannot cap its memory there. Leave it unset"
        )

    def set_device(self, index: int) -> None:
        """Makes a device the current one."""

    def synchronize(self, index: int) -> None:
        """Waits for all submitted work."""

    def empty_cache(self) -> None:
        """Returns cached memory to the driver."""


class _Cpu(Runtime):
    device_type = "cpu"

    def absent(self) -> str | None:
        return None

    def count(self) -> int:
        return 1

    def device(self, index: int) -> torch.device:
        return torch.device("cpu")

    def driver_version(self, index: int) -> str | None:
        return None

    def properties(self, index: int) -> dict[str, Any]:
        found = dict(_native_fact(self.kind, index, "properties") or {})
        found["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        found["num_threads"] = torch.get_num_threads()
        # Processors multiply 8-bit floats by converting them.
        found["fp8_supported"] = False
        return found

    def total_memory(self, index: int) -> int | None:
        total = _native_fact(self.kind, index, "total_memory")
        return None if total is None else int(total)

    def free_memory(self, index: int) -> int | None:
        # The drivers measure free memory when a device is opened.
        free = _native.Backend("cpu", threads=1).info.get("free_memory")
        return None if free is None else int(free)

    def allocated(self, index: int) -> int | None:
        """The memory of this process, because PyTorch does not count allocations on the CPU."""
        try:
            with open("/proc/self/statm", encoding="ascii") as f:
                return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return None


class _Gpu(Runtime):
    """CUDA and ROCm: PyTorch calls both `cuda`."""

    device_type = "cuda"

    def absent(self) -> str | None:
        title, there = self.kind.title, gpu_stack()
        if there is not self.kind:
            return f"this PyTorch is a build for {there.title}. Install PyTorch's build for {title}"
        if torch.cuda.is_available():
            return None
        if self.kind is BackendType.CUDA and torch.version.cuda is None:
            return "this PyTorch is a build without CUDA. Install PyTorch's build for CUDA"
        why = _reports().get(self.kind.id, {}).get("reason")
        own = f" (Halcyon: {why})" if why else ""
        return f"PyTorch finds no {title} device{own}. Check the driver"

    def count(self) -> int:
        return torch.cuda.device_count() if self.absent() is None else 0

    def name(self, index: int) -> str:
        return str(torch.cuda.get_device_name(index))

    def capability(self, index: int) -> str | None:
        major, minor = torch.cuda.get_device_capability(index)
        return f"{major}.{minor}"

    def driver_version(self, index: int) -> str | None:
        own = super().driver_version(index)
        return own or (torch.version.hip if self.kind is BackendType.ROCM else torch.version.cuda)

    def properties(self, index: int) -> dict[str, Any]:
        found = torch.cuda.get_device_properties(index)
        architecture = str(getattr(found, "gcnArchName", ""))
        facts: dict[str, Any] = {
            "multi_processor_count": found.multi_processor_count,
            "bf16_supported": torch.cuda.is_bf16_supported(including_emulation=False),
        }
        if self.kind is BackendType.ROCM:
            facts["architecture"] = architecture
            # MI300 and later, RDNA4.
            facts["fp8_supported"] = architecture.startswith(("gfx94", "gfx95", "gfx12"))
        else:
            facts["fp8_supported"] = torch.cuda.get_device_capability(index) >= (8, 9)
        return facts

    def total_memory(self, index: int) -> int | None:
        return int(torch.cuda.get_device_properties(index).total_memory)

    def free_memory(self, index: int) -> int | None:
        return int(torch.cuda.mem_get_info(index)[0])

    def allocated(self, index: int) -> int | None:
        return torch.cuda.memory_allocated(index)

    def reserved(self, index: int) -> int | None:
        return torch.cuda.memory_reserved(index)

    def peak(self, index: int) -> int | None:
        return torch.cuda.max_memory_allocated(index)

    def reset_peak(self, index: int) -> None:
        torch.cuda.reset_peak_memory_stats(index)

    def limit_memory(self, index: int, limit: int) -> None:
        total = self.total_memory(index) or limit
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), index)

    def set_device(self, index: int) -> None:
        torch.cuda.set_device(index)

    def synchronize(self, index: int) -> None:
        torch.cuda.synchronize(index)

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class _Intel(Runtime):
    device_type = "xpu"

    def absent(self) -> str | None:
        if torch.xpu.is_available():
            return None
        if torch.version.xpu is None:
            return "this PyTorch is a build without XPU. Install PyTorch's build for Intel GPUs"
        return "PyTorch finds no XPU device. Check the driver"

    def count(self) -> int:
        return torch.xpu.device_count() if self.absent() is None else 0

    def name(self, index: int) -> str:
        return str(torch.xpu.get_device_name(index))

    def driver_version(self, index: int) -> str | None:
        reported = getattr(torch.xpu.get_device_properties(index), "driver_version", None)
        return str(reported) if reported else torch.version.xpu

    def total_memory(self, index: int) -> int | None:
        return int(torch.xpu.get_device_properties(index).total_memory)

    def free_memory(self, index: int) -> int | None:
        return int(torch.xpu.mem_get_info(index)[0])

    def allocated(self, index: int) -> int | None:
        return torch.xpu.memory_allocated(index)

    def reserved(self, index: int) -> int | None:
        return torch.xpu.memory_reserved(index)

    def peak(self, index: int) -> int | None:
        return torch.xpu.max_memory_allocated(index)

    def reset_peak(self, index: int) -> None:
        torch.xpu.reset_peak_memory_stats(index)

    def limit_memory(self, index: int, limit: int) -> None:
        total = self.total_memory(index) or limit
        torch.xpu.set_per_process_memory_fraction(min(1.0, limit / total), index)

    def set_device(self, index: int) -> None:
        torch.xpu.set_device(index)

    def synchronize(self, index: int) -> None:
        torch.xpu.synchronize(index)

    def empty_cache(self) -> None:
        torch.xpu.empty_cache()


class _Metal(Runtime):
    device_type = "mps"

    def absent(self) -> str | None:
        if torch.backends.mps.is_available():
            return None
        if not torch.backends.mps.is_built():
            return "this PyTorch is a build without MPS. Install PyTorch on macOS"
        return "PyTorch finds no MPS device: it needs macOS on Apple silicon"

    def count(self) -> int:
        return 1 if self.absent() is None else 0

    def device(self, index: int) -> torch.device:
        return torch.device("mps")

    def total_memory(self, index: int) -> int | None:
        """The memory that Metal recommends to use at most."""
        return int(torch.mps.recommended_max_memory())

    def free_memory(self, index: int) -> int | None:
        return max(0, (self.total_memory(index) or 0) - int(torch.mps.driver_allocated_memory()))

    def allocated(self, index: int) -> int | None:
        return int(torch.mps.current_allocated_memory())

    def reserved(self, index: int) -> int | None:
        return int(torch.mps.driver_allocated_memory())

    def limit_memory(self, index: int, limit: int) -> None:
        total = self.total_memory(index) or limit
        torch.mps.set_per_process_memory_fraction(min(1.0, limit / total))

    def synchronize(self, index: int) -> None:
        torch.mps.synchronize()

    def empty_cache(self) -> None:
        torch.mps.empty_cache()


class _Tpu(Runtime):
    """TPUs, through the package `torch_xla`."""

    device_type = "xla"

    @staticmethod
    def _xla(module: str) -> ModuleType:
        return importlib.import_module(module)

    def absent(self) -> str | None:
        if importlib.util.find_spec("torch_xla") is None:
            return "torch_xla is not installed. Install it: pip install torch_xla[tpu]"
        there = self._xla("torch_xla.runtime").device_type()
        return None if there == "TPU" else f"torch_xla runs on {there}, not on a TPU. Set PJRT_DEVICE=TPU"

    def count(self) -> int:
        return int(self._xla("torch_xla.runtime").addressable_device_count()) if self.absent() is None else 0

    def device(self, index: int) -> torch.device:
        made: torch.device = self._xla("torch_xla").device(index)
        return made

    def driver_version(self, index: int) -> str | None:
        return str(self._xla("torch_xla").__version__)

    def properties(self, index: int) -> dict[str, Any]:
        runtime = self._xla("torch_xla.runtime")
        attributes = runtime.global_runtime_device_attributes()
        return {
            "fp8_supported": None,
            "version": os.environ.get("TPU_ACCELERATOR_TYPE"),
            "topology": [device.get("coords") for device in attributes],
        }

    def _memory(self, index: int) -> dict[str, int]:
        info: dict[str, int] = self._xla("torch_xla.core.xla_model").get_memory_info(self.device(index))
        return info

    def total_memory(self, index: int) -> int | None:
        return self._memory(index).get("bytes_limit")

    def allocated(self, index: int) -> int | None:
        return self._memory(index).get("bytes_used")

    def free_memory(self, index: int) -> int | None:
        found = self._memory(index)
        if "bytes_limit" not in found or "bytes_used" not in found:
            return None
        return found["bytes_limit"] - found["bytes_used"]

    def synchronize(self, index: int) -> None:
        self._xla("torch_xla").sync(wait=True)


_CLASSES: dict[BackendType, type[Runtime]] = {
    BackendType.CUDA: _Gpu,
    BackendType.ROCM: _Gpu,
    BackendType.INTEL: _Intel,
    BackendType.METAL: _Metal,
    BackendType.TPU: _Tpu,
    BackendType.CPU: _Cpu,
}


def runtime(kind: BackendType) -> Runtime:
    """The runtime of a backend; `auto` has none."""
    return _CLASSES.get(kind, Runtime)(kind)
