"""Who writes a log: its writer holds a lock on the file for as long as the file is open.

Rules: the lock is the operating system's (flock) and goes with its process, however that ends. So a
log that has no `fin` and no lock is one whose writer died. It is advisory: readers read on. Where a
file system has no locks logs are written all the same, and none of them seems to be held.

It waits for nobody but for a reader that is just looking, which takes microseconds.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


def hold(descriptor: int) -> None:
    """Hold the lock of a file that was just made, until it is closed."""
    with suppress(OSError):  # no locks here: `is_held` cannot tell then, and retention looks at age
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def is_held(path: Path) -> bool:
    """Whether somebody writes a log now; also where that is this process itself.

    Raises:
        OSError: there is no such file, it is a link, or it cannot be read.
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
