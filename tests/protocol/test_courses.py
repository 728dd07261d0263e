"""The table of courses: a session holds one, and the machine never asks which it is."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path
from typing import Final, get_args

import pytest

from protocol.machine.live import Live
from protocol.machine.openai import OpenAI
from protocol.machine.session import _HANDLERS, COURSES, METHODS
from protocol.values import events as ev
from protocol.values.requests import ClientMessage, CloseRequest, Played, Report
from protocol.values.state import Course

ROOT: Final = Path(__file__).parents[2]
MACHINE: Final = (
    *("beginning", "chat", "core", "duplex", "lockstep", "overdue", "pending_turn", "reception"),
    *("session", "timers", "transcription", "unit_loop", "units"),
)
ANSWERED_BY_THE_SESSION: Final = {ev.ConnectionOpened, CloseRequest, Played, Report}


def test_each_course_has_its_class() -> None:
    """A session would take the states of one course, and do what another does."""
    assert {course: cls.course for course, cls in COURSES.items()} == {it: it for it in Course}


def test_all_that_can_be_said_has_a_method() -> None:
    """A message or a fact would end the session with an error of ours."""
    said = {*get_args(ev.Event), *get_args(ClientMessage)}
    assert {*METHODS, *_HANDLERS} | ANSWERED_BY_THE_SESSION == said
    assert not METHODS.keys() & _HANDLERS.keys()


@pytest.mark.parametrize("said", METHODS, ids=lambda said: said.__name__)
def test_a_method_takes_what_it_is_there_for(said: type) -> None:
    """A name in the table would be of no method, and what it stands for be lost."""
    methods = [getattr(cls, METHODS[said], None) for cls in (*COURSES.values(), Live, OpenAI)]
    taken = [list(signature(method).parameters.values()) for method in methods if method]
    assert said.__name__ in {given.annotation.rpartition(".")[2] for _, given in taken}


@pytest.mark.parametrize("name", MACHINE)
def test_the_machine_does_not_ask_which_course_it_is(name: str) -> None:
    """A new mode would be a branch in every file again."""
    tree = ast.parse((ROOT / "protocol" / "machine" / f"{name}.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.match_case):
            assert "Course." not in ast.unparse(node), f"line {getattr(node, 'lineno', '')}"
