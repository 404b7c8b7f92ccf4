"""Devices of arrays: Halcyon's backends."""

from __future__ import annotations

from typing import TypeAlias

from halcyon import _native
from halcyon._default import resolve_backend
from halcyon._errors import ArgumentError, HalcyonError
from halcyon._native import Backend

__all__ = ["Device", "DeviceLike", "backend_of", "default_device", "devices"]


class Device:
    """A device that arrays can be on.

    It is opened when it is first used. Names such as ``"cpu"`` and ``"cuda:0"`` and open backends are
    accepted wherever a device is expected.

    A device is equal to its names and to its open backend. Its hash is that of its full name, such as
    ``cpu:0``, and not of shorter ones.
    """

    __slots__ = ("_backend", "_id")

    _backend: Backend | None
    _id: str

    def __init__(self, device: str | Backend) -> None:
        if isinstance(device, Backend):
            self._id, self._backend = device.id, device
        else:
            self._id, self._backend = device, None

    @property
    def id(self) -> str:
        """The device's name, such as ``cpu:0``."""
        return self._id

    @property
    def backend(self) -> Backend:
        """The open device."""
        if self._backend is None:
            self._backend = resolve_backend(self._id)
            self._id = self._backend.id
        return self._backend

    def __repr__(self) -> str:
        return f"Device({self._id!r})"

    def __str__(self) -> str:
        return self._id

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, Backend)):
            other = Device(other)
        if not isinstance(other, Device):
            return NotImplemented
        if self._backend is not None and other._backend is not None:
            return self._backend.is_same(other._backend)
        if self._backend is None and other._backend is None and self._id == other._id:
            return True
        # A device is opened only if it may be the other one. The machine may lack it.
        try:
            return self._may_be(other) and self.backend.is_same(other.backend)
        except HalcyonError:
            return False

    def _may_be(self, other: Device) -> bool:
        """Whether the names of two devices allow that they are the same."""
        (kind, number), (other_kind, other_number) = Backend.parse(self._id), Backend.parse(other._id)
        kinds = {kind, other_kind}
        return (len(kinds) == 1 or "auto" in kinds) and (
            number is None or other_number is None or number == other_number
        )

    def __hash__(self) -> int:
        return hash(self.backend.id)


DeviceLike: TypeAlias = Device | Backend | str | None
"""A device, its name, an open backend, or None for the default device."""


def backend_of(device: DeviceLike) -> Backend:
    """The open backend of a device argument; None stands for the default."""
    if isinstance(device, Device):
        return device.backend
    if device is None or isinstance(device, (str, Backend)):
        return resolve_backend(device)
    raise ArgumentError(f"{device!r} is not a device; give a name such as 'cpu', a device or a backend")


def default_device() -> Device:
    """The device of new arrays: the one of ``halcyon.set_default_backend``, or else the best device."""
    return Device(resolve_backend(None))


def devices() -> list[Device]:
    """The devices of this machine that arrays can be on."""
    found: list[Device] = []
    for backend in _native.devices():
        found.extend(Device(f"{backend['id']}:{d['index']}") for d in backend["devices"])
    return found
