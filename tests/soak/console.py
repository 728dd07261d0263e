"""A long conversation in a browser, compared sample by sample at the audio worklets, by hand.

    python -m tests.soak.console [--seconds 360] [--out docs/evidence]

A headless Chromium opens the console of a server with `tiny`, by one click, and talks: its
microphone plays a question and a pause, again and again. Next to each of the page's worklets is
another one (`javascript/taps.js`), which is given the same blocks of sound and keeps them. So what
is lost has a place:

- between the microphone's worklet and the server's log, or between the log and what the
  loudspeaker's worklet played: ours. Samples are compared with samples, and none may be missing,
  repeated or changed;
- before the microphone's worklet: the browser's, or the machine's. The tap counts its blocks
  against the clock, and the silent ones among them: the microphone's file is nowhere silent. A
  second browser does the same at the same time with a blank page and only taps, as a yardstick:
  one with the console's buffer and one with the usual one, which misses more on a busy machine.

It also says how many clicks and seconds lead from the page's load to the first spoken answer. What
was found goes to `console.json`; it exits with 1 if we lost sound. The context of `tiny` is full
after nearly ten minutes, which ends the conversation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from base64 import b64decode
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import soundfile

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.requests import Append
from recorder.format.format import Record
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.eval.evaluate import measure_log
from replay.story.reading import SessionStory
from tests.browser.chromium import CHROMIUM, Tab, chromium
from tests.live.servers import LiveServer, live_server
from tests.project.evidence import add_out, keep

SPEECH: Final = Path(__file__).parents[2] / "fixtures" / "speech" / "heldout"
TAPS: Final = Path(__file__).parents[1] / "javascript" / "taps.js"
NOISE: Final = 0.001
"""In the microphone's file everywhere: a block that is silent is one that the browser lacked."""
QUIET_S: Final = 1
"""Without a sound, when the last answer is over: then it is played to its end."""
HINTS: Final = (0.05, "interactive")
"""Buffers of the yardstick: the console's, in seconds, and what browsers take by themselves."""
PIECES: Final = 100
"""Of a tap, fetched from the page at once: ten seconds."""
WINDOW_SAMPLES: Final = 480
"""By which a place in sound is found again: noise makes such a stretch the only one."""
Samples = npt.NDArray[np.float32]


def write_microphone(path: Path) -> None:
    """Write what the browser's microphone plays: a question, and time to hear the answer out."""
    question, rate = soundfile.read(SPEECH / "076-read-me-the-news.flac", dtype="float32")
    pause = np.zeros(rate, np.float32)
    sound = np.concatenate([pause, question, *[pause] * 7])
    sound += NOISE * np.random.default_rng(0).standard_normal(len(sound), np.float32)
    soundfile.write(path, sound, rate, subtype="PCM_16")


def tap_page(tab: Tab) -> None:
    """Have each page that the tab opens from now on tapped; the taps need another policy."""
    tab.call("Page.setBypassCSP", enabled=True)
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=TAPS.read_text("utf-8"))


def count_beside(tab: Tab, page: Path) -> None:
    """Open a microphone as the console does, on a page that only counts what comes."""
    page.write_text("<!doctype html><title>yardstick</title>", "utf-8")
    tab.open(page)
    same = dict.fromkeys(("echoCancellation", "noiseSuppression", "autoGainControl"), True)
    for hint in HINTS:
        context = {"sampleRate": INPUT_RATE_HZ, "latencyHint": hint}
        asked = json.dumps([{"channelCount": 1, **same}, context])
        tab.run(f"countMicrophone(...{asked})")


def converse(tab: Tab, server: LiveServer, seconds: float) -> dict[str, Any]:
    """Talk by one click; return when what was seen, and the recording's id."""
    host, port = server.address
    began_s = time.monotonic()
    tab.open(f"http://{host}:{port}/")
    tab.until("document.querySelector('.talk .primary.large:not([disabled])')?.checkVisibility()")
    tab.run("document.querySelector('.talk .primary.large').click()")
    tab.until("document.querySelector('.talk').dataset.state === 'speaking'")
    first_s = time.monotonic() - began_s
    state = "document.querySelector('.talk').dataset.state"
    while time.monotonic() - began_s < seconds and tab.run(state) != "ended":
        time.sleep(1)
    if tab.run(state) != "ended":  # a conversation ends by itself where the model's context is full
        tab.until(f"{state} === 'listening' && isQuiet({QUIET_S})")
        tab.run("document.querySelector('.talk .large').click()")
    tab.until("document.querySelector('.links a') !== null")
    link = tab.run("document.querySelector('.links a').getAttribute('href')")
    return {
        "clicks_to_the_first_answer": 2,  # the page's, and the browser's for the microphone
        "seconds_to_the_first_answer": round(first_s, 2),
        "ended": tab.run("document.querySelector('.detail').textContent"),
        "recording": link.split("/")[3],
    }


def arrival(tab: Tab, index: int) -> dict[str, Any]:
    """What reached a microphone's tap, against the clock."""
    counts, rate = tab.run(f"[taps[{index}].counts, taps[{index}].rate]")
    heard_ms = counts["frames"] * 1000 / rate
    silent_ms = counts["silent"] * 1000 / rate
    clock_ms = counts["lastMs"] - counts["beganMs"]
    return {
        "clock_ms": clock_ms,
        "sound_ms": round(heard_ms - silent_ms, 1),
        "silent_ms": round(silent_ms, 1),
        "missing_ms": round(clock_ms - heard_ms + silent_ms, 1),
        "longest_wait_ms": counts["longestMs"],
    }


def tap_of(tab: Tab, kind: str) -> int:
    """The number of a page's first tap of a kind."""
    index: int = tab.run(f"taps.findIndex((it) => it.kind === '{kind}')")
    return index


def tapped(tab: Tab, index: int) -> Samples:
    """Fetch the samples of a page's tap."""
    count = tab.run(f"taps[{index}].pieces.length")
    parts = [tab.run(f"tapped({index}, {at}, {PIECES})") for at in range(0, count, PIECES)]
    return np.frombuffer(b"".join(map(b64decode, parts)), np.float32)


@attrs.frozen
class Sound:
    """The sound of a recording: what its client sent and was sent, and how long that took."""

    heard: Samples
    spoken: Samples
    arrived_ns: list[int]


def read_sound(log: Path) -> Sound:
    """Read the sound of a recording, in both directions."""
    heard, spoken, arrived_ns = list[bytes](), list[bytes](), list[int]()
    story = SessionStory()
    with LogReader(log) as reader:
        for item in reader:
            decoded = story.take(item)
            if decoded is None or not isinstance(item, Record) or not decoded.frame:
                continue
            if item.kind == "rx":
                request = story.wire.request(decoded.frame)
                if isinstance(request, Append):
                    heard.append(request.pcm)
                    arrived_ns.append(item.at_ns)
            elif item.kind == "tx":
                for message in story.wire.messages(decoded.frame):
                    spoken.append(getattr(message, "pcm", b""))
    read = (np.frombuffer(b"".join(pieces), np.float32) for pieces in (heard, spoken))
    return Sound(*read, arrived_ns)


def find(window: Samples, sound: Samples) -> int:
    """The first place of a window in a sound; -1 if there is none."""
    wanted, bytes_ = window.tobytes(), sound.tobytes()
    at = bytes_.find(wanted)
    while at % SAMPLE_BYTES and at >= 0:
        at = bytes_.find(wanted, at + 1)
    return at // SAMPLE_BYTES if at >= 0 else -1


def compare(kept: Samples, source: Samples) -> dict[str, int]:
    """Compare samples with those that they come from, from the first of `kept` on.

    Returns:
        How many are in `kept` (`samples`), are missing from it (`lost`), are in it twice
        (`repeated`), or are not in the source (`changed`); and how many the source has before the
        first and after the last of them (`before`, `after`).
    """
    sounding = int(np.argmax(kept != 0))  # any silence could be the first
    window = kept[sounding : sounding + WINDOW_SAMPLES]
    here, there = 0, max(0, find(window, source) - sounding)
    found = {"samples": len(kept), "lost": 0, "repeated": 0, "changed": 0, "before": there}
    while here < len(kept):
        same = kept[here:][: len(source) - there] == source[there:][: len(kept) - here]
        run = len(same) if same.all() else int(np.argmin(same))
        here, there = here + run, there + run
        if here == len(kept):
            break
        if (at := find(kept[here : here + WINDOW_SAMPLES], source[there:])) > 0:
            found["lost"] += at
            there += at
        elif (at := find(kept[here : here + WINDOW_SAMPLES], source)) >= 0:
            found["repeated"] += there - at
            there = at
        else:
            found["changed"] += 1
            here, there = here + 1, there + 1
    return found | {"after": len(source) - there}


def heard_of(samples: Samples) -> Samples:
    """Leave out silence: a loudspeaker's worklet plays it where it has nothing."""
    return samples[samples != 0]


def judge(found: dict[str, Any]) -> bool:
    """Whether no sample of ours was lost, repeated or changed, in either direction."""
    microphone, loudspeaker = found["microphone_to_log"], found["log_to_loudspeaker"]
    wrong = [it[key] for it in (microphone, loudspeaker) for key in ("lost", "repeated", "changed")]
    is_whole = not any(wrong) and not loudspeaker["before"] and not loudspeaker["after"]
    return is_whole and bool(microphone["samples"] and loudspeaker["samples"])


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """Talk in one browser, count in another, and compare what was kept."""
    write_microphone(folder / "question.wav")
    flags = (
        *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
        "--autoplay-policy=no-user-gesture-required",
        f"--use-file-for-fake-audio-capture={folder / 'question.wav'}",
    )
    options = ("--record", str(folder / "kept"), "--limit-audio-s", "3600")
    with ExitStack() as stack:
        server = stack.enter_context(live_server(*options, model="tiny"))
        tab = stack.enter_context(chromium(folder / "browser", *flags))
        yardstick = stack.enter_context(chromium(folder / "yardstick", *flags))
        for each in (tab, yardstick):
            tap_page(each)
        count_beside(yardstick, folder / "yardstick.html")
        found = converse(tab, server, seconds)
        log = Store(folder / "kept").path(found.pop("recording"))
        sound = read_sound(log)
        row = measure_log(log, log.name)
        microphone, speaker = (tap_of(tab, kind) for kind in ("microphone", "speaker"))
        return {
            **found,
            "session_s": round((sound.arrived_ns[-1] - sound.arrived_ns[0]) / NS_PER_S, 1),
            "microphone_to_log": compare(sound.heard, tapped(tab, microphone)),
            "log_to_loudspeaker": compare(heard_of(tapped(tab, speaker)), heard_of(sound.spoken)),
            "before_the_worklet": {
                "console": arrival(tab, microphone),
                "yardstick": arrival(yardstick, 0),
                "yardstick_interactive": arrival(yardstick, 1),
            },
            "gaps_within_answers": row.own["underruns"].value if "underruns" in row.own else 0,
        }


def main() -> int:
    """Talk, count, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=360)
    add_out(parser)
    asked = parser.parse_args()
    if CHROMIUM is None:
        print("there is no Chromium: nothing is measured")
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        found = measure(Path(name), asked.seconds)
    keep(found, asked.out, "console")
    return 0 if judge(found) else 1


if __name__ == "__main__":
    sys.exit(main())
