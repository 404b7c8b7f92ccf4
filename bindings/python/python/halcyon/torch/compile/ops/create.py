"""New tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halcyon.torch.compile.dtypes import is_float
from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Operand, Value

__all__: list[str] = []


@op("full")
def _full(c: Call, size: Sequence[int], value: Number, **_: Any) -> Value:
    return c.full(c.shape(), value, c.dtype())


@op("full_like", "new_full")
def _full_like(c: Call, x: Value, *rest: Any, **_: Any) -> Value:
    return c.full(c.shape(), rest[-1], c.dtype())


@op("_efficientzerotensor")
@op("zeros", "zeros_like", "new_zeros", "empty.memory_format", "empty_like", "new_empty", "empty_strided")
@op("new_empty_strided", "empty_permuted", "prims::empty_strided", "prims::empty_permuted")
def _zeros(c: Call, *_: Any, **__: Any) -> Value:
    return c.full(c.shape(), 0, c.dtype())


@op("ones", "ones_like", "new_ones")
def _ones(c: Call, *_: Any, **__: Any) -> Value:
    return c.full(c.shape(), 1, c.dtype())


@op("scalar_tensor")
def _scalar_tensor(c: Call, value: Operand, **_: Any) -> Value:
    return c.value(value, c.dtype())


def counted(c: Call, start: Number, step: Number, dtype: str) -> Value:
    """The numbers start, start + step, … of the result's size."""
    shape = c.shape()
    kind = "f64" if is_float(dtype) else "i64"
    numbers = c.scalar(0, kind).iota(kind, shape, 0)
    return (numbers * step + start).cast(dtype)


@op("arange.start_step", "arange.start", "arange")
def _arange(c: Call, *args: Number, **_: Any) -> Value:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    return counted(c, start, step, c.dtype())


@op("linspace", "linspace.Tensor_Tensor", "linspace.Tensor_Scalar", "linspace.Scalar_Tensor")
def _linspace(c: Call, start: Operand, end: Operand, steps: int, **_: Any) -> Value:
    # PyTorch rounds the ends to the result's type, and counts from the nearer one.
    low, high = (v.cast("f64") for v in c.to(c.dtype(), start, end))
    if steps < 2:
        return c.spread(low)
    place = counted(c, 0, 1, "f64")
    step = (high - low) / float(steps - 1)
    return c.spread((place < steps / 2).where(low + step * place, high - step * (float(steps - 1) - place)))


@op("logspace", "logspace.Tensor_Tensor", "logspace.Tensor_Scalar", "logspace.Scalar_Tensor")
def _logspace(c: Call, start: Operand, end: Operand, steps: int, base: Number = 10.0, **_: Any) -> Value:
    if not c.is_float or base <= 0:
        raise Unsupported("logspace of integers, or with a base that is not positive")
    if steps < 2:
        return c.spread(c.scalar(base, "f64").scalar("pow", c.value(start, "f64")))
    # PyTorch rounds the ends to the result's type, but not the exponents between them.
    low, high = (v.cast("f64") for v in c.to(c.dtype(), start, end))
    place = counted(c, 0, 1, "f64") / float(steps - 1)
    return c.spread(c.scalar(base, "f64").scalar("pow", low + (high - low) * place))


@op("prims::iota")
def _iota(c: Call, length: int, *, start: int, step: int, **_: Any) -> Value:
    return counted(c, start, step, c.dtype())


@op("eye", "eye.m")
def _eye(c: Call, *_: Any, **__: Any) -> Value:
    shape = c.shape()
    like = c.scalar(0, "i64")
    return like.iota("i64", shape, 0).eq(like.iota("i64", shape, 1)).cast(c.dtype())
