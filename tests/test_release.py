"""The checks before a release, and what the pages for contributors name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from tests.project.commands import is_command
from tests.project.packed import ROOT, VERSION
from tests.project.release import section, versions

PAGES: Final = ("CONTRIBUTING.md", "SECURITY.md", "deploy/README.md")
TEMPLATES: Final = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("## 1.0.0 - 2026-01-02\n\n### Added\n\n- A thing.\n", []),
        ("## 1.0.0 - 2026-01-02\n\n- A thing.\n\n## Unreleased\n\nNothing yet.\n", []),
        ("## 0.9.0 - 2025-01-02\n\n- A thing.\n", ["CHANGELOG.md has no section 1.0.0"]),
        (
            "## 1.0.0 - unreleased\n\n- A thing.\n",
            ["CHANGELOG.md: '1.0.0 - unreleased' has no date"],
        ),
        ("## 1.0.0 - 2026-01-02\n\n", ["CHANGELOG.md: '1.0.0 - 2026-01-02' is empty"]),
        (
            "## Unreleased\n\n- More.\n\n## 1.0.0 - 2026-01-02\n\n- A thing.\n",
            ["CHANGELOG.md: there are entries under Unreleased"],
        ),
    ],
)
def test_the_changelog_is_judged(text: str, missing: list[str]) -> None:
    """A version would come out that tells its users nothing."""
    assert list(section(text, "1.0.0")) == missing


def test_all_packages_have_one_version() -> None:
    """A client's author could not tell which server it belongs to."""
    told = [line for line in versions() if "tag" not in line]  # a released version has one
    assert told == []
    assert f"## {VERSION} - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"antiphon-{VERSION}-" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_what_exists(name: str) -> None:
    """A contributor looks for a file that was moved."""
    page = ROOT / name
    text = page.read_text()
    for link in re.findall(r"\]\(([^):#]+)\)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:\.ci|protocol|recorder|runtime|replay|tests|fixtures)/[\w/.]+)`", text
    ):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", [*TEMPLATES, ROOT / "SECURITY.md"], ids=lambda page: page.name)
def test_a_page_names_commands_that_exist(page: Path) -> None:
    """A reporter is sent to type what there is not."""
    named = re.findall(r"`antiphon ([a-z][a-z -]*)", page.read_text())
    assert [line for line in named if not is_command(line.split())] == []


def test_every_template_has_a_name() -> None:
    """It would not be offered."""
    assert TEMPLATES
    for page in TEMPLATES:
        assert re.match(r"---\nname: .+\nabout: .+\n---\n", page.read_text())
