"""Messages and warnings of sessions, by onnxruntime's severities.

0: verbose, 1: info, 2: warning, 3: error, 4: fatal.
"""

from __future__ import annotations

import logging
import warnings

from halcyon._errors import ArgumentError, HalcyonWarning

__all__ = ["info", "set_default_logger_severity", "set_default_logger_verbosity", "severity_of", "warn"]

#: What :func:`logging.getLogger` gives for sessions.
LOGGER = logging.getLogger("halcyon.session")

INFO = 1
WARNING = 2

_default = WARNING


def set_default_logger_severity(severity: int) -> None:
    """Sets from which severity on messages appear, for sessions without a severity of their own.

    From 3 on there are no :class:`HalcyonWarning` from sessions. At 0 and 1, sessions report their device and
    their runs to the logger ``halcyon.session``.
    """
    global _default
    _default = check_severity(severity)


def set_default_logger_verbosity(verbosity: int) -> None:
    """Refuses another verbosity than 0: there is one kind of verbose messages.

    Raises:
        ArgumentError: For another number.

    """
    if verbosity != 0:
        what = f"{verbosity} has no effect: there is one kind of verbose messages"
        raise ArgumentError(f"set_default_logger_verbosity: {what}. Use set_default_logger_severity(0)")


def check_severity(severity: int) -> int:
    """The severity, if it is one."""
    if severity not in range(5):
        raise ArgumentError(f"severity: {severity} is not one of 0 (verbose) to 4 (fatal)")
    return int(severity)


def severity_of(own: int) -> int:
    """The severity that counts: a session's own, or the default if that is -1."""
    return _default if own < 0 else own


def warn(message: str, severity: int = -1, stacklevel: int = 3) -> None:
    """Warns, unless the severity hides warnings."""
    if severity_of(severity) <= WARNING:
        warnings.warn(message, HalcyonWarning, stacklevel=stacklevel + 1)


def info(message: str, severity: int, logid: str) -> None:
    """Reports to the logger, if the severity shows it."""
    if severity_of(severity) > INFO:
        return
    if not LOGGER.handlers and not logging.getLogger().handlers:
        LOGGER.addHandler(logging.StreamHandler())
    LOGGER.setLevel(min(LOGGER.level or logging.INFO, logging.INFO))
    LOGGER.info("%s%s", f"[{logid}] " if logid else "", message)
