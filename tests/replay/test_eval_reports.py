"""The files that `antiphon eval` writes: JUnit XML for CI systems, and a page to look at."""

from __future__ import annotations

import os
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote_to_bytes, urlsplit

import attrs
import pytest
from click.testing import Result
from hypothesis import given
from hypothesis import strategies as st

from recorder.format.format import SUFFIX
from replay.eval.condition import parse
from replay.eval.evaluate import MEASURES, Evaluation, Row, measure_logs, row_of, sum_up
from replay.eval.reports import RECORDINGS_MAX, Name, junit_of, names_of, page_of
from replay.shared.commands import printable, unwatched
from tests.browser.chromium import CHROMIUM, chromium
from tests.browser.view_pages import policy_of
from tests.project.sampling import sample
from tests.replay.exported import GOLDEN
from tests.replay.test_eval import call, folder, record

__all__ = ("folder",)

HOSTILE: Final = (
    b"</title><script>alert(1)</script>",
    b"\"' onmouseover='alert(1)",
    b"]]>&lt;!--",
    b"\xff\x1b[31m\n\t\x7f",
    "\u202e\ufffe\u00fc\U0001f600".encode(),
    b"javascript:alert(1)",
    b"%2e%2e#?q=1",
    b"\\x1b",
    b" ",
)
"""Names of files; a file system takes any bytes but `/` and 0."""
HOSTILE_NAMES: Final = [name.replace(b"/", b"|") for name in HOSTILE]


def cases_in(xml: bytes) -> list[ET.Element]:
    """Read JUnit XML, and check what CI systems rely on (jenkinsci/xunit-plugin, junit-10.xsd)."""
    suites = ET.fromstring(xml)
    assert suites.tag == "testsuites"
    (suite,) = suites
    counts = {
        "tests": suite.findall("testcase"),
        "failures": suite.findall("testcase[failure]"),
        "errors": suite.findall("testcase[error]"),
    }
    for name, cases in counts.items():
        assert suites.attrib[name] == suite.attrib[name] == str(len(cases))
    assert suite.attrib.keys() == {"name", *counts, "time"}
    assert {child.tag for child in suite} <= {"testcase", "system-out"}
    for case in counts["tests"]:
        assert case.attrib.keys() == {"classname", "name", "time"}
        assert re.fullmatch(r"\d+\.\d{3}", case.attrib["time"])
        for found in case:
            assert found.tag in {"failure", "error"}
            assert found.attrib.keys() == {"type", "message"}
    return counts["tests"]


class Reader(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in {"meta", "link", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append(text)

    def texts_of(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


TAGS: Final = frozenset(
    {
        *("html", "head", "meta", "link", "title", "style", "body", "header", "main", "div", "p"),
        *("h1", "h2", "h3", "span", "small", "code", "a", "abbr", "wbr", "article", "ul", "li"),
        *("dl", "dt", "dd", "table", "thead", "tbody", "tr", "th", "td", "details", "summary"),
    }
)
ATTRIBUTES: Final = frozenset(
    {"lang", "charset", "http-equiv", "content", "name", "rel", "href"}
    | {"id", "class", "scope", "title"}
)


def read(page: str) -> Reader:
    """Read a page; it has nothing but what this command writes."""
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag in TAGS
        assert attributes.keys() <= ATTRIBUTES
    assert all(re.match(r"\./|data:,$", it["href"] or "") for _, it in reader.tags if "href" in it)
    return reader


def wrote(folder: Path, *arguments: object) -> tuple[Result, bytes, str]:
    """Evaluate a folder into both files."""
    xml, html = folder / "eval.xml", folder / "eval.html"
    result = call(folder, *arguments, "--junit", xml, "--html", html, "--force")
    return result, xml.read_bytes(), html.read_text("utf-8")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """Recordings whose names are made to be read as something else; each has a page."""
    source = record(tmp_path, "slow", 3.25)
    for name in HOSTILE_NAMES:
        shutil.copy(source, os.fsencode(tmp_path) + b"/" + name + SUFFIX.encode())
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name + b".html")).touch()
    source.unlink()
    return tmp_path


# -- JUnit ----------------------------------------------------------------------------------------


def test_a_recording_fails_by_its_own_values(folder: Path) -> None:
    """A CI system would show one red line for a night of recordings."""
    result, xml, _ = wrote(
        folder,
        *("--fail-if", "response_delay > 2", "--fail-if", "unanswered > 0"),
        *("--fail-if", "response_delay_worst >= 3.25", "--fail-if", "word_delay > 1"),
    )
    assert result.exit_code == 1  # by the folder: unanswered, and the worst
    found = {case.attrib["name"].partition(".")[0]: case for case in cases_in(xml)}
    assert list(found) == ["never", "quick", "slow"]
    messages = {name: [it.attrib["message"] for it in case] for name, case in found.items()}
    assert messages == {
        "never": ["unanswered > 0 (it is 1)"],
        "quick": [],
        "slow": ["response_delay > 2 (it is 3.25)", "response_delay_worst >= 3.25 (it is 3.25)"],
    }
    assert {case.attrib["classname"] for case in found.values()} == {str(folder)}
    assert {case.attrib["time"] for case in found.values()} == {"9.000"}
    details = (found["slow"][0].text or "").splitlines()
    log = folder / f"slow{SUFFIX}"
    assert details[1:] == ["response_delay is worst at 0.8 s", f"antiphon recordings view {log}"]
    told = (ET.fromstring(xml).findtext("testsuite/system-out") or "").splitlines()
    assert told[0] == "condition holds: unanswered > 0 (it is 1)"
    assert "no recording has word_delay" in told[-1]


@pytest.mark.parametrize("condition", ["take_over_rate_count < 50", "errors_recordings == 3"])
def test_a_count_of_the_folder_fails_no_recording(folder: Path, condition: str) -> None:
    """A gate for too few recordings would turn all of them red."""
    result, xml, _ = wrote(folder, "--fail-if", condition)
    assert result.exit_code == 1
    assert all(len(case) == 0 for case in cases_in(xml))
    assert condition in (ET.fromstring(xml).findtext("testsuite/system-out") or "")


def test_a_damaged_log_is_an_error_and_no_failure(folder: Path) -> None:
    """A broken disk would look like a worse model."""
    shutil.copy(GOLDEN / f"v1-damaged-twice{SUFFIX}", folder)
    (folder / f"empty{SUFFIX}").touch()
    _, xml, html = wrote(folder, "--fail-if", "errors >= 0")
    found = {case.attrib["name"].partition(".")[0]: case for case in cases_in(xml)}
    kinds = {name: [(it.tag, it.attrib["type"]) for it in case] for name, case in found.items()}
    assert kinds["v1-damaged-twice"] == [("error", "damaged")]
    assert kinds["empty"] == [("error", "unreadable")]
    assert kinds["quick"] == [("failure", "errors")]
    assert "damaged, not in the summary" in html
    assert "1 unreadable" in html


def test_logs_are_named_by_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recordings of the same name in two folders would be one test."""
    for name in ("one/inner", "two"):
        (tmp_path / name).mkdir(parents=True)
        record(tmp_path / name, "same", 1.5)
    monkeypatch.chdir(tmp_path)
    call("one", "two", f"two/same{SUFFIX}", "--junit", "names.xml")
    cases = [case.attrib for case in cases_in(Path("names.xml").read_bytes())]
    assert [(it["classname"], it["name"]) for it in cases] == [
        ("one", f"inner/same{SUFFIX}"),
        ("two", f"same{SUFFIX}"),
    ]
    call(".", "--junit", "names.xml", "--force")
    cases = [case.attrib for case in cases_in(Path("names.xml").read_bytes())]
    assert [(it["classname"], it["name"]) for it in cases] == [
        ("antiphon eval", f"one/inner/same{SUFFIX}"),
        ("antiphon eval", f"two/same{SUFFIX}"),
    ]


# -- the page -------------------------------------------------------------------------------------


def test_a_page_shows_the_worst_first_and_links_to_their_pages(folder: Path) -> None:
    """A reader would have to search for the conversation that went wrong."""
    (folder / "slow.html").touch()
    _, _, html = wrote(folder, "--by", "response_delay", "--fail-if", "unanswered > 0")
    reader = read(html)
    names = re.findall(r"<h3>(\w+)\.", html)
    assert names == ["slow", "quick", "never"]
    assert [it["href"] for _, it in reader.tags if "href" in it] == ["data:,", "./slow.html"]
    assert f"antiphon recordings view {folder / f'never{SUFFIX}'}" in reader.texts
    assert "condition holds: unanswered > 0 (it is 1)" in reader.texts
    titles = {it["title"] for tag, it in reader.tags if tag == "abbr"}
    assert MEASURES["response_delay"].definition in titles
    assert titles < {measure.definition for measure in MEASURES.values()}
    _, _, html = wrote(folder, "--by", "unanswered")
    assert re.findall(r"<h3>(\w+)\.", html)[0] == "never"
    assert "No recording has word_delay" in wrote(folder, "--by", "word_delay")[2]


def test_a_page_allows_only_its_style(folder: Path) -> None:
    """A page with a hole would run what a name of a file holds."""
    _, _, html = wrote(folder)
    policy = policy_of(html)
    assert policy.keys() == {"default-src", "style-src", "img-src", "base-uri", "form-action"}
    assert policy["default-src"] == ["'none'"]
    assert "<script" not in html
    assert html.count("<style>") == 1


def test_a_link_goes_from_the_page_to_the_recording_s(folder: Path, tmp_path: Path) -> None:
    """A page that lies elsewhere would link to nothing."""
    (folder / "slow.html").touch()
    (tmp_path / "pages" / "today").mkdir(parents=True)
    page = tmp_path / "pages" / "today" / "index.html"
    call(folder, "--html", page)
    (link,) = re.findall(r'<a href="([^"]+)"', page.read_text("utf-8"))
    assert (page.parent / link).resolve() == (folder / "slow.html").resolve()


def test_a_long_page_ends(folder: Path) -> None:
    """A browser would not open a page of a hundred thousand recordings."""
    done = sum_up(measure_logs([next(folder.glob("slow*"))], unwatched))
    many = attrs.evolve(done, rows=done.rows * (RECORDINGS_MAX + 7))
    html = "".join(page_of(many, names_of([folder], [Path(done.rows[0].log)]), folder / "p.html"))
    assert read(html).texts_of("article") == RECORDINGS_MAX
    assert "and 7 more" in html
    assert len(html) < 4_000 * RECORDINGS_MAX


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to show a page in")
def test_a_browser_shows_it_on_a_phone(hostile: Path, tmp_path_factory: Any) -> None:
    """A page would be cut off, ask the network or complain."""
    wrote(hostile)
    page = hostile / "eval.html"
    with chromium(tmp_path_factory.mktemp("browser")) as tab:
        tab.resize(390, 844)
        tab.open(page)
        assert tab.run("document.documentElement.scrollWidth") == 390
        assert tab.run("document.querySelectorAll('article').length") == len(HOSTILE_NAMES)
        assert tab.run("document.querySelectorAll('script, [onmouseover]').length") == 0
        assert (tab.logged, tab.requested) == ([], [page.as_uri()])


# -- both -----------------------------------------------------------------------------------------


def test_hostile_names_stay_names(hostile: Path) -> None:
    """A file of a stranger would run a script in the reader's browser, or break the CI."""
    result, xml, html = wrote(hostile, "--fail-if", "errors >= 0")
    assert all(line.isprintable() for line in result.stdout.splitlines())
    names = {case.attrib["name"] for case in cases_in(xml)}
    assert names == {printable(os.fsdecode(name)) + SUFFIX for name in HOSTILE_NAMES}
    assert len(names) == len(HOSTILE_NAMES)
    reader = read(html)
    links = [it["href"] or "" for tag, it in reader.tags if tag == "a"]
    assert len(links) == len(HOSTILE_NAMES)
    for link in links:
        assert urlsplit(link)[:2] == ("", "")
        assert urlsplit(link)[3:] == ("", "")
        assert os.path.exists(os.fsencode(hostile) + b"/" + unquote_to_bytes(link))
    assert names <= set(reader.texts)


ANY: Final = st.text(st.characters(), min_size=1, max_size=30)
"""With lone surrogates and control characters."""


@given(st.lists(ANY, min_size=1, max_size=4, unique=True), ANY, ANY)
def test_any_text_is_escaped(paths: list[str], error: str, told: str) -> None:
    """One character that is not escaped, and the file cannot be read."""
    rows = [Row(log=path, result="unreadable", error=error) for path in paths]
    rows.append(row_of("last", {}, {"mode": error, "dialect": told}))
    done = Evaluation(rows=tuple(rows), summary={}, by=None)
    names = {
        row.log: Name(
            folder=printable(error),
            path=printable(row.log),
            page=Path("missing.html"),
            command=printable(row.log),
        )
        for row in rows
    }
    cases = cases_in(junit_of(done, names, [parse("errors > 0")], [told]))
    assert sorted(case.attrib["name"] for case in cases) == sorted(
        printable(row.log) for row in rows
    )
    messages = {found.attrib["message"] for case in cases for found in case}
    assert messages == {printable(error)}
    reader = read("".join(page_of(done, names, Path("eval.html"), [told])))
    assert {printable(path) for path in paths} <= set(reader.texts)


@given(ANY, ANY)
def test_printable_texts_stay_different(one: str, other: str) -> None:
    """Two recordings would have one name."""
    assert printable(one).isprintable()
    assert (printable(one) == printable(other)) is (one == other)


def test_the_same_logs_give_the_same_bytes(tmp_path: Path) -> None:
    """Two nights could not be compared by a tool."""
    made, folder = [], tmp_path / "logs"
    folder.mkdir()
    for path in sample(*[sorted(GOLDEN.glob(f"*{SUFFIX}"))[::step] for step in (1, 4)]):
        (folder / path.name).symlink_to(path)
    for name in ("one", "other"):
        xml, html = tmp_path / f"{name}.xml", tmp_path / f"{name}.html"
        result = call(folder, "--junit", xml, "--html", html, "--fail-if", "response_delay > 0.001")
        assert result.exit_code == 1
        made.append((xml.read_bytes(), html.read_bytes()))
    assert made[0] == made[1]
    logs = len(list(folder.iterdir()))
    cases = cases_in(made[0][0])
    assert len(cases) == logs
    assert sum(case.find("failure") is not None for case in cases) > 1
    assert read(made[0][1].decode()).texts_of("article") == logs


def test_an_existing_file_is_replaced_only_with_force(folder: Path) -> None:
    """A report would be lost, or a log overwritten."""
    there = folder / "there.xml"
    there.write_text("precious")
    for option in ("--junit", "--html"):
        result = call(folder, option, there)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "--force replaces it" in result.stderr
        log = next(folder.glob(f"slow{SUFFIX}"))
        result = call(folder, option, log, "--force")
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{option} " in result.stderr
        assert call(folder, option, folder / "no" / "folder.xml").exit_code == 2
    assert there.read_text() == "precious"
    assert call(folder, "--junit", there, "--force").exit_code == 0
    cases_in(there.read_bytes())
    assert not list(folder.glob(".antiphon-*"))
