"""The functions ``all``, ``any`` and ``diff``."""

from __future__ import annotations

import builtins

from halcyon._errors import ArgumentError
from halcyon.array._core import (
    ALL,
    BOOLS,
    NUMBERS,
    Array,
    Tensor,
    as_array,
    axes_of,
    axis_of,
    check_kind,
    ops,
    wrap,
)
from halcyon.array._statistical import Axes

__all__ = ["all", "any", "diff"]


def truth(x: Array) -> Tensor:
    """Whether elements are true or not zero. NaN is not zero."""
    return x._tensor if x._dtype.kind in BOOLS else ops.cast(x._tensor, "bool")


def all(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """Whether all elements over axes are true or not zero."""
    check_kind("all", as_array("all", x), ALL)
    return wrap(ops.reduce(truth(x), "min", axes_of("all", axis, x.ndim), keepdims))


def any(x: Array, /, *, axis: Axes = None, keepdims: builtins.bool = False) -> Array:
    """Whether any element over axes is true or not zero."""
    check_kind("any", as_array("any", x), ALL)
    return wrap(ops.reduce(truth(x), "max", axes_of("any", axis, x.ndim), keepdims))


def diff(
    x: Array, /, *, axis: int = -1, n: int = 1, prepend: Array | None = None, append: Array | None = None
) -> Array:
    """The differences of neighbours along an axis, taken ``n`` times, after joining arrays at the ends."""
    check_kind("diff", as_array("diff", x), NUMBERS)
    at = axis_of("diff", axis, x.ndim)
    if n < 0:
        raise ArgumentError(f"diff: differences cannot be taken {n} times")
    parts = [p for p in (prepend, x, append) if p is not None]
    t = (_manipulation.concat(parts, axis=at) if len(parts) > 1 else x)._tensor
    for _ in range(n):
        size = t.shape[at]
        if not size:
            break
        t = ops.scalar("sub", (ops.narrow(t, at, 1, size - 1), ops.narrow(t, at, 0, size - 1)))
    return wrap(t)


# This module imports the class.
from halcyon.array import _manipulation  # noqa: E402
