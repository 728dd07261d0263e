"""`antiphon talk`: the conversation on virtual time, the command against a real server."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from protocol.values.limits import Mode
from protocol.values.model import UNIT_BYTES, Unit
from runtime import RUN
from runtime.cli import main
from runtime.client.errors import SessionClosedError
from runtime.client.resuming import Reconnected, Reconnecting
from runtime.client.session import ClientSession
from runtime.commands.talk import printable
from runtime.commands.talk_session import (
    ANSWER_WAIT_S,
    CLOSED_WAIT_S,
    Plan,
    Tally,
    TimedMessage,
    converse,
    cut_units,
)
from runtime.model.backends.scripted import ScriptedBackend, Speaks, Step, default_script
from tests.live.servers import url_of
from tests.sessions.in_memory import Peer, World, on_virtual_time, pcm, world

SILENCE = bytes(UNIT_BYTES)


# -- the conversation, on virtual time ------------------------------------------------------------


class PeerSocket:
    """A `Peer` as the WebSocket that a client session holds."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._read = 0

    @property
    def closed(self) -> tuple[int, str] | None:
        return self._peer.closed or (1006, "") if self._peer.is_over else None

    async def receive(self) -> str:
        await self._peer.until(lambda: len(self._peer.frames) > self._read)
        if self._read == len(self._peer.frames):
            raise SessionClosedError(*(self.closed or (1006, "")))
        self._read += 1
        return self._peer.frames[self._read - 1]

    async def send(self, message: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self._peer.is_over:
            raise SessionClosedError(*(self.closed or (1006, "")))
        self._peer.send(message)


class Notes:
    """An observer that writes down when each second went out, and all that was heard."""

    def __init__(self) -> None:
        self.sent_at_s: list[float] = []
        self.heard_of: list[TimedMessage] = []

    def sent(self, unit: int, at_s: float, *, has_sound: bool) -> None:
        self.sent_at_s.append(at_s)

    def received(self, timed: TimedMessage) -> None:
        self.heard_of.append(timed)

    def connects(self, change: Reconnecting | Reconnected, at_s: float) -> None:
        raise AssertionError(f"{change} at {at_s} s, in memory")


async def talk_in(
    place: World, plan: Plan, *, dialect: str = "realtime", mode: Mode = "audio", **more: Any
) -> tuple[Tally, Notes]:
    """Hold a conversation in a server in memory."""
    notes, tally = Notes(), Tally()
    socket = PeerSocket(place.connect(mode))
    session = ClientSession(socket, mode=mode, dialect=dialect)
    started_s = anyio.current_time()
    await converse(session, plan, notes, tally=tally, started_s=started_s, **more)
    return tally, notes


def listens_until(number: int) -> Callable[[Unit, int], Step]:
    """Make a script that speaks once, in unit `number`."""

    def script(unit: Unit, _seed: int) -> Step:
        speech = Speaks(text="yes.", pcm=bytes(4 * 24_000), end_of_turn=True)
        return Step(speech=speech if unit.index == number else None)

    return script


def test_a_long_file_does_not_drift() -> None:
    """After minutes the model would hear everything late, or units would be dropped."""

    async def body() -> None:
        async with world() as place:
            tally, notes = await talk_in(place, Plan(units=(pcm(),) * 60, silence_s_max=3))
        late_s = [at - number for number, at in enumerate(notes.sent_at_s)]
        assert min(late_s) >= 1  # a second is over before it is sent, as with a microphone
        assert max(late_s) - min(late_s) < 1e-6
        assert tally.failure is None
        assert tally.metrics.dropped_units == 0

    on_virtual_time(body)


def test_the_model_is_heard_out() -> None:
    """The answer to the last question would be cut off, or ten idle seconds would follow it."""

    async def body() -> None:
        async with world(ScriptedBackend(listens_until(5))) as place:
            plan = Plan(units=(pcm(), pcm()))
            tally, notes = await talk_in(place, plan)
        assert plan.is_answered(tally)
        assert tally.text == "yes."
        assert tally.reply_s == 1.0
        assert len(notes.sent_at_s) == 7  # two of the file, the answer in unit 5, a listen in 6

    on_virtual_time(body)


def test_an_answer_within_the_file_is_enough() -> None:
    """A recording that ends in a long pause would be followed by another one."""

    async def body() -> None:
        async with world(ScriptedBackend(listens_until(2))) as place:
            tally, notes = await talk_in(place, Plan(units=(pcm(), *(SILENCE,) * 4)))
        assert tally.failure is None
        assert len(notes.sent_at_s) == 5

    on_virtual_time(body)


@pytest.mark.parametrize("fast", [False, True])
def test_silence_is_not_for_ever(fast: bool) -> None:
    """A model that never answers would be listened to until the session's time is over."""

    async def body() -> None:
        async with world(ScriptedBackend(listens_until(99))) as place:
            plan = Plan(units=(pcm(),), silence_s_max=4, fast=fast)
            tally, notes = await talk_in(place, plan)
        assert tally.failure is None
        assert not plan.is_answered(tally)
        assert len(notes.sent_at_s) == 5
        assert tally.outcomes == 5

    on_virtual_time(body)


@pytest.mark.parametrize("dialect", ["realtime", "duplex-v1"])
def test_a_unit_counts_once(dialect: str) -> None:
    """Round trips would be those of other units where text and audio come apart."""

    async def body() -> None:
        async with world() as place:
            tally, notes = await talk_in(
                place, Plan(units=(pcm(),) * 8, fast=True), dialect=dialect
            )
        units = [found.unit for found in notes.heard_of if found.unit is not None]
        assert sorted(set(units)) == list(range(tally.units_sent))
        assert tally.outcomes == tally.units_sent == tally.listens + tally.speeches
        slowest = 490 if dialect == "realtime" else 530
        assert 70 <= min(tally.round_trips_ms) < max(tally.round_trips_ms) <= slowest + 50

    on_virtual_time(body)


def test_a_queue_is_waited_in() -> None:
    """A client at a busy server would give up, or talk before it was asked to."""

    async def body() -> None:
        backend = ScriptedBackend(slots=1)
        async with world(backend) as place, anyio.create_task_group() as tasks:
            tasks.start_soon(talk_in, place, Plan(units=(pcm(),) * 5))
            await anyio.sleep(0.5)
            tally, notes = await talk_in(place, Plan(units=(pcm(),)))
        kinds = [type(found.message).__name__ for found in notes.heard_of]
        assert kinds[0] == "Queued"
        assert tally.failure is None

    on_virtual_time(body)


def test_a_failed_unit_is_told_and_survived() -> None:
    """One bad unit would end a conversation, or pass for a good one."""

    def script(unit: Unit, seed: int) -> Step:
        return Step(fault="fail") if unit.index == 1 else default_script(unit, seed)

    async def body() -> None:
        async with world(ScriptedBackend(script)) as place:
            tally, _ = await talk_in(place, Plan(units=(pcm(),) * 2, fast=True))
        assert tally.speeches == 2
        assert tally.failure is not None
        assert "inference_error" in tally.failure

    on_virtual_time(body)


def test_a_session_that_the_server_ends_is_a_failure() -> None:
    """A script would take half a conversation for a whole one."""

    async def body() -> None:
        async with world(limit_audio_s=3) as place:
            tally, _ = await talk_in(place, Plan(units=(pcm(),) * 9))
        assert tally.failure == "the server ended the session: timeout"

    on_virtual_time(body)


def test_a_frame_that_is_refused_ends_it() -> None:
    """The same refusal would come with every second of an hour."""

    async def body() -> None:
        async with world() as place:
            plan = Plan(units=(pcm(),) * 9, frame=b"no JPEG")
            tally, notes = await talk_in(place, plan, mode="video")
        assert tally.failure is not None
        assert "$.input.video_frames[0]" in tally.failure
        assert len(notes.sent_at_s) == 1

    on_virtual_time(body)


def test_stopped_by_its_user() -> None:
    """Ctrl-C would lose what was said, or leave the server with a lost peer."""

    async def body() -> None:
        stop = anyio.Event()
        async with world() as place, anyio.create_task_group() as tasks:

            async def stop_soon() -> None:
                await anyio.sleep(5.5)
                stop.set()

            tasks.start_soon(stop_soon)
            tally, notes = await talk_in(place, Plan(units=(pcm(),) * 60), stop=stop)
        assert tally.failure is None
        assert tally.closed is not None
        assert tally.closed.client_reason == "user_stop"
        assert len(notes.sent_at_s) == 5

    on_virtual_time(body)


def test_a_server_that_goes_silent_is_left() -> None:
    """The command would hang until somebody looks."""

    async def body() -> None:
        peer, tally = Peer(), Tally()
        for frame in (
            '{"type":"session.queue_done"}',
            '{"type":"session.created","session_id":"x"}',
        ):
            await peer.send_frames(frame)
        session = ClientSession(PeerSocket(peer), mode="audio", dialect="realtime")
        began_s = anyio.current_time()
        plan = Plan(units=(pcm(),), fast=True)
        await converse(session, plan, Notes(), tally=tally, started_s=began_s)
        assert tally.failure == "the server did not answer a unit within 30 s"
        assert anyio.current_time() - began_s == pytest.approx(ANSWER_WAIT_S + CLOSED_WAIT_S)

    on_virtual_time(body)


def test_the_end_of_a_file_is_filled_up() -> None:
    """The last word would be lost, or a partial unit wait for ever."""
    units = cut_units(pcm(2.3))
    assert [len(unit) for unit in units] == [UNIT_BYTES] * 3
    assert b"".join(units).startswith(pcm(2.3))


def test_a_server_cannot_write_on_the_terminal() -> None:
    """A hostile server could move the cursor, clear the screen, or fake our own lines."""
    assert printable("a\x1b[2Jb\r\nc\x9bd") == "a [2Jb  c d"


# -- the command, against a real server -----------------------------------------------------------


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve the scripted model in a process; yield its address."""
    options = ["serve", "--model", "scripted", "--port", "0", "--record", str(folder)]
    command = [*RUN, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = [process.stdout.readline().strip() for _ in range(3)]
            assert said[-1] == "ready"
            yield url_of(said)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("recordings")) as address:
        yield address


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def talk(*options: str | Path) -> Result:
    """Run the command."""
    return CliRunner().invoke(main, ["talk", *map(str, options)])


def write_speech(path: Path, seconds: float = 1.5, rate_hz: int = 44_100) -> Path:
    """Write a stereo tone."""
    at = np.arange(int(rate_hz * seconds)) / rate_hz
    tone = 0.2 * np.sin(2 * np.pi * 220 * at)
    soundfile.write(path, np.stack([tone, tone], axis=1), rate_hz)
    return path


def test_a_file_is_said_and_the_reply_written(url: str, tmp_path: Path) -> None:
    """The command would not work as its help says."""
    result = talk(write_speech(tmp_path / "ask.wav"), "--url", url, "--fast")
    assert result.exit_code == 0, result.output
    assert "model:   this is second 3,  [" in result.output
    assert "you:     (speaking)" in result.output
    assert "reply: ask.reply.wav (1.8 s)" in result.output
    reply = soundfile.info(tmp_path / "ask.reply.wav")
    assert (reply.samplerate, reply.channels, reply.frames) == (24_000, 1, 42_000)


def test_a_reply_that_is_replaced_is_named_before(url: str, tmp_path: Path) -> None:
    """A user's file would be lost without a word."""
    reply = tmp_path / "ask.reply.wav"
    reply.write_text("good")
    result = talk(write_speech(tmp_path / "ask.wav"), "--url", url, "--fast")
    assert "ask.reply.wav exists and will be replaced; --reply names another" in result.stderr
    assert soundfile.info(reply).frames == 42_000


@pytest.mark.parametrize("dialect", ["realtime", "duplex-v1", "legacy-duplex"])
def test_json_is_for_programs(url: str, tmp_path: Path, dialect: str) -> None:
    """A script could not read what was said, or would wade through megabytes of base64."""
    speech = write_speech(tmp_path / "ask.wav")
    options = ["--json", "--fast", "--dialect", dialect, "--reply", "out.wav", "--url", url]
    result = talk(speech, *options)
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(result.stdout) < 8_000
    types = [line["type"] for line in lines]
    assert types[:4] == ["queue_done", "created", "sent", "listen"]
    assert types[-2:] == ["closed", "summary"]
    summary = lines[-1]
    assert summary["ok"]
    assert summary["answered"]
    assert summary["text"] == "this is second 3, that was second 4."
    assert (summary["units_listen"], summary["units_speech"]) == (4, 2)
    assert summary["reply"] == "out.wav"
    assert sum(line.get("samples", 0) for line in lines) == 42_000


def interrupt_talk(url: str, tmp_path: Path) -> dict[str, Any]:
    """Talk, and press Ctrl-C after the first answer; return the summary."""
    speech = write_speech(tmp_path / "ask.wav", 60)
    command = [*RUN, "talk", str(speech), "--url", url, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["type"] == "listen":
                break
        process.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in process.stdout]
        assert process.wait(30) == 130
    assert [line["type"] for line in lines[-2:]] == ["closed", "summary"]
    assert (lines[-1]["ended"], lines[-1]["error"]) == ("client", "interrupted")
    summary: dict[str, Any] = lines[-1]
    return summary


def test_ctrl_c_ends_it_politely(url: str, tmp_path: Path) -> None:
    """An interrupted conversation would leave a lost peer in the log, and no reply."""
    assert interrupt_talk(url, tmp_path)["reply"] == "ask.reply.wav"
    assert (tmp_path / "ask.reply.wav").exists()


def test_ctrl_c_leaves_a_reply_that_was_there(url: str, tmp_path: Path) -> None:
    """The last good reply would be lost to an empty one."""
    (tmp_path / "ask.reply.wav").write_text("good")
    assert interrupt_talk(url, tmp_path)["reply"] is None
    assert (tmp_path / "ask.reply.wav").read_text() == "good"


def test_nobody_there_is_one_line(tmp_path: Path) -> None:
    """Whoever forgot to start the server would get a traceback."""
    result = talk(write_speech(tmp_path / "ask.wav"), "--url", "ws://127.0.0.1:1")
    assert result.exit_code == 1
    advice = "is a server running there? Start one with: antiphon serve"
    told = f"Error: cannot connect to ws://127.0.0.1:1: connection refused; {advice}\n"
    assert result.stderr == told
    assert not (tmp_path / "ask.reply.wav").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nothing.wav"], "nothing.wav: No such file"),
        (["text.wav"], "text.wav: not a sound file"),
        (["ask.wav", "--url", "localhost"], "--url: 'localhost' is not the address"),
        (["ask.wav", "--frame", "text.wav"], "text.wav: "),
        (["ask.wav", "--frame", "text.wav", "--mode", "audio"], "nothing to see"),
        (["ask.wav", "--reply", "none/out.wav"], "there is no folder none"),
        (["ask.wav", "--reply", "ask.wav"], "ask.wav would be overwritten"),
    ],
)
def test_what_cannot_be_used_is_said_at_once(tmp_path: Path, options: list[str], said: str) -> None:
    """A mistake would be found after minutes of talking, or cost the user a file."""
    write_speech(tmp_path / "ask.wav")
    (tmp_path / "text.wav").write_text("hello")
    result = talk(*options)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
