"""Whether a text that a server sends shows what only its authors should see.

Paths, tracebacks, classes of Python, addresses of objects, and a client's own text given back. The
texts of this server name paths in the client's message, kinds and limits, and nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

CANARY: Final = "a canary, which no error may sing"
"""Stands in fields of hostile messages; an error that holds it gives a client's text back."""

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
    """Name the first thing in a text that should not be there; empty where nothing is."""
    return next((name for name, pattern in _SIGNS.items() if pattern.search(text)), "")
