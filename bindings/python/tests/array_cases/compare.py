"""Runs a case with two namespaces and compares the results."""

import numpy as np

from .draw import Case, D


class Mismatch(AssertionError):
    """Two results that differ."""


def is_array(x, xp) -> bool:
    return isinstance(x, np.ndarray | np.generic) if xp is np else type(x).__name__ == "Array"


def convert(x, xp):
    """An argument for a namespace."""
    if isinstance(x, np.ndarray):
        return x if xp is np else xp.asarray(x)
    if isinstance(x, D):
        return getattr(xp, "bool_" if xp is np and x.name == "bool" else x.name)
    if isinstance(x, tuple | list):
        return type(x)(convert(v, xp) for v in x)
    if isinstance(x, slice):
        return slice(*(convert(v, xp) for v in (x.start, x.stop, x.step)))
    return x


def to_numpy(x):
    """A result as a NumPy array."""
    if isinstance(x, np.ndarray | np.generic):
        return np.asarray(x)
    if hasattr(x, "_tensor"):
        return x.numpy()
    return np.asarray(x._array)


def dtype_name(x) -> str:
    return (
        str(getattr(x, "_np_dtype", x)).split(".")[-1].replace("<class 'numpy.", "").rstrip("'>").rstrip("_")
    )


def call(case: Case, xp):
    """Calls the function of a case. The name may be of an extension, an operator or an indexing operation."""
    args = [convert(a, xp) for a in case.args]
    kwargs = {k: convert(v, xp) for k, v in case.kwargs.items()}
    name = case.name
    if name == "getitem":
        return args[0][args[1]]
    if name == "setitem":
        x = xp.asarray(args[0], copy=True) if xp is not np else args[0].copy()
        x[args[1]] = args[2]
        return x
    if name.startswith("op:"):
        return apply_operator(name[3:], *args)
    if name.startswith("iop:"):
        x = xp.asarray(args[0], copy=True) if xp is not np else args[0].copy()
        return apply_inplace(name[4:], x, args[1])
    f = xp
    for part in name.split("."):
        f = getattr(f, part)
    return f(*args, **kwargs)


def apply_operator(op: str, a, b):
    import operator as o

    table = {
        "+": o.add,
        "-": o.sub,
        "*": o.mul,
        "/": o.truediv,
        "//": o.floordiv,
        "%": o.mod,
        "**": o.pow,
        "&": o.and_,
        "|": o.or_,
        "^": o.xor,
        "<<": o.lshift,
        ">>": o.rshift,
        "<": o.lt,
        "<=": o.le,
        ">": o.gt,
        ">=": o.ge,
        "==": o.eq,
        "!=": o.ne,
        "@": o.matmul,
    }
    return table[op](a, b)


def apply_inplace(op: str, a, b):
    import operator as o

    table = {
        "+": o.iadd,
        "-": o.isub,
        "*": o.imul,
        "/": o.itruediv,
        "//": o.ifloordiv,
        "%": o.imod,
        "**": o.ipow,
        "&": o.iand,
        "|": o.ior,
        "^": o.ixor,
        "<<": o.ilshift,
        ">>": o.irshift,
    }
    return table[op](a, b)


def outcome(case: Case, xp):
    """The result, computed, or the exception."""
    try:
        with np.errstate(all="ignore"):
            return read(call(case, xp), xp)
    except Exception as e:
        return e


def read(x, xp):
    """Reads all arrays of a result."""
    if is_array(x, xp) or isinstance(x, np.ndarray):
        return to_numpy(x)
    if isinstance(x, tuple | list):
        return [read(v, xp) for v in x]
    return x


def same(got, want, case: Case, where: str = "") -> None:
    """Checks that two results are equal, as far as the case asks for it."""
    if isinstance(want, np.ndarray):
        if not isinstance(got, np.ndarray):
            raise Mismatch(f"{where}: {got!r} is not an array")
        arrays(got, want, case, where)
    elif isinstance(want, list):
        if not isinstance(got, list) or len(got) != len(want):
            raise Mismatch(f"{where}: {got!r} against {want!r}")
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            same(g, w, case, f"{where}[{i}]")
    elif hasattr(want, "_np_dtype") or isinstance(want, np.dtype | type):
        if dtype_name(got) != dtype_name(want):
            raise Mismatch(f"{where}: {got} against {want}")
    elif type(want).__name__ in ("finfo", "finfo_object", "iinfo", "iinfo_object"):
        for key in ("bits", "max", "min", "eps", "smallest_normal"):
            if hasattr(want, key) and float(getattr(got, key)) != float(getattr(want, key)):
                raise Mismatch(f"{where}: {key} is {getattr(got, key)}, not {getattr(want, key)}")
    elif got != want:
        raise Mismatch(f"{where}: {got!r} against {want!r}")


def either_zero(case: Case) -> bool:
    """Whether the result may be a zero of either sign.

    The standard leaves open which of -0 and 0 is the smaller one, and NumPy's choice depends on their places.
    """
    if case.name not in ("min", "max", "minimum", "maximum"):
        return False
    floats = [a for a in case.args if isinstance(a, np.ndarray) and a.dtype.kind == "f"]
    negative = {bool(s) for a in floats for s in np.signbit(a[a == 0])}
    return len(negative) == 2


def arrays(got: np.ndarray, want: np.ndarray, case: Case, where: str) -> None:
    if got.dtype != want.dtype:
        raise Mismatch(f"{where}: the type {got.dtype}, not {want.dtype}")
    if got.shape != want.shape:
        raise Mismatch(f"{where}: the shape {got.shape}, not {want.shape}")
    if want.dtype.kind != "f":
        if not np.array_equal(got, want):
            raise Mismatch(f"{where}: {got.tolist()} against {want.tolist()}")
        return
    info = np.finfo(want.dtype)
    # Halcyon rounds subnormal results to zero, as the standard allows.
    tiny = float(info.tiny)
    g, w = got.astype(np.float64), want.astype(np.float64)
    if np.array_equal(g, w, equal_nan=True):
        bad = (
            (np.signbit(g) != np.signbit(w)) & ~np.isnan(w)
            if case.check in ("exact", "close") and not either_zero(case)
            else np.zeros(1, bool)
        )
        if bad.any():
            raise Mismatch(f"{where}: the sign of a zero: {got.tolist()} against {want.tolist()}")
        return
    scale = np.abs(w)
    if case.check == "sum":
        # The tolerance of a sum is relative to the largest number that goes into it.
        sizes = [
            np.abs(a[np.isfinite(a)]) for a in case.args if isinstance(a, np.ndarray) and a.dtype.kind == "f"
        ]
        peak = max([float(s.max()) for s in sizes if s.size] + [1.0])
        scale = np.maximum(scale, peak * peak if case.name in ("var", "std", "matmul", "tensordot") else peak)
    with np.errstate(all="ignore"):
        ulps = 0.0 if case.check == "exact" else case.ulps
        off = np.abs(g - w) > float(info.eps) * (ulps * scale + case.slack) + tiny
        off |= np.isfinite(g) != np.isfinite(w)
        off |= (~np.isfinite(w)) & ~((g == w) | (np.isnan(g) & np.isnan(w)))
    # A result next to the largest number may round to infinity.
    edge = np.isfinite(w) & (np.abs(w) > float(info.max) * (1 - 16 * float(info.eps))) & np.isinf(g)
    off &= ~edge
    if off.any():
        i = tuple(int(v[0]) for v in np.nonzero(off)) if off.shape else ()
        raise Mismatch(f"{where}: {g[i]!r} against {w[i]!r} at {i}")
