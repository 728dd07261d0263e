"""The parameters of a request's address, read strictly: a filter with a slip in it would be none.

What is wrong is 400, and says what would be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

DIGITS_MAX: Final = 18
"""Of a number: what fits into 63 bits, whatever its digits."""
NAME_CHARS_MAX: Final = 32
"""Of a parameter's own name that is told back."""


def check_names(request: Request, names: Sequence[str]) -> None:
    """Refuse parameters that there are not, and those that are given twice.

    Raises:
        HTTPException: there is one.
    """
    seen = set[str]()
    for name, _ in request.query_params.multi_items():
        if name not in names:
            text = f"no parameter {name[:NAME_CHARS_MAX]!a}; there are {', '.join(names)}"
            raise HTTPException(HTTPStatus.BAD_REQUEST, text)
        if name in seen:
            raise HTTPException(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        seen.add(name)


def read_choice(request: Request, name: str, choices: Sequence[str]) -> str | None:
    """Read a parameter that is one of a few words; None where it is not given.

    Raises:
        HTTPException: it is none of them.
    """
    said = request.query_params.get(name)
    if said is not None and said not in choices:
        raise wrong(name, f"one of {', '.join(choices)}")
    return said


def read_number(request: Request, name: str, default: int, *, low: int, high: int) -> int:
    """Read a parameter that is a whole number.

    Args:
        request: whose.
        name: of the parameter.
        default: where it is not given.
        low: the least that is taken.
        high: the greatest.

    Raises:
        HTTPException: it is none, or out of range.
    """
    said = request.query_params.get(name)
    if said is None:
        return default
    is_number = said.isascii() and said.isdigit() and len(said) <= DIGITS_MAX
    if not is_number or not low <= int(said) <= high:
        raise wrong(name, f"a whole number from {low} to {high}")
    return int(said)


def wrong(name: str, wanted: str) -> HTTPException:
    """Make the answer to a parameter that is not what it should be."""
    return HTTPException(HTTPStatus.BAD_REQUEST, f"{name} must be {wanted}")
