"""The command line: ``python -m halcyon`` and the script ``halcyon``."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

from halcyon import _native
from halcyon._program import program

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code.

    The command takes over the process: its standard streams and Ctrl-C. A program that goes on afterwards
    should start it with ``subprocess.run([sys.executable, "-m", "halcyon", ...])``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.current_thread() is threading.main_thread():
        # Python's handler would wait for the end of the command.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.command(["halcyon", *given], program())


if __name__ == "__main__":
    sys.exit(main())
