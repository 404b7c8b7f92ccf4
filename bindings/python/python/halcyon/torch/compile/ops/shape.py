"""Views and copies that move elements: shapes, axes, slices, padding, joining."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Value, concat

__all__: list[str] = []

_END = 2**63 - 1


@op("view", "_unsafe_view", "reshape", "view_copy", "squeeze", "unsqueeze", "squeeze_copy", "unsqueeze_copy")
@op("squeeze.dim", "squeeze.dims", "squeeze_copy.dim", "squeeze_copy.dims", "flatten.using_ints")
@op("_reshape_alias", "prims::view_of")
def _reshape(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    # The graph has the resulting shape.
    return x.reshape(c.shape())


@op("expand", "expand_copy")
def _expand(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return x.expand(c.shape())


@op("prims::broadcast_in_dim")
def _broadcast_in_dim(c: Call, x: Value, shape: Sequence[int], dimensions: Sequence[int]) -> Value:
    sizes = [1] * len(shape)
    for axis, size in zip(dimensions, x.shape, strict=True):
        sizes[axis] = size
    return x.reshape(sizes).expand(c.shape())


@op("permute", "permute_copy", "prims::transpose")
def _permute(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return x.permute([x.axis(d) for d in dims])


@op("transpose.int", "transpose_copy.int", "swapaxes", "swapdims")
def _transpose(c: Call, x: Value, a: int, b: int) -> Value:
    return x if x.ndim == 0 else x.transpose(x.axis(a), x.axis(b))


@op("t", "t_copy", "numpy_T")
def _t(c: Call, x: Value) -> Value:
    return x.permute(range(x.ndim)[::-1])


def bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Start and end of a slice, within the axis."""
    low = 0 if start is None else start
    high = _END if end is None else end
    low = max(low + size, 0) if low < 0 else min(low, size)
    high = max(high + size, 0) if high < 0 else min(high, size)
    return low, max(high, low)


@op("slice.Tensor", "slice_copy.Tensor")
def _slice(
    c: Call, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    axis = x.axis(dim)
    low, high = bounds(start, end, x.shape[axis])
    return x.slice(axis, low, -(-(high - low) // step), step)


@op("select.int", "select_copy.int")
def _select(c: Call, x: Value, dim: int, index: int) -> Value:
    axis = x.axis(dim)
    return x.slice(axis, index % x.shape[axis], 1).squeeze(axis)


@op("narrow")
def _narrow(c: Call, x: Value, dim: int, start: int, length: int) -> Value:
    axis = x.axis(dim)
    return x.slice(axis, start % max(x.shape[axis], 1) if start < 0 else start, length)


@op("split_with_sizes", "split_with_sizes_copy")
def _split_with_sizes(c: Call, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    axis, at, parts = x.axis(dim), 0, []
    for n in sizes:
        parts.append(x.slice(axis, at, n))
        at += n
    return tuple(parts)


@op("split.Tensor", "split_copy.Tensor")
def _split(c: Call, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    axis = x.axis(dim)
    n = x.shape[axis]
    if size == 0:
        return (x,)
    return tuple(x.slice(axis, at, min(size, n - at)) for at in range(0, max(n, 1), size))


@op("unbind.int", "unbind_copy.int")
def _unbind(c: Call, x: Value, dim: int = 0) -> tuple[Value, ...]:
    axis = x.axis(dim)
    return tuple(x.slice(axis, i, 1).squeeze(axis) for i in range(x.shape[axis]))


@op("cat")
def _cat(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    # An empty tensor of rank 1 joins with everything.
    parts = [t.cast(c.dtype()) for t in tensors if t.shape != (0,)]
    if not parts:
        return tensors[0].cast(c.dtype())
    axis = parts[0].axis(dim)
    full = [p for p in parts if p.shape[axis] > 0]
    return concat(full or parts[:1], axis)


@op("stack")
def _stack(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = dim % (tensors[0].ndim + 1)
    return concat([t.cast(c.dtype()).unsqueeze(axis) for t in tensors], axis)


@op("repeat")
def _repeat(c: Call, x: Value, repeats: Sequence[int]) -> Value:
    shape = c.shape()
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    split = [n for r, s in zip(repeats, sizes, strict=True) for n in (1, s)]
    wide = [n for r, s in zip(repeats, sizes, strict=True) for n in (r, s)]
    return x.reshape(split).expand(wide).reshape(shape)


@op("flip", "prims::rev")
def _flip(c: Call, x: Value, dims: Sequence[int]) -> Value:
    return x if x.ndim == 0 else x.flip(sorted({x.axis(d) for d in dims}))


@op("roll")
def _roll(c: Call, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if x.size == 0:
        return x
    if not dims:
        return _rolled(x.reshape([x.size]), shifts[0], 0).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, shift, x.axis(dim)) if x.ndim else x
    return x


def _rolled(x: Value, shift: int, axis: int) -> Value:
    n = x.shape[axis]
    at = -shift % n
    return x if at == 0 else concat([x.slice(axis, at, n - at), x.slice(axis, 0, at)], axis)


@op("constant_pad_nd")
def _constant_pad(c: Call, x: Value, pad: Sequence[int], value: Number = 0) -> Value:
    low, high = [0] * x.ndim, [0] * x.ndim
    for k in range(len(pad) // 2):
        axis = x.ndim - 1 - k
        before, after = pad[2 * k], pad[2 * k + 1]
        # Negative padding crops.
        n = x.shape[axis] + min(before, 0) + min(after, 0)
        x = x.slice(axis, max(-before, 0), max(n, 0))
        low[axis], high[axis] = max(before, 0), max(after, 0)
    return x.pad(low, high, value)


@op("as_strided", "as_strided_copy")
def _as_strided(
    c: Call, x: Value, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Value:
    shape, offset = c.shape(), storage_offset or 0
    check_strided(c, x, shape, stride, offset)
    flat = x.reshape([x.size])
    if math.prod(shape) == 0:
        return c.full(shape, 0, x.dtype)
    return flat.take(strided_index(flat, shape, stride, offset), 0).reshape(shape)


def check_strided(c: Call, x: Value, shape: Sequence[int], stride: Sequence[int], offset: int) -> None:
    """Refuses a strided view for which the elements of `x` are not those in memory from its start on."""
    source = c.node.args[0].meta["val"]  # type: ignore[union-attr]
    rows = [math.prod(x.shape[k + 1 :]) for k in range(x.ndim)]
    sizes = zip(x.shape, source.stride(), rows, strict=True)
    if any(n != 1 and c.size(s) != r for n, s, r in sizes) or c.size(source.storage_offset()) != 0:
        raise Unsupported("a strided view of a tensor that is not contiguous")
    last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if math.prod(shape) and last >= x.size:
        # The tensor is itself a view, and the memory has more elements.
        raise Unsupported("a strided view of elements outside of the tensor")


def strided_index(like: Value, shape: Sequence[int], stride: Sequence[int], offset: int) -> Value:
    """The index in memory of each element of a strided view, in one axis."""
    index = like.full(shape, 0).cast("i64") if not shape else like.iota("i64", shape, 0) * stride[0]
    for k in range(1, len(shape)):
        index = index + like.iota("i64", shape, k) * stride[k]
    return (index + offset).reshape([math.prod(shape)])


@op("unfold", "unfold_copy")
def _unfold(c: Call, x: Value, dimension: int, size: int, step: int) -> Value:
    if x.ndim == 0:
        return x.slice(0, 0, size) if x.shape else x.expand([size])
    axis = x.axis(dimension)
    count = (x.shape[axis] - size) // step + 1
    starts = x.iota("i64", [count, size], 0) * step + x.iota("i64", [count, size], 1)
    y = x.take(starts, axis)
    order = [k for k in range(y.ndim) if k != axis + 1]
    return y.permute([*order, axis + 1])


@op("diagonal", "diagonal_copy")
def _diagonal(c: Call, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = x.axis(dim1), x.axis(dim2)
    order = [k for k in range(x.ndim) if k not in (a, b)]
    y = x.permute([*order, a, b])
    n, m = y.shape[-2:]
    length = c.shape()[-1]
    if length == 0:
        return c.full(c.shape(), 0, x.dtype)
    first = max(-offset, 0) * m + max(offset, 0)
    flat = y.reshape([*y.shape[:-2], n * m])
    # The last axis may be too short for a view with steps of m + 1.
    span = (length - 1) * (m + 1) + 1
    return flat.slice(flat.ndim - 1, first, span).slice(flat.ndim - 1, 0, length, m + 1)


def triangle(x: Value, diagonal: int, lower: bool) -> Value:
    """Which elements of the last two axes are on or below (above) a diagonal."""
    shape = x.shape[-2:]
    row, column = x.iota("i64", shape, 0), x.iota("i64", shape, 1)
    return column <= row + diagonal if lower else column >= row + diagonal


@op("tril")
def _tril(c: Call, x: Value, diagonal: int = 0) -> Value:
    return triangle(x, diagonal, lower=True).where(x, 0)


@op("triu")
def _triu(c: Call, x: Value, diagonal: int = 0) -> Value:
    return triangle(x, diagonal, lower=False).where(x, 0)


@op("pixel_shuffle")
def _pixel_shuffle(c: Call, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n, k = channels // (factor * factor), len(batch)
    y = x.reshape([*batch, n, factor, factor, height, width])
    return y.permute([*range(k), k, k + 3, k + 1, k + 4, k + 2]).reshape(c.shape())


@op("pixel_unshuffle")
def _pixel_unshuffle(c: Call, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    k = len(batch)
    y = x.reshape([*batch, channels, height // factor, factor, width // factor, factor])
    return y.permute([*range(k), k, k + 2, k + 4, k + 1, k + 3]).reshape(c.shape())


def edges(c: Call, grad: Value, x: Value, padding: Sequence[int], mirror: bool) -> Value:
    """The gradient of padding that repeats or mirrors the edge: adds up what was read from each row."""
    n = len(padding) // 2
    made = grad.cast(c.math())
    for k in range(n):
        axis = x.ndim - 1 - k
        before, size, length = padding[2 * k], x.shape[axis], made.shape[axis]
        if x.size == 0 or (mirror and size < 2):
            raise Unsupported("padding of an empty tensor")
        row = made.iota("i64", [length], 0) - before
        if mirror:
            row = row.scalar("abs")
            row = (size - 1) - ((size - 1) - row).scalar("abs")
        else:
            row = row.max(0).min(size - 1)
        shape = [*made.shape[:axis], size, *made.shape[axis + 1 :]]
        made = c.full(shape, 0, made.dtype).scatter_rows(row, made, axis, "add")
    return c.done(made)


@op("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward")
def _replication_backward(c: Call, grad: Value, x: Value, padding: Sequence[int]) -> Value:
    return edges(c, grad, x, padding, mirror=False)


@op("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward")
def _reflection_backward(c: Call, grad: Value, x: Value, padding: Sequence[int]) -> Value:
    return edges(c, grad, x, padding, mirror=True)
