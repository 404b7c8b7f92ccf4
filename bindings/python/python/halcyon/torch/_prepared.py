"""Modules with settings: mixed precision, layout, compilation, activation checkpointing, inference mode.

A prepared module is the same object with another class, a subclass of its own class. So its parameters, its
`state_dict` and `isinstance` are as before, and an optimizer that updates its parameters still does.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from halcyon._errors import ArgumentError, UnsupportedError
from halcyon.torch._buffers import contexts
from halcyon.torch._errors import OptimizationWarning

__all__ = [
    "PLAIN",
    "Compilation",
    "Settings",
    "blocks",
    "check_model",
    "compilation_errors",
    "compiled_of",
    "install",
    "one_line",
    "settings_of",
]


@dataclass(frozen=True)
class Compilation:
    """How `torch.compile` compiles a module."""

    backend: str
    #: The options of the backend, by name.
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return ", ".join([self.backend, *(name for name, value in self.options if value is True)])


@dataclass(frozen=True)
class Settings:
    """How a module runs."""

    #: The dtype of autocast; None without mixed precision.
    autocast: torch.dtype | None = None
    #: Whether images and the weights of convolutions are stored with the channels last.
    channels_last: bool = False
    compilation: Compilation | None = None
    #: Whether the activations of repeated blocks are computed again for the gradients.
    checkpointing: bool = False
    #: Whether the module runs in `torch.inference_mode`.
    inference: bool = False


PLAIN = Settings()


class _Prepared:
    """The part of a prepared module's class that applies its settings to a call."""

    _halcyon_settings: Settings

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, s = cast(nn.Module, self), self._halcyon_settings
        if s.channels_last:
            args, kwargs = pytree.tree_map(_channels_last, (args, kwargs))
        with contextlib.ExitStack() as stack:
            if s.inference:
                stack.enter_context(torch.inference_mode())
            if s.autocast is not None:
                stack.enter_context(torch.autocast(_device_type(module), dtype=s.autocast))
            outputs = _call(module, super().__call__, args, kwargs)  # type: ignore[misc]  # nn.Module's
        if s.autocast is None:
            return outputs
        own = _float_type(module)
        return pytree.tree_map(functools.partial(_restored, computed=s.autocast, own=own), outputs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _reduced(cast(nn.Module, self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[misc]  # nn.Module's
        _compile(cast(nn.Module, self), self._halcyon_settings.compilation)


def _call(module: nn.Module, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Runs a module. If compiling it fails, for example for a new shape, it runs uncompiled from then on."""
    settings = settings_of(module)
    if settings.compilation is None or _strict.on:
        return run(*args, **kwargs)
    from torch._dynamo.exc import TorchDynamoException

    try:
        return run(*args, **kwargs)
    except TorchDynamoException as error:
        reason = one_line(error)
    warnings.warn(
        f"torch.compile failed, so the model runs uncompiled from now on: {reason}",
        OptimizationWarning,
        stacklevel=3,
    )
    install(module, replace(settings, compilation=None))
    return run(*args, **kwargs)


class _Strict(threading.local):
    """Whether a failed compilation is an error of the call, in this thread."""

    on = False


_strict = _Strict()


@contextlib.contextmanager
def compilation_errors() -> Iterator[None]:
    """While this context is entered, a failed compilation is an error of the call."""
    before, _strict.on = _strict.on, True
    try:
        yield
    finally:
        _strict.on = before


class _Checkpointed:
    """The part of a block's class that computes its activations again for the gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = super().__call__  # type: ignore[misc]  # nn.Module's
        block = cast(nn.Module, self)
        if not (block.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)
        if torch.compiler.is_compiling() or next(block.buffers(), None) is None:
            # Compilers of training graphs write buffers once themselves.
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        context_fn = functools.partial(contexts, block)
        return checkpoint(run, *args, use_reentrant=False, context_fn=context_fn, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _reduced(cast(nn.Module, self))


_MIXINS: tuple[type, ...] = (_Prepared, _Checkpointed)


_made: dict[tuple[type, type[nn.Module]], type[nn.Module]] = {}


def _subclass(mixin: type, base: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of class `base` with a mixin, made once."""
    if (mixin, base) not in _made:
        name = f"{mixin.__name__.strip('_')}{base.__name__}"
        made = type(name, (mixin, base), {"__module__": base.__module__})
        # Another thread may have made it meanwhile.
        return _made.setdefault((mixin, base), made)
    return _made[mixin, base]


def _mixins(found: type[nn.Module]) -> tuple[list[type], type[nn.Module]]:
    """The mixins of a module's class, the outermost first, and the class without them."""
    mixins = []
    while found.__bases__[0] in _MIXINS:
        # `_subclass` made this class: its bases are a mixin and the class below.
        mixins.append(found.__bases__[0])
        found = found.__bases__[1]
    return mixins, found


def _with_mixins(mixins: list[type], base: type[nn.Module]) -> type[nn.Module]:
    for mixin in reversed(mixins):
        base = _subclass(mixin, base)
    return base


def _set_mixin(module: nn.Module, mixin: type, wanted: bool) -> None:
    """Adds a mixin to a module's class, or removes it."""
    mixins, base = _mixins(type(module))
    others = [m for m in mixins if m is not mixin]
    module.__class__ = _with_mixins([mixin, *others] if wanted else others, base)


def _reduced(module: nn.Module) -> tuple[Any, ...]:
    mixins, base = _mixins(type(module))
    return _blank, (tuple(mixins), base), module.__getstate__()  # type: ignore[no-untyped-call]  # PyTorch's


def _blank(mixins: tuple[type, ...], base: type[nn.Module]) -> nn.Module:
    made = _with_mixins(list(mixins), base)
    return made.__new__(made)


def _channels_last(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def _restored(value: Any, computed: torch.dtype, own: torch.dtype) -> Any:
    """An output in the module's own type, if mixed precision changed it."""
    if isinstance(value, torch.Tensor) and value.dtype == computed:
        return value.to(own)
    return value


def _float_type(module: nn.Module) -> torch.dtype:
    floats = (p.dtype for p in module.parameters() if p.is_floating_point())
    return next(floats, torch.get_default_dtype())


def _device_type(module: nn.Module) -> str:
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return "cpu" if first is None else first.device.type


def one_line(error: BaseException) -> str:
    """An error as one line of text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # PyTorch's errors of compiling have the cause in the second line.
    count = 2 if lines and lines[0].endswith(":") else 1
    return f"{type(error).__name__}: {' '.join(lines[:count])}"


def check_model(model: object) -> None:
    """Raises an error for a value that is not a module, or one whose calls cannot be changed."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the model is a {type(model).__name__}; pass a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError("TorchScript modules: pass the torch.nn.Module from which it was made")
    if "_orig_mod" in model._modules:
        raise UnsupportedError(
            "modules that torch.compile returned: pass the module itself; it is compiled at level O2"
        )


def settings_of(module: nn.Module) -> Settings:
    """The settings of a module; `PLAIN` if it has none."""
    return module._halcyon_settings if isinstance(module, _Prepared) else PLAIN


def blocks(module: nn.Module) -> list[nn.Module]:
    """The repeated blocks: members of lists and sequences with at least two layers, the outermost."""
    found: list[nn.Module] = []

    def visit(parent: nn.Module) -> None:
        for child in parent.children():
            layers = [m for m in child.modules() if not any(m.children())]
            if isinstance(parent, nn.Sequential | nn.ModuleList) and len(layers) >= 2:
                found.append(child)
            else:
                visit(child)

    visit(module)
    return list(dict.fromkeys(found))


def install(module: nn.Module, settings: Settings, compiled: Callable[..., Any] | None = None) -> None:
    """Changes a module so that it runs with these settings.

    `compiled` is what an earlier call compiled for the same settings, see :func:`compiled_of`.
    """
    before = settings_of(module)
    if settings.channels_last != before.channels_last:
        if settings.channels_last:
            _set_channels_last(module)
        else:
            _restore_layouts(module)
    if settings.checkpointing != before.checkpointing:
        for block in blocks(module):
            _set_mixin(block, _Checkpointed, settings.checkpointing)
    _set_mixin(module, _Prepared, settings != PLAIN)
    # Not by attribute, because a module may override `__setattr__`.
    if settings == PLAIN:
        module.__dict__.pop("_halcyon_settings", None)
    else:
        module.__dict__["_halcyon_settings"] = settings
    if compiled is not None:
        module._compiled_call_impl = compiled
    elif settings != before or module._compiled_call_impl is None:
        _compile(module, settings.compilation)


Layout = tuple[torch.Size, tuple[int, ...], tuple[int, ...] | None]


def _images(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that have a layout of images."""
    for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
        if tensor.dim() == 4:
            yield name, tensor


def _set_channels_last(module: nn.Module) -> None:
    """Brings images and weights into the layout, and remembers the layouts that they have."""
    layouts: dict[str, Layout] = {}
    for name, tensor in _images(module):
        grad = tensor.grad
        layouts[name] = tensor.shape, tensor.stride(), None if grad is None else grad.stride()
        tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        if grad is not None:
            tensor.grad = grad.contiguous(memory_format=torch.channels_last)
    # Not by attribute, because a module may override `__setattr__`.
    module.__dict__["_halcyon_layouts"] = layouts


def _restore_layouts(module: nn.Module) -> None:
    """Brings images and weights back into the layouts that they had."""
    layouts: dict[str, Layout] = module.__dict__.pop("_halcyon_layouts", {})
    for name, tensor in _images(module):
        strides = of_grad = None
        if name in layouts and layouts[name][0] == tensor.shape:
            _, strides, of_grad = layouts[name]
        tensor.data = _with_strides(tensor.data, strides)
        if tensor.grad is not None:
            tensor.grad = _with_strides(tensor.grad, of_grad or strides)


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    """The values in memory with these strides; in row-major order for None."""
    if strides is None:
        return tensor.contiguous()
    if tensor.stride() == strides:
        return tensor
    if not _is_dense(tensor.shape, strides):
        # The tensor was a view of other memory, which the conversion has left.
        return tensor.contiguous()
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


def _is_dense(shape: torch.Size, strides: tuple[int, ...]) -> bool:
    """Whether no two elements share memory and none is skipped."""
    expected = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def compiled_of(module: nn.Module) -> Callable[..., Any] | None:
    """The compiled call of a module; None if it is not compiled."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def _compile(module: nn.Module, how: Compilation | None) -> None:
    """Compiles a module's call, or runs it uncompiled again. The work is done in its first call."""
    if how is None:
        module._compiled_call_impl = None
        return
    run: Callable[..., Any] = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    # PyTorch keeps compiled code per code object, and compiles nothing more for a code object after a few
    # recompilations. All modules share the code of `_call_impl`, so each gets a code object of its own.
    call.__code__ = call.__code__.replace(co_name=f"call_{next(_numbers)}")
    options = dict(how.options) or None
    module._compiled_call_impl = torch.compile(call, backend=how.backend, options=options)


_numbers = itertools.count()
