"""Enumerations and descriptions, under onnxruntime's names and with its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from halcyon._errors import ArgumentError

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "ModelMetadata",
    "NodeArg",
    "OrtAllocatorType",
    "OrtDevice",
    "OrtDeviceMemoryType",
    "OrtDeviceVendorId",
    "OrtMemType",
    "OrtMemoryInfo",
    "OrtMemoryInfoDeviceType",
    "OrtSparseFormat",
]


class GraphOptimizationLevel(IntEnum):
    """How far a model is optimised. The levels of Halcyon are O0, O1 and, for the last three, O2."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(IntEnum):
    """Whether nodes run one after another. Halcyon's plans do so."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


class ExecutionOrder(IntEnum):
    """The order of the nodes. Halcyon's plans keep the model's order."""

    DEFAULT = 0
    PRIORITY_BASED = 1
    MEMORY_EFFICIENT = 2


class OrtAllocatorType(IntEnum):
    """Kinds of allocators."""

    INVALID = -1
    ORT_DEVICE_ALLOCATOR = 0
    ORT_ARENA_ALLOCATOR = 1


class OrtMemType(IntEnum):
    """Kinds of memory by use."""

    CPU_INPUT = -2
    CPU_OUTPUT = -1
    CPU = -1
    DEFAULT = 0


class OrtDeviceMemoryType(IntEnum):
    """Kinds of memory of a device."""

    DEFAULT = 0
    HOST_ACCESSIBLE = 5


class OrtMemoryInfoDeviceType(IntEnum):
    """Kinds of devices."""

    CPU = 0
    GPU = 1
    FPGA = 2
    NPU = 3


class OrtSparseFormat(IntEnum):
    """Formats of sparse tensors, which Halcyon's sessions do not take."""

    ORT_SPARSE_UNDEFINED = 0
    ORT_SPARSE_COO = 1
    ORT_SPARSE_CSRC = 2
    ORT_SPARSE_BLOCK_SPARSE = 4


class OrtDeviceVendorId(IntEnum):
    """Vendors by their PCI numbers."""

    NONE = 0x0000
    AMD = 0x1002
    NVIDIA = 0x10DE
    ARM = 0x13B5
    MICROSOFT = 0x1414
    HUAWEI = 0x19E5
    QUALCOMM = 0x5143
    INTEL = 0x8086


#: A size that the model fixes, the name of a size, or None for a size that it leaves open.
Size = int | str | None


class NodeArg:
    """A declared input or output: ``name``, ``type`` such as ``tensor(float)``, and ``shape``."""

    __slots__ = ("_shape", "name", "type")

    name: str
    type: str

    def __init__(self, name: str, type: str, shape: Sequence[Size]) -> None:
        self.name = name
        self.type = type
        self._shape = tuple(shape)

    @property
    def shape(self) -> list[Size]:
        """A list of the sizes, which the caller may change."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"NodeArg(name={self.name!r}, type={self.type!r}, shape={self.shape!r})"


class ModelMetadata:
    """The description in a model file."""

    __slots__ = (
        "_custom",
        "description",
        "domain",
        "graph_description",
        "graph_name",
        "producer_name",
        "version",
    )

    description: str
    domain: str
    graph_description: str
    graph_name: str
    producer_name: str
    version: int

    def __init__(self, facts: dict[str, Any]) -> None:
        self._custom: dict[str, str] = facts["custom"]
        self.description = facts["description"]
        self.domain = facts["domain"]
        self.graph_description = facts["graph_description"]
        self.graph_name = facts["graph_name"]
        self.producer_name = facts["producer_name"]
        # onnxruntime gives this number for a file without a version.
        self.version = facts["version"] or (1 << 63) - 1

    @property
    def custom_metadata_map(self) -> dict[str, str]:
        """A dict of the further entries, which the caller may change."""
        return dict(self._custom)

    def __repr__(self) -> str:
        return f"ModelMetadata({self.graph_name!r} of {self.producer_name!r}, version {self.version})"


#: Names of devices as onnxruntime writes them, with its number of the kind of device.
DEVICE_KINDS = {"cpu": 0, "cuda": 1, "rocm": 1, "hip": 1, "opencl": 1, "webgpu": 1, "metal": 1, "gpu": 1}


class OrtDevice:
    """The device of a value."""

    __slots__ = ("_id", "_name")

    def __init__(self, name: str, device_id: int = 0) -> None:
        if name.lower() not in DEVICE_KINDS:
            what = f'"{name}" is not a kind of device; the kinds are {", ".join(DEVICE_KINDS)}'
            raise ArgumentError(f"OrtDevice: {what}")
        self._name = name.lower()
        self._id = device_id

    @staticmethod
    def make(ort_device_name: str, device_id: int, vendor_id: int = -1) -> OrtDevice:
        """The device with this name and number. The name determines the vendor."""
        del vendor_id
        return OrtDevice(ort_device_name, device_id)

    def device_type(self) -> int:
        """0 for the CPU, 1 for a GPU."""
        return DEVICE_KINDS[self._name]

    def device_id(self) -> int:
        """The number of the device among those of its kind."""
        return self._id

    def device_mem_type(self) -> int:
        """The kind of memory: the device's own."""
        return int(OrtDeviceMemoryType.DEFAULT)

    def device_vendor_id(self) -> int:
        """The vendor's PCI number; 0 where the name does not determine it."""
        vendors = {
            "cuda": OrtDeviceVendorId.NVIDIA,
            "rocm": OrtDeviceVendorId.AMD,
            "hip": OrtDeviceVendorId.AMD,
        }
        return int(vendors.get(self._name, OrtDeviceVendorId.NONE))

    @property
    def name(self) -> str:
        """The name, such as ``cuda``."""
        return self._name

    def __repr__(self) -> str:
        return f"OrtDevice({self._name!r}, {self._id})"


class OrtMemoryInfo:
    """Where a session's inputs or outputs are."""

    __slots__ = ("allocator_type", "device_id", "device_type", "mem_type", "name")

    def __init__(
        self,
        name: str,
        allocator_type: OrtAllocatorType,
        device_id: int,
        mem_type: OrtMemType,
    ) -> None:
        self.name = name
        self.allocator_type = allocator_type
        self.device_id = device_id
        self.mem_type = mem_type
        kind = DEVICE_KINDS.get(name.lower(), 0)
        self.device_type = OrtMemoryInfoDeviceType(kind)

    def __repr__(self) -> str:
        return f"OrtMemoryInfo({self.name!r}, {self.device_id})"
