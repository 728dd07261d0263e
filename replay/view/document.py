"""The page as one file: the plain files of `page/`, and the session's data, in one HTML.

    for chunk in page_of(reader.head.fields, reader): file.write(chunk)

- The file makes no requests. Its policy (`PAGE_CSP`, in the file as well) allows its own script and
  style by their hashes, and sound and pictures that it makes itself; nothing else. The page that a
  server sends (`page_marked`) may ask that server, and make no markup of text (`ACTING_CSP`).
- Data from a log stands only in data blocks, as JSON in ASCII without `<`, `>` and `&`: no text can
  end a block, and lone surrogates are escapes. The page's script shows it as text.
- Chunks come while the log is read; the caller may stop writing at any time.
- The scripts are ES modules for a browser or Node, joined into one without their import lines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Final

from recorder.format.records import Fields, Record
from recorder.read.scan import Damage

from ..shared.page import escaped, head_of, policy_of, style_with
from .findings import Comparison, Open, compared_with
from .parts import Json, Part
from .story import Narrator

SCRIPTS: Final = (
    "data.js",
    "format.js",
    "scale.js",
    "waveform.js",
    "paint.js",
    "talk.js",
    "happenings.js",
    "voices.js",
    "units.js",
    "lanes.js",
    "timeline.js",
    "stretch.js",
    "player.js",
    "transcript.js",
    "sums.js",
    "address.js",
    "marks.js",
    "list.js",
    "detail.js",
    "header.js",
    "main.js",
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
    later: Mapping[str, Json] | None = None,
) -> Iterator[bytes]:
    """Write a session as a page, while its log is read from its start; yield parts in UTF-8.

    `head` holds the fields of the log's `session` record, `items` its records in order and its
    damage. If `replayed`, findings of logic replay are shown even if there are none. `later` has
    the marks next to the log: `marks`, `damaged`, and for a server's page `writes`. `OSError`: the
    log cannot be read any further.
    """
    policy = ACTING_CSP if later and "writes" in later else PAGE_CSP
    before, after = _template(str(head.get("recording_id"))[:NAME_CHARS_MAX], policy).split(_PARTS)
    yield before.encode()
    if later is not None:
        yield _block(Part("later", later))
    with Narrator(head) as narrator:
        for item in items:
            yield from map(_block, narrator.tell(item))
        yield from map(_block, narrator.conclude(replayed=replayed, comparison=comparison))
    yield after.encode()


def page_beside(
    one: Open, other: Open, name: str
) -> Callable[[Fields, Iterable[Record | Damage]], Iterator[bytes]]:
    """Compare two logs, and return `page_of` with the places at which `other` differs."""
    return partial(page_of, comparison=compared_with(one, other, name))


def page_marked(
    later: Mapping[str, Json],
) -> Callable[[Fields, Iterable[Record | Damage]], Iterator[bytes]]:
    """Return `page_of` with the marks next to the log."""
    return partial(page_of, later=later)


def _block(part: Part) -> bytes:
    text = json.dumps(part.value, separators=(",", ":"), allow_nan=False).translate(_UNSAFE)
    return f'<script type="application/json" data-part="{part.name}">{text}</script>\n'.encode()


def _template(name: str, policy: str) -> str:
    body = _asset("index.html").replace("{{script}}", _script()).replace("{{name}}", escaped(name))
    return head_of(name, policy, _style()) + body


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
"""The policy of `page_marked`."""
