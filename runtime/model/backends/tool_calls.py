"""Calls of tools in an answer's text, told apart while it is written.

A call is `<tool_call>`, a JSON object with the `name` of a tool that was offered and an object of
`arguments`, and `</tool_call>`. Text that may be the beginning of one is held back, with the white
space before it, until that is decided. What turns out to be no call, or is one too many or too
long, is text again, its marks included. An answer that ends within a call ends with it as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import attrs

from protocol.values.errors import FrameError
from protocol.values.frames import count_keys
from protocol.values.limits import SILENT_CHARS_MAX, TOOL_CHARS_MAX
from protocol.values.model import CALLS_MAX, Span, Tool, ToolCall

BEGIN: Final = "<tool_call>"
END: Final = "</tool_call>"
CALL_CHARS_MAX: Final = TOOL_CHARS_MAX + 256
"""Characters between the marks: the arguments, the name, and what joins them."""


@attrs.define
class CallStream:
    """The text of one answer to a turn that offers tools.

    Attributes:
        tools: those that may be called.
        calls: complete so far.
        ends: calls that are over, those that became text included.
        is_open: the text is within a call.
    """

    tools: Sequence[Tool]
    calls: list[ToolCall] = attrs.Factory(list)
    ends: int = 0
    is_open: bool = False
    _held: str = ""
    _searched: int = 0

    @property
    def is_holding(self) -> bool:
        """Whether some text is held back."""
        return bool(self._held)

    def add(self, text: str) -> str:
        """Take the next text; return what belongs to no call."""
        self._held += text
        return "".join(self._decided())

    def end(self) -> str:
        """Return the text held back, at the end of the answer."""
        text, self._held, self.is_open = self._held, "", False
        return text

    def _decided(self) -> Iterator[str]:
        while True:
            mark = END if self.is_open else BEGIN
            at = self._held.find(mark, max(0, self._searched - len(mark)))
            self._searched = len(self._held)
            if self.is_open and (at < 0 or at > CALL_CHARS_MAX):
                if len(self._held) > CALL_CHARS_MAX:
                    self.is_open, self.ends = False, self.ends + 1
                    yield self._take(self._held.find(BEGIN) + len(BEGIN))
                    continue
                return
            if at < 0:
                yield self._take(_certain(self._held))
                return
            if self.is_open:
                yield self._close(at)
            else:
                yield self._take(len(self._held[:at].rstrip()))
                self.is_open = True

    def _close(self, at: int) -> str:
        """Take a whole call, which ends before `at`; return it as text if it is invalid."""
        self.is_open, self.ends = False, self.ends + 1
        body = self._held[self._held.find(BEGIN) + len(BEGIN) : at]
        text = self._take(at + len(END))
        try:
            call = read_call(body, self.tools)
        except CallInvalid:
            return text
        if len(self.calls) == CALLS_MAX:
            return text
        self.calls.append(call)
        return ""

    def _take(self, count: int) -> str:
        text, self._held, self._searched = self._held[:count], self._held[count:], 0
        return text


def _certain(text: str) -> int:
    """The length of the text before what may begin a call."""
    for count in range(min(len(BEGIN) - 1, len(text)), 0, -1):
        if text.endswith(BEGIN[:count]):
            return len(text[:-count].rstrip())
    return len(text.rstrip())


# -- the text between the marks -------------------------------------------------------------------


class CallInvalid(ValueError):  # noqa: N818 - names say what happened
    """The text is not a call of a tool that was offered; the message tells the model why."""


def read_call(text: str, tools: Sequence[Tool]) -> ToolCall:
    """Read a call, which has no id yet; `CallInvalid`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise CallInvalid("the call is not JSON") from None
    if not isinstance(found, dict) or found.keys() != {"name", "arguments"}:
        raise CallInvalid("a call has a name and arguments")
    if all(tool.name != found["name"] for tool in tools):
        raise CallInvalid("there is no tool of this name")
    return ToolCall(name=found["name"], arguments=written(found["arguments"]))


def written(arguments: object) -> str:
    """Write arguments as the chat template does."""
    if not isinstance(arguments, dict):
        raise CallInvalid("arguments are an object")
    try:
        count_keys(arguments)  # It bounds the depth.
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (FrameError, ValueError):
        raise CallInvalid("the arguments are not what JSON can hold") from None
    if len(text) > TOOL_CHARS_MAX:
        raise CallInvalid(f"arguments of more than {TOOL_CHARS_MAX} characters")
    return text


FAULT_CHARS_MAX: Final = 256
"""Of what the model is told about a call: it names what its author may have made long."""


def span_of(
    text: str, tools: Sequence[Tool], read: Callable[[str, Sequence[Tool]], ToolCall] = read_call
) -> Span:
    """Read a call that a model wrote in the silent part of its units, in the form of `read`."""
    if len(text) > SILENT_CHARS_MAX:
        return Span(kind="call", text=text[:SILENT_CHARS_MAX], fault="the call is too long")
    try:
        call = read(text, tools)
    except CallInvalid as error:
        return Span(kind="call", text=text, fault=str(error)[:FAULT_CHARS_MAX])
    return Span(kind="call", text=text, name=call.name, arguments=call.arguments)
