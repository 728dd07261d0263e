"""Canonical requests: what a client says, the same in every dialect.

A dialect (`protocol.wire.dialects`) turns wire frames into these and back. They are values without
behaviour; their fields are already checked where they come from a client. What the server says
stands in `messages`.

Audio is float32 LE, 16 kHz mono, but for a transcription's, which comes as 16-bit integers.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from .digest import added
from .model import DuplexConfig
from .turn import ChatConfig, Language, Role, SpeechMode


class Request(StrEnum):
    """The kinds of message a client can send: what the reception table is keyed by."""

    INIT = "init"
    APPEND = "append"
    CLOSE = "close"
    SEE = "video_frame"
    PAUSE = "pause"
    RESUME = "resume"
    INTERRUPT = "interrupt"
    REPORT = "client_diagnostic"
    COMMIT = "commit"
    MISPLACED = "misplaced"
    """An event that some dialect knows, in a session where it has no place."""
    UNKNOWN = "unknown"
    """No event of ours; parsing it says what is wrong with it."""


@attrs.frozen(kw_only=True)
class ReferenceAudio:
    """Reference audio as it came, 0.5 to 30 s: a WAV file, or float32 LE 16 kHz mono."""

    data: bytes
    is_wav: bool


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
        tts_ref_audio: the voice it speaks with; the one it hears where there is none (000).
        max_slice_nums: slices a frame may be cut into, 1-9, for appends that do not say.
        config: inference settings.
        notices: the client wants to be told when the server is about to shut down.
        record: false: the session is not to be recorded, and what was of it is removed.
        ignored: paths of fields that the dialect does not know, for counting.
    """

    instructions: str
    ref_audio: Voice | None = None
    tts_ref_audio: Voice | None = None
    max_slice_nums: int = 1
    config: DuplexConfig = DuplexConfig()
    notices: bool = added(False)
    record: bool = added(True)
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Append:
    """Audio, and what was seen with it.

    Attributes:
        pcm: float32 LE, 16 kHz mono, finite; one sample (duplex-v1: 4000) to 10 s.
        frames: JPEG files whose headers have been checked; 4 MiB and 20 megapixels at most.
        force_listen: stop speaking, at once (B6).
        max_slice_nums: slices each of these frames may be cut into, 1-9; the session's otherwise.
        input_id: the client's name for this append, if it gave one.
        ignored: paths of fields that were ignored, for counting.
    """

    pcm: bytes
    frames: tuple[bytes, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None
    input_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class CloseRequest:
    """The client ends the session.

    Attributes:
        reason: its own words, if it gave any; 64 characters at most, more are cut.
    """

    reason: str | None = None


@attrs.frozen(kw_only=True)
class See:
    """A frame that goes with the next audio (002).

    Attributes:
        jpeg: a JPEG file whose header has been checked; 4 MiB and 20 megapixels at most.
        ignored: as in `Append`.
    """

    jpeg: bytes
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Pause:
    """The client pauses (002).

    Attributes:
        timeout_s: seconds after which the session ends, if it is not resumed; the server's limit
            where it is absent or more.
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
    """Diagnostics of the client's own, kept in the log and otherwise without effect (002)."""


@attrs.frozen(kw_only=True)
class TextPart:
    """Words.

    Attributes:
        text: the words.
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
        data: a WAV file, or float32 LE mono; 0.1 to 300 s.
        is_wav: which of the two.
        rate_hz: samples a second of float32; a WAV says its own.
    """

    data: bytes
    is_wav: bool
    rate_hz: int = 16_000


@attrs.frozen(kw_only=True)
class VideoPart:
    """A video file.

    Attributes:
        data: the file, 64 MiB at most; its pictures and its sound are taken out.
        stack_frames: pictures a second: the first by itself, the others side by side in a second
            picture; 1 takes just the first.
    """

    data: bytes
    stack_frames: int = 1


Part = TextPart | ImagePart | AudioPart | VideoPart


@attrs.frozen(kw_only=True)
class ChatMessage:
    """One message of a conversation, its media not decoded yet.

    Attributes:
        role: who says it; a system message can only be the first, and the last is the user's.
        content: what it says: only words, or parts of several kinds.
    """

    role: Role
    content: tuple[Part, ...]


@attrs.frozen(kw_only=True)
class SpeechRequest:
    """How an answer is to be spoken (004, TTSConfig).

    Attributes:
        mode: which system message is put in front where the conversation has none, and whether the
            voice stands in it: `default` leaves it out.
        language: of that message.
        voice: whose voice it is to be; the model's own where there is none.
        voice_ms_max: so much of the reference audio is used, in ms; 1000 at least.
    """

    mode: SpeechMode = "default"
    language: Language = "en"
    voice: Voice | None = None
    voice_ms_max: int | None = added(None)


@attrs.frozen(kw_only=True)
class Ask:
    """A turn of chat: the whole conversation, and how it is to be answered (001, 004).

    Attributes:
        messages: the whole conversation: at least one message, the last of them the user's.
        streaming: the answer comes as it is made; else at once.
        config: how it is generated.
        speech: whether the answer is spoken, and how; without, it is only text.
        max_slice_nums: most slices a picture may be cut into, 1-9; the model's own otherwise.
        use_image_id: pictures are numbered where there are several.
        omni: sound and pictures of a message are joined without line breaks (004, omni_mode).
        thinking: the model may think aloud before it answers.
        tts_template: the model is asked for an answer that could be spoken, spoken or not; where
            sound comes or speech is asked for, it always is.
        record: false: it is not to be recorded, and what was of it is removed (004).
        input_id: the client's name for this turn, if it gave one.
        ignored: paths of fields that were ignored, for counting.
    """

    messages: tuple[ChatMessage, ...]
    streaming: bool = True
    config: ChatConfig = ChatConfig()
    speech: SpeechRequest | None = None
    max_slice_nums: int | None = None
    use_image_id: bool = True
    omni: bool = False
    thinking: bool = False
    tts_template: bool = added(False)
    record: bool = added(True)
    input_id: str | None = None
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class ChooseModel:
    """Choose the model that transcribes (003, session.update).

    Attributes:
        model: its name, of any length: who asks for one that is not served is told so.
        record: false: the session is not to be recorded, and what was of it is removed.
        ignored: paths of fields that were ignored, for counting.
    """

    model: str
    record: bool = added(True)
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class AppendSound:
    """Sound of an utterance, in pieces of any size (003, input_audio_buffer.append).

    Attributes:
        pcm16: signed 16-bit LE samples, 16 kHz mono; one at least.
        ignored: as in `ChooseModel`.
    """

    pcm16: bytes
    ignored: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Commit:
    """Begin to transcribe an utterance, or say that all of its sound is there (003).

    Attributes:
        final: no more sound of this utterance comes; what is appended next is the next one's.
        begins: its text is asked for: it may be transcribed.
        ignored: as in `ChooseModel`.
    """

    final: bool = False
    begins: bool = True
    ignored: tuple[str, ...] = ()


ClientMessage = (
    Init
    | Append
    | CloseRequest
    | See
    | Pause
    | Resume
    | Interrupt
    | Report
    | Ask
    | ChooseModel
    | AppendSound
    | Commit
)
