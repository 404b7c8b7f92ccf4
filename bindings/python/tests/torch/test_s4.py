"""Row S4.11 of the contract (docs/compat.md): backends by vendor, devices and levels, for PyTorch users.

`test_s4_models.py`, `test_s4_state.py` and `test_s4_strategies.py` have the tests of what is done to models.
"""

import json
import re
import sys
import time
import types
import typing
from collections import UserDict
from pathlib import Path

import documents
import halcyon
import pytest
import torch
from halcyon import torch as ht
from halcyon.torch import BackendConfig, BackendError, BackendErrorKind, BackendFactory, BackendType
from torch import nn


def test_s4_11_the_factory_opens_by_type_and_name(machine, gpu):
    machine(cuda=gpu(count=2), on_cpu=True)
    assert BackendType.NVIDIA is BackendType.CUDA and BackendType.AMD is BackendType.ROCM
    for name in ("nvidia", "NVIDIA", "cuda", BackendType.NVIDIA):
        backend = BackendFactory.create(name)
        assert isinstance(backend, ht.NVIDIABackend) and backend.BACKEND_NAME == "nvidia"
    assert BackendFactory.is_available("nvidia") and not BackendFactory.is_available(BackendType.AMD)
    assert BackendFactory.is_available("auto")
    with pytest.raises(BackendError, match="valid names are auto, cuda, nvidia") as e:
        BackendFactory.is_available("nvidiaa")
    assert e.value.kind is BackendErrorKind.UNKNOWN_VALUE
    with pytest.raises(BackendError, match="PyTorch has no OpenCL device") as e:
        BackendFactory.create("opencl")
    assert e.value.kind is BackendErrorKind.UNSUPPORTED
    every = BackendFactory.get_all_backend_info()
    nvidia = {
        "available": True,
        "class": "NVIDIABackend",
        "type": "cuda",
        "devices": ["Pretended GPU 0", "Pretended GPU 1"],
        "reason": None,
    }
    assert every["nvidia"] == nvidia
    assert not every["amd"]["available"] and every["amd"]["reason"] and every["amd"]["devices"] == []
    assert {"tpu", "intel", "metal", "cpu", "opencl"} <= set(every) and every["opencl"]["class"] is None
    json.dumps(every)
    assert ht.list_available_backends() == ["nvidia", "cpu"]


def test_s4_11_auto_tries_the_vendors_in_order(machine, gpu, monkeypatch):
    def best():
        backend = ht.get_backend()
        assert backend.BACKEND_NAME == ht.detect_best_backend()
        return backend

    machine()
    cpu = best()
    assert cpu.BACKEND_NAME == "cpu"
    # The choice says why each of the others was rejected.
    assert [r.split(":")[0] for r in cpu.rejected] == ["nvidia", "amd", "tpu", "intel"]
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    assert best().BACKEND_NAME == "intel"
    pretend_tpu(monkeypatch)
    assert best().BACKEND_NAME == "tpu"
    machine(rocm=gpu(), on_cpu=True)
    assert best().BACKEND_NAME == "amd"
    machine(cuda=gpu(), on_cpu=True)
    assert best().BACKEND_NAME == "nvidia" and ht.get_backend("auto").rejected == ()


def pretend_tpu(monkeypatch):
    """A stand-in for the package `torch_xla` on a TPU whose device is the CPU."""
    xla, runtime, core = (types.ModuleType(f"torch_xla{n}") for n in ("", ".runtime", ".core.xla_model"))
    xla.__spec__ = types.SimpleNamespace(name="torch_xla")
    xla.__version__, xla.synced = "2.15", []
    xla.device = lambda index: torch.device("cpu")
    xla.sync = lambda wait: xla.synced.append(wait)
    runtime.device_type, runtime.addressable_device_count = (lambda: "TPU"), (lambda: 4)
    runtime.global_runtime_device_attributes = lambda: [{"coords": [0, 0, 0]}]
    core.get_memory_info = lambda device: {"bytes_limit": 16 << 30, "bytes_used": 1 << 30}
    for module in (xla, runtime, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
    return xla


def test_s4_11_a_tpu_is_described_by_its_own_properties(machine, monkeypatch):
    machine()
    xla = pretend_tpu(monkeypatch)
    backend = BackendFactory.create("tpu")
    info = backend.get_device_info()
    assert (info.properties["version"], info.properties["topology"]) == ("v5e-4", [[0, 0, 0]])
    assert (info.total_memory_gb, info.available_memory_gb, info.driver_version) == (16.0, 15.0, "2.15")
    assert backend.device_count == 4
    backend.synchronize()
    assert xla.synced == [True]


def test_s4_11_every_backend_answers_the_same_questions(machine, gpu):
    machine()
    backend = ht.get_backend("cpu")
    assert (backend.BACKEND_NAME, backend.device, backend.device_count) == ("cpu", torch.device("cpu"), 1)
    assert backend.is_available is True
    backend.set_device(0)
    for call in (backend.set_device, backend.get_device_info):
        with pytest.raises(BackendError, match="cpu:7: there is no such device; valid indices are 0"):
            call(7)
    assert "CPUBackend(cpu, " in repr(backend) and "level O2" in repr(backend)

    there = gpu(count=2)
    machine(cuda=there, on_cpu=True)
    backend = ht.get_backend("nvidia")
    backend.set_device(1)
    backend.synchronize()
    assert there.calls == {"set_device": [(1,)], "synchronize": [(1,)]}
    assert backend.get_device_info().device_id == 1 and backend.get_device_info(device_id=0).device_id == 0
    with pytest.raises(BackendError, match="valid indices are 0 to 1"):
        backend.set_device(2)
    there.count = 1
    assert not backend.is_available, "the device is gone"


def test_s4_11_to_device_leaves_collections_to_their_own_method():
    class Meta(ht.CPUBackend):
        device = torch.device("meta")

    class Batch(UserDict):
        def to(self, device):
            return Batch({k: v.to(device) for k, v in self.items()})

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    moved = Meta().to_device({"packed": packed, "batch": Batch(ids=torch.ones(2)), "more": [torch.ones(1)]})
    assert moved["packed"].data.is_meta and not moved["packed"].batch_sizes.is_meta
    assert moved["batch"]["ids"].is_meta and moved["more"][0].is_meta


def test_s4_11_to_device_moves_tensors_modules_and_collections(monkeypatch):
    backend = ht.get_backend("cpu")
    x, net = torch.ones(2), nn.Linear(2, 2)
    assert backend.to_device(x) is x and backend.to_device(net) is net
    # The device `meta` shows that every tensor inside is moved.
    monkeypatch.setattr("halcyon.torch._runtimes._Cpu.device", lambda self, index: torch.device("meta"))
    moved = backend.to_device({"input": x, "more": [x, (x, 3)], "net": net})
    assert moved["input"].is_meta and moved["more"][0].is_meta
    assert moved["more"][1][0].is_meta and moved["more"][1][1] == 3 and net.weight.is_meta


def test_s4_11_a_scope_empties_the_cache(machine, gpu):
    there = gpu()
    machine(cuda=there, on_cpu=True)
    with ht.get_backend() as backend:
        assert isinstance(backend, ht.NVIDIABackend) and "empty_cache" not in there.calls
    assert len(there.calls["empty_cache"]) == 1
    with pytest.raises(ZeroDivisionError), backend.scope() as same:
        assert same is backend
        raise ZeroDivisionError
    assert len(there.calls["empty_cache"]) == 2, "after an error too"


def test_s4_11_levels_are_parsed_from_names_and_aliases():
    level = ht.OptimizationLevel
    names = {
        "O0": ("O0", "o0", "none", "debug"),
        "O1": ("O1", "conservative"),
        "O2": ("O2", "balanced", "BALANCED", " Balanced "),
        "O3": ("O3", "aggressive"),
    }
    for want, spellings in names.items():
        for name in spellings:
            assert level.from_string(name) is level(name) is level[want]
    assert level.from_string(level.O1) is level.O1 and str(level.O3) == "O3"
    for bad in ("O4", "", 2, None):
        with pytest.raises(halcyon.ArgumentError, match="valid names are O0, O1, O2, O3, none, debug, cons"):
            level.from_string(bad)
    with pytest.raises(ValueError, match="not an optimization level"):
        ht.get_backend("cpu").prepare_model(nn.Linear(1, 1), "fast")


def test_s4_11_standard_device_information(machine, gpu):
    machine(cuda=gpu(), on_cpu=True)
    info = ht.get_backend("nvidia").get_device_info()
    assert (info.backend, info.runtime, info.device_id, info.is_available) == ("nvidia", "cuda", 0, True)
    assert (info.device_name, info.compute_capability) == ("Pretended GPU 0", "9.0")
    assert (info.total_memory_gb, info.total_memory_mb) == (80.0, 80 * 1024.0)
    fields = json.loads(json.dumps(info.to_dict()))
    assert fields["total_memory_gb"] == 80.0 and fields["properties"]["fp8_supported"] is True
    for name in (
        "backend",
        "device_type",
        "device_id",
        "device_name",
        "compute_capability",
        "driver_version",
    ):
        assert fields[name] == getattr(info, name)
    assert ht.StandardDeviceInfo is ht.DeviceInfo
    machine()
    info = ht.get_backend("cpu").get_device_info(0)
    assert (info.device_type, info.device_id, info.compute_capability) == ("cpu", 0, None)
    assert info.device_name == halcyon.Backend("cpu").info["name"]
    assert info.properties["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


def test_s4_11_a_configuration_has_an_effect_or_is_an_error(machine, gpu):
    machine()
    ht.get_backend("cpu", BackendConfig(num_threads=1))
    assert torch.get_num_threads() == 1
    with pytest.raises(halcyon.UnsupportedError, match="memory_limit on CPU"):
        ht.get_backend("cpu", BackendConfig(memory_limit=1 << 30))
    there = gpu(count=2)
    machine(cuda=there, on_cpu=True)
    backend = ht.NVIDIABackend(BackendConfig(memory_limit=20 << 30, device_id=1))
    assert there.calls["fraction"] == [(0.25, 1)] and backend.get_device_info().device_id == 1
    with pytest.raises(halcyon.UnsupportedError, match="num_threads on CUDA"):
        ht.NVIDIABackend(BackendConfig(num_threads=2))
    for options, name in (
        ({"device_id": -1}, "device_id"),
        ({"memory_limit": 0}, "memory_limit"),
        ({"num_threads": 0}, "num_threads"),
        ({"amp_dtype": torch.int8}, "amp_dtype"),
        ({"max_error": 0.0}, "max_error"),
        ({"level": "O7"}, "not an optimization level"),
    ):
        with pytest.raises(halcyon.ArgumentError, match=name):
            BackendConfig(**options)
    with pytest.raises(halcyon.ArgumentError, match="config is a dict"):
        ht.CPUBackend({"level": "O1"})


def test_s4_11_old_names_are_deprecated(quiet):
    backend, optimizer = ht.CPUBackend(), ht.CPUOptimizer()
    with pytest.warns(DeprecationWarning, match=r"get_device_info\(\)\.to_dict"):
        old = backend.get_device_info_dict()
    new = backend.get_device_info().to_dict()
    for free in (old, new):
        free.pop("available_memory_bytes")
    assert old == new
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.warns(DeprecationWarning, match="use optimize"):
        got = optimizer.optimize_legacy(model, "O1", x)
    assert torch.equal(got(x), model(x)) and isinstance(got, nn.Module)


def test_s4_11_the_documentation_runs(machine, capsys):
    machine()
    page = (Path(__file__).parents[4] / "docs" / "python-torch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    space = {}
    for block in blocks:
        exec(compile(block, "python-torch.md", "exec"), space)
    assert len(blocks) == 5 and space["device"] == torch.device("cpu") and space["loss"].item() < 2.0
    assert "receipt  inference-mode" in capsys.readouterr().out


def names():
    """What the document's blocks use without defining it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 8))
    return {
        **{n: model for n in ("model", "your_model", "my_model")},
        "my_optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "num_epochs": 3,
        "dataloader": [{"input": torch.randn(4, 256), "target": torch.zeros(4, 8)} for _ in range(4)],
        "criterion": nn.MSELoss(),
        "create_test_model": lambda: nn.Sequential(nn.Linear(256, 64), nn.ReLU()),
        **{n: torch.randn(2, 256) for n in ("my_inputs", "input_tensor", "sample_input", "tensor")},
        "device_id": 0,
        "backend": ht.get_backend("cpu"),
        "config": BackendConfig(),
        "DeviceInfo": ht.DeviceInfo,
        "OptimizationLevel": ht.OptimizationLevel,
        "torch": torch,
        "nn": nn,
        "dataclass": __import__("dataclasses").dataclass,
        "Enum": __import__("enum").Enum,
        **{n: getattr(typing, n) for n in ("Any", "Dict", "List", "Optional", "Tuple", "Union")},
    }


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_s4_11_the_document_runs_as_printed(machine, gpu, quiet, capsys, monkeypatch, kind):
    # The gains are not measured here: test_s4_strategies.py does.
    monkeypatch.setattr("halcyon.torch._strategies._measure", lambda backend: {"torch.compile": 1.5})
    monkeypatch.setenv("HALCYON_CACHE", "off")
    blocks = documents.blocks("# Backend Unification Guide")
    if kind == "cuda":
        machine(cuda=gpu(), on_cpu=True)
    else:
        machine()
    missing, after, ours = set(), {}, vars(ht)
    for block in blocks:
        after.update(names())
        with quiet():
            missing.update(documents.run(block, after))
        # The printed interfaces are those of our classes.
        for name in set(re.findall(r"^class (\w+)", block, re.MULTILINE)):
            fields = getattr(after[name], "__annotations__", {})
            own = {*dir(ours[name]), *getattr(ours[name], "__annotations__", {})}
            printed = {n for n in vars(after[name]) if not n.endswith("_") and n != "_abc_impl"}
            assert printed | set(fields) <= own, name
    out = capsys.readouterr().out
    for part in ("Using backend: ", "Training on: ", "Epoch 2: Loss = ", "ms/iter on ", "Speedup: 1.5x"):
        assert part in out, part
    assert ("Warning: Running on CPU" in out) == (kind == "cpu")
    assert ("FP8 Support: True" in out) == (kind == "cuda")
    losses = [float(x) for x in re.findall(r"Loss = ([\d.]+)", out)]
    assert losses[-1] < losses[0]
    expected = {"rocm", "tpu", "intel"} if kind == "cuda" else {"cuda", "rocm", "tpu", "intel"}
    assert missing == expected


def test_s4_11_examples_in_own_words(machine, quiet):
    """The document's examples for machines without the document: comparison, pipeline, warning."""
    machine()
    times = {}
    for kind in (BackendType.CPU, BackendType.NVIDIA, BackendType.AMD):
        try:
            backend = BackendFactory.create(kind)
        except BackendError as error:
            assert str(error).startswith(f"{kind}: ")
            continue
        with quiet():
            model = backend.prepare_model(nn.Sequential(nn.Linear(256, 256), nn.ReLU()), "O2")
            model = backend.optimize_for_inference(model)
        x = backend.to_device(torch.randn(8, 64, 256))
        for _ in range(3):
            model(x)
        backend.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            model(x)
        backend.synchronize()
        times[backend.BACKEND_NAME] = time.perf_counter() - start
    assert list(times) == ["cpu"]
    with ht.get_backend() as backend, quiet():
        pipeline = backend.prepare_model(nn.Linear(4, 2), ht.OptimizationLevel.O3)
        pipeline = backend.optimize_for_inference(pipeline, sample_input=None)
    assert ht.optimization_result(pipeline).level is ht.OptimizationLevel.O3
    with torch.no_grad():
        assert pipeline(torch.ones(3, 4)).shape == (3, 2)
