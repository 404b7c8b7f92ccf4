"""The rows of the op table, one file per family. Importing this package fills the table."""

from __future__ import annotations

from halcyon.torch.compile.ops import (
    create,
    elementwise,
    index,
    linear,
    nn,
    order,
    random,
    reduce,
    scatter,
    shape,
    special,
)

__all__ = [
    "create",
    "elementwise",
    "index",
    "linear",
    "nn",
    "order",
    "random",
    "reduce",
    "scatter",
    "shape",
    "special",
]
