"""Element-wise functions of one operand.

Float results that are smaller than the smallest normal number may be zero, as the standard allows.
"""

from __future__ import annotations

import math

from halcyon._errors import DTypeError
from halcyon.array._core import (
    BOOLS,
    FLOATS,
    INTS_AND_BOOL,
    NUMBERS,
    Array,
    Tensor,
    as_array,
    cast,
    check_kind,
    literal,
    ops,
    select,
    true_like,
    wrap,
)
from halcyon.array._dtypes import BY_NAME, BY_NATIVE, finfo

__all__ = [
    "abs",
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "bitwise_invert",
    "ceil",
    "conj",
    "cos",
    "cosh",
    "exp",
    "expm1",
    "floor",
    "imag",
    "isfinite",
    "isinf",
    "isnan",
    "log",
    "log1p",
    "log2",
    "log10",
    "logical_not",
    "negative",
    "positive",
    "real",
    "reciprocal",
    "round",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "trunc",
]


def _apply(op: str, name: str, x: Array, kinds: str = FLOATS) -> Array:
    """A native operation on one operand."""
    check_kind(name, as_array(name, x), kinds)
    return wrap(ops.scalar(op, (x._tensor,)))


def _rounded(op: str, name: str, x: Array) -> Array:
    """A rounding of floats. Integers are whole already."""
    check_kind(name, as_array(name, x), NUMBERS)
    return wrap(ops.scalar(op, (x._tensor,)) if x._dtype.kind == "f" else x._tensor)


def abs(x: Array, /) -> Array:
    """The magnitude of each number. The magnitude of the smallest signed integer wraps to itself."""
    return _apply("abs", "abs", x, NUMBERS)


def acos(x: Array, /) -> Array:
    """The arccosine in radians, from 0 to π."""
    return _apply("acos", "acos", x)


def acosh(x: Array, /) -> Array:
    """The inverse hyperbolic cosine."""
    check_kind("acosh", as_array("acosh", x), FLOATS)
    t = x._tensor
    if x._dtype.bits < 64:
        return wrap(ops.scalar("acosh", (t,)))
    # Near 1 the native formula loses digits in float64: acosh(1 + d) is log1p(d + √(d (d + 2))).
    d = ops.scalar("sub", (t, literal(t, 1.0)))
    root = ops.scalar("sqrt", (ops.scalar("mul", (d, ops.scalar("add", (d, literal(t, 2.0))))),))
    near = ops.scalar("log1p", (ops.scalar("add", (d, root)),))
    inside = [ops.scalar(op, (t, literal(t, end))) for op, end in (("ge", 1.0), ("lt", 2.0))]
    is_near = ops.scalar("and", inside)
    return wrap(select(is_near, near, ops.scalar("acosh", (t,))))


def asin(x: Array, /) -> Array:
    """The arcsine in radians, from -π/2 to π/2."""
    return _apply("asin", "asin", x)


def asinh(x: Array, /) -> Array:
    """The inverse hyperbolic sine."""
    return _apply("asinh", "asinh", x)


def atan(x: Array, /) -> Array:
    """The arctangent in radians, from -π/2 to π/2."""
    return _apply("atan", "atan", x)


def atanh(x: Array, /) -> Array:
    """The inverse hyperbolic tangent."""
    return _apply("atanh", "atanh", x)


def bitwise_invert(x: Array, /) -> Array:
    """The complement of each bit of integers, or the negation of bools."""
    return _apply("not", "bitwise_invert", x, INTS_AND_BOOL)


def ceil(x: Array, /) -> Array:
    """Rounds up to a whole number."""
    return _rounded("ceil", "ceil", x)


def conj(x: Array, /) -> Array:
    """The complex conjugate, which is the array itself, because Halcyon has no complex types."""
    check_kind("conj", as_array("conj", x), NUMBERS)
    return wrap(x._tensor)


def cos(x: Array, /) -> Array:
    """The cosine of an angle in radians."""
    return _apply("cos", "cos", x)


def cosh(x: Array, /) -> Array:
    """The hyperbolic cosine."""
    return _apply("cosh", "cosh", x)


def exp(x: Array, /) -> Array:
    """The exponential function."""
    return _apply("exp", "exp", x)


def expm1(x: Array, /) -> Array:
    """The exponential function less 1, accurate near 0."""
    return _apply("expm1", "expm1", x)


def floor(x: Array, /) -> Array:
    """Rounds down to a whole number."""
    return _rounded("floor", "floor", x)


def imag(x: Array, /) -> Array:
    """Raises an error: only complex arrays have an imaginary part, and Halcyon has no complex types."""
    as_array("imag", x)
    raise DTypeError(f"imag takes complex numbers, and the element type is {x._dtype}")


def isfinite(x: Array, /) -> Array:
    """Whether each number is neither infinite nor NaN."""
    check_kind("isfinite", as_array("isfinite", x), NUMBERS)
    if x._dtype.kind != "f":
        return true_like(x, True)
    # The comparison is false for NaN too.
    size = ops.scalar("abs", (x._tensor,))
    return wrap(ops.scalar("lt", (size, literal(size, math.inf))))


def isinf(x: Array, /) -> Array:
    """Whether each number is infinite."""
    check_kind("isinf", as_array("isinf", x), NUMBERS)
    return _apply("isinf", "isinf", x) if x._dtype.kind == "f" else true_like(x, False)


def isnan(x: Array, /) -> Array:
    """Whether each number is NaN."""
    check_kind("isnan", as_array("isnan", x), NUMBERS)
    return _apply("isnan", "isnan", x) if x._dtype.kind == "f" else true_like(x, False)


def log(x: Array, /) -> Array:
    """The natural logarithm."""
    return _apply("log", "log", x)


def log1p(x: Array, /) -> Array:
    """The natural logarithm of 1 plus each number, accurate near 0."""
    return _apply("log1p", "log1p", x)


def log2(x: Array, /) -> Array:
    """The logarithm to base 2."""
    return _apply("log2", "log2", x)


def log10(x: Array, /) -> Array:
    """The logarithm to base 10."""
    check_kind("log10", as_array("log10", x), FLOATS)
    t = wide(x)
    natural, factor = ops.scalar("log", (t,)), literal(t, 1.0 / math.log(10.0))
    y = ops.scalar("mul", (natural, factor))
    # The product may miss a whole number by its rounding, so that log10(1000) would not be 3.
    whole = ops.scalar("round", (y,))
    distance = ops.scalar("abs", (ops.scalar("sub", (y, whole)),))
    two_units = 2.0 * finfo(BY_NATIVE[t.dtype]).eps
    least = ops.scalar("mul", (ops.scalar("abs", (whole,)), literal(t, two_units)))
    # Rounding has no gradient. The whole number plus zero has that of the product.
    zero = ops.scalar("sub", (natural, ops.stop_gradient(natural)))
    whole = ops.scalar("add", (whole, ops.scalar("mul", (zero, factor))))
    return narrow(select(ops.scalar("le", (distance, least)), whole, y), x)


def logical_not(x: Array, /) -> Array:
    """The negation of bools."""
    return _apply("not", "logical_not", x, BOOLS)


def negative(x: Array, /) -> Array:
    """The negative of each number. Integers wrap."""
    return _apply("neg", "negative", x, NUMBERS)


def positive(x: Array, /) -> Array:
    """The numbers themselves."""
    check_kind("positive", as_array("positive", x), NUMBERS)
    return wrap(x._tensor)


def real(x: Array, /) -> Array:
    """The real part, which is the array itself, because Halcyon has no complex types."""
    check_kind("real", as_array("real", x), NUMBERS)
    return wrap(x._tensor)


def reciprocal(x: Array, /) -> Array:
    """1 divided by each number."""
    return _apply("recip", "reciprocal", x)


def round(x: Array, /) -> Array:
    """Rounds to the nearest whole number, halves to the even one."""
    return _rounded("round", "round", x)


def sign(x: Array, /) -> Array:
    """-1, 0 or 1 for each number; NaN for NaN."""
    return _apply("sign", "sign", x, NUMBERS)


def signbit(x: Array, /) -> Array:
    """Whether the sign bit of each float is set, as it is for -0."""
    check_kind("signbit", as_array("signbit", x), FLOATS)
    return wrap(sign_is_set(x._tensor))


def sin(x: Array, /) -> Array:
    """The sine of an angle in radians."""
    return _apply("sin", "sin", x)


def sinh(x: Array, /) -> Array:
    """The hyperbolic sine."""
    return _apply("sinh", "sinh", x)


def sqrt(x: Array, /) -> Array:
    """The square root."""
    return _apply("sqrt", "sqrt", x)


def square(x: Array, /) -> Array:
    """Each number times itself."""
    check_kind("square", as_array("square", x), NUMBERS)
    return wrap(ops.scalar("mul", (x._tensor, x._tensor)))


def tan(x: Array, /) -> Array:
    """The tangent of an angle in radians."""
    return _apply("tan", "tan", x)


def tanh(x: Array, /) -> Array:
    """The hyperbolic tangent."""
    return _apply("tanh", "tanh", x)


def trunc(x: Array, /) -> Array:
    """Rounds towards zero to a whole number."""
    return _rounded("trunc", "trunc", x)


# What compositions share.


def wide(x: Array) -> Tensor:
    """The tensor of an array of floats, in float32 if it has 16 bits."""
    return cast(x, BY_NAME["float32"]) if x._dtype.bits == 16 else x._tensor


def narrow(t: Tensor, like: Array) -> Array:
    """A result as an array with the element type of an operand."""
    return wrap(t if t.dtype == like._dtype.native else ops.cast(t, like._dtype.native))


def bits_of(t: Tensor) -> Tensor:
    """The bits of floats as signed integers."""
    return ops.bitcast(t, f"i{BY_NATIVE[t.dtype].bits}")


def sign_is_set(t: Tensor) -> Tensor:
    """Whether the sign bits of floats are set."""
    bits = bits_of(t)
    return ops.scalar("lt", (bits, literal(bits, 0)))
