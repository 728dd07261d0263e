"""The table of modes: what is true of each, written once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

import attrs

from .limits import CHAT_FRAME_BYTES_MAX, FRAME_BYTES_MAX

Mode = Literal["video", "audio", "chat", "transcription"]
"""The kind of a session."""
MODES: Final[tuple[Mode, ...]] = get_args(Mode)

Work = Literal["unit", "turn", "chunk"]
"""What a model is asked for: a second of talk, a turn of chat, the text of a piece of sound."""


@attrs.frozen(kw_only=True)
class ModeRow:
    """A mode.

    Attributes:
        work: what its sessions ask of a model, and so their kind and what is counted of them.
        dialects: the names of those that have it.
        frame_bytes_max: of the longest frame, either way.
        limit: the setting of its longest session in seconds; empty means no limit.
    """

    work: Work
    dialects: frozenset[str]
    frame_bytes_max: int = FRAME_BYTES_MAX
    limit: str = ""


OF_MODE: Final[Mapping[Mode, ModeRow]] = MappingProxyType(
    {
        "video": ModeRow(
            work="unit",
            dialects=frozenset({"realtime", "duplex-v1", "legacy-duplex", "vllm-omni"}),
            limit="limit_video_s",
        ),
        "audio": ModeRow(
            work="unit",
            dialects=frozenset(
                {"realtime", "duplex-v1", "legacy-duplex", "live", "openai", "vllm-omni"}
            ),
            limit="limit_audio_s",
        ),
        "chat": ModeRow(
            work="turn",
            dialects=frozenset({"realtime", "legacy-chat"}),
            frame_bytes_max=CHAT_FRAME_BYTES_MAX,
        ),
        "transcription": ModeRow(
            work="chunk",
            dialects=frozenset(
                {"transcription", "transcription-responses", "openai-transcription"}
            ),
            limit="limit_transcription_s",
        ),
    }
)
