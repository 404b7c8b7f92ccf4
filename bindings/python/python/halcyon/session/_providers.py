"""onnxruntime's execution providers as backends of Halcyon."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from halcyon import _native
from halcyon._default import default_backend, resolve_backend
from halcyon._errors import ArgumentError, UnavailableError
from halcyon._native import Backend
from halcyon.session._log import warn

__all__ = [
    "Provider",
    "get_all_providers",
    "get_available_providers",
    "get_device",
    "set_global_thread_pool_sizes",
]

CPU = "CPUExecutionProvider"
#: The provider that stands for the best device, or for the backend in its option ``backend``.
AUTO = "HalcyonExecutionProvider"

#: Providers by priority, each with its backend.
_BACKENDS = {
    "CUDAExecutionProvider": "cuda",
    "ROCMExecutionProvider": "rocm",
    "MIGraphXExecutionProvider": "rocm",
    "CoreMLExecutionProvider": "metal",
    "OpenCLExecutionProvider": "opencl",
    "WebGpuExecutionProvider": "webgpu",
    CPU: "cpu",
}
#: The provider that names a backend.
_NAMES = {
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "metal": "CoreMLExecutionProvider",
    "opencl": "OpenCLExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "cpu": CPU,
}
#: Options of a provider that have an effect.
_OPTIONS = frozenset({"device_id", "gpu_mem_limit", "backend"})

#: A provider: a name, or a name with options.
ProviderLike = str | tuple[str, Mapping[Any, Any]]

_global_threads: int = 0
_lock = threading.Lock()


def set_global_thread_pool_sizes(intra_op_num_threads: int = 0, inter_op_num_threads: int = 0) -> None:
    """Sets the threads of sessions with ``use_per_session_threads = False``. 0: all cores."""
    global _global_threads
    if intra_op_num_threads < 0 or inter_op_num_threads < 0:
        raise ArgumentError("set_global_thread_pool_sizes: a number of threads is negative")
    if inter_op_num_threads > 1:
        warn(f"inter_op_num_threads={inter_op_num_threads} has no effect: nodes run one after another")
    with _lock:
        _global_threads = int(intra_op_num_threads)
        _shared_pool.cache_clear()


@functools.cache
def _shared_pool(threads: int) -> Backend:
    return Backend("cpu", threads=threads)


@functools.cache
def _discovered() -> tuple[str, ...]:
    """The backends of the machine that have a device."""
    return tuple(b["id"] for b in _native.devices() if b["available"] and b["devices"])


def get_available_providers() -> list[str]:
    """The providers whose devices this machine has, best first.

    ``HalcyonExecutionProvider``, which stands for the best device, is accepted too, but not listed.
    """
    have = _discovered()
    return [name for backend, name in _NAMES.items() if backend in have]


def get_all_providers() -> list[str]:
    """All providers, best first."""
    return [AUTO, *_BACKENDS]


def get_device() -> str:
    """``GPU`` if the machine has an accelerator that Halcyon uses, otherwise ``CPU``."""
    return "CPU" if get_available_providers() == [CPU] else "GPU"


@dataclass
class Provider:
    """A provider that a session asked for, or uses."""

    name: str
    options: dict[str, str] = field(default_factory=dict)

    def device(self) -> str | None:
        """The name of the device, such as ``cuda:1``; None for the best one."""
        if self.name == AUTO:
            return self.options.get("backend")
        backend = _BACKENDS[self.name]
        index = self.options.get("device_id")
        return backend if index in (None, "0", "") else f"{backend}:{index}"

    def without_effect(self) -> list[str]:
        """Options without effect."""
        known = _OPTIONS if self.name != CPU else frozenset({"device_id"})
        return [f'{k}="{v}" of {self.name}' for k, v in self.options.items() if k not in known]

    def memory_limit(self) -> int | None:
        """The most bytes of device memory."""
        text = self.options.get("gpu_mem_limit")
        return int(text) if text else None


def _normal(providers: Sequence[ProviderLike], options: Sequence[Mapping[Any, Any]] | None) -> list[Provider]:
    """The providers with their options.

    Raises:
        ArgumentError: For values of other types, and for lists of different lengths.

    """
    if isinstance(providers, str):
        raise ArgumentError(f'providers: give a list, such as ["{providers}"]')
    if not isinstance(providers, Iterable):
        raise ArgumentError(f"providers: {providers!r} is no list of names")
    if options is not None and not isinstance(options, Sequence):
        raise ArgumentError(f"provider_options: {options!r} is no list of dicts")
    if options is not None and len(options) != len(providers):
        what = f"{len(providers)} providers and {len(options)} provider_options"
        raise ArgumentError(f"providers: {what}; give one for each")
    found: list[Provider] = []
    for i, item in enumerate(providers):
        pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        if isinstance(item, str):
            name, own = item, {} if options is None else options[i]
        elif pair and isinstance(item[1], Mapping):
            if options is not None and any(options):
                raise ArgumentError(
                    "providers: give options with the names, or as provider_options, not both"
                )
            name, own = item[0], item[1]
        else:
            raise ArgumentError(f"providers: {item!r} is neither a name nor a pair of a name and a dict")
        if not isinstance(own, Mapping):
            raise ArgumentError(f"provider_options: {own!r} is not a dict")
        if any(p.name == name for p in found):
            warn(f"the provider {name} is given twice; the first counts", stacklevel=6)
            continue
        found.append(Provider(name, {str(k): str(v) for k, v in own.items()}))
    return found


def choose(
    providers: Sequence[ProviderLike] | None, options: Sequence[Mapping[Any, Any]] | None, severity: int
) -> list[Provider]:
    """The providers to try, in their order. Without any, the best device."""
    if not providers:
        if options and any(options):
            raise ArgumentError("provider_options: they need providers")
        return [Provider(AUTO)]
    asked = _normal(providers, options)
    have = get_available_providers()
    usable: list[Provider] = []
    for p in asked:
        if p.name == AUTO or (p.name in _BACKENDS and _NAMES[_BACKENDS[p.name]] in have):
            usable.append(p)
        else:
            what = "is not available on this machine" if p.name in _BACKENDS else "is unknown"
            warn(f"the provider {p.name} {what}; available are {', '.join(have)}", severity, stacklevel=6)
    if not usable:
        warn("no provider that was asked for is available; the CPU is used", severity, stacklevel=6)
        usable.append(Provider(CPU))
    return usable


@dataclass
class Pool:
    """What a session needs of its backend."""

    threads: int = 0
    own_threads: bool = True
    profile: bool = False

    def open(self, provider: Provider) -> Backend:
        """The backend of a provider. Backends without settings of their own are shared."""
        name, limit = provider.device(), provider.memory_limit()
        is_cpu = name == "cpu" or (name is None and default_backend().kind == "cpu")
        if is_cpu and not self.own_threads and not self.profile and _global_threads:
            return _shared_pool(_global_threads)
        threads = self.threads if self.own_threads else _global_threads
        if not is_cpu or not threads:
            threads = 0
        if threads or limit is not None or self.profile:
            name = name or default_backend().id
            return Backend(name, threads=threads or None, memory_limit=limit, profile=self.profile)
        return resolve_backend(name)


def open_first(providers: Iterable[Provider], pool: Pool, severity: int) -> tuple[Provider, Backend]:
    """The first provider whose device opens, with its backend."""
    last: UnavailableError | None = None
    for p in providers:
        for text in p.without_effect():
            warn(f"the option {text} has no effect", severity, stacklevel=6)
        try:
            return p, pool.open(p)
        except UnavailableError as e:
            warn(f"the provider {p.name} cannot be used: {e}", severity, stacklevel=6)
            last = e
    raise last if last is not None else ArgumentError("providers: none is left")


def name_of(backend: Backend) -> str:
    """The provider that stands for a backend."""
    return _NAMES.get(backend.kind, AUTO)
