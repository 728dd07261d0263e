"""Golden logs: one session a file, made once and replayed for ever.

`python -m tests.golden.logs` makes those that are missing, on virtual time, beside a readable twin
(`.jsonl`, a record or a damage a line, bytes named by length and hash). One that exists is never
written again: if it no longer replays, the machine has changed its mind about the past, and either
that is a bug or the log needs a new version and an upcast.

The other modules here hold what is played, and `damage` what happens to some of the logs
afterwards: those are kept as they are found after a crash or on a rotten disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zlib import crc32

import attrs

from protocol.values.records import digest
from recorder.format.format import SUFFIX, Record
from recorder.read.reader import LogReader
from recorder.read.scan import Damage
from runtime.model.backends.scripted import ScriptedBackend
from tests.golden.chat import CHAT_SCENES
from tests.golden.damage import HARMS
from tests.golden.forking import FORKING_SCENES
from tests.golden.moving import MOVING_SCENES
from tests.golden.openai import OPENAI_SCENES
from tests.golden.openings import OPENING_SCENES
from tests.golden.resuming import RESUMING_SCENES
from tests.golden.scenes import DUPLEX_SCENES
from tests.golden.stage import Scene, eventful
from tests.golden.stale import CHANGES, changed
from tests.golden.states import STATE_SCENES
from tests.golden.tools import TOOL_SCENES
from tests.golden.transcription import TRANSCRIPTION_SCENES
from tests.project.sampling import sample
from tests.sessions.in_memory import on_virtual_time, world

FOLDER = Path(__file__).parents[2] / "fixtures" / "logs"
LOGS = sorted(FOLDER.glob(f"*{SUFFIX}"))
SAMPLE = sample(LOGS, [path for path in LOGS if crc32(path.name.encode()) % 3 == 1])
"""For tests that would find the same in most of them; by name, so that a new log moves no other."""
HASHES = Path(__file__).with_name("hashes.json")
"""A log that changes, or goes, is caught by it: a change of behaviour gets a number instead."""
SCENES: dict[str, Scene] = {
    **DUPLEX_SCENES,
    **CHAT_SCENES,
    **TRANSCRIPTION_SCENES,
    **OPENING_SCENES,
    **STATE_SCENES,
    **MOVING_SCENES,
    **RESUMING_SCENES,
    **OPENAI_SCENES,
    **TOOL_SCENES,
    **FORKING_SCENES,
}


def record(scene: Scene, folder: Path) -> Path:
    """Run a scene; returns the log of its last session."""

    async def body() -> None:
        backend = ScriptedBackend(**{"script": eventful, "slots": 2, **scene.backend})
        # Not the script that `--model scripted` plays: a full replay must say so.
        fingerprint = {**backend.info.fingerprint, "script": eventful.__name__}
        backend.info = attrs.evolve(backend.info, fingerprint=fingerprint)
        async with world(backend, record_to=folder, **scene.settings) as server:
            await scene.play(server)

    on_virtual_time(body)
    return max(folder.glob("*" + SUFFIX))


def made(name: str) -> bytes:
    """Make a golden log anew: a scene's, or a harmed one."""
    if name in CHANGES:
        other, change = CHANGES[name]
        return changed(FOLDER / f"v1-{other}{SUFFIX}", change)
    scene, harm = HARMS.get(name, (name, bytes))
    with TemporaryDirectory() as folder:
        return harm(record(SCENES[scene], Path(folder)).read_bytes())


def items(path: Path) -> list[Record | Damage]:
    """Read all that can be read of a log."""
    with LogReader(path) as reader:
        return list(reader)


def twin(found: Iterable[Record | Damage]) -> str:
    """Write records and damage as readable JSON lines."""
    return "".join(json.dumps(_line(item), sort_keys=True) + "\n" for item in found)


def _line(item: Record | Damage) -> dict[str, Any]:
    if isinstance(item, Damage):
        return {"damage": attrs.asdict(item)}
    return {
        "seq": item.seq,
        "at_ns": item.at_ns,
        "kind": item.kind,
        "fields": _readable(item.fields),
    }


def _readable(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": len(value), "blake2b": digest(value)}
    if isinstance(value, str) and len(value) > 400:
        return {"chars": len(value), "blake2b": digest(value), "begins": value[:120]}
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(item) for item in value]
    return value


def twin_path(path: Path) -> Path:
    """Say where a log's readable twin is."""
    return path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")


def hash_of(path: Path) -> str:
    """A log's hash, by which it is frozen."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def frozen() -> dict[str, str]:
    """The hash of each golden log, by its name, as it was when it was made."""
    hashes: dict[str, str] = json.loads(HASHES.read_text())
    return hashes


def main() -> None:
    """Make the golden logs that are missing, and freeze them."""
    FOLDER.mkdir(exist_ok=True)
    hashes = frozen()
    for name in (*SCENES, *CHANGES, *HARMS):
        path = FOLDER / f"v1-{name}{SUFFIX}"
        if path.exists():
            continue
        path.write_bytes(made(name))
        twin_path(path).write_text(twin(items(path)))
        hashes[path.name] = hash_of(path)
        print(f"made {path.name}: {path.stat().st_size} bytes")
    HASHES.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
