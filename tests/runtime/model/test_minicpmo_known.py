"""Rows that are known run in one batch, and have the bits of rows one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import torch
from torch import Tensor

from protocol.values.model import PastUnit
from runtime.model.backends.base import BackendError
from runtime.model.backends.minicpmo.batched import ON_CPU, ComputeOptions
from runtime.model.backends.minicpmo.checkpoint import load_parts
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import Feed, KnownIds, KnownRows, Speak, Work
from tests.models import random_model
from tests.models.blocking import alone, open_session
from tests.models.flash import flash_on_cpu
from tests.models.random_model import opening, unit

TINY = Path(__file__).parents[3] / "fixtures" / "tiny"
COUNT = 9
STEPPED = ComputeOptions(is_flash=True, sizes=lambda *_: (2, 4), is_alone=True)
"""Nearly as on a GPU with `--deterministic`: its steps hold fewer rows than are known."""


def noise(width: int) -> list[Tensor]:
    rows = torch.randn(COUNT, width, generator=torch.Generator().manual_seed(width))
    return list(0.2 * rows[:, None])


@pytest.fixture(scope="module", params=[ON_CPU, STEPPED], ids=["cpu", "stepped"])
def pair(request: pytest.FixtureRequest) -> tuple[ModelRunner, ModelRunner]:
    """Two machines of one model."""
    torch.set_num_threads(1)  # As `DuplexModel.load` does: threads that wait cost most.
    parts = load_parts(load_config(TINY / "config.json"), TINY)
    with flash_on_cpu(), torch.inference_mode():
        one, other = (ModelRunner(parts, None, 2, options=request.param) for _ in range(2))
    return one, other


@pytest.fixture
def machines(pair: tuple[ModelRunner, ModelRunner]) -> tuple[ModelRunner, ModelRunner]:
    """The same, empty."""
    with torch.inference_mode():
        for runner in pair:
            for slot in range(2):
                runner.clear(slot)
    return pair


@pytest.mark.parametrize("start", [0, 20, 8192 - COUNT])
def test_known_rows_have_the_bits_of_rows_one_by_one(
    machines: tuple[ModelRunner, ModelRunner], start: int
) -> None:
    """A session would go on otherwise after it was rebuilt."""
    with flash_on_cpu(), torch.inference_mode():
        feeds = [Feed(slot=1, start=start + at, rows=rows) for at, rows in enumerate(noise(192))]
        begin = min(start, 4096 - COUNT)
        speaks = [Speak(slot=1, start=begin + at, rows=rows) for at, rows in enumerate(noise(128))]
        for runner in machines:
            runner.compute([Feed(slot=0, start=0, rows=torch.cat(noise(192)))])
        company = KnownRows(works=[Feed(slot=0, start=COUNT, rows=noise(192)[0])])
        made = machines[0].compute([company, KnownRows(works=feeds)])[1]
        said = machines[0].compute([KnownRows(works=speaks)])[0]
        wanted = [machines[1].compute([work])[0] for work in feeds]
        heard = [machines[1].compute([work])[0] for work in speaks]
    for one, other in zip(made, wanted, strict=True):
        assert torch.equal(one.hidden, other.hidden)
        assert torch.equal(one.logits.whole(), other.logits.whole())
    for one, other in zip(said, heard, strict=True):
        assert torch.equal(one.whole(), other.whole())
    one, other = machines
    for made_store, wanted_store in ((one.llm, other.llm), (one.tts, other.tts)):
        assert torch.equal(made_store.keys[:, 1], wanted_store.keys[:, 1])
        assert torch.equal(made_store.values[:, 1], wanted_store.values[:, 1])


def test_a_unit_that_is_run_again_asks_once_for_its_tokens_and_once_for_its_codes(
    tmp_path: Path,
) -> None:
    """A minute of a lost session would take as long as when it was first computed."""
    model = random_model.load(tmp_path, random_model.SMALL, slots=1)
    session = open_session(model, opening())
    past = []
    for index in range(3):
        result = session.run_unit(unit(index))
        session.finalize(index, interrupted=False)
        past.append(PastUnit(unit=unit(index), result=result, interrupted=False))
    session.release()
    asked: list[Work] = []

    def compute(works: Sequence[Work]) -> list[object]:
        asked.extend(works)
        return model.compute(works)

    again = model.session(opening(), slot=0)
    alone(again.open(), compute)
    asked.clear()
    for one in past:
        voiced = PastUnit(unit=one.unit, result=one.result, interrupted=False, is_voiced=True)
        alone(again.rebuild(voiced, exact=True, is_last=True), compute)
    again.release()
    assert sum(len(one.result.codec_ids) for one in past) > COUNT
    known = [work for work in asked if isinstance(work, KnownRows)]
    fed = [one.result for one in past if one.result.fed_ids]
    spoken = [one.result for one in past if one.result.codec_ids]
    assert len(known) == len(fed) + len(spoken)
    assert not [one for one in asked if isinstance(one, Feed) and len(one.rows) == 1]
    assert sum(isinstance(one, Speak) for one in asked) == len(spoken)  # Its text's rows.


@pytest.mark.parametrize(("ids", "most"), [((), 9), ((4,), 9), ((3, 3), 1)])
def test_ids_that_are_not_those_recorded_are_refused(ids: tuple[int, ...], most: int) -> None:
    """A forged log would have a model compute without end, or beyond its memory."""

    def work(_: int) -> Feed:
        raise AssertionError("nothing is computed")

    with pytest.raises(ValueError, match="other ids than recorded"):
        next(KnownIds(ids, work, most).ask(3))


@pytest.mark.parametrize("code", [-1, 10**6])
def test_a_recorded_code_that_the_model_lacks_fails_its_own_unit(tmp_path: Path, code: int) -> None:
    """On a GPU, looking it up would end all sessions."""
    model = random_model.load(tmp_path, random_model.SMALL, slots=1)
    session = open_session(model, opening())
    result = session.run_unit(unit(0))
    session.release()
    assert len(result.codec_ids) > COUNT
    broken = attrs.evolve(result, codec_ids=(*result.codec_ids[:3], code, *result.codec_ids[4:]))
    past = PastUnit(unit=unit(0), result=broken, interrupted=False, is_voiced=True)
    again = model.session(opening(), slot=0)
    alone(again.open(), model.compute)
    with pytest.raises(BackendError, match="unit 0 failed: a code is not from 0 to"):
        alone(again.rebuild(past, exact=True, is_last=True), model.compute)
    again.release()
