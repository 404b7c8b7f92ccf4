"""Runs the code blocks of the documents that the contract comes from, where they are present.

A block runs as it is printed, but for its import lines. It runs statement by statement: a statement that asks
for a device which the machine lacks must raise the error that names it, and the next statement runs.
"""

import ast
import re
from pathlib import Path

import pytest
from halcyon.torch import BackendError, BackendErrorKind

_FOLDER = Path(__file__).resolve().parents[5] / "shared" / "seeds"
_IMPORTS = (
    (r"^from kernel_pytorch\.core\.config import (\w+)$", r"from halcyon.torch import BackendConfig as \1"),
    (r"^from (?:backend|\w+\.backends(?:\.\w+)?) import", "from halcyon.torch import"),
)


def document(title):
    """The text of the document with a title; skips the test where it is missing."""
    for path in sorted(_FOLDER.glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        if text.startswith(title):
            return text
    pytest.skip(f"the document {title!r} is not in {_FOLDER}")


def blocks(title):
    """The Python blocks of a document, with its import lines replaced."""
    found = re.findall(r"^```python\n(.*?)^```", document(title), re.DOTALL | re.MULTILINE)
    assert found, title
    for pattern, instead in _IMPORTS:
        found = [re.sub(pattern, instead, block, flags=re.MULTILINE) for block in found]
    assert not any("kernel_pytorch" in b or "torchbridge" in b for b in found)
    return found


def run(block, names):
    """Runs a block with some names defined, and adds its own. Returns the devices that are missing."""
    missing = []
    for statement in ast.parse(block).body:
        code = compile(ast.Module([statement], []), "<document>", "exec")
        try:
            exec(code, names)
        except BackendError as error:
            assert error.kind in (BackendErrorKind.MISSING_RUNTIME, BackendErrorKind.MISMATCH), error
            missing.append(str(error).split(":")[0])
    return missing
