"""Every option of sessions and runs has its effect, raises, or is named by a warning."""

from __future__ import annotations

import json
import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import halcyon
import halcyon.onnxruntime as ort
import numpy as np
import pytest
from halcyon.session import _providers, exceptions

MODELS = Path(__file__).parent / "models"
CPU = ["CPUExecutionProvider"]
ROW = np.arange(16, dtype=np.float32)[None] / 16


def session(options: ort.SessionOptions | None = None, name: str = "mlp") -> ort.InferenceSession:
    return ort.InferenceSession(MODELS / f"{name}.onnx", options, providers=CPU)


def warned(options: ort.SessionOptions) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        session(options)
    assert all(issubclass(w.category, halcyon.HalcyonWarning) for w in found)
    # The warning points to the caller.
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("inter_op_num_threads", 4, "inter_op_num_threads=4"),
        ("execution_mode", ort.ExecutionMode.ORT_PARALLEL, "execution_mode=ORT_PARALLEL"),
        ("execution_order", ort.ExecutionOrder.PRIORITY_BASED, "execution_order=PRIORITY_BASED"),
        ("enable_mem_pattern", False, "enable_mem_pattern=False"),
        ("enable_mem_reuse", False, "enable_mem_reuse=False"),
        ("log_verbosity_level", 1, "log_verbosity_level=1"),
    ],
)
def test_options_without_effect_are_named(name: str, value: Any, text: str) -> None:
    options = ort.SessionOptions()
    setattr(options, name, value)
    assert getattr(options, name) == value
    (message,) = warned(options)
    assert text in message and "no effect" in message
    # From severity 3 on there are no warnings.
    options.log_severity_level = 3
    assert warned(options) == []


def test_unknown_entries_and_arguments_are_named() -> None:
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    assert options.get_session_config_entry("session.disable_prepacking") == "1"
    assert "session.disable_prepacking" in warned(options)[0]
    with pytest.raises(RuntimeError, match="nothing"):
        options.get_session_config_entry("nothing")
    with pytest.warns(halcyon.HalcyonWarning, match="disabled_optimizers"):
        ort.InferenceSession(MODELS / "mlp.onnx", providers=CPU, disabled_optimizers=["ConstantFolding"])


def test_every_option_of_the_class_is_covered() -> None:
    """A new property must have an effect that a test here shows, or be among the options without one."""
    names = {n for n, p in vars(ort.SessionOptions).items() if isinstance(p, property)}
    assert names == {
        "enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "enable_profiling",
        "execution_mode", "execution_order", "graph_optimization_level", "inter_op_num_threads",
        "intra_op_num_threads",
        "log_severity_level", "log_verbosity_level", "logid", "optimized_model_filepath",
        "profile_file_prefix",
        "use_deterministic_compute", "use_per_session_threads",
    }  # fmt: skip


def test_what_cannot_be_set() -> None:
    options = ort.SessionOptions()
    for name, value in [
        ("intra_op_num_threads", "2"),
        ("graph_optimization_level", 99),
        ("execution_mode", 1),
        ("enable_profiling", "yes"),
        ("logid", 3),
    ]:
        with pytest.raises(TypeError, match=name):
            setattr(options, name, value)
    with pytest.raises(ValueError, match="-1"):
        options.intra_op_num_threads = -1
    with pytest.raises(AttributeError):
        options.nothing = 1  # type: ignore[attr-defined]
    with pytest.raises(exceptions.NotImplemented, match="custom"):
        options.register_custom_ops_library("ops.so")
    arguments: tuple[Any, ...]
    for name, arguments in [
        ("add_provider_for_devices", ([], {})),
        ("set_provider_selection_policy", (1,)),
        ("set_provider_selection_policy_delegate", (print,)),
        ("set_ep_context_data_read_func", (print,)),
    ]:
        with pytest.raises(exceptions.NotImplemented, match=name):
            getattr(options, name)(*arguments)
    options.set_load_cancellation_flag(True)
    with pytest.raises(exceptions.ModelLoadCanceled):
        session(options)


# Options with an effect.


def test_levels() -> None:
    want = {
        "ORT_DISABLE_ALL": "O0",
        "ORT_ENABLE_BASIC": "O1",
        "ORT_ENABLE_EXTENDED": "O2",
        "ORT_ENABLE_LAYOUT": "O2",
    }
    for name, level in want.items():
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel[name]
        assert session(options)._native.backend.level == level
    options = ort.SessionOptions()
    assert session(options)._native.backend.level == "O2"
    options.use_deterministic_compute = True
    assert session(options)._native.backend.level == "O1"


def test_threads() -> None:
    options = ort.SessionOptions()
    shared = session(options)._backend
    assert session(options)._backend.is_same(shared)
    options.intra_op_num_threads = 1
    one, other = session(options)._backend, session(options)._backend
    assert not one.is_same(shared) and not one.is_same(other)
    options.use_per_session_threads = False
    try:
        ort.set_global_thread_pool_sizes(1)
        one, other = session(options)._backend, session(options)._backend
        assert one.is_same(other) and not one.is_same(shared)
    finally:
        ort.set_global_thread_pool_sizes(0)
    assert session(options)._backend.is_same(shared)
    with pytest.warns(halcyon.HalcyonWarning, match="inter_op_num_threads=3"):
        ort.set_global_thread_pool_sizes(0, 3)


def test_memory_is_returned() -> None:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    s = session(options, "conv")
    image = np.zeros((1, 3, 256, 256), np.float32)
    s.run(["pooled"], {"image": image})
    assert s._backend.memory()["cached"] == 0
    # With the arena, or for a run that does not shrink it, memory is kept.
    options.enable_cpu_mem_arena = True
    s = session(options, "conv")
    s.run(["pooled"], {"image": image})
    assert (s._backend.memory()["cached"] or 0) > 0
    run = ort.RunOptions()
    run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    s.run(["pooled"], {"image": image}, run)
    assert s._backend.memory()["cached"] == 0


def test_sizes_are_fixed_by_name_and_by_denotation() -> None:
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 2)
    s = session(options)
    assert s.get_inputs()[0].shape == [2, 16] and s.get_outputs()[0].shape == [2, 4]
    assert s.run(None, {"x": np.zeros((2, 16), np.float32)})[0].shape == (2, 4)
    with pytest.raises(exceptions.InvalidArgument):
        s.run(None, {"x": ROW})
    options = ort.SessionOptions()
    options.add_free_dimension_override_by_denotation("DATA_BATCH", 5)
    for source in (MODELS / "denoted.onnx", (MODELS / "denoted.onnx").read_bytes()):
        s = ort.InferenceSession(source, options, providers=CPU)
        assert s.get_inputs()[0].shape == [5, 3]


def test_initializers_are_replaced() -> None:
    x = np.zeros((1, 3), np.float32)
    options = ort.SessionOptions()
    options.add_initializer("w", ort.OrtValue.ortvalue_from_numpy(np.array([7, 8, 9], np.float32)))
    assert session(options, "add").run(None, {"x": x})[0].tolist() == [[7, 8, 9]]
    # A type that NumPy lacks, as a value and as bits.
    for name, number, bits, want in [
        ("bf16", 16, np.array([0x3F80, 0x4000], np.uint16), [1, 2]),
        ("i4", 22, np.array([3, 0xF], np.uint8), [3, -1]),
    ]:
        options = ort.SessionOptions()
        options.add_initializer(name, ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number))
        assert session(options, "stored").run([f"{name}_out"], {"x": np.float32(1)})[0].tolist() == want
    options = ort.SessionOptions()
    options.add_initializer("w", np.zeros(4, np.float32))
    with pytest.raises(exceptions.InvalidArgument, match="w"):
        session(options, "add")
    options = ort.SessionOptions()
    options.add_initializer("other", np.zeros(3, np.float32))
    assert any("other" in m for m in warned(options))


def test_external_data(tmp_path: Path) -> None:
    x = np.zeros(3, np.float32)
    assert session(None, "external").run(None, {"x": x})[0].tolist() == [1, 2, 3]
    contents = (MODELS / "external.onnx").read_bytes()
    # A model in memory has no folder.
    with pytest.raises(halcyon.HalcyonError, match="file"):
        ort.InferenceSession(contents, providers=CPU).run(None, {"x": x})
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(MODELS))
    assert ort.InferenceSession(contents, options, providers=CPU).run(None, {"x": x})[0].tolist() == [1, 2, 3]
    options = ort.SessionOptions()
    other = np.array([4, 5, 6], np.float32).tobytes() + b"more"
    options.add_external_initializers_from_files_in_memory(["external.bin"], [other], [12])
    for source in (contents, MODELS / "external.onnx"):
        s = ort.InferenceSession(source, options, providers=CPU)
        assert s.run(None, {"x": x})[0].tolist() == [4, 5, 6]
    options = ort.SessionOptions()
    options.add_external_initializers(["w"], [np.array([7, 8, 9], np.float32)])
    assert ort.InferenceSession(contents, options, providers=CPU).run(None, {"x": x})[0].tolist() == [7, 8, 9]
    with pytest.raises(exceptions.InvalidArgument, match="external"):
        session(options, "add")
    with pytest.raises(ValueError, match="names"):
        options.add_external_initializers(["w"], [])


def test_the_optimised_model_is_written(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "made.onnx")
    want = session(options).run(None, {"x": ROW})
    again = ort.InferenceSession(tmp_path / "made.onnx", providers=CPU).run(None, {"x": ROW})
    np.testing.assert_allclose(again[0], want[0], rtol=1e-6)
    options.optimized_model_filepath = str(tmp_path / "no folder" / "made.onnx")
    with pytest.raises(halcyon.HalcyonError):
        session(options)
    # A model whose results decide how it goes on is not one graph.
    options.optimized_model_filepath = str(tmp_path / "loop.onnx")
    with pytest.raises(exceptions.NotImplemented):
        session(options, "count")


def test_a_profile_has_the_measured_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    s = session(options, "conv")
    assert s.get_profiling_start_time_ns() > 0
    for _ in range(2):
        s.run(None, {"image": np.zeros((1, 3, 128, 128), np.float32)})
    path = s.end_profiling()
    assert path.startswith("onnxruntime_profile_") and Path(path).is_file()
    events = json.loads(Path(path).read_text())
    nodes = [e for e in events if e["cat"] == "Node"]
    runs = [e for e in events if e["name"] == "model_run"]
    assert len(runs) == 2 and len(nodes) >= 4
    assert all(e["args"]["provider"] == "CPUExecutionProvider" for e in nodes)
    assert any(e["args"]["flops"] > 1e6 and e["dur"] > 1 for e in nodes)
    # The steps lie in the runs.
    for e in nodes:
        assert any(r["ts"] <= e["ts"] and e["ts"] + e["dur"] <= r["ts"] + r["dur"] + 1 for r in runs)
    assert s.end_profiling() == "" and s.get_profiling_start_time_ns() == 0
    # A session that is dropped writes its profile too, and a model in stages says why it was staged.
    s = session(options, "count")
    s.run(None, {"x": np.array(0, np.float32), "limit": np.array(3, np.float32)})
    before = set(tmp_path.glob("*.json"))
    del s
    (found,) = set(tmp_path.glob("*.json")) - before
    run = next(e for e in json.loads(found.read_text()) if e["name"] == "model_run")
    assert run["args"]["staged"] and run["args"]["placement"]["loops"]


def test_messages(caplog: pytest.LogCaptureFixture) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 1
    options.logid = "mine"
    run = ort.RunOptions()
    with caplog.at_level(logging.INFO):
        session(options).run(None, {"x": ROW}, run)
    assert any("[mine]" in m and "cpu" in m for m in caplog.messages)
    assert any("ms" in m for m in caplog.messages)
    caplog.clear()
    session().run(None, {"x": ROW}, run)
    assert not caplog.messages
    try:
        ort.set_default_logger_severity(3)
        quiet = ort.SessionOptions()
        quiet.inter_op_num_threads = 4
        assert warned(quiet) == []
    finally:
        ort.set_default_logger_severity(2)
    with pytest.raises(ValueError, match="5"):
        ort.set_default_logger_severity(5)
    with pytest.raises(ValueError, match="1"):
        ort.set_default_logger_verbosity(1)


# Run options.


def test_run_options() -> None:
    s, run = session(), ort.RunOptions()
    run.add_run_config_entry("gpu_graph_id", "1")
    assert run.get_run_config_entry("gpu_graph_id") == "1"
    with pytest.warns(halcyon.HalcyonWarning, match="gpu_graph_id"):
        s.run(None, {"x": ROW}, run)
    with warnings.catch_warnings():
        # Only the first run warns.
        warnings.simplefilter("error")
        s.run(None, {"x": ROW}, run)
    with pytest.raises(RuntimeError, match="nothing"):
        run.get_run_config_entry("nothing")
    with pytest.raises(exceptions.NotImplemented, match="adapter"):
        run.add_active_adapter("a")
    run = ort.RunOptions()
    run.log_verbosity_level = 2
    with pytest.warns(halcyon.HalcyonWarning, match="log_verbosity_level"):
        s.run(None, {"x": ROW}, run)


def test_terminate_ends_a_run_that_has_not_begun() -> None:
    s, run = session(), ort.RunOptions()
    run.terminate = True
    with pytest.raises(exceptions.Fail, match="cancelled"):
        s.run(None, {"x": ROW}, run)
    assert run.terminate is True
    run.terminate = False
    assert s.run(None, {"x": ROW}, run)[0].shape == (1, 4)


def test_only_what_is_asked_for_is_computed() -> None:
    s, run = session(name="branches"), ort.RunOptions()
    # A size that no machine has memory for: only a run that leaves it out succeeds.
    feed = {"x": np.array([-1, 2], np.float32), "size": np.array([1 << 50])}
    with pytest.raises(halcyon.HalcyonError):
        s.run(["cheap"], feed, run)
    run.only_execute_path_to_fetches = True
    assert s.run(["cheap"], feed, run)[0].tolist() == [0, 2]
    assert s.run(["cheap"], feed, run)[0].tolist() == [0, 2]
    with pytest.raises(exceptions.InvalidArgument, match="nothing"):
        s.run(["nothing"], feed, run)


# Providers.


def test_providers() -> None:
    have = ort.get_available_providers()
    assert have[-1] == "CPUExecutionProvider" and set(have) <= set(ort.get_all_providers())
    assert ort.get_device() == ("CPU" if len(have) == 1 else "GPU")
    s = session()
    assert s.get_providers() == CPU and s.get_provider_options() == {"CPUExecutionProvider": {}}
    with pytest.warns(halcyon.HalcyonWarning, match="NoSuchExecutionProvider is unknown"):
        s = ort.InferenceSession(MODELS / "mlp.onnx", providers=["NoSuchExecutionProvider", *CPU])
    assert s.get_providers() == CPU
    if "CUDAExecutionProvider" not in have:
        with pytest.warns(halcyon.HalcyonWarning) as found:
            s = ort.InferenceSession(MODELS / "mlp.onnx", providers=["CUDAExecutionProvider"])
        texts = [str(w.message) for w in found]
        assert "not available" in texts[0] and "the CPU is used" in texts[1]
        assert s.run(None, {"x": ROW})[0].shape == (1, 4)
    with pytest.warns(halcyon.HalcyonWarning, match="arena_extend_strategy"):
        ort.InferenceSession(
            MODELS / "mlp.onnx",
            providers=[("CPUExecutionProvider", {"arena_extend_strategy": "kSameAsRequested"})],
        )
    with pytest.warns(halcyon.HalcyonWarning, match="twice"):
        ort.InferenceSession(MODELS / "mlp.onnx", providers=CPU * 2)


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        ([3], None),
        ("CPUExecutionProvider", None),
        ([("CPUExecutionProvider",)], None),
        ([("CPUExecutionProvider", 1)], None),
        (CPU, []),
        (CPU, [{}, {}]),
        (CPU, [3]),
        (None, [{"device_id": 0}]),
        ([("CPUExecutionProvider", {})], [{"device_id": 0}]),
    ],
)
def test_malformed_providers_are_a_value_error(providers: Any, options: Any) -> None:
    with pytest.raises(ValueError, match="provider"):
        ort.InferenceSession(MODELS / "mlp.onnx", providers=providers, provider_options=options)


def test_the_provider_of_the_best_device_and_of_a_named_one() -> None:
    auto = ort.InferenceSession(MODELS / "mlp.onnx", providers=["HalcyonExecutionProvider"])
    assert auto._backend.is_same(halcyon._default.default_backend())
    s = ort.InferenceSession(MODELS / "mlp.onnx")
    assert s._backend.is_same(auto._backend)
    s = ort.InferenceSession(
        MODELS / "mlp.onnx", providers=[("HalcyonExecutionProvider", {"backend": "cpu"})]
    )
    assert s._backend.kind == "cpu"
    s = ort.InferenceSession(
        MODELS / "mlp.onnx", providers=["CPUExecutionProvider"], provider_options=[{"device_id": 0}]
    )
    assert s.get_provider_options() == {"CPUExecutionProvider": {"device_id": "0"}}
    s.set_providers(["CPUExecutionProvider"])
    assert s.run(None, {"x": ROW})[0].shape == (1, 4)
    options = ort.SessionOptions()
    options.add_provider("CPUExecutionProvider", {})
    assert options.has_providers()
    assert ort.InferenceSession(MODELS / "mlp.onnx", options).get_providers() == CPU


def test_a_failing_driver_lets_the_session_continue_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        """A session whose driver fails."""

        def run(self, *_: Any) -> None:
            raise halcyon.DriverError("launch failed on gpu:0: lost. Restart the program")

    class Elsewhere:
        kind = "cuda"
        id = "gpu:0"

    def broken() -> ort.InferenceSession:
        s = session()
        s._native, s._backend = Failing(), Elsewhere()  # type: ignore[assignment]
        return s

    s = broken()
    with pytest.warns(halcyon.HalcyonWarning, match="launch failed.*continues on the CPU"):
        assert s.run(None, {"x": ROW})[0].shape == (1, 4)
    assert s.get_providers() == CPU
    s = broken()
    s.disable_fallback()
    with pytest.raises(exceptions.EPFail, match="lost"):
        s.run(None, {"x": ROW})
    s.enable_fallback()
    with pytest.warns(halcyon.HalcyonWarning):
        s.run(None, {"x": ROW})


def test_names_of_providers_and_their_options() -> None:
    p = _providers.Provider(
        "CUDAExecutionProvider", {"device_id": "1", "gpu_mem_limit": "1024", "other": "x"}
    )
    assert p.device() == "cuda:1" and p.memory_limit() == 1024
    assert p.without_effect() == ['other="x" of CUDAExecutionProvider']
    assert _providers.Provider("ROCMExecutionProvider").device() == "rocm"


def test_what_is_not_supported_raises_by_name() -> None:
    s = session()
    for name in [
        "get_input_epdevices", "get_provider_graph_assignment_info", "get_tuning_results",
        "release_captured_graph",
        "run_with_ortvaluevector",
    ]:  # fmt: skip
        with pytest.raises(exceptions.NotImplemented, match=name):
            getattr(s, name)()
    with pytest.raises(exceptions.NotImplemented, match="set_tuning_results"):
        s.set_tuning_results([])
    with pytest.raises(exceptions.NotImplemented, match="kMSSpeed"):
        s.set_ep_dynamic_options({"kMSSpeed": "1"})
    s.set_ep_dynamic_options({})
    assert s.get_session_options() is not None
    assert s.get_input_memory_infos()[0].name == "cpu" and len(s.get_output_memory_infos()) == 2
    with pytest.raises(exceptions.NotImplemented, match="telemetry"):
        ort.enable_telemetry_events()
    ort.disable_telemetry_events()
    assert ort.get_version_string() == halcyon.__version__ and halcyon.__version__ in ort.get_build_info()
    assert ort.has_collective_ops() is False


def test_options_are_read_by_several_threads() -> None:
    options, errors = ort.SessionOptions(), []

    def work() -> None:
        try:
            assert session(options).run(None, {"x": ROW})[0].shape == (1, 4)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
