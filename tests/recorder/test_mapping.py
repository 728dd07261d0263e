"""Between the machine and its log: what an effect's record says of bytes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.effects import DecodeMedia, Effect, StartUnit
from protocol.values.frames import Utf8Text
from protocol.values.model import PastUnit, Unit
from protocol.values.records import RECORD_FIELDS, RECORD_NAMES, digest
from recorder.format.mapping import (
    HASHED_BYTES_MAX,
    HASHES_KEPT,
    Hashes,
    effect_record,
    event_of,
    event_record,
    plain_of,
)


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


# -- names and defaults ---------------------------------------------------------------------------

KNOWN: Final = Path(__file__).parents[1] / "golden" / "record_names.json"
"""The name of each record's class, its fields, and their defaults: `[]` for a field without one."""


def names_and_defaults() -> dict[str, dict[str, list[Any]]]:
    """Describe all records as this version knows them."""

    def shown(default: Any) -> Any:
        if isinstance(default, bytes):
            return f"{len(default)} bytes"
        return plain_of(default) if attrs.has(type(default)) else default

    found = {
        RECORD_NAMES[cls]: {
            name: [] if field.default is attrs.NOTHING else [shown(field.default)]
            for field, name in fields
        }
        for cls, fields in RECORD_FIELDS.items()
    }
    return dict(json.loads(json.dumps(found)))


def test_a_name_and_a_default_stay() -> None:
    """A field that is left out has its default: a log would mean something else with another one.

    What is new is to be added to the file; nothing in it is changed or removed.
    """
    assert names_and_defaults() == json.loads(KNOWN.read_text())


def test_every_event_effect_and_value_has_a_name() -> None:
    """A new event would be found to have none when a session meets it."""
    todo: list[Any] = [*get_args(ev.Event), *get_args(ef.Effect)]
    found = set[type]()
    while todo:
        kind = todo.pop()
        todo += get_args(kind)
        if isinstance(kind, type) and attrs.has(kind) and kind not in found:
            found.add(kind)
            todo += get_type_hints(kind).values()
    assert found - {Utf8Text} == RECORD_NAMES.keys() - {PastUnit}


def test_a_default_is_left_out_and_comes_back() -> None:
    """Logs would grow with each field that is ever added."""
    event = ev.UnitFailed(at_ns=7, index=3)
    assert event_record(event) == ("event", {"type": "UnitFailed", "index": 3})
    full = ev.UnitFailed(at_ns=7, index=3, context_full=True)
    assert event_record(full)[1] == {"type": "UnitFailed", "index": 3, "context_full": True}
    for one in (event, full):
        assert event_of(event_record(one)[1], 7) == one


def test_a_default_is_left_out_of_a_digest() -> None:
    """A field that is added would change the digest of each value without it."""
    assert digest(Unit(index=1, pcm=b"")) == digest(Unit(index=1, pcm=b"", force_speak=False))
    assert digest(Unit(index=1, pcm=b"")) != digest(Unit(index=1, pcm=b"", force_speak=True))


def test_a_value_without_a_name_has_no_digest() -> None:
    """The name of its class would be in what is made of the digest."""

    @attrs.frozen
    class Nameless:
        pass

    with pytest.raises(TypeError, match="a Nameless has no digest"):
        digest(Nameless())
