"""What a server's process does about memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import trio

from runtime.net import link
from runtime.net.limits import Counters
from runtime.net.link import CHECK_S, ConnectionMonitor
from runtime.net.process import HEAP_SPARE_BYTES, importing
from runtime.settings.settings import Settings

FAULTS: Final = """
import resource, sys
from runtime.net.process import keep_freed_memory
print(keep_freed_memory())
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


def test_what_a_module_makes_is_not_searched_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of the time until a model is loaded would go into searches that find nothing."""
    (tmp_path / "made_for_a_test.py").write_text("import gc\nwas_on, made = gc.isenabled(), [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with importing():
        import made_for_a_test  # type: ignore[import-not-found]
    try:
        assert not made_for_a_test.was_on
        assert gc.isenabled()
        assert not any(each is made_for_a_test.made for each in gc.get_objects())
    finally:
        del sys.modules["made_for_a_test"]


def test_what_was_imported_before_is_left_to_the_collector() -> None:
    """A process that calls commands over and over would keep all its garbage."""
    kept = gc.get_freeze_count()
    with importing():
        import json  # noqa: F401
    assert gc.get_freeze_count() == kept


def test_a_command_ends_without_a_search_for_garbage() -> None:
    """It would take a second at the end of a server with a model."""
    code = (
        "import atexit, gc; from runtime.cli import main;"
        "gc.collect(); before = len(gc.get_objects());"
        "atexit.register(lambda: print(before > 5000, len(gc.get_objects()) < 500));"
        "main(['dev', 'states'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert ran.stdout.splitlines()[-1] == "True True"


def test_an_operator_who_says_how_memory_is_kept_is_heeded() -> None:
    """A small machine, tuned by hand, would run out of memory."""
    assert not faults(MALLOC_TRIM_THRESHOLD_="131072")[0]


def test_memory_is_given_back_while_other_threads_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections would not be looked after as long as readers wait for a disk."""

    async def body() -> None:
        given = trio.Event()
        loop = trio.lowlevel.current_trio_token()
        monkeypatch.setattr(link, "trim_heap", lambda: loop.run_sync_soon(given.set))
        threads = trio.to_thread.current_default_thread_limiter()
        busy = [object() for _ in range(int(threads.available_tokens))]
        for borrower in busy:
            threads.acquire_on_behalf_of_nowait(borrower)
        try:
            counters = Counters(receiving_bytes=2 * HEAP_SPARE_BYTES)
            async with trio.open_nursery() as tasks:
                tasks.start_soon(ConnectionMonitor(Settings(), counters).run)
                await trio.sleep(2 * CHECK_S)
                counters.receiving_bytes = 0
                with trio.fail_after(20):
                    await given.wait()
                tasks.cancel_scope.cancel()
        finally:
            for borrower in busy:
                threads.release_on_behalf_of(borrower)

    trio.run(body)
