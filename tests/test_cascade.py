"""The example that gives a voice to any language model: it hears, asks, speaks and is cut."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import pytest
import soundfile

from protocol.values.model import UNIT_SAMPLES, Cut, DuplexConfig, Opening, Unit, UnitResult, Voice
from recorder.storage.store import Store
from runtime.commands.server_process import RUN
from runtime.model.models import ModelUnusableError, load_backend
from tests.live.servers import live_server
from tests.test_examples import EXAMPLES, QUESTION, ROOT, SPEECH, antiphon, install

pytest.importorskip("moonshine_voice")
CASCADE: Final = EXAMPLES / "cascade"
QUIET: Final = bytes(4 * UNIT_SAMPLES)
CLAUSE_S: Final = 1.5
"""How long the voice of these tests takes for a clause."""


@pytest.fixture
def cascade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, installed, with a voice that every machine has."""
    install(tmp_path, "cascade:load", CASCADE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    module: Any = importlib.reload(importlib.import_module("cascade"))
    pcm = np.full(round(24_000 * CLAUSE_S), 0.1, "<f4").tobytes()
    monkeypatch.setattr(module, "VOICES", {"tone": lambda: lambda _: pcm})
    return module


@attrs.define
class Asked:
    """What an endpoint was asked, and how it answers."""

    url: str
    pieces: tuple[str, ...]
    status: int = 200
    questions: list[list[dict[str, str]]] = attrs.Factory(list)


@contextmanager
def endpoint(*pieces: str, status: int = 200) -> Iterator[Asked]:
    """Serve a chat endpoint like OpenAI's, which streams these pieces."""
    asked = Asked(url="", pieces=pieces, status=status)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(json.dumps({"data": [{"id": "stub"}]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert body["model"] == "stub"
            asked.questions.append(body["messages"])
            deltas = [{"choices": [{"delta": {"content": it}}]} for it in asked.pieces]
            lines = [f"data: {json.dumps(it)}\n\n" for it in deltas]
            self._send("".join([*lines, "data: [DONE]\n\n"]).encode(), asked.status)

        def _send(self, body: bytes, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    asked.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def question() -> list[bytes]:
    """Half a second of quiet, "what time is it", and the quiet after it, second by second."""
    sound, _ = soundfile.read(QUESTION, dtype="float32")
    sound = np.pad(sound, (8000, 12_000))
    sound = np.pad(sound, (0, -len(sound) % UNIT_SAMPLES)).astype("<f4")
    return [it.tobytes() for it in sound.reshape(-1, UNIT_SAMPLES)]


def converse(name: str, seconds: list[bytes], cut: int | None = None) -> list[UnitResult]:
    """Have a session hear these seconds; `cut` is the unit that is cut."""
    opening = Opening(
        instructions="Be kind.", voice=Voice(), config=DuplexConfig(generate_audio=True), seed=1
    )

    async def body() -> list[UnitResult]:
        backend: Any = load_backend(name)
        session = await backend.open(opening, slot=0)
        found = []
        for index, pcm in enumerate(seconds):
            where = Cut(stage="llm", step=0) if index == cut else None
            found.append(await session.run(Unit(index=index, pcm=pcm), where))
            await session.finalize(index, interrupted=index == cut)
        await session.release()
        await backend.aclose()
        return found

    return anyio.run(body, backend="trio")


def told(results: list[UnitResult]) -> str:
    """What was said."""
    return "".join(it.text for it in results).strip()


def test_what_the_user_said_is_asked_and_the_answer_spoken(cascade: Any) -> None:
    """It would not be a voice of that model."""
    first, second = "It is a quarter past noon,", "as far as I can tell."
    with endpoint(first[:9], first[9:] + " ", second) as asked:
        found = converse(f"backend:cascade:llm={asked.url}", [*question(), *[QUIET] * 5])
    (messages,) = asked.questions
    assert messages[0]["role"] == "system"
    assert messages[0]["content"].startswith("Be kind.")
    assert messages[1:] == [{"role": "user", "content": "What time is it?"}]
    assert told(found) == f"{first} {second}"
    spoken = [it for it in found if not it.is_listen]
    assert [it.end_of_turn for it in spoken] == [False] * (len(spoken) - 1) + [True]
    assert sum(len(it.pcm) for it in spoken) == 4 * 24_000 * 2 * CLAUSE_S
    assert found.index(spoken[0]) <= len(question()) - 1, "it begins as soon as the user ended"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_users_speech_cuts_the_answer(cascade: Any) -> None:
    """It would talk on over its user, and its model believe that all was heard.

    httpx leaves generators of a stream that is not read to its end to the garbage collector.
    """
    long = tuple(f"This is the clause number {n}. " for n in range(20))
    with endpoint(*long) as asked:
        seconds = [*question(), QUIET, QUIET, *question(), QUIET]
        converse(f"backend:cascade:llm={asked.url}", seconds)
    _, again = asked.questions
    assert [it["role"] for it in again] == ["system", "user", "assistant", "user"]
    kept = again[2]["content"].strip()
    assert "".join(long).startswith(kept)
    assert 0 < len(kept) < len("".join(long)) / 2


def test_an_endpoint_that_fails_is_told_of(cascade: Any) -> None:
    """Its user would wait for an answer, or the session end."""
    with endpoint("no", status=500) as asked:
        found = converse(f"backend:cascade:llm={asked.url}", [*question(), QUIET, QUIET])
    assert told(found) == cascade.NO_ANSWER


def test_without_an_endpoint_the_same_sound_gives_the_same_answer(cascade: Any) -> None:
    """A recording could not be run again; a cut one goes on as it did."""
    seconds = [*question(), QUIET, QUIET, *question(), *[QUIET] * 9]
    first = converse("backend:cascade", seconds)
    assert told(first).startswith("You said: What time is it.")
    assert converse("backend:cascade", seconds) == first
    begins = next(it.index for it in first if not it.is_listen)
    cut = converse("backend:cascade", seconds, cut=begins)
    assert cut[begins].is_listen
    assert not any(it.text for it in cut[begins : begins + 2])
    assert "That was 2 so far" in told(cut)


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("lm=x", "lm: the options are llm, model, voice"),
        ("voice=bass", "voice=bass: the voices are tone"),
    ],
)
def test_what_is_mistyped_is_named(cascade: Any, argument: str, says: str) -> None:
    """It would be ignored, and another model speak."""
    with pytest.raises(ModelUnusableError, match=says):
        load_backend(f"backend:cascade:{argument}")


@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="it speaks by espeak-ng here")
def test_a_served_conversation_replays_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording of the small answerer is run again, byte for byte; that of an endpoint is not."""
    install(tmp_path, "cascade:load", CASCADE)
    path = f"{ROOT}{os.pathsep}{tmp_path}"
    words = (*RUN[:-2], "-c", f"import sys; sys.path.append({str(tmp_path)!r}); {RUN[-1]}")
    done = {}
    with endpoint("That is for you to say.") as asked:
        for name in ("voice=espeak", f"voice=espeak,llm={asked.url}"):
            logs = tmp_path / f"logs{len(done)}"
            model = f"backend:cascade:{name}"
            with live_server("--record", str(logs), model=model, run=words) as server:
                url = server.url.removesuffix("/v1/realtime")
                talk = antiphon("talk", str(SPEECH), "--url", url, "--fast", folder=tmp_path)
            assert talk.returncode == 0, talk.stderr
            (log,) = Store(logs).logs()
            again = ("replay", "--full", str(log.path))
            done[name] = antiphon(*again, folder=tmp_path, PYTHONPATH=path)
    alone, asking = done.values()
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert asking.returncode == 3, asking.stdout + asking.stderr
    assert "deterministic" in asking.stdout + asking.stderr
