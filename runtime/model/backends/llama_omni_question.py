"""The two messages of a chat turn to a remote backend, and the requests that it does not support.

The fields are those of the protocol's schema (OpenBMB/MiniCPM-o-Demo,
docs/backend-protocol/schema.md, 4.2 and 4.4). A setting is sent or refused, never dropped: also
those that a llama.cpp-omni server (tools/server/ws_handler.cpp) reads and ignores.
"""

from __future__ import annotations

from typing import Final

from protocol.values.model import (
    ChatConfig,
    Content,
    Message,
    Picture,
    Sound,
    Text,
    ToolCall,
    ToolResult,
    Turn,
)
from protocol.wire.codec import dump_frame, encode_base64

from .base import BackendRefused
from .llama_omni_wire import TURN_BASED

QUESTION_BYTES_MAX: Final = 16 * 1024 * 1024
"""The default message limit of the server's WebSocket library."""
CHARACTER_BYTES_MAX: Final = 6
"""Of a character in JSON."""
PART_BYTES_MAX: Final = 128
"""Of a content or a message besides its text or data; a setting takes less."""
SETTINGS: Final = 8
SPEECH_MODES: Final = ("default", "audio_assistant")
"""The server puts one system message before its speech, which is that of these modes."""
_DEFAULT: Final = ChatConfig()


def refuse_what_it_lacks(turn: Turn) -> None:
    """Refuse a turn with a setting or content that the server would ignore (`BackendRefused`)."""
    config, speech = turn.config, turn.speech
    last = turn.messages[-1].content
    lacks = {
        "generation.repetition_penalty": config.repetition_penalty != _DEFAULT.repetition_penalty,
        "generation.min_new_tokens": config.min_new_tokens != _DEFAULT.min_new_tokens,
        "image.use_image_id: false": not turn.use_image_id,
        "enable_thinking": turn.thinking,
        "tools": turn.has_tools,
        "use_tts_template without tts": turn.tts_template and speech is None,
        f"tts.mode: {speech.mode}" if speech else "": speech and speech.mode not in SPEECH_MODES,
        "more than one picture in a question": _count(last, Picture) > 1,
        "more than one sound in a question": _count(last, Sound) > 1,
    }
    for name, is_asked in lacks.items():
        if is_asked:
            raise BackendRefused(f"{name}: this server's model cannot do that")
    size = _bytes_at_most(turn)
    if size > QUESTION_BYTES_MAX:
        text = f"a turn of {size} bytes: this server's model takes at most {QUESTION_BYTES_MAX}"
        raise BackendRefused(text)


def _count(contents: tuple[Content, ...], kind: type[Content]) -> int:
    return sum(isinstance(part, kind) for part in contents)


def _bytes_at_most(turn: Turn) -> int:
    """Upper bound of a turn's append, in bytes."""
    voice = b"" if turn.speech is None else turn.speech.voice_pcm
    size = SETTINGS * PART_BYTES_MAX + _base64_bytes(voice)
    for message in turn.messages:
        size += PART_BYTES_MAX
        for part in message.content:
            size += PART_BYTES_MAX
            match part:
                case Text(text=text) | ToolCall(arguments=text) | ToolResult(output=text):
                    size += CHARACTER_BYTES_MAX * len(text)
                case Picture(jpeg=data) | Sound(pcm=data):
                    size += _base64_bytes(data)
    return size


def _base64_bytes(data: bytes) -> int:
    return -(-len(data) // 3) * 4


def chat_init_message(turn: Turn) -> str:
    """Encode the `session.init` of a turn: sampling and voice."""
    config = turn.config
    payload: dict[str, object] = {"mode": TURN_BASED, "use_tts": turn.speech is not None}
    if turn.speech is not None and turn.speech.voice_pcm:
        payload["voice"] = {"tts_ref_audio": encode_base64(turn.speech.voice_pcm)}
    sampling = {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    return dump_frame({"type": "session.init", "payload": payload | {"config": sampling}})


def question_message(turn: Turn) -> str:
    """Encode the `input.append` of a turn; servers differ in where they look for the voice."""
    config, speech = turn.config, turn.speech
    voice = encode_base64(speech.voice_pcm) if speech is not None and speech.voice_pcm else None
    body: dict[str, object] = {
        "messages": [_message_fields(message) for message in turn.messages],
        "streaming": True,
        "generation": {
            "max_new_tokens": config.max_new_tokens,
            "length_penalty": config.length_penalty,
        },
        "image": {"max_slice_nums": turn.max_slice_nums},
        "tts": {"enabled": speech is not None, **({"ref_audio_data": voice} if voice else {})},
        "omni_mode": turn.omni,
    }
    return dump_frame({"type": "input.append", "input": body})


def _message_fields(message: Message) -> dict[str, object]:
    return {"role": message.role, "content": [_part_fields(part) for part in message.content]}


def _part_fields(part: Content) -> dict[str, str]:
    match part:
        case Text(text=text):
            return {"type": "text", "text": text}
        case Picture(jpeg=jpeg):
            return {"type": "image", "data": encode_base64(jpeg)}
        case Sound(pcm=pcm):
            return {"type": "audio", "data": encode_base64(pcm)}
        case ToolCall() | ToolResult():
            raise BackendRefused("tools: this server's model cannot do that")
