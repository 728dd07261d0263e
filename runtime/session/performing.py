"""Performs the effects of one session: each goes to what does it, and nothing here waits."""

from __future__ import annotations

import attrs
from anyio.abc import TaskGroup

from protocol.values import effects as ef

from ..media.speech_detector import SpeechDetector
from ..net.connection import Ready
from .calls import Calls
from .decodes import Decodes
from .entry import Entry
from .event_queue import EventQueue
from .peer import Peer
from .timers import Timers
from .transcriber import Writer


@attrs.define(eq=False, kw_only=True)
class Performer:
    """What one session's effects reach.

    `close` is the code and reason with which the session closed, or will.
    """

    close: tuple[int, str]
    _events: EventQueue
    _peer: Peer
    _entry: Entry
    _calls: Calls
    _decodes: Decodes
    _detector: SpeechDetector
    _timers: Timers
    _writer: Writer | None
    _tasks: TaskGroup | None = attrs.field(default=None, init=False)

    def begin(self, tasks: TaskGroup) -> None:
        """Begin, with the session's tasks."""
        self._tasks = tasks
        tasks.start_soon(self._timers.run)
        if self._writer is not None:
            tasks.start_soon(self._writer.run)

    def perform(self, effect: ef.Effect, ready: Ready, now_ns: int) -> None:
        """Perform an effect of a step at `now_ns`; frames and closes are sent after `ready`."""
        assert self._tasks is not None
        if self._writer is not None:
            self._writer.saw(effect)
        match effect:
            case ef.Send():
                self._peer.send(effect.frame, ready)
            case ef.Attach():
                self._peer.greet(effect, ready)
            case ef.Close():
                self.close = (effect.code, effect.reason)
                self._peer.close(effect.code, effect.reason, ready)
            case ef.Admit():
                self._entry.ask_for_room()
            case ef.EnterQueue():
                self._entry.queue(effect)
            case ef.LeaveQueue():
                self._entry.leave()
            case ef.DecodeMedia():
                self._decodes.start(effect, self._tasks)
            case ef.CancelDecode():
                self._decodes.cancel(effect.media)
            case ef.DetectSpeech():
                self._events.put_first(self._detector.detect(effect, now_ns))
            case ef.SetTimer():
                self._timers.set(effect)
            case ef.CancelTimer():
                self._timers.cancel(effect)
            case ef.DropUnit() | ef.ForgetRecording():
                pass  # a watcher counts it; it is done before anything is said
            case _:
                self._calls.perform(effect)

    def stop(self) -> None:
        """Begin nothing more: the session is over."""
        self._calls.stop_trying()
        self._decodes.cancel_all()

    def give_up_slot(self) -> None:
        """Leave the queue, or give the slot back."""
        self._entry.give_up()
        self._calls.give_up()
