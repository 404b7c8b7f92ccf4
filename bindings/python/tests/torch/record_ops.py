"""Records calls of native operations for `stored_ops`, from PyTorch's own OpInfo samples.

    python tests/torch/record_ops.py --seed 5 --share 2

Of each operator of PyTorch's database, some samples are drawn. Each goes through the compile backend, whose
calls of native operations are recorded. The case keeps the arrays that go into the graph and the results of
eager PyTorch for the same sample. A case is left out if its replay differs from eager PyTorch by more than
the tolerance, for example because an index may name any of equal elements; `opinfo.py` judges such samples.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import opinfo
import stored_ops
from halcyon import _native
from halcyon.torch.compile import runtime, table
from halcyon.torch.compile.dtypes import NAMES
from halcyon.torch.compile.interpret import inverse
from stored_ops import Array, Case

ELEMENTS = 1500
"""The largest number of elements of all arrays of a case together."""
CANDIDATES = 25
"""From so many first samples of a type one is drawn."""


class Tape:
    """A recorded graph."""

    def __init__(self, inputs: tuple[_native.Tensor, ...], given: list[Array]) -> None:
        self.case = Case("", list(given))
        self.known = {id(t): k for k, t in enumerate(inputs)}
        self.count = len(inputs)
        self.kept: list[Any] = list(inputs)
        self.late: list[tuple[int, Array]] = []
        """Constants, which become inputs: their numbers until the end are negative."""
        self.results: list[tuple[int, torch.Tensor, list[int] | None]] = []

    def encoded(self, v: Any) -> Any:
        """An argument in the form of `stored_ops`."""
        if isinstance(v, _native.Tensor):
            if id(v) not in self.known:
                self.late.append((-1 - len(self.late), Array.of(v)))
                self.known[id(v)] = self.late[-1][0]
                self.kept.append(v)
            return ["t", self.known[id(v)]]
        if isinstance(v, _native.Backend):
            return ["b"]
        if isinstance(v, (tuple, list)):
            return ["u" if isinstance(v, tuple) else "l", *map(self.encoded, v)]
        if v is None or isinstance(v, (bool, int, float, str)):
            return v
        raise TypeError(f"an argument of type {type(v).__name__}")

    def step(self, name: str, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Adds a call."""
        named = {k: self.encoded(v) for k, v in kwargs.items()}
        self.case.steps.append([name, [self.encoded(a) for a in args], named])
        for t in stored_ops.tensors_of(result):
            self.known[id(t)] = self.count
            self.count += 1
            self.kept.append(t)

    def finish(self, outputs: list[_native.Tensor]) -> None:
        """Numbers the outputs, and moves constants to the inputs."""
        self.case.outputs = [self.encoded(t)[1] for t in outputs]
        first, extra = len(self.case.inputs), len(self.late)

        def moved(v: Any) -> Any:
            if isinstance(v, list) and v and v[0] == "t":
                n = v[1]
                return ["t", first - 1 - n if n < 0 else n if n < first else n + extra]
            return list(map(moved, v)) if isinstance(v, list) else v

        if extra:
            self.case.inputs += [a for _, a in self.late]
            self.case.steps = [
                [name, [moved(a) for a in args], {k: moved(v) for k, v in kwargs.items()}]
                for name, args, kwargs in self.case.steps
            ]
            self.case.outputs = [moved(["t", n])[1] for n in self.case.outputs]
        self.known.clear()


class Module:
    """`_native` with some names replaced."""

    def __init__(self, **replaced: Any) -> None:
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(_native, name)


class Tensors:
    """`_native.Tensor` whose `full` is recorded."""

    def __init__(self, full: Any) -> None:
        self.full = full


@contextlib.contextmanager
def recording() -> Iterator[list[Tape]]:
    """Records all graphs that run meanwhile."""
    tapes: list[Tape] = []
    current: list[Tape] = []

    def noted(name: str, f: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = f(*args, **kwargs)
            if current:
                current[-1].step(name, args, kwargs, made)
            return made

        return call

    class Compiled:
        def __init__(self, backend: _native.Backend, function: Any) -> None:
            self.given: list[Array] = []
            self.tape: Tape | None = None

            def traced(*inputs: _native.Tensor) -> list[_native.Tensor]:
                current.append(Tape(inputs, self.given))
                try:
                    made = function(*inputs)
                    current[-1].finish(made)
                finally:
                    self.tape = current.pop()
                return made  # type: ignore[no-any-return]

            self.inner = _native.Compiled(backend, traced)

        def __call__(self, inputs: list[_native.Tensor], args: Any = None) -> list[_native.Tensor]:
            self.given = [Array.of(t) for t in inputs]
            made = self.inner(inputs, args)
            if self.tape is not None:
                tapes.append(self.tape)
            return made

    real = runtime.CompiledGraph._run

    def run(graph: Any, args: list[Any]) -> list[Any]:
        before = len(tapes)
        made = real(graph, args)
        if len(tapes) > before:
            new = [(v, what) for v, (kind, what) in zip(made, graph.results, strict=True) if kind == "new"]
            tapes[-1].results = [(k, v, graph.orders[k]) for v, k in new]
        return made

    names = [n for n in dir(_native.ops) if callable(getattr(_native.ops, n)) and not n.startswith("_")]
    with contextlib.ExitStack() as stack:
        for n in names:
            stack.enter_context(mock.patch.object(_native.ops, n, noted(n, getattr(_native.ops, n))))
        full = Tensors(noted(stored_ops.FULL, _native.Tensor.full))
        stack.enter_context(mock.patch.object(table, "_native", Module(Tensor=full)))
        stack.enter_context(mock.patch.object(runtime, "_native", Module(Compiled=Compiled)))
        stack.enter_context(mock.patch.object(runtime.CompiledGraph, "_run", run))
        yield tapes


def native(t: torch.Tensor, order: list[int] | None) -> Array:
    """A result of eager PyTorch in the order of axes that the graph returns."""
    own = t.detach() if order is None else t.detach().permute(inverse(order))
    # A copy has memory of its own, which a tensor that is known to be zero lacks.
    plain = torch.zeros(own.shape, dtype=own.dtype).copy_(own).flatten()
    data = plain.view(torch.uint8).numpy().tobytes() if own.numel() else b""
    return Array(NAMES[t.dtype], tuple(own.shape), data)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are one array."""
    kind = (a.dtype, a.shape) == (b.dtype, b.shape) and a.data_ptr() == b.data_ptr()
    return kind and a.stride() == b.stride()


def cases_of(runner: opinfo.Runner, s: opinfo.Sample, backward: bool, name: str) -> list[Case]:
    """The cases of one sample; none if it falls back, is random, or has no result of eager PyTorch."""
    runner.backend.reset_report()
    try:
        inputs = s.tensors()
        want = s.call(*inputs)
        seeds = opinfo.seeds_for(want)
        want_grads = opinfo.gradients(want, inputs, seeds) if backward else []
        own = s.tensors()
        with recording() as tapes:
            got = list(runner.compiled(s.call)(*own))
            got_grads = opinfo.gradients(got, own, seeds) if backward else []
    except opinfo.Late:
        raise
    except Exception:
        return []
    report = runner.backend.report()
    if report.fallbacks or any(g.random for g in report.graphs):
        return []
    found = []
    for tape in tapes:
        case = tape.case
        for ours, eager in zip([*got, *got_grads], [*want, *want_grads], strict=True):
            if ours is None or eager is None or ours.dtype not in NAMES:
                continue
            for k, made, order in tape.results:
                if same(made, ours):
                    case.expected[k] = native(eager, order)
        arrays = [*case.inputs, *case.expected.values()]
        if case.expected and case.steps and sum(len(a.numpy().flatten()) for a in arrays) <= ELEMENTS:
            part = "" if len(tapes) == 1 else f" graph {len(found)}"
            case.name = f"{name}{part}"
            found.append(case)
    return found


class Left:
    """How many samples have no case, and why."""

    def __init__(self) -> None:
        self.none = 0
        self.differ: list[str] = []


def operator_cases(runner: opinfo.Runner, op: Any, draw: random.Random, left: Left) -> list[Case]:
    """The cases of an operator: two or three samples of drawn types."""
    kinds = [(dtype, backward) for dtype in opinfo.DTYPES for backward in (False, True)]
    chosen = [("f32", True), *draw.sample(kinds, len(kinds))]
    found: list[Case] = []
    if op.name in opinfo.CONTENTS:
        return found
    backend = _native.Backend("cpu", threads=1)
    taken = 0
    for dtype, backward in dict.fromkeys(chosen):
        if taken == 3:
            break
        try:
            listed = list(itertools.islice(runner.samples(op, dtype, backward), CANDIDATES))
        except opinfo.Late:
            raise
        except Exception:
            continue
        for i in draw.sample(range(len(listed)), min(len(listed), 4)):
            direction = "backward" if backward else "forward"
            made = cases_of(runner, listed[i], backward, f"{opinfo.label(op)} {dtype} {direction} {i}")
            right = [c for c in made if not stored_ops.differences(c, stored_ops.run(c, backend))]
            left.differ += [c.name for c in made if c not in right]
            left.none += not made
            found += right
            if right:
                taken += 1
                break
    return found


def main() -> int:
    """Reads the arguments, records and writes."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=5, help="draws the samples")
    p.add_argument("--out", type=Path, default=stored_ops.STORED)
    p.add_argument("--share", type=int, default=1, help="one of so many operators is drawn")
    a = p.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, opinfo._late)
    ops, runner, left = opinfo.operators(), opinfo.Runner(0), Left()
    cases: list[Case] = []
    failed: list[str] = []
    operators = 0
    for n in opinfo.drawn(a.share, a.seed):
        signal.alarm(opinfo.SECONDS)
        try:
            made = operator_cases(runner, ops[n], random.Random(f"{a.seed} {n}"), left)
        except Exception as e:
            made = []
            failed.append(f"{opinfo.label(ops[n])}: {type(e).__name__}: {e}")
        finally:
            signal.alarm(0)
        cases += made
        operators += bool(made)
        torch._dynamo.reset()
    about = {"torch": torch.__version__, "seed": a.seed}
    stored_ops.save(cases, about, a.out)
    calls = {step[0] for c in cases for step in c.steps}
    print(f"{len(cases)} cases of {operators} operators with {len(calls)} native operations")
    print(f"{left.none} samples without a case; left out because they differ: {', '.join(left.differ)}")
    print(f"{a.out.stat().st_size} bytes", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
