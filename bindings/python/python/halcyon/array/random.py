"""Random numbers. One seed gives the same numbers on every device.

Each draw uses the next seed of the device, or the seed that it is given. :func:`seed` sets the next seed. In
the loss of a :class:`halcyon.training.TrainStep`, draws without a seed differ from step to step and follow
from the step's seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

from halcyon._errors import ArgumentError, DTypeError, UnsupportedError
from halcyon._native import Backend, Tensor
from halcyon.array import _transforms
from halcyon.array._array import Array, wrap
from halcyon.array._core import axis_of, full, iota, literal, ops, shape_of
from halcyon.array._devices import DeviceLike, backend_of
from halcyon.array._dtypes import BY_NAME, DEFAULT_FLOAT, DEFAULT_INT, DType, check_dtype, finfo, iinfo

__all__ = ["normal", "permutation", "randint", "seed", "uniform"]

_LIMIT = 1 << 32
#: A seed, or the halves of a key that is known when the function runs.
_Key: TypeAlias = int | tuple[Tensor, Tensor]


def seed(value: int, /, *, device: DeviceLike = None) -> None:
    """Sets the seed of the draws that follow on a device."""
    backend_of(device).manual_seed(_checked(value))


def _checked(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise ArgumentError(f"random: a seed is an integer of 64 bits that is not negative, not {value!r}")
    return value


def _key(backend: Backend, given: int | None) -> _Key:
    """The key of a draw."""
    if given is not None:
        return _checked(given)
    keys = _transforms.keys()
    if keys is not None and keys.backend.is_same(backend):
        return keys.next()
    if _transforms.is_tracing():
        raise UnsupportedError(
            "random: a compiled function would give the same numbers at each call; "
            "pass random numbers as arguments, or give a seed"
        )
    return backend.next_seed()


def _words(backend: Backend, n: int, key: _Key, word: int) -> Tensor:
    """32 random bits for each of ``n`` elements, as u32."""
    if isinstance(key, int):
        low = full(backend, (), key & 0xFFFFFFFF, BY_NAME["uint32"])
        high = full(backend, (), ((key >> 32) + word) & 0xFFFFFFFF, BY_NAME["uint32"])
    else:
        low, high = key
        high = ops.scalar("add", (high, literal(high, word)))
    return ops.scalar("threefry", (low, high, iota(backend, n, BY_NAME["uint32"])))


def _bits(backend: Backend, shape: Sequence[int], key: _Key) -> Tensor:
    """64 random bits for each element, as u64."""
    n = _count(shape)
    low, high = (ops.cast(_words(backend, n, key, w), "u64") for w in (0, 1))
    high = ops.scalar("shl", (high, literal(high, 32)))
    return ops.reshape(ops.scalar("or", (low, high)), shape)


def _count(shape: Sequence[int]) -> int:
    n = math.prod(shape)
    if n > _LIMIT:
        raise UnsupportedError(f"random: {n} numbers in one array; draw at most 2^32 at once")
    return n


def _float(op: str, dtype: DType | None) -> DType:
    found = DEFAULT_FLOAT if dtype is None else check_dtype(dtype)
    if found.kind != "f":
        raise DTypeError(f"random.{op} makes floats, not {found}")
    return found


def uniform(
    shape: int | Sequence[int] = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: DType | None = None,
    device: DeviceLike = None,
    seed: int | None = None,
) -> Array:
    """Numbers that are uniform from ``low`` up to, but without, ``high``.

    Rounding may give ``high`` itself, unless it is 1 and ``low`` is 0.
    """
    found = _float("uniform", dtype)
    sizes = shape_of("random.uniform", shape)
    backend = backend_of(device)
    key = _key(backend, seed)
    if found.bits < 64 and isinstance(key, int):
        t = Tensor.rand(backend, sizes, found.native, key)
    elif found.bits < 64:
        # As many bits as the significand has, so that no number rounds to 1.
        digits = 1 - round(math.log2(finfo(found).eps))
        bits = _words(backend, _count(sizes), key, 0)
        bits = ops.scalar("shr", (bits, literal(bits, 32 - digits)))
        t = ops.cast(ops.reshape(bits, sizes), "f32")
        t = ops.cast(ops.scalar("mul", (t, literal(t, 2.0**-digits))), found.native)
    else:
        # The 53 bits of a float64's fraction.
        bits = _bits(backend, sizes, key)
        t = ops.cast(ops.scalar("shr", (bits, literal(bits, 11))), "f64")
        t = ops.scalar("mul", (t, literal(t, 2.0**-53)))
    if (low, high) != (0.0, 1.0):
        t = ops.scalar("mul", (t, literal(t, float(high) - float(low))))
        t = ops.scalar("add", (t, literal(t, float(low))))
    return wrap(t)


def normal(
    shape: int | Sequence[int] = (),
    *,
    mean: float = 0.0,
    std: float = 1.0,
    dtype: DType | None = None,
    device: DeviceLike = None,
    seed: int | None = None,
) -> Array:
    """Numbers of a normal distribution, computed in float32."""
    found = _float("normal", dtype)
    backend = backend_of(device)
    sizes, key = shape_of("random.normal", shape), _key(backend, seed)
    if isinstance(key, int):
        t = Tensor.randn(backend, sizes, found.native, key)
    else:
        t = ops.cast(ops.randn_by_key(*key, sizes), found.native)
    if std != 1.0:
        t = ops.scalar("mul", (t, literal(t, float(std))))
    if mean != 0.0:
        t = ops.scalar("add", (t, literal(t, float(mean))))
    return wrap(t)


def randint(
    low: int,
    high: int,
    shape: int | Sequence[int] = (),
    *,
    dtype: DType | None = None,
    device: DeviceLike = None,
    seed: int | None = None,
) -> Array:
    """Integers from ``low`` up to, but without, ``high``.

    They are the remainders of 64 random bits, so numbers differ in probability by at most the size of the
    range over 2^64.
    """
    found = DEFAULT_INT if dtype is None else check_dtype(dtype)
    if found.kind not in "iu":
        raise DTypeError(f"random.randint makes integers, not {found}")
    limits = iinfo(found)
    if not limits.min <= low < high <= limits.max + 1:
        raise ArgumentError(f"random.randint: there is no {found} from {low} up to {high}")
    backend = backend_of(device)
    bits = _bits(backend, shape_of("random.randint", shape), _key(backend, seed))
    if high - low < 1 << 64:
        bits = ops.scalar("rem", (bits, literal(bits, high - low)))
    # The sum wraps to the right number.
    bits = ops.scalar("add", (bits, literal(bits, low % (1 << 64))))
    signed = ops.bitcast(bits, "i64") if found.kind == "i" else bits
    return wrap(ops.cast(signed, found.native))


def permutation(
    x: int | Array, /, *, axis: int = 0, device: DeviceLike = None, seed: int | None = None
) -> Array:
    """The numbers below an integer, or the parts of an array along an axis, in random order."""
    if isinstance(x, Array):
        at = axis_of("random.permutation", axis, x.ndim)
        return wrap(ops.gather(x._tensor, _order(x._tensor.backend, x.shape[at], seed), at))
    (n,) = shape_of("random.permutation", x)
    return wrap(_order(backend_of(device), n, seed))


def _order(backend: Backend, n: int, seed: int | None) -> Tensor:
    """The numbers below n in the order of random keys."""
    return ops.argsort(_bits(backend, (n,), _key(backend, seed)), 0, False)
