"""Sessions that speak with a small published voice: through the engine, alone and in company.

What holds for any session (`test_engine_isolation.py`, `test_rebuild.py`) is tried with it, since
a turn's state is larger here than any other part of a session's.
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import pytest
import soundfile
import torch
from click.testing import CliRunner

from protocol.values.model import DuplexConfig, Opening, SpeechConfig, Turn, Voice
from runtime.cli import main
from runtime.commands.doctor import examine
from runtime.model.backends.base import BackendError, BackendRefused
from runtime.model.backends.minicpmo import voices
from runtime.model.backends.minicpmo.device import plan
from runtime.model.backends.minicpmo.model import VOCODER, DuplexModel
from runtime.model.backends.minicpmo.session import SteppedSession
from runtime.model.backends.minicpmo.vocoder import Vocode
from runtime.model.backends.minicpmo.voices import PublishedVoice, planned
from runtime.model.backends.minicpmo.work import Steps
from runtime.model.engine.backend import EngineBackend
from runtime.model.models import ModelUnusableError, load_backend
from runtime.model.voice.checkpoint import FLOW, FLOW_YAML, HIFT
from runtime.model.voice.reference import CODES_FILE, RATE_HZ, SPEAKER_FILE
from runtime.model.voice.vocoder import Piece, Vocoder, VoiceSteps
from runtime.settings.extras import install
from runtime.settings.settings import Settings
from tests.models import random_model, random_voice
from tests.models.blocking import alone, open_session
from tests.models.random_model import SMALL, opening, unit
from tests.models.random_voice import STEPS, reference_pcm, write_checkpoint
from tests.project.sampling import ONE_LOOP, sample
from tests.runtime.model.test_engine_chat import answered
from tests.runtime.model.test_engine_isolation import Second, Tenant, by_itself, together
from tests.runtime.model.test_minicpmo_chat import ask, facts, short_speech  # noqa: F401
from tests.runtime.model.test_rebuild import (
    Done,
    among,
    go_on,
    on_its_own,
    past_of,
    rebuild,
    run_to_the_end,
)

ROOM: Final[dict[str, Any]] = {
    **SMALL,
    "max_position_embeddings": 1024,
    "tts_config": {**SMALL["tts_config"], "max_position_embeddings": 1024},
}
"""As small as a model can be, with room for turns of many units."""
SLOTS: Final = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as published, of 1.6 MB; not to be changed."""
    return write_checkpoint(tmp_path_factory.mktemp("spoken"), ROOM)


@pytest.fixture(scope="module")
def model(folder: Path) -> DuplexModel:
    return DuplexModel.load(folder, slots=SLOTS, voice_steps=STEPS)


@pytest.fixture
def changed(folder: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    return Path(shutil.copytree(folder, tmp_path / "model"))


def published(model: DuplexModel) -> Vocoder:
    """What computes the model's voice."""
    voice = model.runner.vocoder
    assert isinstance(voice, PublishedVoice)
    return voice._vocoder


def load(folder: Path, **options: Any) -> DuplexModel:
    return DuplexModel.load(folder, **{"slots": 1, "voice_steps": STEPS, **options})


@attrs.frozen(kw_only=True)
class Caller(Tenant):
    """A session with a voice of its own."""

    @property
    def opening(self) -> Opening:
        number, samples = self.voice
        pcm = reference_pcm(number)[:samples].tobytes()
        return attrs.evolve(super().opening, voice=Voice(tts_pcm=pcm))


def caller(number: int, units: int, voice: int | None = None, **befalls: Any) -> Caller:
    """A session that speaks in most seconds; `befalls` has what befalls its units, by their index.

    Voices last from half a second to one; every fourth is that of sessions without a sound.
    """
    voice = number if voice is None else voice
    config = DuplexConfig(force_listen_count=0, listen_prob_scale=0.0)
    seconds = tuple(
        Second(
            index=index,
            place=100 * number + index,
            force_listen=index % 5 == 4,
            **befalls.get(f"at_{index}", {}),
        )
        for index in range(units)
    )
    samples = 0 if voice % 4 == 3 else 8_000 + 500 * (voice % 16)
    return Caller(
        instructions="", voice=(voice, samples), config=config, seed=number, seconds=seconds
    )


# -- alone and in company --------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize(("count", "units"), sample([(2, 7), (5, 5), (16, 6)], [(16, 3)]))
def test_a_session_sounds_the_same_alone_and_in_company(
    model: DuplexModel, count: int, units: int
) -> None:
    """A replay, which has one session, would hear other bytes than the caller did (B8)."""
    befalls = {"at_1": {"interrupt_at": 24, "fail_at": 9}, "at_2": {"fail_at": 60}}
    company = [(0, 0, [caller(0, units, **befalls)])]
    for slot in range(1, count):  # Neighbours come late, are interrupted, leave, and others come.
        again = {"at_0": {"interrupt_at": 7 * slot % 40}} if slot % 3 == 1 else {}
        tenants = [caller(slot, 1 + slot % units), caller(slot + 20, 1, voice=slot, **again)]
        company.append((slot, 11 * slot, tenants if count < SLOTS else tenants[slot % 2 :][:1]))
    diaries = together(model, company, 64)
    for slot in (0, count - 1):
        tenant, recorded = company[slot][2][0], diaries[slot][0]
        assert by_itself(model, tenant, recorded, (slot + 3) % SLOTS) == recorded
    said = [row for of_slot in diaries for diary in of_slot for row in diary[1:]]
    spoken = [len(value) for row in said for value in row if isinstance(value, bytes) and value]
    assert len(spoken) > 0.6 * len(said)


def test_a_leak_is_caught(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would be green whatever the voice does."""
    vocoder = published(model)
    monkeypatch.setattr(vocoder, "steps", VoiceSteps(vocoder.flow, vocoder.hift, (1, 4)))
    company = [(slot, 0, [caller(slot, 2)]) for slot in range(3)]
    recorded = together(model, company, 64)[0][0]
    assert by_itself(model, company[0][2][0], recorded, 3) != recorded


def test_a_rebuilt_session_sounds_as_before(folder: Path, model: DuplexModel) -> None:
    """A caller would hear that a worker was lost, or that its session was forked."""
    tenant, company, late = caller(40, 7), caller(41, 3), frozenset[int]()
    unbroken, past_units, lives = list[Done](), 4, list[list[Done]]()
    session = model.session(tenant.opening, slot=0)
    on_its_own(
        model, run_to_the_end(session, go_on(session, tenant.seconds[:past_units], late, unbroken))
    )
    past = past_of(unbroken)
    assert any(each.is_voiced and each.result.codec_ids for each in past)  # Amid a turn.
    on_its_own(model, go_on(session, tenant.seconds[past_units:], late, unbroken))
    session.release()
    for other, exact in ((load(folder, slots=2), True), (model, True), (model, False)):
        again, rebuilt = other.session(tenant.opening, slot=1), list[Done]()

        def second_life(again: Any = again, rebuilt: Any = rebuilt, exact: bool = exact) -> Any:
            yield from again.open()
            yield from rebuild(again, past, exact=exact)
            yield from go_on(again, tenant.seconds[past_units:], late, rebuilt)

        beside, lived = other.session(company.opening, slot=0), list[Done]()
        life = run_to_the_end(beside, go_on(beside, company.seconds, late, lived))
        among(other, [second_life(), life])
        for each in (again, beside):
            each.release()
        if exact:
            assert [one.facts for one in rebuilt] == [one.facts for one in unbroken[past_units:]]
        else:  # Its logits differ by rounding.
            assert [one.result.codec_ids for one in rebuilt] == [
                one.result.codec_ids for one in unbroken[past_units:]
            ]
        lives.append(lived)
    assert [one.facts for one in lives[0]] == [one.facts for one in lives[1]]


@pytest.mark.soak  # `test_a_rebuilt_session_sounds_as_before` makes a voice again, too.
def test_a_voice_that_lost_its_place_sounds_the_same(folder: Path) -> None:
    """A caller would hear another voice once more callers come than voices are kept."""
    wide = load(folder, slots=8)
    company = [(slot, 0, [caller(4 * slot, 3)]) for slot in range(6)]
    heard = together(wide, company, 64)
    vocoder = wide.runner.vocoder
    assert isinstance(vocoder, PublishedVoice)
    vocoder._vocoder._voices_max = 1
    assert together(wide, company, 64) == heard
    assert len(vocoder._vocoder._voices) == 1


def caches() -> dict[int, int]:
    """The bytes of all rows of turns and voices that are in memory, by where they are."""
    gc.collect()
    pieces = [each.rows for each in gc.get_objects() if type(each) is Piece]
    stores = [rows.untyped_storage() for rows in pieces if rows.numel()]
    return {each.data_ptr(): each.nbytes() for each in stores}


def talk(session: SteppedSession, units: int) -> Steps[int]:
    """Speak for so many units, and stay open; the bytes of sound."""
    yield from session.open()
    spoken = 0
    for index in range(units):
        result = yield from session.unit(unit(index), None)
        spoken += len(result.pcm)
        yield from session.finalize(index, interrupted=False)
    return spoken


@pytest.mark.soak
def test_a_voice_for_each_session_takes_what_is_planned(folder: Path) -> None:
    """64 callers with 64 voices would take more memory than the slots were counted by."""
    count, before = sample(64, 12), caches()
    model = load(folder, slots=count)
    here, what = torch.device("cpu"), torch.float32
    needs = planned(plan(model.runner.config, what), folder / VOCODER, what, here, STEPS)
    kept = list[int]()
    for generation in range(2):
        sessions = list[SteppedSession]()
        for slot in range(count):
            voice = Voice(tts_pcm=reference_pcm(generation * count + slot, 6.0).tobytes())
            what = opening(voice=voice, listen_prob_scale=0.0, force_listen_count=0)
            sessions.append(model.session(what, slot=slot))
            assert alone(talk(sessions[-1], 4), model.compute)
        kept.append(sum(size for at, size in caches().items() if at not in before))
        for session in sessions:
            session.release()
    assert kept[0] > 0.4 * count * needs.session_bytes["vocoder"]
    assert max(kept) <= count * needs.session_bytes["vocoder"]
    vocoder = model.runner.vocoder
    assert isinstance(vocoder, PublishedVoice)
    assert len(vocoder._vocoder._voices) == count


def chat(number: int, **what: Any) -> Turn:
    """A spoken answer, in a voice of its own."""
    speech = SpeechConfig(voice_pcm=reference_pcm(number).tobytes())
    what = {"speech": speech, "max_new_tokens": 20, **what}
    return ask(seed=number, **what)


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.anyio
async def test_a_spoken_answer_sounds_the_same_alone_and_in_company(model: DuplexModel) -> None:
    """A question asked again would be answered in another voice."""
    turns = [chat(number, max_new_tokens=4 + 5 * number) for number in range(3)]
    alone = [facts(*random_model.answer(model, turn)[1:]) for turn in turns]
    backend, found = EngineBackend(model), dict[int, tuple[object, ...]]()

    async def one(number: int) -> None:
        found[number] = await answered(backend, turns[number], number)

    async with anyio.create_task_group() as tasks:
        for number in range(len(turns)):
            tasks.start_soon(one, number)
    assert [found[number] for number in range(len(turns))] == alone


def test_the_first_sound_of_an_answer_comes_sooner(model: DuplexModel) -> None:
    """A caller would wait for ten codes more."""
    _, chunks, result = random_model.answer(model, chat(3, max_new_tokens=30))
    pieces = [chunk for chunk in chunks if chunk.pcm]
    counts = [len(piece.codec_ids) for piece in pieces]
    assert counts[:3] == [15, 25, 25]
    assert [len(piece.pcm) for piece in pieces[:3]] == [4 * 960 * count for count in counts[:3]]
    assert result.pcm


# -- voices ----------------------------------------------------------------------------------------


def test_a_session_without_reference_has_the_default_voice(model: DuplexModel) -> None:
    """A client that sends no voice would be answered in text alone."""
    vocoder = model.runner.vocoder
    assert isinstance(vocoder, PublishedVoice)
    own, default = vocoder.open(reference_pcm(7)), vocoder.open(np.zeros(0, np.float32))
    assert own is not None
    assert default is not None
    assert own.digest != default.digest
    assert vocoder.open(reference_pcm(7)) is own


def test_without_any_reference_a_session_gets_text(
    changed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A session would be refused, or have the voice of the one before it."""
    shutil.rmtree(changed / VOCODER)
    random_voice.write_folder(changed / VOCODER)
    (changed / "assets" / voices.DEFAULT_VOICES[0]).unlink()
    silent = load(changed, slots=2)
    with caplog.at_level(logging.WARNING, "antiphon.model"):
        result = open_session(silent, opening(listen_prob_scale=0.0)).run_unit(unit(0))
    assert (result.pcm, result.codec_ids) == (b"", ())
    assert result.text
    assert "without reference audio" in caplog.text
    voice = Voice(tts_pcm=reference_pcm(1).tobytes())
    assert open_session(silent, opening(voice=voice, listen_prob_scale=0.0)).run_unit(unit(0)).pcm
    says = {it.check: it.says for it in examine(Settings(model=str(changed))).findings}
    assert "sessions without reference audio get text" in says["vocoder"]


def test_too_short_a_reference_is_refused(model: DuplexModel) -> None:
    """It would fail second after second, or after the whole prefill of a chat."""
    short = reference_pcm(1, 0.4).tobytes()
    with pytest.raises(BackendRefused, match=r"0\.40 s is below 0\.5 s"):
        open_session(model, opening(voice=Voice(tts_pcm=short)))
    with pytest.raises(BackendError, match=r"0\.40 s is below 0\.5 s"):
        random_model.answer(model, chat(1, speech=SpeechConfig(voice_pcm=short)))
    text = opening(voice=Voice(tts_pcm=short), generate_audio=False)
    open_session(model, text).release()


def test_reference_sounds_that_are_kept_are_bounded(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server would grow with every voice that a client makes up."""
    monkeypatch.setattr(voices, "REFERENCES_MAX", 3)
    vocoder = model.runner.vocoder
    assert isinstance(vocoder, PublishedVoice)
    kept = [vocoder.open(reference_pcm(number, 0.5)) for number in range(5)]
    assert len(vocoder._read) == 3
    again = [vocoder.open(reference_pcm(number, 0.5)) for number in (4, 0)]
    assert again[0] is kept[4]
    assert again[1] is not kept[0]
    assert again[1] is not None
    assert kept[0] is not None
    assert again[1].digest == kept[0].digest


def test_it_is_known_by_its_steps_and_its_default_voice(folder: Path, changed: Path) -> None:
    """A replay with other steps, or another default voice, would be compared, and differ."""
    here = load(folder).info
    assert here.deterministic
    assert here.speaks
    assert here.fingerprint["voice_steps"] == str(STEPS)
    assert load(folder, voice_steps=STEPS + 1).info.fingerprint != here.fingerprint
    other = changed / "assets" / voices.DEFAULT_VOICES[0]
    shutil.copy(other, other.with_name(voices.DEFAULT_VOICES[1]))
    assert load(changed).info.fingerprint == here.fingerprint
    other.write_bytes(other.read_bytes()[:-2] + b"\1\1")
    assert load(changed).info.fingerprint != here.fingerprint


def test_what_is_computed_together_is_not_exact(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU a session's sound would be promised that depends on its neighbours."""
    vocoder = model.runner.vocoder
    assert isinstance(vocoder, PublishedVoice)
    assert vocoder._vocoder.repeats()
    steps = random_voice.vocoder(sizes=(1, 4))
    steps._seed, steps._table = vocoder._vocoder._seed, vocoder._vocoder._table
    batched = PublishedVoice(steps, vocoder._references, None)
    assert not batched.is_exact
    exact = PublishedVoice(random_voice.vocoder(sizes=(1,)), vocoder._references, None)
    assert exact.is_exact
    assert exact.fingerprint["voice"] == "token2wav in steps of 1"
    assert batched.fingerprint != vocoder.fingerprint
    voice = vocoder.open(reference_pcm(1))
    requests = [
        Vocode(codes=(7,) * 28, state=None, last=False, voice=voice, key=str(key))
        for key in range(3)
    ]
    for (pcm, _), (other, _) in zip(vocoder.sound(requests), batched.sound(requests), strict=True):
        assert np.abs(pcm - other).max() < 2e-2
    drawn = iter(range(100))
    speak = vocoder._vocoder.speak

    def unsteady(chunks: Any, **how: Any) -> Any:
        (one,) = speak(chunks, **how)
        return [attrs.evolve(one, pcm=one.pcm + next(drawn))]

    monkeypatch.setattr(vocoder._vocoder, "speak", unsteady)
    assert not vocoder._vocoder.repeats()


# -- folders ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FLOW_YAML, FLOW, HIFT, CODES_FILE, SPEAKER_FILE])
def test_a_folder_without_a_file_is_served_in_text(
    changed: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A model would be refused for want of a voice, or its operator not told why it is silent."""
    (changed / VOCODER / name).unlink()
    with caplog.at_level(logging.WARNING, "antiphon.model"):
        assert not load(changed).info.speaks
    assert f"{name} is missing" in caplog.text
    found = examine(Settings(model=str(changed)))
    (finding,) = [each for each in found.findings if each.check == "vocoder"]
    assert (found.would_serve, finding.state) == (True, "note")
    assert name in finding.do


def test_without_onnxruntime_it_is_served_in_text(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without the extra would not start, or speak in no voice."""
    monkeypatch.setattr(voices, "find_spec", lambda _: None)
    with caplog.at_level(logging.WARNING, "antiphon.model"):
        silent = load(folder)
    assert not silent.info.speaks
    assert silent.info.fingerprint["voice"] == "none"
    assert install("voice") in caplog.text
    result = open_session(silent, opening(listen_prob_scale=0.0)).run_unit(unit(0))
    assert (result.is_listen, result.pcm) == (False, b"")


class Bomb:
    """Executes as it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("executed",)


def _spoil(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        weights = torch.load(folder / name, weights_only=True)
        change(weights)
        torch.save(weights, folder / name)

    return spoil


def _write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


HOSTILE: Final[dict[str, tuple[Callable[[Path], None], str]]] = {
    "a tag": (
        _write(FLOW_YAML, b"flow: !!python/object/apply:print ['executed']\n"),
        r"flow\.yaml: flow is not a plain mapping|flow\.yaml: flow has the tag",
    ),
    "a bomb": (_write(FLOW_YAML, b"a: &a [x, x]\nb: &b [*a, *a]\n" * 3), r"flow\.yaml: "),
    "a pickle": (_spoil(FLOW, lambda it: it.update(x=Bomb())), r"flow\.pt holds more than weights"),
    "a shape": (
        _spoil(HIFT, lambda it: it.update({"generator.conv_pre.bias": torch.zeros(24)})),
        r"hift\.pt does not fit",
    ),
    "nan": (
        _spoil(FLOW, lambda it: it["encoder_proj.bias"].fill_(torch.nan)),
        r"flow\.pt has numbers that are not finite in: encoder_proj\.bias",
    ),
    "no network": (_write(CODES_FILE, b"\x08\x07junk"), r"speech_tokenizer.* cannot be loaded"),
    "the wrong network": (
        lambda folder: shutil.copy(folder / CODES_FILE, folder / SPEAKER_FILE) and None,
        r"campplus\.onnx has 2 inputs, not 1",
    ),
    "no default voice": (
        lambda folder: (folder.parent / voices.DEFAULT_VOICES[0]).write_bytes(b"RIFF") and None,
        r"HT_ref_audio\.wav: not a sound file",
    ),
    "a short default voice": (
        lambda folder: soundfile.write(
            folder.parent / voices.DEFAULT_VOICES[0], reference_pcm(0, 0.4), RATE_HZ
        ),
        r"HT_ref_audio\.wav is shorter than 0\.5 s",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize(("spoil", "says"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_folder_is_refused_by_name(
    changed: Path, spoil: Callable[[Path], None], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A folder from elsewhere would run code, or fail in the first second that is spoken."""
    spoil(changed / VOCODER)
    with pytest.raises(ModelUnusableError, match=says):
        load_backend(str(changed), 1)
    found = examine(Settings(model=str(changed)))
    if "finite" not in says:  # Of weights only the headers are read.
        (problem,) = [each for each in found.findings if each.state == "problem"]
        assert problem.check == "vocoder"
    assert "executed" not in capfd.readouterr().out


def test_serving_a_hostile_folder_ends_with_one_line(changed: Path) -> None:
    """An operator would get a traceback, or a server without a voice."""
    (changed / VOCODER / FLOW).write_bytes(b"PK")
    words = ["serve", "--port", "0", "--no-record", "--model", str(changed)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1, done.output
    assert "flow.pt" in done.output
    assert [line.partition(":")[0] for line in done.output.splitlines()][1:] == ["Error"]


def test_a_vocoder_must_know_every_code(changed: Path) -> None:
    """A code out of its table would end all sessions on a GPU."""
    shutil.rmtree(changed)
    changed.mkdir()
    write_checkpoint(changed, ROOM, {"tts_config": {"num_audio_tokens": 4226}})
    with pytest.raises(ModelUnusableError, match="the vocoder has 4224 codes, the model 4225"):
        load_backend(str(changed), 1)
    found = examine(Settings(model=str(changed)))
    assert not found.would_serve


@pytest.fixture(autouse=True)
def _no_session_is_left(model: DuplexModel) -> Iterator[None]:
    """Release what a failed opening left."""
    yield
    for slot in range(SLOTS):
        model.runner.clear(slot)
