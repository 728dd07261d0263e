"""What users say is written down by a second model, and no session waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import attrs
import numpy as np
import pytest

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import UNIT_SAMPLES, Unit
from runtime.model.backends.scripted import ScriptedBackend
from runtime.model.backends.scripted_chat import Transcribed
from runtime.session.speech_input import (
    SECONDS_WAITING_MAX,
    UTTERANCE_S_MAX,
    Transcriber,
    TranscriptWriter,
)
from tests.sessions.in_memory import on_virtual_time

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

    bring = post

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
