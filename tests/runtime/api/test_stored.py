"""Recordings in an object store over HTTP, and a server's way to it, on real servers."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import attrs
import pytest
from starlette.exceptions import HTTPException

from protocol.values.records import session_id_of
from recorder.format.format import SUFFIX
from recorder.storage.listing import summarize
from recorder.storage.remote import MissingError, StoreError
from recorder.storage.store import Store
from runtime import RUN
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.requests import in_thread
from tests.golden.logs import FOLDER
from tests.live.servers import LiveServer, live_server
from tests.recorder.test_listing import write_log
from tests.runtime.api.test_recordings import KEYS, Shop

WAIT_S = 20.0
DAY_S = 86_400.0


@attrs.frozen
class Place:
    """A folder of recordings, and one that is an object store."""

    logs: Path
    stored: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of a server that uses both."""
        return ("--record", str(self.logs), "--store", self.stored.as_uri())


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Two empty folders."""
    made = Place(tmp_path / "logs", tmp_path / "stored")
    made.logs.mkdir()
    made.stored.mkdir()
    return made


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """The keys of anna, bert and an operator."""
    path = tmp_path / "keys.toml"
    scopes = {"root": "admin"}
    made = tuple(
        Key(name=name, hash=hash_key(key), scope=scopes.get(name, "use"))  # type: ignore[arg-type]
        for name, key in KEYS.items()
    )
    change_key_file(path, lambda _: made, create=True)
    return path


def wait_for(path: Path, *, gone: bool = False) -> None:
    """Wait until a file is there, or gone."""
    end_s = time.monotonic() + WAIT_S
    while path.exists() == gone:
        assert time.monotonic() < end_s, path
        time.sleep(0.02)


def test_stored_recordings_are_served_as_those_of_the_folder(place: Place, keys: Path) -> None:
    """What retention removed from the disk could no longer be seen, or be seen by everybody."""
    golden = FOLDER / f"v1-realtime-video{SUFFIX}"
    shutil.copy(golden, place.stored / f"video{SUFFIX}")
    write_log(place.stored, "of-anna")
    write_log(place.logs, "of-anna")
    with live_server(*place.flags, "--keys", str(keys)) as server:
        shop = Shop(server, place.logs)
        assert sorted(shop.ids()) == ["of-anna", "video"]
        assert shop.ids(key="anna") == ["of-anna"]
        one = "/api/recordings/video"
        assert shop.ask(one, "anna").status == 404
        assert shop.ask(one).said["state"] == "finished"
        assert shop.ask(one).said["file_bytes"] == golden.stat().st_size
        whole = shop.ask(f"{one}/log")
        assert (whole.status, whole.body) == (200, golden.read_bytes())
        part = shop.ask(f"{one}/log", Range="bytes=1000-1999")
        assert (part.status, part.body) == (206, golden.read_bytes()[1000:2000])
        session = f"/api/recordings/{session_id_of('video')}"
        assert shop.ask(session).said == shop.ask(one).said
        assert shop.ask(session, "anna").status == 404
        known = {"If-None-Match": whole.headers["etag"]}
        assert shop.ask(f"{one}/log", **known).status == 304
        page = shop.ask(f"{one}/view")
        assert (page.status, page.body[:15].lower()) == (200, b"<!doctype html>")
        with shop.live("video") as told:
            kinds = [item["type"] for item in told]
        assert (kinds.count("record"), kinds[-1]) == (112, "end")
        assert "Traceback" not in server.errors.read_text()


def test_a_removed_recording_is_removed_from_the_store(place: Place, keys: Path) -> None:
    """What an operator removed would come back."""
    for name in ("both", "stored"):
        write_log(place.stored, name)
    write_log(place.logs, "both")
    shutil.copy(place.logs / f"both{SUFFIX}", place.stored)
    with live_server(*place.flags, "--keys", str(keys)) as server:
        shop = Shop(server, place.logs)
        for name in ("both", "stored"):
            url = f"/api/recordings/{name}"
            assert shop.ask(url, "anna", "DELETE").status == 403
            assert shop.ask(url, "root", "DELETE").status == 204
            assert shop.ask(url).status == 404
        assert shop.ids() == []
    assert list(place.stored.iterdir()) == []
    assert Store(place.logs).logs() == ()


def figure(server: LiveServer, name: str) -> float:
    """A metric without labels."""
    text = Shop(server, Path()).ask("/metrics", "").body.decode()
    (line,) = (it for it in text.splitlines() if it.startswith(f"antiphon_{name} "))
    return float(line.split()[1])


def test_recordings_go_to_the_store_and_leave_the_disk(place: Place) -> None:
    """A server's disk would run full, or a recording be on neither."""
    for name, days in (("old", 3), ("young", 1)):
        path = write_log(place.logs, name)
        os.utime(path, (time.time() - days * DAY_S,) * 2)
    with live_server(*place.flags, "--record-keep-days", "2") as server:
        for name in ("old", "young"):
            wait_for(place.stored / f"{name}{SUFFIX}")
        shop = Shop(server, place.logs)
        while figure(server, "recordings_stored_total") < 2:
            time.sleep(0.02)
        assert figure(server, "recordings_stored_bytes_total") > 0
        assert figure(server, "recordings_store_waiting") == 0
        assert shop.ask("/status", "").status == 200
    with live_server(*place.flags, "--record-keep-days", "2") as server:
        wait_for(place.logs / f"old{SUFFIX}", gone=True)
        assert sorted(Shop(server, place.logs).ids()) == ["old", "young"]
        assert figure(server, "recordings_stored_total") == 0
    assert {log.recording_id for log in Store(place.logs).logs()} == {"young"}


def test_the_last_session_of_a_server_is_stored(place: Place, keys: Path) -> None:
    """The recordings of the sessions that a restart ended would be lost with their machine."""
    with live_server(*place.flags, "--keys", str(keys), "--drain-s", "0") as server:
        with Shop(server, place.logs).session() as (_, recording_id):
            assert server.stop() == 0
        assert "Traceback" not in server.errors.read_text()
    found = Store(place.stored).find(recording_id)
    assert found is not None
    assert summarize(found).state == "finished"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "status"),
    [(StoreError("s3://bucket: denied"), 503), (MissingError("s3://bucket: gone"), 404)],
)
async def test_a_store_that_fails_is_told_without_its_words(
    error: StoreError, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A client would get a 500 with a traceback in the log, or read the operator's addresses."""

    def ask() -> None:
        raise error

    with pytest.raises(HTTPException) as raised:
        await in_thread(ask)
    assert raised.value.status_code == status
    assert "s3:" not in raised.value.detail
    assert ("s3://bucket: denied" in caplog.text) == (status == 503)


def serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Start a server that cannot start."""
    return subprocess.run(
        [*RUN, "serve", "--port", "0", "--model", "scripted", *flags],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_server_does_not_start_with_a_store_that_refuses(place: Place) -> None:
    """An operator would find out when the disk is full."""
    environment = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "here"}
    environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true"}
    told = serve("--record", str(place.logs), "--store", "s3://bucket/logs", **environment)
    assert told.returncode == 1
    assert told.stderr.startswith("Error: cannot use the object store s3://bucket/logs: ")
    assert told.stderr.count("\n") == 1
    told = serve("--record", str(place.logs), "--store", "ftp://host")
    assert (told.returncode, "begins with one of s3://" in told.stderr) == (2, True)


def test_a_server_removes_what_is_too_old(tmp_path: Path) -> None:
    """What an operator promised to forget would be kept."""
    old, young = write_log(tmp_path, "old"), write_log(tmp_path, "young")
    os.utime(old, (time.time() - 3 * 86_400,) * 2)
    os.utime(young, (time.time() - 3_600,) * 2)
    with live_server("--record", str(tmp_path), "--record-keep-days", "2") as server:
        shop = Shop(server, tmp_path)
        for _ in range(500):
            figures = shop.ask("/metrics", "").body.decode()
            if 'antiphon_recordings_removed_total{cause="age"} 1.0' in figures:
                break
            time.sleep(0.02)
        else:
            raise AssertionError(figures)
        assert "antiphon_recordings 1.0" in figures
        assert shop.ids() == ["young"]
    assert not old.exists()
