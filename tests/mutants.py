"""Mistakes planted into the product's source, one at a time, to see that tests find them.

    python -m tests.mutants [--seed N] [--count N] [--only TEXT] [--jobs N] [--resume] [--json]

A mutant is one small change: a comparison or a sign turned round, a number that is one too large, a
condition negated, a call or an assignment left out. All that are possible in the code of `AREAS`
are found from its syntax, and as many of each area are drawn by the seed; the hash of a mutant's
name decides, so a change elsewhere does not draw others. Each is written into a copy of the source,
never into the working tree, where first the golden logs are replayed and then the tests of its
area that are quick or import the module, until one fails. Those that are named like it come first.

`EQUIVALENT` names those that change nothing that anybody could see, with the reason; they are
not run. `--only` takes all mutants whose name holds the text. What was found is kept in
`mutants.json` after each mutant, without a date; `--resume` runs only what no run before it caught.
It exits with 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Final

import attrs

from tests.conftest import is_quick
from tests.project.evidence import add_out

ROOT: Final = Path(__file__).parents[1]
AREAS: Final[Mapping[str, tuple[str, ...]]] = {
    "protocol/machine": ("tests/protocol", "tests/runtime/session"),
    "runtime/session": ("tests/runtime/session", "tests/runtime/slots", "tests/runtime/telemetry"),
    "recorder": ("tests/recorder", "tests/replay"),
    "protocol/wire": ("tests/protocol",),
}
"""Folders of the product that are mutated, and those of their tests."""
OF_ALL: Final = ("tests/test_transcripts.py", "tests/test_golden.py", "tests/test_referee.py")
REPLAY: Final = "tests/replay/test_mutants.py::test_golden_logs_replay_without_a_mutant"
COPIED: Final = frozenset(
    {"antiphon", "deploy", "docs", "examples", "fixtures"}
    | {"protocol", "recorder", "replay", "runtime", "tests"}
)
LIMIT_S: Final = 900
"""Tests that take so long hang: a mutant that waits, or works, for ever is caught."""
MEMORY_BYTES: Final = 8 << 30
"""A mutant may also take ever more."""
SURVIVED: Final = "survived"
AT_FIRST: Final = 8
"""Files of tests that are run before the others are read."""
SHOWN: Final = 100
"""Characters of a mutant's line."""
TURNED: Final[Mapping[type[ast.AST], tuple[str, str]]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
}
"""Operators, and what stands in their place."""
UNTOUCHED: Final = (ast.Assert, ast.Raise, ast.JoinedStr, ast.pattern, ast.arguments)
"""What says something to a developer, or nothing to a test."""
EQUIVALENT: Final[Mapping[str, str]] = {
    "protocol/machine/conversation.py Conversation.truncate: "
    "length = part.ends[-1][0] if part.ends else 0 -> "
    "length = part.ends[-1][0] if part.ends else 1": (
        "a cut is given in milliseconds of 24 samples: none is between 0 and 1 sample"
    ),
    "protocol/wire/audio.py to_pcm16: "
    'scaled = np.frombuffer(pcm, "<f4").clip(-1, 1) * np.float32(PCM16_SCALE) -> '
    'scaled = np.frombuffer(pcm, "<f4").clip(-2, 1) * np.float32(PCM16_SCALE)': (
        "what is below full scale is cut off once more after it is scaled"
    ),
    "recorder/storage/remote.py _RemoteSource.__init__: self._start = 0 -> self._start = 1": (
        "nothing is loaded yet: only how much the first read reads ahead is another"
    ),
}
"""The mutants that change nothing, by name, and why."""


@attrs.frozen(kw_only=True)
class Mutant:
    """One change: the bytes from `begin` to `end` of a file become others."""

    path: str
    name: str
    begin: int
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        """Return the source with the mistake in it."""
        return source[: self.begin] + self.text.encode() + source[self.end :]


class Source:
    """A file, and the mutants that are possible in it."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path, self.data = path, data
        self._lines = [0]
        for line in data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._names = Counter[str]()

    def mutants(self) -> Iterator[Mutant]:
        """Find all, in the order of the source."""
        yield from self._within(ast.parse(self.data), "", is_code=False)

    def _within(self, node: ast.AST, name: str, *, is_code: bool) -> Iterator[Mutant]:
        if isinstance(node, UNTOUCHED) or _is_logged(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}" if name else node.name
            is_code = is_code or not isinstance(node, ast.ClassDef)
            children: Sequence[ast.AST] = node.body
        else:
            named = ("annotation", "returns")
            values = (value for key, value in ast.iter_fields(node) if key not in named)
            lists = (value if isinstance(value, list) else [value] for value in values)
            children = [child for each in lists for child in each if isinstance(child, ast.AST)]
        for begin, end, text in self._changes(node) if is_code else ():
            yield self._mutant(name, begin, end, text)
        for child in children:
            yield from self._within(child, name, is_code=is_code)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, str]]:
        """Give what may be changed of one node: a span of bytes and its new text."""
        match node:
            case ast.Compare(left=left, ops=[by], comparators=[right, *_]):
                yield from self._turned(left, by, right)
            case ast.BoolOp(op=by, values=[left, right, *_]):
                yield from self._turned(left, by, right)
            case ast.BinOp(left=left, op=by, right=right):
                yield from self._turned(left, by, right)
            case ast.AugAssign(target=left, op=by, value=right):
                yield from self._turned(left, by, right, "=")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield *self._span(node), f"({self._text(operand)})"
            case ast.Constant(value=bool(value)):
                yield *self._span(node), str(not value)
            case ast.Constant(value=int(value)):
                yield *self._span(node), str(value + 1)
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield *self._span(node), "pass"
            case ast.Assign(targets=[ast.Attribute()]) | ast.Return(value=None):
                yield *self._span(node), "pass"
            case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(
                test, ast.Compare | ast.UnaryOp | ast.BoolOp
            ):
                yield *self._span(test), f"not ({self._text(test)})"

    def _turned(
        self, left: ast.AST, by: ast.AST, right: ast.AST, more: str = ""
    ) -> Iterator[tuple[int, int, str]]:
        """Turn the operator round that stands between two operands."""
        if type(by) not in TURNED or _is_text(left) or _is_text(right):
            return
        old, new = (part + more for part in TURNED[type(by)])
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.data[begin:end].decode()
        at = re.search(rf"(?<![\w]){re.escape(old)}(?![\w])", between)
        if at is not None:
            yield begin + at.start(), begin + at.end(), new

    def _mutant(self, where: str, begin: int, end: int, text: str) -> Mutant:
        first = self.data.rfind(b"\n", 0, begin) + 1
        last = self.data.find(b"\n", end)
        was = self.data[first:last]
        now = was[: begin - first] + text.encode() + was[end - first :]
        shown = (" ".join(it.decode().split())[:SHOWN] for it in (was, now))
        name = f"{self.path} {where}: {' -> '.join(shown)}"
        self._names[name] += 1
        if self._names[name] > 1:
            name += f" ({self._names[name]})"
        return Mutant(path=self.path, name=name, begin=begin, end=end, text=text)

    def _span(self, node: ast.AST) -> tuple[int, int]:
        lines, (first, at) = self._lines, (node.lineno, node.col_offset)  # type: ignore[attr-defined]
        last, upto = node.end_lineno, node.end_col_offset  # type: ignore[attr-defined]
        return lines[first - 1] + at, lines[last - 1] + upto

    def _text(self, node: ast.AST) -> str:
        begin, end = self._span(node)
        return self.data[begin:end].decode()


def _is_logged(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and any(
        isinstance(part, ast.Name) and part.id == "_logger" for part in ast.walk(node)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


@cache
def mutants_of(area: str) -> tuple[Mutant, ...]:
    """Find all that are possible in the code of an area."""
    paths = sorted((ROOT / area).rglob("*.py"))
    sources = (Source(path.relative_to(ROOT).as_posix(), path.read_bytes()) for path in paths)
    return tuple(mutant for source in sources for mutant in source.mutants())


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def drawn(seed: int, count: int) -> list[Mutant]:
    """Draw mutants: as many of each area."""
    found = list[Mutant]()
    for area in AREAS:
        mutants = sorted(mutants_of(area), key=lambda it: _hash(f"{seed} {it.name}"))
        found += mutants[: -(-count // len(AREAS))]
    return found[:count]


def nearest(path: str) -> list[str]:
    """Choose the tests of a file's area that are quick or import it, the nearest first."""
    module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    parent, _, stem = module.rpartition(".")
    imports = re.compile(
        rf"^ *(?:from {re.escape(module)} import|import {re.escape(module)}\b"
        rf"|from {re.escape(parent)} import .*\b{stem}\b)",
        re.MULTILINE,
    )
    folders = next(tests for area, tests in AREAS.items() if path.startswith(area))
    chosen = list[tuple[bool, bool, int, str]]()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        name = file.relative_to(ROOT).as_posix()
        is_near = imports.search(file.read_text("utf-8")) is not None
        is_named = stem.removesuffix("s") in file.stem
        is_of_area = name in OF_ALL or name.startswith(folders)
        if (is_near and is_of_area) or (is_quick(file) and (is_near or is_of_area)):
            chosen.append((not is_named, not is_near, file.stat().st_size, name))
    return [name for *_, name in sorted(chosen)]


class Copy:
    """A copy of the source, in which one mutant at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".*")
        for path in ROOT.iterdir():
            if path.is_dir() and path.name in COPIED:
                shutil.copytree(path, folder / path.name, ignore=ignored)
            elif path.is_file():
                shutil.copy2(path, folder)
        self._planted = 0

    def judge(self, mutant: Mutant) -> str:
        """Plant a mutant; returns what caught it."""
        path = self._folder / mutant.path
        source = path.read_bytes()
        try:
            path.write_bytes(mutant.applied(source))
            self._touch(path)
            if self.failed([REPLAY]):
                return "replay"
            tests = nearest(mutant.path)
            return self.failed(tests[:AT_FIRST]) or self.failed(tests[AT_FIRST:]) or SURVIVED
        finally:
            path.write_bytes(source)
            self._touch(path)

    def failed(self, tests: Sequence[str]) -> str:
        """Run tests; returns the first that failed, empty if none did."""
        command = sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE"
        try:
            done = subprocess.run(
                [*command, "-p", "no:cacheprovider", *tests],
                cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(self._folder)},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hung"
        if not done.returncode:
            return ""
        found = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return found[0] if found else f"exit code {done.returncode}"

    def _touch(self, path: Path) -> None:
        """Give a file a time that it never had, for bytecode is kept by whole seconds."""
        self._planted += 1
        os.utime(path, (self._planted, self._planted))


@attrs.define
class Run:
    """What was found, by the mutant's name: what caught it, or why nothing can."""

    seed: int
    drawn: int
    out: Path
    found: dict[str, str] = attrs.Factory(dict)

    def summary(self) -> dict[str, object]:
        """Say it, as it is kept."""
        survivors = [name for name, how in self.found.items() if how == SURVIVED]
        equivalent = [name for name in self.found if name in EQUIVALENT]
        replayed = sum(how == "replay" for how in self.found.values())
        return {
            "what": "mistakes planted into the source, and what caught each",
            "good": not survivors,
            "seed": self.seed,
            "drawn": self.drawn,
            "mutants": len(self.found),
            "caught_by_golden_logs": replayed,
            "caught_by_tests": len(self.found) - replayed - len(survivors) - len(equivalent),
            "equivalent": len(equivalent),
            "survived": survivors,
            "found": dict(sorted(self.found.items())),
        }

    def keep(self) -> None:
        """Write it down."""
        text = json.dumps(self.summary(), indent=2, ensure_ascii=False) + "\n"
        (self.out / "mutants.json").write_text(text, "utf-8")

    def resume(self, mutants: Sequence[Mutant]) -> None:
        """Take over what runs before this one have caught."""
        path = self.out / "mutants.json"
        known = json.loads(path.read_text("utf-8"))["found"] if path.exists() else {}
        names = {mutant.name for mutant in mutants}
        self.found |= {
            name: how for name, how in known.items() if name in names and how != SURVIVED
        }


def run(mutants: Sequence[Mutant], kept: Run, *, jobs: int, as_json: bool) -> None:
    """Judge mutants, each in one of `jobs` copies of the source."""
    copies = Queue[Copy]()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        for number in range(jobs):
            (folder := Path(name) / str(number)).mkdir()
            copies.put(Copy(folder))
        clean, tests = copies.get(), {test for it in mutants for test in nearest(it.path)}
        if broken := clean.failed([REPLAY, *sorted(tests)]):
            sys.exit(f"without a mutant it is {broken} that fails")
        copies.put(clean)

        def judge(mutant: Mutant) -> tuple[Mutant, str, float]:
            copy, began_s = copies.get(), time.monotonic()
            try:
                return mutant, copy.judge(mutant), time.monotonic() - began_s
            finally:
                copies.put(copy)

        for ended in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
            mutant, how, took_s = ended.result()
            kept.found[mutant.name] = how
            kept.keep()
            if as_json:
                print(json.dumps({"mutant": mutant.name, "caught_by": how}), flush=True)
            else:
                print(f"{len(kept.found)}: {mutant.name}: {how}, {took_s:.0f} s", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns the exit code.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=1, help="which mutants are drawn")
    parser.add_argument("--count", type=int, default=100, help="how many")
    parser.add_argument("--only", metavar="TEXT", help="all whose name holds the text instead")
    parser.add_argument("--jobs", type=int, default=1, help="at once, each in its own copy")
    parser.add_argument("--resume", action="store_true", help="go on with a run before this one")
    parser.add_argument("--json", action="store_true", help="a line of JSON a mutant")
    add_out(parser)
    given = parser.parse_args(arguments)
    mutants = drawn(given.seed, given.count)
    if given.only is not None:
        mutants = [it for area in AREAS for it in mutants_of(area) if given.only in it.name]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))  # of the tests as well
    kept = Run(given.seed, len(mutants), given.out)
    if given.resume:
        kept.resume(mutants)
    kept.found |= {it.name: EQUIVALENT[it.name] for it in mutants if it.name in EQUIVALENT}
    left = [mutant for mutant in mutants if mutant.name not in kept.found]
    run(left, kept, jobs=given.jobs, as_json=given.json)
    kept.keep()
    found = kept.summary()
    if not given.json:
        print(
            f"{found['mutants']} mutants, {len(left)} of them run now: {found['survived']} survived"
        )
    return 0 if found["good"] else 1


if __name__ == "__main__":
    sys.exit(main())
