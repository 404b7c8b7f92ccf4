"""Optimises a module: makes one change after the other, checks each, and keeps what is faster."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from halcyon._errors import HalcyonError, UnsupportedError
from halcyon.torch._check import (
    Compared,
    Results,
    Times,
    compare,
    results,
    saved_bytes,
    step,
    time_pairs,
    undisturbed,
)
from halcyon.torch._errors import OptimizationWarning
from halcyon.torch._names import OptimizationLevel
from halcyon.torch._optimizations import (
    NO_SAMPLE,
    OPTIMIZATIONS,
    Bound,
    Optimization,
    Proposal,
    Purpose,
    Skip,
    Task,
    Variant,
    counted,
)
from halcyon.torch._prepared import blocks, compilation_errors, one_line, settings_of
from halcyon.torch._result import OptimizationResult, Receipt

__all__ = ["bounds", "measure", "run", "warn"]

#: The largest difference of outputs and of gradients for each dtype, where the precision stays the same.
_SAME = {
    torch.float64: (1e-9, 1e-8),
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (5e-2, 1e-1),
    torch.float16: (1e-2, 5e-2),
}
#: The same for mixed precision from O2 on.
_MIXED = {torch.bfloat16: (5e-2, 2e-1), torch.float16: (1e-2, 5e-2)}
#: The bound of mixed precision at O1, and of 8-bit types.
_MIXED_O1 = 1e-2
_LOW = 5e-2


def bounds(task: Task, proposal: Proposal) -> tuple[float, float]:
    """The largest difference that a proposal may have: of outputs, and of gradients."""
    floats = (p.dtype for p in proposal.variant.module.parameters() if p.is_floating_point())
    same = _SAME.get(next(floats, torch.float32), _SAME[torch.float32])
    half = proposal.variant.settings.autocast
    if proposal.bound is Bound.LOW:
        wanted = task.config.max_error or _LOW
        return wanted, wanted
    if half is None:
        return same
    if task.config.max_error is not None:
        return task.config.max_error, task.config.max_error
    if task.level is OptimizationLevel.O1:
        return _MIXED_O1, _MIXED_O1
    return _MIXED[half]


@dataclass
class _Progress:
    """The state of an optimisation."""

    plain: Variant
    current: Variant
    want: Results | None = None
    receipts: list[Receipt] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    #: The bound of the 8-bit types that were accepted. It holds for everything after them.
    loosest: tuple[float, float] = (0.0, 0.0)


def measure(task: Task, before: Variant, after: Variant) -> Times:
    """The times of a run of two variants on the sample; in training, of a forward with its gradients."""
    sample = task.sample
    assert sample is not None

    def ready(variant: Variant) -> Callable[[], Callable[[], object]]:
        def prepare() -> Callable[[], object]:
            module = variant.install()
            if task.training:
                return lambda: step(module, sample, True)
            return lambda: sample.call(module)

        return prepare

    with undisturbed(before.module, task.device), undisturbed(after.module, task.device):
        return time_pairs(ready(before), ready(after), lambda: task.runtime.synchronize(task.index))


def _computed(task: Task, variant: Variant) -> Results:
    assert task.sample is not None
    with compilation_errors():
        return results(variant.install(), task.sample, task.training, task.device)


def _consider(task: Task, progress: _Progress, what: Optimization, proposal: Proposal) -> Receipt | str:
    """Checks and measures a proposal. Returns its receipt, or why it is not used."""
    if task.sample is None:
        if what.exact:
            return Receipt(what.name, proposal.detail)
        if not proposal.requested:
            return NO_SAMPLE
        progress.skipped.append(
            f"{what.name}: it is used as requested, but not checked: there is no sample_input"
        )
        return Receipt(what.name, proposal.detail)
    try:
        return _checked(task, progress, what, proposal)
    # The model is the user's code and runs in a way that it was not written for: it may raise anything.
    except Exception as error:
        return f"{proposal.detail}: {one_line(error)}"


def _checked(task: Task, progress: _Progress, what: Optimization, proposal: Proposal) -> Receipt | str:
    assert progress.want is not None
    before = _graphs()
    compared = compare(progress.want, _computed(task, proposal.variant))
    graphs = _graphs() - before
    compiles = proposal.variant.settings.compilation != progress.current.settings.compilation
    if compiles and graphs < 1:
        return f"{proposal.detail}: no part of the model could be compiled"
    own = bounds(task, proposal)
    bound = max(own[0], progress.loosest[0]), max(own[1], progress.loosest[1])
    if not compared.comparable:
        return f"{proposal.detail}: its results have other shapes or dtypes, or finite values in other places"
    error, gradients = compared.error(False), compared.error(True)
    for found, allowed, of in ((error, bound[0], "outputs"), (gradients, bound[1], "gradients")):
        if not found <= allowed:
            return f"{proposal.detail}: the difference of {of} is {found:.1e}, the bound is {allowed:.1e}"
    with compilation_errors():
        times = measure(task, progress.current, proposal.variant)
    if times.gain < 1 and not what.exact:
        if not proposal.requested and not task.config.keep_slower:
            return f"{proposal.detail}: it is slower on the sample, {times.gain:.2f}x"
        progress.skipped.append(
            f"{what.name}: {proposal.detail} is used as requested, but is slower, {times.gain:.2f}x"
        )
    if proposal.bound is Bound.LOW:
        progress.loosest = bound
    detail = f"{proposal.detail}, {counted(graphs, 'graph')}" if compiles else proposal.detail
    if proposal.variant.settings.checkpointing and not progress.current.settings.checkpointing:
        detail += f"; {_saved(task, progress.current)} -> {_saved(task, proposal.variant)} kept for gradients"
    return Receipt(
        what.name, detail, times.gain, times.interval, error, gradients if task.training else None, bound[0]
    )


def _graphs() -> int:
    """The number of graphs that torch.compile compiled in this process."""
    # PyTorch is slow to import its compiler, so this does not.
    loaded = sys.modules.get("torch._dynamo.utils")
    return 0 if loaded is None else int(loaded.counters["stats"]["unique_graphs"])


def _saved(task: Task, variant: Variant) -> str:
    assert task.sample is not None
    # Compiled functions keep their activations out of sight.
    plain = variant.changed(compilation=None)
    return f"{saved_bytes(plain.install(), task.sample, task.device) / 2**20:.2f} MiB"


def _baseline(task: Task, progress: _Progress) -> None:
    """Computes the unmodified model's results, with checkpointing if a step does not fit without it."""
    try:
        progress.want = _computed(task, progress.plain)
        return
    except torch.OutOfMemoryError:
        count = len(blocks(progress.plain.module))
        wanted = task.config.activation_checkpointing
        if task.purpose is not Purpose.TRAINING or wanted is False or task.level.number < 2 or count == 0:
            raise
    task.runtime.empty_cache()
    # The blocks compute what they always do, so these are the results of the unmodified model.
    progress.plain = progress.current = progress.plain.changed(checkpointing=True)
    progress.want = _computed(task, progress.plain)
    detail = f"{counted(count, 'block')}; a step without it does not fit into the memory"
    progress.receipts.append(Receipt("activation-checkpointing", detail))


def _unsteady(task: Task, progress: _Progress) -> str | None:
    """Why results cannot be compared: the model's own results differ from run to run."""
    assert progress.want is not None
    if not progress.want.outputs:
        return "the outputs of the model contain no tensor that could be compared"
    again = compare(progress.want, _computed(task, progress.plain))
    allowed = bounds(task, Proposal(progress.plain, ""))
    if not again.comparable:
        return "the unmodified model's results differ between two runs in their shapes or finite values"
    worst = again.error(False)
    if worst > allowed[0]:
        return f"the unmodified model's results differ between two runs by {worst:.1e}"
    return None


def run(task: Task, model: nn.Module) -> OptimizationResult:
    """Optimises a module. For inference it is copied first; otherwise it is changed in place."""
    if task.purpose is Purpose.INFERENCE:
        try:
            model = copy.deepcopy(model)
        # Copying runs the user's code.
        except Exception as error:
            raise UnsupportedError(
                f"optimize_for_inference: the model cannot be copied: {one_line(error)}. "
                "Give it a __deepcopy__ method, or detach the tensors that it stores"
            ) from error
        model.eval()
    earlier = settings_of(model)
    plain = Variant(model)
    progress = _Progress(plain, plain)
    progress.skipped += _out_of_level(task)
    if task.level is OptimizationLevel.O0:
        plain.install()
        return OptimizationResult(True, model, task.level, warnings=progress.skipped)
    if task.sample is None:
        # What was checked when the model was prepared stays.
        progress.current = Variant(model, earlier)
    else:
        task.training = task.purpose is not Purpose.INFERENCE and model.training
        task.training = task.training and any(p.requires_grad for p in model.parameters())
        _baseline(task, progress)
        reason = _unsteady(task, progress)
        if reason is not None:
            progress.plain.install()
            return OptimizationResult(False, model, task.level, warnings=[*progress.skipped, reason])
    for what in OPTIMIZATIONS:
        if task.purpose in what.purposes and task.level.number >= what.level.number:
            _apply(task, progress, what)
    return _finish(task, progress)


def _out_of_level(task: Task) -> list[str]:
    """What the configuration asks for, but the level does not include."""
    config = task.config
    asked = {
        "torch.compile": config.compile_backend is not None,
        "activation-checkpointing": config.activation_checkpointing is True,
        "autocast": config.amp_dtype in (torch.bfloat16, torch.float16),
    }
    return [
        f"{what.name}: it is asked for, but it needs level {what.level} or higher, not {task.level}"
        for what in OPTIMIZATIONS
        if asked.get(what.name) and task.purpose in what.purposes and task.level.number < what.level.number
    ]


def _apply(task: Task, progress: _Progress, what: Optimization) -> None:
    """Makes one optimisation, or notes why not."""
    if task.sample is None and not what.exact and _kept(progress, what.name):
        progress.receipts.append(task.earlier.get(what.name, Receipt(what.name, "as before")))
        return
    try:
        proposals = what.propose(task, progress.current)
    except HalcyonError:
        # What the caller asks for is wrong.
        raise
    # A proposal copies the model, which runs the user's code.
    except Exception as error:
        progress.skipped.append(f"{what.name}: {one_line(error)}")
        return
    finally:
        progress.current.install()
    for proposal in proposals:
        if isinstance(proposal, Skip):
            progress.skipped.append(f"{what.name}: {proposal.reason}")
            continue
        found = _consider(task, progress, what, proposal)
        if isinstance(found, Receipt):
            progress.receipts.append(found)
            progress.current = proposal.variant
            return
        progress.skipped.append(f"{what.name}: {found}")
        if found == NO_SAMPLE:
            return


def _kept(progress: _Progress, name: str) -> bool:
    """Whether a prepared model already has an optimisation."""
    s = progress.current.settings
    has = {"channels-last": s.channels_last, "autocast": s.autocast, "torch.compile": s.compilation}
    return bool(has.get(name))


def _finish(task: Task, progress: _Progress) -> OptimizationResult:
    metrics: dict[str, Any] = {}
    applied, success = progress.receipts, True
    if task.sample is not None and progress.want is not None:
        compared = compare(progress.want, _computed(task, progress.current))
        success = compared.comparable
        if not success:
            progress.skipped.append(
                "the results differ in shape or finite values: the model stays unmodified"
            )
            progress.current, applied = progress.plain, []
            compared = compare(progress.want, _computed(task, progress.current))
        metrics = _metrics(task, progress, compared)
    model = progress.current.install()
    names = [r.name for r in applied]
    return OptimizationResult(success, model, task.level, names, progress.skipped, metrics, applied)


def _metrics(task: Task, progress: _Progress, compared: Compared) -> dict[str, Any]:
    times = measure(task, progress.plain, progress.current)
    return {
        "time_before_ms": times.before * 1e3,
        "time_after_ms": times.after * 1e3,
        "speedup": times.gain,
        "speedup_interval": list(times.interval),
        "memory_before_bytes": _peak(task, progress.plain),
        "memory_after_bytes": _peak(task, progress.current),
        "error": max(compared.error(False), compared.error(True)),
        "outputs": [asdict(o) for o in compared.outputs],
    }


def _peak(task: Task, variant: Variant) -> int | None:
    """The highest number of bytes on the device during a run; None if the device does not count them."""
    task.runtime.reset_peak(task.index)
    _computed(task, variant)
    return task.runtime.peak(task.index)


def warn(task: Task, skipped: Iterable[str], stacklevel: int) -> None:
    """Warns once about everything that was skipped."""
    lines = list(skipped)
    unchecked = [line for line in lines if line.endswith(NO_SAMPLE)]
    if len(unchecked) > 1:
        names = ", ".join(line.split(":")[0] for line in unchecked)
        lines = [f"{names}: {NO_SAMPLE}", *(line for line in lines if line not in unchecked)]
    if lines:
        text = f"{task.purpose.value} at {task.level}: skipped\n  " + "\n  ".join(lines)
        warnings.warn(text, OptimizationWarning, stacklevel=stacklevel + 1)
