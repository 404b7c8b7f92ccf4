"""``InferenceSession``: an ONNX model on a device, with onnxruntime's interface."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, Union

import numpy as np

from halcyon import _native
from halcyon._errors import DriverError, DTypeError, FileError, HalcyonError
from halcyon._native import Backend
from halcyon.session import _arrays, _log, _providers
from halcyon.session._binding import IOBinding
from halcyon.session._enums import ModelMetadata, NodeArg, OrtAllocatorType, OrtMemoryInfo, OrtMemType
from halcyon.session._options import FOLDER_ENTRY, RunOptions, SessionOptions
from halcyon.session._ortvalue import OrtValue
from halcyon.session._profile import Profiler
from halcyon.session._providers import Pool, Provider, ProviderLike
from halcyon.session.exceptions import (
    InvalidArgument,
    ModelLoadCanceled,
    NoSuchFile,
    of_load,
    of_run,
)
from halcyon.session.exceptions import NotImplemented as NotSupported

__all__ = ["InferenceSession", "set_seed"]

PathOrBytes = Union[str, bytes, "os.PathLike[str]"]
#: A function that gets the results, the user's data and the text of the error.
Callback = Callable[[list[Any], Any, str], None]

#: Sessions of variants of the model that are kept: other outputs, replaced initializers.
_VARIANTS = 16

#: The seed of :func:`set_seed`.
_seed: int | None = None


def set_seed(seed: int) -> None:
    """Sets the seed of random operators without a seed of their own, in sessions that are made from now on.

    The runs of a session draw the same numbers, with and without this seed.
    """
    global _seed
    if not hasattr(seed, "__index__"):
        raise DTypeError(f"set_seed: a seed is an integer, not {type(seed).__name__}")
    _seed = int(seed) & 0xFFFF_FFFF_FFFF_FFFF


_pool_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    """The threads of :meth:`InferenceSession.run_async`."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(thread_name_prefix="halcyon-run-async")
        return _pool


def _forget_threads() -> None:
    """In a child process after a fork, the threads do not exist."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


class InferenceSession:
    """An ONNX model on a device."""

    def __init__(
        self,
        path_or_bytes: PathOrBytes,
        sess_options: SessionOptions | None = None,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads a model.

        Args:
            path_or_bytes: The path of a file, or its contents.
            sess_options: Options.
            providers: onnxruntime's names of devices, best first, each alone or with a dict of options.
                Default: the default backend of Halcyon.
            provider_options: A dict of options for each provider.
            **kwargs: ``disabled_optimizers`` and others are warned about, because they have no effect.

        Raises:
            NoSuchFile, InvalidProtobuf, InvalidGraph, NotImplemented: If the model cannot be loaded.
            ValueError: For providers that are malformed.

        """
        if sess_options is not None and not isinstance(sess_options, SessionOptions):
            raise DTypeError(f"sess_options: a {type(sess_options).__name__} is no SessionOptions")
        self._options = SessionOptions() if sess_options is None else sess_options
        severity = self._options.log_severity_level
        for key in kwargs:
            _log.warn(f"the argument {key} of InferenceSession has no effect", severity)
        for text in self._options.without_effect():
            _log.warn(f"the session option {text}, so it has no effect", severity)
        if self._options._is_cancelled:
            raise ModelLoadCanceled("loading was cancelled with set_load_cancellation_flag")
        start = time.perf_counter_ns()
        self._prepare(path_or_bytes, self._options)
        loaded = time.perf_counter_ns()
        if not providers and self._options.has_providers():
            providers = self._options._providers
        self._open(_providers.choose(providers, provider_options, severity))
        self._start_profile(start, loaded)
        self._write_optimized()

    @classmethod
    def _on(
        cls, source: PathOrBytes, backend: Backend, level: str | None, sizes: Mapping[str, int]
    ) -> InferenceSession:
        """A session on an open backend, for :func:`halcyon.load`."""
        if not isinstance(sizes, Mapping):
            raise DTypeError(f"load: sizes is a {type(sizes).__name__}; give a dict by name")
        options = SessionOptions()
        for name, n in sizes.items():
            options.add_free_dimension_override_by_name(name, n)
        made = cls.__new__(cls)
        made._prepare(source, SessionOptions())
        if sizes:
            made._check_dimensions(sizes)
            made._options, made._model = options, with_changes(made._model, options)
            made._describe()
        made._bind(Provider(_providers.AUTO), backend, level)
        return made

    def _prepare(self, source: PathOrBytes, options: SessionOptions) -> None:
        """Loads the model and reads what it declares."""
        self._options = options
        self._source = source
        self._model = load_model(source, options)
        self._meta = ModelMetadata(self._model.metadata())
        self._fallback = True
        self._profiler: Profiler | None = None
        self._variants: dict[tuple[frozenset[str], frozenset[str] | None], _native.OnnxSession] = {}
        self._describe()

    def _describe(self) -> None:
        """Reads what the model declares."""
        self._inputs = [NodeArg(*a) for a in self._model.inputs()]
        self._outputs = [NodeArg(*a) for a in self._model.outputs()]
        self._initializers = [NodeArg(*a) for a in self._model.overridable()]

    def _check_dimensions(self, sizes: Mapping[str, int]) -> None:
        """Refuses sizes for names that no dimension of an input or output has."""
        declared = [d for a in (*self._inputs, *self._outputs) for d in a.shape if isinstance(d, str)]
        unknown = [name for name in sizes if name not in declared]
        if unknown:
            have = f"they are {', '.join(dict.fromkeys(declared))}" if declared else "there are none"
            raise InvalidArgument(f'load: the model has no dimension named "{unknown[0]}"; {have}')

    def _open(self, providers: Sequence[Provider]) -> None:
        """Opens the first device of these providers, and makes the session there."""
        o = self._options
        pool = Pool(o.intra_op_num_threads, o.use_per_session_threads, o.enable_profiling)
        provider, backend = _providers.open_first(providers, pool, o.log_severity_level)
        if o.intra_op_num_threads and o.use_per_session_threads and backend.kind != "cpu":
            text = f"intra_op_num_threads={o.intra_op_num_threads}"
            _log.warn(f"the session option {text} has no effect on {backend.id}", o.log_severity_level, 4)
        self._bind(provider, backend, o.level())

    def _bind(self, provider: Provider, backend: Backend, level: str | None) -> None:
        """Makes the session on an open backend."""
        o = self._options
        try:
            self._native = _native.OnnxSession(self._model, backend, level)
        except HalcyonError as e:
            raise of_load(e, parsed=True) from e
        self._provider, self._backend, self._level = provider, backend, level
        self._variants.clear()
        self._is_plain = not (self._initializers or o.enable_profiling or not o.enable_cpu_mem_arena)
        if _log.severity_of(o.log_severity_level) <= _log.INFO:
            _log.info(f"{self._native!r}\n{self._backend.selection}", o.log_severity_level, o.logid)

    def _start_profile(self, start: int, loaded: int) -> None:
        if not self._options.enable_profiling:
            return
        p = Profiler(self._options.profile_file_prefix, self.get_providers()[0])
        self._profiler = p
        p.start_ns = start
        kind = "array" if isinstance(self._source, bytes) else "uri"
        p.add(f"model_loading_{kind}", "Session", start, loaded - start)
        p.add("session_initialization", "Session", loaded, time.perf_counter_ns() - loaded)
        # A session that ends without `end_profiling` writes its profile too.
        self._write_at_end = weakref.finalize(self, p.write)

    def _write_optimized(self) -> None:
        path = self._options.optimized_model_filepath
        if not path:
            return
        try:
            self._model.write(path, self._options.level() != "O0")
        except HalcyonError as e:
            raise of_load(e, parsed=True) from e

    # The model.

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that a run needs."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, with the types and sizes that follow from the inputs where the file declares none."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs with a stored value, which a run may replace."""
        return list(self._initializers)

    def get_modelmeta(self) -> ModelMetadata:
        """The description in the model file."""
        return self._meta

    def get_session_options(self) -> SessionOptions:
        """The options that the session was made with."""
        return self._options

    # Devices.

    def get_providers(self) -> list[str]:
        """The provider of the session's device, and the CPU's, which computes what no device does."""
        own = _providers.name_of(self._backend)
        return [own] if own == _providers.CPU else [own, _providers.CPU]

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """The options that were given for each of :meth:`get_providers`."""
        made: dict[str, dict[str, str]] = {name: {} for name in self.get_providers()}
        made[self.get_providers()[0]] = dict(self._provider.options)
        return made

    def set_providers(
        self,
        providers: Sequence[ProviderLike] | None = None,
        provider_options: Sequence[Mapping[Any, Any]] | None = None,
    ) -> None:
        """Moves the session to another device."""
        severity = self._options.log_severity_level
        self._open(_providers.choose(providers, provider_options, severity))

    def disable_fallback(self) -> None:
        """Makes a run raise if a driver fails."""
        self._fallback = False

    def enable_fallback(self) -> None:
        """Lets a run warn and continue on the CPU if a driver fails. This is the default."""
        self._fallback = True

    def get_input_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where a run reads each input."""
        return [self._memory_info() for _ in self._inputs]

    def get_output_memory_infos(self) -> list[OrtMemoryInfo]:
        """Where a run writes each output."""
        return [self._memory_info() for _ in self._outputs]

    def _memory_info(self) -> OrtMemoryInfo:
        kind, _, index = self._backend.id.partition(":")
        arena = OrtAllocatorType.ORT_ARENA_ALLOCATOR
        return OrtMemoryInfo(kind, arena, int(index or 0), OrtMemType.DEFAULT)

    def create_ortvalue_from_shape_and_type(
        self,
        shape: Sequence[int],
        element_type: Any,
        device_type: str,
        device_id: int = 0,
        vendor_id: int = -1,
    ) -> OrtValue:
        """A tensor that is not initialised."""
        return OrtValue.ortvalue_from_shape_and_type(shape, element_type, device_type, device_id, vendor_id)

    # Runs.

    def run(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None = None,
    ) -> list[Any]:
        """Runs the model.

        Args:
            output_names: The outputs wanted; None or an empty list for all.
            input_feed: The inputs by name: arrays, ``OrtValue``, arrays of Halcyon, objects with
                ``__dlpack__``, lists for sequences, dicts for maps, None for an empty optional.
            run_options: Options.

        Returns:
            A list with an array, a list or a dict for each output.

        Raises:
            InvalidArgument: For names and values that the model does not take.
            Fail: If the run was ended with ``RunOptions.terminate``.

        """
        if self._is_plain and run_options is None and type(input_feed) is dict:
            try:
                return self._native.run(output_names, input_feed)
            except HalcyonError as e:
                return self._failed(e, output_names, input_feed, None, False)
            except TypeError:
                # A run takes lists and tuples; other iterables of names are made lists.
                names = _checked(output_names, input_feed)
                if isinstance(output_names, (list, tuple)):
                    raise
                output_names = names
        return self._execute(output_names, input_feed, run_options, False)

    def run_with_ort_values(
        self,
        output_names: Iterable[str] | None,
        input_dict_ort_values: Mapping[str, OrtValue],
        run_options: RunOptions | None = None,
    ) -> list[OrtValue]:
        """Runs the model on values, and returns values on the session's device."""
        output_names = _checked(output_names, input_dict_ort_values)
        for name, value in input_dict_ort_values.items():
            if not isinstance(value, OrtValue):
                what = f'"{name}" is a {type(value).__name__}, not an OrtValue'
                raise InvalidArgument(f"run_with_ort_values: {what}. Use run() for arrays")
        keep = self._backend.kind != "cpu"
        made = self._execute(output_names, input_dict_ort_values, run_options, keep)
        types = {a.name: a.type for a in self._outputs}
        names = output_names or [a.name for a in self._outputs]
        return [OrtValue._of_result(v, types[n]) for n, v in zip(names, made, strict=True)]

    def run_with_iobinding(self, iobinding: IOBinding, run_options: RunOptions | None = None) -> None:
        """Runs the model on bound inputs; the outputs go where they are bound to."""
        if not isinstance(iobinding, IOBinding):
            what = f"a {type(iobinding).__name__} is no IOBinding; make one with io_binding()"
            raise InvalidArgument(f"run_with_iobinding: {what}")
        iobinding._run(run_options)

    def io_binding(self) -> IOBinding:
        """A new binding of inputs and outputs."""
        return IOBinding(self)

    def run_async(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callback,
        user_data: Any,
        run_options: RunOptions | None = None,
    ) -> None:
        """Runs the model on another thread, which calls ``callback(results, user_data, error)``.

        The error is an empty text, or the results are an empty list. An exception of the callback goes to
        ``threading.excepthook``, which prints it.
        """
        names = _checked(output_names, input_feed)
        if not callable(callback):
            raise DTypeError(
                f"run_async: the callback is a {type(callback).__name__}, which cannot be called"
            )
        missing = [
            a.name for a in self._inputs if a.name not in input_feed and not a.type.startswith("optional")
        ]
        if missing:
            raise InvalidArgument(f"run_async: the inputs {missing} are missing")
        feed = dict(input_feed)

        def work() -> None:
            try:
                made, error = self.run(names, feed, run_options), ""
            except Exception as e:
                made, error = [], str(e) or type(e).__name__
            try:
                callback(made, user_data, error)
            except BaseException as e:
                threading.excepthook(
                    threading.ExceptHookArgs((type(e), e, e.__traceback__, threading.current_thread()))
                )

        _threads().submit(work)

    def _execute(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        run_options: RunOptions | None,
        keep: bool,
    ) -> list[Any]:
        output_names = _checked(output_names, input_feed)
        if run_options is not None and not isinstance(run_options, RunOptions):
            raise DTypeError(f"run_options: a {type(run_options).__name__} is no RunOptions")
        feed = dict(input_feed)
        options = RunOptions() if run_options is None else run_options
        severity = options.log_severity_level if options.log_severity_level >= 0 else self._severity()
        for text in options.without_effect():
            _log.warn(f"the run option {text} has no effect", severity, 4)
        start = time.perf_counter_ns()
        try:
            native = self._native_for(output_names, feed, options)
            if self._profiler is None:
                made = native.run(output_names, feed, options.cancel, keep)
            else:
                made, events = native.run_profiled(output_names, feed, options.cancel, keep)
                self._profiler.add_run(start, events)
        except HalcyonError as e:
            return self._failed(e, output_names, feed, run_options, keep)
        took = (time.perf_counter_ns() - start) / 1e6
        _log.info(f"a run of {took:.3f} ms", severity, options.logid or self._options.logid)
        if options.shrinks or not self._options.enable_cpu_mem_arena:
            self._backend.empty_cache()
        return made

    def _severity(self) -> int:
        return self._options.log_severity_level

    def _native_for(
        self, output_names: list[str] | None, feed: dict[str, Any], options: RunOptions
    ) -> _native.OnnxSession:
        """The session for a run: the whole model, or one with replaced initializers or fewer outputs."""
        replaced = frozenset(a.name for a in self._initializers if a.name in feed)
        outputs: frozenset[str] | None = None
        if options.only_execute_path_to_fetches and output_names:
            known = {a.name for a in self._outputs}
            outputs = frozenset(output_names)
            # The session reports unknown names.
            outputs = None if outputs == known or outputs - known else outputs
        if not replaced and outputs is None:
            return self._native
        key = (replaced, outputs)
        if key not in self._variants:
            model = self._model
            if replaced:
                model = model.without_initializers(set(replaced))
            if outputs is not None:
                model = model.with_outputs(set(outputs))
            if len(self._variants) >= _VARIANTS:
                self._variants.clear()
            self._variants[key] = _native.OnnxSession(model, self._backend, self._level)
        return self._variants[key]

    def _failed(
        self,
        e: HalcyonError,
        output_names: Iterable[str] | None,
        feed: Mapping[str, Any],
        run_options: RunOptions | None,
        keep: bool,
    ) -> list[Any]:
        """Runs the model on the CPU if a driver failed and fallback is enabled; otherwise raises."""
        if self._fallback and isinstance(e, DriverError) and self._backend.kind != "cpu":
            _log.warn(f"{e}. The session continues on the CPU", self._severity(), 5)
            self._open([Provider(_providers.CPU)])
            return self._execute(output_names, feed, run_options, keep)
        raise of_run(e) from e

    # Profiles.

    def end_profiling(self) -> str:
        """Writes the profile. Returns the name of the file; an empty text if the session has no profile."""
        if self._profiler is None:
            return ""
        path = self._profiler.write()
        self._write_at_end.detach()
        self._profiler = None
        self._is_plain = not (self._initializers or not self._options.enable_cpu_mem_arena)
        return path

    def get_profiling_start_time_ns(self) -> int:
        """The time of ``time.perf_counter_ns`` at which the profile starts; 0 without a profile."""
        return 0 if self._profiler is None else self._profiler.start_ns

    # What onnxruntime has and Halcyon lacks.

    def _unsupported(self, name: str, next_step: str) -> NoReturn:
        raise NotSupported(f"not supported yet: InferenceSession.{name}. {next_step}")

    def run_with_ortvaluevector(self, *_: Any) -> None:
        """Raises: use :meth:`run_with_iobinding`.

        Raises:
            NotImplemented: Always.

        """
        self._unsupported("run_with_ortvaluevector", "Use run_with_iobinding")

    def get_input_epdevices(self) -> NoReturn:
        """Raises: use :meth:`get_input_memory_infos`.

        Raises:
            NotImplemented: Always.

        """
        self._unsupported("get_input_epdevices", "Use get_input_memory_infos")

    def get_provider_graph_assignment_info(self) -> NoReturn:
        """Raises: the whole model runs on one device.

        Raises:
            NotImplemented: Always.

        """
        self._unsupported("get_provider_graph_assignment_info", "The whole model runs on get_providers()[0]")

    def get_tuning_results(self) -> NoReturn:
        """Raises: Halcyon keeps results of tuning in its cache.

        Raises:
            NotImplemented: Always.

        """
        self._unsupported("get_tuning_results", "The command `halcyon tune` keeps them in Halcyon's cache")

    def set_tuning_results(self, results: Any, *, error_on_invalid: bool = False) -> NoReturn:
        """Raises: Halcyon keeps results of tuning in its cache.

        Raises:
            NotImplemented: Always.

        """
        del results, error_on_invalid
        self._unsupported("set_tuning_results", "The command `halcyon tune` keeps them in Halcyon's cache")

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Raises, unless there are no options.

        Raises:
            NotImplemented: For any option.

        """
        if options:
            self._unsupported(f"set_ep_dynamic_options({sorted(options)})", "Give provider_options instead")

    def release_captured_graph(self, graph_annotation_id: int = 0) -> NoReturn:
        """Raises: Halcyon releases captures by itself.

        Raises:
            NotImplemented: Always.

        """
        del graph_annotation_id
        self._unsupported("release_captured_graph", "Captured runs are released with the session")

    def __repr__(self) -> str:
        inputs = ", ".join(f"{a.name}: {a.type}{a.shape}" for a in self._inputs)
        return f"InferenceSession({inputs} on {self._backend.id})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("an InferenceSession cannot be pickled; send the model's path and make one there")


def _checked(output_names: Any, feed: Any) -> list[str] | None:
    """The outputs as a list. Refuses what is no names, and inputs that are no dict by name."""
    names: list[str] | None = None
    if output_names is not None:
        are_several = isinstance(output_names, Iterable) and not isinstance(output_names, (str, bytes))
        names = list(output_names) if are_several else None
        if names is None or not all(isinstance(n, str) for n in names):
            raise DTypeError(f"run: the outputs are {output_names!r}; give a list of names, or None for all")
    if not hasattr(feed, "keys"):
        raise DTypeError(f"run: the inputs are given as {type(feed).__name__}; give a dict by name")
    wrong = next((k for k in feed.keys() if not isinstance(k, str)), None)
    if wrong is not None:
        raise DTypeError(f"run: {wrong!r} is not the name of an input; give a dict by name")
    return names


def load_model(source: PathOrBytes, options: SessionOptions) -> _native.OnnxModel:
    """The model of a file or of bytes, with the changes that the options ask for."""
    try:
        if isinstance(source, (bytes, bytearray, memoryview)):
            if not len(source):
                raise InvalidArgument("the model has no bytes")
            folder = options._entries.find(FOLDER_ENTRY)
            model = _native.OnnxModel.parse(bytes(source), folder, options._external_files)
        elif isinstance(source, (str, os.PathLike)):
            path = os.fspath(source)
            if not os.path.exists(path):
                raise NoSuchFile(
                    f"{path}: there is no such file" if path else "the path of the model is empty"
                )
            if options._external_files or options._entries.find(FOLDER_ENTRY):
                with open(path, "rb") as f:
                    contents = f.read()
                folder = options._entries.find(FOLDER_ENTRY) or os.path.dirname(path) or "."
                model = _native.OnnxModel.parse(contents, folder, options._external_files)
            else:
                model = _native.OnnxModel.open(path)
        else:
            raise TypeError(f"a model is a path or bytes, not {type(source).__name__}")
    except (InvalidArgument, NoSuchFile):
        raise
    except HalcyonError as e:
        raise of_load(e, parsed=False) from e
    except OSError as e:
        raise of_load(FileError(str(e)), parsed=False) from e
    return with_changes(model, options)


def with_changes(model: _native.OnnxModel, options: SessionOptions) -> _native.OnnxModel:
    """The model with the changes that the options ask for. It is checked."""
    try:
        model = _changed(model, options)
        model.validate()
    except InvalidArgument:
        raise
    except HalcyonError as e:
        raise of_load(e, parsed=True) from e
    return model


def _stored(value: Any) -> tuple[Any, str | None]:
    """The value of an initializer; for types that NumPy lacks its bits, and our name of the type."""
    own = value._element[2] if isinstance(value, OrtValue) else None
    value = value._halcyon_value if isinstance(value, OrtValue) else value
    if not isinstance(value, np.ndarray):
        return value, None
    own = own or _arrays.own_name(value.dtype)
    if own is None or own in _arrays._NUMPY:
        return value, None
    return _arrays.bits(value, own), own


def _changed(model: _native.OnnxModel, options: SessionOptions) -> _native.OnnxModel:
    if _seed is not None:
        model = model.with_seed(_seed)
    if options._by_name or options._by_denotation:
        model = model.with_sizes(options._by_name, options._by_denotation)
    for values, external in ((options._initializers, False), (options._external_initializers, True)):
        if not values:
            continue
        model, unknown = model.with_initializers([(n, *_stored(v)) for n, v in values], external)
        for name in unknown:
            text = f'add_initializer("{name}"): the model stores no such value, so it has no effect'
            _log.warn(text, options.log_severity_level, 6)
    return model
