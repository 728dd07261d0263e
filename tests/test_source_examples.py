"""The clients of 004 against a live server: nothing of them is changed but for the named shims.

Their code is read out of the source where it lies beside the repository. Clients of our own that
do the same run in any case. The shims stand, each with its reason, in `source_examples/shims.py`
and `source_examples/shims.mjs`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import pytest
import soundfile

from protocol.wire.dialects import DIALECTS
from tests.live.servers import LiveServer, live_server
from tests.sessions.in_memory import base64, pcm
from tests.transcripts.wire_schema import problems

ROOT: Final = Path(__file__).resolve().parents[1]
HERE: Final = ROOT / "tests" / "source_examples"
SEEDS: Final = ROOT.parent / "shared" / "seeds"
WAIT_S: Final = 60
"""A client that hangs fails; tiny answers in seconds on two busy cores."""
NODE: Final = shutil.which("node")

ECHO: Final = "turn 0: Hello! (0 pictures, 0 sounds)"
"""What the scripted model answers to the example's question."""


@attrs.frozen
class Example:
    """Where a client's code begins and ends in 004, and what does the same."""

    first: str
    last: str
    ours: Path

    def read(self) -> str:
        """Read it out of the source.

        Raises:
            pytest.skip.Exception: the source is not here.
        """
        files = list(SEEDS.glob("004*"))
        if not files:
            pytest.skip("the sources are not beside the repository; our own client has run")
        text = files[0].read_text("utf-8")
        start = text.index(self.first)
        return text[start : text.index(self.last, start) + len(self.last)] + "\n"


PYTHON: Final = Example(
    "import asyncio, json, base64\n", "asyncio.run(chat_streaming())", HERE / "client.py"
)
JAVASCRIPT: Final = Example(
    "// -- Reference audio for voice cloning",
    "ws.onclose = () => console.log('Connection closed');",
    HERE / "client.mjs",
)
ORIGINS: Final = ("the source's", "our own")


DIALECTS_OF: Final = {"000": "duplex-v1", "001": "realtime", "004": "legacy-chat"}
"""The sources that show messages; 002 tells of them in words."""
CONTENTS: Final = frozenset({"text", "image", "audio", "video"})
MESSAGES: Final = {"000": 8, "001": 11, "004": 4}
"""How many they show: an example that is not found would be one that is not tried."""


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A server with the scripted model."""
    with live_server() as server:
        yield server


@pytest.fixture(scope="module")
def tiny() -> Iterator[LiveServer]:
    """A server with the model that is in the repository."""
    with live_server("--slots", "1", model="tiny") as server:
        yield server


def place(example: Example, origin: str, folder: Path) -> Path:
    """Put a client and its reference audio into a folder."""
    voice = np.frombuffer(pcm(1.0), "<f4")
    (folder / "ref.f32").write_bytes(voice.tobytes())
    soundfile.write(folder / "ref.wav", voice, 16_000, subtype="FLOAT")
    client = folder / f"client{example.ours.suffix}"
    client.write_text(example.ours.read_text("utf-8") if origin == "our own" else example.read())
    return client


def run_python(client: Path, server: LiveServer) -> str:
    """Run a Python client to its end; returns what it said."""
    host, port = server.address
    command = [sys.executable, str(HERE / "shims.py"), str(client), f"{host}:{port}"]
    return run(command, client.parent)


def run_javascript(client: Path, server: LiveServer) -> str:
    """Run a JavaScript client to its end; returns what it said."""
    if NODE is None:
        pytest.skip("node is not installed")
    host, port = server.address
    voice = str(client.parent / "ref.f32")
    shims = ["--experimental-websocket", "--no-warnings", str(HERE / "shims.mjs")]
    return run([NODE, *shims, str(client), f"{host}:{port}", voice], client.parent)


def run(command: list[str], folder: Path) -> str:
    """Run a command; it must end well and complain of nothing."""
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_python_client_of_004_runs(origin: str, server: LiveServer, tmp_path: Path) -> None:
    """Somebody's Python client, written for 004, does not get along with us."""
    said = run_python(place(PYTHON, origin, tmp_path), server).splitlines()
    assert re.fullmatch(r"Prefill done, \d+ input tokens", said[0])
    assert [line for line in said if line.startswith("Streaming: ")] == [
        "Streaming: turn 0: ",
        "Streaming: turn 0: Hello! ",
        f"Streaming: {ECHO}",
    ]
    assert said[4] == f"Final: {ECHO}"
    assert re.fullmatch(r"Tokens: \d+ in, 4 out", said[5])
    assert said[6:] == ["Received 0.7s of audio"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_javascript_client_of_004_runs(origin: str, server: LiveServer, tmp_path: Path) -> None:
    """Somebody's page, written for 004, does not get along with us."""
    said = run_javascript(place(JAVASCRIPT, origin, tmp_path), server).splitlines()
    assert re.fullmatch(r"Prefill done, \d+ input tokens", said[0])
    assert said[1:4] == ["Streaming: turn 0: ", "Streaming: turn 0: Hello! ", f"Streaming: {ECHO}"]
    assert said[4] == f"Final text: {ECHO}"
    assert re.fullmatch(r"Tokens: \d+ in, 4 out", said[5])
    assert said[6:] == ["Connection closed", "Played 16800 samples"]


def test_the_clients_of_004_run_with_a_model(tiny: LiveServer, tmp_path: Path) -> None:
    """The clients get along with the script, and not with a model."""
    origin = "the source's" if list(SEEDS.glob("004*")) else "our own"
    for example, run_client in ((PYTHON, run_python), (JAVASCRIPT, run_javascript)):
        if run_client is run_javascript and NODE is None:
            continue
        said = run_client(place(example, origin, tmp_path), tiny)
        assert re.search(r"Prefill done, \d+ input tokens", said)
        final = re.search(r"^Final(?: text)?: (.+)$", said, re.MULTILINE)
        assert final, said
        assert f"Streaming: {final[1]}" in said
        heard = re.search(r"(?:Received|Played) ([0-9.]+)", said)
        assert heard, said
        assert float(heard[1]) > 0


@pytest.mark.parametrize("example", [PYTHON, JAVASCRIPT], ids=["python", "javascript"])
def test_a_client_says_what_goes_wrong(
    example: Example, server: LiveServer, tmp_path: Path
) -> None:
    """The runs pass whatever the server answers: here it must refuse, and the clients say so."""
    client = place(example, "our own", tmp_path)
    client.write_text(client.read_text("utf-8").replace("audio_assistant", "opera"))
    run_client = run_python if example is PYTHON else run_javascript
    if example is PYTHON:
        assert "Error: $.tts.mode" in run_client(client, server)
    else:
        with pytest.raises(AssertionError, match=r"Error: \$\.tts\.mode"):
            run_client(client, server)


# -- the messages that the sources show -----------------------------------------------------------


def shown_messages(text: str) -> Iterator[dict[str, Any]]:
    """Find the messages in a source: JSON objects with a type, and those of 004, which has none."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            body, end = decoder.raw_decode(text, at)
        except ValueError:
            end = at + 1
        else:
            if body.get("type") in CONTENTS:
                pass  # a line of the Python example
            elif "type" in body or "messages" in body:
                yield body
            elif isinstance(body.get("content"), list):
                yield {"messages": [body]}
        at = text.find("{", end)


def heard(value: Any) -> Any:
    """Put media in the place of what a source writes for it."""
    if isinstance(value, list):
        return [heard(item) for item in value]
    if isinstance(value, dict):
        return {key: heard(item) for key, item in value.items()}
    is_media = isinstance(value, str) and value.startswith("<base64")
    return base64(pcm(1.0)) if is_media else value


@pytest.mark.parametrize("source", DIALECTS_OF)
def test_the_messages_that_a_source_shows_are_ours(source: str) -> None:
    """A client that copies a message out of its documentation is refused."""
    files = list(SEEDS.glob(f"{source}_*"))
    if not files:
        pytest.skip("the sources are not beside the repository")
    dialect = DIALECTS_OF[source]
    found = [heard(body) for body in shown_messages(files[0].read_text("utf-8"))]
    assert len(found) == MESSAGES[source]
    for body in found:
        if problems(dialect, "client", body):
            is_chat = body["type"] == "response.done"
            assert DIALECTS[dialect].decode(body, "chat" if is_chat else "video"), body
