"""`torch.compile(model, backend="halcyon")`: PyTorch's graphs as plans of Halcyon.

Where the package is installed, PyTorch finds the backend by its entry point, without an import. Where it is
only on the path, `import halcyon.torch` makes it known.
"""

from __future__ import annotations

# These modules define operations and the table's rows.
import halcyon.torch.compile.joint
import halcyon.torch.compile.ops  # noqa: F401
from halcyon.torch.compile.aot import halcyon_backend
from halcyon.torch.compile.reports import FallbackWarning, GraphReport, Report, report, reset_report
from halcyon.torch.compile.table import names as supported_operations

__all__ = [
    "FallbackWarning",
    "GraphReport",
    "Report",
    "halcyon_backend",
    "report",
    "reset_report",
    "supported_operations",
]
