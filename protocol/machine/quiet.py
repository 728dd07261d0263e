"""Quiet sound: pieces that fill no second, of which a client may send fifty a second.

All that a session does with one is keep it. So pieces that are there together are taken together.

Rules: `keep` leaves the session as stepping each piece by itself would, and those steps have no
effects. `room_bytes` may say less than there is, never more. A replay steps each by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from ..values.digest import derive_id
from ..values.limits import UNIT_FRAMES_MAX
from ..values.model import UNIT_BYTES
from ..values.requests import Append, AppendSound, ClientMessage
from .core import Core
from .duplex import Duplex
from .live import Live
from .transcription import SECOND_BYTES, Transcription
from .units import Attachments


def first(core: Core, messages: Iterable[ClientMessage | None]) -> list[ClientMessage]:
    """Take the first messages that are quiet; None is no append."""
    rule, found = _RULES.get(type(core)), list[ClientMessage]()
    if rule is None or core.is_closed:
        return found
    left = rule.room_bytes(core)
    for message in messages if left > 0 else ():
        if not isinstance(message, rule.sound) or core.refused(message) is not None:
            break
        left -= _size_bytes(message)
        if left < 0:
            break
        found.append(message)
    return found


def keep(core: Core, messages: Sequence[Any]) -> None:
    """Take quiet messages."""
    core.said, core.taken, core.cause = [], messages[-1], ""
    for message in messages:
        core.heard()
        core.fields_ignored += len(message.ignored)
    _RULES[type(core)].keep(core, messages)


def _size_bytes(message: Append | AppendSound) -> int:
    """The bytes of sound of a message; for one with more than sound, a whole second."""
    if isinstance(message, AppendSound):
        return len(message.pcm16)
    return UNIT_BYTES if message.frames or message.force_listen else len(message.pcm)


@attrs.frozen
class _Rule:
    """How a course takes sound.

    Attributes:
        sound: the class of its messages.
        room_bytes: the bytes of sound that it keeps; one more might fill a second.
        keep: keeps the sound of messages.
    """

    sound: type[Append | AppendSound]
    room_bytes: Callable[[Any], int]
    keep: Callable[[Any, Sequence[Any]], None]


def _room_of_unit(core: Duplex) -> int:
    is_plain = not (core.seen or core.lockstep or core.is_hushed or core.opened.limits.barge_in)
    is_right = len(core.assembler.attached.frames) <= UNIT_FRAMES_MAX  # else the client is told
    return UNIT_BYTES - 1 - len(core.assembler.remainder) if is_plain and is_right else 0


def _keep_for_unit(core: Duplex, messages: Sequence[Append]) -> None:
    core.appends += len(messages)
    last = messages[-1]
    slices = [message.max_slice_nums for message in messages if message.max_slice_nums is not None]
    attached = Attachments(
        input_id=last.input_id or derive_id("input", core.opened.recording_id, core.appends - 1),
        max_slice_nums=slices[-1] if slices else None,
    )
    core.assembler.add(b"".join([message.pcm for message in messages]), attached)


def _room_of_second(core: Live) -> int:
    is_plain = core.coding == "audio/pcm"
    return core.second_bytes - 1 - len(core.unheard) if is_plain else 0


def _keep_for_second(core: Live, messages: Sequence[AppendSound]) -> None:
    for message in messages:
        core.append_sound(message)


def _room_of_chunk(core: Transcription) -> int:
    """The room in the open utterance, if it is the only one, or the model is at work."""
    if not core.pending or core.is_revoked or core.is_asleep:
        return 0
    last, left = core.pending[-1], core.opened.limits.sound_bytes - core.waiting_bytes
    if last.is_final or last.is_answered:
        return 0
    if not core.call.is_idle:
        return left
    return min(left, SECOND_BYTES - 1 - len(last.sound)) if len(core.pending) == 1 else 0


def _keep_for_chunk(core: Transcription, messages: Sequence[AppendSound]) -> None:
    core.appends += len(messages)
    pcm16 = b"".join([message.pcm16 for message in messages])
    core.pending[-1].sound += pcm16
    core.waiting_bytes += len(pcm16)


_RULES: Final[Mapping[type[Core], _Rule]] = {
    Duplex: _Rule(Append, _room_of_unit, _keep_for_unit),
    Live: _Rule(AppendSound, _room_of_second, _keep_for_second),
    Transcription: _Rule(AppendSound, _room_of_chunk, _keep_for_chunk),
}
