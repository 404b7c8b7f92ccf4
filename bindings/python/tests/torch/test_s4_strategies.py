"""Row S4.11 of the contract (docs/compat.md): measured strategies, and what is refused by name."""

import halcyon
import pytest
import torch
from halcyon import torch as ht
from halcyon.torch import OptimizationLevel, _strategies
from halcyon.torch import _optimizations as opts
from torch import nn


def test_s4_11_strategies_are_measured_once_per_device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HALCYON_CACHE", raising=False)
    monkeypatch.setattr(_strategies, "_known", {})
    optimizer = ht.get_optimizer("cpu")
    # One compiler is enough here, and a quick one.
    optimizer.backend.config.compile_backend = "aot_eager"
    found = {s.name: s for s in optimizer.get_available_strategies()}
    assert set(found) == {o.name for o in opts.OPTIMIZATIONS} | {"fused-optimizer"}
    for s in found.values():
        assert s.description and s.applicable_levels[-1] is OptimizationLevel.O3
        assert s.speedup_estimate is None or s.speedup_estimate > 0
    measured = {n for n, s in found.items() if s.speedup_estimate is not None}
    assert {"channels-last", "conv-bn-fusion", "autocast", "torch.compile", "fused-optimizer"} <= measured
    assert found["float8"].speedup_estimate is None, "the CPU has no 8-bit floats"
    assert found["activation-checkpointing"].applicable_levels == [OptimizationLevel.O2, OptimizationLevel.O3]
    # Another process reads them: nothing is measured again.
    monkeypatch.setattr(_strategies, "_known", {})
    monkeypatch.setattr(_strategies, "_measure", lambda backend: pytest.fail("measured again"))
    again = optimizer.get_available_strategies()
    assert {s.name: s for s in again} == found
    (file,) = (tmp_path / "halcyon" / "torch-gains").iterdir()
    # A damaged file is measured again, and the setting `off` keeps nothing.
    file.write_text("{")
    monkeypatch.setattr(_strategies, "_known", {})
    monkeypatch.setattr(_strategies, "_measure", lambda backend: {"int8": 2.0})
    gains = {s.name: s.speedup_estimate for s in optimizer.get_available_strategies()}
    assert gains["int8"] == 2.0 and gains["autocast"] is None
    monkeypatch.setenv("HALCYON_CACHE", "off")
    assert _strategies._cache_directory() is None


def test_s4_11_models_that_cannot_be_prepared_say_why():
    backend = ht.CPUBackend()
    with pytest.raises(halcyon.ArgumentError, match="the model is a function"):
        backend.prepare_model(lambda x: x)
    for call in (backend.optimize_for_inference, backend.optimize_for_training):
        with pytest.raises(halcyon.ArgumentError, match="the model is a int"):
            call(3)
    with pytest.raises(halcyon.UnsupportedError, match=r"torch\.compile returned"):
        backend.prepare_model(torch.compile(nn.Linear(1, 1), backend="eager"))

    class NoCopy(nn.Linear):
        def __deepcopy__(self, memo):
            raise RuntimeError("only one of me")

    with pytest.raises(halcyon.UnsupportedError, match="cannot be copied: RuntimeError: only one of me"):
        backend.optimize_for_inference(NoCopy(1, 1))


def test_s4_11_arguments_of_other_types_are_named():
    with pytest.raises(halcyon.ArgumentError, match="a str; pass one of get_backend"):
        ht.Optimizer("cpu")
    with pytest.raises(halcyon.ArgumentError, match="not optimised"):
        ht.optimization_result(3)
    with pytest.raises(halcyon.ArgumentError, match="'nope' is no device of PyTorch"):
        ht.resolve_amp_config("nope")
    with pytest.raises(halcyon.ArgumentError, match="config is a int"):
        ht.CPUBackend(3)
