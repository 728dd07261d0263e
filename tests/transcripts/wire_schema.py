"""Whether a body is one that the AsyncAPI document describes, for tests of what crosses the wire.

The document lets servers add fields, as clients must expect. Here they may not: a server's body has
the fields that are described, so that none is sent that no reader can know of.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from jsonschema import Draft7Validator

from protocol.values.state import SessionKind
from protocol.wire.dialects import MODES_OF
from protocol.wire.schema import Message, describe

Sender = Literal["client", "server"]
Body = Mapping[str, Any]


def conforms(
    dialect: str, sender: Sender, body: Body, session_kind: SessionKind | None = None
) -> bool:
    """Whether a body is described.

    Args:
        dialect: its name.
        sender: who sends the body.
        body: the JSON object.
        session_kind: of the session, where it is known; else any of the dialect's will do.
    """
    return not problems(dialect, sender, body, session_kind)


def problems(
    dialect: str, sender: Sender, body: Body, session_kind: SessionKind | None = None
) -> tuple[str, ...]:
    """Say what of a body is not described; see `conforms`. Empty where all of it is."""
    found: tuple[str, ...] = (f"{dialect} has no such message of the {sender}",)
    for message, validator in _validators(dialect, sender):
        if message.kind and message.kind != body.get("type"):
            continue
        if session_kind is not None and session_kind not in message.session_kinds:
            continue
        errors = tuple(
            f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(body)
        )
        if not errors:
            return ()
        found = errors
    return found


@cache
def _validators(dialect: str, sender: Sender) -> tuple[tuple[Message, Draft7Validator], ...]:
    assert dialect in MODES_OF
    return tuple(
        (
            message,
            Draft7Validator(_closed(message.schema) if sender == "server" else message.schema),
        )
        for message in describe(dialect)
        if message.sender == sender
    )


def _closed(schema: Any) -> Any:
    """Refuse fields that are not described, in all objects of a schema."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _closed(value) for key, value in schema.items()}
    return {**made, "additionalProperties": False} if "properties" in schema else made
