"""Programs written for onnxruntime, and the comparison of their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
MODELS = HERE / "models"
PROGRAMS = HERE / "programs"
RESULTS = PROGRAMS / "results"
#: The import that is changed.
THEIRS, OURS = "onnxruntime", "halcyon.onnxruntime"


def programs() -> list[str]:
    return sorted(p.stem for p in PROGRAMS.glob("*.py") if p.stem not in ("store", "__init__"))


def run(name: str, module: str) -> dict[str, Any]:
    """Runs a program with another import, and returns its results."""
    source = (PROGRAMS / f"{name}.py").read_text()
    changed = source.replace(f"import {THEIRS} as", f"import {module} as").replace(
        f"from {THEIRS}.", f"from {module}."
    )
    if module != THEIRS:
        assert changed != source
    found: dict[str, Any] = {"__name__": "__main__"}
    arguments = sys.argv
    sys.argv = [name, str(MODELS)]
    try:
        exec(compile(changed, f"{name}.py", "exec"), found)
    finally:
        sys.argv = arguments
    results: dict[str, Any] = found["results"]
    return results


def plain(value: Any) -> Any:
    """A result as JSON stores it; arrays stay."""
    if isinstance(value, np.ndarray):
        return value
    return json.loads(json.dumps(value))


def compare(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert list(ours) == list(theirs)
    for key, want in theirs.items():
        got, want = plain(ours[key]), plain(want)
        if isinstance(want, np.ndarray):
            assert isinstance(got, np.ndarray), key
            assert (got.dtype, got.shape) == (want.dtype, want.shape), key
            np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance, err_msg=key)
        else:
            assert got == want, key


def store(name: str, results: dict[str, Any]) -> None:
    RESULTS.mkdir(exist_ok=True)
    arrays = {k: v for k, v in results.items() if isinstance(v, np.ndarray)}
    others = {k: v for k, v in results.items() if not isinstance(v, np.ndarray)}
    order = json.dumps({"order": list(results), "others": others})
    np.savez_compressed(RESULTS / f"{name}.npz", allow_pickle=False, **{**arrays, "": np.array(order)})


def stored(name: str) -> dict[str, Any]:
    with np.load(RESULTS / f"{name}.npz") as z:
        facts = json.loads(str(z[""]))
        return {k: facts["others"][k] if k in facts["others"] else z[k] for k in facts["order"]}


def main() -> None:
    """Stores the results of onnxruntime."""
    for name in programs():
        store(name, run(name, THEIRS))


if __name__ == "__main__":
    main()
