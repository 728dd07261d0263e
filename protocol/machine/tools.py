"""The calls of tools in a duplex session, and the events that wait for the model.

made in silence -> sent to the client, and `started` to the model -> result -> fed to the model

- The model knows a call by a short name, `t1`, `t2`..., the client by an id. What is not a
  call of a tool that was offered, or one too many, is answered by an error, and never sent.
- A call that was sent has exactly one end: its result, its time, or the session's (B12). Another
  result is refused, and so is one of a call that the session has not sent.
- Events are fed with the next unit: first what started, then the rest in the order in which it
  came, `INPUT_CHARS_MAX` characters at most. Those of a unit that is undone are fed again.
- The client's speech, and interrupts, touch no call; an interrupt ends the unit's silent part, as
  its budget does, and what was being written goes on in the next.
- The time of calls stands still from when the session leaves its slot until its model is rebuilt:
  also in the queue, and while the client is away without a slot.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import attrs

from ..values import limits
from ..values.errors import ErrorCode
from ..values.messages import ToolCalled
from ..values.model import Silent, Span, Tool, ToolCall, ToolChoice, ToolResult, UnitInput
from ..values.requests import ClientMessage, TellModel
from ..values.utf8 import Refused
from .core import Step, Timers
from .peer import Peer

_ERROR: Final = "error: "
_LATE: Final = f"{_ERROR}no answer in time"
_LOST: Final = f"{_ERROR}the call was lost"
_UNKNOWN: Final = "there is no tool of this name"
_MANY_OPEN: Final = "too many calls wait for a result"
_MANY: Final = "too many calls"
UNANSWERED: Final = frozenset(
    {_LATE, _LOST, *(f"{_ERROR}{fault}" for fault in (_UNKNOWN, _MANY_OPEN, _MANY))}
)
"""What the model is told in place of a result, but of calls that cannot be read."""


@attrs.frozen(kw_only=True)
class OpenCall:
    """A call without a result yet: the name by which the model knows it, and its deadline."""

    name: str
    deadline_ns: int


@attrs.define(eq=False)
class ToolCalls:
    """The calls of one session.

    Attributes:
        offered: the client's tools; none where the model calls none.
        made: calls that the model closed, those that were not sent included.
        allowed: names of the tools that the client takes calls of now; None: of all.
        is_serial: the client takes no call while another waits for its result.
        open: calls that were sent and have no end, by the client's id, the oldest first.
        started, waiting: events that no unit has fed yet.
        made_ns: when the last calls were sent, within a minute.
        texts_ns: when the last texts without a call came, within a second.
        failures: silent parts that failed in a row (B3).
        refusals: units that ended with a refused call, since the client last sent sound or a
            result; `is_refused`: the unit whose calls are being sent is such a unit.
        is_cut: the silent part in progress is being cut.
        takes_events: the model has a place for events without a call.
        stopped_ns: since when the time of open calls stands still, for the model is away (B11).
    """

    step: Step
    timers: Timers
    peer: Peer
    offered: tuple[Tool, ...] = ()
    allowed: tuple[str, ...] | None = None
    is_serial: bool = False
    made: int = 0
    open: dict[str, OpenCall] = attrs.Factory(dict)
    started: deque[UnitInput] = attrs.Factory(deque)
    waiting: deque[UnitInput] = attrs.Factory(deque)
    made_ns: deque[int] = attrs.Factory(deque)
    texts_ns: deque[int] = attrs.Factory(deque)
    failures: int = 0
    refusals: int = 0
    is_refused: bool = False
    is_cut: bool = False
    takes_events: bool = True
    stopped_ns: int | None = None

    # -- the model ------------------------------------------------------------------------------

    def take(self, silent: Silent, unit: int) -> list[ToolCalled]:
        """Take what the model did in silence after a unit's speech; returns calls to be sent."""
        self.failures = self.failures + 1 if silent.end == "failed" else 0
        made = [self._called(span, unit) for span in silent.spans if span.kind == "call"]
        self.is_refused = bool(made) and made[-1] is None
        return [call for call in made if call is not None]

    def _called(self, span: Span, unit: int) -> ToolCalled | None:
        self.made += 1
        name = f"t{self.made}"
        self.started.append(UnitInput(kind="started", call=name))
        fault = span.fault or self._refuse_call(span.name)
        if fault:
            self._return(name, f"{_ERROR}{fault}")
            return None
        now_ns, call_id = self.step.now_ns, self.step.derive("call", self.made)
        self.made_ns.append(now_ns)
        deadline_ns = now_ns + limits.CALL_RESULT_S * limits.NS_PER_S
        self.open[call_id] = OpenCall(name=name, deadline_ns=deadline_ns)
        if len(self.open) == 1:
            self.timers.set_at("calls", deadline_ns)
        call = ToolCall(id=call_id, name=span.name, arguments=span.arguments)
        return ToolCalled(session_id=self.peer.session_id, call=call, unit=unit)

    def _refuse_call(self, name: str) -> str:
        """Why a call is not sent, in words for the model; empty for one that is."""
        _forget(self.made_ns, self.step.now_ns - 60 * limits.NS_PER_S)
        is_allowed = self.allowed is None or name in self.allowed
        if not is_allowed or all(tool.name != name for tool in self.offered):
            return _UNKNOWN
        if len(self.open) >= (1 if self.is_serial else limits.CALLS_OPEN_MAX):
            return _MANY_OPEN
        if len(self.made_ns) >= limits.CALLS_A_MINUTE or self.made > limits.CALLS_SESSION_MAX:
            return _MANY
        return ""

    def _return(self, name: str, text: str) -> None:
        self.waiting.append(UnitInput(kind="result", call=name, text=text))

    def may_feed_refusals(self) -> bool:
        """Count a unit whose last call was refused; whether it may be answered in silence."""
        self.refusals += self.is_refused
        return self.refusals <= limits.REFUSALS_FED_MAX

    def next_inputs(self) -> tuple[UnitInput, ...]:
        """Take the events of the next unit."""
        inputs, chars = [*self.started], 0
        self.started.clear()
        while self.waiting:
            chars += len(self.waiting[0].text)
            if chars > limits.INPUT_CHARS_MAX and chars > len(self.waiting[0].text):
                break
            inputs.append(self.waiting.popleft())
        return tuple(inputs)

    def put_back(self, inputs: tuple[UnitInput, ...]) -> None:
        """Feed the events of a unit that is undone with the next one."""
        self.started.extendleft(it for it in reversed(inputs) if it.kind == "started")
        self.waiting.extendleft(it for it in reversed(inputs) if it.kind != "started")

    # -- the client -----------------------------------------------------------------------------

    def choose(
        self, tools: tuple[Tool, ...], *, is_open: bool = True, choice: ToolChoice = "auto"
    ) -> tuple[Tool, ...]:
        """Send calls only of some tools; returns those that the model has, if it is open."""
        names = {tool.name for tool in tools}
        if is_open:
            tools = tuple(tool for tool in self.offered if tool.name in names)
        self.allowed = () if choice == "none" else tuple(tool.name for tool in tools)
        return tools

    def refusal(self, message: ClientMessage, path: str = "$.tool_call_id") -> Refused | None:
        """Refuse a result that is not due, by the path of its call, and what has no room."""
        match message:
            case ToolResult(call_id=name, output=text):
                if name not in self.open:
                    words = f"{path}: no call of this session that waits for a result"
                    return Refused(code=ErrorCode.INVALID_PAYLOAD, message=words)
            case TellModel(text=text):
                if not (self.step.limits.duplex_tools and self.takes_events):
                    words = "this server's model takes no events"
                    return Refused(code=ErrorCode.INVALID_EVENT, message=words)
                since_ns = self.step.now_ns - limits.NS_PER_S
                if sum(at_ns > since_ns for at_ns in self.texts_ns) >= limits.TEXTS_A_SECOND:
                    words = f"at most {limits.TEXTS_A_SECOND} events a second: it is not kept"
                    return Refused(code=ErrorCode.NOT_READY, message=words)
            case _:
                return None
        chars = len(text) + sum(len(it.text) for it in self.waiting)
        if len(self.waiting) < limits.INPUTS_MAX and chars <= limits.INPUTS_CHARS_MAX:
            return None
        most = f"{limits.INPUTS_MAX} events and {limits.INPUTS_CHARS_MAX} characters"
        words = f"at most {most} wait for the model: it is not kept"
        return Refused(code=ErrorCode.NOT_READY, message=words)

    def returned(self, message: ToolResult) -> None:
        """Keep what a tool returned for the model."""
        self.refusals = 0
        self._return(self.open.pop(message.call_id).name, message.output)
        self._set_timer()

    def add_text(self, message: TellModel) -> None:
        """Keep an event for the model that belongs to no call."""
        _forget(self.texts_ns, self.step.now_ns - limits.NS_PER_S)
        self.texts_ns.append(self.step.now_ns)
        self.waiting.append(UnitInput(kind="text", text=message.text))

    def expire(self) -> None:
        """Close the calls whose time is over."""
        for call_id, call in list(self.open.items()):
            if call.deadline_ns <= self.step.now_ns:
                del self.open[call_id]
                self._return(call.name, _LATE)
        self._set_timer()

    def stop_time(self) -> None:
        """Let the time of open calls stand still: the model could not be given their results."""
        if self.open and self.stopped_ns is None:
            self.stopped_ns = self.step.now_ns
            self.timers.cancel("calls")

    def go_on(self) -> None:
        """Let it go on."""
        if self.stopped_ns is not None:
            away_ns = self.step.now_ns - self.stopped_ns
            for call_id, call in self.open.items():
                self.open[call_id] = attrs.evolve(call, deadline_ns=call.deadline_ns + away_ns)
            self.stopped_ns = None
            self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the oldest call, unless an earlier one is still set."""
        if self.stopped_ns is not None:
            return
        first = next(iter(self.open.values()), None)
        if first is None:
            self.timers.cancel("calls")
        elif "calls" not in self.timers.pending:
            self.timers.set_at("calls", first.deadline_ns)

    def forget_client(self) -> None:
        """Close the calls that were sent to the client of the session that a fork began from."""
        for call in self.open.values():
            self._return(call.name, _LOST)
        self.open.clear()
        self.stopped_ns = None


def _forget(times_ns: deque[int], until_ns: int) -> None:
    while times_ns and times_ns[0] <= until_ns:
        times_ns.popleft()
