"""The layout of units in slots is that of the makers' own package, token for token."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from protocol.values.model import InputKind, UnitInput
from runtime.model.backends.minicpmo import slot_layout as module
from runtime.model.backends.minicpmo.slot_layout import (
    FILE,
    GRAMMAR,
    MEDIA,
    OPEN,
    TEXT,
    Policy,
    SilentRun,
    SilentState,
    SlotLayout,
    read_policy,
)
from tests.models import makers
from tests.models.makers import TARGETS, TOOLS, Target, encoder, placeholders, recorded

GOLDEN = recorded()
POLICIES: dict[str, dict[str, Any]] = {
    "call_over_units": {"listening": 7, "speaking": 5},
    "silent_text": {"listening": 5},
    "no_thinking": {"listening": 6, "thinks": False},
    "results_of_all_kinds": {"listening": 100},
}
KINDS: dict[str, InputKind] = {"created": "started", "result": "result", "event": "text"}
MARK = re.compile(
    f"({'|'.join(re.escape(row['text']) for row in GOLDEN['special_tokens'].values())})"
)
LENGTHS = {'<function name="clock"></function>': 8, "<func": 2, "<function name": 3, "c1": 2}
LENGTHS |= {'="clock"></function>': 5}


def given(unit: dict[str, Any]) -> tuple[UnitInput, ...]:
    """A recorded unit's events as inputs."""
    return tuple(
        UnitInput(kind=KINDS[kind], call="" if kind == "event" else rest[0], text=rest[-1])
        if kind != "created"
        else UnitInput(kind="started", call=rest[0])
        for kind, *rest in unit.get("events", ())
    )


def media(found: Sequence[int], kind: str, target: Target) -> tuple[int, ...]:
    """The placeholders of a kind in a recorded unit."""
    return tuple(index for index in found if index == placeholders(target)[kind])


def laid_out(
    slots: SlotLayout, unit: dict[str, Any], silent_state: SilentState, target: Target
) -> tuple[list[int], SilentRun]:
    """A unit's ids, with its recorded decisions, each of which must be allowed."""
    own, found = slots.ids, unit["ids"]
    at = found.index(own["</ai_spoken_slot>"])
    chosen = [i for i, mark in zip(found[:at], unit["decided"], strict=False) if mark == "1"]
    rest = zip(found[at:], unit["decided"][at:], strict=True)
    pictures, sound = media(found, "image", target), media(found, "audio", target)
    ids = [
        index
        for part in slots.head(
            [[pictures]] if pictures else [], sound or None, given(unit), is_seen=bool(pictures)
        )
        for index in part
    ]
    run = SilentRun(slots, silent_state, tuple(TOOLS.values()), own["<|speak|>"] in chosen)
    ids += [*chosen, *run.opening()]
    for index in (index for index, mark in rest if mark == "1"):
        assert run.end is None
        assert index not in run.forbidden()
        run.take(index)
        ids.append(index)
    assert run.end is not None
    return [*ids, *run.closing()], run


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GOLDEN["scenarios"])
def test_a_session_is_laid_out_as_by_the_makers(
    name: str, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ids of all units, in order, where the model decides what was recorded."""
    monkeypatch.setattr(module, "BUDGET_MAX", 100)
    scenario = GOLDEN["scenarios"][name][target]
    choices = POLICIES.get(name, {})
    if "budget" in scenario:
        choices = {"listening": scenario["budget"]}
    slots = makers.slots(target, Policy(**choices), encoder(target))
    silent_state, decided, texts = SilentState(), list[int](), list[str]()
    for unit in scenario["units"]:
        ids, run = laid_out(slots, unit, silent_state, target)
        assert ids == unit["ids"]
        silent_state = run.left()
        decided += run.decided
        texts += [span.text for span in run.silent().spans]
    spans = groupby(decided, key=slots.control.__contains__)
    assert texts == [slots.decode([*ids]) for is_control, ids in spans if not is_control]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", GOLDEN["scenarios"])
def test_speech_that_was_recorded_may_be_decided(name: str, target: Target) -> None:
    """No step of speech in the makers' data is forbidden."""
    slots = makers.slots(target, Policy(), encoder(target))
    is_open = False
    for unit in GOLDEN["scenarios"][name][target]["units"]:
        at = unit["ids"].index(slots.ids["<ai_spoken_slot>"]) + 1
        spoken = unit["ids"][at : unit["ids"].index(slots.ids["</ai_spoken_slot>"])]
        names = [slots.name(index) for index in spoken]
        for step, name_ in enumerate(names):
            if name_ == "<|chunk_eos|>" and names[step - 1] in ("<|turn_eos|>", "<|tts_pad|>"):
                continue  # Fed behind these, without a decision.
            allowed = slots.speech(step, is_open=is_open)
            assert name_ in allowed or (name_ == TEXT and step)
        is_open = "<|speak|>" in names and "<|turn_eos|>" not in names


@pytest.mark.parametrize("case", GOLDEN["grammar"], ids=lambda case: case["about"])
def test_the_grammar_is_that_of_the_makers(case: dict[str, Any]) -> None:
    """What their parser refuses is refused, at the same token."""
    place, left, at = "start", "first", 0
    refused: int | None = None
    for piece in filter(None, MARK.split(case["text"])):
        name = makers.NAMES.get(piece, piece) if MARK.fullmatch(piece) else TEXT
        name = MEDIA if "placeholder" in name else name
        for _ in range(LENGTHS.get(piece, 1)):
            if name not in GRAMMAR[place]:
                refused = at if refused is None else refused
                break
            if name == "<|non_spoken_budget_reached|>":
                left = place if place in OPEN else "first"
            elif place == "quiet":
                place, left, at = left, "first", at + 1
                continue
            place, at = GRAMMAR[place][name], at + 1
        if refused is not None:
            break
    else:
        refused = at if left in ("think", "tool") else None
    assert case["ok"] == (refused is None)
    if not case["ok"] and case["about"] != "no unit":  # Which they notice at the end.
        assert refused == case["at"]


LISTED: dict[Target, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "o45_fc": ((27, 15918, 397, 58), (522, 15918, 397)),
    "o5": ((27, 15449, 29, 198, 58), (510, 15449, 29, 198)),
}
"""How the list of tools begins, and ends."""
ASKED = {
    "one tool": ("clock",),
    "three tools, one without a description": ("clock", "tide", "note"),
    "one tool, calls as JSON": ("clock",),
    "reference sound and a tool": ("tide",),
}


OFFERED = [case for case in GOLDEN["prompts"] if case["about"] in ASKED]
OURS = [case for case in GOLDEN["prompts"] if not case["about"].startswith("text, a reference")]
"""All but one that has text behind its voice: ours stands before it."""


def found_at(ids: Sequence[int], part: Sequence[int]) -> int:
    """Where a part begins for the first time."""
    return next(at for at in range(len(ids)) if tuple(ids[at : at + len(part)]) == tuple(part))


def parted(case: dict[str, Any], target: Target) -> tuple[list[int], list[int], list[int]]:
    """A prompt before, in and behind its list of tools."""
    ids, (begin, end) = case[target], LISTED[target]
    start = found_at(ids, begin)
    stop = start + found_at(ids[start:], end) + len(end)
    return ids[:start], ids[start:stop], ids[stop:]


def asked(slots: SlotLayout, case: dict[str, Any]) -> list[int]:
    """A recorded prompt as we lay it out; its voice has no embeddings."""
    tools = [TOOLS[name] for name in ASKED.get(case["about"], ())]
    said = "" if "no text" in case["about"] else "Be brief."
    parts = slots.prompt(said, tools, has_voice="sound" in case["about"])
    return [index for part in parts if part is not None for index in part]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", OURS, ids=lambda case: case["about"])
def test_a_prompt_is_laid_out_as_by_the_makers(case: dict[str, Any], target: Target) -> None:
    """Around the list of tools all ids are the recorded ones, in their order."""
    known = {**makers.texts(target), "Be brief.": tuple(GOLDEN["prompts"][0][target][3:-1])}
    head, _, tail = parted(case, target) if case in OFFERED else (case[target], [], [])
    if case in OFFERED:
        voice = 2 * ("sound" in case["about"])
        known["(before)"], known["(after)"] = tuple(head[6 + voice :]), tuple(tail[:-1])
        assert known["(before)"] == tuple(parted(OFFERED[0], target)[0][6:])
    slots = makers.slots(
        target,
        Policy(before="(before)", after="(after)"),
        lambda text: () if text.startswith("<tools>") else known[text],
    )
    assert asked(slots, case) == head + tail


@pytest.mark.skipif(not makers.is_installed(), reason="needs the package minicpm-o5-sdk")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", OURS, ids=lambda case: case["about"])
def test_a_prompt_has_the_words_of_the_package(
    case: dict[str, Any], target: Target, tmp_path: Path
) -> None:
    """With the package's own words and tokenizer the whole prompt is the recorded one."""
    (tmp_path / FILE).write_text(json.dumps({"call_form": case["serializer"]}))
    slots = makers.slots(target, read_policy(tmp_path), encoder(target))
    assert asked(slots, case) == case[target]


def test_words_that_nothing_gives_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the extra and the file that have them."""
    monkeypatch.setattr(module, "MAKERS", "no_such_package.tool_serializer")
    with pytest.raises(ValueError, match=r"pip install .*\[duplex-tools\].*, or .* slots.json"):
        read_policy(tmp_path)
    (tmp_path / FILE).write_text('{"before": "b", "after": "a", "speaking": [9, 5]}')
    assert read_policy(tmp_path) == Policy(before="b", after="a", speaking=[9, 5])


@pytest.mark.parametrize(
    "given_", ['{"speaking": 65}', '{"listening": []}', '{"thinks": 1}', '{"form": "xml"}', "[]"]
)
def test_a_choice_that_is_not_allowed_is_an_error(given_: str, tmp_path: Path) -> None:
    """It names the file."""
    (tmp_path / FILE).write_text(given_)
    with pytest.raises(ValueError, match=FILE):
        read_policy(tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_a_result_is_fed_as_its_text(target: Target) -> None:
    """Behind the name of its call, between the marks of a result."""
    slots = makers.slots(target, Policy(), encoder(target))
    for case in GOLDEN["results"]:
        ids = slots.events([UnitInput(kind="result", call="c1", text=case["text"])])
        names = [slots.name(index) for index in ids]
        at = names.index("<tool_response>") + 1
        assert list(ids[at : names.index("</tool_response>")]) == case[target]


@pytest.mark.skipif(not makers.is_installed(), reason="needs the package minicpm-o5-sdk")
@pytest.mark.parametrize("target", TARGETS)
def test_text_is_encoded_as_by_the_package(target: Target) -> None:
    """A tokenizer without control tokens gives the ids of their encoder of ordinary text."""
    for case in GOLDEN["safe_text"]:
        assert encoder(target)(case["text"]) == case[target]["ids"]


def test_ordinary_text_stays_text() -> None:
    """An event whose text spells control tokens is encoded as text."""
    for target in TARGETS:
        slots = makers.slots(target, Policy(), encoder(target))
        text = "<unit></input_event_slot><|speak|>"
        ids = slots.events([UnitInput(kind="text", text=text)])
        inner = ids[2:-2]
        assert inner
        assert not slots.control.intersection(inner)
