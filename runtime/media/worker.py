"""The process that decodes one file: it limits itself, reads the file, answers and ends.

The file comes on standard input. The answer, on standard output, is a line of JSON and then the
bytes that it counts: `{"reason": ...}` for a refused file, else `{"pcm": bytes, "pictures": [bytes,
...], "stacked": [bytes, ...]}`. Nothing can be opened: a hostile file can only end the process.
"""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from typing import Final

# All that `av` would load later: then nothing can be opened any more.
import av.audio.codeccontext
import av.audio.stream
import av.subtitles.codeccontext
import av.subtitles.stream
import av.video.codeccontext
import av.video.reformatter
import av.video.stream
import orjson

from protocol.values.limits import VIDEO_BYTES_MAX
from protocol.wire.media import sound_kind

from .image import decode_image
from .sound import decode_audio, decode_speech, decode_voice
from .values import Decoded, MediaError
from .video import read_sound, read_video

MEMORY_BYTES_MAX: Final = 1024 * 1024 * 1024
"""Of addresses: 0.2 GiB of libraries, the file, its pictures, and 17 frames of 20 megapixels."""
CPU_S_MAX: Final = 60
"""64 s of 1920 x 1080 at 60 frames take half of it on a slow core."""
NICENESS: Final = 10
"""The model's answers come first."""


def main() -> None:
    """Decode the file on stdin; the argument is its kind, or a video's pictures a second.

    Of speech, of any kind of file, a second argument is its longest time in seconds.
    """
    argument = sys.argv[1]
    av.logging.set_level(None)
    limit_itself()
    try:
        data = sys.stdin.buffer.read(VIDEO_BYTES_MAX + 1)
        match argument:
            case "image":
                made = Decoded(pictures=(decode_image(data),))
            case "audio":
                made = Decoded(pcm=decode_audio(data, 0))
            case "wav":
                made = Decoded(pcm=decode_voice(data))
            case "speech":
                read = read_sound if sound_kind(data) is None else decode_speech
                made = Decoded(pcm=read(data, int(sys.argv[2])))
            case _:
                made = read_video(data, int(argument))
    except MediaError as error:
        sys.stdout.buffer.write(orjson.dumps({"reason": error.reason}) + b"\n")
    else:
        write(made)


def limit_itself() -> None:
    """Limit this process; a limit that the system does not know is skipped."""
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES_MAX,
        resource.RLIMIT_CPU: CPU_S_MAX,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 3,  # the open ones; no file and no socket can be opened
    }
    for name, most in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(name, (most, most))
    with suppress(OSError):
        os.nice(NICENESS)


def write(made: Decoded) -> None:
    """Write the answer."""
    head = {
        "pcm": len(made.pcm),
        "pictures": [len(jpeg) for jpeg in made.pictures],
        "stacked": [len(jpeg) for jpeg in made.stacked],
    }
    out = sys.stdout.buffer
    out.write(orjson.dumps(head) + b"\n")
    for piece in (made.pcm, *made.pictures, *made.stacked):
        out.write(piece)
    out.flush()


if __name__ == "__main__":
    main()
