"""Errors of session logs.

    RecorderError
     ├── LogMisuse          the caller broke a rule: wrong order, wrong name, closed log
     │    ├── RecordInvalid the caller's record cannot be stored exactly
     │    └── LogFull       the caller exceeded the backlog without waiting for room
     ├── LogFailed          the disk or the recorder failed; the log takes nothing more
     └── LogUnsound         bytes on disk are not valid
          ├── FormatError   one header, payload, record or blob is not valid
          │    └── VersionUnknown  possibly valid: a newer version wrote it
          ├── LogDamaged    a reader was told to stop at the first damage
          └── Unreadable    nothing can be read: both session records are lost
               └── TooNew   a newer version wrote it

Messages name the fact, the value and the limit. They are never shown to a client.
"""

from __future__ import annotations


class RecorderError(Exception):
    """Base of all errors that this package raises deliberately."""


class LogMisuse(RecorderError):  # noqa: N818 - names say what happened
    """The caller broke a rule of the recorder."""


class RecordInvalid(LogMisuse):
    """The record cannot be stored so that reading gives back exactly the same."""


class LogFull(LogMisuse):
    """The record would exceed the hard bound of the backlog and was not taken."""


class LogFailed(RecorderError):  # noqa: N818
    """The log failed and is never written again; everything written before stays readable."""


class LogUnsound(RecorderError):  # noqa: N818
    """Bytes on disk are not valid."""


class FormatError(LogUnsound):
    """One header, payload, record or blob is not valid."""


class VersionUnknown(FormatError):  # noqa: N818
    """An unknown version or kind of record: a newer version wrote it."""


class LogDamaged(LogUnsound):
    """A reader that stops at the first damage found some."""


class Unreadable(LogUnsound):
    """Both session records are lost, or were never written."""


class TooNew(Unreadable):
    """A newer version wrote the log."""
