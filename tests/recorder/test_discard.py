"""A log that nobody wants leaves nothing behind: not its name, and not its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from recorder.format.format import LogFailed
from recorder.write.files import Disk
from recorder.write.log import SessionLog
from recorder.write.writer import Recorder
from tests.recorder.test_samples import SESSION, record

pytestmark = pytest.mark.anyio


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with Recorder() as recorder:
        yield recorder


async def begin(recorder: Recorder, folder: Path) -> SessionLog:
    """Begin a log that holds something."""
    log = recorder.open(folder / "rec-1.session.zst", SESSION, at_ns=0)
    log.append(record("rx", 1, frame="what nobody should read"), urgent=True)
    await log.written(1)
    return log


def left_in(folder: Path) -> list[Path]:
    """Name what is there."""
    return list(folder.iterdir())


async def test_a_log_is_removed(recorder: Recorder, tmp_path: Path) -> None:
    """What was said before a client could ask would stay."""
    log = await begin(recorder, tmp_path)
    with log.path.open("rb") as reading:
        log.discard()
        await log.wait_removed()
        assert reading.read() == b""
    assert left_in(tmp_path) == []
    assert recorder.statistics.failures == 0
    with pytest.raises(LogFailed):
        await log.room()


async def test_what_was_on_its_way_is_not_written(recorder: Recorder, tmp_path: Path) -> None:
    """A log would come back with the block that waited."""
    log = await begin(recorder, tmp_path)
    log.append(record("rx", 2, frame="x" * 100_000))
    log.discard()
    await log.wait_removed()
    assert left_in(tmp_path) == []


async def test_one_that_was_not_created_yet_never_is(recorder: Recorder, tmp_path: Path) -> None:
    """A client that asks at once would be recorded after all."""
    log = recorder.open(tmp_path / "rec-1.session.zst", SESSION, at_ns=0)
    log.discard()
    await log.wait_removed()
    assert left_in(tmp_path) == []


async def test_one_that_failed_before_is_removed(recorder: Recorder, tmp_path: Path) -> None:
    """Half a recording would stay of a client that asked for none."""
    log = await begin(recorder, tmp_path)
    log.abandon("the disk is full")
    log.discard()
    await log.wait_removed()
    assert left_in(tmp_path) == []


async def test_another_file_of_that_name_is_left_alone(recorder: Recorder, tmp_path: Path) -> None:
    """What an operator put there would be lost with it."""
    log = await begin(recorder, tmp_path)
    (tmp_path / "other").write_text("mine")
    (tmp_path / "other").replace(log.path)
    log.discard()
    await log.wait_removed()
    assert log.path.read_text() == "mine"


class Watched(Disk):
    """A disk that tells what it was asked for, and may refuse to remove."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self._refuses = refuses

    def sync(self, descriptor: int) -> None:
        """Take note of it."""
        self.calls.append("sync")
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Take note of it."""
        self.calls.append("sync_directory")
        super().sync_directory(path)

    def remove(self, path: Path, descriptor: int | None) -> None:
        """Take note of it, or refuse."""
        self.calls.append("remove")
        if self._refuses:
            raise OSError(30, "Read-only file system")
        super().remove(path, descriptor)


async def test_a_removal_is_on_the_device_before_it_is_told(tmp_path: Path) -> None:
    """A power cut would bring a recording back of somebody who was told that there is none."""
    disk = Watched()
    with Recorder(disk=disk) as recorder:
        log = await begin(recorder, tmp_path)
        log.discard()
        await log.wait_removed()
        assert disk.calls[-3:] == ["remove", "sync", "sync_directory"]


async def test_an_operator_is_told_of_what_could_not_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A recording would stay of which nobody knows."""
    with Recorder(disk=Watched(refuses=True)) as recorder:
        log = await begin(recorder, tmp_path)
        log.discard()
        await log.wait_removed()
    (told,) = (entry.getMessage() for entry in caplog.records if entry.levelname == "ERROR")
    assert str(log.path) in told
    assert "Read-only file system" in told
