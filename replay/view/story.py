"""A session's story for the page: its dialogue, as it was heard, seen and read, and its times.

    with Narrator(head) as narrator:
        for item in reader: parts = narrator.narrate(item)
        parts = narrator.conclude()

Values are those recorded, as `replay.story.inspect` has them. The arrival of a unit's input, and
the number that waited, are known only from stepping the session, so they end at a divergence.
Memory holds the last part: some numbers a unit, words, errors. Times are nanoseconds of the
session's clock.

The dialogue is the session's time line (`export.timeline`); words that are sent within `HOLD_NS`
are joined, and those without sound give way to the next.

The page's data is parts, in the order in which the log gives them. A part is a name and a plain
JSON value. Parts are small, so a page is written while its log is read, and neither is ever whole
in memory. The page puts them together:

| part | holds |
|---|---|
| `rows` | some records, for the list: `[seq, at_ns, kind, type, fields]` each |
| `sound` | a piece of a voice: where it is heard, its samples as Opus, its peaks |
| `picture` | a picture and when it was shown |
| `story` | all else, once, at the end |

Nothing in a part exceeds the bounds below, for any log; bytes are named by their length; whole
numbers that JavaScript cannot hold are text.

**Pictures** are decoded and encoded again, small enough for a page, so no bytes of a client's file
reach the browser; a repeated picture is named, not repeated; one that does not decode, or exceeds
the bounds, is listed without its image. The log has the originals.

**Sound** is placed by `runtime.measures.talk`; a gap that the jitter of a network made is
silence. A gap begins a new piece; a long stretch is cut into pieces of `PIECE_S`, so that the page
decodes only what it plays. Each begins with `lead` samples of the sound before, decoded and not
played, since a decoder needs that long to settle (RFC 7845, 4.6). The model's pieces are made once
their time has come, as queued sound may still be cut off. Samples are clipped to a loudspeaker's
range: a log may hold any finite value. Memory is bounded by the queued sound, and by `VOICE_S_MAX`
in all.
"""

from __future__ import annotations

import io
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias

import attrs
import numpy as np
import pybase64
import simplejpeg
import soundfile
from numpy.typing import NDArray

from protocol.values import events as ev
from protocol.values.model import SAMPLE_BYTES
from protocol.values.records import digest
from recorder.format.encoding import extract
from recorder.format.format import FRAME_KINDS, Fields, Record, Value
from recorder.read.reader import LogReader
from recorder.read.scan import Damage, OpenSource
from runtime.measures.conversation import (
    NEAR_TIE_LOGITS,
    RATE_HZ,
    VOICES,
    Span,
    Turns,
    Voice,
    ns_of,
    shared,
)
from runtime.measures.talk import JITTER_MS, Sound, time_of
from runtime.media.image import decode_jpeg
from runtime.media.values import MediaError

from ..diff import DiffReport, SessionDifference, compare
from ..eval.evaluate import MEASURES, own_values
from ..eval.scores import Facts, FactsCollector, score
from ..export.timeline import HOLD_NS, Moment, Note, Picture, Words
from ..rerun.report import Divergence
from ..shared.recordings import typed
from ..story.inspect import Inspector, to_json
from ..story.reading import DecodedRecord

# -- the page's data -------------------------------------------------------------------------------


Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

TEXT_CHARS_MAX: Final = 4_000
"""Of one text: a system prompt, whole; the page folds it."""
ITEMS_MAX: Final = 64
"""Of one list or object: the codes of a second of speech, and some more."""
DEPTH_MAX: Final = 12
"""The deepest of our records, a conversation's start, nests seven levels."""
WHOLE_MAX: Final = 2**53
"""Beyond it JavaScript's numbers have gaps; seeds are larger."""
ROWS_A_PART: Final = 400


@attrs.frozen
class Part:
    """A piece of the page's data."""

    name: str
    value: Json


def row_of(record: Record, kept: str = "") -> Json:
    """Write a record for the list; `kept` describes the part kept of a refused message."""
    fields = {name: value for name, value in record.fields.items() if name != "type"}
    kind = record.fields.get("type")
    if record.kind in FRAME_KINDS and isinstance(frame := fields.get("frame"), str):
        pieces = (it if isinstance(it, str) else f"({len(it)} bytes)" for it in extract(frame))
        fields["frame"] = "".join(pieces)
    fields |= {"kept": kept} if kept else {}
    name = kind[:TEXT_CHARS_MAX] if isinstance(kind, str) else ""
    return [record.seq, record.at_ns, record.kind, name, plain(fields)]


def plain(value: Value, depth: int = 0) -> Json:
    """Shorten a value for a reader, as JSON that JavaScript can hold."""
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, str):
        return _shorten(value)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < WHOLE_MAX else f"{value:#x}"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth >= DEPTH_MAX:
        return f"({len(value)} more inside)"
    if isinstance(value, Mapping):
        shown: dict[str, Json] = {
            _shorten(str(key)): plain(value[key], depth + 1) for key in list(value)[:ITEMS_MAX]
        }
        rest = len(value) - ITEMS_MAX
        return {**shown, "…": f"{rest} more"} if rest > 0 else shown
    items = [plain(item, depth + 1) for item in value[:ITEMS_MAX]]
    rest = len(value) - ITEMS_MAX
    return [*items, f"… {rest} more"] if rest > 0 else items


def _shorten(text: str) -> str:
    more = len(text) - TEXT_CHARS_MAX
    return f"{text[:TEXT_CHARS_MAX]}… {more} more" if more > 0 else text


# -- pictures --------------------------------------------------------------------------------------


SIDE_MAX: Final = 320
"""Pixels of the longer side: the size of a panel of the page, on a fine display twice as dense."""
QUALITY: Final = 70
PICTURES_BYTES_MAX: Final = 10 << 20
"""Of the page: some 900 pictures, three a second of a video session's five minutes."""


Pixels = NDArray[np.uint8]
"""RGB; shape (height, width, 3)."""


class Pictures:
    """Takes a session's pictures, in order; `count` were taken, and the page omits `left_out`."""

    def __init__(self) -> None:
        self.count = 0
        self.left_out = 0
        self._numbers: dict[str, int] = {}
        self._bytes = 0

    def take(self, at_ns: int, jpeg: bytes) -> Part:
        """Take a picture that was shown at this time."""
        name, number = digest(jpeg), self.count
        self.count += 1
        shown: dict[str, Json] = {"at_ns": at_ns, "bytes": len(jpeg)}
        if name in self._numbers:
            return Part("picture", {**shown, "same_as": self._numbers[name]})
        small = None if self._bytes > PICTURES_BYTES_MAX else shrink(jpeg)
        if small is None:
            self.left_out += 1
            return Part("picture", shown)
        self._numbers[name] = number
        self._bytes += len(small)
        return Part("picture", {**shown, "jpeg": pybase64.b64encode_as_string(small)})


def shrink(jpeg: bytes) -> bytes | None:
    """Make a small JPEG of a JPEG; None if it is damaged, or a session would not take it."""
    try:
        decode_jpeg(jpeg)
        height, width, *_ = simplejpeg.decode_jpeg_header(jpeg)
        scale = min(1.0, SIDE_MAX / max(height, width))
        small = {"height": max(1, round(height * scale)), "width": max(1, round(width * scale))}
        pixels = simplejpeg.decode_jpeg(jpeg, min_height=small["height"], min_width=small["width"])
    except (MediaError, ValueError):
        return None
    made: bytes = simplejpeg.encode_jpeg(_averaged(pixels, **small), quality=QUALITY)
    return made


def _averaged(pixels: Pixels, *, height: int, width: int) -> Pixels:
    """Scale a picture down; each pixel is the mean of those that it covers."""
    rows, columns = (
        np.arange(small) * size // small
        for small, size in zip((height, width), pixels.shape, strict=False)
    )
    sums = np.add.reduceat(pixels.astype(np.uint32), rows, axis=0)
    sums = np.add.reduceat(sums, columns, axis=1)
    covered = np.outer(np.diff(rows, append=len(pixels)), np.diff(columns, append=pixels.shape[1]))
    return (sums // covered[..., None]).astype(np.uint8)


# -- sound -----------------------------------------------------------------------------------------


PIECE_S: Final = 30
"""Decoded in some hundredths of a second, when playing comes near it."""
LEAD_MS: Final = 80
"""After a seek, by RFC 7845."""
VOICE_S_MAX: Final = 3_600
"""Six times the longest session: beyond it, sound is counted and not kept."""
PEAKS_A_SECOND: Final = 200
"""At 5 ms each a syllable still has a shape; a voice of ten minutes takes 320 KB of the page."""
BITS_A_SECOND: Final = {"user": 24_000, "model": 32_000}
"""Speech that is hard to tell from the source; 24 kHz takes a little more than 16 kHz."""
COMPLEXITY: Final = 5
"""Of 10: two thirds of the time, and no difference that could be heard in speech."""

_Samples = NDArray[np.float32]


class Track:
    """One voice, fed in the order of its sound; `left_out_s` counts after `VOICE_S_MAX`."""

    def __init__(self, voice: Voice) -> None:
        self.left_out_s = 0.0
        self._voice: Final[Voice] = voice
        self._rate_hz: Final = RATE_HZ[voice]
        self._begin = 0
        self._held: list[_Samples] = []
        self._held_samples = 0
        self._lead: _Samples = np.empty(0, np.float32)
        self._kept_samples = 0

    def take(self, begin: int, pcm: bytes) -> list[Part]:
        """Take float32 LE mono at the voice's rate, heard from this sample on.

        Returns the pieces that are complete by then.
        """
        samples = np.frombuffer(pcm[: len(pcm) // SAMPLE_BYTES * SAMPLE_BYTES], "<f4")
        if self._kept_samples + len(samples) > VOICE_S_MAX * self._rate_hz:
            self.left_out_s += len(samples) / self._rate_hz
            return []
        parts = self.flush(whole=True)
        gap = begin - self._begin - self._held_samples
        goes_on = self._held_samples or len(self._lead)
        if gap > JITTER_MS * self._rate_hz // 1000 or not goes_on:
            parts += self.flush()
            self._begin = begin
        else:
            self._hold(np.zeros(gap, np.float32))
        self._hold(np.clip(np.nan_to_num(samples), -1, 1))
        return parts

    def _hold(self, samples: _Samples) -> None:
        self._held.append(samples)
        self._held_samples += len(samples)
        self._kept_samples += len(samples)

    def flush(self, *, whole: bool = False) -> list[Part]:
        """Give the pieces of all that is held, or only those of full length."""
        size = PIECE_S * self._rate_hz
        if whole and self._held_samples < size:
            return []
        samples = np.concatenate([self._lead[:0], *self._held])
        end = len(samples) - len(samples) % size if whole else len(samples)
        parts = [self._piece(samples[at : min(at + size, end)]) for at in range(0, end, size)]
        self._held, self._held_samples = [samples[end:]], len(samples) - end
        if not whole:
            self._lead = self._lead[:0]
        return parts

    def _piece(self, samples: _Samples) -> Part:
        lead, self._lead = self._lead, samples[-self._rate_hz * LEAD_MS // 1000 :]
        begin, self._begin = self._begin, self._begin + len(samples)
        value = {
            "voice": self._voice,
            "begin_ns": time_of(self._voice, begin),
            "end_ns": time_of(self._voice, self._begin),
            "lead_s": len(lead) / self._rate_hz,
            "file": pybase64.b64encode_as_string(
                encode(np.concatenate([lead, samples]), self._voice)
            ),
            "peaks": pybase64.b64encode_as_string(peaks(samples, self._rate_hz // PEAKS_A_SECOND)),
        }
        return Part("sound", value)


def encode(samples: _Samples, voice: Voice) -> bytes:
    """Compress mono in [-1, 1] at the voice's rate: Opus in Ogg, of the same length.

    Without the extra `media` there is no Opus: then it is FLAC with 16 bits, a multiple in size.
    """
    file = io.BytesIO()
    try:
        import av  # 50 ms and 100 MB
    except ImportError:
        soundfile.write(file, samples, RATE_HZ[voice], format="FLAC", subtype="PCM_16")
        return file.getvalue()
    with av.open(file, "w", format="ogg", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libopus", rate=RATE_HZ[voice], layout="mono")
        stream.bit_rate = BITS_A_SECOND[voice]
        stream.codec_context.options = {"compression_level": str(COMPLEXITY)}
        frame = av.AudioFrame.from_ndarray(samples[None].astype("<f4"), format="flt", layout="mono")
        frame.sample_rate = RATE_HZ[voice]
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return file.getvalue()


def peaks(samples: _Samples, samples_each: int) -> bytes:
    """Find the lowest and highest of each few samples; int8 pairs, the last may cover fewer."""
    padded = np.pad(samples, (0, -len(samples) % samples_each)).reshape(-1, samples_each)
    pairs = np.stack([padded.min(axis=1), padded.max(axis=1)], axis=1)
    found: bytes = np.rint(pairs * 127).astype(np.int8).tobytes()
    return found


# -- remarks on places -----------------------------------------------------------------------------


Open = Callable[[], OpenSource]


@attrs.frozen
class Finding:
    """A remark on a place in a session: one of `seq`, `unit`, `turn` and `at_ns`; the last wins."""

    title: str
    detail: tuple[str, ...] = ()
    seq: int | None = None
    unit: int | None = None
    turn: int | None = None
    at_ns: int | None = None


@attrs.frozen(kw_only=True)
class Comparison:
    """The comparison with the session `name`; `findings` is empty if both are the same."""

    name: str
    findings: Sequence[Finding] = ()


def finding_of(divergence: Divergence) -> Finding:
    """Describe the divergence of logic replay."""
    field = f", {divergence.field}" if divergence.field else ""
    cause = divergence.cause
    detail = [f"recorded: {divergence.recorded}", f"came out: {divergence.came_out}"]
    detail += [] if cause is None else [f"event: {cause.seq}, {cause.kind} {cause.summary}"]
    title = f"Replay diverges here: {divergence.record}{field} ({divergence.kind})"
    return Finding(title, tuple(detail), seq=divergence.seq, at_ns=divergence.at_ns)


def comparison_of(report: DiffReport, name: str) -> Comparison:
    """Describe how the session `name` differs; in the report it is `b`, the shown session `a`."""
    found = [_finding(found, name, report.a.span_ns) for found in report.partings]
    return Comparison(name=name, findings=found)


def compared_with(one: Open, other: Open, name: str) -> Comparison:
    """Compare the log that `one` opens with that of `other`, the session `name`."""
    with LogReader(one()) as a, LogReader(other()) as b:
        return comparison_of(compare(a.head.fields, a, b.head.fields, b), name)


def _finding(found: SessionDifference, name: str, end_ns: int) -> Finding:
    place = found.what if found.index is None else f"{found.what} {found.index}"
    is_missing = found.fields == (found.what,)
    fields = "" if is_missing else f", {', '.join(found.fields)}"
    snr = found.snr_db
    detail = [f"here: {found.in_a}", f"there: {found.in_b}"]
    detail += [] if snr is None else [f"sound: {snr} dB above the difference"]
    unit, turn = (found.index if found.what == what else None for what in ("unit", "turn"))
    at_ns = {"opening": 0, "end": end_ns}.get(found.what)
    return Finding(f"Differs from {name}: {place}{fields}", tuple(detail), None, unit, turn, at_ns)


# -- the dialogue ----------------------------------------------------------------------------------


WORDS_MAX: Final = 20_000
"""Pieces of text: a longest session has 600, a chat of an hour one a second."""


class Dialogue:
    """Takes the moments of a session's time line, in order.

    `words` holds words: voice, when they begin and end, the text, the record; the last of `pauses`
    has no end until it comes.
    """

    def __init__(self) -> None:
        self.tracks: Final = {voice: Track(voice) for voice in VOICES}
        self.pictures: Final = Pictures()
        self.words: list[list[Any]] = []
        self.pauses: list[list[int | None]] = []
        self._last: dict[Voice, tuple[Words, list[Any]]] = {}

    def take(self, moment: Moment) -> list[Part]:
        """Take the next moment; give the parts that are complete with it."""
        match moment:
            case Sound():
                return self.tracks[moment.voice].take(moment.begin, moment.pcm)
            case Picture():
                return [self.pictures.take(moment.begin_ns, moment.jpeg)]
            case Words():
                self._add(moment)
            case Note(begin_ns=at_ns, kind="unheard") if len(self.words) < WORDS_MAX:
                self.words.append(["model", at_ns, at_ns + HOLD_NS, moment.text, moment.seq])
            case Note(kind="paused"):
                self.pauses.append([moment.begin_ns, None])
            case Note(kind="resumed") if self.pauses:
                self.pauses[-1][1] = moment.begin_ns
        return []

    def end(self) -> list[Part]:
        """Give the rest."""
        return [part for track in self.tracks.values() for part in track.flush()]

    def _add(self, words: Words) -> None:
        first, shown = self._last.get(words.voice, (None, []))
        if first is not None and _goes_on(first, words):
            shown[3] += words.text
            return
        if first is not None:  # words without sound give way
            shown[2] = min(shown[2], max(shown[1], words.begin_ns))
        end_ns = words.begin_ns + HOLD_NS if words.end_ns is None else words.end_ns
        shown = [words.voice, words.begin_ns, end_ns, words.text, words.seq]
        if words.text.strip() and len(self.words) < WORDS_MAX:
            self._last[words.voice] = (words, shown)
            self.words.append(shown)


def _goes_on(first: Words, words: Words) -> bool:
    """Whether words go on in the passage that begins with others, without sound as these."""
    is_mute = first.end_ns is None and words.end_ns is None
    is_one = words.voice == "model" and words.response_id == first.response_id
    return is_mute and is_one and words.begin_ns - first.begin_ns < HOLD_NS


# -- who spoke when --------------------------------------------------------------------------------


TALK_POINTS_MAX: Final = 10_000
"""Of one kind: an hour of seconds, each spoken over, has fewer."""


def talk_of(facts: Facts) -> Json:
    """Place the user's turns, their answers and all speech over speech.

    None without two voices to place: in chats and transcriptions, and where a redaction took the
    user's sound and the log does not say where it was.
    """
    talk = facts.conversation
    if facts.work != "unit" or "speech" in facts.lost or not (talk.user or talk.model):
        return None
    turns = Turns(talk)
    return {
        "user": _spans(talk.user),
        "model": _spans(talk.model),
        "overlaps": _spans(shared(talk.user, talk.model)),
        "turns": [
            {
                **_ends(turn.speech.begin, turn.speech.end),
                "delay_ns": None if turn.delay is None else ns_of(turn.delay),
                "answer_ns": None if turn.answer is None else ns_of(turn.answer.begin),
                "is_silent": turn.is_silent and turn.is_judged,
            }
            for turn in turns.turns[:TALK_POINTS_MAX]
        ],
        "barge_ins": [
            {**_ends(it.speech.begin, it.over.end), "is_yielded_to": it.is_yielded_to}
            for it in turns.barge_ins[:TALK_POINTS_MAX]
        ],
    }


def _ends(begin: int, end: int) -> dict[str, Json]:
    return {"begin_ns": ns_of(begin), "end_ns": ns_of(end)}


def measures_of(facts: Facts) -> Json:
    """List the recording's measures, in the order of their table, each with its definition."""
    values = own_values(score(facts))
    known = [it for it in MEASURES.values() if it.name in values]
    names = ("name", "unit", "definition")
    return [{n: getattr(it, n) for n in names} | {"value": values[it.name]} for it in known]


def _spans(spans: Iterable[Span]) -> Json:
    return [[ns_of(span.begin), ns_of(span.end)] for span in [*spans][:TALK_POINTS_MAX]]


# -- the session -----------------------------------------------------------------------------------


POINTS_MAX: Final = 50_000
"""Of one line, and of one kind of mark: a longest session has a few thousand."""


class Narrator(Inspector):
    """Narrates a session record by record; what `Inspector` collects comes with the last part.

    Args:
        head: the fields of the log's `session` record.
    """

    def __init__(self, head: Fields) -> None:
        super().__init__()
        self.head: Final = head
        self.dialogue: Final = Dialogue()
        self._parts: list[Part] = []
        self._collector: Final = FactsCollector(
            head, self, also=lambda it: self._parts.extend(self.dialogue.take(it))
        )
        self._rows: list[Json] = []
        self._places: dict[int, dict[str, Json]] = {}
        self._arrived: deque[int] = deque()
        self._points: dict[str, list[Json]] = {"waiting": [], "queue": [], "kv": [], "marks": []}
        self._damages: list[Json] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._collector.__exit__(*error)

    def narrate(self, item: Record | Damage) -> list[Part]:
        """Add the next record, or damage; return the parts that are complete by now."""
        before = {} if self.session is None else self.session.counts
        decoded = self.take(item)
        self._collector.take(item, decoded)
        if isinstance(item, Damage):
            self._damages.append([item.first_seq, item.records, item.reason, plain(item.detail)])
        if decoded is not None:
            kept = "" if decoded.short is None else decoded.short.told
            self._rows.append(row_of(decoded.record, kept))
            self._note_arrivals(decoded.record, before)
            self._note(decoded)
        return self._flush(ROWS_A_PART)

    def conclude(
        self, *, replayed: bool = False, comparison: Comparison | None = None
    ) -> list[Part]:
        """Give the last parts, if `replayed` with the verdict of logic replay."""
        facts = self._collector.end()
        parts = [*self._flush(), *self.dialogue.end()]
        inspected, places = to_json(self.inspection(self.head)), self._places
        divergence = self.replayer.report().divergence
        found = [] if divergence is None else [finding_of(divergence)]
        found += comparison.findings if comparison is not None else ()
        story: dict[str, Json] = {
            **{name: plain(value) for name, value in inspected.items() if name not in _RESHAPED},
            "units": [
                {name: plain(value) for name, value in it.items()} | places.get(it["index"], {})
                for it in inspected["units"]
            ],
            "turns": [plain(turn) for turn in inspected["turns"]],
            "states": [[span["state"], span["at_ns"]] for span in inspected["states"]],
            "drops": [plain(attrs.asdict(drop)) for drop in self.drops[:POINTS_MAX]],
            "errors": [plain(attrs.asdict(error)) for error in self.errors[:POINTS_MAX]],
            "shortened": [plain(it) for it in inspected["shortened"][:POINTS_MAX]],
            "playback": [plain(it) for it in inspected["playback"][:POINTS_MAX]],
            "said": [[*at, plain(text), seq] for *at, text, seq in self.dialogue.words],
            "pauses": self.dialogue.pauses,
            **self._points,
            "damages": self._damages[:POINTS_MAX],
            "findings": [plain(attrs.asdict(finding)) for finding in found],
            "talk": talk_of(facts),
            "measures": measures_of(facts),
            "forced_units": self.forced_units,
            "near_tie_logits": NEAR_TIE_LOGITS,
            "verdict": self._verdict() if replayed else None,
            "compared": None
            if comparison is None
            else {"name": plain(comparison.name), "differences": len(comparison.findings)},
            "instructions": plain(typed(self.opening, "instructions", str)),
            "transcriber": plain(self.opened.limits.transcriber) if self.opened else "",
            "context_tokens": self.opened.limits.context_tokens if self.opened else None,
            "pictures_left_out": self.dialogue.pictures.left_out,
            "sound_left_out_s": sum(it.left_out_s for it in self.dialogue.tracks.values()),
        }
        return [*parts, Part("story", story)]

    def _verdict(self) -> str:
        report = self.replayer.report()
        if report.damage_count:
            return "damaged"
        return "diverged" if report.divergence is not None else "identical"

    def _flush(self, rows_min: int = 1) -> list[Part]:
        """Give what is complete, with the rows if there are so many."""
        parts, self._parts = self._parts, []
        if len(self._rows) >= rows_min:
            parts.append(Part("rows", self._rows))
            self._rows = []
        return parts

    # -- from stepping --------------------------------------------------------------------------

    def _note_arrivals(self, record: Record, before: Mapping[str, int]) -> None:
        """Count the waiting seconds of input: those that came, and those that were dropped."""
        session = self.session
        if session is None or self.replayer.is_stopped:
            self._arrived.clear()
            return
        after = session.counts
        gone = sum(after[name] - before.get(name, 0) for name in ("units", "units_dropped"))
        waited = len(self._arrived)
        came = session.units_waiting + gone - waited
        self._arrived.extend([record.at_ns] * came)
        for _ in range(min(len(self._arrived), gone) - (after["units"] - before.get("units", 0))):
            self._arrived.popleft()
        if after["units"] > before.get("units", 0) and self._arrived:
            self._place(after["units"] - 1, record.seq, self._arrived.popleft())
        if session.units_waiting != waited:
            self._point("waiting", record.at_ns, session.units_waiting)

    # -- from records ---------------------------------------------------------------------------

    def _note(self, decoded: DecodedRecord) -> None:
        record = decoded.record
        if record.kind == "mark":
            self._mark("mark", record, record.fields)
        elif decoded.effect:
            self._note_effect(decoded.effect, record)
        if decoded.event is not None:
            self._note_move(decoded.event, record)
            self._note_event(decoded.event)

    def _note_move(self, event: ev.Event, record: Record) -> None:
        match event:
            case ev.BackendLost():
                self._mark("move", record, {"why": "lost"})
            case ev.LeaseRevoked():
                self._mark("move", record, {"why": "drained"})
            case ev.Forked():
                self._mark("forked", record, {})
            case ev.PeerAttached(after=after):
                self._mark("back", record, {"seq": after + 1})
            case ev.PeerGone() | ev.SendFailed() if self.opened is not None:
                if self.opened.resume_hash:
                    self._mark("away", record, {})
            case ev.Rebuilt(steps=steps):
                self._mark("rebuilt", record, {"steps": steps})

    def _note_event(self, event: ev.Event) -> None:
        at_ns = event.at_ns
        match event:
            case ev.TicketMoved(place=place):
                self._point("queue", at_ns, place.position, place.queue_length)
            case ev.SlotLeased() | ev.TicketLeft() | ev.TicketCancelled() | ev.AdmissionRefused():
                self._point("queue", at_ns, 0, 0)
            case ev.BackendOpened(opened=opened):
                self._point("kv", at_ns, opened.prompt_length)
            case ev.UnitDone(result=made) | ev.TurnDone(result=made) | ev.ChunkDone(result=made):
                self._point("kv", at_ns, made.kv_length)
                if isinstance(event, ev.UnitDone) and made.margin and made.index in self._places:
                    self._places[made.index]["margin"] = plain(made.margin)
            case ev.FinalizeDone(finalized=finalized):
                self._point("kv", at_ns, finalized.kv_length)
            case ev.TurnPrefilled(prefill=prefill):
                self._point("kv", at_ns, prefill.input_tokens)
            case ev.BackendReleased():
                self._point("kv", at_ns, 0)
            case ev.RollbackDone(index=index) if index in self._places:
                self._places[index]["undone_ns"] = at_ns

    def _note_effect(self, effect: str, record: Record) -> None:
        fields, current = record.fields, self.model_calls.current
        match effect:
            case "StartUnit" if current is not None and current.seq == record.seq:
                self._place(current.index, record.seq)
            case "InterruptUnit" | "InterruptTurn":
                self._mark("interrupt", record, {"index": fields.get("index")})

    def _place(self, unit: int, seq: int, arrived_ns: int | None = None) -> None:
        """Note a unit's place in the log, and the facts known only from stepping."""
        place = self._places.setdefault(unit, {"seq": 0, "arrived_ns": None, "undone_ns": None})
        place |= {"seq": seq} if arrived_ns is None else {"seq": seq, "arrived_ns": arrived_ns}

    def _mark(self, kind: str, record: Record, fields: Fields) -> None:
        self._point("marks", record.at_ns, kind, record.seq, plain(fields))

    def _point(self, line: str, *values: Json) -> None:
        if len(self._points[line]) < POINTS_MAX:
            self._points[line].append([*values])


_RESHAPED: Final = frozenset(
    {"units", "turns", "states", "drops", "errors", "marks", "shortened"} | {"playback"}
)
