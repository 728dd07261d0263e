"""`antiphon talk --mic`: what is spoken is heard, and the answer is played.

The module `sounddevice` is stood in for, as no test machine has a microphone: its streams call
back from threads of their own, as PortAudio does.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import anyio
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ
from runtime.cli import main
from runtime.commands.talk import LineView
from runtime.commands.talk_session import CAPTURED_S_MAX, Devices, Plan, Tally, talk
from runtime.settings.extras import install
from tests.live.servers import live_server

SPEED = 4
"""The stand-in's second: a quarter of one."""


class Stream:
    """A stream of PortAudio: calls back for each block, until it is closed."""

    def __init__(
        self,
        *,
        samplerate: int,
        channels: int,
        dtype: str,
        blocksize: int,
        callback: Callable[..., None],
    ) -> None:
        assert (channels, dtype) == (1, "float32")
        self.rate_hz, self.frames, self.callback = samplerate, blocksize, callback
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.run)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self.over.set()
        self.thread.join()

    def run(self) -> None:
        while not self.over.wait(self.frames / self.rate_hz / SPEED):
            self.step()

    def step(self) -> None:
        raise NotImplementedError


class Microphone(Stream):
    """Hears a tone."""

    captured = 0

    def step(self) -> None:
        self.callback((np.ones(self.frames, "<f4") / 4).tobytes(), self.frames, None, None)
        Microphone.captured += self.frames


class Loudspeaker(Stream):
    """Keeps what it plays."""

    played = bytearray()

    def step(self) -> None:
        data = bytearray(4 * self.frames)
        self.callback(memoryview(data), self.frames, None, None)
        self.played += data


class PortAudioError(Exception):
    """As PortAudio's."""


@pytest.fixture
def sounddevice(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Stand in for the module, and count its threads."""
    module: Any = ModuleType("sounddevice")
    module.RawInputStream, module.RawOutputStream = Microphone, Loudspeaker
    module.PortAudioError = PortAudioError
    monkeypatch.setitem(sys.modules, "sounddevice", module)
    Microphone.captured, Loudspeaker.played = 0, bytearray()
    before = {*threading.enumerate()}
    yield module
    assert {*threading.enumerate()} <= before  # one of an earlier test may have ended meanwhile


def test_what_is_spoken_is_answered_aloud(sounddevice: Any) -> None:
    """The command would record nothing, or play nothing."""
    tally, stop = Tally(), anyio.Event()

    async def speak(url: str, devices: Devices) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(until_spoken)
            plan = Plan(microphone=devices)
            observer = LineView(Console(file=io.StringIO()))
            await talk(url, plan, observer, mode="audio", tally=tally, stop=stop)
            tasks.cancel_scope.cancel()

    async def until_spoken() -> None:
        while not tally.pcm or not any(Loudspeaker.played):  # noqa: ASYNC110 - a thread plays
            await anyio.sleep(0.02)
        stop.set()

    with live_server("--no-record") as server, Devices() as devices:
        anyio.run(speak, server.url.partition("/v1")[0], devices, backend="trio")
    assert tally.failure is None
    assert tally.closed is not None
    assert tally.closed.reason == "client"
    assert "this is second" in tally.text
    played = np.frombuffer(bytes(Loudspeaker.played), "<f4")
    said = np.frombuffer(bytes(tally.pcm), "<f4")
    first = int(np.flatnonzero(played)[0])
    begun = int(np.flatnonzero(said)[0])
    count = min(len(played) - first, len(said) - begun, OUTPUT_RATE_HZ // 4)
    assert np.array_equal(played[first : first + count], said[begun : begun + count])


def test_what_nobody_takes_is_dropped(sounddevice: Any) -> None:
    """A server that is away for a minute would answer a minute late."""
    with Devices() as devices:
        while Microphone.captured < (CAPTURED_S_MAX + 1) * INPUT_RATE_HZ:
            time.sleep(0.02)
        taken = []
        while (unit := devices.second()) is not None:
            taken.append(unit)
        assert len(taken) == CAPTURED_S_MAX
        assert all(len(unit) == 4 * INPUT_RATE_HZ for unit in taken)


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (ImportError("no module"), f"--mic needs the extra 'mic': {install('mic')}"),
        (OSError("PortAudio library not found"), "apt install libportaudio2"),
    ],
)
def test_a_missing_library_is_said(
    monkeypatch: pytest.MonkeyPatch, raises: Exception, said: str
) -> None:
    """A traceback would be all that its user sees."""

    def load(_: str) -> ModuleType:
        raise raises

    monkeypatch.setattr("runtime.commands.talk_session.import_module", load)
    result = CliRunner().invoke(main, ["talk", "--mic"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert said in result.stderr


def test_a_missing_device_is_said(sounddevice: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a loudspeaker would leave the microphone on."""

    def refuse(**_: object) -> Loudspeaker:
        raise PortAudioError("Error querying device -1")

    monkeypatch.setattr(sounddevice, "RawOutputStream", refuse)
    result = CliRunner().invoke(main, ["talk", "--mic"])
    assert result.exit_code == 2
    assert "no microphone or loudspeaker: Error querying device -1" in result.stderr


@pytest.mark.parametrize("options", [[], ["a.wav", "--mic"], ["--mic", "--fast"]])
def test_a_file_or_a_microphone(options: list[str]) -> None:
    """One of the two would be ignored."""
    result = CliRunner().invoke(main, ["talk", *options])
    assert result.exit_code == 2
    assert "name a WAV file, or give --mic" in result.stderr
