"""The session of the `live` dialect: what its client asks for, and what is in force."""

from __future__ import annotations

from typing import Final, Literal, get_args

import attrs

from .model import LIVE_RATES_HZ, Coding, Tool
from .openai import Item

Delegation = Literal["client", "responses"]
"""Who handles tasks that the model delegates: calls of tools, for `responses`, and nothing else."""


@attrs.frozen(kw_only=True)
class LiveSettings:
    """The settings of `session.start` that no other dialect has.

    Attributes:
        model: a name of the server's model.
        coding: of the sound, in and out.
        rate_hz: samples a second, in and out: 24000 or 16000; of G.711 8000.
        delegation: who handles delegated tasks, if the client said.
        backend: the model to which they would be delegated, for `responses`.
        safety_identifier: the client's name for its user; may be empty.
        event_id: the client's name for the message; may be empty.
        history: what was said before the session.
        tools: functions that are offered to the model.
    """

    model: str = ""
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATES_HZ[0]
    delegation: Delegation | None = None
    backend: str = ""
    safety_identifier: str = ""
    event_id: str = ""
    history: tuple[Item, ...] = ()
    tools: tuple[Tool, ...] = ()


@attrs.frozen(kw_only=True)
class LiveSession:
    """A session as it is in force, with the defaults filled in.

    Attributes:
        id: the session.
        expires_at: when it ends at the latest, Unix time in whole seconds.
        model: the name by which the client chose it.
        coding: of the sound, in and out.
        rate_hz: samples a second, in and out.
        delegation: who handles delegated tasks, if the client said.
        backend: the model to which they would be delegated, for `responses`.
        safety_identifier: the client's name for its user; may be empty.
        instructions: the system prompt; may be empty.
        voice: the name of the voice; empty for the model's own.
        store: it is being recorded.
        tools: functions that are offered.
    """

    id: str = ""
    expires_at: int = 0
    model: str = ""
    coding: Coding = "audio/pcm"
    rate_hz: int = LIVE_RATES_HZ[0]
    delegation: Delegation | None = None
    backend: str = ""
    safety_identifier: str = ""
    instructions: str = ""
    voice: str = ""
    store: bool = False
    tools: tuple[Tool, ...] = ()


@attrs.frozen(kw_only=True)
class UserWords:
    """What the user said, as far as it is transcribed.

    Attributes:
        text: words since the last message, or a part of one; never empty.
        start_ms: where they begin in the session's sound, in milliseconds.
        end_ms: where they end there.
    """

    text: str
    start_ms: int
    end_ms: int


@attrs.frozen(kw_only=True)
class Muted:
    """From now on the model hears silence in place of the client's sound.

    Attributes:
        client_event_id: the client's name for its message; may be empty.
    """

    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Unmuted:
    """From now on the model hears the client's sound again.

    Attributes:
        client_event_id: the client's name for its message; may be empty.
    """

    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Updated:
    """The session's settings after an update.

    Attributes:
        live: the session as it is in force.
        client_event_id: the client's name for its message; may be empty.
    """

    live: LiveSession = LiveSession()
    client_event_id: str = ""


@attrs.frozen(kw_only=True)
class Usage:
    """The session's use so far.

    Attributes:
        seconds: whole seconds of sound that the model heard.
        ratio: part of the model's context that is full, 0 to 1.
    """

    seconds: int
    ratio: float


@attrs.frozen(kw_only=True)
class Notice:
    """Information without consequence.

    Attributes:
        code: for programs.
        text: for people.
    """

    code: str
    text: str


@attrs.frozen(kw_only=True)
class Mute:
    """Let the model hear silence from here on.

    Attributes:
        event_id: the client's name for the message; may be empty.
    """

    event_id: str = ""
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Unmute:
    """Let the model hear the client again.

    Attributes:
        event_id: the client's name for the message; may be empty.
    """

    event_id: str = ""
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Update:
    """Change settings of a session that is set up: only its tools; equal ones are taken.

    Attributes:
        event_id: the client's name for the message; may be empty.
        tools: functions that are offered; None leaves them.
    """

    event_id: str = ""
    tools: tuple[Tool, ...] | None = None
    ignored: tuple[str, ...] = ()


LiveAnswer = Muted | Unmuted | UserWords | Updated | Usage | Notice
LIVE_ANSWERS: Final = get_args(LiveAnswer)
"""All that only a client of `live` is told."""
