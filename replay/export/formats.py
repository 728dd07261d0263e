"""A recorded session in the formats of other tools: `antiphon export`.

Results are on stdout, an error is one line on stderr. The file is written next to its name, with
its log's permissions, and renamed when it is complete: a failed export leaves no new file, and does
not touch an existing one, which is replaced with `--force` only. Sound and video: `sound`.

**Captions** (SubRip or WebVTT). Words with sound are a caption for as long as the sound lasts, one
for each unit. Words without sound are joined within one answer without a gap, and stand long enough
to be read. Control characters, line breaks and lone surrogates become spaces. Marks are comments in
WebVTT only.

**JSON lines** have an object for each moment, without its sound or picture. The first line is
`session`, the last `end`. Each has its `kind`, and all but the first the time `at_ms` at which it
is heard, shown or said: milliseconds from the session's start.

| kind | more keys |
|---|---|
| `session` | `recording_id`, `model`, `mode`, `wall_ms` (Unix); null if unknown |
| `sound` | `voice`, `came_ms` (arrived or sent), `begin` and `samples` at `rate_hz`, `until_ms` |
| `words` | `voice`, `came_ms`, `until_ms` (null without sound), `text`, `response_id` |
| `picture` | `bytes` of the JPEG file |
| `end` | `finished`: the log has its end; `damage_count` |
| any other | `text`: its details; see `timeline.NoteKind` |

`transcribed` is true where a transcriber wrote the words down, and absent else.

**Chat** is one line, as OpenAI's training of chat models takes it: `messages` of the roles
`system`, `user`, `assistant` and `tool`, and `tools`. It has words, calls and results, and no
sound. The result of a call comes directly after it, whatever was said in between.

**MCAP**, which Foxglove shows, has topics in Foxglove's schemas (`TOPICS`). A message's `log_time`
is when it is heard, shown or said, `publish_time` when it arrived or was sent; both are Unix time
if the log has the session's start. The metadata record `session` names the recording. Foxglove
supports only 16-bit sound: the log keeps every byte. Messages are JSON with their schemas in the
file, which needs no generated code: in zstd chunks that is a sixth more than raw bytes.

**A dataset** has each second of a duplex session as one sample of a WebDataset shard: a tar archive
in which the files of a sample follow one another and share the name before the first dot
(https://github.com/webdataset/webdataset):

    ID-000003.user.wav   what the model heard: 16 kHz, float32
    ID-000003.0.jpg      the pictures that it saw, in order
    ID-000003.model.wav  what it said: 24 kHz, float32; not of a listen
    ID-000003.json       what it decided, its text, and about which session

Units that failed or were undone are left out. What a redaction took out is left out too, with the
tokens that say it: silence is not a sample of speech. Equal logs give equal bytes: files have no
times or owner.
"""

from __future__ import annotations

import errno
import io
import json
import struct
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, get_args

import attrs
import click
import numpy as np
import orjson
import pybase64

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values import model
from protocol.values.limits import NS_PER_MS, NS_PER_S, OF_MODE
from recorder.format.format import SUFFIX, Fields, Record
from recorder.read.scan import Damage
from recorder.write.files import new_file
from runtime.measures.conversation import RATE_HZ
from runtime.measures.talk import Sound

from ..rerun.full import model_of
from ..shared import commands
from ..shared.commands import progress
from ..shared.recordings import (
    RecordingType,
    below,
    next_to,
    removed_in,
    show_bytes,
    show_seconds,
    typed,
)
from ..story.model_calls import asked_texts
from . import sound
from .sound import to_pcm16
from .timeline import Moment, Note, Picture, Timeline, Words

# -- captions --------------------------------------------------------------------------------------


CAPTION_NS_MIN: Final = NS_PER_S
"""A shorter one flickers."""
CHARS_PER_S: Final = 15
"""As fast as most people read along."""
GAP_NS_MAX: Final = 2 * NS_PER_S
"""Words that come later than that get a caption of their own, and are not shown ahead."""
CHARS_MAX: Final = 84
"""Two lines of 42, as broadcasters show at once."""


@attrs.frozen(kw_only=True)
class Caption:
    """One caption; times in nanoseconds of the session's clock."""

    begin_ns: int
    end_ns: int
    speaker: str
    text: str


def captions(moments: Iterable[Moment]) -> Iterator[Caption]:
    """Make captions of words, in the order in which they begin."""
    silent: Words | None = None
    last_ns = 0
    for moment in moments:
        if not isinstance(moment, Words):
            continue
        if silent is not None and _goes_on(silent, last_ns, moment):
            silent = attrs.evolve(silent, text=silent.text + moment.text)
            last_ns = moment.begin_ns
            continue
        if silent is not None:
            yield from _silent_caption(silent, last_ns, moment)
        silent, last_ns = None, moment.begin_ns
        if moment.end_ns is None:
            silent = moment
        else:
            least_ns = moment.begin_ns + CAPTION_NS_MIN if moment.is_transcribed else 0
            yield from _caption(moment, max(moment.end_ns, least_ns))
    if silent is not None:
        yield from _silent_caption(silent, last_ns, None)


def write_srt(timeline: Timeline, file: BinaryIO) -> None:
    """Write SubRip."""
    for number, caption in enumerate(captions(timeline), start=1):
        times = _times(caption, ",")
        text = caption.text.replace("-->", "->")
        file.write(f"{number}\n{times}\n{caption.speaker}: {text}\n\n".encode())


def write_vtt(timeline: Timeline, file: BinaryIO) -> None:
    """Write WebVTT, each caption with its voice."""
    marks: list[Note] = []
    file.write(b"WEBVTT\n")
    for caption in captions(_with_marks(timeline, marks)):
        _write_marks(marks, file)
        times = _times(caption, ".")
        text = caption.text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        file.write(f"\n{times}\n<v {caption.speaker}>{text}\n".encode())
    _write_marks(marks, file)


def _with_marks(moments: Iterable[Moment], marks: list[Note]) -> Iterator[Moment]:
    for moment in moments:
        if isinstance(moment, Note) and moment.kind == "mark":
            marks.append(moment)
        yield moment


def _write_marks(marks: list[Note], file: BinaryIO) -> None:
    for mark in marks:
        time, text = _clock(mark.begin_ns // NS_PER_MS, "."), plain(mark.text).replace("-->", "->")
        file.write(f"\nNOTE {time} {text}\n".encode(errors="replace"))
    marks.clear()


def plain(text: str) -> str:
    """Replace characters that a terminal or a player could take for more than text by spaces."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _goes_on(words: Words, last_ns: int, more: Words) -> bool:
    if more.begin_ns - last_ns > GAP_NS_MAX:
        return False
    is_same = (words.voice, words.response_id) == (more.voice, more.response_id)
    fits = len(words.text) + len(more.text) <= CHARS_MAX
    return is_same and more.end_ns is None and words.voice == "model" and fits


def _silent_caption(words: Words, last_ns: int, following: Words | None) -> Iterator[Caption]:
    """Show words without sound until they are read, or the next words come."""
    reading_ns = max(CAPTION_NS_MIN, len(words.text) * NS_PER_S // CHARS_PER_S)
    end_ns = last_ns + reading_ns
    if following is not None and following.voice == words.voice:
        end_ns = min(end_ns, max(following.begin_ns, words.begin_ns + CAPTION_NS_MIN))
    yield from _caption(words, end_ns)


def _caption(words: Words, end_ns: int) -> Iterator[Caption]:
    text = " ".join(plain(words.text).split())
    if text:
        yield Caption(begin_ns=words.begin_ns, end_ns=end_ns, speaker=words.speaker, text=text)


def _times(caption: Caption, point: str) -> str:
    """Write the times of a caption; one that ends where the next begins does not overlap it."""
    begin_ms = caption.begin_ns // NS_PER_MS
    end_ms = max(caption.end_ns // NS_PER_MS, begin_ms + 1)
    return f"{_clock(begin_ms, point)} --> {_clock(end_ms, point)}"


def _clock(at_ms: int, point: str) -> str:
    seconds, ms = divmod(at_ms, 1000)
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours:02}:{minute:02}:{second:02}{point}{ms:03}"


# -- JSON lines ------------------------------------------------------------------------------------


def write_jsonl(timeline: Timeline, file: BinaryIO) -> None:
    """Write the time line."""
    head, story = timeline.head, timeline.story
    first = {"kind": "session", "recording_id": typed(head, "recording_id", str)}
    first |= {"model": model_of(head), "mode": typed(below(head, "config"), "mode", str)}
    _dump(first | {"wall_ms": typed(head, "wall_ms", int)}, file)
    for moment in timeline:
        _dump(_line(moment), file)
    end = {"finished": story.end.finished, "damage_count": story.damage_count}
    _dump({"kind": "end", "at_ms": _ms(timeline.duration_ns), **end}, file)


def _dump(body: object, file: BinaryIO) -> None:
    """Write a line of JSON, in ASCII: a log can hold lone surrogates."""
    file.write(json.dumps(body).encode() + b"\n")


def _line(moment: Moment) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "", "at_ms": _ms(moment.begin_ns)}
    if isinstance(moment, Sound | Words):
        until_ms = None if moment.end_ns is None else _ms(moment.end_ns)
        line |= {"voice": moment.voice, "came_ms": _ms(moment.at_ns), "until_ms": until_ms}
    match moment:
        case Sound(begin=begin, end=end):
            line |= {"begin": begin, "samples": end - begin, "rate_hz": RATE_HZ[moment.voice]}
            return line | {"kind": "sound"}
        case Words(text=text, response_id=response_id):
            line |= {"text": text, "response_id": response_id, "kind": "words"}
            return line | ({"transcribed": True} if moment.is_transcribed else {})
        case Picture(jpeg=jpeg):
            return line | {"bytes": len(jpeg), "kind": "picture"}
        case Note(kind=kind, text=text):
            return line | {"text": text, "kind": kind}


def _ms(at_ns: int) -> float:
    return round(at_ns / NS_PER_MS, 3)


# -- MCAP ------------------------------------------------------------------------------------------


START_NS_MAX: Final = 1 << 63
"""Unix time in the year 2262. MCAP has 64 bits for a time, a log 63 for its own."""
TIME_NS_MAX: Final = (1 << 64) - 1

_TIME: Final[Mapping[str, object]] = {
    "type": "object",
    "title": "time",
    "properties": {
        "sec": {"type": "integer", "minimum": 0},
        "nsec": {"type": "integer", "minimum": 0, "maximum": NS_PER_S - 1},
    },
}
_TEXT: Final[Mapping[str, object]] = {"type": "string"}
_COUNT: Final[Mapping[str, object]] = {"type": "integer", "minimum": 0}
_BYTES: Final[Mapping[str, object]] = {"type": "string", "contentEncoding": "base64"}
_LEVELS: Final = ("UNKNOWN", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")
_LEVEL: Final[Mapping[str, object]] = {
    "title": "foxglove.LogLevel",
    "oneOf": [{"title": name, "const": number} for number, name in enumerate(_LEVELS)],
}

RAW_AUDIO: Final = "foxglove.RawAudio"
IMAGE: Final = "foxglove.CompressedImage"
LOG: Final = "foxglove.Log"
SCHEMAS: Final[Mapping[str, Mapping[str, object]]] = {
    RAW_AUDIO: {"timestamp": _TIME, "data": _BYTES, "format": _TEXT}
    | dict.fromkeys(("sample_rate", "number_of_channels"), _COUNT),
    IMAGE: {"timestamp": _TIME, "frame_id": _TEXT, "data": _BYTES, "format": _TEXT},
    LOG: {"timestamp": _TIME, "level": _LEVEL}
    | dict.fromkeys(("message", "name", "file"), _TEXT)
    | {"line": _COUNT},
}
"""The fields of each schema, by Foxglove's name; all are required."""
TOPICS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("/user/audio", "/model/audio"), RAW_AUDIO),
    "/user/image": IMAGE,
    **dict.fromkeys(("/user/text", "/model/text", "/session"), LOG),
}
_SEVERITIES: Final[Mapping[str, str]] = {
    **dict.fromkeys(("error", "damage"), "ERROR"),
    **dict.fromkeys(("shortened", "dropped", "unheard", "going_away", "ahead"), "WARNING"),
}


def write_mcap(timeline: Timeline, file: BinaryIO) -> None:
    """Write the session."""
    from mcap.writer import Writer  # of the extra `media`

    writer = Writer(file)
    writer.start(library=f"antiphon {version('antiphon')}")
    schemas = {name: writer.register_schema(name, "jsonschema", _schema(name)) for name in SCHEMAS}
    channels = {
        topic: writer.register_channel(topic, "json", schemas[schema])
        for topic, schema in TOPICS.items()
    }
    start_ns = _start_ns(timeline)
    writer.add_metadata("session", _facts(timeline.head))
    for number, moment in enumerate(timeline):
        log_time = min(start_ns + moment.begin_ns, TIME_NS_MAX)
        topic, body = _message(moment, log_time)
        came_ns = moment.at_ns if isinstance(moment, Sound | Words) else moment.begin_ns
        writer.add_message(
            channels[topic],
            log_time=log_time,
            data=orjson.dumps(body),
            publish_time=start_ns + came_ns,
            sequence=number,
        )
    writer.finish()  # type: ignore[no-untyped-call]


def _start_ns(timeline: Timeline) -> int:
    wall_ms = timeline.head.get("wall_ms")
    start_ns = wall_ms * NS_PER_MS if isinstance(wall_ms, int) else 0
    return start_ns if 0 <= start_ns <= START_NS_MAX else 0


def _schema(name: str) -> bytes:
    fields = SCHEMAS[name]
    body = {"title": name, "type": "object", "properties": fields, "required": list(fields)}
    return orjson.dumps(body)


def _facts(head: Fields) -> dict[str, str]:
    model = below(head, "config").get("model")
    facts = {"recording_id": head.get("recording_id"), "model": model}
    facts["wall_ms"] = head.get("wall_ms")
    return {name: plain(str(fact)) for name, fact in facts.items() if fact is not None}


def _message(moment: Moment, at_ns: int) -> tuple[str, dict[str, Any]]:
    seconds, ns = divmod(at_ns, NS_PER_S)
    time = {"timestamp": {"sec": seconds, "nsec": ns}}
    match moment:
        case Sound(voice=voice, pcm=pcm):
            samples = np.frombuffer(pcm, "<f4", count=len(pcm) // model.SAMPLE_BYTES)
            sound = {
                "data": pybase64.b64encode_as_string(to_pcm16(samples).astype("<i2").tobytes()),
                "format": "pcm-s16",
                "sample_rate": RATE_HZ[voice],
                "number_of_channels": 1,
            }
            return f"/{voice}/audio", time | sound
        case Picture(jpeg=jpeg):
            data = pybase64.b64encode_as_string(jpeg)
            return "/user/image", time | {"frame_id": "camera", "data": data, "format": "jpeg"}
        case Words(voice=voice, text=text):
            name = f"{voice}, transcribed" if moment.is_transcribed else voice
            return f"/{voice}/text", time | _log("INFO", name, text)
        case Note(kind=kind, text=text):
            return "/session", time | _log(_SEVERITIES.get(kind, "INFO"), kind, text or kind)


def _log(level: str, name: str, text: str) -> dict[str, Any]:
    message = text.encode(errors="replace").decode()  # JSON in UTF-8 holds no lone surrogates
    return {"level": _LEVELS.index(level), "message": message, "name": name, "file": "", "line": 0}


# -- a chat ----------------------------------------------------------------------------------------


NO_RESULT: Final = "error: there is no result"
"""In place of the result of a call that has none."""


def write_chat(timeline: Timeline, file: BinaryIO) -> None:
    """Write the words, calls and results of a session as a chat."""
    messages: list[dict[str, Any]] = []
    results: dict[str, str] = {}
    turn: tuple[str, str] | None = None
    for moment in timeline:
        if not isinstance(moment, Words):
            continue
        for part in moment.tools:
            if isinstance(part, model.ToolCall):
                function = {"name": part.name, "arguments": part.arguments}
                called = [{"id": part.id, "type": "function", "function": function}]
                messages.append({"role": "assistant", "content": None, "tool_calls": called})
                messages.append({"role": "tool", "tool_call_id": part.id})
            else:
                results[part.call_id] = part.output
        of = (moment.voice, moment.response_id)
        if moment.tools:
            turn = None
        elif turn == of and (moment.response_id or moment.is_transcribed):
            messages[-1]["content"] += moment.text
        else:
            role = "user" if moment.voice == "user" else "assistant"
            messages.append({"role": role, "content": moment.text})
            turn = of
    for message in messages:
        if message["role"] == "tool":
            message["content"] = results.get(message["tool_call_id"], NO_RESULT)
    prompt, tools = _asked_of(timeline)
    system = [{"role": "system", "content": prompt}] if prompt else []
    _dump({"messages": system + messages, **({"tools": tools} if tools else {})}, file)


def _asked_of(timeline: Timeline) -> tuple[str, list[dict[str, Any]]]:
    """The prompt and the tools of a session: of a chat, those of a question with tools."""
    opening, asked = timeline.story.opening, timeline.asked
    prompt, tools = typed(opening, "instructions", str) or "", typed(opening, "tools", list) or []
    if asked is not None:
        first = asked.messages[0]
        prompt = "\n".join(asked_texts(first.content)) if first.role == "system" else ""
        tools = [attrs.asdict(tool) for tool in asked.tools]
    return prompt, [_tool(tool) for tool in tools if isinstance(tool, Mapping)]


def _tool(fields: Fields) -> dict[str, Any]:
    function: dict[str, Any] = {name: fields.get(name, "") for name in ("name", "description")}
    with suppress(ValueError):  # a redaction leaves no schema
        function["parameters"] = json.loads(typed(fields, "parameters", str) or "")
    return {"type": "function", "function": function}


# -- a dataset -------------------------------------------------------------------------------------


USER: Final = ("audio", "user")
PICTURES: Final = ("video", "user")
VOICE: Final = ("audio", "model")
TEXT: Final = ("text", "model")
WAVE_FLOAT: Final = 3
"""The format tag of IEEE floats in a WAV file."""


class NoDatasetError(ValueError):
    """A session has no seconds for a trainer; the message says why."""


def write_dataset(timeline: Timeline, file: BinaryIO) -> None:
    """Write the units of a session; `NoDatasetError`: it has none, or none that can be read."""
    name = typed(timeline.head, "recording_id", str) or "session"
    count = 0
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as shard:
        for at_ns, unit, result in _answered(timeline):
            count += 1
            for ending, data in _sample(timeline.head, name, at_ns, unit, result):
                info = tarfile.TarInfo(f"{name}-{unit.index:06}.{ending}")
                info.size = len(data)
                shard.addfile(info, io.BytesIO(data))
    opened = timeline.story.opened
    if opened is not None and OF_MODE[opened.mode].work != "unit":
        raise NoDatasetError(f"mode {opened.mode}: only duplex sessions have units")
    if not count:
        raise NoDatasetError("no unit in it was answered, or its events cannot be run again")


def _answered(timeline: Timeline) -> Iterator[tuple[int, model.Unit, model.UnitResult]]:
    """Yield each unit that was answered and not undone: when it began, itself, its result."""
    at_ns, unit, result = 0, None, None
    for decoded in timeline.decoded_records():
        match decoded.event:
            case ev.UnitDone(result=done) if unit is not None and done.index == unit.index:
                result = done
            case ev.RollbackDone(index=index) if unit is not None and index == unit.index:
                unit = None
        for effect in () if decoded.step is None else decoded.step.effects:
            if isinstance(effect, ef.StartUnit):
                if unit is not None and result is not None:
                    yield at_ns, unit, result
                at_ns, unit, result = decoded.record.at_ns, effect.unit, None
    if unit is not None and result is not None:
        yield at_ns, unit, result


def _sample(
    head: Fields, name: str, at_ns: int, unit: model.Unit, result: model.UnitResult
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a unit, each with its ending."""
    lost = removed_in(head)
    if USER not in lost:
        yield "user.wav", _wav(unit.pcm, model.INPUT_RATE_HZ)
    if PICTURES not in lost:
        for number, jpeg in enumerate(unit.frames):
            yield f"{number}.jpg", jpeg
    if VOICE not in lost and result.pcm and not result.is_listen:
        yield "model.wav", _wav(result.pcm, model.OUTPUT_RATE_HZ)
    body: dict[str, object] = {
        "recording_id": name,
        "model": model_of(head),
        "mode": typed(below(head, "config"), "mode", str),
        "unit": unit.index,
        "at_ms": _ms(at_ns),
        "is_listen": result.is_listen,
        "forced": unit.force_listen,
        "cut": result.cut is not None,
        "end_of_turn": result.end_of_turn,
        "lost": sorted(" ".join((side, kind)) for kind, side in lost),
    }
    if TEXT not in lost:
        body |= {"text": result.text, "decided_ids": [*result.decided_ids]}
    if VOICE not in lost:
        body["codec_ids"] = [*result.codec_ids]
    yield "json", json.dumps(body, sort_keys=True).encode()


def _wav(pcm: bytes, rate_hz: int) -> bytes:
    """Put a header before float32 LE mono; a library's has the time in it."""
    form = struct.pack(
        "<HHIIHH", WAVE_FLOAT, 1, rate_hz, rate_hz * model.SAMPLE_BYTES, model.SAMPLE_BYTES, 32
    )
    count = struct.pack("<I", len(pcm) // model.SAMPLE_BYTES)
    chunks = b"".join(
        name + struct.pack("<I", len(data)) + data
        for name, data in ((b"fmt ", form), (b"fact", count), (b"data", pcm))
    )
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


# -- the command -----------------------------------------------------------------------------------


Format = Literal["wav", "srt", "vtt", "mp4", "jsonl", "chat", "mcap", "dataset"]
FORMATS: Final[tuple[Format, ...]] = get_args(Format)
SUFFIXES: Final[Mapping[str, Format]] = {
    **{f".{name}": name for name in FORMATS},
    ".tar": "dataset",
}
"""Formats by a file's ending."""
STREAMS: Final[frozenset[Format]] = frozenset({"srt", "vtt", "jsonl", "chat"})
"""Formats written from start to end, which may go to stdout."""

_WRITERS: Final[Mapping[Format, Callable[[Timeline, BinaryIO], None]]] = {
    **{"wav": sound.write_wav, "mp4": sound.write_mp4, "srt": write_srt, "vtt": write_vtt},
    **{"jsonl": write_jsonl, "chat": write_chat, "mcap": write_mcap, "dataset": write_dataset},
}


def export(
    head: Fields,
    items: Iterable[Record | Damage],
    to: Format,
    output: Path | BinaryIO,
    *,
    like: Path | None = None,
    replaces: bool = False,
) -> Timeline:
    """Write a log's session, given its head, records in order and damage; return its time line.

    Args:
        output: the file, or a stream for one of `STREAMS`.
        like: the log: the same people may read and write the file.
        replaces: replace an existing file.

    Raises:
        FileExistsError: there is a file of that name.
        OSError: it cannot be written.
        RecorderError: the log cannot be read.
        TooLongError: the session is longer than the format's sound can be.
    """
    timeline = Timeline(head, items)
    with opened(output, like, replaces=replaces) as file:
        _WRITERS[to](timeline, file)
    return timeline


@contextmanager
def opened(output: Path | BinaryIO, like: Path | None, *, replaces: bool) -> Iterator[BinaryIO]:
    """Open a file that is there once it is whole; a stream stays as it is."""
    if not isinstance(output, Path):
        yield output
        return
    with new_file(output, like=like, replaces=replaces) as part, part.open("w+b") as file:
        yield file


@click.command("export")
@click.argument("log", type=RecordingType())
@click.option(
    "--to", type=click.Choice(FORMATS), help="The format [default: the suffix of --output]."
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file [default: next to LOG]; - is stdout.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def export_command(
    *, log: Path, to: Format | None, output: Path | None, force: bool, as_json: bool
) -> None:
    """Write the recorded session LOG in a format of other tools.

    \b
      wav    both voices in stereo, the user left, the model right, to the sample
      mp4    the same with the user's pictures
      srt    captions, as SubRip; vtt: as WebVTT
      mcap   sound, pictures and text for Foxglove and other readers of MCAP
      jsonl  the time line: a line for each sound, picture, text, loss and refusal
      chat   words, calls of tools and results, in OpenAI's format for training chat models
      dataset  the seconds of a duplex session for a trainer, as a shard of WebDataset (.tar)

    All keep the session's clock: 0 is when the client connected. The user's sound ends when it
    arrived, the model's begins when it was sent, each after earlier sound of the same voice. A log
    whose server was killed is exported as far as it goes. WAV and MP4 hold six hours at most. The
    file has the permissions of LOG.

    \b
    Examples:
      antiphon export sessions/rec-000002.session.zst --to wav
      antiphon export sessions/rec-000002.session.zst -o call.mp4
      antiphon export crash.session.zst --to jsonl -o - | jq -r 'select(.text).text'

    \b
    Exit codes:
      0  written; damage of the log is reported, and the file has gaps there
      2  the log cannot be read, or the file cannot be written; no file is left
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    suffix = None if output is None else SUFFIXES.get(output.suffix.lower())
    chosen = to or suffix
    if chosen is None:
        raise click.UsageError(f"give --to, or an --output that ends with {', '.join(SUFFIXES)}")
    to_stdout = str(output) == "-"
    if to_stdout and chosen not in STREAMS:
        raise click.UsageError(f"{chosen} needs a file, not stdout")
    ending = "tar" if chosen == "dataset" else chosen
    target = output or next_to(log, f"{log.name.removesuffix(SUFFIX)}.{ending}")
    commands.refuse_log_as_output(target, [log])
    try:
        with commands.opened_log(log) as reader:
            to_file = sys.stdout.buffer if to_stdout else target
            with progress(reader.tail_bytes, f"writing {chosen}") as watch:
                items = commands.records_of(log, reader, watch)
                made = export(reader.head.fields, items, chosen, to_file, like=log, replaces=force)
    except NoDatasetError as error:
        raise commands.UnusableError(f"{log}: {error}") from error
    except (OSError, sound.TooLongError) as error:
        if to_stdout and isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise  # stdout is the command's, not a file
        raise commands.unwritable(error, target) from error
    finished, damage_count = made.story.end.finished, made.story.damage_count
    if damage_count:
        click.echo(f"the log is damaged and has gaps; places: {damage_count}", err=True)
    if to_stdout:
        return
    size = target.stat().st_size
    body = {
        "log": str(log),
        "output": str(target),
        "format": chosen,
        "duration_ms": _ms(made.duration_ns),
        "bytes": size,
        "finished": finished,
        "damage_count": damage_count,
    }
    open_end = "" if finished else ", no fin: still open, or its server was killed"
    line = f"{target}  {show_seconds(made.duration_ns)}, {show_bytes(size)}{open_end}"
    commands.finish(body, [line], as_json=as_json)
