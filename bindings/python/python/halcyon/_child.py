"""Runs a command of Halcyon in a child process, with the native module alone.

It starts in a few milliseconds, and needs neither NumPy nor the parent's search path.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader


def main() -> int:
    """Runs the command of this process's arguments."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [os.path.join(here, "_native" + suffix) for suffix in EXTENSION_SUFFIXES]
    path = next(filter(os.path.isfile, paths))
    loader = ExtensionFileLoader("halcyon._native", path)
    spec = spec_from_loader("halcyon._native", loader)
    if spec is None:
        raise ImportError(path)
    native = module_from_spec(spec)
    loader.exec_module(native)
    own = (sys.executable, ["-I", "-S", os.path.abspath(__file__)])
    code: int = native.command(["halcyon", *sys.argv[1:]], own)
    return code


if __name__ == "__main__":
    sys.exit(main())
