"""Full decoding of clients' media, off the event loop and within bounds.

- `protocol/` has checked headers and sizes; this proves the rest. A camera's frame is only proven;
  sound becomes the model's input format, images become JPEG files, a video both.
- A fault is a `MediaError` whose reason the client may read: the fault and the limit, never a
  library's text or the client's bytes.
- Sizes are checked before memory is allocated for them; the same bytes give the same answer.
- A camera's frame that is proven sooner than a thread wakes up is proven on the event loop.
- Sessions share the decoder by processor time (`FairQueue`). A session's waiting pictures are
  bounded, in pixels.

A video, a packed sound file, or a large picture, is decoded in a process of its own
(`decode_in_process`). A decoder for every video format is the most likely place for a file to break
in, hang or take all memory. In a process that costs the client its file, the server nothing. The
process is killed when its client leaves, when it takes too long, and when it answers too much; its
own bounds (`worker`) end it even after the server was killed.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final
from weakref import WeakKeyDictionary

import anyio
import attrs
import orjson
from anyio import to_thread
from anyio.abc import ByteSendStream, Process
from anyio.lowlevel import RunVar
from anyio.streams.buffered import BufferedByteReceiveStream

from protocol.values.effects import DecodeMedia, MediaKind
from protocol.values.limits import FRAME_PIXELS_MAX, FRAMES_MAX, UNITS_PENDING_MAX, VIDEO_S_MAX
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.wire.audio import LIVE_RATE_HZ, resample
from protocol.wire.media import PACKED_KINDS, sound_kind

from .image import SMALL_PIXELS, decode_image, decode_jpeg, needs_process, pixels_of, prove_small
from .sound import decode_audio, decode_voice
from .values import WORDS, Decoded, MediaError
from .video import PICTURES_BYTES_MAX, read_video
from .voices import VoiceLibrary, no_such_voice

# -- fairness --------------------------------------------------------------------------------------


class TooMuchWaitingError(Exception):
    """The client's waiting work is at its bound."""


@attrs.frozen(kw_only=True, eq=False)
class Client:
    """A session that wants work done; equal only to itself.

    `is_live`: a second of its input waits, not an answer of chat. Sessions of one owner share a
    part.
    """

    is_live: bool = True
    owner: str = ""


@attrs.define(eq=False)
class _Share:
    """A node of the tree.

    Attributes:
        number: decides between equals; the lower goes first.
        path: its ancestors without the root, from the top, and itself.
        finish_s: the end of its charged work, in the virtual time of its siblings.
        now_s: the virtual time of its own children.
        active: children that have work.
        work, running: pieces of work, and those of them that have a place.
        waiting, size: a client's waiting work in order, and the sum of its sizes.
    """

    parent: _Share | None
    places: int
    number: int = 0
    path: tuple[_Share, ...] = attrs.field(init=False)
    finish_s: float = 0.0
    now_s: float = 0.0
    active: int = 0
    work: int = 0
    running: int = 0
    waiting: dict[Place, None] = attrs.Factory(dict)
    size: int = 0

    def __attrs_post_init__(self) -> None:
        self.path = () if self.parent is None else (*self.parent.path, self)

    @property
    def start_s(self) -> float:
        """The start of its next work, in the virtual time of its siblings."""
        assert self.parent is not None
        return max(self.parent.now_s, self.finish_s)

    @property
    def head(self) -> Place:
        """The first work."""
        return next(iter(self.waiting))

    def count(self, difference: int) -> None:
        """Add to the work here and up to the root."""
        for node in self.path:
            assert node.parent is not None
            node.parent.active -= node.work > 0
            node.work += difference
            node.parent.active += node.work > 0


@attrs.define(eq=False)
class Place:
    """A piece of work; `number` counts all, from 1.

    `starts_s`: its start in the virtual time of each level. `granted`: set when it has its place.
    `used_s`: its processor seconds; set before it is left.
    """

    share: _Share
    number: int
    size: int
    expected_s: float
    starts_s: tuple[float, ...] = ()
    granted: anyio.Event = attrs.Factory(anyio.Event)
    used_s: float = 0.0


class FairQueue:
    """A queue for a few places, fair by the processor time that each client has used.

    Clients form a tree: live sessions and turns of chat; the owners in each; the sessions of each
    owner. A free place goes down the tree by fair queueing (Demers, Keshav, Shenker 1989). The
    children of a node have a virtual time: the processor time of each active child under equal
    sharing at every moment. A child's work starts at that time, or at the end of its work before.
    The earliest start goes first; among sessions, the earliest expected end. So a session that uses
    little goes next, one that uses much waits, and unused time is not saved.

    - A client has one place at a time, and turns of chat never have all places: a live session
      finds one despite one adversary.
    - Running work is charged when it ends. The order depends on arrivals and charges, not on a
      clock.

    Args:
        places: how many are worked for at once.
        size_max: bounds a client's waiting work.
    """

    def __init__(self, places: int, size_max: float = math.inf) -> None:
        self._size_max: Final = size_max
        self._root = _Share(None, places)
        self._live = _Share(self._root, places, number=0)
        self._turns = _Share(self._root, max(1, places - 1), number=1)
        self._owners: dict[tuple[bool, str], _Share] = {}  # As many as an operator's keys.
        self._clients: WeakKeyDictionary[Client, _Share] = WeakKeyDictionary()
        self._waiting: dict[_Share, None] = {}
        self._asked = 0

    @asynccontextmanager
    async def place(
        self, client: Client, size: int = 0, *, expected_s: float = 0.0
    ) -> AsyncIterator[Place]:
        """Wait for a place and hold it; the body sets its `used_s`.

        `size` is in the unit of `size_max`; above it `TooMuchWaitingError`. `expected_s` is rough
        processor seconds.
        """
        place = self._enter(client, size, expected_s)
        try:
            self._fill()
            await place.granted.wait()
            yield place
        finally:
            self._leave(place)
            self._fill()

    def _enter(self, client: Client, size: int, expected_s: float) -> Place:
        share = self._share_of(client)
        if share.size + size > self._size_max:
            raise TooMuchWaitingError
        self._asked += 1
        place = Place(share, self._asked, size, expected_s)
        share.size += size
        share.waiting[place] = None
        self._waiting[share] = None
        share.count(1)
        return place

    def _share_of(self, client: Client) -> _Share:
        share = self._clients.get(client)
        if share is None:
            key = (client.is_live, client.owner)
            kind = self._live if client.is_live else self._turns
            new = _Share(kind, kind.places, number=len(self._owners))
            share = _Share(self._owners.setdefault(key, new), places=1)
            self._clients[client] = share
        return share

    def _fill(self) -> None:
        while self._root.running < self._root.places:
            able = (share for share in self._waiting if _may_run(share))
            share = min(able, key=_order, default=None)
            if share is None:
                return
            self._grant(share)

    def _grant(self, share: _Share) -> None:
        place = share.head
        self._forget(place)
        place.starts_s = tuple(node.start_s for node in share.path)
        self._root.running += 1
        for node in share.path:
            node.running += 1
        place.granted.set()

    def _leave(self, place: Place) -> None:
        """Take back a place and charge it, or remove waiting work."""
        if place.granted.is_set():
            self._root.running -= 1
            for node, start_s in zip(place.share.path, place.starts_s, strict=True):
                assert node.parent is not None
                node.running -= 1
                # The second of two parallel pieces continues at the first one's end.
                node.finish_s = max(node.finish_s, start_s) + place.used_s
                node.parent.now_s += place.used_s / node.parent.active
        else:
            self._forget(place)
        place.share.count(-1)

    def _forget(self, place: Place) -> None:
        share = place.share
        del share.waiting[place]
        share.size -= place.size
        if not share.waiting:
            del self._waiting[share]


def _may_run(share: _Share) -> bool:
    return all(node.running < node.places for node in share.path)


def _order(share: _Share) -> tuple[float, ...]:
    """The order of a client's next work, level by level; less running work goes first."""
    kind, owner, _ = share.path
    return (
        *(kind.start_s, kind.running, kind.number),
        *(owner.start_s, owner.running, owner.number),
        *(share.start_s + share.head.expected_s, share.head.number),
    )


# -- decoding in a process -------------------------------------------------------------------------


VIDEO_WAIT_S: Final = 90.0
"""Its processor time, and half as much again for the processes that run at the same time."""
HEAD_BYTES_MAX: Final = 16 * 1024
"""The line of the answer that counts its pieces, 129 at most."""
ANSWER_BYTES_MAX: Final = PICTURES_BYTES_MAX + VIDEO_S_MAX * INPUT_RATE_HZ * SAMPLE_BYTES
"""All pictures and all sound."""
PIECE_BYTES: Final = 1 << 20
"""Bytes of one write: a transport copies the rest of a full pipe."""

_COMMAND: Final = (sys.executable, "-P", "-m", "runtime.media.worker")
_ENVIRONMENT: Final = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")
"""All that Python needs to start; other variables may hold a server's keys."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Threads for matrix products would reserve half of the address space."""

_UNREADABLE: Final = (
    *(anyio.IncompleteRead, anyio.DelimiterNotFound, anyio.EndOfStream, anyio.BrokenResourceError),
    *(ValueError, TypeError, KeyError),
)
"""Exceptions raised when an answer is invalid."""

_log = logging.getLogger("antiphon.media")


async def decode_in_process(
    data: bytes, *arguments: str, command: tuple[str, ...] = _COMMAND, wait_s: float = VIDEO_WAIT_S
) -> Decoded:
    """Decode a file as the thread of a `MediaDecoder` would; cancelled, it kills the process.

    `arguments`: the worker's; `command`: its command line without those; `wait_s`: the most that it
    may take.
    `MediaError`: it is damaged, too long, too large, or too slow to decode; or the system has no
    room for a process.
    """
    what = WORDS.get(arguments[0], "video")
    process = await _start(what, [*command, *arguments])
    with anyio.move_on_after(wait_s):
        async with process:  # Left by a cancellation, it kills the process and waits for its end.
            return await _ask(what, process, data)
    raise MediaError(f"the {what} takes more than {wait_s:g} s to decode")


async def _start(what: str, command: list[str]) -> Process:
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    try:
        return await anyio.open_process(
            command,
            stderr=subprocess.DEVNULL,
            env=environment | _ONE_THREAD,
            start_new_session=True,  # Ctrl-C is for the server: sessions end with their media.
        )
    except OSError as error:
        _log.error("no process for a file: %s", error.strerror)
        raise MediaError(f"the {what} cannot be decoded now") from None


async def _ask(what: str, process: Process, data: bytes) -> Decoded:
    """Send a file and read the answer; a process that a limit ended gives none, or a part."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, process.stdin, data)
            answer = await _read(BufferedByteReceiveStream(process.stdout))
            tasks.cancel_scope.cancel()
    except* _UNREADABLE:
        with suppress(ProcessLookupError):  # It has ended by itself.
            process.kill()
        code = await process.wait()
        _log.warning("a file was not decoded: its process ended with code %d", code)
        answer = MediaError(f"the {what} is damaged, or takes too much to decode")
    if isinstance(answer, MediaError):
        raise answer
    return answer


async def _write(stdin: ByteSendStream, data: bytes) -> None:
    try:
        for at in range(0, len(data), PIECE_BYTES):
            await stdin.send(data[at : at + PIECE_BYTES])
        await stdin.aclose()
    except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # It has ended: the answer shows why.


async def _read(stdout: BufferedByteReceiveStream) -> Decoded | MediaError:
    """Read the answer piece by piece, each once, within the bounds."""
    head = orjson.loads(await stdout.receive_until(b"\n", HEAD_BYTES_MAX))
    if "reason" in head:
        return MediaError(str(head["reason"]))
    sizes = [head["pcm"], *head["pictures"], *head["stacked"]]
    if min(sizes) < 0 or sum(sizes) > ANSWER_BYTES_MAX:
        raise ValueError(sum(sizes))
    pcm, *pieces = [await stdout.receive_exactly(size) for size in sizes]
    count = len(head["pictures"])
    return Decoded(pcm=pcm, pictures=tuple(pieces[:count]), stacked=tuple(pieces[count:]))


# -- the decoder -----------------------------------------------------------------------------------


__all__ = ["Decoded", "MediaDecoder", "MediaError", "decode_at_once", "decode_jpeg", "decode_voice"]

WORKERS_MAX: Final = 2
"""Decoding takes a thread for 0.5 to 500 ms; more threads would take cores from the model."""
PROCESSES_MAX: Final = 1
"""A video takes one for seconds; other videos wait, while frames and sound go on."""
PIXELS_WAITING_MAX: Final = (UNITS_PENDING_MAX + 1) * FRAMES_MAX * FRAME_PIXELS_MAX
"""For one session: the waiting units and the one being filled, each with the most and largest
frames of an append."""
S_PER_PIXEL: Final = 15e-9
S_PER_BYTE: Final = 10e-9
"""Rough processor time, from a picture's head and a file's length: among equals the smaller goes
first."""

_threads: Final = RunVar[anyio.CapacityLimiter]("media_threads")
"""Media has threads of its own. A limiter belongs to one event loop, and each test has another."""


def decode_at_once(effect: DecodeMedia) -> Decoded | None:
    """Decode media that takes no longer than waking a thread; None: `MediaDecoder.decode` must.

    `MediaError`: the media is damaged.
    """
    if effect.kind == "jpeg" and prove_small(effect.data):
        return Decoded()
    return None


class MediaDecoder:
    """Decodes clients' media; `voices` is the library that they may name, or None."""

    def __init__(self, voices: VoiceLibrary | None = None) -> None:
        self._voices = voices
        self._work = FairQueue(WORKERS_MAX, PIXELS_WAITING_MAX)
        self._processes = FairQueue(PROCESSES_MAX)

    async def decode(self, effect: DecodeMedia, client: Client) -> Decoded:
        """Decode in a thread, or in a process what could inflate, in fair turns.

        Cancelled, it waits for a running thread and kills a process. The result is sound for `wav`,
        `voice`, `audio` and `second`, a picture for `image`, both for `video`; for `jpeg` nothing,
        or the picture upright.
        `MediaError`: the media is of another kind, damaged, or outside the limits; or its session
        has too many pictures waiting.
        """
        if _inflates(effect):
            return await self._decode_in_process(effect, client)
        pixels = 0
        if effect.kind in ("jpeg", "image"):
            # The least for a tiny one: its task takes memory too.
            pixels = max(pixels_of(effect.data), SMALL_PIXELS)
        try:
            expected_s = pixels * S_PER_PIXEL + len(effect.data) * S_PER_BYTE
            async with self._work.place(client, pixels, expected_s=expected_s) as place:
                return await to_thread.run_sync(
                    self._decode_metered, effect, place, limiter=_thread_limiter()
                )
        except TooMuchWaitingError:
            most = PIXELS_WAITING_MAX // 1_000_000
            reason = f"more than {most} megapixels of this session would wait to be decoded"
            raise MediaError(reason) from None

    async def decode_speech(self, data: bytes, s_max: int, client: Client) -> bytes:
        """Decode a file with sound, of any kind, in a process: float32 LE, 16 kHz mono.

        `MediaError`: it has none, is damaged, or lasts more than `s_max` seconds.
        """
        return (await self._in_process(data, client, "speech", str(s_max))).pcm

    async def _decode_in_process(self, effect: DecodeMedia, client: Client) -> Decoded:
        argument = str(effect.stack_frames) if effect.kind == "video" else effect.kind
        return await self._in_process(effect.data, client, argument)

    async def _in_process(self, data: bytes, client: Client, *arguments: str) -> Decoded:
        async with self._processes.place(client) as place:
            before_s = _children_s()
            try:
                return await decode_in_process(data, *arguments)
            finally:
                place.used_s = _children_s() - before_s  # These are the only children.

    def _decode_metered(self, effect: DecodeMedia, place: Place) -> Decoded:
        before_s = time.thread_time()
        try:
            return self.decode_here(effect)
        finally:
            place.used_s = time.thread_time() - before_s

    def decode_here(self, effect: DecodeMedia) -> Decoded:
        """As `decode`, but in the calling thread, blocking; a video has no process's bounds."""
        data, rate_hz = effect.data, effect.rate_hz or LIVE_RATE_HZ
        decoders: dict[MediaKind, Callable[[], Decoded]] = {
            "jpeg": lambda: Decoded(pictures=tuple(filter(None, (decode_jpeg(data),)))),
            "wav": lambda: Decoded(pcm=decode_voice(data)),
            "voice": lambda: Decoded(pcm=decode_voice(self._read_voice(data))),
            "image": lambda: Decoded(pictures=(decode_image(data),)),
            "audio": lambda: Decoded(pcm=decode_audio(data, effect.rate_hz)),
            "video": lambda: read_video(data, effect.stack_frames),
            "second": lambda: Decoded(pcm=resample(data, rate_hz, INPUT_RATE_HZ)),
        }
        return decoders[effect.kind]()

    def _read_voice(self, name: bytes) -> bytes:
        if self._voices is None:
            raise no_such_voice()
        return self._voices.read(name.decode("utf-8", "replace"))


def _inflates(effect: DecodeMedia) -> bool:
    """Whether it is a file that may unpack to far more than it shows."""
    match effect.kind:
        case "video":
            return True
        case "image":
            return needs_process(effect.data)
        case "wav" | "audio":
            return effect.rate_hz == 0 and sound_kind(effect.data) in PACKED_KINDS
    return False


def _children_s() -> float:
    """Processor seconds of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _thread_limiter() -> anyio.CapacityLimiter:
    """This event loop's limiter, made on first use."""
    limiter = _threads.get(None)
    if limiter is None:
        limiter = anyio.CapacityLimiter(WORKERS_MAX)
        _threads.set(limiter)
    return limiter
