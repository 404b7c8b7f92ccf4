"""Exceptions of Halcyon.

Each class derives from :class:`HalcyonError` and from the built-in exception that a caller would expect.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CancelledError",
    "DTypeError",
    "DonatedError",
    "DriverError",
    "EndlessError",
    "FileError",
    "FormatError",
    "HalcyonError",
    "HalcyonWarning",
    "LinAlgError",
    "MixedDevicesError",
    "OutOfMemoryError",
    "OutOfRangeError",
    "ShapeError",
    "UnavailableError",
    "UnsupportedError",
]


class HalcyonError(RuntimeError):
    """An error of Halcyon. The message has the facts and the next step."""


def at_least(what: str, least: int = 0, **numbers: object) -> None:
    """Refuses integers below a limit, by the names of their arguments."""
    for name, n in numbers.items():
        if isinstance(n, int) and n < least:
            raise ArgumentError(f"{what}: {name}: {n}: expected at least {least}")


class HalcyonWarning(UserWarning):
    """Something that was asked for and has no effect, or was replaced. The message names it."""


class ShapeError(HalcyonError, ValueError):
    """Shapes that do not fit together."""


class DTypeError(HalcyonError, TypeError):
    """An element type that an operation does not accept."""


class ArgumentError(HalcyonError, ValueError):
    """An invalid argument."""


class LinAlgError(ArgumentError):
    """A matrix that linear algebra cannot work with, such as a singular one."""


class UnsupportedError(HalcyonError, NotImplementedError):
    """Something that Halcyon does not support. The message names it."""


class UnavailableError(HalcyonError):
    """A backend, library or device that this machine lacks."""


class OutOfMemoryError(HalcyonError, MemoryError):
    """A device does not have enough free memory."""


class DriverError(HalcyonError):
    """A call into a driver failed, or its compiler rejected a kernel."""


class DonatedError(HalcyonError):
    """A tensor whose memory was given to a result."""


class MixedDevicesError(HalcyonError, ValueError):
    """Operands of one operation on two devices."""


class OutOfRangeError(HalcyonError, IndexError):
    """An index that is out of range."""


class CancelledError(HalcyonError):
    """A run that another thread cancelled."""


class EndlessError(HalcyonError):
    """A loop of a model that exceeded its maximum number of iterations."""


class FormatError(HalcyonError, ValueError):
    """A malformed file."""


class FileError(HalcyonError, OSError):
    """A file that cannot be read or written."""
