"""The frames of a recorded connection, read as its two ends read them.

Frames are given in recorded order, since the client's first init picks the dialect of
`/v1/realtime`; frames that are not messages of that dialect are skipped. A transcription's two sets
of names are read in one way. The machine decides which requests were accepted.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from contextlib import suppress
from typing import Final

from protocol.values import events as ev
from protocol.values.errors import RemoteProtocolError
from protocol.values.frames import Frame
from protocol.values.limits import NS_PER_S, OF_MODE, Mode
from protocol.values.messages import Created, ServerMessage, TranscriptDelta, TranscriptDone
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES, Coding, rate_of
from protocol.values.openai import Configured, InputStep
from protocol.values.requests import Append, ClientMessage, Request
from protocol.wire.audio import LIVE_RATE_HZ, Resampler, compress, lag_of, to_pcm16
from protocol.wire.codec import Context, Json, parse_frame
from protocol.wire.dialects import OPENAI_TRANSCRIPTION, OPENING, REALTIME, choose, first_dialect
from protocol.wire.table import Dialect
from runtime.measures.talk import ClientSound, Piece

SOUND_ENDS: Final = "output_audio.delta"
"""Of the types of OpenAI's dialects that have sound."""
INVALID: Final = "invalid"
"""The kind of a frame that is not a JSON object, or was too long."""


class Wire:
    """One connection's dialect, as known from its frames so far; `context` is for reading requests.

    The sound of pieces that were resampled lies `lag_ns` before what came with it.

    If the session's first event is lost, `/v1/realtime` is assumed.
    """

    def __init__(self, opened: ev.ConnectionOpened | None = None) -> None:
        self.mode: Mode = "video" if opened is None else opened.mode
        self.endpoint: ev.Endpoint = "realtime" if opened is None else opened.endpoint
        self.dialect = first_dialect(self.mode, self.endpoint)
        self._sound: Final = ClientSound(
            self.mode, self.endpoint, behaviour=0 if opened is None else opened.behaviour
        )
        self._resampler: Resampler | None = None
        self._lag_bytes = self.lag_ns = 0
        self.piece: Piece | None = None
        self._coding: Coding = "audio/pcm"
        self._spoken = Resampler()
        self._bytes_max: Final = OF_MODE[self.mode].frame_bytes_max
        self.context: Final = (
            Context(mode=self.mode)
            if opened is None
            else Context(
                mode=self.mode,
                sliding_windows=opened.limits.sliding_windows,
                behaviour=opened.behaviour,
            )
        )

    def fork(self) -> None:
        """Note that another client goes on, which chooses its dialect again."""
        self.dialect = first_dialect(self.mode, self.endpoint)

    def kind(self, frame: Frame) -> str:
        """Name the kind of a client's frame: a value of `requests.Request`, or `INVALID`."""
        body = self._body(frame)
        return INVALID if body is None else self._dialect_for(body).classify(body).value

    def request(self, frame: Frame) -> ClientMessage | None:
        """Read a client's frame; None if a server would refuse it in every state.

        Sound in pieces is read at the model's rate, without what a resampler puts before it
        (`lag_ns`), so each frame is to be read once; `piece` has it as it came.
        """
        body = self._body(frame)
        if body is None:
            return None
        dialect = self._dialect_for(body)
        try:
            request = dialect.parse(dialect.classify(body), body, self.context)
        except RemoteProtocolError:
            return None
        read = self._sound.read(request)
        self.piece = read if isinstance(read, Piece) else None
        return self._resampled(read) if isinstance(read, Piece) else read

    def _resampled(self, piece: Piece) -> Append:
        if self._resampler is None or self._resampler.rate_hz != piece.rate_hz:
            self._resampler = Resampler(piece.rate_hz)
            self.lag_ns = lag_of(piece.rate_hz, INPUT_RATE_HZ)
            self._lag_bytes = self.lag_ns * INPUT_RATE_HZ // NS_PER_S * SAMPLE_BYTES
        pcm = self._resampler.take(piece.pcm16)
        left, self._lag_bytes = self._lag_bytes, max(self._lag_bytes - len(pcm), 0)
        return Append(pcm=pcm[left:])

    def prepare(self, frame: Frame) -> None:
        """Note what a client's frame says of the next ones, whether it was taken or not."""
        if self.dialect is OPENING:
            self.kind(frame)
        elif self.endpoint in ev.PIECES and self.kind(frame) in (Request.INIT, Request.UPDATE):
            self.request(frame)

    def messages(self, frame: Frame) -> tuple[ServerMessage, ...]:
        """Read a server's frame; empty if it is not a message of the dialect.

        If the client's first frames are lost, it is read as one of `realtime`.
        """
        body = self._body(frame)
        dialects = (OPENING, REALTIME) if self.dialect is OPENING else (self.dialect,)
        for dialect in dialects:
            with suppress(RemoteProtocolError):
                messages = () if body is None else dialect.decode(self._as_pcm(body), self.mode)
                self._learn(messages)
                is_dictated = dialect is OPENAI_TRANSCRIPTION
                return tuple(map(_as_transcript, messages)) if is_dictated else messages
        return ()

    def _learn(self, messages: tuple[ServerMessage, ...]) -> None:
        """Note how the model's sound is written from here on."""
        for message in messages:
            if isinstance(message, Created) and self.endpoint == "live":
                self._coding = message.live.coding
            elif isinstance(message, Created | Configured):
                self._coding = message.openai.output_format
            else:
                continue
            if self._coding != "audio/pcm":
                self._spoken = Resampler(rate_of(self._coding), self._coding, LIVE_RATE_HZ)

    def _as_pcm(self, body: Json) -> Json:
        """Write a piece of the model's sound as a client's decoder has it: 16 bits, 24 kHz."""
        delta = body.get("delta")
        is_sound = str(body.get("type")).endswith(SOUND_ENDS) and isinstance(delta, str)
        if self._coding == "audio/pcm" or not is_sound:
            return body
        with suppress(ValueError):
            data = b64decode(str(delta), validate=True)
            pcm16 = to_pcm16(self._spoken.take(data))
            silence = compress(bytes(2), self._coding)
            if data == silence * len(data):
                pcm16 = bytes(len(pcm16))  # its decoder gives a little more than silence
            return {**body, "delta": b64encode(pcm16).decode()}
        return body

    def _body(self, frame: Frame) -> Json | None:
        try:
            return parse_frame(frame, self._bytes_max)
        except RemoteProtocolError:
            return None

    def _dialect_for(self, body: Json) -> Dialect:
        if self.dialect is OPENING:
            self.dialect = choose(body) or OPENING
        return self.dialect


def _as_transcript(message: ServerMessage) -> ServerMessage:
    """Read the text of an item as that of an utterance: it is the same."""
    match message:
        case InputStep(kind="transcript_delta", text=text):
            return TranscriptDelta(text=text)
        case InputStep(kind="transcript_done", text=text):
            return TranscriptDone(text=text, prompt_tokens=0, completion_tokens=0)
    return message
