"""Arrays as text and as tables of notebooks."""

from __future__ import annotations

import html as escapes
from typing import TYPE_CHECKING, Any

from halcyon._errors import HalcyonError
from halcyon.array._array import Array, wrap
from halcyon.array._core import ops
from halcyon.array._transforms import is_tracing

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["html", "short", "text"]

# Larger arrays are shown by their first and last elements along each axis.
_THRESHOLD = 1000
_EDGE = 3


def _shown(x: Array, edge: int) -> NDArray[Any]:
    """The elements that are shown, computed. Long axes have one element in place of those left out."""
    t = x._tensor
    for axis, n in enumerate(t.shape):
        if n > 2 * edge + 1:
            t = ops.concat((ops.narrow(t, axis, 0, edge + 1), ops.narrow(t, axis, n - edge, edge)), axis)
    if x._dtype.name == "bfloat16":
        t = ops.cast(t, "f32")
    return wrap(t).numpy()


def is_placeholder(x: Array) -> bool:
    """Whether the array stands for the argument of a function that is compiled, so it has no value."""
    if not is_tracing() or x.is_ready:
        return False
    try:
        x._tensor.eval()
    except HalcyonError:
        return True
    return False


def _elements(x: Array, separator: str, prefix: str) -> str:
    import numpy as np

    if x.size > _THRESHOLD:
        shown = _shown(x, _EDGE)
        return np.array2string(shown, separator=separator, prefix=prefix, threshold=0, edgeitems=_EDGE)
    return np.array2string(_shown(x, _THRESHOLD), separator=separator, prefix=prefix)


def text(x: Array) -> str:
    """The array as an expression, with its type and device."""
    about = f"dtype={x.dtype}, device={str(x.device)!r}"
    if is_placeholder(x):
        return f"Array(shape={x.shape}, {about}, a placeholder)"
    elements = _elements(x, ", ", "Array(")
    if not x.size:
        about = f"shape={x.shape}, {about}"
    lines = elements.split("\n")
    joint = ", " if len(lines[-1]) + len(about) < 100 else ",\n      "
    return f"Array({elements}{joint}{about})"


def short(x: Array) -> str:
    """The elements alone."""
    return text(x) if is_placeholder(x) else _elements(x, " ", "")


def html(x: Array) -> str:
    """A table with the first and last elements of the last two axes of the first matrix."""
    about = escapes.escape(f"{x.shape} {x.dtype} on {x.device}")
    if is_placeholder(x) or not x.size:
        return f"<p>{about}, {'empty' if x.size == 0 else 'a placeholder'}</p>"
    flat = x
    while flat.ndim > 2:
        flat = flat[0]
    cells = _shown(flat, 5)
    shape = (1,) * (2 - flat.ndim) + flat.shape
    rows = cells.reshape((1,) * (2 - cells.ndim) + cells.shape).tolist()
    body = ""
    for i, row in enumerate(rows):
        shown = [_cell(v) for v in row]
        if shape[1] > len(row):
            shown[5] = "…"
        if shape[0] > len(rows) and i == 5:
            shown = ["…"] * len(shown)
        body += "<tr>" + "".join(f"<td>{v}</td>" for v in shown) + "</tr>"
    more = "the first matrix of " if x.ndim > 2 else ""
    return f"<table><caption>{more}{about}</caption>{body}</table>"


def _cell(v: bool | int | float) -> str:
    return f"{v:.6g}" if isinstance(v, float) else str(v)
