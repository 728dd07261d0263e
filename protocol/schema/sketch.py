"""The describing twin of `codec.Fields`: what a parser reads, it writes down.

A dialect's parser is run on a `Sketch`, a body that has every field it is asked for. Each read
becomes a piece of JSON Schema (draft 07) and is answered by a representative value, so the parser
runs to its end and gives the canonical message that these values make. So the parsers are the
description of the wire, and there is no second list of fields that could differ from them.

Rules:
- A run has every field (`Run.wanted` is None), or the required ones and those that are wanted.
- `Run.picks` says which of a field's representative values is taken, by the field's path; of an
  object that is read by what it says it is, and of a string or array, which of the kinds.
- Of base64 every kind of file in `material` is tried: those that the reader takes are described.
- Beside JSON Schema's own keys there are `x-aliases` (names of the same field), `x-tag` (the field
  that says which kind an object is), `x-ignored` (known and not read) and `x-media` (what base64
  may hold).

It does not judge values, and it says nothing of what fields mean (`meaning`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar, cast

import attrs

from ..codec import Fields, Value
from ..errors import FieldError
from .material import MEDIA, Medium
from .values import Run, Schema, Site, described, value_at

T = TypeVar("T")
D = TypeVar("D")


class Sketch(Mapping[str, object]):
    """A body that has what it is asked for.

    Args:
        run: what the fields are, and where they are noted.
        fixed: the fields whose text is known, such as the message's type.
        ancestors: as in `Leaf`.
        picks: as in `Leaf`.
        schema: what the body fills, with what is known of it already.
    """

    def __init__(
        self,
        run: Run,
        fixed: Mapping[str, str],
        *,
        ancestors: tuple[str, ...] = (),
        picks: Mapping[str, int] | None = None,
        schema: Schema | None = None,
    ) -> None:
        self.run = run
        self.fixed = fixed
        self.ancestors = ancestors
        self.picks = picks or {}
        self.schema: Schema = {} if schema is None else schema
        self.schema.setdefault("type", "object")
        self.schema.setdefault("properties", {})
        self.schema.setdefault("required", [])

    @property
    def fields_class(self) -> type[Fields]:
        """What reads it (`Fields.__new__`)."""
        return SketchFields

    def __getitem__(self, name: str) -> object:
        """Give a field that is read without `Fields`: any value is taken there."""
        if name in self.fixed:
            return self.fixed[name]
        path = f"$.{name}"
        if not self.run.is_wanted(path):
            raise KeyError(name)
        return self.site(name, path).give("text", "word")

    def __iter__(self) -> Iterator[str]:
        return iter(self.fixed)

    def __len__(self) -> int:
        return len(self.fixed)

    def site(self, name: str, path: str) -> Site:
        """Say where a field stands, and note that there is one."""
        schema = self.schema["properties"].setdefault(name, {})
        self.run.holders.setdefault(path, schema)
        return Site(
            run=self.run, schema=schema, path=path, ancestors=self.ancestors, picks=self.picks
        )

    def require(self, name: str) -> None:
        """Note that a field must be there."""
        if name not in self.schema["required"]:
            self.schema["required"].append(name)

    def below(self, path: str, schema: Schema, picks: Mapping[str, int]) -> Sketch:
        """Make the body of an object in the field at `path`; `picks` are beside those to here."""
        return Sketch(
            self.run,
            {},
            ancestors=(*self.ancestors, path),
            picks={**self.picks, **picks},
            schema=schema,
        )


class SketchFields(Fields):
    """Describes what its methods are asked for; see `codec.Fields` for what they are."""

    def __init__(self, body: Mapping[str, object], path: str = "$") -> None:
        super().__init__({}, path)
        self._sketch = cast("Sketch", body)

    def has(self, name: str) -> bool:
        """Say that a field is there, if it is wanted."""
        if name in self._sketch.fixed:
            self._fix(name)
            return True
        return self._sketch.run.is_wanted(self._at(name))

    def required(self, name: str, read: Callable[[Value], T]) -> T:
        """Describe a field that must be there."""
        self._sketch.require(name)
        if name in self._sketch.fixed:
            return cast("T", self._fix(name))
        return self._read(name, read)

    def optional(self, name: str, read: Callable[[Value], T], default: D) -> T | D:
        """Describe a field that may be absent, and its default."""
        if name in self._sketch.fixed:
            return cast("T", self._fix(name))
        if not self._sketch.run.is_wanted(self._at(name)):
            return default
        found = self._read(name, read)
        if isinstance(default, bool | int | float | str):
            plain = str(default) if isinstance(default, str) else default
            self._sketch.schema["properties"][name]["default"] = plain
        return found

    def child(self, name: str) -> Fields:
        """Describe an object that must be there."""
        self._sketch.require(name)
        return self._below(name, self._at(name))

    def optional_child(self, name: str) -> Fields | None:
        """Describe an object that may be absent."""
        path = self._at(name)
        return self._below(name, path) if self._sketch.run.is_wanted(path) else None

    def children(self, name: str, count_max: int, count_min: int = 0) -> tuple[Fields, ...]:
        """Describe an array of objects, and give one of them."""
        self._sketch.require(name)
        path = self._at(name)
        return (self._item(self._sketch.site(name, path).schema, path, (count_min, count_max), {}),)

    def either(
        self,
        name: str,
        text: Callable[[Value], T],
        objects: Callable[[tuple[Fields, ...]], T],
        count_max: int,
    ) -> T:
        """Describe both the string and the array of objects that a field may be."""
        self._sketch.require(name)
        path = self._at(name)
        kinds: list[Schema] = [{}, {}]
        site = self._sketch.site(name, path)
        site.schema["anyOf"] = kinds
        picks = {**site.picks, path: 0}
        string = attrs.evolve(site, schema=kinds[0], path=f"{path}<string>", picks=picks)
        return self._all_of(
            path,
            [
                lambda: described(text)(value_at(string)),
                lambda: objects((self._item(kinds[1], path, (1, count_max), {path: 1}),)),
            ],
        )

    def variant(self, name: str, readers: Mapping[str, Callable[[Fields], T]]) -> T:
        """Describe the object for each of the kinds that it may be."""
        self._sketch.require(name)
        if name in self._sketch.fixed:
            return readers[str(self._fix(name))](self)
        path = self._at(name)
        sketches = [
            Sketch(
                self._sketch.run,
                {name: kind},
                ancestors=self._sketch.ancestors,
                picks={**self._sketch.picks, path: index},
            )
            for index, kind in enumerate(readers)
        ]
        self._sketch.schema |= {"oneOf": [sketch.schema for sketch in sketches], "x-tag": name}

        def run_reader(sketch: Sketch, kind: str) -> T:
            fields = SketchFields(sketch, f"{self.path}<{kind}>")
            sketch.run.kinds[fields.path] = sketch.schema
            fields.required(name, Value.text)
            return readers[kind](fields)

        runs = zip(sketches, readers, strict=True)
        return self._all_of(path, [partial(run_reader, sketch, kind) for sketch, kind in runs])

    def alias(self, names: tuple[str, ...], read: Callable[[Value], T], default: D) -> T | D:
        """Describe a field under each of its names."""
        found = [
            self._read(name, read) for name in names if self._sketch.run.is_wanted(self._at(name))
        ]
        if self._sketch.run.wanted is None and len(names) > 1:
            for name in names:
                self._sketch.schema["properties"][name]["x-aliases"] = list(names)
        return found[0] if found else default

    def set_aside(self, name: str) -> None:
        """Describe a field that is known and not read."""
        schema = self._sketch.site(name, self._at(name)).schema
        if not schema:
            schema["x-ignored"] = True

    def ignored(self) -> tuple[str, ...]:
        """Say that nothing was ignored: nothing was there that was not asked for."""
        return ()

    def refuse_unknown(self) -> None:
        """Describe that there may be no other fields."""
        self._sketch.schema["additionalProperties"] = False

    def _fix(self, name: str) -> str:
        text = self._sketch.fixed[name]
        schema = self._sketch.schema["properties"].setdefault(name, {})
        schema |= {"type": "string", "const": text}
        return text

    def _below(self, name: str, path: str) -> Fields:
        schema = self._sketch.site(name, path).schema
        return SketchFields(self._sketch.below(path, schema, {}), path)

    def _item(
        self, schema: Schema, path: str, bounds: tuple[int, int], kind: Mapping[str, int]
    ) -> Fields:
        item: Schema = {}
        schema |= {"type": "array", "items": item, "maxItems": bounds[1]}
        if bounds[0]:
            schema["minItems"] = bounds[0]
        return SketchFields(self._sketch.below(path, item, kind), f"{path}[0]")

    def _read(self, name: str, read: Callable[[Value], T]) -> T:
        """Run a reader; where it reads base64, for each kind of file that may be meant."""
        path = self._at(name)
        site = self._sketch.site(name, path)
        made: list[tuple[Medium, T]] = []
        problem: FieldError | None = None
        for medium in MEDIA:
            site.medium = medium
            try:
                made.append((medium, described(read)(value_at(site))))
            except FieldError as error:
                problem = error
            if not site.is_binary:
                break
        if problem is not None and not made:
            raise problem
        if site.is_binary:
            _note_media(site.schema, [medium.name for medium, _ in made])
        return made[0][1]

    def _all_of(self, path: str, makers: list[Callable[[], T]]) -> T:
        """Make everything where all is described, else only what is picked."""
        run = self._sketch.run
        picked = run.picks.get(path, 0)
        if run.wanted is not None:
            return makers[picked]()
        return [make() for make in makers][picked]


def _note_media(schema: Schema, names: list[str]) -> None:
    """Write what base64 may hold where it stands: in the field, or in the items of its array."""
    holder = schema.get("items", schema)
    holder["x-media"] = names
    if len(names) == 1 and "/" in names[0]:
        holder["contentMediaType"] = names[0]
