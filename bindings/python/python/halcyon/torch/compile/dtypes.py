"""Element types of PyTorch and their names in the native module."""

from __future__ import annotations

import torch

__all__ = ["FLOATS", "NAMES", "TORCH", "UNSIGNED", "is_float", "is_integer", "wide"]

NAMES: dict[torch.dtype, str] = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
"""The name of each supported element type. The others, such as complex types, have none."""

TORCH: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}

FLOATS = frozenset({"f16", "bf16", "f32", "f64"})
UNSIGNED: dict[str, str] = {"i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64"}
"""The unsigned type of each signed type."""


def is_float(dtype: str) -> bool:
    """Whether the type is a float."""
    return dtype in FLOATS


def is_integer(dtype: str) -> bool:
    """Whether the type is an integer; bool is none."""
    return dtype not in FLOATS and dtype != "bool"


def wide(dtype: str) -> str:
    """The type in which PyTorch computes values of this type: f32 for the half types."""
    return "f32" if dtype in ("f16", "bf16") else dtype
