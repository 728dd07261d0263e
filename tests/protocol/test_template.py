"""A template reads a frame as parsing does, or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from protocol.machine.reception import LITERAL_CHARS_MAX, Template
from protocol.values.errors import FieldError, FrameError
from protocol.values.limits import Mode
from protocol.values.requests import Append, AppendSound, Request
from protocol.wire.codec import Context, parse_frame
from protocol.wire.dialects import DUPLEX_V1, LEGACY_DUPLEX, LIVE, OPENAI, REALTIME, TRANSCRIPTION
from protocol.wire.table import Dialect
from tests.sessions.in_memory import base64
from tests.strategies.messages import jpeg_header

PICTURE = jpeg_header(80, 80) + bytes(20)
REAL = base64(bytes(range(8)))
DIALECTS = (REALTIME, DUPLEX_V1, LEGACY_DUPLEX, LIVE, OPENAI, TRANSCRIPTION)
PICTURES = {REALTIME: "video_frames", DUPLEX_V1: "video_frames", LEGACY_DUPLEX: "frame_base64_list"}
SOUNDS = st.binary(min_size=1, max_size=40).map(lambda data: (data * 4)[: len(data) // 4 * 4 or 4])
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=4,
)
PUT = st.text(max_size=8) | st.sampled_from(
    [
        '"',
        "\\",
        "\n",
        "\t",
        "A",
        "AAAA",
        "AAAAAA==",
        "=",
        "\\n",
        "\\q",
        'AAAA","x":"',
        "a" * 300,
        REAL,
    ]
)
"""Put in place of a part of a frame, most of them for a string."""
NAMES = st.text(max_size=8) | st.sampled_from(["", "a:b", 'a"b', "a\\b", "é", "~0~", "x,y[{"])


def table_of(dialect: Dialect) -> Any:
    table = dialect.table(Request.APPEND, Append) or dialect.table(Request.APPEND, AppendSound)
    assert table is not None
    return table


def parsed(dialect: Dialect, frame: str, context: Context) -> Any:
    """Read a frame in the usual way; None where it is refused, or of another kind."""
    try:
        body = parse_frame(frame)
        if dialect.classify(body) is not Request.APPEND:
            return None
        return dialect.parse(Request.APPEND, body, context), body.get("event_id")
    except (FieldError, FrameError):
        return None


def template_of(dialect: Dialect, frame: str, context: Context) -> Template | None:
    read = parsed(dialect, frame, context)
    if read is None:
        return None
    return Template.of(frame, parse_frame(frame), read[0], table_of(dialect), context)


def body_of(
    dialect: Dialect, sound: bytes, pictures: Sequence[bytes] = (), **more: object
) -> dict[str, object]:
    """An append; `more` goes where the dialect has its fields."""
    samples = 4000 if dialect is DUPLEX_V1 else 1
    pcm = sound if table_of(dialect).cls is AppendSound else bytes(4 * samples) + sound
    fields: dict[str, object] = {"audio": base64(pcm), **more}
    if pictures:
        fields[PICTURES[dialect]] = [base64(picture) for picture in pictures]
    kind = {"type": table_of(dialect).tag["type"]}
    return {**kind, "input": fields} if dialect is REALTIME else {**kind, **fields}


@st.composite
def frames(draw: st.DrawFn, dialect: Dialect) -> str:
    """An append in any layout, with fields of its own or none."""
    pictures = draw(
        st.sampled_from(
            [(), (), (jpeg_header(80, 80),), (jpeg_header(90, 80), jpeg_header(80, 90))]
        )
    )
    body = body_of(dialect, draw(SOUNDS), pictures if dialect in PICTURES else ())
    if draw(st.booleans()):
        body["event_id"] = draw(NAMES | ANY | st.lists(NAMES, max_size=2))
    if dialect is REALTIME and draw(st.booleans()):
        body["input_id"] = draw(NAMES)
    for name in draw(st.lists(st.sampled_from(["force_listen", "x", "audio_base64"]), max_size=2)):
        body[name] = draw(ANY)
    keys = draw(st.permutations(list(body)))
    indent = draw(st.sampled_from([None, None, None, 1]))
    ascii_only = draw(st.booleans())
    return json.dumps({key: body[key] for key in keys}, indent=indent, ensure_ascii=ascii_only)


def contexts() -> st.SearchStrategy[Context]:
    modes: tuple[Mode, ...] = ("audio", "video")
    return st.builds(Context, mode=st.sampled_from(modes))


@given(st.data(), st.sampled_from(DIALECTS), contexts())
def test_what_it_reads_is_what_parsing_reads(
    data: st.DataObject, dialect: Dialect, context: Context
) -> None:
    first = data.draw(frames(dialect))
    template = template_of(dialect, first, context)
    assume(template is not None)
    assert template is not None
    again = template.read(first)
    if again is not None:
        assert (again.message, again.event_id) == parsed(dialect, first, context)
    places = st.integers(0, len(first))
    strings = [found.span(1) for found in re.finditer(r'"([^"]*)"', first)]
    at, to = data.draw(st.sampled_from(strings) | st.tuples(places, places).map(sorted))
    put = data.draw(PUT)
    for other in (first[:at] + put + first[to:], data.draw(frames(dialect))):
        read = template.read(other)
        if read is not None:
            assert (read.message, read.event_id) == parsed(dialect, other, context)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_reads_other_sound_pictures_and_names(dialect: Dialect) -> None:
    context = Context(mode="video")
    pictures = (jpeg_header(80, 80), PICTURE) if dialect in PICTURES else ()
    names = {} if dialect in {DUPLEX_V1, LEGACY_DUPLEX, REALTIME, TRANSCRIPTION} else {"event_id"}
    made = [
        json.dumps(
            body_of(dialect, bytes([n] * 8), [it + bytes([n]) for it in pictures])
            | {name: f"{name} {n}" for name in names}
            | ({"input_id": f"mine {n}"} if dialect is REALTIME else {})
        )
        for n in (8, 9)
    ]
    template = template_of(dialect, made[0], context)
    assert template is not None
    read = template.read(made[1])
    assert read is not None
    assert (read.message, read.event_id) == parsed(dialect, made[1], context)


WRONG = (
    # The sound is written with escapes, and its text stands elsewhere as it is.
    {"x": f'"{REAL}', "type": "input.append", "input": {"audio": "?"}},
    # Two strings are the same.
    {"type": "input.append", "input": {"audio": REAL}, "input_id": REAL},
    # More than the media is long.
    {"type": "input.append", "input": {"audio": REAL}, "a": "x" * LITERAL_CHARS_MAX},
    # What a variable is tried with stands elsewhere.
    {"type": "input.append", "input": {"audio": REAL}, "a": "~0~"},
)


@pytest.mark.parametrize("body", WRONG)
def test_a_frame_that_may_mislead_has_no_template(body: dict[str, object]) -> None:
    frame = json.dumps(body).replace('"?"', f'"\\u{ord(REAL[0]):04x}{REAL[1:]}"')
    assert parsed(REALTIME, frame, Context(mode="video")) is not None
    assert template_of(REALTIME, frame, Context(mode="video")) is None


@pytest.mark.parametrize(
    "sound",
    ["", "A", "AAAA\nAAAA", "AAAA\r\nAAAA", "AAAA\\nAAAA", 'AAAAAAAA","audio":"AAAA', "AAé="],
)
def test_strings_that_json_or_base64_would_not_have_are_parsed(sound: str) -> None:
    context = Context(mode="audio")
    frame = json.dumps(body_of(TRANSCRIPTION, bytes(8)))
    template = template_of(TRANSCRIPTION, frame, context)
    assert template is not None
    assert template.read(frame.replace(base64(bytes(8)), sound)) is None


@pytest.mark.parametrize("words", ["\\q", "\t", "\x00", "\\u0041", "é", "a" * 300, "\ud800"])
@pytest.mark.parametrize(
    ("dialect", "mode", "name"),
    [(REALTIME, "video", "input_id"), (OPENAI, "audio", "event_id"), (REALTIME, "audio", "frames")],
)
def test_strings_that_are_not_read_as_they_are_are_parsed(
    dialect: Dialect, mode: Mode, name: str, words: str
) -> None:
    context = Context(mode=mode)
    more: dict[str, Any] = {"video_frames": ["mine"]} if name == "frames" else {}
    body = body_of(dialect, bytes(8), **more) | ({} if more else {name: "mine"})
    template = template_of(dialect, json.dumps(body), context)
    assert template is not None
    assert template.read(json.dumps(body).replace("mine", words)) is None
