"""Logic replay: what a machine did it does again, and what was changed in a log is found."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values import events as ev
from recorder.format.format import Record
from recorder.format.mapping import EFFECT_KINDS, EVENT_KINDS
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.rerun.logic import HERE, Replayer, replay
from replay.rerun.report import Divergence, ReplayReport, Version
from tests.replay.test_logs import APPENDS, Scene, busy_scene, renumbered, scenes, write_log

EFFECT_LIKE = EFFECT_KINDS | {"state"}


@cache
def busy() -> tuple[Record, ...]:
    """The busy scene's records, made once."""
    return tuple(busy_scene().records)


def divergence(records: list[Record] | tuple[Record, ...]) -> Divergence:
    """Replay, and return the divergence that must be there."""
    found = replay(records).divergence
    assert found is not None
    return found


def places(kinds: frozenset[str] | set[str]) -> list[int]:
    """Return where in the busy scene records of some kinds are."""
    return [record.seq for record in busy() if record.kind in kinds]


# -- the same again -------------------------------------------------------------------------------


@settings(max_examples=3 * settings.default.max_examples)
@given(scenes())
def test_any_session_replays(scene: Scene) -> None:
    """A recording of a session that went some odd way would not replay."""
    report = replay(scene.records)
    assert report.identical, report.divergence
    assert report.finished is scene.session.is_finished
    assert not report.truncated
    effects = [record for record in scene.records if record.kind in EFFECT_KINDS]
    assert report.effects == len(effects)
    assert report.frames == sum(record.kind == "tx" for record in effects)
    assert report.units == scene.session.counts["units"]


def test_a_file_replays_and_counts(tmp_path: Path) -> None:
    """What a recorder wrote would not replay, or its replay would count something else."""
    records = busy()
    with LogReader(write_log(tmp_path, records)) as reader:
        report = replay(reader)
    assert report == replay(records)
    assert report.identical
    assert report.finished
    assert report == ReplayReport(
        recorded_by=Version(behaviour=0),
        replayed_by=HERE,
        records=len(records),
        events=len(places(EVENT_KINDS)),
        effects=len(places(EFFECT_KINDS)),
        frames=len(places({"tx"})),
        states=len(places({"state"})) + 1,
        states_of_old=0,
        units=27,
        span_ns=records[-1].at_ns,
        finished=True,
        truncated=False,
        divergence=None,
        damage=(),
        damage_count=0,
    )
    assert report.states == 3


def test_its_steps_end_where_it_stops() -> None:
    """A model would be run on the effects of a session that already went another way."""
    records, events = busy(), places(EVENT_KINDS)
    assert [step.record.seq for step in Replayer().steps(records)] == events
    seq = next(seq for seq in places(EFFECT_KINDS) if seq > events[9])
    replayer = Replayer()
    stepped = replayer.steps(renumbered(records[:seq] + records[seq + 1 :]))
    assert [step.record.seq for step in stepped] == [event for event in events if event < seq]
    assert replayer.is_stopped


@settings(max_examples=40)
@given(scenes(), st.integers(0, 10_000))
def test_any_start_of_a_log_replays(scene: Scene, length: int) -> None:
    """The log of a killed server, or of one that still runs, would seem to diverge."""
    start = scene.records[: 1 + length % len(scene.records)]
    report = replay(start)
    assert report.identical, report.divergence
    rest = scene.records[len(start) :]
    amid = bool(rest) and rest[0].kind in EFFECT_LIKE and start[-1].kind != "session"
    if not (rest and rest[0].kind == "state"):
        assert report.truncated is amid


@pytest.mark.parametrize("seed", ["0", "1"])
def test_replays_under_any_hash_seed(tmp_path: Path, seed: str) -> None:
    """A log would replay in some processes and diverge in others."""
    path = write_log(tmp_path, busy())
    code = (
        "import sys; from pathlib import Path; from recorder.read.reader import LogReader;"
        " from replay.rerun.logic import replay;"
        " r = replay(LogReader(Path(sys.argv[1]))); print(r.identical, r.frames, r.states)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "PYTHONHASHSEED": seed},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == ["True", str(len(places({"tx"}))), "3"]


# -- another: found where it is -------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_finds_a_dropped_effect(data: st.DataObject) -> None:
    """A frame that a client got would be missing from a log that still replays."""
    seq = data.draw(st.sampled_from(places(EFFECT_KINDS)))
    records = busy()
    found = divergence(renumbered(records[:seq] + records[seq + 1 :]))
    assert found.seq == seq
    assert found.kind in ("changed", "missing", "state")


@settings(max_examples=40)
@given(st.data())
def test_finds_an_effect_too_many(data: st.DataObject) -> None:
    """A frame that no client got would stand in a log that still replays."""
    seq = data.draw(st.sampled_from(places(EFFECT_KINDS)))
    records = busy()
    found = divergence(renumbered((*records[: seq + 1], *records[seq:])))
    assert found.seq == seq + 1
    assert found.kind in ("changed", "left_over")


def test_finds_swapped_effects() -> None:
    """Effects in another order, such as a close before a send, would pass as the same."""
    records = busy()
    pairs = [seq for seq in places(EFFECT_KINDS) if records[seq + 1].kind in EFFECT_KINDS]
    assert len(pairs) > 10
    for seq in pairs:
        swapped = (*records[:seq], records[seq + 1], records[seq], *records[seq + 2 :])
        assert divergence(renumbered(swapped)).seq == seq


def test_finds_a_dropped_event() -> None:
    """An event that is missing would pass where it had effects."""
    records = busy()
    seqs = [seq for seq in places(EVENT_KINDS) if records[seq + 1].kind in EFFECT_KINDS]
    for seq in seqs[1:]:
        found = divergence(renumbered(records[:seq] + records[seq + 1 :]))
        assert (found.seq, found.kind) == (seq, "left_over")
    assert divergence(renumbered(records[:1] + records[2:])).kind == "left_over"


@settings(max_examples=4 * settings.default.max_examples)
@given(st.data())
def test_finds_a_changed_value(data: st.DataObject) -> None:
    """A number, a word or a byte's digest in an effect could change unseen."""
    seq = data.draw(st.sampled_from(places(EFFECT_KINDS | {"state"})))
    record = busy()[seq]
    spots = [spot for spot in _spots(record.fields) if spot[-1] != "type"]
    path = data.draw(st.sampled_from(spots or [("type",)]))
    changed = attrs.evolve(record, fields=_changed(record.fields, path, data))
    found = divergence([*busy()[:seq], changed, *busy()[seq + 1 :]])
    assert found.seq == seq
    assert found.kind == ("state" if record.kind == "state" else "changed")
    assert found.recorded != found.came_out
    assert found.cause is not None
    assert found.cause.seq == max(s for s in places(EVENT_KINDS) if s < seq)


def _spots(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List the paths of all the leaves of a value."""
    if isinstance(value, Mapping):
        return [spot for key in value for spot in _spots(value[key], (*path, key))]
    if isinstance(value, list | tuple):
        return [spot for i, item in enumerate(value) for spot in _spots(item, (*path, i))]
    return [path]


def _changed(value: Any, path: tuple[Any, ...], data: st.DataObject) -> Any:
    """Copy a value with one leaf changed, its type too perhaps."""
    if path:
        copy = dict(value) if isinstance(value, Mapping) else list(value)
        copy[path[0]] = _changed(value[path[0]], path[1:], data)
        return copy
    if isinstance(value, bool):
        return data.draw(st.sampled_from([not value, int(value)]))
    if isinstance(value, int | float):
        return data.draw(st.sampled_from([value + 1, -value - 1, str(value)]))
    if isinstance(value, str):
        at = data.draw(st.integers(0, len(value)))
        return value[:at] + data.draw(st.sampled_from(["x", "\x00", "\ud800"])) + value[at:]
    return 0


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"type": "Nothing"}, "unmapped"),
        ({"type": "FrameReceived", "frame": 5}, "unmapped"),
        ({"type": "SlotLeased", "lease": True, "slot": 0}, "unmapped"),
        ({}, "unmapped"),
        ({"type": "ConnectionOpened"}, "unmapped"),
    ],
)
def test_finds_a_record_that_is_no_event(fields: dict[str, Any], kind: str) -> None:
    """A record that holds nonsense would end replay with a traceback."""
    for seq in (places({"unit"})[2], places({"rx"})[3]):
        changed = attrs.evolve(busy()[seq], fields=fields)
        found = divergence([*busy()[:seq], changed, *busy()[seq + 1 :]])
        assert (found.seq, found.kind) == (seq, kind)


def test_finds_an_event_that_the_machine_refuses() -> None:
    """Time that goes back, or a second start, would end replay with a traceback."""
    seq = places({"rx"})[4]
    early = attrs.evolve(busy()[seq], at_ns=1)
    found = divergence([*busy()[:seq], early, *busy()[seq + 1 :]])
    assert (found.seq, found.kind, found.cause and found.cause.seq) == (seq, "refused", seq)
    assert "time went back" in found.came_out
    again = attrs.evolve(busy()[1], seq=seq, at_ns=busy()[seq].at_ns)
    found = divergence([*busy()[:seq], again, *busy()[seq + 1 :]])
    assert (found.seq, found.kind) == (seq, "refused")


def test_finds_a_session_without_its_beginning() -> None:
    """A log that starts in the middle would end replay with a traceback."""
    scene = Scene()
    scene.lease()
    rest = renumbered([scene.records[0], *scene.records[4:]])
    assert divergence(rest).kind in ("refused", "left_over")
    assert divergence(renumbered([scene.records[0], *busy()[5:]])).seq == 1


def test_finds_another_end() -> None:
    """`fin` could name another reason or other counts than the session had."""
    fin = busy()[-1]
    for change in ({"reason": "timeout"}, {"units": 3}, {"frames_sent": 0}):
        wrong = attrs.evolve(fin, fields={**fin.fields, **change})
        found = divergence([*busy()[:-1], wrong])
        assert (found.seq, found.kind, found.field.partition("[")[0]) == (fin.seq, "fin", *change)
    cut_off = attrs.evolve(fin, fields={**fin.fields, "reason": "broken_off"})
    assert replay([*busy()[:-1], cut_off]).identical
    after = attrs.evolve(busy()[1], seq=fin.seq + 1)
    assert divergence([*busy(), after]).kind == "left_over"


def test_fin_amid_effects_diverges() -> None:
    """Effects that were never recorded before the log's end would pass as a cut tail."""
    last = max(places(EFFECT_KINDS))
    found = divergence(renumbered(busy()[:last] + busy()[last + 1 :]))
    assert (found.seq, found.kind) == (last, "missing")


# -- explained ------------------------------------------------------------------------------------


def test_explains_a_changed_frame() -> None:
    """One could not see where in 100 KB of a frame the difference is, nor what led to it."""
    scene = Scene()
    scene.activate()
    scene.unit(1)
    seq = next(r.seq for r in reversed(scene.records) if r.kind == "tx")
    record = scene.records[seq]
    frame = str(record.fields["frame"])
    at = len(frame) - 60
    wrong = frame[:at] + "#" + frame[at + 1 :]
    scene.records[seq] = attrs.evolve(record, fields={**record.fields, "frame": wrong})
    found = divergence(scene.records)
    assert (found.record, found.field, found.unit) == ("tx Send", f"frame[{at}]", 0)
    assert "#" in found.recorded
    assert "#" not in found.came_out
    assert max(len(found.recorded), len(found.came_out)) < 200
    assert found.cause is not None
    assert found.cause.kind == "UnitDone"
    assert len(found.cause.summary) < 250


def test_shows_bytes_by_their_digest() -> None:
    """A divergence in 64 KB of PCM would print 64 KB of PCM."""
    seq = next(r.seq for r in busy() if r.fields.get("type") == "StartUnit")
    record = busy()[seq]
    unit = dict(record.fields["unit"])  # type: ignore[arg-type]
    unit["pcm"] = {"bytes": 64_000, "blake2b": "00" * 16}
    changed = attrs.evolve(record, fields={**record.fields, "unit": unit})
    found = divergence([*busy()[:seq], changed, *busy()[seq + 1 :]])
    assert found.field == "unit.pcm"
    assert found.recorded == f"64000 bytes, blake2b {'00' * 16}"


# -- damage ---------------------------------------------------------------------------------------


def test_stops_at_a_gap() -> None:
    """A replay would go on over missing records as if nothing had happened."""
    report = replay(busy()[:50] + busy()[51:])
    assert (report.records, report.divergence, report.identical) == (50, None, False)
    assert [(d.reason, d.first_seq, d.records) for d in report.damage] == [("gap", 50, 1)]


def test_goes_on_after_lost_effects_when_told() -> None:
    """What is left of a damaged log could not be compared at all."""
    seq = places({"tx"})[5]
    lost = Damage(offset=0, length=9, reason="record", detail="lost", first_seq=seq, records=1)
    items = [*busy()[:seq], lost, *busy()[seq + 1 :]]
    assert replay(items).records == seq
    report = replay(items, go_on=True)
    assert (report.divergence, report.finished, report.damage) == (None, True, (lost,))
    assert report.records == len(busy()) - 1
    assert not report.identical


def test_goes_on_over_a_broken_chain_without_loss() -> None:
    """One broken link in the chain would hide that everything else came out the same."""
    seq = places({"tx"})[5]
    broken = Damage(offset=0, length=0, reason="chain", detail="it does not follow")
    report = replay([*busy()[:seq], broken, *busy()[seq:]], go_on=True)
    assert report.effects == len(places(EFFECT_KINDS))
    assert report.damage_count == 1


def test_counts_damage_without_end() -> None:
    """A file of nothing but damage would fill the memory."""
    lost = Damage(offset=0, length=9, reason="header", detail="lost")
    report = replay([busy()[0], *[lost] * 500], go_on=True)
    assert (len(report.damage), report.damage_count) == (100, 500)


def test_a_report_has_plain_values() -> None:
    """A report could not be printed as JSON."""
    found = replay(renumbered(busy()[:9] + busy()[10:]))
    assert orjson.dumps(attrs.asdict(found))


def test_input_that_no_effect_shows_is_found_by_a_state_hash() -> None:
    """A change that the client never saw, as half a second of input, would never be found."""
    scene = Scene()
    scene.activate()
    for number in range(20):
        scene.unit(number, frame=APPENDS[0])
    scene.send(APPENDS[1])
    seq = len(scene.records) - 1
    record = scene.records[seq]
    assert isinstance(record.fields["frame"], str)
    other = record.fields["frame"].replace("false", "true")
    scene.records[seq] = attrs.evolve(record, fields={**record.fields, "frame": other + " "})
    assert replay(scene.records).identical
    state = Record(
        kind="state", seq=seq + 1, at_ns=record.at_ns, fields={"digest": scene.session.digest()}
    )
    assert replay([*scene.records, state]).identical
    scene.records[seq] = attrs.evolve(
        record, fields={"type": "FrameReceived", "frame": APPENDS[2][:-1] + " }"}
    )
    found = replay([*scene.records, state]).divergence
    assert found is not None
    assert found.kind in ("state", "missing")


@pytest.mark.parametrize(
    "name", ["reason", "dialect", "units", "frames_sent", "fields_ignored", "digest"]
)
@pytest.mark.parametrize("is_missing", [True, False])
def test_finds_any_other_end(name: str, *, is_missing: bool) -> None:
    """A session could end in another state, or its log say nothing of it."""
    *rest, fin = busy()
    fields = {**fin.fields, name: "another"}
    if is_missing:
        del fields[name]
    found = divergence([*rest, attrs.evolve(fin, fields=fields)])
    assert (found.seq, found.kind, found.field.partition("[")[0]) == (fin.seq, "fin", name)


def test_finds_an_end_before_the_slot_is_back() -> None:
    """A machine that forgets its slot would replay."""
    records = busy()
    released = max(seq for seq in places(EVENT_KINDS) if "lease" in records[seq].fields)
    assert records[released].fields["type"] == "BackendReleased"
    found = divergence(renumbered((*records[:released], *records[released + 1 :])))
    assert (found.kind, found.came_out) == ("fin", "a session that goes on")


def test_finds_an_effect_of_another_time() -> None:
    """What a client was sent later, or before it was due, would pass."""
    records = list(busy())
    for seq in places({"tx"})[:5]:
        late = attrs.evolve(records[seq], at_ns=records[seq].at_ns + 1)
        found = divergence([*records[:seq], late, *records[seq + 1 :]])
        assert (found.seq, found.kind, found.field) == (seq, "changed", "at_ns")


@pytest.mark.parametrize("name", ["recording_id", "seed", "wall_ms", "mode"])
def test_finds_the_head_of_another_session(name: str) -> None:
    """A log that was put together of two would replay as the one or the other."""
    head, *rest = busy()
    other = {"config": {"mode": "chat"}} if name == "mode" else {name: "another"}
    found = divergence([attrs.evolve(head, fields={**head.fields, **other}), *rest])
    assert (found.seq, found.kind, found.field.partition("[")[0]) == (0, "head", name)


def test_states_of_an_older_kind_are_counted_and_not_compared() -> None:
    """Logs of before would all diverge, or count as proven where they are not."""
    head, *rest = busy()
    old = attrs.evolve(head, fields={**head.fields, "schema": {"machine": 1}})
    garbled = [
        attrs.evolve(record, fields={**record.fields, "digest": "of other names"})
        if record.kind in ("state", "fin")
        else record
        for record in rest
    ]
    report = replay([old, *garbled])
    assert report.identical, report.divergence
    assert (report.states, report.states_of_old) == (0, 2)


def test_events_keep_their_names() -> None:
    """Old logs name events by their class: renaming one would make them unreadable."""
    assert {"ConnectionOpened", "FrameReceived", "UnitDone", "Draining"} <= {
        cls.__name__ for cls in ev.Event.__args__
    }
