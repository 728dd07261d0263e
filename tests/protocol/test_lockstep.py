"""Clients of 002 send the next chunk when the last one was answered: each chunk has a result.

The sound goes to the pure session; the model's answers come when the test wants them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pybase64 import b64encode_as_string as base64

from protocol.machine.duplex import Duplex
from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.limits import UNIT_FRAMES_MAX
from protocol.values.model import Finalized, Opened, UnitResult
from protocol.wire.codec import parse_frame
from tests.strategies.messages import jpeg_header

LIMITS = ev.SessionLimits(session_s=600, init_wait_s=30, cleanup_wait_s=10, context_tokens=8192)
PROMPT_LENGTH = 40


class Call:
    """A session of 002 whose model answers when it is told to."""

    def __init__(self, *, deferred: bool = True) -> None:
        opened = ev.ConnectionOpened(
            recording_id="rec-1",
            created_ms=1,
            mode="video",
            seed=1,
            limits=LIMITS,
            recording="off",
            endpoint="duplex",
            label="omni_1",
        )
        self.session, _ = Session.open(opened)
        self.now_ns = 0
        self.running: int | None = None
        self.results: list[dict[str, Any]] = []
        self.errors: list[dict[str, Any]] = []
        self.dropped = 0
        self.step(ev.SlotLeased, lease=1, slot=0)
        self.say(type="prepare", system_prompt="hi", deferred_finalize=deferred)
        self.step(ev.BackendOpened, lease=1, opened=Opened(prompt_length=PROMPT_LENGTH))

    def step(self, kind: type[Any], **fields: Any) -> None:
        """Step an event, and note what is said and asked for."""
        self.now_ns += 1_000_000
        for effect in self.session.step(kind(at_ns=self.now_ns, **fields)):
            match effect:
                case ef.Send():
                    body = dict(parse_frame(effect.frame, 1 << 24))
                    if body["type"] == "result":
                        self.results.append(body)
                    elif body["type"] == "error":
                        self.errors.append(body)
                case ef.StartUnit():
                    self.running = effect.unit.index
                case ef.StartFinalize():
                    self.step(ev.FinalizeDone, finalized=Finalized(index=effect.index, kv_length=0))
                case ef.Rollback():
                    self.step(ev.RollbackDone, index=effect.index)
                case ef.DropUnit():
                    self.dropped += 1

    def say(self, **fields: Any) -> None:
        """Send a message."""
        self.step(ev.FrameReceived, frame=json.dumps(fields))

    def chunk(self, samples: int, **fields: Any) -> None:
        """Send a chunk of sound."""
        self.say(type="audio_chunk", audio=base64(bytes(4 * samples)), **fields)

    def answer(self, *, speaks: bool = False, ends: bool = False) -> None:
        """Have the model answer the unit in flight."""
        index, self.running = self.running, None
        result = UnitResult(
            index=index,
            is_listen=not speaks,
            text="word" if speaks else "",
            end_of_turn=ends,
            kv_length=PROMPT_LENGTH + 10 * (index + 1),
        )
        self.step(ev.UnitDone, result=result)


def test_a_chunk_that_completes_no_second_is_answered_at_once() -> None:
    """A client in lockstep waits for ever: the server wants more before it answers."""
    call = Call()
    for _ in range(4):
        call.chunk(3_200)
    assert [result["pending"] for result in call.results] == [True] * 4
    for result in call.results:
        assert result["is_listen"] is True
        assert result["kv_cache_length"] == PROMPT_LENGTH
        assert result["cost_all_ms"] == result["n_tokens"] == 0
    call.chunk(3_200)
    assert len(call.results) == 4
    call.answer()
    assert len(call.results) == 5
    assert "pending" not in call.results[-1]


def test_one_sample_is_enough() -> None:
    """The last piece of a file is short, and its client gets an error for it."""
    call = Call()
    call.chunk(1)
    assert call.errors == []
    assert len(call.results) == 1


def test_a_pending_result_waits_behind_the_unit_in_flight() -> None:
    """A client takes the second answer for the first chunk's."""
    call = Call()
    call.chunk(16_000)
    call.chunk(100)
    call.chunk(100)
    assert call.results == []
    call.answer(speaks=True)
    assert ["pending" in result for result in call.results] == [False, True, True]


def test_amid_a_turn_it_is_no_listen() -> None:
    """The sources' page takes a listen for the end of the turn, and stops playing."""
    call = Call()
    call.chunk(16_000)
    call.answer(speaks=True)
    call.chunk(1_600)
    pending = call.results[-1]
    assert pending["pending"] is True
    assert (pending["is_listen"], pending["end_of_turn"]) == (False, False)
    assert (pending["text"], pending["audio_data"]) == ("", None)
    call.chunk(14_400)
    call.answer(speaks=True, ends=True)
    call.chunk(1_600)
    assert call.results[-1]["is_listen"] is True


def test_a_chunk_whose_units_were_all_dropped_is_answered() -> None:
    """Sound that is dropped (B7) leaves its client waiting."""
    call = Call()
    for _ in range(7):
        call.chunk(16_000)
    assert call.dropped == 1
    for _ in range(6):
        call.answer()
    assert ["pending" in result for result in call.results] == [False, True, *[False] * 5]


def test_a_unit_that_fails_answers_its_chunk() -> None:
    """What waits behind a failed unit is never said."""
    call = Call()
    call.chunk(16_000)
    call.chunk(100)
    call.step(ev.UnitFailed, index=0)
    assert [error["code"] for error in call.errors] == ["inference_error"]
    assert [result["pending"] for result in call.results] == [True]


@given(
    st.lists(st.one_of(st.integers(1, 40_000), st.sampled_from(["answer", "speak", "fail"]))),
    st.booleans(),
)
def test_each_chunk_has_its_results_in_order(does: list[int | str], deferred: bool) -> None:
    """However sound is cut and however late the model is, no chunk goes without an answer."""
    call, samples, chunks = Call(deferred=deferred), 0, 0
    for one in does:
        if isinstance(one, int):
            call.chunk(one)
            chunks += 1
            samples += one
        elif call.running is not None:
            if one == "fail":
                index, call.running = call.running, None
                call.step(ev.UnitFailed, index=index)
            else:
                call.answer(speaks=one == "speak")
        if call.session.end_reason is not None:
            return  # three failures in a row
    while call.running is not None:
        call.answer()
    units = samples // 16_000
    failed = sum(error["code"] == "inference_error" for error in call.errors)
    pending = sum("pending" in result for result in call.results)
    assert len(call.results) - pending + failed + call.dropped == units
    assert len(call.results) + failed >= chunks
    kind = call.session.kind
    assert isinstance(kind, Duplex)
    lockstep = kind.loop.lockstep
    assert lockstep is not None
    assert not lockstep.units


@pytest.mark.parametrize("way", ["with sound", "alone"])
def test_the_frames_of_a_second_are_bounded(way: str) -> None:
    """Tiny chunks with four pictures each fill a unit with thousands of them."""
    call, jpeg = Call(), base64(jpeg_header(64, 48))
    for _ in range(UNIT_FRAMES_MAX):
        if way == "with sound":
            call.chunk(1, frame_base64_list=[jpeg] * 4)
        else:
            call.say(type="video_frame", frame=jpeg)
            call.chunk(1)
            call.say(type="video_frame", frame=jpeg)
            call.chunk(1)
    kind = call.session.kind
    assert isinstance(kind, Duplex)
    frames = len(kind.loop.input.assembler.attached.frames)
    assert frames == UNIT_FRAMES_MAX
    assert {error["code"] for error in call.errors} == {"invalid_payload"}
