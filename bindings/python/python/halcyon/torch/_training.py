"""A device by name, PyTorch's settings for it, and the policy of mixed precision."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypedDict

import torch

from halcyon import _native
from halcyon._errors import ArgumentError
from halcyon.torch._errors import BackendError, BackendErrorKind
from halcyon.torch._names import BackendType
from halcyon.torch._runtimes import gpu_stack, runtime

__all__ = [
    "AmpConfig",
    "Configured",
    "configure_backend",
    "configure_torch_backend",
    "resolve_amp_config",
    "resolve_device",
    "resolve_ort_providers",
    "resolve_torch_device",
]

#: The order of `auto`. A build of PyTorch has CUDA or ROCm, never both.
AUTO_ORDER = (BackendType.CUDA, BackendType.ROCM, BackendType.METAL, BackendType.CPU)

_TWINS = {BackendType.CUDA: BackendType.ROCM, BackendType.ROCM: BackendType.CUDA}


def resolve_torch_device(backend: BackendType | str = "auto") -> torch.device:
    """The device that a name stands for.

    `auto` is the first of CUDA (or ROCm), MPS and the CPU that PyTorch has. CUDA and ROCm are both
    `torch.device("cuda")`. The result is the same at each call on a machine.

    Raises :class:`BackendError` for an unknown name, for `cuda` in a build of PyTorch for ROCm and the
    reverse, and for a device that is missing.
    """
    asked = BackendType(backend)
    if asked is BackendType.AUTO:
        asked = next(kind for kind in AUTO_ORDER if runtime(kind).absent() is None)
    reason = runtime(asked).absent()
    if reason is None:
        return torch.device(runtime(asked).device_type)
    raise _missing(asked, reason)


def _missing(asked: BackendType, reason: str) -> BackendError:
    """The error for a backend that PyTorch does not have here."""
    if not runtime(asked).supported:
        return BackendError(f"{asked}: {reason}", BackendErrorKind.UNSUPPORTED)
    twin = _TWINS.get(asked)
    if twin is None or gpu_stack() is not twin:
        return BackendError(f'{asked}: {reason}, or use "auto" or "cpu"')
    if runtime(twin).absent() is None:
        fix = f'the GPU stack of this PyTorch is {twin.title}. Use "{twin}" (or "auto")'
    else:
        fix = f'{reason}, or use "auto" or "cpu"'
    return BackendError(f"{asked}: {fix}", BackendErrorKind.MISMATCH)


@dataclass(frozen=True)
class Configured:
    """PyTorch's settings after :func:`configure_torch_backend`. `str()` gives the diagnostics."""

    #: The name as requested.
    requested: str
    #: The backend of the device.
    backend: BackendType
    device: torch.device
    #: Whether float32 products are computed in TF32. Devices before compute capability 8.0 never do.
    tf32: bool
    #: Whether cuDNN measures its algorithms for each shape; None if the device does not use cuDNN.
    cudnn_benchmark: bool | None
    #: `highest`, `high` or `medium`.
    matmul_precision: str
    #: The diagnostics, line by line: what, and its value.
    diagnostics: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':<18} {value}" for name, value in self.diagnostics)


def configure_torch_backend(
    backend: BackendType | str, device: torch.device | str, verbose: bool = True
) -> Configured:
    """Sets PyTorch's flags for a device, for the whole process.

    On CUDA: `torch.backends.cudnn.benchmark`, TF32 for products and convolutions, and
    `torch.set_float32_matmul_precision("high")`. On ROCm: TF32 off, and "high". On MPS: "high". On the CPU
    nothing is changed. `verbose` prints versions, the device, its memory and the flags.

    Raises :class:`BackendError` for an unknown name, and if `backend` is not the device's backend.
    """
    asked, device = BackendType(backend), torch.device(device)
    there = _backend_of(device)
    if asked not in (BackendType.AUTO, there):
        raise BackendError(
            f'{asked}: the given device is {device}, which is {there.title} here. Use "{there}" (or "auto")',
            BackendErrorKind.MISMATCH,
        )
    reason = runtime(there).absent()
    if reason is not None:
        raise _missing(there, reason)
    if there is BackendType.CUDA:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    elif there is BackendType.ROCM:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = False
        _tf32_off()
    elif there is BackendType.METAL:
        torch.set_float32_matmul_precision("high")
    configured = _state(str(backend), there, device)
    if verbose:
        print(configured)
    return configured


def _backend_of(device: torch.device) -> BackendType:
    if device.type == "cuda":
        return gpu_stack()
    for kind in BackendType:
        if kind is not BackendType.AUTO and runtime(kind).device_type == device.type:
            return kind
    raise BackendError(
        f"{device}: Halcyon has no backend for this device. Use a device of type cpu, cuda, mps, xpu or xla",
        BackendErrorKind.UNSUPPORTED,
    )


def _tf32_off() -> None:
    """Switches TF32 off for products and leaves the precision at "high".

    A build for ROCm ignores "high" already, unless the user allows TF32 by an environment variable. Then
    only the newer of PyTorch's two settings can say both.
    """
    if _tf32_on():
        torch.backends.cuda.matmul.fp32_precision = "ieee"


def _tf32_on() -> bool:
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer == "ieee":
        return False
    # Reading the older setting is an error in PyTorch if the two disagree, which "ieee" alone can cause.
    return bool(torch.backends.cuda.matmul.allow_tf32)


def _gigabytes(count: int | None) -> str:
    return "not reported" if count is None else f"{count / 1e9:.2f} GB"


def _cudnn() -> str:
    return str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]  # PyTorch's


def _on(flag: bool) -> str:
    return "on" if flag else "off"


def _state(requested: str, kind: BackendType, device: torch.device) -> Configured:
    found, index = runtime(kind), device.index or 0
    capability = found.capability(index)
    has_tf32 = kind is BackendType.CUDA and int((capability or "0").split(".")[0]) >= 8
    tf32, precision = has_tf32 and _tf32_on(), torch.get_float32_matmul_precision()
    is_cuda = kind is BackendType.CUDA
    benchmark = bool(torch.backends.cudnn.benchmark) if is_cuda else None
    lines = [
        ("backend requested", requested),
        ("backend resolved", f"{kind} ({device})"),
        ("halcyon", _native.__version__),
        ("torch", torch.__version__),
    ]
    if is_cuda:
        lines += [("CUDA", str(torch.version.cuda)), ("cuDNN", _cudnn())]
    if kind is BackendType.ROCM:
        lines += [("HIP", str(torch.version.hip))]
    if kind is BackendType.TPU:
        lines += [("torch_xla", importlib.metadata.version("torch_xla"))]
    lines += [
        ("driver", found.driver_version(index) or "not reported"),
        ("device", found.name(index)),
        ("capability", capability or "not reported"),
        ("memory total", _gigabytes(found.total_memory(index))),
        ("memory allocated", _gigabytes(found.allocated(index))),
        ("memory reserved", _gigabytes(found.reserved(index))),
        ("TF32", _on(tf32)),
    ]
    if benchmark is not None:
        lines += [("cuDNN benchmark", _on(benchmark))]
    lines += [("matmul precision", precision)]
    return Configured(requested, kind, device, tf32, benchmark, precision, tuple(lines))


class AmpConfig(TypedDict):
    """The policy of mixed precision."""

    #: Whether to use `torch.autocast`.
    enabled: bool
    #: The dtype of autocast; None if it is disabled.
    dtype: torch.dtype | None
    #: Whether to scale the loss (`torch.amp.GradScaler`), because float16 has a small range.
    use_grad_scaler: bool


def resolve_amp_config(device: torch.device | str) -> AmpConfig:
    """Mixed precision in float16 on CUDA, ROCm and MPS, with loss scaling on CUDA and ROCm; else none."""
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        raise ArgumentError(f"{device!r} is no device of PyTorch; pass one such as 'cuda:0'") from None
    enabled = kind in ("cuda", "mps")
    return {
        "enabled": enabled,
        "dtype": torch.float16 if enabled else None,
        "use_grad_scaler": kind == "cuda",
    }


_CPU_PROVIDER = "CPUExecutionProvider"
#: ONNX Runtime's execution providers by backend, in the order of `auto`. The first that is available serves
#: the backend. MIGraphX takes ROCm's place from ONNX Runtime 1.23 on.
_PROVIDERS = {
    BackendType.CUDA: ("CUDAExecutionProvider",),
    BackendType.ROCM: ("ROCMExecutionProvider", "MIGraphXExecutionProvider"),
    BackendType.METAL: ("CoreMLExecutionProvider",),
    BackendType.CPU: (_CPU_PROVIDER,),
}


def resolve_ort_providers(backend: BackendType | str, available: Iterable[str]) -> list[str]:
    """ONNX Runtime's execution providers for a backend, the preferred one first, the CPU's last.

    `available` are the providers that the build of ONNX Runtime has
    (`onnxruntime.get_available_providers()`). `auto` takes the first of CUDA, ROCm (or MIGraphX), CoreML and
    the CPU.

    Raises :class:`BackendError` for an unknown name, for `cuda` where ROCm's provider is available and the
    reverse, and for a provider that is not available.
    """
    asked, there = BackendType(backend), list(available)
    if asked is BackendType.AUTO:
        wanted = [name for names in _PROVIDERS.values() for name in names]
        found = next((name for name in wanted if name in there), _CPU_PROVIDER)
    elif asked is BackendType.CPU:
        # Every build of ONNX Runtime has it.
        found = _CPU_PROVIDER
    elif asked in _PROVIDERS:
        first = _first(asked, there)
        if first is None:
            raise _no_provider(asked, there)
        found = first
    else:
        valid = ", ".join(f'"{kind}"' for kind in (BackendType.AUTO, *_PROVIDERS))
        raise BackendError(
            f"{asked}: Halcyon knows no execution provider of ONNX Runtime for it. Use one of {valid}",
            BackendErrorKind.UNSUPPORTED,
        )
    return [found] if found == _CPU_PROVIDER else [found, _CPU_PROVIDER]


def _first(kind: BackendType, there: list[str]) -> str | None:
    return next((name for name in _PROVIDERS[kind] if name in there), None)


def _no_provider(asked: BackendType, there: list[str]) -> BackendError:
    twin = _TWINS.get(asked)
    if twin is not None and _first(twin, there) is not None:
        return BackendError(
            f'{asked}: this ONNX Runtime is a build for {twin.title}. Use "{twin}" (or "auto")',
            BackendErrorKind.MISMATCH,
        )
    has = f"has only {', '.join(there)}" if there else "was given without any provider"
    return BackendError(
        f"{asked}: ONNX Runtime {has}; it needs {' or '.join(_PROVIDERS[asked])}. "
        f'Install a build of ONNX Runtime for {asked.title}, or use "auto" or "cpu"',
        BackendErrorKind.UNAVAILABLE_PROVIDER,
    )


#: The same functions without `torch` in their names.
resolve_device = resolve_torch_device
configure_backend = configure_torch_backend
