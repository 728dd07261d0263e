"""How a session that keeps its model begins: an init, its voices decoded, the model opened.

Meanwhile the session is CONNECTED, and a second init is refused (`Gate.OPENING`). After a wrong
init the client may send a better one. Raw float32 voices are ready; WAV files are decoded outside
and come back by number.
"""

from __future__ import annotations

import attrs

from ..values import effects as ef
from ..values import events as ev
from ..values.errors import ErrorCode
from ..values.model import Opening, Voice
from ..values.requests import Init
from ..values.state import Gate, State
from .moving import Moving
from .pending_turn import Decode, decode_voice
from .unit_loop import Phase


@attrs.define
class PendingInit:
    """An accepted init and the voices that it waits for, both by field name.

    `voices` are PCM, float32 LE 16 kHz mono, as far as decoded; `undecided` media numbers.
    """

    init: Init
    voices: dict[str, bytes] = attrs.Factory(dict)
    undecided: dict[str, int] = attrs.Factory(dict)

    @classmethod
    def of(cls, init: Init, decode: Decode) -> PendingInit:
        """Take an init, and have its voices decoded."""
        pending = cls(init)
        for name, source in {"llm": init.ref_audio, "tts": init.tts_ref_audio}.items():
            known = b"" if source is None else decode_voice(source, decode)
            if isinstance(known, int):
                pending.undecided[name] = known
            elif source is not None:
                pending.voices[name] = known
        return pending

    def awaits(self, media: int) -> bool:
        """Whether `media` is one of its voices."""
        return media in self.undecided.values()

    def decoded(self, media: int, pcm: bytes) -> None:
        """Take a decoded voice."""
        for name, number in list(self.undecided.items()):
            if number == media:
                self.voices[name] = pcm
                del self.undecided[name]

    def to_opening(self, seed: int) -> Opening:
        """Make the backend's request; the spoken voice defaults to the heard one (000)."""
        llm = self.voices.get("llm", b"")
        voice = Voice(llm_pcm=llm, tts_pcm=self.voices.get("tts", llm))
        return Opening(
            instructions=self.init.instructions, voice=voice, config=self.init.config, seed=seed
        )


@attrs.define(kw_only=True, eq=False)
class Beginning(Moving):
    """A session whose model is opened by an init.

    `pending` is the accepted init; None before, and once the model is open.
    """

    pending: PendingInit | None = None

    def first_slot(self) -> None:
        """Wait for the client's init."""
        self.queue_done()

    @property
    def gate(self) -> Gate:
        """The gate that judges the client's messages."""
        return super().gate if self.pending is None else Gate.OPENING

    def configure(self, init: Init) -> None:
        """Take the settings of an init, before the model is opened."""

    def ready(self, prompt_length: int) -> None:
        """Go on: the model holds the prompt."""
        self.create(prompt_length=prompt_length)

    def init(self, init: Init) -> None:
        """Accept an init."""
        self.cancel_timer("init")
        self.pending = PendingInit.of(init, self.decode)
        self.open_if_decoded(self.pending)

    def media_decoded(self, event: ev.MediaDecoded) -> None:
        """Take a decoded voice."""
        if self.pending is not None and self.pending.awaits(event.media):
            self.pending.decoded(event.media, event.pcm)
            if not self.is_closed:
                self.open_if_decoded(self.pending)

    def media_rejected(self, event: ev.MediaRejected) -> None:
        """Refuse the init of a damaged voice."""
        if self.pending is not None and self.pending.awaits(event.media) and not self.is_closed:
            self._reject(f"reference audio: {event.reason}")

    def open_if_decoded(self, pending: PendingInit) -> None:
        """Have the model opened, unless that must wait."""
        if pending.undecided or self.is_moving:
            return
        assert self.lease is not None
        self.call.phase = Phase.OPENING
        self.configure(pending.init)
        self.do(ef.OpenBackend(lease=self.lease, opening=pending.to_opening(self.opened.seed)))

    def _reject(self, message: str) -> None:
        """Return to CONNECTED: the client may send a better init."""
        self.pending = None
        self.complain(ErrorCode.INVALID_PAYLOAD, message)
        self.set_timer("init", self.opened.limits.init_wait_s)

    def take_up(self) -> None:
        """Open the model, if that was lost or became due meanwhile."""
        if self.pending is not None:
            self.open_if_decoded(self.pending)

    def _is_opening(self, lease: int) -> bool:
        return lease == self.lease and self.call.phase is Phase.OPENING

    def backend_opened(self, event: ev.BackendOpened) -> None:
        """Become ACTIVE: the model holds the prompt."""
        if self._is_opening(event.lease):
            self.pending = None
            self.answered()
            if self.settle():
                self.ready(event.opened.prompt_length)
                self.move_if_due()

    def backend_open_failed(self, event: ev.BackendOpenFailed) -> None:
        """Refuse a prompt that is too long, or end the session if the model failed."""
        if not self._is_opening(event.lease):
            return
        if event.is_lost and self.outlives_worker:
            self.backend_lost()
            return
        if not self.settle():
            return
        if event.context_full:
            self._reject("the prompt does not fit the model's context")
        else:
            self.give_up("the model could not be opened")

    def give_up(self, text: str) -> None:
        """Refuse or end the session: the model does not answer."""
        if self.state is State.CONNECTED:
            self.refuse(ErrorCode.WORKER_CONNECT_FAILED, text)
        else:
            self.end("backend_error")
