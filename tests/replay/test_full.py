"""Full replay: the model again, on what was logged, and what is said where it differs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from protocol.values.effects import OpenBackend, StartFinalize, StartUnit
from protocol.values.model import Cut, Finalized, Opened, Opening, Unit, UnitResult
from recorder.format.format import Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.rerun import environment
from replay.rerun.environment import (
    Loading,
    ModelUnavailableError,
    loading_of,
    mismatches,
    model_of,
)
from replay.rerun.full import replay_fully
from replay.rerun.logic import replay
from replay.rerun.outputs import compare_outputs, snr_db
from replay.rerun.report import FullReport, Mismatch
from runtime.model.backends.base import BackendError, BackendInfo
from runtime.model.backends.scripted import Script, ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from tests.replay.test_logs import APPENDS, HEAD, INITS, Scene
from tests.sessions.in_memory import append_frame, close_frame, on_virtual_time, world

INFO = BackendInfo(
    name="echo",
    modes=("video",),
    slots=1,
    context_limit=2000,
    sliding_windows=("off",),
    can_rollback=True,
    deterministic=True,
    fingerprint={"backend": "scripted", "version": "1"},
)


# -- a model whose outputs depend on all it was ever fed ------------------------------------------


class Echo:
    """A backend and its one session: each output is a hash of everything before it.

    Attributes:
        spoil: changes a result before it is given; the model goes on as if it had not.
    """

    info = INFO

    def __init__(self, spoil: Callable[[UnitResult], UnitResult] = lambda result: result) -> None:
        self.spoil = spoil
        self.released = 0
        self._heard = hashlib.blake2b(digest_size=8)
        self.opened = Opened(prompt_length=40, fed_ids=(1, -1))

    async def open(self, opening: Opening, *, slot: int) -> Echo:
        assert slot == 0
        self._heard.update(repr((opening.instructions, opening.config, opening.seed)).encode())
        return self

    async def run(self, unit: Unit, cut: Cut | None = None) -> UnitResult:
        self._heard.update(unit.pcm + repr((unit.index, unit.force_listen, cut)).encode())
        made = self._heard.digest()
        speaks = made[0] % 2 == 0 and not unit.force_listen
        result = UnitResult(
            index=unit.index,
            is_listen=not speaks or cut is not None,
            text=made.hex() if speaks else "",
            pcm=tone(made[1], 0, samples=240) if speaks else b"",
            kv_length=40 + made[2],
            decided_ids=tuple(made),
            cut=cut,
            input_hash=hashlib.blake2b(unit.pcm, digest_size=16).hexdigest(),
            logits_hash=made.hex(),
        )
        return self.spoil(result)

    def interrupt(self, index: int) -> None:
        raise AssertionError(f"unit {index} was interrupted, a replay cuts by itself")

    async def finalize(self, index: int, *, interrupted: bool) -> Finalized:
        self._heard.update(repr(("finalize", index, interrupted)).encode())
        return Finalized(index=index, kv_length=40 + self._heard.digest()[0], cost_us=5)

    async def rollback(self, index: int) -> None:
        raise AssertionError(f"unit {index} was rolled back, its failure leaves no trace")

    async def release(self) -> None:
        self.released += 1


class EchoScene(Scene):
    """A scene whose model is an `Echo`; units fail and are cut where a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._echo = Echo()

    def _answer(self, effect: Any, number: int) -> None:
        from protocol.values import events as ev

        match effect:
            case OpenBackend(lease=lease, opening=opening):
                held = finished(self._echo.open(opening, slot=0))
                self.post(ev.BackendOpened, lease=lease, opened=held.opened)
            case StartUnit(unit=unit) if number != 12:
                cut = Cut(stage="llm", step=1) if number == 10 else None
                result = finished(self._echo.run(unit, cut=cut))
                self.post(ev.UnitDone, result=result)
            case StartFinalize(index=index, interrupted=interrupted):
                done = finished(self._echo.finalize(index, interrupted=interrupted))
                self.post(ev.FinalizeDone, finalized=done)
            case _:
                super()._answer(effect, number)


def finished(call: Any) -> Any:
    """Return what a coroutine that waits for nothing returns."""
    try:
        call.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waited")


def echo_records() -> list[Record]:
    """Make a session of an `Echo`, with a cut and a failure in it."""
    scene = EchoScene()
    scene.activate()
    for number in (0, 1, 2, 12, 3, 4, 5):
        scene.unit(number)
    scene.send(APPENDS[3])
    scene.send(APPENDS[3])
    scene.answer(10)
    while scene.answer():
        scene.wait(300)
    scene.finish()
    assert any(record.fields.get("type") == "UnitFailed" for record in scene.records)
    assert any(made.get("cut") for made in results(scene.records).values())
    return scene.records


def results(records: Iterable[Record | Damage]) -> dict[int, Any]:
    """Return the recorded results by the index of their unit, as fields."""
    made: list[Any] = [
        record.fields["result"]
        for record in records
        if isinstance(record, Record) and record.kind == "unit"
    ]
    return {result["index"]: result for result in made}


def seq_of(records: list[Record], index: int) -> int:
    """Return the record that holds the result of a unit."""
    return next(r.seq for r in records if r.kind == "unit" and r.fields["result"]["index"] == index)


def run(items: Iterable[Record | Damage], backend: Any, **options: Any) -> FullReport:
    """Replay fully, on virtual time."""
    call = partial(replay_fully, HEAD, items, lambda _: backend, **options)
    return trio.run(call, clock=MockClock(autojump_threshold=0))


def spoiled(**changes: Any) -> Callable[[UnitResult], UnitResult]:
    """Change the result of unit 4."""
    return lambda result: attrs.evolve(result, **changes) if result.index == 4 else result


def test_a_model_comes_out_the_same() -> None:
    """A recording with a cut unit and a failed one could not be made again by its own model."""
    records = echo_records()
    echo = Echo()
    report = run(records, echo)
    assert report.identical, report.first_divergence
    assert (report.model, report.compared, report.environment) == ("scripted", True, ())
    assert (report.units, report.units_changed) == (len(results(records)), 0)
    assert report.recorded == report.renewed == replay(records)
    assert echo.released == 1


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_hash": "0"}, "input_hash[0]"),
        ({"decided_ids": (1, 2), "text": "other"}, "decided_ids[0]"),
        ({"fed_ids": (9,), "codec_ids": (9,)}, "fed_ids[0]"),
        ({"codec_ids": (9,), "kv_length": 1}, "codec_ids[0]"),
        ({"kv_length": 1, "text": "other"}, "kv_length"),
        ({"text": "other", "pcm": b"1234"}, "text[0]"),
        ({"pcm": b"1234"}, "pcm[0]"),
        ({"end_of_turn": True}, "end_of_turn"),
        ({"cut": Cut(stage="tts", step=3)}, "cut"),
        ({"vision_tokens": 3}, "vision_tokens"),
    ],
)
def test_explains_the_first_difference(changes: dict[str, Any], field: str) -> None:
    """A model engineer would be told of a consequence and not of what came first."""
    records = echo_records()
    report = run(records, Echo(spoiled(**changes)))
    found = report.divergence
    assert found is not None
    assert (found.kind, found.unit, found.field) == ("model", 4, field)
    seq = seq_of(records, 4)
    assert (found.seq, found.at_ns) == (seq, records[seq].at_ns)
    assert report.first_divergence is found
    assert (report.units_changed, report.identical) == (1, False)
    assert report.recorded is not None
    assert report.recorded.identical


def test_listen_or_speak_comes_before_ids() -> None:
    """That a unit spoke instead of listening would be told as a difference of token ids."""
    records = echo_records()
    other = spoiled(is_listen=True, text="", pcm=b"", decided_ids=())
    if results(records)[4]["is_listen"]:
        other = spoiled(is_listen=False, text="x", decided_ids=())
    found = run(records, Echo(other)).divergence
    assert found is not None
    assert found.field == "is_listen"


def test_shows_what_the_client_would_have_got() -> None:
    """A difference of the model's could not be followed to the frames that it changes."""
    records = echo_records()
    report = run(records, Echo(spoiled(is_listen=False, text="other words", pcm=b"", cut=None)))
    renewed = report.renewed
    assert renewed is not None
    assert renewed.divergence is not None
    assert renewed.divergence.record == "tx Send"
    assert '"kind":"text"' in renewed.divergence.came_out
    hidden = run(records, Echo(spoiled(logits_hash="0", codec_ids=())))
    assert (hidden.logits_changed, hidden.divergence) == (4, None)
    assert hidden.identical


def test_keeps_costs_and_times() -> None:
    """A model that only took longer would seem to make something else."""
    slow = attrs.evolve(UnitResult(index=0, is_listen=True).costs, wall_us=10**6)
    report = run(echo_records(), Echo(lambda result: attrs.evolve(result, costs=slow)))
    assert report.identical, report.first_divergence


def test_a_model_that_fails_is_explained() -> None:
    """A model that breaks in replay would end it with a traceback."""

    def fail(result: UnitResult) -> UnitResult:
        if result.index == 2:
            raise BackendError("out of memory")
        return result

    echo = Echo(fail)
    report = run(echo_records(), echo)
    assert report.divergence is not None
    assert (report.divergence.kind, report.divergence.unit) == ("model_failed", 2)
    assert report.divergence.came_out == "BackendError: out of memory"
    assert (report.identical, echo.released) == (False, 1)


def test_another_opening_is_the_first_difference() -> None:
    """A prompt of another length would be told as a difference of the first unit."""
    echo = Echo()
    echo.opened = Opened(prompt_length=41, fed_ids=(1, -1))
    found = run(echo_records(), echo).divergence
    assert found is not None
    assert (found.field, found.recorded, found.came_out) == ("prompt_length", "40", "41")
    assert (found.unit, found.record) == (None, "prepare BackendOpened")


def test_another_environment_is_not_compared() -> None:
    """Differences of a machine would be reported as bugs of the model."""
    echo = Echo()
    echo.info = attrs.evolve(INFO, fingerprint={"backend": "scripted", "device": "cuda"})
    report = run(echo_records(), echo)
    assert (report.compared, report.identical, report.recorded) == (False, False, None)
    assert report.environment == (
        Mismatch(name="device", recorded=None, here="cuda"),
        Mismatch(name="version", recorded="1", here=None),
    )
    assert run(echo_records(), echo, anyway=True).identical


def test_another_arithmetic_is_not_compared() -> None:
    """Pictures that were scaled otherwise would be blamed on the model."""
    here = attrs.evolve(INFO, fingerprint={**INFO.fingerprint, "numerics": "2"})

    def differs(recorded: dict[str, str]) -> tuple[Mismatch, ...]:
        return mismatches({"fingerprint": {**INFO.fingerprint, **recorded}}, here)

    assert differs({}) == (Mismatch(name="numerics", recorded="1", here="2"),)
    assert differs({"numerics": "3"}) == (Mismatch(name="numerics", recorded="3", here="2"),)
    assert differs({"numerics": "2"}) == ()
    assert mismatches({"fingerprint": dict(INFO.fingerprint)}, INFO) == (), "a script has none"


def test_a_model_without_determinism_is_not_compared() -> None:
    """A remote model that samples as it likes would be reported as a bug."""
    wild = attrs.evolve(INFO, deterministic=False)
    assert [line.name for line in mismatches(HEAD, wild)] == ["deterministic"]
    assert mismatches(HEAD, INFO) == ()
    assert len(mismatches({}, INFO)) == 2
    there = {**HEAD, "config": {"deterministic": False}}
    assert [line.recorded for line in mismatches(there, INFO)] == ["False"]


def made_by(*, device: str, dtype: str, deterministic: bool) -> dict[str, Any]:
    """The head of a log of a model that computes."""
    config = {"model": "tiny", "deterministic": deterministic}
    return {"config": config, "fingerprint": {"device": device, "dtype": dtype}}


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_model_is_loaded_as_it_was_recorded(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    """A log in another format, or of a GPU, would only ever be said to be of another place."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    half = made_by(device="cpu", dtype="bfloat16", deterministic=True)
    assert loading_of(half, "tiny") == Loading("tiny", device="cpu", dtype="bf16")
    elsewhere = Loading("/models/tiny", device="cpu", dtype="bf16")
    assert loading_of(half, "/models/tiny") == elsewhere
    exact = made_by(device="NVIDIA H200", dtype="float16", deterministic=True)
    gpu = "cuda" if has_gpu else None  # Without one it is loaded as it can be, and told apart.
    assert loading_of(exact, "tiny") == Loading(
        "tiny", device=gpu, dtype="fp16", deterministic=has_gpu
    )
    loose = made_by(device="NVIDIA H200", dtype="float8", deterministic=False)
    assert loading_of(loose, "tiny") == Loading("tiny", device=gpu)
    spoken = made_by(device="cpu", dtype="float32", deterministic=True)
    for steps, taken in (("6", 6), ("06", 10), ("x", 10), (6, 10)):
        head = {**spoken, "fingerprint": {**spoken["fingerprint"], "voice_steps": steps}}
        assert loading_of(head, "tiny").voice_steps == taken
    for form, taken in (("int4", "int4"), ("int2", None), (4, None)):
        head = {**spoken, "fingerprint": {**spoken["fingerprint"], "quantize": form}}
        assert loading_of(head, "tiny").quantize == taken
    for head in ({}, HEAD, {"config": {"model": "tiny"}, "fingerprint": {"device": 1}}):
        assert loading_of(head, "tiny") == Loading("tiny")
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(environment, "load_backend", lambda *args, **how: asked.append((args, how)))
    Loading("tiny", device="cuda", dtype="fp16", deterministic=True, voice_steps=6).load()
    how = {"device": "cuda", "dtype": "fp16", "deterministic": True, "is_live": True}
    how |= {"voice_steps": 6, "quantize": None}
    assert asked == [(("tiny", 1), how)]


def test_names_the_model() -> None:
    """The wrong model would be loaded, or a log without one would end in a traceback."""
    assert model_of(HEAD) == "scripted"
    assert model_of({}) is model_of({"config": {"model": 5}}) is None
    named: list[str] = []

    def load(loading: Loading) -> Any:
        named.append(loading.name)
        return Echo()

    def call(head: dict[str, Any], **options: Any) -> FullReport:
        return trio.run(partial(replay_fully, head, echo_records(), load, **options))

    with pytest.raises(ModelUnavailableError, match="does not say which model"):
        call({})
    call({}, model="mine")
    call(HEAD)
    assert named == ["mine", "scripted"]


def test_stops_where_the_machine_parts_from_the_log() -> None:
    """Units that no session asked for would be run and compared."""
    records = echo_records()
    seq = next(r.seq for r in records if r.kind == "tx" and r.seq > 20)
    wrong = attrs.evolve(records[seq], fields={**records[seq].fields, "ordinal": 999})
    report = run([*records[:seq], wrong, *records[seq + 1 :]], Echo())
    assert report.first_divergence is not None
    assert (report.first_divergence.seq, report.first_divergence.kind) == (seq, "changed")
    gap = run(records[:seq] + records[seq + 1 :], Echo())
    assert gap.recorded is not None
    assert gap.recorded.damage_count == 1


# -- a server's own logs --------------------------------------------------------------------------


def quick(unit: Unit, seed: int) -> Step:
    """Speak in every other unit, in eight steps."""
    if unit.index % 2 == 0:
        return Step(prefill_s=0.01)
    speech = Speaks(text=f"second {unit.index} ", pcm=tone(unit.index, seed, samples=2400))
    return Step(speech=speech, prefill_s=0.01, generate_s=0.4, steps=8)


def failing(unit: Unit, seed: int) -> Step:
    """Fail in units 2 and 5; the others are `quick`."""
    step = quick(unit, seed)
    return attrs.evolve(step, fault="fail") if unit.index in (2, 5) else step


def record_session(folder: Path, *, init: str | None = None, script: Script = quick) -> Path:
    """Record a session of 13 units with a scripted model, one of them interrupted."""

    async def session() -> None:
        backend = ScriptedBackend(script)
        async with world(backend, record_to=folder) as running:
            peer = running.connect()
            await peer.heard("session.queue_done")
            peer.send(init or INITS[0])
            await peer.heard("session.created")
            for second in range(12):
                peer.send(append_frame())
                await trio.sleep(0.2)
                if second == 7:
                    peer.send(append_frame(force_listen=True))
                await trio.sleep(0.8)
            peer.send(close_frame())
            await peer.over()
            await running.quiet()

    on_virtual_time(session)
    return next(folder.iterdir())


@pytest.mark.parametrize("init", [INITS[0], INITS[2]], ids=["speech", "text"])
def test_a_servers_log_replays_fully(tmp_path: Path, init: str) -> None:
    """What a server recorded, an interrupted unit too, could not be made again."""
    path = record_session(tmp_path, init=init)
    with LogReader(path) as reader:
        head, items = reader.head.fields, list(reader)
    assert sum(made.get("cut") is not None for made in results(items).values()) == 1
    backend = ScriptedBackend(quick)
    load = partial(replay_fully, head, items, lambda _: backend)
    report = trio.run(load, clock=MockClock(autojump_threshold=0))
    assert report.identical, report.first_divergence
    assert report.units == 13
    assert not backend.violations
    assert not backend.held_slots


def test_a_servers_log_with_failures_replays_fully(tmp_path: Path) -> None:
    """A unit that failed for want of memory would have to fail again, or spoil what follows."""
    path = record_session(tmp_path, script=failing)
    with LogReader(path) as reader:
        head, items = reader.head.fields, list(reader)
    backend = ScriptedBackend(quick)
    load = partial(replay_fully, head, items, lambda _: backend)
    report = trio.run(load, clock=MockClock(autojump_threshold=0))
    assert report.identical, report.first_divergence
    assert (report.units, backend.violations) == (11, [])


@pytest.mark.anyio
async def test_runs_on_both_event_loops() -> None:
    """Full replay would need the server's event loop."""
    report = await replay_fully(HEAD, echo_records(), lambda _: Echo())
    assert report.identical


# -- outputs --------------------------------------------------------------------------------------


def test_measures_what_differs() -> None:
    """Rounding could not be told from another utterance."""
    signal = np.sin(np.arange(2400) / 20).astype("<f4")
    almost = (signal + np.float32(0.001)).astype("<f4").tobytes()
    assert snr_db(signal.tobytes(), signal.tobytes()) is None
    assert snr_db(signal.tobytes(), almost) == pytest.approx(57, abs=1)
    assert snr_db(signal.tobytes(), (-signal).tobytes()) == pytest.approx(-6, abs=0.1)
    assert snr_db(signal.tobytes(), signal.tobytes()[:4800]) == pytest.approx(3, abs=0.1)
    assert snr_db(bytes(400), almost) is None
    assert snr_db(b"123", almost) is None
    assert snr_db(b"\xff" * 400, almost) is None


def test_says_where_sound_differs() -> None:
    """One could not find the moment in a second of sound."""
    pcm = tone(1, 2, samples=240)
    one = UnitResult(index=0, is_listen=False, pcm=pcm)
    other = attrs.evolve(one, pcm=pcm[:401] + b"\x99" + pcm[402:])
    found = compare_outputs(one, other)
    assert found is not None
    assert found.path == "pcm[100]"
    shorter = compare_outputs(one, attrs.evolve(one, pcm=pcm[:400]))
    assert shorter is not None
    assert shorter.path == "pcm[100]"
    assert compare_outputs(one, attrs.evolve(one)) is None
