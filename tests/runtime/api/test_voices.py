"""The library of voices over HTTP: who may list and change it, and what is taken into it."""

from __future__ import annotations

import io
import socket
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import soundfile

from protocol.values.limits import WAV_BYTES_MAX
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.media.sound import decode_voice
from tests.live.servers import LiveServer, live_server
from tests.network.requesting import Answer, request

KEYS = {"anna": "antiphon_anna", "root": "antiphon_root"}
PAGE = "https://app.example"


def wav(seconds: float = 1.0, *, rate_hz: int = 16_000, loudness: float = 0.25) -> bytes:
    """A WAV file of a tone."""
    samples = loudness * np.sin(np.arange(round(seconds * rate_hz)) * 0.05)
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="WAV", subtype="PCM_16")
    return file.getvalue()


@attrs.frozen
class Library:
    """A server with a library of voices."""

    server: LiveServer
    folder: Path

    def ask(
        self, path: str, key: str = "root", method: str = "GET", body: Any = None, **headers: str
    ) -> Answer:
        """Ask for exactly this path."""
        bearer = KEYS[key] if key else ""
        return request(
            self.server.address, path, method=method, key=bearer, body=body, headers=headers
        )

    def put(self, name: str, body: Any, key: str = "root", **headers: str) -> Answer:
        return self.ask(f"/api/voices/{name}", key, "PUT", body, **headers)

    def names(self, key: str = "root") -> list[str]:
        return [voice["name"] for voice in self.ask("/api/voices", key).said["voices"]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """Serve with keys and a voice, which is the default."""
    base = tmp_path_factory.mktemp("library")
    folder = base / "voices"
    folder.mkdir()
    (folder / "anna.wav").write_bytes(wav(2, rate_hz=24_000))
    (base / "secret.wav").write_bytes(wav())
    anna = Key(name="anna", hash=hash_key(KEYS["anna"]))
    root = Key(name="root", hash=hash_key(KEYS["root"]), scope="admin")
    change_key_file(base / "keys.toml", lambda _: (anna, root), create=True)
    options = ("--keys", str(base / "keys.toml"), "--voices", str(folder), "--origin", PAGE)
    with live_server("--no-record", "--default-voice", "anna", *options) as server:
        yield Library(server, folder)
        assert "Traceback" not in server.errors.read_text()


def test_each_key_may_list_the_voices(library: Library) -> None:
    """A client learns which voices it may name, and which pages begin with."""
    told = library.ask("/api/voices", "anna").said
    size = (library.folder / "anna.wav").stat().st_size
    assert {"name": "anna", "bytes": size} in told["voices"]
    assert told["default"] == "anna"
    assert library.ask("/api/voices", "").status == 401
    assert library.ask("/api/voices", "anna", "HEAD").status == 200


def test_an_admin_adds_and_removes_a_voice(library: Library) -> None:
    """A voice can be named as soon as it is added, and no more once it is removed."""
    data = wav()
    added = library.put("bo.2", data)
    assert (added.status, added.said) == (201, {"name": "bo.2", "bytes": len(data)})
    assert (library.folder / "bo.2.wav").read_bytes() == data
    assert "bo.2" in library.names("anna")
    removed = library.ask("/api/voices/bo.2", method="DELETE")
    assert (removed.status, removed.body) == (204, b"")
    assert "bo.2" not in library.names()
    assert library.ask("/api/voices/bo.2", method="DELETE").status == 404
    assert sorted(it.name for it in library.folder.iterdir()) == ["anna.wav"]


def test_a_file_of_another_kind_is_kept_as_a_wav(library: Library) -> None:
    """A user has to convert a voice that every other program takes."""
    file = io.BytesIO()
    soundfile.write(file, np.sin(np.arange(32_000) / 9) / 2, 16_000, format="FLAC")
    assert library.put("cleo", file.getvalue()).status == 201
    kept = (library.folder / "cleo.wav").read_bytes()
    assert kept.startswith(b"RIFF")
    assert decode_voice(kept) == decode_voice(file.getvalue())
    assert library.ask("/api/voices/cleo", method="DELETE").status == 204


def test_a_voice_is_replaced_only_where_that_is_asked_for(library: Library) -> None:
    """A name that two people choose does not cost the first one its voice."""
    first, second = wav(), wav(loudness=0.5)
    assert library.put("twice", first).status == 201
    refused = library.put("twice", second)
    assert (refused.status, refused.said["error"]) == (409, "conflict")
    assert (library.folder / "twice.wav").read_bytes() == first
    assert library.put("twice?replace=1", second).status == 200
    assert (library.folder / "twice.wav").read_bytes() == second
    assert library.ask("/api/voices/twice", method="DELETE").status == 204


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_only_an_admin_changes_the_library(library: Library, method: str) -> None:
    """A client cannot change what the others speak with."""
    assert library.ask("/api/voices/anna", "anna", method, wav()).said["error"] == "scope_too_small"
    assert library.ask("/api/voices/anna", "", method, wav()).status == 401
    assert library.names() == ["anna"]


@pytest.mark.parametrize(
    "name",
    [
        *("..%2fsecret", "%2e%2e%2fsecret", ".hidden", "two%20words", "a%00", "a%0a", "a" * 65),
        *("%2fetc%2fpasswd", "..", "%c3%a4", "a%2fb", "..%5csecret", "%ff", "a%0d%0aX:%20y"),
    ],
)
def test_a_name_is_never_a_path(library: Library, name: str) -> None:
    """Nothing but a voice of the folder is written or removed."""
    before = {it: it.read_bytes() for it in library.folder.parent.rglob("*.wav")}
    assert library.put(name, wav()).status in {400, 404}
    assert library.put(f"{name}?replace=1", wav()).status in {400, 404}
    assert library.ask(f"/api/voices/{name}", method="DELETE").status == 404
    assert {it: it.read_bytes() for it in library.folder.parent.rglob("*.wav")} == before


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "the audio is not a sound file that is taken, or is damaged"),
        (b"RIFF" + b"x" * 100, "the audio is not a sound file that is taken, or is damaged"),
        (b'{"audio": "UklGRg=="}', "the audio is not a sound file that is taken, or is damaged"),
        (wav(0.4), "the audio does not last 0.5 to 30 s"),
        (wav(30.5), "the audio does not last 0.5 to 30 s"),
        (wav(rate_hz=4_000), "the audio's rate is not 8000 to 192000 hz"),
    ],
)
def test_only_reference_audio_is_taken(library: Library, body: bytes, reason: str) -> None:
    """What is listed can be used, and nothing else is kept."""
    answer = library.put("wrong", body)
    assert (answer.status, answer.said) == (400, {"error": "bad_request", "message": reason})
    assert library.names() == ["anna"]


def test_a_body_that_is_too_large_is_refused(library: Library) -> None:
    """An upload takes no more memory than a voice."""

    def pieces() -> Iterator[bytes]:
        yield from (b"x" * (1 << 20) for _ in range(WAV_BYTES_MAX // (1 << 20)))
        yield b"x"

    told = library.ask("/api/voices/huge", method="PUT", Content_Length=str(WAV_BYTES_MAX + 1))
    assert told.status == 413
    assert library.put("huge", pieces()).status == 413
    assert library.names() == ["anna"]


@pytest.mark.parametrize("query", ["replace=2", "replace=", "replace=1&replace=1", "over=1"])
def test_a_wrong_parameter_is_told(library: Library, query: str) -> None:
    """A slip in what is asked for does not count as something else."""
    assert library.put(f"anna?{query}", wav()).status == 400


def test_an_upload_that_breaks_off_leaves_nothing(library: Library) -> None:
    """A client that leaves amid its upload takes no place and leaves no file."""
    for _ in range(3):
        with socket.create_connection(library.server.address) as line:
            key = KEYS["root"].encode()
            line.sendall(
                b"PUT /api/voices/broken HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n"
                b"Authorization: Bearer " + key + b"\r\n\r\nRIFF"
            )
    for _ in range(100):
        if library.put("after", wav()).status == 201:
            break
    else:
        pytest.fail("the places were not given back")
    assert library.ask("/api/voices/after", method="DELETE").status == 204
    assert sorted(it.name for it in library.folder.iterdir()) == ["anna.wav"]


def test_a_listed_page_may_add_voices(library: Library) -> None:
    """A page elsewhere that the operator lists can show and change the library."""
    asked = {"Origin": PAGE, "Access_Control_Request_Method": "PUT"}
    preflight = library.ask("/api/voices/x", "", "OPTIONS", **asked)
    assert preflight.status == 204
    assert "PUT" in preflight.headers["access-control-allow-methods"]
    assert library.ask("/api/voices", Origin=PAGE).headers["access-control-allow-origin"] == PAGE
    evil = library.put("evil", wav(), Origin="https://evil.example")
    assert (evil.status, library.names()) == (403, ["anna"])


def test_other_methods_are_refused(library: Library) -> None:
    """A typing error is told as one."""
    assert library.ask("/api/voices", method="POST").status == 405
    assert library.ask("/api/voices/anna", method="POST").status == 405
    assert library.ask("/api/default_ref_audio", method="DELETE").status == 405


# -- the default voice ----------------------------------------------------------------------------


def test_pages_get_the_default_voice_as_samples(library: Library) -> None:
    """The demo's pages read float32 at 16 kHz, whatever the file holds."""
    answer = library.ask("/api/default_ref_audio", "anna")
    assert answer.status == 200
    told = answer.said
    assert {name: told[name] for name in ("name", "duration", "sample_rate", "samples")} == {
        "name": "anna",
        "duration": 2.0,
        "sample_rate": 16_000,
        "samples": 32_000,
    }
    assert b64decode(told["base64"]) == decode_voice((library.folder / "anna.wav").read_bytes())
    assert library.ask("/api/default_ref_audio", "").status == 401
    assert library.ask("/api/default_ref_audio", "anna", "HEAD").body == b""


def test_a_default_voice_that_changes_is_read_again(library: Library) -> None:
    """An operator need not start the server again; without the voice there is none."""
    path = library.folder / "anna.wav"
    before = path.read_bytes()
    try:
        assert library.put("anna?replace=1", wav(3)).status == 200
        assert library.ask("/api/default_ref_audio").said["samples"] == 48_000
        path.write_bytes(b"no sound")
        assert library.ask("/api/default_ref_audio").status == 422
        path.unlink()
        assert library.ask("/api/default_ref_audio").status == 404
        assert library.ask("/api/voices").said["default"] is None
    finally:
        path.write_bytes(before)


def test_without_keys_everyone_may_and_without_a_library_nothing_is_there(tmp_path: Path) -> None:
    """A server on loopback without keys is its user's; one without voices says so."""
    with live_server("--no-record", "--voices", str(tmp_path)) as server:
        free = Library(server, tmp_path)
        assert free.put("own", wav(), "").status == 201
        assert free.names("") == ["own"]
        assert free.ask("/api/default_ref_audio", "").said["error"] == "not_found"
        assert free.ask("/api/voices/own", "", "DELETE").status == 204
    with live_server("--no-record") as server:
        none = Library(server, tmp_path)
        assert none.ask("/api/voices", "").said == {"voices": [], "default": None}
        assert none.put("own", wav(), "").status == 404
        assert none.ask("/api/default_ref_audio", "").status == 404
