"""Measures one session from its events and effects only: traffic, queue, slot, media, its end.

- `call_meter` and `unit_meter` measure units, turns and chunks. A meter reads no clock: the same
  log gives the same figures, live or later.
- Events that the machine ignores as stale, such as those of an earlier lease, are not counted.
- A frame counts as sent when it was handed to the connection.
- An error's code is read from its frame; no other frame is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import NS_PER_S
from protocol.values.utf8 import frame_bytes

from .books import BROKEN_OFF, Books, ChunkBooks, TurnBooks, UnitBooks
from .call_meter import CallMeter, ChunkMeter, TurnMeter
from .unit_meter import UnitMeter

ERROR_BEGINS: Final = '{"type":"error"'
"""The start of an error in every dialect; a test checks it."""
METERS: Final[Mapping[type, type[CallMeter[Any]]]] = {
    UnitBooks: UnitMeter,
    TurnBooks: TurnMeter,
    ChunkBooks: ChunkMeter,
}
"""The meter of the model's work for a session."""


class Meter:
    """Counts one session into the books of its mode (`Watcher`)."""

    def __init__(self, books: Books, opened: ev.ConnectionOpened) -> None:
        self._books = books
        self._work = METERS[type(books.work)](books, books.work)
        self._now_ns = 0
        self._queued_ns: int | None = None
        self._lease: int | None = None
        self._leased_ns = self._opening_ns = self._releasing_ns = self._rebuilding_ns = 0
        self._media: dict[int, tuple[ef.MediaKind, int]] = {}
        self._kv_tokens_max = 0
        books.opened[opened.endpoint].inc()

    @property
    def kv_tokens(self) -> int:
        """The session's tokens in the model's cache; 0 without a slot."""
        return self._work.kv_tokens

    def saw(self, event: ev.Event, effects: tuple[ef.Effect, ...], session: Session) -> None:
        """Count an event and its effects."""
        self._now_ns = event.at_ns
        note = _EVENTS.get(type(event))
        if note is not None:
            note(self, event)
        self._work.saw(event, effects, session)
        for effect in effects:
            note = _EFFECTS.get(type(effect))
            if note is not None:
                note(self, effect)
        self._kv_tokens_max = max(self._kv_tokens_max, self._work.kv_tokens)

    def over(self, reason: str | None) -> None:
        """Count the session's end."""
        self._work.over()
        books = self._books
        books.ended[reason or BROKEN_OFF].inc()
        books.session_s.observe(self._now_ns / NS_PER_S)
        if self._kv_tokens_max:
            books.kv_tokens.observe(self._kv_tokens_max)

    def _since(self, at_ns: int) -> float:
        return (self._now_ns - at_ns) / NS_PER_S

    # -- traffic --------------------------------------------------------------------------------

    def _frame_received(self, event: ev.FrameReceived) -> None:
        self._books.frames_received.inc()
        if event.shortened is not None:
            self._books.received_bytes.inc(event.shortened.size_bytes)
        elif event.frame is not None:  # else it was too long, and never read whole
            self._books.received_bytes.inc(frame_bytes(event.frame))

    def _send(self, effect: ef.Send) -> None:
        books, frame = self._books, effect.frame
        books.frames_sent.inc()
        books.sent_bytes.inc(frame_bytes(frame))
        if frame.startswith(ERROR_BEGINS):
            count = books.errors.get(error_code(frame))
            if count is not None:  # else 002 reports an end as an error; ends are counted as such
                count.inc()

    def _send_failed(self, _event: ev.SendFailed) -> None:
        self._books.sends_failed.inc()

    def _peer_attached(self, _event: ev.PeerAttached) -> None:
        self._books.resumed.inc()

    def _recording_failed(self, _event: ev.RecordingFailed) -> None:
        self._books.recordings_failed.inc()

    # -- the queue and the slot -----------------------------------------------------------------

    def _enter_queue(self, _effect: ef.EnterQueue) -> None:
        self._queued_ns = self._now_ns

    def _slot_leased(self, event: ev.SlotLeased) -> None:
        if self._queued_ns is not None:
            self._books.queue_wait_s.observe(self._since(self._queued_ns))
            self._queued_ns = None
        self._lease, self._leased_ns = event.lease, self._now_ns

    def _leave(self, how: str) -> None:
        if self._queued_ns is not None:
            self._books.queue_left[how].inc()
            self._queued_ns = None

    def _open_backend(self, _effect: ef.OpenBackend) -> None:
        self._opening_ns = self._now_ns

    def _backend_opened(self, event: ev.BackendOpened) -> None:
        if event.lease == self._lease:
            self._books.open_s.observe(self._since(self._opening_ns))
            self._books.tokens["prompt"].inc(event.opened.prompt_length)

    def _backend_open_failed(self, event: ev.BackendOpenFailed) -> None:
        if event.lease == self._lease:
            self._books.opens_failed.inc()

    def _backend_lost(self, event: ev.BackendLost) -> None:
        if event.lease == self._lease:
            self._books.backends_lost.inc()

    def _rebuild(self, _effect: ef.Rebuild) -> None:
        self._rebuilding_ns = self._now_ns

    def _rebuilt(self, event: ev.Rebuilt) -> None:
        if event.lease == self._lease:
            self._books.rebuilds["done"].inc()
            self._books.rebuild_s.observe(self._since(self._rebuilding_ns))
            self._books.rebuilt_s.inc(event.steps)

    def _rebuild_failed(self, event: ev.RebuildFailed) -> None:
        if event.lease == self._lease:
            self._books.rebuilds["failed"].inc()

    def _release(self, _effect: ef.Release) -> None:
        self._releasing_ns = self._now_ns

    def _backend_released(self, event: ev.BackendReleased) -> None:
        if event.lease == self._lease:
            self._books.slot_s.observe(self._since(self._leased_ns))
            self._books.release_s.observe(self._since(self._releasing_ns))
            self._lease = None

    # -- media ----------------------------------------------------------------------------------

    def _decode(self, effect: ef.DecodeMedia) -> None:
        self._media[effect.media] = (effect.kind, self._now_ns)

    def _cancel_decode(self, effect: ef.CancelDecode) -> None:
        self._media.pop(effect.media, None)

    def _media_decoded(self, event: ev.MediaDecoded) -> None:
        self._decided(event.media, self._books.media_decoded)

    def _media_rejected(self, event: ev.MediaRejected) -> None:
        self._decided(event.media, self._books.media_rejected)

    def _decided(self, media: int, counters: Mapping[str, Any]) -> None:
        kind, began_ns = self._media.pop(media, (None, 0))
        if kind is not None:
            counters[kind].inc()
            self._books.media_s[kind].observe(self._since(began_ns))


def error_code(frame: str) -> str:
    """Read the code of an error frame of ours, in any dialect."""
    body = orjson.loads(frame)
    code = body["code"] if "code" in body else body["error"]["code"]
    assert isinstance(code, str)
    return code


_EVENTS: Final[Mapping[type[ev.Event], Callable[[Meter, Any], None]]] = {
    ev.FrameReceived: Meter._frame_received,
    ev.SendFailed: Meter._send_failed,
    ev.PeerAttached: Meter._peer_attached,
    ev.RecordingFailed: Meter._recording_failed,
    ev.SlotLeased: Meter._slot_leased,
    ev.TicketLeft: lambda self, _: self._leave("left"),
    ev.TicketCancelled: lambda self, _: self._leave("cancelled"),
    ev.AdmissionRefused: lambda self, _: self._leave("refused"),
    ev.BackendOpened: Meter._backend_opened,
    ev.BackendOpenFailed: Meter._backend_open_failed,
    ev.BackendLost: Meter._backend_lost,
    ev.Rebuilt: Meter._rebuilt,
    ev.RebuildFailed: Meter._rebuild_failed,
    ev.BackendReleased: Meter._backend_released,
    ev.MediaDecoded: Meter._media_decoded,
    ev.MediaRejected: Meter._media_rejected,
}
_EFFECTS: Final[Mapping[type[ef.Effect], Callable[[Meter, Any], None]]] = {
    ef.Send: Meter._send,
    ef.EnterQueue: Meter._enter_queue,
    ef.OpenBackend: Meter._open_backend,
    ef.Rebuild: Meter._rebuild,
    ef.Release: Meter._release,
    ef.DecodeMedia: Meter._decode,
    ef.CancelDecode: Meter._cancel_decode,
}
