"""Row S0.8 of the contract (docs/compat.md): devices, settings and mixed precision for PyTorch users."""

import documents
import halcyon
import pytest
import torch
from halcyon import torch as ht
from halcyon.torch import BackendError, BackendErrorKind, BackendType

CUDA, ROCM = "CUDAExecutionProvider", "ROCMExecutionProvider"
GRAPHX, CORE, CPU = "MIGraphXExecutionProvider", "CoreMLExecutionProvider", "CPUExecutionProvider"


def error(function, *args):
    with pytest.raises(BackendError) as found:
        function(*args)
    return found.value


def test_s0_08_auto_is_the_first_gpu_that_torch_has(machine, gpu):
    auto = {}
    for name, there in {
        "cuda": {"cuda": gpu(), "mps": True},
        "rocm": {"rocm": gpu(), "mps": True},
        "mps": {"mps": True},
        "cpu": {},
    }.items():
        machine(**there)
        auto[name] = ht.resolve_torch_device("AUTO")
        assert auto[name] == ht.resolve_torch_device() == ht.resolve_device("auto")
    device = torch.device
    assert auto == {
        "cuda": device("cuda"),
        "rocm": device("cuda"),
        "mps": device("mps"),
        "cpu": device("cpu"),
    }


def test_s0_08_named_devices_are_real_torch_devices(machine, gpu):
    machine(cuda=gpu())
    for name in ("cuda", "NVIDIA", BackendType.CUDA, BackendType.NVIDIA):
        assert ht.resolve_torch_device(name) == torch.device("cuda")
    machine(rocm=gpu())
    for name in ("rocm", "amd", "hip", BackendType.AMD):
        assert ht.resolve_torch_device(name) == torch.device("cuda")
    machine(mps=True)
    assert ht.resolve_torch_device("metal") == torch.device("mps")
    machine()
    assert torch.ones(2, device=ht.resolve_torch_device("cpu")).device.type == "cpu"


def test_s0_08_the_wrong_stack_names_the_right_one(machine, gpu):
    machine(rocm=gpu())
    e = error(ht.resolve_torch_device, "cuda")
    assert e.kind is BackendErrorKind.MISMATCH and 'Use "rocm"' in str(e)
    machine(cuda=gpu())
    e = error(ht.resolve_torch_device, "rocm")
    assert e.kind is BackendErrorKind.MISMATCH and 'Use "cuda"' in str(e)
    # Without any device, the advice is not to use the other stack.
    machine()
    e = error(ht.resolve_torch_device, "rocm")
    assert e.kind is BackendErrorKind.MISMATCH and 'Use "cuda"' not in str(e)
    assert "Install PyTorch's build for ROCm" in str(e)


def test_s0_08_missing_devices_say_what_to_do(machine):
    machine()
    e = error(ht.resolve_torch_device, "cuda")
    assert e.kind is BackendErrorKind.MISSING_RUNTIME and isinstance(e, RuntimeError)
    assert '"auto" or "cpu"' in str(e)
    assert "pip install torch_xla" in str(error(ht.resolve_torch_device, "tpu"))
    assert "XPU" in str(error(ht.resolve_torch_device, "intel"))
    e = error(ht.resolve_torch_device, "webgpu")
    assert e.kind is BackendErrorKind.UNSUPPORTED and 'halcyon.Backend("webgpu")' in str(e)


def test_s0_08_unknown_names_list_the_valid_ones():
    e = error(ht.resolve_torch_device, "cudda")
    assert e.kind is BackendErrorKind.UNKNOWN_VALUE
    # The names are those of the Rust side, which also has a backend for tests.
    with pytest.raises(halcyon.ArgumentError) as rust:
        halcyon.Backend("cudda")
    names = [str(x).split("valid names are ")[1] for x in (rust.value, e)]
    assert names[0].replace(", noop", "") == names[1]
    for name in names[1].split(", "):
        assert BackendType.from_string(f" {name.upper()} ") is BackendType(name)


def test_s0_08_settings_are_the_backends_own(machine, gpu):
    def state():
        torch.backends.cudnn.benchmark = False
        torch.set_float32_matmul_precision("highest")

    state()
    machine(cuda=gpu())
    c = ht.configure_torch_backend("cuda", torch.device("cuda"), verbose=False)
    assert torch.backends.cudnn.benchmark and torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == c.matmul_precision == "high"
    assert (c.tf32, c.cudnn_benchmark, c.backend) == (True, True, BackendType.CUDA)

    state()
    machine(rocm=gpu())
    c = ht.configure_torch_backend("auto", "cuda", verbose=False)
    assert not torch.backends.cudnn.benchmark and not torch.backends.cudnn.allow_tf32
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.get_float32_matmul_precision() == c.matmul_precision == "high"
    assert (c.tf32, c.cudnn_benchmark, c.backend) == (False, None, BackendType.ROCM)

    state()
    machine(cuda=gpu(capability=(7, 5)))
    assert not ht.configure_backend("cuda", "cuda:0", verbose=False).tf32, "the device has no TF32"

    state()
    machine()
    c = ht.configure_torch_backend("cpu", "cpu", verbose=False)
    assert torch.get_float32_matmul_precision() == c.matmul_precision == "highest"
    assert not torch.backends.cudnn.benchmark and not c.tf32

    state()
    machine(mps=True)
    monkey = {"recommended_max_memory": 1 << 34, "current_allocated_memory": 0, "driver_allocated_memory": 0}
    with pytest.MonkeyPatch.context() as m:
        for name, value in monkey.items():
            m.setattr(torch.mps, name, lambda value=value: value)
        c = ht.configure_torch_backend("mps", "mps", verbose=False)
    assert torch.get_float32_matmul_precision() == c.matmul_precision == "high"


def test_s0_08_another_backend_than_the_devices(machine, gpu):
    machine(cuda=gpu())
    e = error(ht.configure_torch_backend, "cpu", torch.device("cuda"))
    assert e.kind is BackendErrorKind.MISMATCH and 'Use "cuda"' in str(e)
    machine(rocm=gpu())
    assert 'Use "rocm"' in str(error(ht.configure_torch_backend, "cuda", torch.device("cuda")))
    machine()
    assert error(ht.configure_torch_backend, "auto", "cuda").kind is BackendErrorKind.MISSING_RUNTIME
    assert error(ht.configure_torch_backend, "auto", "meta").kind is BackendErrorKind.UNSUPPORTED


def test_s0_08_verbose_prints_what_it_is(machine, gpu, capsys):
    machine(cuda=gpu())
    c = ht.configure_torch_backend("nvidia", torch.device("cuda"))
    printed = capsys.readouterr().out
    assert printed == f"{c}\n"
    lines = dict(line.split(":", 1) for line in printed.splitlines())
    lines = {k: v.strip() for k, v in lines.items()}
    assert lines["backend requested"] == "nvidia" and lines["backend resolved"] == "cuda (cuda)"
    assert (lines["torch"], lines["halcyon"]) == (torch.__version__, halcyon.__version__)
    assert (lines["CUDA"], lines["cuDNN"]) == (str(torch.version.cuda), str(torch.backends.cudnn.version()))
    assert (lines["device"], lines["capability"]) == ("Pretended GPU 0", "9.0")
    assert lines["memory total"] == "85.90 GB" and lines["memory reserved"] == "1.07 GB"
    assert (lines["TF32"], lines["cuDNN benchmark"], lines["matmul precision"]) == ("on", "on", "high")
    machine()
    ht.configure_torch_backend("auto", "cpu", verbose=False)
    assert capsys.readouterr().out == ""
    ht.configure_torch_backend("auto", "cpu")
    printed = capsys.readouterr().out
    assert "backend resolved:  cpu (cpu)" in printed and "TF32:              off" in printed
    assert "HIP" not in printed and "cuDNN" not in printed
    machine(rocm=gpu())
    ht.configure_torch_backend("auto", "cuda")
    assert "HIP:               7.0" in capsys.readouterr().out


def test_s0_08_mixed_precision_by_device():
    assert ht.resolve_amp_config(torch.device("cpu")) == {
        "enabled": False,
        "dtype": None,
        "use_grad_scaler": False,
    }
    cuda = {"enabled": True, "dtype": torch.float16, "use_grad_scaler": True}
    assert ht.resolve_amp_config(torch.device("cuda", 1)) == cuda
    assert ht.resolve_amp_config("mps") == {**cuda, "use_grad_scaler": False}


def test_s0_08_the_policy_trains_a_model():
    """The dictionary is what `torch.autocast` and `torch.amp.GradScaler` take."""
    policy = ht.resolve_amp_config("cpu")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", enabled=policy["use_grad_scaler"])
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=policy["dtype"], enabled=policy["enabled"]):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, losses


@pytest.mark.parametrize(
    ("available", "want"),
    [
        ([CPU, CORE, ROCM, CUDA], [CUDA, CPU]),
        (["AzureExecutionProvider", CPU, CORE, ROCM], [ROCM, CPU]),
        ([CPU, GRAPHX, CORE], [GRAPHX, CPU]),
        ([GRAPHX, ROCM], [ROCM, CPU]),
        ([CPU, CORE], [CORE, CPU]),
        (["AzureExecutionProvider", CPU], [CPU]),
        ([], [CPU]),
    ],
)
def test_s0_08_auto_providers_of_onnx_runtime(available, want):
    assert ht.resolve_ort_providers("auto", available) == want


def test_s0_08_providers_of_onnx_runtime():
    every = [CPU, CORE, ROCM, CUDA]
    for name, want in {"nvidia": [CUDA, CPU], "HIP": [ROCM, CPU], "mps": [CORE, CPU], "host": [CPU]}.items():
        assert ht.resolve_ort_providers(name, every) == want
    assert ht.resolve_ort_providers("cpu", iter([])) == [CPU]
    e = error(ht.resolve_ort_providers, "metal", [CUDA, CPU])
    assert e.kind is BackendErrorKind.UNAVAILABLE_PROVIDER
    for part in (CORE, f"has only {CUDA}, {CPU}", "Install a build"):
        assert part in str(e)
    for asked, there, other in (("cuda", ROCM, "rocm"), ("rocm", CUDA, "cuda"), ("cuda", GRAPHX, "rocm")):
        e = error(ht.resolve_ort_providers, asked, [there, CPU])
        assert e.kind is BackendErrorKind.MISMATCH and f'Use "{other}"' in str(e)
    assert error(ht.resolve_ort_providers, "cuda", []).kind is BackendErrorKind.UNAVAILABLE_PROVIDER
    assert error(ht.resolve_ort_providers, "webgpu", every).kind is BackendErrorKind.UNSUPPORTED
    assert error(ht.resolve_ort_providers, "cudda", every).kind is BackendErrorKind.UNKNOWN_VALUE


def test_s0_08_providers_that_the_installed_onnx_runtime_takes():
    ort = pytest.importorskip("onnxruntime")
    helper = pytest.importorskip("onnx.helper")
    providers = ht.resolve_ort_providers("auto", ort.get_available_providers())
    x, y = (helper.make_tensor_value_info(n, 1, [2]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=providers)
    assert session.get_providers() == providers


def test_s0_08_the_documents_example(capsys):
    """Own wording of the document's example, for machines without the document."""
    try:
        device = ht.resolve_torch_device("auto")
    except ht.BackendError as exc:
        raise SystemExit(f"no such backend: {exc}") from exc
    ht.configure_torch_backend("auto", device, verbose=True)
    amp_config = ht.resolve_amp_config(device)
    assert "backend requested: auto" in capsys.readouterr().out
    assert amp_config["enabled"] == (device.type != "cpu")


def test_s0_08_the_document_runs_as_printed(capsys):
    (block,) = documents.blocks("# Backend Library README")
    names = {}
    assert not documents.run(block, names)
    assert names["device"] == ht.resolve_torch_device("auto")
    assert names["amp_config"] == ht.resolve_amp_config(names["device"])
    assert "backend requested: auto" in capsys.readouterr().out
