"""The published vocoder in its own process: real processes, and a stand-in for the package.

What is tested is ours: that no session hears another, that states are values, and what happens when
the process is lost. That the real package is as the stand-in can only be seen with its weights.
"""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import tomllib
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo import token2wav, token2wav_worker
from runtime.model.backends.minicpmo.machine import Machine
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.model.backends.minicpmo.token2wav import FILES, PYTHON, STEPS, Options, Token2Wav
from runtime.model.backends.minicpmo.token2wav_link import Link, VoiceLost, VoiceUnavailable
from runtime.model.backends.minicpmo.vocoder import Pcm, Sounding, Vocoder, Voicing
from runtime.model.backends.minicpmo.voices import PIECES, lacking, load_vocoder
from tests.models import random_model
from tests.models.blocking import open_session
from tests.standin.stepaudio2 import DIES, HANGS, OVERFLOWS, RAISES

ROOT = Path(__file__).parents[3]
STANDIN = ROOT / "tests" / "standin"
WAIT_S = 60.0
"""For a process to start on a busy machine; it takes a fraction of a second."""

Make = Callable[..., Token2Wav]


def reference(number: int, seconds: float = 1.0) -> Pcm:
    """Some reference audio, another one for each number."""
    loud = np.random.default_rng(number).uniform(0.05, 0.5)
    noise = np.random.default_rng(number).uniform(-loud, loud, int(16_000 * seconds))
    return noise.astype(np.float32)


def codes(number: int, count: int = 28) -> tuple[int, ...]:
    """Some codes, others for each number."""
    return tuple(np.random.default_rng(number).integers(0, 4000, count).tolist())


def say(
    vocoder: Vocoder, voice: object, state: object, told: tuple[int, ...], *, last: bool = False
) -> tuple[Pcm, object]:
    """One call for one session."""
    ((pcm, after),) = vocoder.sound([Sounding(codes=told, state=state, last=last, voice=voice)])
    return pcm, after


def turn(vocoder: Vocoder, number: int, calls: int = 4) -> list[Pcm]:
    """A whole turn in a voice of its own."""
    voice, state, heard = vocoder.open(reference(number)), None, []
    for call in range(calls):
        pcm, state = say(vocoder, voice, state, codes(10 * number + call), last=call == calls - 1)
        heard.append(pcm)
    return heard


def same(left: list[Pcm], right: list[Pcm]) -> bool:
    """Equal, bit by bit."""
    return len(left) == len(right) and all(map(np.array_equal, left, right))


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in is what the worker finds."""
    monkeypatch.setenv("PYTHONPATH", str(STANDIN))


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A vocoder's folder with all its files, and a default voice beside it."""
    folder = tmp_path / VOCODER
    write_assets(folder)
    return folder


def write_assets(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in FILES:
        (folder / name).write_bytes(b"weights")
    with wave.open(str(folder.parent / "HT_ref_audio.wav"), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(b"\x01\x02" * 16_000)


@pytest.fixture
def make(assets: Path) -> Iterator[Make]:
    """Starts vocoders, and ends them after the test."""
    made: list[Token2Wav] = []

    def start(**changes: Any) -> Token2Wav:
        made.append(Token2Wav(assets, Options(steps=5), **{"slots": 4, **changes}))
        return made[-1]

    yield start
    for vocoder in made:
        vocoder.close()


# -- sound ----------------------------------------------------------------------------------------


def test_a_turn_has_all_its_samples(make: Make) -> None:
    """Speech would drift against its text, or lose its last syllable."""
    vocoder = make()
    lengths = [len(pcm) for pcm in turn(vocoder, 1)]
    assert lengths == [24_000, 24_000, 24_000, 28 * 960 + 3840]
    assert vocoder.silent_code == 4218


def test_the_sound_is_in_range_and_not_silent(make: Make) -> None:
    """A client would play noise at full volume, or nothing."""
    pcm = turn(make(), 2)[1]
    assert pcm.dtype == np.float32
    assert 0.001 < np.abs(pcm).max() <= 1.0


def test_two_processes_give_the_same(make: Make) -> None:
    """A recording would sound different each time it is run again."""
    assert same(turn(make(), 3), turn(make(), 3))


def test_sessions_do_not_hear_each_other(make: Make) -> None:
    """A caller would hear another one's voice, or the end of their sentence."""
    vocoder = make()
    alone = {number: turn(vocoder, number) for number in (1, 2, 3)}
    voices = {number: vocoder.open(reference(number)) for number in alone}
    states: dict[int, object] = dict.fromkeys(alone)
    heard: dict[int, list[Pcm]] = {number: [] for number in alone}
    for call in range(4):
        order = [1, 2, 3] if call % 2 else [3, 1, 2]
        batch = [
            Sounding(
                codes=codes(10 * number + call),
                state=states[number],
                last=call == 3,
                voice=voices[number],
            )
            for number in order
        ]
        for number, (pcm, state) in zip(order, vocoder.sound(batch), strict=True):
            heard[number].append(pcm)
            states[number] = state
    assert all(same(alone[number], heard[number]) for number in alone)
    assert not same(alone[1], alone[2])


def test_a_session_without_reference_has_the_default_voice(make: Make) -> None:
    """A client that sends no voice would be answered in text alone."""
    vocoder = make()
    voice = vocoder.open(np.zeros(0, np.float32))
    pcm, _ = say(vocoder, voice, None, codes(1))
    assert np.abs(pcm).max() > 0


def test_without_any_reference_a_session_is_text_alone(make: Make, assets: Path) -> None:
    """A session would be refused, or speak in the voice of whoever came before."""
    (assets.parent / "HT_ref_audio.wav").unlink()
    assert make().open(np.zeros(0, np.float32)) is None


def test_too_short_a_reference_is_refused(make: Make) -> None:
    """The package would fail at it, second after second."""
    with pytest.raises(BackendError, match=r"0\.10 s is below 0\.5 s"):
        make().open(reference(1, 0.1))


# -- states are values ----------------------------------------------------------------------------


def test_an_older_state_gives_the_same_again(make: Make) -> None:
    """A unit that is computed again, after another one of its batch failed, would sound wrong."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    _, state = say(vocoder, voice, None, codes(1))
    first, after = say(vocoder, voice, state, codes(2))
    again, after_again = say(vocoder, voice, state, codes(2))
    assert np.array_equal(first, again)
    third = [say(vocoder, voice, known, codes(3))[0] for known in (after, after_again)]
    assert np.array_equal(third[0], third[1])


def test_a_turn_goes_on_from_where_it_was_rolled_back_to(make: Make) -> None:
    """What a failed unit had said would be heard in the units after it."""
    vocoder = make()
    plain = turn(vocoder, 1)
    voice = vocoder.open(reference(1))
    heard, state = [], None
    for call in range(4):
        say(vocoder, voice, state, codes(99))  # Rolled back.
        say(vocoder, voice, state, codes(98, 8), last=True)  # This, too.
        pcm, state = say(vocoder, voice, state, codes(10 + call), last=call == 3)
        heard.append(pcm)
    assert same(plain, heard)


def test_what_the_worker_has_no_room_for_is_told_again(make: Make) -> None:
    """With more turns than fit into memory, some would fail or sound wrong."""
    wide, narrow = make(slots=9), make(slots=1)
    voices = [narrow.open(reference(number)) for number in range(5)]
    states: list[object] = [None] * 5
    for call in range(4):
        for number in range(5):
            told = codes(10 * number + call)
            pcm, states[number] = say(narrow, voices[number], states[number], told, last=call == 3)
            assert np.array_equal(pcm, turn(wide, number)[call])


# -- the worker is lost ---------------------------------------------------------------------------


def test_a_turn_survives_its_process(make: Make) -> None:
    """A crash of the vocoder would end every session that speaks."""
    vocoder = make()
    plain = turn(vocoder, 1)
    voice = vocoder.open(reference(1))
    first, state = say(vocoder, voice, None, codes(10))
    with pytest.raises(VoiceLost, match="the vocoder's process is lost: it ended"):
        say(vocoder, voice, state, (*codes(11)[:-1], DIES))
    assert vocoder.settle(WAIT_S)
    heard = [first]
    for call in range(1, 4):
        pcm, state = say(vocoder, voice, state, codes(10 + call), last=call == 3)
        heard.append(pcm)
    assert same(plain, heard)


def test_a_process_that_is_killed_is_started_again(make: Make) -> None:
    """The kernel's memory killer would silence the server until somebody restarts it."""
    vocoder = make()
    plain = turn(vocoder, 1)
    assert vocoder._link is not None
    vocoder._link._process.kill()
    vocoder._link._reader.join(WAIT_S)
    assert vocoder.settle(WAIT_S)
    assert same(plain, turn(vocoder, 1))


def test_a_process_that_hangs_is_not_waited_for(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hanging call would hang every session of the server."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    say(vocoder, voice, None, codes(1))
    monkeypatch.setattr(token2wav, "SOUND_WAIT_S", 0.05)
    monkeypatch.setattr(token2wav, "ITEM_WAIT_S", 0.0)
    with pytest.raises(VoiceLost, match=r"it did not answer within 0\.05 s"):
        say(vocoder, voice, None, (HANGS,) * 4)
    monkeypatch.undo()
    os.environ["PYTHONPATH"] = str(STANDIN)
    assert vocoder.settle(WAIT_S)


def test_a_vocoder_that_does_not_start_again_is_given_up(make: Make, assets: Path) -> None:
    """A server whose vocoder is broken would start it over and over, and never say so."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    (assets / "flow.pt").write_bytes(b"damaged")
    with pytest.raises(VoiceLost):
        say(vocoder, voice, None, (DIES,) * 4)
    assert not vocoder.settle(WAIT_S)
    assert not vocoder.is_ready
    with pytest.raises(VoiceLost, match="being started again"):
        say(vocoder, voice, None, codes(1))


def test_an_error_of_the_package_fails_one_unit(make: Make) -> None:
    """A session that makes the package fail would take the others' voices with it."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    plain, _ = say(vocoder, voice, None, codes(1))
    with pytest.raises(BackendError, match="the vocoder failed: RuntimeError: out of memory"):
        say(vocoder, voice, None, (RAISES,) * 4)
    assert np.array_equal(plain, say(vocoder, voice, None, codes(1))[0])


def test_a_package_that_fails_on_and_on_is_started_again(make: Make) -> None:
    """A broken GPU context would fail every unit from then on."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    plain, _ = say(vocoder, voice, None, codes(1))
    link = vocoder._link
    assert link is not None
    for _ in range(token2wav_worker.FAILURES_MAX):
        with pytest.raises(BackendError):
            say(vocoder, voice, None, (RAISES,) * 4)
    link._reader.join(WAIT_S)
    assert vocoder.settle(WAIT_S)
    assert np.array_equal(plain, say(vocoder, voice, None, codes(1))[0])


def test_a_code_that_is_none_never_reaches_the_package(make: Make) -> None:
    """On a GPU an index out of range breaks the context of all sessions."""
    vocoder = make()
    with pytest.raises(BackendError, match="codes, or one that is none"):
        say(vocoder, vocoder.open(reference(1)), None, (6561,) * 4)


def test_too_much_sound_is_malformed(make: Make) -> None:
    """Sound would be sent as another session's, or pile up at the client."""
    vocoder = make()
    with pytest.raises(VoiceLost, match="malformed answer: 72000 samples, at most 24000"):
        say(vocoder, vocoder.open(reference(1)), None, (OVERFLOWS,) * 28)
    assert vocoder.settle(WAIT_S)


GREETS = "import os, sys; hello = b'{\"hello\": {}}'; " + (
    "os.write(1, len(hello).to_bytes(4, 'little') + bytes(4) + hello); sys.stdin.buffer.read(8); "
)
MALFORMED = {
    "text": ("os.write(1, b'Traceback (most recent call last)')", "a frame of"),
    "too large": ("os.write(1, b'\\xff' * 8)", "a frame of 4294967295"),
    "half a length": ("os.write(1, b'123')", "ends within its lengths"),
    "half a frame": ("os.write(1, bytes([9, 0, 0, 0, 0, 0, 0, 0]) + b'{')", "ends too early"),
    "no JSON": ("os.write(1, bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b'{')", "not JSON"),
    "no object": ("os.write(1, bytes([1, 0, 0, 0, 0, 0, 0, 0]) + b'1')", "no object"),
    "no number": ("os.write(1, bytes([2, 0, 0, 0, 0, 0, 0, 0]) + b'{}')", "nobody asked"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_answer_ends_the_process(name: str) -> None:
    """The server would wait for an answer that cannot come, or take it for another's."""
    script, reason = MALFORMED[name]
    ends: list[str] = []
    link = Link([sys.executable, "-c", GREETS + script], lambda _, why: ends.append(why))
    link.greeting(WAIT_S)
    with pytest.raises(VoiceLost, match=reason):
        link.ask({"do": "sound", "items": []}, b"", WAIT_S)
    link.close()
    assert len(ends) == 1
    assert reason in ends[0]


# -- starting and ending --------------------------------------------------------------------------


def test_a_missing_package_is_named(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator would have to guess what to install, and where."""
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(VoiceUnavailable, match=r"no module 'stepaudio2': pip install 'minicpmo-ut"):
        Token2Wav(assets, Options(), slots=1)
    (line,) = lacking(assets, Options())
    assert line.startswith(f"{sys.executable} lacks stepaudio2, s3tokenizer")
    assert PYTHON in line


def test_a_reason_is_one_line(make: Make, assets: Path) -> None:
    """A log's reader would find half of it elsewhere."""
    (assets / "flow.pt").write_bytes(b"damaged")
    with pytest.raises(VoiceUnavailable, match=r"^RuntimeError: flow\.pt is damaged$"):
        make()


def test_missing_files_are_named(tmp_path: Path) -> None:
    """A download that is not whole would look like a broken installation."""
    (line,) = lacking(tmp_path)
    assert line.startswith("no vocoder in ")
    for name in FILES[1:]:
        (tmp_path / name).touch()
    missing, *_ = lacking(tmp_path, Options(python="/nowhere/python"))
    assert missing == f"{tmp_path / FILES[0]} is missing"


def test_an_interpreter_that_is_none_is_named(assets: Path) -> None:
    """A typing error in a setting would look like a missing package."""
    options = Options(python="/nowhere/python")
    (line,) = lacking(assets, options)
    assert line.startswith("cannot run /nowhere/python")
    with pytest.raises(VoiceUnavailable, match="cannot run /nowhere/python: No such file"):
        Token2Wav(assets, options, slots=1)


def test_loading_without_a_voice_says_why(
    assets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server would be mute, and nobody could tell."""
    monkeypatch.setenv(PYTHON, "/nowhere/python")
    with caplog.at_level(logging.WARNING):
        assert load_vocoder(assets, slots=1) is None
    assert "text alone, without speech: cannot run /nowhere/python" in caplog.text


def test_pieces_are_pieces(tmp_path: Path) -> None:
    """`tiny` would ask for a package that it does not need."""
    random_model.write_vocoder(tmp_path / "pieces")
    assert (tmp_path / "pieces" / PIECES).exists()
    assert lacking(tmp_path / "pieces") == ()
    loaded = load_vocoder(tmp_path / "pieces", slots=1)
    assert loaded is not None
    assert loaded.is_ready
    assert loaded.is_exact


def test_options_come_from_the_environment() -> None:
    """An operator's setting would be ignored."""
    assert Options.from_environment({}) == Options()
    said = {PYTHON: "/opt/voice/bin/python", STEPS: "5", token2wav.FLOAT16: "1"}
    wanted = Options(python="/opt/voice/bin/python", steps=5, float16=True)
    assert Options.from_environment(said) == wanted
    for steps in ("0", "17", "ten", "-1"):
        with pytest.raises(ValueError, match=r"steps|STEPS"):
            Options.from_environment({STEPS: steps})


def test_the_install_command_is_the_project_s() -> None:
    """The error would tell to install another version than the one that was read."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert tuple(project["dependency-groups"]["token2wav"]) == token2wav_worker.REQUIREMENTS


def test_closing_ends_the_process(make: Make) -> None:
    """Every restart of a server would leave a gigabyte on the GPU."""
    vocoder = make()
    link = vocoder._link
    assert link is not None
    vocoder.close()
    assert link._process.returncode == 0
    assert not vocoder.is_ready


def test_the_process_ends_with_its_parent(assets: Path) -> None:
    """A killed server would leave its vocoder behind."""
    code = (
        "import os, pathlib, sys; from runtime.model.backends.minicpmo.token2wav import *; "
        f"v = Token2Wav(pathlib.Path({str(assets)!r}), Options(), slots=1); os._exit(0)"
    )
    # `run` returns when nobody holds the pipe of standard error any more: both have ended.
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, timeout=WAIT_S, check=True
    )
    assert done.stderr == b""


def test_what_nobody_holds_is_forgotten(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches of turns and sessions that are over would fill the GPU."""
    vocoder = make()
    voice = vocoder.open(reference(1))
    _, state = say(vocoder, voice, None, codes(1))
    told: list[Any] = []
    tell = Link.tell

    def spy(self: Link, header: Any, body: bytes = b"") -> None:
        told.append(header)
        tell(self, header, body)

    monkeypatch.setattr(Link, "tell", spy)
    number, voice_number = state.place.number, voice.place.number  # type: ignore[attr-defined]
    del state, voice
    gc.collect()
    assert {"do": "drop", "states": [number], "voices": []} in told
    assert {"do": "drop", "states": [], "voices": [voice_number]} in told


def test_the_worker_forgets_what_it_is_told_to(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was released would stay until the memory is full."""
    monkeypatch.syspath_prepend(str(STANDIN))
    decoder = token2wav_worker.Decoder.load(str(assets), float16=False, steps=5)
    worker = token2wav_worker.Worker(decoder, states=2, voices=2, default_voice=None)
    body = np.asarray(codes(1), "<i4").tobytes()

    def ask(state: int, after: int, voice: int = 1) -> dict[str, Any]:
        item = {"voice": voice, "state": state, "next": after, "codes": 28}
        (answer,), _ = worker.sound(
            [{**item, "last": False, "seed": 1, "spend": False, "heard": True}], body
        )
        return dict(answer)

    worker.open(1, reference(1).tobytes())
    assert ask(0, 5) == {"samples": 24_000}
    assert ask(5, 6) == {"samples": 24_000}
    assert ask(5, 7) == {"samples": 24_000}  # There is room for two: 6 goes, 5 was just used.
    assert ask(6, 8) == {"lost": "state"}
    worker.drop([5], [])
    assert ask(5, 8) == {"lost": "state"}
    worker.drop([], [1])
    assert ask(7, 8) == {"lost": "voice"}
    worker.open(2, b"")
    assert ask(0, 9, voice=2) == {"error": "there is no reference audio and no default voice"}


# -- sessions -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = {"max_position_embeddings": 2048}
    changes = (random_model.SMALL, room, {"tts_config": room})
    return random_model.write_checkpoint(tmp_path_factory.mktemp("m"), *changes)


def voiced(checkpoint: Path, vocoder: Vocoder | None) -> DuplexModel:
    """The same model with another voice."""
    whole = DuplexModel.load(checkpoint, slots=1)
    machine = Machine(whole.machine.parts, vocoder, 1)
    return DuplexModel.of(machine, whole.tokens, {})


def results(model: DuplexModel, count: int = 8) -> list[Any]:
    """What a session answers, unit by unit; released afterwards."""
    session, answers = open_session(model, random_model.opening(3)), []
    for index in range(count):
        answers.append(session.run_unit(random_model.unit(index)))
        session.finalize(index, interrupted=False)
    session.release()
    return answers


def test_without_a_voice_the_same_text_is_said(checkpoint: Path, make: Make) -> None:
    """A checkpoint without its vocoder could not be served, or would say other things."""
    mute, speaking = voiced(checkpoint, None), voiced(checkpoint, make())
    without, with_voice = results(mute), results(speaking)
    assert [answer.text for answer in without] == [answer.text for answer in with_voice]
    assert not any(answer.pcm or answer.codec_ids for answer in without)
    assert any(answer.pcm and answer.codec_ids for answer in with_voice)
    assert (mute.info.speaks, speaking.info.speaks) == (False, True)


def test_a_unit_that_loses_its_voice_is_rolled_back_and_gives_text(
    checkpoint: Path, make: Make, assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the vocoder would end the session, where its text could go on."""
    vocoder = make()
    model = voiced(checkpoint, vocoder)
    plain = results(model)
    spoken = next(index for index, answer in enumerate(plain) if answer.pcm)
    session = open_session(model, random_model.opening(3))
    for index in range(spoken):
        session.run_unit(random_model.unit(index))
        session.finalize(index, interrupted=False)
    (assets / "flow.pt").write_bytes(b"damaged")
    real = Voicing.portions

    def fatal(self: Voicing, told: Any, *, last: bool) -> Any:
        portions, waiting = real(self, told, last=last)
        return [(*portion[:-1], DIES) for portion in portions], waiting

    with monkeypatch.context() as patch:
        patch.setattr(Voicing, "portions", fatal)
        with pytest.raises(BackendError, match="process is lost"):
            session.run_unit(random_model.unit(spoken))
    assert not vocoder.settle(WAIT_S)
    session.rollback(spoken)
    again = session.run_unit(random_model.unit(spoken))
    assert (again.text, again.pcm) == (plain[spoken].text, b"")
    assert not model.info.speaks
    session.release()
