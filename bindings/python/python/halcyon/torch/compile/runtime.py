"""A compiled graph: takes PyTorch's tensors, runs plans, gives PyTorch's tensors."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _from_dlpack, _to_dlpack
from torch.fx import GraphModule, Node

from halcyon import _native
from halcyon._errors import ArgumentError, DriverError, DTypeError, ShapeError, UnsupportedError
from halcyon.torch.compile.freeze import Freezer, Frozen, View, candidates, view
from halcyon.torch.compile.interpret import (
    Interpreter,
    dense_order,
    inverse,
    operations,
    output_nodes,
    unsupported,
)
from halcyon.torch.compile.reports import GraphReport, fall_back, record
from halcyon.torch.compile.table import Unsupported

__all__ = ["CompiledGraph"]

_PLANS = 64
"""The number of sets of sizes for which a graph keeps a plan."""

_REFUSALS = (UnsupportedError, ShapeError, DTypeError, ArgumentError, DriverError)
"""Errors of planning. The graph falls back; other errors, such as an index out of range, are the user's."""


def imported(backend: _native.Backend, t: torch.Tensor) -> _native.Tensor:
    """A dense tensor of PyTorch over the same memory."""
    return _native.from_dlpack(backend, _to_dlpack(t.detach() if t.requires_grad else t))


class _Input:
    """A placeholder that takes a tensor."""

    __slots__ = ("dynamic", "fixed", "kept", "order", "place")

    def __init__(self, node: Node, place: int, fixed: bool, dynamic: bool) -> None:
        self.place = place
        self.dynamic = dynamic
        self.order = dense_order(node.meta["val"])
        """The order of axes in which the tensor is expected to be dense, if that is not the row-major one."""
        self.fixed = fixed
        """Whether calls give the same tensor, such as a parameter, so that its import is kept."""
        self.kept: tuple[View, _native.Tensor] | None = None

    def take(self, backend: _native.Backend, t: torch.Tensor) -> _native.Tensor:
        """The tensor with its axes in the expected order."""
        if t.is_neg():
            t = t.resolve_neg()
        if self.kept is not None and self.kept[0] == view(t, self.dynamic):
            # The import holds the memory, so no other memory has this address.
            return self.kept[1]
        own = t if self.order is None else t.permute(self.order)
        if not own.is_contiguous():
            return imported(backend, own.contiguous())
        if self.fixed:
            try:
                made = _native.from_dlpack(backend, _to_dlpack(own.detach()), False)
            except ArgumentError:
                # The memory is not aligned, so an import is a copy, which must not be kept.
                self.fixed = False
            else:
                self.kept = (view(t, self.dynamic), made)
                return made
        return imported(backend, own)


class _Plan:
    """The plan of one set of sizes and numbers."""

    __slots__ = ("compiled", "interpreter")

    def __init__(self, compiled: _native.Compiled, interpreter: Interpreter) -> None:
        self.compiled = compiled
        self.interpreter = interpreter


class CompiledGraph:
    """One graph of PyTorch. Called with the list of its inputs, which it empties."""

    def __init__(
        self,
        gm: GraphModule,
        name: str,
        backend: _native.Backend,
        fixed: Sequence[int] = (),
        freeze: str = "off",
    ) -> None:
        self.gm = gm
        self.backend = backend
        # AOTAutograd reads this mark from the object: wrappers do not copy attributes of the class.
        self._boxed_call = True
        nodes = list(gm.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        output = next(n for n in nodes if n.op == "output")
        self.report: GraphReport = record(name, len(operations(gm)))
        self.dynamic = any(_is_symbolic(n.meta.get("val")) for n in placeholders)
        self.inputs = [
            _Input(n, i, i in set(fixed), self.dynamic)
            for i, n in enumerate(placeholders)
            if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        tensors = {i.place for i in self.inputs}
        self.numbers = [i for i in range(len(placeholders)) if i not in tensors]
        computed = output_nodes(output)
        self.results = _results(output, placeholders, computed)
        orders = [dense_order(n.meta["val"]) for n in computed]
        self.orders = [None if o is None else inverse(o) for o in orders]
        self.random = any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in nodes)
        self.report.random = self.random
        self.plans: OrderedDict[tuple[int, tuple[Any, ...]], _Plan] = OrderedDict()
        self.constants: dict[str, _native.Tensor] = {}
        frozen = set(candidates(gm, fixed, freeze))
        own = [i for i in self.inputs if i.place in frozen]
        places, dense = [i.place for i in own], [i.order for i in own]
        self.freezer = Freezer(places, dense, freeze == "checked", self.dynamic) if own else None
        self.thawed = [i for i in self.inputs if i.place not in frozen]
        self.lock = threading.Lock()
        reasons = unsupported(gm)
        if reasons:
            fall_back(self.report, reasons.items())

    def __call__(self, args: list[Any]) -> list[Any]:
        """Runs the graph."""
        if not self.report.fell_back:
            try:
                return self._run(args)
            except Unsupported as e:
                fall_back(self.report, [(e.operation or "graph", e.reason)])
        made = list(self.gm(*args))
        args.clear()
        return made

    def _run(self, args: list[Any]) -> list[Any]:
        backend = self.backend
        key = tuple([args[i] for i in self.numbers])
        if self.dynamic:
            key += tuple([args[i.place].shape for i in self.inputs])
        frozen = None if self.freezer is None else self.freezer.current(backend, args)
        version, inputs = (0, self.inputs) if frozen is None else (frozen.version, self.thawed)
        plan = self.plans.get((version, key)) or self._plan(frozen, key, [args[i] for i in self.numbers])
        tensors = [i.take(backend, args[i.place]) for i in inputs]
        seed = torch.randint(2**32, (2,), dtype=torch.int64).tolist() if self.random else None
        try:
            made = plan.compiled(tensors, seed)
        except _REFUSALS as e:
            raise Unsupported(f"{type(e).__name__}: {e}") from e
        out = [_from_dlpack(_native.to_dlpack(t, True, None, True)) for t in made]
        for k, order in enumerate(self.orders):
            if order is not None:
                out[k] = out[k].permute(order)
        results: list[Any] = []
        for kind, what in self.results:
            if kind == "new":
                results.append(out[what])
            elif kind == "input":
                results.append(args[what])
            elif kind == "number":
                results.append(plan.interpreter.found[what])
            else:
                results.append(what)
        args.clear()
        return results

    def _plan(self, frozen: Frozen | None, key: tuple[Any, ...], numbers: list[Any]) -> _Plan:
        version = 0 if frozen is None else frozen.version
        with self.lock:
            known = self.plans.get((version, key))
            if known is not None:
                return known
            interpreter = Interpreter(self.gm, self.backend, numbers, self._constant)
            function: Callable[..., list[_native.Tensor]] = interpreter
            if frozen is not None:
                # Plans of earlier constants are not used again.
                for old in [k for k in self.plans if k[0] not in (0, version)]:
                    del self.plans[old]
                function = self._with_constants(interpreter, frozen.constants)
            made = _Plan(_native.Compiled(self.backend, function), interpreter)
            self.plans[(version, key)] = made
            if len(self.plans) > _PLANS:
                self.plans.popitem(last=False)
            return made

    def _with_constants(
        self, interpreter: Interpreter, constants: dict[int, _native.Tensor]
    ) -> Callable[..., list[_native.Tensor]]:
        places = [i.place for i in self.inputs]

        def function(*tensors: _native.Tensor) -> list[_native.Tensor]:
            given = iter(tensors)
            return interpreter(*[constants[p] if p in constants else next(given) for p in places])

        return function

    def _constant(self, name: str) -> _native.Tensor:
        """A tensor that the graph holds."""
        if name not in self.constants:
            t = operator_attribute(self.gm, name)
            if not isinstance(t, torch.Tensor):
                raise Unsupported(f"the attribute {name} is no tensor", "get_attr")
            self.constants[name] = imported(self.backend, t.contiguous())
        return self.constants[name]


def operator_attribute(gm: GraphModule, name: str) -> Any:
    """An attribute by its path."""
    found: Any = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _is_symbolic(val: Any) -> bool:
    if isinstance(val, torch.Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*val.shape, *val.stride()))
    return isinstance(val, (torch.SymInt, torch.SymFloat))


def _results(output: Node, placeholders: list[Node], computed: list[Node]) -> list[tuple[str, Any]]:
    """How each result is found: a computed tensor (``new``), an ``input``, a ``number``, or a ``value``."""
    new = {n: k for k, n in enumerate(computed)}
    inputs = {n: k for k, n in enumerate(placeholders)}
    found: list[tuple[str, Any]] = []
    for n in output.args[0]:  # type: ignore[union-attr]
        if not isinstance(n, Node):
            found.append(("value", n))
        elif n in inputs:
            found.append(("input", inputs[n]))
        elif n in new:
            found.append(("new", new[n]))
        elif n.op == "get_attr" or n.meta.get("val") is None:
            found.append(("value", None))
        else:
            found.append(("number", n))
    return found
