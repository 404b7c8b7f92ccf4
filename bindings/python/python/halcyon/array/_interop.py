"""Exchange of memory with NumPy and other libraries.

Memory that is shared with another library must not change while an array uses it. Halcyon never writes to it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from halcyon import _native
from halcyon._default import resolve_backend
from halcyon._errors import ArgumentError, DTypeError
from halcyon._native import Backend, Tensor
from halcyon.array._array import Array, wrap
from halcyon.array._dtypes import BY_NAME, DType, check_scalar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import DTypeLike, NDArray

__all__ = [
    "CPU",
    "array_protocol",
    "dlpack_device",
    "from_dlpack",
    "import_foreign",
    "pack",
    "rebuild",
    "to_dlpack",
    "to_numpy",
]

CPU = (1, 0)
"""The DLPack device of host memory."""

_VERSION = (1, 1)
# DLPack's numbers of devices whose memory the host can read: host memory, and pinned memory of CUDA.
_HOST = (1, 3)
# And of devices whose memory Halcyon uses by its address: their backends and DLPack's default streams.
_DEVICES = {2: ("cuda", 1), 10: ("rocm", 0)}


def _host_backend() -> Backend:
    """The default backend if it is the CPU, or else the CPU."""
    default = resolve_backend(None)
    return default if default.kind == "cpu" else resolve_backend("cpu")


# Arrays of other libraries become arrays of Halcyon.


def import_foreign(obj: Any, backend: Backend | None, copy: builtins.bool | None) -> Array | None:
    """The array of an object of another library; None if the object has no memory to read.

    The memory is shared only if ``copy`` is False.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, (numpy.ndarray, numpy.generic)):
        if isinstance(obj, numpy.generic) and copy is False:
            return None
        return _from_numpy(obj, backend or resolve_backend(None), copy is not False)
    if hasattr(obj, "__dlpack__"):
        try:
            return from_dlpack(obj, backend, copy is not False, is_default=backend is None)
        except BufferError as e:
            raise ArgumentError(f"asarray: {e}") from e
    if hasattr(obj, "__array_interface__") or hasattr(obj, "__array__"):
        return _from_buffer(obj, backend, copy)
    if isinstance(obj, (list, tuple, int, float, complex, str)) or obj is None:
        return None
    try:
        memoryview(obj)
    except TypeError:
        return None
    return _from_buffer(obj, backend, copy)


def _from_buffer(obj: Any, backend: Backend | None, copy: builtins.bool | None) -> Array:
    import numpy as np

    has_array = hasattr(obj, "__array_interface__") or hasattr(obj, "__array__")
    array = np.asarray(obj if has_array else memoryview(obj))
    return _from_numpy(array, backend or resolve_backend(None), copy is not False)


def _from_numpy(array: Any, backend: Backend, copy: builtins.bool | None) -> Array:
    kind = array.dtype
    name = str(kind)
    if name not in BY_NAME:
        if kind.kind in "biuf" and kind.newbyteorder("=").name in BY_NAME and copy is not False:
            array = array.astype(kind.newbyteorder("="))
        else:
            what = "complex: Halcyon has no complex types" if kind.kind == "c" else "not supported"
            raise DTypeError(f"asarray: the NumPy type {name} is {what}; convert the array first")
    native = "bf16" if name == "bfloat16" else None
    return wrap(_native.from_array_interface(backend, array, copy, native))


def from_dlpack(
    obj: Any, backend: Backend | None, copy: builtins.bool | None, is_default: builtins.bool = False
) -> Array:
    """The array of an object with ``__dlpack__``."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(obj, numpy.ndarray):
        target = backend or (resolve_backend(None) if is_default else _host_backend())
        # NumPy before 2.1 does not export read-only memory by DLPack.
        return _shared(lambda: _from_numpy(obj, target, copy), copy)
    kind, number = (int(n) for n in obj.__dlpack_device__())
    options: dict[str, Any] = {"max_version": _VERSION}
    if kind in _HOST:
        target = backend or (resolve_backend(None) if is_default else _host_backend())
    elif kind in _DEVICES and (backend is None or backend.id == f"{_DEVICES[kind][0]}:{number}"):
        name, stream = _DEVICES[kind]
        target = backend or resolve_backend(f"{name}:{number}")
        # The producer makes this stream wait for its work, and the import waits for the stream.
        options["stream"] = stream
    elif copy is False:
        raise BufferError(
            f"from_dlpack: the memory is on the device ({kind}, {number}), and copy=False forbids to move it"
        )
    else:
        target = backend or _host_backend()
        options["dl_device"] = CPU
    try:
        capsule = obj.__dlpack__(**options)
    except TypeError:
        # A producer of a standard before 2023.12 takes a stream and no other option.
        if "dl_device" in options:
            raise BufferError(
                f"from_dlpack: {type(obj).__name__} cannot copy its memory to the host; "
                "move it to the CPU first"
            ) from None
        del options["max_version"]
        capsule = obj.__dlpack__(**options)
    return _shared(lambda: wrap(_native.from_dlpack(target, capsule, copy)), copy)


def _shared(make: Callable[[], Array], copy: builtins.bool | None) -> Array:
    """The array of memory. That it cannot be shared is a buffer error."""
    try:
        return make()
    except ArgumentError as e:
        if copy is False:
            raise BufferError(str(e)) from e
        raise


# Arrays of Halcyon become arrays of other libraries.


def to_dlpack(
    x: Array,
    stream: int | None,
    max_version: tuple[int, int] | None,
    dl_device: tuple[int, int] | None,
    copy: builtins.bool | None,
) -> object:
    """A DLPack capsule of the value, in the memory of its device or, if asked for, in host memory."""
    own = dlpack_device(x)
    wanted = own if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
    if wanted not in (own, CPU):
        raise BufferError(f"__dlpack__: the device {dl_device} is not supported; ask for {own} or {CPU}")
    if own == CPU and stream is not None:
        raise ArgumentError(f"__dlpack__: the memory is on the host, which has no stream {stream}; give None")
    if wanted != own and copy is False:
        raise BufferError(f"__dlpack__: the memory is on the device {own}, and copy=False forbids to move it")
    # The export waits until the value is computed, so it needs no stream.
    versioned = max_version is not None and max_version[0] >= 1
    # A capsule before version 1 cannot say that memory is read-only, so it has a copy, unless the consumer
    # forbids one.
    return _native.to_dlpack(x._tensor, versioned, copy, copy is False and not versioned, wanted != CPU)


def dlpack_device(x: Array) -> tuple[int, int]:
    """The DLPack device of the array's capsules."""
    return _native.dlpack_device(x._tensor)


def to_numpy(x: Array, copy: builtins.bool | None) -> NDArray[Any]:
    """The value as a NumPy array: read-only memory of the array, or memory of its own with ``copy``."""
    import numpy as np

    dtype = numpy_dtype(x._dtype)
    if x._dtype.name == "bfloat16":
        # NumPy's DLPack does not know the type.
        whole = np.asarray(wrap(_native.ops.bitcast(x._tensor, "u16")).numpy()).view(dtype)
        return whole.copy() if copy else whole
    if not _has_versions(np):
        data = np.frombuffer(x._tensor.to_bytes(), dtype).reshape(x.shape)
        return data.copy() if copy else data
    if dlpack_device(x) != CPU:
        x = wrap(x._tensor.to(_host_backend()))
    made: NDArray[Any] = np.from_dlpack(x, copy=copy)
    return made


def _has_versions(np: Any) -> builtins.bool:
    """Whether NumPy takes capsules that can say that memory is read-only."""
    major, minor = (int(v) for v in np.__version__.split(".")[:2])
    return (major, minor) >= (2, 1)


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """NumPy's element type."""
    import numpy as np

    if dtype.name != "bfloat16":
        return np.dtype(dtype.name)
    try:
        import ml_dtypes
    except ImportError:
        raise DTypeError(
            "NumPy has no bfloat16; install ml_dtypes, or convert with astype(x, halcyon.array.float32)"
        ) from None
    made: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return made


def array_protocol(x: Array, dtype: DTypeLike | None, copy: builtins.bool | None) -> NDArray[Any]:
    """The value for ``numpy.asarray`` and ``numpy.array``."""
    import numpy as np

    own = numpy_dtype(x._dtype)
    if dtype is None or np.dtype(dtype) == own:
        if copy is False and x.device.backend.kind != "cpu":
            raise ArgumentError(
                f"numpy.asarray: the array is on {x.device}, and copy=False forbids to move it"
            )
        return to_numpy(x, True if copy else None)
    if copy is False:
        raise ArgumentError(f"numpy.asarray: converting {own} to {np.dtype(dtype)} needs a copy")
    return to_numpy(x, None).astype(dtype)


# Bytes.


def pack(values: Sequence[builtins.bool | int | float], dtype: DType) -> bytes:
    """Python numbers as the bytes of elements of a type."""
    import numpy as np

    if dtype.name == "bfloat16":
        # The nearest bfloat16 to a float64 is found by the cast of the tensor.
        wide = Tensor.from_bytes(_cpu(), np.array(values, np.float64).tobytes(), (len(values),), "f64")
        return _native.ops.cast(wide, "bf16").to_bytes()
    if dtype.kind in "iu":
        for v in (min(values, default=0), max(values, default=0)):
            check_scalar("asarray", dtype, int(v))
    # Numbers past the largest float become infinite, as in casts.
    with np.errstate(over="ignore"):
        return np.array(values, dtype.name).tobytes()


def _cpu() -> Backend:
    return resolve_backend("cpu")


def rebuild(data: bytes, shape: tuple[int, ...], dtype: str) -> Array:
    """The array of its bytes, on the default device. Pickles call it."""
    return wrap(Tensor.from_bytes(resolve_backend(None), data, shape, BY_NAME[dtype].native))
