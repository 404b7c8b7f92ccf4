"""Products of matrices and vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halcyon._errors import ShapeError
from halcyon.array._core import NUMBERS, Array, as_array, axes_of, axis_of, broadcast_shapes, ops, pair, wrap

__all__ = ["matmul", "matrix_transpose", "tensordot", "vecdot"]


def matmul(x1: Array, x2: Array, /) -> Array:
    """The product of matrices. Other axes broadcast; an operand with one axis is a row or a column."""
    a, b = pair("matmul", as_array("matmul", x1), as_array("matmul", x2), NUMBERS)
    if not a.ndim or not b.ndim:
        raise ShapeError("matmul needs operands with at least one axis; multiply by a number with *")
    return wrap(ops.matmul(a, b))


def matrix_transpose(x: Array, /) -> Array:
    """The array with its last two axes swapped."""
    ndim = as_array("matrix_transpose", x).ndim
    if ndim < 2:
        raise ShapeError(f"matrix_transpose needs at least 2 axes, and the array has {ndim}")
    return wrap(ops.permute(x._tensor, [*range(ndim - 2), ndim - 1, ndim - 2]))


def tensordot(x1: Array, x2: Array, /, *, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """The sum of products over axes of both arrays.

    ``axes`` is the number of axes at the end of ``x1`` and at the start of ``x2``, or the axes of each.
    """
    a, b = pair("tensordot", as_array("tensordot", x1), as_array("tensordot", x2), NUMBERS)
    m, n = a.ndim, b.ndim
    if isinstance(axes, int):
        if not 0 <= axes <= min(m, n):
            raise ShapeError(f"tensordot: {axes} axes of arrays with {m} and {n} axes")
        left, right = list(range(m - axes, m)), list(range(axes))
    else:
        left, right = (axes_of("tensordot", tuple(k), d) for k, d in zip(axes, (m, n), strict=False))
    sizes = [a.shape[k] for k in left]
    if sizes != [b.shape[k] for k in right]:
        raise ShapeError(f"tensordot: the axes {left} of {a.shape} and {right} of {b.shape} differ in size")
    rows = [k for k in range(m) if k not in left]
    columns = [k for k in range(n) if k not in right]
    out = [a.shape[k] for k in rows] + [b.shape[k] for k in columns]
    k = math.prod(sizes)
    p = ops.reshape(ops.permute(a, [*rows, *left]), (math.prod(a.shape[i] for i in rows), k))
    q = ops.reshape(ops.permute(b, [*right, *columns]), (k, math.prod(b.shape[i] for i in columns)))
    return wrap(ops.reshape(ops.matmul(p, q), out))


def vecdot(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The sum of products along an axis; the other axes broadcast."""
    a, b = pair("vecdot", as_array("vecdot", x1), as_array("vecdot", x2), NUMBERS)
    if axis >= 0:
        # The axis counts from the end in both, so a positive one must mean the same axis.
        axis -= max(a.ndim, b.ndim)
    for t in (a, b):
        axis_of("vecdot", axis, t.ndim)
    if a.shape[axis] != b.shape[axis]:
        raise ShapeError(f"vecdot: the shapes {a.shape} and {b.shape} differ along axis {axis}")
    broadcast_shapes("vecdot", (a.shape, b.shape))
    return wrap(ops.reduce(ops.scalar("mul", (a, b)), "sum", [axis]))
