"""Runs PyTorch's own OpInfo samples through the compile backend and compares the results with eager PyTorch.

    python tests/torch/opinfo.py --seed 1 --share 3 --jobs 2 --out results

`--share 3` draws a third of the operators by seed. Each operator is run with each of its samples, forward
and, for float types, backward. The results of an operator are one file under `--out`. A second run continues
where the first one ended. `--dynamo 40` sends every 40th sample through `torch.compile` itself.

PyTorch does not say which of several equal elements an index of `topk` or `sort` names. Such an index is
right if it names an equal element, and the gradients of equal elements are compared together. Only the types
of random numbers and of the results of `empty` are compared.

A result is right if it is close to eager PyTorch's. If it is not, both are compared with the result of f64:
ours is right if its error is at most twice that of eager PyTorch plus the tolerance of the type. Eager
PyTorch's error is the largest one of the sample's elements, or the largest one that this element has among
neighbours of the sample, whose inputs differ by a unit in the last place. Where an operator loses digits,
as `cdist` does with `use_mm_for_euclid_dist`, the sample alone may be exact by chance.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i64": torch.int64}
TOLERANCES = {
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-7, 1e-7),
}
"""Relative and absolute, of a single result."""
SECONDS = 60
"""The time limit of one sample."""
NEIGHBOURS = 16
"""With how many inputs next to a sample's its rounding error is estimated."""


TIES = {"sort": 0, "argsort": 0, "msort": None, "topk": 1, "kthvalue": 1, "median": 0, "nanmedian": 0}
"""Where indices may name any of several equal elements, with the place of the axis among the arguments."""
CONTENTS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}
"""Operators whose results have no defined values."""


class Late(Exception):
    """A sample that took too long."""


def _late(*_: Any) -> None:
    raise Late


def operators() -> list[Any]:
    """All entries of PyTorch's database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


def label(op: Any) -> str:
    """The name of an entry."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def drawn(share: int, seed: int) -> list[int]:
    """The numbers of the drawn operators."""
    count = len(operators())
    return sorted(random.Random(seed).sample(range(count), math.ceil(count / share)))


class Sample:
    """A call of an operator whose tensors are listed."""

    def __init__(self, op: Any, sample: Any) -> None:
        self.op = op
        leaves, self.spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        self.leaves = leaves
        self.first, self.args, self.kwargs = sample.input, sample.args, sample.kwargs
        self.places = [i for i, v in enumerate(leaves) if isinstance(v, torch.Tensor)]

    def axis(self) -> int:
        """The axis of an operator in `TIES`."""
        place = TIES[self.op.name]
        if place is None:
            return 0
        return int(self.kwargs.get("dim", self.args[place] if len(self.args) > place else -1))

    def tensors(self) -> list[torch.Tensor]:
        """Fresh copies of the tensors, with their strides."""
        found = []
        for i in self.places:
            t = self.leaves[i]
            copy = t.detach().clone()
            if t.requires_grad:
                copy.requires_grad_(True)
            found.append(copy)
        return found

    def call(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Calls the operator; returns the tensors among its results."""
        leaves = list(self.leaves)
        for i, t in zip(self.places, tensors, strict=True):
            leaves[i] = t
        first, args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        out = self.op.op(first, *args, **kwargs)
        return [v for v in pytree.tree_leaves(out) if isinstance(v, torch.Tensor)]


def widened(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in f64."""
    found = []
    for t in tensors:
        wide = t.detach().double() if t.is_floating_point() else t.detach().clone()
        found.append(wide.requires_grad_(t.requires_grad))
    return found


def gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], seeds: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients with respect to the inputs that require them."""
    pairs = [(o, s.to(o.dtype)) for o, s in zip(outputs, seeds, strict=True) if o.requires_grad]
    wanted = [t for t in inputs if t.requires_grad]
    if not pairs or not wanted:
        return []
    made = torch.autograd.grad([o for o, _ in pairs], wanted, [s for _, s in pairs], allow_unused=True)
    return list(made)


def seeds_for(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """A gradient for each output, small numbers that every type holds exactly."""
    g = torch.Generator().manual_seed(7)
    return [(torch.randint(-8, 9, o.shape, generator=g) / 4).to(torch.float64) for o in outputs]


Results = list[Any]
"""Results and gradients. A gradient may be missing."""


def errors(
    ours: Results,
    eager: Results,
    reference: Callable[[], Results],
    neighbours: Callable[[], list[tuple[Results, Results]]] = list,
) -> str | None:
    """What is wrong with our results, if anything is.

    `reference` gives the results of f64. `neighbours` gives those of eager PyTorch and of f64 for inputs next
    to the sample's.
    """
    if len(ours) != len(eager):
        return f"{len(ours)} results instead of {len(eager)}"
    wide: Results | None = None
    near: list[tuple[Results, Results]] | None = None
    for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if a is None or b is None:
            if a is not b and (a if b is None else b).ne(0).any():
                return f"result {i}: one is missing"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if a.dtype not in TOLERANCES:
            if not torch.equal(a, b):
                return f"result {i}: {int(a.ne(b).sum())} of {a.numel()} elements differ"
            continue
        relative, absolute = TOLERANCES[a.dtype]
        if torch.allclose(a, b, relative, absolute, equal_nan=True):
            continue
        if wide is None:
            try:
                wide = reference()
            except Exception as e:
                return f"result {i} differs from eager by {_gap(a, b)}; no f64 result ({type(e).__name__})"
        if i >= len(wide) or wide[i] is None or wide[i].shape != a.shape:
            return f"result {i} differs from eager by {_gap(a, b)}"
        allowed = _allowed(b, wide[i], relative, absolute)
        if _outside(a, b, wide[i], allowed) is None:
            continue
        near = neighbours() if near is None else near
        for x, r in near:
            error = _off(x[i], _rounded(r[i], a.dtype))
            allowed = torch.maximum(allowed, 2 * torch.where(error.isinf(), 0.0, error))
        k = _outside(a, b, wide[i], allowed)
        if k is not None:
            values = [t.flatten()[k].item() for t in (a, b, wide[i])]
            return f"result {i}, element {k}: {values[0]}, eager {values[1]}, f64 {values[2]}"
    return None


def tied(s: Sample, ours: list[Any], eager: list[Any], grads: tuple[list[Any], list[Any]]) -> str | None:
    """What is wrong with results whose indices differ, but may name equal elements."""
    x, axis = s.first.detach(), s.axis()
    for i, (a, b) in enumerate(zip(ours, eager, strict=True)):
        if a.dtype != torch.int64 or (i == 0 and s.op.name != "argsort"):
            if not torch.equal(a.nan_to_num(), b.nan_to_num()):
                return f"result {i} differs from eager by {_gap(a, b)}"
            continue
        if a.ndim < x.ndim:
            a, b = a.unsqueeze(axis), b.unsqueeze(axis)
        if not torch.equal(x.gather(axis, a).nan_to_num(), x.gather(axis, b).nan_to_num()):
            return f"result {i}: indices of other elements"
    for a, b in zip(*grads, strict=True):
        _, group = torch.unique(x.flatten(), return_inverse=True)
        zero = torch.zeros(int(group.max()) + 1, dtype=torch.float64)
        sums = [zero.index_add(0, group, g.double().flatten()) for g in (a, b)]
        if not torch.allclose(*sums, rtol=1e-2, atol=1e-2):
            return "gradients of equal elements differ"
    return None


def _gap(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{(a.double() - b.double()).abs().nan_to_num(math.inf).max().item():.3g}"


def _rounded(r: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The f64 result as the type would hold it."""
    return r.detach().to(dtype).double()


def _off(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """The distance of each element from the reference. Equal infinities and NaNs have none."""
    x = x.detach().double()
    return torch.where((x == r) | (x.isnan() & r.isnan()), 0.0, (x - r).abs()).nan_to_num(math.inf)


def _allowed(eager: torch.Tensor, wide: torch.Tensor, relative: float, absolute: float) -> torch.Tensor:
    """The error that each element may have."""
    r = _rounded(wide, eager.dtype)
    scale = r.abs().nan_to_num(0.0, posinf=0.0)
    return absolute + relative * scale + 2 * _off(eager, r).max()


def _outside(a: torch.Tensor, b: torch.Tensor, wide: torch.Tensor, allowed: torch.Tensor) -> int | None:
    """The first element that has a larger error and differs from eager PyTorch's."""
    bad = (_off(a, _rounded(wide, a.dtype)) > allowed) & (a != b)
    return int(bad.flatten().nonzero()[0]) if bool(bad.any()) else None


def shifted(tensors: list[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Each element moved by a unit in the last place, up, down, or not at all."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for t in tensors:
        made = t.detach().clone()
        if t.is_floating_point():
            step = torch.randint(-1, 2, t.shape, generator=g)
            to = torch.full_like(made, math.inf).where(step > 0, -math.inf)
            made = torch.nextafter(made, to).where(step != 0, made)
        found.append(made.requires_grad_(t.requires_grad))
    return found


class Runner:
    """Runs the samples of one operator."""

    def __init__(self, dynamo: int) -> None:
        import halcyon.torch.compile as backend
        from functorch.compile import aot_function
        from halcyon.torch.compile.aot import compiler, open_backend
        from halcyon.torch.compile.decompose import decompositions
        from halcyon.torch.compile.joint import partition

        self.backend, self.dynamo, self.number = backend, dynamo, 0
        native = open_backend(None, torch.get_num_threads())

        def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
            made = aot_function(
                f,
                fw_compiler=compiler("forward", native),
                bw_compiler=compiler("backward", native),
                inference_compiler=compiler("inference", native),
                decompositions=decompositions(),
                partition_fn=partition,
            )
            return made  # type: ignore[no-any-return]

        self.compiled = compiled

    def through(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled function; every so often by way of torch.compile."""
        self.number += 1
        if self.dynamo and self.number % self.dynamo == 0:
            torch._dynamo.reset()
            return torch.compile(f, backend="halcyon")
        return self.compiled(f)

    def sample(self, s: Sample, backward: bool) -> dict[str, Any]:
        """Runs one sample."""
        self.backend.reset_report()
        inputs = s.tensors()
        torch.default_generator.manual_seed(3)
        try:
            want = s.call(*inputs)
            seeds = seeds_for(want)
            want_grads = gradients(want, inputs, seeds) if backward else []
        except Exception as e:
            return {"state": "skipped", "why": f"eager: {type(e).__name__}"}
        if backward and not want_grads:
            return {"state": "skipped", "why": "no gradient"}
        own = s.tensors()
        torch.default_generator.manual_seed(3)
        try:
            got = list(self.through(s.call)(*own))
            got_grads = gradients(got, own, seeds) if backward else []
        except Late:
            raise
        except Exception as e:
            return self._failed(e)
        report = self.backend.report()
        if report.fallbacks:
            return {"state": "fell back", "reasons": report.unsupported}
        if not report.graphs:
            return {"state": "fell back", "reasons": {"torch.compile": "no graph"}}
        return self._judged(s, (inputs, want, want_grads, seeds), (own, got, got_grads), backward)

    def _judged(self, s: Sample, theirs: Any, ours: Any, backward: bool) -> dict[str, Any]:
        inputs, want, want_grads, seeds = theirs
        own, got, got_grads = ours
        if any(g.random for g in self.backend.report().graphs) or s.op.name in CONTENTS:
            same = [(a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(got, want, strict=True)]
            return {"state": "random" if all(same) else "wrong", "why": "types differ"}

        def run(tensors: list[torch.Tensor]) -> Results:
            out = s.call(*tensors)
            return [*out, *(gradients(out, tensors, seeds) if backward else [])]

        def reference() -> Results:
            return run(widened(s.tensors()))

        def neighbours() -> list[tuple[Results, Results]]:
            near = [shifted(s.tensors(), n) for n in range(NEIGHBOURS)]
            return [(run([t.clone() for t in x]), run(widened(x))) for x in near]

        values = [t.detach() for t in got]
        eager = [*[t.detach() for t in want], *want_grads]
        what = errors([*values, *got_grads], eager, reference, neighbours)
        if what is not None and s.op.name in TIES:
            what = tied(s, values, [t.detach() for t in want], (got_grads, want_grads))
        if what is None:
            # Inputs that the operator overwrites must have the same new values.
            what = errors([t.detach() for t in own], [t.detach() for t in inputs], lambda: [])
            what = None if what is None else f"mutated input: {what}"
        return {"state": "ran"} if what is None else {"state": "wrong", "why": what}

    def _failed(self, e: Exception) -> dict[str, Any]:
        report = self.backend.report()
        text = f"{type(e).__name__}: {e}".split("\n")[0][:200]
        own = "halcyon" in "".join(traceback.format_exception(e))
        if report.fallbacks:
            return {"state": "fell back", "reasons": report.unsupported}
        if report.graphs or "HalcyonError" in text or (own and not report.graphs):
            return {"state": "failed", "why": text}
        # AOTAutograd cannot trace it, for example because sizes depend on values.
        return {"state": "fell back", "reasons": {"AOTAutograd": text}}

    def samples(self, op: Any, name: str, backward: bool) -> Iterator[Sample]:
        """The samples of one type."""
        dtype = DTYPES[name]
        known = op.supported_backward_dtypes("cpu") if backward else op.supported_dtypes("cpu")
        if dtype not in known or (backward and (not op.supports_autograd or not dtype.is_floating_point)):
            return
        random.seed(11)
        torch.manual_seed(11)
        for s in op.sample_inputs("cpu", dtype, requires_grad=backward):
            yield Sample(op, s)

    def operator(self, op: Any, limit: int | None) -> list[dict[str, Any]]:
        """The results of all samples of an operator."""
        found = []
        for name in DTYPES:
            for backward in (False, True):
                try:
                    listed = list(self.samples(op, name, backward))[:limit]
                except Exception as e:
                    why = f"samples: {type(e).__name__}: {e}"[:200]
                    found.append({"dtype": name, "backward": backward, "state": "skipped", "why": why})
                    continue
                for i, s in enumerate(listed):
                    signal.alarm(SECONDS)
                    try:
                        made = self.sample(s, backward)
                    except Late:
                        made = {"state": "fell back", "reasons": {label(op): f"over {SECONDS} seconds"}}
                    finally:
                        signal.alarm(0)
                    found.append({"dtype": name, "backward": backward, "sample": i, **made})
        return found


def path_of(out: Path, number: int, op: Any) -> Path:
    """The file of an operator's results."""
    return out / f"{number:04d}-{re.sub('[^A-Za-z0-9_.]', '_', label(op))}.json"


def work(numbers: list[int], out: Path, dynamo: int, limit: int | None) -> None:
    """Runs operators, and writes a file for each. A file without results names one that has crashed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _late)
    ops, runner = operators(), Runner(dynamo)
    for n in numbers:
        path = path_of(out, n, ops[n])
        if path.exists():
            continue
        crashed = {"state": "failed", "why": "the process ended", "dtype": "", "backward": False}
        path.write_text(json.dumps([crashed]))
        path.write_text(json.dumps(runner.operator(ops[n], limit)))
        torch._dynamo.reset()


def summary(out: Path) -> int:
    """Prints the counts. Returns the number of wrong and failed samples."""
    states: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    reasons: Counter[str] = Counter()
    bad = []
    for path in sorted(out.glob("*.json")):
        for r in json.loads(path.read_text()):
            states["backward" if r["backward"] else "forward"][r["state"]] += 1
            if r["state"] == "fell back":
                for name, why in r["reasons"].items():
                    reasons[f"{name}: {re.sub('[0-9]+', 'N', why)[:90]}"] += 1
            elif r["state"] in ("wrong", "failed"):
                bad.append(f"{path.stem} {r['dtype']} sample {r.get('sample')} {r['backward']=}: {r['why']}")
    print("\n".join(f"{n:6} {why}" for why, n in reasons.most_common()))
    print("\n".join(bad))
    for phase, counts in states.items():
        ran = counts["ran"] + counts["random"]
        every = ran + counts["fell back"] + counts["wrong"] + counts["failed"]
        share = 100 * ran / max(every, 1)
        listed = [
            f"{every} samples",
            f"{ran} ran ({share:.1f} %, {counts['random']} of them random)",
            *[f"{counts[k]} {k}" for k in ("fell back", "wrong", "failed")],
            f"{counts['skipped']} without a result of eager PyTorch",
        ]
        print(f"{phase}: {', '.join(listed)}")
    return len(bad)


def main() -> int:
    """Reads the arguments and runs."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--seed", type=int, default=1, help="draws the operators")
    p.add_argument("--share", type=int, default=3, help="one of so many operators is drawn")
    p.add_argument("--jobs", type=int, default=2, help="processes")
    p.add_argument("--out", type=Path, default=Path("opinfo-results"), help="folder of the results")
    p.add_argument("--dynamo", type=int, default=40, help="one of so many samples goes through torch.compile")
    p.add_argument("--limit", type=int, help="at most so many samples of each type")
    p.add_argument("--match", help="only operators whose name contains this text")
    p.add_argument("--range", help="only operators from:to of the database")
    p.add_argument("--worker", help=argparse.SUPPRESS)
    p.add_argument("--summary", action="store_true", help="only print the counts of earlier runs")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.worker:
        work([int(n) for n in a.worker.split(",")], a.out, a.dynamo, a.limit)
        return 0
    if not a.summary:
        chosen = drawn(a.share, a.seed)
        if a.range:
            first, last = (int(n) for n in a.range.split(":"))
            chosen = [n for n in chosen if first <= n < last]
        if a.match:
            ops = operators()
            chosen = [n for n in chosen if a.match in label(ops[n])]
        own = [sys.executable, os.path.abspath(__file__), "--out", str(a.out), "--dynamo", str(a.dynamo)]
        own += ["--limit", str(a.limit)] if a.limit else []
        pending = [chosen[k :: a.jobs] for k in range(a.jobs)]
        while any(pending):
            children = [
                subprocess.Popen([*own, "--worker", ",".join(map(str, part))]) for part in pending if part
            ]
            codes = [c.wait() for c in children]
            # A crashed process has left its operator's file, so the next one goes on after it.
            pending = [part for part, code in zip([p for p in pending if p], codes, strict=True) if code < 0]
    return 1 if summary(a.out) else 0


if __name__ == "__main__":
    sys.exit(main())
