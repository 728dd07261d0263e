"""The embedded model's session: the rules of a unit, and what is exact bit by bit."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from protocol.model import (
    UNIT_SAMPLES,
    Cut,
    DuplexConfig,
    Finalized,
    Opening,
    Unit,
    UnitResult,
    Voice,
)
from runtime.backends.base import BackendError, ContextFull
from runtime.backends.minicpmo import DuplexModel, ModelSession
from runtime.backends.minicpmo import unit as unit_module
from runtime.backends.minicpmo.score import read_manifest, room, stage_phrase

ROOT = Path(__file__).parents[1]
HELDOUT = ROOT / "fixtures" / "speech" / "heldout"
FRAME = (ROOT / "fixtures" / "speech" / "frame.jpg").read_bytes()
JOKE = "tell me a joke"  # Its answer takes three units.
SEED = 11


@pytest.fixture(scope="module")
def model() -> DuplexModel:
    return DuplexModel.load(ROOT / "fixtures" / "tiny")


def opening(seed: int = SEED, **config: object) -> Opening:
    settings = DuplexConfig(**config)  # type: ignore[arg-type]
    return Opening(instructions="Be brief.", voice=Voice(), config=settings, seed=seed)


def units(phrase: str = JOKE, **first: object) -> list[Unit]:
    """Somebody says a phrase in a quiet room."""
    item = next(item for item in read_manifest(HELDOUT) if item.phrase == phrase)
    pcm, _ = stage_phrase(HELDOUT, item, place=0)
    return [
        Unit(index=index, pcm=second.astype("<f4").tobytes(), **first)  # type: ignore[arg-type]
        for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES))
    ]


def quiet(index: int, **flags: object) -> Unit:
    pcm = room(UNIT_SAMPLES, index).astype("<f4").tobytes()
    return Unit(index=index, pcm=pcm, **flags)  # type: ignore[arg-type]


def facts(result: UnitResult) -> UnitResult:
    """A result without its costs, which no two runs share."""
    return attrs.evolve(result, costs=UnitResult(index=0, is_listen=True).costs)


def run(session: ModelSession, what: list[Unit]) -> list[UnitResult]:
    results = []
    for unit in what:
        results.append(facts(session.run_unit(unit)))
        session.finalize(unit.index, interrupted=False)
    return results


def first_speech(model: DuplexModel, what: list[Unit]) -> tuple[ModelSession, int]:
    """A session just before the unit in which it first speaks, and that unit's index."""
    results = run(model.open(opening()), what)
    index = next(result.index for result in results if not result.is_listen)
    session = model.open(opening())
    run(session, what[:index])
    return session, index


def script(monkeypatch: pytest.MonkeyPatch, tokens: list[int]) -> None:
    """Let the model decide these ids, one after the other."""
    left: Iterator[int] = iter(tokens)
    monkeypatch.setattr(unit_module, "decide", lambda *_: next(left))


def test_answers_over_several_units_and_listens_again(model: DuplexModel) -> None:
    """Without this nothing of the demo works."""
    results = run(model.open(opening()), units())
    spoken = [result for result in results if not result.is_listen]
    assert "".join(r.text for r in spoken) == "A duet walked into a bar and shared one drink."
    assert len(spoken) > 1
    assert [r.end_of_turn for r in spoken] == [False] * (len(spoken) - 1) + [True]
    assert results[-1].is_listen


def test_speech_is_exactly_a_second_amid_a_turn(model: DuplexModel) -> None:
    """A client that plays units back to back would stutter or drift."""
    spoken = [r for r in run(model.open(opening()), units()) if not r.is_listen]
    for result in spoken[:-1]:
        assert len(result.codec_ids) == 25
        assert len(result.pcm) == 24_000 * 4
    assert 0 < len(spoken[-1].pcm) == len(spoken[-1].codec_ids) * 960 * 4 <= 24_000 * 4
    sound = np.concatenate([np.frombuffer(r.pcm, "<f4") for r in spoken])
    assert 0.03 < float(np.sqrt(np.mean(sound**2))) < 0.5


def test_two_sessions_in_turns_do_not_touch(model: DuplexModel) -> None:
    """One client's words would change another's (B8)."""
    what = units()
    alone = run(model.open(opening()), what)
    one, other = model.open(opening()), model.open(opening(seed=5))
    mixed = []
    for unit, noise in zip(what, reversed(what), strict=True):
        mixed += run(one, [unit])
        run(other, [attrs.evolve(noise, index=unit.index, frames=(FRAME,))])
    assert mixed == alone


def digest(model: DuplexModel) -> str:
    """A hash of all that a session makes: ids, bits and sound."""
    results = run(model.open(opening()), units(frames=(FRAME,)))
    return hashlib.sha256(repr(results).encode()).hexdigest()


def test_another_process_gives_the_same_bytes(model: DuplexModel) -> None:
    """A recording could not be replayed on another day."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    code += "import tests.test_runtime_backends_minicpmo as t\n"
    code += "print(t.digest(t.DuplexModel.load(t.ROOT / 'fixtures' / 'tiny')))"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == digest(model)


def test_seed_keys_the_draws(model: DuplexModel) -> None:
    """Two sessions with hot settings would say the same, or one would not repeat itself."""
    hot = {"temperature": 2.0, "top_k": 1000, "top_p": 1.0}
    first = run(model.open(opening(1, **hot)), units())
    assert first == run(model.open(opening(1, **hot)), units())
    assert first != run(model.open(opening(2, **hot)), units())


def test_rollback_restores_the_start_exactly(model: DuplexModel) -> None:
    """After `inference_error` the session would go on from half-fed state (B3)."""
    what = units()
    straight = run(model.open(opening()), what)
    session, results = model.open(opening()), []
    for unit in what:
        session.run_unit(attrs.evolve(unit, frames=(FRAME,)))
        session.rollback(unit.index)
        results += run(session, [unit])
    assert results == straight


def test_failed_unit_is_rolled_back(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the middle of generate would leave the cache half written."""
    what = units()
    session, index = first_speech(model, what)
    expected = run(first_speech(model, what)[0], what[index:])
    with monkeypatch.context() as broken:
        broken.setattr(unit_module.UnitRun, "_vocalise", lambda *_, **__: 1 / 0)
        with pytest.raises(BackendError, match="division"):
            session.run_unit(what[index])
    with pytest.raises(BackendError, match="out of order"):
        session.run_unit(what[index])
    session.rollback(index)
    assert run(session, what[index:]) == expected


@pytest.mark.parametrize(
    "cut",
    [
        Cut(stage="llm", step=0),
        Cut(stage="llm", step=2),
        Cut(stage="tts", step=0),
        Cut(stage="tts", step=13),
        Cut(stage="token2wav", step=0),
    ],
    ids=lambda cut: f"{cut.stage}-{cut.step}",
)
def test_cut_is_where_it_says_and_repeats(model: DuplexModel, cut: Cut) -> None:
    """A recording of an interrupted unit could not be replayed (B6)."""

    def once() -> list[UnitResult | Finalized]:
        session, index = first_speech(model, units())
        result = session.run_unit(units()[index], cut)
        done = session.finalize(index, interrupted=True)
        after = run(session, [quiet(index + 1, force_listen=True), quiet(index + 2)])
        assert after[0].is_listen
        return [facts(result), attrs.evolve(done, cost_us=0), *after]

    first = once()
    result = first[0]
    assert isinstance(result, UnitResult)
    assert result.cut == cut
    assert not result.is_listen
    assert result.pcm == b""
    assert len(result.fed_ids if cut.stage == "llm" else result.codec_ids) >= min(cut.step, 25)
    assert first == once()


def test_interrupt_is_recorded_and_its_cut_gives_the_same(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a live interrupt made would differ from what its replay makes."""
    what = units()
    live, index = first_speech(model, what)
    feed, count = unit_module.UnitRun._feed, 0

    def feed_and_interrupt(self: unit_module.UnitRun, rows: object) -> object:
        nonlocal count
        count += 1
        if count == 3:  # The prefill, the speak token, a word: then the user talks.
            live.interrupt(index)
        return feed(self, rows)  # type: ignore[arg-type]

    with monkeypatch.context() as watched:
        watched.setattr(unit_module.UnitRun, "_feed", feed_and_interrupt)
        result = live.run_unit(what[index])
    assert result.cut == Cut(stage="llm", step=2)
    again, _ = first_speech(model, what)
    assert facts(again.run_unit(what[index], result.cut)) == facts(result)


def test_early_interrupt_waits_for_its_unit_and_no_other(model: DuplexModel) -> None:
    """An interrupt that overtakes its unit would be lost, or hit the next one."""
    session, index = first_speech(model, units())
    session.interrupt(index)
    assert session.run_unit(units()[index]).cut == Cut(stage="llm", step=0)
    session.finalize(index, interrupted=True)
    assert session.run_unit(quiet(index + 1)).cut is None


def test_forced_listen_ends_an_open_turn(model: DuplexModel) -> None:
    """After a barge-in the model would go on with its old sentence."""
    what = units()
    session, index = first_speech(model, what)
    run(session, [what[index]])
    result = session.run_unit(quiet(index + 1, force_listen=True))
    turn_eos = result.fed_ids
    assert result.is_listen
    assert result.end_of_turn
    assert len(turn_eos) == 1
    assert result.kv_length == session.finalize(index + 1, interrupted=False).kv_length - 2
    later = run(session, [quiet(index + 2 + i) for i in range(4)])
    assert all(r.is_listen for r in later)


def test_first_units_listen(model: DuplexModel) -> None:
    """The model would talk before the session has settled."""
    what = [attrs.evolve(unit, index=unit.index - 3) for unit in units()[3:]]
    results = run(model.open(opening(force_listen_count=len(what))), what)
    assert all(r.is_listen and r.fed_ids == () for r in results)


def test_finalize_feeds_terminator_and_unit_end(model: DuplexModel) -> None:
    """The context would not say where a unit ended (model.md)."""
    session = model.open(opening())
    result = session.run_unit(quiet(0))
    done = session.finalize(0, interrupted=False)
    assert done.fed_ids[0] == result.decided_ids[0]
    assert done.kv_length == result.kv_length + 2 == session.opened.prompt_length + 13
    session.run_unit(quiet(1))
    interrupted = session.finalize(1, interrupted=True)
    assert interrupted.fed_ids[0] != done.fed_ids[0]
    assert interrupted.fed_ids[1] == done.fed_ids[1]


def test_context_full_comes_before_feeding(model: DuplexModel) -> None:
    """A unit would fail half fed, instead of the session ending in order (B10)."""
    long = attrs.evolve(opening(), instructions="x " * 4043)
    session = model.open(long)
    assert 8192 - 98 < session.opened.prompt_length < 8192 - 32
    with pytest.raises(ContextFull):
        session.run_unit(quiet(0, frames=(FRAME,)))
    result = session.run_unit(quiet(0))
    assert result.kv_length == session.opened.prompt_length + 11


def test_prompt_too_long_is_refused(model: DuplexModel) -> None:
    """Opening would run out of cache."""
    with pytest.raises(ContextFull):
        model.open(attrs.evolve(opening(), instructions="x " * 9000))


def test_frames_are_counted_and_fed(model: DuplexModel) -> None:
    """A video session would be blind, or its context would be counted wrong."""
    session = model.open(opening())
    result = session.run_unit(quiet(0, frames=(FRAME, FRAME)))
    assert (result.vision_slices, result.vision_tokens) == (2, 128)
    assert result.kv_length == session.opened.prompt_length + 1 + 2 * 66 + 10


def test_reference_audio_is_in_the_prompt(model: DuplexModel) -> None:
    """The voice that a client sends would be ignored by the language model."""
    sound: NDArray[np.float32] = room(24_100, 3)
    voice = Voice(llm_pcm=sound.astype("<f4").tobytes())
    with_voice = model.open(attrs.evolve(opening(), voice=voice)).opened
    without = model.open(opening()).opened
    assert with_voice.prompt_length == without.prompt_length + 16 + 2
    assert with_voice.fed_ids.count(-1) == 16


def test_input_hash_sees_every_input(model: DuplexModel) -> None:
    """Two different inputs would look the same in a log."""
    kinds = [
        quiet(0),
        quiet(1),
        quiet(0, frames=(FRAME,)),
        quiet(0, force_listen=True),
        quiet(0, max_slice_nums=2),
    ]
    assert len({unit_module.input_hash(unit) for unit in kinds}) == len(kinds)
    assert unit_module.input_hash(quiet(0)) == model.open(opening()).run_unit(quiet(0)).input_hash


def test_listen_in_an_open_turn_becomes_tts_bos(
    model: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn would end without `turn_eos` (model.md)."""
    ids = unit_module.Tokens(ROOT / "fixtures" / "tiny" / "tokenizer.json").ids
    session = model.open(opening(force_listen_count=0))
    script(monkeypatch, [ids.speak, 40, ids.chunk_eos, ids.listen, 41, ids.turn_eos, ids.listen])
    run(session, [quiet(0)])
    result = session.run_unit(quiet(1))
    assert result.decided_ids == (ids.listen, 41, ids.turn_eos, ids.listen)
    assert result.fed_ids == (ids.tts_bos, 41, ids.turn_eos)
    assert result.end_of_turn
    assert not result.is_listen
    assert session.finalize(1, interrupted=False).fed_ids == (ids.listen, ids.unit_end)


def test_nineteen_tokens_at_most(model: DuplexModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A babbling model would hold up every other session."""
    ids = unit_module.Tokens(ROOT / "fixtures" / "tiny" / "tokenizer.json").ids
    script(monkeypatch, [ids.speak] * 30)
    result = model.open(opening(force_listen_count=0)).run_unit(quiet(0))
    assert result.fed_ids == (ids.speak,) * 19
    assert result.decided_ids == (*result.fed_ids, ids.chunk_eos)


def test_few_tokens_a_chunk_are_honoured(model: DuplexModel) -> None:
    """A client that asks for short chunks would get long ones."""
    results = run(model.open(opening(max_new_speak_tokens_per_chunk=3)), units())
    assert max(len(r.fed_ids) for r in results) == 2
    assert "".join(r.text for r in results)


def test_silent_sessions_have_text_only(model: DuplexModel) -> None:
    """A client without loudspeakers would pay for speech."""
    results = run(model.open(opening(generate_audio=False)), units())
    assert "".join(r.text for r in results)
    assert all(r.pcm == b"" and r.codec_ids == () for r in results)


@pytest.mark.parametrize("pcm", [b"", bytes(UNIT_SAMPLES * 2), b"\x00\x00\xc0\x7f" * UNIT_SAMPLES])
def test_malformed_sound_is_refused(model: DuplexModel, pcm: bytes) -> None:
    """One bad sample would poison the session for good."""
    session = model.open(opening())
    with pytest.raises(BackendError):
        session.run_unit(Unit(index=0, pcm=pcm))


def test_broken_picture_fails_and_rolls_back(model: DuplexModel) -> None:
    """A damaged JPEG would end the session."""
    session = model.open(opening())
    with pytest.raises(BackendError):
        session.run_unit(quiet(0, frames=(FRAME[:200],)))
    session.rollback(0)
    assert run(session, [quiet(1)]) == run(model.open(opening()), [quiet(1)])


def test_calls_out_of_order_are_refused(model: DuplexModel) -> None:
    """A fault in the engine would show as nonsense much later."""
    session = model.open(opening())
    with pytest.raises(BackendError):
        session.finalize(0, interrupted=False)
    session.run_unit(quiet(0))
    with pytest.raises(BackendError):
        session.run_unit(quiet(1))
    with pytest.raises(BackendError):
        session.finalize(1, interrupted=False)
    session.release()
    session.release()
    with pytest.raises(BackendError):
        session.rollback(0)


def test_fingerprint_names_what_a_replay_compares(model: DuplexModel) -> None:
    """A replay on another machine would blame the model."""
    needed = {"weights", "config", "torch", "transformers", "numpy", "simplejpeg"}
    needed |= {"device", "dtype", "attention", "threads", "cpu"}
    assert needed <= set(model.info.fingerprint)
    assert model.info.fingerprint["threads"] == "1"
