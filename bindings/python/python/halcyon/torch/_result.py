"""The result of an optimisation."""

from __future__ import annotations

import weakref
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from halcyon._errors import ArgumentError
from halcyon.torch._names import OptimizationLevel

__all__ = [
    "OptimizationResult",
    "Receipt",
    "level_before",
    "optimization_result",
    "receipts_before",
    "remember",
]


@dataclass(frozen=True)
class Receipt:
    """One optimisation that changed a model."""

    name: str
    #: What exactly was done, such as `bfloat16` or `12 linear layers`.
    detail: str
    #: The time of a run without it divided by the time with it; None if it was not measured.
    gain: float | None = None
    #: The first and the third quartile of the gains of single measurements.
    gain_interval: tuple[float, float] | None = None
    #: The largest difference of an output from the unmodified model's, relative to the largest magnitude of
    #: the output; None if it was not checked.
    difference: float | None = None
    #: The same for the gradients, in training.
    gradient_difference: float | None = None
    #: The largest difference that was allowed.
    bound: float | None = None

    def __str__(self) -> str:
        gain = "not measured" if self.gain is None else f"{self.gain:.2f}x"
        text = f"{self.name} ({self.detail}): {gain}"
        if self.difference is None:
            return f"{text}, not checked"
        text += f", difference {self.difference:.1e}"
        if self.gradient_difference is not None:
            text += f", of gradients {self.gradient_difference:.1e}"
        return text


@dataclass
class OptimizationResult:
    """What an optimisation changed, and the measured effect."""

    #: Whether the model's results on the sample can be compared with those of the unmodified model: the same
    #: shapes, and finite values in the same places. True without a sample.
    success: bool
    model: nn.Module
    level: OptimizationLevel
    #: The names of the optimisations that changed the model, and no others.
    optimizations_applied: list[str] = field(default_factory=list)
    #: The optimisations of the level that changed nothing, each with the reason.
    warnings: list[str] = field(default_factory=list)
    #: Measurements before and after, in the units that their names say. Empty without a sample.
    metrics: dict[str, Any] = field(default_factory=dict)
    #: One receipt for each optimisation that changed the model.
    receipts: list[Receipt] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, as JSON can store them. The model is the name of its class."""
        return {
            "success": self.success,
            "model": type(self.model).__name__,
            "level": self.level.value,
            "optimizations_applied": list(self.optimizations_applied),
            "warnings": list(self.warnings),
            "metrics": dict(self.metrics),
            "receipts": [asdict(r) for r in self.receipts],
        }

    def __str__(self) -> str:
        outcome = "optimised" if self.success else "failed: the model is unmodified"
        lines = [f"level    {self.level}: {outcome}"]
        if self.metrics:
            m = self.metrics
            low, high = m["speedup_interval"]
            lines.append(
                f"time     {m['time_before_ms']:.3f} ms -> {m['time_after_ms']:.3f} ms, "
                f"{m['speedup']:.2f}x ({low:.2f} to {high:.2f})"
            )
            lines.append(f"error    {m['error']:.1e}")
        lines += [f"receipt  {r}" for r in self.receipts]
        lines += [f"warning  {w}" for w in self.warnings]
        return "\n".join(lines)


#: The result without its model, which would keep itself alive.
_results: weakref.WeakKeyDictionary[nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()


def remember(result: OptimizationResult) -> None:
    """Stores a result for :func:`optimization_result`."""
    fields = {name: value for name, value in vars(result).items() if name != "model"}
    _results[result.model] = fields


def level_before(model: nn.Module) -> OptimizationLevel | None:
    """The level at which a model was prepared; None if it was not."""
    fields = _results.get(model)
    return None if fields is None else fields["level"]


def receipts_before(model: nn.Module) -> dict[str, Receipt]:
    """The receipts of what was done to a model before, by name."""
    fields = _results.get(model)
    return {} if fields is None else {r.name: r for r in fields["receipts"]}


def optimization_result(model: nn.Module) -> OptimizationResult:
    """What `prepare_model`, `optimize_for_inference` or `optimize_for_training` did to a model."""
    fields = _results.get(model) if isinstance(model, nn.Module) else None
    if fields is None:
        raise ArgumentError(
            "the model was not optimised in this process; pass what prepare_model, optimize_for_inference, "
            "optimize_for_training or Optimizer.optimize returned"
        )
    return OptimizationResult(model=model, **fields)
