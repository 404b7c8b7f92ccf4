"""Runs a graph of PyTorch over native tensors: the function from which a plan is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import GraphModule, Node

from halcyon import _native
from halcyon.torch.compile.dtypes import NAMES
from halcyon.torch.compile.table import ROWS, Call, Unsupported, aten
from halcyon.torch.compile.value import Value

__all__ = [
    "Interpreter",
    "Sizes",
    "dense_order",
    "hint",
    "inverse",
    "operations",
    "output_nodes",
    "unsupported",
]

_SIZES = {aten.sym_size.int, aten.sym_numel.default}
_CHECKS = {aten._assert_tensor_metadata.default}


def operations(gm: GraphModule) -> list[Node]:
    """The calls of a graph."""
    return [n for n in gm.graph.nodes if n.op in ("call_function", "call_method", "call_module")]


def _is_symbolic(node: Node) -> bool:
    """Whether a call computes a number and not a tensor."""
    val = node.meta.get("val")
    return isinstance(val, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


def _tensors(val: Any) -> list[torch.Tensor]:
    if isinstance(val, torch.Tensor):
        return [val]
    if isinstance(val, (list, tuple)):
        return [t for v in val for t in _tensors(v)]
    return []


def _refused(val: torch.Tensor) -> str | None:
    """Why a tensor cannot be used, if it cannot."""
    if val.device.type != "cpu":
        return f"a tensor on {val.device}"
    if val.layout != torch.strided:
        return f"the layout {val.layout}"
    if val.dtype not in NAMES:
        return f"the element type {val.dtype}"
    return None


def unsupported(gm: GraphModule) -> dict[str, str]:
    """The operations of a graph that have no row, or whose tensors cannot be used, with reasons."""
    found: dict[str, str] = {}
    for node in gm.graph.nodes:
        name = str(node.target) if node.op != "placeholder" else "input"
        if node.op in ("call_method", "call_module"):
            found[name] = "it is no operation of ATen"
        elif node.op == "call_function" and node.target is not operator.getitem:
            known = node.target in ROWS or node.target in _SIZES or node.target in _CHECKS
            if not known and not (_is_symbolic(node) and not isinstance(node.target, torch._ops.OpOverload)):
                found[name] = "the table has no row for it"
        for val in _tensors(node.meta.get("val")):
            why = _refused(val)
            if why is not None:
                found.setdefault(name, why)
    return found


class Sizes:
    """The numbers of a graph's symbols in one plan."""

    __slots__ = ("known", "symbols")

    def __init__(self) -> None:
        self.symbols: dict[sympy.Symbol, sympy.Integer] = {}
        self.known: dict[sympy.Expr, int] = {}

    def bind(self, size: Any, number: int) -> None:
        """Learns a symbol from a size that is this symbol alone."""
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
            self.symbols[size.node.expr] = sympy.Integer(number)

    def __call__(self, size: Any) -> int:
        """The number of a size."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expr = size.node.expr
        if expr not in self.known:
            made = expr.subs(self.symbols)
            if not made.is_number:
                raise Unsupported(f"a size that depends on values ({made})")
            self.known[expr] = int(made)
        return self.known[expr]


class Interpreter:
    """A graph as a function of native tensors, for `_native.Compiled`."""

    def __init__(
        self,
        gm: GraphModule,
        backend: _native.Backend,
        numbers: Sequence[Any],
        constant: Callable[[str], _native.Tensor],
    ) -> None:
        self.gm = gm
        self.backend = backend
        self.numbers = numbers
        """The graph's arguments that are no tensors, in their places."""
        self.constant = constant
        self.seeds = 0
        """How many keys for random numbers the graph has taken."""
        self.found: dict[Node, Any] = {}
        """The numbers among the graph's results."""

    def key(self) -> tuple[Value, Value]:
        """A key for random numbers that no other operation of the graph has."""
        low = Value(_native.ops.call_argument(self.backend, 0, "u32"))
        high = Value(_native.ops.call_argument(self.backend, 1, "u32"))
        self.seeds += 1
        return low, high + self.seeds

    def __call__(self, *tensors: _native.Tensor) -> list[_native.Tensor]:
        """Traces the graph for inputs of these types."""
        sizes, env = Sizes(), {}
        given, numbers = iter(tensors), iter(self.numbers)
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._input(node, sizes, given, numbers)
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                env[node] = Value(self.constant(str(node.target)))
            elif node.op == "call_function":
                try:
                    env[node] = self._run(node, env, sizes)
                except Unsupported as e:
                    raise Unsupported(e.reason, str(node.target)) from e
                except Exception as e:
                    # A row that fails must not fail the program. The graph falls back; the report says why.
                    raise Unsupported(f"{type(e).__name__}: {e}", str(node.target)) from e
            elif node.op == "output":
                return self._outputs(node, env)
        raise Unsupported("the graph has no output", "output")

    def _input(self, node: Node, sizes: Sizes, given: Any, numbers: Any) -> Any:
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            made = Value(next(given))
            order = dense_order(val)
            if order is not None:
                made = made.permute(inverse(order))
            for size, number in zip(val.shape, made.shape, strict=True):
                sizes.bind(size, number)
            return made
        number = next(numbers)
        sizes.bind(val, number)
        return number

    def _run(self, node: Node, env: dict[Node, Any], sizes: Sizes) -> Any:
        target: Any = node.target

        def of(n: Node) -> Any:
            return env[n]

        args: Any = torch.fx.map_arg(node.args, of)
        kwargs: Any = torch.fx.map_arg(node.kwargs, of)
        if target is aten.sym_size.int:
            return args[0].shape[args[1]]
        if target is aten.sym_numel.default:
            return args[0].size
        if target in _CHECKS:
            return None
        row = ROWS.get(target)
        if row is None:
            return target(*args, **kwargs)
        call = Call(self.backend, node, sizes, self.key)
        made = row(call, *args, **kwargs)
        self._check(node, call, made)
        return made

    def _check(self, node: Node, call: Call, made: Any) -> None:
        """Compares the result's types with those of PyTorch's graph."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            pairs = [(0, made)]
        else:
            if len(made) != len(val):
                raise Unsupported(f"{len(made)} results instead of {len(val)}")
            pairs = [(i, m) for i, m in enumerate(made) if isinstance(val[i], torch.Tensor)]
        for i, m in pairs:
            if m is None:
                # A gradient that the mask of the operation excludes.
                continue
            if m.dtype != call.dtype(i) or m.shape != call.shape(i):
                want = f"{call.dtype(i)}{list(call.shape(i))}"
                raise Unsupported(f"result {i} would be {m.dtype}{list(m.shape)} instead of {want}")

    def _outputs(self, node: Node, env: dict[Node, Any]) -> list[_native.Tensor]:
        returned: Any = node.args[0]
        self.found = {n: env[n] for n in returned if isinstance(n, Node) and not isinstance(env[n], Value)}
        made = []
        for n in output_nodes(node):
            order = dense_order(n.meta["val"])
            v = env[n]
            made.append(v.t if order is None else v.permute(order).t)
        return made


def output_nodes(output: Node) -> list[Node]:
    """The nodes of tensors that a graph computes and returns, each once. Inputs are returned as they are."""
    found: dict[Node, None] = {}
    for n in output.args[0]:  # type: ignore[union-attr]
        if isinstance(n, Node) and n.op != "placeholder" and isinstance(n.meta.get("val"), torch.Tensor):
            found[n] = None
    return list(found)


def inverse(order: Sequence[int]) -> list[int]:
    """The order of axes that undoes another."""
    return [order.index(k) for k in range(len(order))]


def hint(size: Any) -> int | None:
    """A size; of a symbolic one, that of the first call, if it is known.

    `int` of a symbolic size would add a guard, and the graph would be compiled again for each other size.
    """
    if not isinstance(size, torch.SymInt):
        return int(size)
    known = size.node.hint
    return None if known is None else int(known)


def dense_order(val: torch.Tensor) -> list[int] | None:
    """The order of axes in which a tensor is dense; None if it is row-major or not dense.

    Of symbolic sizes, those of the first call decide. An input that has another order in a later call is
    copied; a result has the order of the first call.
    """
    sizes, strides = [hint(n) for n in val.shape], [hint(s) for s in val.stride()]
    if None in sizes or None in strides or 0 in sizes:
        return None
    rows = list(range(len(sizes)))
    if _is_dense(sizes, strides, rows):
        return None
    order = sorted(rows, key=lambda k: (-(strides[k] or 0), k))
    return order if _is_dense(sizes, strides, order) else None


def _is_dense(sizes: Sequence[int | None], strides: Sequence[int | None], order: Sequence[int]) -> bool:
    expected = 1
    for k in reversed(order):
        if sizes[k] != 1 and strides[k] != expected:
            return False
        expected *= sizes[k] or 0
    return True
