"""Marks in a log or next to it: every tool shows them, keeps them or leaves them out."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from mcap.reader import make_reader

from recorder.format.format import Record
from recorder.read.reader import LogReader, read
from recorder.repair import compact, verify
from recorder.storage.marks import add_mark, marks_path
from recorder.write.logfile import FIN_FIELDS
from replay.cli import inspect_command, replay_command
from replay.fork.run import Change
from replay.library.keep import marks_command
from replay.redact.content import Policy
from replay.redact.redaction import Redaction, redact_command
from replay.rerun.logic import replay
from replay.shrink import build
from replay.view.document import view_command
from runtime.model.backends.scripted import ScriptedBackend
from tests.browser.view_pages import narrate
from tests.replay.exported import exported
from tests.replay.test_fork import fork, full_replay
from tests.replay.test_full import quick, record_session
from tests.replay.test_logs import write_log
from tests.sessions.answering import play, write_events
from tests.sessions.in_memory import init_frame

TEXTS = ("odd answer", "-->\n\x1b[31m<script>")


def marked(records: list[Record]) -> Iterator[Record]:
    """Put two marks between the steps of a session, and number its records anew."""
    texts, number = [*TEXTS], 0
    for place, record in enumerate(records):
        begins_step = record.kind in {"rx", "unit", "finalize"}
        if texts and begins_step and place > len(records) // (1 + len(texts)):
            fields = {"text": texts.pop(0), "by": "anna"}
            yield Record(kind="mark", seq=number, at_ns=records[place - 1].at_ns, fields=fields)
            number += 1
        own = FIN_FIELDS if record.kind == "fin" else ()
        kept = {name: record.fields[name] for name in record.fields if name not in own}
        yield attrs.evolve(record, seq=number, fields=kept)
        number += 1


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A session of 13 units with two marks."""
    plain = tmp_path / "plain"
    plain.mkdir()
    return write_log(tmp_path, list(marked(list(read(record_session(plain))))))


def marks_in(log: Path) -> list[Record]:
    """Give the marks of a log."""
    return [record for record in read(log) if record.kind == "mark"]


def call(command: Any, *arguments: object) -> str:
    """Run a command that has to succeed; returns its output."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_marked_log_replays(log: Path) -> None:
    """A mark would be a divergence, or be taken for something that the session did."""
    assert verify(log).exit_code == 0
    assert call(replay_command, log).startswith("identical")
    report = full_replay(log, ScriptedBackend(quick))
    assert (report.identical, report.units) == (True, 13), report.first_divergence


def test_inspect_and_view_tell_them(log: Path) -> None:
    """Whoever was told to look at a mark could not find it."""
    marks = marks_in(log)
    told = json.loads(call(inspect_command, log, "--json"))
    assert told["marks"] == [
        {"at_ns": mark.at_ns, "text": text, "by": "anna", "is_later": False}
        for mark, text in zip(marks, TEXTS, strict=True)
    ]
    text = call(inspect_command, log)
    assert ", marks 2\n" in text
    assert "s 'odd answer'" in text
    assert "\x1b" not in text
    with LogReader(log) as reader:
        (story,) = narrate(reader.head.fields, reader)["story"]
    shown = [mark for mark in story["marks"] if mark[1] == "mark"]
    assert [(at_ns, seq) for at_ns, _, seq, _ in shown] == [(it.at_ns, it.seq) for it in marks]
    assert [fields["text"] for *_, fields in shown] == [*TEXTS]


def test_exports_have_them(log: Path) -> None:
    """The mark that a meeting was about would not be in the file that was sent round."""
    times_ns = [mark.at_ns for mark in marks_in(log)]
    lines = [json.loads(line) for line in exported(log, "jsonl").splitlines()]
    marks = [line for line in lines if line["kind"] == "mark"]
    assert [(line["at_ms"], line["text"]) for line in marks] == [
        (round(at_ns / 1e6, 3), text) for at_ns, text in zip(times_ns, TEXTS, strict=True)
    ]
    reader = make_reader(io.BytesIO(exported(log, "mcap")))
    messages = [json.loads(message.data) for *_, message in reader.iter_messages("/session")]
    assert [it["message"] for it in messages if it["name"] == "mark"] == [*TEXTS]
    notes = [line for line in exported(log, "vtt").decode().splitlines() if "NOTE" in line]
    assert [note.split(" ", 2)[2] for note in notes] == ["odd answer", "->  [31m<script>"]
    assert b"odd answer" not in exported(log, "srt")


def test_redact_takes_their_words(log: Path, tmp_path: Path) -> None:
    """What somebody wrote would stay, or one could not see that there was something."""
    out = tmp_path / "redacted.session.zst"
    body = json.loads(call(redact_command, log, "--output", out, "--json"))
    assert body["records_left_out"] == 0
    assert {"kind": "text", "side": "both", "pieces": 2, "bytes": 27} in body["removed"]
    kept = marks_in(out)
    assert [mark.fields for mark in kept] == [{"text": "x" * len(text)} for text in TEXTS]
    assert [mark.at_ns for mark in kept] == [mark.at_ns for mark in marks_in(log)]
    assert replay(read(out)).identical
    assert b"odd answer" not in b"".join(str(record.fields).encode() for record in read(out))


def test_compact_keeps_them_and_others_leave_them_out(log: Path, tmp_path: Path) -> None:
    """Words about one session would stand in another, or be lost where nothing is to be lost."""
    small = tmp_path / "small.session.zst"
    compact(log, small)
    assert marks_in(small) == marks_in(log)
    forked, _ = fork(log, Change(at=12), ScriptedBackend(quick))
    shrunk = tmp_path / "shrunk.session.zst"
    build(log, shrunk, lambda _, event: event, {})
    for made in (forked, shrunk):
        assert marks_in(made) == []
        assert replay(read(made)).identical
        assert verify(made).exit_code == 0


def test_what_people_said_of_a_session_goes_with_its_words(tmp_path: Path) -> None:
    """What somebody wrote about a session would stay in it, or the place that they meant go too."""
    log = write_events(tmp_path, play([init_frame()]))
    records = list(read(log))
    fields = {"text": "call Änna back", "by": "bert", "topic": "anna"}
    lost = {"by": "recover", "what": "lost"}
    marks = [
        Record(kind="mark", seq=len(records) - 1, at_ns=9, fields=fields),
        Record(kind="mark", seq=len(records), at_ns=9, fields=lost),
    ]
    for policy, kept in {
        Policy(): {"text": "x" * 13 + "\u00e9"},
        Policy(side="user"): {"text": "x" * 13 + "\u00e9"},
        Policy(kinds=frozenset({"name"})): {"text": "call Änna back"},
        Policy(kinds=frozenset({"audio"})): {"text": "call Änna back", "by": "bert"},
        Policy(from_ns=10): {"text": "call Änna back"},
    }.items():
        run = Redaction(policy)
        made = list(run.records([*records[:-1], *marks, records[-1]]))
        found = [record for record in made if record.kind == "mark"]
        assert [(record.at_ns, record.fields) for record in found] == [(9, kept)]
        assert [record.seq for record in made] == [*range(1, len(made) + 1)]
        assert run.left_out == 1


def test_marks_next_to_the_log_are_shown(log: Path, tmp_path: Path) -> None:
    """What was found in a recording later would be seen on the server's page only."""
    add_mark(marks_path(log), at_ms=1500, end_ms=1500, text=TEXTS[1], by="bert", now_ms=0)
    with marks_path(log).open("a") as file:
        file.write("{cut off")
    body = json.loads(CliRunner().invoke(inspect_command, [str(log), "--json"]).stdout)
    assert body["marks"][0] == {
        **{"at_ns": 1_500_000_000, "text": TEXTS[1], "by": "bert"},
        "is_later": True,
    }
    assert [it["is_later"] for it in body["marks"]] == [True, False, False]
    text = CliRunner().invoke(inspect_command, [str(log)]).stdout
    assert "mark      1.500 s '-->\\n\\x1b[31m<script>' (next to the log)" in text
    assert "marks     lines next to the log that cannot be read: 1" in text
    page = tmp_path / "page.html"
    assert CliRunner().invoke(view_command, [str(log), "-o", str(page)]).exit_code == 0
    assert '"text":"--\\u003e\\n\\u001b[31m\\u003cscript\\u003e","by":"bert"' in page.read_text()
    assert "connect-src" not in page.read_text().partition("<body>")[0]


def test_a_mark_after_the_session_is_noticed(log: Path) -> None:
    """A misplaced decimal point puts a mark where it is never found."""
    late = [str(log), "--add", "too late", "--at", "9000"]
    told = CliRunner().invoke(marks_command, late)
    assert (told.exit_code, told.stderr.count("\n")) == (0, 1)
    assert "over by --at 9000: --remove 1 undoes it" in told.stderr


def test_marks_are_kept_by_a_command(log: Path) -> None:
    """A remark could only be written while a server runs."""
    added = call(marks_command, log, "--add", "too late", "--at", "1.5", "--to", "2")
    assert added == "  1  1.500 s  too late\n"
    assert "1.500 s 'too late' (next to the log)" in call(inspect_command, log)
    (mark,) = json.loads(call(marks_command, log, "--json"))["marks"]
    assert (mark["at_ms"], mark["end_ms"], mark["by"]) == (1500, 2000, "")
    assert marks_path(log).stat().st_mode == log.stat().st_mode
    assert call(marks_command, log, "--remove", "1") == "no marks\n"
    for wrong in (("--remove", "1"), ("--add", "x"), ("--add", "x", "--at", "2", "--to", "1")):
        assert CliRunner().invoke(marks_command, [str(log), *wrong]).exit_code == 2
