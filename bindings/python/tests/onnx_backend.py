"""Runs the tests of the package onnx (``onnx.backend.test``) through ``halcyon.InferenceSession``.

``python onnx_backend.py`` runs all that need no download; ``--share 8 --seed 3`` those of an eighth of the
operators. It prints how many passed, how many Halcyon does not support, and each wrong one. It fails if one
is wrong, or if less than 99 % of the operators' cases run.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import pkgutil
import random
import sys
import time
import unittest
import unittest.mock
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import halcyon
import onnx
from halcyon.session.exceptions import NotImplemented as NotSupported
from onnx.backend.base import Backend, BackendRep, Device, DeviceType
from onnx.backend.test import BackendTest, loader
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

#: The share of the operators' cases that must run.
LEAST = 0.99
#: Operators whose cases take seconds to compute.
SLOW = {"averagepool", "maxpool", "lppool"}
#: What the runner calls the cases of single operators.
NODES = "OnnxBackendNodeModelTest"
#: Its other cases whose data is in the package. The remaining ones download models.
OTHERS = (
    "OnnxBackendSimpleModelTest",
    "OnnxBackendPyTorchConvertedModelTest",
    "OnnxBackendPyTorchOperatorModelTest",
)


#: Operators that draw random numbers. Of their results ONNX determines the types and the sizes only.
RANDOM = {
    "Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"
}  # fmt: skip


def draws(nodes: Iterable[onnx.NodeProto]) -> bool:
    """Whether one of the nodes, or of the nodes inside of them, draws random numbers."""
    return any(n.op_type in RANDOM or any(draws(a.g.node) for a in n.attribute) for n in nodes)


class Prepared(BackendRep):
    """A session, with inputs in the model's order."""

    #: Whether the model that was prepared last draws random numbers.
    last_draws = False

    def __init__(self, session: halcyon.InferenceSession) -> None:
        self._session = session

    def run(self, inputs: Any, **_: Any) -> tuple[Any, ...]:
        given = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
        names = [a.name for a in self._session.get_inputs()]
        # Trailing values are those of inputs with a stored default.
        names += [a.name for a in self._session.get_overridable_initializers()]
        return tuple(self._session.run(None, dict(zip(names, given, strict=False))))


class HalcyonBackend(Backend):
    """The interface of the package onnx over sessions."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Prepared:
        super().prepare(model, device, **kwargs)
        Prepared.last_draws = draws(model.graph.node)
        provider = (
            "CPUExecutionProvider" if Device(device).type == DeviceType.CPU else "CUDAExecutionProvider"
        )
        try:
            return Prepared(halcyon.InferenceSession(model.SerializeToString(), providers=[provider]))
        except NotSupported as e:
            raise BackendIsNotSupposedToImplementIt(str(e)) from e

    @classmethod
    def supports_device(cls, device: str) -> bool:
        kind = Device(device).type
        if kind == DeviceType.CPU:
            return True
        return "CUDAExecutionProvider" in halcyon.get_available_providers()


class Suite(BackendTest):
    """The suite. Of random numbers it compares the types and the sizes."""

    @classmethod
    def assert_similar_outputs(
        cls,
        ref_outputs: Sequence[Any],
        outputs: Sequence[Any],
        rtol: float,
        atol: float,
        model_dir: str | None = None,
    ) -> None:
        # The runner compares a list's arrays row by row, which fails for arrays without rows.
        for one, other in zip(ref_outputs, outputs, strict=True):
            assert isinstance(one, list) == isinstance(other, list), f"{type(other)} instead of {type(one)}"
            if isinstance(one, list):
                cls.assert_similar_outputs(one, other, rtol, atol, model_dir)
        ref_outputs, outputs = (
            [a for a in all_ if not isinstance(a, list)] for all_ in (ref_outputs, outputs)
        )
        if not Prepared.last_draws:
            super().assert_similar_outputs(ref_outputs, outputs, rtol, atol, model_dir)
            return
        have, want = ([(a.dtype, a.shape) for a in list_] for list_ in (outputs, ref_outputs))
        assert have == want, f"{have} instead of {want}"


def chosen(names: list[str], share: int, draw: random.Random) -> set[str]:
    """One of every ``share`` modules of cases, without the slow ones."""
    fast = [n for n in names if n not in SLOW]
    return set(names if share == 1 else draw.sample(fast, -(-len(fast) // share)))


def cases(
    device: str, share: int = 1, draw: random.Random | None = None
) -> dict[str, list[tuple[str, Callable[[], None]]]]:
    """The tests by kind: each with its name and a function that runs it."""

    def partly(package: ModuleType) -> None:
        # The cases of an operator are computed when their module is imported.
        names = sorted(m.name for m in pkgutil.iter_modules(package.__path__))
        for name in sorted(chosen(names, share, draw or random.Random(0))):
            module = importlib.import_module(f"{package.__name__}.{name}")
            if hasattr(module, "__path__"):
                partly(module)

    with unittest.mock.patch.object(loader, "import_recursive", partly):
        made = Suite(HalcyonBackend, __name__).test_cases
    found: dict[str, list[tuple[str, Callable[[], None]]]] = collections.defaultdict(list)
    for kind in (NODES, *OTHERS):
        group = made[kind]
        for name in sorted(n for n in dir(group) if n.startswith("test_") and n.endswith(f"_{device}")):
            found[kind].append((name, getattr(group(name), name)))
    return found


class Tally:
    """How the cases ended."""

    def __init__(self) -> None:
        self.passed = 0
        self.unsupported: dict[str, str] = {}
        self.wrong: dict[str, str] = {}

    def run(self, name: str, test: Callable[[], None]) -> None:
        try:
            test()
        except (unittest.SkipTest, NotSupported) as e:
            self.unsupported[name] = str(e).splitlines()[0]
        except Exception as e:
            self.wrong[name] = f"{type(e).__name__}: {str(e)[:400]}"
        else:
            self.passed += 1

    @property
    def all(self) -> int:
        return self.passed + len(self.unsupported) + len(self.wrong)


def run(
    share: int = 1,
    seed: int = 0,
    device: str = "cpu",
    match: str = "",
    kinds: Sequence[str] = (NODES, *OTHERS),
) -> dict[str, Tally]:
    """Runs the cases of one of every ``share`` operators, drawn by seed, and all others."""
    tallies: dict[str, Tally] = {}
    for kind, group in cases(device, share, random.Random(seed)).items():
        if kind not in kinds:
            continue
        tallies[kind] = Tally()
        for name, test in (c for c in group if match in c[0]):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tallies[kind].run(name, test)
    return tallies


def failures(tallies: dict[str, Tally]) -> list[str]:
    """What is not as it must be."""
    found = [f"{name} is wrong: {why}" for t in tallies.values() for name, why in t.wrong.items()]
    nodes = tallies[NODES]
    if nodes.passed < LEAST * nodes.all:
        found.append(f"only {nodes.passed} of {nodes.all} cases of operators run: {nodes.unsupported}")
    return found


def main() -> int:
    """The command."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--share", type=int, default=1)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--match", default="", help="run only cases with this text in their names")
    p.add_argument("--json", action="store_true")
    a = p.parse_args()
    start = time.perf_counter()
    tallies = run(a.share, a.seed, a.device, a.match)
    if a.json:
        print(
            json.dumps(
                {
                    k: {"passed": t.passed, "unsupported": t.unsupported, "wrong": t.wrong}
                    for k, t in tallies.items()
                }
            )
        )
    else:
        for kind, t in tallies.items():
            print(
                f"{kind}: {t.passed} of {t.all} passed, {len(t.unsupported)} not supported, "
                f"{len(t.wrong)} wrong"
            )
            for name, why in (t.unsupported | t.wrong).items():
                print(f"  {name}: {why}")
        print(f"share 1/{a.share}, seed {a.seed}, {time.perf_counter() - start:.1f} s")
    problems = failures(tallies)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
