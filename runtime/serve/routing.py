"""Where a client connects, and the mode, dialect and label of its session.

| path | is |
|---|---|
| `/v1/realtime?mode={mode}` | `realtime`, or `duplex-v1` by its first message (000, 001) |
| `/v1/realtime?mode={mode}&fork={id}` | the same, from the past of a recorded session of this |
| | address and mode, before unit `&at=` |
| `/v1/realtime?mode=transcription` | `transcription` (003) |
| `/ws/duplex/{label}` | `legacy-duplex`; the label's prefix says whether it has video (002) |
| `/ws/duplex?session_id={label}` | the same, as a worker's own address: with a slot free, |
| | `prepared` comes first, and the label may be left out (002) |
| `/ws/half_duplex/{label}` | `legacy-duplex`, behind the half-duplex page of the |
| | demo (`api.half_duplex`) |
| `/ws/chat` | `legacy-chat` (004) |
| `/v1/live/sessions` | `live` |
| `/v1/live/sessions/{id}/fork` | `live`, from the past of a recorded session, before unit `?at=` |
| `/v1/live/sessions/{id}/attach` | no session: it listens to a running one (`SidebandServer`) |
| `/v1/realtime?model={model}` without a mode | `openai` |
| `/v1/realtime` with the subprotocol `realtime`, | `openai`, with the first model where none is |
| or a header of OpenAI's packages | named |
| `/v1/realtime?intent=transcription` | `openai-transcription` |
| `/v1/twilio` | `openai`, behind Twilio's Media Streams (`api.twilio`) |
| `/v1/realtime?duplex=1`, `/v1/duplex` | `vllm-omni`; `&model=` begins without a message, unless |
| | there is `&autostart=0` |

With `resumable=1` in the query the client may come back to its session after the loss of its
connection, and does so with `resume={recording_id}` at the same address.

A client of the beta of OpenAI's Realtime API, known by its header or subprotocol, is refused: it
would wait for other events. A label is the client's own, may repeat, and names nothing on the
server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from protocol.values.limits import LABEL_CHARS_MAX, OF_MODE, Mode
from protocol.wire import dialects
from protocol.wire.dialects import OPENING
from protocol.wire.table import Dialect

from ..access.gate import OPENAI_SUBPROTOCOL
from ..api.half_duplex import HALF_DUPLEX_PATH
from ..api.twilio import TWILIO_PATH
from ..net.http import LIVE_PATH
from ..session.setup import SessionSpec

REALTIME_PATH: Final = "/v1/realtime"
DUPLEX_PATH: Final = "/ws/duplex/"
CHAT_PATH: Final = "/ws/chat"
OMNI_PATH: Final = "/v1/duplex"
_ATTACH: Final = re.compile(rf"{LIVE_PATH}/([^/]+)/attach")
_FORK: Final = re.compile(rf"{LIVE_PATH}/([^/]+)/fork")
_UNIT: Final = re.compile(r"[0-9]{1,9}")
RECORDING_CHARS_MAX: Final = 64
"""A recording's id has 28 characters."""
AUDIO_LABELS: Final = ("adx_", "audio_duplex")
"""Prefixes of the labels of sessions without video (the wire decisions, legacy-duplex)."""
_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"0", "false", "no", "off"})
"""The words of vLLM-Omni's switches."""
MODEL_CHARS_MAX: Final = 256
"""Of a model's name in an address: no model has a longer one."""
OPENAI_HEADER: Final = "openai-beta"
OPENAI_SDK: Final = "x-stainless-lang"
"""A header of OpenAI's own packages."""
OPENAI_BETA: Final = "openai-beta."
"""Prefix of a browser's subprotocol that says the same."""


SPOKEN: Final[Mapping[str, tuple[str, str]]] = {
    "realtime": (f"{REALTIME_PATH}?mode={{mode}}", "session.init"),
    "duplex-v1": (f"{REALTIME_PATH}?mode={{mode}}", "session.update"),
    "transcription": (f"{REALTIME_PATH}?mode={{mode}}", "session.update"),
    "transcription-responses": (f"{REALTIME_PATH}?mode={{mode}}", "session.create"),
    "legacy-duplex": (f"{DUPLEX_PATH}{{session_id}}", "prepare"),
    "legacy-chat": (CHAT_PATH, ""),
    "live": (LIVE_PATH, "session.start"),
    "openai": (f"{REALTIME_PATH}?model={{model}}", ""),
    "openai-transcription": (f"{REALTIME_PATH}?intent=transcription", ""),
    "vllm-omni": (f"{REALTIME_PATH}?duplex=1", "session.update"),
}
"""All dialects: the address, and the type of the client's first message, or empty."""


@attrs.frozen(kw_only=True)
class Route(SessionSpec):
    """A client's session, as its handshake asks for it.

    Attributes:
        resume: the recording of the session to which it comes back; empty for a new one.
        fork: the session from whose past it begins; empty for none.
        at: the unit of that session before which it begins; None: its end.
    """

    dialect: Dialect
    resume: str = ""
    fork: str = ""
    at: int | None = None


class NotServedError(Exception):
    """The address serves nothing; `message` is for people, `code` and `details` for programs."""

    def __init__(self, status: int, code: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.details = status, code, message, details


def attached_to(path: str) -> str | None:
    """Return the name of the session to which a client attaches; None for other addresses."""
    found = _ATTACH.fullmatch(path)
    return None if found is None else found[1]


def route(
    path: str,
    query: Mapping[str, Sequence[str]],
    modes: Sequence[Mode],
    *,
    default: Mode,
    headers: Sequence[tuple[str, str]] = (),
    subprotocols: Sequence[str] = (),
) -> Route:
    """Choose a client's session from its handshake; `default` is the mode without a name.

    `NotServedError`: no such path or mode, an invalid label or query, or a client of the beta of
    OpenAI's Realtime API.
    """
    to = _address(path, query, modes, default=default, headers=headers, subprotocols=subprotocols)
    resumable, resume = query.get("resumable", ("0",)), query.get("resume", ("",))
    if list(resumable) not in (["0"], ["1"]):
        raise NotServedError(400, "invalid_query", "resumable is 0 or 1")
    if len(resume) != 1 or len(resume[0]) > RECORDING_CHARS_MAX:
        raise NotServedError(400, "invalid_query", "resume names one recording")
    if to.dialect is dialects.OMNI:  # which has its own way back
        return attrs.evolve(to, resumable=True)
    return attrs.evolve(to, resumable=list(resumable) == ["1"], resume=resume[0])


def _address(
    path: str,
    query: Mapping[str, Sequence[str]],
    modes: Sequence[Mode],
    *,
    default: Mode,
    headers: Sequence[tuple[str, str]],
    subprotocols: Sequence[str],
) -> Route:
    if path == OMNI_PATH or (path == REALTIME_PATH and _value_of(query, "duplex") in _YES):
        return _omni(query, modes)
    if path == REALTIME_PATH:
        has_header = any(name == OPENAI_HEADER for name, _ in headers)
        if has_header or any(offered.startswith(OPENAI_BETA) for offered in subprotocols):
            text = "the beta of OpenAI's Realtime API is not spoken here, its GA version is"
            raise NotServedError(400, "dialect_not_served", text, dialects=_spoken(modes))
        model = query.get("model", ("",))
        label = model[0][:MODEL_CHARS_MAX] if len(model) == 1 else ""
        if "mode" not in query and list(query.get("intent", ())) == ["transcription"]:
            _refuse_fork(query)
            mode = _served("transcription", modes)
            return Route(
                mode=mode, dialect=dialects.OPENAI_TRANSCRIPTION, endpoint="openai", label=label
            )
        if "mode" not in query and "call_id" in query:
            text = "there are no calls to join here: connect with model=, without call_id="
            raise NotServedError(400, "invalid_query", text)
        is_sdk = "model" in query or any(name == OPENAI_SDK for name, _ in headers)
        is_openai = OPENAI_SUBPROTOCOL in subprotocols or (is_sdk and default != "transcription")
        if "mode" not in query and is_openai:
            _refuse_fork(query)
            audio = _served("audio", modes)
            return Route(mode=audio, dialect=dialects.OPENAI, endpoint="openai", label=label)
        mode = _mode_of(query.get("mode", (default,)), modes)
        dialect = dialects.TRANSCRIPTION if mode == "transcription" else OPENING
        fork, at = _fork(query, mode)
        return Route(mode=mode, dialect=dialect, endpoint="realtime", fork=fork, at=at)
    if path == TWILIO_PATH:
        return Route(mode=_served("audio", modes), dialect=dialects.OPENAI, endpoint="openai")
    if path == CHAT_PATH:
        return Route(mode=_served("chat", modes), dialect=dialects.LEGACY_CHAT, endpoint="chat")
    forked = _FORK.fullmatch(path)
    if path == LIVE_PATH or forked is not None:
        live = Route(mode=_served("audio", modes), dialect=dialects.LIVE, endpoint="live")
        return live if forked is None else attrs.evolve(live, fork=forked[1], at=_unit(query))
    if path == DUPLEX_PATH.rstrip("/"):
        labels = query.get("session_id", ("",))
        return _duplex(labels[0] if len(labels) == 1 else "/", modes, quiet=True)
    if path.startswith(HALF_DUPLEX_PATH):
        half = _duplex(path.removeprefix(HALF_DUPLEX_PATH), modes, quiet=False)
        return attrs.evolve(half, mode=_served("audio", modes))
    if path.startswith(DUPLEX_PATH):
        return _duplex(path.removeprefix(DUPLEX_PATH), modes, quiet=False)
    paths = f"{REALTIME_PATH}, {LIVE_PATH}, {DUPLEX_PATH}{{session_id}} and {CHAT_PATH}"
    raise NotServedError(404, "not_found", f"the WebSocket endpoints are {paths}")


def _duplex(label: str, modes: Sequence[Mode], *, quiet: bool) -> Route:
    """Route a client of 002; a worker's own address needs no label."""
    is_there = 0 < len(label) <= LABEL_CHARS_MAX
    if not (is_there or (quiet and not label)) or not label.isprintable() or "/" in label:
        text = f"a session id has 1 to {LABEL_CHARS_MAX} printable characters and no slash"
        raise NotServedError(400, "invalid_session_id", text)
    asked: Mode = "audio" if label.startswith(AUDIO_LABELS) else "video"
    return Route(
        mode=_served(asked, modes),
        dialect=dialects.LEGACY_DUPLEX,
        endpoint="duplex",
        label=label,
        quiet=quiet,
    )


def _omni(query: Mapping[str, Sequence[str]], modes: Sequence[Mode]) -> Route:
    """Route a client of vLLM-Omni; where it names a model, its session begins without a message."""
    seen: tuple[Mode, ...] = ("video", "audio")
    mode: Mode = next((it for it in seen if it in modes), "audio")
    waits = _value_of(query, "autostart") in _NO or _value_of(query, "resume") in _YES
    label = "" if waits else _value_of(query, "model")[:MODEL_CHARS_MAX]
    asked = _mode_of(query["mode"], seen) if "mode" in query else mode
    return Route(mode=_served(asked, modes), dialect=dialects.OMNI, endpoint="omni", label=label)


def _value_of(query: Mapping[str, Sequence[str]], name: str) -> str:
    found = query.get(name, ())
    return found[0] if len(found) == 1 else ""


def _fork(query: Mapping[str, Sequence[str]], mode: Mode) -> tuple[str, int | None]:
    """The session from whose past another one begins, and where; empty for none."""
    asked = query.get("fork")
    if asked is None:
        return "", None
    if len(asked) != 1 or not 0 < len(asked[0]) <= RECORDING_CHARS_MAX:
        raise NotServedError(400, "invalid_query", "fork names one recording")
    if OF_MODE[mode].work != "unit":
        raise NotServedError(400, "invalid_query", "only sessions of video and audio have forks")
    return asked[0], _unit(query)


def _refuse_fork(query: Mapping[str, Sequence[str]]) -> None:
    if "fork" in query:
        text = "a fork has the mode of its recording: add mode=; OpenAI's Realtime API has none"
        raise NotServedError(400, "invalid_query", text)


def _unit(query: Mapping[str, Sequence[str]]) -> int | None:
    at = query.get("at", ())
    if at and (len(at) > 1 or not _UNIT.fullmatch(at[0])):
        raise NotServedError(400, "invalid_query", "at is the number of a unit, from 0")
    return int(at[0]) if at else None


def _mode_of(asked: Sequence[str], modes: Sequence[Mode]) -> Mode:
    for mode in modes:
        if list(asked) == [mode]:
            return mode
    raise NotServedError(400, "invalid_mode", "unknown mode", allowed=list(modes))


def _spoken(modes: Sequence[Mode]) -> list[dict[str, object]]:
    """List the dialects that are served, for a client of another protocol."""
    served = {name: [it for it in dialects.MODES_OF[name] if it in modes] for name in SPOKEN}
    return [
        {"dialect": name, "address": address, "modes": served[name], "first_message": first or None}
        for name, (address, first) in SPOKEN.items()
        if served[name]
    ]


def _served(mode: Mode, modes: Sequence[Mode]) -> Mode:
    if mode not in modes:
        raise NotServedError(404, "not_served", f"the model does not serve {mode}")
    return mode
