"""The real-valued functions of the ``fft`` extension of the standard.

The transforms themselves take or give complex numbers, which Halcyon does not have. They raise an error that
says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from halcyon._errors import ArgumentError, DTypeError
from halcyon.array._array import Array, wrap
from halcyon.array._core import as_array, axes_of, integer, iota, literal, ops, select
from halcyon.array._devices import DeviceLike, backend_of
from halcyon.array._dtypes import DEFAULT_FLOAT, DType, check_dtype
from halcyon.array._manipulation import roll

__all__ = [
    "fft",
    "fftfreq",
    "fftn",
    "fftshift",
    "hfft",
    "ifft",
    "ifftn",
    "ifftshift",
    "ihfft",
    "irfft",
    "irfftn",
    "rfft",
    "rfftfreq",
    "rfftn",
]

if TYPE_CHECKING:
    _Norm = Literal["backward", "ortho", "forward"]


def _complex(name: str, what: str) -> NoReturn:
    raise DTypeError(f"fft.{name}: its {what} is complex, and Halcyon has no complex types")


def fft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the transform is complex."""
    _complex("fft", "result")


def ifft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the transform is complex."""
    _complex("ifft", "result")


def fftn(
    x: Array,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Array:
    """Raises an error: the transform is complex."""
    _complex("fftn", "result")


def ifftn(
    x: Array,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Array:
    """Raises an error: the transform is complex."""
    _complex("ifftn", "result")


def rfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the transform is complex."""
    _complex("rfft", "result")


def irfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the operand is complex."""
    _complex("irfft", "operand")


def rfftn(
    x: Array,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Array:
    """Raises an error: the transform is complex."""
    _complex("rfftn", "result")


def irfftn(
    x: Array,
    /,
    *,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: _Norm = "backward",
) -> Array:
    """Raises an error: the operand is complex."""
    _complex("irfftn", "operand")


def hfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the operand is complex."""
    _complex("hfft", "operand")


def ihfft(x: Array, /, *, n: int | None = None, axis: int = -1, norm: _Norm = "backward") -> Array:
    """Raises an error: the transform is complex."""
    _complex("ihfft", "result")


def _frequencies(
    op: str, n: int, count: int, wraps: bool, d: float, dtype: DType | None, device: DeviceLike
) -> Array:
    """``k / (n d)`` for whole numbers k from 0 on; from the middle on less n, if the numbers wrap."""
    if integer(op, "n", n) < 1:
        raise ArgumentError(f"{op}: {n} is not a number of samples")
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    if found.kind != "f":
        raise DTypeError(f"{op} makes floats, not {found}")
    backend = backend_of(device)
    wide = "f64" if "f64" in backend.supported_dtypes else "f32"
    k: Any = ops.cast(iota(backend, count), wide)
    if wraps:
        is_upper = ops.scalar("ge", (k, literal(k, float((n + 1) // 2))))
        k = select(is_upper, ops.scalar("sub", (k, literal(k, float(n)))), k)
    return wrap(ops.cast(ops.scalar("mul", (k, literal(k, 1.0 / (n * d)))), found.native))


def fftfreq(n: int, /, *, d: float = 1.0, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """The frequencies of a discrete Fourier transform of ``n`` samples at a distance of ``d``."""
    return _frequencies("fftfreq", n, n, True, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: DType | None = None, device: DeviceLike = None) -> Array:
    """The frequencies that are not negative of a discrete Fourier transform of ``n`` samples."""
    return _frequencies("rfftfreq", n, n // 2 + 1, False, d, dtype, device)


def fftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """Moves the frequency 0 to the middle of axes, or of all axes."""
    all_axes = axes_of("fftshift", axes, as_array("fftshift", x).ndim)
    return roll(x, [x.shape[a] // 2 for a in all_axes], axis=all_axes) if all_axes else wrap(x._tensor)


def ifftshift(x: Array, /, *, axes: int | Sequence[int] | None = None) -> Array:
    """Undoes :func:`fftshift`."""
    all_axes = axes_of("ifftshift", axes, as_array("ifftshift", x).ndim)
    return roll(x, [-(x.shape[a] // 2) for a in all_axes], axis=all_axes) if all_axes else wrap(x._tensor)
