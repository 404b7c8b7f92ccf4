"""The backend that is used where none is named."""

from __future__ import annotations

import os
import threading

from halcyon._errors import DTypeError
from halcyon._native import Backend

__all__ = ["BackendLike", "default_backend", "resolve_backend", "set_default_backend"]

BackendLike = Backend | str | None

_lock = threading.Lock()
_open: dict[str, Backend] = {}
_default: Backend | None = None


def _new_lock() -> None:
    """Replaces the lock in a forked child, because another thread may have held it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


def _opened(name: str) -> Backend:
    """The backend with this name, opened once."""
    with _lock:
        known = _open.get(name)
    if known is not None:
        return known
    made = Backend(name)
    with _lock:
        # `auto`, `cpu` and `cpu:0` may name one device. Tensors of two handles opened apart do not mix.
        return _open.setdefault(name, _open.setdefault(made.id, made))


def shared(made: Backend) -> Backend:
    """The backend that names of this device give: the open one, or else this one from now on."""
    with _lock:
        made = _open.setdefault(made.id, made)
    # A default that was opened with options of its own stands for its device.
    return _default if _default is not None and _default.id == made.id else made


def default_backend() -> Backend:
    """The default backend: the one of :func:`set_default_backend`, or else the best device of the machine.

    The environment variable ``HALCYON_BACKENDS`` orders the candidates, as for the command line.
    """
    return _default if _default is not None else _opened("auto")


def set_default_backend(backend: Backend | str) -> Backend:
    """Sets the default backend, given as a name such as ``cpu`` or an open backend, and returns it."""
    global _default
    if not isinstance(backend, (str, Backend)):
        raise _no_backend(backend)
    _default = _opened(backend) if isinstance(backend, str) else backend
    return _default


def _no_backend(value: object) -> DTypeError:
    what = f"a {type(value).__name__} is no backend"
    return DTypeError(f"backend: {what}; give a name such as 'cpu', or an open backend")


def resolve_backend(backend: BackendLike) -> Backend:
    """An open backend for a name, an open backend, or None for the default."""
    if backend is None:
        return default_backend()
    if isinstance(backend, Backend):
        return backend
    if not isinstance(backend, str):
        raise _no_backend(backend)
    return shared(_opened(backend))
