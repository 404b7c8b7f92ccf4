"""Weights as constants of inference plans, so that plans keep them in the layouts of their kernels."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _to_dlpack
from torch.fx import GraphModule, Node

from halcyon import _native
from halcyon.torch.compile.table import aten

__all__ = ["MODES", "Freezer", "candidates"]

MODES = ("checked", "trusted", "off")

_SMALL = 1 << 16
"""Weights of at most so many elements are cheap to check."""

_PATIENCE = 4
"""After a change, so many calls must find the same weights before they become constants again."""

_VIEWS = {
    aten.t.default,
    aten.permute.default,
    aten.transpose.int,
    aten.view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten._unsafe_view.default,
}
_CONVOLUTIONS = {aten.convolution.default}
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default} | _CONVOLUTIONS


def _feeds(node: Node, targets: set[Any]) -> bool:
    """Whether one of these operations reads the node, or a view of it, as an operand."""
    return any(n.target in targets or (n.target in _VIEWS and _feeds(n, targets)) for n in node.users)


def candidates(gm: GraphModule, fixed: Sequence[int], mode: str) -> list[int]:
    """The inputs that may become constants.

    ``checked`` takes the weights of convolutions, because their layout matters most, and with them the small
    weights. Larger products gain less than the check of their weights costs, so they are left to ``trusted``.
    """
    if mode == "off":
        return []
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    targets = _PRODUCTS if mode == "trusted" else _CONVOLUTIONS
    large = [i for i in fixed if _feeds(placeholders[i], targets)]
    if not large:
        return []
    small = [i for i in fixed if placeholders[i].meta["val"].numel() <= _SMALL]
    return sorted({*large, *small})


class Frozen:
    """Constants with their number, which counts from 1."""

    __slots__ = ("constants", "state", "version")

    def __init__(self, version: int, state: Any, constants: dict[int, _native.Tensor]) -> None:
        self.version = version
        self.state = state
        """What the constants were made of: a fingerprint, or addresses and version counters."""
        self.constants = constants
        """The constant of each frozen input."""


class Freezer:
    """Decides at each call whether a plan may use the weights as constants.

    ``checked`` compares a fingerprint of all bytes, so that every change is found. ``trusted`` compares
    addresses and version counters, which a write through `Tensor.data` does not change.
    """

    def __init__(self, places: Sequence[int], orders: Sequence[list[int] | None], checked: bool) -> None:
        self.places = places
        self.orders = orders
        self.checked = checked
        self.addresses: list[int] = []
        self.weights: _native.Weights | None = None
        self.frozen: Frozen | None = None
        self.seen: Any = None
        self.calm = 0
        self.patience = 0
        self.lock = threading.Lock()

    def current(self, backend: _native.Backend, args: Sequence[Any]) -> Frozen | None:
        """The constants that this call may use, if any."""
        with self.lock:
            tensors = [args[p] for p in self.places]
            addresses = [t.data_ptr() for t in tensors]
            if addresses != self.addresses or self.weights is None:
                self.addresses = addresses
                pairs = zip(tensors, self.orders, strict=True)
                dense = [t.detach() if o is None else t.detach().permute(o) for t, o in pairs]
                if not all(t.is_contiguous() for t in dense):
                    self.weights = None
                    return None
                self.weights = _native.Weights(backend, [_to_dlpack(t) for t in dense])
            if self.checked:
                state: Any = self.weights.fingerprint(torch.get_num_threads())
            else:
                state = (addresses, [t._version for t in tensors])
            return self._decide(self.weights, state)

    def _decide(self, weights: _native.Weights, state: Any) -> Frozen | None:
        if self.frozen is not None and state == self.frozen.state:
            return self.frozen
        if state != self.seen:
            self.seen, self.calm = state, 0
        self.calm += 1
        if self.calm <= self.patience:
            return None
        made, fingerprint = weights.constants()
        # The fingerprint is that of the copies, so that a change during the copying is found.
        state = fingerprint if self.checked else state
        number = 1 if self.frozen is None else self.frozen.version + 1
        self.frozen = Frozen(number, state, dict(zip(self.places, made, strict=True)))
        # Weights that change often are not worth new plans.
        self.patience = max(_PATIENCE, 2 * self.patience)
        return self.frozen
