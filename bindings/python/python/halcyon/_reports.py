"""Reports as objects: the devices of the machine, a selection, and the findings of ``doctor``.

Each prints as text, is a table in notebooks, and gives its data with ``to_dict()``.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Any, overload

from halcyon import _native
from halcyon._default import resolve_backend, shared
from halcyon._errors import UnavailableError, at_least
from halcyon._native import Backend
from halcyon._program import program

__all__ = ["Device", "Devices", "DoctorReport", "Selection", "devices", "doctor", "select"]


def _size(n: int | None) -> str:
    """A number of bytes, as in ``23.5 GiB``."""
    if n is None:
        return "unknown"
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{n} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _text(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """A table in HTML."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(f'<{tag} style="text-align:left">{html.escape(cell)}</{tag}>' for cell in row)

    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table>"


def _first_line(text: str | None) -> str:
    return (text or "no reason is known").splitlines()[0]


class Device:
    """A device of the machine."""

    def __init__(self, facts: dict[str, Any]) -> None:
        """A device with these facts, as ``to_dict()`` gives them."""
        self._facts = facts

    @property
    def id(self) -> str:
        """The name with which the device is opened, such as ``cuda:0``."""
        return str(self._facts["id"])

    @property
    def backend(self) -> str:
        """The backend's name, such as ``cuda``."""
        return str(self._facts["backend"])

    @property
    def index(self) -> int:
        """The device's number within its backend."""
        return int(self._facts["index"])

    @property
    def name(self) -> str:
        """The product's name."""
        return str(self._facts["name"])

    @property
    def vendor(self) -> str:
        """The vendor; empty if it is not known."""
        return str(self._facts["vendor"])

    @property
    def driver_version(self) -> str | None:
        """The driver's version."""
        found: str | None = self._facts["driver_version"]
        return found

    @property
    def total_memory(self) -> int | None:
        """The memory in bytes."""
        found: int | None = self._facts["total_memory"]
        return found

    @property
    def free_memory(self) -> int | None:
        """The free memory in bytes, when the device was found."""
        found: int | None = self._facts["free_memory"]
        return found

    @property
    def software(self) -> bool:
        """Whether it runs on the processor and is tried last."""
        return bool(self._facts["software"])

    @property
    def properties(self) -> dict[str, str]:
        """Further facts that the driver reports."""
        return dict(self._facts["properties"])

    def open(self) -> Backend:
        """Opens the device, once for all who name it."""
        return resolve_backend(self.id)

    def to_dict(self) -> dict[str, Any]:
        """The device's facts."""
        return dict(self._facts)

    def _row(self) -> list[str]:
        memory = f"{_size(self.total_memory)}, free {_size(self.free_memory)}"
        return [self.id, self.name, memory, "software, tried last" if self.software else ""]

    def __repr__(self) -> str:
        """The device's name and product."""
        return f"Device({self.id}, {self.name})"


class Devices(Sequence[Device]):
    """The devices of the machine, and the backends without a device."""

    def __init__(self, report: dict[str, Any]) -> None:
        """The devices of a report of the native module."""
        self._report = report
        self._devices = [Device(d) for b in report["backends"] for d in b["devices"]]

    @property
    def recommended(self) -> str | None:
        """The backend that ``auto`` chooses."""
        found: str | None = self._report["recommended"]
        return found

    @property
    def unavailable(self) -> dict[str, str]:
        """The reason for each backend without a device."""
        absent = (b for b in self._report["backends"] if not b["available"])
        return {b["id"]: b["reason"] or "no reason is known" for b in absent}

    def summary(self) -> str:
        """Every backend with its devices or the whole reason, and the recommended backend."""
        return str(self._report["text"])

    def to_dict(self) -> dict[str, Any]:
        """``backends`` with their devices, reasons, what was tried and the fix; ``recommended``."""
        return {"backends": self._report["backends"], "recommended": self._report["recommended"]}

    @overload
    def __getitem__(self, index: int) -> Device: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Device]: ...

    def __getitem__(self, index: int | slice) -> Device | Sequence[Device]:
        """A device by its place in the list."""
        return self._devices[index]

    def __len__(self) -> int:
        """The number of devices."""
        return len(self._devices)

    def __iter__(self) -> Iterator[Device]:
        """The devices in order."""
        return iter(self._devices)

    def _absent(self) -> list[list[str]]:
        absent = (b for b in self._report["backends"] if not b["available"])
        return [[b["id"], _first_line(b["brief"] or b["reason"])] for b in absent]

    def __repr__(self) -> str:
        """A line for each device, then one for each backend without a device."""
        found = [d._row() for d in self._devices]
        parts = [_text(rows) for rows in (found, self._absent()) if rows]
        return "\n\n".join(parts) if found else "no device was found\n\n" + "\n".join(parts)

    def _repr_html_(self) -> str:
        found = _table(["device", "name", "memory", ""], [d._row() for d in self._devices])
        absent = self._absent()
        return found + (_table(["backend", "why it has no device"], absent) if absent else "")


class Selection:
    """Why a device was chosen, and why each other candidate was rejected."""

    def __init__(self, chosen: Backend) -> None:
        """The report of a backend that was opened for it. All who name the device share one backend."""
        self._facts: dict[str, Any] = _native.selection(chosen)
        self._text = chosen.selection
        self._backend = shared(chosen)

    @property
    def backend(self) -> Backend:
        """The open device."""
        return self._backend

    @property
    def device(self) -> Device:
        """The facts of the chosen device."""
        return Device(self._facts["device"])

    @property
    def rule(self) -> str:
        """The rule that chose it."""
        return str(self._facts["rule"])

    @property
    def rejected(self) -> dict[str, str]:
        """The reason for each rejected backend or device."""
        rejected = (c for c in self._facts["candidates"] if c["rejected"] is not None)
        return {c["device"] or c["backend"]: c["rejected"] for c in rejected}

    def to_dict(self) -> dict[str, Any]:
        """The whole report: request, device, rule, order and candidates."""
        return dict(self._facts)

    def _rows(self) -> list[list[str]]:
        chosen = [self.device.id, "chosen", self.rule]
        candidates = (c for c in self._facts["candidates"] if c["rejected"] is not None)
        briefs = ((c["device"] or c["backend"], c["brief"] or c["rejected"]) for c in candidates)
        return [chosen, *([name, "rejected", _first_line(why)] for name, why in briefs)]

    def __repr__(self) -> str:
        """The device and the rule, then a line for each rejected candidate."""
        return self._text

    def _repr_html_(self) -> str:
        title = f"{self.device.id} ({self.device.name})"
        return _table(["candidate", "", "why"], self._rows(), title)


class DoctorReport:
    """The findings about the machine and each backend, step by step."""

    def __init__(self, sections: Sequence[dict[str, Any]], asked: bool) -> None:
        """The findings of sections of the native module; ``asked``: the last backend was asked for."""
        self._sections = [s["section"] for s in sections]
        self._lines = "".join(s["text"] for s in sections)
        self._code = _native.doctor_verdict([s["status"] for s in self._sections], asked)

    @property
    def exit_code(self) -> int:
        """0: everything that is present works; 1: there are warnings; 2: there are failures."""
        return self._code

    @property
    def ok(self) -> bool:
        """Whether everything that is present works."""
        return self._code == 0

    @property
    def failures(self) -> list[str]:
        """The steps that failed, each with its section."""
        return [
            f"{s['id']}: {line['check']}: {line['text']}"
            for s in self._sections
            for line in s["lines"]
            if line["status"] == "fail"
        ]

    def to_dict(self) -> dict[str, Any]:
        """``sections`` with their lines, and ``exit_code``, as ``halcyon doctor --json`` prints them."""
        return {"sections": self._sections, "exit_code": self._code}

    def __repr__(self) -> str:
        """The sections as ``halcyon doctor`` prints them."""
        verdict = ("everything that is present works", "there are warnings", "there are failures")
        return f"{self._lines}\n{verdict[self._code]}"

    def _repr_html_(self) -> str:
        rows = [
            [s["id"], line["status"], line["device"] or "", line["check"], line["text"]]
            for s in self._sections
            for line in s["lines"]
        ]
        return _table(["", "status", "device", "check", "finding"], rows)


def devices(*, refresh: bool = False) -> Devices:
    """The devices of this machine.

    Drivers are loaded in child processes first, because a broken one may crash its process.

    Args:
        refresh: Whether the remembered results of earlier probes are discarded.
    """
    return Devices(_native.discover(refresh))


def select(
    name: str = "auto", *, policy: str | None = None, fallback: str | None = None, memory: int = 0
) -> Selection:
    """Chooses and opens a device, and says why.

    Args:
        name: ``auto``, the name of a backend, or of a device such as ``cuda:1``.
        policy: The order in which ``auto`` tries backends: ``priority``, another policy's name, or names of
            backends separated by commas.
        fallback: What happens if a device is rejected: ``never``, ``next`` or ``cpu``.
        memory: Bytes that must be free on the device.
    """
    at_least("select", memory=memory)
    return Selection(_native.select_backend(name, policy, fallback, memory))


def doctor(backend: str | None = None, *, timeout: int = 120) -> DoctorReport:
    """Checks step by step whether each backend works, each in a child process.

    Args:
        backend: The only backend to check. Default: all.
        timeout: The most seconds for one backend.
    """
    at_least("doctor", timeout=timeout)
    child = program()
    if child is None:
        raise UnavailableError(
            "doctor starts a child process for each backend, and this program is no Python interpreter that "
            "it can start. Run `halcyon doctor`."
        )
    names = _native.doctor_backends(backend)
    sections = [_native.doctor_host()]
    sections += [_native.doctor_section(name, timeout, child) for name in names]
    return DoctorReport(sections, asked=len(names) == 1)
