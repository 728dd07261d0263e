"""Measures one session from its events and effects only: traffic, queue, slot, media, its end.

- `call_meter` and `unit_meter` measure units, turns and chunks. A meter reads no clock: the same
  log gives the same figures, live or later.
- Events that the machine ignores as stale, such as those of an earlier lease, are not counted.
- A frame counts as sent when it was handed to the connection.
- An error's code is read from its frame; no other frame is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import orjson

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.modes import OF_MODE, Work
from protocol.values.requests import ClientMessage
from protocol.values.utf8 import frame_bytes

from . import catalogue as c
from .call_meter import CallMeter, ChunkMeter, TurnMeter
from .instruments import Books
from .talk_meter import TalkMeter
from .unit_meter import UnitMeter
from .watching import Shown

ERROR_BEGINS: Final = '{"type":"error"'
"""The start of an error in every dialect; a test checks it."""
METERS: Final[Mapping[Work, type[CallMeter]]] = {
    "unit": UnitMeter,
    "turn": TurnMeter,
    "chunk": ChunkMeter,
}
"""The meter of the model's work for a session."""


class Meter:
    """Counts one session into the books of its mode (`Watcher`)."""

    def __init__(self, books: Books, opened: ev.ConnectionOpened) -> None:
        self._books = books
        self._work = METERS[OF_MODE[opened.mode].work](books)
        self._talk = TalkMeter(books) if OF_MODE[opened.mode].work == "unit" else None
        self._now_ns = self._began_ns = 0
        self._queued_ns: int | None = None
        self._lease: int | None = None
        self._leased_ns = self._opening_ns = self._releasing_ns = self._rebuilding_ns = 0
        self._media: dict[int, tuple[ef.MediaKind, int]] = {}
        self._kv_tokens_max = 0
        books.add(c.SESSIONS_OPENED, opened.endpoint)

    @property
    def kv_tokens(self) -> int:
        """The session's tokens in the model's cache; 0 without a slot."""
        return self._work.kv_tokens

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Shown) -> None:
        """Count an event and its effects."""
        self._now_ns = event.at_ns
        self._happened(event)
        self._work.saw(event, effects, session)
        if self._talk is not None:
            self._talk.saw(event, effects, session)
        for effect in effects:
            self._asked(effect)
        self._kv_tokens_max = max(self._kv_tokens_max, self._work.kv_tokens)

    def heard(
        self, events: Sequence[ev.FrameReceived], messages: Sequence[ClientMessage], session: Shown
    ) -> None:
        """Count messages that had no effects (`Watcher`)."""
        self._now_ns = events[-1].at_ns
        self._books.add(c.FRAMES_RECEIVED, amount=len(events))
        self._books.add(c.RECEIVED_BYTES, amount=sum(map(_size_bytes, events)))
        if self._talk is not None:
            self._talk.heard(events, messages, session)

    def over(self, reason: str | None) -> None:
        """Count the session's end."""
        self._work.over()
        if self._talk is not None:
            self._talk.over()
        self._books.add(c.SESSIONS_ENDED, reason or c.BROKEN_OFF)
        self._books.observe(c.SESSION_SECONDS, self._since(self._began_ns))
        if self._kv_tokens_max:
            self._books.observe(c.SESSION_KV_TOKENS, self._kv_tokens_max)

    def _since(self, at_ns: int) -> float:
        return (self._now_ns - at_ns) / NS_PER_S

    def _happened(self, event: ev.Event) -> None:
        match event:
            case ev.FrameReceived():
                self._books.add(c.FRAMES_RECEIVED)
                self._books.add(c.RECEIVED_BYTES, amount=_size_bytes(event))
            case ev.SendFailed():
                self._books.add(c.SENDS_FAILED)
            case ev.Forked():
                self._books.add(c.FORKED)
                self._began_ns = self._now_ns
            case ev.PeerAttached():
                self._books.add(c.RESUMED)
            case ev.RecordingFailed():
                self._books.add(c.RECORDINGS_FAILED)
            case ev.SlotLeased():
                if self._queued_ns is not None:
                    self._books.observe(c.QUEUE_WAIT_SECONDS, self._since(self._queued_ns))
                    self._queued_ns = None
                self._lease, self._leased_ns = event.lease, self._now_ns
            case ev.TicketLeft():
                self._leave("left")
            case ev.TicketCancelled():
                self._leave("cancelled")
            case ev.AdmissionRefused():
                self._leave("refused")
            case ev.MediaDecoded():
                self._decided(event.media, "decoded")
            case ev.MediaRejected():
                self._decided(event.media, "rejected")
            case _ if getattr(event, "lease", None) == self._lease:
                self._happened_on_slot(event)

    def _happened_on_slot(self, event: ev.Event) -> None:
        match event:
            case ev.BackendOpened():
                self._books.observe(c.OPEN_SECONDS, self._since(self._opening_ns))
                self._books.add(c.TOKENS, "prompt", amount=event.opened.prompt_length)
            case ev.BackendOpenFailed():
                self._books.add(c.OPENS_FAILED)
            case ev.BackendLost():
                self._books.add(c.BACKENDS_LOST)
            case ev.Rebuilt():
                self._books.add(c.REBUILDS, "done")
                self._books.observe(c.REBUILD_SECONDS, self._since(self._rebuilding_ns))
                self._books.add(c.REBUILT_SECONDS, amount=event.steps)
            case ev.RebuildFailed():
                self._books.add(c.REBUILDS, "failed")
            case ev.BackendReleased():
                self._books.observe(c.SLOT_SECONDS, self._since(self._leased_ns))
                self._books.observe(c.RELEASE_SECONDS, self._since(self._releasing_ns))
                self._lease = None

    def _asked(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._sent(effect.frame)
            case ef.EnterQueue():
                self._queued_ns = self._now_ns
            case ef.OpenBackend():
                self._opening_ns = self._now_ns
            case ef.Rebuild():
                self._rebuilding_ns = self._now_ns
            case ef.Release():
                self._releasing_ns = self._now_ns
            case ef.DecodeMedia():
                self._media[effect.media] = (effect.kind, self._now_ns)
            case ef.CancelDecode():
                self._media.pop(effect.media, None)

    def _sent(self, frame: str) -> None:
        self._books.add(c.FRAMES_SENT)
        self._books.add(c.SENT_BYTES, amount=frame_bytes(frame))
        if frame.startswith(ERROR_BEGINS):
            code = error_code(frame)
            if (code,) in c.ERRORS.series:  # else 002 reports an end; ends are counted as such
                self._books.add(c.ERRORS, code)

    def _leave(self, how: str) -> None:
        if self._queued_ns is not None:
            self._books.add(c.QUEUE_LEFT, how)
            self._queued_ns = None

    def _decided(self, media: int, outcome: str) -> None:
        kind, began_ns = self._media.pop(media, (None, 0))
        if kind is not None:
            self._books.add(c.MEDIA, outcome, kind)
            self._books.observe(c.MEDIA_SECONDS, self._since(began_ns), kind)


def error_code(frame: str) -> str:
    """Read the code of an error frame of ours, in any dialect."""
    body = orjson.loads(frame)
    code = body["code"] if "code" in body else body["error"]["code"]
    assert isinstance(code, str)
    return code


def _size_bytes(event: ev.FrameReceived) -> int:
    """The bytes of a frame; 0 for one that was too long, and never read whole."""
    if event.shortened is not None:
        return event.shortened.size_bytes
    return 0 if event.frame is None else frame_bytes(event.frame)
