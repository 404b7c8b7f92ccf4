"""Element types, their promotion, and the data type functions of the standard."""

from __future__ import annotations

import builtins
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from halcyon._errors import ArgumentError, DTypeError

if TYPE_CHECKING:
    from halcyon.array._array import Array

__all__ = [
    "BOOL",
    "BY_NAME",
    "BY_NATIVE",
    "DEFAULT_FLOAT",
    "DEFAULT_INT",
    "ComplexError",
    "DType",
    "Scalar",
    "can_cast",
    "check_dtype",
    "check_scalar",
    "finfo",
    "finfo_object",
    "iinfo",
    "iinfo_object",
    "isdtype",
    "promote",
    "result_type",
]

Scalar: TypeAlias = builtins.bool | int | float
"""A Python number that takes the element type of the array it is combined with."""


class ComplexError(DTypeError, AttributeError):
    """A complex type was asked for. It is an attribute error too, so that ``hasattr`` is false."""


class DType:
    """An element type.

    There is one object per type, so types are compared with ``==`` or ``is``.
    """

    __slots__ = ("bits", "kind", "name", "native")

    name: str
    """The name in the standard, such as ``float32``."""
    native: str
    """The name in Halcyon, such as ``f32``."""
    kind: str
    """``b`` bool, ``i`` signed integer, ``u`` unsigned integer, ``f`` float."""
    bits: int
    """Bits per element in memory."""

    def __init__(self, name: str, native: str, kind: str, bits: int) -> None:
        for key, value in (("name", name), ("native", native), ("kind", kind), ("bits", bits)):
            object.__setattr__(self, key, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("an element type cannot be changed")

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.bits // 8

    def __repr__(self) -> str:
        return f"halcyon.array.{self.name}"

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (_by_name, (self.name,))

    def __eq__(self, other: object) -> builtins.bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self.native)


def _by_name(name: str) -> DType:
    return BY_NAME[name]


_ROWS = [
    ("bool", "bool", "b", 8),
    ("int8", "i8", "i", 8),
    ("int16", "i16", "i", 16),
    ("int32", "i32", "i", 32),
    ("int64", "i64", "i", 64),
    ("uint8", "u8", "u", 8),
    ("uint16", "u16", "u", 16),
    ("uint32", "u32", "u", 32),
    ("uint64", "u64", "u", 64),
    ("float16", "f16", "f", 16),
    ("bfloat16", "bf16", "f", 16),
    ("float32", "f32", "f", 32),
    ("float64", "f64", "f", 64),
]

BY_NAME: dict[str, DType] = {row[0]: DType(*row) for row in _ROWS}
BY_NATIVE: dict[str, DType] = {d.native: d for d in BY_NAME.values()}
BOOL = BY_NAME["bool"]
DEFAULT_FLOAT = BY_NAME["float32"]
DEFAULT_INT = BY_NAME["int64"]

# Types that the standard does not know.
_EXTRA = frozenset((BY_NAME["float16"], BY_NAME["bfloat16"]))


def _promoted(a: DType, b: DType) -> DType | None:
    """The common type by the standard's tables; None if the tables have none."""
    if a is b:
        return a
    kinds = {a.kind, b.kind}
    if len(kinds) == 1:
        # The two 16-bit floats have no common type of 16 bits.
        return DEFAULT_FLOAT if a.bits == b.bits else max(a, b, key=lambda d: d.bits)
    if kinds == {"i", "u"}:
        signed, unsigned = (a, b) if a.kind == "i" else (b, a)
        bits = max(signed.bits, 2 * unsigned.bits)
        return BY_NAME[f"int{bits}"] if bits <= 64 else None
    return None


_PROMOTED: dict[tuple[DType, DType], DType] = {
    (a, b): c for a in BY_NAME.values() for b in BY_NAME.values() if (c := _promoted(a, b)) is not None
}


def promote(op: str, a: DType, b: DType) -> DType:
    """The common type of two types.

    Raises:
        DTypeError: The standard defines none: an integer and a float, a bool and a number, or uint64 and a
            signed integer.

    """
    found = _PROMOTED.get((a, b))
    if found is None:
        raise DTypeError(f"{op}: {a} and {b} have no common type; convert one with astype")
    return found


def check_dtype(dtype: object) -> DType:
    """Checks that an argument is an element type."""
    if isinstance(dtype, DType):
        return dtype
    if "complex" in str(dtype):
        raise DTypeError(f"{dtype} is not supported: Halcyon has no complex types")
    raise DTypeError(f"{dtype!r} is not an element type of halcyon.array, such as halcyon.array.float32")


def check_scalar(op: str, dtype: DType, value: object) -> Scalar:
    """Checks that a Python number can take an element type.

    Raises:
        DTypeError: The kind of number does not fit, such as a float for an integer type.
        OverflowError: An integer is out of the range of an integer type.

    """
    kind = dtype.kind
    if isinstance(value, builtins.bool):
        if kind == "b":
            return value
    elif isinstance(value, int):
        if kind == "f":
            return _float_of(value)
        if kind != "b":
            low, high = _bounds(dtype)
            if not low <= value <= high:
                raise OverflowError(f"{op}: {value} is out of the range of {dtype}, {low} to {high}")
            return value
    elif isinstance(value, float):
        if kind == "f":
            return value
    elif isinstance(value, complex):
        raise DTypeError(f"{op}: {value} is complex; Halcyon has no complex types")
    else:
        raise DTypeError(f"{op} takes arrays and Python numbers, not {type(value).__name__}")
    what = type(value).__name__
    raise DTypeError(f"{op}: the Python {what} {value} cannot be combined with {dtype}; convert the array")


def _float_of(value: int) -> float:
    """The float next to an integer; integers past the largest float are infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def _bounds(dtype: DType) -> tuple[int, int]:
    """The smallest and the largest number of an integer type."""
    if dtype.kind == "u":
        return 0, (1 << dtype.bits) - 1
    return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1


_KINDS: dict[str, str] = {
    "bool": "b",
    "signed integer": "i",
    "unsigned integer": "u",
    "integral": "iu",
    "real floating": "f",
    "complex floating": "",
    "numeric": "iuf",
}


def of_kind(kind: str) -> list[DType]:
    """The standard's types of a kind such as ``integral``."""
    if kind not in _KINDS:
        raise ArgumentError(f'"{kind}" is not a kind of element type; the kinds are {", ".join(_KINDS)}')
    return [d for d in BY_NAME.values() if d.kind in _KINDS[kind] and d not in _EXTRA]


def _dtype_of(x: DType | Array) -> DType:
    return x if isinstance(x, DType) else check_dtype(getattr(x, "dtype", x))


def can_cast(from_: DType | Array, to: DType, /) -> builtins.bool:
    """Whether the promotion rules allow a conversion: whether both types together promote to ``to``."""
    return _PROMOTED.get((_dtype_of(from_), check_dtype(to))) is to


def isdtype(dtype: DType, kind: DType | str | tuple[DType | str, ...]) -> builtins.bool:
    """Whether a type is of a kind: a type, the name of a kind such as ``"integral"``, or a tuple of these."""
    dtype = check_dtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str):
        if kind not in _KINDS:
            raise ArgumentError(f'"{kind}" is not a kind of element type; the kinds are {", ".join(_KINDS)}')
        return dtype.kind in _KINDS[kind]
    return dtype is check_dtype(kind)


def result_type(*arrays_and_dtypes: Array | DType | Scalar) -> DType:
    """The type to which arrays, types and Python numbers promote together."""
    found: DType | None = None
    scalars: list[Scalar] = []
    for x in arrays_and_dtypes:
        if isinstance(x, (int, float, complex)):
            scalars.append(x)
        else:
            d = _dtype_of(x)
            found = d if found is None else promote("result_type", found, d)
    if found is None:
        raise ArgumentError("result_type needs at least one array or element type")
    for s in scalars:
        check_scalar("result_type", found, s)
    return found


@dataclass(frozen=True)
class finfo_object:
    """The limits of a float type."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True)
class iinfo_object:
    """The limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


# Bits of the fraction, and the exponents of the smallest normal number and of the largest number.
_FORMATS = {"f16": (10, -14, 15), "bf16": (7, -126, 127), "f32": (23, -126, 127), "f64": (52, -1022, 1023)}


def finfo(type: DType | Array, /) -> finfo_object:
    """The limits of a float type, or of an array's type."""
    d = _dtype_of(type)
    if d.kind != "f":
        raise DTypeError(f"finfo takes a float type, not {d}")
    fraction, low, high = _FORMATS[d.native]
    largest = math.ldexp(2.0 - 2.0**-fraction, high)
    return finfo_object(d.bits, 2.0**-fraction, largest, -largest, 2.0**low, d)


def iinfo(type: DType | Array, /) -> iinfo_object:
    """The limits of an integer type, or of an array's type."""
    d = _dtype_of(type)
    if d.kind not in "iu":
        raise DTypeError(f"iinfo takes an integer type, not {d}")
    low, high = _bounds(d)
    return iinfo_object(d.bits, high, low, d)
