"""A folder of logs as a list: what each says of itself, and what is remembered of it."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import anyio
import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder.format.format import HEADER_BYTES, Fields, Record, Unreadable
from recorder.read.reader import read
from recorder.read.scan import BytesSource, Damage
from recorder.storage.listing import (
    DIGEST_BYTES_MAX,
    Entry,
    Index,
    Listing,
    LogFilter,
    Summary,
    page_of,
    summarize,
    whole_bytes,
)
from recorder.storage.store import INDEX_NAME, WITH_STORE_NAME, LogInfo, Store
from recorder.write.files import is_held
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder
from tests.recorder.test_samples import block_offsets

GOLDEN = Path(__file__).parents[2] / "fixtures" / "logs"
HEAD: Fields = {
    "wall_ms": 1_700_000_000_000,
    "config": {"mode": "audio", "model": "scripted", "owner": "anna"},
}
FIN: Fields = {"reason": "client", "dialect": "realtime", "units": 2}


def units(count: int, sound: bytes = b"") -> list[Record]:
    """Some units, a second each."""
    return [
        Record(
            kind="unit",
            seq=1 + index,
            at_ns=(1 + index) * 10**9,
            fields={"type": "UnitDone", "result": {"index": index, "pcm": sound}},
        )
        for index in range(count)
    ]


def open_log(recorder: Recorder, path: Path, head: Fields = HEAD, count: int = 2) -> SessionLog:
    """Begin a log and write some units, a block each."""
    log = recorder.open(path, head, at_ns=0)
    for record in units(count, os.urandom(2000)):
        log.append(record, urgent=True)
    return log


def write_log(folder: Path, name: str = "a", head: Fields = HEAD, fin: Fields | None = FIN) -> Path:
    """Write a small log, with an end or without one."""
    path = Store(folder).path(name)
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        log = open_log(recorder, path, head)
        if fin is not None:
            anyio.run(partial(log.finish, fin, at_ns=3_500_000_000))
    return path


def summary_of(path: Path) -> Summary:
    info = Store(path.parent).find(path.name.split(".")[0])
    assert info is not None
    return summarize(info)


def listed(folder: Path) -> tuple[Summary, ...]:
    return Listing(Store(folder)).refresh()


# -- one log --------------------------------------------------------------------------------------


def test_a_finished_log_tells_all(tmp_path: Path) -> None:
    """An operator would have to open each recording to see whose it is and how it ended."""
    path = write_log(tmp_path)
    status = path.stat()
    assert summary_of(path) == Summary(
        recording_id="a",
        state="finished",
        began_ms=1_700_000_000_000,
        duration_ms=3500,
        mode="audio",
        dialect="realtime",
        owner="anna",
        model="scripted",
        reason="client",
        units=2,
        file_bytes=status.st_size,
        modified_ms=status.st_mtime_ns // 1_000_000,
    )


def test_a_log_without_an_end_tells_what_is_in_its_tail(tmp_path: Path) -> None:
    """What a killed server left would look empty, or like a session that runs."""
    path = write_log(tmp_path, fin=None)
    with path.open("ab") as file:
        file.write(path.read_bytes()[:100])  # it died amid a block
    told = summary_of(path)
    assert (told.state, told.reason, told.duration_ms, told.units) == ("crashed", None, 2000, 2)
    assert (told.mode, told.owner) == ("audio", "anna")


@pytest.mark.parametrize("content", [b"", b"no log at all" * 50, bytes(70_000)])
def test_what_is_no_log_is_listed_as_such(tmp_path: Path, content: bytes) -> None:
    """One broken file would hide all others, or be hidden."""
    Store(tmp_path).path("a").write_bytes(content)
    (told,) = listed(tmp_path)
    assert (told.state, told.owner, told.file_bytes) == ("unreadable", "", len(content))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.zst")), ids=lambda it: it.name.split(".")[0])
def test_head_and_tail_tell_what_the_whole_log_tells(path: Path) -> None:
    """A list made from two ends of a log would say other things than reading all of it."""
    damage: list[Damage] = []
    try:
        records = list(read(path, on_damage=damage.append))
    except Unreadable:
        assert summary_of(path).state == "unreadable"
        return
    told, head, last = summary_of(path), records[0].fields, records[-1]
    assert (told.began_ms, told.mode) == (head["wall_ms"], head["config"]["mode"])  # type: ignore[index, call-overload]
    if last.kind == "fin":
        said = [last.fields.get(name) for name in ("reason", "dialect", "units", "chunks")]
        found = [told.reason, told.dialect, told.units, told.chunks]
        assert (told.state, found) == ("finished", said)
        assert (told.chunks is not None) == (told.mode == "transcription")
    elif not damage:
        begun = [it.fields["result"]["index"] + 1 for it in records if it.kind == "unit"]  # type: ignore[index, call-overload, operator]
        assert (told.state, told.units) == ("crashed", max(begun, default=None))
    if not damage:
        assert told.duration_ms == last.at_ns // 1_000_000


@pytest.mark.parametrize(
    "config",
    [
        {"mode": 7, "owner": ["anna"], "model": None},
        {"mode": "a" * 300, "owner": "an\x1b[2Jna", "model": "\ud800"},
        "none",
    ],
)
def test_what_a_log_says_is_not_believed(tmp_path: Path, config: object) -> None:
    """A log made elsewhere could break the list, a terminal, or seem to be somebody's."""
    head = {"wall_ms": 10**17, "config": config}
    told = summary_of(write_log(tmp_path, head=head, fin={"reason": 3, "units": -1}))  # type: ignore[arg-type]
    assert (told.state, told.began_ms, told.mode, told.owner) == ("finished", None, None, "")
    assert (told.model, told.reason, told.units) == (None, None, None)


@settings(max_examples=40)
@given(data=st.data())
def test_a_log_cut_anywhere_is_told_and_handed_out_whole_blocks(data: st.DataObject) -> None:
    """A list would fail on the log that is just being written, or a download end amid a block."""
    whole = (GOLDEN / "v1-legacy-duplex.session.zst").read_bytes()
    end = data.draw(st.integers(0, len(whole)))
    ends = block_offsets(whole)[1:]
    assert whole_bytes(BytesSource(whole[:end])) == max([it for it in ends if it <= end], default=0)


def test_the_end_of_a_log_that_grew_large_is_found(tmp_path: Path) -> None:
    """A large block at the end would be taken for none."""
    path = Store(tmp_path).path("a")
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        log = recorder.open(path, HEAD, at_ns=0)
        for record in (units(1, os.urandom(9))[0], units(2, os.urandom(3_000_000))[1]):
            log.append(record, urgent=True)
    data = path.read_bytes()
    last = block_offsets(data)[-2]
    assert whole_bytes(BytesSource(data)) == len(data)
    assert whole_bytes(BytesSource(data[:-1])) == last
    assert whole_bytes(BytesSource(data[: last + HEADER_BYTES - 1])) == last


# -- who writes it --------------------------------------------------------------------------------


def test_a_log_is_held_while_it_is_written(tmp_path: Path) -> None:
    """Retention would remove the log of a session that runs, or never that of a killed one."""
    path = Store(tmp_path).path("a")
    listing = Listing(Store(tmp_path))
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        log = open_log(recorder, path)
        assert is_held(path)
        assert [it.state for it in listing.refresh()] == ["open"]
        anyio.run(partial(log.finish, FIN, at_ns=9))
        assert not is_held(path)
        assert [it.state for it in listing.refresh()] == ["finished"]


DIES = """
import os, sys
from pathlib import Path
from recorder.write.writer import Recorder
recorder = Recorder(clock=lambda: 0.0, inline=True)
recorder.open(Path(sys.argv[1]), {"config": {"mode": "chat"}}, at_ns=0)
print("open", flush=True)
sys.stdin.read()
os._exit(9)
"""


def test_another_process_is_seen_to_write_and_to_die(tmp_path: Path) -> None:
    """`antiphon recordings prune` beside a server would remove what the server writes."""
    path = Store(tmp_path).path("a")
    listing = Listing(Store(tmp_path))
    command = (sys.executable, "-c", DIES, str(path))
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as writer:
        assert writer.stdin is not None
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        assert [(it.state, it.mode) for it in listing.refresh()] == [("open", "chat")]
        writer.stdin.close()
        writer.wait(20)
    assert [it.state for it in listing.refresh()] == ["crashed"]


# -- the index ------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The logs that are read, by their ids."""
    read: list[str] = []

    def noted(info: LogInfo) -> Summary:
        read.append(info.recording_id)
        return summarize(info)

    monkeypatch.setattr("recorder.storage.listing.summarize", noted)
    return read


def test_a_log_is_read_once(tmp_path: Path, reads: list[str]) -> None:
    """A list of thousands of logs would take seconds each time."""
    for name in ("a", "b"):
        write_log(tmp_path, name)
    first = listed(tmp_path)
    assert sorted(reads) == ["a", "b"]
    assert listed(tmp_path) == first
    assert len(reads) == 2
    assert (tmp_path / INDEX_NAME).stat().st_mode & 0o077 == 0


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def exchange(path: Path) -> None:
    status = path.stat()
    shutil.copy(path, path.with_name("copy"))
    path.with_name("copy").replace(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [touch, grow, exchange])
def test_a_changed_file_is_read_again(
    tmp_path: Path, reads: list[str], change: Callable[[Path], None]
) -> None:
    """The list would tell what a file was, not what it is."""
    path = write_log(tmp_path)
    write_log(tmp_path, "b")
    listing = Listing(Store(tmp_path))
    listing.refresh()
    change(path)
    del reads[:]
    assert listing.refresh() == listed(tmp_path)
    assert set(reads) == {"a"}


def test_a_removed_log_is_listed_no_more(tmp_path: Path) -> None:
    """The index would show a recording that nobody can open."""
    path, _ = write_log(tmp_path), write_log(tmp_path, "b")
    listing = Listing(Store(tmp_path))
    listing.refresh()
    path.unlink()
    assert [it.recording_id for it in listing.refresh()] == ["b"]
    with sqlite3.connect(tmp_path / INDEX_NAME) as database:
        assert database.execute("SELECT recording_id FROM logs").fetchall() == [("b",)]
    database.close()


def test_a_digest_is_kept_as_long_as_its_log(tmp_path: Path) -> None:
    """A list would show what another log said, or tell the words of one that was removed."""
    store, words = Store(tmp_path), b'{"said": "the secret words"}' * 20
    for name in ("a", "b"):
        write_log(tmp_path, name)
    index, (one, other) = Index(tmp_path), sorted(store.logs(), key=lambda it: it.recording_id)
    index.keep_digest(one, "1", words)  # in no list yet
    assert index.digest_of(one, "1") is None
    Listing(store).refresh()
    for info in (one, other):
        index.keep_digest(info, "1", words)
        assert index.digest_of(info, "1") == words
        assert index.digest_of(info, "2") is None  # another version makes another one
        assert index.digest_of(attrs.evolve(info, modified_ns=1), "1") is None
    store.path("a").write_bytes(store.path("a").read_bytes() + b"x")
    Listing(store).refresh()
    assert index.digest_of(one, "1") is None
    assert index.digest_of(other, "1") == words
    with sqlite3.connect(tmp_path / INDEX_NAME) as database:  # some other program was here
        database.execute("UPDATE logs SET digest = 'text' WHERE recording_id = 'a'")
    database.close()
    (changed,) = (it for it in store.logs() if it.recording_id == "a")
    assert index.digest_of(changed, "1") is None
    store.remove(other)
    assert b"secret" not in (tmp_path / INDEX_NAME).read_bytes()
    index.keep_digest(one, "1", bytes(DIGEST_BYTES_MAX + 1))
    assert index.digest_of(one, "1") is None


@pytest.mark.parametrize(("name", "left"), [(INDEX_NAME, []), (WITH_STORE_NAME, [("a", None)])])
def test_what_was_removed_by_other_means_is_forgotten(
    tmp_path: Path, name: str, left: list[tuple[str, None]]
) -> None:
    """The words of a file that an operator removed by hand would stay until the disk is full."""
    path, index = write_log(tmp_path), Index(tmp_path, name)
    (info,) = Store(tmp_path).logs()
    index.save([Entry(info=info, summary=summarize(info))], ())
    index.keep_digest(info, "1", b"the secret words")
    assert b"secret" in (tmp_path / name).read_bytes()
    path.unlink()
    assert index.load({}) == {}
    assert b"secret" not in (tmp_path / name).read_bytes()
    with sqlite3.connect(tmp_path / name) as database:
        assert database.execute("SELECT recording_id, digest FROM logs").fetchall() == left
    database.close()


def test_the_digests_of_the_oldest_logs_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index would grow with each recording that was ever looked at."""
    monkeypatch.setattr("recorder.storage.listing.DIGESTS_BYTES_MAX", 250)
    monkeypatch.setattr("recorder.storage.listing.DROPPED_DIGESTS", 1)
    for age, name in enumerate("cab"):
        os.utime(write_log(tmp_path, name), (age, age))
    Listing(Store(tmp_path)).refresh()
    index, logs = Index(tmp_path), Store(tmp_path).logs()
    for info in logs:
        index.keep_digest(info, "1", bytes(100))
    kept = {it.recording_id for it in logs if index.digest_of(it, "1") is not None}
    assert kept == {"a", "b"}


def test_what_is_being_written_stays_out_of_the_index(tmp_path: Path) -> None:
    """Each look at a busy server would write to its disk."""
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        open_log(recorder, Store(tmp_path).path("a"))
        listed(tmp_path)
        assert not (tmp_path / INDEX_NAME).exists()


def overwrite(path: Path, sql: str) -> None:
    database = sqlite3.connect(path)
    with database:
        database.execute(sql)
    database.close()


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.write_bytes(b"no database" * 100),
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        partial(overwrite, sql="PRAGMA user_version = 99"),
        partial(overwrite, sql='UPDATE logs SET summary = \'{"recording_id": "a", "new": 1}\''),
        partial(overwrite, sql="UPDATE logs SET summary = 'none'"),
    ],
)
def test_a_broken_index_costs_time_and_nothing_else(
    tmp_path: Path, harm: Callable[[Path], None], reads: list[str]
) -> None:
    """A power cut, or another version's index, would leave an operator without a list."""
    write_log(tmp_path)
    expected = listed(tmp_path)
    harm(tmp_path / INDEX_NAME)
    assert listed(tmp_path) == expected
    del reads[:]
    assert listed(tmp_path) == expected
    assert reads == []  # it was made anew


def test_a_folder_that_cannot_be_written_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody with a read-only copy of recordings could not list them."""

    def refuse(*_arguments: object) -> int:
        raise PermissionError

    write_log(tmp_path)
    monkeypatch.setattr("recorder.storage.listing.os.open", refuse)
    assert [it.recording_id for it in listed(tmp_path)] == ["a"]
    assert not (tmp_path / INDEX_NAME).exists()


def test_two_processes_may_list_at_once(tmp_path: Path) -> None:
    """A server and a command beside it would spoil each other's index."""
    write_log(tmp_path)
    expected = listed(tmp_path)
    other = sqlite3.connect(tmp_path / INDEX_NAME, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("recorder.storage.listing.BUSY_WAIT_S", 0)
            write_log(tmp_path, "b")
            assert {it.recording_id for it in listed(tmp_path)} == {"a", "b"}
    finally:
        other.close()
    known = Index(tmp_path).load({info.recording_id: info for info in Store(tmp_path).logs()})
    assert [entry.summary for entry in known.values()] == list(expected)


# -- the list -------------------------------------------------------------------------------------


def test_only_regular_files_are_logs(tmp_path: Path) -> None:
    """A link in the folder would show a file from anywhere as a recording."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = write_log(elsewhere)
    Store(tmp_path).path("link").symlink_to(path)
    Store(tmp_path).path("folder").mkdir()
    assert listed(tmp_path) == ()
    assert Store(tmp_path).find("link") is None
    assert Listing(Store(tmp_path)).find("../elsewhere/a") is None


SUMMARIES = st.lists(
    st.builds(
        Summary,
        recording_id=st.sampled_from("abcdefgh"),
        state=st.sampled_from(["open", "finished", "crashed"]),
        began_ms=st.none() | st.integers(0, 3),
        mode=st.sampled_from(["audio", "chat"]),
        owner=st.sampled_from(["", "anna", "bert"]),
        file_bytes=st.just(1),
        modified_ms=st.integers(0, 3),
    ),
    unique_by=lambda it: it.recording_id,
)


def in_order(summaries: Sequence[Summary]) -> list[Summary]:
    return sorted(summaries, key=lambda it: (-it.listed_ms, it.recording_id))


@settings(max_examples=60)
@given(summaries=SUMMARIES, limit=st.integers(1, 4), owner=st.sampled_from([None, "", "anna"]))
def test_pages_put_together_are_the_list(
    summaries: list[Summary], limit: int, owner: str | None
) -> None:
    """A client that pages through its recordings would miss some, or see some twice."""
    log_filter = LogFilter(owner=owner, since_ms=1)
    ordered = in_order(summaries)
    seen: list[Summary] = []
    after: str | None = None
    for _ in range(len(ordered) + 1):
        page, after = page_of(ordered, log_filter, limit=limit, after=after)
        seen += page
        if after is None:
            break
    assert seen == [it for it in ordered if log_filter.takes(it)]


def test_a_page_goes_on_where_a_removed_recording_was(tmp_path: Path) -> None:
    """Retention amid a client's paging would end it, or begin it anew."""
    logs = [
        Summary(recording_id=name, state="finished", began_ms=9 - at, file_bytes=1, modified_ms=0)
        for at, name in enumerate("abcd")
    ]
    first, after = page_of(logs, LogFilter(), limit=2)
    rest, end = page_of([*logs[:1], *logs[2:]], LogFilter(), limit=2, after=after)
    assert [it.recording_id for it in (*first, *rest)] == ["a", "b", "c", "d"]
    assert end is None


def test_filters_take_what_they_say() -> None:
    """An operator who looks for crashes of one key would see others'."""
    log = Summary(
        recording_id="a",
        state="crashed",
        began_ms=5,
        mode="chat",
        owner="anna",
        reason="client",
        file_bytes=1,
        modified_ms=9,
    )
    right = {"since_ms": 5, "mode": "chat", "owner": "anna", "state": "crashed", "reason": "client"}
    wrong = {"since_ms": 6, "mode": "audio", "owner": "", "state": "open", "reason": "timeout"}
    assert LogFilter(**right).takes(log)  # type: ignore[arg-type]
    for name, value in wrong.items():
        assert not attrs.evolve(LogFilter(), **{name: value}).takes(log), name
