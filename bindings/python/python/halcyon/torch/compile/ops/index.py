"""Reads by index, and masks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halcyon import _native
from halcyon.torch.compile.dtypes import is_integer
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__ = ["Indexed", "from_start"]


def from_start(index: Value, size: int) -> Value:
    """An index of which negative numbers do not count from the end.

    The native operations let them. Where PyTorch does not, they become a number that is out of range, so that
    the run fails as PyTorch does.
    """
    if index.dtype.startswith("u"):
        return index
    index = index.cast("i64") if size >= 2**31 else index
    return (index < 0).where(size, index)


@op("index_select")
def _index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    axis, own = x.axis(dim), x.reshape([1]) if x.ndim == 0 else x
    return own.take(from_start(index.reshape([index.size]), own.shape[axis]), axis).reshape(c.shape())


@op("gather")
def _gather(c: Call, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    if index.size == 0:
        return c.full(c.shape(), 0, x.dtype)
    if x.ndim == 0 or index.ndim == 0:
        flat = from_start(index.reshape([index.size]), x.size)
        return x.reshape([x.size]).take(flat, 0).reshape(c.shape())
    axis = x.axis(dim)
    return x.take_elements(from_start(index, x.shape[axis]), axis)


@op("take")
def _take(c: Call, x: Value, index: Value) -> Value:
    if index.size == 0:
        return c.full(c.shape(), 0, x.dtype)
    return x.reshape([x.size]).take(index.reshape([index.size]), 0).reshape(c.shape())


@op("embedding")
def _embedding(
    c: Call,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return weight.take(from_start(indices, weight.shape[0]), 0)


class Indexed:
    """The elements of a tensor that a list of index tensors names, as rows of one axis.

    The indexed axes are moved to the front and merged. The indices become one index into the merged axis. An
    index that is out of range stays so, so that the run fails as PyTorch does.
    """

    __slots__ = ("axes", "index", "order", "outer", "rest", "rows")

    def __init__(self, x: Value, indices: Sequence[Value | None]) -> None:
        self.axes = [k for k, i in enumerate(indices) if i is not None]
        given = [i for i in indices if i is not None]
        if not given:
            raise Unsupported("no index")
        # PyTorch takes bytes as a mask too.
        if any(not is_integer(i.dtype) or i.dtype == "u8" for i in given):
            raise Unsupported("an index that is a mask: the size of the result depends on values")
        sizes = [x.shape[k] for k in self.axes]
        self.rest = [k for k in range(x.ndim) if k not in self.axes]
        self.order = [*self.axes, *self.rest]
        self.rows = math.prod(sizes)
        self.outer = [x.shape[k] for k in self.rest]
        self.index = _merged([i.cast("i64") for i in given], sizes)

    def rows_of(self, x: Value) -> Value:
        """The tensor with the indexed axes merged in front."""
        return x.permute(self.order).reshape([self.rows, *self.outer])

    def back(self, rows: Value, shape: Sequence[int]) -> Value:
        """The inverse of `rows_of`."""
        moved = rows.reshape([shape[k] for k in self.order])
        return moved.permute([self.order.index(k) for k in range(len(self.order))])

    @property
    def adjacent(self) -> bool:
        """Whether the indexed axes are next to one another, so that the result keeps their place."""
        return self.axes[-1] - self.axes[0] + 1 == len(self.axes)

    def placed(self, picked: Value) -> Value:
        """The picked rows with the axes of the index in their place."""
        n = self.index.ndim
        if not self.adjacent or self.axes[0] == 0:
            return picked
        first = self.axes[0]
        before = [n + k for k in range(first)]
        after = [n + k for k in range(first, len(self.rest))]
        return picked.permute([*before, *range(n), *after])

    def unplaced(self, values: Value) -> Value:
        """The inverse of `placed`."""
        n = self.index.ndim
        if not self.adjacent or self.axes[0] == 0:
            return values
        first = self.axes[0]
        inner = [first + k for k in range(n)]
        return values.permute([*inner, *range(first), *range(first + n, values.ndim)])

    @property
    def result(self) -> list[int]:
        """The shape of the picked elements, with the axes of the index in their place."""
        if not self.adjacent:
            return [*self.index.shape, *self.outer]
        first = self.axes[0]
        return [*self.outer[:first], *self.index.shape, *self.outer[first:]]


def _merged(indices: Sequence[Value], sizes: Sequence[int]) -> Value:
    """One index into axes of these sizes that are merged."""
    if len(indices) == 1:
        return indices[0]
    total, inside = None, None
    for i, n in zip(indices, sizes, strict=True):
        valid = (i >= -n) & (i < n)
        i = (i < 0).where(i + n, i)
        total = i if total is None else total * n + i
        inside = valid if inside is None else inside & valid
    if total is None or inside is None:
        raise Unsupported("no index")
    return inside.where(total, math.prod(sizes))


@op("index.Tensor", "_unsafe_index.Tensor")
def _index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    if 0 in c.shape():
        return c.full(c.shape(), 0, x.dtype)
    at = Indexed(x, indices)
    if len(at.axes) == 1:
        return x.take(at.index, at.axes[0])
    return at.placed(at.rows_of(x).take(at.index, 0))


@op("_unsafe_masked_index")
def _masked_index(c: Call, x: Value, mask: Value, indices: Sequence[Value | None], fill: float) -> Value:
    if 0 in c.shape():
        return c.full(c.shape(), 0, x.dtype)
    clamped = [None if i is None else i.cast("i64").max(0).min(x.shape[k] - 1) for k, i in enumerate(indices)]
    return mask.where(_index(c, x, clamped), fill)


@op("masked_scatter")
def _masked_scatter(c: Call, x: Value, mask: Value, source: Value) -> Value:
    if x.size == 0 or source.size == 0:
        raise Unsupported("masked_scatter of an empty tensor")
    where = mask.expand(x.shape).reshape([x.size])
    # The k-th true element takes element k of the source.
    place = where.cast("i64").scan("sum", 0, exclusive=True).min(source.size - 1)
    new = source.reshape([source.size]).take(place, 0)
    return where.where(new, x.reshape([x.size])).reshape(x.shape)


@op("masked_scatter_backward")
def _masked_scatter_backward(c: Call, grad: Value, mask: Value, sizes: Sequence[int]) -> Value:
    count = math.prod(c.shape())
    if grad.size == 0 or count == 0:
        raise Unsupported("masked_scatter of an empty tensor")
    where = mask.expand(grad.shape).reshape([grad.size])
    place = where.cast("i64").scan("sum", 0, exclusive=True).min(count - 1)
    new = where.where(grad.reshape([grad.size]), 0)
    return c.full([count], 0, grad.dtype).scatter_rows(place, new, 0, "add").reshape(c.shape())


@op("nonzero_static")
def _nonzero_static(c: Call, x: Value, *, size: int, fill_value: int = -1) -> Value:
    if x.size == 0 or size == 0 or x.ndim == 0:
        raise Unsupported("nonzero_static of an empty tensor or a scalar")
    true = (x if x.dtype == "bool" else x.ne(0)).reshape([x.size])
    found = true.cast("i64").sum([0])
    # A stable sort puts the true elements first, in order.
    order = true.cast("u8").argsort(0, descending=True)
    count = min(size, x.size)
    order = order.slice(0, 0, count)
    columns = []
    for n in reversed(x.shape):
        columns.append(order - order / n * n)
        order = order / n
    rows = Value(_native.ops.concat([v.reshape([count, 1]).t for v in reversed(columns)], 1))
    valid = (x.iota("i64", [count, 1], 0) < found).where(rows, fill_value)
    return valid.pad([0, 0], [size - count, 0], fill_value)
