"""Stored calls of native operations against results of eager PyTorch, which need no PyTorch.

`HALCYON_SEED` draws a third of the cases; `HALCYON_CASES=all` takes all, `HALCYON_CASES=N` one in N.
"""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
import stored_ops
from halcyon import HalcyonError, _native
from stored_ops import Array, Case

SEED = int(os.environ.get("HALCYON_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = os.environ.get("HALCYON_CASES", "3")
SHARE = 1 if CASES == "all" else int(CASES)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return stored_ops.load()


def drawn(cases: list[Case]) -> list[Case]:
    """The cases of this run."""
    return random.Random(SEED).sample(cases, -(-len(cases) // SHARE))


def failures(cases: list[Case]) -> list[str]:
    """What is wrong, by case."""
    backend, found = _native.Backend("cpu", threads=1), []
    for c in cases:
        try:
            what = stored_ops.differences(c, stored_ops.run(c, backend))
        except HalcyonError as e:
            what = [f"{type(e).__name__}: {e}"]
        found += [f"{c.name}: {w}" for w in what]
    return found


def types_of(c: Case) -> set[str]:
    """The element types of the stored results that are not empty."""
    return {a.dtype for a in c.expected.values() if a.data}


def altered(c: Case, dtype: str, draw: random.Random) -> Case:
    """The case with one other element in one stored result of this type."""
    k, a = draw.choice([(k, a) for k, a in c.expected.items() if a.data and a.dtype == dtype])
    data = bytearray(a.data)
    if a.dtype == "bool":
        data[draw.randrange(len(data))] ^= 1
    else:
        # The highest byte of an element has the sign and most of the exponent.
        size = len(data) // a.numpy().size
        data[draw.randrange(a.numpy().size) * size + size - 1] ^= 0x55
    return dataclasses.replace(c, expected={**c.expected, k: Array(a.dtype, a.shape, bytes(data))})


def test_stored_cases_are_right(cases: list[Case]) -> None:
    assert failures(drawn(cases)) == [], f"HALCYON_SEED={SEED}"


def test_an_altered_result_is_found(cases: list[Case], tmp_path: Path) -> None:
    draw = random.Random(SEED)
    types = sorted({t for c in cases for t in types_of(c)})
    assert {"bool", "i64", "f16", "bf16", "f32"} <= set(types)
    chosen = [draw.choice([c for c in cases if t in types_of(c)]) for t in types]
    assert failures(chosen) == [], f"HALCYON_SEED={SEED}"
    wrong = [altered(c, t, draw) for c, t in zip(chosen, types, strict=True)]
    stored_ops.save(wrong, {}, tmp_path / "altered.npz")
    found = failures(stored_ops.load(tmp_path / "altered.npz"))
    assert len(found) == len(chosen), f"HALCYON_SEED={SEED}: {found}"


def test_the_cases_are_a_spread(cases: list[Case]) -> None:
    operators = {c.name.split()[0] for c in cases}
    calls = {name for c in cases for name, *_ in c.steps}
    assert len(operators) > 200 and len(calls) > 30
    assert {"backward", "forward"} == {c.name.split()[2] for c in cases}
    assert stored_ops.STORED.stat().st_size < 3_000_000
