"""OpenAI's HTTP API at a real server, by its own package: answers and transcriptions."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import av
import numpy as np
import openai
import pytest
import soundfile
from openai import OpenAI
from openai.types.audio import Transcription, TranscriptionStreamEvent, TranscriptionVerbose
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from recorder.format.format import Record
from recorder.read.reader import LogReader
from replay.rerun.logic import replay
from runtime.access.keys import Key, change_key_file, hash_key
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request
from tests.project.sampling import sample
from tests.transcripts.media import png

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
ANSWER: Final = "It is time to sing."
QUESTION: Final[Any] = [{"role": "user", "content": "What time is it?"}]
TOOL: Final[Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "The time.", "parameters": {"type": "object"}},
}
WAIT_S: Final = 30
EACH: Final = sample(5, 2)
"""Calls of each of many clients at once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    """A server of the embedded model."""
    with live_server("--record", str(folder), model="tiny") as live:
        yield live
        assert "Traceback" not in live.errors.read_text()
        assert "broke" not in live.errors.read_text()


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: LiveServer, key: str = "none") -> OpenAI:
    host, port = server.address
    return OpenAI(api_key=key, base_url=f"http://{host}:{port}/v1", max_retries=0)


def strictly(kind: Any, answer: Any) -> None:
    """Read an answer, as it was sent, by a type of the package."""
    TypeAdapter(kind).validate_json(answer, strict=True)


def sessions(server: LiveServer) -> list[Any]:
    found: list[Any] = request(server.address, "/api/sessions", headers={}).said["sessions"]
    return found


def until_none(server: LiveServer) -> None:
    """Wait until no session runs."""
    end = time.monotonic() + WAIT_S
    while sessions(server):
        assert time.monotonic() < end, sessions(server)
        time.sleep(0.05)


# -- answers ------------------------------------------------------------------------------------


def test_an_answer_is_a_session_with_its_log(
    client: OpenAI, server: LiveServer, folder: Path
) -> None:
    """A program that speaks HTTP has no answer, or no recording says why it was given."""
    before = set(folder.rglob("*.session.zst"))
    system: Any = [{"role": "developer", "content": "Be brief."}]
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=system + QUESTION)
    strictly(ChatCompletion, raw.text)
    answer = raw.parse()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 7
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 7
    until_none(server)
    (log,) = set(folder.rglob("*.session.zst")) - before
    with LogReader(log) as items:
        assert replay(items).identical
    path = f"/api/sessions/{raw.headers['x-request-id']}/recording"
    assert request(server.address, path, headers={}).body == log.read_bytes()


def test_a_stream_has_the_same_words(client: OpenAI) -> None:
    """Its events are no ones of the package, or it has no end."""
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=QUESTION, stream=True, stream_options={"include_usage": True}
    ) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        strictly(ChatCompletionChunk, line)
    chunks = [ChatCompletionChunk.model_validate_json(line) for line in lines]
    *said, last = chunks
    assert "".join(it.choices[0].delta.content or "" for it in said) == ANSWER
    assert [it.choices[0].finish_reason for it in said if it.choices[0].finish_reason] == ["stop"]
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], 7)
    assert len({(it.id, it.created) for it in chunks}) == 1


@pytest.mark.parametrize("form", ["wav", "flac", "mp3", "opus", "pcm16"])
def test_an_answer_is_spoken(client: OpenAI, form: Any) -> None:
    """A client that plays the file hears noise, or nothing."""
    answer = client.chat.completions.create(
        model="tiny",
        modalities=["text", "audio"],
        audio={"voice": "alloy", "format": form},
        messages=QUESTION,
    )
    message = answer.choices[0].message
    assert message.audio is not None
    assert (message.content, message.audio.transcript) == (None, ANSWER)
    data = base64.b64decode(message.audio.data)
    raw: Any = {"samplerate": 24_000, "channels": 1, "subtype": "PCM_16", "format": "RAW"}
    samples, rate_hz = soundfile.read(io.BytesIO(data), **(raw if form == "pcm16" else {}))
    assert (rate_hz, np.abs(samples).max() > 0.05) == (24_000, True)
    assert 1 < len(samples) / rate_hz < 10


def test_a_stream_is_spoken(client: OpenAI) -> None:
    """The sound of a stream is another than that of the whole."""
    asked: Any = {
        "model": "tiny",
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "pcm16"},
        "messages": QUESTION,
        "seed": 7,
    }
    found = [it.choices[0].delta for it in client.chat.completions.create(**asked, stream=True)]
    pieces: list[Any] = [it.audio for it in found if getattr(it, "audio", None)]
    pieces = [it if isinstance(it, dict) else it.model_dump() for it in pieces]
    sound = b"".join(base64.b64decode(it.get("data") or "") for it in pieces)
    assert "".join(it.get("transcript") or "" for it in pieces) == ANSWER
    answer = client.chat.completions.create(**asked).choices[0].message.audio
    assert answer.data == base64.b64encode(sound).decode()


def test_pictures_and_sound_are_taken(client: OpenAI) -> None:
    """What a user shows or says is left out without a word."""
    url = f"data:image/png;base64,{base64.b64encode(png(64, 48)).decode()}"
    sound = base64.b64encode(SPEECH.read_bytes()).decode()
    parts: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]
    plain = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts[:1]}]
    )
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}]
    )
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens + 70


def test_tools_are_offered_and_answered(client: OpenAI) -> None:
    """A conversation with a call in it is refused."""
    call: Any = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "clock", "arguments": "{}"},
    }
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[TOOL])
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[TOOL], tool_choice="required"
        )
    assert error.value.param == "tool_choice"


def test_a_tool_is_called_and_its_result_answered() -> None:
    """An agent waits for a call that came as text, or cannot go on with its result."""
    messages: Any = [{"role": "user", "content": "use the clock"}]
    with live_server("--no-record") as server, client_of(server) as client:
        ask: Any = {"model": "scripted", "tools": [TOOL]}
        raw = client.chat.completions.with_raw_response.create(messages=messages, **ask)
        strictly(ChatCompletion, raw.text)
        choice = raw.parse().choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "turn 0.")
        (call,) = choice.message.tool_calls or ()
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("clock", {})
        with client.chat.completions.stream(messages=messages, **ask) as stream:
            made = stream.get_final_completion().choices[0]
        assert made.finish_reason == "tool_calls"
        assert [it.function.name for it in made.message.tool_calls or ()] == ["clock"]
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "noon"}
        messages += [choice.message.to_dict(), result]
        last = client.chat.completions.create(messages=messages, **ask).choices[0]
        assert (last.finish_reason, "noon" in (last.message.content or "")) == ("stop", True)
        short = client.chat.completions.create(model="scripted", messages=QUESTION, max_tokens=1)
        assert short.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"stop": "a"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"extra_body": {"colour": 1}}, "colour"),
        ({"modalities": ["audio"]}, "audio"),
        ({"modalities": ["audio"], "audio": {"format": "aac", "voice": "a"}}, "audio.format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}],
                    }
                ]
            },
            "messages[0].content[0].image_url.url",
        ),
    ],
)
def test_what_is_not_served_is_named(client: OpenAI, more: dict[str, Any], param: str) -> None:
    """A setting has no effect, and its client believes that it has."""
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, **more})
    assert (error.value.param, error.value.type) == (param, "invalid_request_error")
    assert param.split(".", maxsplit=1)[0] in error.value.message


def test_other_addresses_are_refused_by_name(client: OpenAI) -> None:
    """A client is told that the server is broken, or nothing."""
    for call, word in (
        (lambda: client.responses.create(model="tiny", input="x"), "Responses"),
        (lambda: client.audio.speech.create(model="tiny", voice="alloy", input="x"), "reads aloud"),
        (lambda: client.chat.completions.create(model="gpt-4o", messages=QUESTION), "gpt-4o"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert word in error.value.message


# -- transcriptions -----------------------------------------------------------------------------


def packed(form: str) -> bytes:
    """The question as a file of another kind."""
    samples, rate_hz = soundfile.read(SPEECH, dtype="float32")
    made = io.BytesIO()
    if form in ("mp4", "webm"):
        with av.open(made, "w", format=form) as file:
            stream: Any = file.add_stream("aac" if form == "mp4" else "libopus", rate=48_000)
            stream.layout = "mono"
            resampler = av.AudioResampler(format=stream.format, layout="mono", rate=48_000)
            frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            frame.sample_rate = rate_hz
            fifo = av.AudioFifo()
            for piece in resampler.resample(frame):
                fifo.write(piece)
            while (piece := fifo.read(stream.frame_size or 960, partial=True)) is not None:
                file.mux(stream.encode(piece))
            file.mux(stream.encode(None))
        return made.getvalue()
    kinds = {"wav": "PCM_16", "flac": "PCM_16", "ogg": "VORBIS", "mp3": "MPEG_LAYER_III"}
    soundfile.write(made, samples, rate_hz, kinds[form], format=form.upper())
    return made.getvalue()


@pytest.mark.costly
@pytest.mark.parametrize("form", ["wav", "flac", "ogg", "mp3", "mp4", "webm"])
def test_a_file_of_any_kind_is_transcribed(client: OpenAI, form: str) -> None:
    """What a phone or a browser has recorded is refused."""
    answer = client.audio.transcriptions.create(model="tiny", file=(f"a.{form}", packed(form)))
    assert answer.text == "what time is it"


def test_the_forms_of_a_text(client: OpenAI, server: LiveServer, folder: Path) -> None:
    """A form has a field too few for the package, or one that is not true."""
    before = set(folder.rglob("*.session.zst"))
    create: Any = client.audio.transcriptions.with_raw_response.create
    file = ("a.wav", SPEECH.read_bytes())
    plain = create(model="tiny", file=file, language="en", prompt="a hint")
    strictly(Transcription, plain.text)
    verbose = create(model="tiny", file=file, response_format="verbose_json", language="en")
    strictly(TranscriptionVerbose, verbose.text)
    seconds = soundfile.info(SPEECH).duration
    assert json.loads(verbose.text)["duration"] == pytest.approx(seconds, abs=1e-3)
    text = create(model="tiny", file=file, response_format="text")
    assert (text.text, text.headers["content-type"]) == (
        "what time is it\n",
        "text/plain; charset=utf-8",
    )
    until_none(server)
    logs = set(folder.rglob("*.session.zst")) - before
    assert len(logs) == 3
    for log in logs:
        with LogReader(log) as items:
            assert replay(items).identical
    for more, param in (
        ({"response_format": "srt"}, "response_format"),
        ({"temperature": 0.5}, "temperature"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            create(model="tiny", file=file, **more)
        assert error.value.param == param


def test_a_text_is_streamed(client: OpenAI) -> None:
    """Its events are no ones of the package."""
    with client.audio.transcriptions.with_streaming_response.create(
        model="tiny", file=("a.wav", SPEECH.read_bytes()), stream=True
    ) as raw:
        lines = [line.removeprefix("data: ") for line in raw.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        strictly(TranscriptionStreamEvent, line)
    *deltas, done = map(json.loads, lines)
    assert "".join(it["delta"] for it in deltas) == done["text"] == "what time is it"


def test_a_client_with_its_answer_has_ended_its_session(
    client: OpenAI, server: LiveServer, folder: Path
) -> None:
    """Each successful call is counted as a client that was lost."""
    before = set(folder.rglob("*.session.zst"))
    ask: Any = client.chat.completions.create
    for is_stream in (False, True):
        with SPEECH.open("rb") as file:
            list(client.audio.transcriptions.create(model="tiny", file=file, stream=is_stream))
        list(ask(model="tiny", messages=QUESTION, stream=is_stream))
    with pytest.raises(openai.APIError):
        ask(model="tiny", messages=[{"role": "user", "content": "word " * 20_000}])
    until_none(server)
    reasons = []
    for log in set(folder.rglob("*.session.zst")) - before:
        with LogReader(log) as items:
            *_, end = items
            assert isinstance(end, Record)
            reasons.append(end.fields["reason"])
    assert reasons == ["client"] * 5


# -- hostile ------------------------------------------------------------------------------------


def silence(seconds: int) -> bytes:
    """A FLAC of very long silence: small, and large once it is unpacked."""
    made = io.BytesIO()
    with soundfile.SoundFile(made, "w", 16_000, 1, "PCM_16", format="FLAC") as file:
        for _ in range(seconds // 60):
            file.write(np.zeros(16_000 * 60, np.int16))
    return made.getvalue()


@pytest.mark.costly
@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"RIFF", b"\0" * 1_000, b"PK\x03\x04" + zlib.compress(bytes(1 << 20))),
        *(b"\x1a\x45\xdf\xa3webm" + bytes(500), b"\0\0\0\x18ftypisom" + b"\xff" * 500),
        *(b"ID3" + b"\xff" * 2_000, b"fLaC" + b"\xff" * 500, b"OggS" + bytes(500)),
        b"an hour",
    ],
    ids=range(10),
)
def test_a_hostile_file_is_refused(client: OpenAI, data: bytes) -> None:
    """A file takes the server's memory, its time, or its life."""
    data = silence(3_600) if data == b"an hour" else data
    with pytest.raises(openai.BadRequestError) as error:
        client.audio.transcriptions.create(model="tiny", file=("a.wav", data))
    assert (error.value.param, error.value.code) == ("file", "invalid_audio")


def said(server: LiveServer, lines: Sequence[str], body: bytes = b"") -> bytes:
    """Send a request as it is, and read its answer."""
    with socket.create_connection(server.address, timeout=WAIT_S) as connection:
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)
        with connection.makefile("rb") as file:
            return file.read()


def test_bodies_are_bounded(server: LiveServer) -> None:
    """A hundred megabytes are kept for a request that is refused."""
    for path in ("/v1/chat/completions", "/v1/audio/transcriptions"):
        head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Length: 104857600"]
        answer = said(server, head)
        assert answer.startswith(b"HTTP/1.1 413")
        assert (
            json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        )
    for body in (b"", b"[]", b"{", b'{"model": "tiny", "model": "b"}', b"\xff", b"[" * 10_000):
        found = request(
            server.address, "/v1/chat/completions", method="POST", body=body, headers={}
        )
        assert (found.status, found.said["error"]["code"]) == (400, "invalid_json")


def test_who_leaves_ends_the_session(server: LiveServer) -> None:
    """The model answers on for a client that is gone, and others wait."""
    until_none(server)
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Tell me a story. " * 200}],
            "max_tokens": 8_000,
        }
    ).encode()
    for is_stream in (False, True):
        sent = body[:-1] + b', "stream": true}' if is_stream else body
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost"]
        head.append(f"Content-Length: {len(sent)}")
        with socket.create_connection(server.address, timeout=WAIT_S) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + sent)
            if is_stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
        until_none(server)


def test_many_calls_are_bounded_and_all_answered(server: LiveServer) -> None:
    """A thousand calls take all memory, or some wait for ever."""
    statuses: list[int] = []

    def ask() -> None:
        body = json.dumps({"model": "tiny", "messages": QUESTION, "max_tokens": 1}).encode()
        for _ in range(EACH):
            found = request(
                server.address, "/v1/chat/completions", method="POST", body=body, headers={}
            )
            statuses.append(found.status)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 20 * EACH
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) > 0
    until_none(server)


def test_keys_hold_here_too(tmp_path: Path) -> None:
    """A key's limits end where a plain request begins; or an error is none of the package's."""
    keys = (
        Key(name="anna", hash=hash_key("antiphon_anna"), sessions_per_hour=1),
        Key(name="bert", hash=hash_key("antiphon_bert"), modes=("audio",)),
    )
    change_key_file(tmp_path / "keys.toml", lambda _: keys, create=True)
    options = ("--keys", str(tmp_path / "keys.toml"), "--no-record")
    with live_server(*options) as server:
        ask: Any = {"model": "scripted", "messages": QUESTION}
        for key, error in (
            ("antiphon_eve", openai.AuthenticationError),
            ("antiphon_bert", openai.PermissionDeniedError),
        ):
            with client_of(server, key) as client, pytest.raises(error) as refused:
                client.chat.completions.create(**ask)
            assert refused.value.code
            assert refused.value.message
        with client_of(server, "antiphon_anna") as client:
            assert client.chat.completions.create(**ask).choices
            with pytest.raises(openai.RateLimitError) as busy:
                client.chat.completions.create(**ask)
            assert busy.value.code == "worker_busy"
