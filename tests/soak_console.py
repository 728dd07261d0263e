"""A long conversation in a browser, counted at the audio worklets, by hand.

    python -m tests.soak_console [--seconds N] [--out docs/evidence]

A headless Chromium opens the console of a server with `tiny`, by one click, and talks for ten
minutes: its microphone plays a question and a pause, again and again. The session's recording then
says what the browser's audio thread took in and played, sample by sample:

- the microphone: samples that the worklet handed over, and those that fit into the time between
  the first message and the last; they may differ by the jitter of a message, not more;
- the loudspeaker: milliseconds that the server sent, and that the worklet said it had played.

It also says how many clicks and seconds lead from the page's load to the first spoken answer, and
what the page of the recording costs: its size, the time to open it, its memory. What was found goes
to `console.json`; it exits with 1 if sound was lost. The context of `tiny` is full after nearly ten
minutes, which ends the conversation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import soundfile

from protocol.values.limits import NS_PER_S
from protocol.values.model import INPUT_RATE_HZ, OUTPUT_RATE_HZ, SAMPLE_BYTES
from protocol.values.requests import Append
from recorder.format.records import Record
from recorder.keep.store import Store
from recorder.read.reader import LogReader
from replay.eval.evaluate import measure_log
from replay.story.reading import SessionStory
from replay.view.document import page_of
from tests.browser import Tab, chromium
from tests.live.servers import LiveServer, live_server

SPEECH: Final = Path(__file__).parents[1] / "fixtures" / "speech" / "heldout"
JITTER_MS_MAX: Final = 200
"""Of a message, on a busy machine."""
SETTLED_S: Final = 3
"""After the last answer: its sound is played by then."""


def write_microphone(path: Path) -> None:
    """Write what the browser's microphone plays: a question, and time to hear the answer out."""
    question, rate = soundfile.read(SPEECH / "076-read-me-the-news.flac", dtype="float32")
    pause = np.zeros(rate, np.float32)
    soundfile.write(path, np.concatenate([pause, question, *[pause] * 7]), rate, subtype="PCM_16")


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
        tab.until(f"{state} === 'listening'")
        time.sleep(SETTLED_S)
        tab.run("document.querySelector('.talk .large').click()")
    tab.until("document.querySelector('.links a') !== null")
    link = tab.run("document.querySelector('.links a').getAttribute('href')")
    return {
        "clicks_to_the_first_answer": 2,  # the page's, and the browser's for the microphone
        "seconds_to_the_first_answer": round(first_s, 2),
        "ended": tab.run("document.querySelector('.detail').textContent"),
        "recording": link.split("/")[3],
    }


def count(log: Path) -> dict[str, Any]:
    """Count the sound of a recording, in both directions."""
    heard, arrived_ns, sent_bytes, played_ms = 0, list[int](), 0, 0
    story = SessionStory()
    with LogReader(log) as reader:
        for item in reader:
            passage = story.take(item)
            if passage is None or not isinstance(item, Record) or not passage.frame:
                continue
            if item.kind == "rx":
                request = story.wire.request(passage.frame)
                if isinstance(request, Append):
                    heard += len(request.pcm) // SAMPLE_BYTES
                    arrived_ns.append(item.at_ns)
            elif item.kind == "tx":
                for message in story.wire.messages(passage.frame):
                    sent_bytes += len(getattr(message, "pcm", b""))
    if story.playback:
        played_ms = story.playback[-1].played_ms
    sent_ms = sent_bytes // SAMPLE_BYTES * 1000 // OUTPUT_RATE_HZ
    spoken_s = (arrived_ns[-1] - arrived_ns[0]) / NS_PER_S
    wanted = spoken_s * INPUT_RATE_HZ + heard / len(arrived_ns)
    row = measure_log(log, log.name)
    return {
        "session_s": round(spoken_s, 1),
        "microphone_samples": heard,
        "microphone_samples_by_the_clock": round(wanted),
        "microphone_drift_ms": round((heard - wanted) / INPUT_RATE_HZ * 1000, 1),
        "speech_sent_ms": sent_ms,
        "speech_played_ms": played_ms,
        "speech_lost_or_repeated_ms": sent_ms - played_ms,
        "gaps_within_answers": row.own["underruns"].value if "underruns" in row.own else 0,
    }


def cost_of_page(tab: Tab, log: Path, folder: Path) -> dict[str, Any]:
    """Make a recording's page, open it, and measure both."""
    page, began_s = folder / "page.html", time.monotonic()
    with LogReader(log) as reader, page.open("wb") as file:
        file.writelines(page_of(reader.head.fields, reader))
    made_s = time.monotonic() - began_s
    began_s = time.monotonic()
    tab.open(page)
    tab.until("document.documentElement.classList.contains('ready')")
    opened_s = time.monotonic() - began_s
    tab.call("Performance.enable")
    tab.call("HeapProfiler.collectGarbage")
    metrics = {it["name"]: it["value"] for it in tab.call("Performance.getMetrics")["metrics"]}
    return {
        "page_units": tab.run("antiphonView.view.session.story.units.length"),
        "page_bytes": page.stat().st_size,
        "page_made_s": round(made_s, 2),
        "page_opened_s": round(opened_s, 2),
        "page_script_ms": round(tab.run("antiphonView.readyMs")),
        "page_heap_bytes": round(metrics["JSHeapUsedSize"]),
        "page_nodes": round(metrics["Nodes"]),
    }


def main() -> int:
    """Talk, count, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--out", type=Path, default=Path("docs/evidence"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_microphone(folder / "question.wav")
        flags = (
            *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
            f"--use-file-for-fake-audio-capture={folder / 'question.wav'}",
        )
        options = ("--record", str(folder / "kept"), "--limit-audio-s", "3600")
        with (
            live_server(*options, model="tiny") as server,
            chromium(folder / "browser", *flags) as tab,
        ):
            found = converse(tab, server, asked.seconds)
            log = Store(folder / "kept").path(found.pop("recording"))
            found |= count(log) | cost_of_page(tab, log, folder)
    text = json.dumps(found, indent=2) + "\n"
    (asked.out / "console.json").write_text(text, "utf-8")
    print(text, end="")
    is_heard = abs(found["microphone_drift_ms"]) < JITTER_MS_MAX
    return 0 if is_heard and not found["speech_lost_or_repeated_ms"] else 1


if __name__ == "__main__":
    sys.exit(main())
