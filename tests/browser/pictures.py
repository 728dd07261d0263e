"""Take the pictures of the documentation: `make docs-pictures`; `film` has the film.

The console during a conversation with `tiny`, whose microphone is a recorded question, and the page
of that conversation's recording, in a headless Chromium, as WebP.
"""

from __future__ import annotations

import tempfile
from base64 import b64decode
from pathlib import Path
from typing import Final

import numpy as np
import soundfile

from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.view.document import page_of
from runtime.model.models import MOONSHINE, has_moonshine
from tests.browser.chromium import FAKE_DEVICES, Tab, chromium
from tests.live.servers import live_server

ROOT: Final = Path(__file__).parents[2]
QUESTION: Final = ROOT / "fixtures" / "speech" / "heldout" / "076-read-me-the-news.flac"
OUT: Final = ROOT / "docs" / "pictures"
TRANSCRIBER: Final = MOONSHINE if has_moonshine() else "tiny"
QUALITY: Final = 80
SIZE: Final = (1200, 760)
START: Final = """[...document.querySelectorAll('button')].find(
  (it) => it.textContent === 'Start talking' && !it.disabled && it.checkVisibility())"""


def take(tab: Tab, name: str) -> None:
    """Write what is seen."""
    shot = tab.call("Page.captureScreenshot", format="webp", quality=QUALITY)
    path = OUT / f"{name}.webp"
    path.write_bytes(b64decode(shot["data"]))
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size // 1000} kB")


def main() -> None:
    """Take both."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        said, rate_hz = soundfile.read(QUESTION, dtype="float32")
        pause = np.zeros(rate_hz, np.float32)
        microphone = folder / "microphone.wav"
        soundfile.write(microphone, np.concatenate([pause, said, *[pause] * 5]), rate_hz, "PCM_16")
        heard = f"--use-file-for-fake-audio-capture={microphone}"
        with chromium(folder / "browser", *FAKE_DEVICES, heard) as tab:
            tab.resize(*SIZE)
            options = ("--record", str(folder / "logs"), "--transcriber", TRANSCRIBER)
            with live_server(*options, model="tiny") as server:
                tab.open("http://{}:{}/#talk".format(*server.address))
                tab.until(f"{START} !== undefined")
                tab.run(f"{START}.click()")
                tab.until("document.querySelectorAll('.bar').length >= 9")
                take(tab, "console")
                tab.open("about:blank")
            (log,) = Store(folder / "logs").logs()
            page = folder / "view.html"
            with LogReader(log.path) as reader:
                page.write_bytes(b"".join(page_of(reader.head.fields, reader)))
            tab.open(page)
            tab.until("document.body.textContent.includes('unit')")
            take(tab, "view")


if __name__ == "__main__":
    main()
