"""The dialect `live`: OpenAI's Live API, `session.start`, `session.output_audio.delta`.

Names, fields and words are those of the types of the `openai` package (`openai.types.live`).

Choices in addition to them:
- Each second of the model is an audio delta of a second, silence where it listens: the deltas are
  the session's time line. Its text comes before it.
- An `info` says what the queue does: `session_queued` where the client waits, and again when its
  place changes; `slot_assigned` at its turn. `time_over` or `context_full` comes before the
  `session.closed` whose reason is `expired`.
- `event_id` is filled in by the session, which knows the number of the frame (`EVENT`).
- What the model cannot do is refused by its name (`unsupported`), and so is a field that the API
  does not know (`unknown_parameter`).

`live` cannot show: the place in the queue but in words, ids of responses and input, metrics, the
turn's end, the recording's name. The reading side takes a silent second for a listen.
"""

from __future__ import annotations

from typing import Final

import attrs
import numpy as np

from ...values.messages import Listen, ServerMessage, Speech
from ...values.model import OUTPUT_RATE_HZ, SAMPLE16_BYTES
from ...values.modes import Mode
from ...values.requests import ClientMessage, Init, Request
from ...values.sound import G711_RATE_HZ, LIVE_RATES_HZ
from ..codec import Fields, Value
from ..rates import to_float32
from . import live_answers as answers
from . import live_requests as requests
from .base import Context, Dialect, Json


class Live(Dialect):
    """The dialect of OpenAI's Live API."""

    def parse(self, request: Request, body: Json, context: Context) -> ClientMessage:
        """Check every field of a client's message; a known event that is not offered is named."""
        kind = body.get("type")
        if isinstance(kind, str) and kind in requests.UNSUPPORTED:
            raise requests.unsupported("$.type", f"{kind}, which the model cannot do")
        if request is Request.INIT and context.is_fork:
            return _with_rate(requests.FORK_START.parse(body, context))
        message: ClientMessage = super().parse(request, body, context)
        return _with_rate(message) if isinstance(message, Init) else message

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames; a speaking second has its text first."""
        if not isinstance(message, Speech):
            return super().encode(message)
        words = (answers.WORDS.encode(message),) if message.text else ()
        return (*words, answers.SPEECH.encode(message)) if message.pcm or not words else words

    def decode(self, body: Json, mode: Mode = "video") -> tuple[ServerMessage, ...]:
        """Read a server's message; a second is read at 24 kHz."""
        match body.get("type"):
            case answers.INFO:
                return (answers.info_of(body.get("code")).parse(body),)
            case answers.OUTPUT_AUDIO:
                return (_read_second(body),)
        return super().decode(body, mode)


def _with_rate(init: Init) -> Init:
    """Fill in the rate of a format; one that is not given at all stays so."""
    live = init.live
    coding = live.coding or ("audio/pcm" if live.rate_hz else "")
    default_hz = LIVE_RATES_HZ[0] if coding == "audio/pcm" else G711_RATE_HZ
    rate_hz = (live.rate_hz if coding == "audio/pcm" else 0) or default_hz
    return attrs.evolve(init, live=attrs.evolve(live, coding=coding, rate_hz=rate_hz))


def _read_second(body: Json) -> Listen | Speech:
    delta = Fields(body).required("delta", Value.pcm16)
    if not any(delta):
        listen: Listen = answers.LISTEN.parse(body)
        return attrs.evolve(listen, silence_samples=len(delta) // SAMPLE16_BYTES)
    pcm = to_float32(delta)
    if len(delta) == LIVE_RATES_HZ[1] * SAMPLE16_BYTES:
        at = np.arange(OUTPUT_RATE_HZ) * LIVE_RATES_HZ[1] / OUTPUT_RATE_HZ
        samples = np.frombuffer(pcm, "<f4")
        pcm = np.interp(at, np.arange(len(samples)), samples).astype("<f4").tobytes()
    speech: Speech = answers.SPEECH.parse(body)
    return attrs.evolve(speech, pcm=pcm)


LIVE: Final = Live(
    "live",
    {table.kind: request for request, table in requests.REQUESTS.items()},
    requests.REQUESTS,
    answers.ANSWERS,
)
