"""Where the user speaks: as the server found it, else found in the sound.

A server that searches for speech says what it found by the sample count of the client's sound. For
other sessions the energy detector runs here, with the server's settings, on the sound as it came:
it is not resampled. Either count is mapped to the place of the sound on the session's clock. A
server searches sound as it comes, or all of it in whole seconds (`UserSound.first`). Silence that
it put in place of a client's has no place; a position in it is the end of the sound before.

After a gap of `SPEECH_GAP_MS` in the client's sound the detector starts again: a client that sends
nothing does not speak. Memory holds what was found, and the last seconds of sound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, Literal

import attrs

from protocol.values import events as ev
from protocol.values.effects import DetectSpeech
from protocol.values.limits import SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from protocol.values.model import INPUT_RATE_HZ, SAMPLE16_BYTES, SAMPLE_BYTES
from protocol.wire.rates import to_pcm16

from ..media.speech_detector import SpeechDetector
from .conversation import TICK_HZ, TICKS_PER_MS, TICKS_PER_SAMPLE, Span, join
from .limits import SPEECH_GAP_MS
from .placing import Sound, time_of

SpeechSource = Literal["log", "energy"]
SAMPLE: Final = TICKS_PER_SAMPLE["user"]
GAP: Final = SPEECH_GAP_MS * TICKS_PER_MS
KEPT_BACK: Final = 4 * SAMPLE
"""A resampler keeps back fewer samples until more come."""
PIECES_MAX: Final = 4096
"""Pieces whose place is known: each begins after a gap, and speech is found within seconds."""
BATCH: Final = 2000 * TICKS_PER_MS
"""The detector takes 2 s at once: each batch costs some 100 us, however short, where the sessions
have emptied the CPU's caches."""


@attrs.define(kw_only=True)
class UserSound:
    """Sound of the user that came at `at_ns`.

    `begin` and `end` are its place in samples of 16 kHz; `data` is 16-bit LE at `rate_hz`, or
    float32 LE of 16 kHz where that is 0. `first` counts the client's ticks before it, where the
    server searches all of them; else None.
    """

    at_ns: int
    begin: int
    end: int
    data: bytes
    rate_hz: int = 0
    first: int | None = None

    @classmethod
    def of(cls, sound: Sound) -> UserSound:
        """Take sound as a time line has it."""
        return cls(at_ns=sound.at_ns, begin=sound.begin, end=sound.end, data=sound.pcm)


@attrs.define
class _Piece:
    """Sound that lies in one piece by both counts: of the client's own sound, and of the clock."""

    first: int
    begin: int
    ticks: int


class Places:
    """Maps a count of a client's sound, in ticks, to the session's clock."""

    def __init__(self) -> None:
        self._pieces: deque[_Piece] = deque(maxlen=PIECES_MAX)

    def add(self, first: int, begin: int, ticks: int) -> None:
        """Take sound after all sound so far: its count, its place and its length."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.begin + last.ticks == begin:
            shift = first - last.first - last.ticks
            if abs(shift) < KEPT_BACK:
                last.ticks += ticks
                return
        if ticks:
            self._pieces.append(_Piece(first, begin, ticks))

    @property
    def end(self) -> int:
        """Where the last sound ends on the clock."""
        return self._pieces[-1].begin + self._pieces[-1].ticks if self._pieces else 0

    def is_past(self, count: int) -> bool:
        """Whether sound from here on is known, so that the place of all before it is."""
        last = self._pieces[-1] if self._pieces else None
        return last is not None and count < last.first + last.ticks

    def span(self, first: int, end: int) -> Span:
        """Return the place of sound, from `first` until before `end`."""
        return Span(self._at(first), self._at(end - 1) + 1)

    def _at(self, count: int) -> int:
        index = bisect_right(self._pieces, count, key=lambda piece: piece.first) - 1
        if index < 0:
            return self._pieces[0].begin if self._pieces else 0
        piece = self._pieces[index]
        return piece.begin + min(count - piece.first, piece.ticks - 1)


class UserSpeech:
    """Collects where the user speaks, from placed sound in its order, and from the server.

    `lead` is by how much sound came before it could have been spoken, at most, and the time at
    which it came; None without sound.
    """

    def __init__(self) -> None:
        self._energy: Final = _Energy()
        self._places: Final = Places()
        self._searched = deque[tuple[int, int]]()
        self._sounds = deque[tuple[int, int, int]]()
        self._found = deque[tuple[int, int]]()
        self._spans: list[Span] = []
        self._open: int | None = None
        self._silence_ms = SPEECH_SILENCE_MS
        self.source: SpeechSource = "energy"
        self.lead: tuple[int, int] | None = None

    def searched(self, at_ns: int, at: int, rate_hz: int, silence_ms: int | None) -> None:
        """Take an effect `DetectSpeech`."""
        self.source = "log"
        self._silence_ms = self._silence_ms if silence_ms is None else silence_ms
        self._searched.append((at_ns, at * TICK_HZ // rate_hz))

    def found(self, event: ev.SpeechStarted | ev.SpeechStopped) -> None:
        """Take what the server found."""
        self.source = "log"
        if isinstance(event, ev.SpeechStarted):
            self._open = event.at_ms
        elif self._open is not None:
            self._found.append((self._open, event.at_ms - self._silence_ms))
            self._open = None

    def hear(self, sound: UserSound) -> None:
        """Take a sound of the user in its final place."""
        end_ns = time_of("user", sound.end)
        lead_ns = max(0, end_ns - sound.at_ns)
        if sound.end > sound.begin and (self.lead is None or lead_ns > self.lead[1]):
            self.lead = (sound.at_ns, lead_ns)
        if self.source == "energy":
            self._energy.hear(sound, end_ns)
        if sound.first is None:
            self._sounds.append((sound.at_ns, sound.begin, sound.end))
        else:
            self._searched.clear()
            begin = sound.begin * SAMPLE
            self._places.add(sound.first, begin, sound.end * SAMPLE - begin)

    def place(self, now_ns: int | None = None) -> None:
        """Match sound that came before a time (all, without one) with the searches for speech."""
        while self._sounds and (now_ns is None or self._sounds[0][0] < now_ns):
            at_ns, begin, end = self._sounds.popleft()
            while self._searched and self._searched[0][0] < at_ns:
                self._searched.popleft()  # of silence that the client did not send
            if self._searched and self._searched[0][0] == at_ns:
                first = self._searched.popleft()[1]
                self._places.add(first, begin * SAMPLE, (end - begin) * SAMPLE)
        while self._found and (
            now_ns is None or self._places.is_past(self._found[0][1] * TICKS_PER_MS)
        ):
            began_ms, ended_ms = self._found.popleft()
            span = self._places.span(began_ms * TICKS_PER_MS, ended_ms * TICKS_PER_MS)
            if span.end > span.begin:
                join(self._spans, span, GAP)

    def spans(self) -> tuple[Span, ...]:
        """Return the stretches of speech, once all sound is heard."""
        if self.source == "energy":
            return self._energy.spans()
        self.place()
        if self._open is not None:
            begin = self._open * TICKS_PER_MS
            span = Span(self._places.span(begin, begin + 1).begin, self._places.end)
            if span.end > span.begin:
                join(self._spans, span, GAP)
        return tuple(self._spans)


class _Energy:
    """Runs the energy detector on the user's sound; counts are ticks of that sound."""

    def __init__(self) -> None:
        self._places: Final = Places()
        self._spans: list[Span] = []
        self._detector = SpeechDetector()
        self._open: int | None = None
        self._rate_hz = INPUT_RATE_HZ
        self._is_float = False
        self._base = self._searched = self._count = 0
        self._end: int | None = None
        self._batch: list[bytes] = []
        self._batch_ns = 0

    def hear(self, sound: UserSound, end_ns: int) -> None:
        if not sound.data:
            return
        is_after_gap = self._end is not None and (sound.begin - self._end) * SAMPLE >= GAP
        rate_hz, is_float = sound.rate_hz or INPUT_RATE_HZ, not sound.rate_hz
        if is_after_gap or rate_hz != self._rate_hz:
            self._break_off()
            self._rate_hz = rate_hz
        elif is_float != self._is_float and self._batch:
            self._detect()
        self._is_float = is_float
        width = SAMPLE_BYTES if is_float else SAMPLE16_BYTES
        ticks = len(sound.data) // width * (TICK_HZ // rate_hz)
        self._places.add(self._count, sound.begin * SAMPLE, (sound.end - sound.begin) * SAMPLE)
        self._count += ticks
        self._batch.append(sound.data)
        self._batch_ns, self._end = end_ns, sound.end
        if self._count - self._searched >= BATCH:
            self._detect()

    def _detect(self) -> None:
        """Search the batch; sound is judged in frames, however it is cut."""
        rate_hz, data = self._rate_hz, b"".join(self._batch)
        effect = DetectSpeech(
            at=(self._searched - self._base) * rate_hz // TICK_HZ,
            rate_hz=rate_hz,
            data=to_pcm16(data) if self._is_float else data,
            threshold=SPEECH_THRESHOLD,
            silence_ms=SPEECH_SILENCE_MS,
            is_speech=self._detector.is_speech,
        )
        self._searched = self._count
        self._batch.clear()
        for event in self._detector.detect(effect, self._batch_ns):
            at = self._base + event.at_ms * TICKS_PER_MS
            if isinstance(event, ev.SpeechStarted):
                self._open = at
            elif self._open is not None:
                self._close(at - SPEECH_SILENCE_MS * TICKS_PER_MS)

    def _close(self, end: int) -> None:
        assert self._open is not None
        join(self._spans, self._places.span(self._open, end), GAP)
        self._open = None

    def _settle(self) -> None:
        """Search what waits; speech that has not stopped ends where it was last heard."""
        if self._batch:
            self._detect()
        if self._open is not None:
            detector = self._detector
            self._close(self._base + (detector.end_ms - detector.quiet_ms) * TICKS_PER_MS)

    def _break_off(self) -> None:
        self._settle()
        self._base = self._searched
        self._detector = SpeechDetector()

    def spans(self) -> tuple[Span, ...]:
        self._settle()
        return tuple(self._spans)
