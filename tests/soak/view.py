"""The page of a session of ten minutes, measured in a browser, by hand.

    python -m tests.soak.view [--units N] [--out docs/evidence]

A session of 600 seconds with a picture in each is recorded on virtual time, and its page made and
opened in a headless Chromium. What was found goes to `view.json`:

- the page's size, and the time to make it and to open it;
- the browser's memory for it, after a collection of garbage, before and after it was used;
- frames, while it plays and while the time line, the records and the words are scrolled: how long
  scripts, layout and painting of one take, how much of that the browser's thread computed (which a
  busy machine does not make longer), and the time from one to the next. An empty page in the same
  browser, before and after, says what the machine itself takes;
- words of `antiphon recordings inspect` that the page lacks, in its data and in the words that it
  shows.

It exits with 1 if a word is missing, or if a frame of anything needs more of the processor, on
average, than a display of 60 Hz gives it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import simplejpeg

from recorder.read.reader import LogReader
from replay.story.inspect import Inspection, inspect, to_json
from replay.view.document import page_of
from tests.browser.chromium import CHROMIUM, Tab, chromium
from tests.browser.view_pages import read_page, record_long, texts_of
from tests.project.evidence import add_out, keep
from tests.sessions.in_memory import base64

FRAME_MS: Final = 1000 / 60
SIZE: Final = (1400, 900)
PICTURES: Final = 8
"""Of another colour each, 320 by 240."""
FRAMES: Final = 300
"""Five seconds of each kind."""
ACTIONS: Final = {
    "playing": "() => {}",
    "time line": "(i) => wheel('#lanes', { deltaX: i % 100 < 50 ? 40 : -40 })",
    "zoom": "(i) => wheel('#lanes', { deltaY: i % 100 < 50 ? -40 : 40 })",
    "records": "(i) => scroll('#rows', 200)",
    "words": "(i) => scroll('#said', 60)",
}
MEASURE: Final = """
globalThis.wheel = (selector, by) => {
  const element = document.querySelector(selector);
  const at = { clientX: 700, clientY: 200, cancelable: true };
  element.dispatchEvent(new WheelEvent("wheel", { ...by, ...at }));
};
globalThis.scroll = (selector, by) => {
  const element = document.querySelector(selector);
  const isAtEnd = element.scrollTop + element.clientHeight >= element.scrollHeight - 1;
  element.scrollTop = isAtEnd ? 0 : element.scrollTop + by;
};
globalThis.frames = (count, act) => new Promise((resolve) => {
  const [works, waits] = [[], []];
  const { port1, port2 } = new MessageChannel(); // its message comes when the frame is painted
  let [index, began, last] = [0, 0, 0];
  port1.onmessage = () => {
    works.push(performance.now() - began);
    if (++index < count) return requestAnimationFrame(frame);
    resolve([works, waits]);
  };
  const frame = (now) => {
    began = performance.now();
    if (last) waits.push(now - last);
    last = now;
    act(index);
    port2.postMessage(0);
  };
  requestAnimationFrame(frame);
});0
"""


def pictures() -> tuple[str, ...]:
    """What a camera might see: gradients, each in another colour."""
    shade = np.add.outer(np.arange(240), np.arange(320)).astype(np.uint8)
    images = (
        np.stack([shade, shade[::-1], np.full_like(shade, 30 * n)], 2) for n in range(PICTURES)
    )
    return tuple(base64(simplejpeg.encode_jpeg(np.ascontiguousarray(image))) for image in images)


def task_s(tab: Tab) -> float:
    """Seconds that the page's thread has computed."""
    metrics = tab.call("Performance.getMetrics")["metrics"]
    return next(float(it["value"]) for it in metrics if it["name"] == "TaskDuration")


def frames(tab: Tab, action: str) -> dict[str, float]:
    """What frames cost while something is done, in milliseconds."""
    before_s = task_s(tab)
    works, waits = tab.run(f"frames({FRAMES}, {action})")
    return {
        "computed_mean": round((task_s(tab) - before_s) * 1000 / FRAMES, 2),
        "work_median": round(float(np.median(works)), 2),
        "work_p99": round(float(np.percentile(works, 99)), 2),
        "work_longest": round(max(works), 2),
        "apart_median": round(float(np.median(waits)), 2),
        "apart_longest": round(max(waits), 2),
    }


def memory(tab: Tab) -> dict[str, int]:
    """What the page holds: objects, what the browser holds for them, buffers, and nodes."""
    tab.call("HeapProfiler.collectGarbage")
    heap = tab.call("Runtime.getHeapUsage")
    return {
        "objects_bytes": round(heap["usedSize"]),
        "browser_bytes": round(heap.get("embedderHeapUsedSize", 0)),
        "buffers_bytes": round(heap.get("backingStorageSize", 0)),
        "nodes": tab.run("document.querySelectorAll('*').length"),
    }


def empty(tab: Tab) -> dict[str, float]:
    """Frames of a page with nothing in it."""
    tab.open("about:blank")
    tab.run(MEASURE)
    return frames(tab, "() => {}")


def missing_words(inspected: Inspection, page: Path, shown: str) -> dict[str, list[str]]:
    """Texts of `inspect` that the page's data lack, and words of the model that are not shown."""
    texts = {*texts_of(to_json(inspected))} - {each.text for each in inspected.said}
    told = read_page(page.read_text("utf-8"))
    said = {word for unit in inspected.units for word in unit.text.split()}
    return {
        "in_the_data": sorted(texts - {*texts_of(told)}),
        "in_the_words_shown": sorted(said - {*shown.split()}),
    }


def use(tab: Tab, page: Path) -> dict[str, Any]:
    """Open a page, play it and scroll it."""
    before = empty(tab)
    began_s = time.monotonic()
    tab.open(page)
    tab.until("document.documentElement.classList.contains('ready')")
    opened_s = time.monotonic() - began_s
    found: dict[str, Any] = {
        "units": tab.run("antiphonView.view.session.story.units.length"),
        "opened_s": round(opened_s, 2),
        "own_script_ms": round(tab.run("antiphonView.readyMs")),
        "memory_when_open": memory(tab),
    }
    tab.run(MEASURE)
    tab.run("antiphonView.view.toggle()")
    tab.until("antiphonView.view.player.position > 0.5")
    found["frames_ms"] = {"playing": frames(tab, ACTIONS["playing"])}
    tab.run("antiphonView.view.toggle()")
    for name, action in ACTIONS.items():
        if name != "playing":
            found["frames_ms"][name] = frames(tab, action)
    shown = "[...document.querySelectorAll('#said .words')].map((it) => it.textContent).join(' ')"
    found |= {"memory_when_used": memory(tab), "shown": tab.run(shown)}
    return found | {"frames_ms_of_an_empty_page": [before, empty(tab)], "logged": tab.logged}


def measure(folder: Path, units: int) -> dict[str, Any]:
    """Record a session, make its page, and use it."""
    (folder / "logs").mkdir()
    log, page = record_long(folder / "logs", units, pictures()), folder / "page.html"
    began_s = time.monotonic()
    with LogReader(log) as reader, page.open("wb") as file:
        file.writelines(page_of(reader.head.fields, reader))
    made_s = time.monotonic() - began_s
    with LogReader(log) as reader:
        inspected = inspect(reader.head.fields, list(reader))
    with chromium(folder / "browser", "--autoplay-policy=no-user-gesture-required") as tab:
        tab.resize(*SIZE)
        tab.call("Performance.enable", timeDomain="threadTicks")
        found = use(tab, page)
    shown = found.pop("shown")
    return {
        "log_bytes": log.stat().st_size,
        "page_bytes": page.stat().st_size,
        "made_s": round(made_s, 2),
        **found,
        "missing": missing_words(inspected, page, shown),
    }


def main() -> int:
    """Measure, and keep what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=600)
    add_out(parser)
    asked = parser.parse_args()
    if CHROMIUM is None:
        print("there is no Chromium: nothing is measured")
        return 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        found = measure(Path(name), asked.units)
    keep(found, asked.out, "view")
    is_smooth = all(it["computed_mean"] < FRAME_MS for it in found["frames_ms"].values())
    return 0 if is_smooth and not any(found["missing"].values()) and not found["logged"] else 1


if __name__ == "__main__":
    sys.exit(main())
