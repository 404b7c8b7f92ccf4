"""Backends by vendor, with one interface to query their devices and memory and to prepare models."""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import Any, ClassVar, TypedDict, TypeVar, overload

import torch
from torch import nn
from torch.utils import _pytree as pytree

from halcyon._errors import ArgumentError, UnsupportedError
from halcyon.torch import _optim, _pipeline
from halcyon.torch._check import Sample
from halcyon.torch._config import BackendConfig, half_type
from halcyon.torch._errors import BackendError, BackendErrorKind
from halcyon.torch._info import DeviceInfo, MemoryStats, describe, memory
from halcyon.torch._names import BackendType, LevelLike, OptimizationLevel, level_of
from halcyon.torch._optimizations import Purpose, Task
from halcyon.torch._prepared import check_model, settings_of
from halcyon.torch._result import OptimizationResult, Receipt, level_before, receipts_before, remember
from halcyon.torch._runtimes import Runtime, runtime

__all__ = [
    "AMDBackend",
    "BackendFactory",
    "BackendInfo",
    "BaseBackend",
    "CPUBackend",
    "IntelBackend",
    "MetalBackend",
    "NVIDIABackend",
    "TPUBackend",
    "detect_best_backend",
    "detect_best_runtime",
    "get_backend",
    "list_available_backends",
]

#: The order of `auto` in this interface.
VENDORS = (BackendType.CUDA, BackendType.ROCM, BackendType.TPU, BackendType.INTEL, BackendType.CPU)
#: The order of :func:`detect_best_runtime`.
RUNTIMES = (BackendType.CUDA, BackendType.ROCM, BackendType.INTEL, BackendType.TPU, BackendType.CPU)

_T = TypeVar("_T")
_B = TypeVar("_B", bound="BaseBackend")


class BaseBackend(ABC):
    """An open device, for PyTorch.

    As a context manager it gives itself, and empties the device's cache at the end.
    """

    #: The vendor's name: `nvidia`, `amd`, `tpu`, `intel`, `cpu`.
    BACKEND_NAME: ClassVar[str] = "base"
    #: The kind of device.
    BACKEND_TYPE: ClassVar[BackendType]

    def __init__(
        self, config: BackendConfig | None = None, *, optimization_level: LevelLike | None = None
    ) -> None:
        """Opens a device.

        Raises :class:`BackendError` if PyTorch has no such device, and
        :class:`halcyon.UnsupportedError` for an option that this backend does not have.
        """
        if config is not None and not isinstance(config, BackendConfig):
            raise ArgumentError(f"config is a {type(config).__name__}; pass a halcyon.torch.BackendConfig")
        self.config = config if config is not None else BackendConfig()
        #: The level of models that are given none.
        self.optimization_level = level_of(optimization_level, self.config.optimization_level)
        #: Other backends that were tried before this one, each with the reason why it was not chosen.
        self.rejected: tuple[str, ...] = ()
        if not self._check_availability():
            reason = self._runtime.absent()
            raise BackendError(f'{self.BACKEND_TYPE}: {reason}, or use "auto" or "cpu"')
        self._device_id = self._checked(self.config.device_id)
        self._setup_environment()

    @property
    def _runtime(self) -> Runtime:
        return runtime(self.BACKEND_TYPE)

    @abstractmethod
    def _setup_environment(self) -> None:
        """Applies the options that are settings of PyTorch."""

    def _check_availability(self) -> bool:
        """Whether PyTorch has a device of this backend."""
        return self._runtime.absent() is None

    def _get_device_info(self, device_id: int = 0) -> DeviceInfo:
        """The description of a device."""
        return describe(self.BACKEND_TYPE, self._checked(device_id))

    def _checked(self, device_id: int) -> int:
        count = self._runtime.count()
        if not 0 <= device_id < count:
            valid = "0" if count == 1 else f"0 to {count - 1}"
            raise BackendError(
                f"{self.BACKEND_TYPE}:{device_id}: there is no such device; valid indices are {valid}"
            )
        return device_id

    @property
    def device(self) -> torch.device:
        """The current device."""
        return self._runtime.device(self._device_id)

    @property
    def is_available(self) -> bool:
        """Whether PyTorch still has the device."""
        return self._check_availability() and self._device_id < self._runtime.count()

    @property
    def device_count(self) -> int:
        """The number of devices of this backend."""
        return self._runtime.count()

    def get_device_info(self, device_id: int | None = None) -> DeviceInfo:
        """The description of a device by its index; of the current one for None."""
        return self._get_device_info(self._device_id if device_id is None else device_id)

    def get_device_info_dict(self, device_id: int | None = None) -> dict[str, Any]:
        """Deprecated: the description as a dictionary. Use `get_device_info().to_dict()`."""
        warnings.warn(
            "get_device_info_dict is deprecated; use get_device_info().to_dict()",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.get_device_info(device_id).to_dict()

    def get_memory_stats(self) -> MemoryStats:
        """The device's memory: `allocated`, `free`, `reserved` and `total` in MiB, and the same in bytes."""
        return memory(self.BACKEND_TYPE, self._device_id)

    def to_device(self, value: _T) -> _T:
        """Moves a tensor, a module (in place), or all tensors in lists and dictionaries to the device.

        Objects with a method `to`, such as packed sequences and the batches of tokenizers, are moved by it.
        """
        if isinstance(value, nn.Module):
            value.to(self.device)
            return value

        # Containers such as packed sequences and the batches of tokenizers move themselves.
        def moves(v: Any) -> bool:
            return callable(getattr(v, "to", None))

        def move(v: Any) -> Any:
            return v.to(self.device) if moves(v) else v

        moved: _T = pytree.tree_map(move, value, is_leaf=moves)
        return moved

    def set_device(self, device_id: int) -> None:
        """Makes another device of this backend the current one."""
        self._device_id = self._checked(device_id)
        self._runtime.set_device(device_id)

    def synchronize(self) -> None:
        """Waits for all submitted work."""
        self._runtime.synchronize(self._device_id)

    def empty_cache(self) -> None:
        """Returns cached memory to the driver."""
        self._runtime.empty_cache()

    @contextlib.contextmanager
    def scope(self: _B) -> Iterator[_B]:
        """A context at whose end the device's cache is emptied, also after an error."""
        try:
            yield self
        finally:
            self.empty_cache()

    def __enter__(self: _B) -> _B:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.empty_cache()

    def __repr__(self) -> str:
        name = self._runtime.name(self._device_id)
        return f"{type(self).__name__}({self.device}, {name}, level {self.optimization_level})"

    def prepare_model(
        self,
        model: nn.Module,
        optimization_level: LevelLike | None = None,
        *,
        sample_input: Any = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Module:
        """Moves a model to the device and remembers its level, and optimises it if there is a sample.

        The model is changed in place and returned: its parameters are the same objects. `sample_input` is a
        tensor, a tuple of inputs or a dictionary of inputs by name. Each optimisation is checked on it and
        measured; what is not faster, or differs too much, is not used. `dtype` asks for mixed precision.
        Everything that is skipped is reported by one :class:`OptimizationWarning`;
        :func:`halcyon.torch.optimization_result` has the receipts.
        """
        check_model(model)
        level = level_of(optimization_level, self.optimization_level)
        task = self._task(Purpose.PREPARE, level, sample_input, dtype)
        self._move(model)
        return self._done(task, _pipeline.run(task, model))

    def optimize_for_inference(
        self, model: nn.Module, sample_input: Any = None, dtype: torch.dtype | None = None
    ) -> nn.Module:
        """A copy of a model for inference, at the level of `prepare_model`, or else the backend's.

        The copy evaluates (`eval()`). The arguments are as for `prepare_model`.
        """
        task, result = self.optimized(model, None, sample_input, dtype)
        return self._done(task, result)

    def optimized(
        self, model: nn.Module, level: LevelLike | None, sample_input: Any, dtype: torch.dtype | None
    ) -> tuple[Task, OptimizationResult]:
        """Optimises a copy of a model for inference. The optimizers call this."""
        check_model(model)
        wanted = level_before(model) if level is None else OptimizationLevel(level)
        task = self._task(Purpose.INFERENCE, wanted, sample_input, dtype)
        task.earlier = receipts_before(model)
        self._move(model)
        return task, _pipeline.run(task, model)

    @overload
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: None = None,
        dtype: torch.dtype | None = None,
        *,
        sample_input: Any = None,
    ) -> nn.Module: ...

    @overload
    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype | None = None,
        *,
        sample_input: Any = None,
    ) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def optimize_for_training(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        dtype: torch.dtype | None = None,
        *,
        sample_input: Any = None,
    ) -> nn.Module | tuple[nn.Module, torch.optim.Optimizer]:
        """Optimises a model for training, in place, at the level of `prepare_model`, or else the backend's.

        With an optimizer, returns both. The optimizer updates the parameters of the returned model, its state
        is on the device, and it is fused where PyTorch's fused update is faster. On the sample, outputs and
        gradients are checked. The arguments are as for `prepare_model`.
        """
        check_model(model)
        task = self._task(Purpose.TRAINING, level_before(model), sample_input, dtype)
        task.earlier = receipts_before(model)
        if optimizer is not None:
            _optim.check_optimizer(optimizer, model)
        self._move(model, optimizer)
        model.train()
        result = _pipeline.run(task, model)
        if optimizer is not None and task.level.number >= 1:
            found = _optim.fuse(task, optimizer)
            if isinstance(found, Receipt):
                result.receipts.append(found)
                result.optimizations_applied.append(found.name)
            else:
                result.warnings.append(f"{_optim.FUSED}: {found}")
        if settings_of(result.model).autocast == torch.float16:
            result.warnings.append(
                "autocast: float16 gradients may vanish: scale the loss (torch.amp.GradScaler)"
            )
        model = self._done(task, result)
        return model if optimizer is None else (model, optimizer)

    def _task(
        self,
        purpose: Purpose,
        level: OptimizationLevel | None,
        sample_input: Any,
        dtype: torch.dtype | None,
    ) -> Task:
        """Checks the other arguments of an optimisation."""
        level = level or self.optimization_level
        if half_type(dtype, "dtype") in (torch.float16, torch.bfloat16) and level is OptimizationLevel.O0:
            raise ArgumentError(
                f"dtype: mixed precision in {dtype} needs level O1 or higher, and the level is O0"
            )
        sample = None if sample_input is None else Sample.of(sample_input, self.device)
        return Task(self.BACKEND_TYPE, self._device_id, level, purpose, self.config, dtype, sample)

    def _move(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        before = list(model.parameters())
        model.to(self.device)
        if optimizer is not None:
            _optim.follow(optimizer, before, list(model.parameters()))

    def _done(self, task: Task, result: OptimizationResult) -> nn.Module:
        remember(result)
        _pipeline.warn(task, result.warnings, stacklevel=3)
        return result.model


class _WithMemoryLimit(BaseBackend):
    """A device whose memory PyTorch can cap."""

    def _setup_environment(self) -> None:
        if self.config.num_threads is not None:
            raise UnsupportedError(
                f"num_threads on {self.BACKEND_TYPE.title}: it is an option of the CPU backend"
            )
        if self.config.memory_limit is not None:
            self._runtime.limit_memory(self._device_id, self.config.memory_limit)


class NVIDIABackend(_WithMemoryLimit):
    """An NVIDIA GPU, through CUDA."""

    BACKEND_NAME = "nvidia"
    BACKEND_TYPE = BackendType.CUDA


class AMDBackend(_WithMemoryLimit):
    """An AMD GPU, through ROCm."""

    BACKEND_NAME = "amd"
    BACKEND_TYPE = BackendType.ROCM


class IntelBackend(_WithMemoryLimit):
    """An Intel GPU (`xpu`)."""

    BACKEND_NAME = "intel"
    BACKEND_TYPE = BackendType.INTEL


class TPUBackend(_WithMemoryLimit):
    """A TPU, through `torch_xla`."""

    BACKEND_NAME = "tpu"
    BACKEND_TYPE = BackendType.TPU


class MetalBackend(_WithMemoryLimit):
    """An Apple GPU (`mps`)."""

    BACKEND_NAME = "metal"
    BACKEND_TYPE = BackendType.METAL


class CPUBackend(BaseBackend):
    """The processor."""

    BACKEND_NAME = "cpu"
    BACKEND_TYPE = BackendType.CPU

    def _setup_environment(self) -> None:
        if self.config.memory_limit is not None:
            self._runtime.limit_memory(self._device_id, self.config.memory_limit)
        if self.config.num_threads is not None:
            torch.set_num_threads(self.config.num_threads)


_CLASSES: dict[BackendType, type[BaseBackend]] = {
    c.BACKEND_TYPE: c for c in (NVIDIABackend, AMDBackend, TPUBackend, IntelBackend, MetalBackend, CPUBackend)
}


#: A backend, without opening it. `class` is None if PyTorch has no such device; `reason` is None if the
#: backend is available.
BackendInfo = TypedDict(
    "BackendInfo",
    {"available": bool, "class": str | None, "type": str, "devices": list[str], "reason": str | None},
)


class BackendFactory:
    """Opens backends."""

    @staticmethod
    def create(
        backend: BackendType | str = BackendType.AUTO, config: BackendConfig | None = None
    ) -> BaseBackend:
        """Opens a backend by type or name.

        `auto` opens the first that PyTorch has of NVIDIA, AMD, TPU, Intel and CPU; a named backend is never
        replaced by another.

        Raises :class:`BackendError` for an unknown name and for a device that is missing.
        """
        asked = BackendType(backend)
        if asked is not BackendType.AUTO:
            made = _CLASSES.get(asked)
            if made is None:
                raise BackendError(f"{asked}: {runtime(asked).absent()}", BackendErrorKind.UNSUPPORTED)
            return made(config)
        rejected = []
        for kind in VENDORS:
            reason = runtime(kind).absent()
            if reason is None:
                break
            rejected.append(f"{kind.vendor}: {reason}")
        opened = _CLASSES[kind](config)
        opened.rejected = tuple(rejected)
        return opened

    @staticmethod
    def is_available(backend: BackendType | str) -> bool:
        """Whether PyTorch has a device of a backend. `auto` always has one, the CPU."""
        asked = BackendType(backend)
        return asked is BackendType.AUTO or runtime(asked).absent() is None

    @staticmethod
    def get_all_backend_info() -> dict[str, BackendInfo]:
        """All backends by vendor name, with their devices, or the reason why there are none."""
        found: dict[str, BackendInfo] = {}
        for kind in BackendType:
            if kind is BackendType.AUTO:
                continue
            reason, there, own = runtime(kind).absent(), runtime(kind), _CLASSES.get(kind)
            found[kind.vendor] = {
                "available": reason is None,
                "class": None if own is None else own.__name__,
                "type": kind.id,
                "devices": [there.name(i) for i in range(there.count())],
                "reason": reason,
            }
        return found


def get_backend(name: BackendType | str | None = None, config: BackendConfig | None = None) -> BaseBackend:
    """Opens a backend by name; without a name, the best one (:meth:`BackendFactory.create`)."""
    return BackendFactory.create(BackendType.AUTO if name is None else name, config)


def _best(order: tuple[BackendType, ...]) -> BackendType:
    return next(kind for kind in order if runtime(kind).absent() is None)


def detect_best_backend() -> str:
    """The backend that `auto` opens: `nvidia`, `amd`, `tpu`, `intel` or `cpu`."""
    return _best(VENDORS).vendor


def detect_best_runtime() -> str:
    """The first of `cuda`, `rocm`, `xpu`, `tpu` and `cpu` that PyTorch has."""
    return _best(RUNTIMES).runtime


def list_available_backends() -> list[str]:
    """The vendor names of the backends that PyTorch has here."""
    return [
        kind.vendor
        for kind in BackendType
        if kind is not BackendType.AUTO and BackendFactory.is_available(kind)
    ]
