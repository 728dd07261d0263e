"""How a session begins: the client's init, its voices decoded, the model opened, `Created`.

In between the session is CONNECTED, and a second init is out of place (`Gate.OPENING`). An init
that turns out to be wrong leads back: the client may send a better one. A chat opens no model: each
of its turns does.
"""

from __future__ import annotations

import attrs

from . import effects as ef
from . import events as ev
from .chat import Chat
from .core import Core
from .duplex import Duplex
from .errors import ErrorCode
from .messages import Created
from .pending_init import PendingInit
from .requests import Init
from .state import Course


@attrs.define
class Beginning:
    """An init on its way.

    Attributes:
        core: the session's state and voice.
        duplex: what the init is for, but in a chat.
        chat: what it is for there.
        pending: the init that was accepted; None before, and once the model is open.
    """

    core: Core
    duplex: Duplex
    chat: Chat
    pending: PendingInit | None = None

    def begin(self, init: Init) -> None:
        """Take an init."""
        core = self.core
        core.fields_ignored += len(init.ignored)
        core.wants_notices = init.notices
        if not init.record:
            core.forget_recording()
        core.cancel_timer("init")
        if core.course is Course.CHAT:
            self.chat.instructions = init.instructions
            core.set_timer("idle", core.opened.limits.idle_s)
            self._create(prompt_length=0)
            return
        self.pending, decodes = PendingInit.of(init, self.duplex.media)
        self.duplex.media += len(decodes)
        for decode in decodes:
            core.do(decode)
        self._open_if_decoded(self.pending)

    def awaits(self, media: int) -> bool:
        """Whether `media` is one of the init's voices."""
        return self.pending is not None and self.pending.awaits(media)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a voice in."""
        assert self.pending is not None
        self.pending.decoded(event.media, event.pcm)
        if not self.core.is_closed:
            self._open_if_decoded(self.pending)

    def media_rejected(self, reason: str) -> None:
        """A voice is damaged."""
        if not self.core.is_closed:
            self._reject(f"reference audio: {reason}")

    def _open_if_decoded(self, pending: PendingInit) -> None:
        core = self.core
        if not pending.is_complete:
            return
        assert core.lease is not None
        core.opening_backend = True
        self.duplex.configure(pending.init)
        opening = pending.to_opening(core.opened.seed)
        core.do(ef.OpenBackend(lease=core.lease, opening=opening))

    def _reject(self, message: str) -> None:
        """Back to CONNECTED: the client may send a better init."""
        self.pending = None
        self.core.complain(ErrorCode.INVALID_PAYLOAD, message)
        self.core.set_timer("init", self.core.opened.limits.init_wait_s)

    def backend_opened(self, event: ev.BackendOpened) -> None:
        """The model holds the prompt: the session is ACTIVE."""
        core = self.core
        if event.lease != core.lease or not core.opening_backend:
            return
        core.opening_backend = False
        self.pending = None
        if core.is_closed:
            core.release()
        else:
            self.duplex.opened(event.opened.prompt_length)
            self._create(prompt_length=event.opened.prompt_length)

    def backend_open_failed(self, event: ev.BackendOpenFailed) -> None:
        """It does not: the prompt is too long, or the model cannot be had."""
        core = self.core
        if event.lease != core.lease or not core.opening_backend:
            return
        core.opening_backend = False
        if core.is_closed:
            core.release()
        elif event.context_full:
            self._reject("the prompt does not fit the model's context")
        else:
            core.refuse(ErrorCode.WORKER_CONNECT_FAILED, "the model could not be opened")

    def _create(self, *, prompt_length: int) -> None:
        core = self.core
        core.say(
            Created(
                session_id=core.session_id,
                prompt_length=prompt_length,
                recording=core.recording,
                recording_id=core.recording_id,
                recording_notice=core.recording_notice,
                is_chat=core.course is Course.CHAT,
            )
        )
