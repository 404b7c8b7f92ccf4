"""Weights as constants of inference plans, so that plans keep them in the layouts of their kernels."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._C import _to_dlpack
from torch.fx import GraphModule, Node

from halcyon import _native
from halcyon.torch.compile.interpret import hint
from halcyon.torch.compile.table import aten

__all__ = ["MODES", "Freezer", "Frozen", "View", "candidates", "view"]

MODES = ("checked", "trusted", "off")

_SMALL = 1 << 16
"""Weights of at most so many elements are cheap to check."""

_ROWS = 32
"""From so many rows on, a matrix product gains more by the layout of its weight than the check costs."""

_LARGEST = 1 << 30
"""The bytes of weights of products of which ``checked`` makes copies at most for one graph."""

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
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


View = tuple[Any, ...]


def view(t: torch.Tensor, dynamic: bool) -> View:
    """What tells an input from other tensors, in particular other views of its memory.

    Where no size of a graph is dynamic, Dynamo's guards hold sizes and strides, so the address is enough.
    """
    if not dynamic:
        return (t.data_ptr(),)
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.is_neg()


def _readers(node: Node) -> Iterator[Node]:
    """The operations that read the node, or a view of it."""
    for n in node.users:
        if n.target in _VIEWS:
            yield from _readers(n)
        else:
            yield n


def _rows(product: Node) -> int:
    """The rows of a matrix product; of a symbolic number, that of the first call."""
    size = hint(product.meta["val"].shape[-2])
    return _ROWS if size is None else size


def _elements(node: Node) -> int:
    """The number of elements; of symbolic sizes, those of the first call."""
    return math.prod(hint(n) or 0 for n in node.meta["val"].shape)


def _bytes(node: Node) -> int:
    return _elements(node) * int(node.meta["val"].element_size())


def candidates(gm: GraphModule, fixed: Sequence[int], mode: str) -> list[int]:
    """The inputs that may become constants.

    These are the weights of convolutions and matrix products, and with them the small weights. A product of
    few rows reads its weight about as fast as the check does, so ``checked`` leaves it out. It leaves out all
    products if the copies of their weights would take much memory.
    """
    if mode == "off":
        return []
    checked = mode == "checked"
    places = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    weights = [n for n, i in places.items() if i in set(fixed)]
    convolved = {w for w in weights if any(n.target in _CONVOLUTIONS for n in _readers(w))}
    multiplied = {
        w
        for w in weights
        if any(n.target in _PRODUCTS and (not checked or _rows(n) >= _ROWS) for n in _readers(w))
    }
    if checked and sum(map(_bytes, multiplied)) > _LARGEST:
        multiplied = set()
    large = convolved | multiplied
    if not large:
        return []
    return sorted(places[w] for w in weights if w in large or _elements(w) <= _SMALL)


class Frozen:
    """Constants with their number, which counts from 1."""

    __slots__ = ("constants", "state", "version")

    def __init__(self, version: int, state: Any, constants: dict[int, _native.Tensor]) -> None:
        self.version = version
        self.state = state
        """What the constants were made of: sizes and a fingerprint, or views and version counters."""
        self.constants = constants
        """The constant of each frozen input."""


class Freezer:
    """Decides at each call whether a plan may use the weights as constants.

    ``checked`` compares a fingerprint of all bytes, so that every change is found. ``trusted`` compares
    addresses and version counters, which a write through `Tensor.data` does not change. Tensors that were
    made in inference mode have no version counters, so with them ``trusted`` compares the fingerprint too.
    """

    def __init__(
        self, places: Sequence[int], orders: Sequence[list[int] | None], checked: bool, dynamic: bool
    ) -> None:
        self.places = places
        self.orders = orders
        self.checked = checked
        self.dynamic = dynamic
        self.views: list[View] = []
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
            views = [view(t, self.dynamic) for t in tensors]
            if views != self.views or self.weights is None:
                self.views = views
                pairs = zip(tensors, self.orders, strict=True)
                dense = [t.detach() if o is None else t.detach().permute(o) for t, o in pairs]
                if not all(t.is_contiguous() and not t.is_neg() for t in dense):
                    self.weights = None
                    return None
                self.weights = _native.Weights(backend, [_to_dlpack(t) for t in dense])
            if self.checked or any(t.is_inference() for t in tensors):
                # The same bytes may be seen with other sizes.
                kinds = [v[1:] for v in views]
                return self._decide(self.weights, kinds, self.weights.fingerprint(torch.get_num_threads()))
            return self._decide(self.weights, [views, [t._version for t in tensors]], None)

    def _decide(self, weights: _native.Weights, kinds: list[Any], fingerprint: int | None) -> Frozen | None:
        state = (kinds, fingerprint)
        if self.frozen is not None and state == self.frozen.state:
            return self.frozen
        if state != self.seen:
            self.seen, self.calm = state, 0
        self.calm += 1
        if self.calm <= self.patience:
            return None
        made, copied = weights.constants()
        # The fingerprint is that of the copies, so that a change during the copying is found.
        state = (kinds, None if fingerprint is None else copied)
        number = 1 if self.frozen is None else self.frozen.version + 1
        self.frozen = Frozen(number, state, dict(zip(self.places, made, strict=True)))
        # Weights that change often are not worth new plans.
        self.patience = max(_PATIENCE, 2 * self.patience)
        return self.frozen
