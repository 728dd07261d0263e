"""Strict JSON, base64 and fields: from wire text to checked Python values and back.

- A frame is one JSON object in a text frame, without duplicate keys, NaN, infinities or lone
  surrogates; anything else is a `FrameError` with a fixed reason, which closes the connection.
- A field has exactly the requested type: neither `true` nor `1.0` is an integer, an integer is a
  number. An explicit null counts as absent, as JavaScript clients send it.
- A `FieldError` names the path, the kind of the value and the limit. It may show a number or a
  length, never a client's text.

JPEG and WAV files are checked in `protocol.wire.media`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, NoReturn, TypeVar

import attrs
import numpy as np
import orjson
import pybase64
from numpy.typing import NDArray

from ..values.behaviour import NEWEST
from ..values.errors import CLOSE_TOO_BIG, ErrorCode, FieldError, FrameError
from ..values.limits import APPEND_SAMPLES_MAX, APPEND_SAMPLES_MIN, FRAME_BYTES_MAX
from ..values.model import SAMPLE16_BYTES, SAMPLE_BYTES, SlidingWindow
from ..values.modes import Mode
from ..values.utf8 import Frame, Utf8Text
from .strict import count_keys, has_more, not_json, refuse_duplicates

JSON_VALUES_MAX: Final = 65_536
"""Values a frame: no source's message has 100, and each costs 60 bytes or more once parsed, so
that 24 MiB of `{},` would fill half a gigabyte. An estimate: commas are counted, and brackets of
either kind, as nesting needs no comma; those in strings too.
"""
KEY_SHOWN: Final = re.compile(r"[A-Za-z0-9_]{1,64}")
"""Keys that may be shown in a path; any other is a client's text and shown as `?`."""

DATA_URL: Final = re.compile(r"data:[\w.+/;= -]{0,128};base64,", re.ASCII)
"""How a data URL of bytes begins (RFC 2397)."""

T = TypeVar("T")
C = TypeVar("C", bound=str)


# -- frames -------------------------------------------------------------------------------------


def parse_frame(frame: Frame, bytes_max: int = FRAME_BYTES_MAX) -> Mapping[str, object]:
    """Read a WebSocket message as a JSON object (000, Invalid JSON; the wire decisions).

    The values are str, int, float, bool, None, list and dict. `FrameError` if it is not a JSON
    object (1003), or longer than `bytes_max` (1009).
    """
    if frame is None or len(frame) > bytes_max:
        raise FrameError(CLOSE_TOO_BIG, f"frame above {bytes_max} bytes")
    if isinstance(frame, bytes):
        raise not_json("binary frame, text frames only")
    text = frame.data if isinstance(frame, Utf8Text) else frame
    is_long = len(text) > JSON_VALUES_MAX
    if is_long and any(has_more(text, char, JSON_VALUES_MAX) for char in ",[{"):
        raise not_json(f"frame with more than {JSON_VALUES_MAX} values")
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise not_json("frame is not JSON") from None
    if not isinstance(value, dict):
        raise not_json("frame is not a JSON object")
    # Each key has its colon, and some text may hold more of them. Where there are no more colons
    # than keys were kept, no key was lost to a duplicate; else those in strings are left out.
    keys = count_keys(value)
    if has_more(text, ":", keys):
        refuse_duplicates(text, keys)
    return value


def dump_frame(body: Mapping[str, object]) -> str:
    """Write a message: compact JSON, keys in the order of insertion, always the same text."""
    return orjson.dumps(body).decode()


def frame_bytes(frame: str | bytes | Utf8Text) -> int:
    """Count the bytes of a message on the wire; for ASCII without looking at it."""
    if not isinstance(frame, str) or frame.isascii():
        return len(frame)
    return len(frame.encode("utf-8", "surrogatepass"))


# -- base64 and PCM -----------------------------------------------------------------------------


def encode_base64(data: bytes) -> str:
    """Write bytes as base64, standard alphabet, padded."""
    return pybase64.b64encode_as_string(data)


def check_pcm(
    path: str, pcm: bytes, samples_min: int, samples_max: int, *, compares: bool = False
) -> bytes:
    """Check float32 LE samples for number and finiteness, and return them.

    `FieldError` names the count, or the index of the first sample that is not finite. `compares`:
    samples that look like int16 are refused by that name.
    """
    if len(pcm) % SAMPLE_BYTES:
        raise invalid(path, f"{len(pcm)} bytes, a multiple of {SAMPLE_BYTES} is needed (float32)")
    samples = len(pcm) // SAMPLE_BYTES
    if samples < samples_min:
        are = "is" if samples_min == 1 else "are"
        raise invalid(path, f"{samples} samples, at least {samples_min} {are} needed")
    if samples > samples_max:
        raise invalid(path, f"{samples} samples, at most {samples_max} are allowed")
    values = np.frombuffer(pcm, dtype="<f4")
    if compares and values.min() >= -LOUDEST and values.max() <= LOUDEST:  # so it is finite
        return pcm
    if compares and looks_int16(values):
        raise invalid(path, "samples that look like int16, float32 are needed")
    finite = np.isfinite(values)
    if not finite.all():
        raise invalid(path, f"sample {int(finite.argmin())} is not finite")
    return pcm


LOUDEST: Final = 1e5
"""Float samples in the scale of int16 stay below; 1 is full scale."""
_QUIETEST: Final = 1e-12
"""Quieter float samples occur only at the end of a fade."""
_COMPARED_MIN: Final = 64
"""Samples that are not zero: fewer show nothing."""
_COMPARED_BYTES: Final = 2048
"""Of a piece of int16 samples: its beginning shows what they are."""
_TOPS: Final = bytes([*range(0x33, 0x40), *range(0xB3, 0xC0)])
"""The highest byte of float32 samples from 4e-8 to 2, of both signs."""


def looks_int16(values: NDArray[np.float32]) -> bool:
    """Whether most samples are far too loud or too quiet, as pairs of int16 samples would be."""
    loud = np.abs(values[values != 0])
    is_sound = (loud >= _QUIETEST) & (loud <= LOUDEST)
    return len(loud) >= _COMPARED_MIN and int(is_sound.sum()) * 2 < len(loud)


def looks_float32(pcm16: bytes) -> bool:
    """Whether int16 samples are float32: every second one small, the others not like it."""
    tops = pcm16[3:_COMPARED_BYTES:4]
    if len(tops) < _COMPARED_MIN or len(tops.translate(None, _TOPS)) * 20 > len(tops):
        return False
    pairs = np.frombuffer(pcm16[: len(tops) * 4], "<i2").reshape(-1, 2).astype(np.int32)
    return float(np.abs(pairs[:, 0] - pairs[:, 1]).mean()) > _FAR_APART


_FAR_APART: Final = 4096
"""Neighbours of int16 samples are nearer, in the mean; halves of float32 samples are not."""


# -- fields -------------------------------------------------------------------------------------


def invalid(path: str, text: str) -> FieldError:
    """Make the error for a wrong value."""
    return FieldError(ErrorCode.INVALID_PAYLOAD, f"{path}: {text}")


def kind_of(value: object) -> str:
    """Name the kind of a JSON value, with its length and without its content."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int():
            return "an integer"
        case float():
            return "a number"
        case str():
            return f"a string of {len(value)} characters"
        case list():
            return f"an array of {len(value)} items"
        case _:
            return "an object"


@attrs.define(kw_only=True)
class Value:
    """One JSON value and its path; its methods read it as one type or raise `FieldError`.

    It is not frozen: one is made for every field, and that would take twice as long.
    """

    path: str
    value: object

    def text(self, chars_max: int | None = None, chars_min: int = 0) -> str:
        """Read a string of `chars_min` to `chars_max` characters."""
        if not isinstance(self.value, str):
            self._fail_kind("a string")
        count = len(self.value)
        if chars_max is not None and not chars_min <= count <= chars_max:
            raise invalid(self.path, f"{count} characters, allowed is {chars_min} to {chars_max}")
        return self.value

    def choice(self, options: tuple[C, ...]) -> C:
        """Read a string that is one of `options`."""
        text = self.text()
        for option in options:
            if option == text:
                return option
        raise invalid(self.path, f"{kind_of(text)}, allowed is {', '.join(options)}")

    def flag(self) -> bool:
        """Read a boolean."""
        if not isinstance(self.value, bool):
            self._fail_kind("a boolean")
        return self.value

    def integer(self, low: int = 0, high: int | None = None) -> int:
        """Read an integer from `low` up to `high`, both included."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._fail_kind("an integer")
        if self.value < low or (high is not None and self.value > high):
            self._fail_range(f"{low} to {high}" if high is not None else f"{low} and more")
        return self.value

    def number(self, low: float, high: float, open_low: Literal["", "above "] = "") -> float:
        """Read a number from `low` up to `high`; `open_low="above "` leaves `low` itself out."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            self._fail_kind("a number")
        if not low <= self.value <= high or (open_low and self.value == low):
            self._fail_range(f"{open_low}{low:g} to {high:g}")
        return float(self.value)

    def items(self, count_max: int, count_min: int = 0) -> tuple[Value, ...]:
        """Read an array of `count_min` to `count_max` items."""
        if not isinstance(self.value, list):
            self._fail_kind("an array")
        count = len(self.value)
        if not count_min <= count <= count_max:
            raise invalid(self.path, f"{count} items, allowed is {count_min} to {count_max}")
        return tuple(
            Value(path=f"{self.path}[{index}]", value=item) for index, item in enumerate(self.value)
        )

    def binary(self, *, line_breaks: bool = False, data_url: bool = False) -> bytes:
        """Read strict base64: standard alphabet, correct padding, no white space.

        `line_breaks` allows CR and LF anywhere in it (RFC 2045, 6.8), `data_url` the head of a data
        URL before it, of any media type.
        """
        text = self.text()
        try:
            return pybase64.b64decode(text, validate=True)
        except ValueError:
            head = DATA_URL.match(text) if data_url else None
            if head is not None:
                rest = Value(path=self.path, value=text[head.end() :])
                return rest.binary(line_breaks=line_breaks)
            if line_breaks:  # rarely there, so looked for only now
                joined = text.replace("\r", "").replace("\n", "")
                with suppress(ValueError):
                    return pybase64.b64decode(joined, validate=True)
            raise invalid(self.path, f"{kind_of(text)} that is not base64") from None

    def pcm(
        self, samples_min: int = APPEND_SAMPLES_MIN, samples_max: int = APPEND_SAMPLES_MAX
    ) -> bytes:
        """Read base64 of float32 LE samples; the default bounds are an append's."""
        return check_pcm(self.path, self.binary(), samples_min, samples_max)

    def pcm16(self) -> bytes:
        """Read base64 of signed 16-bit LE samples, at least one."""
        return self.check_pcm16(self.binary())

    def check_pcm16(self, pcm16: bytes) -> bytes:
        """Check signed 16-bit LE samples, at least one, and return them."""
        if not pcm16:
            raise invalid(self.path, "no samples, at least 1 is needed")
        if len(pcm16) % SAMPLE16_BYTES:
            text = f"{len(pcm16)} bytes, a multiple of {SAMPLE16_BYTES} is needed (int16)"
            raise invalid(self.path, text)
        return pcm16

    def _fail_kind(self, needed: str) -> NoReturn:
        raise invalid(self.path, f"{kind_of(self.value)}, {needed} is needed")

    def _fail_range(self, allowed: str) -> NoReturn:
        shown = f"{self.value}" if _is_short(self.value) else kind_of(self.value)
        raise invalid(self.path, f"{shown}, allowed is {allowed}")


def _is_short(value: object) -> bool:
    """Whether a number has few digits; a long one is neither written nor shown."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**64)


class Fields:
    """Reads the fields of one JSON object and remembers which; `$` is the message's path."""

    def __init__(self, body: Mapping[str, object], path: str = "$") -> None:
        self.path = path
        self._body = body
        self._asked: set[str] = set()

    def required(self, name: str, read: Callable[[Value], T]) -> T:
        """Read a field by a method of `Value`, or a function over one.

        `FieldError` with `missing_field` if it is absent or null, else as from `read`.
        """
        self._asked.add(name)
        if self._body.get(name) is None:
            text = f"{self._at(name)}: required field is missing"
            raise FieldError(ErrorCode.MISSING_FIELD, text)
        return read(Value(path=self._at(name), value=self._body[name]))

    def refuse_unknown(self) -> None:
        """Raise `FieldError` if a field was not read, null or not."""
        for path in self._unknown():
            raise invalid(path, f"unknown field, known are {', '.join(sorted(self._asked))}")

    def _at(self, name: str) -> str:
        return f"{self.path}.{name if KEY_SHOWN.fullmatch(name) else '?'}"

    def _unknown(self) -> list[str]:
        return [self._at(name) for name in self._body if name not in self._asked]


# -- A message that is being read -----------------------------------------------------------------

Json = Mapping[str, object]


@attrs.frozen(kw_only=True)
class Context:
    """Everything outside a message that its parsing may depend on."""

    mode: Mode
    sliding_windows: tuple[SlidingWindow, ...] = ("off",)
    behaviour: int = NEWEST
    must_record: bool = False
    is_fork: bool = False

    def behaves(self, change: int) -> bool:
        """Whether the session has a change (`behaviour`)."""
        return self.behaviour >= change


@attrs.define
class Reading:
    """One object of a message, while it is read.

    Attributes:
        path: `$` is the message itself.
        prefix: of its fields' attributes, such as `config.`.
        values: values read so far from the message, by attribute.
        aside: paths of this object's fields that are known and were not read.
        below: paths of ignored fields of the objects in it.
    """

    body: Json
    path: str
    prefix: str
    context: Context
    values: dict[str, Any]
    aside: list[str] = attrs.Factory(list)
    below: list[str] = attrs.Factory(list)


def missing(path: str) -> FieldError:
    """Make the error for a missing required field."""
    return FieldError(ErrorCode.MISSING_FIELD, f"{path}: required field is missing")


def as_object(value: object, path: str) -> Json:
    """Return a value that is an object; else `FieldError`."""
    if not isinstance(value, dict):
        raise invalid(path, f"{kind_of(value)}, an object is needed")
    return value
