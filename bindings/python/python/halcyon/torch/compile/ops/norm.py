"""Normalisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halcyon import _native
from halcyon.torch.compile.dtypes import wide
from halcyon.torch.compile.ops.reduce import moments
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []

_ops = _native.ops


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
    c: Call, grad: Value, x: Value, shape: Sequence[int], mean: Value, rstd: Value, *rest: Any
) -> tuple[Value | None, ...]:
    weight, bias, mask = rest
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
    c: Call, x: Value, weight: Value | None, bias: Value | None, *rest: Any
) -> tuple[Value, Value, Value]:
    mean, var, _, eps = rest
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
    c: Call, x: Value, weight: Value | None, bias: Value | None, *rest: Any
) -> tuple[Value, Value, Value]:
    batch, channels, inner, groups, eps = rest
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
