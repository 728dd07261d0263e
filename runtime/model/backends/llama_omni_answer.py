"""Interprets the remote backend's events: where a unit's answer ends, and its result.

The protocol does not pair answers with appends. Sources: the protocol's pages
(OpenBMB/MiniCPM-o-Demo, docs/backend-protocol), its C++ server (tc-mb/llama.cpp-omni,
tools/server/ws_handler.cpp; pull requests 54 and 61), and rule B9. A unit's answer ends:

1. with `listen`: the model has decided. Text before it in the unit ends a turn.
2. with `response.done`, sent after each unit with speech. Its `turn_end` is also set within a turn,
   so only the next `listen` ends the turn.
3. A `response.done` after a `listen`, perhaps with the last bytes of a broken character, carries
   the listen's `response_id` and is ignored, whenever it comes.
4. A unit with neither speech nor listen gets no answer, and servers before pull request 61 marked
   no end of speech. So a quiet unit is pinged: the server reads its WebSocket only between units,
   so a pong ends the unit. Without text it listened, else it spoke, within a turn.

Sound comes from another thread, also after the unit's end. It is played at a second per unit, the
rest kept for later units, so a listening unit may still speak; the turn ends with its last sound.
Within a turn a unit carries a whole second, or only text (`UnitResult.pcm`). After forced listening
(B6) the server's voice continues, so sound is dropped until the next text. An interrupted unit's
answer runs to its end; the session withholds it. Other events are errors.
"""

from __future__ import annotations

from typing import Final

from protocol.values.digest import digest
from protocol.values.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, Unit, UnitResult

from .base import BackendError
from .llama_omni_channel import gone
from .llama_omni_wire import (
    TEXT_CHARS_MAX,
    Audio,
    Closed,
    Created,
    Done,
    Listen,
    Metrics,
    RemoteEvent,
    Text,
)

SECOND_BYTES: Final = OUTPUT_RATE_HZ * SAMPLE_BYTES
VOICE_BYTES_MAX: Final = 60 * SECOND_BYTES
"""Sound waiting to be played: a turn of a minute, generated as fast as the server can."""


class Answers:
    """One session's answers, unit by unit: begin, take until it is answered, finish."""

    def __init__(self, kv_length: int) -> None:
        self.kv_length = kv_length
        self._voice = bytearray()
        self._is_muted = False
        self._is_sounding = False
        self._listened_id: str | None = None
        self.begin()

    def take_unasked(self, event: RemoteEvent) -> None:
        """Take an event between units: late sound, or the trailing events of a listen.

        `BackendGone`: the server has ended the session; `BackendError`: it is an unrequested
        answer.
        """
        if isinstance(event, Audio):
            self._hear(event)
        elif isinstance(event, Closed):
            raise gone(event)
        elif not self._trails(event):
            raise BackendError(f"expected nothing between units, got {_name(event)}")

    def begin(self) -> None:
        """Begin a unit, before its append is sent."""
        self._text = ""
        self._is_turn_over = False
        self._metrics = Metrics()

    def take(self, event: RemoteEvent) -> bool:
        """Take an event of the unit; return whether it ends the unit's answer.

        `BackendGone`: the server has ended the session; `BackendError`: it must not come now, or is
        too large.
        """
        if self._trails(event):
            return False
        match event:
            case Closed():
                raise gone(event)
            case Created():
                raise BackendError("expected an answer, got session.created once more")
            case Audio():
                self._hear(event)
            case Text():
                self._note(event.metrics)
                self._is_muted = False
                self._say(event.text)
            case Done():
                self._note(event.metrics)
                self._say("" if self._text else event.text)
                return True
            case Listen():
                self._refuse_second(event)
                self._note(event.metrics)
                self._listened_id = event.response_id
                self._is_turn_over = True
                return True
        return False

    def take_silence(self) -> None:
        """Note that the server ended the unit without saying how."""
        self._is_turn_over = not self._text and not self._voice

    def finish(self, unit: Unit, *, interrupted: bool, wall_us: int) -> UnitResult:
        """Make the result of an answered unit; if `interrupted`, its further speech is dropped."""
        text = "" if unit.force_listen else self._text
        pcm = b"" if unit.force_listen else self._play_out(text)
        is_listen = not text and not pcm
        is_last = self._is_turn_over and not self._voice
        self._is_sounding = not is_listen and not is_last and (self._is_sounding or bool(pcm))
        if interrupted or unit.force_listen:
            self._mute()
        return UnitResult(
            index=unit.index,
            is_listen=is_listen,
            text=text,
            pcm=pcm,
            end_of_turn=is_last and not is_listen,
            kv_length=self.kv_length,
            input_hash=digest((unit.pcm, unit.frames, unit.force_listen, unit.max_slice_nums)),
            vision_slices=self._metrics.vision_slices,
            vision_tokens=self._metrics.vision_tokens,
            costs=self._metrics.costs(wall_us=wall_us),
        )

    def _play_out(self, text: str) -> bytes:
        """Take a unit's second of the voice, float32 LE; less at a turn's start and end."""
        is_amid = self._is_sounding and not self._is_turn_over
        if is_amid and text and len(self._voice) < SECOND_BYTES:
            return b""
        share = bytes(self._voice[:SECOND_BYTES])
        del self._voice[:SECOND_BYTES]
        return share

    def _hear(self, event: Audio) -> None:
        self._note_length(event.metrics)
        if self._is_muted:
            return
        self._voice += event.pcm
        if len(self._voice) > VOICE_BYTES_MAX:
            limit_s = VOICE_BYTES_MAX // SECOND_BYTES
            raise BackendError(f"expected at most {limit_s} s of sound to wait, got more")

    def _say(self, text: str) -> None:
        self._text += text
        if len(self._text) > TEXT_CHARS_MAX:
            raise BackendError(f"expected at most {TEXT_CHARS_MAX} characters a unit, got more")

    def _note(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._note_length(metrics)

    def _note_length(self, metrics: Metrics) -> None:
        if metrics.kv_length is not None:
            self.kv_length = metrics.kv_length

    def _mute(self) -> None:
        self._voice.clear()
        self._is_muted = True
        self._is_sounding = False

    def _trails(self, event: RemoteEvent) -> bool:
        """Whether an event belongs to the response that the last listen ended."""
        if not isinstance(event, Done | Text) or event.response_id is None:
            return False
        return event.response_id == self._listened_id

    def _refuse_second(self, event: Listen) -> None:
        if event.response_id is not None and event.response_id == self._listened_id:
            raise BackendError("expected an answer, got a second listen for the unit before")


def _name(event: RemoteEvent) -> str:
    match event:
        case Created():
            return "session.created"
        case Done():
            return "response.done"
        case Closed():
            return "session.closed"
        case _:
            return f"a delta of kind {type(event).__name__.lower()}"
