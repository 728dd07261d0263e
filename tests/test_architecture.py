"""The house rules that a reviewer would otherwise have to remember, held by detectors.

A detector takes one module and yields what is wrong in it, each finding with its line. Every
detector is itself tested: `BAD` feeds it small sources that it must catch, `GOOD` some that it
must not. Where a rule must change, its constant here is changed with a reason.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Final, cast

import attrs
import pytest

from protocol.values.state import SessionKind, diagram
from tests.project.syntax import nodes_of

ROOT: Final = Path(__file__).resolve().parent.parent

PACKAGES: Final = ("protocol", "recorder", "runtime", "replay")
"""In the order in which they may be imported: each by those after it."""
BUILT: Final = frozenset({"__pycache__", "build", "dist", "recordings", "demo"})
COMPOSITION_ROOT: Final = "runtime/cli.py"
"""Names `replay`'s commands as text, so that they are loaded only when asked for."""

# fmt: off
PURE_IMPORTS: Final = frozenset({
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "enum",
    "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "re", "string",
    "struct", "types", "typing", "attrs", "cattrs", "numpy", "orjson", "pybase64",
})
"""All that `protocol/` may import beside itself; nothing here knows the time, chance or a file."""
IMPURE_CALLS: Final = frozenset({
    "open", "print", "input", "eval", "exec", "compile", "globals", "breakpoint", "__import__",
    "hash", "id",
})
"""`hash` of a text and `id` differ from process to process."""
MUTABLE_CALLS: Final = frozenset({
    "dict", "list", "set", "bytearray", "deque", "defaultdict", "Counter", "OrderedDict",
})
# fmt: on

TRIO_ALLOWED: Final = frozenset(
    f"runtime/{name}.py"
    for name in (
        *("net/http", "net/link", "net/listener", "net/websocket"),
        *("webrtc/call", "webrtc/door", "webrtc/sound"),
    )
)
"""Where a trio-websocket is held, or aiortc, which is asyncio's.

All else is AnyIO's, and tested on both of its event loops."""
TORCH_ALLOWED: Final = ("runtime/model/backends/minicpmo/", "runtime/model/voice/")
"""torch costs seconds and hundreds of megabytes: only what runs a model loads it."""
HEAVY: Final = frozenset({"torch", "transformers"})

FUNCTION_LINES_MAX: Final = 100
"""A function is as long as its thought. Those of tests are not measured."""
FILE_LINES_MAX: Final = 800
"""A file is one idea. Less (400) had one idea cut into files that only make sense together."""


@attrs.frozen
class Module:
    """A source file; `path` is relative to the repository, with slashes."""

    path: str
    text: str

    @property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.text)

    @property
    def tree(self) -> ast.Module:
        return cast("ast.Module", self.nodes[0])

    @property
    def package(self) -> str:
        return PurePosixPath(self.path).parts[0]

    @property
    def is_ours(self) -> bool:
        """Part of the four packages."""
        return self.package in PACKAGES


Detector = Callable[[Module], Iterator[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def tracked_files() -> list[str]:
    """All files that are, or could be, committed; without git all but hidden and built ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = listed.stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        names = [path.relative_to(ROOT).as_posix() for path in walk(ROOT)]
    return sorted(name for name in names if name and (ROOT / name).is_file())


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, but for what .gitignore names."""
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif (
            not path.name.startswith(".") and path.name not in BUILT and path.suffix != ".egg-info"
        ):
            yield from walk(path)


@cache
def modules() -> tuple[Module, ...]:
    """All Python sources of the repository."""
    names = [name for name in tracked_files() if name.endswith(".py")]
    return tuple(Module(name, (ROOT / name).read_text("utf-8")) for name in names)


# -- what a module imports ------------------------------------------------------------------------


@attrs.frozen
class Import:
    """One imported module: `level` counts the leading dots."""

    line: int
    name: str
    level: int

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports(nodes: Iterable[ast.AST]) -> Iterator[Import]:
    """Find the imports among some nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield Import(node.lineno, node.module or "", node.level)


def run_on_import(node: ast.AST) -> Iterator[ast.AST]:
    """Walk what runs when a module is imported: no function's body, nothing for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from run_on_import(child)


def upward_imports(module: Module) -> Iterator[str]:
    """A package that imports one after it in `PACKAGES`, be it as text."""
    if not module.is_ours:
        return
    above = PACKAGES[PACKAGES.index(module.package) + 1 :]
    for found in imports(module.nodes):
        if found.level == 0 and found.top in above:
            yield f"{found.line}: {module.package} imports {found.name}"
    if module.path == COMPOSITION_ROOT:
        return
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = re.fullmatch(r"(\w+)(\.\w+)+(:\w+)?", node.value)
            if names and names[1] in above:
                yield f"{node.lineno}: {module.package} names {node.value}"


def wrong_kind_of_import(module: Module) -> Iterator[str]:
    """An absolute import of the module's own package, or a relative one that leaves it."""
    if not module.is_ours:
        return
    depth = len(PurePosixPath(module.path).parts) - 1
    for found in imports(module.nodes):
        if found.level == 0 and found.top == module.package:
            yield f"{found.line}: {found.name} is its own package: import it relatively"
        if found.level > depth:
            yield f"{found.line}: {'.' * found.level}{found.name} leaves the package"


def trio_imports(module: Module) -> Iterator[str]:
    """A use of trio, where AnyIO would bind us to no event loop."""
    if module.is_ours and module.path not in TRIO_ALLOWED:
        for found in imports(module.nodes):
            if found.top in {"trio", "trio_websocket", "asyncio"}:
                yield f"{found.line}: imports {found.name}"


def heavy_imports(module: Module) -> Iterator[str]:
    """A module-level import of torch or transformers outside the model's own code."""
    if module.is_ours and not module.path.startswith(TORCH_ALLOWED):
        for found in imports(run_on_import(module.tree)):
            if found.top in HEAVY:
                yield f"{found.line}: imports {found.name} when it is imported"


# -- purity ---------------------------------------------------------------------------------------


def impurities(module: Module) -> Iterator[str]:
    """Whatever in `protocol/` would make the same events give other effects."""
    if module.package != "protocol":
        return
    for found in imports(module.nodes):
        if found.level == 0 and found.top not in PURE_IMPORTS and found.top != "protocol":
            yield f"{found.line}: imports {found.name}"
    for node in module.nodes:
        match node:
            case ast.AsyncFunctionDef() | ast.Await() | ast.AsyncFor() | ast.AsyncWith():
                yield f"{node.lineno}: is asynchronous"
            case ast.Global():
                yield f"{node.lineno}: changes a global"
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                yield f"{node.lineno}: calls {name}()"
            case ast.Attribute(value=ast.Name(id="np" | "numpy"), attr="random"):
                yield f"{node.lineno}: uses numpy's randomness"
    yield from _mutable_globals(module.tree)


def _mutable_globals(tree: ast.Module) -> Iterator[str]:
    """Containers in a module's own scope that are not declared `Final`."""
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign) and _is_mutable(node.value):
            yield f"{node.lineno}: global state that can change"


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return ast.unparse(value.func).rpartition(".")[2] in MUTABLE_CALLS
    return isinstance(
        value, ast.Dict | ast.List | ast.Set | ast.DictComp | ast.ListComp | ast.SetComp
    )


# -- what is told, and how long it is -------------------------------------------------------------


def undocumented(module: Module) -> Iterator[str]:
    """A module, public class, function or method without a docstring."""
    if module.is_ours:
        if not ast.get_docstring(module.tree):
            yield "1: the module has no docstring"
        yield from _undocumented(module.tree)


def _undocumented(scope: ast.Module | ast.ClassDef) -> Iterator[str]:
    for node in scope.body:
        if not isinstance(node, Function | ast.ClassDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if "overload" in decorators or any(name.endswith(".setter") for name in decorators):
            continue
        if not ast.get_docstring(node):
            yield f"{node.lineno}: {node.name} has no docstring"
        if isinstance(node, ast.ClassDef):
            yield from _undocumented(node)


def too_long(module: Module) -> Iterator[str]:
    """A file, or a function, that nobody reads in one sitting."""
    lines = len(module.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{lines}: {lines} lines, at most {FILE_LINES_MAX} are allowed"
    for node in module.nodes if module.is_ours else ():
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def limits_without_reason(module: Module) -> Iterator[str]:
    """A bound in a `limits.py` that does not say why it is what it is."""
    if PurePosixPath(module.path).name != "limits.py":
        return
    lines = module.text.splitlines()
    body = module.tree.body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        name = ast.unparse(target)
        if not name.isupper() or "_PER_" in name:  # a conversion is no bound
            continue
        is_told = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        after = lines[node.end_lineno or 0 :][:1]
        if not is_told and not "".join(after).lstrip().startswith("#"):
            yield f"{node.lineno}: {name} has no reason after it"


MACHINE_PATH: Final = re.compile(r"(?<![\w.~-])/(?:work|root|home/\w+)/")


def machine_paths(module: Module) -> Iterator[str]:
    """A path that exists on the machine of whoever wrote it, and nowhere else."""
    for number, line in enumerate(module.text.splitlines(), start=1):
        if MACHINE_PATH.search(line):
            yield f"{number}: names a path of one machine"


# -- the detectors, tested ------------------------------------------------------------------------

DOC: Final = '"""What it is."""\n'
PATH: Final = "/" + "root" + "/x"
LONG: Final = "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX

BAD: Final[dict[str, tuple[Detector, str, str]]] = {
    "upward": (upward_imports, "protocol/a.py", "from recorder.write.log import SessionLog"),
    "upward, skipping": (upward_imports, "protocol/a/b.py", "import replay"),
    "upward, late": (
        upward_imports,
        "recorder/a.py",
        "def f():\n    import runtime.session.driver",
    ),
    "upward, typed": (
        upward_imports,
        "runtime/a.py",
        "if TYPE_CHECKING:\n    import replay.rerun.logic",
    ),
    "upward, as text": (upward_imports, "runtime/a.py", "COMMAND = 'replay.cli:verify'"),
    "upward, root": (upward_imports, COMPOSITION_ROOT, "from replay.cli import verify"),
    "own, absolute": (wrong_kind_of_import, "runtime/a.py", "from runtime.slots.pool import Pool"),
    "own, below": (wrong_kind_of_import, "runtime/backends/a.py", "import runtime.slots.pool"),
    "relative, out": (wrong_kind_of_import, "runtime/a.py", "from ..protocol import state"),
    "trio": (trio_imports, "runtime/session/driver.py", "import trio"),
    "trio, late": (trio_imports, "recorder/a.py", "def f():\n    from trio.lowlevel import x"),
    "asyncio": (trio_imports, "runtime/session/driver.py", "import asyncio"),
    "trio's WebSockets": (trio_imports, "runtime/net/upstream.py", "import trio_websocket"),
    "torch": (heavy_imports, "runtime/cli.py", "import torch.nn as nn"),
    "torch, guarded": (
        heavy_imports,
        "runtime/a.py",
        "try:\n    import torch\nexcept E:\n    x = 1",
    ),
    "torch, in a class": (heavy_imports, "replay/a.py", "class A:\n    from torch import Tensor"),
    "transformers": (heavy_imports, "replay/rerun/full.py", "from transformers import AutoModel"),
    "a clock": (impurities, "protocol/a.py", "import time"),
    "a late clock": (impurities, "protocol/a.py", "def f():\n    from datetime import date"),
    "chance": (impurities, "protocol/a.py", "from secrets import token_hex"),
    "chance of numpy": (impurities, "protocol/a.py", "x = np.random.default_rng()"),
    "a path": (impurities, "protocol/dialects/a.py", "from pathlib import Path"),
    "a log": (impurities, "protocol/a.py", "import logging"),
    "a thread": (impurities, "protocol/a.py", "import threading"),
    "async": (impurities, "protocol/a.py", "async def f(): pass"),
    "a file": (impurities, "protocol/a.py", "def f(): return open('x')"),
    "a hash": (impurities, "protocol/a.py", "def f(x): return hash(x)"),
    "a global": (impurities, "protocol/a.py", "def f():\n    global x\n    x = 1"),
    "a cache": (impurities, "protocol/a.py", "cache: dict[str, int] = {}"),
    "a queue": (impurities, "protocol/a.py", "waiting = collections.deque()"),
    "no module docstring": (undocumented, "protocol/a.py", "x = 1"),
    "no class docstring": (undocumented, "protocol/a.py", f"{DOC}class A:\n    x = 1"),
    "no function docstring": (undocumented, "replay/a.py", f"{DOC}async def f(): pass"),
    "no stub docstring": (
        undocumented,
        "runtime/a.py",
        f"{DOC}class A(Protocol):\n    {DOC}    def f(self) -> int: ...",
    ),
    "long function": (too_long, "recorder/a.py", LONG),
    "long method": (too_long, "recorder/a.py", "class A:\n" + re.sub("(?m)^", "  ", LONG)),
    "long file": (too_long, "replay/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    "long test": (too_long, "tests/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    "limit": (limits_without_reason, "protocol/values/limits.py", "FRAMES_MAX: Final = 4"),
    "limit, plain": (limits_without_reason, "runtime/limits.py", "FRAMES_MAX = 4\n\n# reason"),
    "limit of two": (
        limits_without_reason,
        "protocol/values/limits.py",
        "A: Final = 4\nB: Final = 5\n'x'",
    ),
    "path": (machine_paths, "README.md", f"run {PATH} now"),
    "path, quoted": (machine_paths, "a.json", f'{{"at":"{PATH}"}}'),
    "path as URL": (machine_paths, "a.toml", f"file://{PATH}"),
}

GOOD: Final[dict[str, tuple[str, str]]] = {
    "pure": (
        "protocol/a.py",
        f"{DOC}from collections.abc import Mapping\nimport numpy as np\nfrom .b import C\n"
        f"X: Final[Mapping[str, int]] = {{}}\ndef _open(): return C.open(np.float32)\n",
    ),
    "server": (
        "runtime/backends/a.py",
        f"{DOC}import anyio\nfrom protocol.values.state import State\nfrom ..pool import Pool\n"
        f"if TYPE_CHECKING:\n    import torch\nasync def f():\n    {DOC}    import torch\n",
    ),
    "root": (COMPOSITION_ROOT, f"{DOC}COMMANDS = {{'verify': 'replay.cli:verify'}}\n"),
    "listener": ("runtime/net/listener.py", f"{DOC}import trio\n"),
    "model": (
        "runtime/model/backends/minicpmo/a.py",
        f"{DOC}import torch\nfrom ..base import Backend\n",
    ),
    "limits": (
        "protocol/values/limits.py",
        f'{DOC}NS_PER_S: Final = 10\nA: Final = 4\n"""Why."""\nB: Final = 5\n# Why, too.\n',
    ),
    "a test": ("tests/test_a.py", f"{DOC}import time, trio, torch, replay\n{LONG}"),
    "a URL": ("README.md", "see example.org/root/x and ./work/x and ~/work/x"),
}

DETECTORS: Final[tuple[Detector, ...]] = (
    upward_imports,
    wrong_kind_of_import,
    trio_imports,
    heavy_imports,
    impurities,
    undocumented,
    too_long,
    limits_without_reason,
)


@pytest.mark.parametrize("name", BAD)
def test_a_detector_catches(name: str) -> None:
    """A rule would be broken with every test green."""
    detector, path, text = BAD[name]
    assert list(detector(Module(path, text)))


@pytest.mark.parametrize("name", GOOD)
def test_no_detector_cries_wolf(name: str) -> None:
    """Good code would be bent to please a test."""
    module = Module(*GOOD[name])
    detectors = (machine_paths,) if module.path.endswith(".md") else DETECTORS
    assert [found for detector in detectors for found in detector(module)] == []


def test_files_are_found_without_git() -> None:
    """The tests would fail for whoever downloads the sources without their history."""
    assert {path.name for path in walk(ROOT / "protocol")} >= {"state.py", "realtime.py"}
    assert not any(path.suffix == ".pyc" for path in walk(ROOT / "protocol"))


def test_every_detector_is_tested() -> None:
    """A detector that catches nothing would look like a rule that is kept."""
    assert {detector for detector, _, _ in BAD.values()} == {*DETECTORS, machine_paths}


# -- the repository -------------------------------------------------------------------------------


def findings(detector: Detector) -> list[str]:
    """What a detector finds in the repository."""
    return [f"{module.path}:{found}" for module in modules() for found in detector(module)]


def test_there_is_something_to_check() -> None:
    """Every rule would hold of a repository that was looked for in the wrong place."""
    assert {module.package for module in modules()} >= {*PACKAGES, "tests"}


def test_packages_import_one_way() -> None:
    """A client or a tool that needs `protocol` alone would drag in the server, or fail to load."""
    assert findings(upward_imports) == []


def test_imports_are_relative_within_a_package_only() -> None:
    """A package could not be vendored or renamed without touching each of its files."""
    assert findings(wrong_kind_of_import) == []


def test_protocol_is_pure() -> None:
    """A recording would not replay to the same bytes."""
    assert findings(impurities) == []


def test_only_the_edge_knows_its_event_loop() -> None:
    """The driver, recorder and client would stop working on asyncio."""
    assert findings(trio_imports) == []


def test_only_the_model_loads_torch() -> None:
    """`antiphon recordings verify` would take seconds, and fail where torch is broken."""
    assert findings(heavy_imports) == []


ENTRANCES: Final = (
    *("antiphon", "protocol.machine.session", "recorder.write.writer"),
    *("runtime.cli", "runtime.serve.serve_command"),
)


def test_loading_does_not_load_torch() -> None:
    """Every command, `--help` too, would wait for torch to load."""
    loads = f"import sys; heavy = {set(HEAVY)!r}\n"
    for name in ENTRANCES:
        loads += f"import {name}; print('{name}', *heavy & sys.modules.keys())\n"
    command = [sys.executable, "-W", "error", "-c", loads]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.splitlines() == [*ENTRANCES]


def test_all_that_is_public_is_documented() -> None:
    """Whoever embeds Antiphon would have to read code to learn units, errors and ownership."""
    assert findings(undocumented) == []


def test_files_and_functions_are_short() -> None:
    """Whoever hunts a bug could not read the place it is in in one sitting."""
    assert findings(too_long) == []


def test_every_limit_has_its_reason() -> None:
    """An operator could not tell which limit may be raised and what that would cost."""
    assert findings(limits_without_reason) == []


@pytest.mark.parametrize("name", PACKAGES)
def test_the_package_names_are_ours(name: str) -> None:
    """Some other distribution's `protocol` would be loaded instead of ours, or ours hide it."""
    assert Path(import_module(name).__file__ or "").parent == ROOT / name
    others = [entry for entry in sys.path if not (Path(entry) / "pyproject.toml").exists()]
    spec = PathFinder.find_spec(name, others)
    assert spec is None or spec.origin is None


def test_the_state_diagram_is_the_table_s() -> None:
    """A reader would learn a state machine that the server does not run."""
    text = (ROOT / "docs" / "states.md").read_text("utf-8")
    blocks = re.findall(r"^```mermaid\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    drawn = [block for block in blocks if block.startswith("stateDiagram")]
    assert drawn == [diagram(session_kind) for session_kind in SessionKind]


def test_no_file_names_a_path_of_one_machine() -> None:
    """An instruction or a setting would work for its author alone."""
    found = []
    for name in tracked_files():
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            module = Module(name, data.decode("utf-8", "replace"))
            found += [f"{name}:{finding}" for finding in machine_paths(module)]
    assert found == []
