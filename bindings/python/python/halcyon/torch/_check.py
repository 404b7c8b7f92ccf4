"""Runs of a module on its sample input: results, their differences, and times."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from halcyon._errors import ArgumentError
from halcyon.torch._buffers import Buffers
from halcyon.torch._prepared import blocks, settings_of

__all__ = [
    "Compared",
    "Output",
    "Results",
    "Sample",
    "Times",
    "compare",
    "results",
    "saved_bytes",
    "step",
    "time_pairs",
    "undisturbed",
]


@dataclass(frozen=True)
class Sample:
    """The inputs of one call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(value: object, device: torch.device) -> Sample:
        """A sample from a tensor, from a tuple or list of inputs, or from a mapping of named inputs."""
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(value, torch.Tensor):
            args = (value,)
        elif isinstance(value, Mapping):
            kwargs = dict(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            args = tuple(value)
        else:
            raise ArgumentError(
                f"sample_input is a {type(value).__name__}; pass a tensor, a tuple of inputs, "
                "or a dictionary of inputs by name"
            )
        args, kwargs = pytree.tree_map(lambda v: _moved(v, device), (args, kwargs))
        return Sample(args, kwargs)

    def call(self, model: Callable[..., Any]) -> Any:
        """The model's outputs."""
        return model(*self.args, **self.kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class Results:
    """What a module computes on a sample: its outputs and, in training, its gradients."""

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor]


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Leaves the model's buffers and the random numbers as they were. Random numbers begin at one seed.

    Dropout layers evaluate, because their random numbers depend on how the model runs.
    """
    buffers = Buffers(model)
    dropouts = [m for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd) and m.training]
    # These layers drop values themselves.
    inner = [(m, m.dropout) for m in model.modules() if isinstance(m, nn.MultiheadAttention | nn.RNNBase)]
    devices = [device.index or 0] if device.type in ("cuda", "xpu") else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        if device.type == "mps":
            stack.callback(torch.mps.set_rng_state, torch.mps.get_rng_state())
        torch.manual_seed(0)
        for m in dropouts:
            m.training = False
        for layer, _ in inner:
            layer.dropout = 0.0
        try:
            yield
        finally:
            for m in dropouts:
                m.training = True
            for layer, probability in inner:
                layer.dropout = probability
            buffers.restore()


def _tensors(outputs: Any) -> list[torch.Tensor]:
    """All tensors in the outputs of a model: in collections, and in the fields of dataclasses."""
    found = []
    for leaf in pytree.tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += _tensors([getattr(leaf, f.name) for f in dataclasses.fields(leaf)])
    return found


def _floats(outputs: Any) -> list[torch.Tensor]:
    return [v for v in _tensors(outputs) if v.is_floating_point()]


def _loss(outputs: Any) -> torch.Tensor:
    """A number that depends on every output, for gradients."""
    parts = [v.float().square().mean() for v in _floats(outputs) if v.requires_grad]
    if not parts:
        raise ArgumentError("no output of the model depends on its parameters, so it has no gradients")
    return torch.stack(parts).sum()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def step(model: nn.Module, sample: Sample, training: bool) -> tuple[Any, Sequence[torch.Tensor | None]]:
    """Runs the model once, in training with its gradients. Returns the outputs and the gradients."""
    if not training:
        return sample.call(model), ()
    with torch.enable_grad():
        outputs = sample.call(model)
        return outputs, torch.autograd.grad(_loss(outputs), _trainable(model), allow_unused=True)


def results(model: nn.Module, sample: Sample, training: bool, device: torch.device) -> Results:
    """The outputs of a model on a sample and, in training, the gradients of its parameters."""
    with undisturbed(model, device):
        outputs, gradients = step(model, sample, training)
    leaves = [v.detach().clone() for v in _tensors(outputs)]
    return Results(leaves, [g.detach().clone() for g in gradients if g is not None])


@dataclass(frozen=True)
class Output:
    """The difference of one output, or of all gradients together."""

    name: str
    #: The largest difference relative to the largest magnitude; None if it cannot be compared: another shape
    #: or dtype, or finite values in other places.
    relative: float | None
    #: The largest difference relative to the standard deviation of the values; None if that is unknown.
    deviations: float | None


@dataclass(frozen=True)
class Compared:
    """The differences of two runs."""

    outputs: list[Output]

    @property
    def comparable(self) -> bool:
        """Whether all outputs have the same shapes and dtypes, and finite values in the same places."""
        return all(o.relative is not None for o in self.outputs)

    def error(self, gradients: bool) -> float:
        """The largest relative difference of the outputs, or that of the gradients."""
        found = [o.relative or 0.0 for o in self.outputs if (o.name == _GRADIENTS) == gradients]
        return max(found, default=0.0)


_GRADIENTS = "gradients"


def _values(tensors: list[torch.Tensor]) -> torch.Tensor:
    """All values in one tensor of float64, on the host."""
    flat = [t.detach().to("cpu").flatten() for t in tensors]
    real = [torch.view_as_real(t).flatten() if t.is_complex() else t for t in flat]
    return torch.cat([t.double() for t in real]) if real else torch.zeros(0, dtype=torch.float64)


def _output(name: str, want: list[torch.Tensor], got: list[torch.Tensor]) -> Output:
    if [(t.shape, t.dtype) for t in want] != [(t.shape, t.dtype) for t in got]:
        return Output(name, None, None)
    a, b = _values(want), _values(got)
    finite = a.isfinite()
    # Values that are not finite must be the same: both NaN, or the same infinity.
    if not torch.equal(a[~finite].nan_to_num(nan=0.5), b[~finite].nan_to_num(nan=0.5)):
        return Output(name, None, None)
    a, b = a[finite], b[finite]
    if not bool(b.isfinite().all()):
        return Output(name, None, None)
    if a.numel() == 0:
        return Output(name, 0.0, None)
    worst, top = float((a - b).abs().max()), float(a.abs().max())
    spread = float(a.std(correction=0))
    # Where every wanted value is zero, the difference itself is reported.
    return Output(name, worst / top if top > 0 else worst, worst / spread if spread > 0 else None)


def compare(want: Results, got: Results) -> Compared:
    """The differences of results from those of the unmodified model."""
    if len(want.outputs) != len(got.outputs):
        return Compared([Output("outputs", None, None)])
    pairs = zip(want.outputs, got.outputs, strict=True)
    found = [_output(f"output {i}", [a], [b]) for i, (a, b) in enumerate(pairs)]
    if want.gradients or got.gradients:
        # Gradients are compared as a whole, because small ones are differences of large terms.
        found.append(_output(_GRADIENTS, want.gradients, got.gradients))
    return Compared(found)


#: The least number of pairs of bursts, and how long a burst lasts at least, in seconds. A burst is shorter
#: than what the system gives a program before another one runs, so some bursts are not disturbed.
PAIRS = 9
BURST = 0.001
#: While pairs disagree about which program is faster, up to this many are measured, for about this long.
MOST_PAIRS = 199
MOST_SECONDS = 1.0


@dataclass(frozen=True)
class Times:
    """The times of a run of two programs, measured in pairs of bursts."""

    #: The time of the fastest burst, because other programs on the machine only make bursts slower.
    before: float
    after: float
    #: The time before divided by the time after, and the first and third quartile of the pairs' quotients.
    gain: float
    interval: tuple[float, float]


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def time_pairs(
    before: Callable[[], Callable[[], object]],
    after: Callable[[], Callable[[], object]],
    wait: Callable[[], None],
) -> Times:
    """Measures two programs in pairs of bursts that run directly one after the other.

    The program that is first alternates, so that changes of the machine's speed cancel. Each argument
    prepares its program, which is not timed, and returns a function that runs it once.
    """

    def burst(make: Callable[[], Callable[[], object]], runs: int) -> float:
        run = make()
        start = time.perf_counter()
        for _ in range(runs):
            run()
        wait()
        return (time.perf_counter() - start) / runs

    def runs(make: Callable[[], Callable[[], object]]) -> int:
        # The first run may compile, so the second one is timed.
        burst(make, 1)
        return max(1, int(BURST / max(burst(make, 1), 1e-9)))

    counts = runs(before), runs(after)
    old: list[float] = []
    new: list[float] = []
    ratios: list[float] = []
    start = time.perf_counter()
    while len(ratios) < PAIRS or (
        min(ratios) < 1 < max(ratios)
        and len(ratios) < MOST_PAIRS
        and time.perf_counter() - start < MOST_SECONDS
    ):
        if len(ratios) % 2 == 0:
            old.append(burst(before, counts[0]))
            new.append(burst(after, counts[1]))
        else:
            new.append(burst(after, counts[1]))
            old.append(burst(before, counts[0]))
        ratios.append(old[-1] / max(new[-1], 1e-12))
    fastest = min(old), max(min(new), 1e-12)
    return Times(*fastest, fastest[0] / fastest[1], _quartiles(ratios))


def saved_bytes(model: nn.Module, sample: Sample, device: torch.device) -> int:
    """The bytes that one forward keeps for its gradients, without the parameters.

    Blocks that compute their activations again keep their inputs, which are counted too.
    """
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}
    # What is counted stays alive, so that no address is used twice.
    alive: list[torch.Tensor] = []

    def keep(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
            storage = value.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(value)
        return value

    def before_block(_: nn.Module, args: tuple[Any, ...]) -> None:
        pytree.tree_map(keep, args)

    with contextlib.ExitStack() as stack:
        stack.enter_context(undisturbed(model, device))
        stack.enter_context(torch.enable_grad())
        if settings_of(model).checkpointing:
            for block in blocks(model):
                stack.callback(block.register_forward_pre_hook(before_block).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        sample.call(model)
    return sum(kept.values())
