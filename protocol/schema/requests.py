"""The client's messages of a dialect, described by running its parser on `sketch.Sketch`.

First a run with every field says what there is. Then each field by itself, beside what must be
there: with two different values, for what it means, and without it, for what is taken instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

import attrs

from ..errors import FieldError
from .meaning import Steps, difference, explain, explain_object, locate, summary
from .samples import SHOWN
from .sketch import Sketch
from .values import Leaf, Run, Schema

T = TypeVar("T")
Parse = Callable[[Sketch], T]


@attrs.frozen(kw_only=True)
class Described(Generic[T]):
    """What a parser reads.

    Attributes:
        schema: the body's, with descriptions and defaults.
        value: what the parser made of a body with every field.
        run: that run.
    """

    schema: Schema
    value: T
    run: Run


def describe_body(parse: Parse[T], fixed: Mapping[str, str]) -> Described[T]:
    """Describe the body that a parser reads.

    Args:
        parse: the parser; it is run many times.
        fixed: the fields whose text is known, such as the message's type.

    Returns:
        The description.

    Raises:
        FieldError: the parser takes none of the bodies that were tried.
    """
    found = explore(parse, fixed)
    _note_required(found, parse, fixed)
    meanings = {
        leaf.path: _examine(found, leaf, parse, fixed) for leaf in tuple(found.run.leaves.values())
    }
    _explain_objects(found.run, meanings)
    for name, text in fixed.items():
        properties = found.schema["properties"]
        properties.setdefault(name, {"type": "string", "const": text})
        if name not in found.schema["required"]:
            found.schema["required"].insert(0, name)
    return found


def _explain_objects(run: Run, meanings: Mapping[str, Steps]) -> None:
    """Describe objects and arrays by what the fields in them have in common."""
    for path, holder in run.holders.items():
        inside = [meanings[leaf.path] for leaf in run.leaves.values() if path in leaf.ancestors]
        if text := explain_object(inside):
            holder.setdefault("description", text)
    for begin, schema in run.kinds.items():
        owners = {
            steps[-1][0] for path, steps in meanings.items() if steps and path.startswith(begin)
        }
        if len(owners) == 1:
            schema["description"] = summary(owners.pop())


def explore(parse: Parse[T], fixed: Mapping[str, str]) -> Described[T]:
    """Run a parser on a body with every field, and on others until it takes one.

    Fields may have to fit each other: the last message of a conversation must be the user's. So
    where the first values are refused, each other value of each field is tried.
    """
    run = Run()
    try:
        return _run(parse, fixed, run)
    except FieldError as error:
        problem = error
    for leaf in run.leaves.values():
        for index in range(1, len(leaf.options)):
            try:
                return _run(parse, fixed, Run(picks={leaf.path: index}))
            except FieldError:
                continue
    raise problem


def _run(parse: Parse[T], fixed: Mapping[str, str], run: Run) -> Described[T]:
    sketch = Sketch(run, fixed)
    value = parse(sketch)
    return Described(schema=sketch.schema, value=value, run=run)


def _note_required(found: Described[T], parse: Parse[T], fixed: Mapping[str, str]) -> None:
    """Take over what only a body with the fewest fields is asked for: one of several names."""
    fewest = _run(parse, fixed, attrs.evolve(found.run, wanted=frozenset(), leaves={}, holders={}))
    _merge_required(found.schema, fewest.schema)


def _merge_required(schema: Schema, other: Schema) -> None:
    for name in other.get("required", ()):
        if name not in schema["required"]:
            schema["required"].append(name)
    for name, below in other.get("properties", {}).items():
        _merge_required(schema["properties"][name], below)


def _examine(found: Described[T], leaf: Leaf, parse: Parse[T], fixed: Mapping[str, str]) -> Steps:
    """Find out what a field means and what is taken without it; fill its schema."""

    def run(index: int, paths: Iterable[str]) -> Described[T]:
        picks = {**found.run.picks, **leaf.picks, leaf.path: index}
        return _run(parse, fixed, Run(picks=picks, wanted=frozenset(paths)))

    with_it = (*leaf.ancestors, leaf.path)
    picked = found.run.picks.get(leaf.path, 0)
    first = run(picked, with_it)
    for index in range(len(leaf.options)):
        try:
            steps = difference(first.value, run(index, with_it).value)
        except FieldError:
            continue
        if steps:
            _note(leaf, steps, found.run)
            without = run(index, leaf.ancestors)
            if leaf.path not in without.run.leaves:
                _note_default(leaf, steps, first.value, without.value)
            return steps
    name = leaf.path.rpartition(".")[2]
    if steps := locate(first.value, name, leaf.options[picked]):
        _note(leaf, steps, found.run)
    return steps


def _note(leaf: Leaf, steps: Steps, run: Run) -> None:
    """Note what a field means, and an example: what the parser needed here, or what reads well."""
    if text := explain(steps):
        leaf.schema.setdefault("description", text)
    if leaf.path in run.picks:
        leaf.schema.setdefault("examples", [leaf.options[run.picks[leaf.path]]])
        return
    is_words = leaf.schema.get("type") == "string"
    is_words = is_words and not {"enum", "contentEncoding"} & leaf.schema.keys()
    if is_words and steps[-1][1] in SHOWN:
        leaf.schema.setdefault("examples", [SHOWN[steps[-1][1]]])


def _note_default(leaf: Leaf, steps: Steps, one: object, without: object) -> None:
    """Note what stands in the attribute without the field, where the field is the attribute."""
    for _, name in steps:
        if not hasattr(one, name) or not hasattr(without, name):
            return
        one, without = getattr(one, name), getattr(without, name)
    if one in leaf.options and isinstance(without, bool | int | float | str):
        leaf.schema.setdefault("default", without)
