"""Functions of functions: gradients and compilation.

Arguments and results are trees of tuples, lists and dicts whose leaves are arrays.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import struct
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from halcyon import _native
from halcyon._errors import ArgumentError, DTypeError, ShapeError
from halcyon._native import Backend, Tensor
from halcyon.array._array import Array, wrap
from halcyon.array._core import integer, is_numpy_number, literal, ops
from halcyon.array._devices import Device

__all__ = ["CompiledFunction", "compile", "eval", "grad", "is_tracing", "value_and_grad"]

P = ParamSpec("P")
R = TypeVar("R")


# Trees.


class _Leaf:
    """The place of an array in a tree."""

    def __eq__(self, other: object) -> builtins.bool:
        return isinstance(other, _Leaf)

    def __hash__(self) -> int:
        return 1


_LEAF = _Leaf()


class _Static:
    """A value of a tree that is no array. It is equal only to a value of its type."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def _key(self) -> tuple[Any, ...]:
        return (type(self.value), _identity(self.value))

    def __eq__(self, other: object) -> builtins.bool:
        return isinstance(other, _Static) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _identity(value: Any) -> Any:
    """What is equal for the same value only: the bits of floats, as 0.0 == -0.0 and nan != nan."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    return value.tobytes() if is_numpy_number(value) else value


class _Node:
    """A tuple, list or dict of a tree."""

    def __init__(self, kind: type, keys: tuple[Any, ...] | None, children: tuple[Any, ...]) -> None:
        self.kind, self.keys, self.children = kind, keys, children

    def _key(self) -> tuple[Any, ...]:
        return (self.kind, self.keys, self.children)

    def __eq__(self, other: object) -> builtins.bool:
        return isinstance(other, _Node) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def _flatten(tree: Any, leaves: list[Array]) -> Any:
    """The structure of a tree. Appends its arrays."""
    if isinstance(tree, Array):
        leaves.append(tree)
        return _LEAF
    if isinstance(tree, (tuple, list)):
        return _Node(type(tree), None, tuple(_flatten(v, leaves) for v in tree))
    if isinstance(tree, dict):
        return _Node(type(tree), tuple(tree), tuple(_flatten(v, leaves) for v in tree.values()))
    return _Static(tree)


def _unflatten(structure: Any, leaves: Iterator[Array]) -> Any:
    """The tree of a structure with arrays."""
    if isinstance(structure, _Leaf):
        return next(leaves)
    if isinstance(structure, _Static):
        return structure.value
    children = [_unflatten(c, leaves) for c in structure.children]
    if structure.keys is not None:
        return structure.kind(zip(structure.keys, children, strict=False))
    if hasattr(structure.kind, "_fields"):
        return structure.kind(*children)
    return structure.kind(children)


def _arrays(op: str, tree: Any) -> tuple[list[Array], Any]:
    """The arrays and the structure of a tree without other values."""
    leaves: list[Array] = []
    structure = _flatten(tree, leaves)
    bad = _first_static(structure)
    if bad is not None:
        raise DTypeError(f"{op}: {bad.value!r} is not an array")
    return leaves, structure


def _first_static(structure: Any) -> _Static | None:
    if isinstance(structure, _Static):
        return structure
    if isinstance(structure, _Node):
        return next((s for c in structure.children if (s := _first_static(c)) is not None), None)
    return None


# Functions that run.


class Keys:
    """Keys of the draws of random numbers in a function that is traced for a training step.

    The key of a run is its arguments 0 and 1. Each draw in the function has a key that follows from it.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._drawn = 0

    def next(self) -> tuple[Tensor, Tensor]:
        """The halves of the next draw's key."""
        run = [ops.call_argument(self.backend, k, "u32") for k in (0, 1)]
        at = self._drawn
        self._drawn += 1
        words = (ops.scalar("threefry", (*run, literal(run[0], 2 * at + k))) for k in (0, 1))
        low, high = words
        return low, high


class _Running(threading.local):
    """How many functions of each kind this thread runs, one inside of the other."""

    traced = 0
    differentiated = 0
    keys: Keys | None = None


_running = _Running()


def is_tracing() -> builtins.bool:
    """Whether this thread runs a function with placeholders in order to compile it."""
    return _running.traced > 0


def keys() -> Keys | None:
    """The keys of the training step that this thread traces."""
    return _running.keys


@contextlib.contextmanager
def _tracing(keys: Keys | None = None) -> Iterator[None]:
    before, _running.keys = _running.keys, keys
    _running.traced += 1
    try:
        yield
    finally:
        _running.traced -= 1
        _running.keys = before


@contextlib.contextmanager
def _differentiating() -> Iterator[None]:
    _running.differentiated += 1
    try:
        yield
    finally:
        _running.differentiated -= 1


def _is_inside(leaves: Sequence[Array]) -> builtins.bool:
    """Whether operations on these arrays belong to a gradient or to a function that is compiled."""
    if _running.traced or _running.differentiated:
        return True
    # Another thread may run the function whose parameters these are.
    return any(ops.is_tracked(x._tensor) for x in leaves)


# Gradients.


def _check_function(op: str, function: Any) -> None:
    if not callable(function):
        raise DTypeError(f"{op} takes a function, not {type(function).__name__}")


def value_and_grad(
    function: Callable[P, Array], argnums: int | Sequence[int] = 0
) -> Callable[P, tuple[Array, Any]]:
    """A function that returns the value of a function and its gradients.

    The function returns a float with one element. The gradients are taken with respect to the positional
    arguments with the numbers ``argnums``, trees of float arrays, and have their structure. With a sequence
    of numbers they are a tuple.

    Each of these arrays is a variable of its own: what the function captures is constant, even if it was
    computed from an argument. The results have no history, except inside of another gradient or a compiled
    function.
    """
    _check_function("value_and_grad", function)
    chosen = argnums if isinstance(argnums, (list, tuple)) else (argnums,)
    numbers = tuple(integer("value_and_grad", "a number of argnums", k) for k in chosen)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> tuple[Array, Any]:
        for k in numbers:
            if not -len(args) <= k < len(args):
                raise ArgumentError(
                    f"value_and_grad: {len(args)} positional arguments were given, and argnums is {argnums}"
                )
        leaves, structure = _arrays("value_and_grad", tuple(args[k] for k in numbers))
        for x in leaves:
            if x._dtype.kind != "f":
                raise DTypeError(f"value_and_grad: gradients are taken of floats, not of {x._dtype}")
        if not leaves:
            raise ArgumentError("value_and_grad: the arguments have no arrays")
        made: list[Array] = []

        def inner(*tensors: Tensor) -> list[Tensor]:
            given = list(args)
            for k, value in zip(numbers, _unflatten(structure, map(wrap, tensors)), strict=False):
                given[k] = value
            with _differentiating():
                out = function(*given, **kwargs)
            if not isinstance(out, Array) or out._dtype.kind != "f":
                raise DTypeError("value_and_grad: the function must return an array of floats")
            if out.size != 1:
                raise ShapeError(
                    f"value_and_grad: the function returned the shape {out.shape}, not one element"
                )
            made.append(out)
            return [out._tensor]

        tensors = [x._tensor for x in leaves]
        # Inside of another gradient or a compiled function the results keep their history.
        is_inner = _is_inside(leaves)
        value, grads = _native.value_and_grad(inner, tensors, is_tracing(), is_inner)
        tree = _unflatten(structure, map(wrap, grads))
        return made[0] if is_inner else wrap(value), tree[0] if isinstance(argnums, int) else tree

    return wrapped


def grad(function: Callable[P, Array], argnums: int | Sequence[int] = 0) -> Callable[P, Any]:
    """A function that returns the gradients of a function; see :func:`value_and_grad`."""
    both = value_and_grad(function, argnums)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Any:
        return both(*args, **kwargs)[1]

    return wrapped


# Compilation.


class _Entry:
    """The compiled function of one signature."""

    def __init__(self, function: Callable[..., Any], device: Device, structure: Any) -> None:
        self.result: Any = None
        self._function = function
        self._structure = structure
        # The native object is not known to the garbage collector, so it must not hold this one.
        entry = weakref.ref(self)

        def traced(*tensors: Tensor) -> list[Tensor]:
            alive = entry()
            assert alive is not None, "a function is traced while it is called"
            return alive._traced(*tensors)

        self.native = _native.Compiled(device.backend, traced)

    def _traced(self, *tensors: Tensor) -> list[Tensor]:
        with _tracing():
            args, kwargs = _unflatten(self._structure, map(wrap, tensors))
            out = self._function(*args, **kwargs)
        leaves: list[Array] = []
        self.result = _flatten(out, leaves)
        return [x._tensor for x in leaves]


class CompiledFunction(Generic[P, R]):
    """A function that is traced once for each signature; see :func:`compile`."""

    def __init__(self, function: Callable[P, R]) -> None:
        self._function = function
        self._entries: dict[Any, _Entry] = {}
        self._lock = threading.Lock()
        functools.update_wrapper(self, function)

    @property
    def signatures(self) -> int:
        """The number of signatures that the function was traced for."""
        return len(self._entries)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        leaves: list[Array] = []
        structure = _flatten((args, kwargs), leaves)
        # Inside of a gradient or of another compiled function, the operations belong to that computation.
        if not leaves or _is_inside(leaves):
            return self._function(*args, **kwargs)
        device = leaves[0].device
        types = tuple((x._dtype, x.shape) for x in leaves)
        try:
            entry = self._entry((structure, device, types), structure, device)
        except TypeError as e:
            if "unhashable" not in str(e):
                raise
            raise DTypeError(f"compile: an argument that is no array must be hashable: {e}") from None
        out = entry.native([x._tensor for x in leaves])
        made: R = _unflatten(entry.result, map(wrap, out))
        return made

    def __get__(self, instance: object, owner: type | None = None) -> Callable[..., R]:
        """A method: the instance is a static argument."""
        return self if instance is None else functools.partial(self, instance)  # type: ignore[arg-type]

    def _entry(self, key: Any, structure: Any, device: Device) -> _Entry:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                entry = self._entries[key] = _Entry(self._function, device, structure)
            return entry


def compile(function: Callable[P, R]) -> CompiledFunction[P, R]:
    """Compiles a function of trees of arrays to one plan.

    The function is traced once for each signature: the structure, shapes and element types of the arguments,
    and the values of arguments that are no arrays, which must be hashable. Tracing calls the function with
    placeholders, so it cannot read values, and its side effects happen only then.
    """
    _check_function("compile", function)
    return CompiledFunction(function)


def eval(*trees: Any) -> None:
    """Computes all arrays of trees, those of a device as one plan. Operations that they share run once."""
    leaves: list[Array] = []
    for tree in trees:
        _flatten(tree, leaves)
    groups: list[tuple[Device, list[Tensor]]] = []
    for x in leaves:
        for device, tensors in groups:
            if x.device == device:
                tensors.append(x._tensor)
                break
        else:
            groups.append((x.device, [x._tensor]))
    for _, tensors in groups:
        _native.eval(tensors)
