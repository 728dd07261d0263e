"""The vocoder at a small size: a turn's state is a value, and no session hears another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from runtime.model.voice.flow import Flow
from runtime.model.voice.hift import FRAME, Hift
from runtime.model.voice.steps import Fixed, VoiceSteps, sizes_on
from runtime.model.voice.vocoder import CODES_MAX, HELD, Chunk, Spoken, Turn, Vocoder, normal
from tests.models.random_voice import CONFIG, HIFT_CONFIG, STEPS, codes, reference, vocoder
from tests.project.sampling import sample
from tests.runtime.model.test_minicpmo_steps import Capturing, Elsewhere

Pcm = NDArray[np.float32]
SIZES = (28, 9, 28, 28)
"""Codes of a turn's chunks before the last: enough that each cache is cut."""
LAST = 6


@pytest.fixture(scope="module")
def small() -> Vocoder:
    return vocoder(voices=64)


def chunks(name: str, prompt: int = 30, *, sizes: Sequence[int] = SIZES) -> list[Chunk]:
    """A turn of a voice, without its states."""
    voice, key = reference(f"{name} {prompt}", prompt), f"seed of {name}"
    return [
        Chunk(
            reference=voice,
            turn=None,
            codes=codes(f"{name} {index}", size),
            last=index == len(sizes),
            key=key,
        )
        for index, size in enumerate((*sizes, LAST))
    ]


def after(chunk: Chunk, turn: Turn | None) -> Chunk:
    return Chunk(
        reference=chunk.reference, turn=turn, codes=chunk.codes, last=chunk.last, key=chunk.key
    )


def speak(small: Vocoder, turn: list[Chunk], state: Turn | None = None) -> list[Spoken]:
    """Speak a turn by itself."""
    spoken = list[Spoken]()
    for chunk in turn:
        spoken += small.speak([after(chunk, state)])
        state = spoken[-1].turn
    return spoken


def sounds(spoken: Sequence[Spoken]) -> list[bytes]:
    return [one.pcm.tobytes() for one in spoken]


COMPANY = [("b", 60), ("c", 150), ("d", 3), ("e", 31)]


@pytest.mark.costly
@pytest.mark.parametrize("count", [2, 5, 16])
def test_a_voice_sounds_the_same_in_any_company(small: Vocoder, count: int) -> None:
    """A replay, which has one session, would hear other bytes than the caller did."""
    turn = chunks("a") if count < 16 else chunks("a", sizes=SIZES[:1])
    alone = speak(small, turn)
    others = [
        chunks(f"{name} {index}", prompt, sizes=SIZES[: index % 5 + 1])
        for index in range(-(-count // len(COMPANY)))
        for name, prompt in COMPANY
    ][: count - 1]
    states: list[Turn | None] = [None] * len(others)
    mine: Turn | None = None
    for index, chunk in enumerate(turn):
        batch, at = list[Chunk](), index % count
        for number, other in enumerate(others):
            place = index % len(other)  # The turns of others end at other times, and begin anew.
            batch.append(after(other[place], states[number] if place else None))
        batch.insert(min(at, len(batch)), after(chunk, mine))
        place = min(at, len(batch) - 1)
        spoken = small.speak(batch)
        assert spoken[place].pcm.tobytes() == alone[index].pcm.tobytes()
        mine = spoken.pop(place).turn
        states = [one.turn for one in spoken]


def test_an_older_state_gives_the_same_sound_again(small: Vocoder) -> None:
    """A rolled back unit, or a fork, would sound different when it is run again."""
    turn = chunks("a")
    states, wanted = [None], list[bytes]()
    for chunk in turn:
        (spoken,) = small.speak([after(chunk, states[-1])])
        states.append(spoken.turn)
        wanted.append(spoken.pcm.tobytes())
    for index in (4, 2, 0):
        other = after(chunks("z")[0], states[index])
        small.speak([other])
        assert sounds(speak(small, turn[index:], states[index])) == wanted[index:]


def test_a_voice_computed_again_sounds_the_same() -> None:
    """A session would change its voice when another one took its place in memory."""
    one, two = chunks("a", sizes=SIZES[:1]), chunks("b", sizes=SIZES[:1])
    small = vocoder(voices=1)
    first = sounds(speak(small, one))
    kept = small.voice(one[0].reference)
    assert small.voice(one[0].reference) is kept
    speak(small, two)
    assert small.voice(one[0].reference) is not kept
    assert sounds(speak(small, one)) == first


# -- fixed shapes: all of a GPU's way but the capture ----------------------------------------------


@pytest.fixture(scope="module")
def stepping() -> Vocoder:
    """Computes as a GPU does, and finds NaN wherever nothing was put in place."""
    found = vocoder(voices=64, sizes=(1, 2, 4, 16))
    assert found.steps is not None
    for tensor in found.steps._places.values():
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)
    return found


# `test_a_step_gives_each_chunk_its_own` has sixteen in a step.
@pytest.mark.parametrize("count", sample([1, 3, 5, 16], [5]))
def test_steps_give_what_chunks_give_alone(small: Vocoder, stepping: Vocoder, count: int) -> None:
    """On a GPU a voice would sound other than published: prompts, lengths and ends differ."""
    company = [("a", 30), *COMPANY]
    turns = [
        chunks(f"{name} {index}", prompt, sizes=SIZES[index % 4 :])
        for index in range(-(-count // len(company)))
        for name, prompt in company
    ][:count]
    states: list[Turn | None] = [None] * count
    for at in range(max(map(len, turns))):
        going = [index for index, turn in enumerate(turns) if at < len(turn)]
        asked = [after(turns[index][at], states[index]) for index in going]
        for index, one, other in zip(going, small.speak(asked), stepping.speak(asked), strict=True):
            assert torch.allclose(one.mel, other.mel, atol=1e-4)
            assert one.pcm.shape == other.pcm.shape
            assert np.abs(one.pcm - other.pcm).max() < 2e-2  # The pitch's integral is in between.
            assert (one.turn is None) == (other.turn is None)
            states[index] = one.turn if other.turn is None or at % 2 else other.turn


@pytest.mark.costly
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_step_gives_each_chunk_its_own(stepping: Vocoder, size: int) -> None:
    """A session would hear what its neighbours leave, or the sessions that fill up a step."""
    turn, others = chunks("a"), [chunks(f"{name} z", prompt) for name, prompt in COMPANY]
    alone = state = None
    for index, chunk in enumerate(turn):
        company = [after(others[at % 4][index], None) for at in range(size - 1)]
        company.insert(size // 2, after(chunk, state))
        (one,) = stepping.speak([after(chunk, alone)])
        other = stepping.speak(company)[size // 2]
        assert torch.equal(one.mel, other.mel)
        alone, state = one.turn, other.turn


def tensors(result: Any) -> list[Tensor]:
    """The tensors that a step gives."""
    parts = attrs.astuple(result, recurse=False) if attrs.has(type(result)) else result
    return [parts] if isinstance(parts, Tensor) else [x for part in parts for x in tensors(part)]


def replayed(kind: Sequence[Fixed]) -> None:
    """Give the same memory each time, as graphs do, over which those of its kind write."""
    found = list[Tensor]()
    for each in kind:

        def compute(plain: Callable[[], Any] = each.compute, own: list[Any] = []) -> Any:  # noqa: B006
            for tensor in found:
                tensor.fill_(torch.nan)
            result = plain()
            if not own:
                own.append(result)
                found.extend(tensors(result))
            for old, new in zip(tensors(own[0]), tensors(result), strict=True):
                old.copy_(new)
            return own[0]

        each.compute = compute


def test_what_a_step_gives_stays(stepping: Vocoder) -> None:
    """A replayed graph writes over what it gave: a session would go on as another one does."""
    graphs = vocoder(voices=64, sizes=(1, 2, 4, 16))
    steps, turns = graphs.steps, [chunks(name, prompt) for name, prompt in (("a", 30), *COMPANY)]
    assert steps is not None
    replayed([each.encode for each in steps._padded])
    replayed([each.steps for each in steps._padded])
    for kind in steps._sounds.values():
        replayed(kind)
    states = [[None] * len(turns)] * 2
    for at in range(len(turns[0])):
        asked = [[after(t[at], s) for t, s in zip(turns, some, strict=True)] for some in states]
        spoken = []
        for which, some in zip((stepping, graphs), asked, strict=True):  # In different steps.
            spoken.append([one for part in (some[:1], some[1:]) for one in which.speak(part)])
        assert sounds(spoken[0]) == sounds(spoken[1])
        assert all(torch.equal(a.mel, b.mel) for a, b in zip(*spoken, strict=True))
        states = [[one.turn for one in some] for some in spoken]


def test_what_no_step_holds_is_computed_by_itself(small: Vocoder, stepping: Vocoder) -> None:
    """A turn of 26 codes, or a prompt that is longer than a session's, would be cut."""
    for voice, length in (("a", 28), ("long 200", 9)):
        used = reference(voice, 200 if "long" in voice else 30)
        chunk = Chunk(reference=used, turn=None, codes=codes("x", length), last=True, key="1")
        (one,), (other,) = small.speak([chunk]), stepping.speak([chunk])
        assert torch.equal(one.mel, other.mel)


@pytest.mark.parametrize("watch", [Capturing, Elsewhere])
def test_steps_can_be_captured(watch: type[TorchDispatchMode]) -> None:
    """A GPU would refuse them, and launch a voice kernel by kernel."""
    device = "cpu" if watch is Capturing else "meta"
    flow, hift = Flow(CONFIG).to(device, torch.bfloat16), Hift(HIFT_CONFIG).to(device)
    flow.prepare(STEPS)
    hift.prepare()
    steps = VoiceSteps(flow, hift, (1, 2))
    works = [each for padded in steps._padded for each in (padded.encode, padded.steps)]
    with torch.inference_mode(), watch():
        for work in (*works, *(each for some in steps._sounds.values() for each in some)):
            work.compute()


def test_sizes_hold_all_sessions_of_a_gpu() -> None:
    """A CPU's bits would depend on neighbours, or a replay, which has one slot, on all of them."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert sizes_on(cpu, 64, 512, exact=False) == ()
    assert [sizes_on(gpu, slots, 512, exact=True) for slots in (1, 64)] == [(1,), (1,)]
    assert sizes_on(gpu, 3, 512, exact=False) == (1, 2, 3)
    assert max(sizes_on(gpu, 64, 512, exact=False)) == 48  # More are arithmetic enough.


@pytest.mark.parametrize("sizes", [(), (28,), (8, 8, 8), SIZES])
def test_a_turn_lasts_as_long_as_its_codes(small: Vocoder, sizes: Sequence[int]) -> None:
    """Sound and text would drift apart."""
    spoken = speak(small, chunks("a", sizes=sizes))
    counts = [size - 3 for size in sizes] + [LAST]
    wanted = [2 * FRAME * size for size in counts]
    wanted[-1] += HELD
    assert [len(one.pcm) for one in spoken] == wanted
    assert not spoken[0].pcm[:HELD].any()
    assert spoken[-1].turn is None
    assert all(np.isfinite(one.pcm).all() and np.abs(one.pcm).max() <= 1 for one in spoken)


def test_a_turn_of_one_code_is_spoken(small: Vocoder) -> None:
    """A turn that was cut early would fail."""
    chunk = Chunk(reference=reference("a"), turn=None, codes=(7,), last=True)
    assert len(small.speak([chunk])[0].pcm) == 2 * FRAME + HELD


@pytest.mark.parametrize(
    ("count", "last"), [(0, True), (CODES_MAX + 1, True), (7, False), (CODES_MAX + 1, False)]
)
def test_other_numbers_of_codes_are_refused(small: Vocoder, count: int, last: bool) -> None:
    """A cache would outgrow its bound."""
    chunk = Chunk(reference=reference("a"), turn=None, codes=codes("x", count), last=last)
    with pytest.raises((AssertionError, ValueError)):
        small.speak([chunk])


def test_a_code_out_of_the_vocabulary_is_refused(small: Vocoder) -> None:
    """A GPU's context would be lost, to all sessions."""
    chunk = Chunk(reference=reference("a"), turn=None, codes=(4224,), last=True)
    with pytest.raises(AssertionError):
        small.speak([chunk])


def test_a_session_keeps_little_of_its_own(small: Vocoder) -> None:
    """Each session would pay for the prompt that all sessions of a voice have in common."""
    turn = chunks("a", 40)
    voice = small.voice(turn[0].reference)
    spoken = speak(small, turn[:-1])
    per_frame = voice.bytes_of(shared=True) / 80
    for one in spoken:
        assert one.turn is not None
        assert one.turn.bytes_of(shared=False) < 101 * per_frame + 100_000
        ours = {piece.rows.untyped_storage().data_ptr() for piece in voice.flow_rows}
        theirs = [piece for piece in one.turn.flow_rows if piece.is_shared]
        assert {piece.rows.untyped_storage().data_ptr() for piece in theirs} == ours


def test_the_flow_computes_in_less_precision(small: Vocoder) -> None:
    """On a GPU the voice would fail, or take the time of a step for another."""
    turn, coarse = chunks("a")[:2], vocoder(torch.bfloat16)
    for one, other in zip(speak(small, turn), speak(coarse, turn), strict=True):
        assert other.mel.dtype is torch.float32
        assert (one.mel - other.mel).square().mean() < 1e-3 * one.mel.square().mean()
        assert one.turn is not None
        assert other.turn is not None
        halved = other.turn.bytes_of(shared=True) * 2
        assert halved == one.turn.bytes_of(shared=True)


def test_voices_in_memory_are_bounded() -> None:
    """64 sessions with 64 voices would fill the memory."""
    small = vocoder(voices=3)
    used = [reference(f"voice {index}", 5) for index in range(64)]
    kept = [small.voice(one) for one in used]
    assert [small.voice(one) is kept[at] for at, one in list(enumerate(used))[-3:]] == [True] * 3
    assert small.voice(used[0]) is not kept[0]
    assert small.voice(used[63]) is kept[63]
    assert small.voice(used[61]) is not kept[61]  # The least recently used went.


def test_the_voice_of_a_turn_in_progress_stays() -> None:
    """Voices that turns hold would be in memory beside as many that others left."""
    small, state = vocoder(voices=2), None
    turn = chunks("a")
    for number, chunk in enumerate(turn[:3]):
        state = small.speak([after(chunk, state)])[0].turn
        small.voice(reference(f"other {number}", 5))
    assert turn[0].reference.digest in small._voices


def test_draws_are_keyed() -> None:
    """Two sessions would hear one noise, or one session another at each run."""
    assert np.array_equal(normal("1/2", 10), normal("1/2", 20)[:10])
    assert not np.array_equal(normal("1/2", 10), normal("1/3", 10))
    keys = list[str]()

    def draw(key: str, count: int) -> Pcm:
        keys.append(key)
        return normal(key, count)

    small = vocoder(draw=draw)
    speak(small, chunks("a", sizes=SIZES[:2]))
    (table, *sources) = keys
    assert table == "a small voice/table of the flow"
    assert sources == [f"a small voice/seed of a/source {frames}" for frames in (0, 50, 62)]


def test_the_key_changes_the_sound(small: Vocoder) -> None:
    """The session's seed would be ignored."""
    (one, other) = (
        Chunk(reference=reference("a"), turn=None, codes=codes("x", 28), last=False, key=key)
        for key in ("1", "2")
    )
    assert not np.array_equal(small.speak([one])[0].pcm, small.speak([other])[0].pcm)
