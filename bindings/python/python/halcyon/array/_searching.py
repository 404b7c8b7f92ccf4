"""Searching, sorting, and sets.

``nonzero`` and the functions of sets compute their operand, because the shape of the result depends on it.
"""

from __future__ import annotations

import builtins
from typing import Literal, NamedTuple

from halcyon._errors import DTypeError, ShapeError
from halcyon.array._core import (
    ALL,
    INDEX,
    INTEGERS,
    NUMBERS,
    Array,
    Tensor,
    as_array,
    axes_of,
    axis_of,
    cast,
    check_kind,
    full,
    iota,
    literal,
    one_of,
    ops,
    pair,
    select,
    wrap,
)
from halcyon.array._dtypes import BOOL
from halcyon.array._indexing import nonzero_columns, take
from halcyon.array._statistical import Axes, cumulative_sum
from halcyon.array._utility import truth

__all__ = [
    "argmax",
    "argmin",
    "argsort",
    "count_nonzero",
    "nonzero",
    "searchsorted",
    "sort",
    "unique_all",
    "unique_counts",
    "unique_inverse",
    "unique_values",
]


def argmax(x: Array, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Array:
    """The index of the first largest number along an axis, or in the flattened array.

    NaN is the largest.
    """
    return _arg("argmax", True, x, axis, keepdims)


def argmin(x: Array, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Array:
    """The index of the first smallest number along an axis, or in the flattened array.

    NaN is the smallest.
    """
    return _arg("argmin", False, x, axis, keepdims)


def _arg(op: str, is_max: builtins.bool, x: Array, axis: int | None, keepdims: builtins.bool) -> Array:
    check_kind(op, as_array(op, x), NUMBERS)
    shape = x.shape
    if axis is None:
        if not x.size:
            raise ShapeError(f"{op}: the array of the shape {shape} has no elements")
        found = ops.argreduce(ops.reshape(x._tensor, (x.size,)), is_max, 0)
        return wrap(ops.reshape(found, (1,) * len(shape)) if keepdims else found)
    at = axis_of(op, axis, len(shape))
    if not shape[at]:
        raise ShapeError(f"{op}: the array of the shape {shape} has no elements along axis {at}")
    return wrap(ops.argreduce(x._tensor, is_max, at, keepdims))


def count_nonzero(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """The number of elements over axes that are true or not zero."""
    check_kind("count_nonzero", as_array("count_nonzero", x), ALL)
    ones = ops.cast(truth(x), INDEX.native)
    return wrap(ops.reduce(ones, "sum", axes_of("count_nonzero", axis, x.ndim), keepdims))


def nonzero(x: Array, /) -> tuple[Array, ...]:
    """The indices of the elements that are true or not zero, one array per axis. Computes the operand."""
    if as_array("nonzero", x).ndim == 0:
        raise ShapeError("nonzero needs at least one axis")
    return tuple(wrap(t) for t in nonzero_columns(x._tensor))


def argsort(
    x: Array, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Array:
    """The indices that sort numbers along an axis. NaN is the largest. The sort is always stable."""
    return wrap(_order("argsort", x, axis, descending, stable)[0])


def sort(
    x: Array, /, *, axis: int = -1, descending: builtins.bool = False, stable: builtins.bool = True
) -> Array:
    """The numbers in order along an axis. NaN is the largest. The sort is always stable."""
    order, at = _order("sort", x, axis, descending, stable)
    return wrap(ops.gather_elements(x._tensor, order, at))


def _order(
    op: str, x: Array, axis: int, descending: builtins.bool, stable: builtins.bool
) -> tuple[Tensor, int]:
    check_kind(op, as_array(op, x), NUMBERS)
    if not isinstance(stable, builtins.bool):
        raise DTypeError(f"{op}: stable is a bool, not {stable!r}")
    at = axis_of(op, axis, x.ndim)
    return ops.argsort(x._tensor, at, descending), at


def searchsorted(
    x1: Array,
    x2: Array,
    /,
    *,
    side: Literal["left", "right"] = "left",
    sorter: Array | None = None,
) -> Array:
    """The places in the sorted array ``x1`` before which the numbers of ``x2`` keep it sorted.

    Among equal numbers the place is the first (``"left"``) or after the last (``"right"``). ``sorter`` has
    the indices that sort ``x1``.
    """
    one_of("searchsorted", "side", side, ("left", "right"))
    if as_array("searchsorted", x1).ndim != 1:
        raise ShapeError(f"searchsorted: the sorted array has {x1.ndim} axes, not 1")
    as_array("searchsorted", x2)
    if sorter is not None:
        check_kind("searchsorted", as_array("searchsorted", sorter), INTEGERS)
        if sorter.shape != x1.shape:
            raise ShapeError(f"searchsorted: the sorter has the shape {sorter.shape}, not {x1.shape}")
        x1 = take(x1, sorter)
    table, values = pair("searchsorted", x1, x2, NUMBERS)
    return wrap(_bisect(table, values, side == "right"))


def _bisect(table: Tensor, values: Tensor, is_right: builtins.bool) -> Tensor:
    """The place of each value in a sorted table, by bisection: one step per binary digit of its size."""
    n = table.shape[0]
    backend = table.backend
    low = full(backend, values.shape, 0, INDEX)
    high = full(backend, values.shape, n, INDEX)
    one = literal(low, 1)
    for _ in range(n.bit_length()):
        middle = ops.scalar("div", (ops.scalar("add", (low, high)), literal(low, 2)))
        # The search is over where low is high, which may be behind the last element.
        element = ops.gather(table, ops.scalar("min", (middle, literal(low, n - 1))), 0)
        if is_right:
            goes_on = ops.scalar("not", (_is_less(values, element),))
        else:
            goes_on = _is_less(element, values)
        is_open = ops.scalar("lt", (low, high))
        up = ops.scalar("and", (is_open, goes_on))
        high = select(ops.scalar("and", (is_open, ops.scalar("not", (goes_on,)))), middle, high)
        low = select(up, ops.scalar("add", (middle, one)), low)
    return low


def _is_less(a: Tensor, b: Tensor) -> Tensor:
    """Whether numbers are before others in a sort, where NaN is the largest."""
    less = ops.scalar("lt", (a, b))
    if not a.dtype.startswith(("f", "bf")):
        return less
    only_b = ops.scalar("and", (ops.scalar("isnan", (b,)), ops.scalar("not", (ops.scalar("isnan", (a,)),))))
    return ops.scalar("or", (less, only_b))


def indices_of_counts(counts: Array) -> Tensor:
    """Each index as often as the array of counts says. Computes the counts."""
    ends = cumulative_sum(wrap(cast(counts, INDEX)))
    total = int(ends[-1]) if ends.size else 0
    return _bisect(ends._tensor, iota(ends._tensor.backend, total), True)


# Sets.


class UniqueAllResult(NamedTuple):
    """The result of :func:`unique_all`."""

    values: Array
    indices: Array
    inverse_indices: Array
    counts: Array


class UniqueCountsResult(NamedTuple):
    """The result of :func:`unique_counts`."""

    values: Array
    counts: Array


class UniqueInverseResult(NamedTuple):
    """The result of :func:`unique_inverse`."""

    values: Array
    inverse_indices: Array


class _Runs:
    """The runs of equal elements of a flattened and sorted array. Computes the operand."""

    def __init__(self, op: str, x: Array) -> None:
        check_kind(op, as_array(op, x), ALL)
        self.shape = x.shape
        self.n = x.size
        flat = ops.reshape(x._tensor, (self.n,))
        self.order = ops.argsort(flat, 0, False)
        self.sorted = ops.gather(flat, self.order, 0)
        first = full(flat.backend, (min(self.n, 1),), True, BOOL)
        if self.n > 1:
            rest = [ops.narrow(self.sorted, 0, k, self.n - 1) for k in (1, 0)]
            first = ops.concat((first, ops.scalar("ne", rest)), 0)
        self.is_start = first
        self.starts = nonzero_columns(first)[0]

    def values(self) -> Array:
        return wrap(ops.gather(self.sorted, self.starts, 0))

    def indices(self) -> Array:
        return wrap(ops.gather(self.order, self.starts, 0))

    def inverse(self) -> Array:
        number = ops.scan(ops.cast(self.is_start, INDEX.native), "sum", 0)
        number = ops.scalar("sub", (number, literal(number, 1)))
        place = full(number.backend, (self.n,), 0, INDEX)
        if self.n:
            place = ops.scatter_rows(place, self.order, number, 0, "set")
        return wrap(ops.reshape(place, self.shape))

    def counts(self) -> Array:
        ends = full(self.starts.backend, (1,), self.n, INDEX)
        if self.starts.shape[0]:
            ends = ops.concat((ops.narrow(self.starts, 0, 1, self.starts.shape[0] - 1), ends), 0)
        else:
            ends = self.starts
        return wrap(ops.scalar("sub", (ends, self.starts)))


def unique_all(x: Array, /) -> UniqueAllResult:
    """The distinct elements in order, with the other results of the functions of sets.

    These are the index of the first of each in the flattened array, the number of the distinct element for
    each element, and how often each occurs. Each NaN is distinct. Computes the operand.
    """
    runs = _Runs("unique_all", x)
    return UniqueAllResult(runs.values(), runs.indices(), runs.inverse(), runs.counts())


def unique_counts(x: Array, /) -> UniqueCountsResult:
    """The distinct elements in order, and how often each occurs. Computes the operand."""
    runs = _Runs("unique_counts", x)
    return UniqueCountsResult(runs.values(), runs.counts())


def unique_inverse(x: Array, /) -> UniqueInverseResult:
    """The distinct elements in order, and the number of the distinct element for each element.

    Computes the operand.
    """
    runs = _Runs("unique_inverse", x)
    return UniqueInverseResult(runs.values(), runs.inverse())


def unique_values(x: Array, /) -> Array:
    """The distinct elements in order. Computes the operand."""
    return _Runs("unique_values", x).values()
