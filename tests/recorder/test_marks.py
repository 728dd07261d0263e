"""Marks next to a log: what was written is read, damage costs only its line, and all is bounded."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recorder.storage import marks
from recorder.storage.listing import Listing
from recorder.storage.marks import (
    AT_MS_MAX,
    LINE_BYTES_MAX,
    MARKS_MAX,
    TEXT_CHARS_MAX,
    Mark,
    TooManyMarks,
    add_mark,
    marks_path,
    read_marks,
    remove_mark,
)
from recorder.storage.store import Store
from tests.recorder.test_listing import write_log

TIMES = st.integers(0, AT_MS_MAX)
PLACES = st.tuples(TIMES, TIMES).map(sorted)
TEXTS = st.text(st.characters(), min_size=1, max_size=TEXT_CHARS_MAX)
NAMES = st.text(max_size=64)
GARBAGE = st.binary(max_size=80).map(lambda data: data.replace(b"\n", b""))
ADDED = st.tuples(st.just("add"), PLACES, TEXTS, NAMES)
STEPS = st.lists(
    st.one_of(
        ADDED,
        st.tuples(st.just("remove"), st.integers(1, 5)),
        st.tuples(st.just("damage"), GARBAGE),
    ),
    max_size=12,
)


@given(STEPS)
@example([("add", [3, 3], "\ud800\n\x00", "a"), ("damage", b'{"number": 9'), ("remove", 1)])
def test_what_was_written_is_read(steps: list[Any]) -> None:
    """A mark would be lost, stand elsewhere, come back, or take another one with it."""
    with TemporaryDirectory() as folder:
        path, kept, damaged, number = Path(folder) / "a.marks.jsonl", dict[int, Mark](), 0, 0
        for step in steps:
            if step[0] == "add":
                (at_ms, end_ms), number = step[1], number + 1
                where = {"at_ms": at_ms, "end_ms": end_ms, "text": step[2], "by": step[3]}
                made = add_mark(path, **where, now_ms=number)
                assert made == Mark(number=number, **where, written_ms=number)
                kept[number] = made
            elif step[0] == "remove" and step[1] in kept:
                assert remove_mark(path, step[1], by="b", now_ms=0)
                del kept[step[1]]
            elif step[0] == "remove":
                assert not path.exists() or not remove_mark(path, step[1], by="b", now_ms=0)
            elif step[1]:
                damaged += 1
                before = path.read_bytes() if path.exists() else b""
                path.write_bytes(before + b"\n" * (not before.endswith(b"\n")) + step[1])
        found = read_marks(path)
        assert found.marks == tuple(sorted(kept.values(), key=lambda it: (it.at_ms, it.number)))
        assert found.damaged == damaged


def changed(**fields: object) -> bytes:
    """A line of a mark, with other fields."""
    mark = Mark(number=1, at_ms=1, end_ms=2, text="x", by="", written_ms=3)
    return json.dumps({**attrs.asdict(mark), **fields}).encode()


@pytest.mark.parametrize(
    "line",
    [
        *(changed(number=0), changed(number=MARKS_MAX + 1), changed(number=True), b"[]", b"7"),
        *(changed(at_ms=-1), changed(at_ms=3), changed(at_ms=1.0), changed(end_ms=AT_MS_MAX + 1)),
        *(changed(text=""), changed(text="x" * (TEXT_CHARS_MAX + 1)), changed(text=["x"])),
        *(changed(by="x" * 65), changed(written_ms=None), changed(unit=3), b"\xff\xfe{", b"{}"),
        *(changed(text="x", pad="y" * LINE_BYTES_MAX), b'{"removes": 0}', b"[" * 9000, b"NaN"),
    ],
)
def test_a_line_out_of_its_bounds_is_damage(tmp_path: Path, line: bytes) -> None:
    """A file that was tampered with would break a page, or grow it without end."""
    path = tmp_path / "a.marks.jsonl"
    path.write_bytes(line + b"\n" + changed(number=2) + b"\n" + changed(number=2, text="z"))
    found = read_marks(path)
    assert ([it.text for it in found.marks], found.damaged) == (["x"], 2)


def test_there_are_so_many_marks_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script would fill the disk, by writing and removing too."""
    monkeypatch.setattr(marks, "MARKS_MAX", 3)
    path = tmp_path / "a.marks.jsonl"
    for _ in range(3):
        add_mark(path, at_ms=0, end_ms=0, text="x", by="", now_ms=0)
    remove_mark(path, 3, by="", now_ms=0)
    before = path.read_bytes()
    with pytest.raises(TooManyMarks):
        add_mark(path, at_ms=0, end_ms=0, text="x", by="", now_ms=0)
    monkeypatch.setattr(marks, "MARKS_MAX", MARKS_MAX)
    monkeypatch.setattr(marks, "FILE_BYTES_MAX", LINE_BYTES_MAX + len(before) - 1)
    with pytest.raises(TooManyMarks):
        add_mark(path, at_ms=0, end_ms=0, text="x", by="", now_ms=0)
    assert path.read_bytes() == before
    monkeypatch.setattr(marks, "FILE_BYTES_MAX", len(before) // 2)
    assert read_marks(path).damaged


def test_writers_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    """Two people would write the same number, and one would be taken for the other."""
    path = tmp_path / "a.marks.jsonl"

    def write(name: str) -> None:
        for _ in range(10):
            add_mark(path, at_ms=0, end_ms=0, text="x", by=name, now_ms=0)

    threads = [Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_marks(path)
    assert ([it.number for it in found.marks], found.damaged) == ([*range(1, 41)], 0)


def write(path: Path) -> None:
    """Write a mark."""
    add_mark(path, at_ms=0, end_ms=0, text="x", by="", now_ms=0)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_damage(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe would hold a thread of the server for ever, and a folder be an error of its own."""
    path = tmp_path / "a.marks.jsonl"
    make(path)
    before = len(os.listdir("/proc/self/fd"))
    assert read_marks(path) == marks.Marks(damaged=1)
    with pytest.raises(OSError, match=path.stem):
        write(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next mark would be lost with it, or one be there that its author was refused."""
    path = tmp_path / "a.marks.jsonl"
    write(path)
    before, put = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: put(descriptor, data[:9]))
        with pytest.raises(OSError, match="a part of a line"):
            write(path)
    for fails in (stat.S_ISREG, stat.S_ISDIR):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", partial(failing, fails))
            for act in (write, partial(remove_mark, number=1, by="", now_ms=0)):
                with pytest.raises(OSError, match="no space"):
                    act(path)
    assert path.read_bytes() == before


def failing(fails: Callable[[int], bool], descriptor: int) -> None:
    """Sync on a disk without space for files, or for names."""
    if fails(os.fstat(descriptor).st_mode):
        raise OSError("no space")


def test_a_removal_that_would_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mark would be there again that its author saw removed."""
    path = tmp_path / "a.marks.jsonl"
    write(path)
    monkeypatch.setattr(marks, "FILE_BYTES_MAX", LINE_BYTES_MAX)
    with pytest.raises(TooManyMarks):
        remove_mark(path, 1, by="", now_ms=0)


@pytest.mark.parametrize("act", [read_marks, write])
def test_a_link_is_not_followed(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    """Who may write into the folder could have another file read, or written to."""
    (tmp_path / "secret").write_text("secret")
    path = tmp_path / "a.marks.jsonl"
    path.symlink_to(tmp_path / "secret")
    if act is read_marks:
        assert read_marks(path) == marks.Marks(damaged=1)
    else:
        with pytest.raises(OSError, match="symbolic"):
            act(path)
    assert (tmp_path / "secret").read_text() == "secret"


def test_marks_go_with_their_log_and_are_no_log(tmp_path: Path) -> None:
    """What was said of a session would outlive it, or be listed as one."""
    for keeps in (True, False):
        path = write_log(tmp_path, "one")
        write(marks_path(path))
        assert marks_path(path).stat().st_mode & 0o777 == 0o600
        store = Store(tmp_path, keeps_marks=keeps)
        (info,) = store.logs()
        assert [it.recording_id for it in Listing(store).refresh()] == ["one"]
        store.remove(info)
        assert marks_path(path).exists() is keeps
    path.mkdir()  # a log that cannot be removed
    write(marks_path(path))
    with pytest.raises(OSError, match="one"):
        store.remove(info)
    assert marks_path(path).exists()
    path.rmdir()
    write(marks_path(path))  # as of a log that only an object store has
    with pytest.raises(FileNotFoundError):
        store.remove(info)
    assert not marks_path(path).exists()
