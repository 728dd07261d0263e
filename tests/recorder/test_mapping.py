"""Between the machine and its log: what an effect's record says of bytes."""

from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from protocol.values.digest import digest
from protocol.values.effects import DecodeMedia, Effect, StartUnit
from protocol.values.model import Unit
from recorder.format.mapping import HASHED_BYTES_MAX, HASHES_KEPT, Hashes, effect_record


@given(
    asked=st.lists(st.tuples(st.booleans(), st.binary(max_size=3)), max_size=20),
    again=st.lists(st.integers(0, 19)),
)
def test_a_digest_is_the_same_whoever_remembers_it(
    asked: list[tuple[bool, bytes]], again: list[int]
) -> None:
    """A replay, which remembers nothing, finds other digests than the log."""
    hashes = Hashes()
    for is_kept, data in [*asked, *(asked[index] for index in again if index < len(asked))]:
        assert (hashes.keep if is_kept else hashes.of)(data) == digest(data)


def test_kept_bytes_are_not_hashed_again_and_then_released() -> None:
    """A picture is hashed when it is proven, and named again when the model is shown it."""
    hashes = Hashes()
    several = [bytes([number]) * 100 for number in range(HASHES_KEPT)]
    held = [sys.getrefcount(data) for data in several]
    made = [hashes.keep(data) for data in several]
    assert all(hashes.of(data) is kept for data, kept in zip(several, made, strict=True))
    assert [sys.getrefcount(data) for data in several] == held
    assert hashes.of(several[0]) is not made[0]


def test_the_first_kept_bytes_give_way_to_a_fourth() -> None:
    """A client sends pictures and no sound, so that no unit takes them."""
    hashes = Hashes()
    first = bytes(100)
    made = hashes.keep(first)
    for number in range(HASHES_KEPT):
        hashes.keep(bytes([number]) * 100)
    assert hashes.of(first) is not made


def test_only_pictures_are_held_for_their_digest() -> None:
    """A second of sound goes to the model once, and a sound file is decoded to other bytes."""
    hashes = Hashes()
    pcm, wav = bytes(64_000), bytes(range(256))
    held = sys.getrefcount(pcm), sys.getrefcount(wav)
    unit = Unit(index=0, pcm=pcm, frames=(), force_listen=False)
    effect_record(StartUnit(unit=unit), hashes)
    effect_record(DecodeMedia(media=0, kind="wav", data=wav), hashes)
    del unit
    assert (sys.getrefcount(pcm), sys.getrefcount(wav)) == held


def test_large_bytes_are_not_held_for_their_digest() -> None:
    """A session holds the pictures of a minute ago."""
    hashes = Hashes()
    large = bytes(HASHED_BYTES_MAX + 1)
    assert hashes.keep(large) is not hashes.of(large)


def test_an_effect_is_recorded_alike_with_hashes_and_without() -> None:
    """The server writes another log than the one that a replay compares with."""
    jpeg = bytes(range(200))
    unit = Unit(index=3, pcm=bytes(64_000), frames=(jpeg, jpeg), force_listen=False)
    effects: tuple[Effect, ...] = (
        DecodeMedia(media=1, kind="jpeg", data=jpeg),
        StartUnit(unit=unit),
    )
    hashes = Hashes()
    assert [effect_record(effect, hashes) for effect in effects] == [
        effect_record(effect) for effect in effects
    ]
