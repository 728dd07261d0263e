"""A headless Chromium, driven over its debugging protocol: for pages that people look at.

`chromium(folder)` starts one and gives a `Tab`; what a page logs, throws and asks the network for
is kept, so that a test can say that there was none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from websockets.sync.client import ClientConnection, connect

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
WAIT_S: Final = 30
AXE: Final = Path(__file__).parents[2] / "runtime/web/node_modules/axe-core/axe.min.js"
"""Finds what keeps people from using a page; `npm ci` in runtime/web brings it."""
FLAGS: Final = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--mute-audio", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0", "--hide-scrollbars"),
)
GONE: Final = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
"""What the browser answers of a page that is left for another."""
FAKE_DEVICES: Final = (
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
    "--autoplay-policy=no-user-gesture-required",
)
"""A microphone that beeps and a camera that shows a clock, which every page may have."""


class NavigatedError(AssertionError):
    """The page went away while it was asked: what it would have answered is not known."""


class Tab:
    """One page of the browser.

    Attributes:
        logged: what it wrote to the console, and what it threw.
        requested: the addresses it asked for, but for those that are data in themselves.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self.logged: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._number = 0
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=WAIT_S))
            if message.get("id") == self._number:
                if error := message.get("error"):
                    gone = error["message"] in GONE
                    raise NavigatedError(error) if gone else AssertionError(error)
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def open(self, page: Path | str) -> None:
        """Open a page and wait until it says that it is ready, or failed."""
        url = page.as_uri() if isinstance(page, Path) else page
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, condition: str, *, setup: str = "") -> None:
        """Wait until an expression holds, on this page or the next; `setup` runs first."""
        if setup:
            self.run(setup)
        give_up = time.monotonic() + WAIT_S
        while not self._holds(condition):
            assert time.monotonic() < give_up, f"never: {condition}; {self.logged}"
            time.sleep(0.02)

    def _holds(self, condition: str) -> bool:
        """Ask once; a page that is being left answers no."""
        try:
            return bool(self.run(condition))
        except NavigatedError:
            return False

    def key(self, key: str, **also: Any) -> None:
        """Press a key and let it go."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **also)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **also)

    def type(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def mouse(self, kind: str, x: float, y: float, **also: Any) -> None:
        """Do something with the mouse: `mousePressed`, `mouseMoved`, `mouseWheel`..."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **also)

    def click(self, x: float, y: float) -> None:
        """Press and release the left button."""
        for kind, buttons in (("mouseMoved", 0), ("mousePressed", 1), ("mouseReleased", 0)):
            self.mouse(kind, x, y, button="left", buttons=buttons, clickCount=1)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Press, move in ten steps, release."""
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        for step in range(1, 11):
            at = (x + (to_x - x) * step / 10, y + (to_y - y) * step / 10)
            self.mouse("mouseMoved", *at, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, to_y, button="left", buttons=0, clickCount=1)

    def resize(self, width: int, height: int, *, density: float = 1, dark: bool = False) -> None:
        """Give the window a size, and light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=density,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def beyond_tab(self) -> list[str]:
        """Press Tab through the page; give what a mouse can use and Tab does not reach."""
        count = self.run(
            """(() => {
              const all = "a[href], button, input, select, textarea, summary, [tabindex]";
              globalThis.usable = [...document.querySelectorAll(all)].filter((it) =>
                it.checkVisibility({visibilityProperty: true}) && !it.disabled && it.tabIndex >= 0);
              globalThis.reached = new Set();
              document.activeElement.blur();
              const players = [...document.querySelectorAll("audio[controls]")];
              return usable.length + 6 * players.filter((it) => it.checkVisibility()).length;
            })()"""
        )
        assert count, "nothing on the page can be used"
        for _ in range(count + 2):
            self.key("Tab", code="Tab", windowsVirtualKeyCode=9)
            self.run("reached.add(document.activeElement), 0")
        missed: list[str] = self.run(
            "usable.filter((it) => !reached.has(it)).map((it) => it.outerHTML)"
        )
        return missed

    def barriers(self) -> list[Any]:
        """What axe-core finds serious or critical in the page; nothing if it is not installed."""
        if not AXE.exists():
            return []
        self.run(f"{AXE.read_text()};0")
        return self.run(
            "axe.run().then(({violations}) => violations"
            ".filter(({impact}) => ['serious', 'critical'].includes(impact))"
            ".map(({id, nodes}) => [id, nodes.map(({html}) => html)]))"
        )

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.consoleAPICalled":
                said = [str(arg.get("value", arg.get("description"))) for arg in params["args"]]
                self.logged.append(" ".join(said))
            case "Runtime.exceptionThrown":
                self.logged.append(json.dumps(params["exceptionDetails"]))
            case "Log.entryAdded":
                entry = params["entry"]
                where = f" ({entry['url']})" if entry.get("url") else ""
                self.logged.append(entry["text"] + where)
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("data:", "blob:")):
                    self.requested.append(url)


@contextmanager
def chromium(folder: Path, *flags: str) -> Iterator[Tab]:
    """Run a browser with a profile of its own, until the context ends; `flags` are added."""
    assert CHROMIUM is not None
    port_file = folder / "DevToolsActivePort"
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={folder}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with connect(_address(port_file, process), max_size=None) as socket:
                yield Tab(socket)
        finally:
            process.terminate()


def _address(port_file: Path, process: subprocess.Popen[bytes]) -> str:
    """Find the first page's WebSocket; the browser writes where it listens into its profile."""
    give_up = time.monotonic() + WAIT_S
    while not port_file.exists() or "\n" not in port_file.read_text():
        assert process.poll() is None, "Chromium ended at once"
        assert time.monotonic() < give_up, "Chromium does not start"
        time.sleep(0.02)
    port, path = port_file.read_text().splitlines()[:2]
    with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as socket:
        socket.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
        while (found := json.loads(socket.recv(timeout=WAIT_S))).get("id") != 1:
            pass
    pages = [each for each in found["result"]["targetInfos"] if each["type"] == "page"]
    return f"ws://127.0.0.1:{port}/devtools/page/{pages[0]['targetId']}"
