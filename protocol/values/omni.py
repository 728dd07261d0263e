"""The session of the `vllm-omni` dialect: what its client asks for, and what only it is told.

Items, responses and their steps are those of `openai`.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import attrs

from .openai import Modality, TurnDetection

Overlap = Literal["listen_only", "barge_in_on_speech"]
"""What speech of the user does while the model speaks: the model decides, or it is stopped."""
History = Literal["ack_only", "commit_all_on_done"]
"""Which words stay in the item of a response that is cut: those that were acknowledged, or all."""


@attrs.frozen(kw_only=True)
class OmniSettings:
    """The settings of `session.update` that no other dialect has; None: as it was.

    Attributes:
        model: a name of the server's model; None: any.
        modality: what a response is made of: speech with its transcript, or text.
        overlap: what speech of the user does while the model speaks.
        history: which words of a response stay in its item when it is cut.
        answers: the model speaks by itself; else it listens until it is asked for a response.
        detection: how speech of the client is found, which stops the model's.
    """

    model: str | None = None
    modality: Modality | None = None
    overlap: Overlap | None = None
    history: History | None = None
    answers: bool | None = None
    detection: TurnDetection | None = None


@attrs.frozen(kw_only=True)
class OmniSession:
    """A session as it is in force.

    Attributes:
        id: the session.
        model: the name by which the client chose it.
        instructions: the system prompt; may be empty.
        modality: as in the settings.
        overlap: as in the settings.
        history: as in the settings.
        answers: as in the settings.
        detection: as in the settings.
        epoch: how often the client has interrupted.
        turn_id: how often it has committed sound.
        is_resumable: its client may come back to it.
    """

    id: str = ""
    model: str = ""
    instructions: str = ""
    modality: Modality = "audio"
    overlap: Overlap = "listen_only"
    history: History = "ack_only"
    answers: bool = True
    detection: TurnDetection | None = None
    epoch: int = 0
    turn_id: int = 0
    is_resumable: bool = False


# -- what the client asks for ----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class CommitTurn:
    """Make an item of the sound so far.

    Attributes:
        responds: a response is asked for; None: the model decides.
        is_speech: false: the sound was only noise, and needs no answer.
    """

    responds: bool | None = None
    is_speech: bool = True
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Heartbeat:
    """The client is there."""

    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class BargeIn:
    """The client interrupts the model."""

    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class ClearOutput:
    """The client plays no more of the response, so the model stops."""

    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class AckPlayback:
    """How much of a response was played.

    Attributes:
        played_ms: milliseconds of the response's sound.
        committed_ms: how much of that was heard; None: all.
        response_id: the response; None: the last one.
        item_id: its item; None: of that response.
        truncates: the rest is not played, and its item loses those words.
    """

    played_ms: int
    committed_ms: int | None = None
    response_id: str | None = None
    item_id: str | None = None
    truncates: bool = False
    ignored: tuple[str, ...] = ()


# -- what the client is told -----------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class SessionUpdated:
    """The session's settings after a change, and after its set-up.

    Attributes:
        omni: the session as it is in force.
    """

    omni: OmniSession = OmniSession()


@attrs.frozen(kw_only=True)
class HeartbeatAck:
    """The answer to a heartbeat.

    Attributes:
        session_id: the session.
    """

    session_id: str


@attrs.frozen(kw_only=True)
class Speaking:
    """The model has decided to speak: the first second of a response comes.

    Attributes:
        response_id: the response.
        epoch: how often the client has interrupted.
    """

    response_id: str
    epoch: int


@attrs.frozen(kw_only=True)
class OutputCleared:
    """The response was stopped, and what the client has not played is void.

    Attributes:
        response_id: the response.
    """

    response_id: str


@attrs.frozen(kw_only=True)
class RateLimits:
    """A response is over; there are no limits to tell."""


@attrs.frozen(kw_only=True)
class Playback:
    """Where a response stands, in milliseconds of its sound.

    Attributes:
        generated_ms: spoken by the model, and sent.
        played_ms, committed_ms: as the client last said.
    """

    generated_ms: int = 0
    played_ms: int = 0
    committed_ms: int = 0


@attrs.frozen(kw_only=True)
class Acknowledged:
    """The answer to an acknowledgement of playback.

    Attributes:
        session_id: the session.
        epoch: how often the client has interrupted.
        item_id: the item of the response.
        playback: where the response stands now.
        truncates: as it was asked for.
        is_whole: the response is over, and the client has heard it to its end.
    """

    session_id: str
    epoch: int
    item_id: str
    playback: Playback
    truncates: bool
    is_whole: bool


@attrs.frozen(kw_only=True)
class SessionResumed:
    """The client is back on another connection; what it has missed follows.

    Attributes:
        session_id: the session.
        connection: the number of the connection, from 1.
        omni: the session as it is in force.
    """

    session_id: str
    connection: int
    omni: OmniSession = OmniSession()


OmniRequest = CommitTurn | Heartbeat | BargeIn | ClearOutput | AckPlayback
OmniAnswer = SessionUpdated | HeartbeatAck | Speaking | OutputCleared | RateLimits | Acknowledged
ANSWERS: Final = get_args(OmniAnswer)
"""All that only a client of `vllm-omni` is told."""
