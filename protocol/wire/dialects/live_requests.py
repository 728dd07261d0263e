"""What a client of `live` says: `session.start`, sound, and the little that changes a session."""

from __future__ import annotations

from typing import Any, Final

import attrs

from ...values.errors import (
    ErrorCode,
    FieldError,
)
from ...values.items import Item, Part
from ...values.limits import INPUT_ID_CHARS_MAX, ITEM_CHARS_MAX
from ...values.live import (
    Mute,
    Unmute,
    Update,
)
from ...values.requests import AppendSound, CloseRequest, Init, Request, VoiceName
from ...values.sound import CODINGS, G711_RATE_HZ, LIVE_RATES_HZ
from ..codec import Fields, Value
from ..field import DROPPED, Field
from ..kinds import (
    NAMED,
    PIECE,
    SAID,
    STOCK_VOICES,
    TEXT,
    VOICE_BY_NAME,
    Kind,
    choice,
    text,
)
from ..nested import items, one
from ..reading import Reading
from ..table import Object, Table
from . import shared
from .inputs import PROMPT, RECORD

SESSION_START: Final = "session.start"
AUDIO_APPEND: Final = "session.input_audio.append"
HISTORY_MAX: Final = 128
"""Messages before the session, as the API has them."""
UNSUPPORTED: Final = frozenset(
    {
        "session.instructions.append",
        "session.thinking.append",
        "session.commentary.append",
        "session.output_audio.fixture.play",
        "decision.create",
        "decision.item.create",
        "decision.item.delete",
        "response.create",
        "response.item.create",
        "transport.dtmf.send",
    }
)
"""Events of the API that ask for what the model cannot do."""

_EMPTY: Final = "Must be empty here."
_CLOSED: Final = ErrorCode.UNKNOWN_PARAMETER
"""An unknown field is such an error."""


def _event_id(attr: str = "event_id") -> Field:
    kind = text(INPUT_ID_CHARS_MAX, holds=NAMED)
    return Field("event_id", kind, "", attr=attr, omit=True, rank=9)


def unsupported(path: str, what: str) -> FieldError:
    """Make the error for a value or event of the API that is not offered here."""
    return FieldError(ErrorCode.UNSUPPORTED, f"{path}: {what}")


def only(options: tuple[str, ...], offered: str, what: str, *more: str) -> Kind:
    """A word of the API of which only one is offered here, and `more` that mean the same."""

    def read(value: Value, _: Reading) -> str:
        if value.choice(options) not in (offered, *more):
            raise unsupported(value.path, what)
        return offered

    return Kind(read=read, schema=choice((offered, *more)).schema)


def empty(what: str) -> Kind:
    """A list of the API that must be empty here."""

    def read(value: Value, _: Reading) -> tuple[()]:
        if value.items(1024):
            raise unsupported(value.path, what)
        return ()

    return Kind(read=read, schema={"type": "array", "const": []})


def _rate(value: Value, at: Reading) -> int:
    found, coding = value.integer(), at.values.get("live.coding") or "audio/pcm"
    if coding != "audio/pcm" and found != G711_RATE_HZ:
        raise unsupported(value.path, f"{found} Hz, {coding} has 8000")
    if coding == "audio/pcm" and found not in LIVE_RATES_HZ:
        raise unsupported(value.path, f"{found} Hz, there are 24000 and 16000")
    return found


RATE: Final = Kind(read=_rate, schema={"type": "integer", "enum": [*LIVE_RATES_HZ, G711_RATE_HZ]})
_NO_TRIGGERS: Final = empty("there are no decisions")
_TARGETS: Final = ("client", "responses")


def _target(value: Value, _: Reading) -> str:
    found = value.choice((*_TARGETS, "decisions"))
    if found not in _TARGETS:
        raise unsupported(value.path, "there are no decisions")
    return found


_TARGET: Final = Kind(read=_target, schema=choice(_TARGETS).schema)


def _delegation(attr: str, backend: str, **how: Any) -> Object:
    return Object(
        "delegation",
        (
            Field(
                "type",
                _TARGET,
                None,
                attr=attr,
                omit=True,
                doc="The model delegates nothing.",
                **how,
            ),
            Object(
                "responses",
                (
                    Field("model", TEXT, "", attr=backend, omit=True, doc="Told again."),
                    Field("tools", empty("the model has no tools"), (), attr=DROPPED, doc=_EMPTY),
                ),
                omit=True,
                doc="Of the model to which tasks would be delegated; other fields are ignored.",
            ),
            Field(
                "acknowledgement_delay_ms",
                Kind(read=lambda *_: None, schema={}, holds=SAID),
                None,
                attr=DROPPED,
                doc="Ignored: nothing is delegated.",
            ),
        ),
        omit=True,
        closed=_CLOSED,
        doc="Who handles delegated tasks; the model delegates none.",
    )


def _voice(value: Value, at: Reading) -> VoiceName | None:
    """Read a voice by its name, or by its `id`; None for the model's own."""
    if isinstance(value.value, dict):
        fields = Fields(value.value, value.path)
        value = fields.required("id", lambda name: name)
        fields.refuse_unknown()
    found: VoiceName = VOICE_BY_NAME.read(value, at)
    return None if found.name in STOCK_VOICES else found


_VOICE: Final = attrs.evolve(VOICE_BY_NAME, read=_voice)


_PART: Final = Table(
    Part,
    Field("type", choice(("input_text", "text", "output_text")), None, attr=DROPPED, doc="Text."),
    Field("text", text(ITEM_CHARS_MAX, holds=SAID)),
    make=lambda values: Part(kind="input_text", **values),
)
_ITEM: Final = Table(
    Item,
    Field("id", text(INPUT_ID_CHARS_MAX, holds=NAMED), None, attr=DROPPED, doc="Ignored."),
    Field("type", choice(("message",)), None, attr=DROPPED, doc="Always message."),
    Field("role", choice(("developer", "user", "assistant"))),
    Field("status", choice(("completed", "incomplete")), None, attr=DROPPED, doc="Ignored."),
    Field("content", items(one(_PART), 1, 1), attr="parts"),
)
_START: Final = Table(
    Init,
    Object(
        "session",
        (
            Field("model", TEXT, attr="live.model"),
            Object(
                "audio",
                (
                    Object(
                        "format",
                        (
                            Field("type", choice(CODINGS), "audio/pcm", attr="live.coding"),
                            Field("rate", RATE, LIVE_RATES_HZ[0], attr="live.rate_hz"),
                        ),
                        closed=_CLOSED,
                    ),
                    Object(
                        "output",
                        (Field("voice", _VOICE, None, attr="ref_audio", omit=True),),
                        omit=True,
                        closed=_CLOSED,
                    ),
                ),
                closed=_CLOSED,
            ),
            _delegation("live.delegation", "live.backend"),
            Field("input", items(one(_ITEM), HISTORY_MAX), (), attr="live.history", omit=True),
            Field("instructions", PROMPT, "", omit=True),
            Field(
                "safety_identifier",
                text(INPUT_ID_CHARS_MAX, holds=NAMED),
                "",
                attr="live.safety_identifier",
                omit=True,
            ),
            Field("store", RECORD.kind, True, attr="record", omit=True),
            Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=_EMPTY),
        ),
        is_required=True,
        closed=_CLOSED,
    ),
    _event_id("live.event_id"),
    tag={"type": SESSION_START},
    closed=_CLOSED,
)
FORK_START: Final = Table(
    Init,
    Object(
        "session",
        (
            Field("model", TEXT, "", attr="live.model", omit=True),
            Object(
                "audio",
                (
                    Object(
                        "format",
                        (
                            Field("type", choice(CODINGS), "", attr="live.coding"),
                            Field("rate", RATE, 0, attr="live.rate_hz"),
                        ),
                        closed=_CLOSED,
                    ),
                ),
                closed=_CLOSED,
            ),
            _delegation("live.delegation", "live.backend"),
            Field("store", RECORD.kind, True, attr="record", omit=True),
        ),
        is_required=True,
        closed=_CLOSED,
    ),
    _event_id("live.event_id"),
    tag={"type": SESSION_START},
    closed=_CLOSED,
    lacks={"instructions": ""},
)
"""The `session.start` of a fork, in which all else is as it was; an empty text or 0: this too."""
_UPDATE: Final = Table(
    Update,
    Object(
        "session",
        (
            _delegation(DROPPED, DROPPED, get=lambda _: "client"),
            Field("triggers", _NO_TRIGGERS, (), attr=DROPPED, doc=_EMPTY),
        ),
        is_required=True,
        closed=_CLOSED,
    ),
    _event_id(),
    tag={"type": shared.SESSION_UPDATE},
    closed=_CLOSED,
)
_CLOSE: Final = Table(
    CloseRequest,
    Field(
        "event_id",
        Kind(read=lambda *_: None, schema={}, holds=SAID),
        None,
        attr=DROPPED,
        doc="Ignored.",
    ),
    tag={"type": shared.SESSION_CLOSE},
    lacks={"reason": None},
)
"""It is honoured in every state, so nothing in it is refused."""
REQUESTS: Final = {
    Request.INIT: _START,
    Request.APPEND: Table(
        AppendSound,
        Field("audio", PIECE, attr="pcm16"),
        Field("event_id", text(INPUT_ID_CHARS_MAX, holds=NAMED), "", attr=DROPPED, doc="Ignored."),
        tag={"type": AUDIO_APPEND},
        closed=_CLOSED,
    ),
    Request.MUTE: Table(
        Mute, _event_id(), tag={"type": "session.input_audio.mute"}, closed=_CLOSED
    ),
    Request.UNMUTE: Table(
        Unmute, _event_id(), tag={"type": "session.input_audio.unmute"}, closed=_CLOSED
    ),
    Request.UPDATE: _UPDATE,
    Request.CLOSE: _CLOSE,
}
