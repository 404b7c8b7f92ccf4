"""A small drawn share of PyTorch's own samples; ``opinfo.py`` runs them all.

`HALCYON_SEED` draws one operator in 60, `HALCYON_CASES=N` one in N, `HALCYON_CASES=all` takes all.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import opinfo  # noqa: E402
from halcyon.torch.compile.table import ROWS  # noqa: E402

SEED = int(os.environ.get("HALCYON_SEED", random.SystemRandom().randrange(1 << 32)))
CASES = os.environ.get("HALCYON_CASES", "60")


def test_drawn_samples_are_right(tmp_path: Path) -> None:
    # In a process of its own, so that a crash is a result.
    command = [sys.executable, opinfo.__file__, "--jobs", "1", "--limit", "12", "--out", str(tmp_path)]
    command += ["--seed", str(SEED), "--share", "1" if CASES == "all" else CASES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"HALCYON_SEED={SEED}\n{done.stdout}{done.stderr[-2000:]}"
    found = [json.loads(p.read_text()) for p in tmp_path.glob("*.json")]
    states = Counter(r["state"] for results in found for r in results)
    assert len(found) >= 10 and states["ran"] > 0, states
    assert not states["wrong"] and not states["failed"], states


def states_of_sin() -> Counter[str]:
    """The states of samples of the sine. PyTorch's database would forbid later tests to set flags."""
    op = types.SimpleNamespace(op=torch.sin, name="sin")
    runner, states = opinfo.Runner(0), Counter[str]()
    for dtype in (torch.float32, torch.bfloat16):
        for backward in (False, True):
            x = torch.linspace(-3, 3, 7, dtype=dtype, requires_grad=backward)
            sample = types.SimpleNamespace(input=x, args=(), kwargs={})
            states[runner.sample(opinfo.Sample(op, sample), backward)["state"]] += 1
    return states


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = torch.ops.aten.sin.default
    row = ROWS[target]

    def wrong(*args: Any) -> Any:
        return row(*args) * 1.1

    assert states_of_sin() == {"ran": 4}
    monkeypatch.setitem(ROWS, target, wrong)
    assert states_of_sin() == {"wrong": 4}


@pytest.mark.filterwarnings("ignore")
def test_a_missing_row_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ROWS, torch.ops.aten.sin.default)
    assert states_of_sin() == {"fell back": 4}
