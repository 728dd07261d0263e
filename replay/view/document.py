"""A recorded session as one HTML file (`antiphon recordings view`), and its other views.

    for chunk in page_of(reader.head.fields, reader): file.write(chunk)

The page is the plain files of `page/`, and the session's data, in one HTML:

- The file makes no requests. Its policy (`PAGE_CSP`, in the file as well) allows its own script and
  style by their hashes, and sound and pictures that it makes itself; nothing else. The page that a
  server sends (`later`) may ask that server, and make no markup of text (`ACTING_CSP`).
- Data from a log stands only in data blocks, as JSON in ASCII without `<`, `>` and `&`: no text can
  end a block, and lone surrogates are escapes. The page's script shows it as text.
- Chunks come while the log is read; the caller may stop writing at any time.
- The scripts are ES modules for a browser or Node, joined into one without their import lines.

The other views that a server gives are made in the same way, block by block: a redacted copy of a
log or of its page (the log is read twice, as by `antiphon recordings redact`), a digest of words
and measures, and the verdict of logic replay.
"""

from __future__ import annotations

import json
import re
import sys
import time
import webbrowser
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Final, cast

import attrs
import click

from protocol.values.limits import NS_PER_MS
from recorder.format.format import SUFFIX, Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from recorder.storage.marks import marks_path, read_marks

from ..diff import compare, read_and_compare
from ..eval.evaluate import own_values
from ..eval.scores import gather, score
from ..export.formats import opened
from ..export.timeline import Moment, Words
from ..library.text import replay_lines
from ..redact.content import KINDS, Kind, Policy
from ..redact.redaction import Redaction, rehearse
from ..rerun.logic import Replayer, head_record, pieces_of
from ..rerun.report import Outcome, logic_result, to_json
from ..shared.commands import (
    escaped,
    head_of,
    opened_log,
    policy_of,
    progress,
    records_of,
    refuse_log_as_output,
    style_with,
    unwritable,
)
from ..shared.recordings import RecordingType, page_next_to, show_bytes
from .story import Comparison, Json, Narrator, Open, Part, compared_with, comparison_of

SCRIPTS: Final = (
    *("data.js", "format.js", "scale.js", "waveform.js", "paint.js", "talk.js"),
    *("happenings.js", "voices.js", "units.js", "lanes.js", "timeline.js", "stretch.js"),
    *("player.js", "transcript.js", "sums.js", "address.js", "marks.js", "list.js"),
    *("detail.js", "header.js", "main.js"),
)
"""In the order of their imports."""
_IMPORT: Final = re.compile(r'^import \{[^}]*\} from "\./[a-z]+\.js";\n', re.MULTILINE)
_EXPORT: Final = re.compile(r"^export (?=const |let |class |function |async )", re.MULTILINE)
_UNSAFE: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})
NAME_CHARS_MAX: Final = 64
"""Of the page's title: as long as a recording id may be."""
_PARTS: Final = "<!-- parts -->"
"""The place of the data in the page's template."""


def page_of(
    head: Fields,
    items: Iterable[Record | Damage],
    *,
    replayed: bool = False,
    comparison: Comparison | None = None,
    pair: tuple[Open, Open, str] | None = None,
    later: Mapping[str, Json] | None = None,
) -> Iterator[bytes]:
    """Write a session as a page, while its log is read from its start; yield parts in UTF-8.

    `head` holds the fields of the log's `session` record, `items` its records in order and its
    damage. If `replayed`, findings of logic replay are shown even if there are none. `pair` has
    what opens this log and another one, to show where that differs, and its name. `later` has the
    marks next to the log: `marks`, `damaged`, and for a server's page `writes`. `OSError`: the log
    cannot be read any further.
    """
    comparison = compared_with(*pair) if pair is not None else comparison
    policy = ACTING_CSP if later and "writes" in later else PAGE_CSP
    name = str(head.get("recording_id"))[:NAME_CHARS_MAX]
    body = _asset("index.html").replace("{{script}}", _script()).replace("{{name}}", escaped(name))
    before, after = (head_of(name, policy, _style()) + body).split(_PARTS)
    yield before.encode()
    if later is not None:
        yield _block(Part("later", later))
    with Narrator(head) as narrator:
        for item in items:
            yield from map(_block, narrator.narrate(item))
        yield from map(_block, narrator.conclude(replayed=replayed, comparison=comparison))
    yield after.encode()


def _block(part: Part) -> bytes:
    text = json.dumps(part.value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)
    return f'<script type="application/json" data-part="{part.name}">{text}</script>\n'.encode()


@cache
def _asset(name: str) -> str:
    return (files(__package__) / "page" / name).read_text("utf-8")


def _style() -> str:
    return style_with(_asset("style.css"))


@cache
def _script() -> str:
    return "".join(_EXPORT.sub("", _IMPORT.sub("", _asset(name))) for name in SCRIPTS)


PAGE_CSP: Final = policy_of(_style(), _script())
"""The `Content-Security-Policy` of the page, for a server that sends it over HTTP."""
ACTING_CSP: Final = (
    f"{PAGE_CSP}; connect-src 'self'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""The policy of a server's page, with the marks next to the log."""


# -- redacted copies -------------------------------------------------------------------------------


def redacted_log(
    head: Fields, items: Iterable[Record | Damage], *, open_: Open, kinds: Collection[str] | None
) -> Iterator[bytes]:
    """Write a log without these kinds of content (`KINDS`, None: all) of both sides.

    `RedactError`: the log is damaged, or the session takes another course.
    """
    yield from pieces_of(_redacted(open_, kinds, head, items)[1])


def redacted_page(
    head: Fields, items: Iterable[Record | Damage], *, open_: Open, kinds: Collection[str] | None
) -> Iterator[bytes]:
    """Write the page of such a log."""
    yield from page_of(*_redacted(open_, kinds, head, items))


def _redacted(
    open_: Open, kinds: Collection[str] | None, head: Fields, items: Iterable[Record | Damage]
) -> tuple[Fields, Iterator[Record]]:
    """Return the fields of the redacted head, and the records of the redacted log."""
    chosen = KINDS if kinds is None else cast("Collection[Kind]", kinds)
    policy = Policy(kinds=frozenset(chosen))
    with LogReader(open_()) as reader:
        first = head_record(rehearse(head, reader, policy).head)
    return first.fields, chain([first], Redaction(policy).records(items))


# -- a digest --------------------------------------------------------------------------------------


PASSAGE_MS: Final = 2_000
"""Words of a turn go on in one passage after a shorter silence."""
CHARS_MAX: Final = 200_000
"""Of all words: an hour of speech has a third of them."""


def digest_of(
    head: Fields, items: Iterable[Record | Damage], *, pair: tuple[Open, Open, str] | None = None
) -> Iterator[bytes]:
    """Read a session, given the fields of its `session` record; yield one JSON object, at its end.

    `said` holds passages of one turn, `{voice, at_ms, text}` in order; `measures` the recording's
    own values by name, in the units of their table. With `pair`, the object is where two logs
    first differ, and counts.
    """
    if pair is not None:
        yield json.dumps(_difference(*pair)).encode()
        return
    passages = _Passages()
    measures = own_values(score(gather(head, items, passages.take)))
    yield json.dumps({"said": passages.found, "measures": measures}, allow_nan=False).encode()


def _difference(one: Open, other: Open, _name: str) -> dict[str, Json]:
    """Compare two logs; `first` is null if both are the same."""
    with LogReader(one()) as a, LogReader(other()) as b:
        report = compare(a.head.fields, a, b.head.fields, b)
    first = report.first
    return {
        "first": None
        if first is None
        else {
            "what": first.what,
            "index": first.index,
            "fields": first.fields,
            "here": first.in_a,
            "there": first.in_b,
        },
        "differences": report.parting_count,
        "compared": report.compared,
        "same": report.same,
    }


class _Passages:
    """The words of a session, joined as they come."""

    def __init__(self) -> None:
        self.found: list[dict[str, str | int]] = []
        self._turn = ("", "")
        self._end_ms = 0
        self._chars = 0

    def take(self, words: Moment) -> None:
        if not isinstance(words, Words) or self._chars >= CHARS_MAX:
            return
        text = words.text[: CHARS_MAX - self._chars]
        self._chars += len(text)
        at_ms, turn = words.begin_ns // NS_PER_MS, (words.voice, words.response_id)
        is_piece = bool(words.response_id) or words.is_transcribed
        if is_piece and turn == self._turn and at_ms - self._end_ms < PASSAGE_MS:
            self.found[-1]["text"] = f"{self.found[-1]['text']}{text}"
        else:
            self.found.append({"voice": words.voice, "at_ms": at_ms, "text": text})
        self._turn = turn
        self._end_ms = (words.end_ns or words.begin_ns) // NS_PER_MS


# -- logic replay ----------------------------------------------------------------------------------


ITEMS_A_STEP: Final = 500
"""Records, or damages, between two places at which a caller may stop: some milliseconds."""


def replay_of(head: Fields, items: Iterable[Record | Damage]) -> Iterator[bytes]:
    """Replay a session, given the fields of its `session` record; yield one JSON object.

    White space comes before it, while the log is read.
    """
    began, replayer = time.perf_counter(), Replayer()
    for number, item in enumerate(items, start=1):
        replayer.feed(item)
        if replayer.is_stopped:
            break
        if number % ITEMS_A_STEP == 0:
            yield b"\n"
    report, elapsed_s = replayer.report(), time.perf_counter() - began
    name = str(head.get("recording_id"))
    outcome = Outcome(log=name, result=logic_result(report), elapsed_s=elapsed_s, report=report)
    lines = [line for line in replay_lines(report, elapsed_s) if isinstance(line, str)]
    yield json.dumps({**to_json(outcome), "lines": lines}, allow_nan=False).encode()


# -- the command -----------------------------------------------------------------------------------


STDOUT: Final = "-"
_PATH: Final = click.Path(path_type=Path)


@click.command("view")
@click.argument("log", type=RecordingType())
@click.option("--output", "-o", type=_PATH, help="The page, - for stdout [default: next to LOG].")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
@click.option("--replay", "replayed", is_flag=True, help="Include the result of a logic replay.")
@click.option(
    "--diff", "other", metavar="OTHER", type=RecordingType(), help="Mark where OTHER differs."
)
def view_command(
    *, log: Path, output: Path | None, force: bool, opens: bool, replayed: bool, other: Path | None
) -> None:
    """Write the recorded session LOG as one HTML file, to look at and to listen to.

    It shows both voices, video frames, words, states, units, the queue, the KV cache, drops, errors
    and marks on one time line that plays and seeks, and every record beneath. A place
    at which the session no longer replays as recorded is marked. The file needs no network and no
    other file. It holds the session's sound, pictures and words, and has the permissions of LOG.

    \b
    Examples:
      antiphon recordings view sessions/rec-000002.session.zst --open
      antiphon recordings view crash.session.zst --replay -o crash.html
      antiphon recordings view parent.session.zst --diff fork.session.zst
      antiphon recordings view s3://bucket/prefix/rec-000002

    \b
    Exit codes:
      0  written; a log with damage is shown with gaps
      2  a log cannot be read, or the page cannot be written
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    target = output or page_next_to(log)
    is_stdout = str(target) == STDOUT
    if is_stdout and opens:
        raise click.UsageError("--open needs a file to open, not stdout")
    refuse_log_as_output(target, [each for each in (log, other) if each is not None])
    later = attrs.asdict(read_marks(marks_path(log)))
    with opened_log(log) as reader:
        comparison = None
        if other is not None:
            name = other.name.removesuffix(SUFFIX)
            comparison = comparison_of(read_and_compare(log, other), name)
        output_file = sys.stdout.buffer if is_stdout else target
        try:
            with (
                progress(reader.tail_bytes, "view") as watch,
                opened(output_file, log, replaces=force) as file,
            ):
                chunks = page_of(
                    *(reader.head.fields, records_of(log, reader, watch)),
                    replayed=replayed,
                    comparison=comparison,
                    later=later if any(later.values()) else None,
                )
                file.writelines(chunks)
        except OSError as error:
            if is_stdout:
                raise
            raise unwritable(error, target) from error
    if is_stdout:
        return
    click.echo(f"{target}: {show_bytes(target.stat().st_size)}")
    if opens and not webbrowser.open(target.resolve().as_uri()):
        click.echo("there is no browser to open it in", err=True)
