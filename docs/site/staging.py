"""Gather the pages of the site, and lead their links.

Pages are written to be read in the repository too: a link is relative to its page, and an anchor is
what GitHub makes of a heading. Here links are checked, and written as the site needs them. A state
diagram, which a browser could only draw with a script from elsewhere, becomes a table, and a
recording its page.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from markdown.extensions.toc import slugify

from recorder.format.format import SUFFIX
from recorder.read.reader import LogReader
from replay.view.document import page_of

ROOT: Final = Path(__file__).resolve().parents[2]
FROM_ELSEWHERE: Final[Mapping[str, str]] = {
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
    "examples/README.md": "examples.md",
}
"""Pages of the site that are not in docs/, by their names there."""
OPTIONAL: Final[Mapping[str, str]] = {"CONTRIBUTING.md": "contributing.md"}
"""The same, which are left out where they are not there."""
ASSETS: Final = (".svg", ".png", ".webp", ".webm", ".json", SUFFIX)
LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"^( *)(```+).*?^\1\2 *$|``.*?``|`[^`\n]*`", re.DOTALL | re.MULTILINE)
DIAGRAM: Final = re.compile(r"```mermaid\nstateDiagram-v2\n(.*?)```\n", re.DOTALL)
STEP: Final = re.compile(r" *(\S+) --> (\S+): (.*)")


def pages() -> dict[str, str]:
    """The names in the repository of all pages that are written by hand, and their names here."""
    found = {
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT / "docs").as_posix()
        for path in sorted((ROOT / "docs").rglob("*"))
        if path.name.endswith((".md", *ASSETS)) and path.is_file()
    }
    found = {name: here.replace(SUFFIX, ".html") for name, here in found.items()}
    there = {name: here for name, here in OPTIONAL.items() if (ROOT / name).exists()}
    return found | dict(FROM_ELSEWHERE) | there


def stage(folder: Path, generated: Mapping[str, str], *, repository: str) -> list[str]:
    """Write all pages to `folder`; return the links that lead nowhere, and where they are."""
    faults: list[str] = []
    named = pages()
    for name, here in named.items():
        target = folder / here
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(SUFFIX):
            with LogReader(ROOT / name) as reader:
                target.write_bytes(b"".join(page_of(reader.head.fields, reader)))
            continue
        if target.suffix != ".md":
            shutil.copy(ROOT / name, target)
            continue
        text = (ROOT / name).read_text("utf-8")
        faults += wrong_links(name, text)
        target.write_text(tabled(led(name, text, named, repository)), "utf-8")
    for here, text in generated.items():
        target = folder / here
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
    return faults


def links(text: str) -> Iterator[re.Match[str]]:
    """Find the links of a page: 1 is `!` of a picture, 2 the text, 3 the target. Code has none."""
    held = [found.span() for found in CODE.finditer(text)]
    for link in LINK.finditer(text):
        if not any(begin <= link.start() < end for begin, end in held) and ":" not in link[3]:
            yield link


def wrong_links(name: str, text: str) -> list[str]:
    """Describe the links of a page, by its name in the repository, that lead nowhere."""
    wrong = []
    for link in links(text):
        path, _, anchor = link[3].partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        if not target.exists():
            wrong.append(f"{name}: {link[3]}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.resolve()):
            wrong.append(f"{name}: {link[3]}: there is no such heading")
    return wrong


def led(name: str, text: str, named: Mapping[str, str], repository: str) -> str:
    """Write a page's links as the site needs them."""
    parts, done = [], 0
    for link in links(text):
        parts += [text[done : link.start()], _lead(name, link, named, repository)]
        done = link.end()
    return "".join([*parts, text[done:]])


def _lead(name: str, link: re.Match[str], named: Mapping[str, str], repository: str) -> str:
    path, hash_, anchor = link[3].partition("#")
    target = (ROOT / name).parent / path if path else ROOT / name
    inside = os.path.relpath(target, ROOT)
    if anchor and target.suffix == ".md":
        anchor = anchors(target.resolve()).get(anchor, anchor)
    if inside in named:
        start = Path(named[name]).parent
        here = os.path.relpath(named[inside], start) if path else ""
        return f"{link[1]}[{link[2]}]({here}{hash_}{anchor})"
    return f"[{link[2]}]({repository}/{inside}{hash_}{anchor})" if repository else link[2]


@cache
def anchors(page: Path) -> dict[str, str]:
    """The anchors of a page's headings as GitHub makes them, and as the site does."""
    text = re.sub(r"^( *)(```+).*?^\1\2 *$", "", page.read_text("utf-8"), flags=re.DOTALL | re.M)
    found: dict[str, str] = {}
    for heading in re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        ours = slugify(plain, "-")
        copies = sum(1 for other in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", other))
        found[f"{slug}-{copies}" if copies else slug] = f"{ours}_{copies}" if copies else ours
    return found


def tabled(text: str) -> str:
    """Write a page's state diagrams as tables."""
    return DIAGRAM.sub(lambda found: _table(found[1]), text)


def _table(steps: str) -> str:
    rows = ["| from | to | by |", "|---|---|---|"]
    for line in steps.splitlines():
        if step := STEP.fullmatch(line):
            ends = (f"`{each}`" if each != "[*]" else "" for each in step.groups()[:2])
            rows.append(f"| {' | '.join(ends)} | {step[3]} |")
    return "\n".join(rows) + "\n"
