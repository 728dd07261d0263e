"""What the remote backend's events mean for our units: where an answer ends, and what it is.

The protocol does not pair answers with appends. Each rule here has its source: the protocol's own
pages (OpenBMB/MiniCPM-o-Demo, docs/backend-protocol), its server in C++ (tc-mb/llama.cpp-omni,
tools/server/ws_handler.cpp; its pull requests 54 and 61), and what follows from them for rule B9.

How the end of a unit's answer is recognised:

1. `listen` ends it: the model has decided. What it said before that in the unit ends a turn.
2. `response.done` ends it: the server sends one after each unit in which it spoke. It bears
   `turn_end` even amid a turn, so it ends the unit, not the turn; the next `listen` does that.
3. After a `listen` the server sends `response.done`, and perhaps the last bytes of a broken
   character, where the unit had speech in it (the first versions: always). They bear the listen's
   `response_id` and are passed over, whenever they come.
4. A unit in which the model decided nothing to say and not to listen is answered by nothing, and
   servers before pull request 61 marked no end of speech. So one that is quiet is pinged: the
   server reads its WebSocket only between units, so that a pong says that it is done with this one
   (`llama_omni.LlamaOmniSession`). Without a word it listened, else it spoke, amid a turn.

Sound comes from a thread of its own, in pieces of any length, also after the unit's end. It is
played out as our units are: a second each, the rest kept for the units after it, so that a unit in
which the model listens may still speak what was left; the turn ends with the last of it. Amid a
turn a unit carries a whole second, or only text where there is less (`UnitResult.pcm`).

What a session forces to listen (B6): the server answers a forced append by a listen, but does not
stop the voice. So sound is thrown away from then on until the next text comes. A unit that is
interrupted runs to the end of its answer, which cannot be hurried; the session withholds it.

Anything else that nobody asked for is an error. It does no IO, and knows no time.
"""

from __future__ import annotations

from typing import Final

import attrs

from protocol.digest import digest
from protocol.model import OUTPUT_RATE_HZ, SAMPLE_BYTES, Unit, UnitResult

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
"""Sound that waits to be played out: a turn of a minute, made as fast as the server can."""


class Answers:
    """One session's answers, unit by unit: begin, take until it is answered, finish.

    Args:
        kv_length: tokens in the KV cache after the prompt, or 0 where the server does not say.

    Attributes:
        kv_length: as the server said last.
    """

    def __init__(self, kv_length: int) -> None:
        self.kv_length = kv_length
        self._voice = bytearray()
        self._is_muted = False
        self._is_sounding = False
        self._listened_id: str | None = None
        self._text = ""
        self._is_turn_over = False
        self._metrics = Metrics()

    def take_unasked(self, event: RemoteEvent) -> None:
        """Take what came while no unit ran: late sound, or what trails a listen.

        Raises:
            BackendGone: the server has ended the session.
            BackendError: it is an answer for nothing that was asked.
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
        """Take an event of the unit.

        Returns:
            Whether it ends the unit's answer.

        Raises:
            BackendGone: the server has ended the session.
            BackendError: it must not come now, or is too much.
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
        """Take it that the server is done with the unit, without a word on how it ends."""
        self._is_turn_over = not self._text and not self._voice

    def finish(self, unit: Unit, *, interrupted: bool, wall_us: int) -> UnitResult:
        """Make the result of a unit that is answered.

        Args:
            unit: as it was begun.
            interrupted: its speech is withheld by the session, and no more of it is to follow.
            wall_us: what it took, from its start.
        """
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
            costs=attrs.evolve(self._metrics.costs, wall_us=wall_us),
        )

    def _play_out(self, text: str) -> bytes:
        """Take a unit's share of the voice: a second; less at a turn's ends, or to break silence.

        Returns:
            float32 LE, at most 24000 samples.
        """
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
        """Whether it belongs to the response that the last listen ended."""
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
