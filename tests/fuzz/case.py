"""One conversation of a hostile client as a value, as a file, and what came of it.

A file is JSON lines in the form of `fixtures/wire`: the first has the address, each other line is
one step. `receive` and `close` are the server's messages when the file was made, `bye` the client's
close: for readers, because only `await` waits. Further steps are:

| step | is |
|---|---|
| `await` | `turn`: the queue is done; `answer`: all answers have come |
| `fault` | a fault at the client's end: a name of `FAULTS` |
| `raw` | bytes, in hex, put on the connection unchanged, even within a message |

Bodies hold markers, short JSON objects that stand for long values: those of `fixtures/wire`, and
four more. `{"$head": media type}` is base64 of the head of a file, `{"$deep": n}` are n nested
arrays, `{"$floats": [...]}` is base64 of these numbers, repeated for a second, and `{"$call": n}`
is the id of the n-th call of a tool that has come, or one that is unknown. An object is a
marker if its first key names one and all its keys begin with `$`; a literal marker is sent as a
text (`send_text`). A marker's size is bounded, and known before it is made.

Messages of the server are held to `protocol.wire.schema`, which reads the dialects' own tables.
Here it is closed: a message has the fields that are described and no others. Only what the server's
schemas use of JSON Schema is looked at; a test holds this to a full validator.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Final, get_args

import attrs
import numpy as np
import pybase64
import simplejpeg
import soundfile

from protocol.values.limits import Mode
from protocol.values.model import INPUT_RATE_HZ
from protocol.values.state import SessionKind, session_kind_of
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.schema import REQUEST_DIALECT, Message, describe
from runtime.net.http import LIVE_PATH
from runtime.serve.routing import AUDIO_LABELS, CHAT_PATH, DUPLEX_PATH, REALTIME_PATH
from tests.strategies.media import MEDIA

# -- markers --------------------------------------------------------------------------------------

MATERIAL_BYTES_MAX: Final = 8 * 1024 * 1024
"""A case's size with its markers replaced: parsers fail by form, and size has its own step."""
KINDS: Final = (
    *("$text", "$deep", "$pcm", "$floats", "$bytes", "$jpeg", "$wav", "$head", "$broken", "$call"),
)
"""The first keys of markers."""
DEPTH_MAX: Final = 300
"""Nested arrays: many more than a frame may have, few enough to be written."""
MADE_MAX: Final = 64
"""Media kept: the common ones, a megabyte at most each."""
HEADS: Final[Mapping[str, bytes]] = {medium.name: medium.samples[0] for medium in MEDIA}


NO_CALL: Final = "call_ffffffffffff"
"""The id of a call that has not come."""


class MarkerError(ValueError):
    """A marker is invalid."""


def fill(value: Any, calls: Sequence[str] = ()) -> Any:
    """Replace the markers in JSON; raises `MarkerError` for an invalid one."""
    if isinstance(value, list):
        return [fill(item, calls) for item in value]
    if not isinstance(value, dict):
        return value
    if is_marker(value):
        number = value.get("$call")
        if isinstance(number, int) and 0 <= number < len(calls):
            return calls[number]
        return _make(json.dumps(value))
    return {key: fill(item, calls) for key, item in value.items()}


def is_marker(value: object) -> bool:
    """Whether an object is a marker."""
    if not isinstance(value, dict) or next(iter(value), None) not in KINDS:
        return False
    return all(key.startswith("$") for key in value)


def size_of(value: Any) -> int:
    """The characters of JSON in full, to a tenth or a few hundred; `MarkerError`: invalid."""
    if isinstance(value, dict):
        if is_marker(value):
            return _marker_size(json.dumps(value))
        return 2 + sum(len(key) + 6 + size_of(item) for key, item in value.items())
    if isinstance(value, list):
        return 2 + sum(2 + size_of(item) for item in value)
    return len(value) + 2 if isinstance(value, str) else len(str(value))


@lru_cache(maxsize=MADE_MAX)
def _marker_size(text: str) -> int:
    marker = json.loads(text)
    try:
        (kind, value), *_ = marker.items()
        match kind:
            case "$pcm":
                size = 4 * value
            case "$floats":
                size = 4 * INPUT_RATE_HZ
            case "$wav":
                rate_hz = marker.get("$rate_hz", INPUT_RATE_HZ)
                size = 2 * value * rate_hz * marker.get("$channels", 1)
            case "$bytes":
                size = value
            case _:
                return len(str(_make(text)))
        return _size(size) * 4 // 3
    except MarkerError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise MarkerError(f"{text[:80]} is no marker") from error


@lru_cache(maxsize=MADE_MAX)
def _make(text: str) -> Any:
    marker = json.loads(text)
    try:
        if "$text" in marker:
            return "a" * _size(marker["$text"])
        if "$call" in marker:
            return NO_CALL
        if "$deep" in marker:
            return _nest(min(_size(marker["$deep"]), DEPTH_MAX))
        before = str(marker.get("$before", ""))  # as in a data URL
        return before + pybase64.b64encode(_bytes_of(marker)).decode()
    except MarkerError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise MarkerError(f"{text[:80]} is no marker") from error


def _size(value: Any) -> int:
    size = int(value)
    if not 0 <= size <= MATERIAL_BYTES_MAX:
        raise MarkerError(f"{size} is not from 0 to {MATERIAL_BYTES_MAX}")
    return size


def _nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _bytes_of(marker: Mapping[str, Any]) -> bytes:
    (kind, value), *_ = marker.items()
    match kind:
        case "$pcm":
            return _tone(_size(4 * value) // 4, marker.get("$nan_at"))
        case "$floats":
            return np.resize(np.array(value, "<f4"), INPUT_RATE_HZ).tobytes()
        case "$bytes":
            return bytes(_size(value))
        case "$jpeg":
            width, _, height = str(value).partition("x")
            _size(3 * int(width) * int(height))
            rows = np.linspace(0, 255, int(height), dtype=np.uint8)[:, None, None]
            picture = np.broadcast_to(rows, (int(height), int(width), 3))
            return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture)))
        case "$wav":
            rate_hz, channels = marker.get("$rate_hz", INPUT_RATE_HZ), marker.get("$channels", 1)
            file = io.BytesIO()
            _size(4 * value * rate_hz * channels)
            samples = np.zeros((int(value * rate_hz), channels), "<f4")
            soundfile.write(file, samples, rate_hz, format="WAV", subtype="PCM_16")
            return file.getvalue()
        case "$head":
            return HEADS[value]
        case "$broken":
            whole = _bytes_of(value)
            return whole[: len(whole) * 3 // 4]
    raise MarkerError(f"{kind} is no marker")


def _tone(samples: int, nan_at: int | None) -> bytes:
    at = np.arange(samples) / INPUT_RATE_HZ
    data = (0.1 * np.sin(2 * np.pi * 220 * at)).astype("<f4")
    if nan_at is not None:
        data[nan_at % max(1, samples)] = np.nan
    return data.tobytes()


# -- cases ----------------------------------------------------------------------------------------

SENDS: Final = ("send", "send_text", "send_binary", "send_size")
"""The steps that are a message of the client."""
FAULTS: Final[Mapping[str, str]] = {
    "reset": "the connection is dropped, without a goodbye of TCP",
    "half_close": "the client sends no more, and goes on reading",
    "stall": "the client reads no more",
    "ping": "a ping, and a pong without a ping",
    "fragments": "messages come in frames of 7 bytes from here on, 64 at most, pings between them",
    "dribble": "bytes come one after the other from here on, until 64 have come",
}
LOCAL_FAULTS: Final = ("reset", "half_close", "stall")
"""The faults that differ without a socket."""
AWAITS: Final = ("turn", "answer")
STEPS: Final = frozenset(
    {
        *SENDS,
        *("await", "fault", "raw", "wait_s", "leave", "occupy", "vacate"),
        *("receive", "close", "bye"),
    }
)
TOLD: Final = frozenset({"receive", "close", "bye"})
"""The server's messages, and the final goodbye; not played."""
FILE_BYTES_MAX: Final = 16 * 1024 * 1024
"""A transcript has a few steps with markers; a larger file is something else."""
STEPS_MAX: Final = 10_000
"""As above."""


class TranscriptError(Exception):
    """A file is no transcript; the text is one line."""


@attrs.frozen(kw_only=True)
class Step:
    """One step: its kind, and its value as JSON."""

    kind: str
    value: Any


@attrs.frozen(kw_only=True)
class Case:
    """One conversation, with a scripted model of `play.SCRIPTS`; None for its default slots."""

    dialect: str
    mode: Mode
    script: str = "default"
    slots: int | None = None
    steps: tuple[Step, ...]

    @property
    def connect(self) -> str:
        """The address: path and query."""
        return address_of(self.dialect, self.mode)

    @property
    def session_kind(self) -> SessionKind:
        """The session's kind."""
        return session_kind_of(self.mode, is_request=self.dialect == REQUEST_DIALECT)

    @property
    def dialects(self) -> tuple[str, ...]:
        """The dialects that the first message may select."""
        if self.session_kind is SessionKind.TRANSCRIPTION and self.dialect not in OPENAI_DIALECTS:
            return ("transcription", "transcription-responses")
        if self.session_kind is SessionKind.DUPLEX and self.dialect in {"realtime", "duplex-v1"}:
            return ("realtime", "duplex-v1")
        return (self.dialect,)

    @property
    def messages(self) -> int:
        """The number of messages that the client sends."""
        return sum(step.kind in SENDS for step in self.steps)


OPENAI_DIALECTS: Final = {"openai": "?model=tiny", "openai-transcription": "?intent=transcription"}
"""Dialects in which the server speaks first and no message ends the session; with their queries."""


@attrs.frozen(kw_only=True, order=True)
class Finding:
    """An error of a server; the label is the same in each run.

    `kind` is `crash`, `hang`, `undocumented`, `answer`, `close`, `internals` or `leak`.
    """

    kind: str
    label: str
    detail: str = attrs.field(default="", eq=False, order=False)


def address_of(dialect: str, mode: Mode) -> str:
    """The address for a dialect's client."""
    if dialect == REQUEST_DIALECT:
        return CHAT_PATH
    if dialect == "live":
        return LIVE_PATH
    if dialect == "vllm-omni":
        return f"{REALTIME_PATH}?duplex=1&mode={mode}"
    if dialect in OPENAI_DIALECTS:
        return f"{REALTIME_PATH}{OPENAI_DIALECTS[dialect]}"
    if dialect == "legacy-duplex":
        return f"{DUPLEX_PATH}{AUDIO_LABELS[0] if mode == 'audio' else 'omni_'}fuzz"
    return f"{REALTIME_PATH}?mode={mode}"


# -- files ----------------------------------------------------------------------------------------


def write_case(
    path: Path, case: Case, finding: Finding, told: Sequence[Step], facts: Mapping[str, object]
) -> None:
    """Write a finding's transcript: steps and messages as played, and seed and versions."""
    head = {
        "title": f"{finding.kind}: {finding.label}",
        "why": finding.detail or finding.label,
        "connect": case.connect,
        "script": case.script,
        "server": {} if case.slots is None else {"slots": case.slots},
        "fuzz": {
            "dialect": case.dialect,
            "mode": case.mode,
            "kind": finding.kind,
            "label": finding.label,
            **facts,
        },
    }
    lines = [head, *({step.kind: step.value} for step in told)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def read_case(path: Path) -> Case:
    """Read a file of `write_case`; raises `TranscriptError` or `OSError`."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise TranscriptError(f"more than {FILE_BYTES_MAX} bytes")
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        head, *rest = lines
        if sum(size_of(line["send"]) for line in rest if "send" in line) > MATERIAL_BYTES_MAX:
            raise TranscriptError(f"more than {MATERIAL_BYTES_MAX} bytes in markers")
        fuzz = head["fuzz"]
        if fuzz["dialect"] not in DIALECTS or fuzz["mode"] not in MODES_OF[fuzz["dialect"]]:
            raise TranscriptError(f"no dialect {fuzz['dialect']!r} with mode {fuzz['mode']!r}")
        assert fuzz["mode"] in get_args(Mode)
        return Case(
            dialect=fuzz["dialect"],
            mode=fuzz["mode"],
            script=str(head.get("script", "default")),
            slots=head.get("server", {}).get("slots"),
            steps=tuple(_read_step(line, number) for number, line in enumerate(rest, start=2)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise TranscriptError("it is no transcript of the fuzzer") from error


def _read_step(line: object, number: int) -> Step:
    if number > STEPS_MAX:
        raise TranscriptError(f"more than {STEPS_MAX} lines")
    if not isinstance(line, dict) or len(line) != 1:
        raise TranscriptError(f"line {number}: one step a line is needed")
    ((kind, value),) = line.items()
    if kind not in STEPS:
        raise TranscriptError(f"line {number}: {kind!r} is no step")
    allowed = {"fault": FAULTS, "await": AWAITS}.get(kind)
    if allowed is not None and value not in allowed:
        raise TranscriptError(f"line {number}: no {kind} {value!r}")
    return Step(kind=kind, value=value)


# -- results --------------------------------------------------------------------------------------

SHOWN_CHARS: Final = 200
"""Characters of a text that is shown."""
PAIRS_MAX: Final = 20_000
"""Gates, messages and answers make some hundreds; a hostile server could make more."""
Pair = tuple[str, str, str]
"""Dialect and gate, the message, and its answer."""


@attrs.frozen(kw_only=True)
class Outcome:
    """The results of one case: findings in order, steps of a transcript, and counted pairs."""

    findings: tuple[Finding, ...]
    told: tuple[Step, ...]
    pairs: Counter[Pair]


@attrs.frozen(kw_only=True)
class Found:
    """A finding and its smallest case, with the seed of its round; steady if it came each time."""

    finding: Finding
    case: Case
    outcome: Outcome
    seed: int
    is_steady: bool


@attrs.define
class Tally:
    """The results of a run so far; its size is bounded.

    `examples` are cases played, with their `messages`; `plays` adds those of shrinking. `repeated`
    counts known findings that came again.
    """

    examples: int = 0
    plays: int = 0
    messages: int = 0
    rounds: int = 0
    elapsed_s: float = 0.0
    pairs: Counter[Pair] = attrs.Factory(Counter)
    found: list[Found] = attrs.Factory(list)
    repeated: int = 0

    def count(self, case: Case, outcome: Outcome) -> None:
        """Count a case."""
        self.examples += 1
        self.messages += case.messages
        for pair, times in outcome.pairs.items():
            if pair in self.pairs or len(self.pairs) < PAIRS_MAX:
                self.pairs[pair] += times

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "examples": self.examples,
            "plays": self.plays,
            "messages": self.messages,
            "rounds": self.rounds,
            "elapsed_s": round(self.elapsed_s, 3),
            "examples_per_s": round(self.examples / max(self.elapsed_s, 1e-9), 1),
            "findings": [
                {
                    "kind": found.finding.kind,
                    "label": found.finding.label,
                    "detail": found.finding.detail,
                    "messages": found.case.messages,
                    "seed": found.seed,
                    "steady": found.is_steady,
                }
                for found in self.found
            ],
            "repeated": self.repeated,
            "coverage": [
                {"state": state, "message": message, "answer": answer, "times": times}
                for (state, message, answer), times in sorted(self.pairs.items())
            ],
        }


def plain(text: str) -> str:
    """A text without its digits, shortened: the same in each run."""
    words = "".join("n" if char.isdigit() else char for char in text)
    return words[:SHOWN_CHARS]


def without_sound(value: Any) -> Any:
    """A body with its long texts, which are sound, shortened."""
    if isinstance(value, dict):
        return {key: without_sound(item) for key, item in value.items()}
    if isinstance(value, str) and len(value) > SHOWN_CHARS:
        return f"{value[:40]}... ({len(value)} characters)"
    return value


# -- the protocols' own description ---------------------------------------------------------------

Json = Mapping[str, Any]

_KINDS: Final[Mapping[str, Callable[[object], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


@cache
def described(dialect: str) -> tuple[Message, ...]:
    """A dialect's description, made once because it is slow."""
    return describe(dialect)


def problem(dialect: str, session_kind: SessionKind, body: Json) -> str:
    """The first undocumented part of a server's message, with its path, or empty."""
    found = "$.type: no such message of the server"
    for message in described(dialect):
        if message.sender != "server" or session_kind not in message.session_kinds:
            continue
        if message.kind == body.get("type"):
            found = next(violations(message.schema, body, "$"), "")
            if not found:
                return ""
    return found


def violations(schema: Json, value: Any, path: str) -> Iterator[str]:
    """The differences of a value at `path` from a schema of `protocol.wire.schema`."""
    if "oneOf" in schema:
        found = [list(violations(below, value, path)) for below in schema["oneOf"]]
        if all(found):
            yield min(found, key=len)[0]
        return
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_KINDS[kind](value) for kind in kinds):
        yield f"{path}: not of type {' or '.join(kinds)}"
        return
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{path}: not the one value that it can have"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{path}: not one of the values that it can have"
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from _range(schema, value, path)
    if isinstance(value, dict) and "properties" in schema:
        yield from _fields(schema, value, path)
    if isinstance(value, list) and "items" in schema:
        for index, each in enumerate(value):
            yield from violations(schema["items"], each, f"{path}[{index}]")


def _same(one: object, other: object) -> bool:
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def _range(schema: Json, value: float, path: str) -> Iterator[str]:
    low, high, above = (schema.get(name) for name in ("minimum", "maximum", "exclusiveMinimum"))
    too_low = low is not None and value < low
    if too_low or (high is not None and value > high) or (above is not None and value <= above):
        yield f"{path}: out of its range"


def _fields(schema: Json, value: Json, path: str) -> Iterator[str]:
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{path}.{name}: missing"
    for name, below in value.items():
        if name not in schema["properties"]:
            yield f"{path}.{name[:64]}: not described"
        else:
            yield from violations(schema["properties"][name], below, f"{path}.{name}")
