"""How far work on logs is: a bar on stderr, where somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from recorder.reader import LogReader
from recorder.records import Record
from recorder.scan import Damage

Watch = Callable[[int], None]
"""Told how many bytes of a log were read since it was told last."""


Count = Callable[[int, int], None]
"""Told how many are done, of how many."""


def unwatched(_: int) -> None:
    """Tell nobody."""


@contextmanager
def progress(total_bytes: int, what: str = "replay") -> Iterator[Watch]:
    """Show a bar over the bytes of all logs, until the block ends.

    Args:
        total_bytes: of all that is to be read.
        what: is done.

    Yields:
        What is told of bytes that were read; it does nothing where stderr is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield unwatched
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda read_bytes: bar.advance(task, read_bytes)


@contextmanager
def count(what: str, *, quiet: bool = False) -> Iterator[Count]:
    """Show a bar over what is counted, until the block ends.

    Args:
        what: is done.
        quiet: show none.

    Yields:
        What is told how many are done; it does nothing where stderr is no terminal.
    """
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
    """Iterate a log, and tell how much of it was read; what is left unread counts at the end."""
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


def size_of(log: Path) -> int:
    """The size of a file; 0 where there is none."""
    try:
        return log.stat().st_size
    except OSError:
        return 0
