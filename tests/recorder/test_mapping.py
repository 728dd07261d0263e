"""Between the machine and its log: what an effect's record says of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.values.digest import digest
from protocol.values.effects import DecodeMedia, Effect, StartUnit
from protocol.values.model import Unit
from recorder.format.mapping import HASHED_BYTES_MAX, HASHES_KEPT, Hashes, effect_record


@given(asked=st.lists(st.binary(max_size=3), max_size=20), again=st.lists(st.integers(0, 19)))
def test_a_digest_is_the_same_whoever_remembers_it(asked: list[bytes], again: list[int]) -> None:
    """A replay, which remembers nothing, finds other digests than the log."""
    hashes = Hashes()
    for data in [*asked, *(asked[index] for index in again if index < len(asked))]:
        assert hashes.of(data) == digest(data)


def test_the_last_bytes_are_not_hashed_again() -> None:
    """A picture costs its hash twice: when it is decoded, and when the model is shown it."""
    hashes = Hashes()
    several = [bytes([number]) * 100 for number in range(HASHES_KEPT)]
    first = [hashes.of(data) for data in several]
    assert all(hashes.of(data) is made for data, made in zip(several, first, strict=True))
    hashes.of(b"another")
    assert hashes.of(several[0]) is not first[0]


def test_large_bytes_are_not_held_for_their_digest() -> None:
    """A session holds the pictures of a minute ago."""
    hashes = Hashes()
    large = bytes(HASHED_BYTES_MAX + 1)
    assert hashes.of(large) is not hashes.of(large)


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
