"""Full-Duplex-Bench's folders: read as cases, and written from recordings; and stereo WAV."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
import soundfile
from click.testing import CliRunner, Result

from protocol.values.model import INPUT_RATE_HZ
from replay.export.formats import export_command
from replay.export.timeline import Words
from tests.replay.evaluated import Duplex, call, loud, scores_in
from tests.replay.test_logs import write_log

BENCH: Final[Any] = SimpleNamespace(
    **runpy.run_path(str(Path(__file__).parents[2] / "examples" / "full_duplex_bench.py"))
)
SECONDS: Final = 6
QUIET: Final = np.zeros(SECONDS * INPUT_RATE_HZ, np.float32)


def voice(*seconds: tuple[float, float]) -> Any:
    """A voice that is heard from and to some seconds."""
    return np.frombuffer(loud(*seconds, length=SECONDS), "<f4")


def sample(folder: Path, model: Any, transcript: Any = None, **annotations: Any) -> Path:
    """Write a sample as the benchmark has it."""
    folder.mkdir(parents=True)
    soundfile.write(folder / "input.wav", voice((1, 2)), INPUT_RATE_HZ)
    if model is not None:
        soundfile.write(folder / "output.wav", model, INPUT_RATE_HZ)
    files = {**annotations, **({} if transcript is None else {"output": transcript})}
    for name, body in files.items():
        (folder / f"{name}.json").write_text(json.dumps(body))
    return folder


def said(*words: tuple[str, float, float]) -> dict[str, Any]:
    """A transcript."""
    chunks = [{"text": word, "timestamp": [begin, end]} for word, begin, end in words]
    return {"text": " ".join(word for word, *_ in words), "chunks": chunks}


def bench(*words: object) -> Result:
    """Run the example."""
    return CliRunner().invoke(BENCH.main, [*map(str, words)])


def judged(folder: Path) -> tuple[int, dict[str, Any]]:
    """Judge a folder; give the exit code, and each case by its name."""
    if not (folder / "suite.toml").exists():
        assert bench("suite", folder).exit_code == 0
    result = call("--suite", folder, "--json")
    found = json.loads(result.stdout)["cases"] if result.stdout else []
    return result.exit_code, {case["name"]: case for case in found}


PAUSE: Final = {"pause": [{"text": "[PAUSE]", "timestamp": [1.2, 1.9]}]}
TURN: Final = {"turn_taking": [{"text": "[TURN-TAKING]", "timestamp": [2, 2.4]}]}
INTERRUPT: Final = {"interrupt": [{"context": "", "interrupt": "", "timestamp": [1, 2]}]}


@pytest.mark.parametrize(
    "case",
    [
        ("pause", voice((3, 3.5)), None, PAUSE, None),
        ("pause", voice((3, 5)), None, PAUSE, "the model takes the turn"),
        ("pause", voice((3, 5)), said(), PAUSE, None),
        ("turn", voice((3, 5)), None, TURN, None),
        ("turn", voice((3, 3.5)), None, TURN, "does not take the turn"),
        ("turn", QUIET, said(*[("w", 3, 3.1)] * 4), TURN, None),
        ("turn", QUIET, said(*[("w", 3, 3.1)] * 3), TURN, "does not take the turn"),
        ("turn", QUIET, said(("w", 3, 3.1), ("w", 3.9, 4.1)), TURN, None),
        ("barge", voice((0.2, 1.9)), None, INTERRUPT, "does not take the turn"),
        ("barge", voice((0.2, 3.5)), None, INTERRUPT, None),
        ("barge", QUIET, said(("a", 0, 1.9), ("b", 2.5, 2.9)), INTERRUPT, "does not take"),
        ("icc_backchannel", voice((1.5, 1.9)), None, {}, None),
        ("icc_backchannel", voice((3, 5)), None, {}, "takes the turn"),
    ],
)
def test_a_task_of_v1_is_judged_by_who_takes_the_turn(
    case: tuple[str, Any, Any, dict[str, Any], str | None], tmp_path: Path
) -> None:
    """A benchmark's folder could not be judged, or would be otherwise than by its own scripts."""
    task, model, transcript, annotations, why = case
    sample(tmp_path / task / "1", model, transcript, **annotations)
    code, cases = judged(tmp_path)
    assert code == (why is not None)
    (found,) = cases.values()
    assert found["name"] == f"{task}/1"
    assert [why in it for it in found["failures"] if why] == [True] * (why is not None)


def test_what_a_language_model_judges_is_skipped(tmp_path: Path) -> None:
    """It would be called right, or wrong, by nothing."""
    overlap = {"metadata": {"context_text": "", "current_turn_text": "", "timestamps": [1, 2]}}
    sample(tmp_path / "user_backchannel" / "1", voice((3, 4)), **overlap)
    sample(tmp_path / "pause" / "1", None, **PAUSE)
    sample(tmp_path / "pause" / "2", QUIET, **PAUSE)
    v2 = tmp_path / "Daily" / "Daily.001"
    v2.mkdir(parents=True)
    for name in ("A.wav", "B.wav"):
        soundfile.write(v2 / name, QUIET, INPUT_RATE_HZ)
    code, cases = judged(tmp_path)
    assert code == 0
    assert "language model" in cases["user_backchannel/1"]["skipped"]
    assert "language model" in cases["Daily/Daily.001"]["skipped"]
    assert "no model has answered" in cases["pause/1"]["skipped"]
    assert (cases["pause/2"]["skipped"], cases["pause/2"]["failures"]) == ("", [])


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("output.json", "{", "no words with times"),
        ("output.json", "[]", "no words with times"),
        ("output.json", '{"text": "", "chunks": [{"timestamp": [1]}]}', "no words with times"),
        ("output.json", '{"text": "", "chunks": [{"timestamp": ["a", 2]}]}', "no words with times"),
        ("interrupt.json", "{}", "no JSON with $[0].timestamp"),
        ("interrupt.json", "x", "no JSON"),
        ("interrupt.json", '[{"timestamp": [1, NaN]}]', "no JSON with $[0].timestamp"),
    ],
)
def test_a_file_that_is_none_is_named(name: str, text: str, complaint: str, tmp_path: Path) -> None:
    """A traceback would not say which of a thousand."""
    folder = sample(tmp_path / "barge" / "1", voice((3, 5)), said(), **INTERRUPT)
    (folder / name).write_text(text)
    result = bench("suite", tmp_path)
    result = call("--suite", tmp_path) if result.exit_code == 0 else result
    assert complaint in result.output
    assert name in result.output or "barge/1" in result.output
    assert result.exit_code in (1, 2)


def recorded(folder: Path) -> Path:
    """Record a question in the second second, and its answer from 4.25 s to 6.75 s."""
    talk = Duplex()
    for second in range(7):
        talk.hear(second + 1, loud((0.25, 0.75) if second == 1 else (0, 0)))
        begins = {3: ("Morn", 1.0), 4: ("ing there, my ", 1.0), 5: ("friend.", 0.5)}
        text, seconds = begins.get(second, ("", 0))
        talk.speak(second + 1.25, second, seconds, text)
    talk.at(10_000_000_000)
    talk.finish()
    return write_log(folder, talk.records)


def test_recordings_are_written_as_they_are_read(tmp_path: Path) -> None:
    """The benchmark's scripts would hear another conversation."""
    log, folder = recorded(tmp_path), tmp_path / "bench"
    done = bench("folders", folder, log)
    assert (done.exit_code, "cases: 1, recordings left out: 0" in done.output) == (0, True)
    user, rate_hz = soundfile.read(folder / "1" / "input.wav", dtype="int16")
    model, _ = soundfile.read(folder / "1" / "output.wav", dtype="int16")
    assert (rate_hz, len(user)) == (INPUT_RATE_HZ, len(model))
    heard = np.frombuffer(loud((0.25, 0.75)), "<f4")
    assert np.array_equal(user[INPUT_RATE_HZ : 2 * INPUT_RATE_HZ], np.rint(heard * 32767))
    assert not user[2 * INPUT_RATE_HZ :].any()
    assert np.flatnonzero(np.abs(model) > 4000)[0] == pytest.approx(4.25 * INPUT_RATE_HZ, abs=20)
    transcript = json.loads((folder / "1" / "output.json").read_text())
    assert [it["text"] for it in transcript["chunks"]] == ["Morning", "there,", "my", "friend."]
    assert transcript["chunks"][0]["timestamp"] == [4.25, 5.583]
    assert transcript["chunks"][-1]["timestamp"] == [6.25, 6.75]
    ((turn),) = json.loads((folder / "1" / "turn_taking.json").read_text())
    assert turn["timestamp"][0] == pytest.approx(1.75, abs=0.02)
    assert judged(folder) == (0, {"1": {"name": "1", "failures": [], "skipped": ""}})
    again = bench("folders", folder, log)
    assert (again.exit_code, "File exists" in again.output) == (1, True)


def test_there_is_no_empty_folder(tmp_path: Path) -> None:
    """The benchmark would be run on nothing, and a wrong name never be noticed."""
    done = bench("folders", tmp_path / "new", tmp_path / "missing.session.zst")
    assert (done.exit_code, "was not written" in done.output) == (1, True)
    assert not (tmp_path / "new").exists()


def test_words_are_parted_where_their_text_is() -> None:
    """Two answers would run into one word, or a word that two pieces share be two."""

    def piece(begin_s: float, text: str, response: str) -> Words:
        begin = round(begin_s * 1e9)
        return Words(
            voice="model",
            at_ns=begin,
            begin_ns=begin,
            end_ns=begin + 1_000_000_000,
            text=text,
            response_id=response,
        )

    pieces = [piece(0, "one tw", "a"), piece(1, "o three", "a"), piece(2, "four", "b")]
    found = [(it["text"], it["timestamp"]) for it in BENCH.chunks_of(pieces)]
    assert found == [("one", [0, 0.5]), ("two", [0.5, 1.5]), ("three", [1.5, 2]), ("four", [2, 3])]


def test_a_recording_in_stereo_is_heard_as_its_log(tmp_path: Path) -> None:
    """The channels would be the wrong way round, or one of them late."""
    log, wav = recorded(tmp_path), str(tmp_path / "both.wav")
    assert CliRunner().invoke(export_command, [str(log), "--output", wav]).exit_code == 0
    (delay,) = [delay_ns / 1e9 for _, delay_ns in scores_in(log)["response_delay"].values]
    cases = (f"answers_by = {delay + 0.03}", f"answers_by = {delay - 0.03}", 'skipped = "not yet"')
    (tmp_path / "suite.toml").write_text(
        "".join(
            f'[[case]]\nname = "{number}"\nstereo = "both.wav"\n{case}\n'
            for number, case in enumerate(cases)
        )
    )
    code, found = judged(tmp_path)
    assert code == 1
    assert found["0"]["failures"] == []
    assert "ends at 1.7" in found["1"]["failures"][0]
    assert found["2"]["skipped"] == "not yet"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ("after = 1\nstays_silent = true", "takes_turn is judged"),
        ("takes_turn = true\nafter = -1", "a time is from 0"),
        ("takes_turn = true\nstays_silent = true", "does nothing else"),
        ('takes_turn = true\ntranscript = "../x"', "leaves the folder"),
    ],
)
def test_keys_that_do_not_go_together_are_named(keys: str, why: str, tmp_path: Path) -> None:
    """A case would be judged by half of what it says."""
    (tmp_path / "suite.toml").write_text(f'[[case]]\nname = "x"\nstereo = "x.wav"\n{keys}\n')
    result = call("--suite", tmp_path)
    assert result.exit_code == 2
    assert why in result.output
