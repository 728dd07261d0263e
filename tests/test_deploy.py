"""What operators copy: image, compose file, systemd unit, example, and the page for operators.

Nothing is built or started here: the files are held to the settings, flags and waits of the code.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from runtime.access.command import keys_command
from runtime.access.gate import OPEN_PATHS
from runtime.serve.serve_command import EXIT_WAIT_S, check, serve_command
from runtime.serve.serving import shutdown_wait_s
from runtime.settings.settings import PREFIX, Settings, declared
from runtime.settings.sources import OTHERS, ConfigError, Effective, read
from tests.project.commands import is_command

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
SETTINGS = declared(Settings)
DOCKERFILE = re.sub(r"\\\n\s*", "", (DEPLOY / "Dockerfile").read_text())
STEPS = [
    (line.split()[0], line.split(maxsplit=1)[1])
    for line in DOCKERFILE.splitlines()
    if line.strip() and not line.startswith(("#", " "))
]
COMPOSE_TEXT = (DEPLOY / "compose.yaml").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load(COMPOSE_TEXT)
UNIT = (DEPLOY / "antiphon.service").read_text()
README = (ROOT / "README.md").read_text()
PAGE = (ROOT / "docs" / "operations.md").read_text()


def unit() -> dict[str, list[str]]:
    """The service's section: systemd allows a key to come more than once."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in UNIT.splitlines():
        if line.startswith("["):
            section = line
        elif section == "[Service]" and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def seconds(text: str) -> int:
    """Read a span as systemd and compose write it."""
    spans = re.fullmatch(r"(?:(\d+)m(?:in)?)?(?:(\d+)s?)?", text)
    assert spans is not None
    return 60 * int(spans[1] or 0) + int(spans[2] or 0)


def image_environment() -> dict[str, str]:
    """What the last stage of the image sets."""
    last = STEPS[max(i for i, (step, _) in enumerate(STEPS) if step == "FROM") :]
    words = [word for step, rest in last if step == "ENV" for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def settings_of(environ: dict[str, str], config: Path | None = None) -> Effective:
    """What a server would run with; what is no setting is an error."""
    return read(flags={}, environ=environ, config=config)


def drains_within(wait_s: int, settings: Settings) -> bool:
    """Whether a server that is told to end does so before it is killed."""
    return wait_s > settings.drain_s + shutdown_wait_s(settings) + EXIT_WAIT_S


def shown(text: str) -> list[list[str]]:
    """The commands that a file's first lines tell an operator to type, as words."""
    lines = re.findall(r"^#     (.+)$", text, re.MULTILINE)
    return [shlex.split(command) for line in lines for command in line.split(" && ")]


def test_the_image_s_variables_are_settings() -> None:
    """A container would not start, or serve nobody beyond itself."""
    settings = settings_of(image_environment()).settings
    assert settings.host == "0.0.0.0"
    assert settings.record_to == Path("/var/lib/antiphon")
    with pytest.raises(ConfigError, match="--keys FILE"):  # Nobody is served by an oversight.
        check(settings)


def test_the_image_runs_as_nobody_and_hears_its_signal() -> None:
    """A hole would be root's; or every restart would cut sessions off."""
    steps = dict(STEPS)
    assert steps["USER"] == "antiphon"
    assert steps["STOPSIGNAL"] == "SIGTERM"
    command = json.loads(steps["ENTRYPOINT"]) + json.loads(steps["CMD"])
    assert command == ["antiphon", "serve"]
    names = [step for step, _ in STEPS]
    assert names.index("USER") > len(names) - 1 - names[::-1].index("RUN")


def test_the_image_asks_whether_it_is_ready_where_it_listens() -> None:
    """A container would be unhealthy for ever, or for nobody to see."""
    (check_text,) = [rest for step, rest in STEPS if step == "HEALTHCHECK"]
    code = json.loads(check_text.partition(" CMD ")[2])[2]
    compile(code, "healthcheck", "exec")
    url = re.search(r"'(http://127\.0\.0\.1:(\d+)(/\w+))'", code)
    assert url is not None
    environment = image_environment()
    assert url[2] == environment["ANTIPHON_PORT"] == dict(STEPS)["EXPOSE"]
    assert url[3] == "/ready"
    assert url[3] in OPEN_PATHS


def test_the_image_is_made_of_all_that_is_installed() -> None:
    """The image could not be built, or its server lack a part."""
    sources = [
        word
        for step, rest in STEPS
        if step == "COPY" and not rest.startswith("--from")
        for word in rest.split()[:-1]
    ]
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = [*wheel["packages"], *wheel["force-include"], project["project"]["readme"]]
    for path in wanted:
        assert any(path == it or path.startswith(f"{it}/") for it in sources), path
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == set(sources)


def test_the_compose_file_s_variables_are_settings() -> None:
    """A server would not start, and `docker compose up` would start it again for ever."""
    for service in COMPOSE["services"].values():
        environ = {**image_environment(), **service.get("environment", {})}
        settings = settings_of(environ).settings
        assert settings.keys == Path("/etc/antiphon/keys.toml")
        folders = [volume.split(":")[1] for volume in service["volumes"]]
        assert str(settings.keys.parent) in folders
    assert COMPOSE["services"]["antiphon"]["command"] == ["serve"]
    tools = COMPOSE["services"]["keys"]
    assert tools["entrypoint"] == ["antiphon", "keys"]
    assert tools["command"][0] in keys_command.commands


def test_the_compose_file_for_a_gpu_asks_for_one() -> None:
    """The server would compute on the CPU, or not find its model."""
    (service,) = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())["services"].values()
    settings = settings_of({**image_environment(), **service["environment"]}).settings
    assert settings.device == "cuda"
    assert [volume.split(":")[-2:] for volume in service["volumes"]] == [[settings.model, "ro"]]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}


def test_the_compose_file_lets_sessions_end() -> None:
    """Every restart would cut sessions off."""
    service = COMPOSE["services"]["antiphon"]
    settings = settings_of({**image_environment(), **service["environment"]}).settings
    assert drains_within(seconds(service["stop_grace_period"]), settings)


def test_the_compose_file_is_begun_in_an_order_that_works() -> None:
    """The first start would be a loop: no image, a folder that is root's, or no file of keys."""
    build, folder, add, up = shown(COMPOSE_TEXT)
    assert build == ["docker", "compose", "build"]
    assert up[:3] == ["docker", "compose", "up"]
    user = re.search(r"--uid (\d+)", DOCKERFILE)
    assert user is not None
    assert folder[folder.index("-o") + 1] == user[1]
    assert {volume.split(":")[0] for volume in COMPOSE["services"]["keys"]["volumes"]} == {
        f"./{folder[-1]}"
    }
    assert add[:4] == ["docker", "compose", "run", "--rm"]
    assert COMPOSE["services"][add[4]]["entrypoint"] == ["antiphon", add[4]]
    assert add[5] in keys_command.commands


def test_the_compose_file_runs_no_stranger_s_image() -> None:
    """Whatever somebody publishes under the name would be run, and be shown the keys."""
    for service in COMPOSE["services"].values():
        assert service["pull_policy"] == "never"


def test_the_compose_file_shows_the_port_to_its_own_machine() -> None:
    """Keys would cross the network in the clear."""
    (port,) = COMPOSE["services"]["antiphon"]["ports"]
    assert port == "127.0.0.1:8006:8006"


def test_the_example_is_a_configuration() -> None:
    """The first thing that an operator copies would not start."""
    settings = settings_of({}, DEPLOY / "antiphon.toml").settings
    with pytest.raises(ConfigError) as error:
        check(settings)
    assert str(error.value).startswith("keys: /etc/antiphon/keys.toml: cannot be read")
    assert "\n" not in str(error.value)


def test_what_the_example_leaves_out_is_a_configuration_too(tmp_path: Path) -> None:
    """Whoever takes the mark away from a line would meet an error."""
    text = (DEPLOY / "antiphon.toml").read_text()
    path = tmp_path / "antiphon.toml"
    path.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    effective = settings_of({}, path)
    assert effective.settings.tls_cert is not None
    assert effective.settings.origins == ("https://app.example",)


def test_the_unit_starts_what_there_is() -> None:
    """The service would not start."""
    service = unit()
    (start,) = service["ExecStart"]
    program, command, *flags = shlex.split(start)
    assert (program, command) == ("/opt/antiphon/bin/antiphon", "serve")
    known = {opt for param in serve_command.params for opt in param.opts}
    assert {flag for flag in flags if flag.startswith("-")} <= known
    config = Path(flags[flags.index("--config") + 1])
    assert config == Path("/etc/antiphon") / (DEPLOY / "antiphon.toml").name
    names = {word.partition("=")[0] for line in service["Environment"] for word in line.split()}
    assert {it for it in names if it.startswith(PREFIX)} <= {
        it.variable for it in SETTINGS
    } | OTHERS


def test_the_unit_lets_sessions_end() -> None:
    """Every restart would cut sessions off, or an update hang for ever."""
    service = unit()
    settings = settings_of({}, DEPLOY / "antiphon.toml").settings
    assert service["KillSignal"] == ["SIGTERM"]
    assert drains_within(seconds(service["TimeoutStopSec"][0]), settings)
    assert int(service["LimitNOFILE"][0]) > 2 * settings.connections_max


def test_the_unit_is_installed_so_that_it_can_start() -> None:
    """The service would not start, or not be allowed to read its files."""
    commands = shown(UNIT)
    (made,) = [words[-1] for words in commands if words[0] == "groupadd"]
    assert unit()["SupplementaryGroups"] == [made]
    given = [words[words.index("-g") + 1] for words in commands if "-g" in words]
    given += [words[1] for words in commands if words[0] == "chgrp"]
    assert given == [made] * 3
    # systemd makes up a user of the service's name, and refuses where there is such a group.
    assert unit()["DynamicUser"] == ["yes"]
    assert made != "antiphon"
    sources = [words[-2] for words in commands if words[0] == "install" and "-d" not in words]
    assert len(sources) == 2
    assert all((ROOT / source).is_file() for source in sources)


def test_the_unit_can_be_given_a_port_below_1024() -> None:
    """A server with a certificate could not take the port that browsers come to."""
    assert unit()["CapabilityBoundingSet"] == [""]
    offered = re.findall(r"^# (\w+)=(CAP_\w+)$", UNIT, re.MULTILINE)
    wanted = ["CapabilityBoundingSet", "AmbientCapabilities"]
    assert offered == [(name, "CAP_NET_BIND_SERVICE") for name in wanted]


def test_the_unit_does_not_try_a_wrong_setting_again() -> None:
    """A typing error would be tried every two seconds, and fill the journal."""
    assert unit()["RestartPreventExitStatus"] == [str(click.UsageError.exit_code)]


def test_the_unit_may_write_where_it_records() -> None:
    """A server would start and record nothing."""
    service = unit()
    settings = settings_of({}, DEPLOY / "antiphon.toml").settings
    assert service["ProtectSystem"] == ["strict"]
    assert service["DynamicUser"] == ["yes"]
    assert settings.record_to == Path("/var/lib") / service["StateDirectory"][0]


def test_the_page_s_commands_and_variables_exist() -> None:
    """An operator would type what there is not."""
    known = {it.variable for it in SETTINGS} | OTHERS
    assert set(re.findall(r"\bANTIPHON_[A-Z0-9_]+", PAGE)) <= known | {PREFIX + "QUEUE_MAX"}
    flags = {opt for param in serve_command.params for opt in (*param.opts, *param.secondary_opts)}
    lines = re.findall(r"^\$ (antiphon .*)$", PAGE, re.MULTILINE)
    lines += re.findall(r"^(antiphon .*)$", README, re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        _, command, *words = shlex.split(line)
        assert is_command([command, *words]), line
        if command == "serve":
            assert {word for word in words if word.startswith("--")} <= flags
        if command == "keys":
            options = keys_command.commands[words[0]].params
            given = {word for word in words if word.startswith("--")}
            assert given <= {opt for param in options for opt in param.opts}
