"""The console in a browser: a spoken conversation with `tiny`, and what goes wrong around one.

Chromium's microphone plays a file again and again: a question, and time for an answer. So a test
waits for what it wants to see, and it does not matter when in the file its session began.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import soundfile
from websockets.sync.client import ClientConnection, connect

from recorder.format.format import recording_id_of
from recorder.read.reader import LogReader, read
from recorder.storage.store import Store
from runtime.access.keys import Key, change_key_file, hash_key
from tests.browser.chromium import CHROMIUM, WAIT_S, Tab, chromium
from tests.golden.logs import FOLDER
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request
from tests.sessions.in_memory import init_frame

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")

PAGE: Final = Path(__file__).parents[2] / "docs" / "console.md"
SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
ANSWER: Final = "No news is good news, and there is no news today."
KEY: Final = "antiphon_of_anna"
SILENT_MS: Final = 50
"""From an interruption to silence, of which the fade takes 30 ms."""
Samples = npt.NDArray[np.float32]
TRIES: Final = 4
"""A machine that is busy may hold the browser's threads up for a moment, but not each time."""
OLD: Final = ("v1-barge-in", "v1-chat-states", "v1-realtime-chat", "v1-realtime-video")
COPIES: Final = 60
"""More than a page of the list."""
PAGES: Final = ("Talk", "Recordings", "Chat", "Transcribe", "Server")
WIDTHS: Final = (1400, 700, 390)


@attrs.frozen
class Console:
    """The console of a server in a browser."""

    tab: Tab
    server: LiveServer

    @property
    def base(self) -> str:
        host, port = self.server.address
        return f"http://{host}:{port}"

    def open(self, page: str = "Talk") -> None:
        """Load the console, and wait for one of its pages."""
        self.tab.open("about:blank")
        self.tab.open(f"{self.base}/#{page.lower()}")
        self.tab.until(f"document.title === '{page} - Antiphon'")

    def press(self, name: str) -> None:
        """Click the button with this text on the page that is shown."""
        self.tab.until(f"button('{name}') && !button('{name}').disabled", setup=BUTTON)
        self.tab.run(f"button('{name}').click()")

    def text(self, selector: str) -> str:
        """The text of the first such element."""
        said: str = self.tab.run(f"document.querySelector('{selector}').textContent")
        return said

    def wait_for(self, selector: str, text: str) -> None:
        """Wait until the first such element has this in its text."""
        found = f"(document.querySelector({json.dumps(selector)})?.textContent ?? '')"
        try:
            self.tab.until(f"{found}.includes({json.dumps(text)})")
        except AssertionError as error:
            raise AssertionError(f"{self.tab.run(found)!r} has no {text!r}") from error

    def wait_until(self, state: str) -> None:
        """Wait until the conversation is in this state."""
        self.tab.until(f"document.querySelector('.talk').dataset.state === '{state}'")


BUTTON: Final = """
globalThis.button = (name) => [...document.querySelectorAll('button, a.button')].find(
  (it) => it.textContent === name && it.checkVisibility());
"""


@pytest.fixture(scope="module")
def microphone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the browser's microphone hears: a question, and seconds to answer it."""
    question, rate = soundfile.read(SPEECH / "076-read-me-the-news.flac", dtype="float32")
    pause = np.zeros(rate, np.float32)
    path = tmp_path_factory.mktemp("microphone") / "question.wav"
    soundfile.write(path, np.concatenate([pause, question, *[pause] * 5]), rate, subtype="PCM_16")
    return path


@pytest.fixture(scope="module")
def tab(microphone: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A browser with that microphone, and a camera that shows a clock."""
    flags = (
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
        f"--use-file-for-fake-audio-capture={microphone}",
    )
    with chromium(tmp_path_factory.mktemp("browser"), *flags) as tab:
        tab.resize(1400, 900)
        yield tab


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with old recordings, so that no test needs those of another."""
    folder = tmp_path_factory.mktemp("recordings")
    for number, name in enumerate(OLD):
        shutil.copy(FOLDER / f"{name}.session.zst", Store(folder).path(f"0-old-{number}"))
    return folder


@pytest.fixture(scope="module")
def tiny(recordings: Path) -> Iterator[LiveServer]:
    """A server with one slot."""
    with live_server("--slots", "1", "--record", str(recordings), model="tiny") as server:
        yield server
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture
def console(tab: Tab, tiny: LiveServer) -> Iterator[Console]:
    """The console of `tiny`: it must log no error, and send no request to another server."""
    tab.logged.clear()
    tab.requested.clear()
    console = Console(tab, tiny)
    yield console
    tab.open("about:blank")  # what runs ends
    assert tab.logged == []
    assert [url for url in tab.requested if not url.startswith((console.base, "about:"))] == []


# -- a conversation -------------------------------------------------------------------------------


def test_a_question_is_answered_aloud(console: Console, recordings: Path) -> None:
    """Two clicks (the page's, and the browser's for the microphone) lead to a spoken answer."""
    console.open()
    console.press("Start talking")
    console.wait_for(".captions", ANSWER)
    assert console.text(".pill") in {"full", "ready"}
    assert "listened" in console.text(".legend")
    assert console.tab.run("document.querySelectorAll('.bar.speak').length") >= 2
    assert console.text(".measures div:nth-child(1) dd").endswith(" s")
    assert " of 8,192" in console.text(".measures div:nth-child(3) dd")
    assert console.tab.run("document.querySelector('.stage > .notice:not([hidden])')") is None
    assert console.tab.barriers() == []
    console.press("Stop")
    console.wait_until("ended")
    link = console.tab.run("document.querySelector('.links a').getAttribute('href')")
    page = request(console.server.address, link, headers={})
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    said = sent(recordings, link.split("/")[3])
    played = [it["played_ms"] for it in said if it["type"] == "playback.ack"]
    assert played == sorted(played)
    assert 1_000 < played[-1] < 6_000


@pytest.mark.soak  # `test_tools_of_a_duplex_session` calls by the same client.
def test_the_page_tells_the_model_the_time(tab: Tab, tmp_path: Path) -> None:
    """Tools could not be tried without a program, or a recording would not show their calls."""
    with live_server("--slots", "1", "--record", str(tmp_path)) as server:
        console = Console(tab, server)
        console.open()
        tab.run("[...document.querySelectorAll('.setup input[type=checkbox]')][0].click()")
        console.press("Start talking")
        console.wait_for(".captions", "clock {} → ")
        console.wait_for(".captions", "it is ")
        assert "called a tool 1" in console.text(".legend")
        assert "called clock {}" in tab.run("document.querySelector('.bar.call').title")
        console.press("Stop")
        console.wait_until("ended")
        tab.run("document.querySelector('.links a').target = ''")
        console.press("Open the recording")
        tab.until("globalThis.antiphonView?.view.session.story.calls.length === 1")
        lane = "antiphonView.view.line.lanes.find(({ id }) => id === 'units')"
        call = "antiphonView.view.session.story.calls[0]"
        said = tab.run(f"{lane}.hit({call}.at + 0.01, 0, 2).lines.join()")
        assert said.startswith("{},“")
        tab.open("about:blank")


def test_a_recording_is_talked_on_from(console: Console, recordings: Path) -> None:
    """The model would have forgotten the conversation (of the test before), or have another one."""
    parent = max(recordings.glob("*.zst"))
    name = recording_id_of(parent)
    console.tab.open("about:blank")
    console.tab.open(f"{console.base}/api/recordings/{name}/view")
    console.tab.until("document.querySelector('#talk-on')?.search === '?to=talk'")  # from its end
    assert "read me the news" in console.text("h1") or ANSWER[:30] in console.text("h1")
    assert console.tab.run("document.querySelector('#all').search") == "?to=list"
    console.tab.run("antiphonView.view.player.seek(0.01)")
    console.tab.until("document.querySelector('#talk-on')?.search.endsWith('unit=0')")
    console.tab.run("antiphonView.view.player.seek(antiphonView.view.past[1].finalized)")
    assert console.tab.barriers() == []
    console.tab.run("document.querySelector('#talk-on').click()")
    console.wait_for(".talk .notice", "The model will remember")
    console.press("Start talking")
    console.wait_for(".captions", ANSWER)
    console.press("Stop")
    console.wait_until("ended")
    link = console.tab.run("document.querySelector('.links a').getAttribute('href')")
    fork = Store(recordings).path(link.split("/")[3])
    with LogReader(fork) as reader:
        parent_of = reader.head.fields["parent"]
    assert isinstance(parent_of, dict)
    assert (parent_of["recording"], parent_of["unit"]) == (name, 2)
    heard = [
        [it["input"] for it in sent(recordings, recording_id_of(log)) if "input" in it]
        for log in (parent, fork)
    ]
    assert heard[0][:2] == heard[1][:2]


LATE: Final = """
globalThis.late = [];
globalThis.fetch = ((ask) => (path, options) => path.startsWith('/api/recordings/')
  ? new Promise((answer) => late.push((status, body) => answer(Response.json(body, { status }))))
  : ask(path, options))(fetch);
"""


def test_a_recording_that_is_not_there_is_not_talked_on_from(console: Console) -> None:
    """The user would talk to a model that remembers nothing, or a conversation that was left."""
    console.open()
    console.tab.run(LATE + "location.hash = '#talk/left'")
    console.tab.until("late.length === 1")
    console.tab.run("location.hash = '#talk/gone'")
    console.tab.until("late.length === 2")
    console.tab.run("late[0](200, { mode: 'audio', began_ms: 1 })")
    console.press("Start talking")
    console.wait_for(".talk .notice[role=alert]", "being looked for")
    console.tab.run("late[1](404, { message: 'there is no such recording' })")
    console.wait_for(".talk .notice[role=status]", "no such recording")
    console.press("Start talking")
    console.wait_for(".talk .notice[role=alert]", "no such recording")
    console.wait_until("idle")
    assert not console.tab.run("document.querySelector('.setup').classList.contains('fork')")
    console.tab.run("document.querySelector('.talk .notice a').click()")
    console.tab.until("document.querySelector('.talk .notice[role=status]').hidden")


def sent(recordings: Path, recording_id: str) -> list[dict[str, Any]]:
    """What a client sent, as the recording has it."""
    records = read(Store(recordings).path(recording_id))
    return [json.loads(str(it.fields["frame"])) for it in records if it.kind == "rx"]


def test_an_interruption_silences_the_speaker(console: Console) -> None:
    """The user would hear on for seconds what the model said before it was interrupted."""
    console.open()
    console.press("Start talking")
    took = []
    for _ in range(TRIES):
        console.wait_until("speaking")
        console.tab.run("document.querySelector('.measures div:nth-child(4) dd').textContent = ''")
        console.tab.key("Escape")
        console.wait_for(".measures div:nth-child(4) dd", " ms")
        took.append(int(console.text(".measures div:nth-child(4) dd").removesuffix(" ms")))
        console.wait_until("listening")
        if took[-1] < SILENT_MS:
            break
    assert min(took) < SILENT_MS
    assert "interrupted" in console.text(".captions")
    console.press("Stop")
    console.wait_until("ended")


def begin(client: ClientConnection) -> None:
    """Take the slot."""
    client.send(init_frame())
    while json.loads(client.recv(timeout=WAIT_S))["type"] != "session.created":
        pass


def test_a_place_in_the_queue_is_shown(console: Console) -> None:
    """A user who waits would believe that the page hangs."""
    with connect(f"{console.server.url}?mode=audio", compression=None) as other:
        begin(other)
        console.open()
        console.press("Start talking")
        console.wait_until("queued")
        console.wait_for(".detail", "Place 1 of 1 in the queue")
        console.press("Stop")  # who no longer wants to wait leaves the queue
        console.wait_until("ended")
        waiting = "fetch('/api/queue').then((it) => it.json()).then((it) => it.queue_length)"
        console.tab.until(f"{waiting}.then((length) => length === 0)")
        console.press("Start again")
        console.wait_for(".detail", "Place 1 of 1 in the queue")
    console.wait_until("listening")
    console.wait_for(".legend", "listened 1")
    console.press("Stop")
    console.wait_until("ended")


def test_a_model_sees_what_the_camera_shows(console: Console, recordings: Path) -> None:
    """Pictures go with the sound, one a second."""
    console.open()
    console.tab.run(
        "s = document.querySelector('.choices select'); s.value = 'front';"
        "s.dispatchEvent(new Event('change'))"
    )
    console.press("Start talking")
    console.tab.until("document.querySelector('.preview').videoWidth > 0")
    console.wait_for(".legend", "listened 2")
    console.press("Stop")
    console.wait_until("ended")
    link = console.tab.run("document.querySelector('.links a').getAttribute('href')")
    said = sent(recordings, link.split("/")[3])
    assert any("video_frames" in it["input"] for it in said if it["type"] == "input.append")


def samples_of(audio: str) -> Samples:
    """The samples of an append."""
    return np.frombuffer(base64.b64decode(audio), "<f4")


def test_a_key_held_is_what_is_heard(console: Console, recordings: Path) -> None:
    """With push to talk silence goes out, but while the key is held."""
    console.open()
    console.press("Push to talk")  # one of the choices before a conversation
    console.press("Start talking")
    console.wait_until("listening")
    assert console.tab.run("document.querySelector('.talk').classList.contains('muted')")
    console.wait_for(".legend", "listened 2")
    console.tab.run("document.activeElement.blur()")
    console.tab.call("Input.dispatchKeyEvent", type="keyDown", key=" ")
    console.tab.until("document.querySelector('.hold.held')?.checkVisibility() ?? false")
    assert not console.tab.run("document.querySelector('.talk').classList.contains('muted')")
    console.tab.call("Input.dispatchKeyEvent", type="keyUp", key=" ")
    console.tab.until("!document.querySelector('.hold.held')")
    console.press("Stop")
    console.wait_until("ended")
    link = console.tab.run("document.querySelector('.links a').getAttribute('href')")
    said = sent(recordings, link.split("/")[3])
    appends = [it["input"]["audio"] for it in said if it["type"] == "input.append"]
    assert not any(map(np.any, map(samples_of, appends[:2])))


def test_a_setting_out_of_its_bounds_is_not_sent(console: Console) -> None:
    """The bounds are the server's own: a user sees them before a session is refused."""
    console.open()
    console.tab.run("document.querySelector('.setup details').open = true")
    shown = console.tab.run(
        "[...document.querySelectorAll('.setup input[type=number]')].map((it) => [it.min, it.max])"
    )
    assert ["0", "2"] in shown
    console.tab.run("document.querySelector('.setup input[max=\"2\"]').value = '3'")
    console.press("Start talking")
    assert not console.tab.run("document.querySelector('.setup input[max=\"2\"]').validity.valid")
    assert console.tab.run("document.querySelector('.talk').dataset.state") == "idle"


# -- the other pages ------------------------------------------------------------------------------


def test_a_chat(console: Console) -> None:
    """A question is answered, and spoken where that is wanted."""
    console.open("Chat")
    console.tab.run("document.querySelector('.composer textarea').focus()")
    console.tab.run("document.querySelector('.composer .check input').click()")
    console.tab.type("Good morning!")
    console.tab.key("Enter")
    console.wait_for(".message.model", "Good morning to you.")
    console.tab.until("document.querySelector('.composer .primary').textContent === 'Send'")
    assert console.tab.run("document.querySelectorAll('.message').length") == 2


@pytest.mark.parametrize("page", ["Talk", "Chat", "Transcribe"])
def test_a_page_says_what_is_recorded(console: Console, page: str) -> None:
    """A user would be recorded and told that nothing is kept, or could not decline."""
    console.open(page)
    console.tab.until("document.querySelector('.consent p').textContent.endsWith(' is recorded.')")
    console.tab.run("document.querySelector('.consent input').click()")
    console.wait_for(".consent p", "is not recorded.")
    assert "keeps none" not in console.text("main")


def test_a_chat_need_not_be_recorded(console: Console, recordings: Path) -> None:
    """The switch would be shown and not obeyed, or only by the first question's session."""

    def ask(question: str) -> int:
        before = len(list(recordings.glob("*.session.zst")))
        said = console.tab.run("document.querySelectorAll('.message.model').length")
        console.tab.run("document.querySelector('.composer textarea').focus()")
        console.tab.type(question)
        console.tab.key("Enter")
        ready = "document.querySelector('.composer .primary').textContent === 'Send'"
        console.tab.until(f"document.querySelectorAll('.message.model').length > {said} && {ready}")
        return len(list(recordings.glob("*.session.zst"))) - before

    console.open("Chat")
    assert ask("Good morning!") == 1
    console.tab.run("document.querySelector('.consent input').click()")
    assert ask("Good morning!") == 0
    assert console.tab.run("document.querySelectorAll('.message').length") == 4


def test_a_chat_goes_on_after_a_pause(tab: Tab) -> None:
    """A server ends a chat in which nothing is asked; its user would have to ask twice."""
    with live_server("--no-record", "--chat-idle-s", "1") as server:
        console = Console(tab, server)
        console.open("Chat")
        for count in (1, 2):
            console.tab.run("document.querySelector('.composer textarea').focus()")
            console.tab.type("one two three")
            console.tab.key("Enter")
            ready = "document.querySelector('.composer .primary').textContent === 'Send'"
            console.tab.until(f"document.querySelectorAll('.model').length > {count} && {ready}")
            sessions = "fetch('/api/sessions').then((it) => it.json()).then((it) => it.sessions)"
            console.tab.until(f"{sessions}.then((all) => all.length === 0)")
        answers = console.tab.run(
            "[...document.querySelectorAll('.message.model .body')].map((it) => it.textContent)"
        )
        assert len(answers) == 2
        assert "No answer." not in answers


def test_a_transcription(console: Console) -> None:
    """What is said is written, and the last words too, though the user has stopped."""
    console.open("Transcribe")
    console.press("Start listening")
    console.wait_for(".transcript", "news")
    console.press("Stop")
    console.tab.until("button('Start listening') !== undefined")
    assert "news" in console.text(".transcript")
    assert console.tab.barriers() == []


def test_a_file_is_transcribed(console: Console) -> None:
    """Sound that is sent faster than it was spoken is written to its end."""
    console.open("Transcribe")
    document = console.tab.call("DOM.getDocument")["root"]["nodeId"]
    found = console.tab.call("DOM.querySelector", nodeId=document, selector="[type=file]")
    speech = str(SPEECH / "076-read-me-the-news.flac")
    console.tab.call("DOM.setFileInputFiles", files=[speech], nodeId=found["nodeId"])
    console.wait_for(".transcript", "read me the news")
    console.tab.until("button('Start listening') !== undefined", setup=BUTTON)


def test_recordings_are_listed_and_removed(console: Console) -> None:
    """One is removed by two clicks, and others are found by their mode."""
    console.open("Recordings")
    rows = "document.querySelectorAll('tbody tr').length"
    console.tab.until(f"{rows} > 1")
    count = console.tab.run(rows)
    console.press("⋯")
    assert console.tab.barriers() == []
    console.press("Delete")
    console.press("Really delete?")
    console.tab.until(f"{rows} === {count - 1}")
    console.tab.run(
        "s = document.querySelector('.head-row select'); s.value = 'chat';"
        "s.dispatchEvent(new Event('change'))"
    )
    console.tab.until(f"{rows} < {count - 1}")
    modes = "[...document.querySelectorAll('tbody td[data-name=Mode]')].map((it) => it.textContent)"
    assert set(console.tab.run(modes)) == {"chat"}


def test_many_recordings_are_removed_and_an_empty_list_leads_to_talk(
    tab: Tab, tmp_path: Path
) -> None:
    """An operator would delete hundreds one by one, or a new user not know what the page is for."""
    for number, name in enumerate(OLD):
        shutil.copy(FOLDER / f"{name}.session.zst", Store(tmp_path).path(f"0-old-{number}"))
    with live_server("--record", str(tmp_path)) as server:
        console = Console(tab, server)
        console.open("Recordings")
        rows = "document.querySelectorAll('tbody td.pick').length"
        console.tab.until(f"{rows} === {len(OLD)}")
        console.tab.run("document.querySelector('td.pick input').click()")
        console.press("Delete 1")
        console.press("Really delete 1?")
        console.tab.until(f"{rows} === {len(OLD) - 1}")
        console.tab.run("document.querySelector('th.pick input').click()")
        console.press(f"Delete {len(OLD) - 1}")
        console.press(f"Really delete {len(OLD) - 1}?")
        console.tab.until(f"{rows} === 0")
        assert list(tmp_path.glob("*.session.zst")) == []
        console.press("Refresh")
        console.wait_for("tbody", "Nothing is recorded yet")
        assert console.tab.barriers() == []
        console.tab.run("document.querySelector('tbody a').click()")
        console.tab.until("document.title === 'Talk - Antiphon'")
        tab.open("about:blank")


def test_recordings_are_sorted(console: Console) -> None:
    """The longest, or the slowest, would be looked for by eye."""
    console.open("Recordings")
    console.tab.until("document.querySelectorAll('td[data-name=Size]').length > 2", setup=BUTTON)
    shown = "[...document.querySelectorAll('td[data-name=Delay]')].map((it) => it.textContent)"
    console.press("Delay")
    console.tab.until(f"{shown}.every(Boolean)")
    console.tab.until("document.querySelector('[aria-sort]').textContent === 'Delay'")
    seconds = [float(it.removesuffix(" s")) for it in console.tab.run(shown) if it != "–"]
    assert seconds == sorted(seconds, reverse=True)
    console.press("Delay")
    assert console.tab.run("document.querySelector('[aria-sort]').ariaSort") == "ascending"
    again = [float(it.removesuffix(" s")) for it in console.tab.run(shown) if it != "–"]
    assert again == sorted(seconds)


@pytest.mark.soak  # `test_recordings_are_sorted` has those of one page.
def test_recordings_of_all_pages_are_sorted(tab: Tab, tmp_path: Path) -> None:
    """The oldest of a thousand would be the oldest of the newest fifty."""
    for number in range(COPIES):
        shutil.copy(FOLDER / f"{OLD[0]}.session.zst", Store(tmp_path).path(f"old-{number:03}"))
    with live_server("--record", str(tmp_path)) as server:
        console = Console(tab, server)
        console.open("Recordings")
        rows = "document.querySelectorAll('tbody td.pick').length"
        console.tab.until(f"{rows} === 50", setup=BUTTON)
        console.press("Began")
        console.tab.until(f"{rows} === {COPIES}")
        console.wait_for("[aria-label=Recordings] p.soft[role=status]", f"{COPIES} shown.")
        tab.open("about:blank")


def test_both_sides_are_written_down(tab: Tab, tmp_path: Path) -> None:
    """A user would not see what the model was asked, or read it after the answer."""
    with live_server("--record", str(tmp_path), "--transcriber", "tiny", model="tiny") as server:
        console = Console(tab, server)
        console.open()
        assert not console.tab.run("document.querySelector('.controls').checkVisibility()")
        console.press("Start talking")
        console.wait_for(".captions", ANSWER)
        console.wait_for(".captions .user", "read me the news")
        voices = "[...document.querySelectorAll('.captions li')].map((it) => it.className)"
        assert console.tab.run(voices)[:2] == ["user", "model"]
        console.press("Stop")
        console.wait_until("ended")
        console.tab.run("location.hash = '#recordings'")
        console.wait_for("td[data-name='First words']", f"read me the news – {ANSWER}")
        tab.open("about:blank")


def test_a_microphone_is_tested_before_a_conversation(console: Console) -> None:
    """A user would talk to a microphone that is off, or the test hold it during a conversation."""
    console.open()
    assert not console.tab.run("document.querySelector('.lane').checkVisibility()")
    console.press("Test the microphone")
    console.tab.until("document.querySelector('.meter meter').value > 0.02")  # the question begins
    assert console.tab.barriers() == []
    console.press("Start talking")
    console.wait_until("listening")
    assert not console.tab.run("document.querySelector('.meter').checkVisibility()")
    assert console.tab.run("document.querySelector('.lane').checkVisibility()")
    console.press("Stop")
    console.wait_until("ended")


def test_recordings_are_previewed_compared_and_searched(console: Console) -> None:
    """What a session was about would be found by opening each."""
    console.open("Recordings")
    cell = "td[data-name='First words']"
    texts = f'[...document.querySelectorAll("{cell}")].map((it) => it.textContent)'
    words = f"{texts}.find((it) => /^[a-z]{{4}}/i.test(it))"
    console.tab.until(f"{words} !== undefined")
    wanted = console.tab.run(words)[:4]
    delays = "[...document.querySelectorAll('td[data-name=Delay]')].map((it) => it.textContent)"
    console.tab.until(f"{delays}.some((it) => /^[0-9]+[.][0-9]{{2}} s$/.test(it))")
    of = "((name) => it.querySelector(`[data-name='${name}']`).textContent)"
    spoken = f"{of}('Mode') !== 'chat' && /[a-z]{{4}}/.test({of}('First words'))"
    picked = f"[...document.querySelectorAll('tbody tr')].filter((it) => {spoken}).slice(0, 2)"
    console.tab.until(f"{picked}.length === 2")
    console.tab.run(f"{picked}.map((it) => it.querySelector('.pick input').click())")
    console.tab.until("button('Compare') !== undefined", setup=BUTTON)
    console.press("Compare")
    console.wait_for("[aria-label=Compare] h2", "They part at ")
    sounds = "[...document.querySelectorAll('.sides audio')].map((it) => it.duration > 0)"
    console.tab.until(f"{sounds}.join() === 'true,true'")
    assert console.tab.run("document.querySelectorAll('.sides .captions li').length") >= 2
    assert console.tab.barriers() == []
    console.tab.resize(390, 800)
    assert console.tab.run("document.documentElement.scrollWidth") <= 390
    console.tab.resize(1400, 900)
    link = console.tab.run("document.querySelector('.sides a').getAttribute('href')")
    page = request(console.server.address, link, headers={})
    assert (page.status, b'"compared":{"name":' in page.body) == (200, True)
    console.tab.run("location.hash = '#recordings'")
    console.tab.until(f"{words} !== undefined")
    console.tab.run(
        "s = document.querySelector('[placeholder=\"in what was said\"]');"
        f"s.value = '{wanted.swapcase()}'; s.dispatchEvent(new Event('input'))"
    )
    console.tab.until(
        "/searched, [0-9]+ shown/.test(document.querySelector('div.under').innerText)"
    )
    assert all(wanted.lower() in text.lower() for text in console.tab.run(texts))
    found = console.tab.run(f"document.querySelector(\"{cell} a\").getAttribute('href')")
    assert re.fullmatch(r"/api/recordings/[^/]+/view#t=[\d.]+", found)


def test_a_redacted_copy_is_shared(console: Console, tmp_path: Path) -> None:
    """Somebody would be sent what a conversation was about, for want of a way to leave it out."""
    into = {"behavior": "allow", "downloadPath": str(tmp_path)}
    console.tab.call("Browser.setDownloadBehavior", **into)
    console.open("Recordings")
    console.press("⋯")
    console.press("Share a redacted copy")
    console.tab.run("document.querySelector('dialog[open] input[value=prompt]').click()")
    assert console.tab.barriers() == []
    console.press("Save the log")
    console.wait_for("dialog[open] .notice", "The copy is saved.")
    console.tab.key("Escape", code="Escape", windowsVirtualKeyCode=27)
    console.tab.until("!document.querySelector('dialog[aria-labelledby=dialog-title]')")
    until_s = time.monotonic() + WAIT_S
    while not (saved := [*tmp_path.glob("*.redacted.session.zst")]):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    with LogReader(saved[0]) as reader:
        (how,) = reader.head.fields["redacted"]
    assert "audio" in how["kinds"]
    assert "prompt" not in how["kinds"]


def test_an_operator_sees_the_queue_and_cancels_a_place(console: Console) -> None:
    """Who waits is shown, and a place is taken away by a click."""
    url = f"{console.server.url}?mode=audio"
    with connect(url, compression=None) as first, connect(url, compression=None) as second:
        begin(first)
        second.send(init_frame())
        console.open("Server")
        console.wait_for("section[aria-label=Sessions]", "active")
        console.wait_for("section[aria-label=Queue]", "audio")
        console.press("Cancel")
        console.wait_for("section[aria-label=Queue]", "None now.")
        graphs = "[...document.querySelectorAll('.plot')].map((it) => it.ariaLabel).join()"
        console.tab.until(f"/Waiting: 0 now, at most 1 in the last 2 minutes/.test({graphs})")
    assert console.tab.run("[...document.querySelectorAll('.tiles dt')].length") > 5


def test_an_admin_drains(tab: Tab, tmp_path: Path) -> None:
    """An operator without a shell could not take a server out of service."""
    options = ("--record", str(tmp_path), "--drain-s", "600")
    with live_server(*options) as server, connect(f"{server.url}?mode=audio") as session:
        session.send(init_frame(notices=True))
        console = Console(tab, server)
        console.open("Server")
        console.wait_for("section[aria-label=Sessions]", "active")
        console.press("Drain the server…")
        assert "have 600 s to finish" in console.text("dialog[open]")
        assert tab.barriers() == []
        console.press("Cancel")
        console.press("Drain the server…")
        console.press("Drain and end it")
        told = {"type": "session.going_away", "seconds_left": 600}
        while json.loads(session.recv(timeout=WAIT_S)) != told:
            pass
        tab.until("button('Drain the server…').disabled", setup=BUTTON)
        again = request(server.address, "/api/drain", method="POST", headers={})
        assert (again.status, again.said["message"]) == (409, "the server is already draining")
        server.process.send_signal(signal.SIGTERM)  # as the second one would
        assert json.loads(session.recv(timeout=WAIT_S))["reason"] == "server_shutdown"
        assert server.process.wait(WAIT_S) == 0
        assert "drain over HTTP: 1 sessions have 600 s to finish" in server.errors.read_text()
        tab.open("about:blank")


@pytest.mark.costly
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_has_names(console: Console, page: str) -> None:
    """Nothing is wider than the window, and all can be used by keyboard and screen reader."""
    console.open(page)
    for width in WIDTHS:
        console.tab.resize(width, 800)
        assert console.tab.run("document.documentElement.scrollWidth") <= width, width
    console.tab.resize(1400, 900)
    assert console.tab.barriers() == []
    assert console.tab.beyond_tab() == []
    nodes = console.tab.call("Accessibility.getFullAXTree")["nodes"]
    nameless = [node for node in nodes if is_usable(node) and not node["name"].get("value")]
    assert nameless == []


def is_usable(node: dict[str, Any]) -> bool:
    """Whether a user can do something with a node."""
    named = {"button", "link", "textbox", "checkbox", "combobox", "slider", "spinbutton"}
    role = node.get("role", {}).get("value", "")
    return not node.get("ignored") and role in {*named, "searchbox"}


# -- a page of one's own --------------------------------------------------------------------------


def test_the_page_of_the_guide_talks(tab: Tab, tmp_path: Path) -> None:
    """A reader copies it into a folder, opens it, and it does nothing."""
    (page,) = re.findall(r"```html\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "index.html").write_text(page)
    with live_server("--no-record", "--static", str(tmp_path)) as server:
        console = Console(tab, server)
        tab.logged.clear()
        tab.open(f"{console.base}/")
        tab.run("document.querySelector('#talk').click()")
        console.wait_for("#caption", "this is second")
        tab.open("about:blank")
    assert [line for line in tab.logged if "favicon" not in line and "404" not in line] == []


# -- what goes wrong ------------------------------------------------------------------------------


def test_a_server_that_is_lost_and_comes_back(tab: Tab, tmp_path: Path) -> None:
    """The page says so, and the conversation goes on with the server that takes it up."""
    options = ("--record", str(tmp_path), "--resumable")
    with live_server(*options) as first:
        console = Console(tab, first)
        console.open()
        console.press("Start talking")
        console.wait_for(".legend", "listened 2")
        first.kill()
        console.wait_until("reconnecting")
        console.tab.until("!document.querySelector('#banner').hidden")
        console.wait_for("#server .pill", "no answer")  # and not `ready`, in green
        console.tab.run("location.hash = '#recordings'")
        console.wait_for("[aria-label=Recordings] .notice", "does not answer")
        assert "no such recordings" not in console.text("main")
        console.tab.run("location.hash = '#talk'")
    with live_server(*options, "--port", str(first.address[1])):
        console.tab.until("document.querySelector('.talk').dataset.state !== 'reconnecting'")
        console.tab.until("document.querySelector('#banner').hidden")
        heard = int(console.text(".sign.listen").removeprefix("listened "))
        console.wait_for(".captions", "this is second")
        assert heard >= 2
        console.press("Stop")
        console.wait_until("ended")
        assert console.tab.run("document.querySelector('.notice').hidden")


def test_a_key_is_asked_for(tab: Tab, tmp_path: Path) -> None:
    """A wrong key is told to be wrong, and with the right one all works, the WebSocket too."""
    path = tmp_path / "keys.toml"
    anna = Key(name="anna", hash=hash_key(KEY))
    change_key_file(path, lambda _: (anna,), create=True)
    with live_server("--no-record", "--keys", str(path)) as server:
        console = Console(tab, server)
        tab.open(console.base)
        tab.until("document.querySelector('dialog').open")
        for wrong, said in (("no key", "has only letters"), ("antiphon_wrong", "does not know")):
            tab.run(f"document.querySelector('#key').value = '{wrong}'")
            console.press("Continue")
            console.wait_for("#key-problem", said)
        tab.run(f"document.querySelector('#key').value = '{KEY}'")
        console.press("Continue")
        tab.until("!document.querySelector('dialog').open")
        console.wait_for("#server", "anna: sign out")
        names = tab.run("[...document.querySelectorAll('#nav a')].map((it) => it.textContent)")
        assert names == ["Talk", "Chat", "Transcribe"]  # nothing is recorded, and she is no admin
        console.press("Start talking")
        console.wait_for(".legend", "listened 1")
        console.press("Stop")
        console.wait_until("ended")
        console.press("anna: sign out")
        tab.until("document.querySelector('dialog')?.open ?? false")
