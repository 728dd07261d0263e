"""The Python API of streaming input: sound of any kind and length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.values.model import UNIT_BYTES
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.engine.backend import EngineBackend
from runtime.streaming import (
    BackendRefused,
    Picture,
    Sound,
    Streaming,
    StreamingInput,
    StreamingOutput,
    Text,
)
from tests.models.random_model import sound
from tests.runtime.model.test_minicpmo_anchor import wiped
from tests.sessions.streaming import given_chunks, params, read

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> DuplexModel:
    return DuplexModel.load(checkpoint, slots=2)


@pytest.fixture
def backend(model: DuplexModel) -> Iterator[EngineBackend]:
    yield EngineBackend(model)
    assert all(wiped(model, slot) for slot in range(2))


async def ask(backend: EngineBackend, *prompts: Any) -> list[StreamingOutput]:
    """Answer chunks, two tokens each."""
    chunks = [StreamingInput(prompt, params(2, temperature=1.0)) for prompt in prompts]
    async with Streaming(backend) as streaming:
        return await read(streaming.generate(given_chunks(*chunks), request_id="same"))


def told(outputs: list[StreamingOutput]) -> list[tuple[int, ...]]:
    return [(*output.token_ids, output.prompt_tokens, output.kv_length) for output in outputs]


# -- kinds ----------------------------------------------------------------------------------------


async def test_an_array_is_sound(backend: EngineBackend) -> None:
    """What every library of sound gives would end in a traceback."""
    samples = np.frombuffer(sound(1), "<f4")
    wanted = await ask(backend, Sound(pcm=sound(1)))
    for array in (samples, samples.astype(np.float64), samples[::-1][::-1], samples.astype(">f4")):
        assert await ask(backend, Sound(pcm=array)) == wanted
    assert await ask(backend, Sound(pcm=bytearray(sound(1)))) == wanted
    assert Sound(pcm=samples) == Sound(pcm=sound(1))


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(16_000, np.int16), "pcm is an array of int16, not of floats"),
        (np.zeros((16_000, 2), np.float32), "pcm has 2 dimensions, not 1"),
        ("words", "pcm is a str"),
        (None, "pcm is a NoneType"),
    ],
)
async def test_what_is_no_sound_is_refused_where_it_is_made(array: Any, text: str) -> None:
    """Whole numbers taken for floats would be noise, and two channels half as fast."""
    with pytest.raises(TypeError, match=text):
        Sound(pcm=array)


# -- lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [1, 4_000, 16_000, 22_050])
async def test_how_sound_is_split_makes_no_difference(backend: EngineBackend, piece: int) -> None:
    """A microphone would have to count to sixteen thousand."""
    heard = sound(1) + sound(2)
    wanted = told(await ask(backend, Sound(pcm=heard[:UNIT_BYTES]), Sound(pcm=heard[UNIT_BYTES:])))
    if piece == 1:
        pieces = [heard[:4], heard[4:UNIT_BYTES], heard[UNIT_BYTES:-4], heard[-4:]]
    else:
        pieces = [heard[at : at + 4 * piece] for at in range(0, len(heard), 4 * piece)]
    assert told(await ask(backend, *(Sound(pcm=each) for each in pieces))) == wanted


async def test_outputs_name_the_chunk_that_completed_a_second(backend: EngineBackend) -> None:
    """Whoever sends small pieces could not tell what an answer belongs to."""
    quarters = [sound(1)[at : at + UNIT_BYTES // 4] for at in range(0, UNIT_BYTES, UNIT_BYTES // 4)]
    outputs = await ask(backend, *(Sound(pcm=each) for each in (*quarters, *quarters[:2])))
    assert [output.chunk for output in outputs] == [3, 3, 5, 5]
    filled = await ask(backend, Sound(pcm=sound(1) + quarters[0]))
    assert [output.chunk for output in filled] == [0, 0, 1, 1]


async def test_what_is_left_is_filled_up_with_silence(backend: EngineBackend) -> None:
    """The end of what was said would be lost."""
    left = sound(1)[:8_000]
    whole = left.ljust(UNIT_BYTES, b"\0")
    assert told(await ask(backend, Sound(pcm=left))) == told(await ask(backend, Sound(pcm=whole)))
    marked = [Sound(pcm=left), "and then?"]
    assert told(await ask(backend, marked)) == told(
        await ask(backend, [Sound(pcm=whole), "and then?"])
    )
    assert told(await ask(backend, Sound(pcm=left), "and then?")) == told(
        await ask(backend, [Sound(pcm=whole), Text(text="and then?")])
    )


async def test_sound_that_is_malformed_names_its_part(backend: EngineBackend) -> None:
    """One sample that is no number would spoil a request for good."""
    broken = np.zeros(10, np.float32)
    broken[3] = np.nan
    with pytest.raises(BackendRefused, match=r"prompt\[1\].pcm: a sample is not finite"):
        await ask(backend, ["hm", Sound(pcm=broken)])
    with pytest.raises(BackendRefused, match=r"prompt\[1\].jpeg"):
        await ask(backend, [Sound(pcm=sound(1)), Picture(jpeg=b"no picture")])
