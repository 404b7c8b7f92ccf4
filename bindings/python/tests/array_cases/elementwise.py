"""Cases of element-wise functions, operators, and functions of element types."""

import numpy as np

from .draw import ALL, FLOATS, INTEGERS, INTS, NUMBERS, Case, D, Draw

# Float functions of one operand: the kind of values, and the tolerance in units of the last place.
UNARY = {
    "acos": ("unit", 4),
    "acosh": ("any", 4),
    "asin": ("unit", 4),
    "asinh": ("any", 4),
    "atan": ("any", 4),
    "atanh": ("unit", 4),
    "cos": ("any", 4),
    "cosh": ("any", 4),
    "exp": ("any", 4),
    "expm1": ("any", 4),
    "log": ("any", 4),
    "log1p": ("any", 4),
    "log2": ("any", 4),
    "log10": ("any", 4),
    "sin": ("any", 4),
    "sinh": ("any", 4),
    "tan": ("any", 4),
    "tanh": ("any", 4),
    "sqrt": ("any", 1),
    "reciprocal": ("any", 1),
}
EXACT = [
    "abs",
    "ceil",
    "floor",
    "negative",
    "positive",
    "round",
    "sign",
    "square",
    "trunc",
    "isfinite",
    "isinf",
    "isnan",
]
BINARY = {
    "add": (NUMBERS, 0),
    "subtract": (NUMBERS, 0),
    "multiply": (NUMBERS, 0),
    "divide": (FLOATS, 1),
    "floor_divide": (NUMBERS, 0),
    "remainder": (NUMBERS, 0),
    "pow": (NUMBERS, 8),
    "atan2": (FLOATS, 4),
    "hypot": (FLOATS, 4),
    "logaddexp": (FLOATS, 4),
    "copysign": (FLOATS, 0),
    "nextafter": (FLOATS, 0),
    "maximum": (NUMBERS, 0),
    "minimum": (NUMBERS, 0),
    "equal": (ALL, 0),
    "not_equal": (ALL, 0),
    "less": (NUMBERS, 0),
    "less_equal": (NUMBERS, 0),
    "greater": (NUMBERS, 0),
    "greater_equal": (NUMBERS, 0),
    "logical_and": (["bool"], 0),
    "logical_or": (["bool"], 0),
    "logical_xor": (["bool"], 0),
    "bitwise_and": (["bool", *INTEGERS], 0),
    "bitwise_or": (["bool", *INTEGERS], 0),
    "bitwise_xor": (["bool", *INTEGERS], 0),
    "bitwise_left_shift": (INTEGERS, 0),
    "bitwise_right_shift": (INTEGERS, 0),
}
OPERATORS = {
    "+": "add",
    "-": "subtract",
    "*": "multiply",
    "/": "divide",
    "//": "floor_divide",
    "%": "remainder",
    "**": "pow",
    "&": "bitwise_and",
    "|": "bitwise_or",
    "^": "bitwise_xor",
    "<<": "bitwise_left_shift",
    ">>": "bitwise_right_shift",
    "<": "less",
    "<=": "less_equal",
    ">": "greater",
    ">=": "greater_equal",
    "==": "equal",
    "!=": "not_equal",
}


def unary(d: Draw) -> Case:
    p = d.r.random()
    if p < 0.55:
        name = d.one(list(UNARY))
        kind, ulps = UNARY[name]
        return Case(name, (d.any_array(FLOATS, d.one([kind, "any"])),), check="close", ulps=ulps)
    if p < 0.9:
        return Case(d.one(EXACT), (d.any_array(NUMBERS),), check="exact")
    if p < 0.95:
        return Case("signbit", (d.any_array(FLOATS),))
    name = d.one(["logical_not", "bitwise_invert"])
    return Case(name, (d.any_array(["bool"] if name == "logical_not" else ["bool", *INTEGERS]),))


def tame(d: Draw, name: str, a, b):
    """Operands for which the standard defines the result."""

    def part(x, f):
        return np.asarray(f(x), x.dtype) if isinstance(x, np.ndarray) else f(np.asarray(x)).item()

    kind = a.dtype.kind if isinstance(a, np.ndarray) else b.dtype.kind
    if name in ("floor_divide", "remainder"):
        if kind in "iu":
            b = part(b, lambda v: np.where(v == 0, np.asarray(1, v.dtype), v))
        elif name == "floor_divide":
            # With infinities, the standard and NumPy differ.
            a = part(a, lambda v: np.where(np.isinf(v), np.asarray(1, v.dtype), v))
            b = part(b, lambda v: np.where(np.isinf(v), np.asarray(2, v.dtype), v))
            # Quotients past the precision depend on the rounding of the remainder.
            a, b = (part(v, lambda u: np.clip(u, -1e6, 1e6).astype(u.dtype)) for v in (a, b))
            b = part(b, lambda v: np.where(abs(v) < 1e-3, np.copysign(np.asarray(0.5, v.dtype), v), v))
    if name == "pow" and kind in "iu":
        b = part(b, lambda v: np.asarray(np.abs(v.astype(object)) % 12).astype(v.dtype))
    if "shift" in name:
        bits = (a if isinstance(a, np.ndarray) else b).dtype.itemsize * 8
        b = part(b, lambda v: np.asarray(np.abs(v.astype(object)) % (bits + 2)).astype(v.dtype))
    return a, b


def operands(d: Draw, name: str):
    """Two arrays, or an array and a Python number."""
    types, _ = BINARY[name]
    first, second = d.pair_of_types(types)
    s, t = d.broadcast()
    a = d.array(first, s)
    b = d.array(second, t) if d.chance(0.7) else d.scalar(first)
    if d.chance(0.15):
        b = a.copy() if isinstance(b, np.ndarray) else b
    a, b = tame(d, name, a, b)
    if not isinstance(b, np.ndarray) and d.chance(0.4) and "shift" not in name:
        a, b = tame(d, name, b, a)
    return a, b


def binary(d: Draw) -> Case:
    name = d.one(list(BINARY))
    # The terms of this sum are at most 0.7 larger than its result.
    slack = 4 if name == "logaddexp" else 0
    return Case(name, operands(d, name), check="close", ulps=BINARY[name][1], slack=slack)


def operator(d: Draw) -> Case:
    op = d.one(list(OPERATORS))
    name = OPERATORS[op]
    return Case(f"op:{op}", operands(d, name), check="close", ulps=BINARY[name][1])


def inplace(d: Draw) -> Case:
    op = d.one(list(OPERATORS)[:12])
    name = OPERATORS[op]
    types, ulps = BINARY[name]
    t = d.one(types)
    s = d.shape()
    a = d.array(t, s)
    b = d.array(t, s[d.int(0, len(s)) :]) if d.chance(0.6) else d.scalar(t)
    a, b = tame(d, name, a, b)
    return Case(f"iop:{op}", (a, b), check="close", ulps=ulps)


def clip(d: Draw) -> Case:
    t = d.one(NUMBERS)
    x = d.array(t, d.shape())
    bounds = (
        sorted(d.scalar(t) for _ in range(2))
        if t not in FLOATS
        else sorted(d.r.gauss(0, 2) for _ in range(2))
    )
    low, high = (None if d.chance(0.25) else v for v in bounds)
    if d.chance(0.3) and low is not None:
        low = np.full(x.shape, low, t)
        if high is not None:
            high = np.asarray(high, t)
    kwargs = {k: v for k, v in (("min", low), ("max", high)) if v is not None or d.chance(0.3)}
    return Case("clip", (x,), kwargs)


def where(d: Draw) -> Case:
    a, b = d.pair_of_types(ALL)
    c, s, t = d.broadcast(3)
    x, y = d.array(a, s), d.array(b, t)
    if d.chance(0.3):
        y = d.scalar(a)
        if d.chance(0.4):
            x, y = y, x
    return Case("where", (d.array("bool", c), x, y))


def astype(d: Draw) -> Case:
    a, b = d.one(ALL), d.one(ALL)
    x = d.array(a, d.shape(), "finite")
    if a in FLOATS and b in INTEGERS:
        # Only numbers in the range of the integer type have a defined result.
        x = np.asarray(np.clip(x, 0 if b.startswith("u") else -100, 100), a)
    return Case("astype", (x, D(b)))


def types(d: Draw) -> Case:
    p = d.r.random()
    if p < 0.3:
        return Case("can_cast", (D(d.one(ALL)), D(d.one(ALL))))
    if p < 0.6:
        kinds = [
            "bool",
            "signed integer",
            "unsigned integer",
            "integral",
            "real floating",
            "complex floating",
            "numeric",
        ]
        kind = d.one(kinds) if d.chance(0.6) else (d.one(kinds), d.one(kinds))
        return Case("isdtype", (D(d.one(ALL)), kind))
    if p < 0.7:
        return Case("finfo", (D(d.one(FLOATS)),))
    if p < 0.8:
        return Case("iinfo", (D(d.one(INTEGERS)),))
    a, b = d.pair_of_types(ALL)
    more = [d.array(a, (2,))] if d.chance(0.5) else []
    return Case("result_type", (D(a), D(b), *more))


FAMILIES = [
    (unary, 6),
    (binary, 8),
    (operator, 5),
    (inplace, 3),
    (clip, 2),
    (where, 2),
    (astype, 2),
    (types, 2),
]

__all__ = ["BINARY", "FAMILIES", "INTS", "OPERATORS"]
