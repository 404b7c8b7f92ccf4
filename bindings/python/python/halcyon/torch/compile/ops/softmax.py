"""Softmax and its gradients."""

from __future__ import annotations

import math

from halcyon import _native
from halcyon.torch.compile.dtypes import wide
from halcyon.torch.compile.table import Call, op
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
