"""The optimisations of modules: when each applies, and what it changes."""

from __future__ import annotations

import copy
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from halcyon._errors import ArgumentError
from halcyon.torch._check import Sample
from halcyon.torch._config import BackendConfig
from halcyon.torch._fold import fold_batch_norms, obstacles
from halcyon.torch._info import supported_dtypes
from halcyon.torch._low_precision import Float8Linear, Int8Linear, replace_linears
from halcyon.torch._names import BackendType, OptimizationLevel
from halcyon.torch._prepared import PLAIN, Compilation, Settings, blocks, compiled_of, install
from halcyon.torch._result import Receipt
from halcyon.torch._runtimes import Runtime, runtime

__all__ = [
    "NO_SAMPLE",
    "OPTIMIZATIONS",
    "Bound",
    "Optimization",
    "Proposal",
    "Purpose",
    "Skip",
    "Task",
    "Variant",
]


class Purpose(Enum):
    """What a model is optimised for."""

    PREPARE = "prepare"
    INFERENCE = "inference"
    TRAINING = "training"


@dataclass
class Task:
    """One optimisation of a model."""

    kind: BackendType
    index: int
    level: OptimizationLevel
    purpose: Purpose
    config: BackendConfig
    #: The dtype of mixed precision, if the caller asks for one.
    dtype: torch.dtype | None = None
    sample: Sample | None = None
    #: The receipts of what was done to the model before. Without a sample it stays.
    earlier: dict[str, Receipt] = field(default_factory=dict)
    #: Whether gradients are checked too.
    training: bool = False

    @property
    def runtime(self) -> Runtime:
        """The devices of the backend."""
        return runtime(self.kind)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.runtime.device(self.index)


@dataclass
class Variant:
    """A module with the settings with which it runs."""

    module: nn.Module
    settings: Settings = PLAIN
    compiled: Callable[..., Any] | None = None

    def install(self) -> nn.Module:
        """The module, changed so that it runs as this variant."""
        install(self.module, self.settings, self.compiled)
        self.compiled = compiled_of(self.module)
        return self.module

    def changed(self, **settings: Any) -> Variant:
        """The same module with other settings."""
        return Variant(self.module, replace(self.settings, **settings))

    def copied(self) -> Variant:
        """A copy of the module, with the same settings."""
        # Some classes of modules have their own way of being copied, so the plain module is copied.
        install(self.module, PLAIN)
        return Variant(copy.deepcopy(self.module), self.settings)


class Bound(Enum):
    """What limits the difference from the unmodified model."""

    #: The same precision; only the order of operations may differ.
    SAME = "same"
    #: Products in 16 bits.
    MIXED = "mixed"
    #: Products in 8 bits.
    LOW = "low"


class Proposal(NamedTuple):
    """A variant to check."""

    variant: Variant
    #: What exactly is done, such as `bfloat16` or `12 layers`.
    detail: str
    bound: Bound = Bound.SAME
    #: Whether the caller asked for it, so that it is kept even if it is slower.
    requested: bool = False


class Skip(NamedTuple):
    """Why an optimisation does not apply."""

    reason: str


Proposals = list[Proposal | Skip]

NO_SAMPLE = "there is no sample_input to check it on"


@dataclass(frozen=True)
class Optimization:
    """An optimisation: a name, when it applies, and the variants that it proposes, the preferred first."""

    name: str
    description: str
    #: The first level that includes it.
    level: OptimizationLevel
    purposes: frozenset[Purpose]
    propose: Callable[[Task, Variant], Proposals] = field(repr=False)
    #: Whether it computes exactly what the model does, so that it needs no sample to be checked on.
    exact: bool = False


def counted(count: int, what: str) -> str:
    """A number of things, such as `1 block` or `2 blocks`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _inference_mode(task: Task, v: Variant) -> Proposals:
    return [Proposal(v.changed(inference=True), "no gradients are recorded")]


def _conv_bn(task: Task, v: Variant) -> Proposals:
    if task.sample is None:
        return [Skip(NO_SAMPLE)]
    new = v.copied()
    skipped: Proposals = [Skip(why) for why in obstacles(new.module)]
    count = fold_batch_norms(new.module)
    if count > 0:
        return [*skipped, Proposal(new, f"{counted(count, 'batch norm')} folded")]
    return skipped or [Skip("the model has no batch norm directly after a convolution or linear layer")]


_IMAGE_LAYERS = (nn.Conv2d, nn.ConvTranspose2d)


def _channels_last(task: Task, v: Variant) -> Proposals:
    if not any(isinstance(m, _IMAGE_LAYERS) for m in v.module.modules()):
        return [Skip("the model has no convolution over images")]
    if task.kind is BackendType.TPU:
        return [Skip("the TPU's compiler chooses the layout")]
    return [Proposal(v.changed(channels_last=True), "images and weights with the channels last")]


def _policy(task: Task) -> tuple[torch.dtype | None, str]:
    """The device's own dtype of mixed precision, or why it has none."""
    if task.kind in (BackendType.CUDA, BackendType.ROCM, BackendType.METAL):
        if task.purpose is Purpose.INFERENCE:
            return torch.float16, ""
        facts = task.runtime.properties(task.index)
        if facts.get("bf16_supported", "bfloat16" in supported_dtypes(task.device)):
            return torch.bfloat16, ""
        return None, "float16 needs a scaled loss: pass dtype=torch.float16 and use torch.amp.GradScaler"
    if task.kind is BackendType.TPU:
        return torch.bfloat16, ""
    return None, f"the policy of {task.kind.title} is float32: pass dtype=torch.bfloat16 to use it"


def _autocast(task: Task, v: Variant) -> Proposals:
    asked = task.dtype or task.config.amp_dtype
    dtype, why = (asked, "") if asked is not None else _policy(task)
    if dtype is None:
        return [Skip(why)]
    if dtype == torch.float32:
        return []
    if not torch.amp.is_autocast_available(task.device.type):
        return [Skip(f"PyTorch has no autocast on {task.device.type}")]
    name = str(dtype).removeprefix("torch.")
    return [Proposal(v.changed(autocast=dtype), name, Bound.MIXED, requested=asked is not None)]


def _checkpointing(task: Task, v: Variant) -> Proposals:
    asked = task.config.activation_checkpointing
    if asked is False or v.settings.checkpointing:
        return []
    if not asked:
        return [
            Skip("it is used if BackendConfig.activation_checkpointing is set, or if a step does not fit")
        ]
    count = len(blocks(v.module))
    if count == 0:
        return [Skip("the model has no list or sequence of blocks with two or more layers each")]
    return [Proposal(v.changed(checkpointing=True), counted(count, "block"), requested=True)]


def _low_precision(layer: type[Float8Linear] | type[Int8Linear], task: Task, v: Variant) -> Proposals:
    fp8 = task.runtime.properties(task.index).get("fp8_supported")
    if layer is Float8Linear and not fp8:
        why = "the device does not multiply 8-bit floats"
        return [
            Skip(why if fp8 is False else "PyTorch does not say whether the device multiplies 8-bit floats")
        ]
    if layer is Int8Linear and fp8:
        return [Skip("the device multiplies 8-bit floats, which are more exact")]
    if task.kind not in (BackendType.CUDA, BackendType.ROCM, BackendType.CPU):
        return [Skip(f"PyTorch has no product of bytes on {task.kind.title}")]
    if task.sample is None:
        return [Skip(NO_SAMPLE)]
    new = v.copied()
    count = replace_linears(new.module, layer, layer.takes)
    if count == 0:
        return [Skip("the model has no linear layer whose sizes such products take")]
    return [Proposal(new, counted(count, "linear layer"), Bound.LOW)]


def _compile_backends(task: Task) -> list[str | Skip]:
    """The backends of `torch.compile` to try, the preferred first."""
    import torch._dynamo

    asked = task.config.compile_backend
    if asked in (None, "halcyon") and importlib.util.find_spec("halcyon.torch.compile") is not None:
        importlib.import_module("halcyon.torch.compile")
    names = torch._dynamo.list_backends(exclude_tags=())
    if asked is not None:
        if asked not in names:
            raise ArgumentError(
                f"compile_backend: {asked!r} is not a backend of torch.compile; valid names are "
                + ", ".join(names)
            )
        return [asked]
    if task.kind is BackendType.TPU:
        return ["openxla"]
    found: list[str | Skip] = []
    if "halcyon" in names and task.kind in (BackendType.CPU, BackendType.CUDA):
        found.append("halcyon")
    if task.kind is BackendType.CPU and not _cpp_compiler():
        found.append(Skip("inductor needs a C++ compiler: install g++ or clang++"))
    elif task.kind is not BackendType.CPU and task.kind is not BackendType.METAL and not _triton():
        found.append(Skip("inductor needs triton: install it with PyTorch's build for this device"))
    else:
        found.append("inductor")
    return found


def _cpp_compiler() -> bool:
    names = (os.environ.get("CXX"), "g++", "clang++", "cl")
    return any(name and shutil.which(name) for name in names)


def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _compilation(task: Task, v: Variant) -> Proposals:
    asked = task.config.compile_backend is not None
    if task.sample is None and not asked:
        return [Skip(NO_SAMPLE)]
    found: Proposals = []
    for name in _compile_backends(task):
        if isinstance(name, Skip):
            found.append(name)
            continue
        options: dict[str, Any] = {}
        if name == "inductor" and task.purpose is Purpose.INFERENCE:
            # The weights become constants of the compiled code.
            options["freezing"] = True
        if name == "inductor" and task.level is OptimizationLevel.O3 and task.kind is not BackendType.CPU:
            options["max_autotune"] = True
        how = Compilation(name, tuple(options.items()))
        found.append(Proposal(v.changed(compilation=how), str(how), requested=asked))
    return found


_ALL = frozenset(Purpose)
_O1, _O2, _O3 = OptimizationLevel.O1, OptimizationLevel.O2, OptimizationLevel.O3

#: All optimisations of a module, in the order in which they are made.
OPTIMIZATIONS = (
    Optimization(
        "inference-mode",
        "records nothing for gradients, and runs in torch.inference_mode",
        _O1,
        frozenset({Purpose.INFERENCE}),
        _inference_mode,
        exact=True,
    ),
    Optimization(
        "conv-bn-fusion",
        "folds batch normalisation into the convolution or linear layer before it",
        _O1,
        frozenset({Purpose.INFERENCE}),
        _conv_bn,
    ),
    Optimization(
        "channels-last",
        "stores images and the weights of convolutions with the channels last",
        _O1,
        _ALL,
        _channels_last,
    ),
    Optimization(
        "autocast",
        "computes products and convolutions in a 16-bit type (torch.autocast)",
        _O1,
        _ALL,
        _autocast,
    ),
    Optimization(
        "activation-checkpointing",
        "computes the activations of repeated blocks again for the gradients instead of keeping them",
        _O2,
        frozenset({Purpose.TRAINING}),
        _checkpointing,
        exact=True,
    ),
    Optimization(
        "float8",
        "computes linear layers in 8-bit floats",
        _O3,
        frozenset({Purpose.INFERENCE}),
        functools.partial(_low_precision, Float8Linear),
    ),
    Optimization(
        "int8",
        "computes linear layers in 8-bit integers",
        _O3,
        frozenset({Purpose.INFERENCE}),
        functools.partial(_low_precision, Int8Linear),
    ),
    Optimization("torch.compile", "compiles the model to fused kernels", _O2, _ALL, _compilation),
)
