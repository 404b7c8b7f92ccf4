"""The table of operations: `aten.op.overload` to a function over values, one row each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch._inductor.inductor_prims  # with the next import: defines the operations of `prims`
import torch._prims

from halcyon import _native
from halcyon.torch.compile.dtypes import NAMES, is_float, wide
from halcyon.torch.compile.value import Number, Operand, Value

__all__ = ["ROWS", "Call", "Row", "Unsupported", "aten", "names", "op"]

aten = torch.ops.aten
Row = Callable[..., Any]
_R = TypeVar("_R", bound=Row)

ROWS: dict[Any, Row] = {}
"""The rows by overload. A row takes the call and the arguments, and returns a value or a tuple of values."""


class Unsupported(Exception):
    """What a row does not support, with the operation and the reason."""

    def __init__(self, reason: str, operation: str | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.operation = operation


def op(*overloads: str) -> Callable[[_R], _R]:
    """Adds a row for overloads such as ``add.Tensor``. One that this version of PyTorch lacks is left out."""

    def register(row: _R) -> _R:
        for name in overloads:
            add(name, row)
        return row

    return register


def add(name: str, row: Row) -> None:
    """Adds a row for one overload."""
    space, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, space or "aten"), packet, None)
    target = getattr(found, overload or "default", None)
    if target is not None:
        ROWS[target] = row


def names() -> list[str]:
    """The names of the supported overloads."""
    return sorted(str(target) for target in ROWS)


class Call:
    """One call of an operation: its node in PyTorch's graph, and what the graph says about its result."""

    __slots__ = ("backend", "node", "random", "size")

    def __init__(
        self,
        backend: _native.Backend,
        node: torch.fx.Node,
        size: Callable[[Any], int],
        random: Callable[[], tuple[Value, Value]],
    ) -> None:
        self.backend = backend
        self.node = node
        self.size = size
        """The number that a size of the graph has in this plan."""
        self.random = random
        """The next key for random numbers: two u32."""

    # The result, as the graph describes it.

    def meta(self, i: int = 0) -> torch.Tensor:
        """The fake tensor of result `i`."""
        val = self.node.meta["val"]
        return cast(torch.Tensor, val[i] if isinstance(val, (tuple, list)) else val)

    def dtype(self, i: int = 0) -> str:
        """The element type of result `i`."""
        return self.name(self.meta(i).dtype)

    def shape(self, i: int = 0) -> tuple[int, ...]:
        """The shape of result `i`."""
        return tuple(self.size(n) for n in self.meta(i).shape)

    def name(self, dtype: torch.dtype) -> str:
        """The native name of an element type."""
        try:
            return NAMES[dtype]
        except KeyError:
            raise Unsupported(f"the element type {dtype}") from None

    def math(self, i: int = 0) -> str:
        """The type in which PyTorch computes result `i`."""
        return wide(self.dtype(i))

    # Operands.

    def promoted(self, *operands: Any) -> torch.dtype:
        """The type to which PyTorch's promotion converts these arguments of the node."""
        return promoted([o.meta["val"] if isinstance(o, torch.fx.Node) else o for o in operands])

    def args(self) -> tuple[Any, ...]:
        """The arguments as they are in the graph."""
        return self.node.args

    def to(self, dtype: str, *operands: Operand) -> list[Value]:
        """Values of this type."""
        return [self.value(o, dtype) for o in operands]

    def value(self, operand: Operand, dtype: str) -> Value:
        """A value of this type; a number becomes a scalar."""
        if isinstance(operand, Value):
            return operand.cast(dtype)
        return self.scalar(operand, dtype)

    def scalar(self, number: Number, dtype: str) -> Value:
        """A scalar."""
        return Value(_native.Tensor.full(self.backend, [], number, dtype))

    def full(self, shape: Sequence[int], number: Number, dtype: str) -> Value:
        """A tensor filled with a number."""
        return self.scalar(number, dtype).expand(shape)

    def done(self, value: Value, i: int = 0) -> Value:
        """The value as result `i`, rounded to its type. With another shape, the graph falls back."""
        return value.cast(self.dtype(i))

    def spread(self, value: Value, i: int = 0) -> Value:
        """The value as result `i`, rounded to its type and repeated to its shape."""
        return self.done(value, i).expand(self.shape(i))

    @property
    def is_float(self) -> bool:
        """Whether the result is a float."""
        return is_float(self.dtype())


def promoted(operands: Sequence[Any]) -> torch.dtype:
    """The result type of PyTorch's promotion for tensors and numbers, which may be symbolic."""
    plain = [_plain(o) for o in operands if o is not None]
    made = plain[0].dtype if isinstance(plain[0], torch.Tensor) else torch.result_type(plain[0], plain[0])
    if len(plain) == 1:
        return made
    out = torch.result_type(plain[0], plain[1])
    if len(plain) > 2:
        # Of more than two operands PyTorch's operators have only tensors.
        tensors = [o for o in plain if isinstance(o, torch.Tensor)]
        out = tensors[0].dtype
        for t in tensors[1:]:
            out = torch.promote_types(out, t.dtype)
    return out


def _plain(operand: Any) -> Any:
    if isinstance(operand, torch.SymInt):
        return 1
    if isinstance(operand, torch.SymFloat):
        return 1.0
    if isinstance(operand, torch.SymBool):
        return True
    return operand
