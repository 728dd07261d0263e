"""The progress of work on logs: a bar on stderr, on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console

from recorder.format.records import Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.storage.store import local_log
from recorder.storage.summary import summarize

Watch = Callable[[int], None]
"""Called with the progress since its last call: bytes of a log read, or model calls made."""


Count = Callable[[int, int], None]
"""Called with the number done, and the total."""

LOADING: Final = "loading model"


def unwatched(_: int) -> None:
    """Show nothing."""


@contextmanager
def progress(total: int, what: str = "replay", *, of_calls: bool = False) -> Iterator[Watch]:
    """Show a bar over all logs, until the block ends; nothing unless stderr is a terminal.

    `total` are bytes to read, or calls of a model: the bar says that it loads until the first call.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield unwatched
        return
    from rich import progress as rich

    amount = rich.MofNCompleteColumn() if of_calls else rich.DownloadColumn()
    said = rich.TextColumn("{task.description}")
    columns = (said, rich.BarColumn(), amount, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(LOADING if of_calls else what, total=total)

        def watch(done: int) -> None:
            bar.update(task, advance=done, description=what)

        yield watch


@contextmanager
def count(what: str, *, quiet: bool = False) -> Iterator[Count]:
    """Show a bar over a count, until the block ends; nothing unless stderr is a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _done, _total: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def watched(reader: LogReader, watch: Watch) -> Iterator[Record | Damage]:
    """Iterate a log, and report the bytes read; unread bytes count at the end."""
    blocks, left_bytes = 0, reader.tail_bytes
    try:
        for item in reader:
            if reader.blocks != blocks:
                blocks, before = reader.blocks, left_bytes
                left_bytes = reader.tail_bytes
                watch(before - left_bytes)
            yield item
    finally:
        watch(left_bytes)


def calls_of(log: Path) -> int:
    """The calls of its model in a log, by its summary; 0 without one."""
    try:
        info = local_log(log.name, log, log.stat())
        summary = None if info is None else summarize(info)
    except OSError:
        return 0
    if summary is None:
        return 0
    return sum(count or 0 for count in (summary.units, summary.turns, summary.chunks))


def size_of(log: Path) -> int:
    """The size of a file; 0 if it is missing."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
