"""What the tests of compiled graphs share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import halcyon.torch.compile as backend
import pytest
import torch


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend.reset_report()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def compiled(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(f, backend="halcyon", **options)


def on_halcyon(graphs: int | None = None) -> None:
    """All graphs ran on Halcyon, and there were some."""
    report = backend.report()
    assert report.graphs and not report.fallbacks, str(report)
    assert graphs is None or len(report.graphs) == graphs, str(report)
