"""Writes by index, and writes into views."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halcyon.torch.compile.dtypes import is_float
from halcyon.torch.compile.ops.index import Indexed, from_start
from halcyon.torch.compile.ops.shape import bounds, check_strided, strided_index
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Operand, Value, concat

__all__: list[str] = []


# Elements.


def scattered(c: Call, x: Value, dim: int, index: Value, updates: Operand, kind: str) -> Value:
    """Combines elements of `updates` (those in the index's shape) into `x`. Half types add up in f32."""
    if index.size == 0:
        return x
    wide = "f32" if kind in ("add", "mul") and x.dtype in ("f16", "bf16") else x.dtype
    base = x.cast(wide)
    if base.ndim == 0:
        base, index = base.reshape([1]), index.reshape([1])
        updates = updates.reshape([1]) if isinstance(updates, Value) else updates
    if index.ndim == 0:
        index = index.reshape([1])
        updates = updates.reshape([1]) if isinstance(updates, Value) else updates
    if isinstance(updates, Value):
        new = updates.cast(wide)
        for k, n in enumerate(index.shape):
            new = new.slice(k, 0, n)
    else:
        new = c.full(index.shape, updates, wide)
    axis = base.axis(dim)
    made = base.scatter_elements(from_start(index, base.shape[axis]), new, axis, kind)
    return made.cast(x.dtype).reshape(x.shape)


@op("scatter.src", "scatter.value")
def _scatter(c: Call, x: Value, dim: int, index: Value, src: Operand) -> Value:
    return scattered(c, x, dim, index, src, "set")


@op("scatter_add")
def _scatter_add(c: Call, x: Value, dim: int, index: Value, src: Value) -> Value:
    if x.dtype == "bool":
        raise Unsupported("scatter_add of bool")
    return scattered(c, x, dim, index, src, "add")


@op("scatter.reduce", "scatter.value_reduce")
def _scatter_reduce_old(c: Call, x: Value, dim: int, index: Value, src: Operand, *, reduce: str) -> Value:
    if x.dtype == "bool":
        raise Unsupported("a reducing scatter of bool")
    return scattered(c, x, dim, index, src, {"add": "add", "multiply": "mul"}[reduce])


_KINDS = {"sum": "add", "prod": "mul", "amax": "max", "amin": "min", "mean": "add"}


@op("scatter_reduce.two")
def _scatter_reduce(
    c: Call, x: Value, dim: int, index: Value, src: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if x.dtype == "bool":
        raise Unsupported("scatter_reduce of bool")
    if index.size == 0:
        return x
    kind, wide = _KINDS[reduce], c.math()
    base = x.cast(wide)
    ones = c.full(index.shape, 1, "i64")
    count = scattered(c, c.full(x.shape, 0, "i64"), dim, index, ones, "add")
    if not include_self:
        base = count.ne(0).where(_identity(c, kind, wide), base)
    made = scattered(c, base, dim, index, src.cast(wide), kind)
    return c.done(_mean(made, count, include_self) if reduce == "mean" else made)


def _mean(total: Value, count: Value, include_self: bool) -> Value:
    """The mean of updates and, with `include_self`, the base. Of integers it is rounded down."""
    count = (count + int(include_self)).max(1).cast(total.dtype)
    if is_float(total.dtype):
        return total / count
    quotient = total / count
    rest = total - quotient * count
    return quotient - (rest < 0).cast(total.dtype)


def _identity(c: Call, kind: str, dtype: str) -> Value:
    if kind in ("add", "mul"):
        return c.scalar(int(kind == "mul"), dtype)
    if is_float(dtype):
        return c.scalar(-math.inf if kind == "max" else math.inf, dtype)
    bits = int(dtype[1:])
    low, high = (0, 2**bits - 1) if dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return c.scalar(low if kind == "max" else high, dtype)


# Rows.


@op("index_add")
def _index_add(c: Call, x: Value, dim: int, index: Value, source: Value, *, alpha: Number = 1) -> Value:
    new = source.cast(c.math())
    return _rows(c, x, dim, index, new if alpha == 1 else new * alpha, "add")


@op("index_reduce")
def _index_reduce(
    c: Call, x: Value, dim: int, index: Value, source: Value, reduce: str, *, include_self: bool = True
) -> Value:
    if x.dtype == "bool" or x.ndim == 0:
        raise Unsupported("index_reduce of bool or of a scalar")
    if index.size == 0 or x.size == 0:
        return x
    kind, wide, axis = {**_KINDS, "mean": "add"}[reduce], c.math(), x.axis(dim)
    flat, base = from_start(index.reshape([index.size]), x.shape[axis]), x.cast(wide)
    count = c.full([x.shape[axis]], 0, "i64").scatter_rows(flat, c.full([index.size], 1, "i64"), 0, "add")
    count = count.reshape([x.shape[axis], *[1] * (x.ndim - 1 - axis)])
    if not include_self:
        base = count.ne(0).where(_identity(c, kind, wide).expand(x.shape), base)
    made = base.scatter_rows(flat, source.cast(wide), axis, kind)
    return c.done(_mean(made, count, include_self) if reduce == "mean" else made)


@op("index_copy")
def _index_copy(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _rows(c, x, dim, index, source, "set")


@op("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(c: Call, x: Value, dim: int, index: Value, value: Operand) -> Value:
    if x.ndim == 0:
        return c.done(c.value(value, x.dtype))
    shape = list(x.shape)
    shape[x.axis(dim)] = index.size
    return _rows(c, x, dim, index, c.value(value, x.dtype).expand(shape), "set", from_end=True)


def _rows(c: Call, x: Value, dim: int, index: Value, new: Value, kind: str, from_end: bool = False) -> Value:
    if x.dtype == "bool" and kind != "set":
        raise Unsupported("a reducing scatter of bool")
    if index.size == 0 or x.size == 0:
        return x
    base = x if kind == "set" else x.cast(c.math())
    axis = x.axis(dim)
    flat = index.reshape([index.size])
    if not from_end:
        flat = from_start(flat, x.shape[axis] if x.ndim else 1)
    if x.ndim == 0:
        made = base.reshape([1]).scatter_rows(flat, new.cast(base.dtype).reshape([index.size]), 0, kind)
        return c.done(made.reshape([]))
    shape = list(x.shape)
    shape[axis] = index.size
    return c.done(base.scatter_rows(flat, new.cast(base.dtype).reshape(shape), axis, kind))


@op("index_put", "_unsafe_index_put")
def _index_put(
    c: Call, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    if all(i is not None and i.dtype == "bool" for i in indices) and values.size == 1 and not accumulate:
        return _masked_put(c, x, indices, values)
    if x.dtype == "bool" and accumulate:
        raise Unsupported("an adding index_put of bool")
    at = Indexed(x, indices)
    if at.index.size == 0 or x.size == 0:
        return x
    wide = c.math() if accumulate else x.dtype
    new = at.unplaced(values.cast(wide).expand(at.result))
    rows = at.rows_of(x.cast(wide))
    made = rows.scatter_rows(at.index, new, 0, "add" if accumulate else "set")
    return c.done(at.back(made, x.shape))


def _masked_put(c: Call, x: Value, indices: Sequence[Value | None], values: Value) -> Value:
    if len(indices) != 1 or indices[0] is None:
        raise Unsupported("several masks as indices")
    mask = indices[0]
    if mask.shape != x.shape[: mask.ndim]:
        raise Unsupported("a mask of other sizes")
    mask = mask.reshape([*mask.shape, *[1] * (x.ndim - mask.ndim)])
    return c.done(mask.where(values.cast(x.dtype).reshape([]), x))


@op("put")
def _put(c: Call, x: Value, index: Value, source: Value, accumulate: bool = False) -> Value:
    if index.size == 0:
        return x
    wide = c.math() if accumulate else x.dtype
    flat = x.cast(wide).reshape([x.size])
    new = source.cast(wide).reshape([index.size])
    made = flat.scatter_rows(index.reshape([index.size]), new, 0, "add" if accumulate else "set")
    return c.done(made.reshape(x.shape))


@op("_unsafe_masked_index_put_accumulate")
def _masked_index_put(
    c: Call, x: Value, mask: Value, indices: Sequence[Value | None], values: Value
) -> Value:
    clamped = [None if i is None else i.cast("i64").max(0).min(x.shape[k] - 1) for k, i in enumerate(indices)]
    return _index_put(c, x, clamped, mask.where(values, 0), True)


@op("embedding_dense_backward")
def _embedding_backward(
    c: Call, grad: Value, indices: Value, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    width = grad.shape[-1]
    flat = from_start(indices.reshape([indices.size]), rows)
    new = grad.cast(c.math()).reshape([indices.size, width])
    if scale_grad_by_freq:
        ones = c.full([indices.size], 1, "i64")
        counts = c.full([rows], 0, "i64").scatter_rows(flat, ones, 0, "add")
        new = new / counts.take(flat, 0).cast(new.dtype).unsqueeze(1)
    if padding_idx >= 0:
        new = flat.eq(padding_idx).unsqueeze(1).where(0, new)
    if indices.size == 0:
        return c.full(c.shape(), 0, c.dtype())
    return c.done(c.full([rows, width], 0, new.dtype).scatter_rows(flat, new, 0, "add"))


# Views. The result is a copy of the tensor in which the view has other values.


def written(x: Value, new: Value, axis: int, start: int, step: int = 1) -> Value:
    """`x` with rows of an axis from `start` on replaced."""
    count = new.shape[axis]
    if count == 0:
        return x
    if step == 1:
        end = start + count
        parts = [x.slice(axis, 0, start), new, x.slice(axis, end, x.shape[axis] - end)]
        return concat([p for p in parts if p.shape[axis] > 0], axis)
    rows = x.iota("i64", [count], 0) * step + start
    return x.scatter_rows(rows, new, axis, "set")


@op("slice_scatter")
def _slice_scatter(
    c: Call,
    x: Value,
    src: Value,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Value:
    axis = x.axis(dim)
    low, high = bounds(start, end, x.shape[axis])
    shape = list(x.shape)
    shape[axis] = -(-(high - low) // step)
    return written(x, src.cast(x.dtype).expand(shape), axis, low, step)


@op("select_scatter")
def _select_scatter(c: Call, x: Value, src: Value, dim: int, index: int) -> Value:
    axis = x.axis(dim)
    return written(x, src.cast(x.dtype).unsqueeze(axis), axis, index % x.shape[axis])


def _flat_scatter(x: Value, at: Value, new: Value) -> Value:
    flat = x.reshape([x.size])
    return flat.scatter_rows(at, new.cast(x.dtype).reshape([at.size]), 0, "set").reshape(x.shape)


@op("diagonal_scatter")
def _diagonal_scatter(c: Call, x: Value, src: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    if src.size == 0:
        return x
    a, b = x.axis(dim1), x.axis(dim2)
    strides = [math.prod(x.shape[k + 1 :]) for k in range(x.ndim)]
    others = [k for k in range(x.ndim) if k not in (a, b)]
    first = max(-offset, 0) * strides[a] + max(offset, 0) * strides[b]
    steps = [*[strides[k] for k in others], strides[a] + strides[b]]
    return _flat_scatter(x, strided_index(x, src.shape, steps, first), src)


@op("as_strided_scatter")
def _as_strided_scatter(
    c: Call,
    x: Value,
    src: Value,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Value:
    check_strided(c, x, size, stride, storage_offset or 0)
    if src.size == 0:
        return x
    return _flat_scatter(x, strided_index(x, size, stride, storage_offset or 0), src)
