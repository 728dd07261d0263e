"""Places for expensive answers: a few in all, and fewer for a client."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..access.keys import Key
from ..access.middleware import principal_of

RETRY_S: Final = 5
"""Seconds until a place may be free."""
REFUSAL: Final = "there are too many of these at once"


class Places:
    """Places for one kind of answer: in all, and for one key, or address without keys.

    `refusal`: the text for a client without a place.
    """

    def __init__(self, most: int, most_each: int, refusal: str = REFUSAL) -> None:
        self._most = most
        self._most_each = most_each
        self._refusal = refusal
        self._taken: Counter[str] = Counter()

    def take(self, request: Request) -> ExitStack:
        """Take a place, given back on leaving the stack; raises `HTTPException` (503) for none."""
        return self.take_for(principal_of(request), request.client.host if request.client else "")

    def take_for(self, principal: Key, host: str) -> ExitStack:
        """Take a place as `take` does, for the client at an address."""
        name = principal.name or f"@{host}"
        if self._taken.total() >= self._most or self._taken[name] >= self._most_each:
            headers = {"Retry-After": str(RETRY_S)}
            raise HTTPException(HTTPStatus.SERVICE_UNAVAILABLE, self._refusal, headers)
        self._taken[name] += 1
        place = ExitStack()
        place.callback(self._give_back, name)
        return place

    def _give_back(self, name: str) -> None:
        self._taken[name] -= 1
        if not self._taken[name]:
            del self._taken[name]
