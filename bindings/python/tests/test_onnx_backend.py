"""Tests of the package onnx, for operators that are drawn by seed. ``onnx_backend.py`` runs them all."""

from __future__ import annotations

import os
import random

import pytest

onnx = pytest.importorskip("onnx")


@pytest.mark.filterwarnings("ignore")
def test_a_part_of_the_suite_is_right() -> None:
    import onnx_backend as suite

    seed = int(os.environ.get("HALCYON_SEED", random.SystemRandom().randrange(1 << 32)))
    cases = os.environ.get("HALCYON_CASES", "10")
    tallies = suite.run(share=1 if cases == "all" else int(cases), seed=seed)
    assert suite.failures(tallies) == [], f"seed {seed}"
    assert tallies[suite.NODES].all > 20


@pytest.mark.filterwarnings("ignore")
def test_the_suite_finds_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np
    import onnx_backend as suite

    right = suite.Prepared.run

    def wrong(self: suite.Prepared, inputs: object, **options: object) -> tuple[object, ...]:
        return tuple(a + np.asarray(1, a.dtype) for a in right(self, inputs, **options))

    monkeypatch.setattr(suite.Prepared, "run", wrong)
    tallies = suite.run(share=1000, kinds=[suite.NODES])
    assert tallies[suite.NODES].passed < tallies[suite.NODES].all and suite.failures(tallies)
