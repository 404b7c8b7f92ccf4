"""Sessions: what a model declares, runs, values of every kind, and errors."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from enum import IntEnum
from pathlib import Path
from typing import Any

import halcyon
import halcyon.onnxruntime as ort
import numpy as np
import pytest
from halcyon.session import _arrays, exceptions

MODELS = Path(__file__).parent / "models"
LOADABLE = sorted(
    p.stem for p in MODELS.glob("*.onnx") if p.stem not in ("unknown_operator", "dangling", "wrong_types")
)
CPU = ["CPUExecutionProvider"]


def session(name: str, **options: Any) -> ort.InferenceSession:
    return ort.InferenceSession(MODELS / f"{name}.onnx", providers=CPU, **options)


def declared(args: Any) -> list[tuple[str, str, list[Any]]]:
    return [(a.name, a.type, a.shape) for a in args]


@pytest.mark.parametrize("name", LOADABLE)
def test_a_model_declares_what_onnxruntime_says(name: str) -> None:
    theirs = pytest.importorskip("onnxruntime")
    options = theirs.SessionOptions()
    options.log_severity_level = 4
    want = theirs.InferenceSession(str(MODELS / f"{name}.onnx"), options, providers=CPU)
    got = session(name)
    assert declared(got.get_inputs()) == declared(want.get_inputs())
    assert declared(got.get_outputs()) == declared(want.get_outputs())
    assert declared(got.get_overridable_initializers()) == declared(want.get_overridable_initializers())
    assert repr(got.get_inputs()[0]) == str(want.get_inputs()[0])
    for field in (f for f in dir(halcyon.ModelMetadata) if not f.startswith("_")):
        assert getattr(got.get_modelmeta(), field) == getattr(want.get_modelmeta(), field), field


def test_what_a_model_declares() -> None:
    s = session("add")
    assert declared(s.get_inputs()) == [("x", "tensor(float)", ["N", 3])]
    assert declared(s.get_overridable_initializers()) == [("w", "tensor(float)", [3])]
    assert s.get_modelmeta().custom_metadata_map == {"author": "nobody", "labels": "a,b"}
    assert declared(session("unranked").get_inputs())[1] == ("z", "tensor(float)", [None, 2, "a"])
    assert session("classifier").get_outputs()[1].type == "seq(map(int64,tensor(float)))"
    assert session("optional").get_inputs()[0].type == "optional(tensor(float))"


def test_types_that_the_file_does_not_declare() -> None:
    s = session("untyped")
    assert declared(s.get_outputs()) == [
        ("product", "tensor(float)", ["N", 4]),
        ("positive", "tensor(float)", ["N", 4]),
        ("negative", "tensor(float)", ["N", 4]),
        ("magnitude", "tensor(float)", ["rows", 4]),
        ("sizes", "tensor(int64)", [2]),
    ]
    x = np.ones((5, 3), np.float32)
    product, *_, sizes = s.run(None, {"x": x})
    assert product.shape == (5, 4) and sizes.tolist() == [5, 3]
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("N", 2)
    fixed = session("untyped", sess_options=options)
    assert [a.shape for a in fixed.get_outputs()] == [[2, 4]] * 4 + [[2]]
    # Outputs that a program adds to look at values between the nodes.
    assert [a.shape for a in session("one_name").get_outputs()] == [["M"]]


def test_sizes_with_one_name_may_differ() -> None:
    a, b = np.ones(2, np.float32), np.zeros(3, np.float32)
    assert session("one_name").run(None, {"a": a, "b": b})[0].tolist() == [1, 1, 0, 0, 0]


def test_declarations_belong_to_the_caller() -> None:
    s = session("add")
    shape = s.get_inputs()[0].shape
    shape[0] = 8
    s.get_inputs().clear()
    s.get_modelmeta().custom_metadata_map.clear()
    assert s.get_inputs()[0].shape == ["N", 3]
    assert s.get_modelmeta().custom_metadata_map["author"] == "nobody"


def test_outputs_are_named_by_any_iterable() -> None:
    s, x = session("mlp"), np.ones((1, 16), np.float32)
    (want,) = s.run(["logits"], {"x": x})
    names: list[Any] = [("logits",), {"logits": 1}.keys(), {"logits"}, iter(["logits"]), np.array(["logits"])]
    for one in names:
        assert np.array_equal(s.run(one, {"x": x})[0], want)
    value = ort.OrtValue.ortvalue_from_numpy(x)
    assert np.array_equal(s.run_with_ort_values(iter(["logits"]), {"x": value})[0].numpy(), want)
    for wrong in ("logits", b"logits", 3, [3]):
        with pytest.raises(TypeError, match="list of names"):
            s.run(wrong, {"x": x})  # type: ignore[arg-type]


def test_lists_and_numbers_are_inputs() -> None:
    s = session("integers")
    assert s.run(None, {"u8": [1, 2, 255], "i32": [[-1]], "u64": [2**63]})[0].tolist() == [1, 2, 255]
    assert s.run(["u64_out"], {"u8": [], "i32": [[7]], "u64": 2**64 - 1})[0].tolist() == 2**64 - 1
    good: dict[str, Any] = {"u8": [0], "i32": [[0]], "u64": 0}
    for name, value, text in [
        ("u8", [256], "256 is not between 0 and 255"),
        ("u8", [3, -1], "-1 is not between 0 and 255"),
        ("i32", [[2**31]], "2147483648 is not between"),
        ("i32", [[0.5]], "i32"),
        ("u64", -1, "-1 is not between"),
        ("u64", 2**64, "u64"),
    ]:
        with pytest.raises(exceptions.InvalidArgument, match=name) as e:
            s.run(None, {**good, name: value})
        assert text in str(e.value) or "Cannot cast" in str(e.value)


def test_names_are_in_the_package_too() -> None:
    assert halcyon.InferenceSession is ort.InferenceSession
    assert int(halcyon.GraphOptimizationLevel.ORT_ENABLE_ALL) == 99
    with pytest.raises(AttributeError, match="python-onnxruntime"):
        _ = ort.LoraAdapter
    assert "InferenceSession" in dir(halcyon)


# Inputs.


@pytest.mark.parametrize("rows", [0, 1, 5, 4000])
def test_arrays_of_every_layout(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, 3)).astype(np.float32)
    s, want = session("add"), x + np.array([1, 2, 3], np.float32)
    wide = np.zeros((rows, 6), np.float32)
    wide[:, ::2] = x
    given = {
        "dense": x,
        "Fortran": np.asfortranarray(x),
        "strided": wide[:, ::2],
        "reversed": x[::-1][::-1],
        "big-endian": x.astype(">f4"),
        "read-only": np.frombuffer(x.tobytes(), np.float32).reshape(x.shape),
        "Halcyon's": halcyon._native.from_array_interface(halcyon.Backend("cpu"), x, copy=True),
        "another device's": halcyon._native.from_array_interface(
            halcyon.Backend("cpu", threads=1), x, copy=True
        ),
    }
    if rows:
        given["a list"] = x.tolist()
    for kind, value in given.items():
        (got,) = s.run(None, {"x": value})
        assert got.dtype == np.float32 and got.shape == x.shape, kind
        np.testing.assert_array_equal(got, want, err_msg=kind)
    assert np.array_equal(
        x, rng.__class__(np.random.PCG64(rows)).standard_normal((rows, 3)).astype(np.float32)
    )


def test_results_belong_to_the_caller() -> None:
    s = session("add")
    for rows in (2, 100_000):
        x = np.ones((rows, 3), np.float32)
        first, second = (s.run(["y"], {"x": x})[0] for _ in range(2))
        one, same = s.run(["y", "y"], {"x": x})
        assert first.flags.writeable and first.flags.c_contiguous
        assert not np.shares_memory(one, same) and not np.shares_memory(first, x)
        first[:] = -1
        assert second[0].tolist() == same[0].tolist() == [2, 3, 4]
        assert x[0].tolist() == [1, 1, 1]
        assert s.run(None, {"x": x})[0][0].tolist() == [2, 3, 4]
    del s, x
    gc.collect()
    assert (second[:, 0] == 2).all() and (one[-1] == [2, 3, 4]).all()


def test_changes_of_an_input_after_a_run_change_nothing() -> None:
    s = session("add")
    x = np.zeros((50_000, 3), np.float32)
    (before,) = s.run(None, {"x": x})
    x[:] = 9
    (after,) = s.run(None, {"x": x})
    assert before[-1].tolist() == [1, 2, 3] and after[-1].tolist() == [10, 11, 12]


@pytest.mark.parametrize("has_package", [True, False])
def test_types_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch, has_package: bool) -> None:
    ml = pytest.importorskip("ml_dtypes") if has_package else None
    if not has_package:
        monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    _arrays._ml_dtype.cache_clear()
    _arrays.numpy_dtype.cache_clear()
    try:
        s = session("casts")
        x = np.array([0, 1, -2.5, 6.5, 3], np.float32)
        made = dict(zip([a.name for a in s.get_outputs()], s.run(None, {"x": x}), strict=True))
        assert made["float16"].dtype == np.float16 and made["bool"].tolist() == [
            False,
            True,
            True,
            True,
            True,
        ]
        assert made["uint8"].dtype == np.uint8 and made["int64"].tolist() == [0, 1, -2, 6, 3]
        if ml is not None:
            assert made["bfloat16"].dtype == ml.bfloat16
            assert made["float8e4m3fn"].dtype == ml.float8_e4m3fn
            assert made["int4"].dtype == ml.int4
            for name in ("bfloat16", "float8e4m3fn", "float8e5m2"):
                want = x.astype(made[name].dtype)
                np.testing.assert_array_equal(made[name].astype(np.float32), want.astype(np.float32))
            assert made["int4"].astype(int).tolist() == [0, 1, -2, 6, 3]
            assert made["uint4"][[0, 1, 3, 4]].astype(int).tolist() == [0, 1, 6, 3]
        else:
            assert made["bfloat16"].dtype == np.uint16 and made["float8e4m3fn"].dtype == np.uint8
            assert (made["bfloat16"].astype(np.uint32) << 16).view(np.float32).tolist() == x.tolist()
            assert made["int4"].dtype == np.int8 and made["int4"].tolist() == [0, 1, -2, 6, 3]
        back = session("uncasts")
        feed = {a.name: made[a.name][[0, 1, 4]] for a in back.get_inputs()}
        for out in back.run(None, feed):
            assert out.tolist() == [0, 1, 3]
    finally:
        _arrays._ml_dtype.cache_clear()
        _arrays.numpy_dtype.cache_clear()


def test_texts_lists_maps_and_optionals() -> None:
    s = session("strings")
    bang = np.array(["!"])
    for words in (
        ["Cat", "x"],
        np.array(["Cat", "x"]),
        np.array([b"Cat", b"x"]),
        np.array(["Cat", "x"], object),
    ):
        joined, ids = s.run(None, {"words": words, "suffix": bang})
        assert joined.dtype == object and joined.tolist() == ["cat!", "x!"] and ids.tolist() == [1, -1]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    rows, total = session("split").run(None, {"x": x, "parts": [x, x[:1]]})
    assert [r.tolist() for r in rows] == [[[0, 1, 2]], [[3, 4, 5]]] and total == 18
    label, by_number, by_name = session("classifier").run(None, {"x": np.ones((2, 4), np.float32)})
    assert label.shape == (2,) and list(by_number[0]) == [0, 1, 2] and list(by_name[1]) == ["a", "b", "c"]
    assert abs(sum(by_number[0].values()) - 1) < 1e-6 and type(by_number[0][0]) is float
    assert session("dictionary").run(None, {"x": {"c": 1}})[0].tolist() == [[0, 0, 1]]
    maybe = session("optional")
    assert maybe.run(None, {"x": np.ones(2, np.float32)})[0].item() is True
    assert maybe.run(None, {"x": None})[0].item() is False and maybe.run(None, {})[0].item() is False


def test_random_numbers_follow_the_seed() -> None:
    x = np.zeros(100, np.float32)

    def drawn() -> list[Any]:
        return session("random").run(None, {"x": x})

    first = drawn()
    try:
        ort.set_seed(1)
        one, again = drawn(), drawn()
        ort.set_seed(2)
        other = drawn()
    finally:
        halcyon.session._session._seed = None
    assert np.array_equal(one[0], again[0]) and np.array_equal(one[1], again[1])
    assert not np.array_equal(one[0], other[0]) and not np.array_equal(one[0], first[0])
    assert 0.3 < one[0].mean() < 0.7 and abs(one[1].mean()) < 0.5


# Errors.


def raises(kind: type[Exception], *texts: str) -> Any:
    return pytest.raises(kind, match="".join(f"(?=.*{t})" for t in texts))


def test_errors_of_loading(tmp_path: Path) -> None:
    with raises(exceptions.NoSuchFile, "nothing here"):
        ort.InferenceSession(tmp_path / "nothing here.onnx")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(b"this is no model at all")
    with raises(exceptions.InvalidProtobuf, "bad.onnx"):
        ort.InferenceSession(bad)
    with pytest.raises(exceptions.InvalidProtobuf):
        ort.InferenceSession(b"abc")
    with pytest.raises(exceptions.InvalidArgument):
        ort.InferenceSession(b"")
    with raises(exceptions.InvalidGraph, "Nothing"):
        session("unknown_operator")
    with raises(exceptions.InvalidGraph, "nowhere"):
        session("dangling")
    with pytest.raises(exceptions.Fail):
        session("wrong_types")
    with pytest.raises(TypeError):
        ort.InferenceSession(3)  # type: ignore[arg-type]
    truncated = (MODELS / "mlp.onnx").read_bytes()[:1000]
    with pytest.raises(exceptions.InvalidProtobuf):
        ort.InferenceSession(truncated)


def test_errors_of_runs_name_what_is_wrong() -> None:
    s, x = session("add"), np.ones((2, 3), np.float32)
    wrong = exceptions.InvalidArgument
    with raises(wrong, '"x"', "f32", "f64"):
        s.run(None, {"x": x.astype(np.float64)})
    with raises(wrong, '"x"', r"\[3\]"):
        s.run(None, {"x": x[0]})
    with raises(wrong, '"x"', r"\[2, 4\]", "N"):
        s.run(None, {"x": np.ones((2, 4), np.float32)})
    with raises(wrong, '"z"', '"x"'):
        s.run(None, {"x": x, "z": x})
    with raises(wrong, "x"):
        s.run(None, {})
    with raises(wrong, '"q"', "y"):
        s.run(["q"], {"x": x})
    with raises(wrong, '"x"', "NoneType"):
        s.run(None, {"x": None})
    with raises(wrong, '"x"', "complex64"):
        s.run(None, {"x": x.astype(np.complex64)})
    with raises(wrong, '"words"', "int64"):
        session("strings").run(None, {"words": np.array([1]), "suffix": np.array(["a"])})
    with raises(wrong, '"parts"', "list"):
        session("split").run(None, {"x": x, "parts": x})
    with raises(wrong, '"x"', "dict"):
        session("dictionary").run(None, {"x": [1]})
    with pytest.raises(TypeError):
        s.run("y", {"x": x})
    with pytest.raises(TypeError):
        s.run(None, [x])  # type: ignore[arg-type]
    # Missing inputs are a ValueError, as in onnxruntime; every error is a HalcyonError.
    assert issubclass(wrong, ValueError) and issubclass(wrong, halcyon.HalcyonError)
    assert s.run(None, {"x": x})[0].shape == (2, 3)


def test_all_exceptions_of_onnxruntime_exist() -> None:
    theirs = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    names = [
        n
        for n, c in vars(theirs).items()
        if isinstance(c, type) and issubclass(c, Exception) and c.__module__ == theirs.__name__
    ]
    assert names
    for name in names:
        assert issubclass(getattr(exceptions, name), halcyon.HalcyonError), name
        assert getattr(ort.capi.onnxruntime_pybind11_state, name) is getattr(exceptions, name)


@pytest.mark.parametrize(
    "name", ["InferenceSession", "SessionOptions", "RunOptions", "IOBinding", "OrtValue"]
)
def test_the_classes_have_all_public_members_of_onnxruntime(name: str) -> None:
    theirs = pytest.importorskip("onnxruntime")
    public = {m for m in dir(getattr(theirs, name)) if not m.startswith("_")}
    assert public - set(dir(getattr(ort, name))) == set()


def test_enumerations_have_onnxruntimes_numbers() -> None:
    theirs = pytest.importorskip("onnxruntime")
    for name in ort.__all__:
        ours = getattr(ort, name)
        if isinstance(ours, type) and issubclass(ours, IntEnum):
            want = {k: int(v) for k, v in getattr(theirs, name).__members__.items()}
            assert {k: int(v) for k, v in ours.__members__.items()} == want, name


# The package.


def test_importing_the_package_is_cheap() -> None:
    slow = ("numpy", "torch", "halcyon.session")
    code = f"import sys, halcyon; print([m for m in sys.modules if m.startswith({slow!r})])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_session_runs_in_a_child_after_a_fork() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("there is no fork on this system")
    code = f"""
import os, sys
import numpy as np
import halcyon.onnxruntime as ort
x = np.ones((2, 3), np.float32)
path = {str(MODELS / "add.onnx")!r}
ort.InferenceSession(path).run(None, {{"x": x}})
child = os.fork()
if child == 0:
    made = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {{"x": x}})
    os._exit(0 if made[0][0].tolist() == [2, 3, 4] else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_sessions_do_not_warn_by_default() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session("mlp").run(None, {"x": np.zeros((1, 16), np.float32)})


def test_a_session_cannot_be_pickled() -> None:
    import pickle

    with pytest.raises(TypeError, match="path"):
        pickle.dumps(session("add"))


def test_arrays_of_halcyon_are_inputs() -> None:
    from halcyon import array as ha

    x = ha.asarray([[1.0, 2.0, 3.0]], dtype=ha.float32) * 2
    assert session("add").run(None, {"x": x})[0].tolist() == [[3, 6, 9]]
