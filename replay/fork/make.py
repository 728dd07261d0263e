"""Make a fork's file from a recording: read it twice, run once, write with the real recorder.

Rules: the environment is the recording's, unless another model or `anyway` is requested. The file
appears when the fork is complete; an aborted fork leaves no file. The log's head describes the
fork in `config.fork`, and its origin in `parent`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Final

import anyio
import attrs

from protocol.values import events as ev
from protocol.values.digest import digest, session_id_of
from protocol.values.model import SAMPLE_BYTES
from recorder.format.mapping import SCHEMA
from recorder.format.records import Fields, Value
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from recorder.write.files import new_file
from recorder.write.log import OnFailure, SessionLog
from recorder.write.writer import Recorder, RecorderPolicy
from runtime.model.backends.base import Backend, BackendInfo
from runtime.session.identity import Identity
from runtime.session.journal import Journal

from ..rerun.difference import label
from ..rerun.environment import Loading, loading_of, mismatches, model_of
from ..rerun.held import FORK, IS_HELD, held_units
from ..shared.fields import below
from .run import ForkRun, Watch
from .timeline import RecordedTimes
from .values import CannotForkError, Change, Decided, Forked

MISMATCHES_SHOWN: Final = 4
"""Of an environment: they must fit on one line."""

Load = Callable[[Loading], Backend]
"""Loads a model, as `Loading.load` does."""


async def make_fork(
    log: Path,
    change: Change,
    folder: Path,
    *,
    identity: Identity,
    load: Load,
    anyway: bool = False,
    watch: Watch = lambda _done, _units: None,
    note: Callable[[Decided, Decided], None] = lambda _recorded, _made: None,
) -> tuple[Path, Forked]:
    """Fork a recording into a folder, made if need be; return the fork's log, and a summary.

    Args:
        identity: its name; the seed is the recording's, unless it changes.
        load: loads a model, as `Loading.load` does.
        anyway: fork although the environment differs, or the model does not reach the state of the
            recording.
        watch: called with the number of finished units, and of all units.
        note: called with what the recording's model decided, and what this one did.

    Raises:
        ForkRefusedError: the request is not possible for this recording.
        CannotForkError: the recording cannot be continued here.
        RecorderError: the recording cannot be read, or is damaged.
        OSError: a file cannot be read or written.
    """
    with LogReader(log) as reader:
        head, times = reader.head.fields, RecordedTimes(reader, change.at)
    watch(0, times.units)
    name = change.model if change.model is not None else model_of(head)
    backend = _load(head, name, load)
    is_elsewhere = _check(head, times, backend.info, change, anyway=anyway)
    connected = _connected(times, change, identity, backend.info)
    fields = {
        **_head(head, times, connected),
        **_model_fields(head, change, backend.info, name=str(name), is_elsewhere=is_elsewhere),
    }
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    path = Store(folder).path(identity.recording_id)
    with new_file(path, like=log) as part, LogReader(log) as reader, _recorder() as recorder:
        logs: list[SessionLog] = []

        def open_log(on_failure: OnFailure) -> SessionLog:
            logs.append(recorder.open(part, fields, at_ns=0, on_failure=on_failure))
            return logs[0]

        journal = Journal(open_log, on_failure=lambda: None)
        run = ForkRun(times, change, backend, journal, anyway=anyway, watch=watch)
        session = await run.run(connected, reader)
        if logs[0].failure is not None:
            raise logs[0].failure
        if not run.is_reached:
            raise CannotForkError(f"the session ended before unit {change.at} began")
    note(times.decided, run.decided)
    forked = Forked(
        recording_id=connected.recording_id,
        parent=times.connected.recording_id,
        parent_seq=times.begin_seq,
        unit=change.at,
        model=str(name),
        units=session.counts["units"],
        prefix=run.model.prefix,
        ended_early=run.ended_early,
    )
    return path, forked


def _recorder() -> Recorder:
    """A recorder without a thread or a clock, so that the same fork has the same bytes."""
    return Recorder(RecorderPolicy(durability="none"), clock=lambda: 0.0, inline=True)


def _load(head: Fields, name: str | None, load: Load) -> Backend:
    if name is None:
        raise CannotForkError("the recording does not say which model made it: --model")
    try:
        return load(loading_of(head, name))
    except Exception as error:  # any error means that there is no model
        raise CannotForkError(f"the model {name!r} cannot be loaded: {error}") from error


def _check(
    head: Fields, times: RecordedTimes, info: BackendInfo, change: Change, *, anyway: bool
) -> bool:
    """Whether the environment differs from the recording's: `CannotForkError` unless `anyway`."""
    mode = times.connected.mode
    if mode not in info.modes:
        raise CannotForkError(f"the model {info.name!r} does not serve mode {mode}")
    found = mismatches(head, info)
    if found and change.model is None and not anyway:
        lines = [
            f"{label(line.name)} was {label(line.recorded)}, here {label(line.here)}"
            for line in found
        ]
        shown = "; ".join(lines[:MISMATCHES_SHOWN])
        raise CannotForkError(f"the environment differs: {shown}; to fork all the same: --anyway")
    return bool(found)


def _connected(
    times: RecordedTimes, change: Change, identity: Identity, info: BackendInfo
) -> ev.ConnectionOpened:
    limits = times.connected.limits
    if change.model is not None:
        limits = attrs.evolve(
            limits,
            context_tokens=info.context_limit,
            sliding_windows=info.sliding_windows,
            can_rollback=info.can_rollback,
        )
    return attrs.evolve(
        times.connected,
        recording_id=identity.recording_id,
        created_ms=identity.created_ms,
        seed=times.connected.seed if change.seed is None else change.seed,
        limits=limits,
    )


def _head(head: Fields, times: RecordedTimes, connected: ev.ConnectionOpened) -> dict[str, Value]:
    return {
        **head,
        "recording_id": connected.recording_id,
        "session_id": session_id_of(connected.recording_id),
        "schema": SCHEMA,
        "software": {"antiphon": version("antiphon")},
        "seed": connected.seed,
        "wall_ms": connected.created_ms,
        "parent": {
            "recording": times.connected.recording_id,
            "seq": times.begin_seq,
            "unit": times.at,
        },
    }


def _model_fields(
    head: Fields, change: Change, info: BackendInfo, *, name: str, is_elsewhere: bool
) -> dict[str, Value]:
    is_other = change.is_of_the_opening or is_elsewhere or held_units(head) > 0
    told: dict[str, Value] = {IS_HELD: change.at > 0 and is_other}
    told |= {"force_listen": True} if change.force_listen else {}
    told |= {"seed": change.seed} if change.seed is not None else {}
    told |= {"settings": dict(change.settings)} if change.settings else {}
    if change.pcm is not None:
        samples = len(change.pcm) // SAMPLE_BYTES
        told["replaced_audio"] = {"samples": samples, "blake2b": digest(change.pcm)}
    own: dict[str, Value] = {
        "model": name,
        "deterministic": info.deterministic,
        "durability": "none",
        FORK: told,
    }
    return {"config": {**below(head, "config"), **own}, "fingerprint": dict(info.fingerprint)}
