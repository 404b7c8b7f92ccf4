"""``IOBinding``: inputs and outputs that stay where they are between runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halcyon import _native
from halcyon._errors import ArgumentError
from halcyon.session import _arrays
from halcyon.session._ortvalue import OrtValue, device_name, is_cpu
from halcyon.session.exceptions import InvalidArgument
from halcyon.session.exceptions import NotImplemented as NotSupported

if TYPE_CHECKING:
    from halcyon.session._options import RunOptions
    from halcyon.session._session import InferenceSession

__all__ = ["IOBinding"]


class _Output:
    """Where an output goes: memory of the caller, a new array, or a new tensor on the session's device."""

    __slots__ = ("memory", "on_device", "value")

    def __init__(
        self, value: OrtValue | None = None, memory: npt.NDArray[Any] | None = None, on_device: bool = False
    ) -> None:
        self.value = value
        self.memory = memory
        self.on_device = on_device


class IOBinding:
    """Values for a session's inputs, and places for its outputs."""

    def __init__(self, session: InferenceSession) -> None:
        self._session = session
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, _Output] = {}
        self._results: list[OrtValue] = []

    # Inputs.

    def _check_input(self, name: str) -> None:
        known = [a.name for a in self._session.get_inputs() + self._session.get_overridable_initializers()]
        if name not in known:
            what = f'the model has no input "{name}"; its inputs are {", ".join(known)}'
            raise InvalidArgument(f"bind: {what}")

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Binds an array, or another value that a run takes. A run reads an array's memory at that time."""
        self._check_input(name)
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self,
        name: str,
        device_type: str,
        device_id: int,
        element_type: Any,
        shape: Sequence[int],
        buffer_ptr: int,
    ) -> None:
        """Binds memory of the caller, who keeps it alive, by its address on the CPU.

        Raises:
            NotImplemented: For memory of other devices; bind an ``OrtValue`` instead.

        """
        self._check_input(name)
        self._inputs[name] = _memory(name, device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: OrtValue) -> None:
        """Binds a value. Tensors on the session's device are used where they are."""
        self._check_input(name)
        self._inputs[name] = _value("bind_ortvalue_input", ortvalue)

    # Outputs.

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Binds an output to a new value on a device, or to memory of the caller on the CPU."""
        if buffer_ptr is not None:
            if element_type is None or shape is None:
                raise InvalidArgument("bind_output: an address needs element_type and shape")
            memory = _memory(name, device_type, device_id, element_type, shape, buffer_ptr)
            self._outputs[name] = _Output(memory=memory)
            return
        device_name(device_type, device_id)
        self._outputs[name] = _Output(on_device=not is_cpu(device_type))

    def bind_ortvalue_output(self, name: str, ortvalue: OrtValue) -> None:
        """Binds an output to a value, which a run overwrites."""
        self._outputs[name] = _Output(value=_value("bind_ortvalue_output", ortvalue))

    def get_outputs(self) -> list[OrtValue]:
        """The outputs of the last run, in the order in which they were bound."""
        return list(self._results)

    get_outputs_as_ortvaluevector = get_outputs

    def copy_outputs_to_cpu(self) -> list[Any]:
        """The outputs of the last run as arrays, lists and dicts."""
        return [v.numpy() if v.is_tensor() else v._halcyon_value for v in self._results]

    # Others.

    def clear_binding_inputs(self) -> None:
        """Forgets the inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forgets the outputs, and the results of the last run."""
        self._outputs.clear()
        self._results = []

    def synchronize_inputs(self) -> None:
        """Waits for work on the session's device."""
        self._session._backend.synchronize()

    def synchronize_outputs(self) -> None:
        """Waits for work on the session's device."""
        self._session._backend.synchronize()

    def _run(self, run_options: RunOptions | None) -> None:
        if not self._outputs:
            raise InvalidArgument("run_with_iobinding: no output is bound; use bind_output")
        names = list(self._outputs)
        keep = any(o.on_device for o in self._outputs.values())
        made = self._session._execute(names, dict(self._inputs), run_options, keep)
        types = {a.name: a.type for a in self._session.get_outputs()}
        self._results = [_place(n, self._outputs[n], v, types[n]) for n, v in zip(names, made, strict=True)]


def _value(what: str, value: object) -> OrtValue:
    if isinstance(value, OrtValue):
        return value
    raise InvalidArgument(f"{what}: a {type(value).__name__} is no OrtValue")


def _place(name: str, output: _Output, value: Any, type_text: str) -> OrtValue:
    """Puts a result where the output is bound to."""
    if isinstance(value, _native.Tensor) and not output.on_device:
        value = _native.to_numpy(value)
    if output.value is None and output.memory is None:
        return OrtValue._of_result(value, type_text)
    to = output.value if output.value is not None else OrtValue._of_result(output.memory, type_text)
    try:
        to.update_inplace(value)
    except ArgumentError as e:
        raise InvalidArgument(f'the output "{name}" does not fit the value that it is bound to: {e}') from e
    return to


def _memory(
    name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], address: int
) -> npt.NDArray[Any]:
    """The array at an address."""
    if not is_cpu(device_type):
        device = device_name(device_type, device_id)
        what = f'"{name}" by its address on {device}'
        raise NotSupported(
            f"not supported yet: {what}. Bind an OrtValue with bind_ortvalue_input or bind_output"
        )
    _, onnx, own = _arrays.element_of(element_type)
    if own is None:
        raise InvalidArgument(f'bind: "{name}" has the element type {onnx}, which has no address')
    dtype = _arrays.numpy_dtype(own)
    if 0 in shape:
        return np.empty(tuple(shape), dtype)
    if not address:
        raise InvalidArgument(f'bind: the address of "{name}" is 0')
    return _arrays.at_address(int(address), dtype, shape)
