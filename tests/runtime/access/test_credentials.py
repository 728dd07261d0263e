"""How a key is shown: by a program, by a browser's WebSocket, and by a person's password."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.access.gate import (
    AccessControl,
    Denied,
    challenge,
    open_gate,
    shown_over_http,
    shown_to_websocket,
)
from runtime.access.keys import Key, change_key_file, hash_key
from runtime.settings.settings import Settings

KEY = "antiphon_anna"
PAGE = ("accept", "text/html,application/xhtml+xml,*/*;q=0.8")
BROWSER_ASKS = 'Basic realm="Antiphon", charset="UTF-8"'


def basic(text: str, scheme: str = "Basic") -> tuple[str, str]:
    """What a browser sends of a name, a colon and a password."""
    return ("authorization", f"{scheme} {base64.b64encode(text.encode()).decode()}")


@pytest.fixture
def gate(tmp_path: Path) -> AccessControl:
    """A gate that knows one key."""
    path = tmp_path / "keys.toml"
    change_key_file(path, lambda _: (Key(name="anna", hash=hash_key(KEY)),), create=True)
    return open_gate(Settings(keys=path, host="0.0.0.0"))


@pytest.mark.parametrize(
    "header",
    [
        basic(f"anna:{KEY}"),
        basic(f":{KEY}"),
        basic(f"whoever it is:{KEY}", scheme="bAsIc"),
        ("authorization", f"Bearer {KEY}"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_person_may_look_with_a_password(
    gate: AccessControl, method: str, header: tuple[str, str]
) -> None:
    """An operator could not open /status in a browser once there are keys."""
    assert gate.admit_request(method, [PAGE, header], secure=False).name == "anna"


@pytest.mark.parametrize(
    "header",
    [
        basic(KEY),
        basic(f"{KEY}:"),
        basic(f"anna:{KEY} "),
        basic(f"anna:x:{KEY}"),
        basic("anna:"),
        ("authorization", f"Basic anna:{KEY}"),
        ("authorization", "Basic"),
        ("authorization", "Basic ä"),
        ("authorization", "Basic " + base64.b64encode(b"\xff:\xff").decode()),
    ],
)
def test_another_password_is_none(gate: AccessControl, header: tuple[str, str]) -> None:
    """Somebody would come in with half a key, or break the server with a header."""
    with pytest.raises(Denied) as error:
        gate.admit_request("GET", [PAGE, header], secure=False)
    assert (error.value.status, error.value.reason) == (401, "wrong_key")
    assert error.value.headers == (("WWW-Authenticate", BROWSER_ASKS),)


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "get"])
def test_a_password_changes_nothing(gate: AccessControl, method: str) -> None:
    """Another site's page could act for an operator whose browser sends the password by itself."""
    with pytest.raises(Denied) as error:
        gate.admit_request(method, [PAGE, basic(f"anna:{KEY}")], secure=False)
    assert error.value.status == 401
    assert error.value.headers == (("WWW-Authenticate", "Bearer"),)
    bearer = ("authorization", f"Bearer {KEY}")
    assert gate.admit_request(method, [PAGE, bearer], secure=False).name == "anna"


@pytest.mark.parametrize(
    ("site", "shown_as", "opens"),
    [
        ("none", "document", True),
        ("same-origin", "empty", True),
        ("cross-site", "document", True),
        ("cross-site", "image", False),
        ("cross-site", "iframe", False),
        ("same-site", "empty", False),
    ],
)
def test_another_site_s_page_gets_nothing_by_a_password(
    gate: AccessControl, site: str, shown_as: str, opens: bool
) -> None:
    """A page could learn from a picture's time or size what an operator's server does."""
    said = [PAGE, ("sec-fetch-site", site), ("sec-fetch-dest", shown_as)]
    if opens:
        assert gate.admit_request("GET", [*said, basic(f":{KEY}")], secure=False).name == "anna"
        return
    with pytest.raises(Denied) as error:
        gate.admit_request("GET", [*said, basic(f":{KEY}")], secure=False)
    assert error.value.headers == (("WWW-Authenticate", "Bearer"),)
    bearer = ("authorization", f"Bearer {KEY}")
    assert gate.admit_request("GET", [*said, bearer], secure=False).name == "anna"


def test_a_password_opens_no_websocket(gate: AccessControl) -> None:
    """Any page could talk through the browser of whoever once looked at the status."""
    with pytest.raises(Denied) as error:
        gate.admit_websocket([basic(f"anna:{KEY}")], (), secure=False)
    assert (error.value.status, error.value.reason) == (401, "no_key")
    assert error.value.headers == (("WWW-Authenticate", "Bearer"),)


def test_a_page_connects_though_its_browser_adds_a_password(gate: AccessControl) -> None:
    """An operator who once looked at the status could use no page of the server any more."""
    offered = ("antiphon", f"antiphon.key.{KEY}")
    admitted = gate.admit_websocket([basic("ops:antiphon_other")], offered, secure=False)
    assert admitted.principal.name == "anna"


@pytest.mark.parametrize(
    ("method", "accept", "asks"),
    [
        ("GET", PAGE[1], BROWSER_ASKS),
        ("HEAD", "text/html", BROWSER_ASKS),
        ("GET", "*/*", "Bearer"),
        ("GET", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "Bearer"),
        ("DELETE", PAGE[1], "Bearer"),
    ],
)
def test_only_a_page_that_somebody_opens_asks_for_a_password(
    method: str, accept: str, asks: str
) -> None:
    """A page's own request in the background would open a dialog before whoever reads it."""
    assert challenge(method, [("accept", accept)]) == ("WWW-Authenticate", asks)


@given(value=st.text(max_size=60), method=st.sampled_from(["GET", "POST"]))
def test_no_header_breaks_the_reading(value: str, method: str) -> None:
    """A client's header would be an internal error."""
    for text in (value, f"Basic {value}", f"Bearer {value}"):
        headers = [("authorization", text)]
        assert len(shown_over_http(method, headers)) == 1
        assert len(shown_to_websocket(headers, (value,))) <= 2
