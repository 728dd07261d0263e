"""What the tests of a session's page share: its parts, as told and as a browser reads them."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable
from typing import Any

from recorder.format.records import Fields, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from replay.view.document import page_of
from replay.view.parts import Part
from replay.view.story import Narrator

Told = dict[str, list[Any]]

BLOCK = re.compile(r'<script type="application/json" data-part="(\w+)">(.*?)</script>', re.DOTALL)


def narrate(head: Fields, items: Iterable[Record | Damage], **also: Any) -> Told:
    """Tell records; each part's values, by the part's name, the rows of all parts joined."""
    parts: list[Part] = []
    with Narrator(head) as narrator:
        for item in items:
            parts += narrator.tell(item)
        parts += narrator.conclude(**also)
    return gather((part.name, part.value) for part in parts)


def gather(parts: Iterable[tuple[str, Any]]) -> Told:
    """Sort parts by name."""
    told: Told = {"rows": [], "sound": [], "picture": [], "story": []}
    for name, value in parts:
        told[name] += value if name == "rows" else [value]
    return told


def read_page(page: str) -> Told:
    """Read a page's data as its script does."""
    return gather((name, json.loads(text)) for name, text in BLOCK.findall(page))


def page_text(log: bytes, **also: Any) -> str:
    """Write a log's page."""
    with LogReader(log) as reader:
        return b"".join(page_of(reader.head.fields, reader, **also)).decode()


def policy_of(page: str) -> dict[str, list[str]]:
    """Read the policy that a page sets itself: what is allowed, by directive."""
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert found is not None
    directives = html.unescape(found[1]).split("; ")
    return {name: values for name, *values in map(str.split, directives)}
