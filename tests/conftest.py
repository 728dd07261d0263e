"""What tests share: how hard Hypothesis tries, and a small checkpoint with random weights.

`HYPOTHESIS_PROFILE` picks one of:

| profile | for |
|---|---|
| `ci` (the default) | the same examples at every run: what fails once fails everywhere |
| `dev` | new examples at every run, those that failed first, and twice as many |
| `soak` | as `dev`, fifty times as many, and all cases that `make test` samples; `make soak` |

No profile has a deadline: an example that is slow on a busy machine is no bug.

`-m quick` runs the tests of files that import none of `NEEDS`, but for those marked `slow`. Tests
marked `soak` run only in `make soak`, or by `-m soak`.

Asynchronous tests bear `pytest.mark.anyio` and run on asyncio and on trio, by AnyIO's own fixture
`anyio_backend`. A module whose tests need virtual time overrides it with trio's `MockClock`; with
real sockets that clock is moved by hand, for it would jump by itself while a socket is waited for.

Commands that tests start heed SIGINT and SIGHUP, also where the tests run in a background job,
under `nohup` or in a CI that ignores them: a child inherits an ignored signal, but no handler.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

from runtime.telemetry.logs import OURS
from tests.project import sampling
from tests.project.forkserver import installed

EXAMPLES = 10
"""Few of Hypothesis's own 100, for they are the same at every run; `soak` has thousands."""
EXAMPLES_SOAK = 5_000
"""Fifty times Hypothesis's own 100: minutes a property."""

settings.register_profile(
    "ci",
    deadline=None,
    max_examples=EXAMPLES,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile(
    "soak",
    deadline=None,
    max_examples=EXAMPLES_SOAK,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, lambda *_: None)  # the tests themselves go on ignoring it

gc.disable()  # until the first test: what is collected and imported until then stays

TESTS = Path(__file__).parent
NEEDS = re.compile(
    r"^ *(?:from|import) .*\b(?:torch|\w*minicpmo\w*|random_model|subprocess|live"
    r"|media\.process|terminal|soak\.(?!prefixes)\w+|generated|simulate|simulated_server)\b",
    re.MULTILINE,
)
"""What a file of quick tests does not import: a model, a process, a whole simulation."""


@functools.cache
def is_quick(path: Path) -> bool:
    """Whether a file of tests needs nothing that takes seconds."""
    text = path.read_text("utf-8")
    others = re.findall(r"^from (?:\.|tests\.)(?:\w+\.)*(test_\w+) import", text, re.MULTILINE)
    if NEEDS.search(text):
        return False
    return all(is_quick(found) for name in others for found in TESTS.rglob(f"{name}.py"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what else would be imported, torch with it, and deselected."""
    is_asked = asks_for_quick(config) and collection_path.name.startswith("test_")
    return True if is_asked and not is_quick(collection_path) else None


def asks_for_quick(config: pytest.Config) -> bool:
    """Whether quick tests alone are run."""
    return bool(config.getoption("markexpr") == "quick")


def are_all(config: pytest.Config) -> bool:
    """Whether all tests are run, and not those of some files or of a name."""
    paths = (Path(config.rootpath, each).resolve() for each in config.args)
    return all(path == TESTS for path in paths) and not config.getoption("keyword")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Have the workers of all tests be forked, for the imports of each take seconds."""
    config = session.config
    has_workers = config.pluginmanager.hasplugin("dsession")
    is_worth_it = has_workers and are_all(config) and not asks_for_quick(config)
    with installed() if is_worth_it else nullcontext():
        yield


def pytest_xdist_auto_num_workers() -> int:
    """Two workers more than there are cores, for many tests wait: for a socket, or real time."""
    return len(os.sched_getaffinity(0)) + 2 if hasattr(os, "sched_getaffinity") else 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark quick tests, for `-m quick`, and have them run last, the other files well mixed.

    So no worker is left with a long file when the others have ended, and those that wait for a
    server run beside those that compute. Where all tests run, families are sampled.
    """
    if are_all(config) and not sampling.IS_SOAK:
        items[:], left_out = sampling.sampled(items)
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: (is_quick(item.path), crc32(item.path.name.encode())))
    for item in items:
        if is_quick(item.path) and not any(map(item.get_closest_marker, ("slow", "soak"))):
            item.add_marker("quick")


@pytest.fixture(scope="session", autouse=True)
def _commands_are_forked() -> Iterator[None]:
    """Have `antiphon` started by a fork, for its imports cost more than most tests."""
    with installed():
        yield


@pytest.fixture(scope="module", autouse=True)
def _what_is_loaded_is_no_garbage() -> None:
    """Keep the garbage collector from looking at 12,000 tests, and at torch, over and over."""
    if not gc.get_freeze_count():  # It is the first module, or a server has ended in this process.
        gc.collect()
        gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Leave logging as other tests expect it: `antiphon serve` decides what a process logs."""
    root = logging.getLogger()
    levels = {name: logging.getLogger(name).level for name in (*OURS, "")}
    handlers = list(root.handlers)
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights; not to be changed."""
    from tests.models.random_model import (  # torch takes seconds: only where needed
        SMALL,
        write_checkpoint,
    )

    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), SMALL)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    """The same, to be broken."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    return folder
