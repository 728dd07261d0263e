"""A server's settings from all sources: defaults < file < variables < flags.

- A later source replaces an earlier one, setting by setting, lists too.
- Unknown keys, and unknown variables with our prefix, are errors that suggest the nearest name.
  Problems name their file and key, or variable, and are reported all at once.
- An empty variable or text is `None` where a setting allows it, else an error.
- Relative paths start at the server's working directory, in a file too; `~` is not expanded.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs

from .declaration import PREFIX, Setting, declared
from .settings import Settings
from .values import ValueWrongError, from_text, from_toml, shown

Source = Literal["default", "file", "variable", "flag"]

CONFIG_VARIABLE: Final = "ANTIPHON_CONFIG"
"""The file where no flag names one."""
OTHERS: Final = frozenset(
    {
        CONFIG_VARIABLE,
        "ANTIPHON_KEY",
        "ANTIPHON_TOKEN2WAV_PYTHON",
        "ANTIPHON_TOKEN2WAV_STEPS",
        "ANTIPHON_TOKEN2WAV_FLOAT16",
    }
)
"""Our variables that are no settings: of the file, of clients, and of the vocoder."""
FILE_BYTES_MAX: Final = 1 << 20
"""A file with every setting has a few kilobytes."""
PROBLEMS_MAX: Final = 20
"""Reported at once; a file with more is no configuration of ours."""


class ConfigError(ValueError):
    """The configuration is invalid; the text has a line for each problem."""


@attrs.frozen(kw_only=True)
class Effective:
    """The settings of a server, the source of each value, and the file that was read, or None."""

    settings: Settings
    sources: Mapping[str, Source]
    file: Path | None


def read(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
) -> Effective:
    """Merge the checked flags, the environment's `PREFIX` names and the file.

    The file is the one that the environment names, if `config` is `None`. `ConfigError`: a source
    is unreadable or invalid.
    """
    settings = declared(Settings)
    values = {setting.name: setting.default for setting in settings}
    sources: dict[str, Source] = dict.fromkeys(values, "default")
    problems: list[str] = []
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    file = {} if config is None else read_file(config)
    by_name = {setting.name: setting for setting in settings}
    by_variable = {setting.variable: setting for setting in settings}
    layers: tuple[tuple[Source, Mapping[str, object]], ...] = (
        ("file", _take(file, by_name, from_toml, problems, config)),
        ("variable", _take(_ours(environ), by_variable, from_text, problems)),
        ("flag", flags),
    )
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    if problems:
        more = len(problems) - PROBLEMS_MAX
        told = problems[:PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError("\n".join(told))
    made: dict[str, Any] = values
    return Effective(settings=Settings(**made), sources=MappingProxyType(sources), file=config)


def read_file(path: Path) -> dict[str, object]:
    """Read a TOML file; raises `ConfigError` if it is unreadable or invalid."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError("the configuration's path is invalid") from error
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: more than {FILE_BYTES_MAX} bytes")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: is no TOML: {error}") from error


# -- one layer ----------------------------------------------------------------------------------


_INJECTED: Final = re.compile(
    PREFIX + r"(SERVICE_(HOST|PORT.*)=.*|PORT_\d+_(TCP|UDP).*=.*|PORT=(tcp|udp)://.*)", re.DOTALL
)
"""Variables of Kubernetes and Docker links for a service named `antiphon`."""


def _ours(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(PREFIX)
        and name not in OTHERS
        and not _INJECTED.fullmatch(f"{name}={text}")
    }


def _take(
    entries: Mapping[str, object],
    known: Mapping[str, Setting],
    parse: Callable[[Setting, Any], object],
    problems: list[str],
    file: Path | None = None,
) -> dict[str, object]:
    """Parse one source's entries, by their names there; problems are appended to `problems`."""
    where = "" if file is None else f"{file}: "
    taken: dict[str, object] = {}
    for name, value in entries.items():
        said = where + (name if name.isidentifier() else shown(name))
        if name not in known:
            problems.append(f"{said}: there is no such setting{_nearest(name, known)}")
            continue
        try:
            taken[known[name].name] = parse(known[name], value)
        except ValueWrongError as error:
            problems.append(f"{said}: {error}")
    return taken


def _nearest(name: str, known: Mapping[str, Setting]) -> str:
    """Suggest the nearest setting, by its name or its flag's."""
    by_name = {alias: real for real, it in known.items() for alias in (it.name, _bare(it.flag))}
    meant = name.removeprefix(PREFIX).lower().replace("-", "_")
    close = difflib.get_close_matches(meant, by_name, n=1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""


def _bare(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
