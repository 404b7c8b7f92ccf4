"""Row S2.9 of the contract (docs/compat.md): one interface to every kind of device, for PyTorch users."""

import io
import mmap
import re

import documents
import pytest
import torch
from halcyon import torch as ht
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def made(seed=0):
    torch.manual_seed(seed)
    return Net()


def every(machine, gpu):
    """The backends that can be opened here: the CPU, and pretended GPUs that compute on it."""
    machine()
    yield ht.BackendFactory.create("cpu")
    machine(cuda=gpu(), on_cpu=True)
    yield ht.BackendFactory.create("cuda")
    machine(rocm=gpu(), on_cpu=True)
    yield ht.BackendFactory.create("rocm")


def test_s2_09_every_backend_has_the_same_interface(machine, gpu, quiet):
    seen = []
    for backend in every(machine, gpu):
        seen.append(backend.BACKEND_NAME)
        assert isinstance(backend, ht.BaseBackend) and isinstance(backend.device, torch.device)
        info = backend.get_device_info()
        assert info.backend == backend.BACKEND_NAME and info.name == info.device_name
        assert info.memory_total_gb > info.memory_available_gb > 0
        stats = backend.get_memory_stats()
        assert stats["free"] == stats["free_bytes"] / 2**20 and stats["allocated"] > 0
        with quiet():
            model = backend.prepare_model(made())
        assert model(torch.ones(1, 3, 8, 8)).shape == (1, 4)
        backend.synchronize()
        backend.empty_cache()
    assert seen == ["cpu", "nvidia", "amd"]


def test_s2_09_detection_by_runtime(machine, gpu, monkeypatch):
    machine()
    assert ht.detect_best_runtime() == "cpu"
    machine(cuda=gpu())
    assert ht.detect_best_runtime() == "cuda"
    machine(rocm=gpu())
    assert ht.detect_best_runtime() == "rocm"
    machine()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert ht.detect_best_runtime() == "xpu"
    # What detection returns is a name that the factory takes.
    assert all(ht.BackendType(name) for name in ("cuda", "rocm", "xpu", "tpu", "cpu"))


def test_s2_09_direct_construction_with_a_level(machine, gpu, quiet):
    machine(cuda=gpu(), on_cpu=True)
    backend = ht.NVIDIABackend(optimization_level="O2")
    assert backend.optimization_level is ht.OptimizationLevel.O2
    x = torch.ones(2, 3, 8, 8)
    for level, applied in (("O0", False), ("conservative", True)):
        backend = ht.CPUBackend(optimization_level=level)
        with quiet():
            model = backend.optimize_for_inference(made(), x)
        result = ht.optimization_result(model)
        assert result.level is ht.OptimizationLevel(level)
        assert bool(result.optimizations_applied) is applied
    assert ht.CPUBackend(ht.BackendConfig(level="O1")).optimization_level is ht.OptimizationLevel.O1


def test_s2_09_the_device_is_described_by_facts(machine, gpu):
    machine()
    info = ht.CPUBackend().get_device_info()
    with open("/proc/meminfo", encoding="ascii") as f:
        kib = int(re.search(r"MemTotal:\s+(\d+)", f.read())[1])
    assert info.total_memory_bytes == kib * 1024 and info.memory_total_gb == kib / 1024**2
    # The device adds numbers in every type that it lists.
    for name in info.supported_dtypes:
        two = torch.ones(2, dtype=getattr(torch, name)) + torch.ones(2, dtype=getattr(torch, name))
        assert two.to(torch.complex64).real.tolist() == ([1.0, 1.0] if name == "bool" else [2.0, 2.0])
    assert {"float32", "bfloat16", "int64"} <= set(info.supported_dtypes)
    assert "float8_e4m3fn" not in info.supported_dtypes, "PyTorch does not add 8-bit floats"
    assert info.compute_capability is None and info.properties["fp8_supported"] is False
    for capability, fp8 in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        machine(cuda=gpu(capability=capability), on_cpu=True)
        info = ht.NVIDIABackend().get_device_info()
        assert info.compute_capability == f"{capability[0]}.{capability[1]}"
        assert info.properties["fp8_supported"] is fp8
    machine(rocm=gpu(), on_cpu=True)
    assert ht.AMDBackend().get_device_info().properties["fp8_supported"], "gfx942 multiplies them"


def test_s2_09_memory_in_megabytes(machine, gpu):
    machine()
    backend = ht.CPUBackend()
    before = backend.get_memory_stats()
    # Pages of its own, because an allocator may give memory again that the process still has.
    block = torch.frombuffer(mmap.mmap(-1, 64 << 20), dtype=torch.float32).fill_(1)
    after = backend.get_memory_stats()
    assert 60 < after["allocated"] - before["allocated"] < 100, (before, after)
    assert block.sum() == 64 << 18
    machine(cuda=gpu(), on_cpu=True)
    stats = ht.NVIDIABackend().get_memory_stats()
    assert (stats["allocated"], stats["reserved"], stats["total"]) == (3.0, 1024.0, 80 * 1024.0)
    assert stats["free"] == 79 * 1024.0


def test_s2_09_the_name_alone_switches(machine, gpu, quiet):
    def program(name):
        backend = ht.BackendFactory.create(name)
        model = made().eval().to(backend.device)
        with quiet():
            model = backend.prepare_model(model)
        torch.manual_seed(1)
        return model(torch.randn(2, 3, 8, 8).to(backend.device))

    machine(cuda=gpu(), on_cpu=True)
    assert torch.equal(program("cpu"), program("cuda"))


def test_s2_09_checkpoints_move_between_backends(machine, gpu, quiet):
    """A model that was trained on one backend loads on another, bit for bit, and into other types."""
    machine(cuda=gpu(), on_cpu=True)
    backend = ht.BackendFactory.create(
        "cuda", ht.BackendConfig(activation_checkpointing=True, keep_slower=True, compile_backend="aot_eager")
    )
    plain = nn.Sequential(made(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    names = list(plain.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = torch.randn(4, 3, 8, 8)
    with quiet():
        model, optimizer = backend.optimize_for_training(plain, optimizer, torch.bfloat16, sample_input=x)
    assert ht.optimization_result(model).optimizations_applied, "the model is not the plain one"
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert list(model.state_dict()) == names, "the names are those of the model before"
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    machine()
    cpu = ht.BackendFactory.create("cpu")
    stored = torch.load(file, map_location=cpu.device)
    other = nn.Sequential(made(9), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with quiet():
        other = cpu.prepare_model(other)
    other.load_state_dict(stored["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    half = nn.Sequential(made(9), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).to(torch.bfloat16)
    half.load_state_dict(stored["model"])
    weight = model.state_dict()["0.conv.weight"]
    assert torch.equal(half.state_dict()["0.conv.weight"], weight.to(torch.bfloat16))
    again = torch.optim.AdamW(other.parameters(), lr=1e-2)
    again.load_state_dict(stored["optimizer"])
    assert again.state_dict()["state"][0]["step"] == 3


def test_s2_09_a_named_backend_is_never_replaced(machine):
    machine()
    for name in ("cuda", "rocm", "xpu", "tpu", "mps"):
        with pytest.raises(ht.BackendError, match=f"^{ht.BackendType(name)}: "):
            ht.BackendFactory.create(name)


def names():
    return {
        "YourModel": Net,
        "model": made(),
        "backend": ht.get_backend("cpu"),
        "dataloader": [torch.ones(2, 3, 8, 8)] * 2,
        **{name: getattr(__import__("abc"), name) for name in ("ABC", "abstractmethod")},
        "nn": nn,
        "torch": torch,
        "DeviceInfo": ht.DeviceInfo,
        "dataclass": __import__("dataclasses").dataclass,
    }


def test_s2_09_the_documents_examples(machine, quiet):
    """Own wording of the document's examples, for machines without the document."""
    machine()
    with quiet():
        backend = ht.BackendFactory.create(ht.detect_best_backend())
        model = backend.prepare_model(Net().to(backend.device))
    for batch in [torch.ones(2, 3, 8, 8)] * 2:
        assert model(batch.to(backend.device)).shape == (2, 4)
    info = backend.get_device_info()
    assert re.fullmatch(r"\d+\.\d GB", f"{info.memory_total_gb:.1f} GB")
    assert "float32" in f"{info.supported_dtypes}"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_s2_09_the_document_runs_as_printed(machine, gpu, quiet, kind):
    blocks = documents.blocks("# Backends Overview")
    if kind == "cuda":
        machine(cuda=gpu(), on_cpu=True)
    else:
        machine()
    missing, after = set(), {}
    for block in blocks:
        # A block may use what an earlier block imports.
        after.update(names())
        with quiet():
            missing.update(documents.run(block, after))
        if "class BaseBackend" in block:
            printed = vars(after["BaseBackend"])
            for name in printed:
                assert name.startswith("__") or name == "_abc_impl" or hasattr(ht.BaseBackend, name), name
        if "class DeviceInfo" in block:
            for name in after["DeviceInfo"].__annotations__:
                assert hasattr(ht.get_backend().get_device_info(), name), name
    expected = {"cuda", "rocm", "tpu"} if kind == "cpu" else {"rocm", "tpu"}
    assert missing == expected
