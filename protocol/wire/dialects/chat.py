"""Tools, and turns of chat, as the clients of several dialects send them; not a dialect itself.

- *Tools*, of chat and of duplex sessions, have the form of OpenAI's chat completions. They are
  shown to the model, and nothing is run. A schema is bounded and otherwise not read. Objects that
  describe a tool or a call are closed, so that a setting without effect is noticed.
- *A turn* is `ask_rows`: its messages and settings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs
import orjson

from ...values import limits, model
from ...values import requests as rq
from ...values.behaviour import ASKED_SPEECH, DUPLEX_TOOLS, SOUND_FILES
from ...values.errors import invalid
from ...values.frames import Nested, nested_in
from ...values.messages import ToolCalled
from .. import codec as c
from ..dialects import shared
from ..media import WAV_RATE_HZ_MAX, WAV_RATE_HZ_MIN, audio_s, check_image, read_audio
from ..table import (
    Field,
    Object,
    Row,
    Rule,
    Table,
    Variants,
    checked,
    items,
    one,
    optional,
    text_or_array,
    typed,
    variants,
)
from .shared import SLICES, one_value, setting

TOOL_NAMED: Final = c.UserContent("name", "name", model.TOOL_NAME)
_NAME_RULE: Final = "a name of a tool has 1 to 64 letters, digits, _ and -"


def _name(value: c.Value, _: c.ParseState) -> str:
    name = value.text()
    if not model.TOOL_NAME.fullmatch(name):
        raise invalid(value.path, f"{len(name)} characters that are no name: {_NAME_RULE}")
    return name


NAME: Final = c.FieldType(
    read=_name,
    schema={"type": "string", "pattern": f"^{model.TOOL_NAME.pattern}$", "examples": ["clock"]},
    holds=TOOL_NAMED,
)
CALL_ID: Final = c.text(limits.CALL_ID_CHARS_MAX, 1, holds=c.NAMED)


def _schema(value: c.Value, _: c.ParseState) -> str:
    """Read a JSON Schema as text, bounded in depth and length."""
    found = c.as_object(value.value, value.path)
    level: list[Nested] = [dict(found)]
    for _level in range(limits.TOOL_DEPTH_MAX):
        level = nested_in(level)
    if level:
        raise invalid(value.path, f"more than {limits.TOOL_DEPTH_MAX} levels")
    text = orjson.dumps(found).decode()
    if len(text) > limits.TOOL_CHARS_MAX:
        raise invalid(
            value.path,
            f"{len(text)} characters of JSON, at most {limits.TOOL_CHARS_MAX} are allowed",
        )
    return text


SCHEMA: Final = c.FieldType(
    read=_schema,
    write=lambda schema: orjson.loads(schema) if schema else None,
    schema={"type": "object", "properties": {}},
)


def _not_strict(value: c.Value, _: c.ParseState) -> None:
    if value.flag():
        raise invalid(value.path, "true, but the model's tokens are not constrained to a schema")


DESCRIPTION: Final = Field(
    "description", c.text(limits.TOOL_CHARS_MAX, holds=c.PROMPTED), "", omit=True
)
_TOOL: Final = typed(
    model.Tool,
    "function",
    Object(
        "function",
        Field("name", NAME),
        DESCRIPTION,
        Field("parameters", SCHEMA, "", omit=True, example={"type": "object"}),
        checked(
            "strict", c.FieldType(read=_not_strict, schema={"type": "boolean", "const": False})
        ),
        "Only false: the model's tokens are not constrained to a schema.",
        is_required=True,
        closed=True,
    ),
    closed=True,
)
CALL: Final = typed(
    model.ToolCall,
    "function",
    Field("id", CALL_ID, example="call_0c9e41d7a355"),
    Object(
        "function",
        Field("name", NAME),
        Field("arguments", c.text(limits.TOOL_CHARS_MAX, holds=c.USER_TEXT), example="{}"),
        is_required=True,
        closed=True,
    ),
    closed=True,
)
CALLS: Final = items(variants("type", CALL), model.CALLS_MAX)
"""Calls in a client's message."""
MADE_CALLS: Final = items(one(CALL), model.CALLS_MAX)
"""Calls in an answer of the server."""
_CHOICE: Final = c.because(
    c.choice(("auto", "none")), "the model cannot be made to call a tool, or one of them"
)
TOOL_ROWS: Final = (
    Field("tools", items(variants("type", _TOOL), limits.TOOLS_MAX), (), omit=True, rank=3),
    Field("tool_choice", _CHOICE, "auto", omit=True, rank=3),
)
"""The tools of a turn."""
DUPLEX_TOOLS_ROW: Final = attrs.evolve(
    TOOL_ROWS[0],
    since=DUPLEX_TOOLS,
    rank=10,
    doc="What the model may call while the conversation goes on: functions that the client runs.",
)
"""The tools of a duplex session."""
TOOL_RESULT: Final = typed(
    model.ToolResult,
    shared.TOOL_RESULT,
    Field(
        "tool_call_id",
        c.text(limits.CALL_ID_CHARS_MAX, 1),
        attr="call_id",
        example="call_0c9e41d7a355",
    ),
    "The call's id.",
    Field(
        "content",
        c.text(limits.INPUT_CHARS_MAX, holds=c.USER_TEXT),
        attr="output",
        example="half past nine",
    ),
    "Its result, as text.",
    doc="What a tool returned. The model is told with the next second of sound.",
)
STANDALONE: Final = typed(
    rq.TellModel,
    shared.STANDALONE,
    Field("content", c.text(limits.INPUT_CHARS_MAX, 1, holds=c.USER_TEXT), attr="text"),
    "What happened.",
    doc="An event that answers no call. The model is told with the next second of sound.",
)
TOOL_CALL: Final = typed(
    ToolCalled,
    "response.tool_call.done",
    Field("session_id", c.TEXT),
    Field("tool_call_id", c.TEXT, attr="call.id", doc="Names the call, for its result."),
    Field("unit_index", c.INTEGER, attr="unit"),
    Object(
        "call",
        Field("name", c.TEXT, attr="name", doc="Of the tool."),
        Field("arguments", c.TEXT, attr="arguments", example="{}"),
        attr="call",
        is_required=True,
    ),
)
TOOLS_STATE: Final = Field(
    "tools",
    c.choice(("called", "not_called")),
    "",
    omit=True,
    doc="Whether the model calls the client's tools; absent without tools.",
)
"""What duplex sessions have of tools: what clients send, and what they get."""
DUPLEX_REQUESTS: Final[Mapping[rq.Request, Table]] = {
    rq.Request.TOOL_RESULT: TOOL_RESULT,
    rq.Request.STANDALONE: STANDALONE,
}
COMMON_REQUESTS: Final[Mapping[rq.Request, Table]] = {
    rq.Request.CLOSE: shared.CLOSE,
    rq.Request.PLAYED: shared.PLAYED,
    **DUPLEX_REQUESTS,
}
"""Those that `realtime` and `duplex-v1` have alike."""


def calls_of(message: rq.ChatMessage) -> tuple[model.ToolCall, ...]:
    """The calls of a message of the assistant."""
    return tuple(part for part in message.content if isinstance(part, model.ToolCall))


def results_of(message: rq.ChatMessage) -> tuple[model.ToolResult, ...]:
    """The result in a tool's message, if it is one."""
    return tuple(part for part in message.content if isinstance(part, model.ToolResult))


def messages_of(content: c.FieldType, words: c.FieldType) -> Variants:
    """Make the kind of a message by its role; `content` is that of words and media."""
    parts = "Text, or parts of several kinds."
    row = Field("content", content, holds=c.USER_TEXT, doc=parts)
    answer = Field(
        "content", content, (), get=_without_calls, omit=True, holds=c.USER_TEXT, doc=parts
    )
    called = Field("tool_calls", CALLS, (), get=calls_of, omit=True, doc=_CALLED)
    answered = Field(
        "tool_call_id",
        CALL_ID,
        get=lambda message: results_of(message)[0].call_id,
        doc="The call that it answers.",
    )
    output = Field(
        "content",
        words,
        get=lambda message: results_of(message)[0].output,
        doc="Its result, for the model.",
    )
    return variants(
        "role",
        _of_role("user", "A user's message.", row),
        _of_role("system", "How the model is to answer; only the first message.", row),
        _of_role("assistant", "An earlier answer.", answer, called),
        _of_role("tool", "What a tool returned.", answered, output),
        write=lambda message: message.role,
    )


_CALLED: Final = "Calls of tools in it; right behind it stands the result of each."


def _of_role(role: model.Role, doc: str, *rows: Row | str) -> Table:
    def make(values: dict[str, Any]) -> rq.ChatMessage:
        content = values["content"]
        if role == "tool":
            content = (model.ToolResult(call_id=values["tool_call_id"], output=content),)
        return rq.ChatMessage(role=role, content=(*content, *values.get("tool_calls", ())))

    return Table(rq.ChatMessage, *rows, tag={"role": role}, make=make, doc=doc)


def _without_calls(message: rq.ChatMessage) -> tuple[rq.Part, ...]:
    return tuple(part for part in message.content if not isinstance(part, model.ToolCall))


def check_answered(path: str, messages: tuple[rq.ChatMessage, ...]) -> None:
    """Check that each call has its result right behind it, and each result its call.

    `FieldError` names the message.
    """
    waiting: set[str] = set()
    for index, message in enumerate(messages):
        results, here = results_of(message), f"{path}[{index}]"
        if waiting and not results:
            raise invalid(f"{here}.role", f"{message.role}, but calls before it have no result")
        for result in results:
            if result.call_id not in waiting:
                raise invalid(f"{here}.tool_call_id", "no call right before it, or answered twice")
            waiting.remove(result.call_id)
        calls = calls_of(message)
        waiting |= {call.id for call in calls}
        if len(waiting) < len(calls):
            raise invalid(f"{here}.tool_calls", "two calls of one id")
    if waiting:
        last = len(messages) - 1
        raise invalid(f"{path}[{last}].role", f"{messages[last].role}, but calls have no result")


def chars_of(tools: tuple[model.Tool, ...], messages: tuple[rq.ChatMessage, ...]) -> int:
    """Characters of tools, of their calls and of their results."""
    calls = (len(call.arguments) for message in messages for call in calls_of(message))
    results = (len(result.output) for message in messages for result in results_of(message))
    offered = (len(tool.description) + len(tool.parameters) for tool in tools)
    return sum(offered) + sum(calls) + sum(results)


# -- a turn of chat as clients ask for it: messages and settings of 004, and of 001 in `$.input` --
#
# - Every setting is honoured or refused; in `generation`, `tts` and `image` an unknown key is
#   refused, so that an ineffective setting is noticed. Elsewhere it is ignored and counted.
# - Settings that only the source's request schema has are honoured if the model can, and else
#   refused with the reason; the default is always accepted.
# - The conversation begins with at most one system message and ends with the user's, or with
#   results of tools.
# - Bounds hold for the whole conversation: text, images with their pixels, seconds of sound,
#   videos.
# - A turn is spoken if its `tts` asks for it: in 001 by being there, in 004 by `enabled`, which is
#   false by default in the source's server, though true in 004.
#
# Only the headers of files are checked; nothing is decoded here.

SPEECH_MODES: Final[tuple[model.SpeechMode, ...]] = (
    "default",
    "audio_assistant",
    "omni",
    "audio_roleplay",
    "voice_cloning",
)
LANGUAGES: Final[tuple[model.Language, ...]] = ("en", "zh")
VOICE_MS_MIN: Final = 1000
"""As in the source's schema: a model hears nothing of a shorter voice."""
VOICE_MS_MAX: Final = 600_000
"""Far above the 30 s of reference audio, so that any limit a client means is accepted."""

# -- contents -----------------------------------------------------------------------------------


def _read_sound(value: c.Value, at: c.ParseState) -> rq.AudioPart:
    is_any = at.context.behaves(SOUND_FILES)
    return read_audio(value.path, c.binary(value, at), at.values["rate_hz"], is_any=is_any)


_WORDS: Final = c.text(limits.CHAT_TEXT_CHARS_MAX, holds=c.USER_TEXT)
_TEXT: Final = typed(rq.TextPart, "text", Field("text", _WORDS))
_IMAGE: Final = typed(rq.ImagePart, "image", Field("data", c.IMAGE))
_SOUND: Final = typed(
    rq.AudioPart,
    "audio",
    Field(
        "sample_rate",
        c.integer(WAV_RATE_HZ_MIN, WAV_RATE_HZ_MAX),
        model.INPUT_RATE_HZ,
        attr="rate_hz",
        get=lambda part: model.INPUT_RATE_HZ if part.is_file else part.rate_hz,
        omit=True,
        rank=1,
    ),
    Field(
        "data",
        c.FieldType(
            read=_read_sound,
            write=c.encode_base64,
            schema=c.base64_of(c.FLOAT32, "audio/wav"),
            holds=c.UserContent("audio", "sound"),
        ),
    ),
    make=lambda values: values["data"],
)
_VIDEO: Final = typed(
    rq.VideoPart,
    "video",
    Field("data", c.VIDEO),
    Field("stack_frames", c.integer(1, limits.STACK_FRAMES_MAX), 1, omit=True),
)
_PARTS: Final = items(variants("type", _TEXT, _IMAGE, _SOUND, _VIDEO), limits.CONTENTS_MAX, 1)


def _one_text(value: c.Value, at: c.ParseState) -> tuple[rq.Part, ...]:
    return (rq.TextPart(text=_WORDS.read(value, at)),)


def _write_content(content: tuple[rq.Part, ...]) -> object:
    match content:
        case (rq.TextPart(text=words),):
            return words
    return [_PARTS.item.write(part) for part in content if _PARTS.item.write]


_CONTENT: Final = text_or_array(
    c.FieldType(read=_one_text, schema={**_WORDS.schema, "examples": ["Hello"]}),
    _PARTS,
    _write_content,
)
_MESSAGE: Final = messages_of(_CONTENT, _WORDS)


def _check_conversation(at: c.ParseState) -> None:
    path, messages = f"{at.path}.messages", at.values["messages"]
    _check_order(path, messages)
    check_answered(path, messages)
    _check_sums(path, messages, chars_of(at.values.get("tools", ()), messages))


def _check_order(path: str, messages: tuple[rq.ChatMessage, ...]) -> None:
    for index, message in enumerate(messages):
        if message.role == "system" and index > 0:
            raise invalid(f"{path}[{index}].role", "system, allowed is that in the first message")
    last = len(messages) - 1
    if messages[last].role not in ("user", "tool"):
        found = f"{messages[last].role}, the last message is a user's or a tool's"
        raise invalid(f"{path}[{last}].role", found)


def _check_sums(path: str, messages: tuple[rq.ChatMessage, ...], of_tools: int) -> None:
    parts = [part for message in messages for part in message.content]
    chars = of_tools + sum(len(part.text) for part in parts if isinstance(part, rq.TextPart))
    images = [part.data for part in parts if isinstance(part, rq.ImagePart)]
    sounds = [part for part in parts if isinstance(part, rq.AudioPart)]
    videos = sum(isinstance(part, rq.VideoPart) for part in parts)
    _check_sum(path, chars, limits.CHAT_TEXT_CHARS_MAX, "characters of text")
    _check_sum(path, len(images), limits.IMAGES_MAX, "images")
    _check_sum(path, videos, limits.VIDEOS_MAX, "videos")
    # Only a bounded number of headers is read once more.
    pixels = sum(math.prod(check_image(path, image)) for image in images)
    _check_sum(path, pixels, limits.IMAGE_PIXELS_SUM_MAX, "pixels of images")
    seconds = [audio_s(sound) for sound in sounds]
    known = math.ceil(sum(each for each in seconds if each is not None))
    _check_sum(path, known, limits.AUDIO_SUM_S_MAX, "seconds of sound")
    _check_sum(path, seconds.count(None), limits.SOUND_FILES_MAX, "sound files that are no WAV")


def _check_sum(path: str, count: int, count_max: int, what: str) -> None:
    if count > count_max:
        raise invalid(path, f"{count} {what} in all, at most {count_max} are allowed")


# -- settings -----------------------------------------------------------------------------------

_DEFAULT: Final = model.ChatConfig()
_SPEECH: Final = rq.SpeechRequest()
_NOT_SAMPLING: Final = "the sampling of speech is not a setting"
_SAMPLING: Final[tuple[Row | str, ...]] = (
    one_value("top_p", c.number(0.85, 0.85), _NOT_SAMPLING),
    one_value("min_p", c.number(0.01, 0.01), _NOT_SAMPLING),
    one_value("top_k", c.number(25, 25), _NOT_SAMPLING),
    one_value("repetition_penalty", c.number(1.05, 1.05), _NOT_SAMPLING),
    one_value("temperature", c.number(0.8, 0.8), _NOT_SAMPLING),
    one_value("win_size", c.number(16, 16), _NOT_SAMPLING),
    one_value("tau_r", c.number(0.1, 0.1), _NOT_SAMPLING),
)
"""The source's defaults, with which the model is served."""


def _greedy(at: c.ParseState) -> None:
    if not at.values.pop("do_sample", True):
        at.values["config.temperature"] = 0.0


_GENERATION: Final[tuple[Row | str, ...]] = (
    setting("max_new_tokens", c.integer(1, 8192), _DEFAULT.max_new_tokens),
    setting("temperature", c.number(0, 2), _DEFAULT.temperature),
    setting("top_p", c.number(0, 1, "above "), _DEFAULT.top_p),
    setting("top_k", c.integer(1, 1000), _DEFAULT.top_k),
    setting("repetition_penalty", c.number(1, 2), _DEFAULT.repetition_penalty),
    setting("length_penalty", c.number(0.1, 10), _DEFAULT.length_penalty),
    one_value(
        "max_inp_length",
        c.integer(8192, 8192),
        "a conversation is never cut, and refused where it does not fit",
    ),
    Field("do_sample", c.FLAG, True, attr="^do_sample", is_written=False),
    "False takes the most likely token, as a `temperature` of 0 does.",
    setting("min_new_tokens", c.integer(0, 8192), 0),
    Rule(_greedy),
)
_TTS: Final[tuple[Row | str, ...]] = (
    Field("mode", c.choice(SPEECH_MODES), _SPEECH.mode),
    Field("language", c.choice(LANGUAGES), _SPEECH.language),
    optional("ref_audio_data", c.VOICE_OR_NAME, attr="voice"),
    optional("ref_audio_path", c.VOICE_BY_NAME, attr="voice", after="ref_audio_data"),
    checked(
        "output_path",
        c.because(c.text(0), "no path is taken from a client, the sound is sent"),
        holds=c.USER_TEXT,
    ),
    Object("sampling", *_SAMPLING, closed=True),
    setting("ref_audio_max_ms", c.integer(VOICE_MS_MIN, VOICE_MS_MAX), None, attr="voice_ms_max"),
)


def _speech(at: c.ParseState, *, is_enabled: bool) -> None:
    found = {key: at.values.pop(key) for key in [*at.values] if key.startswith("speech.")}
    given = {key.removeprefix("speech."): value for key, value in found.items()}
    tts, asked = at.body.get("tts"), given.pop("enabled")
    if not (is_enabled or at.context.behaves(ASKED_SPEECH)):
        is_given = isinstance(tts, dict) and tts.get("enabled") is not None
        tts, asked = tts or {}, asked or not is_given
    is_enabled = tts is not None and asked
    if is_enabled:
        _check_voice(f"{at.path}.tts", given["mode"], given["voice"])
    at.values["speech"] = rq.SpeechRequest(**given) if is_enabled else None


def _check_voice(path: str, mode: model.SpeechMode, voice: rq.Voice | None) -> None:
    if mode == "voice_cloning" and voice is None:
        needed = "ref_audio_data or ref_audio_path"
        raise invalid(f"{path}.mode", f"voice_cloning, which needs {needed}")


def ask_rows(*, is_enabled: bool) -> tuple[Row | str, ...]:
    """Make the rows of a turn; `is_enabled`: the default of `tts.enabled`."""
    enabled = Field("enabled", c.FLAG, is_enabled, get=lambda _: True, doc="Whether it is spoken.")
    return (
        Object(
            "image",
            Field("max_slice_nums", SLICES, None),
            Field("use_image_id", c.FLAG, True),
            closed=True,
            when=lambda ask: ask.max_slice_nums is not None or not ask.use_image_id,
            rank=1,
        ),
        Field("messages", items(_MESSAGE, limits.MESSAGES_MAX, 1)),
        *TOOL_ROWS,
        Rule(_check_conversation),
        Field("streaming", c.FLAG, True),
        Object("generation", *_GENERATION, attr="config", closed=True, omit=True),
        Object("tts", enabled, *_TTS, attr="speech", closed=True, none={"enabled": False}),
        Rule(lambda at: _speech(at, is_enabled=is_enabled)),
        Field("omni_mode", c.FLAG, False, attr="omni", omit=True, rank=2),
        Field("enable_thinking", c.FLAG, False, attr="thinking", omit=True, rank=2),
        setting("use_tts_template", c.FLAG, False, attr="tts_template", rank=2),
    )
