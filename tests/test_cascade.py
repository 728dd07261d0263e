"""The example that gives a voice to any language model: it hears, asks, speaks and is cut."""

from __future__ import annotations

import base64
import importlib
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import pytest
import soundfile

import antiphon as client
from protocol.values.model import (
    INPUT_RATE_HZ,
    UNIT_SAMPLES,
    Cut,
    DuplexConfig,
    Opening,
    Span,
    Tool,
    Unit,
    UnitInput,
    UnitResult,
    Voice,
)
from recorder.format.format import recording_id_of
from recorder.storage.store import Store
from replay.assess.run import word_errors, words_of
from runtime import RUN
from runtime.media.sound import decode_voice
from runtime.media.voices import VoiceLibrary
from runtime.model.models import ModelUnusableError, load_backend
from tests.bench.moonshine import RATES, SENTENCES, VOICES, rendered
from tests.browser.chromium import CHROMIUM, FAKE_DEVICES, chromium
from tests.live.servers import live_server
from tests.live.test_console import Console, sent
from tests.test_examples import EXAMPLES, QUESTION, ROOT, SPEECH, antiphon, install

pytest.importorskip("moonshine_voice")
CASCADE: Final = EXAMPLES / "cascade"
QUIET: Final = bytes(4 * UNIT_SAMPLES)
CLAUSE_S: Final = 1.5
"""How long the voice of these tests takes for a clause."""
CLOCK: Final = Tool(
    name="clock", description="Tells the time.", parameters='{"type": "object", "properties": {}}'
)
CALLED: Final = (
    {"content": "One moment. "},
    {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "clock", "arguments": ""}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '{"zone":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": ' "here"}'}}]},
)
"""An answer that calls, as an endpoint streams it."""


@pytest.fixture
def cascade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, installed, with a voice that every machine has."""
    install(tmp_path, "cascade:load", CASCADE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module: Any = importlib.reload(importlib.import_module("cascade"))
    pcm = np.full(round(24_000 * CLAUSE_S), 0.1, "<f4").tobytes()
    monkeypatch.setattr(module, "VOICES", {"tone": lambda: {"tone": lambda _: pcm}})
    monkeypatch.setattr(module, "WAIT_S", 20.0)  # as long as a busy machine takes
    return module


@attrs.define
class Asked:
    """What an endpoint was asked, and how it answers."""

    url: str
    pieces: tuple[str, ...]
    status: int = 200
    first: Sequence[Any] = ()
    times: int = 1
    is_asked: threading.Event = attrs.Factory(threading.Event)
    may_answer: threading.Event = attrs.Factory(threading.Event)
    questions: list[list[dict[str, Any]]] = attrs.Factory(list)
    tools: list[Any] = attrs.Factory(list)


@contextmanager
def endpoint(*pieces: str, status: int = 200, first: Sequence[Any] = ()) -> Iterator[Asked]:
    """Serve a chat endpoint like OpenAI's, which streams these pieces, but `first` at first."""
    asked = Asked(url="", pieces=pieces, status=status, first=first)
    asked.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "stub"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "stub"
            asked.questions.append(body["messages"])
            asked.tools.append(body.get("tools"))
            asked.is_asked.set()
            asked.may_answer.wait()
            deltas = [{"content": it} for it in asked.pieces]
            if len(asked.questions) <= asked.times:
                deltas = [*asked.first] or deltas
            chunks = [{"choices": [{"delta": it}]} for it in deltas]
            lines = [f"data: {json.dumps(it)}\n\n" for it in chunks]
            self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), asked.status)

        def _send(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    asked.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def question() -> list[bytes]:
    """Half a second of quiet, "what time is it", and the quiet after it, second by second."""
    sound, _ = soundfile.read(QUESTION, dtype="float32")
    sound = np.pad(sound, (8000, 12_000))
    sound = np.pad(sound, (0, -len(sound) % UNIT_SAMPLES)).astype("<f4")
    return [it.tobytes() for it in sound.reshape(-1, UNIT_SAMPLES)]


def opening(*tools: Tool) -> Opening:
    """The opening of these sessions."""
    return Opening(
        instructions="Be kind.", voice=Voice(), config=DuplexConfig(), seed=1, tools=tools
    )


@attrs.define
class Clock:
    """A client's tool: what it returns, and after how many seconds; its calls.

    Of calls of one second, each takes a second more than the one before.
    """

    returns: str = "nine"
    after: int = 1
    calls: list[Span] = attrs.Factory(list)
    inputs: dict[int, list[UnitInput]] = attrs.Factory(dict)

    def take(self, silent: Any, index: int) -> None:
        """Let the units after a call have what a session tells the model."""
        for place, span in enumerate(() if silent is None else silent.spans):
            self.calls.append(span)
            name = f"t{len(self.calls)}"
            started = UnitInput(kind="started", call=name)
            self.inputs.setdefault(index + 1, []).append(started)
            result = UnitInput(kind="result", call=name, text=span.fault or self.returns)
            self.inputs.setdefault(index + self.after + place, []).append(result)


def converse(
    name: str, seconds: list[bytes], cut: int | None = None, clock: Clock | None = None
) -> list[UnitResult]:
    """Have a session hear these seconds; `cut` is the unit that is cut."""
    tool = clock or Clock()

    async def body() -> list[UnitResult]:
        backend: Any = load_backend(name)
        session = await backend.open(opening(CLOCK) if clock else opening(), slot=0)
        found = []
        for index, pcm in enumerate(seconds):
            where = Cut(stage="llm", step=0) if index == cut else None
            unit = Unit(index=index, pcm=pcm, inputs=tuple(tool.inputs.get(index, ())))
            found.append(await session.run(unit, where))
            done = await session.finalize(index, interrupted=index == cut)
            tool.take(done.silent, index)
        await session.release()
        await backend.aclose()
        return found

    return anyio.run(body, backend="trio")


def told(results: list[UnitResult]) -> str:
    """What was said."""
    return "".join(it.text for it in results).strip()


def test_what_the_user_said_is_asked_and_the_answer_spoken(cascade: Any) -> None:
    """It would not be a voice of that model."""
    first, second = "It is a quarter past noon,", "as far as I can tell."
    with endpoint(first[:9], first[9:] + " ", second) as asked:
        found = converse(f"backend:cascade:llm={asked.url}", [*question(), *[QUIET] * 5])
    (messages,) = asked.questions
    assert messages[0]["role"] == "system"
    assert messages[0]["content"].startswith("Be kind.")
    assert messages[1:] == [{"role": "user", "content": "What time is it?"}]
    assert told(found) == f"{first} {second}"
    spoken = [it for it in found if not it.is_listen]
    assert [it.end_of_turn for it in spoken] == [False] * (len(spoken) - 1) + [True]
    assert sum(len(it.pcm) for it in spoken) == 4 * 24_000 * 2 * CLAUSE_S
    assert found.index(spoken[0]) <= len(question()) - 1, "it begins as soon as the user ended"


def test_the_users_speech_cuts_the_answer(cascade: Any) -> None:
    """It would talk on over its user, and its model believe that all was heard."""
    long = tuple(f"This is the clause number {n}. " for n in range(20))
    with endpoint(*long) as asked:
        seconds = [*question(), QUIET, QUIET, *question(), QUIET]
        converse(f"backend:cascade:llm={asked.url}", seconds)
    _, again = asked.questions
    assert [it["role"] for it in again] == ["system", "user", "assistant", "user"]
    kept = again[2]["content"].strip()
    assert "".join(long).startswith(kept)
    assert 0 < len(kept) < len("".join(long)) / 2


def test_the_user_is_heard_while_the_endpoint_is_slow(
    cascade: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds of an interruption would wait behind the answer, and be dropped."""
    monkeypatch.setattr(cascade, "WAIT_S", 0.01)

    async def body(asked: Asked) -> None:
        backend: Any = load_backend(f"backend:cascade:llm={asked.url}")
        session = await backend.open(opening(), slot=0)
        asked.may_answer.clear()
        for _ in range(2):
            for index, pcm in enumerate(question()):
                assert (await session.run(Unit(index=index, pcm=pcm))).is_listen
                await session.finalize(index, interrupted=False)
            assert await anyio.to_thread.run_sync(asked.is_asked.wait, 60)
            asked.is_asked.clear()
        asked.may_answer.set()
        await session.release()
        await backend.aclose()

    with endpoint("At last.") as asked:
        anyio.run(body, asked, backend="trio")
    assert [it["role"] for it in asked.questions[1]] == ["system", "user", "user"]


def test_an_endpoint_that_fails_is_told_of(cascade: Any) -> None:
    """Its user would wait for an answer, or the session end."""
    with endpoint("no", status=500) as asked:
        found = converse(f"backend:cascade:llm={asked.url}", [*question(), QUIET, QUIET])
    assert told(found) == cascade.NO_ANSWER


def test_without_an_endpoint_the_same_sound_gives_the_same_answer(cascade: Any) -> None:
    """A recording could not be run again; a cut one goes on as it did."""
    seconds = [*question(), QUIET, QUIET, *question(), *[QUIET] * 9]
    first = converse("backend:cascade", seconds)
    assert told(first).startswith("You said: What time is it.")
    assert converse("backend:cascade", seconds) == first
    begins = next(it.index for it in first if not it.is_listen)
    cut = converse("backend:cascade", seconds, cut=begins)
    assert cut[begins].is_listen
    assert not any(it.text for it in cut[begins : begins + 2])
    assert "That was question 2" in told(cut)


# -- tools -----------------------------------------------------------------------------------------


def test_a_call_has_its_result_and_then_a_spoken_answer(cascade: Any) -> None:
    """The endpoint is asked again with what the tool returned, in OpenAI's format."""
    clock = Clock()
    with endpoint("It is nine o'clock.", first=CALLED) as asked:
        name = f"backend:cascade:llm={asked.url}"
        found = converse(name, [*question(), *[QUIET] * 6], clock=clock)
    assert [(it.name, it.arguments) for it in clock.calls] == [("clock", '{"zone": "here"}')]
    _, again = asked.questions
    spoken, call, result = again[2:]
    assert spoken == {"role": "assistant", "content": "One moment. "}
    assert call["tool_calls"] == [
        {
            "id": "t1",
            "type": "function",
            "function": {"name": "clock", "arguments": '{"zone": "here"}'},
        }
    ]
    assert result == {"role": "tool", "tool_call_id": "t1", "content": "nine"}
    schema = {"type": "object", "properties": {}}
    function = {"name": "clock", "description": "Tells the time.", "parameters": schema}
    assert asked.tools == [[{"type": "function", "function": function}]] * 2
    assert told(found) == "One moment. It is nine o'clock."


@pytest.mark.parametrize(
    ("name", "arguments", "returns"),
    [
        ("clock", "{}", "error: the clock stands still"),
        ("clock", "{", "the call is not JSON"),
        ("clocks", "{}", "there is no tool of this name"),
    ],
)
def test_an_error_is_a_result(cascade: Any, name: str, arguments: str, returns: str) -> None:
    """The endpoint reads why, and answers; what it has called remains readable for it."""
    clock = Clock(returns=returns)
    function = {"name": name, "arguments": arguments}
    first = [{"tool_calls": [{"index": 0, "id": "a", "function": function}]}]
    with endpoint("I cannot see it.", first=first) as asked:
        model = f"backend:cascade:llm={asked.url}"
        found = converse(model, [*question(), *[QUIET] * 4], clock=clock)
    _, again = asked.questions
    assert again[-1]["content"] == returns
    assert json.loads(again[-2]["tool_calls"][0]["function"]["arguments"]) == {}
    assert told(found) == "I cannot see it."


def test_speech_while_a_call_waits_is_answered_and_the_result_then(cascade: Any) -> None:
    """A slow tool costs the conversation nothing."""
    seconds = [*question(), QUIET, *question(), *[QUIET] * 6]
    clock = Clock(after=len(question()) + 4)
    with endpoint("Here I am.", first=CALLED) as asked:
        found = converse(f"backend:cascade:llm={asked.url}", seconds, clock=clock)
    _, amid, after = asked.questions
    assert [it["role"] for it in amid[2:]] == ["assistant", "assistant", "tool", "user"]
    assert amid[-2]["content"] == "no result yet"
    roles = ["assistant", "user", "assistant", "assistant", "tool"]
    assert [it["role"] for it in after[2:]] == roles
    assert after[-1]["content"] == "nine"
    assert told(found).endswith("Here I am. Here I am.")


def test_an_interrupt_drops_a_call_that_is_written_and_keeps_one_that_is_made(cascade: Any) -> None:
    """A call would be made of half an answer, or its result never be spoken."""

    async def body(asked: Asked) -> Any:
        backend: Any = load_backend(f"backend:cascade:llm={asked.url}")
        session = await backend.open(opening(CLOCK), slot=0)
        asked.may_answer.clear()
        found = []

        async def speak() -> None:
            for index, pcm in enumerate(question()):
                result = await session.run(Unit(index=index, pcm=pcm))
                done = await session.finalize(index, interrupted=result.cut is not None)
                found.append((result.cut and result.cut.stage, done.silent.spans))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(speak)
            await anyio.to_thread.run_sync(asked.is_asked.wait)
            session.interrupt(len(found))
        asked.may_answer.set()
        await session.release()
        await backend.aclose()
        return found

    with endpoint("no", first=CALLED) as asked:
        found = anyio.run(body, asked, backend="trio")
    assert ("llm", ()) in found
    assert not any(spans for _, spans in found)
    seconds, cut_at = [*question(), *[QUIET] * 6], None
    for _ in range(2):
        clock = Clock(after=3)
        with endpoint("It is nine o'clock.", first=CALLED) as asked:
            results = converse(f"backend:cascade:llm={asked.url}", seconds, cut_at, clock)
        assert len(clock.calls) == 1
        assert told(results) == "One moment. It is nine o'clock."
        cut_at = min(clock.inputs)  # the second after the call


@pytest.mark.parametrize("second", [0, 1])
def test_two_calls_are_answered_together(cascade: Any, second: int) -> None:
    """The answer would lack what is still to come; some endpoints number each call 0."""
    function = {"name": "clock", "arguments": "{}"}
    calls = [
        {"index": it, "id": f"id{at}", "function": function} for at, it in ((0, 0), (1, second))
    ]
    clock = Clock()
    with endpoint("It is nine.", first=[{"tool_calls": [it]} for it in calls]) as asked:
        name = f"backend:cascade:llm={asked.url}"
        found = converse(name, [*question(), *[QUIET] * 5], clock=clock)
    assert [it.arguments for it in clock.calls] == ["{}", "{}"]
    _, again = asked.questions
    names = [it["tool_call_id"] for it in again if it["role"] == "tool"]
    assert (names, again[-1]["content"], again[-3]["content"]) == (["t1", "t2"], "nine", "nine")
    assert told(found) == "It is nine."


def test_an_event_is_answered(cascade: Any) -> None:
    """Without a word of the user, the endpoint would never learn of it."""
    bell = Clock(inputs={1: [UnitInput(kind="text", text="The bell rang.")]})
    with endpoint("Who is there?") as asked:
        found = converse(f"backend:cascade:llm={asked.url}", [QUIET] * 4, clock=bell)
    assert asked.questions[0][1:] == [{"role": "user", "content": "The bell rang."}]
    assert told(found) == "Who is there?"


def test_an_endpoint_that_only_calls_is_asked_without_tools(
    cascade: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would call in circles; a result without its call is not sent to it."""
    monkeypatch.setattr(cascade, "MESSAGES_MAX", 3)
    function = {"name": "clock", "arguments": "{}"}
    calling = [{"tool_calls": [{"index": 0, "id": "a", "function": function}]}]
    with endpoint(first=calling) as asked:
        asked.times = 20
        name = f"backend:cascade:llm={asked.url}"
        converse(name, [*question(), *[QUIET] * 12], clock=Clock())
    assert all(asked.tools[: cascade.QUESTIONS_MAX])
    assert set(map(str, asked.tools[cascade.QUESTIONS_MAX :])) == {"None"}
    assert [it["role"] for it in asked.questions[3][1:]] == ["assistant", "tool"]


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="it speaks by espeak-ng here")
def test_a_client_s_function_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way: sound, endpoint, client, endpoint, sound; without an endpoint, no calls."""
    install(tmp_path, "cascade:load", CASCADE)
    words = (*RUN[:-2], "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {RUN[-1]}")
    logs = tmp_path / "logs"

    async def talk(url: str) -> tuple[str, str]:
        heard = ""

        def clock(zone: str = "") -> str:
            return f"nine {zone}"

        async with client.connect(url, mode="audio", tools={"clock": clock}) as session:
            for pcm in [*[QUIET] * 3, *question(), *[QUIET] * 5]:
                await session.append(pcm)
                async for event in session:
                    heard += event.text if isinstance(event, client.Speech) else ""
                    if isinstance(event, client.Listen | client.Speech):
                        break
            return str(session.created.tools), heard

    done = []
    with endpoint("It is nine o'clock.", first=CALLED) as asked:
        for name in (f"voice=espeak,llm={asked.url}", "voice=espeak"):
            options = ("--record", str(logs))
            model = f"backend:cascade:{name}"
            with live_server(*options, model=model, run=words) as server:
                done.append(anyio.run(talk, server.url.removesuffix("/v1/realtime")))
    assert done[0] == ("called", "One moment. It is nine o'clock. ")
    assert done[1][0] == "not_called"
    assert asked.questions[1][-1]["content"] == "nine here"
    replayed = antiphon("replay", str(logs), folder=tmp_path)
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr


# -- the voices ------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="it speaks by espeak-ng here")
def test_reference_audio_chooses_the_voice(cascade: Any, tmp_path: Path) -> None:
    """One's own voice would change nothing, or a sample speak with another voice than it has."""
    cascade.VOICES["tone"] = cascade.espeak
    cascade.write_samples(tmp_path / "voices")
    library = VoiceLibrary(tmp_path / "voices")
    assert [*library.sizes()] == sorted(cascade.ESPEAK)
    backend: Any = load_backend("backend:cascade")
    assert backend.info.voices == tuple(cascade.ESPEAK)
    for name in cascade.ESPEAK:
        assert backend._speaker(decode_voice(library.read(name))) is backend._voices[name]
    high = np.sign(np.sin(2 * np.pi * 220 * np.arange(2 * INPUT_RATE_HZ) / INPUT_RATE_HZ))
    assert cascade.pitch_hz(high.astype("<f4").tobytes()) == pytest.approx(220, rel=0.02)
    assert backend._speaker(high.astype("<f4").tobytes()) is backend._voices["us-high"]
    assert backend._speaker(b"") is backend._voices["us"]
    anyio.run(backend.aclose, backend="trio")


# -- the options, and replay -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("lm=x", "lm: the options are llm, model, voice"),
        ("voice=bass", "voice=bass: the voices are tone"),
    ],
)
def test_what_is_mistyped_is_named(cascade: Any, argument: str, says: str) -> None:
    """It would be ignored, and another model speak."""
    with pytest.raises(ModelUnusableError, match=says):
        load_backend(f"backend:cascade:{argument}")


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="it speaks by espeak-ng here")
def test_a_served_conversation_replays_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of the small answerer is run again, byte for byte; that of an endpoint is not."""
    install(tmp_path, "cascade:load", CASCADE)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    words = (*RUN[:-2], "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {RUN[-1]}")
    done = {}
    with endpoint("That is for you to say.") as asked:
        for name in ("voice=espeak", f"voice=espeak,llm={asked.url}"):
            logs = tmp_path / f"logs{len(done)}"
            model = f"backend:cascade:{name}"
            with live_server("--record", str(logs), model=model, run=words) as server:
                url = server.url.removesuffix("/v1/realtime")
                talk = antiphon("talk", str(SPEECH), "--url", url, "--fast", folder=tmp_path)
            assert talk.returncode == 0, talk.stderr
            (log,) = Store(logs).logs()
            again = ("replay", "--full", str(log.path))
            done[name] = antiphon(*again, folder=tmp_path, PYTHONPATH=path)
    alone, asking = done.values()
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert asking.returncode == 3, asking.stdout + asking.stderr
    assert "deterministic" in asking.stdout + asking.stderr


# -- in a browser ----------------------------------------------------------------------------------


UNSEEN: Final = (SENTENCES[3], SENTENCES[4], SENTENCES[8])


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")
def test_a_conversation_through_the_console(tmp_path: Path) -> None:
    """Three sentences that nothing was trained on are answered; the third cuts an answer."""
    install(tmp_path, "cascade:load", CASCADE)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    words = (*RUN[:-2], "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {RUN[-1]}")
    parts = [np.zeros(2 * INPUT_RATE_HZ, "<f4")]
    for sentence, pause_s in zip(UNSEEN, (9, 2.2, 12), strict=True):
        sound = rendered(sentence, VOICES[0], RATES[0])
        parts += [sound, np.zeros(int(pause_s * INPUT_RATE_HZ), "<f4")]
    microphone, logs = tmp_path / "microphone.wav", tmp_path / "logs"
    soundfile.write(microphone, np.concatenate(parts), INPUT_RATE_HZ, subtype="PCM_16")
    flags = (*FAKE_DEVICES, f"--use-file-for-fake-audio-capture={microphone}%noloop")
    options = ("--record", str(logs), "--transcriber", "moonshine")
    with (
        live_server(*options, model="backend:cascade:voice=espeak", run=words) as server,
        chromium(tmp_path / "browser", *flags) as tab,
    ):
        tab.resize(1400, 900)
        console = Console(tab, server)
        console.open()
        console.press("Start talking")
        console.wait_for(".captions", "That was question 1")
        console.wait_for(".captions", "That was question 3")
        tab.screenshot(tmp_path / "console.png")
        texts = "[...document.querySelectorAll('.captions .%s .said')].map((it) => it.textContent)"
        written, answers = (tab.run(texts % voice) for voice in ("user", "model"))
        console.press("Stop")
        console.wait_until("ended")
    assert [("interrupted" in it, "That was" in it) for it in answers] == [
        *((False, True), (True, False), (False, True))
    ]
    answers = [it.removeprefix("You said: ").partition("That was")[0] for it in answers]
    for found in (written, answers):
        errors = sum(
            word_errors(words_of(said), words_of(it.removesuffix("interrupted")))
            for said, it in zip(UNSEEN, found, strict=False)
        )
        assert (len(found), errors <= 7) == (3, True), found  # of 23 words, in a busy browser
    (log,) = Store(logs).logs()
    again = antiphon("replay", "--full", str(log.path), folder=tmp_path, PYTHONPATH=path)
    assert again.returncode == 0, again.stdout + again.stderr


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")
def test_the_console_offers_the_voices_that_there_are(cascade: Any, tmp_path: Path) -> None:
    """Its user would wait for a voice that no cascade has, and know none of those that it has."""
    words = (*RUN[:-2], "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {RUN[-1]}")
    voices, logs = tmp_path / "voices", tmp_path / "logs"
    cascade.VOICES["tone"] = cascade.espeak
    cascade.write_samples(voices)
    flags = (*FAKE_DEVICES, f"--use-file-for-fake-audio-capture={voices / 'us-high.wav'}")
    options = ("--record", str(logs), "--voices", str(voices))
    with (
        live_server(*options, model="backend:cascade:voice=espeak", run=words) as server,
        chromium(tmp_path / "browser", *flags) as tab,
    ):
        tab.resize(1400, 900)
        console = Console(tab, server)
        for voice in ("library:us-low", "record"):
            console.open()
            console.wait_for(".setup", "copies no voice: of its own (us, us-low, us-high)")
            tab.until("document.querySelector('.setup option[value=\"library:us-low\"]') !== null")
            tab.run(
                "s = document.querySelector('.setup option[value=record]').parentElement;"
                f"s.value = '{voice}'; s.dispatchEvent(new Event('change'))"
            )
            if voice == "record":
                console.press("Record")
                console.wait_for(".own-voice [role=timer]", "6 s left")
                console.press("Stop")
                console.wait_for(".own-voice [role=status]", "s are recorded.")
                tab.screenshot(tmp_path / "own-voice.png")
            console.press("Start talking")
            console.wait_until("listening")
            console.press("Stop")
            console.wait_until("ended")
    asked = [
        sent(logs, recording_id_of(it.path))[0]["payload"]["voice"] for it in Store(logs).logs()
    ]
    assert {"ref_audio_path": "us-low"} in asked
    (own,) = (it["ref_audio_base64"] for it in asked if "ref_audio_base64" in it)
    backend: Any = load_backend("backend:cascade")
    assert backend._speaker(decode_voice(base64.b64decode(own))) is backend._voices["us-high"]
    anyio.run(backend.aclose, backend="trio")
