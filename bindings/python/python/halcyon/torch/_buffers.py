"""The buffers of modules: put back as they were, and kept by blocks that are computed again."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

__all__ = ["Buffers", "contexts"]


def _version(t: torch.Tensor) -> int:
    # Tensors that were made in inference mode count no versions.
    return 0 if t.is_inference() else t._version


class Buffers:
    """The buffers of a module at one moment: which tensors they are, and their values.

    `only` names the buffers whose values are kept; None keeps all values.
    """

    def __init__(self, module: nn.Module, only: Collection[str] | None = None) -> None:
        self.module = module
        self.held = [(m, dict(m._buffers)) for m in module.modules()]
        self.named = dict(module.named_buffers())
        self.versions = {name: _version(b) for name, b in self.named.items()}
        self.values = {
            name: b.detach().clone() for name, b in self.named.items() if only is None or name in only
        }

    def restore(self, silently: bool = False) -> None:
        """Puts back tensors and values. `silently` leaves PyTorch's version counters as they are."""
        for module, before in self.held:
            now = module._buffers
            if now.keys() != before.keys() or any(now[name] is not b for name, b in before.items()):
                now.clear()
                now.update(before)
        for name, value in self.values.items():
            b = self.named[name]
            with torch.inference_mode() if b.is_inference() else torch.no_grad():
                (b.data if silently else b).copy_(value)

    def changed(self, known: Collection[str]) -> Iterator[str]:
        """The buffers, other than the known ones, that have been written or replaced since."""
        now = dict(self.module.named_buffers())
        for name, b in now.items():
            if name in known:
                continue
            if b is not self.named.get(name) or _version(b) != self.versions[name]:
                yield name
            elif name in self.values and not torch.equal(b, self.values[name]):
                # The kernels of batch normalisation write without a new version.
                yield name


_written: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""The buffers that the forward of a block has written so far."""


def _statistics(block: nn.Module) -> set[str]:
    """The running statistics in a block."""
    norms = [(name, m) for name, m in block.named_modules() if isinstance(m, _NormBase)]
    return {f"{prefix}.{name}".lstrip(".") for prefix, m in norms for name in m._buffers}


class _Forward:
    """The context of a block's forward: keeps the buffers with which it begins."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.start: Buffers | None = None

    def __enter__(self) -> None:
        # In the first call it is not known yet which buffers the block writes, so all values are kept.
        self.start = Buffers(self.block, _written.get(self.block))

    def __exit__(self, *_: Any) -> None:
        if self.start is not None:
            known = _written.setdefault(self.block, _statistics(self.block))
            known.update(list(self.start.changed(known)))
            self.start.values = {n: v for n, v in self.start.values.items() if n in known}


class _Again:
    """The context in which a block is computed again: with the buffers of its first run, changing none."""

    def __init__(self, first: _Forward) -> None:
        self.first = first
        self.present: list[Buffers] = []

    def __enter__(self) -> None:
        block = self.first.block
        self.present.append(Buffers(block, _written.get(block)))
        if self.first.start is not None:
            self.first.start.restore(silently=True)

    def __exit__(self, *_: Any) -> None:
        self.present.pop().restore(silently=True)


def contexts(block: nn.Module) -> tuple[_Forward, _Again]:
    """The contexts of a block's forward and of its repetition, for `torch.utils.checkpoint`."""
    first = _Forward(block)
    return first, _Again(first)
