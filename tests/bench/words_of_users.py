"""How well the words of users are written down (`--transcriber tiny`), next to a transcription.

    python -m tests.bench.words_of_users [--out FOLDER] [--every N]

The held-out renderings of the known phrases, each in the quiet of a room: once as a session's
seconds, in which speech must be found first, and once as an utterance of its own, from its first
sample. The word error is the number of inserted, deleted or replaced words, for each word said.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Final

import anyio
import attrs
import numpy as np

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, Unit
from runtime.model.backends.minicpmo.model import DuplexModel
from runtime.model.models import load_backend
from runtime.session.speech_input import Transcriber, TranscriptWriter
from tests.bench.tiny.score_transcripts import Written, transcribe, word_error
from tests.bench.tiny.staging import Pcm, known_phrases, pause_of, read_speech, room
from tests.project.evidence import add_out

ROOT: Final = Path(__file__).parents[2]
HELDOUT: Final = ROOT / "fixtures" / "speech" / "heldout"
QUIET_S: Final = 2


@attrs.define
class Inbox:
    """What is written down of one session."""

    texts: list[str] = attrs.Factory(list)
    ends: int = 0

    def now_ns(self) -> int:
        return 0

    def post(self, event: ev.Event) -> None:
        assert isinstance(event, ev.UserTranscribed)
        self.texts.append(event.text + " " * event.is_last)
        self.ends += event.is_last

    step_or_post = post

    def past(self) -> Any:
        raise AssertionError("a writer needs no past")


async def written(transcriber: Transcriber, sound: Pcm) -> str:
    """Write a session's sound down."""
    inbox = Inbox()
    writer = TranscriptWriter(transcriber, 0, inbox)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        for index, second in enumerate(sound.reshape(-1, UNIT_SAMPLES)):
            writer.saw(ef.StartUnit(unit=Unit(index=index, pcm=second.tobytes())))
            while writer._waiting:  # noqa: ASYNC110
                await anyio.sleep(0.001)
        tasks.cancel_scope.cancel()  # the second that is being written down is ended first
    return "".join(inbox.texts)


def staged(speech: Pcm, place: int) -> Pcm:
    """A rendering in a room, as whole seconds."""
    quiet = room(QUIET_S * INPUT_RATE_HZ + pause_of(place), place)
    sound = np.concatenate([quiet, speech])
    after = -len(sound) % UNIT_SAMPLES + QUIET_S * UNIT_SAMPLES
    return np.concatenate([sound, room(after, place + 1)]).astype("<f4")


def measure(every: int) -> dict[str, Any]:
    """Write each N-th rendering down, in both ways."""
    items = known_phrases(HELDOUT)[::every]
    speech = [read_speech(HELDOUT, item) for item in items]
    said = [item.phrase for item in items]

    async def body() -> list[Written]:
        transcriber = Transcriber(load_backend("tiny", 1))
        try:
            texts = [await written(transcriber, staged(it, n)) for n, it in enumerate(speech)]
        finally:
            await transcriber.aclose()
        pairs = zip(said, texts, strict=True)
        return [Written(said=tuple(s.split()), wrote=tuple(w.split())) for s, w in pairs]

    heard = anyio.run(body)
    plain = transcribe(DuplexModel.load(ROOT / "fixtures" / "tiny"), said, speech)
    return {
        "what": "words of users, written down by tiny",
        "renderings": len(items),
        "word_error": {
            "as a session's user": round(word_error(heard), 3),
            "as a transcription": round(word_error(plain), 3),
        },
        "not_found": sum(not it.wrote for it in heard),
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--every", type=int, default=1, help="of the renderings, take each N-th")
    asked = parser.parse_args()
    text = json.dumps(measure(asked.every), indent=2) + "\n"
    (asked.out / "words_of_users.json").write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
