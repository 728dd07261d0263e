"""Forks: a recording taken up again at a unit, the same without a change, with one otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np
import pytest
import simplejpeg
from rich.console import Console

from protocol.values import events as ev
from protocol.values.effects import StartUnit
from protocol.values.model import UNIT_BYTES, Unit
from recorder.format.format import LogDamaged, Record
from recorder.format.mapping import EVENT_KINDS, event_of
from recorder.read.reader import LogReader, read
from recorder.repair import verify
from replay.diff import DiffReport, compare
from replay.fork.command import make_fork
from replay.fork.run import CannotForkError, Change, Forked, ForkError, ForkRefusedError
from replay.library.text import full_lines
from replay.rerun.full import held_units, replay_fully
from replay.rerun.logic import Replayer, replay
from replay.rerun.report import FullReport
from replay.shared.commands import print_all
from runtime.model.backends.base import Backend
from runtime.model.backends.scripted import Script, ScriptedBackend, Speaks, Step
from runtime.model.backends.scripted_chat import tone
from runtime.session.setup import Identity
from tests.generated.clients import draw_and_record, record_scripted, steady_backend
from tests.golden.logs import FOLDER
from tests.replay.test_full import Echo, echo_records, failing, quick, record_session
from tests.replay.test_generated import judge
from tests.replay.test_logs import write_log
from tests.sessions.identities import CountedIdentities
from tests.sessions.in_memory import (
    append_frame,
    base64,
    close_frame,
    init_frame,
    on_virtual_time,
    pcm,
    world,
)

OWN: Final = Identity(recording_id="fork-1", created_ms=1_800_000_000_000, seed=99)
QUESTION: Final = (0.2 * np.sin(np.arange(40_000) / 9)).astype("<f4").tobytes()
"""Two seconds and a half."""
PICTURE: Final = base64(simplejpeg.encode_jpeg(np.zeros((48, 64, 3), np.uint8)))
GENERATED: Final = range(16)


def fork(log: Path, change: Change, backend: Any, **options: Any) -> tuple[Path, Forked]:
    """Fork a log into a folder of its own, beside it, on virtual time."""
    folder = log.parent / "forks" / str(len(list(log.parent.glob("forks/*"))))
    folder.mkdir(parents=True)
    made: list[tuple[Path, Forked]] = []

    async def body() -> None:
        asked = {"identity": OWN, "load": lambda _: backend} | options
        made.append(await make_fork(log, change, folder, **asked))

    on_virtual_time(body)
    return made[0]


def events(log: Path) -> list[tuple[str, int, Any]]:
    """Give all events of a log but the first, which names it."""
    records = [record for record in read(log) if record.kind in EVENT_KINDS]
    return [(record.kind, record.at_ns, record.fields) for record in records[1:]]


def heard(log: Path) -> list[Unit]:
    """Give what the model was given, unit by unit."""
    replayer, given = Replayer(), list[Unit]()
    for record in read(log):
        step = replayer.feed(record)
        effects = () if step is None else step.effects
        given += [effect.unit for effect in effects if isinstance(effect, StartUnit)]
    return given


def results(log: Path, before: int = 1000) -> list[Any]:
    """Give what the model made of each unit that did not fail, as fields."""
    made: list[Any] = [record.fields["result"] for record in read(log) if record.kind == "unit"]
    return [result for result in made if result["index"] < before]


def diff(a: Path, b: Path) -> DiffReport:
    """Compare two logs."""
    with LogReader(a) as one, LogReader(b) as other:
        return compare(one.head.fields, one, other.head.fields, other)


def full_replay(log: Path, backend: Any) -> FullReport:
    """Run a log's model again, on virtual time."""
    reports = []

    async def body() -> None:
        with LogReader(log) as reader:
            reports.append(await replay_fully(reader.head.fields, reader, lambda _: backend))

    on_virtual_time(body)
    return reports[0]


def record_calls(
    folder: Path, frames: list[tuple[float, str]], *, script: Script = quick, **options: Any
) -> Path:
    """Record a session of which each frame is sent so many seconds after the one before it."""

    async def session() -> None:
        async with world(ScriptedBackend(script, **options), record_to=folder) as running:
            peer = await running.activate()
            for wait_s, frame in frames:
                await anyio.sleep(wait_s)
                peer.send(frame)
            await anyio.sleep(3)
            peer.send(close_frame())
            await peer.over()
            await running.quiet()

    on_virtual_time(session)
    return next(path for path in folder.iterdir() if path.is_file())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A session of 13 units, one of them interrupted."""
    return record_session(tmp_path)


# -- without a change -----------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 8, 12])
def test_without_a_change_it_is_its_parent(log: Path, at: int) -> None:
    """What a fork shows could be the fork's doing, and not the change's."""
    backend = ScriptedBackend(quick)
    path, forked = fork(log, Change(at=at), backend)
    assert events(path) == events(log)
    assert [(r.kind, r.at_ns) for r in read(path)] == [(r.kind, r.at_ns) for r in read(log)]
    assert (forked.unit, forked.units, forked.ended_early) == (at, 13, False)
    assert (forked.prefix.units, forked.prefix.held, forked.prefix.first) == (at, 0, None)
    assert (backend.violations, backend.held_slots) == ([], set())
    assert diff(log, path).first is None


def test_a_fork_is_a_log_like_any_other(log: Path) -> None:
    """A fork could not be replayed, or would not say where it comes from."""
    path, forked = fork(log, Change(at=5, force_listen=True), ScriptedBackend(quick))
    assert (verify(path).state, path.name) == ("finished", "fork-1.session.zst")
    assert replay(read(path)).identical
    report = full_replay(path, ScriptedBackend(quick))
    assert (report.identical, report.units) == (True, 13), report.first_divergence
    with LogReader(path) as reader, LogReader(log) as parent:
        head, old = reader.head.fields, parent.head.fields
    assert head["parent"] == {"recording": "rec-000001", "seq": forked.parent_seq, "unit": 5}
    assert head["recording_id"] == "fork-1"
    assert (head["seed"], head["fingerprint"]) == (old["seed"], old["fingerprint"])
    config: Any = head["config"]
    assert config["fork"] == {"is_held": False, "force_listen": True}
    again, forked = fork(path, Change(at=3), ScriptedBackend(quick))
    assert (forked.parent, events(again)) == ("fork-1", events(path))


def test_the_same_fork_is_the_same(log: Path) -> None:
    """Nobody could say again what a fork has shown."""
    change = Change(at=4, pcm=QUESTION, seed=3)
    first = fork(log, change, ScriptedBackend(quick))[0]
    second = fork(log, change, ScriptedBackend(quick), watch=lambda *_: None)[0]
    assert first.read_bytes() == second.read_bytes()
    other = CountedIdentities(drawn=70).draw()
    third = fork(log, change, ScriptedBackend(quick), identity=other)[0]
    assert third.name == "rec-000071.session.zst"
    assert events(third) == events(first)


@pytest.mark.costly
@pytest.mark.parametrize("number", GENERATED)
def test_whatever_happens_in_a_session(number: int, tmp_path: Path) -> None:
    """A fork of a session with faults, drops or interruptions would be another session."""
    for recorded in draw_and_record(number, tmp_path, record_scripted):
        units = len({unit.index for unit in heard(recorded)})
        for at in {0, units // 2, units - 1} if units else ():
            backend = steady_backend(number)
            path, _ = fork(recorded, Change(at=at), backend)
            assert events(path) == events(recorded)
            assert (backend.violations, backend.held_slots) == ([], set())
            for change in (Change(at=at, pcm=QUESTION), Change(at=at, force_listen=True)):
                try:
                    changed, _ = fork(recorded, change, steady_backend(number))
                except ForkRefusedError:
                    continue  # that unit had to wait for the model
                assert not judge(changed).problems
                assert full_replay(changed, steady_backend(number)).identical
                assert results(changed, at) == results(recorded, at)


# -- made to listen -------------------------------------------------------------------------------


def test_a_unit_is_made_to_listen(log: Path) -> None:
    """One could not ask what the model would have done, had it been interrupted."""
    path, _ = fork(log, Change(at=5, force_listen=True), ScriptedBackend(quick))
    spoken = [[made["index"] for made in results(each) if made.get("pcm")] for each in (log, path)]
    assert spoken[0] == [1, 3, 5, 7, 9, 11]
    assert spoken[1] == [1, 3, 7, 9, 11]
    assert [unit.force_listen for unit in heard(path)] == [
        unit.force_listen or unit.index == 5 for unit in heard(log)
    ]
    report = diff(log, path)
    assert report.first is not None
    assert report.first.index == 5
    assert "forced" in report.first.fields


def test_only_that_unit_is_made_to_listen(tmp_path: Path) -> None:
    """The unit behind it, which came in the same piece of sound, would have to listen too."""
    seen = append_frame(0.75, video_frames=[PICTURE], max_slice_nums=4)
    frames = [(0.5, append_frame(0.75)), (1.0, seen), (1.0, append_frame()), (1.0, append_frame())]
    log = record_calls(tmp_path, [*frames, (1.0, append_frame(0.5))])
    assert len(heard(log)) == 4
    for at in (0, 1, 2, 3):
        path, _ = fork(log, Change(at=at, force_listen=True), ScriptedBackend(quick))
        wanted = [attrs.evolve(unit, force_listen=unit.index == at) for unit in heard(log)]
        assert heard(path) == wanted


@pytest.mark.parametrize(
    "change", [Change(at=1, force_listen=True), Change(at=1, pcm=QUESTION)], ids=["forced", "sound"]
)
def test_a_picture_that_was_left_out_is_left_out_again(change: Change, tmp_path: Path) -> None:
    """A recording with one bad picture could not be forked."""
    seen = append_frame(video_frames=[PICTURE, "", "no base64"])
    log = record_calls(tmp_path, [(0.5, append_frame()), (1.0, seen), (1.0, append_frame())])
    assert [len(unit.frames) for unit in heard(log)] == [0, 1, 0]
    path, _ = fork(log, change, ScriptedBackend(quick))
    assert [unit.frames for unit in heard(path)][:3] == [unit.frames for unit in heard(log)]
    assert not judge(path).problems


@pytest.mark.parametrize(
    ("frames", "at", "why"),
    [
        ([(0.5, append_frame(3.0))], 1, "an earlier unit"),
        ([(0.5, append_frame()), (0.1, append_frame())], 1, "an earlier unit"),
        ([(0.5, append_frame(1.1))], 0, "too short"),
        ([(0.5, append_frame(0.9)), (1.0, append_frame(1.0))], 0, "too short"),
    ],
)
def test_what_would_interrupt_more_is_refused(
    frames: list[tuple[float, str]], at: int, why: str, tmp_path: Path
) -> None:
    """Another unit would be cut or forced as well, and nobody would be told."""

    def slow(unit: Unit, seed: int) -> Step:
        return attrs.evolve(quick(unit, seed), generate_s=0.6)

    log = record_calls(tmp_path, frames, script=slow)
    with pytest.raises(ForkRefusedError, match=why):
        fork(log, Change(at=at, force_listen=True), ScriptedBackend(slow))
    assert not list(tmp_path.glob("forks/*/*"))


# -- other sound ----------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_s", [0.25, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("dialect", ["realtime", "duplex-v1", "legacy-duplex"])
def test_a_unit_hears_other_sound(piece_s: float, dialect: str, tmp_path: Path) -> None:
    """The question would begin somewhere in a unit, have gaps, or be heard too early."""
    log = record_spoken(tmp_path, piece_s, dialect)
    path, _ = fork(log, Change(at=2, pcm=QUESTION), ScriptedBackend(quick))
    before, after = heard(log), heard(path)
    assert len(before) == len(after) == 6
    assert after[:2] == before[:2]
    replaced = QUESTION.ljust(4 * UNIT_BYTES, b"\0")
    assert b"".join(unit.pcm for unit in after[2:]) == replaced
    assert [attrs.evolve(unit, pcm=b"") for unit in after] == [
        attrs.evolve(unit, pcm=b"") for unit in before
    ]
    assert any(unit.frames for unit in after[2:])
    assert replay(read(path)).identical


@pytest.mark.parametrize(
    ("name", "at", "left"),
    [
        ("realtime-user-words", 0, 0),
        ("realtime-user-words", 1, 1),
        ("barge-in", 0, 0),
        ("barge-in", 6, 1),
    ],
)
def test_words_of_replaced_sound_are_left_out(
    name: str, at: int, left: int, tmp_path: Path
) -> None:
    """The fork says what its parent's user said, in sound that it does not have."""
    parent = tmp_path / "parent.session.zst"
    parent.write_bytes((FOLDER / f"v1-{name}.session.zst").read_bytes())
    found = (ev.UserTranscribed, ev.SpeechStarted)

    def counted(change: Change) -> int:
        path, _ = fork(parent, change, ScriptedBackend(quick), anyway=True)
        assert replay(read(path)).identical
        return len([it for it in external(path) if isinstance(it, found)])

    assert counted(Change(at=at)) == len([it for it in external(parent) if isinstance(it, found)])
    assert counted(Change(at=at, pcm=QUESTION)) == left


def external(log: Path) -> list[ev.Event]:
    """Give the events of a log as the session takes them."""
    kinds = (record for record in read(log) if record.kind in EVENT_KINDS)
    return [event_of(record.fields, record.at_ns) for record in kinds]


def record_spoken(folder: Path, piece_s: float, dialect: str) -> Path:
    """Record six seconds of a tone in pieces, the last of them seen as well."""

    def frame(number: int) -> str:
        fields: dict[str, Any] = {"audio": base64(pcm(piece_s, 0.01 * (number + 1)))}
        image = [PICTURE] if number * piece_s > 3 else []
        if dialect == "realtime":
            body = {"video_frames": image} | fields
            return json.dumps({"type": "input.append", "input_id": f"n{number}", "input": body})
        if dialect == "duplex-v1":
            fields |= {"type": "input_audio_buffer.append", "video_frames": image}
        else:
            fields |= {"type": "audio_chunk", "frame_base64_list": image}
        return json.dumps(fields)

    inits = {
        "realtime": init_frame(),
        "duplex-v1": '{"type": "session.update", "session": {"instructions": ""}}',
        "legacy-duplex": '{"type": "prepare"}',
    }

    async def session() -> None:
        async with world(ScriptedBackend(quick), record_to=folder) as running:
            is_legacy = dialect == "legacy-duplex"
            peer = running.connect(
                endpoint="duplex" if is_legacy else "realtime", label="one" if is_legacy else ""
            )
            await peer.until(lambda: any("queue_done" in kind for kind in peer.kinds))
            peer.send(inits[dialect])
            await peer.until(lambda: len(peer.kinds) > 1)
            for number in range(int(6 / piece_s + 0.999)):
                peer.send(frame(number))
                await anyio.sleep(piece_s)
            peer.vanish()
            await running.quiet()

    on_virtual_time(session)
    return next(path for path in folder.iterdir() if path.is_file())


# -- what is told when a session opens ------------------------------------------------------------


def test_what_holds_from_the_opening_makes_a_difference_from_the_unit_on(log: Path) -> None:
    """Another seed would change what was said before, so that it is another conversation."""
    change = Change(at=5, seed=3, settings={"temperature": 0.2, "max_slice_nums": 2})
    path, forked = fork(log, change, ScriptedBackend(quick))
    outputs = [[made.get("pcm") for made in results(each)] for each in (log, path)]
    assert outputs[0][:5] == outputs[1][:5]
    assert outputs[0][5] != outputs[1][5]
    assert forked.prefix.held > 0
    assert forked.prefix.first is not None
    report = diff(log, path)
    assert report.first is not None
    assert report.first.index == 5
    assert {line.name for line in report.setup} == {"seed", "config.temperature"}
    with LogReader(path) as reader:
        config: Any = reader.head.fields["config"]
    assert config["fork"] == {"is_held": True, "seed": 3, "settings": dict(change.settings)}
    assert {unit.max_slice_nums for unit in heard(path)} == {2}
    assert replay(read(path)).identical


def test_from_the_first_unit_it_is_another_session(log: Path) -> None:
    """A session could not be played again with another prompt, as a whole and without a trick."""
    change = Change(at=0, seed=3, settings={"instructions": "be rude, please"})
    path, forked = fork(log, change, ScriptedBackend(quick))
    assert (forked.prefix.held, forked.prefix.units) == (0, 0)
    report = full_replay(path, ScriptedBackend(quick))
    assert report.identical, report.first_divergence
    with LogReader(path) as reader:
        config: Any = reader.head.fields["config"]
    assert config["fork"]["is_held"] is False


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"temperature": 9}, "allowed is 0 to 2"),
        ({"temperature": "hot"}, "a number is needed"),
        ({"sliding_window": "basic"}, "sliding_window"),
        ({"deferred_finalize": False}, "has no field in this dialect"),
        ({"top_k": 0, "top_p": 0.5}, "top_k, top_p: "),
    ],
)
def test_a_setting_that_cannot_be_is_refused(settings: dict[str, Any], why: str, log: Path) -> None:
    """A fork would be made with a setting that no server takes, or without it."""
    with pytest.raises(ForkRefusedError, match=why):
        fork(log, Change(at=0, settings=settings), ScriptedBackend(quick))


def test_another_model_takes_over(log: Path) -> None:
    """One could not ask what another model would have said."""

    def other(unit: Unit, seed: int) -> Step:
        return Step(speech=Speaks(text=f"other {unit.index}", pcm=tone(1, seed, samples=2400)))

    backend = ScriptedBackend(other, context_limit=4000)
    backend.info = attrs.evolve(backend.info, fingerprint={"backend": "other"})
    path, forked = fork(log, Change(at=7, model="other"), backend)
    assert forked.model == "other"
    assert [made.get("text") for made in results(path)[:7]] == [
        r.get("text") for r in results(log)[:7]
    ]
    assert [made["text"] for made in results(path)[7:8]] == ["other 7"]
    with LogReader(path) as reader:
        head: Any = reader.head.fields
    assert (head["config"]["model"], head["fingerprint"]) == ("other", {"backend": "other"})


# -- what cannot be forked ------------------------------------------------------------------------


def refusal(log: Path, change: Change, backend: Any, **options: Any) -> ForkError:
    """Give the error of a fork; nothing may be left of it."""
    with pytest.raises(ForkError) as raised:
        fork(log, change, backend, **options)
    assert not list(log.parent.glob("forks/*/*"))
    return raised.value


def test_a_model_that_cannot_be_forced_must_come_out_as_recorded(tmp_path: Path) -> None:
    """A fork would go on from somewhere else than where the recording was."""
    log = write_log(tmp_path, echo_records())
    assert events(fork(log, Change(at=4), Echo())[0]) == events(log)
    error = refusal_of_another_seed(log)
    assert "unit 0" in error
    assert "--anyway" in error
    path, forked = fork(log, Change(at=4, seed=5), Echo(), anyway=True)
    assert forked.prefix.otherwise > 0
    assert replay(read(path)).identical
    spoiled = Echo(lambda made: attrs.evolve(made, kv_length=1) if made.index == 2 else made)
    assert fork(log, Change(at=2), spoiled)[1].prefix.first is None


def refusal_of_another_seed(log: Path) -> str:
    """Say why an `Echo` cannot be forked with another seed."""
    with pytest.raises(CannotForkError) as raised:
        fork(log, Change(at=3, seed=5), Echo())
    return str(raised.value)


def test_another_environment_is_refused(log: Path) -> None:
    """What a machine does would be taken for what the change does."""
    backend = ScriptedBackend(quick)
    backend.info = attrs.evolve(backend.info, fingerprint={"backend": "scripted", "version": "2"})
    error = refusal(log, Change(at=2), backend)
    assert "version was 1, here 2" in str(error)
    path, _ = fork(log, Change(at=2), backend, anyway=True)
    assert events(path) == events(log)


def broken(name: str) -> Backend:
    """Fail to load."""
    raise ValueError(f"there is no {name}")


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (Change(at=13), {}, "there is no unit 13: the recording has units 0 to 12"),
        (Change(at=2), {"load": broken}, "the model 'scripted' cannot be loaded"),
    ],
)
def test_says_why_not(change: Change, options: dict[str, Any], why: str, log: Path) -> None:
    """A unit that is not there, or a model that is not, would end in a traceback."""
    assert why in str(refusal(log, change, ScriptedBackend(quick), **options))


@pytest.mark.parametrize("dialect", ["openai", "live"])
def test_other_sound_is_refused_where_it_cannot_be_said(dialect: str, tmp_path: Path) -> None:
    """A session of OpenAI's APIs ended in a traceback."""
    copy = tmp_path / "parent.session.zst"
    copy.write_bytes((FOLDER / f"v1-{dialect}.session.zst").read_bytes())
    error = refusal(copy, Change(at=0, pcm=QUESTION), ScriptedBackend(quick), anyway=True)
    assert f"legacy-duplex, and this one is of {dialect}" in str(error)


def test_a_chat_and_a_damaged_log_are_refused(tmp_path: Path, log: Path) -> None:
    """A recording would be forked that is none, or half of one."""
    chat = FOLDER / "v1-realtime-chat.session.zst"
    copy = tmp_path / chat.name
    copy.write_bytes(chat.read_bytes())
    assert "a chat cannot be forked" in str(refusal(copy, Change(at=0), ScriptedBackend()))
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(LogDamaged):
        fork(log, Change(at=0), ScriptedBackend(quick))


@pytest.mark.parametrize(("fault", "why"), [("gone", "is lost"), ("hang", "hangs")])
def test_a_model_that_breaks_ends_the_fork(fault: Any, why: str, log: Path) -> None:
    """A fork would wait for ever, or be left half made."""

    def breaks(unit: Unit, seed: int) -> Step:
        return attrs.evolve(quick(unit, seed), fault=fault if unit.index == 6 else None)

    assert why in str(refusal(log, Change(at=5), ScriptedBackend(breaks)))


def test_a_unit_that_fails_is_undone(log: Path) -> None:
    """A model that is out of memory for once would end the fork, or run on half-fed memory."""
    path, _ = fork(log, Change(at=1), ScriptedBackend(failing))
    assert judge(path).counts["failed"] == 2
    assert not judge(path).problems
    assert full_replay(path, ScriptedBackend(quick)).identical


# -- where the recording ends ---------------------------------------------------------------------


def test_an_unfinished_recording_can_be_forked(tmp_path: Path) -> None:
    """The log of a killed server could not be asked what would have come."""
    whole = list(read(record_session(tmp_path)))
    cut = next(r.seq for r in whole if r.kind == "unit" and r.fields["result"]["index"] == 7)
    (tmp_path / "cut").mkdir()
    log = write_log(tmp_path / "cut", whole[:cut])
    path, forked = fork(log, Change(at=6), ScriptedBackend(quick))
    assert (forked.ended_early, forked.units >= 8) == (True, True)
    assert events(path)[: len(events(log))] == events(log)
    assert (verify(path).state, judge(path).problems) == ("finished", ())
    assert list(read(path))[-1].fields["reason"] == "peer_gone"


def test_a_fork_can_outlive_its_parent(tmp_path: Path) -> None:
    """A session that was over for want of context would seem to be over with more of it."""
    frames = [(0.5, append_frame())] + [(1.0, append_frame())] * 9
    log = record_calls(tmp_path, frames, context_limit=120)
    assert list(read(log))[-1].fields["reason"] == "context_full"
    backend = ScriptedBackend(quick, context_limit=8000)
    path, forked = fork(log, Change(at=2, model="larger"), backend)
    assert forked.ended_early
    assert not judge(path).problems


# -- replayed, with units that were held ----------------------------------------------------------


SEED = Change(at=9, seed=3, settings={"temperature": 0.2})


def head_of(log: Path) -> Any:
    """Give the fields of a log's head."""
    with LogReader(log) as reader:
        return reader.head.fields


def told(report: FullReport) -> str:
    """Say what people are told."""
    console = Console(width=200)
    with console.capture() as capture:
        print_all(console, full_lines(report, 1.0))
    return capture.get()


def replay_records(records: list[Record], backend: Any) -> FullReport:
    """Run records' model again, on virtual time."""
    reports = []

    async def body() -> None:
        head = records[0].fields
        reports.append(await replay_fully(head, records, lambda _: backend, anyway=True))

    on_virtual_time(body)
    return reports[0]


@pytest.mark.parametrize("at", [1, 5, 9, 12])
def test_a_held_fork_replays(log: Path, at: int) -> None:
    """What a fork shows of another seed or prompt could not be shown again."""
    path, forked = fork(log, attrs.evolve(SEED, at=at), ScriptedBackend(quick))
    assert forked.prefix.held > 0 or at == 1
    report = full_replay(path, ScriptedBackend(quick))
    assert report.identical, report.first_divergence
    assert (report.units, report.units_held, report.units_changed) == (13, at, 0)
    assert f"is a fork, then and now: {at} of 13 units" in told(report)


def test_a_fork_of_a_held_fork_replays(log: Path) -> None:
    """One could ask a question of a fork once, and never again."""
    first, _ = fork(log, attrs.evolve(SEED, at=4), ScriptedBackend(quick))
    second, forked = fork(first, Change(at=10, force_listen=True), ScriptedBackend(quick))
    assert (forked.parent, held_units(head_of(second))) == ("fork-1", 10)
    report = full_replay(second, ScriptedBackend(quick))
    assert (report.identical, report.units_held) == (True, 10), report.first_divergence


def test_a_fork_of_another_model_replays(log: Path) -> None:
    """Whatever another model would have said could not be shown again."""

    def other(unit: Unit, seed: int) -> Step:
        return Step(speech=Speaks(text=f"other {unit.index}", pcm=tone(1, seed, samples=2400)))

    def backend() -> ScriptedBackend:
        made = ScriptedBackend(other, context_limit=4000)
        made.info = attrs.evolve(made.info, fingerprint={"backend": "other"})
        return made

    path, _ = fork(log, Change(at=7, model="other"), backend())
    report = full_replay(path, backend())
    assert (report.identical, report.units_held) == (True, 7), report.first_divergence


def test_a_model_that_was_not_forced_is_not_held(tmp_path: Path) -> None:
    """Units that the model made by itself would be taken for such as somebody else decided."""
    log = write_log(tmp_path, echo_records())
    path, _ = fork(log, Change(at=4, seed=5), Echo(), anyway=True)
    report = full_replay(path, Echo())
    assert (report.identical, report.units_held) == (True, 0), report.first_divergence


def test_without_a_change_nothing_is_held(log: Path) -> None:
    """A regression in the first units would be overlooked as not judged."""
    path, _ = fork(log, Change(at=5, force_listen=True), ScriptedBackend(quick))
    report = full_replay(path, ScriptedBackend(quick))
    assert (held_units(head_of(path)), report.units_held) == (0, 0)
    assert "held" not in told(report)


@pytest.mark.parametrize(
    ("unit", "fields", "is_noticed"),
    [(2, {"kv_length": 1}, True), (9, {"text": "no"}, True), (2, {"text": "no"}, False)],
)
def test_what_is_the_model_s_own_is_judged(
    log: Path, unit: int, fields: dict[str, Any], is_noticed: bool
) -> None:
    """A held fork would be identical whatever the model makes of it."""
    path, _ = fork(log, SEED, ScriptedBackend(quick))
    records = list(read(path))
    for place, record in enumerate(records):
        if record.kind == "unit" and record.fields["result"]["index"] == unit:  # type: ignore[index,call-overload]
            result: Any = record.fields["result"]
            records[place] = attrs.evolve(
                record, fields={**record.fields, "result": {**result, **fields}}
            )
    report = replay_records(records, ScriptedBackend(quick))
    assert report.divergence is None or report.divergence.unit == unit
    assert (report.divergence is not None, report.units_changed) == (is_noticed, is_noticed)


def test_a_head_that_does_not_say_it_is_found_out(log: Path) -> None:
    """Holding would be what every log gets, and a full replay would prove nothing."""
    path, _ = fork(log, SEED, ScriptedBackend(quick))
    records = list(read(path))
    config: Any = records[0].fields["config"]
    head = {**records[0].fields, "config": {**config, "fork": {"is_held": False}}}
    records[0] = attrs.evolve(records[0], fields=head)
    report = replay_records(records, ScriptedBackend(quick))
    assert (report.identical, report.units_held) == (False, 0)
    assert replay(records).identical
