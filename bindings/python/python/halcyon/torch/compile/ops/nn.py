"""Softmax, normalisation and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halcyon import _native
from halcyon.torch.compile.dtypes import is_float, wide
from halcyon.torch.compile.ops.reduce import moments
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []

_ops = _native.ops


@op("_softmax", "_safe_softmax")
def _softmax(c: Call, x: Value, dim: int, half_to_float: object = None) -> Value:
    wide_x = x.cast(c.math())
    if x.ndim == 0 or x.size == 0:
        return c.done(wide_x * 0.0 + 1.0 if x.ndim == 0 else wide_x)
    y = Value(_ops.softmax(wide_x.t, x.axis(dim)))
    if "safe" in str(c.node.target):
        none = wide_x.eq(-math.inf).reduce("min", [x.axis(dim)], True)
        y = none.where(0.0, y)
    return c.done(y)


@op("_log_softmax")
def _log_softmax(c: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    x = x.cast(c.math())
    if x.ndim == 0 or x.size == 0:
        return c.done(x * 0.0 if x.ndim == 0 else x)
    return c.done(Value(_ops.log_softmax(x.t, x.axis(dim))))


@op("_softmax_backward_data")
def _softmax_backward(c: Call, grad: Value, y: Value, dim: int, dtype: object) -> Value:
    g, y = c.to(wide(y.dtype), grad, y)
    both = g * y
    return c.done(both - y * both.sum([y.axis(dim)] if y.ndim else [], True))


@op("_log_softmax_backward_data")
def _log_softmax_backward(c: Call, grad: Value, y: Value, dim: int, dtype: object) -> Value:
    g, y = c.to(wide(y.dtype), grad, y)
    return c.done(g - y.scalar("exp") * g.sum([y.axis(dim)] if y.ndim else [], True))


# Normalisation.


@op("native_layer_norm")
def _layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    if x.size == 0:
        raise Unsupported("layer normalisation of an empty tensor")
    axis = x.ndim - len(shape)
    axes = range(axis, x.ndim)
    wide_x = x.cast(wide(x.dtype))
    # Nodes that nothing reads are not computed.
    var, mean = moments(wide_x, axes, 0)
    rstd = (var + eps).scalar("rsqrt")
    if weight is not None and weight.dtype == x.dtype and (bias is None or bias.dtype == x.dtype):
        y = Value(_ops.layer_norm(x.t, weight.t, None if bias is None else bias.t, axis, eps))
    else:
        y = (wide_x - mean) * rstd
        y = y if weight is None else y * weight.cast(y.dtype)
        y = y if bias is None else y + bias.cast(y.dtype)
    return c.done(y), c.done(mean, 1), c.done(rstd, 2)


@op("native_layer_norm_backward")
def _layer_norm_backward(
    c: Call,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    if x.size == 0:
        raise Unsupported("layer normalisation of an empty tensor")
    axis = x.ndim - len(shape)
    inner, outer = list(range(axis, x.ndim)), list(range(axis))
    dtype = wide(x.dtype)
    g, x, m, r = c.to(dtype, grad, x, mean, rstd)
    normal = (x - m) * r
    scaled = g if weight is None else g * weight.cast(dtype)
    made: list[Value | None] = [None, None, None]
    if mask[0]:
        first = scaled.mean(inner, True)
        second = (scaled * normal).mean(inner, True)
        made[0] = c.done((scaled - first - normal * second) * r, 0)
    if mask[1] and weight is not None:
        made[1] = c.done((g * normal).sum(outer).reshape(shape), 1)
    if mask[2] and bias is not None:
        made[2] = c.done(g.sum(outer).reshape(shape), 2)
    return tuple(made)


@op("halcyon::layer_norm_grad")
def _layer_norm_grad(
    c: Call, grad: Value, x: Value, shape: Sequence[int], weight: Value, eps: float
) -> tuple[Value, Value, Value]:
    axis = x.ndim - len(shape)
    flat = Value(_ops.layer_norm_grad(x.t, weight.t, grad.t, axis, eps))
    at, made = 0, []
    for t in (x, weight, weight):
        made.append(flat.slice(0, at, t.size).reshape(t.shape))
        at += t.size
    return made[0], made[1], made[2]


@op("_fused_rms_norm")
def _rms_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None
) -> tuple[Value, Value]:
    if x.size == 0:
        raise Unsupported("normalisation of an empty tensor")
    axes = range(x.ndim - len(shape), x.ndim)
    dtype = wide(x.dtype)
    limits = {"f16": 0.0009765625, "bf16": 0.0078125, "f32": 2.0**-23, "f64": 2.0**-52}
    small = limits[dtype] if eps is None else eps
    wide_x = x.cast(dtype)
    rstd = ((wide_x * wide_x).mean(axes, True) + small).scalar("rsqrt")
    y = wide_x * rstd
    y = y if weight is None else y * weight.cast(dtype)
    return c.done(y), c.done(rstd, 1)


def _per_channel(x: Value, v: Value) -> Value:
    return v.reshape([1, v.size, *[1] * (x.ndim - 2)])


@op("_native_batch_norm_legit_no_training")
def _batch_norm_inference(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value]:
    dtype = wide(x.dtype)
    n = x.shape[1]
    w = c.full([n], 1, dtype) if weight is None else weight.cast(dtype)
    b = c.full([n], 0, dtype) if bias is None else bias.cast(dtype)
    m, v = mean.cast(dtype), var.cast(dtype)
    if x.size and x.ndim > 2:
        y = Value(_ops.batch_norm(x.cast(dtype).t, w.t, b.t, m.t, v.t, eps))
    else:
        scale = (v + eps).scalar("rsqrt") * w
        y = (x.cast(dtype) - _per_channel(x, m)) * _per_channel(x, scale) + _per_channel(x, b)
    empty = c.full(c.shape(1), 0, c.dtype(1))
    return c.done(y), empty, c.full(c.shape(2), 0, c.dtype(2))


@op("_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats")
def _batch_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    *rest: Any,
) -> tuple[Value, ...]:
    functional = "functional" in str(c.node.target)
    running_mean, running_var = (rest[0], rest[1]) if functional else (None, None)
    training, momentum, eps = rest[-3:]
    if x.size == 0:
        raise Unsupported("batch normalisation of an empty tensor")
    dtype = wide(x.dtype)
    wide_x = x.cast(dtype)
    axes = [0, *range(2, x.ndim)]
    if not training:
        if not isinstance(running_mean, Value) or not isinstance(running_var, Value):
            raise Unsupported("batch normalisation without statistics")
        scale = (running_var.cast(dtype) + float(eps or 0)).scalar("rsqrt")
        y = (wide_x - _per_channel(x, running_mean.cast(dtype))) * _per_channel(x, scale)
        y = y if weight is None else y * _per_channel(x, weight.cast(dtype))
        y = y if bias is None else y + _per_channel(x, bias.cast(dtype))
        empty = [c.full(c.shape(k), 0, c.dtype(k)) for k in (1, 2)]
        return c.done(y), *empty, running_mean, running_var
    var, mean = moments(wide_x, axes, 0)
    rstd = (var + float(eps or 0)).scalar("rsqrt")
    y = (wide_x - mean) * rstd
    y = y if weight is None else y * _per_channel(x, weight.cast(dtype))
    y = y if bias is None else y + _per_channel(x, bias.cast(dtype))
    made = [c.done(y), c.done(mean.reshape([mean.size]), 1), c.done(rstd.reshape([rstd.size]), 2)]
    if not functional:
        return tuple(made)
    count = x.size // max(x.shape[1], 1)
    share = float(momentum or 0)
    for i, (old, new) in enumerate(((running_mean, mean), (running_var, var))):
        if not isinstance(old, Value):
            raise Unsupported("batch normalisation without running statistics")
        flat = new.reshape([new.size]).cast(wide(old.dtype))
        if i == 1:
            flat = flat * (count / max(count - 1, 1))
        made.append(c.done(old.cast(flat.dtype) * (1 - share) + flat * share, 3 + i))
    return tuple(made)


@op("native_group_norm")
def _group_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    batch: int,
    channels: int,
    inner: int,
    groups: int,
    eps: float,
) -> tuple[Value, Value, Value]:
    if x.size == 0:
        raise Unsupported("normalisation of an empty tensor")
    dtype = wide(x.dtype)
    flat = x.cast(dtype).reshape([batch, groups, channels // groups * inner])
    var, mean = moments(flat, [2], 0)
    rstd = (var + eps).scalar("rsqrt")
    y = ((flat - mean) * rstd).reshape(x.shape)
    y = y if weight is None else y * _per_channel(x, weight.cast(dtype))
    y = y if bias is None else y + _per_channel(x, bias.cast(dtype))
    return c.done(y), c.done(mean.squeeze(2), 1), c.done(rstd.squeeze(2), 2)


# Pools.


class Pool:
    """The attributes of a pool over the last axes, with the padding that rounding up needs."""

    __slots__ = ("dilation", "high", "kernel", "low", "n", "stride", "x")

    def __init__(
        self,
        x: Value,
        out: Sequence[int],
        n: int,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int] = (1,),
    ) -> None:
        if x.size == 0:
            raise Unsupported("a pool of an empty tensor")
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
    pool = Pool(x, c.shape(), n, kernel, stride, padding, dilation)
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
def _max_pool_grad(
    c: Call,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Value:
    pool = Pool(x, grad.shape, 2, kernel, stride, padding, dilation)
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
    c: Call,
    n: int,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    if not is_float(x.dtype):
        raise Unsupported("an average pool of integers")
    out = c.shape()
    pool = Pool(x, out, n, kernel, stride, padding)
    own = pool.cropped(x.cast(c.math()))
    kind, factor = _average(pool, own, out[-n:], count_include_pad, divisor_override)
    y = Value(_ops.pool(own.t, kind, *pool.native))
    return c.done((y if factor is None else y * factor).reshape(out))


def _avg_pool_backward(
    c: Call,
    n: int,
    grad: Value,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Value:
    pool = Pool(x, grad.shape, n, kernel, stride, padding)
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


def _windows(like: Value, size: int, count: int) -> Value:
    """The share that each of `size` elements has in each of `count` windows of an adaptive pool."""
    out, place = like.iota("i64", [count, size], 0), like.iota("i64", [count, size], 1)
    start = out * size / count
    end = ((out + 1) * size + (count - 1)) / count
    inside = (place >= start) & (place < end)
    return inside.cast(like.dtype) / (end - start).cast(like.dtype)


def _along(x: Value, axis: int, matrix: Value) -> Value:
    """Multiplies a matrix by each line along an axis."""
    last = x.ndim - 1
    return x.transpose(axis, last).matmul(matrix.transpose(0, 1)).transpose(axis, last)


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
        y = _along(y, axis, _windows(y, x.shape[axis], out[axis]))
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
            g = _along(g, axis, _windows(g, x.shape[axis], grad.shape[axis]).transpose(0, 1))
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
        longest = max(-(-(i + 1) * size_k // count) - i * size_k // count for i in range(count))
        start = x.iota("i64", [count, longest], 0) * size_k / count
        end = ((x.iota("i64", [count, longest], 0) + 1) * size_k + (count - 1)) / count
        row = start + x.iota("i64", [count, longest], 1)
        y = y.take(row.min(size_k - 1), lead + 2 * k)
        shape = [1] * (2 * n)
        shape[2 * k : 2 * k + 2] = [count, longest]
        valid, row = (row < end).reshape(shape), row.min(size_k - 1).reshape(shape)
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
