"""Settings as a TOML file for `--config`, each with a comment that names its source.

Reading it gives the same settings; None is an empty text. The standard library has no TOML writer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from .declaration import Setting, declared
from .settings import Settings
from .sources import Effective


def to_toml(effective: Effective) -> str:
    """Format the settings of a server."""
    return "".join(f"{line}\n" for line in _lines(effective))


def written(value: object) -> str:
    """Format one value as TOML."""
    if value is None:
        return '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | Path):
        # A JSON text is a TOML text, except that TOML escapes DEL.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, tuple)
    return f"[{', '.join(written(item) for item in value)}]"


def _lines(effective: Effective) -> Iterator[str]:
    yield "# What the server runs with: defaults < file < variables < flags."
    if effective.file is not None:
        yield f"# The file: {written(effective.file)}"
    for heading, settings in groupby(declared(Settings), key=lambda setting: setting.heading):
        yield ""
        yield f"# {heading}"
        for setting in settings:
            value = written(getattr(effective.settings, setting.name))
            yield f"{setting.name} = {value}  # {_told(setting, effective)}"


def _told(setting: Setting, effective: Effective) -> str:
    source = effective.sources[setting.name]
    named = {"variable": f" {setting.variable}", "flag": f" {setting.flag}"}.get(source, "")
    none = getattr(effective.settings, setting.name) is None
    return f"{source}{named}" + (f": {setting.unset}" if none else "")
