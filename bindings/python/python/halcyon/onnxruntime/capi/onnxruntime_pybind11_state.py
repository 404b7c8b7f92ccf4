"""The exceptions of sessions, where programs for onnxruntime import them from."""

from __future__ import annotations

from halcyon.session import OrtDevice, OrtValue, RunOptions, SessionOptions
from halcyon.session.exceptions import *  # noqa: F403
from halcyon.session.exceptions import __all__ as _names

__all__ = [*_names, "OrtDevice", "OrtValue", "RunOptions", "SessionOptions"]
