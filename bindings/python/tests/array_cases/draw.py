"""Draws element types, shapes, values and axes."""

import math
import random
from dataclasses import dataclass, field

import numpy as np

INTS = ["int8", "int16", "int32", "int64"]
UINTS = ["uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
INTEGERS = INTS + UINTS
NUMBERS = INTEGERS + FLOATS
ALL = ["bool", *NUMBERS]


@dataclass(frozen=True)
class D:
    """An element type in a case."""

    name: str


@dataclass
class Case:
    """A call of a function. Its arguments are NumPy arrays, types, numbers and trees of these."""

    name: str
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    check: str = "exact"
    """How results are compared; see `compare.py`."""
    ulps: float = 4.0
    """The tolerance of the checks `close` and `sum`, in units of the last place."""
    slack: float = 0.0
    """A further tolerance, in units of the last place of 1."""

    def __str__(self) -> str:
        kwargs = "".join(f", {k}={v!r}" for k, v in self.kwargs.items())
        args = ", ".join(
            f"array({a.tolist()!r}, {a.dtype}, shape={a.shape})" if isinstance(a, np.ndarray) else repr(a)
            for a in self.args
        )
        return f"{self.name}({args}{kwargs})"


class Draw:
    """A source of random choices."""

    def __init__(self, seed: str) -> None:
        self.r = random.Random(seed)

    def one(self, items):
        return self.r.choice(items)

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def int(self, low: int, high: int) -> int:
        return self.r.randint(low, high)

    # Shapes.

    def shape(self, low: int = 0, high: int = 4, side: int = 5, zero: float = 0.08) -> tuple[int, ...]:
        n = self.int(low, high)
        return tuple(0 if self.chance(zero) else self.int(1, side) for _ in range(n))

    def broadcast(self, count: int = 2) -> list[tuple[int, ...]]:
        """Shapes that broadcast together."""
        full = self.shape()
        out = []
        for _ in range(count):
            s = list(full[self.int(0, len(full)) :]) if self.chance(0.4) else list(full)
            out.append(tuple(1 if self.chance(0.25) else n for n in s))
        return out

    def axis(self, ndim: int) -> int:
        return self.int(-ndim, ndim - 1)

    def axes(self, ndim: int):
        """An argument `axis` of a reduction."""
        if ndim == 0 or self.chance(0.3):
            return None
        if self.chance(0.5):
            return self.axis(ndim)
        chosen = self.r.sample(range(ndim), self.int(0, ndim))
        return tuple(a - ndim if self.chance(0.4) else a for a in chosen)

    # Values.

    def floats(self, dtype: str, n: int, kind: str = "any") -> np.ndarray:
        """`any`: with infinities, NaN, -0 and extremes. `finite`: of moderate size. `unit`: in (-1, 1)."""
        t = np.dtype(dtype)
        if kind == "unit":
            return np.array([self.r.uniform(-1, 1) for _ in range(n)], t)
        info = np.finfo(t)
        special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0]
        special += [float(info.max), float(info.min), float(info.tiny), -float(info.tiny), float(info.eps)]
        out = []
        for _ in range(n):
            p = self.r.random()
            if kind == "any" and p < 0.3:
                out.append(self.one(special))
            elif p < 0.6:
                out.append(float(self.int(-6, 6)))
            elif kind == "any" and p < 0.75:
                out.append(self.r.gauss(0, 1) * 10.0 ** self.int(-20, 20))
            else:
                out.append(self.r.gauss(0, 3))
        return np.array(out, t)

    def integers(self, dtype: str, n: int, kind: str = "any") -> np.ndarray:
        info = np.iinfo(dtype)
        low, high = int(info.min), int(info.max)
        out = []
        for _ in range(n):
            p = self.r.random()
            if kind == "any" and p < 0.2:
                out.append(self.one([low, high, low + 1, high - 1, 0, 1]))
            elif kind == "any" and p < 0.5:
                out.append(self.int(low, high))
            else:
                out.append(self.int(max(low, -9), min(high, 9)))
        return np.array(out, dtype)

    def array(self, dtype: str, shape: tuple[int, ...], kind: str = "any") -> np.ndarray:
        n = math.prod(shape)
        if dtype == "bool":
            flat = np.array([self.chance(0.5) for _ in range(n)], bool)
        elif dtype in FLOATS or dtype == "float16":
            flat = self.floats(dtype, n, kind)
        else:
            flat = self.integers(dtype, n, kind)
        return flat.reshape(shape)

    def any_array(self, dtypes=None, kind: str = "any", **shape) -> np.ndarray:
        return self.array(self.one(dtypes or ALL), self.shape(**shape), kind)

    def pair_of_types(self, dtypes) -> tuple[str, str]:
        """Two types with a common one: mostly equal."""
        a = self.one(dtypes)
        if self.chance(0.6):
            return a, a
        if a == "bool":
            return a, a
        if a in FLOATS:
            return a, self.one([d for d in dtypes if d in FLOATS])
        others = [
            d
            for d in dtypes
            if d in INTEGERS and not {"uint64"} & ({a, d} if (a in INTS) != (d in INTS) else set())
        ]
        return a, self.one(others)

    def scalar(self, dtype: str):
        """A Python number that fits a type."""
        if dtype == "bool":
            return self.chance(0.5)
        if dtype in FLOATS:
            if self.chance(0.3):
                return self.int(-5, 5)
            return self.one(
                [0.0, -0.0, 1.0, -2.5, 0.1, 3.0, math.inf, -math.inf, math.nan, self.r.gauss(0, 2)]
            )
        info = np.iinfo(dtype)
        if self.chance(0.2):
            return self.one([int(info.min), int(info.max)])
        return self.int(max(int(info.min), -9), 9)
