"""A server's settings from all sources: defaults < file < variables < flags.

- A later source replaces an earlier one, setting by setting, lists too.
- Unknown keys, and unknown variables with our prefix, are errors that suggest the nearest name.
  Problems name their file and key, or variable, and are reported all at once.
- An empty variable or text is `None` where a setting allows it, else an error.
- Relative paths start at the server's working directory, in a file too; `~` is not expanded.
- A flag that is given counts, even with its default value; otherwise the other sources decide. So
  no flag has a default here.

`to_toml` writes them as a file for `--config`, each with a comment that names its source. Reading
it gives the same settings; None is an empty text. The standard library has no TOML writer.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import attrs
import click
from click.core import ParameterSource

from . import settings as st

Source = Literal["default", "file", "variable", "flag"]

CONFIG_VARIABLE: Final = "ANTIPHON_CONFIG"
"""The file where no flag names one."""
OTHERS: Final = frozenset({CONFIG_VARIABLE, "ANTIPHON_KEY"})
"""Our variables that are not settings: of the file, and of clients."""
FILE_BYTES_MAX: Final = 1 << 20
"""A file with every setting has a few kilobytes."""
PROBLEMS_MAX: Final = 20
"""Reported at once; a file with more is not a configuration of ours."""


class ConfigError(ValueError):
    """The configuration is invalid; the text has a line for each problem."""


@attrs.frozen(kw_only=True)
class Effective:
    """The settings of a server, the source of each value, and the file that was read, or None."""

    settings: st.Settings
    sources: Mapping[str, Source]
    file: Path | None


def read(
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config: Path | None = None,
    wrong: Sequence[str] = (),
) -> Effective:
    """Merge the checked flags, the environment's `PREFIX` names and the file.

    `wrong`: what is wrong with the flags, reported with the rest.

    The file is the one that the environment names, if `config` is `None`. `ConfigError`: a source
    is unreadable or invalid.
    """
    settings = st.declared(st.Settings)
    values = {setting.name: setting.default for setting in settings}
    sources: dict[str, Source] = dict.fromkeys(values, "default")
    problems = [*wrong]
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    file = {} if config is None else read_file(config)
    by_name = {setting.name: setting for setting in settings}
    by_variable = {setting.variable: setting for setting in settings}
    layers: tuple[tuple[Source, Mapping[str, object]], ...] = (
        ("file", _take(file, by_name, st.from_toml, problems, config)),
        ("variable", _take(_ours(environ), by_variable, st.from_text, problems)),
        ("flag", flags),
    )
    for source, layer in layers:
        values.update(layer)
        sources.update(dict.fromkeys(layer, source))
    if problems:
        more = len(problems) - PROBLEMS_MAX
        lines = problems[:PROBLEMS_MAX] + ([f"and {more} more"] if more > 0 else [])
        raise ConfigError("\n".join(lines))
    made: dict[str, Any] = values
    return Effective(settings=st.Settings(**made), sources=MappingProxyType(sources), file=config)


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
        raise ConfigError(f"{path}: is not TOML: {error}") from error


# -- one layer ----------------------------------------------------------------------------------


_INJECTED: Final = re.compile(
    st.PREFIX + r"(SERVICE_(HOST|PORT.*)=.*|PORT_\d+_(TCP|UDP).*=.*|PORT=(tcp|udp)://.*)", re.DOTALL
)
"""Variables of Kubernetes and Docker links for a service named `antiphon`."""


def _ours(environ: Mapping[str, str]) -> dict[str, object]:
    return {
        name: text
        for name, text in environ.items()
        if name.startswith(st.PREFIX)
        and name not in OTHERS
        and not _INJECTED.fullmatch(f"{name}={text}")
    }


def _take(
    entries: Mapping[str, object],
    known: Mapping[str, st.Setting],
    parse: Callable[[st.Setting, Any], object],
    problems: list[str],
    file: Path | None = None,
) -> dict[str, object]:
    """Parse one source's entries, by their names there; problems are appended to `problems`."""
    where = "" if file is None else f"{file}: "
    parsed: dict[str, object] = {}
    for name, value in entries.items():
        entry = where + (name if name.isidentifier() else st.shown(name))
        if name not in known:
            problems.append(f"{entry}: unknown setting{_nearest(name, known)}")
            continue
        try:
            parsed[known[name].name] = parse(known[name], value)
        except st.ValueWrongError as error:
            problems.append(f"{entry}: {error}")
    return parsed


def _nearest(name: str, known: Mapping[str, st.Setting]) -> str:
    """Suggest the nearest setting, by its name or its flag's."""
    by_name = {it.name: real for real, it in known.items()}
    by_name |= {it.flag.strip("-").replace("-", "_"): real for real, it in known.items()}
    meant = name.removeprefix(st.PREFIX).lower().replace("-", "_")
    close = difflib.get_close_matches(meant, by_name, n=1)
    return f"; did you mean {by_name[close[0]]}?" if close else ""


# -- a file of settings ----------------------------------------------------------------------------


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
    for heading, settings in groupby(st.declared(st.Settings), key=lambda setting: setting.heading):
        yield ""
        yield f"# {heading}"
        for setting in settings:
            value = written(getattr(effective.settings, setting.name))
            yield f"{setting.name} = {value}  # {_source_of(setting, effective)}"


def _source_of(setting: st.Setting, effective: Effective) -> str:
    source = effective.sources[setting.name]
    named = {"variable": f" {setting.variable}", "flag": f" {setting.flag}"}.get(source, "")
    none = getattr(effective.settings, setting.name) is None
    return f"{source}{named}" + (f": {setting.unset}" if none else "")


# -- flags -----------------------------------------------------------------------------------------


METAVARS: Final = {"number": "NUMBER", "text": "TEXT", "path": "PATH", "texts": "TEXT"}
OTHER_OPTIONS: Final = "Configuration and help"
"""The heading of options that are not settings."""
COMMON: Final = frozenset(
    {
        *("host", "port", "model", "slots", "device", "worker_addresses", "static", "record_to"),
        *("no_record", "record_keep_days", "keys", "tls_cert", "tls_key", "config", "opens"),
    }
)
"""Options in `--help`: those that pages and most servers use. `--help-all` has the others too."""
OF_LOADING: Final = frozenset(
    {"model", "slots", "device", "dtype", "quantize", "deterministic", "voice_steps"}
    | {"context_percent"}
)
"""Settings by which a model is loaded."""
WRONG_FLAGS: Final = "antiphon.wrong_flags"
"""The key of a context for what is wrong with the flags of a `SettingsCommand`, for `read`."""
_ALL: Final = "antiphon.help_all"
"""The key of a context whose help shows all options."""

Command = Callable[..., Any]


class SettingType(click.ParamType[object]):
    """A value of a setting, checked as in a variable."""

    def __init__(self, setting: st.Setting) -> None:
        self._setting = setting
        self.name = setting.name

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        """Parse a flag's text; for a list it is one item, commas included."""
        if not isinstance(value, str):
            return value
        try:
            is_item = self._setting.kind == "texts"
            return st.plain(value) if is_item else st.from_text(self._setting, value)
        except st.ValueWrongError as error:
            wrong = click.BadParameter(str(error), ctx, param)
            if ctx is None or not isinstance(ctx.command, SettingsCommand):
                raise wrong from error
            ctx.meta.setdefault(WRONG_FLAGS, []).append(wrong.format_message())
            return None


def _help_all(ctx: click.Context, _param: click.Parameter, is_asked: bool) -> None:
    if is_asked and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


class SettingsCommand(click.Command):
    """A command whose help groups the settings by heading, and shows those in `COMMON` only."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group."""
        headings = {setting.name: setting.heading for setting in st.declared(st.Settings)}
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            is_help = any(it.startswith("--help") for it in param.opts)
            is_shown = _ALL in ctx.meta or is_help or param.name in COMMON
            if record is not None and is_shown:
                heading = headings.get(param.name or "", OTHER_OPTIONS)
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def settings_options(command: Command) -> Command:
    """Add a flag for each setting to a command, passed by the setting's name; and `--help-all`."""
    text = "Show all options and exit."
    everything = partial(click.option, is_flag=True, is_eager=True, expose_value=False, help=text)
    command = everything("--help-all", callback=_help_all)(command)
    for setting in reversed(st.declared(st.Settings)):
        command = _option(setting)(command)
    return command


def loading_options(command: Command) -> Command:
    """Add the flags of the settings by which a model is loaded, for commands besides `serve`."""
    for setting in reversed(st.declared(st.Settings)):
        if setting.name in OF_LOADING:
            command = _option(setting, setting.default)(command)
    return command


def given(ctx: click.Context) -> dict[str, object]:
    """The values of the flags that were given, by setting; for a command of `settings_options`."""
    return {
        setting.name: ctx.params[setting.name]
        for setting in st.declared(st.Settings)
        if ctx.get_parameter_source(setting.name) is ParameterSource.COMMANDLINE
    }


def _option(setting: st.Setting, default: object = None) -> Callable[[Command], Command]:
    help_text = f"{setting.help} [{_default_of(setting)}]"
    if setting.kind == "truth":
        negated = f"--no-{setting.flag.removeprefix('--')}"
        flags = f"{setting.flag}/{negated}"
        return click.option(flags, setting.name, default=default, help=help_text)
    return click.option(
        setting.flag,
        setting.name,
        type=SettingType(setting),
        default=default,
        multiple=setting.kind == "texts",
        metavar="|".join(setting.choices) or METAVARS[setting.kind],
        help=help_text,
    )


def _default_of(setting: st.Setting) -> str:
    """The bracketed default and range after the help."""
    if setting.kind == "texts":
        return "default: none; repeatable"
    text = setting.unset if setting.default is None else _plain(setting.default)
    ranged = f"; {setting.allowed}" if setting.kind == "number" else ""
    return f"default: {text}{ranged}"


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
