"""Frames, base64, PCM and fields: what is refused, with which words, and that nothing crashes."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Final

import numpy as np
import orjson
import pytest
import soundfile
from hypothesis import example, given
from hypothesis import strategies as st

from protocol.values.errors import FieldError, FrameError
from protocol.values.frames import Utf8Text
from protocol.values.limits import FRAME_BYTES_MAX, JSON_DEPTH_MAX
from protocol.values.requests import Append
from protocol.wire.audio import check_pcm, looks_float32
from protocol.wire.codec import INTEGER, Fields, Value, dump_frame, encode_base64, parse_frame
from protocol.wire.table import DROPPED, IGNORED_PATHS_MAX, Field, Object, Table
from tests.strategies.messages import json_objects, noise


def nested(depth: int) -> str:
    """An object that nests `depth` levels, itself included."""
    return '{"a":' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


BAD_FRAMES = {
    "binary": (b"{}", 1003),
    "too long to read": (None, 1009),
    "too long": ('{"a":"' + "x" * FRAME_BYTES_MAX + '"}', 1009),
    "empty": ("", 1003),
    "not JSON": ("hello", 1003),
    "cut off": ('{"a":1', 1003),
    "two objects": ("{} {}", 1003),
    "byte order mark": ("\ufeff{}", 1003),
    "array": ("[]", 1003),
    "string": ('"a"', 1003),
    "null": ("null", 1003),
    "duplicate keys": ('{"a":1,"a":1}', 1003),
    "duplicate keys below": ('{"a":[{"b":1,"c":2,"b":3}]}', 1003),
    "duplicate keys, one escaped": ('{"a":1,"\\u0061":2}', 1003),
    "duplicate keys, one colon more": ('{"a:":1,"a:":2}', 1003),
    "NaN": ('{"a":NaN}', 1003),
    "Infinity": ('{"a":-Infinity}', 1003),
    "infinite number": ('{"a":1e999}', 1003),
    "5000 digits": ('{"a":' + "9" * 5000 + "}", 1003),
    "lone surrogate, escaped": ('{"a":"\\ud800"}', 1003),
    "lone low surrogate": ('{"a":"\\udc00"}', 1003),
    "lone surrogate in a key": ('{"\\ud800":1}', 1003),
    "lone surrogate, raw": ('{"a":"\ud800"}', 1003),
    "control character": ('{"a":"\n"}', 1003),
    "too deep": (nested(JSON_DEPTH_MAX + 1), 1003),
    "a bomb of arrays": ("[" * 100_000, 1003),
    "a bomb of nested objects": ('{"a":' * 500 + "1" + "}" * 500, 1003),
    "a bomb of arrays without commas": (
        '{"a":[' + ",".join(["[" * 900 + "]" * 900] * 80) + "]}",
        1003,
    ),
    "a bomb of objects without commas": (
        '{"a":[' + ",".join(['{"a":' * 900 + "1" + "}" * 900] * 80) + "]}",
        1003,
    ),
    "a bomb of values": ('{"a":[' + "{}," * 70_000 + "{}]}", 1003),
}
CLOSE_REASON_BYTES_MAX = 123
"""RFC 6455, 5.5: a control frame carries 125 bytes, two of them the code."""


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_frame_beyond_repair_closes_the_connection(name: str) -> None:
    """Else a broken client hangs without an answer, or a hostile one takes the server down."""
    frame, close_code = BAD_FRAMES[name]
    with pytest.raises(FrameError) as caught:
        parse_frame(frame)
    assert caught.value.close_code == close_code
    assert 0 < len(caught.value.reason.encode()) <= CLOSE_REASON_BYTES_MAX


@pytest.mark.parametrize(
    "frame",
    [
        "{}",
        ' { "a" : [ 1 , 2.5 , true , null , { "b" : "" } ] } ',
        '{"a":":::","b":{"a":":"}}',
        '{"a":123456789012345678901234567890}',
        '{"text":"\\ud83c\\udfb6, é, \\u0000"}',
        '{"a":' + "9" * 300 + ', "b:": 0.' + "1" * 9000 + "}",
        nested(JSON_DEPTH_MAX),
    ],
)
def test_a_frame_of_any_style_is_read(frame: str) -> None:
    """Else a client that writes its JSON with spaces, escapes or long numbers is thrown out."""
    assert parse_frame(frame).keys() == json.loads(frame).keys()


@given(json_objects)
def test_what_is_dumped_is_parsed_again(body: dict[str, object]) -> None:
    """Else what one end writes, the other end does not understand."""
    text = dump_frame(body)
    assert parse_frame(text) == json.loads(text)
    assert dump_frame(parse_frame(text)) == text


@given(
    st.text(max_size=40) | st.binary(max_size=40) | st.text('{}[]":,\\u0d8ab1e+-. ', max_size=40)
)
def test_no_frame_crashes_the_parser(frame: str | bytes) -> None:
    """Else one odd frame ends a session with an internal error, or the server with it."""
    with contextlib.suppress(FrameError):
        parse_frame(frame)


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "b:", "\\u0061"]), st.booleans())))
def test_duplicates_are_found_as_the_standard_library_finds_them(
    pairs: list[tuple[str, bool]],
) -> None:
    """Else two readers of one frame may see different values in it."""
    frame = "{" + ",".join(f'"{key}":{json.dumps(value)}' for key, value in pairs) + "}"
    keys = [json.loads(f'"{key}"') for key, _ in pairs]
    if len(set(keys)) == len(keys):
        assert len(parse_frame(frame)) == len(keys)
    else:
        with pytest.raises(FrameError, match="duplicate keys"):
            parse_frame(frame)


# -- base64 and PCM -----------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_base64_round_trip(data: bytes) -> None:
    """Else audio is not what was sent."""
    assert Value(path="$", value=encode_base64(data)).binary() == data


@pytest.mark.parametrize(
    "text", ["A", "AAA", "AA=", "AA==\n", "A A=", "AA==AAAA", "AA-_", "====", "é===", "AAAA\0"]
)
def test_bad_base64_is_refused_without_showing_it(text: str) -> None:
    """Else a client's bug becomes noise in the model's ears."""
    with pytest.raises(FieldError) as caught:
        Value(path="$.audio", value=text).binary()
    assert caught.value.message == f"$.audio: a string of {len(text)} characters that is not base64"


BAD_PCM = {
    "3999 samples": (noise(3999), "3999 samples, at least 4000 are needed"),
    "nothing": (b"", "0 samples, at least 4000 are needed"),
    "11 s": (bytes(4 * 176_000), "176000 samples, at most 160000 are allowed"),
    "odd bytes": (bytes(16_001), "16001 bytes, a multiple of 4 is needed (float32)"),
    "int16 samples": (bytes(16_002), "16002 bytes, a multiple of 4 is needed (float32)"),
}


@pytest.mark.parametrize("name", BAD_PCM)
def test_audio_of_a_wrong_length_is_refused(name: str) -> None:
    """Else a client that sends the wrong format hears nonsense instead of a reason."""
    pcm, text = BAD_PCM[name]
    with pytest.raises(FieldError) as caught:
        Value(path="$.input.audio", value=encode_base64(pcm)).pcm()
    assert caught.value.message == f"$.input.audio: {text}"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sample_that_is_not_finite_is_named(bad: float) -> None:
    """Else one NaN spreads through the KV cache and silences the session for good."""
    samples = np.zeros(4000, dtype="<f4")
    samples[[1234, 3000]] = bad
    with pytest.raises(FieldError, match=r"^\$: sample 1234 is not finite$"):
        check_pcm("$", samples.tobytes(), 4000, 4000)


# -- fields -------------------------------------------------------------------------------------

BAD_VALUES = [
    ("text", 1, "an integer, a string is needed"),
    ("text", True, "a boolean, a string is needed"),
    ("text", [], "an array of 0 items, a string is needed"),
    ("flag", "true", "a string of 4 characters, a boolean is needed"),
    ("flag", 0, "an integer, a boolean is needed"),
    ("integer", True, "a boolean, an integer is needed"),
    ("integer", 1.0, "a number, an integer is needed"),
    ("integer", "1", "a string of 1 characters, an integer is needed"),
    ("integer", -1, "-1, allowed is 0 and more"),
    ("integer", -(2**64), "an integer, allowed is 0 and more"),
    ("binary", {}, "an object, a string is needed"),
    ("pcm", None, "null, a string is needed"),
]


@pytest.mark.parametrize(("read", "value", "text"), BAD_VALUES)
def test_types_are_strict(read: str, value: object, text: str) -> None:
    """Else a mistyped setting is taken for another one in silence."""
    with pytest.raises(FieldError) as caught:
        getattr(Value(path="$.x", value=value), read)()
    assert caught.value.message == f"$.x: {text}"


@pytest.mark.parametrize("value", [True, "1", math.nan, math.inf, -0.5, 1.5, 10**400, 0])
def test_numbers_out_of_range_are_refused(value: object) -> None:
    """Else a temperature of NaN reaches the sampler."""
    with pytest.raises(FieldError):
        Value(path="$.x", value=value).number(0, 1, "above ")


def test_an_integer_is_a_number() -> None:
    """Else `"temperature": 1`, as JavaScript writes 1.0, is refused."""
    value = Value(path="$.x", value=1).number(0, 1)
    assert (value, type(value)) == (1.0, float)


def test_null_counts_as_absent() -> None:
    """Else a JavaScript client that fills unset fields with null is refused."""
    with pytest.raises(FieldError) as caught:
        Fields({"a": None}).required("a", Value.integer)
    assert (caught.value.code, caught.value.message) == (
        "missing_field",
        "$.a: required field is missing",
    )


APPEND: Final = Table(Append, Object("a", Field("b", INTEGER, 0, attr=DROPPED)), lacks={"pcm": b""})
"""A message with an object in it."""


def test_unknown_fields_are_listed_without_a_clients_text() -> None:
    """Else the log of ignored fields can be filled with whatever a client likes."""
    body = {"a": {"b": 1, "c": 2}, "x y": 1, "é" * 99: 1, "z": None}
    assert APPEND.parse(body).ignored == ("$.?", "$.?", "$.z", "$.a.c")


def test_the_list_of_ignored_fields_is_bounded() -> None:
    """Else a frame of a million unknown keys is a million strings in the session."""
    made = APPEND.parse({str(number): number for number in range(1000)})
    assert len(made.ignored) == IGNORED_PATHS_MAX


def test_a_settings_object_names_what_it_does_not_know() -> None:
    """Else a misspelt setting is believed to be in force."""
    fields = Fields({"top_k": 1, "topk": 2}, "$.config")
    fields.required("top_k", Value.integer)
    with pytest.raises(FieldError, match=r"^\$\.config\.topk: unknown field, known are top_k$"):
        fields.refuse_unknown()


def test_frames_are_written_in_the_order_of_their_keys() -> None:
    """Else a replayed session is not byte for byte what was sent."""
    assert dump_frame({"b": 1, "a": [1.5, None]}) == '{"b":1,"a":[1.5,null]}'
    assert orjson.loads(dump_frame({"é": "\u2028"})) == {"é": "\u2028"}


# -- text that came as bytes ----------------------------------------------------------------------


@given(json_objects.map(dump_frame) | st.text('{}[]":,\\u0d8ab1e+-. é', max_size=40))
@example('{"a:":1,"a:":2}')
@example('{"é\\\\":":","b\\"":{"b":1}}')
def test_text_kept_as_bytes_is_read_alike(text: str) -> None:
    """A large question with one emoji in it would be understood in another way, or not at all."""
    assert outcome(Utf8Text(text.encode())) == outcome(text)


@given(
    st.recursive(
        st.sampled_from(['""', '":"', '"\\""', '"\\\\"', '"\\\\\\":"', "1"]),
        lambda values: st.lists(
            st.tuples(st.sampled_from(['"a"', '"a:"', '"\\u0061"', '"\\\\"', '"\\":"']), values),
            max_size=4,
        ).map(lambda pairs: "{" + ",".join(f"{key} : {value}" for key, value in pairs) + "}"),
        max_leaves=12,
    ).map('{{"a":{}}}'.format)
)
def test_duplicate_keys_are_found_whatever_the_strings_hold(text: str) -> None:
    """Two readers would take one frame for two different things, or a good one be refused."""
    found = False

    def look(pairs: list[tuple[str, object]]) -> None:
        nonlocal found
        found = found or len(dict(pairs)) < len(pairs)

    json.loads(text, object_pairs_hook=look)
    assert outcome(text) == ("frame with duplicate keys" if found else json.loads(text))


def outcome(frame: str | Utf8Text) -> object:
    """What a frame says, or why it is refused."""
    try:
        return parse_frame(frame)
    except FrameError as error:
        return error.reason


@pytest.mark.parametrize("name", [name for name in BAD_FRAMES if "without commas" in name])
def test_a_bomb_of_nesting_is_never_unpacked(name: str) -> None:
    """A frame of 90 MiB that nests a thousand deep would become five gigabytes of objects."""
    frame, _ = BAD_FRAMES[name]
    assert isinstance(frame, str)
    assert "more than 65536 values" in str(outcome(frame))


# -- data URLs, and samples of the other format ---------------------------------------------------

DEMO: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "demo.wav"
SPEECH: Final = soundfile.read(DEMO, dtype="int16")[0].astype("<i2")
SOUNDS: Final = {
    "speech": SPEECH,
    "noise": np.random.default_rng(0).integers(-32_768, 32_768, 16_000).astype("<i2"),
    "quiet": np.random.default_rng(0).integers(-3, 4, 16_000).astype("<i2"),
    "tone": (16_000 * np.sin(np.arange(16_000) / 20)).astype("<i2"),
    "square": (16_200 * np.sign(np.sin(np.arange(16_000) / 20))).astype("<i2"),
    "silence": np.zeros(16_000, "<i2"),
}


@pytest.mark.parametrize("name", SOUNDS)
@pytest.mark.parametrize("scale", [1, 32_768])
@pytest.mark.parametrize("piece", [320, 16_000])
def test_sound_is_never_taken_for_the_other_format(name: str, scale: int, piece: int) -> None:
    """A client that is right is refused."""
    for start in range(0, len(SOUNDS[name]), piece):
        sound = SOUNDS[name][start : start + piece]
        assert not looks_float32(sound.tobytes())
        floats = (sound / scale).astype("<f4")
        assert check_pcm("$", floats.tobytes(), 1, 16_000, compares=True) == floats.tobytes()


def test_a_twentieth_of_float32_may_look_like_int16() -> None:
    """Sound with a few zeros would pass for int16."""
    sound = (SOUNDS["noise"][:400] / 32_768).astype("<f4")
    sound[:] = np.where(np.abs(sound) < 1e-3, np.float32(0.1), sound)
    for zeros, looks in ((20, True), (21, False)):
        sound[:zeros] = 0
        assert looks_float32(sound.tobytes()) is looks


@pytest.mark.parametrize("name", ["speech", "noise", "tone"])
def test_sound_of_the_other_format_is_seen(name: str) -> None:
    """A client hears nothing of its mistake, and the model hears noise."""
    sound = SOUNDS[name][: len(SOUNDS[name]) // 2 * 2]
    assert looks_float32((sound / 32_768).astype("<f4").tobytes())
    with pytest.raises(FieldError, match="look like int16, float32 are needed"):
        check_pcm("$", sound.tobytes(), 1, 200_000, compares=True)


def test_one_bad_sample_is_no_other_format() -> None:
    """A client with a NaN would look for another mistake."""
    floats = np.ones(1000, "<f4")
    floats[7] = np.nan
    with pytest.raises(FieldError, match="sample 7 is not finite"):
        check_pcm("$", floats.tobytes(), 1, 1000, compares=True)


URLS: Final = ["data:;base64,", "data:audio/wav;base64,", "data:audio/ogg; codecs=opus;base64,"]


@pytest.mark.parametrize("head", URLS)
def test_a_data_url_is_read_where_it_may_be(head: str) -> None:
    """A page sends what its FileReader gives."""
    assert Value(path="$", value=f"{head}QUJD").binary(data_url=True) == b"ABC"
    for text, may_be in ((f"{head}QUJD", False), (f"{head}QU D", True), (f"x{head}QUJD", True)):
        with pytest.raises(FieldError, match="not base64"):
            Value(path="$", value=text).binary(data_url=may_be)
