"""The dialect of 000: `session.update`, `input_audio_buffer.append`, `response.output_audio.delta`.

Choices in addition to 000:
- Listens and deltas have a `metrics` object as in `realtime`, so that dropped units can be seen.
- An end without the client's wish and without a word in 000 is an `error`; a session that an
  operator cancelled is `stopped`, as on the close frame.
- `session.voice_config` holds the settings that 002 has in `config`: the source's pages send it.

000 has no ids for input, responses, or sessions once created: the writing side refuses to lose the
first, the reading side leaves ids empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ...values.limits import APPEND_SAMPLES_MIN
from ...values.messages import Closed, Created, EndReason, Listen, Speech
from ...values.requests import Append, Init, Request
from ..codec import Json
from ..kinds import FLAG, INTEGER, SPEECH, TEXT, VOICE, input_sound, word_of
from ..table import Dialect, Field, Object, optional, typed
from . import chat, shared
from .shared import APPEND_SLICES, ASKED, FORCE_LISTEN, PROMPT, SLICES, config, frames, slices_once

_REASONS: Final[Mapping[EndReason, str]] = {
    "client": "stopped",
    "timeout": "timeout",
    "context_full": "context_full",
    "backend_error": "error",
    "server_shutdown": "server_shutdown",
    "cancelled": "stopped",
    "invalid_frame": "error",
    "flooded": "error",
}
_ENDS: Final[Mapping[str, EndReason]] = {
    "stopped": "client",
    "timeout": "timeout",
    "context_full": "context_full",
    "server_shutdown": "server_shutdown",
    "error": "backend_error",
}

_UPDATE: Final = typed(
    Init,
    shared.SESSION_UPDATE,
    Object(
        "session",
        config("voice_config", rank=1),
        Field("max_slice_nums", SLICES, 1),
        Field("instructions", PROMPT, rank=-1),
        optional("ref_audio", VOICE, rank=10),
        optional("tts_ref_audio", VOICE, rank=10),
        slices_once("voice_config"),
        chat.DUPLEX_TOOLS_ROW,
        *ASKED,
        is_required=True,
    ),
    lacks={"config.deferred_finalize": True},
    where="this dialect",
)
_APPEND: Final = typed(
    Append,
    shared.AUDIO_APPEND,
    Field("audio", input_sound(APPEND_SAMPLES_MIN), attr="pcm"),
    frames("video_frames"),
    FORCE_LISTEN,
    APPEND_SLICES,
    lacks={"input_id": None},
    where="duplex-v1",
)
_METRICS: Final = (
    Object("metrics", *shared.METRICS, attr="metrics", rank=1),
    Field("kv_cache_length", INTEGER, attr="metrics.kv_cache_length"),
)
"""Our addition, and 000's own field for the length."""


_ANSWERS: Final = (
    typed(
        Created,
        shared.SESSION_CREATED,
        Field("session_id", TEXT),
        Field("prompt_length", INTEGER),
        Field("recording", shared.RECORDING, "off"),
        *shared.RECORDED,
        chat.TOOLS_STATE,
    ),
    typed(Listen, "response.listen", *_METRICS, lacks={"session_id": "", "input_id": ""}),
    typed(
        Speech,
        "response.output_audio.delta",
        Field("text", TEXT),
        Field("audio", SPEECH, attr="pcm"),
        Field("end_of_turn", FLAG),
        *_METRICS,
        lacks={"session_id": "", "response_id": "", "input_id": ""},
    ),
    typed(
        Closed,
        shared.SESSION_CLOSED,
        Field("reason", word_of(_ENDS), get=shared.end_word(_REASONS)),
        lacks={"session_id": ""},
    ),
    chat.TOOL_CALL,
    *shared.COMMON,
)


class DuplexV1(Dialect):
    """The dialect of 000."""

    def classify(self, body: Json) -> Request:
        """Return the kind of request of a client's message; an update of 003 is misplaced."""
        if shared.is_model_update(body):
            return Request.MISPLACED
        return shared.classify(body, self.types)


DUPLEX_V1: Final = DuplexV1(
    "duplex-v1", {Request.INIT: _UPDATE, Request.APPEND: _APPEND, **chat.COMMON_REQUESTS}, _ANSWERS
)
