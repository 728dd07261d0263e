"""What a server's process does about memory."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

import pytest

FAULTS: Final = """
import resource, sys
from runtime.memory import keep_what_is_freed
print(keep_what_is_freed())
def frames():
    buffers = [bytearray(120_000 + 16 * number) for number in range(200)]
    del buffers
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
before = [frames() for _ in range(3)][-1]
print(frames() - before)
"""
"""24 MB in frames of 120 kB, again and again: how many pages are taken anew the fourth time?"""


def faults(**variables: str) -> tuple[bool, int]:
    """Whether freed memory is kept, and how many pages had to be taken again."""
    ran = subprocess.run(
        [sys.executable, "-c", FAULTS],
        capture_output=True,
        check=True,
        text=True,
        env={**os.environ, **variables},
    )
    kept, pages = ran.stdout.split()
    return kept == "True", int(pages)


def test_the_memory_of_a_frame_is_there_for_the_next() -> None:
    """A hundred sessions in step would spend a fifth of their time on taking pages back."""
    kept, pages = faults()
    if not kept:
        pytest.skip("not glibc")
    assert pages < 100, "of some 6000"


def test_an_operator_who_says_how_memory_is_kept_is_heeded() -> None:
    """A small machine, tuned by hand, would run out of memory."""
    assert not faults(MALLOC_TRIM_THRESHOLD_="131072")[0]
