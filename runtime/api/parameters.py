"""Query parameters, parsed strictly: a misspelt one is a 400 that says what is valid."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

DIGITS_MAX: Final = 18
"""Digits of a number that fits into 63 bits."""
NAME_CHARS_MAX: Final = 32
"""Characters of an unknown parameter's name in the answer."""


def check_names(request: Request, names: Sequence[str]) -> None:
    """Refuse unknown and repeated parameters with `HTTPException`."""
    seen = set[str]()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            text = f"no parameter {name[:NAME_CHARS_MAX]!a}; there are {', '.join(names)}"
            raise HTTPException(HTTPStatus.BAD_REQUEST, text)
        if name in seen:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        seen.add(name)


def read_choice(request: Request, name: str, choices: Sequence[str]) -> str | None:
    """Read a parameter with a few choices, or None; raises `HTTPException` for another value."""
    said = request.query_params.get(name)
    if said is not None and said not in choices:
        raise wrong(name, f"one of {', '.join(choices)}")
    return said


def read_number(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """Read a whole number from `low` to `high`; raises `HTTPException` for another value."""
    said = request.query_params.get(name)
    if said is None:
        return default
    is_number = said.isascii() and said.isdigit() and len(said) <= DIGITS_MAX
    if not is_number or not low <= int(said) <= high:
        raise wrong(name, f"a whole number from {low} to {high}")
    return int(said)


def wrong(name: str, wanted: str) -> HTTPException:
    """The answer to an invalid parameter."""
    return HTTPException(HTTPStatus.BAD_REQUEST, f"{name} must be {wanted}")
