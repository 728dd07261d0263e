"""What a server does about memory that Python and the C library look after: for its whole process.

A unit passes through half a dozen buffers of some 100 kB. glibc gives memory back to the system as
soon as 128 kB of it lie free at the heap's end, and takes it again, page by page, for the next
frame: a fifth of the CPU of a hundred sessions whose units come in the same moment.
"""

from __future__ import annotations

import ctypes
import gc
import os
from typing import Final

HEAP_SPARE_BYTES: Final = 64 << 20
"""Free memory that is kept: what a hundred units need that are under way at once."""
MAPPED_BYTES_MIN: Final = 4 << 20
"""From here on a buffer has a mapping of its own and goes back at once: the largest frames do."""

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_OPERATORS: Final = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Variables by which an operator says it; then it stays as it is said."""


def keep_what_is_freed() -> bool:
    """Have the C library keep some freed memory for the next frames.

    Returns:
        Whether it does: only glibc can be told, and not where an operator told it otherwise.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _OPERATORS):
        return False
    wanted = ((_M_TRIM_THRESHOLD, HEAP_SPARE_BYTES), (_M_MMAP_THRESHOLD, MAPPED_BYTES_MIN))
    return all(mallopt(name, size) for name, size in wanted)


def give_back() -> None:
    """Give the system what lies free between what is used; 50 us a MB, next to nothing for none.

    Without it the pieces of messages that came in at once stay with the process for ever: the C
    library gives back the heap's end alone.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and needs it
    if trim is not None:
        trim(HEAP_SPARE_BYTES)


def spare_what_stays() -> None:
    """Take what was loaded out of the garbage collector's sight until the server ends.

    With a model that is some 400000 objects, and looking at them holds all sessions up for 0.2 s.
    """
    gc.collect()
    gc.freeze()


def find_what_was_spared() -> None:
    """Let the garbage collector see it again: a model that is replaced, once nobody holds it."""
    gc.unfreeze()
