"""Inspect: what is told of a session is what was recorded of it."""

from __future__ import annotations

from pathlib import Path

import attrs
from hypothesis import given, settings

from protocol.values.errors import ErrorCode
from protocol.values.limits import NS_PER_S
from recorder.format.mapping import EVENT_KINDS
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.library.text import inspect_lines
from replay.story.inspect import Inspection, inspect, to_json
from replay.story.reading import Drop, ErrorSent
from tests.golden.logs import FOLDER
from tests.replay.test_logs import APPENDS, HEAD, ODD_FRAMES, RECORDING_ID, Scene, scenes


def tell(scene: Scene) -> Inspection:
    """Inspect a scene's records."""
    return inspect(HEAD, scene.records)


def test_tells_a_session_from_start_to_end() -> None:
    """One could not see when a session became active, what it said, or how it ended."""
    scene = Scene()
    scene.wait(1000)
    scene.activate()
    scene.wait(500)
    scene.unit(0)
    scene.unit(4)
    scene.finish()
    told = tell(scene)
    assert [(str(span.state), span.at_ns) for span in told.states] == [
        ("QUEUED", 0),
        ("CONNECTED", NS_PER_S),
        ("ACTIVE", NS_PER_S),
        ("CLOSED", 2_300_000_000),
    ]
    assert (told.recording_id, told.model, told.mode) == (RECORDING_ID, "scripted", "video")
    assert (told.dialect, told.seed, told.duration_ns) == ("realtime", 7, 2_300_000_000)
    assert (told.frames_received, told.frames_sent) == (4, 6)
    listens, speaks = told.units
    assert (listens.index, listens.outcome, listens.text) == (0, "listen", "")
    assert (listens.started_ns, listens.finalized_ns) == (1_500_000_000, 1_500_000_000)
    assert (speaks.outcome, speaks.text, speaks.audio_ms) == ("speech", 'wörd "4"\n', 10)
    assert speaks.costs is not None
    assert (speaks.end_of_turn, speaks.costs.wall_us) == (True, 1004)
    assert speaks.kv_length == 40 + 20 + 2 + 24
    assert (told.end.reason, told.end.close_code, told.end.finished) == ("client", 1000, True)
    assert told.diverged_seq is None


def test_tells_how_far_behind_playback_is() -> None:
    """One could not see that a client heard its answers late."""
    scene = Scene()
    scene.send('{"type": "playback.ack", "played_ms": 0}')
    scene.activate()
    scene.unit(4)
    scene.send('{"type": "playback.ack", "played_ms": 4}')
    scene.send('{"type": "playback.ack", "played_ms": -4}')
    scene.finish()
    told = tell(scene)
    assert [(it.played_ms, it.behind_ms) for it in told.playback] == [(4, 6)]
    assert to_json(told)["playback"] == [
        {"at_ns": told.playback[0].at_ns, "played_ms": 4, "behind_ms": 6}
    ]


def test_tells_of_failures_and_interruptions() -> None:
    """A unit that failed, was cut or was never answered would look like one that listened."""
    scene = Scene()
    scene.activate()
    scene.unit(5)
    scene.unit(12)
    scene.send(APPENDS[0])
    scene.send(APPENDS[3])
    scene.answer(10)
    scene.answer()
    scene.answer(0)
    scene.answer()
    scene.send(APPENDS[0])
    units = tell(scene).units
    assert [unit.outcome for unit in units] == [
        *("listen", "failed", "withheld", "listen", "pending")
    ]
    assert units[2].cut is not None
    assert [unit.forced for unit in units] == [False, False, False, True, False]
    assert units[4].done_ns is None
    told = tell(scene)
    assert told.errors == (
        ErrorSent(at_ns=400_000_000, code="inference_error", message=told.errors[0].message),
    )
    assert (told.end.reason, told.end.finished) == (None, False)


def test_tells_of_a_unit_that_outlived_its_session() -> None:
    """A unit whose answer nobody got would look as if it had been sent."""
    scene = Scene()
    scene.activate()
    scene.send(APPENDS[0])
    scene.send('{"type":"session.close"}')
    scene.answer(1)
    scene.answer()
    assert [unit.outcome for unit in tell(scene).units] == ["ended"]


def test_tells_of_drops_and_errors() -> None:
    """Input that was lost, and what the client was told was wrong, could not be seen."""
    scene = Scene()
    scene.activate()
    scene.send(APPENDS[5])
    scene.send(ODD_FRAMES[0])
    told = tell(scene)
    assert [drop.ordinal for drop in told.drops] == [1]
    assert all(isinstance(drop, Drop) and drop.input_id for drop in told.drops)
    assert [error.code for error in told.errors] == [ErrorCode.UNKNOWN_EVENT]


@settings(max_examples=40)
@given(scenes())
def test_tells_any_session(scene: Scene) -> None:
    """Some odd session could not be looked at."""
    told = tell(scene)
    counts = scene.session.counts
    assert len(told.units) == counts["units"]
    assert len(told.drops) == counts["units_dropped"]
    assert told.frames_sent == counts["frames_sent"]
    assert told.states[-1].state is scene.session.state
    assert told.end.reason == scene.session.end_reason
    assert to_json(told)


def test_names_the_fields_that_had_no_effect() -> None:
    """A user looks in vain for why a setting does nothing."""
    path = Path(__file__).parents[2] / "fixtures" / "logs" / "v1-realtime-mistakes.session.zst"
    with LogReader(path) as reader:
        told = inspect(reader.head.fields, reader)
    assert len(told.ignored) == told.fields_ignored > 0
    assert all(name.startswith("$.") for name in told.ignored)
    text = " ".join(map(str, inspect_lines(told)))
    assert told.ignored[0] in text


def test_tells_what_is_left_of_a_damaged_log() -> None:
    """A log with one bad block could not be looked at."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    scene.unit(4)
    scene.finish()
    seq = next(record.seq for record in scene.records if record.kind == "unit")
    lost = Damage(offset=0, length=1, reason="record", detail="lost", first_seq=seq, records=1)
    told = inspect(HEAD, [*scene.records[:seq], lost, *scene.records[seq + 1 :]])
    assert (told.damage_count, told.units[0].outcome, len(told.units)) == (1, "pending", 2)


def test_tells_a_log_that_diverges() -> None:
    """What was recorded could not be seen once today's machine would do otherwise."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    scene.finish()
    seq = next(record.seq for record in scene.records if record.kind == "unit") + 1
    wrong = attrs.evolve(scene.records[seq], fields={**scene.records[seq].fields, "ordinal": 77})
    told = inspect({}, [*scene.records[:seq], wrong, *scene.records[seq + 1 :]])
    assert (told.diverged_seq, told.units[0].outcome) == (seq, "speech")
    assert (told.end.reason, told.recording_id, told.model) == ("client", None, None)


def test_passes_by_records_that_are_no_events() -> None:
    """A record that holds nonsense would end the telling with a traceback."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    for record in list(scene.records):
        if record.kind in EVENT_KINDS or record.kind in ("effect", "tx"):
            for fields in ({}, {**record.fields, "unit": 5, "frame": 5, "code": None}):
                odd = [*scene.records]
                odd[record.seq] = attrs.evolve(record, fields=fields)
                assert inspect(HEAD, odd).records == len(odd)


def test_a_call_is_told_with_its_result_and_the_speech_after_it() -> None:
    """How long a tool took, and how long the model took to speak of it, was in no report."""
    with LogReader(FOLDER / "v1-duplex-tools.session.zst") as reader:
        calls = inspect(reader.head.fields, reader).calls
    assert [(call.call, call.name, call.result) for call in calls] == [
        ("t1", "clock", "ten"),
        ("t2", "clock", "half past nine"),
        ("t3", "", "error: the call is not JSON"),
        ("t4", "clock", "error: no answer in time"),
    ]
    assert all(it.at_ns < (it.ended_ns or 0) < (it.spoken_ns or 0) for it in calls)
