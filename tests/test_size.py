"""The size of the product, which may only fall.

`SIZE` has the code lines (without blank lines, comments and docstrings) and the files of each
package. A change that raises a number edits the table in the same commit, and its message says why;
a change that lowers one by more than `SLACK` lowers the table. `python -m tests.test_size` prints
the table as it would be now.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.project.syntax import nodes_of

ROOT: Final = Path(__file__).parents[1]
SIZE: Final[Mapping[str, tuple[int, int]]] = {
    "antiphon": (225, 1),
    "protocol": (13_298, 47),
    "recorder": (4_240, 20),
    "runtime": (22_987, 110),
    "runtime/model": (9_899, 46),
    "replay": (10_560, 47),
}
"""Code lines and files by package; `runtime/model` is not counted in `runtime`."""
ANCESTORS_MAX: Final = 3
"""The most classes of ours in one line of inheritance, of classes with methods."""
IMPORTS_PERCENT_MAX: Final = 7.7
"""The part of the code lines that imports."""
SLACK: Final = 50
"""Code lines by which a package may be below its row."""


def code_lines(text: str) -> int:
    """Count the lines of a source that hold code."""
    numbered = enumerate(map(str.strip, text.split("\n")), 1)
    lines = {number for number, line in numbered if line and not line.startswith("#")}
    for node in nodes_of(text):
        match node:
            case ast.JoinedStr() | ast.Constant(value=str() | bytes()):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines - docstring_lines(text))


def docstring_lines(text: str) -> set[int]:
    """Find the lines of strings that stand as statements: docstrings, of constants too."""
    return {
        line
        for node in nodes_of(text)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def import_lines(nodes: Sequence[ast.AST]) -> int:
    """Count the lines of import statements."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


class Source(NamedTuple):
    """A source file of the product: its path, its row of `SIZE`, its code."""

    path: Path
    package: str
    nodes: Sequence[ast.AST]
    lines: int


@cache
def sources() -> tuple[Source, ...]:
    """Read each source file of the product."""
    found = []
    for package in ("antiphon", "protocol", "recorder", "runtime", "replay"):
        for path in sorted((ROOT / package).rglob("*.py")):
            row = package
            if path.is_relative_to(ROOT / "runtime" / "model"):
                row = "runtime/model"
            text = path.read_text("utf-8")
            found.append(Source(path, row, nodes_of(text), code_lines(text)))
    return tuple(found)


def sizes() -> dict[str, tuple[int, int]]:
    """Measure the code lines and files of each package."""
    found: dict[str, tuple[int, int]] = {}
    for source in sources():
        lines, files = found.get(source.package, (0, 0))
        found[source.package] = (lines + source.lines, files + 1)
    return found


def longest_line() -> list[str]:
    """Find the longest line of inheritance among classes with methods, the child first."""
    parents: dict[str, list[str]] = {}
    for path, _, nodes, _ in sources():
        module = path.relative_to(ROOT).with_suffix("").parts
        names = dict[str, str]()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                start = module[: -node.level] if node.level else ()
                source = ".".join((*start, *filter(None, [node.module])))
                names |= {it.asname or it.name: f"{source}.{it.name}" for it in node.names}
            elif isinstance(node, ast.ClassDef):
                names[node.name] = ".".join((*module, node.name))
        for node in nodes:
            if isinstance(node, ast.ClassDef) and has_methods(node):
                bases = [ast.unparse(base).partition(".") for base in node.bases]
                parents[names[node.name]] = [
                    f"{names[first]}{dot}{rest}" for first, dot, rest in bases if first in names
                ]

    def line(name: str) -> list[str]:
        above = [line(base) for base in parents[name] if base in parents]
        return [name, *max(above, key=len, default=[])]

    return max(map(line, parents), key=len)


def has_methods(node: ast.ClassDef) -> bool:
    """Whether a class is one of behaviour."""
    return any(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)


@pytest.mark.parametrize("package", SIZE)
def test_a_package_does_not_grow(package: str) -> None:
    """A package is as large as its row says, or a little smaller."""
    lines, files = sizes()[package]
    lines_max, files_max = SIZE[package]
    assert (lines <= lines_max, files <= files_max) == (True, True), (
        f"{package} has {lines} code lines in {files} files, its row allows {lines_max} in "
        f"{files_max}: make it smaller, or raise the row and say why in the commit"
    )
    assert (lines_max - lines <= SLACK, files_max == files) == (True, True), (
        f"{package} has only {lines} code lines in {files} files: lower its row"
    )


def test_every_package_has_a_row() -> None:
    """A new package is counted."""
    assert sizes().keys() == SIZE.keys()


def test_classes_inherit_over_few_levels() -> None:
    """No line of inheritance is longer than the longest one so far."""
    found = longest_line()
    assert len(found) == ANCESTORS_MAX, " <- ".join(found)


def test_imports_are_a_small_part() -> None:
    """The part of the lines that imports does not grow."""
    imports = sum(import_lines(source.nodes) for source in sources())
    assert 100 * imports / sum(source.lines for source in sources()) <= IMPORTS_PERCENT_MAX


def test_only_code_is_counted() -> None:
    """Blank lines, comments and docstrings are free; a string over lines is not."""
    text = '"""Doc."""\n\n# a comment\nX = 1  # one\n"""Of X."""\n\nY = """\n# a\n\n"""\n'
    assert code_lines(text) == 5


if __name__ == "__main__":
    for row, (lines, files) in sizes().items():
        print(f'    "{row}": ({lines:_}, {files}),')
    print(len(longest_line()), *longest_line())
