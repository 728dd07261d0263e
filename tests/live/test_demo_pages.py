"""What the pages of MiniCPM-o's demo read, at a real server with `--static`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runtime import RUN
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import request

READ: dict[str, tuple[str, set[str]]] = {
    "/workers": ("workers", {"worker_id", "gpu_id", "port", "status", "total_requests"}),
    "/sessions": ("sessions", set()),
    "/api/apps": ("apps", {"app_id", "name", "route"}),
    "/api/admin/apps": ("apps", {"app_id", "name", "route", "enabled"}),
    "/api/assets/ref_audio": ("ref_audios", set()),
    "/api/queue": ("items", set()),
}
"""By address: the list that a page shows, and the fields of each."""
OPERATORS = ("/workers", "/api/admin/apps", "/api/config/eta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of one page."""
    made = tmp_path_factory.mktemp("pages")
    (made / "index.html").write_text("<p>hello")
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    with live_server("--no-record", "--static", str(folder)) as live:
        yield live


def said(server: LiveServer, path: str) -> Any:
    """The answer to a page."""
    answer = request(server.address, path, headers={})
    assert answer.status == 200, path
    return answer.said


@pytest.mark.parametrize("path", READ)
def test_a_page_finds_what_it_reads(server: LiveServer, path: str) -> None:
    """A page shows nothing, or an error."""
    name, fields = READ[path]
    found = said(server, path)[name]
    assert all(fields <= it.keys() for it in found)
    assert bool(found) or not fields


def test_the_settings_of_pages_are_their_own(server: LiveServer) -> None:
    """A page takes an error for settings, or offers prompts that are none."""
    assert said(server, "/api/presets") == said(server, "/api/frontend_defaults") == {}
    assert said(server, "/api/config/eta")["config"].keys() >= {"eta_chat_s", "eta_omni_duplex_s"}
    routes = {it["app_id"]: it["route"] for it in said(server, "/api/apps")["apps"]}
    assert routes["half_duplex_audio"] == "/half_duplex"  # else the page leads to the start page


def test_a_file_of_the_folder_comes_first(server: LiveServer, folder: Path) -> None:
    """An operator's own menu or prompts would be hidden."""
    (folder / "api").mkdir()
    (folder / "api" / "apps").write_text("{}")
    assert request(server.address, "/api/apps", headers={}).body == b"{}"
    assert said(server, "/api/presets") == {}


def test_they_are_for_keys_and_operators(folder: Path, tmp_path: Path) -> None:
    """A browser without a key sees who talks, or a client what only operators may."""
    keys = tmp_path / "keys.toml"
    command = (*RUN, "keys", "add", "anna", "--file", str(keys))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    headers = {"Authorization": f"Bearer {done.stdout.split()[-1]}"}
    with live_server("--no-record", "--static", str(folder), "--keys", str(keys)) as server:
        for path in (*READ, *OPERATORS):
            assert request(server.address, path, headers={}).status == 401, path
        for path in OPERATORS:
            assert request(server.address, path, headers=headers).status == 403, path
        assert request(server.address, "/sessions", headers=headers).said["sessions"] == []


def test_without_pages_there_is_none_of_it() -> None:
    """A server would have addresses that only pages need."""
    with live_server("--no-record") as server:
        assert request(server.address, "/workers", headers={}).status == 404
