"""What of a server's message each dialect can tell; each says so in its file's docstring."""

from __future__ import annotations

from typing import Any

import attrs

from protocol.values.messages import (
    Closed,
    Created,
    Delta,
    Listen,
    Metrics,
    Queued,
    QueuePlace,
    QueueUpdate,
    Response,
    ServerMessage,
    Speech,
)
from protocol.wire.audio import to_float32, to_pcm16

NO_METRICS = Metrics(kv_cache_length=0, recording="off")


def told_in_realtime(message: ServerMessage) -> ServerMessage:
    """001 has no clock, and answers do not say what they were asked for, or where they are kept."""
    match message:
        case Listen() | Speech():
            return attrs.evolve(message, metrics=without_clock(message.metrics))
        case Response():
            return attrs.evolve(
                message, recording_id="", streaming=None, metrics=without_clock(message.metrics)
            )
    return message


def without_clock(metrics: Metrics) -> Metrics:
    """Metrics that do not tell the time."""
    return attrs.evolve(metrics, session_ms=0.0, wall_ms=0.0)


def told_in_duplex_v1(message: ServerMessage) -> ServerMessage:
    """000 has no ids, and fewer words for the end."""
    match message:
        case Listen() | Speech():
            return without_ids(told_in_realtime(message))
        case Closed():
            words = {"invalid_frame": "backend_error", "cancelled": "client"}
            reason: Any = words.get(message.reason, message.reason)
            return Closed(session_id="", reason=reason)
    return told_in_realtime(message)


def without_ids(message: Any) -> Any:
    """A message without the ids of its session, response and input."""
    names = {field.name for field in attrs.fields(type(message))}
    return attrs.evolve(
        message, **dict.fromkeys(names & {"session_id", "response_id", "input_id"}, "")
    )


def told_in_legacy_duplex(message: ServerMessage) -> ServerMessage:
    """002 has no ids, no metrics of prefill, of drops or of the recording, and no own reasons."""
    match message:
        case Created(recording_id=recording_id):
            recording: Any = "on" if recording_id else "off"
            return attrs.evolve(without_ids(message), recording=recording)
        case Listen() | Speech():
            metrics = attrs.evolve(
                message.metrics, prefill_ms=0.0, dropped_units=0, recording="off"
            )
            return without_ids(attrs.evolve(message, metrics=metrics))
        case Closed(reason="client" | "cancelled", session_id=session_id):
            return Closed(session_id=session_id, reason="client")
        case Closed():
            return without_ids(message)
    return message


def told_in_legacy_chat(message: ServerMessage) -> ServerMessage:
    """004 has no ids, no reasons and no metrics."""
    match message:
        case Delta():
            return without_ids(message)
        case Response():
            plain = attrs.evolve(message, reason="turn_end", streaming=None, metrics=NO_METRICS)
            return without_ids(plain)
    return message


def told_in_live(message: ServerMessage) -> ServerMessage:
    """`live` has no ids but the session's, no metrics, 16-bit sound, and three words for an end."""
    match message:
        case Queued() | QueueUpdate():
            return Queued(
                place=QueuePlace(position=0, estimated_wait_s=0, ticket_id="", queue_length=0)
            )
        case Created():
            return attrs.evolve(message, session_id="", prompt_length=0, recording="off")
        case Listen():
            return without_ids(attrs.evolve(message, metrics=NO_METRICS))
        case Speech(pcm=pcm):
            plain = attrs.evolve(message, metrics=NO_METRICS, end_of_turn=False)
            return without_ids(attrs.evolve(plain, pcm=to_float32(to_pcm16(pcm))))
        case Closed():
            ends: Any = {"client": "client", "cancelled": "client", "timeout": "timeout"}
            ends |= {"context_full": "timeout"}
            reason = ends.get(message.reason, "backend_error")
            return attrs.evolve(message, session_id="", reason=reason)
    return message


def told_in_omni(message: ServerMessage) -> ServerMessage:
    """`vllm-omni` has no ids of input and no metrics, 16-bit sound, and one word for lost clients.

    The place of a second in its response is read with its sound, not with its words.
    """
    match message:
        case Created():
            return attrs.evolve(message, session_id="", prompt_length=0, recording="off")
        case Listen():
            return attrs.evolve(message, metrics=NO_METRICS, input_id="")
        case Closed(reason="flooded"):
            return attrs.evolve(message, reason="invalid_frame")
        case Speech(epoch=epoch):
            return attrs.evolve(told_in_openai(message), epoch=0 * epoch)
    return told_in_openai(message)


def told_in_openai(message: ServerMessage) -> ServerMessage:
    """`openai` has no ids but those of responses and items, no metrics, and 16-bit sound."""
    match message:
        case Created():
            return attrs.evolve(message, session_id="", prompt_length=0, recording="off")
        case Speech(pcm=pcm, response_id=response_id):
            plain = attrs.evolve(message, metrics=NO_METRICS, end_of_turn=False)
            plain = without_ids(attrs.evolve(plain, pcm=to_float32(to_pcm16(pcm))))
            return attrs.evolve(plain, response_id=response_id)
    return message
