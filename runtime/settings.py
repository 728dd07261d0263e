"""What an operator decides about a server; defaults as the sources and `limits` have them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs

from protocol.limits import (
    CLEANUP_WAIT_S,
    IDLE_S,
    INIT_WAIT_S,
    LIMIT_AUDIO_S,
    LIMIT_VIDEO_S,
    PAUSE_S,
)
from protocol.messages import Mode
from recorder.writer import Durability

from .admission import QUEUE_MAX

DEFAULT_PORT: Final = 8006
MODES: Final[tuple[Mode, ...]] = ("video", "audio", "chat")
"""The modes that are served, where the model has them; `transcription` is not yet."""
CHATS_MAX: Final = 256
"""Chats that are connected: between turns each holds a socket and no slot, but memory amid one."""


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one server, checked by the command line.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        model: a name of `runtime.models`, or the folder of a checkpoint.
        slots: sessions at once; None takes what the model recommends.
        device: `cpu` or `cuda`; None takes the model's default.
        dtype: `fp32`, `fp16` or `bf16`; None takes the device's default.
        record_to: the folder of the logs; None records nothing.
        limit_video_s: total time of a video session, queueing and idling included.
        limit_audio_s: likewise for audio.
        default_mode: the mode where a client names none.
        queue_max: sessions that may wait; 0 turns queueing off.
        durability: when logs are synced to the device besides at their end.
        on_recording_failure: what a session does when its log fails.
        init_wait_s: how long a client may hold a slot without an init.
        cleanup_wait_s: how long a call may run on after its session's end.
        idle_s: how long a chat may wait between two turns.
        pause_s: how long a client may pause.
        chats_max: chats that may be connected at once.
        voices: the folder of the voices that clients may name; None: there are none.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    model: str = "tiny"
    slots: int | None = None
    device: str | None = None
    dtype: str | None = None
    record_to: Path | None = None
    limit_video_s: int = LIMIT_VIDEO_S
    limit_audio_s: int = LIMIT_AUDIO_S
    default_mode: Mode = "video"
    queue_max: int = QUEUE_MAX
    durability: Durability = "interval"
    on_recording_failure: Literal["continue", "close"] = "continue"
    init_wait_s: int = INIT_WAIT_S
    cleanup_wait_s: int = CLEANUP_WAIT_S
    idle_s: int = IDLE_S
    pause_s: int = PAUSE_S
    chats_max: int = CHATS_MAX
    voices: Path | None = None

    def limit_s(self, mode: Mode) -> int:
        """Total time of a session of `mode`, in seconds; 0 where it has no limit in all (chat)."""
        return {"video": self.limit_video_s, "audio": self.limit_audio_s, "chat": 0}[mode]
