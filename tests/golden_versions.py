"""Golden logs of what the format learned since the first ones: read and replayed for ever.

`python -m tests.golden_versions` makes those that are missing, beside a readable twin: a session
whose sound is of 16 bits, with a seek table behind its `fin`; and the same, compacted. They are not
made again for comparison: what FLAC and zstd make of the same samples is their own affair, and
differs from version to version of theirs.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import numpy as np

from recorder.format.format import SUFFIX
from recorder.mend.compact import compact
from runtime.media.audio import read_wav
from tests.golden import FOLDER, items, record, twin, twin_path
from tests.golden_stage import Scene, part
from tests.helpers import World, append_frame, base64

RATE_HZ = 16_000
SPEECH = FOLDER.parent / "speech" / "demo.wav"
SPOKEN = FOLDER / f"v1-realtime-spoken{SUFFIX}"
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


def spoken_log(folder: Path) -> Path:
    """Record them, as a server does."""
    return record(Scene(play=spoken), folder)


def main() -> None:
    """Make the golden logs that are missing."""
    if not SPOKEN.exists():
        with TemporaryDirectory() as folder:
            SPOKEN.write_bytes(spoken_log(Path(folder)).read_bytes())
        twin_path(SPOKEN).write_text(twin(items(SPOKEN)))
        print(f"made {SPOKEN.name}: {SPOKEN.stat().st_size} bytes")
    if not COMPACTED.exists():
        made = compact(SPOKEN, COMPACTED)
        twin_path(COMPACTED).write_text(twin(items(COMPACTED)))
        print(f"made {COMPACTED.name}: {made}")


if __name__ == "__main__":
    main()
