"""A server's recordings on their way to an object store: each once, verified, and none lost."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import anyio
import attrs
import pytest

from recorder.format.format import SUFFIX
from recorder.repair import compact
from recorder.storage.marks import marks_path
from recorder.storage.remote import RemoteStore, StoreError
from recorder.storage.store import LocalLog, Retention, Store
from recorder.write.writer import Recorder
from runtime.serve.retention import (
    ABANDONED_S,
    PAUSE_S,
    PAUSE_S_MAX,
    UPLOADS_MAX,
    Retainer,
    Uploader,
    make_retainer,
    pause_s,
)
from runtime.serve.serve_command import check
from runtime.settings.settings import Settings
from runtime.settings.sources import ConfigError
from tests.golden.logs import FOLDER
from tests.recorder.test_listing import open_log
from tests.recorder.test_remote import Damaging, Unsteady

NOW_S = 1_800_000_000.0
HOUR_S = 3600.0

pytestmark = pytest.mark.anyio


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of recordings, next to one of stored ones."""
    (tmp_path / "store").mkdir()
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"


def store_of(folder: Path, kind: type[RemoteStore] = RemoteStore) -> RemoteStore:
    return kind.open((folder.parent / "store").as_uri())


def add(folder: Path, name: str, age_s: float = HOUR_S, *, is_whole: bool = True) -> Path:
    """Add a log that was written so long ago."""
    path = Store(folder).path(name)
    golden = "v1-realtime-queue" if is_whole else "v1-killed"
    path.write_bytes((FOLDER / f"{golden}{SUFFIX}").read_bytes())
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def uploader_of(folder: Path, store: RemoteStore | None = None) -> Uploader:
    return Uploader(folder, store or store_of(folder), clock=lambda: NOW_S)


def retainer_of(folder: Path, uploader: Uploader) -> Retainer:
    """A retainer by which everything is too old."""
    made = make_retainer(Settings(record_to=folder), uploader)
    assert made is not None
    return attrs.evolve(made, retention=Retention(age_s_max=1), clock=lambda: NOW_S)


def names(place: RemoteStore | Store) -> set[str]:
    return {log.recording_id for log in place.logs()}


class Orderly(RemoteStore):
    """Notes which logs are put; `UPLOADS_MAX` at once, or it fails."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.came: list[str] = []
        self.at_once = 0
        self._together = threading.Barrier(UPLOADS_MAX, timeout=10)
        self._lock = threading.Lock()

    def put(self, log: LocalLog) -> bool:
        with self._lock:
            self.came.append(log.recording_id)
            self.at_once += 1
            assert self.at_once <= UPLOADS_MAX
        self._together.wait()
        try:
            return super().put(log)
        finally:
            with self._lock:
                self.at_once -= 1


class Slow(RemoteStore):
    """Puts a log when it may."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self.puts = 0

    def put(self, log: LocalLog) -> bool:
        self.puts += 1
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        return super().put(log)


class Choosy(RemoteStore):
    """Refuses one log, always."""

    def put(self, log: LocalLog) -> bool:
        if log.recording_id == "poison":
            raise StoreError("it is refused")
        return super().put(log)


async def test_logs_are_stored_the_oldest_first_and_few_at_once(folder: Path) -> None:
    """A server that was away from its store would lose the oldest, or slow its sessions down."""
    for at, name in enumerate(("e", "d", "c", "b", "a", "f")):
        add(folder, name, HOUR_S * (6 - at))
    store = store_of(folder, Orderly)
    assert isinstance(store, Orderly)
    uploader = uploader_of(folder, store)
    assert await uploader.upload_due()
    pairs = [set(store.came[at : at + 2]) for at in (0, 2, 4)]
    assert pairs == [{"e", "d"}, {"c", "b"}, {"a", "f"}]
    told = uploader.statistics
    assert (told.uploaded, told.failures, told.waiting) == (6, 0, 0)
    assert told.uploaded_bytes == sum(log.file_bytes for log in Store(folder).logs())
    for log in store.logs():
        path = Store(folder).path(log.recording_id)
        assert (folder.parent / "store" / path.name).read_bytes() == path.read_bytes()


async def test_only_whole_logs_are_stored(folder: Path) -> None:
    """Half of a session would be stored, and the rest never; or a crash's last log stay behind."""
    add(folder, "whole", 5)
    add(folder, "killed", ABANDONED_S + 1, is_whole=False)
    add(folder, "killed-now", ABANDONED_S - 1, is_whole=False)
    store = store_of(folder)
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        path = Store(folder).path("open")
        open_log(recorder, path)
        os.utime(path, (NOW_S - HOUR_S,) * 2)
        assert await uploader_of(folder, store).upload_due()
        assert names(store) == {"whole", "killed"}


async def test_nothing_is_stored_twice(folder: Path) -> None:
    """Each start of a server would send all its recordings again."""
    add(folder, "a")
    assert await uploader_of(folder).upload_due()
    (stored,) = store_of(folder).logs()
    add(folder, "b")
    again = uploader_of(folder)
    assert await again.upload_due()
    assert await again.upload_due()
    assert again.statistics.uploaded == 1
    assert stored in store_of(folder).logs()


async def test_a_log_that_changes_replaces_the_stored_one(folder: Path) -> None:
    """A compacted log would never be stored, and never be removed."""
    path = folder / f"v1-realtime-audio{SUFFIX}"
    path.write_bytes((FOLDER / path.name).read_bytes())
    uploader = uploader_of(folder)
    assert await uploader.upload_due()
    before_bytes = path.stat().st_size
    compact(path, folder.parent / "part")
    (folder.parent / "part").replace(path)
    assert path.stat().st_size < before_bytes
    assert await uploader.upload_due()
    assert (folder.parent / "store" / path.name).read_bytes() == path.read_bytes()


async def test_a_failure_is_tried_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store that was away for a moment would never get what it missed."""
    add(folder, "a")
    store = Unsteady.open((folder.parent / "store").as_uri())
    store.is_away = True
    uploader = uploader_of(folder, store)
    assert not await uploader.upload_due()
    assert not await uploader.upload_due()
    assert uploader.statistics.failures == 2
    assert "recordings are not stored now: file://" in caplog.text
    store.is_away = False
    assert await uploader.upload_due()
    store.is_away = True
    add(folder, "b")
    assert not await uploader.upload_due()
    assert (uploader.statistics.waiting, uploader.statistics.failures) == (1, 3)
    store.is_away = False
    assert await uploader.upload_due()
    assert (uploader.statistics.waiting, uploader.statistics.uploaded) == (0, 2)
    assert names(store) == {"a", "b"}


async def test_a_log_that_always_fails_holds_no_other_up(folder: Path) -> None:
    """One recording would keep all later ones from the store."""
    add(folder, "poison", 3 * HOUR_S)
    for name in ("a", "b", "c"):
        add(folder, name)
    store = store_of(folder, Choosy)
    uploader = uploader_of(folder, store)
    assert not await uploader.upload_due()
    assert not await uploader.upload_due()
    assert names(store) == {"a", "b", "c"}
    assert uploader.statistics.waiting == 1


def test_pauses_grow_and_differ() -> None:
    """Servers would knock at a store that comes back all at once, or for hours not at all."""
    random.seed(1)
    for failures in range(1, 2000, 7):
        longest_s = min(PAUSE_S * 2 ** min(failures - 1, 99), PAUSE_S_MAX)
        assert longest_s / 2 <= pause_s(failures) <= longest_s
    assert len({pause_s(9) for _ in range(9)}) == 9


async def test_a_damaged_copy_is_stored_again(folder: Path) -> None:
    """A bad disk of the store would cost a recording."""
    path = add(folder, "a")
    store = store_of(folder, Damaging)
    uploader = uploader_of(folder, store)
    assert not await uploader.upload_due()
    assert uploader.statistics.uploaded == 0
    assert await uploader.upload_due()
    assert (folder.parent / "store" / path.name).read_bytes() == path.read_bytes()


async def test_a_log_that_is_removed_before_its_upload_is_no_failure(folder: Path) -> None:
    """An operator would look for a fault of the store, and other uploads wait."""
    path = add(folder, "a")
    store = store_of(folder, Slow)
    assert isinstance(store, Slow)
    uploader = uploader_of(folder, store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(uploader.upload_due)
        await anyio.to_thread.run_sync(store.has_begun.wait)
        path.unlink()
        store.may_go_on.set()
    assert names(store) == set()
    told = uploader.statistics
    assert (told.uploaded, told.failures, told.waiting) == (0, 0, 0)


async def test_a_server_that_ends_finishes_what_it_began(folder: Path) -> None:
    """The last recordings would be sent twice, or be lost with the machine."""
    add(folder, "a")
    store = store_of(folder, Slow)
    assert isinstance(store, Slow)
    uploader = uploader_of(folder, store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(uploader.run)
        await anyio.to_thread.run_sync(store.has_begun.wait)
        tasks.cancel_scope.cancel()
    add(folder, "b")  # the log of the last session
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(uploader.finish)
        store.may_go_on.set()
    assert (names(store), store.puts) == ({"a", "b"}, 2)


# -- what may be removed --------------------------------------------------------------------------


async def test_retention_waits_for_the_store(folder: Path) -> None:
    """The only copy of a recording would be removed."""
    marks = marks_path(add(folder, "a", 2 * HOUR_S))
    marks.write_text("kept")
    add(folder, "b")
    store = store_of(folder, Choosy)
    uploader, local = uploader_of(folder, store), Store(folder)
    retainer = retainer_of(folder, uploader)
    await retainer.prune()
    assert names(local) == {"a", "b"}
    add(folder, "poison", 3 * HOUR_S)
    for _ in range(2):
        await uploader.upload_due()
    await retainer.prune()
    assert names(local) == {"poison"}
    assert retainer.statistics.removed == {"age": 2}
    assert marks.read_text() == "kept"


async def test_retention_leaves_alone_what_is_being_stored(folder: Path) -> None:
    """A log would be removed whose upload may yet turn out wrong."""
    add(folder, "a")
    store = store_of(folder, Slow)
    assert isinstance(store, Slow)
    store_of(folder).put(Store(folder).logs()[0])
    uploader = uploader_of(folder, store)
    uploader._stored = {}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(uploader.upload_due)
        await anyio.to_thread.run_sync(store.has_begun.wait)
        await retainer_of(folder, uploader).prune()
        assert names(Store(folder)) == {"a"}
        store.may_go_on.set()
    await retainer_of(folder, uploader).prune()
    assert names(Store(folder)) == set()


async def test_a_store_that_is_away_lets_nothing_be_removed(folder: Path) -> None:
    """What was stored once could be gone by now."""
    add(folder, "a")
    store = Unsteady.open((folder.parent / "store").as_uri())
    uploader = uploader_of(folder, store)
    assert await uploader.upload_due()
    store.is_away = True
    await retainer_of(folder, uploader).prune()
    assert names(Store(folder)) == {"a"}


async def test_a_server_that_was_killed_before_it_removed_verifies_first(folder: Path) -> None:
    """A copy that nobody read back, or that was damaged since, would replace the recording."""
    add(folder, "good", 2 * HOUR_S)
    bad, lost = add(folder, "bad"), add(folder, "lost")
    assert await uploader_of(folder).upload_due()  # then it was killed
    there = folder.parent / "store"
    (there / bad.name).write_bytes(bytes(bad.stat().st_size))
    uploader, local = uploader_of(folder), Store(folder)
    retainer = retainer_of(folder, uploader)
    assert await uploader.upload_due()
    (there / lost.name).unlink()
    await retainer.prune()
    assert names(local) == {"bad", "lost"}
    assert await uploader.upload_due()
    assert (there / bad.name).read_bytes() == bad.read_bytes()
    await retainer.prune()
    assert names(local) == set()
    assert names(store_of(folder)) == {"good", "bad", "lost"}


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("ftp://host/x", "begins with one of"),
        ("file:///no/such/folder", "Unable"),
        ("az://container/x", "Account must be specified"),
        ("file://{folder}", "the folder of the recordings itself"),
        ("file://{folder}/", "the folder of the recordings itself"),
    ],
)
def test_a_wrong_store_is_told_before_anything_starts(
    url: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator would find out when a disk has failed; or recordings replace themselves."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigError, match=told):
        check(Settings(store=url.format(folder=tmp_path), record_to=tmp_path))


def test_a_store_without_recordings_is_a_mistake() -> None:
    """An operator would wait for recordings that never come."""
    with pytest.raises(ConfigError, match="nothing is recorded"):
        check(Settings(store="memory://", record_to=None))
