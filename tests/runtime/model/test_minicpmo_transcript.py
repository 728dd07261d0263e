"""Live transcription on the model, and on the engine beside all else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.errors import LocalProtocolError
from protocol.values.model import Chunk, ChunkResult, Costs
from runtime.model.backends.base import BackendError, ContextFull, Transcribes
from runtime.model.backends.minicpmo.anchor import TOKENS_A_CHUNK, Transcript
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import Feed, Work
from runtime.model.engine.backend import EngineBackend
from runtime.model.engine.engine import Engine
from tests.models import random_model
from tests.models.blocking import alone
from tests.models.random_model import opening, sound, unit
from tests.project.sampling import ONE_LOOP, sample
from tests.runtime.model.test_engine import FakeModel
from tests.runtime.model.test_engine_chat import answered, short
from tests.runtime.model.test_minicpmo_anchor import wiped

WAIT_S = 60
"""Real seconds after which something hangs."""


@pytest.fixture(scope="module")
def small(checkpoint: Path) -> DuplexModel:
    """With room for 256 tokens: a few seconds of an utterance."""
    return DuplexModel.load(checkpoint, slots=4)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> DuplexModel:
    return random_model.load(tmp_path_factory.mktemp("model"), slots=8)


def chunk(index: int, utterance: int = 0, place: int = 0, **what: Any) -> Chunk:
    """A second of an utterance; `place` chooses which sound."""
    return Chunk(
        **{
            "utterance": utterance,
            "index": index,
            "pcm": sound(1000 * place + index),
            "seed": 5,
            **what,
        }
    )


def heard(model: DuplexModel, transcript: Transcript, what: Chunk) -> ChunkResult:
    """Have a chunk heard, alone; gives the result without its costs."""
    return facts(alone(transcript.chunk(what), model.compute))


def facts(result: ChunkResult) -> ChunkResult:
    return attrs.evolve(result, costs=Costs())


def utterance(
    model: DuplexModel, transcript: Transcript, number: int, place: int, seconds: int
) -> list[ChunkResult]:
    """Have an utterance of some seconds heard to its end."""
    return [
        heard(model, transcript, chunk(at, number, place, is_last=at == seconds - 1))
        for at in range(seconds)
    ]


def test_an_utterance_is_written_as_it_is_heard(wide: DuplexModel) -> None:
    """The text would come late, twice, or with what the model says to itself."""
    transcript, ids = wide.transcript(slot=0), wide.tokens.ids
    results = utterance(wide, transcript, 0, 1, 6)
    head = (ids.im_start, *wide.tokens.encode("system\nTranscribe what is said."), ids.im_end)
    assert [result.fed_ids for result in results] == [(*head, *[-1] * 10), *[(-1,) * 10] * 5]
    assert [result.prompt_tokens for result in results] == [len(head) + 10, *[10] * 5]
    length = 0
    for result in results:
        length += result.prompt_tokens + result.generated_tokens - 1
        assert result.kv_length == length
        assert result.generated_tokens == len(result.token_ids) <= TOKENS_A_CHUNK
        ends = result.token_ids[-1] == ids.chunk_eos
        assert result.reason == ("stop" if ends else "length")
        assert not set(result.token_ids[:-1]) & wide.tokens.control
        assert ends or result.generated_tokens == TOKENS_A_CHUNK
        assert result.margin >= 0
        assert result.input_hash
        assert result.logits_hash
    assert {result.reason for result in results} == {"stop", "length"}
    written = [index for result in results for index in result.token_ids]
    assert "".join(result.text for result in results) == wide.tokens.decode(written)
    transcript.release()
    assert wiped(wide, 0)


def test_the_terminator_is_never_fed(wide: DuplexModel) -> None:
    """The model would hear of seconds that ended, which it was not taught."""
    transcript, fed = wide.transcript(slot=0), list[Any]()
    embed = wide.runner.parts.embed((wide.tokens.ids.chunk_eos,))[0]

    def compute(works: Sequence[Work]) -> list[Any]:
        fed.extend(row for work in works if isinstance(work, Feed) for row in work.rows)
        return wide.compute(works)

    stops = 0
    for index in range(6):
        stops += alone(transcript.chunk(chunk(index, place=1)), compute).reason == "stop"
    assert stops
    assert not any(bool((row == embed).all()) for row in fed)
    transcript.release()


@settings(max_examples=sample(12, 5))
@given(
    before=st.lists(st.integers(1, 4), max_size=3),
    seconds=st.integers(1, 4),
    number=st.integers(0, 9),
    ends=st.booleans(),
)
def test_nothing_of_an_utterance_is_left_for_the_next(
    small: DuplexModel, before: list[int], seconds: int, number: int, ends: bool
) -> None:
    """A caller's second sentence would be written otherwise than if it were the first."""
    fresh, used = small.transcript(slot=0), small.transcript(slot=1)
    wanted = utterance(small, fresh, number, 1, seconds)
    for place, length in enumerate(before, start=2):
        for at in range(length):  # Some are given up before their end.
            heard(small, used, chunk(at, number + place, place, is_last=ends and at == length - 1))
    assert utterance(small, used, number, 1, seconds) == wanted
    fresh.release()
    used.release()
    assert wiped(small, 0)
    assert wiped(small, 1)


def test_a_chunk_that_may_not_fit_feeds_nothing(small: DuplexModel) -> None:
    """The text would break off amid a second, or the model overrun its memory."""
    transcript, results = small.transcript(slot=0), list[ChunkResult]()
    while not results or results[-1].kv_length + 41 <= 256:
        results.append(heard(small, transcript, chunk(len(results))))
    for _ in range(2):
        with pytest.raises(ContextFull, match=r"a chunk may need 41|needs 10 tokens"):
            heard(small, transcript, chunk(len(results)))
    assert utterance(small, transcript, 1, 0, 2)[0] == attrs.evolve(results[0], utterance=1)
    transcript.release()


def test_a_chunk_that_fails_costs_its_utterance_alone(
    small: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hiccup of the device would end the connection, or spoil all that follows."""
    transcript, real = small.transcript(slot=0), ModelRunner.compute
    first = heard(small, transcript, chunk(0))

    def compute(runner: ModelRunner, works: Sequence[Work]) -> list[Any]:
        if isinstance(works[0], Feed) and len(works[0].rows) == 1:
            raise RuntimeError("the device failed")
        return real(runner, works)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute", compute)
        with pytest.raises(BackendError, match="chunk 1 failed"):
            heard(small, transcript, chunk(1))
    assert wiped(small, 0)
    with pytest.raises(BackendError, match="chunk 1 of utterance 0 is not the next"):
        heard(small, transcript, chunk(1))
    assert heard(small, transcript, chunk(0, 1)) == attrs.evolve(first, utterance=1)
    transcript.release()


@pytest.mark.parametrize(
    ("what", "text"),
    [
        (chunk(2), "chunk 2 of utterance 0"),
        (chunk(1, 7), "chunk 1 of utterance 7"),
        (chunk(1, pcm=sound(1)[:-4]), "63996 bytes"),
        (chunk(1, pcm=np.full(16_000, np.inf, "<f4").tobytes()), "finite"),
    ],
)
def test_what_is_out_of_order_is_refused(small: DuplexModel, what: Chunk, text: str) -> None:
    """A mistake of ours would be written down as if somebody had said it."""
    transcript, other = small.transcript(slot=0), small.transcript(slot=1)
    for each in (transcript, other):
        heard(small, each, chunk(0))
    with pytest.raises(BackendError, match=text):
        heard(small, transcript, what)
    assert heard(small, transcript, chunk(1)) == heard(small, other, chunk(1))
    transcript.release()
    other.release()
    with pytest.raises(BackendError, match="released"):
        heard(small, transcript, chunk(0))


def test_after_the_last_chunk_comes_another_utterance(small: DuplexModel) -> None:
    """What was held back of a character would be told, and then told again."""
    transcript = small.transcript(slot=0)
    heard(small, transcript, chunk(0, is_last=True))
    assert wiped(small, 0)
    with pytest.raises(BackendError, match="not the next"):
        heard(small, transcript, chunk(1))
    transcript.release()


# -- which checkpoints transcribe -----------------------------------------------------------------


@pytest.mark.parametrize(("flag", "has_it"), [(True, True), (False, False), (None, False)])
def test_a_checkpoint_says_whether_it_transcribes(
    copied: Path, flag: bool | None, has_it: bool
) -> None:
    """A model that was never taught it would write nonsense to whoever asks."""
    path = copied / "config.json"
    raw = json.loads(path.read_text())
    del raw["transcribes"]
    path.write_text(json.dumps(raw if flag is None else raw | {"transcribes": flag}))
    backend = EngineBackend(DuplexModel.load(copied, slots=1))
    assert ("transcription" in backend.info.modes) == has_it

    async def take() -> None:
        await backend.transcribe(slot=0)

    if has_it:
        anyio.run(take)
    else:
        with pytest.raises(BackendError, match="model random does not transcribe"):
            anyio.run(take)


def test_a_flag_that_is_no_truth_is_an_error(copied: Path) -> None:
    """`"transcribes": "no"` would turn it on."""
    path = copied / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transcribes": "no"}))
    with pytest.raises(ValueError, match=r"config.transcribes is 'no'"):
        load_config(path)


# -- on the engine --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written_alone(wide: DuplexModel) -> list[list[ChunkResult]]:
    """What three callers' utterances give, each alone."""
    written = []
    for number in range(3):
        transcript = wide.transcript(slot=7)
        written.append([*utterance(wide, transcript, 0, number, 4)])
        written[-1] += utterance(wide, transcript, 1, number + 5, 2)
        transcript.release()
    return written


@pytest.mark.parametrize("anyio_backend", ONE_LOOP)
@pytest.mark.anyio
async def test_three_at_once_beside_all_else_write_what_they_write_alone(
    wide: DuplexModel, written_alone: list[list[ChunkResult]]
) -> None:
    """What is written down of one caller would depend on who else is served (B8)."""
    backend = EngineBackend(wide)
    assert isinstance(backend, Transcribes)
    got: dict[int, list[ChunkResult]] = {number: [] for number in range(3)}

    async def write(number: int) -> None:
        session = await backend.transcribe(slot=number)
        for spoken, place, seconds in ((0, number, 4), (1, number + 5, 2)):
            for at in range(seconds):
                what = chunk(at, spoken, place, is_last=at == seconds - 1)
                got[number].append(facts(await session.run(what)))
        await session.release()

    async def talk() -> None:
        session = await backend.open(opening(1), slot=4)
        for index in range(3):
            await session.run(unit(index))
            await session.finalize(index, interrupted=False)
        await session.release()

    with anyio.fail_after(WAIT_S):
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(write, number)
            group.start_soon(talk)
            group.start_soon(answered, backend, short(1), 5)
    assert [got[number] for number in range(3)] == written_alone
    assert backend.engine.statistics.largest > 1
    assert all(wiped(wide, slot) for slot in range(6))


@pytest.mark.anyio
async def test_a_chunk_is_due_as_a_unit_is(
    small: DuplexModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is sent at once would be computed before whoever talks is answered."""
    due_s: list[float] = []
    submit = Engine.submit

    def noted(self: Engine, steps: Any, *, due_ns: float) -> Any:
        due_s.append(due_ns / 1e9)
        return submit(self, steps, due_ns=due_ns)

    monkeypatch.setattr(Engine, "submit", noted)
    session = await EngineBackend(small).transcribe(slot=0)
    clock = SimpleNamespace(current_time=lambda: 100.0)  # a busy machine takes no time
    monkeypatch.setattr("runtime.model.engine.backend.anyio", clock)
    for index in range(3):
        await session.run(chunk(index))
    assert due_s == pytest.approx([1, 2, 3])
    await session.release()


@pytest.mark.anyio
async def test_a_transcription_is_refused_where_there_is_none(small: DuplexModel) -> None:
    """Two callers would be put into one slot, or a model be asked for what it cannot do."""
    with pytest.raises(LocalProtocolError, match="slot 4 of 4"):
        await EngineBackend(small).transcribe(slot=4)
    with pytest.raises(BackendError, match="model fake does not transcribe"):
        await EngineBackend(FakeModel()).transcribe(slot=0)


@pytest.mark.anyio
async def test_a_bad_chunk_is_told_as_what_it_is(small: DuplexModel) -> None:
    """The server would take a full context for a broken model."""
    session = await EngineBackend(small).transcribe(slot=0)
    with pytest.raises(BackendError, match="4 bytes"):
        await session.run(chunk(0, pcm=bytes(4)))
    results = [await session.run(chunk(0))]
    while results[-1].kv_length + 41 <= 256:
        results.append(await session.run(chunk(len(results))))
    with pytest.raises(ContextFull):
        await session.run(chunk(len(results)))
    await session.release()
    assert wiped(small, 0)
