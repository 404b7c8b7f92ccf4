"""The class of arrays."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from halcyon._errors import DTypeError, ShapeError, UnsupportedError
from halcyon._native import Tensor
from halcyon.array._devices import Device, DeviceLike, backend_of
from halcyon.array._dtypes import BY_NATIVE, DType, Scalar

if TYPE_CHECKING:
    from types import ModuleType

    import numpy as np
    from numpy.typing import DTypeLike, NDArray

__all__ = ["Array", "Operand", "wrap"]


class Array:
    """An array of the Python array API standard over a lazy tensor.

    Operations check shapes and element types at once and compute nothing. Reading a value computes it:
    ``float(x)``, ``bool(x)``, ``x.tolist()``, ``x.numpy()``, ``print(x)``. The tensor underneath is
    immutable. ``x += y`` and ``x[key] = y`` give this array a new tensor; arrays that were made from it
    before keep their values.

    Arrays are made by functions such as :func:`asarray` and :func:`zeros`.
    """

    __slots__ = ("__weakref__", "_dtype", "_tensor")

    _dtype: DType
    _tensor: Tensor

    # NumPy's operators give way, so mixing arrays of the two libraries is an error and not a slow surprise.
    __array_ufunc__ = None
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> Array:
        """Refuses: arrays are made by functions."""
        raise TypeError("arrays are made by functions such as halcyon.array.asarray")

    # Properties.

    @property
    def dtype(self) -> DType:
        """The element type."""
        return self._dtype

    @property
    def device(self) -> Device:
        """The device that the array is on."""
        return Device(self._tensor.backend)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the axes."""
        return self._tensor.shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self._tensor.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return self._tensor.size

    @property
    def nbytes(self) -> int:
        """The size of the elements in bytes."""
        return self._tensor.nbytes

    @property
    def T(self) -> Array:
        """The transposed matrix."""
        if self.ndim != 2:
            raise ShapeError(f"T needs 2 axes, and the array has {self.ndim}; use mT or permute_dims")
        return _linear.matrix_transpose(self)

    @property
    def mT(self) -> Array:
        """The array with its last two axes swapped."""
        return _linear.matrix_transpose(self)

    @property
    def is_ready(self) -> builtins.bool:
        """Whether the value is computed."""
        return self._tensor.is_ready

    # Reading.

    def _item(self, what: str) -> Scalar:
        """The only element of an array of rank 0."""
        if self._tensor.ndim != 0:
            raise DTypeError(
                f"{what} needs an array without axes, and the shape is {self.shape}; index or reduce it first"
            )
        return self._tensor.item()

    def __bool__(self) -> builtins.bool:
        return builtins.bool(self._item("bool()"))

    def __int__(self) -> int:
        return int(self._item("int()"))

    def __float__(self) -> float:
        return float(self._item("float()"))

    def __complex__(self) -> complex:
        return complex(self._item("complex()"))

    def __index__(self) -> int:
        if self._dtype.kind not in "iu":
            raise DTypeError(f"only integers can be indices, and the element type is {self._dtype}")
        return int(self._item("an index"))

    def item(self) -> Scalar:
        """The only element, as a Python number. Computes the value."""
        return self._tensor.item()

    def tolist(self) -> Any:
        """The elements as nested lists of Python numbers, or one number. Computes the value."""
        flat: list[Any] = self._tensor.to_list()
        shape = self.shape
        if not shape:
            return flat[0]
        for n in reversed(shape[1:]):
            rows = len(flat) // n if n else 0
            flat = [flat[i * n : (i + 1) * n] for i in range(rows)]
        if not self.size:
            return _empty(shape)
        return flat

    def numpy(self) -> NDArray[Any]:
        """The value as a read-only NumPy array, without a copy where possible. Computes the value."""
        return _interop.to_numpy(self, None)

    def __array__(self, dtype: DTypeLike | None = None, copy: builtins.bool | None = None) -> NDArray[Any]:
        """The value for ``numpy.asarray``: read-only memory of the array, or a copy."""
        return _interop.array_protocol(self, dtype, copy)

    def __len__(self) -> int:
        shape = self._tensor.shape
        if not shape:
            raise DTypeError("an array without axes has no length")
        return shape[0]

    def __iter__(self) -> Iterator[Array]:
        return iter(_manipulation.unstack(self) if self.ndim else _no_axes())

    def __contains__(self, value: Array | Scalar) -> builtins.bool:
        return builtins.bool(_utility.any(_binary.equal(self, value)))

    def __repr__(self) -> str:
        return _repr.text(self)

    def __str__(self) -> str:
        return _repr.short(self)

    def _repr_html_(self) -> str:
        return _repr.html(self)

    def __format__(self, spec: str) -> str:
        return format(self._item("format()"), spec) if spec else str(self)

    # Exchange with other libraries.

    def __array_namespace__(self, /, *, api_version: str | None = None) -> ModuleType:
        """The functions for this array: the module ``halcyon.array``."""
        return _info.namespace(api_version)

    def __dlpack__(
        self,
        /,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: builtins.bool | None = None,
    ) -> Any:
        """A DLPack capsule of the value. Computes the value.

        On CUDA and ROCm devices the capsule has the memory of the device, else host memory. The value is
        complete, so a consumer may use it in any stream.
        """
        return _interop.to_dlpack(self, stream, max_version, dl_device, copy)

    def __dlpack_device__(self, /) -> tuple[int, int]:
        """The DLPack device of the capsules: a CUDA or ROCm device, or the host."""
        return _interop.dlpack_device(self)

    def to_device(self, device: DeviceLike, /, *, stream: None = None) -> Array:
        """The array on another device. Moving computes the value."""
        if stream is not None:
            raise UnsupportedError("to_device: streams are not supported; leave stream out")
        return wrap(self._tensor.to(backend_of(device)))

    def __copy__(self) -> Array:
        return wrap(self._tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        return wrap(self._tensor)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (_interop.rebuild, (self._tensor.to_bytes(), self.shape, self._dtype.name))

    # Indexing.

    def __getitem__(self, key: Any, /) -> Array:
        return _indexing.getitem(self, key)

    def __setitem__(self, key: Any, value: Array | Scalar, /) -> None:
        self._tensor = _indexing.setitem(self, key, value)

    # Arithmetic.

    def __abs__(self, /) -> Array:
        return _unary.abs(self)

    def __neg__(self, /) -> Array:
        return _unary.negative(self)

    def __pos__(self, /) -> Array:
        return _unary.positive(self)

    def __invert__(self, /) -> Array:
        return _unary.bitwise_invert(self)

    def __add__(self, other: Operand, /) -> Array:
        return _binary.add(self, other) if _fits(other) else NotImplemented

    def __sub__(self, other: Operand, /) -> Array:
        return _binary.subtract(self, other) if _fits(other) else NotImplemented

    def __mul__(self, other: Operand, /) -> Array:
        return _binary.multiply(self, other) if _fits(other) else NotImplemented

    def __truediv__(self, other: Operand, /) -> Array:
        return _binary.divide(self, other) if _fits(other) else NotImplemented

    def __floordiv__(self, other: Operand, /) -> Array:
        return _binary.floor_divide(self, other) if _fits(other) else NotImplemented

    def __mod__(self, other: Operand, /) -> Array:
        return _binary.remainder(self, other) if _fits(other) else NotImplemented

    def __pow__(self, other: Operand, /) -> Array:
        return _binary.pow(self, other) if _fits(other) else NotImplemented

    def __matmul__(self, other: Array, /) -> Array:
        return _linear.matmul(self, other) if _is_array(other) else NotImplemented

    def __and__(self, other: Operand, /) -> Array:
        return _binary.bitwise_and(self, other) if _fits(other) else NotImplemented

    def __or__(self, other: Operand, /) -> Array:
        return _binary.bitwise_or(self, other) if _fits(other) else NotImplemented

    def __xor__(self, other: Operand, /) -> Array:
        return _binary.bitwise_xor(self, other) if _fits(other) else NotImplemented

    def __lshift__(self, other: Operand, /) -> Array:
        return _binary.bitwise_left_shift(self, other) if _fits(other) else NotImplemented

    def __rshift__(self, other: Operand, /) -> Array:
        return _binary.bitwise_right_shift(self, other) if _fits(other) else NotImplemented

    # Reflected arithmetic.

    def __radd__(self, other: Operand, /) -> Array:
        return _binary.add(other, self) if _fits(other) else NotImplemented

    def __rsub__(self, other: Operand, /) -> Array:
        return _binary.subtract(other, self) if _fits(other) else NotImplemented

    def __rmul__(self, other: Operand, /) -> Array:
        return _binary.multiply(other, self) if _fits(other) else NotImplemented

    def __rtruediv__(self, other: Operand, /) -> Array:
        return _binary.divide(other, self) if _fits(other) else NotImplemented

    def __rfloordiv__(self, other: Operand, /) -> Array:
        return _binary.floor_divide(other, self) if _fits(other) else NotImplemented

    def __rmod__(self, other: Operand, /) -> Array:
        return _binary.remainder(other, self) if _fits(other) else NotImplemented

    def __rpow__(self, other: Operand, /) -> Array:
        return _binary.pow(other, self) if _fits(other) else NotImplemented

    def __rmatmul__(self, other: Array, /) -> Array:
        return _linear.matmul(other, self) if _is_array(other) else NotImplemented

    def __rand__(self, other: Operand, /) -> Array:
        return _binary.bitwise_and(other, self) if _fits(other) else NotImplemented

    def __ror__(self, other: Operand, /) -> Array:
        return _binary.bitwise_or(other, self) if _fits(other) else NotImplemented

    def __rxor__(self, other: Operand, /) -> Array:
        return _binary.bitwise_xor(other, self) if _fits(other) else NotImplemented

    def __rlshift__(self, other: Operand, /) -> Array:
        return _binary.bitwise_left_shift(other, self) if _fits(other) else NotImplemented

    def __rrshift__(self, other: Operand, /) -> Array:
        return _binary.bitwise_right_shift(other, self) if _fits(other) else NotImplemented

    # Updates: the array gets the tensor of the result.

    def _update(self, op: str, new: Array) -> Array:
        if new._dtype is not self._dtype:
            raise DTypeError(f"{op}: the result has the type {new._dtype}, and the array is {self._dtype}")
        if new.shape != self.shape:
            raise ShapeError(f"{op}: the result has the shape {new.shape}, and the array is {self.shape}")
        self._tensor = new._tensor
        return self

    def __iadd__(self, other: Operand, /) -> Array:
        return self._update("+=", _binary.add(self, other)) if _fits(other) else NotImplemented

    def __isub__(self, other: Operand, /) -> Array:
        return self._update("-=", _binary.subtract(self, other)) if _fits(other) else NotImplemented

    def __imul__(self, other: Operand, /) -> Array:
        return self._update("*=", _binary.multiply(self, other)) if _fits(other) else NotImplemented

    def __itruediv__(self, other: Operand, /) -> Array:
        return self._update("/=", _binary.divide(self, other)) if _fits(other) else NotImplemented

    def __ifloordiv__(self, other: Operand, /) -> Array:
        return self._update("//=", _binary.floor_divide(self, other)) if _fits(other) else NotImplemented

    def __imod__(self, other: Operand, /) -> Array:
        return self._update("%=", _binary.remainder(self, other)) if _fits(other) else NotImplemented

    def __ipow__(self, other: Operand, /) -> Array:
        return self._update("**=", _binary.pow(self, other)) if _fits(other) else NotImplemented

    def __imatmul__(self, other: Array, /) -> Array:
        return self._update("@=", _linear.matmul(self, other)) if _is_array(other) else NotImplemented

    def __iand__(self, other: Operand, /) -> Array:
        return self._update("&=", _binary.bitwise_and(self, other)) if _fits(other) else NotImplemented

    def __ior__(self, other: Operand, /) -> Array:
        return self._update("|=", _binary.bitwise_or(self, other)) if _fits(other) else NotImplemented

    def __ixor__(self, other: Operand, /) -> Array:
        return self._update("^=", _binary.bitwise_xor(self, other)) if _fits(other) else NotImplemented

    def __ilshift__(self, other: Operand, /) -> Array:
        new = _binary.bitwise_left_shift(self, other) if _fits(other) else None
        return NotImplemented if new is None else self._update("<<=", new)

    def __irshift__(self, other: Operand, /) -> Array:
        new = _binary.bitwise_right_shift(self, other) if _fits(other) else None
        return NotImplemented if new is None else self._update(">>=", new)

    # Comparison.

    def __eq__(self, other: Operand, /) -> Array:  # type: ignore[override]
        return _binary.equal(self, other) if _fits(other) else NotImplemented

    def __ne__(self, other: Operand, /) -> Array:  # type: ignore[override]
        return _binary.not_equal(self, other) if _fits(other) else NotImplemented

    def __lt__(self, other: Operand, /) -> Array:
        return _binary.less(self, other) if _fits(other) else NotImplemented

    def __le__(self, other: Operand, /) -> Array:
        return _binary.less_equal(self, other) if _fits(other) else NotImplemented

    def __gt__(self, other: Operand, /) -> Array:
        return _binary.greater(self, other) if _fits(other) else NotImplemented

    def __ge__(self, other: Operand, /) -> Array:
        return _binary.greater_equal(self, other) if _fits(other) else NotImplemented


Operand: TypeAlias = Union[Array, builtins.bool, int, float, "np.generic"]
"""An operand of an element-wise operation: an array or a Python number. A number of NumPy counts as the
Python number with its value."""


def wrap(tensor: Tensor) -> Array:
    """The array over a tensor."""
    x = object.__new__(Array)
    x._tensor = tensor
    try:
        x._dtype = BY_NATIVE[tensor.dtype]
    except KeyError:
        raise DTypeError(
            f"arrays of {tensor.dtype} are not supported; convert to another type first"
        ) from None
    return x


def _fits(other: object) -> builtins.bool:
    """Whether an operator's operand is an array or a number. Complex numbers pass, for their own error."""
    return (
        isinstance(other, (Array, int, float, complex)) or _core.is_numpy_number(other) or _asks_other(other)
    )


def _is_array(other: object) -> builtins.bool:
    """Whether an operand is an array."""
    return isinstance(other, Array) or _asks_other(other)


def _asks_other(other: object) -> builtins.bool:
    """False: Python asks the operand's own operator. An array of NumPy has none, and is refused by name."""
    if _core.is_numpy_array(other):
        what = "an array of NumPy is no operand; convert it with halcyon.array.asarray"
        raise DTypeError(f"{what}, or this array with numpy.asarray")
    return False


def _empty(shape: tuple[int, ...]) -> list[Any]:
    """Nested lists without elements."""
    return [_empty(shape[1:]) for _ in range(shape[0])] if len(shape) > 1 else []


def _no_axes() -> tuple[Array, ...]:
    raise DTypeError("an array without axes cannot be iterated over")


# These modules need the class.
from halcyon.array import (  # noqa: E402
    _binary,
    _core,
    _indexing,
    _info,
    _interop,
    _linear,
    _manipulation,
    _repr,
    _unary,
    _utility,
)
