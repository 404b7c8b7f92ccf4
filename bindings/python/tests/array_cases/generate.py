"""Draws cases of all families."""

import itertools
from collections.abc import Iterator

from . import elementwise, numeric, structure
from .draw import Case, Draw


def cases(seed: str, count: int, beyond: bool = False) -> Iterator[tuple[str, Case]]:
    """`count` cases, each with its own seed. `beyond`: what NumPy has and the standard lacks."""
    families = structure.BEYOND if beyond else elementwise.FAMILIES + structure.FAMILIES + numeric.FAMILIES
    drawn = [f for f, weight in families for _ in range(weight)]
    order = Draw(f"{seed}/order")
    order.r.shuffle(drawn)
    for k, family in zip(range(count), itertools.cycle(drawn)):
        own = f"{seed}/{k}"
        yield own, family(Draw(own))
