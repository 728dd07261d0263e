"""The dialect of 002: `prepare`, `audio_chunk`, `result`, and a session that can be paused.

Choices in addition to 002:
- `ref_audio_path` is the name of a voice in the server's library, never a path; data wins over it.
- `video_frame` in mode=audio is set aside unread: a `See` without a frame.
- An unwanted end is sent twice, as an `error` with its code and as `stopped`, since clients wait
  for `stopped`. It is read as the end that the `error` names; the `stopped` after it is another
  end, of a session that is over by then. A timeout is only sent as `timeout`, and its text says
  whether it was the pause's.
- `stop` has no reason, so a client's own words are left out rather than its goodbye refused.

002 cannot show: ids of responses, input and sessions once prepared, the cost of prefill, units
dropped, and whether the recording goes on. The reading side leaves ids empty and takes the name of
the recording to mean that there is one. A cancelled session reads as a stop.
"""

from __future__ import annotations

from typing import Final

from ...values.messages import Closed, Listen, Pending, ServerMessage, Speech
from ...values.requests import (
    Append,
    CloseRequest,
    Init,
    Interrupt,
    Pause,
    Report,
    Request,
    Resume,
    See,
)
from ..field import DROPPED, Field
from ..kinds import FLAG, JPEG, OBJECT, VOICE, VOICE_BY_NAME, VOICE_OR_NAME, heard
from ..table import Table
from . import legacy_results as results
from . import shared
from .base import Dialect
from .inputs import APPEND_SLICES, ASKED, FORCE_LISTEN, PROMPT, SLICES, frames
from .settings import config, slices_once

_PREPARE: Final = Table(
    Init,
    config("config", rank=1),
    Field("max_slice_nums", SLICES, 1, rank=2),
    Field("system_prompt", PROMPT, "", attr="instructions", also=("prefix_system_prompt",)),
    Field("ref_audio_base64", VOICE_OR_NAME, None, attr="ref_audio", omit=True),
    Field(
        "ref_audio_path",
        VOICE_BY_NAME,
        None,
        attr="ref_audio",
        after="ref_audio_base64",
        omit=True,
    ),
    Field("tts_ref_audio_base64", VOICE, None, attr="tts_ref_audio", omit=True),
    slices_once("config"),
    Field("deferred_finalize", FLAG, True, attr="config.deferred_finalize", rank=1),
    *ASKED,
    tag={"type": "prepare"},
)
_REQUESTS: Final = {
    Request.INIT: _PREPARE,
    Request.APPEND: Table(
        Append,
        Field("audio", heard(1), attr="pcm", also=("audio_base64",)),
        frames("frame_base64_list"),
        FORCE_LISTEN,
        APPEND_SLICES,
        tag={"type": "audio_chunk"},
        lacks={"input_id": None},
        where="legacy-duplex",
    ),
    Request.CLOSE: Table(CloseRequest, tag={"type": "stop"}),
    Request.SEE: Table(
        See,
        Field("frame", JPEG, attr="jpeg", also=("frame_base64",), aside_in={"audio": b""}),
        tag={"type": "video_frame"},
    ),
    Request.PAUSE: Table(
        Pause,
        Field("timeout", results.PAUSE_S, None, attr="timeout_s", omit=True),
        tag={"type": "pause"},
    ),
    Request.RESUME: Table(Resume, tag={"type": "resume"}),
    Request.INTERRUPT: Table(Interrupt, tag={"type": "interrupt"}),
    Request.REPORT: Table(
        Report,
        Field("metrics", OBJECT, None, attr=DROPPED, get=lambda _: {}),
        tag={"type": "client_diagnostic"},
    ),
    Request.PLAYED: shared.PLAYED,
}


class LegacyDuplex(Dialect):
    """The dialect of 002."""

    def encode(self, message: ServerMessage) -> tuple[str, ...]:
        """Write a server's message as frames."""
        match message:
            case Listen() | Speech() | Pending():
                return (results.RESULT.encode(message),)
            case Closed():
                return results.encode_closed(message)
        return super().encode(message)


LEGACY_DUPLEX: Final = LegacyDuplex(
    "legacy-duplex",
    {table.kind: request for request, table in _REQUESTS.items()},
    _REQUESTS,
    results.ANSWERS,
)
