"""Linear algebra: the ``linalg`` extension of the standard.

Decompositions are computed on the host in float64, one matrix of the batch after the other, whatever device
the array is on. They are lazy like other functions, may be used in compiled functions, and have gradients.
A matrix that cannot be decomposed, such as a singular one in :func:`inv`, raises
:class:`halcyon.LinAlgError` when the result is read.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from halcyon._errors import ArgumentError, DTypeError, LinAlgError, ShapeError
from halcyon.array import _binary, _statistical, _unary, _utility
from halcyon.array._array import Array, wrap
from halcyon.array._core import (
    FLOATS,
    INDEX,
    NUMBERS,
    Tensor,
    as_array,
    axes_of,
    axis_of,
    broadcast_shapes,
    cast,
    check_kind,
    literal,
    one_of,
    ops,
    pair,
    scalar_array,
)
from halcyon.array._creation import eye
from halcyon.array._dtypes import BY_NAME, DType, finfo
from halcyon.array._linear import matmul, matrix_transpose, tensordot, vecdot

__all__ = [
    "EighResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
    "cholesky",
    "cross",
    "det",
    "diagonal",
    "eigh",
    "eigvalsh",
    "inv",
    "matmul",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "matrix_transpose",
    "outer",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
    "tensordot",
    "trace",
    "vecdot",
    "vector_norm",
]


class EighResult(NamedTuple):
    """The result of :func:`eigh`."""

    eigenvalues: Array
    eigenvectors: Array


class QRResult(NamedTuple):
    """The result of :func:`qr`."""

    Q: Array
    R: Array


class SlogdetResult(NamedTuple):
    """The result of :func:`slogdet`."""

    sign: Array
    logabsdet: Array


class SVDResult(NamedTuple):
    """The result of :func:`svd`."""

    U: Array
    S: Array
    Vh: Array


def _matrix(op: str, x: Array, kinds: str = FLOATS) -> tuple[int, int]:
    """Checks that an argument is a matrix or a batch of them. Returns the rows and columns."""
    check_kind(op, as_array(op, x), kinds)
    shape = x.shape
    if len(shape) < 2:
        raise LinAlgError(f"{op} takes matrices, and the array has {len(shape)} axes")
    return shape[-2], shape[-1]


def _decomposed(op: str, name: str, x: Array, square: builtins.bool = True) -> Tensor:
    """The joined result of a decomposition."""
    m, n = _matrix(op, x)
    if x._dtype.bits < 32:
        raise DTypeError(f"{op} takes float32 and float64, and the element type is {x._dtype}")
    if square and m != n:
        raise LinAlgError(f"{op} takes square matrices, and the array has the shape {x.shape}")
    return ops.linalg(name, (x._tensor,))


def _part(t: Tensor, start: int, *shape: int) -> Array:
    """A factor of a joined result."""
    last = t.ndim - 1
    part = ops.narrow(t, last, start, math.prod(shape))
    return wrap(ops.reshape(part, (*t.shape[:-1], *shape)))


def cholesky(x: Array, /, *, upper: builtins.bool = False) -> Array:
    """The lower triangular factor L of symmetric positive definite matrices ``L @ L.mT``, or its transpose.

    Only the lower triangle of ``x`` is read.
    """
    factor = wrap(_decomposed("cholesky", "cholesky", x))
    return matrix_transpose(factor) if upper else factor


def cross(x1: Array, x2: Array, /, *, axis: int = -1) -> Array:
    """The cross product of vectors of three numbers along an axis; the other axes broadcast."""
    a, b = pair("cross", as_array("cross", x1), as_array("cross", x2), NUMBERS)
    shape = broadcast_shapes("cross", (a.shape, b.shape))
    if not shape:
        raise ShapeError("cross takes arrays with at least one axis")
    at = axis_of("cross", axis, min(a.ndim, b.ndim))
    # The axis counts from the end in both.
    at -= min(a.ndim, b.ndim) if axis < 0 else max(a.ndim, b.ndim)
    for t in (a, b):
        axis_of("cross", at, t.ndim)
        if t.shape[at] != 3:
            raise ShapeError(f"cross: the shape {t.shape} does not have 3 elements along axis {axis}")
    a, b = ops.expand(a, shape), ops.expand(b, shape)

    def turned(t: Tensor, by: int) -> Tensor:
        """The elements along the axis, moved to the front by some places."""
        return ops.concat([ops.narrow(t, at, by, 3 - by), ops.narrow(t, at, 0, by)], at)

    first = ops.scalar("mul", (turned(a, 1), turned(b, 2)))
    second = ops.scalar("mul", (turned(a, 2), turned(b, 1)))
    return wrap(ops.scalar("sub", (first, second)))


def det(x: Array, /) -> Array:
    """The determinants of square matrices."""
    return wrap(_decomposed("det", "det", x))


def diagonal(x: Array, /, *, offset: int = 0) -> Array:
    """The elements on the diagonal ``offset`` places above the main one of matrices."""
    as_array("diagonal", x)
    shape = x.shape
    if len(shape) < 2:
        raise LinAlgError(f"diagonal takes matrices, and the array has {len(shape)} axes")
    m, n = shape[-2:]
    size = max(0, min(m, n - offset) if offset >= 0 else min(m + offset, n))
    flat = ops.reshape(x._tensor, (*shape[:-2], m * n))
    start = offset if offset >= 0 else -offset * n
    rank = len(shape) - 1
    starts, steps = [0] * rank, [1] * rank
    if size:
        starts[-1] = start
    if size > 1:
        steps[-1] = n + 1
    return wrap(ops.slice(flat, starts, steps, (*shape[:-2], size)))


def eigh(x: Array, /) -> EighResult:
    """The eigenvalues of symmetric matrices in ascending order, and the eigenvectors as columns.

    Only the lower triangle is read.
    """
    t = _decomposed("eigh", "eigh", x)
    n = x.shape[-1]
    return EighResult(_part(t, 0, n), _part(t, n, n, n))


def eigvalsh(x: Array, /) -> Array:
    """The eigenvalues of symmetric matrices in ascending order. Only the lower triangle is read."""
    return wrap(_decomposed("eigvalsh", "eigvalsh", x))


def inv(x: Array, /) -> Array:
    """The inverses of square matrices."""
    return wrap(_decomposed("inv", "inv", x))


Order: TypeAlias = int | float | Literal["fro", "nuc"] | None
"""The kind of a norm."""


def matrix_norm(x: Array, /, *, keepdims: builtins.bool = False, ord: Order = "fro") -> Array:
    """A norm of matrices.

    ``"fro"``: the root of the sum of squares; ``"nuc"``: the sum of singular values; 2 and -2: the largest
    and smallest singular value; 1 and -1: the largest and smallest sum of magnitudes of a column; ``inf``
    and ``-inf``: of a row.
    """
    _m, _n = _matrix("matrix_norm", x)
    one_of("matrix_norm", "ord", ord, ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf, None))
    if ord in ("fro", None):
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in ("nuc", 2, -2):
        s = svdvals(x)
        out = _statistical.sum(s, axis=-1) if ord == "nuc" else _extreme(s, ord == 2, -1)
    else:
        by_column = ord in (1, -1)
        sums = _statistical.sum(_unary.abs(x), axis=-2 if by_column else -1)
        out = _extreme(sums, ord in (1, math.inf), -1)
    return wrap(ops.reshape(out._tensor, (*x.shape[:-2], 1, 1))) if keepdims else out


def _extreme(x: Array, is_max: builtins.bool, axis: int) -> Array:
    return (_statistical.max if is_max else _statistical.min)(x, axis=axis)


def matrix_power(x: Array, n: int, /) -> Array:
    """Square matrices to an integer power; negative powers are those of the inverse."""
    rows, columns = _matrix("matrix_power", x)
    if rows != columns:
        raise LinAlgError(f"matrix_power takes square matrices, and the array has the shape {x.shape}")
    if isinstance(n, builtins.bool) or not isinstance(n, int):
        raise DTypeError(f"matrix_power: the power is an integer, not {n!r}")
    if n < 0:
        return matrix_power(inv(x), -n)
    out: Array | None = None
    power = x
    while n:
        if n & 1:
            out = power if out is None else matmul(out, power)
        n >>= 1
        if n:
            power = matmul(power, power)
    if out is not None:
        return wrap(out._tensor)
    one = eye(rows, dtype=x._dtype, device=x.device)
    return wrap(ops.expand(one._tensor, x.shape))


def _cutoff(op: str, x: Array, s: Array, rtol: float | Array | None) -> Array:
    """The size below which singular values count as zero, as one more axis of size 1."""
    least = _relative(op, x, rtol)
    largest = _statistical.max(s, axis=-1, keepdims=True)
    return _binary.multiply(largest, wrap(ops.reshape(least, (*least.shape, 1))))


def _relative(op: str, x: Array, rtol: float | Array | None) -> Tensor:
    """The part of the largest singular value up to which singular values count as zero."""
    if isinstance(rtol, Array):
        return cast(rtol, x._dtype)
    return scalar_array(op, x, max(x.shape[-2:]) * finfo(x._dtype).eps if rtol is None else rtol)._tensor


def matrix_rank(x: Array, /, *, rtol: float | Array | None = None) -> Array:
    """The number of singular values larger than ``rtol`` times the largest one.

    ``rtol`` is the epsilon of the element type times the larger side of the matrix, if it is not given.
    """
    m, n = _matrix("matrix_rank", x)
    if not m or not n:
        zero = ops.reduce(cast(x, INDEX), "sum", (x.ndim - 2, x.ndim - 1))
        return wrap(zero)
    s = svdvals(x)
    return _count(_binary.greater(s, _cutoff("matrix_rank", x, s, rtol)))


def _count(x: Array) -> Array:
    return wrap(ops.reduce(ops.cast(x._tensor, INDEX.native), "sum", (x.ndim - 1,)))


def outer(x1: Array, x2: Array, /) -> Array:
    """The products of each number of one vector with each number of another one."""
    a, b = pair("outer", as_array("outer", x1), as_array("outer", x2), NUMBERS)
    if a.ndim != 1 or b.ndim != 1:
        raise ShapeError(f"outer takes vectors, and the shapes are {a.shape} and {b.shape}")
    return wrap(ops.scalar("mul", (ops.reshape(a, (a.shape[0], 1)), b)))


def pinv(x: Array, /, *, rtol: float | Array | None = None) -> Array:
    """The pseudo-inverses of matrices. Singular values up to ``rtol`` times the largest one count as zero.

    ``rtol`` is the epsilon of the element type times the larger side of the matrix, if it is not given.
    """
    m, n = _matrix("pinv", x)
    if not m or not n:
        return matrix_transpose(x)
    if x._dtype.bits < 32:
        raise DTypeError(f"pinv takes float32 and float64, and the element type is {x._dtype}")
    least = _relative("pinv", x, rtol)
    batch = broadcast_shapes("pinv", (x.shape[:-2], least.shape))
    least = ops.expand(ops.reshape(least, (*least.shape, 1, 1)), (*batch, 1, 1))
    return wrap(ops.linalg("pinv", (ops.expand(x._tensor, (*batch, m, n)), least)))


def qr(x: Array, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """An orthonormal matrix Q and an upper triangular one R with ``Q @ R == x``.

    Q has as many columns as the smaller side of the matrix, or with ``"complete"`` as many as it has rows.
    """
    one_of("qr", "mode", mode, ("reduced", "complete"))
    complete = mode == "complete"
    t = _decomposed("qr", "qr_complete" if complete else "qr", x, square=False)
    m, n = x.shape[-2:]
    k = m if complete else min(m, n)
    return QRResult(_part(t, 0, m, k), _part(t, m * k, k, n))


def slogdet(x: Array, /) -> SlogdetResult:
    """The sign and the logarithm of the magnitude of the determinants of square matrices."""
    t = _decomposed("slogdet", "slogdet", x)
    return SlogdetResult(_part(t, 0), _part(t, 1))


def solve(x1: Array, x2: Array, /) -> Array:
    """The solutions X of ``x1 @ X == x2``. An array ``x2`` with one axis is a column."""
    _matrix("solve", x1)
    check_kind("solve", as_array("solve", x2), FLOATS)
    a, b = pair("solve", x1, x2, FLOATS)
    if a.dtype not in ("f32", "f64"):
        raise DTypeError(
            f"solve takes float32 and float64, and the element types are {x1._dtype} and {x2._dtype}"
        )
    rows, n = a.shape[-2:]
    if rows != n:
        raise LinAlgError(f"solve takes square matrices, and the array has the shape {a.shape}")
    is_vector = b.ndim == 1
    if is_vector:
        b = ops.reshape(b, (b.shape[0], 1))
    if b.ndim < 2 or b.shape[-2] != n:
        raise ShapeError(f"solve: the shapes {x1.shape} and {x2.shape} do not fit")
    batch = broadcast_shapes("solve", (a.shape[:-2], b.shape[:-2]))
    columns = b.shape[-1]
    t = ops.linalg("solve", (ops.expand(a, (*batch, n, n)), ops.expand(b, (*batch, n, columns))))
    return wrap(ops.reshape(t, t.shape[:-1]) if is_vector else t)


def svd(x: Array, /, *, full_matrices: builtins.bool = True) -> SVDResult:
    """The singular value decomposition ``(U * S) @ Vh`` with singular values in descending order.

    With ``full_matrices``, U and Vh are square; otherwise their inner side is the smaller side of the matrix.
    """
    t = _decomposed("svd", "svd_full" if full_matrices else "svd", x, square=False)
    m, n = x.shape[-2:]
    k = min(m, n)
    i, j = (m, n) if full_matrices else (k, k)
    return SVDResult(_part(t, 0, m, i), _part(t, m * i, k), _part(t, m * i + k, j, n))


def svdvals(x: Array, /) -> Array:
    """The singular values of matrices in descending order."""
    return wrap(_decomposed("svdvals", "svdvals", x, square=False))


def trace(x: Array, /, *, offset: int = 0, dtype: DType | None = None) -> Array:
    """The sums of the diagonals ``offset`` places above the main one of matrices."""
    _matrix("trace", x, NUMBERS)
    return _statistical.sum(diagonal(x, offset=offset), axis=-1, dtype=dtype)


def vector_norm(
    x: Array,
    /,
    *,
    axis: int | Sequence[int] | None = None,
    keepdims: builtins.bool = False,
    ord: float = 2,
) -> Array:
    """A norm of vectors along axes, or of all elements.

    It is the ``ord``-th root of the sum of magnitudes to the power of ``ord``. ``inf`` and ``-inf`` give the
    largest and smallest magnitude, and 0 the number of elements that are not zero.
    """
    check_kind("vector_norm", as_array("vector_norm", x), FLOATS)
    if isinstance(ord, builtins.bool) or not isinstance(ord, (int, float)):
        raise ArgumentError(f"vector_norm: ord is a number, not {ord!r}")
    axes = axes_of("vector_norm", axis, x.ndim)
    if math.isinf(ord):
        reduce = _statistical.max if ord > 0 else _statistical.min
        if ord > 0 and any(x.shape[a] == 0 for a in axes):
            return _statistical.sum(x, axis=axes, keepdims=keepdims)
        return reduce(_unary.abs(x), axis=axes, keepdims=keepdims)
    t = cast(x, BY_NAME["float32"]) if x._dtype.bits == 16 else x._tensor
    if ord == 0:
        ones = ops.cast(_utility.truth(x), t.dtype)
        out = ops.reduce(ones, "sum", axes, keepdims)
    elif ord == 2:
        out = ops.scalar("sqrt", (ops.reduce(ops.scalar("mul", (t, t)), "sum", axes, keepdims),))
    elif ord == 1:
        out = ops.reduce(ops.scalar("abs", (t,)), "sum", axes, keepdims)
    else:
        powers = ops.scalar("pow", (ops.scalar("abs", (t,)), literal(t, float(ord))))
        out = ops.reduce(powers, "sum", axes, keepdims)
        out = ops.scalar("pow", (out, literal(out, 1.0 / ord)))
    return wrap(out if out.dtype == x._dtype.native else ops.cast(out, x._dtype.native))
