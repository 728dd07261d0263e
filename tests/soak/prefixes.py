"""A server that is killed after each block of a session's log, in every mode: `make soak`.

    python -m tests.soak.prefixes [--out FOLDER]

What a kill leaves of a log is its first blocks, the last one maybe torn. So for each block a server
in memory, on virtual time, is given the log up to there and takes the session up; its client comes
back with what it had heard by then, sends what the session does not have, and ends. What was heard
in all is what the log holds, each frame once and in order; it says the same as the life that was
not killed, but for times and costs; and the log is whole and replays. Where the client stays away,
the session ends by itself, and its log is whole too.

What was found goes to `prefixes.json`, without a date; it exits with 1 where anything was not so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import anyio
import attrs

from protocol.values.errors import CLOSE_NORMAL
from protocol.values.events import Endpoint
from protocol.values.limits import NS_PER_S, Mode
from protocol.wire.dialects.shared import SESSION_RESUMABLE
from recorder.format import format as log_format
from recorder.read.reader import LogReader, read
from recorder.read.scan import Damage, FileSource, Scanner
from recorder.repair import verify
from recorder.storage.store import Store
from replay.rerun.logic import replay
from runtime.session import crash_recovery
from tests.golden.stage import picture
from tests.project.evidence import add_out
from tests.sessions.chatting import question
from tests.sessions.in_memory import (
    Peer,
    World,
    append_frame,
    append_sound,
    base64,
    close_frame,
    init_frame,
    on_virtual_time,
    world,
)

ATTACHED: Final = "PeerAttached"
DECODE_S: Final = 0.8
"""Media is in the decoder when the answer to the second before it is sent."""
TRIES: Final = 2
"""A client that comes as its session ends hears the end when it comes again."""
KILLED_NS: Final = 1_800_000_000 * NS_PER_S
UNTIL_FOUND_NS: Final = NS_PER_S // 50
"""From there until the next server looks, by the wall clock; a busy machine would take seconds."""
BLOCK_BYTES: Final = 256 << 10
"""Less than a second of `openai` takes, so that a kill may leave a part of a step."""
ALONE_S: Final = 700.0
"""A client is waited for 600 s."""
HEARD: Final = ("type", "kind", "text", "audio", "delta", "transcript", "code", "reason")
"""Fields of a frame that say something; the others are times, costs, ids and numbers."""


@attrs.frozen
class Life:
    """A session: its mode and address, and its client's messages, each with a wait after it.

    After `lost_after` of them the connection is lost, for `away_s` seconds.
    """

    mode: Mode
    messages: Sequence[tuple[str, float]]
    endpoint: Endpoint = "realtime"
    lost_after: int = 0
    away_s: float = 0.0


def _said(**body: object) -> str:
    return json.dumps(body)


def _seconds(count: int, **more: object) -> list[tuple[str, float]]:
    return [(append_frame(**more), 1.0) for _ in range(count)]


def _asks(*texts: str, **more: object) -> list[tuple[str, float]]:
    asked = [question({"type": "text", "text": text}, streaming=True, **more) for text in texts]
    return [(_said(type="input.append", input=it), 30.0) for it in asked]


_INIT: Final = (init_frame(config={"force_listen_count": 1}), 1.0)
_CLOSE: Final = (close_frame(), 1.0)
_COMMIT: Final = (_said(type="input_audio_buffer.commit", final=False), 2.0)
_LIVE_START: Final = _said(type="session.start", session={"model": "scripted"})
_LIVE_SOUND: Final = _said(type="session.input_audio.append", audio=base64(b"\0\20\0\60" * 9_000))
_OPENAI_UPDATE: Final = _said(
    type="session.update",
    session={"type": "realtime", "audio": {"input": {"turn_detection": {"type": "server_vad"}}}},
)
_OPENAI_ITEM: Final = _said(
    type="conversation.item.create",
    item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
)


def _openai_sound(data: bytes) -> tuple[str, float]:
    """A second of 24 kHz."""
    return _said(type="input_audio_buffer.append", audio=base64(data * 12_000)), 1.0


_LOUD: Final = _openai_sound(b"\0\20\0\60")
_QUIET: Final = _openai_sound(bytes(4))
_AWAY: Final = [_INIT, *_seconds(3), (append_frame(), 0.0), *_seconds(2), _CLOSE]
"""The last answer comes when the client is away: a block ends there."""
LIVES: Final[Mapping[str, Life]] = MappingProxyType(
    {
        "audio": Life("audio", [_INIT, *_seconds(6), _CLOSE]),
        "video": Life("video", [_INIT, *_seconds(4, video_frames=[picture()]), _CLOSE]),
        "away": Life("audio", _AWAY, lost_after=5, away_s=5.0),
        "asleep": Life("audio", _AWAY, lost_after=5, away_s=40.0),
        "interrupted": Life(
            "audio", [_INIT, *_seconds(3), (append_frame(force_listen=True), 1.0), _CLOSE]
        ),
        "chat": Life(
            "chat",
            [(_said(type="session.init", payload={}), 1.0), *_asks("one two", "three"), _CLOSE],
        ),
        "spoken": Life(
            "chat",
            [
                (_said(type="session.init", payload={}), 1.0),
                *_asks("one two three", tts={"enabled": True}),
                _CLOSE,
            ],
        ),
        "transcription": Life(
            "transcription",
            [
                (_said(type="session.update", model="scripted"), 1.0),
                *[(append_sound(b"\0\20\0\60" * 8_000), 0.5), _COMMIT] * 3,
                (_said(type="input_audio_buffer.commit", final=True), 5.0),
            ],
        ),
        "live": Life(
            "audio",
            [(_LIVE_START, 1.0), *[(_LIVE_SOUND, 0.75)] * 5, (_LIVE_SOUND, 3.0), _CLOSE],
            endpoint="live",
        ),
        "openai": Life(
            "audio",
            [
                *((_OPENAI_UPDATE, 0.2), (_OPENAI_ITEM, 0.2), _LOUD, *[_QUIET] * 4, _LOUD, _QUIET),
                (_said(type="response.create"), 20.0),
            ],
            endpoint="openai",
        ),
        "openai-transcription": Life(
            "transcription",
            [_QUIET, *[_LOUD] * 2, *[_QUIET] * 2, _LOUD, _QUIET, (_QUIET[0], 5.0)],
            endpoint="openai",
        ),
    }
)


def frames_in(log: Path) -> list[str]:
    """The frames that a log's session said."""
    return [str(it.fields["frame"]) for it in read(log) if it.kind == "tx"]


def content(frames: Sequence[str]) -> list[dict[str, Any]]:
    """What a client hears or reads of frames."""
    bodies = [json.loads(frame) for frame in frames]
    return [{name: body[name] for name in HEARD if name in body} for body in bodies]


def block_ends(log: Path) -> list[int]:
    """The bytes of a log up to each of its blocks."""
    source = FileSource(log)
    try:
        return [item.end for item in Scanner(source) if not isinstance(item, Damage)]
    finally:
        source.close()


async def live(folder: Path, life: Life) -> tuple[list[Peer], Path]:
    """Live a session whose server is not killed; returns its client's connections, and its log."""
    async with world(record_to=folder, decode_s=DECODE_S) as server:
        peers = [server.connect(life.mode, endpoint=life.endpoint, resumable=True)]
        await peers[0].greeted()
        if life.lost_after:
            await _say(peers[0], life.messages[: life.lost_after])
            peers[0].vanish()
            await anyio.sleep(life.away_s)
            peers.append(server.come_back(*peers[0].way_back))
            await peers[1].greeted()
        await _say(peers[-1], life.messages, life.lost_after)
        await _part(server, peers[-1])
    return peers, Store(folder).path(peers[0].way_back[0])


async def _say(peer: Peer, messages: Sequence[tuple[str, float]], said: int = 0) -> None:
    """Say the messages that the session does not have, each after the wait of the one before."""
    await anyio.sleep(messages[said - 1][1] if said else 0.1)
    for message, wait_s in messages[said:]:
        if not peer.is_over:
            peer.send(message)
            await anyio.sleep(wait_s)


async def _part(server: World, peer: Peer) -> None:
    """Wait for the end; a transcription has no goodbye."""
    peer.leave(CLOSE_NORMAL)
    await server.quiet()


async def _go_on(
    server: World, peers: Sequence[Peer], log: Path, life: Life
) -> tuple[list[str], Peer]:
    """Come back with what the client had heard by then, and send what the session lacks."""
    before, returns = frames_in(log), sum(it.fields.get("type") == ATTACHED for it in read(log))
    recording_id, token, _, mode = peers[returns].way_back
    for _ in range(TRIES):
        again = server.come_back(recording_id, token, len(before) - 1, mode)
        with suppress(AssertionError):  # it came as the session ended
            await again.heard(SESSION_RESUMABLE)
        if again.events:
            await _say(again, life.messages, again.events[0]["ack"])
            break
    await _part(server, again)
    return before, again


def cut(log: Path, folder: Path, size: int) -> Path:
    """The log as it was when its server was killed: its first bytes."""
    folder.mkdir()
    target = folder / log.name
    target.write_bytes(log.read_bytes()[:size])
    os.utime(target, ns=(KILLED_NS, KILLED_NS))
    return target


async def left_alone(log: Path) -> str:
    """Go on with a log whose client stays away; returns what was wrong, or nothing."""
    async with world(record_to=log.parent, resumable=True, decode_s=DECODE_S) as server:
        if await server.server.recover() != 1:
            return "it was not taken up"
        with anyio.move_on_after(ALONE_S) as scope:
            await server.quiet()
    return "no one ended it" if scope.cancelled_caught else _unlike(log)


def _unlike(log: Path) -> str:
    with LogReader(log) as reader:
        report = replay(reader)
    if report.identical and verify(log).state == "finished":
        return ""
    return f"its log is {verify(log).state}: {report.divergence}"


async def killed(log: Path, peers: Sequence[Peer], whole: Path, life: Life) -> str:
    """Go on with a session's log and its client; returns what was wrong, or nothing."""
    async with world(record_to=log.parent, resumable=True, decode_s=DECODE_S) as server:
        if await server.server.recover() != 1:
            return "it was not taken up"
        before, again = await _go_on(server, peers, log, life)
    if not again.events:
        return f"its client was not let in: {again.closed}"
    said = frames_in(log)
    if wrong := _unlike(log):
        return wrong
    if said != before + [frame for frame in again.frames if '"seq":' in frame]:
        return f"{len(before)} frames and {len(again.frames)} after it are not its {len(said)}"
    for number, (now, then) in enumerate(
        zip(content(said), content(frames_in(whole)), strict=False)
    ):
        if now != then:
            return f"frame {number} is {str(now)[:200]}, not {str(then)[:200]}"
    return "" if len(said) == len(frames_in(whole)) else f"{len(said)} frames"


def kill_everywhere(
    name: str, folder: Path, step: int = 1, first: int = 0
) -> tuple[int, list[str]]:
    """Kill a life's server after every `step`-th block; returns kills, and what was wrong."""
    life, found, kills = LIVES[name], list[str](), 0
    (folder / "whole").mkdir(parents=True)

    async def body() -> None:
        nonlocal kills
        peers, whole = await live(folder / "whole", life)
        ends = block_ends(whole)
        for number in range(1 + first, len(ends) - 1, step):  # not the one with its end
            torn = (ends[number] + ends[number + 1]) // 2  # amid the next block
            alone = cut(whole, folder / f"{number} alone", ends[number])
            log = cut(whole, folder / str(number), torn)
            said = (await left_alone(alone), await killed(log, peers, whole, life))
            found.extend(f"{name}, block {number}: {wrong}" for wrong in said if wrong)
            kills += len(said)

    clock = SimpleNamespace(time_ns=lambda: KILLED_NS + UNTIL_FOUND_NS)
    with (
        patch.object(crash_recovery, "time", clock),
        patch.object(log_format, "BLOCK_BYTES", BLOCK_BYTES),
    ):
        on_virtual_time(body)
    return kills, found


def main() -> int:
    """Soak, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    asked = parser.parse_args()
    kills, failures = dict[str, int](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for name in LIVES:
            kills[name], wrong = kill_everywhere(name, Path(folder) / name)
            failures += wrong
            print(f"{name}: {kills[name]} kills, {len(wrong)} failures", file=sys.stderr)
    evidence = {
        "what": "servers killed after each block of a session's log, which the next one went on",
        "good": not failures,
        "kills": kills,
        "failures": failures,
    }
    (asked.out / "prefixes.json").write_text(json.dumps(evidence, indent=2) + "\n", "utf-8")
    print(json.dumps(evidence, indent=2))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
