"""A turn of chat as clients ask for it: messages and settings (004; 001 has the same in `$.input`).

- Every setting is honoured or refused; a key that is not listed is refused in `generation`, `tts`
  and `image`, so that nobody believes a setting to be in force that is not. An extra field
  elsewhere is ignored and counted.
- What only the source's own request schema has is honoured where the model can, and else refused
  with the reason; its default may always be said (`SOURCE_FIELDS`).
- The conversation begins with at most one system message and ends with the user's.
- Bounds hold for the whole conversation: text, images with their pixels, seconds of sound and
  videos are counted over all messages.
- Without `tts`, a turn is spoken in 004, whose default that is, and not in 001.

Files are checked by their headers alone; nothing is decoded here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import attrs

from ..behaviour import SOURCE_FIELDS, WEBP
from ..codec import Fields, Value, encode_base64, invalid
from ..limits import (
    AUDIO_SUM_S_MAX,
    CHAT_TEXT_CHARS_MAX,
    CONTENTS_MAX,
    IMAGE_PIXELS_SUM_MAX,
    IMAGES_MAX,
    MESSAGES_MAX,
    STACK_FRAMES_MAX,
    VIDEOS_MAX,
)
from ..media import audio_s, check_image, check_video, read_audio
from ..model import INPUT_RATE_HZ
from ..requests import (
    Ask,
    AudioPart,
    ChatMessage,
    ImagePart,
    Part,
    SpeechRequest,
    TextPart,
    VideoPart,
    Voice,
)
from ..turn import ChatConfig, Language, Role, SpeechMode
from ..wav import WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN
from .base import Context
from .inputs import any_voice_fields, fixed, integer_of, number_of, read_any_voice, read_slices

ROLES: Final[tuple[Role, ...]] = ("system", "user", "assistant")
SPEECH_MODES: Final[tuple[SpeechMode, ...]] = (
    "default",
    "audio_assistant",
    "omni",
    "audio_roleplay",
    "voice_cloning",
)
LANGUAGES: Final[tuple[Language, ...]] = ("en", "zh")
_VOICE: Final = ("ref_audio_data", "ref_audio_path")
VOICE_MS_MIN: Final = 1000
"""As in the source's schema: of a shorter voice a model hears nothing."""
VOICE_MS_MAX: Final = 600_000
"""Far above the 30 s that reference audio may last, so that any limit a client means is taken."""
_INPUT_LENGTH: Final = fixed(
    integer_of(8192, 8192), "a conversation is never cut, and refused where it does not fit"
)
_OUTPUT_PATH: Final = fixed(
    lambda value: value.text(0), "no path is taken from a client, the sound is sent"
)
_NOT_SAMPLING: Final = "the sampling of speech is not a setting"
_SPEECH_SAMPLING: Final = {
    "top_p": 0.85,
    "min_p": 0.01,
    "top_k": 25,
    "repetition_penalty": 1.05,
    "temperature": 0.8,
    "win_size": 16,
    "tau_r": 0.1,
}
"""The source's defaults, with which the model is served."""


def read_ask(fields: Fields, context: Context, *, speaks: bool) -> Ask:
    """Read a turn.

    Args:
        fields: the object that holds it.
        context: the session's behaviour.
        speaks: whether it is spoken where there is no `tts`.

    Returns:
        The turn, without an `input_id` and without what was ignored.

    Raises:
        FieldError: naming the field that is wrong.
    """
    slices, use_image_id = _read_image(fields.optional_child("image"))
    return Ask(
        messages=_read_messages(fields, context),
        streaming=fields.optional("streaming", Value.flag, True),
        config=_read_generation(fields.optional_child("generation"), context),
        speech=_read_speech(fields.optional_child("tts"), context, speaks=speaks),
        max_slice_nums=slices,
        use_image_id=use_image_id,
        omni=fields.optional("omni_mode", Value.flag, False),
        thinking=fields.optional("enable_thinking", Value.flag, False),
        tts_template=context.behaves(SOURCE_FIELDS)
        and fields.optional("use_tts_template", Value.flag, False),
    )


def ask_fields(ask: Ask) -> dict[str, object]:
    """Write a turn as the fields of the object that holds it; settings that are not the default."""
    fields: dict[str, object] = {
        "messages": [_message_fields(message) for message in ask.messages],
        "streaming": ask.streaming,
    }
    if generation := _generation_fields(ask.config):
        fields["generation"] = generation
    fields["tts"] = _speech_fields(ask.speech)
    if ask.max_slice_nums is not None or not ask.use_image_id:
        fields["image"] = {
            "max_slice_nums": ask.max_slice_nums,
            "use_image_id": ask.use_image_id,
        }
    switches = {
        "omni_mode": ask.omni,
        "enable_thinking": ask.thinking,
        "use_tts_template": ask.tts_template,
    }
    return fields | {name: True for name, is_on in switches.items() if is_on}


# -- messages -----------------------------------------------------------------------------------


def _read_messages(fields: Fields, context: Context) -> tuple[ChatMessage, ...]:
    messages = tuple(
        _read_message(message, context) for message in fields.children("messages", MESSAGES_MAX, 1)
    )
    _check_order(f"{fields.path}.messages", messages)
    _check_sums(f"{fields.path}.messages", messages)
    return messages


def _read_message(fields: Fields, context: Context) -> ChatMessage:
    read_parts = partial(_read_parts, context=context)
    return ChatMessage(
        role=fields.required("role", lambda value: value.choice(ROLES)),
        content=fields.either("content", _read_string, read_parts, CONTENTS_MAX),
    )


def _check_order(path: str, messages: tuple[ChatMessage, ...]) -> None:
    for index, message in enumerate(messages):
        if message.role == "system" and index > 0:
            raise invalid(f"{path}[{index}].role", "system, allowed is that in the first message")
    last = len(messages) - 1
    if messages[last].role != "user":
        raise invalid(
            f"{path}[{last}].role", f"{messages[last].role}, the last message is a user's"
        )


def _check_sums(path: str, messages: tuple[ChatMessage, ...]) -> None:
    parts = [part for message in messages for part in message.content]
    chars = sum(len(part.text) for part in parts if isinstance(part, TextPart))
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


def _message_fields(message: ChatMessage) -> dict[str, object]:
    match message.content:
        case (TextPart(text=text),):
            return {"role": message.role, "content": text}
    return {"role": message.role, "content": [_part_fields(part) for part in message.content]}


# -- contents -----------------------------------------------------------------------------------


def _read_string(value: Value) -> tuple[Part, ...]:
    return (TextPart(text=value.text(CHAT_TEXT_CHARS_MAX)),)


def _read_parts(parts: tuple[Fields, ...], context: Context) -> tuple[Part, ...]:
    readers: Mapping[str, Callable[[Fields], Part]] = {
        "text": _read_text,
        "image": partial(_read_picture, context=context),
        "audio": _read_sound,
        "video": _read_video,
    }
    return tuple(part.variant("type", readers) for part in parts)


def _read_text(fields: Fields) -> Part:
    return TextPart(text=fields.required("text", lambda value: value.text(CHAT_TEXT_CHARS_MAX)))


def _read_picture(fields: Fields, context: Context) -> Part:
    read = partial(_read_image_file, webp=context.behaves(WEBP))
    return ImagePart(data=fields.required("data", read))


def _read_sound(fields: Fields) -> Part:
    rate_hz = fields.optional(
        "sample_rate", integer_of(WAV_RATE_HZ_MIN, WAV_RATE_HZ_MAX), INPUT_RATE_HZ
    )

    def read(value: Value) -> AudioPart:
        return read_audio(value.path, value.binary(), rate_hz)

    return fields.required("data", read)


def _read_video(fields: Fields) -> Part:
    return VideoPart(
        data=fields.required("data", _read_video_file),
        stack_frames=fields.optional("stack_frames", integer_of(1, STACK_FRAMES_MAX), 1),
    )


def _read_image_file(value: Value, *, webp: bool) -> bytes:
    data = value.binary()
    check_image(value.path, data, webp=webp)
    return data


def _read_video_file(value: Value) -> bytes:
    data = value.binary()
    check_video(value.path, data)
    return data


def _part_fields(part: Part) -> dict[str, object]:
    match part:
        case TextPart(text=text):
            return {"type": "text", "text": text}
        case ImagePart(data=data):
            return {"type": "image", "data": encode_base64(data)}
        case AudioPart(data=data, is_wav=is_wav, rate_hz=rate_hz):
            is_said = is_wav or rate_hz == INPUT_RATE_HZ
            rate = {} if is_said else {"sample_rate": rate_hz}
            return {"type": "audio", "data": encode_base64(data), **rate}
        case VideoPart(data=data, stack_frames=count):
            stack = {} if count == 1 else {"stack_frames": count}
            return {"type": "video", "data": encode_base64(data), **stack}


# -- settings -----------------------------------------------------------------------------------


def _read_generation(fields: Fields | None, context: Context) -> ChatConfig:
    default = ChatConfig()
    if fields is None:
        return default
    read = fields.optional
    config = ChatConfig(
        max_new_tokens=read("max_new_tokens", integer_of(1, 8192), default.max_new_tokens),
        temperature=read("temperature", number_of(0, 2), default.temperature),
        top_p=read("top_p", lambda value: value.number(0, 1, "above "), default.top_p),
        top_k=read("top_k", integer_of(1, 1000), default.top_k),
        repetition_penalty=read("repetition_penalty", number_of(1, 2), default.repetition_penalty),
        length_penalty=read("length_penalty", number_of(0.1, 10), default.length_penalty),
    )
    if context.behaves(SOURCE_FIELDS):
        config = _read_source_generation(fields, config)
    fields.refuse_unknown()
    return config


def _read_source_generation(fields: Fields, config: ChatConfig) -> ChatConfig:
    """Read the settings that only the source's own schema has; greedy is a temperature of 0."""
    fields.optional("max_inp_length", _INPUT_LENGTH, None)
    samples = fields.optional("do_sample", Value.flag, True)
    return attrs.evolve(
        config,
        temperature=config.temperature if samples else 0.0,
        min_new_tokens=fields.optional("min_new_tokens", integer_of(0, 8192), 0),
    )


def _generation_fields(config: ChatConfig) -> Mapping[str, object]:
    default = attrs.asdict(ChatConfig())
    return {name: value for name, value in attrs.asdict(config).items() if value != default[name]}


def _read_speech(fields: Fields | None, context: Context, *, speaks: bool) -> SpeechRequest | None:
    default = SpeechRequest()
    if fields is None:
        return default if speaks else None
    is_enabled = fields.optional("enabled", Value.flag, True)
    mode = fields.optional("mode", lambda value: value.choice(SPEECH_MODES), default.mode)
    language = fields.optional("language", lambda value: value.choice(LANGUAGES), default.language)
    voice = read_any_voice(fields, *_VOICE)
    ms_max = _read_source_speech(fields) if context.behaves(SOURCE_FIELDS) else None
    fields.refuse_unknown()
    if not is_enabled:
        return None
    _check_voice(fields.path, mode, voice)
    return SpeechRequest(mode=mode, language=language, voice=voice, voice_ms_max=ms_max)


def _read_source_speech(fields: Fields) -> int | None:
    """Read the settings that only the source's own schema has; give how much of the voice is used.

    Returns:
        Milliseconds; None for all of it.
    """
    fields.optional("output_path", _OUTPUT_PATH, None)
    sampling = fields.optional_child("sampling")
    if sampling is not None:
        for name, default in _SPEECH_SAMPLING.items():
            sampling.optional(name, fixed(number_of(default, default), _NOT_SAMPLING), None)
        sampling.refuse_unknown()
    return fields.optional("ref_audio_max_ms", integer_of(VOICE_MS_MIN, VOICE_MS_MAX), None)


def _check_voice(path: str, mode: SpeechMode, voice: Voice | None) -> None:
    if mode == "voice_cloning" and voice is None:
        raise invalid(f"{path}.mode", f"voice_cloning, which needs {' or '.join(_VOICE)}")


def _speech_fields(speech: SpeechRequest | None) -> dict[str, object]:
    if speech is None:
        return {"enabled": False}
    voice = any_voice_fields(speech.voice, *_VOICE)
    is_cut = speech.voice_ms_max is not None
    length = {"ref_audio_max_ms": speech.voice_ms_max} if is_cut else {}
    return {"enabled": True, "mode": speech.mode, "language": speech.language, **voice, **length}


def _read_image(fields: Fields | None) -> tuple[int | None, bool]:
    if fields is None:
        return None, True
    slices = fields.optional("max_slice_nums", read_slices, None)
    use_image_id = fields.optional("use_image_id", Value.flag, True)
    fields.refuse_unknown()
    return slices, use_image_id
