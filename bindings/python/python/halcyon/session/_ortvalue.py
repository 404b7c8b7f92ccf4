"""``OrtValue``: a value on a device, which a session takes and gives without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halcyon import _native
from halcyon._default import resolve_backend
from halcyon._errors import ArgumentError
from halcyon.session import _arrays
from halcyon.session._enums import DEVICE_KINDS, OrtDeviceVendorId
from halcyon.session.exceptions import NotImplemented as NotSupported

__all__ = ["OrtValue", "copy_tensors"]

Value = npt.NDArray[Any] | _native.Tensor | list[Any] | dict[Any, Any] | None


def device_name(device_type: str, device_id: int) -> str:
    """Our name of a device that is given as in onnxruntime."""
    kind = device_type.lower()
    if kind not in DEVICE_KINDS:
        raise ArgumentError(f'device: "{device_type}" is not one of {", ".join(DEVICE_KINDS)}')
    kind = {"hip": "rocm", "gpu": "auto"}.get(kind, kind)
    return kind if device_id == 0 else f"{kind}:{device_id}"


def is_cpu(device_type: str) -> bool:
    """Whether values of this device are arrays of NumPy."""
    return device_type.lower() == "cpu"


def on_device(array: npt.NDArray[Any], own: str, device: str) -> _native.Tensor:
    """A tensor on a device with an array's values."""
    backend = resolve_backend(device)
    return _native.from_array_interface(backend, _arrays.bits(array, own), copy=True, dtype=own)


class OrtValue:
    """A tensor, a list of tensors, or a value of another kind.

    A tensor on the CPU is an array of NumPy, whose memory it shares. A tensor on another device is a tensor
    of Halcyon.
    """

    __slots__ = ("__weakref__", "_element", "_type", "_value")

    _value: Value
    #: ONNX's number and name and our name of the element type.
    _element: tuple[int, str, str | None]
    #: ONNX's type as text.
    _type: str

    def __init__(self, ortvalue: OrtValue) -> None:
        if not isinstance(ortvalue, OrtValue):
            raise ArgumentError("OrtValue: make values with OrtValue.ortvalue_from_numpy and the like")
        self._value, self._element, self._type = ortvalue._value, ortvalue._element, ortvalue._type

    @classmethod
    def _make(cls, value: Value, element: tuple[int, str, str | None], type_text: str) -> OrtValue:
        made = cls.__new__(cls)
        made._value, made._element, made._type = value, element, type_text
        return made

    @classmethod
    def _of_result(cls, value: Value, type_text: str) -> OrtValue:
        """The value of a session's output of this type."""
        name = type_text.rpartition("(")[2].rstrip(")").rpartition(",")[2]
        element = next((e for e in _arrays.ELEMENTS if e[1] == name), (0, "undefined", None))
        return cls._make(value, element, type_text)

    @staticmethod
    def ortvalue_from_numpy(
        numpy_obj: npt.NDArray[Any],
        /,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int | OrtDeviceVendorId = -1,
    ) -> OrtValue:
        """The value of an array. On the CPU it shares the array's memory, if that is dense."""
        del vendor_id
        if not isinstance(numpy_obj, np.ndarray):
            raise ArgumentError(f"ortvalue_from_numpy: a {type(numpy_obj).__name__} is no array of NumPy")
        element = _arrays.element_of(numpy_obj.dtype)
        text = f"tensor({element[1]})"
        if element[2] is None:
            dims, values = _arrays.strings(numpy_obj, "value")
            return OrtValue._make(_arrays.string_array(values, dims), element, text)
        array = np.ascontiguousarray(numpy_obj).reshape(numpy_obj.shape)
        if is_cpu(device_type):
            return OrtValue._make(array, element, text)
        name = device_name(device_type, device_id)
        return OrtValue._make(on_device(array, element[2], name), element, text)

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: npt.NDArray[Any], /, onnx_element_type: int) -> OrtValue:
        """The value whose bits an array holds, for types that NumPy lacks, such as bfloat16 in uint16."""
        number, name, own = _arrays.element_of(onnx_element_type)
        if own is None:
            raise ArgumentError("ortvalue_from_numpy_with_onnx_type: strings have no bits")
        want = _arrays.numpy_dtype(own)
        if data.dtype.itemsize != want.itemsize:
            what = f"elements of {data.dtype.itemsize} bytes cannot hold {name}, which takes {want.itemsize}"
            raise ArgumentError(f"ortvalue_from_numpy_with_onnx_type: {what}")
        array = np.ascontiguousarray(data).reshape(data.shape).view(want)
        return OrtValue._make(array, (number, name, own), f"tensor({name})")

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int],
        element_type: Any,
        device_type: str = "cpu",
        device_id: int = 0,
        vendor_id: int | OrtDeviceVendorId = -1,
        memory_info: Any = None,
    ) -> OrtValue:
        """A tensor that is not initialised. The element type is ONNX's number or a type of NumPy."""
        del vendor_id
        if memory_info is not None:
            device_type, device_id = memory_info.name, memory_info.device_id
        element = _arrays.element_of(element_type)
        text = f"tensor({element[1]})"
        if element[2] is None:
            if not is_cpu(device_type):
                raise ArgumentError("ortvalue_from_shape_and_type: strings are on the CPU only")
            count = int(np.prod(shape, dtype=np.int64))
            return OrtValue._make(_arrays.string_array([""] * count, tuple(shape)), element, text)
        if is_cpu(device_type):
            return OrtValue._make(np.empty(tuple(shape), _arrays.numpy_dtype(element[2])), element, text)
        backend = resolve_backend(device_name(device_type, device_id))
        return OrtValue._make(_native.Tensor.full(backend, list(shape), 0, element[2]), element, text)

    @staticmethod
    def ort_value_from_sparse_tensor(sparse_tensor: Any) -> OrtValue:
        """Raises: sparse tensors are not supported.

        Raises:
            NotImplemented: Always.

        """
        del sparse_tensor
        raise NotSupported("not supported yet: sparse tensors as values. Give a dense tensor")

    as_sparse_tensor = ort_value_from_sparse_tensor

    @staticmethod
    def from_dlpack(data: Any, /, is_bool_tensor: bool = False) -> OrtValue:
        """The value of an object with ``__dlpack__``, or of a capsule. It shares the memory.

        ``is_bool_tensor``: the bytes are bools, for producers that have no such type.
        """
        found, own = _arrays.from_dlpack(data)
        if is_bool_tensor and own == "u8":
            found, own = found.view(np.bool_), "bool"
        number, name = _arrays._BY_OWN[own]
        array = np.ascontiguousarray(found).reshape(found.shape)
        return OrtValue._make(array, (number, name, own), f"tensor({name})")

    # Queries.

    @property
    def _halcyon_value(self) -> Value:
        return self._value

    @property
    def _ortvalue(self) -> OrtValue:
        return self

    def _get_c_value(self) -> OrtValue:
        return self

    def has_value(self) -> bool:
        """Whether there is a value: an empty optional has none."""
        return self._value is not None

    def is_tensor(self) -> bool:
        """Whether the value is a tensor."""
        return self._type.startswith("tensor(") or (
            self._type.startswith("optional(tensor(") and self._value is not None
        )

    def is_tensor_sequence(self) -> bool:
        """Whether the value is a list of tensors."""
        return self._type.startswith("seq(tensor(")

    def is_sparse_tensor(self) -> bool:
        """False: there are no sparse values."""
        return False

    def data_type(self) -> str:
        """ONNX's type, such as ``tensor(float)``."""
        return self._type

    def element_type(self) -> int:
        """The number of the element type in ONNX's ``TensorProto.DataType``."""
        return self._element[0]

    def shape(self) -> list[int]:
        """The sizes of a tensor."""
        return list(self._tensor_value("shape").shape)

    def _tensor_value(self, what: str) -> npt.NDArray[Any] | _native.Tensor:
        if isinstance(self._value, (np.ndarray, _native.Tensor)):
            return self._value
        raise ArgumentError(f"{what}: the value is {self._type}, which is no tensor")

    def tensor_size_in_bytes(self) -> int:
        """The size of a tensor's elements."""
        return int(self._tensor_value("tensor_size_in_bytes").nbytes)

    def device_name(self) -> str:
        """The kind of device, such as ``cpu`` and ``cuda``."""
        return self._value.backend.kind if isinstance(self._value, _native.Tensor) else "cpu"

    def data_ptr(self) -> int:
        """The address of a tensor on the CPU.

        Raises:
            NotImplemented: For tensors on other devices, whose addresses only their drivers know.

        """
        value = self._tensor_value("data_ptr")
        if isinstance(value, _native.Tensor):
            what = f"the address of a tensor on {value.backend.id}"
            raise NotSupported(f"not supported yet: {what}. Bind the value itself with bind_ortvalue_input")
        return int(value.ctypes.data)

    def numpy(self) -> npt.NDArray[Any]:
        """The tensor as an array, which shares the memory on the CPU and is a copy on other devices."""
        value = self._tensor_value("numpy")
        return _native.to_numpy(value) if isinstance(value, _native.Tensor) else value

    def to_list(self) -> list[Any]:
        """The values of a list."""
        if not isinstance(self._value, list):
            raise ArgumentError(f"to_list: the value is {self._type}, which is no list")
        return self._value

    def update_inplace(self, data: npt.NDArray[Any]) -> None:
        """Copies an array of the same type and sizes into the tensor.

        An array of unsigned integers may hold the bits of a type that NumPy lacks.

        Raises:
            ArgumentError: For an array of another type or other sizes, and for a tensor whose memory is
                read-only.

        """
        value, own = self._tensor_value("update_inplace"), self._element[2]
        if not isinstance(data, np.ndarray):
            raise ArgumentError(f"update_inplace: a {type(data).__name__} is no array of NumPy")
        is_same = _arrays.is_stored(data.dtype, own) if own else data.dtype.kind in "UOST"
        if tuple(data.shape) != tuple(value.shape) or not is_same:
            what = f"the tensor is {self._type}{self.shape()}, the array {data.dtype}{list(data.shape)}"
            raise ArgumentError(f"update_inplace: {what}")
        if isinstance(value, _native.Tensor):
            assert own is not None
            bits = _arrays.bits(data, own)
            self._value = _native.from_array_interface(value.backend, bits, copy=True, dtype=own)
            return
        if not value.flags.writeable:
            raise ArgumentError(
                "update_inplace: the memory of the tensor is read-only. Make the value of a copy"
            )
        np.copyto(value, data if own is None or own in _arrays._NUMPY else data.view(value.dtype))

    # DLPack.

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule of the tensor. On the CPU it shares the memory; on other devices it is a copy."""
        value = self._tensor_value("__dlpack__")
        if dl_device is not None and tuple(dl_device) != (1, 0):
            raise BufferError("the value can be exported to the CPU only")
        if isinstance(value, np.ndarray) and self._element[2] in _arrays._NUMPY:
            return _numpy_capsule(value, max_version, copy)
        if isinstance(value, np.ndarray):
            own = self._element[2]
            assert own is not None
            value = on_device(value, own, "cpu")
        is_versioned = max_version is not None and max_version[0] >= 1
        return _native.to_dlpack(value, is_versioned, copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        """The CPU, also for values on other devices, which are exported as copies."""
        return (1, 0)

    def to_dlpack(self) -> Any:
        """A capsule of the tensor, as :meth:`__dlpack__` gives it without a version."""
        return self.__dlpack__()

    def __repr__(self) -> str:
        sizes = self.shape() if isinstance(self._value, (np.ndarray, _native.Tensor)) else ""
        return f"OrtValue({self._type}{sizes} on {self.device_name()})"


def _numpy_capsule(array: npt.NDArray[Any], max_version: tuple[int, int] | None, copy: bool | None) -> Any:
    """NumPy's capsule of an array. NumPy before 2.1 has no options, and no copies."""
    if copy:
        array = array.copy()
    try:
        return array.__dlpack__(max_version=max_version)
    except TypeError:
        return array.__dlpack__()


def copy_tensors(src: Sequence[OrtValue], dst: Sequence[OrtValue], stream: Any = None) -> None:
    """Copies tensors into others of the same types and sizes.

    Raises:
        ArgumentError: For lists of different lengths, a stream, and tensors that differ in type or sizes.

    """
    if stream is not None:
        raise ArgumentError("copy_tensors: a stream has no effect; leave it out")
    if len(src) != len(dst):
        raise ArgumentError(f"copy_tensors: {len(src)} sources and {len(dst)} destinations")
    for one, other in zip(src, dst, strict=True):
        other.update_inplace(one.numpy())
