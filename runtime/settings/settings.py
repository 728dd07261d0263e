"""The operator's settings of a server, each declared once with its default, bounds and help.

- `setting` makes a field of an attrs class. From it and its type `declared` reads all that flags,
  files, variables, printed configurations and documents need: flags, file keys, variables and the
  reference of the site.
- A field `queue_max` is `queue_max` in a file, `ANTIPHON_QUEUE_MAX` as a variable and `--queue-max`
  as a flag, unless its declaration names another flag.
- The types are whole numbers, booleans, texts, choices, paths and lists of texts. Numbers, texts
  and paths may be `None`, written as an empty text.
- A value is parsed from text or from TOML, with the same bounds and without coercion: a number in a
  file is a TOML number, not a text of digits, and `true` is not a number. An error names the value
  and the limit, in one line without control characters.
- A number's upper bound catches typing errors. A `Settings` made in code is not checked; `sources`
  checks user input.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import attrs

from protocol.values import limits
from protocol.values.limits import OF_MODE, Mode
from recorder.write.writer import Durability

SECONDS_MAX: Final = 31_536_000
"""A year, against typing errors; its nanoseconds fit into 64 bits."""
COUNT_MAX: Final = 1_000_000
"""More sockets, chats or queue places than a process can hold."""

T = TypeVar("T")
Kind = Literal["number", "truth", "text", "path", "texts"]

PREFIX: Final = "ANTIPHON_"
"""Prefix of all variables."""
KINDS: Final[dict[object, Kind]] = {
    int: "number",
    bool: "truth",
    str: "text",
    Path: "path",
    tuple[str, ...]: "texts",
}


@attrs.frozen(kw_only=True)
class Setting:
    """One setting, as `setting` declared it; `optional`: None is a value."""

    default: object
    help: str
    heading: str
    low: int | None
    high: int | None
    choices: tuple[str, ...]
    named_flag: str
    unset: str
    name: str = ""
    kind: Kind = "text"
    optional: bool = False

    @property
    def flag(self) -> str:
        """Its flag, with the dashes."""
        return self.named_flag or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values in a few words; empty where any value is allowed."""
        if self.choices:
            return ", ".join(self.choices)
        if self.low is not None and self.high is not None:
            return f"{self.low} to {self.high}"
        return "" if self.low is None else f"at least {self.low}"


def setting(
    default: T,
    help: str,  # noqa: A002 - what click and argparse call it
    *,
    heading: str = "",
    low: int | None = None,
    high: int | None = None,
    choices: tuple[str, ...] = (),
    flag: str = "",
    unset: str = "none",
    served: object = attrs.NOTHING,
) -> T:
    """Declare a setting, as the value of a field.

    Args:
        help: sentences, with the unit.
        heading: of this setting and the following ones in the help; by default the last one's.
        low, high: the bounds of a number, inclusive.
        choices: by default those of the field's `Literal`; empty allows any text.
        flag: with its dashes; by default the field's name.
        unset: the meaning of None, for people.
        served: the command line's default, if it differs from the class's.
    """
    made = Setting(
        default=default if served is attrs.NOTHING else served,
        help=help,
        heading=heading,
        low=low,
        high=high,
        choices=choices,
        named_flag=flag,
        unset=unset,
    )
    field: T = attrs.field(default=default, metadata={"setting": made})
    return field


seconds = partial(setting, low=1, high=SECONDS_MAX)
"""Declare a time in seconds."""
count = partial(setting, low=1, high=COUNT_MAX)
"""Declare a number of connections, sessions or messages."""


@cache
def declared(owner: type) -> tuple[Setting, ...]:
    """The settings of an attrs class made by `setting`, with the command line's defaults."""
    hints, heading, found = get_type_hints(owner), "", list[Setting]()
    for field in attrs.fields(owner):
        made: Setting = field.metadata["setting"]
        heading, choices = made.heading or heading, made.choices
        hint, optional = _without_none(hints[field.name])
        if get_origin(hint) is Literal:
            choices, hint = choices or get_args(hint), str
        typed = {"name": field.name, "kind": KINDS[hint], "optional": optional}
        found.append(attrs.evolve(made, heading=heading, choices=choices, **typed))
    return tuple(found)


def _without_none(hint: object) -> tuple[object, bool]:
    """Split None off a type; say whether it was there."""
    if get_origin(hint) not in {Union, types.UnionType}:
        return hint, False
    (one,) = (part for part in get_args(hint) if part is not type(None))
    return one, True


# -- parsing a value -------------------------------------------------------------------------------


TEXT_CHARS_MAX: Final = 4_096
"""The longest path of a kernel."""
TEXTS_MAX: Final = 64
"""Origins or workers of one server; more are a mistake."""
SHOWN_CHARS_MAX: Final = 60
"""Enough of a wrong value to find it."""
TRUTHS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)


class ValueWrongError(ValueError):
    """The value is not allowed for this setting; the text says which limit it breaks."""


def from_text(setting: Setting, text: str) -> object:
    """Parse a flag's or a variable's text, lists with commas; raises `ValueWrongError`."""
    value: object = text
    if setting.kind == "texts":
        value = [part.strip() for part in text.split(",")] if text.strip() else []
    elif setting.kind == "truth":
        value = TRUTHS.get(text.lower(), text)
    elif setting.kind == "number" and _NUMBER.fullmatch(text):
        value = int(text)
    return from_toml(setting, value)


def from_toml(setting: Setting, value: object) -> object:
    """Check a value that `tomllib` read; raises `ValueWrongError`."""
    if value == "" and setting.optional:
        return None
    match setting.kind:
        case "number":
            return _number(setting, value)
        case "truth":
            if not isinstance(value, bool):
                raise ValueWrongError(f"{shown(value)} is neither true nor false")
            return value
        case "texts":
            return _texts(value)
        case "path":
            return Path(plain(value))
        case "text":
            return _text(setting, value)


def plain(value: object) -> str:
    """Check a text for a path, address or name; `ValueWrongError` if it is invalid.

    Empty and too long texts, and control characters, are invalid.
    """
    if not isinstance(value, str):
        raise ValueWrongError(f"{shown(value)} is not text")
    if not value:
        raise ValueWrongError("empty text is not allowed")
    if len(value) > TEXT_CHARS_MAX:
        raise ValueWrongError(f"a text of {len(value)} characters: at most {TEXT_CHARS_MAX}")
    if any(char < " " or char == "\x7f" for char in value):
        raise ValueWrongError(f"{shown(value)} has a control character")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueWrongError(f"{shown(value)} is not UTF-8")
    return value


def shown(value: object) -> str:
    """A wrong value on one line: short, without control characters."""
    text = repr(value) if isinstance(value, str) else str(value)
    text = "".join(char if char.isprintable() else "?" for char in text)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def nearest(wrong: str, known: Iterable[str]) -> str:
    """The end of a message that suggests the nearest word, or empty."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _number(setting: Setting, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueWrongError(f"{shown(value)} is not a whole number")
    if setting.low is not None and value < setting.low:
        raise ValueWrongError(f"{shown(value)} is too small: {setting.allowed}")
    if setting.high is not None and value > setting.high:
        raise ValueWrongError(f"{shown(value)} is too large: {setting.allowed}")
    return value


def _text(setting: Setting, value: object) -> str:
    text = plain(value)
    if setting.choices and text not in setting.choices:
        meant = nearest(text, setting.choices)
        raise ValueWrongError(f"{shown(text)} is not one of {setting.allowed}{meant}")
    return text


def _texts(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueWrongError(f"{shown(value)} is not a list of texts")
    if len(value) > TEXTS_MAX:
        raise ValueWrongError(f"a list of {len(value)} is too long: at most {TEXTS_MAX}")
    return tuple(plain(item) for item in value)


# -- defaults and bounds ---------------------------------------------------------------------------


DEFAULT_PORT: Final = 8006
DEVICES: Final = ("cpu", "cuda")
DTYPES: Final = ("fp32", "fp16", "bf16")
QUANTIZATIONS: Final = ("int4", "int8")
CONTEXT_PERCENT: Final = 100
"""Of its context, for which each session has memory by default: all."""
RECORDINGS: Final = Path("recordings")
"""The default folder of the logs: every session is recorded."""
QUEUE_MAX: Final = 64
"""At 90 s a session and one slot, the last of 64 waits over an hour; any more would time out."""
DETACHED_MAX: Final = 256
"""Sessions without a connection: each holds memory and an open log, and a slot for its grace."""
FORK_MB: Final = 128
"""A quarter of an hour of speech; more may be copied then."""
CHATS_MAX: Final = 256
"""Connected chats: each holds a socket, and memory during a turn."""
CONNECTIONS_MAX: Final = 4096
"""Many times the sessions of one machine, with room for status requests."""
CONNECTIONS_PER_ADDRESS_MAX: Final = 512
"""Enough for a proxy or a school at one address; one machine cannot take every place."""
CONNECTIONS_PER_ADDRESS_PER_S_MAX: Final = 200
"""A third of a core for handshakes; the places of all clients that reconnect at once."""
MESSAGES_PER_S_MAX: Final = 200
"""Sound in pieces of 20 ms is 50 a second, with a picture each 100."""
BYTES_PER_S_MAX: Final = 16 * 1024 * 1024
"""A second of sound with four large pictures is 16 MiB: the most in real time."""
HANDSHAKE_S: Final = 10
"""Enough for a bad mobile link; longer lets slow clients hold sockets."""
STALL_S: Final = 10
"""A peer that takes nothing for so long will not catch up."""
PING_S: Final = 20
"""Below the minute after which proxies and mobile networks drop an idle connection."""
PONG_WAIT_S: Final = 60
"""A client that is busy sending answers late; after a silent minute it is gone."""
DRAIN_S: Final = 30
"""The time that orchestrators give a process to end, by default."""

DAYS_MAX: Final = 36_500
"""A century, against typing errors."""
MEGABYTES_MAX: Final = 1_000_000_000
"""A petabyte: more than one folder should hold."""
MIB: Final = 1 << 20
BUFFER_MB_MAX: Final = 1_024
"""Nine hours of sound for each session, against typing errors."""
BYTES_PER_S_LIMIT: Final = 1 << 40
"""More than any network carries to one connection."""


# -- the settings ----------------------------------------------------------------------------------


NO_TRANSCRIBER: Final = "none"
"""The value of `transcriber` that turns it off where it would be on."""


@attrs.frozen(kw_only=True)
class Settings:
    """The settings of one server; the declarations describe them."""

    host: str = setting("127.0.0.1", "Address to listen on.", heading="Address and model")
    port: int = setting(
        DEFAULT_PORT,
        "Port for WebSockets and HTTP; 0 takes a free one and prints it.",
        low=0,
        high=65_535,
    )
    model: str = setting(
        "tiny",
        "tiny: the embedded trained model. scripted: plays a fixed script, hears nothing. "
        "backend:NAME: what an installed package offers under this name. Otherwise the folder of "
        "a MiniCPM-o checkpoint: config.json, tokenizer.json, safetensors, and assets/token2wav "
        "for its voice. `antiphon doctor --model FOLDER` says whether it fits.",
    )
    transcriber: str | None = setting(
        None,
        "A second model, which transcribes users: for captions, recordings and clients that ask "
        "for it. moonshine: a small one for English (the extra words). Otherwise named as in "
        "--model; it needs the mode transcription, and a slot for each session. none: no model.",
        unset="none; with --open moonshine, if it is installed",
    )
    detector: Literal["energy", "silero"] | None = setting(
        "energy",
        "The detector of user speech, for interruptions: energy uses loudness; silero, a "
        "trained model (the extra vad), mistakes music and coughs for speech far less often.",
        unset="silero, if it is installed, otherwise energy",
        served=None,
    )
    barge_in: bool = setting(
        False,
        "Let the user's speech interrupt the model, in every duplex dialect; in openai the "
        "client's turn_detection decides. Without it a client interrupts by force_listen.",
    )
    backchannel_ms: int = setting(
        limits.BACKCHANNEL_MS,
        "Milliseconds that a user must speak over the model to interrupt it; a shorter sound, "
        "such as mm-hm, does not. With 0 any speech does. Clients of openai may set their own.",
        low=0,
        high=5_000,
    )
    workers: tuple[str, ...] = setting(
        (),
        "A further copy of the model, which can take any of its sessions, named as in --model.",
        flag="--worker",
    )
    isolate: bool = setting(
        False, "Run each model in its own process, one on each GPU; the server survives its loss."
    )
    worker_addresses: tuple[str, ...] = setting(
        (),
        "Address of a worker that holds the model (`antiphon workers start`): unix:PATH or "
        "tcp:HOST:PORT.",
        flag="--worker-address",
    )
    placement: str = setting(
        "auto",
        "auto: in the server's process, or where isolate and worker_addresses say. Otherwise what "
        "an installed package offers under this name. ray: on the GPUs of the Ray cluster that "
        "this machine belongs to, a worker on each; ray:HOST:PORT: of the one with this head.",
    )
    workers_wanted: int = setting(
        1,
        "Workers that the placement starts; with workers_max, the minimum.",
        low=1,
        high=TEXTS_MAX,
    )
    workers_max: int | None = setting(
        None,
        "Maximum workers of the placement; the load decides how many run.",
        low=1,
        high=TEXTS_MAX,
        unset="workers_wanted",
    )
    worker_token_file: Path | None = setting(
        None, "File of the token that workers share with their servers."
    )
    worker_ca: Path | None = setting(
        None,
        "Certificates of the authority that workers' certificates are from, PEM.",
        unset="the system's",
    )
    slots: int | None = setting(
        None,
        "Concurrent sessions; their memory is allocated at the start.",
        low=1,
        high=1024,
        unset="8 for tiny; for a folder as many as fit into memory, at most 64",
    )
    device: str | None = setting(
        None,
        "Device of the model.",
        choices=DEVICES,
        unset="cpu for tiny; for a folder cuda if present",
    )
    dtype: str | None = setting(
        None, "Format of weights and caches.", choices=DTYPES, unset="fp32 on cpu, bf16 on cuda"
    )
    quantize: str | None = setting(
        None,
        "Quantise the language model of a folder when it is loaded: by rounding to the nearest, "
        "in groups of 128 weights. Checkpoints in AWQ's or GPTQ's form need no setting.",
        choices=QUANTIZATIONS,
        unset="as the files are",
    )
    context_percent: int = setting(
        CONTEXT_PERCENT,
        "Part of the context for which each session of a folder has memory; with less than 100 "
        "they share it, more of them fit, and one that cannot grow ends with context_full.",
        low=5,
        high=CONTEXT_PERCENT,
    )
    deterministic: bool = setting(
        False,
        "Make a session's bytes independent of other sessions, so that its log can be replayed "
        "with the model; refuse to start where that fails. Always so on cpu; on cuda fewer "
        "sessions fit.",
    )
    voice_steps: int = setting(
        limits.VOICE_STEPS,
        "Steps of the flow that makes a published checkpoint's voice; fewer are faster, and "
        "rougher. A recording is replayed with its own.",
        low=1,
        high=limits.VOICE_STEPS_MAX,
    )
    served_model_names: tuple[str, ...] = setting(
        (),
        "A further name of the model, for clients of mode=transcription.",
        flag="--served-model-name",
    )
    voices: Path | None = setting(
        None,
        "Folder of WAV files that clients may name as reference audio, each by its name without "
        ".wav.",
    )
    default_voice: str | None = setting(
        None, "Name of the voice that /api/default_ref_audio gives to pages."
    )
    pages: bool = setting(
        True, "Serve the console, a web page that talks to this server, at / and /console."
    )
    static: Path | None = setting(
        None, "Folder of web pages; every file in it is public, also with keys."
    )

    limit_video_s: int = seconds(
        limits.LIMIT_VIDEO_S,
        "Maximum seconds of a video session, including queueing and idling.",
        heading="Sessions",
    )
    limit_audio_s: int = seconds(
        limits.LIMIT_AUDIO_S, "Maximum seconds of an audio session, including queueing and idling."
    )
    limit_live_s: int = seconds(
        limits.LIMIT_LIVE_S,
        "Maximum seconds of a session at `/v1/live/sessions`, including queueing and idling.",
    )
    limit_transcription_s: int = seconds(
        limits.LIMIT_TRANSCRIPTION_S,
        "Maximum seconds of a transcription session, including queueing and idling.",
    )
    transcription_buffer_mb: int = setting(
        limits.SOUND_BYTES_MAX // MIB,
        "Megabytes of 16-bit sound of a transcription that may wait for the model; more is refused "
        "(buffer_full).",
        low=1,
        high=BUFFER_MB_MAX,
    )
    default_mode: Mode = setting("video", "The mode of a client whose URL names no mode.")
    queue_max: int = count(
        QUEUE_MAX, "Maximum sessions waiting for a slot; 0 refuses at once (worker_busy).", low=0
    )
    chats_max: int = count(
        CHATS_MAX, "Maximum connected chats; each takes a slot only during a turn.", low=0
    )
    idle_s: int = seconds(
        limits.IDLE_S,
        "Seconds that a chat may wait between two turns, and that a transcription client may be "
        "silent.",
        flag="--chat-idle-s",
    )
    pause_s: int = seconds(
        limits.PAUSE_S, "Seconds that a client of /ws/duplex may pause; it may ask for less."
    )
    detach_s: int = seconds(
        limits.DETACH_S,
        "Seconds for which a resumable session without a connection keeps its slot; 0 disables "
        "resuming.",
        low=0,
    )
    resume_s: int = seconds(
        limits.RESUME_S, "Seconds after which such a session ends, unless its client comes back."
    )
    resumable: bool = setting(
        False,
        "Resume the sessions that the previous server left in the log folder, and leave "
        "resumable ones to the next server. The model must be the same.",
    )
    detached_max: int = count(
        DETACHED_MAX,
        "Maximum sessions without a connection; beyond it, the oldest of the key or address "
        "with the most ends first.",
        low=0,
    )
    init_wait_s: int = seconds(
        limits.INIT_WAIT_S, "Seconds that a client may hold a slot before its session is set up."
    )
    cleanup_wait_s: int = seconds(
        limits.CLEANUP_WAIT_S,
        "Seconds that a model call may outlast its session; then its slot is condemned.",
    )

    record_to: Path | None = setting(
        None,
        "Folder of the session logs, created if missing. --no-record records nothing.",
        heading="Recording",
        flag="--record",
        unset="nothing is recorded",
        served=RECORDINGS,
    )
    durability: Durability = setting(
        "interval",
        "When logs are synced to the device, in addition to their end: never, every second, or "
        "also with every unit. A killed process never loses data; a power cut may.",
    )
    on_recording_failure: Literal["continue", "close"] = setting(
        "continue",
        "What a session does when its log cannot be written: continue and report it, or end.",
    )
    on_worker_loss: Literal["rebuild", "close"] = setting(
        "rebuild",
        "What a recorded session does when its model's process or device is lost: rebuild on "
        "another slot from the recording, or end.",
    )
    rebuild: Literal["auto", "exact", "fast"] = setting(
        "auto",
        "How it is rebuilt: exact feeds each unit as recorded, so that what follows is "
        "byte-identical; fast feeds many at once; auto is exact for a deterministic model.",
    )
    record_always: bool = setting(
        False, "Refuse clients that ask not to be recorded; also a setting of a key."
    )
    recording_notice: str | None = setting(
        None, "A notice that recorded clients receive when their session begins."
    )
    record_refused: bool = setting(
        True,
        "Keep the logs of sessions that were refused before their first message (worker_busy, "
        "queue_full); the metrics always count them.",
        served=False,
    )
    fork_mb: int = setting(
        FORK_MB,
        "Megabytes of recordings that the forks of one key or address may copy in 15 minutes.",
        low=1,
        high=MEGABYTES_MAX,
    )
    record_keep_days: int | None = setting(
        None, "Days to keep a log after its last write.", low=1, high=DAYS_MAX, unset="for ever"
    )
    record_keep_mb: int | None = setting(
        None,
        "Maximum megabytes of all logs; beyond it the oldest are removed, except those being "
        "written.",
        low=1,
        high=MEGABYTES_MAX,
        unset="the size of the disk",
    )
    store: str | None = setting(
        None,
        "URL of an object store that takes all finished logs: s3://BUCKET/PREFIX, gs://, az:// or "
        "file:/// (the extra store), with credentials from the environment. Logs are removed from "
        "the folder only after that.",
        unset="logs stay in the folder",
    )

    keys: Path | None = setting(
        None,
        "File of API keys, made by `antiphon keys`. Every request then needs a key, except "
        "/health, /ready and the files of pages. Reloaded when it changes.",
        heading="Keys, origins and TLS",
        unset="no key is needed",
    )
    insecure: bool = setting(
        False,
        "Serve without keys on an address that is not loopback: every client may use the server.",
    )
    origins: tuple[str, ...] = setting(
        (),
        "A further web origin (https://app.example) whose pages may connect; * allows all origins "
        "and needs --keys.",
        flag="--origin",
    )
    twilio_token_file: Path | None = setting(
        None,
        "File of Twilio's auth token: calls at /v1/twilio need its signature in place of a key.",
    )
    webrtc_door: str | None = setting(
        None,
        "Where `antiphon door` listens, which answers browsers' WebRTC offers at "
        "/v1/realtime/calls: unix:PATH or tcp:HOST:PORT.",
        unset="none",
    )
    tls_cert: Path | None = setting(
        None,
        "The certificate and its chain, PEM; reloaded when it changes. Needs --tls-key.",
        unset="plain HTTP",
    )
    tls_key: Path | None = setting(None, "The certificate's private key, PEM, without a password.")

    gateways: tuple[str, ...] = setting(
        (),
        "Address of another server behind the same balancer: http://HOST:PORT or https://. "
        "Clients then reach any server's sessions and recordings through any other.",
        flag="--gateway",
    )
    gateway_ca: Path | None = setting(
        None,
        "Certificates of the authority that these servers' certificates are from, PEM.",
        unset="the system's",
    )

    connections_max: int = count(
        CONNECTIONS_MAX,
        "Maximum open connections, WebSockets and others.",
        heading="Connection limits",
    )
    connections_per_address_max: int = count(
        CONNECTIONS_PER_ADDRESS_MAX,
        "Maximum open connections from one address. Behind a proxy all come from the proxy's "
        "address.",
    )
    connections_per_address_per_s_max: int = count(
        CONNECTIONS_PER_ADDRESS_PER_S_MAX,
        "New connections per second from one address, on average; more get 429.",
    )
    messages_per_s_max: int = count(
        MESSAGES_PER_S_MAX,
        "Messages per second read from one connection, on average; more wait. All connections "
        "of a key or address together have 1/25 of connections_per_address_max times that.",
    )
    bytes_per_s_max: int = setting(
        BYTES_PER_S_MAX,
        "Bytes per second read from one connection, on average; more wait.",
        low=1024,
        high=BYTES_PER_S_LIMIT,
    )
    handshake_s: int = seconds(HANDSHAKE_S, "Seconds for a request's head, and for TLS before it.")
    stall_s: int = seconds(STALL_S, "Seconds after which a client that reads nothing is dropped.")
    ping_s: int = seconds(PING_S, "Seconds between two pings of a WebSocket; 0 sends none.", low=0)
    pong_wait_s: int = seconds(
        PONG_WAIT_S, "Seconds after which a WebSocket that sends nothing is dropped."
    )

    drain_s: int = seconds(
        DRAIN_S,
        "Seconds that running sessions may continue after SIGTERM.",
        heading="Ending and logging",
        low=0,
    )
    log_format: Literal["text", "json"] = setting(
        "text", "Format of the server's own log, on standard error."
    )
    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "warning", "Minimum level of its messages; -v is short for info."
    )
    traces: bool = setting(
        False, "Send OpenTelemetry spans, as the OTEL_ variables say (the extra traces)."
    )

    def limit_s(self, mode: Mode) -> int:
        """The longest session of `mode` in seconds; 0 means no limit (chat)."""
        name = OF_MODE[mode].limit
        limit_s: int = getattr(self, name) if name else 0
        return limit_s
