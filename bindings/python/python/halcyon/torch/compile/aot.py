"""The backend of `torch.compile`, by way of AOTAutograd, whose graphs of ATen have no mutation."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from halcyon import _native
from halcyon._errors import ArgumentError
from halcyon.torch.compile.decompose import decompositions, join
from halcyon.torch.compile.freeze import MODES
from halcyon.torch.compile.interpret import operations
from halcyon.torch.compile.joint import partition
from halcyon.torch.compile.reports import fall_back, record
from halcyon.torch.compile.runtime import CompiledGraph

__all__ = ["compiler", "halcyon_backend", "open_backend"]

_OPTIONS = {"freeze", "level", "threads"}
_numbers = itertools.count()


@functools.cache
def open_backend(level: str | None, threads: int) -> _native.Backend:
    """The CPU with these options, opened once."""
    return _native.Backend("cpu", threads=threads, level=level)


def _fixed(gm: GraphModule) -> list[int]:
    """The inputs that are parameters or buffers: AOTAutograd knows them while it compiles."""
    context = torch._guards.TracingContext.try_get()
    meta = None if context is None else context.fw_metadata
    return [] if meta is None else list(meta.static_input_indices)


def compiler(
    kind: str, backend: _native.Backend, freeze: str = "off"
) -> Callable[[GraphModule, Sequence[Any]], CompiledGraph]:
    """A compiler of graphs for AOTAutograd. `kind` is forward, backward or inference."""

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> CompiledGraph:
        fixed = _fixed(gm) if kind != "backward" else []
        return CompiledGraph(gm, f"{kind} {next(_numbers)}", backend, fixed, freeze)

    return compile_graph


def halcyon_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, **unknown: Any
) -> Callable[..., Any]:
    """The backend ``halcyon`` of `torch.compile`.

    Options: ``level`` (``O0`` to ``O3``), ``threads`` (PyTorch's number, if none is given) and ``freeze``
    (``checked``, ``trusted`` or ``off``: which weights become constants of inference plans).
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import TorchDynamoException

    given = dict(options or {})
    given.update({k: v for k, v in unknown.items() if k != "mode" or v is not None})
    wrong = sorted(set(given) - _OPTIONS)
    if wrong:
        raise ArgumentError(
            f'torch.compile(backend="halcyon") has no option {", ".join(wrong)}; '
            f"its options are {', '.join(sorted(_OPTIONS))}"
        )
    freeze = given.get("freeze", "checked")
    if freeze not in MODES:
        raise ArgumentError(f"freeze is {freeze!r}; it must be one of {', '.join(MODES)}")
    threads = given.get("threads") or torch.get_num_threads()
    backend = open_backend(given.get("level"), threads)
    join(gm)
    made = aot_autograd(
        fw_compiler=compiler("forward", backend),
        bw_compiler=compiler("backward", backend),
        inference_compiler=compiler("inference", backend, freeze),
        decompositions=decompositions(),
        partition_fn=partition,
        keep_inference_input_mutations=False,
    )
    try:
        return made(gm, example_inputs)
    except TorchDynamoException:
        # Dynamo's own signals, such as a restart of its analysis.
        raise
    except Exception as e:
        # AOTAutograd refuses the graph, for example because sizes depend on values.
        what = f"{type(e).__name__}: {e}".split("\n")[0]
        graph = record(f"graph {next(_numbers)}", len(operations(gm)))
        fall_back(graph, [("AOTAutograd", what[:200])])
        return gm.forward
