"""Programs for onnxruntime give the same results with only their imports changed."""

from __future__ import annotations

import warnings

import pytest
import session_cases as cases


@pytest.mark.parametrize("name", cases.programs())
def test_a_program_gives_what_onnxruntime_gave(name: str) -> None:
    with warnings.catch_warnings():
        # A provider that the machine lacks is no reason to warn about in these programs.
        warnings.simplefilter("ignore")
        ours = cases.run(name, cases.OURS)
    cases.compare(ours, cases.stored(name))


@pytest.mark.parametrize("name", cases.programs())
def test_the_stored_results_are_those_of_onnxruntime(name: str) -> None:
    pytest.importorskip("onnxruntime")
    cases.compare(cases.run(name, cases.THEIRS), cases.stored(name))


def test_the_stored_models_are_those_of_their_script() -> None:
    pytest.importorskip("onnx")
    import importlib.util

    spec = importlib.util.spec_from_file_location("make", cases.MODELS / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert sorted(module.MAKERS) == sorted(p.stem for p in cases.MODELS.glob("*.onnx"))
    for name, make in module.MAKERS.items():
        made = make().SerializeToString(deterministic=True)
        assert made == (cases.MODELS / f"{name}.onnx").read_bytes(), name


def test_there_are_ten_programs_that_a_wrong_result_fails() -> None:
    assert len(cases.programs()) >= 10
    results = cases.stored("batches")
    changed = {**results, "confidences": results["confidences"] + 1e-3}
    with pytest.raises(AssertionError):
        cases.compare(changed, results)
    with pytest.raises(AssertionError):
        cases.compare({**results, "labels": results["labels"][::-1]}, results)
