"""Reductions to statistics, and cumulative sums and products."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import TypeAlias

from halcyon._errors import DTypeError, ShapeError
from halcyon.array._core import (
    FLOATS,
    NUMBERS,
    Array,
    Tensor,
    as_array,
    axes_of,
    axis_of,
    cast,
    check_kind,
    full,
    literal,
    ops,
    wrap,
)
from halcyon.array._dtypes import BY_NAME, DEFAULT_INT, DType, check_dtype

__all__ = ["cumulative_prod", "cumulative_sum", "max", "mean", "min", "prod", "std", "sum", "var"]

Axes: TypeAlias = int | Sequence[int] | None
"""One axis, several axes, or None for all."""


def _summed(x: Array, dtype: DType | None) -> Tensor:
    """The operand of a sum or product, as the element type of the result.

    Without a type it is the default type of the operand's kind, or the operand's own, if that is wider.
    """
    own = x._dtype
    if dtype is not None:
        return cast(x, check_dtype(dtype))
    if own.kind == "i":
        return cast(x, DEFAULT_INT)
    if own.kind == "u":
        return cast(x, BY_NAME["uint64"])
    return x._tensor


def _reduce(op: str, kind: str, x: Array, t: Tensor, axis: Axes, keepdims: builtins.bool) -> Array:
    return wrap(ops.reduce(t, kind, axes_of(op, axis, x.ndim), keepdims))


def sum(
    x: Array, /, *, axis: Axes = None, dtype: DType | None = None, keepdims: builtins.bool = False
) -> Array:
    """The sum over axes. Integers are summed in 64 bits, 16-bit floats in float32."""
    check_kind("sum", as_array("sum", x), NUMBERS)
    return _reduce("sum", "sum", x, _summed(x, dtype), axis, keepdims)


def prod(
    x: Array, /, *, axis: Axes = None, dtype: DType | None = None, keepdims: builtins.bool = False
) -> Array:
    """The product over axes. Integers are multiplied in 64 bits."""
    check_kind("prod", as_array("prod", x), NUMBERS)
    return _reduce("prod", "prod", x, _summed(x, dtype), axis, keepdims)


def _extreme(op: str, x: Array, axis: Axes, keepdims: builtins.bool) -> Array:
    check_kind(op, as_array(op, x), NUMBERS)
    shape = x.shape
    axes = axes_of(op, axis, len(shape))
    if any(shape[a] == 0 for a in axes):
        raise ShapeError(f"{op}: the array of the shape {shape} has no elements along the axes {axes}")
    return wrap(ops.reduce(x._tensor, op, axes, keepdims))


def max(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """The largest number over axes; NaN if any is NaN."""
    return _extreme("max", x, axis, keepdims)


def min(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """The smallest number over axes; NaN if any is NaN."""
    return _extreme("min", x, axis, keepdims)


def mean(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """The mean over axes; NaN if there are no elements."""
    check_kind("mean", as_array("mean", x), FLOATS)
    return wrap(ops.mean(x._tensor, axes_of("mean", axis, x.ndim), keepdims))


def var(x: Array, /, *, axis: Axes = None, correction: float = 0.0, keepdims: builtins.bool = False) -> Array:
    """The variance over axes.

    It is the sum of squared distances from the mean over the number of elements less ``correction``.
    """
    return wrap(_variance("var", x, axis, correction, keepdims))


def std(x: Array, /, *, axis: Axes = None, correction: float = 0.0, keepdims: builtins.bool = False) -> Array:
    """The standard deviation over axes: the square root of the variance."""
    return wrap(ops.scalar("sqrt", (_variance("std", x, axis, correction, keepdims),)))


def _variance(op: str, x: Array, axis: Axes, correction: float, keepdims: builtins.bool) -> Tensor:
    check_kind(op, as_array(op, x), FLOATS)
    if isinstance(correction, builtins.bool) or not isinstance(correction, (int, float)):
        raise DTypeError(f"{op}: the correction is a number, not {correction!r}")
    shape = x.shape
    axes = axes_of(op, axis, len(shape))
    t = cast(x, BY_NAME["float32"]) if x._dtype.bits == 16 else x._tensor
    distance = ops.scalar("sub", (t, ops.mean(t, axes, True)))
    squares = ops.reduce(ops.scalar("mul", (distance, distance)), "sum", axes, keepdims)
    n = math.prod(shape[a] for a in axes) - correction
    out = ops.scalar("div", (squares, literal(t, float(n if n > 0 else 0))))
    return ops.cast(out, x._dtype.native) if x._dtype.bits == 16 else out


def cumulative_sum(
    x: Array,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: builtins.bool = False,
) -> Array:
    """The sums of the elements up to each place along an axis, after a 0 if ``include_initial``."""
    return _cumulative("cumulative_sum", "sum", x, axis, dtype, include_initial)


def cumulative_prod(
    x: Array,
    /,
    *,
    axis: int | None = None,
    dtype: DType | None = None,
    include_initial: builtins.bool = False,
) -> Array:
    """The products of the elements up to each place along an axis, after a 1 if ``include_initial``."""
    return _cumulative("cumulative_prod", "prod", x, axis, dtype, include_initial)


def _cumulative(
    op: str, kind: str, x: Array, axis: int | None, dtype: DType | None, include_initial: builtins.bool
) -> Array:
    check_kind(op, as_array(op, x), NUMBERS)
    if axis is None:
        if x.ndim != 1:
            raise ShapeError(f"{op} needs an axis, because the array has {x.ndim} axes")
        axis = 0
    at = axis_of(op, axis, x.ndim)
    t = ops.scan(_summed(x, dtype), kind, at)
    if include_initial:
        shape = list(t.shape)
        shape[at] = 1
        first = full(t.backend, shape, 0 if kind == "sum" else 1, wrap(t)._dtype)
        t = ops.concat((first, t), at)
    return wrap(t)
