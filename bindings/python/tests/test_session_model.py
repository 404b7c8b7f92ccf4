"""``halcyon.load`` and ``halcyon.fit`` with ONNX models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import halcyon
import numpy as np
import pytest
from halcyon.session import exceptions

MODELS = Path(__file__).parent / "models"


def load(name: str, **options: Any) -> Any:
    return halcyon.load(MODELS / f"{name}.onnx", "cpu", **options)


def test_a_model_is_called_in_three_ways() -> None:
    x = np.ones((2, 3), np.float32)
    m = load("add")
    assert isinstance(m, halcyon.Model) and m.backend.kind == "cpu"
    assert list(m.inputs) == ["x"] and m.inputs["x"].shape == ["N", 3] and list(m.outputs) == ["y"]
    for made in (m(x), m(x=x), m.run(x=x)["y"], m.run({"x": x})["y"]):
        assert made.tolist() == [[2, 3, 4]] * 2
    assert m.run({"x": x}, w=np.zeros(3, np.float32))["y"].tolist() == [[1, 1, 1]] * 2
    probabilities, logits = load("mlp")(np.zeros((1, 16), np.float32))
    assert probabilities.shape == logits.shape == (1, 4)
    with pytest.raises(ValueError, match="twice"):
        m.run({"x": x}, x=x)
    with pytest.raises(ValueError, match="takes 1 inputs"):
        m(x, x)
    with pytest.raises(exceptions.InvalidArgument, match="missing"):
        m.run()
    assert m.metadata["domain"] == "tests.halcyon" and ("", 21) in m.metadata["opsets"]
    assert m.session.get_inputs()[0].name == "x"


def test_options_of_loading() -> None:
    assert load("add", level="O0").session._native.backend.level == "O0"
    m = load("add", sizes={"N": 4})
    assert m.inputs["x"].shape == [4, 3]
    contents = (MODELS / "add.onnx").read_bytes()
    assert halcyon.load(contents, "cpu")(np.zeros((1, 3), np.float32)).tolist() == [[1, 2, 3]]
    with pytest.raises(ValueError, match="context"):
        load("add", context=4)
    with pytest.raises(ValueError, match="level"):
        halcyon.load(MODELS, "cpu", level="O1")
    with pytest.raises(exceptions.NoSuchFile):
        halcyon.load("nothing.onnx")
    with pytest.raises(halcyon.UnsupportedError, match="memory"):
        halcyon.load(b"GGUF1234")


def test_how_a_model_is_shown() -> None:
    m = load("conv")
    text = repr(m)
    assert (
        "3 nodes" in text and "image" in text and "tensor(float)" in text and "[n, 3, height, width]" in text
    )
    html = m._repr_html_()
    assert html.startswith("<table>") and html.count("<tr>") == 4 and "pooled" in html


def test_the_memory_of_a_model() -> None:
    m = load("conv")
    small = m.fit({"image": (1, 3, 32, 32)}, "cpu")
    large = halcyon.fit(m, {"image": (8, 3, 256, 256)}, "cpu")
    assert small.fits and small["cpu"].fits is True and len(small) == 1
    one, many = small[0], large["cpu:0"]
    assert one.needed < many.needed <= many.free
    assert many.parts["inputs"] >= 8 * 3 * 256 * 256 * 4
    assert sum(n for k, n in many.parts.items() if k != "weights read in place") == many.needed
    assert "yes" in repr(large) and "<table>" in large._repr_html_()
    assert large.to_dict()["cpu:0"]["needed"] == many.needed
    # The figures are those of a run.
    backend = halcyon.Backend("cpu", threads=1)
    s = halcyon.InferenceSession._on(MODELS / "conv.onnx", backend, None, {})
    s.run(["pooled"], {"image": np.zeros((8, 3, 256, 256), np.float32)})
    peak = backend.memory()["peak_allocated"]
    # The input is not copied, because its memory is shared.
    want = many.needed - many.parts["inputs"]
    assert 0.95 * want < peak < 1.05 * want


def test_a_model_that_does_not_fit() -> None:
    limited = halcyon.Backend("cpu", memory_limit=1 << 20)
    report = halcyon.fit(MODELS / "conv.onnx", {"image": (64, 3, 256, 256)}, limited)
    assert report.fits is False and report[0].fits is False and report[0].needed > 1 << 20
    assert "no" in repr(report)


def test_every_device_is_reported() -> None:
    report = halcyon.fit(MODELS / "mlp.onnx")
    assert "cpu:0" in [d.device for d in report]
    # Open sizes count as 1.
    assert report["cpu"].needed == halcyon.fit(MODELS / "mlp.onnx", {"x": (1, 16)}, "cpu")[0].needed
    with pytest.raises(KeyError):
        report["nothing"]


def test_errors_of_fit() -> None:
    with pytest.raises(ValueError, match="nothing"):
        halcyon.fit(MODELS / "mlp.onnx", {"nothing": (1,)}, "cpu")
    with pytest.raises(ValueError, match="batch"):
        halcyon.fit(MODELS / "mlp.onnx", backend="cpu", batch=2)
    with pytest.raises(TypeError, match="int"):
        halcyon.fit(3)  # type: ignore[arg-type]
    report = halcyon.fit(MODELS / "count.onnx", backend="cpu")
    assert report[0].fits is None and "one graph" in report[0].error
    report = halcyon.fit(MODELS / "branches.onnx", {"x": (2,), "size": np.array([5])}, "cpu")
    assert report[0].fits is True


def test_language_models_are_loaded_and_measured() -> None:
    path = MODELS.parents[3] / "crates/halcyon-models/tests/data/gguf/gpt2.gguf"
    m = halcyon.load(path, "cpu", context=32)
    assert type(m) is halcyon.LanguageModel
    report = halcyon.fit(path, backend="cpu", context=32)
    assert report[0].fits is True and report[0].parts["cache"] > 0
    assert report[0].to_dict()["report"]["context"] == 32
    assert halcyon.fit(path, backend="cpu", context=32, batch=4)[0].needed > report[0].needed
    with pytest.raises(ValueError, match="context"):
        halcyon.fit(path, {"x": (1,)}, "cpu")
    with pytest.raises(halcyon.HalcyonError, match=r"nothing\.gguf"):
        halcyon.fit("nothing.gguf", backend="cpu")
