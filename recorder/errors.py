"""What can go wrong with a session log.

    RecorderError
     ├── LogMisuse          the caller broke a rule of ours: wrong order, wrong name, closed log
     │    ├── RecordInvalid the caller's record cannot be stored exactly
     │    └── LogFull       the caller went past the backlog without waiting for room
     ├── LogFailed          the disk or the recorder failed; the log takes nothing more
     └── LogUnsound         bytes on disk are not what a writer wrote
          ├── FormatError   one header, payload, record or blob is not valid
          │    └── VersionUnknown  it may be: a newer version wrote it
          ├── LogDamaged    a reader was told to stop at the first damage
          └── Unreadable    nothing can be read: both session records are lost
               └── TooNew   a newer version wrote it

Messages name what happened, the value and the limit. None is meant for a client's eyes.
"""

from __future__ import annotations


class RecorderError(Exception):
    """Anything that this package raises on purpose."""


class LogMisuse(RecorderError):  # noqa: N818 - names say what happened
    """The caller broke a rule of the recorder."""


class RecordInvalid(LogMisuse):
    """The record cannot be stored so that reading gives back exactly the same."""


class LogFull(LogMisuse):
    """The record would go past the hard bound of the backlog; it was not taken."""


class LogFailed(RecorderError):  # noqa: N818
    """The log failed and is never written again; what was written before still reads."""


class LogUnsound(RecorderError):  # noqa: N818
    """Bytes on disk are not what a writer wrote."""


class FormatError(LogUnsound):
    """One header, payload, record or blob is not valid."""


class VersionUnknown(FormatError):  # noqa: N818
    """A version, or a kind of record, that this reader does not know: a newer one wrote it."""


class LogDamaged(LogUnsound):
    """A reader that stops at the first damage found one."""


class Unreadable(LogUnsound):
    """Both session records are lost, or were never written."""


class TooNew(Unreadable):
    """A newer version wrote the log."""
