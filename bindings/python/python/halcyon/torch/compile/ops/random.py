"""Random numbers.

They come from the native generator. PyTorch's default generator gives its key at each call, so they follow
`torch.manual_seed`. The numbers differ from those of eager PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halcyon import _native
from halcyon.torch.compile.dtypes import is_float
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Value

__all__: list[str] = []

_ops = _native.ops


def uniform(c: Call, shape: Sequence[int]) -> Value:
    """Uniform numbers of f32 in [0, 1)."""
    low, high = c.random()
    return Value(_ops.rand_by_key(low.t, high.t, list(shape)))


def normal(c: Call, shape: Sequence[int]) -> Value:
    """Standard normal numbers of f32, by the method of Box and Muller (1958)."""
    radius = ((1.0 - uniform(c, shape)).scalar("log") * -2.0).scalar("sqrt")
    return radius * (uniform(c, shape) * (2 * math.pi)).scalar("cos")


def _in_unit(c: Call, u: Value) -> Value:
    """Rounded to the result's type, below 1."""
    dtype = c.dtype()
    if dtype in ("f16", "bf16"):
        step = 2.0 ** (11 if dtype == "f16" else 8)
        u = (u * step).scalar("floor") * (1 / step)
    return u.cast(dtype)


@op("rand", "rand_like")
def _rand(c: Call, *_: Any, **__: Any) -> Value:
    return _in_unit(c, uniform(c, c.shape()))


@op("randn", "randn_like")
def _randn(c: Call, *_: Any, **__: Any) -> Value:
    return normal(c, c.shape()).cast(c.dtype())


@op("randint", "randint_like")
def _randint(c: Call, *args: Any, **_: Any) -> Value:
    high = args[0] if "like" not in str(c.node.target) else args[1]
    return _integers(c, 0, high)


@op("randint.low", "randint_like.low_dtype")
def _randint_low(c: Call, *args: Any, **_: Any) -> Value:
    low, high = args[1:3] if "like" in str(c.node.target) else args[:2]
    return _integers(c, low, high)


def _integers(c: Call, low: int, high: int) -> Value:
    if high - low > 2**24:
        raise Unsupported("random integers from a range above 2^24")
    numbers = (uniform(c, c.shape()) * float(high - low)).scalar("floor").cast("i64")
    return (numbers.min(high - low - 1) + low).cast(c.dtype())


@op("bernoulli", "bernoulli.p")
def _bernoulli(c: Call, x: Value, p: float | None = None, **_: Any) -> Value:
    u = uniform(c, c.shape())
    return c.done(u < (x.cast("f32") if p is None else p))


@op("native_dropout")
def _dropout(c: Call, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False or p == 0:
        return x, c.full(c.shape(1), 1, "bool")
    kept = uniform(c, x.shape) >= p
    if p == 1:
        return c.full(x.shape, 0, x.dtype), c.full(c.shape(1), 0, "bool")
    wide = x.cast(c.math())
    return c.done(wide * kept.cast(wide.dtype) * (1 / (1 - p))), kept


@op("uniform")
def _uniform(c: Call, x: Value, low: Number = 0.0, high: Number = 1.0, **_: Any) -> Value:
    return c.done(uniform(c, x.shape) * float(high - low) + float(low))


@op("normal_functional")
def _normal(c: Call, x: Value, mean: Number = 0.0, std: Number = 1.0, **_: Any) -> Value:
    return c.done(normal(c, x.shape) * float(std) + float(mean))


@op("prims::normal")
def _prims_normal(c: Call, shape: Sequence[int], *, mean: Number, std: Number, **_: Any) -> Value:
    return c.done(normal(c, c.shape()) * float(std) + float(mean))


@op("exponential")
def _exponential(c: Call, x: Value, rate: Number = 1.0, **_: Any) -> Value:
    return c.done((1.0 - uniform(c, x.shape)).scalar("log") * (-1.0 / rate))


@op("randperm")
def _randperm(c: Call, n: int, **_: Any) -> Value:
    if n < 2 or not is_float("f32"):
        return c.full(c.shape(), 0, c.dtype())
    return uniform(c, [n]).argsort(0).cast(c.dtype())
