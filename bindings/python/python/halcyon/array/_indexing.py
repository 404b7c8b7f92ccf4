"""Indexing: ``x[key]``, ``x[key] = value``, and the functions that take elements by index.

A key is parsed into one item per axis. Items that are slices and integers select a block of the array (a
view). Integer arrays then select elements of the block. With integer arrays in the key, integers count as
arrays without axes, and all arrays broadcast together; the place of their axes in the result is NumPy's.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halcyon._errors import DTypeError, OutOfRangeError, ShapeError
from halcyon.array._array import Array, Operand, wrap
from halcyon.array._core import (
    INDEX,
    INTEGERS,
    Tensor,
    as_array,
    axis_of,
    broadcast_shapes,
    cast,
    check_kind,
    full,
    iota,
    literal,
    ops,
    scalar_array,
    select,
)
from halcyon.array._dtypes import BOOL, promote

__all__ = ["getitem", "nonzero_columns", "setitem", "take", "take_along_axis"]


@dataclass(frozen=True)
class Range:
    """What a slice or an integer selects from an axis: ``len`` elements from ``start`` on."""

    start: int
    step: int
    len: int
    is_int: builtins.bool = False
    """Whether it is an integer, whose axis is not in the result."""


@dataclass
class Key:
    """A parsed key."""

    ranges: list[Range] = field(default_factory=list)
    """The block: one range per axis."""
    layout: list[int | None] = field(default_factory=list)
    """The axes of the block with new axes: the number of an axis, or None for a new one."""
    arrays: dict[int, Tensor] = field(default_factory=dict)
    """Integer arrays by position in the layout."""
    apart: builtins.bool = False
    """Whether something stands between the arrays."""


def _to_index(item: Any) -> int:
    """An integer of a key."""
    try:
        return operator.index(item)
    except TypeError:
        raise OutOfRangeError(
            f"{item!r} is not an index; indices are integers, slices, ..., None, and integer or bool arrays"
        ) from None


def _range_of_int(i: int, n: int) -> Range:
    if not -n <= i < n:
        raise OutOfRangeError(f"the index {i} is outside of an axis of {n} elements")
    return Range(i + n if i < 0 else i, 1, 1, True)


def _range_of_slice(s: slice, n: int) -> Range:
    start, stop, step = s.indices(n)
    return Range(start, step, len(range(start, stop, step)))


def _is_array(item: Any) -> builtins.bool:
    """Whether an item of a key is an array, or a list or NumPy array that becomes one."""
    return isinstance(item, (Array, list)) or (hasattr(item, "__array_interface__") and bool(item.shape))


def _as_index(x: Array, item: Any) -> Array:
    """An array of a key, on the device of the array that is indexed."""
    made = item if isinstance(item, Array) else _creation.asarray(item, device=x.device)
    if not isinstance(item, Array) and not made.size:
        made = wrap(ops.cast(made._tensor, "i64"))
    if made._dtype.kind not in "iub":
        raise OutOfRangeError(f"an array of {made._dtype} is not an index; indices are integers or bools")
    return made


def _items(x: Array, key: Any) -> list[Any]:
    """The items of a key, with the ellipsis replaced by full slices, and masks by their indices."""
    found = list(key) if isinstance(key, tuple) else [key]
    out: list[Any] = []
    axes = 0
    for item in found:
        if isinstance(item, builtins.bool):
            raise OutOfRangeError("a bool is an index only if it is the only one")
        if _is_array(item):
            item = _as_index(x, item)
        out.append(item)
        if item is not None and item is not Ellipsis:
            axes += item.ndim if isinstance(item, Array) and item._dtype is BOOL else 1
    ndim = x.ndim
    holes = [i for i, item in enumerate(out) if item is Ellipsis]
    if len(holes) > 1:
        raise OutOfRangeError("a key has at most one ellipsis")
    if axes > ndim:
        raise OutOfRangeError(f"a key with {axes} indices for an array with {ndim} axes")
    # An ellipsis without axes still stands between the arrays at its sides, as in NumPy.
    rest: list[Any] = [slice(None)] * (ndim - axes) or [Ellipsis] * len(holes)
    at = holes[0] if holes else len(out)
    return out[:at] + rest + out[at + len(holes) :]


def _parse(x: Array, key: Any) -> Key:
    """Parses a key for an array."""
    items = _items(x, key)
    has_arrays = any(isinstance(i, Array) for i in items)
    shape = x.shape
    parsed = Key()
    places: list[int] = []
    for number, item in enumerate(items):
        axis = len(parsed.ranges)
        if item is Ellipsis:
            continue
        if item is None:
            parsed.layout.append(None)
        elif isinstance(item, slice):
            parsed.ranges.append(_range_of_slice(item, shape[axis]))
            parsed.layout.append(axis)
        elif isinstance(item, Array) and item._dtype is BOOL:
            for column in _mask_columns(item, shape[axis : axis + item.ndim]):
                n = len(parsed.ranges)
                parsed.arrays[len(parsed.layout)] = column
                parsed.layout.append(n)
                parsed.ranges.append(Range(0, 1, shape[n]))
            places.append(number)
        elif isinstance(item, Array):
            parsed.arrays[len(parsed.layout)] = cast(item, INDEX)
            parsed.layout.append(axis)
            parsed.ranges.append(Range(0, 1, shape[axis]))
            places.append(number)
        else:
            r = _range_of_int(_to_index(item), shape[axis])
            if has_arrays:
                parsed.arrays[len(parsed.layout)] = full(x._tensor.backend, (), r.start, INDEX)
                parsed.layout.append(axis)
                parsed.ranges.append(Range(0, 1, shape[axis]))
                places.append(number)
            else:
                parsed.ranges.append(r)
                if not r.is_int:
                    parsed.layout.append(axis)
    parsed.apart = bool(places) and places[-1] - places[0] + 1 != len(places)
    return parsed


def _mask_columns(mask: Array, shape: Sequence[int]) -> list[Tensor]:
    """The indices of the true elements of a mask, one tensor per axis. Computes the mask."""
    if mask.ndim == 0:
        raise OutOfRangeError("a mask without axes is an index only if it is the only one")
    for n, m in zip(shape, mask.shape, strict=False):
        if m not in (n, 0):
            raise OutOfRangeError(
                f"a mask of the shape {mask.shape} does not fit axes of the sizes {tuple(shape)}"
            )
    return nonzero_columns(mask._tensor)


def nonzero_columns(t: Tensor) -> list[Tensor]:
    """The indices of the elements that are not zero, one tensor per axis. Computes the value."""
    rows = ops.nonzero(t)
    count = rows.shape[0]
    return [ops.reshape(ops.narrow(rows, 1, k, 1), (count,)) for k in range(t.ndim)]


# Reading.


def getitem(x: Array, key: Any) -> Array:
    """``x[key]``."""
    sole = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    if isinstance(sole, builtins.bool) or (isinstance(sole, Array) and sole._dtype is BOOL and not sole.ndim):
        flag = 1 if builtins.bool(sole) else 0
        return wrap(ops.narrow(ops.reshape(x._tensor, (1, *x.shape)), 0, 0, flag))
    parsed = _parse(x, key)
    block = _block(x._tensor, parsed)
    return wrap(_select(block, parsed) if parsed.arrays else block)


def _block(t: Tensor, key: Key) -> Tensor:
    """The block that slices and integers select, in the key's layout."""
    shape = t.shape
    # Starts of steps of 1 are arguments of the plan, so a loop over them uses one plan.
    for axis, (r, n) in enumerate(zip(key.ranges, shape, strict=False)):
        if r.step == 1 and r.len < n:
            t = ops.narrow(t, axis, r.start if r.len else 0, r.len)
    if any(r.step != 1 for r in key.ranges):
        strided = [r.step != 1 for r in key.ranges]
        start = [r.start if s and r.len else 0 for r, s in zip(key.ranges, strided, strict=False)]
        step = [r.step if s and r.len > 1 else 1 for r, s in zip(key.ranges, strided, strict=False)]
        t = ops.slice(t, start, step, [r.len for r in key.ranges])
    sizes = [1 if axis is None else key.ranges[axis].len for axis in key.layout]
    return t if t.shape == tuple(sizes) else ops.reshape(t, sizes)


def _select(block: Tensor, key: Key) -> Tensor:
    """The elements that the arrays of a key select from a block."""
    places = sorted(key.arrays)
    if len(places) == 1:
        return _gather(block, key.arrays[places[0]], places[0])
    flat, index, shape = _flattened(block, key, places)
    found = _gather(flat, index, 0)
    if key.apart:
        return found
    # The axes of the arrays stand where the first array stood.
    n, at = len(shape), places[0]
    order = [*range(n, n + at), *range(n), *range(n + at, found.ndim)]
    return ops.permute(found, order)


def _gather(t: Tensor, index: Tensor, axis: int) -> Tensor:
    if t.shape[axis] == 0 and index.size:
        raise OutOfRangeError("an array of indices for an axis without elements")
    return ops.gather(t, index, axis)


def _flattened(block: Tensor, key: Key, places: list[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The block with the axes of the arrays joined to one at the front, its indices, and their shape."""
    shape = block.shape
    rest = [k for k in range(len(shape)) if k not in key.arrays]
    flat = ops.permute(block, [*places, *rest])
    total = 1
    for p in places:
        total *= shape[p]
    flat = ops.reshape(flat, (total, *(shape[k] for k in rest)))
    arrays = [key.arrays[p] for p in places]
    common = broadcast_shapes("indexing", [a.shape for a in arrays])
    index: Tensor | None = None
    is_valid: Tensor | None = None
    for p, a in zip(places, arrays, strict=False):
        n = literal(a, shape[p])
        zero = literal(a, 0)
        a = select(ops.scalar("lt", (a, zero)), ops.scalar("add", (a, n)), a)
        inside = ops.scalar("and", (ops.scalar("ge", (a, zero)), ops.scalar("lt", (a, n))))
        index = a if index is None else ops.scalar("add", (ops.scalar("mul", (index, n)), a))
        is_valid = inside if is_valid is None else ops.scalar("and", (is_valid, inside))
    assert index is not None and is_valid is not None
    # An index that is out of range on one axis must not name an element of another row. The gather reports
    # it.
    index = select(is_valid, index, literal(index, total))
    return flat, ops.expand(index, common), common


# Writing.


def setitem(x: Array, key: Any, value: Array | Operand) -> Tensor:
    """The tensor of an array after ``x[key] = value``."""
    sole = key[0] if isinstance(key, tuple) and len(key) == 1 else key
    new = _value(x, value)
    if isinstance(sole, builtins.bool):
        sole = wrap(full(x._tensor.backend, (), sole, BOOL))
    elif isinstance(sole, list) or (_is_array(sole) and not isinstance(sole, Array)):
        sole = _as_index(x, sole)
    if isinstance(sole, Array) and sole._dtype is BOOL:
        made = _set_where(x, sole, new)
        if made is not None:
            return made
        key = sole
    parsed = _parse(x, key)
    if not parsed.arrays:
        return _write(x._tensor, parsed, new)
    block = _block(x._tensor, parsed)
    block = _scatter(block, parsed, new)
    return _write(x._tensor, parsed, block)


def _value(x: Array, value: Array | Operand) -> Tensor:
    """A value to write, with the element type of the array."""
    if not isinstance(value, Array):
        if _creation.is_nested(value):
            made = _creation.of_elements("x[key] = value", value, x._dtype, x._tensor.backend)
            return made._tensor
        if not _is_array(value):
            return scalar_array("x[key] = value", x, value)._tensor
        value = _creation.asarray(value, device=x.device)
    if promote("x[key] = value", x._dtype, value._dtype) is not x._dtype:
        raise DTypeError(f"x[key] = value: {value._dtype} does not fit {x._dtype}; convert with astype")
    return cast(value, x._dtype)


def _set_where(x: Array, mask: Array, new: Tensor) -> Tensor | None:
    """Writes a value where a mask is true. None if the value has an element for each true element."""
    shape = x.shape
    m = mask.shape
    if len(m) > len(shape) or any(n not in (k, 0) for n, k in zip(m, shape, strict=False)):
        raise OutOfRangeError(f"a mask of the shape {m} does not fit an array of the shape {shape}")
    rest = shape[len(m) :]
    if not m and new.ndim == len(rest) + 1 and new.shape[0] != 1:
        # One element per true element of a mask with one element.
        if new.shape[0] or builtins.bool(mask):
            raise ShapeError(f"x[key] = value: the shape {new.shape} does not broadcast to {('n', *rest)}")
        return x._tensor
    if new.ndim > len(rest) and not (new.ndim == len(rest) + 1 and new.shape[0] == 1):
        return None
    if m != shape[: len(m)]:
        return x._tensor
    if new.ndim > len(rest):
        new = ops.reshape(new, new.shape[1:])
    if broadcast_shapes("x[key] = value", (new.shape, rest)) != rest:
        raise ShapeError(f"x[key] = value: the shape {new.shape} does not broadcast to {('n', *rest)}")
    condition = ops.reshape(mask._tensor, (*m, *(1 for _ in rest)))
    return select(condition, new, x._tensor)


def _expanded(new: Tensor, shape: Sequence[int]) -> Tensor:
    """A value, broadcast to the shape of the place it is written to. Leading axes of size 1 do not count."""
    sizes = new.shape
    extra = len(sizes) - len(shape)
    if extra > 0 and all(n == 1 for n in sizes[:extra]):
        new = ops.reshape(new, sizes[extra:])
    if broadcast_shapes("x[key] = value", (new.shape, shape)) != tuple(shape):
        raise ShapeError(f"x[key] = value: the shape {sizes} does not broadcast to {tuple(shape)}")
    return ops.expand(new, shape)


def _write(t: Tensor, key: Key, new: Tensor) -> Tensor:
    """The tensor with a value written to the block of a key."""
    layout = [1 if axis is None else key.ranges[axis].len for axis in key.layout]
    new = ops.reshape(_expanded(new, layout), [r.len for r in key.ranges])
    return new if not key.ranges else _write_axes(t, key.ranges, new, 0)


def _write_axes(t: Tensor, ranges: list[Range], new: Tensor, axis: int) -> Tensor:
    """Writes a block from one axis on; the axes before are whole."""
    shape = t.shape
    while axis < len(ranges) and ranges[axis] == Range(0, 1, shape[axis]):
        axis += 1
    if axis == len(ranges):
        return new
    r = ranges[axis]
    if r.len == 0:
        return t
    if r.step < 0:
        new = ops.flip(new, (axis,))
        r = Range(r.start + (r.len - 1) * r.step, -r.step, r.len)
    if all(ranges[k].len == shape[k] and ranges[k].step == 1 for k in range(axis + 1, len(ranges))):
        part = new
    else:
        inner = _strided(t, axis, r)
        part = _write_axes(inner, ranges, new, axis + 1)
    if r.step == 1 or r.len == 1:
        return ops.update_slice(t, part, full(t.backend, (), r.start, INDEX), axis)
    k = iota(t.backend, r.len)
    k = ops.scalar("add", (ops.scalar("mul", (k, literal(k, r.step))), literal(k, r.start)))
    return ops.scatter_rows(t, k, part, axis, "set")


def _strided(t: Tensor, axis: int, r: Range) -> Tensor:
    """The elements of a range of one axis."""
    if r.step == 1 or r.len == 1:
        return ops.narrow(t, axis, r.start, r.len)
    shape = t.shape
    start, step, size = [0] * len(shape), [1] * len(shape), list(shape)
    start[axis], step[axis], size[axis] = r.start, r.step, r.len
    return ops.slice(t, start, step, size)


def _scatter(block: Tensor, key: Key, new: Tensor) -> Tensor:
    """A block with a value written to the elements that the arrays of a key select."""
    places = sorted(key.arrays)
    flat, index, common = _flattened(block, key, places)
    rest = flat.shape[1:]
    at = 0 if key.apart else places[0]
    n = len(common)
    new = _expanded(new, (*rest[:at], *common, *rest[at:]))
    # The axes of the arrays come first, as in the flattened block.
    new = ops.permute(new, [*range(at, at + n), *range(at), *range(at + n, new.ndim)])
    count = index.size
    if not count:
        return block
    if not flat.shape[0]:
        raise OutOfRangeError("an array of indices for an axis without elements")
    new = ops.reshape(new, (count, *rest))
    flat = ops.scatter_rows(flat, ops.reshape(index, (count,)), new, 0, "set")
    shape = block.shape
    order = [*places, *(k for k in range(len(shape)) if k not in key.arrays)]
    back = [order.index(k) for k in range(len(shape))]
    return ops.permute(ops.reshape(flat, [shape[k] for k in order]), back)


# Functions.


def take(x: Array, indices: Array, /, *, axis: int | None = None) -> Array:
    """Elements along an axis by index. Indices out of range are reported when the result is read."""
    as_array("take", x)
    check_kind("take", as_array("take", indices), INTEGERS)
    if axis is None:
        if x.ndim != 1:
            raise ShapeError(f"take needs an axis, because the array has {x.ndim} axes")
        axis = 0
    at = axis_of("take", axis, x.ndim)
    return wrap(_gather(x._tensor, cast(indices, INDEX), at))


def take_along_axis(x: Array, indices: Array, /, *, axis: int = -1) -> Array:
    """Single elements along an axis by index; the other axes broadcast."""
    as_array("take_along_axis", x)
    check_kind("take_along_axis", as_array("take_along_axis", indices), INTEGERS)
    if x.ndim != indices.ndim:
        raise ShapeError(f"take_along_axis: the array has {x.ndim} axes and the indices have {indices.ndim}")
    at = axis_of("take_along_axis", axis, x.ndim)
    mine, theirs = list(x.shape), list(indices.shape)
    n, m = mine[at], theirs[at]
    mine[at] = theirs[at] = 1
    common = list(broadcast_shapes("take_along_axis", (mine, theirs)))
    t = ops.expand(x._tensor, [*common[:at], n, *common[at + 1 :]])
    index = ops.expand(cast(indices, INDEX), [*common[:at], m, *common[at + 1 :]])
    if n == 0 and index.size:
        raise OutOfRangeError("take_along_axis: indices for an axis without elements")
    return wrap(ops.gather_elements(t, index, at))


# This module imports the class.
from halcyon.array import _creation  # noqa: E402
