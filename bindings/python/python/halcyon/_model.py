"""Models by file: :func:`load` and :func:`fit`."""

from __future__ import annotations

import json
import operator
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from halcyon import _native
from halcyon._default import BackendLike, resolve_backend
from halcyon._errors import (
    ArgumentError,
    DTypeError,
    FileError,
    FormatError,
    HalcyonError,
    OutOfMemoryError,
    UnavailableError,
    UnsupportedError,
)
from halcyon._native import Backend
from halcyon._program import program
from halcyon._reports import _size, _table, _text

if TYPE_CHECKING:
    from halcyon.session import InferenceSession, NodeArg

__all__ = ["DeviceFit", "FitReport", "Model", "fit", "load"]

PathLike = Union[str, "os.PathLike[str]"]

#: The exceptions for kinds of errors in the report of a command.
_KINDS: dict[Any, type[HalcyonError]] = {
    "Argument": ArgumentError,
    "Format": FormatError,
    "Io": FileError,
    "OutOfMemory": OutOfMemoryError,
    "Unavailable": UnavailableError,
    "Unsupported": UnsupportedError,
}
#: The exit code of `halcyon fit` for a model that does not fit.
_DOES_NOT_FIT = 5


def _is_language(source: PathLike | bytes) -> bool:
    """Whether a path is a language model's: a GGUF file, a safetensors file, a folder, or a name on a hub."""
    if isinstance(source, bytes):
        return source[:4] == b"GGUF"
    path = os.fspath(source)
    if path.startswith("hf:") or os.path.isdir(path) or path.lower().endswith((".gguf", ".safetensors")):
        return True
    try:
        with open(path, "rb") as f:
            return f.read(4) == b"GGUF"
    except OSError:
        return False


class Model:
    """An ONNX model on a device. :func:`load` makes it.

    ``model(x)`` and ``model(image=x)`` give the output, or a tuple if there are several.
    ``model.run(image=x)`` gives a dict by name.
    """

    def __init__(self, session: InferenceSession) -> None:
        self._session = session

    @property
    def inputs(self) -> dict[str, NodeArg]:
        """The inputs that a run needs, by name."""
        return {a.name: a for a in self._session.get_inputs()}

    @property
    def outputs(self) -> dict[str, NodeArg]:
        """The outputs by name."""
        return {a.name: a for a in self._session.get_outputs()}

    @property
    def backend(self) -> Backend:
        """The backend that the model runs on."""
        return self._session._backend

    @property
    def session(self) -> InferenceSession:
        """The session, with onnxruntime's interface."""
        return self._session

    @property
    def metadata(self) -> dict[str, Any]:
        """The description in the file: producer, version, operator sets, and the user's own entries."""
        return self._session._model.metadata()

    def _feed(self, feed: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
        if feed is not None and not isinstance(feed, Mapping):
            raise DTypeError(f"run: the inputs are a {type(feed).__name__}; give a dict by name, or keywords")
        given = dict(feed or {})
        twice = sorted(given.keys() & named.keys())
        if twice:
            raise ArgumentError(f"run: the inputs {twice} are given twice")
        return {**given, **named}

    def run(self, feed: Mapping[str, Any] | None = None, /, **named: Any) -> dict[str, Any]:
        """Runs the model on inputs by name, in a dict or as keywords. Returns the outputs by name.

        Raises:
            InvalidArgument: For names and values that the model does not take.

        """
        made = self._session.run(None, self._feed(feed, named))
        return {a.name: v for a, v in zip(self._session.get_outputs(), made, strict=True)}

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Runs the model on inputs in its order, or by name. Several outputs are a tuple."""
        names = [a.name for a in self._session.get_inputs()]
        if len(inputs) > len(names):
            raise ArgumentError(
                f"run: the model takes {len(names)} inputs ({', '.join(names)}), {len(inputs)} given"
            )
        made = self._session.run(None, self._feed(dict(zip(names, inputs, strict=False)), named))
        return made[0] if len(made) == 1 else tuple(made)

    def fit(self, inputs: Mapping[str, Any] | None = None, backend: BackendLike = None) -> FitReport:
        """The memory that the model needs. See :func:`fit`."""
        return fit(self, inputs, backend)

    def _rows(self) -> list[list[str]]:
        def sizes(a: NodeArg) -> str:
            return "[" + ", ".join("?" if d is None else str(d) for d in a.shape) + "]"

        rows = [["input", a.name, a.type, sizes(a)] for a in self._session.get_inputs()]
        return rows + [["output", a.name, a.type, sizes(a)] for a in self._session.get_outputs()]

    def __repr__(self) -> str:
        nodes, tensors, elements = self._session._model.counts()
        head = f"Model on {self.backend.id}: {nodes} nodes, {tensors} stored tensors, {elements} numbers"
        return f"{head}\n{_text(self._rows())}"

    def _repr_html_(self) -> str:
        caption = repr(self).splitlines()[0]
        return _table(["", "name", "type", "shape"], self._rows(), caption)


def load(
    path: PathLike | bytes,
    backend: BackendLike = None,
    *,
    level: str | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """Loads a model: an ONNX file, a GGUF file, or a folder of a language model.

    Args:
        path: The file or folder, or an ONNX model in memory.
        backend: An open backend or its name. Default: the default backend.
        level: The level of optimisation of an ONNX model, ``O0`` to ``O2``. Default: the backend's.
        sizes: Sizes for dimensions of an ONNX model by the model's names for them.
        **options: Options of :class:`halcyon.LanguageModel`.

    Returns:
        A :class:`Model` for ONNX, otherwise a :class:`halcyon.LanguageModel`. The file decides, so type
        checkers take it as ``Any``.

    Raises:
        NoSuchFile, InvalidProtobuf, InvalidGraph, NotImplemented: If the model cannot be loaded.

    """
    if _is_language(path):
        if level is not None or sizes:
            raise ArgumentError("load: level and sizes are options of ONNX models")
        if isinstance(path, bytes):
            raise _in_memory()
        from halcyon.language import LanguageModel

        return LanguageModel(path, backend, **options)
    if options:
        raise ArgumentError(f"load: {', '.join(options)}: options of language models; this is an ONNX model")
    from halcyon.session._session import InferenceSession

    return Model(InferenceSession._on(path, resolve_backend(backend), level, sizes or {}))


def _in_memory() -> UnsupportedError:
    return UnsupportedError("not supported yet: language models in memory. Give the path of a file")


class DeviceFit:
    """The memory that a model needs on one device."""

    def __init__(self, device: str, name: str, facts: Mapping[str, Any]) -> None:
        self.device = device
        """The device, such as ``cuda:0``."""
        self.name = name
        """The device's own name."""
        self._facts = dict(facts)

    @property
    def fits(self) -> bool | None:
        """Whether the model fits the free memory; None if that is not known."""
        found: bool | None = self._facts.get("fits")
        return found

    @property
    def needed(self) -> int | None:
        """Bytes of device memory that a run needs; None if the model was not planned."""
        found: int | None = self._facts.get("needed")
        return found

    @property
    def free(self) -> int | None:
        """Free bytes of the device."""
        found: int | None = self._facts.get("free")
        return found

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind, such as weights and activations."""
        return dict(self._facts.get("parts", {}))

    @property
    def error(self) -> str | None:
        """Why there are no figures."""
        found: str | None = self._facts.get("error")
        return found

    def to_dict(self) -> dict[str, Any]:
        """All facts."""
        return {"device": self.device, "name": self.name, **self._facts}

    def _row(self) -> list[str]:
        verdict = {True: "yes", False: "no", None: "not known"}[self.fits]
        parts = ", ".join(f"{k} {_size(n)}" for k, n in self.parts.items() if n)
        return [self.device, verdict, _size(self.needed), _size(self.free), self.error or parts]

    def __repr__(self) -> str:
        return f"DeviceFit({self.device}: fits {self._row()[1]}, {_size(self.needed)} needed)"


class FitReport(Sequence[DeviceFit]):
    """The memory that a model needs on each device."""

    _HEAD = ("device", "fits", "needed", "free", "parts")

    def __init__(self, devices: Sequence[DeviceFit]) -> None:
        self._devices = list(devices)

    @property
    def fits(self) -> bool:
        """Whether the model fits on a device."""
        return any(d.fits for d in self._devices)

    def to_dict(self) -> dict[str, Any]:
        """All facts by device."""
        return {d.device: d.to_dict() for d in self._devices}

    def __getitem__(self, key: Any) -> Any:
        """The report of a device by number or by name."""
        if isinstance(key, str):
            for d in self._devices:
                if key in (d.device, d.device.partition(":")[0]):
                    return d
            have = ", ".join(d.device for d in self._devices)
            raise KeyError(f"{key}: the report has no such device; it has {have}")
        return self._devices[key]

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[DeviceFit]:
        return iter(self._devices)

    def __repr__(self) -> str:
        return _text([list(self._HEAD), *(d._row() for d in self._devices)])

    def _repr_html_(self) -> str:
        return _table(list(self._HEAD), [d._row() for d in self._devices])


def fit(
    model: Model | InferenceSession | PathLike | bytes,
    inputs: Mapping[str, Any] | None = None,
    backend: BackendLike = None,
    *,
    batch: int | None = None,
    context: int | None = None,
) -> FitReport:
    """The memory that a model needs, from its plan; no weight is uploaded.

    Args:
        model: A loaded ONNX model, its session, its bytes, or the path of any model.
        inputs: The sizes of an ONNX model's inputs by name, as tuples or as arrays of these sizes. Those that
            are not given have the declared sizes, with 1 for open ones.
        backend: An open backend or a name. Default: every device of the machine.
        batch: The number of sequences of a language model.
        context: The positions of a sequence of a language model.

    Returns:
        The report, with a row for each device.

    """
    source = _onnx_of(model)
    backends = _candidates(backend)
    if source is None:
        if inputs:
            raise ArgumentError("fit: inputs are for ONNX models; a language model takes batch and context")
        if not isinstance(model, (str, os.PathLike)):
            raise _in_memory()
        _check_count("batch", batch, 1)
        _check_count("context", context, 0)
        return FitReport([_language_fit(os.fspath(model), i, n, batch, context) for i, n, _ in backends])
    if batch is not None or context is not None:
        raise ArgumentError("fit: batch and context are for language models; give the sizes of inputs")
    sizes, values = _sizes(source, inputs or {})
    return FitReport([_onnx_fit(source, i, n, b, sizes, values) for i, n, b in backends])


def _onnx_of(model: Any) -> _native.OnnxModel | None:
    """The ONNX model; None for a language model's path."""
    from halcyon.session._options import SessionOptions
    from halcyon.session._session import InferenceSession, load_model

    if isinstance(model, Model):
        return model._session._model
    if isinstance(model, InferenceSession):
        return model._model
    if not isinstance(model, (str, bytes, os.PathLike)):
        raise TypeError(f"fit: a model is a path, bytes, a Model or a session, not {type(model).__name__}")
    return None if _is_language(model) else load_model(model, SessionOptions())


def _candidates(backend: BackendLike) -> list[tuple[str, str, Backend | None]]:
    """Devices by name, with the open backend if it was given."""
    if backend is not None:
        b = resolve_backend(backend)
        return [(b.id, b.info["name"], b)]
    found = [d for b in _native.devices() if b["available"] for d in b["devices"]]
    return [(d["id"], d["name"], None) for d in found]


def _sizes(
    model: _native.OnnxModel, inputs: Mapping[str, Any]
) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """The sizes of all inputs, and the arrays among the given ones."""
    if not isinstance(inputs, Mapping):
        raise DTypeError(f"fit: inputs is a {type(inputs).__name__}; give the sizes in a dict by name")
    sizes: dict[str, list[int]] = {}
    values: dict[str, Any] = {}
    for name, value in inputs.items():
        sizes[name] = _sizes_of(name, getattr(value, "shape", value))
        if hasattr(value, "__array_struct__"):
            values[name] = value
    for name, _, shape in model.inputs():
        sizes.setdefault(name, [d if isinstance(d, int) else 1 for d in shape])
    return sizes, values


def _sizes_of(name: object, sizes: Any) -> list[int]:
    """The sizes of an input, checked."""
    try:
        found = [] if isinstance(sizes, str) else [operator.index(n) for n in sizes]
    except TypeError:
        found = [-1]
    if isinstance(sizes, str) or any(n < 0 for n in found):
        raise ArgumentError(
            f'fit: {sizes!r} for "{name}": expected sizes such as (1, 3, 224, 224), or an array'
        )
    return found


def _check_count(what: str, value: int | None, least: int) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise ArgumentError(f"fit: {what}={value!r}: expected an integer of at least {least}")


def _onnx_fit(
    model: _native.OnnxModel,
    device: str,
    name: str,
    backend: Backend | None,
    sizes: dict[str, list[int]],
    values: dict[str, Any],
) -> DeviceFit:
    try:
        facts = _native.fit_onnx(model, backend or resolve_backend(device), sizes, values)
    except (UnavailableError, UnsupportedError, OutOfMemoryError) as e:
        return DeviceFit(device, name, {"fits": None, "error": str(e)})
    return DeviceFit(device, name, {**facts, "needed": facts["device"]})


def _language_fit(path: str, device: str, name: str, batch: int | None, context: int | None) -> DeviceFit:
    """The report of the command `halcyon fit`, from a child process."""
    start = program()
    if start is None:
        what = "fit of a language model in a program that is not started by Python"
        raise UnsupportedError(f"not supported yet: {what}. Run `halcyon fit` instead")
    command = [start[0], *start[1], "fit", path, "--json", "--backend", device]
    command += [] if batch is None else ["--batch", str(batch)]
    command += [] if context is None else ["--context", str(context)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        facts = json.loads(done.stdout)
    except ValueError:
        raise HalcyonError(f"fit: {done.stderr.strip() or 'the command gave no report'}") from None
    if done.returncode not in (0, _DOES_NOT_FIT):
        error = facts.get("error", {})
        kind = _KINDS.get(error.get("kind"), HalcyonError)
        raise kind(f"fit: {error.get('message', done.stderr.strip())}")
    own = facts["devices"][0]
    parts = {
        "weights read in place": own["in_place"],
        "weights": own["copied"] + own["packed"],
        "cache": own["cache"],
        "inputs and outputs": own["io"],
        "plans": own["plans"],
    }
    found = {"fits": facts["fits"], "needed": own["peak"], "free": own["free"], "parts": parts}
    return DeviceFit(device, name, {**found, "report": facts})
