"""How a session runs: server, admission, the unit loop's engine, model backends, command line."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SOURCE_TREE: Final = Path(__file__).parents[1]
"""Where `fixtures/` lies, where Antiphon runs from its sources."""
