"""The rows of the op table, one file per family. Importing this package fills the table."""

from __future__ import annotations

from halcyon.torch.compile.ops import (
    attention,
    conv,
    create,
    elementwise,
    index,
    linear,
    norm,
    order,
    pool,
    random,
    reduce,
    scatter,
    shape,
    softmax,
    special,
)

__all__ = [
    "attention",
    "conv",
    "create",
    "elementwise",
    "index",
    "linear",
    "norm",
    "order",
    "pool",
    "random",
    "reduce",
    "scatter",
    "shape",
    "softmax",
    "special",
]
