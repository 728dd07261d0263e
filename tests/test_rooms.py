"""The rooms of the four packages stand on floors: none imports one above it, none go in circles.

What finds the imports is itself tested, on a package of four modules.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.project.rooms import ORDER, ROOT, Graph, judge, read

SOURCES: Final = {
    "__init__.py": '"""A package."""\n',
    "cellar/__init__.py": '"""A room."""\n',
    "cellar/wine.py": "import attrs\nTYPE_CHECKING = False\n",
    "hall.py": "from .cellar import wine\n",
    "attic/chest.py": "def open():\n    from ..hall import door\n",
}


@pytest.fixture
def house(tmp_path: Path) -> Callable[..., Graph]:
    """A package of a cellar, a hall and an attic, with other sources where they are given."""

    def build(moved: dict[str, str] | None = None, **sources: str) -> Graph:
        named = {f"{name.replace('_', '/')}.py": text for name, text in sources.items()}
        for name, text in (SOURCES | named).items():
            path = tmp_path / "house" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return read(tmp_path, "house", moved or {})

    return build


FLOORS: Final = ("cellar", "hall", "attic")


def test_a_room_stands_above_what_it_imports(house: Callable[..., Graph]) -> None:
    """A package would be drawn upside down."""
    found = judge("house", house(), FLOORS)
    assert found.floors == {"cellar": 1, "hall": 2, "attic": 3}
    assert found.arrows == {("attic", "hall"): 1, ("hall", "cellar"): 1}
    assert [*found.upward, *found.unplanned, *found.circles, *found.module_circles] == []


@pytest.mark.parametrize(
    "text",
    [
        "from ..attic.chest import lid",
        "from ..attic import chest",
        "import house.attic.chest",
        "def look():\n    from ..attic.chest import lid",
        "if TYPE_CHECKING:\n    from ..attic.chest import lid",
    ],
)
def test_an_import_is_found_wherever_it_stands(house: Callable[..., Graph], text: str) -> None:
    """A circle would hide in a function, or from all but type checkers."""
    found = judge("house", house(cellar_wine=text), FLOORS)
    assert found.upward == [("cellar", "attic")]
    assert found.circles == [["attic", "cellar", "hall"]]
    assert found.module_circles == [["house.attic.chest", "house.cellar.wine", "house.hall"]]


def test_modules_are_judged_where_they_would_lie(house: Callable[..., Graph]) -> None:
    """A plan would be judged by what it changes."""
    moved = {"house.hall": "house.attic.hall", "house.cellar.wine": "house.shed.wine"}
    found = judge("house", house(moved), FLOORS)
    assert found.arrows == {("attic", "shed"): 1}
    assert found.unplanned == ["shed"]


@pytest.mark.parametrize("package", ORDER)
def test_the_rooms_stand_on_floors(package: str) -> None:
    """One could not be read, tested or replaced without all the others."""
    found = judge(package, read(ROOT, package, {}))
    assert found.upward == []
    assert found.module_circles == []
    assert found.circles == []
    assert found.unplanned == []
