"""The dialects as the referee reads them: by the names of `realtime`.

002 has other names and its own end; `live` answers each unit by a second of sound, and answers what
is no unit as well; `openai` says nothing of a unit that listens, nor of the end. The units of both
are made of seconds that were resampled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import attrs
import pybase64

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.events import PIECES, Endpoint
from protocol.values.model import UNIT_BYTES
from protocol.wire.audio import to_float32
from tests.sessions.referee import Trace

_OF_002: Final = {
    "queued": "session.queued",
    "queue_done": "session.queue_done",
    "prepared": "session.created",
    "stopped": "session.closed",
    "timeout": "session.closed",
}
"""What 002 calls what the referee knows by the names of 001."""
_ENDS_002: Final = frozenset({"context_full", "backend_error", "server_shutdown", "invalid_frame"})
"""Errors that 002 says before its `stopped`, in place of a reason."""
_OF_LIVE: Final = {
    "session_queued": "session.queued",
    "slot_assigned": "session.queue_done",
    "session.started": "session.created",
    "session.output_audio.delta": "unit",
}
_OF_OPENAI: Final = {"response.output_audio.delta": "unit", "response.output_text.delta": "unit"}
_OMNI_SOUND: Final = "response.output_audio.delta"
_OMNI_WORDS: Final = frozenset({"response.output_audio_transcript.delta"})
_SECOND_NS: Final = 1_000_000_000
_TELLS: Final = (ev.UnitDone, ev.FinalizeDone, ev.Rebuilt)
"""Events that tell a unit's outcome; a second of `live` at another one is of no unit."""


class Spelling:
    """How one session's events and effects are shown to the referee."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint: Final = endpoint
        self._seconds: dict[int, bytes] = {}
        self._next = 0

    def of(
        self, event: ev.Event, effects: Sequence[ef.Effect]
    ) -> tuple[ev.Event, Sequence[ef.Effect]]:
        """Show a step."""
        match self._endpoint:
            case "duplex":
                return _as_realtime(event), _effects_as_realtime(effects)
            case "live":
                return _as_nothing(event), _renamed(effects, _OF_LIVE, event)
            case "omni":
                return _as_floats(event), _with_text(effects)
            case "openai":
                return _as_nothing(event), _renamed(effects, _OF_OPENAI, event)
        return _as_spelled(event), effects

    def take_sound(self, trace: Trace, event: ev.Event, effects: Sequence[ef.Effect]) -> None:
        """Show the seconds that were resampled, in their order, as what was appended."""
        if self._endpoint == "omni":
            trace.audio += _silence(trace, event, effects)
        if self._endpoint not in PIECES:
            return
        trace.tells_listens = trace.tells_end = self._endpoint == "live"
        if isinstance(event, ev.MediaDecoded):
            self._seconds[event.media] = event.pcm
        elif isinstance(event, ev.MediaRejected):
            self._seconds[event.media] = bytes(UNIT_BYTES)
        while self._next in self._seconds and trace.state != "CLOSED":
            trace.audio += self._seconds.pop(self._next)
            self._next += 1


def _renamed(
    effects: Sequence[ef.Effect], names: dict[str, str], event: ev.Event
) -> list[ef.Effect]:
    shown = list[ef.Effect]()
    is_context_full = False
    for effect in effects:
        if not isinstance(effect, ef.Send):
            shown.append(effect)
            continue
        body = json.loads(effect.frame)
        kind = body.get("code", "info") if body["type"] == "info" else body["type"]
        is_context_full |= kind == "context_full"
        kind = names.get(kind, kind)
        if kind == "session.closed" and is_context_full:
            body["reason"] = "context_full"
        if kind == "unit":
            is_told = isinstance(event, _TELLS)
            kind, body["kind"] = "response.output.delta", _outcome(body) if is_told else "none"
        shown.append(attrs.evolve(effect, frame=json.dumps(body | {"type": kind})))
    return shown


def _as_nothing(event: ev.Event) -> ev.Event:
    """Show the referee a message that it need not read."""
    return attrs.evolve(event, frame="{}") if isinstance(event, ev.FrameReceived) else event


def _silence(trace: Trace, event: ev.Event, effects: Sequence[ef.Effect]) -> bytes:
    """The silence that is taken in place of a client of `vllm-omni` that sends no sound.

    It is looked at as the client's sound is, or it is the rest of a second when none waits.
    """
    if isinstance(event, ev.FrameReceived):
        return b""
    looked_at = [it.data for it in effects if isinstance(it, ef.DetectSpeech)]
    if looked_at:
        return b"".join(map(to_float32, looked_at))
    timers = [it for it in effects if isinstance(it, ef.SetTimer) and it.name == "silence"]
    is_due = isinstance(event, ev.TimerFired) and event.name == "silence"
    is_due &= any(it.at_ns == event.at_ns + _SECOND_NS for it in timers)
    is_running = trace.lost is not None or (trace.call is not None and trace.call[0] == "unit")
    if not is_due or is_running or len(trace.audio) // UNIT_BYTES > len(trace.taken):
        return b""
    return bytes(UNIT_BYTES - len(trace.audio) % UNIT_BYTES)


def _as_floats(event: ev.Event) -> ev.Event:
    """Show the referee an append of 16-bit sound as one of 001; it need not read the rest."""
    if not isinstance(event, ev.FrameReceived) or not isinstance(event.frame, str):
        return event
    try:
        body = json.loads(event.frame)
        assert body["type"] == "input_audio_buffer.append"
        pcm = to_float32(pybase64.b64decode(body["audio"], validate=True))
    except (ValueError, KeyError, TypeError, AssertionError):
        return attrs.evolve(event, frame="{}")
    fields = {"audio": pybase64.b64encode(pcm).decode()}
    return attrs.evolve(event, frame=json.dumps({"type": "input.append", "input": fields}))


def _outcome(body: dict[str, Any]) -> str:
    """Whether a second has sound; what is withheld has none."""
    has_sound = "audio" not in body["type"] or any(pybase64.b64decode(body["delta"]))
    return "audio" if has_sound else "listen"


def _as_spelled(event: ev.Event) -> ev.Event:
    """Show the referee a `force_listen` as it looks for it, with a space."""
    if not isinstance(event, ev.FrameReceived) or not isinstance(event.frame, str):
        return event
    frame = event.frame.replace('"force_listen":true', '"force_listen": true')
    return attrs.evolve(event, frame=frame)


def _with_text(effects: Sequence[ef.Effect]) -> list[ef.Effect]:
    """Show the referee words without sound, which are an outcome too."""
    bodies = [json.loads(it.frame) if isinstance(it, ef.Send) else {} for it in effects]
    has_sound = any(body.get("type") == _OMNI_SOUND for body in bodies)
    shown = list[ef.Effect]()
    for effect, body in zip(effects, bodies, strict=True):
        if isinstance(effect, ef.Send) and body["type"] in _OMNI_WORDS and not has_sound:
            frame = json.dumps(body | {"type": "response.output.delta", "kind": "text"})
            shown.append(attrs.evolve(effect, frame=frame))
        else:
            shown.append(effect)
    return shown


def _as_realtime(event: ev.Event) -> ev.Event:
    """Show the referee an append of 002 as one of 001."""
    if not isinstance(event, ev.FrameReceived) or not isinstance(event.frame, str):
        return event
    try:
        body = json.loads(event.frame)
    except ValueError:
        return event
    if not isinstance(body, dict) or body.get("type") != "audio_chunk":
        return attrs.evolve(event, frame="{}")
    fields = {
        "audio": body.get("audio") or body.get("audio_base64"),
        "force_listen": bool(body.get("force_listen")),
    }
    return attrs.evolve(event, frame=json.dumps({"type": "input.append", "input": fields}))


def _effects_as_realtime(effects: Sequence[ef.Effect]) -> list[ef.Effect]:
    """Show the referee the frames of 002 as those of 001; an end's error becomes its reason."""
    shown: list[ef.Effect] = []
    reason = ""
    for effect in effects:
        if not isinstance(effect, ef.Send):
            shown.append(effect)
            continue
        body = json.loads(effect.frame)
        kind = body["type"]
        numbers = {name: body[name] for name in ("seq", "ack") if name in body}
        if kind == "error" and body["code"] in _ENDS_002:
            reason = body["code"]
            if not numbers:
                continue
            body = {"type": "pending"}  # so that no number is left out
        elif kind == "error":
            body = {"type": "error", "error": {"code": body["code"], "message": body["error"]}}
        elif "pending" in body:
            body = {"type": "pending"}  # of a chunk, and no unit's outcome
        elif kind == "result":
            told = "listen" if body["is_listen"] else "audio"
            body = {"type": "response.output.delta", "kind": told}
        else:
            body = {"type": _OF_002.get(kind, kind), "reason": reason}
        frame = json.dumps(body | numbers)
        shown.append(ef.Send(ordinal=effect.ordinal, frame=frame))
    return shown
