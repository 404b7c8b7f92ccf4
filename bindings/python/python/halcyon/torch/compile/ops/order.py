"""Sorting, and what is computed by sorting."""

from __future__ import annotations

from typing import Any

from halcyon.torch.compile.dtypes import is_float
from halcyon.torch.compile.ops.reduce import comparable
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []


def sorted_by(x: Value, axis: int, descending: bool) -> tuple[Value, Value]:
    """The sorted values of an axis and their indices. Equal elements keep their order."""
    index = comparable(x).argsort(axis, descending)
    return x.take_elements(index, axis), index


@op("sort", "sort.stable")
def _sort(c: Call, x: Value, *args: Any, **options: Any) -> tuple[Value, Value]:
    # sort(x, dim, descending) and sort.stable(x, stable=, dim=, descending=).
    dim = options.get("dim", args[0] if args and "stable" not in options else -1)
    descending = options.get("descending", args[1] if len(args) > 1 else False)
    if x.ndim == 0 or x.size == 0:
        return x, c.full(c.shape(1), 0, "i64")
    return sorted_by(x, x.axis(dim), bool(descending))


@op("argsort", "argsort.stable")
def _argsort(c: Call, x: Value, dim: int = -1, descending: bool = False, **_: Any) -> Value:
    if x.ndim == 0 or x.size == 0:
        return c.full(c.shape(), 0, "i64")
    return comparable(x).argsort(x.axis(dim), descending)


@op("topk")
def _topk(
    c: Call, x: Value, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Value, Value]:
    if x.ndim == 0 or k == 0 or x.size == 0:
        value = x.expand(c.shape()) if x.ndim == 0 else c.full(c.shape(), 0, x.dtype)
        return value, c.full(c.shape(1), 0, "i64")
    axis = x.axis(dim)
    index = comparable(x).argsort(axis, largest).slice(axis, 0, k)
    return x.take_elements(index, axis), index


@op("kthvalue")
def _kthvalue(c: Call, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Value, Value]:
    if x.ndim == 0 or x.size == 0:
        return x.reshape(c.shape()), c.full(c.shape(1), 0, "i64")
    axis = x.axis(dim)
    index = comparable(x).argsort(axis).slice(axis, k - 1, 1)
    return x.take_elements(index, axis).reshape(c.shape()), index.reshape(c.shape(1))


@op("median.dim", "nanmedian.dim")
def _median(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    if x.ndim == 0:
        return x.reshape(c.shape()), c.full(c.shape(1), 0, "i64")
    if x.size == 0:
        raise Unsupported("the median of no elements")
    axis = x.axis(dim)
    index = comparable(x).argsort(axis)
    n = x.shape[axis]
    middle = index.slice(axis, (n - 1) // 2, 1)
    if is_float(x.dtype) and "nan" in str(c.node.target):
        # NaN sorts last, so the others are in front.
        count = (~x.isnan()).cast("i64").sum([axis], True)
        middle = index.take_elements((count - 1).max(0) / 2, axis)
        return x.take_elements(middle, axis).reshape(c.shape()), middle.reshape(c.shape(1))
    if is_float(x.dtype):
        # A NaN is the median of its row. It sorts last.
        nan = x.isnan()
        first = nan.cast("u8").argreduce(True, axis, True)
        middle = nan.reduce("max", [axis], True).where(first, middle)
    return x.take_elements(middle, axis).reshape(c.shape()), middle.reshape(c.shape(1))


@op("median", "nanmedian")
def _median_all(c: Call, x: Value) -> Value:
    if x.size == 0:
        raise Unsupported("the median of no elements")
    flat = x.reshape([x.size])
    values, _ = sorted_by(flat, 0, False)
    if is_float(x.dtype) and "nan" in str(c.node.target):
        count = (~flat.isnan()).cast("i64").sum([0], True)
        return values.take_elements((count - 1).max(0) / 2, 0).reshape([])
    middle = values.slice(0, (x.size - 1) // 2, 1).reshape([])
    if is_float(x.dtype):
        last = values.slice(0, x.size - 1, 1).reshape([])
        middle = last.isnan().where(last, middle)
    return middle


@op("searchsorted.Tensor", "searchsorted.Scalar", "bucketize.Tensor", "bucketize.Scalar")
def _searchsorted(c: Call, a: Any, b: Any, **options: Any) -> Value:
    bucketize = "bucketize" in str(c.node.target)
    edges, values = (b, a) if bucketize else (a, b)
    right = options.get("right", False)
    if options.get("side") is not None:
        right = options["side"] == "right"
    if options.get("sorter") is not None:
        order = options["sorter"]
        edges = edges.take_elements(order, edges.ndim - 1)
    dtype = c.name(c.promoted(*c.args()[:2]))
    edges, wanted = c.to(dtype, edges, values)
    if edges.size == 0 or wanted.size == 0:
        return c.full(c.shape(), 0, c.dtype())
    wanted = wanted.unsqueeze(wanted.ndim)
    if edges.ndim > 1:
        edges = edges.unsqueeze(edges.ndim - 1)
    below = edges <= wanted if right else edges < wanted
    if is_float(dtype):
        nan = edges.isnan()
        own = wanted.isnan()
        # NaN sorts last.
        low = own & ~nan
        below = (below | low | (own & nan)) if right else (below | low)
    return c.done(below.cast("i64").sum([below.ndim - 1]))
