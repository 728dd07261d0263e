"""Requests over HTTP to a real server, one a connection, for exactly the path that is given."""

from __future__ import annotations

import http.client
import json
from typing import Any, Final

import attrs

WAIT_S: Final = 20
"""Real seconds after which a server hangs."""


@attrs.frozen
class Answer:
    """What was answered; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def said(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


def request(
    address: tuple[str, int],
    path: str,
    *,
    method: str = "GET",
    key: str = "",
    body: Any = None,
    headers: dict[str, str],
) -> Answer:
    """Ask a server.

    Args:
        address: host and port.
        path: sent as it is.
        method: of the request.
        key: the bearer's; empty for none.
        body: of the request; None for none.
        headers: underscores in their names stand for hyphens.
    """
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    if key:
        given["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(*address, timeout=WAIT_S)
    try:
        connection.request(method, path, body=body, headers=given)
        answer = connection.getresponse()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, names, answer.read())
    finally:
        connection.close()
