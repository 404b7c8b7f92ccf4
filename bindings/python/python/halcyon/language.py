"""Language models: texts, chats and embeddings.

>>> model = halcyon.LanguageModel("stories.gguf")           # doctest: +SKIP
>>> print(model.generate("Once upon a time", max_tokens=32))  # doctest: +SKIP
>>> for piece in model.generate("Once", stream=True):       # doctest: +SKIP
...     print(piece, end="", flush=True)

Models are GGUF files, or folders with ``config.json`` and safetensors files. Threads may use one model at the
same time: with ``parallel=N``, up to N texts are computed in the same steps.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from halcyon import _native
from halcyon._default import BackendLike, resolve_backend
from halcyon._errors import ArgumentError, DTypeError
from halcyon._native import Backend, Generation, Piece, TextStream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Unpack

__all__ = [
    "Embedder",
    "GenerateOptions",
    "Generation",
    "LanguageModel",
    "Message",
    "Piece",
    "TextStream",
    "chat",
    "embed",
    "generate",
]

PathLike = str | os.PathLike[str]
#: A message of a chat: a text of the user, or a mapping with ``role`` and ``content``.
Message = str | Mapping[str, Any]
#: Adapters (LoRA): a path, or paths with factors.
Adapters = PathLike | Sequence[PathLike | tuple[PathLike, float]] | None
#: A prompt: a text, or token ids.
Prompt = str | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Options of a generation. Those that are not given have llama.cpp's defaults."""

    max_tokens: int | None
    """The most tokens. Default: until the model ends the text or the context is full."""
    temperature: float
    """Divides the logits; 0 always takes the most probable token. Default: 0.8."""
    top_k: int
    """Draws only among the k most probable tokens; 0: all. Default: 40."""
    typical_p: float
    """Draws only among typical tokens that together reach this probability; 1: all. Default: 1."""
    top_p: float
    """Draws only among the most probable tokens that together reach this probability. Default: 0.95."""
    min_p: float
    """Draws only among tokens at least this factor as probable as the most probable one. Default: 0.05."""
    repeat_penalty: float
    """Makes tokens less probable that occurred; 1: no change. Default: 1."""
    presence_penalty: float
    """Subtracted from the logits of tokens that occurred. Default: 0."""
    frequency_penalty: float
    """Subtracted from the logits of tokens for each time that they occurred. Default: 0."""
    repeat_last: int
    """The number of last tokens to which penalties apply. Default: 64."""
    seed: int | None
    """Seed of the draws. Default: a new one, which ``Generation.seed`` gives."""
    samplers: Sequence[str] | None
    """The steps in their order: penalties, top_k, typ_p, top_p, min_p, temperature. Default: all."""
    stop: str | Sequence[str]
    """Texts that end the generation. They are not part of the result."""
    ignore_eos: bool
    """Whether tokens that end a text are ordinary tokens. Default: False."""
    grammar: str | None
    """Only texts of this grammar, in GBNF or Lark."""
    json_schema: str | Mapping[str, Any] | bool | None
    """Only JSON that satisfies this schema."""


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the native module reads them, which refuses unknown ones."""
    options = dict(given)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    schema = options.get("json_schema")
    if schema is not None and not isinstance(schema, str):
        options["json_schema"] = _json("json_schema", schema)
    return options


def _json(what: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as e:
        raise ArgumentError(f"{what}: {e}") from None


def _token_ids(what: str, tokens: Any) -> list[int]:
    """Token ids, checked. The native module checks the vocabulary."""
    if isinstance(tokens, (str, bytes, bytearray)) or not isinstance(tokens, Iterable):
        raise DTypeError(f"{what} is a {type(tokens).__name__}; give a text, or a sequence of token ids")
    axes = getattr(tokens, "ndim", 1)
    if axes != 1:
        raise DTypeError(f"{what}: an array of {axes} axes; give one sequence of token ids")
    found = list(tokens)
    wrong = next((t for t in found if not hasattr(t, "__index__") or not 0 <= t < 1 << 32), None)
    if wrong is not None:
        raise ArgumentError(f"{what}: {wrong!r} is no token id")
    return found


def _least(what: str, value: Any, least: int, most: int | None = None) -> None:
    """Refuses numbers outside of a range. The native module refuses other types."""
    if isinstance(value, int) and (value < least or (most is not None and value > most)):
        end = f"at least {least}" if most is None else f"{least} to {most}"
        raise ArgumentError(f"{what}: {value}: expected {end}")


def _adapters(given: Adapters) -> list[tuple[str, float]]:
    if given is None:
        return []
    if isinstance(given, (str, os.PathLike)):
        return [(os.fspath(given), 1.0)]
    try:
        pairs = [one if isinstance(one, tuple) else (one, 1.0) for one in given]
        return [(os.fspath(path), float(factor)) for path, factor in pairs]
    except (TypeError, ValueError):
        raise DTypeError(
            f"adapters: {given!r}: expected a path, or a list of paths or (path, factor)"
        ) from None


def _warn(texts: Iterable[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=3)


class LanguageModel:
    """A language model on a backend.

    Ctrl-C between two tokens ends the text with ``KeyboardInterrupt``; the model can be used again.
    """

    def __init__(
        self,
        path: PathLike,
        backend: BackendLike = None,
        *,
        context: int | None = None,
        parallel: int = 1,
        chunk: int = 512,
        kv_dtype: str = "f16",
        activations: Literal["fast", "fine"] = "fast",
        adapters: Adapters = None,
        lookup: bool = False,
        mtp: bool = False,
        draft_max: int = 7,
    ) -> None:
        """Loads a GGUF file or a folder.

        Args:
            path: The file or folder.
            backend: An open backend or its name. Default: the default backend.
            context: The most positions of a text with its prompt; 0: as many as the model was made for.
                Default: the same, but at most 4096.
            parallel: How many texts the cache has room for. Further ones wait.
            chunk: The most tokens that one step computes of a prompt.
            kv_dtype: Type of cached keys and values: f32, f16, bf16 or q8_0.
            activations: How the CPU rounds activations in products with quantised weights: to 8 bits
                (fast) or to 15 bits (fine).
            adapters: LoRA adapters.
            lookup: Whether tokens are proposed that followed the last ones earlier in the text. The text
                stays the same.
            mtp: Whether the model's own layer for further tokens proposes them. The text stays the same.
            draft_max: The most tokens that are proposed at once, up to 15.
        """
        _least("context", context, 0)
        _least("parallel", parallel, 1)
        _least("chunk", chunk, 1)
        _least("draft_max", draft_max, 1, 15)
        load = {
            "context": context,
            "parallel": parallel,
            "chunk": chunk,
            "kv_dtype": kv_dtype,
            "activations": activations,
            "adapters": _adapters(adapters),
            "lookup": lookup,
            "mtp": mtp,
            "draft_max": draft_max,
        }
        self._native = _native.LanguageModel(os.fspath(path), resolve_backend(backend), load)
        _warn(self._native.warnings)

    @property
    def backend(self) -> Backend:
        """The backend of the weights."""
        return self._native.backend

    @property
    def family(self) -> str:
        """The model's architecture, such as ``llama``."""
        return self._native.family

    @property
    def context(self) -> int:
        """The most positions of a text with its prompt."""
        return self._native.context

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`chat` works."""
        return self._native.has_chat_template

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with the special tokens that begin one."""
        return self._native.tokens(text)

    def text(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens."""
        return self._native.text(_token_ids("tokens", tokens), skip_special)

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[False] = False, **options: Unpack[GenerateOptions]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompt, *, stream: Literal[True], **options: Unpack[GenerateOptions]
    ) -> TextStream: ...

    def generate(
        self, prompt: Prompt, *, stream: bool = False, **options: Unpack[GenerateOptions]
    ) -> Generation | TextStream:
        """Continues a text, or token ids.

        Args:
            prompt: The text or the token ids.
            stream: Whether the result is an iterator of pieces, which computes one token after another.
            options: See :class:`GenerateOptions`.

        Returns:
            A :class:`Generation`, whose ``str()`` is the text; with ``stream``, an iterator of pieces.
        """
        tokens = self.tokens(prompt) if isinstance(prompt, str) else _token_ids("the prompt", prompt)
        return self._run(tokens, stream, options)

    def generate_many(
        self, prompts: Sequence[Prompt], **options: Unpack[GenerateOptions]
    ) -> list[Generation]:
        """Continues several texts, ``parallel`` of them in the same steps. Each is the same as alone.

        Without ``seed``, each text has a seed of its own.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise DTypeError(f"generate_many: prompts is a {type(prompts).__name__}; give a list of prompts")
        streams = [self.generate(prompt, stream=True, **options) for prompt in prompts]
        return [_finished(s) for s in streams]

    @overload
    def chat(
        self,
        messages: Message | Sequence[Message],
        *,
        thinking: bool | None = None,
        stream: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Message | Sequence[Message],
        *,
        thinking: bool | None = None,
        stream: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> TextStream: ...

    def chat(
        self,
        messages: Message | Sequence[Message],
        *,
        thinking: bool | None = None,
        stream: bool = False,
        **options: Unpack[GenerateOptions],
    ) -> Generation | TextStream:
        """Answers the last message of a chat.

        Args:
            messages: A text of the user, or messages as mappings with ``role`` (system, user, assistant or
                tool) and ``content``.
            thinking: Whether the model thinks before it answers, for templates that ask.
            stream: See :meth:`generate`.
            options: See :class:`GenerateOptions`.
        """
        return self._run(self.chat_tokens(messages, thinking=thinking), stream, options)

    def chat_tokens(
        self, messages: Message | Sequence[Message], *, thinking: bool | None = None
    ) -> list[int]:
        """The tokens of a chat, with the beginning of an answer."""
        several: list[Any] = [messages]
        if isinstance(messages, Iterable) and not isinstance(messages, (str, Mapping)):
            several = list(messages)
        wrong = next((m for m in several if not isinstance(m, (str, Mapping))), None)
        if wrong is not None or not several:
            what = "there are no messages" if wrong is None else f"{wrong!r} is no message"
            raise ArgumentError(f"chat: {what}; give a text, or dicts with role and content")
        given = [{"role": "user", "content": m} if isinstance(m, str) else dict(m) for m in several]
        return self._native.chat_tokens(_json("messages", given), thinking)

    def speculation(self) -> dict[str, Any] | None:
        """What proposals of tokens brought so far; None without ``lookup`` and ``mtp``."""
        return self._native.speculation()

    def _run(self, tokens: list[int], stream: bool, options: GenerateOptions) -> Generation | TextStream:
        started = self._native.start(tokens, _options(options))
        return started if stream else _finished(started)

    def __repr__(self) -> str:
        """The file, the architecture, the context and the backend."""
        return repr(self._native)


def _finished(stream: TextStream) -> Generation:
    made = stream.finish()
    if made is None:
        raise RuntimeError("the generation was closed while it ran")
    return made


class Embedder:
    """A model that turns texts into vectors: an encoder such as BERT, or a decoder."""

    def __init__(
        self,
        path: PathLike,
        backend: BackendLike = None,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        max_tokens: int | None = None,
        adapters: Adapters = None,
    ) -> None:
        """Loads a GGUF file or a folder, perhaps of sentence-transformers.

        Args:
            path: The file or folder.
            backend: An open backend or its name. Default: the default backend.
            pooling: cls, max, mean, mean_sqrt_len_tokens, weightedmean or lasttoken. Default: as the model
                says, else mean.
            normalize: Whether vectors have the length 1. Default: as the model says, else no.
            prompt: The name of a prompt of the model that comes before each text.
            max_tokens: The most tokens of a text; longer ones are cut. Default: as the model says.
            adapters: LoRA adapters.
        """
        load = {
            "pooling": pooling,
            "normalize": normalize,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "adapters": _adapters(adapters),
        }
        self._native = _native.Embedder(os.fspath(path), resolve_backend(backend), load)
        _warn(self._native.warnings)

    @property
    def backend(self) -> Backend:
        """The backend of the weights."""
        return self._native.backend

    @property
    def size(self) -> int:
        """Elements of a vector."""
        return self._native.size

    @property
    def max_tokens(self) -> int:
        """The most tokens of a text; longer texts are cut."""
        return self._native.max_tokens

    def embed(self, texts: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """The vectors of texts: an array [texts, size], or [size] for one text."""
        import numpy as np

        if not isinstance(texts, Iterable) or isinstance(texts, (bytes, bytearray)):
            raise DTypeError(f"embed: texts is a {type(texts).__name__}; give a text or a list of texts")
        several = [texts] if isinstance(texts, str) else list(texts)
        wrong = next((t for t in several if not isinstance(t, str)), None)
        if wrong is not None:
            raise DTypeError(f"embed: {wrong!r} is no text")
        data = np.frombuffer(self._native.embed(several), dtype="<f4").reshape(len(several), self.size)
        return data[0] if isinstance(texts, str) else data

    def __repr__(self) -> str:
        """The file, the size of vectors and the backend."""
        return repr(self._native)


def _model(model: LanguageModel | PathLike, backend: BackendLike) -> LanguageModel:
    return model if isinstance(model, LanguageModel) else LanguageModel(model, backend)


@overload
def generate(
    model: LanguageModel | PathLike,
    prompt: Prompt,
    *,
    backend: BackendLike = None,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Generation: ...


@overload
def generate(
    model: LanguageModel | PathLike,
    prompt: Prompt,
    *,
    backend: BackendLike = None,
    stream: Literal[True],
    **options: Unpack[GenerateOptions],
) -> TextStream: ...


def generate(
    model: LanguageModel | PathLike,
    prompt: Prompt,
    *,
    backend: BackendLike = None,
    stream: bool = False,
    **options: Unpack[GenerateOptions],
) -> Generation | TextStream:
    """Continues a text with a model or the file of one. See :meth:`LanguageModel.generate`.

    A file is loaded for this call. Keep a :class:`LanguageModel` for several calls.
    """
    if stream:
        return _model(model, backend).generate(prompt, stream=True, **options)
    return _model(model, backend).generate(prompt, **options)


@overload
def chat(
    model: LanguageModel | PathLike,
    messages: Message | Sequence[Message],
    *,
    backend: BackendLike = None,
    thinking: bool | None = None,
    stream: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> Generation: ...


@overload
def chat(
    model: LanguageModel | PathLike,
    messages: Message | Sequence[Message],
    *,
    backend: BackendLike = None,
    thinking: bool | None = None,
    stream: Literal[True],
    **options: Unpack[GenerateOptions],
) -> TextStream: ...


def chat(
    model: LanguageModel | PathLike,
    messages: Message | Sequence[Message],
    *,
    backend: BackendLike = None,
    thinking: bool | None = None,
    stream: bool = False,
    **options: Unpack[GenerateOptions],
) -> Generation | TextStream:
    """Answers the last message of a chat with a model or the file of one. See :meth:`LanguageModel.chat`.

    A file is loaded for this call. Keep a :class:`LanguageModel` for several calls.
    """
    if stream:
        return _model(model, backend).chat(messages, thinking=thinking, stream=True, **options)
    return _model(model, backend).chat(messages, thinking=thinking, **options)


def embed(
    model: Embedder | PathLike, texts: str | Sequence[str], *, backend: BackendLike = None
) -> npt.NDArray[np.float32]:
    """The vectors of texts by a model or the file of one. See :meth:`Embedder.embed`.

    A file is loaded for this call. Keep an :class:`Embedder` for several calls.
    """
    return (model if isinstance(model, Embedder) else Embedder(model, backend)).embed(texts)
