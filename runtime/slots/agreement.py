"""What the workers of a server must agree on: all that sessions are told, and all that they log."""

from __future__ import annotations

from typing import Final

from protocol.values.digest import digest

from ..model.backends.base import BackendInfo

DIFFERENCES_TOLD: Final = 3
"""Another model differs in everything: a few differences are enough."""
INSTANCE: Final = "instance"
"""The fingerprint entry that names one backend; it may differ between workers."""
HASH_CHARS: Final = 12
"""Enough to tell the models of a server apart."""

_AGREED: Final = (
    "modes",
    "context_limit",
    "sliding_windows",
    "can_rollback",
    "can_rebuild",
    "can_speak",
    "deterministic",
)
"""Besides the fingerprint."""


class WorkersDifferError(ValueError):
    """A worker cannot stand in for another; the text names the differences."""


def shared(info: BackendInfo) -> dict[str, str]:
    """A fingerprint without the entry that names the instance."""
    return {name: value for name, value in info.fingerprint.items() if name != INSTANCE}


def short_hash(info: BackendInfo) -> str:
    """A short hash of a fingerprint, the same for all workers that agree: 12 hex digits."""
    return digest(shared(info))[:HASH_CHARS]


def check_agreement(first: BackendInfo, other: BackendInfo, name: str) -> None:
    """Raise `WorkersDifferError` if the worker called `name` does not agree with the first."""
    values = {name: (getattr(first, name), getattr(other, name)) for name in _AGREED}
    ours, theirs = shared(first), shared(other)
    for entry in sorted(ours | theirs):
        values[f"fingerprint {entry}"] = ours.get(entry), theirs.get(entry)
    differences = [
        f"{name} is {its}, not {own}" for name, (own, its) in values.items() if own != its
    ]
    if differences:
        told = "; ".join(differences[:DIFFERENCES_TOLD])
        if len(differences) > DIFFERENCES_TOLD:
            told += f"; and {len(differences) - DIFFERENCES_TOLD} more"
        raise WorkersDifferError(f"{name} cannot stand in for worker 0: {told}")
