"""Tensors of PyTorch as inputs and outputs of sessions."""

from __future__ import annotations

from pathlib import Path

import halcyon.onnxruntime as ort
import numpy as np
import pytest

torch = pytest.importorskip("torch")
MODELS = Path(__file__).parents[1] / "models"
CPU = ["CPUExecutionProvider"]


def test_tensors_are_inputs() -> None:
    s = ort.InferenceSession(MODELS / "add.onnx", providers=CPU)
    x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    want = (x.numpy() + np.array([1, 2, 3], np.float32)).tolist()
    for value in (x, x.t().contiguous().t(), x.clone().requires_grad_().detach()):
        assert s.run(None, {"x": value})[0].tolist() == want
    big = torch.ones(50_000, 3)
    assert s.run(None, {"x": big})[0][-1].tolist() == [2, 3, 4]
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="from_dlpack"):
        s.run(None, {"x": x.clone().requires_grad_()})
    with pytest.raises(ort.capi.onnxruntime_pybind11_state.InvalidArgument, match="f64"):
        s.run(None, {"x": x.double()})


def test_values_share_the_memory_of_tensors() -> None:
    x = torch.zeros(2, 3)
    v = ort.OrtValue.from_dlpack(x)
    assert v.data_ptr() == x.data_ptr() and v.shape() == [2, 3]
    x[0, 0] = 5
    assert v.numpy()[0, 0] == 5
    back = torch.from_dlpack(v)
    assert back.data_ptr() == x.data_ptr()
    assert torch.utils.dlpack.from_dlpack(v._ortvalue.to_dlpack()).data_ptr() == x.data_ptr()
    flags = ort.OrtValue.from_dlpack(torch.tensor([True, False]))
    assert flags.data_type() == "tensor(bool)"


def test_bfloat16() -> None:
    s = ort.InferenceSession(MODELS / "uncasts.onnx", providers=CPU)
    x = torch.tensor([1.0, -2.5], dtype=torch.bfloat16)
    feed = {a.name: np.zeros(2, np.uint16 if "bfloat16" in a.type else np.uint8) for a in s.get_inputs()}
    assert s.run(["bfloat16_out"], {**feed, "bfloat16": x})[0].tolist() == [1, -2.5]
    v = ort.OrtValue.from_dlpack(x)
    assert v.data_type() == "tensor(bfloat16)"
    assert torch.from_dlpack(v).tolist() == [1, -2.5]
