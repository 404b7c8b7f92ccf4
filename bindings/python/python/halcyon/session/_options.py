"""``SessionOptions`` and ``RunOptions``.

An option has its effect, or a warning names it when a session is made: see the table in
docs/python-onnxruntime.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from halcyon import _native
from halcyon._errors import ArgumentError
from halcyon.session._enums import ExecutionMode, ExecutionOrder, GraphOptimizationLevel
from halcyon.session._log import check_severity
from halcyon.session.exceptions import NotImplemented as NotSupported

__all__ = ["RunOptions", "SessionOptions"]

#: Configuration entries of sessions that have an effect.
FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"
SESSION_ENTRIES = frozenset({FOLDER_ENTRY})
#: Configuration entries of runs that have an effect.
SHRINK_ENTRY = "memory.enable_memory_arena_shrinkage"
RUN_ENTRIES = frozenset({SHRINK_ENTRY})

_LEVELS = {
    GraphOptimizationLevel.ORT_DISABLE_ALL: "O0",
    GraphOptimizationLevel.ORT_ENABLE_BASIC: "O1",
    GraphOptimizationLevel.ORT_ENABLE_EXTENDED: "O2",
    GraphOptimizationLevel.ORT_ENABLE_LAYOUT: "O2",
    GraphOptimizationLevel.ORT_ENABLE_ALL: "O2",
}


def _refuse(name: str, next_step: str) -> NoReturn:
    raise NotSupported(f"not supported yet: {name}. {next_step}")


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, int)):
        raise TypeError(f"{name} takes a bool, not {type(value).__name__}")
    return bool(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} takes an integer, not {type(value).__name__}")
    n = int(value.__index__())
    if n < 0:
        raise ArgumentError(f"{name}: {n} is negative")
    return n


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} takes a string, not {type(value).__name__}")
    return value


class _Entries:
    """Configuration entries by name."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._entries: dict[str, str] = {}

    def add(self, key: str, value: str) -> None:
        self._entries[_text("the key", key)] = _text(f'the value of "{key}"', value)

    def get(self, key: str) -> str:
        try:
            return self._entries[key]
        except KeyError:
            raise ArgumentError(f'{self._owner}: there is no configuration entry "{key}"') from None

    def find(self, key: str) -> str | None:
        return self._entries.get(key)

    def unknown(self, known: frozenset[str]) -> list[str]:
        return [f'{k}="{v}"' for k, v in self._entries.items() if k not in known]


class SessionOptions:
    """Options of a session, with onnxruntime's names and defaults."""

    __slots__ = (
        "_by_denotation",
        "_by_name",
        "_deterministic",
        "_entries",
        "_execution_mode",
        "_execution_order",
        "_external_files",
        "_external_initializers",
        "_initializers",
        "_inter_op",
        "_intra_op",
        "_is_cancelled",
        "_level",
        "_log_severity",
        "_log_verbosity",
        "_logid",
        "_mem_arena",
        "_mem_pattern",
        "_mem_reuse",
        "_optimized_path",
        "_per_session_threads",
        "_prefix",
        "_profiling",
        "_providers",
    )

    def __init__(self) -> None:
        self._by_denotation: dict[str, int] = {}
        self._by_name: dict[str, int] = {}
        self._deterministic = False
        self._entries = _Entries("SessionOptions")
        self._execution_mode = ExecutionMode.ORT_SEQUENTIAL
        self._execution_order = ExecutionOrder.DEFAULT
        self._external_files: dict[str, bytes] = {}
        self._external_initializers: list[tuple[str, Any]] = []
        self._initializers: list[tuple[str, Any]] = []
        self._inter_op = 0
        self._intra_op = 0
        self._is_cancelled = False
        self._level = GraphOptimizationLevel.ORT_ENABLE_ALL
        self._log_severity = -1
        self._log_verbosity = 0
        self._logid = ""
        self._mem_arena = True
        self._mem_pattern = True
        self._mem_reuse = True
        self._optimized_path = ""
        self._per_session_threads = True
        self._prefix = "onnxruntime_profile_"
        self._profiling = False
        self._providers: list[tuple[str, dict[str, str]]] = []

    @property
    def intra_op_num_threads(self) -> int:
        """Threads of the CPU for one node; 0 for all cores. Other devices have no such number."""
        return self._intra_op

    @intra_op_num_threads.setter
    def intra_op_num_threads(self, value: int) -> None:
        self._intra_op = _count("intra_op_num_threads", value)

    @property
    def inter_op_num_threads(self) -> int:
        """No effect above 1: nodes run one after another."""
        return self._inter_op

    @inter_op_num_threads.setter
    def inter_op_num_threads(self, value: int) -> None:
        self._inter_op = _count("inter_op_num_threads", value)

    @property
    def graph_optimization_level(self) -> GraphOptimizationLevel:
        """The level: O0 for ORT_DISABLE_ALL, O1 for ORT_ENABLE_BASIC, O2 for the others."""
        return self._level

    @graph_optimization_level.setter
    def graph_optimization_level(self, value: GraphOptimizationLevel) -> None:
        if not isinstance(value, GraphOptimizationLevel):
            raise TypeError("graph_optimization_level takes a GraphOptimizationLevel")
        self._level = value

    @property
    def execution_mode(self) -> ExecutionMode:
        """No effect if it is ORT_PARALLEL: nodes run one after another."""
        return self._execution_mode

    @execution_mode.setter
    def execution_mode(self, value: ExecutionMode) -> None:
        if not isinstance(value, ExecutionMode):
            raise TypeError("execution_mode takes an ExecutionMode")
        self._execution_mode = value

    @property
    def execution_order(self) -> ExecutionOrder:
        """No effect if it is not DEFAULT: nodes keep the model's order."""
        return self._execution_order

    @execution_order.setter
    def execution_order(self, value: ExecutionOrder) -> None:
        if not isinstance(value, ExecutionOrder):
            raise TypeError("execution_order takes an ExecutionOrder")
        self._execution_order = value

    @property
    def enable_profiling(self) -> bool:
        """Whether the session measures its runs for :meth:`InferenceSession.end_profiling`."""
        return self._profiling

    @enable_profiling.setter
    def enable_profiling(self, value: bool) -> None:
        self._profiling = _flag("enable_profiling", value)

    @property
    def profile_file_prefix(self) -> str:
        """How the name of the profile begins. The time and ``.json`` follow."""
        return self._prefix

    @profile_file_prefix.setter
    def profile_file_prefix(self, value: str) -> None:
        self._prefix = _text("profile_file_prefix", value)

    @property
    def optimized_model_filepath(self) -> str:
        """Where to write the model after the passes that do not depend on a device."""
        return self._optimized_path

    @optimized_model_filepath.setter
    def optimized_model_filepath(self, value: str) -> None:
        self._optimized_path = _text("optimized_model_filepath", value)

    @property
    def log_severity_level(self) -> int:
        """0 verbose to 4 fatal; -1 for the default. See :func:`set_default_logger_severity`."""
        return self._log_severity

    @log_severity_level.setter
    def log_severity_level(self, value: int) -> None:
        self._log_severity = -1 if value == -1 else check_severity(value)

    @property
    def log_verbosity_level(self) -> int:
        """No effect above 0."""
        return self._log_verbosity

    @log_verbosity_level.setter
    def log_verbosity_level(self, value: int) -> None:
        self._log_verbosity = _count("log_verbosity_level", value)

    @property
    def logid(self) -> str:
        """A name that the session's messages begin with."""
        return self._logid

    @logid.setter
    def logid(self, value: str) -> None:
        self._logid = _text("logid", value)

    @property
    def enable_cpu_mem_arena(self) -> bool:
        """Whether memory is kept for later runs. Otherwise each run returns it to the system."""
        return self._mem_arena

    @enable_cpu_mem_arena.setter
    def enable_cpu_mem_arena(self, value: bool) -> None:
        self._mem_arena = _flag("enable_cpu_mem_arena", value)

    @property
    def enable_mem_pattern(self) -> bool:
        """No effect if False: memory is always planned."""
        return self._mem_pattern

    @enable_mem_pattern.setter
    def enable_mem_pattern(self, value: bool) -> None:
        self._mem_pattern = _flag("enable_mem_pattern", value)

    @property
    def enable_mem_reuse(self) -> bool:
        """No effect if False: the memory of values that are not needed any more is always reused."""
        return self._mem_reuse

    @enable_mem_reuse.setter
    def enable_mem_reuse(self, value: bool) -> None:
        self._mem_reuse = _flag("enable_mem_reuse", value)

    @property
    def use_deterministic_compute(self) -> bool:
        """Limits the level to O1, at which sums do not depend on the number of threads."""
        return self._deterministic

    @use_deterministic_compute.setter
    def use_deterministic_compute(self, value: bool) -> None:
        self._deterministic = _flag("use_deterministic_compute", value)

    @property
    def use_per_session_threads(self) -> bool:
        """Whether ``intra_op_num_threads`` gives the session threads of its own.

        Otherwise it uses those of :func:`set_global_thread_pool_sizes`.
        """
        return self._per_session_threads

    @use_per_session_threads.setter
    def use_per_session_threads(self, value: bool) -> None:
        self._per_session_threads = _flag("use_per_session_threads", value)

    # Methods.

    def add_session_config_entry(self, key: str, value: str) -> None:
        """Adds a configuration entry. A warning names it when a session is made, if it has no effect."""
        self._entries.add(key, value)

    def get_session_config_entry(self, key: str) -> str:
        """The configuration entry.

        Raises:
            ArgumentError: If there is none.

        """
        return self._entries.get(key)

    def add_free_dimension_override_by_name(self, name: str, size: int) -> None:
        """Fixes the size of a dimension that the model gives this name."""
        self._by_name[_text("the name", name)] = _count("the size", size)

    def add_free_dimension_override_by_denotation(self, denotation: str, size: int) -> None:
        """Fixes the size of dimensions that the model denotes so, such as ``DATA_BATCH``."""
        self._by_denotation[_text("the denotation", denotation)] = _count("the size", size)

    def add_initializer(self, name: str, value: Any) -> None:
        """Uses a value, an ``OrtValue`` or an array, instead of the one that the model stores."""
        self._initializers.append((_text("the name", name), value))

    def add_external_initializers(self, names: Sequence[str], values: Sequence[Any]) -> None:
        """Uses values instead of those that the model stores in other files."""
        if len(names) != len(values):
            what = f"{len(names)} names and {len(values)} values"
            raise ArgumentError(f"add_external_initializers: {what}; give one value for each name")
        self._external_initializers.extend(zip(names, values, strict=True))

    def add_external_initializers_from_files_in_memory(
        self, names: Sequence[str], contents: Sequence[bytes], lengths: Sequence[int]
    ) -> None:
        """Uses contents in memory instead of the files of the model's external data."""
        if not len(names) == len(contents) == len(lengths):
            what = f"{len(names)} names, {len(contents)} contents and {len(lengths)} lengths"
            raise ArgumentError(f"add_external_initializers_from_files_in_memory: {what}")
        for name, content, length in zip(names, contents, lengths, strict=True):
            self._external_files[name] = bytes(memoryview(content)[:length])

    def add_provider(self, name: str, options: Mapping[str, str]) -> None:
        """Adds a provider for sessions that get none otherwise."""
        self._providers.append((_text("the provider", name), dict(options)))

    def has_providers(self) -> bool:
        """Whether :meth:`add_provider` added one."""
        return bool(self._providers)

    def set_load_cancellation_flag(self, is_cancelled: bool) -> None:
        """Lets a session refuse to load its model."""
        self._is_cancelled = _flag("set_load_cancellation_flag", is_cancelled)

    def register_custom_ops_library(self, path: str) -> None:
        """Raises: libraries of operators for onnxruntime cannot be loaded.

        Raises:
            NotImplemented: Always.

        """
        next_step = "Write the operator as a function in the model, or as a custom op in Rust"
        _refuse(f"the library of custom operators {path}", next_step)

    def add_provider_for_devices(self, devices: Sequence[Any], options: Mapping[str, str]) -> None:
        """Raises: name a provider instead.

        Raises:
            NotImplemented: Always.

        """
        del devices, options
        _refuse("add_provider_for_devices", "Use add_provider, or providers= of InferenceSession")

    def set_provider_selection_policy(self, policy: Any) -> None:
        """Raises: name a provider instead.

        Raises:
            NotImplemented: Always.

        """
        del policy
        _refuse(
            "set_provider_selection_policy",
            "Use providers= of InferenceSession; without it the best device is used",
        )

    def set_provider_selection_policy_delegate(self, delegate: Any) -> None:
        """Raises: name a provider instead.

        Raises:
            NotImplemented: Always.

        """
        del delegate
        _refuse("set_provider_selection_policy_delegate", "Use providers= of InferenceSession")

    def set_ep_context_data_read_func(self, read_func: Any) -> None:
        """Raises: there are no compiled contexts of providers.

        Raises:
            NotImplemented: Always.

        """
        del read_func
        _refuse("set_ep_context_data_read_func", "Give the ONNX model itself")

    def clear_ep_context_data_read_func(self) -> None:
        """Does what it says: there is no such function."""

    # For sessions.

    def level(self) -> str:
        """The level of Halcyon."""
        own = _LEVELS[self._level]
        return min(own, "O1") if self._deterministic else own

    def without_effect(self) -> Iterator[str]:
        """Options that differ from their defaults and have no effect."""
        if self._inter_op > 1:
            yield f"inter_op_num_threads={self._inter_op}: nodes run one after another"
        if self._execution_mode != ExecutionMode.ORT_SEQUENTIAL:
            yield f"execution_mode={self._execution_mode.name}: nodes run one after another"
        if self._execution_order != ExecutionOrder.DEFAULT:
            yield f"execution_order={self._execution_order.name}: nodes keep the model's order"
        if not self._mem_pattern:
            yield "enable_mem_pattern=False: memory is always planned"
        if not self._mem_reuse:
            yield "enable_mem_reuse=False: memory is always reused"
        if self._log_verbosity:
            yield f"log_verbosity_level={self._log_verbosity}: there is one kind of verbose messages"
        for entry in self._entries.unknown(SESSION_ENTRIES):
            yield f"the configuration entry {entry}"


class RunOptions:
    """Options of a run, with onnxruntime's names and defaults."""

    __slots__ = (
        "_cancel",
        "_entries",
        "_fetches_only",
        "_log_severity",
        "_log_verbosity",
        "_logid",
        "_warned",
    )

    def __init__(self) -> None:
        self._cancel = _native.Cancel()
        self._entries = _Entries("RunOptions")
        self._fetches_only = False
        self._log_severity = -1
        self._log_verbosity = 0
        self._logid = ""
        self._warned = False

    @property
    def terminate(self) -> bool:
        """Set from another thread, it ends the runs that use these options before their next step."""
        return self._cancel.is_cancelled

    @terminate.setter
    def terminate(self, value: bool) -> None:
        if _flag("terminate", value):
            self._cancel.cancel()
        else:
            self._cancel.reset()

    @property
    def only_execute_path_to_fetches(self) -> bool:
        """Whether nodes that the outputs asked for do not need are left out."""
        return self._fetches_only

    @only_execute_path_to_fetches.setter
    def only_execute_path_to_fetches(self, value: bool) -> None:
        self._fetches_only = _flag("only_execute_path_to_fetches", value)

    @property
    def log_severity_level(self) -> int:
        """0 verbose to 4 fatal; -1 for the session's."""
        return self._log_severity

    @log_severity_level.setter
    def log_severity_level(self, value: int) -> None:
        self._log_severity = -1 if value == -1 else check_severity(value)

    @property
    def log_verbosity_level(self) -> int:
        """No effect above 0."""
        return self._log_verbosity

    @log_verbosity_level.setter
    def log_verbosity_level(self, value: int) -> None:
        self._log_verbosity = _count("log_verbosity_level", value)

    @property
    def logid(self) -> str:
        """A name that the run's messages begin with."""
        return self._logid

    @logid.setter
    def logid(self, value: str) -> None:
        self._logid = _text("logid", value)

    def add_run_config_entry(self, key: str, value: str) -> None:
        """Adds a configuration entry. The first run warns by name if it has no effect."""
        self._entries.add(key, value)
        self._warned = False

    def get_run_config_entry(self, key: str) -> str:
        """The configuration entry.

        Raises:
            ArgumentError: If there is none.

        """
        return self._entries.get(key)

    def add_active_adapter(self, adapter: Any) -> None:
        """Raises: adapters of onnxruntime are not supported.

        Raises:
            NotImplemented: Always.

        """
        del adapter
        _refuse("add_active_adapter", "Language models take adapters: halcyon.load(path, adapters=...)")

    # For sessions.

    @property
    def cancel(self) -> _native.Cancel:
        """The flag behind ``terminate``."""
        return self._cancel

    @property
    def shrinks(self) -> bool:
        """Whether the run returns cached memory to the system when it is complete."""
        return bool(self._entries.find(SHRINK_ENTRY))

    def without_effect(self) -> list[str]:
        """Options that differ from their defaults and have no effect. Each is given once."""
        if self._warned:
            return []
        self._warned = True
        found = [f"the configuration entry {e}" for e in self._entries.unknown(RUN_ENTRIES)]
        if self._log_verbosity:
            found.append(f"log_verbosity_level={self._log_verbosity}")
        return found
