"""The place where onnxruntime keeps its exceptions."""

from __future__ import annotations

from halcyon.onnxruntime.capi import onnxruntime_pybind11_state

__all__ = ["onnxruntime_pybind11_state"]
