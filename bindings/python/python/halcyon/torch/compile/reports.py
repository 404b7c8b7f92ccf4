"""The report: which graphs run on Halcyon, which run in eager PyTorch, and why."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["FallbackWarning", "GraphReport", "Report", "record", "report", "reset_report"]


class FallbackWarning(UserWarning):
    """A graph that runs in eager PyTorch. The message has the operations and the reasons."""


@dataclass
class GraphReport:
    """What happened to one graph."""

    name: str
    """Such as ``forward 0``, ``backward 0`` or ``inference 1``."""
    operations: int
    """The number of operations."""
    random: bool = False
    """Whether it has random numbers, which differ from those of eager PyTorch."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why the graph runs in eager PyTorch: operations and reasons. Empty if it runs on Halcyon."""

    @property
    def fell_back(self) -> bool:
        """Whether the graph runs in eager PyTorch."""
        return bool(self.reasons)

    def __str__(self) -> str:
        head = f"{self.name}: {self.operations} operations"
        if not self.reasons:
            return f"{head} on Halcyon"
        lines = [f"  {name}: {why}" for name, why in sorted(self.reasons.items())]
        return "\n".join([f"{head} in eager PyTorch, because of", *lines])


@dataclass
class Report:
    """All graphs since the last :func:`reset_report`."""

    graphs: list[GraphReport]

    @property
    def fallbacks(self) -> list[GraphReport]:
        """The graphs that run in eager PyTorch."""
        return [g for g in self.graphs if g.fell_back]

    @property
    def unsupported(self) -> dict[str, str]:
        """The operations that made graphs fall back, with a reason each."""
        return {name: why for g in self.graphs for name, why in g.reasons.items()}

    def __str__(self) -> str:
        if not self.graphs:
            return "No graph was compiled."
        return "\n".join(str(g) for g in self.graphs)


_lock = threading.Lock()
_graphs: list[GraphReport] = []
_warned: set[frozenset[str]] = set()


def report() -> Report:
    """The graphs that ``torch.compile(backend="halcyon")`` made, and what fell back to eager PyTorch."""
    with _lock:
        return Report(list(_graphs))


def reset_report() -> None:
    """Forgets all graphs and which warnings were given."""
    with _lock:
        _graphs.clear()
        _warned.clear()


def record(name: str, operations: int) -> GraphReport:
    """Adds a graph."""
    made = GraphReport(name, operations)
    with _lock:
        _graphs.append(made)
    return made


def fall_back(graph: GraphReport, reasons: Iterable[tuple[str, str]]) -> None:
    """Notes that a graph runs in eager PyTorch, and warns once for each set of operations."""
    graph.reasons.update(reasons)
    key = frozenset(graph.reasons)
    with _lock:
        known = key in _warned
        _warned.add(key)
    if not known:
        listed = "; ".join(f"{name} ({why})" for name, why in sorted(graph.reasons.items()))
        warnings.warn(
            f"{graph.name} runs in eager PyTorch, because Halcyon does not support {listed}. "
            "halcyon.torch.report() lists all graphs.",
            FallbackWarning,
            stacklevel=2,
        )
