"""What the benches share: speech, pictures, sums of durations, and how results are printed.

Material is the same at each run. Without the source tree, the recorded sentence is replaced by a
voice-like signal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Final, Literal, TypeVar

import attrs
import click
import numpy as np
import orjson
import simplejpeg
import soxr
from attrs import AttrsInstance
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from protocol.values.model import INPUT_RATE_HZ

from ... import SOURCE_TREE
from ...media.sound import read_wav

FIXTURES: Final = SOURCE_TREE / "fixtures" / "speech"
SYNTHETIC_S: Final = 12
JPEG_SIDE: Final = 448
JPEG_BYTES: Final = 20_000
"""A camera's picture of this size at a usual quality; the synthetic one comes close to it."""
MS: Final = 1000.0

Arrival = Literal["together", "spread"]
"""Sessions' units are due all at once, or spread over the second."""
_Samples = NDArray[np.float32]


@attrs.frozen(kw_only=True)
class Times:
    """Percentiles of durations in milliseconds; with few values, the highest is the maximum."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def sum_up(durations_ms: Sequence[float]) -> Times:
    """Sum up durations, at least one, by nearest rank: each figure is a measured one."""
    p50, p99, longest = np.percentile(durations_ms, (50, 99, 100), method="inverted_cdf")
    return Times(
        count=len(durations_ms),
        p50_ms=round(float(p50), 3),
        p99_ms=round(float(p99), 3),
        max_ms=round(float(longest), 3),
    )


@attrs.frozen(kw_only=True)
class Speech:
    """Speech in a loop; samples are 16 kHz mono, in [-1, 1]."""

    name: str
    samples: _Samples

    def second(self, number: int, *, rate_hz: int = INPUT_RATE_HZ, gain: float = 1.0) -> bytes:
        """Cut out a second of the loop as float32 LE, mono, at `rate_hz`, scaled by `gain`.

        Unless `gain` is a power of two, samples are, as a browser's, not whole 16-bit steps.
        """
        at = np.arange(number * INPUT_RATE_HZ, (number + 1) * INPUT_RATE_HZ) % len(self.samples)
        samples = self.samples[at]
        if rate_hz != INPUT_RATE_HZ:
            samples = soxr.resample(samples, INPUT_RATE_HZ, rate_hz)
        return (samples * np.float32(gain)).astype("<f4").tobytes()


def load_speech() -> Speech:
    """Return the recorded fixture, or the synthetic voice without it."""
    path = FIXTURES / "demo.wav"
    if path.is_file():
        return Speech(name=path.name, samples=np.frombuffer(read_wav(path), "<f4"))
    return Speech(name="synthetic", samples=synthetic_voice())


def synthetic_voice() -> _Samples:
    """Make a voice-like signal: a gliding pitch, three formants, four syllables a second."""
    at = np.arange(SYNTHETIC_S * INPUT_RATE_HZ) / INPUT_RATE_HZ
    phase = 2 * np.pi * np.cumsum(130 + 25 * np.sin(2 * np.pi * 0.4 * at)) / INPUT_RATE_HZ
    voice = np.zeros_like(at)
    for harmonic in range(1, 30):
        pitch_hz = 130.0 * harmonic
        loudness = sum(np.exp(-(((pitch_hz - hz) / 180) ** 2)) for hz in (600, 1400, 2600))
        voice += loudness * np.sin(harmonic * phase)
    voice += np.random.default_rng(0).normal(0, 0.05, len(at))
    syllables = np.clip(np.sin(2 * np.pi * 4 * at), 0, 1) * (at % 3 < 2)
    voiced: _Samples = (0.2 * voice * syllables / np.abs(voice).max()).astype(np.float32)
    return voiced


def camera_frame(number: int) -> bytes:
    """Make a JPEG of about `JPEG_BYTES`: a constant scene with varying noise."""
    at = np.arange(JPEG_SIDE)
    scene = 110 + 60 * np.sin(at / 37)[:, None] * np.cos(at / 53)[None, :]
    noise = np.random.default_rng(number).normal(0, 8, (JPEG_SIDE, JPEG_SIDE, 3))
    picture = np.clip(scene[:, :, None] + noise, 0, 255).astype(np.uint8)
    data: bytes = simplejpeg.encode_jpeg(picture, quality=60)
    return data


def shown_frame() -> bytes:
    """Return the fixtures' picture, or a synthetic one."""
    path = FIXTURES / "frame.jpg"
    return path.read_bytes() if path.is_file() else camera_frame(0)


def machine_facts() -> dict[str, str | int | float]:
    """Describe the machine; `load` is that of the last minute, this run's included."""
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "antiphon": version("antiphon"),
        "load": round(os.getloadavg()[0], 2),
    }


# -- printing -------------------------------------------------------------------------------------

Found = TypeVar("Found", bound=AttrsInstance)


class BenchError(click.ClickException):
    """The bench cannot continue; the text gives the reason in one line."""


def tell(text: str) -> None:
    """Print progress on standard error."""
    click.echo(f"bench: {text}", err=True)


def print_found(
    found: Found, show: Callable[[Console, Found], None], *, as_json: bool, options: int = 0
) -> None:
    """Print results by `show`, or as JSON of `attrs.asdict`, with further orjson `options`."""
    if as_json:
        options |= orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
        click.echo(orjson.dumps(attrs.asdict(found), option=options), nl=False)
    else:
        show(Console(), found)


def machine_line(facts: Mapping[str, object]) -> str:
    """Name the facts of `machine_facts` in one line."""
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, whole: int = 1
) -> Table:
    """Make a table; the first `left` columns are aligned left, the first `whole` never wrapped."""
    made = Table(box=SIMPLE)
    for place, column in enumerate(columns):
        made.add_column(column, justify="left" if place < left else "right", no_wrap=place < whole)
    for row in rows:
        made.add_row(*row)
    return made
