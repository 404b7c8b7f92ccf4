"""Reductions over axes, statistics and running reductions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halcyon.torch.compile.dtypes import is_float, wide
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Value

__all__: list[str] = []


def axes_of(x: Value, dim: int | Sequence[int] | None, empty_is_all: bool = True) -> list[int]:
    """The axes that a reduction names; all, if it names none."""
    if dim is None:
        return list(range(x.ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    if not dims and empty_is_all:
        return list(range(x.ndim))
    return sorted({x.axis(d) for d in dims}) if x.ndim else []


@op("sum", "sum.dim_IntList")
def _sum(c: Call, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return c.done(x.cast(c.math()).sum(axes_of(x, dim), keepdim))


@op("prims::sum")
def _prims_sum(c: Call, x: Value, dims: Sequence[int] | None, **_: Any) -> Value:
    return c.done(x.cast(c.math()).sum(axes_of(x, dims, empty_is_all=False)))


@op("mean", "mean.dim")
def _mean(c: Call, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    x = x.cast(c.math())
    axes = axes_of(x, dim if not isinstance(dim, type(None)) else None)
    count = math.prod(x.shape[a] for a in axes)
    if count == 0:
        return c.full(c.shape(), math.nan, c.dtype())
    return c.done(x.mean(axes, keepdim))


@op("prod", "prod.dim_int")
def _prod(c: Call, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Value:
    return c.done(x.cast(c.math()).reduce("prod", axes_of(x, dim), keepdim))


@op("amax")
def _amax(c: Call, x: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    return x.reduce("max", axes_of(x, dim), keepdim)


@op("amin")
def _amin(c: Call, x: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Value:
    return x.reduce("min", axes_of(x, dim), keepdim)


@op("max")
def _max(c: Call, x: Value) -> Value:
    return x.reduce("max", range(x.ndim))


@op("min")
def _min(c: Call, x: Value) -> Value:
    return x.reduce("min", range(x.ndim))


@op("aminmax")
def _aminmax(c: Call, x: Value, *, dim: int | None = None, keepdim: bool = False) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    return x.reduce("min", axes, keepdim), x.reduce("max", axes, keepdim)


@op("any", "any.dim", "any.dims")
def _any(c: Call, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return c.done(_truth(x).reduce("max", axes_of(x, dim, empty_is_all=False), keepdim))


@op("all", "all.dim", "all.dims")
def _all(c: Call, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
    return c.done(_truth(x).reduce("min", axes_of(x, dim, empty_is_all=False), keepdim))


def _truth(x: Value) -> Value:
    return x if x.dtype == "bool" else x.ne(0)


def comparable(x: Value) -> Value:
    """The value in a type of the same order that comparing kernels take."""
    return x.cast("u8") if x.dtype == "bool" else x


def _arg(c: Call, x: Value, largest: bool, dim: int | None, keepdim: bool) -> Value:
    if x.ndim == 0:
        return c.full(c.shape(), 0, "i64")
    x = comparable(x)
    if dim is None:
        return x.reshape([x.size]).argreduce(largest, 0).reshape(c.shape())
    return x.argreduce(largest, x.axis(dim), keepdim)


@op("argmax")
def _argmax(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(c, x, True, dim, keepdim)


@op("argmin")
def _argmin(c: Call, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
    return _arg(c, x, False, dim, keepdim)


def _best(c: Call, x: Value, dim: int, keepdim: bool, largest: bool) -> tuple[Value, Value]:
    if x.ndim == 0:
        return x, c.full((), 0, "i64")
    axis = x.axis(dim)
    index = comparable(x).argreduce(largest, axis, True)
    value = x.reduce("max" if largest else "min", [axis], True)
    return (value, index) if keepdim else (value.squeeze(axis), index.squeeze(axis))


@op("max.dim")
def _max_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _best(c, x, dim, keepdim, True)


@op("min.dim")
def _min_dim(c: Call, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
    return _best(c, x, dim, keepdim, False)


def moments(x: Value, axes: Sequence[int], correction: Number) -> tuple[Value, Value]:
    """Variance and mean over axes, which stay as axes of size 1."""
    count = math.prod(x.shape[a] for a in axes)
    mean = x.mean(axes, True)
    centred = x - mean
    total = (centred * centred).sum(axes, True)
    rest = max(count - correction, 0)
    return (total / rest if rest else total / 0.0), mean


def _var(c: Call, x: Value, dim: Any, correction: Number | None, keepdim: bool) -> tuple[Value, Value]:
    axes = axes_of(x, dim)
    if 0 in (x.shape[a] for a in axes):
        raise Unsupported("the variance of no elements")
    var, mean = moments(x.cast(wide(x.dtype)), axes, 1 if correction is None else correction)
    if not keepdim:
        shape = [n for k, n in enumerate(x.shape) if k not in axes]
        var, mean = var.reshape(shape), mean.reshape(shape)
    return var, mean


@op("var.correction", "prims::var")
def _var_correction(
    c: Call, x: Value, dim: Any = None, correction: Number | None = None, keepdim: bool = False, **_: Any
) -> Value:
    return c.done(_var(c, x, dim, correction, keepdim)[0])


@op("std.correction")
def _std_correction(
    c: Call, x: Value, dim: Any = None, correction: Number | None = None, keepdim: bool = False
) -> Value:
    return c.done(_var(c, x, dim, correction, keepdim)[0].scalar("sqrt"))


@op("var_mean.correction")
def _var_mean(
    c: Call, x: Value, dim: Any = None, correction: Number | None = None, keepdim: bool = False
) -> tuple[Value, Value]:
    var, mean = _var(c, x, dim, correction, keepdim)
    return c.done(var, 0), c.done(mean, 1)


@op("logsumexp")
def _logsumexp(c: Call, x: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    x = x.cast(c.math())
    axes = axes_of(x, dim)
    if x.size == 0:
        raise Unsupported("logsumexp of no elements")
    return c.done(log_sum_exp(x, axes).reshape(c.shape()))


def log_sum_exp(x: Value, axes: Sequence[int]) -> Value:
    """The logarithm of the sum of exponentials over axes, which stay as axes of size 1."""
    top = x.reduce("max", axes, True)
    top = top.scalar("abs").eq(math.inf).where(0.0, top)
    return (x - top).scalar("exp").sum(axes, True).scalar("log") + top


@op("linalg_vector_norm")
def _vector_norm(
    c: Call, x: Value, ord: Number = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    axes = axes_of(x, dim)
    size = x.cast(c.math()).scalar("abs")
    if x.size == 0 and ord < 0:
        raise Unsupported("a norm of no elements")
    if ord == math.inf:
        made = size.reduce("max", axes, keepdim)
        return c.done(made.max(0.0))
    if ord == -math.inf:
        return c.done(size.reduce("min", axes, keepdim))
    if ord == 0:
        return c.done(size.ne(0.0).cast(size.dtype).sum(axes, keepdim))
    if ord == 1:
        return c.done(size.sum(axes, keepdim))
    if ord == 2:
        return c.done((size * size).sum(axes, keepdim).scalar("sqrt"))
    return c.done(size.scalar("pow", float(ord)).sum(axes, keepdim).scalar("pow", 1.0 / ord))


# Running reductions.


def _running(c: Call, x: Value, kind: str, dim: int) -> Value:
    x = x.cast(c.math())
    return c.done(x if x.ndim == 0 else x.scan(kind, x.axis(dim)))


@op("cumsum")
def _cumsum(c: Call, x: Value, dim: int, dtype: Any = None) -> Value:
    return _running(c, x, "sum", dim)


@op("cumprod")
def _cumprod(c: Call, x: Value, dim: int, dtype: Any = None) -> Value:
    return _running(c, x, "prod", dim)


def _running_best(c: Call, x: Value, dim: int, kind: str) -> tuple[Value, Value]:
    if x.ndim == 0:
        return x, c.full((), 0, "i64")
    axis = x.axis(dim)
    wide_x = comparable(x)
    best = wide_x.scan(kind, axis)
    # The last position so far whose element is the best one.
    same = wide_x.eq(best)
    if is_float(x.dtype):
        same = same | (wide_x.isnan() & best.isnan())
    at = same.where(x.iota("i64", x.shape, axis), -1)
    return best.cast(x.dtype), at.scan("max", axis)


@op("cummax")
def _cummax(c: Call, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_best(c, x, dim, "max")


@op("cummin")
def _cummin(c: Call, x: Value, dim: int) -> tuple[Value, Value]:
    return _running_best(c, x, dim, "min")
