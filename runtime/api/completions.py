"""Chat completions of OpenAI's API: a request is a chat of one turn, and its answer.

- Roles, texts, calls and tools are those of a turn of chat (`protocol.wire.dialects.chat`), which
  checks them. Pictures come as data URLs: no address is fetched.
- A parameter is honoured or refused by its name; those in `WITHOUT_EFFECT` say nothing about an
  answer.
- An answer in speech has its words as `transcript`; in a stream speech is PCM16 at 24 kHz.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final

import attrs
import numpy as np
import pybase64
import soundfile

from protocol.values.model import OUTPUT_RATE_HZ
from protocol.wire.audio import to_pcm16
from protocol.wire.codec import STOCK_VOICES

from ..net.http import CodedError, bad_request
from .adapters import RETRY, LocalClient

_GENERATION: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}
"""Settings of a turn, by their names in OpenAI's API, and in vLLM's."""
_ONLY: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "stop": ([],),
    "response_format": ({"type": "text"},),
    "reasoning_effort": ("none",),
}
"""Parameters with the only values that are served; null too."""
WITHOUT_EFFECT: Final = frozenset(
    {
        *("user", "metadata", "safety_identifier", "service_tier", "prompt_cache_key"),
        *("prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "verbosity"),
    }
)
_READ: Final = frozenset(
    {
        *("model", "messages", "stream", "stream_options", "modalities", "audio"),
        *("tools", "tool_choice", "seed", "store"),
    }
)
FORMATS: Final[Mapping[str, tuple[str, str] | None]] = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", "MPEG_LAYER_III"),
    "opus": ("OGG", "OPUS"),
    "pcm16": None,
}
"""Forms of speech, by libsndfile's names."""
_FINISH: Final[Mapping[str, str]] = {"length": "length", "tool_calls": "tool_calls"}
_STATUS: Final[Mapping[str, HTTPStatus]] = {
    "worker_busy": HTTPStatus.TOO_MANY_REQUESTS,
    "queue_full": HTTPStatus.TOO_MANY_REQUESTS,
    "service_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "inference_error": HTTPStatus.INTERNAL_SERVER_ERROR,
    "model_not_found": HTTPStatus.NOT_FOUND,
}
"""Errors of a session that are not its client's mistake, or have a status of their own."""


def refuse_value(param: str, text: str) -> CodedError:
    """The answer to a parameter that is not served."""
    return bad_request("unsupported_value", f"{param}: {text}", param)


def session_error(error: Mapping[str, Any]) -> CodedError:
    """The answer to a request whose session sent an error."""
    code, message = str(error.get("code")), str(error.get("message"))
    path, colon, text = message.partition(": ")
    status = _STATUS.get(code, HTTPStatus.BAD_REQUEST)
    param = None
    if colon and path.startswith("$."):
        param = path.removeprefix("$.").removeprefix("input.").removeprefix("generation.")
        param = _PARAMS.get(param, param)
        message = f"{param}: {text}"
    headers = RETRY if status in (429, 503) else None
    return CodedError(status, code, message, param, headers)


_PARAMS: Final = {"max_new_tokens": "max_completion_tokens", "tts.ref_audio_path": "audio.voice"}


# -- the request ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class CompletionRequest:
    """A request for a completion.

    Attributes:
        turn: the input of a turn of chat.
        spoken: the form of its speech; empty: it has none.
        has_usage: a stream ends with its usage.
        seed: of its random choices; None: the server's.
        is_recorded: whether the client asks to be recorded; None: as the server does.
        came_s: Unix time.
    """

    model: str
    turn: dict[str, Any]
    is_stream: bool
    spoken: str
    has_usage: bool
    seed: int | None
    is_recorded: bool | None
    came_s: int = attrs.field(factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> CompletionRequest:
        """Read a request; raises `CodedError`, and leaves the messages to the session."""
        _check_parameters(body)
        is_stream = _typed(body, "stream", bool, default=False)
        options = _typed(body, "stream_options", dict, default={})
        generation = {
            ours: body[theirs]
            for theirs, ours in _GENERATION.items()
            if body.get(theirs) is not None
        }
        spoken, tts = _speech(body, is_stream=is_stream)
        messages = _typed(body, "messages", list)
        turn: dict[str, Any] = {
            "messages": [_message(f"messages[{at}]", it) for at, it in enumerate(messages)],
            "streaming": is_stream,
            "generation": generation,
            "tts": tts,
        }
        turn |= {
            name: body[name] for name in ("tools", "tool_choice") if body.get(name) is not None
        }
        store = _typed(body, "store", bool, default=None)
        return cls(
            model=_typed(body, "model", str),
            turn=turn,
            is_stream=is_stream,
            spoken=spoken,
            has_usage=options.get("include_usage") is True,
            seed=_typed(body, "seed", int, default=None),
            is_recorded=False if store is False else None,
        )


def _check_parameters(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in _READ or name in _GENERATION or name in WITHOUT_EFFECT or value is None:
            continue
        if name not in _ONLY:
            raise bad_request("unsupported_parameter", f"{name[:64]}: not served", name[:64])
        if value not in _ONLY[name]:
            raise refuse_value(name, f"only {_ONLY[name][0]} is served")


def _typed(body: Mapping[str, Any], name: str, kind: type, **default: Any) -> Any:
    value = body.get(name)
    if value is None:
        if "default" in default:
            return default["default"]
        raise bad_request("missing_field", f"{name}: is missing", name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise bad_request("invalid_payload", f"{name}: another type", name)
    return value


def _speech(body: Mapping[str, Any], *, is_stream: bool) -> tuple[str, dict[str, Any] | None]:
    """The form of the speech that is asked for, and the setting of its turn."""
    modalities = _typed(body, "modalities", list, default=["text"])
    if not modalities or any(it not in ("text", "audio") for it in modalities):
        raise refuse_value("modalities", 'there are ["text"] and ["text", "audio"]')
    if "audio" not in modalities:
        return "", None
    audio = _typed(body, "audio", dict)
    form = _typed(audio, "format", str, default="")
    voice = audio.get("voice")
    if form not in FORMATS or (is_stream and form != "pcm16"):
        text = "pcm16 in a stream" if is_stream else ", ".join(FORMATS)
        raise refuse_value("audio.format", f"served: {text}")
    if isinstance(voice, dict):
        voice = voice.get("id")
    is_own = voice is None or (isinstance(voice, str) and voice in STOCK_VOICES)
    return form, {"enabled": True, **({} if is_own else {"ref_audio_path": voice})}


def _message(path: str, message: object) -> object:
    if not isinstance(message, dict):
        return message
    if message.get("audio") is not None:
        raise refuse_value(
            f"{path}.audio", "speech is not kept: send its transcript as the content"
        )
    role, content = message.get("role"), message.get("content")
    made = {name: it for name, it in message.items() if name in _OF_MESSAGE and it is not None}
    made["role"] = "system" if role == "developer" else role
    if isinstance(content, list):
        parts = [_part(f"{path}.content[{at}]", part) for at, part in enumerate(content)]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        is_words = role == "tool" and len(texts) == len(parts)
        made["content"] = "".join(map(str, texts)) if is_words else parts
    return made


_OF_MESSAGE: Final = ("role", "content", "tool_calls", "tool_call_id")


def _part(path: str, part: object) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": words}:
            return {"type": "text", "text": words}
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            head, comma, data = url.partition(",")
            if not (comma and head.startswith("data:image/") and head.endswith(";base64")):
                text = "a picture is a data URL in base64: addresses are not fetched"
                raise refuse_value(f"{path}.image_url.url", text)
            return {"type": "image", "data": data}
        case {"type": "input_audio", "input_audio": {"data": data}}:
            return {"type": "audio", "data": data}
    raise refuse_value(path, "there are text, image_url and input_audio, each with its field")


# -- the answer ----------------------------------------------------------------------------------


def react(asked: CompletionRequest, client: LocalClient, message: dict[str, Any]) -> bool:
    """Ask for the turn; takes `session.created`, pieces and `response.done`.

    `CodedError`: the session is refused, or fails.
    """
    match message["type"]:
        case "session.queue_done":
            wish = {} if asked.is_recorded is None else {"record": asked.is_recorded}
            client.ask({"type": "session.init", "payload": wish})
        case "session.created":
            client.ask({"type": "input.append", "input": asked.turn})
        case "response.done":
            client.ask({"type": "session.close"})
        case "error":
            client.ask({"type": "session.close"})
            raise session_error(message["error"])
    return message["type"] in ("session.created", "response.output.delta", "response.done")


def whole(asked: CompletionRequest, done: dict[str, Any]) -> dict[str, Any]:
    """Write a completion that is not streamed; encoding its speech may take a thread's time."""
    text, calls = done["text"], done.get("tool_calls")
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if not calls and not asked.spoken:
        message["content"] = text
    if calls:
        message["tool_calls"] = calls
    if asked.spoken and not calls:
        sound = encode_speech(pybase64.b64decode(done.get("audio") or b""), asked.spoken)
        message |= {"content": None, "audio": _audio(done, sound, text)}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(done)}
    return {**_head(asked, done, "chat.completion"), "choices": [choice], "usage": usage_of(done)}


def chunk(asked: CompletionRequest, message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Write a message of the session as chunks of a stream."""
    head = _head(asked, message, "chat.completion.chunk")

    def of(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice], **({"usage": None} if asked.has_usage else {})}

    if message["type"] == "session.created":
        yield of({"role": "assistant", "content": None if asked.spoken else ""})
    elif message["type"] == "response.done":
        calls = [{"index": at, **it} for at, it in enumerate(message.get("tool_calls") or ())]
        if calls:
            yield of({"tool_calls": calls})
        yield of({}, _finish(message))
        if asked.has_usage:
            yield {**head, "choices": [], "usage": usage_of(message)}
    elif message["kind"] == "audio":
        sound = encode_speech(pybase64.b64decode(message["audio"]), "pcm16")
        yield of({"audio": _audio(message, sound)})
    elif asked.spoken:
        yield of({"audio": {"id": _name(message, "audio_"), "transcript": message["text"]}})
    else:
        yield of({"content": message["text"]})


def encode_speech(pcm: bytes, form: str) -> bytes:
    """Encode speech, float32 LE at 24 kHz, in one of `FORMATS`."""
    file = FORMATS[form]
    if file is None:
        return to_pcm16(pcm)
    made = io.BytesIO()
    soundfile.write(
        made, np.frombuffer(pcm, "<f4").clip(-1, 1), OUTPUT_RATE_HZ, file[1], format=file[0]
    )
    return made.getvalue()


def usage_of(done: Mapping[str, Any]) -> dict[str, int]:
    """The tokens of a turn."""
    metrics = done["metrics"]
    asked, made = metrics.get("input_tokens", 0), metrics.get("generated_tokens", 0)
    return {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}


def _audio(message: Mapping[str, Any], sound: bytes, text: str | None = None) -> dict[str, Any]:
    data, now_s = pybase64.b64encode(sound).decode(), int(time.time())
    # It is not kept, and cannot be named in a later request.
    audio = {"id": _name(message, "audio_"), "data": data, "expires_at": now_s}
    return audio if text is None else {**audio, "transcript": text}


def _head(asked: CompletionRequest, message: Mapping[str, Any], kind: str) -> dict[str, Any]:
    name = _name(message, "chatcmpl-")
    return {"id": name, "object": kind, "created": asked.came_s, "model": asked.model}


def _name(message: Mapping[str, Any], prefix: str) -> str:
    """An id that leads to the session's recording."""
    return prefix + str(message["session_id"]).removeprefix("sess_")


def _finish(done: Mapping[str, Any]) -> str:
    return _FINISH.get(done["reason"], "stop")
