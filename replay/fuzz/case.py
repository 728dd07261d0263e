"""One conversation of a hostile client as a value, and as a file that can be replayed.

A file is JSON lines in the form of `fixtures/wire`: the first has the address, each other line is
one step. `receive` and `close` are the server's messages when the file was made, `bye` the client's
close: for readers, because only `await` waits. Bodies hold markers (`media`). Further steps are:

| step | is |
|---|---|
| `await` | `turn`: the queue is done; `answer`: all answers have come |
| `fault` | a fault at the client's end: a name of `FAULTS` |
| `raw` | bytes, in hex, put on the connection unchanged, even within a message |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

import attrs

from protocol.values.modes import Mode
from protocol.values.state import Course, course_of
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.schema.wire import REQUEST_DIALECT
from runtime.serve.routing import AUDIO_LABELS, CHAT_PATH, DUPLEX_PATH, LIVE_PATH, REALTIME_PATH

from .media import MATERIAL_BYTES_MAX, size_of

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
    """One conversation, with a scripted model of `local.SCRIPTS`; None for its default slots."""

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
    def course(self) -> Course:
        """The session's course."""
        return course_of(self.mode, is_request=self.dialect == REQUEST_DIALECT)

    @property
    def dialects(self) -> tuple[str, ...]:
        """The dialects that the first message may select."""
        if self.course is Course.TRANSCRIPTION and self.dialect not in OPENAI_DIALECTS:
            return ("transcription", "transcription-responses")
        if self.course is Course.DUPLEX and self.dialect in {"realtime", "duplex-v1"}:
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
        raise TranscriptError("it is no transcript of `antiphon fuzz`") from error


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
