"""The command `antiphon fork`: a recorded session continues from a unit with a change.

The recording is read twice and run once; the fork's log is written by the real recorder. The
environment is the recording's, unless another model or `anyway` is requested. The file appears when
the fork is complete; an aborted fork leaves no file. The log's head describes the fork in
`config.fork`, and its origin in `parent`. Result and comparison are on stdout, as text or as one
JSON object; progress is on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import click
from cattrs import unstructure
from rich.console import RenderableType

from protocol.values import events as ev
from protocol.values.model import SAMPLE_BYTES
from protocol.values.records import digest, session_id_of
from recorder.format.format import Fields, RecorderError, Value
from recorder.format.mapping import SCHEMA
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from recorder.write.files import new_file
from recorder.write.log import OnFailure, SessionLog
from recorder.write.writer import Recorder, RecorderPolicy
from runtime.media.sound import AudioFileError, read_wav
from runtime.model.backends.base import Backend, BackendInfo
from runtime.net.process import run
from runtime.session.journal import Journal
from runtime.session.setup import Identity, SystemIdentities

from ..diff import DiffReport, diff_lines, read_and_compare
from ..rerun.difference import label
from ..rerun.full import (
    FORK,
    IS_HELD,
    Loading,
    ModelUnavailableError,
    held_units,
    load_model,
    mismatches,
)
from ..shared.commands import NotComparableError, UnusableError, complaint, count, counted, finish
from ..shared.recordings import RecordingType, below, next_to
from .run import (
    SETTING_NAMES,
    CannotForkError,
    Change,
    Decided,
    Forked,
    ForkedModel,
    ForkError,
    ForkRefusedError,
    ForkRun,
    RecordedTimes,
    Watch,
    read_setting,
)

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
    """Fork a recording into a folder, created if missing; return the fork's log, and a summary.

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
    try:
        name, backend = load_model(head, change.model, load)
    except ModelUnavailableError as error:
        raise CannotForkError(f"{error}; to take another one: --model") from error
    is_elsewhere = _check(head, times, backend.info, change, anyway=anyway)
    connected = _connected(times, change, identity, backend.info)
    config = _config(head, change, backend.info, name=name, is_elsewhere=is_elsewhere)
    fields: dict[str, Value] = {
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
        "config": config,
        "fingerprint": dict(backend.info.fingerprint),
    }
    await anyio.Path(folder).mkdir(parents=True, exist_ok=True)
    path = Store(folder).path(identity.recording_id)
    # Without a thread or a clock, so that the same fork has the same bytes.
    recording = Recorder(RecorderPolicy(durability="none"), clock=lambda: 0.0, inline=True)
    with new_file(path, like=log) as part, LogReader(log) as reader, recording as recorder:
        logs: list[SessionLog] = []

        def open_log(on_failure: OnFailure) -> SessionLog:
            logs.append(recorder.open(part, fields, at_ns=0, on_failure=on_failure))
            return logs[0]

        journal = Journal(open_log, on_failure=lambda: None)
        forked_model = ForkedModel(backend, change.at, anyway=anyway)
        run = ForkRun(times, change, forked_model, journal, watch)
        session = await run.run(connected, reader)
        if logs[0].failure is not None:
            raise logs[0].failure
        if not run.is_reached:
            raise CannotForkError(f"the session ended before unit {change.at} began")
    note(times.decided, run.decided)
    of = (connected.recording_id, times.connected.recording_id, times.begin_seq, change.at, name)
    units = session.counts["units"]
    return path, Forked(*of, units, run.model.prefix, run.ended_early)


def _check(
    head: Fields, times: RecordedTimes, info: BackendInfo, change: Change, *, anyway: bool
) -> bool:
    """Whether the environment differs from the recording's: `CannotForkError` unless `anyway`."""
    mode = times.connected.mode
    if mode not in info.modes:
        raise CannotForkError(f"the model {info.name!r} does not serve mode {mode}")
    found = mismatches(head, info)
    if found and change.model is None and not anyway:
        shown = "; ".join(
            f"{label(line.name)} was {label(line.recorded)}, here {label(line.here)}"
            for line in found[:MISMATCHES_SHOWN]
        )
        text = f"the environment differs: {shown}; to fork all the same: --anyway"
        raise CannotForkError(text)
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


def _config(
    head: Fields, change: Change, info: BackendInfo, *, name: str, is_elsewhere: bool
) -> dict[str, Value]:
    of_the_opening = change.seed is not None or change.settings or change.model is not None
    is_other = bool(of_the_opening) or is_elsewhere or held_units(head) > 0
    changes: dict[str, Value] = {IS_HELD: change.at > 0 and is_other}
    changes |= {"force_listen": True} if change.force_listen else {}
    changes |= {"seed": change.seed} if change.seed is not None else {}
    changes |= {"settings": dict(change.settings)} if change.settings else {}
    if change.pcm is not None:
        samples = len(change.pcm) // SAMPLE_BYTES
        changes["replaced_audio"] = {"samples": samples, "blake2b": digest(change.pcm)}
    return {
        **below(head, "config"),
        "model": name,
        "deterministic": info.deterministic,
        "durability": "none",
        FORK: changes,
    }


# -- the command ----------------------------------------------------------------------------------


@click.command("fork")
@click.argument("log", type=RecordingType())
@click.option("--at", required=True, type=click.IntRange(min=0), help="The unit, from 0.")
@click.option("--force-listen", is_flag=True, help="Force that unit to listen, as if interrupted.")
@click.option(
    *("--replace-audio", "sound"),
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Replace the user's sound from that unit on by this file, then by silence.",
)
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Use another seed.")
@click.option(
    "--set",
    "settings",
    metavar="NAME=VALUE",
    multiple=True,
    help=f"Change a setting; repeatable. One of: {', '.join(SETTING_NAMES)}.",
)
@click.option("--model", help="Use another model than the recorded one.")
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the fork's log, created if missing [default: next to LOG].",
)
@click.option("--anyway", is_flag=True, help="Fork even if the environment or the model differs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fork_command(
    *,
    log: Path,
    sound: Path | None,
    settings: tuple[str, ...],
    out: Path | None,
    anyway: bool,
    as_json: bool,
    **how: Any,
) -> None:
    """Continue the session in LOG from a unit with a change: what would the model have said?

    The recorded inputs bring the model to its state at the beginning of that unit. From there on
    the model decides, while the client sends the recorded frames at the recorded times. The fork
    has its own log, which names its parent, and is compared with it, unit by unit. It ends where
    LOG ends.

    --seed, --set and --model take effect when a session opens. Forced decoding keeps the recorded
    decisions before the unit, so that they change only the unit and its successors; the model must
    support it. With --at 0 the whole session is played again.

    \b
    Examples:
      antiphon fork call.session.zst --at 12 --force-listen
      antiphon fork call.session.zst --at 12 --replace-audio question.wav
      antiphon fork call.session.zst --at 12 --seed 7 --set temperature=0.2
      antiphon fork call.session.zst --at 0 --model /models/other --json | jq .diff.first

    \b
    Exit codes:
      0  the fork was made
      2  a file cannot be read or written, LOG is damaged or does not have the unit, or the change
         is not possible
      3  LOG cannot be continued here: the environment differs, or the model is missing or does not
         reach the recorded state
      130  interrupted
    """  # noqa: D301 - click takes a backspace to keep the lines
    try:
        pcm = None if sound is None else read_wav(sound)
        named = dict(map(read_setting, settings))
        change = Change(pcm=pcm, settings=named, **how)
        folder = out or next_to(log, log.name).parent
        with count("fork", quiet=as_json) as watch:
            make = partial(make_fork, log, change, folder, load=Loading.load, anyway=anyway)
            path, forked = run(partial(make, identity=SystemIdentities().draw(), watch=watch))
    except (ForkRefusedError, AudioFileError) as error:
        raise UnusableError(str(error)) from error
    except ForkError as error:
        raise NotComparableError(str(error)) from error
    except (OSError, RecorderError) as error:
        raise UnusableError(complaint(error, log)) from error
    report = read_and_compare(log, path)
    body = {"log": str(path), "exit_code": 0, **unstructure(forked), "diff": unstructure(report)}
    finish(body, _lines(path, forked, report), as_json=as_json)


def _lines(path: Path, forked: Forked, report: DiffReport) -> list[RenderableType]:
    prefix = forked.prefix
    lines: list[RenderableType] = [
        str(path),
        f"a fork of {label(forked.parent)} at unit {forked.unit}, by model {label(forked.model)}:"
        f" {counted(forked.units, 'unit')}",
    ]
    if prefix.held:
        lines.append(
            f"before it, forced to the recording: {prefix.held} of {counted(prefix.units, 'unit')}"
        )
    if prefix.first is not None:
        lines.append(f"before it, not as recorded: {prefix.first}")
    if forked.ended_early:
        lines.append("it went on where the recording ends, so that its client left it there")
    return [*lines, "A is the parent, B the fork", *diff_lines(report)]
