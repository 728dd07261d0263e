"""Common parts of the pages that commands write: the head, the style's base, policy and escaping.

A page is one file that makes no requests. Its policy allows only its own style, and its own script
if it has one, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
from functools import cache
from importlib.resources import files


def style_with(own: str) -> str:
    """Return a page's style: the colours, light and dark, and the head of all pages; then its own.

    Args:
        own: the rules of this page.
    """
    return _asset("base.css") + own


def head_of(title: str, policy: str, style: str) -> str:
    """Write a page up to its body; `policy` and `style` are the page's, the title is escaped."""
    return (
        _asset("head.html")
        .replace("{{policy}}", html.escape(policy))
        .replace("{{style}}", style)
        .replace("{{name}}", escaped(title))
    )


def policy_of(style: str, script: str = "") -> str:
    """Return the `Content-Security-Policy` of a page; pictures may be data within it."""
    scripts = f"script-src {_hash(script)}; " if script else ""
    return (
        f"default-src 'none'; {scripts}style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def escaped(text: str) -> str:
    """Escape text for HTML, attributes included, in ASCII."""
    return html.escape(text).encode("ascii", "xmlcharrefreplace").decode()


def printable(text: str) -> str:
    r"""Write what cannot be printed, and backslashes, as escapes such as `\x1b`.

    Two texts stay different. XML cannot hold all characters that names of files can.
    """
    return "".join(
        char
        if char.isprintable() and char != "\\"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
