"""Detection of internals in a server's texts.

Paths, tracebacks, Python classes, object addresses, and the client's own text; a path in the
client's message is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

CANARY: Final = "a canary, which no error may sing"
"""In fields of hostile messages; an error with it echoes the client's text."""

_SIGNS: Final[Mapping[str, re.Pattern[str]]] = {
    "a traceback": re.compile(r"Traceback|File \"|, line \d+"),
    "a path": re.compile(r"(?<![\w$.])/(?:usr|home|opt|var|tmp|etc|srv|root|app|work|lib)/"),
    "a file of Python": re.compile(r"\w\.py\b|site-packages|\w\.so\b"),
    "an exception": re.compile(r"\b[A-Z][A-Za-z]*(?:Error|Exception|Warning|Interrupt)\b"),
    "an object": re.compile(r"<[a-z_.A-Z ]+ (?:object )?at 0x|<class |<function |0x[0-9a-f]{6,}"),
    "a value of Python": re.compile(
        r"\bNoneType\b|\bdict_keys\b|\bb'|\bb\"|\bself\.|__\w+__|NotImplemented"
    ),
    "the client's text": re.compile(re.escape(CANARY)),
}


def sign_of(text: str) -> str:
    """The first kind of internals in a text, or empty."""
    return next((name for name, pattern in _SIGNS.items() if pattern.search(text)), "")
