"""Suites: what a case expects of a conversation, how its manifest is read, and who may be in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner

from replay.export.timeline import Words
from replay.redact.redaction import redact_command
from tests.replay.evaluated import call, loud
from tests.replay.exported import AUDIO, CHAT, told

RATE_HZ: Final = 48_000
"""Of the WAV files: not the model's."""


def voice(*seconds: tuple[float, float]) -> Any:
    """Ten seconds of a voice that is heard from and to some seconds."""
    return np.repeat(np.frombuffer(loud(*seconds, length=10), "<f4"), 3)


def suite(folder: Path, *cases: str) -> Path:
    """Write a manifest."""
    folder.mkdir(exist_ok=True)
    (folder / "suite.toml").write_text("".join(f"[[case]]\n{case}\n" for case in cases))
    return folder


def pair(folder: Path, user: Any, model: Any) -> str:
    """Write both voices as a pair of files."""
    folder.mkdir(exist_ok=True)
    soundfile.write(folder / "input.wav", user, RATE_HZ)
    soundfile.write(folder / "output.wav", model, RATE_HZ)
    return 'name = "pair"\nuser = "input.wav"\nmodel = "output.wav"\n'


def judged(folder: Path) -> tuple[int, list[Any]]:
    result = call("--suite", folder, "--json")
    assert ("1 failed" in result.stderr) is (result.exit_code == 1)
    return result.exit_code, json.loads(result.stdout)["cases"]


ANSWERED: Final = (((1, 3),), ((3.8, 6),))
LATE: Final = (((1, 3),), ((5.5, 7),))
OVER: Final = (((4, 6),), ((2, 5.2),))
SILENT: Final = (((1, 3),), ())


@pytest.mark.parametrize(
    ("heard", "expected", "why"),
    [
        (ANSWERED, "answers_by = 1", ""),
        (LATE, "answers_by = 1", "ends at 3.00 s is answered after 2.5"),
        (SILENT, "answers_by = 1", "ends at 3.00 s is not answered"),
        (OVER, "stops_within = 1.5", ""),
        (OVER, "stops_within = 1", "speaks on for 1.2"),
        (ANSWERED, "stops_within = 1", "does not speak over the model"),
        (SILENT, "stays_silent = true", ""),
        (ANSWERED, "stays_silent = true", "is heard at 3.8"),
    ],
)
@pytest.mark.parametrize("form", ["pair", "stereo"])
def test_sound_is_judged(heard: Any, expected: str, why: str, form: str, tmp_path: Path) -> None:
    """A benchmark's folder, or a recorded call, could not be judged."""
    user, model = (voice(*spans) for spans in heard)
    if form == "pair":
        case = pair(tmp_path, user, model)
    else:
        soundfile.write(tmp_path / "both.wav", np.stack([user, model], axis=1), RATE_HZ)
        case = 'name = "pair"\nstereo = "both.wav"\n'
    code, (found,) = judged(suite(tmp_path, case + expected))
    assert code == bool(why)
    assert [why in it for it in found["failures"]] == ([True] if why else [])


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ('name = "a"\nrecording = "x"\nanswer_by = 1', "extra fields found (answer_by)"),
        ('name = "a"\nrecording = "x"\nanswers_by = "1"', "$.case[0].answers_by"),
        ('name = "a"\nrecording = "x"\nstays_silent = 1', "$.case[0].stays_silent"),
        ('recording = "x"\nstays_silent = true', "name"),
        ('name = "a"\nrecording = "../x"\nstays_silent = true', "leaves the folder"),
        ('name = "a"\nuser = "x"\nstays_silent = true', "give one of"),
        ('name = "a"\nrecording = "x"', "the case expects nothing"),
        ('name = "a"\nrecording = "x"\nanswers_by = nan', "$.case[0].answers_by"),
        ('name = "a"\nrecording = "x"\nanswers_by = -1', "from 0 to"),
        ('name = "a"\nstereo = "x"\nsays_one_of = ["yes"]', "needs a recording"),
        ('name = "a"\nrecording = "x"\nsays_one_of = [1]', "$.case[0].says_one_of[0]"),
        ("name", "is not TOML"),
    ],
)
def test_a_wrong_manifest_is_explained(case: str, why: str, tmp_path: Path) -> None:
    """A misspelt expectation would expect nothing."""
    result = call("--suite", suite(tmp_path, case))
    assert result.exit_code == 2
    assert why in result.output


def test_a_file_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    """A case whose sound was lost would pass."""
    code, (found,) = judged(suite(tmp_path, 'name = "a"\nstereo = "x.wav"\nstays_silent = true'))
    assert code == 1
    assert "cannot be read" in found["failures"][0]


def test_words_are_expected(tmp_path: Path) -> None:
    """Wrong answers in time would pass."""
    (tmp_path / "log.zst").write_bytes(AUDIO.read_bytes())
    said = "".join(it.text for it in told(AUDIO) if isinstance(it, Words) and it.voice == "model")
    cases = [
        f'name = "{word}"\nrecording = "log.zst"\nsays_one_of = ["{word}"]'
        for word in (said[:6].upper(), "tomato")
    ]
    code, (right, wrong) = judged(suite(tmp_path, *cases))
    assert code == 1
    assert not right["failures"]
    assert "tomato" in wrong["failures"][0]


def test_a_suite_is_made_of_recordings(tmp_path: Path) -> None:
    """What was recorded would have to be written down by hand."""
    made = tmp_path / "made"
    result = call(AUDIO, CHAT, "--record-suite", made)
    assert result.exit_code == 0
    assert "only duplex sessions are judged" in result.output
    assert "cases: 1, recordings left out: 1" in result.output
    code, cases = judged(made)
    assert (code, [it["failures"] for it in cases]) == (0, [[]])
    again = call(AUDIO, "--record-suite", made)
    assert again.exit_code == 2


@pytest.mark.parametrize("log", [CHAT, Path("missing.session.zst")], ids=["a chat", "missing"])
def test_there_is_no_empty_suite(tmp_path: Path, log: Path) -> None:
    """A folder without a case would be judged each night, and the wrong name never be noticed."""
    made = tmp_path / "made"
    result = call(log, "--record-suite", made)
    assert result.exit_code == 2
    said = result.stderr.splitlines()[-1]
    assert said.startswith("Error: ")
    assert "was not written" in said if log == CHAT else "no such log" in said
    assert not made.exists()


def test_a_redacted_recording_can_only_be_judged_as_it_is(tmp_path: Path) -> None:
    """A model would be judged by how it answers silence."""
    log = tmp_path / "redacted.session.zst"
    CliRunner().invoke(redact_command, [str(AUDIO), "--output", str(log), "--kind", "audio"])
    case = 'name = "a"\nrecording = "redacted.session.zst"\n'
    folder = suite(tmp_path, case + "answers_by = 1")
    for how in ((), ("--mode", "open", "--model", "scripted")):
        result = call("--suite", folder, "--json", *how)
        (found,) = json.loads(result.stdout)["cases"]
        assert (result.exit_code, "redacted" in found["skipped"]) == (2, True)
