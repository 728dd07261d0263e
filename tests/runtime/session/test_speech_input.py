"""What hears users in addition to the model: a detector, which a session waits for, and words."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import Mode
from protocol.values.model import UNIT_SAMPLES, Unit
from recorder.format.format import SUFFIX
from recorder.read.reader import read
from replay.rerun.logic import replay
from runtime.media.speech_detector import EnergyClassifier, SpeechDetector
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.backends.scripted_chat import Transcribed
from runtime.session import driver
from runtime.session.speech_input import (
    SECONDS_WAITING_MAX,
    UTTERANCE_S_MAX,
    SpeechInput,
    Transcriber,
    TranscriptWriter,
)
from tests.golden.openai import say
from tests.golden.stage import brief
from tests.sessions.in_memory import Peer, base64, on_virtual_time, world

QUIET = np.zeros(UNIT_SAMPLES, "<f4").tobytes()
SYLLABLES = np.arange(UNIT_SAMPLES) % 4000 > 800
LOUD = (0.1 * np.sin(np.arange(UNIT_SAMPLES)) * SYLLABLES).astype("<f4").tobytes()


@attrs.define
class Inbox:
    """What a writer posts."""

    events: list[ev.Event] = attrs.Factory(list)

    def now_ns(self) -> int:
        return int(anyio.current_time() * 1e9)

    def post(self, event: ev.Event) -> None:
        self.events.append(event)

    step_or_post = post

    def past(self) -> Any:
        raise AssertionError("a writer needs no past")

    @property
    def said(self) -> list[tuple[str, int, bool]]:
        """What was written down: words without their numbers, where, and whether they end."""
        found = [it for it in self.events if isinstance(it, ev.UserTranscribed)]
        return [(it.text.partition("-")[0] and "word", it.start_ms, it.is_last) for it in found]


def units(*seconds: bytes, first: int = 0) -> Iterator[ef.Effect]:
    """Seconds as a session's model gets them."""
    for index, pcm in enumerate(seconds, first):
        yield ef.StartUnit(unit=Unit(index=index, pcm=pcm))


def write(
    *effects: ef.Effect,
    backend: ScriptedBackend | None = None,
    dropped: int = 0,
    together: bool = False,
) -> tuple[Inbox, ScriptedBackend]:
    """Have a session's effects written down, a second each; or all at once."""
    inbox, model = Inbox(), backend or ScriptedBackend()

    async def body() -> None:
        writer = TranscriptWriter(Transcriber(model), 7, inbox, dropped)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            for effect in effects:
                writer.saw(effect)
                if not together:
                    await anyio.sleep(1)
            await anyio.sleep(60)
            tasks.cancel_scope.cancel()

    on_virtual_time(body)
    assert model.violations == []
    return inbox, model


def test_an_utterance_is_written_down_with_the_second_before_it() -> None:
    """Its first word would be cut in two, or its end never come."""
    inbox, model = write(*units(QUIET, QUIET, LOUD, LOUD, QUIET, QUIET, LOUD, QUIET))
    assert inbox.said == [
        *[("word", 2000, False), ("word", 3000, False), ("", 4000, True)],
        *[("word", 6000, False), ("", 7000, True)],
    ]
    assert not model.held_slots


def test_silence_is_not_written_down() -> None:
    """Its model would work all the time for nothing, and write what was not said."""
    inbox, _ = write(*units(*[QUIET] * 6))
    assert inbox.events == []


def test_seconds_that_were_dropped_count() -> None:
    """Words would stand where something else was said."""
    dropped = ef.DropUnit(ordinal=1, input_id="", force_listen_passed=False)
    inbox, _ = write(*units(QUIET), dropped, *units(LOUD, QUIET, first=1))
    assert inbox.said == [("word", 2000, False), ("", 3000, True)]


def test_a_unit_that_starts_again_is_heard_once() -> None:
    """A session that lost its worker would have said it twice."""
    again = list(units(QUIET, LOUD))
    inbox, _ = write(*again, again[1], *units(QUIET, first=2))
    assert inbox.said == [("word", 1000, False), ("", 2000, True)]


def test_a_session_that_is_taken_up_goes_on_where_it_was() -> None:
    """Its words would be at its beginning."""
    inbox, _ = write(*units(LOUD, QUIET, first=40), dropped=10)
    assert inbox.said == [("word", 50_000, False), ("", 51_000, True)]


def test_no_second_is_written_down_twice() -> None:
    """Who goes on at once would have said it twice."""
    late = np.zeros(UNIT_SAMPLES, "<f4")
    late[3000:] = np.frombuffer(LOUD, "<f4")[3000:]
    half = np.frombuffer(LOUD, "<f4").copy()
    half[5000:] = 0
    inbox, _ = write(*units(QUIET, LOUD, half.tobytes(), late.tobytes(), LOUD, QUIET, QUIET))
    places = [start_ms for _, start_ms, _ in inbox.said]
    assert places == sorted(set(places))
    assert [is_last for *_, is_last in inbox.said].count(True) == 2


def test_an_utterance_has_a_bound() -> None:
    """It would outgrow the model's context."""
    inbox, _ = write(*units(QUIET, *[LOUD] * (UTTERANCE_S_MAX + 2), QUIET))
    ends = [start_ms for _, start_ms, is_last in inbox.said if is_last]
    assert ends == [(UTTERANCE_S_MAX - 1) * 1000, (UTTERANCE_S_MAX + 3) * 1000]


def test_who_speaks_late_is_written_down() -> None:
    """A session's words would end after its first minutes."""
    inbox, _ = write(*units(*[QUIET] * 200, LOUD, QUIET))
    assert inbox.said == [("word", 200_000, False), ("", 201_000, True)]


def test_what_comes_too_fast_is_left_out() -> None:
    """It would fill the memory."""
    inbox, _ = write(*units(*[LOUD] * 40), together=True)
    assert len(inbox.said) == SECONDS_WAITING_MAX


@pytest.mark.parametrize("fault", ["fail", "gone"])
def test_a_model_that_fails_ends_no_session(fault: Any) -> None:
    """A session would end for its captions."""
    backend = ScriptedBackend(transcription=lambda _: Transcribed(fault=fault))
    inbox, model = write(*units(LOUD, LOUD, QUIET), backend=backend)
    assert inbox.events == []
    assert not model.held_slots


def test_no_slot_is_free() -> None:
    """A session would wait for another's end."""

    async def body() -> None:
        transcriber, inboxes = Transcriber(ScriptedBackend(slots=1)), [Inbox(), Inbox()]
        writers = [TranscriptWriter(transcriber, 1, inbox) for inbox in inboxes]
        async with anyio.create_task_group() as tasks:
            for writer in writers:
                tasks.start_soon(writer.run)
            for effect in units(QUIET, LOUD, QUIET):
                for writer in writers:
                    writer.saw(effect)
                await anyio.sleep(1)
            tasks.cancel_scope.cancel()
        assert sorted(len(inbox.said) for inbox in inboxes) == [0, 2]
        assert transcriber.take() == 0, "the slot is back"

    on_virtual_time(body)


def test_a_model_that_does_not_transcribe_is_refused() -> None:
    """A server would start, and write nothing down."""
    backend = ScriptedBackend()
    backend.info = attrs.evolve(backend.info, modes=("audio",))
    with pytest.raises(ValueError, match="does not transcribe"):
        Transcriber(backend)


# -- a detector that works in a thread -------------------------------------------------------------


class Slow(EnergyClassifier):
    """Judges in a thread, as a trained detector does."""

    is_slow = True


async def after_a_while(work: Callable[[], Any]) -> Any:
    """Answer after the next messages of a client that sends without a pause."""
    await anyio.sleep(0.05)
    return work()


Script = Callable[[Peer], Awaitable[None]]


def answers(script: Script, kind: type[EnergyClassifier], mode: Mode, folder: Path) -> list[Any]:
    """Run a client of OpenAI's protocol; returns what it is sent."""
    found: list[Any] = []
    folder.mkdir()

    async def body() -> None:
        backend = ScriptedBackend(brief)
        async with world(backend, record_to=folder, classify=after_a_while) as server:
            server.server._speech_input = SpeechInput(kind)
            peer = server.connect(mode, endpoint="openai", label="scripted")
            await peer.heard("session.created")
            await script(peer)
            peer.leave(1000)
            await server.quiet()
            found.extend(it for it in peer.events if it["type"] != "rate_limits.updated")  # in time

    on_virtual_time(body)
    (path,) = folder.glob("*" + SUFFIX)
    assert replay(read(path)).identical
    return found


def send(peer: Peer, pieces: bytes, size: int) -> None:
    """Send sound without a pause."""
    for at in range(0, len(pieces), size):
        say(peer, "input_audio_buffer.append", audio=base64(pieces[at : at + size]))


VOICE = np.tile((np.arange(24_000) % 6000 > 1200) * np.tile([9000, -9000], 12_000), 2)
UTTERANCE = VOICE.astype("<i2").tobytes() + bytes(48_000)
"""Two seconds of speech and one of quiet, at 24 kHz."""


async def dictates(peer: Peer) -> None:
    """Two utterances in one moment."""
    send(peer, UTTERANCE * 2, 4800)
    await peer.heard("conversation.item.input_audio_transcription.completed", 2)


async def asks_behind_sound(peer: Peer) -> None:
    """A response is asked for right behind speech."""
    send(peer, UTTERANCE, 4800)
    say(peer, "response.create")
    await peer.heard("response.done")


async def speaks_in_pieces(peer: Peer) -> None:
    """Speech in pieces of 40 ms."""
    send(peer, UTTERANCE, 1920)
    await peer.heard("input_audio_buffer.speech_stopped")


@pytest.mark.parametrize(
    ("script", "mode"),
    [(dictates, "transcription"), (asks_behind_sound, "audio"), (speaks_in_pieces, "audio")],
)
def test_a_session_waits_for_a_slow_detector(script: Script, mode: Mode, tmp_path: Path) -> None:
    """Utterances would be empty, responses cancelled, and the detector begin again amid speech."""
    expected = answers(script, EnergyClassifier, mode, tmp_path / "quick")
    assert answers(script, Slow, mode, tmp_path / "slow") == expected


@attrs.define
class Held:
    """A classifier that answers when it may."""

    is_asked: anyio.Event = attrs.Factory(anyio.Event)
    may_answer: anyio.Event = attrs.Factory(anyio.Event)

    async def classify(self, work: Callable[[], Any]) -> Any:
        self.is_asked.set()
        await self.may_answer.wait()
        return work()


def test_what_waits_for_a_detector_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client would fill the memory while its first piece is judged."""
    monkeypatch.setattr(driver, "INBOX_BYTES_MAX", 50_000)

    async def body() -> None:
        held = Held()
        async with world(classify=held.classify) as server:
            server.server._speech_input = SpeechInput(Slow)
            peer = server.connect("audio", endpoint="openai", label="scripted")
            await peer.heard("session.created")
            send(peer, UTTERANCE * 10, 24_000)  # each too large to be read with the next
            await held.is_asked.wait()
            await anyio.sleep(1)
            (one,) = server.server._drivers
            assert 50_000 < one._events.frame_bytes < 50_000 + 2 * 33_000
            assert len(peer._to_server) > 50
            held.may_answer.set()
            await peer.heard("input_audio_buffer.speech_stopped", 10)
            await anyio.sleep(1)
            assert (one._events.frame_bytes, peer._to_server) == (0, [])
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)


def test_sounds_of_one_step_are_judged_in_order() -> None:
    """A short one would be judged at once, before the long one that came before it."""
    judged: list[int] = []

    class Notes(Slow):
        def classify(self, effect: ef.DetectSpeech) -> list[bool]:
            judged.append(effect.at)
            return super().classify(effect)

    async def body() -> None:
        async with world(classify=after_a_while) as server:
            server.server._speech_input = SpeechInput(Notes)
            peer = server.connect("audio", endpoint="openai", label="scripted")
            await peer.heard("session.created")
            (one,) = server.server._drivers
            for at, length in ((0, 48_000), (24_000, 960)):
                effect = ef.DetectSpeech(
                    at=at,
                    rate_hz=24_000,
                    data=bytes(length),
                    threshold=0.5,
                    silence_ms=500,
                    is_speech=False,
                )
                one._find_speech(effect, 0)
            await anyio.sleep(1)
            peer.leave(1000)
            await server.quiet()

    on_virtual_time(body)
    assert judged == [0, 24_000]


@pytest.mark.parametrize("is_resumable", [False, True])
def test_speech_of_the_last_sound_is_found_before_the_end(
    is_resumable: bool, tmp_path: Path
) -> None:
    """Where the client is lost, or another server takes the session up, it would be missing."""

    async def body() -> None:
        held = Held()
        async with world(record_to=tmp_path, classify=held.classify, resumable=True) as server:
            server.server._speech_input = SpeechInput(Slow)
            peer = server.connect(
                "audio", endpoint="openai", label="scripted", resumable=is_resumable
            )
            await peer.heard("session.created")
            say(peer, "input_audio_buffer.append", audio=base64(UTTERANCE[:48_000]))
            await held.is_asked.wait()
            (one,) = server.server._drivers
            assert not one.is_idle
            one.suspend() if is_resumable else peer.vanish()
            await anyio.sleep(1)
            held.may_answer.set()
            await server.quiet()

    on_virtual_time(body)
    (path,) = tmp_path.glob("*" + SUFFIX)
    kinds = [record.fields.get("type") for record in read(path)]
    assert kinds.count("SpeechStarted") == 1
    assert is_resumable or kinds.index("SpeechStarted") < kinds.index("PeerGone")
    assert replay(read(path)).identical


def test_sessions_share_a_thread_and_nothing_else() -> None:
    """A fault would end the sessions that wait with it, or one get the speech of another."""
    threads, found = set[int](), dict[int, list[int]]()

    class Counts(Slow):
        def classify(self, effect: ef.DetectSpeech) -> list[bool]:
            threads.add(threading.get_ident())
            if effect.rate_hz == 8000:
                raise ZeroDivisionError
            return super().classify(effect)

    async def session(speech_input: SpeechInput, number: int) -> None:
        detector = SpeechDetector(speech_input.make_classifier)
        sound = bytes(4800 * number) + UTTERANCE
        effect = ef.DetectSpeech(
            at=0, rate_hz=24_000, data=sound, threshold=0.5, silence_ms=500, is_speech=False
        )
        events = await speech_input.search(detector, effect, 0)
        assert events == list(SpeechDetector().detect(effect, 0))
        found[number] = [it.at_ms for it in events]
        with pytest.raises(ZeroDivisionError):
            await speech_input.search(detector, attrs.evolve(effect, rate_hz=8000), 0)

    async def body() -> None:
        speech_input = SpeechInput(Counts)
        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(session, speech_input, number)
        assert threading.get_ident() not in threads

    anyio.run(body, backend="trio")
    assert len({*map(tuple, found.values())}) == 8
