"""Matrix products, and distances."""

from __future__ import annotations

import math

from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Number, Value

__all__: list[str] = []


def product(c: Call, a: Value, b: Value, dtype: str | None = None) -> Value:
    """The matrix product, in the result's type or in `dtype`. A product with an empty inner axis is zero."""
    a, b = c.to(dtype or c.dtype(), a, b)
    if a.shape[-1] == 0 or a.size == 0 or b.size == 0:
        rows = a.shape[:-1]
        columns = b.shape[-1:] if b.ndim > 1 else ()
        return c.full([*rows, *columns], 0, a.dtype)
    return a.matmul(b)


@op("mm", "bmm", "mv")
def _matmul(c: Call, a: Value, b: Value) -> Value:
    return product(c, a, b)


@op("dot", "vdot")
def _dot(c: Call, a: Value, b: Value) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done((x * y).sum([0]))


def _added(c: Call, bias: Value, made: Value, beta: Number, alpha: Number) -> Value:
    # If `made` is a product of f16 or bf16, the kernel's chain gets its f32 sums.
    made = made.cast(c.math())
    if alpha != 1:
        made = made * alpha
    if beta == 0:
        return c.done(made)
    extra = bias.cast(c.math())
    return c.done(made + (extra if beta == 1 else extra * beta))


@op("addmm", "baddbmm", "addmv")
def _addmm(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(c, bias, product(c, a, b), beta, alpha)


@op("addbmm")
def _addbmm(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    return _added(c, bias, product(c, a, b, c.math()).sum([0]), beta, alpha)


@op("addr")
def _addr(c: Call, bias: Value, a: Value, b: Value, *, beta: Number = 1, alpha: Number = 1) -> Value:
    x, y = c.to(c.math(), a, b)
    return _added(c, bias, x.unsqueeze(1) * y.unsqueeze(0), beta, alpha)


@op("outer", "ger")
def _outer(c: Call, a: Value, b: Value) -> Value:
    x, y = c.to(c.math(), a, b)
    return c.done(x.unsqueeze(1) * y.unsqueeze(0))


@op("_cdist_forward")
def _cdist(c: Call, a: Value, b: Value, p: float, mode: int | None) -> Value:
    if a.size == 0 or b.size == 0:
        raise Unsupported("distances of no points")
    x, y = c.to(c.math(), a, b)
    size = (x.unsqueeze(x.ndim - 1) - y.unsqueeze(y.ndim - 2)).scalar("abs")
    last = [size.ndim - 1]
    if p == math.inf:
        return c.done(size.reduce("max", last))
    if p == 0:
        return c.done(size.ne(0.0).cast(size.dtype).sum(last))
    if p == 1:
        return c.done(size.sum(last))
    if p == 2:
        return c.done((size * size).sum(last).scalar("sqrt"))
    return c.done(size.scalar("pow", float(p)).sum(last).scalar("pow", 1.0 / p))
