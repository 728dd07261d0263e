"""Replay logs with every event, effect and value class, and every attribute of them, renamed.

`python -m tests.golden.renaming LOG...` does so in a process of its own, in which the product is
imported with other names. No file is changed: each module's syntax tree is changed on import.

- Each class of `protocol/values`, enumerations included, is defined with another name; the module
  keeps the old one as an alias, for its users. Each attribute of the frozen ones is defined with
  another name, and has no other.
- Whoever reads an attribute, or gives one as a keyword (to the class, `attrs.evolve` or `partial`,
  or in a pattern), uses the new name if it is of such a class. That is decided when the code runs,
  by the type, so attributes with common names (`index`, `name`, `text`) are renamed as any other.
- The tables of `protocol/wire` name attributes in strings (`Field("text", ...)`), and a rename has
  to change these too. There, names of attributes are translated where they are looked up.

With `--only CLASS` or `--only CLASS.ATTRIBUTE` (any number) only these are renamed. With `--broken`
records take the new names, as if they had no names of their own.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final, cast

import attrs

ROOT: Final = Path(__file__).parents[2]
VALUES: Final = ROOT / "protocol" / "values"
PACKAGES: Final = ("protocol", "recorder", "runtime", "replay")
TABLES: Final = "protocol.wire"
NEW: Final = "_renamed"
"""The end of each new name."""
BROKEN: Final = {
    "cls: row.split()[0]": f"cls: row.split()[0] + '{NEW}' * cls.__name__.endswith('{NEW}')",
    "tuple(zip(fields, names, strict=True))": "tuple((field, name +"
    f" '{NEW}' * field.name.endswith('{NEW}')) for field, name in zip(fields, names))",
}
"""What makes records take the new names."""

Names = dict[str, dict[str, str]]
"""By class: its attributes, and their new names."""


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether a class is a value: `attrs.frozen`."""
    return any(ast.unparse(each).startswith("attrs.frozen") for each in node.decorator_list)


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    """Find the classes that a module defines."""
    body = ast.parse(path.read_text()).body
    return (node for node in body if isinstance(node, ast.ClassDef))


def fields_of(node: ast.ClassDef) -> list[str]:
    """Name the attributes of a class, in their order."""
    targets = (it.target for it in node.body if isinstance(it, ast.AnnAssign))
    return [it.id for it in targets if isinstance(it, ast.Name)]


def all_names() -> list[str]:
    """Name everything that can be renamed: each class, and each `class.attribute`."""
    found = list[str]()
    for path in sorted(VALUES.glob("*.py")):
        for node in classes_of(path):
            found.append(node.name)
            if is_frozen(node):
                found += (f"{node.name}.{field}" for field in fields_of(node))
    return list(dict.fromkeys(found))


class Renamer(ast.NodeTransformer):
    """Changes the syntax tree of one module; `wanted` are names as of `all_names`."""

    def __init__(self, module: str, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._defines = module.startswith("protocol.values.")
        self._has_tables = module.startswith(TABLES)
        self._attributes = {name.partition(".")[2] for name in wanted} - {""}

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        self.generic_visit(node)
        if not self._defines:
            return node
        made: list[ast.stmt] = [node]
        if is_frozen(node):
            new = {it: it + NEW for it in fields_of(node) if f"{node.name}.{it}" in self._wanted}
            for statement in node.body:
                target = statement.target if isinstance(statement, ast.AnnAssign) else None
                if isinstance(target, ast.Name):
                    target.id = new.get(target.id, target.id)
            node.decorator_list.insert(0, ast.parse(f"__renaming__({new!r})", mode="eval").body)
        if node.name in self._wanted:
            made.append(ast.parse(f"{node.name} = {node.name}{NEW}").body[0])
            node.name += NEW
        return made

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr not in self._attributes or not isinstance(node.ctx, ast.Load):
            return node
        return _call("__renaming_read__", node.value, ast.Constant(node.attr))

    def visit_Name(self, node: ast.Name) -> Any:
        replaced = {"getattr": "__renaming_read__"}
        if self._has_tables:
            replaced |= {
                "attrgetter": "__renaming_getter__",
                "get_type_hints": "__renaming_hints__",
            }
        if isinstance(node.ctx, ast.Load):
            node.id = replaced.get(node.id, node.id)
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        is_of_fields = self._has_tables and ast.unparse(node.func) == "attrs.fields"
        self.generic_visit(node)
        if is_of_fields:
            node.func = ast.Name("__renaming_fields__", ast.Load())
        elif any(it.arg is None or it.arg in self._attributes for it in node.keywords):
            node.args.insert(0, node.func)
            node.func = ast.Name("__renaming_call__", ast.Load())
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> Any:
        self.generic_visit(node)
        name = ast.unparse(node.cls).rpartition(".")[2]
        node.kwd_attrs = [
            it + NEW if f"{name}.{it}" in self._wanted else it for it in node.kwd_attrs
        ]
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(name, ast.Load()), args=list(args), keywords=[])


# -- while it runs --------------------------------------------------------------------------------

RENAMED: Final[dict[type, dict[str, str]]] = {}
"""The classes whose attributes have new names."""


def _register(new: dict[str, str]) -> Callable[[type], type]:
    def register(cls: type) -> type:
        fields = {field.name for field in attrs.fields(cast("type[attrs.AttrsInstance]", cls))}
        assert fields >= set(new.values()), cls
        assert not fields & set(new), cls
        RENAMED[cls] = new
        return cls

    return register


def _read(owner: object, name: str, *default: object) -> Any:
    names = RENAMED.get(type(owner))
    return getattr(owner, name if names is None else names.get(name, name), *default)


def _called(func: Any, /, *args: Any, **keywords: Any) -> Any:
    owner = func
    if func is attrs.evolve:
        owner = type(args[0])
    elif func is partial:
        owner = args[0]
    elif isinstance(func, partial):
        owner = func.func
    names = RENAMED.get(owner) if isinstance(owner, type) else None
    if names:
        keywords = {names.get(name, name): value for name, value in keywords.items()}
    return func(*args, **keywords)


def _getter(*paths: str) -> Callable[[object], Any]:
    def of(owner: object, path: str) -> Any:
        for name in path.split("."):
            owner = _read(owner, name)
        return owner

    if len(paths) == 1:
        return lambda owner: of(owner, paths[0])
    return lambda owner: tuple(of(owner, path) for path in paths)


@attrs.frozen
class _Field:
    """A field as the tables know it."""

    name: str


def _fields(cls: type[attrs.AttrsInstance]) -> list[_Field]:
    return [_Field(name=it.name.removesuffix(NEW)) for it in attrs.fields(cls)]


def _hints(cls: type) -> dict[str, Any]:
    from typing import get_type_hints

    return {name.removesuffix(NEW): hint for name, hint in get_type_hints(cls).items()}


class Loader(SourceFileLoader):
    """Loads a module of the product with other names."""

    def __init__(self, name: str, path: str, wanted: frozenset[str], *, is_broken: bool) -> None:
        super().__init__(name, path)
        self._wanted, self._is_broken = wanted, is_broken

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        if self._is_broken and fullname == "protocol.values.records":
            for old, new in BROKEN.items():
                assert old in text
                text = text.replace(old, new)
        tree = ast.parse(text)
        if fullname != "protocol.values.records":  # its rows name no attributes
            tree = Renamer(fullname, self._wanted).visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules of the product."""

    def __init__(self, wanted: frozenset[str], *, is_broken: bool) -> None:
        self._wanted, self._is_broken = wanted, is_broken

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of the product, to be loaded with other names."""
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            assert Path(spec.origin).is_relative_to(ROOT), spec.origin
            spec.loader = Loader(fullname, spec.origin, self._wanted, is_broken=self._is_broken)
        return spec


def install(wanted: frozenset[str], *, is_broken: bool = False) -> None:
    """Have the product imported with other names from now on."""
    assert not any(name.partition(".")[0] in PACKAGES for name in sys.modules)
    helpers: dict[str, Any] = {
        "__renaming__": _register,
        "__renaming_read__": _read,
        "__renaming_call__": _called,
        "__renaming_getter__": _getter,
        "__renaming_fields__": _fields,
        "__renaming_hints__": _hints,
    }
    vars(builtins).update(helpers)
    sys.meta_path.insert(0, Finder(wanted, is_broken=is_broken))


def main() -> None:
    """Rename, replay the logs, and print a line for each: its name and the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--broken", action="store_true")
    args = parser.parse_args()
    wanted = frozenset(args.only or all_names())
    install(wanted, is_broken=args.broken)
    from replay.rerun.folder import replay_log

    for log in args.logs:
        outcome = replay_log(log)
        print(log.name, outcome.result, outcome.divergence or "")
    attributes = sum(map(len, RENAMED.values()))
    print(f"renamed: {len(RENAMED)} classes with {attributes} attributes", file=sys.stderr)


if __name__ == "__main__":
    main()
