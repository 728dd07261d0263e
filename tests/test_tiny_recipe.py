"""The recipe of `tiny`: what training lays out is what the engine feeds."""

from __future__ import annotations

from pathlib import Path

import attrs
import numpy as np

from fixtures.tiny.recipe.layout import AUDIO, IGNORE, PICTURE, lay_out
from fixtures.tiny.recipe.phrases import PHRASES, UNKNOWN, UNKNOWN_HELDOUT
from fixtures.tiny.recipe.render import ACCENTS, HELDOUT_VARIANTS, VARIANTS
from fixtures.tiny.recipe.sounds import noise_pool
from fixtures.tiny.recipe.tasks import TASKS, draw_task
from fixtures.tiny.recipe.timeline import Knobs, Session, Turn, World, compose
from fixtures.tiny.recipe.voice import Answer
from protocol.model import UNIT_SAMPLES, DuplexConfig, Opening, Unit, Voice
from runtime.backends.minicpmo import DuplexModel
from runtime.backends.minicpmo.score import read_manifest, stage_phrase
from runtime.backends.minicpmo.tokens import Tokens

ROOT = Path(__file__).parents[1]
TINY = ROOT / "fixtures" / "tiny"
HELDOUT = ROOT / "fixtures" / "speech" / "heldout"
FRAME = (ROOT / "fixtures" / "speech" / "frame.jpg").read_bytes()


def test_layout_is_what_the_engine_feeds() -> None:
    """The model would be trained on another sequence than it is run on."""
    item = next(item for item in read_manifest(HELDOUT) if item.phrase == "tell me a joke")
    pcm, end = stage_phrase(HELDOUT, item, place=0)
    opening = Opening(instructions="Be brief.", voice=Voice(), config=DuplexConfig(), seed=1)
    session = DuplexModel.load(TINY).open(opening)
    tokens = Tokens(TINY / "tokenizer.json")
    image = (tokens.ids.image, *[PICTURE] * 64, tokens.ids.image_end)
    fed, chunks, first = list(session.opened.fed_ids), [], None
    for index, second in enumerate(pcm.reshape(-1, UNIT_SAMPLES)):
        frames = (FRAME,) if index % 2 else ()
        unit = Unit(index=index, pcm=second.astype("<f4").tobytes(), frames=frames)
        result = session.run_unit(unit)
        fed += [tokens.ids.unit, *(image if frames else ()), *[AUDIO] * 10, *result.fed_ids]
        fed += session.finalize(index, interrupted=False).fed_ids
        if not result.is_listen:
            chunks.append(tokens.text_ids(result.fed_ids))
            first = index if first is None else first
    assert first is not None
    answer = Answer(text="", chunks=tuple(chunks), codes=(), begins=(), pcm=np.zeros(0, np.float32))
    turn = Turn(phrase=item.phrase, end_s=end / 16_000, ready=first, first=first, kept=len(chunks))
    units = len(pcm) // UNIT_SAMPLES
    planned = Session(
        pcm=pcm, forced=3, turns=(turn,), frames=tuple(index % 2 for index in range(units))
    )

    class Steady:
        """Randomness that never cuts."""

        def random(self) -> float:
            return 0.99

    ids, labels, spoken = lay_out(
        planned,
        {item.phrase: answer},
        tokens,
        instructions="Be brief.",
        reference_rows=0,
        rng=Steady(),  # type: ignore[arg-type]
    )
    assert ids.tolist() == fed
    asked = labels[labels != IGNORE].tolist()
    assert asked.count(tokens.ids.speak) == len(chunks)
    assert asked.count(tokens.ids.turn_eos) == 1
    assert [chunk for _, _, chunk in spoken] == list(range(len(chunks)))


def test_no_phrase_begins_another() -> None:
    """The model could not know when a phrase has ended."""
    for phrase in PHRASES:
        others = [*PHRASES, *UNKNOWN, *UNKNOWN_HELDOUT]
        assert not any(o != phrase and o.startswith(phrase + " ") for o in others)


def test_heldout_voices_are_not_trained_on() -> None:
    """The scores would flatter."""
    assert not set(VARIANTS) & set(HELDOUT_VARIANTS)
    trained = {f"{accent}+{variant}" for accent in ACCENTS for variant in VARIANTS}
    assert not trained & {item.voice for item in read_manifest(HELDOUT)}
    assert not set(UNKNOWN) & set(UNKNOWN_HELDOUT)


def test_registry_draws_every_task() -> None:
    """A skill would be forgotten at the next training."""
    rng = np.random.default_rng(1)
    assert {draw_task(rng) for _ in range(500)} == set(TASKS)


def test_sessions_are_a_function_of_the_generator() -> None:
    """Training could not be run again."""
    world = World(known={}, unknown=[], noises=noise_pool(3), units={})
    knobs = attrs.evolve(Knobs(), quiet=True, events=0.5, units=6)
    one, other = (compose(world, knobs, np.random.default_rng(4)) for _ in range(2))
    assert np.array_equal(one.pcm, other.pcm)
    assert one.turns == other.turns == ()
    assert np.abs(one.pcm).max() <= 1.0
