"""What a program may do to the package: forks, threads, an early end of the interpreter, wrong arguments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import halcyon
import numpy as np
import pytest
from halcyon import array as ha

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(halcyon.__file__).parent
LIMIT = 60

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def script(code: str, **more: str) -> str:
    """Runs a program that must end by itself. Returns its output."""
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HALCYON_CONFIG": "off", **more}
    run = [
        sys.executable,
        "-X",
        "faulthandler",
        "-c",
        "import halcyon\nfrom halcyon import array as ha\n" + code,
    ]
    # A group of its own, so that a child that hangs ends too.
    process = subprocess.Popen(
        run,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"it did not end within {LIMIT} s\n{out}\n{err}")
    assert process.returncode == 0, f"exit code {process.returncode}\n{out}\n{err}"
    return out


# Matrices are large enough that their product is split over threads.
WORK = """
import os, sys
halcyon.set_default_backend("cpu")
a = ha.ones((256, 256))
b = a @ a
assert float(b[0, 0]) == 256.0
"""

CHILD = """
def child():
    # The parent's values, a computation with them, and a new device.
    assert float(b[3, 4]) == 256.0
    assert float(ha.sum(b @ a)) == 256.0 ** 4
    own = ha.ones((256, 256), device=halcyon.Backend("cpu", threads=2))
    assert float((own @ own)[1, 1]) == 256.0
"""


@forks
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_forked_child_computes_on_the_cpu(end):
    script(
        WORK
        + CHILD
        + f"""
pid = os.fork()
if pid == 0:
    child()
    {end}
assert os.waitpid(pid, 0)[1] == 0
assert float((b @ a)[0, 0]) == 65536.0
"""
    )


@forks
def test_workers_of_multiprocessing_compute():
    out = script(
        WORK
        + """
import multiprocessing
def work(i):
    return float(ha.sum(b * i))
with multiprocessing.get_context("fork").Pool(3) as pool:
    print(pool.map(work, range(6)) == [i * 256.0 ** 3 for i in range(6)])
"""
    )
    assert out.strip() == "True"


@forks
def test_forks_wait_for_threads_that_compute():
    """A lock that another thread holds at the fork would stay locked in the child."""
    script(
        WORK
        + CHILD
        + """
import threading
stop = threading.Event()
def busy():
    while not stop.is_set():
        float(ha.sum(a @ b))
threads = [threading.Thread(target=busy) for _ in range(3)]
for t in threads:
    t.start()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for t in threads:
    t.join()
"""
    )


@forks
def test_a_driver_with_threads_of_its_own_is_refused_in_a_child():
    for name in ("opencl", "webgpu"):
        if name in halcyon.devices().unavailable:
            assert not os.environ.get("HALCYON_REQUIRE_ALL"), name
            continue
        script(
            f"""
import os, sys
x = ha.ones((64, 64), device={name!r})
y = x @ x
assert float(y[0, 0]) == 64.0
pid = os.fork()
if pid == 0:
    for use in (lambda: float(y[0, 0]), lambda: float(ha.sum(x @ y)), lambda: halcyon.Backend({name!r})):
        try:
            use()
            os._exit(1)
        except halcyon.UnavailableError as e:
            assert "fork" in str(e) and "spawn" in str(e), e
    # The processor is not affected.
    z = ha.ones((64, 64), device="cpu")
    assert float((z @ z)[0, 0]) == 64.0
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert float(ha.sum(x @ y)) == 64.0 ** 4
"""
        )


@forks
def test_a_language_model_continues_in_a_child():
    models = Path(os.environ.get("HALCYON_MODELS", ROOT.parent / "shared" / "models"))
    if not (models / "stories260k").is_dir():
        assert not os.environ.get("HALCYON_REQUIRE_ALL"), models
        pytest.skip("the model is missing")
    script(
        f"""
import os
model = halcyon.LanguageModel({str(models / "stories260k" / "stories260k-q8_0.gguf")!r}, "cpu", context=128)
text = str(model.generate("Once", max_tokens=8, temperature=0))
pid = os.fork()
if pid == 0:
    os._exit(0 if str(model.generate("Once", max_tokens=8, temperature=0)) == text else 1)
assert os.waitpid(pid, 0)[1] == 0
"""
    )


def test_eight_threads_compute_the_same():
    rng = np.random.default_rng(0)
    data = [rng.standard_normal((64, 64)).astype(np.float32) for _ in range(8)]

    def one(i: int) -> np.ndarray:
        x = ha.asarray(data[i % 8], device="cpu")
        value, grad = ha.value_and_grad(lambda w: ha.sum(ha.tanh(w @ x) ** 2))(x)
        return np.asarray(grad + value)

    alone = [one(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for i, made in enumerate(pool.map(one, range(64))):
            assert np.array_equal(made, alone[i % 8]), i


def test_a_backend_is_opened_once_by_many_threads():
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: id(ha.ones(3, device="cpu").device), range(64)))
    assert len(ids) >= 1
    first, second = ha.ones(3, device="cpu"), ha.ones(3, device="cpu")
    assert np.asarray(first + second).tolist() == [2.0, 2.0, 2.0]


ENDS = {
    "values": "keep = [a @ b for _ in range(10)]; [float(k[0, 0]) for k in keep]",
    "values that nobody read": "keep = [a @ b for _ in range(10)]",
    "a cycle": "class C: pass\nc = C(); c.c = c; c.x = a @ b; c.d = halcyon.Backend('cpu')",
    "thread-local values": "import threading; t = threading.local(); t.x = a @ b",
    "exports": "import numpy as np; keep = np.from_dlpack(b); cap = b.__dlpack__()",
    "imports": "import numpy as np; n = ha.from_dlpack(np.ones((300, 300), np.float32)); keep = n @ n",
    "a compiled function": "f = ha.compile(lambda x: x @ x); keep = f(a)",
    "an exit handler": "import atexit; atexit.register(lambda: float((a @ b)[0, 0]))",
    "an exception": "import sys; sys.excepthook = lambda *e: None; sys.exit(0)",
}


@pytest.mark.parametrize("what", ENDS)
def test_the_interpreter_ends_with_live(what):
    script(WORK + ENDS[what])


@pytest.mark.parametrize(
    "work",
    [
        "float(ha.sum(a @ b))",
        "halcyon.devices()",
        "ha.value_and_grad(lambda x: ha.sum(x @ a))(b)",
        "np.asarray(b)",
        "model(np.ones((1, 1, 8, 8), np.float32))",
    ],
)
@pytest.mark.parametrize("pause", [0.02, 0.2, 0.5])
def test_the_interpreter_ends_while_daemon_threads_compute(work, pause):
    model = ROOT / "models" / "digits.onnx"
    script(
        WORK
        + f"""
import threading, time
import numpy as np
model = halcyon.load({str(model)!r}, "cpu")
def busy():
    while True:
        {work}
for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
time.sleep({pause})
"""
    )


def test_exit_handlers_compute_while_daemon_threads_do():
    out = script(
        WORK
        + """
import atexit, threading, time
def busy():
    while True:
        float(ha.sum(a @ b))
threading.Thread(target=busy, daemon=True).start()
atexit.register(lambda: print(float((a @ b)[0, 0])))
time.sleep(0.1)
"""
    )
    assert "65536.0" in out


def test_a_daemon_thread_with_a_lock_does_not_stop_exit_handlers():
    script(
        WORK
        + """
import logging, threading, time
logging.basicConfig(level=logging.INFO)
class Value:
    def __str__(self):
        return str(float(ha.sum(a @ b)))
def busy():
    while True:
        # The value is computed while the logger's lock is held, which `logging.shutdown` needs.
        logging.info("%s", Value())
threading.Thread(target=busy, daemon=True).start()
time.sleep(0.2)
# The handler of halcyon runs before logging's, as if logging had been imported first.
import atexit
atexit.unregister(logging.shutdown)
atexit._run_exitfuncs()
logging.shutdown()
"""
    )


def test_exit_handlers_that_run_last_compute_and_train():
    script(
        WORK
        + """
import atexit
from halcyon import training
def loss(params, x):
    assert float(ha.sum(a)) == 256 * 256
    return ha.mean((x @ params["w"]) ** 2)
step = training.TrainStep(loss, {"w": ha.ones((4, 2), device="cpu")}, "sgd", lr=0.1)
# Halcyon's own handler runs, as for a handler that was registered before halcyon was imported.
atexit._run_exitfuncs()
x = ha.ones((3, 4), device="cpu")
assert abs(float(step(x)) - 16) < 1e-5
assert float((a @ b)[0, 0]) > 0
"""
    )


def test_the_interpreter_ends_with_a_stream_half_read():
    models = Path(os.environ.get("HALCYON_MODELS", ROOT.parent / "shared" / "models"))
    if not (models / "stories260k").is_dir():
        assert not os.environ.get("HALCYON_REQUIRE_ALL"), models
        pytest.skip("the model is missing")
    script(
        f"""
import threading
model = halcyon.LanguageModel({str(models / "stories260k" / "stories260k-q8_0.gguf")!r}, "cpu", context=128)
stream = model.generate("Once", stream=True, ignore_eos=True)
next(stream)
def busy():
    while True:
        model.generate("Once", max_tokens=50, ignore_eos=True)
threading.Thread(target=busy, daemon=True).start()
next(stream)
"""
    )


def test_wrong_arguments_are_named():
    x = ha.ones((2, 3), device="cpu")
    with pytest.raises(halcyon.ShapeError, match=r"\[2, 3\]"):
        x @ x
    with pytest.raises((halcyon.DTypeError, TypeError), match="complex"):
        ha.asarray([1j], device="cpu")
    with pytest.raises(halcyon.MixedDevicesError, match="cpu"):
        x + ha.ones((2, 3), device=halcyon.Backend("cpu"))
    with pytest.raises(halcyon.ArgumentError, match="cudda"):
        ha.ones(3, device="cudda")
    with pytest.raises(halcyon.UnavailableError, match="no device 7"):
        halcyon.Backend("cpu:7")
    with pytest.raises(TypeError):
        halcyon.Backend("cpu", wheels=4)
