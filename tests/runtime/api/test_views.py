"""Views of recordings: who may have one made, and what becomes of those that read slowly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import attrs
import pytest

from recorder.format.format import Fields, Record
from recorder.read.scan import Damage
from runtime.access.gate import PRINCIPAL
from runtime.access.keys import ANYONE, Key
from runtime.api import views
from runtime.api.recordings import Recordings
from runtime.api.requests import PIECE_BYTES
from runtime.api.views import (
    HELD_MAX,
    HELD_PER_KEY_MAX,
    MAKING_MAX,
    SOUNDS_MAX,
    SOUNDS_PER_KEY_MAX,
    Viewer,
)
from runtime.net.http import make_app
from tests.recorder.test_listing import write_log

pytestmark = pytest.mark.anyio
WAIT_S = 20
PIECES = 40
PAGE = "/api/recordings/one/view"
SOUND = "/v1/live/sessions/one/content"
DIGEST = "/api/recordings/one/digest"
HEAD = b"RIFF"


@attrs.define
class Visit:
    """A client that asks for a page, and takes none of it before it is let."""

    status: int = 0
    headers: dict[str, str] = attrs.Factory(dict)
    body: bytearray = attrs.Factory(bytearray)
    begun: anyio.Event = attrs.Factory(anyio.Event)
    takes: anyio.Event = attrs.Factory(anyio.Event)
    leaves: anyio.Event = attrs.Factory(anyio.Event)
    over: anyio.Event = attrs.Factory(anyio.Event)

    async def receive(self) -> dict[str, Any]:
        """Say nothing but that it leaves."""
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """Take what is sent."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            self.begun.set()
            return
        await self.takes.wait()
        self.body += message["body"]


class TooLongError(Exception):
    """A session that no sound can hold."""


class Shop:
    """The routes of a folder with one log, whose views are made by viewers of the test's.

    Attributes:
        begun: released for each page whose making has begun.
        goes_on: pages are made only while this is set.
        pieces: of all views, that were made.
    """

    def __init__(self, folder: Path, *, piece_bytes: int = PIECE_BYTES) -> None:
        self.begun = anyio.Semaphore(0)
        self.goes_on = anyio.Event()
        self.goes_on.set()
        self._piece_bytes = piece_bytes
        viewers = {
            "page": Viewer(
                pieces_of=self._page_of, media_type="text/html", policy="default-src 'none'"
            ),
            "sound": Viewer(
                pieces_of=self._page_of,
                head_of=lambda size: HEAD + str(size).encode(),
                media_type="audio/wav",
                refuses=(TooLongError,),
            ),
            "digest": Viewer(pieces_of=self._page_of, media_type="application/json"),
        }
        self.is_too_long = False
        self.pieces = 0
        self._app = make_app(lambda: "ready", Recordings(folder, viewers.__getitem__).routes())

    def _page_of(
        self, _head: Fields, _items: Iterable[Record | Damage], **_: Any
    ) -> Iterator[bytes]:
        anyio.from_thread.run_sync(self.begun.release)
        anyio.from_thread.run(self.goes_on.wait)
        if self.is_too_long:
            raise TooLongError("it goes on for ever")
        for _ in range(PIECES):
            self.pieces += 1
            yield b"x" * self._piece_bytes

    async def ask(
        self,
        visit: Visit,
        key: str,
        *,
        path: str = PAGE,
        host: str = "::1",
        method: str = "GET",
        range_asked: str = "",
    ) -> None:
        """Answer a client, to the end."""
        who = Key(name=key, scope="admin") if key else ANYONE
        headers = [(b"range", range_asked.encode())] if range_asked else []
        scope = {
            **{"type": "http", "method": method, "path": path, "raw_path": path.encode()},
            **{"query_string": b"", "headers": headers, "client": (host, 1), PRINCIPAL: who},
        }
        await self._app(scope, visit.receive, visit.send)  # type: ignore[arg-type]
        visit.over.set()

    async def answer(self, key: str, **more: str) -> Visit:
        """Answer a client that takes all at once."""
        visit = Visit()
        visit.takes.set()
        with anyio.fail_after(WAIT_S):
            await self.ask(visit, key, **more)
        return visit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one log."""
    write_log(tmp_path, "one")
    return tmp_path


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of the server."""
    return "trio"


async def test_slow_readers_take_it_from_nobody(folder: Path) -> None:
    """Two clients that read nothing took it from all others, for as long as they liked."""
    shop = Shop(folder)
    slow = [Visit() for _ in range(HELD_PER_KEY_MAX)]
    async with anyio.create_task_group() as tasks:
        for visit in slow:
            tasks.start_soon(shop.ask, visit, "anna")
            await visit.begun.wait()
        assert [visit.status for visit in slow] == [200] * HELD_PER_KEY_MAX
        assert (await shop.answer("bert")).status == 200
        refused = await shop.answer("anna")
        assert (refused.status, refused.headers["retry-after"]) == (503, "5")
        for visit in slow:
            visit.takes.set()
    assert [len(visit.body) for visit in slow] == [PIECES * PIECE_BYTES] * HELD_PER_KEY_MAX
    assert (await shop.answer("anna")).status == 200


async def test_one_client_leaves_a_place_for_making(folder: Path) -> None:
    """A client that asks for page after page would keep others from ever having one."""
    shop, first, second = Shop(folder), Visit(), Visit()
    assert MAKING_MAX == 2
    shop.goes_on = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.ask, first, "anna")
        await shop.begun.acquire()
        assert (await shop.answer("anna")).status == 503
        tasks.start_soon(shop.ask, second, "bert")
        await shop.begun.acquire()
        assert (await shop.answer("carl")).status == 503
        shop.goes_on.set()
        for visit in (first, second):
            visit.takes.set()
    assert (first.status, second.status) == (200, 200)
    assert (await shop.answer("anna")).status == 200


async def test_a_client_that_leaves_ends_the_making(folder: Path) -> None:
    """Clients that ask and leave would keep all places, or have more threads than places."""
    shop, visit = Shop(folder), Visit()
    shop.goes_on = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(shop.ask, visit, "anna")
        await shop.begun.acquire()
        visit.leaves.set()
        visit.takes.set()
        await anyio.wait_all_tasks_blocked()
        assert (await shop.answer("anna")).status == 503  # its thread still works
        shop.goes_on.set()
        with anyio.fail_after(WAIT_S):
            await visit.over.wait()
    assert (visit.status, shop.pieces) == (408, 1)
    assert (await shop.answer("anna")).status == 200


async def test_a_digest_is_made_by_itself_and_holds_no_page_up(folder: Path) -> None:
    """A list that is looked at would keep its user from opening what is in it."""
    shop, digest, page = Shop(folder, piece_bytes=1000), Visit(), Visit()
    shop.goes_on = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(shop.ask, digest, "anna", path=DIGEST))
        await shop.begun.acquire()
        assert (await shop.answer("bert", path=DIGEST)).status == 503
        tasks.start_soon(shop.ask, page, "anna")
        await shop.begun.acquire()
        shop.goes_on.set()
        for visit in (digest, page):
            visit.takes.set()
    assert (digest.status, page.status) == (200, 200)
    assert (await shop.answer("bert", path=DIGEST)).status == 200


async def test_without_keys_an_address_counts_as_one(folder: Path) -> None:
    """One client would take all places of a server that has no keys."""
    shop = Shop(folder)
    slow = [Visit() for _ in range(HELD_PER_KEY_MAX)]
    async with anyio.create_task_group() as tasks:
        for visit in slow:
            tasks.start_soon(shop.ask, visit, "")
            await visit.begun.wait()
        assert (await shop.answer("")).status == 503
        assert (await shop.answer("", host="::2")).status == 200
        tasks.cancel_scope.cancel()


async def test_pages_that_are_held_are_bounded(folder: Path) -> None:
    """Many clients that read slowly would take all memory and all room for files."""
    shop = Shop(folder)
    slow = [Visit() for _ in range(HELD_MAX)]
    async with anyio.create_task_group() as tasks:
        for number, visit in enumerate(slow):
            tasks.start_soon(shop.ask, visit, f"key-{number}")
            await visit.begun.wait()
        assert (await shop.answer("anna")).status == 503
        slow[0].leaves.set()
        await slow[0].over.wait()
        assert (await shop.answer("anna")).status == 200
        tasks.cancel_scope.cancel()


async def test_a_page_is_sent_whole_and_with_its_length(folder: Path) -> None:
    """A browser could not tell a page that was cut off."""
    for piece_bytes in (1, PIECE_BYTES):  # In memory, and in a file.
        visit = await Shop(folder, piece_bytes=piece_bytes).answer("anna")
        assert visit.body == b"x" * (PIECES * piece_bytes)
        assert visit.headers["content-length"] == str(len(visit.body))
    head = await Shop(folder).answer("anna", method="HEAD")
    assert (head.headers["content-length"], head.body) == (str(PIECES * PIECE_BYTES), b"")


async def test_a_page_that_is_too_large_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log could be made to fill the disk."""
    bounds = dict.fromkeys(views.BOUNDS, (1, 1, PIECE_BYTES))
    monkeypatch.setattr(views, "BOUNDS", bounds)
    for path in (PAGE, SOUND):
        refused = await Shop(folder).answer("anna", path=path)
        assert refused.status == 422
        assert f"more than {PIECE_BYTES} bytes".encode() in refused.body


async def test_a_page_without_room_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk would look like a fault of the server, or cut the page off."""
    monkeypatch.setattr("tempfile.tempdir", str(folder / "nowhere"))
    assert (await Shop(folder).answer("anna")).status == 507
    assert (await Shop(folder, piece_bytes=1).answer("anna")).status == 200


async def test_a_sound_begins_with_its_length(folder: Path) -> None:
    """A player would not find the samples, and a download that goes on would be broken."""
    whole = HEAD + str(PIECES * PIECE_BYTES).encode() + b"x" * (PIECES * PIECE_BYTES)
    shop = Shop(folder)
    answer = await shop.answer("anna", path=SOUND)
    assert (answer.status, bytes(answer.body)) == (200, whole)
    assert answer.headers["content-type"] == "audio/wav"
    assert answer.headers["content-disposition"] == 'attachment; filename="one.wav"'
    assert "content-security-policy" not in answer.headers
    for start, end in ((0, 2), (2, 9), (9, 40), (40, 50)):
        part = await shop.answer("anna", path=SOUND, range_asked=f"bytes={start}-{end - 1}")
        assert (part.status, bytes(part.body)) == (206, whole[start:end])


async def test_a_session_that_no_sound_can_hold_is_refused(folder: Path) -> None:
    """A log that names any time as its end would look like a fault of the server."""
    shop = Shop(folder)
    shop.is_too_long = True
    refused = await shop.answer("anna", path=SOUND)
    assert refused.status == 422
    assert b"it goes on for ever" in refused.body


async def test_sounds_that_are_held_are_bounded(folder: Path) -> None:
    """Sounds are large: a few clients that read slowly would fill the disk."""
    shop = Shop(folder)
    slow = [Visit() for _ in range(SOUNDS_MAX)]
    async with anyio.create_task_group() as tasks:
        for number, visit in enumerate(slow):
            key = f"key-{number // SOUNDS_PER_KEY_MAX}"
            tasks.start_soon(partial(shop.ask, visit, key, path=SOUND))
            await visit.begun.wait()
            if number == SOUNDS_PER_KEY_MAX - 1:
                assert (await shop.answer(key, path=SOUND)).status == 503
        assert (await shop.answer("anna", path=SOUND)).status == 503
        assert (await shop.answer("anna")).status == 200  # Pages have their own places.
        slow[0].leaves.set()
        await slow[0].over.wait()
        assert (await shop.answer("anna", path=SOUND)).status == 200
        tasks.cancel_scope.cancel()
