"""Pages of `--static` in a browser with a microphone: they load, connect, and are talked to.

The pages under `tests/pages` are built as those of MiniCPM-o's demos are, which expect `/status`,
`/api/default_ref_audio`, `/ws/duplex` and files below `/static/` on one port.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
import pytest
import soundfile

from tests.browser.chromium import CHROMIUM, FAKE_DEVICES, Tab, chromium
from tests.live.servers import live_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")

PAGES: Final = Path(__file__).parents[1] / "pages"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the pages with one slot; its address."""
    voices = tmp_path_factory.mktemp("voices")
    file = io.BytesIO()
    tone = 0.25 * np.sin(np.arange(16_000) * 0.05)
    soundfile.write(file, tone, 16_000, format="WAV", subtype="PCM_16")
    (voices / "anna.wav").write_bytes(file.getvalue())
    options = ("--static", str(PAGES), "--voices", str(voices), "--default-voice", "anna")
    with live_server("--no-record", "--slots", "1", *options) as server:
        host, port = server.address
        yield f"http://{host}:{port}"
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    with chromium(tmp_path / "first", *FAKE_DEVICES) as tab:
        yield tab


def test_a_page_loads_with_its_style_and_follows_its_links(base: str, tab: Tab) -> None:
    """Absolute and relative addresses of scripts and styles, and links to pages, all work."""
    tab.open(f"{base}/")
    tab.until("getComputedStyle(document.body).color === 'rgb(1, 2, 3)'")
    tab.run("document.querySelector('a').click()")
    tab.until("window.page?.state === 'loaded'")
    assert tab.run("location.pathname") == "/duplex/duplex.html"
    assert tab.run("page.workers") == "1/1"
    assert tab.run("[page.voice.name, page.voice.sample_rate, page.voice.samples]") == [
        *("anna", 16_000, 16_000)
    ]
    asked = {urlsplit(url).path for url in tab.requested}
    assert {"/static/look.css", "/duplex/duplex.mjs", "/api/presets"} <= asked


def test_a_page_talks_to_the_model(base: str, tab: Tab) -> None:
    """A page connects without a key, sends its microphone, and hears an answer."""
    tab.open(f"{base}/duplex")
    tab.until("window.page?.state === 'loaded'")
    tab.run("page.start()")
    tab.until("page.state === 'running'")
    tab.until("page.results >= 5")
    assert tab.run("page.errors") == []
    assert "this is second" in tab.run("page.text")
    tab.run("page.stop()")
    tab.until("page.state === 'over'")


def test_a_page_that_waits_is_served_when_the_slot_is_free(
    base: str, tab: Tab, tmp_path: Path
) -> None:
    """A page that sends its opening while it waits, and only then, has its session in the end."""
    with chromium(tmp_path / "second", *FAKE_DEVICES) as later:
        for each in (tab, later):
            each.open(f"{base}/duplex")
            each.until("window.page?.state === 'loaded'")
        tab.run("page.start()")
        tab.until("page.results >= 2")
        later.run("page.start()")
        later.until("page.queued >= 1")
        tab.until("page.results >= 4")
        assert later.run("page.state") == "connecting"
        tab.run("page.stop()")
        later.until("page.state === 'running'")
        later.until("page.results >= 5")
        assert later.run("page.errors") == []
        assert "this is second" in later.run("page.text")
        later.run("page.stop()")
        later.until("page.state === 'over'")
