"""Slots that share their memory: the numbers of slots of their own, and ends where none is left."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.values import effects as ef
from protocol.values import events as ev
from runtime.model.backends.base import BackendError, ContextFull, HeldModel, failure_of
from runtime.model.backends.minicpmo import attention, runner
from runtime.model.backends.minicpmo.attention import KvSlots, Row, SlotCache
from runtime.model.backends.minicpmo.batched import ON_CPU, ComputeOptions
from runtime.model.backends.minicpmo.checkpoint import load_parts
from runtime.model.backends.minicpmo.config import load_config
from runtime.model.backends.minicpmo.logits import CodeLogits
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.backends.minicpmo.runner import ModelRunner
from runtime.model.backends.minicpmo.work import Feed, LlmOutput, Speak
from runtime.model.engine.backend import EngineBackend
from runtime.session.model_calls import try_to_open
from tests.bench.pages import ROW_BYTES, Run, model_of
from tests.models.blocking import BlockingSession, alone, open_session
from tests.models.flash import flash_on_cpu
from tests.models.random_model import facts, opening, unit, write_checkpoint
from tests.project.evidence import EVIDENCE
from tests.project.sampling import sample
from tests.runtime.model.test_minicpmo_chat import ask

SMALL_PAGE = 16
SLOTS = 4


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots grow, and are moved, with nearly every unit."""
    for each in (attention, runner):
        monkeypatch.setattr(each, "PAGE", SMALL_PAGE)


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def extents(store: KvSlots) -> list[tuple[int, int]]:
    """Where slots are, in order; they lie one behind the other, within the store."""
    found = [
        (store.place(slot), store.place(slot) + size)
        for slot, size in enumerate(store._sizes[: store.slots])
        if size
    ]
    found.sort()
    for (_, end), (begin, _) in pairwise(found):
        assert end <= begin
    assert not found or found[-1][1] <= store.positions
    assert store.free == store.positions - sum(end - begin for begin, end in found)
    return found


# -- the store ------------------------------------------------------------------------------------


def made(slots: int, capacity: int, positions: int | None) -> KvSlots:
    return KvSlots(
        layers=2, slots=slots, heads=2, capacity=capacity, width=4, spare=3, positions=positions
    )


def feed(store: KvSlots, slot: int, start: int, count: int, seed: int) -> None:
    key, value = noise(1, 2, count, 4, seed=seed), noise(1, 2, count, 4, seed=-seed)
    cache = SlotCache(store, [Row(slot=slot, start=start)], count, groups=1)
    for layer in range(2):
        cache.update(key * (layer + 1), value, layer)


@pytest.mark.parametrize("seed", range(4))
def test_slots_that_share_hold_what_slots_of_their_own_hold(seed: int) -> None:
    """A session would go on with another one's past (B8), or lose its own when others grow."""
    draw, slots, capacity = random.Random(seed), 5, 200
    own, shared = made(slots, capacity, None), made(slots, capacity, 400)
    lengths, refused, moved, before = [0] * slots, 0, 0, list[int]()
    for step in range(400):
        slot, what = draw.randrange(slots), draw.random()
        if what < 0.75:
            count = min(draw.choice((1, 2, 11, 40)), capacity - lengths[slot])
            if not shared.reserve(slot, lengths[slot] + count):
                refused += 1
                assert shared.free < count + SMALL_PAGE
                continue
            if count:
                for store in (own, shared):
                    feed(store, slot, lengths[slot], count, step + 1)
                lengths[slot] += count
        elif what < 0.9:
            start = draw.randint(0, lengths[slot])
            for store in (own, shared):
                store.wipe(slot, start)
            lengths[slot] = start
        elif what < 0.95:
            for store in (own, shared):
                store.put(slot, 0, store.take(slot, lengths[slot] // 2, lengths[slot]))
        else:
            for store in (own, shared):
                store.wipe(slot)
            lengths[slot] = 0
        extents(shared)
        after = [shared.place(each) for each in range(slots)]
        moved += sum(a != b for a, b in zip(before, after, strict=False))
        before = after
        for each, length in enumerate(lengths):
            one, other = own.take(each, 0, length), shared.take(each, 0, length)
            assert torch.equal(one.keys, other.keys)
            assert torch.equal(one.values, other.values)
    assert refused > 5
    assert moved > 20
    for slot in range(slots):
        shared.wipe(slot)
    assert shared.free == shared.positions
    assert not shared.keys.any()
    assert not shared.values.any()


class AllocatesNothing(TorchDispatchMode):
    """Fails where an operator returns anything but a view of what it was given."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {it.untyped_storage().data_ptr() for it in args if isinstance(it, Tensor)}
        for each in made if isinstance(made, tuple | list) else (made,):
            if each.untyped_storage().data_ptr() not in given:
                raise torch.OutOfMemoryError(f"{func}")
        return made


def test_a_move_needs_no_memory() -> None:
    """Where there is none in the middle of it, another session would be half moved (B8)."""
    store = made(3, 64, 96)
    for slot, count in enumerate((16, 32, 16)):
        feed(store, slot, 0, count, seed=slot + 1)
    before = [(store.place(slot), store.take(slot, 0, 16)) for slot in range(3)]
    with AllocatesNothing():
        assert store.reserve(0, 48)
    assert [store.place(slot) == place for slot, (place, _) in enumerate(before)].count(False) > 1
    for slot, (_, kept) in enumerate(before):
        now = store.take(slot, 0, 16)
        assert torch.equal(now.keys, kept.keys)
        assert torch.equal(now.values, kept.values)


def test_one_slot_may_have_it_all() -> None:
    """A long session by itself would end early."""
    store = made(3, 64, 64)
    assert store.reserve(1, 64)
    assert not store.reserve(0, 1)
    store.wipe(1)
    assert store.reserve(0, 1)
    assert store.reserve(2, 1, leaving=32)
    assert not store.reserve(1, 1, leaving=32)
    assert store.used_slots == 2
    with pytest.raises(RuntimeError, match="33 positions of slot 1 were not reserved"):
        store.reach(1, 33)


@pytest.mark.parametrize("seed", range(3))
def test_under_pressure_each_session_goes_on_or_ends_by_the_rule(seed: int) -> None:
    """Sessions would wait for memory that others have, and all of them for ever.

    `Run` asserts it: what is asked for in a second ends in it, by an answer, or by a refusal when
    there was no memory; and in the end all memory is free.
    """
    model = model_of(8, 30, context=512)
    lasts, windows = (2, 5, 9, 20), ("off", "basic", "context")
    seen = Run(model, seed=seed, lasts=lasts, chats=0.1, windows=windows).run(25)
    assert {"done", "short of memory", "refused", "chat", "chat refused"} <= set(seen.ends)
    assert seen.units > 30
    assert seen.moved_bytes > 0


def test_sessions_of_mixed_lengths_take_what_they_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 sessions would take the memory of 64 whole contexts, however short they are.

    The figures of the documentation are those that are kept, of `python -m tests.bench.pages`.
    """
    kept = json.loads((EVIDENCE / "pages.json").read_text("utf-8"))
    half = next(run for run in kept["runs"] if run["context_percent"] == 50)
    assert (kept["sessions"], half["most_sessions"]) == (64, 64)
    assert half["most_used_gb"] < kept["whole_contexts_gb"] / 3
    assert {"refused", "short of memory"}.isdisjoint(half["ends"])
    for each in (attention, runner):
        monkeypatch.setattr(each, "PAGE", 256)
    seen = Run(model_of(4, 50), seed=1).run(12)
    assert {"refused", "short of memory"}.isdisjoint(seen.ends)
    assert 0 < seen.most_bytes < 4 * 2 * attention.PAGE * sum(ROW_BYTES.values())


# -- sessions -------------------------------------------------------------------------------------

ROOMS = ({"max_position_embeddings": 512}, {"num_hidden_layers": 1})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), *ROOMS)


def run(model: DuplexModel, plans: Sequence[tuple[int, str]]) -> tuple[list[Any], list[str]]:
    """Run sessions side by side, each so many units with a window; their results, and their ends.

    The sessions take turns, so that each grows when others have.
    """
    said: list[Any] = [[] for _ in plans]
    ends = ["" for _ in plans]
    running = dict[int, BlockingSession]()
    for number, (_, window) in enumerate(plans):
        try:
            what = opening(number, sliding_window=window)
            running[number] = open_session(model, what)
        except BackendError as full:
            ends[number] = f"opening: {full}"
    for index in range(max(units for units, _ in plans)):
        for number, session in list(running.items()):
            try:
                if index == plans[number][0]:
                    ends[number] = "done"
                else:
                    said[number].append(facts(session.run_unit(unit(index, number))))
                    done = session.finalize(index, interrupted=False)
                    said[number].append((done.kv_length, done.fed_ids))
            except ContextFull as full:
                ends[number] = str(full)
            if ends[number]:
                session.release()
                del running[number]
    for number, session in running.items():
        ends[number] = "done"
        session.release()
    return said, ends


def test_sessions_say_the_same_in_shared_memory(folder: Path) -> None:
    """What a session says would depend on where others grow."""
    every = [(18, "off"), (9, "basic"), (30, "context"), (14, "off")]
    plans = sample(every, [(8, "off"), (5, "basic"), (12, "context"), (6, "off")])
    own = DuplexModel.load(folder, slots=SLOTS)
    shared = DuplexModel.load(folder, slots=SLOTS, context_percent=85)
    assert shared.runner.llm.positions == SLOTS * (512 * 85 // 100)
    assert shared.runner.slot_bytes < own.runner.slot_bytes
    assert shared.info.deterministic
    wanted, got = run(own, plans), run(shared, plans)
    assert got == wanted
    assert not any("no memory" in end for end in got[1])
    assert got[1].count("done") >= 2
    for store in (shared.runner.llm, shared.runner.tts):
        assert store.free == store.positions


# `test_under_pressure_each_session_goes_on_or_ends_by_the_rule` draws shorter sessions.
@pytest.mark.soak
def test_where_memory_ends_a_session_ends_and_the_others_go_on(folder: Path) -> None:
    """All would wait for one another, or a session be undone in the middle of a unit."""
    plans = [(40, "off")] * SLOTS
    wanted, _ = run(DuplexModel.load(folder, slots=SLOTS), plans)
    shared = DuplexModel.load(folder, slots=SLOTS, context_percent=30)
    assert shared.runner.llm.positions < SLOTS * 512 / 2
    got, ends = run(shared, plans)
    short = [number for number, end in enumerate(ends) if "no memory for" in end]
    assert short
    assert len(short) < SLOTS
    for number in range(SLOTS):  # What it said is the same, up to its end.
        assert got[number] == wanted[number][: len(got[number])]
    longest = max(range(SLOTS), key=lambda number: len(got[number]))
    assert len(got[longest]) == len(wanted[longest])
    assert shared.runner.llm.free == shared.runner.llm.positions
    assert run(shared, plans[:1])[0][0] == wanted[0]


def test_a_new_session_leaves_room_to_those_that_run(folder: Path) -> None:
    """Each newcomer would end one that has talked for minutes.

    It is not its client's mistake, as a prompt that is too long would be.
    """
    model = DuplexModel.load(folder, slots=SLOTS, context_percent=25)
    store = model.runner.llm
    assert store.positions == 512
    store.reserve(0, 512 - 2 * SMALL_PAGE)
    with pytest.raises(BackendError, match="no memory for another session") as failed:
        BlockingSession(model, opening(1), 1)
    assert not failed.value.context_full
    chat = model.chat(slot=1)
    chat.measure(ask(max_new_tokens=400, speech=None))
    with pytest.raises(BackendError, match="no memory for another session") as failed:
        alone(chat.prefill(), model.compute)
    assert not failed.value.context_full
    store.wipe(0)
    session = open_session(model, opening(1))
    session.run_unit(unit(0))
    session.release()


@pytest.mark.anyio
async def test_an_opening_that_finds_no_memory_may_be_tried_again(folder: Path) -> None:
    """Its client would read that its prompt does not fit, and shorten it for nothing."""
    model = DuplexModel.load(folder, slots=SLOTS, context_percent=25)
    backend, store = EngineBackend(model), model.runner.llm
    store.reserve(0, 512 - 2 * SMALL_PAGE)
    held = HeldModel(backend=backend, slot=1, now_ns=lambda: 0)
    asked = ef.OpenBackend(lease=1, opening=opening(1))
    with pytest.raises(BackendError, match="no memory for another session") as failed:
        await try_to_open(held, asked, anyio.Event())
    assert failure_of(asked, failed.value, 0) == ev.BackendOpenFailed(at_ns=0, lease=1)
    store.wipe(0)
    await try_to_open(held, asked, anyio.Event())
    await held.release()


@pytest.mark.parametrize(
    "options",
    [ON_CPU, ComputeOptions(is_flash=True, sizes=lambda *_: (2, SLOTS))],
    ids=["cpu", "gpu"],
)
def test_a_batch_gives_the_same_in_shared_memory(folder: Path, options: ComputeOptions) -> None:
    """A session would read where another one is now."""
    config = load_config(folder / "config.json")
    with flash_on_cpu():
        machines = [
            ModelRunner(
                load_parts(config, folder), None, SLOTS, options=options, context_percent=percent
            )
            for percent in (100, 70)
        ]
        ends = [0] * SLOTS
        for step in range(12):
            counts = [(1, 11, 40, 2)[(step + slot) % 4] for slot in range(SLOTS)]
            for kind, width, name in ((Feed, 192, "llm"), (Speak, 128, "tts")):
                rows = [noise(count, width, seed=step * 9 + n) for n, count in enumerate(counts)]
                works = [
                    kind(slot=slot, start=ends[slot], rows=each) for slot, each in enumerate(rows)
                ]
                own, shared = ([numbers(one) for one in each.compute(works)] for each in machines)
                assert all(map(torch.equal, own, shared))
                extents(getattr(machines[1], name))
            ends = [end + count for end, count in zip(ends, counts, strict=True)]


def numbers(answer: LlmOutput | CodeLogits) -> Tensor:
    return answer.hidden if isinstance(answer, LlmOutput) else answer.whole()


def test_a_turn_s_speech_is_given_back_when_it_is_over(folder: Path) -> None:
    """Each session would keep the memory of its longest turn, or lose its place for the next."""
    model = DuplexModel.load(folder, slots=SLOTS, context_percent=50)
    store, session = model.runner.tts, open_session(model, opening(1))
    assert store.positions - store.free == SMALL_PAGE
    most = 0
    for index in range(9):
        result = session.run_unit(unit(index, 1))
        held = store.positions - store.free
        assert len(result.codec_ids) <= held
        session.finalize(index, interrupted=False)
        most = max(most, held)
        if result.end_of_turn or result.is_listen:
            assert store.positions - store.free == SMALL_PAGE
    assert most > 2 * SMALL_PAGE
    session.release()
    assert store.free == store.positions
