"""Functions that reorder, join and repeat elements, and conversions of element types."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import TypeAlias

from halcyon._errors import ArgumentError, DTypeError, ShapeError
from halcyon.array._core import (
    Array,
    as_array,
    axes_of,
    axis_of,
    broadcast_shapes,
    cast,
    check_kind,
    integer,
    is_sequence,
    ops,
    sequence_of,
    shape_of,
    wrap,
)
from halcyon.array._devices import DeviceLike
from halcyon.array._dtypes import DType, check_dtype, result_type

__all__ = [
    "astype",
    "broadcast_arrays",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flip",
    "moveaxis",
    "permute_dims",
    "repeat",
    "reshape",
    "roll",
    "squeeze",
    "stack",
    "tile",
    "unstack",
]

Axes: TypeAlias = int | Sequence[int]
"""One axis, or several."""


def astype(x: Array, dtype: DType, /, *, copy: builtins.bool = True, device: DeviceLike = None) -> Array:
    """Converts to another element type.

    Floats become integers by rounding towards zero; what is out of range becomes the nearest integer of the
    type, and NaN becomes 0. Integers wrap. With ``copy=False`` an array that has the type already is returned
    itself.
    """
    as_array("astype", x)
    to = check_dtype(dtype)
    if to is x._dtype and not copy and device is None:
        return x
    made = wrap(cast(x, to))
    return made if device is None else made.to_device(device)


def broadcast_to(x: Array, /, shape: tuple[int, ...]) -> Array:
    """The array, repeated along axes of size 1 and along new axes at the front."""
    sizes = shape_of("broadcast_to", shape)
    as_array("broadcast_to", x)
    if broadcast_shapes("broadcast_to", (x.shape, sizes)) != sizes:
        raise ShapeError(f"broadcast_to: the shape {x.shape} does not broadcast to {sizes}")
    return wrap(ops.expand(x._tensor, sizes))


def broadcast_arrays(*arrays: Array) -> list[Array]:
    """The arrays, broadcast to their common shape."""
    shape = broadcast_shapes("broadcast_arrays", [as_array("broadcast_arrays", x).shape for x in arrays])
    return [wrap(ops.expand(x._tensor, shape)) for x in arrays]


def concat(arrays: Sequence[Array], /, *, axis: int | None = 0) -> Array:
    """Joins arrays along an axis; None joins the elements of all."""
    if not sequence_of("concat", "arrays", arrays):
        raise ArgumentError("concat needs at least one array")
    for x in arrays:
        as_array("concat", x)
    dtype = result_type(*arrays)
    tensors = [cast(x, dtype) for x in arrays]
    if axis is None:
        return wrap(ops.concat([ops.reshape(t, (-1,) if t.size else (0,)) for t in tensors], 0))
    ndim = arrays[0].ndim
    if ndim == 0:
        raise ShapeError("concat: arrays without axes are joined with axis=None or stack")
    return wrap(ops.concat(tensors, axis_of("concat", axis, ndim)))


def stack(arrays: Sequence[Array], /, *, axis: int = 0) -> Array:
    """Joins arrays of one shape along a new axis."""
    if not sequence_of("stack", "arrays", arrays):
        raise ArgumentError("stack needs at least one array")
    shape = as_array("stack", arrays[0]).shape
    for x in arrays:
        if as_array("stack", x).shape != shape:
            raise ShapeError(f"stack: the shapes {shape} and {x.shape} differ")
    at = axis_of("stack", axis, len(shape) + 1)
    dtype = result_type(*arrays)
    to = (*shape[:at], 1, *shape[at:])
    return wrap(ops.concat([ops.reshape(cast(x, dtype), to) for x in arrays], at))


def unstack(x: Array, /, *, axis: int = 0) -> tuple[Array, ...]:
    """The arrays along an axis, which is removed."""
    at = axis_of("unstack", axis, as_array("unstack", x).ndim)
    shape = x.shape
    rest = (*shape[:at], *shape[at + 1 :])
    return tuple(wrap(ops.reshape(ops.narrow(x._tensor, at, k, 1), rest)) for k in range(shape[at]))


def expand_dims(x: Array, /, axis: int) -> Array:
    """The array with a new axis of size 1 at a position of the result."""
    shape = as_array("expand_dims", x).shape
    at = axis_of("expand_dims", axis, len(shape) + 1)
    return wrap(ops.reshape(x._tensor, (*shape[:at], 1, *shape[at:])))


def squeeze(x: Array, /, axis: Axes) -> Array:
    """The array without axes of size 1."""
    shape = as_array("squeeze", x).shape
    if axis is None:
        raise DTypeError("squeeze needs the axes to remove")
    axes = axes_of("squeeze", axis, len(shape))
    for a in axes:
        if shape[a] != 1:
            raise ShapeError(f"squeeze: axis {a} of {shape} has the size {shape[a]}, not 1")
    return wrap(ops.reshape(x._tensor, [n for k, n in enumerate(shape) if k not in axes]))


def flip(x: Array, /, *, axis: Axes | None = None) -> Array:
    """The elements in reverse order along axes, or along all axes."""
    axes = axes_of("flip", axis, as_array("flip", x).ndim)
    return wrap(ops.flip(x._tensor, axes) if axes else x._tensor)


def permute_dims(x: Array, /, axes: Sequence[int]) -> Array:
    """The axes in another order: axis ``k`` of the result is axis ``axes[k]`` of the operand."""
    ndim = as_array("permute_dims", x).ndim
    order = axes_of("permute_dims", tuple(axes), ndim)
    if len(order) != ndim:
        raise ShapeError(f"permute_dims: {tuple(axes)} does not name each of the {ndim} axes once")
    return wrap(ops.permute(x._tensor, order))


def moveaxis(x: Array, source: Axes, destination: Axes, /) -> Array:
    """The array with axes moved to other positions; the other axes keep their order."""
    ndim = as_array("moveaxis", x).ndim
    come = axes_of("moveaxis", source, ndim)
    go = axes_of("moveaxis", destination, ndim)
    if source is None or destination is None or len(come) != len(go):
        raise ArgumentError(f"moveaxis: {source} and {destination} differ in length")
    order = [k for k in range(ndim) if k not in come]
    for at, k in sorted(zip(go, come, strict=False)):
        order.insert(at, k)
    return wrap(ops.permute(x._tensor, order))


def reshape(x: Array, /, shape: Sequence[int], *, copy: builtins.bool | None = None) -> Array:
    """The elements in row-major order with another shape. One size may be -1.

    Arrays never share changes, so each result behaves as a copy and no memory is copied for it:
    ``copy`` may have any of its values.
    """
    if copy not in (None, True, False):
        raise DTypeError(f"reshape: copy is a bool or None, not {copy!r}")
    sizes = [integer("reshape", "a size", n) for n in (shape if is_sequence(shape) else (shape,))]
    as_array("reshape", x)
    return wrap(ops.reshape(x._tensor, sizes))


def repeat(x: Array, repeats: int | Array, /, *, axis: int | None = None) -> Array:
    """Repeats each element along an axis, or each element of the flattened array.

    An array of repeats is read, because the shape of the result depends on its values.
    """
    as_array("repeat", x)
    t = ops.reshape(x._tensor, (x.size,)) if axis is None else x._tensor
    shape = t.shape
    at = axis_of("repeat", 0 if axis is None else axis, len(shape))
    if isinstance(repeats, Array):
        check_kind("repeat", repeats, "iu")
        counts = _counts(repeats, shape[at])
        index = _searching.indices_of_counts(counts)
        return wrap(ops.gather(t, index, at))
    if isinstance(repeats, (list, tuple)):
        return repeat(
            wrap(t), _creation.asarray(repeats, dtype=_creation.DEFAULT_INT, device=x.device), axis=at
        )
    (n,) = shape_of("repeat", repeats)
    wide = ops.expand(
        ops.reshape(t, (*shape[: at + 1], 1, *shape[at + 1 :])), (*shape[: at + 1], n, *shape[at + 1 :])
    )
    return wrap(ops.reshape(wide, (*shape[:at], shape[at] * n, *shape[at + 1 :])))


def _counts(repeats: Array, n: int) -> Array:
    """The numbers of repeats of each of ``n`` elements."""
    if repeats.ndim > 1 or repeats.size not in (1, n):
        raise ShapeError(f"repeat: {n} elements and repeats of the shape {repeats.shape}")
    if builtins.bool(_utility.any(_binary.less(repeats, 0))):
        raise ArgumentError("repeat: the number of repeats is negative")
    return broadcast_to(repeats, (n,))


def roll(x: Array, /, shift: Axes, *, axis: Axes | None = None) -> Array:
    """Moves elements along axes; those that leave at one end enter at the other."""
    shape = as_array("roll", x).shape
    for n in shift if isinstance(shift, (list, tuple)) else (shift,):
        integer("roll", "a shift", n)
    if axis is None:
        by = shift if isinstance(shift, int) else sum(shift)
        flat = wrap(ops.reshape(x._tensor, (x.size,)))
        return wrap(ops.reshape(roll(flat, by, axis=0)._tensor, shape))
    axes = [axis_of("roll", a, len(shape)) for a in (axis if is_sequence(axis) else (axis,))]  # type: ignore[union-attr]
    shifts = list(shift) if isinstance(shift, (list, tuple)) else [shift]
    if len(shifts) == 1:
        shifts *= len(axes)
    if len(axes) == 1:
        axes *= len(shifts)
    if len(shifts) != len(axes):
        raise ArgumentError(f"roll: {len(shifts)} shifts and {len(axes)} axes")
    t = x._tensor
    for a, s in zip(axes, shifts, strict=False):
        n = shape[a]
        by = s % n if n else 0  # type: ignore[operator]
        if by:
            t = ops.concat((ops.narrow(t, a, n - by, by), ops.narrow(t, a, 0, n - by)), a)
    return wrap(t)


def tile(x: Array, repetitions: tuple[int, ...], /) -> Array:
    """The array, repeated as a whole along each axis."""
    reps = shape_of("tile", repetitions)
    shape = as_array("tile", x).shape
    ndim = max(len(reps), len(shape))
    reps = (1,) * (ndim - len(reps)) + reps
    shape = (1,) * (ndim - len(shape)) + shape
    narrow = [v for n in shape for v in (1, n)]
    wide = [v for r, n in zip(reps, shape, strict=False) for v in (r, n)]
    t = ops.expand(ops.reshape(x._tensor, narrow), wide)
    return wrap(ops.reshape(t, [r * n for r, n in zip(reps, shape, strict=False)]))


# These modules import this one.
from halcyon.array import _binary, _creation, _searching, _utility  # noqa: E402
