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
CONNECTIONS_MAX: Final = 4096
"""Many times the sessions that a machine can serve, with room for those that look at it."""
CONNECTIONS_PER_ADDRESS_MAX: Final = 512
"""A proxy or a school behind one address fits; one machine alone cannot take every place."""
MESSAGES_PER_S_MAX: Final = 200
"""Sound in pieces of 20 ms is 50 a second, and a picture with each is 100."""
BYTES_PER_S_MAX: Final = 16 * 1024 * 1024
"""A second of sound with four large pictures is 16 MiB: the most that real time asks for."""
HANDSHAKE_S: Final = 10
"""Enough for a bad mobile link; longer, and a slow-loris holds sockets for nothing."""
STALL_S: Final = 10
"""A peer that takes nothing for so long will not catch up."""
PING_S: Final = 20
"""Under the minute after which proxies and mobile networks forget a connection that is idle."""
PONG_WAIT_S: Final = 60
"""A client busy with sending answers late; one that answers nothing for a minute is gone."""
DRAIN_S: Final = 30
"""What orchestrators give a process to end in, by default."""


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one server, checked by the command line.

    Attributes:
        host: the address to listen on.
        port: 0 takes a free one.
        model: a name of `runtime.models`, or the folder of a checkpoint.
        workers: further ones beside it that can take any of its sessions; names as in `model`.
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
        keys: the file of API keys; None asks nobody for one.
        insecure: serve without keys on an address that is not loopback.
        origins: web origins beside the server's own whose pages may connect.
        tls_cert: the certificate's chain in PEM, read again when it changes; None speaks plain.
        tls_key: its private key in PEM.
        connections_max: connections at once, WebSockets and others.
        connections_per_address_max: of these, from one address.
        messages_per_s_max: messages that one connection is read, on average; more wait.
        bytes_per_s_max: likewise bytes.
        handshake_s: for a request's head, and for TLS before it.
        stall_s: a client that takes nothing of what is sent for so long is dropped.
        ping_s: how often a WebSocket is pinged; 0 never.
        pong_wait_s: a WebSocket from which nothing at all came for so long is dropped.
        drain_s: how long running sessions may go on after SIGTERM.
        log_format: how the server's own log is written, to its standard error.
        log_level: what it tells.
        traces: send OpenTelemetry spans, as the OTEL_ variables say.
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
    workers: tuple[str, ...] = ()
    keys: Path | None = None
    insecure: bool = False
    origins: tuple[str, ...] = ()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    connections_max: int = CONNECTIONS_MAX
    connections_per_address_max: int = CONNECTIONS_PER_ADDRESS_MAX
    messages_per_s_max: int = MESSAGES_PER_S_MAX
    bytes_per_s_max: int = BYTES_PER_S_MAX
    handshake_s: int = HANDSHAKE_S
    stall_s: int = STALL_S
    ping_s: int = PING_S
    pong_wait_s: int = PONG_WAIT_S
    drain_s: int = DRAIN_S
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    traces: bool = False

    def limit_s(self, mode: Mode) -> int:
        """Total time of a session of `mode`, in seconds; 0 where it has no limit in all (chat)."""
        return {"video": self.limit_video_s, "audio": self.limit_audio_s, "chat": 0}[mode]
