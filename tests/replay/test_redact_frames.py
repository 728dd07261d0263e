"""Frames and files without what they hold: as long as before, and taken by a session as before."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protocol.values.errors import FieldError, FrameError
from protocol.values.limits import CHAT_FRAME_BYTES_MAX, Mode
from protocol.values.requests import Request
from protocol.wire.audio import looks_float32, looks_int16
from protocol.wire.codec import IMAGE_URL_HEADS, Context, parse_frame
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.dialects.shared import OPENAI_SESSIONS, is_openai_update
from protocol.wire.media import (
    SOUND_HEADS,
    ImageKind,
    SoundKind,
    check_image,
    container_of,
    image_kind,
    read_wav,
    sound_kind,
)
from protocol.wire.schema import describe
from replay.redact import frames as client_frames
from replay.redact.content import (
    KINDS,
    Policy,
    Pseudonyms,
    Tally,
    fill,
    fill_json,
    header_only,
    hide_picture,
    hide_video,
    is_whole,
    mute,
    mute16,
    mute_file,
    numbers,
)
from replay.redact.frames import HOLDS, WORDS, FrameEditor, replaced, spans, unescaped
from runtime.media.image import decode_image
from tests.media import webps
from tests.project.sampling import sample
from tests.sessions.in_memory import base64
from tests.strategies.messages import (
    client_messages,
    jpeg_header,
    mp4_head,
    mutated_bodies,
    mutated_texts,
    png_header,
    wav,
)

WAYS: Final = [(name, mode) for name, modes in MODES_OF.items() for mode in modes]
TEXTS: Final = st.text(st.characters(exclude_categories=()), max_size=30)
SOUND_TEXTS: Final = st.text(max_size=30)
ODD_FRAMES: Final = (
    '{"a":"b","a":"c"}',
    '{"type":"input.append","input":{"audio":"unended',
    '{"deep":' + "[" * 40 + "7" + "]" * 40 + "}",
    "[" * 3000,
    '{"n":-12.50e+10,"w":NaN,"t":true,"z":null}',
    '{"\\u0074ype":"session.close","reason":"\\ud83d\\ude00\\n\\"\\\\"}',
    '{"input":{"audio":7,"video_frames":{"x":"y"}},"messages":[[["z"]]]}',
    '"' + "\\" * 99,
    "{,}",
    '{"type":"audio_chunk","audio":"\\"\\"\\"\\"","frame":"\\u0078\\u0078xx\u00e9"}',
    "\u00a0\u4f60\u597d\U0001f600",
)


def edited(frame: str) -> str:
    """Take everything out of a frame."""
    made = FrameEditor(policy=Policy(), tally=Tally()).edit(frame, 0)
    assert isinstance(made, str)
    return made


def verdict(dialect: str, mode: Mode, frame: str) -> object:
    """Say what a dialect thinks of a frame, as far as it does not depend on what it holds."""
    try:
        body = parse_frame(frame, CHAT_FRAME_BYTES_MAX)
    except FrameError as error:
        return error.close_code
    spoken = DIALECTS[dialect]
    request = spoken.classify(body)
    try:
        message = spoken.parse(request, body, Context(mode=mode))
    except FieldError as error:
        return request, error.code
    return request, type(message)


@pytest.mark.parametrize(("dialect", "mode"), WAYS)
@settings(max_examples=sample(15, 5), deadline=None)
@given(data=st.data())
def test_a_frame_is_taken_as_before(dialect: str, mode: Mode, data: st.DataObject) -> None:
    """A redacted session would go another way than the one that was recorded."""
    own = client_messages(dialect, mode).map(DIALECTS[dialect].encode_request)
    frame = data.draw(st.one_of(own, mutated_texts(own), mutated_bodies(own).map(json.dumps)))
    made = edited(frame)
    assert verdict(dialect, mode, made) == verdict(dialect, mode, frame)
    assert len(made) == len(frame)
    assert len(made.encode("utf-8", "surrogatepass")) == len(frame.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("frame", ODD_FRAMES)
def test_what_is_no_message_stays_none(frame: str) -> None:
    """A frame that ended a session would be answered, or stop the redaction."""
    made = edited(frame)
    assert verdict("realtime", "video", made) == verdict("realtime", "video", frame)
    assert len(made) == len(frame)


def test_all_that_clients_may_say_is_in_the_table() -> None:
    """A field that a dialect gets would be taken for a client's own, and its settings be lost."""
    messages = [one for name in MODES_OF for one in describe(name) if one.sender == "client"]
    keys = {key for message in messages for key in _keys(message.schema)}
    assert keys | {"model"} == HOLDS.keys()
    kinds = {message.kind for message in messages}
    words = {word for one in messages for word in _words(one.schema)}
    assert (words | kinds) - {""} <= WORDS
    assert {holds.kind for holds in HOLDS.values() if holds} | {"image"} == set(KINDS)


def _below(schema: Any) -> Iterator[Any]:
    yield from schema.get("properties", {}).values()
    yield from (*schema.get("oneOf", ()), *schema.get("anyOf", ()))
    if "items" in schema:
        yield schema["items"]


def _keys(schema: Any) -> Iterator[str]:
    yield from schema.get("properties", {})
    for below in _below(schema):
        yield from _keys(below)


def _words(schema: Any) -> Iterator[str]:
    said = [schema.get("const"), *schema.get("enum", ())]
    yield from (word for word in said if isinstance(word, str))
    for below in _below(schema):
        yield from _words(below)


NUMBERED: Final = sorted(
    name
    for name, kinds in client_frames._KINDS.items()
    if any("minimum" in it.schema for it in kinds)
)


@pytest.mark.parametrize("name", ["input", "type", "audio", "metadata", "x", *NUMBERED])
@given(number=st.integers(10**4, 10**15) | st.floats(0, 20).map(lambda it: round(it, 10)))
@example(number=4155551240)
def test_a_number_that_its_field_does_not_take_goes(name: str, number: float) -> None:
    """A telephone number stays in what is given away, since it came as a number."""
    frame = json.dumps({"type": "input.append", name: number})
    written = json.dumps(number)
    if any(client_frames._fits(it.schema, number) for it in client_frames._KINDS.get(name, ())):
        if name != "played_ms":
            assert edited(frame) == frame
    elif len(written) > 3:
        assert edited(frame).endswith(tuple(f": {it}}}" for it in numbers(written)[:-1]))
    assert len(edited(frame)) == len(frame)


def test_a_time_that_has_not_come_is_none() -> None:
    """What a client has played could be any number of 15 digits."""
    made = [
        FrameEditor(policy=Policy(), tally=Tally()).edit(
            f'{{"type": "playback.ack", "played_ms": {number}}}', at_ns=5_000_000_000
        )
        for number in (4_900, 5_100, 4_155_551_240)
    ]
    assert [json.loads(str(it))["played_ms"] for it in made] == [4_900, 1_000, 1_000_000_000]


def test_a_name_that_is_no_voice_s_stays_none() -> None:
    """An init that was refused for a path would be accepted without it."""
    frame = '{"type": "prepare", "ref_audio_path": "../../etc/passwd"}'
    assert verdict("legacy-duplex", "video", edited(frame)) == verdict(
        "legacy-duplex", "video", frame
    )
    assert "passwd" not in edited(frame)


@pytest.mark.parametrize("line_break", ["\\n", "\\r\\n", "\\u000a"])
def test_sound_with_line_breaks_keeps_them_and_is_silent(line_break: str) -> None:
    """Sound that a transcription took would be refused, and the session go another way."""
    text = "/9j/" * 60 + "/w=="
    audio = line_break.join(text[at : at + 76] for at in range(0, len(text), 76)) + line_break
    frame = f'{{"type":"input_audio_buffer.append","audio":"{audio}"}}'
    editor = FrameEditor(policy=Policy(), tally=Tally(), is_pcm16=True, has_line_breaks=True)
    made = editor.edit(frame, 0)
    assert isinstance(made, str)
    assert len(made) == len(frame)
    silence = re.sub("[^=\n\r]", "A", json.loads(f'"{audio}"'))
    assert json.loads(made)["audio"] == silence
    editor.has_line_breaks = False  # in a session that refuses them
    assert verdict("transcription", "transcription", editor.edit(frame, 0)) == (
        Request.APPEND,
        "invalid_audio",
    )


@pytest.mark.parametrize("kind", OPENAI_SESSIONS)
def test_an_update_of_openai_stays_one(kind: str) -> None:
    """A session that was ended for it would be set up."""
    session = {"type": kind, "instructions": "secret", "audio": {"x": "y"}}
    made = edited(json.dumps({"type": "session.update", "session": session}))
    assert "secret" not in made
    assert is_openai_update(parse_frame(made))


# -- words ----------------------------------------------------------------------------------------


@given(TEXTS)
@example("\u00e9a\u4f60\U0001f600b")
def test_words_keep_their_lengths_and_nothing_else(text: str) -> None:
    """A text of another length would be cut, refused or paid for otherwise."""
    made = fill(text)
    assert len(made) == len(text)
    assert len(made.encode("utf-8", "surrogatepass")) == len(text.encode("utf-8", "surrogatepass"))
    assert made == fill("".join(reversed(text)))  # where what was is not seen


@given(TEXTS, st.booleans())
def test_json_means_as_much_as_before(text: str, is_ascii: bool) -> None:
    """What a session reads would be longer or shorter than what was sent."""
    raw = json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    made = fill_json(raw)
    assert len(made) == len(raw)
    if not any("\ud800" <= char <= "\udfff" for char in text):
        meant = json.loads(f'"{made}"')
        assert len(meant) == len(text)
        assert len(meant.encode()) == len(text.encode())


def test_names_stay_apart() -> None:
    """Nobody could tell any more which answer belongs to which question."""
    names = Pseudonyms()
    made = [names.of(name) for name in ("anna", "bert", "anna", "\u00e9ve")]
    assert made[0] == made[2] == "xxx0"
    assert len(set(made)) == 3
    assert len(made[3].encode()) == len("\u00e9ve".encode())
    assert numbers("-12.50e+10")[0] == "-10.10e+10"


@given(st.text('{}[],:"\\ \nab1.', max_size=40))
def test_all_of_a_text_is_in_a_span_or_says_nothing(text: str) -> None:
    """A word would be overlooked in a frame that is broken in some way."""
    found = list(spans(text))
    rest = replaced(text, [(span, "") for span in found])
    assert set(rest) <= set('{}[],:" \n')
    assert replaced(text, [(span, text[span.start : span.end]) for span in found]) == text
    for one, other in pairwise(found):
        assert one.end <= other.start


@given(st.recursive(st.integers() | SOUND_TEXTS, lambda below: st.dictionaries(SOUND_TEXTS, below)))
def test_paths_are_those_of_a_parser(value: Any) -> None:
    """Sound would be looked for in the wrong field."""
    text = json.dumps(value)
    for span in spans(text):
        if span.kind == "text":
            found = value
            for place in span.path:
                found = found[place]
            assert unescaped(text[span.start : span.end]) == found


# -- files ----------------------------------------------------------------------------------------


def png(width: int, height: int) -> bytes:
    """Make a PNG of noise, grey."""
    rng = np.random.default_rng(width)
    rows = rng.integers(0, 255, (height, width), dtype=np.uint8)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    head = bytearray(png_header(width, height)[:33])
    head[24:26] = b"\x08\x00"
    head[29:33] = zlib.crc32(head[12:29]).to_bytes(4)
    ends = [(b"IDAT", body), (b"IEND", b"")]
    return bytes(head) + b"".join(
        len(data).to_bytes(4) + name + data + zlib.crc32(name + data).to_bytes(4)
        for name, data in ends
    )


def jpeg(width: int, height: int, quality: int = 80) -> bytes:
    """Make a JPEG of noise."""
    rng = np.random.default_rng(height)
    pixels = rng.integers(0, 255, (height, width, 3), dtype=np.uint8)
    return bytes(simplejpeg.encode_jpeg(pixels, quality=quality))


@pytest.mark.parametrize(
    "data",
    [
        *(jpeg(64, 48), jpeg(1, 1), jpeg(7, 300, 5), jpeg(640, 480), png(64, 48), png(200, 9)),
        *webps.KINDS.values(),
        webps.encode(webps.slope(1, 1), lossless=True),
        webps.encode(webps.slope(640, 480), lossless=False),
    ],
)
def test_a_picture_keeps_its_length_and_size(data: bytes) -> None:
    """A frame would be refused that was taken, or a page would show a broken picture."""
    made = hide_picture(data)
    assert len(made) == len(data)
    assert check_image("", made) == check_image("", data)
    assert is_whole(made)
    decode_image(made)


@pytest.mark.parametrize("kind", IMAGE_URL_HEADS)
def test_a_picture_in_a_data_url_is_hidden(kind: ImageKind) -> None:
    """A person in a picture of `openai` would be seen in a log that is given away."""
    head = IMAGE_URL_HEADS[kind]
    data = {"JPEG": jpeg(64, 48), "PNG": png(64, 48), "WebP": webps.LOSSY}[kind]
    part = {"type": "input_image", "image_url": head + base64(data)}
    item = {"type": "message", "role": "user", "content": [part]}
    made = edited(json.dumps({"type": "conversation.item.create", "item": item}))
    (told,) = json.loads(made)["item"]["content"]
    hidden = b64decode(told["image_url"].removeprefix(head))
    assert image_kind(hidden) == kind
    assert hidden == hide_picture(data) != data
    elsewhere = json.dumps({"item": {"content": [{"image_url": "https://example.org/me.jpeg"}]}})
    assert "me.jpeg" not in edited(elsewhere)


def test_a_webp_becomes_grey() -> None:
    """What stands for a removed picture would be one that somebody reads something into."""
    made = hide_picture(webps.CLEAR)
    seen = np.asarray(simplejpeg.decode_jpeg(decode_image(made)))
    assert (seen.min(), seen.max()) == (128, 128)


@pytest.mark.parametrize(
    "data",
    [
        *(jpeg_header(64, 48), png_header(64, 48), jpeg(64, 48)[:400], jpeg(40, 40)[:100]),
        *(b"", b"GIF8", header_only(webps.LOSSY), header_only(webps.LOSSY)[:25], webps.ANIMATED),
    ],
)
def test_a_picture_without_room_keeps_its_header(data: bytes) -> None:
    """A damaged frame of a session would stop the redaction, or keep half of what it shows."""

    def size(picture: bytes) -> object:
        try:
            return check_image("", picture)
        except FieldError as error:
            return error.code

    for made in (hide_picture(data), header_only(data)):
        assert (len(made), size(made)) == (len(data), size(data))
        assert made[60:] != data[60:] or not any(data[60:])


def test_sound_is_silent() -> None:
    """A voice would be left, or an append that was refused be taken."""
    tone = np.sin(np.arange(800, dtype="<f4")).astype("<f4")
    assert mute(tone.tobytes() + b"\1\2") == bytes(3202)
    tone[[7, 9]] = np.nan, np.inf
    assert np.isnan(np.frombuffer(mute(tone.tobytes()), "<f4")).nonzero()[0].tolist() == [7]
    for data in (wav(8000), wav(8000, 8), wav(800)[:300], b"RIFF"):
        made = mute_file(data)
        assert len(made) == len(data)
        assert header_of(made) == header_of(data)
        assert len(set(made[-200:])) <= 1 or len(data) < 200


def test_sound_of_the_other_format_stays_refused() -> None:
    """A redacted session would hear an append that the client's was refused."""
    tone = 0.5 * np.sin(np.arange(1600))
    as_int16, as_float32 = (tone * 32_767).astype("<i2").tobytes(), tone.astype("<f4").tobytes()
    for made in (mute(as_int16), mute(mute(as_int16))):
        assert looks_int16(np.frombuffer(made, "<f4"))
        assert len({made[i : i + 4] for i in range(0, len(made), 4)}) <= 2
    assert looks_float32(mute16(as_float32))
    assert len(mute16(as_float32 + b"\1")) == len(as_float32) + 1
    assert mute16(as_int16) == bytes(len(as_int16))


@pytest.mark.parametrize("kind", SOUND_HEADS)
def test_a_sound_file_keeps_its_head(kind: SoundKind) -> None:
    """A voice would be left, or be taken for samples."""
    made = mute_file(SOUND_HEADS[kind] + bytes(range(200)))
    assert sound_kind(made) == kind
    assert made == SOUND_HEADS[kind] + bytes(200)


def test_sound_in_a_data_url_is_silent() -> None:
    """A voice in a data URL would be left, or its media type, which may be any words."""
    tone = np.sin(np.arange(8_000, dtype="<f4")).astype("<f4").tobytes()
    head = "data:audio/my-own-words;base64,"
    voice = {"ref_audio_base64": head + base64(tone)}
    frame = json.dumps({"type": "session.init", "payload": {"voice": voice}})
    made = edited(frame)
    assert len(made) == len(frame)
    said = json.loads(made)["payload"]["voice"]["ref_audio_base64"]
    assert said == f"data:{'x' * 18};base64," + base64(bytes(len(tone)))
    assert verdict("realtime", "audio", made) == verdict("realtime", "audio", frame)


def header_of(data: bytes) -> object:
    """Say what a WAV says of itself."""
    try:
        return read_wav("", data)
    except FieldError as error:
        return error.code


def test_a_video_is_an_empty_one() -> None:
    """A turn with a video would be refused, or its film be left."""
    for data in (mp4_head(500), b"\x1a\x45\xdf\xa3" + b"xxwebm" + b"film" * 99, b"nothing" * 9):
        made = hide_video(data)
        assert len(made) == len(data)
        assert (container_of(made) is None) is (container_of(data) is None)
        assert b"film" not in made
    assert client_frames.HOLDS["data"] is client_frames.TEXT
