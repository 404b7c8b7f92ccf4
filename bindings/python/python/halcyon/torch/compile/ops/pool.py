"""Pools and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halcyon import _native
from halcyon.torch.compile.dtypes import is_float, wide
from halcyon.torch.compile.ops.index import from_start
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []

_ops = _native.ops


class Pool:
    """The attributes of a pool over the last axes, with the padding that rounding up needs."""

    __slots__ = ("dilation", "high", "kernel", "low", "n", "stride", "x")

    def __init__(
        self,
        x: Value,
        out: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int] = (1,),
    ) -> None:
        if x.size == 0:
            raise Unsupported("a pool of an empty tensor")
        n = len(out)
        self.n, self.x = n, x

        def each(v: Sequence[int] | int) -> list[int]:
            values = [v] if isinstance(v, int) else list(v)
            return values * n if len(values) == 1 else values

        self.kernel = each(kernel)
        self.stride = each(stride) if stride else list(self.kernel)
        self.low, self.dilation = each(padding), each(dilation)
        self.high = []
        for k in range(n):
            reach = (out[k - n] - 1) * self.stride[k] + (self.kernel[k] - 1) * self.dilation[k] + 1
            self.high.append(reach - x.shape[k - n] - self.low[k])

    def cropped(self, x: Value) -> Value:
        """The elements that windows reach, as `[batch, channels, …]`."""
        for k in range(self.n):
            axis = x.ndim - self.n + k
            if self.high[k] < 0:
                x = x.slice(axis, 0, x.shape[axis] + self.high[k])
        return self.batched(x)

    def batched(self, x: Value) -> Value:
        """Rank n + 2."""
        return x if x.ndim == self.n + 2 else x.unsqueeze(0)

    def uncropped(self, dx: Value) -> Value:
        """The gradient of `cropped`."""
        rest = [0, 0, *[max(-h, 0) for h in self.high]]
        return dx.pad([0] * dx.ndim, rest, 0).reshape(self.x.shape)

    @property
    def native(self) -> tuple[list[int], list[int], list[tuple[int, int]], list[int]]:
        """Kernel, stride, padding and dilation of the native pool."""
        pads = [(low, max(high, 0)) for low, high in zip(self.low, self.high, strict=True)]
        return self.kernel, self.stride, pads, self.dilation


def _max_pool(
    c: Call,
    n: int,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    *rest: Any,
) -> tuple[Value, Value]:
    dilation = rest[0] if rest and isinstance(rest[0], (list, tuple)) else (1,)
    pool = Pool(x, c.shape()[-n:], kernel, stride, padding, dilation)
    own = pool.cropped(x)
    y = Value(_ops.pool(own.t, "max", *pool.native))
    return y.reshape(c.shape()), _max_indices(c, pool, own).reshape(c.shape(1))


def _max_indices(c: Call, pool: Pool, x: Value) -> Value:
    """The position in its plane of the first largest element of each window, or of its last NaN."""
    out = c.shape()[-pool.n :]
    kernel, stride, pads, dilation = pool.native
    spatial = pool.x.shape[-pool.n :]
    low = [0, 0, *[p[0] for p in pads]]
    high = [0, 0, *[p[1] for p in pads]]
    padded = x.pad(low, high, _lowest(x.dtype))
    place = x.iota("i64", x.shape[2:], 0)
    for k in range(1, pool.n):
        place = place * spatial[k] + x.iota("i64", x.shape[2:], k)
    place = place.pad(low[2:], high[2:], -1)
    best: Value | None = None
    at: Value | None = None
    for tap in range(math.prod(kernel)):
        value, position = padded, place
        for k in range(pool.n - 1, -1, -1):
            tap, offset = divmod(tap, kernel[k])
            start = offset * dilation[k]
            span = (out[k] - 1) * stride[k] + 1
            value = value.slice(k + 2, start, span).slice(k + 2, 0, out[k], stride[k])
            position = position.slice(k, start, span).slice(k, 0, out[k], stride[k])
        position = position.expand(value.shape)
        if best is None or at is None:
            best, at = value, position
            continue
        # Padding is only taken until the first element of the image.
        better = (value > best) | value.isnan() | ((at < 0) & (position >= 0))
        best, at = better.where(value, best), better.where(position, at)
    if at is None:
        raise Unsupported("a pool with an empty kernel")
    return at


@op("max_pool2d_with_indices")
def _max_pool2d(
    c: Call,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *r: Any,
) -> tuple[Value, Value]:
    return _max_pool(c, 2, x, kernel, stride, padding, *r)


@op("max_pool3d_with_indices")
def _max_pool3d(
    c: Call,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    *r: Any,
) -> tuple[Value, Value]:
    return _max_pool(c, 3, x, kernel, stride, padding, *r)


@op("halcyon::max_pool2d_grad")
def _max_pool_grad(c: Call, grad: Value, x: Value, kernel: Sequence[int], *rest: Any) -> Value:
    stride, padding, dilation, _ = rest
    pool = Pool(x, grad.shape[-2:], kernel, stride, padding, dilation)
    dx = _ops.pool_grad(pool.cropped(x).t, pool.batched(grad).t, "max", *pool.native)
    return pool.uncropped(Value(dx))


def _from_indices(c: Call, n: int, grad: Value, x: Value, indices: Value) -> Value:
    """Adds each window's gradient to the element that the index names."""
    if x.size == 0 or grad.size == 0:
        raise Unsupported("a pool of an empty tensor")
    planes = math.prod(x.shape[:-n])
    size = math.prod(x.shape[-n:])
    count = math.prod(grad.shape[-n:])
    dtype = wide(grad.dtype)
    zeros = c.full([planes, size], 0, dtype)
    new = grad.cast(dtype).reshape([planes, count])
    made = zeros.scatter_elements(indices.reshape([planes, count]), new, 1, "add")
    return c.done(made.reshape(x.shape))


@op("max_pool2d_with_indices_backward")
def _max_pool2d_backward(c: Call, grad: Value, x: Value, *rest: Any) -> Value:
    return _from_indices(c, 2, grad, x, rest[-1])


@op("max_pool3d_with_indices_backward")
def _max_pool3d_backward(c: Call, grad: Value, x: Value, *rest: Any) -> Value:
    return _from_indices(c, 3, grad, x, rest[-1])


@op("max_unpool2d", "max_unpool3d")
def _max_unpool(c: Call, x: Value, indices: Value, *_: Any) -> Value:
    # PyTorch's decomposition would write past the end of a plane into the next one.
    n, out = 2 if "2d" in str(c.node.target) else 3, c.shape()
    if x.size == 0:
        raise Unsupported("a pool of an empty tensor")
    planes, size, count = math.prod(out[:-n]), math.prod(out[-n:]), math.prod(x.shape[-n:])
    at = from_start(indices.reshape([planes, count]), size)
    made = c.full([planes, size], 0, x.dtype).scatter_elements(at, x.reshape([planes, count]), 1, "set")
    return made.reshape(out)


def _average(
    pool: Pool, x: Value, out: Sequence[int], count_include_pad: bool, divisor: int | None
) -> tuple[str, Value | None]:
    """The native kind of an average pool, and what its result is multiplied by, if anything."""
    size = math.prod(pool.kernel)
    if divisor:
        return "avg_padded", x.number(size / divisor)
    if not count_include_pad:
        return "avg", None
    ragged = [k for k in range(pool.n) if pool.high[k] > pool.low[k]]
    if not ragged:
        return "avg_padded", None
    # Padding that rounding up adds does not count.
    factor: Value | None = None
    for k in ragged:
        limit = pool.x.shape[k - pool.n] + 2 * pool.low[k]
        counts = [min(i * pool.stride[k] + pool.kernel[k], limit) - i * pool.stride[k] for i in range(out[k])]
        shape = [out[k] if j == k else 1 for j in range(pool.n)]
        column = concat_numbers(x, [pool.kernel[k] / n for n in counts]).reshape(shape)
        factor = column if factor is None else factor * column
    return "avg_padded", factor


def concat_numbers(like: Value, numbers: Sequence[float]) -> Value:
    """A tensor of one axis with these numbers."""
    return Value(_ops.concat([like.number(v).reshape([1]).t for v in numbers], 0))


def _avg_pool(
    c: Call, n: int, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), *rest: Any
) -> Value:
    defaults: tuple[Any, ...] = ((0,), False, True, None)
    padding, _, count_include_pad, divisor_override = (*rest, *defaults[len(rest) :])
    if not is_float(x.dtype):
        raise Unsupported("an average pool of integers")
    out = c.shape()
    pool = Pool(x, out[-n:], kernel, stride, padding)
    own = pool.cropped(x.cast(c.math()))
    kind, factor = _average(pool, own, out[-n:], count_include_pad, divisor_override)
    y = Value(_ops.pool(own.t, kind, *pool.native))
    return c.done((y if factor is None else y * factor).reshape(out))


def _avg_pool_backward(c: Call, n: int, grad: Value, x: Value, kernel: Sequence[int], *rest: Any) -> Value:
    stride, padding, _, count_include_pad, divisor_override = rest
    pool = Pool(x, grad.shape[-n:], kernel, stride, padding)
    own, g = pool.cropped(x.cast(c.math())), pool.batched(grad.cast(c.math()))
    kind, factor = _average(pool, own, grad.shape[-n:], count_include_pad, divisor_override)
    g = g if factor is None else (g * factor).reshape(g.shape)
    dx = Value(_ops.pool_grad(own.t, g.t, kind, *pool.native))
    return c.done(pool.uncropped(dx))


@op("avg_pool2d")
def _avg_pool2d(c: Call, x: Value, kernel: Sequence[int], *rest: Any) -> Value:
    return _avg_pool(c, 2, x, kernel, *rest)


@op("avg_pool3d")
def _avg_pool3d(c: Call, x: Value, kernel: Sequence[int], *rest: Any) -> Value:
    return _avg_pool(c, 3, x, kernel, *rest)


@op("avg_pool2d_backward")
def _avg_pool2d_backward(c: Call, grad: Value, x: Value, *rest: Any) -> Value:
    return _avg_pool_backward(c, 2, grad, x, *rest)


@op("avg_pool3d_backward")
def _avg_pool3d_backward(c: Call, grad: Value, x: Value, *rest: Any) -> Value:
    return _avg_pool_backward(c, 3, grad, x, *rest)


def _windows(like: Value, size: int, count: int) -> tuple[Value, Value, Value]:
    """The `count` windows of an adaptive pool over an axis of this size.

    The first value has the places of each window's elements in a row, which is as long as the longest window;
    the second says which of them the window has; the third has the lengths of the windows.
    """
    longest = max(-(-(i + 1) * size // count) - i * size // count for i in range(count))
    out = like.iota("i64", [count, longest], 0)
    start, end = out * size / count, ((out + 1) * size + (count - 1)) / count
    place = start + like.iota("i64", [count, longest], 1)
    lengths = (end - start).slice(1, 0, 1).reshape([count])
    return place.min(size - 1), place < end, lengths


def _window_sums(x: Value, axis: int, count: int) -> Value:
    """The sums of `count` adaptive windows along an axis. An element counts in its own windows only."""
    size = x.shape[axis]
    if size % count == 0:
        parts = x.reshape([*x.shape[:axis], count, size // count, *x.shape[axis + 1 :]])
        return parts.sum([axis + 1])
    place, inside, _ = _windows(x, size, count)
    inside = inside.reshape([*inside.shape, *[1] * (x.ndim - 1 - axis)])
    return inside.where(x.take(place, axis), 0).sum([axis + 1])


def _lengths(like: Value, axis: int, size: int, count: int) -> Value:
    """The lengths of the adaptive windows along an axis, to divide by."""
    _, _, lengths = _windows(like, size, count)
    return lengths.cast(like.dtype).reshape([count, *[1] * (like.ndim - 1 - axis)])


@op("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
def _adaptive_avg_pool(c: Call, x: Value, size: Sequence[int]) -> Value:
    out, n = c.shape(), len(size)
    if x.size == 0 or 0 in out or not is_float(x.dtype):
        raise Unsupported("an adaptive pool of an empty tensor or of integers")
    y = x.cast(c.math())
    if all(i % o == 0 for i, o in zip(x.shape[-n:], out[-n:], strict=True)):
        # Windows of one size: each axis splits into windows and their elements.
        lead, split = list(x.shape[:-n]), []
        for i, o in zip(x.shape[-n:], out[-n:], strict=True):
            split += [o, i // o]
        y = y.reshape([*lead, *split])
        return c.done(y.mean([len(lead) + 2 * k + 1 for k in range(n)]))
    for axis in range(x.ndim - n, x.ndim):
        y = _window_sums(y, axis, out[axis])
    for axis in range(x.ndim - n, x.ndim):
        y = y / _lengths(y, axis, x.shape[axis], out[axis])
    return c.done(y)


@op("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _adaptive_avg_pool_backward(c: Call, grad: Value, x: Value) -> Value:
    n = 2 if "2d" in str(c.node.target) else 3
    pairs = list(zip(x.shape[-n:], grad.shape[-n:], strict=True))
    if x.size == 0 or grad.size == 0:
        raise Unsupported("an adaptive pool of an empty tensor")
    g = grad.cast(c.math())
    if any(i % o for i, o in pairs):
        for axis in range(x.ndim - n, x.ndim):
            g = g / _lengths(g, axis, x.shape[axis], grad.shape[axis])
        for axis in range(x.ndim - n, x.ndim):
            # The windows that have an element are the adaptive window of the results over the elements.
            g = _window_sums(g, axis, x.shape[axis])
        return c.done(g)
    lead, narrow, broad = list(x.shape[:-n]), [], []
    for i, o in pairs:
        narrow += [o, 1]
        broad += [o, i // o]
    g = g / float(math.prod(i // o for i, o in pairs))
    return c.done(g.reshape([*lead, *narrow]).expand([*lead, *broad]).reshape(x.shape))


@op("adaptive_max_pool2d", "adaptive_max_pool3d")
def _adaptive_max_pool(c: Call, x: Value, size: Sequence[int]) -> tuple[Value, Value]:
    out, n = c.shape(), len(size)
    if x.size == 0 or 0 in out:
        raise Unsupported("an adaptive pool of an empty tensor")
    # Each axis splits into windows and their elements; elements outside of a window do not count.
    y, place, inside = x, None, None
    lead = x.ndim - n
    for k in range(n):
        size_k, count = x.shape[lead + k], out[lead + k]
        row, valid, _ = _windows(x, size_k, count)
        y = y.take(row, lead + 2 * k)
        shape = [1] * (2 * n)
        shape[2 * k : 2 * k + 2] = row.shape
        valid, row = valid.reshape(shape), row.reshape(shape)
        inside = valid if inside is None else inside & valid
        place = row if place is None else place * size_k + row
    if place is None or inside is None:
        raise Unsupported("a pool over no axes")
    order = [*range(lead), *[lead + 2 * k for k in range(n)], *[lead + 2 * k + 1 for k in range(n)]]
    lowest = _lowest(x.dtype)
    flat = inside.where(y, lowest).permute(order).reshape([*out, -1])
    at = flat.argreduce(True, flat.ndim - 1, True)
    inner = [2 * k for k in range(n)] + [2 * k + 1 for k in range(n)]
    wide = place.expand(y.shape[lead:]).permute(inner).reshape([*[1] * lead, *out[lead:], -1])
    wide = wide.expand(flat.shape)
    last = flat.ndim - 1
    return flat.take_elements(at, last).reshape(out), wide.take_elements(at, last).reshape(out)


def _lowest(dtype: str) -> float | int:
    if is_float(dtype):
        return -math.inf
    return 0 if dtype[0] == "u" else -(2 ** (int(dtype[1:]) - 1))


@op("adaptive_max_pool2d_backward")
def _adaptive_max_pool2d_backward(c: Call, grad: Value, x: Value, indices: Value) -> Value:
    return _from_indices(c, 2, grad, x, indices)


@op("adaptive_max_pool3d_backward")
def _adaptive_max_pool3d_backward(c: Call, grad: Value, x: Value, indices: Value) -> Value:
    return _from_indices(c, 3, grad, x, indices)
