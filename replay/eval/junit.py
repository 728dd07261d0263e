"""An evaluation as JUnit XML, which CI systems show: a test case for each recording.

A recording fails by its own values. It has an error, and no failures, if its log is damaged or
unreadable, or the model failed on it; it is skipped if no model can be run on it. Conditions on the
whole folder are in the output of the suite; the exit code judges them. The file has no times of its
own: the same logs give the same bytes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from protocol.values.limits import NS_PER_S

from ..shared.page import printable
from .condition import Condition, judge
from .evaluate import Evaluation, Row
from .naming import Name, Names

SUITE: Final = "antiphon eval"
"""Also the class of the recordings in this folder."""


def junit_of(
    done: Evaluation, names: Names, conditions: Iterable[Condition], told: Sequence[str] = ()
) -> bytes:
    """Write an evaluation in UTF-8.

    Args:
        done: the evaluation.
        names: of its logs.
        conditions: those that a recording must not meet; those on counts are left out.
        told: lines on the whole folder.
    """
    judged = [it for it in conditions if it.is_of_recordings]
    cases = [
        _case(row, names[row.log], judged) for row in sorted(done.rows, key=lambda row: row.log)
    ]
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": str(sum(case.find("error") is not None for case in cases)),
        **_skipped(cases),
        "time": _seconds(sum(row.duration_ns for row in done.rows)),
    }
    suites = ET.Element("testsuites", counts)
    suite = ET.SubElement(suites, "testsuite", {"name": SUITE, **counts})
    suite.extend(cases)
    if told:
        ET.SubElement(suite, "system-out").text = "\n".join(map(printable, told))
    ET.indent(suites)
    text: bytes = ET.tostring(suites, encoding="utf-8", xml_declaration=True)
    return text + b"\n"


def _skipped(cases: Iterable[ET.Element]) -> dict[str, str]:
    """Count the skipped cases, if there are any."""
    count = sum(case.find("skipped") is not None for case in cases)
    return {"skipped": str(count)} if count else {}


def _case(row: Row, name: Name, conditions: Iterable[Condition]) -> ET.Element:
    about = {
        "classname": name.folder or SUITE,
        "name": name.path,
        "time": _seconds(row.duration_ns),
    }
    case = ET.Element("testcase", about)
    if row.result == "skipped":
        _finding(case, "skipped", row.result, printable(row.error))
        return case
    if row.error:
        _finding(case, "error", row.result, printable(row.error))
        return case
    for condition in conditions:
        met, _ = judge([condition], row.own)
        for message in met:
            details = (*_place(row, condition), name.command)
            _finding(case, "failure", condition.measure, printable(message), details)
    return case


def _finding(
    case: ET.Element, tag: str, kind: str, message: str, details: Iterable[str] = ()
) -> None:
    """Add a failure or an error; some systems show the message, others the text."""
    found = ET.SubElement(case, tag, {"type": kind, "message": message})
    found.text = "\n".join((message, *details))


def _place(row: Row, condition: Condition) -> Iterator[str]:
    worst = row.worst_at_s(condition.measure)
    if worst is not None:
        yield f"{condition.measure} is worst at {worst:g} s"


def _seconds(span_ns: int) -> str:
    return f"{span_ns / NS_PER_S:.3f}"
