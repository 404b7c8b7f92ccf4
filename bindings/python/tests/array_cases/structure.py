"""Cases of creation, manipulation, indexing, searching, sorting and sets."""

import math

import numpy as np

from .draw import ALL, FLOATS, INTEGERS, NUMBERS, Case, D, Draw

# Creation.


def arange(d: Draw) -> Case:
    if d.chance(0.6):
        a, b = d.int(-20, 20), d.int(-20, 20)
        step = d.one([1, 2, 3, -1, -2, 7])
        t = d.one(["int8", "int16", "int32", "int64", "float32", "float64"])
        args = d.one([(a, b, step), (a, b), (abs(b),)])
        return Case("arange", args, {"dtype": D(t)}, check="close", ulps=2)
    a, b, step = d.r.gauss(0, 5), d.r.gauss(0, 5), d.one([0.1, 0.25, -0.5, 1.5])
    # A length that rounding decides is not a fair question.
    n = (b - a) / step
    if abs(n - round(n)) < 1e-3:
        b += step / 2
    # NumPy's numbers differ by the rounding of the step, times their place.
    return Case("arange", (a, b, step), {"dtype": D(d.one(FLOATS))}, check="sum", ulps=64, slack=2048)


def linspace(d: Draw) -> Case:
    kwargs = {"dtype": D(d.one(FLOATS))}
    if d.chance(0.5):
        kwargs["endpoint"] = d.chance(0.5)
    args = (d.r.gauss(0, 10), d.int(-9, 9), d.int(0, 12))
    return Case("linspace", args, kwargs, check="sum", ulps=64)


def filled(d: Draw) -> Case:
    t = d.one(ALL)
    name = d.one(["zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "eye"])
    shape = d.shape()
    if name == "eye":
        args = (d.int(0, 5), d.one([None, d.int(0, 5)]))
        return Case(name, args, {"k": d.int(-6, 6), "dtype": D(t)})
    value = (d.scalar(t),) if name.startswith("full") else ()
    first = d.any_array() if name.endswith("_like") else shape if d.chance(0.8) else d.int(0, 5)
    return Case(name, (first, *value), {"dtype": D(t)})


def nested(d: Draw) -> Case:
    t = d.one(ALL)
    return Case("asarray", (d.array(t, d.shape(1, 3)).tolist(),), {"dtype": D(t)})


def triangle(d: Draw) -> Case:
    return Case(d.one(["tril", "triu"]), (d.any_array(low=2),), {"k": d.int(-5, 5)})


def meshgrid(d: Draw) -> Case:
    t = d.one(NUMBERS)
    arrays = tuple(d.array(t, (d.int(0, 4),)) for _ in range(d.int(1, 3)))
    return Case("meshgrid", arrays, {"indexing": d.one(["xy", "ij"])})


# Manipulation.


def broadcasting(d: Draw) -> Case:
    if d.chance(0.5):
        shapes = d.broadcast(d.int(1, 3))
        return Case("broadcast_arrays", tuple(d.array(d.one(ALL), s) for s in shapes))
    s, _ = d.broadcast()
    x = d.array(d.one(ALL), s)
    to = (*d.shape(0, 2), *(d.int(0, 4) if n == 1 and d.chance(0.5) else n for n in s))
    return Case("broadcast_to", (x, to))


def joined(d: Draw) -> Case:
    a, b = d.pair_of_types(ALL)
    shape = d.shape(1, 4)
    axis = d.axis(len(shape))
    if d.chance(0.35):
        arrays = [d.array(d.one([a, b]), shape) for _ in range(d.int(1, 4))]
        return Case("stack", (arrays,), {"axis": d.axis(len(shape) + 1)})
    if d.chance(0.3):
        arrays = [d.array(d.one([a, b]), d.shape()) for _ in range(d.int(1, 4))]
        return Case("concat", (arrays,), {"axis": None})
    sizes = []
    for _ in range(d.int(1, 4)):
        s = list(shape)
        s[axis] = d.int(0, 4)
        sizes.append(tuple(s))
    return Case("concat", ([d.array(d.one([a, b]), s) for s in sizes],), {"axis": axis})


def moved(d: Draw) -> Case:
    x = d.any_array(low=1)
    n = x.ndim
    name = d.one(
        ["permute_dims", "moveaxis", "flip", "roll", "expand_dims", "squeeze", "unstack", "matrix_transpose"]
    )
    if name == "permute_dims":
        return Case(name, (x, tuple(d.r.sample(range(n), n))))
    if name == "moveaxis":
        if d.chance(0.5):
            return Case(name, (x, d.axis(n), d.axis(n)))
        k = d.int(1, n)
        return Case(name, (x, tuple(d.r.sample(range(n), k)), tuple(d.r.sample(range(n), k))))
    if name == "flip":
        return Case(name, (x,), {"axis": d.axes(n)})
    if name == "roll":
        if d.chance(0.3):
            return Case(name, (x, d.int(-7, 7)))
        if d.chance(0.5):
            return Case(name, (x, d.int(-7, 7)), {"axis": d.axis(n)})
        k = d.int(1, n)
        shifts = tuple(d.int(-7, 7) for _ in range(k))
        return Case(name, (x, shifts), {"axis": tuple(d.r.sample(range(n), k))})
    if name == "expand_dims":
        return Case(name, (x,), {"axis": d.axis(n + 1)})
    if name == "squeeze":
        shape = tuple(1 if d.chance(0.5) else d.int(0, 3) for _ in range(d.int(1, 4)))
        ones = [k for k, v in enumerate(shape) if v == 1]
        axis = tuple(d.r.sample(ones, d.int(0, len(ones))))
        return Case(name, (d.array(d.one(ALL), shape), axis))
    if name == "matrix_transpose":
        return Case(name, (d.any_array(low=2),))
    return Case(name, (x,), {"axis": d.axis(n)})


def reshaped(d: Draw) -> Case:
    x = d.any_array()
    n, shape = x.size, []
    while n > 1 and d.chance(0.8):
        k = d.one([k for k in range(1, n + 1) if n % k == 0])
        shape.append(k)
        n //= k
    shape.append(n)
    d.r.shuffle(shape)
    if d.chance(0.4) and 0 not in shape:
        shape[d.int(0, len(shape) - 1)] = -1
    return Case("reshape", (x, tuple(shape)))


def repeated(d: Draw) -> Case:
    x = d.any_array(low=1)
    if d.chance(0.4):
        return Case("tile", (x, tuple(d.int(0, 3) for _ in range(d.int(0, 4)))))
    axis = None if d.chance(0.4) else d.axis(x.ndim)
    n = x.size if axis is None else x.shape[axis]
    repeats = d.int(0, 3) if d.chance(0.5) else d.array("int64", (n,), "finite")
    if isinstance(repeats, np.ndarray):
        repeats = np.abs(repeats) % 4
    return Case("repeat", (x, repeats), {"axis": axis})


# Indexing.


def slice_of(d: Draw, n: int) -> slice:
    def bound():
        return None if d.chance(0.4) else d.int(-n - 1, n + 1)

    return slice(bound(), bound(), d.one([None, 1, 2, 3, -1, -2, -3]))


def basic_key(d: Draw, shape: tuple[int, ...]) -> tuple:
    items: list = []
    for n in shape:
        if n and d.chance(0.4):
            items.append(d.int(-n, n - 1))
        else:
            items.append(slice_of(d, n))
    if d.chance(0.35):
        cut = d.int(0, len(items))
        items[cut : cut + d.int(0, len(items) - cut)] = [...]
    return tuple(items)


def with_newaxis(d: Draw, key: tuple) -> tuple:
    items = list(key)
    while d.chance(0.25):
        items.insert(d.int(0, len(items)), None)
    return tuple(items)


def integer_key(d: Draw, shape: tuple[int, ...], mixed: bool) -> tuple:
    """Integers and integer arrays for each axis; slices too, if mixed."""
    common = d.shape(0, 2, 3, zero=0.05)
    items: list = []
    for n in shape:
        p = d.r.random()
        if mixed and (p < 0.4 or n == 0):
            items.append(slice_of(d, n))
        elif n and p < 0.6:
            items.append(d.int(-n, n - 1))
        elif n:
            s = common[d.int(0, len(common)) :]
            s = tuple(1 if d.chance(0.2) else k for k in s)
            flat = [d.int(-n, n - 1) for _ in range(math.prod(s))]
            items.append(np.array(flat, "int64").reshape(s))
        else:
            items.append(slice(None) if mixed else np.zeros((0,), "int64"))
    return tuple(items)


def getitem(d: Draw) -> Case:
    x = d.any_array(low=0, zero=0.05)
    p = d.r.random()
    if p < 0.6:
        return Case("getitem", (x, with_newaxis(d, basic_key(d, x.shape))))
    if p < 0.8:
        mask = d.array("bool", x.shape[: d.int(0, x.ndim)])
        return Case("getitem", (x, mask))
    x = d.array(d.one(ALL), tuple(d.int(1, 4) for _ in range(d.int(1, 4))))
    return Case("getitem", (x, integer_key(d, x.shape, False)))


def getitem_mixed(d: Draw) -> Case:
    """Integer arrays mixed with slices and new axes: beyond the standard, as in NumPy."""
    x = d.array(d.one(ALL), tuple(d.int(1, 4) for _ in range(d.int(1, 4))))
    key = integer_key(d, x.shape, True)
    if d.chance(0.3):
        cut = d.int(0, len(key))
        key = (*key[:cut], ..., *key[cut:])
    return Case("getitem", (x, with_newaxis(d, key)))


def setitem(d: Draw) -> Case:
    x = d.any_array(low=0, zero=0.03)
    t = str(x.dtype)
    p = d.r.random()
    if p < 0.65:
        key: object = basic_key(d, x.shape)
    else:
        key = d.array("bool", x.shape[: d.int(0, x.ndim)])
    place = x[key]
    if d.chance(0.4):
        return Case("setitem", (x, key, d.scalar(t)))
    if isinstance(key, np.ndarray) and d.chance(0.5):
        return Case("setitem", (x, key, d.array(t, ())))
    shape = place.shape
    value = d.array(t, shape[d.int(0, len(shape)) :] if d.chance(0.5) else shape)
    return Case("setitem", (x, key, value))


def setitem_mixed(d: Draw) -> Case:
    """Writing with integer arrays: beyond the standard, as in NumPy. No element is written twice."""
    x = d.array(d.one(ALL), tuple(d.int(1, 5) for _ in range(d.int(1, 4))))
    axis = d.int(0, x.ndim - 1)
    key: list = [slice_of(d, n) for n in x.shape]
    n = x.shape[axis]
    key[axis] = np.array(d.r.sample(range(n), d.int(0, n)), "int64")
    if d.chance(0.3) and x.ndim > 1:
        other = (axis + 1) % x.ndim
        key[other] = d.int(-x.shape[other], x.shape[other] - 1)
    shape = x[tuple(key)].shape
    value = d.array(str(x.dtype), shape) if d.chance(0.6) else d.scalar(str(x.dtype))
    return Case("setitem", (x, tuple(key), value))


def taken(d: Draw) -> Case:
    shape = tuple(d.int(1, 5) for _ in range(d.int(1, 3)))
    x = d.array(d.one(ALL), shape)
    axis = d.axis(x.ndim)
    n = shape[axis]
    t = d.one(["int64", "int32", "int8", "uint8"])
    low = 0 if t == "uint8" else -n
    if d.chance(0.5):
        index = np.array([d.int(low, n - 1) for _ in range(d.int(0, 5))], t)
        return Case("take", (x, index), {} if x.ndim == 1 and d.chance(0.3) else {"axis": axis})
    s = list(shape)
    s[axis] = d.int(0, 4)
    index = np.array([d.int(0, n - 1) for _ in range(math.prod(s))], "int64").reshape(s)
    return Case("take_along_axis", (x, index), {"axis": axis})


# Searching and sorting.


def searched(d: Draw) -> Case:
    name = d.one(["argmax", "argmin", "count_nonzero", "nonzero", "searchsorted"])
    if name in ("argmax", "argmin"):
        x = d.any_array(NUMBERS, low=1, zero=0.0)
        axis = None if d.chance(0.3) else d.axis(x.ndim)
        return Case(name, (x,), {"axis": axis, "keepdims": d.chance(0.4)})
    if name == "count_nonzero":
        x = d.any_array()
        return Case(name, (x,), {"axis": d.axes(x.ndim), "keepdims": d.chance(0.3)})
    if name == "nonzero":
        return Case(name, (d.any_array(low=1),))
    t = d.one(NUMBERS)
    table = d.array(t, (d.int(0, 9),))
    kwargs = {"side": d.one(["left", "right"])}
    if d.chance(0.3):
        kwargs["sorter"] = np.argsort(table, kind="stable").astype("int64")
    else:
        table = np.sort(table)
    return Case(name, (table, d.array(t, d.shape(0, 2))), kwargs)


def sorted_(d: Draw) -> Case:
    x = d.any_array(NUMBERS, low=1, side=9)
    name = d.one(["sort", "argsort"])
    kwargs = {"axis": d.axis(x.ndim)}
    # NumPy flips a sort for a descending one, so equal elements of an unstable order differ in argsort.
    if name == "sort":
        kwargs["descending"] = d.chance(0.4)
        if x.dtype.kind == "f":
            x = np.where(x == 0, np.asarray(0, x.dtype), x)
    return Case(name, (x,), kwargs)


def unique(d: Draw) -> Case:
    t = d.one(ALL)
    x = d.array(t, d.shape(0, 3, 6), "finite")
    if t in FLOATS:
        x = np.asarray(np.round(x) + 0.0)
    name = d.one(["unique_all", "unique_counts", "unique_inverse", "unique_values"])
    return Case(name, (x,))


FAMILIES = [
    (arange, 2),
    (linspace, 2),
    (filled, 2),
    (nested, 1),
    (triangle, 1),
    (meshgrid, 1),
    (broadcasting, 2),
    (joined, 3),
    (moved, 4),
    (reshaped, 2),
    (repeated, 2),
    (getitem, 5),
    (setitem, 5),
    (taken, 2),
    (searched, 3),
    (sorted_, 2),
    (unique, 2),
]
BEYOND = [(getitem_mixed, 1), (setitem_mixed, 1)]

__all__ = ["BEYOND", "FAMILIES", "INTEGERS"]
