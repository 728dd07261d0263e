"""A session's snapshot: all that it remembers is in it, and none of the machine's names are."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from enum import Enum
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from protocol.machine.chat import ActiveTurn, PendingTurn
from protocol.machine.conversation import Conversation, SoundPieces
from protocol.machine.core import Peer, Step
from protocol.machine.duplex import PendingInit
from protocol.machine.input import ToolCalls
from protocol.machine.kind import Migration
from protocol.machine.omni import Omni
from protocol.machine.session import Session
from protocol.machine.unit_loop import UserSpeech
from protocol.values import events as ev
from protocol.values.frames import Utf8Text
from protocol.values.messages import Listen, Speech
from protocol.values.model import Picture, Prefill, Sound, Text, Tool, ToolCall, ToolResult
from protocol.values.omni import OmniSession
from protocol.values.openai import (
    Item,
    LiveSettings,
    OpenAISession,
    Part,
    RealtimeResponse,
    Respond,
)
from protocol.wire.dialects import LEGACY_CHAT
from recorder.format.format import SUFFIX, Record
from recorder.format.mapping import EVENT_KINDS, advance, event_of
from recorder.read.reader import LogReader
from tests.golden.logs import FOLDER, SCENES
from tests.project.sampling import sample

ROOT: Final = Path(__file__).parents[2]
LEFT_OUT: Final = {
    "Step.opened": "it is the first event, which the log holds",
    "Step.limits": "they are of the first event",
    "Respond.instructions": "they are in the prompt, which the log has",
    "Respond.ignored": "it stands in the log",
    "Part.ends": "it follows from the units, which the log has",
    "RealtimeResponse.ends": "likewise",
    "Part.is_whole": "it is of the session's behaviour",
    "Step.effects": "they are handed over after each step",
    "Step.do": "it appends to them",
    "Step.derive": "it makes ids of the first event's recording",
    "Peer.session_kind": "it is of the kind, as the first event says",
    "Peer.has_event_ids": "the same",
    "Peer.is_omni": "the same",
    "Peer.is_active": "it follows from the state",
    "Peer.is_closed": "the same",
    "Conversation.id": "it is made of the recording's id",
    "Conversation.chars": "it is the sum of the items' text",
    "SoundPieces.coding": "it is of the settings",
    "SoundPieces.rate_hz": "the same",
    "SoundPieces.second_bytes": "the same",
    "SoundPieces.take_second": "it is of the kind",
    "Migration.has_queue_messages": "the same",
    "ToolCalls.is_refused": "it is set and read within a step",
    "Peer.sent": "they are the frames of the step's effects, before they were written",
    "Peer.accepted": "it is of the message that was read",
    "Peer.cause": "it is of the message that is being read",
    "PendingInit.init": "what was asked stands in the log",
    "PendingTurn.ask": "likewise",
    "ActiveTurn.made": "likewise",
    "PendingTurn.roles": "likewise",
    "PendingTurn.has_video": "likewise",
    "PendingTurn.sound_bytes": "it is the sum of decoded sound, which the log has",
    "Prefill.index": "its turn's",
    "Prefill.input_hash": "it stands in the log",
    "Prefill.cost_us": "likewise",
    "Prefill.fed_ids": "likewise",
    "Text.text": "what was asked stands in the log",
    "ToolCall.id": "likewise",
    "ToolCall.name": "likewise",
    "ToolCall.arguments": "likewise",
    "ToolResult.call_id": "likewise",
    "ToolResult.output": "likewise",
    "Picture.jpeg": "it stands in the log, as it was decoded",
    "Sound.pcm": "likewise",
    "Listen.session_id": "the session's",
    "Listen.metrics": "they stand in the log, with the unit",
    "Listen.silence_samples": "no such message is held: it is made where it is sent",
    "Listen.coding": "the same",
    "Listen.epoch": "the same",
    "Speech.epoch": "the same",
    "Omni.requested": "what was asked stands in the log",
    "OmniSession.id": "it is made of the recording's id",
    "OmniSession.instructions": "what was asked stands in the log",
    "OmniSession.is_resumable": "it is of the first event and the recording",
    "UserSpeech.sought": "it is of the settings",
    "Peer.greeted": "it is the number of a frame that the log holds",
    "Peer.greeting": "it is made where it is sent",
    "Speech.coding": "the same",
    "Speech.start_ms": "likewise",
    "Speech.session_id": "the session's",
    "Speech.metrics": "they stand in the log, with the unit",
    "Speech.text": "likewise",
    "Speech.pcm": "likewise",
    "OpenAISession.tools": "they are told in a frame, which the log holds",
    "OpenAISession.tool_choice": "likewise",
    "OpenAISession.is_parallel": "it is that of the calls",
    "LiveSettings.tools": "the same",
    "OpenAISession.id": "it is made of the recording's id",
    "OpenAISession.expires_at": "it is made of the first event",
    "Item.call": "it is told with its item, in a frame that the log holds",
    "Part.kind": "it is told with its item, in a frame that the log holds",
    "Part.text": "likewise",
    "Part.picture": "an item that is kept has none",
    "RealtimeResponse.items": "likewise",
    "RealtimeResponse.conversation_id": "it is made of the recording's id",
    "RealtimeResponse.message": "likewise",
    "RealtimeResponse.metadata": "likewise",
    "RealtimeResponse.reason": "likewise",
    "RealtimeResponse.status": "likewise",
    "RealtimeResponse.fault": "likewise",
    "Tool.description": "the effect that opens the model has it",
    "Tool.parameters": "likewise",
}
"""What a session has that is not in its snapshot, and why."""
CLASSES: Final = (
    *(Step, Peer, Migration, PendingInit, PendingTurn, ActiveTurn, Prefill),
    *(Listen, Speech, Text, Picture, Sound),
    *(LiveSettings, OpenAISession, Part, RealtimeResponse, Respond, Tool, ToolCall, ToolResult),
    *(Item, Omni, OmniSession, UserSpeech, Conversation, SoundPieces, ToolCalls),
)


def sessions(path: Path) -> Iterator[Session]:
    """Run a golden log again; gives the session after each event."""
    session: Session | None = None
    with LogReader(path) as reader:
        for item in reader:
            if not isinstance(item, Record):
                return
            if item.kind in EVENT_KINDS:
                session, _ = advance(session, event_of(item.fields, item.at_ns))
                yield session


def name_of(part: Any, field: str) -> str:
    """Name a field by the class that has it first."""
    return name_in(type(part), field)


@cache
def name_in(part: type[Any], field: str) -> str:
    """See `name_of`."""
    classes = [cls for cls in part.__mro__ if attrs.has(cls)]
    return f"{[c for c in classes if field in attrs.fields_dict(c)][-1].__name__}.{field}"


def parts(value: object, seen: set[int]) -> Iterator[Any]:
    """Find the attrs instances that a session's kind is made of, each once."""
    if id(value) in seen:
        return
    if attrs.has(type(value)):
        seen.add(id(value))
        yield value
        for field in attrs.fields(type(value)):
            if name_of(value, field.name) not in LEFT_OUT:
                yield from parts(getattr(value, field.name), seen)
    elif isinstance(value, dict):
        for below in value.values():
            yield from parts(below, seen)
    elif not isinstance(value, str | bytes | bytearray) and hasattr(value, "__iter__"):
        for below in value:
            yield from parts(below, seen)


def others(value: Any) -> Iterator[Any]:
    """Give values of which at least one is of the same kind, and another."""
    match value:
        case bool():
            yield not value
        case Enum():
            yield from (other for other in type(value) if other is not value)
        case int():
            yield value + 1
        case str() | bytes():
            yield value + value[:0].join([value[:1] or type(value)("x" if value == "" else b"x")])
        case bytearray():
            yield value + b"x"
        case None:
            yield from (1, "x", (1, 2))
        case _ if hasattr(value, "__len__"):
            if len(value):
                yield type(value)()
        case _:
            yield None
            yield LEGACY_CHAT


def is_seen(session: Session, before: str, part: Any, name: str) -> bool:
    """Whether another value of a field gives another digest than `before`."""
    value = getattr(part, name)
    for other in others(value):
        object.__setattr__(part, name, other)
        try:
            if session.digest() != before:
                return True
        except (AttributeError, TypeError):
            return True  # it was looked at, and is no value that could stand there
        finally:
            object.__setattr__(part, name, value)
    return False


def test_all_that_a_session_remembers_is_in_its_snapshot() -> None:
    """What a change of the machine does to it would be seen by no replay."""
    found, seen = set[str](), set[str]()
    for path in sorted(FOLDER.glob("*" + SUFFIX)):
        for session in islice(sessions(path), 0, None, sample(1, 2)):  # one state in two
            before = session.digest()
            for part in list(parts(session.kind, set())):
                for field in attrs.fields(type(part)):
                    name = name_of(part, field.name)
                    is_part = attrs.has(type(getattr(part, field.name)))
                    if is_part or name in LEFT_OUT or name in seen:
                        continue
                    found.add(name)
                    if is_seen(session, before, part, field.name):
                        seen.add(name)
    assert len(found) > 90
    assert not found - seen, "not in the snapshot: " + ", ".join(sorted(found - seen))


def test_what_is_left_out_is_there() -> None:
    """The list would excuse what has another name by now."""
    classes = {cls.__name__: cls for cls in CLASSES}
    for name in LEFT_OUT:
        cls, _, field = name.partition(".")
        assert field in attrs.fields_dict(classes[cls])


def test_the_documented_keys_are_the_keys() -> None:
    """Whoever reads a log elsewhere could not make a digest."""
    page = (ROOT / "docs" / "log-format.md").read_text().partition("## States")[2]
    tables = page.partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|.*$", tables, re.MULTILINE))))
    found = {"own", "key"}
    names = ("*-states", "*-moving-*", "*-duplex-tools")
    paths = [path for name in names for path in FOLDER.glob(name + SUFFIX)]
    for path in sorted(paths):
        for session in sessions(path):
            snapshot: Any = session.snapshot()
            found |= {*snapshot, *snapshot["own"], *snapshot["loop"], *snapshot["queue"]}
            found |= {*snapshot["timers"], *(snapshot["init"] or {}), *snapshot["migration"]}
            found |= {*snapshot["peer"]}
    assert documented == (found | {"undecided", "voices"}) - {"key"}


# -- names ----------------------------------------------------------------------------------------

RENAMED: Final = {
    # classes
    "UnitLoop": "Barrier",
    "Assembler": "Cutter",
    "ActiveTurn": "TurnAtWork",
    "Utterance": "Spoken",
    "PendingInit": "InitOnItsWay",
    # attributes
    "alive_ns": "last_sign_ns",
    "is_waiting": "is_in_line",
    "undecided_media": "being_decoded",
    "owes_commit": "has_a_commit_to_come",
    "ended_id": "id_of_the_last_turn",
    "sent_ns": "said_ns",
    "is_transcribed": "is_done_with",
}
REORDERED: Final = {
    "core.py": "Peer",
    "kind.py": "Migration",
    "unit_loop.py": "UnitLoop",
    "chat.py": "ActiveTurn",
    "transcription.py": "Utterance",
}
ONE_IN: Final = sample(1, 3)
"""So many golden logs are replayed with other names; each passes most of the machine."""
REPLAY: Final = """
import sys
from pathlib import Path
import protocol.machine.core
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
assert protocol.machine.core.__file__.startswith(sys.argv[1]), protocol.machine.core.__file__
for path in sorted(Path(sys.argv[2]).glob("*.zst"))[:: int(sys.argv[3])]:
    with LogReader(path) as reader:
        report = replay(reader)
    print(path.name, report.divergence, report.effects, report.states)
"""


def renamed(text: str) -> str:
    """Give names of the machine others; words in texts stay."""
    if not re.search("|".join(RENAMED), text):
        return text
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    lines = text.splitlines(keepends=True)
    for token in reversed(tokens):
        if token.type == tokenize.NAME and token.string in RENAMED:
            row, begin = token.start
            line = lines[row - 1]
            end = begin + len(token.string)
            lines[row - 1] = line[:begin] + RENAMED[token.string] + line[end:]
    return "".join(lines)


def reordered(text: str, name: str) -> str:
    """Turn the attributes of a class round that have a default."""
    (cls,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    fields = [node for node in cls.body if isinstance(node, ast.AnnAssign) and node.value]
    lines = text.splitlines(keepends=True)
    segments = [lines[node.lineno - 1 : node.end_lineno] for node in fields]
    assert len(segments) > 2
    for node, segment in reversed(list(zip(fields, reversed(segments), strict=True))):
        lines[node.lineno - 1 : node.end_lineno] = segment
    return "".join(lines)


@cache
def replayed(root: Path) -> list[str]:
    """Replay all golden logs with the packages of a folder; gives a line for each."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", REPLAY, str(root), str(FOLDER), str(ONE_IN)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("change", sample(["renamed", "reordered"], ["renamed"]))
def test_a_log_does_not_know_the_names_of_the_machine(change: str, tmp_path: Path) -> None:
    """No class or attribute could ever be called what it is, for the sake of recordings."""
    for package in ("protocol", "recorder", "runtime", "replay"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    if change == "renamed":
        for path in sorted(tmp_path.rglob("*.py")):
            text = path.read_text()
            path.write_text(renamed(text))
        left = (tmp_path / "protocol" / "machine" / "core.py").read_text()
        assert "last_sign_ns: int | None" in left
    else:
        for name, cls in REORDERED.items():
            path = tmp_path / "protocol" / "machine" / name
            before = path.read_text()
            path.write_text(reordered(before, cls))
            assert path.read_text() != before
    lines = replayed(tmp_path)
    assert lines == replayed(ROOT)
    assert len(lines) >= len(SCENES) // ONE_IN


def test_a_kept_opening_is_the_same_however_long_text_is_held() -> None:
    """A server holds long text as UTF-8 and a log as text: their states would differ."""
    frame = json.dumps({"type": "session.init", "payload": {"x": "ä" * 500}}, ensure_ascii=False)
    digests = set()
    for kept in (frame, Utf8Text(frame.encode())):
        with LogReader(FOLDER / f"v1-realtime-early{SUFFIX}") as reader:
            first = next(i for i in reader if isinstance(i, Record) and i.kind in EVENT_KINDS)
        session, _ = advance(None, event_of(first.fields, first.at_ns))
        session.step(ev.FrameReceived(at_ns=0, frame=kept))
        assert session.snapshot()["early_bytes"] == len(frame.encode())
        digests.add(session.digest())
    assert len(digests) == 1
