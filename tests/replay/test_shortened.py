"""Every command that reads a log says of a message that is kept shortened that it is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
from click.testing import CliRunner
from mcap.reader import make_reader
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from recorder.read.reader import read
from replay.view import story as parts
from runtime.cli import main
from tests.browser.view_pages import read_page
from tests.live.servers import live_server

NODE: Final = shutil.which("node")
PAGE: Final = Path(parts.__file__).parent / "page"

ASKED: Final = {"role": "user", "content": [{"type": "audio", "data": "%" * 1_999_900}]}
REFUSED: Final = json.dumps({"type": "input.append", "input": {"messages": [ASKED]}})
WHOLE: Final = hashlib.blake2b(REFUSED.encode(), digest_size=16).hexdigest()
KEPT: Final = f"2.0 MB, first 1 KiB kept, blake2b {WHOLE}"
FRAMES: Final = ('{"type": "session.init", "payload": {}}', REFUSED, '{"type": "session.close"}')


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A session in which a message of 2 MB was refused for its base64, as a server recorded it."""
    folder = tmp_path_factory.mktemp("recordings")

    async def talk(url: str) -> None:
        async with connect(f"{url}?mode=chat", max_size=None) as socket:
            for frame in FRAMES:
                await socket.send(frame)
            heard = [json.loads(frame) async for frame in socket]
        assert [each["type"] for each in heard] == [
            *("session.queue_done", "session.created", "error", "session.closed")
        ]

    with live_server("--record", str(folder)) as server:
        asyncio.run(talk(server.url))
    (path,) = folder.glob("*.session.zst")
    return path


def said(*arguments: str, exit_code: int = 0) -> str:
    """Run a command and give what it prints."""
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == exit_code, result.output
    return result.output


def test_it_is_told_by_inspect(log: Path) -> None:
    """A message of 2 MB would pass for one of 40 bytes."""
    assert KEPT in said("recordings", "inspect", str(log))
    (told,) = json.loads(said("recordings", "inspect", str(log), "--json"))["shortened"]
    assert (told["size_bytes"], told["blake2b"]) == (len(REFUSED), WHOLE)


def test_it_is_told_by_diff(log: Path) -> None:
    """Two logs would be said to hold the same, where neither holds all."""
    assert "1 refused message kept shortened (2.0 MB in all)" in said("diff", str(log), str(log))
    report = json.loads(said("diff", str(log), str(log), "--json"))
    assert (report["a"]["shortened"], report["a"]["shortened_bytes"]) == (1, len(REFUSED))


@pytest.mark.parametrize("form", ["jsonl", "mcap"])
def test_it_is_told_by_export(log: Path, tmp_path: Path, form: str) -> None:
    """A time line would show an error that answers nothing."""
    made = tmp_path / f"made.{form}"
    said("export", str(log), "--to", form, "-o", str(made))
    data = made.read_bytes()
    if form == "mcap":  # whose chunks are packed
        with made.open("rb") as file:
            messages = [message.data for *_, message in make_reader(file).iter_messages()]
        data = b"\n".join(messages)
    assert KEPT.encode() in data


def test_it_is_told_by_the_page(log: Path, tmp_path: Path) -> None:
    """The list of records would show an outline as what the client sent."""
    page = tmp_path / "page.html"
    said("recordings", "view", str(log), "-o", str(page))
    told = read_page(page.read_text())
    (story,) = told["story"]
    assert story["shortened"][0]["size_bytes"] == len(REFUSED)
    (row,) = [row for row in told["rows"] if "shortened" in row[4]]
    assert (row[2], row[4]["kept"]) == ("rx", KEPT)
    assert row[4]["shortened"]["head"] == REFUSED[:1024]


@pytest.mark.skipif(NODE is None, reason="there is no Node to run the page's script")
def test_a_row_of_the_page_begins_with_it() -> None:
    """It would be seen by those who open the record."""
    script = (
        f"import {{ summary }} from {(PAGE / 'format.js').as_uri()!r};"
        f"process.stdout.write(summary({{ fields: {json.dumps({'kept': KEPT, 'frame': '{}'})} }}))"
    )
    assert NODE is not None
    command = [NODE, "--input-type=module", "-e", script]
    made = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert made.stdout.decode() == f"({KEPT}) {{}}"


def test_a_message_that_is_too_long_is_told_of_by_its_size_and_its_start(tmp_path: Path) -> None:
    """Why a client was thrown out could not be found out: its message would be null."""
    frame = '{"type": "input.append", "junk": "' + "x" * (26 << 20) + '"}'

    async def talk(url: str) -> None:
        async with connect(f"{url}?mode=audio", max_size=None) as socket:
            await socket.send(FRAMES[0])
            with suppress(ConnectionClosed):  # it is closed before all of it was sent
                await socket.send(frame)
                while True:
                    await socket.recv()
            assert socket.close_code == 1009

    with live_server("--record", str(tmp_path)) as server:
        asyncio.run(talk(server.url))
    (path,) = tmp_path.glob("*.session.zst")
    (kept,) = json.loads(said("recordings", "inspect", str(path), "--json"))["shortened"]
    assert kept["size_bytes"] == len(frame)
    assert kept["told"].startswith("27.3 MB, first 1 KiB kept, blake2b ")
    (record,) = [it.fields for it in read(path) if "shortened" in getattr(it, "fields", ())]
    (shortened,) = [value for key, value in record.items() if key == "shortened"]
    assert record["frame"] is None
    assert isinstance(shortened, dict)
    assert shortened["head"] == frame[:1024]
    begin = frame[: shortened["read_bytes"]].encode()
    assert shortened["blake2b"] == hashlib.blake2b(begin, digest_size=16).hexdigest()
    said("replay", str(path))
