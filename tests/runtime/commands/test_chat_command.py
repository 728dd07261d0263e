"""`antiphon chat`: against a real server, on a terminal, and against peers that fail."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result
from websockets.sync.server import ServerConnection

from protocol.values.messages import Response
from protocol.values.model import ChatConfig
from runtime import RUN
from runtime.cli import main
from runtime.client.terminal import UnusableError
from runtime.commands.chat import Chat, JsonAnswer, TextAnswer, read_media
from tests.live.servers import live_server
from tests.network.peers import (
    JPEG,
    WAIT_S,
    create,
    delta,
    done,
    hear,
    peer,
    place,
    refuse,
    report,
    say,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose model says what it was told, and how many pictures and sounds it was shown."""
    with live_server("--no-record") as server:
        yield server.url


def ask(*arguments: str | Path, stdin: str = "") -> Result:
    """Run the command as if it were typed."""
    return CliRunner().invoke(main, ["chat", *map(str, arguments)], input=stdin)


def write_sound(path: Path, seconds: float = 1.0) -> Path:
    """Write a tone."""
    samples = np.sin(np.arange(int(44_100 * seconds)) / 20).astype(np.float32) / 2
    soundfile.write(path, samples, 44_100)
    return path


def answering(*answers: str, heard: list[dict[str, Any]] | None = None) -> Any:
    """Make a server that answers a question a connection."""
    left = list(answers)

    def answer(websocket: ServerConnection) -> None:
        create(websocket, "turn_based")
        question = hear(websocket)["input"]
        if heard is not None:
            heard.append(question)
        text = left.pop(0)
        delta(websocket, "text", text=text)
        done(websocket, text)

    return answer


# -- one question -------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["realtime", "legacy-chat"])
@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_a_question_is_answered(url: str, dialect: str, how: str) -> None:
    """The first thing that anybody tries would not work."""
    result = ask("Good morning!", "--url", url, "--dialect", dialect, how)
    assert result.exit_code == 0, result.output
    assert result.stdout == "turn 0: Good morning! (0 pictures, 0 sounds)\n"


def test_pictures_and_sound_are_sent(url: str, tmp_path: Path) -> None:
    """The model would answer about what it never saw."""
    picture = tmp_path / "a.jpg"
    picture.write_bytes(JPEG)
    sound = write_sound(tmp_path / "a.wav")
    result = ask("?", "--image", picture, "--image", picture, "--audio", sound, "--url", url)
    assert result.stdout == "turn 0: ? (2 pictures, 1 sounds)\n", result.output


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_speech_is_written(url: str, tmp_path: Path, how: str) -> None:
    """The answer could be read, and not heard."""
    spoken = tmp_path / "out.wav"
    result = ask("Say hello.", "--speak", spoken, "--url", url, how)
    assert result.exit_code == 0, result.output
    file = soundfile.info(spoken)
    assert (file.samplerate, file.channels) == (24_000, 1)
    assert file.frames > 0
    assert f"({file.duration:.1f} s of speech)" in result.stderr


def test_a_voice_is_sent(tmp_path: Path) -> None:
    """The answer would come in another voice than was asked for."""
    heard: list[dict[str, Any]] = []
    sound = write_sound(tmp_path / "me.wav")
    speak = ("--speak", tmp_path / "out.wav")
    with peer(answering("one", "two", heard=heard)) as url:
        assert ask("?", *speak, "--voice", sound, "--url", url).exit_code == 0
        assert ask("?", *speak, "--voice", "anna", "--url", url).exit_code == 0
    assert heard[0]["tts"]["ref_audio_data"]
    assert heard[1]["tts"]["ref_audio_path"] == "anna"


def test_a_voice_that_is_nowhere_is_named(url: str, tmp_path: Path) -> None:
    """A user would not learn that a file's name was taken for one of the library."""
    result = ask("?", "--speak", tmp_path / "out.wav", "--voice", "bob", "--url", url)
    assert result.exit_code == 1
    assert "'bob' is neither a file here nor in the server's library" in result.stderr


def test_json_is_for_programs(url: str) -> None:
    """A script could not read what was said."""
    result = ask("Hello", "--json", "--speak", os.devnull, "--url", url)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert lines[0]["type"] == "created"
    assert lines[0]["recording"] == "off"
    assert {line["type"] for line in lines[1:-1]} == {"delta"}
    assert lines[-1]["type"] == "response"
    assert lines[-1]["text"] == "".join(line.get("text", "") for line in lines[:-1])
    assert lines[-1]["speech_s"] > 0
    assert lines[-1]["reason"] == "turn_end"


def test_standard_input_is_a_question(url: str) -> None:
    """A pipe could not ask."""
    result = ask("--url", url, stdin="Hello there\n")
    assert result.stdout == "turn 0: Hello there (0 pictures, 0 sounds)\n"


def test_the_system_message_and_settings_are_sent() -> None:
    """A setting would be lost on its way."""
    heard: list[dict[str, Any]] = []
    with peer(answering("ok", heard=heard)) as url:
        ask("?", "--system", "Be brief.", "--max-tokens", "7", "--temperature", "0", "--url", url)
    (question,) = heard
    assert question["messages"][0] == {"role": "system", "content": "Be brief."}
    assert question["generation"] == {"max_new_tokens": 7, "temperature": 0.0}


def test_text_cannot_steer_the_terminal() -> None:
    """A server could write over what stands on the screen."""
    with peer(answering("a\x1b[2Jb\n\tc\r")) as url:
        assert ask("?", "--url", url).stdout == "a [2Jb\n\tc \n"


def test_a_wait_and_a_limit_are_told() -> None:
    """Whoever waits, or reads half an answer, would not know why."""

    def answer(websocket: ServerConnection) -> None:
        create(websocket, "turn_based")
        hear(websocket)
        say(websocket, "session.queued", **place(2))
        done(websocket, "half", "length")

    with peer(answer) as url:
        result = ask("?", "--url", url)
        assert "place 2 of 3" in result.stderr
        assert "token limit" in result.stderr
        assert result.stdout == "half\n"
        lines = ask("?", "--json", "--url", url).stdout.splitlines()
        assert [json.loads(line)["type"] for line in lines] == ["created", "queued", "response"]


# -- what goes wrong ----------------------------------------------------------------------------


def test_nobody_there() -> None:
    """A forgotten server would be a traceback."""
    result = ask("?", "--url", "ws://127.0.0.1:1")
    assert result.exit_code == 1
    assert "cannot connect" in result.stderr
    lines = ask("?", "--json", "--url", "ws://127.0.0.1:1").stdout.splitlines()
    assert json.loads(lines[-1])["type"] == "error"


def test_what_the_server_reports_is_told() -> None:
    """A refusal would look like an empty answer."""

    def answer(websocket: ServerConnection) -> None:
        create(websocket, "turn_based")
        hear(websocket)
        report(websocket, "inference_error", "out of luck")

    with peer(answer) as url:
        result = ask("?", "--url", url)
    assert result.exit_code == 1
    assert "out of luck (inference_error)" in result.stderr
    with peer(refuse) as url:
        assert "queue_full" in ask("?", "--url", url).stderr


UNUSABLE: dict[str, tuple[list[str], str]] = {
    "no image": (["--image", "README.md"], "no JPEG, PNG or WebP"),
    "missing": (["--image", "nothing.png"], "nothing.png: No such file"),
    "no sound": (["--audio", "README.md"], "not a sound file"),
    "no video": (["--video", "README.md"], "no video"),
    "voice": (["--voice", "anna"], "--speak"),
    "no voice": (["--speak", "x.wav", "--voice", "nobody.wav"], "nobody.wav"),
    "folder": (["--speak", "nowhere/x.wav"], "no folder nowhere"),
    "is a folder": (["--speak", "tests"], "is a folder"),
    "address": (["--url", "localhost"], "is not the address"),
    "empty": ([], "no question"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_used_is_told_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typing error would be found by the server, after minutes in its queue."""
    monkeypatch.chdir(ROOT)
    options, why = UNUSABLE[name]
    question = [] if name == "empty" else ["?"]
    result = ask(*question, "--url", "ws://127.0.0.1:1", *options)
    assert result.exit_code == 2, result.output
    assert why in result.stderr


def test_a_short_sound_is_refused(tmp_path: Path) -> None:
    """The server would refuse it in words about samples."""
    with pytest.raises(UnusableError, match=r"short\.wav"):
        read_media((), (write_sound(tmp_path / "short.wav", 0.01),), None)


# -- a conversation -----------------------------------------------------------------------------


def test_what_was_said_is_remembered() -> None:
    """The model would not know what the second question is about."""
    heard: list[dict[str, Any]] = []
    with peer(answering("one.", "two.", heard=heard)) as url:
        how = {"dialect": "realtime", "streams": True, "speech": None, "config": ChatConfig()}
        chat = Chat(url=url, system="s", **how)
        first = chat.ask("a?", TextAnswer())
        chat.ask("b?", JsonAnswer())
    assert isinstance(first, Response)
    assert [said["content"] for said in heard[1]["messages"]] == ["s", "a?", "one.", "b?"]


class Terminal:
    """The command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        command = (*RUN, "chat", *arguments)
        environment = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self.process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.shown = ""

    def until(self, text: str) -> None:
        """Read until something is shown."""
        while text not in self.shown:
            self.shown += os.read(self._master, 4096).decode()
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        """Type, after the next prompt."""
        self.until("> ")
        os.write(self._master, text.encode())

    def end(self) -> int:
        """Wait for the end."""
        code = self.process.wait(WAIT_S)
        os.close(self._master)
        return code


def test_a_conversation_on_a_terminal() -> None:
    """One could ask once, and never follow up."""
    heard: list[dict[str, Any]] = []
    with peer(answering("one.", "two.", heard=heard)) as url:
        terminal = Terminal("--url", url)
        terminal.type("a?\n")
        terminal.until("one.")
        terminal.type("\n")
        terminal.type("b?\n")
        terminal.until("two.")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [said["content"] for said in heard[1]["messages"]] == ["a?", "one.", "b?"]


def test_an_answer_is_cut_short() -> None:
    """Ctrl-C would end the whole conversation, or nothing would stop a model that talks on."""
    heard: list[dict[str, Any]] = []
    then = answering("two.", heard=heard)
    asked: list[str] = []

    def answer(websocket: ServerConnection) -> None:
        if asked:
            then(websocket)
            return
        create(websocket, "turn_based")
        asked.append(hear(websocket)["input"]["messages"][0]["content"])
        delta(websocket, "text", text="well,")
        hear(websocket)

    with peer(answer) as url:
        terminal = Terminal("--url", url)
        terminal.type("a?\n")
        terminal.until("well,")
        terminal.process.send_signal(signal.SIGINT)
        terminal.until("discarded")
        terminal.type("b?\n")
        terminal.until("two.")
        terminal.type("\x04")
        assert terminal.end() == 0
    assert [said["content"] for said in heard[0]["messages"]] == ["b?"]


def test_an_error_leaves_the_conversation() -> None:
    """A server that is restarted would cost all that was said."""
    terminal = Terminal("--url", "ws://127.0.0.1:1")
    terminal.type("a?\n")
    terminal.until("cannot connect")
    terminal.type("\x04")
    assert terminal.end() == 0
