"""Both voices of the console's Talk: one's own as reference audio, and a model that hears itself.

Chromium's microphone plays a question, and hears the page's loudspeaker (`javascript/loopback.js`).
The model talks all the time (`talkative.py`): `tiny` would stop at each second word of its own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import soundfile

from protocol.values.model import INPUT_RATE_HZ
from recorder.format.format import recording_id_of
from runtime import RUN
from tests.browser.chromium import CHROMIUM, chromium
from tests.live.servers import LiveServer, live_server
from tests.live.test_console import SPEECH, Console, sent

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")

LOOPBACK: Final = Path(__file__).parents[1] / "javascript" / "loopback.js"
TALKATIVE: Final = (*RUN[:3], f"from tests.models.talkative import talk; talk(); {RUN[3]}")
PAUSE_S: Final = 20
PANEL: Final = ".own-voice"
RECORDED: Final = f"document.querySelector('{PANEL} audio')"

STOP_AT_ONCE: Final = """
new MutationObserver((_, it) => button('Stop') && (it.disconnect(), button('Stop').click()))
  .observe(document.querySelector('.own-voice'), { subtree: true, childList: true });
"""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(recordings: Path) -> Iterator[LiveServer]:
    with live_server("--record", str(recordings), run=TALKATIVE) as server:
        yield server
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture(scope="module")
def console(server: LiveServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """The console of that model in a browser whose microphone hears its loudspeaker."""
    folder = tmp_path_factory.mktemp("browser")
    question, rate = soundfile.read(SPEECH / "076-read-me-the-news.flac", dtype="float32")
    sound = np.concatenate([question, np.zeros(int(PAUSE_S * rate), np.float32)])
    soundfile.write(folder / "question.wav", sound, rate, subtype="PCM_16")
    flags = (
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
        f"--use-file-for-fake-audio-capture={folder / 'question.wav'}",
    )
    with chromium(folder, *flags) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=LOOPBACK.read_text("utf-8"))
        tab.resize(1400, 900)
        console = Console(tab, server)
        yield console
        tab.open("about:blank")
        assert tab.logged == []
        assert [url for url in tab.requested if not url.startswith((console.base, "about:"))] == []


def choose_own_voice(console: Console) -> None:
    """Load the page, and open the panel."""
    console.open()
    console.tab.run(
        "s = document.querySelector('.setup option[value=record]').parentElement;"
        "s.value = 'record'; s.dispatchEvent(new Event('change'))"
    )


def test_a_voice_that_cannot_be_used_is_refused(console: Console) -> None:
    """The model would speak with the voice of silence, or of another conversation."""
    choose_own_voice(console)
    console.press("Start talking")
    console.wait_for(f"{PANEL} .problem", "There is no recording of your voice yet.")
    console.tab.run(STOP_AT_ONCE)
    console.press("Record")
    console.wait_for(f"{PANEL} .problem", "too short")
    console.tab.run("hears.user = 0")
    console.press("Record")
    console.wait_for(f"{PANEL} [role=timer]", "10 s left")
    console.press("Start talking")
    console.wait_for(f"{PANEL} .problem", "Stop the recording of your voice first.")
    console.wait_for(f"{PANEL} [role=timer]", "8 s left")
    console.press("Stop")
    console.wait_for(f"{PANEL} .problem", "Nothing was heard")
    assert console.tab.run(f"{RECORDED}.hidden")
    assert console.tab.run("document.querySelector('.talk').dataset.state") == "idle"


def test_nothing_is_recorded_behind_another_page(console: Console) -> None:
    """The microphone would be open where no page says so."""
    choose_own_voice(console)
    console.press("Record")
    console.wait_for(f"{PANEL} [role=timer]", "9 s left")
    console.tab.run("location.hash = '#recordings'")
    console.tab.until(f"document.querySelector('{PANEL} [role=timer]').hidden")
    assert console.tab.run(f"{RECORDED}.hidden")  # it did not come to its end


def test_a_conversation_has_the_voice_that_was_recorded(console: Console, recordings: Path) -> None:
    """It would speak with another one, or the page send what its user discards."""
    choose_own_voice(console)
    console.press("Record")
    console.wait_for(f"{PANEL} [role=timer]", "8 s left")
    console.press("Stop")
    console.wait_for(f"{PANEL} [role=status]", "s are recorded.")
    assert console.tab.barriers() == []
    assert console.tab.beyond_tab() == []
    console.tab.resize(390, 800)
    assert console.tab.run("document.documentElement.scrollWidth") <= 390
    console.tab.resize(1400, 900)
    console.tab.run(f"{RECORDED}.play()")
    console.tab.until(f"{RECORDED}.currentTime > 0.1")
    assert [*recordings.glob("*.zst")] == []  # all was on the page only
    console.press("Start talking")
    assert console.tab.run(f"{RECORDED}.paused")
    console.wait_until("listening")
    console.press("Stop")
    console.wait_until("ended")
    (log,) = recordings.glob("*.zst")
    said = sent(recordings, recording_id_of(log))
    voice = base64.b64decode(said[0]["payload"]["voice"]["ref_audio_base64"])
    sound, rate = soundfile.read(io.BytesIO(voice))
    told = float(console.text(f"{PANEL} [role=status]").split()[0])
    assert (rate, len(sound) / rate) == (INPUT_RATE_HZ, pytest.approx(told, abs=0.05))
    assert told >= 2
    assert np.sqrt(np.mean(sound**2)) > 0.01


def test_a_model_that_hears_itself(console: Console) -> None:
    """It stops at its own words, and its user would not know why."""
    console.open()
    console.press("Start talking")
    advice = ".stage > .notice:not([hidden])"
    console.wait_for(advice, "The model hears itself")
    assert "Use headphones" in console.text(advice)
    correlation, delay = console.text(".measures div:nth-child(6) dd").split(", ")
    assert 0.5 <= float(correlation) <= 1
    assert 150 <= int(delay.removesuffix(" ms")) < 400
    console.press("Stop")
    console.wait_until("ended")
    assert console.tab.run(f"document.querySelector('{advice}')") is None


def test_a_microphone_that_is_refused(server: LiveServer, tmp_path: Path) -> None:
    """The page says what the user can do about it, and holds no slot."""
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream=deny")
    with chromium(tmp_path, *flags) as tab:
        console = Console(tab, server)
        console.open()
        console.press("Start talking")
        console.wait_until("ended")
        assert "allow it in the address bar" in console.text(".notice.bad")
        assert console.tab.run("button('Start again') !== undefined")
        choose_own_voice(console)
        console.press("Record")
        console.wait_for(".own-voice .problem", "allow it in the address bar")
        assert tab.logged == []
