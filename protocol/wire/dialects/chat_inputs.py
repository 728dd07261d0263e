"""A turn of chat as clients ask for it: messages and settings (004; 001 has the same in `$.input`).

- Every setting is honoured or refused; in `generation`, `tts` and `image` an unknown key is
  refused, so that an ineffective setting is noticed. Elsewhere it is ignored and counted.
- Settings that only the source's request schema has are honoured if the model can, and else refused
  with the reason; the default is always accepted.
- The conversation begins with at most one system message and ends with the user's, or with results
  of tools (`chat_tools`).
- Bounds hold for the whole conversation: text, images with their pixels, seconds of sound, videos.
- Without `tts`, a turn is spoken in 004, whose default that is, and not in 001.

Only the headers of files are checked; nothing is decoded here.
"""

from __future__ import annotations

import math
from typing import Final

from ...values.limits import (
    AUDIO_SUM_S_MAX,
    CHAT_TEXT_CHARS_MAX,
    CONTENTS_MAX,
    IMAGE_PIXELS_SUM_MAX,
    IMAGES_MAX,
    MESSAGES_MAX,
    STACK_FRAMES_MAX,
    VIDEOS_MAX,
)
from ...values.model import INPUT_RATE_HZ
from ...values.requests import (
    AudioPart,
    ChatMessage,
    ImagePart,
    Part,
    SpeechRequest,
    TextPart,
    VideoPart,
    Voice,
)
from ...values.turn import ChatConfig, Language, SpeechMode
from ..codec import Value, encode_base64, invalid
from ..field import DROPPED, Field
from ..kinds import (
    FLAG,
    FLOAT32,
    IMAGE,
    SAID,
    VIDEO,
    VOICE_BY_NAME,
    VOICE_OR_NAME,
    Holds,
    Kind,
    base64_of,
    because,
    choice,
    integer,
    number,
    text,
)
from ..media import audio_s, check_image, read_audio
from ..nested import either, items, variants
from ..reading import Reading
from ..table import Object, Row, Rule, Table
from ..wav import WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN
from .chat_tools import TOOL_ROWS, chars_of, check_answered, messages_of
from .inputs import SLICES, one_value, setting

SPEECH_MODES: Final[tuple[SpeechMode, ...]] = (
    "default",
    "audio_assistant",
    "omni",
    "audio_roleplay",
    "voice_cloning",
)
LANGUAGES: Final[tuple[Language, ...]] = ("en", "zh")
VOICE_MS_MIN: Final = 1000
"""As in the source's schema: a model hears nothing of a shorter voice."""
VOICE_MS_MAX: Final = 600_000
"""Far above the 30 s of reference audio, so that any limit a client means is accepted."""

# -- contents -----------------------------------------------------------------------------------


def _read_sound(value: Value, at: Reading) -> AudioPart:
    return read_audio(value.path, value.binary(), at.values["rate_hz"])


_WORDS: Final = text(CHAT_TEXT_CHARS_MAX, holds=SAID)
_TEXT: Final = Table(TextPart, Field("text", _WORDS), tag={"type": "text"})
_IMAGE: Final = Table(ImagePart, Field("data", IMAGE), tag={"type": "image"})
_SOUND: Final = Table(
    AudioPart,
    Field(
        "sample_rate",
        integer(WAV_RATE_HZ_MIN, WAV_RATE_HZ_MAX),
        INPUT_RATE_HZ,
        attr="rate_hz",
        get=lambda part: INPUT_RATE_HZ if part.is_wav else part.rate_hz,
        omit=True,
        rank=1,
    ),
    Field(
        "data",
        Kind(
            read=_read_sound,
            write=encode_base64,
            schema=base64_of(FLOAT32, "audio/wav"),
            holds=Holds("audio", "sound"),
        ),
    ),
    tag={"type": "audio"},
    make=lambda values: values["data"],
)
_VIDEO: Final = Table(
    VideoPart,
    Field("data", VIDEO),
    Field("stack_frames", integer(1, STACK_FRAMES_MAX), 1, omit=True),
    tag={"type": "video"},
)
_PARTS: Final = items(variants("type", _TEXT, _IMAGE, _SOUND, _VIDEO), CONTENTS_MAX, 1)


def _one_text(value: Value, at: Reading) -> tuple[Part, ...]:
    return (TextPart(text=_WORDS.read(value, at)),)


def _write_content(content: tuple[Part, ...]) -> object:
    match content:
        case (TextPart(text=words),):
            return words
    return [_PARTS.item.write(part) for part in content if _PARTS.item.write]


_CONTENT: Final = either(
    Kind(read=_one_text, schema={**_WORDS.schema, "examples": ["Hello"]}), _PARTS, _write_content
)
_MESSAGE: Final = messages_of(_CONTENT, _WORDS)


def _check_conversation(at: Reading) -> None:
    path, messages = f"{at.path}.messages", at.values["messages"]
    _check_order(path, messages)
    check_answered(path, messages)
    _check_sums(path, messages, chars_of(at.values.get("tools", ()), messages))


def _check_order(path: str, messages: tuple[ChatMessage, ...]) -> None:
    for index, message in enumerate(messages):
        if message.role == "system" and index > 0:
            raise invalid(f"{path}[{index}].role", "system, allowed is that in the first message")
    last = len(messages) - 1
    if messages[last].role not in ("user", "tool"):
        found = f"{messages[last].role}, the last message is a user's or a tool's"
        raise invalid(f"{path}[{last}].role", found)


def _check_sums(path: str, messages: tuple[ChatMessage, ...], of_tools: int) -> None:
    parts = [part for message in messages for part in message.content]
    chars = of_tools + sum(len(part.text) for part in parts if isinstance(part, TextPart))
    images = [part.data for part in parts if isinstance(part, ImagePart)]
    sounds = [part for part in parts if isinstance(part, AudioPart)]
    videos = sum(isinstance(part, VideoPart) for part in parts)
    _check_sum(path, chars, CHAT_TEXT_CHARS_MAX, "characters of text")
    _check_sum(path, len(images), IMAGES_MAX, "images")
    _check_sum(path, videos, VIDEOS_MAX, "videos")
    # Only a bounded number of headers is read once more.
    pixels = sum(math.prod(check_image(path, image)) for image in images)
    _check_sum(path, pixels, IMAGE_PIXELS_SUM_MAX, "pixels of images")
    _check_sum(path, math.ceil(sum(map(audio_s, sounds))), AUDIO_SUM_S_MAX, "seconds of sound")


def _check_sum(path: str, count: int, count_max: int, what: str) -> None:
    if count > count_max:
        raise invalid(path, f"{count} {what} in all, at most {count_max} are allowed")


# -- settings -----------------------------------------------------------------------------------

_DEFAULT: Final = ChatConfig()
_SPEECH: Final = SpeechRequest()
_NOT_SAMPLING: Final = "the sampling of speech is not a setting"
_SAMPLING: Final[tuple[Row, ...]] = (
    one_value("top_p", number(0.85, 0.85), _NOT_SAMPLING),
    one_value("min_p", number(0.01, 0.01), _NOT_SAMPLING),
    one_value("top_k", number(25, 25), _NOT_SAMPLING),
    one_value("repetition_penalty", number(1.05, 1.05), _NOT_SAMPLING),
    one_value("temperature", number(0.8, 0.8), _NOT_SAMPLING),
    one_value("win_size", number(16, 16), _NOT_SAMPLING),
    one_value("tau_r", number(0.1, 0.1), _NOT_SAMPLING),
)
"""The source's defaults, with which the model is served."""


def _greedy(at: Reading) -> None:
    if not at.values.pop("do_sample", True):
        at.values["config.temperature"] = 0.0


_GENERATION: Final[tuple[Row, ...]] = (
    setting("max_new_tokens", integer(1, 8192), _DEFAULT.max_new_tokens),
    setting("temperature", number(0, 2), _DEFAULT.temperature),
    setting("top_p", number(0, 1, "above "), _DEFAULT.top_p),
    setting("top_k", integer(1, 1000), _DEFAULT.top_k),
    setting("repetition_penalty", number(1, 2), _DEFAULT.repetition_penalty),
    setting("length_penalty", number(0.1, 10), _DEFAULT.length_penalty),
    one_value(
        "max_inp_length",
        integer(8192, 8192),
        "a conversation is never cut, and refused where it does not fit",
    ),
    Field(
        "do_sample",
        FLAG,
        True,
        attr="^do_sample",
        is_written=False,
        doc="False takes the most likely token, as a `temperature` of 0 does.",
    ),
    setting("min_new_tokens", integer(0, 8192), 0),
    Rule(_greedy),
)
_TTS: Final[tuple[Row, ...]] = (
    Field("enabled", FLAG, True, get=lambda _: True),
    Field("mode", choice(SPEECH_MODES), _SPEECH.mode),
    Field("language", choice(LANGUAGES), _SPEECH.language),
    Field("ref_audio_data", VOICE_OR_NAME, None, attr="voice", omit=True),
    Field("ref_audio_path", VOICE_BY_NAME, None, attr="voice", after="ref_audio_data", omit=True),
    Field(
        "output_path",
        because(text(0), "no path is taken from a client, the sound is sent"),
        None,
        attr=DROPPED,
        holds=SAID,
    ),
    Object("sampling", _SAMPLING, closed=True),
    Field(
        "ref_audio_max_ms",
        integer(VOICE_MS_MIN, VOICE_MS_MAX),
        None,
        attr="voice_ms_max",
        omit=True,
    ),
)


def _speech(at: Reading, *, speaks: bool) -> None:
    found = {key: at.values.pop(key) for key in [*at.values] if key.startswith("speech.")}
    given = {key.removeprefix("speech."): value for key, value in found.items()}
    is_enabled = given.pop("enabled")
    if at.body.get("tts") is None:
        at.values["speech"] = _SPEECH if speaks else None
        return
    if is_enabled:
        _check_voice(f"{at.path}.tts", given["mode"], given["voice"])
    at.values["speech"] = SpeechRequest(**given) if is_enabled else None


def _check_voice(path: str, mode: SpeechMode, voice: Voice | None) -> None:
    if mode == "voice_cloning" and voice is None:
        needed = "ref_audio_data or ref_audio_path"
        raise invalid(f"{path}.mode", f"voice_cloning, which needs {needed}")


def ask_rows(*, speaks: bool) -> tuple[Row, ...]:
    """Make the rows of a turn; `speaks`: it is spoken by default, without `tts`."""
    return (
        Object(
            "image",
            (
                Field("max_slice_nums", SLICES, None),
                Field("use_image_id", FLAG, True),
            ),
            closed=True,
            when=lambda ask: ask.max_slice_nums is not None or not ask.use_image_id,
            rank=1,
        ),
        Field("messages", items(_MESSAGE, MESSAGES_MAX, 1)),
        *TOOL_ROWS,
        Rule(_check_conversation),
        Field("streaming", FLAG, True),
        Object("generation", _GENERATION, attr="config", closed=True, omit=True),
        Object("tts", _TTS, attr="speech", closed=True, none={"enabled": False}),
        Rule(lambda at: _speech(at, speaks=speaks)),
        Field("omni_mode", FLAG, False, attr="omni", omit=True, rank=2),
        Field("enable_thinking", FLAG, False, attr="thinking", omit=True, rank=2),
        Field(
            "use_tts_template",
            FLAG,
            False,
            attr="tts_template",
            omit=True,
            rank=2,
        ),
    )
