"""Functions that make arrays."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeGuard

from halcyon._errors import ArgumentError, DTypeError, ShapeError
from halcyon._native import Backend, Tensor
from halcyon.array import _interop
from halcyon.array._array import Array, wrap
from halcyon.array._core import (
    as_array,
    broadcast_shapes,
    cast,
    integer,
    iota,
    is_numpy_number,
    literal,
    one_of,
    ops,
    select,
    shape_of,
)
from halcyon.array._core import (
    full as full_tensor,
)
from halcyon.array._devices import DeviceLike, backend_of
from halcyon.array._dtypes import (
    BOOL,
    BY_NAME,
    DEFAULT_FLOAT,
    DEFAULT_INT,
    DType,
    Scalar,
    check_dtype,
    check_scalar,
    iinfo,
    promote,
    result_type,
)

__all__ = [
    "arange",
    "asarray",
    "empty",
    "empty_like",
    "eye",
    "from_dlpack",
    "full",
    "full_like",
    "linspace",
    "meshgrid",
    "ones",
    "ones_like",
    "tril",
    "triu",
    "zeros",
    "zeros_like",
]

Shape: TypeAlias = int | Sequence[int]
"""A shape argument: the sizes of the axes, or the size of the only axis."""


def asarray(
    obj: Any,
    /,
    *,
    dtype: DType | None = None,
    device: DeviceLike = None,
    copy: builtins.bool | None = None,
) -> Array:
    """Makes an array from an array, Python numbers, nested sequences, or memory of another library.

    In a sequence with arrays, Python numbers take the element type of the arrays.

    Memory of another library (NumPy, the buffer protocol, DLPack) is copied, because it may change later.
    With ``copy=False`` it is shared; it must not change then while the array or a result that is not computed
    yet lives. If it cannot be shared, that is a ``ValueError``.

    An array of Halcyon is returned itself, unless a copy, another type or another device is asked for.
    """
    if dtype is not None:
        dtype = check_dtype(dtype)
    if isinstance(obj, (Array, Tensor)):
        return _from_array(obj if isinstance(obj, Array) else wrap(obj), dtype, device, copy)
    foreign = _interop.import_foreign(obj, None if device is None else backend_of(device), copy)
    if foreign is not None:
        if dtype is not None and foreign._dtype is not dtype:
            if copy is False:
                raise ArgumentError(f"asarray: converting {foreign._dtype} to {dtype} needs a copy")
            return wrap(cast(foreign, dtype))
        return foreign
    if copy is False:
        raise ArgumentError(f"asarray: making an array from {type(obj).__name__} needs a copy")
    if is_nested(obj):
        return _from_sequence(obj, dtype, backend_of(device))
    if isinstance(obj, (int, float, complex)):
        found = dtype or _dtype_of_number(obj)
        return wrap(full_tensor(backend_of(device), (), _number(found, obj), found))
    raise DTypeError(f"asarray: a {type(obj).__name__} cannot become an array")


def _from_array(x: Array, dtype: DType | None, device: DeviceLike, copy: builtins.bool | None) -> Array:
    moves = device is not None and not backend_of(device).is_same(x._tensor.backend)
    changes = dtype is not None and dtype is not x._dtype
    if copy is False and (moves or changes):
        raise ArgumentError("asarray: another element type or device needs a copy")
    if not moves and not changes:
        return wrap(x._tensor) if copy else x
    t = cast(x, dtype) if dtype is not None else x._tensor
    return wrap(t.to(backend_of(device)) if moves else t)


def _dtype_of_number(value: object) -> DType:
    if isinstance(value, builtins.bool):
        return BOOL
    if isinstance(value, int):
        return DEFAULT_INT
    if isinstance(value, float):
        return DEFAULT_FLOAT
    if not isinstance(value, complex):
        raise DTypeError(f"{value!r} is no number")
    raise DTypeError(f"{value} is complex; Halcyon has no complex types")


def _number(dtype: DType, value: Any) -> Scalar:
    """A Python number that becomes an element of this type. Bools and integers become numbers and bools."""
    if isinstance(value, builtins.bool) and dtype.kind != "b":
        value = int(value)
    elif isinstance(value, int) and dtype.kind == "b":
        value = value != 0
    return check_scalar("asarray", dtype, value)


def _from_sequence(obj: Sequence[Any], dtype: DType | None, backend: Backend) -> Array:
    """The array of nested sequences of numbers or of arrays."""
    shape, flat = _flatten(obj)
    if any(isinstance(v, Array) for v in flat):
        return _from_parts(shape, flat, dtype, backend)
    kinds = set(map(type, flat))
    if not kinds <= {builtins.bool, int, float}:
        flat = [v.item() if is_numpy_number(v) else v for v in flat]
        kinds = {
            type(_number(_dtype_of_number(v), v)) if isinstance(v, (int, float, complex)) else type(v)
            for v in flat
        }
        bad = kinds - {builtins.bool, int, float}
        if bad:
            raise DTypeError(f"asarray: a list with a {bad.pop().__name__} cannot become an array")
    if dtype is None:
        dtype = DEFAULT_FLOAT if float in kinds or not kinds else DEFAULT_INT if int in kinds else BOOL
    if dtype.kind in "biu" and float in kinds:
        raise DTypeError(f"asarray: floats cannot become {dtype}; convert with astype")
    return wrap(Tensor.from_bytes(backend, _interop.pack(flat, dtype), shape, dtype.native))


def _from_parts(shape: Sequence[int], flat: list[Any], dtype: DType | None, backend: Backend) -> Array:
    """The array of elements some of which are arrays. Numbers take the type of the arrays."""
    flat = [v.item() if is_numpy_number(v) else v for v in flat]
    parts: list[Any] = [v if isinstance(v, (Array, *_NUMBERS)) else asarray(v, device=backend) for v in flat]
    found = dtype or result_type(*parts)
    like = next(p for p in parts if isinstance(p, Array))
    tensors = [
        cast(p, found)
        if isinstance(p, Array)
        else full_tensor(like._tensor.backend, (), _number(found, p), found)
        for p in parts
    ]
    inner = tensors[0].shape
    if any(t.shape != inner for t in tensors):
        raise ShapeError("asarray: the arrays in a list differ in shape")
    rows = [ops.reshape(t, (1, *inner)) for t in tensors]
    return wrap(ops.reshape(ops.concat(rows, 0), (*shape, *inner)).to(backend))


def of_elements(op: str, obj: Sequence[Any], dtype: DType, backend: Backend) -> Array:
    """The array of this type of nested sequences. What is in them must fit the type, as operands must."""
    _shape, flat = _flatten(obj)
    numbers: dict[type, Any] = {}
    for v in flat:
        if isinstance(v, _NUMBERS) or is_numpy_number(v):
            numbers[type(v)] = v
        elif promote(op, dtype, asarray(v)._dtype) is not dtype:
            raise DTypeError(f"{op}: {asarray(v)._dtype} does not fit {dtype}; convert with astype")
    # One number of each kind is enough: the ranges of all are checked when they become bytes.
    for v in numbers.values():
        check_scalar(op, dtype, v.item() if is_numpy_number(v) else v)
    return _from_sequence(obj, dtype, backend)


_NUMBERS = (int, float, complex)


def is_nested(obj: Any) -> TypeGuard[Sequence[Any]]:
    """Whether an object is a sequence of elements."""
    return _nests(type(obj))


def _nests(kind: type) -> builtins.bool:
    """Whether the objects of a class are sequences of elements."""
    return issubclass(kind, Sequence) and not issubclass(kind, (str, bytes, bytearray, memoryview))


def _flatten(obj: Sequence[Any]) -> tuple[tuple[int, ...], list[Any]]:
    """The shape and the elements of nested sequences."""
    shape: list[int] = []
    level: list[Any] = [obj]
    while level:
        nested = [_nests(kind) for kind in set(map(type, level))]
        if not any(nested):
            break
        if not all(nested):
            raise ShapeError("asarray: the lists differ in depth")
        n = len(level[0])
        if any(len(v) != n for v in level):
            raise ShapeError("asarray: the lists of one level differ in length")
        shape.append(n)
        level = [e for v in level for e in v]
    return tuple(shape), level


def from_dlpack(x: Any, /, *, device: DeviceLike = None, copy: builtins.bool | None = None) -> Array:
    """Makes an array from an object with ``__dlpack__``, without a copy where possible.

    Shared memory must not change while the array or a result that is not computed yet lives.

    Raises:
        BufferError: ``copy`` is False and the memory cannot be shared.
        AttributeError: The object does not have ``__dlpack__``.

    """
    if isinstance(x, Array):
        if copy is False and device is not None and not backend_of(device).is_same(x._tensor.backend):
            raise BufferError(f"from_dlpack: the array is on {x.device}, and copy=False forbids to move it")
        return _from_array(x, None, device, copy)
    return _interop.from_dlpack(x, None if device is None else backend_of(device), copy)


def full(
    shape: Shape, fill_value: Scalar | Array, *, dtype: DType | None = None, device: DeviceLike = None
) -> Array:
    """An array filled with a number."""
    sizes = shape_of("full", shape)
    if isinstance(fill_value, Array):
        if fill_value.ndim != 0:
            raise ShapeError(f"full: the value has the shape {fill_value.shape}; it must have no axes")
        return wrap(ops.expand(_from_array(fill_value, dtype, device, None)._tensor, sizes))
    if is_numpy_number(fill_value):
        fill_value = fill_value.item()  # type: ignore[union-attr]
    found = check_dtype(dtype) if dtype is not None else _dtype_of_number(fill_value)
    return wrap(full_tensor(backend_of(device), sizes, check_scalar("full", found, fill_value), found))


def empty(shape: Shape, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array whose values do not matter. They are zeros."""
    return zeros(shape, dtype=dtype, device=device)


def zeros(shape: Shape, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array of zeros."""
    return _filled("zeros", shape, 0, dtype, device)


def ones(shape: Shape, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array of ones."""
    return _filled("ones", shape, 1, dtype, device)


def _filled(op: str, shape: Shape, value: int, dtype: DType | None, device: DeviceLike) -> Array:
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    return wrap(full_tensor(backend_of(device), shape_of(op, shape), value, found))


def _filled_like(op: str, x: Array, value: int, dtype: DType | None, device: DeviceLike) -> Array:
    as_array(op, x)
    return _filled(op, x.shape, value, dtype or x._dtype, x.device if device is None else device)


def empty_like(x: Array, /, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array of the shape of another one whose values do not matter. They are zeros."""
    return _filled_like("empty_like", x, 0, dtype, device)


def zeros_like(x: Array, /, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array of zeros of the shape of another one."""
    return _filled_like("zeros_like", x, 0, dtype, device)


def ones_like(x: Array, /, *, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """An array of ones of the shape of another one."""
    return _filled_like("ones_like", x, 1, dtype, device)


def full_like(
    x: Array, /, fill_value: Scalar | Array, *, dtype: DType | None = None, device: DeviceLike = None
) -> Array:
    """An array of the shape of another one, filled with a number."""
    as_array("full_like", x)
    return full(x.shape, fill_value, dtype=dtype or x._dtype, device=x.device if device is None else device)


def arange(
    start: float,
    /,
    stop: float | None = None,
    step: float = 1,
    *,
    dtype: DType | None = None,
    device: DeviceLike = None,
) -> Array:
    """Numbers from ``start`` up to, but without, ``stop``, at a distance of ``step``.

    With one argument the numbers begin at 0.
    """
    if stop is None:
        start, stop = 0, start
    given: tuple[Any, ...] = (start, stop, step)
    numbers = [v.item() if is_numpy_number(v) else v for v in given]
    for v in numbers:
        if isinstance(v, builtins.bool) or not isinstance(v, (int, float)):
            raise DTypeError(f"arange takes integers and floats, not {v!r}")
    start, stop, step = numbers
    whole = all(isinstance(v, int) for v in numbers)
    integers = range(*map(int, numbers)) if whole and step else None
    found = (DEFAULT_INT if whole else DEFAULT_FLOAT) if dtype is None else check_dtype(dtype)
    if step == 0:
        raise ArgumentError("arange: the step is 0")
    backend = backend_of(device)
    if found.kind == "b":
        raise DTypeError("arange makes numbers, not bools")
    if found.kind != "f":
        if integers is None:
            raise DTypeError(f"arange: floats cannot become {found}; convert with astype")
        return _arange_of_integers(backend, integers, found)
    if not all(math.isfinite(v) for v in numbers):
        raise ArgumentError(f"arange: {start}, {stop} and {step} must be finite")
    n = max(0, math.ceil((stop - start) / step)) if integers is None else len(integers)
    wide = _wide(backend)
    x = ops.cast(iota(backend, n), wide)
    x = ops.scalar("mul", (x, literal(x, float(step))))
    x = ops.scalar("add", (x, literal(x, float(start))))
    return wrap(ops.cast(x, found.native))


def _arange_of_integers(backend: Backend, numbers: range, dtype: DType) -> Array:
    if len(numbers):
        for v in (numbers[0], numbers[-1]):
            check_scalar("arange", dtype, v)
    # Products and sums wrap, so the last number fits even if the step does not.
    bits = dtype.bits
    unsigned = iota(backend, len(numbers), BY_NAME[f"uint{bits}"])
    first, step = (v % (1 << bits) for v in (numbers.start, numbers.step))
    x = ops.scalar("mul", (unsigned, literal(unsigned, step)))
    x = ops.scalar("add", (x, literal(x, first)))
    return wrap(ops.bitcast(x, dtype.native) if dtype.kind == "i" else x)


def _wide(backend: Backend) -> str:
    """The widest float type of a device, in which coordinates are computed."""
    return "f64" if "f64" in backend.supported_dtypes else "f32"


def linspace(
    start: float,
    stop: float,
    /,
    num: int,
    *,
    dtype: DType | None = None,
    device: DeviceLike = None,
    endpoint: builtins.bool = True,
) -> Array:
    """``num`` numbers at equal distances from ``start`` to ``stop``, without ``stop`` if not ``endpoint``."""
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    if found.kind != "f":
        raise DTypeError(f"linspace makes floats, not {found}")
    if integer("linspace", "num", num) < 0:
        raise ArgumentError(f"linspace: {num} is not a number of elements")
    for v in (start, stop):
        if isinstance(v, (builtins.bool, complex)) or not isinstance(v, (int, float)):
            raise DTypeError(f"linspace takes integers and floats, not {v!r}")
    backend = backend_of(device)
    parts = num - 1 if endpoint else num
    a, b = float(start), float(stop)
    step = (b - a) / parts if parts > 0 else math.nan
    if math.isinf(step) and math.isfinite(a) and math.isfinite(b):
        step = b / parts - a / parts
    k = iota(backend, num)
    x = ops.cast(k, _wide(backend))
    first = literal(x, a)
    if parts > 0:
        x = ops.scalar("add", (ops.scalar("mul", (x, literal(x, step))), first))
        x = select(ops.scalar("eq", (k, literal(k, 0))), first, x)
    else:
        x = ops.expand(first, (num,))
    if endpoint and num > 1:
        x = select(ops.scalar("eq", (k, literal(k, num - 1))), literal(x, b), x)
    return wrap(ops.cast(x, found.native))


def eye(
    n_rows: int,
    n_cols: int | None = None,
    /,
    *,
    k: int = 0,
    dtype: DType | None = None,
    device: DeviceLike = None,
) -> Array:
    """A matrix with ones on the diagonal ``k`` places above the main one, and zeros elsewhere."""
    shape = shape_of("eye", (n_rows, n_rows if n_cols is None else n_cols))
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    distance = _diagonal_of(backend_of(device), shape)
    on = ops.scalar("eq", (distance, literal(distance, _near(k))))
    return wrap(ops.cast(on, found.native))


def _near(k: int) -> int:
    """A diagonal as an integer of 64 bits; diagonals beyond are as far outside as any."""
    limit = iinfo(DEFAULT_INT).max
    return max(-limit, min(limit, k))


def _diagonal_of(backend: Backend, shape: Sequence[int]) -> Tensor:
    """The number of the diagonal of each element of a matrix: its column less its row."""
    rows = ops.reshape(iota(backend, shape[0]), (shape[0], 1))
    return ops.scalar("sub", (iota(backend, shape[1]), rows))


def tril(x: Array, /, *, k: int = 0) -> Array:
    """Matrices with zeros above the diagonal ``k`` places above the main one."""
    return _triangle("tril", x, "le", k)


def triu(x: Array, /, *, k: int = 0) -> Array:
    """Matrices with zeros below the diagonal ``k`` places above the main one."""
    return _triangle("triu", x, "ge", k)


def _triangle(op: str, x: Array, keeps: str, k: int) -> Array:
    as_array(op, x)
    if x.ndim < 2:
        raise ShapeError(f"{op} needs at least 2 axes, and the array has {x.ndim}")
    distance = _diagonal_of(x._tensor.backend, x.shape[-2:])
    kept = ops.scalar(keeps, (distance, literal(distance, _near(k))))
    return wrap(select(kept, x._tensor, literal(x._tensor, False if x._dtype is BOOL else 0)))


def meshgrid(*arrays: Array, indexing: Literal["xy", "ij"] = "xy") -> list[Array]:
    """Coordinates of a grid: one array per axis, made from the coordinates along the axes.

    With ``"xy"``, the first two axes of the results are swapped.
    """
    one_of("meshgrid", "indexing", indexing, ("xy", "ij"))
    for x in arrays:
        if as_array("meshgrid", x).ndim > 1:
            raise ShapeError(f"meshgrid takes arrays with one axis, and one has the shape {x.shape}")
    result_type(*arrays) if arrays else None
    n = len(arrays)
    order = list(range(n))
    if indexing == "xy" and n > 1:
        order[0], order[1] = 1, 0
    flat = [
        ops.reshape(x._tensor, [-1 if k == a else 1 for k in range(n)])
        for x, a in zip(arrays, order, strict=False)
    ]
    shape = broadcast_shapes("meshgrid", [t.shape for t in flat])
    return [wrap(ops.expand(t, shape)) for t in flat]
