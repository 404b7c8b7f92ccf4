"""Halcyon in the place of onnxruntime: ``import halcyon.onnxruntime as ort``."""

from __future__ import annotations

from typing import Any

from halcyon._native import __version__
from halcyon.onnxruntime import capi
from halcyon.session import *  # noqa: F403
from halcyon.session import __all__ as _names

__all__ = [*_names, "__version__", "capi"]


def __getattr__(name: str) -> Any:
    what = f"halcyon.onnxruntime has no {name}"
    raise AttributeError(f"{what}; docs/python-onnxruntime.md lists what it has")
