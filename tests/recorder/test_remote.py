"""Logs in an object store: they come back as they were, and nothing else is taken for one."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from recorder.format.format import SUFFIX, RecorderError
from recorder.read.reader import LogReader
from recorder.storage.listing import Index, Listing, Summary
from recorder.storage.remote import (
    AWAY_S,
    PART_BYTES,
    READ_BYTES_MIN,
    CombinedLogs,
    MissingError,
    RemoteStore,
    StoredLog,
    StoreError,
)
from recorder.storage.store import WITH_STORE_NAME, LocalLog, Store
from runtime.cli import main
from tests.golden.logs import FOLDER
from tests.recorder.test_listing import write_log

KINDS = ("file", "memory")
AWS = {
    "AWS_ACCESS_KEY_ID": "a",
    "AWS_SECRET_ACCESS_KEY": "b",
    "AWS_REGION": "here",
    "AWS_ALLOW_HTTP": "true",
}


def store_of(kind: str, folder: Path) -> RemoteStore:
    """Open an empty store; one of files has them in `folder`."""
    folder.mkdir(exist_ok=True)
    return RemoteStore.open(folder.as_uri() if kind == "file" else "memory://")


def local(path: Path) -> LocalLog:
    """A log as its folder lists it."""
    found = Store(path.parent).find(path.name.removesuffix(SUFFIX))
    assert found is not None
    return found


def put_all(folder: Path, store: RemoteStore) -> None:
    """Store all logs of a folder."""
    assert all(store.put(log) for log in Store(folder).logs())


class Unsteady(RemoteStore):
    """A store that does not answer while it is away."""

    is_away = False
    kind: type[StoreError] = StoreError

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self.is_away:
            raise self.kind(f"{self.url}: it does not answer")
        with super()._errors():
            yield


class Damaging(RemoteStore):
    """A store of files whose disk turns a byte of the first objects that it takes."""

    damages = 1

    def find(self, recording_id: str) -> StoredLog | None:
        if self.damages:
            self.damages -= 1
            path = Store(Path(self.url.removeprefix("file://"))).path(recording_id)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        return super().find(recording_id)


class Slow(RemoteStore):
    """A store that is so slow that other things happen before it has a log."""

    @staticmethod
    def meanwhile(store: RemoteStore, log: LocalLog) -> None:
        """What happens."""

    def find(self, recording_id: str) -> StoredLog | None:
        found = super().find(recording_id)
        if self._putting:
            assert found is not None
            self.meanwhile(self, self.log)
        return found

    def put(self, log: LocalLog) -> bool:
        self.log = log
        return super().put(log)


@pytest.mark.parametrize("kind", KINDS)
def test_a_log_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    """A recording would be another after it was stored."""
    path = tmp_path / f"a{SUFFIX}"
    path.write_bytes(os.urandom(2 * PART_BYTES + 3))
    store = store_of(kind, tmp_path / "store")
    store.check()
    assert (store.logs(), store.find("a")) == ((), None)
    assert store.put(local(path))
    (found,) = store.logs()
    assert (found, found.recording_id, found.is_held()) == (store.find("a"), "a", False)
    assert abs(found.modified_ns - time.time_ns()) < 60e9, "what is stored is from 1970"
    copy, seen = tmp_path / "copy", list[int]()
    with copy.open("wb") as file:
        store.fetch(found, file, seen.append)
    assert copy.read_bytes() == path.read_bytes()
    assert seen == [PART_BYTES, PART_BYTES, 3]
    store.remove(found)
    assert store.logs() == ()


@pytest.mark.parametrize("kind", KINDS)
def test_stored_logs_are_listed_and_read_as_local_ones(kind: str, tmp_path: Path) -> None:
    """A list, a page or a live tail would depend on where the log is."""
    store = store_of(kind, tmp_path / "store")
    put_all(FOLDER, store)

    def by_name(listed: tuple[Summary, ...]) -> dict[str, Summary]:
        return {it.recording_id: attrs.evolve(it, modified_ms=0) for it in listed}

    listed = by_name(Listing(store).refresh())
    copy = copytree(FOLDER, tmp_path / "copy")  # a list leaves an index in its folder
    assert listed == by_name(Listing(Store(copy)).refresh())
    assert len(listed) > 50
    for name in ("v1-realtime-video", "v1-damaged-lost-block", "v1-killed"):
        found = store.find(name)
        assert found is not None
        with LogReader(FOLDER / f"{name}{SUFFIX}") as here, LogReader(found.open()) as there:
            assert list(there) == list(here)
            assert list(there.at(20)) == list(here.at(20))


@given(data=st.data(), size=st.integers(1, 5 * READ_BYTES_MIN))
def test_any_part_can_be_read(data: st.DataObject, size: int) -> None:
    """A range of a stored log would be another log's, or end early."""
    whole = os.urandom(size)
    store = RemoteStore.open("memory://")
    store._objects.put(f"a{SUFFIX}", whole)
    log = store.find("a")
    assert log is not None
    source = log.open()
    assert source.size() == size
    parts = st.tuples(st.integers(0, size + 9), st.integers(0, 2 * READ_BYTES_MIN))
    for start, count in data.draw(st.lists(parts, max_size=8)):
        assert source.read(start, count) == whole[start : start + count]
    source.close()


def test_only_its_owner_may_read_a_copy(tmp_path: Path) -> None:
    """A log could be read by its owner only, and its copy in a folder by everyone."""
    path = write_log(tmp_path)
    (tmp_path / "a store").mkdir()
    store = RemoteStore.open((tmp_path / "a store").as_uri())
    assert store.put(local(path))
    assert (tmp_path / "a store" / path.name).stat().st_mode & 0o777 == 0o600


def test_a_log_that_comes_back_different_is_not_stored(tmp_path: Path) -> None:
    """The only good copy would be removed."""
    path = write_log(tmp_path)
    (tmp_path / "store").mkdir()
    store = Damaging.open((tmp_path / "store").as_uri())
    with pytest.raises(StoreError, match="was read back with other bytes"):
        store.put(local(path))
    assert not store.holds(local(path))
    assert store.put(local(path))
    assert store.holds(local(path))


def test_a_log_that_is_removed_while_it_is_put_is_not_stored(tmp_path: Path) -> None:
    """What an operator removed would be in the store after all."""
    path = write_log(tmp_path)
    (tmp_path / "store").mkdir()
    store = Slow.open((tmp_path / "store").as_uri())
    store.meanwhile = lambda store, log: CombinedLogs(Store(tmp_path), store).remove(log)  # type: ignore[method-assign]
    assert not store.put(local(path))
    assert (store.logs(), path.exists()) == ((), False)


class Late(RemoteStore):
    """A store in which a log is removed just before it is there."""

    def _put(self, log: LocalLog, hashed: bytes) -> None:
        self.remove(log)
        super()._put(log, hashed)


def test_a_log_that_is_removed_before_it_is_there_is_not_stored(tmp_path: Path) -> None:
    """What an operator removed would appear in the store a moment later."""
    log = local(write_log(tmp_path))
    store = Late.open("memory://")
    assert not store.put(log)
    assert store.logs() == ()


def test_a_bucket_that_is_missing_is_an_error_of_the_store(tmp_path: Path) -> None:
    """Uploads to it would be taken for logs that were removed meanwhile, and nobody told."""
    log = local(write_log(tmp_path))
    store = Unsteady.open("memory://")
    store.is_away, store.kind = True, MissingError
    with pytest.raises(StoreError) as raised:
        store.put(log)
    assert not isinstance(raised.value, FileNotFoundError)
    log.path.unlink()
    with pytest.raises(FileNotFoundError):
        store.put(log)


def test_a_log_whose_file_is_gone_stays_stored(tmp_path: Path) -> None:
    """Retention, of this server or another, would take both copies away."""
    path = write_log(tmp_path)
    log, whole = local(path), path.read_bytes()
    (tmp_path / "store").mkdir()
    store = Slow.open((tmp_path / "store").as_uri())
    store.meanwhile = lambda _, log: log.path.unlink()  # type: ignore[method-assign]
    assert store.put(log)
    assert (tmp_path / "store" / path.name).read_bytes() == whole
    with pytest.raises(FileNotFoundError):
        RemoteStore.open(store.url).put(log)


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_replaced_while_it_is_read_is_an_error(kind: str, tmp_path: Path) -> None:
    """Half of one log and half of another would be handed out."""
    store = store_of(kind, tmp_path / "store")
    store._objects.put(f"a{SUFFIX}", bytes(9))
    log = store.find("a")
    assert log is not None
    store._objects.put(f"a{SUFFIX}", bytes(12))
    with pytest.raises(StoreError):
        log.open().read(0, 9)
    store.remove(log)
    with pytest.raises((FileNotFoundError, RecorderError)):
        LogReader(log.open())


def test_other_objects_are_no_logs(tmp_path: Path) -> None:
    """A list would show what cannot be read, or a name that is a path."""
    store = store_of("file", tmp_path)
    for name in ("notes.txt", f"a.b{SUFFIX}", SUFFIX, f"{'x' * 65}{SUFFIX}", f"sub/a{SUFFIX}"):
        store._objects.put(name, b"no log")
    assert store.logs() == ()
    assert [store.find(name) for name in ("../a", "sub/a", "a.b", "")] == [None] * 4


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://host/logs", "begins with one of s3://"),
        ("recordings", "begins with one of s3://"),
        ("s3://", "recognise"),
        ("s3://key:secret@bucket/logs", "no credentials or options"),
        ("s3://bucket/logs?region=here", "no credentials or options"),
        ("file:///there/is/no/such/folder", "folder"),
    ],
)
def test_a_wrong_url_is_told(url: str, told: str) -> None:
    """An operator would learn of it after the first session, or find a secret in the log."""
    with pytest.raises(StoreError, match=told) as raised:
        RemoteStore.open(url)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would see a traceback, and not what to install."""
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    told = CliRunner().invoke(main, ["recordings", "list", "s3://bucket/logs"])
    assert told.exit_code == 2
    assert told.stderr.startswith("Error: antiphon recordings list needs the extra 'store': pip")


def test_a_store_that_does_not_answer_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would start with a store that it cannot use, or end with a traceback."""
    with socket.socket() as bound:  # nothing listens
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        for name, value in AWS.items():
            monkeypatch.setenv(name, value)
        store = RemoteStore.open("s3://bucket/logs")
        log = local(write_log(tmp_path))
        calls: list[Callable[[], object]] = [store.check, store.logs, lambda: store.find("a")]
        for call in [*calls, lambda: store.put(log), lambda: store.remove(log)]:
            with pytest.raises(StoreError, match=r"^s3://bucket/logs: \w") as raised:
                call()
            assert "\n" not in str(raised.value)


# -- a folder and a store -------------------------------------------------------------------------


def test_each_recording_is_listed_once(tmp_path: Path) -> None:
    """A list would show a recording twice, or not at all once its file is gone."""
    folder, remote = tmp_path / "logs", store_of("file", tmp_path / "store")
    folder.mkdir()
    for name in ("a", "b", "c"):
        write_log(folder, name)
    put_all(folder, remote)
    Store(folder).path("a").unlink()
    write_log(folder, "d")
    logs = CombinedLogs(Store(folder), remote)
    assert {it.recording_id: type(it).__name__ for it in logs.logs()} == {
        **{"a": "StoredLog", "b": "LocalLog"},
        **{"c": "LocalLog", "d": "LocalLog"},
    }
    listing = Listing(logs, Index(folder, WITH_STORE_NAME))
    assert {it.recording_id for it in listing.refresh()} == {"a", "b", "c", "d"}
    assert {it.state for it in listing.refresh()} == {"finished"}
    found = listing.find("a")
    assert found is not None
    assert found.summary.owner == "anna"
    assert listing.find("e") is None


def test_the_summaries_of_stored_logs_are_kept(tmp_path: Path) -> None:
    """Each start of a server would read every log of its store again."""
    folder, remote = tmp_path / "logs", store_of("file", tmp_path / "store")
    folder.mkdir()
    path = write_log(folder)
    put_all(folder, remote)
    path.unlink()
    logs = CombinedLogs(Store(folder), remote)
    known = Listing(logs, Index(folder, WITH_STORE_NAME)).refresh()
    (there,) = remote.logs()
    assert Index(folder, WITH_STORE_NAME).load({"a": there})["a"].summary == known[0]
    assert Listing(Store(folder)).refresh() == ()  # the folder's own list knows nothing about it
    assert Index(folder, WITH_STORE_NAME).load({"a": there})["a"].summary == known[0]


def test_removing_takes_both_away(tmp_path: Path) -> None:
    """What was removed would come back from the store."""
    folder, remote = tmp_path / "logs", store_of("file", tmp_path / "store")
    folder.mkdir()
    write_log(folder, "a")
    write_log(folder, "b")
    put_all(folder, remote)
    Store(folder).path("b").unlink()
    logs = CombinedLogs(Store(folder), remote)
    for name in ("a", "b"):
        found = logs.find(name)
        assert found is not None
        logs.remove(found)
    assert (logs.logs(), remote.logs(), Store(folder).logs()) == ((), (), ())


def test_a_store_that_is_away_keeps_its_last_list(tmp_path: Path) -> None:
    """An operator could not see the recordings of the folder, or would think others lost."""
    folder, remote = tmp_path, Unsteady.open("memory://")
    path = write_log(folder, "a")
    put_all(folder, remote)
    path.unlink()
    now_s = 0.0
    logs = CombinedLogs(Store(folder), remote, clock=lambda: now_s)
    listing = Listing(logs)
    assert [it.recording_id for it in listing.refresh()] == ["a"]
    write_log(folder, "b")
    remote.is_away = True
    assert {it.recording_id for it in listing.refresh()} == {"a", "b"}
    remote.is_away = False
    with pytest.raises(StoreError, match="it failed less than"):  # it is not asked
        logs.find("a")
    assert logs.find("b") is not None
    now_s = AWAY_S
    assert logs.find("a") is not None
