"""The rooms of a package, and which of them import which: `python -m tests.project.rooms runtime`.

A room is a sub-package, with all that is below it, or a module at the package's top. An arrow goes
from the room of a module to the room of a module that it imports. All imports count: those in
functions and those for type checkers too. A room stands one floor above the highest that it
imports; the rooms of a circle share one. An arrow is upward where its end comes after its start in
`ORDER`; a room that is not in it is unplanned.

`--map FILE` names a JSON object {"package.module": "package.room.module"}, and judges the package
as it would be with its modules moved so. Commands named as text (`runtime/cli.py`) are no imports.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Final

import attrs

from tests.project.syntax import nodes_of

ROOT: Final = Path(__file__).resolve().parents[2]

Graph = dict[str, set[str]]
"""Each node, and the nodes that it imports."""

# fmt: off
ORDER: Final[Mapping[str, tuple[str, ...]]] = {
    "protocol": ("values", "wire", "machine"),
    "recorder": ("format", "write", "read", "storage", "repair"),
    "runtime": (
        "settings", "net", "media", "measures", "client", "model", "slots", "streaming", "access",
        "telemetry", "link", "webrtc", "worker", "session", "api", "serve",
        "commands", "cli",
    ),
    "replay": (
        "shared", "rerun", "story", "export", "redact", "eval", "library", "shrink", "play", "diff",
        "view", "fork", "assess", "cli",
    ),
}
"""The rooms of each package, from below: each may import those before it."""
# fmt: on


@attrs.frozen
class Rooms:
    """What the imports of one package come to. A circle is the list of its members, sorted."""

    package: str
    floors: dict[str, int]
    arrows: dict[tuple[str, str], int]
    """How many modules that import a module stand behind each."""
    upward: list[tuple[str, str]]
    unplanned: list[str]
    circles: list[list[str]]
    module_circles: list[list[str]]


def read(root: Path, package: str, moved: Mapping[str, str]) -> Graph:
    """Read what the modules of a package import of it, all under the names they are moved to."""
    paths = {_name(path.relative_to(root)): path for path in (root / package).rglob("*.py")}
    del paths[package]
    graph: Graph = {}
    for name, path in paths.items():
        found = {moved.get(each, each) for each in _imported(name, path, paths.keys())}
        if found or path.name != "__init__.py":
            graph[moved.get(name, name)] = found - {moved.get(name, name)}
    return graph


def _name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, known: Collection[str]) -> Iterator[str]:
    """The known modules that a file imports; of `from a import b`, `a.b` where that is one."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in nodes_of(path.read_text("utf-8")):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join(
                [*(above if node.level else ()), *([node.module] if node.module else ())]
            )
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield from (each for each in [inner if inner in known else base] if each in known)


def judge(package: str, graph: Graph, order: Collection[str] | None = None) -> Rooms:
    """Judge a package by what its modules import, against an order of its rooms."""
    order = ORDER[package] if order is None else order
    height = {room: number for number, room in enumerate(order)}
    arrows = Counter(
        (_room(name), _room(other))
        for name, imported in graph.items()
        for other in imported
        if _room(name) != _room(other)
    )
    rooms: Graph = {_room(name): set() for name in graph}
    for start, end in arrows:
        rooms[start].add(end)
    return Rooms(
        package=package,
        floors=_floors(rooms),
        arrows=dict(sorted(arrows.items())),
        upward=sorted(
            (start, end)
            for start, end in arrows
            if start in height and end in height and height[end] > height[start]
        ),
        unplanned=sorted(rooms.keys() - height.keys()),
        circles=circles(rooms),
        module_circles=circles(graph),
    )


def _room(name: str) -> str:
    return name.split(".")[1]


def circles(graph: Graph) -> list[list[str]]:
    """Find the nodes that reach each other and so themselves, in groups."""

    @cache
    def reached(node: str) -> frozenset[str]:
        seen: set[str] = set()
        waiting = list(graph[node])
        while waiting:
            other = waiting.pop()
            if other not in seen:
                seen.add(other)
                waiting += graph[other]
        return frozenset(seen)

    groups = {
        frozenset(other for other in reached(node) if node in reached(other)) for node in graph
    }
    return sorted(sorted(group) for group in groups if group)


def _floors(rooms: Graph) -> dict[str, int]:
    """How many rooms stand below each, in the longest chain; a circle counts as one."""
    circle_of = {room: frozenset(circle) for circle in circles(rooms) for room in circle}

    @cache
    def floor(group: frozenset[str]) -> int:
        below = set().union(*(rooms[room] for room in group)) - group
        return 1 + max((floor(circle_of.get(room, frozenset({room}))) for room in below), default=0)

    return {room: floor(circle_of.get(room, frozenset({room}))) for room in sorted(rooms)}


def table(found: Rooms) -> str:
    """Draw the rooms from the top floor down, and then what is wrong."""
    lines = [
        f"{found.package}: {len(found.floors)} rooms on {max(found.floors.values())} floors, "
        f"{len(found.arrows)} arrows, {len(found.upward)} upward, "
        f"{len(found.circles)} circles of rooms, {len(found.module_circles)} of modules"
    ]
    for room, floor in sorted(found.floors.items(), key=lambda item: (-item[1], item[0])):
        ends = [f"{end} {n}" for (start, end), n in found.arrows.items() if start == room]
        lines.append(f"{floor:4}  {room:16}{', '.join(ends)}".rstrip())
    lines += [f"upward: {start} -> {end}" for start, end in found.upward]
    lines += [f"unplanned: {', '.join(found.unplanned)}"] if found.unplanned else []
    lines += [f"circle of rooms: {', '.join(each)}" for each in found.circles]
    lines += [f"circle of modules: {', '.join(each)}" for each in found.module_circles]
    return "\n".join(lines)


def main() -> None:
    """Print the rooms of the packages that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.project.rooms")
    parser.add_argument("packages", nargs="*", help="all four, where none is named")
    parser.add_argument("--map", type=Path, help="judge the package as it would be, moved so")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--why", nargs=2, metavar="ROOM", help="the imports behind one arrow")
    options = parser.parse_args()
    moved = json.loads(options.map.read_text("utf-8")) if options.map else {}
    graphs = {package: read(ROOT, package, moved) for package in options.packages or ORDER}
    if options.why:
        for graph in graphs.values():
            for name, imported in sorted(graph.items()):
                for other in sorted(imported):
                    if [_room(name), _room(other)] == options.why:
                        print(name, "->", other)
        return
    found = [judge(package, graph) for package, graph in graphs.items()]
    if options.json:
        told = [
            {**attrs.asdict(each), "arrows": [[*ends, n] for ends, n in each.arrows.items()]}
            for each in found
        ]
        print(json.dumps(told, indent=2))
    else:
        print("\n\n".join(map(table, found)))


if __name__ == "__main__":
    main()
