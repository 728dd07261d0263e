"""The content of every field of every event, and the events without it.

- `FIELDS` names each field of each class in an event; an unknown one is an error.
- Lengths stay, of text, sound, tokens and codes, because the session counts them.
- Ids become 0; -1, for no token, stays.
- If anything is taken out, all hashes of inputs and logits are too: with a hash, a guess of a short
  text could be checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Literal

import attrs

from protocol.values import events as ev
from protocol.values.messages import QueuePlace
from protocol.values.model import (
    ChunkResult,
    Costs,
    Cut,
    Finalized,
    Opened,
    Prefill,
    ToolCall,
    TurnChunk,
    TurnResult,
    UnitResult,
)
from protocol.values.record_names import RECORD_FIELDS
from protocol.values.utf8 import Refused, Shortened

from .client_frames import FrameEditor
from .media import mute
from .policy import TRACES, Kind, Side
from .words import Pseudonyms, fill

Shape = Literal["words", "pcm", "ids", "name"]


class Apart(Enum):
    """Fields with special rules."""

    NOTHING = "a number, a flag, a time, a name that the server made"
    BELOW = "a value with fields of its own, or several"
    TRACE = "a hash, or a measure of logits"
    FRAME = "a client's frame: `client_frames`"
    MEDIA = "what was decoded: it goes with the frame that it came in"


@attrs.frozen
class Content:
    """A field with content."""

    kinds: tuple[Kind, ...]
    side: Side
    shape: Shape


NOTHING: Final = Apart.NOTHING
LEFT_OUT: Final = "the words of this error were left out"
ID_BYTES: Final = 8
"""The bytes that a token id or a code counts, in the report."""
_WORDS: Final = Content(("text",), "model", "words")
_TOKENS: Final = Content(("text",), "model", "ids")
_SPEECH: Final = Content(("audio",), "model", "pcm")
_CODES: Final = Content(("audio",), "model", "ids")
_HEARD: Final = Content(("text",), "both", "words")
_HEARD_IDS: Final = Content(("text",), "both", "ids")
"""The transcript: the user's words, written by the model."""
_ALL_WORDS: Final = Content(("text", "prompt"), "both", "ids")
"""A conversation as it was fed: the words of both sides, and the prompt."""


def _plain(*names: str) -> dict[str, Apart]:
    return dict.fromkeys(names, NOTHING)


_INDEXED: Final = _plain("at_ns", "index")
FIELDS: Final[Mapping[type, Mapping[str, Content | Apart]]] = {
    ev.ConnectionOpened: {
        **_plain("at_ns", "recording_id", "created_ms", "mode", "seed", "recording", "endpoint"),
        **_plain("behaviour", "quiet", "must_record", "recording_notice", "resume_hash"),
        "limits": Apart.BELOW,
        "label": Content(("name",), "user", "name"),
    },
    ev.SessionLimits: {
        **_plain("session_s", "init_wait_s", "cleanup_wait_s", "context_tokens", "idle_s"),
        **_plain("sliding_windows", "can_rollback", "close_on_recording_failure"),
        **_plain("pause_s", "watchdog_s", "models", "audio_bytes"),
        **_plain(
            *("rebuild_wait_s", "rebuild_units", "can_repeat_turn", "can_force_speak"),
            "has_vision",
            *("detach_s", "resume_s", "transcriber", "barge_in"),
        ),
    },
    ev.FrameReceived: {
        **_plain("at_ns", "has_room"),
        "frame": Apart.FRAME,
        "shortened": Apart.BELOW,
    },
    Shortened: {
        **_plain("size_bytes", "blake2b", "unreadable"),
        "head": Apart.FRAME,
        "refused": Apart.BELOW,
    },
    Refused: {**_plain("code", "ignored"), "message": Apart.FRAME},
    **{
        cls: _plain("at_ns")
        for cls in (
            *(ev.SendFailed, ev.TicketLeft, ev.TicketCancelled, ev.Admitted),
            *(ev.RecordingFailed, ev.Draining, ev.Flooded),
        )
    },
    ev.Forked: {**_plain("at_ns", "resume_hash", "recording_notice"), "limits": Apart.BELOW},
    ev.PeerGone: _plain("at_ns", "close_code"),
    ev.PeerAttached: _plain("at_ns", "after", "resume_hash"),
    ev.TicketMoved: {"at_ns": NOTHING, "place": Apart.BELOW},
    QueuePlace: _plain("position", "estimated_wait_s", "ticket_id", "queue_length"),
    ev.AdmissionRefused: _plain("at_ns", "code"),
    ev.SlotLeased: _plain("at_ns", "lease", "slot"),
    ev.BackendOpened: {**_plain("at_ns", "lease"), "opened": Apart.BELOW},
    Opened: {"prompt_length": NOTHING, "fed_ids": Content(("prompt",), "user", "ids")},
    ev.BackendOpenFailed: _plain("at_ns", "lease", "context_full", "is_lost"),
    ev.MediaDecoded: {
        **_plain("at_ns", "media"),
        **dict.fromkeys(("pcm", "images", "stacked_images"), Apart.MEDIA),
    },
    ev.MediaRejected: _plain("at_ns", "media", "reason"),
    **dict.fromkeys((ev.SpeechStarted, ev.SpeechStopped), _plain("at_ns", "at_ms")),
    ev.UserTranscribed: {
        **_plain("at_ns", "start_ms", "end_ms", "is_last"),
        "text": Content(("text",), "user", "words"),
    },
    ev.UnitDone: {"at_ns": NOTHING, "result": Apart.BELOW},
    UnitResult: {
        **_plain("index", "is_listen", "end_of_turn", "kv_length"),
        **_plain("vision_slices", "vision_tokens"),
        **dict.fromkeys(("cut", "costs"), Apart.BELOW),
        **dict.fromkeys(("input_hash", "logits_hash", "margin"), Apart.TRACE),
        **dict.fromkeys(("decided_ids", "fed_ids"), _TOKENS),
        "codec_ids": _CODES,
        "text": _WORDS,
        "pcm": _SPEECH,
    },
    Cut: _plain("stage", "step"),
    Costs: {
        **_plain("prefill_us", "generate_us", "llm_us", "tts_us", "token2wav_us", "wall_us"),
    },
    ev.UnitFailed: {**_INDEXED, "context_full": NOTHING},
    ev.FinalizeDone: {"at_ns": NOTHING, "finalized": Apart.BELOW},
    Finalized: {**_plain("index", "kv_length", "cost_us"), "fed_ids": _TOKENS},
    **dict.fromkeys((ev.FinalizeFailed, ev.RollbackDone, ev.RollbackFailed), _INDEXED),
    ev.TurnPrefilled: {"at_ns": NOTHING, "prefill": Apart.BELOW},
    Prefill: {
        **_plain("index", "input_tokens", "cost_us"),
        "fed_ids": _ALL_WORDS,
        "input_hash": Apart.TRACE,
    },
    ev.TurnProgress: {"at_ns": NOTHING, "chunk": Apart.BELOW},
    TurnChunk: {
        **_plain("index", "step"),
        "token_ids": _TOKENS,
        "codec_ids": _CODES,
        "text": _WORDS,
        "pcm": _SPEECH,
    },
    ev.TurnDone: {"at_ns": NOTHING, "result": Apart.BELOW},
    TurnResult: {
        **_plain("index", "reason", "generated_tokens", "kv_length", "cut"),
        "tool_calls": Apart.BELOW,
        **dict.fromkeys(("logits_hash", "margin"), Apart.TRACE),
        "costs": Apart.BELOW,
        "codec_ids": _CODES,
        "text": _WORDS,
        "pcm": _SPEECH,
    },
    ToolCall: {
        "id": NOTHING,
        "name": Content(("name",), "model", "name"),
        "arguments": _WORDS,
    },
    ev.TurnFailed: {**_INDEXED, **_plain("context_full", "refused")},
    ev.ChunkDone: {"at_ns": NOTHING, "result": Apart.BELOW},
    ChunkResult: {
        **_plain("utterance", "index", "reason", "prompt_tokens", "generated_tokens"),
        "kv_length": NOTHING,
        **dict.fromkeys(("input_hash", "logits_hash", "margin"), Apart.TRACE),
        "costs": Apart.BELOW,
        "token_ids": _HEARD_IDS,
        "fed_ids": _ALL_WORDS,
        "text": _HEARD,
    },
    ev.ChunkFailed: {**_INDEXED, **_plain("utterance", "context_full")},
    **dict.fromkeys(
        (ev.BackendLost, ev.LeaseRevoked, ev.RebuildFailed, ev.BackendReleased),
        _plain("at_ns", "lease"),
    ),
    ev.Rebuilt: _plain("at_ns", "lease", "steps", "batches", "cost_us"),
    ev.TimerFired: _plain("at_ns", "name", "generation"),
    ev.DrainBegan: _plain("at_ns", "wait_s"),
}
"""By class and name in records; `MediaRejected.reason` is the server's text, without content."""


@attrs.define(kw_only=True)
class EventEditor:
    """Takes a policy's content out of events; `frames` has the policy, and the tally.

    `media` has the kind of each media item that was changed in its frame.
    """

    frames: FrameEditor
    media: dict[int, Kind] = attrs.Factory(dict)
    _names: Pseudonyms = attrs.field(factory=Pseudonyms, init=False)

    def edit(self, event: ev.Event) -> ev.Event:
        """The event without content; raises `KeyError` for a field that `FIELDS` does not name."""
        if isinstance(event, ev.ConnectionOpened):
            is_transcription = event.mode == "transcription"
            self.frames.is_pcm16 = is_transcription or event.endpoint in ev.PIECES
            self.frames.has_line_breaks = is_transcription
            self.frames.known_words |= frozenset(event.limits.models)
        if isinstance(event, ev.FrameReceived):
            frame = self.frames.edit(event.frame, event.at_ns)
            return attrs.evolve(event, frame=frame, shortened=self._edit_shortened(event))
        if isinstance(event, ev.MediaDecoded):
            kind = self.media.get(event.media)
            return event if kind is None else self._edit_media(event, kind)
        if isinstance(event, ev.ConnectionOpened) and event.label in event.limits.models:
            nameless: ev.ConnectionOpened = self._edit(attrs.evolve(event, label=""), event.at_ns)
            return attrs.evolve(nameless, label=event.label)  # in `openai` it is the model's name
        edited: ev.Event = self._edit(event, event.at_ns)
        return edited

    def _edit_shortened(self, event: ev.FrameReceived) -> Shortened | None:
        """Remove a message's start, which may hold any content, and the answer, which may too."""
        short, policy = event.shortened, self.frames.policy
        if short is None or not any(policy.covers(it, "user", event.at_ns) for it in policy.kinds):
            return short
        refused = short.refused and attrs.evolve(short.refused, message=LEFT_OUT)
        return attrs.evolve(short, head="", refused=refused)

    def _edit(self, value: Any, at_ns: int) -> Any:
        changes: dict[str, object] = {}
        for field, name in RECORD_FIELDS[type(value)]:
            rule = FIELDS[type(value)][name]
            old = getattr(value, field.name)
            new = self._edit_field(rule, old, at_ns)
            if new is not old:
                changes[field.name] = new
        return attrs.evolve(value, **changes) if changes else value

    def _edit_field(self, rule: Content | Apart, old: Any, at_ns: int) -> Any:
        if isinstance(rule, Content):
            return self._replace(rule, old) if old and self._covers(rule, at_ns) else old
        if rule is Apart.BELOW and old is not None:
            return self._edit_below(old, at_ns)
        if rule is Apart.TRACE and old:
            self.frames.tally.count(TRACES, "both", len(old) if isinstance(old, str) else 8)
            return type(old)()
        return old

    def _edit_below(self, old: Any, at_ns: int) -> Any:
        if not isinstance(old, tuple):
            return self._edit(old, at_ns)
        edited = tuple(self._edit(each, at_ns) for each in old)
        return edited if edited != old else old

    def _covers(self, content: Content, at_ns: int) -> bool:
        frames = self.frames
        is_known = "prompt" in content.kinds and "prompt" in frames.changed
        return is_known or any(
            frames.policy.covers(kind, content.side, at_ns) for kind in content.kinds
        )

    def _replace(self, content: Content, old: Any) -> Any:
        new, size = _replaced(content.shape, old, self._names)
        if new == old:
            return old
        self.frames.tally.count(content.kinds[0], content.side, size)
        return new

    def _edit_media(self, event: ev.MediaDecoded, kind: Kind) -> ev.MediaDecoded:
        frames = self.frames
        for part in filter(None, (event.pcm, *event.pictures, *event.stacked)):
            frames.tally.count(kind, "user", len(part))
        return without_media(event, frames.hide)


def without_media(event: ev.MediaDecoded, hide: Callable[[bytes], bytes]) -> ev.MediaDecoded:
    """Silence what was decoded, and hide its pictures by `hide`."""
    return attrs.evolve(
        event,
        pcm=mute(event.pcm),
        pictures=tuple(map(hide, event.pictures)),
        stacked=tuple(map(hide, event.stacked)),
    )


def _replaced(shape: Shape, old: Any, names: Pseudonyms) -> tuple[object, int]:
    """The replacement of a value, and the value's bytes."""
    if shape == "pcm":
        return mute(old), len(old)
    if shape == "ids":
        return tuple(min(number, 0) for number in old), ID_BYTES * len(old)
    new = fill(old) if shape == "words" else names.of(old)
    return new, len(old.encode("utf-8", "surrogatepass"))
