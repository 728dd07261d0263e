"""Cutting sound into appends: whatever comes in, units come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.errors import LocalProtocolError
from protocol.values.limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN, FRAMES_MAX
from protocol.values.model import SAMPLE_BYTES, UNIT_SAMPLES
from protocol.values.requests import Append
from runtime.client.duplex import UnitCutter, to_pcm

AMOUNTS = st.lists(
    st.tuples(st.integers(0, 40_000), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)
"""Samples that are added, frames with them, and whether the model is interrupted after it."""


def noise(samples: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Some sound that is like no other."""
    return np.random.default_rng(seed).uniform(-1, 1, samples).astype(np.float32)


def length(append: Append) -> int:
    """Samples of an append."""
    return len(append.pcm) // SAMPLE_BYTES


@given(AMOUNTS)
@example([(12_500, 0, True), (19_499, 0, False), (1, 0, False)])
def test_what_goes_in_comes_out(amounts: list[tuple[int, int, bool]]) -> None:
    """Sound would be lost, doubled or swapped, or an append be refused for its length."""
    cutter = UnitCutter()
    said, sent = b"", b""
    for number, (samples, _, interrupts) in enumerate(amounts):
        pcm = noise(samples, number).tobytes()
        appends = cutter.add(pcm)
        said += pcm
        if interrupts:
            appends.append(cutter.at_once())
            silence = bytes(max(0, len(sent) + sum(len(a.pcm) for a in appends) - len(said)))
            said += silence
            assert len(silence) < APPEND_SAMPLES_MIN * SAMPLE_BYTES + 1
        sent += b"".join(append.pcm for append in appends)
        assert all(APPEND_SAMPLES_MIN <= length(a) <= APPEND_SAMPLES_MAX for a in appends)
        assert said.startswith(sent)
        assert len(said) - len(sent) == cutter.held_samples * SAMPLE_BYTES
    sent += b"".join(append.pcm for append in cutter.rest())
    assert sent == said + bytes(len(sent) - len(said))
    assert cutter.held_samples == 0
    assert not cutter.rest()


@given(AMOUNTS)
def test_appends_and_units_end_together(amounts: list[tuple[int, int, bool]]) -> None:
    """A second of sound would be answered only when the next one came."""
    cutter = UnitCutter()
    sent = 0
    for samples, _, interrupts in amounts:
        for append in cutter.add(noise(samples)):
            sent += length(append)
            assert sent % UNIT_SAMPLES == 0
        assert (sent + cutter.held_samples) // UNIT_SAMPLES - sent // UNIT_SAMPLES <= 1
        if interrupts:
            sent += length(cutter.at_once())
    assert all((sent + length(append)) % UNIT_SAMPLES == 0 for append in cutter.rest())


@given(AMOUNTS)
def test_what_is_seen_goes_with_the_sound_that_ends_there(
    amounts: list[tuple[int, int, bool]],
) -> None:
    """The model would see what happens a second before or after it hears of it."""
    cutter = UnitCutter()
    added, sent = 0, 0
    shown: list[tuple[int, bytes]] = []  # how much was sent by the end of its append, and what
    expected: list[tuple[int, bytes]] = []  # where its sound ends
    for number, (samples, frames, _) in enumerate(amounts):
        seen = tuple(b"%d.%d" % (number, i) for i in range(frames))
        added += samples
        expected += [(added, jpeg) for jpeg in seen]
        for append in cutter.add(noise(samples), seen):
            sent += length(append)
            shown += [(sent, jpeg) for jpeg in append.frames]
    for append in cutter.rest():
        sent += length(append)
        shown += [(sent, jpeg) for jpeg in append.frames]
    ends = {jpeg: end for end, jpeg in expected}
    assert all(sent - UNIT_SAMPLES <= ends[jpeg] <= sent for sent, jpeg in shown)
    for end in {end for end, _ in shown}:
        of_unit = [jpeg for at, jpeg in shown if at == end]
        assert len(of_unit) <= FRAMES_MAX
    missed = {jpeg for _, jpeg in expected} - {jpeg for _, jpeg in shown}
    assert not missed or len(expected) > FRAMES_MAX


def test_the_newest_frames_are_kept() -> None:
    """A camera of 30 pictures a second would be refused, or show the past."""
    cutter = UnitCutter()
    for number in range(30):
        appends = cutter.add(noise(UNIT_SAMPLES // 30), (b"%d" % number,))
    (append,) = cutter.rest()
    assert not appends
    assert append.frames == (b"26", b"27", b"28", b"29")


def test_a_frame_alone_is_shown_with_silence() -> None:
    """A picture without a sound would never be shown."""
    cutter = UnitCutter()
    assert not cutter.add(b"", (b"jpeg",))
    (append,) = cutter.rest()
    assert append == Append(pcm=bytes(UNIT_SAMPLES * SAMPLE_BYTES), frames=(b"jpeg",))


def test_an_interruption_is_marked() -> None:
    """The model would talk on."""
    cutter = UnitCutter()
    cutter.add(noise(100))
    append = cutter.at_once()
    assert append.force_listen
    assert length(append) == APPEND_SAMPLES_MIN


SOUND = noise(100)
KINDS: dict[str, Any] = {
    "float32": SOUND,
    "float64": SOUND.astype(np.float64),
    "strided": np.repeat(SOUND, 2)[::2],
    "big endian": SOUND.astype(">f4"),
    "bytes": SOUND.tobytes(),
    "bytearray": bytearray(SOUND.tobytes()),
    "memoryview": memoryview(SOUND.tobytes()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_sound(kind: str) -> None:
    """A caller's array would be sent as other numbers than it holds."""
    assert to_pcm(KINDS[kind]) == SOUND.tobytes()


@pytest.mark.parametrize(
    ("samples", "why"),
    [
        (np.zeros(100, np.int16), r"int16 of shape \(100,\)"),
        (np.zeros((2, 100), np.float32), r"shape \(2, 100\)"),
        (np.array([0, np.nan], np.float32), "NaN"),
        (np.array([np.inf], "<f4").tobytes(), "infinity"),
        (b"\0" * 7, "7 bytes"),
    ],
)
def test_no_sound(samples: Any, why: str) -> None:
    """Noise would be sent, or the whole session be lost by the server's answer."""
    cutter = UnitCutter()
    with pytest.raises(LocalProtocolError, match=why):
        cutter.add(samples)
    assert cutter.held_samples == 0


@pytest.mark.parametrize("value", [16_000, [0, 0, 0, 0], [0.5], "text", None])
def test_what_is_no_sound_is_refused(value: Any) -> None:
    """A number would be sent as that much silence, and a list of integers as bytes."""
    with pytest.raises(LocalProtocolError, match=f"samples are a {type(value).__name__}, expected"):
        to_pcm(value)
