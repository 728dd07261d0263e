"""Golden transcripts: reading them, and holding frames to what they say.

`fixtures/wire/<dialect>/*.jsonl` hold them; `fixtures/wire/README.md` says what a line may be. The
same file is played against a `Session` alone (`transcript_pure`) and over a socket
(`transcript_live`).

What a transcript says is compared exactly: no field may be missing and none may be there beside it.
Only a marker, an object whose keys begin with `$`, stands for something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import attrs
import numpy as np
import pybase64

from tests.transcripts.media import make_media

WARNED_S: Final = 30
"""What a transcript's `warn` tells clients; its `drain` comes when the transcript says so."""

ROOT: Final = Path(__file__).resolve().parents[2] / "fixtures" / "wire"

STEPS: Final = frozenset(
    {
        "send",
        "send_text",
        "send_binary",
        "send_size",
        "receive",
        "close",
        "refused",
        "leave",
        "connect",
        "wait_s",
        "occupy",
        "vacate",
        "operator",
        "words",
    }
)
"""What a line after the first may be."""
SENDS: Final = frozenset({"send", "send_text", "send_binary", "send_size"})
METRICS: Final = (
    *("kv_cache_length", "prefill_ms", "generate_ms", "wall_clock_ms", "cost_llm_ms"),
    *("cost_tts_ms", "cost_token2wav_ms", "n_tokens", "n_tts_tokens", "vision_slices"),
    *("vision_tokens", "dropped_units"),
)
"""Those of `realtime` (the wire decisions), beside `recording`."""
IDS: Final = {
    "rt": re.compile(r"rt_[0-9]{13}"),
    **{
        name: re.compile(rf"{name}_[0-9a-f]{{12}}")
        for name in (
            *("sess", "resp", "input", "call", "ticket", "duplex", "event", "item", "conv"),
            "dlg",
        )
    },
    "recording": re.compile(r"[A-Za-z0-9_-]{1,64}"),
}
KINDS: Final = {"number": (int, float), "string": (str,), "object": (dict,)}


class Mismatch(AssertionError):  # noqa: N818 - what a test fails with
    """A frame is not what the transcript says."""


@attrs.frozen(kw_only=True)
class Step:
    """One line after the first.

    Attributes:
        line: its number in the file, from 1.
        kind: one of `STEPS`.
        value: what stands behind the kind.
    """

    line: int
    kind: str
    value: Any


@attrs.frozen(kw_only=True)
class Transcript:
    """One file.

    Attributes:
        name: `<dialect>/<file>` without its suffix.
        title: what happens.
        why: one sentence that names source and clause.
        connect: where the client connects, with its query.
        server: settings that are not the default; see README.md.
        script: of `transcript_scripts.SCRIPTS`.
        behaviour: the session's number (`protocol.values.behaviour`).
        steps: what happens, in order.
    """

    name: str
    title: str
    why: str
    connect: str
    server: Mapping[str, Any]
    script: str
    steps: tuple[Step, ...]
    behaviour: int = 0

    @property
    def dialect(self) -> str:
        """The folder that it lies in."""
        return self.name.partition("/")[0]

    def bodies(self, kind: str) -> Iterator[dict[str, Any]]:
        """The messages that are sent (`send`) or received (`receive`)."""
        return (step.value for step in self.steps if step.kind == kind)


@cache
def load_all(root: Path = ROOT) -> tuple[Transcript, ...]:
    """Read all transcripts, sorted by name."""
    return tuple(load(path) for path in sorted(root.glob("*/*.jsonl")))


def load(path: Path) -> Transcript:
    """Read a transcript; anything in it that is not known is an error."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    head = dict(lines[0])
    steps = []
    for number, body in enumerate(lines[1:], start=2):
        ((kind, value),) = body.items()
        assert kind in STEPS, f"{path.name}:{number}: {kind} is no step"
        steps.append(Step(line=number, kind=kind, value=value))
    assert steps[-1].kind in {"close", "leave", "refused"}, f"{path.name} has no end"
    transcript = Transcript(
        name=f"{path.parent.name}/{path.stem}",
        title=head.pop("title"),
        why=head.pop("why"),
        connect=head.pop("connect"),
        server=head.pop("server", {}),
        script=head.pop("script", "default"),
        steps=tuple(steps),
        behaviour=head.pop("behaviour", 0),
    )
    assert not head, f"{path.name}: {', '.join(head)} in the first line"
    return transcript


# -- what is sent ---------------------------------------------------------------------------------


def frame_of(step: Step, names: Mapping[str, object] = MappingProxyType({})) -> str | bytes:
    """Write what a client sends, its markers replaced by what they stand for (`$same`: `names`)."""
    match step.kind:
        case "send":
            return json.dumps(fill(step.value, names))
        case "send_text":
            return str(step.value)
        case "send_binary":
            return bytes(step.value)
    assert step.kind == "send_size"
    # Characters of two bytes: a frame of smaller ones is cut off by the socket, before it is one.
    return "\u00e9" * (int(step.value) // 2)


def fill(value: Any, names: Mapping[str, object] = MappingProxyType({})) -> Any:
    """Replace markers by what they stand for."""
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    if is_marker(value):
        return names.get(value["$same"], "text") if "$same" in value else make_media(value)
    return {key: fill(item, names) for key, item in value.items()}


def is_marker(value: object) -> bool:
    """Whether an object stands for something else."""
    return isinstance(value, dict) and bool(value) and all(key.startswith("$") for key in value)


def example(value: Any) -> Any:
    """Put a value in the place of each marker of what is received, as a validator needs it."""
    if isinstance(value, list):
        return [example(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$any": "number"}:
            return 1
        case {"$pcm": count}:
            return "AAAA" * int(count)
        case {"$pcm16": _} | {"$silence": _} | {"$bytes": _}:
            return "AAAA" * 2
        case {"$metrics": stated}:
            return dict.fromkeys(METRICS, 1) | {"recording": "off"} | stated
        case {"$id": name} if name != "recording":
            return f"{name}_1714200000000" if name == "rt" else f"{name}_0123456789ab"
        case {"$id": _} | {"$same": _} | {"$any": _}:
            return "text"
    return {key: example(item) for key, item in value.items()}


# -- what is received -----------------------------------------------------------------------------


def check(expected: object, found: object, names: dict[str, object], path: str = "$") -> None:
    """Hold what was received to what a transcript says.

    Args:
        expected: of the transcript, with markers.
        found: what came.
        names: what `$same` has bound so far; grows.
        path: where it stands, for the error.

    Raises:
        Mismatch: naming the first place where they part.
    """
    if isinstance(expected, dict) and is_marker(expected):
        _check_marker(expected, found, names, path)
    elif isinstance(expected, dict):
        if not isinstance(found, dict) or set(found) != set(expected):
            raise Mismatch(f"{path}: {_shown(found)}, not the fields {sorted(expected)}")
        for key, item in expected.items():
            check(item, found[key], names, f"{path}.{key}")
    elif isinstance(expected, list):
        if not isinstance(found, list) or len(found) != len(expected):
            raise Mismatch(f"{path}: {_shown(found)}, not {len(expected)} items")
        for index, item in enumerate(expected):
            check(item, found[index], names, f"{path}[{index}]")
    elif found != expected or isinstance(found, bool) != isinstance(expected, bool):
        raise Mismatch(f"{path}: {_shown(found)}, not {expected!r}")


def _check_marker(
    marker: dict[str, Any], found: object, names: dict[str, object], path: str
) -> None:
    for key, value in marker.items():
        match key:
            case "$any":
                ok = isinstance(found, KINDS[value]) and not isinstance(found, bool)
            case "$id":
                ok = isinstance(found, str) and IDS[value].fullmatch(found) is not None
            case "$same":
                ok = names.setdefault(value, found) == found
            case "$pcm":
                ok = _samples(found) == value
            case "$pcm16" | "$silence":
                sound = _bytes_of(found)
                ok = len(sound) == 2 * value and any(sound) is (key == "$pcm16")
            case "$bytes":
                ok = len(_bytes_of(found)) == value
            case "$metrics":
                rest = {name: {"$any": "number"} for name in METRICS}
                check({**rest, "recording": "off", **value}, found, names, path)
                ok = True
            case _:
                raise AssertionError(f"{path}: {key} is no marker of what is received")
        if not ok:
            raise Mismatch(f"{path}: {_shown(found)}, not {key} {value}")


def _samples(found: object) -> int | None:
    """Count the samples of base64 of float32 LE; None where it is none, or not finite."""
    if not isinstance(found, str):
        return None
    try:
        samples = np.frombuffer(pybase64.b64decode(found, validate=True), "<f4")
    except ValueError:
        return None
    return len(samples) if np.isfinite(samples).all() else None


def _bytes_of(found: object) -> bytes:
    """Read base64; nothing where it is none."""
    try:
        return pybase64.b64decode(found, validate=True) if isinstance(found, str) else b""
    except ValueError:
        return b""


def _shown(found: object) -> str:
    text = json.dumps(found)
    return text if len(text) < 600 else f"{text[:600]}..."
