"""The gamma function and its relatives. All are computed in f64, by Stirling's series after a shift."""

from __future__ import annotations

import math

from halcyon.torch.compile.table import Call, Unsupported, op
from halcyon.torch.compile.value import Value

__all__: list[str] = []

_SHIFT = 10
"""The series is read at x + 10, where its terms fall quickly."""

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""The Bernoulli numbers B2, B4, … (Abramowitz and Stegun, table 23.2)."""


def _series(inverse: Value, factors: list[float]) -> Value:
    """A polynomial in the square of `inverse`."""
    square = inverse * inverse
    total = inverse.number(factors[-1]).expand(inverse.shape)
    for f in reversed(factors[:-1]):
        total = total * square + f
    return total


def _log_gamma(x: Value) -> Value:
    """The logarithm of gamma for x > 0 (Abramowitz and Stegun 6.1.40)."""
    z = x + float(_SHIFT)
    factors = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)]
    inverse = 1.0 / z
    stirling = (z - 0.5) * z.scalar("log") - z + 0.5 * math.log(2 * math.pi)
    product = x
    for k in range(1, _SHIFT):
        product = product * (x + float(k))
    return stirling + inverse * _series(inverse, factors) - product.scalar("log")


@op("lgamma", "prims::lgamma")
def _lgamma(c: Call, x: Value) -> Value:
    x = x.cast("f64")
    below = x < 0.5
    positive = below.where(1.0 - x, x)
    # Large numbers would overflow in the product of the shift.
    huge = positive > 1e15
    safe = huge.where(1.0, positive)
    log = positive.scalar("log")
    made = huge.where(positive * (log - 1.0), _log_gamma(safe))
    sine = ((x - x.scalar("round")) * math.pi).scalar("sin").scalar("abs")
    made = below.where(math.log(math.pi) - sine.scalar("log") - made, made)
    # Whole numbers up to 0 are poles.
    pole = (x <= 0.0) & x.eq(x.scalar("floor")) | x.scalar("abs").eq(math.inf)
    return c.done(pole.where(math.inf, made))


@op("digamma", "prims::digamma")
def _digamma(c: Call, x: Value) -> Value:
    x = x.cast("f64")
    below = x < 0.5
    positive = below.where(1.0 - x, x)
    z = positive + float(_SHIFT)
    inverse = 1.0 / z
    factors = [-b / (2 * k) for k, b in enumerate(_BERNOULLI, 1)]
    made = z.scalar("log") - 0.5 * inverse + inverse * inverse * _series(inverse, factors)
    for k in range(_SHIFT):
        made = made - 1.0 / (positive + float(k))
    angle = (x - x.scalar("round")) * math.pi
    made = below.where(made - math.pi / angle.scalar("tan"), made)
    # PyTorch gives -inf at 0, +inf at -0 and NaN at the other poles.
    pole = (x < 0.0) & x.eq(x.scalar("floor"))
    made = pole.where(math.nan, made)
    return c.done(x.eq(0.0).where(-1.0 / x, made))


@op("polygamma")
def _polygamma(c: Call, n: int, x: Value) -> Value:
    if n == 0:
        return _digamma(c, x)
    if n > 1:
        raise Unsupported("a polygamma function of an order above 1")
    # The derivative of digamma (Abramowitz and Stegun 6.4.12), reflected below 1/2 (6.4.7).
    x = x.cast("f64")
    below = x < 0.5
    positive = below.where(1.0 - x, x)
    z = positive + float(_SHIFT)
    inverse = 1.0 / z
    square = inverse * inverse
    made = inverse + 0.5 * square + square * inverse * _series(inverse, list(_BERNOULLI))
    for k in range(_SHIFT):
        step = 1.0 / (positive + float(k))
        made = made + step * step
    sine = ((x - x.scalar("round")) * math.pi).scalar("sin")
    return c.done(below.where(math.pi**2 / (sine * sine) - made, made))
