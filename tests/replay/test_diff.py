"""Two sessions side by side: where they part, what is shown of it, and the command `diff`."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.values.effects import StartUnit
from protocol.values.events import UnitDone
from protocol.values.model import OUTPUT_RATE_HZ, Unit, UnitResult
from recorder.format.format import Record
from recorder.format.mapping import effect_record, event_record
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage
from replay.diff import DIFFERENCES_KEPT, FIELDS, DiffReport, compare, diff_command, diff_lines
from runtime.model.backends.scripted_chat import tone
from tests.golden.logs import FOLDER
from tests.replay.test_full import echo_records, results
from tests.replay.test_logs import HEAD, Scene, busy_scene, scenes, write_log
from tests.strategies.messages import noise

GOLDEN: Final = sorted(FOLDER.glob("v1-*.session.zst"))


def diff(
    a: Iterable[Record | Damage], b: Iterable[Record | Damage], **head_b: object
) -> DiffReport:
    """Compare records; the second session's head has other fields where a test says so."""
    return compare(HEAD, a, HEAD | head_b, b)


def changed(records: Iterable[Record], index: int, **fields: Any) -> list[Record]:
    """Give records in which the result of one unit is another."""

    def change(record: Record) -> Record:
        made: Any = record.fields.get("result")
        if record.kind != "unit" or made["index"] != index:
            return record
        return attrs.evolve(record, fields={**record.fields, "result": made | fields})

    return [change(record) for record in records]


def edited(records: Sequence[Record], place: int, name: str, **fields: Any) -> list[Record]:
    """Give records of which the one at a place says something else."""
    told: Any = records[place].fields[name]
    spoiled = [*records]
    whole = {**records[place].fields, name: told | fields}
    spoiled[place] = attrs.evolve(records[place], fields=whole)
    return spoiled


def items(path: Path) -> Iterator[Record | Damage]:
    """Give a log's records, and its damage."""
    with LogReader(path) as reader:
        yield from reader


def units(count: int) -> Iterator[Record]:
    """Make the records of units that say a second each, one at a time."""
    for index in range(count):
        unit = Unit(index=index, pcm=bytes(64_000))
        kind, fields = effect_record(StartUnit(unit=unit))
        yield Record(kind=kind, seq=2 * index + 1, at_ns=index * 10**9, fields=fields)
        pcm = tone(index, 0, samples=OUTPUT_RATE_HZ)
        done = UnitDone(at_ns=0, result=UnitResult(index=index, is_listen=False, pcm=pcm))
        kind, fields = event_record(done)
        at_ns = index * 10**9 + (index + 1) * 10**6
        yield Record(kind=kind, seq=2 * index + 2, at_ns=at_ns, fields=fields)


# -- what differs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=[path.name for path in GOLDEN])
def test_a_session_is_the_same_as_itself(path: Path) -> None:
    """Two runs that came out alike would be told to differ."""
    report = diff(items(path), items(path))
    assert (report.first, report.parting_count, report.setup) == (None, 0, ())
    assert report.compared == report.same == report.a.exchanges
    assert report.a == report.b


@pytest.mark.parametrize(
    ("fields", "first", "all_of_them"),
    [
        ({"input_hash": "0"}, "input_hash[0]", ("input_hash",)),
        ({"is_listen": True, "text": ""}, "outcome[0]", ("outcome", "text")),
        ({"decided_ids": [1, 2]}, "decided_ids[0]", ("decided_ids",)),
        ({"fed_ids": [9], "codec_ids": [9]}, "fed_ids[0]", ("fed_ids", "codec_ids")),
        ({"text": "other", "end_of_turn": True}, "text[0]", ("text", "end_of_turn")),
        ({"pcm": b"1234"}, "pcm[0]", ("pcm",)),
        ({"end_of_turn": True}, "end_of_turn", ("end_of_turn",)),
        ({"vision_slices": 2}, "vision_slices", ("vision_slices",)),
        ({"vision_tokens": 64}, "vision_tokens", ("vision_tokens",)),
    ],
)
def test_one_unit_that_differs(
    fields: dict[str, Any], first: str, all_of_them: tuple[str, ...]
) -> None:
    """One would be told of a consequence and not of what came first, or of another unit."""
    records = echo_records()
    spoken = next(index for index, made in results(records).items() if made.get("pcm"))
    report = diff(records, changed(records, spoken, **fields))
    assert report.first is not None
    assert (report.first.what, report.first.index) == ("unit", spoken)
    assert (report.first.path, report.first.fields) == (first, all_of_them)
    assert (report.parting_count, report.same) == (1, report.compared - 1)


@pytest.mark.parametrize(
    ("fields", "first"),
    [({"fed_ids": [9]}, "finalized_ids[0]"), ({"kv_length": 1}, "finalized_kv_added")],
)
def test_what_ends_a_unit_is_compared(fields: dict[str, Any], first: str) -> None:
    """What the model was fed after a unit could differ, and every answer after it, unseen."""
    records = busy_scene().records
    place = next(at for at, it in enumerate(records) if it.fields.get("type") == "FinalizeDone")
    report = diff(records, edited(records, place, "finalized", **fields))
    assert report.first is not None
    assert (report.first.path, report.parting_count) == (first, 1)
    others = [it for it in records if it.fields.get("type") != "FinalizeDone"]
    assert diff(records, others).first is None  # it may be for want of time


def test_logits_are_told_and_never_count() -> None:
    """Two machines that answer alike would be told to part at once, and drift would go unseen."""
    records = echo_records()
    report = diff(records, changed(records, 2, logits_hash="7" * 32))
    assert (report.first, report.logits_changed) == (None, 2)
    assert "the first logits differ from unit 2 on" in diff_lines(report)


def test_sound_is_measured() -> None:
    """Rounding could not be told from another utterance."""
    records = echo_records()
    spoken, made = next(item for item in results(records).items() if item[1].get("pcm"))
    almost = bytearray(made["pcm"])
    almost[0] ^= 1
    first = diff(records, changed(records, spoken, pcm=bytes(almost))).first
    assert first is not None
    assert first.snr_db is not None
    assert first.snr_db > 60
    noisy = noise(240, 3)
    other = diff(records, changed(records, spoken, pcm=noisy)).first
    assert other is not None
    assert other.snr_db is not None
    assert other.snr_db < 10
    assert (other.a is not None and other.a.audio_ms, other.b and other.b.audio_ms) == (10, 10)


def test_one_is_longer_than_the_other() -> None:
    """A session that broke off would pass as the same, or end the comparison."""
    records = busy_scene().records
    cut = next(r.seq for r in records if r.kind == "unit" and r.fields["result"]["index"] == 9)
    report = diff(records, records[:cut])
    assert report.first is not None
    assert (report.first.index, report.first.path) == (9, "outcome[0]")  # it is pending there
    assert (report.compared, report.only_a, report.only_b) == (10, 17, 0)
    mirrored = diff(records[:cut], records)
    assert (mirrored.only_a, mirrored.only_b, mirrored.first and mirrored.first.index) == (0, 17, 9)
    lonely = report.partings[-1]
    assert (lonely.index, lonely.b, lonely.in_b) == (26, None, "nothing")


def test_the_end_and_the_opening_count() -> None:
    """That a prompt was another, or that a session was lost, would go unseen."""
    records = busy_scene().records
    other = attrs.evolve(records[-1], fields={**records[-1].fields, "reason": "timeout"})
    first = diff(records, [*records[:-1], other]).first
    assert first is not None
    assert (first.what, first.in_a, first.in_b) == ("end", "client", "timeout")
    place = next(place for place, record in enumerate(records) if record.kind == "prepare")
    opened = {**records[place].fields, "opened": {"prompt_length": 41, "fed_ids": [1, -1, 2]}}
    prompt = [*records]
    prompt[place] = attrs.evolve(records[place], fields=opened)
    report = diff(records, prompt)
    assert report.first is not None
    assert (report.first.what, report.first.path) == ("opening", "prompt_length")
    assert diff(records, records[:-1]).first is None  # one whose log has no end yet


def test_what_was_given_is_no_difference() -> None:
    """Two runs that differ in their seeds alone could never be the same."""
    records = echo_records()
    other = {"config": {"model": "tiny"}, "fingerprint": {"backend": "scripted", "version": "2"}}
    report = diff(records, records, **other)
    assert report.first is None
    assert [(line.name, line.in_a, line.in_b) for line in report.setup] == [
        ("model", "'scripted'", "'tiny'"),
        ("environment.version", "'1'", "'2'"),
    ]


def test_turns_of_chat_are_compared() -> None:
    """Chats could not be compared at all."""
    records = list(read(FOLDER / "v1-realtime-chat.session.zst"))
    place = max(at for at, record in enumerate(records) if record.fields.get("type") == "TurnDone")
    made: Any = records[place].fields["result"]
    report = diff(records, edited(records, place, "result", text="something else"))
    assert report.first is not None
    assert (report.first.what, report.first.index) == ("turn", made["index"])
    assert (report.first.fields, report.parting_count) == (("text",), 1)


@pytest.mark.parametrize(
    ("kind", "name", "fields", "first"),
    [
        ("TurnPrefilled", "prefill", {"input_tokens": 1}, "input_tokens"),
        ("TurnProgress", "chunk", {"text": "other"}, "streamed[0]"),
        ("TurnDone", "result", {"generated_tokens": 1}, "generated_tokens"),
    ],
)
def test_how_a_turn_came_is_compared(
    kind: str, name: str, fields: dict[str, Any], first: str
) -> None:
    """A client was streamed other words than the answer's, and the two pass as the same."""
    records = list(read(FOLDER / "v1-realtime-chat.session.zst"))
    place = next(
        at
        for at, it in enumerate(records)
        if it.fields.get("type") == kind
        and (kind != "TurnProgress" or it.fields["chunk"].get("text"))  # type: ignore[call-overload,index]
    )
    report = diff(records, edited(records, place, name, **fields))
    assert report.first is not None
    assert (report.first.path, report.first.fields) == (first, (first.partition("[")[0],))


def test_latency_is_told_and_never_counts() -> None:
    """A slow machine would be taken for another model, or nobody would see that it is slow."""
    records = list(units(20))
    late = [
        attrs.evolve(r, at_ns=r.at_ns + 500_000_000) if r.kind == "unit" else r for r in records
    ]
    report = diff(records, late)
    assert report.first is None
    assert (report.a.latency.p50_ms, report.a.latency.p95_ms, report.a.latency.max_ms) == (
        *(10.5, 20.0, 20.0),
    )
    assert report.b.latency.p50_ms == 510.5


@settings(max_examples=25)
@given(scene=scenes(), spoiled=st.sets(st.integers(0, 12)))
def test_any_pair(scene: Scene, spoiled: set[int]) -> None:
    """Units would be named that are the same, or not be named; or the order would matter."""
    records = scene.records
    there = {index for index in results(records) if index in spoiled}
    other: list[Record] = records
    for index in there:
        other = changed(other, index, input_hash="f" * 32)
    report, mirrored = diff(records, other), diff(other, records)
    assert {found.index for found in report.partings} <= there
    started = {r.fields["unit"]["index"] for r in records if r.fields.get("type") == "StartUnit"}
    assert {found.index for found in report.partings} == there & started
    assert report.same == report.compared - len(there & started)
    if report.first is not None:
        assert report.first.index == min(there & started)
        assert report.first.fields[0] == FIELDS[1]
    assert [(p.index, p.in_b, p.in_a) for p in mirrored.partings] == [
        (p.index, p.in_a, p.in_b) for p in report.partings
    ]


def test_memory_is_bounded() -> None:
    """Two sessions of ten minutes could not be compared on a small machine."""
    tracemalloc.start()
    try:
        report = diff(units(200), units(220))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (report.same, report.only_b) == (200, 20)
    assert peak_bytes < 6 << 20  # all of it would be 40 MB
    many = diff([], units(DIFFERENCES_KEPT + 5))
    assert (len(many.partings), many.parting_count) == (DIFFERENCES_KEPT, DIFFERENCES_KEPT + 5)


# -- the command ----------------------------------------------------------------------------------


def call(*arguments: object) -> Result:
    """Run the command; whatever happens, it must not end in a traceback."""
    result = CliRunner().invoke(diff_command, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two logs that differ in unit 4."""
    records = busy_scene().records
    one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
    spoiled = changed(records, 4, text="[red]other\x1b[31m")
    return write_log(one, records), write_log(other, spoiled)


def test_the_first_difference_comes_first(pair: tuple[Path, Path]) -> None:
    """One would have to read a table to learn where two sessions part."""
    result = call(*pair)
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[0].startswith("differ from unit 4 on: 26 of 27 units")
    assert lines[1].strip() == "unit 4: text"
    assert "[red]other" in result.stdout
    assert "\x1b" not in result.stdout
    assert len(lines) < 60
    same = call(pair[0], pair[0])
    assert (same.exit_code, same.stdout.startswith("same: 27 of 27 units")) == (0, True)


def test_json_of_a_pair(pair: tuple[Path, Path]) -> None:
    """A script could not tell where two sessions part, or that they do."""
    result = call(*pair, "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["exit_code"]) == (1, 1)
    assert (body["first"]["index"], body["first"]["fields"]) == (4, ["text"])
    assert body.keys() == {
        *("log_a", "log_b", "exit_code", "a", "b", "setup", "compared", "same"),
        *("only_a", "only_b", "first", "partings", "parting_count", "logits_changed"),
    }
    assert json.loads(call(pair[0], pair[0], "--json").stdout)["first"] is None


def test_what_cannot_be_read_is_one_line(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A wrong path would end in a traceback, and damage would pass as sound."""
    junk = tmp_path / "junk.session.zst"
    junk.write_bytes(b"no log at all" * 50)
    for missing in (tmp_path / "none.session.zst", junk, tmp_path):
        for names in ((pair[0], missing), (missing, pair[0])):
            result = call(*names)
            assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
            assert missing.name in result.stderr
    data = bytearray(pair[0].read_bytes())
    data[len(data) // 2] ^= 1
    junk.write_bytes(data)
    damaged = call(pair[0], junk)
    assert (damaged.exit_code, "damaged: " in damaged.stdout) == (2, True)
    assert json.loads(call(pair[0], junk, "--json").stdout)["exit_code"] == 2


def test_help_teaches_exit_codes() -> None:
    """One would have to read the source for what an exit code means."""
    text = call("--help").stdout
    assert "Frames and errors are not compared" in " ".join(text.split())
    assert "Exit codes:" in text
    assert "    2  " in text
