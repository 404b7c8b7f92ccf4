"""What the functions of the namespace share: checks of operands, axes and shapes."""

from __future__ import annotations

import builtins
import operator
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from halcyon._errors import ArgumentError, DTypeError, ShapeError
from halcyon._native import Tensor, ops
from halcyon.array._array import Array, Operand, wrap
from halcyon.array._dtypes import BOOL, BY_NAME, DType, Scalar, check_scalar, promote

if TYPE_CHECKING:
    from halcyon._native import Backend

__all__ = [
    "ALL",
    "BOOLS",
    "FLOATS",
    "INDEX",
    "INTEGERS",
    "INTS_AND_BOOL",
    "NUMBERS",
    "Array",
    "AxisError",
    "Operand",
    "Tensor",
    "as_array",
    "axes_of",
    "axis_of",
    "broadcast_shapes",
    "cast",
    "check_kind",
    "is_numpy_number",
    "literal",
    "ops",
    "pair",
    "scalar_array",
    "select",
    "shape_of",
    "wrap",
]

# The kinds of element types that a function takes.
ALL = "biuf"
NUMBERS = "iuf"
INTEGERS = "iu"
INTS_AND_BOOL = "iub"
FLOATS = "f"
BOOLS = "b"

_KIND_NAMES = {
    NUMBERS: "numbers",
    INTEGERS: "integers",
    INTS_AND_BOOL: "integers and bools",
    FLOATS: "floats",
    BOOLS: "bools",
}

INDEX = BY_NAME["int64"]
"""The element type of indices."""


class AxisError(ShapeError, IndexError):
    """An axis that an array does not have."""


def is_numpy_number(x: object) -> builtins.bool:
    """Whether an object is a scalar of NumPy. Does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic)


def is_numpy_array(x: object) -> builtins.bool:
    """Whether an object is an array of NumPy. Does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.ndarray)


def as_array(op: str, x: object) -> Array:
    """Checks that an argument is an array."""
    if isinstance(x, Array):
        return x
    raise DTypeError(f"{op} takes arrays of halcyon.array, not {type(x).__name__}; convert with asarray")


def check_kind(op: str, x: Array, kinds: str) -> None:
    """Checks the kind of element type of an array."""
    if x._dtype.kind not in kinds:
        raise DTypeError(f"{op} takes {_KIND_NAMES[kinds]}, and the element type is {x._dtype}")


def cast(x: Array, dtype: DType) -> Tensor:
    """The tensor of an array as another element type."""
    return x._tensor if x._dtype is dtype else ops.cast(x._tensor, dtype.native)


def literal(like: Tensor, value: Scalar) -> Tensor:
    """A tensor of rank 0 with the element type of ``like``, whose value is an argument of the plan."""
    return ops.literal(like, value)


def scalar_array(op: str, like: Array, value: object) -> Array:
    """A Python number as an array of rank 0 with the element type of ``like``."""
    if is_numpy_number(value):
        value = value.item()  # type: ignore[attr-defined]
    return wrap(ops.literal(like._tensor, check_scalar(op, like._dtype, value)))


def pair(op: str, x1: Operand, x2: Operand, kinds: str) -> tuple[Tensor, Tensor]:
    """The tensors of two operands, converted to their common element type.

    At least one operand is an array; a Python number takes the element type of the other operand.
    """
    if isinstance(x1, Array):
        if isinstance(x2, Array):
            a, b = x1._dtype, x2._dtype
            if a is b:
                check_kind(op, x1, kinds)
                return x1._tensor, x2._tensor
            check_kind(op, x1, kinds)
            check_kind(op, x2, kinds)
            c = promote(op, a, b)
            return cast(x1, c), cast(x2, c)
        check_kind(op, x1, kinds)
        return x1._tensor, scalar_array(op, x1, x2)._tensor
    if isinstance(x2, Array):
        check_kind(op, x2, kinds)
        return scalar_array(op, x2, x1)._tensor, x2._tensor
    raise DTypeError(f"{op} needs at least one array, not {type(x1).__name__} and {type(x2).__name__}")


def select(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Elements of ``x`` where the condition is true, and of ``y`` elsewhere."""
    return ops.scalar("select", (condition, x, y))


def axis_of(op: str, axis: object, ndim: int) -> int:
    """The number of an axis, counted from the front."""
    k = integer(op, "axis", axis)
    if not -ndim <= k < ndim:
        raise AxisError(f"{op}: axis {k} is outside of an array with {ndim} axes")
    return k + ndim if k < 0 else k


def axes_of(op: str, axis: object, ndim: int) -> list[int]:
    """The numbers of one axis, of several axes, or of all axes for None."""
    if axis is None:
        return list(range(ndim))
    if isinstance(axis, (tuple, list)):
        axes = [axis_of(op, a, ndim) for a in axis]
        if len(set(axes)) < len(axes):
            raise ArgumentError(f"{op}: an axis is named twice in {axis}")
        return axes
    return [axis_of(op, axis, ndim)]


def integer(op: str, what: str, value: object) -> int:
    """Checks an argument that is an integer."""
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise DTypeError(f"{op}: {what} is an integer, not {type(value).__name__}") from None


def shape_of(op: str, shape: object) -> tuple[int, ...]:
    """The sizes of a shape argument: an integer or a sequence of integers."""
    sizes = shape if isinstance(shape, (tuple, list)) else (shape,)
    found = tuple(integer(op, "a size", n) for n in sizes)
    if any(n < 0 for n in found):
        raise ShapeError(f"{op}: {found} has a negative size")
    return found


def broadcast_shapes(op: str, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape to which shapes broadcast together."""
    out = [1] * max((len(s) for s in shapes), default=0)
    for s in shapes:
        for k, n in enumerate(s, len(out) - len(s)):
            if n != 1 and out[k] not in (1, n):
                named = ", ".join(str(tuple(s)) for s in shapes)
                raise ShapeError(f"{op}: the shapes {named} do not broadcast")
            if n != 1:
                out[k] = n
    return tuple(out)


T = TypeVar("T")


def one_of(op: str, what: str, value: T, choices: Sequence[T]) -> T:
    """Checks an argument that has a few possible values."""
    if value not in choices:
        raise ArgumentError(f"{op}: {what} is one of {', '.join(map(repr, choices))}, not {value!r}")
    return value


def iota(backend: Backend, n: int, dtype: DType = INDEX) -> Tensor:
    """The numbers 0 to n - 1."""
    return Tensor.arange(backend, n, dtype.native)


def full(backend: Backend, shape: Sequence[int], value: Scalar, dtype: DType) -> Tensor:
    """A tensor filled with a number."""
    return Tensor.full(backend, shape, value, dtype.native)


def true_like(x: Array, value: builtins.bool) -> Array:
    """An array of the shape of ``x`` filled with a bool."""
    return wrap(full(x._tensor.backend, x.shape, value, BOOL))


def sequence_of(op: str, what: str, x: Any) -> Sequence[Any]:
    """Checks an argument that is a sequence, such as a list of arrays."""
    if isinstance(x, Array) or not isinstance(x, Sequence):
        raise DTypeError(f"{op} takes a list of {what}, not {type(x).__name__}")
    return x


def is_sequence(x: Any) -> builtins.bool:
    """Whether an argument is a list or a tuple."""
    return isinstance(x, (list, tuple))
