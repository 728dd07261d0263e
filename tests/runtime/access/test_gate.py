"""Who comes in: pages by their origin, names against rebinding, and clients by their keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.access.gate import AccessControl, Admitted, Denied, open_gate, require_admin
from runtime.access.keys import ANYONE, Key, KeyFileError, change_key_file, hash_key
from runtime.access.origins import (
    Authority,
    Origin,
    Origins,
    is_loopback,
    read_authority,
    read_origin,
    read_origins,
)
from runtime.settings.settings import Settings

ANNA, ROOT = "antiphon_anna", "antiphon_root"
HOST = ("host", "127.0.0.1:8006")
SAME = ("origin", "http://127.0.0.1:8006")

Headers = Sequence[tuple[str, str]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two keys: anna's, for video alone, and an admin's."""
    file = tmp_path / "keys.toml"
    keys = (
        Key(name="anna", hash=hash_key(ANNA), modes=("video",), sessions_max=1),
        Key(name="root", hash=hash_key(ROOT), scope="admin"),
    )
    change_key_file(file, lambda _: keys, create=True)
    return file


@pytest.fixture
def gate(path: Path) -> AccessControl:
    """A gate with keys."""
    return open_gate(Settings(keys=path, host="0.0.0.0"))


def open_to_all(**settings: object) -> AccessControl:
    """A gate without keys."""
    return open_gate(Settings(**settings))  # type: ignore[arg-type]


def denied(gate: AccessControl, headers: Headers, offered: Sequence[str] = ()) -> tuple[int, Any]:
    """Be turned away; the status and the body."""
    with pytest.raises(Denied) as error:
        gate.admit_websocket(headers, offered, secure=False)
    return error.value.status, json.loads(error.value.body)


# -- hosts and origins as texts -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("app.example", Authority("app.example", None)),
        ("APP.example.:81", Authority("app.example", 81)),
        ("[::1]:8006", Authority("::1", 8006)),
        ("my_host", Authority("my_host", None)),
        *((text, None) for text in ("", ":80", "a:b", "a:99999", "a b", "a@b", "a/b", "::1")),
        *((text, None) for text in ("[a]", "[::1", "a:80:80", "é", "-a", "a" * 256, "a\n", "a:")),
    ],
)
def test_a_host_is_read_exactly(text: str, expected: Authority | None) -> None:
    """A text that is nearly a host would be taken for another."""
    assert read_authority(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("https://app.example", Origin("https", "app.example", 443)),
        ("http://app.example:443", Origin("http", "app.example", 443)),
        ("HTTPS://App.Example:443", Origin("https", "app.example", 443)),
        ("http://[::1]", Origin("http", "::1", 80)),
        ("chrome-extension://abcdef", Origin("chrome-extension", "abcdef", None)),
        *((text, None) for text in ("null", "", "*", "app.example", "https://", "https:///a")),
        *((text, None) for text in ("https://a/", "https://a/b", "https://u@a", "https://a b")),
        *((text, None) for text in ("https://a, https://b", "file://", "https://a?b", "://a")),
    ],
)
def test_an_origin_is_read_exactly(text: str, expected: Origin | None) -> None:
    """A page could pass for another by a strange spelling."""
    assert read_origin(text) == expected


@given(text=st.text(max_size=40))
def test_no_text_breaks_the_reading(text: str) -> None:
    """A client's header would be an internal error."""
    for made in (text, f"http://{text}", f"[{text}]:1"):
        origin, authority = read_origin(made), read_authority(made)
        assert origin is None or origin.host
        assert authority is None or authority.host
        assert is_loopback(made) in {True, False}


# -- which pages may connect --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "secure", "welcome"),
    [
        ("127.0.0.1:8006", "http://127.0.0.1:8006", False, True),
        ("app.example", "http://app.example", False, True),
        ("app.example:80", "http://app.example", False, True),
        ("App.Example", "http://app.example", False, True),
        ("[::1]:8006", "http://[::1]:8006", False, True),
        # A proxy ended TLS and passed the name on.
        ("app.example", "https://app.example", False, True),
        ("app.example:443", "https://app.example", False, True),
        ("app.example", "https://app.example", True, True),
        # Another host, another port, a page that anybody on its way could have written.
        ("127.0.0.1:8006", "http://evil.example", False, False),
        ("127.0.0.1:8006", "http://127.0.0.1:3000", False, False),
        ("127.0.0.1:8006", "http://127.0.0.1", False, False),
        ("127.0.0.1:8006", "http://localhost:8006", False, False),
        ("app.example", "https://app.example.evil.example", False, False),
        ("app.example", "https://evil.app.example", False, False),
        ("app.example", "http://app.example:443", True, False),
        ("app.example", "http://app.example", True, False),
        ("app.example:443", "http://app.example", False, False),
        # No origin at all.
        ("app.example", "null", False, False),
        ("app.example", "", False, False),
        ("app.example", "ftp://app.example", False, False),
        ("app.example", "https://app.example https://evil.example", False, False),
        ("nonsense:x", "http://nonsense:x", False, False),
    ],
)
def test_a_page_of_the_server_s_own_host_is_welcome(
    host: str, origin: str, secure: bool, welcome: bool
) -> None:
    """Any page could use the server through its visitor's browser; or its own could not."""
    assert Origins().welcomes([origin], [host], secure=secure) == welcome


def test_what_is_no_browser_sends_no_origin() -> None:
    """No client but a browser could connect."""
    assert Origins().welcomes([], ["app.example"], secure=True)


@pytest.mark.parametrize(
    ("hosts", "origins"),
    [
        (["a", "a"], ["http://a"]),
        ([], ["http://a"]),
        (["a"], ["http://a", "http://a"]),
        (["a"], ["http://a", "http://evil.example"]),
    ],
)
def test_what_came_twice_or_not_at_all_is_not_compared(
    hosts: list[str], origins: list[str]
) -> None:
    """One of two headers would be looked at, and the other one be used."""
    assert not Origins().welcomes(origins, hosts, secure=False)


def test_listed_origins_are_welcome_exactly() -> None:
    """An application's page could not connect, or one that only looks like it could."""
    origins = read_origins(["https://app.example", "http://a:81"], has_keys=False, host="::1")
    for text, welcome in (
        ("https://app.example", True),
        ("https://app.example:443", True),
        ("http://a:81", True),
        ("http://app.example", False),
        ("https://app.example:444", False),
        ("https://sub.app.example", False),
        ("null", False),
    ):
        assert origins.welcomes([text], ["127.0.0.1:8006"], secure=False) == welcome


def test_every_origin_is_welcome_where_that_was_said() -> None:
    """A public API could not be used from pages; a frame without an origin never can."""
    origins = read_origins(["*"], has_keys=True, host="0.0.0.0")
    assert origins.welcomes(["https://any.example"], ["b"], secure=False)
    assert not origins.welcomes(["null"], ["b"], secure=False)
    with pytest.raises(ValueError, match="needs keys"):
        read_origins(["*"], has_keys=False, host="127.0.0.1")


@pytest.mark.parametrize("text", ["app.example", "https://app.example/", "null", "https://*.a"])
def test_an_origin_that_no_page_has_is_refused(text: str) -> None:
    """An operator would wait for a page that never gets in."""
    with pytest.raises(ValueError, match="is not an origin"):
        read_origins([text], has_keys=True, host="127.0.0.1")


# -- under which names it answers ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "answers"),
    [
        *((host, True) for host in ("127.0.0.1:8006", "localhost:8006", "LOCALHOST", "[::1]:1")),
        *((host, True) for host in ("a.localhost", "192.168.1.2:8006", "app.example:8006")),
        *((host, False) for host in ("evil.example:8006", "localhost.evil.example", "", "a b")),
        ("127.0.0.1.evil.example", False),
    ],
)
def test_a_page_that_has_its_name_point_here_gets_nothing(host: str, answers: bool) -> None:
    """DNS rebinding: any page could use a server that only its own machine should reach."""
    gate = open_to_all(host="127.0.0.1", origins=("https://app.example",))
    headers = [("host", host), ("origin", f"http://{host}")] if host else [("host", host)]
    if answers:
        assert gate.admit_websocket([("host", host)], (), secure=False).principal == ANYONE
    else:
        status, body = denied(gate, headers)
        assert (status, body["error"]) == (403, "host_not_allowed")


def test_a_request_without_a_name_is_no_browser_s() -> None:
    """A probe that speaks HTTP/1.0 would be turned away."""
    assert open_to_all().admit_request("GET", [], secure=False) == ANYONE
    assert denied(open_to_all(), [HOST, HOST])[0] == 403


def test_names_are_free_where_keys_or_the_operator_say_who_may(path: Path) -> None:
    """A server with a name of its own could not be reached by it."""
    named = [("host", "gpu-box.lan:8006")]
    assert open_to_all(host="0.0.0.0", insecure=True).admit_request("GET", named, secure=False)
    keyed = open_gate(Settings(keys=path))
    bearing = [*named, ("authorization", f"Bearer {ANNA}")]
    assert keyed.admit_request("GET", bearing, secure=False).name == "anna"


# -- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "offered", "subprotocol"),
    [
        ([("authorization", f"Bearer {ANNA}")], (), None),
        ([("authorization", f"bearer  {ANNA}")], ("other",), None),
        ([("authorization", f"BEARER {ANNA}")], ("other", "antiphon"), "antiphon"),
        ([], ("antiphon", f"antiphon.key.{ANNA}"), "antiphon"),
        ([], (f"antiphon.key.{ANNA}", "antiphon"), "antiphon"),
        ([], (f"antiphon.key.{ANNA}",), None),
    ],
)
def test_a_key_opens(
    gate: AccessControl, headers: Headers, offered: Sequence[str], subprotocol: str | None
) -> None:
    """A client could not connect; or its key would be said back in the answer."""
    admitted = gate.admit_websocket([HOST, SAME, *headers], offered, secure=False)
    principal = Key(name="anna", hash=hash_key(ANNA), sessions_max=1, modes=("video",))
    assert admitted == Admitted(principal=principal, subprotocol=subprotocol)


@pytest.mark.parametrize(
    ("headers", "offered"),
    [
        ([], ()),
        ([("authorization", "Bearer")], ()),
        ([("authorization", "Bearer ")], ()),
        ([("authorization", ANNA)], ()),
        ([("authorization", f"Basic {ANNA}")], ()),
        ([("authorization", f"Bearer {ANNA}x")], ()),
        ([("authorization", f"Bearer {ANNA[:-1]}")], ()),
        ([("authorization", f"Bearer {ANNA.upper()}")], ()),
        ([("authorization", f"Bearer {hash_key(ANNA)}")], ()),
        ([("authorization", f"Bearer {ANNA},{ROOT}")], ()),
        ([("authorization", f"Bearer {ANNA}"), ("authorization", f"Bearer {ROOT}")], ()),
        ([("authorization", f"Bearer {ANNA}"), ("authorization", "Basic eA==")], ()),
        ([("authorization", f"Bearer {ANNA}")], (f"antiphon.key.{ROOT}",)),
        ([], (f"antiphon.key.{ANNA}", f"antiphon.key.{ROOT}")),
        ([], ("antiphon", "antiphon.key.")),
        ([], (ANNA,)),
        ([], (f"Antiphon.Key.{ANNA}",)),
        ([("x-api-key", ANNA), ("cookie", f"key={ANNA}")], ()),
        ([("authorization", "Bearer " + "x" * 100_000)], ()),
    ],
)
def test_all_else_is_turned_away_in_the_same_words(
    gate: AccessControl, headers: Headers, offered: Sequence[str]
) -> None:
    """A client would come in without a key, or learn from the answer what was nearly right."""
    with pytest.raises(Denied) as error:
        gate.admit_websocket([HOST, *headers], offered, secure=False)
    with pytest.raises(Denied) as bare:
        gate.admit_request("GET", [HOST], secure=False)
    assert error.value.status == 401
    assert error.value.headers == (("WWW-Authenticate", "Bearer"),)
    assert error.value.body == bare.value.body
    assert json.loads(error.value.body)["error"] == "unauthorized"


def test_a_key_is_told_to_nobody(gate: AccessControl, caplog: pytest.LogCaptureFixture) -> None:
    """A key would stand in a log or an answer, for all who read those."""
    caplog.set_level(0)
    almost = ANNA + "x"
    for offered in (("antiphon", f"antiphon.key.{almost}"), (f"antiphon.key.{almost}",)):
        with pytest.raises(Denied) as error:
            gate.admit_websocket([("authorization", f"Bearer {almost}")], offered, secure=False)
        assert almost not in str(error.value) + error.value.body.decode()
    admitted = gate.admit_websocket([("authorization", f"Bearer {ANNA}")], (), secure=False)
    assert ANNA not in repr(admitted)
    assert hash_key(ANNA) not in repr(admitted)
    assert ANNA not in caplog.text


def test_without_keys_nobody_is_asked(caplog: pytest.LogCaptureFixture) -> None:
    """A client with a key could not try a server without."""
    offered = ("antiphon", f"antiphon.key.{ANNA}")
    admitted = open_to_all().admit_websocket([HOST, SAME], offered, secure=False)
    assert admitted == Admitted(principal=ANYONE, subprotocol="antiphon")


def test_a_page_from_elsewhere_is_told_so_before_its_key_is_looked_at(gate: AccessControl) -> None:
    """A page could try keys, or learn that one is good, from a browser that is not its own."""
    for key in (ANNA, "none"):
        headers = [HOST, ("origin", "https://evil.example"), ("authorization", f"Bearer {key}")]
        status, body = denied(gate, headers)
        assert (status, body["error"]) == (403, "origin_not_allowed")


def test_a_key_has_its_modes(gate: AccessControl) -> None:
    """A key for cheap chats could have hours of video."""
    anna = gate.admit_request("GET", [("authorization", f"Bearer {ANNA}")], secure=False)
    root = gate.admit_request("GET", [("authorization", f"Bearer {ROOT}")], secure=False)
    gate.check_mode(anna, "video")
    gate.check_mode(root, "chat")
    gate.check_mode(ANYONE, "chat")
    with pytest.raises(Denied) as error:
        gate.check_mode(anna, "chat")
    assert error.value.status == 403
    assert json.loads(error.value.body) == {
        "error": "mode_not_allowed",
        "message": "this key may not use chat",
        "allowed": ["video"],
    }


def test_a_quota_is_the_key_s(gate: AccessControl) -> None:
    """One client could take every slot."""
    now = [0.0]
    quotas = AccessControl(None, Origins(), clock=lambda: now[0]).quotas
    anna = gate.admit_request("GET", [("authorization", f"Bearer {ANNA}")], secure=False)
    entered = quotas.enter(anna)
    assert entered is not None
    assert quotas.enter(anna) is None
    entered.leave()
    assert quotas.enter(anna) is not None


@pytest.mark.parametrize(
    ("name", "scope", "owner", "sees"),
    [
        ("anna", "use", "anna", True),
        ("anna", "use", "bert", False),
        ("anna", "use", "Anna", False),
        ("anna", "use", "", False),
        ("", "use", "", False),
        ("root", "admin", "anna", True),
        ("root", "admin", "", True),
    ],
)
def test_everyone_sees_their_own(name: str, scope: Any, owner: str, sees: bool) -> None:
    """A stolen session id would open a stranger's recording."""
    assert Key(name=name, scope=scope).may_see(owner) == sees


def test_an_admin_s_door_is_for_admins() -> None:
    """A client could change what belongs to all."""
    require_admin(ANYONE)
    require_admin(Key(name="root", scope="admin"))
    with pytest.raises(Denied) as error:
        require_admin(Key(name="anna", scope="use"))
    assert (error.value.status, b"scope_too_small" in error.value.body) == (403, True)


def test_a_gate_without_its_keys_does_not_open(tmp_path: Path) -> None:
    """A server whose keys are missing would serve everybody."""
    with pytest.raises(KeyFileError):
        open_gate(Settings(keys=tmp_path / "missing.toml"))
    empty = tmp_path / "keys.toml"
    empty.write_text("")
    assert denied(open_gate(Settings(keys=empty)), [HOST])[0] == 401


@pytest.mark.anyio
async def test_nothing_is_watched_where_there_is_no_file() -> None:
    """A server without keys would end with an error."""
    await open_to_all().watch()
