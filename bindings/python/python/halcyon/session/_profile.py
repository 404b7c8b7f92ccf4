"""Profiles of sessions as Chrome traces."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

__all__ = ["Profiler"]


class Profiler:
    """Collects events, and writes them to a file that chrome://tracing and Perfetto read."""

    def __init__(self, prefix: str, provider: str) -> None:
        self.start_ns = time.perf_counter_ns()
        self._prefix = prefix
        self._provider = provider
        self._events: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._path: str | None = None

    def add(
        self, name: str, category: str, start_ns: int, nanoseconds: int, args: Mapping[str, Any] | None = None
    ) -> None:
        """Adds an event. The start is a time of ``time.perf_counter_ns``."""
        event = {
            "cat": category,
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "dur": nanoseconds / 1000,
            "ts": (start_ns - self.start_ns) / 1000,
            "ph": "X",
            "name": name,
            "args": dict(args or {}),
        }
        with self._lock:
            self._events.append(event)

    def add_run(self, start_ns: int, events: list[dict[str, Any]]) -> None:
        """Adds the events of a run, whose times count from its start."""
        for e in events:
            args = dict(e["properties"])
            name = e["name"]
            if e["category"] == "Node":
                args["provider"] = self._provider
                name = f"{name}_kernel_time"
            self.add(name, e["category"], start_ns + e["start"], e["nanoseconds"], args)

    def write(self) -> str:
        """Writes the file once. Returns its name."""
        with self._lock:
            if self._path is None:
                stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
                path = f"{self._prefix}_{stamp}.json"
                # Another session may have used this second's name.
                number = 1
                while os.path.exists(path):
                    path = f"{self._prefix}_{stamp}_{number}.json"
                    number += 1
                with open(path, "w", encoding="utf-8") as f:
                    json.dump(self._events, f)
                self._path = path
            return self._path
