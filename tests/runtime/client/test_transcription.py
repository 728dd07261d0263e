"""`antiphon.transcribe` and `antiphon transcribe`: against a real server, and peers that fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from websockets.sync.server import ServerConnection

import antiphon
from antiphon import ErrorReport, LocalProtocolError, TranscriptDelta, TranscriptDone
from runtime.cli import main
from runtime.client import resuming
from runtime.client.duplex import pcm16_of
from runtime.commands.transcribe import cut_utterances
from tests.live.servers import live_server
from tests.network.peers import hear, peer, say

pytestmark = pytest.mark.anyio

LOUD = np.sin(np.arange(16_000) / 20).astype(np.float32) / 2


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose model writes a word for each second that is loud enough."""
    with live_server("--no-record", "--served-model-name", "whisper-1") as server:
        yield server.url


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait a millisecond between attempts."""
    monkeypatch.setattr(resuming, "BACKOFF_S", 0.001)


async def read(session: antiphon.TranscriptionSession) -> tuple[str, TranscriptDone]:
    """Read an utterance out."""
    said = ""
    async for event in session:
        if isinstance(event, TranscriptDone):
            return said, event
        assert isinstance(event, TranscriptDelta)
        said += event.text
    raise AssertionError("the events of a session do not run out")


# -- the SDK --------------------------------------------------------------------------------------


async def test_text_comes_while_sound_is_sent(url: str) -> None:
    """A microphone's words would come when it is off."""
    async with antiphon.transcribe(url, model="scripted") as session:
        assert session.created.session_id.startswith("sess_")
        assert session.created.created_s > 1_700_000_000
        for _ in range(50):
            await session.append(LOUD[:320])
        first = await anext(session)
        assert isinstance(first, TranscriptDelta)
        await session.append(LOUD.tobytes())
        await session.finish()
        said, done = await read(session)
        assert done.text == first.text + said
        assert len(done.text.split()) == 2
        assert done.prompt_tokens == 12 + 3 * 10
        await session.append(LOUD)
        await session.finish()
        said, done = await read(session)
        assert said == done.text != ""


async def test_any_size_of_pieces_gives_the_same_text(url: str) -> None:
    """What is heard would depend on how it was sent."""
    sound = np.concatenate([LOUD, LOUD * 0, LOUD[::-1] * np.float32(0.7), LOUD[:5000]])
    texts = []
    async with antiphon.transcribe(url, model="whisper-1") as session:
        for size in (len(sound), 16_000, 777):
            for start in range(0, len(sound), size):
                await session.append(sound[start : start + size])
            await session.finish()
            _, done = await read(session)
            texts.append([word.partition("-")[0] for word in done.text.split()])
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) == 3


async def test_a_model_that_is_not_there_is_raised(url: str) -> None:
    """A typing error would be waited for."""
    async with antiphon.transcribe(url, model="wisper") as session:
        await session.append(LOUD)
        with pytest.raises(antiphon.ReportedError, match="wisper") as caught:
            await anext(session)
        assert caught.value.code == "model_not_found"


def greet(websocket: ServerConnection) -> None:
    """Greet a client, and let it choose."""
    say(websocket, "session.created", id="sess_1", created=1_700_000_000)
    assert hear(websocket) == {"type": "session.update", "model": "tiny"}


def loses_its_model(websocket: ServerConnection) -> None:
    """Tell an error, then an end."""
    greet(websocket)
    say(websocket, "error", error="not now", code="buffer_full")
    say(websocket, "error", error="the model was lost", code="backend_error")
    websocket.close(1011, "backend_error")


async def test_errors_are_events_and_an_end_is_raised() -> None:
    """A lost model would look like the end of what was said."""
    with peer(loses_its_model) as address:
        async with antiphon.transcribe(address, model="tiny") as session:
            report = await anext(session)
            assert isinstance(report, ErrorReport)
            assert report.code == "buffer_full"
            with pytest.raises(antiphon.SessionClosedError) as caught:
                await anext(session)
            assert (caught.value.code, caught.value.reason) == (1011, "backend_error")


async def test_a_client_that_is_let_go_is_told_so() -> None:
    """A silent client would wait for ever."""

    def lets_go(websocket: ServerConnection) -> None:
        greet(websocket)
        websocket.close(1000, "idle")

    with peer(lets_go) as address:
        async with antiphon.transcribe(address, model="tiny") as session:
            with pytest.raises(antiphon.SessionClosedError, match="idle"):
                await anext(session)


async def test_settings_that_do_not_go_together_are_refused() -> None:
    """A mistake in the calling code would be found by nobody."""
    with pytest.raises(LocalProtocolError, match="retries"):
        async with antiphon.transcribe("ws://127.0.0.1:9", model="tiny", retries=-1):
            pass


def test_samples_are_rounded_and_clipped() -> None:
    """Loud sound would turn into noise."""
    pcm16 = pcm16_of(np.array([0, 1, -1, 2, -2, 0.5], np.float32))
    assert np.frombuffer(pcm16, "<i2").tolist() == [0, 32_767, -32_767, 32_767, -32_767, 16_384]
    with pytest.raises(LocalProtocolError, match="NaN"):
        pcm16_of(np.array([np.nan], np.float32))


# -- the command ----------------------------------------------------------------------------------


def transcribe(*arguments: str | Path) -> Result:
    """Run the command as if it were typed."""
    return CliRunner().invoke(main, ["transcribe", *map(str, arguments)])


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    """Two and a half seconds at another rate, in stereo."""
    path = tmp_path / "speech.wav"
    tone = np.sin(np.arange(int(44_100 * 2.5)) / 20) / 2
    soundfile.write(path, np.stack([tone, tone], axis=1), 44_100)
    return path


def test_a_file_is_written_down(url: str, wav: Path) -> None:
    """The first thing that anybody tries would not work."""
    result = transcribe(wav, "--url", url, "--model", "scripted")
    assert result.exit_code == 0, result.output
    words = result.stdout.split()
    assert [word.partition("-")[2] for word in words] == ["0.0", "0.1", "0.2"]
    assert result.stdout.endswith("\n")


def test_sound_that_is_not_kept_ends_it(tmp_path: Path) -> None:
    """A transcript with holes would look like one, behind a page of errors."""
    path = tmp_path / "long.wav"
    soundfile.write(path, np.sin(np.arange(16_000 * 120) / 20) / 2, 16_000)
    with live_server("--no-record", "--transcription-buffer-mb", "1") as server:
        result = transcribe(path, "--url", server.url, "--model", "scripted")
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()[-1:]
    assert "it is not kept" in line
    assert "--realtime" in line
    assert result.stderr.count("not kept") == 1


def test_json_is_for_programs(url: str, wav: Path) -> None:
    """A script could not read what was said."""
    result = transcribe(wav, "--url", url, "--model", "whisper-1", "--json", "--realtime")
    assert result.exit_code == 0, result.output
    created, *deltas, done = [json.loads(line) for line in result.stdout.splitlines()]
    assert (created["type"], created["recording_id"]) == ("created", "")
    assert {line["type"] for line in deltas} == {"delta"}
    assert done["type"] == "done"
    assert done["text"] == "".join(line["text"] for line in deltas)
    assert done["prompt_tokens"] == 12 + 4 * 10


def test_a_long_file_is_several_utterances(
    url: str, wav: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lecture would outgrow the model's context."""
    monkeypatch.setattr("runtime.commands.transcribe.cut_utterances", lambda pcm: cut(pcm, 1))
    result = transcribe(wav, "--url", url, "--model", "scripted")
    assert result.exit_code == 0, result.output
    assert [line.split("-")[1] for line in result.stdout.splitlines()] == ["0.0 ", "1.0 ", "2.0 "]


def cut(pcm: bytes, seconds: int) -> tuple[bytes, ...]:
    """Cut as the command does, and see that nothing is lost."""
    utterances = cut_utterances(pcm, seconds)
    assert b"".join(utterances) == pcm
    return utterances


def test_an_unknown_model_is_one_clear_line(url: str, wav: Path) -> None:
    """The first mistake that anybody makes would give a traceback."""
    result = transcribe(wav, "--url", url, "--model", "tiny")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "'tiny'" in result.stderr
    as_json = transcribe(wav, "--url", url, "--model", "tiny", "--json")
    assert json.loads(as_json.stdout.splitlines()[-1])["code"] == "model_not_found"


def test_without_a_name_the_servers_own_model_is_meant(url: str, wav: Path) -> None:
    """A user has to ask what a server with one model calls it."""
    result = transcribe(wav, "--url", url)
    assert result.exit_code == 0, result.output
    assert result.stdout == transcribe(wav, "--url", url, "--model", "scripted").stdout


def wants_a_name(websocket: ServerConnection) -> None:
    """Take no sound without a model, as vLLM does."""
    say(websocket, "session.created", id="sess_1", created=1)
    hear(websocket)
    say(websocket, "error", error="no model yet", code="model_not_validated")
    hear(websocket)


def test_a_server_that_wants_a_name_is_told_of_with_the_option(wav: Path) -> None:
    """A user reads an error that does not say what to do."""
    with peer(wants_a_name) as address:
        result = transcribe(wav, "--url", address)
    assert result.exit_code == 1
    assert "--model NAME" in result.stderr


def fails_amid(websocket: ServerConnection) -> None:
    """Fail at an utterance, and tell what there is of it."""
    greet(websocket)
    while not hear(websocket).get("final"):
        pass
    say(websocket, "transcription.delta", delta="so far\x1b[2J")
    say(websocket, "error", error="too long", code="context_full")
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    say(websocket, "transcription.done", text="so far\x1b[2J", usage=usage)
    hear(websocket)


def test_an_utterance_that_fails_is_told_and_costs_the_exit_code(wav: Path) -> None:
    """A script would take half a transcript for a whole one."""
    with peer(fails_amid) as address:
        result = transcribe(wav, "--url", address, "--model", "tiny")
    assert result.exit_code == 1
    assert "so far" in result.stdout
    assert "\x1b" not in result.output
    assert "too long (context_full)" in result.stderr


def test_a_lost_server_is_one_clear_line(wav: Path) -> None:
    """A lost connection would give a traceback."""
    with peer(greet) as address:
        result = transcribe(wav, "--url", address, "--model", "tiny")
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)


def is_lost_amid(websocket: ServerConnection) -> None:
    """Complain before anything is written, and leave amid an utterance."""
    greet(websocket)
    hear(websocket)
    say(websocket, "error", error="too much", code="inference_error")
    say(websocket, "transcription.delta", delta="so far")


def test_what_went_wrong_stands_on_a_line_of_its_own(wav: Path) -> None:
    """A terminal would show it as if it had been said, or behind empty lines."""
    with peer(is_lost_amid) as address:
        result = transcribe(wav, "--url", address, "--model", "tiny")
    first, words, last = result.output.splitlines()
    assert (first, words) == ("Error: too much (inference_error)", "so far")
    assert last.startswith("Error: ")
    assert result.stdout == "so far\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(("none.wav",), "none.wav: No such file"), (("{wav}", "--url", "ftp://a"), "not the address")],
)
def test_what_cannot_be_used_is_said_before_anything_is_sent(
    arguments: tuple[str, ...], text: str, wav: Path
) -> None:
    """A typing error would be sent to a server."""
    result = transcribe(*(each.replace("{wav}", str(wav)) for each in arguments))
    assert result.exit_code == 2
    assert text in result.stderr
