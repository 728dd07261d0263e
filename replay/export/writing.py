"""A session's log written in one format; no incomplete file is left.

The file is written next to its name, with its log's permissions, and renamed when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final, Literal, get_args

from recorder.format.records import Fields, Record
from recorder.read.scan import Damage
from recorder.write.files import new_file

from .timeline import Timeline

Format = Literal["wav", "srt", "vtt", "mp4", "jsonl", "mcap", "txt", "dataset"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
SUFFIXES: Final[Mapping[str, Format]] = MappingProxyType(
    {**{f".{name}": name for name in FORMATS}, ".cast": "txt", ".tar": "dataset"}
)
"""Formats by a file's ending."""
STREAMS: Final[frozenset[Format]] = frozenset({"srt", "vtt", "jsonl", "txt"})
"""Formats written from start to end, which may go to stdout."""

_MODULES: Final = {"wav": "mixer", "mcap": "mcap_file", "txt": "cast"} | dict.fromkeys(
    ("srt", "vtt"), "captions"
)
_WRITERS: Final = {"txt": "write_cast"}
"""Writers whose name is not the format's."""

Write = Callable[[Timeline, BinaryIO], None]


def export(
    head: Fields,
    items: Iterable[Record | Damage],
    to: Format,
    output: Path | BinaryIO,
    *,
    like: Path | None = None,
    replaces: bool = False,
) -> Timeline:
    """Write a log's session, given its head, records in order and damage; return its time line.

    Args:
        output: the file, or a stream for one of `STREAMS`.
        like: the log: the same people may read and write the file.
        replaces: replace an existing file.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it cannot be written.
        RecorderError: the log cannot be read.
        TooLongError: the session is longer than the format's sound can be.
    """
    timeline = Timeline(head, items)
    with _opened(output, like, replaces=replaces) as file:
        _writer(to)(timeline, file)
    return timeline


@contextmanager
def _opened(output: Path | BinaryIO, like: Path | None, *, replaces: bool) -> Iterator[BinaryIO]:
    if not isinstance(output, Path):
        yield output
        return
    with new_file(output, like=like, replaces=replaces) as part, part.open("w+b") as file:
        yield file


def _writer(to: Format) -> Write:
    """Load the writer of a format, without importing the others."""
    module = import_module(f".{_MODULES.get(to, to)}", __package__)
    write: Write = getattr(module, _WRITERS.get(to, f"write_{to}"))
    return write
