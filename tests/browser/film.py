"""Film the console for the documentation: `make docs-pictures` (a minute, WebM with sound).

A user talks with `tiny`, stops, finds the recording, reads and hears it, talks on from there, and
compares the two. Nothing is staged: a headless Chromium shows the pages of a real server, the
microphone plays recorded questions, and the sound is that of the recordings, where they were made.
The first recording is kept next to the film; the site has its page, a live example.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Final

import attrs
import av
import numpy as np
import numpy.typing as npt
import simplejpeg
import soundfile

from protocol.values.limits import MS_PER_S
from protocol.values.model import INPUT_RATE_HZ
from recorder.format.format import recording_id_of
from recorder.read.reader import LogReader
from recorder.storage.store import Store
from replay.export.sound import STEREO_HZ, wav_of
from tests.browser.chromium import FAKE_DEVICES, Tab, chromium
from tests.browser.pictures import TRANSCRIBER
from tests.live.servers import live_server

ROOT: Final = Path(__file__).parents[2]
SPEECH: Final = ROOT / "fixtures" / "speech" / "heldout"
OUT: Final = ROOT / "docs" / "pictures"
QUESTIONS: Final = ("005-what-time-is-it", "012-tell-me-a-joke", "076-read-me-the-news")
SIZE: Final = (1100, 688)
PICTURE_S: Final = 0.1
"""Between two pictures; a busy machine takes fewer."""
BYTES_MAX: Final = 2_000_000
SHOWN: Final = """
globalThis.shown = (selector, text) => [...document.querySelectorAll(selector)].find(
  (it) => it.checkVisibility() && !it.disabled && it.textContent.trim().startsWith(text));
globalThis.hand ??= Object.assign(document.createElement('div'), {popover: 'manual'});
hand.style.cssText = `position: fixed; inset: auto; left: 550px; top: 640px; margin: -13px;
  padding: 0; width: 26px; height: 26px; border: 3px solid #d7263d; border-radius: 50%;
  background: #d7263d40; pointer-events: none; transition: left .35s, top .35s`;
globalThis.line ??= Object.assign(document.createElement('div'), {popover: 'manual'});
line.style.cssText = `position: fixed; inset: auto 0 0 0; width: 100%; margin: 0; border: 0;
  padding: 9px; text-align: center; font: 600 17px system-ui; color: #fff; background: #1c2126e8`;
document.body.append(line, hand); line.showPopover(); hand.showPopover(); 0
"""
"""What a film needs and a page has not: a hand that clicks, and a line that says what is seen."""


@attrs.define
class Film:
    """Pictures of a tab with their times, and sounds with theirs; times in seconds from its start.

    Attributes:
        sounds: stereo, shape (samples, 2), with the time at which each begins.
    """

    tab: Tab
    pictures: list[tuple[float, bytes]] = attrs.Factory(list)
    sounds: list[tuple[float, npt.NDArray[np.int16]]] = attrs.Factory(list)
    _cut_s: float = 0
    _began_s: float = attrs.Factory(time.monotonic)
    _told: str = ""

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._began_s - self._cut_s

    def roll(self, seconds: float, until: str = "false") -> None:
        """Take pictures for so long, or until the page says so."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            at_s = self.now_s
            shot = self.tab.call("Page.captureScreenshot", format="jpeg", quality=92)
            self.pictures.append((at_s, b64decode(shot["data"])))
            if self.tab.run(until):
                return
            time.sleep(max(0.0, PICTURE_S - (self.now_s - at_s)))

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Leave out what takes time and shows nothing, such as a page that loads."""
        began_s = time.monotonic()
        yield
        self.tab.run(f"{SHOWN}; line.textContent = {json.dumps(self._told)}; 0")
        self._cut_s += time.monotonic() - began_s

    def tell(self, text: str) -> None:
        """Say below what is seen."""
        self._told = text
        self.tab.run(f"line.textContent = {json.dumps(text)}")

    def click(self, selector: str, text: str = "") -> None:
        """Move the hand to an element and click; it must be there."""
        it = f"shown({json.dumps(selector)}, {json.dumps(text)})"
        with self.cut():
            self.tab.until(f"{it} !== undefined")
        self.tab.run(
            f"(() => {{ const it = {it}; it.scrollIntoView({{block: 'nearest'}});"
            "const {left, top, width, height} = it.getBoundingClientRect();"
            "hand.hidePopover(); hand.showPopover();"
            "hand.style.left = `${left + Math.min(width / 2, 60)}px`;"
            "hand.style.top = `${top + height / 2}px`; })()"
        )
        self.roll(0.7)
        self.tab.run(f"{it}.click()")

    def go(self, address: str, condition: str) -> None:
        """Open another page, which is there at once."""
        with self.cut():
            self.tab.open(address)
            self.tab.until(condition)

    def write(self, path: Path) -> None:
        """Write it as WebM: VP9 and Opus."""
        end_s = self.pictures[-1][0] + 1
        mixed = np.zeros((int(end_s * STEREO_HZ), 2), np.int32)
        for at_s, sound in self.sounds:
            begin = int(at_s * STEREO_HZ)
            piece = sound[: len(mixed) - begin]
            mixed[begin : begin + len(piece)] += piece
        with av.open(str(path), "w", format="webm") as file:
            video = file.add_stream("libvpx-vp9", rate=10)
            video.codec_context.time_base = Fraction(1, MS_PER_S)
            video.width, video.height, video.pix_fmt = *SIZE, "yuv420p"
            video.options = {"crf": "42", "b": "0", "cpu-used": "4", "row-mt": "1", "g": "300"}
            audio = file.add_stream("libopus", rate=STEREO_HZ, layout="mono")
            audio.bit_rate = 32_000
            for at_s, jpeg in [*self.pictures, (end_s, self.pictures[-1][1])]:
                picture = av.VideoFrame.from_ndarray(simplejpeg.decode_jpeg(jpeg))
                picture.pts, picture.time_base = round(at_s * MS_PER_S), Fraction(1, MS_PER_S)
                file.mux(video.encode(picture))
            file.mux(video.encode())
            mono = np.clip(mixed.sum(axis=1), -32_768, 32_767).astype(np.int16)
            for at in range(0, len(mono), STEREO_HZ):
                piece = mono[None, at : at + STEREO_HZ]
                frame = av.AudioFrame.from_ndarray(piece, format="s16", layout="mono")
                frame.sample_rate, frame.pts = STEREO_HZ, at
                file.mux(audio.encode(frame))
            file.mux(audio.encode())
        size = path.stat().st_size
        print(f"{path.relative_to(ROOT)}: {size // 1000} kB, {end_s:.0f} s")
        assert size < BYTES_MAX


def sound_of(log: Path) -> npt.NDArray[np.int16]:
    """Both voices of a recording: 48 kHz, shape (samples, 2)."""
    with LogReader(log) as reader:
        return np.frombuffer(b"".join(wav_of(reader.head.fields, reader)), "<i2").reshape(-1, 2)


def talk(film: Film, button: str, seconds: float, logs: Path) -> tuple[Path, float]:
    """Talk for a while; return the log, and when in the film it began."""
    before = {it.path for it in Store(logs).logs()}
    film.click("button", button)
    state = "document.querySelector('.talk').dataset.state"
    film.roll(10, f"['listening', 'speaking'].includes({state})")
    began_s = film.now_s
    film.roll(seconds)
    film.click("button", "Stop")
    film.roll(1, f"{state} === 'ended'")
    (log,) = {it.path for it in Store(logs).logs()} - before
    film.sounds.append((began_s, sound_of(log)))
    return log, began_s


def shoot(tab: Tab, base: str, logs: Path) -> tuple[Film, Path]:
    """Do what the film shows; return it, and the first recording."""
    film = Film(tab)
    film.go(f"{base}/#talk", "document.title === 'Talk - Antiphon'")
    film.tell("antiphon serve --open")
    film.roll(2)
    film.tell("Talk: both voices at once, and the words of both")
    first, _ = talk(film, "Start talking", 20, logs)
    film.tell("Every conversation is recorded")
    film.roll(1)
    film.click("#nav a", "Recordings")
    film.roll(3)
    film.tell("Read it and hear it: each second, each decision")
    view = f"{base}/api/recordings/{recording_id_of(first)}/view"
    film.go(view, "document.querySelector('#talk-on')?.search === '?to=talk'")
    film.roll(1.5)
    tab.run("antiphonView.view.player.seek(2)")
    film.click("#play")
    began_s = film.now_s
    film.roll(6)
    heard = sound_of(first)[2 * STEREO_HZ : int((2 + film.now_s - began_s) * STEREO_HZ)]
    film.sounds.append((began_s, heard))
    tab.run("antiphonView.view.player.pause()")
    film.tell("Talk on from any second of it")
    film.click("#talk-on")
    with film.cut():
        tab.until("document.querySelector('.talk .notice')?.textContent.includes('remember')")
    film.roll(1.5)
    talk(film, "Start talking", 10, logs)
    film.tell("Compare the two: what was said, and where they part")
    film.click("#nav a", "Recordings")
    film.roll(1)
    for _ in range(2):
        film.click("td.pick input:not(:checked)")
    film.click("a.button", "Compare")
    film.roll(5)
    return film, first


def main() -> None:
    """Film it, and keep the first recording."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder, logs = Path(made), Path(made) / "logs"
        sounds = [np.zeros(3 * INPUT_RATE_HZ, np.float32)]  # a model only listens at first
        for name in QUESTIONS:
            said, rate_hz = soundfile.read(SPEECH / f"{name}.flac", dtype="float32")
            sounds += [said, np.zeros(5 * rate_hz, np.float32)]
        microphone = folder / "microphone.wav"
        soundfile.write(microphone, np.concatenate(sounds), rate_hz, "PCM_16")
        heard = f"--use-file-for-fake-audio-capture={microphone}"
        served = live_server("--record", str(logs), "--transcriber", TRANSCRIBER, model="tiny")
        with served as server, chromium(folder / "browser", *FAKE_DEVICES, heard) as tab:
            tab.resize(*SIZE)
            film, first = shoot(tab, "http://{}:{}".format(*server.address), logs)
            tab.open("about:blank")
        film.write(OUT / "film.webm")
        example = OUT / "recording.session.zst"
        shutil.copyfile(first, example)
        print(f"{example.relative_to(ROOT)}: {example.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
