"""The fuzzer itself: its errors are no findings, its cases are bounded, a case and its file agree.

Each of these once cost a run: a finding that was the fuzzer's own, or gigabytes of memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.uri import parse_uri
from websockets.utils import accept_key

from protocol.values.limits import CHAT_FRAME_BYTES_MAX, FRAME_BYTES_MAX
from tests.fuzz import play as local
from tests.fuzz.__main__ import fuzz_command
from tests.fuzz.campaign import Budget, Campaign, play_again
from tests.fuzz.case import (
    MATERIAL_BYTES_MAX,
    Case,
    Finding,
    Step,
    TranscriptError,
    fill,
    read_case,
    size_of,
    write_case,
)
from tests.fuzz.drawing import MEDIA, TOOLS, TRAPS, all_names, broken, cases
from tests.fuzz.judge import Judge
from tests.fuzz.play import FuzzerError, LocalTarget, append_of, frame_of, init_of
from tests.fuzz.remote import TOO_BIG_BYTES, SocketWire
from tests.fuzz.test_fuzz import SWALLOWED, planted
from tests.fuzz.test_fuzz_judge import CREATED, DONE, INIT, judge_of, tell

KEYS = st.sampled_from(("$.input", "$", "$$pcm", "$pcms", "a"))
PLAIN = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(KEYS, below, max_size=3),
)
FINDING = Finding(kind="hang", label="as a test says")


def case_of(*steps: tuple[str, object], dialect: str = "realtime", **more: Any) -> Case:
    """Make a case."""
    made = tuple(Step(kind=kind, value=value) for kind, value in steps)
    return Case(dialect=dialect, mode=more.pop("mode", "video"), steps=made, **more)


# -- markers --------------------------------------------------------------------------------------


@given(PLAIN)
def test_what_is_no_marker_stands_for_itself(value: object) -> None:
    """A field that begins with a dollar would break the fuzzer, and be called a crash."""
    assert fill(value) == value


@settings(max_examples=60)
@given(cases(all_names(), is_local=False))
def test_a_case_and_its_file_are_the_same_and_bounded(
    tmp_path_factory: pytest.TempPathFactory, case: Case
) -> None:
    """What is played again would be something else; or a case would fill the memory."""
    path = tmp_path_factory.mktemp("case") / "case.jsonl"
    write_case(path, case, FINDING, case.steps, {})
    assert read_case(path) == case
    sizes = [size_of(step.value) for step in case.steps if step.kind == "send"]
    assert sum(sizes) <= MATERIAL_BYTES_MAX


@pytest.mark.parametrize("trap", [*TRAPS, *(one for ones in MEDIA.values() for one in ones)])
def test_a_size_is_known_before_anything_is_made(trap: object) -> None:
    """The bound of a case would be one of something else."""
    written = len(json.dumps(fill(trap), ensure_ascii=False))
    assert abs(size_of(trap) - written) <= written / 10 + 500


@settings(max_examples=60)
@given(st.data())
def test_what_is_broken_is_bounded(data: st.DataObject) -> None:
    """Lists of lists, multiplied three times over, were a message of 1.6 GB."""
    body: Any = {"a": [{"b": [{"c": [{"$pcm": 160_000}]}]}]}
    for _ in range(4):
        body = data.draw(broken(body))
    assert size_of(body) <= MATERIAL_BYTES_MAX


def test_a_file_that_asks_for_too_much_is_refused(tmp_path: Path) -> None:
    """A stranger's transcript of a megabyte would fill the memory."""
    body = {"a": [{"$pcm": 160_000}] * 20}
    path = tmp_path / "case.jsonl"
    write_case(path, case_of(), FINDING, [Step(kind="send", value=body)], {})
    with pytest.raises(TranscriptError, match="more than 8388608 bytes in markers"):
        read_case(path)


@pytest.mark.parametrize("first", [(), (("await", "turn"), ("send", INIT), ("await", "answer"))])
def test_a_field_that_looks_like_a_marker_is_answered(first: tuple[Any, ...]) -> None:
    """The two transcripts that condemned a slot."""
    case = case_of(*first, ("send", {"$.input": None}), ("await", "answer"))
    assert play_again(LocalTarget(), case).findings == ()


# -- the fuzzer's own errors ----------------------------------------------------------------------


def fails(*_: object, **__: object) -> None:
    """Break, as the fuzzer might."""
    raise ZeroDivisionError("a bug of the fuzzer")


def test_a_marker_that_is_none_is_no_finding() -> None:
    """A bug of the fuzzer would be reported as a crash of the server."""
    with pytest.raises(FuzzerError, match="MarkerError"):
        play_again(LocalTarget(), case_of(("await", "turn"), ("send", {"$pcm": "x"})))


@pytest.mark.parametrize("name", ["heard", "closed", "says", "did"])
def test_an_error_of_the_judge_ends_the_run_with_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """It is raised within the server's own call, which would be blamed for it."""
    monkeypatch.setattr(Judge, name, fails)
    words = ["--examples", "20", "--seed", "1", "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(fuzz_command, words)
    assert told.exit_code == 2, told.output
    assert "the fuzzer itself is broken, ZeroDivisionError: a bug of the fuzzer" in told.output


def test_an_error_in_the_drawing_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis would make it small, and the run end with a traceback."""
    monkeypatch.setattr("tests.fuzz.drawing._Plan.move", fails)
    with pytest.raises(FuzzerError, match="a bug of the fuzzer"):
        Campaign(LocalTarget(), all_names(), seed=1, budget=Budget(examples=5)).run()


def test_an_error_of_the_server_is_still_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Crashes would be called the fuzzer's, and nobody mend them."""
    monkeypatch.setattr(local.Server, "handle", fails)
    found = LocalTarget().run(case_of(("await", "turn"))).findings
    assert [one.kind for one in found] == ["crash"]


# -- either side of queue_done --------------------------------------------------------------------

PREPARE = {"type": "prepare"}
OTHER_LINE = (
    ("occupy", "/v1/realtime?mode=video"),
    ("send", {"type": "session.init", "payload": {}}),
)
LINE = (("occupy", "/ws/duplex/omni_fuzz"), ("send", PREPARE), ("vacate", 0), ("await", "answer"))


def test_what_is_sent_as_the_slot_comes_may_be_taken() -> None:
    """A server in order would be said to hang."""
    case = case_of(*LINE, dialect="legacy-duplex", slots=1)
    assert play_again(LocalTarget(), case).findings == ()


def test_what_is_kept_for_a_slot_that_never_comes_is_no_hang() -> None:
    """A server in order would be said to hang."""
    for dialect, (occupy, send, *_) in (("legacy-duplex", LINE), ("realtime", OTHER_LINE)):
        case = case_of(occupy, send, ("await", "answer"), dialect=dialect, slots=1)
        assert play_again(LocalTarget(), case).findings == ()


def test_what_is_sent_as_the_slot_comes_must_be_answered() -> None:
    """A server that swallows it would pass."""
    lost = planted(heard=lambda _, frame: SWALLOWED if frame == json.dumps(PREPARE) else frame)
    found = lost.run(case_of(*LINE, dialect="legacy-duplex", slots=1)).findings
    assert "hang: no answer to prepare in QUEUED" in [f"{one.kind}: {one.label}" for one in found]


def refused(code: str) -> dict[str, Any]:
    """Write an error."""
    return {"type": "error", "error": {"code": code, "message": "", "type": "client_error"}}


@pytest.mark.parametrize(
    ("said", "heard", "found"),
    [
        (INIT, (DONE, CREATED), []),
        (INIT, (refused("not_ready"), DONE), []),
        (INIT, (DONE, refused("not_ready")), []),
        ({"type": "nope"}, (DONE, refused("unknown_event")), []),
        ({"type": "nope"}, (DONE, refused("not_ready")), []),
        (
            {"type": "nope"},
            (DONE, refused("invalid_payload")),
            ["answer: unknown in CONNECTED: error invalid_payload, not unknown_event"],
        ),
        (
            {"type": "nope"},
            (refused("unknown_event"), DONE),
            ["answer: unknown in QUEUED: error unknown_event, not not_ready"],
        ),
    ],
)
def test_either_state_may_answer_and_no_other(
    said: dict[str, Any], heard: tuple[Any, ...], found: list[str]
) -> None:
    """The judge would accuse, or believe anything."""
    judge = judge_of(slots=1)
    judge.holds_slot = True
    line = {"position": 1, "estimated_wait_s": 1, "ticket_id": "t", "queue_length": 1}
    tell(judge, {"type": "session.queued"} | line, [said])
    assert judge.owed is not None
    assert tell(judge, *heard) == found
    assert judge.owed is None


# -- calls of tools -------------------------------------------------------------------------------


def with_calls(*results: tuple[int, object]) -> Case:
    """A session in which the model calls a tool in each of four seconds, and what it is given."""
    case = case_of(script="calls", mode="audio")
    answer, second = ("await", "answer"), ("send", append_of(case))
    steps: list[tuple[str, object]] = [("await", "turn"), ("send", init_of(case, TOOLS)), answer]
    steps += [second, answer, ("wait_s", 1.0)] * 3
    for number, content in results:
        body = {"type": "input.tool_result", "tool_call_id": {"$call": number}, "content": content}
        steps += [("send", body), answer]
    steps += [("wait_s", 25.0), second, answer] * 3  # past the deadline of the first calls
    body = {"type": "input.tool_result", "tool_call_id": {"$call": 2}, "content": "late"}
    return case_of(*steps, ("send", body), answer, script="calls", mode="audio")


RESULTS = ((0, "nine"), (0, "ten"), (-1, "nine"), (1, {"$text": 4_097}), (1, {"$text": 4_096}))
"""One in order, the same again, of no call, one that is too long, one that is not."""


def test_results_in_time_twice_late_and_of_no_call_are_judged() -> None:
    """A server in order would be accused, or no result ever reach a call."""
    outcome = LocalTarget().run(with_calls(*RESULTS))
    assert outcome.findings == ()
    refused = [
        step.value["error"]["message"]
        for step in outcome.told
        if step.kind == "receive" and step.value["type"] == "error"
    ]
    gone, long = "$.tool_call_id: no call of this session", "$.content: 4097 characters"
    due = [gone, gone, long, gone]
    assert [text[: len(words)] for text, words in zip(refused, due, strict=True)] == due


def test_a_result_of_no_call_that_is_swallowed_is_found() -> None:
    """A client would wait for what became of its result."""

    def swallow(_: object, frame: Any) -> Any:
        return SWALLOWED if "call_ffffffffffff" in str(frame) else frame

    found = planted(heard=swallow).run(with_calls((-1, "nine"))).findings
    assert [f"{one.kind}: {one.label}" for one in found] == [
        "hang: no answer to input.tool_result in ACTIVE"
    ]


def test_a_call_that_comes_twice_is_found() -> None:
    """A client would run its function twice."""

    def twice(between: Any, frame: Any) -> Any:
        if "response.tool_call.done" in frame and not between.extra:
            between.extra.append(frame)
        return frame

    found = planted(said=twice).run(with_calls()).findings
    assert ("answer", "a call that came before") in {(one.kind, one.label) for one in found}


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("char", ["a", "\u00e9"])
def test_a_frame_that_is_too_big_in_bytes_is_told_so(char: str) -> None:
    """A frame of many markers was refused, and the judge said that it was none of the kind."""
    frame = json.dumps({"a": char * (FRAME_BYTES_MAX // len(char.encode()))}, ensure_ascii=False)
    step = Step(kind="send_text", value=frame)
    assert frame_of(step, FRAME_BYTES_MAX) is None
    assert frame_of(step, CHAT_FRAME_BYTES_MAX) == frame
    assert tell(judge_of(), DONE, [frame], (1009, "")) == []


class Stream:
    """A server that pings and closes while it is sent to, and is then gone."""

    def __init__(self) -> None:
        self.sent = self.largest = 0
        self.is_reading = anyio.Event()
        self._come = [Frame(Opcode.PING, b"?"), Frame(Opcode.CLOSE, b"\x03\xf1")]

    async def send(self, data: bytes) -> None:
        """Take a little, then wait until the client has heard of its end, and break."""
        self.sent += len(data)
        self.largest = max(self.largest, len(data))
        self.is_reading.set()
        await anyio.sleep(0.01)
        if self.sent > 300_000:
            raise anyio.BrokenResourceError

    async def receive(self, _: int) -> bytes:
        """Give a frame."""
        await self.is_reading.wait()
        if not self._come:
            raise anyio.EndOfStream
        return self._come.pop(0).serialize(mask=False)

    async def aclose(self) -> None:
        """Be gone."""


def test_the_end_is_heard_amid_a_message_that_is_too_big() -> None:
    """The pong to a ping waited for the message, and the close behind it was never read."""
    judge, stream = judge_of(), Stream()
    protocol = ClientProtocol(parse_uri("ws://127.0.0.1:1"))
    request = protocol.connect()
    protocol.send_request(request)
    key = accept_key(request.headers["Sec-WebSocket-Key"])
    head = f"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: {key}\r\n\r\n"
    protocol.receive_data(f"HTTP/1.1 101 Switching Protocols\r\n{head}".encode())
    protocol.events_received()
    protocol.data_to_send()

    async def run() -> None:
        wire = SocketWire(stream, protocol, judge)  # type: ignore[arg-type]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wire.read)
            judge.says(None)
            await wire.send(None)

    anyio.run(run, backend="trio")
    assert judge.close == (1009, "")
    assert judge.findings == []
    assert stream.largest <= 65_536
    assert stream.sent < TOO_BIG_BYTES
