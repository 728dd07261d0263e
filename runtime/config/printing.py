"""Settings as TOML that can be read again, each with a comment that says where it came from.

Written by hand, for the types that settings have: the standard library reads TOML and writes none.
What is printed and read again gives the same settings; None is an empty text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ..settings import Settings
from .declaration import Setting, declared
from .sources import Effective


def to_toml(effective: Effective) -> str:
    """Write the settings that a server runs with.

    Args:
        effective: the settings, and where they come from.

    Returns:
        A file for `--config`.
    """
    return "".join(f"{line}\n" for line in _lines(effective))


def written(value: object) -> str:
    """Write one value of a setting as TOML.

    Args:
        value: of one of the types that settings have.
    """
    if value is None:
        return '""'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str | Path):
        # A JSON text is a TOML text, but that TOML has DEL escaped too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, tuple)
    return f"[{', '.join(written(item) for item in value)}]"


def _lines(effective: Effective) -> Iterator[str]:
    yield "# What the server runs with: defaults < file < variables < flags."
    if effective.file is not None:
        yield f"# The file: {written(effective.file)}"
    for group, settings in groupby(declared(Settings), key=lambda setting: setting.group):
        yield ""
        yield f"# {group}"
        for setting in settings:
            value = written(getattr(effective.settings, setting.name))
            yield f"{setting.name} = {value}  # {_told(setting, effective)}"


def _told(setting: Setting, effective: Effective) -> str:
    source = effective.sources[setting.name]
    named = {"variable": f" {setting.variable}", "flag": f" {setting.flag}"}.get(source, "")
    none = getattr(effective.settings, setting.name) is None
    return f"{source}{named}" + (f": {setting.unset}" if none else "")
