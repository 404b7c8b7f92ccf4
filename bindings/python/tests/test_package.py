"""The package as a whole: reports, the command line, child processes, and the code of the pages."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import halcyon
import pytest
from halcyon import _program

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(halcyon.__file__).parent
PACKAGE_README = ROOT / "bindings" / "python" / "README.md"
LIMIT = 120
#: Pages compile models of PyTorch, which takes a minute on a busy machine.
PAGE_LIMIT = 900

posix = pytest.mark.skipif(os.name == "nt", reason="Windows has no signals for one process")


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "HALCYON_CONFIG": "off", **more}


def command(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halcyon", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**more),
        cwd=ROOT,
    )


def python(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env=environment(**more),
        cwd=ROOT,
    )


def test_devices():
    found = halcyon.devices()
    cpu = next(d for d in found if d.id == "cpu:0")
    assert cpu.backend == "cpu" and cpu.index == 0 and not cpu.software
    assert cpu.total_memory > cpu.free_memory > 0
    assert len(found) == len(list(found)) and found[0].id in repr(found) and found.recommended
    assert cpu.name in repr(found) and cpu.name in found.summary()
    page = found._repr_html_()
    assert "<table>" in page and "cpu:0" in page
    for name, reason in found.unavailable.items():
        assert f"\n{name}" in repr(found) and reason
    data = json.loads(json.dumps(found.to_dict()))
    assert [d["id"] for b in data["backends"] for d in b["devices"]] == [d.id for d in found]
    told = json.loads(command("devices", "--json").stdout)
    assert [b["id"] for b in told] == [b["id"] for b in data["backends"]]
    assert cpu.open().id == "cpu:0"


def test_html_is_escaped():
    facts = dict(halcyon.devices()[0].to_dict(), name="<script>")
    backend = {"id": "x", "available": True, "devices": [facts], "brief": None, "reason": None}
    page = halcyon.Devices({"backends": [backend], "recommended": None, "text": ""})._repr_html_()
    assert "&lt;script&gt;" in page and "<script>" not in page


def test_select():
    chosen = halcyon.select("cpu")
    assert chosen.backend.id == "cpu:0" == chosen.device.id
    assert "requested" in chosen.rule and chosen.rejected == {}
    order = halcyon.select(policy="cpu,webgpu")
    assert order.device.id == "cpu:0" and "cuda" in order.rejected
    assert "not cuda: the order does not contain it" in repr(order)
    assert "cuda" in order._repr_html_() and json.loads(json.dumps(order.to_dict()))["rule"] == order.rule
    with pytest.raises(halcyon.OutOfMemoryError, match="cpu:0"):
        halcyon.select("cpu", memory=1 << 60)
    with pytest.raises(halcyon.ArgumentError, match="cudda"):
        halcyon.select("cudda")
    with pytest.raises(halcyon.ArgumentError, match="sometimes"):
        halcyon.select("cpu", fallback="sometimes")


def test_everyone_who_names_a_device_shares_it():
    from halcyon import array as ha

    chosen = halcyon.select("cpu")
    made = ha.ones(3, device=chosen.backend) + ha.ones(3, device="cpu")
    opened = next(d for d in halcyon.devices() if d.id == "cpu:0").open()
    assert (made + ha.ones(3, device=opened)).tolist() == [3, 3, 3]
    other = halcyon.Backend("cpu", threads=1)
    with pytest.raises(halcyon.MixedDevicesError, match="set_default_backend") as e:
        made + ha.ones(3, device=other)
    assert "&" not in str(e.value) and "clone" not in str(e.value)
    before = halcyon.default_backend()
    try:
        halcyon.set_default_backend(other)
        both = ha.ones(3, device=halcyon.select("cpu").backend) + ha.ones(3) + ha.ones(3, device="cpu")
        assert both.tolist() == [3, 3, 3]
    finally:
        halcyon.set_default_backend(before)
    for call in (
        lambda: halcyon.Backend("cpu", threads=-1),
        lambda: halcyon.Backend("cpu", memory_limit=-1),
        lambda: halcyon.select("cpu", memory=-1),
        lambda: halcyon.doctor("cpu", timeout=-1),
    ):
        with pytest.raises(halcyon.ArgumentError, match="-1"):
            call()


def test_doctor():
    report = halcyon.doctor("cpu")
    assert report.exit_code in (0, 1) and report.failures == []
    assert "product" in repr(report) and "<table>" in report._repr_html_()
    sections = report.to_dict()["sections"]
    assert [s["id"] for s in sections] == ["host", "cpu"]
    kernel = next(line for line in sections[1]["lines"] if line["check"] == "kernel")
    assert kernel["status"] == "pass"
    with pytest.raises(halcyon.ArgumentError, match="cudda"):
        halcyon.doctor("cudda")
    # The noop device computes nothing.
    failed = halcyon.doctor("noop")
    assert failed.exit_code == 2 and any("kernel" in f for f in failed.failures) and not failed.ok


def test_the_command_line():
    version = command("--version")
    assert (version.returncode, version.stdout) == (0, f"halcyon {halcyon.__version__}\n")
    usage = command("devises")
    assert usage.returncode == 2 and "devices" in usage.stderr
    run = command("run", "models/digits.onnx", "--input", "models/digit-7.png", "--top-k", "1")
    assert run.returncode == 0 and run.stdout.split()[:2] == ["1.", "7"]
    missing = command("run", "nowhere.onnx", "--json")
    assert missing.returncode == 1 and "nowhere.onnx" in json.loads(missing.stdout)["error"]["message"]


def test_the_command_line_starts_its_children():
    checked = command("doctor", "--backend", "cpu", "--json")
    assert checked.returncode in (0, 1), checked.stderr
    assert [s["id"] for s in json.loads(checked.stdout)["sections"]] == ["host", "cpu"]
    # Kernels are measured in a child.
    tuned = command("tune", "--backend", "cpu", "--json")
    assert tuned.returncode == 0, tuned.stderr


def test_the_script_is_the_command_line(tmp_path):
    code = "import sys; sys.argv[0] = 'halcyon'; from halcyon.__main__ import main; sys.exit(main())"
    out = python(code, "devices", "--json")
    assert out.returncode == 0 and "cpu" in [b["id"] for b in json.loads(out.stdout)]


@posix
def test_ctrl_c_ends_a_command():
    with subprocess.Popen(
        [sys.executable, "-m", "halcyon", "bench", "peak"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as process:
        time.sleep(1.0)
        assert process.poll() is None, process.communicate()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (-signal.SIGINT, 130)


def test_the_program_for_children(monkeypatch):
    executable, arguments = _program.program()
    assert executable == sys.executable
    told = subprocess.run(
        [executable, *arguments, "--version"], capture_output=True, text=True, timeout=LIMIT
    )
    assert told.stdout == f"halcyon {halcyon.__version__}\n"
    for other in (None, "", "/usr/bin/blender", "/nowhere/python3"):
        monkeypatch.setattr(sys, "executable", other)
        assert _program.program() is None
    with pytest.raises(halcyon.UnavailableError, match="halcyon doctor"):
        halcyon.doctor()
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert _program.program() is None


BAD = "__attribute__((constructor)) static void fail(void) { __builtin_trap(); }"


@pytest.fixture(scope="module")
def bad_driver(tmp_path_factory) -> str:
    """A library that ends the process that loads it."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("no C compiler builds the library")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "bad.c").write_text(BAD)
    library = folder / "libbad.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "bad.c"], check=True, timeout=LIMIT)
    return str(library)


LIST = """import halcyon
print(halcyon.devices(refresh=True).unavailable.get("opencl"), "cpu:0" in repr(halcyon.devices()))
"""


def test_a_driver_that_crashes_does_not_end_the_program(bad_driver, tmp_path):
    out = python(LIST, HALCYON_OPENCL_LIBRARY=bad_driver, XDG_CACHE_HOME=str(tmp_path))
    assert out.returncode == 0, out.stderr
    assert "signal" in out.stdout and out.stdout.strip().endswith("True")


def test_children_need_no_search_path(bad_driver, tmp_path):
    """The parent finds the package by a path that its children do not have."""
    code = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n" + LIST
    env = environment(HALCYON_OPENCL_LIBRARY=bad_driver, XDG_CACHE_HOME=str(tmp_path))
    del env["PYTHONPATH"]
    (tmp_path / "json.py").write_text("raise SystemExit('the working directory is searched')")
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, timeout=LIMIT, env=env, cwd="/")
    assert out.returncode == 0 and "signal" in out.stdout, out.stderr


@posix
def test_an_interpreter_that_does_not_work_is_not_a_failed_driver(tmp_path):
    """Probes then run in the program's own process, and nothing is remembered."""
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    code = f"import sys; sys.executable = {str(fake)!r}; import halcyon; print(halcyon.devices(refresh=True))"
    out = python(code, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert out.returncode == 0 and "cpu:0" in out.stdout and "exit status: 3" not in out.stdout, out.stderr


PAGES = [ROOT / "README.md", PACKAGE_README, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(path: Path) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path):
    code = blocks(page)
    if any(re.search(r"^(import|from) torch\b", block, re.MULTILINE) for block in code):
        pytest.importorskip("torch.nn")  # `torch` alone is also the folder of tests
    if any("import onnx\n" in block or ", onnx\n" in block for block in code):
        pytest.importorskip("onnx")
    stories = os.environ.get("HALCYON_MODELS", str(ROOT.parent / "shared" / "models")) + "/stories260k"
    if not Path(stories).is_dir():
        assert not os.environ.get("HALCYON_REQUIRE_ALL"), stories
        code = [block for block in code if "stories.gguf" not in block]
    else:
        (tmp_path / "stories.gguf").symlink_to(Path(stories) / "stories260k-q8_0.gguf")
    for name in ("models", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / "page.py"
    script.write_text("\n".join(code))
    run = [sys.executable, str(script)]
    out = subprocess.run(
        run, capture_output=True, text=True, timeout=PAGE_LIMIT, env=environment(), cwd=tmp_path
    )
    assert out.returncode == 0, out.stderr


def test_versions_agree():
    cargo = (ROOT / "Cargo.toml").read_text()
    workspace = re.search(r'^\[workspace\.package\]\n(?:.+\n)*?version = "(.+?)"', cargo, re.MULTILINE)
    assert workspace is not None and workspace[1] == halcyon.__version__
