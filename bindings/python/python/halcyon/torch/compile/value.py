"""`Value`: a native tensor with Python's operators, with which the rows of the op table are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Union

from halcyon import _native
from halcyon.torch.compile.dtypes import UNSIGNED, is_float

__all__ = ["Number", "Operand", "Value", "concat", "scalar"]

Number = bool | int | float
Operand = Union["Value", Number]

_ops = _native.ops


def scalar(name: str, *operands: Value) -> Value:
    """An element-wise operation of the native table. The operands broadcast."""
    return Value(_ops.scalar(name, [v.t for v in operands]))


def concat(values: Sequence[Value], axis: int) -> Value:
    """Joins values along an axis."""
    return values[0] if len(values) == 1 else Value(_ops.concat([v.t for v in values], axis))


class Value:
    """A native tensor during tracing. Operators need equal element types; numbers take the value's type."""

    __slots__ = ("dtype", "shape", "t")

    def __init__(self, t: _native.Tensor) -> None:
        self.t = t
        self.dtype: str = t.dtype
        self.shape: tuple[int, ...] = t.shape

    def __repr__(self) -> str:
        return f"Value({self.dtype}{list(self.shape)})"

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def axis(self, axis: int) -> int:
        """The axis counted from the front. A scalar has the axes 0 and -1, as in PyTorch."""
        return axis % max(self.ndim, 1)

    # Types.

    def cast(self, dtype: str) -> Value:
        """Converts as PyTorch on the CPU: floats become unsigned integers by way of i64, so they wrap."""
        if dtype == self.dtype:
            return self
        if is_float(self.dtype) and dtype.startswith("u"):
            return Value(_ops.cast(_ops.cast(self.t, "i64"), dtype))
        return Value(_ops.cast(self.t, dtype))

    def bitcast(self, dtype: str) -> Value:
        """The same bits as another type of equal size."""
        return Value(_ops.bitcast(self.t, dtype))

    def number(self, value: Number) -> Value:
        """A scalar with the type of this value."""
        return Value(_ops.literal(self.t, value))

    def full(self, shape: Sequence[int], value: Number) -> Value:
        """A tensor of this value's type, filled with a number."""
        return self.number(value).expand(shape)

    def iota(self, dtype: str, shape: Sequence[int], axis: int) -> Value:
        """The numbers 0, 1, … along an axis of a shape."""
        return Value(_ops.iota(self.t, dtype, list(shape), axis))

    # Element-wise.

    def _other(self, other: Operand) -> Value:
        return other if isinstance(other, Value) else self.number(other)

    def scalar(self, name: str, *others: Operand) -> Value:
        """An element-wise operation whose first operand is this value."""
        return scalar(name, self, *[self._other(o) for o in others])

    def __add__(self, other: Operand) -> Value:
        return self.scalar("add", other)

    def __radd__(self, other: Number) -> Value:
        return self.number(other).scalar("add", self)

    def __sub__(self, other: Operand) -> Value:
        return self.scalar("sub", other)

    def __rsub__(self, other: Number) -> Value:
        return self.number(other).scalar("sub", self)

    def __mul__(self, other: Operand) -> Value:
        return self.scalar("mul", other)

    def __rmul__(self, other: Number) -> Value:
        return self.number(other).scalar("mul", self)

    def __truediv__(self, other: Operand) -> Value:
        return self.scalar("div", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self.number(other).scalar("div", self)

    def __neg__(self) -> Value:
        return self.scalar("neg")

    def __invert__(self) -> Value:
        return self.scalar("not")

    def __and__(self, other: Operand) -> Value:
        return self.scalar("and", other)

    def __or__(self, other: Operand) -> Value:
        return self.scalar("or", other)

    def __xor__(self, other: Operand) -> Value:
        return self.scalar("xor", other)

    def __lt__(self, other: Operand) -> Value:
        return self.scalar("lt", other)

    def __le__(self, other: Operand) -> Value:
        return self.scalar("le", other)

    def __gt__(self, other: Operand) -> Value:
        return self.scalar("gt", other)

    def __ge__(self, other: Operand) -> Value:
        return self.scalar("ge", other)

    def eq(self, other: Operand) -> Value:
        """Where elements are equal."""
        return self.scalar("eq", other)

    def ne(self, other: Operand) -> Value:
        """Where elements differ."""
        return self.scalar("ne", other)

    def min(self, other: Operand) -> Value:
        """The smaller element; NaN if either is NaN."""
        return self.scalar("min", other)

    def max(self, other: Operand) -> Value:
        """The larger element; NaN if either is NaN."""
        return self.scalar("max", other)

    def isnan(self) -> Value:
        """Where elements are NaN."""
        if is_float(self.dtype):
            return self.scalar("isnan")
        return self.ne(self)

    def where(self, a: Operand, b: Operand) -> Value:
        """Elements of `a` where this bool is true, of `b` elsewhere. One of them at least is a value."""
        if isinstance(a, Value):
            return scalar("select", self, a, a._other(b))
        if isinstance(b, Value):
            return scalar("select", self, b.number(a), b)
        raise TypeError("one of the choices must be a value")

    def shift(self, name: str, bits: Operand) -> Value:
        """A shift of an integer: `shl`, or `shr` without the sign."""
        own = UNSIGNED.get(self.dtype, self.dtype)
        other = self._other(bits)
        made = scalar(name, self._as(own), other._as(own))
        return made._as(self.dtype)

    def _as(self, dtype: str) -> Value:
        return self if dtype == self.dtype else self.bitcast(dtype)

    # Shapes.

    def reshape(self, shape: Sequence[int]) -> Value:
        """The same elements with another shape."""
        return self if tuple(shape) == self.shape else Value(_ops.reshape(self.t, list(shape)))

    def permute(self, axes: Sequence[int]) -> Value:
        """The axes in another order."""
        if list(axes) == list(range(self.ndim)):
            return self
        return Value(_ops.permute(self.t, list(axes)))

    def transpose(self, a: int, b: int) -> Value:
        """Swaps two axes."""
        axes = list(range(self.ndim))
        axes[a], axes[b] = axes[b], axes[a]
        return self.permute(axes)

    def expand(self, shape: Sequence[int]) -> Value:
        """Repeats axes of size 1, and adds axes at the front."""
        return self if tuple(shape) == self.shape else Value(_ops.expand(self.t, list(shape)))

    def unsqueeze(self, axis: int) -> Value:
        """Inserts an axis of size 1."""
        axis %= self.ndim + 1
        return self.reshape((*self.shape[:axis], 1, *self.shape[axis:]))

    def squeeze(self, axis: int) -> Value:
        """Removes an axis of size 1."""
        axis = self.axis(axis)
        return self.reshape((*self.shape[:axis], *self.shape[axis + 1 :]))

    def slice(self, axis: int, start: int, length: int, step: int = 1) -> Value:
        """`length` elements of an axis from `start` on. The step may be negative."""
        if (start, length, step) == (0, self.shape[axis], 1):
            return self
        starts, steps, lengths = [0] * self.ndim, [1] * self.ndim, list(self.shape)
        starts[axis], steps[axis], lengths[axis] = start, step, length
        if length == 0:
            starts[axis] = 0
        return Value(_ops.slice(self.t, starts, steps, lengths))

    def pad(self, low: Sequence[int], high: Sequence[int], value: Number) -> Value:
        """Adds elements before and after each axis."""
        return Value(_ops.pad(self.t, list(low), list(high), value))

    def flip(self, axes: Sequence[int]) -> Value:
        """Reverses axes."""
        return Value(_ops.flip(self.t, list(axes))) if axes else self

    # Structured.

    def reduce(self, kind: str, axes: Sequence[int], keep: bool = False) -> Value:
        """Reduces axes by sum, prod, max or min."""
        if not axes or self.ndim == 0:
            return self
        return Value(_ops.reduce(self.t, kind, list(axes), keep))

    def sum(self, axes: Sequence[int], keep: bool = False) -> Value:
        """The sum over axes."""
        return self.reduce("sum", axes, keep)

    def mean(self, axes: Sequence[int], keep: bool = False) -> Value:
        """The mean over axes."""
        if not axes or self.ndim == 0:
            return self
        return Value(_ops.mean(self.t, list(axes), keep))

    def matmul(self, other: Value) -> Value:
        """The matrix product as in NumPy."""
        return Value(_ops.matmul(self.t, other.t))

    def take(self, index: Value, axis: int) -> Value:
        """Rows along an axis by index."""
        return Value(_ops.gather(self.t, index.t, axis))

    def take_elements(self, index: Value, axis: int) -> Value:
        """Single elements along an axis by index."""
        return Value(_ops.gather_elements(self.t, index.t, axis))

    def scatter_elements(self, index: Value, updates: Value, axis: int, kind: str) -> Value:
        """Combines single elements into this value."""
        return Value(_ops.scatter_elements(self.t, index.t, updates.t, axis, kind))

    def scatter_rows(self, index: Value, updates: Value, axis: int, kind: str) -> Value:
        """Combines rows into this value."""
        return Value(_ops.scatter_rows(self.t, index.t, updates.t, axis, kind))

    def scan(self, kind: str, axis: int, exclusive: bool = False, reverse: bool = False) -> Value:
        """A running reduction along an axis."""
        return Value(_ops.scan(self.t, kind, axis, exclusive, reverse))

    def argsort(self, axis: int, descending: bool = False) -> Value:
        """The indices that sort an axis. The sort is stable."""
        return Value(_ops.argsort(self.t, axis, descending))

    def argreduce(self, largest: bool, axis: int, keep: bool = False) -> Value:
        """The index of the first largest or smallest element along an axis."""
        return Value(_ops.argreduce(self.t, largest, axis, keep))
