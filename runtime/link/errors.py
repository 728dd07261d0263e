"""Errors of a link."""

from __future__ import annotations


class LinkError(Exception):
    """The other end broke the protocol, or left; the text says how, in one line."""


class LinkRefused(LinkError):  # noqa: N818 - names say what happened
    """One end refuses the other: a wrong token, another version; a retry changes nothing."""


class LinkLeft(LinkError):  # noqa: N818 - names say what happened
    """The other end left in the middle of the greeting, as a health check does."""
