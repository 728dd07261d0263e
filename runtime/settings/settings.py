"""The operator's settings of a server, each declared once with its default, bounds and help.

`config` makes flags, file keys, variables and the table of docs/operations.md from it. Defaults
come from the sources and `limits`. A number's upper bound catches typing errors. A `Settings` made
in code is not checked; `config` checks user input.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

import attrs

from protocol.values.limits import (
    CLEANUP_WAIT_S,
    DETACH_S,
    IDLE_S,
    INIT_WAIT_S,
    LIMIT_AUDIO_S,
    LIMIT_LIVE_S,
    LIMIT_TRANSCRIPTION_S,
    LIMIT_VIDEO_S,
    PAUSE_S,
    RESUME_S,
    SOUND_BYTES_MAX,
)
from protocol.values.modes import MODES, OF_MODE, Mode
from recorder.write.writer import Durability

from .bounds import (
    BUFFER_MB_MAX,
    BYTES_PER_S_LIMIT,
    BYTES_PER_S_MAX,
    CHATS_MAX,
    CONNECTIONS_MAX,
    CONNECTIONS_PER_ADDRESS_MAX,
    CONNECTIONS_PER_ADDRESS_PER_S_MAX,
    COUNT_MAX,
    DAYS_MAX,
    DETACHED_MAX,
    DRAIN_S,
    HANDSHAKE_S,
    MEGABYTES_MAX,
    MESSAGES_PER_S_MAX,
    MIB,
    PING_S,
    PONG_WAIT_S,
    QUEUE_MAX,
    RECORDINGS,
    SECONDS_MAX,
    STALL_S,
)
from .declaration import setting
from .model_settings import ModelSettings

_SESSIONS: Final = "Sessions"
_RECORDING: Final = "Recording"
_ACCESS: Final = "Keys, origins and TLS"
_BOUNDS: Final = "Bounds of connections"
_LOG: Final = "Ending and logging"


@attrs.frozen(kw_only=True)
class Settings(ModelSettings):
    """The settings of one server; the declarations describe them."""

    limit_video_s: int = setting(
        LIMIT_VIDEO_S,
        "Total seconds of a video session, queueing and idling included.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    limit_audio_s: int = setting(
        LIMIT_AUDIO_S,
        "Total seconds of an audio session, queueing and idling included.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    limit_live_s: int = setting(
        LIMIT_LIVE_S,
        "Total seconds of a session at `/v1/live/sessions`, queueing and idling included.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    limit_transcription_s: int = setting(
        LIMIT_TRANSCRIPTION_S,
        "Total seconds of a transcription session, queueing and idling included.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    transcription_buffer_mb: int = setting(
        SOUND_BYTES_MAX // MIB,
        "Megabytes of 16-bit sound of a transcription that may wait for the model; more is refused "
        "(buffer_full).",
        _SESSIONS,
        low=1,
        high=BUFFER_MB_MAX,
    )
    default_mode: Mode = setting(
        "video", "The mode of a client whose URL names no mode.", _SESSIONS, choices=MODES
    )
    queue_max: int = setting(
        QUEUE_MAX,
        "Sessions that may wait for a slot; 0 refuses instead (worker_busy).",
        _SESSIONS,
        low=0,
        high=COUNT_MAX,
    )
    chats_max: int = setting(
        CHATS_MAX,
        "Chats that may be connected at once; each takes a slot only during a turn.",
        _SESSIONS,
        low=0,
        high=COUNT_MAX,
    )
    idle_s: int = setting(
        IDLE_S,
        "Seconds that a chat may wait between two turns, and that a transcription client may be "
        "silent.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
        flag="--chat-idle-s",
    )
    pause_s: int = setting(
        PAUSE_S,
        "Seconds that a client of /ws/duplex may pause; it may ask for less.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    detach_s: int = setting(
        DETACH_S,
        "Seconds for which a session without a connection keeps its slot, if its client asked to "
        "be able to come back; 0 allows no one to.",
        _SESSIONS,
        low=0,
        high=SECONDS_MAX,
    )
    resume_s: int = setting(
        RESUME_S,
        "Seconds after which such a session ends, unless its client came back.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    resumable: bool = setting(
        False,
        "Go on with the sessions that a server before this one left in the log folder, and leave "
        "those whose clients can come back to the next server. The model must be the same.",
        _SESSIONS,
    )
    detached_max: int = setting(
        DETACHED_MAX,
        "Sessions without a connection that are kept; the oldest ends first.",
        _SESSIONS,
        low=0,
        high=COUNT_MAX,
    )
    init_wait_s: int = setting(
        INIT_WAIT_S,
        "Seconds that a client may hold a slot before it sets its session up.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )
    cleanup_wait_s: int = setting(
        CLEANUP_WAIT_S,
        "Seconds that a model call may run on after its session's end; then its slot is condemned.",
        _SESSIONS,
        low=1,
        high=SECONDS_MAX,
    )

    record_to: Path | None = setting(
        None,
        "Folder of the session logs, created if missing. --no-record records nothing.",
        _RECORDING,
        flag="--record",
        unset="nothing is recorded",
        served=RECORDINGS,
    )
    durability: Durability = setting(
        "interval",
        "When logs are synced to the device, besides at their end: never, every second, or also "
        "with every unit. A killed process loses nothing in any case; a power cut may.",
        _RECORDING,
    )
    on_recording_failure: Literal["continue", "close"] = setting(
        "continue",
        "What a session does when its log cannot be written: go on and say so, or end.",
        _RECORDING,
    )
    on_worker_loss: Literal["rebuild", "close"] = setting(
        "rebuild",
        "What a recorded session does when its model's process or device is lost: it is brought "
        "back on another slot from its recording, or ends.",
        _RECORDING,
    )
    rebuild: Literal["auto", "exact", "fast"] = setting(
        "auto",
        "How it is brought back: exact feeds each unit as recorded, so that all that follows is "
        "the same byte for byte; fast feeds many at once; auto is exact for a deterministic model.",
        _RECORDING,
    )
    record_always: bool = setting(
        False, "Refuse clients that ask not to be recorded; a key may say so too.", _RECORDING
    )
    recording_notice: str | None = setting(
        None, "A notice that recorded clients receive when their session begins.", _RECORDING
    )
    record_refused: bool = setting(
        True,
        "Keep the logs of sessions that were refused before their first message (worker_busy, "
        "queue_full); the metrics always count them.",
        _RECORDING,
        served=False,
    )
    record_keep_days: int | None = setting(
        None,
        "Days after its last write that a log is kept; then it is removed.",
        _RECORDING,
        low=1,
        high=DAYS_MAX,
        unset="for ever",
    )
    record_keep_mb: int | None = setting(
        None,
        "Megabytes that all logs may take together; above that the oldest are removed, except logs "
        "that are being written.",
        _RECORDING,
        low=1,
        high=MEGABYTES_MAX,
        unset="the size of the disk",
    )
    store: str | None = setting(
        None,
        "URL of an object store that takes all finished logs: s3://BUCKET/PREFIX, gs://, az:// or "
        "file:/// (antiphon[store]), with credentials from the environment. Logs are removed from "
        "the folder only after that.",
        _RECORDING,
        unset="logs stay in the folder",
    )

    keys: Path | None = setting(
        None,
        "File of API keys, made by `antiphon keys`; with it every request needs a key, except "
        "/health, /ready and pages. It is read again when it changes.",
        _ACCESS,
        unset="no key is needed",
    )
    insecure: bool = setting(
        False,
        "Serve without keys on an address that is not loopback: every client may use the server.",
        _ACCESS,
    )
    origins: tuple[str, ...] = setting(
        (),
        "A further web origin (https://app.example) whose pages may connect; * allows all origins "
        "and needs --keys.",
        _ACCESS,
        flag="--origin",
    )
    tls_cert: Path | None = setting(
        None,
        "The certificate and its chain, PEM; read again when it changes. Needs --tls-key.",
        _ACCESS,
        unset="plain HTTP",
    )
    tls_key: Path | None = setting(
        None, "The certificate's private key, PEM, without a password.", _ACCESS
    )

    gateways: tuple[str, ...] = setting(
        (),
        "Address of another server behind the same balancer: http://HOST:PORT or https://. Clients "
        "reach sessions and recordings of any of them through any other one.",
        _ACCESS,
        flag="--gateway",
    )
    gateway_ca: Path | None = setting(
        None,
        "Certificates of the authority that these servers' certificates are from, PEM.",
        _ACCESS,
        unset="the system's",
    )

    connections_max: int = setting(
        CONNECTIONS_MAX,
        "Connections at once, WebSockets and others.",
        _BOUNDS,
        low=1,
        high=COUNT_MAX,
    )
    connections_per_address_max: int = setting(
        CONNECTIONS_PER_ADDRESS_MAX,
        "Of these, from one address. Behind a proxy all come from the proxy's address.",
        _BOUNDS,
        low=1,
        high=COUNT_MAX,
    )
    connections_per_address_per_s_max: int = setting(
        CONNECTIONS_PER_ADDRESS_PER_S_MAX,
        "New connections a second from one address, on average; more get 429.",
        _BOUNDS,
        low=1,
        high=COUNT_MAX,
    )
    messages_per_s_max: int = setting(
        MESSAGES_PER_S_MAX,
        "Messages a second that are read from one connection, on average; more wait.",
        _BOUNDS,
        low=1,
        high=COUNT_MAX,
    )
    bytes_per_s_max: int = setting(
        BYTES_PER_S_MAX,
        "Bytes a second that are read from one connection, on average; more wait.",
        _BOUNDS,
        low=1024,
        high=BYTES_PER_S_LIMIT,
    )
    handshake_s: int = setting(
        HANDSHAKE_S,
        "Seconds for a request's head, and for TLS before it.",
        _BOUNDS,
        low=1,
        high=SECONDS_MAX,
    )
    stall_s: int = setting(
        STALL_S,
        "Seconds after which a client that reads nothing is dropped.",
        _BOUNDS,
        low=1,
        high=SECONDS_MAX,
    )
    ping_s: int = setting(
        PING_S,
        "Seconds between two pings of a WebSocket; 0 sends none.",
        _BOUNDS,
        low=0,
        high=SECONDS_MAX,
    )
    pong_wait_s: int = setting(
        PONG_WAIT_S,
        "Seconds after which a WebSocket that sends nothing is dropped.",
        _BOUNDS,
        low=1,
        high=SECONDS_MAX,
    )

    drain_s: int = setting(
        DRAIN_S,
        "Seconds that running sessions may continue after SIGTERM.",
        _LOG,
        low=0,
        high=SECONDS_MAX,
    )
    log_format: Literal["text", "json"] = setting(
        "text", "Format of the server's own log, on standard error.", _LOG
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "Lowest level of its messages; -v stands for info.", _LOG
    )
    traces: bool = setting(
        False, "Send OpenTelemetry spans, as the OTEL_ variables say (antiphon[traces]).", _LOG
    )

    def limit_s(self, mode: Mode) -> int:
        """The longest session of `mode` in seconds; 0 means no limit (chat)."""
        name = OF_MODE[mode].limit
        limit_s: int = getattr(self, name) if name else 0
        return limit_s
