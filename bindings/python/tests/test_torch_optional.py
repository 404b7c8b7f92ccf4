"""PyTorch is optional: the package works without it, and `halcyon.torch` says what to install."""

import subprocess
import sys

WITHOUT = """
import inspect
import sys
sys.modules["torch"] = None  # importing it raises ImportError
import halcyon
try:
    import halcyon.torch
except ImportError as error:
    assert isinstance(error, halcyon.HalcyonError)
    print(error)
else:
    raise SystemExit("it was imported")
assert not hasattr(halcyon, "torch")
names = dict(inspect.getmembers(halcyon))
assert "array" in names and "torch" not in names
"""


def test_s0_08_without_torch_the_error_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pip install torch" in done.stdout


def test_importing_halcyon_does_not_import_torch():
    code = "import sys, halcyon; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
