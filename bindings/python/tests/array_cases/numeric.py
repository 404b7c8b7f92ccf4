"""Cases of statistics, utilities, linear algebra and errors."""

import math

import numpy as np

from .draw import ALL, FLOATS, INTEGERS, NUMBERS, Case, D, Draw


def reduction(d: Draw) -> Case:
    name = d.one(["sum", "prod", "max", "min", "mean", "var", "std", "all", "any"])
    types = {"all": ALL, "any": ALL, "mean": FLOATS, "var": FLOATS, "std": FLOATS}.get(name, NUMBERS)
    exact = name in ("max", "min", "all", "any")
    x = d.any_array(types, "any" if exact else "finite", low=0, zero=0.0 if name in ("max", "min") else 0.08)
    kwargs: dict = {"axis": d.axes(x.ndim), "keepdims": d.chance(0.4)}
    if name in ("sum", "prod") and d.chance(0.3):
        kind = x.dtype.kind
        kwargs["dtype"] = D(d.one([t for t in NUMBERS if np.dtype(t).kind == kind]))
    if name in ("var", "std") and d.chance(0.5):
        kwargs["correction"] = d.one([0, 1, 0.5, 1.0])
    if name == "prod" and x.dtype.kind == "f":
        x = np.where(abs(x) > 3, x / 3, x).astype(x.dtype)
    if not exact and x.dtype.kind == "f" and x.size and d.chance(0.15):
        x.flat[d.int(0, x.size - 1)] = d.one([math.nan, math.inf, -math.inf])
    return Case(name, (x,), kwargs, check="exact" if exact else "sum", ulps=256 if name == "prod" else 64)


def cumulative(d: Draw) -> Case:
    name = d.one(["cumulative_sum", "cumulative_prod"])
    x = d.any_array(NUMBERS, "finite", low=1)
    if name == "cumulative_prod" and x.dtype.kind == "f":
        x = np.where(abs(x) > 2, x / 2, x).astype(x.dtype)
    kwargs: dict = {"axis": None if x.ndim == 1 and d.chance(0.3) else d.axis(x.ndim)}
    if d.chance(0.5):
        kwargs["include_initial"] = d.chance(0.7)
    if d.chance(0.2):
        kwargs["dtype"] = D(d.one([t for t in NUMBERS if np.dtype(t).kind == x.dtype.kind]))
    return Case(name, (x,), kwargs, check="sum", ulps=256)


def diff(d: Draw) -> Case:
    x = d.any_array(NUMBERS, "finite", low=1)
    axis = d.axis(x.ndim)
    kwargs: dict = {"axis": axis, "n": d.int(0, 3)}
    for key in ("prepend", "append"):
        # NumPy joins nothing if no difference is taken; the standard does.
        if kwargs["n"] and d.chance(0.3):
            s = list(x.shape)
            s[axis] = d.int(0, 2)
            kwargs[key] = d.array(str(x.dtype), tuple(s), "finite")
    return Case("diff", (x,), kwargs, check="sum", ulps=16)


def matmul(d: Draw) -> Case:
    t, u = d.pair_of_types(NUMBERS)
    m, k, n = (d.int(0, 5) if d.chance(0.2) else d.int(1, 5) for _ in range(3))
    s, r = d.broadcast()
    s, r = s[:2], r[:2]
    try:
        np.broadcast_shapes(s, r)
    except ValueError:
        s = r = ()
    a = d.array(t, (k,) if d.chance(0.15) else (*s, m, k), "finite")
    b = d.array(u, (k,) if d.chance(0.15) else (*r, k, n), "finite")
    return Case(d.one(["matmul", "op:@"]), (a, b), check="sum", ulps=64)


def products(d: Draw) -> Case:
    t, u = d.pair_of_types(NUMBERS)
    name = d.one(["tensordot", "vecdot", "linalg.outer", "linalg.cross"])
    if name == "tensordot":
        shared = d.shape(0, 2, 3)
        a = d.array(t, (*d.shape(0, 2, 3), *shared), "finite")
        b = d.array(u, (*shared, *d.shape(0, 2, 3)), "finite")
        n = len(shared)
        axes = n if d.chance(0.5) else (tuple(range(-n, 0)), tuple(range(n)))
        return Case(name, (a, b), {"axes": axes}, check="sum", ulps=64)
    if name == "linalg.outer":
        return Case(name, (d.array(t, (d.int(0, 4),)), d.array(u, (d.int(0, 4),))))
    if name == "linalg.cross":
        shape = list(d.shape(1, 3, zero=0.0))
        axis = d.int(-len(shape), -1)
        shape[axis] = 3
        a, b = (d.array(v, tuple(shape), "finite") for v in (t, u))
        return Case(name, (a, b), {"axis": axis}, check="sum", ulps=64)
    shape = d.shape(1, 3)
    axis = d.int(-len(shape), -1)
    other = tuple(1 if i != axis + len(shape) and d.chance(0.3) else n for i, n in enumerate(shape))
    return Case(
        name, (d.array(t, shape, "finite"), d.array(u, other, "finite")), {"axis": axis}, check="sum", ulps=64
    )


def matrix(d: Draw) -> Case:
    t = d.one(FLOATS)
    batch = d.shape(0, 2, 3)
    n = d.int(1, 5)
    name = d.one(
        [
            "det",
            "inv",
            "solve",
            "slogdet",
            "cholesky",
            "eigvalsh",
            "svdvals",
            "matrix_norm",
            "vector_norm",
            "matrix_rank",
            "pinv",
            "matrix_power",
            "diagonal",
            "trace",
        ]
    )
    # Well-conditioned matrices: near the identity.
    noise = d.array(t, (*batch, n, n), "unit")
    good = (noise / (2 * n) + np.eye(n)).astype(t)
    full = f"linalg.{name}"
    if name in ("det", "inv", "slogdet"):
        return Case(full, (good,), check="sum", ulps=512)
    if name == "solve":
        b = d.array(t, (n,) if d.chance(0.3) else (*batch, n, d.int(0, 3)), "finite")
        return Case(full, (good, b), check="sum", ulps=512)
    if name == "cholesky":
        x = (good @ np.swapaxes(good, -1, -2)).astype(t)
        return Case(full, (x,), {"upper": d.chance(0.5)}, check="sum", ulps=512)
    if name == "eigvalsh":
        return Case(full, ((noise + np.swapaxes(noise, -1, -2)).astype(t),), check="sum", ulps=512)
    wide = d.array(t, (*batch, d.int(1, 5), d.int(1, 5)), "unit")
    if name == "matrix_norm":
        ords = ["fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf]
        return Case(full, (wide,), {"ord": d.one(ords), "keepdims": d.chance(0.5)}, check="sum", ulps=512)
    if name == "vector_norm":
        x = d.any_array(FLOATS, "finite", zero=0.0)
        ord_ = d.one([2, 1, 0, 3, 0.5, math.inf, -math.inf])
        kwargs = {"axis": d.axes(x.ndim), "ord": ord_, "keepdims": d.chance(0.4)}
        return Case(full, (x,), kwargs, check="close", ulps=512)
    if name == "matrix_power":
        return Case(full, (good, d.int(-3, 5)), check="sum", ulps=4096)
    if name in ("diagonal", "trace"):
        x = d.any_array(ALL if name == "diagonal" else NUMBERS, "finite", low=2)
        return Case(full, (x,), {"offset": d.int(-4, 4)}, check="sum", ulps=64)
    return Case(full, (wide,), check="sum", ulps=4096)


def shift(d: Draw) -> Case:
    p = d.r.random()
    if p < 0.4:
        name = d.one(["fftfreq", "rfftfreq"])
        return Case(
            f"fft.{name}",
            (d.int(1, 12),),
            {"d": d.one([1.0, 0.5, 0.1, 3.0]), "dtype": D(d.one(FLOATS))},
            check="close",
            ulps=4,
        )
    x = d.any_array(FLOATS, low=1)
    return Case(f"fft.{d.one(['fftshift', 'ifftshift'])}", (x,), {"axes": d.axes(x.ndim)})


def error(d: Draw) -> Case:
    """A call that the standard does not allow."""
    x = d.any_array(NUMBERS, "finite", low=1, zero=0.0)
    n = x.ndim
    ints = d.any_array(INTEGERS, low=1, zero=0.0)
    floats = d.any_array(FLOATS, low=1, zero=0.0)
    bools = d.any_array(["bool"], low=1, zero=0.0)
    out = d.one([n, n + 3, -n - 1])
    wrong_axis = d.one(
        [
            "sum",
            "prod",
            "max",
            "flip",
            "sort",
            "argsort",
            "argmax",
            "cumulative_sum",
            "unstack",
            "any",
            "count_nonzero",
            "diff",
        ]
    )
    cases = [
        lambda: Case(wrong_axis, (x,), {"axis": out}),
        lambda: Case("expand_dims", (x,), {"axis": n + 1}),
        lambda: Case("add", (np.zeros((2, 3)), np.zeros((3, 2)))),
        lambda: Case("add", (np.zeros(2, "int64"), np.zeros(2, "float64"))),
        lambda: Case("add", (bools, True)),
        lambda: Case("add", (np.zeros(2, "int64"), np.zeros(2, "uint64"))),
        lambda: Case("op:+", (ints, 1.5)),
        lambda: Case("op:&", (floats, floats)),
        lambda: Case("op:+", (np.zeros(3, "int8"), 128)),
        lambda: Case("op:-", (np.zeros(3, "uint8"), -1)),
        lambda: Case("op:/", (ints, ints)),
        lambda: Case("iop:+", (np.zeros(3, "int8"), np.zeros(3, "int32"))),
        lambda: Case("iop:+", (np.zeros(3), np.zeros((2, 3)))),
        lambda: Case(d.one(["sin", "exp", "log", "sqrt", "tanh", "reciprocal", "signbit"]), (ints,)),
        lambda: Case(d.one(["bitwise_invert", "logical_not"]), (floats,)),
        lambda: Case(d.one(["abs", "negative", "floor", "isnan", "square"]), (bools,)),
        lambda: Case(d.one(["mean", "std", "var"]), (ints,)),
        lambda: Case(d.one(["sum", "prod", "max", "min", "sort", "argmax", "cumulative_sum"]), (bools,)),
        lambda: Case("reshape", (x, (x.size + 1,))),
        lambda: Case("reshape", (x, (-1, -1))),
        lambda: Case("squeeze", (np.zeros((2, 3)), 0)),
        lambda: Case("permute_dims", (np.zeros((2, 3)), (0, 0))),
        lambda: Case("concat", ([np.zeros((2, 3)), np.zeros((2, 2))],), {"axis": 0}),
        lambda: Case("stack", ([np.zeros((2, 3)), np.zeros((2, 2))],)),
        lambda: Case("broadcast_to", (np.zeros(3), (2,))),
        lambda: Case("matmul", (np.zeros((2, 3)), np.zeros((2, 3)))),
        lambda: Case("matmul", (np.zeros(()), np.zeros((2, 3)))),
        lambda: Case("max", (np.zeros((0, 3)),)),
        lambda: Case("argmin", (np.zeros((2, 0)),), {"axis": 1}),
        lambda: Case("nonzero", (np.zeros(()),)),
        lambda: Case("getitem", (x, (..., ...))),
        lambda: Case("getitem", (x, (0,) * (n + 1))),
        lambda: Case("getitem", (x, x.shape[0])),
        lambda: Case("getitem", (x, 1.5)),
        lambda: Case("getitem", (x, np.ones((x.shape[0] + 1,), bool))),
        lambda: Case("setitem", (x, 0, np.zeros((9, 9), x.dtype))),
        lambda: Case("take", (np.zeros((2, 3)), np.zeros(2, "int64"))),
        lambda: Case("take", (np.zeros(3), np.zeros(2)), {"axis": 0}),
        lambda: Case("cumulative_sum", (np.zeros((2, 3)),)),
        lambda: Case("linalg.inv", (np.zeros((2, 2)),)),
        lambda: Case("linalg.inv", (np.zeros((2, 3)),)),
        lambda: Case("linalg.solve", (np.zeros((2, 2)), np.ones(2))),
        lambda: Case("linalg.cholesky", (-np.eye(3),)),
        lambda: Case("linalg.det", (np.zeros(3),)),
        lambda: Case("linalg.qr", (np.zeros((2, 2)),), {"mode": "wide"}),
        lambda: Case("linalg.cross", (np.zeros(2), np.zeros(2))),
        lambda: Case("meshgrid", (np.zeros(2), np.zeros(2)), {"indexing": "yx"}),
        lambda: Case("zeros", ((-1,),)),
        lambda: Case("arange", (0, 5, 0)),
        lambda: Case("asarray", ([[1, 2], [3]],)),
        lambda: Case("asarray", ("text",)),
        lambda: Case("isdtype", (D("int8"), "whole")),
        lambda: Case("result_type", ()),
        lambda: Case("result_type", (D("bool"), D("int8"))),
        lambda: Case("finfo", (D("int8"),)),
        lambda: Case("iinfo", (D("float32"),)),
        lambda: Case("where", (np.zeros(2), np.zeros(2), np.zeros(2))),
        lambda: Case("repeat", (np.zeros(3), -1)),
        lambda: Case("tensordot", (np.zeros((2, 3)), np.zeros((2, 3))), {"axes": 1}),
        lambda: Case("searchsorted", (np.zeros((2, 2)), np.zeros(2))),
        lambda: Case("imag", (floats,)),
    ]
    case = d.one(cases)()
    case.check = "error"
    return case


FAMILIES = [
    (reduction, 6),
    (cumulative, 2),
    (diff, 1),
    (matmul, 3),
    (products, 2),
    (matrix, 4),
    (shift, 1),
    (error, 6),
]
