"""How far a replay is, on stderr, where somebody looks: a bar over the bytes of all its logs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from .folder import Watch


@contextmanager
def progress(total_bytes: int) -> Iterator[Watch]:
    """Show a bar until the block ends.

    Args:
        total_bytes: of all that is to be read.

    Yields:
        What is told of bytes that were read; it does nothing where stderr is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("replay"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("replay", total=total_bytes)
        yield lambda read_bytes: bar.advance(task, read_bytes)
