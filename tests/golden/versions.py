"""Golden logs of what the format learned since the first ones: read and replayed for ever.

`python -m tests.golden.versions` makes those that are missing, beside a readable twin: a session
whose sound is of 16 bits, with a seek table behind its `fin`; the same, compacted; and one whose
sound came in pieces, of which each names its part of a blob. They are not made again for
comparison: what FLAC and zstd make of the same samples is their own affair, and differs from
version to version of theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np

from recorder.format.format import SUFFIX
from recorder.repair import compact
from runtime.media.sound import read_wav
from tests.golden.logs import FOLDER, HASHES, frozen, hash_of, items, record, twin, twin_path
from tests.golden.stage import Scene, part
from tests.sessions.in_memory import World, append_frame, base64

RATE_HZ = 16_000
SPEECH = FOLDER.parent / "speech" / "demo.wav"
SPOKEN = FOLDER / f"v1-realtime-spoken{SUFFIX}"
IN_PIECES = FOLDER / f"v1-realtime-pieces{SUFFIX}"
COMPACTED = FOLDER / f"v2-compacted-realtime-spoken{SUFFIX}"


def microphone(seconds: int) -> list[bytes]:
    """Give seconds of speech whose samples are 16-bit values, as many a microphone's are."""
    heard = np.frombuffer(read_wav(SPEECH), "<f4")[: seconds * RATE_HZ]
    values = np.rint(heard * 32768).clip(-32768, 32767).astype("<i2")  # no -0.0
    samples = values.astype("<f4") / np.float32(32768)
    return [second.tobytes() for second in np.split(samples, seconds)]


async def spoken(server: World) -> None:
    """A few seconds are said, and answered."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    for second in microphone(4):
        peer.send(append_frame(audio=base64(second)))
        await anyio.sleep(1)
    await part(peer)


async def in_pieces(server: World) -> None:
    """The same is said in pieces of 20 ms, of which five come together."""
    peer = await server.activate("audio", config={"force_listen_count": 0})
    for second in microphone(2):
        step = len(second) // 50
        pieces = [second[at : at + step] for at in range(0, len(second), step)]
        for at in range(0, len(pieces), 5):
            peer.send(*(append_frame(audio=base64(piece)) for piece in pieces[at : at + 5]))
            await anyio.sleep(0.1)
    await part(peer)


def main() -> None:
    """Make the golden logs that are missing, and freeze them."""
    hashes = frozen()
    for path, play in ((SPOKEN, spoken), (IN_PIECES, in_pieces)):
        if not path.exists():
            with TemporaryDirectory() as folder:
                path.write_bytes(record(Scene(play=play), Path(folder)).read_bytes())
            print(f"made {path.name}: {path.stat().st_size} bytes")
    if not COMPACTED.exists():
        print(f"made {COMPACTED.name}: {compact(SPOKEN, COMPACTED)}")
    for path in (SPOKEN, IN_PIECES, COMPACTED):
        if path.name not in hashes:
            twin_path(path).write_text(twin(items(path)))
            hashes[path.name] = hash_of(path)
    HASHES.write_text(json.dumps(hashes, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
