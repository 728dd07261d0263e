"""The quick way of records: the recorder's own code writes and reads the same."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import UnitResult
from recorder.format.format import RecordInvalid
from runtime.link import messages
from runtime.link.messages import (
    HEADER_BYTES_MAX,
    SETUP,
    Answer,
    Ask,
    Message,
    Receiver,
    Sender,
    read_record,
    stream_of,
    write_record,
)
from tests.sessions.in_memory import pcm

from .test_messages import MESSAGES, UNIT, joined

RECORDS = [each for each in MESSAGES if isinstance(each, Ask | Answer) and stream_of(each) != SETUP]
RESULT = UnitResult(index=3, is_listen=False, text="so", pcm=pcm(), fed_ids=(1, 2), margin=0.5)
LARGE_INT = 1 << 70


def answer(**fields: Any) -> Answer:
    result = attrs.evolve(RESULT, **fields)
    return Answer(call=7, session=4, event=ev.UnitDone(at_ns=0, result=result))


UNUSUAL = (
    answer(text="\ud800"),
    answer(text="long " * HEADER_BYTES_MAX),
    answer(index=LARGE_INT),
    answer(fed_ids=(1, LARGE_INT)),
    answer(margin=1e30),
    Ask(call=7, session=4, effect=ef.StartFinalize(index=-LARGE_INT, interrupted=True)),
)


def written(message: Message) -> bytearray:
    return joined(Sender().encode(message))


def is_quick(frame: bytearray) -> bool:
    return read_record(memoryview(frame)[1:]) is not None


@pytest.mark.parametrize("message", RECORDS, ids=lambda it: type(it).__name__)
def test_both_ways_are_one_format(message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the version before would not understand its gateway, or the other way round."""
    quick = written(message)
    assert is_quick(quick)
    with monkeypatch.context() as patch:
        patch.setattr(messages, "write_record", lambda *_: None)
        slow = written(message)
    assert Receiver().decode(stream_of(message), slow) == message
    monkeypatch.setattr(messages, "read_record", lambda _: None)
    assert Receiver().decode(stream_of(message), quick) == message


@pytest.mark.parametrize("message", UNUSUAL, ids=range(len(UNUSUAL)))
def test_what_is_unusual_crosses_too(message: Message) -> None:
    """A text or a number of one session would cost the worker all of them."""
    frame = written(message)
    assert not is_quick(frame)
    assert Receiver().decode(stream_of(message), frame) == message


@pytest.mark.parametrize("margin", [math.nan, math.inf])
def test_a_number_that_json_does_not_hold_is_refused(margin: float) -> None:
    """It would arrive as null, and the gateway would take the worker for broken."""
    with pytest.raises(RecordInvalid, match="which JSON does not"):
        written(answer(margin=margin))


def test_bytes_are_cut_where_the_table_says() -> None:
    """One picture would be the end of another, or memory of the connection."""
    pieces = write_record("effect", {"first": b"abc", "second": [b"", b"defg"]})
    assert pieces is not None
    frame = b"".join(pieces)
    assert read_record(memoryview(frame)) == {"first": b"abc", "second": [b"", b"defg"]}
    for wrong in (frame.replace(b"[0,4,4]", b"[0,5,5]"), frame.replace(b"[0,3,3]", b"[0,4,3]")):
        assert wrong != frame
        assert read_record(memoryview(wrong)) is None


@given(st.sampled_from([*RECORDS, answer()]), st.data())
def test_a_damaged_record_is_read_alike(message: Message, data: st.DataObject) -> None:
    """A peer could have one of two readers accept what the other refuses."""
    frame = written(message)
    start = min(len(frame), 600)
    for _ in range(data.draw(st.integers(1, 3))):
        byte = data.draw(st.sampled_from(b'0123456789-.eE[]{},:"$tfn\xff\0'))
        frame[data.draw(st.integers(1, start - 1))] = byte
    fields = read_record(memoryview(frame)[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "read_record", lambda _: None)
        if fields is not None:
            assert fields == Receiver()._fields(stream_of(message), frame)


def test_a_unit_is_read_from_memory_that_is_used_again() -> None:
    """The sound of a unit would change while the model hears it."""
    frame = written(Ask(call=7, session=4, effect=ef.StartUnit(unit=UNIT)))
    read = Receiver().decode(5, memoryview(frame))
    frame[:] = bytes(len(frame))
    assert read == Ask(call=7, session=4, effect=ef.StartUnit(unit=UNIT))
