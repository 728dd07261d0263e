"""Canonical requests: what a client says, the same in every dialect.

A dialect (`protocol.wire.dialects`) converts wire frames to these and back. They are values without
behaviour; fields from a client are already checked, and `ignored` has the paths of those that are
unknown or unused, for counting. The server's messages are in `messages`.

Audio is float32 LE, 16 kHz mono (`Append`). In pieces of any size (`AppendSound`) it is as it came:
16-bit integers or G.711, at the client's rate.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from . import model as md
from .omni import OmniRequest, OmniSettings
from .openai import LiveSettings, OpenAIRequest
from .openai import Mute as Mute  # noqa: PLC0414 - a request
from .openai import Unmute as Unmute  # noqa: PLC0414 - a request
from .openai import Update as Update  # noqa: PLC0414 - a request


class Request(StrEnum):
    """The kinds of client message: the keys of the reception table."""

    INIT = "init"
    APPEND = "append"
    CLOSE = "close"
    SEE = "video_frame"
    PAUSE = "pause"
    RESUME = "resume"
    INTERRUPT = "interrupt"
    REPORT = "client_diagnostic"
    PLAYED = "playback.ack"
    COMMIT = "commit"
    MUTE = "mute"
    UNMUTE = "unmute"
    UPDATE = "update"
    CLEAR = "clear"
    RESPOND = "respond"
    CANCEL = "cancel"
    CREATE_ITEM = "create_item"
    DELETE_ITEM = "delete_item"
    RETRIEVE_ITEM = "retrieve_item"
    TRUNCATE_ITEM = "truncate_item"
    HEARTBEAT = "heartbeat"
    TOOL_RESULT = "tool_result"
    STANDALONE = "standalone"
    CLEAR_OUTPUT = "clear_output"
    MISPLACED = "misplaced"
    """An event of some dialect, in a session in which it is out of place."""
    UNKNOWN = "unknown"
    """No known event; parsing it gives the error."""


@attrs.frozen(kw_only=True)
class ReferenceAudio:
    """Reference audio as it came, 0.5 to 30 s: a sound file, or float32 LE 16 kHz mono."""

    data: bytes
    is_file: bool


@attrs.frozen(kw_only=True)
class VoiceName:
    """The name of a voice in the server's library, 64 characters at most (002, ref_audio_path)."""

    name: str


Voice = ReferenceAudio | VoiceName


@attrs.frozen(kw_only=True)
class Init:
    """Sets up the session: prompt, voices, settings.

    Attributes:
        instructions: the system prompt; in chat that of turns that bring no system message.
        ref_audio: the voice the model hears in its prompt.
        tts_ref_audio: the voice it speaks with; by default the one it hears (000).
        max_slice_nums: slices a frame may be cut into, 1-9, for appends without their own.
        config: inference settings.
        live: the settings that only `live` has.
        omni: the settings that only `vllm-omni` has.
        notices: the client wants to be told when the server is about to shut down, and what its
            user said.
        record: false: do not record the session, and remove what is recorded.
        tools: what the model may call: functions that the client runs.
    """

    instructions: str
    ref_audio: Voice | None = None
    tts_ref_audio: Voice | None = None
    max_slice_nums: int = 1
    config: md.DuplexConfig = md.DuplexConfig()
    live: LiveSettings = LiveSettings()
    omni: OmniSettings = OmniSettings()
    notices: bool = False
    record: bool = True
    tools: tuple[md.Tool, ...] = ()
    ignored: tuple[str, ...] = ()


@attrs.frozen
class BadPicture:
    """A picture of an append that is left out.

    Attributes:
        reason: what is wrong, for the client.
    """

    reason: str


@attrs.frozen(kw_only=True)
class Append:
    """Audio, and the pictures seen with it.

    Attributes:
        pcm: float32 LE, 16 kHz mono, finite; one sample (duplex-v1: 4000) to 10 s.
        frames: JPEG, PNG or WebP files whose headers have been checked; 4 MiB and 20 megapixels at
            most.
        force_listen: stop speaking, at once (B6).
        max_slice_nums: slices each of these frames may be cut into, 1-9; by default the session's.
        input_id: the client's name for this append, if it gave one.
    """

    pcm: bytes
    frames: tuple[bytes | BadPicture, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None
    input_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class TellModel:
    """An event for the model that belongs to no call.

    Attributes:
        text: what happened.
    """

    text: str


@attrs.frozen(kw_only=True)
class CloseRequest:
    """The client ends the session.

    Attributes:
        reason: its own words, if any; 64 characters at most, more are cut.
    """

    reason: str | None = None


@attrs.frozen(kw_only=True)
class See:
    """A frame that goes with the next audio (002).

    Attributes:
        jpeg: a JPEG file whose header has been checked; 4 MiB and 20 megapixels at most.
    """

    jpeg: bytes
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Pause:
    """The client pauses (002).

    Attributes:
        timeout_s: seconds after which the session ends unless it is resumed; by default, and at
            most, the server's limit.
    """

    timeout_s: float | None = None


@attrs.frozen(kw_only=True)
class Resume:
    """The client goes on (002)."""


@attrs.frozen(kw_only=True)
class Interrupt:
    """Stop speaking: `force_listen` for the unit in flight, else for the next (002)."""


@attrs.frozen(kw_only=True)
class Report:
    """The client's own diagnostics, kept in the log and otherwise without effect (002)."""


@attrs.frozen(kw_only=True)
class Played:
    """How much of the session's speech the client has played, kept in the log without effect.

    Attributes:
        played_ms: milliseconds of sound since the session began, 0 to 2^53.
    """

    played_ms: int


@attrs.frozen(kw_only=True)
class TextPart:
    """Text.

    Attributes:
        text: the text.
    """

    text: str


@attrs.frozen(kw_only=True)
class ImagePart:
    """An image.

    Attributes:
        data: a JPEG, PNG or WebP whose header has been checked; 16 MiB and 20 megapixels at most.
    """

    data: bytes


@attrs.frozen(kw_only=True)
class AudioPart:
    """Sound as it came.

    Attributes:
        data: a sound file, or float32 LE mono; 0.1 to 300 s.
        is_file: which of the two: a WAV, AIFF, FLAC, Ogg (Vorbis or Opus) or MP3.
        rate_hz: samples a second of float32; a file has its own.
    """

    data: bytes
    is_file: bool
    rate_hz: int = 16_000


@attrs.frozen(kw_only=True)
class VideoPart:
    """A video file.

    Attributes:
        data: the file, 64 MiB at most; its pictures and its sound are used.
        stack_frames: pictures a second: the first by itself, the others side by side in a second
            picture; 1 takes just the first.
    """

    data: bytes
    stack_frames: int = 1


Part = TextPart | ImagePart | AudioPart | VideoPart | md.ToolCall | md.ToolResult


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One message of a conversation, its media not decoded yet.

    Attributes:
        role: its author; only the first can be a system message, and the last is the user's, or
            a tool's.
        content: text, or parts of several kinds; behind those of the assistant its calls of tools.
            A tool's message is one result.
    """

    role: md.Role
    content: tuple[Part, ...]


@attrs.frozen(kw_only=True)
class SpeechRequest:
    """How an answer is to be spoken (004, TTSConfig).

    Attributes:
        mode: the system message of a conversation without one, and whether it has the voice:
            `default` leaves it out.
        language: language of that system message.
        voice: the voice to speak with; by default the model's own.
        voice_ms_max: length of the reference audio to use, in ms; 1000 at least.
    """

    mode: md.SpeechMode = "default"
    language: md.Language = "en"
    voice: Voice | None = None
    voice_ms_max: int | None = None


@attrs.frozen(kw_only=True)
class Ask:
    """A turn of chat: the whole conversation, and how it is to be answered (001, 004).

    Attributes:
        messages: the whole conversation: at least one message, the last of them the user's, or a
            tool's.
        streaming: the answer comes in pieces while it is generated; else at once.
        config: how it is generated.
        speech: whether and how the answer is spoken; without it, the answer is only text.
        max_slice_nums: most slices a picture may be cut into, 1-9; by default the model's own.
        use_image_id: pictures are numbered, if there are several.
        omni: sound and pictures of a message are joined without line breaks (004, omni_mode).
        thinking: the model may think aloud before it answers.
        tts_template: the model is asked for an answer that could be spoken, spoken or not; always
            with sound or speech.
        record: false: do not record the session, and remove what is recorded (004).
        tools: what the model may call: functions that the client runs.
        tool_choice: `none`: the model is not shown the tools.
        input_id: the client's name for this turn, if it gave one.
    """

    messages: tuple[ChatMessage, ...]
    streaming: bool = True
    config: md.ChatConfig = md.ChatConfig()
    speech: SpeechRequest | None = None
    max_slice_nums: int | None = None
    use_image_id: bool = True
    omni: bool = False
    thinking: bool = False
    tts_template: bool = False
    record: bool = True
    tools: tuple[md.Tool, ...] = ()
    tool_choice: md.ToolChoice = "auto"
    input_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class ChooseModel:
    """Choose the model that transcribes (003, session.update).

    Attributes:
        model: its name, of any length; an unknown one is answered with an error.
        record: false: do not record the session, and remove what is recorded.
    """

    model: str
    record: bool = True
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class AppendSound:
    """16-bit sound in pieces of any size (003, input_audio_buffer.append; `live`).

    Attributes:
        pcm16: signed 16-bit LE samples, 16 kHz (in `live` the session's rate) mono; at least one.
    """

    pcm16: bytes
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Commit:
    """Begin to transcribe an utterance, or declare its sound complete (003).

    Attributes:
        final: this utterance has no more sound; sound appended later belongs to the next one.
        begins: its text is requested: it may be transcribed.
    """

    final: bool = False
    begins: bool = True
    ignored: tuple[str, ...] = ()


ClientMessage = (
    Init
    | Append
    | md.ToolResult
    | TellModel
    | CloseRequest
    | See
    | Pause
    | Resume
    | Interrupt
    | Report
    | Played
    | Ask
    | ChooseModel
    | AppendSound
    | Commit
    | Mute
    | Unmute
    | Update
    | OpenAIRequest
    | OmniRequest
)
