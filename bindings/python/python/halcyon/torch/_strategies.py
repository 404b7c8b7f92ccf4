"""The optimisations as a list, with the gain of each on a device, measured once and kept on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from halcyon import _native
from halcyon._errors import ArgumentError
from halcyon.torch import _optim, _pipeline
from halcyon.torch._check import Sample
from halcyon.torch._info import supported_dtypes
from halcyon.torch._names import OptimizationLevel
from halcyon.torch._optimizations import OPTIMIZATIONS, Optimization, Purpose, Skip, Task, Variant
from halcyon.torch._prepared import compilation_errors

if TYPE_CHECKING:
    from halcyon.torch._backends import BaseBackend

__all__ = ["Strategy", "strategies"]

#: The version of the method of measuring. Stored gains of another version are ignored.
_METHOD = 1


@dataclass(frozen=True)
class Strategy:
    """An optimisation, with its measured gain."""

    name: str
    description: str
    #: The time without it divided by the time with it: the geometric mean over the small networks that it
    #: changes on this device. None if it changes none of them, or cannot be measured.
    speedup_estimate: float | None
    applicable_levels: list[OptimizationLevel]


def _levels(first: OptimizationLevel) -> list[OptimizationLevel]:
    return [level for level in OptimizationLevel if level.number >= first.number]


def strategies(backend: BaseBackend) -> list[Strategy]:
    """All strategies of a backend."""
    gains = _gains(backend)
    found = [Strategy(o.name, o.description, gains.get(o.name), _levels(o.level)) for o in OPTIMIZATIONS]
    fused = "updates all parameters in one kernel in training"
    found.append(Strategy(_optim.FUSED, fused, gains.get(_optim.FUSED), _levels(OptimizationLevel.O1)))
    return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return y


def _networks(device: torch.device) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """Small networks with patterns that the optimisations change, and an input for each."""
    image = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 16),
    )
    yield image.to(device), torch.ones(8, 3, 32, 32).to(device)
    yield nn.Sequential(_Block(256), _Block(256)).to(device), torch.ones(64, 256).to(device)


_lock = threading.Lock()
_known: dict[str, dict[str, float]] = {}


def _gains(backend: BaseBackend) -> dict[str, float]:
    identity = _identity(backend)
    # The lock is held during the measurement, because concurrent measurements would disturb each other.
    with _lock:
        if identity not in _known:
            path = _path(identity)
            found = _read(path)
            if found is None:
                found = _measure(backend)
                _write(path, found)
            _known[identity] = found
        return _known[identity]


def _identity(backend: BaseBackend) -> str:
    """Everything that the gains depend on: versions, the device, its driver, the settings."""
    info = backend.get_device_info()
    facts = [
        str(_METHOD),
        _native.__version__,
        torch.__version__,
        platform.python_version(),
        info.backend,
        info.device_type,
        info.device_name,
        str(info.driver_version),
        str(torch.get_num_threads()),
        torch.get_float32_matmul_precision(),
        str(backend.config.compile_backend),
    ]
    return "\n".join(facts)


def _path(identity: str) -> Path | None:
    """The file of the gains; None if nothing may be kept on disk."""
    directory = _cache_directory()
    if directory is None:
        return None
    return directory / "torch-gains" / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.json"


def _cache_directory() -> Path | None:
    """Halcyon's cache directory, as its Rust side has it."""
    setting = os.environ.get("HALCYON_CACHE", "").lower()
    if setting not in ("", "programs", "packed"):
        return None
    for name, below in _CACHES.get(sys.platform, (("XDG_CACHE_HOME", ""), ("HOME", ".cache"))):
        base = os.environ.get(name)
        if base and os.path.isabs(base):
            return Path(base) / below / "halcyon"
    return None


_CACHES = {"win32": (("LOCALAPPDATA", ""),), "darwin": (("HOME", "Library/Caches"),)}


def _read(path: Path | None) -> dict[str, float] | None:
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or not all(isinstance(v, float) for v in found.values()):
        return None
    return found


def _write(path: Path | None, gains: dict[str, float]) -> None:
    """Stores the gains, as a whole or not at all. A directory that cannot be written is no error."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
            json.dump(gains, f)
        os.replace(f.name, path)
    except OSError:
        return


def _measure(backend: BaseBackend) -> dict[str, float]:
    """The gain of each optimisation over the networks that it changes."""
    ratios: dict[str, list[float]] = {}
    state = torch.get_rng_state()
    torch.manual_seed(0)
    try:
        networks = list(_networks(backend.device))
    finally:
        torch.set_rng_state(state)
    for what in OPTIMIZATIONS:
        for network, x in networks:
            gain = _gain(backend, what, network, x)
            if gain is not None:
                ratios.setdefault(what.name, []).append(gain)
    gains = {name: math.exp(sum(map(math.log, r)) / len(r)) for name, r in ratios.items()}
    fused = _optim.fused_gain(_task(backend, Purpose.TRAINING))
    return gains if fused is None else {**gains, _optim.FUSED: fused}


def _task(backend: BaseBackend, purpose: Purpose, sample: Sample | None = None) -> Task:
    half = torch.bfloat16 if "bfloat16" in supported_dtypes(backend.device) else torch.float32
    config = replace(backend.config, amp_dtype=half, activation_checkpointing=True)
    index = backend.device.index or 0
    return Task(backend.BACKEND_TYPE, index, OptimizationLevel.O3, purpose, config, None, sample)


def _gain(backend: BaseBackend, what: Optimization, network: nn.Module, x: torch.Tensor) -> float | None:
    """The gain of one optimisation on one network; None if it does not change it or cannot be measured."""
    purpose = Purpose.INFERENCE if Purpose.INFERENCE in what.purposes else Purpose.TRAINING
    training = purpose is Purpose.TRAINING
    task = _task(backend, purpose, Sample.of(x, backend.device))
    task.training = training
    plain = Variant(network.train(training))
    try:
        for proposal in what.propose(task, plain):
            if not isinstance(proposal, Skip):
                with compilation_errors():
                    return _pipeline.measure(task, plain, proposal.variant).gain
    except ArgumentError:
        raise
    # A device may lack what an optimisation needs, which PyTorch reports by several kinds of errors.
    except Exception:
        return None
    finally:
        plain.install()
    return None
