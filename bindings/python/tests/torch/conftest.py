"""What the tests with PyTorch share: pretended GPUs, and PyTorch's flags as they were."""

import contextlib
import dataclasses
import types
import warnings

import pytest
import torch

# Before any function of `torch.cuda` is replaced, because it looks into them.
import torch._dynamo
from halcyon.torch import OptimizationWarning, _runtimes


@pytest.fixture(autouse=True)
def flags():
    """Restores PyTorch's flags after each test."""
    benchmark, cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    # The models are small, and threads that wait for each other make the tests slow on a busy machine.
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = benchmark, cudnn


@dataclasses.dataclass
class Gpu:
    """A pretended GPU. `calls` counts what was asked of it."""

    capability: tuple[int, int] = (9, 0)
    total: int = 80 << 30
    count: int = 1
    bf16: bool = True
    calls: dict[str, list] = dataclasses.field(default_factory=dict)

    def note(self, name, *args):
        self.calls.setdefault(name, []).append(args)


@pytest.fixture
def machine():
    """Pretends machines: `machine(cuda=Gpu())`, `machine(rocm=Gpu())`, `machine(mps=True)`, `machine()`.

    With `on_cpu=True`, the pretended GPU computes on the CPU, so that models run on it.
    """
    monkeypatch = pytest.MonkeyPatch()

    def pretend(cuda=None, rocm=None, mps=False, on_cpu=False):
        gpu = cuda or rocm
        monkeypatch.undo()
        monkeypatch.setattr(torch.version, "hip", "7.0" if rocm else None)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        if gpu is None:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            return
        arch = "gfx942:sramecc+" if rocm else ""
        properties = types.SimpleNamespace(
            total_memory=gpu.total, multi_processor_count=132, gcnArchName=arch
        )
        for name, value in {
            "device_count": lambda: gpu.count,
            "get_device_name": lambda i: f"Pretended GPU {i}",
            "get_device_capability": lambda i: gpu.capability,
            "get_device_properties": lambda i: properties,
            "mem_get_info": lambda i: (gpu.total - (1 << 30), gpu.total),
            "memory_allocated": lambda i: 3 << 20,
            "memory_reserved": lambda i: 1 << 30,
            "max_memory_allocated": lambda i: 5 << 20,
            "reset_peak_memory_stats": lambda i: gpu.note("reset_peak", i),
            "is_bf16_supported": lambda including_emulation=True: gpu.bf16,
            "set_device": lambda i: gpu.note("set_device", i),
            "synchronize": lambda i: gpu.note("synchronize", i),
            "empty_cache": lambda: gpu.note("empty_cache"),
            "set_per_process_memory_fraction": lambda f, i: gpu.note("fraction", f, i),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        if not on_cpu:
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            return
        # PyTorch itself must not believe in the GPU, because it would use it when it compiles.
        there, missing = _runtimes.gpu_stack(), "there is none"
        monkeypatch.setattr(_runtimes._Gpu, "absent", lambda g: None if g.kind is there else missing)
        monkeypatch.setattr(_runtimes._Gpu, "device", lambda self, i: torch.device("cpu"))

    yield pretend
    monkeypatch.undo()


@pytest.fixture
def gpu():
    """The class of pretended GPUs."""
    return Gpu


@pytest.fixture
def quiet():
    """A context without the warnings about skipped optimisations."""

    @contextlib.contextmanager
    def context():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizationWarning)
            yield

    return context
