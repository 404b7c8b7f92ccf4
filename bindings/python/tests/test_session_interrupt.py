"""Runs that are ended, run side by side, or repeated for long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import halcyon.onnxruntime as ort
import numpy as np
import pytest
from halcyon.session import exceptions

MODELS = Path(__file__).parent / "models"
CPU = ["CPUExecutionProvider"]
#: Runs that would take minutes: a loop that never ends, and one graph of many products.
LONG: dict[str, dict[str, Any]] = {
    "endless": {"x": np.array(0, np.float32)},
    "long": {"x0": np.zeros((3000, 3000), np.float32)},
}
#: A run must end in this time after it was asked to. A product of `long` takes seconds on a busy machine.
SOON = 30.0


def session(name: str, options: ort.SessionOptions | None = None) -> ort.InferenceSession:
    return ort.InferenceSession(MODELS / f"{name}.onnx", options, providers=CPU)


def later(seconds: float, f: Callable[[], Any]) -> threading.Timer:
    timer = threading.Timer(seconds, f)
    timer.start()
    return timer


@pytest.mark.parametrize("name", LONG)
def test_ctrl_c_ends_a_run(name: str) -> None:
    s = session(name)
    timer = later(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        s.run(None, LONG[name])
    timer.join()
    assert time.monotonic() - start < SOON
    # The session can be used again.
    assert session("add").run(None, {"x": np.zeros((1, 3), np.float32)})[0].tolist() == [[1, 2, 3]]


def test_ctrl_c_ends_a_run_with_a_profile(tmp_path: Path) -> None:
    options = ort.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    s = session("endless", options)
    timer = later(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        s.run(None, LONG["endless"])
    timer.join()
    assert Path(s.end_profiling()).exists()


def test_another_signal_handler_runs_during_a_run() -> None:
    seen: list[int] = []
    run = ort.RunOptions()

    def handler(number: int, _: Any) -> None:
        seen.append(number)
        run.terminate = True

    before = signal.signal(signal.SIGTERM, handler)
    try:
        later(0.3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(exceptions.Fail, match="cancelled"):
            session("endless").run(None, LONG["endless"], run)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("thread", ["main", "other"])
def test_terminate_ends_the_runs_of_its_options_only(name: str, thread: str) -> None:
    s, run, errors = session(name), ort.RunOptions(), []

    def work() -> None:
        try:
            s.run(None, LONG[name], run)
        except exceptions.Fail as e:
            errors.append(str(e))

    def stop() -> None:
        run.terminate = True

    timer = later(0.4, stop)
    start = time.monotonic()
    if thread == "main":
        work()
    else:
        t = threading.Thread(target=work)
        t.start()
        # A run of the main thread meanwhile is not affected.
        assert session("add").run(None, {"x": np.zeros((1, 3), np.float32)})[0].shape == (1, 3)
        t.join(SOON)
        assert not t.is_alive()
    timer.join()
    assert len(errors) == 1 and "cancelled" in errors[0]
    assert time.monotonic() - start < SOON


def test_other_python_threads_go_on_during_a_run() -> None:
    """The interpreter's lock is released."""
    run, ticks = ort.RunOptions(), []

    def tick() -> None:
        for _ in range(20):
            ticks.append(time.monotonic())
            time.sleep(0.01)
        run.terminate = True

    t = threading.Thread(target=tick)
    t.start()
    with pytest.raises(exceptions.Fail):
        session("endless").run(None, LONG["endless"], run)
    t.join()
    assert len(ticks) == 20


def test_many_threads_share_a_session() -> None:
    s = session("mlp")
    x = np.random.default_rng(1).standard_normal((32, 16)).astype(np.float32)
    want = [s.run(None, {"x": x[:n]})[0] for n in range(1, 9)]
    errors: list[Any] = []

    def work(offset: int) -> None:
        try:
            for i in range(50):
                n = (i + offset) % 8 + 1
                if not np.array_equal(s.run(["probabilities"], {"x": x[:n]})[0], want[n - 1]):
                    errors.append(n)
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


def test_asynchronous_runs() -> None:
    s, done, got = session("mlp"), threading.Event(), []
    x = np.ones((2, 16), np.float32)

    def callback(results: Any, data: Any, error: str) -> None:
        got.append((results, data, error, threading.current_thread() is threading.main_thread()))
        if len(got) == 3:
            done.set()

    s.run_async(["logits"], {"x": x}, callback, "first")
    s.run_async(None, {"x": x[:, :3]}, callback, "wrong")
    run = ort.RunOptions()
    run.terminate = True
    s.run_async(None, {"x": x}, callback, "ended", run)
    assert done.wait(SOON)
    by_name = {d: (r, e) for r, d, e, _ in got}
    assert not any(on_main for *_, on_main in got)
    assert (
        np.array_equal(by_name["first"][0][0], s.run(["logits"], {"x": x})[0]) and by_name["first"][1] == ""
    )
    assert by_name["wrong"][0] == [] and '"x"' in by_name["wrong"][1]
    assert by_name["ended"][0] == [] and "cancelled" in by_name["ended"][1]
    with pytest.raises(exceptions.InvalidArgument, match="x"):
        s.run_async(None, {}, callback, None)


def test_an_exception_of_a_callback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException | None] = []
    done = threading.Event()

    def hook(args: threading.ExceptHookArgs) -> None:
        seen.append(args.exc_value)
        done.set()

    monkeypatch.setattr(threading, "excepthook", hook)

    def callback(results: Any, data: Any, error: str) -> None:
        raise LookupError(data)

    session("add").run_async(None, {"x": np.zeros((1, 3), np.float32)}, callback, "mine")
    assert done.wait(SOON) and isinstance(seen[0], LookupError) and seen[0].args == ("mine",)


def resident() -> int:
    """Bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the system does not report resident memory")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["small", "large", "values", "texts", "errors"])
def test_ten_thousand_runs_keep_the_memory_constant(kind: str) -> None:
    s = session("strings" if kind == "texts" else "add")
    # 12 KB are copied, 240 KB are shared with NumPy.
    x = np.ones((20_000 if kind == "large" else 1000, 3), np.float32)
    words = {"words": np.array(["cat", "dog"] * 20), "suffix": np.array(["!"])}

    def once() -> None:
        if kind == "texts":
            s.run(None, words)
        elif kind == "values":
            s.run_with_ort_values(None, {"x": ort.OrtValue.ortvalue_from_numpy(x)})[0].numpy()
        elif kind == "errors":
            with pytest.raises(exceptions.InvalidArgument):
                s.run(None, {"x": x[0]})
        else:
            s.run(None, {"x": x})

    runs = 10_000 if kind in ("small", "values", "large") else 2000
    for _ in range(runs // 10):
        once()
    before = resident()
    for _ in range(runs):
        once()
    grown = resident() - before
    # A leak of every input would be 120 MB and more; the interpreter itself moves by less than this.
    assert grown < 4 << 20, f"{grown} bytes more after {runs} runs"


def test_sessions_are_released() -> None:
    def once() -> None:
        session("mlp").run(None, {"x": np.zeros((1, 16), np.float32)})

    for _ in range(30):
        once()
    before = resident() if Path("/proc/self/status").exists() else 0
    for _ in range(200):
        once()
    if before:
        assert resident() - before < 8 << 20


def test_an_interpreter_that_ends_with_live_values_does_not_hang() -> None:
    code = f"""
import threading
import numpy as np
import halcyon.onnxruntime as ort
s = ort.InferenceSession({str(MODELS / "mlp.onnx")!r}, providers=["CPUExecutionProvider"])
big = s.run(None, {{"x": np.zeros((5000, 16), np.float32)}})
b = s.io_binding()
s.run_async(None, {{"x": np.zeros((2, 16), np.float32)}}, lambda *a: None, None)
threading.Thread(target=lambda: s.run(None, {{"x": np.zeros((3, 16), np.float32)}}), daemon=True).start()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
