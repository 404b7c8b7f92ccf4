"""Language models: the texts of the Rust tests' model, streams, threads, Ctrl-C, options and embeddings."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import halcyon
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
MODELS = Path(os.environ.get("HALCYON_MODELS", ROOT.parent / "shared" / "models"))
STORIES = MODELS / "stories260k"

if not STORIES.is_dir():
    if os.environ.get("HALCYON_REQUIRE_ALL"):
        raise FileNotFoundError(STORIES)
    pytest.skip(f"{STORIES} is missing", allow_module_level=True)

GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def expected() -> dict[str, object]:
    return json.loads((STORIES / "expected.json").read_text())


@pytest.fixture(scope="module")
def model() -> halcyon.LanguageModel:
    return halcyon.LanguageModel(STORIES / "stories260k-f32.gguf", "cpu", parallel=2, context=256)


def test_the_text_is_the_known_one(model, expected):
    tokens = model.tokens(expected["prompt"])
    assert tokens == expected["prompt_ids"]
    made = model.generate(expected["prompt"], max_tokens=48, **GREEDY)
    assert made.tokens == expected["greedy_ids"][:48]
    assert expected["greedy_text"].startswith(expected["prompt"] + str(made))
    assert (made.finish_reason, made.prompt_tokens) == ("length", len(tokens))
    assert made.seconds > 0 and made.prompt_seconds > 0
    assert model.generate(tokens, max_tokens=48, **GREEDY).text == made.text
    assert model.text(made.tokens) == made.text
    assert "cpu:0" in repr(model) and model.family == "llama" and model.context == 256


def test_a_folder_is_a_model_too(expected):
    model = halcyon.LanguageModel(STORIES, "cpu", context=64, kv_dtype="f32", activations="fine")
    made = halcyon.generate(model, expected["prompt"], max_tokens=8, **GREEDY)
    assert made.tokens == expected["greedy_ids"][:8]


def test_a_stream_gives_the_same_text_in_pieces(model):
    options = {"max_tokens": 24, "seed": 7, "temperature": 0.9}
    whole = model.generate("One day", **options)
    stream = model.generate("One day", stream=True, **options)
    pieces = list(stream)
    assert "".join(map(str, pieces)) == whole.text
    assert [p.token for p in pieces] == whole.tokens
    assert [p.finish_reason for p in pieces[:-1]] == [None] * 23 and pieces[-1].finish_reason == "length"
    assert stream.generated.text == whole.text and stream.generated.seed == 7
    assert list(stream) == []


def test_seeds_are_new_and_can_be_repeated(model):
    first, second = (model.generate("One day", max_tokens=24) for _ in range(2))
    assert first.seed != second.seed and first.text != second.text
    assert model.generate("One day", max_tokens=24, seed=first.seed).text == first.text


def test_streams_in_turn_do_not_change_each_other(model):
    alone = [model.generate(p, max_tokens=12, **GREEDY).text for p in ("Once", "Lily", "Tom")]
    # One more than the cache has room for: it waits.
    streams = [model.generate(p, max_tokens=12, stream=True, **GREEDY) for p in ("Once", "Lily", "Tom")]
    texts = ["", "", ""]
    for i in [2, 0, 1] * 13:
        texts[i] += str(next(streams[i], ""))
    assert texts == alone
    # A stream that nobody reads holds up nothing.
    half = model.generate("Once", stream=True, max_tokens=20, **GREEDY)
    next(half)
    assert [g.text for g in model.generate_many(["Once", "Lily", "Tom"], max_tokens=12, **GREEDY)] == alone
    with model.generate("Lily", stream=True, max_tokens=20) as closed:
        next(closed)
    assert next(closed, None) is None and closed.generated is None


def test_threads_get_the_texts_that_they_get_alone(model):
    prompts = ["Once", "Lily", "Tom", "The cat", "A dog", "One day", "Mom", "Ben"]
    alone = [model.generate(p, max_tokens=10, **GREEDY).text for p in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: model.generate(p, max_tokens=10, **GREEDY).text, prompts * 2))
    assert together == alone * 2


def test_stop_strings_grammars_and_schemas(model):
    made = model.generate("Once upon a time", stop=" girl", **GREEDY)
    assert made.text == ", there was a little" and made.finish_reason == "stop"
    made = model.generate("Is it red? ", grammar='root ::= "Yes" | "No"', **GREEDY)
    assert made.text in ("Yes", "No") and made.finish_reason == "stop"
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    value = json.loads(str(model.generate("JSON: ", json_schema=schema, seed=1)))
    assert value in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("options", "error", "names"),
    [
        ({"heat": 1}, TypeError, "heat"),
        ({"temperature": "hot"}, TypeError, "temperature"),
        ({"max_tokens": -1}, TypeError, "max_tokens"),
        ({"top_p": 2.0}, halcyon.ArgumentError, "top-p"),
        ({"samplers": ["magic"]}, halcyon.ArgumentError, "magic"),
        ({"grammar": "root ::= ("}, halcyon.FormatError, "line"),
        ({"json_schema": {"not": {}}}, halcyon.UnsupportedError, "not"),
        ({"json_schema": {}, "grammar": "root ::= x"}, TypeError, "grammar"),
    ],
)
def test_a_wrong_option_is_named(model, options, error, names):
    with pytest.raises(error, match=names):
        model.generate("Once", **options)


def test_errors_name_the_cause(model, tmp_path):
    with pytest.raises(halcyon.HalcyonError, match=r"nowhere\.gguf"):
        halcyon.LanguageModel(tmp_path / "nowhere.gguf", "cpu")
    with pytest.raises(TypeError, match="heads"):
        halcyon.LanguageModel(STORIES, "cpu", heads=3)
    with pytest.raises(halcyon.ArgumentError, match="int3"):
        halcyon.LanguageModel(STORIES, "cpu", kv_dtype="int3")
    with pytest.raises(halcyon.UnsupportedError, match="further tokens"):
        halcyon.LanguageModel(STORIES / "stories260k-f32.gguf", "cpu", mtp=True)
    with pytest.raises(halcyon.ArgumentError, match="no tokens"):
        model.generate([])
    with pytest.raises(halcyon.ArgumentError, match="9999"):
        model.generate([9999])
    with pytest.raises(halcyon.ArgumentError, match="9999"):
        model.text([1, 9999])
    with pytest.raises(halcyon.DTypeError, match="2 axes"):
        model.generate(np.array([[1, 2, 3]]))
    assert not model.has_chat_template
    with pytest.raises(halcyon.UnsupportedError, match="chat template"):
        model.chat("hello")


def test_a_lookup_leaves_the_text_the_same(model):
    other = halcyon.LanguageModel(STORIES / "stories260k-f32.gguf", "cpu", context=256, lookup=True)
    prompt = "a b c a b c a b c"
    assert (
        other.generate(prompt, max_tokens=16, **GREEDY).text
        == model.generate(prompt, max_tokens=16, **GREEDY).text
    )
    assert other.speculation()["proposed"] > 0 and model.speculation() is None


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def test_a_chat_uses_the_template(tmp_path, expected):
    for file in STORIES.iterdir():
        if file.suffix != ".gguf":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(CHAT)
    model = halcyon.LanguageModel(tmp_path, "cpu", context=256)
    assert model.has_chat_template
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    text = "<system>be brief<user>hi<assistant>"
    assert model.chat_tokens(messages) == model.tokens(text)
    whole = model.chat(messages, max_tokens=6, **GREEDY)
    assert whole.text == model.generate(text, max_tokens=6, **GREEDY).text
    assert "".join(map(str, halcyon.chat(model, messages, max_tokens=6, stream=True, **GREEDY))) == whole.text
    assert model.chat_tokens("hi") == model.tokens("<user>hi<assistant>")
    with pytest.raises(halcyon.ArgumentError, match="role"):
        model.chat([{"content": "hi"}])


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_the_text_and_leaves_the_model_usable(model):
    before = model.generate("Once", max_tokens=8, **GREEDY).text
    stream = model.generate("Once", stream=True, ignore_eos=True)
    next(stream)
    timer = threading.Timer(0.05, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        while True:
            model.generate("Once", max_tokens=200, ignore_eos=True)
    timer.join()
    assert model.generate("Once", max_tokens=8, **GREEDY).text == before
    assert next(stream, None) is not None


def test_embeddings(tmp_path):
    embedder = halcyon.Embedder(STORIES / "stories260k-f32.gguf", "cpu", pooling="mean", normalize=True)
    texts = ["a cat", "a dog", "Once upon a time"]
    vectors = halcyon.embed(embedder, texts)
    assert vectors.shape == (3, embedder.size) and vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.array_equal(embedder.embed("a dog"), vectors[1])
    vectors[0, 0] = 2  # The array belongs to the caller.
    assert embedder.embed([]).shape == (0, embedder.size)
    with ThreadPoolExecutor(4) as pool:
        for again in pool.map(embedder.embed, [texts] * 8):
            assert np.array_equal(again[1:], vectors[1:])
    with pytest.raises(halcyon.ArgumentError, match="middle"):
        halcyon.Embedder(STORIES, "cpu", pooling="middle")


def test_embeddings_of_an_encoder():
    """The sentence encoder of the Rust tests, whose vectors are known."""
    place = os.environ.get("HALCYON_MINILM")
    if not place:
        pytest.skip("HALCYON_MINILM does not name the folder of all-MiniLM-L6-v2")
    cases = json.loads((MODELS / "minilm" / "expected.json").read_text())
    cases = cases if isinstance(cases, list) else cases["sentences"]
    texts = [c["text"] for c in cases]
    vectors = halcyon.embed(place, texts, backend="cpu")
    want = np.array([c["embedding"] for c in cases], dtype=np.float32)
    assert np.abs(vectors - want).max() < 1e-4


def test_the_import_is_light():
    code = "import halcyon, sys; print(sorted(set(sys.modules) & {'torch', 'numpy', 'asyncio'}))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "[]"
