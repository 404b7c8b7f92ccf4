"""Training steps, checkpoints and files of weights.

>>> step = training.TrainStep(loss, params, "adamw", lr=3e-4)   # doctest: +SKIP
>>> for x, y in batches:                                        # doctest: +SKIP
...     value = step(x, y)

A step computes the loss, the gradients and the new parameters as one plan. The loss is a function of the
parameters and the batch, written with :mod:`halcyon.array`; it is called once for each set of input types.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from halcyon import _native
from halcyon._errors import ArgumentError, DTypeError
from halcyon._native import Tensor
from halcyon.array import Array, asarray
from halcyon.array._array import wrap
from halcyon.array._devices import DeviceLike, backend_of
from halcyon.array._transforms import Keys, _tracing

__all__ = ["TrainStep", "checkpoints", "latest_checkpoint", "load_weights", "save_weights"]

PathLike = str | os.PathLike[str]
#: Parameters: arrays, in mappings and sequences of any depth.
Params = Any
#: A loss: a function of the parameters and the batch. It returns the loss, or the loss and further results.
Loss = Callable[..., Array | Sequence[Array]]
#: The rate as a function of the step: mappings as in a configuration file of ``halcyon train``.
Schedule = Mapping[str, Any]


def _named(tree: Params, path: str = "") -> list[tuple[str, Array]]:
    """The arrays of a tree, with their paths."""
    if isinstance(tree, Array):
        return [(path, tree)]
    inner = f"{path}." if path else ""
    if isinstance(tree, Mapping):
        for key in tree:
            if not isinstance(key, str) or not key:
                raise ArgumentError(f"parameters: {key!r} is not a name")
        pairs = [pair for key, value in tree.items() for pair in _named(value, inner + key)]
        # A name with dots, as files of weights have them, may be the path of another array.
        often = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
        if often:
            raise ArgumentError(f"parameters: two arrays have the path {often[0]}")
        return pairs
    if isinstance(tree, (list, tuple)):
        return [pair for i, value in enumerate(tree) for pair in _named(value, f"{inner}{i}")]
    raise DTypeError(
        f"parameters: {path or 'the tree'} is {type(tree).__name__}, expected an array or a tree"
    )


def _filled(tree: Params, values: Mapping[str, Array], path: str = "") -> Params:
    """The tree with other arrays at its paths."""
    if isinstance(tree, Array):
        return values[path]
    inner = f"{path}." if path else ""
    if isinstance(tree, Mapping):
        return {key: _filled(value, values, inner + key) for key, value in tree.items()}
    made = [_filled(value, values, f"{inner}{i}") for i, value in enumerate(tree)]
    if hasattr(tree, "_fields"):
        return type(tree)(*made)
    return tuple(made) if isinstance(tree, tuple) else made


def _kind(x: object) -> str:
    if isinstance(x, (list, tuple)):
        return f"a {type(x).__name__} with {', '.join(type(y).__name__ for y in x)}"
    return f"a {type(x).__name__}"


def _schedule(given: Any) -> str:
    """A schedule as the native module reads it."""
    if not isinstance(given, Mapping):
        raise DTypeError(f'schedule: a {type(given).__name__}; give a dict such as {{"kind": "cosine"}}')
    try:
        return json.dumps(dict(given))
    except (TypeError, ValueError) as e:
        raise ArgumentError(f"schedule: {e}") from None


def _mapping(what: str, given: Any) -> dict[str, Any]:
    """A dict argument; None is an empty one."""
    if given is not None and not isinstance(given, Mapping):
        raise DTypeError(f"{what}: a {type(given).__name__}; give a dict by name")
    return dict(given or {})


class TrainStep:
    """A training step: the loss, the gradients and the new parameters as one plan.

    The step keeps the parameters, the optimizer's state and what it needs for checkpoints. A step that fails
    before it runs, for example because of a wrong shape, changes nothing.
    """

    def __init__(
        self,
        loss: Loss,
        params: Params,
        optimizer: str = "adamw",
        *,
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        ema: float | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Makes a step.

        Args:
            loss: A function of the parameters and the arrays of a batch. It returns the loss, an array with
                one element, or a sequence that begins with the loss.
            params: The first values of the parameters: float arrays, in mappings and sequences of any depth.
            optimizer: sgd, adam, adamw, adagrad, rmsprop, adafactor, lion or muon.
            schedule: The learning rate as a function of the step, such as
                ``{"kind": "cosine", "steps": 1000, "least": 0.0}``.
            clip_norm: The largest norm of all gradients together.
            clip_value: The largest magnitude of an element of a gradient.
            accumulate: Calls for each update, which then uses the mean of their gradients.
            ema: The decay of moving averages of the parameters (:attr:`averages`).
            seed: Seed of the random numbers that the loss draws without a seed of their own. They differ
                from step to step.
            options: Options of the optimizer: ``lr``, ``weight_decay`` and the rule's own, such as
                ``momentum``, ``beta1``, ``beta2`` and ``eps``. The others have PyTorch's defaults.
        """
        if not callable(loss):
            raise DTypeError(f"training step: the loss is a {type(loss).__name__}, which cannot be called")
        named = _named(params)
        if not named:
            raise ArgumentError("training step: there are no parameters")
        for name, value in named:
            if value.dtype.kind != "f":
                raise DTypeError(f"training step: the parameter {name} is {value.dtype}, expected floats")
        self._tree = params
        names = [name for name, _ in named]
        self._device = named[0][1].device
        backend = self._device.backend

        def traced(values: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
            tree = _filled(params, dict(zip(names, map(wrap, values), strict=True)))
            with _tracing(Keys(backend)):
                made = loss(tree, *map(wrap, batch))
            made = [made] if isinstance(made, Array) else made
            if not isinstance(made, (list, tuple)) or not all(isinstance(x, Array) for x in made):
                what = "an array, or a sequence of arrays that begins with the loss"
                raise DTypeError(f"training step: the loss function returned {_kind(made)}, expected {what}")
            return [x._tensor for x in made]

        settings = {
            "optimizer": optimizer,
            "schedule": None if schedule is None else _schedule(schedule),
            "clip_norm": clip_norm,
            "clip_value": clip_value,
            "accumulate": accumulate,
            "ema": ema,
            "seed": seed,
        }
        pairs = [(name, value._tensor) for name, value in named]
        self._native = _native.TrainStep(traced, pairs, settings, options)

    def __call__(self, *batch: Any) -> Any:
        """Runs the step. Returns the loss, or what the loss function returned."""
        arrays = [x if isinstance(x, Array) else asarray(x, device=self._device) for x in batch]
        made = [wrap(t) for t in self._native.run([x._tensor for x in arrays])]
        return made[0] if len(made) == 1 else made

    @property
    def params(self) -> Params:
        """The present parameters, in the structure of the first ones.

        Parameters that are set are matched by their paths, so they may also come from :func:`load_weights`.
        If one does not fit, nothing is changed.
        """
        return self._tree_of(self._native.params())

    @params.setter
    def params(self, values: Params) -> None:
        given = _named(values)
        names = [name for name, _ in _named(self._tree)]
        if sorted(names) != sorted(name for name, _ in given):
            have = ", ".join(name for name, _ in given)
            raise ArgumentError(f"params: the parameters are {', '.join(names)}, and [{have}] is given")
        self._native.set_params([(name, value._tensor) for name, value in given])

    @property
    def averages(self) -> Params:
        """The moving averages of the parameters."""
        return self._tree_of(self._native.averages())

    @property
    def steps(self) -> int:
        """The number of updates."""
        return self._native.steps()

    def learning_rate(self, parameter: str) -> float:
        """The learning rate of a parameter in the next update."""
        return self._native.rate(parameter)

    def state(self) -> dict[str, Array]:
        """What the step keeps in addition to the parameters, such as moments."""
        return {name: wrap(t) for name, t in self._native.state()}

    def save(
        self,
        folder: PathLike,
        *,
        epoch: int = 0,
        metrics: Mapping[str, float] | None = None,
        keep: int = 3,
        best: tuple[str, Literal["largest", "smallest"]] | None = None,
    ) -> Path:
        """Writes a checkpoint below a folder and returns its own folder. A process that ends leaves it whole.

        Args:
            folder: The folder of the run's checkpoints.
            epoch: The number of epochs that are done.
            metrics: Figures to remember, such as an accuracy.
            keep: The number of newest checkpoints to keep; 0: all.
            best: The metric whose best checkpoint is kept too, and which of its values is the best.
        """
        if best is not None and (not isinstance(best, tuple) or len(best) != 2):
            raise DTypeError(f'best: {best!r}: expected a metric and its goal, such as ("loss", "smallest")')
        if best is not None and best[1] not in ("largest", "smallest"):
            raise ArgumentError(f"best: {best[1]!r}: expected largest or smallest")
        goal = None if best is None else (best[0], best[1] == "largest")
        return Path(self._native.save(os.fspath(folder), keep, goal, epoch, _mapping("metrics", metrics)))

    def load(self, checkpoint: PathLike) -> dict[str, Any]:
        """Continues from a checkpoint, also of another device. Returns its record, with epoch and metrics.

        If it does not fit, the error names what differs and nothing is changed.
        """
        return self._native.load(os.fspath(checkpoint))

    def _tree_of(self, values: Sequence[tuple[str, Tensor]]) -> Params:
        return _filled(self._tree, {name: wrap(t) for name, t in values})


def checkpoints(folder: PathLike) -> list[Path]:
    """The checkpoints below a folder, oldest first."""
    return [Path(p) for p in _native.checkpoints(os.fspath(folder))]


def latest_checkpoint(folder: PathLike) -> Path | None:
    """The newest checkpoint below a folder."""
    found = checkpoints(folder)
    return found[-1] if found else None


def save_weights(path: PathLike, params: Params, metadata: Mapping[str, str] | None = None) -> int:
    """Writes arrays to a safetensors file, under their paths in the tree. Returns its size in bytes."""
    pairs = [(name, value._tensor) for name, value in _named(params)]
    return _native.save_tensors(os.fspath(path), pairs, _mapping("metadata", metadata))


def load_weights(path: PathLike, device: DeviceLike = None) -> dict[str, Array]:
    """Reads the arrays of a safetensors file, by name."""
    tensors, _ = _native.load_tensors(os.fspath(path), backend_of(device))
    return {name: wrap(t) for name, t in tensors}
