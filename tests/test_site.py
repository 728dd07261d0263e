"""The site of the documentation is built strictly; its links lead somewhere, and all is in it.

`docs/site/` makes it; `make lint` checks spelling, and `tests/test_readme.py` runs the commands.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

import antiphon
from docs.site import __main__ as site
from docs.site import reference, staging
from replay.eval.evaluate import MEASURES
from replay.eval.evaluate import SETTINGS as EVERY_MEASURE
from runtime.net.http import WEBSOCKET_PATHS
from runtime.serve.gateway import Gateway
from runtime.settings.settings import Settings, declared
from runtime.telemetry import catalogue
from runtime.telemetry.metrics import SERVER_METRICS
from tests.project.commands import all_commands
from tests.test_architecture import ROOT, tracked_files

pytestmark = pytest.mark.slow

WEB_SOCKETS: Final = {*WEBSOCKET_PATHS, "/console", "/"}
"""Shown in a table of their own, or with the files of the console."""
FROM_ELSEWHERE: Final = re.compile(r"^(?:https?:)?//")


class Asked(HTMLParser):
    """What a page loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        name = {"link": "href", "script": "src", "img": "src", "iframe": "src"}.get(tag)
        if name and (url := given.get(name)) and given.get("rel") != "canonical":
            self.urls.append(url)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site."""
    return site.build(tmp_path_factory.mktemp("site") / "out")


def test_every_page_is_built(built: Path) -> None:
    """A page would be written and not be found."""
    named = [*staging.pages().values(), *reference.generated()]
    pages = {name.removesuffix(".md") for name in named if name.endswith(".md")}
    assert {name for name in pages if not (built / f"{name}.html").exists()} == set()
    menu = (ROOT / "docs" / "site" / "zensical.toml").read_text()
    assert {name for name in pages if f'"{name}.md"' not in menu} == set()


def test_no_page_asks_another_server(built: Path) -> None:
    """A reader without a network would see half of it, and another server who reads what."""
    asked = {}
    for path in built.rglob("*.html"):
        parser = Asked()
        parser.feed(path.read_text())
        asked[path.name] = [url for url in parser.urls if FROM_ELSEWHERE.match(url)]
    assert {name: urls for name, urls in asked.items() if urls} == {}
    assert not any("mermaid" in path.read_text() for path in built.glob("states.html"))


def test_it_can_be_searched(built: Path) -> None:
    """A reader would look for a term in forty pages."""
    index = (built / "search.json").read_text()
    assert all(word in index for word in ("force_listen", "response_delay", "ANTIPHON_QUEUE_MAX"))


def test_the_python_reference_has_every_public_name(built: Path) -> None:
    """A reader would find a name in an editor and not here, or in two places."""
    page = (built / "reference" / "python.html").read_text()
    shown = re.findall(r'<h3 id="antiphon\.(\w+)"', page)
    assert sorted(shown) == sorted({*antiphon.__all__} - {"__version__"})
    assert 'id="runtime.model.backends.base.Backend"' in page


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[a](nowhere.md)", "there is no such file"),
        ("[a](glossary.md#nothing)", "there is no such heading"),
        ("[a](#nothing)", "there is no such heading"),
        ("![a](pictures/nothing.webp)", "there is no such file"),
        ("[`a` and [b]](../nothing.py)", "there is no such file"),
    ],
)
def test_a_wrong_link_is_found(text: str, says: str) -> None:
    """A reader would follow it into nothing."""
    (fault,) = staging.wrong_links("docs/index.md", f"# A\n\n{text}\n")
    assert fault.endswith(says)


def test_a_right_link_is_none() -> None:
    """Good pages would be bent to please a test."""
    text = "# A `b`\n\n[a](#a-b) [c](glossary.md#the-wire) [d](../README.md) `[e](f)`\n"
    assert staging.wrong_links("docs/behaviour.md", text) == [
        "docs/behaviour.md: #a-b: there is no such heading"  # it is the page's own text that counts
    ]


def test_no_page_has_a_wrong_link() -> None:
    """The same of all pages of the repository, those that are not on the site too."""
    faults = [
        fault
        for name in tracked_files()
        if name.endswith(".md")
        for fault in staging.wrong_links(name, (ROOT / name).read_text("utf-8"))
    ]
    assert faults == []


def test_links_are_led_into_the_site() -> None:
    """A link that is right in the repository would be wrong on the site."""
    named = staging.pages()
    text = "[a](../ARCHITECTURE.md) [b](../runtime/cli.py) [c](operations.md#over-http)"
    led = staging.led("docs/resume.md", text, named, "")
    assert led == "[a](architecture.md) b [c](operations.md#over-http)"
    led = staging.led("docs/resume.md", text, named, "https://host/it/blob/main")
    assert "[b](https://host/it/blob/main/runtime/cli.py)" in led


def test_the_reference_is_whole() -> None:
    """A command, setting, metric, measure or address would be in the code only."""
    pages = reference.generated()
    for name, _ in all_commands():
        assert f"### antiphon {name}\n" in pages["reference/commands.md"]
    shown = re.findall(r"^\| `(\w+)`<br>(.*)$", pages["reference/settings.md"], re.MULTILINE)
    assert [name for name, _ in shown] == [setting.name for setting in declared(Settings)]
    for setting, (_, row) in zip(declared(Settings), shown, strict=True):
        plain = row.replace("\\", "").replace("&lt;", "<")
        assert plain.startswith(f"`{setting.variable}`<br>`{setting.flag}` | ")
        assert plain.endswith(f" | {setting.help} |")
    for each in (*catalogue.ALL, *SERVER_METRICS):
        assert f"| `{each.name}` | {each.kind} | " in pages["reference/metrics.md"]
    for measure in MEASURES.values():
        assert f"| {measure.definition} | " in pages["reference/measures.md"]
    assert all(f"- {text}\n" in pages["reference/measures.md"] for text in EVERY_MEASURE)
    app = Gateway(Settings(record_to=None)).app()
    while not hasattr(app, "routes"):
        app = app._app  # the access middleware's
    paths = {re.sub(r":path\}", "}", route.path) for route in app.routes} - WEB_SOCKETS
    addresses = pages["reference/http.md"]
    assert {path for path in paths if f" {path}`" not in addresses and "/web/" not in path} == set()
