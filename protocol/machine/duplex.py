"""The full-duplex conversation (000, 001, 002): appends in, units through the model, results out.

`setup` opens the model, `unit_loop` has the units and their outcomes, `input` what waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import ClassVar

import attrs

from ..values import events as ev
from ..values.behaviour import SENDS_USER_WORDS
from ..values.limits import UNIT_FRAMES_MAX
from ..values.live import UserWords
from ..values.messages import Interrupted, Paused, Resumed, ToolsState
from ..values.model import UNIT_BYTES, ToolResult
from ..values.requests import Append, ClientMessage, Init, Interrupt, Pause, Resume, See, TellModel
from ..values.state import Gate
from ..values.utf8 import Refused
from .input import Attachments
from .kind import Handlers
from .setup import DUPLEX_HANDLERS, DuplexKind
from .unit_loop import Lockstep


@attrs.define(eq=False)
class Duplex(DuplexKind):
    """A session of units, each of which is answered by a message."""

    handlers: ClassVar[Handlers] = {
        **DUPLEX_HANDLERS,
        Init: attrgetter("setup.init"),
        Append: attrgetter("loop.append"),
        ToolResult: attrgetter("loop.tools.returned"),
        TellModel: attrgetter("loop.tools.add_text"),
        See: attrgetter("loop.input.see"),
        Interrupt: attrgetter("interrupt"),
        Pause: attrgetter("pause"),
        Resume: attrgetter("resume"),
        ev.Forked: attrgetter("setup.forked"),
        ev.SpeechStarted: attrgetter("loop.speech_started"),
        ev.SpeechStopped: attrgetter("loop.speech_stopped"),
        ev.UserTranscribed: attrgetter("user_transcribed"),
    }

    # -- the session ----------------------------------------------------------------------------

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        if self.loop.is_paused:
            return Gate.PAUSED
        return super().gate

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        if self.step.opened.endpoint == "duplex":
            self.loop.lockstep = Lockstep(kv_length=prompt_length)
        self.send_created(prompt_length)

    def send_created(self, prompt_length: int = 0) -> None:
        """Tell the client that the session is set up."""
        tools: ToolsState = ""
        if self.loop.tools.offered:
            tools = "called" if self.step.limits.duplex_tools else "not_called"
        self.peer.send_created(prompt_length=prompt_length, tools=tools)

    def refusal(self, message: ClientMessage) -> Refused | None:
        """Refuse an init that a fork may not have, a result not due, a picture without room."""
        match message:
            case Init():
                return self.setup.refusal(message)
            case See():
                return self.loop.input.refusal(message)
            case ToolResult() | TellModel():
                return self.loop.tools.refusal(message)
        return None

    # -- in -------------------------------------------------------------------------------------

    def room_bytes(self) -> int:
        """Return the bytes of sound that are only kept, in a second without pictures to come."""
        loop, assembler = self.loop, self.loop.input.assembler
        is_plain = not (loop.input.pictures or loop.lockstep or loop.speech.must_listen)
        is_right = len(assembler.attached.frames) <= UNIT_FRAMES_MAX  # else the client is told
        if not is_plain or not is_right or self.step.limits.barge_in:
            return 0
        return UNIT_BYTES - 1 - len(assembler.remainder)

    def keep(self, messages: Sequence[Append]) -> None:
        """Keep sound for the next unit."""
        self.loop.appends += len(messages)
        last = messages[-1]
        slices = [it.max_slice_nums for it in messages if it.max_slice_nums is not None]
        attached = Attachments(
            input_id=last.input_id or self.step.derive("input", self.loop.appends - 1),
            max_slice_nums=slices[-1] if slices else None,
        )
        pcm = b"".join([message.pcm for message in messages])
        self.loop.input.assembler.add(pcm, attached)

    def interrupt(self, _message: Interrupt) -> None:
        """Have the unit in flight listen, else the next one (002, interrupt)."""
        self.loop.interrupt_next()
        self.peer.send(Interrupted())

    def pause(self, message: Pause) -> None:
        """Start no unit until the client resumes; waiting units are kept (002, pause)."""
        most_s = float(self.step.limits.pause_s)
        timeout_s = most_s if message.timeout_s is None else min(message.timeout_s, most_s)
        self.loop.is_paused = True
        self.timers.set("pause", timeout_s)
        self.peer.send(Paused(timeout_s=timeout_s))

    def resume(self, _message: Resume) -> None:
        """Go on (002, resume)."""
        self.loop.is_paused = False
        self.timers.cancel("pause")
        self.peer.send(Resumed())
        self.loop.start_if_due()

    def user_transcribed(self, event: ev.UserTranscribed) -> None:
        """Send what the user said, to a client that asked for it."""
        peer = self.peer
        is_wanted = peer.wants_notices and self.step.behaves(SENDS_USER_WORDS)
        if is_wanted and peer.is_active and peer.dialect.name == "realtime" and event.text:
            peer.send(UserWords(text=event.text, start_ms=event.start_ms, end_ms=event.end_ms))
