"""Running sessions: server, admission, the engine, model backends, the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

SOURCE_TREE: Final = Path(__file__).parents[1]
"""Where `fixtures/` lies, where Antiphon runs from its sources."""
ERROR: Final = "Error: "
"""What a command's last line on standard error begins with; another's error adds its own."""
RUN: Final = (sys.executable, "-P", "-c", "from runtime.cli import main; main()")
"""The command line in this Python, whether installed as a command or not."""
