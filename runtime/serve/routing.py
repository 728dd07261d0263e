"""Where a client connects, and the mode, dialect and label of its session.

| path | is |
|---|---|
| `/v1/realtime?mode={mode}` | `realtime`, or `duplex-v1` by its first message (000, 001) |
| `/v1/realtime?mode=transcription` | `transcription` (003) |
| `/ws/duplex/{label}` | `legacy-duplex`; the label's prefix says whether it has video (002) |
| `/ws/duplex?session_id={label}` | the same, as a worker's own address: with a slot free, |
| | `prepared` comes first, and the label may be left out (002) |
| `/ws/chat` | `legacy-chat` (004) |
| `/v1/live/sessions` | `live` |

With `resumable=1` in the query the client may come back to its session after the loss of its
connection, and does so with `resume={recording_id}` at the same address.

A client of OpenAI's Realtime API, known by its address, a header or a subprotocol, is refused with
a list of the dialects: it would wait for other events. A label is the client's own, may repeat, and
names nothing on the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from protocol.values.events import Endpoint
from protocol.values.limits import LABEL_CHARS_MAX
from protocol.values.modes import Mode
from protocol.wire.dialects import LEGACY_CHAT, LEGACY_DUPLEX, LIVE, MODES_OF, TRANSCRIPTION
from protocol.wire.dialects.base import Dialect
from protocol.wire.dialects.opening import OPENING

REALTIME_PATH: Final = "/v1/realtime"
DUPLEX_PATH: Final = "/ws/duplex/"
CHAT_PATH: Final = "/ws/chat"
LIVE_PATH: Final = "/v1/live/sessions"
RECORDING_CHARS_MAX: Final = 64
"""A recording's id has 28 characters."""
AUDIO_LABELS: Final = ("adx_", "audio_duplex")
"""Prefixes of the labels of sessions without video (the wire decisions, legacy-duplex)."""
OPENAI_HEADER: Final = "openai-beta"
OPENAI_SUBPROTOCOL: Final = "realtime"
OPENAI_SUBPROTOCOLS: Final = ("openai-insecure-api-key.", "openai-beta.")
"""Prefixes of a browser's further offers; one holds a key, and is never sent back."""


@attrs.frozen(kw_only=True)
class Spoken:
    """A dialect, as it is listed to a client of another protocol.

    `first` is the type of the client's first message, or empty; `has_mode`: the query names a mode.
    """

    path: str
    first: str
    has_mode: bool = True


SPOKEN: Final[Mapping[str, Spoken]] = {
    "realtime": Spoken(path=REALTIME_PATH, first="session.init"),
    "duplex-v1": Spoken(path=REALTIME_PATH, first="session.update"),
    "transcription": Spoken(path=REALTIME_PATH, first="session.update"),
    "transcription-responses": Spoken(path=REALTIME_PATH, first="session.create"),
    "legacy-duplex": Spoken(path=f"{DUPLEX_PATH}{{session_id}}", first="prepare", has_mode=False),
    "legacy-chat": Spoken(path=CHAT_PATH, first="", has_mode=False),
    "live": Spoken(path=LIVE_PATH, first="session.start", has_mode=False),
}
"""All dialects, and their addresses."""


@attrs.frozen(kw_only=True)
class Route:
    """A client's session.

    Attributes:
        label: the client's name for it; may be empty.
        quiet: with a free slot, no queue messages.
        resumable: the client wants to be able to come back.
        resume: the recording of the session to which it comes back; empty for a new one.
    """

    mode: Mode
    dialect: Dialect
    endpoint: Endpoint
    label: str = ""
    quiet: bool = False
    resumable: bool = False
    resume: str = ""


class NotServedError(Exception):
    """The address serves nothing; `message` is for people, `code` and `details` for programs."""

    def __init__(self, status: int, code: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.details = status, code, message, details


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

    `NotServedError`: no such path or mode, an invalid label or query, or a client of OpenAI's
    Realtime API.
    """
    to = _address(path, query, modes, default=default, headers=headers, subprotocols=subprotocols)
    resumable, resume = query.get("resumable", ("0",)), query.get("resume", ("",))
    if list(resumable) not in (["0"], ["1"]):
        raise NotServedError(400, "invalid_query", "resumable is 0 or 1")
    if len(resume) != 1 or len(resume[0]) > RECORDING_CHARS_MAX:
        raise NotServedError(400, "invalid_query", "resume names one recording")
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
    if path == REALTIME_PATH:
        names_model = "model" in query and "mode" not in query and default != "transcription"
        if names_model or _is_openai(headers, subprotocols):
            text = "OpenAI's Realtime API is not spoken here; `dialects` lists what is"
            raise NotServedError(400, "dialect_not_served", text, dialects=_spoken(modes))
        mode = _mode_of(query.get("mode", (default,)), modes)
        dialect = TRANSCRIPTION if mode == "transcription" else OPENING
        return Route(mode=mode, dialect=dialect, endpoint="realtime")
    if path == CHAT_PATH:
        return Route(mode=_served("chat", modes), dialect=LEGACY_CHAT, endpoint="chat")
    if path == LIVE_PATH:
        return Route(mode=_served("audio", modes), dialect=LIVE, endpoint="live")
    if path == DUPLEX_PATH.rstrip("/"):
        labels = query.get("session_id", ("",))
        return _duplex(labels[0] if len(labels) == 1 else "/", modes, quiet=True)
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
        dialect=LEGACY_DUPLEX,
        endpoint="duplex",
        label=label,
        quiet=quiet,
    )


def _mode_of(asked: Sequence[str], modes: Sequence[Mode]) -> Mode:
    for mode in modes:
        if list(asked) == [mode]:
            return mode
    raise NotServedError(400, "invalid_mode", "unknown mode", allowed=list(modes))


def _is_openai(headers: Sequence[tuple[str, str]], subprotocols: Sequence[str]) -> bool:
    offers = any(offered.startswith(OPENAI_SUBPROTOCOLS) for offered in subprotocols)
    has_header = any(name == OPENAI_HEADER for name, _ in headers)
    return has_header or offers or OPENAI_SUBPROTOCOL in subprotocols


def _spoken(modes: Sequence[Mode]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, spoken in SPOKEN.items():
        served = [mode for mode in MODES_OF[name] if mode in modes]
        query = "?mode={mode}" if spoken.has_mode else ""
        if served:
            found.append(
                {
                    "dialect": name,
                    "address": spoken.path + query,
                    "modes": served,
                    "first_message": spoken.first or None,
                }
            )
    return found


def _served(mode: Mode, modes: Sequence[Mode]) -> Mode:
    if mode not in modes:
        raise NotServedError(404, "not_served", f"the model does not serve {mode}")
    return mode
