"""Holds documents, docstrings, comments and messages to a short list of words that are not used.

Its readers are engineers whose first language is rarely English, and who find things by search: so
it uses the field's own terms (docs/glossary.md). A row of `WORDS` names a pattern, the better word
and an example that it must catch. Code in backticks and in fenced blocks is not read; `tests/` and
the scripts in `fixtures/` are not held. Of scripts and files to deploy with, comments are.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Final

import attrs
import pytest

from tests.project.syntax import nodes_of
from tests.test_architecture import PACKAGES, ROOT, tracked_files

HELD: Final = (*PACKAGES, "antiphon")
COPIED: Final = ("deploy/", "docs/site/", "examples/")


@attrs.frozen
class Word:
    """A word that is not used: its pattern (case does not matter), the better word, an example."""

    pattern: str
    better: str
    example: str


PEOPLE: Final = "client, operator, user, reader; or a passive verb"
# fmt: off
WORDS: Final = (
    Word(r"\b(some|no|any|every)(body|one)\b(?! second)", PEOPLE, "Nobody waits"),
    Word(r"\bwho(so)?(m)?ever\b", PEOPLE, "whoever asks"),
    Word(r"\blikewise\b", "also, in the same way", "likewise, a chat"),
    Word(r"\b(tells?|told|telling) of\b", "report, describe, send", "an alert tells\nof a key"),
    Word(r"\b(is|are|was|were|be) (?-i:none)\b", "invalid, not allowed", "a setting that is none"),
    Word(r"\bthat there (is|are|was|were) not\b", "unknown, missing", "a field that there is not"),
    Word(r"\bbeside\b", "next to, with, in addition to", "a file beside it"),
    Word(r"\balone\b", "only; or by itself", "in text alone"),
    Word(r"\bamid(st)?\b", "during, in the middle of", "amid an answer"),
    Word(r"\b(anew|afresh)\b", "again, from the start", "begins anew"),
    Word(r"\b(is|are) no (?!longer|more|such|way)\w", "is not a", "it is no address"),
    Word(r"\b(written|writes?|writing) down\b", "transcribe", "words are written down"),
    Word(r"\bgone on with\b", "resumed, continued", "a session gone on with"),
    Word(r"\btold again\b", "returned", "tools are told again"),
    Word(r"\b(is|was) there already\b", "exists", "the file is there already"),
    Word(r"\bas often as (wanted|it likes)\b", "repeatable; any number of", "as often as wanted"),
    Word(r"\bmade if need be\b", "created if missing", "a folder, made if need be"),
    Word(r"\bof it(?=[.;:!?)]|\Z)", "name the thing, or leave it out", "that is all of it."),
)
"""A row is added once the tree is clean of its word."""
# fmt: on
NAMES: Final = {"say", "said", "tell", "tells", "told", "hear", "hears", "heard", "taken"}
"""Parts of names that are not used; better: what the value is, or sent, received, reported."""
NAMES_ALLOWED: Final[Mapping[str, str]] = {
    "replay/story/inspect.py: said": "a key of a report in JSON",
    "replay/story/reading.py: told": "a key of a report in JSON",
    "runtime/client/duplex.py: tell": "a method of the published client",
}


@attrs.frozen
class Sense:
    """A sense in which a word of `WORDS` is right, by the text that it stands in, and why."""

    pattern: str
    reason: str


ALLOWED: Final = (
    Sense(r"\b(left|leave|leaves|let) (\w+ )?alone\b", "an idiom: not touched"),
    Sense(r"\bthere (is|are|was|were) none\b", "a thing is missing, and not of another kind"),
    Sense(r"(?i)\bthere (is|are) no\b", "a thing is missing"),
    Sense(
        r"\b(that is no event of|files that are no WAV|that are no (name|JPEG|video))\b",
        "the words of errors on the wire, which recordings hold",
    ),
    Sense(
        r"\bthe model writes down the language that it hears\b",
        "the words of an error on the wire, which recordings hold",
    ),
    Sense(r"\bamid a turn\b", "the words of an error on the wire, which recordings hold"),
    Sense(r"\bgot a message that is none\b", "an error's words, pinned by tests of the backend"),
    Sense(r"\bor one that is none\b", "an error's words, pinned by tests of the vocoder"),
    Sense(r"\bwhich nobody asked\b", "an error's words, pinned by tests of the vocoder"),
    Sense(r"\btext alone, without speech\b", "a warning's words, pinned by tests of the vocoder"),
    Sense(r"\ba file that is not beside it\b", "an error's words, pinned by tests of checkpoints"),
)


def blanked(match: re.Match[str]) -> str:
    """Stand for a piece of code by its line breaks, so that lines count as they did."""
    return "``" + "\n" * match[0].count("\n")


def markdown_texts(page: str) -> Iterator[tuple[int, str]]:
    """Yield a page without its blocks of code, as one text from line 1."""
    blocks = r"^ *```.*?^ *```$|^(?: {4}\S.*\n)+"
    yield 1, re.sub(blocks, blanked, page, flags=re.DOTALL | re.MULTILINE)


@cache
def python_texts(source: str) -> Sequence[tuple[int, str]]:
    """Find each docstring, message and run of comments of a module with its first line."""
    found = [
        (node.lineno, node.value)
        for node in nodes_of(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    ]
    runs: list[tuple[int, str]] = [(0, "")]
    for number, comment in comments_of(source):
        first, text = runs[-1]
        if first + text.count("\n") + 1 == number:
            runs[-1] = (first, f"{text}\n{comment}")
        else:
            runs.append((number, comment))
    return [*found, *runs[1:]]


def comments_of(source: str) -> Iterator[tuple[int, str]]:
    """Yield the comment of each line that has one: from the first `#` outside of strings."""
    strings = defaultdict[int, list[tuple[int, float]]](list)
    for node in nodes_of(source):
        if isinstance(node, ast.JoinedStr | ast.Constant) and isinstance(node.end_lineno, int):
            for line in range(node.lineno, node.end_lineno + 1):
                begin = node.col_offset if line == node.lineno else 0
                is_last = line == node.end_lineno
                strings[line].append((begin, (is_last and node.end_col_offset) or inf))
    for number, text in enumerate(source.split("\n"), 1):
        data = text.encode() if "#" in text else b""
        for found in re.finditer(b"#", data):
            if not any(begin <= found.start() < end for begin, end in strings[number]):
                yield number, data[found.start() :].decode().lstrip("# ")
                break


def comment_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield each run of comments of a script or a file to deploy with, with its first line."""
    runs = r"/\*.*?\*/|(?:^[ \t]*(?://|#)[^\n]*(?:\n|\Z))+|(?<=\s)(?://|#) [^\n]*"
    for found in re.finditer(runs, source, re.DOTALL | re.MULTILINE):
        yield source.count("\n", 0, found.start()) + 1, re.sub(r"(?m)^ *(\*|//|#)", "", found[0])


def spaced(pattern: str) -> str:
    """Let a pattern's words stand on different lines."""
    return pattern.replace(" ", r"\s+")


PATTERNS: Final = [(word, re.compile(spaced(word.pattern), re.IGNORECASE)) for word in WORDS]
_ANY: Final = "|".join(spaced(word.pattern).removeprefix(r"\b") for word in WORDS)
AT_ONCE: Final = re.compile(rf"\b(?:{_ANY})", re.IGNORECASE)
"""All patterns, each of which begins a word: most texts have none, and are searched once."""


def is_allowed(at: int, text: str) -> bool:
    """Whether what stands there has a sense in which it is right."""
    spans = (found.span() for it in ALLOWED for found in re.finditer(spaced(it.pattern), text))
    return any(begin <= at < end for begin, end in spans)


def findings(path: str, source: str) -> Iterator[str]:
    """Find what a file says in words that are not used: file, line, word, the better word."""
    readers: dict[str, Callable[[str], Iterable[tuple[int, str]]]]
    readers = {".md": markdown_texts, ".py": python_texts}
    read = readers.get(Path(path).suffix, comment_texts)
    for first, text in read(source):
        shown = re.sub(r"`[^`]*`", blanked, text)
        for word, pattern in PATTERNS if AT_ONCE.search(shown) else ():
            for found in pattern.finditer(shown):
                if not is_allowed(found.start(), shown):
                    line = first + shown.count("\n", 0, found.start())
                    said = " ".join(found[0].split())
                    yield f"{path}:{line}: {said!r} is not used; better: {word.better}"


def names_set(source: str) -> Iterator[str]:
    """Yield each name that a module gives to a value, a function, a class or an attribute."""
    for node in nodes_of(source):
        match node:
            case ast.Name(ctx=ast.Store(), id=name) | ast.arg(arg=name):
                yield name
            case ast.Attribute(ctx=ast.Store(), attr=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name) | ast.MatchAs(name=str() as name):
                yield name


def refused_names(path: str, source: str) -> set[str]:
    """Find the names with a part in `NAMES`, each after its file."""
    found = {name for name in names_set(source) if NAMES & {*name.lower().split("_")}}
    return {f"{path}: {name}" for name in found}


def held_files() -> list[str]:
    """The files that are held: all pages, the modules of the product, and what users copy."""
    return [
        name
        for name in tracked_files()
        if name.endswith(".md")
        or (name.endswith((".py", ".js")) and name.split("/")[0] in HELD)
        or (name.startswith(COPIED) and not name.endswith(".json"))
    ]


# -- the list, tested -----------------------------------------------------------------------------

BAD: Final = {
    "a page": ("a.md", "One.\nIt is told\nof a change.", 2),
    "a row": ("a.md", "| a | beside |", 1),
    "a docstring": ("protocol/a.py", 'def f():\n    """One.\n\n    All of it.\n    """', 4),
    "an attribute's": ("protocol/a.py", 'A = 1\n"""Nobody asks."""', 2),
    "a comment": ("runtime/a.py", "a = 1  # so does\nb = 2\n# whoever\n# asks", 3),
    "a split comment": ("runtime/a.py", "\n# one that is\n# none", 2),
    "a script's": ("runtime/a.js", "let a = 1; // so\n/**\n * One.\n * For nobody. */", 4),
    "a file's": ("deploy/a.yml", "a: 1\n# One\n# beside it", 3),
    "a message": ("runtime/a.py", 'raise ValueError(f"{a} is for somebody")', 1),
}
GOOD: Final = {
    "code": ("a.md", "A `beside` and\n\n```sh\nnobody\n```\n\n    likewise\n\nends."),
    "names": ("runtime/a.py", 'alone = {"alone": nobody}'),
    "an idiom": ("a.md", "The log is left alone."),
    "a script": ("runtime/a.js", "const alone = likewise; // a rule"),
    "parts": ("a.md", "besides the sum of it all and parts of items, twofold of iterations"),
}


@pytest.mark.parametrize("word", WORDS, ids=lambda it: it.example)
def test_a_word_is_caught(word: Word) -> None:
    """A row would hold nothing."""
    (found,) = findings("a.md", word.example)
    assert word.better in found


@pytest.mark.parametrize("name", BAD)
def test_it_is_found_where_it_stands(name: str) -> None:
    """A kind of text would not be read, or a finding would name another line."""
    path, source, line = BAD[name]
    (found,) = findings(path, source)
    assert found.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("name", GOOD)
def test_code_and_other_senses_pass(name: str) -> None:
    """Good text would be bent to please a test."""
    assert list(findings(*GOOD[name])) == []


@pytest.mark.parametrize(
    "code",
    ["said = 1", "def f(told): ...", "def _hear(): ...", "class Heard: ...", "it._is_taken = 1"],
)
def test_a_name_is_caught(code: str) -> None:
    """A kind of name would not be read."""
    assert len(refused_names("recorder/a.py", code)) == 1


# -- the repository -------------------------------------------------------------------------------


def test_the_words_are_not_used() -> None:
    """Readers would search for the field's terms and not find them."""
    found = [
        each for name in held_files() for each in findings(name, (ROOT / name).read_text("utf-8"))
    ]
    assert not found, "\n".join(["words that are not used:", *found])


def test_names_are_of_what_values_are() -> None:
    """A reader would learn who spoke, and not what a value is; nor is an exception left over."""
    held = [it for it in held_files() if it.endswith(".py")]
    product = [it for it in held if it.split("/")[0] in HELD]
    found = [refused_names(it, (ROOT / it).read_text("utf-8")) for it in product]
    assert set[str]().union(*found) == NAMES_ALLOWED.keys()


def test_the_pages_name_files_that_exist() -> None:
    """A reader would look for a module that was moved."""
    path = re.compile(
        r"`((?:protocol|recorder|runtime|replay|tests|fixtures|docs|deploy)/[\w./-]*)`"
    )
    missing = [
        f"{name}: {each}"
        for name in tracked_files()
        if name.endswith(".md") and name != "docs/protocol.md"
        for each in path.findall((ROOT / name).read_text("utf-8"))
        if not (ROOT / each).exists()
    ]
    assert missing == []


def test_the_code_cites_pages_and_sections_that_exist() -> None:
    """A reader would look for a page that was never here, or for a section by its old name."""
    cited = re.compile(r'(?<![\w./-])(?:docs/)?([\w-]+\.md)(?:,\s"([^"]+)")?')
    missing = [
        f"{name}:{line}: {page} {title}"
        for name in held_files()
        if name.endswith(".py")
        for line, text in python_texts((ROOT / name).read_text("utf-8"))
        for page, title in cited.findall(text)
        if not has_section(page, " ".join(title.split()))
    ]
    assert missing == []


@cache
def has_section(page: str, title: str) -> bool:
    """Whether a page is there, and has a heading or a paragraph that begins with the title."""
    path = next((it for it in (ROOT / "docs" / page, ROOT / page) if it.exists()), None)
    begins = rf"^(?:#+ |\*\*){re.escape(title)}"
    return path is not None and re.search(begins, path.read_text("utf-8"), re.MULTILINE) is not None


def test_the_architecture_names_methods_that_exist() -> None:
    """A reader who follows a second of sound would look for a method by its old name."""
    names = [it for it in tracked_files() if it.endswith(".py") and it.split("/")[0] in PACKAGES]
    sources = [(ROOT / name).read_text("utf-8") for name in names]
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    found = re.findall(r"`([A-Z]\w+)\.(\w+)`", page)
    assert len(found) > 9  # else the pattern fits none
    for class_name, method in found:
        held = [it for it in sources if re.search(rf"^class {class_name}\b", it, re.MULTILINE)]
        assert any(f"def {method}(" in source for source in held), f"{class_name}.{method}"


# -- counts ----------------------------------------------------------------------------------------

MANY: Final[Mapping[str, str]] = {
    "characters": "of a text that is too long",
    "codes": "of a vocoder, thousands",
    "heads": "of a model, in an error",
    "ids": "of a tokenizer, thousands",
    "logits": "a difference, with decimals",
    "new": "of demo: an error for any number of logs but one",
    "pictures": "the words of a model, which recordings hold",
    "rows": "of a model, in an error",
    "sounds": "the words of a model, which recordings hold",
    "tensors": "of a checkpoint, hundreds",
}
"""Words after a number that is never printed as 1, or whose text is kept, and why."""
UNITS: Final = frozenset({"bytes", "ms", "times", "megapixels"})
VERBS: Final = frozenset(
    ("does", "exists", "gives", "has", "holds", "is", "leaves", "runs", "says", "serves", "stands")
) | {"this", "undoes", "was"}


def counts(source: str) -> Iterator[str]:
    """Yield each number in a text, unless of an error, with the plural noun that follows it."""
    errors = {
        id(text)
        for node in nodes_of(source)
        if isinstance(node, ast.Raise)
        for text in ast.walk(node)
    }
    for node in nodes_of(source):
        if not isinstance(node, ast.JoinedStr) or id(node) in errors:
            continue
        for number, after in zip(node.values, node.values[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and isinstance(after, ast.Constant):
                name = ast.unparse(number.value)
                found = re.match(r" ((?:new |more )?[a-z]+s)\b", str(after.value))
                is_number = not name.rpartition(".")[2].isupper() and name != "antiphon"
                if found and is_number:
                    yield f"{{{name}}} {found[1]}"


def is_one_wrong(found: str) -> bool:
    """Whether a number with its noun would be wrong if it were 1."""
    return not {*MANY, *UNITS, *VERBS} & set(found.split()[1:])


def test_a_count_agrees_with_its_noun() -> None:
    """One would read "1 sessions": `replay.shared.commands.counted`, or `sessions: 1`."""
    paths = [path for path in tracked_files() if path.startswith(("replay/", "runtime/"))]
    paths += [path for path in tracked_files() if path.startswith(("antiphon/", "examples/"))]
    found = [
        f"{path}: {count}"
        for path in paths
        if path.endswith(".py")
        for count in counts((ROOT / path).read_text())
        if is_one_wrong(count)
    ]
    assert found == []


def test_a_wrong_count_is_found() -> None:
    """The test above would find none where it sees none."""
    assert [*filter(is_one_wrong, counts('f"{left} sessions left"'))] == ["{left} sessions"]
    assert [*filter(is_one_wrong, counts("f\"{counted(left, 'session')} left\""))] == []
