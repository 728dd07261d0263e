"""Strategies for whole cases: a client that knows the tables, and breaks them on purpose.

The plan keeps the session's expected gate, and draws each move from `state.RECEPTION`: an allowed
message, a forbidden one, a broken one, garbage, or a fault. Most moves wait for their answer.
"""

from __future__ import annotations

from typing import Any, Final

from hypothesis import strategies as st

from protocol.values.modes import Mode
from protocol.values.requests import Request
from protocol.values.state import ACCEPT, Course, Gate, State, course_of, gate_of, judge
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema.wire import Message

from .case import FAULTS, LOCAL_FAULTS, Case, Step
from .local import SCRIPTS
from .media import MATERIAL_BYTES_MAX, size_of
from .play import append_of, init_of
from .values import GARBAGE, all_messages, bodies, broken, broken_texts, client_messages

MOVES_MAX: Final = 8
"""Few bugs take more steps; longer cases find them no sooner, and shrink slower."""
SIZES: Final = (24 * 1024 * 1024 + 2, 96 * 1024 * 1024 + 2)
"""Just above the limit of a message, in duplex and in chat."""
RAW: Final = (
    "8380000000 00",  # a reserved opcode
    "c1809a9b9c9d",  # a reserved bit
    "0105",  # without a mask
    "81ff7fffffffffffffff00000000",  # longer than anything
    "898000000000 8900",  # a ping, and one without a mask
    "88820000000003e7",  # a close with an invalid code
    "888000000000",  # a close without one
    "8882000000000fff",  # another
    "888500000000 03e8fffefd",  # a close whose reason is no UTF-8
    "8183000000 00fffefd",  # text that is no UTF-8
    "808400000000 61626364",  # a continuation of nothing
    "018100000000 7b 818100000000 7d",  # a message within a message
    "89fe007e00000000" + "00" * 126,  # a ping that is too long
)
"""Invalid or unusual WebSocket frames (RFC 6455), with masks of zeros."""
GATES_AFTER: Final = {
    Request.INIT: Gate.ACTIVE,
    Request.PAUSE: Gate.PAUSED,
    Request.RESUME: Gate.ACTIVE,
    Request.CLOSE: Gate.CLOSED,
}
"""The gate after a valid message and its answer."""
HOLDING: Final = frozenset({Course.DUPLEX, Course.TRANSCRIPTION})
"""Courses that hold a slot from the queue to the end."""
_STATES: Final = frozenset({Gate.CONNECTED, Gate.ACTIVE})
"""Gates that are states, and may be split in a course."""
LIKELY: Final = (Request.INIT, Request.APPEND)
"""Drawn more often where they are allowed: without them nothing happens."""
MOVES: Final = (
    *("welcome",) * 6,
    *("unwelcome", "foreign", "broken", "broken", "broken", "text", "garbage"),
    *("fault", "binary", "big", "wait"),
)

Names = tuple[tuple[str, Mode], ...]


def all_names() -> Names:
    """Each dialect with each of its modes."""
    return tuple((dialect, mode) for dialect, modes in MODES_OF.items() for mode in modes)


@st.composite
def cases(draw: st.DrawFn, names: Names, *, is_local: bool) -> Case:
    """Draw a case of the dialects and modes of `names`.

    `is_local`: the server is in memory: its model and slots can be set, and there is no socket.
    """
    dialect, mode = draw(st.sampled_from(names))
    plan = _Plan(draw, dialect, mode, is_local=is_local)
    script, slots = "default", None
    if is_local and draw(st.integers(0, 3)) == 3:
        script = draw(st.sampled_from(tuple(SCRIPTS)))
    if is_local and plan.course in HOLDING and draw(st.integers(0, 7)) == 7:
        slots = 1
        plan.wait_in_line()
    elif plan.course is not Course.REQUEST:
        plan.steps.append(Step(kind="await", value="turn"))
    if draw(st.integers(0, 2)) == 2:
        plan.begin()
    for _ in range(draw(st.integers(1, MOVES_MAX))):
        plan.move()
    return Case(dialect=dialect, mode=mode, script=script, slots=slots, steps=tuple(plan.steps))


class _Plan:
    """The steps of a case so far, and the expected gate."""

    def __init__(self, draw: st.DrawFn, dialect: str, mode: Mode, *, is_local: bool) -> None:
        self._draw = draw
        self._case = Case(dialect=dialect, mode=mode, steps=())
        self._is_local = is_local
        self.course = course_of(mode, is_request=self._case.course is Course.REQUEST)
        self._messages = client_messages(dialect, self.course)
        self._gate = self._in_course(Gate.CONNECTED)
        self._waits = draw(st.integers(0, 4)) > 0
        self._size = 0
        self.steps: list[Step] = []

    def wait_in_line(self) -> None:
        """Wait behind another client, send messages, and get the slot, or not."""
        self._add("occupy", self._case.connect)
        self._gate = Gate.QUEUED
        for _ in range(self._draw(st.integers(0, 2))):
            self.move()
        if self._draw(st.booleans()):
            self._add("vacate", 0)
            self._add("await", "turn")
            self._gate = self._in_course(Gate.CONNECTED)

    def _in_course(self, gate: Gate) -> Gate:
        return gate_of(self.course, State(gate.value)) if gate in _STATES else gate

    def begin(self) -> None:
        """Set the session up at once, so that more moves happen in it."""
        if self.course is Course.REQUEST:
            return
        self._say("send", init_of(self._case))
        self._gate = self._in_course(Gate.ACTIVE)
        if self.course in HOLDING and self._draw(st.booleans()):
            self._say("send", append_of(self._case))

    def move(self) -> None:
        """Add one move."""
        draw = self._draw
        match draw(st.sampled_from(MOVES)):
            case "welcome":
                message = self._pick(is_welcome=True)
                self._say("send", draw(bodies(message)))
                after = GATES_AFTER.get(message.request or Request.UNKNOWN, self._gate)
                self._gate = self._in_course(after)
            case "unwelcome":
                self._say("send", draw(bodies(self._pick(is_welcome=False))))
            case "foreign":
                self._say("send", draw(bodies(draw(st.sampled_from(all_messages())))))
            case "broken":
                body = draw(bodies(self._pick(is_welcome=True)))
                self._say("send", draw(broken(body)))
            case "text":
                body = draw(bodies(self._pick(is_welcome=True)))
                self._say("send_text", draw(broken_texts(body)))
            case "garbage":
                self._say("send_text", draw(st.sampled_from(GARBAGE)))
            case "binary":
                self._say("send_binary", draw(st.sampled_from((0, 1, 4000))))
            case "big":
                if draw(st.integers(0, 9)) == 9:
                    self._say("send_size", SIZES[self.course not in HOLDING])
            case "wait":
                self._add("wait_s", draw(st.sampled_from((0.0, 0.01, 0.3, 2.0, 35.0, 65.0))))
            case "fault":
                self._break()

    def _break(self) -> None:
        draw = self._draw
        if draw(st.integers(0, 5)) == 5:
            self._add("leave", True)
        elif not self._is_local and draw(st.integers(0, 2)) == 2:
            self._add("raw", draw(st.sampled_from(RAW)).replace(" ", ""))
        else:
            names = LOCAL_FAULTS if self._is_local else tuple(FAULTS)[::-1]
            self._add("fault", draw(st.sampled_from(names)))

    def _pick(self, *, is_welcome: bool) -> Message:
        """Draw a message that is allowed at this gate, or one that is not."""
        found = [
            message
            for message in self._messages
            if (judge(self._gate, message.request or Request.UNKNOWN) == ACCEPT) is is_welcome
        ]
        found += [message for message in found if message.request in LIKELY] * 2
        return self._draw(st.sampled_from(found or list(self._messages)))

    def _say(self, kind: str, value: Any) -> None:
        """Add a message, unless the case would be too large."""
        size = 0 if kind == "send_size" else size_of(value)
        if self._size + size > MATERIAL_BYTES_MAX:
            return
        self._size += size
        self._add(kind, value)
        if self._waits or self._draw(st.integers(0, 2)) == 2:
            self._add("await", "answer")

    def _add(self, kind: str, value: Any) -> None:
        self.steps.append(Step(kind=kind, value=value))
