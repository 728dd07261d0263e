"""A writer's lock on its log, held while the file is open.

Rules: the lock is the operating system's (flock) and ends with the process. So a log with neither
`fin` nor a lock is one whose writer died. It is advisory: readers ignore it. On a file system
without locks, logs are written all the same and none appears held. Locking waits only for a
reader's check, which takes microseconds.
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


def is_held(path: Path) -> bool:
    """Whether a process, this one included, is writing the log.

    Raises:
        OSError: the file does not exist, is a link, or cannot be read.
    """
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
