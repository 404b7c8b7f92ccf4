"""Arrays as inputs and outputs of sessions.

The native module calls these functions for what is not a plain array of NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halcyon import _native
from halcyon._errors import ArgumentError, DTypeError, UnsupportedError

Array = npt.NDArray[Any]

#: NumPy's names of our element types.
_NUMPY = {
    "bool": "bool",
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    "i8": "int8",
    "i16": "int16",
    "i32": "int32",
    "i64": "int64",
    "f16": "float16",
    "f32": "float32",
    "f64": "float64",
}
#: The types that NumPy lacks: the name in the package ``ml_dtypes``, and the type that stores the bits.
_OTHER = {
    "bf16": ("bfloat16", "uint16"),
    "f8e4m3fn": ("float8_e4m3fn", "uint8"),
    "f8e4m3fnuz": ("float8_e4m3fnuz", "uint8"),
    "f8e5m2": ("float8_e5m2", "uint8"),
    "f8e5m2fnuz": ("float8_e5m2fnuz", "uint8"),
    "f8e8m0": ("float8_e8m0fnu", "uint8"),
    "f4e2m1": ("float4_e2m1fn", "uint8"),
    "i4": ("int4", "int8"),
    "u4": ("uint4", "uint8"),
    "i2": ("int2", "int8"),
    "u2": ("uint2", "uint8"),
}

#: Each element type: ONNX's number, ONNX's name, our name (None for types that tensors of numbers lack).
ELEMENTS: tuple[tuple[int, str, str | None], ...] = (
    (1, "float", "f32"),
    (2, "uint8", "u8"),
    (3, "int8", "i8"),
    (4, "uint16", "u16"),
    (5, "int16", "i16"),
    (6, "int32", "i32"),
    (7, "int64", "i64"),
    (8, "string", None),
    (9, "bool", "bool"),
    (10, "float16", "f16"),
    (11, "double", "f64"),
    (12, "uint32", "u32"),
    (13, "uint64", "u64"),
    (16, "bfloat16", "bf16"),
    (17, "float8e4m3fn", "f8e4m3fn"),
    (18, "float8e4m3fnuz", "f8e4m3fnuz"),
    (19, "float8e5m2", "f8e5m2"),
    (20, "float8e5m2fnuz", "f8e5m2fnuz"),
    (21, "uint4", "u4"),
    (22, "int4", "i4"),
    (23, "float4e2m1", "f4e2m1"),
    (24, "float8e8m0", "f8e8m0"),
    (25, "uint2", "u2"),
    (26, "int2", "i2"),
)
_BY_NUMBER = {number: (name, own) for number, name, own in ELEMENTS}
_BY_OWN = {own: (number, name) for number, name, own in ELEMENTS}


@functools.cache
def _ml_dtype(name: str) -> np.dtype[Any] | None:
    """The dtype of ``ml_dtypes`` with this name; None if the package or the type is missing."""
    try:
        import ml_dtypes
    except ImportError:
        return None
    found = getattr(ml_dtypes, name, None)
    return None if found is None else np.dtype(found)


@functools.cache
def numpy_dtype(own: str) -> np.dtype[Any]:
    """The dtype of arrays of an element type: NumPy's, that of ``ml_dtypes``, or the type of the bits."""
    if own in _NUMPY:
        return np.dtype(_NUMPY[own])
    name, storage = _OTHER[own]
    found = _ml_dtype(name)
    return np.dtype(storage) if found is None else found


def typed(array: Array, own: str) -> Array:
    """An array of bits as an array of a type that NumPy lacks."""
    return array.view(numpy_dtype(own))


@functools.cache
def _own_names() -> dict[str, str]:
    names = {numpy: own for own, numpy in _NUMPY.items()}
    names.update({ml: own for own, (ml, _) in _OTHER.items()})
    return names


def own_name(dtype: np.dtype[Any]) -> str | None:
    """Our name of an array's element type; None if it is not the type of a tensor of numbers."""
    return _own_names().get(dtype.name)


def is_stored(dtype: np.dtype[Any], own: str | None) -> bool:
    """Whether arrays of this dtype may hold the element type: as the type itself, or as its bits."""
    return own_name(dtype) == own or (own in _OTHER and dtype.name == _OTHER[own][1])


def plain(array: Array, own: str) -> Array | None:
    """The elements as a plain array in the machine's byte order, with the bits of types that NumPy lacks.

    None if the array does not have the element type ``own``.
    """
    if own_name(array.dtype) != own:
        return None
    if own in _NUMPY:
        return array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(array.shape).view(_OTHER[own][1])


def bits(array: Array, own: str) -> Array:
    """An array of the element type ``own``, or of its bits, as an array that the native module reads."""
    if own in _NUMPY or own_name(array.dtype) != own:
        return array
    found = plain(array, own)
    assert found is not None
    return found


def _of_numbers(value: Any, own: str) -> Array:
    """Numbers and lists as an array. Integers that the element type cannot hold are a ValueError."""
    found, dtype = np.asarray(value), numpy_dtype(own)
    if not found.size:
        return np.empty(found.shape, dtype)
    if found.dtype.kind in "iu" and own[1:].isdigit() and own[0] in "iu":
        bits, is_signed = int(own[1:]), own[0] == "i"
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if is_signed else (0, (1 << bits) - 1)
        outside = [int(n) for n in (found.min(), found.max()) if not low <= int(n) <= high]
        if outside:
            raise ValueError(f"{outside[0]} is not between {low} and {high}, the limits of {own}")
        return found.astype(dtype)
    return found.astype(dtype, casting="same_kind")


def as_array(value: Any, own: str, name: str) -> Array:
    """Numbers, lists and arrays of other libraries as an array for an input of the element type ``own``."""
    if isinstance(value, (np.generic, np.ndarray)):
        return np.asarray(value)
    if hasattr(value, "__dlpack__"):
        array, found = from_dlpack(value)
        if found != own and found in _OTHER:
            what = f"it takes {own}, but the array has the element type {found}"
            raise ArgumentError(f'run: input "{name}": {what}')
        return array
    if isinstance(value, (bool, int, float, list, tuple)):
        try:
            return _of_numbers(value, own)
        except (TypeError, ValueError) as e:
            raise ArgumentError(f'run: input "{name}": {e}') from e
    if hasattr(value, "__array__"):
        return np.asarray(value)
    what = f"a value of the type {type(value).__name__} is no array, list or number"
    raise ArgumentError(f'run: input "{name}": {what}')


def _capsule(value: Any) -> Any:
    """The capsule of an object with ``__dlpack__`` in host memory."""
    kind, _ = value.__dlpack_device__()
    if int(kind) not in (1, 3):
        what = f"values on a device of DLPack's kind {int(kind)}"
        raise UnsupportedError(f"not supported yet: {what}. Copy the value to the CPU first")
    try:
        return value.__dlpack__(max_version=(1, 1))
    except TypeError:
        # A producer of DLPack before 1.0.
        return value.__dlpack__()


def from_dlpack(value: Any) -> tuple[Array, str]:
    """An array that shares the memory of an object with ``__dlpack__``, or of a DLPack capsule.

    Returns the array and our name of its element type. NumPy's own function is not used, because it makes
    the memory of a capsule without a version read-only, and it lacks bfloat16 and float8.
    """
    if not hasattr(value, "__dlpack__") and type(value).__name__ != "PyCapsule":
        raise DTypeError(f"from_dlpack: a {type(value).__name__} has no __dlpack__ and is no capsule")
    try:
        lent = _native.lend(_capsule(value) if hasattr(value, "__dlpack__") else value)
    except (BufferError, RuntimeError) as e:
        raise ArgumentError(f"from_dlpack: {e}") from e
    return np.asarray(lent).view(numpy_dtype(lent.dtype)), lent.dtype


def strings(value: Any, name: str) -> tuple[tuple[int, ...], list[str]]:
    """Sizes and elements of an array or a list of strings."""
    array = np.asarray(value)
    if array.dtype.kind not in "UOST":
        what = f"it takes strings, the value has the element type {array.dtype}"
        raise ArgumentError(f'run: input "{name}": {what}')
    return array.shape, [_string(x) for x in array.ravel().tolist()]


def _string(x: Any) -> str:
    return x.decode() if isinstance(x, bytes) else str(x)


def string_array(values: Sequence[str], dims: tuple[int, ...]) -> Array:
    """An array of strings."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made.reshape(dims)


def element_of(element_type: Any) -> tuple[int, str, str | None]:
    """ONNX's number and name of an element type, and our name.

    It is given as ONNX's number or as a type of NumPy.
    """
    if isinstance(element_type, (int, np.integer)) and not isinstance(element_type, bool):
        number = int(element_type)
        if number in _BY_NUMBER:
            name, own = _BY_NUMBER[number]
            return number, name, own
        raise ArgumentError(f"element type: {number} is not a number of an ONNX element type")
    dtype = np.dtype(element_type)
    if dtype.kind in "UOST":
        return 8, "string", None
    found = own_name(dtype)
    if found is None:
        raise ArgumentError(f"element type: {dtype} has no ONNX element type")
    number, name = _BY_OWN[found]
    return number, name, found


def at_address(address: int, dtype: np.dtype[Any], shape: Sequence[int]) -> Array:
    """The array in memory of the caller, who keeps it alive."""

    class _Memory:
        __array_interface__ = {  # noqa: RUF012
            "version": 3,
            "typestr": np.dtype(f"u{dtype.itemsize}").str,
            "shape": tuple(shape),
            "data": (address, False),
        }

    return np.asarray(_Memory()).view(dtype)
