"""What hears users in addition to the model: a detector of speech, and a second model.

A trained detector classifies sound in a thread, that of all sessions together. A session's other
events wait for it, so that what it finds follows on the sound. Long sound is classified a second at
a time, in turn with that of other sessions; a single frame is classified at once.

What users say is transcribed by the second model, the transcriber (`UserTranscribed`). A session's
seconds are transcribed as its model gets them, one after the other, on a slot of the transcriber.
An utterance begins with the second before the one in which speech is found, and ends with the one
in which it stops. It is background work: a session never waits for it, and seconds that come faster
than they are transcribed are left out.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import anyio
import attrs

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import MS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from protocol.values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, Chunk
from protocol.wire.audio import to_pcm16

from ..media.speech_detector import EnergyClassifier, FrameClassifier, SpeechDetector, SpeechEvent
from ..model.backends.base import Backend, BackendError, Closes, Transcribes, TranscriptSession
from .model_calls import Inbox

SECONDS_WAITING_MAX: Final = 8
"""Of one session: more is older than what its user remembers."""
UTTERANCE_S_MAX: Final = 30
"""A longer one is cut: it would outgrow the transcriber's context."""

_logger = logging.getLogger("antiphon.transcriber")


@attrs.frozen
class Second:
    """A second of a session's input, with its number: float32 LE, 16 kHz."""

    number: int
    pcm: bytes


class Transcriber:
    """A model that transcribes what users say, for as many sessions as it has slots.

    Attributes:
        name: of the model, as it is told to clients.
    """

    def __init__(self, backend: Backend) -> None:
        """`ValueError` if the model does not transcribe."""
        if not isinstance(backend, Transcribes) or "transcription" not in backend.info.modes:
            raise ValueError(f"model {backend.info.name} does not transcribe")
        self._backend: Final = backend
        self.name: Final = backend.info.name
        self._free = list(range(backend.info.slots))[::-1]

    async def aclose(self) -> None:
        """Free the model."""
        if isinstance(self._backend, Closes):
            await self._backend.aclose()

    def take(self) -> int | None:
        """Take a slot; None while none is free."""
        return self._free.pop() if self._free else None

    async def open(self, slot: int) -> TranscriptSession:
        """Begin on a slot; `BackendError`."""
        return await self._backend.transcribe(slot=slot)

    def release_slot(self, slot: int, *, is_clean: bool) -> None:
        """Take a slot back; one that is not clean is used no more."""
        if is_clean:
            self._free.append(slot)
        else:
            _logger.error("slot %d of the transcriber %s is lost", slot, self.name)


class TranscriptWriter:
    """Transcribes what one session's user says; `run` in a task of the session.

    `dropped` of its seconds were lost on another server.
    """

    def __init__(self, owner: Transcriber, seed: int, inbox: Inbox, dropped: int = 0) -> None:
        self._owner, self._seed, self._inbox = owner, seed, inbox
        self._waiting: deque[Second] = deque(maxlen=SECONDS_WAITING_MAX)
        self._arrived = anyio.Event()
        self._detector: Final = SpeechDetector()
        self._before: Second | None = None
        self._utterance = -1
        self._chunks = 0
        self._dropped = dropped
        self._unit = -1

    def saw(self, effect: ef.Effect) -> None:
        """Take the seconds of a session's input; never blocks."""
        match effect:
            case ef.DropUnit():
                self._dropped += 1
            case ef.StartUnit(unit=unit) if unit.index > self._unit:  # not one that starts again
                self._unit = unit.index
                self._waiting.append(Second(unit.index + self._dropped, unit.pcm))
                self._arrived.set()

    async def run(self) -> None:
        """Write until it is cancelled; a model that fails is given up, and the session goes on."""
        await self._arrived.wait()
        slot, held = self._owner.take(), None
        if slot is None:
            _logger.warning("no slot of the transcriber %s is free", self._owner.name)
            return
        is_clean = True
        try:
            held = await self._owner.open(slot)
            while True:
                await self._arrived.wait()
                self._arrived = anyio.Event()
                while self._waiting:
                    await self._take(held, self._waiting.popleft())
        except BackendError as error:
            is_clean = held is not None
            _logger.warning("the transcriber %s failed: %s", self._owner.name, error)
        finally:
            with anyio.CancelScope(shield=True):
                if held is not None:
                    await held.release()
            self._owner.release_slot(slot, is_clean=is_clean)

    async def _take(self, held: TranscriptSession, second: Second) -> None:
        """Transcribe a second in which the user speaks, with the one before the first."""
        was_speech = self._detector.is_speech
        asked = _asked(second, is_speech=was_speech)
        found = list(self._detector.detect(asked, self._inbox.now_ns()))
        before, self._before = self._before, second
        if not (was_speech or found):
            return
        if self._chunks == 0:
            self._utterance += 1
            if before is not None and before.number == second.number - 1:
                await self._write(held, before, is_last=False)
        is_last = not self._detector.is_speech or self._chunks + 1 >= UTTERANCE_S_MAX
        await self._write(held, second, is_last=is_last)
        if is_last:
            self._chunks, self._before = 0, None  # it was transcribed

    async def _write(self, held: TranscriptSession, second: Second, *, is_last: bool) -> None:
        chunk = Chunk(
            utterance=self._utterance,
            index=self._chunks,
            pcm=second.pcm,
            is_last=is_last,
            seed=self._seed,
        )
        self._chunks += 1
        with anyio.CancelScope(shield=True):  # a slot is released when no call is in progress
            result = await held.run(chunk)
        if result.text or is_last:
            start_ms = second.number * MS_PER_S
            event = ev.UserTranscribed(
                at_ns=self._inbox.now_ns(),
                text=result.text,
                start_ms=start_ms,
                end_ms=start_ms + MS_PER_S,
                is_last=is_last,
            )
            self._inbox.post(event)


def _asked(second: Second, *, is_speech: bool) -> ef.DetectSpeech:
    return ef.DetectSpeech(
        at=second.number * INPUT_RATE_HZ,
        rate_hz=INPUT_RATE_HZ,
        data=to_pcm16(second.pcm),
        threshold=SPEECH_THRESHOLD,
        silence_ms=SPEECH_SILENCE_MS,
        is_speech=is_speech,
    )


async def in_thread(work: Callable[[], object]) -> object:
    """Classify sound off the event loop."""
    return await anyio.to_thread.run_sync(work)


@attrs.define(eq=False)
class Search:
    """A piece of sound that waits to be classified, and then what was found in it."""

    detector: SpeechDetector
    effect: ef.DetectSpeech
    at_ns: int
    found: list[SpeechEvent] | Exception | None = None
    is_due: anyio.Event = attrs.field(factory=anyio.Event)

    def run(self) -> None:
        """Classify it; an exception is its session's."""
        try:
            self.found = list(self.detector.detect(self.effect, self.at_ns))
        except Exception as error:
            self.found = error


@attrs.define(eq=False)
class ClassifierThread:
    """A thread for the slow classifiers of all sessions: the pieces that wait for it go together.

    One session's task brings them there, for a hop of each would cost more than the judging.
    """

    _waiting: list[Search] = attrs.field(factory=list, init=False)
    _is_busy: bool = attrs.field(default=False, init=False)

    async def classify(self, search: Search) -> None:
        """Have a piece classified; cancelled, it is forgotten."""
        self._waiting.append(search)
        try:
            while search.found is None:
                if self._is_busy:
                    await search.is_due.wait()
                    search.is_due = anyio.Event()
                else:
                    await self._judge_all()
        finally:
            if search in self._waiting:
                self._waiting.remove(search)
            if self._waiting and not self._is_busy:
                self._waiting[0].is_due.set()  # its session is next to bring what waits

    async def _judge_all(self) -> None:
        together, self._waiting, self._is_busy = self._waiting, [], True

        def run() -> None:
            for each in together:
                each.run()

        try:
            await in_thread(run)
        finally:
            self._is_busy = False
            self._waiting = [it for it in together if it.found is None] + self._waiting
            for it in together:
                it.is_due.set()


def _seconds(effect: ef.DetectSpeech) -> Iterator[ef.DetectSpeech]:
    """Cut sound into pieces of a second."""
    size = effect.rate_hz * SAMPLE16_BYTES
    for start in range(0, len(effect.data), size):
        data = effect.data[start : start + size]
        yield attrs.evolve(effect, at=effect.at + start // SAMPLE16_BYTES, data=data)


@attrs.frozen
class SpeechInput:
    """What hears a session's user in addition to the model; what it finds comes as events.

    Attributes:
        make_classifier: makes what finds the user's speech.
        transcriber: transcribes what the user says; None: no transcription.
    """

    make_classifier: Callable[[], FrameClassifier] = EnergyClassifier
    transcriber: Transcriber | None = None
    _thread: ClassifierThread = attrs.field(factory=ClassifierThread, init=False)

    async def search(
        self, detector: SpeechDetector, effect: ef.DetectSpeech, at_ns: int
    ) -> list[SpeechEvent]:
        """Search sound in a thread, as `detector` does."""
        found: list[SpeechEvent] = []
        for second in _seconds(effect):
            search = Search(detector, second, at_ns)
            await self._thread.classify(search)
            if isinstance(search.found, Exception):
                raise search.found
            found += search.found or ()
        return found

    def transcript_writer(
        self, opened: ev.ConnectionOpened, inbox: Inbox, dropped: int
    ) -> TranscriptWriter | None:
        """Make a session's writer, if its first event says that it has one."""
        if self.transcriber is None or not opened.limits.transcriber:
            return None
        return TranscriptWriter(self.transcriber, opened.seed, inbox, dropped)


ENERGY_ONLY: Final = SpeechInput()
"""Of a server that was given no other: speech is found by its energy, nothing is transcribed."""
