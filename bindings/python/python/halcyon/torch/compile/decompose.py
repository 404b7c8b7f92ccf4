"""Decompositions: operations without a row become operations with one, where PyTorch knows how."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from halcyon.torch.compile.table import ROWS

__all__ = ["decompositions"]

_MUTATING = {torch.ops.aten.complex.default}
"""Their decompositions write into views of new tensors, which AOTAutograd refuses."""


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions of all operations that the table lacks."""
    import torch._decomp as decomp

    known: dict[Any, Callable[..., Any]] = dict(decomp.global_decomposition_table["post_autograd"])
    kept = ROWS.keys() | _MUTATING
    return {op: f for op, f in known.items() if op not in kept and isinstance(op, torch._ops.OpOverload)}
