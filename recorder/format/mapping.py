"""Which record holds which event or effect of the session machine, and how a log is stepped again.

Events are kept whole, to be read back and stepped again. Effects are kept only for comparison: a
sent frame verbatim (`tx`), others with bytes replaced by length and blake2b-128.

| record | of the machine |
|---|---|
| `rx` | `FrameReceived` |
| `tx` | `Send` |
| `prepare` | `BackendOpened` |
| `unit` | `UnitDone` |
| `finalize`, `rollback` | `FinalizeDone`, `FinalizeFailed`, `RollbackDone`, `RollbackFailed` |
| `turn` | `TurnPrefilled`, `TurnProgress`, `TurnDone` |
| `chunk` | `ChunkDone` |
| `event`, `effect` | all others |

Records have names of their own (`protocol.values.records`). A field that has its default is
left out.

A server steps a log again to go on with it, to rebuild a model or to fork it, and so does a replay.
The records of a step are written while a session runs; a replay, a redaction and a shrunk log make
them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar, get_args

import attrs
from cattrs import Converter
from cattrs.errors import CattrsError
from cattrs.fns import identity
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override

from protocol.machine.session import Session
from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.behaviour import SNAPSHOT
from protocol.values.effects import Effect
from protocol.values.errors import ErrorCode, LocalProtocolError
from protocol.values.events import Event
from protocol.values.frames import Frame, Utf8Text
from protocol.values.records import RECORD_FIELDS, RECORD_NAMES, digest

from .format import Fields, Record, Value

KINDS: Final[Mapping[type, str]] = {
    ev.FrameReceived: "rx",
    ev.BackendOpened: "prepare",
    ev.UnitDone: "unit",
    **dict.fromkeys((ev.FinalizeDone, ev.FinalizeFailed), "finalize"),
    **dict.fromkeys((ev.RollbackDone, ev.RollbackFailed), "rollback"),
    **dict.fromkeys((ev.TurnPrefilled, ev.TurnProgress, ev.TurnDone), "turn"),
    ev.ChunkDone: "chunk",
    ef.Send: "tx",
}
"""The record kind of each class; all others are `event` or `effect`."""

T = TypeVar("T")

EVENT_KINDS: Final = frozenset(
    {"rx", "prepare", "unit", "finalize", "rollback", "turn", "chunk", "event"}
)
EFFECT_KINDS: Final = frozenset({"tx", "effect"})
EVENTS: Final[Mapping[str, type[ev.Event]]] = {RECORD_NAMES[it]: it for it in get_args(ev.Event)}
EFFECTS: Final[Mapping[str, type[ef.Effect]]] = {RECORD_NAMES[it]: it for it in get_args(ef.Effect)}
"""The classes by their names in records."""


MACHINE_SCHEMA: Final = 1
"""Version of a log's events and effects, as in its head; a newer log is not comparable here."""
SCHEMA: Final[Mapping[str, int]] = {"machine": MACHINE_SCHEMA, "snapshot": SNAPSHOT}
"""The schema versions in the head of a new log."""
_EVENT_CLASSES: Final = frozenset(EVENTS.values())
_AT_NS: Final = frozenset({"at_ns"})
_SCALARS: Final = frozenset({int, float, str, bool, type(None)})
"""Most values, which need no call each."""
HASHES_KEPT: Final = 3
"""Of the pictures that wait for their unit; a fourth is hashed twice."""
HASHED_BYTES_MAX: Final = 256 << 10
"""The digests of larger objects are not kept, to save memory."""


class MappingError(ValueError):
    """A record does not hold a valid event."""


def event_record(event: ev.Event) -> tuple[str, dict[str, Value]]:
    """Return the kind of an event's record, and its plain fields with `type`, without `at_ns`."""
    cls = type(event)
    fields = _writer_of(cls)(event)
    fields["type"] = RECORD_NAMES[cls]
    return KINDS.get(cls, "event"), fields


class Hashes:
    """Digests of bytes; those of pictures to be proven are kept until they go to the model."""

    def __init__(self) -> None:
        self._kept: deque[tuple[bytes, str]] = deque(maxlen=HASHES_KEPT)

    def of(self, data: bytes) -> str:
        """Hash bytes, or give up the kept digest of the same object."""
        for place, (kept, found) in enumerate(self._kept):
            if kept is data:
                del self._kept[place]
                return found
        return digest(data)

    def keep(self, data: bytes) -> str:
        """Hash bytes that will be hashed once more."""
        made = digest(data)
        if len(data) <= HASHED_BYTES_MAX:
            self._kept.append((data, made))
        return made

    def forget(self) -> None:
        """Forget the kept digests, and release their bytes."""
        self._kept.clear()


def effect_record(effect: ef.Effect, hashes: Hashes | None = None) -> tuple[str, dict[str, Value]]:
    """Return the record for an effect, bytes as length and digest; `hashes` saves time."""
    if isinstance(effect, ef.Send):
        return "tx", {"type": "Send", "ordinal": effect.ordinal, "frame": effect.frame}
    hash_of = digest if hashes is None else hashes.of
    if hashes is not None and isinstance(effect, ef.DecodeMedia) and effect.kind == "jpeg":
        hash_of = hashes.keep
    cls = type(effect)
    fields = _all_hashed(_writer_of(cls)(effect), hash_of)
    fields["type"] = RECORD_NAMES[cls]
    return "effect", fields


def whole_effect(effect: ef.Effect) -> dict[str, Value]:
    """Return the plain fields of an effect with its bytes, for a process that performs it."""
    return {"type": RECORD_NAMES[type(effect)], **plain_of(effect)}


def event_of(fields: Fields, at_ns: int) -> ev.Event:
    """Read an event back; `MappingError` if a name, a field or a type is wrong."""
    cls, rest = _named(EVENTS, fields)
    return value_of(cls, {**rest, "at_ns": at_ns})


def effect_of(fields: Fields) -> ef.Effect:
    """Read an effect of `whole_effect` back; `MappingError` as of `event_of`."""
    return value_of(*_named(EFFECTS, fields))


def plain_of(instance: attrs.AttrsInstance) -> dict[str, Value]:
    """Return the plain fields of any value of a record."""
    return _writer_of(type(instance))(instance)


def value_of(cls: type[T], fields: Fields) -> T:
    """Read a value of `plain_of` back; `MappingError` if a field or a type is wrong."""
    try:
        return _CONVERTER.structure(fields, cls)
    except (TypeError, ValueError, KeyError, AttributeError, CattrsError) as error:
        raise MappingError(f"a record of {cls.__name__} does not hold one: {error}") from error


def _named(classes: Mapping[str, type[T]], fields: Fields) -> tuple[type[T], dict[str, Value]]:
    """The class that `type` names, and the other fields; `MappingError` if it is unknown."""
    rest = dict(fields)
    name = rest.pop("type", None)
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        raise MappingError("a record names no known event or effect")
    return cls, rest


def _all_hashed(values: Mapping[str, Value], hash_of: Callable[[bytes], str]) -> dict[str, Value]:
    return {k: v if type(v) in _SCALARS else _hashed(v, hash_of) for k, v in values.items()}


def _hashed(value: Value, hash_of: Callable[[bytes], str]) -> Value:
    if isinstance(value, bytes):
        return {"bytes": len(value), "blake2b": hash_of(value)}
    if isinstance(value, (dict, Mapping)):  # checking only the ABC is slow
        return _all_hashed(value, hash_of)
    if isinstance(value, (list, tuple)):
        return [_hashed(item, hash_of) for item in value]
    return value


# -- the converter: strict, since cattrs coerces primitives (5 -> "5", "no" -> True) -------------


def _strictly(kind: type) -> Callable[[object, object], object]:
    """A hook that accepts one type; an int is a float too. One call a value: a unit has dozens."""

    def strict(value: object, _: object) -> object:
        if type(value) is kind or (kind is float and type(value) is int):
            return value
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is due")

    return strict


def _ints(value: object, _: object) -> tuple[int, ...]:
    """Accept token ids, which are many, without a call for each."""
    if isinstance(value, list | tuple) and set(map(type, value)) <= {int}:
        return tuple(value)
    raise TypeError(f"a {type(value).__name__} where ints are due")


def _frame(value: object) -> object:
    """Accept a WebSocket message: text, bytes, or None for one that was too long."""
    if value is None or isinstance(value, str | bytes):
        return value
    raise TypeError(f"a {type(value).__name__} where a frame is due")


def _names(cls: type[attrs.AttrsInstance], *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The names of a class's attributes in records, as overrides for cattrs; `but` these names."""
    return {
        field.name: override(rename=name, omit=name in but or None)
        for field, name in RECORD_FIELDS[cls]
    }


def _make_converter() -> Converter:
    converter = Converter(forbid_extra_keys=True, detailed_validation=False, omit_if_default=True)

    def write(cls: Any) -> Any:
        """Write an instance; an event without its time, which its record has anyway."""
        but = _AT_NS if cls in _EVENT_CLASSES else frozenset[str]()
        return make_dict_unstructure_fn(
            cls, converter, _cattrs_omit_if_default=True, **_names(cls, but=but)
        )

    def read(cls: Any) -> Any:
        return make_dict_structure_fn(
            cls,
            converter,
            _cattrs_forbid_extra_keys=True,
            _cattrs_detailed_validation=False,
            **_names(cls),
        )

    converter.register_unstructure_hook_factory(RECORD_FIELDS.__contains__, write)
    converter.register_structure_hook_factory(RECORD_FIELDS.__contains__, read)
    for kind in (int, str, bytes, bool, float):
        converter.register_structure_hook(kind, _strictly(kind))
    converter.register_structure_hook_func(lambda kind: kind == tuple[int, ...], _ints)
    converter.register_structure_hook(Frame, lambda value, _: _frame(value))
    text = _strictly(str)
    converter.register_structure_hook(ErrorCode, lambda value, _: ErrorCode(str(text(value, _))))
    converter.register_unstructure_hook(Frame, identity)
    converter.register_unstructure_hook(Utf8Text, identity)
    converter.register_unstructure_hook(ErrorCode, lambda code: code.value)
    return converter


_CONVERTER: Final = _make_converter()
_writer_of: Final[Callable[[type], Callable[[Any], dict[str, Value]]]] = cache(
    _CONVERTER.get_unstructure_hook
)
"""Returns what writes the instances of a class."""


# -- the steps of a session ------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class LoggedStep:
    """A recorded event that was stepped, its effects, and the session, which goes on changing."""

    record: Record
    event: Event
    effects: tuple[Effect, ...]
    session: Session


def advance(session: Session | None, event: Event) -> tuple[Session, tuple[Effect, ...]]:
    """Step an event; the first one makes the session. `LocalProtocolError`: it cannot come next."""
    if session is not None:
        return session, session.step(event)
    if not isinstance(event, ev.ConnectionOpened):
        raise LocalProtocolError("a session begins with ConnectionOpened")
    return Session.open(event)


def steps(
    records: Iterable[Record],
    *,
    session: Session | None = None,
    edit: Callable[[Event], Event] = lambda event: event,
) -> Iterator[tuple[Record, LoggedStep | None]]:
    """Step a log's events in order: give each record, and its step if it is an event.

    What a log has of a step's effects are the records up to the next event. `session` is one that
    took the events before these; `edit` may change an event before it is stepped.

    Raises:
        MappingError: a record holds no event that this version knows.
        LocalProtocolError: the session refuses an event.
    """
    for record in records:
        step = None
        if record.kind in EVENT_KINDS:
            event = edit(event_of(record.fields, record.at_ns))
            session, effects = advance(session, event)
            step = LoggedStep(record=record, event=event, effects=effects, session=session)
        yield record, step


def step_records(
    session: Session, event: Event, effects: tuple[Effect, ...], hashes: Hashes
) -> list[tuple[str, Fields]]:
    """The records after an event's, by the stepped session: a state hash if due, and effects."""
    recorded: list[tuple[str, Fields]] = [effect_record(effect, hashes) for effect in effects]
    if session.is_hash_due(event):
        recorded.insert(0, ("state", {"digest": session.digest()}))
    return recorded


def fin_fields(session: Session | None, reason: str | None) -> dict[str, Value]:
    """The fields of `fin`, with the state of a finished session; a session of None never began."""
    if session is None:
        return {"reason": reason}
    state = {"digest": session.digest()} if session.is_finished else {}
    return {"reason": reason, "dialect": session.dialect_name, **session.counts, **state}
