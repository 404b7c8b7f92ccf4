"""Stored calls of native operations, with results of eager PyTorch: how they are read, replayed and compared.

A case is one graph that `torch.compile(backend="halcyon")` made: the arrays that go in, the native operations
in their order, and what eager PyTorch computes. ``torch/record_ops.py`` records cases. Nothing here needs
PyTorch.

The file is an ``.npz`` with two arrays of bytes: `index`, which is JSON, and `data`, to which the index
refers by element type, shape and offset. In the arguments of an operation, ``["t", n]`` is tensor `n` of the
case (the inputs come first, then the results of the operations in their order), ``["b"]`` is the backend,
``["l", …]`` a list and ``["u", …]`` a tuple.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from halcyon import _native

STORED = Path(__file__).parent / "stored" / "opinfo.npz"
TOLERANCES = {"f16": (2e-3, 2e-3), "bf16": (1.6e-2, 1.6e-2), "f32": (2e-5, 2e-5), "f64": (1e-7, 1e-7)}
"""Relative and absolute, of a single result, as in ``torch/opinfo.py``. Other types must be equal."""
FULL = "full"
"""The one operation that is no function of `_native.ops`: a tensor filled with a number."""

_NUMPY: dict[str, Any] = {
    **{"bool": np.bool_, "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64},
    **{f"{kind[0]}{bits}": np.dtype(f"{kind}{bits // 8}") for kind in "iu" for bits in (8, 16, 32, 64)},
}


@dataclass
class Array:
    """The bytes of an array, dense and row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(t: _native.Tensor) -> Array:
        """The value of a tensor."""
        return Array(t.dtype, tuple(t.shape), t.to_bytes())

    def tensor(self, backend: _native.Backend) -> _native.Tensor:
        """A native tensor."""
        return _native.Tensor.from_bytes(backend, self.data, list(self.shape), self.dtype)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The numbers. bf16 becomes f32."""
        made = np.frombuffer(self.data, _NUMPY[self.dtype]).reshape(self.shape)
        if self.dtype == "bf16":
            return (made.astype(np.uint32) << 16).view(np.float32)
        return made


@dataclass
class Case:
    """One graph."""

    name: str
    """The operator, the element type, the direction and the number of the sample."""
    inputs: list[Array] = field(default_factory=list)
    steps: list[list[Any]] = field(default_factory=list)
    """Name, arguments and named arguments of each operation."""
    outputs: list[int] = field(default_factory=list)
    """The tensors that the graph returns."""
    expected: dict[int, Array] = field(default_factory=dict)
    """Results of eager PyTorch, by their place among the outputs."""


def tensors_of(result: Any) -> Sequence[_native.Tensor]:
    """The tensors that an operation returned."""
    return result if isinstance(result, (tuple, list)) else [result]


def run(case: Case, backend: _native.Backend) -> list[Array]:
    """Replays a case in one plan."""

    def traced(*inputs: _native.Tensor) -> list[_native.Tensor]:
        known = list(inputs)

        def decoded(v: Any) -> Any:
            if not isinstance(v, list):
                return v
            kind, *rest = v
            if kind == "t":
                return known[rest[0]]
            if kind == "b":
                return backend
            return tuple(map(decoded, rest)) if kind == "u" else [decoded(x) for x in rest]

        for name, args, kwargs in case.steps:
            f = _native.Tensor.full if name == FULL else getattr(_native.ops, name)
            known += tensors_of(f(*map(decoded, args), **{k: decoded(v) for k, v in kwargs.items()}))
        return [known[n] for n in case.outputs]

    compiled = _native.Compiled(backend, traced)
    return [Array.of(t) for t in compiled([a.tensor(backend) for a in case.inputs])]


def differences(case: Case, results: Sequence[Array]) -> list[str]:
    """What differs from eager PyTorch."""
    found = []
    for k, want in case.expected.items():
        got = results[k]
        if (got.dtype, got.shape) != (want.dtype, want.shape):
            found.append(f"result {k} is {got.dtype}{got.shape}, not {want.dtype}{want.shape}")
            continue
        a, b = got.numpy(), want.numpy()
        if want.dtype not in TOLERANCES:
            right = a == b
        else:
            relative, absolute = TOLERANCES[want.dtype]
            a, b = a.astype(np.float64), b.astype(np.float64)
            right = np.isclose(a, b, relative, absolute, equal_nan=True)
        if not right.all():
            at = tuple(int(i[0]) for i in np.nonzero(~np.atleast_1d(right)))
            pair = [np.atleast_1d(v)[at] for v in (a, b)]
            wrong = right.size - np.count_nonzero(right)
            found.append(
                f"result {k}{list(at)} is {pair[0]}, not {pair[1]} ({wrong} of {right.size} elements)"
            )
    return found


def load(path: Path = STORED) -> list[Case]:
    """Reads all cases."""
    with np.load(path, allow_pickle=False) as stored:
        index, data = json.loads(stored["index"].tobytes()), stored["data"].tobytes()

    def array(dtype: str, shape: list[int], offset: int) -> Array:
        size = math.prod(shape) * np.dtype(_NUMPY[dtype]).itemsize
        return Array(dtype, tuple(shape), data[offset : offset + size])

    return [
        Case(
            name,
            [array(*a) for a in inputs],
            steps,
            outputs,
            {k: array(*a) for k, *a in expected},
        )
        for name, inputs, steps, outputs, expected in index["cases"]
    ]


def save(cases: Sequence[Case], about: dict[str, Any], path: Path = STORED) -> None:
    """Writes cases. Equal arrays are stored once."""
    data, places = bytearray(), dict[bytes, int]()

    def described(a: Array) -> list[Any]:
        if a.data not in places:
            places[a.data] = len(data)
            data.extend(a.data)
        return [a.dtype, list(a.shape), places[a.data]]

    listed = [
        [
            c.name,
            [described(a) for a in c.inputs],
            c.steps,
            c.outputs,
            [[k, *described(a)] for k, a in c.expected.items()],
        ]
        for c in cases
    ]
    index = json.dumps({"about": about, "cases": listed}, separators=(",", ":")).encode()
    np.savez_compressed(path, index=np.frombuffer(index, np.uint8), data=np.frombuffer(bytes(data), np.uint8))
