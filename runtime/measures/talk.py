"""A duplex session, heard as its client hears it: what crosses the wire becomes a conversation.

It is fed with the messages of both ends, live from the machine and later from a log, so that both
give the same. Memory holds intervals, the sound that may still move (`Line`) and 2 s more.

Where the model is heard: its sound as a client plays it, and the words that go with it. A piece
begins when it was sent, or after the sound that still plays; later, if the client's sound came
ahead of the clock (`InputLead`). An interruption cuts what is not heard by then, with its words.
Words stand where the sound does that is sent at the same time; without one, where they were sent.

Where the user speaks: as the server found it, else found in the sound. A server that searches for
speech says what it found by the sample count of the client's sound. For other sessions the energy
detector runs here, with the server's settings, on the sound as it came: it is not resampled. Either
count is mapped to the place of the sound on the session's clock. A server searches sound as it
comes, or all of it in whole seconds (`UserSound.first`). Silence that it put in place of a client's
has no place; a position in it is the end of the sound before.

After a gap of `SPEECH_GAP_MS` in the client's sound the detector starts again: a client that sends
nothing does not speak. Memory holds what was found, and the last seconds of sound.

Where a sound is placed, on the session's clock and to the sample:

- Sample `n` of a voice stands `n / rate` after the session's start, so sounds lie on one grid and
  two of a voice never overlap.
- A microphone's sound was heard before it came. A sound of `n` samples that came at `t` ends at
  `t`, or follows the sound before if that is not over: if a client sends faster than real time, its
  sound is heard later than it came.
- What a model says is heard as much later than it was sent as its unit was begun before the unit's
  sound could have been spoken (`InputLead`). A client that sends a file at once is answered in a
  moment; heard like that, the answers would stand in the middle of the question.
- Sound that a network held up comes at once, and was heard in the gap before: the stretch that
  begins after a gap is moved back into it, while sound comes that would otherwise be late.
- Played sound begins when it came, or after the sound that still plays: the model's sound, as a
  client plays it, and the sound of a chat's question, which is a file.
- A sound that is cut off ends there, and the next may begin there.

All that shows, exports or measures a session uses this, so that a page, a file and a metric agree.
A line holds no sound.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, Literal

import attrs

from protocol.values import events as ev
from protocol.values import messages as ms
from protocol.values import model
from protocol.values import openai as oa
from protocol.values.behaviour import LATE_FORMATS, NEWEST
from protocol.values.effects import DetectSpeech
from protocol.values.limits import (
    APPEND_SAMPLES_MAX,
    MS_PER_S,
    NS_PER_MS,
    NS_PER_S,
    SPEECH_SILENCE_MS,
    SPEECH_THRESHOLD,
    Mode,
)
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.requests import Append, AppendSound, ClientMessage, Init
from protocol.wire.audio import LIVE_RATE_HZ, expand, ratio_of, to_pcm16

from ..media.speech_detector import SpeechDetector
from .conversation import (
    PAUSE_MS,
    RATE_HZ,
    SPEECH_GAP_MS,
    TICK_HZ,
    TICKS_PER_MS,
    TICKS_PER_SAMPLE,
    Conversation,
    Span,
    Text,
    Voice,
    join,
    ticks_of,
)

# -- where a sound is heard ------------------------------------------------------------------------

CAPTURED_NS_MAX: Final = (APPEND_SAMPLES_MAX + 1) * NS_PER_S // INPUT_RATE_HZ
"""How long before it came sound was heard at most: the most a dialect takes, plus one sample."""
JITTER_MS: Final = 40
"""A shorter gap is the jitter of a network, and nothing is moved into it."""
HELD_UP_S_MAX: Final = 10
"""A network that is silent for longer has lost the connection."""
BURST_NS_MAX: Final = 2 * NS_PER_S
"""Sound that was held up comes within this time; no microphone sends too fast for longer."""
SETTLED_NS: Final = CAPTURED_NS_MAX + HELD_UP_S_MAX * NS_PER_S + BURST_NS_MAX
"""Sound this long before the last that came moves no more."""


CLOCK_PIECES_MAX: Final = 4096
"""Pieces of sound whose place is known: 80 s of 20 ms each, and words come sooner."""


class UserSoundClock:
    """Where the user's sound stands on the session's clock, by its own milliseconds."""

    def __init__(self) -> None:
        self._pieces = deque[tuple[int, int]](maxlen=CLOCK_PIECES_MAX)
        self._samples = 0

    def add(self, samples: int, begin_ns: int) -> None:
        """Take the place of the next sound."""
        self._pieces.append((self._samples, begin_ns))
        self._samples += samples

    def span(self, start_ms: int, end_ms: int, now_ns: int) -> tuple[int, int]:
        """Return when a part of the sound was heard; `now_ns` where that is unknown, or later."""
        begin_ns, end_ns = (min(self._at_ns(at_ms, now_ns), now_ns) for at_ms in (start_ms, end_ms))
        return begin_ns, max(begin_ns, end_ns)

    def _at_ns(self, at_ms: int, now_ns: int) -> int:
        sample = at_ms * INPUT_RATE_HZ // MS_PER_S
        for first, begin_ns in reversed(self._pieces):
            if first <= sample:
                return begin_ns + time_of("user", sample - first)
        return now_ns


def sample_at(voice: Voice, at_ns: int) -> int:
    """Return the first sample of a voice at or after a time."""
    return -(-at_ns * RATE_HZ[voice] // NS_PER_S)


def time_of(voice: Voice, sample: int) -> int:
    """Return when a sample is heard; never before the time that `sample_at` was given."""
    return sample * NS_PER_S // RATE_HZ[voice]


class InputLead:
    """How far the model is ahead of the clock: it hears sound before that can have been spoken.

    `ns` is 0 with a microphone; a shorter lead is the jitter of a network.
    """

    def __init__(self) -> None:
        self.ns = 0
        self._last_ns = 0

    def begin(self, at_ns: int, user: Line, samples_waiting: int) -> None:
        """Take a unit that begins; the model does not have the last samples of the user."""
        self.ns = ahead_ns(time_of(user.voice, max(user.end - samples_waiting, 0)), at_ns)

    def at(self, at_ns: int) -> int:
        """When it is heard what a unit says, sent at a time, which does not decrease."""
        self._last_ns = max(self._last_ns, at_ns + self.ns)
        return self._last_ns

    def after(self, at_ns: int) -> int:
        """When it happens what else the server does at a time: not before what was said."""
        return max(self._last_ns, at_ns)


def ahead_ns(end_ns: int, at_ns: int) -> int:
    """How long before its end sound came, at a time."""
    return end_ns - at_ns if end_ns - at_ns > JITTER_MS * NS_PER_MS else 0


@attrs.frozen(kw_only=True)
class Sound:
    """A sound that arrived from the user, or was sent to them, at `at_ns`.

    `begin` (from the session's start) and `pcm` (float32 LE, mono) are at the voice's rate;
    `response_id` is the model's turn.
    """

    voice: Voice
    at_ns: int
    begin: int
    pcm: bytes
    response_id: str = ""

    @property
    def end(self) -> int:
        """The sample after its last."""
        return self.begin + len(self.pcm) // SAMPLE_BYTES

    @property
    def begin_ns(self) -> int:
        """When it is first heard."""
        return time_of(self.voice, self.begin)

    @property
    def end_ns(self) -> int:
        """When it is over."""
        return time_of(self.voice, self.end)


@attrs.define(eq=False)
class Stretch:
    """Sound without a gap; it was moved back by `moved` samples in all, and begins at `begin`."""

    begin: int
    moved: int = 0


class Line:
    """One voice's line, placed up to `end`.

    `begin` is the first sample of the current stretch, after the last gap; the last call of `place`
    moved that stretch back by `moved` samples. `stretch` is that stretch.
    """

    def __init__(self, voice: Voice) -> None:
        self.voice: Final[Voice] = voice
        self.end = self.begin = self.moved = 0
        self.stretch = Stretch(0)
        self._floor = 0
        self._came_ns = 0

    def place(self, at_ns: int, samples: int, *, is_captured: bool) -> int:
        """Place samples that came at `at_ns` after all placed before; return the first one's place.

        Captured sound is a microphone's, heard before it came, and earlier sound of the stretch may
        have `moved`; other sound is played from now on.
        """
        rate_hz = RATE_HZ[self.voice]
        if is_captured:
            wanted = at_ns * rate_hz // NS_PER_S - samples
        else:
            wanted = sample_at(self.voice, at_ns)
        self.moved = 0
        if wanted - self.end > JITTER_MS * rate_hz // 1000:
            self._floor = max(self.end, wanted - HELD_UP_S_MAX * rate_hz)
            self.begin, self._came_ns = wanted, at_ns
        elif is_captured and at_ns - self._came_ns <= BURST_NS_MAX:
            self.moved = max(0, min(self.end - wanted, self.begin - self._floor))
            self.begin -= self.moved
        begin = max(wanted, self.end - self.moved)
        self.end = begin + samples
        if self.moved:
            self.stretch.moved += self.moved
            self.stretch.begin = self.begin
        elif self.begin != self.stretch.begin:
            self.stretch = Stretch(self.begin)
        return begin

    def cut(self, at_ns: int) -> int:
        """End the placed sound at a time, if it is not over by then; return the line's end."""
        self.end = min(self.end, sample_at(self.voice, at_ns))
        return self.end

    @property
    def is_settled(self) -> bool:
        """Whether nothing placed moves any more: the stretch lies at the sound before."""
        return self.begin <= self._floor

    def settled_ns(self, now_ns: int) -> int:
        """The time before which sound that comes from now on moves and places nothing."""
        can_move = now_ns - self._came_ns <= BURST_NS_MAX
        return time_of(self.voice, min(self._floor, self.end) if can_move else self.end)


# -- where the model is heard ----------------------------------------------------------------------


MODEL_SAMPLE: Final = TICKS_PER_SAMPLE["model"]
GAP: Final = SPEECH_GAP_MS * TICKS_PER_MS
PAUSE: Final = PAUSE_MS * TICKS_PER_MS
JITTER: Final = JITTER_MS * TICKS_PER_MS


@attrs.define
class _ModelPiece:
    """Sound from sample `begin` to `end`, which may still be cut, and the words in it."""

    response_id: str
    begin: int
    end: int
    words: int


class ModelSpeech:
    """Collects where the model is heard; `underruns` counts the gaps within responses."""

    def __init__(self) -> None:
        self.underruns = 0
        self.texts: Final[list[Text]] = []
        self._line: Final = Line("model")
        self._spans: list[Span] = []
        self._pieces = deque[_ModelPiece]()
        self._last: tuple[str, int] = ("", 0)
        self._written = ""
        self._written_by: tuple[str, int] = ("", 0)

    def add(self, at_ns: int, text: str, samples: int, response_id: str) -> None:
        """Take words, or sound (24 kHz), or both; words may come before their sound."""
        self.settle(at_ns)
        if self._written_by != (response_id, at_ns):
            self.flush()
        self._written, self._written_by = self._written + text, (response_id, at_ns)
        if samples:
            begin = self._line.place(at_ns, samples, is_captured=False)
            words = len(self._written.split())
            self._pieces.append(_ModelPiece(response_id, begin, begin + samples, words))
            self._written = ""

    def flush(self) -> None:
        """Let words be words without sound."""
        if self._written:
            at = sample_at("model", self._written_by[1])
            self._write(at, len(self._written.split()))
        self._written = ""

    def cut(self, at_ns: int) -> None:
        """Stop what would be heard from here on."""
        self.settle(at_ns)
        end = self._line.cut(at_ns)
        kept = [piece for piece in self._pieces if time_of("model", piece.begin) < at_ns]
        self._pieces = deque(attrs.evolve(piece, end=min(piece.end, end)) for piece in kept)

    def settle(self, now_ns: int | None) -> None:
        """Count what is heard by a time, or all: it is cut no more."""
        while self._pieces and (now_ns is None or time_of("model", self._pieces[0].end) <= now_ns):
            self._count(self._pieces.popleft())

    def spans(self) -> tuple[Span, ...]:
        """Return the stretches of its sound, once all is said."""
        self.flush()
        self.settle(None)
        return tuple(self._spans)

    def _write(self, at: int, words: int) -> None:
        self.texts.append(Text(at * MODEL_SAMPLE, words))

    def _count(self, piece: _ModelPiece) -> None:
        self._write(piece.begin, piece.words) if piece.words else None
        begin, end = piece.begin * MODEL_SAMPLE, piece.end * MODEL_SAMPLE
        if end <= begin:
            return
        response, ended = self._last
        is_same = response != "" and piece.response_id == response
        self.underruns += is_same and begin - ended > JITTER
        join(self._spans, Span(begin, end), PAUSE if is_same else GAP)
        self._last = (piece.response_id, end)


# -- where the user speaks -------------------------------------------------------------------------


SpeechSource = Literal["log", "energy"]
USER_SAMPLE: Final = TICKS_PER_SAMPLE["user"]
KEPT_BACK: Final = 4 * USER_SAMPLE
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
class _UserPiece:
    """Sound that lies in one piece by both counts: of the client's own sound, and of the clock."""

    first: int
    begin: int
    ticks: int


class TickMap:
    """Maps a count of a client's sound, in ticks, to the session's clock."""

    def __init__(self) -> None:
        self._pieces: deque[_UserPiece] = deque(maxlen=PIECES_MAX)

    def add(self, first: int, begin: int, ticks: int) -> None:
        """Take sound after all sound so far: its count, its place and its length."""
        last = self._pieces[-1] if self._pieces else None
        if last is not None and last.begin + last.ticks == begin:
            shift = first - last.first - last.ticks
            if abs(shift) < KEPT_BACK:
                last.ticks += ticks
                return
        if ticks:
            self._pieces.append(_UserPiece(first, begin, ticks))

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
        self._places: Final = TickMap()
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

    def add(self, sound: UserSound) -> None:
        """Take a sound of the user in its final place."""
        end_ns = time_of("user", sound.end)
        lead_ns = max(0, end_ns - sound.at_ns)
        if sound.end > sound.begin and (self.lead is None or lead_ns > self.lead[1]):
            self.lead = (sound.at_ns, lead_ns)
        if self.source == "energy":
            self._energy.add(sound, end_ns)
        if sound.first is None:
            self._sounds.append((sound.at_ns, sound.begin, sound.end))
        else:
            self._searched.clear()
            begin = sound.begin * USER_SAMPLE
            self._places.add(sound.first, begin, sound.end * USER_SAMPLE - begin)

    def place(self, now_ns: int | None = None) -> None:
        """Match sound that came before a time (all, without one) with the searches for speech."""
        while self._sounds and (now_ns is None or self._sounds[0][0] < now_ns):
            at_ns, begin, end = self._sounds.popleft()
            while self._searched and self._searched[0][0] < at_ns:
                self._searched.popleft()  # of silence that the client did not send
            if self._searched and self._searched[0][0] == at_ns:
                first = self._searched.popleft()[1]
                self._places.add(first, begin * USER_SAMPLE, (end - begin) * USER_SAMPLE)
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
        self._places: Final = TickMap()
        self._spans: list[Span] = []
        self._detector = SpeechDetector()
        self._open: int | None = None
        self._rate_hz = model.INPUT_RATE_HZ
        self._is_float = False
        self._base = self._searched = self._count = 0
        self._end: int | None = None
        self._batch: list[bytes] = []
        self._batch_ns = 0

    def add(self, sound: UserSound, end_ns: int) -> None:
        if not sound.data:
            return
        is_after_gap = self._end is not None and (sound.begin - self._end) * USER_SAMPLE >= GAP
        rate_hz, is_float = sound.rate_hz or model.INPUT_RATE_HZ, not sound.rate_hz
        if is_after_gap or rate_hz != self._rate_hz:
            self._settle()
            self._base = self._searched
            self._detector = SpeechDetector()
            self._rate_hz = rate_hz
        elif is_float != self._is_float and self._batch:
            self._detect()
        self._is_float = is_float
        width = model.SAMPLE_BYTES if is_float else model.SAMPLE16_BYTES
        ticks = len(sound.data) // width * (TICK_HZ // rate_hz)
        self._places.add(
            self._count, sound.begin * USER_SAMPLE, (sound.end - sound.begin) * USER_SAMPLE
        )
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

    def spans(self) -> tuple[Span, ...]:
        self._settle()
        return tuple(self._spans)


# -- the session -----------------------------------------------------------------------------------


NOTES_MAX: Final = 4096
"""Pauses, and times at which the model was asked to stop; a client may ask with each sound."""


@attrs.frozen
class Piece:
    """Sound of a client as it came: 16-bit LE, mono; `is_whole`: the model hears all sound."""

    pcm16: bytes
    rate_hz: int
    is_whole: bool


class ClientSound:
    """Knows how a client writes its sound; each message is to be read once."""

    def __init__(self, mode: Mode, endpoint: ev.Endpoint, *, behaviour: int = NEWEST) -> None:
        self.mode: Final[Mode] = mode
        self.endpoint: Final[ev.Endpoint] = endpoint
        self._coding: model.Coding = "audio/pcm"
        self._rate_hz = self._spoken_hz = LIVE_RATE_HZ
        self._changes_late = behaviour >= LATE_FORMATS
        self._samples = 0

    def read(self, request: ClientMessage) -> ClientMessage | Piece:
        """Return the message; sound in pieces as one."""
        match request:
            case AppendSound(pcm16=data) if self.endpoint in ev.PIECES:
                pcm16, is_whole = expand(data, self._coding), self.endpoint == "live"
                self._samples += len(pcm16) // model.SAMPLE16_BYTES
                return Piece(pcm16, self._rate_hz, is_whole)
            case Init(live=settings) if settings.rate_hz:
                self._coding = settings.coding
                self._rate_hz = self._spoken_hz = settings.rate_hz
            case oa.Configure(input_format=str() as coding) if coding != self._coding:
                if self._samples < (self._rate_hz if self._changes_late else 1):
                    self._coding, self._rate_hz, self._samples = coding, model.rate_of(coding), 0
        return request

    def spoken_hz(self, coding: model.Coding) -> int:
        """Return the rate of the model's sound as sent."""
        return self._spoken_hz if coding == "audio/pcm" else model.rate_of(coding)


@attrs.define
class _MovableSound:
    """Sound of the user that may move, and how far its stretch had moved when it was placed."""

    sound: UserSound
    stretch: Stretch
    moved: int

    def placed(self) -> UserSound:
        """Return the sound where it lies now."""
        back = self.stretch.moved - self.moved
        self.sound.begin -= back
        self.sound.end -= back
        self.moved += back
        return self.sound


class Talk:
    """One session; each call has its time, which does not decrease."""

    def __init__(self) -> None:
        self.user: Final = UserSpeech()
        self.model: Final = ModelSpeech()
        self._line: Final = Line("user")
        self._lead: Final = InputLead()
        self._movable = deque[_MovableSound]()
        self._rest = self._ticks = 0
        self._is_speaking = False
        self._stops: list[int] = []
        self._pauses: list[int] = []
        self._is_new = True

    def received(self, at_ns: int, message: ClientMessage | Piece) -> None:
        """Take a client's message that the session took, as `ClientSound` reads it."""
        match message:
            case Append(pcm=pcm):
                if message.force_listen:
                    self._asked_to_stop(self._lead.at(at_ns))
                self._add_sound(at_ns, len(pcm) // model.SAMPLE_BYTES, pcm)
            case Piece(pcm16=pcm16, rate_hz=rate_hz):
                count = len(pcm16) // model.SAMPLE16_BYTES
                up, down = ratio_of(rate_hz, model.INPUT_RATE_HZ)
                blocks, self._rest = divmod(self._rest + count, down)
                first = self._ticks if message.is_whole else None
                self._ticks += count * (TICK_HZ // rate_hz)
                self._add_sound(at_ns, blocks * up, pcm16, rate_hz, first)

    def unit_started(self, at_ns: int, samples_waiting: int) -> None:
        """Take a unit, and how many samples of the user the model has not begun to hear."""
        self._lead.begin(at_ns, self._line, samples_waiting)

    def sent(self, at_ns: int, message: ms.ServerMessage, rate_hz: int = LIVE_RATE_HZ) -> None:
        """Take a message to the client, whose sound has a rate."""
        at_ns = self._lead.at(at_ns)
        match message:
            case ms.Speech(text=text, pcm=pcm, response_id=response_id):
                samples = len(pcm) // model.SAMPLE_BYTES * model.OUTPUT_RATE_HZ // rate_hz
                self.model.add(at_ns, text, samples, response_id)
                self._is_speaking, self._is_new = not message.end_of_turn, True
            case oa.ReplyStep(kind="text_delta", text=text, response_id=response_id):
                self.model.add(at_ns, text, 0, response_id)
            case ms.Listen() if self._is_speaking:
                self._stop(at_ns)
            case ms.Interrupted():
                self._stop(at_ns)
            case oa.ReplyState(response=response) if response.status == "cancelled":
                self._stop(at_ns)
            case ms.Paused() if len(self._pauses) < NOTES_MAX:
                self._pauses.append(ticks_of(at_ns))

    def stopped(self, at_ns: int) -> None:
        """End the model's sound: its client plays it no longer."""
        self._stop(self._lead.at(at_ns))

    def _stop(self, at_ns: int) -> None:
        self.model.cut(at_ns)
        self._is_speaking = False

    def conversation(self, end_ns: int) -> Conversation:
        """Return what was heard, once the session is over."""
        self._settle(None)
        return Conversation(
            user=self.user.spans(),
            model=self.model.spans(),
            texts=tuple(self.model.texts),
            stops=tuple(self._stops),
            pauses=tuple(self._pauses),
            end=ticks_of(self._lead.after(end_ns)),
        )

    def _asked_to_stop(self, at_ns: int) -> None:
        """Note it, if the model said anything since the last time: only the first counts."""
        if self._is_new and len(self._stops) < NOTES_MAX:
            self._stops.append(ticks_of(at_ns))
        self._is_new = False

    def _add_sound(
        self, at_ns: int, samples: int, data: bytes, rate_hz: int = 0, first: int | None = None
    ) -> None:
        begin = self._line.place(at_ns, samples, is_captured=True)
        end = begin + samples
        sound = UserSound(
            at_ns=at_ns, begin=begin, end=end, data=data, rate_hz=rate_hz, first=first
        )
        stretch = self._line.stretch
        if self._movable or not self._line.is_settled:
            self._movable.append(_MovableSound(sound, stretch, stretch.moved))
            self._settle(at_ns)
            if self._movable and not sound.rate_hz:  # it is held: half the memory
                sound.data, sound.rate_hz = to_pcm16(sound.data), model.INPUT_RATE_HZ
        else:  # of a microphone without gaps
            self.user.add(sound)
            self.user.place(at_ns)

    def _settle(self, now_ns: int | None) -> None:
        """Search sound that moves no more."""
        line = self._line
        settled_ns = None if now_ns is None or line.is_settled else line.settled_ns(now_ns)
        while self._movable:
            sound = self._movable[0].placed()
            if settled_ns is not None and time_of("user", sound.begin) > settled_ns:
                break
            self._movable.popleft()
            self.user.add(sound)
        self.user.place(now_ns)
