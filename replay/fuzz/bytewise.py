"""Broken bytes for the parsers of messages and of session logs.

A parser of foreign bytes may raise only its documented errors, in bounded time and memory. The
inputs are valid bytes with pieces cut, doubled, swapped or overwritten, and bits flipped. A log's
checksums would hide its payloads, so half of the logs are broken within a payload and sealed again.
"""

from __future__ import annotations

import hashlib
import json
import random
import resource
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import attrs

from protocol.values.errors import FieldError, FrameError, RemoteProtocolError
from protocol.wire.codec import parse_frame
from protocol.wire.dialects import DIALECTS, MODES_OF
from protocol.wire.dialects.base import Context
from protocol.wire.dialects.opening import OPENING
from recorder.format.chain import Chain
from recorder.format.compression import Compressor
from recorder.format.errors import RecorderError
from recorder.read.reader import LogReader
from recorder.read.scan import Block, BytesSource, Scanner
from recorder.read.verify import verify

from .campaign import Budget
from .case import Case
from .local import LocalTarget
from .media import fill
from .play import append_of, init_of, probe_case
from .schema import described
from .values import GARBAGE, PIECES

KINDS: Final = ("codec", "log")
INPUT_CPU_S_MAX: Final = 5.0
"""A megabyte takes a hundredth; a slower input could be made slower still."""
INPUT_MEMORY_MB_MAX: Final = 700
"""The most that one input may add: a block's limit is 132 MiB, held a few times over."""
CHANGES_MAX: Final = 6
"""To one input: with more, the first one already has it refused."""
SHRINK_TRIES_MAX: Final = 400
"""To reduce one finding."""
FINDINGS_MAX: Final = 20
"""Different ones of a run."""


@attrs.define
class Bytewise:
    """The results of a run: the most memory in MB, and the file of each finding by its label."""

    inputs: int = 0
    elapsed_s: float = 0.0
    memory_mb: float = 0.0
    findings: dict[str, Path] = attrs.Factory(dict)

    def to_json(self) -> dict[str, Any]:
        """The results as JSON."""
        found = {label: str(path) for label, path in self.findings.items()}
        return {
            "inputs": self.inputs,
            "elapsed_s": round(self.elapsed_s, 3),
            "memory_mb_max": round(self.memory_mb),
            "findings": found,
        }


def fuzz_bytes(
    kind: str,
    *,
    seed: int,
    budget: Budget,
    out: Path,
    read: Callable[[bytes], None] | None = None,
) -> Bytewise:
    """Break bytes until the budget is spent; an example is one input.

    `kind` is one of `KINDS`; inputs with findings are kept in `out`. An exception of `read`, the
    parser, is a finding.
    """
    dice = random.Random(seed)
    corpus = list(_frames() if kind == "codec" else _logs())
    read = read or (read_frame if kind == "codec" else read_log)
    found, began_s = Bytewise(), time.monotonic()
    while len(found.findings) < FINDINGS_MAX:
        if budget.is_spent(found.inputs, time.monotonic() - began_s):
            break
        sound = dice.choice(corpus)
        data = _sealed(sound, dice) if kind == "log" and dice.random() < 0.5 else None
        data = _broken(sound, dice) if data is None else data
        found.inputs += 1
        wrong = _wrong(read, data)
        if wrong and wrong not in found.findings:
            found.findings[wrong] = _save(out, kind, _smaller(read, data, wrong, dice))
    found.elapsed_s = time.monotonic() - began_s
    found.memory_mb = _memory_mb()
    return found


# -- what reads them ------------------------------------------------------------------------------


def read_frame(data: bytes) -> None:
    """Parse bytes as a message, in every dialect and at both ends."""
    try:
        body = parse_frame(data.decode("utf-8", "replace"))
    except FrameError:
        return
    for name, dialect in DIALECTS.items():
        for mode in MODES_OF[name]:
            with suppress(FieldError):
                dialect.parse(dialect.classify(body), body, Context(mode=mode))
            with suppress(RemoteProtocolError):
                dialect.decode(body, mode)
    OPENING.classify(body)


def read_log(data: bytes) -> None:
    """Read and verify bytes as a session log, to the end and past all damage."""
    verify(data)
    with suppress(RecorderError), LogReader(data) as reader:
        for _ in reader:
            pass


def _wrong(read: Callable[[bytes], None], data: bytes) -> str:
    """Read, and return the label of a finding, or empty."""
    began_s, began_mb = time.process_time(), _memory_mb()
    try:
        read(data)
    except Exception as error:
        return _name(error)
    if time.process_time() - began_s > INPUT_CPU_S_MAX:
        return "an input takes too long"
    if _memory_mb() - began_mb > INPUT_MEMORY_MB_MAX:
        return "an input takes too much memory"
    return ""


def _name(error: BaseException) -> str:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    where = "" if at is None else f" in {at.tb_frame.f_code.co_name}"
    return f"{type(error).__name__}{where}"


def _memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# -- sound ones -----------------------------------------------------------------------------------


def _frames() -> Iterator[bytes]:
    for name, modes in MODES_OF.items():
        for message in described(name):
            yield from (json.dumps(body).encode() for body in message.examples)
        for mode in modes:
            case = Case(dialect=name, mode=mode, steps=())
            yield json.dumps(fill(init_of(case))).encode()
            yield json.dumps({**append_of(case), "audio": "AAAA"}).encode()
    yield from (text.encode("utf-8", "replace") for text in GARBAGE)


def _logs() -> Iterator[bytes]:
    with tempfile.TemporaryDirectory(prefix="antiphon-fuzz-") as name:
        for dialect, modes in MODES_OF.items():
            folder = Path(name) / dialect
            folder.mkdir()
            case = probe_case(
                Case(dialect=dialect, mode=modes[0], script="speaks", steps=()), with_sound=True
            )
            LocalTarget(record_to=folder).run(case)
            yield from (path.read_bytes() for path in sorted(folder.iterdir()))


# -- broken ones ----------------------------------------------------------------------------------


def _broken(data: bytes, dice: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(dice.randint(1, CHANGES_MAX)):
        at = dice.randrange(len(made) + 1)
        end = min(len(made), at + dice.choice((1, 2, 4, 8, 64, 4096)))
        match dice.randrange(7):
            case 0:
                del made[at:end]
            case 1:
                made[at:at] = made[at:end] * dice.choice((1, 2, 50))
            case 2:
                made[at:end] = dice.randbytes(end - at)
            case 3:
                made[at:end] = dice.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - at)
            case 4 if made:
                made[at % len(made)] ^= 1 << dice.randrange(8)
            case 5:
                made[at:at] = dice.choice(PIECES).encode("utf-8", "replace")
            case 6:
                other = dice.randrange(len(made) + 1)
                made[at:end] = made[other : other + end - at]
    return bytes(made)


def _sealed(data: bytes, dice: random.Random) -> bytes | None:
    """Break the payload of one block of a log and seal all blocks again; None without blocks."""
    blocks = [block for block in Scanner(BytesSource(data)) if isinstance(block, Block)]
    if not blocks:
        return None
    chosen, chain, made = dice.randrange(len(blocks)), Chain(), b""
    for number, block in enumerate(blocks):
        payload = _broken(block.payload, dice) if number == chosen else block.payload
        frame = Compressor().compress([payload or b"\0"], has_samples=False)
        header = attrs.evolve(
            block.header,
            compressed_len=len(frame.data),
            uncompressed_len=frame.payload_bytes,
            payload_crc=zlib.crc32(frame.data),
            is_stuffed=frame.is_stuffed,
        )
        made += chain.link(header, frame)
    return made


def _smaller(read: Callable[[bytes], None], data: bytes, wrong: str, dice: random.Random) -> bytes:
    """Leave out pieces while the finding stays."""
    for _ in range(SHRINK_TRIES_MAX):
        size = max(1, len(data) >> dice.randrange(1, 8))
        at = dice.randrange(max(1, len(data) - size + 1))
        less = data[:at] + data[at + size :]
        if less and _wrong(read, less) == wrong:
            data = less
    return data


def _save(out: Path, kind: str, data: bytes) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{kind}-{hashlib.sha256(data).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    return path
