"""The table of measures: names, units, definitions and sources, each written once: `measures.txt`.

Of each measure it has name, kind, unit, which values are good, sessions that have it, source; below
them it says what holds for several.

`antiphon eval --definitions` and the reference of the site show it. A measure that means nothing in
a recording is absent there: it has no value, and not 0.

Those of `--mode forced` say what a model decides on a recording's past. A decision is the first
token of a unit that was free to decide: to be silent, or to be heard. Each is judged on the
recorded past, so that one difference has no consequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from types import MappingProxyType
from typing import Final

from cattrs import structure

from protocol.values.limits import MS_PER_S, NS_PER_S, SPEECH_SILENCE_MS, SPEECH_THRESHOLD
from runtime.measures import conversation as at
from runtime.measures.conversation import Measure
from runtime.measures.talk import JITTER_MS
from runtime.media import speech_detector as sd
from runtime.telemetry.meters import DEADLINE_NS

from ..rerun.outputs import NEAR_TIE_DRAW_GAP, NEAR_TIE_MARGIN

OWN_VOICE: Final = "own_voice_word_error"


def _text() -> str:
    facts = {"SPEECH_THRESHOLD": SPEECH_THRESHOLD, "SPEECH_SILENCE_MS": SPEECH_SILENCE_MS}
    facts |= {"NEAR_TIE_MARGIN": NEAR_TIE_MARGIN, "NEAR_TIE_DRAW_GAP": NEAR_TIE_DRAW_GAP}
    facts |= {"JITTER_MS": JITTER_MS, "DEADLINE_S": DEADLINE_NS // NS_PER_S}
    spans = {name: f"{ms / MS_PER_S:g} s" for name, ms in vars(at).items() if "_MS" in name}
    text = (files(__package__) / "measures.txt").read_text("utf-8")
    return text.format(at=at, sd=sd, s=spans, **facts)


def _read(table: str) -> Iterator[Measure]:
    for rows in table.split("\n\n"):
        head, *lines = rows.splitlines()
        name, kind, unit, better, *rest = head.split(" | ")
        modes, source = (*rest, *("duplex", "Antiphon")[len(rest) :])
        fields = {"name": name, "kind": kind, "unit": unit, "better": better.strip("-")}
        fields |= {"modes": modes, "source": source, "definition": _joined(" ".join(lines))}
        yield structure(fields, Measure)


def _joined(text: str) -> str:
    return " ".join(text.split())


_TABLE, _SETTINGS = _text().split("\n\n\n")
MEASURES: Final[Mapping[str, Measure]] = MappingProxyType({it.name: it for it in _read(_TABLE)})
"""All measures by name, in the order in which they are shown."""
SETTINGS: Final = tuple(map(_joined, _SETTINGS.split("\n\n")))
"""What holds for several definitions: one paragraph each."""
