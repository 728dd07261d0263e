"""Where a client connects, and what it gets there: one session's mode, dialect and label.

| path | is |
|---|---|
| `/v1/realtime?mode={mode}` | `realtime`, or `duplex-v1` by its first message (000, 001) |
| `/v1/realtime?mode=transcription` | `transcription` (003) |
| `/ws/duplex/{label}` | `legacy-duplex`; the label's prefix says whether it has video (002) |
| `/ws/chat` | `legacy-chat` (004) |

A label is the client's own name for its session; it may repeat and names nothing on the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from protocol.dialects import LEGACY_CHAT, LEGACY_DUPLEX, TRANSCRIPTION
from protocol.dialects.base import Dialect
from protocol.dialects.opening import OPENING
from protocol.events import Endpoint
from protocol.limits import LABEL_CHARS_MAX
from protocol.messages import Mode

REALTIME_PATH: Final = "/v1/realtime"
DUPLEX_PATH: Final = "/ws/duplex/"
CHAT_PATH: Final = "/ws/chat"
AUDIO_LABELS: Final = ("adx_", "audio_duplex")
"""What the label of a session without video begins with (the wire decisions, legacy-duplex)."""


@attrs.frozen(kw_only=True)
class Route:
    """What a client gets.

    Attributes:
        mode: what its session carries.
        dialect: the wire protocol it begins with.
        endpoint: where it connected.
        label: its own name for the session; empty where it has none.
    """

    mode: Mode
    dialect: Dialect
    endpoint: Endpoint
    label: str = ""


class NotServedError(Exception):
    """There is nothing at that address.

    Args:
        status: of HTTP.
        code: short, for programs.
        message: one line, for people.
        details: more fields of the answer.
    """

    def __init__(self, status: int, code: str, message: str, **details: object) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.details = status, code, message, details


def route(
    path: str, query: Mapping[str, Sequence[str]], modes: Sequence[Mode], *, default: Mode
) -> Route:
    """Say what a client gets.

    Args:
        path: percent-decoded.
        query: each name's values.
        modes: those that the model has.
        default: the mode of an address that names none.

    Raises:
        NotServedError: there is no such path or mode, or the label is none.
    """
    if path == REALTIME_PATH:
        mode = _mode_of(query.get("mode", (default,)), modes)
        dialect = TRANSCRIPTION if mode == "transcription" else OPENING
        return Route(mode=mode, dialect=dialect, endpoint="realtime")
    if path == CHAT_PATH:
        return Route(mode=_served("chat", modes), dialect=LEGACY_CHAT, endpoint="chat")
    if path.startswith(DUPLEX_PATH):
        label = path.removeprefix(DUPLEX_PATH)
        if not 0 < len(label) <= LABEL_CHARS_MAX or not label.isprintable() or "/" in label:
            text = f"a session id has 1 to {LABEL_CHARS_MAX} printable characters and no slash"
            raise NotServedError(400, "invalid_session_id", text)
        asked: Mode = "audio" if label.startswith(AUDIO_LABELS) else "video"
        return Route(
            mode=_served(asked, modes), dialect=LEGACY_DUPLEX, endpoint="duplex", label=label
        )
    paths = f"{REALTIME_PATH}, {DUPLEX_PATH}{{session_id}} and {CHAT_PATH}"
    raise NotServedError(404, "not_found", f"the WebSocket endpoints are {paths}")


def _mode_of(asked: Sequence[str], modes: Sequence[Mode]) -> Mode:
    for mode in modes:
        if list(asked) == [mode]:
            return mode
    raise NotServedError(400, "invalid_mode", "unknown mode", allowed=list(modes))


def _served(mode: Mode, modes: Sequence[Mode]) -> Mode:
    if mode not in modes:
        raise NotServedError(404, "not_served", f"the model does not serve {mode}")
    return mode
