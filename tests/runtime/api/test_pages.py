"""A folder of pages at a real server: what is shown of it, to whom, and that nothing else is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.access.keys import Key, change_key_file, hash_key
from runtime.api.pages import RESERVED, TYPES, is_public
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import Answer, request

KEY = "antiphon_root"
FILES = {
    "index.html": "<p>home",
    "talk.html": "<p>talk",
    "omni/omni.html": "<p>omni",
    "audio-duplex/audio_duplex.html": "<p>audio",
    "mobile/index.html": "<p>mobile",
    "lib/app.js": "export const a = 1;",
    "lib/app.mjs": "export const b = 2;",
    "lib/code.wasm": "\0asm",
    "lib/look.css": "p {}",
    "lib/empty.css": "",
    "lib/two words.txt": "words",
    "lib/data": "data",
    "api/apps": '{"apps": []}',
    "status": "not shown",
    "health": "not shown",
    ".hidden": "secret",
    ".git/config": "secret",
    "lib/.env": "secret",
}
OUTSIDE = (
    *("/../secret.txt", "/lib/../../secret.txt", "/..%2fsecret.txt", "/%2e%2e/secret.txt"),
    *("/static/../secret.txt", "/lib/..%2f..%2fsecret.txt", "//etc/passwd", "/%2fetc%2fpasswd"),
    *("/out", "/outside/secret.txt", "/..\\secret.txt", "/%00", "/index.html%00.js", "/%ff"),
    *("/.hidden", "/.git/config", "/lib/.env", "/static/.hidden", "/link-to-git/config", "/pipe"),
    *("/lib", "/lib/", "/lib//app.js", "/index.html/", "/loop", "/" + "a" * 300, "/./index.html"),
    *("/static/static/index.html", "/static//etc/passwd", "/*", "/a" * 4_000, "/%0a", "/omni%0a"),
)


@attrs.frozen
class Site:
    """A server with pages."""

    server: LiveServer
    folder: Path

    def ask(self, path: str, method: str = "GET", key: str = "", **headers: str) -> Answer:
        """Ask for exactly this path."""
        return request(self.server.address, path, method=method, key=key, headers=headers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pages, with traps in it and a secret beside it."""
    base = tmp_path_factory.mktemp("site")
    pages = base / "pages"
    for name, text in FILES.items():
        path = pages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (base / "secret.txt").write_text("secret")
    (pages / "out").symlink_to(base / "secret.txt")
    (pages / "outside").symlink_to(base)
    (pages / "link-to-git").symlink_to(pages / ".git")
    (pages / "loop").symlink_to(pages / "loop")
    (pages / "within.js").symlink_to(pages / "lib" / "app.js")
    os.mkfifo(pages / "pipe")
    return pages


def serve(folder: Path, *options: str) -> Iterator[Site]:
    with live_server("--no-record", "--static", str(folder), *options) as server:
        yield Site(server, folder)
        assert "Traceback" not in server.errors.read_text()


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Site]:
    """Pages on a server without keys."""
    yield from serve(folder)


@pytest.fixture(scope="module")
def keyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Pages on a server with keys."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    root = Key(name="root", hash=hash_key(KEY), scope="admin")
    change_key_file(path, lambda _: (root,), create=True)
    yield from serve(folder, "--keys", str(path))


# -- what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("/", "index.html", "text/html; charset=utf-8"),
        ("/index.html", "index.html", "text/html; charset=utf-8"),
        ("/mobile/", "mobile/index.html", "text/html; charset=utf-8"),
        ("/lib/app.js", "lib/app.js", "text/javascript; charset=utf-8"),
        ("/static/lib/app.js?v=3", "lib/app.js", "text/javascript; charset=utf-8"),
        ("/static/", "index.html", "text/html; charset=utf-8"),
        ("/lib/app.mjs", "lib/app.mjs", "text/javascript; charset=utf-8"),
        ("/lib/code.wasm", "lib/code.wasm", "application/wasm"),
        ("/lib/look.css", "lib/look.css", "text/css; charset=utf-8"),
        ("/lib/empty.css", "lib/empty.css", "text/css; charset=utf-8"),
        ("/lib/two%20words.txt", "lib/two words.txt", "text/plain; charset=utf-8"),
        ("/lib/data", "lib/data", "application/octet-stream"),
        ("/within.js", "lib/app.js", "text/javascript; charset=utf-8"),
        ("/api/apps", "api/apps", "application/octet-stream"),
    ],
)
def test_a_file_is_served_with_its_type(site: Site, path: str, name: str, kind: str) -> None:
    """Addresses lead to files, and browsers run and show them."""
    answer = site.ask(path)
    assert (answer.status, answer.body) == (200, (site.folder / name).read_bytes())
    assert answer.headers["content-type"] == kind
    head = site.ask(path, "HEAD")
    assert (head.status, head.body) == (200, b"")
    for named in ("content-length", "content-type", "etag"):
        assert head.headers[named] == answer.headers[named]


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ("/talk", "./talk.html"),
        ("/omni", "./omni/omni.html"),
        ("/audio_duplex", "./audio-duplex/audio_duplex.html"),
        ("/mobile", "./mobile/"),
        ("/static/omni?lang=en", "./omni/omni.html?lang=en"),
    ],
)
def test_an_address_without_a_file_leads_to_its_page(site: Site, path: str, to: str) -> None:
    """Links without `.html` work, and the page's relative links are right."""
    answer = site.ask(path)
    assert (answer.status, answer.headers["location"]) == (302, to)


def test_a_page_may_run_what_is_in_it_and_is_kept_until_it_changes(site: Site) -> None:
    """Pages have no policy of the server's own answers; caches ask whether a file is the same."""
    answer = site.ask("/")
    assert answer.headers["content-security-policy"] == "frame-ancestors 'self'"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    same = site.ask("/", If_None_Match=answer.headers["etag"])
    assert (same.status, same.body) == (304, b"")
    page = site.folder / "index.html"
    page.write_text("<p>new home")
    changed = site.ask("/", If_None_Match=answer.headers["etag"])
    assert (changed.status, changed.body) == (200, b"<p>new home")


def test_a_range_of_a_file_is_served(site: Site) -> None:
    """A browser can seek in a video."""
    part = site.ask("/lib/app.js", Range="bytes=0-5")
    assert (part.status, part.body) == (206, b"export")
    assert part.headers["content-range"] == "bytes 0-5/19"
    outside = site.ask("/lib/app.js", Range="bytes=19-")
    assert (outside.status, outside.headers["content-range"]) == (416, "bytes */19")


def test_a_file_larger_than_a_piece_comes_whole(site: Site) -> None:
    """What is read in pieces is put together in order."""
    data = os.urandom(700_001)
    (site.folder / "large.bin").write_bytes(data)
    assert site.ask("/large.bin").body == data
    assert site.ask("/large.bin", Range="bytes=131071-131073").body == data[131_071:131_074]


# -- what is not ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OUTSIDE)
def test_nothing_else_is_served(site: Site, path: str) -> None:
    """Nothing outside the folder, hidden, or no regular file is shown."""
    answer = site.ask(path)
    assert (answer.status, answer.said["error"]) == (404, "not_found")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_page_is_only_read(site: Site, method: str) -> None:
    """No method but GET and HEAD does anything with a file."""
    answer = site.ask("/index.html", method)
    assert (answer.status, answer.said["error"]) == (404, "not_found")
    assert (site.folder / "index.html").exists()


@pytest.mark.parametrize("path", ["/status", "/health"])
def test_the_server_s_own_addresses_come_first(site: Site, path: str) -> None:
    """A file cannot take the place of what the server answers."""
    answer = site.ask(path)
    assert answer.headers["content-type"] == "application/json"
    assert b"not shown" not in answer.body
    assert site.ask("/api/sessions", "PUT").status == 405
    assert site.ask("/v1/realtime").status == 426


# -- to whom --------------------------------------------------------------------------------------


def test_pages_need_no_key_and_the_server_s_own_addresses_do(keyed: Site) -> None:
    """A browser opens a page without a header; what lies under reserved names stays shut."""
    for path in ("/", "/lib/app.js", "/static/lib/app.js", "/talk"):
        assert keyed.ask(path).status in {200, 302}
    assert keyed.ask("/nothing").said["error"] == "not_found"
    for path in ("/status", "/metrics", "/api/apps", "/api/sessions", "/api/nothing", "/ws/x"):
        assert keyed.ask(path).said["error"] == "unauthorized"
    assert keyed.ask("/status%0A").said["error"] == "unauthorized"
    assert keyed.ask("/api/apps", key=KEY).body == b'{"apps": []}'


@pytest.mark.parametrize("path", OUTSIDE)
def test_with_keys_nothing_else_is_served_either(keyed: Site, path: str) -> None:
    """Somebody without a key sees no more than somebody with one."""
    answer = keyed.ask(path)
    assert answer.status in {401, 404}
    assert b"secret" not in answer.body


def test_another_site_s_page_may_not_read_them(site: Site, keyed: Site) -> None:
    """Origins and names are held to the same rules as everywhere."""
    for each in (site, keyed):
        refused = each.ask("/lib/app.js", Origin="https://evil.example")
        assert (refused.status, refused.said["error"]) == (403, "origin_not_allowed")
    rebound = site.ask("/lib/app.js", Host="evil.example")
    assert (rebound.status, rebound.said["error"]) == (403, "host_not_allowed")


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "", "\xff", "x" * 300])
def test_a_strange_host_is_answered(keyed: Site, host: str) -> None:
    """A header of a client breaks no answer, nor comes back in one."""
    answer = keyed.ask("/omni?a=b", Host=host)
    assert (answer.status, answer.headers.get("location")) == (302, "./omni/omni.html?a=b")


@given(st.text(max_size=40), st.sampled_from(sorted(RESERVED)))
def test_nothing_below_a_reserved_name_is_public(rest: str, name: str) -> None:
    """No suffix makes a page of one of the server's own addresses."""
    assert not is_public(f"/{name}/{rest}")
    assert not is_public(f"/{name}")
    assert not is_public(f"/{name}\n")


def test_every_type_is_told_the_same_everywhere() -> None:
    """Types come from a table, not from the machine's files."""
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in TYPES)
    assert TYPES[".js"] == TYPES[".mjs"] == "text/javascript"


def test_without_a_folder_there_are_no_pages(tmp_path: Path) -> None:
    """A server that was given no pages serves none."""
    with live_server("--no-record", "--no-pages") as server:
        bare: Any = Site(server, tmp_path)
        assert bare.ask("/").said["error"] == "not_found"
        assert bare.ask("/index.html").said["error"] == "not_found"
