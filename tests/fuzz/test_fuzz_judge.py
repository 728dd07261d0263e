"""The judge of `python -m tests.fuzz`: each thing that a server must not do, and what it may do.

Nothing is played here: the judge is told what was said, as a connection would tell it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from protocol.values.errors import MEANINGS
from protocol.values.limits import FRAME_BYTES_MAX, Mode
from protocol.values.model import Coding
from protocol.values.state import Gate, SessionKind
from protocol.wire.dialects import DIALECTS
from tests.fuzz.case import Case, MarkerError, described, fill, problem, violations
from tests.fuzz.drawing import TRAPS, broken, broken_texts
from tests.fuzz.judge import CANARY, Judge, Reader, sign_of
from tests.fuzz.play import append_of, init_of
from tests.transcripts.wire_schema import problems

Body = dict[str, Any]
DONE = {"type": "session.queue_done"}
CREATED = {
    "type": "session.created",
    "session_id": "sess_1",
    "mode": "full_duplex",
    "prompt_length": 3,
    "recording": "off",
    "metrics": {},
}
CLOSED = {"type": "session.closed", "session_id": "sess_1", "reason": "client_closed"}
INIT = {"type": "session.init", "payload": {}}


def judge_of(dialect: str = "realtime", mode: Mode = "video", **more: Any) -> Judge:
    """Make a judge of a client that says nothing by itself."""
    return Judge(Case(dialect=dialect, mode=mode, steps=(), **more))


def tell(judge: Judge, *words: object) -> list[str]:
    """Tell a judge what happened: a body is the server's, a list the client's, a tuple a close."""
    for word in words:
        match word:
            case dict():
                judge.heard(json.dumps(word))
            case [frame]:
                judge.says(json.dumps(frame) if isinstance(frame, dict) else frame)
            case (int() as code, str() as reason):
                judge.closed(code, reason)
            case _:
                judge.heard(word)  # type: ignore[arg-type]
    return [f"{one.kind}: {one.label}" for one in judge.findings]


def error(code: str, message: str = "no") -> Body:
    """Write an `error` of 001."""
    kind = "server_error" if code in {"inference_error", "queue_full"} else "client_error"
    return {"type": "error", "error": {"code": code, "message": message, "type": kind}}


ACTIVE = (DONE, [INIT], CREATED)
NOPE = [{"type": "nope"}]
IN_ORDER: dict[str, tuple[object, ...]] = {
    "a session": (*ACTIVE, [{"type": "session.close"}], CLOSED, (1000, "stopped")),
    "an error for an unknown event": (*ACTIVE, NOPE, error("unknown_event")),
    "no JSON": (*ACTIVE, ["{"], CLOSED | {"reason": "invalid_frame"}, (1003, "not JSON")),
    "refused": (error("queue_full"), (1013, "queue_full")),
    "too early": ([INIT], error("not_ready")),
    "too early, and taken": ([INIT], DONE, CREATED),
    "two in a row": (*ACTIVE, NOPE, NOPE, error("unknown_event"), error("unknown_event")),
    "its time was over": (*ACTIVE, CLOSED | {"reason": "timeout"}, (1000, "timeout")),
    "too big": (*ACTIVE, [None], (1009, "")),
    "a shutdown": (*ACTIVE, CLOSED | {"reason": "server_shutdown"}, (1012, "")),
}
OUT_OF_ORDER: dict[str, tuple[str, tuple[object, ...]]] = {
    "binary": ("undocumented", (b"{}",)),
    "no JSON": ("undocumented", ("{",)),
    "no object": ("undocumented", ("[]",)),
    "an unknown event": ("undocumented", ({"type": "session.hello"},)),
    "a field too many": ("undocumented", (DONE | {"debug": 1},)),
    "a field too few": ("undocumented", (DONE, [INIT], {"type": "session.created"})),
    "a wrong type": ("undocumented", (DONE, [INIT], CREATED | {"prompt_length": "3"})),
    "an unknown code": ("undocumented", (DONE, error("oops"))),
    "a code of the other side": (
        "undocumented",
        (DONE, {"type": "error", "error": {"code": "x", "message": "", "type": "client_error"}}),
    ),
    "created too early": ("answer", (CREATED,)),
    "created twice": ("answer", (*ACTIVE, CREATED)),
    "created unasked": ("answer", (DONE, CREATED)),
    "another dialect": ("undocumented", (DONE, [INIT], {"type": "prepared", "prompt_length": 3})),
    "both dialects": ("undocumented", (*ACTIVE, {"type": "session.closed", "reason": "stopped"})),
    "after the goodbye": ("answer", (*ACTIVE, [{"type": "session.close"}], CLOSED, DONE)),
    "an error unasked": ("answer", (*ACTIVE, error("invalid_event"))),
    "an error twice": ("answer", (*ACTIVE, NOPE, error("unknown_event"), error("unknown_event"))),
    "more errors than messages": (
        "answer",
        ([INIT], DONE, CREATED, NOPE, *[error("unknown_event")] * 3),
    ),
    "another code": ("answer", (*ACTIVE, NOPE, error("not_ready"))),
    "no goodbye": ("close", (*ACTIVE, [{"type": "session.close"}], (1000, "stopped"))),
    "an unknown close": ("close", (DONE, (4000, ""))),
    "a close of the wrong kind": ("close", (*ACTIVE, CLOSED, (1012, ""))),
    "not JSON, but closed in order": ("close", (*ACTIVE, ["{"], CLOSED, (1000, ""))),
    "1003 for nothing": ("close", (DONE, (1003, ""))),
    "1009 for nothing": ("close", (DONE, (1009, ""))),
    "1013 without a word": ("close", (DONE, (1013, ""))),
    "1011": ("crash", (DONE, (1011, ""))),
    "no close": ("crash", (DONE, (1006, ""))),
    "the model failed": ("crash", (*ACTIVE, error("inference_error"))),
    "a traceback": ("internals", (*ACTIVE, NOPE, error("unknown_event", "KeyError: 'x'"))),
    "an echo": ("internals", (*ACTIVE, NOPE, error("unknown_event", f"what is {CANARY}?"))),
    "internals in a close": ("internals", (DONE, (1000, 'File "/usr/lib/x.py", line 3'))),
    "more than there was": (
        "answer",
        (
            *ACTIVE,
            *[
                next(iter(message.examples))
                for message in described("realtime")
                if message.kind == "response.output.delta"
            ][:1]
            * 2,
        ),
    ),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_is_in_order_is_not_found(name: str) -> None:
    """A good server would be accused."""
    assert tell(judge_of(), *IN_ORDER[name]) == []


@pytest.mark.parametrize("name", OUT_OF_ORDER)
def test_what_is_out_of_order_is_found(name: str) -> None:
    """A bug of this kind would pass."""
    kind, words = OUT_OF_ORDER[name]
    found = tell(judge_of(), *words)
    assert found
    assert found[0].startswith(f"{kind}: "), found


def test_a_message_that_is_not_answered_is_a_hang() -> None:
    """A server that swallows messages would pass."""
    judge = judge_of()
    tell(judge, *ACTIVE, NOPE)
    judge.miss()
    assert [one.label for one in judge.findings] == ["no answer to unknown in ACTIVE"]


def test_what_a_client_breaks_itself_is_not_the_servers_fault() -> None:
    """Each reset would be reported as a lost connection."""
    judge = judge_of()
    judge.broke = True
    assert tell(judge, DONE, (1006, "")) == []


def test_findings_and_lines_are_bounded() -> None:
    """A server that is beside itself would fill the memory in a night."""
    judge = judge_of()
    for number in range(2000):
        judge.heard(json.dumps({"type": f"x{number}"}))
        judge.found("hang", f"number {number}")
    assert len(judge.findings) <= 8
    assert len(judge.told) <= 400


# -- what is owed ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frame", "gate", "kind", "closes", "code"),
    [
        ("{", Gate.ACTIVE, "no JSON", (1003,), None),
        (b"", Gate.QUEUED, "binary", (1003,), None),
        (None, Gate.ACTIVE, "too big", (1009,), None),
        ('{"type":"nope"}', Gate.QUEUED, "unknown", (), "not_ready"),
        ('{"type":"nope"}', Gate.CONNECTED, "unknown", (), "unknown_event"),
        ('{"type":{}}', Gate.CONNECTED, "unknown", (), "invalid_payload"),
        ("{}", Gate.ACTIVE, "unknown", (), "missing_field"),
        ('{"type":"session.init"}', Gate.CONNECTED, "session.init", (), "missing_field"),
        ('{"type":"session.init","payload":{}}', Gate.ACTIVE, "session.init", (), "invalid_event"),
        ('{"type":"session.close"}', Gate.QUEUED, "session.close", (1000,), None),
        ('{"type":"nope"}', Gate.CLOSED, "unknown", (), None),
    ],
)
def test_what_is_owed_is_read_from_the_tables(
    frame: str | bytes | None, gate: Gate, kind: str, closes: tuple[int, ...], code: str | None
) -> None:
    """A server would be held to something else than the protocol."""
    demand = Reader("realtime", "video", SessionKind.DUPLEX).demand_of(frame, gate)
    assert (demand.kind, demand.closes, demand.code) == (kind, closes, code)


def test_a_commit_takes_the_only_model() -> None:
    """A transcription that begins without a choice would be an accusation."""
    judge = judge_of("transcription", "transcription")
    commit = {"type": "input_audio_buffer.commit", "final": True}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    done = {"type": "transcription.done", "text": "hi", "usage": usage}
    created = {"type": "session.created", "id": "sess_1", "created": 0}
    assert (
        tell(judge, created, [commit], {"type": "transcription.delta", "delta": "hi"}, done) == []
    )
    assert judge.state == "ACTIVE"
    other = judge_of("transcription", "transcription")
    assert tell(other, created, {"type": "transcription.delta", "delta": "hi"})


@pytest.mark.parametrize(
    ("heard", "is_refused"), [("audio/pcm", True), ("audio/pcmu", False), ("audio/pcma", False)]
)
def test_half_a_sample_is_refused(heard: Coding, is_refused: bool) -> None:
    """Its error would be taken for the answer to what comes next."""
    reader = Reader("openai", "audio", SessionKind.DUPLEX)
    reader.heard = heard
    frame = json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA"})
    demand = reader.demand_of(frame, Gate.OPEN)
    assert (demand.code == "invalid_payload", demand.is_owed) == (is_refused, is_refused)


def test_the_init_picks_the_dialect() -> None:
    """The other dialect's answers would be owed."""
    reader = Reader("realtime", "video", SessionKind.DUPLEX)
    reader.demand_of('{"type":"session.update","session":{}}', Gate.CONNECTED)
    assert reader.dialect.name == "duplex-v1"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_the_probe_says_is_in_order(dialect: str) -> None:
    """A good server would refuse it, and be called dead."""
    mode: Mode = "chat" if dialect == "legacy-chat" else "video"
    case = Case(dialect=dialect, mode=mode, steps=())
    reader = Reader(dialect, mode, case.session_kind)
    said = reader.demand_of(json.dumps(fill(init_of(case))), Gate.CONNECTED)
    assert said.message is not None
    if case.session_kind is SessionKind.DUPLEX:
        heard = reader.demand_of(json.dumps(fill(append_of(case))), Gate.ACTIVE)
        assert heard.message is not None


# -- the schema -----------------------------------------------------------------------------------


def examples() -> list[tuple[str, SessionKind, Body]]:
    """What servers send, one of each kind."""
    return [
        (name, message.session_kinds[0], dict(body))
        for name in DIALECTS
        for message in described(name)
        for body in message.examples
    ]


@pytest.mark.parametrize("number", range(len(examples())))
def test_what_servers_send_is_described(number: int) -> None:
    """A good server would be accused."""
    name, session_kind, body = examples()[number]
    assert problem(name, session_kind, body) == ""


@given(st.sampled_from(examples()), st.data())
def test_the_validator_agrees_with_a_full_one(
    chosen: tuple[str, SessionKind, Body], data: st.DataObject
) -> None:
    """A field that is wrong would pass, or one that is right be found."""
    name, session_kind, body = chosen
    made = fill(data.draw(broken(body)))
    if isinstance(made, dict):
        assert bool(problem(name, session_kind, made)) is bool(
            problems(name, "server", made, session_kind)
        )


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, True),
        ({"type": "integer"}, 1.5),
        ({"type": "number"}, "1"),
        ({"type": ["string", "null"]}, 1),
        ({"const": 1}, True),
        ({"enum": ["a"]}, "b"),
        ({"minimum": 1}, 0),
        ({"maximum": 1}, 2),
        ({"exclusiveMinimum": 0}, 0),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, 1),
        ({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {}),
        ({"type": "object", "properties": {"a": {"type": "string"}}}, {"a": 1}),
        ({"type": "array", "items": {"type": "object"}}, [{}, None]),
    ],
)
def test_each_rule_of_a_schema_is_held(schema: Body, value: object) -> None:
    """A kind of wrong field would pass."""
    assert list(violations(schema, value, "$"))
    assert not Draft7Validator(schema).is_valid(value) or value is True


# -- internals and media --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Traceback (most recent call last)",
        "in /usr/lib/python3.11/json",
        "see codec.py",
        "ValueError: no",
        "<protocol.machine.core.Core object at 0x7f00>",
        "'NoneType' has no len()",
        f"unknown event {CANARY}",
    ],
)
def test_internals_are_recognized(text: str) -> None:
    """A server that shows its insides would pass."""
    assert sign_of(text)


@pytest.mark.parametrize(
    "text",
    [
        *MEANINGS.values(),
        "$.input.audio: 3 samples, at least 4000 are needed",
        "$.payload.config: an array of 0 items, an object is needed",
        "append event in state ACTIVE during a turn",
        f"frame above {FRAME_BYTES_MAX} bytes",
        "$.input.messages[0].content[1].data: a string of 4 characters that is not base64",
    ],
)
def test_the_texts_of_this_server_show_nothing(text: str) -> None:
    """Each error would be a finding."""
    assert sign_of(text) == ""


@pytest.mark.parametrize(
    "marker",
    [{"$pcm": -1}, {"$pcm": 10**12}, {"$bytes": "x"}, {"$wav": 1, "$rate_hz": 0}, {"$jpeg": "big"}],
)
def test_a_marker_that_is_none_is_refused(marker: Body) -> None:
    """A transcript of a stranger's fills the memory, or ends in a traceback."""
    with pytest.raises(MarkerError):
        fill({"input": [marker]})


def test_every_trap_can_be_sent() -> None:
    """The fuzzer would fall over its own bait."""
    for trap in TRAPS:
        json.dumps(fill({"a": trap}))


@given(st.data())
def test_broken_texts_can_be_sent(data: st.DataObject) -> None:
    """A frame could not be written as UTF-8."""
    body = {"type": "input.append", "input": {"audio": {"$pcm": 16_000}, "video_frames": [""]}}
    text = data.draw(broken_texts(body))
    assert text.encode().decode() == text
