"""Row S4.11 of the contract (docs/compat.md): what is done to models, each change checked and measured."""

import copy
import dataclasses
import json
import pickle
import warnings

import halcyon
import pytest
import torch
from halcyon import torch as ht
from halcyon.torch import (
    BackendConfig,
    OptimizationLevel,
    OptimizationWarning,
    _pipeline,
    _prepared,
)
from halcyon.torch import _optimizations as opts
from halcyon.torch._check import Sample, saved_bytes
from halcyon.torch._fold import foldable
from halcyon.torch._low_precision import Float8Linear, Int8Linear
from torch import nn

KEEP = BackendConfig(keep_slower=True, level="O1")


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(32, 4))


def cnn():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    net(torch.randn(8, 3, 8, 8))  # running statistics that are not those of the start
    return net


def inference(model, x, config=KEEP, **options):
    """The optimised model and its result, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        made = ht.CPUBackend(config).optimize_for_inference(model, x, **options)
    return made, ht.optimization_result(made)


def training(model, x=None, optimizer=None, config=KEEP, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OptimizationWarning)
        made = ht.CPUBackend(config).optimize_for_training(model, optimizer, sample_input=x, **options)
    return ht.optimization_result(model), made


def reasons(result, name):
    return [w for w in result.warnings if w.startswith(f"{name}:")]


def test_s4_11_inference_gives_a_checked_copy():
    model, x = cnn(), torch.randn(4, 3, 8, 8)
    weight = model[0].weight.clone()
    made, result = inference(model, x)
    assert result.success and result.level is OptimizationLevel.O1
    assert result.optimizations_applied == ["inference-mode", "conv-bn-fusion", "channels-last"]
    assert [r.name for r in result.receipts] == result.optimizations_applied
    for receipt in result.receipts:
        assert receipt.gain > 0 and 0 < receipt.gain_interval[0] <= receipt.gain_interval[1]
        assert receipt.difference <= receipt.bound == 1e-4
    # The model itself is as before, in training, and the copy evaluates.
    assert model.training and torch.equal(model[0].weight, weight) and type(model) is nn.Sequential
    want = model.eval()(x)
    got = made(x)
    assert got.is_inference() and not made.training and torch.allclose(got, want, atol=1e-6)
    m = result.metrics
    assert (
        m["speedup"] == pytest.approx(m["time_before_ms"] / m["time_after_ms"])
        and len(m["speedup_interval"]) == 2
    )
    assert m["error"] == max(o["relative"] for o in m["outputs"]) <= 1e-4
    assert m["memory_before_bytes"] is None, "PyTorch does not count memory on the CPU"


def test_s4_11_results_are_serialisable_and_readable():
    optimizer = ht.get_optimizer("cpu")
    assert isinstance(optimizer, ht.CPUOptimizer) and isinstance(optimizer, ht.BaseOptimizer)
    model, result = optimizer.optimize(mlp(), level=OptimizationLevel.O1, sample_input=torch.ones(2, 32))
    fields = json.loads(json.dumps(result.to_dict()))
    assert fields["level"] == "O1" and fields["success"] is True and fields["model"].endswith("Sequential")
    assert fields["optimizations_applied"] == result.optimizations_applied
    assert fields["receipts"][0]["name"] == result.optimizations_applied[0]
    assert "level    O1: optimised" in str(result) and "receipt  inference-mode" in str(result)
    assert result.model is model is ht.optimization_result(model).model
    with pytest.raises(halcyon.ArgumentError, match="was not optimised"):
        ht.optimization_result(nn.Linear(1, 1))


def test_s4_11_level_o0_only_moves_the_model():
    model = mlp()
    for made in (
        ht.CPUBackend().prepare_model(model, "none"),
        ht.CPUBackend().optimize_for_training(model, sample_input=torch.ones(2, 32)),
    ):
        assert made is model and type(made) is nn.Sequential
        result = ht.optimization_result(made)
        assert (result.optimizations_applied, result.warnings, result.receipts) == ([], [], [])
        assert result.level is OptimizationLevel.O0, "training has the level of prepare_model"


def test_s4_11_what_the_level_does_not_include_is_reported():
    options = {"compile_backend": "eager", "activation_checkpointing": True, "amp_dtype": torch.bfloat16}
    x = torch.randn(2, 32)
    for level, names in (
        ("O0", ["autocast", "activation-checkpointing", "torch.compile"]),
        ("O1", ["activation-checkpointing", "torch.compile"]),
        ("O2", []),
    ):
        result, _ = training(mlp(), x, config=BackendConfig(level=level, max_error=0.5, **options))
        reported = [w.split(":")[0] for w in result.warnings if "or higher" in w]
        assert reported == names, str(result)


def test_s4_11_without_a_sample_only_what_needs_no_check():
    backend = ht.CPUBackend(BackendConfig(level="O3"))
    with pytest.warns(OptimizationWarning) as found:
        made = backend.optimize_for_inference(cnn())
    (warning,) = found
    assert warning.filename == __file__, "the warning is at the caller's line"
    for name in ("conv-bn-fusion", "channels-last", "torch.compile", "int8"):
        assert name in str(warning.message)
    assert "there is no sample_input to check it on" in str(warning.message)
    result = ht.optimization_result(made)
    assert result.optimizations_applied == ["inference-mode"] and result.metrics == {} and result.success
    assert result.receipts[0].gain is None and "not checked" in str(result.receipts[0])


def test_s4_11_a_prepared_model_keeps_its_level_and_settings():
    backend = ht.CPUBackend(BackendConfig(keep_slower=True))
    model, x = cnn().eval(), torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = backend.prepare_model(model, "O1", sample_input=x)
        assert prepared is model and isinstance(prepared, nn.Sequential)
        assert ht.optimization_result(prepared).optimizations_applied == ["channels-last"]
        assert prepared[0].weight.is_contiguous(memory_format=torch.channels_last)
        made = backend.optimize_for_inference(prepared)
    assert ht.optimization_result(made).level is OptimizationLevel.O1
    assert _prepared.settings_of(made).channels_last, "it was checked when the model was prepared"
    receipts = {r.name: r for r in ht.optimization_result(made).receipts}
    assert receipts["channels-last"] == ht.optimization_result(prepared).receipts[0]
    assert _prepared.settings_of(made).inference and not _prepared.settings_of(prepared).inference


# ---- Checks -------------------------------------------------------------------------------------------


def planted(monkeypatch, change):
    """Puts an optimisation in place of all others. `change` gets the copied module."""

    def propose(task, variant):
        new = variant.copied()
        change(new.module)
        return [opts.Proposal(new, "planted")]

    what = opts.Optimization("planted", "", OptimizationLevel.O1, frozenset(opts.Purpose), propose)
    monkeypatch.setattr(_pipeline, "OPTIMIZATIONS", (what,))


def test_s4_11_a_wrong_result_is_refused(monkeypatch):
    def change(by):
        def apply(module):
            with torch.no_grad():
                module[2].weight *= 1 + by

        return apply

    x = torch.randn(4, 32)
    for by, kept in ((1e-2, False), (1e-3, False), (1e-6, True)):
        planted(monkeypatch, change(by))
        model = mlp().eval()
        made, result = inference(model, x)
        assert (result.optimizations_applied == ["planted"]) is kept, (by, result)
        if not kept:
            assert torch.equal(made(x), model(x)), "the model is the unmodified one"
            (reason,) = reasons(result, "planted")
            assert "the difference of outputs is" in reason and "the bound is 1.0e-04" in reason


def test_s4_11_shapes_and_finite_values_must_agree(monkeypatch):
    x = torch.randn(4, 32)
    for change in (
        lambda m: m.__setitem__(2, nn.Linear(32, 5)),
        lambda m: m[2].bias.data.__setitem__(0, float("nan")),
    ):
        planted(monkeypatch, change)
        _, result = inference(mlp(), x)
        (reason,) = reasons(result, "planted")
        assert not result.optimizations_applied and "other shapes or dtypes, or finite values" in reason


def test_s4_11_what_raises_is_skipped_with_the_reason(monkeypatch):
    planted(monkeypatch, lambda m: m.__setitem__(1, nn.Linear(7, 7)))
    model, x = mlp().eval(), torch.randn(4, 32)
    made, result = inference(model, x)
    (reason,) = reasons(result, "planted")
    assert "RuntimeError: " in reason and torch.equal(made(x), model(x))


def test_s4_11_what_is_slower_is_skipped_unless_asked_for(monkeypatch):
    class Slow(nn.Linear):
        def forward(self, x):
            for _ in range(200):
                y = super().forward(x)
            return y

    def change(module):
        module[2].__class__ = Slow

    planted(monkeypatch, change)
    x = torch.randn(4, 32)
    _, result = inference(mlp(), x, BackendConfig(level="O1"))
    (reason,) = reasons(result, "planted")
    assert not result.optimizations_applied and "it is slower on the sample, 0." in reason
    _, result = inference(mlp(), x, BackendConfig(level="O1", keep_slower=True))
    assert result.optimizations_applied == ["planted"] and result.receipts[0].gain < 0.5
    assert result.metrics["speedup"] < 0.5


def test_s4_11_gradients_are_checked_too(monkeypatch):
    class Wrong(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y.detach() + 1.1 * (y - y.detach())  # right values, wrong gradients

    planted(monkeypatch, lambda m: setattr(m[2], "__class__", Wrong))
    result, _ = training(mlp(), torch.randn(4, 32))
    (reason,) = reasons(result, "planted")
    assert "the difference of gradients is" in reason and not result.optimizations_applied


def test_s4_11_checking_leaves_no_traces():
    """Buffers, gradients, modes and random numbers are as they were before the checks."""
    model = nn.Sequential(cnn(), nn.Dropout(0.5), nn.Linear(8, 2))
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    result, made = training(model, torch.randn(4, 3, 8, 8))
    state = torch.rand(3)
    torch.manual_seed(5)
    torch.randn(4, 3, 8, 8)
    assert torch.equal(state, torch.rand(3)) and not torch.equal(state, want)
    for name, value in made.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in made.parameters()) and all(m.training for m in made.modules())
    assert "channels-last" in result.optimizations_applied, "dropout layers do not stand in the way"


def test_s4_11_a_model_without_steady_results_is_left_alone():
    class Unsteady(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls = nn.Linear(4, 4), 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x) + self.calls

    made, result = inference(Unsteady(), torch.ones(2, 4))
    assert not result.success and type(made) is Unsteady
    assert "results differ between two runs" in result.warnings[0]


def test_s4_11_samples_of_several_kinds():
    class Two(nn.Module):
        def forward(self, a, b, scale=1.0):
            return {"sum": a + b, "parts": (a * scale, b)}

    a, b = torch.ones(2), torch.arange(2.0)
    for sample in ((a, b), [a, b], {"a": a, "b": b, "scale": 3.0}):
        made, result = inference(Two(), sample)
        assert len(result.metrics["outputs"]) == 3 and made(a, b)["sum"].tolist() == [1.0, 2.0]
    with pytest.raises(halcyon.ArgumentError, match="sample_input is a str"):
        inference(Two(), "ab")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        inference(Two(), a)


def test_s4_11_outputs_in_dataclasses_are_checked(monkeypatch):
    @dataclasses.dataclass
    class Out:
        logits: torch.Tensor
        extra: object = None

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return Out(self.net(x), object())

    def double(module):
        with torch.no_grad():
            module.net[2].weight *= 2

    planted(monkeypatch, double)
    _, result = inference(Wrapped(), torch.randn(2, 32))
    assert "the difference of outputs is" in reasons(result, "planted")[0]

    class Nothing(nn.Module):
        def forward(self, x):
            return object()

    _, result = inference(Nothing(), torch.ones(2))
    assert not result.success and "contain no tensor" in result.warnings[0]


def test_s4_11_traced_modules_have_their_own_way_of_being_copied():
    traced, x = torch.fx.symbolic_trace(cnn()), torch.randn(2, 3, 8, 8)
    made, result = inference(traced, x)
    assert result.optimizations_applied == ["inference-mode", "conv-bn-fusion", "channels-last"]
    assert torch.allclose(made(x), cnn().eval()(x), atol=1e-6)


# ---- The optimisations --------------------------------------------------------------------------------


def test_s4_11_batch_norms_are_folded_where_it_is_right():
    made, result = inference(cnn(), torch.randn(2, 3, 8, 8))
    assert isinstance(made[1], nn.Identity) and "1 batch norm folded" in str(result)

    class Shared(nn.Module):
        def __init__(self, twice):
            super().__init__()
            self.conv, self.norm, self.twice = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), twice

        def forward(self, x):
            y = self.norm(self.conv(x))
            return y + self.conv(x) if self.twice else y

    assert foldable(Shared(False)) == [("conv", "norm")]
    assert foldable(Shared(True)) == [], "the convolution's own result is used too"

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.seen = cnn(), None

        def forward(self, x):
            self.seen = x
            return self.net(x) if x.sum() > 0 else self.net(-x)

    model = Branches()
    assert foldable(model) == [("net.0", "net.1")], "neighbours, because values decide how it goes on"
    assert model.seen is None, "tracing leaves nothing in the model"
    hooked = cnn()
    hooked[0].register_forward_hook(lambda *_: None)
    assert foldable(hooked) == []
    _, result = inference(mlp(), torch.ones(2, 32))
    assert "no batch norm directly after" in reasons(result, "conv-bn-fusion")[0]
    line = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made, result = inference(line, torch.randn(3, 4))
    assert isinstance(made[1], nn.Identity)


def test_s4_11_channels_last():
    model, x = cnn(), torch.randn(2, 3, 8, 8)
    seen = []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(args[0].stride()))
    result, made = training(model, x)
    assert result.optimizations_applied == ["channels-last"]
    assert made[0].weight.is_contiguous(memory_format=torch.channels_last)
    made(x)
    assert seen[-1] == (192, 1, 24, 3) and x.is_contiguous(), "the input is converted, a copy of it"
    _, result = inference(mlp(), torch.ones(2, 32))
    assert "no convolution over images" in reasons(result, "channels-last")[0]


def test_s4_11_mixed_precision_is_asked_for_on_the_cpu():
    x = torch.randn(16, 32)
    _, result = inference(mlp(), x)
    assert "the policy of CPU is float32" in reasons(result, "autocast")[0]
    model = mlp().eval()
    loose = BackendConfig(level="O2", keep_slower=True, compile_backend="eager")
    made, result = inference(model, x, loose, dtype=torch.bfloat16)
    receipt = next(r for r in result.receipts if r.name == "autocast")
    assert receipt.detail == "bfloat16" and 1e-5 < receipt.difference < receipt.bound == 5e-2
    got = made(x)
    assert got.dtype == torch.float32 and not torch.equal(got, model(x)), "outputs keep their type"
    assert made[2].weight.dtype == torch.float32
    # The same by the configuration; float32 switches it off.
    _, result = inference(mlp(), x, BackendConfig(level="O1", amp_dtype=torch.bfloat16, max_error=0.1))
    assert "autocast" in result.optimizations_applied
    _, result = inference(mlp(), x, BackendConfig(level="O1", amp_dtype=torch.bfloat16), dtype=torch.float32)
    assert "autocast" not in result.optimizations_applied and not reasons(result, "autocast")


def test_s4_11_mixed_precision_obeys_the_callers_bound():
    x = torch.randn(16, 32)
    tight = BackendConfig(level="O2", keep_slower=True, max_error=1e-6, compile_backend="eager")
    made, result = inference(mlp(), x, tight, dtype=torch.bfloat16)
    assert "the bound is 1.0e-06" in reasons(result, "autocast")[0]
    assert torch.allclose(made(x), mlp().eval()(x), atol=1e-6)
    with pytest.raises(halcyon.ArgumentError, match="needs level O1 or higher"):
        inference(mlp(), x, BackendConfig(level="O0"), dtype=torch.bfloat16)
    for bad in (torch.float64, torch.int8):
        with pytest.raises(halcyon.ArgumentError, match=r"use torch\.float32"):
            inference(mlp(), x, dtype=bad)
    # Without a sample, what the caller asks for is done, and reported as not checked.
    made, result = inference(mlp(), None, dtype=torch.bfloat16)
    assert "autocast" in result.optimizations_applied
    assert "but not checked" in reasons(result, "autocast")[0]


def test_s4_11_the_policy_of_gpus(machine, gpu):
    x = torch.randn(16, 32)
    loose = BackendConfig(level="O1", keep_slower=True, max_error=0.2)

    def applied(purpose, **options):
        backend = ht.NVIDIABackend(loose)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = getattr(backend, f"optimize_for_{purpose}")
            result = ht.optimization_result(call(mlp(), sample_input=x, **options))
        return next((r.detail for r in result.receipts if r.name == "autocast"), None), result

    machine(cuda=gpu(), on_cpu=True)
    assert applied("inference")[0] == "float16"
    assert applied("training")[0] == "bfloat16"
    machine(cuda=gpu(bf16=False), on_cpu=True)
    detail, result = applied("training")
    assert detail is None and "float16 needs a scaled loss" in reasons(result, "autocast")[0]
    detail, result = applied("training", dtype=torch.float16)
    assert detail == "float16" and "GradScaler" in reasons(result, "autocast")[-1]


def test_s4_11_eight_bits_at_o3(machine, gpu):
    x = torch.randn(16, 32)
    o3 = BackendConfig(level="O3", keep_slower=True, compile_backend="eager")
    model = mlp().eval()
    made, result = inference(model, x, o3)
    assert isinstance(made[0].up, Int8Linear) and type(model[0].up) is nn.Linear
    receipt = next(r for r in result.receipts if r.name == "int8")
    assert receipt.detail == "4 linear layers", "the head has 4 outputs, which products of bytes do not take"
    assert 1e-4 < receipt.difference < 5e-2
    assert "does not multiply 8-bit floats" in reasons(result, "float8")[0]
    machine(cuda=gpu(capability=(9, 0)), on_cpu=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = ht.NVIDIABackend(o3).optimize_for_inference(model, x, torch.float32)
    result = ht.optimization_result(made)
    assert isinstance(made[0].up, Float8Linear)
    receipt = next(r for r in result.receipts if r.name == "float8")
    assert receipt.detail == "4 linear layers" and 1e-3 < receipt.difference < 5e-2
    assert "multiplies 8-bit floats" in reasons(result, "int8")[0]
    machine()
    _, result = inference(model, x, BackendConfig(level="O3", max_error=1e-5, compile_backend="eager"))
    assert "the bound is 1.0e-05" in reasons(result, "int8")[0]


@pytest.mark.parametrize("kind", [Int8Linear, Float8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_s4_11_layers_of_eight_bits(kind, dtype):
    torch.manual_seed(3)
    for shape, bias in (((32,), True), ((5, 32), False), ((2, 3, 32), True), ((0, 32), True)):
        linear = nn.Linear(32, 48, bias=bias).to(dtype)
        with torch.no_grad():
            linear.weight[7] *= 20  # an output with large weights
        x = torch.randn(*shape).to(dtype)
        want, got = linear(x).detach().float(), kind(linear)(x)
        assert got.dtype == dtype and got.shape == want.shape and not got.requires_grad
        if want.numel():
            assert (got.float() - want).abs().max() < 0.05 * want.abs().max()
    assert kind.takes(nn.Linear(32, 48)) and not kind.takes(nn.Linear(33, 48))


def test_s4_11_torch_compile_says_which_backend_it_uses():
    x = torch.randn(16, 32)
    names = []

    def count(graph, inputs):
        names.append(len(list(graph.graph.nodes)))
        return graph.forward

    torch._dynamo.register_backend(count, name="halcyon_test_count")
    config = BackendConfig(level="O2", keep_slower=True, compile_backend="halcyon_test_count")
    model = mlp().eval()
    made, result = inference(model, x, config)
    receipt = next(r for r in result.receipts if r.name == "torch.compile")
    assert receipt.detail == "halcyon_test_count, 1 graph" and names, "the backend got the graph"
    before = len(names)
    assert torch.allclose(made(x), model(x), atol=1e-6) and len(names) == before, "compiled once"
    with pytest.raises(halcyon.ArgumentError, match=r"compile_backend: 'nope' is not.*inductor"):
        inference(model, x, BackendConfig(level="O2", compile_backend="nope"))


def test_s4_11_many_models_are_compiled_in_one_process():
    """PyTorch stops to compile a code object after eight versions. Modules share code objects."""
    config = BackendConfig(level="O2", keep_slower=True, compile_backend="eager")
    for width in range(2, 14):
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        _, result = inference(model, torch.ones(2, width), config)
        assert result.receipts[-1].detail == "eager, 1 graph", str(result)

    class Never(nn.Module):
        @torch._dynamo.disable
        def forward(self, x):
            return x + 1

    _, result = inference(Never(), torch.ones(2), config)
    assert "no part of the model could be compiled" in reasons(result, "torch.compile")[0]


def test_s4_11_the_compilers_are_tried_in_order(monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no luck")

    torch._dynamo.register_backend(broken, name="halcyon_test_broken")
    monkeypatch.setattr(opts, "_compile_backends", lambda task: ["halcyon_test_broken", "eager"])
    config = BackendConfig(level="O2", keep_slower=True)
    _, result = inference(mlp(), torch.randn(4, 32), config)
    reason = reasons(result, "torch.compile")[0]
    assert "halcyon_test_broken: " in reason and "no luck" in reason
    assert result.receipts[-1].detail == "eager, 1 graph"
    task = opts.Task(ht.BackendType.CPU, 0, OptimizationLevel.O2, opts.Purpose.INFERENCE, config)
    monkeypatch.undo()
    found = opts._compile_backends(task)
    assert "inductor" in found, "this machine has a C++ compiler"
    monkeypatch.setattr(opts, "_cpp_compiler", lambda: False)
    assert "needs a C++ compiler" in opts._compile_backends(task)[-1].reason


def test_s4_11_a_later_failure_of_the_compiler_falls_back():
    calls = []

    def only_small(graph, inputs):
        calls.append(len(inputs))
        if len(calls) > 1:
            raise ValueError("too many rows")
        return graph.forward

    torch._dynamo.register_backend(only_small, name="halcyon_test_small")
    config = BackendConfig(level="O2", keep_slower=True, compile_backend="halcyon_test_small")
    model = mlp().eval()
    made, result = inference(model, torch.randn(4, 32), config)
    assert "torch.compile" in result.optimizations_applied
    x = torch.randn(5, 32)
    with pytest.warns(OptimizationWarning, match=r"torch\.compile failed.*too many rows") as found:
        got = made(x)
    assert found[0].filename == __file__, "the warning is at the caller's line"
    assert torch.allclose(got, model(x), atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(x)  # it stays uncompiled
    assert _prepared.settings_of(made).inference, "the other settings stay"


def test_s4_11_inductor_compiles_for_inference_and_training():
    x = torch.randn(16, 32)
    config = BackendConfig(level="O2", keep_slower=True, compile_backend="inductor")
    made, result = inference(mlp(), x, config)
    assert result.receipts[-1].detail == "inductor, freezing, 1 graph", str(result)
    assert result.metrics["error"] < 1e-4 and torch.allclose(made(x), mlp().eval()(x), atol=1e-5)
    result, made = training(mlp(), x, config=config)
    receipt = next(r for r in result.receipts if r.name == "torch.compile")
    assert receipt.detail == "inductor, 1 graph" and receipt.gradient_difference < 1e-3


# ---- Training -----------------------------------------------------------------------------------------


def fit(model, optimizer, steps=20):
    torch.manual_seed(1)
    x = torch.randn(64, 32)
    y = x[:, :4].tanh()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_s4_11_training_returns_both_and_trains():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    config = BackendConfig(
        level="O2", keep_slower=True, activation_checkpointing=True, compile_backend="aot_eager"
    )
    result, (made, same) = training(model, torch.randn(8, 32), optimizer, config, dtype=torch.bfloat16)
    want = {"autocast", "activation-checkpointing", "torch.compile", "fused-optimizer"}
    assert set(result.optimizations_applied) == want, str(result)
    assert made is model and same is optimizer and schedule.optimizer is same
    updated = {id(p) for group in same.param_groups for p in group["params"]}
    assert updated == {id(p) for p in made.parameters()}
    before = copy.deepcopy(made.state_dict())
    losses = fit(made, same)
    assert losses[-1] < losses[0] / 2, losses
    assert not torch.equal(made.state_dict()["0.up.weight"], before["0.up.weight"])
    # Without an optimizer, only the model is returned.
    assert isinstance(training(mlp(), torch.randn(8, 32))[1], nn.Module)


def test_s4_11_training_gives_the_same_parameters_as_plain_training():
    plain, model = mlp(), mlp()
    want = fit(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = BackendConfig(level="O2", keep_slower=True, compile_backend="aot_eager")
    _, (made, optimizer) = training(model, torch.randn(8, 32), optimizer, config)
    got = fit(made, optimizer)
    assert got == pytest.approx(want, rel=1e-4)


def test_s4_11_checkpointing_keeps_less_and_computes_the_same():
    x = torch.randn(256, 32)
    config = BackendConfig(level="O2", activation_checkpointing=True, compile_backend="eager")
    result, made = training(mlp(), x, config=config)
    receipt = next(r for r in result.receipts if r.name == "activation-checkpointing")
    assert receipt.detail.startswith("2 blocks; ") and receipt.difference == 0.0
    sample, device = Sample.of(x, torch.device("cpu")), torch.device("cpu")
    plain = mlp()
    kept = [saved_bytes(m, sample, device) for m in (plain, made)]
    assert kept[1] < kept[0] / 3, kept
    made.zero_grad()
    for model in (plain, made):
        model(x).square().sum().backward()
    for a, b in zip(plain.parameters(), made.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-6)
    result, _ = training(nn.Linear(4, 4), torch.ones(2, 4), config=config)
    assert "no list or sequence of blocks" in reasons(result, "activation-checkpointing")[0]
    result, _ = training(mlp(), x, config=BackendConfig(level="O2", compile_backend="eager"))
    assert "activation-checkpointing" not in result.optimizations_applied


def test_s4_11_checkpointing_is_used_if_a_step_does_not_fit():
    class Limited(nn.Module):
        """A model on a device with little memory: its forward may keep only so many bytes."""

        def __init__(self, limit):
            super().__init__()
            self.net, self.limit = mlp(), limit

        def forward(self, x):
            used = 0

            def keep(tensor):
                nonlocal used
                used += tensor.nbytes
                if used > self.limit:
                    raise torch.OutOfMemoryError(f"{used} bytes")
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                return self.net(x)

    x = torch.randn(256, 32)
    config = BackendConfig(level="O2", compile_backend="eager")
    result, made = training(Limited(300_000), x, config=config)
    receipt = result.receipts[0]
    assert receipt.name == "activation-checkpointing" and "does not fit into the memory" in receipt.detail
    made(x).sum().backward()
    with pytest.raises(torch.OutOfMemoryError):
        training(Limited(1000), x, config=config)
    off = BackendConfig(level="O2", activation_checkpointing=False)
    with pytest.raises(torch.OutOfMemoryError):
        training(Limited(300_000), x, config=off)


def test_s4_11_fused_optimizers():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        model = mlp()
        optimizer = kind(model.parameters(), lr=1e-2, weight_decay=1e-3)
        plain = copy.deepcopy(model)
        reference = kind(plain.parameters(), lr=1e-2, weight_decay=1e-3)
        # State from before: it goes on.
        fit(model, optimizer, 2), fit(plain, reference, 2)
        result, (model, optimizer) = training(model, None, optimizer)
        assert result.optimizations_applied[-1] == "fused-optimizer", str(result)
        assert result.receipts[-1].detail == f"{kind.__name__}, 10 parameters"
        assert result.receipts[-1].difference <= 1e-5 and optimizer.param_groups[0]["fused"] is True
        assert fit(model, optimizer, 3) == pytest.approx(fit(plain, reference, 3), rel=1e-4)
        result, _ = training(model, None, optimizer)
        assert "fused already" in reasons(result, "fused-optimizer")[0]
    model = mlp()
    result, _ = training(model, None, torch.optim.RMSprop(model.parameters()))
    assert "no fused RMSprop" in reasons(result, "fused-optimizer")[0]


def test_s4_11_fused_optimizers_follow_the_layout_of_their_parameters():
    """A state from before, or from a file, has the layout from before; fused updates ignore layouts."""

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=False)
            model(x).square().sum().backward()
            optimizer.step()

    x = torch.randn(4, 3, 8, 8)
    model, plain = cnn(), cnn()
    # A bias before a batch norm has only rounding errors as its gradient; the large `eps` keeps them small.
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-2) for m in (model, plain))
    steps(model, optimizer, 2), steps(plain, reference, 2)
    stored = copy.deepcopy(optimizer.state_dict())
    result, (model, optimizer) = training(model, x, optimizer)
    assert {"channels-last", "fused-optimizer"} <= set(result.optimizations_applied)
    steps(model, optimizer, 2), steps(plain, reference, 2)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    # Loading does not copy tensors, so each gets its own.
    for each, fused in ((optimizer, True), (reference, None)):
        state = copy.deepcopy(stored)
        state["param_groups"][0]["fused"] = fused
        each.load_state_dict(state)
    steps(model, optimizer, 2), steps(plain, reference, 2)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert optimizer.state[model[0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_s4_11_an_optimizer_of_another_model_is_an_error():
    with pytest.raises(halcyon.ArgumentError, match="updates none of the model's parameters"):
        training(mlp(), None, torch.optim.SGD(mlp().parameters(), lr=0.1))
    with pytest.raises(halcyon.ArgumentError, match="the optimizer is a float"):
        training(mlp(), None, 0.1)


def test_s4_11_the_optimizer_follows_parameters_that_are_made_anew():
    """Some devices make new parameters when a model moves. PyTorch can be told to do so on the CPU."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fit(model, optimizer, 2)
    momentum = optimizer.state[model[2].weight]["momentum_buffer"].clone()
    old = model[2].weight
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        _, (made, optimizer) = training(model, None, optimizer)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    assert made[2].weight is not old
    assert torch.equal(optimizer.state[made[2].weight]["momentum_buffer"], momentum)
    losses = fit(made, optimizer)
    assert losses[-1] < losses[0]


# ---- Modules stay what they are -----------------------------------------------------------------------


def prepared():
    x = torch.randn(4, 32)
    config = BackendConfig(
        level="O2", keep_slower=True, activation_checkpointing=True, compile_backend="eager"
    )
    _, made = training(mlp(), x, config=config, dtype=torch.bfloat16)
    assert _prepared.settings_of(made).compilation is not None
    return made, x


def test_s4_11_a_prepared_model_is_the_same_module():
    made, x = prepared()
    plain = mlp()
    assert isinstance(made, nn.Sequential) and isinstance(made[0], Block)
    assert list(made.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in made.named_modules()] == [n for n, _ in plain.named_modules()]
    plain.load_state_dict(made.state_dict())
    outer = nn.Sequential(made)
    assert next(iter(outer.state_dict())) == "0.0.up.weight" and outer(x).shape == (4, 4)
    made.eval()
    assert torch.allclose(made(x), plain(x), atol=5e-2)


def test_s4_11_a_prepared_model_can_be_copied_and_stored(tmp_path):
    made, x = prepared()
    torch.save(made, tmp_path / "model.pt")
    for other in (
        copy.deepcopy(made),
        pickle.loads(pickle.dumps(made)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ):
        assert type(other) is type(made) and _prepared.settings_of(other) == _prepared.settings_of(made)
        assert torch.equal(other(x), made(x)) and other[0].up.weight is not made[0].up.weight
        assert other._compiled_call_impl is not None
