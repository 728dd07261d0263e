"""What each file of tests costs in CPU seconds, as `make test` runs them.

    make test ARGS='-p tests.project.cpu_times'

writes `docs/evidence/test_times.json`: seconds of the workers and of the processes that they waited
for, the dearest file first. A process that outlives its test counts for the test that runs when it
ends, and what was forked away for none, so a file's figure is good to some seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any, Final

import pytest

from tests.project.evidence import EVIDENCE, keep

SENT_AS: Final = "cpu_s_by_file"
DEAREST: Final = 100
"""Files that are named."""

_spent: Final = Counter[str]()


def cpu_s() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    used = (getrusage(RUSAGE_SELF), getrusage(RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count a test, with the fixtures that are made for it and taken down after it."""
    before_s = cpu_s()
    result = yield
    _spent[item.nodeid.partition("::")[0]] += cpu_s() - before_s
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Add what a worker has counted."""
    _spent.update(node.workeroutput.get(SENT_AS, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand over what this worker has counted, or keep what all have."""
    sent = getattr(session.config, "workeroutput", None)
    if sent is not None:
        sent[SENT_AS] = dict(_spent)
        return
    files = {name: round(spent_s, 1) for name, spent_s in _spent.most_common(DEAREST)}
    found = {
        "what": "CPU seconds of make test by file, the dearest first",
        "cpu_s": round(_spent.total(), 1),
        "files": len(_spent),
        "dearest": files,
    }
    keep(found, EVIDENCE, "test_times")
