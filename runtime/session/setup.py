"""How a session begins: who wants it, what is drawn for it, its first event, its log's head."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Protocol

import attrs

from protocol.values import behaviour
from protocol.values import events as ev
from protocol.values import limits as lim
from protocol.values.errors import ErrorCode
from protocol.values.limits import OF_MODE, Mode
from protocol.values.records import session_id_of
from recorder.format.format import Fields
from recorder.format.mapping import SCHEMA
from recorder.storage.store import LogInfo

from ..model.backends.base import BackendInfo
from ..settings.settings import MIB, Settings
from .peer import hash_of

# -- what is drawn: its name, its seed, the wall clock ---------------------------------------------


@attrs.frozen(kw_only=True)
class Identity:
    """One session's name, time and seed.

    Attributes:
        recording_id: sorts by time and names the log; letters, digits, `-` and `_` only.
        created_ms: wall clock, Unix milliseconds, unique on this server.
        seed: 63 bits that key every random choice of the session.
    """

    recording_id: str
    created_ms: int
    seed: int


class Identities(Protocol):
    """Draws identities."""

    def draw(self) -> Identity:
        """Draw the next session's identity; no two are equal."""
        ...

    def ticket_id(self) -> str:
        """Draw a ticket's id, `ticket_` and 12 hex digits."""
        ...

    def token(self) -> str:
        """Draw a client's right to come back: 32 random bytes, in base64 for addresses."""
        ...


@attrs.define
class SystemIdentities:
    """Draws from the system's clock and entropy."""

    last_ms: int = 0

    def draw(self) -> Identity:
        """As `Identities`; two sessions never share a millisecond."""
        self.last_ms = max(time.time_ns() // 1_000_000, self.last_ms + 1)
        moment = datetime.fromtimestamp(self.last_ms / 1000, UTC)
        recording_id = f"{moment:%Y%m%dT%H%M%S}-{secrets.token_hex(6)}"
        return Identity(
            recording_id=recording_id, created_ms=self.last_ms, seed=secrets.randbits(63)
        )

    def ticket_id(self) -> str:
        """As `Identities`."""
        return f"ticket_{secrets.token_hex(6)}"

    def token(self) -> str:
        """As `Identities`."""
        return secrets.token_urlsafe(32)


# -- its first event -------------------------------------------------------------------------------


SEED_MAX: Final = (1 << 63) - 1
"""A server draws 63 bits; of a client's number these are taken."""
VERSION: Final = version("antiphon")
"""Looked up once: it reads files."""


@attrs.frozen(kw_only=True)
class Parent:
    """A recording from whose past a session is to begin, before unit `at`; None: at its end."""

    info: LogInfo
    at: int | None


@attrs.frozen(kw_only=True)
class SessionSpec:
    """A client that wants a session.

    Attributes:
        mode, endpoint: of its address.
        label: the client's name for the session; may be empty.
        quiet: with a slot free, nothing is sent about the queue.
        owner: the name of the session's key; empty where the server has no keys.
        address: the client's, or its network; empty for none.
        must_record: the client cannot opt out of the recording.
        refusal: the code with which it is refused a slot; None: it may have one.
        resumable: it wants to be able to come back.
        parent: the past of the session; None: it has none.
        first: its first message, which the client does not send; empty: none.
        seed: of its random choices; None: the server draws one.
    """

    mode: Mode
    endpoint: ev.Endpoint = "realtime"
    label: str = ""
    quiet: bool = False
    owner: str = ""
    address: str = ""
    must_record: bool = False
    refusal: ErrorCode | None = None
    resumable: bool = False
    parent: Parent | None = None
    first: str = ""
    seed: int | None = None

    @property
    def party(self) -> str:
        """To whom it is counted: its owner, or else its address."""
        return self.owner or self.address


def first_event(
    settings: Settings,
    info: BackendInfo,
    identity: Identity,
    spec: SessionSpec,
    *,
    token: str,
    is_recorded: bool,
) -> ev.ConnectionOpened:
    """Make a session's first event; `token` is empty for a client that cannot come back."""
    mode = spec.mode
    return ev.ConnectionOpened(
        recording_id=identity.recording_id,
        created_ms=identity.created_ms,
        mode=mode,
        seed=identity.seed if spec.seed is None else spec.seed & SEED_MAX,
        limits=ev.SessionLimits(
            session_s=_session_s(settings, spec),
            init_wait_s=settings.init_wait_s,
            cleanup_wait_s=settings.cleanup_wait_s,
            context_tokens=info.context_limit,
            sliding_windows=info.sliding_windows,
            can_rollback=info.can_rollback,
            close_on_recording_failure=settings.on_recording_failure == "close",
            idle_s=settings.idle_s,
            pause_s=settings.pause_s,
            call_wait_s=lim.TURN_WAIT_S if mode == "chat" else lim.CALL_WAIT_S,
            **_rebuild_limits(settings, info, mode),
            **_model_limits(settings, info, spec),
            **_tool_limits(info, mode),
            **_resume_limits(settings, token),
            **_user_limits(settings, spec),
        ),
        recording="on" if is_recorded else "off",
        endpoint=spec.endpoint,
        label=spec.label,
        behaviour=behaviour.NEWEST,
        quiet=spec.quiet,
        must_record=(settings.record_always or spec.must_record) and is_recorded,
        recording_notice=settings.recording_notice or "",
        resume_hash=hash_of(token) if token else "",
    )


def _rebuild_limits(settings: Settings, info: BackendInfo, mode: Mode) -> Mapping[str, Any]:
    """The limits of a session that outlives its worker; none if it ends with it."""
    is_unit = OF_MODE[mode].work == "unit"
    if settings.on_worker_loss == "close" or (is_unit and not info.can_rebuild):
        return {}
    return {
        "rebuild_wait_s": min(
            lim.REBUILD_WAIT_S if is_unit else lim.TURN_REBUILD_WAIT_S, settings.resume_s
        ),
        "rebuild_units": lim.REBUILD_UNITS_MAX,
        "can_repeat": info.deterministic,
    }


def _user_limits(settings: Settings, spec: SessionSpec) -> Mapping[str, Any]:
    """What is found in the user's speech, and done with it; nothing where it is not looked for."""
    if OF_MODE[spec.mode].work != "unit":
        return {}
    limits: dict[str, Any] = {}
    if settings.transcriber is not None:
        limits["transcriber"] = Path(settings.transcriber).name
    if settings.barge_in and spec.endpoint != "openai":
        limits["barge_in"] = True
    if settings.barge_in or spec.endpoint == "openai":
        limits["backchannel_ms"] = settings.backchannel_ms
    return limits


def _session_s(settings: Settings, spec: SessionSpec) -> int:
    is_live = spec.endpoint in ev.PIECES
    return settings.limit_live_s if is_live else settings.limit_s(spec.mode)


def _tool_limits(info: BackendInfo, mode: Mode) -> Mapping[str, Any]:
    """The limits of a session whose model calls tools while it listens and speaks."""
    return {"duplex_tools": True} if info.duplex_tools and OF_MODE[mode].work == "unit" else {}


def _model_limits(settings: Settings, info: BackendInfo, spec: SessionSpec) -> Mapping[str, Any]:
    """The limits of a session whose client chooses a model; none for another."""
    is_transcription = spec.mode == "transcription"
    if not is_transcription and spec.endpoint not in ev.EVENT_IDS:
        return {}
    sound = {"sound_bytes": settings.transcription_buffer_mb * MIB} if is_transcription else {}
    able = {"can_speak": info.can_speak, "can_see": "video" in info.modes}
    return {
        "models": model_names(settings, info),
        **sound,
        **(able if spec.endpoint in ("openai", "omni") else {}),
    }


def model_names(settings: Settings, info: BackendInfo) -> tuple[str, ...]:
    """The names by which a client may choose the model, its own first."""
    return tuple(dict.fromkeys((info.name, *settings.served_model_names)))


def _resume_limits(settings: Settings, token: str) -> Mapping[str, Any]:
    """The limits of a session whose client may come back; none for another."""
    if not token:
        return {}
    return {"detach_s": settings.detach_s, "resume_s": settings.resume_s}


def log_head(
    settings: Settings, info: BackendInfo, opened: ev.ConnectionOpened, owner: str
) -> Fields:
    """The fields of the first record of a session's log."""
    return {
        "recording_id": opened.recording_id,
        "session_id": session_id_of(opened.recording_id),
        "schema": SCHEMA,
        "software": {"antiphon": VERSION},
        "config": {
            "model": settings.model,
            "mode": opened.mode,
            "durability": settings.durability,
            "deterministic": info.deterministic,
            **({"owner": owner} if owner else {}),
        },
        "fingerprint": dict(info.fingerprint),
        "seed": opened.seed,
        "wall_ms": opened.created_ms,
        "parent": None,
    }
