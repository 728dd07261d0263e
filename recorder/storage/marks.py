"""Marks next to a log: annotations of a recording that has ended, in a file next to the log.

A log that has ended is never changed. So a later mark is a line of JSON in a file of its own,
`RECORDING_ID.marks.jsonl`, and a removed mark is another line. Rules: lines are only appended, by
one writer at a time (flock), and are on the device (fsync) when a call returns. A line that is
damaged or out of its bounds is skipped and counted. The file is user data, not a cache; it goes
with its log (`Store.remove`).
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from ..format.format import MIB, SUFFIX
from ..write.files import FILE_MODE, Disk

MARKS_SUFFIX: Final = ".marks.jsonl"
TEXT_CHARS_MAX: Final = 1000
"""A remark, not a report."""
NAME_CHARS_MAX: Final = 64
"""Of an author: as long as a key's name may be."""
AT_MS_MAX: Final = 10**9
"""Eleven days: longer than a session, and JavaScript holds its nanoseconds exactly."""
MARKS_MAX: Final = 500
"""Of a recording, removed ones included: enough for several people, too few to fill a disk."""
LINE_BYTES_MAX: Final = 16 * 1024
"""The longest text fits, even with each character escaped twice."""
FILE_BYTES_MAX: Final = 8 * MIB
"""All marks at their longest; of a longer file the rest is damage."""
UNIX_MS_MAX: Final = 10**15
"""More than 30,000 years."""


class TooManyMarks(Exception):  # noqa: N818 - an answer to the client, not an error of ours
    """The recording has its marks already."""


def _whole(low: int, high: int) -> Any:
    """A field of whole numbers; `ValueError` for another value."""

    def check(_mark: object, field: attrs.Attribute[int], value: object) -> None:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{field.name} is not a whole number from {low} to {high}")

    return attrs.field(validator=check)


def _text(chars_min: int, chars_max: int) -> Any:
    """A field of text; `ValueError` for another value."""

    def check(_mark: object, field: attrs.Attribute[str], value: object) -> None:
        if not isinstance(value, str) or not chars_min <= len(value) <= chars_max:
            raise ValueError(f"{field.name} is not text of {chars_min} to {chars_max} characters")

    return attrs.field(validator=check)


@attrs.frozen(kw_only=True)
class Mark:
    """A mark next to a log; `ValueError` if a field is out of its bounds.

    Attributes:
        number: its name in this file, from 1.
        at_ms, end_ms: where it stands, on the session's clock; both are the same for a moment.
        text: of a client, not trusted.
        by: the name of its author's key; empty without keys.
        written_ms: when it was written, in Unix milliseconds.
    """

    number: int = _whole(1, MARKS_MAX)
    at_ms: int = _whole(0, AT_MS_MAX)
    end_ms: int = _whole(0, AT_MS_MAX)
    text: str = _text(1, TEXT_CHARS_MAX)
    by: str = _text(0, NAME_CHARS_MAX)
    written_ms: int = _whole(0, UNIX_MS_MAX)

    def __attrs_post_init__(self) -> None:
        """Check the order of its ends."""
        if self.end_ms < self.at_ms:
            raise ValueError("end_ms is before at_ms")


@attrs.frozen(kw_only=True)
class _Removal:
    """A mark was removed."""

    removes: int = _whole(1, MARKS_MAX)
    by: str = _text(0, NAME_CHARS_MAX)
    written_ms: int = _whole(0, UNIX_MS_MAX)


@attrs.frozen(kw_only=True)
class Marks:
    """The marks of a recording, by their places; `damaged` lines could not be read."""

    marks: tuple[Mark, ...] = ()
    damaged: int = 0

    def of(self, number: int) -> Mark | None:
        """Return the mark of a number, or None."""
        return next((mark for mark in self.marks if mark.number == number), None)


def marks_path(log: Path) -> Path:
    """Return where the marks of a log are."""
    return log.with_name(log.name.removesuffix(SUFFIX) + MARKS_SUFFIX)


def read_marks(path: Path) -> Marks:
    """Read a file of marks; a missing one has none, an unreadable one is damaged."""
    try:
        with _opened(path, os.O_RDONLY) as descriptor:
            return _parsed(_content(descriptor))[0]
    except FileNotFoundError:
        return Marks()
    except OSError:
        return Marks(damaged=1)


def add_mark(path: Path, *, at_ms: int, end_ms: int, text: str, by: str, now_ms: int) -> Mark:
    """Append a mark, whose fields are as `Mark` has them; blocking. `OSError`, `TooManyMarks`."""
    with _locked(path, os.O_CREAT) as descriptor:
        data = _content(descriptor)
        _, last = _parsed(data)
        if last >= MARKS_MAX:
            raise TooManyMarks
        place = {"number": last + 1, "at_ms": at_ms, "end_ms": end_ms}
        mark = Mark(**place, text=text, by=by, written_ms=now_ms)
        _append(descriptor, data, attrs.asdict(mark))
    return mark


def remove_mark(path: Path, number: int, *, by: str, now_ms: int) -> bool:
    """Append that a mark is removed; False if it is missing. Blocks and raises as `add_mark`."""
    with _locked(path) as descriptor:
        data = _content(descriptor)
        if _parsed(data)[0].of(number) is None:
            return False
        removal = _Removal(removes=number, by=by, written_ms=now_ms)
        _append(descriptor, data, attrs.asdict(removal))
    return True


# -- the file -----------------------------------------------------------------------------------


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file, without waiting; `OSError` for a link, a pipe and the like."""
    flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, FILE_MODE)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a file")
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file to change it, with its name on the device."""
    with _opened(path, flags | os.O_RDWR | os.O_APPEND) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if not os.fstat(descriptor).st_nlink:
            raise FileNotFoundError(path)  # removed with its log while this waited
        Disk().sync_directory(path.parent)
        yield descriptor


def _content(descriptor: int) -> bytes:
    parts = bytearray()
    while len(parts) <= FILE_BYTES_MAX and (part := os.pread(descriptor, MIB, len(parts))):
        parts += part
    return bytes(parts)


def _append(descriptor: int, data: bytes, fields: Mapping[str, object]) -> None:
    """Append a line, wholly or not at all; a line before it that was cut off is ended."""
    if len(data) > FILE_BYTES_MAX - LINE_BYTES_MAX:
        raise TooManyMarks
    start = b"\n" if data and not data.endswith(b"\n") else b""
    line = start + json.dumps(fields).encode() + b"\n"  # ASCII: a text may have lone surrogates
    end = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, line) != len(line):
            raise OSError("the disk wrote only a part of a line")
        os.fsync(descriptor)
    except OSError:
        os.ftruncate(descriptor, end)
        raise


# -- lines --------------------------------------------------------------------------------------


def _parsed(data: bytes) -> tuple[Marks, int]:
    """Read a file's lines: the marks that are there, and the highest number given to one."""
    found, removed = dict[int, Mark](), set[int]()
    damaged = int(len(data) > FILE_BYTES_MAX)
    for line in data[:FILE_BYTES_MAX].split(b"\n"):
        entry = _read(line) if line else None
        if isinstance(entry, Mark) and entry.number not in found:
            found[entry.number] = entry
        elif isinstance(entry, _Removal):
            removed.add(entry.removes)
        elif line:
            damaged += 1
    left = (mark for number, mark in found.items() if number not in removed)
    marks = sorted(left, key=lambda it: (it.at_ms, it.number))
    return Marks(marks=tuple(marks), damaged=damaged), max([0, *found, *removed])


def _read(line: bytes) -> Mark | _Removal | None:
    """Read a line; None if it is damaged."""
    if len(line) > LINE_BYTES_MAX:
        return None
    try:
        fields = json.loads(line)
        return _Removal(**fields) if "removes" in fields else Mark(**fields)
    except (TypeError, ValueError, RecursionError):
        return None
