"""The console's files and facts at a real server; `tests/live/test_console.py` has the page."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from protocol.values.model import DuplexConfig
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.pages import FOLDER, PAGE_CSP, SHOWN
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request

KEY: Final = "antiphon_of_anna"
TYPES: Final = {".css": "text/css", ".html": "text/html", ".js": "text/javascript"}
FILES: Final = sorted(
    path.relative_to(FOLDER).as_posix()
    for path in (*FOLDER.iterdir(), *(FOLDER / "console").iterdir())
    if path.suffix in SHOWN
)
BYTES_MAX: Final = 150_000
"""Of all files, as they are sent."""
LINES_MAX: Final = 410
ONE_FILE: Final = "antiphon.js"
"""The client that can be copied as one file: it is as long as it has to be."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server without keys."""
    with live_server("--record", str(tmp_path_factory.mktemp("recordings"))) as server:
        yield server
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with keys and pages of its own."""
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "pages").mkdir()
    (folder / "pages" / "index.html").write_text("<p>home")
    anna = Key(name="anna", hash=hash_key(KEY), modes=("chat",), record_always=True)
    change_key_file(folder / "keys.toml", lambda _: (anna,), create=True)
    options = ("--keys", str(folder / "keys.toml"), "--static", str(folder / "pages"))
    with live_server("--no-record", *options) as server:
        yield server


def test_the_console_is_at_the_root(server: LiveServer) -> None:
    """A browser that is given only the server's address finds it."""
    page = (FOLDER / "console" / "index.html").read_bytes()
    for path in ("/", "/console"):
        answer = request(server.address, path, headers={})
        assert (answer.status, answer.body) == (200, page)
        assert answer.headers["content-security-policy"] == PAGE_CSP
        assert "unsafe" not in PAGE_CSP
        assert answer.headers["cache-control"] == "no-cache"


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_served_plain_and_compressed(server: LiveServer, name: str) -> None:
    """A browser runs it, and takes it from its cache the second time."""
    data = (FOLDER / name).read_bytes()
    plain = request(server.address, f"/web/{name}", headers={})
    assert (plain.status, plain.body) == (200, data)
    assert plain.headers["content-type"].split(";")[0] == TYPES[Path(name).suffix]
    packed = request(server.address, f"/web/{name}", headers={"Accept_Encoding": "br, gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == data
    assert packed.headers["etag"] != plain.headers["etag"]
    seen = {"If_None_Match": packed.headers["etag"], "Accept_Encoding": "gzip"}
    assert request(server.address, f"/web/{name}", headers=seen).status == 304


@pytest.mark.parametrize(
    "path",
    [
        *("/web/", "/web/package.json", "/web/README.md", "/web/console/", "/console/"),
        *("/web/../api/console.py", "/web/%2e%2e/pages.py", "/web/types/antiphon.d.ts"),
        *("/web/node_modules/typescript/package.json", "/web//antiphon.js"),
    ],
)
def test_nothing_else_is_served(server: LiveServer, path: str) -> None:
    """What lies next to the files stays on the server."""
    assert request(server.address, path, headers={}).status == 404


def test_facts(server: LiveServer) -> None:
    """Forms take the bounds and defaults of the server's settings."""
    facts = request(server.address, "/api/console", headers={}).said
    assert (facts["readiness"], facts["models"]) == ("ready", ["scripted"])
    assert facts["key"] == {"is_needed": False, "name": "", "is_admin": True}
    assert facts["recording"] | {"is_on": True, "is_always": False} == facts["recording"]
    settings = facts["settings"]["duplex"]
    assert (settings["temperature"]["minimum"], settings["temperature"]["maximum"]) == (0, 2)
    assert settings["top_k"]["default"] == DuplexConfig().top_k
    assert facts["settings"]["chat"]["max_new_tokens"]["default"] > 0


def test_with_keys_the_files_are_public_and_the_facts_are_not(keyed: LiveServer) -> None:
    """A browser can ask its user for a key only by a page that it could load."""
    for path in ("/console", "/web/console/main.js", "/web/antiphon.js"):
        assert request(keyed.address, path, headers={}).status == 200
    for key, status in (("", 401), ("antiphon_wrong", 401), (KEY, 200)):
        assert request(keyed.address, "/api/console", key=key, headers={}).status == status
    facts = request(keyed.address, "/api/console", key=KEY, headers={}).said
    assert facts["key"] == {"is_needed": True, "name": "anna", "is_admin": False}
    assert facts["modes"] == ["chat"]
    assert facts["recording"]["is_always"]


def test_the_pages_of_an_operator_come_first(keyed: LiveServer) -> None:
    """`--static` has the root, as before there was a console."""
    assert request(keyed.address, "/", headers={}).body == b"<p>home"


def test_pages_can_be_turned_off() -> None:
    """A server that only programs use shows none."""
    with live_server("--no-record", "--no-pages") as server:
        for path in ("/", "/console", "/web/antiphon.js", "/api/console"):
            assert request(server.address, path, headers={}).status == 404


# -- the files themselves -------------------------------------------------------------------------


def test_the_files_are_small() -> None:
    """A page opens at once, also from afar; a reader can read each file in one sitting."""
    packed = [gzip.compress((FOLDER / name).read_bytes()) for name in FILES]
    assert sum(map(len, packed)) < BYTES_MAX
    lines = {name: (FOLDER / name).read_text().count("\n") for name in FILES if name != ONE_FILE}
    assert {name: count for name, count in lines.items() if count > LINES_MAX} == {}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_no_markup_of_texts_and_nothing_from_elsewhere(name: str) -> None:
    """What a server or a log says is never markup; no page asks another server."""
    text = (FOLDER / name).read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.search(r"new Function|javascript:", text)
    found = set(re.findall(r"https?://[\w.]+", text))
    assert found <= {"http://www.w3.org"}
    if name.endswith(".html"):
        assert not re.search(r"\son\w+=|<style|\sstyle=|<script(?![^>]*\ssrc=)", text)


def test_hints_are_phrases_that_the_model_knows() -> None:
    """A user would say what the page offers, and get no answer."""
    from fixtures.tiny.recipe.phrases import PHRASES

    text = (FOLDER / "console" / "words.js").read_text()
    hints, seeing = (
        re.search(r"tiny: \[(.*?)\]", text, re.DOTALL),
        re.search(r'tiny: "(.+?)"', text),
    )
    assert hints is not None
    assert seeing is not None
    said = [*re.findall(r'"(.+?)"', hints[1]), seeing[1]]
    assert len(said) > 5
    assert {re.sub(r"[^a-z ]", "", it.lower()) for it in said} <= PHRASES.keys()
