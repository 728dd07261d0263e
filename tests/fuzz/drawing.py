"""Hypothesis strategies for messages and for whole cases.

- `bodies` are valid messages, from the protocols' schemas. `broken` breaks a few places of a body:
  another type, out of range, too long, too deep, bad base64, unlikely Unicode, a field missing or
  added. `broken_texts` breaks a frame's text: duplicate keys, invalid numbers, lone surrogates,
  pieces cut out. Sound and files are markers (`case`).
- `cases` are clients that know the tables, and break them on purpose. The plan keeps the session's
  expected gate, and draws each move from `state.RECEPTION`: an allowed message, a forbidden one, a
  broken one, garbage, or a fault. Most moves wait for their answer.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from hypothesis import strategies as st

from protocol.values.limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN, CALL_RESULT_S, Mode
from protocol.values.requests import Request
from protocol.values.state import ACCEPT, Gate, SessionKind, State, gate_of, judge, session_kind_of
from protocol.wire.codec import IMAGE_URL
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.schema import Message
from tests.fuzz.case import (
    FAULTS,
    LOCAL_FAULTS,
    MATERIAL_BYTES_MAX,
    Case,
    Step,
    described,
    is_marker,
    size_of,
)
from tests.fuzz.judge import CANARY
from tests.fuzz.play import SCRIPTS, append_of, init_of

# -- messages -------------------------------------------------------------------------------------

Json = dict[str, Any]
Strategy = st.SearchStrategy[Any]

MEDIA: Final[Mapping[str, tuple[Json, ...]]] = {
    "float32 PCM": ({"$pcm": 16_000}, {"$pcm": 16_000}, {"$pcm": 8_000}, {"$pcm": 40_000}),
    "int16 PCM": ({"$wav": 1}, {"$bytes": 32_000}, {"$bytes": 50_000}, {"$bytes": 2}),
    "audio/wav": ({"$wav": 1}, {"$wav": 1, "$rate_hz": 48_000, "$channels": 2}),
    "image/jpeg": ({"$jpeg": "64x48"},),
    "image/png": ({"$head": "image/png"},),
    "image/webp": ({"$head": "image/webp"},),
    "video/mp4": ({"$head": "video/mp4"},),
    "video/webm": ({"$head": "video/webm"},),
}
"""Markers for media. Heads of files pass the check of their header only."""
IMAGE_URLS: Final = tuple(
    {**MEDIA[name][0], "$before": f"data:{name};base64,"}
    for name in ("image/jpeg", "image/png", "image/webp")
)
"""Markers for pictures in data URLs."""
UNICODE: Final = (
    "\u202egnp.exe",
    "e\u0301\u0323\u0489" * 3,
    "\U0001f469\u200d\U0001f467",
    "\ufeff",
    "\uffff\ufffe",
    "\x00",
    "\x1b[2J",
    "\u2028",
    "\U0010ffff",
    "İı",
)
"""Right to left, combining, joined, marks, no characters, controls, line ends, the last one."""
TEXTS: Final = ("hello", "", CANARY, *UNICODE)
NUMBERS: Final = (0, 1, -1, 1.5, 1.0, -0.0, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, 5e-324)
TRAPS: Final[tuple[Any, ...]] = (
    *(None, True, False, [], {}, [[]], [None], {"": None}),
    *NUMBERS,
    *TEXTS,
    *("AAAA", "AAA", "AA=A", "====", "AA AA", "AAAA\n", "-_-_", "not base64"),
    *({"$text": 70}, {"$text": 40_000}, {"$text": 140_000}, {"$deep": 10}, {"$deep": 31}),
    *({"$deep": 32}, {"$deep": 33}, {"$deep": 300}),
    *({"$bytes": 3}, {"$bytes": 15_999}, {"$bytes": 16_001}, {"$bytes": 64_000}),
    *({"$pcm": 0}, {"$pcm": APPEND_SAMPLES_MIN - 1}, {"$pcm": APPEND_SAMPLES_MAX + 1}),
    *({"$pcm": 16_000, "$nan_at": 7}, {"$floats": [3.4e38, -3.4e38, 1e-45, -0.0]}),
    *({"$jpeg": "64x48"}, {"$jpeg": "16x900"}, {"$broken": {"$jpeg": "64x48"}}, {"$wav": 0.1}),
    *({"$broken": {"$wav": 1}}, {"$head": "image/png"}, {"$head": "video/webm"}),
    *({"$head": "image/webp"}, {"$broken": {"$head": "image/webp"}}),
)
"""Values of a wrong type, range or form."""
SPOTS_MAX: Final = 20_000
"""Places of a broken body: nested lists would multiply without end."""
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
"""Of a broken body, written out; two of them fit in a case (`case.MATERIAL_BYTES_MAX`)."""
LISTED_MAX: Final = 2
"""Items of an array: more add nothing."""

texts: Final[Strategy] = st.sampled_from(TEXTS) | st.text(max_size=8)


@cache
def client_messages(dialect: str, session_kind: SessionKind) -> tuple[Message, ...]:
    """A client's messages in a session kind."""
    return tuple(
        message
        for message in described(dialect)
        if message.sender == "client" and session_kind in message.session_kinds
    )


@cache
def all_messages() -> tuple[Message, ...]:
    """The clients' messages in all dialects and session kinds."""
    found = (
        client_messages(name, session_kind) for name in DIALECTS for session_kind in SessionKind
    )
    return tuple(message for messages in found for message in messages)


# -- in order -------------------------------------------------------------------------------------


def bodies(message: Message) -> Strategy:
    """Bodies of a client's message that are valid, or nearly."""
    return _bodies(all_messages().index(message))


@cache
def _bodies(number: int) -> Strategy:
    return bodies_of(all_messages()[number].schema).map(_mend)


def _mend(body: Any) -> Any:
    """Order a conversation: the system first, the user last, and results right behind calls."""
    made = copy.deepcopy(body)
    holder = made.get("input") if isinstance(made.get("input"), dict) else made
    asked = holder.get("messages") or []
    mended: list[Any] = []
    for number, message in enumerate(asked):
        is_last = number == len(asked) - 1
        if message["role"] == "tool" or is_last or (message["role"] == "system" and number > 0):
            message |= {"role": "user", "content": message.get("content") or "hello"}
            message.pop("tool_call_id", None)
        if message["role"] != "assistant":
            message.pop("tool_calls", None)
        mended.append(message)
        for place, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = f"call_{place}"
            mended.append({"role": "tool", "tool_call_id": call["id"], "content": "10:30"})
    if asked:
        holder["messages"] = mended
    return made


def bodies_of(schema: Json) -> Strategy:
    """Make values that the schema of a client's message, or of a part of it, allows."""
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("maxLength") == 0:
        return st.just("")
    if "contentEncoding" in schema:
        kinds = schema.get("x-antiphon-media", ["float32 PCM"])
        return st.sampled_from([marker for kind in kinds for marker in MEDIA[kind]])
    if schema.get("pattern") == IMAGE_URL.schema["pattern"]:
        return st.sampled_from(IMAGE_URLS)
    if "properties" in schema:
        return _objects(schema)
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return st.one_of([bodies_of(below) for below in schema[key]])
    if "items" in schema:
        low = schema.get("minItems", 0)
        return st.lists(bodies_of(schema["items"]), min_size=low, max_size=LISTED_MAX)
    return _leaves(schema)


def _leaves(schema: Json) -> Strategy:
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = schema.get("maximum", 1000)
    match kind:
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(low, high)
        case "number":
            at = st.sampled_from([high, (low + high) / 2])
            return at if "exclusiveMinimum" in schema else at | st.just(low)
        case "object":
            return st.just({})
    found = texts.filter(lambda text: len(text) >= schema.get("minLength", 0))
    return st.sampled_from(schema["examples"]) | found if "examples" in schema else found


def _objects(schema: Json) -> Strategy:
    required = set(schema.get("required", ()))
    for group in schema.get("anyOf", ())[:1]:
        required |= set(group["required"])
    fields = {key: bodies_of(below) for key, below in schema["properties"].items()}
    optional = {key: below for key, below in fields.items() if key not in required}
    return st.fixed_dictionaries(
        {key: below for key, below in fields.items() if key in required}, optional=optional
    )


# -- broken ---------------------------------------------------------------------------------------


@st.composite
def broken(draw: st.DrawFn, body: Json) -> Json:
    """Break a body in one to three places."""
    made: Json = copy.deepcopy(body)
    for _ in range(draw(st.integers(1, 3))):
        spots = _spots(made)
        if not spots:
            break
        holder, key = spots[draw(st.integers(0, len(spots) - 1))]
        action = draw(st.sampled_from(("replace", "remove", "add", "many")))
        if action == "replace":
            holder[key] = copy.deepcopy(draw(st.sampled_from(TRAPS)))
        elif action == "remove":
            del holder[key]
        elif action == "many" and isinstance(holder, list):
            holder *= min(draw(st.sampled_from((2, 5, 65, 300))), _times_max(made, holder))
        elif isinstance(holder, dict):
            name = draw(st.sampled_from((*TEXTS, "session", "audio", "model", "$.input", "x" * 70)))
            holder[name] = copy.deepcopy(draw(st.sampled_from(TRAPS)))
    return made


def _times_max(whole: Any, part: list[Any]) -> int:
    """How often a list of a body may be repeated."""
    places = (SPOTS_MAX - len(_spots(whole))) // max(1, len(_spots(part)))
    sizes = (BODY_BYTES_MAX - size_of(whole)) // max(1, size_of(part))
    return max(1, 1 + min(places, sizes))


def _spots(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a JSON value, as container and key; markers are whole."""
    if isinstance(value, dict) and not is_marker(value):
        own: list[tuple[Any, Any]] = [(value, key) for key in value]
    elif isinstance(value, list):
        own = [(value, index) for index in range(len(value))]
    else:
        return []
    return own + [spot for holder, key in own for spot in _spots(holder[key])]


PIECES: Final = (
    *('"', "{", "}", "[", "]", ":", ",", "\\", "\\u", "\\ud800", "\\udc00\\ud800", "\\u0000"),
    *("NaN", "Infinity", "-", "1e999", "9" * 400, "0x1", "01", "+1", "//", "'", "\ufeff", "\x00"),
    *("\n", "\t", "null", "true", "\u202e", "{}", "[" * 40 + "]" * 40, '{"a":' * 2000),
)
"""Inserted into the text of a frame."""
GARBAGE: Final = (
    *("", " ", "no JSON", "[]", "null", "7", '"text"', "{", "}", "{}{}", "[" * 5000),
    *('{"type":"nope","type":"nope"}', '{"a":NaN}', '{"a":-Infinity}', '{"\\ud800":1}'),
    *('{"a":"\\ud800"}', '{"type":"h\\u00e9llo","a":{"b":1,"b":2}}', '{"a":1e999}', "\ufeff{}"),
    *("{" + ",".join(f'"{at}":0' for at in range(200)) + "}", '{"a":' * 40 + "1" + "}" * 40),
    *('{"type":"' + "x" * 5000 + '"}', '{"type":null}', '{"type":{}}', "{}", "\x00{}"),
)
"""Frames that are no message of any dialect."""


@st.composite
def broken_texts(draw: st.DrawFn, body: Json) -> str:
    """A body's text, without its sound, broken."""
    text = json.dumps(_small(body))
    way = draw(st.sampled_from(("cut", "piece", "twice")))
    start = draw(st.integers(0, len(text)))
    if way == "cut":
        return text[:start]
    if way == "twice":
        again = ",".join(f"{json.dumps(key)}:0" for key in [*body][:1]) or '"a":0,"a":1'
        return text[:-1] + ("," if len(text) > 2 else "") + again + "}"
    stop = draw(st.integers(start, min(start + 8, len(text))))
    return text[:start] + draw(st.sampled_from(PIECES)) + text[stop:]


def _small(value: Any) -> Any:
    if is_marker(value):
        return "AAAA"
    if isinstance(value, dict):
        return {key: _small(item) for key, item in value.items()}
    return [_small(item) for item in value] if isinstance(value, list) else value


# -- whole cases ----------------------------------------------------------------------------------

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
HOLDING: Final = frozenset({SessionKind.DUPLEX, SessionKind.TRANSCRIPTION})
"""Courses that hold a slot from the queue to the end."""
_STATES: Final = frozenset({Gate.CONNECTED, Gate.ACTIVE})
"""Gates that are states, and may be split in a session kind."""
LIKELY: Final = (Request.INIT, Request.APPEND)
"""Drawn more often where they are allowed: without them nothing happens."""
MOVES: Final = (
    *("welcome",) * 6,
    *("unwelcome", "foreign", "broken", "broken", "broken", "text", "garbage"),
    *("fault", "binary", "big", "wait"),
)

TOOLS: Final = ({"type": "function", "function": {"name": "clock"}},)
TOOL_MOVES: Final = (*("second",) * 3, *("result",) * 4, "interrupt", "event", "late")
"""What a client does with tools: late is past a call's deadline."""
RESULTS: Final = st.sampled_from(
    ("nine", "", CANARY, {"$text": 4_096}, {"$text": 4_097}, {"$text": 1_000_000}, *UNICODE)
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
        plan.calls = script == "calls" and dialect in ("realtime", "duplex-v1")
        plan.calls &= plan.session_kind is SessionKind.DUPLEX
    if is_local and plan.session_kind in HOLDING and draw(st.integers(0, 7)) == 7:
        slots = 1
        plan.wait_in_line()
    elif plan.session_kind is not SessionKind.REQUEST:
        plan.steps.append(Step(kind="await", value="turn"))
    if plan.calls or draw(st.integers(0, 2)) == 2:
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
        self.session_kind = session_kind_of(
            mode, is_request=self._case.session_kind is SessionKind.REQUEST
        )
        self._messages = client_messages(dialect, self.session_kind)
        self._gate = self._in_session_kind(Gate.CONNECTED)
        self._waits = draw(st.integers(0, 4)) > 0
        self._size = 0
        self.calls = False
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
            self._gate = self._in_session_kind(Gate.CONNECTED)

    def _in_session_kind(self, gate: Gate) -> Gate:
        return gate_of(self.session_kind, State(gate.value)) if gate in _STATES else gate

    def begin(self) -> None:
        """Set the session up at once, so that more moves happen in it."""
        if self.session_kind is SessionKind.REQUEST:
            return
        self._say("send", init_of(self._case, tools=TOOLS if self.calls else ()))
        self._gate = self._in_session_kind(Gate.ACTIVE)
        if self.session_kind in HOLDING and self._draw(st.booleans()):
            self._say("send", append_of(self._case))

    def move(self) -> None:
        """Add one move."""
        draw = self._draw
        is_tool = self.calls and self._gate is Gate.ACTIVE and draw(st.integers(0, 2)) > 0
        match "tool" if is_tool else draw(st.sampled_from(MOVES)):
            case "tool":
                self._use_tool(draw(st.sampled_from(TOOL_MOVES)))
            case "welcome":
                message = self._pick(is_welcome=True)
                self._say("send", draw(bodies(message)))
                after = GATES_AFTER.get(message.request or Request.UNKNOWN, self._gate)
                self._gate = self._in_session_kind(after)
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
                    self._say("send_size", SIZES[self.session_kind not in HOLDING])
            case "wait":
                self._add("wait_s", draw(st.sampled_from((0.0, 0.01, 0.3, 2.0, 35.0, 65.0))))
            case "fault":
                self._break()

    def _use_tool(self, move: str) -> None:
        """Let the model call, interrupt it, answer a call, or none, or let its time pass."""
        draw = self._draw
        match move:
            case "second" | "interrupt":
                body = copy.deepcopy(append_of(self._case))
                body.get("input", body)["force_listen"] = move == "interrupt"
                self._say("send", body)
            case "late":
                self._add("wait_s", CALL_RESULT_S + 1.0)
            case "event":
                self._say("send", {"type": "input.standalone", "content": draw(RESULTS)})
            case _:
                call = {"$call": draw(st.integers(-1, 3))}
                result = {"type": "input.tool_result", "tool_call_id": call}
                self._say("send", {**result, "content": draw(RESULTS)})

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
