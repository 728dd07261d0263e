"""A writer's lock on its log, held while the file is open.

Rules: flock ends with the process, so a log with neither `fin` nor a lock has lost its writer. It
is advisory: readers ignore it. Without file system locks, logs are written and none appears held.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def hold(descriptor: int) -> None:
    """Lock a newly created file until it is closed."""
    with suppress(OSError):  # no locks here: `is_held` cannot tell then, and retention looks at age
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def take(descriptor: int) -> None:
    """Lock a file whose writer is gone; `BlockingIOError` if another process holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_held(path: Path) -> bool:
    """Whether any process is writing the log; `OSError` if it cannot be read or is a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
