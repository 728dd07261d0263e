"""`antiphon bench`: it runs, and says what it promises to say. No time is judged here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soundfile
import zstandard
from mcap.reader import make_reader

from protocol.values.model import UNIT_BYTES, UNIT_SAMPLES
from protocol.wire.media import check_frame
from recorder.format.records import Record
from recorder.format.spans import restore
from runtime.commands.bench.material import (
    Speech,
    Times,
    camera_frame,
    load_speech,
    output_second,
    sum_up,
    synthetic_voice,
)
from runtime.commands.bench.recording_formats import JsonLines, Mcap, Wav
from runtime.commands.bench.recording_session import make_unit
from tests.sessions.in_memory import base64, numbers

ROOT: Final = Path(__file__).parents[3]
COMMAND: Final = [sys.executable, "-P", "-c", "from runtime.cli import main; main()", "bench"]
SECONDS: Final = 2
TIMES: Final = {"count", "p50_ms", "p99_ms", "max_ms"}
COST: Final = {"session_ms", "thread_ms", "total_ms"}
UNITS: Final = {
    *("sessions", "arrival", "units", "answered", "speaking_share", "dropped", "latency"),
    *("latency_listening", "latency_speaking", "server", "p50_of_second", "p99_of_second"),
}
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
    done = subprocess.run(
        [*COMMAND, "--json", "--model", "scripted", "--seconds", str(SECONDS)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_it_says_what_it_ran_on(found: dict[str, Any]) -> None:
    """A figure cannot be compared with another machine's, or the next version's."""
    assert set(found) == {
        *("machine", "model", "speech", "seconds", "units", "latency_ratio"),
        *("replay", "recording"),
    }
    machine = {"cores", "machine", "system", "python", "torch", "antiphon", "load"}
    assert set(found["machine"]) == machine
    assert (found["model"], found["seconds"]) == ("scripted", SECONDS)


def test_every_number_is_one(found: dict[str, Any]) -> None:
    """A chart of the figures over time breaks."""
    assert all(math.isfinite(number) and number >= 0 for number in numbers(found))


def test_units_of_one_and_of_many(found: dict[str, Any]) -> None:
    """Somebody plans machines by what one session costs."""
    runs = found["units"]
    assert [(run["sessions"], run["arrival"]) for run in runs] == [
        (1, "spread"),
        (8, "spread"),
        (8, "together"),
    ]
    for run in runs:
        assert set(run) == UNITS
        assert run["units"] == run["answered"] == run["sessions"] * SECONDS
        for times in (run["latency"], run["server"]):
            assert set(times) == TIMES
            assert 0 < times["p50_ms"] <= times["p99_ms"] <= times["max_ms"]
        assert run["server"]["p50_ms"] <= run["latency"]["p50_ms"]
    assert set(found["latency_ratio"]) == {"spread", "together"}
    for ratio in found["latency_ratio"].values():
        assert set(ratio) == {"p50", "p99", "server_p50", "server_p99"}
        assert all(number > 0 for number in ratio.values())


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
    names = {*found, *UNITS, *REPLAY, *RECORDING, *FORMAT, *TIMES, *COST, "cost", "send_wait"}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_times_are_summed_up_by_rank() -> None:
    """A percentile is a time that no unit took."""
    assert sum_up([3.0, 1.0, 2.0]) == Times(count=3, p50_ms=2.0, p99_ms=3.0, max_ms=3.0)
    assert sum_up([float(number) for number in range(1, 201)]).p99_ms == 198.0


def test_seconds_follow_each_other() -> None:
    """Clients say the same second over and over, and the log stores it once."""
    speech = load_speech()
    seconds = [speech.second(number) for number in range(30)]
    assert {len(second) for second in seconds} == {UNIT_BYTES}
    joined = np.frombuffer(b"".join(seconds), "<f4")
    assert (joined[: len(speech.samples)] == speech.samples).all()
    assert len({output_second(speech, number) for number in range(40)}) == 40


def test_without_fixtures_something_like_a_voice_is_said() -> None:
    """Whoever installed it cannot measure."""
    samples = synthetic_voice()
    assert np.isfinite(samples).all()
    assert 0.01 < samples.std() < np.abs(samples).max() <= 1
    assert len(Speech(name="synthetic", samples=samples).second(3)) == 4 * UNIT_SAMPLES


def test_a_camera_s_frames_differ_and_are_whole() -> None:
    """The server refuses them, or the log stores one."""
    frames = [camera_frame(number) for number in range(3)]
    assert len(set(frames)) == 3
    for frame in frames:
        check_frame("$", frame)
