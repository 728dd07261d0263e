"""The page of a recording as a server shows it: replayed, and marked, in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import attrs
import pytest
from websockets.sync.client import connect

from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.storage.marks import add_mark, marks_path, read_marks
from recorder.storage.store import Store
from replay.view.document import page_of
from runtime.access.keys import ANYONE, Key, change_key_file, hash_key
from runtime.api.views import page_marks
from tests.browser.chromium import CHROMIUM, Tab, chromium
from tests.golden.logs import FOLDER
from tests.live.servers import LiveServer, live_server
from tests.replay.test_logs import busy_scene, renumbered, write_log
from tests.runtime.api.test_recordings import hear
from tests.sessions.in_memory import init_frame

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")

GOLDEN: Final = "v1-realtime-video.session.zst"
HOSTILE: Final = "</script><img src=x onerror=alert(1)><b>late</b>"
KEY: Final = "antiphon_of_anna"
VIEW: Final = "antiphonView.view"
NOTES: Final = "[...document.querySelectorAll('.passage.note .words')].map((it) => it.textContent)"


@attrs.frozen
class Page:
    """A server's page of a recording, in a browser."""

    tab: Tab
    server: LiveServer
    folder: Path

    def open(self, name: str, place: str = "") -> None:
        """Open the page of a recording."""
        host, port = self.server.address
        self.tab.open("about:blank")
        self.tab.open(f"http://{host}:{port}/api/recordings/{name}/view{place}")
        self.tab.until("document.documentElement.classList.contains('ready')")

    def write(self, text: str, count: int) -> None:
        """Write a mark where the page is; then there are so many."""
        self.tab.run("document.activeElement.blur()")
        self.tab.key("m")
        self.tab.until("document.activeElement.id === 'mark-text'")
        self.tab.type(text)
        self.tab.run("document.querySelector('#mark-save').click()")
        self.tab.until(f"{NOTES}.length === {count}")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A server without keys, with a golden log; the pages must log nothing."""
    folder = tmp_path_factory.mktemp("recordings")
    shutil.copy(FOLDER / GOLDEN, Store(folder).path("golden"))
    with (
        live_server("--record", str(folder)) as server,
        chromium(tmp_path_factory.mktemp("browser")) as tab,
    ):
        tab.resize(1400, 900)
        yield Page(tab, server, folder)
        tab.open("about:blank")
        assert tab.logged == []
        assert "Traceback" not in server.errors.read_text()


def test_a_recording_is_replayed_and_marked(page: Page) -> None:
    """Remarks on a recording would be kept elsewhere, without their place."""
    tab = page.tab
    page.open("golden", "#t=3.2")
    tab.run("document.querySelector('#replay').click()")
    tab.until("document.querySelector('#replayed').textContent.startsWith('Replay: identical')")
    assert "20 frames byte for byte" in tab.run("document.querySelector('#replayed').textContent")
    page.write(HOSTILE, 1)
    tab.run(f"{VIEW}.mark({{ begin: 5, end: 9.5 }})")
    page.write("this part", 2)
    assert "2 marks" in tab.run("document.querySelector('#sentence').textContent")
    for width in (1400, 390):
        tab.resize(width, 900)
        tab.key("m")
        assert tab.run("document.documentElement.scrollWidth") <= width
        assert tab.barriers() == []
        assert tab.beyond_tab() == []
    page.open("golden")
    assert tab.run(NOTES) == [HOSTILE, "this part"]
    assert tab.run("document.querySelectorAll('img:not(#camera), .words b').length") == 0
    places = f"{VIEW}.session.happenings.filter(({{ kind }}) => kind === 'mark')"
    assert tab.run(f"{places}.map(({{ at, end }}) => [at, end])") == [[3.2, 3.2], [5, 9.5]]
    tab.run("document.querySelector('.remove').click()")
    tab.until(f"{NOTES}.length === 1")
    page.open("golden")
    assert tab.run(NOTES) == ["this part"]
    assert Store(page.folder).path("golden").read_bytes() == (FOLDER / GOLDEN).read_bytes()


def test_a_key_is_asked_for(page: Page, tmp_path: Path) -> None:
    """A mark would be refused without a reason, as the browser's own password changes nothing."""
    key = Key(name="anna", hash=hash_key(KEY), scope="admin")
    change_key_file(tmp_path / "keys.toml", lambda _: (key,), create=True)
    log = Store(tmp_path).path("golden")
    shutil.copy(FOLDER / GOLDEN, log)
    tab, problem = page.tab, "document.querySelector('#mark-problem').textContent"
    options = ("--record", str(tmp_path), "--keys", str(tmp_path / "keys.toml"))
    with live_server(*options) as server:
        host, port = server.address
        tab.open(f"http://me:{KEY}@{host}:{port}/api/recordings/golden/view")
        tab.until("document.documentElement.classList.contains('ready')")
        tab.key("m")
        tab.until("document.activeElement.id === 'mark-text'")
        tab.type("late")
        tab.run("document.querySelector('#mark-save').click()")
        tab.until(f"{problem} === 'This takes your key.'")
        assert tab.run("document.activeElement.id") == "mark-key"
        tab.type(KEY)
        tab.run(f"{VIEW}.marks.write(); {VIEW}.marks.write(); 0")  # twice, as a key that is held
        tab.until(f"{NOTES}.length === 1")
        assert [it.by for it in read_marks(marks_path(log)).marks] == ["anna"]
        tab.run("document.querySelector('.remove').click()")
        tab.until(f"{NOTES}.length === 0")
        assert read_marks(marks_path(log)).marks == ()
        tab.open("about:blank")


def test_a_running_session_is_marked_in_its_log(page: Page) -> None:
    """One would have to wait for its end, and then find the moment again."""
    with connect(f"{page.server.url}?mode=audio", compression=None) as websocket:
        websocket.send(init_frame())
        name = hear(websocket, "session.created")["recording_id"]
        page.open(name)
        assert page.tab.run("document.querySelector('#replay').hidden") is True
        page.write("now", 1)
    log = Store(page.folder).path(name)
    assert [it.fields for it in read(log) if it.kind == "mark"] == [{"text": "now"}]
    assert not marks_path(log).exists()


def test_a_recording_that_diverges_is_told_and_leads_to_the_record(page: Page) -> None:
    """A recording that was tampered with would look like any other."""
    records = busy_scene().records
    sent = [it for it in records if it.kind == "tx"][-1]
    frame = str(sent.fields["frame"]).replace("type", "typo", 1)
    other = Record(kind="tx", seq=0, at_ns=sent.at_ns, fields={**sent.fields, "frame": frame})
    write_log(page.folder, renumbered([other if it is sent else it for it in records]))
    page.open("rec-000001")
    page.tab.run("document.querySelector('#replay').click()")
    told = f"Replay: diverged at record {sent.seq}"
    page.tab.until(f"document.querySelector('#replayed').textContent.startsWith('{told}')")
    page.tab.run("document.querySelector('#replayed button').click()")
    assert page.tab.run(f"{VIEW}.list.selected.seq") == sent.seq


def test_the_list_of_recordings_replays_one(page: Page) -> None:
    """Each would be opened, to be replayed."""
    host, port = page.server.address
    page.tab.open(f"http://{host}:{port}/#recordings")
    items = "[...document.querySelectorAll('.menu button:enabled')]"
    button = f"{items}.find((it) => it.textContent === 'Replay')"
    page.tab.until(f"{button} !== undefined")
    page.tab.run("document.querySelector('td.actions button').click()")
    page.tab.run(f"{button}.click()")
    told = "document.querySelector('dialog[open] .notice').textContent"
    page.tab.until(f"/^Replay: (identical|diverged)/.test({told})")
    assert page.tab.barriers() == []


def test_a_saved_page_shows_marks_and_takes_none(page: Page, tmp_path: Path) -> None:
    """A saved page would offer a form that no server takes."""
    log = tmp_path / GOLDEN
    shutil.copy(FOLDER / GOLDEN, log)
    add_mark(marks_path(log), at_ms=3200, end_ms=3200, text=HOSTILE, by="anna", now_ms=0)
    path = tmp_path / "page.html"
    with LogReader(log) as reader, path.open("wb") as file:
        told = page_marks(read_marks(marks_path(log)), ANYONE, is_open=False)  # as by curl
        file.writelines(page_of(reader.head.fields, reader, later=told))
    page.tab.open(path)
    page.tab.until("document.documentElement.classList.contains('ready')")
    assert page.tab.run(NOTES) == [HOSTILE]
    page.tab.key("m")
    shown = (
        "[...document.querySelectorAll('#write, #replay, #desk, .remove')].map((it) => it.hidden)"
    )
    assert page.tab.run(shown) == [True, True, True]
