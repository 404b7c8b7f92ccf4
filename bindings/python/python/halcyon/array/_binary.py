"""Element-wise functions of two or three operands."""

from __future__ import annotations

import math

from halcyon._errors import DTypeError
from halcyon.array._core import (
    ALL,
    BOOLS,
    FLOATS,
    INTEGERS,
    INTS_AND_BOOL,
    NUMBERS,
    Array,
    Operand,
    Tensor,
    as_array,
    broadcast_shapes,
    cast,
    check_kind,
    literal,
    ops,
    pair,
    scalar_array,
    select,
    wrap,
)
from halcyon.array._dtypes import BY_NATIVE, promote
from halcyon.array._unary import bits_of, sign_is_set

__all__ = [
    "add",
    "atan2",
    "bitwise_and",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "clip",
    "copysign",
    "divide",
    "equal",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "less",
    "less_equal",
    "logaddexp",
    "logical_and",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "nextafter",
    "not_equal",
    "pow",
    "remainder",
    "subtract",
    "where",
]


def add(x1: Operand, x2: Operand, /) -> Array:
    """The sum. Integers wrap."""
    return wrap(ops.scalar("add", pair("add", x1, x2, NUMBERS)))


def subtract(x1: Operand, x2: Operand, /) -> Array:
    """The difference. Integers wrap."""
    return wrap(ops.scalar("sub", pair("subtract", x1, x2, NUMBERS)))


def multiply(x1: Operand, x2: Operand, /) -> Array:
    """The product. Integers wrap."""
    return wrap(ops.scalar("mul", pair("multiply", x1, x2, NUMBERS)))


def divide(x1: Operand, x2: Operand, /) -> Array:
    """The quotient of floats."""
    return wrap(ops.scalar("div", pair("divide", x1, x2, FLOATS)))


def floor_divide(x1: Operand, x2: Operand, /) -> Array:
    """The quotient, rounded down.

    An integer divided by zero gives 0. With an infinite operand the result is ``floor(x1 / x2)``, as the
    standard prefers, so ``-1.0 // inf`` is -0, not -1 as in Python.
    """
    a, b = pair("floor_divide", x1, x2, NUMBERS)
    quotient = ops.scalar("div", (a, b))
    rest = ops.scalar("rem", (a, b))
    if BY_NATIVE[a.dtype].kind == "u":
        return wrap(quotient)
    zero, one = literal(a, 0), literal(a, 1)
    differs = ops.scalar("ne", (ops.scalar("lt", (rest, zero)), ops.scalar("lt", (b, zero))))
    is_above = ops.scalar("and", (ops.scalar("ne", (rest, zero)), differs))
    if BY_NATIVE[a.dtype].kind == "i":
        # The quotient was rounded towards zero.
        return wrap(select(is_above, ops.scalar("sub", (quotient, one)), quotient))
    # A rounded quotient may be a whole number that the exact one does not reach: 1 / 0.1. Without the
    # remainder, the division is exact but for the rounding of its result to a whole number.
    exact = ops.scalar("div", (ops.scalar("sub", (a, rest)), b))
    exact = select(is_above, ops.scalar("sub", (exact, one)), exact)
    whole = ops.scalar("floor", (exact,))
    half = literal(a, 0.5)
    is_below = ops.scalar("gt", (ops.scalar("sub", (exact, whole)), half))
    whole = select(is_below, ops.scalar("add", (whole, one)), whole)
    whole = select(ops.scalar("eq", (whole, zero)), _with_sign(zero, quotient), whole)
    inf = literal(a, math.inf)
    sizes = [ops.scalar("lt", (ops.scalar("abs", (t,)), inf)) for t in (a, b, quotient)]
    is_finite = ops.scalar("and", (ops.scalar("and", (sizes[0], sizes[1])), sizes[2]))
    return wrap(select(is_finite, whole, ops.scalar("floor", (quotient,))))


def remainder(x1: Operand, x2: Operand, /) -> Array:
    """The remainder of the quotient that is rounded down. It has the sign of the divisor.

    The remainder of an integer by zero is 0.
    """
    a, b = pair("remainder", x1, x2, NUMBERS)
    rest = ops.scalar("mod", (a, b))
    if BY_NATIVE[a.dtype].kind != "f":
        return wrap(rest)
    # A zero has the sign of the divisor. Its negative less zero has the gradient of the remainder.
    fixed = ops.stop_gradient(rest)
    turned = ops.scalar("sub", (ops.scalar("neg", (fixed,)), ops.scalar("sub", (fixed, rest))))
    differs = ops.scalar("ne", (sign_is_set(fixed), sign_is_set(b)))
    is_zero = ops.scalar("eq", (rest, literal(a, 0.0)))
    return wrap(select(ops.scalar("and", (is_zero, differs)), turned, rest))


def pow(x1: Operand, x2: Operand, /) -> Array:
    """The power. Integers wrap, and an integer to a negative power is 0, except for the bases 1 and -1."""
    return wrap(ops.scalar("pow", pair("pow", x1, x2, NUMBERS)))


def atan2(x1: Operand, x2: Operand, /) -> Array:
    """The angle in radians, from -π to π, of the point whose y is ``x1`` and whose x is ``x2``."""
    return wrap(ops.scalar("atan2", pair("atan2", x1, x2, FLOATS)))


def maximum(x1: Operand, x2: Operand, /) -> Array:
    """The larger number; NaN if either is NaN."""
    return wrap(ops.scalar("max", pair("maximum", x1, x2, NUMBERS)))


def minimum(x1: Operand, x2: Operand, /) -> Array:
    """The smaller number; NaN if either is NaN."""
    return wrap(ops.scalar("min", pair("minimum", x1, x2, NUMBERS)))


def equal(x1: Operand, x2: Operand, /) -> Array:
    """Whether the elements are equal."""
    return wrap(ops.scalar("eq", pair("equal", x1, x2, ALL)))


def not_equal(x1: Operand, x2: Operand, /) -> Array:
    """Whether the elements differ."""
    return wrap(ops.scalar("ne", pair("not_equal", x1, x2, ALL)))


def less(x1: Operand, x2: Operand, /) -> Array:
    """Whether numbers of ``x1`` are less than those of ``x2``."""
    return wrap(ops.scalar("lt", pair("less", x1, x2, NUMBERS)))


def less_equal(x1: Operand, x2: Operand, /) -> Array:
    """Whether numbers of ``x1`` are less than or equal to those of ``x2``."""
    return wrap(ops.scalar("le", pair("less_equal", x1, x2, NUMBERS)))


def greater(x1: Operand, x2: Operand, /) -> Array:
    """Whether numbers of ``x1`` are greater than those of ``x2``."""
    return wrap(ops.scalar("gt", pair("greater", x1, x2, NUMBERS)))


def greater_equal(x1: Operand, x2: Operand, /) -> Array:
    """Whether numbers of ``x1`` are greater than or equal to those of ``x2``."""
    return wrap(ops.scalar("ge", pair("greater_equal", x1, x2, NUMBERS)))


def logical_and(x1: Operand, x2: Operand, /) -> Array:
    """Whether both bools are true."""
    return wrap(ops.scalar("and", pair("logical_and", x1, x2, BOOLS)))


def logical_or(x1: Operand, x2: Operand, /) -> Array:
    """Whether either bool is true."""
    return wrap(ops.scalar("or", pair("logical_or", x1, x2, BOOLS)))


def logical_xor(x1: Operand, x2: Operand, /) -> Array:
    """Whether exactly one of the bools is true."""
    return wrap(ops.scalar("xor", pair("logical_xor", x1, x2, BOOLS)))


def bitwise_and(x1: Operand, x2: Operand, /) -> Array:
    """The bits that are set in both."""
    return wrap(ops.scalar("and", pair("bitwise_and", x1, x2, INTS_AND_BOOL)))


def bitwise_or(x1: Operand, x2: Operand, /) -> Array:
    """The bits that are set in either."""
    return wrap(ops.scalar("or", pair("bitwise_or", x1, x2, INTS_AND_BOOL)))


def bitwise_xor(x1: Operand, x2: Operand, /) -> Array:
    """The bits that are set in exactly one."""
    return wrap(ops.scalar("xor", pair("bitwise_xor", x1, x2, INTS_AND_BOOL)))


def bitwise_left_shift(x1: Operand, x2: Operand, /) -> Array:
    """The bits of ``x1``, moved left by ``x2`` places. Moving by all bits or more gives 0."""
    a, b = pair("bitwise_left_shift", x1, x2, INTEGERS)
    return wrap(_signed(ops.scalar("shl", (_unsigned(a), _unsigned(b))), a))


def bitwise_right_shift(x1: Operand, x2: Operand, /) -> Array:
    """The bits of ``x1``, moved right by ``x2`` places. The sign of signed integers is repeated."""
    a, b = pair("bitwise_right_shift", x1, x2, INTEGERS)
    if BY_NATIVE[a.dtype].kind == "u":
        return wrap(ops.scalar("shr", (a, b)))
    # A negative number is moved as the complement of its complement, which is not negative.
    is_negative = ops.scalar("lt", (a, literal(a, 0)))
    moved = select(is_negative, ops.scalar("not", (a,)), a)
    moved = _signed(ops.scalar("shr", (_unsigned(moved), _unsigned(b))), a)
    return wrap(select(is_negative, ops.scalar("not", (moved,)), moved))


def copysign(x1: Operand, x2: Operand, /) -> Array:
    """The magnitude of ``x1`` with the sign of ``x2``."""
    return wrap(_with_sign(*pair("copysign", x1, x2, FLOATS)))


def hypot(x1: Operand, x2: Operand, /) -> Array:
    """The square root of the sum of squares, without overflow on the way."""
    a, b, like = _wide_pair("hypot", x1, x2)
    a, b = ops.scalar("abs", (a,)), ops.scalar("abs", (b,))
    large, small = ops.scalar("max", (a, b)), ops.scalar("min", (a, b))
    zero, one, inf = literal(a, 0.0), literal(a, 1.0), literal(a, math.inf)
    ratio = ops.scalar("div", (small, select(ops.scalar("eq", (large, zero)), one, large)))
    root = ops.scalar("sqrt", (ops.scalar("add", (ops.scalar("mul", (ratio, ratio)), one)),))
    length = ops.scalar("mul", (large, root))
    # An infinite side makes the length infinite, even if the other one is NaN.
    is_inf = ops.scalar("or", (ops.scalar("eq", (a, inf)), ops.scalar("eq", (b, inf))))
    return _narrowed(select(is_inf, inf, length), like)


def logaddexp(x1: Operand, x2: Operand, /) -> Array:
    """The logarithm of the sum of the exponentials, without overflow on the way."""
    a, b, like = _wide_pair("logaddexp", x1, x2)
    # The distance of equal infinities would be NaN, and so would its gradient, but it means 0.
    same, zero = ops.scalar("eq", (a, b)), literal(a, 0.0)
    distance = ops.scalar("abs", (ops.scalar("sub", (select(same, zero, a), select(same, zero, b))),))
    rest = ops.scalar("log1p", (ops.scalar("exp", (ops.scalar("neg", (distance,)),)),))
    return _narrowed(ops.scalar("add", (ops.scalar("max", (a, b)), rest)), like)


def nextafter(x1: Operand, x2: Operand, /) -> Array:
    """The float next to ``x1`` in the direction of ``x2``."""
    a, b = pair("nextafter", x1, x2, FLOATS)
    bits = bits_of(a)
    zero, one = literal(bits, 0), literal(bits, 1)
    lowest = -(1 << (BY_NATIVE[a.dtype].bits - 1))
    # Floats of one sign are ordered as their bits are.
    is_negative = ops.scalar("lt", (bits, zero))
    grows = ops.scalar("ne", (ops.scalar("gt", (b, a)), is_negative))
    step = select(grows, one, literal(bits, -1))
    moved = ops.scalar("add", (bits, step))
    is_zero = ops.scalar("eq", (ops.scalar("and", (bits, literal(bits, -lowest - 1))), zero))
    least = select(sign_is_set(b), literal(bits, lowest + 1), one)
    moved = ops.bitcast(select(is_zero, least, moved), a.dtype)
    moved = select(ops.scalar("eq", (a, b)), b, moved)
    is_nan = ops.scalar("or", (ops.scalar("isnan", (a,)), ops.scalar("isnan", (b,))))
    return wrap(select(is_nan, literal(a, math.nan), moved))


def clip(x: Array, /, min: Operand | None = None, max: Operand | None = None) -> Array:
    """Limits numbers to the range from ``min`` to ``max``; the result is ``max`` where ``min > max``.

    The result has the element type of ``x``. A limit that is an array must promote to it. A Python integer
    out of the range of the type is the end of the range.
    """
    check_kind("clip", as_array("clip", x), NUMBERS)
    t = x._tensor
    for name, op, limit in (("min", "max", min), ("max", "min", max)):
        if limit is not None:
            t = ops.scalar(op, (t, _limit(x, name, limit)))
    return wrap(t)


def _limit(x: Array, name: str, limit: Operand) -> Tensor:
    """A limit with the element type of the array."""
    if isinstance(limit, Array):
        check_kind("clip", limit, NUMBERS)
        if promote("clip", x._dtype, limit._dtype) is not x._dtype:
            raise DTypeError(f"clip: {name} has the type {limit._dtype}, which does not fit {x._dtype}")
        return cast(limit, x._dtype)
    if isinstance(limit, int) and not isinstance(limit, bool) and x._dtype.kind in "iu":
        signed = x._dtype.kind == "i"
        low = -(1 << (x._dtype.bits - 1)) if signed else 0
        high = (1 << (x._dtype.bits - signed)) - 1
        limit = low if limit < low else high if limit > high else limit
    return scalar_array("clip", x, limit)._tensor


def where(condition: Array, x1: Operand, x2: Operand, /) -> Array:
    """Elements of ``x1`` where the condition is true, and of ``x2`` elsewhere."""
    check_kind("where", as_array("where", condition), BOOLS)
    a, b = pair("where", x1, x2, ALL)
    broadcast_shapes("where", (condition.shape, a.shape, b.shape))
    return wrap(select(condition._tensor, a, b))


# What the functions share.


def _with_sign(size: Tensor, sign: Tensor) -> Tensor:
    """The magnitude of one float with the sign of another one."""
    differs = ops.scalar("ne", (sign_is_set(size), sign_is_set(sign)))
    return select(differs, ops.scalar("neg", (size,)), size)


def _unsigned(t: Tensor) -> Tensor:
    d = BY_NATIVE[t.dtype]
    return t if d.kind == "u" else ops.bitcast(t, f"u{d.bits}")


def _signed(t: Tensor, like: Tensor) -> Tensor:
    return t if t.dtype == like.dtype else ops.bitcast(t, like.dtype)


def _wide_pair(op: str, x1: Operand, x2: Operand) -> tuple[Tensor, Tensor, str]:
    """Two floats, in float32 if they have 16 bits, and the name of their common type."""
    a, b = pair(op, x1, x2, FLOATS)
    like = a.dtype
    if BY_NATIVE[like].bits == 16:
        a, b = ops.cast(a, "f32"), ops.cast(b, "f32")
    return a, b, like


def _narrowed(t: Tensor, like: str) -> Array:
    return wrap(t if t.dtype == like else ops.cast(t, like))
