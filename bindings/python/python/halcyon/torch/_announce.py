"""Makes the backend ``halcyon`` known to `torch.compile` where the package is not installed.

PyTorch finds the backends of installed packages by their entry points. A package that is only on the path has
none, so `import halcyon.torch` adds the name. The registry of PyTorch takes more than a second to import, so
the name is added when PyTorch imports it, which `torch.compile` does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["announce"]

_REGISTRY = "torch._dynamo.backends.registry"
_ENTRY = importlib.metadata.EntryPoint(
    name="halcyon", value="halcyon.torch.compile:halcyon_backend", group="torch_dynamo_backends"
)


def _add(registry: ModuleType) -> None:
    """Adds the name, unless PyTorch knows it."""
    registry._BACKENDS.setdefault("halcyon", _ENTRY)


class _Loader(importlib.abc.Loader):
    """Loads the registry, then adds the name."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _add(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the registry once, and then no longer looks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def announce() -> None:
    """Adds the backend's name now, or when PyTorch imports its registry."""
    registry = sys.modules.get(_REGISTRY)
    if registry is not None:
        _add(registry)
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
