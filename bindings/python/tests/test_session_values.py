"""Values on devices (``OrtValue``) and bound inputs and outputs (``IOBinding``)."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import halcyon
import halcyon.onnxruntime as ort
import numpy as np
import pytest
from halcyon.session import _arrays, exceptions

MODELS = Path(__file__).parent / "models"
CPU = ["CPUExecutionProvider"]
BFLOAT16, INT4 = 16, 22


def session(name: str = "mlp") -> ort.InferenceSession:
    return ort.InferenceSession(MODELS / f"{name}.onnx", providers=CPU)


def rows(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((n, 16)).astype(np.float32)


def test_a_value_shares_the_memory_of_its_array() -> None:
    x = rows(2)
    v = ort.OrtValue.ortvalue_from_numpy(x)
    assert v.shape() == [2, 16] and v.data_type() == "tensor(float)" and v.element_type() == 1
    assert v.device_name() == "cpu" and v.tensor_size_in_bytes() == x.nbytes
    assert v.is_tensor() and v.has_value() and not v.is_tensor_sequence() and not v.is_sparse_tensor()
    assert v.data_ptr() == x.ctypes.data and np.shares_memory(v.numpy(), x)
    assert "tensor(float)[2, 16] on cpu" in repr(v)
    v.update_inplace(np.ones((2, 16), np.float32))
    assert (x == 1).all()
    for wrong in (np.ones((3, 16), np.float32), np.ones((2, 16), np.float64)):
        with pytest.raises(RuntimeError, match="update_inplace"):
            v.update_inplace(wrong)
    # A view that is not dense is copied.
    v = ort.OrtValue.ortvalue_from_numpy(x.T)
    assert v.shape() == [16, 2] and not np.shares_memory(v.numpy(), x)


def test_values_of_every_type() -> None:
    assert ort.OrtValue.ortvalue_from_shape_and_type([2, 3], np.int64).data_type() == "tensor(int64)"
    assert ort.OrtValue.ortvalue_from_shape_and_type([0], BFLOAT16).data_type() == "tensor(bfloat16)"
    bits = np.array([0x3F80, 0x4000], np.uint16)
    v = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
    assert v.element_type() == BFLOAT16 and v.data_ptr() == bits.ctypes.data
    feed = {a.name: np.zeros(2, a_type(a.type)) for a in session("uncasts").get_inputs()}
    assert session("uncasts").run(["bfloat16_out"], {**feed, "bfloat16": v})[0].tolist() == [1, 2]
    assert (
        ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(2, np.uint8), INT4).data_type()
        == "tensor(int4)"
    )
    with pytest.raises(ValueError, match="bfloat16"):
        ort.OrtValue.ortvalue_from_numpy_with_onnx_type(np.zeros(2, np.uint8), BFLOAT16)
    words = ort.OrtValue.ortvalue_from_numpy(np.array(["Cat", "dog"]))
    assert words.data_type() == "tensor(string)" and words.numpy().tolist() == ["Cat", "dog"]
    joined = session("strings").run_with_ort_values(
        ["joined"], {"words": words, "suffix": ort.OrtValue.ortvalue_from_numpy(np.array(["?"]))}
    )[0]
    assert joined.data_type() == "tensor(string)" and joined.numpy().tolist() == ["cat?", "dog?"]
    for wrong in (np.zeros(2, np.complex64), [1, 2], 3):
        with pytest.raises(ValueError):
            ort.OrtValue.ortvalue_from_numpy(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="99"):
        ort.OrtValue.ortvalue_from_shape_and_type([1], 99)
    with pytest.raises(exceptions.NotImplemented, match="sparse"):
        ort.OrtValue.ort_value_from_sparse_tensor(None)
    with pytest.raises(ValueError, match="OrtValue"):
        ort.OrtValue(3)  # type: ignore[arg-type]


def a_type(text: str) -> Any:
    return np.uint16 if "bfloat16" in text else np.uint8


def test_lists_and_maps_as_values() -> None:
    x = ort.OrtValue.ortvalue_from_numpy(np.ones((2, 3), np.float32))
    parts = [np.ones((1, 3), np.float32)]
    rows_, total = session("split").run(None, {"x": x, "parts": [x, *parts]})
    assert len(rows_) == 2 and total == 9
    made = session("classifier").run_with_ort_values(
        None, {"x": ort.OrtValue.ortvalue_from_numpy(np.ones((1, 4), np.float32))}
    )
    assert [v.data_type() for v in made][1] == "seq(map(int64,tensor(float)))"
    assert (
        list(made[1].to_list()[0]) == [0, 1, 2]
        and not made[1].is_tensor()
        and not made[1].is_tensor_sequence()
    )
    for question in ("numpy", "shape", "data_ptr"):
        with pytest.raises(RuntimeError, match="no tensor"):
            getattr(made[1], question)()
    with pytest.raises(RuntimeError, match="no list"):
        made[0].to_list()


def test_dlpack_without_copies() -> None:
    x = rows(3)
    v = ort.OrtValue.ortvalue_from_numpy(x)
    assert v.__dlpack_device__() == (1, 0)
    assert np.shares_memory(np.from_dlpack(v), x)
    back = ort.OrtValue.from_dlpack(x)
    assert back.data_ptr() == x.ctypes.data and back.data_type() == "tensor(float)"
    # A capsule, as programs hand it on.
    again = ort.OrtValue.from_dlpack(v.to_dlpack())
    assert again.data_ptr() == x.ctypes.data
    again = ort.OrtValue.from_dlpack(v._ortvalue.to_dlpack(), False)
    assert again.numpy()[2].tolist() == x[2].tolist()
    flags = ort.OrtValue.from_dlpack(np.array([0, 1], np.uint8), is_bool_tensor=True)
    assert flags.data_type() == "tensor(bool)" and flags.numpy().tolist() == [False, True]
    assert not np.shares_memory(np.from_dlpack(_copied(v)), x)
    with pytest.raises(BufferError):
        v.__dlpack__(dl_device=(2, 0))
    del v, back, again
    gc.collect()
    assert x.shape == (3, 16)


class _copied:
    def __init__(self, value: ort.OrtValue) -> None:
        self._value = value

    def __dlpack__(self, **options: Any) -> Any:
        return self._value.__dlpack__(**{**options, "copy": True})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._value.__dlpack_device__()


def test_arrays_of_other_libraries_are_inputs() -> None:
    x = rows(2)
    s = session()
    want = s.run(None, {"x": x})[0]
    for value in (_copied(ort.OrtValue.ortvalue_from_numpy(x)), _Array(x)):
        assert np.array_equal(s.run(None, {"x": value})[0], want)
    with pytest.raises(exceptions.InvalidArgument, match="object"):
        s.run(None, {"x": object()})


class _Array:
    def __init__(self, x: Any) -> None:
        self._x = x

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._x


def test_tensors_on_a_device() -> None:
    """Values that are not arrays, as on every device but the CPU."""
    x = rows(2)
    tensor = halcyon._native.from_array_interface(halcyon._default.resolve_backend("cpu"), x, copy=True)
    v = ort.OrtValue._make(tensor, (1, "float", "f32"), "tensor(float)")
    assert v.shape() == [2, 16] and v.device_name() == "cpu" and v.tensor_size_in_bytes() == x.nbytes
    assert np.array_equal(v.numpy(), x) and np.array_equal(np.from_dlpack(v), x)
    with pytest.raises(exceptions.NotImplemented, match="address"):
        v.data_ptr()
    s = session()
    want = s.run(None, {"x": x})[0]
    assert np.array_equal(s.run_with_ort_values(None, {"x": v})[0].numpy(), want)
    v.update_inplace(x[::-1].copy())
    assert np.array_equal(s.run(None, {"x": v})[0], want[::-1])
    (kept,) = s._native.run(["probabilities"], {"x": x}, None, True)
    assert isinstance(kept, halcyon._native.Tensor) and np.array_equal(halcyon._native.to_numpy(kept), want)
    # A tensor is immutable: changes of its copy do not reach it.
    halcyon._native.to_numpy(kept)[:] = 0
    assert np.array_equal(halcyon._native.to_numpy(kept), want)


def test_copies_between_values() -> None:
    x, y = rows(2, 1), rows(2, 2)
    one, other = (ort.OrtValue.ortvalue_from_numpy(a) for a in (x, y))
    ort.copy_tensors([one], [other])
    assert np.array_equal(x, y) and not np.shares_memory(x, y)
    with pytest.raises(ValueError, match="1 sources and 2"):
        ort.copy_tensors([one], [one, other])
    with pytest.raises(ValueError, match="stream"):
        ort.copy_tensors([one], [other], stream=1)


def test_devices() -> None:
    d = ort.OrtDevice.make("cpu", 0)
    assert (
        d.device_type() == 0 and d.device_id() == 0 and d.device_mem_type() == 0 and d.device_vendor_id() == 0
    )
    assert ort.OrtDevice.make("cuda", 1).device_vendor_id() == ort.OrtDeviceVendorId.NVIDIA
    with pytest.raises(ValueError, match="nothing"):
        ort.OrtDevice.make("nothing", 0)
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        with pytest.raises(halcyon.UnavailableError):
            ort.OrtValue.ortvalue_from_numpy(rows(1), "cuda", 0)
    with pytest.raises(ValueError, match="nothing"):
        ort.OrtValue.ortvalue_from_numpy(rows(1), "nothing", 0)


class Old:
    """A producer of DLPack before 1.0, which cannot say that memory is read-only."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


# Bindings.


@pytest.mark.parametrize("kind", ["producer", "capsule", "value"])
def test_memory_of_an_old_producer_is_written(kind: str) -> None:
    s, x, out = session(), rows(4), np.zeros((4, 4), np.float32)
    given = {
        "producer": lambda: Old(out),
        "capsule": lambda: out.__dlpack__(),
        "value": lambda: ort.OrtValue.ortvalue_from_numpy(out).to_dlpack(),
    }[kind]
    b = s.io_binding()
    b.bind_cpu_input("x", x)
    b.bind_ortvalue_output("logits", ort.OrtValue.from_dlpack(given()))
    s.run_with_iobinding(b)
    assert np.array_equal(out, s.run(["logits"], {"x": x})[0])


def test_read_only_memory_is_not_written() -> None:
    out = np.zeros((4, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(RuntimeError, match="read-only"):
        ort.OrtValue.ortvalue_from_numpy(out).update_inplace(np.ones((4, 4), np.float32))
    s = session()
    b = s.io_binding()
    b.bind_cpu_input("x", rows(4))
    b.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(out))
    with pytest.raises(exceptions.InvalidArgument, match="read-only"):
        s.run_with_iobinding(b)
    assert not out.any()


@pytest.mark.parametrize("has_package", [True, False])
def test_outputs_of_types_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch, has_package: bool) -> None:
    if has_package:
        pytest.importorskip("ml_dtypes")
    else:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    _arrays._ml_dtype.cache_clear()
    _arrays.numpy_dtype.cache_clear()
    try:
        s, x = session("casts"), np.array([1, 2], np.float32)
        bits = np.zeros(2, np.uint16)
        value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, BFLOAT16)
        value.update_inplace(np.array([5, 6], np.uint16))
        assert bits.tolist() == [5, 6]
        b = s.io_binding()
        b.bind_cpu_input("x", x)
        b.bind_ortvalue_output("bfloat16", value)
        s.run_with_iobinding(b)
        assert bits.tolist() == [0x3F80, 0x4000]
        bits[:] = 0
        b.bind_output("bfloat16", "cpu", 0, BFLOAT16, [2], bits.ctypes.data)
        s.run_with_iobinding(b)
        assert bits.tolist() == [0x3F80, 0x4000]
        # The memory of a capsule of such a type is shared, too.
        lent = ort.OrtValue.from_dlpack(value.__dlpack__(max_version=(1, 0)))
        assert lent.data_type() == "tensor(bfloat16)" and lent.shape() == [2] and lent.data_ptr()
    finally:
        _arrays._ml_dtype.cache_clear()
        _arrays.numpy_dtype.cache_clear()


def test_a_binding_keeps_its_memory() -> None:
    s, x = session(), rows(4)
    want = s.run(None, {"x": x})
    b = s.io_binding()
    b.bind_cpu_input("x", x)
    b.bind_output("probabilities")
    b.bind_output("logits", "cpu")
    s.run_with_iobinding(b)
    made = b.copy_outputs_to_cpu()
    assert np.array_equal(made[0], want[0]) and np.array_equal(made[1], want[1])
    assert [v.shape() for v in b.get_outputs()] == [[4, 4], [4, 4]]
    # The input's memory is read at the time of the run.
    x[:] = 0
    s.run_with_iobinding(b)
    assert np.array_equal(b.copy_outputs_to_cpu()[0], s.run(None, {"x": x})[0])
    b.clear_binding_outputs()
    assert b.get_outputs() == []
    with pytest.raises(RuntimeError, match="no output is bound"):
        s.run_with_iobinding(b)
    b.bind_output("logits")
    b.clear_binding_inputs()
    with pytest.raises(RuntimeError, match="x"):
        s.run_with_iobinding(b)


def test_outputs_in_memory_of_the_caller() -> None:
    s, x = session(), rows(4)
    want = s.run(["logits"], {"x": x})[0]
    out = np.zeros((4, 4), np.float32)
    b = s.io_binding()
    b.bind_input("x", "cpu", 0, np.float32, [4, 16], x.ctypes.data)
    b.bind_output("logits", "cpu", 0, np.float32, [4, 4], out.ctypes.data)
    s.run_with_iobinding(b)
    assert np.array_equal(out, want) and b.get_outputs()[0].data_ptr() == out.ctypes.data
    value = ort.OrtValue.ortvalue_from_shape_and_type([4, 4], 1)
    address = value.data_ptr()
    b.bind_ortvalue_output("logits", value)
    s.run_with_iobinding(b, ort.RunOptions())
    assert value.data_ptr() == address and np.array_equal(value.numpy(), want)
    assert b.get_outputs()[0] is value
    b.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_shape_and_type([4, 5], 1))
    with pytest.raises(RuntimeError, match="logits"):
        s.run_with_iobinding(b)


def test_errors_of_bindings() -> None:
    s, x = session(), rows(1)
    b = s.io_binding()
    with pytest.raises(RuntimeError, match="nothing"):
        b.bind_cpu_input("nothing", x)
    with pytest.raises(exceptions.NotImplemented, match="cuda"):
        b.bind_input("x", "cuda", 0, np.float32, [1, 16], 1234)
    with pytest.raises(RuntimeError, match="address"):
        b.bind_input("x", "cpu", 0, np.float32, [1, 16], 0)
    with pytest.raises(RuntimeError, match="element_type"):
        b.bind_output("logits", buffer_ptr=1234)
    with pytest.raises(RuntimeError, match="string"):
        b.bind_input("x", "cpu", 0, np.str_, [1, 16], 1234)
    b.bind_cpu_input("x", x.astype(np.float64))
    b.bind_output("logits")
    with pytest.raises(RuntimeError, match="f64"):
        s.run_with_iobinding(b)
    b = s.io_binding()
    b.bind_cpu_input("x", x)
    b.bind_output("nothing")
    with pytest.raises(RuntimeError, match="nothing"):
        s.run_with_iobinding(b)
    with pytest.raises(RuntimeError, match="run\\(\\)"):
        s.run_with_ort_values(None, {"x": x})


def test_a_binding_of_overridable_initializers_and_of_lists() -> None:
    s = session("add")
    b = s.io_binding()
    b.bind_cpu_input("x", np.zeros((1, 3), np.float32))
    b.bind_cpu_input("w", np.array([4, 5, 6], np.float32))
    b.bind_output("y")
    s.run_with_iobinding(b)
    assert b.copy_outputs_to_cpu()[0].tolist() == [[4, 5, 6]]
    s = session("split")
    x = np.ones((2, 3), np.float32)
    b = s.io_binding()
    b.bind_cpu_input("x", x)
    b.bind_cpu_input("parts", [x])
    b.bind_output("rows")
    s.run_with_iobinding(b)
    assert [r.shape for r in b.copy_outputs_to_cpu()[0]] == [(1, 3), (1, 3)]
    assert b.get_outputs()[0].is_tensor_sequence()
