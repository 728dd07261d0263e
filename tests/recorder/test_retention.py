"""What retention removes, and what it never does."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recorder.storage.store import FRESH_S, Pruned, Retention, Store, prune
from recorder.write.writer import Recorder
from runtime.serve.retention import Retainer

NOW_S = 1_800_000_000.0
DAY_S = 86_400.0


def put(folder: Path, name: str, age_s: float, size: int = 10) -> Path:
    """Make a file that has a log's name."""
    path = Store(folder).path(name)
    path.write_bytes(bytes(size))
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def run(folder: Path, *, dry_run: bool = False, **bounds: float | int) -> Pruned:
    retention = Retention(**bounds)  # type: ignore[arg-type]
    return prune(Store(folder), retention, now_s=NOW_S, dry_run=dry_run)


def names(done: Pruned) -> list[tuple[str, str]]:
    return [(it.info.recording_id, it.cause) for it in done.removed]


def left(folder: Path) -> set[str]:
    return {info.recording_id for info in Store(folder).logs()}


def test_the_old_go_and_the_young_stay(tmp_path: Path) -> None:
    """Recordings would be kept longer than was promised, or not as long."""
    for days in range(5):
        put(tmp_path, f"d{days}", days * DAY_S + 100)
    done = run(tmp_path, age_s_max=2 * DAY_S)
    assert names(done) == [("d4", "age"), ("d3", "age"), ("d2", "age")]
    assert (done.freed_bytes, done.kept_logs, done.kept_bytes) == (30, 2, 20)
    assert left(tmp_path) == {"d0", "d1"}


def test_the_oldest_go_until_the_rest_fits(tmp_path: Path) -> None:
    """The disk would run full, or more would be lost than must."""
    for days, size in enumerate([10, 20, 30, 40]):
        put(tmp_path, f"d{days}", days * DAY_S + 100, size)
    done = run(tmp_path, bytes_max=60)
    assert names(done) == [("d3", "size")]
    assert done.kept_bytes == 60
    assert names(run(tmp_path, bytes_max=59)) == [("d2", "size")]


def test_age_and_size_work_together(tmp_path: Path) -> None:
    """One bound would hide the other."""
    for days in range(4):
        put(tmp_path, f"d{days}", days * DAY_S + 100)
    done = run(tmp_path, age_s_max=3 * DAY_S, bytes_max=20)
    assert names(done) == [("d3", "age"), ("d2", "size")]


def test_a_dry_run_says_the_same_and_removes_nothing(tmp_path: Path) -> None:
    """Somebody who wants to see first would lose it all the same, or see something else."""
    for days in range(4):
        put(tmp_path, f"d{days}", days * DAY_S + 100)
    bounds = {"age_s_max": 2 * DAY_S, "bytes_max": 10}
    dry = run(tmp_path, dry_run=True, **bounds)
    assert len(left(tmp_path)) == 4
    assert run(tmp_path, **bounds) == dry


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    """A session that runs would lose its recording, and nobody would notice."""
    old = put(tmp_path, "old", 5 * DAY_S)
    path = Store(tmp_path).path("open")
    with Recorder(clock=lambda: 0.0, inline=True) as recorder:
        recorder.open(path, {}, at_ns=0)
        os.utime(path, (NOW_S - 9 * DAY_S, NOW_S - 9 * DAY_S))
        done = run(tmp_path, age_s_max=0, bytes_max=0)
        assert (names(done), done.held_logs) == ([("old", "age")], 1)
        assert path.exists()
        assert not old.exists()
    assert names(run(tmp_path, age_s_max=0)) == [("open", "age")]


@pytest.mark.parametrize("age_s", [0.0, FRESH_S - 1, -FRESH_S + 1])
def test_what_was_just_made_stays(tmp_path: Path, age_s: float) -> None:
    """A log would go in the moment in which its writer has made it and not locked it yet."""
    put(tmp_path, "fresh", age_s)
    done = run(tmp_path, age_s_max=-1e9, bytes_max=0)
    assert (done.removed, done.held_logs, left(tmp_path)) == ((), 1, {"fresh"})


def test_only_logs_are_touched(tmp_path: Path) -> None:
    """Whoever names a wrong folder would lose what is in it."""
    elsewhere = tmp_path / "elsewhere.txt"
    elsewhere.write_bytes(b"keep")
    Store(tmp_path).path("link").symlink_to(elsewhere)
    (tmp_path / "below").mkdir()
    put(tmp_path / "below", "log", 9 * DAY_S)
    for name in ("notes.txt", "a.b.session.zst", "x.zst"):
        (tmp_path / name).write_bytes(b"keep")
    assert run(tmp_path, age_s_max=-1e9, bytes_max=0).removed == ()
    assert len(list(tmp_path.rglob("*"))) == 7


def test_without_bounds_nothing_goes(tmp_path: Path) -> None:
    """A server that was told to keep all would not."""
    put(tmp_path, "old", 9000 * DAY_S)
    assert run(tmp_path) == Pruned(removed=(), failed=(), held_logs=0, kept_logs=1, kept_bytes=10)


def test_what_cannot_be_removed_is_told_and_the_rest_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file of another user would keep all others for ever, in silence."""
    unlink = Path.unlink

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        if path.name.startswith("mine"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok=missing_ok)

    put(tmp_path, "mine", 9 * DAY_S)
    put(tmp_path, "yours", 8 * DAY_S)
    monkeypatch.setattr(Path, "unlink", refuse)
    done = run(tmp_path, age_s_max=DAY_S)
    assert names(done) == [("yours", "age")]
    assert [(it.info.recording_id, it.reason) for it in done.failed] == [
        ("mine", "Permission denied")
    ]
    assert (done.kept_logs, done.kept_bytes) == (1, 10)


@settings(max_examples=60)
@given(
    logs=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 50)), max_size=8),
    age_s_max=st.none() | st.integers(0, 400),
    bytes_max=st.none() | st.integers(0, 200),
)
def test_no_more_goes_than_must_and_the_oldest_first(
    tmp_path_factory: pytest.TempPathFactory,
    logs: list[tuple[int, int]],
    age_s_max: int | None,
    bytes_max: int | None,
) -> None:
    """Retention would remove what it need not, or keep what it may not."""
    folder = tmp_path_factory.mktemp("logs")
    ages = {}
    for number, (age, size) in enumerate(logs):
        ages[f"l{number}"] = age + FRESH_S + 1
        put(folder, f"l{number}", ages[f"l{number}"], size)
    retention = Retention(age_s_max=age_s_max, bytes_max=bytes_max)
    done = prune(Store(folder), retention, now_s=NOW_S)
    gone = [it.info.recording_id for it in done.removed]
    kept = left(folder)
    assert set(gone) | kept == ages.keys()
    assert [ages[name] for name in gone] == sorted((ages[name] for name in gone), reverse=True)
    assert all(ages[name] <= ages[it] for name in kept for it in gone)
    assert age_s_max is None or all(ages[name] <= age_s_max for name in kept)
    assert bytes_max is None or done.kept_bytes <= bytes_max
    by_size = [it.info.file_bytes for it in done.removed if it.cause == "size"]
    if by_size:
        assert bytes_max is not None
        assert done.kept_bytes + by_size[-1] > bytes_max


# -- the server's own -----------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_server_keeps_its_bounds_and_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An operator's bound would not hold, or nobody could see that something was removed."""
    for days in range(4):
        put(tmp_path, f"d{days}", days * DAY_S + 100)
    retention = Retention(age_s_max=2 * DAY_S, bytes_max=10)
    retainer = Retainer(Store(tmp_path), retention, clock=lambda: NOW_S)
    caplog.set_level("INFO")
    await retainer.prune()
    assert attrs.asdict(retainer.statistics) == {
        "logs": 1,
        "file_bytes": 10,
        "removed": {"age": 2, "size": 1},
        "removed_bytes": 30,
        "failures": 0,
    }
    assert "3 recordings were removed" in caplog.text
    put(tmp_path, "more", 3 * DAY_S)
    await retainer.prune()
    assert (retainer.statistics.removed["age"], retainer.statistics.logs) == (3, 1)


@pytest.mark.anyio
async def test_a_folder_that_is_gone_does_not_end_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk that fails for a moment would end all sessions."""
    (tmp_path / "file").write_bytes(b"")
    retainer = Retainer(Store(tmp_path / "file" / "logs"), Retention(age_s_max=1))
    with anyio.fail_after(20):
        await retainer.prune()
    assert "cannot look through" in caplog.text
