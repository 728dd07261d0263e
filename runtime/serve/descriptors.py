"""The process's limit of open files, and the connections that it allows.

A connection takes a descriptor, and its session's log another, maybe for longer. Connections are
taken only while there is room for both: a log that cannot be opened is a lost recording.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

import attrs

from ..settings.settings import Settings

OTHER_FILES: Final = 512
"""Model files, Python's own files, connections being refused, and logs that end."""
LOGS_ENDING_MAX: Final = 256
"""Logs of ended sessions that wait to be synced: half of the reserve."""

_logger = logging.getLogger("antiphon.server")


def allow(wanted: int, *, files: int | None) -> tuple[int, int]:
    """The limits that `files` open files allow; None means no limit.

    Returns:
        Of connections, at most `wanted`, and of logs of ended sessions.
    """
    if files is None or files >= 2 * wanted + OTHER_FILES:
        return wanted, LOGS_ENDING_MAX
    reserve = min(OTHER_FILES, files // 2)
    connections_max = max(1, min(wanted, (files - reserve) // 2))
    return connections_max, max(1, reserve * LOGS_ENDING_MAX // OTHER_FILES)


def allow_open_files(settings: Settings) -> tuple[Settings, int]:
    """Raise the limit of open files; return the settings that fit, and `logs_ending_max`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.connections_max
    needed = 2 * wanted + OTHER_FILES
    files = None if resource.RLIM_INFINITY in (soft, hard) else min(max(soft, needed), hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if files is None else files, hard))
    connections_max, logs_ending_max = allow(wanted, files=files)
    if connections_max < wanted:
        text = (
            "%d files may be open: connections_max is lowered from %d to %d. Raise the limit "
            "(ulimit -n) to %d"
        )
        _logger.warning(text, files, wanted, connections_max, needed)
    return attrs.evolve(settings, connections_max=connections_max), logs_ending_max
