"""A chat's turns under anything that can happen, and one by one.

The stateful machine is the world around a chat: a queue, a model, a decoder, timers and a client,
each of which does what it may at any moment. The rules it holds the session to are its own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pybase64 import b64encode_as_string as base64

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.errors import ErrorCode
from protocol.values.messages import QueuePlace
from protocol.values.model import Picture, Prefill, Sound, TurnChunk, TurnResult
from protocol.values.state import State
from tests.project.sampling import sample
from tests.sessions.chatting import LIMITS, OTHER_RATE, PCM, Run, active, answer, question


def test_a_turn_streams_and_ends() -> None:
    """A client of mode=chat sees no words, or never the end of an answer."""
    run = active()
    assert run.of(ef.EnterQueue) == []
    run.ask(question())
    answer(run, 0, "Good ", "day")
    assert run.kinds == [
        "session.queue_done", "session.created", "text", "text", "response.done",
    ]  # fmt: skip
    assert run.sent[1]["mode"] == "turn_based"
    assert run.sent[-1]["text"] == "Good day"
    assert run.sent[-1]["reason"] == "turn_end"
    assert run.session.state is State.ACTIVE


def test_a_turn_at_once_says_nothing_before_its_end() -> None:
    """A client that asked for no stream gets one, or loses the sound."""
    run = active()
    run.ask(question(streaming=False, tts={"enabled": True}))
    answer(run, 0, "a", "b", pcm=PCM)
    assert run.kinds[2:] == ["response.done"]
    assert len(run.sent[-1]["audio"]) == 4 * len(PCM)  # three pieces in base64


def test_the_slot_is_held_for_a_turn_alone() -> None:
    """Chats that say nothing would keep a model busy."""
    run = active()
    run.ask(question())
    assert len(run.of(ef.EnterQueue)) == 1
    answer(run, 0, "a")
    assert [release.lease for release in run.of(ef.Release)] == [1]
    run.ask(question())
    answer(run, 1, "b", lease=2)
    assert [release.lease for release in run.of(ef.Release)] == [1, 2]
    assert [start.turn.index for start in run.of(ef.StartTurn)] == [0, 1]


def test_a_question_amid_a_turn_is_out_of_place_and_the_turn_goes_on() -> None:
    """A double click would spoil the answer that is being given."""
    run = active()
    run.ask(question())
    run.ask(question())
    assert run.sent[-1]["error"]["code"] == "invalid_event"
    answer(run, 0, "a")
    assert run.kinds[-1] == "response.done"


def test_a_close_amid_a_turn_ends_it_first() -> None:
    """The words that were shown are never told to be all there is."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnPrefilled, prefill=Prefill(index=0, input_tokens=3))
    run.step(ev.TurnProgress, chunk=TurnChunk(index=0, step=0, text="Well", token_ids=(1,)))
    effects = run.say({"type": "session.close", "reason": "user_stop"})
    assert run.kinds[-2:] == ["response.done", "session.closed"]
    assert (run.sent[-2]["reason"], run.sent[-2]["text"]) == ("interrupted", "Well")
    assert ef.CutTurn(index=0) in effects
    assert not run.of(ef.Release)
    run.step(ev.TurnDone, result=TurnResult(index=0, text="Well", reason="interrupted", cut=1))
    assert len(run.of(ef.Release)) == 1
    run.step(ev.BackendReleased, lease=1)
    assert run.session.is_finished


def test_a_client_that_leaves_cuts_its_turn() -> None:
    """The model would go on for nobody."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    assert ef.CutTurn(index=0) in run.step(ev.PeerGone)
    assert not run.session.is_finished
    run.step(ev.TurnFailed, index=0)
    run.step(ev.BackendReleased, lease=1)
    assert run.session.is_finished


def test_a_turn_that_hangs_condemns_its_slot() -> None:
    """A dead model would keep the session, and the server could not end."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.PeerGone)
    timer = next(timer for timer in run.of(ef.SetTimer) if timer.name == "cleanup")
    run.step(ev.TimerFired, name="cleanup", generation=timer.generation)
    assert run.of(ef.Release) == [ef.Release(lease=1, condemn=True)]


@pytest.mark.parametrize(
    ("full", "code"), [(False, ErrorCode.INFERENCE_ERROR), (True, ErrorCode.INVALID_PAYLOAD)]
)
def test_a_turn_that_fails_costs_the_turn_alone(full: bool, code: ErrorCode) -> None:
    """One long question would end the whole conversation."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnFailed, index=0, context_full=full)
    assert run.sent[-1]["error"]["code"] == code
    assert len(run.of(ef.Release)) == 1
    run.step(ev.BackendReleased, lease=1)
    run.ask(question())
    answer(run, 1, "a", lease=2)
    assert run.kinds[-1] == "response.done"


def test_a_turn_that_the_model_cannot_do_says_why() -> None:
    """A client would be told that the server failed, and ask the same again."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnFailed, index=0, refused="enable_thinking: no")
    error = run.sent[-1]["error"]
    assert (error["code"], error["message"]) == ("invalid_payload", "enable_thinking: no")
    run.step(ev.BackendReleased, lease=1)
    run.ask(question())
    answer(run, 1, "a", lease=2)
    assert run.kinds[-1] == "response.done"


def test_a_question_is_answered_once() -> None:
    """What a model that was lost had said last came as another answer, or as that to another."""
    late = TurnResult(index=0, text="late", kv_length=20)
    run = active()
    run.ask(question())
    answer(run, 0, "a")
    assert not run.step(ev.TurnDone, result=late)
    run.ask(question())
    assert not run.step(ev.TurnDone, result=late)
    run.step(ev.SlotLeased, lease=2, slot=0)
    assert not run.step(ev.TurnDone, result=late)
    assert not run.step(ev.TurnFailed, index=0)
    run.step(ev.TurnDone, result=TurnResult(index=1, text="b", kv_length=20))
    assert not run.step(ev.TurnFailed, index=1)
    assert [body["text"] for body in run.sent if body["type"] == "response.done"] == ["a", "b"]
    assert [release.lease for release in run.of(ef.Release)] == [1, 2]


def test_a_question_that_is_asked_again_is_answered_by_the_new_model() -> None:
    """The lost model's end came before the new one's, and the client got both or half of one."""
    run = active(rebuild_wait_s=10, can_repeat=True)
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    chunks = [TurnChunk(index=0, step=step, text=text) for step, text in enumerate("abc")]
    run.step(ev.TurnProgress, chunk=chunks[0])
    run.step(ev.TurnProgress, chunk=chunks[1])
    run.step(ev.BackendLost, lease=1)
    done = TurnResult(index=0, text="abc", kv_length=20)
    for _ in range(2):  # on its way back, and in the queue
        assert not run.step(ev.TurnProgress, chunk=chunks[2])
        assert not run.step(ev.TurnDone, result=done)
        run.step(ev.BackendReleased, lease=1)
    run.step(ev.SlotLeased, lease=2, slot=0)
    for chunk in chunks:
        run.step(ev.TurnProgress, chunk=chunk)
    run.step(ev.TurnDone, result=done)
    assert [body["text"] for body in run.sent if body.get("kind") == "text"] == ["a", "b", "c"]
    assert [body["text"] for body in run.sent if body["type"] == "response.done"] == ["abc"]


def test_a_single_request_that_the_model_cannot_do_ends_as_the_clients_mistake() -> None:
    """A client could not tell its own mistake from ours."""
    run = Run("chat")
    run.step(ev.Admitted)
    run.say(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnFailed, index=0, refused="enable_thinking: no")
    run.step(ev.BackendReleased, lease=1)
    assert (run.sent[-1]["code"], run.sent[-1]["error"]) == (
        "invalid_payload",
        "enable_thinking: no",
    )
    assert [it.code for it in run.of(ef.Close)] == [1000]
    assert run.session.is_finished


def test_the_next_question_waits_for_the_last_slot_to_be_clean() -> None:
    """Two turns of one chat would hold two slots, or run on memory that is being wiped."""
    run = active()
    run.ask(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnPrefilled, prefill=Prefill(index=0, input_tokens=3))
    run.step(ev.TurnDone, result=TurnResult(index=0, text=""))
    run.ask(question())
    assert len(run.of(ef.EnterQueue)) == 1
    run.step(ev.BackendReleased, lease=1)
    assert len(run.of(ef.EnterQueue)) == 2


def test_media_is_decoded_before_a_slot_is_asked_for() -> None:
    """A slot would stand idle while a video is being decoded."""
    run = active()
    video = base64(b"\0\0\0\x18ftypisom" + bytes(200))
    run.ask(question({"type": "video", "data": video, "stack_frames": 2}, OTHER_RATE))
    decodes = run.of(ef.DecodeMedia)
    assert [(it.kind, it.rate_hz, it.stack_frames) for it in decodes] == [
        ("video", 0, 2), ("audio", 8000, 1),
    ]  # fmt: skip
    assert run.of(ef.EnterQueue) == []
    run.step(ev.MediaDecoded, media=1, pcm=b"\0" * 64)
    second = b"\0" * 64_000
    run.step(ev.MediaDecoded, media=0, pcm=second * 2, pictures=(b"a", b"b"), stacked=(b"c", b"d"))
    run.step(ev.SlotLeased, lease=1, slot=0)
    (start,) = run.of(ef.StartTurn)
    shown = [Picture(jpeg=b"a"), Sound(pcm=second), Picture(jpeg=b"c")]
    shown += [Picture(jpeg=b"b"), Sound(pcm=second), Picture(jpeg=b"d"), Sound(pcm=b"\0" * 64)]
    assert list(start.turn.messages[0].content) == shown
    assert start.turn.max_slice_nums == 1


def test_damaged_media_costs_the_turn_alone() -> None:
    """A broken picture would end the conversation, or be left out without a word."""
    run = active()
    run.ask(question(OTHER_RATE))
    run.step(ev.MediaRejected, media=0, reason="it is damaged")
    assert run.sent[-1]["error"]["code"] == "invalid_payload"
    run.ask(question())
    assert len(run.of(ef.EnterQueue)) == 1


def test_a_turn_that_waits_is_told_its_place_without_a_second_queue_done() -> None:
    """A client that waits for its answer would believe the server dead."""
    run = active()
    run.ask(question())
    place = QueuePlace(position=1, estimated_wait_s=3, ticket_id="ticket_1", queue_length=1)
    run.step(ev.TicketMoved, place=place)
    answer(run, 0, "a")
    assert run.kinds[2:] == ["session.queued", "text", "response.done"]


def test_between_turns_a_chat_may_be_idle_for_so_long() -> None:
    """Forgotten browser tabs would fill the server."""
    run = active()
    idle = [timer for timer in run.of(ef.SetTimer) if timer.name == "idle"]
    run.ask(question())
    assert [it.name for it in run.of(ef.CancelTimer)][-1] == "idle"
    answer(run, 0, "a")
    last = [timer for timer in run.of(ef.SetTimer) if timer.name == "idle"][-1]
    assert len(idle) == 1
    assert last.at_ns - run.now_ns <= LIMITS.idle_s * 10**9
    run.step(ev.TimerFired, name="idle", generation=last.generation)
    assert run.sent[-1] == {
        "type": "session.closed", "session_id": run.sent[1]["session_id"], "reason": "timeout",
    }  # fmt: skip


def test_a_single_request_is_prefilled_told_and_closed() -> None:
    """A client of /ws/chat waits for ever, or gets events that 004 does not have."""
    run = Run("chat")
    run.step(ev.Admitted)
    assert run.session.state is State.CONNECTED
    run.say(question(tts={"enabled": True}))
    answer(run, 0, "Good ", "day", pcm=PCM)
    assert run.kinds == ["prefill_done", "chunk", "chunk", "chunk", "done"]
    assert run.sent[0]["input_tokens"] == 12
    assert [chunk["audio_data"] for chunk in run.sent[1:-1]] == [base64(PCM)] * 3
    assert run.sent[-1]["audio_data"] is None
    assert run.of(ef.Close) == [ef.Close(code=1000, reason="answered")]
    assert run.session.is_finished


def test_a_single_request_that_must_wait_is_queued() -> None:
    """It would be told of a queue where there is none, or not where there is one."""
    run = Run("chat")
    run.step(ev.Admitted)
    run.say(question())
    place = QueuePlace(position=1, estimated_wait_s=3, ticket_id="ticket_1", queue_length=1)
    run.step(ev.TicketMoved, place=place)
    assert run.session.state is State.QUEUED
    answer(run, 0, "a")
    assert run.kinds == ["queued", "queue_done", "prefill_done", "chunk", "done"]


@pytest.mark.parametrize(
    ("frame", "close"),
    [
        ("{", 1000), ("[]", 1000), (b"\0", 1000), (None, 1009), ("{}", 1000),
        ('{"messages": []}', 1000), ('{"messages": 5}', 1000),
    ],
)  # fmt: skip
def test_a_bad_single_request_gets_an_error_and_a_close(
    frame: str | bytes | None, close: int
) -> None:
    """The client would wait for an answer that never comes."""
    run = Run("chat")
    run.step(ev.Admitted)
    run.step(ev.FrameReceived, frame=frame)
    assert run.kinds == ["error"]
    assert [it.code for it in run.of(ef.Close)] == [close]
    assert run.session.is_finished


def test_a_single_request_that_fails_ends_with_an_internal_error() -> None:
    """A client could not tell our fault from its own."""
    run = Run("chat")
    run.step(ev.Admitted)
    run.say(question())
    run.step(ev.SlotLeased, lease=1, slot=0)
    run.step(ev.TurnFailed, index=0)
    run.step(ev.BackendReleased, lease=1)
    assert run.sent[-1]["code"] == "inference_error"
    assert [it.code for it in run.of(ef.Close)] == [1011]
    assert run.session.is_finished


RARELY = st.sampled_from([*["nothing"] * 40, "close", "leave", "warn", "drain"])


class ChatWorld(RuleBasedStateMachine):
    """Everything around a chat, at any moment."""

    @initialize(endpoint=st.sampled_from(["realtime", "realtime", "chat"]), ready=st.booleans())
    def connect(self, endpoint: ev.Endpoint, ready: bool) -> None:
        """Open a connection; `ready`: a chat is set up, and may be asked."""
        self.run = Run(endpoint)
        self.endpoint = endpoint
        self.waits = self.admitting = self.is_draining = False
        self.lease: int | None = None
        self.leases = 0
        self.turn: int | None = None
        self.prefilled = False
        self.step_number = 0
        self.releasing = False
        self.media: list[int] = []
        self.asked = self.outcomes = 0
        self.timers: dict[str, int] = {}
        self.texts = ""
        self._perform(self.run.effects)
        if ready and endpoint == "realtime":
            self.admit(0)
            self.init()

    def _step(self, kind: type[Any], **fields: Any) -> None:
        self._perform(self.run.step(kind, **fields))

    def _perform(self, effects: list[ef.Effect]) -> None:
        for effect in effects:
            match effect:
                case ef.Admit():
                    self.admitting = True
                case ef.EnterQueue():
                    assert not self.waits, "two places in the queue"
                    assert not self.is_draining, "a place for a turn that will not be served"
                    assert self.lease is None, "a place while a slot is held"
                    assert not self.media, "a place before the question is whole"
                    self.waits = True
                case ef.LeaveQueue():
                    assert self.waits
                    self.waits = False
                    self._step(ev.TicketLeft)
                case ef.StartTurn(lease=lease, turn=turn):
                    assert lease == self.lease
                    assert self.turn is None, "two turns on the model"
                    self.turn, self.prefilled, self.step_number = turn.index, False, 0
                case ef.CutTurn(index=index):
                    assert index == self.turn
                case ef.Release(lease=lease, condemn=condemn):
                    assert lease == self.lease, "a slot that is not held"
                    assert not self.releasing, "released twice (B5)"
                    assert self.turn is None or condemn, "released under a running turn (B4)"
                    self.releasing = True
                case ef.DecodeMedia(media=media):
                    self.media.append(media)
                case ef.CancelDecode(media=media):
                    self.media.remove(media)
                case ef.SetTimer(name=name, generation=generation):
                    self.timers[name] = generation
                case ef.CancelTimer(name=name):
                    del self.timers[name]
                case ef.Send(frame=frame):
                    self._hear(json.loads(frame))

    def _hear(self, body: dict[str, Any]) -> None:
        kind = body.get("kind", body["type"])
        if kind in {"text", "chunk"}:
            self.texts += body.get("text") or body.get("text_delta") or ""
        if kind in {"response.done", "done"}:
            self.outcomes += 1
            assert self.outcomes <= self.asked, "an answer that nobody asked for"
            assert body["text"] == self.texts, "the words do not add up"
            self.texts = ""

    # -- what happens ---------------------------------------------------------------------------

    @precondition(lambda self: self.admitting)
    @rule(refused=st.integers(0, 9))
    def admit(self, refused: int) -> None:
        """The server has room, or not."""
        self.admitting = False
        if refused == 9:
            self._step(ev.AdmissionRefused, code=ErrorCode.QUEUE_FULL)
        else:
            self._step(ev.Admitted)

    @precondition(lambda self: self.endpoint == "realtime" and self.run.session.state != "ACTIVE")
    @rule()
    def init(self) -> None:
        """The client sets the chat up, be it time for it or not."""
        self._perform(self.run.say({"type": "session.init", "payload": {}}))

    @rule(media=st.integers(0, 2), speech=st.booleans())
    def ask(self, media: int, speech: bool) -> None:
        """The client asks."""
        before = self.run.session.counts.get("turns", 0)
        body = question(
            {"type": "text", "text": "hello"}, *[OTHER_RATE] * media, tts={"enabled": speech}
        )
        self._perform(self.run.ask(body) if self.endpoint == "realtime" else self.run.say(body))
        if self.run.session.counts.get("turns", 0) > before:
            self.asked += 1
            self.texts = ""

    @precondition(lambda self: self.endpoint == "realtime")
    @rule(frame=st.sampled_from(["{}", '{"type": "input.append"}', '{"type": "x"}']))
    def err(self, frame: str) -> None:
        """The client makes a mistake."""
        self._perform(self.run.step(ev.FrameReceived, frame=frame))

    @precondition(lambda self: self.asked)
    @rule(how=RARELY)
    def misfortune(self, how: str) -> None:
        """Seldom, and so not before there was something to be ended, it ends."""
        if how == "close":
            self._perform(self.run.say({"type": "session.close"}))
        elif how == "warn":
            self._step(ev.DrainBegan, wait_s=30)
            self.is_draining = True
        elif how != "nothing":
            self._step(ev.PeerGone if how == "leave" else ev.Draining)

    @precondition(lambda self: self.media)
    @rule(sound=st.integers(0, 4))
    def decode(self, sound: int) -> None:
        """Something is decoded, or found to be damaged."""
        media = self.media.pop(0)
        if sound:
            self._step(ev.MediaDecoded, media=media, pcm=b"\0" * 8)
        else:
            self._step(ev.MediaRejected, media=media, reason="it is damaged")

    @precondition(lambda self: self.waits)
    @rule(how=st.sampled_from([*["slot"] * 8, *["place"] * 4, "refused", "cancelled"]))
    def queue(self, how: str) -> None:
        """The queue moves."""
        if how == "place":
            place = QueuePlace(position=1, estimated_wait_s=1, ticket_id="t", queue_length=1)
            self._step(ev.TicketMoved, place=place)
            return
        self.waits = False
        if how == "slot":
            self.leases += 1
            self.lease, self.releasing = self.leases, False
            self._step(ev.SlotLeased, lease=self.leases, slot=0)
        elif how == "refused":
            self._step(ev.AdmissionRefused, code=ErrorCode.QUEUE_FULL)
        else:
            self._step(ev.TicketCancelled)

    @precondition(lambda self: self.turn is not None)
    @rule(how=st.sampled_from([*["on"] * 6, *["done"] * 3, "fail", "full", "lost"]))
    def model(self, how: str) -> None:
        """The model makes something of the turn."""
        index = self.turn
        assert index is not None
        if how == "on" and not self.prefilled:
            self.prefilled = True
            self._step(ev.TurnPrefilled, prefill=Prefill(index=index, input_tokens=3))
        elif how == "on":
            chunk = TurnChunk(index=index, step=self.step_number, text="a", token_ids=(1,))
            self.step_number += 1
            self._step(ev.TurnProgress, chunk=chunk)
        elif how == "done" and self.prefilled:
            self.turn = None
            result = TurnResult(index=index, text="a" * self.step_number)
            self._step(ev.TurnDone, result=result)
        elif how in {"fail", "full"}:
            self.turn = None
            self._step(ev.TurnFailed, index=index, context_full=how == "full")
        elif how == "lost":
            self.turn = None
            self._step(ev.BackendLost, lease=self.lease)

    @precondition(lambda self: self.releasing and self.lease is not None)
    @rule()
    def released(self) -> None:
        """The slot is clean."""
        lease, self.lease, self.releasing, self.turn = self.lease, None, False, None
        self._step(ev.BackendReleased, lease=lease)

    @precondition(lambda self: self.timers)
    @rule(data=st.data())
    def timer(self, data: st.DataObject) -> None:
        """A timer fires."""
        if data.draw(RARELY) == "nothing":
            return
        name = data.draw(st.sampled_from(sorted(self.timers)))
        self._step(ev.TimerFired, name=name, generation=self.timers.pop(name))

    @precondition(lambda self: self.asked)
    @rule()
    def stale(self) -> None:
        """Completions of what is over come late."""
        self._step(ev.TurnDone, result=TurnResult(index=99, text="?"))
        self._step(ev.TurnProgress, chunk=TurnChunk(index=99, step=0, text="?"))
        self._step(ev.TurnFailed, index=99)
        self._step(ev.BackendReleased, lease=99)

    @rule(steps=st.integers(1, 8), ends=st.booleans())
    def go_on(self, steps: int, ends: bool) -> None:
        """What is due happens, as it mostly does."""
        for _ in range(steps):
            if self.admitting:
                self.admit(0)
            elif self.media:
                self.decode(1)
            elif self.waits:
                self.queue("slot")
            elif self.turn is not None:
                self.model("done" if ends and self.step_number > 1 else "on")
            elif self.releasing:
                self.released()
            elif self.asked == self.outcomes or self.endpoint == "realtime":
                self.ask(1, False)

    # -- what must hold -------------------------------------------------------------------------

    @invariant()
    def ends_clean(self) -> None:
        """A session that is over holds nothing."""
        if self.run.session.is_finished:
            assert self.lease is None
            assert not self.waits
            assert self.turn is None

    @invariant()
    def waits_for_something(self) -> None:
        """A session that is CLOSED ends by what is under way, never by nothing."""
        session = self.run.session
        if session.state is State.CLOSED and not session.is_finished:
            assert self.turn is not None or self.releasing or self.waits

    @invariant()
    def holds_for_somebody(self) -> None:
        """A slot is held for a turn alone."""
        assert self.lease is None or self.turn is not None or self.releasing


@pytest.mark.slow
def test_anything_can_happen_to_a_chat() -> None:
    """Some order of events leaks a slot, answers twice or never, or breaks the machine."""
    run_state_machine_as_test(
        ChatWorld,
        settings=settings(
            max_examples=sample(8, 2) * settings.default.max_examples,
            stateful_step_count=60,
            deadline=None,
        ),
    )
