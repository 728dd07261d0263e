"""Markers: short JSON objects that stand for long values in a case.

They are those of `fixtures/wire`, and three more: `{"$head": media type}` is base64 of the head of
a file, `{"$deep": n}` are n nested arrays, `{"$floats": [...]}` is base64 of these numbers,
repeated for a second. An object is a marker if its first key names one and all its keys begin with
`$`; a literal marker is sent as a text (`send_text`). A marker's size is bounded, and known before
it is made.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pybase64
import simplejpeg
import soundfile

from protocol.values.model import INPUT_RATE_HZ
from protocol.wire.schema.material import MEDIA

MATERIAL_BYTES_MAX: Final = 8 * 1024 * 1024
"""A case's size with its markers replaced: parsers fail by form, and size has its own step."""
KINDS: Final = (
    *("$text", "$deep", "$pcm", "$floats", "$bytes", "$jpeg", "$wav", "$head", "$broken"),
)
"""The first keys of markers."""
DEPTH_MAX: Final = 300
"""Nested arrays: many more than a frame may have, few enough to be written."""
MADE_MAX: Final = 64
"""Media kept: the common ones, a megabyte at most each."""
HEADS: Final[Mapping[str, bytes]] = {medium.name: medium.samples[0] for medium in MEDIA}


class MarkerError(ValueError):
    """A marker is invalid."""


def fill(value: Any) -> Any:
    """Replace the markers in JSON; raises `MarkerError` for an invalid one."""
    if isinstance(value, list):
        return [fill(item) for item in value]
    if not isinstance(value, dict):
        return value
    if is_marker(value):
        return _make(json.dumps(value))
    return {key: fill(item) for key, item in value.items()}


def is_marker(value: object) -> bool:
    """Whether an object is a marker."""
    if not isinstance(value, dict) or next(iter(value), None) not in KINDS:
        return False
    return all(key.startswith("$") for key in value)


def size_of(value: Any) -> int:
    """The characters of JSON in full, to a tenth or a few hundred; `MarkerError`: invalid."""
    if isinstance(value, dict):
        if is_marker(value):
            return _marker_size(json.dumps(value))
        return 2 + sum(len(key) + 6 + size_of(item) for key, item in value.items())
    if isinstance(value, list):
        return 2 + sum(2 + size_of(item) for item in value)
    return len(value) + 2 if isinstance(value, str) else len(str(value))


@lru_cache(maxsize=MADE_MAX)
def _marker_size(text: str) -> int:
    marker = json.loads(text)
    try:
        (kind, value), *_ = marker.items()
        match kind:
            case "$pcm":
                size = 4 * value
            case "$floats":
                size = 4 * INPUT_RATE_HZ
            case "$wav":
                rate_hz = marker.get("$rate_hz", INPUT_RATE_HZ)
                size = 2 * value * rate_hz * marker.get("$channels", 1)
            case "$bytes":
                size = value
            case _:
                return len(str(_make(text)))
        return _size(size) * 4 // 3
    except MarkerError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise MarkerError(f"{text[:80]} is no marker") from error


@lru_cache(maxsize=MADE_MAX)
def _make(text: str) -> Any:
    marker = json.loads(text)
    try:
        if "$text" in marker:
            return "a" * _size(marker["$text"])
        if "$deep" in marker:
            return _nest(min(_size(marker["$deep"]), DEPTH_MAX))
        before = str(marker.get("$before", ""))  # as in a data URL
        return before + pybase64.b64encode(_bytes_of(marker)).decode()
    except MarkerError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, RuntimeError) as error:
        raise MarkerError(f"{text[:80]} is no marker") from error


def _size(value: Any) -> int:
    size = int(value)
    if not 0 <= size <= MATERIAL_BYTES_MAX:
        raise MarkerError(f"{size} is not from 0 to {MATERIAL_BYTES_MAX}")
    return size


def _nest(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def _bytes_of(marker: Mapping[str, Any]) -> bytes:
    (kind, value), *_ = marker.items()
    match kind:
        case "$pcm":
            return _tone(_size(4 * value) // 4, marker.get("$nan_at"))
        case "$floats":
            return np.resize(np.array(value, "<f4"), INPUT_RATE_HZ).tobytes()
        case "$bytes":
            return bytes(_size(value))
        case "$jpeg":
            width, _, height = str(value).partition("x")
            _size(3 * int(width) * int(height))
            rows = np.linspace(0, 255, int(height), dtype=np.uint8)[:, None, None]
            picture = np.broadcast_to(rows, (int(height), int(width), 3))
            return bytes(simplejpeg.encode_jpeg(np.ascontiguousarray(picture)))
        case "$wav":
            rate_hz, channels = marker.get("$rate_hz", INPUT_RATE_HZ), marker.get("$channels", 1)
            file = io.BytesIO()
            _size(4 * value * rate_hz * channels)
            samples = np.zeros((int(value * rate_hz), channels), "<f4")
            soundfile.write(file, samples, rate_hz, format="WAV", subtype="PCM_16")
            return file.getvalue()
        case "$head":
            return HEADS[value]
        case "$broken":
            whole = _bytes_of(value)
            return whole[: len(whole) * 3 // 4]
    raise MarkerError(f"{kind} is no marker")


def _tone(samples: int, nan_at: int | None) -> bytes:
    at = np.arange(samples) / INPUT_RATE_HZ
    data = (0.1 * np.sin(2 * np.pi * 220 * at)).astype("<f4")
    if nan_at is not None:
        data[nan_at % max(1, samples)] = np.nan
    return data.tobytes()
