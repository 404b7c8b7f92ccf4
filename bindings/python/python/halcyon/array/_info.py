"""What the namespace offers: ``__array_namespace_info__``."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TypedDict

from halcyon._errors import ArgumentError
from halcyon.array import _devices
from halcyon.array._devices import Device, DeviceLike, backend_of
from halcyon.array._dtypes import BY_NAME, DEFAULT_FLOAT, DEFAULT_INT, DType, of_kind

__all__ = ["VERSION", "Info", "namespace"]

VERSION = "2024.12"
"""The version of the standard."""

_VERSIONS = ("2021.12", "2022.12", "2023.12", VERSION)

Capabilities = TypedDict(
    "Capabilities", {"boolean indexing": bool, "data-dependent shapes": bool, "max dimensions": "int | None"}
)


def namespace(api_version: str | None) -> ModuleType:
    """The module for a version of the standard."""
    if api_version is not None and api_version not in _VERSIONS:
        raise ArgumentError(f"the versions of the array API are {', '.join(_VERSIONS)}, not {api_version!r}")
    return sys.modules["halcyon.array"]


class Info:
    """Capabilities, devices and element types of the namespace. Complex types are not supported."""

    def capabilities(self) -> Capabilities:
        """What is supported.

        Boolean indexing and functions with data-dependent shapes compute their operand. The number of axes
        has no limit.
        """
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": None}

    def default_device(self) -> Device:
        """The device of new arrays."""
        return _devices.default_device()

    def default_dtypes(self, *, device: DeviceLike = None) -> dict[str, DType | None]:
        """The element types that functions use if none is given. There is no complex one."""
        backend_of(device)
        return {
            "real floating": DEFAULT_FLOAT,
            "complex floating": None,
            "integral": DEFAULT_INT,
            "indexing": DEFAULT_INT,
        }

    def dtypes(
        self, *, device: DeviceLike = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """The standard's element types that a device computes with, all or those of some kinds."""
        known = backend_of(device).supported_dtypes
        kinds = ("bool", "numeric") if kind is None else (kind,) if isinstance(kind, str) else kind
        wanted = [d for k in kinds for d in of_kind(k)]
        return {n: d for n, d in BY_NAME.items() if d in wanted and d.native in known}

    def devices(self) -> list[Device]:
        """The devices of this machine."""
        return _devices.devices()


def __array_namespace_info__() -> Info:
    """Capabilities, devices and element types of the namespace."""
    return Info()
