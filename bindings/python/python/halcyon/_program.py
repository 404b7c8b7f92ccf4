"""How child processes of Halcyon are started: drivers may crash or hang the process that loads them."""

from __future__ import annotations

import os
import sys

from halcyon import _native

__all__ = ["program"]


def program() -> tuple[str, list[str]] | None:
    """The executable and the leading arguments of a child; None if there is no interpreter to start.

    An application that embeds Python is its own ``sys.executable``, and so is one that was frozen into a
    single file. Starting it would start the application again.
    """
    executable = sys.executable
    if not executable or getattr(sys, "frozen", False):
        return None
    name = os.path.basename(executable).lower()
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_child.py")
    if (
        not name.startswith(("python", "pypy"))
        or not os.path.isfile(executable)
        or not os.path.isfile(script)
    ):
        return None
    # -I and -S: neither the user's variables nor the working directory lead to other modules.
    return executable, ["-I", "-S", script]


def _set() -> None:
    found = program()
    if found is not None:
        _native.set_program(*found)


_set()
