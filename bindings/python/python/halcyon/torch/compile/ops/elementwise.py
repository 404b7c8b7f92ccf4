"""Element-wise operations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from halcyon.torch.compile.dtypes import UNSIGNED, is_float, is_integer
from halcyon.torch.compile.table import Call, Unsupported, add, op
from halcyon.torch.compile.value import Number, Operand, Value, scalar

__all__: list[str] = []


# One operand, computed as a float.

_FLOAT = {
    "acos": "acos",
    "acosh": "acosh",
    "asin": "asin",
    "asinh": "asinh",
    "atan": "atan",
    "atanh": "atanh",
    "cos": "cos",
    "cosh": "cosh",
    "erf": "erf",
    "exp": "exp",
    "exp2": "exp2",
    "expm1": "expm1",
    "log": "log",
    "log1p": "log1p",
    "log2": "log2",
    "reciprocal": "recip",
    "rsqrt": "rsqrt",
    "sigmoid": "sigmoid",
    "silu": "silu",
    "sin": "sin",
    "sinh": "sinh",
    "sqrt": "sqrt",
    "tan": "tan",
    "tanh": "tanh",
}


def _float(native: str) -> Callable[[Call, Value], Value]:
    def row(c: Call, x: Value) -> Value:
        return c.done(x.cast(c.math()).scalar(native))

    return row


for _name, _native in _FLOAT.items():
    add(_name, _float(_native))


@op("log10")
def _log10(c: Call, x: Value) -> Value:
    return c.done(x.cast(c.math()).scalar("log") * (1 / math.log(10)))


@op("angle")
def _angle(c: Call, x: Value) -> Value:
    x = x.cast(c.math())
    return c.done(x.isnan().where(x, (x < 0).where(math.pi, x * 0.0)))


@op("gelu")
def _gelu(c: Call, x: Value, approximate: str = "none") -> Value:
    return c.done(x.cast(c.math()).scalar("gelu_tanh" if approximate == "tanh" else "gelu"))


# One operand of any type.


@op("neg")
def _neg(c: Call, x: Value) -> Value:
    return -x


@op("abs")
def _abs(c: Call, x: Value) -> Value:
    return x if x.dtype == "bool" else x.scalar("abs")


@op("sign", "sgn")
def _sign(c: Call, x: Value) -> Value:
    # Unlike the native sign, PyTorch's is 0 for NaN.
    if x.dtype == "bool":
        return x
    if not is_float(x.dtype):
        return x.scalar("sign")
    return (x > 0).cast(x.dtype) - (x < 0).cast(x.dtype)


@op("signbit")
def _signbit(c: Call, x: Value) -> Value:
    if is_float(x.dtype):
        bits = {"f16": "i16", "bf16": "i16", "f32": "i32", "f64": "i64"}[x.dtype]
        return x.bitcast(bits) < 0
    return x < 0 if x.dtype != "bool" else x.eq(x) & False


@op("bitwise_not")
def _bitwise_not(c: Call, x: Value) -> Value:
    return ~x


@op("logical_not")
def _logical_not(c: Call, x: Value) -> Value:
    return ~_truth(x)


def _truth(x: Value) -> Value:
    return x if x.dtype == "bool" else x.ne(0)


def _rounding(native: str) -> Callable[[Call, Value], Value]:
    def row(c: Call, x: Value) -> Value:
        return x.scalar(native) if is_float(x.dtype) else x

    return row


for _name in ("ceil", "floor", "round", "trunc"):
    add(_name, _rounding(_name))
    add(f"prims::{_name}", _rounding(_name))


@op("round.decimals")
def _round_decimals(c: Call, x: Value, *, decimals: int) -> Value:
    if not is_float(x.dtype):
        if decimals < 0:
            raise Unsupported("rounding integers to tens")
        return x
    scale = 10.0 ** abs(decimals)
    x = x.cast(c.math())
    if decimals >= 0:
        return c.done((x * scale).scalar("round") / scale)
    return c.done((x / scale).scalar("round") * scale)


@op("frac")
def _frac(c: Call, x: Value) -> Value:
    x = x.cast(c.math())
    return c.done(x - x.scalar("trunc"))


@op("relu")
def _relu(c: Call, x: Value) -> Value:
    return x if x.dtype in ("bool", "u8") else x.scalar("relu")


@op("isnan")
def _isnan(c: Call, x: Value) -> Value:
    return x.isnan()


@op("isinf")
def _isinf(c: Call, x: Value) -> Value:
    return x.scalar("abs").eq(math.inf) if is_float(x.dtype) else x.ne(x)


@op("isposinf")
def _isposinf(c: Call, x: Value) -> Value:
    return x.eq(math.inf) if is_float(x.dtype) else x.ne(x)


@op("isneginf")
def _isneginf(c: Call, x: Value) -> Value:
    return x.eq(-math.inf) if is_float(x.dtype) else x.ne(x)


@op("nan_to_num")
def _nan_to_num(
    c: Call, x: Value, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Value:
    if not is_float(x.dtype):
        return x
    limits = torch.finfo(c.meta().dtype)
    y = x.isnan().where(0.0 if nan is None else nan, x)
    y = x.eq(math.inf).where(limits.max if posinf is None else posinf, y)
    return x.eq(-math.inf).where(limits.min if neginf is None else neginf, y)


# Conversions and copies.


@op("_to_copy")
def _to_copy(c: Call, x: Value, **_: Any) -> Value:
    return c.done(x)


@op("prims::convert_element_type", "to.dtype")
def _convert(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return c.done(x)


@op("clone", "alias", "detach", "lift_fresh_copy", "lift_fresh", "contiguous", "view_copy.dtype")
def _same(c: Call, x: Value, *_: Any, **__: Any) -> Value:
    return x


@op("copy")
def _copy(c: Call, x: Value, source: Value, non_blocking: bool = False) -> Value:
    return c.spread(source)


@op("fill.Scalar", "fill.Tensor")
def _fill(c: Call, x: Value, value: Operand) -> Value:
    return c.spread(c.value(value, c.dtype()))


@op("view.dtype")
def _view_dtype(c: Call, x: Value, dtype: torch.dtype) -> Value:
    if c.shape() != x.shape:
        raise Unsupported("a view as a type of another size")
    if "bool" in (x.dtype, c.dtype()) and x.dtype != c.dtype():
        raise Unsupported("a view of bits as bool")
    return x if x.dtype == c.dtype() else x.bitcast(c.dtype())


# Arithmetic.


@op("add.Tensor", "add.Scalar", "prims::add")
def _add(c: Call, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    return _sum(c, a, b, alpha, "add")


@op("sub.Tensor", "sub.Scalar", "prims::sub")
def _sub(c: Call, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    return _sum(c, a, b, alpha, "sub")


@op("rsub.Tensor", "rsub.Scalar")
def _rsub(c: Call, a: Operand, b: Operand, alpha: Number = 1) -> Value:
    return _sum(c, b, a, alpha, "sub")


def _sum(c: Call, a: Operand, b: Operand, alpha: Number, name: str) -> Value:
    x, y = c.to(c.math(), a, b)
    if c.dtype() == "bool":
        return c.done(x | (y if alpha else y & False))
    return c.done(scalar(name, x, y if alpha == 1 else y * alpha))


@op("mul.Tensor", "mul.Scalar", "prims::mul")
def _mul(c: Call, a: Operand, b: Operand) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done(x & y if x.dtype == "bool" else x * y)


@op("div.Tensor", "div.Scalar", "true_divide.Tensor", "true_divide.Scalar", "prims::div")
def _div(c: Call, a: Operand, b: Operand) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done(x / y)


@op("div.Tensor_mode", "div.Scalar_mode")
def _div_mode(c: Call, a: Operand, b: Operand, rounding_mode: str | None = None) -> Value:
    x, y = c.to(c.math(), a, b)
    if rounding_mode is None:
        return c.done(x / y)
    if rounding_mode == "trunc":
        quotient = x / y
        return c.done(quotient.scalar("trunc") if is_float(x.dtype) else quotient)
    return c.done(_floor_divide(x, y))


@op("floor_divide", "floor_divide.Scalar")
def _floor_division(c: Call, a: Operand, b: Operand) -> Value:
    return c.done(_floor_divide(*c.to(c.math(), a, b)))


def _floor_divide(x: Value, y: Value) -> Value:
    """Division that rounds down. For floats it agrees with `remainder`, as PyTorch's does."""
    if not is_float(x.dtype):
        quotient = x / y
        rest = scalar("rem", x, y)
        below = rest.ne(0) & (rest < 0).ne(y < 0)
        return quotient - below.cast(x.dtype)
    quotient = x / y
    rest = scalar("rem", x, y)
    exact = (x - rest) / y
    below = rest.ne(0) & (rest < 0).ne(y < 0)
    exact = exact - below.cast(x.dtype)
    down = exact.scalar("floor")
    down = down + (exact - down > 0.5).cast(x.dtype)
    return y.eq(0).where(quotient, exact.eq(0).where(quotient * 0.0, down))


@op("fmod.Tensor", "fmod.Scalar")
def _fmod(c: Call, a: Operand, b: Operand) -> Value:
    return c.done(scalar("rem", *c.to(c.math(), a, b)))


@op("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor")
def _remainder(c: Call, a: Operand, b: Operand) -> Value:
    return c.done(scalar("mod", *c.to(c.math(), a, b)))


@op("pow.Tensor_Tensor", "pow.Tensor_Scalar", "pow.Scalar")
def _pow(c: Call, a: Operand, b: Operand) -> Value:
    if isinstance(a, Value) and not isinstance(b, Value):
        x = a.cast(c.math())
        if b == 1:
            return c.done(x)
        if b == 2:
            return c.done(x * x)
        if b == 3:
            return c.done(x * x * x)
        if c.is_float and b in (0.5, -0.5, -1.0, -2.0):
            if b == 0.5:
                return c.done(x.scalar("sqrt"))
            if b == -0.5:
                return c.done(1.0 / x.scalar("sqrt"))
            return c.done(1.0 / (x if b == -1.0 else x * x))
    x, y = c.to(c.math(), a, b)
    if x.dtype == "bool":
        return c.done(x | ~y)
    return c.done(scalar("pow", x, y))


@op("atan2")
def _atan2(c: Call, a: Operand, b: Operand) -> Value:
    return c.done(scalar("atan2", *c.to(c.math(), a, b)))


@op("copysign.Tensor", "copysign.Scalar")
def _copysign(c: Call, a: Operand, b: Operand) -> Value:
    x, y = c.to(c.math(), a, b)
    bits = "i64" if y.dtype == "f64" else "i32"
    size = x.scalar("abs")
    return c.done((y.bitcast(bits) < 0).where(-size, size))


@op("hypot")
def _hypot(c: Call, a: Value, b: Value) -> Value:
    x, y = (v.scalar("abs") for v in c.to(c.math(), a, b))
    large, small = x.max(y), x.min(y)
    # Scaled, so that squares do not overflow.
    ratio = small / large
    length = large * (ratio * ratio + 1.0).scalar("sqrt")
    length = large.eq(0.0).where(large, length)
    infinite = x.eq(math.inf) | y.eq(math.inf)
    return c.done(infinite.where(math.inf, length))


@op("maximum")
def _maximum(c: Call, a: Value, b: Value) -> Value:
    return c.done(scalar("max", *c.to(c.dtype(), a, b)))


@op("minimum")
def _minimum(c: Call, a: Value, b: Value) -> Value:
    return c.done(scalar("min", *c.to(c.dtype(), a, b)))


@op("fmax")
def _fmax(c: Call, a: Value, b: Value) -> Value:
    return _ignoring_nan(c, a, b, "max")


@op("fmin")
def _fmin(c: Call, a: Value, b: Value) -> Value:
    return _ignoring_nan(c, a, b, "min")


def _ignoring_nan(c: Call, a: Value, b: Value, name: str) -> Value:
    x, y = c.to(c.dtype(), a, b)
    best = scalar(name, x, y)
    if is_float(x.dtype):
        best = x.isnan().where(y, y.isnan().where(x, best))
    return c.done(best)


@op("clamp", "clamp.Tensor")
def _clamp(c: Call, x: Value, low: Operand | None = None, high: Operand | None = None) -> Value:
    return _clamped(c, x, low, high)


@op("clamp_min", "clamp_min.Tensor")
def _clamp_min(c: Call, x: Value, low: Operand) -> Value:
    return _clamped(c, x, low, None)


@op("clamp_max", "clamp_max.Tensor")
def _clamp_max(c: Call, x: Value, high: Operand) -> Value:
    return _clamped(c, x, None, high)


def _clamped(c: Call, x: Value, low: Operand | None, high: Operand | None) -> Value:
    x = x.cast(c.dtype())
    if low is not None:
        x = x.max(c.value(low, c.dtype()))
    if high is not None:
        x = x.min(c.value(high, c.dtype()))
    return c.done(x)


@op("addcmul")
def _addcmul(c: Call, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    x, a, b = c.to(c.math(), x, a, b)
    return c.done(x + a * b * value)


@op("prims::fma")
def _fma(c: Call, a: Value, b: Value, d: Value) -> Value:
    return c.done(scalar("fma", *c.to(c.math(), a, b, d)))


@op("addcdiv")
def _addcdiv(c: Call, x: Value, a: Value, b: Value, value: Number = 1) -> Value:
    x, a, b = c.to(c.math(), x, a, b)
    return c.done(x + a / b * value)


@op("lerp.Tensor", "lerp.Scalar")
def _lerp(c: Call, start: Value, end: Value, weight: Operand) -> Value:
    a, b, w = c.to(c.math(), start, end, weight)
    near = w.scalar("abs") < 0.5
    return c.done(near.where(a + w * (b - a), b - (b - a) * (1.0 - w)))


# Bits and truth values.


def _bits(native: str) -> Callable[[Call, Operand, Operand], Value]:
    def row(c: Call, a: Operand, b: Operand) -> Value:
        return c.done(scalar(native, *c.to(c.dtype(), a, b)))

    return row


for _name in ("and", "or", "xor"):
    for _overload in ("Tensor", "Scalar", "Scalar_Tensor"):
        add(f"bitwise_{_name}.{_overload}", _bits(_name))
        add(f"__{_name}__.{_overload}", _bits(_name))


def _shift(left: bool) -> Callable[[Call, Operand, Operand], Value]:
    def row(c: Call, a: Operand, b: Operand) -> Value:
        x, n = c.to(c.dtype(), a, b)
        if not is_integer(x.dtype):
            raise Unsupported(f"a shift of {x.dtype}")
        width = int(x.dtype[1:])
        inside = n < width if x.dtype.startswith("u") else (n >= 0) & (n < width)
        if left:
            return c.done(inside.where(x.shift("shl", n), 0))
        n = inside.where(n, width - 1)
        if x.dtype not in UNSIGNED:
            return c.done(x.shift("shr", n))
        # Of a negative number the complement is shifted, so that the sign stays.
        return c.done((x < 0).where(~(~x).shift("shr", n), x.shift("shr", n)))

    return row


for _overload in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor"):
    for _name, _is_left in (("left", True), ("right", False)):
        add(f"bitwise_{_name}_shift.{_overload}", _shift(_is_left))
        add(f"__{_name[0]}shift__.{_overload}", _shift(_is_left))


def _logical(native: str) -> Callable[[Call, Value, Value], Value]:
    def row(c: Call, a: Value, b: Value) -> Value:
        return c.done(scalar(native, _truth(a), _truth(b)))

    return row


for _name in ("and", "or", "xor"):
    add(f"logical_{_name}", _logical(_name))


def _comparison(native: str) -> Callable[[Call, Operand, Operand], Value]:
    def row(c: Call, a: Operand, b: Operand) -> Value:
        # Not widened: PyTorch rounds both to the common type first.
        x, y = c.to(c.name(c.promoted(*c.args()[:2])), a, b)
        return c.done(scalar(native, x, y))

    return row


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for _overload in ("Tensor", "Scalar"):
        add(f"{_name}.{_overload}", _comparison(_name))


@op("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def _where(c: Call, condition: Value, a: Operand, b: Operand) -> Value:
    x, y = c.to(c.dtype(), a, b)
    return c.done(_truth(condition).where(x, y))


@op("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(c: Call, x: Value, mask: Value, value: Operand) -> Value:
    return c.done(_truth(mask).where(c.value(value, c.dtype()), x.cast(c.dtype())))
