"""What this server does not have, and another gateway may (`serve.gateways`)."""

from __future__ import annotations

from http import HTTPStatus

from starlette.exceptions import HTTPException


class NotHere(HTTPException):
    """A client asks for a session or recording that it cannot see here; without gateways a 404.

    Args:
        name: the id that it asked for, unchecked.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(HTTPStatus.NOT_FOUND, detail)
        self.name = name
