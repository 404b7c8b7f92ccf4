"""Wrong input: each public function raises a typed exception whose text names what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import halcyon
import numpy as np
import pytest
from halcyon import array as ha
from halcyon import training

ROOT = Path(__file__).resolve().parents[3]
DIGITS = str(ROOT / "models" / "digits.onnx")
IMAGE = np.ones((1, 1, 8, 8), np.float32)

Case = tuple[Callable[[], Any], type[Exception], str]


def session() -> halcyon.InferenceSession:
    return halcyon.InferenceSession(DIGITS, providers=["CPUExecutionProvider"])


def step(loss: Any = None, **options: Any) -> training.TrainStep:
    own = loss or (lambda p: ha.sum(p["w"] ** 2))
    return training.TrainStep(own, {"w": ha.ones(3, device="cpu")}, "sgd", lr=0.1, **options)


def assign(value: Any) -> None:
    step().params = value


BACKENDS: dict[str, Case] = {
    "a default that is a number": (lambda: halcyon.set_default_backend(3), halcyon.DTypeError, "int"),
    "a default that is None": (lambda: halcyon.set_default_backend(None), halcyon.DTypeError, "NoneType"),
    "a device without number": (lambda: halcyon.select("cpu:x"), halcyon.ArgumentError, "cpu:x"),
    "negative memory": (lambda: halcyon.select("cpu", memory=-1), ValueError, "memory: -1"),
    "no threads": (lambda: halcyon.Backend("cpu", threads=0), halcyon.ArgumentError, "thread"),
}

MODELS: dict[str, Case] = {
    "no backend": (lambda: halcyon.load(DIGITS, 3), halcyon.DTypeError, "int is no backend"),
    "no path": (lambda: halcyon.load(None), TypeError, "NoneType"),
    "an empty path": (lambda: halcyon.load(""), halcyon.FileError, "empty"),
    "sizes in a list": (lambda: halcyon.load(DIGITS, "cpu", sizes=[3]), halcyon.DTypeError, "list"),
    "a size of no dimension": (
        lambda: halcyon.load(DIGITS, "cpu", sizes={"rows": 3}),
        halcyon.ArgumentError,
        '"rows"; they are batch',
    ),
    "inputs in a list": (lambda: halcyon.load(DIGITS, "cpu").run([3]), halcyon.DTypeError, "list"),
    "fit of a number of inputs": (lambda: halcyon.fit(DIGITS, 3, "cpu"), halcyon.DTypeError, "int"),
    "fit of a text as sizes": (
        lambda: halcyon.fit(DIGITS, {"image": "abc"}, "cpu"),
        halcyon.ArgumentError,
        "'abc' for \"image\"",
    ),
    "fit of negative sizes": (
        lambda: halcyon.fit(DIGITS, {"image": (-1, 1, 8, 8)}, "cpu"),
        halcyon.ArgumentError,
        r"\(-1, 1, 8, 8\)",
    ),
    "fit of a language model in memory": (lambda: halcyon.fit(b"GGUF1234"), halcyon.UnsupportedError, "path"),
    "fit of no file": (lambda: halcyon.fit("no.gguf", None, "cpu"), halcyon.FileError, "no.gguf"),
    "fit of no batch": (lambda: halcyon.fit("no.gguf", batch=0), halcyon.ArgumentError, "batch=0"),
    "fit of a text as context": (lambda: halcyon.fit("no.gguf", context="x"), halcyon.ArgumentError, "'x'"),
    "a device that the report lacks": (lambda: halcyon.fit(DIGITS, None, "cpu")["x"], KeyError, "cpu:0"),
}

SESSIONS: dict[str, Case] = {
    "options": (lambda: halcyon.InferenceSession(DIGITS, {}), halcyon.DTypeError, "dict"),
    "providers": (lambda: halcyon.InferenceSession(DIGITS, None, 3), halcyon.ArgumentError, "3"),
    "options of providers": (
        lambda: halcyon.InferenceSession(DIGITS, None, ["CPUExecutionProvider"], 3),
        halcyon.ArgumentError,
        "provider_options: 3",
    ),
    "one name of an output": (lambda: session().run("y", {"image": IMAGE}), halcyon.DTypeError, "'y'"),
    "outputs by number": (lambda: session().run([0], {"image": IMAGE}), halcyon.DTypeError, r"\[0\]"),
    "inputs by number": (
        lambda: session().run(None, {"image": IMAGE, 3: IMAGE}),
        halcyon.DTypeError,
        "3 is not the name",
    ),
    "options of a run": (lambda: session().run(None, {"image": IMAGE}, 3), halcyon.DTypeError, "int"),
    "no inputs": (lambda: session().run_with_ort_values(None, 3), halcyon.DTypeError, "int"),
    "no callback": (
        lambda: session().run_async(None, {"image": IMAGE}, None, None),
        halcyon.DTypeError,
        "NoneType",
    ),
    "no binding": (lambda: session().run_with_iobinding(3), halcyon.ArgumentError, "io_binding"),
    "a bound number": (
        lambda: session().io_binding().bind_ortvalue_output("probabilities", 3),
        halcyon.ArgumentError,
        "int is no OrtValue",
    ),
    "an update by a number": (
        lambda: halcyon.OrtValue.ortvalue_from_numpy(IMAGE).update_inplace(3),
        halcyon.ArgumentError,
        "int",
    ),
    "no DLPack": (lambda: halcyon.OrtValue.from_dlpack(3), halcyon.DTypeError, "__dlpack__"),
    "a seed": (lambda: halcyon.set_seed("x"), halcyon.DTypeError, "str"),
}

TRAINING: dict[str, Case] = {
    "a loss that is no function": (lambda: step(loss=3), halcyon.DTypeError, "int"),
    "a loss that returns a number": (lambda: step(loss=lambda p: 3)(), halcyon.DTypeError, "returned a int"),
    "a loss that returns numbers": (
        lambda: step(loss=lambda p: [3])(),
        halcyon.DTypeError,
        "a list with int",
    ),
    "a schedule": (lambda: step(schedule=3), halcyon.DTypeError, "schedule"),
    "a set in a schedule": (lambda: step(schedule={"kind": {1}}), halcyon.ArgumentError, "schedule"),
    "other parameters": (lambda: assign({"v": ha.ones(3, device="cpu")}), halcyon.ArgumentError, "v"),
    "no parameters": (lambda: assign({}), halcyon.ArgumentError, "are w"),
    "metrics": (lambda: step().save("x", metrics=3), halcyon.DTypeError, "metrics"),
    "the best": (lambda: step().save("x", best=3), halcyon.DTypeError, "smallest"),
    "metadata": (lambda: training.save_weights("x", {}, 3), halcyon.DTypeError, "metadata"),
}

ARRAYS: dict[str, Case] = {
    "a text to fill with": (lambda: ha.full(3, "a"), halcyon.DTypeError, "'a' is no number"),
    "a count": (lambda: ha.linspace(0, 1, 1.5), halcyon.DTypeError, "num"),
    "a shape": (lambda: ha.reshape(ha.ones(3), "a"), halcyon.DTypeError, "reshape"),
    "a shift": (lambda: ha.roll(ha.ones(3), "a"), halcyon.DTypeError, "shift"),
    "a number to join": (lambda: ha.concat(3), halcyon.DTypeError, "concat"),
    "an array to stack": (lambda: ha.stack(ha.ones(3)), halcyon.DTypeError, "stack"),
    "samples": (lambda: ha.fft.fftfreq("a"), halcyon.DTypeError, "fftfreq"),
    "a gradient of no function": (lambda: ha.grad(3), halcyon.DTypeError, "int"),
    "a gradient of no argument": (lambda: ha.grad(ha.sum, "a"), halcyon.DTypeError, "argnums"),
    "no function to compile": (lambda: ha.compile(3), halcyon.DTypeError, "int"),
    "an operand of NumPy": (lambda: ha.ones(3) + np.ones(3), halcyon.DTypeError, "NumPy.*asarray"),
    "a first operand of NumPy": (lambda: np.ones(3) + ha.ones(3), halcyon.DTypeError, "NumPy.*asarray"),
    "a comparison with NumPy": (lambda: ha.ones(3) == np.ones(3), halcyon.DTypeError, "NumPy.*asarray"),
    "a matrix of NumPy": (lambda: np.ones(3) @ ha.ones(3), halcyon.DTypeError, "NumPy.*asarray"),
    "a value in a compiled function": (
        lambda: ha.compile(lambda x: x if ha.sum(x) > 0 else -x)(ha.ones(3)),
        halcyon.ArgumentError,
        "traced.*halcyon.array.where",
    ),
}

ALL = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("backends", BACKENDS),
        ("models", MODELS),
        ("sessions", SESSIONS),
        ("training", TRAINING),
        ("arrays", ARRAYS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_wrong_input_is_named(name: str) -> None:
    call, kind, text = ALL[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.fixture(scope="module")
def model() -> halcyon.LanguageModel:
    return halcyon.LanguageModel(stories(), "cpu", context=64)


def stories() -> str:
    models = Path(os.environ.get("HALCYON_MODELS", ROOT.parent / "shared" / "models"))
    path = models / "stories260k" / "stories260k-q8_0.gguf"
    if not path.is_file():
        assert not os.environ.get("HALCYON_REQUIRE_ALL"), path
        pytest.skip("the model is missing")
    return str(path)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("parallel", 0, "at least 1"),
        ("chunk", 0, "at least 1"),
        ("context", -1, "at least 0"),
        ("draft_max", 16, "1 to 15"),
        ("adapters", 3, "list of paths"),
        ("adapters", [("a",)], "list of paths"),
        ("kv_dtype", "f8", "q8_0"),
    ],
)
def test_wrong_options_of_language_models_are_named(option: str, value: Any, text: str) -> None:
    with pytest.raises((halcyon.ArgumentError, halcyon.DTypeError), match=f"{option}.*{text}"):
        halcyon.LanguageModel(stories(), "cpu", **{option: value})


@pytest.mark.parametrize("prompt", [3, None, b"abc", [1.5], [-1], [1 << 40], ["a"], [10**6]])
def test_wrong_prompts_are_named(model: halcyon.LanguageModel, prompt: Any) -> None:
    with pytest.raises((halcyon.ArgumentError, halcyon.DTypeError), match="token"):
        model.generate(prompt, max_tokens=1)


def test_wrong_messages_and_schemas_are_named(model: halcyon.LanguageModel) -> None:
    for messages, text in ((3, "3 is no message"), ([], "no messages"), (["a", 3], "3 is no message")):
        with pytest.raises(halcyon.ArgumentError, match=text):
            model.chat(messages)
    with pytest.raises(halcyon.ArgumentError, match="json_schema"):
        model.generate("a", json_schema={1})
    with pytest.raises(halcyon.DTypeError, match="str"):
        model.generate_many("abc")
    with pytest.raises(halcyon.ArgumentError, match="no token id"):
        model.text([-1])
    same = [model.generate(p, max_tokens=4, temperature=0) for p in ([1, 2], np.array([1, 2]))]
    assert str(same[0]) == str(same[1])
