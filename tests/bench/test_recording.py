"""The bench of recording: it runs, and says what it promises to say. No time is judged here."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soundfile
import zstandard
from click.testing import CliRunner
from mcap.reader import make_reader

from protocol.values.model import UNIT_BYTES, UNIT_SAMPLES
from recorder.format.encoding import restore
from recorder.format.format import Record
from runtime.commands.bench import load_speech
from tests.bench.formats import JsonLines, Mcap, Wav
from tests.bench.gateway.material import output_second
from tests.bench.recording import make_unit, recording_command
from tests.sessions.in_memory import base64, numbers

ROOT: Final = Path(__file__).parents[2]
SECONDS: Final = 2
TIMES: Final = {"count", "p50_ms", "p99_ms", "max_ms"}
COST: Final = {"session_ms", "thread_ms", "total_ms"}
REPLAY: Final = {
    *("session_s", "units", "events", "result", "elapsed_ms", "times_real_time"),
    *("process_ms", "times_real_time_process"),
}
RECORDING: Final = {
    *("unit_bytes", "busy", "baseline", "of_baseline", "file_bytes", "baseline_file_bytes"),
    *("plain_bytes", "formats", "paced"),
}
FORMAT: Final = {
    *("name", "keeps_every_byte", "cost", "file_bytes", "plain_bytes", "of_cost"),
    "of_file_bytes",
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """A short run's JSON."""
    words = ["--json", "--model", "scripted", "--seconds", str(SECONDS)]
    done = CliRunner().invoke(recording_command, words)
    assert done.exit_code == 0, done.output
    body: dict[str, Any] = json.loads(done.stdout)
    return body


@pytest.mark.soak
def test_every_number_is_one(found: dict[str, Any]) -> None:
    """A chart of the figures over time breaks."""
    assert set(found) == {"machine", "speech", "seconds", "replay", "recording"}
    assert all(math.isfinite(number) and number >= 0 for number in numbers(found))


@pytest.mark.soak  # each log of the other tests is replayed.
def test_a_log_of_the_run_is_replayed(found: dict[str, Any]) -> None:
    """The speed is that of some other log, or of one that does not replay."""
    replay = found["replay"]
    assert set(replay) == REPLAY
    assert (replay["result"], replay["units"]) == ("identical", SECONDS)
    assert replay["elapsed_ms"] < replay["process_ms"]
    assert replay["times_real_time"] > replay["times_real_time_process"] > 0


def test_recording_stands_beside_a_baseline(found: dict[str, Any]) -> None:
    """Nobody can say whether a millisecond is much."""
    recording = found["recording"]
    assert set(recording) == RECORDING
    assert recording["unit_bytes"]["pcm_in"] == UNIT_BYTES
    assert recording["unit_bytes"]["pcm_out"] == 96_000
    assert 15_000 < recording["unit_bytes"]["jpeg_in"] < 25_000
    costs = [recording["busy"], recording["baseline"]]
    costs += [paced["cost"] for paced in recording["paced"]]
    for cost in costs:
        assert set(cost) == COST
        assert cost["session_ms"] > 0
        assert cost["thread_ms"] > 0
        assert cost["total_ms"] == pytest.approx(cost["session_ms"] + cost["thread_ms"], abs=1e-3)
    assert recording["of_baseline"] > 0
    assert 0 < recording["file_bytes"] < recording["plain_bytes"]
    for paced, sessions in zip(recording["paced"], (1, 8), strict=True):
        assert paced["sessions"] == sessions
        assert set(paced["send_wait"]) == TIMES
        assert paced["send_wait"]["count"] == sessions * SECONDS
        assert paced["send_wait"]["p50_ms"] > 0


def test_recording_stands_beside_other_formats(found: dict[str, Any]) -> None:
    """Nobody can say whether a log of our own is worth it, or is told so of one that loses."""
    recording = found["recording"]
    formats = {each["name"]: each for each in recording["formats"]}
    assert list(formats) == ["json_lines", "mcap", "wav"]
    for each in formats.values():
        assert set(each) == FORMAT
        assert set(each["cost"]) == COST
        assert each["of_file_bytes"] == pytest.approx(
            recording["file_bytes"] / each["file_bytes"], abs=1e-3
        )
        if each["keeps_every_byte"]:
            assert each["of_file_bytes"] < 1
    assert [each["keeps_every_byte"] for each in formats.values()] == [True, True, False]
    assert formats["json_lines"]["file_bytes"] == recording["baseline_file_bytes"]
    assert formats["json_lines"]["cost"] == recording["baseline"]


def test_the_formats_keep_what_they_say(tmp_path: Path) -> None:
    """The log is compared with files that lack half of the session."""
    unit = make_unit(load_speech(), 3)
    frame = {"type": "FrameReceived", "frame": unit.frame}
    speech = {"type": "UnitDone", "result": {"index": 0, "pcm": unit.pcm}}
    records = [
        Record(kind="rx", seq=5, at_ns=7, fields=frame),
        Record(kind="unit", seq=6, at_ns=8, fields=speech),
        Record(kind="tx", seq=7, at_ns=9, fields={"frame": f'{{"audio":"{base64(unit.pcm)}"}}'}),
    ]
    for kept_in in (JsonLines(tmp_path), Mcap(tmp_path), Wav(tmp_path)):
        kept_in.write(records)
        kept_in.close()
    plain = zstandard.ZstdDecompressor().decompressobj()
    lines = plain.decompress((tmp_path / "session.jsonl.zst").read_bytes()).splitlines()
    assert json.loads(lines[0])["fields"] == frame
    with (tmp_path / "session.mcap").open("rb") as file:
        reader = make_reader(file, validate_crcs=True)
        messages = [(found[1].topic, found[2].data) for found in reader.iter_messages()]
    blobs = [data for topic, data in messages if topic == "/blobs"]
    assert blobs == [unit.append.pcm, *unit.append.frames, unit.pcm]
    pieces = json.loads(messages[0][1])["fields"]["frame"]
    assert restore(blobs[it] if isinstance(it, int) else it for it in pieces) == unit.frame
    heard, rate_hz = soundfile.read(tmp_path / "user.wav", dtype="float32")
    assert (rate_hz, len(heard)) == (16_000, UNIT_SAMPLES)
    assert np.abs(heard - np.frombuffer(unit.append.pcm, "<f4")).max() < 1e-4
    assert soundfile.info(tmp_path / "model.wav").frames == 24_000
    assert (tmp_path / "jpeg").read_bytes() == unit.append.frames[0]


def test_the_keys_are_documented(found: dict[str, Any]) -> None:
    """A reader of the JSON has to guess what a figure is."""
    text = (ROOT / "docs" / "performance.md").read_text("utf-8")
    names = {*found, *REPLAY, *RECORDING, *FORMAT, *TIMES, *COST, "cost", "send_wait"}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_the_model_s_seconds_differ() -> None:
    """The log would store one of them."""
    speech = load_speech()
    assert len({output_second(speech, number) for number in range(40)}) == 40
